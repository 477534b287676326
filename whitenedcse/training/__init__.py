"""From sentence vectors to a trained encoder."""

"""From sentence vectors to a trained encoder: loss, module, ranks, trainer, evaluation and loggers."""

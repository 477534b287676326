"""From a ragged batch of token ids to sentence vectors."""

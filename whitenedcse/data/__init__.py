"""Text -> sentences -> token ids -> batches."""

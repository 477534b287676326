"""What is done with a trained encoder: exports, bulk encoding, search, a demonstration."""

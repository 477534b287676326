"""Uses of a trained encoder: exports, bulk encoding, search, benchmarks, a demonstration."""

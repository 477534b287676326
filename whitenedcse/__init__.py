"""Contrastive training of sentence encoders with whitening inside."""

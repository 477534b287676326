"""Contrastive training of sentence encoders with whitening inside.

from whitenedcse import Embedder
Embedder.load("outputs/NAME").encode(["a sentence"])  # (1, d)
"""

from whitenedcse.model.embedder import Embedder

__all__ = ["Embedder"]

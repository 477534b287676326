"""An export for Sentence-Transformers: its own modules from text to final vector, no code of ours."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from whitenedcse.export import transformers
from whitenedcse.model import sentence_transformers
from whitenedcse.model.embedder import Embedder


def refuse(embedder: Embedder) -> None:
    """Raise ValueError for what that library has no modules for."""
    if not sentence_transformers.expressible(embedder.pooling):
        raise ValueError(
            f"Sentence-Transformers has no modules for pooling {embedder.pooling}: it takes the maximum of "
            "the layers' average, not the average of their maxima; use --to onnx"
        )


def write(embedder: Embedder, directory: Path) -> None:
    """Write a Transformers directory with that library's modules beside it."""
    transformers.write(embedder, directory)
    sentence_transformers.write(embedder, directory)


def vectors(embedder: Embedder, directory: Path, texts: Sequence[str]) -> NDArray[np.float32]:
    """n texts -> (n, k), by that library from the directory."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(directory), device="cpu")
    return np.asarray(model.encode(list(texts), batch_size=16, show_progress_bar=False))

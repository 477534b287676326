"""Contrastive training of sentence encoders with whitening inside.

from whitenedcse import Embedder
Embedder.load("outputs/NAME").encode(["a sentence"])  # (1, d)
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from whitenedcse.model.embedder import Embedder

__all__ = ["Embedder"]


def __getattr__(name: str) -> Any:
    """Public names, imported when they are first asked for: `whitenedcse --help` need not wait for torch."""
    if name not in __all__:
        raise AttributeError(f"module 'whitenedcse' has no attribute {name!r}")
    from whitenedcse.model.embedder import Embedder

    return Embedder

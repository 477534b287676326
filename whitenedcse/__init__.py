"""Contrastive training of sentence encoders with whitening inside.

from whitenedcse import Embedder, Index, Postprocess
embedder = Embedder.load("outputs/NAME")             # a run, a checkpoint, an encoder, a hub id
x = embedder.encode(["a sentence", "another one"])   # (2, d)
Postprocess("whitening", k=256).fit(x).transform(x)  # whitening-k; also pca, zca, centre, abtt
Index.build(embedder, ["a text"]).query(["a question"], 10)
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from whitenedcse.evaluation.postprocess import Postprocess
    from whitenedcse.model.embedder import Embedder
    from whitenedcse.serving.index import Index

# Before torch is imported, whose library reads it then. Threads that spin while they wait take the core that
# another process needs: training beside one took 4 times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

__all__ = ["Embedder", "Index", "Postprocess"]
HOMES = {"Embedder": "model.embedder", "Index": "serving.index", "Postprocess": "evaluation.postprocess"}


def __getattr__(name: str) -> Any:
    """Public names, imported when they are first asked for: `whitenedcse --help` need not wait for torch."""
    if name not in __all__:
        raise AttributeError(f"module 'whitenedcse' has no attribute {name!r}")
    return getattr(import_module(f"whitenedcse.{HOMES[name]}"), name)

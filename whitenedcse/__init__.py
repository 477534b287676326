"""Contrastive training of sentence encoders with whitening inside.

import whitenedcse
from whitenedcse import Embedder, Index, Postprocess
run = whitenedcse.train("bert-base-uncased", "my.txt", output="outputs/NAME")
whitenedcse.evaluate("outputs/NAME", tasks=["STS-B"])
embedder = Embedder.load("outputs/NAME")             # a run, a checkpoint, an encoder, a hub id
x = embedder.encode(["a sentence", "another one"])   # (2, d)
Postprocess("whitening", k=256).fit(x).transform(x)  # whitening-k; also zca, pca, ...
Index.build(embedder, ["a text"]).query(["a question"], 10)
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from whitenedcse.app.python import evaluate, train
    from whitenedcse.data.datamodule import SentenceData
    from whitenedcse.evaluation.postprocess import Postprocess
    from whitenedcse.model.embedder import Embedder
    from whitenedcse.model.encoder import pretrained
    from whitenedcse.model.head import Pooling, ProjectionHead
    from whitenedcse.model.lora import LoRA
    from whitenedcse.model.whitener import Whitener
    from whitenedcse.run import Run
    from whitenedcse.serving.export import export
    from whitenedcse.serving.fit import whitened
    from whitenedcse.serving.readout import readout
    from whitenedcse.serving.search import Index
    from whitenedcse.training.loss import ContrastiveLoss, Matryoshka
    from whitenedcse.training.module import ContrastiveTraining
    from whitenedcse.training.terms import CovariancePenalty

# Before torch is imported, whose library reads it then. Threads that spin while they wait take the core that
# another process needs: training beside one took 4 times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

__all__ = [
    "ContrastiveLoss",
    "ContrastiveTraining",
    "CovariancePenalty",
    "Embedder",
    "Index",
    "LoRA",
    "Matryoshka",
    "Pooling",
    "Postprocess",
    "ProjectionHead",
    "Run",
    "SentenceData",
    "Whitener",
    "evaluate",
    "export",
    "pretrained",
    "readout",
    "train",
    "whitened",
]
HOMES = {
    "app.python": ["evaluate", "train"],
    "run": ["Run"],
    "data.datamodule": ["SentenceData"],
    "evaluation.postprocess": ["Postprocess"],
    "model.embedder": ["Embedder"],
    "model.encoder": ["pretrained"],
    "model.head": ["Pooling", "ProjectionHead"],
    "model.lora": ["LoRA"],
    "model.whitener": ["Whitener"],
    "serving.export": ["export"],
    "serving.fit": ["whitened"],
    "serving.readout": ["readout"],
    "serving.search": ["Index"],
    "training.loss": ["ContrastiveLoss", "Matryoshka"],
    "training.module": ["ContrastiveTraining"],
    "training.terms": ["CovariancePenalty"],
}


def __getattr__(name: str) -> Any:
    """Public names, imported when they are first asked for: `whitenedcse --help` need not wait for torch."""
    if name not in __all__:
        raise AttributeError(f"module 'whitenedcse' has no attribute {name!r}")
    home = next(module for module, names in HOMES.items() if name in names)
    return getattr(import_module(f"whitenedcse.{home}"), name)


def __dir__() -> list[str]:
    """The public names, for help() and completion."""
    return __all__

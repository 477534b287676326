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

if TYPE_CHECKING:  # for programs that read the code; `HOMES` says the same to those that run it
    from whitenedcse.app.python import evaluate as evaluate
    from whitenedcse.app.python import train as train
    from whitenedcse.data.datamodule import SentenceData as SentenceData
    from whitenedcse.evaluation.postprocess import Postprocess as Postprocess
    from whitenedcse.model.embedder import Embedder as Embedder
    from whitenedcse.model.encoder import pretrained as pretrained
    from whitenedcse.model.head import Pooling as Pooling
    from whitenedcse.model.head import ProjectionHead as ProjectionHead
    from whitenedcse.model.lora import LoRA as LoRA
    from whitenedcse.model.whitener import Whitener as Whitener
    from whitenedcse.run import Run as Run
    from whitenedcse.serving.export import export as export
    from whitenedcse.serving.fit import whitened as whitened
    from whitenedcse.serving.readout import readout as readout
    from whitenedcse.serving.search import Index as Index
    from whitenedcse.training.loss import ContrastiveLoss as ContrastiveLoss
    from whitenedcse.training.loss import Matryoshka as Matryoshka
    from whitenedcse.training.module import ContrastiveTraining as ContrastiveTraining
    from whitenedcse.training.terms import CovariancePenalty as CovariancePenalty

# Before torch is imported, whose library reads it then. Threads that spin while they wait take the core that
# another process needs: training beside one took 4 times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

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
__all__ = sorted(name for names in HOMES.values() for name in names)


def __getattr__(name: str) -> Any:
    """Public names, imported when they are first asked for: `whitenedcse --help` need not wait for torch."""
    for module, names in HOMES.items():
        if name in names:
            return getattr(import_module(f"whitenedcse.{module}"), name)
    raise AttributeError(f"module 'whitenedcse' has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names, for help() and completion."""
    return __all__

"""Score a sentence encoder: python evaluate.py model=MODEL [key=value ...]; --help explains."""

from __future__ import annotations

from functools import partial

import hydra
import numpy as np
import rich
import torch
from numpy.typing import NDArray
from omegaconf import DictConfig, OmegaConf

from whitenedcse import launch
from whitenedcse.evaluation.correlation import evaluate
from whitenedcse.evaluation.suite import subsets
from whitenedcse.model import checkpoint
from whitenedcse.model.encoder import folder
from whitenedcse.model.pooling import Pooling
from whitenedcse.report import record
from whitenedcse.report.tables import sts_table


@hydra.main(version_base="1.3", config_path="conf", config_name="evaluate")
def judge(cfg: DictConfig) -> float | None:
    """One model on its tasks; returns the average, all pairs of a task together."""
    run = launch.checked(cfg)
    names = list(cfg.tasks.names)
    _, *pairs = launch.require([lambda: folder(cfg.model), *(partial(subsets, name) for name in names)])
    record.start(run, OmegaConf.to_yaml(cfg, resolve=True))
    embedder = checkpoint.load(cfg.model, pooling(cfg)).to("cuda" if torch.cuda.is_available() else "cpu")
    launch.say(f"model: {cfg.model}   pooling: {embedder.pooling}   embedding: {embedder.embedding}")
    bar = rich.get_console().is_terminal

    def encode(sentences: list[str]) -> NDArray[np.float32]:
        launch.say(f"encoding {len(sentences):,} distinct sentences")
        return embedder.encode(sentences, progress=bar)

    scores = evaluate(dict(zip(names, pairs, strict=True)), encode)
    record.write_json(run / "scores.json", {"model": cfg.model, "pooling": str(embedder.pooling), **scores})
    launch.say(sts_table(scores))
    launch.end([], run)
    return scores["avg"]["all"]


def pooling(cfg: DictConfig) -> Pooling | None:
    """What the command line asks for; None where it says nothing."""
    asked = cfg.get("pooling")
    if asked is None and cfg.layers is None:
        return None
    layers = cfg.layers if cfg.layers is not None else asked.layers
    return Pooling(kind=asked.kind if asked is not None else "cls", layers=layers)


if __name__ == "__main__":
    launch.start(judge)

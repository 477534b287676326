"""Train a sentence encoder: python train.py [+experiment=NAME] [key=value ...]; --help explains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hydra
import rich
from hydra.utils import instantiate
from lightning import Trainer, seed_everything
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint, RichProgressBar
from lightning.pytorch.loggers import CSVLogger, Logger
from omegaconf import DictConfig, OmegaConf

from whitenedcse import launch
from whitenedcse.data.datamodule import SentenceData
from whitenedcse.data.sources import located
from whitenedcse.evaluation.suite import subsets
from whitenedcse.model.embedder import Embedder
from whitenedcse.model.encoder import folder
from whitenedcse.report import record
from whitenedcse.report.tables import training_table
from whitenedcse.training.module import ContrastiveTraining
from whitenedcse.training.monitor import Monitor
from whitenedcse.training.progress import PlainProgress


@hydra.main(version_base="1.3", config_path="conf", config_name="train")
def train(cfg: DictConfig) -> float | None:
    """One run; returns the best dev score, for a sweeper to maximise."""
    run = launch.checked(cfg)
    require_inputs(cfg)
    record.start(run, OmegaConf.to_yaml(cfg, resolve=True))
    seed_everything(cfg.seed, verbose=False)
    module, data = built(cfg)
    (dev,) = subsets(cfg.monitor.dev)
    monitor: Monitor = instantiate(cfg.monitor)(dev=dev, directory=run / "best", say=launch.say)
    keep = ModelCheckpoint(
        run / "checkpoints", "last", every_n_train_steps=monitor.every, enable_version_counter=False
    )
    bar = RichProgressBar() if rich.get_console().is_terminal else PlainProgress(say=launch.say)
    loggers: list[Logger] = [CSVLogger(run.parent, name=run.name, version="")]
    if cfg.logger:
        loggers.append(instantiate(cfg.logger)(run=run))
    callbacks = [monitor, LearningRateMonitor("step"), bar, keep]
    trainer: Trainer = instantiate(cfg.trainer)(logger=loggers, callbacks=callbacks)
    if launch.is_multirun() and trainer.world_size > 1:
        raise ValueError(
            f"-m with {trainer.world_size} devices would restart the sweep in each; add trainer.devices=1"
        )
    data.setup("fit")
    launch.say(data.counts)
    trainer.fit(module, data)
    trainer.save_checkpoint(run / "checkpoints" / "last.ckpt")
    if not trainer.is_global_zero:
        return None
    summary = monitor.summary()
    record.write_json(run / "scores.json", {"dev": summary})
    launch.say(training_table(summary))
    launch.say(
        f"best checkpoint: {run / 'best'}   metrics: {run / 'metrics.csv'}   scores: {run / 'scores.json'}"
    )
    launch.end(loggers, run)
    return summary["best"]


def require_inputs(cfg: DictConfig) -> None:
    """Find (or fetch) encoder, corpus and dev set before anything else; say all that is missing in one go."""
    wanted: list[Callable[[], Any]] = [lambda: located(cfg.data.corpus), lambda: subsets(cfg.monitor.dev)]
    if "path" in cfg.encoder:
        wanted.insert(0, lambda: folder(cfg.encoder.path))
    launch.require(wanted)


def built(cfg: DictConfig) -> tuple[ContrastiveTraining, SentenceData]:
    """The module and its data."""
    encoder = instantiate(cfg.encoder)
    head = instantiate(cfg.head)(width=encoder.width)
    embedder = Embedder(encoder=encoder, pooling=instantiate(cfg.pooling), head=head, embedding=cfg.embedding)
    mlm = instantiate(cfg.mlm)(encoder=encoder) if cfg.mlm.weight else None
    data: SentenceData = instantiate(cfg.data)
    data.tokenizer = encoder.tokenizer
    parts = {
        "embedder": embedder,
        "loss": instantiate(cfg.loss),
        "optimizer": instantiate(cfg.optim),
        "mlm": mlm,
    }
    return ContrastiveTraining(**parts, views=cfg.views), data


if __name__ == "__main__":
    launch.start(train)

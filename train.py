"""Train a sentence encoder: python train.py [+experiment=NAME] [key=value ...]; --help explains."""

from __future__ import annotations

import hydra
from hydra.utils import instantiate
from lightning import Trainer, seed_everything
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from omegaconf import DictConfig, OmegaConf

from whitenedcse import launch
from whitenedcse.data.datamodule import SentenceData
from whitenedcse.data.sources import located
from whitenedcse.evaluation.sts import Subset
from whitenedcse.evaluation.tasks import subsets
from whitenedcse.model.embedder import Embedder
from whitenedcse.model.encoder import folder
from whitenedcse.report import record
from whitenedcse.report.tables import training_grid
from whitenedcse.training.loggers import csv_logger
from whitenedcse.training.module import ContrastiveTraining
from whitenedcse.training.monitor import Monitor
from whitenedcse.training.progress import progress_bar


@hydra.main(version_base="1.3", config_path="conf", config_name="train")
@launch.job
def train(cfg: DictConfig) -> float | None:
    """One run; returns the best dev score, for a sweeper to maximise."""
    run = launch.checked(cfg)
    dev = required(cfg)
    facts = {"experiment": launch.experiment(), "seed": cfg.seed}
    record.start(run, OmegaConf.to_yaml(cfg, resolve=True), **facts)
    seed_everything(cfg.seed, verbose=False)
    module, data = built(cfg)
    monitor: Monitor = instantiate(cfg.monitor)(dev=dev, directory=run / "best", say=launch.say)
    keep = ModelCheckpoint(run / "checkpoints", "last", every_n_train_steps=monitor.every)
    callbacks = [monitor, LearningRateMonitor("step"), progress_bar(launch.say), keep]
    loggers = [csv_logger(run), *([instantiate(cfg.logger)(run=run)] if cfg.logger else [])]
    trainer: Trainer = instantiate(cfg.trainer)(logger=loggers, callbacks=callbacks)
    launch.refuse_restart(trainer.world_size)
    data.setup("fit")
    launch.say(data.counts)
    trainer.fit(module, data)
    trainer.save_checkpoint(run / "checkpoints" / "last.ckpt")
    if not trainer.is_global_zero:
        return None
    summary = monitor.summary()
    record.write_json(run / "scores.json", {"dev": summary})
    launch.show([training_grid(summary)])
    launch.say(f"best checkpoint: {run}/best   metrics: {run}/metrics.csv   scores: {run}/scores.json")
    launch.end(loggers, run)
    return summary["best"]


def required(cfg: DictConfig) -> list[Subset]:
    """The dev set, once encoder and corpus are found or fetched too; all that is missing is said at once."""
    encoder = [lambda: folder(cfg.encoder.path)] if "path" in cfg.encoder else []
    return launch.require([*encoder, lambda: located(cfg.data.corpus), lambda: subsets(cfg.monitor.dev)])[-1]


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

"""Train a sentence encoder: python train.py [+experiment=NAME] [key=value ...]; --help explains."""

from __future__ import annotations

from functools import partial
from typing import Any

import hydra
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from evaluate import scored
from whitenedcse.app import arguments, configuration, launch
from whitenedcse.app.run import Run


@hydra.main(version_base="1.3", config_path="conf", config_name="train")
@launch.job
def train(cfg: DictConfig) -> float | None:
    """One run, begun or resumed; returns the best dev score, for a sweeper to maximise."""
    run, settings = configuration.checked(cfg), OmegaConf.to_yaml(cfg, resolve=True)
    plain = instantiate(cfg.trainer)(logger=False)
    if launch.mine(run, settings, plain.num_devices, cfg.trainer.timeout):
        trained(cfg, run, settings, plain.strategy.root_device)
    return run.best_score


def trained(cfg: DictConfig, run: Run, settings: str, device: Any) -> None:
    """Train in this process, alone or as one of several ranks."""
    # PyTorch and Lightning take seconds to import: the settings are checked before
    from whitenedcse.training.heartbeat import Heartbeat
    from whitenedcse.training.loggers import Metrics, Record, progress_bar
    from whitenedcse.training.module import seed_everything
    from whitenedcse.training.monitor import Health
    from whitenedcse.training.trainer import Safekeeping

    tests, dev = arguments.inputs(cfg)
    seed_everything(cfg.seed)
    module, data = built(cfg)
    attention = module.embedder.encoder.attention(device)
    launch.say(f"{data.counts}; attention: {attention}")
    facts = {**launch.origin(cfg, module.embedder.encoder), "device": device.type, "attention": attention}
    exact = data.tokens.digests | launch.content(cfg, module.embedder.encoder, tests, dev)
    checkpoint = launch.begin(run, settings, facts, exact)
    monitor = instantiate(cfg.monitor)(dev=dev, directory=run.best, say=launch.say)
    keep = Safekeeping(run.checkpoints, cfg.checkpoint_every, monitor.every, settings, launch.say)
    callbacks = [
        Heartbeat(cfg.trainer.timeout),
        keep,
        Record(),
        monitor,
        Health(monitor, launch.say),
        progress_bar(launch.say),
    ]
    extra = [instantiate(cfg.logger)(run=run.path)] if cfg.logger else []
    loggers = [Metrics(run.metrics, checkpoint), *extra]
    trainer: Any = instantiate(cfg.trainer)(logger=loggers, callbacks=callbacks)
    trainer.fit(module, data, ckpt_path=checkpoint, weights_only=True)
    if trainer.is_global_zero:
        asked = configuration.tests(cfg, run)
        launch.finish(run, monitor.summary(), loggers, partial(scored, asked) if asked else None)


def built(cfg: DictConfig) -> tuple[Any, Any]:
    """The ContrastiveTraining module and its SentenceData."""
    from whitenedcse.model.embedder import Embedder
    from whitenedcse.training.module import ContrastiveTraining

    encoder = instantiate(cfg.encoder)
    made: Any = {"head": instantiate(cfg.head)(width=encoder.width), "pooling": instantiate(cfg.pooling)}
    data: Any = instantiate(cfg.data)
    data.tokenizer = encoder.tokenizer
    data.setup("fit")
    parts = {
        "embedder": Embedder(encoder=encoder, **made, embedding=cfg.embedding, prompt=data.prompt),
        "loss": instantiate(cfg.loss),
        "optimizer": instantiate(cfg.optim),
        "mlm": instantiate(cfg.mlm)(encoder=encoder) if cfg.mlm.weight else None,
    }
    settings = {"views": cfg.views, "seed": cfg.seed, "gather": cfg.gather, "chunk": cfg.trainer.chunk}
    return ContrastiveTraining(**parts, **settings), data


if __name__ == "__main__":
    launch.start(train)

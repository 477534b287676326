"""Loggers beside metrics.csv."""

from __future__ import annotations

import csv
import netrc
import os
import secrets
import socket
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import ParseResult, urlparse

from lightning import Callback, Trainer
from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities import rank_zero_only

from whitenedcse.durable import settle, writing
from whitenedcse.training.checkpoints import step_of


class Metrics(Logger):
    """metrics.csv: the record that every run has, a line for each time that something was logged.

    step: optimiser steps done when the values were taken. A run that goes on from a checkpoint keeps the
    lines up to it, and writes the later ones again.
    """

    name, version = "metrics", ""

    def __init__(self, path: Path, checkpoint: Path | None) -> None:
        super().__init__()
        self.path = path
        self.columns = ["step"]
        self.keep(step_of(checkpoint) if checkpoint else -1)

    @rank_zero_only
    def keep(self, step: int) -> None:
        """Drop what was logged after this step."""
        lines = self.lines()
        self.columns = list(lines[0]) if lines else ["step"]
        self.rewrite([line for line in lines if int(line["step"]) <= step])

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Append a line; a new name makes a new column."""
        line = {"step": step, **metrics}
        if new := [name for name in line if name not in self.columns]:
            lines = self.lines()
            self.columns += new
            self.rewrite([*lines, line])
        else:
            with self.path.open("a") as stream:
                csv.DictWriter(stream, self.columns, lineterminator="\n").writerow(line)

    def lines(self) -> list[dict[str, str]]:
        """What the file holds; a line that a kill cut short is no line."""
        text = self.path.read_text() if self.path.exists() else ""
        return list(csv.DictReader(text[: text.rfind("\n") + 1].splitlines()))

    def rewrite(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Replace the file."""
        with writing(self.path, "w") as stream:
            table = csv.DictWriter(stream, self.columns, lineterminator="\n")
            table.writeheader()
            table.writerows(lines)

    @rank_zero_only
    def save(self) -> None:
        """Put the lines on the disk."""
        if self.path.exists():
            settle(self.path)

    def log_hyperparams(self, *arguments: Any, **more: Any) -> None:
        """config.yaml has them."""


class Record(Callback):
    """Logs train/loss, its parts and the learning rate every `trainer.log_every_n_steps` optimiser steps."""

    lr = 0.0
    step = 0

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        """The rate that this step takes; afterwards the schedule has moved on."""
        self.lr, self.step = trainer.optimizers[0].param_groups[0]["lr"], trainer.global_step

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Log if this batch ended a step that is due."""
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if trainer.global_step > self.step and trainer.global_step % every == 0:
            values = {k: float(v) for k, v in trainer.callback_metrics.items() if k.startswith("train/")}
            for logger in trainer.loggers:
                logger.log_metrics(values | {"train/lr": self.lr}, step=trainer.global_step)


def wandb_logger(*, project: str, run: Path) -> WandbLogger:
    """One Weights & Biases run, offline unless there is a key and the server answers: it never hangs.

    A run directory has one id for good, so that a run that goes on is the same run there.
    """
    os.environ.setdefault("WANDB_INIT_TIMEOUT", "30")
    mode = os.environ.get("WANDB_MODE")
    offline = mode in ("offline", "dryrun") or (mode is None and not (has_key() and answers()))
    known = run / "wandb" / "id"
    if not known.exists():
        known.parent.mkdir(parents=True, exist_ok=True)
        known.write_text(secrets.token_hex(4))
    settings: dict[str, Any] = {"name": run.name, "save_dir": run, "offline": offline}
    return WandbLogger(project=project, id=known.read_text(), resume="allow", **settings)


def tensorboard_logger(*, run: Path) -> TensorBoardLogger:
    """TensorBoard event files in the run directory."""
    return TensorBoardLogger(save_dir=run.parent, name=run.name, version="", sub_dir="tensorboard")


def has_key() -> bool:
    """Whether an account's key is set for this process, or stored by `wandb login`."""
    with suppress(OSError, netrc.NetrcParseError):
        if netrc.netrc().authenticators(server().hostname or ""):
            return True
    return bool(os.environ.get("WANDB_API_KEY"))


def server() -> ParseResult:
    """The address of the Weights & Biases server."""
    return urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai"))


def answers(seconds: float = 3.0) -> bool:
    """Whether the Weights & Biases server takes a connection."""
    url = server()
    try:
        port = url.port or (443 if url.scheme == "https" else 80)
        with socket.create_connection((url.hostname or "", port), timeout=seconds):
            return True
    except OSError:
        return False

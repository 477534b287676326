"""Loggers beside metrics.csv."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lightning import Callback, Trainer
from lightning.pytorch.loggers import Logger, TensorBoardLogger
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


def tensorboard_logger(*, run: Path) -> TensorBoardLogger:
    """TensorBoard event files in the run directory."""
    return TensorBoardLogger(save_dir=run.parent, name=run.name, version="", sub_dir="tensorboard")

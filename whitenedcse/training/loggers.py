"""metrics.csv, the other loggers, and the progress of training: a bar in a terminal, lines elsewhere."""

from __future__ import annotations

import csv
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import rich
import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar, RichProgressBar
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from tqdm import tqdm

from whitenedcse.evaluation.geometry import diversity
from whitenedcse.files import naming, settle, table, writing
from whitenedcse.training.checkpoints import step_of


class Metrics(Logger):
    """The logger of metrics.csv: a line for each time that something was logged, at `step` optimiser steps.

    A run that resumes from a checkpoint keeps the lines up to it, and writes the later ones again.
    """

    name, version = "metrics", ""

    def __init__(self, path: Path, checkpoint: Path | None) -> None:
        super().__init__()
        self.path = path
        self.columns = ["step"]
        self.keep(step_of(checkpoint) if checkpoint else -1)

    @rank_zero_only
    def keep(self, step: int) -> None:
        """Drop what was logged after this step, and the tests, which follow the last checkpoint."""
        lines = table(self.path)
        self.columns = list(lines[0]) if lines else ["step"]
        tests = [name for name in self.columns if name.startswith("test/")]
        before = [line for line in lines if not any(line[name] for name in tests)]
        self.rewrite([line for line in before if int(line["step"]) <= step])

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Append a line; a new name adds a column."""
        line = {"step": step, **metrics}
        if new := [name for name in line if name not in self.columns]:
            lines = table(self.path)
            self.columns += new
            self.rewrite([*lines, line])
        else:
            with naming(self.path), self.path.open("a") as stream:
                csv.DictWriter(stream, self.columns, lineterminator="\n").writerow(line)

    def rewrite(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Replace the content of the file by these lines."""
        with writing(self.path, "w") as stream:
            writer = csv.DictWriter(stream, self.columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(lines)

    @rank_zero_only
    def save(self) -> None:
        """Make sure that the lines are on disk."""
        if self.path.exists():
            settle(self.path)

    def log_hyperparams(self, *arguments: Any, **more: Any) -> None:
        """Do nothing: config.yaml has the settings."""


class Record(Callback):
    """Logs loss, learning rate, speed and diversity of views every `log_every_n_steps` optimiser steps.

    A run of fewer steps logs the last one.

    train/sentences_per_second: rows of the batches of all ranks, divided by the time since the last line,
        without the time that callbacks report as spent `evaluating`. train/load: of the first rank's machine
        over the last minute, where the system tells it. train/diversity_before,
        train/diversity_after: `diversity` of the views before and after the head's first whitening, where
        there is one; those of the first rank, where ranks do not gather.
    """

    lr = 0.0
    step = 0
    every: float = 1
    sentences = 0  # since the last line
    began: float | None = None
    due = False
    hook: RemovableHandle | None = None

    def __init__(self) -> None:
        self.diversity: dict[str, Tensor] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Observe the head's first whitening from now on."""
        self.every = min(trainer.log_every_n_steps or math.inf, trainer.estimated_stepping_batches)  # type: ignore[attr-defined]
        module: Any = pl_module
        if whitener := module.embedder.head.before or module.embedder.head.after:
            self.hook = whitener.register_forward_hook(partial(self.look, module.views))

    @torch.no_grad()
    def look(self, views: Any, whitener: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        """Measure the diversity of views before and after whitening, without those of hard negatives."""
        if self.due and whitener.training:
            for side, x in (("before", inputs[0]), ("after", output)):
                self.diversity[f"train/diversity_{side}"] = diversity(x[:views])

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        """Note the learning rate of this step, before the schedule changes it."""
        self.lr, self.step = trainer.optimizers[0].param_groups[0]["lr"], trainer.global_step
        self.due = (self.step + 1) % self.every == 0
        self.began = clock(trainer) if self.began is None else self.began

    def on_train_batch_end(  # noqa: PLR0913  Lightning's signature
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log if this batch ended a step that is due."""
        self.sentences += batch.n * trainer.world_size
        if trainer.global_step > self.step and self.due:
            logged = {k: v for k, v in trainer.callback_metrics.items() if k.startswith("train/")}
            values = {name: float(value) for name, value in (logged | self.diversity).items()}
            now = clock(trainer)  # the device is done: the loss was read
            assert self.began is not None
            values |= {"train/lr": self.lr, "train/sentences_per_second": self.sentences / (now - self.began)}
            if hasattr(os, "getloadavg"):  # a speed counts only where the run had the machine to itself
                values["train/load"] = os.getloadavg()[0]
            self.began, self.sentences = now, 0
            for logger in trainer.loggers:
                logger.log_metrics(values, step=trainer.global_step)

    def on_train_end(self, *_: Any) -> None:
        """Stop observing the whitening."""
        if self.hook is not None:
            self.hook.remove()


def clock(trainer: Any) -> float:
    """A clock in seconds that stands still while callbacks evaluate."""
    return time.perf_counter() - sum(getattr(callback, "evaluating", 0.0) for callback in trainer.callbacks)


def tensorboard_logger(*, run: Path) -> TensorBoardLogger:
    """TensorBoard event files in the run directory."""
    return TensorBoardLogger(save_dir=run.parent, name=run.name, version="", sub_dir="tensorboard")


LINES = 20  # in a run


def progress_bar(say: Callable[[str], None]) -> ProgressBar:
    """Lightning's bar in a terminal; plain lines elsewhere."""
    return Bar() if rich.get_console().is_terminal else PlainProgress(say=say)


class Bar(RichProgressBar):
    """Lightning's progress bar, with the loss read from the device once a second, not at every step."""

    shown: dict[str, Any]
    read = 0.0

    @property
    def total_train_batches(self) -> float:
        """The batches of this epoch, as far as trainer.max_steps lets it come."""
        every, steps = self.trainer.num_training_batches, self.trainer.max_steps
        left = steps * self.trainer.accumulate_grad_batches - self.trainer.current_epoch * every
        return every if steps < 0 else min(every, left)

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        """The values shown beside the bar."""
        if time.monotonic() - self.read >= 1:
            self.shown, self.read = {"loss": loss(trainer)}, time.monotonic()
        return super().get_metrics(trainer, pl_module) | self.shown


def loss(trainer: Trainer) -> float:
    """The loss of the last step; NaN before the first."""
    return float(trainer.callback_metrics.get("train/loss", float("nan")))


class PlainProgress(ProgressBar):
    """A line after about every twentieth part of the run: step, loss, speed and time left."""

    def __init__(self, *, say: Callable[[str], None]) -> None:
        super().__init__()
        self.say = say

    def disable(self) -> None:
        """Do nothing on other ranks than the first: `console.say` prints nothing there."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock, after the evaluation of the untrained encoder."""
        self.began, self.first = time.monotonic(), trainer.global_step
        self.last = self.first

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Print a line, if one is due."""
        step, total = trainer.global_step, int(trainer.estimated_stepping_batches)
        if step == self.last or (step % max(1, total // LINES) and step != total):
            return
        self.last = step
        pace = (time.monotonic() - self.began) / (step - self.first)  # of a run that resumes, since it did
        left = tqdm.format_interval(0 if trainer.should_stop else pace * (total - step))
        self.say(f"step {step}/{total}  loss {loss(trainer):#.4g}  {1 / pace:.2f} steps/s  left {left}")

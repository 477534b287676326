"""Progress where there is no terminal to draw a bar in: plain lines, and few of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import rich
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar, RichProgressBar

LINES = 20  # in a run


def progress_bar(say: Callable[[str], None]) -> ProgressBar:
    """A bar in a terminal, plain lines elsewhere."""
    return Bar() if rich.get_console().is_terminal else PlainProgress(say=say)


class Bar(RichProgressBar):
    """Lightning's bar, with the loss read from the device once a second, not every step."""

    shown: dict[str, Any]
    read = 0.0

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        """The numbers beside the bar."""
        if time.monotonic() - self.read >= 1:
            self.shown = {"loss": loss(trainer)}
            self.read = time.monotonic()
        return super().get_metrics(trainer, pl_module) | self.shown


def loss(trainer: Trainer) -> float:
    """That of the last step."""
    return float(trainer.callback_metrics.get("train/loss", float("nan")))


class PlainProgress(ProgressBar):
    """A line at about every twentieth part of the run: step, loss, speed and time left."""

    def __init__(self, *, say: Callable[[str], None]) -> None:
        super().__init__()
        self.say = say
        self.began = 0.0

    def disable(self) -> None:
        """Lightning silences the ranks that are not the first."""
        self.say = lambda text: None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The clock starts after the score of the untouched encoder."""
        self.began = time.monotonic()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """One line, if it is time for one."""
        step, total = trainer.global_step, int(trainer.estimated_stepping_batches)
        if step % max(1, total // LINES) and step != total:
            return
        pace = (time.monotonic() - self.began) / max(1, step)
        left = time.strftime("%H:%M:%S", time.gmtime(pace * (total - step)))
        self.say(f"step {step}/{total}  loss {loss(trainer):.4f}  {1 / pace:.2f} steps/s  left {left}")

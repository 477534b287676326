"""Nothing is lost: checkpoints that cost little, a clean end when asked, a stop at a bad number."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from torch import Tensor

from whitenedcse.ranks import ASKING
from whitenedcse.training.gather import agreed, everyones

SHARE = 50  # of the time between two checkpoints, what writing one may take: a 50th part


class Safekeeping(Callback):
    """Writes a checkpoint into `directory` every few seconds, and at once when asked to stop.

    seconds: between two checkpoints, or 50 times what one takes to write, whichever is longer. Between two
        optimiser steps only: no gradient is lost.
    judged: optimiser steps between judgements, before which the loss must be known to be finite.
    settings: the resolved configuration, which all ranks must share.
    """

    def __init__(
        self, directory: Path, seconds: float, judged: int, settings: str, say: Callable[[str], None]
    ) -> None:
        self.directory, self.seconds, self.judged = directory, seconds, judged
        self.settings, self.say = settings, say
        self.asked = 0
        self.last, self.pause = time.monotonic(), seconds
        self.saved = 0  # optimiser steps in the newest checkpoint
        self.bad: Tensor | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Raise ValueError on every rank if one has another configuration."""
        first, *rest = (text.splitlines() for text in everyones(self.settings))
        for rank, other in enumerate(rest, start=1):
            if other != first:
                lines = next(pair for pair in zip_longest(first, other, fillvalue="") if pair[0] != pair[1])
                raise ValueError(
                    f"rank {rank} has {lines[1].strip()!r} where rank 0 has {lines[0].strip()!r}"
                )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Listen to signals from now on, instead of Lightning."""
        self.bad = torch.full((), -1, device=pl_module.device)
        for number in ASKING:
            signal.signal(number, self.hear)

    def hear(self, number: int, _: Any) -> None:
        """Remember a signal until the step is done; a second Ctrl-C ends the process at once."""
        if number == self.asked == signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.asked = number
        self.say("stopping after this step; Ctrl-C again stops at once, at the last checkpoint")

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, index: int
    ) -> None:
        """Between two optimiser steps: save if it is time, and end if any rank was asked to."""
        if index % trainer.accumulate_grad_batches:
            return
        votes = agreed(self.asked, time.monotonic() - self.last >= self.pause)
        asked = max(vote[0] for vote in votes)
        if trainer.global_step > self.saved and (asked or votes[0][1]):
            self.save(trainer)
        if asked:
            self.stop(trainer, asked)

    def on_train_batch_end(  # noqa: PLR0913  Lightning's signature
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Watch the loss; nothing waits for the device unless a number is due."""
        at = pl_module.current_epoch * int(trainer.num_training_batches) + batch_idx
        assert self.bad is not None
        finite = outputs["loss"].isfinite().logical_or(self.bad >= 0)
        self.bad = torch.where(finite, self.bad, at)
        due = (trainer.log_every_n_steps, self.judged)  # type: ignore[attr-defined]
        if any(trainer.global_step % steps == 0 for steps in due):
            self.refuse_bad(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Before the last judgement."""
        self.refuse_bad(trainer)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: Any) -> None:
        """This checkpoint is there already."""
        self.saved = checkpoint["global_step"]

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The last checkpoint, after the last judgement."""
        if trainer.global_step > self.saved:
            self.save(trainer)

    def save(self, trainer: Trainer) -> None:
        """Write a checkpoint of a state that is known to be good."""
        self.refuse_bad(trainer)
        for logger in trainer.loggers:
            logger.save()
        began = time.monotonic()
        trainer.save_checkpoint(self.directory)
        self.saved, self.last = trainer.global_step, time.monotonic()
        self.pause = max(self.seconds, SHARE * (self.last - began))

    def refuse_bad(self, trainer: Trainer) -> None:
        """Raise ValueError if a loss was not finite, naming its batch."""
        if self.bad is None or (at := int(self.bad)) < 0:
            return
        batches = int(trainer.num_training_batches)
        epoch, batch = divmod(at, batches)
        rows: list[int] = trainer.train_dataloader.sampler.rows_of(epoch, batch).tolist()  # type: ignore[union-attr]
        step = (
            epoch * -(-batches // trainer.accumulate_grad_batches) + batch // trainer.accumulate_grad_batches
        )
        raise ValueError(
            f"the loss of step {step + 1} is not finite (epoch {epoch}, batch {batch}, rows"
            f" {', '.join(map(str, rows[:5]))} ... of the corpus); the checkpoint of step {self.saved} stays."
            " A lower optim.lr, a higher loss.temperature or trainer.precision=32-true may help"
        )

    def stop(self, trainer: Trainer, number: int) -> None:
        """End the process with 128 + the signal; give a SLURM job back to its queue if its time was over."""
        run = self.directory.parent
        self.say(f"{run} stopped after step {self.saved}; the same command, with run= its name, goes on")
        job = os.environ.get("SLURM_JOB_ID")
        if number not in (signal.SIGTERM, signal.SIGINT) and job and trainer.is_global_zero:
            with suppress(OSError):  # no scontrol here, e.g. in a container
                subprocess.run(["scontrol", "requeue", job], check=False)
        raise SystemExit(128 + number)

"""Checkpoints that survive a kill: written whole, verified when read, resumed from.

A file is named step-S-H.ckpt: S optimiser steps were done, and H is the start of the SHA-256 of its bytes.
A run ends cleanly when asked to, and stops at a loss that is not finite.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning import Callback, LightningModule
from lightning.fabric.plugins import CheckpointIO

from whitenedcse import files
from whitenedcse.distributed import ASKING
from whitenedcse.files import settle, sha256, writing
from whitenedcse.training.parallel import agreed, everyones, meet

KEEP = 2  # the newest ones: the last, and one to fall back on


class Checkpoints(CheckpointIO):
    """How checkpoints are written and read: into a folder, as tensors and plain values only."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write a checkpoint completely, then name it and delete all but it and the previous one."""
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        draft = folder / "draft"
        with writing(draft) as stream:
            torch.save(checkpoint, stream)
        draft.rename(folder / f"step-{checkpoint['global_step']:08}-{sha256(draft)[:16]}.ckpt")
        settle(folder)
        for path in written(folder)[KEEP:]:
            path.unlink()

    def load_checkpoint(self, path: Any, map_location: Any = "cpu", weights_only: Any = True) -> Any:
        """The content of one checkpoint file."""
        return files.checkpoint(Path(path), "delete it, and the run resumes from the one before")

    def remove_checkpoint(self, path: Any) -> None:
        """Delete one checkpoint file."""
        Path(path).unlink(missing_ok=True)


def written(folder: Path) -> list[Path]:
    """The checkpoints in a folder, the newest first."""
    return sorted(folder.glob("step-*.ckpt"), key=step_of, reverse=True)


def newest(folder: Path, say: Callable[[str], None]) -> Path | None:
    """The newest checkpoint that is undamaged; None if there never was one. `say` is told of any other."""
    paths = written(folder)
    for path in paths:
        if path.stem.endswith(sha256(path)[:16]):
            return path
        say(f"{path} is damaged: its content no longer has the checksum in its name; it is skipped")
    if paths:
        raise ValueError(f"{folder}: every checkpoint is damaged; delete {folder.parent} to start again")
    return None


def step_of(path: Path) -> int:
    """The number of optimiser steps done when a checkpoint was written."""
    return int(path.name.split("-")[1])


Say = Callable[[str], None]
SAME = "the same command"
SHARE = 50  # of the time between two checkpoints, what writing one may take: a 50th part
VOTES = 10  # optimiser steps between two questions to the other ranks' hosts, for which GPUs would wait


class Safekeeping(Callback):
    """Writes a checkpoint into `directory` at intervals, and at once when a signal asks the process to stop.

    seconds: between two checkpoints, or 50 times what one takes to write, whichever is longer. It is written
        between two optimiser steps, so that no gradient is lost.
    monitor: evaluates after each `every` optimiser steps, before which the loss must be known to be finite.
    settings: the configuration and checkpoint to resume from, which all ranks share. again: what resumes it.
    """

    def __init__(
        self, directory: Path, seconds: float, monitor: Any, settings: str, say: Say, again: str = SAME
    ) -> None:
        self.directory, self.seconds, self.monitor = directory, seconds, monitor
        self.settings, self.say, self.again = settings, say, again
        self.asked = 0
        self.last, self.pause = time.monotonic(), seconds
        self.saved = 0  # optimiser steps in the newest checkpoint
        self.before: dict[int, Any] = {}  # what handled each signal

    def setup(self, trainer: lightning.Trainer, pl_module: LightningModule, stage: str) -> None:
        """Raise ValueError on every rank if one has another configuration or checkpoint."""
        self.before = {number: signal.getsignal(number) for number in ASKING}  # Lightning's come later
        meet(getattr(trainer, "timeout", None))
        everyone = everyones(self.settings)
        if len({*everyone}) > 1:
            lines = [set(settings.splitlines()) for settings in everyone]
            other = lines[0].union(*lines) - lines[0].intersection(*lines)
            raise ValueError(
                f"ranks differ in {sorted(other)}; every rank needs the same command and, on several"
                " machines, the same disk"
            )

    def on_train_start(self, trainer: lightning.Trainer, pl_module: LightningModule) -> None:
        """Handle signals in place of Lightning, which restores what handled them before it."""
        self.votes = VOTES if trainer.world_size > 1 and pl_module.device.type != "cpu" else 1
        if threading.current_thread() is threading.main_thread():  # no other hears any
            for number in ASKING:
                signal.signal(number, self.hear)

    def on_exception(self, trainer: Any, pl_module: LightningModule, exception: BaseException) -> None:
        """Give the signals back, which Lightning does after a run that ends well alone.

        A rank that was asked to stop, and whose collective then fails, ends without a word: another rank has
        failed, for which the agent ends this one.
        """
        for number, handler in self.before.items():
            if signal.getsignal(number) == self.hear:
                signal.signal(number, handler)
        if self.asked and isinstance(exception, RuntimeError) and trainer.world_size > 1:
            raise SystemExit(128 + self.asked)

    def hear(self, number: int, _: Any) -> None:
        """Remember a signal until the step is done; a second Ctrl-C ends the process at once."""
        if number == self.asked == signal.SIGINT:
            os._exit(128 + number)
        self.asked = number
        again = "; Ctrl-C again stops at once, at the last checkpoint" if number == signal.SIGINT else ""
        said = f"stopping after this step, once its checkpoint is written{again}"
        threading.Thread(target=self.say, args=[said]).start()  # within a line, rich would repeat that

    def on_train_batch_start(self, trainer: Any, pl_module: LightningModule, batch: Any, index: int) -> None:
        """Between two optimiser steps, save if it is time, and end if any rank received a signal."""
        if index % trainer.accumulate_grad_batches or trainer.global_step % self.votes:
            return
        votes = agreed(self.asked, time.monotonic() - self.last >= self.pause)
        asked = max(vote[0] for vote in votes)
        if trainer.global_step > self.saved and (asked or votes[0][1]):
            self.save(trainer)
        if asked:
            self.stop(trainer, asked)

    def on_train_batch_end(  # noqa: PLR0913  Lightning's signature
        self, trainer: lightning.Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Raise ValueError if the loss is not finite; asked where the device is waited for anyway.

        A loss that is not finite makes all weights so, and these the losses of all later steps.
        """
        step = trainer.global_step
        due = (trainer.log_every_n_steps, self.monitor.every)  # type: ignore[attr-defined]
        if any(steps and step % steps == 0 for steps in due) and not outputs["loss"].isfinite():
            raise ValueError(f"the loss is not finite at step {step}; {self.cure()}")

    def on_train_end(self, trainer: lightning.Trainer, pl_module: LightningModule) -> None:
        """Check the weights before the last evaluation."""
        self.check_weights(trainer)

    def on_load_checkpoint(self, trainer: Any, pl_module: LightningModule, checkpoint: Any) -> None:
        """Note the step of the loaded checkpoint, which need not be written again."""
        self.saved = checkpoint["global_step"]

    def finish(self, trainer: lightning.Trainer, pl_module: LightningModule) -> None:
        """Write the last checkpoint, as the last `on_train_end`: signals are heard no longer after these."""
        if trainer.global_step > self.saved:
            self.save(trainer)

    def on_fit_end(self, trainer: lightning.Trainer, pl_module: LightningModule) -> None:
        """End if any rank received a signal."""
        if asked := max(everyones(self.asked)):
            self.stop(trainer, asked)

    def save(self, trainer: lightning.Trainer) -> None:
        """Write a checkpoint, unless `check_weights` raises ValueError."""
        self.check_weights(trainer)
        for logger in trainer.loggers:
            logger.save()
        began = time.monotonic()
        trainer.save_checkpoint(self.directory)
        self.saved, self.last = trainer.global_step, time.monotonic()
        self.pause = max(self.seconds, SHARE * (self.last - began))

    def check_weights(self, trainer: lightning.Trainer) -> None:
        """Raise ValueError if a weight is infinite or NaN, asked of the device once."""
        weights = trainer.lightning_module.parameters()
        if not torch.stack([weight.isfinite().all() for weight in weights]).all():
            raise ValueError(f"a weight is not finite after step {trainer.global_step}; {self.cure()}")

    def cure(self) -> str:
        """What stays of a run whose loss or weights are not finite, and what may help."""
        stays = (
            f"the checkpoint of step {self.saved} stays" if self.saved else "there is no checkpoint before it"
        )
        return f"{stays}. A lower optim.lr or trainer.precision=32-true may help"

    def stop(self, trainer: lightning.Trainer, number: int) -> None:
        """End the process with status 128 + signal; requeue a SLURM job if its time limit was reached."""
        self.say(f"{self.directory.parent} stopped after step {self.saved}; {self.again} resumes it")
        job = os.environ.get("SLURM_JOB_ID")
        if number not in (signal.SIGTERM, signal.SIGINT) and job and trainer.is_global_zero:
            with suppress(OSError):  # no scontrol here, e.g. in a container
                subprocess.run(["scontrol", "requeue", job], check=False)
        raise SystemExit(128 + number)

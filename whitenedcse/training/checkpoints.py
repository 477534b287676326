"""Training checkpoints: one file each, whole or absent, and what is inside is what was written.

A file is named step-S-H.ckpt: S optimiser steps were done, and H is the start of the SHA-256 of its bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO

from whitenedcse.durable import digest, settle, writing

NAME = re.compile(r"step-(\d{8,})-([0-9a-f]{16})\.ckpt")
KEEP = 2  # the newest ones: the last, and one to fall back on


class Checkpoints(CheckpointIO):
    """How Lightning writes and reads a checkpoint here: into a folder; tensors and plain values only."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write the file, put it on the disk, name it, and drop all but this and the one before.

        Raises OSError, the earlier checkpoints untouched.
        """
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        draft = folder / "draft"
        try:
            with writing(draft) as stream:
                torch.save(checkpoint, stream)
        except (OSError, RuntimeError) as error:
            cause = error if isinstance(error, OSError) else error.__context__  # torch's own is less clear
            if not isinstance(cause, OSError):
                raise
            raise OSError(
                f"{folder}: no checkpoint written ({cause.strerror}); the one before is whole"
            ) from error
        draft.rename(folder / f"step-{checkpoint['global_step']:08}-{digest(draft)[:16]}.ckpt")
        settle(folder)
        past = [path for path in written(folder) if step_of(path) <= checkpoint["global_step"]]
        for other in set(written(folder)) - set(past[:KEEP]):  # one of a later step was damaged: passed over
            other.unlink()

    def load_checkpoint(
        self, path: Any, map_location: Any = "cpu", weights_only: Any = True
    ) -> dict[str, Any]:
        """The content of one file."""
        return torch.load(path, map_location=map_location, weights_only=True)

    def remove_checkpoint(self, path: Any) -> None:
        """Delete one file."""
        Path(path).unlink(missing_ok=True)


def written(folder: Path) -> list[Path]:
    """The checkpoints in a folder by their names, the newest first."""
    found = (path for path in folder.glob("step-*.ckpt") if NAME.fullmatch(path.name))
    return sorted(found, key=step_of, reverse=True)


def newest(folder: Path, say: Callable[[str], None]) -> Path | None:
    """The newest checkpoint that is whole; None if there never was one.

    A file that is not what was written is named, and passed over. Raises ValueError if none is whole.
    """
    for draft in folder.glob("draft*"):  # of a process that was killed
        draft.unlink(missing_ok=True)
    for path in sorted(set(folder.glob("*")) - set(written(folder))):
        say(f"{path} is no checkpoint of train.py (those are step-STEP-CHECKSUM.ckpt); it is left alone")
    found = written(folder)
    for path in found:
        if path.stem.endswith(digest(path)[:16]):
            return path
        say(f"{path} is damaged: its content no longer has the checksum in its name; it is passed over")
    if found:
        raise ValueError(f"{folder}: every checkpoint is damaged; delete {folder.parent} to begin anew")
    return None


def step_of(path: Path | None) -> int:
    """Optimiser steps done when a checkpoint was written; 0 without one."""
    return int(path.name.split("-")[1]) if path else 0

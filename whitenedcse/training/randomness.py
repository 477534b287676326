"""Random numbers that depend on a position in the run alone: there is no state to save."""

from __future__ import annotations

import hashlib
from functools import cache
from typing import Any

import lightning
import torch


def seed_everything(seed: int) -> None:
    """Start every generator of this process. Raises ValueError outside of 0 to 4294967295."""
    lightning.seed_everything(seed, verbose=False)


def reseed(*position: int) -> None:
    """Start torch's generators, on every device, at a function of these numbers."""
    start(seed_of(*position))


def seed_of(*position: int) -> int:
    """A seed of 64 bits that is a function of these numbers."""
    digest = hashlib.blake2b(repr(position).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def start(seed: int) -> None:
    """Start torch's generators, on every device, at this seed."""
    torch.default_generator.manual_seed(seed)  # torch.manual_seed takes 0.2 ms, as long as a kernel or two
    for device in _devices():
        device.manual_seed(seed)


@cache
def _devices() -> list[Any]:
    found = (torch.cuda, torch.cuda.is_available()), (torch.mps, torch.backends.mps.is_available())
    return [device for device, available in found if available]

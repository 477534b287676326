"""Random numbers that depend on a position in the run alone: there is no state to save."""

from __future__ import annotations

import hashlib
from functools import cache
from typing import Any

import torch


def reseed(*position: int) -> None:
    """Start torch's generators, on every device, at a function of these numbers."""
    digest = hashlib.blake2b(repr(position).encode(), digest_size=8).digest()
    seed = int.from_bytes(digest, "big")
    torch.default_generator.manual_seed(
        seed
    )  # torch.manual_seed took 0.2 ms, as long as some kernels of a step
    for device in _devices():
        device.manual_seed(seed)


@cache
def _devices() -> list[Any]:
    found = (torch.cuda, torch.cuda.is_available()), (torch.mps, torch.backends.mps.is_available())
    return [device for device, available in found if available]

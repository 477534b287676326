"""Which numbers are computed in which precision.

The encoder may compute in bfloat16 or float16 (`trainer.precision`). From the pooled vectors to the loss
everything is computed in float32, or in float64 if it comes so: `full_precision`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any, ParamSpec, TypeGuard

import torch
from torch import Tensor

P = ParamSpec("P")


def at_least_float32(x: Tensor) -> Tensor:
    """The same tensor, of any shape and kind of number, in float32; float64 stays."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """A context in which autocast changes no precision on this device."""
    if not torch.amp.is_autocast_available(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def autocast_type(device: str) -> torch.dtype | None:
    """The type that autocast gives matrix products on a kind of device now; None where it is off."""
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return None


def floating(x: object) -> TypeGuard[Tensor]:
    """Whether this is a tensor of floating-point numbers: token ids and masks are not."""
    return isinstance(x, Tensor) and x.is_floating_point()


def full_precision(function: Callable[P, Tensor]) -> Callable[P, Tensor]:
    """The same function with autocast off and its floating-point arguments, by position, in float32 at least.

    bfloat16 statistics whiten to 1e-2 instead of 1e-6, and a bfloat16 loss of 1e-3 has a gradient whose
    cosine with the true one is 0.2.
    """

    @functools.wraps(function)
    def precise(*args: P.args, **kwargs: P.kwargs) -> Tensor:
        given: Any = [at_least_float32(a) if floating(a) else a for a in args]
        device = next(a.device for a in given if isinstance(a, Tensor))
        with without_autocast(device):
            return function(*given, **kwargs)

    return precise


def quickest(accelerator: str) -> str:
    """Lightning's name of the quickest sound precision: bf16-mixed where a GPU or AMX multiplies bfloat16."""
    if accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available():
        return "bf16-mixed" if torch.cuda.is_bf16_supported(including_emulation=False) else "32-true"
    return "bf16-mixed" if accelerator in ("auto", "cpu") and "amx_bf16" in cpu().split() else "32-true"


@cache
def cpu() -> str:
    """What Linux says of the processor; nothing elsewhere."""
    file = Path("/proc/cpuinfo")
    return file.read_text() if file.exists() else ""


@cache
def prefers_onednn() -> bool:
    """Whether oneDNN multiplies float32 matrices faster than MKL, which PyTorch takes: on AMD."""
    amd = "AuthenticAMD" in cpu()
    available = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return amd and available and torch.backends.cpu.get_cpu_capability() == "AVX512"

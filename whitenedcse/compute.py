"""The computing environment of a process: precision of numbers, cores, packages and hardware.

The encoder may compute in bfloat16 or float16 (`trainer.precision`). From the pooled vectors to the loss
everything is computed in float32, or in float64 if it arrives so: `full_precision`.

PyTorch's operators let other Python threads run. `each` therefore uses all cores with one thread per piece of
a batch, also where each operation is too small to be divided, and gives the same bits as one core.
"""

from __future__ import annotations

import functools
import os
import platform
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed, wait
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.metadata import version
from pathlib import Path
from threading import Barrier
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
PACKAGES = ("whitenedcse", "torch", "transformers", "lightning", "datasets", "hydra-core", "numpy", "scipy")


def at_least_float32(x: Tensor) -> Tensor:
    """x in float32, or unchanged if it is float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """A context in which autocast changes no precision on this device."""
    if not torch.amp.is_autocast_available(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def autocast_type(device: str) -> torch.dtype | None:
    """The type that autocast now gives to matrix products on a kind of device; None where it is off."""
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return None


def autocast_as_now(device: torch.device) -> Context:
    """A function that makes contexts with the autocast in force now, for other threads and the backward pass.

    Each context casts the weights for itself: where the pieces of a batch share one cast of a weight,
    autograd adds up their gradients in bfloat16.
    """
    kind = autocast_type(device.type)
    if kind is None:
        return functools.partial(without_autocast, device)
    return functools.partial(torch.autocast, device.type, dtype=kind, cache_enabled=False)


def full_precision(function: Callable[P, Tensor]) -> Callable[P, Tensor]:
    """A decorator: autocast is off, and floating-point positional arguments are at least float32.

    bfloat16 statistics whiten to 1e-2 instead of 1e-6, and a bfloat16 loss of 1e-3 has a gradient whose
    cosine with the true one is 0.2.
    """

    def wide(x: Any) -> Any:  # not of token ids and masks
        return at_least_float32(x) if isinstance(x, Tensor) and x.is_floating_point() else x

    @functools.wraps(function)
    def precise(*args: P.args, **kwargs: P.kwargs) -> Tensor:
        given: Any = [wide(a) for a in args]
        named: Any = {name: wide(a) for name, a in kwargs.items()}
        devices = [a.device for a in (*given, *named.values()) if isinstance(a, Tensor)]
        if not devices:
            raise TypeError(f"{function.__name__} takes torch tensors; torch.as_tensor makes them")
        with without_autocast(devices[0]):
            return function(*given, **named)

    return precise


def device() -> str:
    """The device of commands and evaluations: a GPU if there is one, else the CPU."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def quickest(accelerator: str) -> str:
    """Lightning's name of the fastest sound precision: bf16-mixed where a GPU or AMX multiplies bfloat16."""
    if accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available():
        return "bf16-mixed" if torch.cuda.is_bf16_supported(including_emulation=False) else "32-true"
    return "bf16-mixed" if accelerator in ("auto", "cpu") and "amx_bf16" in cpu().split() else "32-true"


@cache
def cpu() -> str:
    """Linux's description of the processor; "" on other systems."""
    file = Path("/proc/cpuinfo")
    return file.read_text() if file.exists() else ""


@cache
def prefers_onednn() -> bool:
    """Whether oneDNN multiplies float32 matrices faster than MKL, PyTorch's default: true on AMD."""
    amd = "AuthenticAMD" in cpu()
    available = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return amd and available and torch.backends.cpu.get_cpu_capability() == "AVX512"


Item = TypeVar("Item")
Result = TypeVar("Result")
Context = Callable[[], AbstractContextManager[Any]]


def cores() -> int:
    """The number of threads to use: the cores, unless OMP_NUM_THREADS or PyTorch's setting says less."""
    return torch.get_num_threads()


def each(
    function: Callable[[Item], Result],
    items: Sequence[Item],
    within: Context = nullcontext,
    threads: int | None = None,
) -> list[Result]:
    """The results of a function for all items, in order, computed by several threads, or by this one alone.

    within: a context that each thread enters once, as PyTorch's modes are set for each thread separately.
    threads: at most so many; None for `cores`. After an error, or Ctrl-C, no further item is begun.
    """
    results: list[Any] = [None] * len(items)
    rest = iter(range(len(items)))  # whose next number one thread alone gets

    def work() -> None:
        with within():
            for i in rest:
                results[i] = function(items[i])

    threads = min(threads or cores(), len(items))
    if threads < 2:
        work()
        return results
    workers = [_pool(cores()).submit(work) for _ in range(threads)]
    try:
        for worker in as_completed(workers):
            worker.result()
    finally:
        list(rest)  # so that no thread begins another item
        wait(workers)
    return results


@cache
def _pool(count: int) -> ThreadPoolExecutor:
    """Threads that wait for work, each limited to one core; PyTorch's setting in other threads stays."""
    all_told = Barrier(count + 1)
    pool = ThreadPoolExecutor(count, "whitenedcse", _use_one_core, (all_told,))
    for _ in range(count):
        pool.submit(int)
    all_told.wait()
    torch.set_num_threads(count)
    return pool


def _use_one_core(all_told: Barrier) -> None:
    """Limit PyTorch to one core in this thread of the pool.

    PyTorch has one number for the threads that are yet to compute, and a thread reads it when it first
    computes: each reads it here, before the next change.
    """
    torch.set_num_threads(1)
    torch.get_num_threads()
    all_told.wait()


def environment() -> dict[str, Any]:
    """Packages, commit and hardware, on which a number depends."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "packages": {name: version(name) for name in PACKAGES},
        "python": platform.python_version(),
        "commit": commit(),
        "machine": {"platform": platform.platform(), "cores": os.cpu_count(), "gpus": gpus},
        "threads": torch.get_num_threads(),
    }


def commit() -> str | None:
    """The git commit of this source tree, "+changes" if package or conf differ; None outside a checkout."""
    git = ["git", "-C", str(Path(__file__).parent)]
    own = ["ls-files", "--error-unmatch", Path(__file__).name]  # an environment may lie in another checkout
    try:
        said = [
            subprocess.run([*git, *asked], capture_output=True, text=True, check=True).stdout.strip()
            for asked in (own, ["rev-parse", "HEAD"], ["status", "--porcelain", "--", ".", "../conf"])
        ]
    except (OSError, subprocess.CalledProcessError):
        return None
    return said[1] + ("+changes" if said[2] else "")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)  # the child has none of the threads

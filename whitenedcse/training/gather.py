"""Several processes as one: the only file that knows of ranks.

W: processes    n: sentences of one process    v: views    d: width

Pooled vectors are gathered once, before the head. Statistics and negatives are then those of all W n
sentences on every rank, and since the gradient of a gathered vector is summed over the ranks and DDP averages
the gradient of a weight, W processes of n sentences compute what one process of W n does, without any factor.
With one process every function here does nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

Value = TypeVar("Value")


def place() -> tuple[int, int]:
    """This process's rank, and how many there are."""
    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def gathered(x: Tensor) -> Tensor:
    """(v, n, d) -> (v, W n, d): the sentences of all ranks, in the order of ranks, with gradient.

    Every rank must bring the same shape; `agreed` tells before.
    """
    return x if place()[1] == 1 else _Gather.apply(x)  # type: ignore[no-untyped-call]


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(place()[1])]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, dim=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        rank, world = place()
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad.chunk(world, dim=1)[rank]


def agreed(*numbers: int) -> list[list[int]]:
    """Small whole numbers of every rank, rank by rank: a few bytes between the hosts, never a device."""
    rank, world = place()
    if world == 1:
        return [list(numbers)]
    table = torch.zeros(world, len(numbers), dtype=torch.long)
    table[rank] = torch.tensor(numbers)
    dist.all_reduce(table, group=_hosts())
    return table.tolist()


def equal_sizes(n: int) -> None:
    """Raise ValueError on every rank unless all bring n sentences: gathering would hang, or mix them up."""
    sizes = [size for (size,) in agreed(n)]
    if len(set(sizes)) > 1:
        raise ValueError(f"ranks bring batches of {sizes} sentences; all must be of one size")


def summed(array: NDArray[Any]) -> NDArray[Any]:
    """An array of every rank -> their sum, on every rank."""
    if place()[1] > 1:
        dist.all_reduce(torch.from_numpy(array), group=_hosts())
    return array


def from_first(make: Callable[[], Value]) -> Value:
    """What the first rank makes, on every rank."""
    rank, world = place()
    if world == 1:
        return make()
    box = [make() if rank == 0 else None]
    dist.broadcast_object_list(box, group=_hosts())
    return box[0]  # type: ignore[return-value]


def everyones(value: Value) -> list[Value]:
    """A value of every rank, rank by rank."""
    box: list[Any] = [value] * place()[1]
    if len(box) > 1:
        dist.all_gather_object(box, value, group=_hosts())
    return box


@cache
def _hosts() -> Any:
    """A group that speaks between hosts, whatever connects the devices: no device waits for it."""
    return None if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")

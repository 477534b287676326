"""A batch over several processes, and over the cores of one.

W: processes    n: sentences of one process    v: views    d: width    k: pieces of a batch

Pooled vectors are gathered once, before the head. Statistics and negatives are then those of all W n
sentences on every rank, and since the gradient of a gathered vector is summed over the ranks and DDP averages
the gradient of a weight, W processes of n sentences compute what one process of W n does, without any factor.

Within a process a batch is encoded piece by piece: in parallel threads, or keeping the activations of one
piece at a time. The vectors of all pieces are one tensor with one gradient, so that head and loss see the
whole batch. With one process and one piece every function here does nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from whitenedcse.compute import cores, each
from whitenedcse.ragged import Ragged, taken

Value = TypeVar("Value")


def place() -> tuple[int, int]:
    """The rank of this process, and the number of ranks."""
    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def gathered(x: Tensor) -> Tensor:
    """The vectors of all ranks, which have equal shapes, in their order, with gradient: (v, W n, d)."""
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


def equal_sizes(n: int) -> None:
    """Raise ValueError on every rank unless all have n sentences: gathering would hang or mix them up."""
    sizes = everyones(n)
    if len(set(sizes)) > 1:
        raise ValueError(f"ranks bring batches of {sizes} sentences; all must be of one size")


def summed(array: NDArray[Any]) -> NDArray[Any]:
    """The sum over all ranks of an array of each, on every rank."""
    if place()[1] > 1:
        dist.all_reduce(torch.from_numpy(array), group=_hosts())
    return array


def copy_first(tensors: Iterable[Tensor]) -> None:
    """Give tensors the values that they have on the first rank, in place."""
    for tensor in tensors if place()[1] > 1 else ():
        dist.broadcast(tensor, 0)


def from_first(make: Callable[[], Value]) -> Value:
    """The result of `make` on the first rank, on every rank."""
    rank, world = place()
    box: list[Any] = [make() if rank == 0 else None]
    if world > 1:
        dist.broadcast_object_list(box, group=_hosts())
    return box[0]


def everyones(value: Value) -> list[Value]:
    """The values of all ranks as a list, in their order, exchanged between hosts, not devices."""
    box: list[Any] = [value] * place()[1]
    if len(box) > 1:
        dist.all_gather_object(box, value, group=_hosts())
    return box


def agreed(*numbers: int) -> list[list[int]]:
    """`everyones` of small whole numbers in less than half of its time, for use at each step."""
    rank, world = place()
    table = np.zeros((world, len(numbers)), np.int64)
    table[rank] = numbers
    return summed(table).tolist()


def meet(timeout: float | None) -> None:
    """Have the hosts wait for each other no longer than this, in seconds; before their first exchange."""
    if dist.is_initialized() and dist.get_backend() != "gloo":
        HOSTS[dist.group.WORLD] = dist.new_group(
            backend="gloo", timeout=timeout and timedelta(seconds=timeout)
        )


HOSTS: dict[Any, Any] = {}  # a group that communicates between hosts, beside the devices' own


def _hosts() -> Any:
    """A process group that communicates between hosts, so that no device is waited for."""
    if dist.get_backend() == "gloo":
        return None
    if dist.group.WORLD not in HOSTS:
        meet(None)
    return HOSTS[dist.group.WORLD]


COPIES = 4 << 30  # bytes of gradients at most, one copy a thread: BERT-base would have 28 GB on 64 cores
Gradients = list[Tensor | None]


def encoded(
    pieces: Sequence[Ragged],
    encode: Callable[[Ragged, int], Tensor],
    parameters: Iterable[Tensor],
    *,
    parallel: bool,
    keep: bool,
) -> Tensor:
    """The vectors of all pieces of a batch, (n, d) in their order, with gradient for these parameters.

    encode: a piece and its number -> its vectors. parallel: by several threads. keep: the activations until
    the backward pass, instead of encoding each piece again.
    """
    learnt = [p for p in parameters if p.requires_grad]
    threads = 1
    if parallel:
        threads = min(cores(), max(2, COPIES // max(1, sum(p.nbytes for p in learnt))))
    return _Pieces.apply(pieces, encode, threads, keep, *learnt)  # type: ignore[no-untyped-call]


def cut(batch: Ragged, k: int) -> tuple[list[Ragged], Tensor]:
    """A batch on CPU as at most k pieces of about equally many tokens, and its sentences' order (n,)."""
    order = batch.lengths.argsort(stable=True)  # sorted, so that a piece has few lengths
    tokens = batch.lengths[order].cumsum(0)
    bounds = torch.searchsorted(tokens, torch.arange(1, k) * (tokens[-1] / k))
    parts = [part for part in order.tensor_split(bounds.tolist()) if len(part)]
    return [taken(batch, part)[0] for part in parts], order


class _Pieces(Function):
    """Pieces are encoded in fixed shares, one a thread, so that gradients are added up in a fixed order."""

    @staticmethod
    def forward(
        ctx: Any, pieces: Sequence[Ragged], encode: Any, threads: int, keep: bool, *learnt: Tensor
    ) -> Tensor:
        ctx.pieces, ctx.encode, ctx.learnt = pieces, encode, learnt
        ctx.shares = [range(first, len(pieces), threads) for first in range(min(threads, len(pieces)))]
        vectors: list[Any] = [None] * len(pieces)

        def encode_share(share: range) -> None:
            with torch.set_grad_enabled(keep):
                for i in share:
                    vectors[i] = encode(pieces[i], i)

        each(encode_share, ctx.shares, threads=threads)
        ctx.sizes = [len(x) for x in vectors]
        ctx.vectors = vectors if keep else [None] * len(pieces)
        return torch.cat([x.detach() for x in vectors])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gradient = partial(gradients, ctx, grad.split(ctx.sizes))
        total, *others = each(gradient, ctx.shares, threads=len(ctx.shares))
        for other in others:
            add_to(total, other)
        return None, None, None, None, *total


def gradients(ctx: Any, parts: Sequence[Tensor], share: range) -> Gradients:
    """The gradients of the parameters, summed over the pieces of one thread."""
    total: Gradients = [None] * len(ctx.learnt)
    for i in share:
        x, ctx.vectors[i] = ctx.vectors[i], None
        if x is None:
            with torch.enable_grad():
                x = ctx.encode(ctx.pieces[i], i)
        add_to(total, torch.autograd.grad(x, ctx.learnt, parts[i], allow_unused=True))
    return total


def add_to(total: Gradients, more: Sequence[Tensor | None]) -> None:
    """Add gradients of the same parameters to a sum, in place; None is zero."""
    for i, (known, gradient) in enumerate(zip(total, more, strict=True)):
        if known is None:
            total[i] = gradient
        elif gradient is not None:
            known.add_(gradient)

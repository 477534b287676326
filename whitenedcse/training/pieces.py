"""A batch encoded piece by piece: in parallel threads, or keeping the activations of one piece at a time.

n: sentences    d: width    k: pieces

The vectors of all pieces are one tensor with one gradient, so that head and loss see the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from whitenedcse.ragged import Ragged, taken
from whitenedcse.threads import cores, each

Gradients = list[Tensor | None]


class Manner(NamedTuple):
    """How pieces are encoded.

    encode: a piece and its number -> (n, d). parallel: by threads, each taking every so many-th piece. keep:
    the activations until the backward pass, instead of encoding each piece again when its gradient is due.
    """

    encode: Callable[[Ragged, int], Tensor]
    parallel: bool
    keep: bool


def encoded(pieces: Sequence[Ragged], manner: Manner, parameters: Iterable[Tensor]) -> Tensor:
    """k pieces -> (n, d) in their order, with gradient for these parameters."""
    learnt = [p for p in parameters if p.requires_grad]
    return _Pieces.apply(pieces, manner, *learnt)  # type: ignore[no-untyped-call]


def cut(batch: Ragged, k: int) -> tuple[list[Ragged], Tensor]:
    """A batch on CPU -> at most k pieces of as many tokens; (n,): where each sentence stood.

    A token takes as long in a short sentence as in a long one, from 4 tokens to 64.
    """
    order = batch.lengths.argsort(stable=True)  # sorted, so that a piece has few lengths
    tokens = batch.lengths[order].cumsum(0)
    bounds = torch.searchsorted(tokens, torch.arange(1, k) * (tokens[-1] / k))
    parts = [part for part in order.tensor_split(bounds.tolist()) if len(part)]
    return [taken(batch, part)[0] for part in parts], order


class _Pieces(Function):
    @staticmethod
    def forward(ctx: Any, pieces: Sequence[Ragged], manner: Manner, *learnt: Tensor) -> Tensor:
        ctx.pieces, ctx.manner, ctx.learnt = pieces, manner, learnt
        shares = shared(len(pieces), manner)
        found: list[Any] = [None] * len(pieces)

        def encode(share: range) -> None:
            with torch.set_grad_enabled(manner.keep):
                for i in share:
                    found[i] = manner.encode(pieces[i], i)

        list(each(encode, shares) if manner.parallel else map(encode, shares))
        ctx.found = found if manner.keep else [None] * len(pieces)
        return torch.cat([x.detach() for x in found])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        shares, parts = shared(len(ctx.pieces), ctx.manner), grad.split([p.n for p in ctx.pieces])
        gradient = partial(gradients, ctx, parts)
        found = list(each(gradient, shares) if ctx.manner.parallel else map(gradient, shares))
        return None, None, *summed(found)


def shared(pieces: int, manner: Manner) -> list[range]:
    """The numbers of the pieces that each thread encodes, always the same."""
    threads = min(cores(), pieces) if manner.parallel else 1
    return [range(i, pieces, threads) for i in range(threads)]


def gradients(ctx: Any, parts: Sequence[Tensor], share: range) -> Gradients:
    """Of the parameters, by some pieces together."""
    totals: list[Gradients] = []
    for i in share:
        with torch.enable_grad():
            x = ctx.manner.encode(ctx.pieces[i], i) if ctx.found[i] is None else ctx.found[i]
        ctx.found[i] = None
        totals.append(list(torch.autograd.grad(x, ctx.learnt, parts[i], allow_unused=True)))
        totals = [summed(totals)]
    return totals[0]


def summed(each: Sequence[Gradients]) -> Gradients:
    """Gradients of the same parameters -> their sums, made in place of the first of each."""
    total = each[0]
    for others in each[1:]:
        for i, other in enumerate(others):
            mine = total[i]
            total[i] = other if mine is None else mine if other is None else mine.add_(other)
    return total

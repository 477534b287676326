"""What an encoder computes, on rows of tokens without padding: linear layers, dropout, attention.

t: tokens    n: sentences    d: width    h: heads    c: sentences of one length    l: that length

On CPU each is quicker than PyTorch's own, and equal to it to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from inspect import signature
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import Function, once_differentiable
from torch.nn import functional as F

from whitenedcse.precision import at_least_float32, prefers_onednn
from whitenedcse.ragged import Ragged

LEVELS = 1 << 16  # dropout on CPU rounds its probability to a 65,536th

Lengths = Sequence[tuple[int, int]]  # sentences, tokens in each; in the order of the rows


def linear(layer: nn.Module, x: Tensor) -> Tensor:
    """(t, in) -> (t, out): the layer itself, in float32 by the quicker of two libraries for this CPU."""
    if type(layer) is nn.Linear and x.dtype == torch.float32 and x.device.type == "cpu" and prefers_onednn():
        if not torch.is_autocast_enabled("cpu"):
            return _Linear.apply(x, layer.weight, layer.bias)  # type: ignore[no-untyped-call]
    return layer(x)


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """(t, in), (out, in) -> (t, out) by oneDNN."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return multiply(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            multiply(grad, weight.t()) if needs_x else None,
            multiply(grad.t(), x.t()) if needs_weight else None,
            grad.sum(dim=0) if needs_bias else None,
        )


def dropout(x: Tensor, layer: nn.Dropout) -> Tensor:
    """The layer itself; on CPU with random numbers that are four times as cheap."""
    if not layer.training or layer.p == 0 or x.device.type != "cpu":
        return layer(x)
    return _Dropout.apply(x, layer.p)  # type: ignore[no-untyped-call]


def kept(shape: Sequence[int], p: float) -> Tensor:
    """A mask that is True with probability 1 - p, from a stream that PyTorch's generator seeds."""
    size = prod(shape)
    seed = torch.randint(2**63 - 1, (1,)).numpy()[0]
    draws: Any = np.random.SFC64(seed).random_raw(-(-size // 4)).view(np.uint16)[:size]
    return torch.from_numpy((draws >= round(p * LEVELS)).reshape(shape))


def scale(p: float) -> float:
    """What makes up for the values that are not kept."""
    return LEVELS / max(1, LEVELS - round(p * LEVELS))


class _Dropout(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float) -> Tensor:
        mask = kept(x.shape, p)
        ctx.save_for_backward(mask)
        ctx.scale = scale(p)
        return (x * mask).mul_(ctx.scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (mask,) = ctx.saved_tensors
        return (grad * mask).mul_(ctx.scale), None


def attention(q: Tensor, k: Tensor, v: Tensor, *, heads: int, p: float, where: Ragged | Lengths) -> Tensor:
    """Softmax attention of each sentence's tokens, or of its first alone, to its own tokens.

    q: (t, d), or (n, d) for the first tokens; k, v: (t, d) -> as q. p: dropout of the probabilities.
    where: sentences of equal length in groups, on a CPU; the batch itself elsewhere.
    """
    if isinstance(where, Ragged):
        return jagged_attention(q, k, v, heads=heads, p=p, batch=where)
    groups = Groups(where, heads, p)
    with torch.autocast("cpu", enabled=False):
        if p == 0:
            return grouped_attention(q, k, v, groups)
        return _Attention.apply(q, k, v, groups)  # type: ignore[no-untyped-call]


def jagged_attention(q: Tensor, k: Tensor, v: Tensor, *, heads: int, p: float, batch: Ragged) -> Tensor:
    """`attention` by PyTorch's jagged tensors: on CUDA its kernels for sequences of varying length."""
    first = torch.arange(batch.n + 1, device=q.device)
    of_queries = (batch.offsets, batch.longest) if len(q) == len(k) else (first, 1)

    def jagged(x: Tensor, offsets: Tensor, longest: int) -> Tensor:
        x = x.unflatten(-1, (heads, -1))
        sizes: Any = {"min_seqlen": 1, "max_seqlen": longest} if takes_sizes() else {}
        return torch.nested.nested_tensor_from_jagged(x, offsets, **sizes).transpose(1, 2)

    keys, values = (jagged(x, batch.offsets, batch.longest) for x in (k, v))
    out = F.scaled_dot_product_attention(jagged(q, *of_queries), keys, values, dropout_p=p)
    return out.transpose(1, 2).values().flatten(-2)


@cache
def takes_sizes() -> bool:
    """Whether jagged tensors can be told their lengths; PyTorch 2.4 asks the device."""
    return "max_seqlen" in signature(torch.nested.nested_tensor_from_jagged).parameters


def grouped_attention(q: Tensor, k: Tensor, v: Tensor, groups: Groups) -> Tensor:
    """`attention` by PyTorch's own, group by group."""
    places, rows = groups.places(len(q)), groups.places(len(k))
    parts = [at_least_float32(x) for x in (q, k, v)]

    def by_head(x: Tensor, at: Sequence[tuple[int, int, int]]) -> list[Tensor]:
        """Views by `split`: of slices, autograd would fill a gradient of all rows for each."""
        each = zip(x.split([c * length for _, c, length in at]), at, strict=True)
        return [part.view(c, length, groups.heads, -1).transpose(1, 2) for part, (_, c, length) in each]

    inside = zip(by_head(parts[0], places), by_head(parts[1], rows), by_head(parts[2], rows), strict=True)
    out = [F.scaled_dot_product_attention(*part).transpose(1, 2).flatten(0, 1).flatten(1) for part in inside]
    return torch.cat(out).to(q.dtype)


class Groups(NamedTuple):
    """Attention's settings. lengths: sentences of one length, group by group. p: of dropout.

    Rows lie group by group, sentence by sentence.
    """

    lengths: Lengths
    heads: int
    p: float

    def places(self, rows: int) -> list[tuple[int, int, int]]:
        """Start, sentences, and rows in each sentence, of every group; one each if they are first."""
        n = sum(c for c, _ in self.lengths)
        each = [(c, length if rows > n else 1) for c, length in self.lengths]
        starts = accumulate((c * length for c, length in each), initial=0)
        return [(start, c, length) for start, (c, length) in zip(starts, each, strict=False)]

    def take(self, x: Tensor, place: tuple[int, int, int]) -> Tensor:
        """(t, d) -> (c h, l, d / h) float32: the rows of one group."""
        start, c, length = place
        rows = x[start : start + c * length].view(c, length, self.heads, -1).transpose(1, 2)
        return at_least_float32(rows).reshape(c * self.heads, length, -1)

    def put(self, out: Tensor, place: tuple[int, int, int], x: Tensor) -> None:
        """`take` the other way."""
        start, c, length = place
        rows = out[start : start + c * length].view(c, length, self.heads, -1)
        rows.copy_(x.view(c, self.heads, length, -1).transpose(1, 2))

    def masks(self, queries: int, keys: int) -> list[Tensor]:
        """For each group (c h, l, l): what dropout keeps."""
        pairs = zip(self.places(queries), self.places(keys), strict=True)
        shapes = [(c * self.heads, rows, length) for (_, c, rows), (_, _, length) in pairs]
        parts = kept([sum(map(prod, shapes))], self.p).split([prod(shape) for shape in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


class _Attention(Function):
    """With dropout, which PyTorch's kernel for CPU lacks: group by group, in float32."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, groups: Groups) -> Tensor:
        ctx.groups, out, saved = groups, torch.empty_like(q), []
        masks = groups.masks(len(q), len(k))
        for i, (place, rows) in enumerate(zip(groups.places(len(q)), groups.places(len(k)), strict=True)):
            a, b, c = groups.take(q, place), groups.take(k, rows), groups.take(v, rows)
            weights = torch.bmm(a, b.mT).mul_(a.shape[-1] ** -0.5).softmax(dim=-1)
            saved.append(weights)
            groups.put(out, place, torch.bmm((weights * masks[i]).mul_(scale(groups.p)), c))
        ctx.save_for_backward(q, k, v, *saved, *masks)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        with torch.autocast("cpu", enabled=False):
            return *attention_gradients(ctx.groups, grad, *ctx.saved_tensors), None


def attention_gradients(
    groups: Groups, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *saved: Tensor
) -> tuple[Tensor, ...]:
    """Of q, k and v. saved: each group's probabilities, then what dropout kept of them."""
    masks, grads = saved[len(groups.lengths) :], [torch.empty_like(x) for x in (q, k, v)]
    for i, (place, rows) in enumerate(zip(groups.places(len(q)), groups.places(len(k)), strict=True)):
        a, b, c = groups.take(q, place), groups.take(k, rows), groups.take(v, rows)
        g, weights = groups.take(grad, place), saved[i]
        used = (weights * masks[i]).mul_(scale(groups.p))
        d = torch.bmm(g, c.mT).mul_(masks[i]).mul_(scale(groups.p))
        d = torch.ops.aten._softmax_backward_data(d, weights, -1, weights.dtype)
        d.mul_(a.shape[-1] ** -0.5)
        groups.put(grads[0], place, torch.bmm(d, b))
        groups.put(grads[1], rows, torch.bmm(d.mT, a))
        groups.put(grads[2], rows, torch.bmm(used.mT, g))
    return tuple(grads)

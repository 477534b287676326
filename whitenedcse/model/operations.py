"""Linear layers and dropout on rows of tokens: on CPU quicker than PyTorch's own, and equal to rounding.

t: tokens    d: width
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import Function, once_differentiable
from torch.nn import functional as F

from whitenedcse.precision import at_least_float32, prefers_onednn

LEVELS = 1 << 16  # dropout on CPU rounds its probability to a 65,536th

Seed = int | Sequence[int]  # of one draw of random numbers


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


def dropout(x: Tensor, layer: nn.Dropout, seed: Seed, *, onto: Tensor | None = None) -> Tensor:
    """(t, d) -> (t, d): what the layer leaves of x, added to `onto` if there is one.

    On CPU by random numbers that are four times as cheap, and that depend on the seed alone; elsewhere by
    PyTorch's own, whose generator knows no seed of a call.
    """
    if not layer.training or layer.p == 0:
        return x if onto is None else x + onto
    if x.device.type != "cpu":
        return F.dropout(x, layer.p) if onto is None else F.dropout(x, layer.p) + onto
    return _Dropout.apply(x, onto, layer.p, seed)  # type: ignore[no-untyped-call]


def kept(shape: Sequence[int], p: float, seed: Seed) -> Tensor:
    """A mask of uint8 that is 1 with probability 1 - p; bool would take PyTorch six times as long to read."""
    size = prod(shape)
    stream = np.random.Generator(np.random.SFC64(seed))  # `integers` lets other threads work meanwhile
    draws: Any = stream.integers(0, 2**64, size=-(-size // 4), dtype=np.uint64).view(np.uint16)[:size]
    return torch.from_numpy((draws >= round(p * LEVELS)).view(np.uint8).reshape(shape))


def scale(p: float) -> float:
    """What makes up for the values that are not kept."""
    return LEVELS / max(1, LEVELS - round(p * LEVELS))


class _Dropout(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, onto: Tensor | None, p: float, seed: Seed) -> Tensor:
        wide, mask = at_least_float32(x), kept(x.shape, p, seed)
        ctx.save_for_backward(mask)
        ctx.scale, ctx.dtype, mask = scale(p), x.dtype, mask.to(wide.dtype)
        if onto is None:
            return mask.mul_(wide).mul_(ctx.scale).to(x.dtype)
        return torch.addcmul(onto, wide, mask, value=ctx.scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        wide, (mask,) = at_least_float32(grad), ctx.saved_tensors
        own = mask.to(wide.dtype).mul_(wide).mul_(ctx.scale).to(ctx.dtype)
        return own, grad if ctx.needs_input_grad[1] else None, None, None

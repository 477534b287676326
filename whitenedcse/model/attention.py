"""Attention of each sentence's tokens to its own tokens, in a batch without padding, and dropout.

t: tokens    n: sentences    d: width    h: heads    c: sentences of a tile    l: tokens of its longest

On CPU sentences of similar length are laid into tiles, padded to the longest of the tile, so that a few large
matrix products replace one for each length. That padding exists only inside the attention. On CUDA the
kernels of PyTorch that take sequences of varying length are called directly: its nested tensors reach the
same kernels by 3.3 ms of Python for a layer, the direct call by 0.04 (results/findings: A1).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from whitenedcse.compute import at_least_float32
from whitenedcse.ragged import Ragged

HALF = torch.float16, torch.bfloat16
WIDEST = 256  # channels of a head that the kernels for CUDA take
ALIKE = 0.84  # of the longest sentence of a tile, the shortest that joins it: padding costs a tenth
LEVELS = 1 << 16  # dropout on CPU rounds its probability to a 65,536th
Seed = int | Sequence[int]  # of one draw of random numbers


def kept(shape: Sequence[int], p: float, seed: Seed) -> Tensor:
    """A dropout mask: uint8, 1 with probability 1 - p. PyTorch would take six times as long to read bool."""
    size = prod(shape)
    stream = np.random.Generator(np.random.SFC64(seed))  # `integers` lets other threads work meanwhile
    draws: Any = stream.integers(0, 2**64, size=-(-size // 4), dtype=np.uint64).view(np.uint16)[:size]
    return torch.from_numpy((draws >= round(p * LEVELS)).view(np.uint8).reshape(shape))


def scale(p: float) -> float:
    """The factor for the values that dropout keeps, 1 / (1 - p) with p as `kept` rounds it."""
    return LEVELS / max(1, LEVELS - round(p * LEVELS))


class _Masked(Function):
    """x times a mask and a factor, and onto added if given; only the mask is kept for the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, onto: Tensor | None, mask: Tensor, factor: float) -> Tensor:
        wide = at_least_float32(x)
        ctx.save_for_backward(mask)
        ctx.factor, ctx.dtype, mask = factor, x.dtype, mask.to(wide.dtype)
        if onto is None:
            product = mask.mul_(wide)
            return (product if factor == 1 else product.mul_(factor)).to(x.dtype)
        return torch.addcmul(onto, wide, mask, value=factor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        wide, (mask,) = at_least_float32(grad), ctx.saved_tensors
        own = mask.to(wide.dtype).mul_(wide)
        own = own if ctx.factor == 1 else own.mul_(ctx.factor)
        return own.to(ctx.dtype), grad if ctx.needs_input_grad[1] else None, None, None


def dropped(x: Tensor, p: float, seed: Seed, onto: Tensor | None = None) -> Tensor:
    """Dropout of x on CPU by `kept`, added to `onto` if given: (t, d) -> (t, d)."""
    return _Masked.apply(x, onto, kept(x.shape, p, seed), scale(p))  # type: ignore[no-untyped-call]


class Tile(NamedTuple):
    """c sentences as (c, l) tokens. absent: (c, 1, l), 0 or at padding -inf; None without padding."""

    sentences: int
    length: int
    absent: Tensor | None


class Rows(NamedTuple):
    """An index that reorders rows (t, d), split into h heads, by tile, head and sentence; and back.

    take: (places,) for each place in the new order, its row and head in the old one; any for padding. back:
    (rows * h,) for each row and head, its place. Those after the first `filled` belong to no sentence. real:
    (places, 1), 0 for padding and else 1; None without padding.
    """

    take: Tensor
    back: Tensor
    filled: int
    real: Tensor | None


class Plan(NamedTuple):
    """The tiles of a batch, and the places in them of all its tokens and of its first tokens."""

    heads: int
    tiles: list[Tile]
    tokens: Rows
    firsts: Rows


def planned(lengths: Sequence[int], heads: int, rows: int, firsts: int) -> Plan:
    """The plan for sentences of these lengths, in ascending order.

    rows, firsts: numbers of rows in tensors of all tokens and of first tokens, at least the tokens and the
    sentences; any further row belongs to no sentence.
    """
    length, starts = np.array(lengths), np.concatenate([[0], np.cumsum(lengths)])[:-1]
    tiles, every, first = [], [], []
    for low, high in cuts(length):
        top = int(length[high - 1])
        valid = np.arange(top) < length[low:high, None]
        every.append(np.where(valid, starts[low:high, None] + np.arange(top), -1))
        first.append(np.arange(low, high)[:, None])
        absent = None if valid.all() else torch.from_numpy(np.where(valid, 0, -np.inf)[:, None])
        tiles.append(Tile(high - low, top, absent))
    return Plan(heads, tiles, split_rows(every, heads, rows), split_rows(first, heads, firsts))


def cuts(lengths: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Ascending lengths (n,) -> for each tile the number of its first sentence and that after its last."""
    bounds, high = [], len(lengths)
    while high:
        low = int(np.searchsorted(lengths, ALIKE * lengths[high - 1]))
        bounds.append((low, high))
        high = low
    return bounds[::-1]


def split_rows(tiles: Sequence[NDArray[np.int64]], heads: int, rows: int) -> Rows:
    """The row numbers (c, l) of each tile, -1 for padding -> an index of the rows split by head."""
    head = np.arange(heads)[:, None]
    slots = [np.where(tile.ravel() < 0, -1, tile.ravel() * heads + head).ravel() for tile in tiles]
    flat = np.concatenate(slots)
    back, places = np.zeros(rows * heads, np.int64), np.flatnonzero(flat >= 0)
    back[flat[places]] = places
    real = None if len(places) == len(flat) else torch.from_numpy((flat >= 0).astype(np.float32)[:, None])
    return Rows(torch.from_numpy(flat.clip(0)), torch.from_numpy(back), len(places), real)


class _Tiled(Function):
    """Rows by sentence (rows, d) -> by tile and head (places, d / h). Its gradient gathers, as it does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Rows, heads: int) -> Tensor:
        ctx.rows, ctx.heads = rows, heads
        return x.reshape(len(x) * heads, -1).index_select(0, rows.take)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return merged(grad, ctx.rows, ctx.heads), None, None


class _Merged(Function):
    """Rows by tile and head (places, d / h) -> by sentence (rows, d), zeros for rows of no sentence."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Rows, heads: int) -> Tensor:
        ctx.rows, ctx.heads = rows, heads
        return merged(x, rows, heads)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        rows = ctx.rows
        own = grad.reshape(len(grad) * ctx.heads, -1).index_select(0, rows.take)
        return own if rows.real is None else own.mul_(rows.real), None, None


def merged(x: Tensor, rows: Rows, heads: int) -> Tensor:
    """Rows by tile and head -> by sentence: (places, d / h) -> (rows, d)."""
    made = x.index_select(0, rows.back)
    made[rows.filled :] = 0
    return made.view(-1, heads * x.shape[-1])


class Settings(NamedTuple):
    """How to attend.

    first: whether queries are first tokens only. p: dropout of the attention probabilities.
    """

    plan: Plan
    first: bool
    p: float
    seed: Seed

    def shapes(self, queries: bool) -> list[tuple[int, int]]:
        """For each tile the shape (h c, l) of its queries, l = 1 if they are first tokens, or of its keys."""
        heads, one = self.plan.heads, queries and self.first
        return [(heads * tile.sentences, 1 if one else tile.length) for tile in self.plan.tiles]

    def masks(self) -> list[Tensor | None]:
        """For each tile its dropout mask (h c, l, l), 1 for what is kept; None without dropout."""
        if self.p == 0:
            return [None] * len(self.plan.tiles)
        both = zip(self.shapes(True), self.shapes(False), strict=True)
        shapes = [(hc, rows, length) for (hc, rows), (_, length) in both]
        sizes = [prod(shape) for shape in shapes]
        parts = kept([sum(sizes)], self.p, self.seed).split(sizes)
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def attention(q: Tensor, k: Tensor, v: Tensor, settings: Settings) -> Tensor:
    """Softmax attention on CPU, in float32 or float64: bfloat16 is slower there for short sentences.

    q: (rows, d) of all tokens or of first tokens, k, v: (rows, d) -> the shape of q. Rows that belong to no
    sentence become zero. With dropout, which PyTorch's kernel for CPU lacks.
    """
    plan = settings.plan
    queries, keys = plan.firsts if settings.first else plan.tokens, plan.tokens
    with torch.autocast("cpu", enabled=False):
        scaled = at_least_float32(q) * (q.shape[-1] // plan.heads) ** -0.5
        every = [
            in_tiles(at_least_float32(x), rows, plan.heads, settings.shapes(own))
            for x, rows, own in ((scaled, queries, True), (k, keys, False), (v, keys, False))
        ]
        out = []
        for tile, a, b, c, mask in zip(plan.tiles, *every, settings.masks(), strict=True):
            weights = probabilities(a, b, tile)
            if mask is not None:
                weights = _Masked.apply(weights, None, mask, 1.0)  # type: ignore[no-untyped-call]
            out.append(torch.bmm(weights, c).flatten(0, 1))
        seen = _Merged.apply(torch.cat(out), queries, plan.heads)  # type: ignore[no-untyped-call]
        return (seen if settings.p == 0 else seen * scale(settings.p)).to(q.dtype)


def in_tiles(x: Tensor, rows: Rows, heads: int, shapes: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Rows by sentence (rows, d) -> for each tile (h c, l, d / h)."""
    flat = _Tiled.apply(x, rows, heads)  # type: ignore[no-untyped-call]
    parts = flat.split([hc * length for hc, length in shapes])
    return [part.view(*shape, -1) for part, shape in zip(parts, shapes, strict=True)]


def probabilities(a: Tensor, b: Tensor, tile: Tile) -> Tensor:
    """Attention probabilities of a tile: scaled queries a and keys b (h c, l, d / h) -> (h c, l, l)."""
    if tile.absent is None:
        return torch.bmm(a, b.mT).softmax(dim=-1)
    absent = tile.absent.to(a.dtype).repeat(len(a) // tile.sentences, 1, 1)
    return torch.baddbmm(absent, a, b.mT).softmax(dim=-1)


def way(device: str, width: int) -> str:
    """How attention is computed on a kind of device, for heads of this width: "tiles", "unpadded" or
    "padded".

    "tiles" is `attention`, on CPU. "unpadded" is `unpadded_attention`, for CUDA and widths that are a
    multiple of 8. "padded" is Transformers' own, for anything else.
    """
    if device == "cpu":
        return "tiles"
    return "unpadded" if device == "cuda" and width % 8 == 0 and width <= WIDEST and kernels() else "padded"


class Bounds(NamedTuple):
    """Where sentences begin and end, as the kernels for CUDA take it, made once a batch.

    tokens, firsts: (n + 1,) int32 of all tokens and of first tokens alone. longest: as in `Ragged`.
    """

    tokens: Tensor
    firsts: Tensor
    longest: int


def bounds(batch: Ragged) -> Bounds:
    """The bounds of a batch, on its device."""
    firsts = torch.arange(batch.n + 1, dtype=torch.int32, device=batch.offsets.device)
    return Bounds(batch.offsets.to(torch.int32), firsts, batch.longest)


def unpadded_attention(q: Tensor, k: Tensor, v: Tensor, *, heads: int, p: float, bounds: Bounds) -> Tensor:
    """Softmax attention by PyTorch's CUDA kernels for sequences of varying length.

    q: (t, d), or (n, d) of first tokens; k, v: (t, d) -> the shape of q. FlashAttention's kernel in float16
    and bfloat16 where the GPU has it, else the memory-efficient one.
    """
    starts, most = (bounds.tokens, bounds.longest) if len(q) == len(k) else (bounds.firsts, 1)
    where = starts, bounds.tokens, most, bounds.longest, p
    split = [x.unflatten(-1, (heads, -1)) for x in (q, k, v)]
    if q.dtype in HALF and flashes(q.device):
        return torch.ops.aten._flash_attention_forward(*split, *where, False, False)[0].flatten(-2)
    one = (x.unsqueeze(0) for x in split)
    needs = torch.is_grad_enabled() and any(x.requires_grad for x in split)
    return torch.ops.aten._efficient_attention_forward(*one, None, *where, 0, needs)[0].squeeze(0).flatten(-2)


@cache
def flashes(device: torch.device) -> bool:
    """Whether a GPU is of a generation that FlashAttention's kernel is for: Ampere or a later one."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)


@cache
def kernels() -> bool:
    """Whether this PyTorch has those kernels, tried on tensors without memory; a warning where it has not."""
    try:
        for kind in (torch.bfloat16, torch.float32):
            x = torch.empty(3, 8, dtype=kind, device="meta", requires_grad=True)
            ends = torch.empty(2, dtype=torch.int32, device="meta")
            unpadded_attention(x, x, x, heads=1, p=0.1, bounds=Bounds(ends, ends, 3)).sum().backward()
    except (AttributeError, RuntimeError, TypeError) as error:
        said = f"PyTorch {torch.__version__} has not the attention that skips padding"
        warnings.warn(f"{said} ({error}): batches are padded", stacklevel=2)
        return False
    return True

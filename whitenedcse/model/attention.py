"""Attention of each sentence's tokens to its own tokens, in a batch without padding, and dropout.

t: tokens    n: sentences    d: width    h: heads    c: sentences of a tile    l: tokens of its longest

On CPU sentences of similar length are laid into tiles, padded to the longest of the tile, so that a few large
matrix products replace one for each length. That padding exists only inside the attention. On CUDA the
kernels of PyTorch that take sequences of varying length are called directly: its nested tensors reach the
same kernels by 3.3 ms of Python for a layer, the direct call by 0.04.
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
            return mask.mul_(wide).mul_(factor).to(x.dtype)
        return torch.addcmul(onto, wide, mask, value=factor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        wide, (mask,) = at_least_float32(grad), ctx.saved_tensors
        own = mask.to(wide.dtype).mul_(wide).mul_(ctx.factor).to(ctx.dtype)
        return own, grad if ctx.needs_input_grad[1] else None, None, None


def dropped(x: Tensor, p: float, seed: Seed, onto: Tensor | None = None) -> Tensor:
    """Dropout of x on CPU by `kept`, added to `onto` if given: (t, d) -> (t, d)."""
    return _Masked.apply(x, onto, kept(x.shape, p, seed), scale(p))  # type: ignore[no-untyped-call]


class Tile(NamedTuple):
    """c sentences as (c, l) tokens; absent: (h c, 1, l), -inf for padding, else 0; None without padding."""

    sentences: int
    length: int
    absent: Tensor | None


class Rows(NamedTuple):
    """An index that reorders rows (t, d), split into h heads, by tile, head and sentence; and back.

    take: (places,) for each place in the new order, its row and head in the old one. padding: the places
    that have none. back: (rows * h,) for each row and head, its place. real: how many of `back` have one;
    rows of no sentence are the last.
    """

    take: Tensor
    padding: Tensor
    back: Tensor
    real: int


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
        absent = np.where(valid, 0, -np.inf).astype(np.float32)[:, None]
        tiles.append(Tile(high - low, top, None if valid.all() else torch.tensor(absent).repeat(heads, 1, 1)))
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
    flat = torch.from_numpy(np.concatenate(slots))
    places, padding = (flat >= 0).nonzero().flatten(), (flat < 0).nonzero().flatten()
    back = torch.zeros(rows * heads, dtype=torch.long)
    back[flat[places]] = places
    return Rows(flat.clamp_min(0), padding, back, len(places))


class Settings(NamedTuple):
    """How to attend. first: whether queries are first tokens only. p: dropout of the probabilities."""

    plan: Plan
    first: bool
    p: float
    seed: Seed

    @property
    def queries(self) -> Rows:
        """The index of the queries in the tiles."""
        return self.plan.firsts if self.first else self.plan.tokens

    def shapes(self) -> list[tuple[int, int, int]]:
        """For each tile the shape of its probabilities: (h c, l, l), or (h c, 1, l) for first tokens."""
        heads = self.plan.heads
        return [(heads * t.sentences, 1 if self.first else t.length, t.length) for t in self.plan.tiles]

    def masks(self) -> list[Tensor | None]:
        """For each tile its dropout mask (h c, l, l), 1 for what is kept; None without dropout."""
        if self.p == 0:
            return [None] * len(self.plan.tiles)
        sizes = [prod(shape) for shape in self.shapes()]
        parts = kept([sum(sizes)], self.p, self.seed).split(sizes)
        return [part.view(shape) for part, shape in zip(parts, self.shapes(), strict=True)]


def attention(q: Tensor, k: Tensor, v: Tensor, settings: Settings) -> Tensor:
    """Softmax attention on CPU, in float32 or float64: bfloat16 is slower there for short sentences.

    q: (rows, d) of all tokens or of first tokens, k, v: (rows, d) -> the shape of q. Rows that belong to no
    sentence become zero.
    """
    plan, shapes = settings.plan, settings.shapes()
    with torch.autocast("cpu", enabled=False):
        queries = tiled(q, settings.queries, [(hc, rows) for hc, rows, _ in shapes])
        keys, values = (tiled(x, plan.tokens, [(hc, length) for hc, _, length in shapes]) for x in (k, v))
        tiles = zip(queries, keys, values, plan.tiles, settings.masks(), strict=True)
        seen = torch.cat([attended(*tile, scale(settings.p)) for tile in tiles])
        back: Tensor = _Moved.apply(seen, settings.queries, True)  # type: ignore[no-untyped-call]
        return back.view(len(q), -1).to(q.dtype)


def tiled(x: Tensor, rows: Rows, shapes: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Rows by sentence -> for each tile by head and sentence: (rows, d) -> (h c, l, d / h) each."""
    split = at_least_float32(x).reshape(len(rows.back), -1)
    moved: Tensor = _Moved.apply(split, rows, False)  # type: ignore[no-untyped-call]
    parts = moved.split([prod(shape) for shape in shapes])
    return [part.view(*shape, -1) for part, shape in zip(parts, shapes, strict=True)]


class _Moved(Function):
    """`moved`, whose gradient is moved the other way: autograd would add it up row by row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Rows, back: bool) -> Tensor:
        ctx.rows, ctx.back = rows, back
        return moved(x, rows, back)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return moved(grad, ctx.rows, not ctx.back), None, None


def moved(x: Tensor, rows: Rows, back: bool) -> Tensor:
    """x (rows * h, d / h) in the order of tiles, or with `back` the other way; 0 for what was not there."""
    if not back:
        return x.index_select(0, rows.take).index_fill_(0, rows.padding, 0)
    made = x.index_select(0, rows.back)
    made[rows.real :] = 0
    return made


def attended(q: Tensor, k: Tensor, v: Tensor, tile: Tile, mask: Tensor | None, factor: float) -> Tensor:
    """Attention in one tile: q (h c, l or 1, d / h), k and v (h c, l, d / h) -> (h c l, d / h)."""
    weights = torch.bmm(q, k.mT).mul_(q.shape[-1] ** -0.5)
    if tile.absent is not None:
        weights = weights.add_(tile.absent)
    weights = weights.softmax(dim=-1)
    if mask is not None:
        weights = _Masked.apply(weights, None, mask, factor)  # type: ignore[no-untyped-call]
    return torch.bmm(weights, v).flatten(0, 1)


def way(device: str, width: int, dtype: torch.dtype) -> str:
    """How attention is computed on a kind of device: "tiles" on CPU, "unpadded" on CUDA, or "padded".

    "unpadded" is for heads of a width that is a multiple of 8, not in float64. "padded" is Transformers' own.
    """
    if device == "cpu":
        return "tiles"
    fits = width % 8 == 0 and width <= WIDEST and dtype != torch.float64
    return "unpadded" if device == "cuda" and fits and kernels() else "padded"


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

"""From hidden states to vectors: pooling, the projection head of training, and a final affine transform.

v: views    n: sentences    t: tokens of all sentences    d: width    k: layers asked for, or components kept

    SimCSE's poolers         cls = pooler [-1]    cls_before_pooler = cls [-1]    avg = mean [-1]
                             avg_top2 = mean [-2, -1]    avg_first_last = mean [1, -1], and [0, -1] in the
                             version behind the published 56.70 (SimCSE issue 285)
    WhiteningBERT's best     mean [1, 2, 12] (Figure 2); its Table 1 uses [1], [12] and [1, 12]

The head of WhitenedCSE (arXiv:2305.17746, section 4.1) is SGW -> Linear(d, d) -> tanh.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, normalize

from whitenedcse.compute import at_least_float32, full_precision
from whitenedcse.model.whitener import Whitener, WhiteningSettings

POSITIONS = ("before", "after", "both")
PAPER = WhiteningSettings()
KINDS = ("cls", "mean", "max", "last", "pooler")
NAMED = {"first_last": ("mean", (1, -1))}


class Pooling:
    """One vector per sentence: pooled tokens of each of some layers, averaged over the layers.

    Hidden states (k, t, d) of k layers and t tokens, offsets (n + 1,) of n sentences -> (n, d), in float32
    (float64 stays). Layer 0 is the embedding layer, -1 the last. "cls" takes the first token, and so does
    "pooler"; the embedder then applies the checkpoint's own pooler, a dense layer and tanh. "mean" includes
    special tokens, as in SimCSE and WhiteningBERT. "last" takes the last token, special or not: in a decoder
    only that one attends to the whole sentence. Raises ValueError for an unknown kind, and for "pooler" with
    layers other than the last.

    >>> hidden, offsets = torch.arange(5.0).view(1, 5, 1), torch.tensor([0, 2, 5])  # of 2 and 3 tokens
    >>> Pooling("mean")(hidden, offsets).flatten(), Pooling("last")(hidden, offsets).flatten()
    (tensor([0.5000, 3.0000]), tensor([1., 4.]))
    """

    def __init__(self, kind: str = "cls", layers: Sequence[int] = (-1,)) -> None:
        if kind not in KINDS:
            more = "first_last is mean over layers [1, -1]"
            raise ValueError(f"pooling.kind={kind!r} is not one of {', '.join(KINDS)}; {more}")
        if kind == "pooler" and list(layers) != [-1]:
            raise ValueError(f"pooling.kind=pooler reads the last layer only; pooling.layers={list(layers)}")
        self.kind, self.layers = kind, tuple(int(layer) for layer in layers)

    @classmethod
    def named(cls, name: str, layers: Sequence[int] | None = None) -> Pooling:
        """The pooling of a kind, of its usual layers or of others; "first_last" is a mean over two layers."""
        kind, usual = NAMED.get(name, (name, (-1,)))
        return cls(kind, layers or usual)

    def __call__(self, hidden: Tensor, offsets: Tensor) -> Tensor:
        """The pooled vectors: hidden states (k, t, d), offsets (n + 1,) -> (n, d)."""
        return pooled(self.kind, hidden, offsets).mean(dim=0)

    @property
    def reads_first(self) -> bool:
        """Whether the pooling reads only the first token of a sentence."""
        return self.kind in ("cls", "pooler")

    def __str__(self) -> str:
        return f"{self.kind} over layers {list(self.layers)}"


def requested(said: Any, layers: Sequence[int] | None) -> Pooling | None:
    """The pooling that a command line sets by `said` (kind, layers) and by other layers; None if neither.

    >>> requested(None, [1, -1]).layers, requested(None, None), requested({}, None)  # pooling=own
    ((1, -1), None, None)
    """
    if not said and layers is None:
        return None
    return Pooling(kind=said.kind if said else "cls", layers=said.layers if layers is None else layers)


def pooled(kind: str, hidden: Tensor, offsets: Tensor) -> Tensor:
    """The tokens of each sentence reduced to one vector in each layer: (k, t, d), (n + 1,) -> (k, n, d).

    >>> pooled("max", torch.arange(5.0).view(1, 5, 1), torch.tensor([0, 2, 5])).flatten()
    tensor([1., 4.])
    """
    hidden = at_least_float32(hidden)
    if kind in ("mean", "max") and hidden.device.type == "mps":
        return scattered(kind, hidden, offsets)
    if kind in ("mean", "max"):
        return torch.stack([torch.segment_reduce(x, kind, offsets=offsets, axis=0) for x in hidden])
    return hidden[:, offsets[1:] - 1 if kind == "last" else offsets[:-1]]


def scattered(kind: str, hidden: Tensor, offsets: Tensor) -> Tensor:
    """Mean and maximum over each sentence for Apple's GPUs, which lack `segment_reduce`.

    >>> scattered("mean", torch.arange(5.0).view(1, 5, 1), torch.tensor([0, 2, 5])).flatten()
    tensor([0.5000, 3.0000])
    """
    k, t, d = hidden.shape
    lengths = offsets.diff()
    owner = torch.arange(len(lengths), device=offsets.device).repeat_interleave(lengths, output_size=t)
    if kind == "mean":
        return hidden.new_zeros(k, len(lengths), d).index_add(1, owner, hidden) / lengths.unsqueeze(-1)
    lowest = hidden.new_full((k, len(lengths), d), -torch.inf)
    return lowest.scatter_reduce(1, owner[:, None].expand_as(hidden), hidden, "amax")


class ProjectionHead(nn.Module):
    """Whitening before, after or on both sides of an optional dense layer; in float32 even under autocast.

    x: (v, n, d) or (n, d) -> z of the same shape. The default is that of the paper: SGW, then a linear layer
    and tanh (section 4.1; the official code has the same order). Without whitening and dense layer z is x.

    whitening: settings, or a module that is used as it is, a `Whitener` or one of your own; None for no
    whitening. dense: whether there is a linear layer with tanh. position: where to whiten, "before" or
    "after" that layer, or "both" (there a module is copied). Raises ValueError for any other position.

    >>> x = torch.randn(2, 64, 768)
    >>> bool((ProjectionHead(768)(x).abs() < 1).all())  # tanh comes last
    True
    >>> torch.equal(ProjectionHead(768, whitening=None, dense=False)(x), x)
    True
    """

    def __init__(
        self,
        width: int,
        *,
        whitening: WhiteningSettings | nn.Module | None = PAPER,
        dense: bool = True,
        position: str = "before",
    ) -> None:
        super().__init__()
        if position not in POSITIONS:
            raise ValueError(f"head.position={position!r} is not one of {', '.join(POSITIONS)}")
        if not isinstance(whitening, WhiteningSettings | nn.Module | None):
            raise TypeError(f"whitening={whitening!r:.50} must be None, a WhiteningSettings or a module")
        self.position = position
        module = Whitener(width, whitening) if isinstance(whitening, WhiteningSettings) else whitening
        self.before: Any = module if position != "after" or not dense else None
        self.linear = nn.Linear(width, width) if dense else None
        if self.linear is not None:  # as BERT initialises its layers, and SimCSE its head
            nn.init.normal_(self.linear.weight, std=0.02)
            nn.init.zeros_(self.linear.bias)
        self.after: Any = None
        if position != "before" and dense:
            self.after = deepcopy(module) if position == "both" else module

    @property
    def whitening(self) -> WhiteningSettings | None:
        """The settings of its whitening; None without one, or for a module without settings."""
        return getattr(self.before or self.after, "settings", None)

    @property
    def own(self) -> str:
        """The class of it, its whitening or layer that is a user's, which no checkpoint holds, or ""."""
        parts = zip((self, self.before, self.linear, self.after), STOCK, strict=True)
        kinds = (type(part) for part, stock in parts if type(part) not in (stock, type(None)))
        return next((f"{kind.__module__}.{kind.__qualname__}" for kind in kinds), "")

    @full_precision
    def forward(self, x: Tensor) -> Tensor:
        """Pooled x -> projected z: (v, n, d) or (n, d) -> the same shape, in float32 or float64."""
        z = self.before(x) if self.before is not None else x
        z = self.dense(z) if self.linear is not None else z
        return self.after(z) if self.after is not None else z

    def project(self, x: Tensor, *, passes: int, views: int) -> tuple[Tensor, Tensor | None]:
        """Pooled x -> what the loss sees: views z, and projected hard negatives or None.

        x: (p + r, n, d), p encoder passes and r of hard negatives -> z: (v, n, d) and (r n, d). The passes
        serve the views in turn: p = 1 with v views is the paper's cheap form, one encoding, v whitenings.
        """
        if not 1 <= passes <= views:
            raise ValueError(f"{passes} encoder passes for {views} views; there are 1 to as many as views")
        if passes < views:
            turns = [view % passes for view in range(views)]
            x = x[[*turns, *range(passes, len(x))]]
        z = self(x)
        negatives = z[views:].flatten(0, 1) if len(z) > views else None
        return z[:views], negatives

    def dense(self, x: Tensor) -> Tensor:
        """The linear layer, which there must be, and tanh alone: (..., d) -> (..., d)."""
        assert self.linear is not None
        return torch.tanh(self.linear(x))


STOCK = (ProjectionHead, Whitener, nn.Linear, Whitener)  # the head, and what is before, in and after it


class Final(nn.Module):
    """A final affine transform x @ weight.T + bias, with `tanh` its tanh, with `unit` over its length.

    x: (n, d) -> (n, k) in float32. weight: (k, d), bias: (k,); None for no transform. provenance: what it was
    fitted to, as plain JSON. BERT-whitening's x -> (x - mean) @ W is weight = W.T, bias = -mean @ W
    (arXiv:2103.15316, Algorithm 1).

    >>> halved = Final(weight=torch.eye(2)[:1], bias=torch.zeros(1), unit=False, provenance={})
    >>> halved(torch.tensor([[3.0, 4.0]])), halved.width(2)
    (tensor([[3.]]), 1)
    """

    weight: Tensor | None
    bias: Tensor | None

    def __init__(
        self,
        *,
        weight: Tensor | None,
        bias: Tensor | None,
        unit: bool,
        provenance: Mapping[str, Any],
        tanh: bool = False,
    ) -> None:
        super().__init__()
        for name, tensor in {"weight": weight, "bias": bias}.items():
            self.register_buffer(name, None if tensor is None else tensor.to(torch.float32).contiguous())
        self.unit, self.tanh, self.provenance = unit, tanh, dict(provenance)

    def width(self, d: int) -> int:
        """The width k of the result, for embeddings of width d; ValueError if the transform has another d."""
        if self.weight is None:
            return d
        if self.weight.shape[1] != d:
            raise ValueError(f"a transform of width {self.weight.shape[1]} for an embedding of width {d}")
        return len(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """The transformed x: (n, d) -> (n, k)."""
        with torch.autocast(x.device.type, enabled=False):
            x = x if self.weight is None else linear(x.to(self.weight.dtype), self.weight, self.bias)
            x = torch.tanh(x) if self.tanh else x
            return normalize(x, dim=-1) if self.unit else x

"""Pooling: the hidden states of a ragged batch to one vector per sentence; and a final affine transform.

n: sentences    t: tokens of all sentences    d: width    k: layers asked for, or components kept

    SimCSE's poolers         cls = pooler [-1]    cls_before_pooler = cls [-1]    avg = mean [-1]
                             avg_top2 = mean [-2, -1]    avg_first_last = mean [1, -1], and [0, -1] in the
                             version behind the published 56.70 (SimCSE issue 285)
    WhiteningBERT's best     mean [1, 2, 12] (Figure 2); its Table 1 uses [1], [12] and [1, 12]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, normalize

from whitenedcse.app.compute import at_least_float32

KINDS = ("cls", "mean", "max", "last", "pooler")


class Pooling:
    """One vector per sentence: a kind of pooling in each of some layers, averaged over the layers.

    hidden: (k, t, d), offsets: (n + 1,) -> (n, d) in float32 (float64 stays).
    Layer 0 is the embedding layer, -1 the last. "pooler" gives the first token as "cls" does; the dense
    layer and tanh of the checkpoint's own pooler follow in the encoder. "mean" counts special tokens, as
    SimCSE and WhiteningBERT do. "last" is the last token, whatever the tokenizer ends with: in a decoder it
    alone attends to the whole sentence. Raises ValueError for an unknown kind or no layers.
    """

    def __init__(self, kind: str = "cls", layers: Sequence[int] = (-1,)) -> None:
        if kind not in KINDS:
            raise ValueError(f"pooling.kind={kind!r} is not one of {', '.join(KINDS)}")
        if not layers:
            raise ValueError("pooling.layers is empty; name at least one layer, e.g. [-1]")
        if kind == "pooler" and list(layers) != [-1]:
            raise ValueError(f"pooling.kind=pooler reads the last layer only; pooling.layers={list(layers)}")
        self.kind, self.layers = kind, tuple(int(layer) for layer in layers)

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
    """The pooling that a command line sets by `said` (kind, layers) and by other layers; None if neither."""
    if said is None and layers is None:
        return None
    return Pooling(kind=said.kind if said else "cls", layers=said.layers if layers is None else layers)


def pooled(kind: str, hidden: Tensor, offsets: Tensor) -> Tensor:
    """The tokens of each sentence reduced to one vector in each layer: (k, t, d), (n + 1,) -> (k, n, d)."""
    hidden = at_least_float32(hidden)
    if kind in ("mean", "max") and hidden.device.type == "mps":
        return scattered(kind, hidden, offsets)
    if kind in ("mean", "max"):
        return torch.stack([torch.segment_reduce(x, kind, offsets=offsets, axis=0) for x in hidden])
    return hidden[:, offsets[1:] - 1 if kind == "last" else offsets[:-1]]


def scattered(kind: str, hidden: Tensor, offsets: Tensor) -> Tensor:
    """Mean and maximum over each sentence for Apple's GPUs, which lack `segment_reduce`."""
    k, t, d = hidden.shape
    lengths = offsets.diff()
    owner = torch.arange(len(lengths), device=offsets.device).repeat_interleave(lengths, output_size=t)
    if kind == "mean":
        return hidden.new_zeros(k, len(lengths), d).index_add(1, owner, hidden) / lengths.unsqueeze(-1)
    lowest = hidden.new_full((k, len(lengths), d), -torch.inf)
    return lowest.scatter_reduce(1, owner[:, None].expand_as(hidden), hidden, "amax")


class Final(nn.Module):
    """A final affine transform x @ weight.T + bias and, with `unit`, division by the length; in float32.

    x: (n, d) -> (n, k). weight: (k, d), bias: (k,); None for no transform. provenance: what it was fitted to,
    as plain JSON. BERT-whitening's x -> (x - mean) @ W is weight = W.T, bias = -mean @ W (arXiv:2103.15316,
    Algorithm 1). Raises ValueError for shapes that do not match, numbers that are not finite, or neither
    transform nor `unit`.
    """

    weight: Tensor | None
    bias: Tensor | None

    def __init__(
        self, *, weight: Tensor | None, bias: Tensor | None, unit: bool, provenance: Mapping[str, Any]
    ) -> None:
        super().__init__()
        if weight is None and not unit:
            raise ValueError(
                "a final step without a transform and without unit length does nothing; leave it out"
            )
        if (weight is None) != (bias is None) or (
            weight is not None and bias is not None and (weight.ndim != 2 or bias.shape != weight.shape[:1])
        ):
            shapes = [None if t is None else tuple(t.shape) for t in (weight, bias)]
            raise ValueError(
                f"weight and bias of shapes {shapes} are not those of an affine transform: (k, d) and (k,)"
            )
        for name, tensor in {"weight": weight, "bias": bias}.items():
            if tensor is not None and not tensor.isfinite().all():
                raise ValueError(f"the {name} of the transform holds numbers that are not finite")
            self.register_buffer(name, None if tensor is None else tensor.to(torch.float32).contiguous())
        self.unit, self.provenance = unit, dict(provenance)

    def width(self, d: int) -> int:
        """The width k of the result, for embeddings of width d.

        Raises ValueError if the transform has another d.
        """
        if self.weight is None:
            return d
        if self.weight.shape[1] != d:
            raise ValueError(
                f"a transform of width {self.weight.shape[1]} does not go with an embedding of {d}"
            )
        return len(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """The transformed x: (n, d) -> (n, k)."""
        with torch.autocast(x.device.type, enabled=False):
            x = x if self.weight is None else linear(x.to(self.weight.dtype), self.weight, self.bias)
            return normalize(x, dim=-1) if self.unit else x

"""What comes last: an affine map of the embedding, as whitening-k is one, and unit length.

n: sentences    d: width of the embedding    k: of what the map makes of it
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, normalize


class Final(nn.Module):
    """x (n, d) -> (n, k): x @ weight.T + bias, then, to `unit`, divided by its length; in float32.

    weight: (k, d), bias: (k,); None for no map. provenance: what the map was fitted to, as plain JSON.
    BERT-whitening's x -> (x - mean) @ W is weight = W.T, bias = -mean @ W (arXiv:2103.15316, Algorithm 1).
    Raises ValueError for shapes that do not belong together, numbers that are not finite, or nothing to do.
    """

    weight: Tensor | None
    bias: Tensor | None

    def __init__(
        self, *, weight: Tensor | None, bias: Tensor | None, unit: bool, provenance: Mapping[str, Any]
    ) -> None:
        super().__init__()
        if weight is None and not unit:
            raise ValueError("a final step without a map and without unit length does nothing; leave it out")
        if (weight is None) != (bias is None) or (
            weight is not None and bias is not None and (weight.ndim != 2 or bias.shape != weight.shape[:1])
        ):
            shapes = [None if t is None else tuple(t.shape) for t in (weight, bias)]
            raise ValueError(f"weight and bias of shapes {shapes} are not those of a map: (k, d) and (k,)")
        for name, tensor in {"weight": weight, "bias": bias}.items():
            if tensor is not None and not tensor.isfinite().all():
                raise ValueError(f"the {name} of the map holds numbers that are not finite")
            self.register_buffer(name, None if tensor is None else tensor.to(torch.float32).contiguous())
        self.unit, self.provenance = unit, dict(provenance)

    def width(self, d: int) -> int:
        """k, of an embedding of width d. Raises ValueError for a map of another width."""
        if self.weight is None:
            return d
        if self.weight.shape[1] != d:
            raise ValueError(f"a map of width {self.weight.shape[1]} does not go with an embedding of {d}")
        return len(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """(n, d) -> (n, k)."""
        with torch.autocast(x.device.type, enabled=False):
            x = x if self.weight is None else linear(x.to(self.weight.dtype), self.weight, self.bias)
            return normalize(x, dim=-1) if self.unit else x

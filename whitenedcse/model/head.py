"""Projection heads, which map pooled vectors to the vectors that the training loss compares.

v: views    n: sentences    d: width

The paper's head is SGW -> Linear(d, d) -> tanh (WhitenedCSE, arXiv:2305.17746, section 4.1).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from whitenedcse.app.compute import full_precision
from whitenedcse.model.whitener import Whitener, WhiteningSettings

POSITIONS = ("before", "after", "both")
PAPER = WhiteningSettings()


class ProjectionHead(nn.Module):
    """Whitening before, after or on both sides of an optional dense layer; in float32 whatever surrounds it.

    x: (v, n, d) or (n, d) -> z of the same shape. The default is the paper's SGW, linear layer and tanh
    (section 4.1; its code has the same order). Without whitening and dense layer it is the identity.

    whitening: what whitens, as a module such as `ShuffledGroupWhitening(width)` or as its settings; None for
    nothing. dense: whether there is a linear layer with tanh. position: of the whitening, "before" or "after"
    that layer, or "both". Raises ValueError for another position, or a whitening of another width.

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
        whitening: WhiteningSettings | Whitener | None = PAPER,
        dense: bool = True,
        position: str = "before",
    ) -> None:
        super().__init__()
        if position not in POSITIONS:
            raise ValueError(f"head.position={position!r} is not one of {', '.join(POSITIONS)}")
        if isinstance(whitening, Whitener):
            if len(whitening.mean) != width:
                raise ValueError(f"a whitening of width {len(whitening.mean)} in a head of width {width}")
            whitening = whitening.settings
        self.whitening, self.position = whitening, position
        first, last = position in ("before", "both") or not dense, position in ("after", "both") and dense
        self.before = Whitener(width, whitening) if whitening and first else None
        self.linear = nn.Linear(width, width) if dense else None
        self.after = Whitener(width, whitening) if whitening and last else None
        if self.linear is not None:  # as BERT initialises its layers, and SimCSE its head
            nn.init.normal_(self.linear.weight, std=0.02)
            nn.init.zeros_(self.linear.bias)

    @full_precision
    def forward(self, x: Tensor) -> Tensor:
        """The projected z of pooled x: (v, n, d) or (n, d) -> the same shape, in float32 or float64."""
        z = self.before(x) if self.before is not None else x
        z = self.dense(z) if self.linear is not None else z
        return self.after(z) if self.after is not None else z

    def project(self, x: Tensor, *, passes: int, views: int) -> tuple[Tensor, Tensor | None]:
        """Pooled x -> what the loss sees: views z, and projected hard negatives or None.

        x: (p + r, n, d), p encoder passes and r of hard negatives -> z: (v, n, d) and (r n, d). The passes
        serve the views in turn, so p = 1 with v views is the paper's cheap form: one encoding, v whitenings.
        Hard negatives form views of their own. Raises ValueError unless 1 <= p <= v.
        """
        if not 1 <= passes <= views:
            raise ValueError(
                f"{passes} encoder passes for {views} views; there are from 1 to as many as views"
            )
        turns = [view % passes for view in range(views)] + list(range(passes, len(x)))
        z = self(x if turns == list(range(len(x))) else x[turns])
        return z[:views], None if len(x) == passes else z[views:].flatten(0, 1)

    def dense(self, x: Tensor) -> Tensor:
        """The linear layer and tanh alone: (..., d) -> (..., d). Raises ValueError if the head has none."""
        if self.linear is None:
            raise ValueError("embedding=dense, but this head has no dense layer")
        return torch.tanh(self.linear(x))

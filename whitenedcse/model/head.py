"""Projection heads, which map pooled vectors to the vectors that the training loss compares.

v: views    n: sentences    d: width    g: groups    w = d / g: channels in a group

The paper's head is SGW -> Linear(d, d) -> tanh ([1] section 4.1; its code has the same order).

[1] WhitenedCSE, arXiv:2305.17746
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from whitenedcse import whitening
from whitenedcse.app.compute import full_precision
from whitenedcse.linalg import Ridge
from whitenedcse.whitening import Gradient

KINDS = ("pca", "zca", "group", "shuffled_group")
PARTITIONS = ("view", "joint", "official_slice")
POSITIONS = ("before", "after", "both")


@dataclass(frozen=True, kw_only=True)
class Whitening:
    """The settings of a head's whitening.

    kind: "pca" and "zca" whiten all d channels with momentum statistics ([1] Eq. 13, Table 3); "group" and
        "shuffled_group" whiten groups with the statistics of the batch ([1] Eq. 5, 6).
    groups: the NUMBER of groups (the paper's "group size"); None derives it from group_width.
    eps, floor: what is added to each variance: a share of the group's mean variance, and a fixed amount.
    gradient: "full", "centre" (the matrix is a constant, as in the official code) or "none".
    partition: "view" (each view on its own, [1] section 3.2.2), "joint" (all views together), or
        "official_slice" (v consecutive parts of the sentence-major batch, as the official code cuts it).
    momentum: beta of Eq. 13; the running statistics serve evaluation, and training for pca and zca.
    Raises ValueError for settings that are unknown, out of range or contradictory.

    >>> shuffled = Whitening(kind="shuffled_group", groups=384, group_width=None, eps=1e-5, floor=0.0,
    ...                      shrinkage=0.0, gradient="centre", partition="view", momentum=0.9)
    >>> shuffled.width(768)
    2
    """

    kind: str
    groups: int | None
    group_width: int | None
    eps: float
    floor: float
    shrinkage: float
    gradient: Gradient
    partition: str
    momentum: float

    def __post_init__(self) -> None:
        choices = {"kind": KINDS, "gradient": ("full", "centre", "none"), "partition": PARTITIONS}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"whitening.{name}={getattr(self, name)!r} is not one of {', '.join(allowed)}"
                )
        if self.kind == "pca" and self.gradient == "full":
            raise ValueError("whitening.kind=pca has no full gradient (eigenvectors); use gradient=centre")
        for name, sound, words in (
            ("momentum", 0 <= self.momentum < 1, "in [0, 1)"),
            ("shrinkage", 0 <= self.shrinkage <= 1, "in [0, 1]"),
            ("eps", 0 < self.eps + self.floor < math.inf, "finite and above 0, if whitening.floor is not"),
            ("floor", self.floor >= 0 <= self.eps, "0 or above, as whitening.eps must be"),
        ):
            if not sound:
                raise ValueError(f"whitening.{name}={getattr(self, name)} is not {words}")

    def width(self, d: int) -> int:
        """The number of channels in a group, for an embedding of width d.

        Raises ValueError where the groups do not divide d.
        """
        if self.kind in ("pca", "zca"):
            return d
        if self.groups is not None:
            return whitening.group_width(d, groups=self.groups)
        return whitening.group_width(d, width=self.group_width)


def refuse(settings: Whitening | None, d: int, *, n: int, views: int) -> None:
    """Raise ValueError if a batch has too few rows to whiten the channels of a group at full rank.

    n: sentences of a batch, views: of each sentence, d: width of the embedding. With no more rows than
    channels eps alone bounds the gain, at 1 / sqrt(eps), and the loss would see noise. Shrinkage bounds the
    gain too, and is accepted. "pca" and "zca" average over batches, so that only their first steps suffer:
    for these there is a warning.

    >>> pairs = Whitening(kind="group", groups=None, group_width=2, eps=1e-5, floor=0.0,
    ...                   shrinkage=0.0, gradient="centre", partition="view", momentum=0.9)
    >>> refuse(pairs, 768, n=64, views=2)  # 64 sentences suffice for 2 channels, 2 do not
    >>> refuse(pairs, 768, n=2, views=2)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: ...
    """
    if settings is None or settings.shrinkage > 0:
        return
    width, rows = settings.width(d), n * views if settings.partition == "joint" else n
    if rows > width:
        return
    said = f"{rows} sentences cannot whiten {width} channels, where eps={settings.eps} alone bounds the gain"
    if settings.kind in ("pca", "zca"):
        warnings.warn(f"head.whitening.kind={settings.kind}: at first {said}", stacklevel=2)
        return
    raise ValueError(
        f"{said}: use data.batch_size above {width} on each device, a smaller head.whitening.group_width "
        "(more groups), or head.whitening.shrinkage above 0"
    )


class Whitener(nn.Module):
    """Whitening by the statistics of the batch while training, and by running ones (Eq. 13) in eval mode.

    x: (v, n, d) -> (v, n, d). Eval mode is deterministic: groups are consecutive channels, unshuffled.
    The running statistics follow the average over the views, and start as those of the first batch.

    >>> settings = Whitening(kind="group", groups=1, group_width=None, eps=1e-6, floor=0.0,
    ...                      shrinkage=0.0, gradient="centre", partition="view", momentum=0.9)
    >>> whitener, x = Whitener(settings, d=3), torch.randn(2, 64, 3)
    >>> torch.allclose(whitening.covariance(whitener(x)), torch.eye(3), atol=1e-3)
    True
    >>> whitener.eval()(x[:, :1]).shape  # one sentence is whitened by the running statistics
    torch.Size([2, 1, 3])
    """

    mean: Tensor
    covariance: Tensor
    batches: Tensor

    def __init__(self, settings: Whitening, d: int) -> None:
        super().__init__()
        self.settings = settings
        self.width = settings.width(d)
        self.register_buffer("mean", torch.zeros(d))
        self.register_buffer("covariance", torch.eye(self.width).repeat(d // self.width, 1, 1))
        self.register_buffer("batches", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        """The whitened x: (v, n, d) -> (v, n, d). In training mode it also updates the running statistics."""
        if not self.training:
            return self.affine(x, self.mean, self.covariance)
        batchwise = self.settings.kind in ("group", "shuffled_group")
        with torch.set_grad_enabled(torch.is_grad_enabled() and not batchwise):
            mean, covariance = self.blended(x)
        self.remember(mean.detach(), covariance.detach())
        if batchwise:
            refuse(self.settings, x.shape[-1], n=x.shape[-2], views=len(x))
            return rearranged(x, self.settings.partition, self.over_batch)
        return self.affine(x, mean, covariance)

    def over_batch(self, x: Tensor) -> Tensor:
        """x whitened by the statistics of each view, shuffled if set: (v, n, d) -> (v, n, d)."""
        settings = self.settings
        names = ("eps", "floor", "gradient", "shrinkage")
        options: Any = {"width": self.width, **{name: getattr(settings, name) for name in names}}
        if settings.kind == "group":
            return whitening.group_whiten(x, **options)
        order = whitening.permutations(x.shape[:-2], x.shape[-1], device=x.device)
        return whitening.shuffled_group_whiten(x, order, **options)

    def affine(self, x: Tensor, mean: Tensor, covariance: Tensor) -> Tensor:
        """x whitened by the given statistics: (v, n, d), (d,), (g, w, w) -> (v, n, d)."""
        if self.settings.gradient != "full":
            covariance = covariance.detach()
        if self.settings.gradient == "none":
            mean = mean.detach()
        grouped = (x - mean).unflatten(-1, (-1, self.width)).unsqueeze(-2)  # (v, n, g, 1, w)
        return (grouped @ self.matrix(mean, covariance)).flatten(-3)

    def matrix(self, mean: Tensor, covariance: Tensor) -> Tensor:
        """Whitening matrices for row vectors, from mean (d,) and covariances (g, w, w): (g, w, w)."""
        settings = self.settings
        covariance = whitening.shrink(covariance, settings.shrinkage)
        eps, floor = Ridge(settings.eps, settings.floor).above(mean.unflatten(-1, (-1, self.width)))
        return (whitening.pca if settings.kind == "pca" else whitening.zca)(covariance, eps=eps, floor=floor)

    def dense(self) -> tuple[Tensor, Tensor]:
        """Weight (d, d) and bias (d,) with which eval mode is y = x @ weight.T + bias."""
        matrix = torch.block_diag(*self.matrix(self.mean, self.covariance))
        return matrix.T, -self.mean @ matrix

    def blended(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The running statistics moved towards those of x (Eq.

        13): (v, n, d) -> mean (d,), covariances (g, w, w).
        """
        groups = x.unflatten(-1, (-1, self.width)).movedim(-2, 1)  # (v, g, n, w)
        mean, covariance = x.mean(dim=(0, 1)), whitening.covariance(groups).mean(dim=0)
        beta = self.settings.momentum * (self.batches > 0)
        return beta * self.mean + (1 - beta) * mean, beta * self.covariance + (1 - beta) * covariance

    def remember(self, mean: Tensor, covariance: Tensor) -> None:
        """Store mean (d,) and covariances (g, w, w) as the running statistics."""
        self.mean.copy_(mean)
        self.covariance.copy_(covariance)
        self.batches += 1


def rearranged(x: Tensor, partition: str, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply `function` to the rows of x in the views that `partition` names, and put the rows back.

    x: (v, n, d) -> (v, n, d). partition: see `Whitening`. function: (v, n, d) -> (v, n, d) of the rows so
    divided; for "joint" it is given (1, v n, d).

    >>> x = torch.tensor([[[1.0]], [[3.0]]])  # two views of one sentence
    >>> def centred(x): return x - x.mean(dim=1, keepdim=True)
    >>> rearranged(x, "view", centred).flatten(), rearranged(x, "joint", centred).flatten()
    (tensor([0., 0.]), tensor([-1.,  1.]))
    """
    if partition == "view":
        return function(x)
    if partition == "joint":
        return function(x.flatten(0, 1).unsqueeze(0)).view_as(x)
    sliced = x.transpose(0, 1).reshape(x.shape)  # sentence-major rows, cut into v consecutive parts
    return function(sliced).reshape(x.shape[1], x.shape[0], -1).transpose(0, 1)


class Head(nn.Module):
    """Whitening before, after or on both sides of an optional dense layer; in float32 whatever surrounds it.

    x: (v, n, d) -> z: (v, n, d). Without whitening and dense layer it is the identity.

    >>> x = torch.randn(2, 8, 4)
    >>> torch.equal(Head(width=4, whitening=None, dense=False, position="before")(x), x)
    True
    >>> bool((Head(width=4, whitening=None, dense=True, position="before")(x).abs() < 1).all())  # tanh
    True
    """

    def __init__(self, *, width: int, whitening: Whitening | None, dense: bool, position: str) -> None:
        super().__init__()
        if position not in POSITIONS:
            raise ValueError(f"head.position={position!r} is not one of {', '.join(POSITIONS)}")
        self.whitening, self.position = whitening, position
        first, last = position in ("before", "both") or not dense, position in ("after", "both") and dense
        self.before = Whitener(whitening, width) if whitening and first else None
        self.linear = nn.Linear(width, width) if dense else None
        self.after = Whitener(whitening, width) if whitening and last else None
        if self.linear is not None:  # as BERT initialises its layers, and SimCSE its head
            nn.init.normal_(self.linear.weight, std=0.02)
            nn.init.zeros_(self.linear.bias)

    @full_precision
    def forward(self, x: Tensor) -> Tensor:
        """The projected vectors z of pooled vectors x: (v, n, d) -> (v, n, d), in float32 or float64."""
        z = self.before(x) if self.before is not None else x
        z = self.dense(z) if self.linear is not None else z
        return self.after(z) if self.after is not None else z

    def dense(self, x: Tensor) -> Tensor:
        """The linear layer and tanh alone: (..., d) -> (..., d). Raises ValueError if the head has none."""
        if self.linear is None:
            raise ValueError("embedding=dense, but this head has no dense layer")
        return torch.tanh(self.linear(x))

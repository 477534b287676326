"""Whitening of a batch as PyTorch modules: all channels, groups of them, shuffled groups.

v: views    n: sentences    d: width    g: groups    w = d / g: channels in a group

[1] WhitenedCSE, arXiv:2305.17746
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from whitenedcse import whitening
from whitenedcse.app.compute import full_precision
from whitenedcse.linalg import Ridge
from whitenedcse.whitening import Gradient

KINDS = ("pca", "zca", "group", "shuffled_group")
PARTITIONS = ("view", "joint", "official_slice")


@dataclass(frozen=True, kw_only=True)
class WhiteningSettings:
    """The settings of a whitening; the defaults are the paper's ([1] section 4.1).

    kind: "pca" and "zca" whiten all d channels with momentum statistics ([1] Eq. 13, Table 3); "group" and
        "shuffled_group" whiten groups with the statistics of the batch ([1] Eq. 5, 6).
    groups: the NUMBER of groups (the paper's "group size"); None derives it from group_width.
    eps, floor: what is added to each variance: a share of the group's mean variance, and a fixed amount.
    gradient: "full", "centre" (the matrix is a constant, as in the official code) or "none".
    partition: "view" (each view on its own, [1] section 3.2.2), "joint" (all views together), or
        "official_slice" (v consecutive parts of the sentence-major batch, as the official code cuts it).
    momentum: beta of Eq. 13; the running statistics serve evaluation, and training for pca and zca.
    Raises ValueError for settings that are unknown, out of range or contradictory.

    >>> WhiteningSettings(groups=384).width(768)
    2
    """

    kind: str = "shuffled_group"
    groups: int | None = None
    group_width: int | None = 2
    eps: float = 1e-5
    floor: float = 0.0
    shrinkage: float = 0.0
    gradient: Gradient = "centre"
    partition: str = "view"
    momentum: float = 0.99

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


def refuse(settings: WhiteningSettings | None, d: int, *, n: int, views: int) -> None:
    """Raise ValueError if a batch has too few rows to whiten the channels of a group at full rank.

    n: sentences of a batch, views: of each sentence, d: width of the embedding. With no more rows than
    channels eps alone bounds the gain, at 1 / sqrt(eps), and the loss would see noise. Shrinkage bounds the
    gain too, and is accepted. "pca" and "zca" average over batches, so that only their first steps suffer:
    for these there is a warning.

    >>> pairs = WhiteningSettings(group_width=2)
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

    x: (v, n, d) or (n, d) -> the same shape, in float32 (float64 stays). Eval mode is deterministic: groups
    are consecutive channels, unshuffled.
    The running statistics follow the average over the views, and start as those of the first batch.

    >>> settings = WhiteningSettings(kind="group", groups=1, eps=1e-6)
    >>> whitener, x = Whitener(3, settings), torch.randn(2, 64, 3)
    >>> torch.allclose(whitening.covariance(whitener(x)), torch.eye(3), atol=1e-3)
    True
    >>> whitener.eval()(x[:, :1]).shape  # one sentence is whitened by the running statistics
    torch.Size([2, 1, 3])
    """

    mean: Tensor
    covariance: Tensor
    batches: Tensor

    def __init__(self, width: int, settings: WhiteningSettings) -> None:
        super().__init__()
        self.settings = settings
        self.group_width = settings.width(width)
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer(
            "covariance", torch.eye(self.group_width).repeat(width // self.group_width, 1, 1)
        )
        self.register_buffer("batches", torch.zeros((), dtype=torch.long))

    @full_precision
    def forward(self, x: Tensor) -> Tensor:
        """The whitened x, in float32 or float64; in training mode this updates the running statistics."""
        if x.ndim == 2:
            return self(x.unsqueeze(0)).squeeze(0)
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
        options: Any = {"width": self.group_width, **{name: getattr(settings, name) for name in names}}
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
        grouped = (x - mean).unflatten(-1, (-1, self.group_width)).unsqueeze(-2)  # (v, n, g, 1, w)
        return (grouped @ self.matrix(mean, covariance)).flatten(-3)

    def matrix(self, mean: Tensor, covariance: Tensor) -> Tensor:
        """Whitening matrices for row vectors, from mean (d,) and covariances (g, w, w): (g, w, w)."""
        settings = self.settings
        covariance = whitening.shrink(covariance, settings.shrinkage)
        eps, floor = Ridge(settings.eps, settings.floor).above(mean.unflatten(-1, (-1, self.group_width)))
        return (whitening.pca if settings.kind == "pca" else whitening.zca)(covariance, eps=eps, floor=floor)

    def dense(self) -> tuple[Tensor, Tensor]:
        """Weight (d, d) and bias (d,) with which eval mode is y = x @ weight.T + bias."""
        matrix = torch.block_diag(*self.matrix(self.mean, self.covariance))
        return matrix.T, -self.mean @ matrix

    def blended(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The running statistics moved towards those of x (Eq.

        13): (v, n, d) -> mean (d,), covariances (g, w, w).
        """
        groups = x.unflatten(-1, (-1, self.group_width)).movedim(-2, 1)  # (v, g, n, w)
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


class Whitening(Whitener):
    """Whitening of all d channels by momentum statistics, ZCA or PCA ([1] Eq. 3, 13, Table 3).

    x: (v, n, d) or (n, d) -> the same shape. Train mode updates the running mean and covariance by the batch;
    eval mode uses them. The first batch should have more sentences than channels.

    kind: "zca" keeps the axes, "pca" turns to the principal ones. eps: share of the mean variance that is
    added to each variance. gradient: through the batch statistics ("full", ZCA alone), through the mean
    alone ("centre") or neither ("none"). momentum: beta of Eq. 13. Raises ValueError for other values.

    >>> whiten, x = Whitening(3), torch.randn(512, 3) @ torch.randn(3, 3)
    >>> torch.allclose(whitening.covariance(whiten(x)), torch.eye(3), atol=1e-3)
    True
    """

    def __init__(
        self,
        width: int,
        *,
        kind: Literal["zca", "pca"] = "zca",
        eps: float = WhiteningSettings.eps,
        gradient: Gradient = WhiteningSettings.gradient,
        momentum: float = WhiteningSettings.momentum,
    ) -> None:
        super().__init__(width, WhiteningSettings(kind=kind, eps=eps, gradient=gradient, momentum=momentum))


class GroupWhitening(Whitener):
    """Whitening of consecutive groups of channels by the statistics of the batch ([1] section 3.2.1, Eq. 5).

    x: (v, n, d) or (n, d) -> the same shape; each view is whitened on its own. Eval mode uses running
    statistics. A batch needs more sentences than a group has channels; ValueError otherwise.

    group_width: channels in a group; or groups: the number of groups. eps: share of a group's mean variance
    that is added to each of its variances. gradient: see `Whitening`. Raises ValueError if the groups do not
    divide `width`.

    >>> x = GroupWhitening(6, group_width=3)(torch.randn(512, 6))
    >>> torch.allclose(whitening.covariance(x[:, :3]), torch.eye(3), atol=1e-3)
    True
    """

    kind = "group"

    def __init__(
        self,
        width: int,
        *,
        group_width: int | None = WhiteningSettings.group_width,
        groups: int | None = None,
        eps: float = WhiteningSettings.eps,
        gradient: Gradient = WhiteningSettings.gradient,
    ) -> None:
        settings = WhiteningSettings(
            kind=self.kind, groups=groups, group_width=group_width, eps=eps, gradient=gradient
        )
        super().__init__(width, settings)


class ShuffledGroupWhitening(GroupWhitening):
    """SGW: each view's channels are shuffled, whitened in groups and put back ([1] section 3.2.2, Eq. 6).

    Settings and shapes are those of `GroupWhitening`. Two views of one tensor, shuffled differently, are two
    different whitened views. The shuffle draws from PyTorch's generator; eval mode does not shuffle.

    >>> x = torch.randn(64, 768)
    >>> z = ShuffledGroupWhitening(768)(torch.stack([x, x]))  # groups of 2, as the paper's 384 of BERT-base
    >>> z.shape, torch.equal(z[0], z[1])
    (torch.Size([2, 64, 768]), False)
    """

    kind = "shuffled_group"

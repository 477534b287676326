"""Whitening of a batch as a PyTorch module: all channels, groups of them, shuffled groups; its settings.

v: views    n: sentences    d: width    g: groups    w = d / g: channels in a group

[1] WhitenedCSE, arXiv:2305.17746    [2] Kessy et al., Optimal Whitening, arXiv:1512.00809
[3] Huang et al., IterNorm, arXiv:1904.03441    [4] Ermolov et al., W-MSE, arXiv:2007.06346
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from whitenedcse import whitening
from whitenedcse.compute import full_precision
from whitenedcse.linalg import (
    Ridge,
    Root,
    cholesky_root,
    correlation_root,
    inverse_root,
    iterated_root,
    mean_variance,
)
from whitenedcse.whitening import Gradient

KINDS = ("pca", "zca", "group", "shuffled_group")
WHOLE = ("pca", "zca")  # those that whiten all channels together
WIDTH = 2  # of a group, if nothing else is said
PARTITIONS = ("view", "joint", "official_slice", "slices")
TRANSFORMS = {
    "zca": inverse_root,
    "cholesky": cholesky_root,
    "zca_cor": correlation_root,
    "iterative": iterated_root,
}


@dataclass(frozen=True, kw_only=True)
class WhiteningSettings:
    """The settings of a whitening; the defaults are the paper's ([1] section 4.1).

    kind: "pca" and "zca" whiten all d channels with momentum statistics ([1] Eq. 13, Table 3); "group" and
        "shuffled_group" whiten groups with the statistics of the batch ([1] Eq. 5, 6).
    groups: the NUMBER of groups (the paper's "group size"); None derives it from group_width.
    group_width: channels in a group. Beside `groups` the default counts as not given; another must agree.
    eps, floor: what is added to each variance: a share of the group's mean variance, and a fixed amount.
    gradient: "full", "centre" (the matrix is a constant, as in the official code) or "none".
    partition: "view" (each view on its own, [1] section 3.2.2), "joint" (all views together),
        "official_slice" (v consecutive parts of the sentence-major batch, as the official code cuts it), or
        "slices" (in each view, random parts of `slice` sentences, other ones in each step: [4] section 3).
    momentum: beta of Eq. 13; the running statistics serve evaluation, and training for pca and zca.
    transform: the matrix. "zca" (symmetric), "cholesky" (triangular, as in [4]), "zca_cor" (ZCA of the
        correlations [2]), or "iterative": `iterations` of Newton-Schulz towards "zca" [3].
    slice: sentences that are whitened together, for partition="slices"; it divides the batch.
    Raises ValueError for settings that are unknown, out of range or contradictory.

    >>> WhiteningSettings(groups=384).width(768)
    2
    """

    kind: str = "shuffled_group"
    groups: int | None = None
    group_width: int | None = WIDTH
    eps: float = 1e-5
    floor: float = 0.0
    shrinkage: float = 0.0
    gradient: Gradient = "centre"
    partition: str = "view"
    momentum: float = 0.99
    transform: str = "zca"
    iterations: int = 5
    slice: int | None = None

    def __post_init__(self) -> None:
        choices: dict[str, Any] = {"kind": KINDS, "gradient": ("full", "centre", "none")}
        choices |= {"partition": PARTITIONS, "transform": tuple(TRANSFORMS)}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"whitening.{name}={getattr(self, name)!r} is not one of {', '.join(allowed)}"
                )
        if self.kind == "pca" and (self.gradient == "full" or self.transform != "zca"):
            raise ValueError("whitening.kind=pca has no full gradient (eigenvectors) and no other transform;"
                             " use gradient=centre and transform=zca")  # fmt: skip
        whole = self.kind in WHOLE
        none = f"null (None): kind={self.kind} whitens all channels together, without groups"
        sliced = self.slice is None if self.partition != "slices" else (self.slice or 0) >= 2
        for name, sound, words in (
            ("momentum", 0 <= self.momentum < 1, "in [0, 1)"),
            ("shrinkage", 0 <= self.shrinkage <= 1, "in [0, 1]"),
            ("eps", 0 < self.eps + self.floor < math.inf, "finite and above 0, if whitening.floor is not"),
            ("floor", self.floor >= 0 <= self.eps, "0 or above, as whitening.eps must be"),
            ("groups", not (whole and self.groups is not None), none),
            ("group_width", not (whole and self.group_width not in (None, WIDTH)), none),
            ("iterations", self.iterations >= 1, "1 or above"),
            ("slice", sliced, "2 or more sentences for partition=slices, and null for others"),
        ):
            if not sound:
                raise ValueError(f"whitening.{name}={getattr(self, name)} is not {words}")

    @property
    def root(self) -> Root:
        """The function from a covariance (..., w, w) and a ridge (..., 1, 1) to the matrix of `transform`."""
        if self.transform == "iterative":
            return partial(iterated_root, iterations=self.iterations)
        return TRANSFORMS[self.transform]

    def width(self, d: int) -> int:
        """The number of channels in a group, for an embedding of width d.

        Raises ValueError where the groups do not divide d, or have another width than a given group_width.
        """
        if self.kind in WHOLE:
            return d
        width = None if self.groups is not None and self.group_width == WIDTH else self.group_width
        return whitening.group_width(d, groups=self.groups, width=width)


def refuse(settings: WhiteningSettings | None, d: int, *, n: int, views: int) -> None:
    """Raise ValueError if a batch has too few rows to whiten the channels of a group at full rank.

    n: sentences of a batch, views: of each sentence, d: width of the embedding. With no more rows than
    channels eps alone bounds the gain, at 1 / sqrt(eps), and the loss would see noise. Shrinkage bounds the
    gain too, and is accepted. "pca" and "zca" average over batches, so that only their first steps suffer:
    for these there is a warning. A slice that does not divide the batch is refused too.

    >>> pairs = WhiteningSettings(group_width=2)
    >>> refuse(pairs, 768, n=64, views=2)  # 64 sentences suffice for 2 channels, 2 do not
    >>> refuse(pairs, 768, n=2, views=2)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: ...
    """
    if settings is None:
        return
    width, rows = settings.width(d), n * views if settings.partition == "joint" else settings.slice or n
    if n % (settings.slice or 1):
        raise ValueError(f"head.whitening.slice={rows} does not divide a batch of {n} sentences: use a slice"
                         " that does, or another data.batch_size")  # fmt: skip
    if rows > width or settings.shrinkage > 0:
        return
    said = f"{rows} sentence{'s' * (rows != 1)} cannot whiten {width} channels"
    said += f", where eps={settings.eps} alone bounds the gain"
    if settings.kind in ("pca", "zca"):
        later = f"head={settings.kind} averages over batches, so that only the first steps suffer"
        warnings.warn(f"{said}; {later}; a larger data.batch_size helps", stacklevel=2)
        return
    larger = "head.whitening.slice" if settings.slice else "data.batch_size"
    raise ValueError(
        f"{said}: use {larger} above {width} on each device, a smaller head.whitening.group_width "
        "(more groups), or head.whitening.shrinkage above 0"
    )


class Whitener(nn.Module):
    """Whitening by the statistics of the batch while training, and by running ones (Eq. 13) in eval mode.

    x: (v, n, d) or (n, d) -> the same shape, in float32 (float64 stays). Eval mode is deterministic: groups
    are consecutive channels, unshuffled.
    The running statistics follow the average over the views, and start as those of the first batch.
    Numbers are not checked, because every step would have to wait for a GPU: in training mode one that is not
    finite makes its group of channels NaN in all sentences whitened together, and in the running statistics
    for good. train.py ends a run whose loss is not finite.
    Raises ValueError for another width or number of dimensions.

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
        width = len(self.mean)
        if x.ndim not in (2, 3) or x.shape[-1] != width:
            raise ValueError(f"a whitening of width {width} takes (views, sentences, {width}) or (sentences, "
                             f"{width}), not a tensor of shape {tuple(x.shape)}")  # fmt: skip
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
            return rearranged(x, self.settings.partition, self.over_batch, size=self.settings.slice)
        return self.affine(x, mean, covariance)

    def over_batch(self, x: Tensor) -> Tensor:
        """x whitened by the statistics of each view, shuffled if set: (v, ..., n, d) -> (v, ..., n, d)."""
        settings = self.settings
        names = ("eps", "floor", "gradient", "shrinkage", "root")
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
        ridge = Ridge(settings.eps, settings.floor).above(mean.unflatten(-1, (-1, self.group_width)))
        if settings.kind == "pca":
            return whitening.pca(covariance, eps=ridge.eps, floor=ridge.floor)
        return settings.root(covariance, ridge.of(mean_variance(covariance)))

    def dense(self) -> tuple[Tensor, Tensor]:
        """Weight (d, d) and bias (d,) with which eval mode is y = x @ weight.T + bias."""
        matrix = torch.block_diag(*self.matrix(self.mean, self.covariance))
        return matrix.T, -self.mean @ matrix

    def blended(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The running statistics moved towards those of x (Eq. 13).

        x: (v, n, d) -> mean (d,), covariances (g, w, w).
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


def rearranged(
    x: Tensor, partition: str, function: Callable[[Tensor], Tensor], *, size: int | None = None
) -> Tensor:
    """Apply `function` to the rows of x in the views that `partition` names, and put the rows back.

    x: (v, n, d) -> (v, n, d). partition: see `WhiteningSettings`. function: (v, n, d) -> (v, n, d) of the
    rows so divided; for "joint" it is given (1, v n, d), for "slices" of `size` sentences (v, n / size, size,
    d), where all views are divided alike.

    >>> x = torch.tensor([[[1.0]], [[3.0]]])  # two views of one sentence
    >>> def centred(x): return x - x.mean(dim=1, keepdim=True)
    >>> rearranged(x, "view", centred).flatten(), rearranged(x, "joint", centred).flatten()
    (tensor([0., 0.]), tensor([-1.,  1.]))
    """
    if partition == "view":
        return function(x)
    if partition == "joint":
        return function(x.flatten(0, 1).unsqueeze(0)).view_as(x)
    if partition == "slices":
        order = whitening.permutations((), x.shape[1], device=x.device)
        slices = x[:, order].unflatten(1, (-1, size or x.shape[1]))
        return function(slices).flatten(1, 2)[:, order.argsort()]
    sliced = x.transpose(0, 1).reshape(x.shape)  # sentence-major rows, cut into v consecutive parts
    return function(sliced).reshape(x.shape[1], x.shape[0], -1).transpose(0, 1)

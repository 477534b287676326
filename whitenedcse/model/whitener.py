"""Whitening of a batch as a PyTorch module: all channels, groups of them, shuffled groups; its settings.

v: views    n: sentences    d: width    g: groups    w = d / g: channels in a group

[1] WhitenedCSE, arXiv:2305.17746    [2] Huang et al., IterNorm, arXiv:1904.03441
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor, nn

from whitenedcse import whitening
from whitenedcse.compute import full_precision
from whitenedcse.whitening import Gradient, Root


def shuffled(x: Tensor, **options: Any) -> Tensor:
    """SGW by permutations drawn here, another for each view: (..., n, d) -> (..., n, d)."""
    order = whitening.random_permutations(x.shape[:-2], x.shape[-1], device=x.device)
    return whitening.shuffled_group_whiten(x, order, **options)


# The one place for another whitening. A function of x: (..., n, d) and the keyword arguments of
# `group_whiten`, entered in BATCHWISE, is `head.whitening.kind=NAME`; a matrix for its covariances, in
# ROOTS, `transform=NAME`.
BATCHWISE: dict[str, Callable[..., Tensor]] = {"group": whitening.group_whiten, "shuffled_group": shuffled}
ROOTS: dict[str, Root] = {"zca": whitening.zca, "iterative": whitening.iterated}
WHOLE = ("pca", "zca")  # kinds that whiten all channels together, by running statistics
KINDS = (*WHOLE, *BATCHWISE)
PARTITIONS = ("view", "official_slice")


@dataclass(frozen=True, kw_only=True)
class WhiteningSettings:
    """The settings of a whitening; the defaults are the paper's ([1] section 4.1).

    kind: "pca" and "zca" whiten all d channels with momentum statistics ([1] Eq. 13, Table 3); "group" and
        "shuffled_group" whiten groups with the statistics of the batch ([1] Eq. 5, 6).
    group_width: channels in a group, for kinds with groups; the paper's "group size 384" is their number, and
        2 channels each in BERT-base.
    eps: the share of a group's mean variance that is added to each of its variances.
    gradient: "full", "centre" (the matrix is a constant, as in the official code) or "none".
    partition: "view" (each view on its own, [1] section 3.2.2) or "official_slice" (v consecutive parts of
        the sentence-major batch, as in the official code).
    momentum: beta of Eq. 13; the running statistics serve evaluation, and training for pca and zca.
    transform: the matrix, "zca" or "iterative": `iterations` of Newton-Schulz towards "zca" [2].
    Raises ValueError for settings that are unknown, out of range or contradictory.

    >>> WhiteningSettings(group_width=2).width(768)
    2
    """

    kind: str = "shuffled_group"
    group_width: int | None = 2
    eps: float = 1e-5
    gradient: Gradient = "centre"
    partition: str = "view"
    momentum: float = 0.99
    transform: str = "zca"
    iterations: int = 5

    def __post_init__(self) -> None:
        choices = {"kind": KINDS, "gradient": get_args(Gradient)}
        choices |= {"partition": PARTITIONS, "transform": tuple(ROOTS)}
        for name, sound, words in (
            *((k, getattr(self, k) in those, f"one of {', '.join(those)}") for k, those in choices.items()),
            ("momentum", 0 <= self.momentum < 1, "in [0, 1)"),
            ("eps", 0 < self.eps < math.inf, "finite and above 0"),
            ("group_width", self.kind in WHOLE or (self.group_width or 0) >= 1, "1 or more channels"),
            ("iterations", self.iterations >= 1, "1 or above"),
        ):
            if not sound:
                raise ValueError(f"whitening.{name}={getattr(self, name)!r} is not {words}")
        if self.kind == "pca" and (self.gradient == "full" or self.transform != "zca"):
            raise ValueError("whitening.kind=pca has no full gradient and no transform but zca")

    @property
    def root(self) -> Root:
        """The function from a covariance (..., w, w) and a ridge (..., 1, 1) to the whitening matrix."""
        if self.kind == "pca":
            return whitening.pca
        if self.transform == "iterative":
            return partial(whitening.iterated, iterations=self.iterations)
        return ROOTS[self.transform]

    def width(self, d: int) -> int:
        """The number of channels whitened together, for an embedding of width d, which it must divide."""
        if self.kind in WHOLE or self.group_width is None:
            return d
        whitening.check_divides(self.group_width, d)
        return self.group_width


def too_few_rows(settings: WhiteningSettings, d: int, *, n: int) -> str:
    """Why a batch of n sentences of width d cannot be whitened at full rank; "" where it can.

    With no more rows than channels eps alone bounds the gain, at 1 / sqrt(eps), and the loss would see noise.
    """
    if n > (width := settings.width(d)):
        return ""
    return f"{n} sentences cannot whiten {width} channels, where eps={settings.eps} alone bounds the gain"


class Whitener(nn.Module):
    """Whitening by the statistics of the batch while training, and by running ones (Eq. 13) in eval mode.

    x: (v, n, d) or (n, d) -> the same shape, in float32 (float64 stays). Eval mode is deterministic: groups
    are consecutive channels, unshuffled.
    settings, or single ones by name: those of `WhiteningSettings`, whose defaults are the paper's SGW.
    The running statistics follow the average over the views, and start as those of the first batch. A number
    that is not finite makes its group of channels NaN in them for good: a check would wait for the GPU.
    A subclass with an `over_batch` of its own is used as it is by `ProjectionHead(whitening=...)`.
    Raises ValueError for a batch of too few sentences.

    >>> x = torch.randn(64, 768)
    >>> z = Whitener(768)(torch.stack([x, x]))  # groups of 2, as the paper's 384 of BERT-base
    >>> z.shape, torch.equal(z[0], z[1])  # each view is shuffled, and so whitened, in its own way
    (torch.Size([2, 64, 768]), False)
    """

    mean: Tensor
    covariance: Tensor
    batches: Tensor

    def __init__(self, width: int, settings: WhiteningSettings | None = None, **given: Any) -> None:
        super().__init__()
        self.settings = replace(settings or WhiteningSettings(), **given)
        self.group_width = w = self.settings.width(width)
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("covariance", torch.eye(w).repeat(width // w, 1, 1))
        self.register_buffer("batches", torch.zeros((), dtype=torch.long))
        self._fixed: tuple[Tensor, Tensor, Tensor] | None = None  # mean, covariance, and their matrix

    @full_precision
    def forward(self, x: Tensor) -> Tensor:
        """The whitened x, in float32 or float64; in training mode this updates the running statistics."""
        if x.ndim == 2:
            return self(x.unsqueeze(0)).squeeze(0)
        if not self.training:
            return self.affine(x, self.mean, self.fixed)
        batchwise = self.settings.kind in BATCHWISE
        with torch.set_grad_enabled(torch.is_grad_enabled() and not batchwise):
            mean, covariance = self.blended(x)
        self.mean.copy_(mean.detach())
        self.covariance.copy_(covariance.detach())
        self.batches += 1
        if batchwise:
            if said := too_few_rows(self.settings, len(self.mean), n=x.shape[-2]):
                cure = "use a larger data.batch_size or a smaller head.whitening.group_width"
                raise ValueError(f"{said}: {cure}")
            return rearranged(x, self.settings.partition, self.over_batch)
        if self.settings.gradient != "full":
            covariance = covariance.detach()
        mean = mean.detach() if self.settings.gradient == "none" else mean
        return self.affine(x, mean, self.matrix(mean, covariance))

    def over_batch(self, x: Tensor) -> Tensor:
        """x whitened by the statistics of each view: (v, n, d) -> (v, n, d)."""
        options: Any = {name: getattr(self.settings, name) for name in ("eps", "gradient", "root")}
        return BATCHWISE[self.settings.kind](x, width=self.group_width, **options)

    def affine(self, x: Tensor, mean: Tensor, matrix: Tensor) -> Tensor:
        """(x - mean) times the matrix of each group: (v, n, d), (d,), (g, w, w) -> (v, n, d)."""
        x, mean = (part.unflatten(-1, (-1, self.group_width)) for part in (x, mean))  # (v, n, g, w), (g, w)
        centred = (x - mean).unsqueeze(-2)
        return (centred @ matrix.to(centred.dtype)).flatten(-3)

    def matrix(self, mean: Tensor, covariance: Tensor) -> Tensor:
        """Whitening matrices for row vectors, from mean (d,) and covariances (g, w, w): (g, w, w)."""
        means, variance = mean.unflatten(-1, (-1, self.group_width)), whitening.mean_variance(covariance)
        return self.settings.root(covariance, whitening.ridge(variance, self.settings.eps, means))

    @property
    def fixed(self) -> Tensor:
        """The matrix of the running statistics, (g, w, w), computed once while they stay the same."""
        mean, covariance = self.mean, self.covariance
        known = self._fixed
        if known is None or not (equal(known[0], mean) and equal(known[1], covariance)):
            with torch.inference_mode(False), torch.no_grad():  # which a later call with gradient can use
                known = (mean.clone(), covariance.clone(), self.matrix(mean, covariance))
            self._fixed = known
        return known[2]

    def dense(self) -> tuple[Tensor, Tensor]:
        """Weight (d, d) and bias (d,) with which eval mode is y = x @ weight.T + bias."""
        matrix = torch.block_diag(*self.fixed)
        return matrix.T, -self.mean @ matrix

    def blended(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The running statistics moved towards those of x (Eq. 13): (v, n, d) -> mean (d,), (g, w, w)."""
        groups = x.unflatten(-1, (-1, self.group_width)).movedim(-2, 1)  # (v, g, n, w)
        mean, covariance = x.mean(dim=(0, 1)), whitening.covariance(groups).mean(dim=0)
        beta = self.settings.momentum * (self.batches > 0)
        return beta * self.mean + (1 - beta) * mean, beta * self.covariance + (1 - beta) * covariance


def rearranged(x: Tensor, partition: str, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply `function` to x in the views that `partition` names, and put the rows back: (v, n, d) each."""
    if partition == "view":
        return function(x)
    sliced = x.transpose(0, 1).reshape(x.shape)  # sentence-major rows, cut into v consecutive parts
    return function(sliced).reshape(x.shape[1], x.shape[0], -1).transpose(0, 1)


def equal(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same type, device and numbers."""
    return a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)

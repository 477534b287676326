"""Losses without negatives, and terms beside a loss, that decorrelate channels: soft forms of whitening.

v: views, the anchor first    n: sentences    d: width    k: random directions
C: the covariance of d channels over n sentences

[1] VICReg, arXiv:2105.04906    [2] Barlow Twins, arXiv:2103.03230    [3] W-MSE, arXiv:2007.06346
[4] LeJEPA, arXiv:2511.08544    [5] Epps and Pulley, A test for normality, Biometrika 70, 1983
[6] INTL, arXiv:2305.16789

Without negatives nothing but these terms keeps all sentences from one vector, so they see z before any
normalisation of its length. All is computed in float32 (float64 stays) with autocast off.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import normalize

from whitenedcse.compute import full_precision
from whitenedcse.training.loss import Step, refuse_shapes
from whitenedcse.whitening import covariance

Vectors = Literal["x", "z"]
KNOTS, REACH = 17, 3.0  # of the integral over t in [-3, 3], which is even in t: points in [0, 3]


@dataclass(frozen=True, kw_only=True)
class VICReg:
    """VICReg's loss [1], for equal views, deviations of 1 or more, and no covariance between channels.

    z: (v, n, d) -> scalar, the average over the pairs of the anchor view with each positive view:
    invariance * mean (z_1 - z_p)^2 + variance * mean_j max(0, 1 - sqrt(C_jj + 1e-4)) + covariance *
    sum_{i != j} C_ij^2 / d ([1] Eq. 1 to 6), with covariances C divided by n - 1. As in the authors' code,
    the first term averages over channels, where Eq. 5 sums over them, and the second over the two views,
    where Eq. 6 sums; the third sums over the two views. Raises ValueError for weights below 0.

    >>> z = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]]).expand(2, 4, 2)
    >>> VICReg()(z)  # equal views, deviations above 1, uncorrelated
    tensor(0.)
    >>> f"{VICReg()(torch.zeros(2, 4, 2)):.2f}"  # a collapse: both deviations are 0.01
    '24.75'
    """

    invariance: float = 25.0
    variance: float = 25.0
    covariance: float = 1.0

    def __post_init__(self) -> None:
        weights = (self.invariance, self.variance, self.covariance)
        if not all(0 <= weight < math.inf for weight in weights):
            raise ValueError(
                f"loss.invariance, variance, covariance={weights}: all must be finite and 0 or more"
            )

    @full_precision
    def __call__(self, z: Tensor, negatives: Tensor | None = None) -> Tensor:
        """The loss of views z: (v, n, d). Raises ValueError for hard negatives, or fewer than 2 of v or n."""
        refuse(z, negatives, "vicreg")
        apart = (z[0] - z[1:]).square().mean()
        return (
            self.invariance * apart
            + self.variance * of_pairs(shortfall(z)) / 2
            + self.covariance * of_pairs(mixing(z))
        )


@dataclass(frozen=True, kw_only=True)
class BarlowTwins:
    """Barlow Twins' loss [2]: the correlation matrix between two views should be the identity.

    z: (v, n, d) -> scalar, the average over the pairs of the anchor view with each positive view:
    sum_i (1 - R_ii)^2 + redundancy * sum_{i != j} R_ij^2, where R_ij is the correlation over sentences of
    channel i of the anchor with channel j of the positive ([2] Eq. 1, 2). 1e-5 is added to each variance, as
    by batch normalisation in the authors' code. Raises ValueError for a weight below 0.

    >>> z = 100 * torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]])
    >>> loss = BarlowTwins(redundancy=0.5)
    >>> loss(torch.stack([z, z])), loss(torch.stack([z, z.flip(-1)]))  # swapped: 1 + 1 + 0.5 (1 + 1)
    (tensor(0.), tensor(3.))
    """

    redundancy: float = 0.005

    def __post_init__(self) -> None:
        if not 0 <= self.redundancy < math.inf:
            raise ValueError(f"loss.redundancy={self.redundancy} must be finite and 0 or more")

    @full_precision
    def __call__(self, z: Tensor, negatives: Tensor | None = None) -> Tensor:
        """The loss of views z: (v, n, d). Raises ValueError for hard negatives, or fewer than 2 of v or n."""
        refuse(z, negatives, "barlow_twins")
        centred = z - z.mean(dim=1, keepdim=True)
        z = centred * (centred.square().mean(dim=1, keepdim=True) + 1e-5).rsqrt()
        r = z[0].mT @ z[1:] / z.shape[1]  # (v - 1, d, d)
        own = (1 - r.diagonal(dim1=-2, dim2=-1)).square().sum(dim=-1)
        return (own + self.redundancy * off_diagonal(r)).mean()


@dataclass(frozen=True)
class WMSE:
    """W-MSE's loss of whitened views [3]: the squared distance of unit vectors, |z_1 - z_p|^2 = 2 - 2 cos.

    z: (v, n, d) -> scalar, averaged over sentences and over the pairs of the anchor view with each positive
    view. Nothing in it prevents a collapse: z must come from a head that whitens last (head.position=after).

    >>> WMSE()(torch.stack([torch.eye(2), 3 * torch.eye(2).flip(0)]))  # orthogonal views
    tensor(2.)
    """

    @full_precision
    def __call__(self, z: Tensor, negatives: Tensor | None = None) -> Tensor:
        """The loss of views z: (v, n, d). Raises ValueError for hard negatives, or fewer than 2 of v or n."""
        refuse(z, negatives, "wmse")
        z = normalize(z, dim=-1)
        return (z[0] - z[1:]).square().sum(dim=-1).mean()


@dataclass(frozen=True, kw_only=True)
class SIGReg:
    """LeJEPA's loss [4]: views should be near their centre, and the batch distributed as N(0, I).

    z: (v, n, d) -> scalar, (1 - share) * mean (z_p - centre)^2 + share * the mean of `epps_pulley`, a test of
    normality, over views and over `directions` random unit vectors on which z is projected. The centre is the
    mean of a sentence's views. Each call draws directions from PyTorch's generator, so that ranks with equal
    seeds draw the same. Raises ValueError for a share outside [0, 1] or fewer than one direction.

    >>> z = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))
    >>> loss = SIGReg(share=1.0)
    >>> bool(loss(z.expand(2, 256, 8)) < 1.5 < 10 < loss(z.expand(2, 256, 8) / 2))  # half as wide is far off
    True
    """

    share: float = 0.05
    directions: int = 1024

    def __post_init__(self) -> None:
        if not (0 <= self.share <= 1 and self.directions >= 1):
            raise ValueError(
                f"loss.share={self.share} not in [0, 1], or loss.directions={self.directions} below 1"
            )

    @full_precision
    def __call__(self, z: Tensor, negatives: Tensor | None = None) -> Tensor:
        """The loss of views z: (v, n, d). Raises ValueError for hard negatives, or fewer than 2 of v or n."""
        refuse(z, negatives, "sigreg")
        shape = (z.shape[-1], self.directions)
        directions = normalize(torch.randn(shape, device=z.device, dtype=z.dtype), dim=0)
        prediction = (z - z.mean(dim=0)).square().mean()
        return (1 - self.share) * prediction + self.share * epps_pulley(z @ directions).mean()


@dataclass(frozen=True, kw_only=True)
class CovariancePenalty:
    """A term to add to a loss: squared covariances between channels, sum_{i != j} C_ij^2 / d ([1] Eq. 3, 4).

    Step -> scalar, averaged over the views of z, or over the encoder passes of x, those of hard negatives
    included. Covariances C are divided by n - 1. The penalty of x grows with the fourth power of its scale.

    weight: the weight of the term in the loss. of: "x" for pooled vectors, or "z" for projected ones. Raises
    ValueError for a weight that is not above 0, or other vectors.

    >>> x = torch.tensor([[[1.0, 1.0], [-1.0, -1.0]]])  # C_12 = C_21 = 2
    >>> CovariancePenalty(weight=1.0)(Step(None, x=x, z=x[..., :1]))
    tensor(4.)
    """

    weight: float
    of: Vectors = "x"

    def __post_init__(self) -> None:
        refuse_weight(self.weight)
        if self.of not in get_args(Vectors):
            raise ValueError(f"terms: of={self.of!r} is not one of {', '.join(get_args(Vectors))}")

    def __call__(self, step: Step) -> Tensor:
        """The penalty of one step, before its weight."""
        vectors = step.x if self.of == "x" else step.z
        refuse_shapes(f"the covariance penalty of {self.of}", vectors, views=1)
        return mixing(vectors).mean()


@dataclass(frozen=True, kw_only=True)
class TraceLoss:
    """A term to add to a loss: INTL's trace loss [6], sum_i (1 - C_ii)^2 of iteratively whitened z.

    Step -> scalar, averaged over views, with covariances C divided by n. Newton-Schulz iterations leave
    variances below 1 where the spectrum is uneven; this term makes it even. z must come from a head that ends
    with such iterations (head.position=after, head.whitening.transform=iterative).

    weight: the term's weight in the loss; the authors' code has (log2 n - 3) / 100 for batches of n. Raises
    ValueError for a weight that is not above 0.

    >>> z = torch.tensor([[[1.0, 0.5], [-1.0, -0.5]]])  # variances 1 and 0.25
    >>> TraceLoss(weight=0.03)(Step(None, x=z, z=z))
    tensor(0.5625)
    """

    weight: float

    def __post_init__(self) -> None:
        refuse_weight(self.weight)

    def __call__(self, step: Step) -> Tensor:
        """The term of one step, before its weight."""
        refuse_shapes("the trace loss", step.z, views=1)
        return trace(step.z)


@full_precision
def trace(z: Tensor) -> Tensor:
    """The sum over channels of (1 - variance)^2, averaged over views: (v, n, d) -> scalar."""
    return (1 - z.var(dim=-2, correction=0)).square().sum(dim=-1).mean()


def mixing(z: Tensor) -> Tensor:
    """The sum of the squared covariances of different channels, over d: (v, n, d) -> (v,).

    Covariances are divided by n - 1.
    """
    n, d = z.shape[-2:]
    return off_diagonal(covariance(z) * (n / (n - 1))) / d


def off_diagonal(c: Tensor) -> Tensor:
    """The sum of the squares of all entries outside the diagonal: (..., d, d) -> (...)."""
    return (c - c.diagonal(dim1=-2, dim2=-1).diag_embed()).square().sum(dim=(-2, -1))


def shortfall(z: Tensor) -> Tensor:
    """By how much the deviations of channels are below 1, on average: (v, n, d) -> (v,) ([1] Eq. 1, 2)."""
    return (1 - (z.var(dim=-2) + 1e-4).sqrt()).clamp_min(0).mean(dim=-1)


def of_pairs(views: Tensor) -> Tensor:
    """The sum over the two views of a pair, averaged over the pairs of view 1 with others: (v,) -> scalar."""
    return views[0] + views[1:].mean()


def epps_pulley(x: Tensor) -> Tensor:
    """How far n numbers are from a standard normal distribution, by their characteristic function [5].

    x: (..., n, k) -> (..., k), n times the integral over t in [-3, 3] of e^(-t^2 / 2) times the square of
    |mean_j e^(i t x_j) - e^(-t^2 / 2)|, by the trapezoidal rule on 33 points as in the code of [4].
    For numbers drawn from a standard normal distribution it is 1.06 on average, whatever n.
    """
    t = torch.linspace(0, REACH, KNOTS, dtype=x.dtype, device=x.device)
    normal = (-t.square() / 2).exp()
    angles = x.unsqueeze(-1) * t  # (..., n, k, knots)
    gap = (angles.cos().mean(dim=-3) - normal).square() + angles.sin().mean(dim=-3).square()
    return 2 * x.shape[-2] * torch.trapezoid(gap * normal, dx=REACH / (KNOTS - 1))


def refuse(z: Tensor, negatives: Tensor | None, name: str) -> None:
    """Raise ValueError for hard negatives, which these losses cannot use, and for views of another shape."""
    if negatives is not None:
        raise ValueError(
            f"loss={name} cannot use hard negatives, which a third column of the corpus holds: use"
            " loss=multi_positive, or data.columns without the third"
        )
    refuse_shapes(f"loss={name}", z)


def refuse_weight(weight: float) -> None:
    """Raise ValueError for the weight of a term that is not above 0."""
    if not 0 < weight < math.inf:
        raise ValueError(f"terms: weight={weight} must be finite and above 0; leave the term out instead")

"""Whitening: maps after which a batch has zero mean and identity covariance.

    n: sentences in the batch    d: embedding width    g: groups    w = d / g: channels in a group

Three engines give one symmetric (ZCA) transform; the shape picks one. bench.whitening on one EPYC thread,
n = 64 (results/whitening): speed of 3 views, d = 768, over the official layer (constant matrix) / autograd of
eigh (full); largest error against float64 at a condition (l_max + r) / (l_min + r) of 10 / 1e3 / 1e5.

    w == 2  pair   closed form, elementwise                4.3x / 3.6x           4e-7 / 4e-5 / 2e-3
    w <= n  eigen  eigenvectors of the (w, w) covariance   1.6x / 1.25x (w = 6)  3e-6 / 6e-5 / 1e-3 (w = 24)
    w > n   Gram   eigenvectors of the (n, n) Gram matrix  95x / 114x (768)      2e-6 / 4e-5 / 3e-3 (768)

Everything runs in float32 (float64 stays) with autocast off, because bfloat16 statistics whiten to 1e-2 only.
`torch.set_float32_matmul_precision` still applies, so leave it at "highest": training refuses anything else.

[1] WhitenedCSE, arXiv:2305.17746    [2] Kessy et al., Optimal Whitening, arXiv:1512.00809
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Generator, Tensor

from whitenedcse.app.compute import full_precision
from whitenedcse.linalg import Ridge, eigh, inverse_root, mean_variance

Gradient = Literal["full", "centre", "none"]
_warned = False


@full_precision
def covariance(x: Tensor) -> Tensor:
    """x: (..., n, d) -> (..., d, d). Divides by n, not n - 1, as the official code of [1] does."""
    xc = x - x.mean(dim=-2, keepdim=True)
    return xc.mT @ xc / x.shape[-2]


@full_precision
def shrink(cov: Tensor, amount: float, *, variance: Tensor | None = None) -> Tensor:
    """Pull a covariance towards a sphere of its mean variance: amount 0 keeps it, 1 gives the sphere.

    cov: (..., d, d) -> (..., d, d). variance: (..., 1, 1), if the diagonal does not tell it (a Gram matrix).
    """
    if not 0 <= amount <= 1:
        raise ValueError(f"shrinkage={amount} must lie in [0, 1]")
    if amount == 0:
        return cov
    variance = mean_variance(cov) if variance is None else variance
    sphere = torch.eye(cov.shape[-1], dtype=cov.dtype, device=cov.device)
    return (1 - amount) * cov + amount * variance * sphere


@full_precision
def zca(cov: Tensor, *, eps: float, floor: float | Tensor = 0.0) -> Tensor:
    """Symmetric inverse square root of cov + r I: the whitening matrix that moves points least [2].

    cov: (..., d, d) -> (..., d, d). r: `Ridge`. Differentiable at equal eigenvalues too; eps = 0 only for
    full rank. zca(c cov) = zca(cov) / sqrt(c): inputs of any scale come out white.
    """
    return inverse_root(cov, Ridge(eps, floor).of(mean_variance(cov)))


@full_precision
@torch.no_grad()
def pca(cov: Tensor, *, eps: float, floor: float | Tensor = 0.0) -> Tensor:
    """Rotation onto the principal axes, then unit variance: x @ W, columns by descending variance.

    cov: (..., d, d) -> (..., d, d). Signs are those of `principal_axes`.
    No gradient: eigenvectors have none at equal eigenvalues. eps = 0 only for full rank.
    """
    variances, axes = principal_axes(cov)
    return axes * (variances.unsqueeze(-2) + Ridge(eps, floor).of(mean_variance(cov))).rsqrt()


@torch.no_grad()
def principal_axes(cov: Tensor) -> tuple[Tensor, Tensor]:
    """(..., d, d) -> variances (..., d), largest first, and axes as columns, their largest entry positive."""
    variances, axes = eigh(cov)
    signs = axes.gather(-2, axes.abs().argmax(dim=-2, keepdim=True)).sign()
    return variances.clamp_min(0).flip(-1), (axes * signs).flip(-1)


@full_precision
def whiten(
    x: Tensor, *, eps: float, floor: float = 0.0, gradient: Gradient = "centre", shrinkage: float = 0.0
) -> Tensor:
    """ZCA-whiten all channels over the batch: (x - mean) (covariance + r I) ** -1/2 ([1] Eq. 3).

    x: (..., n, d) -> (..., n, d). Leading axes never share statistics. r: `Ridge` of eps, which is a share of
    the mean variance, so that x may have any scale. `shrinkage`: the amount of `shrink`.
    gradient: "full" goes through mean and matrix; "centre" takes the matrix as a constant, as the official
    code of [1] does in effect; "none" takes both as constants.
    With n <= d the covariance is singular and eps alone bounds the gain, at 1 / sqrt(eps) of the scale's.
    """
    n, d = x.shape[-2:]
    if d == 2:
        return group_whiten(x, width=2, eps=eps, floor=floor, gradient=gradient, shrinkage=shrinkage)
    xc, mean = _centred(x, d, Ridge(eps, floor), gradient)
    ridge = Ridge(eps, floor).above(mean.squeeze(-2))
    if d > n:
        return _whiten_by_gram(xc, ridge, shrinkage, through_matrix=gradient == "full")
    with torch.set_grad_enabled(gradient == "full" and torch.is_grad_enabled()):
        cov = shrink(xc.mT @ xc / n, shrinkage)
        matrix = inverse_root(cov, ridge.of(mean_variance(cov)))
    return xc @ matrix


@full_precision
def group_whiten(
    x: Tensor, *,
    width: int, eps: float, floor: float = 0.0, gradient: Gradient = "centre", shrinkage: float = 0.0,
) -> Tensor:  # fmt: skip
    """Whiten each block of `width` consecutive channels on its own: (..., n, d) -> (..., n, d), as `whiten`.

    [1], section 3.2.1, Eq. 5.
    """
    d = x.shape[-1]
    if group_width(d, width=width) == 2:
        partner = torch.arange(d, device=x.device).expand(*x.shape[:-2], d) ^ 1  # 1 0 3 2 5 4 ...
        return _whiten_pairs(x, partner, Ridge(eps, floor), gradient, shrinkage)
    # (..., g, n, w); one copy here saves one in each batched product: 5-20 % of the whole
    blocks = x.reshape(*x.shape[:-1], d // width, width).movedim(-2, -3).contiguous()
    y = whiten(blocks, eps=eps, floor=floor, gradient=gradient, shrinkage=shrinkage)
    return y.movedim(-3, -2).flatten(-2)


@full_precision
def shuffled_group_whiten(  # noqa: PLR0913  those of group_whiten, and the permutations
    x: Tensor, permutations: Tensor, *,
    width: int, eps: float, floor: float = 0.0, gradient: Gradient = "centre", shrinkage: float = 0.0,
) -> Tensor:  # fmt: skip
    """Shuffle channels, whiten in groups, put the channels back ([1], section 3.2.2, Eq. 6).

    x: (..., n, d), permutations: (..., d) int64, one for each view -> (..., n, d). Limits: see `whiten`.
    """
    if permutations.shape != (expected := x.shape[:-2] + x.shape[-1:]):
        raise ValueError(f"permutations are {tuple(permutations.shape)}, not {tuple(expected)} as x asks for")
    channels = torch.arange(x.shape[-1], device=x.device).expand_as(permutations)
    inverse = torch.empty_like(permutations).scatter_(-1, permutations, channels)
    if group_width(x.shape[-1], width=width) == 2:  # moves channels once, not twice
        partner = permutations.gather(-1, inverse ^ 1)
        return _whiten_pairs(x, partner, Ridge(eps, floor), gradient, shrinkage)
    x = x.gather(-1, permutations.unsqueeze(-2).expand_as(x))
    x = group_whiten(x, width=width, eps=eps, floor=floor, gradient=gradient, shrinkage=shrinkage)
    return x.gather(-1, inverse.unsqueeze(-2).expand_as(x))


def permutations(
    leading_shape: Sequence[int], d: int, *, device: str | torch.device, generator: Generator | None = None
) -> Tensor:
    """Independent uniform permutations of d channels: (*leading_shape, d) int64."""
    # of float32 keys, one row of 768 in 60 would hold a tie; Apple's GPUs have no float64, so the host draws
    where = "cpu" if torch.device(device).type == "mps" else device
    keys = torch.rand(*leading_shape, d, dtype=torch.float64, device=where, generator=generator)
    return keys.argsort(-1).to(device)


def group_width(d: int, *, groups: int | None = None, width: int | None = None) -> int:
    """Channels in a group. The "group size 384" of [1] is a number of groups: 768 / 384 = 2 channels each."""
    name, count = ("groups", groups) if width is None else ("width", width)
    if count is None or None not in (groups, width):
        raise ValueError(f"give exactly one of groups and width, not groups={groups} and width={width}")
    if count < 1 or d % count:
        divisors = sorted((k for k in range(1, d + 1) if d % k == 0), key=lambda k: abs(k - count))
        raise ValueError(f"{name}={count} does not divide d={d}; nearest that do: {sorted(divisors[:2])}")
    return d // count if width is None else count


def _whiten_by_gram(xc: Tensor, ridge: Ridge, shrinkage: float, *, through_matrix: bool) -> Tensor:
    """xc W, W = (xc' xc / n + r I) ** -1/2, as V diag(1 / s) V' xc with xc xc' / n = V diag(l) V'.

    A constant W gives grad W, with W = I / f - xc' V diag(1 / (n s f (s + f))) V' xc and f = sqrt(r).
    Shrinkage a scales the second part by 1 - a and adds a times the mean variance to the r of f.
    """
    n, d = xc.shape[-2:]
    variance = xc.square().mean((-2, -1), keepdim=True)
    r = ridge.of(variance)
    scale = (variance + r).detach()  # taken out, as in `inverse_root`
    xc, variance, r = xc * scale.rsqrt(), variance / scale, r / scale
    # The last term lifts the constant vector, which centring left in the null space, to the mean eigenvalue:
    # no result depends on it, and its rounding is no longer amplified (10 to 20 times less error up to 1e2).
    gram = shrink(xc @ xc.mT / n, shrinkage, variance=variance) + variance * d / n**2
    if through_matrix:
        return inverse_root(gram, r) @ xc
    with torch.no_grad():
        eigenvalues, v = eigh(gram)
        s = (eigenvalues.clamp_min(0).unsqueeze(-2) + r).sqrt()
        f = (r + shrinkage * variance).sqrt()
        projected, c = v.mT @ xc, (1 - shrinkage) / (n * s * f * (s + f))
        value = (v / s) @ projected
    linear = xc / f - (xc @ projected.mT * c) @ projected  # the same, less exactly: it gives the gradient
    return value + (linear - linear.detach())


def _whiten_pairs(x: Tensor, partner: Tensor, ridge: Ridge, gradient: Gradient, shrinkage: float) -> Tensor:
    """Whiten each channel with its partner. x: (..., n, d), partner: (..., d), its own inverse."""
    xc, mean = _centred(x, 2, ridge, gradient)
    mate = xc.gather(-1, partner.unsqueeze(-2).expand_as(xc))
    mean = mean.squeeze(-2)
    ridge = ridge.above(torch.stack((mean, mean.gather(-1, partner)), dim=-1))
    with torch.set_grad_enabled(gradient == "full" and torch.is_grad_enabled()):
        variance, product = (xc * xc).mean(dim=-2), (xc * mate).mean(dim=-2)
        cov = torch.stack((variance, product, product, variance.gather(-1, partner)), dim=-1)
        cov = shrink(cov.reshape(*variance.shape, 2, 2), shrinkage)
        own, other = inverse_root(cov, ridge.of(mean_variance(cov)))[..., 0, :].unsqueeze(-3).unbind(-1)
    return xc * own + mate * other


def _centred(x: Tensor, width: int, ridge: Ridge, gradient: Gradient) -> tuple[Tensor, Tensor]:
    """x minus its mean over the batch, and that mean, once the settings are known to be sound."""
    global _warned
    n, (eps, floor) = x.shape[-2], ridge
    if not (eps >= 0 and floor >= 0 and eps + floor > 0):
        raise ValueError(f"eps={eps}, floor={floor}: they must not be negative, and one must be positive, as "
                         "they alone bound the gain of a singular batch")  # fmt: skip
    if gradient not in get_args(Gradient):
        raise ValueError(f"gradient={gradient!r} must be one of {', '.join(get_args(Gradient))}")
    if n <= width and not _warned:
        bound = f"eps={eps}, floor={floor} alone bound the gain"
        warnings.warn(f"rank-deficient: {n} sentences <= {width} channels in a group; {bound}", stacklevel=2)
        _warned = True  # after the warning: where a filter makes it an error, it stays one
    mean = x.mean(dim=-2, keepdim=True)
    return x - (mean.detach() if gradient == "none" else mean), mean

"""Whitening: maps after which a batch has zero mean and identity covariance.

    n: sentences in the batch    d: embedding width    g: groups    w = d / g: channels in a group

Three engines give one symmetric (ZCA) transform; the shape picks one. bench.whitening on one EPYC thread,
n = 64 (results/whitening): speed of 3 views, d = 768, over the official layer (constant matrix) / autograd of
eigh (full); largest error against float64 at a condition (l_max + eps) / (l_min + eps) of 10 / 1e3 / 1e5.

    w == 2  pair   closed form, elementwise                4.3x / 3.6x           4e-7 / 4e-5 / 2e-3
    w <= n  eigen  eigenvectors of the (w, w) covariance   1.6x / 1.25x (w = 6)  3e-6 / 6e-5 / 1e-3 (w = 24)
    w > n   Gram   eigenvectors of the (n, n) Gram matrix  95x / 114x (768)      2e-6 / 4e-5 / 3e-3 (768)

Everything runs in float32 (float64 stays) with autocast off, because bfloat16 statistics whiten to 1e-2 only;
`torch.set_float32_matmul_precision` still applies, so leave it at "highest".

[1] WhitenedCSE, arXiv:2305.17746    [2] Kessy et al., Optimal Whitening, arXiv:1512.00809
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, Literal, ParamSpec, get_args

import torch
from torch import Generator, Tensor
from torch.autograd.function import Function, once_differentiable

Gradient = Literal["full", "centre", "none"]
P = ParamSpec("P")
_warned = False


def _precise(function: Callable[Concatenate[Tensor, P], Tensor]) -> Callable[Concatenate[Tensor, P], Tensor]:
    """The same function, on at least float32 and with autocast off."""

    @functools.wraps(function)
    def precise(x: Tensor, /, *args: P.args, **kwargs: P.kwargs) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return function(x if x.dtype == torch.float64 else x.float(), *args, **kwargs)

    return precise


@_precise
def covariance(x: Tensor) -> Tensor:
    """x: (..., n, d) -> (..., d, d). Divides by n, not n - 1, as the official code of [1] does."""
    xc = x - x.mean(dim=-2, keepdim=True)
    return xc.mT @ xc / x.shape[-2]


@_precise
def shrink(cov: Tensor, amount: float, *, variance: Tensor | None = None) -> Tensor:
    """Pull a covariance towards a sphere of its mean variance: amount 0 keeps it, 1 gives the sphere.

    cov: (..., d, d) -> (..., d, d). variance: (..., 1, 1), if the diagonal does not tell it (a Gram matrix).
    """
    if not 0 <= amount <= 1:
        raise ValueError(f"shrinkage={amount} must lie in [0, 1]")
    if amount == 0:
        return cov
    variance = cov.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None] if variance is None else variance
    sphere = torch.eye(cov.shape[-1], dtype=cov.dtype, device=cov.device)
    return (1 - amount) * cov + amount * variance * sphere


@_precise
def zca(cov: Tensor, *, eps: float) -> Tensor:
    """Symmetric inverse square root of cov + eps I: the whitening matrix that moves points least [2].

    cov: (..., d, d) -> (..., d, d). Differentiable at equal eigenvalues too; eps = 0 only for full rank.
    """
    if cov.shape[-1] != 2:
        return _InverseSquareRoot.apply(cov, eps)  # type: ignore[no-untyped-call]
    a, b, c = cov[..., 0, 0], cov[..., 0, 1], cov[..., 1, 1]
    # With A = cov + eps I: det cov >= 0, so det A >= eps (trace A - eps), which rounding must not undercut.
    s = ((a * c - b * b).clamp_min(0) + eps * (a + c + eps)).sqrt()  # sqrt(det A)
    t = (a + c + 2 * (eps + s)).sqrt()
    entries = torch.stack((c + eps + s, -b, -b, a + eps + s), dim=-1) / (s * t).unsqueeze(-1)
    return entries.reshape(cov.shape)


@_precise
@torch.no_grad()
def pca(cov: Tensor, *, eps: float) -> Tensor:
    """Rotation onto the principal axes, then unit variance: x @ W, columns by descending variance.

    cov: (..., d, d) -> (..., d, d). Signs are those of `principal_axes`.
    No gradient: eigenvectors have none at equal eigenvalues. eps = 0 only for full rank.
    """
    variances, axes = principal_axes(cov)
    return axes * (variances + eps).rsqrt().unsqueeze(-2)


@torch.no_grad()
def principal_axes(cov: Tensor) -> tuple[Tensor, Tensor]:
    """(..., d, d) -> variances (..., d), largest first, and axes as columns, their largest entry positive."""
    variances, axes = torch.linalg.eigh(cov)
    signs = axes.gather(-2, axes.abs().argmax(dim=-2, keepdim=True)).sign()
    return variances.clamp_min(0).flip(-1), (axes * signs).flip(-1)


@_precise
def whiten(x: Tensor, *, eps: float, gradient: Gradient = "centre", shrinkage: float = 0.0) -> Tensor:
    """ZCA-whiten all channels over the batch: (x - mean) (covariance + eps I) ** -1/2.

    x: (..., n, d) -> (..., n, d). Leading axes never share statistics. `shrinkage`: the amount of `shrink`.
    gradient: "full" goes through mean and matrix; "centre" takes the matrix as a constant, as the official
    code of [1] does in effect; "none" takes both as constants.
    With n <= d the covariance is singular and eps alone bounds the gain, at 1 / sqrt(eps).
    """
    n, d = x.shape[-2:]
    if d == 2:
        return group_whiten(x, width=2, eps=eps, gradient=gradient, shrinkage=shrinkage)
    xc = _centred(x, d, eps, gradient)
    if d > n:
        return _whiten_by_gram(xc, eps, shrinkage, through_matrix=gradient == "full")
    with torch.set_grad_enabled(gradient == "full" and torch.is_grad_enabled()):
        matrix = zca(shrink(xc.mT @ xc / n, shrinkage), eps=eps)
    return xc @ matrix


@_precise
def group_whiten(
    x: Tensor, *, width: int, eps: float, gradient: Gradient = "centre", shrinkage: float = 0.0
) -> Tensor:
    """Whiten each block of `width` consecutive channels on its own: (..., n, d) -> (..., n, d), as `whiten`.

    [1], section 3.2.1, Eq. 5.
    """
    d = x.shape[-1]
    if group_width(d, width=width) == 2:
        partner = torch.arange(d, device=x.device).expand(*x.shape[:-2], d) ^ 1  # 1 0 3 2 5 4 ...
        return _whiten_pairs(x, partner, eps, gradient, shrinkage)
    # (..., g, n, w); one copy here saves one in each batched product: 5-20 % of the whole
    blocks = x.reshape(*x.shape[:-1], d // width, width).movedim(-2, -3).contiguous()
    return whiten(blocks, eps=eps, gradient=gradient, shrinkage=shrinkage).movedim(-3, -2).flatten(-2)


@_precise
def shuffled_group_whiten(
    x: Tensor, permutations: Tensor, *,
    width: int, eps: float, gradient: Gradient = "centre", shrinkage: float = 0.0,
) -> Tensor:  # fmt: skip
    """Shuffle channels, whiten in groups, put the channels back ([1], section 3.2.2, Eq. 6).

    x: (..., n, d), permutations: (..., d) int64, one for each view -> (..., n, d). Limits: see `whiten`.
    """
    if permutations.shape != (expected := x.shape[:-2] + x.shape[-1:]):
        raise ValueError(f"permutations are {tuple(permutations.shape)}, not {tuple(expected)} as x asks for")
    places = torch.arange(x.shape[-1], device=x.device).expand_as(permutations)
    inverse = torch.empty_like(permutations).scatter_(-1, permutations, places)
    if group_width(x.shape[-1], width=width) == 2:  # moves channels once, not twice
        return _whiten_pairs(x, permutations.gather(-1, inverse ^ 1), eps, gradient, shrinkage)
    x = x.gather(-1, permutations.unsqueeze(-2).expand_as(x))
    x = group_whiten(x, width=width, eps=eps, gradient=gradient, shrinkage=shrinkage)
    return x.gather(-1, inverse.unsqueeze(-2).expand_as(x))


def permutations(
    leading_shape: Sequence[int], d: int, *, device: str | torch.device, generator: Generator | None = None
) -> Tensor:
    """Independent uniform permutations of d channels: (*leading_shape, d) int64."""
    # of float32 keys, one row of 768 in 60 would hold a tie
    return torch.rand(*leading_shape, d, dtype=torch.float64, device=device, generator=generator).argsort(-1)


def group_width(d: int, *, groups: int | None = None, width: int | None = None) -> int:
    """Channels in a group. The "group size 384" of [1] is a number of groups: 768 / 384 = 2 channels each."""
    name, count = ("groups", groups) if width is None else ("width", width)
    if count is None or None not in (groups, width):
        raise ValueError(f"give exactly one of groups and width, not groups={groups} and width={width}")
    if count < 1 or d % count:
        divisors = sorted((k for k in range(1, d + 1) if d % k == 0), key=lambda k: abs(k - count))
        raise ValueError(f"{name}={count} does not divide d={d}; nearest that do: {sorted(divisors[:2])}")
    return d // count if width is None else count


class _InverseSquareRoot(Function):
    """(A + eps I) ** -1/2 of a symmetric A = U diag(l) U'.

    In the eigenbasis its derivative (r_i - r_j) / (l_i - l_j), r = 1 / s and s = sqrt(l + eps), is written
    -r_i r_j / (s_i + s_j), which has no pole at equal eigenvalues.
    """

    @staticmethod
    def forward(ctx: Any, a: Tensor, eps: float) -> Tensor:
        eigenvalues, u = torch.linalg.eigh(a)
        s = (eigenvalues.clamp_min(0) + eps).sqrt().unsqueeze(-2)
        ctx.save_for_backward(u, s)
        return (u / s) @ u.mT

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        u, s = ctx.saved_tensors
        return u @ ((u.mT @ grad @ u) / (-s * s.mT * (s + s.mT))) @ u.mT, None


def _whiten_by_gram(xc: Tensor, eps: float, shrinkage: float, *, through_matrix: bool) -> Tensor:
    """xc W, W = (xc' xc / n + eps I) ** -1/2, as V diag(1 / s) V' xc with xc xc' / n = V diag(l) V'.

    A constant W gives grad W, with W = I / f - xc' V diag(1 / (n s f (s + f))) V' xc and f = sqrt(eps).
    Shrinkage a scales the second part by 1 - a and adds a times the mean variance to the eps of f.
    """
    n, d = xc.shape[-2:]
    variance = xc.square().mean((-2, -1), keepdim=True)
    # The last term lifts the constant vector, which centring left in the null space, to the mean eigenvalue:
    # no result depends on it, and its rounding is no longer amplified (10 to 20 times less error up to 1e2).
    gram = shrink(xc @ xc.mT / n, shrinkage, variance=variance) + variance * d / n**2
    if through_matrix:
        return zca(gram, eps=eps) @ xc
    with torch.no_grad():
        eigenvalues, v = torch.linalg.eigh(gram)
        s = (eigenvalues.clamp_min(0) + eps).sqrt().unsqueeze(-2)
        f = (eps + shrinkage * variance).sqrt()
        projected, c = v.mT @ xc, (1 - shrinkage) / (n * s * f * (s + f))
        value = (v / s) @ projected
    linear = xc / f - (xc @ projected.mT * c) @ projected  # the same, less exactly: it gives the gradient
    return value + (linear - linear.detach())


def _whiten_pairs(x: Tensor, partner: Tensor, eps: float, gradient: Gradient, shrinkage: float) -> Tensor:
    """Whiten each channel with its partner. x: (..., n, d), partner: (..., d), its own inverse."""
    xc = _centred(x, 2, eps, gradient)
    mate = xc.gather(-1, partner.unsqueeze(-2).expand_as(xc))
    with torch.set_grad_enabled(gradient == "full" and torch.is_grad_enabled()):
        variance, product = (xc * xc).mean(dim=-2), (xc * mate).mean(dim=-2)
        cov = torch.stack((variance, product, product, variance.gather(-1, partner)), dim=-1)
        matrix = zca(shrink(cov.reshape(*variance.shape, 2, 2), shrinkage), eps=eps)
        own, other = matrix[..., 0, :].unsqueeze(-3).unbind(-1)
    return xc * own + mate * other


def _centred(x: Tensor, width: int, eps: float, gradient: Gradient) -> Tensor:
    """x minus its mean over the batch, once the settings are known to be sound."""
    global _warned
    n = x.shape[-2]
    if not eps > 0:
        raise ValueError(f"eps={eps} must be positive: it alone bounds the gain of a singular batch")
    if gradient not in get_args(Gradient):
        raise ValueError(f"gradient={gradient!r} must be one of {', '.join(get_args(Gradient))}")
    if n <= width and not _warned:
        bound = f"eps={eps} bounds the gain at 1/sqrt(eps) = {eps**-0.5:.3g}"
        warnings.warn(f"rank-deficient: {n} sentences <= {width} channels in a group; {bound}", stacklevel=2)
        _warned = True  # after the warning: where a filter makes it an error, it stays one
    mean = x.mean(dim=-2, keepdim=True)
    return x - (mean.detach() if gradient == "none" else mean)

"""Whitening: transforms after which a batch has zero mean and identity covariance.

    n: sentences in the batch    d: embedding width    g: groups    w = d / g: channels in a group

Three engines give one symmetric (ZCA) transform; the shape decides which. bench.whitening on one EPYC thread,
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
from torch import Tensor

from whitenedcse.compute import full_precision, sentences_by_channels
from whitenedcse.linalg import Ridge, Root, eigh, inverse_root, mean_variance

Gradient = Literal["full", "centre", "none"]
_warned = False


@full_precision
def covariance(x: Tensor) -> Tensor:
    """The covariance of x over its rows: (..., n, d) -> (..., d, d).

    It is divided by n, not n - 1, as in the official code of [1].

    >>> covariance(torch.tensor([[0.0, 0.0], [2.0, 4.0]]))
    tensor([[1., 2.],
            [2., 4.]])
    """
    n, _ = sentences_by_channels(x)
    xc = x - x.mean(dim=-2, keepdim=True)
    return xc.mT @ xc / n


@full_precision
def shrink(cov: Tensor, amount: float, *, variance: Tensor | None = None) -> Tensor:
    """Pull a covariance towards a sphere of its mean variance: amount 0 keeps it, 1 gives the sphere.

    cov: (..., d, d) -> (..., d, d). variance: (..., 1, 1), the mean variance where it is not the mean of the
    diagonal (a Gram matrix). Raises ValueError for an amount outside [0, 1].

    >>> shrink(torch.tensor([[3.0, 1.0], [1.0, 1.0]]), 0.5)  # half-way to 2 I
    tensor([[2.5000, 0.5000],
            [0.5000, 1.5000]])
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
    """The symmetric inverse square root of cov + r I: the whitening matrix that moves points least [2].

    cov: (..., d, d) -> (..., d, d). r: `Ridge(eps, floor)` of the mean variance; eps = 0 only for full rank.
    Differentiable at equal eigenvalues too. zca(c cov) = zca(cov) / sqrt(c): inputs of any scale come out
    white.

    >>> cov = torch.tensor([[2.0, 1.0], [1.0, 2.0]])
    >>> w = zca(cov, eps=0.0)
    >>> torch.allclose(w @ cov @ w, torch.eye(2), atol=1e-5)
    True
    """
    return inverse_root(cov, Ridge(eps, floor).of(mean_variance(cov)))


@full_precision
@torch.no_grad()
def pca(cov: Tensor, *, eps: float, floor: float | Tensor = 0.0) -> Tensor:
    """The whitening matrix that rotates x to its principal axes, columns by descending variance.

    cov: (..., d, d) -> (..., d, d), for x @ pca(cov). `Ridge(eps, floor)` of the mean variance is added to
    each variance; eps = 0 only for full rank. Signs are those of `principal_axes`. No gradient: eigenvectors
    have none at equal eigenvalues.

    >>> cov = torch.tensor([[2.0, 1.0], [1.0, 2.0]])
    >>> w = pca(cov, eps=0.0)
    >>> torch.allclose(w.mT @ cov @ w, torch.eye(2), atol=1e-5)
    True
    """
    variances, axes = principal_axes(cov)
    return axes * (variances.unsqueeze(-2) + Ridge(eps, floor).of(mean_variance(cov))).rsqrt()


@torch.no_grad()
def principal_axes(cov: Tensor) -> tuple[Tensor, Tensor]:
    """Variances and principal axes of a covariance, by descending variance.

    cov: (..., d, d) -> variances (..., d), and axes (..., d, d) as columns. The largest entry of an axis is
    positive, so that the signs do not depend on the eigensolver.

    >>> variances, axes = principal_axes(torch.tensor([[2.0, 1.0], [1.0, 2.0]]))
    >>> variances.round(decimals=3), axes[:, 0].round(decimals=3)
    (tensor([3., 1.]), tensor([0.7070, 0.7070]))
    """
    variances, axes = eigh(cov)
    signs = axes.gather(-2, axes.abs().argmax(dim=-2, keepdim=True)).sign()
    return variances.clamp_min(0).flip(-1), (axes * signs).flip(-1)


@full_precision
def whiten(
    x: Tensor, *,
    eps: float, floor: float = 0.0, gradient: Gradient = "centre", shrinkage: float = 0.0,
    root: Root = inverse_root,
) -> Tensor:  # fmt: skip
    """ZCA-whiten all channels over the batch: (x - mean) (covariance + r I) ** -1/2 ([1] Eq. 3).

    x: (..., n, d) -> (..., n, d). Leading axes never share statistics. r: `Ridge(eps, floor)`; eps is a share
    of the mean variance, so that x may have any scale. shrinkage: the amount of `shrink`. gradient: "full"
    goes through mean and matrix; "centre" takes the matrix as a constant, as the official code of [1] does in
    effect; "none" takes both as constants. root: for another matrix than ZCA's, as `linalg.cholesky_root`.
    With n <= d the covariance is singular, and eps alone bounds the gain, at 1 / sqrt(eps) relative to the
    scale of x; the first time there is a warning. Raises ValueError for eps or floor below 0, or both 0.

    >>> x = torch.randn(2, 64, 3, generator=torch.Generator().manual_seed(0))  # two views of 64 sentences
    >>> torch.allclose(covariance(whiten(x, eps=1e-6)), torch.eye(3), atol=1e-4)
    True
    """
    n, d = sentences_by_channels(x)
    symmetric = root is inverse_root  # for others there is one engine
    if d == 2 and symmetric:
        return group_whiten(x, width=2, eps=eps, floor=floor, gradient=gradient, shrinkage=shrinkage)
    xc, mean = _centred(x, d, Ridge(eps, floor), gradient)
    ridge = Ridge(eps, floor).above(mean.squeeze(-2))
    if d > n and symmetric:
        return _whiten_by_gram(xc, ridge, shrinkage, through_matrix=gradient == "full")
    with torch.set_grad_enabled(gradient == "full" and torch.is_grad_enabled()):
        cov = shrink(xc.mT @ xc / n, shrinkage)
        matrix = root(cov, ridge.of(mean_variance(cov)))
    return xc @ matrix


@full_precision
def group_whiten(  # noqa: PLR0913  those of whiten, and the width
    x: Tensor, *,
    width: int, eps: float, floor: float = 0.0, gradient: Gradient = "centre", shrinkage: float = 0.0,
    root: Root = inverse_root,
) -> Tensor:  # fmt: skip
    """Whiten each block of `width` consecutive channels on its own ([1], section 3.2.1, Eq. 5).

    x: (..., n, d) -> (..., n, d). The other settings, and the limits, are those of `whiten`.

    >>> x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    >>> cov = covariance(group_whiten(x, width=2, eps=1e-6))  # white inside a group, not between groups
    >>> torch.allclose(cov[:2, :2], torch.eye(2), atol=1e-4), torch.allclose(cov, torch.eye(4), atol=1e-4)
    (True, False)
    """
    _, d = sentences_by_channels(x)
    if group_width(d, width=width) == 2 and root is inverse_root:
        partner = torch.arange(d, device=x.device).expand(*x.shape[:-2], d) ^ 1  # 1 0 3 2 5 4 ...
        return _whiten_pairs(x, partner, Ridge(eps, floor), gradient, shrinkage)
    # (..., g, n, w); one copy here saves one in each batched product: 5-20 % of the whole
    blocks = x.reshape(*x.shape[:-1], d // width, width).movedim(-2, -3).contiguous()
    y = whiten(blocks, eps=eps, floor=floor, gradient=gradient, shrinkage=shrinkage, root=root)
    return y.movedim(-3, -2).flatten(-2)


@full_precision
def shuffled_group_whiten(  # noqa: PLR0913  those of group_whiten, and the permutations
    x: Tensor, permutations: Tensor, *,
    width: int, eps: float, floor: float = 0.0, gradient: Gradient = "centre", shrinkage: float = 0.0,
    root: Root = inverse_root,
) -> Tensor:  # fmt: skip
    """Shuffle channels, whiten in groups, put the channels back ([1], section 3.2.2, Eq. 6).

    x: (..., n, d), permutations: (..., d) int64, one for each view -> (..., n, d). Limits: see `whiten`.
    Raises ValueError for permutations of another shape.

    >>> x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    >>> z = shuffled_group_whiten(x, torch.tensor([0, 2, 1, 3]), width=2, eps=1e-6)
    >>> torch.allclose(covariance(z[:, [0, 2]]), torch.eye(2), atol=1e-4)  # 0 and 2 were one group
    True
    """
    _, d = sentences_by_channels(x)
    if permutations.shape != (expected := (*x.shape[:-2], d)):
        raise ValueError(f"permutations are {tuple(permutations.shape)}, not {expected} as x asks for")
    channels = torch.arange(d, device=x.device).expand_as(permutations)
    inverse = torch.empty_like(permutations).scatter_(-1, permutations, channels)
    if group_width(d, width=width) == 2 and root is inverse_root:  # moves channels once, not twice
        partner = permutations.gather(-1, inverse ^ 1)
        return _whiten_pairs(x, partner, Ridge(eps, floor), gradient, shrinkage)
    x = x.gather(-1, permutations.unsqueeze(-2).expand_as(x))
    x = group_whiten(x, width=width, eps=eps, floor=floor, gradient=gradient, shrinkage=shrinkage, root=root)
    return x.gather(-1, inverse.unsqueeze(-2).expand_as(x))


def permutations(leading_shape: Sequence[int], d: int, *, device: str | torch.device) -> Tensor:
    """Independent uniform permutations of d channels: (*leading_shape, d) int64.

    >>> permutations((2,), 5, device="cpu").sort().values  # every channel once in each row
    tensor([[0, 1, 2, 3, 4],
            [0, 1, 2, 3, 4]])
    """
    # of float32 keys, one row of 768 in 60 would hold a tie; Apple's GPUs have no float64, so the host draws
    where = "cpu" if torch.device(device).type == "mps" else device
    keys = torch.rand(*leading_shape, d, dtype=torch.float64, device=where)
    return keys.argsort(-1).to(device)


def group_width(d: int, *, groups: int | None = None, width: int | None = None) -> int:
    """The number of channels in a group, w = d / g, from `groups` or `width`, or from both where they agree.

    The "group size 384" of [1] is a number of groups: 768 / 384 = 2 channels each. Raises ValueError where
    a number does not divide d, where the two contradict each other, or where neither is given.

    >>> group_width(768, groups=384)
    2
    """
    name, count = ("width", width) if groups is None else ("groups", groups)
    if count is None:
        raise ValueError("give groups or group_width: both are None (null)")
    if count < 1 or d % count:
        divisors = sorted((k for k in range(1, d + 1) if d % k == 0), key=lambda k: abs(k - count))
        raise ValueError(f"{name}={count} does not divide d={d}; nearest that do: {sorted(divisors[:2])}")
    size = count if groups is None else d // count
    if width not in (None, size):
        raise ValueError(
            f"groups={groups} of d={d} have {size} channels each, not width={width}; give only one"
        )
    return size


def _whiten_by_gram(xc: Tensor, ridge: Ridge, shrinkage: float, *, through_matrix: bool) -> Tensor:
    """Whiten centred xc: (..., n, d) by the eigenvectors of its Gram matrix, for n < d.

    xc W, W = (xc' xc / n + r I) ** -1/2, is V diag(1 / s) V' xc with xc xc' / n = V diag(l) V', s = sqrt(l +
    r). A constant W gives grad W, with W = I / f - xc' V diag(1 / (n s f (s + f))) V' xc and f = sqrt(r).
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
    """x minus its mean over the batch, and that mean. Raises ValueError for invalid settings of `whiten`."""
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

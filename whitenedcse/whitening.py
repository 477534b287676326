"""Whitening: maps after which a batch has zero mean and identity covariance; running moments of many rows.

    n: sentences in the batch    d: embedding width    g: groups    w = d / g: channels in a group

Shuffled group whitening (SGW) of one view x: (n, d), by a random permutation p of its channels, is [1] Eq.
3 to 6:

    groups = x[:, p].unflatten(1, (-1, w)).transpose(0, 1)               # shuffle, cut: (g, n, w)
    centred = groups - groups.mean(dim=1, keepdim=True)
    variances, u = torch.linalg.eigh(centred.mT @ centred / n)
    white = centred @ (u / (variances + r).sqrt().unsqueeze(1)) @ u.mT   # by (C + r I) ** -1/2
    z = white.transpose(0, 1).flatten(1)[:, p.argsort()]                 # put the channels back

with r = eps times the mean variance of the group, where the paper adds nothing. `shuffled_group_whiten`
computes just that, but for pairs in closed form, which is 4 times as fast as the official layer; by
eigenvectors it is 1.6 times (bench.whitening; with the errors of both in results/whitening).

Everything runs in float32 (float64 stays) with autocast off, because bfloat16 statistics whiten to 1e-2 only.
Nothing here waits for a GPU, but PyTorch's `eigh` does: pairs and "iterative" never call it.

[1] WhitenedCSE, arXiv:2305.17746    [2] Kessy et al., Optimal Whitening, arXiv:1512.00809
[3] Huang et al., IterNorm, arXiv:1904.03441    [4] Su et al., BERT-whitening, arXiv:2103.15316
[5] Chan, Golub and LeVeque, Updating Formulae and a Pairwise Algorithm, COMPSTAT 1982
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, Self, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from whitenedcse.compute import full_precision

Gradient = Literal["full", "centre", "none"]
Root = Callable[[Tensor, Tensor], Tensor]  # covariance (..., w, w), r (..., 1, 1) -> matrix for row vectors
LEAST = 1e-30  # the variance of numbers that are all zero


@full_precision
def covariance(x: Tensor) -> Tensor:
    """The covariance of x over its rows: (..., n, d) -> (..., d, d).

    It is divided by n, not n - 1, as in the official code of [1].

    >>> covariance(torch.tensor([[0.0, 0.0], [2.0, 4.0]]))
    tensor([[1., 2.],
            [2., 4.]])
    """
    xc = x - x.mean(dim=-2, keepdim=True)
    return xc.mT @ xc / x.shape[-2]


def mean_variance(cov: Tensor) -> Tensor:
    """The mean of a covariance's diagonal: (..., d, d) -> (..., 1, 1).

    >>> mean_variance(torch.tensor([[2.0, 1.0], [1.0, 4.0]]))
    tensor([[3.]])
    """
    return cov.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]


def ridge(variance: Tensor, eps: float, mean: Tensor) -> Tensor:
    """What is added to each variance before a root is taken: eps times the mean variance, (..., 1, 1).

    Inputs of any scale so come out white. The variance of 100 rounding errors of the mean (..., w) is added
    too: it keeps those of a constant channel from being scaled up to variance 1, and matters only where a
    mean is 10,000 standard deviations (float32).

    >>> ridge(torch.tensor([[2.0]]), 1e-3, torch.zeros(4))
    tensor([[0.0020]])
    """
    noise = 100 * torch.finfo(mean.dtype).eps
    floor = (noise * mean.detach()).square().mean(-1)[..., None, None]
    return (eps * variance + floor).clamp_min(LEAST)


@full_precision
def zca(cov: Tensor, r: Tensor) -> Tensor:
    """(cov + r I) ** -1/2, symmetric: the whitening matrix that moves points least [2].

    cov: (..., w, w), r: (..., 1, 1), of any scale -> (..., w, w). The gradient is right at equal eigenvalues
    too, where autograd's of `eigh` is NaN.

    >>> cov = torch.tensor([[2.0, 1.0], [1.0, 2.0]])
    >>> w = zca(cov, torch.zeros(1, 1))
    >>> torch.allclose(w @ cov @ w, torch.eye(2), atol=1e-5)
    True
    """
    scale = (mean_variance(cov) + r).detach()  # taken out, so that no square over- or underflows
    root = _root_of_pairs if cov.shape[-1] == 2 else _InverseSquareRoot.apply
    return root(cov / scale, r / scale) * scale.rsqrt()


@full_precision
@torch.no_grad()
def pca(cov: Tensor, r: Tensor) -> Tensor:
    """U diag(l + r) ** -1/2, which rotates x to its principal axes U, columns by descending variance l.

    cov: (..., w, w), r: (..., 1, 1) -> (..., w, w). Signs are those of `principal_axes`. No gradient:
    eigenvectors have none at equal eigenvalues.

    >>> pca(torch.tensor([[1.0, 0.0], [0.0, 4.0]]), torch.zeros(1, 1))
    tensor([[0.0000, 1.0000],
            [0.5000, 0.0000]])
    """
    variances, axes = principal_axes(cov)
    return axes * (variances.unsqueeze(-2) + r).rsqrt()


@torch.no_grad()
def principal_axes(cov: Tensor) -> tuple[Tensor, Tensor]:
    """Variances and principal axes of a covariance, by descending variance.

    cov: (..., d, d) -> variances (..., d), and axes (..., d, d) as columns. The largest entry of an axis is
    positive, so that the signs do not depend on the eigensolver.

    >>> principal_axes(torch.tensor([[2.0, 1.0], [1.0, 2.0]]))[0].round(decimals=3)
    tensor([3., 1.])
    """
    variances, axes = eigh(cov)
    signs = axes.gather(-2, axes.abs().argmax(dim=-2, keepdim=True)).sign()
    return variances.clamp_min(0).flip(-1), (axes * signs).flip(-1)


def iterated(cov: Tensor, r: Tensor, iterations: int = 5) -> Tensor:
    """`zca` by some Newton-Schulz iterations, without eigenvectors [3].

    cov: (..., w, w), r: (..., 1, 1) -> (..., w, w). With A = (cov + r I) / trace, P_0 = I and P_k+1 = (3
    P_k - P_k ** 3 A) / 2 it is P_k / sqrt(trace), symmetric. An axis with a share s of the sum of variances
    comes out with at most s 2.25 ** k, so few iterations whiten softly. Y_k = P_k A is iterated beside P_k,
    which alone would amplify rounding errors.

    >>> w = iterated(torch.diag(torch.tensor([3.0, 1.0])), torch.zeros(1, 1), iterations=3)
    >>> (w @ torch.diag(torch.tensor([3.0, 1.0])) @ w).diagonal().round(decimals=2)
    tensor([1.0000, 0.9500])
    """
    scale = (mean_variance(cov) + r).detach()  # as in `zca`
    a = (cov + r * _identity(cov)) / scale
    trace = a.shape[-1] * mean_variance(a)
    y, three = a / trace, 3 * _identity(a)
    step = (three - y) / 2
    root = step  # P_1
    for _ in range(iterations - 1):
        y = y @ step
        step = (three - root @ y) / 2
        root = step @ root  # these two orders of factors are the stable ones
    return root * trace.rsqrt() * scale.rsqrt()


@full_precision
def whiten(x: Tensor, *, eps: float, gradient: Gradient = "centre", root: Root = zca) -> Tensor:
    """Whiten all channels over the batch: (x - mean) (covariance + r I) ** -1/2 ([1] Eq. 3).

    x: (..., n, d) -> (..., n, d). Leading axes never share statistics. eps: r as a share of the mean
    variance, so that x may have any scale. gradient: "full" goes through mean and matrix; "centre" takes the
    matrix as a constant, as the official code of [1] does in effect; "none" takes both as constants. root:
    the matrix, `zca`, `iterated` or one of your own.
    With n <= d the covariance is singular, and eps alone bounds the gain, at 1 / sqrt(eps) relative to the
    scale of x. Raises ValueError for eps that is not above 0.

    >>> x = torch.randn(2, 64, 3, generator=torch.Generator().manual_seed(0))  # two views of 64 sentences
    >>> torch.allclose(covariance(whiten(x, eps=1e-6)), torch.eye(3), atol=1e-4)
    True
    """
    xc, mean = _centred(x, eps, gradient)
    with torch.set_grad_enabled(gradient == "full" and torch.is_grad_enabled()):
        cov = xc.mT @ xc / x.shape[-2]
        matrix = root(cov, ridge(mean_variance(cov), eps, mean))
    return xc @ matrix


@full_precision
def group_whiten(
    x: Tensor, *, width: int, eps: float, gradient: Gradient = "centre", root: Root = zca
) -> Tensor:
    """Whiten each block of `width` consecutive channels on its own ([1], section 3.2.1, Eq. 5).

    x: (..., n, d) -> (..., n, d). The other settings, and the limits, are those of `whiten`.

    >>> x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    >>> cov = covariance(group_whiten(x, width=2, eps=1e-6))  # white inside a group, not between groups
    >>> torch.allclose(cov[:2, :2], torch.eye(2), atol=1e-4), torch.allclose(cov, torch.eye(4), atol=1e-4)
    (True, False)
    """
    d = x.shape[-1]
    check_divides(width, d)
    if width == 2 and root is zca:
        partner = torch.arange(d, device=x.device).expand(*x.shape[:-2], d) ^ 1  # 1 0 3 2 5 4 ...
        return _whiten_pairs(x, partner, eps, gradient)
    # (..., g, n, w); one copy here saves one in each batched product: 5-20 % of the whole
    blocks = x.reshape(*x.shape[:-1], d // width, width).movedim(-2, -3).contiguous()
    return whiten(blocks, eps=eps, gradient=gradient, root=root).movedim(-3, -2).flatten(-2)


@full_precision
def shuffled_group_whiten(
    x: Tensor,
    permutations: Tensor,
    *,
    width: int,
    eps: float,
    gradient: Gradient = "centre",
    root: Root = zca,
) -> Tensor:
    """SGW: shuffle channels, whiten in groups, put the channels back ([1], section 3.2.2, Eq. 6).

    x: (..., n, d), permutations: (..., d) int64, one for each view -> (..., n, d). Limits: see `whiten`.
    Pairs are not moved: each channel is whitened with the partner that the permutation gives it.

    >>> x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    >>> z = shuffled_group_whiten(x, torch.tensor([0, 2, 1, 3]), width=2, eps=1e-6)
    >>> torch.allclose(covariance(z[:, [0, 2]]), torch.eye(2), atol=1e-4)  # 0 and 2 were one group
    True
    """
    d = x.shape[-1]
    channels = torch.arange(d, device=x.device).expand_as(permutations)
    inverse = torch.empty_like(permutations).scatter_(-1, permutations, channels)
    if width == 2 and root is zca:
        check_divides(width, d)
        return _whiten_pairs(x, permutations.gather(-1, inverse ^ 1), eps, gradient)
    x = x.gather(-1, permutations.unsqueeze(-2).expand_as(x))
    x = group_whiten(x, width=width, eps=eps, gradient=gradient, root=root)
    return x.gather(-1, inverse.unsqueeze(-2).expand_as(x))


def random_permutations(leading_shape: Sequence[int], d: int, *, device: str | torch.device) -> Tensor:
    """Independent uniform permutations of d channels: (*leading_shape, d) int64.

    >>> random_permutations((2,), 5, device="cpu").sort().values  # every channel once in each row
    tensor([[0, 1, 2, 3, 4],
            [0, 1, 2, 3, 4]])
    """
    # of float32 keys, one row of 768 in 60 would hold a tie; Apple's GPUs have no float64, so the host draws
    where = "cpu" if torch.device(device).type == "mps" else device
    keys = torch.rand(*leading_shape, d, dtype=torch.float64, device=where)
    return keys.argsort(-1).to(device)


def check_divides(width: int, d: int) -> None:
    """Raise ValueError unless groups of `width` channels make up d.

    >>> check_divides(250, 768)
    Traceback (most recent call last):
    ValueError: group_width=250 does not divide d=768; nearest that do: [192, 256]
    """
    if width < 1 or d % width:
        divisors = sorted((k for k in range(1, d + 1) if d % k == 0), key=lambda k: abs(k - width))
        raise ValueError(
            f"group_width={width} does not divide d={d}; nearest that do: {sorted(divisors[:2])}"
        )


def _centred(x: Tensor, eps: float, gradient: Gradient) -> tuple[Tensor, Tensor]:
    """x minus its mean over the batch, and that mean, (..., d)."""
    if not eps > 0 or gradient not in get_args(Gradient):
        raise ValueError(f"eps={eps} must be above 0, {gradient=} one of {', '.join(get_args(Gradient))}")
    mean = x.mean(dim=-2, keepdim=True)
    return x - (mean.detach() if gradient == "none" else mean), mean.squeeze(-2)


def _whiten_pairs(x: Tensor, partner: Tensor, eps: float, gradient: Gradient) -> Tensor:
    """Whiten each channel with its partner. x: (..., n, d), partner: (..., d), its own inverse."""
    xc, mean = _centred(x, eps, gradient)
    mate = xc.gather(-1, partner.unsqueeze(-2).expand_as(xc))
    means = torch.stack((mean, mean.gather(-1, partner)), dim=-1)
    with torch.set_grad_enabled(gradient == "full" and torch.is_grad_enabled()):
        variance, product = (xc * xc).mean(dim=-2), (xc * mate).mean(dim=-2)
        cov = torch.stack((variance, product, product, variance.gather(-1, partner)), dim=-1)
        cov = cov.reshape(*variance.shape, 2, 2)
        own, other = zca(cov, ridge(mean_variance(cov), eps, means))[..., 0, :].unsqueeze(-3).unbind(-1)
    return xc * own + mate * other


def _root_of_pairs(a: Tensor, r: Tensor) -> Tensor:
    """(a + r I) ** -1/2 of a: (..., 2, 2) in closed form.

    With A = a + r I, s = sqrt(det A) and t = sqrt(trace A + 2 s) it is (adj A + s I) / (s t).
    """
    x, b, y, r = a[..., 0, 0], a[..., 0, 1], a[..., 1, 1], r[..., 0, 0]
    # with A = a + r I: det a >= 0, so det A >= r (trace A - r), which rounding must not undercut
    s = ((x * y - b * b).clamp_min(0) + r * (x + y + r)).sqrt()
    t = (x + y + 2 * (r + s)).sqrt()
    return (torch.stack((y + r + s, -b, -b, x + r + s), dim=-1) / (s * t).unsqueeze(-1)).reshape(a.shape)


class _InverseSquareRoot(Function):
    """(A + r I) ** -1/2 of a symmetric A = U diag(l) U', with a gradient that is stable at equal eigenvalues.

    In the eigenbasis its derivative (p_i - p_j) / (l_i - l_j), p = 1 / s and s = sqrt(l + r), is written -p_i
    p_j / (s_i + s_j), which has no pole at equal eigenvalues. The derivative with respect to r is its trace.
    """

    @staticmethod
    def forward(ctx: Any, a: Tensor, r: Tensor) -> Tensor:
        eigenvalues, u = eigh(a)
        s = (eigenvalues.clamp_min(0).unsqueeze(-2) + r).sqrt()
        ctx.save_for_backward(u, s)
        return (u / s) @ u.mT

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        u, s = ctx.saved_tensors
        inner = (u.mT @ grad @ u) / (-s * s.mT * (s + s.mT))
        return u @ inner @ u.mT, inner.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]


def eigh(a: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues (..., w), ascending, and eigenvectors (..., w, w) as columns, of symmetric a: (..., w, w).

    NaN for a matrix that is not finite. On CPU for Apple's GPUs, which have no such operation.

    >>> eigh(torch.tensor([[2.0, 1.0], [1.0, 2.0]]))[0].round(decimals=3)
    tensor([1., 3.])
    """
    finite = a.isfinite().all(dim=(-2, -1), keepdim=True)  # for NaN the solver raises, blaming the matrix
    given = torch.where(finite, a, _identity(a)).to("cpu" if a.device.type == "mps" else a.device)
    values, vectors = (x.to(a.device) for x in torch.linalg.eigh(given))
    return values.where(finite.squeeze(-1), torch.nan), vectors.where(finite, torch.nan)


def _identity(a: Tensor) -> Tensor:
    return torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)


Array = NDArray[np.float64]
BLOCK = 4096  # rows in float64 at a time: 25 MB of width 768


def check_finite(x: NDArray[Any], name: Callable[[int], str]) -> None:
    """Raise ValueError, with the name of the first such row, for NaN or infinity in x: (n, d).

    >>> check_finite(np.array([[1.0], [np.nan]]), lambda row: f"the vector of sentence {row}")
    Traceback (most recent call last):
    ValueError: NaN or infinity in the vector of sentence 1
    """
    if not (finite := np.isfinite(x).all(axis=1)).all():
        raise ValueError(f"NaN or infinity in {name(int(np.argmin(finite)))}")


class Moments:
    """Streaming mean and covariance of rows (n, d), in float64.

    Any chunking gives the same to 1e-12. Sums are kept relative to the first row: a mean far from zero costs
    no digits, and equal rows give exact zeros. Blocks are joined by [5]; the recursion that [4] prints
    (section 3.4, Eq. 10-11) makes variances 1 + H / (n - 1) times too large on average, with H the harmonic
    number of n - 1, and is not used.

    >>> moments = Moments(1).update(np.array([[0.0], [2.0]])).update(np.array([[4.0]]))
    >>> moments.mean, moments.n
    (array([2.]), 3)
    """

    def __init__(self, d: int) -> None:
        self.d, self.n = d, 0
        self._origin = np.zeros(d)
        self._mean, self._scatter = np.zeros(d), np.zeros((d, d))  # about the origin; of deviations

    def update(self, x: NDArray[Any]) -> Self:
        """Add rows x: (n, d), which may be a memory map; ValueError for another width, NaN or infinity."""
        if x.ndim != 2 or x.shape[1] != self.d:
            raise ValueError(f"rows must have the shape (n, {self.d}), not {x.shape}")
        n, origin, mean, scatter = self.n, self._origin, self._mean, self._scatter
        for start in range(0, len(x), BLOCK):
            block = np.asarray(x[start : start + BLOCK], np.float64)
            check_finite(block, lambda row: f"row {start + row}")  # noqa: B023
            if n == 0:
                origin = block[0].copy()
            rows = block - origin
            block_mean = rows.mean(axis=0)
            rows -= block_mean
            delta, share = block_mean - mean, len(rows) / (n + len(rows))
            scatter = scatter + rows.T @ rows + np.outer(delta, delta) * (n * share)
            mean, n = mean + delta * share, n + len(rows)
        self.n, self._origin, self._mean, self._scatter = n, origin, mean, scatter
        return self

    @property
    def mean(self) -> Array:
        """The mean of the rows, (d,)."""
        return self._origin + self._mean

    @property
    def covariance(self) -> Array:
        """The covariance of the rows, (d, d), divided by n; NaN before the first row."""
        return self._scatter / (self.n or np.nan)

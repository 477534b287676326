"""Inverse roots of covariances, and the mean and covariance of rows that arrive in pieces.

n: rows    d: width    w: channels that are whitened together

[1] WhitenedCSE, arXiv:2305.17746    [2] Su et al., BERT-whitening, arXiv:2103.15316
[3] Chan, Golub and LeVeque, Updating Formulae and a Pairwise Algorithm, COMPSTAT 1982
[4] Kessy et al., Optimal Whitening, arXiv:1512.00809    [5] Huang et al., IterNorm, arXiv:1904.03441
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Self, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

LEAST = 1e-30  # the variance of numbers that are all zero
# from a covariance (..., w, w) and r (..., 1, 1), M of (..., w, w) with M' (a + r I) M = I
Root = Callable[[Tensor, Tensor], Tensor]


class Ridge(NamedTuple):
    """What is added to each variance before its root is taken: `eps` times the mean variance, plus `floor`.

    The mean is over the channels that are whitened together, so inputs of any scale come out white. floor: an
    absolute variance, a number or (..., 1, 1); it is for `above`, and for heads trained with an absolute eps.
    Eq. 5 and 6 of [1] add nothing, and are undefined for a batch without full rank.
    """

    eps: float
    floor: float | Tensor = 0.0

    def of(self, variance: Tensor) -> Tensor:
        """The amount to add, (..., 1, 1), for a mean variance of (..., 1, 1)."""
        return (self.eps * variance + self.floor).clamp_min(LEAST)

    def above(self, mean: Tensor) -> Ridge:
        """A Ridge whose floor is raised by the variance of 100 rounding errors of the mean, mean: (..., w).

        It keeps the rounding error of a constant channel from being scaled up to variance 1. It matters only
        where a mean is 10,000 standard deviations (float32).
        """
        noise = 100 * torch.finfo(mean.dtype).eps
        return Ridge(self.eps, self.floor + (noise * mean.detach()).square().mean(-1)[..., None, None])


def mean_variance(cov: Tensor) -> Tensor:
    """The mean of a covariance's diagonal: (..., d, d) -> (..., 1, 1)."""
    return cov.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]


def inverse_root(a: Tensor, r: Tensor) -> Tensor:
    """(a + r I) ** -1/2 with its gradient, for covariances a: (..., w, w) and r: (..., 1, 1) of any scale."""
    scale = (mean_variance(a) + r).detach()  # taken out, so that no square over- or underflows
    a, r = a / scale, r / scale
    root = _of_pairs if a.shape[-1] == 2 else _InverseSquareRoot.apply
    return root(a, r) * scale.rsqrt()


def cholesky_root(a: Tensor, r: Tensor) -> Tensor:
    """The upper triangular M with M M' = (a + r I) ** -1, for a: (..., w, w) and r: (..., 1, 1) of any scale.

    It is L' ** -1, with a + r I = L L': channel i of x M is made of the channels up to i of x. Raises
    ValueError where rounding leaves no positive definite matrix.

    >>> cholesky_root(torch.tensor([[4.0, 2.0], [2.0, 2.0]]), torch.zeros(1, 1))  # L = [[2, 0], [1, 1]]
    tensor([[ 0.5000, -0.5000],
            [ 0.0000,  1.0000]])
    """
    a, scale = _ridged(a, r)
    lower, failed = torch.linalg.cholesky_ex(a)
    if failed.any():
        raise ValueError("transform=cholesky: a covariance is not positive definite in this precision; use a"
                         " larger eps, shrinkage, or transform=zca")  # fmt: skip
    return torch.linalg.solve_triangular(lower.mT, _identity(a), upper=True) * scale.rsqrt()


def correlation_root(a: Tensor, r: Tensor) -> Tensor:
    """ZCA-cor's V ** -1/2 P ** -1/2, V the diagonal of a + r I and P its correlations [4].

    a: (..., w, w), r: (..., 1, 1) -> (..., w, w) for x M. Of all whitening matrices it keeps each channel of
    x M most correlated with the one of x, and where r = 0 the scales of the channels have no effect.

    >>> correlation_root(torch.diag(torch.tensor([4.0, 16.0])), torch.zeros(1, 1)).diagonal()
    tensor([0.5000, 0.2500])
    """
    a, scale = _ridged(a, r)
    variances = a.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)  # (..., w, 1)
    deviations = variances.sqrt()
    least = (r / scale / variances.amax(dim=-2, keepdim=True)).detach()  # no eigenvalue of P is below it
    correlations = a / (deviations * deviations.mT)
    return inverse_root(correlations - least * _identity(a), least) / deviations * scale.rsqrt()


def iterated_root(a: Tensor, r: Tensor, iterations: int = 5) -> Tensor:
    """(a + r I) ** -1/2 by some Newton-Schulz iterations, without eigenvectors [5].

    a: (..., w, w), r: (..., 1, 1) -> (..., w, w). With A = (a + r I) / trace, P_0 = I and P_k+1 = (3 P_k -
    P_k ** 3 A) / 2 it is P_k / sqrt(trace), symmetric. An axis with a share s of the sum of variances comes
    out with at most s 2.25 ** k, so few iterations whiten softly. Y_k = P_k A is iterated beside P_k, which
    alone would amplify rounding errors.

    >>> a = torch.tensor([[2.0, 1.0], [1.0, 2.0]])  # variances 3 and 1 along its axes
    >>> w = iterated_root(a, torch.zeros(1, 1), iterations=3)
    >>> torch.linalg.eigvalsh(w @ a @ w).round(decimals=2)
    tensor([0.9500, 1.0000])
    """
    a, scale = _ridged(a, r)
    trace, unit = a.shape[-1] * mean_variance(a), 3 * _identity(a)
    step = root = (unit - (y := a / trace)) / 2
    for _ in range(iterations - 1):
        y = y @ step
        step = (unit - root @ y) / 2
        root = step @ root  # these two orders of factors are the stable ones
    return root * (trace * scale).rsqrt()


def _identity(a: Tensor) -> Tensor:
    return torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)


def _ridged(a: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    """(a + r I) / scale and a constant scale, its mean variance, so that no square over- or underflows."""
    scale = (mean_variance(a) + r).detach()
    return (a + r * _identity(a)) / scale, scale


def _of_pairs(a: Tensor, r: Tensor) -> Tensor:
    """(a + r I) ** -1/2 of a: (..., 2, 2) in closed form.

    With A = a + r I, s = sqrt(det A) and t = sqrt(trace A + 2 s) it is (adj A + s I) / (s t).
    """
    x, b, y, r = a[..., 0, 0], a[..., 0, 1], a[..., 1, 1], r[..., 0, 0]
    # with A = a + r I: det a >= 0, so det A >= r (trace A - r), which rounding must not undercut
    s = ((x * y - b * b).clamp_min(0) + r * (x + y + r)).sqrt()
    t = (x + y + 2 * (r + s)).sqrt()
    return (torch.stack((y + r + s, -b, -b, x + r + s), dim=-1) / (s * t).unsqueeze(-1)).reshape(a.shape)


def eigh(a: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues (..., w), ascending, and eigenvectors (..., w, w) as columns, of symmetric a: (..., w, w).

    NaN for a matrix that is not finite. On CPU for Apple's GPUs, which have no such operation.
    """
    finite = a.isfinite().all(dim=(-2, -1), keepdim=True)  # for NaN the solver raises, blaming the matrix
    given = torch.where(finite, a, _identity(a)).to("cpu" if a.device.type == "mps" else a.device)
    values, vectors = (x.to(a.device) for x in torch.linalg.eigh(given))
    return values.where(finite.squeeze(-1), torch.nan), vectors.where(finite, torch.nan)


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


Update = Literal["exact", "paper"]
Array = NDArray[np.float64]

BLOCK = 4096  # rows in float64 at a time: 25 MB of width 768


def refuse_infinite(x: NDArray[Any], name: Callable[[int], str]) -> None:
    """Raise ValueError, with the name of the first such row, for NaN or infinity in x: (n, d).

    >>> refuse_infinite(np.array([[1.0], [np.nan]]), lambda row: f"the vector of sentence {row}")
    Traceback (most recent call last):
    ValueError: NaN or infinity in the vector of sentence 1
    """
    if not (finite := np.isfinite(x).all(axis=1)).all():
        raise ValueError(f"NaN or infinity in {name(int(np.argmin(finite)))}")


class _Part(NamedTuple):
    """Mean (d,) of n rows, and the sum (d, d) of the products of their deviations from it."""

    n: int
    mean: Array
    scatter: Array


def _joined(a: _Part, b: _Part) -> _Part:
    """Mean and products of the rows of a and b together, one of which has rows: formula of [3]."""
    n, delta = a.n + b.n, b.mean - a.mean
    scatter = a.scatter + b.scatter + np.outer(delta, delta) * (a.n * b.n / n)
    return _Part(n, a.mean + delta * (b.n / n), scatter)


def _exact(a: _Part, rows: Array) -> _Part:
    rows = rows - (mean := rows.mean(axis=0))
    return _joined(a, _Part(len(rows), mean, rows.T @ rows))


def _as_printed(a: _Part, rows: Array) -> _Part:
    """Eq. 10-11 of [2] times n, for each row in turn; mu in Eq. 11, which has no index, is the last mean."""
    counts = a.n + np.arange(len(rows))[:, None]
    sums = a.n * a.mean + rows.cumsum(axis=0)
    delta = rows - (sums - rows) / np.maximum(counts, 1)  # 0 for the first of all, as the origin is that row
    return _Part(a.n + len(rows), sums[-1] / (counts[-1] + 1), a.scatter + delta.T @ delta)


class Moments:
    """Streaming mean and covariance of rows (n, d), in float64.

    Any chunking and any order of merges give the same to 1e-12. Sums are kept relative to the first row: a
        mean far from zero costs no digits, and equal rows give exact zeros.
    update: "exact" merges blocks by [3]; "paper" is the recursion of [2], section 3.4, Eq. 10-11, kept to
        show its bias: variances come out 1 + H / (n - 1) times too large on average, with H the harmonic
        number of n - 1, which is 0.4 % at n = 2000. It cannot merge.
    """

    def __init__(self, d: int, update: Update = "exact") -> None:
        if d < 1 or update not in get_args(Update):
            raise ValueError(f"d={d} must be 1 or more, {update=} one of {', '.join(get_args(Update))}")
        self.d, self.formula = d, update
        self._origin = np.zeros(d)
        self._part = _Part(0, np.zeros(d), np.zeros((d, d)))  # about the origin

    def update(self, x: NDArray[Any]) -> Self:
        """Add rows x: (n, d), which may be a memory map.

        Raises ValueError for another width, NaN or infinity; then no row of x has been added.
        """
        if x.ndim != 2 or x.shape[1] != self.d:
            raise ValueError(f"rows must have the shape (n, {self.d}), not {x.shape}")
        origin, part = self._origin, self._part
        for start in range(0, len(x), BLOCK):
            block = np.asarray(x[start : start + BLOCK], np.float64)
            refuse_infinite(block, lambda row, start=start: f"row {start + row}")  # type: ignore[misc]
            origin = origin if part.n else block[0].copy()
            part = (_exact if self.formula == "exact" else _as_printed)(part, block - origin)
        self._origin, self._part = origin, part
        return self

    def merge(self, other: Moments) -> Self:
        """Add the rows that `other` has seen; either may have seen none.

        Raises ValueError for another width, and for update="paper".
        """
        if (self.formula, other.formula) != ("exact", "exact"):
            raise ValueError(f"update={self.formula!r} and {other.formula!r} cannot merge; only 'exact' can")
        if other.d != self.d:
            raise ValueError(f"moments of width {other.d} cannot merge into those of width {self.d}")
        if other.n:
            self._origin = self._origin if self.n else other._origin
            shift = other._origin - self._origin
            self._part = _joined(self._part, other._part._replace(mean=other._part.mean + shift))
        return self

    @property
    def n(self) -> int:
        """The number of rows added so far."""
        return self._part.n

    @property
    def mean(self) -> Array:
        """The mean of the rows, (d,). Raises ValueError before the first row."""
        return self._origin + self._seen().mean

    @property
    def covariance(self) -> Array:
        """The covariance of the rows, (d, d), divided by n. Raises ValueError before the first row."""
        return self._seen().scatter / self.n

    @property
    def state(self) -> Array:
        """All that it holds, in one array (d + 3, d) for `restored`."""
        return np.vstack([self._part.scatter, self._part.mean, self._origin, np.full(self.d, self.n)])

    @classmethod
    def restored(cls, state: Array) -> Self:
        """Moments with this `state`, to the last bit, and update="exact"."""
        new = cls(state.shape[1])
        new._part, new._origin = _Part(int(state[-1, 0]), state[-3], state[:-3]), state[-2]
        return new

    def _seen(self) -> _Part:
        if not self.n:
            raise ValueError("no row was added, so there is no mean and no covariance")
        return self._part

"""The matrices of fitted transforms, each a function of the covariance of the rows they are fitted to.

d: width    k: components kept    cov: (d, d), divided by the number of rows, is U diag(l) U' with variances l
and principal axes U. A transform is x -> (x - mean) @ matrix, so that its rows have the covariance
matrix' cov matrix. An axis or a channel without variance becomes zero, never infinite.

[1] Su et al., BERT-whitening, arXiv:2103.15316    [2] Kessy et al., Optimal Whitening, arXiv:1512.00809
[3] Mu and Viswanath, All-but-the-Top, ICLR 2018, arXiv:1702.01417
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from whitenedcse.whitening import principal_axes, shrink

RANK = 1e-12  # of the largest variance; all-MiniLM-L6-v2 on STS: three empty axes at 3e-16, then 1.2e-3

Kind = Literal[
    "whitening", "pca", "zca", "pca_cor", "zca_cor", "cholesky", "standardise", "centre", "abtt", "prefix"
]
Array = NDArray[np.float64]

ORDERED = ("whitening", "pca", "pca_cor", "prefix")  # kinds of whose components the first k can be kept
POWERED = ("whitening", "zca", "pca_cor", "zca_cor")  # kinds that raise variances to a power
SHRUNK = (*POWERED, "cholesky")
SCALED = ("standardise", "pca_cor", "zca_cor")  # kinds that first divide each channel by its deviation


class Spectrum(NamedTuple):
    """A covariance as variances (d,), largest first, and principal axes (d, d), as columns.

    >>> Spectrum.of(np.diag([1.0, 4.0])).variances
    array([4., 1.])
    """

    variances: Array
    axes: Array

    @classmethod
    def of(cls, cov: Array) -> Self:
        """The spectrum of a covariance, (d, d)."""
        variances, axes = principal_axes(torch.from_numpy(cov))
        return cls(variances.numpy(), axes.numpy())

    def shrunk(self, amount: float) -> Self:
        """That of the covariance pulled towards a sphere, by `whitening.shrink`, which keeps the axes."""
        return self._replace(
            variances=shrink(torch.diag(torch.from_numpy(self.variances)), amount).diagonal().numpy()
        )


def numbers(x: ArrayLike) -> NDArray[Any]:
    """Rows as an array, unchanged if they are one. Raises TypeError for texts and all else that is no number.

    >>> numbers([[1, 2]]).shape
    (1, 2)
    """
    x = np.asarray(x)
    if x.dtype.kind not in "fiub":
        raise TypeError(
            f"rows of numbers are expected, not {x.dtype}: encode texts first, e.g. by Embedder.encode"
        )
    return x


def divisors(variances: Array, power: float) -> Array:
    """variances ** power, (d,), but infinity for those up to RANK of the largest: divided by it, all is zero.

    >>> divisors(np.array([4.0, 1e-16]), 0.5)
    array([ 2., inf])
    """
    kept = variances > RANK * variances.max()
    return np.where(kept, np.where(kept, variances, 1) ** power, np.inf)


def whitening(spectrum: Spectrum, power: float = 0.5) -> Array:
    """U diag(l ** -power): the covariance becomes diag(l ** (1 - 2 power)); 1/2 whitens, 0 only rotates [1].

    >>> whitening(Spectrum.of(np.diag([1.0, 4.0]))).tolist()
    [[0.0, 1.0], [0.5, 0.0]]
    """
    return spectrum.axes / divisors(spectrum.variances, power)


def zca(spectrum: Spectrum, power: float = 0.5) -> Array:
    """cov ** -power = U diag(l ** -power) U': the covariance becomes cov ** (1 - 2 power) [2].

    1/2 whitens, and moves points least of all matrices that do; 0 changes nothing.

    >>> zca(Spectrum.of(np.diag([1.0, 4.0])), 1.0).tolist()  # the inverse
    [[1.0, 0.0], [0.0, 0.25]]
    """
    return whitening(spectrum, power) @ spectrum.axes.T


def cholesky(spectrum: Spectrum) -> Array:
    """L, lower triangular with a diagonal that is not negative, and L L' = cov ** -1: it whitens [2].

    Where cov has no inverse it is the pseudo-inverse, and a column of L is zero where its row of the
    pseudo-inverse depends on those above it. Found by Gram-Schmidt on the rows of `whitening`, whose inner
    products are those of L: of their condition, the root of that of cov.

    >>> cholesky(Spectrum.of(np.diag([1.0, 4.0]))).tolist()
    [[1.0, 0.0], [0.0, 0.5]]
    """
    white = whitening(spectrum)
    basis, least = np.zeros_like(white), RANK**0.75 * np.linalg.norm(white, axis=1).max()
    for j, row in enumerate(white):  # of full rank, no `rest` is shorter than RANK ** 0.5 of the longest row
        rest = row
        for _ in range(2):  # the second time for the rounding errors of the first
            rest = rest - (basis[:j] @ rest) @ basis[:j]
        if (length := np.linalg.norm(rest)) > least:
            basis[j] = rest / length
    return np.tril(white @ basis.T)


def without_top(spectrum: Spectrum, top: int | None = None) -> Array:
    """I - U1 U1' with the `top` first axes U1 [3]; None is d // 100, at least 1.

    Raises ValueError for a number outside 1 to d - 1.

    >>> without_top(Spectrum.of(np.diag([1.0, 4.0]))).tolist()
    [[1.0, 0.0], [0.0, 0.0]]
    """
    d = len(spectrum.axes)
    top = max(1, d // 100) if top is None else top
    if not 1 <= top < d:
        raise ValueError(f"top={top} axes of {d}: 1 to {d - 1} can be removed")
    removed = (spectrum.axes * np.isfinite(divisors(spectrum.variances, 1)))[:, :top]
    return np.eye(d) - removed @ removed.T


def solved(
    kind: Kind, cov: Array, *, shrinkage: float = 0.0, power: float = 0.5, top: int | None = None
) -> tuple[Array, Array]:
    """The matrix (d, d) of a kind of `Postprocess`, and the variances (d,) that belong to it.

    These are before shrinkage: of the channels for kinds of SCALED, of the principal axes for all others. The
    matrix of SCALED is V ** -1/2 times that of the correlations V ** -1/2 cov V ** -1/2, V = diag(cov) [2].

    >>> solved("standardise", np.array([[4.0, 1.0], [1.0, 9.0]]))[0].round(3).tolist()
    [[0.5, 0.0], [0.0, 0.333]]
    """
    own = np.diagonal(cov).copy()
    scale = divisors(own, 0.5) if kind in SCALED else np.ones(len(cov))
    spectrum = Spectrum.of(cov / scale / scale[:, None])
    shrunk = spectrum.shrunk(shrinkage)
    matrices: dict[str, Callable[[], Array]] = {
        "whitening": lambda: whitening(shrunk, power),
        "pca": lambda: spectrum.axes,
        "zca": lambda: zca(shrunk, power),
        "pca_cor": lambda: whitening(shrunk, power),
        "zca_cor": lambda: zca(shrunk, power),
        "cholesky": lambda: cholesky(shrunk),
        "abtt": lambda: without_top(spectrum, top),
    }
    matrix = matrices[kind]() if kind in matrices else np.eye(len(cov))
    return matrix / scale[:, None], own if kind in SCALED else spectrum.variances


def most(kind: Kind, n: int, d: int, shrinkage: float) -> int:
    """How many components of a transform fitted to n rows can vary: n - 1; all d where no axes are fitted.

    With shrinkage they are all d, too: it gives each a variance.

    >>> most("whitening", 300, 384, 0.0), most("whitening", 300, 384, 0.1), most("standardise", 300, 384, 0.0)
    (299, 384, 384)
    """
    return min(n - 1, d) if kind in ("pca", *SHRUNK) and not shrinkage else d


def refuse_beyond(k: int, most: int) -> None:
    """Raise ValueError for k components where at most so many can vary.

    >>> refuse_beyond(k=299, most=299)
    """
    if k > most:
        raise ValueError(
            f"{k} components, but only {most} can vary: the transform is fitted to {most + 1} texts; keep "
            f"{most} or fewer, or fit it to more texts (evaluate.py and Postprocess: or with shrinkage)"
        )


def inverse(kind: Kind, matrix: Array, variances: Array, power: float = 0.5) -> Array:
    """What undoes a matrix (d, k) of `solved`, (k, d), for rows of the fitted ones' span if k is their rank.

    >>> inverse("standardise", np.diag([0.5, 0.0]), np.array([4.0, 0.0])).tolist()
    [[2.0, 0.0], [0.0, 0.0]]
    """
    scale = divisors(variances, 0.5) if kind in SCALED else np.ones(len(matrix))
    scale = np.where(np.isfinite(scale), scale, 0)
    rest = matrix * scale[:, None]
    cut = RANK**power / 10  # it spreads over that power of the variances; 0 is 1e-16 of its largest
    if kind in ("zca", "zca_cor", "cholesky"):
        return np.linalg.pinv(rest, rcond=cut, hermitian=kind != "cholesky") * scale
    squares = np.square(rest).sum(axis=0)  # columns are orthogonal, and zero where dropped
    return (rest / np.where(squares > cut**2 * squares.max(), squares, np.inf)).T * scale

"""Maps fitted on frozen embeddings.

n: sentences    d: width    k: components kept    [1] Su et al., BERT-whitening, arXiv:2103.15316
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from whitenedcse.whitening import covariance, principal_axes

RANK = 1e-12  # of the largest variance; all-MiniLM-L6-v2 on STS: three empty axes at 3e-16, then 1.2e-3


class Whitening(NamedTuple):
    """x -> (x - mean) @ matrix, which has zero mean and identity covariance on what it was fitted to [1].

    mean: (d,), matrix: (d, d), float64, its columns in order of variance, largest first.
    """

    mean: NDArray[np.float64]
    matrix: NDArray[np.float64]

    @classmethod
    def fit(cls, x: NDArray[Any]) -> Whitening:
        """The map of (n, d): U diag(1 / sqrt(lambda)) of the covariance divided by n, section 3.2 of [1].

        A direction without variance, as any beyond the n - 1st, becomes a column of zeros and adds nothing.
        """
        if x.ndim != 2 or len(x) < 2:
            raise ValueError(f"whitening is fitted to two rows or more, not to an array of {x.shape}")
        x = np.asarray(x, np.float64)
        if not np.isfinite(x).all():
            raise ValueError(f"whitening met NaN or infinity in row {np.argmin(np.isfinite(x).all(axis=1))}")
        first, x = x[0], x - x[0]  # equal rows become exact zeros, which a rounded mean would not grant
        variances, axes = (t.numpy() for t in principal_axes(covariance(torch.from_numpy(x))))
        kept = variances > RANK * variances[0]
        return cls(first + x.mean(axis=0), np.where(kept, axes / np.sqrt(np.where(kept, variances, 1)), 0))

    def transform(self, x: NDArray[Any], k: int | None = None) -> NDArray[np.float64]:
        """(n, d) -> (n, k): the k components of most variance, all d by default; section 3.3 of [1]."""
        d = len(self.mean)
        if x.shape[-1] != d or not (k is None or 1 <= k <= d):
            raise ValueError(f"k={k} components of {x.shape[-1]}-wide rows, by a map fitted to width {d}")
        return (np.asarray(x, np.float64) - self.mean) @ self.matrix[:, :k]


def ladder(d: int) -> list[int]:
    """The widths worth measuring: d, and those of 256, 128, 64 and 32 below it."""
    return [d, *(k for k in (256, 128, 64, 32) if k < d)]

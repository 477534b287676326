"""Whitening and other transforms that are fitted to frozen embeddings.

n: sentences    d: width    k: components kept

A transform is x -> (x - mean) @ matrix, and its matrix a function of the covariance of the rows that it is
fitted to. An axis or a channel without variance becomes zero, never infinite.

[1] Su et al., BERT-whitening, arXiv:2103.15316    [2] Kessy et al., Optimal Whitening, arXiv:1512.00809
[3] Mu and Viswanath, All-but-the-Top, ICLR 2018, arXiv:1702.01417
[4] Kusupati et al., Matryoshka Representation Learning, arXiv:2205.13147
[5] Diera et al., Isotropy Matters: Soft-ZCA Whitening, arXiv:2411.17538
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, get_args

import numpy as np
import torch
from numpy.typing import ArrayLike
from safetensors.numpy import load_file, save

from whitenedcse.data.remote import fetched, published
from whitenedcse.files import checksum, metadata, parsing, writing
from whitenedcse.whitening import Array, Moments, check_finite, principal_axes

Kind = Literal["whitening", "pca", "zca", "standardise", "centre", "abtt", "prefix"]
ORDERED = ("whitening", "pca", "prefix")  # kinds of whose components the first k can be kept
POWERED = ("whitening", "zca")  # kinds that whiten, by a power of the variances
LIMITED = (  # settings that are for some kinds alone: what they are where they are not given, and these kinds
    ("k", None, ORDERED),
    ("shrinkage", 0, POWERED),
    ("power", 0.5, POWERED),
    ("top", None, ("abtt",)),
)
RANK = 1e-12  # of the largest variance; all-MiniLM-L6-v2 on STS: three empty axes at 3e-16, then 1.2e-3
CURE = "copy it again, or make it with whitenedcse whiten fit"


class Fitted(NamedTuple):
    """A fitted transform in float64: mean (d,), matrix (d, d), variances (d,) of the rows, largest first.

    For standardise the variances are those of the channels.
    """

    mean: Array
    matrix: Array
    variances: Array


@dataclass(eq=False)
class Postprocess:
    """The transform x -> (x - mean) @ matrix, fitted to rows (n, d) at once or in pieces, in float64.

    kind: which matrix. U diag(l) U' is the covariance of the rows, divided by n, and p is `power`.
        "whitening": U diag(l ** -p), with columns by decreasing variance; [1], Algorithm 1 (whitening-k).
        "zca": U diag(l ** -p) U'; with p = 1/2 it moves the rows less than any other whitening does [2].
        "pca": U, only the rotation.
        "standardise": V ** -1/2, with V the variances of the channels, which all become 1.
        "centre": I.    "abtt": I without the first `top` axes [3], here projected out of x - mean.
        "prefix": I with a mean of 0, so that k keeps the first k channels unchanged (Matryoshka [4]).
    k: the number of components that `transform` keeps by default, None for all; only for whitening, pca and
        prefix, whose components have an order.
    shrinkage: s, from 0 to below 1, for few rows and only for the kinds that whiten. Each l becomes
        (1 - s) l + s m, where m is the mean variance. Soft-ZCA [5], which takes l + eps, is zca with
        s = eps / (eps + m), except that its vectors are all (1 - s) ** 1/2 times as long.
    top: the number of axes that abtt removes; None for d // 100, at least 1, the rule of thumb of [3].
    power: p, from 0 to 1, for whitening and zca. Variances l become l ** (1 - 2 p), and zca keeps the axes.
        1/2 whitens, and a smaller p whitens in part. With 0, whitening centres and rotates, zca only centres.

    Kinds that divide by variances set an axis or a channel without variance (at most 1e-12 of the largest),
    such as every axis beyond the first n - 1, to zero instead of scaling it to infinity.

    >>> x = np.array([[0.0, 0.0], [2.0, 0.0], [0.0, 4.0], [2.0, 4.0]])  # variances 1 and 4
    >>> Postprocess("whitening", k=1).fit(x).transform(x).round(6).tolist()  # the axis of variance 4, scaled
    [[-1.0], [-1.0], [1.0], [1.0]]
    >>> y = Postprocess("zca").fit(x).transform(x)
    >>> bool(np.allclose(y.T @ y / len(y), np.eye(2)))  # the covariance is the identity
    True
    """

    kind: Kind
    k: int | None = None
    shrinkage: float = 0.0
    top: int | None = None
    power: float = 0.5
    provenance: dict[str, Any] = field(default_factory=dict, init=False, repr=False)
    moments: Moments | None = field(default=None, init=False, repr=False)
    _fitted: Fitted | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"kind={self.kind!r} must be one of {', '.join(get_args(Kind))}")
        if not (0 <= self.shrinkage < 1 and 0 <= self.power <= 1):
            raise ValueError(f"shrinkage={self.shrinkage} must lie in [0, 1), power={self.power} in [0, 1]")
        for name, unset, kinds in LIMITED:
            if getattr(self, name) != unset and self.kind not in kinds:
                raise ValueError(f"{name}={getattr(self, name)} is for {', '.join(kinds)}, not {self.kind}")

    def fit(self, x: ArrayLike) -> Self:
        """Fit the transform to rows x: (n, d), n >= 2; rows fitted before are forgotten."""
        self._fitted, self.moments, self.provenance = None, None, {}
        return self.partial_fit(x)

    def partial_fit(self, x: ArrayLike) -> Self:
        """Add rows x: (n, d) to those fitted before; the transform is recomputed when next needed.

        Raises ValueError for a transform that was loaded.
        """
        if self.moments is None and self._fitted is not None:
            raise ValueError("a loaded transform has no moments to add to; fit it again")
        x = np.asarray(x)
        self.moments = (self.moments or Moments(np.atleast_2d(x).shape[-1])).update(x)
        self._fitted = None
        return self

    def transform(self, x: ArrayLike, k: int | None = None) -> Array:
        """The transformed rows: (n, d) -> (n, k), by the first k columns of the matrix; [1], section 3.3.

        Raises ValueError for rows of another width, or k outside 1 to d.
        """
        mean, matrix, _ = self.fitted
        x, d, k = np.asarray(x), len(mean), self.k if k is None else k
        if k is not None and self.kind not in ORDERED:
            names = ", ".join(ORDERED)
            raise ValueError(f"k={k} is for {names}; the components of {self.kind} have no order")
        if x.shape[-1] != d:
            raise ValueError(f"{x.shape[-1]}-wide rows do not fit a {self.kind} that is fitted to width {d}")
        if not (k is None or 1 <= k <= d):
            raise ValueError(f"k={k} components of width {d}: k is 1 to {d}")
        return np.subtract(x, mean, dtype=np.float64) @ matrix[:, :k]

    def save(self, path: str | Path, provenance: Mapping[str, Any] = {}) -> None:
        """Write the transform, its settings and `provenance` to a safetensors file or URL, with a digest."""
        texts = {"settings": json.dumps(self.settings), "provenance": json.dumps(dict(provenance))}
        # `save` would write strided arrays in the wrong order
        arrays = {name: np.ascontiguousarray(array) for name, array in self.fitted._asdict().items()}
        content = save(arrays, texts | {"xxh3": digest(arrays, texts)})
        with published(path, mark="") as out, writing(out) as stream:
            stream.write(content)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """The transform that `save` wrote; no rows can be added to it. ValueError for a damaged file."""
        path = fetched(path)
        with parsing(path, CURE):
            texts, arrays = metadata(path, CURE), load_file(path)
            if texts.pop("xxh3", None) != digest(arrays, texts):
                raise ValueError("its digest differs, or something else wrote it")
            loaded = cls(**json.loads(texts["settings"]))
            loaded.provenance = {**json.loads(texts["provenance"])}
            loaded._fitted = Fitted(**arrays)
        return loaded

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments it was constructed with."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.init}

    @property
    def fitted(self) -> Fitted:
        """Mean, matrix and variances. Raises ValueError if it was fitted to fewer than two rows."""
        if self._fitted is None:
            self._fitted = self._from_moments()
        return self._fitted

    @property
    def mean(self) -> Array:
        """The mean (d,), which is subtracted from each row first."""
        return self.fitted.mean

    @property
    def matrix(self) -> Array:
        """The matrix (d, d), of which `transform` uses the first k columns."""
        return self.fitted.matrix

    @property
    def variances(self) -> Array:
        """The variances (d,) of the rows; see `Fitted`."""
        return self.fitted.variances

    @property
    def most(self) -> int:
        """How many components can vary (`varying`); all of a loaded one that does not know."""
        n = self.moments.n if self.moments else self.provenance.get("texts", len(self.mean) + 1)
        return self.varying(n, len(self.mean))

    def varying(self, n: int, d: int) -> int:
        """How many components can vary if fitted to n rows of width d: n - 1; all where no axes are."""
        return min(n - 1, d) if self.kind in ("pca", *POWERED) and not self.shrinkage else d

    def equal_cosines(self, n: int, d: int) -> bool:
        """Whether it makes all cosines of the n distinct rows of width d that it is fitted to equal.

        Whitening to n - 1 components or more does: the rows become the corners of a regular simplex.
        """
        whole = self.kind in POWERED and self.shrinkage == 0 and self.power == 0.5
        return whole and min(self.k or d, d) >= n - 1

    def _from_moments(self) -> Fitted:
        moments, n = self.moments, self.moments.n if self.moments else 0
        if moments is None:
            raise ValueError(f"this {self.kind} is not fitted yet: first call fit with vectors")
        if n < 2:
            raise ValueError(f"{self.kind} is fitted to two rows or more, not to {n}")
        cov = moments.covariance
        check_finite(cov, lambda row: f"the covariances of channel {row}")
        mean = np.zeros(moments.d) if self.kind == "prefix" else moments.mean
        return Fitted(mean, *self._from_covariance(cov))

    def _from_covariance(self, cov: Array) -> tuple[Array, Array]:
        """The matrix and the variances of `Fitted` from a covariance, (d, d) -> (d, d), (d,)."""
        if self.kind == "standardise":
            own = np.diagonal(cov).copy()
            return np.diag(1 / divisors(own, 0.5)), own
        variances, axes = (x.numpy() for x in principal_axes(torch.from_numpy(cov)))
        matrix = np.eye(len(cov))
        if self.kind == "pca":
            matrix = axes
        elif self.kind == "abtt":
            matrix = without_top(axes * np.isfinite(divisors(variances, 1)), self.top)
        elif self.kind in POWERED:
            s = self.shrinkage
            shrunk = (1 - s) * variances + s * variances.mean() if s else variances
            matrix = axes / divisors(shrunk, self.power)
            matrix = matrix @ axes.T if self.kind == "zca" else matrix
        return matrix, variances


def divisors(variances: Array, power: float) -> Array:
    """variances ** power, (d,), but infinity for those up to RANK of the largest: it divides to zero."""
    kept = variances > RANK * variances.max()
    return np.where(kept, np.where(kept, variances, 1) ** power, np.inf)


def without_top(axes: Array, top: int | None = None) -> Array:
    """I - U1 U1' with the `top` first axes U1 of (d, d) [3]; None is d // 100, at least 1."""
    d = len(axes)
    top = max(1, d // 100) if top is None else top
    if not 1 <= top < d:
        raise ValueError(f"top={top} axes of {d}: 1 to {d - 1} can be removed")
    return np.eye(d) - axes[:, :top] @ axes[:, :top].T


def check_components(k: int, most: int) -> None:
    """Raise ValueError for k components where at most so many can vary."""
    if k > most:
        raise ValueError(
            f"{k} components, but only {most} can vary: the transform is fitted to {most + 1} texts; keep "
            f"{most} or fewer, or fit it to more texts (evaluate.py and Postprocess: or with shrinkage)"
        )


def digest(tensors: dict[str, Array], metadata: dict[str, str]) -> str:
    """The XXH3 digest of what a file of a transform holds."""
    return checksum(save(tensors) + json.dumps(sorted(metadata.items())).encode())


def ladder(d: int) -> list[int]:
    """The numbers of components worth evaluating for width d: d, and of 256, 128, 64 and 32 those below."""
    return [d, *(k for k in (256, 128, 64, 32) if k < d)]

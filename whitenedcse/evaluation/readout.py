"""The best readout of a frozen encoder: which tokens, which layers, which linear map, chosen on scored pairs.

n: sentences, or pairs    r: layers, the embedding layer counted    d: width    m: maps

A candidate is a pooling in a set of layers, x the mean over these, and a map x -> (x - mean) U diag(f) with
the principal axes U and the variances l of x over a corpus. f decides the map: 1 for centring, 0 on the first
axes for all-but-the-top [2], 1 on the first k axes alone for PCA, ((1 - s) l + s mean(l)) ** -p on these for
whitening [1] in its soft forms. ZCA needs no candidate of its own: it is a rotation of the whitening over all
axes, which leaves cosines as they are. All m maps of a set of layers cost three matrix products, because with
a, b the coordinates of a pair on the axes

    cosine = sum_j f_j^2 a_j b_j / sqrt(sum_j f_j^2 a_j^2  sum_j f_j^2 b_j^2)

[1] Su et al., BERT-whitening, arXiv:2103.15316    [2] Mu and Viswanath, All-but-the-Top, arXiv:1702.01417
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from math import comb, nan
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray

from whitenedcse.evaluation.geometry import effective_rank
from whitenedcse.evaluation.layers import spearman_columns
from whitenedcse.evaluation.statistics import resamples, weighted_spearman

SETS = 400  # of layers: all of up to three for 12 layers and the embeddings (377), up to two for 24 (325)
RANK = 1e-6  # of the largest variance, in float32: axes below are empty
FRACTIONS = (1, 0.8, 0.67, 0.5, 0.375, 0.25, 0.1875, 0.125)  # of the width: components that are kept
SHRINKAGES = (0.0, 0.1, 0.3)
FEWEST = 50  # pairs: halves of 25 order readouts hardly better than chance
OTHERS = 10  # pairs with another score than the most frequent one
NEAR = 0.1  # of a score x 100: readouts this near are told apart by luck, and the simpler one is taken
MOST = 2_000  # pairs that choose; more would only take memory, n m float32
SPLITS = 5  # of the pairs into two halves

Planes = Mapping[str, NDArray[np.float32]]  # kind of pooling -> (r, n, d), the pooled vectors of every layer
Floats = NDArray[np.float64]


class Map(NamedTuple):
    """A linear map after pooling: "none", "centre", "abtt" with `top`, "pca" and "whitening" with k axes."""

    kind: str
    k: int | None = None
    shrinkage: float = 0.0
    power: float = 0.5
    top: int | None = None

    def __str__(self) -> str:
        said = [f"k = {self.k}"] * (self.k is not None)
        said += [f"shrinkage {self.shrinkage:g}"] * bool(self.shrinkage)
        said += [f"power {self.power:g}"] * (self.power != 0.5)
        said += [f"top {self.top}"] * (self.top is not None)
        return ", ".join([self.kind, *said])

    @property
    def settings(self) -> dict[str, Any] | None:
        """Those of the same `Postprocess`; None for no map."""
        own = {"centre": {}, "abtt": {"top": self.top}, "pca": {"k": self.k}, "none": None}
        fitted = {"k": self.k, "shrinkage": self.shrinkage, "power": self.power}
        more = own.get(self.kind, fitted)
        return None if more is None else {"kind": self.kind, **more}

    def squares(self, variances: Floats) -> Floats:
        """f ** 2 for the axes of these variances, largest first: (d,) -> (d,)."""
        d = len(variances)
        if self.kind == "abtt":
            return (np.arange(d) >= (self.top or 0)).astype(float)
        if self.kind == "pca":
            return (np.arange(d) < (self.k or d)).astype(float)
        if self.kind != "whitening":
            return np.ones(d)
        shrunk = (1 - self.shrinkage) * variances + self.shrinkage * variances.mean()
        kept = (np.arange(d) < (self.k or d)) & (shrunk > RANK * shrunk.max())
        return np.where(kept, np.where(kept, shrunk, 1.0) ** (-2 * self.power), 0.0)


class Readout(NamedTuple):
    """A kind of pooling, the layers whose pooled vectors are averaged (0: the embeddings), and a map."""

    pooling: str
    layers: tuple[int, ...]
    map: Map

    def __str__(self) -> str:
        layers = " + ".join(map(str, self.layers))
        return f"{self.pooling} of layer{'s' * (len(self.layers) > 1)} {layers}, {self.map}"


def maps(d: int, n: int) -> list[Map]:
    """The maps that are tried for vectors of width d and a corpus of n texts, which gives n - 1 axes."""
    ks = sorted({max(1, round(d * part)) for part in FRACTIONS}, reverse=True)
    forms = [*(("whitening", s, 0.5) for s in SHRINKAGES), ("whitening", 0.0, 0.25), ("pca", 0.0, 0.5)]
    fitted = [Map(kind, k, s, p) for k in ks for kind, s, p in forms if s or k < n]
    tops = sorted({1, 2, 3, max(1, d // 100)})
    return [Map("none"), Map("centre"), *(Map("abtt", top=top) for top in tops if top < d), *fitted]


def layer_sets(r: int) -> list[tuple[int, ...]]:
    """The sets of one to three of r layers, smaller ones first; only of up to two where these exceed SETS."""
    largest = 3 if r + comb(r, 2) + comb(r, 3) <= SETS else 2
    return [layers for size in range(1, largest + 1) for layers in combinations(range(r), size)]


class Moments:
    """Means (r, d) and covariances (r, d, r, d) of all layers of one pooling, over a corpus given in blocks.

    Blocks are centred by the mean of the first one, so that float32 products lose nothing to a large mean.
    """

    def __init__(self) -> None:
        self.n, self.shift = 0, np.zeros((0, 1, 0), np.float32)
        self.sums: Any = 0.0
        self.products: Any = 0.0

    def add(self, x: NDArray[np.float32]) -> Self:
        """Add a block, (r, n, d)."""
        if not self.n:
            self.shift = x.mean(axis=1, keepdims=True)
        flat = np.swapaxes(x - self.shift, 0, 1).reshape(x.shape[1], -1)  # (n, r d)
        self.n += len(flat)
        self.sums = self.sums + flat.sum(axis=0, dtype=np.float64)
        self.products = self.products + flat.T @ flat
        return self

    def of(self, layers: Sequence[int]) -> tuple[Floats, Floats]:
        """Mean (d,) and covariance (d, d), divided by n, of the mean over these layers."""
        r, _, d = self.shift.shape
        means = (self.sums / self.n).reshape(r, d)
        mean = means[list(layers)].mean(axis=0)
        blocks = self.products.reshape(r, d, r, d)
        cov = sum(blocks[i, :, j].astype(np.float64) for i in layers for j in layers)
        cov = cov / (self.n * len(layers) ** 2)
        return mean + self.shift[list(layers), 0].mean(axis=0, dtype=np.float64), cov - np.outer(mean, mean)


class Sample(NamedTuple):
    """The pooled vectors (r, n, d) of a few texts, whose `of` is that of `Moments`."""

    x: NDArray[np.float32]

    def of(self, layers: Sequence[int]) -> tuple[Floats, Floats]:
        """Mean (d,) and covariance (d, d), divided by n, of the mean over these layers."""
        x = self.x[list(layers)].mean(axis=0, dtype=np.float64)
        return x.mean(axis=0), np.cov(x.T, bias=True)


class Spectrum(NamedTuple):
    """Variances (d,), largest first, axes (d, d) as columns, and the mean (d,) of a corpus."""

    variances: Floats
    axes: Floats
    mean: Floats

    @classmethod
    def of(cls, mean: Floats, cov: Floats) -> Self:
        """The spectrum of a covariance, (d, d)."""
        variances, axes = np.linalg.eigh(cov)
        return cls(variances[::-1].clip(0), axes[:, ::-1], mean)

    def facts(self) -> dict[str, float]:
        """What the spectrum says without any label.

        top: the first axis's share of the variance. rank: the effective one. cosine: about that of two texts.
        """
        total, of_mean = float(self.variances.sum()), float(self.mean @ self.mean)
        if total <= 1e-9 * of_mean:  # the first token of the embedding layer varies by rounding alone
            return {"top": nan, "rank": nan, "cosine": 1.0}
        shares = self.variances / total
        rank = float(effective_rank(torch.from_numpy(shares)))
        return {"top": float(shares[0]), "rank": rank, "cosine": of_mean / (of_mean + total)}


def similarities(
    planes: Planes,
    moments: Mapping[str, Any],
    rows: NDArray[np.intp],
    tried: Sequence[Map],
    sets: Sequence[tuple[int, ...]] | None = None,
) -> Iterator[tuple[list[Readout], Floats]]:
    """The cosines of n pairs in every readout, one pooling and set of layers at a time: m readouts, (n, m).

    planes: of the pairs' distinct sentences. moments: `Moments` or a `Sample` of each. rows: (2, n), which
    sentences make a pair. sets: of layers; None for all `layer_sets`. NaN for a zero vector.
    """
    for kind, plane in planes.items():
        for layers in layer_sets(len(plane)) if sets is None else sets:
            x = plane[list(layers)].mean(axis=0)
            spectrum = Spectrum.of(*moments[kind].of(layers))
            y = (x - spectrum.mean.astype(np.float32)) @ spectrum.axes.astype(np.float32)
            found = np.empty((rows.shape[1], len(tried)))
            plain = [map_.kind == "none" for map_ in tried]
            found[:, plain] = _cosines(x, rows, np.ones((x.shape[1], sum(plain))))
            others = [map_.squares(spectrum.variances) for map_ in tried if map_.kind != "none"]
            found[:, ~np.array(plain)] = _cosines(y, rows, np.array(others).reshape(-1, x.shape[1]).T)
            yield [Readout(kind, layers, map_) for map_ in tried], found


def _cosines(x: NDArray[np.float32], rows: NDArray[np.intp], squares: Floats) -> Floats:
    """Cosines of pairs of rows of (n, d) under m diagonal maps: rows (2, p), squares (d, m) -> (p, m)."""
    a, b = x[rows[0]].astype(np.float64), x[rows[1]].astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        return ((a * b) @ squares) / np.sqrt(((a * a) @ squares) * ((b * b) @ squares))


def best_of_few(planes: Planes, texts: Planes, gold: Floats, rows: NDArray[np.intp]) -> tuple[Readout, float]:
    """The best readout of a layer, or of a layer and the last, and its Spearman x 100 on the pairs.

    planes: of the pairs' distinct sentences, of which rows (2, n) make the pairs of these gold scores (n,).
    texts: of those that maps are fitted to. For use while training: seconds, where `choice` takes minutes.
    """
    r, n, d = next(iter(texts.values())).shape
    sets = [(i,) for i in range(r)] + [(i, r - 1) for i in range(r - 1)]
    samples = {kind: Sample(x) for kind, x in texts.items()}
    found: list[tuple[float, Readout]] = []
    for readouts, cosines in similarities(planes, samples, rows, maps(d, n), sets):
        scores = np.nan_to_num(spearman_columns(gold, cosines), nan=-np.inf)
        found.append((float(scores.max()), readouts[int(scores.argmax())]))
    score, best = max(found, key=lambda one: one[0])
    return best, score


class Choice(NamedTuple):
    """What n scored pairs say of m readouts.

    best: the column that all pairs choose. scores: (m,), Spearman x 100 on all pairs. own: that of the
    model's own vectors. gain: by cross-fitting, the mean difference to `own` on pairs that did not choose,
    with its 95 % interval (low, high).
    """

    best: int
    scores: Floats
    own: float
    gain: float
    low: float
    high: float

    @property
    def shown(self) -> bool:
        """Whether the gain is more than chance; else the model is best left as it is."""
        return self.low > 0


def simplest(scores: Floats, sizes: NDArray[np.int64]) -> int:
    """The column of the best readout of the fewest layers within NEAR of the highest score: (m,), (m,)."""
    near = scores >= np.nanmax(scores) - NEAR
    fewest = near & (sizes == sizes[near].min())
    return int(np.flatnonzero(fewest)[np.argmax(scores[fewest])])


def groups(left: Sequence[str], right: Sequence[str]) -> NDArray[np.intp]:
    """The number of each of n pairs, from 0, which equal ones share, whichever text comes first: (n,)."""
    seen: dict[frozenset[str], int] = {}
    pairs = map(frozenset, zip(left, right, strict=True))
    return np.array([seen.setdefault(pair, len(seen)) for pair in pairs], np.intp)


def choice(
    gold: Floats,
    own: Floats,
    found: NDArray[Any],
    sizes: Sequence[int],
    *,
    groups: NDArray[np.intp] | None = None,
    draws: int = 1000,
) -> Choice:
    """Choose a readout on pairs, and say what it brings on pairs that did not choose it.

    gold: (n,) scores, own: (n,) cosines of the model's own vectors, found: (n, m) those of m readouts, sizes:
    (m,) their numbers of layers. groups: (n,) as from `groups`, None where no two pairs are equal. In each of
    SPLITS either half chooses and the other one judges, so that the gain is free of the winner's luck; equal
    pairs stay together. The interval is that of a bootstrap over groups, with the choices held. Raises
    ValueError for fewer than FEWEST different pairs and for scores or cosines that are constant.
    """
    of = np.arange(len(gold)) if groups is None else groups
    check_pairs(gold, of)
    of_layers, n = np.asarray(sizes), int(of.max()) + 1
    scores, plain = spearman_columns(gold, found), spearman_columns(gold, own[:, None])[0]
    if np.isnan(scores).all() or np.isnan(plain):
        raise ValueError("the cosines of all pairs are equal: nothing can be chosen on them")
    rng, counts = np.random.default_rng(0), resamples(n, draws, seed=0)[:, of]
    gains, drawn = [], np.zeros(len(counts))
    for order in (rng.permutation(n) for _ in range(SPLITS)):
        half = np.isin(of, order[: n // 2])
        if not (np.ptp(gold[half]) and np.ptp(gold[~half])):
            continue  # a half of few scores that differ may have none of them
        for fit, test in ((half, ~half), (~half, half)):
            at = simplest(spearman_columns(gold[fit], found[fit]), of_layers)
            both = np.stack([found[test, at], own[test]])
            gains.append(np.subtract(*spearman_columns(gold[test], both.T)))
            drawn += np.subtract(*(weighted_spearman(gold[test], x, counts[:, test]) for x in both))
    low, high = np.nanquantile(drawn / len(gains), [0.025, 0.975])
    return Choice(
        simplest(scores, of_layers), scores, float(plain), float(np.mean(gains)), float(low), float(high)
    )


def check_pairs(gold: Floats, groups: NDArray[np.intp]) -> None:
    """Raise ValueError for fewer than FEWEST different pairs, or for scores that are nearly all equal."""
    if (n := len(np.unique(groups))) < FEWEST:
        raise ValueError(f"{n} pairs are too few to choose a readout: give {FEWEST} or more, better 200")
    values, counts = np.unique(gold, return_counts=True)
    most = values[counts.argmax()]
    if (others := len(np.unique(groups[gold != most]))) < OTHERS:
        said = f"{counts.max()} of {len(gold)} pairs have the score {most:g}"
        raise ValueError(f"{said}: {others} others cannot choose a readout, {OTHERS} or more may")

"""How far a score would move on other test pairs or with another seed; what difference is more than chance.

n: test pairs, or rows    g: groups of equal values

Scores of one test set drawn with the same seed share their resamples, so that differences are paired. An
estimate varies from several sources, such as seeds and test pairs, each with its own degrees of freedom. The
half widths of the sources' t intervals are added in squares: such an interval covers in at least 95 % of
cases, whatever the true variances are (Banerjee, Sankhya 22 (1960)), because the chance that a squared normal
stays below x is concave in x.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, special

from whitenedcse.evaluation.scores import varies

ALPHA = 0.05
SMALLEST = math.log(1e-100)  # a p below this is 0
CONSTANT = 1e-6  # values whose half width is below this differ by rounding alone
UNDEFINED = 0.05  # the share of undefined draws that an interval bears
CHUNK = 2**16  # counts at a time: 4,927 x 1,000 take 37 ms, 41 ms at 2**14 and 126 ms at 2**18

Draws = NDArray[np.float64]


class Comparison(NamedTuple):
    """A difference of scores, its 95 % interval, and the two-sided p of none; p is None if nothing varies."""

    difference: float
    low: float
    high: float
    p: float | None


def resamples(n: int, draws: int, seed: int) -> NDArray[np.int32]:
    """How often each of n pairs is drawn when n are drawn with replacement: (draws, n) int32, rows sum to n.

    The stream depends on seed and n alone, and a larger number of draws starts with the same ones.
    """
    if n < 1 or draws < 1:
        raise ValueError(f"{draws} draws from {n} pairs: both must be at least 1")
    rng = np.random.default_rng([seed, n])
    counts = np.empty((draws, n), np.int32)
    for row in counts:
        row[:] = np.bincount(rng.integers(n, size=n), minlength=n)
    return counts


def weighted_spearman(gold: NDArray[Any], similarity: NDArray[Any], counts: NDArray[Any]) -> Draws:
    """Spearman's correlation x 100 of each draw, pair i taken counts[:, i] times.

    gold: (n,), similarity: (n,), counts: (draws, n) -> (draws,). NaN where a draw is constant. The sums are
    exact integers, for up to 2 million pairs (n cubed is below 2**63).
    """
    if not (varies(gold) and varies(similarity)):
        return np.full(len(counts), np.nan)
    groups, step = (_groups(gold), _groups(similarity)), max(1, CHUNK // len(gold))
    starts = range(0, len(counts), step)
    return np.concatenate([_spearman(counts[i : i + step], *groups) for i in starts])


class _Groups(NamedTuple):
    """Groups of equal values: `order` sorts the pairs, groups start at `starts` in it; `of`: of each pair."""

    order: NDArray[np.intp]
    starts: NDArray[np.intp]
    of: NDArray[np.intp]


def _groups(values: NDArray[Any]) -> _Groups:
    _, of, sizes = np.unique(values, return_inverse=True, return_counts=True)
    return _Groups(of.argsort(kind="stable"), sizes.cumsum() - sizes, of)


def _spearman(counts: NDArray[Any], gold: _Groups, similarity: _Groups) -> Draws:
    (a, aa), (b, bb) = (_centred_ranks(counts, groups) for groups in (gold, similarity))
    ab = np.einsum("bn,bn,bn->b", counts, a, b)
    with np.errstate(divide="ignore", invalid="ignore"):
        return 300.0 * ab / np.sqrt(aa.astype(np.float64) * bb)


def _centred_ranks(counts: NDArray[Any], groups: _Groups) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Twice each pair's mean rank less the average, and three times the sum of its squares over the draw.

    A group of m that ends at place c has 2c - m - n; the squares sum to (n^3 - sum of m^3) / 3.
    """
    m = np.add.reduceat(counts.take(groups.order, axis=1), groups.starts, axis=1, dtype=np.int64)  # (b, g)
    c = m.cumsum(axis=1)
    n = c[:, -1:]
    return (2 * c - m - n).take(groups.of, axis=1), n[:, 0] ** 3 - np.einsum("bg,bg,bg->b", m, m, m)


def task_draws(
    gold: NDArray[Any], similarity: NDArray[Any], sizes: Sequence[int], draws: int, seed: int
) -> dict[str, Draws]:
    """Bootstrap draws of a task made of consecutive subsets, all from one resampling of its n pairs.

    gold: (n,), similarity: (n,), sizes: of the subsets -> (draws,) for each of "all" (pooled pairs), "mean"
    and "wmean" over subsets, and each subset by its position, "0", "1" and so on. A subset's share of the
    pairs varies between draws, its weight in "wmean" is its size.
    """
    counts, ends = resamples(len(gold), draws, seed), np.cumsum(sizes)
    slices = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    parts = np.stack([weighted_spearman(gold[s], similarity[s], counts[:, s]) for s in slices])
    whole = parts[0] if len(parts) == 1 else weighted_spearman(gold, similarity, counts)
    means = {"mean": parts.mean(axis=0), "wmean": np.average(parts, axis=0, weights=sizes)}
    return {"all": whole, **means, **{str(i): part for i, part in enumerate(parts)}}


def accuracy_draws(correct: NDArray[np.bool_], draws: int, seed: int) -> Draws:
    """Accuracy x 100 of each resample of the tested rows: (n,) bool -> (draws,)."""
    return 100 * (resamples(len(correct), draws, seed) @ correct) / len(correct)


def average_draws(tasks: Mapping[str, Draws]) -> Draws:
    """Draws of the average over tasks: (draws,) for each task -> (draws,). NaN where any task has NaN."""
    return np.stack([*tasks.values()]).mean(axis=0)


def interval(draws: Draws) -> tuple[float, float] | None:
    """The 95 % percentile interval of the draws: (draws,) -> (low, high); None if over 5 % are NaN."""
    undefined = np.isnan(draws)
    if undefined.mean() > UNDEFINED:
        return None
    low, high = np.quantile(draws[~undefined], [0.025, 0.975])
    return float(low), float(high)


def paired(draws_a: Draws, draws_b: Draws, difference: float) -> Comparison | None:
    """The observed difference of a and b, its 95 % interval on the same resamples and p; None as `interval`.

    The smallest p is 2 / (draws + 1).
    """
    apart = draws_a - draws_b
    bounds, draws = interval(apart), apart[~np.isnan(apart)]
    if bounds is None:
        return None
    tail = min(np.count_nonzero(draws <= 0), np.count_nonzero(draws >= 0))
    return Comparison(difference, *bounds, p=min(1.0, 2 * (1 + tail) / (len(draws) + 1)))


class Source(NamedTuple):
    """A variance of an estimate and the degrees of freedom it was estimated with, infinite if known."""

    variance: float
    df: float


def of_mean(values: Sequence[float] | NDArray[Any]) -> Source:
    """The variance of the mean of n >= 2 independent values, with n - 1 degrees of freedom."""
    if len(values) < 2:
        raise ValueError(f"{len(values)} values: a variance needs at least 2")
    return Source(float(np.var(values, ddof=1)) / len(values), len(values) - 1)


def of_difference(a: Sequence[float], b: Sequence[float], *, paired: bool) -> list[Source]:
    """The variances of the difference of two groups' means: of paired values, or of each group by itself.

    A group of one value is taken to vary as the other does.
    """
    if paired:
        return [of_mean(np.subtract(a, b))]
    if min(len(a), len(b)) > 1:
        return [of_mean(a), of_mean(b)]
    several = of_mean(a if len(a) > len(b) else b)
    return [several._replace(variance=several.variance * (1 + max(len(a), len(b))))]


def of_draws(draws: Draws) -> Source | None:
    """The variance over test pairs by the bootstrap; None where too many draws are undefined."""
    return None if interval(draws) is None else Source(float(np.nanvar(draws)), math.inf)


def half_width(sources: Sequence[Source], alpha: float = ALPHA) -> float:
    """Half the width of the interval that covers in at least 1 - alpha of cases; 95 % unless told."""
    return math.sqrt(sum(s.variance * quantile(alpha / 2, s.df) ** 2 for s in sources))


def quantile(share: float, df: float) -> float:
    """The value that a share of Student's t with these degrees of freedom, or of the normal, is below."""
    return float(special.ndtri(share) if math.isinf(df) else special.stdtrit(df, share))


def tested(difference: float, sources: Sequence[Source]) -> Comparison:
    """The difference with its 95 % interval and two-sided p: the alpha at which the interval ends at zero.

    With one source this is the t test. p is None where no source varies.
    """
    half = half_width(sources)

    def beyond(log: float) -> float:
        return half_width(sources, alpha=math.exp(log)) - abs(difference)

    p = None
    if half > CONSTANT:
        p = math.exp(optimize.brentq(beyond, SMALLEST, 0.0, xtol=1e-13)) if beyond(SMALLEST) > 0 else 0.0
    return Comparison(difference, difference - half, difference + half, p)


def holm(p: Sequence[float]) -> list[float]:
    """The p-values corrected for their number, in the given order (Holm, Scand. J. Statist. 6 (1979))."""
    order = np.argsort(p, kind="stable")
    scaled = np.asarray(p)[order] * np.arange(len(p), 0, -1)
    corrected = np.empty(len(p))
    corrected[order] = np.minimum(np.maximum.accumulate(scaled), 1)
    return corrected.tolist()

"""How far a score would move on other test pairs or with another seed: bootstrap draws and intervals.

Scores of one test set drawn with the same seed share their resamples, so that differences are paired.
n: test pairs, or rows    g: groups of equal values
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

ROUNDING = 1e-12  # values that spread less than this are constant, as they are to correlation.spearman
UNDEFINED = 0.05  # the share of undefined draws that an interval bears
CHUNK = 2**16  # counts at a time: 4,927 x 1,000 take 37 ms, 41 ms at 2**14 and 126 ms at 2**18

Draws = NDArray[np.float64]


class Comparison(NamedTuple):
    """What separates two checkpoints: the difference, its interval, and the two-sided p of no difference."""

    difference: float
    low: float
    high: float
    p: float


class Spread(NamedTuple):
    """Mean and standard deviation (n - 1) over n seeds; one seed has no deviation."""

    mean: float
    sd: float | None
    n: int


def resamples(n: int, draws: int, seed: int) -> NDArray[np.int32]:
    """How often each of n pairs is drawn when n are drawn with replacement: -> (draws, n), rows sum to n.

    The stream depends on seed and n alone; more draws begin with the same ones.
    """
    if n < 1 or draws < 1:
        raise ValueError(f"{draws} draws from {n} pairs: both must be at least 1")
    rng = np.random.default_rng([seed, n])
    counts = np.empty((draws, n), np.int32)
    for row in counts:
        row[:] = np.bincount(rng.integers(n, size=n), minlength=n)
    return counts


def weighted_spearman(gold: NDArray[Any], similarity: NDArray[Any], counts: NDArray[Any]) -> Draws:
    """Spearman's correlation x 100 with pair i taken counts[:, i] times: (n,), (n,), (draws, n) -> (draws,).

    NaN where a draw is constant, and in all draws where `correlation.spearman` is undefined. Its sums are
    integers and exact; they hold 2 million pairs a draw (cubed, below 2**63).
    """
    if not len(gold) == len(similarity) == counts.shape[1] > 0:
        raise ValueError(f"{len(gold)} scores, {len(similarity)} similarities, counts of {counts.shape[1]}")
    if not (_varies(gold) and _varies(similarity)):
        return np.full(len(counts), np.nan)
    groups, step = (_groups(gold), _groups(similarity)), max(1, CHUNK // len(gold))
    starts = range(0, len(counts), step)
    return np.concatenate([_spearman(counts[i : i + step], *groups) for i in starts])


class _Groups(NamedTuple):
    """Pairs in `order` of their values, each group of ties beginning at one of `starts`; `of` pair i."""

    order: NDArray[np.intp]
    starts: NDArray[np.intp]
    of: NDArray[np.intp]


def _varies(values: NDArray[Any]) -> bool:
    return bool(np.isfinite(values).all() and np.ptp(values) > ROUNDING * np.abs(values).max())


def _groups(values: NDArray[Any]) -> _Groups:
    _, of, sizes = np.unique(values, return_inverse=True, return_counts=True)
    return _Groups(of.argsort(kind="stable"), sizes.cumsum() - sizes, of)


def _spearman(counts: NDArray[Any], gold: _Groups, similarity: _Groups) -> Draws:
    (a, aa), (b, bb) = (_centred_ranks(counts, groups) for groups in (gold, similarity))
    ab = np.einsum("bn,bn,bn->b", counts, a, b)
    with np.errstate(divide="ignore", invalid="ignore"):
        return 300.0 * ab / np.sqrt(aa.astype(np.float64) * bb)


def _centred_ranks(counts: NDArray[Any], groups: _Groups) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Twice each pair's mid-rank less its mean, and three times the sum of its squares over the draw.

    A group of m that ends at place c has 2c - m - n; the squares sum to (n^3 - sum of m^3) / 3.
    """
    m = np.add.reduceat(counts.take(groups.order, axis=1), groups.starts, axis=1, dtype=np.int64)  # (b, g)
    c = m.cumsum(axis=1)
    n = c[:, -1:]
    return (2 * c - m - n).take(groups.of, axis=1), n[:, 0] ** 3 - np.einsum("bg,bg,bg->b", m, m, m)


def task_draws(
    gold: NDArray[Any], similarity: NDArray[Any], sizes: Sequence[int], draws: int, seed: int
) -> dict[str, Draws]:
    """Draws of a task of consecutive subsets: "all", "mean", "wmean", and each subset by position, "0" on.

    (n,), (n,) -> (draws,) each, all from one resampling of the n pairs: a subset's share varies from draw to
    draw, its weight in "wmean" is its size.
    """
    if min(sizes, default=0) < 1 or sum(sizes) != len(gold):
        raise ValueError(f"subsets of {list(sizes)} pairs do not make up {len(gold)} pairs")
    counts, ends = resamples(len(gold), draws, seed), np.cumsum(sizes)
    slices = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    parts = np.stack([weighted_spearman(gold[s], similarity[s], counts[:, s]) for s in slices])
    whole = parts[0] if len(parts) == 1 else weighted_spearman(gold, similarity, counts)
    means = {"mean": parts.mean(axis=0), "wmean": np.average(parts, axis=0, weights=sizes)}
    return {"all": whole, **means, **{str(i): part for i, part in enumerate(parts)}}


def accuracy_draws(correct: NDArray[np.bool_], draws: int, seed: int) -> Draws:
    """Accuracy x 100 of each resample of the tested rows: (n,) -> (draws,)."""
    return 100 * (resamples(len(correct), draws, seed) @ correct) / len(correct)


def average_draws(tasks: Mapping[str, Draws]) -> Draws:
    """Draws of the average over tasks: (draws,) each -> (draws,).

    Tasks vary independently if their n or their seeds differ. Undefined where any task is.
    """
    return _table(tasks.values()).mean(axis=0)


def group_draws(runs: Sequence[Draws], seed: int) -> Draws:
    """Draws of the mean of r runs that differ in their seed: (draws,) each -> (draws,).

    Each draw takes r of the runs with replacement and averages them. Over few runs the spread between them
    comes out narrow, its variance (r - 1) / r of the true one. Groups of equal r and seed take equal places.
    """
    table = _table(runs)
    picks = np.random.default_rng([seed, len(table)]).integers(len(table), size=table.shape)
    return np.take_along_axis(table, picks, axis=0).mean(axis=0)


def _table(rows: Iterable[Draws]) -> Draws:
    table = list(rows)
    lengths = sorted({len(row) for row in table})
    if len(lengths) != 1:
        raise ValueError(f"paired draws must be equal in number, not {lengths}")
    return np.stack(table)


def interval(draws: Draws, level: float = 0.95) -> tuple[float, float] | None:
    """The percentile interval: (draws,) -> (low, high); None if more than 5 % of the draws are undefined."""
    if not 0 < level < 1:
        raise ValueError(f"level={level} is not between 0 and 1")
    undefined = np.isnan(draws)
    if undefined.mean() > UNDEFINED:
        return None
    low, high = np.quantile(draws[~undefined], [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def paired(draws_a: Draws, draws_b: Draws, difference: float | None = None) -> Comparison | None:
    """a less b on the same resamples, with a 95 % interval: (draws,), (draws,) -> Comparison.

    `difference` is the observed one, or the median of the draws. None as in `interval`.
    The smallest p is 2 / (draws + 1).
    """
    a, b = _table([draws_a, draws_b])
    bounds, draws = interval(a - b), (a - b)[~np.isnan(a - b)]
    if bounds is None:
        return None
    tail = min(np.count_nonzero(draws <= 0), np.count_nonzero(draws >= 0))
    given = float(np.median(draws)) if difference is None else difference
    return Comparison(given, *bounds, p=min(1.0, 2 * (1 + tail) / (len(draws) + 1)))


def over_seeds(values: Sequence[float]) -> Spread:
    """What runs that differ in their seed have in common, and how far they lie apart."""
    if not len(values):
        raise ValueError("no values: a mean over seeds needs at least one run")
    return Spread(
        float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else None, len(values)
    )


def decimals(half_width: float | None) -> int:
    """How many decimals, 0 to 2, an interval supports: the last digit printed is one that it leaves open.

    That is the half width's first digit, or the second if the first is 1. 2 without an interval.
    """
    return 2 if half_width is None or half_width < 0.2 else int(half_width < 2)


def shown(value: float | None, low: float | None, high: float | None, digits: int | None = None) -> str:
    """A value in as many decimals as its interval supports, or in `digits`; a dash for None."""
    if value is None:
        return "-"
    return f"{value:z.{decimals(_half_width(low, high)) if digits is None else digits}f}"


def with_interval(
    value: float | None, low: float | None, high: float | None, digits: int | None = None
) -> str:
    """The same with half the interval's width, "74.3 ±1.2", where there is one."""
    half, text = _half_width(low, high), shown(value, low, high, digits)
    return text if None in (value, half) else f"{text} ±{shown(half, low, high, digits)}"


def _half_width(low: float | None, high: float | None) -> float | None:
    return None if low is None or high is None else (high - low) / 2

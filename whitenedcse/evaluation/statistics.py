"""How far a score would move on other test pairs or with another seed: bootstrap draws and intervals.

Scores of one test set drawn with the same seed share their resamples, so that differences are paired.
n: test pairs, or rows    g: groups of equal values
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

ROUNDING = 1e-12  # values that spread less than this are constant, as they are to sts.spearman
UNDEFINED = 0.05  # the share of undefined draws that an interval bears
CHUNK = 2**16  # counts at a time: 4,927 x 1,000 take 37 ms, 41 ms at 2**14 and 126 ms at 2**18

Draws = NDArray[np.float64]


class Comparison(NamedTuple):
    """A difference of scores, its 95 % interval, and the two-sided p of none; p is None if nothing varies.

    >>> Comparison(difference=1.5, low=0.4, high=2.6, p=0.008).low > 0  # the interval excludes 0
    True
    """

    difference: float
    low: float
    high: float
    p: float | None


class Spread(NamedTuple):
    """Mean and standard deviation (divided by n - 1) of scores over n seeds; sd is None for one seed.

    >>> Spread(mean=76.0, sd=1.0, n=3)
    Spread(mean=76.0, sd=1.0, n=3)
    """

    mean: float
    sd: float | None
    n: int


def resamples(n: int, draws: int, seed: int) -> NDArray[np.int32]:
    """How often each of n pairs is drawn when n are drawn with replacement: (draws, n) int32, rows sum to n.

    The stream depends on seed and n alone, and a larger number of draws starts with the same ones. Raises
    ValueError unless both n and draws are at least 1.

    >>> resamples(4, draws=3, seed=0).sum(axis=1).tolist()
    [4, 4, 4]
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

    gold: (n,), similarity: (n,), counts: (draws, n) -> (draws,). NaN where a draw is constant, and in all
    draws where `sts.spearman` is undefined. Raises ValueError for lengths that differ. The sums are exact
    integers, for up to 2 million pairs (n cubed is below 2**63).

    >>> gold, counts = np.array([1.0, 2.0, 3.0]), np.array([[1, 1, 1], [1, 1, 0]])
    >>> weighted_spearman(gold, np.array([0.1, 0.9, 0.5]), counts).tolist()  # all three pairs; the first two
    [50.0, 100.0]
    """
    if not len(gold) == len(similarity) == counts.shape[1] > 0:
        raise ValueError(f"{len(gold)} scores, {len(similarity)} similarities, counts of {counts.shape[1]}")
    if not (_varies(gold) and _varies(similarity)):
        return np.full(len(counts), np.nan)
    groups, step = (_groups(gold), _groups(similarity)), max(1, CHUNK // len(gold))
    starts = range(0, len(counts), step)
    return np.concatenate([_spearman(counts[i : i + step], *groups) for i in starts])


class _Groups(NamedTuple):
    """Groups of equal values: `order` sorts the pairs, groups start at `starts` in it; `of`: of each pair."""

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

    gold: (n,), similarity: (n,), sizes: of the subsets, summing to n -> (draws,) for each of "all" (pooled
    pairs), "mean" and "wmean" over subsets, and each subset by its position, "0", "1" and so on. A subset's
    share of the pairs varies between draws, its weight in "wmean" is its size. Raises ValueError for other
    sizes.

    >>> x = np.arange(40.0)
    >>> {name: float(draws.min()) for name, draws in task_draws(x, x, [20, 20], draws=9, seed=0).items()}
    {'all': 100.0, 'mean': 100.0, 'wmean': 100.0, '0': 100.0, '1': 100.0}
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
    """Accuracy x 100 of each resample of the tested rows: (n,) bool -> (draws,).

    >>> accuracy_draws(np.array([True, True, True]), draws=4, seed=0).tolist()
    [100.0, 100.0, 100.0, 100.0]
    """
    return 100 * (resamples(len(correct), draws, seed) @ correct) / len(correct)


def average_draws(tasks: Mapping[str, Draws]) -> Draws:
    """Draws of the average over tasks: (draws,) for each task -> (draws,). NaN where any task has NaN.

    Tasks vary independently if their n or their seeds differ. Raises ValueError for lengths that differ.

    >>> average_draws({"STSB": np.array([80.0, 82.0]), "SICKR": np.array([70.0, 74.0])}).tolist()
    [75.0, 78.0]
    """
    return _table(tasks.values()).mean(axis=0)


def _table(rows: Iterable[Draws]) -> Draws:
    table = list(rows)
    lengths = sorted({len(row) for row in table})
    if len(lengths) != 1:
        raise ValueError(f"paired draws must be equal in number, not {lengths}")
    return np.stack(table)


def interval(draws: Draws) -> tuple[float, float] | None:
    """The 95 % percentile interval of the draws: (draws,) -> (low, high).

    None if more than 5 % of the draws are undefined (NaN).

    >>> low, high = interval(np.arange(1001.0))  # 2.5 % of the draws below, 2.5 % above
    >>> round(low, 6), round(high, 6)
    (25.0, 975.0)
    """
    undefined = np.isnan(draws)
    if undefined.mean() > UNDEFINED:
        return None
    low, high = np.quantile(draws[~undefined], [0.025, 0.975])
    return float(low), float(high)


def paired(draws_a: Draws, draws_b: Draws, difference: float | None = None) -> Comparison | None:
    """The difference a - b on the same resamples, with a 95 % interval and a p-value.

    draws_a: (draws,), draws_b: (draws,) -> Comparison, or None where `interval` gives None. `difference` is
    the observed one; None takes the median of the draws. The smallest p is 2 / (draws + 1). Raises ValueError
    for lengths that differ.

    >>> a, b = np.linspace(75, 77, 999), np.linspace(73, 75, 999)
    >>> float(paired(a, b).p)  # a is better in all 999 draws: 2 / 1000
    0.002
    """
    a, b = _table([draws_a, draws_b])
    bounds, draws = interval(a - b), (a - b)[~np.isnan(a - b)]
    if bounds is None:
        return None
    tail = min(np.count_nonzero(draws <= 0), np.count_nonzero(draws >= 0))
    given = float(np.median(draws)) if difference is None else difference
    return Comparison(given, *bounds, p=min(1.0, 2 * (1 + tail) / (len(draws) + 1)))


def over_seeds(values: Sequence[float]) -> Spread:
    """Mean and standard deviation of the scores of runs that differ in their seed alone.

    Raises ValueError for no values.

    >>> over_seeds([75.0, 76.0, 77.0])
    Spread(mean=76.0, sd=1.0, n=3)
    """
    if not len(values):
        raise ValueError("no values: a mean over seeds needs at least one run")
    return Spread(
        float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else None, len(values)
    )


def decimals(half_width: float | None) -> int:
    """How many decimals, 0 to 2, a value with an interval of this half width is printed with.

    The last one is the place of the half width's first digit, or of its second if the first is 1: the digit
    that the interval leaves open. 2 without an interval (None).

    >>> decimals(0.15), decimals(1.2), decimals(2.0), decimals(None)
    (2, 1, 0, 2)
    """
    return 2 if half_width is None or half_width < 0.2 else int(half_width < 2)


def shown(value: float | None, low: float | None, high: float | None, digits: int | None = None) -> str:
    """A value in as many decimals as its interval supports, or in `digits` decimals; "-" for None.

    >>> shown(74.318, 73.1, 75.5), shown(74.318, 73.1, 75.5, digits=2), shown(None, None, None)
    ('74.3', '74.32', '-')
    """
    if value is None:
        return "-"
    return f"{value:z.{decimals(_half_width(low, high)) if digits is None else digits}f}"


def with_interval(
    value: float | None, low: float | None, high: float | None, digits: int | None = None
) -> str:
    """A value as `shown` prints it, followed by half the width of its interval where there is one.

    >>> with_interval(74.318, 73.1, 75.5), with_interval(74.318, None, None)
    ('74.3 ±1.2', '74.32')
    """
    half, text = _half_width(low, high), shown(value, low, high, digits)
    return text if None in (value, half) else f"{text} ±{shown(half, low, high, digits)}"


def _half_width(low: float | None, high: float | None) -> float | None:
    return None if low is None or high is None else (high - low) / 2

"""Whether a difference is more than chance, from few seeds, experiments or tasks, or from correlations.

An estimate varies from several sources, such as seeds and test pairs, and each variance is estimated with its
own degrees of freedom. The half widths of the sources' t intervals are added in squares: such an interval
covers in at least 95 % of cases, whatever the true variances are (Banerjee, Sankhya 22 (1960)), because the
chance that a squared normal stays below x is concave in x. Correlations and accuracies are shares of 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, special

from whitenedcse.evaluation.statistics import Comparison, Draws, interval, paired

ALPHA = 0.05
SMALLEST = math.log(1e-100)  # a p below this is 0
CONSTANT = 1e-6  # values whose half width is below this differ by rounding alone


class Source(NamedTuple):
    """A variance of an estimate and the degrees of freedom it was estimated with, infinite for a known one.

    >>> round(half_width([Source(variance=4.0, df=math.inf)]), 2)  # 1.96 standard errors of 2
    3.92
    """

    variance: float
    df: float


def of_mean(values: Sequence[float] | NDArray[Any]) -> Source:
    """The variance of the mean of n >= 2 independent values, with n - 1 degrees of freedom.

    Raises ValueError for fewer values.

    >>> of_mean([75.0, 76.0, 77.0])  # a variance of 1 over 3 values
    Source(variance=0.3333333333333333, df=2)
    """
    if len(values) < 2:
        raise ValueError(f"{len(values)} values: a variance needs at least 2")
    return Source(float(np.var(values, ddof=1)) / len(values), len(values) - 1)


def of_difference(a: Sequence[float], b: Sequence[float], *, paired: bool) -> list[Source]:
    """The variances of the difference of two groups' means: of paired values, or of each group by itself.

    A group of one value is taken to vary as the other does. Raises ValueError for two single values, and for
    paired groups of different sizes.

    >>> of_difference([75.0, 76.0, 77.0], [70.0, 71.0, 72.0], paired=True)  # every pair differs by 5
    [Source(variance=0.0, df=2)]
    >>> len(of_difference([75.0, 76.0, 77.0], [70.0, 71.0], paired=False))
    2
    """
    if paired:
        if len(a) != len(b):
            raise ValueError(f"{len(a)} and {len(b)} values cannot be paired")
        return [of_mean(np.subtract(a, b))]
    if min(len(a), len(b)) > 1:
        return [of_mean(a), of_mean(b)]
    several = of_mean(a if len(a) > len(b) else b)
    return [several._replace(variance=several.variance * (1 + max(len(a), len(b))))]


def of_draws(draws: Draws) -> Source | None:
    """The variance over test pairs by the bootstrap; None where too many draws are undefined.

    >>> of_draws(np.array([74.0, 75.0, 75.0, 76.0]))
    Source(variance=0.5, df=inf)
    """
    return None if interval(draws) is None else Source(float(np.nanvar(draws)), math.inf)


def half_width(sources: Sequence[Source], alpha: float = ALPHA) -> float:
    """Half the width of the interval that covers in at least 1 - alpha of cases; 95 % unless told.

    >>> round(half_width([of_mean([75.0, 76.0, 77.0])]), 2), round(half_width([of_mean([75.0, 77.0])]), 2)
    (2.48, 12.71)
    """
    return math.sqrt(sum(s.variance * quantile(alpha / 2, s.df) ** 2 for s in sources))


def quantile(share: float, df: float) -> float:
    """The value that a share of Student's t with these degrees of freedom, or of the normal, is below.

    >>> round(quantile(0.025, 1), 2), round(quantile(0.025, math.inf), 2)
    (-12.71, -1.96)
    """
    return float(special.ndtri(share) if math.isinf(df) else special.stdtrit(df, share))


def tested(difference: float, sources: Sequence[Source]) -> Comparison:
    """The difference with its 95 % interval and two-sided p: the alpha at which the interval ends at zero.

    With one source this is the t test. p is None where no source varies.

    >>> tested(5.0, [of_mean([4.0, 5.0, 6.0])]).p < 0.05 < tested(5.0, [of_mean([2.0, 8.0])]).p
    True
    """
    half = half_width(sources)

    def beyond(log: float) -> float:
        return half_width(sources, alpha=math.exp(log)) - abs(difference)

    p = None
    if half > CONSTANT:
        p = math.exp(optimize.brentq(beyond, SMALLEST, 0.0, xtol=1e-13)) if beyond(SMALLEST) > 0 else 0.0
    return Comparison(difference, difference - half, difference + half, p)


Scores = tuple[Sequence[float], Draws]  # of the runs of a group, and draws of their mean


def of_scores(a: Scores, b: Scores, *, by_seed: bool) -> Comparison | None:
    """What the mean score of a group has over another's, tested; None where scores are undefined too often.

    Two single runs are compared by the draws alone. by_seed: the runs of both have the same seeds, in order.

    >>> draws = np.array([74.0, 75.0, 75.0, 76.0])
    >>> test = of_scores(([76.0, 77.0], draws + 1), ([75.0, 76.0], draws), by_seed=True)
    >>> (test.difference, test.low, test.high)  # every seed and every pair gains 1
    (1.0, 1.0, 1.0)
    """
    apart = float(np.mean(a[0]) - np.mean(b[0]))
    if len(a[0]) == len(b[0]) == 1:
        return paired(a[1], b[1], apart)
    items = of_draws(a[1] - b[1])
    return None if items is None else tested(apart, [*of_difference(a[0], b[0], paired=by_seed), items])


def holm(p: Sequence[float]) -> list[float]:
    """The p-values corrected for their number, in the given order (Holm, Scand. J. Statist. 6 (1979) 65-70).

    >>> holm([0.04, 0.01, 0.03])  # the smallest three times, the next twice; none falls below an earlier one
    [0.06, 0.03, 0.06]
    """
    order = np.argsort(p, kind="stable")
    scaled = np.asarray(p)[order] * np.arange(len(p), 0, -1)
    corrected = np.empty(len(p))
    corrected[order] = np.minimum(np.maximum.accumulate(scaled), 1)
    return corrected.tolist()


def of_spearman(r: float, n: int) -> Source:
    """The variance of Spearman's correlation r (from -1 to 1) of n >= 4 pairs.

    Carried over from that of its Fisher z, (1 + r^2 / 2) / (n - 3) (Bonett and Wright, Psychometrika 65
    (2000) 23-28). Raises ValueError for fewer pairs.

    >>> of_spearman(0.0, 103).variance
    0.01
    """
    if n < 4:
        raise ValueError(f"{n} pairs: the variance of a correlation needs at least 4")
    return Source((1 - r * r) ** 2 * (1 + r * r / 2) / (n - 3), math.inf)


def of_two_spearmans(a: float, b: float, between: float | None, n: int) -> Source:
    """The variance of the difference of two encoders' Spearman correlations a and b with the gold scores.

    n: pairs, the same for both. between: the correlation of one encoder's similarities with the other's, from
    which follows how the two estimates move together (Steiger, Psychol. Bull. 87 (1980) 245-251). Without it
    (None) they are taken to be independent, which is too wide for encoders that find the same pairs hard. For
    normal pairs the variance comes out 3 to 15 % too large.

    >>> of_two_spearmans(0.8, 0.8, 1.0, 1000).variance, of_two_spearmans(0.0, 0.0, None, 103).variance
    (0.0, 0.02)
    """
    va, vb = of_spearman(a, n).variance, of_spearman(b, n).variance
    if between is None:
        return Source(va + vb, math.inf)
    rest = (1 - a * a) * (1 - b * b)
    joint = between * (1 - a * a - b * b) - a * b * (1 - a * a - b * b - between * between) / 2
    together = joint / rest if rest > 0 else 0.0
    return Source(max(va + vb - 2 * together * math.sqrt(va * vb), 0.0), math.inf)


def of_predictions(a: NDArray[Any], b: NDArray[Any], difference: float) -> Source:
    """The most that a difference of two accuracies can vary over other test texts, without the gold labels.

    a: (e, n), b: (e, n): the labels of n texts by e classifiers on each encoder. difference: of their mean
    accuracies. A text adds at most the largest difference of the shares of classifiers that predict a label;
    for two labels this is exact.

    >>> a, b = np.array([[0, 1, 1, 0]]), np.array([[0, 1, 1, 1]])  # one of four texts is told apart
    >>> of_predictions(a, b, 0.25).variance == (1 / 4 - 0.25**2) / 4
    True
    """
    shares = [np.abs((a == label).mean(axis=0) - (b == label).mean(axis=0)) for label in np.union1d(a, b)]
    apart = np.max(shares, axis=0)
    return Source(max(float((apart**2).mean()) - difference**2, 0.0) / a.shape[1], math.inf)

"""Paired differences over seeds: what a result within chance still says, and contrasts taken together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from whitenedcse.evaluation.statistics import Comparison, of_mean, quantile, tested


def apart(one: Mapping[int, float], other: Mapping[int, float]) -> list[float]:
    """The differences one - other of the seeds that both have, in the order of the seeds."""
    return [one[seed] - other[seed] for seed in sorted(one.keys() & other.keys())]


def compared(differences: Sequence[float]) -> Comparison:
    """The mean of n >= 2 differences with its 95 % t interval and the p of the t test.

    >>> compared([4.0, 5.0, 6.0]).difference
    5.0
    """
    return tested(math.fsum(differences) / len(differences), [of_mean(differences)])


def paired_by_seed(one: Mapping[int, float], other: Mapping[int, float]) -> Comparison | None:
    """The difference one - other over the seeds that both have; None for fewer than two such seeds."""
    found = apart(one, other)
    return compared(found) if len(found) > 1 else None


def bound(differences: Sequence[float]) -> float:
    """The least number that two one-sided t tests at 5 % show the size of the mean difference to be below.

    It is the end of the 90 % t interval that is farther from zero.

    >>> round(bound([-1.0, 0.0, 1.0]), 3)
    1.686
    """
    source = of_mean(differences)
    mean = math.fsum(differences) / len(differences)
    return abs(mean) + quantile(0.95, source.df) * math.sqrt(source.variance)

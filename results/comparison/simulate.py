"""How often systems that are equal are called different: python results/comparison/simulate.py > type_one.csv

Scores of runs are drawn with a standard deviation of 0.3 over seeds and one over test pairs, which all runs
of a system share ("system") or which each run has for itself ("run"). Each of 6,000 comparisons is tested at
5 % as `compare=` does it, by a t test over seeds alone, and by the bootstrap of runs and pairs that it was
before. Columns: seeds of each system, standard deviations over seeds and pairs, and the share in percent
that is called different where nothing is (no_difference) and where the systems differ by 1.0 (difference).
"""

import csv
import sys
from itertools import product

import numpy as np
from numpy.typing import NDArray

from whitenedcse.evaluation.statistics import of_difference, quantile, resamples
from whitenedcse.report.compare import Scores, difference

REPEATS, PAIRS, DRAWS, SD = 6000, 200, 300, 0.3
COUNTS = resamples(PAIRS, DRAWS, 0) / PAIRS
Floats = NDArray[np.float64]


def system(rng: np.random.Generator, seeds: int, noise: float, shared: bool, sd: float) -> Floats:
    """What each run scores on each pair: (seeds, PAIRS)."""
    items = noise * PAIRS**0.5 * rng.standard_normal((1 if shared else seeds, PAIRS))
    return sd * rng.standard_normal((seeds, 1)) + items


def ours(a: Floats, b: Floats, by_seed: bool) -> tuple[float, float]:
    """The 95 % interval of the difference by `compare=`."""
    firsts = (0, 0 if by_seed else len(a))  # the seeds of each, which are the same or all others
    groups = [dict(enumerate(x, first)) for x, first in zip((a, b), firsts, strict=True)]
    means = [{seed: float(x.mean()) for seed, x in group.items()} for group in groups]
    draws = [{seed: COUNTS @ x for seed, x in group.items()} for group in groups]
    test = difference(Scores(means[0], draws[0]), Scores(means[1], draws[1]))
    assert test is not None
    return test.low, test.high


def by_t(a: Floats, b: Floats, by_seed: bool) -> tuple[float, float]:
    """The same over seeds alone: a paired t interval, or Welch's."""
    a, b = a.mean(axis=1), b.mean(axis=1)
    sources = of_difference(a, b, paired=by_seed)
    variance = sum(s.variance for s in sources)
    df = variance**2 / sum(s.variance**2 / s.df for s in sources)
    half = -quantile(0.025, df) * variance**0.5
    return a.mean() - b.mean() - half, a.mean() - b.mean() + half


def before(a: Floats, b: Floats, by_seed: bool) -> tuple[float, float]:
    """The same by the bootstrap of runs and pairs."""
    draws = []
    for x in (a, b):
        picks = np.random.default_rng([0, len(x)]).integers(len(x), size=(len(x), DRAWS))
        draws.append(np.take_along_axis(x @ COUNTS.T, picks, axis=0).mean(axis=0))
    low, high = np.quantile(draws[0] - draws[1], [0.025, 0.975])
    return low, high


def main() -> None:
    """A row for each number of seeds, noise and test."""
    table = csv.writer(sys.stdout, lineterminator="\n")
    table.writerow(["seeds", "sd", "noise", "shared_by", "test", "no_difference", "difference"])
    same = [(n, n, SD, SD, by_seed) for n in (2, 3, 5, 10) for by_seed in (True, False)]
    other = [(n, m, s, SD, False) for n, m in ((2, 10), (3, 5)) for s in (SD, 2 * SD)]
    alone = [(1, n, SD, SD, False) for n in (2, 3, 5, 10)]
    cases = product((*same, *other, *alone), (0.03, 0.1, 0.3), (True, False))
    for (n, m, s, t, by_seed), noise, shared in cases:
        tests = {"compare": ours} if n == 1 else {"compare": ours, "t": by_t, "before": before}
        hits = {name: np.zeros(2) for name in tests}
        rng = np.random.default_rng(0)
        for _ in range(REPEATS):
            a, b = system(rng, n, noise, shared, s), system(rng, m, noise, shared, t)
            for name, test in tests.items():
                low, high = test(a, b, by_seed)
                hits[name] += not low < 0 < high, not low < -1 < high  # as if 1 were added to a
        for name, found in hits.items():
            how = f"{n} {'paired with' if by_seed else 'and'} {m}"
            shares = [f"{share:.1f}" for share in 100 * found / REPEATS]
            table.writerow([how, f"{s:g} {t:g}", noise, "system" if shared else "run", name, *shares])
        sys.stdout.flush()


if __name__ == "__main__":
    main()

"""Bootstrap draws of Spearman's correlation against a loop over scipy: python -m bench.bootstrap

SICK-R's size and grid of scores; both see the same resamples. Then the seven tasks of the tables.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import spearmanr

from bench import measure
from bench.measure import Variant
from whitenedcse.evaluation.statistics import resamples, task_draws, weighted_spearman

SIZES = {
    "STS12": [750, 750, 459, 750, 399],
    "STS13": [189, 750, 561],
    "STS14": [450, 300, 750, 750, 750, 750],
    "STS15": [375, 750, 375, 750, 750],
    "STS16": [254, 249, 230, 244, 209],
    "STS-B": [1379],
    "SICK-R": [4927],
}


def scipy_loop(gold: NDArray[Any], similarity: NDArray[Any], counts: NDArray[Any]) -> NDArray[Any]:
    """One call of spearmanr a draw."""
    rows = [(np.repeat(gold, row), np.repeat(similarity, row)) for row in counts]
    return np.array([100 * spearmanr(*row).statistic for row in rows])


def scored(n: int, seed: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """(n,), (n,): gold in tenths from 1 to 5, as SICK's, and cosines that follow it."""
    rng = np.random.default_rng(seed)
    gold = np.round(rng.uniform(1, 5, n), 1)
    return gold, np.tanh(0.2 * gold + 0.15 * rng.standard_normal(n))


def main() -> None:
    """A table of two variants on one task, and one of seven tasks."""
    options = measure.parser(__doc__).parse_args()
    here, rounds = measure.begin(options), options.rounds or 5
    gold, similarity = scored(4927, 0)
    counts = resamples(4927, 300, 0)
    draws = {
        "scipy loop": Variant(partial(scipy_loop, gold, similarity, counts)),
        "weighted_spearman": Variant(partial(weighted_spearman, gold, similarity, counts), "scipy loop"),
    }
    found = [variant.run() for variant in draws.values()]
    print(f"largest disagreement {np.ptp(found, axis=0).max():.1e} (of 100)")
    tasks = {"task_draws": Variant(seven)}
    works = {"SICK-R, 300 draws": draws, "seven STS tasks, 1,000 draws, every subset and aggregation": tasks}
    tables = []
    for work, variants in works.items():
        times = measure.interleaved(variants, rounds, options.threads)
        tables.append(measure.table(work, variants, times))
    measure.end(options, here, tables)


def seven() -> None:
    """Draws of all tasks."""
    for sizes in SIZES.values():
        task_draws(*scored(sum(sizes), 1), sizes, 1000, seed=0)


if __name__ == "__main__":
    main()

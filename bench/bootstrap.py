"""Bootstrap draws of Spearman's correlation against a loop over scipy: python bench/bootstrap.py

SICK-R's size and grid of scores, one thread. Both see the same resamples, take turns, and the medians of
process CPU time are compared, so a busy machine disturbs both alike. Then the seven tasks of the tables.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import spearmanr

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


VARIANTS: dict[str, Callable[[NDArray[Any], NDArray[Any], NDArray[Any]], NDArray[Any]]] = {
    "scipy loop": scipy_loop,
    "weighted_spearman": weighted_spearman,
}


def scored(n: int, seed: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """(n,), (n,): gold in tenths from 1 to 5, as SICK's, and cosines that follow it."""
    rng = np.random.default_rng(seed)
    gold = np.round(rng.uniform(1, 5, n), 1)
    return gold, np.tanh(0.2 * gold + 0.15 * rng.standard_normal(n))


def main() -> None:
    """The ratio of two variants, and the time of seven tasks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draws", type=int, default=300, help="of SICK-R; the seven tasks take 1,000")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    gold, similarity = scored(4927, 0)
    counts = resamples(4927, options.draws, 0)
    times: dict[str, list[float]] = {name: [] for name in VARIANTS}
    results = {}
    for _ in range(options.rounds):
        for name, variant in VARIANTS.items():
            start = time.process_time()
            results[name] = variant(gold, similarity, counts)
            times[name].append(time.process_time() - start)
    medians = {name: 1e3 * statistics.median(values) for name, values in times.items()}
    slow, fast = medians.values()
    print("  ".join(f"{name} {value:.1f} ms" for name, value in medians.items()), f" {slow / fast:.1f}x")
    print(f"largest disagreement {np.ptp(list(results.values()), axis=0).max():.1e} (of 100)")

    totals = []
    for _ in range(options.rounds):
        start = time.process_time()
        for sizes in SIZES.values():
            task_draws(*scored(sum(sizes), 1), sizes, 1000, seed=0)
        totals.append(time.process_time() - start)
    print(f"seven STS tasks, 1,000 draws, every subset and aggregation: {statistics.median(totals):.2f} s")


if __name__ == "__main__":
    main()

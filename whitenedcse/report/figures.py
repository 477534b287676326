"""The papers' figures from one encode: every two layers, every set of layers, every number of components."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whitenedcse.evaluation import layers
from whitenedcse.evaluation.correlation import MEANS
from whitenedcse.evaluation.suite import Plan, System
from whitenedcse.report import plots


def draw(run: Path, planes: NDArray[Any], system: System, plan: Plan, mean: str) -> list[str]:
    """Write layers, subsets and components, each as .csv, .png and .svg; returns a line on the best of each.

    planes: (l, n, d), every layer. system: whose vectors are whitened and cut to each k. mean: one of MEANS.
    """
    if not plan.pairs:
        raise ValueError("figures are of STS tasks, and there is none among these")
    return [
        _layers(run, planes, plan, mean),
        _subsets(run, planes, plan, mean),
        _components(run, system, plan, mean),
    ]


def _layers(run: Path, planes: NDArray[Any], plan: Plan, mean: str) -> str:
    """WhiteningBERT, Figure 1."""
    records = layers.pairs(planes, plan.pairs)
    plots.write_csv(run / "layers.csv", records)
    plots.heat_map(records, mean, run / "layers")
    averages = [r for r in records if r["task"] == "average" and r[mean] is not None]
    best = max(averages, key=lambda r: r[mean])
    how = "whitened" if best["whitening"] else "as they are"
    pair = " and ".join(map(str, dict.fromkeys(best["layers"])))
    return f"layers.png: best of every two layers: {pair}, {how}: {best[mean]:.2f}"


def _subsets(run: Path, planes: NDArray[Any], plan: Plan, mean: str) -> str:
    """WhiteningBERT, Figure 2."""
    sets = layers.subsets(planes, plan.pairs)
    plots.write_csv(run / "subsets.csv", sets.records)
    best = layers.best_of_each_size(sets.records, mean)
    plots.subset_curve(best, mean, run / "subsets")
    top = max(best, key=lambda r: r[mean])
    many = "" if sets.complete else f" (sets of up to {sets.largest} layers)"
    return f"subsets.png: the best set of layers is {top['layers']}{many}: {top[mean]:.2f}"


def _components(run: Path, system: System, plan: Plan, mean: str) -> str:
    """BERT-whitening, Figure 1."""
    every = np.arange(len(system.x))
    scores = layers.all_k(lambda task: system.vectors(plan, task)(every), plan.pairs)
    d = system.x.shape[1]
    plots.write_csv(run / "components.csv", layers.records(scores, [{"k": k} for k in range(1, d + 1)]))
    plots.component_curves(scores, MEANS.index(mean), run / "components")
    average = scores["average"][MEANS.index(mean)]
    k = int(np.nanargmax(average)) + 1
    return f"components.png: whitened on {system.on}, the best k is {k} of {d}: {average[k - 1]:.2f}"


def best(path: Path, mean: str, layers: str | None = None) -> float | None:
    """Of a CSV written here, the best average over the tasks, or that of these layers; None without one."""
    if not path.is_file():
        return None
    with path.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["task"] == "average" and row[mean]]
    values = [float(row[mean]) for row in rows if layers in (None, row["layers"])]
    return max(values, default=None)

"""Runs side by side, with paired tests."""

from __future__ import annotations

import glob
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from whitenedcse.app.run import Run
from whitenedcse.app.terminal import Grid
from whitenedcse.evaluation.statistics import (
    Draws,
    accuracy_draws,
    average_draws,
    group_draws,
    interval,
    over_seeds,
    paired,
    task_draws,
    with_interval,
)
from whitenedcse.evaluation.suite import seed
from whitenedcse.report.results import bounds, meaning

KINDS = (("sts", "Spearman x 100"), ("transfer", "accuracy x 100"), ("rte", "accuracy x 100"))
MARKS = ((0.01, "**"), (0.05, "*"))


class Group(NamedTuple):
    """Runs that differ in their seed alone, and the name or pattern they were given by."""

    name: str
    runs: list[Run]


class Column(NamedTuple):
    """The scores of a group: for each task and "average" those of its runs, and draws of their mean."""

    values: dict[str, list[float]]
    draws: dict[str, Draws]


def compared(names: Sequence[str], draws: int, digits: int | None) -> list[Grid]:
    """A table for each row that the runs share, by name; of the first rows where they share none.

    names: run directories, or patterns (outputs/sgw-*) for one system with several seeds. Each group is
    tested against the first. Raises ValueError where the runs were not scored on the same pairs.
    """
    groups = [Group(name, [Run(path) for path in expanded(name)]) for name in names]
    every = [run for group in groups for run in group.runs]
    named = [[row["name"] for row in run.results["rows"]] for run in every]
    shared: list[str | None] = [name for name in named[0] if all(name in other for other in named)]
    return [
        grid(groups, row, kind, title, draws, digits)
        for row in shared or [None]
        for kind, title in KINDS
        if all(kind in row_of(run, row)[1] for run in every)
    ]


def expanded(name: str) -> list[Path]:
    """The directories that a name or pattern matches. Raises FileNotFoundError if none does."""
    paths = sorted(Path(path) for path in glob.glob(name)) if glob.has_magic(name) else [Path(name)]
    if not paths:
        raise FileNotFoundError(f"compare: no run matches {name}")
    return paths


def row_of(run: Run, name: str | None) -> tuple[int, dict[str, Any]]:
    """The number and the content of a run's row by name; of the first row for None."""
    rows = run.results["rows"]
    number = 0 if name is None else [row["name"] for row in rows].index(name)
    return number, rows[number]


def grid(
    groups: Sequence[Group], row: str | None, kind: str, title: str, draws: int, digits: int | None
) -> Grid:
    """One table: a row for each task, a column for each group and for its difference from the first."""
    columns, mean = (
        [column(group, row, kind, draws) for group in groups],
        groups[0].runs[0].results["headline"],
    )
    same_pairs([run for group in groups for run in group.runs], list(columns[0].values))
    tasks = [task for task in columns[0].values if all(task in c.values for c in columns)]
    lines = [[task, *cells(columns, task, digits)] for task in tasks]
    tests = [f"{cell} {i}" for i in range(2, len(groups) + 1) for cell in ("less 1", "p of")]
    headers = ["task", *(f"{i}" for i in range(1, len(groups) + 1)), *tests]
    runs = [f" ({len(group.runs)} runs)" if len(group.runs) > 1 else "" for group in groups]
    legend = [f"{i}: {group.name}{many}" for i, (group, many) in enumerate(zip(groups, runs, strict=True), 1)]
    notes = [
        *legend,
        f"95 % intervals and p by {draws:,} bootstrap draws of the same pairs, and of the runs of a group",
        "* p < 0.05, ** p < 0.01, not corrected for the number of tests",
    ]
    if kind == "sts":
        title, notes = f"{title}, {mean}", [*notes, meaning(mean)]
    return Grid(f"{row or 'first rows'}: {title}", headers, lines, notes, range(1, len(headers)))


def cells(columns: Sequence[Column], task: str, digits: int | None) -> list[str]:
    """The cells of a task's row after its name."""
    shown = []
    for values, draws in ((c.values[task], c.draws[task]) for c in columns):
        spread = over_seeds(values)
        sd = "" if spread.sd is None else f" (sd {spread.sd:.2f})"
        shown.append(with_interval(spread.mean, *bounds(interval(draws)), digits) + sd)
    first = columns[0]
    for other in columns[1:]:
        difference = float(np.mean(other.values[task]) - np.mean(first.values[task]))
        test = paired(other.draws[task], first.draws[task], difference)
        if test is None:
            shown += ["-", "-"]
            continue
        mark = next((mark for level, mark in MARKS if test.p < level), "")
        shown += [with_interval(test.difference, test.low, test.high, digits) + mark, f"{test.p:.3f}"]
    return shown


def column(group: Group, row: str | None, kind: str, draws: int) -> Column:
    """Scores and draws of a group, for each task and for the average over tasks."""
    by_run = [scored(run, row, kind, draws) for run in group.runs]
    tasks = [task for task in by_run[0] if all(task in run for run in by_run)]
    values = {task: [run[task][0] for run in by_run] for task in tasks}
    drawn = {task: group_draws([run[task][1] for run in by_run], 0) for task in tasks}
    if len(tasks) > 1:
        values["average"] = np.mean([values[task] for task in tasks], axis=0).tolist()
        drawn["average"] = average_draws({task: drawn[task] for task in tasks})
    return Column(values, drawn)


def scored(run: Run, row: str | None, kind: str, draws: int) -> dict[str, tuple[float, Draws]]:
    """The score of each task of a run, and its bootstrap draws; without tasks whose score is undefined."""
    number, content = row_of(run, row)
    tasks: Mapping[str, Any] = {"RTE": content["rte"]} if kind == "rte" else content[kind]["tasks"]
    out = {}
    for name, task in tasks.items():
        mean, item = run.results["headline"], run.items[f"{number}/{name}"]
        if (gold := run.items.get(f"gold/{name}")) is None:
            raise ValueError(
                f"{run.path}: its items.npz, of before, lacks the labels of {name}; evaluate again"
            )
        if kind != "sts":
            out[name] = (task["accuracy"], accuracy_draws(item, draws, seed(gold)))
        elif task[mean] is not None:
            sizes = run.items[f"sizes/{name}"].tolist()
            out[name] = (task[mean], task_draws(gold, item, sizes, draws, seed(gold))[mean])
    return out


def same_pairs(runs: Sequence[Run], tasks: Sequence[str]) -> None:
    """Raise ValueError unless all runs report the same aggregation of the same gold scores."""
    first = runs[0]
    for other in runs[1:]:
        if other.results["headline"] != first.results["headline"]:
            heads = f"{first.results['headline']} and {other.results['headline']}"
            raise ValueError(f"{first.path} and {other.path} report {heads}; evaluate both by one protocol")
        for task in tasks:
            gold = [run.items.get(f"gold/{task}") for run in (first, other)]
            if not (gold[0] is None and gold[1] is None or np.array_equal(*gold)):  # type: ignore[arg-type]
                raise ValueError(
                    f"{task}: {first.path} and {other.path} were not evaluated on the same pairs"
                )

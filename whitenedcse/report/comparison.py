"""Runs of evaluate.py side by side: intervals, and paired tests on the same pairs."""

from __future__ import annotations

import glob
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

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
from whitenedcse.report.formats import Grid
from whitenedcse.report.judgements import Judged, load
from whitenedcse.report.tables import bounds

KINDS = (("sts", "Spearman x 100"), ("transfer", "accuracy x 100"), ("rte", "accuracy x 100"))
MARKS = ((0.01, "**"), (0.05, "*"))


class Group(NamedTuple):
    """Runs that differ in their seed alone, and the name they were given."""

    name: str
    runs: list[Judged]


class Column(NamedTuple):
    """What a group scored: by task and as "average", each run's score, and the draws of their mean."""

    values: dict[str, list[float]]
    draws: dict[str, Draws]


def compared(names: Sequence[str], draws: int, digits: int | None) -> list[Grid]:
    """A table for each row that the runs share, by name; the first rows where they share none.

    names: run directories, or patterns (outputs/sgw-*) that stand for one system with several seeds. Each
    group is tested against the first. Raises ValueError where the runs were not judged on the same pairs.
    """
    groups = [Group(name, [load(path) for path in expanded(name)]) for name in names]
    every = [run for group in groups for run in group.runs]
    named = [[row["name"] for row in run.scores["rows"]] for run in every]
    shared: list[str | None] = [name for name in named[0] if all(name in other for other in named)]
    return [
        grid(groups, row, kind, title, draws, digits)
        for row in shared or [None]
        for kind, title in KINDS
        if all(kind in row_of(run, row)[1] for run in every)
    ]


def expanded(name: str) -> list[Path]:
    """The directories that a pattern stands for, or the one of that name."""
    paths = sorted(Path(path) for path in glob.glob(name)) if glob.has_magic(name) else [Path(name)]
    if not paths:
        raise FileNotFoundError(f"compare: no run matches {name}")
    return paths


def row_of(run: Judged, name: str | None) -> tuple[int, dict[str, Any]]:
    """Number and content of a row by name; the first row for None."""
    rows = run.scores["rows"]
    number = 0 if name is None else [row["name"] for row in rows].index(name)
    return number, rows[number]


def grid(
    groups: Sequence[Group], row: str | None, kind: str, title: str, draws: int, digits: int | None
) -> Grid:
    """One table: a row a task, a column a group, and for each group but the first what sets it apart."""
    columns = [column(group, row, kind, draws) for group in groups]
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
    return Grid(f"{row or 'first rows'}: {title}", headers, lines, notes, range(1, len(headers)))


def cells(columns: Sequence[Column], task: str, digits: int | None) -> list[str]:
    """The line of a task after its name."""
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
    """Scores and draws of a group, task by task, and of the average over tasks."""
    by_run = [scored(run, row, kind, draws) for run in group.runs]
    tasks = [task for task in by_run[0] if all(task in run for run in by_run)]
    values = {task: [run[task][0] for run in by_run] for task in tasks}
    drawn = {task: group_draws([run[task][1] for run in by_run], seed("runs")) for task in tasks}
    if len(tasks) > 1:
        values["average"] = np.mean([values[task] for task in tasks], axis=0).tolist()
        drawn["average"] = average_draws({task: drawn[task] for task in tasks})
    return Column(values, drawn)


def scored(run: Judged, row: str | None, kind: str, draws: int) -> dict[str, tuple[float, Draws]]:
    """A run's score of each task, where it has one, and its draws."""
    number, content = row_of(run, row)
    tasks: Mapping[str, Any] = {"RTE": content["rte"]} if kind == "rte" else content[kind]["tasks"]
    out = {}
    for name, task in tasks.items():
        mean, item = run.scores["headline"], run.items[f"{number}/{name}"]
        if kind != "sts":
            out[name] = (task["accuracy"], accuracy_draws(item, draws, seed(name)))
        elif task[mean] is not None:
            gold, sizes = run.items[f"gold/{name}"], run.items[f"sizes/{name}"].tolist()
            out[name] = (task[mean], task_draws(gold, item, sizes, draws, seed(name))[mean])
    return out


def same_pairs(runs: Sequence[Judged], tasks: Sequence[str]) -> None:
    """Raise ValueError unless all runs report the same aggregation of the same gold scores."""
    first = runs[0]
    for other in runs[1:]:
        if other.scores["headline"] != first.scores["headline"]:
            heads = f"{first.scores['headline']} and {other.scores['headline']}"
            raise ValueError(f"{first.path} and {other.path} report {heads}; judge both by one protocol")
        for task in tasks:
            gold = [run.items.get(f"gold/{task}") for run in (first, other)]
            if not (gold[0] is None and gold[1] is None or np.array_equal(*gold)):  # type: ignore[arg-type]
                raise ValueError(f"{task}: {first.path} and {other.path} were not judged on the same pairs")

"""The tables that commands end with: scores of one run, and runs side by side with paired tests."""

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
    shown,
    task_draws,
    with_interval,
)
from whitenedcse.evaluation.sts import MEANS
from whitenedcse.evaluation.suite import seed

DIGITS = "95 % bootstrap intervals; no more digits than they support (digits=2 prints two)"


def number(value: float | None) -> str:
    """A number with two decimals; "-" for None."""
    return shown(value, None, None)


def training_grid(dev: Mapping[str, Any]) -> Grid:
    """The table of `dev` in scores.json: each value before training and at the best checkpoint."""
    columns = ("", "before", f"best (step {dev['best_step']})")
    rows = [
        (described(name), number(before), number(dev["values_best"][name]))
        for name, before in dev["values_before"].items()
        if not name.startswith("dev/variance_top")  # the spectrum: a curve, for metrics.csv and its plots
    ]
    return Grid(f"dev set, {dev['n']} pairs, Spearman x 100", columns, rows, right=(1, 2))


def described(name: str) -> str:
    """The name of a logged value in words."""
    words = {
        "dev/spearman": "embedding as it is",
        "dev/alignment": "alignment (lower is better)",
        "dev/uniformity": "uniformity (lower is better)",
        "dev/effective_rank": "effective rank (axes in use)",
    }
    fitted, _, k = name.removeprefix("dev/whitened_on_").partition("_k")
    kind = {"dev": "dev sentences (transductive)", "corpus": "training sentences (inductive)"}
    return words.get(name) or f"whitened on {kind[fitted]}, k={k}"


def grids(scores: Mapping[str, Any], digits: int | None) -> list[Grid]:
    """The tables of evaluate.py's scores.json. digits: of numbers; None for as many as intervals support."""
    rows = scores["rows"]
    every = [
        (sts_grid(rows[0], digits) if len(rows) == 1 else sts_rows(rows, scores["headline"], digits))
        if "sts" in rows[0]
        else None,
        accuracy_grid(rows, digits) if "transfer" in rows[0] else None,
        rte_grid(rows, digits) if "rte" in rows[0] else None,
        geometry_grid(rows) if "geometry" in rows[0] else None,
    ]
    return [grid for grid in every if grid is not None]


def bounds(interval: Sequence[float] | None) -> tuple[float | None, float | None]:
    """The ends of an interval; None and None for no interval."""
    return (interval[0], interval[1]) if interval else (None, None)


def sts_grid(row: Mapping[str, Any], digits: int | None) -> Grid:
    """The STS table of one system: a row for each task, a column for each aggregation and for remarks."""

    def line(name: str, task: Mapping[str, Any]) -> list[str]:
        values = [with_interval(task[mean], *bounds(task["interval"][mean]), digits) for mean in MEANS]
        return [name, str(task.get("n", "")), *values, task.get("why", "")]

    sts = row["sts"]
    lines = [line(name, task) for name, task in sts["tasks"].items()] + [line("average", sts["avg"])]
    why = [any(cells[-1] for cells in lines)]
    columns = ["task", "n", *MEANS, *["" for known in why if known]]
    kept = [cells[: len(columns)] for cells in lines]
    return Grid(titled(row), columns, kept, [DIGITS], right=range(1, 5))


def titled(row: Mapping[str, Any]) -> str:
    """The title of the table of one system."""
    return f"{row['name']}{', ' + row['setting'] if row['setting'] else ''}: Spearman x 100"


def sts_rows(rows: Sequence[Mapping[str, Any]], headline: str, digits: int | None) -> Grid:
    """The STS table of several systems: a row for each, a column for each task, in one aggregation."""
    tasks = list(rows[0]["sts"]["tasks"])

    def cell(values: Mapping[str, Any]) -> str:
        return shown(values[headline], *bounds(values["interval"][headline]), digits)

    lines = [
        [row["name"], row["setting"]]
        + [cell(row["sts"]["tasks"][task]) for task in tasks]
        + [cell(row["sts"]["avg"])]
        for row in rows
    ]
    intervals = [i for row in rows if (i := row["sts"]["avg"]["interval"][headline])]
    sure = (
        [f"the average's 95 % interval is at most ±{max(b - a for a, b in intervals) / 2:.1f}"]
        if intervals
        else []
    )
    why = [f"{row['name']}: {w}" for row in rows if (w := row["sts"]["avg"].get("why"))]
    columns = ["", "fitted", *tasks, "average"]
    return Grid(
        f"Spearman x 100, {headline}", columns, lines, [*sure, DIGITS, *why], right=range(2, len(columns))
    )


def accuracy_grid(rows: Sequence[Mapping[str, Any]], digits: int | None) -> Grid:
    """The table of transfer tasks: a row for each system, a column for each task."""
    tasks = list(rows[0]["transfer"]["tasks"])
    lines = []
    for row in rows:
        done = row["transfer"]["tasks"]
        cells = [with_interval(done[t]["accuracy"], *bounds(done[t]["interval"]), digits) for t in tasks]
        average = with_interval(row["transfer"]["avg"], *bounds(row["transfer"]["interval"]), digits)
        lines.append([row["name"], row["setting"], *cells, average])
    columns = ["", "fitted", *tasks, "average"]
    seconds = sum(task["seconds"] for row in rows for task in row["transfer"]["tasks"].values())
    return Grid(
        "accuracy x 100", columns, lines, [f"{seconds:.0f} s of classifiers", DIGITS], range(2, len(columns))
    )


def rte_grid(rows: Sequence[Mapping[str, Any]], digits: int | None) -> Grid:
    """The table of RTE by a threshold: accuracy, that of the larger class alone, and the confusion."""
    lines = []
    for row in rows:
        rte = row["rte"]
        (a, b), (c, d) = (list(counts.values()) for counts in rte["confusion"].values())
        accuracy = with_interval(rte["accuracy"], *bounds(rte["interval"]), digits)
        lines.append(
            [row["name"], row["setting"], accuracy, number(rte["majority"]), *map(str, (a, b, c, d))]
        )
    counts = ("e as e", "e as n", "n as e", "n as n")
    notes = ["e: entailment, predicted where the cosine is at least 0.5; n: not", DIGITS]
    columns = ["", "fitted", "accuracy", "majority class", *counts]
    return Grid("RTE dev, accuracy x 100", columns, lines, notes, range(2, len(columns)))


def geometry_grid(rows: Sequence[Mapping[str, Any]]) -> Grid:
    """The table of geometry: a row for each system, a column for each measure."""
    names = ("alignment", "uniformity", "mean_cosine", "isotropy", "effective_rank")
    lines = [
        [row["name"], row["setting"]]
        + ["-" if (v := row["geometry"][name]) is None else f"{v:.{0 if v > 9.5 else 3}f}" for name in names]
        for row in rows
    ]
    columns = ["", "fitted", *(name.replace("_", " ") for name in names)]
    return Grid(f"geometry on {rows[0]['geometry']['task']}", columns, lines, right=range(2, len(columns)))


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
    drawn = {task: group_draws([run[task][1] for run in by_run], seed("runs")) for task in tasks}
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
        if kind != "sts":
            out[name] = (task["accuracy"], accuracy_draws(item, draws, seed(name)))
        elif task[mean] is not None:
            gold, sizes = run.items[f"gold/{name}"], run.items[f"sizes/{name}"].tolist()
            out[name] = (task[mean], task_draws(gold, item, sizes, draws, seed(name))[mean])
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

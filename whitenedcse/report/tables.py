"""The tables that a command ends with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from whitenedcse.evaluation.correlation import MEANS
from whitenedcse.evaluation.statistics import shown, with_interval
from whitenedcse.report.formats import Grid

DIGITS = "95 % bootstrap intervals; no more digits than they support (digits=2 prints two)"


def number(value: float | None) -> str:
    """Two digits, or a dash for what is undefined."""
    return shown(value, None, None)


def training_grid(dev: Mapping[str, Any]) -> Grid:
    """`dev` of scores.json: each value before training and at the best checkpoint."""
    columns = ("", "before", f"best (step {dev['best_step']})")
    rows = [
        (described(name), number(before), number(dev["values_best"][name]))
        for name, before in dev["values_before"].items()
        if not name.startswith("dev/variance_top")  # the spectrum: a curve, for metrics.csv and its plots
    ]
    return Grid(f"dev set, {dev['n']} pairs, Spearman x 100", columns, rows, right=(1, 2))


def described(name: str) -> str:
    """A logged name in words."""
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
    """scores.json of evaluate.py as tables; STS with three aggregations where there is one row."""
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
    """An interval's ends, or none."""
    return (interval[0], interval[1]) if interval else (None, None)


def sts_grid(row: Mapping[str, Any], digits: int | None) -> Grid:
    """One system: a row a task, a column an aggregation, and why a value is undefined."""

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
    """What a table of one system is called."""
    return f"{row['name']}{', ' + row['setting'] if row['setting'] else ''}: Spearman x 100"


def sts_rows(rows: Sequence[Mapping[str, Any]], headline: str, digits: int | None) -> Grid:
    """Several systems: a row each, a column a task, in one aggregation."""
    tasks = list(rows[0]["sts"]["tasks"])

    def cell(values: Mapping[str, Any]) -> str:
        return shown(values[headline], *bounds(values["interval"][headline]), digits)

    lines = [
        [row["name"], row["setting"]]
        + [cell(row["sts"]["tasks"][task]) for task in tasks]
        + [cell(row["sts"]["avg"])]
        for row in rows
    ]
    found = [i for row in rows if (i := row["sts"]["avg"]["interval"][headline])]
    sure = (
        [f"the average's 95 % interval is at most ±{max(b - a for a, b in found) / 2:.1f}"] if found else []
    )
    why = [f"{row['name']}: {w}" for row in rows if (w := row["sts"]["avg"].get("why"))]
    columns = ["", "fitted", *tasks, "average"]
    return Grid(
        f"Spearman x 100, {headline}", columns, lines, [*sure, DIGITS, *why], right=range(2, len(columns))
    )


def accuracy_grid(rows: Sequence[Mapping[str, Any]], digits: int | None) -> Grid:
    """Transfer tasks: a row a system, a column a task."""
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
    """RTE by a threshold: accuracy beside what the larger class alone would give, and the confusion."""
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
    """The shape of the space that each system makes."""
    names = ("alignment", "uniformity", "mean_cosine", "isotropy", "effective_rank")
    lines = [
        [row["name"], row["setting"]]
        + ["-" if (v := row["geometry"][name]) is None else f"{v:.{0 if v > 9.5 else 3}f}" for name in names]
        for row in rows
    ]
    columns = ["", "fitted", *(name.replace("_", " ") for name in names)]
    return Grid(f"geometry on {rows[0]['geometry']['task']}", columns, lines, right=range(2, len(columns)))

"""The tables of one result, of the dev set or of tests, and how numbers are written in tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from whitenedcse.console import Grid
from whitenedcse.evaluation.scores import MEANING, MEANS
from whitenedcse.evaluation.tasks import short
from whitenedcse.run import Run

CERTAINTY = "95 % bootstrap intervals"
NO_PAIRS = "no dev pairs: neither number says which checkpoint is best (monitor.dev=FILE would)"


def number(value: float | None, digits: int = 2) -> str:
    """A number with two decimals, unless told; "-" for None."""
    return "-" if value is None else f"{value:z.{digits}f}"


def with_half(value: float | None, low: float | None, high: float | None, digits: int = 2) -> str:
    """A number, followed by half the width of its interval where there is one.

    >>> with_half(74.318, 73.1, 75.5), with_half(74.318, None, None)
    ('74.32 ±1.20', '74.32')
    """
    none = None in (value, low, high) or math.isnan(high)  # type: ignore[arg-type]
    return number(value, digits) + ("" if none else f" ±{number((high - low) / 2, digits)}")  # type: ignore[operator]


def training_grid(dev: Mapping[str, Any]) -> Grid:
    """The table of `dev` in scores.json: each value before training and at the best checkpoint."""
    columns = ("", "before", f"best (step {dev['best_step']})" if dev["best_step"] else "best")
    rows = [
        (described(name), number(before), number(dev["values_best"][name]) if dev["best_step"] else "-")
        for name, before in dev["values_before"].items()
        if not name.startswith("dev/variance_top")  # the spectrum: a curve, for metrics.csv and its plots
    ]
    if dev.get("metric", "") is None:
        columns = ("", "before", f"last (step {dev['best_step']})")
        notes = ["alignment is over two embeddings of each sentence with different dropout", NO_PAIRS]
        return Grid("sentences held out of the corpus", columns, rows, notes, right=(1, 2))
    notes = alignment_note(dev)
    for key, few in {"dev": "the dev set", "corpus": "the sample of the corpus"}.items():
        missing = [
            n for n, value in dev["values_best"].items() if value is None and f"whitened_on_{key}" in n
        ]
        notes += [f"-: {few} has too few sentences for whitening on them to so many components"] * bool(
            missing
        )
    before, best = dev.get("before"), dev.get("best")
    if before is not None and best is not None and best < before:
        notes.append(
            "training lowered the dev score: a lower optim.lr, or more or other sentences, may raise it"
        )
    pairs = f"dev set, {dev['n']} pairs" if dev["n"] else "dev set so far"
    return Grid(f"{pairs}, Spearman x 100", columns, rows, notes, right=(1, 2))


def meaning(mean: str) -> str:
    """A note on an aggregation, one of MEANS."""
    return f"{mean}: {MEANING[mean]}"


def alignment_note(content: Mapping[str, Any]) -> list[str]:
    """A note on the pairs that alignment is over, of `dev` or `geometry` in scores.json; none if not said."""
    if not (of := content.get("positives")):
        return []
    if not of["n"]:
        return [f"no alignment: no pair has a score above {of['above']:g}"]
    low, high = of["scale"]
    pairs = f"the {of['n']:,} of {of['of']:,} pairs with a score above {of['above']:g}"
    return [f"alignment is over {pairs}, the top fifth of {low:g} to {high:g}"]


def described(name: str) -> str:
    """The name of a logged value in words."""
    words = {
        "dev/spearman": "embedding as it is",
        "dev/readout": "best readout of its layers, chosen on dev",
        "dev/alignment": "alignment (lower is better)",
        "dev/uniformity": "uniformity (lower is better)",
        "dev/effective_rank": "effective rank (axes in use)",
    }
    fitted, _, k = name.removeprefix("dev/whitened_on_").partition("_k")
    kind = {"dev": "dev sentences (transductive)", "corpus": "training sentences (inductive)"}
    return words.get(name) or f"whitened on {kind[fitted]}, k={k}"


def grids(scores: Mapping[str, Any], digits: int = 2, pearson: bool = False) -> list[Grid]:
    """The tables of evaluate.py's scores.json; pearson: with another of Pearson's correlation."""
    rows, headline = scores["rows"], scores["headline"]
    every: dict[str, Callable[[], Grid]] = {
        "sts": lambda: sts_grid(rows, headline, digits, "Spearman x 100"),
        "pearson": lambda: sts_grid(list(map(of_pearson, rows)), headline, digits, "Pearson x 100"),
        "transfer": lambda: accuracy_grid(rows, digits),
        "rte": lambda: rte_grid(rows, digits),
        "geometry": lambda: geometry_grid(rows),
    }
    shown = rows[0].keys() | ({"pearson"} if pearson and "sts" in rows[0] else set())
    return [grid() for kind, grid in every.items() if kind in shown]


def bounds(interval: Sequence[float] | None) -> tuple[float | None, float | None]:
    """The ends of an interval; None and None for no interval."""
    return (interval[0], interval[1]) if interval else (None, None)


def of_pearson(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row with Pearson's correlations in place of Spearman's. They have no intervals."""

    def of(scores: Mapping[str, Any]) -> dict[str, Any]:
        return {**scores, **scores["pearson"], "interval": dict.fromkeys(MEANS)}

    sts = row["sts"]
    return {**row, "sts": {"avg": of(sts["avg"]), "tasks": {name: of(t) for name, t in sts["tasks"].items()}}}


def sts_grid(rows: Sequence[Mapping[str, Any]], headline: str, digits: int, what: str) -> Grid:
    """The STS table of one system or of several. what: the correlation that it is of.

    Where no task has several subsets, the aggregations are equal and one stands for all; a single task has no
    average.
    """
    alone = len(rows) == 1
    same = not any(len(task.get("subsets", ())) > 1 for task in rows[0]["sts"]["tasks"].values())
    means = [] if same else list(MEANS) if alone else [headline]
    if alone:
        grid = sts_tasks(rows[0], means or [headline], digits, what)
    else:
        grid = sts_rows(rows, headline, digits, what if same else f"{what}, {headline}")
    sure = [CERTAINTY] if any(row["sts"]["avg"]["interval"][headline] for row in rows) else []
    return grid._replace(notes=[*grid.notes, *sure, *map(meaning, means)])


def sts_tasks(row: Mapping[str, Any], means: Sequence[str], digits: int, what: str) -> Grid:
    """The STS table of one system: a row for each task, a column for each aggregation and for remarks."""
    sts = row["sts"]

    def line(name: str, task: Mapping[str, Any]) -> list[str]:
        values = [with_half(task[mean], *bounds(task["interval"][mean]), digits) for mean in means]
        return [name, str(task.get("n", "")), *values, task.get("why", "")]

    lines = [line(name, task) for name, task in zip(short(sts["tasks"]), sts["tasks"].values(), strict=True)]
    lines += [line("average", sts["avg"])] if len(lines) > 1 else []
    headings = means if len(means) > 1 else ["score"]
    columns = ["task", "n", *headings, *([""] if any(cells[-1] for cells in lines) else [])]
    kept = [cells[: len(columns)] for cells in lines]
    title = f"{row['name']}{', ' + row['setting'] if row['setting'] else ''}: {what}"
    return Grid(title, columns, kept, right=range(1, 2 + len(means)))


def sts_rows(rows: Sequence[Mapping[str, Any]], headline: str, digits: int, what: str) -> Grid:
    """The STS table of several systems: a row for each, a column for each task, in one aggregation."""
    tasks = list(rows[0]["sts"]["tasks"])

    def cell(values: Mapping[str, Any]) -> str:
        return number(values[headline], digits)

    def scores(row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        return [*row["sts"]["tasks"].values(), *([row["sts"]["avg"]] if len(tasks) > 1 else [])]

    lines = [[row["name"], row["setting"], *map(cell, scores(row))] for row in rows]
    notes = undefined(rows)
    white = [row for row in rows if row["name"].startswith("whitened")]
    if whole := ", ".join(row["name"] for row in white if (row.get("postprocess") or {}).get("k") is None):
        notes.append(f"{whole}: all components; whitenedcse evaluate postprocess=whitening k=K keeps fewer")
    if intervals := [i for row in rows if (i := scores(row)[-1]["interval"][headline])]:
        widest = max(b - a for a, b in intervals)
        of = "average" if len(tasks) > 1 else "score"
        notes.insert(0, f"the {of}'s 95 % interval is at most ±{widest / 2:.1f}")
    columns = ["", "fitted", *short(tasks), *["average"] * (len(tasks) > 1)]
    numbers = range(2, len(columns))
    return Grid(what, columns, lines, notes, right=numbers, best=numbers)


def undefined(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Why the STS scores of these rows that are undefined are so, each reason once."""
    return list(
        dict.fromkeys(
            f"{row['name']}, {name}: {task['why']}"
            for row in rows
            for name, task in row.get("sts", {"tasks": {}})["tasks"].items()
            if task.get("why")
        )
    )


def accuracy_grid(rows: Sequence[Mapping[str, Any]], digits: int) -> Grid:
    """The table of transfer tasks: a row for each system, a column for each task."""
    tasks = list(rows[0]["transfer"]["tasks"])
    lines = []
    for row in rows:
        done = row["transfer"]["tasks"]
        cells = [with_half(done[t]["accuracy"], *bounds(done[t]["interval"]), digits) for t in tasks]
        average = with_half(row["transfer"]["avg"], *bounds(row["transfer"]["interval"]), digits)
        lines.append([row["name"], row["setting"], *cells, average])
    columns = ["", "fitted", *short(tasks), "average"]
    seconds = sum(task["seconds"] for row in rows for task in row["transfer"]["tasks"].values())
    notes = [f"{seconds:.0f} s of classifiers", CERTAINTY]
    numbers = range(2, len(columns))
    return Grid("accuracy x 100", columns, lines, notes, right=numbers, best=numbers)


def rte_grid(rows: Sequence[Mapping[str, Any]], digits: int) -> Grid:
    """The table of RTE by a threshold: accuracy, that of the larger class alone, and the confusion."""
    lines = []
    for row in rows:
        rte = row["rte"]
        (a, b), (c, d) = (list(counts.values()) for counts in rte["confusion"].values())
        accuracy = with_half(rte["accuracy"], *bounds(rte["interval"]), digits)
        lines.append(
            [row["name"], row["setting"], accuracy, number(rte["majority"]), *map(str, (a, b, c, d))]
        )
    counts = ("e as e", "e as n", "n as e", "n as n")
    notes = [
        "e: entailment, n: not; e as n: true e predicted as n, as the cosine is below 0.5",
        CERTAINTY,
    ]
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
    of = rows[0]["geometry"]
    title = f"geometry on {short([of['task']])[0]}"
    return Grid(title, columns, lines, alignment_note(of), range(2, len(columns)))


def aggregations(runs: Iterable[Run]) -> list[str]:
    """The aggregations of the runs' STS tests, each once; none where they have no such tests."""
    every = [run.scores or {} for run in runs]
    return list(dict.fromkeys(s["headline"] for s in every if any("sts" in row for row in s.get("rows", []))))


def in_brackets(words: Sequence[str]) -> str:
    """Words as an addition to a name: " (all, mean)"; "" for none."""
    return f" ({', '.join(words)})" if words else ""

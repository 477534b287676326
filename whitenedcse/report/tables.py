"""The tables of one result, of the dev set or of tests, and how numbers are written in tables."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
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


def with_half(value: float | None, interval: Sequence[float] | None) -> str:
    """A number, followed by half the width of its interval where there is one.

    >>> with_half(74.318, (73.1, 75.5)), with_half(74.318, None)
    ('74.32 ±1.20', '74.32')
    """
    if value is None or interval is None or math.isnan(interval[1]):
        return number(value)
    return f"{number(value)} ±{number((interval[1] - interval[0]) / 2)}"


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
    if any(value is None and "whitened_on_" in name for name, value in dev["values_best"].items()):
        notes.append("-: too few sentences for whitening on them to so many components")
    before, best = dev.get("before"), dev.get("best")
    if before is not None and best is not None and best < before:
        notes.append("training lowered the dev score: a lower optim.lr or other sentences may raise it")
    return Grid(f"dev set, {dev['n']} pairs, Spearman x 100", columns, rows, notes, right=(1, 2))


def meaning(mean: str) -> str:
    """A note on an aggregation, one of MEANS."""
    return f"{mean}: {MEANING[mean]}"


def alignment_note(content: Mapping[str, Any]) -> list[str]:
    """A note on the pairs that alignment is over, of `dev` or `geometry` in scores.json; none if not said."""
    of = content.get("positives")
    if not of:
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


def grids(scores: Mapping[str, Any]) -> list[Grid]:
    """The tables of evaluate.py's scores.json."""
    every = {"sts": sts_grid, "transfer": accuracy_grid, "rte": rte_grid, "geometry": geometry_grid}
    return [grid(scores) for kind, grid in every.items() if kind in scores["rows"][0]]


def sts_grid(scores: Mapping[str, Any]) -> Grid:
    """The STS table of one system, or of several; a single task has no average."""
    rows, headline = scores["rows"], scores["headline"]
    tasks = rows[0]["sts"]["tasks"].values()
    with_subsets = any(len(task.get("subsets", ())) > 1 for task in tasks)  # else all aggregations are equal
    if len(rows) == 1:
        means = list(MEANS) if with_subsets else [headline]
        grid = sts_tasks(rows[0], means)
    else:
        means = [headline]
        grid = sts_rows(rows, headline, f"Spearman x 100, {headline}" if with_subsets else "Spearman x 100")
    notes = list(grid.notes)
    if any(row["sts"]["avg"]["interval"][headline] for row in rows):
        notes.append(CERTAINTY)
    if with_subsets:
        notes += map(meaning, means)
    return grid._replace(notes=notes)


def sts_tasks(row: Mapping[str, Any], means: Sequence[str]) -> Grid:
    """The STS table of one system: a row for each task, a column for each aggregation and for remarks."""
    tasks = dict(zip(short(row["sts"]["tasks"]), row["sts"]["tasks"].values(), strict=True))
    if len(tasks) > 1:
        tasks["average"] = row["sts"]["avg"]
    columns = ["task", "n", *(means if len(means) > 1 else ["score"])]
    lines = [
        [name, str(task.get("n", "")), *(with_half(task[mean], task["interval"][mean]) for mean in means)]
        for name, task in tasks.items()
    ]
    right = range(1, len(columns))
    if any(task.get("why") for task in tasks.values()):
        columns.append("")
        lines = [[*line, task.get("why", "")] for line, task in zip(lines, tasks.values(), strict=True)]
    setting = f", {row['setting']}" if row["setting"] else ""
    return Grid(f"{row['name']}{setting}: Spearman x 100", columns, lines, right=right)


def sts_rows(rows: Sequence[Mapping[str, Any]], headline: str, title: str) -> Grid:
    """The STS table of several systems: a row for each, a column for each task, in one aggregation."""
    columns, main = ["", "fitted", *short(rows[0]["sts"]["tasks"])], "score"
    scores = [list(row["sts"]["tasks"].values()) for row in rows]
    if len(scores[0]) > 1:
        columns, main = [*columns, "average"], "average"
        scores = [[*own, row["sts"]["avg"]] for own, row in zip(scores, rows, strict=True)]
    lines = [
        [row["name"], row["setting"], *(number(score[headline]) for score in own)]
        for row, own in zip(rows, scores, strict=True)
    ]
    notes = undefined(rows)
    intervals = [own[-1]["interval"][headline] for own in scores]
    widths = [high - low for low, high in filter(None, intervals)]
    if widths:
        notes.insert(0, f"the {main}'s 95 % interval is at most ±{max(widths) / 2:.1f}")
    right = range(2, len(columns))
    return Grid(title, columns, lines, notes, right, best=right)


def undefined(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Why the STS scores of these rows that are undefined are so, each reason once."""
    said = dict[str, None]()
    for row in rows:
        for name, task in row.get("sts", {"tasks": {}})["tasks"].items():
            if task.get("why"):
                said[f"{row['name']}, {name}: {task['why']}"] = None
    return list(said)


def accuracy_grid(scores: Mapping[str, Any]) -> Grid:
    """The table of transfer tasks: a row for each system, a column for each task."""
    columns = ["", "fitted", *short(scores["rows"][0]["transfer"]["tasks"]), "average"]
    lines = []
    for row in scores["rows"]:
        done = row["transfer"]
        cells = [with_half(task["accuracy"], task["interval"]) for task in done["tasks"].values()]
        lines.append([row["name"], row["setting"], *cells, with_half(done["avg"], done["interval"])])
    numbers = range(2, len(columns))
    return Grid("accuracy x 100", columns, lines, [CERTAINTY], right=numbers, best=numbers)


def rte_grid(scores: Mapping[str, Any]) -> Grid:
    """The table of RTE by a threshold: accuracy, that of the larger class alone, and the confusion."""
    lines = []
    for row in scores["rows"]:
        rte = row["rte"]
        counts = [str(n) for predicted in rte["confusion"].values() for n in predicted.values()]
        accuracy = with_half(rte["accuracy"], rte["interval"])
        lines.append([row["name"], row["setting"], accuracy, number(rte["majority"]), *counts])
    notes = ["e: entailment, n: not; e as n: true e predicted as n, as the cosine is below 0.5", CERTAINTY]
    columns = ["", "fitted", "accuracy", "majority class", "e as e", "e as n", "n as e", "n as n"]
    return Grid("RTE dev, accuracy x 100", columns, lines, notes, range(2, len(columns)))


def geometry_grid(scores: Mapping[str, Any]) -> Grid:
    """The table of geometry: a row for each system, a column for each measure."""
    names = ("alignment", "uniformity", "mean_cosine", "isotropy", "effective_rank")
    lines = []
    for row in scores["rows"]:
        found = [row["geometry"][name] for name in names]
        cells = [number(value, 0 if value is not None and value > 9.5 else 3) for value in found]
        lines.append([row["name"], row["setting"], *cells])
    columns = ["", "fitted", *(name.replace("_", " ") for name in names)]
    of = scores["rows"][0]["geometry"]
    title = f"geometry on {short([of['task']])[0]}"
    return Grid(title, columns, lines, alignment_note(of), range(2, len(columns)))


def aggregations(runs: Iterable[Run]) -> list[str]:
    """The aggregations of the runs' STS tests, each once; none where they have no such tests."""
    tested = [run for run in runs if any("sts" in row for row in run.rows)]
    return list(dict.fromkeys(run.results["headline"] for run in tested))


def in_brackets(words: Sequence[str]) -> str:
    """Words as an addition to a name: " (all, mean)"; "" for none."""
    return f" ({', '.join(words)})" if words else ""

"""Runs of evaluate.py side by side, with tests of their differences.

Two runs are compared by a paired bootstrap of the test pairs. Runs that differ in their seed alone are a
group; groups are compared by a t test over seeds, with the variance over test pairs beside that over seeds.
"""

from __future__ import annotations

import glob
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from whitenedcse.console import Grid
from whitenedcse.evaluation.statistics import (
    Draws,
    Source,
    accuracy_draws,
    average_draws,
    half_width,
    interval,
    of_draws,
    of_mean,
    of_scores,
    over_seeds,
    task_draws,
    tested,
    with_interval,
)
from whitenedcse.evaluation.suite import seed
from whitenedcse.evaluation.tasks import short
from whitenedcse.report import sweep
from whitenedcse.report.results import bounds, difference_cells, headed, meaning, refuse_other_pairs, unlike
from whitenedcse.run import Run

# key in scores.json, the table's title, and what a test consists of
KINDS = (
    ("sts", "Spearman x 100", "pairs"),
    ("transfer", "accuracy x 100", "texts"),
    ("rte", "accuracy x 100", "pairs"),
)
READ = ("pooling", "prompt", "case", "max_length", "extra", "bf16")  # of an evaluation, by all tasks


class Group(NamedTuple):
    """Runs that differ in their seed alone, in the order of their seeds, and the name or pattern given.

    row: the name of the row that is compared; None for the first.
    """

    name: str
    runs: list[Run]
    row: str | None = None

    @property
    def seeds(self) -> list[int] | None:
        """The seeds of the runs; None where one is not known."""
        known = [seed for run in self.runs if (seed := run.results.get("seed")) is not None]
        return known if len(known) == len(self.runs) else None


class Column(NamedTuple):
    """The scores of a group: for each task and "average" those of its runs, and draws of their mean."""

    values: dict[str, list[float]]
    draws: dict[str, Draws]


def compared(names: Sequence[str], draws: int, digits: int | None) -> list[Grid]:
    """A table for each row that the runs share, by name; of the first rows where they share none.

    names: run directories, or patterns (outputs/sgw-*) for one system with several seeds. Each is tested
    against the first. RUN:ROW names the row of a run: one table then compares these rows. Raises ValueError
    where the runs were not scored on the same pairs.
    """
    folders = [(name, *with_row(name)) for name in names]
    every = [path for _, paths, _ in folders for path in paths]
    groups = [group(name, paths, every)._replace(row=row) for name, paths, row in folders]
    if len(groups) < 2:
        raise ValueError(f"compare={list(names)} is one; name two runs or more, or two patterns of runs")
    together, notes = by_row(groups)
    made = [
        (same, grid(same, kind, draws, digits))
        for same in together
        for kind in KINDS
        if all(kind[0] in row_of(run, one.row)[1] for one in same for run in one.runs)
    ]
    if not (grids := [one for _, one in made if one]):
        both = " and ".join(group.name for group in groups)
        raise ValueError(f"compare: {both} share no task with a score; give both the same tasks.names")
    notes += [f"no table of {heading(same)}: no task has a score in all" for same, one in made if not one]
    notes += [note for same in together for kind in KINDS if (note := lacking(same, kind[0]))]
    return [*grids[:-1], grids[-1]._replace(notes=[*grids[-1].notes, *notes])]


def lacking(groups: Sequence[Group], key: str) -> str:
    """A note on a kind of tasks that only some of the runs have, which no table shows; else ""."""
    rows = [row_of(run, group.row)[1] for group in groups for run in group.runs]
    having = [row[key].get("tasks", {"RTE": None}) for row in rows if key in row]
    if len(having) in (0, len(rows)):
        return ""
    names = short(list(dict.fromkeys(name for tasks in having for name in tasks)))
    return f"{heading(groups)}: left out, as not all runs have it: {', '.join(names)}"


def by_row(groups: Sequence[Group]) -> tuple[list[list[Group]], list[str]]:
    """The groups for each row to compare, and a note on rows that are not compared; see `compared`."""
    if any(one.row for one in groups):
        return [[in_full(one) for one in groups]], []
    named = [(one.name, [row["name"] for row in run.results["rows"]]) for one in groups for run in one.runs]
    every = dict.fromkeys(row for _, rows in named for row in rows)
    shared = [row for row in every if all(row in rows for _, rows in named)]
    together = [[one._replace(row=row) for one in groups] for row in shared or [None]]
    if not shared or len(shared) == len(every):
        return together, []
    left = [name for name in every if name not in shared]
    having = next(name for name, rows in named if left[0] in rows)
    pair = f"""'compare=["{groups[0].name}:{shared[0]}","{having}:{left[0]}"]'"""
    return together, [f"rows that not all runs have: {', '.join(left)}; {pair} compares such rows"]


def in_full(group: Group) -> Group:
    """The group with the whole name of its row. Raises ValueError where its rows have several names."""
    chosen = [[row_of(run, group.row)[1]] if group.row else run.results["rows"] for run in group.runs]
    if len(rows := dict.fromkeys(row["name"] for rows in chosen for row in rows)) > 1:
        cure = f"""name one too, 'compare=["{group.name}:{[*rows][-1]}","OTHER:ROW"]', with its quotes"""
        cure = cure if group.row is None else "a pattern is one system, with each seed once"
        raise ValueError(f"compare: {group.name} has the rows {', '.join(map(repr, rows))}; {cure}")
    (row,) = rows
    name = group.name if group.row is None else group.name.removesuffix(group.row) + row
    return group._replace(name=name, row=row)


def heading(groups: Sequence[Group]) -> str:
    """The name of the row of all groups, if it is one."""
    return groups[0].row or "first rows" if len({one.row for one in groups}) == 1 else "rows as named"


def with_row(name: str) -> tuple[list[Path], str | None]:
    """The directories that RUN or RUN:ROW names, and the row. Raises FileNotFoundError if there is none."""
    colons = [i for i, letter in enumerate(name) if letter == ":"]
    for place, row in [(name, ""), *((name[:i], name[i + 1 :]) for i in colons)]:
        if Path(place).exists() or glob.glob(place):
            return expanded(place), row or None
    return expanded(name), None


def expanded(name: str) -> list[Path]:
    """The directories that a name or pattern matches. Raises FileNotFoundError if none does."""
    try:
        return sweep.paths([name])
    except FileNotFoundError:
        raise FileNotFoundError(f"compare: no run matches {name}") from None


def group(name: str, paths: Sequence[Path], every: Sequence[Path]) -> Group:
    """The runs in these directories, among those of all groups. Raises ValueError for two of one seed."""
    runs = Group(name, [Run(path) for path in paths])
    if bare := next((run for run in runs.runs if "rows" not in run.results), None):
        names = [run.settings["tasks"]["names"] for run in map(Run, every) if "rows" in (run.scores or {})]
        tests = f" 'tasks.names=[{','.join(names[0])}]'" if names else ""
        cure = f"whitenedcse evaluate model={bare.path}{tests} run=NAME makes outputs/NAME to compare instead"
        raise ValueError(f"compare: {bare.path} has no tests: {cure}")
    if runs.seeds is None:
        return runs
    ordered = sorted(runs.runs, key=lambda run: run.results["seed"])
    for one, other in zip(ordered, ordered[1:], strict=False):
        if one.results["seed"] == other.results["seed"]:
            raise ValueError(
                f"compare: {name} matches two runs of seed {one.results['seed']}, {one.path} and "
                f"{other.path}; a pattern is one system, with each seed once"
            )
    return Group(name, ordered)


def row_of(run: Run, name: str | None) -> tuple[int, dict[str, Any]]:
    """The number and the content of a run's row by its name or that name's beginning; the first for None."""
    rows = run.results["rows"]
    known = [row["name"] for row in rows]
    like = [name] if name in known else [row for row in known if row.startswith(name or "")]
    if name is not None and len(like) != 1:
        found = f"{len(like)} rows that begin with" if like else "no row"
        raise ValueError(f"compare: {found} {name!r} in {run.path}; it has {', '.join(map(repr, known))}")
    return (number := known.index(like[0])), rows[number]


def grid(groups: Sequence[Group], kind: tuple[str, str, str], draws: int, digits: int | None) -> Grid | None:
    """One table: a row for each task, a column for each group and for its difference from the first.

    None where no task has a score in all groups.
    """
    key, title, items = kind
    columns = [column(group, key, draws) for group in groups]
    every = dict.fromkeys(task for c in columns for task in c.values)
    tasks = [task for task in every if all(task in c.values for c in columns)]
    if not tasks:
        return None
    rows = [(run, row_of(run, group.row)[1]) for group in groups for run in group.runs]
    runs = [run for run, _ in rows]
    fitted = [run for run, row in rows if row.get("fit") not in (None, "", "target")]
    refuse_other_pairs(runs, tasks)
    differ = unlike(runs, READ + ("classifier",) * (key == "transfer")) + unlike(fitted, ["sample"])
    columns = [averaged(c, tasks) for c in columns]
    left = [task for task in every if task not in tasks]
    tasks += ["average"] * (len(tasks) > 1)
    by_seed = [group.seeds is not None and group.seeds == groups[0].seeds for group in groups]
    lines = [[name, *cells(columns, by_seed, t, digits)] for name, t in zip(short(tasks), tasks, strict=True)]
    legend = [
        f"{i}: {group.name}{f' ({len(group.runs)} runs)' if len(group.runs) > 1 else ''}"
        for i, group in enumerate(groups, 1)
    ]
    notes = [
        *legend,
        *differ,
        *([f"left out, as not all have a score: {', '.join(left)}"] if left else []),
        *(f"{i} - 1: {manner(groups[0], other, items)}" for i, other in enumerate(groups[1:], 2)),
        *widths(groups, draws, items),
        "* p < 0.05, ** p < 0.01, not corrected for the number of tests",
    ]
    if key == "sts":
        mean = groups[0].runs[0].results["headline"]
        title, notes = f"{title}, {mean}", [*notes, meaning(mean)]
    headers = headed(len(groups))
    return Grid(f"{heading(groups)}: {title}", headers, lines, notes, range(1, len(headers)))


def manner(first: Group, other: Group, items: str) -> str:
    """In words, how a group is tested against the first one."""
    n, m = len(first.runs), len(other.runs)
    if n == m == 1:
        return f"one run each: the interval is for other test {items} and says nothing about other seeds"
    if first.seeds is not None and first.seeds == other.seeds:
        how, least = f"paired by seed, {n} seeds", n
    elif 1 in (n, m):
        many = "seeds" if (first if n > m else other).seeds else "runs"
        how, least = f"one run and {max(n, m)} {many}, as if the one varied as these do", max(n, m)
    else:
        how, least = f"not paired, {n} and {m} runs whose seeds are not the same", min(n, m)
    wide = half_width([Source(1.0, least - 1)])
    few = " (with 5 seeds 2.8): only a large difference can be seen" if least == 2 else ""
    return f"{how}; the 95 % interval over seeds is {wide:.1f} standard errors either side{few}"


def widths(groups: Sequence[Group], draws: int, items: str) -> list[str]:
    """What the intervals of the table cover."""
    note = f"95 % intervals and p: for other test {items}, by {draws:,} bootstrap draws of them"
    if max(len(group.runs) for group in groups) == 1:
        return [f"{note}, of which no p is below {2 / (draws + 1):.1g}"]
    return [f"{note}; of several runs also for other seeds, by t; the two half widths are added in squares"]


def cells(columns: Sequence[Column], by_seed: Sequence[bool], task: str, digits: int | None) -> list[str]:
    """The cells of a task's row after its name."""
    shown = []
    for values, draws in ((c.values[task], c.draws[task]) for c in columns):
        spread, items, ends = over_seeds(values), of_draws(draws), interval(draws)
        if spread.sd is not None and items is not None:
            ends = tested(spread.mean, [of_mean(values), items])[1:3]
        sd = "" if spread.sd is None else f" (sd {spread.sd:.2f})"
        shown.append(with_interval(spread.mean, *bounds(ends), digits) + sd)
    for other, same in list(zip(columns, by_seed, strict=True))[1:]:
        pair = [(one.values[task], one.draws[task]) for one in (other, columns[0])]
        shown += difference_cells(of_scores(*pair, by_seed=same), digits)
    return shown


def column(group: Group, kind: str, draws: int) -> Column:
    """Scores and draws of a group for each task."""
    by_run = [scored(run, group.row, kind, draws) for run in group.runs]
    tasks = [task for task in by_run[0] if all(task in run for run in by_run)]
    values = {task: [run[task][0] for run in by_run] for task in tasks}
    drawn = {task: average_draws({str(i): run[task][1] for i, run in enumerate(by_run)}) for task in tasks}
    return Column(values, drawn)


def averaged(one: Column, tasks: Sequence[str]) -> Column:
    """A column with the average over these tasks, which are those that all columns have."""
    average = np.mean([one.values[task] for task in tasks], axis=0).tolist()
    drawn = average_draws({task: one.draws[task] for task in tasks})
    return Column(one.values | {"average": average}, one.draws | {"average": drawn})


def scored(run: Run, row: str | None, kind: str, draws: int) -> dict[str, tuple[float, Draws]]:
    """The score of each task of a run, and its bootstrap draws; without tasks whose score is undefined."""
    number, content = row_of(run, row)
    tasks: Mapping[str, Any] = {"RTE": content["rte"]} if kind == "rte" else content[kind]["tasks"]
    out = {}
    for name, task in tasks.items():
        mean, item = run.results["headline"], run.items[f"{number}/{name}"]
        if (gold := run.items.get(f"gold/{name}")) is None:
            raise ValueError(f"{run.path}: its older items.npz lacks the labels of {name}; evaluate again")
        if kind != "sts":
            out[name] = (task["accuracy"], accuracy_draws(item, draws, seed(gold)))
        elif task[mean] is not None:
            sizes = run.items[f"sizes/{name}"].tolist()
            out[name] = (task[mean], task_draws(gold, item, sizes, draws, seed(gold))[mean])
    return out

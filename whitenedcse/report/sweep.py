"""A sweep as tables: mean and spread over seeds, and how each group differs from one of them, seed by seed.

t test of paired differences; Holm, Scand. J. Statist. 6 (1979) 65-70, over the groups tested.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from whitenedcse.durable import writing
from whitenedcse.evaluation.statistics import over_seeds
from whitenedcse.evaluation.suite import by_task
from whitenedcse.report.formats import Grid
from whitenedcse.report.groups import Group, Sweep, seed, value
from whitenedcse.report.history import Run, median

RATE = "train/sentences_per_second"
ALPHA = 0.05


class Difference(NamedTuple):
    """Mean difference over n seeds, its 95 % t interval, and the two-sided p; None where nothing varies."""

    difference: float
    low: float
    high: float
    p: float | None
    n: int


Measure = Callable[[Run], float | None]


def dev_best(run: Run) -> float | None:
    """The dev score of the best checkpoint."""
    return run.scores["dev"]["best"] if run.scores else None


def at_best(name: str) -> Measure:
    """What was logged by a name at the best checkpoint."""
    return lambda run: run.scores["dev"]["values_best"].get(name) if run.scores else None


def average_of(row: str | None) -> Measure:
    """The average over tests of a row by name, None: the first."""
    return lambda run: scored(run, row).get("average")


def rate(run: Run) -> float | None:
    """Sentences per second, the median of the run."""
    return median(run, RATE)


def rows(run: Run) -> list[str]:
    """The names of the rows that tests were judged in."""
    return [row["name"] for row in (run.scores or {}).get("rows", [])]


def scored(run: Run, name: str | None) -> dict[str, float]:
    """By task, and as "average", the score of a row; nothing where it was not judged."""
    scores = run.scores or {}
    for row in scores.get("rows", []):
        if name in (None, row["name"]):
            found = by_task(row, scores["headline"]).items()
            return {"average" if k == "avg" else k: value for k, value in found if value is not None}
    return {}


def judged_by(groups: Sequence[Group]) -> tuple[str, Measure]:
    """What groups are compared by: the tests' average where every run has one, else the dev score."""
    average = average_of(None)
    every = [run for group in groups for run in group.runs.values()]
    if all(average(run) is not None for run in every):
        return "test average", average
    return "dev best", dev_best


def values(group: Group, measure: Measure) -> dict[int, float]:
    """A measure by seed, where it is defined."""
    found = {number: measure(run) for number, run in group.runs.items()}
    return {number: value for number, value in found.items() if value is not None}


def paired_by_seed(one: Mapping[int, float], other: Mapping[int, float]) -> Difference | None:
    """One less the other, over the seeds that both have; None for fewer than two."""
    common = sorted(one.keys() & other.keys())
    if len(common) < 2:
        return None
    a, b = (np.array([scores[number] for number in common]) for scores in (one, other))
    difference, n = a - b, len(common)
    half = half_width(difference)
    mean, constant = float(difference.mean()), np.ptp(difference) < 1e-9
    return Difference(
        mean, mean - half, mean + half, None if constant else float(stats.ttest_rel(a, b).pvalue), n
    )


def half_width(sample: NDArray[np.float64]) -> float:
    """Of the 95 % t interval of the mean of n >= 2 values: (n,) -> what lies on either side."""
    n = len(sample)
    return float(stats.t.ppf(1 - ALPHA / 2, n - 1) * sample.std(ddof=1) / np.sqrt(n))


def holm(p: Sequence[float]) -> list[float]:
    """Each p corrected for how many there are, in the given order."""
    order = np.argsort(p, kind="stable")
    scaled = np.asarray(p)[order] * np.arange(len(p), 0, -1)
    corrected = np.empty(len(p))
    corrected[order] = np.minimum(np.maximum.accumulate(scaled), 1)
    return corrected.tolist()


def reference(sweep: Sweep, against: str | None) -> Group:
    """The group that the others are compared with. Raises ValueError for a label that no group has."""
    if not sweep.groups:
        raise ValueError(
            f"none of {len(sweep.runs)} runs is finished: {sweep.runs[0].path} has no scores.json"
        )
    for group in sweep.groups:
        if against in (None, group.label):
            return group
    raise ValueError(
        f"--against {against!r} is no group; they are {', '.join(repr(g.label) for g in sweep.groups)}"
    )


def spread(found: Mapping[int, float], digits: int = 2) -> str:
    """Mean and standard deviation as text, a dash of nothing."""
    if not found:
        return "-"
    over = over_seeds(list(found.values()))
    return f"{over.mean:z.{digits}f}" + ("" if over.sd is None else f" ± {over.sd:.{digits}f}")


def comparison(sweep: Sweep, against: str | None = None) -> list[Grid]:
    """How groups differ, what their spaces are like, and where tests were judged their means by task."""
    first = reference(sweep, against)
    every = [run for group in sweep.groups for run in group.runs.values()]
    tasks = dict.fromkeys(task for run in every for task in scored(run, None))
    after = dict.fromkeys(name for run in every for name in rows(run)[1:])
    scores = {"test average": average_of(None)} if tasks else {}
    scores |= {name: average_of(name) for name in after} | {"dev best": dev_best}
    what, measure = judged_by(sweep.groups)
    tested, notes = differences(sweep.groups, first, what, measure)
    lines = [
        [*line, *tested[group.label]]
        for line, group in zip(means(sweep.groups, scores), sweep.groups, strict=True)
    ]
    columns = ["", "seeds", *scores, "difference", "95 % interval", "p (Holm)"]
    notes += ["± standard deviation over seeds", *sweep.notes]
    main = Grid("groups of runs, scores x 100", columns, lines, notes, range(1, len(columns)))
    return [main, shape(sweep.groups), *([by_tasks(sweep.groups, list(tasks))] if tasks else [])]


def means(groups: Sequence[Group], measures: Mapping[str, Measure], digits: int = 2) -> list[list[str]]:
    """A line a group: label, seeds, and mean and spread of each measure."""
    return [
        [group.label, str(len(group.runs)), *(spread(values(group, m), digits) for m in measures.values())]
        for group in groups
    ]


def shape(groups: Sequence[Group]) -> Grid:
    """The embedding spaces at the best checkpoints, and how fast groups trained; what was logged of it."""
    names = ("alignment", "uniformity", "effective rank")
    measures = {name: at_best(f"dev/{name.replace(' ', '_')}") for name in names}
    measures = {name: m for name, m in measures.items() if any(values(group, m) for group in groups)}
    lines, columns = means(groups, measures, 3), ["", "seeds", *measures]
    fast = [list(values(group, rate).values()) for group in groups]
    if any(fast):
        lines = [[*line, f"{np.median(f):,.0f}" if f else "-"] for line, f in zip(lines, fast, strict=True)]
        columns.append("sentences/s (median)")
    return Grid("dev embeddings at the best checkpoint", columns, lines, right=range(1, len(columns)))


def differences(
    groups: Sequence[Group], first: Group, what: str, measure: Measure
) -> tuple[dict[str, list[str]], list[str]]:
    """By group, the cells of its difference from the first one; and what to say of them."""
    scores = {group.label: values(group, measure) for group in groups}
    others = [label for label in scores if label != first.label]
    found = {label: paired_by_seed(scores[label], scores[first.label]) for label in others}
    tested = {label: test.p for label, test in found.items() if test and test.p is not None}
    p = dict(zip(tested, holm(list(tested.values())), strict=True))
    cells = {first.label: ["", "", ""]}
    notes = []
    if others:
        holms = f", p corrected for {len(p)} by Holm's method" if p else ""
        notes.append(
            f"difference of the {what} from {first.label!r}, paired by seed; t interval and test{holms}"
        )
    for label in others:
        test, missing = found[label], sorted(scores[label].keys() ^ scores[first.label].keys())
        if missing:
            notes.append(f"{label}: seeds {', '.join(map(str, missing))} have no partner and are not paired")
        if test is None:
            cells[label] = ["-", "-", "-"]
            continue
        interval = f"{test.low:+z.2f} .. {test.high:+z.2f}"
        cells[label] = [f"{test.difference:+z.2f}", interval, f"{p[label]:.2g}" if label in p else "-"]
    return cells, notes


def by_tasks(groups: Sequence[Group], tasks: Sequence[str]) -> Grid:
    """A row a group, a column a task: means of the first row."""

    def score(task: str) -> Measure:
        return lambda run: scored(run, None).get(task)

    lines = [[name, *cells] for name, _, *cells in means(groups, {task: score(task) for task in tasks})]
    return Grid("tests by task, x 100", ["", *tasks], lines, right=range(1, len(tasks) + 1))


def write_csv(sweep: Sweep, path: Path) -> None:
    """seeds.csv: a row a run, finished or not; directories as seen from the file."""
    lines = [dict(cells(run, sweep.differing, path.parent)) for run in sweep.runs]
    longest_first = sorted(lines, key=len, reverse=True)  # an unfinished run has no tests
    columns = dict.fromkeys(name for line in longest_first for name in line)
    with writing(path, "w") as file:
        writer = csv.DictWriter(file, list(columns), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)


def cells(run: Run, differing: Sequence[str], folder: Path) -> Iterator[tuple[str, Any]]:
    """A line of seeds.csv; scores as the run has them, with all their digits."""
    yield from (("system", run.facts.get("system")), ("seed", seed(run)))
    yield from ((name, value(run, name)) for name in differing)
    yield from (("finished", "yes" if run.scores else "no"), ("dev_best", dev_best(run)))
    yield ("dev_best_step", run.scores["dev"]["best_step"] if run.scores else None)
    for row in rows(run):
        yield from ((f"{row}: {task}", score) for task, score in scored(run, row).items())
    for name in ("alignment", "uniformity", "effective_rank"):
        yield name, at_best(f"dev/{name}")(run)
    yield from (("sentences_per_second", rate(run)), ("commit", run.facts.get("commit")))
    yield "run", os.path.relpath(run.path, folder)

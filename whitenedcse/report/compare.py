"""A against B over seeds: differences of groups of runs, tested and said in words; tables of sweeps and runs.

Differences are paired by the seeds that both groups have, where these are two or more, and tested by t; with
the scores of single test pairs also over other pairs, by the bootstrap. A sweep's p are corrected by Holm.
"""

from __future__ import annotations

import glob
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from whitenedcse.console import Grid
from whitenedcse.evaluation.statistics import (
    ALPHA,
    Comparison,
    Draws,
    Source,
    accuracy_draws,
    average_draws,
    half_width,
    holm,
    interval,
    of_difference,
    of_draws,
    of_mean,
    over_seeds,
    paired,
    quantile,
    task_draws,
    tested,
)
from whitenedcse.evaluation.tasks import short
from whitenedcse.report import sweep as sweeps
from whitenedcse.report.sweep import (
    Group,
    Measure,
    Sweep,
    at_best,
    dev_before,
    dev_best,
    rate,
    scored,
    shared,
    task_of,
    texts,
    values,
    with_units,
)
from whitenedcse.report.tables import aggregations, bounds, in_brackets, meaning, undefined, with_half
from whitenedcse.run import Run

DEV = "monitor.dev"
MANY = 12  # groups, above which the chart of a terminal has too many lines
POWER = 0.8  # of studies that are to show a difference
MARKS = ((0.01, "**"), (0.05, "*"))
KINDS = (  # key in scores.json, the table's title, and what a test consists of
    ("sts", "Spearman x 100", "pairs"),
    ("transfer", "accuracy x 100", "texts"),
    ("rte", "accuracy x 100", "pairs"),
)
READ = ("pooling", "prompt", "case", "max_length", "extra", "bf16")  # of an evaluation, by all tasks


class Scores(NamedTuple):
    """The scores of a group by seed and, where the scores of single test pairs are known, draws by seed."""

    values: Mapping[Any, float]
    draws: Mapping[Any, Draws] | None = None


class Difference(NamedTuple):
    """The difference of a group from the first, tested, its p as corrected, and the scores of both."""

    label: str
    test: Comparison
    p: float | None
    scores: tuple[Scores, Scores]

    @property
    def apart(self) -> list[float]:
        """The differences by seed, of the seeds that both groups have."""
        one, other = (scores.values for scores in self.scores)
        return [one[number] - other[number] for number in common(one, other)]


class Report(NamedTuple):
    """A verdict in words, the tables below it, and the differences that it speaks of, with their name."""

    verdict: list[str]
    grids: list[Grid]
    differences: list[Difference]
    what: str = ""

    @property
    def parts(self) -> list[str | Grid]:
        """All that a terminal shows, in its order."""
        return [*self.lines, *self.grids]

    @property
    def lines(self) -> list[str]:
        """The verdict and, of a few groups, a chart of their differences, for a terminal."""
        return [*self.verdict, *(chart(self.differences) if len(self.differences) <= MANY else [])]


def common(one: Mapping[Any, float], other: Mapping[Any, float]) -> list[int]:
    """The seeds that both groups have."""
    return [number for number in one if number in other and isinstance(number, int)]


def difference(one: Scores, other: Scores) -> Comparison | None:
    """The mean score of a group less that of another, tested; None where draws are undefined too often.

    Without an interval for two single scores whose draws are not known.
    """
    both = common(one.values, other.values)
    used = [both if len(both) > 1 else list(each.values) for each in (one, other)]
    a, b = ([each.values[s] for s in seeds] for each, seeds in zip((one, other), used, strict=True))
    single = len(a) == len(b) == 1
    apart = float(np.subtract(a, b).mean() if len(both) > 1 else np.mean(a) - np.mean(b))
    if one.draws is None or other.draws is None:
        if single:
            return Comparison(apart, math.nan, math.nan, None)
        return tested(apart, of_difference(a, b, paired=len(both) > 1))
    x, y = (
        average_draws({str(s): (each.draws or {})[s] for s in seeds})
        for each, seeds in zip((one, other), used, strict=True)
    )
    if single:
        return paired(x, y, apart)
    items = of_draws(x - y)
    return None if items is None else tested(apart, [*of_difference(a, b, paired=len(both) > 1), items])


def paired_by_seed(one: Mapping[int, float], other: Mapping[int, float]) -> Comparison | None:
    """The difference one - other over the seeds that both have; None for fewer than two such seeds."""
    return difference(Scores(one), Scores(other)) if len(common(one, other)) > 1 else None


def seeds_needed(apart: Sequence[float], tests: int = 1) -> int | None:
    """How many seeds would show a difference such as that of these pairs in four of five studies, up to 999.

    The difference and its spread are taken as they are, the level as Bonferroni's for so many tests.

    >>> seeds_needed([0.9, 1.0, 1.1]), seeds_needed([-1.0, 1.2])
    (2, None)
    """
    mean, variance = abs(float(np.mean(apart))), float(np.var(apart, ddof=1))
    for n in range(2, 1000):
        error = math.sqrt(variance / n)
        if (quantile(1 - ALPHA / (2 * tests), n - 1) + quantile(POWER, n - 1)) * error <= mean:
            return n
    return None


def verdict(first: str, what: str, found: Sequence[Difference], mark: float = ALPHA) -> list[str]:
    """In words, which groups are better or worse than the first, by how much, and what is not shown."""
    shown = [d for d in found if d.p is not None and d.p < mark]
    lines = []
    for word, sign in (("better", 1), ("worse", -1)):
        some = sorted(
            (d for d in shown if sign * d.test.difference > 0), key=lambda d: -abs(d.test.difference)
        )
        if some:
            lines.append(f"{word} than {first} by {what}: {'; '.join(map(sized, some))}")
    rest = [f"{sized(d)}, {lacking_seeds(d, len(found))}" for d in found if d not in shown]
    if rest:
        lines.append(f"not shown to differ from {first} by {what}: {'; '.join(rest)}")
    return lines


def sized(d: Difference) -> str:
    """A difference as text, with its interval and p where there are some."""
    if math.isnan(d.test.low):
        return f"{d.label} {d.test.difference:+z.2f}"
    p = "" if d.p is None else f", p {d.p:.2g}"
    return f"{d.label} {d.test.difference:+z.2f} ({d.test.low:+z.2f} .. {d.test.high:+z.2f}{p})"


def lacking_seeds(d: Difference, tests: int) -> str:
    """Why a difference is not shown: how many seeds there are, and how many would show it."""
    n = len(d.apart)
    if min(len(scores.values) for scores in d.scores) == 1:
        return "with one seed, which says nothing of others: train more, as by seed=1,2,3,4,5"
    if n < 2:
        return "seeds that are not the same in both"
    many = seeds_needed(d.apart, tests)
    if many is None or many > n:
        few = "by a rough guess from two " if n == 2 else ""
        return f"with {n} seeds; about {many or '1,000 or more'} would {few}show a difference of this size"
    return f"with {n} seeds"


def chart(found: Sequence[Difference], width: int = 61) -> list[str]:
    """The differences with their intervals as lines of text: a dot in brackets, | at zero."""
    known = [d for d in found if not math.isnan(d.test.low)]
    if not known:
        return []
    low, high = min(0.0, *(d.test.low for d in known)), max(0.0, *(d.test.high for d in known))
    step = (high - low) / (width - 1) or 1.0
    lines = []
    for d in known:
        left, middle, right, zero = (
            round((x - low) / step) for x in (d.test.low, d.test.difference, d.test.high, 0.0)
        )
        cells = ["─" if left <= i <= right else " " for i in range(width)]
        cells[zero] = "|"
        cells[left], cells[right], cells[middle] = "[", "]", "●"
        lines.append(f"  {''.join(cells)} {d.label}")
    return lines


def reference(sweep: Sweep, against: str | None) -> Group:
    """The group that the others are compared with: the first, or the one with the label `against`.

    Raises ValueError for a label that no group has, and where no run is finished.
    """
    if not sweep.groups:
        where = sweep.runs[0].path
        raise ValueError(f"none of {len(sweep.runs)} runs is finished: {where} has no scores.json")
    for group in sweep.groups:
        if against in (None, group.label):
            return group
    known = ", ".join(repr(group.label) for group in sweep.groups)
    raise ValueError(f"--against {against!r} is no group; they are {known}")


def spread(scores: Mapping[Any, float], digits: int = 2) -> str:
    """Mean and standard deviation of values by seed, as text; "-" for no values."""
    if not scores:
        return "-"
    over = over_seeds(list(scores.values()))
    return f"{over.mean:z.{digits}f}" + ("" if over.sd is None else f" ± {over.sd:.{digits}f}")


def comparison(sweep: Sweep, against: str | None = None) -> Report:
    """What a sweep shows: groups, their differences from one, the untouched encoder, tests, geometry."""
    first, every = reference(sweep, against), sweep.finished
    tasks = list(dict.fromkeys(task for run in every for task in scored(run, None)))
    after = dict.fromkeys(name for run in every for name in sweeps.rows(run)[1:])
    measures: dict[str, Measure] = {"test average": task_of("average")} if tasks else {}
    measures |= {name: task_of("average", name) for name in after}
    measures |= {"dev before": dev_before, "dev best": dev_best}
    what, measure = main_score(sweep)
    alike = same_dev(every)
    found = differences(sweep, first, measure) if alike or measure is not dev_best else []
    cells = {d.label: difference_cells_of(d) for d in found}
    cells |= {first.label: ["", "", ""]}
    lines = [[*means(group, measures), *cells.get(group.label, "---")] for group in sweep.groups]
    differs = [f"difference ({what.partition(' (')[0]})", "95 % interval", "p (Holm)"]
    columns = ["", "seeds", *measures, *(differs if len(lines) > 1 else [])]
    lines = [line[: len(columns)] for line in lines]
    notes = [*explained(first, what, found), *sources(sweep, tasks, alike=alike, measure=measure)]
    best = [i for i, name in enumerate(columns) if name in measures and name != "dev before"]
    main = Grid("groups of runs, scores x 100", columns, lines, notes, range(1, len(columns)), best=best)
    alone = [task for task in tasks if len(tasks) > 2 or task != "average"]  # of one task it is the score
    grids = [main, *untouched(sweep, alike), *shape(sweep, alike)]
    grids += [by_tasks(sweep, alone), *differences_by_task(sweep, first, alone)] if alone else []
    return Report(verdict(first.label, what, found), grids, found, what)


def explained(first: Group, what: str, found: Sequence[Difference]) -> list[str]:
    """The notes on differences: how they are tested, and which seeds are not."""
    if not found:
        return []
    count = sum(d.p is not None for d in found)
    corrected = f", p corrected for {count} by Holm's method" if count else ""
    notes = [f"difference of the {what} from {first.label!r}, paired by seed; t test over seeds{corrected}"]
    for d in found:
        one, other = (scores.values for scores in d.scores)
        missing = sorted(one.keys() ^ other.keys())
        if len(d.apart) > 1 and missing:
            notes.append(
                f"{d.label}: seeds {', '.join(map(str, missing))} have no partner and are not paired"
            )
        elif len(d.apart) < 2 and not math.isnan(d.test.low):
            notes.append(f"{d.label}: not paired, as fewer than two seeds are in both")
    single = any(math.isnan(d.test.low) for d in found)
    return notes + ["-: a test needs two seeds or more, as by seed=1,2"] * single


def sources(sweep: Sweep, tasks: Sequence[str], *, alike: bool, measure: Measure) -> list[str]:
    """The notes on what the scores of a sweep are of, and which cannot be compared."""
    every = sweep.finished
    notes = [
        "± standard deviation over seeds",
        f"dev: Spearman before training and at best, {meaning('all')}",
    ]
    if not alike:
        notes.append("not all runs have the same dev set: dev scores and embeddings cannot be compared")
    if tasks and measure is dev_best and alike:
        notes += ["the difference is that of dev best, because not all runs have scores of the same tests"]
    notes += [f"tests: Spearman, {meaning(mean)}" for mean in aggregations(every)]
    notes += undefined(row for run in every for row in (run.scores or {}).get("rows", []))
    if not same_tests(every):
        notes.append("not all runs have scores of the same tests: averages differ by these")
    return [*notes, *sweep.notes]


def same_content(runs: Sequence[Run], beginning: str) -> bool:
    """Whether the files in settings with this beginning had the same content in all runs that noted it."""
    noted = {item for run in runs for item in run.facts.get("content", {}).items()}
    found = [name for name, _ in noted if name.startswith(beginning)]
    return len(found) == len(set(found))


def same_tests(runs: Sequence[Run]) -> bool:
    """Whether all runs that were tested have scores of the same tests, so that averages can be compared."""
    names = {frozenset(scored(run, None)) for run in runs} - {frozenset()}
    return len(names) < 2 and same_content(runs, "tasks.")


def same_dev(runs: Sequence[Run]) -> bool:
    """Whether the dev scores of all runs are of the same pairs, by content or else by the names of files."""
    noted = all(DEV in run.facts.get("content", {}) for run in runs)
    return same_content(runs, DEV) and (noted or len({texts(run).get(DEV) for run in runs}) < 2)


def main_score(sweep: Sweep) -> tuple[str, Measure]:
    """The name, with the aggregation, and the measure by which groups are compared.

    It is the test average where every run has one, of the same tasks, else the dev score.
    """
    average, every = task_of("average"), sweep.finished
    if all(average(run) is not None for run in every) and same_tests(every):
        return f"test average{in_brackets(aggregations(every))}", average
    return "dev best (all)", dev_best


def means(group: Group, measures: Mapping[str, Measure], digits: int = 2) -> list[str]:
    """The cells of a group: label, seeds, mean and deviation of each measure."""
    return [
        group.label,
        str(len(group.runs)),
        *(spread(values(group, m), digits) for m in measures.values()),
    ]


def differences(sweep: Sweep, first: Group, measure: Measure) -> list[Difference]:
    """The difference of each other group from the first, p corrected for their number by Holm."""
    base, found = Scores(values(first, measure)), []
    for group in sweep.groups:
        own = Scores(values(group, measure))
        if group is not first and own.values and base.values:
            if (test := difference(own, base)) is not None:
                found.append(Difference(group.label, test, test.p, (own, base)))
    corrected = iter(holm([d.p for d in found if d.p is not None]))
    return [d if d.p is None else d._replace(p=next(corrected)) for d in found]


def difference_cells_of(d: Difference) -> list[str]:
    """The cells of a difference: its value, interval and corrected p; "-" for what is not known."""
    low, high = d.test.low, d.test.high
    ends = "-" if math.isnan(low) else f"{low:+z.2f} .. {high:+z.2f}"
    return [f"{d.test.difference:+z.2f}", ends, "-" if d.p is None else f"{d.p:.2g}"]


def untouched(sweep: Sweep, alike: bool) -> list[Grid]:
    """The table of dev scores as they are and whitened, the best k of each: before training, and at best."""

    def best(moment: str, fitted: str) -> Measure:
        def of(run: Run) -> float | None:
            found = (run.scores or {}).get("dev", {}).get(moment, {})
            own = [v for n, v in found.items() if n.startswith(f"dev/{fitted}") and v is not None]
            return max(own, default=None)

        return of

    ways = {
        "as it is": "spearman",
        "whitened (dev)": "whitened_on_dev",
        "whitened (training)": "whitened_on_corpus",
    }
    encoders: dict[str, dict[Any, Run]] = {}
    for run in sweep.finished:
        path = (run.settings.get("encoder") or {}).get("path") or "encoder of random weights"
        encoders.setdefault(str(path), {})[run.path] = run
    before = {name: best("values_before", fitted) for name, fitted in ways.items()}
    after = {name: best("values_best", fitted) for name, fitted in ways.items()}
    lines = [means(Group(f"untouched: {Path(p).name}", runs), before) for p, runs in encoders.items()]
    lines += [means(group, after) for group in sweep.groups]
    kept = [0, *(i for i in range(2, 5) if any(line[i] != "-" for line in lines))]
    if not alike or len(kept) < 3:
        return []
    cells = [[line[i] for i in kept] for line in lines]
    columns = ["", *([*ways][i - 2] for i in kept[1:])]
    notes = ["the highest of all k; (dev) is fitted to the dev sentences themselves"]
    title = "dev Spearman x 100 of the encoder before training, and of the best checkpoints"
    return [Grid(title, columns, cells, notes, range(1, len(columns)), best=range(1, len(columns)))]


def shape(sweep: Sweep, alike: bool) -> list[Grid]:
    """The table of the groups' geometry at the best checkpoint and of training speed, as far as logged.

    alike: whether all have the same dev set, as measures of other sentences say nothing about a difference.
    """
    names = ("alignment", "uniformity", "effective rank") if alike else ()
    measures = {name: at_best(f"dev/{name.replace(' ', '_')}") for name in names}
    measures = {n: m for n, m in measures.items() if any(values(group, m) for group in sweep.groups)}
    lines, columns = [means(group, measures, 3) for group in sweep.groups], ["", "seeds", *measures]
    fast = [list(values(group, rate).values()) for group in sweep.groups]
    if any(fast):
        lines = [[*line, f"{np.median(f):,.0f}" if f else "-"] for line, f in zip(lines, fast, strict=True)]
        columns.append("sentences/s (median)")
    many = sum(map(shared, sweep.finished))
    notes = [f"{many} runs shared their machine with other work: their speed is not shown"] * bool(many)
    if any(fast) and any(sweeps.LOAD not in run.series for run in sweep.finished):
        notes.append("sentences/s: not all runs noted whether they had the machine to themselves")
    title = "dev embeddings at the best checkpoint" if measures else "speed of training"
    return [Grid(title, columns, lines, notes, range(1, len(columns)))] if columns[2:] else []


def by_tasks(sweep: Sweep, tasks: Sequence[str]) -> Grid:
    """The table of mean test scores: a row for each group, a column for each task, from the first rows."""
    measures = {task: task_of(task) for task in tasks}
    lines = [[name, *cells] for name, _, *cells in (means(group, measures) for group in sweep.groups)]
    title = f"tests by task{in_brackets(aggregations(sweep.finished))}, x 100"
    columns = ["", *with_units(sweep.finished, tasks)]
    return Grid(title, columns, lines, right=range(1, len(columns)), best=range(1, len(columns)))


def differences_by_task(sweep: Sweep, first: Group, tasks: Sequence[str]) -> list[Grid]:
    """The table of each task's differences from the first group, each with its p; none for a single task."""
    found = {task: {d.label: d for d in differences(sweep, first, task_of(task))} for task in tasks}
    others = [group.label for group in sweep.groups if group is not first]
    if len(tasks) < 2 or not any(d.p is not None for by in found.values() for d in by.values()):
        return []

    def cell(d: Difference | None) -> str:
        if d is None:
            return "-"
        return f"{d.test.difference:+z.2f}" + ("" if d.test.p is None else f" (p {d.test.p:.2g})")

    lines = [[label, *(cell(found[task].get(label)) for task in tasks)] for label in others]
    title = f"difference from {first.label} by task, with the p of its t test over seeds"
    notes = ["p is not corrected for the number of tasks and groups"]
    columns = ["", *with_units(sweep.finished, tasks)]
    return [Grid(title, columns, lines, notes, range(1, len(columns)))]


# runs of evaluate.py, and those of train.py with tests, by the scores of single test pairs


def compared(names: Sequence[str], draws: int, digits: int = 2) -> Report:
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
    every_kind = [
        (same, of_kind(same, kind, draws, digits))
        for same in together
        for kind in KINDS
        if all(kind[0] in row_of(run, one.row)[1] for one in same for run in one.runs.values())
    ]
    made = [(same, report) for same, report in every_kind if report]
    if not made:
        both = " and ".join(group.label for group in groups)
        raise ValueError(f"compare: {both} share no task with a score; give both the same tasks.names")
    undone = [heading(same) for same, report in every_kind if not report]
    notes += [f"no table of {name}: no task has a score in all" for name in undone]
    notes += [note for same in together for kind in KINDS if (note := lacking(same, kind[0]))]
    grids = [grid for _, report in made for grid in report.grids]
    grids[-1] = grids[-1]._replace(notes=[*grids[-1].notes, *notes])
    several = len(made) > 1
    lines = [
        f"{heading(same)}: {line}" if several else line for same, report in made for line in report.verdict
    ]
    return Report(lines, grids, made[0][1].differences, made[0][1].what)


def lacking(groups: Sequence[Group], key: str) -> str:
    """A note on a kind of tasks that only some of the runs have, which no table shows; else ""."""
    rows = [row_of(run, group.row)[1] for group in groups for run in group.runs.values()]
    having = [row[key].get("tasks", {"RTE": None}) for row in rows if key in row]
    if len(having) in (0, len(rows)):
        return ""
    names = short(list(dict.fromkeys(name for tasks in having for name in tasks)))
    return f"{heading(groups)}: left out, as not all runs have it: {', '.join(names)}"


def by_row(groups: Sequence[Group]) -> tuple[list[list[Group]], list[str]]:
    """The groups for each row to compare, and a note on rows that are not compared; see `compared`."""
    if any(one.row for one in groups):
        return [[in_full(one) for one in groups]], []
    named = [(one.label, sweeps.rows(run)) for one in groups for run in one.runs.values()]
    every = dict.fromkeys(row for _, rows in named for row in rows)
    shared = [row for row in every if all(row in rows for _, rows in named)]
    together = [[one._replace(row=row) for one in groups] for row in shared] or [list(groups)]
    if not shared or len(shared) == len(every):
        return together, []
    left = [name for name in every if name not in shared]
    having = next(name for name, rows in named if left[0] in rows)
    pair = f"""'compare=["{groups[0].label}:{shared[0]}","{having}:{left[0]}"]'"""
    return together, [f"rows that not all runs have: {', '.join(left)}; {pair} compares such rows"]


def in_full(group: Group) -> Group:
    """The group with the whole name of its row. Raises ValueError where its rows have several names."""
    runs = group.runs.values()
    chosen = [[row_of(run, group.row)[1]] if group.row else run.results["rows"] for run in runs]
    if len(rows := dict.fromkeys(row["name"] for rows in chosen for row in rows)) > 1:
        cure = f"""name one too, 'compare=["{group.label}:{[*rows][-1]}","OTHER:ROW"]', with its quotes"""
        cure = cure if group.row is None else "a pattern is one system, with each seed once"
        raise ValueError(f"compare: {group.label} has the rows {', '.join(map(repr, rows))}; {cure}")
    (row,) = rows
    label = group.label if group.row is None else group.label.removesuffix(group.row) + row
    return group._replace(label=label, row=row)


def heading(groups: Sequence[Group]) -> str:
    """The name of the row of all groups, if it is one."""
    return groups[0].row or "first rows" if len({one.row for one in groups}) == 1 else "rows as named"


def with_row(name: str) -> tuple[list[Path], str | None]:
    """The directories that RUN or RUN:ROW names, and the row. Raises FileNotFoundError if there is none."""
    colons = [i for i, letter in enumerate(name) if letter == ":"]
    for place, row in [(name, ""), *((name[:i], name[i + 1 :]) for i in colons)]:
        if Path(place).exists() or glob.glob(place):
            return sweeps.paths([place]), row or None
    raise FileNotFoundError(f"compare: no run matches {name}")


def group(name: str, paths: Sequence[Path], every: Sequence[Path]) -> Group:
    """The runs in these directories, among those of all groups. Raises ValueError for two of one seed."""
    runs: dict[Any, Run] = {}
    for run in map(Run, paths):
        if "rows" not in run.results:
            names = [r.settings["tasks"]["names"] for r in map(Run, every) if "rows" in (r.scores or {})]
            tests = f" 'tasks.names=[{','.join(names[0])}]'" if names else ""
            cure = (
                f"whitenedcse evaluate model={run.path}{tests} run=NAME makes outputs/NAME to compare instead"
            )
            raise ValueError(f"compare: {run.path} has no tests: {cure}")
        number = run.results.get("seed")
        key = str(run.path) if number is None else number
        if key in runs and number is not None:
            raise ValueError(
                f"compare: {name} matches two runs of seed {number}, {runs[key].path} and {run.path}; "
                "a pattern is one system, with each seed once"
            )
        runs[key] = run
    ordered = sorted(runs.items(), key=lambda item: (isinstance(item[0], str), item[0]))
    return Group(name, dict(ordered))


def row_of(run: Run, name: str | None) -> tuple[int, dict[str, Any]]:
    """The number and the content of a run's row by its name or that name's beginning; the first for None."""
    rows = run.results["rows"]
    known = [row["name"] for row in rows]
    like = [name] if name in known else [row for row in known if row.startswith(name or "")]
    if name is not None and len(like) != 1:
        found = f"{len(like)} rows that begin with" if like else "no row"
        raise ValueError(f"compare: {found} {name!r} in {run.path}; it has {', '.join(map(repr, known))}")
    return (number := known.index(like[0])), rows[number]


def of_kind(groups: Sequence[Group], kind: tuple[str, str, str], draws: int, digits: int) -> Report | None:
    """A verdict and a table: a row for each task, a column for each group and for its difference.

    None where no task has a score in all groups.
    """
    key, title, items = kind
    columns = [column(group, key, draws) for group in groups]
    every = dict.fromkeys(task for c in columns for task in c)
    tasks = [task for task in every if all(task in c for c in columns)]
    if not tasks:
        return None
    rows = [(run, row_of(run, group.row)[1]) for group in groups for run in group.runs.values()]
    runs = [run for run, _ in rows]
    check_pairs(runs, tasks)
    fitted = [run for run, row in rows if row.get("fit") not in (None, "", "target")]
    notes = [
        f"{i}: {group.label}{f' ({len(group.runs)} runs)' if len(group.runs) > 1 else ''}"
        for i, group in enumerate(groups, 1)
    ]
    notes += unlike(runs, READ + ("classifier",) * (key == "transfer")) + unlike(fitted, ["sample"])
    if left := [task for task in every if task not in tasks]:
        notes.append(f"left out, as not all have a score: {', '.join(left)}")
    notes += [f"{i} - 1: {manner(groups[0], other, items)}" for i, other in enumerate(groups[1:], 2)]
    notes += [covered(groups, draws, items)]
    notes += ["* p < 0.05, ** p < 0.01, not corrected for the number of tests"]
    columns = [averaged(c, tasks) for c in columns]
    tasks += ["average"] * (len(tasks) > 1)
    lines = [
        [name, *cells([c[t] for c in columns], digits)] for name, t in zip(short(tasks), tasks, strict=True)
    ]
    if key == "sts":
        mean = runs[0].results["headline"]
        title, notes = f"{title}, {mean}", [*notes, meaning(mean)]
    tests = [f"{what} {i} - 1".strip() for i in range(2, len(groups) + 1) for what in ("", "p of")]
    headers = ["task", *map(str, range(1, len(groups) + 1)), *tests]
    grid = Grid(f"{heading(groups)}: {title}", headers, lines, notes, range(1, len(headers)))
    last = [c[tasks[-1]] for c in columns]
    found = [
        Difference(group.label, test, test.p, (own, last[0]))
        for group, own in zip(groups[1:], last[1:], strict=True)
        if (test := difference(own, last[0]))
    ]
    what = "the average" if tasks[-1] == "average" else short(tasks)[0]
    return Report(verdict(groups[0].label, f"{what} of {items}", found), [grid], found, what)


def manner(first: Group, other: Group, items: str) -> str:
    """In words, how a group is tested against the first one."""
    n, m, both = len(first.runs), len(other.runs), len(common_seeds(first, other))
    if n == m == 1:
        return f"one run each: the interval is for other test {items} and says nothing about other seeds"
    if both > 1:
        how, least = f"paired by seed, {both} seeds", both
    elif 1 in (n, m):
        known = all(isinstance(number, int) for number in (first if n > m else other).runs)
        many = "seeds" if known else "runs"
        how, least = f"one run and {max(n, m)} {many}, as if the one varied as these do", max(n, m)
    else:
        how, least = f"not paired, {n} and {m} runs whose seeds are not the same", min(n, m)
    wide = half_width([Source(1.0, least - 1)])
    few = " (with 5 seeds 2.8): only a large difference can be seen" if least == 2 else ""
    return f"{how}; the 95 % interval over seeds is {wide:.1f} standard errors either side{few}"


def common_seeds(one: Group, other: Group) -> list[int]:
    """The seeds that two groups have."""
    return [number for number in one.runs if number in other.runs and isinstance(number, int)]


def covered(groups: Sequence[Group], draws: int, items: str) -> str:
    """What the intervals of the table cover."""
    note = f"95 % intervals and p: for other test {items}, by {draws:,} bootstrap draws of them"
    if max(len(group.runs) for group in groups) == 1:
        return f"{note}, of which no p is below {2 / (draws + 1):.1g}"
    return f"{note}; of several runs also for other seeds, by t; the two half widths are added in squares"


def cells(columns: Sequence[Scores], digits: int) -> list[str]:
    """The cells of a task's row after its name: each group's score, then each difference and its p."""
    shown = []
    for each in columns:
        found, drawn = list(each.values.values()), average_draws({str(s): d for s, d in drawn_of(each)})
        over, items, ends = over_seeds(found), of_draws(drawn), interval(drawn)
        if over.sd is not None and items is not None:
            ends = tested(over.mean, [of_mean(found), items])[1:3]
        sd = "" if over.sd is None else f" (sd {over.sd:.2f})"
        shown.append(with_half(over.mean, *bounds(ends), digits) + sd)
    for other in columns[1:]:
        test = difference(other, columns[0])
        mark = next((m for level, m in MARKS if test and test.p is not None and test.p < level), "")
        shown.append("-" if test is None else with_half(test.difference, test.low, test.high, digits) + mark)
        shown.append("-" if test is None or test.p is None else f"{test.p:.3f}")
    return shown


def drawn_of(scores: Scores) -> list[tuple[Any, Draws]]:
    """The draws of a group by seed."""
    return list((scores.draws or {}).items())


def column(group: Group, kind: str, draws: int) -> dict[str, Scores]:
    """Scores and draws of a group for each task that all its runs have."""
    by_run = {number: run_scores(run, group.row, kind, draws) for number, run in group.runs.items()}
    first, *others = by_run.values()
    return {
        task: Scores(
            {s: by[task][0] for s, by in by_run.items()}, {s: by[task][1] for s, by in by_run.items()}
        )
        for task in first
        if all(task in other for other in others)
    }


def averaged(column: Mapping[str, Scores], tasks: Sequence[str]) -> dict[str, Scores]:
    """A column with the average over these tasks, which are those that all columns have."""
    seeds = column[tasks[0]].values
    mean = {s: float(np.mean([column[task].values[s] for task in tasks])) for s in seeds}
    drawn = {s: average_draws({task: dict(drawn_of(column[task]))[s] for task in tasks}) for s in seeds}
    return {**column, "average": Scores(mean, drawn)}


def run_scores(run: Run, row: str | None, kind: str, draws: int) -> dict[str, tuple[float, Draws]]:
    """The score of each task of a run, and its bootstrap draws; without tasks whose score is undefined."""
    from whitenedcse.evaluation.suite import seed  # and PyTorch, for which a sweep's report does not wait

    number, content = row_of(run, row)
    tasks: Mapping[str, Any] = {"RTE": content["rte"]} if kind == "rte" else content[kind]["tasks"]
    out = {}
    for name, task in tasks.items():
        mean, item, gold = run.results["headline"], run.items[f"{number}/{name}"], run.items[f"gold/{name}"]
        if kind != "sts":
            out[name] = (task["accuracy"], accuracy_draws(item, draws, seed(gold)))
        elif task[mean] is not None:
            sizes = run.items[f"sizes/{name}"].tolist()
            out[name] = (task[mean], task_draws(gold, item, sizes, draws, seed(gold))[mean])
    return out


def check_pairs(runs: Sequence[Run], tasks: Sequence[str]) -> None:
    """Raise ValueError unless all runs report the same aggregation of the same gold scores."""
    first = runs[0]
    for other in runs[1:]:
        heads = [run.results["headline"] for run in (first, other)]
        if heads[0] != heads[1]:
            both = " and ".join(heads)
            raise ValueError(f"{first.path} and {other.path} report {both}; evaluate both by one protocol")
        for task in tasks:
            if not np.array_equal(first.items[f"gold/{task}"], other.items[f"gold/{task}"]):
                raise ValueError(
                    f"{task}: {first.path} and {other.path} were not evaluated on the same pairs"
                )


def unlike(runs: Sequence[Run], names: Sequence[str]) -> list[str]:
    """A note for each setting of an evaluation that is not the same in all runs."""
    notes = []
    for name in names:
        known = dict.fromkeys(str(run.results[name]) or "none" for run in runs if name in run.results)
        notes += [f"{name} is not the same in all: {', '.join(known)}"] * (len(known) > 1)
    return notes

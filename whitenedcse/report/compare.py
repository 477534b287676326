"""A against B over seeds: differences of groups of runs, tested and said in words; tables of sweeps and runs.

Differences are paired by the seeds that both groups have, where these are two or more, and tested by t; with
the scores of single test pairs also over other pairs, by the bootstrap. A sweep's p are corrected by Holm.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from whitenedcse.console import Grid, override
from whitenedcse.evaluation.statistics import (
    ALPHA,
    Comparison,
    Draws,
    accuracy_draws,
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
from whitenedcse.inputs import expanded
from whitenedcse.report import sweep as sweeps
from whitenedcse.report.sweep import SPACE, WAYS, Group, Sweep, numbers, shared, texts, values
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
READ = ("pooling", "prompt", "case", "max_length", "extra", "bf16", "sample", "classifier")  # by evaluations


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
    seeds, others = (both, both) if len(both) > 1 else (list(one.values), list(other.values))
    a, b = [one.values[s] for s in seeds], [other.values[s] for s in others]
    single = len(a) == len(b) == 1
    apart = float(np.subtract(a, b).mean() if len(both) > 1 else np.mean(a) - np.mean(b))
    if one.draws is None or other.draws is None:
        if single:
            return Comparison(apart, math.nan, math.nan, None)
        return tested(apart, of_difference(a, b, paired=len(both) > 1))
    x, y = np.mean([one.draws[s] for s in seeds], axis=0), np.mean([other.draws[s] for s in others], axis=0)
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
    """The group that the others are compared with: the first, or the one with the label `against`."""
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
    first, every, alike = reference(sweep, against), sweep.finished, same_dev(sweep.finished)
    names = list(dict.fromkeys(row for run in every for row in sweeps.rows(run)))
    measures = {name if i else "test average": f"{name}: average" for i, name in enumerate(names)}
    measures |= {"dev before": "dev_before", "dev best": "dev_best"}
    what, main = main_score(sweep)
    found = differences(sweep, first, main) if alike or main != "dev_best" else []
    last = {first.label: ["", "", ""]}
    for d in found:
        ends = "-" if math.isnan(d.test.low) else f"{d.test.low:+z.2f} .. {d.test.high:+z.2f}"
        last[d.label] = [f"{d.test.difference:+z.2f}", ends, "-" if d.p is None else f"{d.p:.2g}"]
    lines = [[*means(group, measures), *last.get(group.label, "---")] for group in sweep.groups]
    columns = ["", "seeds", *measures]
    if len(lines) > 1:
        columns += [f"difference ({what.partition(' (')[0]})", "95 % interval", "p (Holm)"]
    notes = [*explained(first, what, found), *sources(sweep, tests=bool(names), alike=alike, main=main)]
    best = [i for i, name in enumerate(columns) if name in measures and name != "dev before"]
    lines = [line[: len(columns)] for line in lines]
    table = Grid("groups of runs, scores x 100", columns, lines, notes, range(1, len(columns)), best=best)
    grids = [table, *untouched(sweep, alike), *space(sweep, alike), *by_task(sweep, first, names)]
    return Report(verdict(first.label, what, found), grids, found, what)


def explained(first: Group, what: str, found: Sequence[Difference]) -> list[str]:
    """The notes on differences: how they are tested, and which seeds are not."""
    if not found:
        return []
    count = sum(d.p is not None for d in found)
    corrected = f", p corrected for {count} by Holm's method" if count else ""
    notes = [f"difference of the {what} from {first.label!r}, paired by seed; t test over seeds{corrected}"]
    notes.append("seeds alone: evaluate.py 'compare=[RUNS,RUNS]' also counts the chance in a test's pairs")
    single = any(math.isnan(d.test.low) for d in found)
    return [*notes, *unpaired(found), *["-: a test needs two seeds or more, as by seed=1,2"] * single]


def unpaired(found: Sequence[Difference]) -> Iterator[str]:
    """Which seeds are not paired in some differences, in words."""
    for d in found:
        one, other = (scores.values.keys() for scores in d.scores)
        if len(d.apart) > 1 and one != other:
            left = sorted(one ^ other, key=lambda seed: (isinstance(seed, str), seed))
            yield f"{d.label}: seeds {', '.join(map(str, left))} have no partner and are not paired"
        elif len(d.apart) < 2 and not math.isnan(d.test.low):
            single = len(one) == len(other) == 1
            why = "one run each says nothing of other seeds" if single else "fewer than two seeds are in both"
            yield f"{d.label}: not paired, as {why}"


def sources(sweep: Sweep, *, tests: bool, alike: bool, main: str) -> list[str]:
    """The notes on what the scores of a sweep are of, and which cannot be compared."""
    every = sweep.finished
    notes = [
        "± standard deviation over seeds",
        f"dev: Spearman before training and at best, {meaning('all')}",
    ]
    if not alike:
        notes.append("not all runs have the same dev set: dev scores and embeddings cannot be compared")
    if tests and main == "dev_best" and alike:
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
    names = {frozenset(name for name in numbers(run) if ": " in name) for run in runs} - {frozenset()}
    return len(names) < 2 and same_content(runs, "tasks.")


def same_dev(runs: Sequence[Run]) -> bool:
    """Whether the dev scores of all runs are of the same pairs, by content or else by the names of files."""
    noted = all(DEV in run.facts.get("content", {}) for run in runs)
    return same_content(runs, DEV) and (noted or len({texts(run).get(DEV) for run in runs}) < 2)


def main_score(sweep: Sweep) -> tuple[str, str]:
    """The name, and the key in `numbers`, of the score that is compared: the tests' or the dev set's."""
    every = sweep.finished
    average = f"{next((row for run in every for row in sweeps.rows(run)), '')}: average"
    if every and same_tests(every) and all(average in numbers(run) for run in every):
        return f"test average{in_brackets(aggregations(every))}", average
    return "dev best (all)", "dev_best"


def means(group: Group, measures: Mapping[str, str], digits: int = 2) -> list[str]:
    """The cells of a group: label, seeds, mean and deviation of each measure, which are keys of `numbers`."""
    cells = [spread(values(group, name), digits) for name in measures.values()]
    return [group.label, str(len(group.runs)), *cells]


def differences(sweep: Sweep, first: Group, name: str) -> list[Difference]:
    """The difference of each other group from the first, p corrected for their number by Holm."""
    base, found = Scores(values(first, name)), []
    for group in sweep.groups:
        own = Scores(values(group, name))
        if group is not first and own.values and base.values:
            if (test := difference(own, base)) is not None:
                found.append(Difference(group.label, test, test.p, (own, base)))
    corrected = iter(holm([d.p for d in found if d.p is not None]))
    return [d if d.p is None else d._replace(p=next(corrected)) for d in found]


def untouched(sweep: Sweep, alike: bool) -> list[Grid]:
    """The table of dev scores as they are and whitened, the best k of each: before training, and at best."""
    encoders: dict[str, dict[Any, Run]] = {}
    for run in sweep.finished:
        path = (run.settings.get("encoder") or {}).get("path") or "encoder of random weights"
        encoders.setdefault(str(path), {})[run.path] = run
    every = [(Group(f"untouched: {Path(p).name}", runs), "before") for p, runs in encoders.items()]
    every += [(group, "best") for group in sweep.groups]
    rows = [means(group, {way: f"{way}, {moment}" for way in WAYS}) for group, moment in every]
    kept = [i for i in range(2, len(WAYS) + 2) if any(row[i] != "-" for row in rows)]
    if not alike or len(kept) < 2:
        return []
    columns = ["", *([*WAYS][i - 2] for i in kept)]
    notes = ["the highest of all k; (dev) is fitted to the dev sentences themselves"]
    title = "dev Spearman x 100 of the encoder before training, and of the best checkpoints"
    lines = [[row[0], *(row[i] for i in kept)] for row in rows]
    return [Grid(title, columns, lines, notes, range(1, len(columns)), best=range(1, len(columns)))]


def space(sweep: Sweep, alike: bool) -> list[Grid]:
    """The table of geometry at the best checkpoint, if dev sets are alike, and of training speed."""
    known = {name for run in sweep.finished for name in numbers(run)}
    measures = {name.replace("_", " "): name for name in SPACE if alike and name in known}
    lines, columns = [means(group, measures, 3) for group in sweep.groups], ["", "seeds", *measures]
    many = sum(map(shared, sweep.finished))
    notes = [f"{many} runs shared their machine with other work: their speed is not shown"] * bool(many)
    if "rate" in known:
        fast = [list(values(group, "rate").values()) for group in sweep.groups]
        lines = [[*line, f"{np.median(f):,.0f}" if f else "-"] for line, f in zip(lines, fast, strict=True)]
        columns.append("sentences/s (median)")
        if any(sweeps.LOAD not in run.series for run in sweep.finished):
            notes.append("sentences/s: not all runs noted whether they had the machine to themselves")
    title = "dev embeddings at the best checkpoint" if measures else "speed of training"
    return [Grid(title, columns, lines, notes, range(1, len(columns)))] if columns[2:] else []


def by_task(sweep: Sweep, first: Group, rows: Sequence[str]) -> list[Grid]:
    """The tables of the first row's scores by task: means, and differences from the first group."""
    every = dict.fromkeys(name for run in sweep.finished for name in numbers(run))
    tasks = {
        name.removeprefix(f"{rows[0]}: "): name for name in every if rows and name.startswith(f"{rows[0]}: ")
    }
    if not tasks:
        return []
    if len(tasks) == 2:  # of one task the average is its score
        tasks.pop("average", None)
    columns, right = ["", *short(list(tasks))], range(1, len(tasks) + 1)
    lines = [[group.label, *means(group, tasks)[2:]] for group in sweep.groups]
    title = f"tests by task{in_brackets(aggregations(sweep.finished))}, x 100"
    grids = [Grid(title, columns, lines, right=right, best=right)]
    found = [{d.label: d.test for d in differences(sweep, first, name)} for name in tasks.values()]
    if len(tasks) < 2 or not any(test.p is not None for by in found for test in by.values()):
        return grids

    def cell(test: Comparison | None) -> str:
        p = "" if test is None or test.p is None else f" (p {test.p:.2g})"
        return "-" if test is None else f"{test.difference:+z.2f}{p}"

    others = [group.label for group in sweep.groups if group is not first]
    lines = [[label, *(cell(by.get(label)) for by in found)] for label in others]
    title = f"difference from {first.label} by task, with the p of its t test over seeds"
    return [
        *grids,
        Grid(title, columns, lines, ["p is not corrected for the number of tasks and groups"], right),
    ]


# runs of evaluate.py, and those of train.py with tests, by the scores of single test pairs


def compared(names: Sequence[str], draws: int) -> Report:
    """A table for each row of test scores that the runs share; of the first rows where they share none.

    names: run directories, or patterns (outputs/sgw-*) for one system with several seeds. Each is tested
    against the first; of a single one, each further row against its first, which tells whether whitening
    helps. Raises ValueError where the runs were not scored on the same pairs.
    """
    groups = [group(name) for name in names]
    every = [sweeps.rows(run) for one in groups for run in one.runs.values()]
    common = [row for row in every[0] if all(row in rows for rows in every)]
    if len(groups) > 1:
        together = [[one._replace(row=row) for one in groups] for row in common] or [groups]
    elif len(common) > 1:
        together = [[groups[0]._replace(label=row, row=row) for row in common]]
    else:
        raise ValueError(f"compare={list(names)} is one row of scores; name two runs, or two patterns")
    made = [of_kind(same, kind, draws) for same in together for kind in KINDS]
    if not (reports := [one for one in made if one]):
        raise ValueError(
            f"compare: {', '.join(names)} share no task with a score; give both the same tasks.names"
        )
    grids = [grid for one in reports for grid in one.grids]
    lines = [
        f"{grid.title.partition(': ')[0]}: {line}" if len(grids) > 1 else line
        for one, grid in zip(reports, grids, strict=True)
        for line in one.verdict
    ]
    return Report(lines, grids, reports[0].differences, reports[0].what)


def group(name: str) -> Group:
    """The runs that a directory or a pattern names. Raises ValueError for two of one seed."""
    runs: dict[Any, Run] = {}
    for run in map(Run, sweeps.paths([expanded(name)])):
        if "rows" not in run.results:
            cure = f"whitenedcse evaluate {override('model', run.path)} makes some"
            raise ValueError(f"compare: {run.path} has no tests: {cure}")
        number = run.results.get("seed")
        if number in runs and number is not None:
            raise ValueError(
                f"compare: {name} matches two runs of seed {number}, {runs[number].path} and {run.path}; "
                "a pattern is one system, with each seed once"
            )
        runs[str(run.path) if number is None else number] = run
    return Group(name, dict(sorted(runs.items(), key=lambda item: (isinstance(item[0], str), item[0]))))


def of_kind(groups: Sequence[Group], kind: tuple[str, str, str], draws: int) -> Report | None:
    """A verdict, and a table of tasks by groups and differences; None where no task has a score in all."""
    key, title, items = kind
    columns = [column(one, key, draws) for one in groups]
    every = dict.fromkeys(task for c in columns for task in c)
    tasks = [task for task in every if all(task in c for c in columns)]
    if not tasks:
        return None
    runs = [run for one in groups for run in one.runs.values()]
    check_pairs(runs, tasks)
    left = ", ".join(task for task in every if task not in tasks)
    notes = [*manners(groups), *[f"left out, as not all have a score: {left}"] * bool(left)]
    notes += [
        f"95 % intervals and p: for other test {items}, by {draws:,} bootstrap draws; of several runs also "
        "for other seeds, by t, the two half widths added in squares",
        "* p < 0.05, ** p < 0.01, not corrected for the number of tests",
    ]
    if len(tasks) > 1:
        columns = [c | {"average": averaged([c[task] for task in tasks])} for c in columns]
        tasks.append("average")
    names = short(tasks)
    lines = [[name, *cells([c[task] for c in columns])] for name, task in zip(names, tasks, strict=True)]
    if key == "sts":
        mean = runs[0].results["headline"]
        title, notes = f"{title}, {mean}", [*notes, meaning(mean)]
    numbered = [str(i) for i in range(1, len(groups) + 1)]
    headers = ["task", *numbered, *(f"{what}{i} - 1" for i in numbered[1:] for what in ("", "p of "))]
    same = {one.row for one in groups}
    heading = "rows" if len(same) > 1 else same.pop() or "first rows"
    first, *others = [c[tasks[-1]] for c in columns]
    pairs = [(one.label, own, difference(own, first)) for one, own in zip(groups[1:], others, strict=True)]
    found = [Difference(label, test, test.p, (own, first)) for label, own, test in pairs if test]
    notes = [*notes, *unpaired(found)]
    grid = Grid(f"{heading}: {title}", headers, lines, notes, range(1, len(headers)))
    what = f"the average of {items}" if len(tasks) > 1 else names[0]
    return Report(verdict(groups[0].label, what, found), [grid], found, what)


def manners(groups: Sequence[Group]) -> list[str]:
    """Notes on what the groups are, and in what they were not evaluated alike."""
    notes = []
    for i, one in enumerate(groups, 1):
        notes.append(f"{i}: {one.label}" + (f" ({len(one.runs)} runs)" if len(one.runs) > 1 else ""))
    runs = [run for one in groups for run in one.runs.values()]
    for name in READ:
        known = dict.fromkeys(str(run.results[name]) or "none" for run in runs if name in run.results)
        notes += [f"{name} is not the same in all: {', '.join(known)}"] * (len(known) > 1)
    return notes


def cells(columns: Sequence[Scores]) -> list[str]:
    """The cells of a task's row after its name: each group's score, then each difference and its p."""
    shown = []
    for each in columns:
        found, drawn = list(each.values.values()), np.mean([*(each.draws or {}).values()], axis=0)
        over, items, ends = over_seeds(found), of_draws(drawn), interval(drawn)
        if over.sd is not None and items is not None:
            ends = tested(over.mean, [of_mean(found), items])[1:3]
        sd = "" if over.sd is None else f" (sd {over.sd:.2f})"
        shown.append(with_half(over.mean, *bounds(ends)) + sd)
    for other in columns[1:]:
        test = difference(other, columns[0])
        mark = next((m for level, m in MARKS if test and test.p is not None and test.p < level), "")
        shown.append("-" if test is None else with_half(test.difference, test.low, test.high) + mark)
        shown.append("-" if test is None or test.p is None else f"{test.p:.3f}")
    return shown


def column(group: Group, kind: str, draws: int) -> dict[str, Scores]:
    """Scores and draws of a group for each task that all its runs have."""
    by_run = {number: run_scores(run, group.row, kind, draws) for number, run in group.runs.items()}
    tasks = next(iter(by_run.values()))
    return {
        task: Scores(
            {s: by[task][0] for s, by in by_run.items()}, {s: by[task][1] for s, by in by_run.items()}
        )
        for task in tasks
        if all(task in by for by in by_run.values())
    }


def averaged(every: Sequence[Scores]) -> Scores:
    """The average of tasks, by seed."""
    mean = {s: float(np.mean([one.values[s] for one in every])) for s in every[0].values}
    return Scores(mean, {s: np.mean([(one.draws or {})[s] for one in every], axis=0) for s in mean})


def run_scores(run: Run, row: str | None, kind: str, draws: int) -> dict[str, tuple[float, Draws]]:
    """The score of each task of a run, and its bootstrap draws; without tasks whose score is undefined."""
    from whitenedcse.evaluation.suite import seed  # and PyTorch, for which a sweep's report does not wait

    number, content = run.row(row)
    tasks: Mapping[str, Any] = {"RTE": content["rte"]} if kind == "rte" and "rte" in content else {}
    out = {}
    for name, task in (tasks or content.get(kind, {}).get("tasks", {})).items():
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

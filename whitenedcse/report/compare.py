"""A against B over seeds: differences of groups of runs, tested and said in words; tables of sweeps and runs.

Differences are paired by the seeds that both groups have, where these are two or more, and tested by t; with
the scores of single test pairs also over other pairs, by the bootstrap. A sweep's p are corrected by Holm.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from whitenedcse.report.tables import aggregations, in_brackets, meaning, undefined, with_half
from whitenedcse.run import Run

DEV = "monitor.dev"
POWER = 0.8  # of studies that are to show a difference
MARKS = ((0.01, "**"), (0.05, "*"))
KINDS = (  # key in scores.json, the table's title, and what a test consists of
    ("sts", "Spearman x 100", "pairs"),
    ("transfer", "accuracy x 100", "texts"),
    ("rte", "accuracy x 100", "pairs"),
)
# conditions of an evaluation: where runs do not share one, a note says so
CONDITIONS = ("pooling", "prompt", "case", "max_length", "extra", "bf16", "sample", "classifier")


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
        return [one[seed] - other[seed] for seed in common(one, other)]


class Report(NamedTuple):
    """A verdict in words, the tables below it, and the differences that it speaks of, with their name."""

    verdict: list[str]
    grids: list[Grid]
    differences: list[Difference]
    what: str = ""

    @property
    def parts(self) -> list[str | Grid]:
        """All that a terminal shows, in its order."""
        return [*self.verdict, *self.grids]


def common(one: Mapping[Any, float], other: Mapping[Any, float]) -> list[int]:
    """The seeds that both groups have."""
    return [seed for seed in one if seed in other and isinstance(seed, int)]


def difference(one: Scores, other: Scores) -> Comparison | None:
    """The mean score of a group less that of another, tested; None where draws are undefined too often.

    Without an interval for two single scores whose draws are not known.
    """
    both = common(one.values, other.values)
    by_seed = len(both) > 1
    seeds, others = (both, both) if by_seed else (list(one.values), list(other.values))
    a, b = [one.values[seed] for seed in seeds], [other.values[seed] for seed in others]
    single = len(a) == len(b) == 1
    apart = float(np.subtract(a, b).mean() if by_seed else np.mean(a) - np.mean(b))
    if one.draws is None or other.draws is None:
        if single:
            return Comparison(apart, math.nan, math.nan, None)
        return tested(apart, of_difference(a, b, paired=by_seed))
    x = np.mean([one.draws[seed] for seed in seeds], axis=0)
    y = np.mean([other.draws[seed] for seed in others], axis=0)
    if single:
        return paired(x, y, apart)
    over_pairs = of_draws(x - y)
    if over_pairs is None:
        return None
    return tested(apart, [*of_difference(a, b, paired=by_seed), over_pairs])


def apart_from(base: Scores, others: Iterable[tuple[str, Scores]]) -> list[Difference]:
    """The difference of each of the others, with its label, from `base`; p is not corrected."""
    found = []
    for label, own in others:
        test = difference(own, base) if own.values and base.values else None
        if test is not None:
            found.append(Difference(label, test, test.p, (own, base)))
    return found


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


def verdict(first: str, what: str, found: Sequence[Difference]) -> list[str]:
    """In words, which groups are better or worse than the first, by how much, and what is not shown."""
    shown = [d for d in found if d.p is not None and d.p < ALPHA]
    shown.sort(key=lambda d: -abs(d.test.difference))
    said = {
        "better than": [sized(d) for d in shown if d.test.difference > 0],
        "worse than": [sized(d) for d in shown if d.test.difference < 0],
        "not shown to differ from": [
            f"{sized(d)}, {lacking_seeds(d, len(found))}" for d in found if d not in shown
        ],
    }
    return [f"{how} {first} by {what}: {'; '.join(some)}" for how, some in said.items() if some]


def sized(d: Difference) -> str:
    """A difference as text, with its interval and p where there are some."""
    if math.isnan(d.test.low):
        return f"{d.label} {d.test.difference:+z.2f}"
    p = "" if d.p is None else f", p {d.p:.2g}"
    return f"{d.label} {d.test.difference:+z.2f} ({d.test.low:+z.2f} .. {d.test.high:+z.2f}{p})"


def lacking_seeds(d: Difference, tests: int) -> str:
    """Why a difference is not shown: how many seeds there are, and how many would show it."""
    n = len(d.apart)
    if not any(isinstance(seed, int) for scores in d.scores for seed in scores.values):
        return "as far as these pairs or texts tell"  # of encoders that were not trained here
    if min(len(scores.values) for scores in d.scores) == 1:
        return "with one seed, which says nothing of others: train more, as by seed=1,2,3,4,5"
    if n < 2:
        return "seeds that are not the same in both"
    needed = seeds_needed(d.apart, tests)
    if needed is not None and needed <= n:
        return f"with {n} seeds"
    guess = "by a rough guess from two " if n == 2 else ""
    return f"with {n} seeds; about {needed or '1,000 or more'} would {guess}show a difference of this size"


# sweeps of train.py, over seeds alone


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
    first, alike = reference(sweep, against), same_dev(sweep.finished)
    what, main = main_score(sweep)
    found = differences(sweep, first, main) if alike or main != "dev_best" else []
    groups = averages(sweep, what, first, found)
    groups = groups._replace(notes=[*explained(first, what, found), *sources(sweep, main, alike)])
    grids = [groups, *untouched(sweep, alike), *space(sweep, alike), *by_task(sweep, first)]
    return Report(verdict(first.label, what, found), grids, found, what)


def averages(sweep: Sweep, what: str, first: Group, found: Sequence[Difference]) -> Grid:
    """The table of groups: the averages of their tests, dev scores, and differences from the first group."""
    measures: dict[str, str] = {}
    for row in sweep.rows:
        measures[row if measures else "test average"] = f"{row}: average"
    measures |= {"dev before": "dev_before", "dev best": "dev_best"}
    columns = ["", "seeds", *measures]
    best = [i for i, name in enumerate(columns) if name in measures and name != "dev before"]
    lines = [means(group, measures) for group in sweep.groups]
    if len(sweep.groups) > 1:
        columns += [f"difference ({what.partition(' (')[0]})", "95 % interval", "p (Holm)"]
        by_label = {d.label: d for d in found}
        for group, line in zip(sweep.groups, lines, strict=True):
            line += ["", "", ""] if group is first else difference_cells(by_label.get(group.label))
    return Grid("groups of runs, scores x 100", columns, lines, (), range(1, len(columns)), best=best)


def difference_cells(d: Difference | None) -> list[str]:
    """The cells of a difference, its interval and its p; "-" where there is none."""
    if d is None:
        return ["-", "-", "-"]
    ends = "-" if math.isnan(d.test.low) else f"{d.test.low:+z.2f} .. {d.test.high:+z.2f}"
    return [f"{d.test.difference:+z.2f}", ends, "-" if d.p is None else f"{d.p:.2g}"]


def explained(first: Group, what: str, found: Sequence[Difference]) -> list[str]:
    """The notes on differences: how they are tested, and which seeds are not."""
    if not found:
        return []
    tests = sum(d.p is not None for d in found)
    corrected = f", p corrected for {tests} by Holm's method" if tests else ""
    notes = [
        f"difference of the {what} from {first.label!r}, paired by seed; t test over seeds{corrected}",
        "seeds alone: evaluate.py 'compare=[RUNS,RUNS]' also counts the chance in a test's pairs",
        *unpaired(found),
    ]
    if any(math.isnan(d.test.low) for d in found):
        notes.append("-: a test needs two seeds or more, as by seed=1,2")
    return notes


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


def sources(sweep: Sweep, main: str, alike: bool) -> list[str]:
    """The notes on what the scores of a sweep are of, and which cannot be compared."""
    runs = sweep.finished
    notes = [
        "± standard deviation over seeds",
        f"dev: Spearman before training and at best, {meaning('all')}",
    ]
    if not alike:
        notes.append("not all runs have the same dev set: dev scores and embeddings cannot be compared")
    if sweep.rows and main == "dev_best" and alike:
        notes.append("the difference is that of dev best, because not all runs have scores of the same tests")
    notes += [f"tests: Spearman, {meaning(mean)}" for mean in aggregations(runs)]
    notes += undefined(row for run in runs for row in (run.scores or {}).get("rows", []))
    if not same_tests(runs):
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
    runs = sweep.finished
    if sweep.rows and same_tests(runs):
        average = f"{sweep.rows[0]}: average"
        if all(average in numbers(run) for run in runs):
            return f"test average{in_brackets(aggregations(runs))}", average
    return "dev best (all)", "dev_best"


def means(group: Group, measures: Mapping[str, str], digits: int = 2) -> list[str]:
    """The cells of a group: label, seeds, mean and deviation of each measure, which are keys of `numbers`."""
    cells = [spread(values(group, name), digits) for name in measures.values()]
    return [group.label, str(len(group.runs)), *cells]


def differences(sweep: Sweep, first: Group, name: str) -> list[Difference]:
    """The difference of each other group from the first, p corrected for their number by Holm."""
    others = [(group.label, Scores(values(group, name))) for group in sweep.groups if group is not first]
    found = apart_from(Scores(values(first, name)), others)
    corrected = iter(holm([d.p for d in found if d.p is not None]))
    return [d if d.p is None else d._replace(p=next(corrected)) for d in found]


def untouched(sweep: Sweep, alike: bool) -> list[Grid]:
    """The table of dev scores as they are and whitened, the best k of each: before training, and at best."""
    encoders: dict[str, dict[Any, Run]] = {}
    for run in sweep.finished:
        path = (run.settings.get("encoder") or {}).get("path") or "encoder of random weights"
        encoders.setdefault(str(path), {})[run.path] = run
    rows = [(Group(f"untouched: {Path(path).name}", runs), "before") for path, runs in encoders.items()]
    rows += [(group, "best") for group in sweep.groups]
    ways = [way for way in WAYS if any(values(group, f"{way}, {moment}") for group, moment in rows)]
    if not alike or len(ways) < 2:
        return []
    lines = [
        [group.label, *(spread(values(group, f"{way}, {moment}")) for way in ways)] for group, moment in rows
    ]
    notes = ["the highest of all k; (dev) is fitted to the dev sentences themselves"]
    title = "dev Spearman x 100 of the encoder before training, and of the best checkpoints"
    right = range(1, len(ways) + 1)
    return [Grid(title, ["", *ways], lines, notes, right, best=right)]


def space(sweep: Sweep, alike: bool) -> list[Grid]:
    """The table of geometry at the best checkpoint, if dev sets are alike, and of training speed."""
    known = {name for run in sweep.finished for name in numbers(run)}
    measures = {name.replace("_", " "): name for name in SPACE if alike and name in known}
    lines = [means(group, measures, 3) for group in sweep.groups]
    columns, notes = ["", "seeds", *measures], list[str]()
    busy = sum(map(shared, sweep.finished))
    if busy:
        notes.append(f"{busy} runs shared their machine with other work: their speed is not shown")
    if "rate" in known:
        columns.append("sentences/s (median)")
        for group, line in zip(sweep.groups, lines, strict=True):
            rates = list(values(group, "rate").values())
            line.append(f"{np.median(rates):,.0f}" if rates else "-")
        if any(sweeps.LOAD not in run.series for run in sweep.finished):
            notes.append("sentences/s: not all runs noted whether they had the machine to themselves")
    if len(columns) == 2:
        return []
    title = "dev embeddings at the best checkpoint" if measures else "speed of training"
    return [Grid(title, columns, lines, notes, range(1, len(columns)))]


def by_task(sweep: Sweep, first: Group) -> list[Grid]:
    """The tables of the first row's scores by task: means, and differences from the first group."""
    beginning = f"{sweep.rows[0]}: " if sweep.rows else "none: "
    every = dict.fromkeys(name for run in sweep.finished for name in numbers(run))
    names = [name for name in every if name.startswith(beginning)]
    if len(names) == 2:  # of one task the average is its score
        names.remove(f"{beginning}average")
    if not names:
        return []
    columns, right = ["", *short(name.removeprefix(beginning) for name in names)], range(1, len(names) + 1)
    lines = [[group.label, *(spread(values(group, name)) for name in names)] for group in sweep.groups]
    title = f"tests by task{in_brackets(aggregations(sweep.finished))}, x 100"
    scores = Grid(title, columns, lines, right=right, best=right)
    found = [{d.label: d.test for d in differences(sweep, first, name)} for name in names]
    if len(names) < 2 or all(test.p is None for tests in found for test in tests.values()):
        return [scores]
    others = [group.label for group in sweep.groups if group is not first]
    lines = [[label, *(with_p(tests.get(label)) for tests in found)] for label in others]
    title = f"difference from {first.label} by task, with the p of its t test over seeds"
    notes = ["p is not corrected for the number of tasks and groups"]
    return [scores, Grid(title, columns, lines, notes, right)]


def with_p(test: Comparison | None) -> str:
    """A difference, followed by its p where it has one; "-" for none."""
    if test is None:
        return "-"
    return f"{test.difference:+z.2f}" + ("" if test.p is None else f" (p {test.p:.2g})")


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
    reports = [one for one in made if one is not None]
    if not reports:
        raise ValueError(
            f"compare: {', '.join(names)} share no task with a score; give both the same tasks.names"
        )
    lines = []
    for one in reports:
        heading = f"{one.grids[0].title.partition(': ')[0]}: " if len(reports) > 1 else ""
        lines += [f"{heading}{line}" for line in one.verdict]
    grids = [grid for one in reports for grid in one.grids]
    return Report(lines, grids, reports[0].differences, reports[0].what)


def group(name: str) -> Group:
    """The runs that a directory or a pattern names. Raises ValueError for two of one seed."""
    runs: dict[Any, Run] = {}
    for run in map(Run, sweeps.paths([expanded(name)])):
        if "rows" not in run.results:
            cure = f"whitenedcse evaluate {override('model', run.path)} makes some"
            raise ValueError(f"compare: {run.path} has no tests: {cure}")
        seed = run.results.get("seed")
        if seed in runs and seed is not None:
            raise ValueError(
                f"compare: {name} matches two runs of seed {seed}, {runs[seed].path} and {run.path}; "
                "a pattern is one system, with each seed once"
            )
        runs[str(run.path) if seed is None else seed] = run
    return Group(name, runs)


def of_kind(groups: Sequence[Group], kind: tuple[str, str, str], draws: int) -> Report | None:
    """A verdict, and a table of tasks by groups and differences; None where no task has a score in all."""
    key, title, items = kind
    known = [task_scores(one, key, draws) for one in groups]
    every = list(dict.fromkeys(task for scores in known for task in scores))
    tasks = [task for task in every if all(task in scores for scores in known)]
    if not tasks:
        return None
    runs = [run for one in groups for run in one.runs.values()]
    check_pairs(runs, tasks)
    by_task = {task: [scores[task] for scores in known] for task in tasks}  # the scores of each group
    if len(tasks) > 1:
        by_task["average"] = [averaged([scores[task] for task in tasks]) for scores in known]
    names = short(by_task)
    lines = [[name, *cells(scores)] for name, scores in zip(names, by_task.values(), strict=True)]
    notes = conditions(groups)
    if len(tasks) < len(every):
        left = ", ".join(task for task in every if task not in tasks)
        notes.append(f"left out, as not all have a score: {left}")
    notes += [
        f"95 % intervals and p: for other test {items}, by {draws:,} bootstrap draws; of several runs also "
        "for other seeds, by t, the two half widths added in squares",
        "* p < 0.05, ** p < 0.01, not corrected for the number of tests",
    ]
    if key == "sts":
        mean = runs[0].results["headline"]
        title = f"{title}, {mean}"
        notes.append(meaning(mean))
    base, *others = list(by_task.values())[-1]
    found = apart_from(base, zip([one.label for one in groups[1:]], others, strict=True))
    what = f"the average of {items}" if len(tasks) > 1 else names[0]
    columns = ["task", *(str(i) for i in range(1, len(groups) + 1))]
    for i in range(2, len(groups) + 1):
        columns += [f"{i} - 1", f"p of {i} - 1"]
    heading = "rows" if len({one.row for one in groups}) > 1 else groups[0].row or "first rows"
    notes += unpaired(found)
    grid = Grid(f"{heading}: {title}", columns, lines, notes, range(1, len(columns)))
    return Report(verdict(groups[0].label, what, found), [grid], found, what)


def conditions(groups: Sequence[Group]) -> list[str]:
    """Notes on what the groups are, and in what they were not evaluated alike."""
    notes = []
    for i, one in enumerate(groups, 1):
        notes.append(f"{i}: {one.label}" + (f" ({len(one.runs)} runs)" if len(one.runs) > 1 else ""))
    runs = [run for one in groups for run in one.runs.values()]
    for name in CONDITIONS:
        known = dict.fromkeys(str(run.results[name]) or "none" for run in runs if name in run.results)
        if len(known) > 1:
            notes.append(f"{name} is not the same in all: {', '.join(known)}")
    return notes


def cells(scores: Sequence[Scores]) -> list[str]:
    """The cells of a task's row after its name: each group's score, then each difference and its p."""
    shown = [score_cell(one) for one in scores]
    for other in scores[1:]:
        test = difference(other, scores[0])
        if test is None:
            shown += ["-", "-"]
            continue
        mark = next((mark for level, mark in MARKS if test.p is not None and test.p < level), "")
        shown.append(with_half(test.difference, (test.low, test.high)) + mark)
        shown.append("-" if test.p is None else f"{test.p:.3f}")
    return shown


def score_cell(scores: Scores) -> str:
    """The mean score of a group with half its interval, over pairs and seeds, and its spread over seeds."""
    every, drawn = list(scores.values.values()), np.mean(list((scores.draws or {}).values()), axis=0)
    over, over_pairs, ends = over_seeds(every), of_draws(drawn), interval(drawn)
    if over.sd is None:
        return with_half(over.mean, ends)
    if over_pairs is not None:
        test = tested(over.mean, [of_mean(every), over_pairs])
        ends = (test.low, test.high)
    return f"{with_half(over.mean, ends)} (sd {over.sd:.2f})"


def task_scores(group: Group, kind: str, draws: int) -> dict[str, Scores]:
    """Scores and draws of a group for each task that all its runs have."""
    by_seed = {seed: run_scores(run, group.row, kind, draws) for seed, run in group.runs.items()}
    found = {}
    for task in next(iter(by_seed.values())):
        if all(task in scores for scores in by_seed.values()):
            means = {seed: scores[task][0] for seed, scores in by_seed.items()}
            found[task] = Scores(means, {seed: scores[task][1] for seed, scores in by_seed.items()})
    return found


def averaged(every: Sequence[Scores]) -> Scores:
    """The average of tasks, by seed."""
    mean = {seed: float(np.mean([one.values[seed] for one in every])) for seed in every[0].values}
    return Scores(mean, {seed: np.mean([(one.draws or {})[seed] for one in every], axis=0) for seed in mean})


def run_scores(run: Run, row: str | None, kind: str, draws: int) -> dict[str, tuple[float, Draws]]:
    """The score of each task of a run, and its bootstrap draws; without tasks whose score is undefined."""
    from whitenedcse.evaluation.suite import seed  # and PyTorch, for which a sweep's report does not wait

    number, content = run.row(row)
    if kind not in content:
        return {}
    tasks = {"RTE": content["rte"]} if kind == "rte" else content[kind]["tasks"]
    found, mean = {}, run.results["headline"]
    for name, task in tasks.items():
        item, gold = run.items[f"{number}/{name}"], run.items[f"gold/{name}"]
        if kind != "sts":
            found[name] = (task["accuracy"], accuracy_draws(item, draws, seed(gold)))
        elif task[mean] is not None:
            sizes = run.items[f"sizes/{name}"].tolist()
            found[name] = (task[mean], task_draws(gold, item, sizes, draws, seed(gold))[mean])
    return found


def check_pairs(runs: Sequence[Run], tasks: Sequence[str]) -> None:
    """Raise ValueError unless all runs report the same aggregation of the same gold scores."""
    first = runs[0]
    for other in runs[1:]:
        one, another = first.results["headline"], other.results["headline"]
        if one != another:
            raise ValueError(
                f"{first.path} and {other.path} report {one} and {another}; evaluate both by one protocol"
            )
        for task in tasks:
            if not np.array_equal(first.items[f"gold/{task}"], other.items[f"gold/{task}"]):
                raise ValueError(
                    f"{task}: {first.path} and {other.path} were not evaluated on the same pairs"
                )

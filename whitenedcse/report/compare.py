"""A against B over seeds: differences of groups of runs, tested and said in words; tables of sweeps and runs.

Differences are paired by the seeds that both groups have, where these are two or more, and tested by t; with
the scores of single test pairs also over other pairs, by the bootstrap. A sweep's p are corrected by Holm.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from whitenedcse.console import Grid, override
from whitenedcse.evaluation.statistics import (
    ALPHA,
    Comparison,
    Draws,
    Source,
    accuracy_draws,
    half_width,
    holm,
    of_difference,
    of_draws,
    of_mean,
    paired,
    task_draws,
    tested,
)
from whitenedcse.evaluation.tasks import short
from whitenedcse.inputs import expanded
from whitenedcse.report import sweep as sweeps
from whitenedcse.report.sweep import (
    LOAD,
    RATE,
    SPACE,
    WAYS,
    Group,
    Sweep,
    by_name,
    by_way,
    measures,
    shared,
    unlike,
)
from whitenedcse.report.tables import aggregations, in_brackets, meaning, undefined
from whitenedcse.run import Run

Texts = Mapping[str, str]

AVERAGE = ": average"  # the end of the name of a test average
POWER = 0.8  # of studies that are to show a difference
KINDS = {"sts": "Spearman x 100", "transfer": "accuracy x 100", "rte": "accuracy x 100"}
# conditions of an evaluation: where runs do not share one, a note says so
CONDITIONS = ("pooling", "prompt", "case", "max_length", "extra", "bf16", "sample", "classifier")


class Scores(NamedTuple):
    """A score of a group by seed and, where the scores of single test pairs are known, draws by seed."""

    values: Mapping[Any, float]
    draws: Mapping[Any, Draws] | None = None

    @classmethod
    def of(cls, group: Group, name: str) -> Scores:
        """The scores of a group that have this name."""
        return cls(group.scores.get(name, {}), group.draws.get(name))


class Difference(NamedTuple):
    """The difference of a group from the first, tested, its p as corrected, and the scores of both."""

    label: str
    test: Comparison
    p: float | None
    scores: tuple[Mapping[Any, float], Mapping[Any, float]]

    @property
    def apart(self) -> list[float]:
        """The differences by seed, of the seeds that both groups have."""
        one, other = self.scores
        return [one[seed] - other[seed] for seed in common(one, other)]

    @property
    def cells(self) -> tuple[str, str, str]:
        """Itself, its 95 % interval and its p as texts; "-" for what is not known."""
        low, high = self.test.low, self.test.high
        ends = "-" if math.isnan(low) else f"{low:+z.2f} .. {high:+z.2f}"
        return f"{self.test.difference:+z.2f}", ends, "-" if self.p is None else f"{self.p:.2g}"

    @property
    def text(self) -> str:
        """Itself, followed by its interval and p where it has some."""
        size, ends, p = self.cells
        known = [part for part in (ends, f"p {p}") if not part.endswith("-")]
        return f"{size} ({', '.join(known)})" if known else size


class Report(NamedTuple):
    """A verdict in words, tables, and the differences of `what` from `first` that the verdict speaks of."""

    verdict: list[str]
    grids: list[Grid]
    differences: list[Difference]
    what: str = ""
    first: str = ""

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


def differences(groups: Sequence[Group], first: Group, name: str) -> list[Difference]:
    """The difference of each other group from the first in one of their scores; p is not corrected."""
    found, base = [], Scores.of(first, name)
    for group in groups:
        own = Scores.of(group, name)
        test = difference(own, base) if group is not first and own.values and base.values else None
        if test is not None:
            found.append(Difference(group.label, test, test.p, (own.values, base.values)))
    return found


# in words


def verdict(first: str, what: str, found: Sequence[Difference]) -> list[str]:
    """In words, which groups are better or worse than the first, by how much, and what is not shown."""
    shown = [d for d in found if d.p is not None and d.p < ALPHA]
    shown.sort(key=lambda d: -abs(d.test.difference))
    said = {
        "better than": [f"{d.label} {d.text}" for d in shown if d.test.difference > 0],
        "worse than": [f"{d.label} {d.text}" for d in shown if d.test.difference < 0],
        "not shown to differ from": [
            f"{d.label} {d.text}, {lacking_seeds(d, len(found))}" for d in found if d not in shown
        ],
    }
    return [f"{how} {first} by {what}: {'; '.join(some)}" for how, some in said.items() if some]


def lacking_seeds(d: Difference, tests: int) -> str:
    """Why a difference is not shown: how many seeds there are, and how many would show it."""
    n = len(d.apart)
    if not any(isinstance(seed, int) for by_seed in d.scores for seed in by_seed):
        return "as far as these pairs or texts tell"  # of encoders that were not trained here
    if min(map(len, d.scores)) == 1:
        return "with one seed, which says nothing of others: train more, as by seed=1,2,3,4,5"
    if n < 2:
        return "seeds that are not the same in both"
    others = ((d.test.high - d.test.low) / 2) ** 2 - half_width([of_mean(d.apart)]) ** 2
    needed = seeds_needed(d.apart, tests, max(0.0, others) / half_width([Source(1.0, math.inf)]) ** 2)
    if needed is not None and needed <= n:
        return f"with {n} seeds"
    enough = f"about {needed} would" if needed else "999 would not"
    return f"with {n} seeds; {enough} show a difference of this size"


def seeds_needed(apart: Sequence[float], tests: int = 1, over_pairs: float = 0.0) -> int | None:
    """How many seeds would show a difference such as that of these pairs in four of five studies, up to 999.

    The difference and its spread are taken as they are, the level as Bonferroni's for so many tests.
    over_pairs: the variance over test pairs, which more seeds leave as it is.
    """
    mean, variance = abs(float(np.mean(apart))), float(np.var(apart, ddof=1))
    for n in range(2, 1000):
        sources = [Source(variance / n, n - 1), Source(over_pairs, math.inf)]
        if half_width(sources, ALPHA / tests) + half_width(sources, 2 * (1 - POWER)) <= mean:
            return n
    return None


def unpaired(found: Sequence[Difference]) -> Iterator[str]:
    """Which differences are not paired by seed, or leave seeds out that have no partner."""
    for d in found:
        n, most = len(d.apart), max(map(len, d.scores))
        if most == 1:
            yield f"{d.label}: one run each, which says nothing of other seeds"
        elif n < 2:
            yield f"{d.label}: not paired by seed, as fewer than two seeds are in both"
        elif n < most:
            yield f"{d.label}: paired by the {n} seeds that are in both"


# tables


def table(title: str, columns: Mapping[str, Texts], notes: Sequence[str], best: Collection[str] = ()) -> Grid:
    """A table of texts by heading and line, "-" where there is none. best: headings, as in `Grid`."""
    lines = dict.fromkeys(line for texts in columns.values() for line in texts)
    rows = [[line, *(texts.get(line, "-") for texts in columns.values())] for line in lines]
    at = [i for i, heading in enumerate(columns, 1) if heading in best]
    return Grid(title, ["", *columns], rows, notes, range(1, len(columns) + 1), at)


def means(groups: Sequence[Group], names: Mapping[str, str]) -> dict[str, Texts]:
    """Columns of the scores that some group has, over seeds. names: of scores, by their headings."""
    known = measures(groups)
    return {
        heading: {group.label: summary(name, group.scores.get(name, {})) for group in groups}
        for heading, name in names.items()
        if name in known
    }


def summary(name: str, scores: Mapping[Any, float]) -> str:
    """Scores of one name by seed as text: mean and deviation, but the median of speeds."""
    if name == RATE and scores:
        return f"{np.median([*scores.values()]):,.0f}"
    return spread(scores, 3 if name in SPACE else 2)


def spread(scores: Mapping[Any, float], digits: int = 2) -> str:
    """Mean and standard deviation (divided by n - 1) of values by seed, as text; "-" for no values."""
    if not scores:
        return "-"
    values = [*scores.values()]
    apart = f" ± {np.std(values, ddof=1):.{digits}f}" if len(values) > 1 else ""
    return f"{np.mean(values):z.{digits}f}{apart}"


# sweeps of train.py, over seeds alone


def comparison(sweep: Sweep, against: str | None = None) -> Report:
    """What a sweep shows: groups, their differences from one, the untouched encoder, geometry, tests."""
    first, (what, name) = reference(sweep, against), main_score(sweep)
    found = differences(sweep.groups, first, name)
    p = iter(holm([d.p for d in found if d.p is not None]))
    found = [d if d.p is None else d._replace(p=next(p)) for d in found]
    grids = [averages(sweep, first, what, found), untouched(sweep), space(sweep), *by_task(sweep, first)]
    said, shown = verdict(first.label, what, found), [grid for grid in grids if grid.rows]
    return Report(said, shown, found, what, first.label)


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


def main_score(sweep: Sweep) -> tuple[str, str]:
    """The score that is compared, in words and by its name: the tests' where all runs have it, or dev's."""
    average = next((name for name in measures(sweep.groups) if name.endswith(AVERAGE)), "")
    if sum(len(group.scores.get(average, ())) for group in sweep.groups) == len(sweep.finished):
        return f"test average{in_brackets(aggregations(sweep.finished))}", average
    return "dev best (all)", "dev_best"


def averages(sweep: Sweep, first: Group, what: str, found: Sequence[Difference]) -> Grid:
    """The table of groups: the averages of their tests, dev scores, and differences from the first group."""
    tests = [name for name in measures(sweep.groups) if name.endswith(AVERAGE)]
    names = {("test average" if name == tests[0] else name.removesuffix(AVERAGE)): name for name in tests}
    columns: dict[str, Texts] = {"seeds": {group.label: str(len(group.runs)) for group in sweep.groups}}
    columns |= means(sweep.groups, names | {"dev before": "dev_before", "dev best": "dev_best"})
    best = columns.keys() - {"seeds", "dev before"}
    if found:
        cells = {d.label: d.cells for d in found} | {first.label: ("", "", "")}
        for i, heading in enumerate((f"difference ({what.partition(' (')[0]})", "95 % interval", "p (Holm)")):
            columns[heading] = {label: texts[i] for label, texts in cells.items()}
    return table("groups of runs, scores x 100", columns, explained(sweep, first, what, found), best)


def explained(sweep: Sweep, first: Group, what: str, found: Sequence[Difference]) -> list[str]:
    """The notes on a sweep: how differences are tested, what scores are of, and which are missing."""
    notes = []
    if found:
        tests = sum(d.p is not None for d in found)
        holm = f", p corrected for {tests} by Holm's method" if tests else ""
        notes = [
            f"difference of the {what} from {first.label!r}, paired by seed; t test over seeds{holm}",
            "seeds alone: evaluate.py 'compare=[RUNS,RUNS]' also counts the chance in a test's pairs",
        ]
    return [
        *notes,
        *unpaired(found),
        "± standard deviation over seeds",
        f"dev: Spearman before training and at best, {meaning('all')}",
        *(f"tests: Spearman, {meaning(mean)}" for mean in aggregations(sweep.finished)),
        *undefined(row for run in sweep.finished for row in run.rows),
        *sweep.notes,
    ]


def untouched(sweep: Sweep) -> Grid:
    """The table of dev scores as they are and whitened, the best k of each: before training, and at best."""
    encoders: dict[str, dict[Any, Run]] = {}
    for run in sweep.finished:
        path = (run.settings.get("encoder") or {}).get("path") or "encoder of random weights"
        alike = run.settings.get("seed"), str(run.results["dev"]["values_before"])  # in several groups
        encoders.setdefault(str(path), {})[alike] = run
    apart = len({Path(path).name for path in encoders}) == len(encoders)
    groups = []
    for path, runs in encoders.items():
        before = {at: by_way(run.results["dev"]["values_before"]) for at, run in runs.items()}
        groups.append(Group(f"untouched: {Path(path).name if apart else path}", runs, by_name(before)))
    known = measures(sweep.groups)
    columns = means([*groups, *sweep.groups], {way: way for way in WAYS if way in known})
    title = "dev Spearman x 100 of the encoder before training, and of the best checkpoints"
    notes = ["the highest of all k; (dev) is fitted to the dev sentences themselves"]
    return table(title, columns, notes, columns)


def space(sweep: Sweep) -> Grid:
    """The table of geometry at the best checkpoint, and of the speed of training."""
    names = {name.replace("_", " "): name for name in SPACE} | {"sentences/s (median)": RATE}
    busy, notes = sum(map(shared, sweep.finished)), []
    if busy:
        notes.append(f"{busy} runs shared their machine with other work: their speed is not shown")
    if any(LOAD not in run.series for run in sweep.finished):
        notes.append("sentences/s: not all runs noted whether they had the machine to themselves")
    title = "dev embeddings at the best checkpoint, and speed of training"
    return table(title, means(sweep.groups, names), notes)


def by_task(sweep: Sweep, first: Group) -> list[Grid]:
    """The tables of the first row's scores by task: means, and differences from the first group."""
    tests = [name.rpartition(": ") for name in measures(sweep.groups) if ": " in name]
    tasks = [task for row, _, task in tests if row == tests[0][0]]
    tasks = tasks[:1] if len(tasks) == 2 else tasks  # of one task the average is its score
    names = {heading: f"{tests[0][0]}: {task}" for heading, task in zip(short(tasks), tasks, strict=True)}
    columns = means(sweep.groups, names)
    apart = {
        heading: {d.label: with_p(d) for d in differences(sweep.groups, first, name)}
        for heading, name in names.items()
    }
    notes = ["p is not corrected for the number of tasks and groups"]
    return [
        table(f"tests by task{in_brackets(aggregations(sweep.finished))}, x 100", columns, [], columns),
        table(f"difference from {first.label} by task, with the p of its t test over seeds", apart, notes),
    ]


def with_p(d: Difference) -> str:
    """A difference, followed by its p where it has one."""
    size, _, p = d.cells
    return size if d.p is None else f"{size} (p {p})"


# runs of evaluate.py, and those of train.py with tests, by the scores of single test pairs


def compared(names: Sequence[str], draws: int) -> Report:
    """A table for each row of test scores that the runs share; of the first rows where they share none.

    names: run directories, or patterns (outputs/sgw-*) for one system with several seeds. Each is tested
    against the first; of a single one, each further row against its first, which tells whether whitening
    helps. Raises ValueError where no test is of the same pairs in all runs.
    """
    groups = [group(name) for name in names]
    every = [[row["name"] for row in run.rows] for one in groups for run in one.runs.values()]
    common = [row for row in every[0] if all(row in rows for rows in every)]
    if len(groups) > 1:
        tables = {row or "first rows": [(one, row) for one in groups] for row in common or [""]}
    elif len(common) > 1:
        tables = {"rows": [(groups[0]._replace(label=row), row) for row in common]}
    else:
        raise ValueError(f"compare={list(names)} is one row of scores; name two runs, or two patterns")
    made = [of_kind(title, rows, kind, draws) for title, rows in tables.items() for kind in KINDS]
    reports = [one for one in made if one is not None]
    if not reports:
        why = "share no task of the same pairs and aggregation; give both the same tasks.names and protocol"
        raise ValueError(f"compare: {', '.join(names)} {why}")
    titles = [one.grids[0].title.partition(": ")[0] for one in reports]
    lines = [f"{title}: {line}" for title, one in zip(titles, reports, strict=True) for line in one.verdict]
    grids = [grid for one in reports for grid in one.grids]
    return Report(reports[0].verdict if len(reports) == 1 else lines, grids, reports[0].differences)


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


def of_kind(title: str, rows: Sequence[tuple[Group, str]], kind: str, draws: int) -> Report | None:
    """A verdict, and a table of tasks by groups and differences; None where no task has a score in all."""
    groups = [scored(one, row, kind, draws) for one, row in rows]
    every = measures(groups)
    some = [task for task in every if any(len(one.scores.get(task, ())) < len(one.runs) for one in groups)]
    left = dict.fromkeys([*some, *unlike(groups, tested_data)])
    first, *others = groups = [with_average(one.without(left)) for one in groups]
    if not first.scores:
        return None
    names = dict(zip(short(first.scores), first.scores, strict=True))
    found = {task: differences(groups, first, name) for task, name in names.items()}
    columns = {}
    for i, one in enumerate(groups, 1):
        columns[f"{i}"] = {task: spread(one.scores[name]) for task, name in names.items()}
    for i, one in enumerate(others, 2):
        columns[f"{i} - 1"] = {
            task: d.text for task, own in found.items() for d in own if d.label == one.label
        }
    task, main = [*found.items()][-1]
    notes = [
        *conditions(groups),
        *([f"left out, as not all have a score of the same data: {', '.join(left)}"] if left else []),
        "± standard deviation over seeds; p is not corrected for the number of tests",
        f"95 % intervals and p: for other pairs or texts, by {draws:,} bootstrap draws; of several runs also "
        "for other seeds, by t, the two half widths added in squares",
        *unpaired(main),
    ]
    run = next(iter(first.runs.values()))
    mean = f", {run.results['headline']}" if kind == "sts" else ""
    what = f"average {KINDS[kind]}" if task == "average" else task
    grid = table(f"{title}: {KINDS[kind]}{mean}", columns, notes)
    return Report(verdict(first.label, what, main), [grid], main)


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


def scored(group: Group, row: str, kind: str, draws: int) -> Group:
    """A group with the scores and the draws of its runs in a row, without tasks that are undefined."""
    found = {seed: run_scores(run, row, kind, draws) for seed, run in group.runs.items()}
    scores, drawn = ({seed: both[i] for seed, both in found.items()} for i in (0, 1))
    return group._replace(scores=by_name(scores), draws=by_name(drawn))


def run_scores(run: Run, row: str, kind: str, draws: int) -> tuple[dict[str, float], dict[str, Draws]]:
    """The score of each task of a run, and its bootstrap draws; without tasks whose score is undefined."""
    from whitenedcse.evaluation.suite import seed  # and PyTorch, for which a sweep's report does not wait

    number, content = run.row(row)
    if kind not in content:
        return {}, {}
    tasks = {"RTE": content["rte"]} if kind == "rte" else content[kind]["tasks"]
    mean, scores, drawn = run.results["headline"], dict[str, float](), dict[str, Draws]()
    for name, task in tasks.items():
        item, gold = run.items[f"{number}/{name}"], run.items[f"gold/{name}"]
        if kind != "sts":
            scores[name], drawn[name] = task["accuracy"], accuracy_draws(item, draws, seed(gold))
        elif task[mean] is not None:
            sizes = run.items[f"sizes/{name}"].tolist()
            scores[name], drawn[name] = task[mean], task_draws(gold, item, sizes, draws, seed(gold))[mean]
    return scores, drawn


def with_average(group: Group) -> Group:
    """A group with the average of its scores, and of its draws, if these are of several tasks."""
    if len(group.scores) < 2:
        return group
    score = {seed: fmean(by_seed[seed] for by_seed in group.scores.values()) for seed in group.runs}
    drawn = {seed: np.mean([group.draws[t][seed] for t in group.scores], axis=0) for seed in group.runs}
    return group._replace(scores={**group.scores, "average": score}, draws={**group.draws, "average": drawn})


def tested_data(task: str, run: Run) -> Any:
    """What a test score of a run is of: how it is aggregated, and the gold scores or labels."""
    from whitenedcse.evaluation.suite import seed

    return run.results["headline"], seed(run.items[f"gold/{task}"])

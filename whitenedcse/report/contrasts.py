"""How the groups of a sweep differ: tables of means and of paired differences, and charts.

The tests are t tests of paired differences, corrected for their number over all groups tested by Holm's
method. In the charts each group has one colour and one mark.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from whitenedcse.console import Grid
from whitenedcse.evaluation.statistics import (
    Comparison,
    half_width,
    holm,
    of_difference,
    of_mean,
    over_seeds,
    tested,
)
from whitenedcse.report import plots
from whitenedcse.report.conditions import same_content, texts
from whitenedcse.report.plots import SIZE, Drawing, drawn, look, over_steps
from whitenedcse.report.results import aggregations, in_brackets, meaning, undefined
from whitenedcse.report.sweep import (
    Group,
    Measure,
    Sweep,
    at_best,
    average_of,
    dev_before,
    dev_best,
    rate,
    rows,
    scored,
    values,
    with_units,
)
from whitenedcse.run import SPEARMAN, Run

DEV = "monitor.dev"
ONE_SEED = "-: a test needs two seeds or more that both groups have, as by seed=1,2"


def paired_by_seed(one: Mapping[int, float], other: Mapping[int, float]) -> Comparison | None:
    """The difference one - other over the seeds that both have; None for fewer than two such seeds."""
    common = sorted(one.keys() & other.keys())
    if len(common) < 2:
        return None
    a, b = ([scores[number] for number in common] for scores in (one, other))
    return tested(float(np.subtract(a, b).mean()), of_difference(a, b, paired=True))


def reference(sweep: Sweep, against: str | None) -> Group:
    """The group that the others are compared with: the first, or the one with the label `against`.

    Raises ValueError for a label that no group has, and where no run is finished.
    """
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


def spread(scores: Mapping[int, float], digits: int = 2) -> str:
    """Mean and standard deviation of values by seed, as text; "-" for no values."""
    if not scores:
        return "-"
    over = over_seeds(list(scores.values()))
    return f"{over.mean:z.{digits}f}" + ("" if over.sd is None else f" ± {over.sd:.{digits}f}")


def comparison(sweep: Sweep, against: str | None = None) -> list[Grid]:
    """The tables of a sweep: differences of groups, their geometry and, with tests, mean scores by task."""
    first = reference(sweep, against)
    every = [run for group in sweep.groups for run in group.runs.values()]
    tasks = dict.fromkeys(task for run in every for task in scored(run, None))
    after = dict.fromkeys(name for run in every for name in rows(run)[1:])
    scores = {"test average": average_of(None)} if tasks else {}
    scores |= {name: average_of(name) for name in after} | {"dev before": dev_before, "dev best": dev_best}
    what, measure = main_score(sweep.groups)
    alike = same_dev(every)
    measured = measure if alike or measure is not dev_best else lambda run: None
    tested, notes = differences(sweep.groups, first, what, measured)
    lines = [
        [*line, *tested[group.label]]
        for line, group in zip(means(sweep.groups, scores), sweep.groups, strict=True)
    ]
    differs = [f"difference ({what.partition(' (')[0]})", "95 % interval", "p (Holm)"]
    columns = ["", "seeds", *scores, *(differs if len(lines) > 1 else ())]
    notes += [
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
    notes += sweep.notes
    main = Grid("groups of runs, scores x 100", columns, lines, notes, range(1, len(columns)))
    alone = [task for task in tasks if len(tasks) > 2 or task != "average"]  # of one task it is the score
    return [main, *shape(sweep.groups, alike), *([by_tasks(sweep.groups, alone)] if alone else [])]


def same_tests(runs: Sequence[Run]) -> bool:
    """Whether all runs that were tested have scores of the same tests, so that averages can be compared."""
    names = {frozenset(scored(run, None)) for run in runs} - {frozenset()}
    return len(names) < 2 and same_content(runs, "tasks.")


def same_dev(runs: Sequence[Run]) -> bool:
    """Whether the dev scores of all runs are of the same pairs, by content or else by the names of files."""
    noted = all(DEV in run.facts.get("content", {}) for run in runs)
    return same_content(runs, DEV) and (noted or len({texts(run.settings).get(DEV) for run in runs}) < 2)


def main_score(groups: Sequence[Group]) -> tuple[str, Measure]:
    """The name, with the aggregation, and the measure by which groups are compared.

    It is the test average where every run has one, of the same tasks, else the dev score.
    """
    average = average_of(None)
    every = [run for group in groups for run in group.runs.values()]
    if all(average(run) is not None for run in every) and same_tests(every):
        return f"test average{in_brackets(aggregations(every))}", average
    return "dev best (all)", dev_best


def means(groups: Sequence[Group], measures: Mapping[str, Measure], digits: int = 2) -> list[list[str]]:
    """The cells of a table with a row for each group: label, seeds, mean and deviation of each measure."""
    return [
        [group.label, str(len(group.runs)), *(spread(values(group, m), digits) for m in measures.values())]
        for group in groups
    ]


def shape(groups: Sequence[Group], alike: bool) -> list[Grid]:
    """The table of the groups' geometry at the best checkpoint and of training speed, as far as logged.

    alike: whether all have the same dev set, as measures of other sentences say nothing about a difference.
    """
    names = ("alignment", "uniformity", "effective rank") if alike else ()
    measures = {name: at_best(f"dev/{name.replace(' ', '_')}") for name in names}
    measures = {name: m for name, m in measures.items() if any(values(group, m) for group in groups)}
    lines, columns = means(groups, measures, 3), ["", "seeds", *measures]
    fast = [list(values(group, rate).values()) for group in groups]
    if any(fast):
        lines = [[*line, f"{np.median(f):,.0f}" if f else "-"] for line, f in zip(lines, fast, strict=True)]
        columns.append("sentences/s (median)")
    title = "dev embeddings at the best checkpoint" if measures else "speed of training"
    return [Grid(title, columns, lines, right=range(1, len(columns)))] if columns[2:] else []


def differences(
    groups: Sequence[Group], first: Group, what: str, measure: Measure
) -> tuple[dict[str, list[str]], list[str]]:
    """For each group the cells of its difference from `first`, by label; and the notes that explain them."""
    scores = {group.label: values(group, measure) for group in groups}
    others = [label for label in scores if label != first.label]
    tests = {label: paired_by_seed(scores[label], scores[first.label]) for label in others}
    tested = {label: test.p for label, test in tests.items() if test and test.p is not None}
    p = dict(zip(tested, holm(list(tested.values())), strict=True))
    cells, notes = {first.label: ["", "", ""] if others else []}, list[str]()
    if others:
        holms = f", p corrected for {len(p)} by Holm's method" if p else ""
        notes.append(
            f"difference of the {what} from {first.label!r}, paired by seed; t test over seeds{holms}"
        )
    for label in others:
        test, missing = tests[label], sorted(scores[label].keys() ^ scores[first.label].keys())
        if missing:
            notes.append(f"{label}: seeds {', '.join(map(str, missing))} have no partner and are not paired")
        if test is None:
            both = scores[label].keys() & scores[first.label].keys()
            apart = [f"{scores[label][seed] - scores[first.label][seed]:+z.2f}" for seed in both]
            cells[label] = [*(apart or "-"), "-", "-"]
            notes += [ONE_SEED] * (len(both) == 1 and ONE_SEED not in notes)
            continue
        interval = f"{test.low:+z.2f} .. {test.high:+z.2f}"
        cells[label] = [f"{test.difference:+z.2f}", interval, f"{p[label]:.2g}" if label in p else "-"]
    return cells, notes


def by_tasks(groups: Sequence[Group], tasks: Sequence[str]) -> Grid:
    """The table of mean test scores: a row for each group, a column for each task, from the first rows."""

    def score(task: str) -> Measure:
        return lambda run: scored(run, None).get(task)

    lines = [[name, *cells] for name, _, *cells in means(groups, {task: score(task) for task in tasks})]
    every = [run for group in groups for run in group.runs.values()]
    title = f"tests by task{in_brackets(aggregations(every))}, x 100"
    return Grid(title, ["", *with_units(every, tasks)], lines, right=range(1, len(tasks) + 1))


def of_groups(groups: Sequence[Group]) -> list[tuple[str, Drawing, str]]:
    """Title, SVG and caption of each chart that there is data for; of dev scores only of one dev set."""
    what, measure = main_score(groups)
    title = what[0].upper() + what[1:]
    tall = max(SIZE[1], 0.8 + 0.42 * len(groups))
    every = [run for group in groups for run in group.runs.values()]
    alike, charts = same_dev(every), list[tuple[str, Drawing, str]]()
    if tested := alike or measure is not dev_best:
        picture = drawn("strip", partial(strip, groups=groups, measure=measure, what=what), tall)
        charts.append((title, picture, "One dot per seed; the mean and its 95 % t interval."))
    if alike and any(SPEARMAN in run.series for run in every):
        picture = drawn("dev", partial(quality, groups=groups))
        charts.append(("Dev score", picture, "Mean over seeds, from the lowest to the highest seed."))
    pairs = {
        "Alignment and uniformity": (
            "shape",
            (at_best("dev/uniformity"), "uniformity (lower is better)"),
            (at_best("dev/alignment"), "alignment (lower is better)"),
            "At the best checkpoint. Small: one seed. Large: the mean over seeds. The lower left is best.",
        ),
        f"{title} against throughput": (
            "cost",
            (rate, "sentences per second"),
            (measure, f"{what}, x 100"),
            "Small: one seed. Large: the mean over seeds. The upper right is best.",
        ),
    }
    for name, (key, x, y, caption) in pairs.items():
        comparable = alike if key == "shape" else tested
        if comparable and any(values(group, x[0]).keys() & values(group, y[0]).keys() for group in groups):
            charts.append((name, drawn(key, partial(scatter, groups=groups, x=x, y=y)), caption))
    return charts


def strip(ax: Axes, groups: Sequence[Group], measure: Measure, what: str) -> None:
    """Plot a row of dots for each group, one for each run, the first group on top."""
    names = plots.fitting([group.label for group in groups])
    for i, group in enumerate(groups):
        colour, mark = look(i)
        scores = np.array(list(values(group, measure).values()))
        n = len(scores)
        side = ax.get_yaxis_transform()
        ax.text(0.0, -i + 0.3, names[i], transform=side, fontsize=9, va="center").set_in_layout(False)
        ax.plot(
            scores,
            np.full(n, -i),
            mark,
            color=colour,
            alpha=0.45 if n > 1 else 1,
            markersize=5,
            markeredgewidth=0,
        )
        if n > 1:
            half = half_width([of_mean(scores)])
            ax.errorbar(scores.mean(), -i - 0.22, xerr=half, fmt=mark, color=colour, capsize=3, markersize=6)
    ax.set(xlabel=f"{what}, x 100", yticks=[], ylim=(-len(groups) + 0.5, 0.6))
    ax.spines["left"].set_visible(False)
    ax.grid(axis="x", color="0.9")
    ax.ticklabel_format(axis="x", useOffset=False)


def quality(ax: Axes, groups: Sequence[Group]) -> None:
    """Plot mean and range of the dev score, at the steps at which all seeds of a group were evaluated."""
    for i, group in enumerate(groups):
        colour, mark = look(i)
        runs = [run for run in group.runs.values() if SPEARMAN in run.series]
        logged = [set(run.series[SPEARMAN].steps.tolist()) for run in runs]
        steps = sorted(set.intersection(*logged)) if runs else []
        table = np.array([[run.at(SPEARMAN, step) for step in steps] for run in runs], dtype=float)
        if steps:
            ax.plot(steps, table.mean(axis=0), marker=mark, color=colour, linewidth=1.3, markersize=4)
            low, high = table.min(axis=0), table.max(axis=0)
            ax.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0)
    over_steps(ax, f"{plots.LABEL}, all")


def scatter(ax: Axes, groups: Sequence[Group], x: tuple[Measure, str], y: tuple[Measure, str]) -> None:
    """Plot two measures of every run, and their means by group."""
    for i, group in enumerate(groups):
        colour, mark = look(i)
        across, up = values(group, x[0]), values(group, y[0])
        points = np.array([(across[seed], up[seed]) for seed in sorted(across.keys() & up.keys())])
        if len(points):
            ax.plot(*points.T, mark, color=colour, alpha=0.4, markersize=4, markeredgewidth=0)
            ax.plot(*points.mean(axis=0), mark, color=colour, markersize=8, markeredgecolor="w")
    ax.margins(0.12)
    ax.set(xlabel=x[1], ylabel=y[1])
    ax.xaxis.set_major_locator(MaxNLocator(6))
    ax.ticklabel_format(useOffset=False)

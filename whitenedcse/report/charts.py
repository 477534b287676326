"""The style of all figures, and the charts of a page about a run or a sweep, as PNG inside of the page.

In the charts of a sweep over steps, settings and the space each group has one colour and one mark.
"""

from __future__ import annotations

import base64
import io
import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from whitenedcse.evaluation.statistics import half_width, of_mean
from whitenedcse.report.compare import Difference, Report, main_score
from whitenedcse.report.sweep import WAYS, Group, Sweep, given, measures
from whitenedcse.run import SPEARMAN, Run, Series

LABEL = "Spearman x 100"
MARKS = {"o": "●", "s": "■", "^": "▲", "D": "◆", "v": "▼", "P": "✚", "X": "✖"}
# Okabe and Ito's colours, which a colour-blind eye tells apart; yellow is too pale on white
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
STYLE: Any = {
    "font.family": "DejaVu Sans",  # comes with matplotlib
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "savefig.dpi": 150,
}
PAGE: Any = STYLE | {"font.size": 10.5, "text.parse_math": False}
PAGE |= {"legend.frameon": False, "legend.fontsize": 9, "legend.handlelength": 1.4}
SIZE = (4.6, 3.1)  # inches; a phone shows it at about this size
LINE = 46  # letters of a label in a line of a chart
MANY = 50  # values of a series, of which a moving mean is shown


class Chart(NamedTuple):
    """A chart of a page: its title, its picture as a data: URL, and what to know of it."""

    title: str
    picture: str
    caption: str


def drawn(title: str, draw: Callable[[Axes], None], caption: str, size: tuple[float, float] = SIZE) -> Chart:
    """A chart that `draw` draws on white, with the same bytes for the same numbers."""
    stream = io.BytesIO()
    with rc_context(PAGE):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure.subplots())
        figure.savefig(stream, format="png", metadata={"Software": None})
    return Chart(title, f"data:image/png;base64,{base64.b64encode(stream.getvalue()).decode()}", caption)


def look(i: int) -> tuple[str, str]:
    """The colour and the mark of group i, different for 49 groups."""
    marks = list(MARKS)
    return COLOURS[i % len(COLOURS)], marks[(i + i // len(COLOURS)) % len(marks)]


def over_steps(ax: Axes, what: str) -> None:
    """Labels a plot of `what` over optimiser steps, which are whole numbers."""
    ax.set(xlabel="optimiser steps", ylabel=what)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def of_run(run: Run) -> list[Chart]:
    """The charts of a run of which something was logged."""
    charts = []
    for title, (series_of, what, caption) in CHARTS.items():
        series = series_of(run)
        if series:
            charts.append(drawn(title, partial(curves, series=series, what=what), caption))
    if {"dev/alignment", "dev/uniformity"} <= run.series.keys():
        caption = "One point per evaluation, as Figure 3 of WhitenedCSE; the lower left is best."
        charts.append(drawn("Alignment and uniformity", partial(shape, run=run), caption))
    return charts


def curves(ax: Axes, series: Mapping[str, Series], what: str) -> None:
    """Plot series over the optimiser steps, by their labels; of a long one the moving mean over a shade."""
    for i, (label, (steps, y)) in enumerate(series.items()):
        colour, mark = look(i)
        if len(y) >= MANY:
            ax.plot(steps, y, color=colour, alpha=0.25, linewidth=0.8)
            width = len(y) // 25
            y = np.convolve(y, np.full(width, 1 / width), "valid")
            steps = steps[width // 2 :][: len(y)]
        few = mark if len(y) <= 20 else ""
        ax.plot(steps, y, marker=few, color=colour, label=label, linewidth=1.4, markersize=3)
    over_steps(ax, what)
    if what != SCORE:
        ax.set_ylim(bottom=0)
    if len(series) > 1:
        ax.figure.legend(loc="outside upper left", ncols=3)


def named(run: Run, beginning: str, but: Sequence[str] = ()) -> dict[str, Series]:
    """The series whose names begin so, by the words of the rest; without those whose rest begins as `but`."""
    own = {n.rpartition("/")[2]: series for n, series in run.series.items() if n.startswith(beginning)}
    return {name.replace("_", " "): s for name, s in own.items() if not name.startswith(tuple(but))}


def dev_scores(run: Run) -> dict[str, Series]:
    """The dev score, and that of the best k of each whitening at every evaluation; {} without dev pairs."""
    shown: dict[str, Series] = {}
    for way, beginning in WAYS.items() if SPEARMAN in run.series else ():
        every = [series for name, series in run.series.items() if name.startswith(beginning)]
        points = sorted(point for series in every for point in zip(*series, strict=True))
        best = dict(points)  # of a step the last, which is the highest
        shown |= {way: Series(np.array([*best]), np.array([*best.values()]))} if best else {}
    return shown


SCORE = f"{LABEL}, all"
# by title, the series of a run that a chart shows by their labels, what they are, and its caption
CHARTS: dict[str, tuple[Callable[[Run], dict[str, Series]], str, str]] = {
    "Dev score": (dev_scores, SCORE, "Whitened: afterwards, by the best k at each evaluation."),
    "Loss": (
        partial(named, beginning="train/", but=("lr", "sentences_per_second", "load", "diversity")),
        "loss",
        "Of single batches; of many also their moving mean.",
    ),
    "Learning rate": (partial(named, beginning="train/lr"), "learning rate", ""),
    "Speed": (partial(named, beginning="train/sentences_per_second"), "sentences per second", ""),
    "Spectrum of the dev embeddings": (
        partial(named, beginning="dev/variance_top"),
        "share of variance",
        "Of the first k axes: the lower the curve, the more axes share the variance.",
    ),
    "Effective rank": (
        partial(named, beginning="dev/effective_rank"),
        "effective rank",
        "Over how many axes the variance of the dev embeddings is spread.",
    ),
    "Diversity of views": (
        partial(named, beginning="train/diversity"),
        "distance of two views",
        "Mean distance on the unit sphere, as Figure 1d of WhitenedCSE.",
    ),
}


def shape(ax: Axes, run: Run) -> None:
    """Plots alignment against uniformity, one point per evaluation, as Figure 3 of WhitenedCSE does."""
    steps = np.intersect1d(run.series["dev/alignment"].steps, run.series["dev/uniformity"].steps)
    names = ("dev/uniformity", "dev/alignment")
    x, y = np.array([[run.series[name].at(step) for step in steps.tolist()] for name in names])
    ax.plot(x, y, "-", color="0.75", linewidth=1, zorder=1)
    points = ax.scatter(x, y, c=steps, s=26, zorder=2)
    ax.figure.colorbar(points, ax=ax, label="step")
    ax.margins(0.2)
    ax.set(xlabel="uniformity (lower is better)", ylabel="alignment (lower is better)")


def of_differences(made: Report) -> list[Chart]:
    """The chart of paired differences from the first group; none without any."""
    if not made.differences:
        return []
    labels = [textwrap.fill(d.label, LINE) for d in made.differences]
    lines = max(label.count("\n") + 1 for label in labels)
    size = 1.5 * SIZE[0], 0.9 + (0.22 + 0.2 * lines) * len(labels)
    caption = f"Each group minus {made.first}. Small: one seed that both have. "
    caption += "Large: the mean and its 95 % interval."
    draw = partial(apart, found=made.differences, labels=labels)
    return [drawn(f"Difference of the {made.what}", draw, caption, size)]


def apart(ax: Axes, found: Sequence[Difference], labels: Sequence[str]) -> None:
    """Plot a row for each group: a dot for each pair of seeds, the mean difference and its interval."""
    for i, d in enumerate(found):
        ax.plot(d.apart, np.full(len(d.apart), i + 0.2), "o", color=COLOURS[0], alpha=0.45, ms=4, mew=0)
        half = d.test.high - d.test.difference  # nan, and not drawn, without an interval
        ax.errorbar(d.test.difference, i, xerr=half, fmt="o", color=COLOURS[0], capsize=3)
    ax.axvline(0, color="0.6", linewidth=0.8)
    ax.set(xlabel="difference x 100", ylim=(len(found) - 0.5, -0.5))
    ax.set_yticks(range(len(found)), labels)
    ax.grid(axis="x", color="0.9")


def of_sweep(sweep: Sweep) -> list[Chart]:
    """The charts of a sweep that there is data for; of dev scores only of one dev set."""
    what, name = main_score(sweep)
    groups, known = sweep.groups, measures(sweep.groups)
    charts = list[Chart]()
    setting, lines = of_setting(groups, name)
    if setting and lines:
        title, draw = what[0].upper() + what[1:], partial(curve, lines=lines, name=setting, what=what)
        charts.append(drawn(f"{title} over {setting}", draw, "The mean over seeds and its 95 % interval."))
    if "dev_best" in known and any(SPEARMAN in run.series for run in sweep.finished):
        draw = partial(over_training, groups=groups)
        charts.append(drawn("Dev score", draw, "Mean over seeds, from the lowest to the highest seed."))
    if {"alignment", "uniformity"} <= {*known}:
        draw, caption = partial(spaces, groups=groups), "Small: one seed. Large: the mean over seeds."
        charts.append(drawn("Alignment and uniformity", draw, caption))
    return charts


Points = list[tuple[float, float, float]]  # a setting's value, the mean score, half its interval


def of_setting(groups: Sequence[Group], score: str) -> tuple[str | None, dict[str, Points]]:
    """The first setting with three numbers or more in the command lines, and a score over it.

    The score is by the rest of the groups' labels.
    """
    words = [given(next(iter(group.runs.values()))) for group in groups]

    def numeric(name: str) -> bool:
        return len({as_number(own.get(name)) for own in words} - {None}) > 2

    swept = next(filter(numeric, words[0] if words else ()), None)
    lines: dict[str, Points] = {}
    for group, own in zip(groups, words, strict=True):
        x, found = as_number(own.get(str(swept))), list(group.scores.get(score, {}).values())
        if x is not None and found:
            rest = ", ".join(part for part in group.label.split(", ") if not part.startswith(f"{swept}="))
            half = half_width([of_mean(found)]) if len(found) > 1 else 0.0
            lines.setdefault(rest, []).append((x, float(np.mean(found)), half))
    return swept, lines


def as_number(text: str | None) -> float | None:
    """The number that a text is; None for any other."""
    try:
        return float(text or "")
    except ValueError:
        return None


def curve(ax: Axes, lines: dict[str, Points], name: str, what: str) -> None:
    """Plot a score over a setting, a line for each choice of the other settings."""
    for i, (rest, points) in enumerate(lines.items()):
        colour, mark = look(i)
        x, y, half = np.array(sorted(points)).T
        ax.errorbar(x, y, yerr=half, marker=mark, color=colour, capsize=3, label=rest or None, linewidth=1.2)
    places = [x for points in lines.values() for x, *_ in points]
    if max(places) > 20 * min(places) > 0:
        ax.set_xscale("log")
    else:
        ax.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))  # as 0.00015 is long
    ax.set(xlabel=name, ylabel=f"{what}, x 100")
    if len(lines) > 1:
        ax.figure.legend(loc="outside upper left", ncols=2 if max(map(len, lines)) < 25 else 1)


def over_training(ax: Axes, groups: Sequence[Group]) -> None:
    """Plot mean and range of the dev score, at the steps at which all seeds of a group were evaluated."""
    for i, group in enumerate(groups):
        colour, mark = look(i)
        runs = [run for run in group.runs.values() if SPEARMAN in run.series]
        logged = [set(run.series[SPEARMAN].steps.tolist()) for run in runs]
        steps = sorted(set.intersection(*logged)) if runs else []
        table = np.array([[run.series[SPEARMAN].at(step) for step in steps] for run in runs], dtype=float)
        if steps:
            ax.plot(steps, table.mean(axis=0), marker=mark, color=colour, linewidth=1.3, markersize=4)
            low, high = table.min(axis=0), table.max(axis=0)
            ax.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0)
    over_steps(ax, SCORE)


def spaces(ax: Axes, groups: Sequence[Group]) -> None:
    """Plot alignment against uniformity at the best checkpoint of every run, and their means by group."""
    for i, group in enumerate(groups):
        colour, mark = look(i)
        across, up = (group.scores.get(name, {}) for name in ("uniformity", "alignment"))
        points = np.array([(across[seed], up[seed]) for seed in sorted(across.keys() & up.keys())])
        if len(points):
            ax.plot(*points.T, mark, color=colour, alpha=0.4, markersize=4, markeredgewidth=0)
            ax.plot(*points.mean(axis=0), mark, color=colour, markersize=8, markeredgecolor="w")
    ax.margins(0.12)
    ax.set(xlabel="uniformity (lower is better)", ylabel="alignment (lower is better)")
    ax.xaxis.set_major_locator(MaxNLocator(6))

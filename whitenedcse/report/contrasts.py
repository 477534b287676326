"""The charts of a sweep: groups of runs side by side, each group in one colour and with one mark in all."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from whitenedcse.report import plots
from whitenedcse.report.curves import COLOURS, SIZE, STEP, drawn
from whitenedcse.report.groups import Group
from whitenedcse.report.history import DEV, at
from whitenedcse.report.sweep import Measure, at_best, half_width, judged_by, rate, values

MARKS = {"o": "●", "s": "■", "^": "▲", "D": "◆", "v": "▼", "P": "✚", "X": "✖"}

LONGEST = 52  # letters of a name that fit above its dots; the legend has all


def look(i: int) -> tuple[str, str]:
    """Colour and mark of group i; 49 groups differ in one of them."""
    marks = list(MARKS)
    return COLOURS[i % len(COLOURS)], marks[(i + i // len(COLOURS)) % len(marks)]


def of_groups(groups: Sequence[Group]) -> list[tuple[str, str, str]]:
    """Title, SVG and caption of each chart that there is something to draw for."""
    what, measure = judged_by(groups)
    title = what[0].upper() + what[1:]
    tall = max(SIZE[1], 0.8 + 0.42 * len(groups))
    charts = [
        (
            title,
            drawn("strip", title, partial(strip, groups=groups, measure=measure, what=what), tall),
            "A dot a seed; the mean and its 95 % t interval.",
        )
    ]
    if any(DEV in run.series for group in groups for run in group.runs.values()):
        picture = drawn("dev", "Dev score", partial(quality, groups=groups))
        charts.append(("Dev score", picture, "Mean over seeds, from the lowest to the highest seed."))
    pairs = {
        "Alignment and uniformity": (
            "shape",
            (at_best("dev/uniformity"), "uniformity (lower is better)"),
            (at_best("dev/alignment"), "alignment (lower is better)"),
            "At the best checkpoint: seeds small, their mean large. The lower left is best.",
        ),
        f"{title} against throughput": (
            "cost",
            (rate, "sentences per second"),
            (measure, f"{what}, x 100"),
            "Seeds small, their mean large. The upper right is best.",
        ),
    }
    for name, (key, x, y, caption) in pairs.items():
        if any(values(group, x[0]).keys() & values(group, y[0]).keys() for group in groups):
            charts.append((name, drawn(key, name, partial(scatter, groups=groups, x=x, y=y)), caption))
    return charts


def strip(ax: Axes, groups: Sequence[Group], measure: Measure, what: str) -> None:
    """A line a group, the first on top, its name above its dots."""
    for i, group in enumerate(groups):
        colour, mark = look(i)
        found = np.array(list(values(group, measure).values()))
        n = len(found)
        name = group.label if len(group.label) <= LONGEST else f"{group.label[: LONGEST - 1]}…"
        ax.text(
            0.0, -i + 0.3, name, transform=ax.get_yaxis_transform(), fontsize=9, va="center"
        ).set_in_layout(False)
        ax.plot(
            found,
            np.full(n, -i),
            mark,
            color=colour,
            alpha=0.45 if n > 1 else 1,
            markersize=5,
            markeredgewidth=0,
        )
        if n > 1:
            half = half_width(found)
            ax.errorbar(found.mean(), -i - 0.22, xerr=half, fmt=mark, color=colour, capsize=3, markersize=6)
    ax.set(xlabel=f"{what}, x 100", yticks=[], ylim=(-len(groups) + 0.5, 0.6))
    ax.spines["left"].set_visible(False)
    ax.grid(axis="x", color="0.9")
    ax.ticklabel_format(axis="x", useOffset=False)


def quality(ax: Axes, groups: Sequence[Group]) -> None:
    """Mean and range of the dev score, at the steps that all seeds of a group were judged at."""
    for i, group in enumerate(groups):
        colour, mark = look(i)
        runs = [run for run in group.runs.values() if DEV in run.series]
        steps = sorted(set.intersection(*(set(r.series[DEV].steps.tolist()) for r in runs))) if runs else []
        table = np.array([[at(run, DEV, step) for step in steps] for run in runs], dtype=float)
        if steps:
            ax.plot(steps, table.mean(axis=0), marker=mark, color=colour, linewidth=1.3, markersize=4)
            ax.fill_between(
                steps, table.min(axis=0), table.max(axis=0), color=colour, alpha=0.15, linewidth=0
            )
    ax.set(xlabel=STEP, ylabel=plots.LABEL)


def scatter(ax: Axes, groups: Sequence[Group], x: tuple[Measure, str], y: tuple[Measure, str]) -> None:
    """Two measures of every run, and their means by group."""
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

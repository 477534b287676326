"""The charts of a page: of one run over its steps, and of groups of runs side by side.

A chart is drawn where all that it needs was logged.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator

from whitenedcse.report import plots
from whitenedcse.report.history import DEV, Run, at, dev

# Okabe and Ito's colours, which a colour-blind eye tells apart; yellow is too pale on white
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
BLUE, RED, GREEN = COLOURS[:3]
STYLE: Any = plots.STYLE | {"font.size": 10.5, "text.parse_math": False, "legend.frameon": False}
SIZE = (4.6, 3.1)  # inches; a phone shows it at about this size
STEP = "optimiser steps"


class Chart(NamedTuple):
    """A title, the columns of metrics.csv without which there is nothing to draw, and what draws them."""

    name: str
    title: str
    needs: Sequence[str]
    draw: Callable[[Axes, Run], None]
    caption: str


def drawn(name: str, title: str, draw: Callable[[Axes], None], height: float = SIZE[1]) -> str:
    """A chart as SVG for a page."""
    with rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # letters that the browser's fonts have
        figure = Figure(figsize=(SIZE[0], height), layout="constrained")
        draw(figure.subplots())
        return plots.inline(figure, name, title)


def of_run(run: Run) -> list[tuple[Chart, str]]:
    """The charts of a run, those that there is something to draw for."""
    return [
        (chart, drawn(chart.name, chart.title, lambda ax, draw=chart.draw: draw(ax, run)))  # type: ignore[misc]
        for chart in CHARTS
        if all(name in run.series for name in chart.needs)
    ]


def line(ax: Axes, run: Run, name: str, colour: str, label: str, style: str = "-") -> None:
    """A series over steps; a single value as a dot."""
    steps, values = run.series[name]
    dots = "o" if len(steps) <= 20 else ""
    ax.plot(steps, values, style, marker=dots, color=colour, label=label, linewidth=1.4, markersize=3)


def legend(ax: Axes, columns: int) -> None:
    """Above the data, where it hides none."""
    tight = {"handlelength": 1.4, "handletextpad": 0.4, "columnspacing": 1.1, "borderaxespad": 0.2}
    ax.legend(loc="lower left", bbox_to_anchor=(-0.06, 1.0), ncols=columns, fontsize=9, **tight)


def loss(ax: Axes, run: Run) -> None:
    """Loss and its parts; the rate on an axis of its own."""
    line(ax, run, "train/loss", BLUE, "loss")
    for name, colour in (("contrastive", GREEN), ("mlm", COLOURS[3])):
        if f"train/{name}" in run.series:
            line(ax, run, f"train/{name}", colour, name, "--")
    ax.set(xlabel=STEP, ylabel="loss")
    if "train/lr" in run.series:
        right = ax.twinx()
        line(right, run, "train/lr", "0.55", "rate", ":")
        right.spines["right"].set_visible(True)
        right.set_ylim(bottom=0)
        right.set_ylabel("learning rate", color="0.4")
        right.tick_params(colors="0.4")
        right.yaxis.offsetText.set_color("0.4")


def quality(ax: Axes, run: Run) -> None:
    """The dev score, and of each whitening-only baseline the best k of every judgement."""
    line(ax, run, DEV, BLUE, "as it is")
    for fitted, colour, label in (("corpus", RED, "training"), ("dev", GREEN, "dev")):
        found = [s for name, s in run.series.items() if name.startswith(f"dev/whitened_on_{fitted}_k")]
        steps = sorted({step for s in found for step in s.steps.tolist()})
        best = [max(v for s in found for v in s.values[s.steps == step]) for step in steps]
        if found:
            ax.plot(
                steps,
                best,
                "--",
                marker=".",
                color=colour,
                linewidth=1.2,
                label=f"whitened ({label})",
            )
    summary = dev(run) or {}
    if summary.get("best") is not None:
        ax.plot(summary["best_step"], summary["best"], "o", color=BLUE, markersize=8, fillstyle="none")
    ax.set(xlabel=STEP, ylabel=plots.LABEL)
    legend(ax, 3)


def shape(ax: Axes, run: Run) -> None:
    """WhitenedCSE, Figure 3: alignment against uniformity, a point a judgement."""
    steps = np.intersect1d(run.series["dev/alignment"].steps, run.series["dev/uniformity"].steps)
    x, y = (
        np.array([at(run, f"dev/{name}", s) for s in steps.tolist()]) for name in ("uniformity", "alignment")
    )
    ax.plot(x, y, "-", color="0.75", linewidth=1, zorder=1)
    points = ax.scatter(x, y, c=steps, cmap="viridis", s=26, zorder=2)
    if len(steps) > 1:
        ax.figure.colorbar(
            points, ax=ax, label="step", fraction=0.05, ticks=MaxNLocator(5, steps=[1, 2, 5, 10])
        )
    named = {int(steps[0]): "first", (dev(run) or {}).get("best_step"): "best"}  # the last is often beside it
    for i, step in enumerate(steps.tolist()):
        if step in named:
            label, left = f"{named[step]}, step {step}", x[i] < (x.min() + x.max()) / 2
            beside: Any = {"xytext": (7 if left else -7, 0), "textcoords": "offset points", "va": "center"}
            ax.annotate(label, (x[i], y[i]), ha="left" if left else "right", fontsize=9, **beside)
    ax.margins(0.2)
    ax.set(xlabel="uniformity (lower is better)", ylabel="alignment (lower is better)")


def spectrum(ax: Axes, run: Run) -> None:
    """The share of variance on the first k principal axes: before, at the best checkpoint, at the end."""
    tops = sorted(
        int(n.removeprefix("dev/variance_top")) for n in run.series if n.startswith("dev/variance_top")
    )
    steps = run.series["dev/variance_top1"].steps
    chosen = {int(steps[0]): ("0.5", "--"), int(steps[-1]): (RED, ":")}
    best: int = (dev(run) or {}).get("best_step", -1)
    chosen |= {best: (BLUE, "-")} if best in steps else {}
    for step, (colour, style) in sorted(chosen.items()):
        points = [(k, share) for k in tops if (share := at(run, f"dev/variance_top{k}", step)) is not None]
        label = f"step {step}" + (" (best)" if step == best else "")
        ax.plot(*zip(*points, strict=True), style, marker=".", color=colour, label=label)
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_locator(FixedLocator(tops))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xticklabels([str(k) for k in tops])
    ax.set(xlabel="first k principal axes", ylabel="share of variance", ylim=(0, 1.02))
    legend(ax, 3)


def rank(ax: Axes, run: Run) -> None:
    """Over how many axes the variance is spread."""
    line(ax, run, "dev/effective_rank", BLUE, "effective rank")
    ax.set(xlabel=STEP, ylabel="effective rank")
    ax.set_ylim(bottom=0)


def diversity(ax: Axes, run: Run) -> None:
    """WhitenedCSE, Figure 1d: how far two views of a sentence lie apart."""
    line(ax, run, "train/diversity_before", "0.5", "before whitening", "--")
    line(ax, run, "train/diversity_after", BLUE, "after whitening")
    ax.set(xlabel=STEP, ylabel="distance of two views")
    ax.set_ylim(bottom=0)
    legend(ax, 2)


def throughput(ax: Axes, run: Run) -> None:
    """How fast it trains."""
    line(ax, run, "train/sentences_per_second", BLUE, "sentences/s")
    ax.set(xlabel=STEP, ylabel="sentences per second")
    ax.set_ylim(bottom=0)


CHARTS = (
    Chart(
        "dev",
        "Dev score",
        (DEV,),
        quality,
        "Ringed: the best checkpoint. Dashed: whitened afterwards, the best k at each judgement.",
    ),
    Chart("loss", "Loss and learning rate", ("train/loss",), loss, "Dotted, right axis: the learning rate."),
    Chart(
        "shape",
        "Alignment and uniformity",
        ("dev/alignment", "dev/uniformity"),
        shape,
        "A point a judgement, as Figure 3 of WhitenedCSE; the lower left is best.",
    ),
    Chart(
        "spectrum",
        "Spectrum of the dev embeddings",
        ("dev/variance_top1",),
        spectrum,
        "The flatter, the more axes carry meaning.",
    ),
    Chart(
        "rank",
        "Effective rank",
        ("dev/effective_rank",),
        rank,
        "Over how many axes the variance of the dev embeddings is spread.",
    ),
    Chart(
        "diversity",
        "Diversity of views",
        ("train/diversity_before", "train/diversity_after"),
        diversity,
        "Mean distance on the unit sphere, as Figure 1d of WhitenedCSE.",
    ),
    Chart(
        "throughput",
        "Throughput",
        ("train/sentences_per_second",),
        throughput,
        "Sentences trained on per second, judging not counted.",
    ),
)

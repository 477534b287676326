"""Plots of the layer and dimension studies, each as PNG and SVG with the same bytes for the same numbers.

The figures are those of the papers: every two layers, every set of layers, every number of components.
`records` and `scores` are those of `evaluation.layers`. `drawn` makes the charts of the HTML page.
"""

from __future__ import annotations

import csv
import io
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from whitenedcse.evaluation import layers
from whitenedcse.evaluation.sts import MEANS
from whitenedcse.evaluation.suite import Plan, System

STYLE: Any = {
    "svg.hashsalt": "whitenedcse",  # names of elements are random otherwise
    "svg.fonttype": "none",  # text stays text
    "font.family": "DejaVu Sans",  # comes with matplotlib
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "savefig.dpi": 150,
}
ANNOTATED = 13  # layers; beyond, numbers in cells are too small to read
BEST = "#c23b22"
LABEL = "Spearman x 100"
STEP = "optimiser steps"

# of a page: Okabe and Ito's colours, which a colour-blind eye tells apart; yellow is too pale on white
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
INLINE: Any = STYLE | {"font.size": 10.5, "text.parse_math": False, "legend.frameon": False}
SIZE = (4.6, 3.1)  # inches; a phone shows it at about this size


class Drawing(NamedTuple):
    """A chart of the HTML page: the viewBox of its svg element, and the elements inside."""

    box: str
    content: Markup


def heat_map(records: Sequence[Mapping[str, Any]], mean: str, path: Path) -> tuple[Path, Path]:
    """Plot the records of `pairs`: the average score of every two layers, without and with whitening."""
    off, on = (_square(records, mean, state) for state in (False, True))
    low, high = np.nanmin([off, on]), np.nanmax([off, on])
    side = 1.4 + 0.36 * min(len(off), 2 * ANNOTATED)
    with rc_context(STYLE):
        figure = Figure(figsize=(2 * side + 1, side + 0.3), layout="constrained")
        axes = figure.subplots(1, 2)
        for ax, values, title in zip(axes, (off, on), ("without whitening", "with whitening"), strict=True):
            image = _cells(ax, values, low, high)
            ax.set(title=title, xlabel="one layer", ylabel="other layer")
        figure.colorbar(image, ax=list(axes), label=f"average {LABEL}", fraction=0.04)
        return _saved(figure, path)


def _square(records: Sequence[Mapping[str, Any]], mean: str, whitening: bool) -> NDArray[np.float64]:
    rows = [row for row in records if row["task"] == "average" and row["whitening"] == whitening]
    if not any(row[mean] is not None for row in rows):
        raise ValueError(
            f"no average {mean!r} with whitening={whitening} to draw among {len(records)} records"
        )
    size = 1 + max(max(row["layers"]) for row in rows)
    values = np.full((size, size), np.nan)
    for row in rows:
        i, j = row["layers"]
        values[i, j] = values[j, i] = np.nan if row[mean] is None else row[mean]
    return values


def _cells(ax: Axes, values: NDArray[np.float64], low: float, high: float) -> AxesImage:
    """Plot a lower triangle, its best cell framed, with all numbers, or only the best if there are many."""
    size = len(values)
    shown = np.where(np.tril(np.ones_like(values)) > 0, values, np.nan)
    image = ax.imshow(shown, cmap="viridis", vmin=low, vmax=high)
    y, x = np.unravel_index(np.nanargmax(shown), shown.shape)
    for i, j in np.argwhere(np.isfinite(shown)) if size <= ANNOTATED else []:
        dark = shown[i, j] < (low + high) / 2
        ax.text(j, i, f"{shown[i, j]:.1f}", ha="center", va="center", size=7, color="w" if dark else "k")
    ax.add_patch(Rectangle((float(x) - 0.5, float(y) - 0.5), 1, 1, fill=False, color=BEST, linewidth=1.8))
    label = f"best {shown[y, x]:.2f}\nlayers {x} + {y}"  # in the empty corner
    ax.text(0.97, 0.97, label, transform=ax.transAxes, ha="right", va="top", color=BEST)
    ticks = range(0, size, 1 if size <= ANNOTATED else 4)
    ax.set(xticks=ticks, yticks=ticks)
    return image


def subset_curve(best: Sequence[Mapping[str, Any]], mean: str, path: Path) -> tuple[Path, Path]:
    """Plot the records of `best_of_each_size`: the best average score for each number of layers."""
    if not best:
        raise ValueError("no set of layers has an average to draw")
    sizes, values = [row["size"] for row in best], [row[mean] for row in best]
    top = int(np.argmax(values))
    with rc_context(STYLE):
        figure = Figure(figsize=(5.2, 3.4), layout="constrained")
        ax = figure.subplots()
        ax.plot(sizes, values, "o-", color="0.35", markersize=4)
        layers = " + ".join(map(str, best[top]["layers"]))
        _mark(ax, sizes[top], values[top], f"best {values[top]:.2f}\nlayers {layers}")
        ax.set(xlabel="layers averaged", ylabel=f"best average {LABEL}", xticks=sizes)
        return _saved(figure, path)


def component_curves(scores: Mapping[str, NDArray[np.float64]], row: int, path: Path) -> tuple[Path, Path]:
    """Plot the scores of `all_k`, a panel for each task, over the number of components; row: of (3, d)."""
    curves = {task: table[row] for task, table in scores.items() if np.isfinite(table[row]).any()}
    if not curves:
        raise ValueError(f"no task among {', '.join(scores) or 'none'} has a score to draw")
    wide = min(4, len(curves))
    high = math.ceil(len(curves) / wide)
    with rc_context(STYLE):
        figure = Figure(figsize=(2.6 * wide + 0.4, 2.1 * high + 0.4), layout="constrained")
        axes = figure.subplots(high, wide, squeeze=False).ravel()
        for ax, (task, values) in zip(axes, curves.items(), strict=False):
            k = int(np.nanargmax(values)) + 1
            ax.plot(np.arange(1, len(values) + 1), values, color="0.35", linewidth=1.2)
            _mark(ax, k, values[k - 1], f"{values[k - 1]:.2f} at k = {k}")
            ax.set_title(task)
        for ax in axes[len(curves) :]:
            ax.remove()
        figure.supxlabel("components kept, k", size=9)
        figure.supylabel(LABEL, size=9)
        return _saved(figure, path)


def _mark(ax: Axes, x: float, y: float, label: str) -> None:
    """Draw a dot on the best point, with its label above the data and centred on the axes."""
    ax.plot(x, y, "o", color=BEST, markersize=6)
    ax.margins(y=0.1)
    low, top = ax.get_ylim()
    ax.set_ylim(low, top + (0.12 + 0.1 * label.count("\n")) * (top - low))
    ax.text(0.5, 0.98, label, transform=ax.transAxes, ha="center", va="top", color=BEST)


def _saved(figure: Figure, path: Path) -> tuple[Path, Path]:
    png, svg = (path.with_name(path.name + suffix) for suffix in (".png", ".svg"))
    figure.savefig(png, metadata={"Software": None})
    figure.savefig(svg, metadata={"Date": None, "Creator": None})
    return png, svg


def drawn(name: str, draw: Callable[[Axes], None], height: float = SIZE[1]) -> Drawing:
    """Returns a chart that `draw` draws, as SVG for the HTML page; every id in it begins with `name`."""
    with rc_context(INLINE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # letters that the browser's fonts have
        figure = Figure(figsize=(SIZE[0], height), layout="constrained")
        draw(figure.subplots())
        return inline(figure, name)


def inline(figure: Figure, name: str) -> Drawing:
    """Returns a figure as SVG for the HTML page, without metadata; every id in it begins with `name`."""
    stream = io.StringIO()
    figure.savefig(stream, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    svg = re.search(r'<svg[^>]*viewBox="([^"]*)"[^>]*>(.*)</svg>', stream.getvalue(), flags=re.DOTALL)
    assert svg, "matplotlib writes a viewBox"
    content = re.sub(r"<style.*?</style>", "", svg[2], flags=re.DOTALL)  # it would hold for the whole page
    ids = re.compile(r'(\bid="|\bhref="#|url\(#)')
    content = re.sub(r"<[^>]*>", lambda tag: ids.sub(rf"\g<1>{name}-", tag[0]), content)  # not in texts
    return Drawing(svg[1], Markup(content))  # matplotlib has escaped the texts in it


def write_csv(path: Path, records: Sequence[Mapping[str, Any]]) -> Path:
    """Write records as CSV, with the keys of the first as header.

    A list is written as 1+12, and an undefined value as an empty cell.
    """
    if not records:
        raise ValueError(f"{path}: no records to write")
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(records[0]), lineterminator="\n")
        writer.writeheader()
        for record in records:
            writer.writerow(
                {k: "+".join(map(str, v)) if isinstance(v, list) else v for k, v in record.items()}
            )
    return path


def draw(run: Path, planes: NDArray[Any], system: System, plan: Plan, mean: str) -> list[str]:
    """Write layers, subsets and components, each as .csv, .png and .svg; returns a line on the best of each.

    planes: (l, n, d), every layer. system: the one whose vectors are whitened and cut to each k. mean: one of
    MEANS.
    """
    if not plan.pairs:
        raise ValueError("figures are of STS tasks, and there is none among these")
    return [
        _layers(run, planes, plan, mean),
        _subsets(run, planes, plan, mean),
        _components(run, system, plan, mean),
    ]


def _layers(run: Path, planes: NDArray[Any], plan: Plan, mean: str) -> str:
    """Write the figure of every two layers: WhiteningBERT, Figure 1."""
    records = layers.pairs(planes, plan.pairs)
    write_csv(run / "layers.csv", records)
    heat_map(records, mean, run / "layers")
    averages = [r for r in records if r["task"] == "average" and r[mean] is not None]
    best = max(averages, key=lambda r: r[mean])
    how = "whitened" if best["whitening"] else "as they are"
    pair = " and ".join(map(str, dict.fromkeys(best["layers"])))
    return f"layers.png: best of every two layers: {pair}, {how}: {best[mean]:.2f}"


def _subsets(run: Path, planes: NDArray[Any], plan: Plan, mean: str) -> str:
    """Write the figure of every set of layers: WhiteningBERT, Figure 2."""
    sets = layers.subsets(planes, plan.pairs)
    write_csv(run / "subsets.csv", sets.records)
    best = layers.best_of_each_size(sets.records, mean)
    subset_curve(best, mean, run / "subsets")
    top = max(best, key=lambda r: r[mean])
    many = "" if sets.complete else f" (sets of up to {sets.largest} layers)"
    return f"subsets.png: the best set of layers is {top['layers']}{many}: {top[mean]:.2f}"


def _components(run: Path, system: System, plan: Plan, mean: str) -> str:
    """Write the figure of every number of components: BERT-whitening, Figure 1."""
    every = np.arange(len(system.x))
    scores = layers.all_k(lambda task: system.vectors(plan, task)(every), plan.pairs)
    d = system.x.shape[1]
    write_csv(run / "components.csv", layers.records(scores, [{"k": k} for k in range(1, d + 1)]))
    component_curves(scores, MEANS.index(mean), run / "components")
    average = scores["average"][MEANS.index(mean)]
    k = int(np.nanargmax(average)) + 1
    return f"components.png: whitened on {system.on}, the best k is {k} of {d}: {average[k - 1]:.2f}"


def best(path: Path, mean: str, layers: str | None = None) -> float | None:
    """The best average over the tasks in a CSV of `draw`, or that of `layers`; None without one."""
    if not path.is_file():
        return None
    with path.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["task"] == "average" and row[mean]]
    values = [float(row[mean]) for row in rows if layers in (None, row["layers"])]
    return max(values, default=None)

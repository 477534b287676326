"""The figures of the papers, each as PNG with the same bytes for the same numbers, and as CSV.

The score of every two layers, of every set of layers, of every number of components, and the embeddings in a
plane. `records` and `scores` are those of `evaluation.layers`.
"""

from __future__ import annotations

import csv
import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from whitenedcse.evaluation import layers
from whitenedcse.evaluation.protocol import whole
from whitenedcse.evaluation.scores import MEANING, MEANS
from whitenedcse.evaluation.suite import Plan, System
from whitenedcse.evaluation.tasks import short
from whitenedcse.files import writing
from whitenedcse.report.charts import COLOURS, LABEL, STYLE

ANNOTATED = 13  # layers; beyond, numbers in cells are too small to read
BEST = "#c23b22"


class Said(NamedTuple):
    """What a figure of the papers says of its numbers: encoder, kind of pooling, and aggregation in MEANS."""

    encoder: str
    pooling: str
    mean: str

    @property
    def line(self) -> str:
        """All of it, for a title."""
        return f"{self.encoder}, pooling {self.pooling}, aggregation {self.mean}: {MEANING[self.mean]}"


@contextmanager
def picture(path: Path, line: str, width: float, height: float) -> Iterator[Figure]:
    """A context with an empty figure, which on exit is written to path.png under this title."""
    with rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure
        figure.suptitle(textwrap.fill(line, int(14 * width)), size=8)
        with writing(path.with_name(f"{path.name}.png")) as stream:
            figure.savefig(stream, format="png", metadata={"Software": None})


def _square(records: Sequence[Mapping[str, Any]], mean: str, whitening: bool) -> NDArray[np.float64]:
    rows = [row for row in records if row["task"] == "average" and row["whitening"] == whitening]
    if not any(row[mean] is not None for row in rows):
        how = "whitened: a task needs more sentences than their width" if whitening else "as they are"
        raise ValueError(f"no average {mean!r} is defined of vectors {how}")
    size = 1 + max(max(row["layers"]) for row in rows)
    values = np.full((size, size), np.nan)  # (l, l), the lower triangle
    for row in rows:
        values[max(row["layers"]), min(row["layers"])] = np.nan if row[mean] is None else row[mean]
    return values


def _cells(ax: Axes, values: NDArray[np.float64], low: float, high: float) -> AxesImage:
    """Plot a lower triangle, its best cell framed, with all numbers, or only the best if there are many."""
    few = len(values) <= ANNOTATED
    image = ax.imshow(values, cmap="viridis", vmin=low, vmax=high)
    for i, j in np.argwhere(np.isfinite(values)) if few else []:
        colour = "w" if values[i, j] < (low + high) / 2 else "k"
        ax.text(j, i, f"{values[i, j]:.1f}", ha="center", va="center", size=7, color=colour)
    y, x = np.unravel_index(np.nanargmax(values), values.shape)
    ax.add_patch(Rectangle((float(x) - 0.5, float(y) - 0.5), 1, 1, fill=False, color=BEST, linewidth=1.8))
    label = f"best {values[y, x]:.2f}\nlayers {x if x == y else f'{x} + {y}'}"  # in the empty corner
    ax.text(0.97, 0.97, label, transform=ax.transAxes, ha="right", va="top", color=BEST)
    ticks = range(0, len(values), 1 if few else 4)
    ax.set(xticks=ticks, yticks=ticks)
    return image


def component_curves(curves: Mapping[str, Mapping[str, NDArray[np.float64]]], said: Said, path: Path) -> None:
    """Plot scores over the number of components, a panel for each task; curves: row -> task -> (d,)."""
    every = next(iter(curves.values()))
    tasks = [task for task in every if any(np.isfinite(by[task]).any() for by in curves.values())]
    if not tasks:
        raise ValueError("no task has a score to draw")
    tasks = tasks[:1] if len(tasks) == 2 else tasks  # the average of one task is that task
    wide = min(4, len(tasks))
    high = math.ceil(len(tasks) / wide)
    with picture(path, said.line, 2.6 * wide + 0.4, 2.1 * high + 0.8) as figure:
        axes = figure.subplots(high, wide, squeeze=False).ravel()
        for ax, task, title in zip(axes, tasks, short(tasks), strict=False):
            for (name, by), colour in zip(curves.items(), COLOURS, strict=False):
                ax.plot(np.arange(1, len(by[task]) + 1), by[task], color=colour, linewidth=1.2, label=name)
            defined = [by[task] for by in curves.values() if np.isfinite(by[task]).any()]
            value, k = max((np.nanmax(y), int(np.nanargmax(y)) + 1) for y in defined)
            ax.plot(k, value, "o", color=BEST)
            ax.set_title(f"{title}\n{value:.2f} at k = {k}")
        for ax in axes[len(tasks) :]:
            ax.remove()
        for ax in axes[max(0, len(tasks) - wide) : len(tasks)]:  # a label of the figure would hide the legend
            ax.set_xlabel("components kept, k")
        handles, names = axes[0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower center", frameon=False)
        figure.supylabel(LABEL, size=9)


def write_csv(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Write records as CSV, with the keys of the first as header: a list as 1+12, what is undefined empty."""
    with writing(path, "w") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(records[0])
        for record in records:
            writer.writerow("+".join(map(str, v)) if isinstance(v, list) else v for v in record.values())


def draw(
    run: Path,
    names: Sequence[str],
    planes: Mapping[str, NDArray[Any]],
    systems: Sequence[System],
    plan: Plan,
    scores: Mapping[str, Any],
) -> list[str]:
    """Write figures, each as .csv and .png; returns a line on the best point of each, or why not.

    names: of "layers", "subsets", "components" and "projection". planes: (l, n, d) of every layer, by kind of
    pooling, for the first two, which are pooled as the last row is. systems: the one of each row of `scores`,
    the content of scores.json; those that are whitened with all components are cut to each k, and the first
    one is shown in a plane.
    """
    rows = scores["rows"]
    kind = rows[-1]["pooling"].partition(" ")[0].replace("pooler", "cls")
    said = Said(scores["model"], rows[0]["pooling"], scores["headline"])
    layered, last = said._replace(pooling=f"{kind} in each layer"), said._replace(pooling=rows[-1]["pooling"])
    pairs = zip(rows, systems, strict=True)
    curves = {row["name"]: system for row, system in pairs if whole(row["postprocess"])}
    make: dict[str, tuple[Said, Callable[[], str]]] = {
        "layers": (layered, lambda: _layers(run, planes[kind], plan, layered)),
        "subsets": (layered, lambda: _subsets(run, planes[kind], plan, layered)),
        "components": (last, lambda: _components(run, curves, plan, last)),
        "projection": (said, lambda: _projection(run, systems[0], plan, said)),
    }
    lines = []
    for name in names:
        about, drawn = make[name]
        try:
            lines.append(f"{name}.png: {drawn()} ({about.line})")
        except ValueError as error:  # an average that is undefined: the scores are still to be written
            lines.append(f"{name}: not drawn: {error}")
    return lines


def _layers(run: Path, planes: NDArray[Any], plan: Plan, said: Said) -> str:
    """Write the figure of every two layers: WhiteningBERT, Figure 1."""
    records = layers.pairs(planes, plan.pairs)
    write_csv(run / "layers.csv", records)
    states = {"as they are": False, "whitened on each task's own pairs": True}
    squares = [_square(records, said.mean, state) for state in states.values()]
    low, high, size = np.nanmin(squares), np.nanmax(squares), len(squares[0])
    side = 1.4 + 0.36 * min(size, 2 * ANNOTATED)
    with picture(run / "layers", said.line, 2 * side + 1, side + 0.3) as figure:
        axes = figure.subplots(1, 2)
        for ax, values, title in zip(axes, squares, states, strict=True):
            image = _cells(ax, values, low, high)
            ax.set(title=title, xlabel="one layer", ylabel="other layer")
        figure.colorbar(image, ax=list(axes), label=f"average {LABEL}", fraction=0.04)
    averages = [r for r in records if r["task"] == "average" and r[said.mean] is not None]
    best = max(averages, key=lambda r: r[said.mean])
    how = "whitened" if best["whitening"] else "as they are"
    pair = " and ".join(map(str, dict.fromkeys(best["layers"])))
    return f"best of every two layers: {pair}, {how}: {best[said.mean]:.2f}"


def _subsets(run: Path, planes: NDArray[Any], plan: Plan, said: Said) -> str:
    """Write the figure of every set of layers: WhiteningBERT, Figure 2."""
    records = layers.subsets(planes, plan.pairs)
    write_csv(run / "subsets.csv", records)
    best = layers.best_of_each_size(records, said.mean)
    if not best:
        raise ValueError("no set of layers has an average to draw")
    top = max(best, key=lambda r: r[said.mean])
    with picture(run / "subsets", said.line, 5.2, 3.4) as figure:
        ax = figure.subplots()
        sizes = [row["size"] for row in best]
        ax.plot(sizes, [row[said.mean] for row in best], "o-", color="0.35", markersize=4)
        of = f"{'layers' if top['size'] > 1 else 'layer'} {' + '.join(map(str, top['layers']))}"
        ax.plot(top["size"], top[said.mean], "o", color=BEST)
        ax.set_title(f"best {top[said.mean]:.2f}\n{of}")
        ax.set(xlabel="layers averaged", ylabel=f"best average {LABEL}", xticks=sizes)
    most = max(len(row["layers"]) for row in records)
    return f"the best set of up to {most} layers is {top['layers']}: {top[said.mean]:.2f}"


def _components(run: Path, systems: Mapping[str, System], plan: Plan, said: Said) -> str:
    """Write the figure of every number of components: BERT-whitening, Figure 1."""
    curves = {
        name: layers.all_k(system.by_task(plan), plan.pairs, partial(system.most_components, plan))
        for name, system in systems.items()
    }
    records = []
    for name, scores in curves.items():
        columns = [{"row": name, "k": k + 1} for k in range(scores["average"].shape[1])]
        records += layers.records(scores, columns)
    write_csv(run / "components.csv", records)
    row = MEANS.index(said.mean)
    by_task = {name: {task: s[row] for task, s in scores.items()} for name, scores in curves.items()}
    component_curves(by_task, said, run / "components")
    averages = {name: by["average"] for name, by in by_task.items() if np.isfinite(by["average"]).any()}
    best = [f"{n}: k = {np.nanargmax(y) + 1} of {len(y)}: {np.nanmax(y):.2f}" for n, y in averages.items()]
    return f"the best k on these pairs themselves: {'; '.join(best) or 'no average is defined'}"


def _projection(run: Path, system: System, plan: Plan, said: Said) -> str:
    """Write the embeddings of STS-B, or the first task, in a plane: WhitenedCSE, Figure 1 (a) to (c).

    Each is scaled to length 1; the axes are the two of largest variance.
    """
    task = "STS-B" if "STS-B" in plan.pairs else next(iter(plan.pairs))
    at = np.unique(np.concatenate([rows for _, rows in plan.pairs[task]], axis=1))
    x = system.by_task(plan)(task)(at).astype(np.float64)
    x /= np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)
    centred = x - x.mean(axis=0)
    variances, axes = np.linalg.eigh(centred.T @ centred / len(x))
    places = centred @ axes[:, :-3:-1]
    share = 100 * variances[:-3:-1].sum() / variances.sum()
    write_csv(run / "projection.csv", [{"x": float(x), "y": float(y)} for x, y in places])
    line = f"{said.encoder}, pooling {said.pooling}: {len(x)} sentences of {task} on the unit sphere"
    with picture(run / "projection", line, 4.2, 4.2) as figure:
        ax = figure.subplots()
        ax.plot(*places.T, ".", color=COLOURS[0], markersize=2, alpha=0.5)
        ax.set(aspect="equal", xlim=(-1, 1), ylim=(-1, 1), xticks=(-1, 0, 1), yticks=(-1, 0, 1))
        ax.set(xlabel="first principal axis", ylabel="second principal axis")
    return f"{len(x)} sentences of {task} in a plane, {share:.1f} % of their variance"

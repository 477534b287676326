"""A report on a run or a sweep as one HTML file, with tables and charts, without scripts or external files.

This module computes what is shown, and Matplotlib draws the charts. The markup and the stylesheet are in
templates/, where Jinja2 escapes every value; the page's content security policy forbids scripts and requests.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator
from numpy.typing import NDArray

from whitenedcse.console import Grid
from whitenedcse.files import writing
from whitenedcse.report import contrasts, plots
from whitenedcse.report.contrasts import comparison
from whitenedcse.report.plots import COLOURS, Drawing, drawn, over_steps
from whitenedcse.report.results import aggregations, described, grids, in_brackets, number, training_grid
from whitenedcse.report.sweep import (
    RATE,
    Sweep,
    beside,
    gathered,
    paths,
    runs,
    scored,
    write_csv,
)
from whitenedcse.run import SPEARMAN, Run

RANK = "dev/effective_rank"
BLUE, RED, GREEN = COLOURS[:3]
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
TEMPLATES = Environment(
    loader=PackageLoader("whitenedcse.report"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    keep_trailing_newline=True,
)
TEMPLATES.globals["policy"] = POLICY


def write(names: Sequence[str], out: Path | None, against: str | None) -> tuple[list[Grid], list[Path]]:
    """Writes the page of a run, or of a sweep and the csv file of its seeds; returns tables and files.

    names: a run, a directory of runs, or several of both; patterns are allowed. out: a file that ends in
    .html, or a directory, made if missing. Raises FileNotFoundError or ValueError where `names` has no run,
    or where no group is called `against`.
    """
    folders = paths(names)
    file = out or (folders[0] if len(folders) == 1 else Path())
    file = file if file.suffix in (".html", ".htm") and not file.is_dir() else file / "report.html"
    if len(folders) == 1 and Run(folders[0]).trains:
        if against:
            raise ValueError(f"--against {against!r}: {folders[0]} is one run, with nothing to compare")
        run = Run(folders[0]).checked()
        tables, page, files = run_grids(run), of_run(run), [file]
    else:
        sweep = gathered(runs(folders))
        tables, files = comparison(sweep, against), [file, beside(file)]
        titles = [Path(name).resolve().name for name in names]
        page = of_sweep(" ".join(titles[:3] + ["..."] * (len(titles) > 3)), sweep, tables)
    file.parent.mkdir(parents=True, exist_ok=True)
    if files[1:]:
        write_csv(sweep, files[1])
    with writing(file, "w") as stream:
        stream.write(page)
    return tables, files


def of_run(run: Run) -> str:
    """Returns the HTML page of one run, finished or not."""
    here = run.path.resolve()
    is_job = (here.parent / "multirun.yaml").exists()  # which Hydra leaves in a sweep's directory
    command = run.facts.get("command", "")  # older runs do not say by what a script is run
    return TEMPLATES.get_template("run.html").render(
        title=f"{here.parent.name}/{here.name}" if is_job else here.name,
        about=about(run),
        keys=keys(run),
        tables=run_grids(run),
        charts=charts(run),
        files={
            "Settings (config.yaml)": (run.path / "config.yaml").read_text(encoding="utf-8"),
            "Environment (versions.json)": json.dumps(run.facts, indent=2, ensure_ascii=False),
            "Command": "python " * command.partition(" ")[0].endswith(".py") + command,
        },
    )


def of_sweep(title: str, sweep: Sweep, tables: Sequence[Grid]) -> str:
    """Returns the HTML page of a sweep; tables: what `sweep.comparison` returns for it."""
    looks = [(*plots.look(i), group.label) for i, group in enumerate(sweep.groups)]
    return TEMPLATES.get_template("sweep.html").render(
        title=title,
        groups=[(colour, plots.MARKS[mark], label) for colour, mark, label in looks],
        runs=len(sweep.runs),
        finished=sum(run.scores is not None for run in sweep.runs),
        tables=tables,
        charts=contrasts.of_groups(sweep.groups),
    )


def about(run: Run) -> list[str]:
    """Returns short descriptions of a run: its name, seed, data, commit, hardware and state."""
    facts, data = run.facts, run.settings.get("data") or {}
    commit, mark, _ = (facts.get("commit") or "unknown").partition("+")
    machine = facts.get("machine") or {}
    hardware = ", ".join(machine.get("gpus") or [f"{machine.get('cores', '?')} CPU cores"])
    sample = f" (sample of {data['sample']:,})" if isinstance(data.get("sample"), int) else ""
    names = {
        "experiment": facts.get("experiment"),
        "system": facts.get("system"),
        "seed": run.settings.get("seed"),
        "data": f"{data['corpus']}{sample}" if "corpus" in data else None,
        "commit": commit[:10] + (" with changes" if mark else ""),
    }
    known = [f"{name} {value}" for name, value in names.items() if value is not None]
    return [*known, hardware, "finished" if run.scores else "NOT FINISHED"]


def keys(run: Run) -> list[tuple[str, str, str]]:
    """Returns the headline numbers of a run, each as its name, its value, and a remark."""
    summary, scores = run.dev, run.scores or {}
    shown: list[tuple[str, str, str]] = []
    if summary and summary["best"] is not None:
        rise = f"{number(summary['before'])} → {number(summary['best'])}"
        shown.append(("dev Spearman x 100 (all), before → best", rise, f"at step {summary['best_step']}"))
        alone = [
            (value, name)
            for name, value in summary["values_before"].items()
            if name.startswith("dev/whitened_on_") and value is not None
        ]
        if alone:
            value, name = max(alone)
            shown.append(("whitening alone, before training", number(value), described(name)))
    if summary and (rank := summary["values_best"].get(RANK)) is not None:
        shown.append(("effective rank", f"{rank:.1f}", "at the best checkpoint"))
    if scores.get("rows"):
        first = scores["rows"][0]
        what = f"test average x 100{in_brackets(aggregations([run]))}"
        shown.append((what, number(scored(run, None).get("average")), first["name"]))
    if speed := run.series.get(RATE):
        shown.append(("sentences per second", f"{speed.median:,.0f}", "median of the run"))
    return shown


def run_grids(run: Run) -> list[Grid]:
    """Returns the tables of a run: the dev set's, and the test sets' where the run has test scores."""
    summary, scores = run.dev, run.scores or {}
    return [
        *([training_grid(summary)] if summary else []),
        *(grids(scores, None) if "rows" in scores else []),
    ]


def charts(run: Run) -> dict[str, Drawing]:
    """Returns the charts of a run by name; a chart is drawn only if every series that it needs was logged."""
    return {
        name: drawn(name, partial(draw, run=run))
        for name, (needs, draw) in CHARTS.items()
        if needs <= run.series.keys()
    }


def smoothed(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The mean of each value and those around it, a 25th of the series, fewer near its ends: (n,) -> (n,)."""
    half = len(values) // 50
    sums = np.concatenate([[0.0], np.cumsum(values)])
    at = np.arange(len(values))
    low, high = np.maximum(at - half, 0), np.minimum(at + half + 1, len(values))
    return (sums[high] - sums[low]) / (high - low)


def line(ax: Axes, run: Run, name: str, colour: str, label: str, style: str = "-") -> None:
    """Plots a logged series over the optimiser steps, with markers if it is short."""
    steps, values = run.series[name]
    dots = "o" if len(steps) <= 20 else ""
    ax.plot(steps, values, style, marker=dots, color=colour, label=label, linewidth=1.4, markersize=3)


def legend(ax: Axes, columns: int) -> None:
    """Places the legend above the plot, where it covers no data."""
    tight = {"handlelength": 1.4, "handletextpad": 0.4, "columnspacing": 1.1, "borderaxespad": 0.2}
    ax.legend(loc="lower left", bbox_to_anchor=(-0.06, 1.0), ncols=columns, fontsize=9, **tight)


def loss(ax: Axes, run: Run) -> None:
    """Plots the loss, of single batches and smoothed, and its terms; the learning rate has the right axis."""
    steps, values = run.series["train/loss"]
    if len(values) < 50:
        line(ax, run, "train/loss", BLUE, "loss")
    else:
        ax.plot(steps, values, color=BLUE, alpha=0.25, linewidth=0.8)
        ax.plot(steps, smoothed(values), color=BLUE, label="loss", linewidth=1.4)
    known = ("loss", "lr", "sentences_per_second", "diversity_before", "diversity_after")
    terms = [name for name in run.series if name.startswith("train/") and name[6:] not in known]
    for name, colour in zip(terms, cycle((GREEN, *COLOURS[3:])), strict=False):
        line(ax, run, name, colour, name[6:], "--")
    over_steps(ax, "loss")
    if "train/lr" in run.series:
        right = ax.twinx()
        line(right, run, "train/lr", "0.55", "rate", ":")
        right.spines["right"].set_visible(True)
        right.set_ylim(bottom=0)
        right.set_ylabel("learning rate", color="0.4")
        right.tick_params(colors="0.4")
        right.yaxis.offsetText.set_color("0.4")


def quality(ax: Axes, run: Run) -> None:
    """Plots the dev score and the whitening-only baselines, each with its best k at every evaluation."""
    line(ax, run, SPEARMAN, BLUE, "as it is")
    for fitted, colour, label in (("corpus", RED, "training"), ("dev", GREEN, "dev")):
        series = [s for name, s in run.series.items() if name.startswith(f"dev/whitened_on_{fitted}_k")]
        steps = sorted({step for s in series for step in s.steps.tolist()})
        best = [max(v for s in series for v in s.values[s.steps == step]) for step in steps]
        if series:
            ax.plot(steps, best, "--", marker=".", color=colour, linewidth=1.2, label=f"whitened ({label})")
    summary = run.dev or {}
    if summary.get("best") is not None:
        ax.plot(summary["best_step"], summary["best"], "o", color=BLUE, markersize=8, fillstyle="none")
    over_steps(ax, f"{plots.LABEL}, all")
    legend(ax, 3)


def shape(ax: Axes, run: Run) -> None:
    """Plots alignment against uniformity, one point per evaluation, as Figure 3 of WhitenedCSE does."""
    steps = np.intersect1d(run.series["dev/alignment"].steps, run.series["dev/uniformity"].steps)
    names = ("dev/uniformity", "dev/alignment")
    x, y = np.array([[run.at(name, step) for step in steps.tolist()] for name in names])
    ax.plot(x, y, "-", color="0.75", linewidth=1, zorder=1)
    points = ax.scatter(x, y, c=steps, cmap="viridis", s=26, zorder=2)
    if len(steps) > 1:
        ticks = MaxNLocator(5, steps=[1, 2, 5, 10])
        ax.figure.colorbar(points, ax=ax, label="step", fraction=0.05, ticks=ticks)
    named = {int(steps[0]): "first", (run.dev or {}).get("best_step"): "best"}  # the last is often beside it
    for i, step in enumerate(steps.tolist()):
        if step in named:
            label, left = f"{named[step]}, step {step}", x[i] < (x.min() + x.max()) / 2
            beside: Any = {"xytext": (7 if left else -7, 0), "textcoords": "offset points", "va": "center"}
            ax.annotate(label, (x[i], y[i]), ha="left" if left else "right", fontsize=9, **beside)
    ax.margins(0.2)
    ax.set(xlabel="uniformity (lower is better)", ylabel="alignment (lower is better)")


def spectrum(ax: Axes, run: Run) -> None:
    """Plots the variance explained by the first k principal axes at the first, best and last evaluation."""
    top = "dev/variance_top"
    tops = sorted(int(name.removeprefix(top)) for name in run.series if name.startswith(top))
    steps = run.series[f"{top}1"].steps
    chosen = {int(steps[0]): ("0.5", "--"), int(steps[-1]): (RED, ":")}
    best: int = (run.dev or {}).get("best_step", -1)
    chosen |= {best: (BLUE, "-")} if best in steps else {}
    for step, (colour, style) in sorted(chosen.items()):
        points = [(k, share) for k in tops if (share := run.at(f"{top}{k}", step)) is not None]
        label = f"step {step}" + (" (best)" if step == best else "")
        ax.plot(*zip(*points, strict=True), style, marker=".", color=colour, label=label)
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_locator(FixedLocator(tops))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xticklabels([str(k) for k in tops])
    ax.set(xlabel="first k principal axes", ylabel="share of variance", ylim=(0, 1.02))
    legend(ax, 3)


def diversity(ax: Axes, run: Run) -> None:
    """Plots the distance between two views of a sentence, as Figure 1d of WhitenedCSE does."""
    line(ax, run, "train/diversity_before", "0.5", "before whitening", "--")
    line(ax, run, "train/diversity_after", BLUE, "after whitening")
    over_steps(ax, "distance of two views", zero=True)
    legend(ax, 2)


def amount(ax: Axes, run: Run, name: str, what: str) -> None:
    """Plots a non-negative series on an axis that starts at zero."""
    line(ax, run, name, BLUE, what)
    over_steps(ax, what, zero=True)


# for each chart, the columns of metrics.csv that it needs and the function that draws it
CHARTS: dict[str, tuple[set[str], Callable[..., None]]] = {
    "dev": ({SPEARMAN}, quality),
    "loss": ({"train/loss"}, loss),
    "shape": ({"dev/alignment", "dev/uniformity"}, shape),
    "spectrum": ({"dev/variance_top1"}, spectrum),
    "rank": ({RANK}, partial(amount, name=RANK, what="effective rank")),
    "diversity": ({"train/diversity_before", "train/diversity_after"}, diversity),
    "throughput": ({RATE}, partial(amount, name=RATE, what="sentences per second")),
}

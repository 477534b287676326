"""The saved view of a project at Weights & Biases, in code: which charts the runs there make.

The vendor's package for that is wandb-workspaces. The series come from training/monitor.py and loggers.py.
"""

from __future__ import annotations

import os
from typing import Any

from whitenedcse.training.dashboard import STEP, TABLE, answers, has_key

NAME = "WhitenedCSE"
PLANE = ("dev/uniformity", "dev/alignment")
COLUMNS = ("config:system", "config:experiment", "config:seed", "summary:test/avg", "summary:dev/best")


def save(project: str, entity: str | None) -> str:
    """Add the view to a project, of $WANDB_ENTITY or the own account if none is named; returns its address.

    Raises ValueError saying what to do where package, key, network or project are missing.
    """
    try:
        import wandb  # noqa: TID251 (the account's name)
        import wandb_workspaces.workspaces  # noqa: F401
    except ImportError as error:
        raise ValueError(f"{error}; a saved view needs: pip install wandb-workspaces") from error
    if not has_key():
        raise ValueError(
            "no Weights & Biases account on this machine: run `wandb login`, upload what was logged offline"
            " with `wandb sync outputs/NAME/wandb/offline-run-*`, then run this command again"
        )
    if not answers():
        raise ValueError(
            "the Weights & Biases server does not answer, and a saved view lives there; runs go on offline:"
            " `wandb sync` them, and run this command again, from a machine with network"
        )
    try:
        owner = entity or os.environ.get("WANDB_ENTITY") or wandb.Api().default_entity
        view = workspace(project, owner).save()
        return view.url
    except Exception as error:  # the client's errors have no class in common
        raise ValueError(
            f"Weights & Biases refused the view of {project!r}: {error}; is the project there (`wandb sync`"
            " makes it), and the key right (`wandb login --relogin`)?"
        ) from error


def workspace(project: str, entity: str | None) -> Any:
    """The view, a wandb_workspaces Workspace; nothing is sent."""
    import wandb_workspaces.workspaces as ws

    table = ws.RunsetSettings(pinned_columns=list(COLUMNS))
    settings = ws.WorkspaceSettings(x_axis=STEP, max_runs=50)
    view = {"name": NAME, "settings": settings, "runset_settings": table}
    return ws.Workspace(entity=entity, project=project, sections=sections(), **view)


def sections() -> list[Any]:
    """The charts, by what they tell.

    Baselines and the spectrum are patterns: their names have sizes that depend on the encoder's width.
    """
    import wandb_workspaces.reports.v2 as wr
    import wandb_workspaces.workspaces as ws

    def over_steps(title: str, *y: str, pattern: str | None = None) -> Any:
        return wr.LinePlot(title=title, x=STEP, y=list(y), metric_regex=pattern)

    def by_system(metric: str) -> Any:
        spread: dict[str, Any] = {"groupby_aggfunc": "mean", "groupby_rangefunc": "stddev"}
        title = f"{metric} by system: mean, standard deviation over seeds"
        return wr.BarPlot(title=title, metrics=[metric], groupby=wr.Config("system"), **spread)

    at_the_end = {axis: wr.SummaryMetric(f"{name}.last") for axis, name in zip("xy", PLANE, strict=True)}
    path: dict[str, Any] = {"x": PLANE[0], "y": [PLANE[1]], "point_visualization_method": "sampling"}
    charts = {
        "Loss and rate": [over_steps("Loss", "train/loss"), over_steps("Learning rate", "train/lr")],
        "STS dev": [
            over_steps("Spearman x 100, also only whitened", pattern=r"^dev/(spearman|whitened_on_.+)$")
        ],
        "Alignment against uniformity": [
            wr.LinePlot(title="while training (WhitenedCSE, Figure 3)", **path),
            wr.ScatterPlot(title="at the end, a point a run", **at_the_end),
        ],
        "Spectrum": [
            over_steps("variance on the first k principal axes", pattern=r"^dev/variance_top\d+$"),
            over_steps("effective rank", "dev/effective_rank"),
        ],
        "Diversity of views": [
            over_steps(
                "distance before and after whitening (WhitenedCSE, Figure 1d)",
                "train/diversity_before",
                "train/diversity_after",
            )
        ],
        "Throughput": [over_steps("sentences a second", "train/sentences_per_second")],
        "Final scores": [
            wr.WeavePanelSummaryTable(table_name=TABLE),
            wr.BarPlot(title="test/avg", metrics=["test/avg"]),
        ],
        "Sweep": [by_system("test/avg"), by_system("dev/best")],
    }
    return [ws.Section(name=name, panels=panels, is_open=True) for name, panels in charts.items()]

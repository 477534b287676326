"""Weights & Biases: the logger of a run, online unless WANDB_MODE says otherwise; a view of a project."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.utilities import rank_zero_only

from whitenedcse.console import lacking
from whitenedcse.files import writing
from whitenedcse.run import Run, by_task

STEP = "trainer/global_step"  # optimiser steps done, as Lightning logs them: the x axis of every series
VIEW: dict[str, list[str]] = {  # of the view: a section, and its series, or a pattern of them
    "Training": ["train/loss", "train/lr", "train/diversity_(before|after)", "train/sentences_per_second"],
    "STS dev": ["dev/(spearman|whitened_on_.+)", "dev/uniformity", "dev/alignment"],
    "Spectrum": [r"dev/variance_top\d+", "dev/effective_rank"],
}


class Dashboard(WandbLogger):
    """Lightning's logger, which at the end of a run also has its scores and, if `artifacts` is set, best/."""

    def __init__(self, *, artifacts: bool, **settings: Any) -> None:
        super().__init__(**settings)
        self._wandb_init.pop("anonymous", None)  # Lightning's, of which wandb warns
        self.artifacts = artifacts

    @rank_zero_only
    def finish(self, best: Path, scores: Mapping[str, Any]) -> None:
        """Log the scores, with tests as a table, and close the run."""
        self.experiment.summary["dev/best"] = scores["dev"]["best"]  # unlike the maximum, never of step 0
        if rows := [{"row": r["name"]} | by_task(r, scores["headline"]) for r in scores.get("rows", ())]:
            self.log_table("final", columns=list(rows[0]), data=[list(row.values()) for row in rows])
        if self.artifacts:
            self.experiment.log_artifact(str(best), name=f"model-{self.experiment.id}", type="model")
        self.experiment.finish()

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Close a run that failed: what this process runs next would be logged there."""
        super().finalize(status)
        if status == "failed":
            self.experiment.finish(exit_code=1)


def wandb_logger(*, project: str, entity: str | None, artifacts: bool, run: Path) -> Dashboard:
    """The logger of a run directory, which keeps one id; ValueError where the server cannot be reached."""
    if rank_zero_only.rank:  # type: ignore[attr-defined]  # on other ranks it does nothing
        return Dashboard(artifacts=artifacts, project=project, offline=True)
    os.environ.setdefault("WANDB_INIT_TIMEOUT", "30")
    os.environ.setdefault(
        "WANDB_DATA_DIR", str(run.absolute() / "wandb")
    )  # tables wait there for `wandb sync`
    if not (known := run / "wandb" / "id").exists():
        known.parent.mkdir(parents=True, exist_ok=True)
        with writing(known, "w") as stream:
            stream.write(secrets.token_hex(4))
    group = run.parent.name if (run.parent / "multirun.yaml").exists() else None
    settings: dict[str, Any] = {"project": project, "entity": entity, "save_dir": run, "group": group}
    settings |= {
        "id": known.read_text(),
        "name": f"{group}/{run.name}" if group else run.name,
        "config": {**Run(run).facts, **Run(run).settings},
    }
    logger = Dashboard(artifacts=artifacts, resume="allow", **settings)
    try:
        _ = logger.experiment
    except Exception as error:  # the client's errors have no class in common
        said = " ".join(str(error).split())
        raise ValueError(f"logger=wandb: {said}; `wandb login`, or set WANDB_MODE=offline") from error
    return logger


def save(project: str) -> str:
    """Add the view to a project; returns its address. Raises ValueError in one line where that fails."""
    try:
        import wandb  # noqa: TID251  (the account's name)
        import wandb_workspaces.reports.v2 as wr
        import wandb_workspaces.workspaces as ws
    except ImportError as error:
        raise lacking("a saved view", "wandb-workspaces", error=error) from error
    lines = {
        name: [wr.LinePlot(title=y, x=STEP, metric_regex=f"^{y}$") for y in series]
        for name, series in VIEW.items()
    }
    bars = [wr.BarPlot(title=y, metrics=[y], groupby=wr.Config("system")) for y in ("test/avg", "dev/best")]
    panels = {**lines, "Scores": [wr.WeavePanelSummaryTable(table_name="final"), *bars]}
    sections = [ws.Section(name=name, panels=held, is_open=True) for name, held in panels.items()]
    try:
        entity = os.environ.get("WANDB_ENTITY") or wandb.Api().default_entity
        return ws.Workspace(entity=entity, project=project, name="WhitenedCSE", sections=sections).save().url
    except Exception as error:  # the client's errors have no class in common
        raise ValueError(f"the view of {project!r} was not saved: {error}; `wandb login`?") from error

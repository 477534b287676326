"""Weights & Biases: the logger, one run per job, offline without an account; and a saved view of a project.

The package for views is wandb-workspaces. The series are those of training/monitor.py and loggers.py.
"""

from __future__ import annotations

import netrc
import os
import secrets
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import ParseResult, urlparse

from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.utilities import rank_zero_only

from whitenedcse.console import lacking
from whitenedcse.files import writing
from whitenedcse.run import Run, by_task

STEP = "trainer/global_step"  # optimiser steps done, as Lightning logs them: the x axis of every series
TABLE = "final"  # a row a system, a column a task
# the servers that clients use by default: wandb 0.19 and 0.31
SERVERS = ("https://api.wandb.ai", "https://api.forge.coreweave.com")
TAG = 64  # characters, at most


class Dashboard(WandbLogger):
    """Lightning's Weights & Biases logger, which defines each series when it is first logged.

    Which series there are depends on head and width. (Patterns would not do: Lightning defines "*", and of
    two patterns that match the client takes either.)
    """

    def __init__(self, *, artifacts: bool, **settings: Any) -> None:
        super().__init__(**settings)
        self._wandb_init.pop("anonymous", None)  # Lightning's, of which wandb warns
        self.artifacts = artifacts
        self.defined: set[str] = set()

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log values taken after `step` optimiser steps."""
        for name in sorted(metrics.keys() - self.defined):
            self.experiment.define_metric(name, step_metric=STEP, summary=summary(name))
            self.defined.add(name)
        super().log_metrics(metrics, step)

    @rank_zero_only
    def finish(self, best: Path, scores: Mapping[str, Any]) -> None:
        """Log the scores, with tests as a table, and best/ if `artifacts` is set; then close the run."""
        self.experiment.summary["dev/best"] = scores["dev"]["best"]  # unlike the maximum, never of step 0
        if rows := scores.get("rows"):
            lines = [{"row": row["name"]} | by_task(row, scores["headline"]) for row in rows]
            self.log_table(TABLE, columns=list(lines[0]), data=[list(values.values()) for values in lines])
        if self.artifacts:
            name = f"model-{self.experiment.id}"
            self.experiment.log_artifact(str(best), name=name, type="model", aliases=["best"])
        self.experiment.finish()


def wandb_logger(*, project: str, entity: str | None, artifacts: bool, run: Path) -> Dashboard:
    """The logger of a run directory, online if there is a key and the server answers.

    A directory keeps one id, so that a run that resumes is the same run there. Jobs of a sweep are a group.
    On ranks other than the first the logger does nothing.
    """
    if rank_zero_only.rank:  # type: ignore[attr-defined]
        return Dashboard(artifacts=artifacts, project=project, offline=True)
    os.environ.setdefault("WANDB_INIT_TIMEOUT", "30")
    # tables wait for `wandb sync` in the run directory (of this process' first run), not at home
    os.environ.setdefault("WANDB_DATA_DIR", str(run.absolute() / "wandb"))
    config, group = facts(run), sweep(run)
    settings: dict[str, Any] = {"project": project, "entity": entity, "save_dir": run, "id": identity(run)}
    settings |= {"name": f"{group}/{run.name}" if group else run.name, "group": group, "job_type": "train"}
    settings |= {"config": config, "tags": tags(config), "resume": "allow", "offline": offline()}
    return Dashboard(artifacts=artifacts, **settings)


def summary(name: str) -> str | None:
    """The aggregates of a series that are kept, such as "max,last"; None for the last value alone."""
    if name.startswith(("dev/spearman", "dev/whitened_on_")):
        return "max,last"
    if name == "train/loss":
        return "min,last"
    return "last" if name.startswith(("train/", "dev/")) else None


def facts(run: Path) -> dict[str, Any]:
    """What a run can be searched by: its settings and the contents of versions.json."""
    return {**Run(run).facts, **Run(run).settings}


def tags(facts: Mapping[str, Any]) -> list[str]:
    """Experiment, system and encoder of a run, as far as it has them."""
    encoder = facts["encoder"].get("path") or facts["encoder"]["_target_"].rpartition(".")[2]
    names = (facts.get("experiment"), facts.get("system"), Path(encoder).name)
    return [name[:TAG] for name in dict.fromkeys(names) if name]


def sweep(run: Path) -> str | None:
    """The name of the sweep that a run is a job of, known by Hydra's multirun.yaml; None for no sweep."""
    return run.parent.name if (run.parent / "multirun.yaml").exists() else None


def identity(run: Path) -> str:
    """The id of a run directory, made on the first call."""
    known = run / "wandb" / "id"
    if not known.exists():
        known.parent.mkdir(parents=True, exist_ok=True)
        with writing(known, "w") as stream:
            stream.write(secrets.token_hex(4))
    return known.read_text()


def offline() -> bool:
    """Whether to write locally only: by WANDB_MODE, or for want of a key or of the server's answer."""
    mode = os.environ.get("WANDB_MODE")
    return mode in ("offline", "dryrun") or (mode is None and not (has_key() and answers()))


def has_key() -> bool:
    """Whether an account's key is set for this process, or stored by `wandb login`."""
    with suppress(OSError, netrc.NetrcParseError):
        stored = netrc.netrc()
        if any(stored.authenticators(name) for url in servers() for name in (url.netloc, url.hostname or "")):
            return True
    return bool(os.environ.get("WANDB_API_KEY"))


def servers() -> list[ParseResult]:
    """The Weights & Biases server named by $WANDB_BASE_URL; else those that clients use by default."""
    named = os.environ.get("WANDB_BASE_URL")
    return [urlparse(url) for url in ([named] if named else SERVERS)]


def answers() -> bool:
    """Whether all `servers` accept a connection within three seconds."""
    try:
        for url in servers():
            port = url.port or (443 if url.scheme == "https" else 80)
            socket.create_connection((url.hostname or "", port), timeout=3.0).close()
        return True
    except OSError:
        return False


NAME = "WhitenedCSE"
PLANE = ("dev/uniformity", "dev/alignment")
COLUMNS = ("config:system", "config:experiment", "config:seed", "summary:test/avg", "summary:dev/best")


def save(project: str, entity: str | None) -> str:
    """Add the view to a project of $WANDB_ENTITY, or of the account if that is not set; returns its address.

    Raises ValueError that says what to do where package, key, network or project are missing.
    """
    try:
        import wandb  # noqa: TID251 (the account's name)
        import wandb_workspaces.workspaces  # noqa: F401
    except ImportError as error:
        raise lacking("a saved view", "wandb-workspaces", error=error) from error
    if not has_key():
        raise ValueError(
            "no Weights & Biases account on this machine: run `wandb login`, upload what was logged offline"
            " with `wandb sync outputs/NAME/wandb/offline-run-*`, then run this command again"
        )
    if not answers():
        raise ValueError(
            "the Weights & Biases server does not answer, and a saved view is stored there; runs are logged"
            " offline: `wandb sync` them, and run this command again, from a machine with network"
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
    """The view as a wandb_workspaces Workspace, not yet sent."""
    import wandb_workspaces.workspaces as ws

    table = ws.RunsetSettings(pinned_columns=list(COLUMNS))
    settings = ws.WorkspaceSettings(x_axis=STEP, max_runs=50)
    view = {"name": NAME, "settings": settings, "runset_settings": table}
    return ws.Workspace(entity=entity, project=project, sections=sections(), **view)


def sections() -> list[Any]:
    """The charts of the view, by subject.

    Baselines and the spectrum are patterns: their names contain sizes that depend on the encoder's width.
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
            over_steps("Spearman x 100 (all), also only whitened", pattern=r"^dev/(spearman|whitened_on_.+)$")
        ],
        "Alignment against uniformity": [
            wr.LinePlot(title="while training (WhitenedCSE, Figure 3)", **path),
            wr.ScatterPlot(title="at the end, one point per run", **at_the_end),
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

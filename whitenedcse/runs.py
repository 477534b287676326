"""A run over time: begun, continued, ended; in this process, or in one for each device."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from lightning.pytorch.loggers import Logger

from whitenedcse import launch, ranks
from whitenedcse.durable import write_json
from whitenedcse.launch import say
from whitenedcse.report import judgements, record
from whitenedcse.report.tables import grids, training_grid
from whitenedcse.training.checkpoints import newest, step_of


def mine(run: Path, settings: str, devices: int) -> bool:
    """Whether this process is to train: not if the run has ended, nor if a process for each device did it.

    Raises ValueError if the directory holds a run with other settings, or another process writes it.
    """
    if finished(run, settings) or several(run, devices):
        return False
    record.claim(run)
    return not finished(run, settings)  # while waiting for the directory


def finished(run: Path, settings: str) -> bool:
    """Whether this run ended before; it is then left alone."""
    record.refuse_other(run, settings, {}, force=forced())
    if record.scores(run) is None:
        return False
    say(f"{run} is finished and left alone; run=NAME with another name makes another run\nrun: {run}")
    return True


def begin(run: Path, settings: str, facts: Mapping[str, Any], digests: Mapping[str, str]) -> Path | None:
    """Write down a new run, or find the checkpoint where an unfinished one goes on (None: the start).

    digests: of data and tokenizer. Raises ValueError if they, the settings or the number of processes are not
    what the run began with.
    """
    here = ranks.placed()
    exact = {**digests, "processes": here.world if here else 1}
    record.refuse_other(run, settings, exact, force=forced())
    checkpoint = newest(run / "checkpoints", say)
    if not (run / "config.yaml").exists():
        record.start(run, settings, **facts, **exact)
        return None
    step = step_of(checkpoint)
    changed = record.resumed(run, settings, exact, step)
    say(f"{run} goes on after step {step}")
    if changed:
        say(f"what follows may differ in the last bits: {', '.join(changed)}")
    return checkpoint


def end(run: Path, dev: dict[str, Any], loggers: list[Logger], judged: Callable[..., Any] | None) -> None:
    """Judge the best checkpoint on the tests, if there are any; leave, log and show the scores."""
    scores: dict[str, Any] = {"dev": dev}
    if judged is None:
        write_json(run / "scores.json", scores)
    else:
        scores, _ = judged(run, scores)
        for logger in loggers:
            logger.log_metrics(judgements.series(scores), dev["last_step"])
    launch.show([training_grid(dev), *(grids(scores, None) if judged else [])])
    here = run.relative_to(Path.cwd()) if run.is_relative_to(Path.cwd()) else run
    say(f"best checkpoint: {here}/best   metrics: {here}/metrics.csv   scores: {here}/scores.json")
    launch.end(loggers, run)


def forced() -> bool:
    """Whether --force was given."""
    return os.environ.get("WHITENEDCSE_FORCE") == "1"


def several(run: Path, devices: int) -> bool:
    """Run this job as one process a device, unless it is one of them; whether that was done.

    Ends this process if the job failed. Raises ValueError for a sweep inside of ranks started elsewhere: each
    rank would sweep by itself.
    """
    hydra = HydraConfig.get()
    if ranks.placed() is not None:
        if hydra.mode == RunMode.MULTIRUN and "SLURM_JOB_ID" not in os.environ:
            raise ValueError(
                "torchrun would sweep once in each rank; use python train.py -m trainer.devices=N"
            )
        return False
    if devices < 2:
        return False
    job = sys.argv[1:] if hydra.mode == RunMode.RUN else [*hydra.overrides.task, *inherited(hydra)]
    job += ["--force"] if forced() else []
    status = ranks.run([sys.executable, sys.argv[0], *job, f"hydra.run.dir={run}"], devices)
    if status:
        sys.exit(status)
    return True


def inherited(hydra: Any) -> list[str]:
    """What a job of a sweep takes over of Hydra's own settings: where configurations are found."""
    return [text for text in hydra.overrides.hydra if text.startswith("hydra.searchpath")]

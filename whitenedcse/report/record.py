"""The run directory: what was run, with what, and what came out; and whether a run may go on in it."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import OmegaConf

from whitenedcse.durable import read_json, write_json, writing
from whitenedcse.report.history import run_of
from whitenedcse.settings import flat

PACKAGES = ("whitenedcse", "torch", "transformers", "lightning", "datasets", "hydra-core", "numpy", "scipy")
FREE = {
    "run",
    "checkpoint_every",
    "data.corpus",
    "trainer.devices",
    "trainer.num_nodes",
}  # may change in a run
held: dict[Path, FileLock] = {}  # until this process ends
ORIGIN = ("experiment", "system", "seed")
SECONDS = 5.0  # for a process that was just killed to let go of its directory


@rank_zero_only
def claim(run: Path) -> None:
    """Keep other processes from writing this directory until this one ends. Raises ValueError if one does."""
    run.mkdir(parents=True, exist_ok=True)
    lock = held.setdefault(run, FileLock(run / ".lock"))
    try:
        lock.acquire(timeout=SECONDS)
    except Timeout:
        raise ValueError(f"{run} is being written by another process; wait, or use run=NAME") from None


@rank_zero_only
def start(run: Path, config: str, **facts: Any) -> None:
    """Write config.yaml and, with `facts`, versions.json. Raises ValueError if the directory holds a run."""
    claim(run)
    if (run / "config.yaml").exists():
        raise ValueError(f"{run} already holds a run; choose another name with run=NAME, or delete it")
    write(run, config, {"command": " ".join(sys.argv), **facts, **environment()})


def write(run: Path, config: str, versions: Mapping[str, Any]) -> None:
    """Write both files, the one that makes the directory a run last."""
    run.mkdir(parents=True, exist_ok=True)
    write_json(run / "versions.json", versions)
    with writing(run / "config.yaml", "w") as stream:
        stream.write(config)


def scores(run: Path) -> dict[str, Any] | None:
    """scores.json of a finished run; None before."""
    with suppress(FileNotFoundError):
        content: dict[str, Any] = read_json(run / "scores.json")
        return content
    return None


def best(run: Path) -> float | None:
    """The dev score of a finished training run."""
    value: float | None = (scores(run) or {"dev": {"best": None}})["dev"]["best"]
    return value


def refuse_other(run: Path, config: str, exact: Mapping[str, Any], *, force: bool = False) -> None:
    """Raise ValueError if the run that this directory holds began with other settings or facts.

    config: the resolved settings as YAML. exact: what else decides each bit: data, tokenizer, processes.
    """
    if force or not (run / "config.yaml").exists():
        return
    began = began_with(run, exact)
    now = flat(plain(config)) | dict(exact)
    differences = [
        f"{name}={now.get(name)} (it began with {began.get(name)})"
        for name in sorted(began.keys() | now.keys())
        if began.get(name) != now.get(name) and name not in FREE and not name.startswith("logger")
    ]
    if differences:
        raise ValueError(
            f"{run} holds another run: {', '.join(differences)}; choose another name with run=NAME, or add"
            " --force to go on in it"
        )


def began_with(run: Path, exact: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by dotted name, and those facts of `exact` that were written down."""
    versions = read_json(run / "versions.json")
    return flat(plain((run / "config.yaml").read_text())) | {name: versions.get(name) for name in exact}


@rank_zero_only
def resumed(run: Path, config: str, facts: Mapping[str, Any], step: int) -> list[str]:
    """Note that a run goes on; returns what of commit, packages and threads is no longer as it began."""
    versions = read_json(run / "versions.json")
    now = environment()
    changed = {name: value for name, value in flat(now).items() if flat(versions).get(name) != value}
    again = {"step": step, "command": " ".join(sys.argv), **changed}
    write(run, config, {**versions, **facts, "resumed": [*versions.get("resumed", []), again]})
    return [f"{name}={value} (it began with {flat(versions).get(name)})" for name, value in changed.items()]


def plain(config: str) -> Mapping[str, Any]:
    """YAML as dictionaries."""
    content: Any = OmegaConf.to_container(OmegaConf.create(config))
    return content


def origin(model: str) -> dict[str, Any]:
    """Experiment, system and seed of the train run that a model is, or lies in; None where it is none."""
    facts: dict[str, Any] = {}
    if run := run_of(Path(model)):
        with suppress(OSError, ValueError):
            facts = read_json(run / "versions.json")
    return {key: facts.get(key) for key in ORIGIN}


def environment() -> dict[str, Any]:
    """Packages, commit and hardware: what a number depends on."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "packages": {name: version(name) for name in PACKAGES},
        "python": platform.python_version(),
        "commit": commit(),
        "machine": {"platform": platform.platform(), "cores": os.cpu_count(), "gpus": gpus},
        "threads": torch.get_num_threads(),
    }


def commit() -> str | None:
    """The git commit of this source tree, "+changes" if it is not clean; None outside a checkout."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        name = subprocess.run(
            [*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
        changed = subprocess.run(
            [*git, "status", "--porcelain"], capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return name + ("+changes" if changed.strip() else "")

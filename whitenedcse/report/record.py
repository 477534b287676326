"""The run directory: what was run, with what, and what came out."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_only

PACKAGES = ("whitenedcse", "torch", "transformers", "lightning", "datasets", "hydra-core", "numpy", "scipy")


@rank_zero_only
def start(run: Path, config: str, **facts: Any) -> None:
    """Write config.yaml and, with `facts`, versions.json. Raises ValueError if the directory holds a run."""
    if any((run / name).exists() for name in ("scores.json", "best", "checkpoints")):
        raise ValueError(f"{run} already holds a run; choose another name with run=NAME, or delete it")
    run.mkdir(parents=True, exist_ok=True)
    (run / "config.yaml").write_text(config)
    write_json(run / "versions.json", {"command": " ".join(sys.argv), **facts, **environment()})


def origin(model: str) -> dict[str, Any]:
    """The experiment and the seed of the train run that a model is, or lies in; None where it is none."""
    for folder in (Path(model), Path(model).parent):
        with suppress(OSError, ValueError):
            facts = json.loads((folder / "versions.json").read_text())
            return {key: facts.get(key) for key in ("experiment", "seed")}
    return {"experiment": None, "seed": None}


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


def write_json(path: Path, content: Any) -> None:
    """Write beside the target, then rename: a kill leaves the old file or the new one."""
    new = path.with_name(path.name + ".new")
    new.write_text(json.dumps(content, indent=2) + "\n")
    new.replace(path)

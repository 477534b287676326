"""What runs of train.py left, read back: settings, facts, scores, and each series of metrics.csv."""

from __future__ import annotations

import csv
import glob
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from omegaconf import OmegaConf

from whitenedcse.durable import read_json, whole_lines

DEV = "dev/spearman"


class Series(NamedTuple):
    """What was logged by one name: at which optimiser steps, and the finite values."""

    steps: NDArray[np.int64]
    values: NDArray[np.float64]


class Run(NamedTuple):
    """A run of train.py; `scores` is None until it is finished."""

    path: Path
    settings: dict[str, Any]
    facts: dict[str, Any]
    scores: dict[str, Any] | None
    series: dict[str, Series]


def paths(names: Iterable[str]) -> list[Path]:
    """Directories, and those that patterns (outputs/sgw-*) stand for, in the order of their numbers.

    Raises FileNotFoundError for a name that stands for nothing.
    """
    found: dict[Path, Path] = {}
    for name in names:
        here = [path for path in map(Path, glob.glob(name) if glob.has_magic(name) else [name])]
        if not any(path.is_dir() for path in here):
            raise FileNotFoundError(f"{name} is no directory, and no published table (--list names them)")
        found |= {path.resolve(): path for path in here if path.is_dir()}
    return [found[path] for path in sorted(found, key=natural)]


def natural(path: Path) -> list[tuple[int, str]]:
    """What sorts 10 behind 9."""
    return [(int(part) if part.isdigit() else -1, part) for part in re.split(r"(\d+)", str(path))]


def is_run(path: Path) -> bool:
    """Whether train.py wrote here; evaluate.py has a config.yaml too, which no monitor is in."""
    return (path / "config.yaml").is_file() and "monitor" in settings(path / "config.yaml")


def run_of(model: Path) -> Path | None:
    """The run directory that a model is, or lies in; None where it is none."""
    folders = (model, model.parent) if model.exists() else ()
    return next((folder for folder in folders if (folder / "config.yaml").is_file()), None)


def below(folder: Path) -> Iterator[Path]:
    """The runs of train.py in a directory: itself, or those below; what a run holds is not looked into."""
    if (folder / "config.yaml").is_file():
        yield from [folder] if is_run(folder) else []
        return
    for child in sorted((path for path in folder.iterdir() if path.is_dir()), key=natural):
        yield from below(child)


def runs(folders: Sequence[Path]) -> list[Run]:
    """The runs in or below directories, each once. Raises ValueError where there is none."""
    found: dict[Path, Path] = {}
    for folder in folders:
        inside = list(below(folder))
        if not inside:
            raise ValueError(f"no run of train.py in {folder}, which would hold config.yaml and metrics.csv")
        found |= {path.resolve(): path for path in inside}
    return [load(found[path]) for path in sorted(found, key=natural)]


def load(path: Path) -> Run:
    """A run, finished or not. Raises ValueError, naming the file, for one that cannot be read."""
    scores = facts(path / "scores.json")
    if scores is not None and "dev" not in scores:
        raise ValueError(f"{path / 'scores.json'} has no dev scores; train.py writes them when a run ends")
    known = facts(path / "versions.json") or {}
    return Run(path, settings(path / "config.yaml"), known, scores, series(path / "metrics.csv"))


def settings(file: Path) -> dict[str, Any]:
    """config.yaml as dictionaries."""
    try:
        content: Any = OmegaConf.to_container(OmegaConf.load(file))
    except Exception as error:  # each YAML mistake is of another class
        raise ValueError(f"{file} is not YAML: {error}") from None
    return content if isinstance(content, dict) else {}


def facts(file: Path) -> dict[str, Any] | None:
    """A JSON file, if there is one."""
    if not file.is_file():
        return None
    content = read_json(file)
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds no names and values")
    return content


def series(file: Path) -> dict[str, Series]:
    """metrics.csv by column, without what is not finite."""
    lines = csv.reader(whole_lines(file))
    header = next(lines, ["step"])
    columns: dict[str, list[tuple[int, float]]] = {name: [] for name in header if name != "step"}
    for number, cells in enumerate(lines, 2):
        try:
            line = dict(zip(header, cells, strict=True))
            step = int(line.pop("step"))
            for name, cell in line.items():
                columns[name] += [(step, float(cell))] if cell else []
        except (ValueError, KeyError) as error:
            raise ValueError(f"{file}:{number}: not a step and numbers by column: {error}") from None
    kept = {name: [(s, v) for s, v in pairs if np.isfinite(v)] for name, pairs in columns.items()}
    return {
        name: Series(np.array([s for s, _ in pairs]), np.array([v for _, v in pairs]))
        for name, pairs in kept.items()
        if pairs
    }


def at(run: Run, name: str, step: int) -> float | None:
    """What was logged by a name at a step, if anything was."""
    if name not in run.series:
        return None
    values = run.series[name].values[run.series[name].steps == step]
    return float(values[-1]) if len(values) else None


def median(run: Run, name: str) -> float | None:
    """The median of a series, None without one."""
    return float(np.median(run.series[name].values)) if name in run.series else None


def dev(run: Run) -> dict[str, Any] | None:
    """`dev` of scores.json; of an unfinished run the same of its judgements so far; None before the first."""
    if run.scores is not None:
        summary: dict[str, Any] = run.scores["dev"]
        return summary
    if DEV not in run.series:
        return None
    steps, values = run.series[DEV]
    best = int(np.argmax(values[1:])) + 1 if len(values) > 1 else 0
    summary = {"before": values[0], "best": values[best], "best_step": int(steps[best]), "n": None}
    names = [name for name in run.series if name.startswith("dev/")]
    for key, step in (("values_before", steps[0]), ("values_best", steps[best])):
        summary[key] = {name: at(run, name, int(step)) for name in names}
    return summary

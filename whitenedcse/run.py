"""A run directory as one object: settings, what they were run with, checkpoints, series and scores.

config.yaml      the resolved settings; a directory that holds it is a run
versions.json    `facts`: command, packages, commit, hardware, data, and each resumption
checkpoints/     of train.py, until it ends: step-STEP-CHECKSUM.ckpt, to resume it
best/            of train.py: the best checkpoint
metrics.csv      of train.py: `series`, a column each
items.npz        `items`: by "row/task", what each pair or text of a test scored
scores.json      `scores`: dev scores of train.py, tests of evaluate.py. Written last, it marks a run as ended
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from shlex import quote
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from omegaconf import OmegaConf

from whitenedcse.distributed import is_first, shared
from whitenedcse.files import (
    LOCK,
    MARKS,
    arrays,
    claimed,
    parsing,
    read_json,
    table,
    write_json,
    writing,
)
from whitenedcse.inputs import expanded

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

OTHER = "choose another name with run=NAME (in Python, output=DIR)"
SWEPT = "multirun.yaml"  # what Hydra writes in the folder of a sweep
FREE = {"run", "force", "checkpoint_every", "data.corpus"}  # settings that may change
FREE |= {"trainer.devices", "trainer.num_nodes", "trainer.timeout"}
SCRATCH = "whitenedcse.model.scratch.small_bert"  # the encoder of random weights
SPEARMAN = "dev/spearman"  # the name of the dev score in metrics.csv
FORMAT = "0.3"  # of the files of a run: the version that changed them last


class Run:
    """A run of `train` or `evaluate` in a directory: finished, unfinished or not yet started.

    path: the directory. `settings` is what the run was started with, `facts` the packages and hardware it
    ran on, `series` the logged values by name, and `results` the scores. `scores` is the same, but None until
    the run has ended. `Embedder.load(run)` is its best checkpoint. Reading a damaged file raises ValueError.

    >>> Run("outputs/none").began
    False
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(expanded(path))
        self.checkpoints, self.best = self.path / "checkpoints", self.path / "best"
        self.metrics, self.config = self.path / "metrics.csv", self.path / "config.yaml"

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    def __fspath__(self) -> str:
        return str(self.path)

    @classmethod
    def of(cls, model: str | Path) -> Run | None:
        """The run that a model is the directory or the best checkpoint of; None for any other model."""
        place = Path(expanded(model))
        folders = (place, place.parent) if place.name == "best" else (place,)
        return next((run for run in map(cls, folders) if place.exists() and run.trains), None)

    # what it holds

    @property
    def began(self) -> bool:
        """Whether train.py or evaluate.py has started a run in this directory."""
        return self.config.is_file()

    @property
    def trains(self) -> bool:
        """Whether it is a run of train.py; a run of evaluate.py has no monitor."""
        return self.began and "monitor" in self.settings

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The content of config.yaml. Raises ValueError if it is not YAML, or of before version 0.3."""
        with parsing(self.config, "copy it again, or name a new run"):
            content: Any = OmegaConf.to_container(OmegaConf.load(self.config))
            settings = {str(name): value for name, value in content.items()}
        if "packages" in self.facts and self.facts.get("format") != FORMAT:
            raise ValueError(
                f"{self.path} is a run of before version {FORMAT}, which 0.2.0 was the last to read"
            )
        return settings

    @cached_property
    def facts(self) -> dict[str, Any]:
        """The content of versions.json, or {} without that file. Raises ValueError if not a JSON object."""
        file = self.path / "versions.json"
        return read_json(file) if file.is_file() else {}

    @property
    def scores(self) -> dict[str, Any] | None:
        """The content of scores.json; None until the run ends. Raises ValueError if not a JSON object."""
        return self._scores if (self.path / "scores.json").is_file() else None

    @cached_property
    def _scores(self) -> dict[str, Any]:
        return read_json(self.path / "scores.json")

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows of test scores; [] before the end, and of a run without tests."""
        return (self.scores or {}).get("rows", [])

    @property
    def results(self) -> dict[str, Any]:
        """The `scores` of a run that has ended. Raises FileNotFoundError if it has not."""
        if self.scores is None:
            sweep = f"a sweep: name runs of it, as {self.path}/0, or all as '{self.path}/*'"
            kind = (
                sweep if (self.path / SWEPT).is_file() else "not a run that has ended: it has no scores.json"
            )
            raise FileNotFoundError(f"{self.path} is {kind}")
        return self.scores

    @cached_property
    def items(self) -> dict[str, NDArray[Any]]:
        """The arrays of evaluate.py's items.npz by name. Raises FileNotFoundError without that file."""
        return arrays(self.path / "items.npz")

    @cached_property
    def series(self) -> dict[str, Series]:
        """The columns of metrics.csv by name: for each, the steps (n,) and the finite values (n,)."""
        return logged(self.metrics)

    def row(self, name: str | None = None) -> tuple[int, dict[str, Any]]:
        """The number and the content of a row of test scores by its name, or the beginning of that.

        name: None for the first. Raises FileNotFoundError before the run's end, ValueError for no such row.
        """
        rows = self.results.get("rows", [])
        names = [line["name"] for line in rows]
        like = [name] if name in names else [own for own in names if own.startswith(name or "")]
        if not like or (name and len(like) > 1):
            said = f"{len(like)} rows of test scores that begin with {name!r}"
            raise ValueError(f"{self.path} has {said}; it has {', '.join(names) or 'none'}")
        number = names.index(like[0])
        return number, rows[number]

    def tests(self, row: str | None = None) -> dict[str, float | None]:
        """The test scores x 100 in a row of the table (see `row`), by task and "avg"; {} without tests."""
        found = self.row(row)[1] if row or self.results.get("rows") else {}
        return by_task(found, self.results["headline"]) if found else {}

    @property
    def best_score(self) -> float | None:
        """The dev score of the best checkpoint; None without dev pairs or training, or before its end."""
        return (self.scores or {}).get("dev", {}).get("best")

    @property
    def origin(self) -> dict[str, Any]:
        """Experiment, system, seed and `Encoder.provenance`; None where one is not known."""
        return {key: self.facts.get(key) for key in ("experiment", "system", "seed", "encoder")}

    # how it is written, from its beginning to its end; of several ranks, by the first

    @contextmanager
    def claim(self) -> Iterator[None]:
        """A context in which no other process writes here. Raises ValueError if one does."""
        lock = None
        if is_first():
            self.path.mkdir(parents=True, exist_ok=True)
            lock = claimed(self.path, f"wait, or {OTHER}")
        self._forget()  # what was read before another process wrote it
        try:
            yield
        finally:
            if lock is not None:
                if not self.began:
                    (self.path / LOCK).unlink(missing_ok=True)
                lock.lock.release()

    def _forget(self) -> None:
        for name in ("settings", "facts", "_scores", "series", "items"):
            self.__dict__.pop(name, None)

    @contextmanager
    def tidied(self) -> Iterator[None]:
        """A context in which an error before anything was written leaves no folder here."""
        self.check_free()
        try:
            yield
        except BaseException:
            self.remove_if_empty()
            raise

    def remove_if_empty(self) -> None:
        """Remove the directory, which Hydra makes before a run begins, if nothing is in it."""
        with suppress(OSError):  # of the system, for a folder that holds anything
            self.path.rmdir()

    @property
    def kept(self) -> bool:
        """Whether an end or a checkpoint is here, which another run would lose or take for its own."""
        return self.scores is not None or any(self.checkpoints.glob("step-*"))

    def check_free(self, *, sweep: bool = False) -> None:
        """Raise ValueError if the directory holds anything other than a run or, if `sweep`, than a sweep."""
        kind, mark = ("a run", self.config.name) if sweep else ("a sweep", SWEPT)
        if (self.path / mark).exists():
            raise ValueError(f"{self.path} holds {kind}; {OTHER}")
        if any((self.path / name).exists() for name in MARKS):
            raise ValueError(f"{self.path} holds something other than a run; {OTHER}")

    def check_same(self, config: str, exact: Mapping[str, Any], *, force: bool = False) -> list[str]:
        """Raise ValueError if the work `kept` here is of other settings or facts; `force` returns them.

        config: the resolved settings as YAML. exact: what else decides each bit, as digests of the data.
        """
        if not self.kept:
            return []
        asked: Any = OmegaConf.to_container(OmegaConf.create(config))
        others = differences(self.settings, self.facts, asked, exact)
        if others and not force:
            some = ", ".join(others[:6]) + (f", and {len(others) - 6} more" if len(others) > 6 else "")
            cure = "" if self.scores else "; or, to resume it anyway, add --force (in Python, force=True)"
            raise ValueError(f"{self.path} holds another run: {some}; {OTHER}{cure}")
        return others

    def start(self, config: str, **facts: Any) -> None:
        """Write versions.json, of `facts` and the environment, and config.yaml; ValueError where work is."""
        if self.kept:
            raise ValueError(f"{self.path} already holds a run; {OTHER}")
        from whitenedcse.compute import environment

        self._write(config, {"format": FORMAT, "command": pasted(sys.argv), **facts, **environment()})

    def resume(self, config: str, exact: Mapping[str, Any], step: int) -> list[str]:
        """Note that the run resumes after a step; returns what in `environment` changed since it started."""
        from whitenedcse.compute import environment

        now, then = flat(environment()), flat(self.facts)
        changed = {name: value for name, value in now.items() if then.get(name) != value}
        again = {"step": step, "command": pasted(sys.argv), **changed}
        self._write(config, {**self.facts, **exact, "resumed": [*self.facts.get("resumed", []), again]})
        return [f"{k}={as_yaml(v)} (it began with {as_yaml(then.get(k))})" for k, v in changed.items()]

    def _write(self, config: str, facts: Mapping[str, Any]) -> None:
        """Write both files, last the one that makes the directory a run."""
        if is_first():
            self.path.mkdir(parents=True, exist_ok=True)
            write_json(self.path / "versions.json", facts)
            with writing(self.config, "w") as stream:
                stream.write(config)
        self._forget()

    def end(self, scores: dict[str, Any], items: Mapping[str, NDArray[Any]] | None = None) -> None:
        """Write items.npz and, last, scores.json: by its one rename the run is complete."""
        if items is not None:
            import numpy as np

            with writing(self.path / "items.npz") as stream:
                np.savez_compressed(stream, **items)  # type: ignore[arg-type]
        write_json(self.path / "scores.json", scores)
        self._forget()


class Series(NamedTuple):
    """The values logged under one name: steps (n,) of the optimiser and finite values (n,)."""

    steps: NDArray[np.int64]
    values: NDArray[np.float64]

    def at(self, step: int) -> float | None:
        """The last value that was logged at a step; None if none was."""
        values = self.values[self.steps == step]
        return float(values[-1]) if len(values) else None

    @property
    def median(self) -> float:
        """The median of the values."""
        return median(self.values.tolist())


def logged(file: Path) -> dict[str, Series]:
    """The columns of metrics.csv, finite values only. Raises ValueError, naming the file, if damaged."""
    import numpy as np  # here, as --help does without it

    columns: dict[str, list[tuple[int, float]]] = {}
    with parsing(file, "delete its damaged lines"):
        for line in table(file):
            step = int(line.pop("step"))
            for name, cell in line.items():
                if cell and math.isfinite(float(cell)):
                    columns.setdefault(name, []).append((step, float(cell)))
    return {
        name: Series(np.array([step for step, _ in pairs]), np.array([value for _, value in pairs]))
        for name, pairs in columns.items()
    }


def by_task(row: Mapping[str, Any], headline: str) -> dict[str, float | None]:
    """The scores of each task in a row of scores.json and, last, "avg", the average a sweep maximises."""
    scores: dict[str, float | None] = {}
    if "rte" in row:
        scores |= {"RTE": row["rte"]["accuracy"], "avg": row["rte"]["accuracy"]}
    if "transfer" in row:
        scores |= {name: task["accuracy"] for name, task in row["transfer"]["tasks"].items()}
        scores["avg"] = row["transfer"]["avg"]
    if "sts" in row:
        scores |= {name: task[headline] for name, task in row["sts"]["tasks"].items()}
        scores["avg"] = row["sts"]["avg"][headline]
    return scores | {"avg": scores.pop("avg")}  # last


def differences(
    began: Mapping[str, Any], facts: Mapping[str, Any], now: Mapping[str, Any], exact: Mapping[str, Any]
) -> list[str]:
    """What is not as it was when a run began, as "NAME=VALUE (it began with VALUE)".

    began, now: settings. facts: what the run noted. exact: those facts that decide each bit, as they are now.
    """
    noted = flat(facts)
    same = {name: value for name, value in flat(exact).items() if name in noted}
    then = flat(began) | {name: noted[name] for name in same}
    current = flat(now) | same
    return [
        f"{name}={as_yaml(current.get(name))} (it began with {as_yaml(then.get(name))})"
        for name in sorted(then.keys() | current.keys())
        if then.get(name) != current.get(name) and name not in FREE and not name.startswith("logger")
    ]


def as_yaml(value: Any) -> str:
    """A value as it is written after NAME= on a command line: text without quotes, null, true, numbers."""
    return value if isinstance(value, str) else json.dumps(value, default=str)


def flat(config: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """All values of nested mappings by their dotted names."""
    values: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{path}{key}"
        values |= flat(value, f"{name}.") if isinstance(value, Mapping) else {name: value}
    return values


def pasted(argv: list[str]) -> str:
    """A command line as a shell takes it.

    >>> print(pasted(["train.py", "tasks.names=[my tests.csv]"]))
    python train.py 'tasks.names=[my tests.csv]'
    """
    program = f"python {Path(argv[0]).name}" if argv[0].endswith(".py") else argv[0]
    return " ".join([program, *map(quote, argv[1:])])


def stamp() -> str:
    """The end of a run's name: the time, or under srun the job and its step, which stay after requeueing."""
    if "SLURM_STEP_ID" in os.environ:
        return f"slurm-{os.environ['SLURM_JOB_ID']}.{os.environ['SLURM_STEP_ID']}"
    now = time.strftime("%Y-%m-%d_%H-%M-%S")
    same = len(list(Path("outputs").glob(f"*-{now}*")))  # runs that were begun within this second
    return shared("stamp", f"{now}-{same + 1}" if same else now)

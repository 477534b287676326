"""A run directory as one object: settings, what they were run with, checkpoints, series and scores.

config.yaml      the resolved settings; a directory that holds it is a run
versions.json    `facts`: command, packages, commit, hardware, data, and each resumption
checkpoints/     of train.py, until it ends: step-STEP-CHECKSUM.ckpt, to resume it
best/            of train.py: the best checkpoint
metrics.csv      of train.py: `series`, a column each
items.npz        `items`: by "row/task", what each pair or text of a test scored
digests.json     the digests of all these, checked when an ended run is read
scores.json      `scores`: dev scores of train.py, tests of evaluate.py. Written last, it marks a run as ended
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cached_property, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from filelock import BaseFileLock, FileLock
from numpy.typing import NDArray
from omegaconf import OmegaConf

from whitenedcse.app import durable, reading
from whitenedcse.app.durable import DIGESTS, LOCK, as_json, claimed, intact, read_json, seal, writing
from whitenedcse.app.identity import SWEPT, as_yaml, differences, instead, pasted, present
from whitenedcse.app.ranks import first
from whitenedcse.app.reading import flat, refuse_misfit
from whitenedcse.data.remote import MARKS

SEALED = ("config.yaml", "versions.json", "metrics.csv", "items.npz", f"best/{DIGESTS}")
BEGUN = ("config.yaml", "versions.json", "metrics.csv", "train.log", "evaluate.log")  # before the first step
OTHER = "choose another name with run=NAME (in Python, output=DIR)"
CURE = f"copy the whole run again or, if the change is yours, delete the {DIGESTS} beside it"
if TYPE_CHECKING:
    from whitenedcse.model.embedder import Embedder
held: dict[Path, BaseFileLock] = {}  # the directories that this process has claimed, until it ends
fresh: set[Path] = set()  # those without a run when this process was asked for one


def on_first_rank(method: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator: the method does nothing and returns None on ranks other than the first."""

    @wraps(method)
    def called(*arguments: Any, **settings: Any) -> Any:
        return method(*arguments, **settings) if first() else None

    return called


class Run:
    """A run of `train` or `evaluate` in a directory: finished, unfinished or not yet started.

    path: the directory. `embedder` is the best checkpoint, `settings` what the run was started with, `facts`
    the packages and hardware it ran on, `series` the logged values by name, and `results` the scores.
    `scores` is the same, but None until the run has ended. Reading raises ValueError for a damaged file.

    >>> Run("outputs/none").began
    False
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.checkpoints, self.best = self.path / "checkpoints", self.path / "best"
        self.metrics, self.config = self.path / "metrics.csv", self.path / "config.yaml"
        self._scores: dict[str, Any] | None = None

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    def __fspath__(self) -> str:
        return str(self.path)

    @classmethod
    def of(cls, model: str | Path) -> Run | None:
        """The run that a model is the directory or the best checkpoint of; None for any other model."""
        folders = (Path(model), Path(model).parent) if Path(model).exists() else ()
        return next((run for run in map(cls, folders) if run.began), None)

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
        """config.yaml as dictionaries, old names replaced by today's. Raises ValueError if it is not YAML."""
        self._check(self.config.name)
        content = reading.settings(self.config)
        refuse_misfit(self.config, content)
        return present(content)

    @cached_property
    def facts(self) -> dict[str, Any]:
        """The content of versions.json, or {} without that file. Raises ValueError if not a JSON object."""
        return self._json("versions.json") or {}

    @property
    def scores(self) -> dict[str, Any] | None:
        """The content of scores.json; None until the run ends. Raises ValueError if not a JSON object."""
        if self._scores is None:
            self._scores = self._json("scores.json")
        return self._scores

    @property
    def results(self) -> dict[str, Any]:
        """The `scores` of a run that has ended. Raises FileNotFoundError if it has not."""
        return self.scores or self._lacks("scores.json")

    def _lacks(self, name: str) -> NoReturn:
        sweep = f"a sweep: name runs of it, as {self.path}/0, or all as '{self.path}/*'"
        cure = f"; evaluate model={self.path} makes a run" * (self.path / "whitenedcse.json").is_file()
        kind = sweep if (self.path / SWEPT).is_file() else f"not a run that has ended: it has no {name}{cure}"
        raise FileNotFoundError(f"{self.path} is {kind}")

    def _check(self, name: str) -> None:
        """Raise ValueError if this run has ended and the file is not as it was then."""
        if (self.path / "scores.json").is_file():
            intact(self.path, CURE, [name])

    def _json(self, name: str) -> dict[str, Any] | None:
        self._check(name)
        if not (self.path / name).is_file():
            return None
        content = read_json(self.path / name)
        refuse_misfit(self.path / name, content)
        return content

    @cached_property
    def items(self) -> dict[str, NDArray[Any]]:
        """The arrays of evaluate.py's items.npz by name. Raises FileNotFoundError without that file."""
        self._check("items.npz")
        if not (self.path / "items.npz").is_file():
            self._lacks("items.npz")
        return reading.arrays(self.path / "items.npz")

    @cached_property
    def series(self) -> dict[str, reading.Series]:
        """The columns of metrics.csv by name: for each, the steps (n,) and the finite values (n,)."""
        self._check(self.metrics.name)
        return reading.series(self.metrics)

    def at(self, name: str, step: int) -> float | None:
        """The value of a series at a step; None if there is none."""
        return self.series[name].at(step) if name in self.series else None

    @property
    def dev(self) -> dict[str, Any] | None:
        """`dev` of scores.json, or its equivalent from the evaluations so far; None before the first."""
        return dict(self.scores["dev"]) if self.scores is not None else reading.dev(self.series)

    def tests(self, row: str | None = None) -> dict[str, float | None]:
        """The test scores x 100 in a row of the table, by task and "avg"; {} without tests.

        row: its name or that name's beginning; None for the first. Correlations are aggregated as the
        protocol does; "avg" is theirs, or of accuracies. Raises FileNotFoundError before the run's end.
        """
        rows = self.results.get("rows", [])
        names = [line["name"] for line in rows]
        like = [row] if row and row in names else [name for name in names if name.startswith(row or "")]
        if row and len(like) != 1:
            found = f"{len(like)} rows that begin with {row!r}" if like else f"no row {row!r} of test scores"
            raise ValueError(f"{self.path} has {found}: {', '.join(like or names) or 'none'}")
        return reading.by_task(rows[names.index(like[0])], self.results["headline"]) if rows else {}

    @property
    def best_score(self) -> float | None:
        """The dev score of the best checkpoint; None without dev pairs or training, or before its end."""
        return (self.scores or {}).get("dev", {}).get("best")

    @property
    def origin(self) -> dict[str, Any]:
        """Experiment, system, seed and `Encoder.provenance`; None where one is not known."""
        return {key: self.facts.get(key) for key in ("experiment", "system", "seed", "encoder")}

    def checked(self) -> Run:
        """This run of train.py, all files read. Raises ValueError, naming the file, if one cannot be."""
        if self.scores is not None and "dev" not in self.scores:
            raise ValueError(
                f"{self.path / 'scores.json'} has no dev scores; train.py writes them when a run ends"
            )
        _ = self.settings, self.facts, self.series
        return self

    def refuse_taken(self, *, sweep: bool = False) -> None:
        """Raise ValueError if the directory holds anything other than a run or, if `sweep`, than a sweep."""
        own = {"a run": (self.config.name,)} if sweep else {"a sweep": (SWEPT,)}
        for kind, names in {**own, "something other than a run": MARKS}.items():
            if any((self.path / name).exists() for name in names):
                raise ValueError(f"{self.path} holds {kind}; {OTHER}")

    @on_first_rank
    def claim(self) -> None:
        """Keep others from writing here until this process ends. ValueError if one does or it is no run's."""
        self.refuse_taken()
        self.path.mkdir(parents=True, exist_ok=True)
        if self.path not in held:
            held[self.path] = claimed(self.path, f"wait, or {OTHER}").lock
        self._forget()  # what was read before another process wrote it

    def release(self) -> None:
        """Let other processes write here again, before this one ends."""
        if lock := held.pop(self.path, None):
            lock.release()

    def asked(self) -> Run:
        """This run, noted as one that `discard` may remove if nothing has been started here yet."""
        (fresh.discard if self.began else fresh.add)(self.path)
        return self

    @on_first_rank
    def discard(self) -> None:
        """Remove what a refused job wrote, unless the run made a step, was here before or is another's."""
        with suppress(OSError, ValueError):
            if self.path in fresh and self.path.is_dir():
                if self.path not in held:
                    held[self.path] = FileLock(self.path / LOCK).acquire(timeout=0).lock
                steps = (series.steps for series in self.series.values())  # 0 is the untouched encoder's
                made = self.path.glob("scores.json"), self.checkpoints.glob("*"), self.best.glob("*"), *steps
                for name in () if any(map(any, made)) else (*BEGUN, LOCK):
                    (self.path / name).unlink(missing_ok=True)
                self.release()
        with suppress(OSError):
            self.path.rmdir()  # refused by the system if it holds anything

    @property
    def embedder(self) -> Embedder:
        """The best checkpoint of this run, an `Embedder` in eval mode."""
        from whitenedcse.model.embedder import Embedder

        return Embedder.load(self.path)

    @on_first_rank
    def start(self, config: str, **facts: Any) -> None:
        """Write config.yaml and, with `facts`, versions.json.

        Raises ValueError if there is a run here that has ended, or an unfinished one with other settings.
        """
        self.claim()
        if self.began and (self.scores is not None or self.refuse_other(config, {}, force=True)):
            raise ValueError(f"{self.path} already holds a run; {OTHER}")
        from whitenedcse.app.compute import environment

        self._write(config, {"command": pasted(sys.argv), **facts, **environment()})

    def _write(self, config: str, facts: Mapping[str, Any]) -> None:
        """Write both files, last the one that makes the directory a run."""
        durable.write_json(self.path / "versions.json", facts)
        with writing(self.config, "w") as stream:
            stream.write(config)
        self._forget()

    def _forget(self) -> None:
        for name in ("settings", "facts"):
            self.__dict__.pop(name, None)

    def refuse_other(self, config: str, exact: Mapping[str, Any], *, force: bool = False) -> list[str]:
        """Raise ValueError if the run here was started with other settings or facts; `force` returns them.

        config: the resolved settings as YAML. exact: what else decides each bit, e.g. digests of the data.
        """
        if not self.began:
            return []
        asked: Any = OmegaConf.to_container(OmegaConf.create(config))
        others = differences(self.settings, self.facts, asked, exact)
        if others and not force:
            some = ", ".join([*others[:6], *[f"and {len(others) - 6} more"] * (len(others) > 6)])
            raise ValueError(f"{self.path} holds another run: {some}; {OTHER}{instead(self, others)}")
        return others

    @on_first_rank
    def resume(self, config: str, exact: Mapping[str, Any], step: int) -> list[str]:
        """Note that the run resumes after a step; returns what in `environment` changed since it started."""
        from whitenedcse.app.compute import environment

        now, then = flat(environment()), flat(self.facts)
        changed = {name: value for name, value in now.items() if then.get(name) != value}
        again = {"step": step, "command": pasted(sys.argv), **changed}
        self._write(config, {**self.facts, **exact, "resumed": [*self.facts.get("resumed", []), again]})
        return [f"{k}={as_yaml(v)} (it began with {as_yaml(then.get(k))})" for k, v in changed.items()]

    def end(self, scores: dict[str, Any], items: Mapping[str, NDArray[Any]] | None = None) -> None:
        """Write items.npz, if there are items, digests.json and, last, scores.json: the run has ended.

        All else that the run leaves must have been written: by the one rename of scores.json it is complete.
        """
        if items is not None:
            with writing(self.path / "items.npz") as stream:
                np.savez_compressed(stream, **items)  # type: ignore[arg-type]
        seal(self.path, SEALED, {"scores.json": as_json(scores)})
        durable.write_json(self.path / "scores.json", scores)
        self._scores = scores

"""Runs grouped by all but their seed: how they are found, labelled and measured, and their csv file.

The label of a group is what of the command lines differs between the groups, the seed left out.
"""

from __future__ import annotations

import csv
import glob
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from whitenedcse.evaluation.tasks import short
from whitenedcse.files import writing
from whitenedcse.run import Run, flat

FREE = ("seed", "run", "checkpoint_every", "trainer.timeout")  # by which runs of one group may differ
DEVICES = ("trainer.devices", "trainer.num_nodes")  # by these too, unless gather=false
FEW = 4  # settings that are no overrides in a label
BARE = ("experiment", "system")  # whose options are known by their names alone
RATE, LOAD = "train/sentences_per_second", "train/load"
Measure = Callable[[Run], float | None]


class Group(NamedTuple):
    """Runs that differ in their seed alone, by seed; those of an unknown seed by their paths.

    row: the name of the row of their scores that is compared; None for the first.
    """

    label: str
    runs: dict[Any, Run]
    row: str | None = None


class Sweep(NamedTuple):
    """Groups in the order of their first runs, all runs, the settings that differ, and notes."""

    groups: list[Group]
    runs: list[Run]
    differing: list[str]
    notes: list[str]

    @property
    def finished(self) -> list[Run]:
        """The runs of the groups."""
        return [run for group in self.groups for run in group.runs.values()]


def gathered(runs: Sequence[Run]) -> Sweep:
    """The groups of runs. Unfinished runs, and a second run of a seed, are noted and left out."""
    together: dict[Any, list[Run]] = {}
    for run in runs:
        together.setdefault(frozenset(texts(run).items()), []).append(run)
    groups, notes = [], []
    for label, group in zip(labels([runs[0] for runs in together.values()]), together.values(), strict=True):
        finished = sorted((run for run in group if run.scores), key=seed)  # stable: the first of a seed
        by_seed = {number: list(same) for number, same in groupby(finished, key=seed)}
        notes += [f"not finished, not counted: {run.path} ({label})" for run in group if not run.scores]
        again = [(number, run) for number, same in by_seed.items() for run in same[1:]]
        notes += [f"seed {number} of {label} again, not counted: {run.path}" for number, run in again]
        if by_seed:
            groups.append(Group(label, {number: same[0] for number, same in by_seed.items()}))
    tables = [texts(run) for run in runs]
    every = dict.fromkeys(name for table in tables for name in table)
    return Sweep(groups, list(runs), [n for n in every if len({t.get(n) for t in tables}) > 1], notes)


def seed(run: Run) -> int:
    """The seed of a run."""
    number: int = run.settings.get("seed", 0)
    return number


def texts(run: Run) -> dict[str, str]:
    """The settings that distinguish groups, as texts by dotted name: no seed, name, device or logger."""
    free = FREE + (DEVICES if run.settings.get("gather", True) else ())
    return {
        name: value if isinstance(value, str) else json.dumps(value, default=str)
        for name, value in flat(run.settings).items()
        if name not in free and not name.endswith(".seed") and not name.startswith("logger")
    }


def given(run: Run) -> dict[str, str]:
    """The settings given to a run by name, and its experiment and system also where a sweep chose them."""
    words = run.facts.get("overrides") or run.facts.get("command", "").split()
    unquoted = [re.sub("^([^=]+)='([^']*)'$", r"\1=\2", word) for word in words]  # quoted in Python
    own = dict(word.lstrip("+").split("=", 1) for word in unquoted if "=" in word)
    return {name: run.facts[name] for name in BARE if run.facts.get(name)} | own


def labels(firsts: Sequence[Run]) -> list[str]:
    """A label for each group, given one run of each: the overrides of all command lines that are not equal.

    Groups that these do not tell apart have other settings in which they differ too: overrides, or a few.
    """
    words, every = [given(run) for run in firsts], [texts(run) for run in firsts]
    names = [n for n in dict.fromkeys(n for own in words for n in own) if n not in FREE and "hydra" not in n]
    differing = [n for n in names if all(n in own for own in words) and len({own[n] for own in words}) > 1]
    made = []
    for own in words:
        bare = " ".join(own[name] for name in BARE if name in differing)
        made.append(joined(bare, *(f"{name}={own[name]}" for name in differing if name not in BARE)))
    plain = list(made)
    for i, label in enumerate(plain):
        same = [table for table, other in zip(every, plain, strict=True) if other == label]
        apart = [name for name in every[i] if len({table.get(name) for table in same}) > 1]
        told = [name for name in apart if name in names] or apart[:FEW]
        made[i] = joined(label, *(f"{name}={every[i][name]}" for name in told))
    alone = " ".join(filter(None, map(firsts[0].facts.get, BARE))) if len(firsts) == 1 else ""
    return [label or alone or ("all runs" if len(firsts) == 1 else "default settings") for label in made]


def joined(*parts: str) -> str:
    """Parts of a label, without empty ones."""
    return ", ".join(filter(None, parts))


def paths(names: Iterable[str]) -> list[Path]:
    """The directories that names or patterns (outputs/sgw-*) match: those of a pattern in natural order.

    Of those that a pattern matches, one without a run of train.py is left out if another has one. Raises
    FileNotFoundError for a name that matches nothing.
    """
    found: dict[Path, Path] = {}
    for name in names:
        here = sorted(map(Path, glob.glob(name) if glob.has_magic(name) else [name]), key=natural)
        if not any(path.is_dir() for path in here):
            raise FileNotFoundError(f"{name} is no directory, nor a published table (--list names them)")
        here = [path for path in here if path.is_dir()]
        kept = [path for path in here if not glob.has_magic(name) or any(True for _ in below(path))]
        found |= {path.resolve(): path for path in kept or here}
    return list(found.values())


def left_out(names: Iterable[str]) -> list[Path]:
    """The runs of evaluate.py that patterns match: `paths` leaves them out beside a run of train.py."""
    matched = {Path(path) for name in names if glob.has_magic(name) for path in glob.glob(name)}
    return sorted((path for path in matched if (run := Run(path)).began and not run.trains), key=natural)


def natural(path: Path) -> list[tuple[int, str]]:
    """A sort key by which 10 comes after 9."""
    return [(int(part) if part.isdigit() else -1, part) for part in re.split(r"(\d+)", str(path))]


def below(folder: Path) -> Iterator[Path]:
    """The runs of train.py at or below a directory, without looking inside a run."""
    if (run := Run(folder)).began:
        yield from [folder] if run.trains else []
        return
    for child in sorted((path for path in folder.iterdir() if path.is_dir()), key=natural):
        yield from below(child)


def runs(folders: Sequence[Path]) -> list[Run]:
    """The runs at or below directories, in their order, each once. ValueError for a directory without any."""
    found: dict[Path, Path] = {}
    for folder in folders:
        inside = list(below(folder))
        jobs = [] if inside else [folder, *sorted(folder.iterdir())]
        if own := next((path for path in jobs if Run(path).began), None):
            raise ValueError(
                f"{own} is a run of evaluate.py; whitenedcse evaluate compare=[{own},OTHER] sets it "
                "beside another run, of train.py or evaluate.py, with the same tests"
            )
        if not inside:
            raise ValueError(f"no run of train.py in {folder}: none has config.yaml and metrics.csv")
        found |= {path.resolve(): path for path in inside}
    return [Run(path).checked() for path in found.values()]


def of_dev(name: str) -> Measure:
    """A function from a finished run to its dev score "before" training, or that of the "best" checkpoint."""
    return lambda run: run.scores["dev"][name] if run.scores else None


dev_best, dev_before = of_dev("best"), of_dev("before")


def at_best(name: str) -> Measure:
    """A function from a run to its logged value of this name at the best checkpoint."""
    return lambda run: run.scores["dev"]["values_best"].get(name) if run.scores else None


def task_of(task: str, row: str | None = None) -> Measure:
    """A function from a run to its score of a task, or "average", in a row; None for the first row."""
    return lambda run: scored(run, row).get(task)


def rate(run: Run) -> float | None:
    """The median number of sentences per second of a run that did not share its machine; see `shared`."""
    return None if RATE not in run.series or shared(run) else run.series[RATE].median


def shared(run: Run) -> bool:
    """Whether more ran on the machine than the run itself, by the load noted beside its speed, if it was."""
    own = run.facts.get("threads", 1) * run.facts.get("processes", 1)
    return LOAD in run.series and run.series[LOAD].median > own + 0.5


def rows(run: Run) -> list[str]:
    """The names of the rows of test scores of a run."""
    return [row["name"] for row in (run.scores or {}).get("rows", [])]


def scored(run: Run, name: str | None) -> dict[str, float]:
    """The test scores of a run in a row, by task and as "average"; None for the first row. Empty if none."""
    tests = run.tests(name) if run.scores and name in (None, *rows(run)) else {}
    return {"average" if k == "avg" else k: value for k, value in tests.items() if value is not None}


def with_units(runs: Iterable[Run], tasks: Sequence[str]) -> list[str]:
    """The names of tests, short; with what they measure, where some are correlations, some accuracies."""
    first = [row for run in runs for row in (run.scores or {}).get("rows", [])[:1]]
    exact = {"RTE"}.union(*(row.get("transfer", {}).get("tasks", {}) for row in first))
    if not exact & {*tasks} or not any(row.get("sts", {}).get("tasks") for row in first):
        return short(tasks)
    units = ["accuracy" if task in exact else "Spearman" for task in tasks]
    return [f"{name} ({unit})" for name, unit in zip(short(tasks), units, strict=True)]


def values(group: Group, measure: Measure) -> dict[Any, float]:
    """The values of a measure for a group, by seed; seeds without one are left out."""
    measured = {number: measure(run) for number, run in group.runs.items()}
    return {number: value for number, value in measured.items() if value is not None}


def beside(page: Path) -> Path:
    """The csv file of the seeds beside a page, seeds.csv; beside another than report.html NAME-seeds.csv."""
    return page.with_name(f"{page.stem}-seeds.csv".removeprefix("report-"))


def write_csv(sweep: Sweep, path: Path) -> None:
    """Write the csv file of the seeds: a line for each run, finished or not, its directory relative to it.

    Its row is the label of its group in the tables; a run that they do not count has none.
    """
    names = {run.path: group.label for group in sweep.groups for run in group.runs.values()}
    lines = [
        {"row": names.get(run.path, ""), **cells(run, sweep.differing, path.parent)} for run in sweep.runs
    ]
    longest_first = sorted(lines, key=len, reverse=True)  # an unfinished run has no tests
    columns = dict.fromkeys(name for line in longest_first for name in line)
    with writing(path, "w") as file:
        writer = csv.DictWriter(file, list(columns), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)


def cells(run: Run, differing: Sequence[str], folder: Path) -> Mapping[str, Any]:
    """The cells of a run in the csv file of the seeds by column, with all digits of its scores."""
    known, dev = texts(run), (run.scores or {}).get("dev", {})
    tests = {f"{row}: {task}": score for row in rows(run) for task, score in scored(run, row).items()}
    space = {name: at_best(f"dev/{name}")(run) for name in ("alignment", "uniformity", "effective_rank")}
    speed = run.series[RATE].median if RATE in run.series else None
    return {
        **{"system": run.facts.get("system"), "seed": seed(run)},
        **{name: known.get(name) for name in differing},
        **{"finished": "yes" if run.scores else "no", "dev_best": dev.get("best")},
        **{"dev_best_step": dev.get("best_step"), **tests, **space},
        **{"sentences_per_second": speed, "shared": "yes" if shared(run) else ""},
        **{"commit": run.facts.get("commit"), "run": os.path.relpath(run.path, folder)},
    }

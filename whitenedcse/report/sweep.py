"""Runs grouped by all but their seed: how they are found, labelled and scored.

A label names what distinguishes a group: the system, then the settings that differ, those of a command line
first. Settings that others leave without effect distinguish nothing and are not named.
"""

from __future__ import annotations

import csv
import glob
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from whitenedcse.evaluation.tasks import short
from whitenedcse.files import writing
from whitenedcse.report.conditions import bases, decides, follows, label, parts, place, telling, texts
from whitenedcse.run import Run

FEW = 4  # settings that a label names, unless more are needed to tell it from the others


class Group(NamedTuple):
    """Finished runs that differ in their seed alone, by seed."""

    label: str
    runs: dict[int, Run]


class Sweep(NamedTuple):
    """Groups in the order of their first runs, all runs, the settings that differ, and notes."""

    groups: list[Group]
    runs: list[Run]
    differing: list[str]
    notes: list[str]


def gathered(runs: Sequence[Run]) -> Sweep:
    """The groups of runs. Unfinished runs, and a second run of a seed, are noted and left out."""
    together: dict[Any, list[Run]] = {}
    for run in runs:
        together.setdefault(identity(run), []).append(run)
    differing, names = settings(runs), labels([group[0] for group in together.values()])
    groups, notes = [], []
    for name, group in zip(names, together.values(), strict=True):
        finished = sorted((run for run in group if run.scores), key=seed)  # stable: the first of a seed
        by_seed = {number: list(same) for number, same in groupby(finished, key=seed)}
        notes += [f"not finished, not counted: {run.path} ({name})" for run in group if not run.scores]
        notes += [
            f"seed {number} of {name} again, not counted: {run.path}"
            for number, same in by_seed.items()
            for run in same[1:]
        ]
        if by_seed:
            groups.append(Group(name, {number: same[0] for number, same in by_seed.items()}))
    if any(name.endswith(" more") for name in names):
        notes.append(
            "the csv file of the seeds has all settings that differ, also those that labels do not name"
        )
    return Sweep(groups, list(runs), differing, notes)


def seed(run: Run) -> int:
    """The seed of a run."""
    number: int = run.settings.get("seed", 0)
    return number


def identity(run: Run) -> Any:
    """A value that is equal for runs of the same group."""
    return frozenset(item for item in texts(run.settings).items() if item[1])


def given(run: Run) -> list[str]:
    """The settings given to a run as words, NAME=VALUE; of an older job of a sweep, those of all jobs."""
    words: list[str] = run.facts.get("overrides") or run.facts.get("command", "").split()
    return [re.sub("^([^=]+)='([^']*)'$", r"\1=\2", word) for word in words]  # quoted in Python


def asked(runs: Sequence[Run], *, varied: bool = False) -> list[str]:
    """The names of the settings that were given to runs; varied: only where these differ."""
    lines = list(map(given, runs))
    words = [word for line in lines for word in line if "=" in word]
    kept = [word for word in words if not (varied and all(word in line for line in lines))]
    return list(dict.fromkeys(word.split("=")[0].lstrip("+") for word in kept))


def settings(runs: Sequence[Run], chosen: Iterable[str] = ()) -> list[str]:
    """The settings that differ between runs: those of a command line first, those that some lack last.

    chosen: groups whose options differ, each before its settings.
    """
    tables, words = [texts(run.settings) for run in runs], asked(runs)
    every = dict.fromkeys(name for table in tables for name in table)
    values = {name: {table.get(name) or "" for table in tables} for name in every}

    def order(name: str) -> tuple[bool, int]:
        lacked = len(values[name] - {""}) == 1 and name not in words
        return lacked, place(name, words)

    differing = [name for name in every if len(values[name]) > 1]
    return sorted(dict.fromkeys([*chosen, *differing]), key=order)


def options(runs: Sequence[Run]) -> dict[str, list[str]]:
    """By group the option of each run, for groups of which all command lines choose one, not all the same."""
    chosen = [dict(word.lstrip("+").partition("=")[::2] for word in given(run)) for run in runs]
    names = [name for name in asked(runs, varied=True) if all(name in words for words in chosen)]
    made = [name for name in names if any(isinstance(run.settings.get(name), Mapping) for run in runs)]
    return {name: [words[name] for words in chosen] for name in made}


def labels(firsts: Sequence[Run]) -> list[str]:
    """A label for each group, given one run of each; no two are equal.

    It has the first `FEW` settings that differ, those given to the run before others, those that tell it from
    other groups, and the number of the rest. What a system or experiment implies is not repeated beside its
    name, unless a command line has it.
    """
    known, varied, chosen = bases(firsts), asked(firsts, varied=True), options(firsts)
    tables = [texts(run.settings) | {g: chosen[g][i] for g in chosen} for i, run in enumerate(firsts)]
    words = [w for w in asked(firsts) if not w.endswith(".kind") or all(w in t for t in tables)]
    columns: list[list[str]] = []
    later: list[list[bool]] = []  # by column, whether each run was not given the setting
    each_asked = [asked([run]) for run in firsts]
    typed = {word: [table.get(word) for table in tables] for word in varied}
    for name in (name for name in settings(firsts, chosen) if f"{name}.kind" not in words):
        own = [table.get(name, "") for table in tables]
        if name not in words and follows(name, own, typed):
            continue
        above = [table.get(name.rpartition(".")[0], "") for table in tables]
        if place(name, varied) < len(varied) or not decides(known, own):
            columns.append(parts(name, own, above, name in words))
            later.append([place(name, own_words) == len(own_words) for own_words in each_asked])
    shared = len(set(known)) == 1
    rows = [{c: column[i] for c, column in enumerate(columns) if column[i]} for i in range(len(firsts))]
    order = [[column[i] for column in later].__getitem__ for i in range(len(firsts))]
    shown = [set(sorted(row, key=key)[:FEW]) for row, key in zip(rows, order, strict=True)]
    while True:
        kept = [[row[c] for c in sorted(own)] for row, own in zip(rows, shown, strict=True)]
        if (more := telling(list(zip(known, kept, strict=True)), columns)) is None:
            sizes = [len(row) - len(own) for row, own in zip(rows, shown, strict=True)]
            return [label(*each, shared) for each in zip(known, kept, sizes, strict=True)]
        shown = [own | {more} & row.keys() for row, own in zip(rows, shown, strict=True)]


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


RATE = "train/sentences_per_second"

Measure = Callable[[Run], float | None]


def of_dev(name: str) -> Measure:
    """A function from a finished run to its dev score "before" training, or that of the "best" checkpoint."""
    return lambda run: run.scores["dev"][name] if run.scores else None


dev_best, dev_before = of_dev("best"), of_dev("before")


def at_best(name: str) -> Measure:
    """A function from a run to its logged value of this name at the best checkpoint."""
    return lambda run: run.scores["dev"]["values_best"].get(name) if run.scores else None


def average_of(row: str | None) -> Measure:
    """A function from a run to its average over the tests in a row; None for the first row."""
    return lambda run: scored(run, row).get("average")


def rate(run: Run) -> float | None:
    """The median number of sentences per second of a run."""
    return run.series[RATE].median if RATE in run.series else None


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


def values(group: Group, measure: Measure) -> dict[int, float]:
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
    names = {run.path: {"row": group.label} for group in sweep.groups for run in group.runs.values()}
    lines = [
        names.get(run.path, {"row": ""}) | dict(cells(run, sweep.differing, path.parent))
        for run in sweep.runs
    ]
    longest_first = sorted(lines, key=len, reverse=True)  # an unfinished run has no tests
    columns = dict.fromkeys(name for line in longest_first for name in line)
    with writing(path, "w") as file:
        writer = csv.DictWriter(file, list(columns), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)


def cells(run: Run, differing: Sequence[str], folder: Path) -> Iterator[tuple[str, Any]]:
    """The cells of a run in the csv file of the seeds by column, with all digits of its scores."""
    yield from (("system", run.facts.get("system")), ("seed", seed(run)))
    known = texts(run.settings)
    yield from ((name, known.get(name)) for name in differing)
    yield from (("finished", "yes" if run.scores else "no"), ("dev_best", dev_best(run)))
    yield ("dev_best_step", run.scores["dev"]["best_step"] if run.scores else None)
    for row in rows(run):
        yield from ((f"{row}: {task}", score) for task, score in scored(run, row).items())
    for name in ("alignment", "uniformity", "effective_rank"):
        yield name, at_best(f"dev/{name}")(run)
    yield from (("sentences_per_second", rate(run)), ("commit", run.facts.get("commit")))
    yield "run", os.path.relpath(run.path, folder)

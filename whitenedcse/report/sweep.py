"""Runs grouped by all but their seed: how they are found, labelled and scored.

A label names only what distinguishes a group: the system, then settings, those of a command line first.
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

from whitenedcse.app.durable import writing
from whitenedcse.app.reading import flat
from whitenedcse.app.run import Run

FREE = ("seed", "run", "checkpoint_every")


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
    for label, group in zip(names, together.values(), strict=True):
        finished = sorted((run for run in group if run.scores), key=seed)  # stable: the first of a seed
        by_seed = {number: list(same) for number, same in groupby(finished, key=seed)}
        notes += [f"not finished, not counted: {run.path} ({label})" for run in group if not run.scores]
        notes += [
            f"seed {number} of {label} again, not counted: {run.path}"
            for number, same in by_seed.items()
            for run in same[1:]
        ]
        if by_seed:
            groups.append(Group(label, {number: same[0] for number, same in by_seed.items()}))
    return Sweep(groups, list(runs), differing, notes)


def seed(run: Run) -> int:
    """The seed of a run."""
    number: int = run.settings.get("seed", 0)
    return number


def base(run: Run) -> str:
    """The system, or else the experiment, of a run."""
    return run.facts.get("system") or run.facts.get("experiment") or "default settings"


def counts(name: str) -> bool:
    """Whether a setting distinguishes groups: a seed, a name or a logger does not."""
    return name not in FREE and not name.endswith(".seed") and not name.startswith("logger")


def identity(run: Run) -> Any:
    """A value that is equal for runs of the same group."""
    kept = {name: value for name, value in flat(run.settings).items() if counts(name)}
    return run.facts.get("system"), json.dumps(kept, sort_keys=True, default=str)


def settings(runs: Sequence[Run]) -> list[str]:
    """The settings that differ between runs: those of a command line first, names of classes last."""
    asked = [word.split("=")[0].lstrip("+") for run in runs for word in run.facts.get("command", "").split()]
    every = dict.fromkeys(name for run in runs for name in flat(run.settings))
    known = dict.fromkeys(n for name in [*asked, *every] for n in within(name) if counts(n) and n in every)
    differing = [name for name in known if len({value(run, name) for run in runs}) > 1]
    return sorted(differing, key=lambda name: name.endswith("_target_"))


def within(name: str) -> list[str]:
    """The dotted names of a setting's parents, from the outermost, then its own."""
    parts = name.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts) + 1)]


def value(run: Run, name: str) -> str:
    """A setting of a run as text; for a mapping the name of what it makes, "" for no such setting."""
    node: Any = run.settings
    for part in name.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return ""
        node = node[part]
    if isinstance(node, Mapping):
        node = node.get("kind") or node.get("_target_", "...").rpartition(".")[-1]
    return node if isinstance(node, str) else json.dumps(node, default=str)


def labels(firsts: Sequence[Run]) -> list[str]:
    """A label for each group, given one run of each."""
    values: dict[str, list[str]] = {"": [base(run) for run in firsts]}
    for name in settings(firsts):
        more = values | {name: [value(run, name) for run in firsts]}
        if len(set(zip(*more.values(), strict=True))) > len(set(zip(*values.values(), strict=True))):
            values = more
    return [label(values, i) for i in range(len(firsts))]


def label(values: Mapping[str, Sequence[str]], i: int) -> str:
    """The shortest label of group i: its values without those that are not needed to tell it from others.

    values: by setting, one for each group. Settings are left out from the last on.
    """
    known = list(values)
    for name in known[:0:-1]:
        fewer = [other for other in known if other != name]
        same = [all(values[k][j] == values[k][i] for k in fewer) for j in range(len(values[""]))]
        known = fewer if sum(same) == 1 else known
    parts = [f"{name}={values[name][i]}" if values[name][i] else f"no {name}" for name in known[1:]]
    shared = len(set(values[""])) == 1
    return ", ".join(parts) if parts and shared else " ".join([values[""][i], *parts])


def paths(names: Iterable[str]) -> list[Path]:
    """The directories that names or patterns (outputs/sgw-*) match, in natural order.

    Raises FileNotFoundError for a name that matches nothing.
    """
    found: dict[Path, Path] = {}
    for name in names:
        here = [path for path in map(Path, glob.glob(name) if glob.has_magic(name) else [name])]
        if not any(path.is_dir() for path in here):
            raise FileNotFoundError(f"{name} is no directory, nor a published table (--list names them)")
        found |= {path.resolve(): path for path in here if path.is_dir()}
    return [found[path] for path in sorted(found, key=natural)]


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
    """The runs at or below directories, each once. Raises ValueError for a directory without any."""
    found: dict[Path, Path] = {}
    for folder in folders:
        inside = list(below(folder))
        if not inside and Run(folder).began:
            raise ValueError(
                f"{folder} is a run of evaluate.py; python evaluate.py compare=[{folder},OTHER] sets it "
                "beside another run, of train.py or evaluate.py, with the same tests"
            )
        if not inside:
            raise ValueError(f"no run of train.py in {folder}: none has config.yaml and metrics.csv")
        found |= {path.resolve(): path for path in inside}
    return [Run(found[path]).checked() for path in sorted(found, key=natural)]


RATE = "train/sentences_per_second"


Measure = Callable[[Run], float | None]


def dev_best(run: Run) -> float | None:
    """The dev score of the best checkpoint; None for an unfinished run."""
    return run.scores["dev"]["best"] if run.scores else None


def dev_before(run: Run) -> float | None:
    """The dev score of the encoder before training; None for an unfinished run."""
    return run.scores["dev"]["before"] if run.scores else None


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


def aggregations(runs: Iterable[Run]) -> list[str]:
    """The aggregations of the runs' STS tests, each once; none where they have no such tests."""
    every = [run.scores or {} for run in runs]
    return list(dict.fromkeys(s["headline"] for s in every if any("sts" in row for row in s.get("rows", []))))


def in_brackets(words: Sequence[str]) -> str:
    """Words as an addition to a name: " (all, mean)"; "" for none."""
    return f" ({', '.join(words)})" if words else ""


def same_tests(runs: Sequence[Run]) -> bool:
    """Whether all runs that were tested have scores of the same tests, so that averages can be compared."""
    return len({frozenset(scored(run, None)) for run in runs} - {frozenset()}) < 2


def main_score(groups: Sequence[Group]) -> tuple[str, Measure]:
    """The name, with the aggregation, and the measure by which groups are compared.

    It is the test average where every run has one, of the same tasks, else the dev score.
    """
    average = average_of(None)
    every = [run for group in groups for run in group.runs.values()]
    if all(average(run) is not None for run in every) and same_tests(every):
        return f"test average{in_brackets(aggregations(every))}", average
    return "dev best (all)", dev_best


def values(group: Group, measure: Measure) -> dict[int, float]:
    """The values of a measure for a group, by seed; seeds without one are left out."""
    measured = {number: measure(run) for number, run in group.runs.items()}
    return {number: value for number, value in measured.items() if value is not None}


def write_csv(sweep: Sweep, path: Path) -> None:
    """Write seeds.csv: a row for each run, finished or not, its directory relative to that of the file."""
    lines = [dict(cells(run, sweep.differing, path.parent)) for run in sweep.runs]
    longest_first = sorted(lines, key=len, reverse=True)  # an unfinished run has no tests
    columns = dict.fromkeys(name for line in longest_first for name in line)
    with writing(path, "w") as file:
        writer = csv.DictWriter(file, list(columns), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)


def cells(run: Run, differing: Sequence[str], folder: Path) -> Iterator[tuple[str, Any]]:
    """The cells of a run in seeds.csv by column, with all digits of its scores."""
    yield from (("system", run.facts.get("system")), ("seed", seed(run)))
    yield from ((name, value(run, name)) for name in differing)
    yield from (("finished", "yes" if run.scores else "no"), ("dev_best", dev_best(run)))
    yield ("dev_best_step", run.scores["dev"]["best_step"] if run.scores else None)
    for row in rows(run):
        yield from ((f"{row}: {task}", score) for task, score in scored(run, row).items())
    for name in ("alignment", "uniformity", "effective_rank"):
        yield name, at_best(f"dev/{name}")(run)
    yield from (("sentences_per_second", rate(run)), ("commit", run.facts.get("commit")))
    yield "run", os.path.relpath(run.path, folder)

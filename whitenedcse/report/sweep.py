"""Runs grouped by all but their seed: how they are found, labelled and measured, and their csv file.

The label of a group is what of the command lines differs between the groups, the seed left out.
"""

from __future__ import annotations

import csv
import glob
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from whitenedcse.files import writing
from whitenedcse.run import Run, flat

FREE = ("seed", "run", "checkpoint_every", "trainer.timeout")  # by which runs of one group may differ
DEVICES = ("trainer.devices", "trainer.num_nodes")  # by these too, unless gather=false
FEW = 4  # settings that are no overrides in a label
BARE = ("experiment", "system")  # whose options are known by their names alone
RATE, LOAD = "train/sentences_per_second", "train/load"
SPACE = ("alignment", "uniformity", "effective_rank")  # of the dev embeddings
WAYS = {  # dev scores by what they are of, each by the beginning of its name
    "as it is": "dev/spearman",
    "whitened (dev)": "dev/whitened_on_dev",
    "whitened (training)": "dev/whitened_on_corpus",
}


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

    @property
    def rows(self) -> list[str]:
        """The names of the rows of test scores that its runs have, each once."""
        return list(dict.fromkeys(row for run in self.finished for row in rows(run)))


def gathered(runs: Sequence[Run]) -> Sweep:
    """The groups of runs. Unfinished runs, and a second run of a seed, are noted and left out."""
    every, groups, notes = alike(runs), [], []
    for label, same in zip(labels([same[0] for same in every]), every, strict=True):
        by_seed: dict[Any, Run] = {}
        for run in same:
            seed = run.settings.get("seed", 0)
            if not run.scores:
                notes.append(f"not finished, not counted: {run.path} ({label})")
            elif seed in by_seed:
                notes.append(f"seed {seed} of {label} again, not counted: {run.path}")
            else:
                by_seed[seed] = run
        if by_seed:
            groups.append(Group(label, dict(sorted(by_seed.items()))))
    tables = [*map(texts, runs)]
    names = dict.fromkeys(name for table in tables for name in table)
    return Sweep(groups, list(runs), [name for name in names if differing(tables, name)], notes)


def alike(runs: Sequence[Run]) -> list[list[Run]]:
    """The runs whose settings are the same but for their seed, together."""
    found: dict[Any, list[Run]] = {}
    for run in runs:
        found.setdefault(frozenset(texts(run).items()), []).append(run)
    return list(found.values())


def differing(tables: Sequence[Mapping[str, Any]], name: str) -> bool:
    """Whether the value of this name is not the same in all of these settings."""
    return len({table.get(name) for table in tables}) > 1


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
    if len(firsts) == 1:
        named = (firsts[0].facts.get(name) for name in BARE)
        return [" ".join(filter(None, named)) or "all runs"]
    words, settings = [given(run) for run in firsts], [texts(run) for run in firsts]
    every = dict.fromkeys(name for own in words for name in own)
    names = [name for name in every if name not in FREE and "hydra" not in name]
    chosen = [name for name in names if all(name in own for own in words) and differing(words, name)]
    made = []
    for own in words:
        bare = " ".join(own[name] for name in BARE if name in chosen)
        made.append(joined(bare, *(f"{name}={own[name]}" for name in chosen if name not in BARE)))
    apart = []
    for label, own in zip(made, settings, strict=True):
        same = [table for table, like in zip(settings, made, strict=True) if like == label]
        known = dict.fromkeys(name for table in same for name in table)
        other = [name for name in known if name in own and differing(same, name)]
        told = [name for name in other if name in names] or other[:FEW]
        apart.append(joined(label, *(f"{name}={own[name]}" for name in told)) or "default settings")
    return apart


def joined(*parts: str) -> str:
    """Parts of a label, without empty ones."""
    return ", ".join(filter(None, parts))


def paths(names: Iterable[str]) -> list[Path]:
    """The directories that names or patterns match, in natural order; FileNotFoundError for none."""
    found: dict[Path, Path] = {}
    for name in names:
        matched = map(Path, [name] if Path(name).is_dir() else glob.glob(name))
        here = sorted((path for path in matched if path.is_dir()), key=natural)
        if not here:
            raise FileNotFoundError(f"{name}: no such directory of runs")
        found |= {path.resolve(): path for path in here}
    return list(found.values())


def natural(path: Path) -> list[tuple[int, str]]:
    """A sort key by which 10 comes after 9."""
    return [(int(part) if part.isdigit() else -1, part) for part in re.split(r"(\d+)", str(path))]


def below(folder: Path) -> Iterator[Path]:
    """The runs of train.py at or below a directory, without looking inside a run."""
    run = Run(folder)
    if run.trains:
        yield folder
    elif not run.began:
        for child in sorted((path for path in folder.iterdir() if path.is_dir()), key=natural):
            yield from below(child)


def runs(folders: Sequence[Path]) -> list[Run]:
    """The runs of train.py at or below directories, in their order, each once; ValueError for none."""
    found = {path.resolve(): path for folder in folders for path in below(folder)}
    if not found:
        raise ValueError(
            f"no run of train.py in {', '.join(map(str, folders))}; "
            "whitenedcse evaluate compare=[RUN,OTHER] compares runs of evaluate.py"
        )
    return [Run(path) for path in found.values()]


def numbers(run: Run) -> dict[str, float]:
    """What a finished run measured: dev_before, dev_best, tests as "ROW: TASK", geometry, and rate.

    rate: the median of the sentences per second, unless the run shared its machine.
    """
    if not run.scores:
        return {}
    dev = run.scores["dev"]
    found = {"dev_before": dev["before"], "dev_best": dev["best"]}
    for row in rows(run):
        for task, value in run.tests(row).items():
            found[f"{row}: {'average' if task == 'avg' else task}"] = value
    found |= {name: dev["values_best"].get(f"dev/{name}") for name in SPACE}
    found |= by_way(dev, "before") | by_way(dev, "best")
    if RATE in run.series and not shared(run):
        found["rate"] = run.series[RATE].median
    return {name: value for name, value in found.items() if value is not None}


def by_way(dev: Mapping[str, Any], moment: str) -> dict[str, float | None]:
    """The dev scores at a moment, "before" or "best", as they are and whitened: the highest of all k."""
    found, logged = dict[str, float | None](), dev.get(f"values_{moment}", {})
    for way, beginning in WAYS.items():
        scores = [value for name, value in logged.items() if name.startswith(beginning)]
        found[f"{way}, {moment}"] = max((value for value in scores if value is not None), default=None)
    return found


def shared(run: Run) -> bool:
    """Whether more ran on the machine than the run itself, by the load noted beside its speed, if it was."""
    own = run.facts.get("threads", 1) * run.facts.get("processes", 1)
    return LOAD in run.series and run.series[LOAD].median > own + 0.5


def rows(run: Run) -> list[str]:
    """The names of the rows of test scores of a run."""
    return [row["name"] for row in (run.scores or {}).get("rows", [])]


def values(group: Group, name: str) -> dict[Any, float]:
    """One of the `numbers` of a group's runs, by seed; seeds without it are left out."""
    measured = {seed: numbers(run) for seed, run in group.runs.items()}
    return {seed: found[name] for seed, found in measured.items() if name in found}


def beside(page: Path) -> Path:
    """The csv file of the seeds beside a page, seeds.csv; beside another than report.html NAME-seeds.csv."""
    return page.with_name(f"{page.stem}-seeds.csv".removeprefix("report-"))


def write_csv(sweep: Sweep, path: Path) -> None:
    """Write the csv file of the seeds: a line for each run; `row` is its group's label, if it is counted."""
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
    known, found, dev = texts(run), numbers(run), (run.scores or {}).get("dev", {})
    return {
        "system": run.facts.get("system"),
        "seed": run.settings.get("seed", 0),
        **{name: known.get(name) for name in differing},
        "finished": "yes" if run.scores else "no",
        "dev_best": dev.get("best"),
        "dev_best_step": dev.get("best_step"),
        **{name: value for name, value in found.items() if ": " in name},
        **{name: found.get(name) for name in SPACE},
        "sentences_per_second": run.series[RATE].median if RATE in run.series else None,
        "shared": "yes" if shared(run) else "",
        "commit": run.facts.get("commit"),
        "run": os.path.relpath(run.path, folder),
    }

"""Runs grouped by all but their seed: how they are found, labelled and measured, and their csv file.

The label of a group is what of the command lines differs between the groups, the seed left out. A group has
its scores by name and seed; those that are not of the same data in all runs are in the csv file alone.
"""

from __future__ import annotations

import csv
import glob
import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from whitenedcse.evaluation.statistics import Draws
from whitenedcse.files import writing
from whitenedcse.run import Run, flat

# settings by which runs of one group may differ
FREE = ("seed", "run", "force", "checkpoint_every", "trainer.timeout")
DEVICES = ("trainer.devices", "trainer.num_nodes")  # by these too, unless gather=false
BARE = ("experiment", "system")  # whose options are known by their names alone
DEV = "monitor.dev"
SPEED, LOAD = "train/sentences_per_second", "train/load"
RATE = "sentences_per_second"
SPACE = ("alignment", "uniformity", "effective_rank")  # of the dev embeddings
WAYS = {  # dev scores by what they are of, each by the beginning of its name
    "as it is": "dev/spearman",
    "whitened (dev)": "dev/whitened_on_dev",
    "whitened (training)": "dev/whitened_on_corpus",
}


class Group(NamedTuple):
    """Runs that differ in their seed alone, by seed; those of an unknown seed by their paths.

    scores: by name and seed. draws: by task and seed, the bootstrap's, where scores of test pairs are known.
    """

    label: str
    runs: Mapping[Any, Run]
    scores: Mapping[str, Mapping[Any, float]] = {}
    draws: Mapping[str, Mapping[Any, Draws]] = {}

    def without(self, names: Collection[str]) -> Group:
        """The group without some of its scores."""
        return self._replace(scores={name: own for name, own in self.scores.items() if name not in names})


class Sweep(NamedTuple):
    """Groups in the order of their first runs, all runs, and notes."""

    groups: list[Group]
    runs: list[Run]
    notes: list[str]

    @property
    def finished(self) -> list[Run]:
        """The runs of the groups."""
        return [run for group in self.groups for run in group.runs.values()]


def gathered(runs: Sequence[Run]) -> Sweep:
    """The groups of runs. Unfinished runs, and a second run of a seed, are noted and left out."""
    every, groups, notes = alike(runs), list[Group](), list[str]()
    for label, same in zip(labels([same[0] for same in every]), every, strict=True):
        by_seed = {run.settings.get("seed", 0): run for run in reversed(same) if run.scores}
        for run in same:
            if run not in by_seed.values():
                why = f"seed {run.settings.get('seed', 0)} again" if run.scores else "not finished"
                notes.append(f"{why}, not counted: {run.path} ({label})")
        if by_seed:
            measured = by_name({seed: numbers(by_seed[seed]) for seed in sorted(by_seed)})
            groups.append(Group(label, dict(sorted(by_seed.items())), measured))
    if hidden := unlike(groups, noted_data):
        notes.insert(0, f"in the csv file alone, as not all runs have the same data: {', '.join(hidden)}")
    return Sweep([group.without(hidden) for group in groups], list(runs), notes)


def alike(runs: Sequence[Run]) -> list[list[Run]]:
    """The runs whose settings are the same but for their seed, together."""
    found: dict[Any, list[Run]] = {}
    for run in runs:
        found.setdefault(frozenset(texts(run).items()), []).append(run)
    return list(found.values())


def by_name(every: Mapping[Any, Mapping[str, Any]]) -> dict[str, dict[Any, Any]]:
    """Values by name and seed, of values by seed and name."""
    found: dict[str, dict[Any, Any]] = {}
    for seed, own in every.items():
        for name, value in own.items():
            found.setdefault(name, {})[seed] = value
    return found


def measures(groups: Iterable[Group]) -> list[str]:
    """The names of the scores of groups, each once."""
    return list(dict.fromkeys(name for group in groups for name in group.scores))


def unlike(groups: Sequence[Group], data_of: Callable[[str, Run], Any]) -> list[str]:
    """The names of the scores that are not of the same data in all runs, and so cannot be compared."""
    data: dict[str, set[Any]] = {}
    for group in groups:
        for name, scores in group.scores.items():
            data.setdefault(name, set()).update(data_of(name, group.runs[seed]) for seed in scores)
    return [name for name, every in data.items() if len(every) > 1]


def noted_data(name: str, run: Run) -> Any:
    """What one of the `numbers` of a run is of: by digests, and dev pairs without one by their name."""
    digests = run.facts.get("content", {})
    row, _, task = name.rpartition(": ")
    if task == "average":
        return frozenset((each, digests.get(f"tasks.{each}")) for each in run.tests(row))
    if row:
        return digests.get(f"tasks.{task}")
    return None if name == RATE else digests.get("monitor.dev", run.settings["monitor"].get("dev"))


def differing(tables: Sequence[Mapping[str, str]]) -> list[str]:
    """The names whose values are not the same in all of these settings."""
    names = dict.fromkeys(name for table in tables for name in table)
    return [name for name in names if len({table.get(name) for table in tables}) > 1]


def texts(run: Run) -> dict[str, str]:
    """What distinguishes groups, as texts by dotted name: no seed, name, device or logger.

    These are settings and the digest of the corpus, whose file may have changed.
    """
    free = FREE + (DEVICES if run.settings.get("gather", True) else ())
    corpus = {"corpus": run.facts["corpus"][:8]} if "corpus" in run.facts else {}
    return corpus | {
        name: value if isinstance(value, str) else json.dumps(value, default=str)
        for name, value in flat(run.settings).items()
        if name not in free and not name.endswith(".seed") and not name.startswith("logger")
    }


def given(run: Run) -> dict[str, str]:
    """What was given to a run by name, but for its seed, and experiment and system if a sweep chose them."""
    words = run.facts.get("overrides") or run.facts.get("command", "").split()
    own = dict(word.lstrip("+").split("=", 1) for word in words if "=" in word)
    chosen = {name: run.facts[name] for name in BARE if run.facts.get(name)} | own
    return {name: text for name, text in chosen.items() if name not in FREE and "hydra" not in name}


def labels(firsts: Sequence[Run]) -> list[str]:
    """A label for each group, given one run of each: what differs in what all command lines give.

    Where that does not tell all groups apart: what differs in all that was given, or in all settings.
    """
    if len(firsts) == 1:
        named = (firsts[0].facts.get(name) for name in BARE)
        return [" ".join(filter(None, named)) or "all runs"]
    words, settings = [given(run) for run in firsts], [texts(run) for run in firsts]
    in_all = [{name: own[name] for name in own if all(name in other for other in words)} for own in words]
    known = [values | own for values, own in zip(settings, words, strict=True)]
    for tables in (in_all, words, settings):
        made = [label(values, differing(tables)) for values in known]
        if len(set(made)) == len(made):
            break
    return [own or "default settings" for own in made]


def label(values: Mapping[str, str], names: Sequence[str]) -> str:
    """Those of the values that have these names, as text: experiment and system first, and bare."""
    own = {name: values[name] for name in names if name in values}
    bare = " ".join(own.pop(name) for name in BARE if name in own)
    return ", ".join(filter(None, [bare, *(f"{name}={value}" for name, value in own.items())]))


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
    """What a finished run measured: dev_before, dev_best, tests as "ROW: TASK", geometry, and its speed.

    sentences_per_second: the median, unless the run shared its machine.
    """
    if not run.scores:
        return {}
    dev = run.scores["dev"]
    best = dev.get("values_best", {})
    found = {"dev_before": dev["before"], "dev_best": dev["best"]} | by_way(best)
    for row in run.rows:
        for task, value in run.tests(row["name"]).items():
            found[f"{row['name']}: {'average' if task == 'avg' else task}"] = value
    found |= {name: best.get(f"dev/{name}") for name in SPACE}
    if SPEED in run.series and not shared(run):
        found[RATE] = run.series[SPEED].median
    return {name: value for name, value in found.items() if value is not None}


def by_way(logged: Mapping[str, float | None]) -> dict[str, float | None]:
    """Of dev values as they are logged, the scores as it is and whitened: the highest of all k."""
    found = dict[str, float | None]()
    for way, beginning in WAYS.items():
        every = [value for name, value in logged.items() if name.startswith(beginning)]
        found[way] = max((value for value in every if value is not None), default=None)
    return found


def shared(run: Run) -> bool:
    """Whether more ran on the machine than the run itself, by the load noted beside its speed, if it was."""
    own = run.facts.get("threads", 1) * run.facts.get("processes", 1)
    return LOAD in run.series and run.series[LOAD].median > own + 0.5


def write_csv(sweep: Sweep, path: Path) -> None:
    """Write the csv file of the seeds: a line for each run, with all digits of its scores.

    `row` is the label of its group, if it is counted.
    """
    names = {run.path: group.label for group in sweep.groups for run in group.runs.values()}
    settings, lines = [texts(run) for run in sweep.runs], []
    chosen = differing(settings)
    for run, own in zip(sweep.runs, settings, strict=True):
        cells = {"row": names.get(run.path), "system": run.facts.get("system")}
        cells |= {"seed": run.settings.get("seed", 0), **{name: own.get(name) for name in chosen}}
        cells |= {"finished": "yes" if run.scores else "no"}
        cells |= {"dev_best_step": (run.scores or {}).get("dev", {}).get("best_step"), **numbers(run)}
        cells |= {"shared": "yes" if shared(run) else "", "commit": run.facts.get("commit")}
        lines.append(cells | {"run": os.path.relpath(run.path, path.parent)})
    longest_first = sorted(lines, key=len, reverse=True)  # an unfinished run has no tests
    columns = dict.fromkeys(name for line in longest_first for name in line)
    with writing(path, "w") as file:
        writer = csv.DictWriter(file, list(columns), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)

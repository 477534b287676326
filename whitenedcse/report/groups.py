"""Runs that differ in their seed alone, and what each such group is called.

A label says only what sets a group apart: the system, then settings, those named on a command line first.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from whitenedcse.report.history import Run
from whitenedcse.settings import flat

FREE = ("seed", "run", "checkpoint_every")


class Group(NamedTuple):
    """Finished runs by seed, one a seed."""

    label: str
    runs: dict[int, Run]


class Sweep(NamedTuple):
    """Groups in the order of their first runs, all runs, the settings that differ, and what was left out."""

    groups: list[Group]
    runs: list[Run]
    differing: list[str]
    notes: list[str]


def gathered(runs: Sequence[Run]) -> Sweep:
    """Runs as groups. Unfinished runs, and a seed that a group has already, are named and not counted."""
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
    """The system, or the experiment, that a run was named after."""
    return run.facts.get("system") or run.facts.get("experiment") or "default settings"


def counts(name: str) -> bool:
    """Whether a setting tells groups apart."""
    return name not in FREE and not name.endswith(".seed") and not name.startswith("logger")


def identity(run: Run) -> Any:
    """What runs of a group share."""
    kept = {name: value for name, value in flat(run.settings).items() if counts(name)}
    return run.facts.get("system"), json.dumps(kept, sort_keys=True, default=str)


def settings(runs: Sequence[Run]) -> list[str]:
    """The settings that differ, those of a command line first, and which class is built last."""
    asked = [word.split("=")[0].lstrip("+") for run in runs for word in run.facts.get("command", "").split()]
    every = dict.fromkeys(name for run in runs for name in flat(run.settings))
    known = dict.fromkeys(n for name in [*asked, *every] for n in within(name) if counts(n) and n in every)
    differing = [name for name in known if len({value(run, name) for run in runs}) > 1]
    return sorted(differing, key=lambda name: name.endswith("_target_"))


def within(name: str) -> list[str]:
    """A setting's own name after those that it is below."""
    parts = name.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts) + 1)]


def value(run: Run, name: str) -> str:
    """A setting as text: of a mapping what it makes; nothing where there is no such setting."""
    node: Any = run.settings
    for part in name.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return ""
        node = node[part]
    if isinstance(node, Mapping):
        node = node.get("kind") or node.get("_target_", "...").rpartition(".")[-1]
    return node if isinstance(node, str) else json.dumps(node, default=str)


def labels(firsts: Sequence[Run]) -> list[str]:
    """What each group is called; of each, one run."""
    values: dict[str, list[str]] = {"": [base(run) for run in firsts]}
    for name in settings(firsts):
        more = values | {name: [value(run, name) for run in firsts]}
        if len(set(zip(*more.values(), strict=True))) > len(set(zip(*values.values(), strict=True))):
            values = more
    return [label(values, i) for i in range(len(firsts))]


def label(values: Mapping[str, Sequence[str]], i: int) -> str:
    """The values of group i, less those, the last ones first, without which it is still no other group."""
    known = list(values)
    for name in known[:0:-1]:
        fewer = [other for other in known if other != name]
        same = [all(values[k][j] == values[k][i] for k in fewer) for j in range(len(values[""]))]
        known = fewer if sum(same) == 1 else known
    parts = [f"{name}={values[name][i]}" if values[name][i] else f"no {name}" for name in known[1:]]
    shared = len(set(values[""])) == 1
    return ", ".join(parts) if parts and shared else " ".join([values[""][i], *parts])

"""Settings that cannot be right: keys nobody reads, found before anything runs."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

HYDRA_KEYS = {"_target_", "_partial_", "_recursive_", "_convert_", "_args_"}


def refuse_unknown(config: Mapping[str, Any], known: Iterable[str]) -> None:
    """Raise ValueError for the first key that nothing reads, naming it and the nearest key that exists.

    known: the keys at the top. Below, the keys of a mapping with a `_target_` are the parameters of that
    symbol. (Hydra merges a misspelt key of an experiment file without a word.)
    """
    check("", config, set(known))


def check(path: str, node: Mapping[str, Any], known: set[str]) -> None:
    """One mapping and those below it."""
    for key, value in node.items():
        if known and key not in known:
            raise ValueError(unknown(f"{path}{key}", [f"{path}{name}" for name in known - HYDRA_KEYS]))
        if isinstance(value, Mapping):
            check(f"{path}{key}.", value, parameters(value.get("_target_")))


def flat(config: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """All values of nested mappings by their dotted names."""
    values: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{path}{key}"
        values |= flat(value, f"{name}.") if isinstance(value, Mapping) else {name: value}
    return values


def parameters(target: str | None) -> set[str]:
    """The parameters of a dotted symbol and Hydra's own keys; empty for None, or if it takes any name."""
    if target is None:
        return set()
    module, _, name = target.rpartition(".")
    symbol = getattr(importlib.import_module(module), name)
    names: set[str] = set()
    for part in getattr(symbol, "__mro__", (symbol, object))[
        :-1
    ]:  # **rest goes to the class it inherits from
        found = inspect.signature(part).parameters
        names |= set(found)
        if all(p.kind is not p.VAR_KEYWORD for p in found.values()):
            return names | HYDRA_KEYS
    return set()


def unknown(key: str, known: Iterable[str]) -> str:
    """What to say of a key that does not exist."""
    names = sorted(known)
    near = difflib.get_close_matches(key, names, n=1, cutoff=0.0)
    return f"no setting {key!r}; the nearest is {near[0]!r}" if near else f"no setting {key!r}"

"""Settings that cannot be right: keys nobody reads and values of the wrong kind, before anything runs."""

from __future__ import annotations

import difflib
import importlib
import inspect
import json
from collections.abc import Iterable, Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

HYDRA_KEYS = {"_target_", "_partial_", "_recursive_", "_convert_", "_args_"}
WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", NoneType: "null"}
SCRIPTS: dict[str, Any] = {  # what train.py and evaluate.py read themselves; all else is annotated
    "seed": int,
    "views": int,
    "gather": bool,
    "checkpoint_every": float,
    "embedding": str,
    "mlm": Mapping[str, Any],
    "model": str | None,
    "layers": Sequence[int] | None,
    "k": int | None,
    "fit": str,
    "sample": int | None,
    "columns": Sequence[str],
    "classifier": str,
    "figures": str | None,
    "compare": Sequence[str] | None,
    "draws": int,
    "digits": Literal[0, 1, 2, 3, 4, 5, 6] | None,
    "tasks.names": Sequence[str],
}


def refuse_unknown(config: Mapping[str, Any], known: Iterable[str]) -> None:
    """Raise ValueError for the first key that nothing reads, or whose value is of another kind than is read.

    known: the keys at the top. Below, the keys of a mapping with a `_target_` are the parameters of that
    symbol, and their annotations say what a value may be. (Hydra merges a misspelt key of an experiment file
    without a word.) A value that is another's, as ${views}, is judged where it stands.
    """
    check("", config, dict.fromkeys(known, Any))


def check(path: str, node: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """One mapping and those below it."""
    for key, value in node.items():
        if known and key not in known:
            raise ValueError(unknown(f"{path}{key}", [f"{path}{name}" for name in set(known) - HYDRA_KEYS]))
        hint = SCRIPTS.get(f"{path}{key}", known.get(key, Any))
        if not (isinstance(value, str) and "${" in value) and not fits(value, hint):
            said = f"{path}{key}={json.dumps(value, default=str)} must be {described(hint)}"
            off = (
                f"; {path}{key}=null leaves it out" if isinstance(value, Mapping) and fits(None, hint) else ""
            )
            raise ValueError(said + off)
        if isinstance(value, Mapping):
            check(f"{path}{key}.", value, parameters(f"{path}{key}", value.get("_target_")))


def flat(config: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """All values of nested mappings by their dotted names."""
    values: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{path}{key}"
        values |= flat(value, f"{name}.") if isinstance(value, Mapping) else {name: value}
    return values


def parameters(path: str, target: str | None) -> dict[str, Any]:
    """The parameters of a dotted symbol, Hydra's own too, and what they may be; empty: any name will do."""
    if target is None:
        return {}
    try:
        module, _, name = target.rpartition(".")
        symbol = getattr(importlib.import_module(module), name)
        hints: dict[str, Any] = dict.fromkeys(HYDRA_KEYS, Any)
        for part in getattr(symbol, "__mro__", (symbol, object))[:-1]:  # **more goes to the class above
            found = inspect.signature(part, eval_str=True).parameters.values()
            named = [p for p in found if p.kind is not p.VAR_KEYWORD]
            hints = {p.name: Any if p.annotation is p.empty else p.annotation for p in named} | hints
            if len(named) == len(found):
                return hints
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{path}._target_={target!r} is no function or class to import: {error}") from error
    return {}


def fits(value: Any, hint: Any) -> bool:
    """Whether a value from YAML is of the kind that an annotation asks for."""
    if get_origin(hint) in (Union, UnionType):
        return any(fits(value, part) for part in get_args(hint))
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if get_origin(hint) is Sequence:
        return fits_all(value, get_args(hint)[0])
    if get_origin(hint) is Mapping:
        return isinstance(value, Mapping)
    if hint in WORDS:
        return type(value) is hint or (hint is float and type(value) is int)
    return hint is Any or not isinstance(hint, type) or (isinstance(value, Mapping) and "_target_" in value)


def fits_all(value: Any, hint: Any) -> bool:
    """The same for a list; a list of objects comes from a script, under a name that YAML gives otherwise."""
    if isinstance(hint, type) and hint not in WORDS:
        return True
    return isinstance(value, list | tuple) and all(fits(item, hint) for item in value)


def described(hint: Any) -> str:
    """An annotation in words."""
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(described(part) for part in get_args(hint))
    if get_origin(hint) is Literal:
        return f"one of {', '.join(map(str, get_args(hint)))}"
    if get_origin(hint) is Sequence:
        return f"a list of {described(get_args(hint)[0]).removeprefix('a ')}s ([...])"
    return WORDS.get(hint, "a mapping" + " with a _target_" * isinstance(hint, type))


def unknown(key: str, known: Iterable[str]) -> str:
    """What to say of a key that does not exist."""
    names = sorted(name for name in known if not name.rpartition(".")[2].startswith("_"))
    if near := difflib.get_close_matches(key, names, n=1, cutoff=0.8):
        return f"no setting {key!r}; the nearest is {near[0]!r}"
    group = key.rpartition(".")[0]
    inside = [name.rpartition(".")[2] for name in names if name.rpartition(".")[0] == group]
    there = f"; {group or 'the top level'} has {', '.join(inside)}" if inside else ""
    return f"no setting {key!r}{there}"

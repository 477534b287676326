"""The configuration of a run: unknown keys and values of the wrong type are refused before it starts."""

from __future__ import annotations

import ast
import builtins
import collections.abc
import difflib
import importlib
import inspect
import json
import sys
import typing
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from hydra import compose
from hydra._internal.utils import get_args_parser
from omegaconf import DictConfig, OmegaConf

from whitenedcse.app.identity import encoder_passes, scratch, when
from whitenedcse.app.space import label
from whitenedcse.run import Run, stamp

CONF = Path(__file__).parents[1] / "conf"  # in a clone a link to the conf/ beside train.py
HYDRA_KEYS = {"_target_", "_partial_", "_recursive_", "_convert_", "_args_"}
TYPE_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "text", NoneType: "null"}
TYPE_NAMES |= {list: "a list ([...])", dict: "a mapping", Any: "of any type"}
PLURALS = {"a whole number": "whole numbers", "a number": "numbers", "text": "texts", "a mapping": "mappings"}
SCRIPT_TYPES: dict[str, Any] = {  # of the settings that train.py and evaluate.py read themselves
    "checkpoint_every": float,
    "mlm": Mapping[str, Any],
    "terms": Mapping[str, Mapping[str, Any]],
    "layers": Sequence[int] | None,
    "figures": Sequence[Literal["layers", "subsets", "components", "projection"]],
    "compare": Sequence[str] | None,
    "digits": Literal[0, 1, 2, 3, 4, 5, 6] | None,
    **dict.fromkeys(("columns", "tasks.names"), Sequence[str]),
    **dict.fromkeys(("seed", "views", "draws"), int),
    **dict.fromkeys(("gather", "bf16", "pearson"), bool),
    **dict.fromkeys(("k", "sample"), int | None),
    **dict.fromkeys(("embedding", "fit", "classifier"), str),
    **dict.fromkeys(("model", "prompt", "monitor.dev"), str | None),
}
# arguments that train.py gives itself, which are no settings
SUPPLIED = {"optim": {"parameters", "total_steps"}, "head": {"width"}, "mlm": {"encoder"}, "logger": {"run"}}
SUPPLIED |= {"monitor": {"directory", "say"}, "trainer": {"logger", "callbacks"}}
RESOLVERS: dict[str, Any] = {"when": when, "label": label, "passes": encoder_passes, "scratch": scratch}
RESOLVERS["options"] = lambda name: options(name)
RESOLVERS["precision"] = lambda *on: importlib.import_module("whitenedcse.compute").quickest(*on)
for resolver, function in RESOLVERS.items():
    OmegaConf.register_new_resolver(resolver, function, replace=True)
OmegaConf.register_new_resolver("stamp", stamp, use_cache=True, replace=True)


def refuse_unknown(config: Mapping[str, Any], known: Iterable[str]) -> None:
    """Raise ValueError for the first key that nothing reads, or whose value has another type than is read.

    known: the keys at the top. Below, the keys of a mapping with a `_target_` are the parameters of that
    symbol, and their annotations say what a value may be. (Hydra merges a misspelt key of an experiment file
    without a word.)
    """
    for imported in (False, True):  # what needs no import first: PyTorch and Lightning take seconds
        check("", config, dict.fromkeys(known, Any), imported=imported)


def check(path: str, node: Mapping[str, Any], known: Mapping[str, Any], *, imported: bool) -> None:
    """Raise ValueError for an unknown key, of several the last, or a mistyped value, also of mappings inside.

    path: what stands before its keys, as "head.whitening.". known: the keys that may be in it with their
    annotations; if it is empty, any may. imported: see `parameters`.
    """
    if known and (strange := sorted([key for key in node if key not in known], key="_target_".__eq__)):
        raise ValueError(unknown(f"{path}{strange[-1]}", [f"{path}{key}" for key in set(known) - HYDRA_KEYS]))
    for key, value in node.items():
        name = f"{path}{key}"
        if value == "" and key != "prompt":
            raise ValueError(f"{name} is empty: give it a value, as {name}=VALUE, or leave it out")
        annotation = SCRIPT_TYPES.get(name, known.get(key, Any))
        if not matches(value, annotation):
            raise ValueError(mistyped(name, value, annotation))
        if isinstance(value, Mapping):
            inside = parameters(name, value.get("_target_"), imported=imported)
            own = {key: hint for key, hint in inside.items() if key not in SUPPLIED.get(name, ())}
            check(f"{name}.", value, own, imported=imported)


def parameters(path: str, target: str | None, *, imported: bool) -> dict[str, Any]:
    """The keys that may stand beside a `_target_` with their annotations, Hydra's own too; empty: any may.

    path: the name of their mapping. imported: whether to import a symbol whose source file does not say all.
    """
    module, _, name = str(target).rpartition(".")
    bare = ["names"] if path == "tasks" else ["_target_"] * (CONF / path).is_dir()  # of a group
    hints = declared(module, name) if target else dict.fromkeys(bare, Any)
    if hints or not target or not imported:
        return hints
    try:
        symbol = getattr(importlib.import_module(module), name)
        hints = dict.fromkeys(HYDRA_KEYS, Any)
        for part in getattr(symbol, "__mro__", (symbol, object))[:-1]:  # **more goes to the class above
            signature = inspect.signature(part, eval_str=True).parameters.values()
            named = [p for p in signature if p.kind is not p.VAR_KEYWORD]
            hints = {p.name: Any if p.annotation is p.empty else p.annotation for p in named} | hints
            if len(named) == len(signature):
                return hints
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{path}._target_={target!r} is no function or class to import: {error}") from error
    return {}


class Names(dict[str, Any]):
    """What a name in a source file's annotations means: a type, an alias, or a class nothing is known of."""

    def __init__(self, tree: ast.Module) -> None:
        super().__init__()
        self.tree = tree

    def __missing__(self, name: str) -> Any:
        for module in (typing, collections.abc, builtins):
            if hasattr(module, name):
                return getattr(module, name)
        for node in self.tree.body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
                return self.meaning(node.value)
        tree = source(imported_from(self.tree, name) or "")
        return Names(tree)[name] if tree else type(name, (), {})

    def meaning(self, annotation: ast.expr | None) -> Any:
        """The type that an expression of this file writes; Any where there is none."""
        if annotation is None:
            return Any
        return eval(compile(ast.Expression(annotation), "annotation", "eval"), {"__builtins__": {}}, self)


@cache
def source(module: str) -> ast.Module | None:
    """The syntax tree of a module of this package or of Lightning, importing neither; None for any other."""
    package, *rest = module.split(".")
    spec = find_spec(package) if package in ("whitenedcse", "lightning") else None
    for root in (spec and spec.submodule_search_locations) or ():
        path = Path(root, *rest)
        for file in (path / "__init__.py", path.with_name(f"{path.name}.py")):
            if file.is_file():
                return ast.parse(file.read_text())
    return None


def declared(module: str, name: str) -> dict[str, Any]:
    """The parameters of a function or class and their annotations, read from its source file; see `source`.

    Where **settings go to the class above, its parameters too. Empty where the files do not say all.
    """
    tree = source(module) or ast.Module([], [])
    if origin := imported_from(tree, name):
        return declared(origin, name)
    node: Any = next((node for node in tree.body if getattr(node, "name", None) == name), None)
    given: list[tuple[str, ast.expr | None]] = []
    above: dict[str, Any] = {}
    if isinstance(node, ast.ClassDef):
        if any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list):
            fields = [part for part in node.body if isinstance(part, ast.AnnAssign)]
            given = [
                (ast.unparse(f.target), f.annotation) for f in fields if "init=False" not in ast.unparse(f)
            ]
        package, _, base = ast.unparse(node.bases[0]).rpartition(".") if node.bases else ("", "", "")
        above = declared(package or module, base)
        node = next((part for part in node.body if getattr(part, "name", None) == "__init__"), None)
    if isinstance(node, ast.FunctionDef):
        above = above if node.args.kwarg else {}
        if above or not node.args.kwarg:
            arguments = [*node.args.args, *node.args.kwonlyargs]
            given = [(part.arg, part.annotation) for part in arguments if part.arg != "self"]
    names, own = Names(tree), dict.fromkeys(HYDRA_KEYS, Any) | above if given else {}
    return own | {key: names.meaning(annotation) for key, annotation in given}


def imported_from(tree: ast.Module, name: str) -> str | None:
    """The module that a file takes a name from; None if it does not import it."""
    nodes = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    return next((node.module for node in nodes if name in [alias.name for alias in node.names]), None)


def matches(value: Any, annotation: Any) -> bool:
    """Whether a value from YAML has the annotated type; an int is a float, a bool is no int.

    A mapping with a `_target_` is an object of any class. An interpolation, as ${views}, has every type:
    what it stands for is checked at its own key.
    """
    if annotation is Any or (isinstance(value, str) and "${" in value):
        return True
    if not isinstance(annotation, type):
        return matches_generic(value, annotation)
    if annotation in TYPE_NAMES:
        return type(value) is annotation or (annotation is float and type(value) is int)
    return isinstance(value, Mapping) and "_target_" in value


def matches_generic(value: Any, annotation: Any) -> bool:
    """Whether a value has one of the types of a union, Literal, Sequence or Mapping; all else matches."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        return any(matches(value, member) for member in arguments)
    if origin is Literal:
        return any(value == choice and type(value) is type(choice) for choice in arguments)
    if origin is Sequence:
        return isinstance(value, list | tuple) and all(matches(item, arguments[0]) for item in value)
    return origin is not Mapping or isinstance(value, Mapping)


def mistyped(name: str, value: Any, annotation: Any) -> str:
    """The message for a value of a wrong type: its type, the wrong item of a list, whether null may be."""
    text = f"{name}={json.dumps(value, default=str)} must be {description(annotation)}"
    closed = [i for i in get_args(annotation) if get_origin(i) is Literal] if isinstance(value, list) else []
    for wrong in [str(part) for item in closed for part in value if not matches(part, item)][:1]:
        near = difflib.get_close_matches(wrong.lower(), map(str, get_args(closed[0])), n=1)
        text = f"{name}={json.dumps(value, default=str)}: {wrong!r} is not {description(closed[0])}"
        text = "; the nearest is ".join([text, *map(repr, near)])
    return text + f"; {name}=null leaves it out" * (isinstance(value, Mapping) and matches(None, annotation))


def description(annotation: Any) -> str:
    """A type in words, for a user who writes YAML."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        every = [text for part in arguments if get_origin(part) is Literal for text in get_args(part)]
        others = [part for part in arguments if get_origin(part) is not Literal]
        return " or ".join(dict.fromkeys(map(description, [Literal[*every], *others] if every else others)))
    if origin is Literal:
        return f"one of {', '.join(dict.fromkeys(map(str, arguments)))}"
    if origin is Sequence:
        item = description(arguments[0])
        return f"a list of {PLURALS[item]} ([...])" if item in PLURALS else f"a list ([...], each {item})"
    return "a mapping" if origin is Mapping else TYPE_NAMES.get(annotation, "a mapping with a _target_")


def unknown(key: str, known: Iterable[str]) -> str:
    """The message for a key that does not exist: the nearest key that does, or all keys of its group."""
    names = sorted(s for s in {*known} - {"defaults", "hydra"} if not s.rpartition(".")[2].startswith("_"))
    if near := difflib.get_close_matches(key.lower(), names, n=1, cutoff=0.85 if "." in key else 0.8):
        return f"no setting {key!r}; the nearest is {near[0]!r}"
    if same := [s for s in names if "." not in key and (s.endswith(f".{key}") or key.startswith(s))]:
        return f"no setting {key!r}; there is {' and '.join(same[:3])}"
    start = key[: key.rfind(".") + 1]
    inside = dict.fromkeys(s.removeprefix(start).split(".")[0] for s in names if s.startswith(start))
    return f"no setting {key!r}; {start[:-1] or 'the top level'} has {', '.join(inside) or 'none'}"


def tests(config: DictConfig, run: Run) -> DictConfig | None:
    """The settings of evaluate.py that score a run of train.py on its tests; None where it has none."""
    if not config.tasks.names:
        return None
    from whitenedcse.training.monitor import SAMPLE

    settings = compose("evaluate", ["protocol=posthoc"])
    settings.model, settings.sample, settings.tasks.names = str(run.path), SAMPLE, list(config.tasks.names)
    return settings


def plain(config: DictConfig) -> Any:
    """A configuration as plain dictionaries and lists, with interpolations unresolved."""
    return OmegaConf.to_container(config)


def top(script: str) -> list[str]:
    """The names at the top of a script's configuration: its own settings, and its groups."""
    return [*map(str, OmegaConf.load(CONF / f"{script}.yaml")), *groups(script)]


@cache
def groups(script: str) -> tuple[str, ...]:
    """The groups that train.yaml or evaluate.yaml has an option of."""
    defaults = OmegaConf.load(CONF / f"{script}.yaml").defaults
    return tuple(str(name) for entry in defaults if isinstance(entry, DictConfig) for name in entry)


def options(name: str) -> str:
    """For --help: the options of a script's groups; or of one group, the user's too, with how each begins."""
    if not (CONF / name).is_dir():
        return "\n".join(f"  {group:12}{', '.join(stems(group))}" for group in groups(name))
    own = get_args_parser().parse_known_args(sys.argv[1:])[0].config_dir
    files = [path for root in {CONF, Path(own or CONF)} for path in (root / name).glob("*.yaml")]
    return "\n".join(f"  {f.stem:20}{note(f)}" for f in sorted(files, key=lambda file: file.stem))


def stems(group: str) -> list[str]:
    """The options of a group."""
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def note(file: Path) -> str:
    """The first sentence of the comment that a file opens with."""
    every = file.read_text().splitlines()
    lines = [line for line in every if line.startswith("# ") and "@package" not in line]
    sentence = " ".join(line[2:] for line in lines).partition(". ")[0].removesuffix(".")
    return sentence.replace("$", "$$")  # Hydra fills in what a $ announces

"""The configuration of a run: unknown keys and values of the wrong type are refused before it starts."""

from __future__ import annotations

import difflib
import importlib
import inspect
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import torch
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from whitenedcse.app.compute import quickest
from whitenedcse.app.run import Run, flat
from whitenedcse.model.embedder import Embedder
from whitenedcse.model.encoder import folder
from whitenedcse.model.planes import Source
from whitenedcse.model.pooling import Pooling
from whitenedcse.model.sentence_transformers import ForeignModules

CONF = Path(__file__).parents[2] / "conf"
HYDRA_KEYS = {"_target_", "_partial_", "_recursive_", "_convert_", "_args_"}
TYPE_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "text", NoneType: "null"}
TYPE_NAMES |= {list: "a list ([...])", dict: "a mapping", Any: "of any type"}
PLURALS = {"a whole number": "whole numbers", "a number": "numbers", "text": "texts", "a mapping": "mappings"}
SCRIPT_TYPES: dict[str, Any] = {  # of the settings that train.py and evaluate.py read themselves
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
    "bf16": bool,
    "columns": Sequence[str],
    "classifier": str,
    "figures": str | None,
    "compare": Sequence[str] | None,
    "draws": int,
    "digits": Literal[0, 1, 2, 3, 4, 5, 6] | None,
    "tasks.names": Sequence[str],
    "monitor.dev": str,
}
OmegaConf.register_new_resolver("precision", quickest, replace=True)
OmegaConf.register_new_resolver("options", lambda name: options(name), replace=True)


def refuse_unknown(config: Mapping[str, Any], known: Iterable[str]) -> None:
    """Raise ValueError for the first key that nothing reads, or whose value has another type than is read.

    known: the keys at the top. Below, the keys of a mapping with a `_target_` are the parameters of that
    symbol, and their annotations say what a value may be. (Hydra merges a misspelt key of an experiment file
    without a word.)
    """
    check("", config, dict.fromkeys(known, Any))


def check(path: str, node: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Raise ValueError for an unknown key or a mistyped value of one mapping or of those inside it.

    path: what stands before its keys, as "head.whitening.". known: the keys that may be in it with their
    annotations; if it is empty, any may.
    """
    for key, value in node.items():
        name = f"{path}{key}"
        if known and key not in known:
            raise ValueError(unknown(name, [f"{path}{other}" for other in set(known) - HYDRA_KEYS]))
        annotation = SCRIPT_TYPES.get(name, known.get(key, Any))
        if not matches(value, annotation):
            raise ValueError(mistyped(name, value, annotation))
        if isinstance(value, Mapping):
            check(f"{name}.", value, parameters(name, value.get("_target_")))


def parameters(path: str, target: str | None) -> dict[str, Any]:
    """The keys that may stand beside a `_target_` with their annotations, Hydra's own too; empty: any may."""
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
    """What to say of a value of a wrong type: what it must be, and whether null may stand for a mapping."""
    message = f"{name}={json.dumps(value, default=str)} must be {description(annotation)}"
    optional = isinstance(value, Mapping) and matches(None, annotation)
    return f"{message}; {name}=null leaves it out" if optional else message


def description(annotation: Any) -> str:
    """A type in the words of someone who writes YAML."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        return " or ".join(map(description, arguments))
    if origin is Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if origin is Sequence:
        item = description(arguments[0])
        return f"a list of {PLURALS[item]} ([...])" if item in PLURALS else f"a list ([...], each {item})"
    return "a mapping" if origin is Mapping else TYPE_NAMES.get(annotation, "a mapping with a _target_")


def unknown(key: str, known: Iterable[str]) -> str:
    """What to say of a key that does not exist: the nearest that does, or all that exist beside it."""
    names = sorted(name for name in known if not name.rpartition(".")[2].startswith("_"))
    if near := difflib.get_close_matches(key, names, n=1, cutoff=0.8):
        return f"no setting {key!r}; the nearest is {near[0]!r}"
    group = key.rpartition(".")[0]
    inside = [name.rpartition(".")[2] for name in names if name.rpartition(".")[0] == group]
    there = f"; {group or 'the top level'} has {', '.join(inside)}" if inside else ""
    return f"no setting {key!r}{there}"


def known_keys(argv: list[str]) -> list[str]:
    """The groups, and the settings that exist with the groups and the experiment of this command line."""
    folders = {path.name for path in CONF.iterdir() if path.is_dir()}
    chosen = [text for text in argv[1:] if text.partition("=")[0].lstrip("+") in folders]
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return [*folders, *flat(plain(compose(Path(argv[0]).stem, chosen)))]


def choice(group: str) -> str | None:
    """What this command line takes of a group, as +experiment=NAME does; None where it takes nothing."""
    return HydraConfig.get().runtime.choices.get(group)


def fit(model: str, name: str, columns: Sequence[str]) -> tuple[str, list[str]]:
    """What maps are fitted on, and its columns; "training" stands for the corpus of the model's own run."""
    if name != "training":
        return name, list(columns)
    if run := Run.of(model):
        data = run.settings["data"]
        return data["corpus"], list(data["columns"])
    raise ValueError(
        f"fit=training: {model} is no run of train.py; name a corpus, e.g. fit=wiki1m, or a file"
    )


def tests(config: DictConfig, run: Run) -> DictConfig | None:
    """The settings of evaluate.py that score a run of train.py on its tests; None where it has none."""
    if not config.tasks.names:
        return None
    settings = compose("evaluate", ["protocol=posthoc"])
    settings.model, settings.sample, settings.tasks = str(run.path), config.monitor.sample, config.tasks
    return settings


def plain(config: DictConfig) -> Mapping[str, Any]:
    """The same as dictionaries, interpolations unresolved."""
    content: Any = OmegaConf.to_container(config)
    return content


def checked(config: DictConfig) -> Run:
    """The run that is configured, named after its directory. Raises ValueError for an unknown setting."""
    refuse_order(list(HydraConfig.get().overrides.task))
    name = HydraConfig.get().job.config_name
    refuse_unknown(plain(config), [*map(str, OmegaConf.load(CONF / f"{name}.yaml")), *groups(str(name))])
    run = Run(HydraConfig.get().runtime.output_dir)
    config.run = run.path.name
    return run


def groups(script: str) -> list[str]:
    """The groups that train.yaml or evaluate.yaml has an option of."""
    defaults = OmegaConf.load(CONF / f"{script}.yaml").defaults
    return [str(name) for entry in defaults if isinstance(entry, DictConfig) for name in entry]


def options(name: str) -> str:
    """For --help: the options of a script's groups; or of one group, each with how its lab note begins."""
    if not (CONF / name).is_dir():
        return "\n".join(f"  {group:12}{', '.join(stems(group))}" for group in groups(name))
    return "\n".join(f"  {stem:20}{note(CONF / name / f'{stem}.yaml')}" for stem in stems(name))


def stems(group: str) -> list[str]:
    """The options of a group."""
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def note(file: Path) -> str:
    """The first sentence of the comment that a file opens with."""
    lines = [
        line for line in file.read_text().splitlines() if line.startswith("# ") and "@package" not in line
    ]
    sentence = " ".join(line[2:] for line in lines).partition(". ")[0].removesuffix(".")
    return sentence.replace("$", "$$")  # Hydra fills in what a $ announces


def refuse_order(overrides: list[str]) -> None:
    """Raise ValueError if an experiment would undo what a system or a sweep before it changes."""
    added = [text.partition("=")[0] for text in overrides if text.startswith("+")]
    changes = [name for name in added if name in ("+experiment", "+system", "+sweep")]
    if "+experiment" in changes[1:]:
        raise ValueError(f"{changes[0]} changes what +experiment sets: put it after +experiment")


def require(inputs: Iterable[Callable[[], Any]]) -> list[Any]:
    """What each call finds; if any finds nothing, one FileNotFoundError that says all that is missing."""
    found, missing = [], []
    for find in inputs:
        try:
            found.append(find())
        except FileNotFoundError as error:
            missing.append(str(error))
    if missing:
        raise FileNotFoundError("; and ".join(dict.fromkeys(missing)))
    return found


def found(model: str | None) -> None:
    """Raise FileNotFoundError if there is no such model; a hub's is fetched."""
    if model is None:
        raise ValueError("no model: give model=DIR_OR_HUB_ID, or compare=[RUN,RUN]")
    if not is_function(model):
        folder(model)


def is_function(model: str) -> bool:
    """Whether it reads module:function."""
    return ":" in model and not Path(model).exists()


def opened(model: str, pooling: Pooling | None) -> Source:
    """A checkpoint (see `Embedder.load`), or `module:function`, which takes a list of sentences.

    A Sentence-Transformers directory with modules that are not read here is opened by that library.
    """
    if is_function(model):
        module, _, name = model.partition(":")
        sys.path.insert(0, str(Path.cwd()))
        try:
            function = getattr(importlib.import_module(module), name)
            if not callable(function):
                raise AttributeError(f"{name} is a {type(function).__name__}, not a function")
            return Source(function, "its own")
        except (ImportError, AttributeError, ValueError) as error:  # ValueError: nothing before the colon
            raise ValueError(f"model={model}: {error}; MODULE:FUNCTION is imported from here") from error
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        embedder = Embedder.load(model, pooling).to(device)
    except ForeignModules as error:
        try:
            from sentence_transformers import SentenceTransformer
        except ImportError:
            raise ValueError(f"{error}; pip install sentence-transformers, which loads it") from error
        return Source(SentenceTransformer(model, device=device).encode, "its own")
    return Source(embedder.encode, str(embedder.pooling), embedder)

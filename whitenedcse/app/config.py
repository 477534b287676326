"""The settings of a run: conf/, composed by Hydra and checked against the signatures that it builds.

Hydra merges a misspelt key of an experiment file without a word. `check` refuses it, and a value of a wrong
type, before anything starts; for a sweep, before the first of its jobs. Other mistakes have the words of the
library that finds them, and `CURES` adds to those that people make often what to write instead.
"""

from __future__ import annotations

import inspect
import json
import re
import shlex
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from functools import cache
from itertools import product
from pathlib import Path
from string import Template
from typing import Any, Literal, get_args, get_origin

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from whitenedcse.distributed import placed
from whitenedcse.run import SCRATCH, Run, flat, stamp

CONF = Path(__file__).parents[1] / "conf"  # in a clone a link to the conf/ beside train.py
HYDRAS = {"_target_", "_partial_", "_recursive_", "_convert_", "_args_"}  # keys that Hydra reads itself
TYPES: dict[str, Any] = {  # of the settings that train.py and evaluate.py read themselves
    **dict.fromkeys(("seed", "views", "draws"), int),
    **dict.fromkeys(("gather", "force", "bf16", "keep"), bool),
    **dict.fromkeys(("run", "embedding", "fit", "pairs", "classifier"), str),
    **dict.fromkeys(("model", "prompt", "monitor.dev"), str | None),
    **dict.fromkeys(("k", "sample"), int | None),
    **dict.fromkeys(("columns", "tasks.names"), Sequence[str]),
    "checkpoint_every": float,
    "terms": Mapping[str, Mapping[str, Any]],
    "layers": Sequence[int] | None,
    "figures": Sequence[Literal["layers", "subsets", "components", "projection"]],
    "compare": Sequence[str] | None,
}
SCALARS = {int: (int,), float: (int, float), bool: (bool,), str: (str,), types.NoneType: (types.NoneType,)}
FLAGS = "-(h|c|p|r|m|sc|cp|cn|cd|i)|--(help|hydra-help|version|cfg|resolve|package|multirun|shell-completion"
FLAGS += "|config-path|config-name|config-dir|experimental-rerun|info)"  # the options of Hydra
GIVEN = {  # by train.py, to the part of this name
    **{"head": {"width"}, "optim": {"parameters", "total_steps"}, "mlm": {"encoder"}, "logger": {"run"}},
    **{"monitor": {"directory", "say"}, "trainer": {"logger", "callbacks"}},
}
OPTIONAL = {"loss", "logger", "pooling", "postprocess"}  # null leaves it out
OWN = {"data": "data=file data.corpus=FILE", "encoder": "encoder=pretrained encoder.path=DIR_OR_HUB_ID"}
OWN |= {"tasks": "tasks.names=[FILE]", "experiment": "DIR/experiment/NAME.yaml, with --config-dir DIR"}


def check(script: str, config: DictConfig, hydras: Any) -> None:
    """Raise ValueError for a setting that nothing reads, or whose value is not of the type that is read.

    Removes from `config` the settings of a class that another replaces. hydras: Hydra's own settings.
    """
    changes = [word for word in hydras.overrides.task if re.match(r"\+(experiment|system|sweep)=", word)]
    if any(word.startswith("+experiment=") for word in changes[1:]):
        raise ValueError(f"{changes[0]} changes what +experiment sets: put it after +experiment")
    if hydras.mode == RunMode.RUN and placed() is None and hydras.runtime.choices.get("sweep"):
        raise ValueError(f"+sweep={hydras.runtime.choices.sweep} is several runs: add -m")
    leave_out_replaced(script, config, hydras)
    settings = plain(config)
    if Path(name := str(settings["run"])).is_absolute() or ".." in Path(name).parts or not name:
        raise ValueError(f"run={name} is no name of a directory in outputs/; elsewhere is hydra.run.dir=DIR")
    check_keys("", settings, top(script))
    if script == "train":
        check_values(config)


def check_values(config: DictConfig) -> None:
    """Raise ValueError for a value out of range, if a part is made of settings alone."""
    for name in ("data", "pooling", "loss", "head.whitening"):
        part = OmegaConf.select(config, name)
        if part and part._target_.startswith("whitenedcse."):
            instantiate(part)


def leave_out_replaced(script: str, config: DictConfig, hydras: Any) -> None:
    """Remove from each part whose class was replaced by `_target_` the settings of the class that was there.

    What the command line sets stays, and what a file sets beside the new class.
    """
    given = {word.partition("=")[0].lstrip("+") for word in hydras.overrides.task}
    every = dict(parts(plain(config)))
    own = {path for path, part in every.items() if not part["_target_"].startswith("whitenedcse.")}
    if not own and not any(f"{path}._target_" in given for path in every):
        return
    choices = hydras.runtime.choices
    words = [f"{group}={choices[group]}" for group in groups(script) if group in choices]
    before = dict(parts(plain(compose(script, [*inherited(hydras), *words]))))
    for path, part in every.items():
        old = before.get(path, part)
        if old["_target_"] == part["_target_"]:
            continue
        for key in set(part) - HYDRAS:
            of_old = f"{path}._target_" in given or (key in old and old[key] == part[key])
            if of_old and not any(f"{name}.".startswith(f"{path}.{key}.") for name in given):
                with open_dict(config):
                    del OmegaConf.select(config, path)[key]


def parts(node: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """The mappings with a `_target_`, by their dotted names."""
    for key, inner in node.items():
        if isinstance(inner, dict):
            if "_target_" in inner:
                yield f"{path}{key}", inner
            yield from parts(inner, f"{path}{key}.")


def check_jobs(script: str, hydras: Any) -> None:
    """Raise ValueError, naming the job, for one that `check` refuses, or whose folder another has.

    Not for trials of a search.
    """
    every = [] if hydras.sweeper.get("n_trials") else jobs(hydras)
    for number, words in enumerate(every):
        try:
            config = compose(script, [*inherited(hydras), *words], return_hydra_config=True)
            own, run = without_hydra(config), Run(Path(hydras.sweep.dir, str(number)))
            check(script, own, config.hydra)
            if script == "train" and run.kept:
                run.check_same(OmegaConf.to_yaml(own, resolve=True), {}, force=own.force)
        except (HydraException, OmegaConfBaseException, ValueError) as error:
            varied = [word for word in words if any(word not in job for job in every)]
            named = f"job {number + 1} of {len(every)} ({' '.join(varied)}): " if varied else ""
            raise ValueError(f"{named}{message(error, [sys.argv[0], *words])}") from error


def without_hydra(config: DictConfig) -> DictConfig:
    """A composed configuration without Hydra's own settings."""
    return OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])


def check_keys(path: str, node: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Raise ValueError for the first key of a mapping, or of those inside, that is unknown, or mistyped.

    path: what stands before its keys. known: these with their annotations; if it is empty, any may be.
    """
    unknown = [key for key in node if known and key not in known and key not in HYDRAS]
    if unknown:
        key = f"{path}{unknown[0]}"
        raise ValueError(f"no setting '{key}'; {nearest(key, [f'{path}{name}' for name in known])}")
    for key, value in node.items():
        name = f"{path}{key}"
        hint = TYPES.get(name, known.get(key, Any))
        if not fits(value, hint):
            said = re.sub(r"(\w+\.)+(?=\w)", "", inspect.formatannotation(hint))
            raise ValueError(f"{name}={json.dumps(value, default=str)} must be {said}")
        if isinstance(value, Mapping):
            every = parameters(name, value.get("_target_"))
            check_keys(f"{name}.", value, {k: h for k, h in every.items() if k not in GIVEN.get(name, ())})


def top(script: str) -> dict[str, Any]:
    """The names at the top of a script's configuration, its settings and groups, with their types."""
    names = [str(key) for key in OmegaConf.load(CONF / f"{script}.yaml") if key not in ("defaults", "hydra")]
    every: dict[str, Any] = dict.fromkeys([*names, *groups(script)], Mapping[str, Any])
    return every | dict.fromkeys(OPTIONAL & every.keys(), Mapping[str, Any] | None)


def parameters(path: str, target: str | None) -> dict[str, Any]:
    """The arguments of a class or function, and of classes above that get its **settings, with annotations.

    path: the name of the mapping that has this `_target_`. Empty where any argument is taken.
    """
    if target is None:
        if path == "tasks":
            return {"names": Any}
        return {"_target_": Any} if (CONF / path).is_dir() else {}
    symbol, hints = imported(path, target), dict[str, Any]()
    for part in getattr(symbol, "__mro__", [symbol]):
        if part is object:
            break
        every = signature(part)
        named = [a for a in every if a.kind not in (a.VAR_KEYWORD, a.VAR_POSITIONAL)]
        hints = {a.name: Any if a.annotation is a.empty else a.annotation for a in named} | hints
        if all(a.kind != a.VAR_KEYWORD for a in every):
            return hints
    return {}


def signature(symbol: Any) -> list[inspect.Parameter]:
    """The parameters of a class or function; an annotation that names what is not imported stays text."""
    try:
        return list(inspect.signature(symbol, eval_str=True).parameters.values())
    except NameError:
        return list(inspect.signature(symbol).parameters.values())


def imported(path: str, target: str) -> Any:
    """The class or function of a `_target_`, also of a module in the folder where the command was started."""
    module, _, name = target.rpartition(".")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    try:
        return getattr(__import__(module, fromlist=[name]), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{path}._target_={target} is no function or class to import: {error}") from error


def fits(value: Any, hint: Any) -> bool:
    """Whether a value from YAML has an annotated type: an int is a float, a bool no int, a list any sequence.

    A mapping with a `_target_` is an object of any class; an interpolation, as ${views}, has every type.
    """
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if kind in (typing.Union, types.UnionType):
        return any(fits(value, one) for one in inner)
    if kind is Literal:
        return any(value == one and type(value) is type(one) for one in inner)
    if kind is Any or not isinstance(kind, type) or (isinstance(value, str) and "${" in value):
        return True
    return type(value) in SCALARS[kind] if kind in SCALARS else fits_class(value, kind, inner)


def fits_class(value: Any, kind: type, inner: Sequence[Any]) -> bool:
    """Whether a value is a list or mapping of such a class, or describes an object."""
    if isinstance(value, Mapping):
        like = issubclass(dict, kind) and (not inner or all(fits(one, inner[-1]) for one in value.values()))
        return like or "_target_" in value
    if isinstance(value, list):
        like = issubclass(list, kind) or issubclass(kind, tuple | set | frozenset)
        return like and (not inner or all(fits(one, inner[0]) for one in value))
    return kind is object or (issubclass(kind, Path) and isinstance(value, str))


def nearest(key: str, names: Iterable[str]) -> str:
    """What there is in place of a key that does not exist: the nearest key, or all beside it.

    >>> nearest("optim.lrr", ["optim.lr", "seed"]), nearest("corpus", ["data.corpus"])
    ("the nearest is 'optim.lr'", 'there is data.corpus')
    """
    names = sorted({*names} - HYDRAS)
    if near := get_close_matches(key.lower(), names, n=1, cutoff=0.85 if "." in key else 0.8):
        return f"the nearest is {near[0]!r}"
    start = key[: key.rfind(".") + 1]
    beside = dict.fromkeys(name[len(start) :].partition(".")[0] for name in names if name.startswith(start))
    if same := [name for name in names if name.endswith(f".{key}") or (name == start[:-1] and not beside)]:
        return f"there is {' and '.join(same[:3])}"
    own = [name for name in beside if name not in HYDRAS]
    return f"{start[:-1] or 'the top level'} has {', '.join(own) or 'none'}"


def known_keys(argv: Sequence[str]) -> list[str]:
    """The groups of conf/, and all settings under the options that a command line chooses."""
    script = Path(argv[0]).stem.split()[-1]  # of train.py or `whitenedcse train`
    names = {*groups(script), "experiment", "system"}
    chosen = [word for word in argv[1:] if word.partition("=")[0].lstrip("+") in names and "," not in word]
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose(script)
        with suppress(HydraException):
            config = compose(script, chosen)
    return [*groups(script), *flat(plain(config))]


def no_option(group: str, option: str) -> str:
    """What to write in place of an option that a group does not have."""
    if group in ("hydra/launcher", "hydra/sweeper"):
        return "pip install 'whitenedcse[sweep]' brings joblib and optuna"
    if group == "tasks":
        return f"tasks.names=[{option}] names single tasks"
    if near := get_close_matches(option.lower(), stems(group), n=1):
        return f"the nearest is {group}={near[0]}"
    return f"your own is {OWN.get(group, f'{group}._target_=CLASS')}"


# what is added to the message of a mistake that people make often, by a pattern that the message has
CURES: list[tuple[str, str | Callable[..., str]]] = [
    (r"Could not override 'encoder\.path'", "the quick start's encoder has no files: add encoder=pretrained"),
    (
        r"Could not override '(?!experiment|system|sweep)([^']+)'",
        lambda key, argv: nearest(key, known_keys(argv)),
    ),
    (
        r"Could not (?:find|load) '((?:hydra/)?[^/']+)/([^']+)'",
        lambda group, option, argv: no_option(group, option),
    ),
    (
        r"parsing override|LexerNo|no viable alternative|mismatched input",
        "settings are written KEY=VALUE; a value with brackets, quotes or spaces inside has quotes of its "
        """own, as "KEY='VALUE'" or 'KEY=["VALUE","VALUE"]'""",
    ),
    (r"^no setting '(experiment|system|sweep)", "the file in {0}/ begins with a line # @package _global_"),
    (r"^data\.corpus=null", "add data.corpus=FILE"),
    (
        r"^\w[\w.]*\(\) (?:missing|takes|got) .*argument",
        "a class is given its settings (+loss.NAME=VALUE adds one), a head width= and optim total_steps= too",
    ),
    (r"out of memory", "trainer.chunk=16 gives the same gradient with less memory"),
]
NOISE = r"^In '[\w/]+': | Config search path:.*| See https://hydra\.cc\S+ for details| full_key: .*"


def mendable(error: BaseException) -> bool:
    """Whether an error is one that a user can mend, which is shown in one line, without a traceback."""
    names = {kind.__name__ for kind in type(error).__mro__}  # whose packages need not be imported for this
    theirs = {"MisconfigurationException", "YAMLError", "OutOfMemoryError", "DistNetworkError"}
    known = isinstance(error, HydraException | OmegaConfBaseException | ValueError | OSError)
    return known or not theirs.isdisjoint(names)


def message(error: BaseException, argv: Sequence[str]) -> str:
    """An error as one line of text, with what to write instead where `CURES` knows it."""
    while isinstance(error, HydraException) and error.__cause__ and "Error in call to target" in str(error):
        error = error.__cause__
    said = str(error) or str(error.__cause__ or type(error).__name__)
    text = re.sub(NOISE, "", " ".join(said.split()))
    for pattern, cure in CURES:
        if found := re.search(pattern, text):
            more = cure.format(*found.groups()) if isinstance(cure, str) else cure(*found.groups(), argv)
            return f"{text}; {more}"
    return text


def check_words(argv: Sequence[str]) -> None:
    """Raise ValueError for an option in the style of other programs, such as --epochs 3."""
    for word in argv[1:]:
        if word.startswith("-") and not re.fullmatch(FLAGS, word.partition("=")[0]):
            last = {key.rpartition(".")[2]: key for key in reversed(known_keys(argv))}
            near = get_close_matches(word.partition("=")[0].lstrip("-"), last, n=1)
            cure = f"the nearest is {last[near[0]]}=VALUE" if near else "--help lists them"
            cure += ", docs/coming_from.md has SimCSE's" if "_" in word else ""
            raise ValueError(f"no option {word}: settings are written KEY=VALUE; {cure}")


def help_page(script: str, words: Sequence[str]) -> str:
    """The text of --help, with the settings as these words make them; Hydra's own takes twice the time."""
    given = [word for word in words if "=" in word and not word.startswith("-")]
    with initialize_config_dir(str(CONF), version_base="1.3", job_name=script):
        config = compose(script, given, return_hydra_config=True)
    settings = OmegaConf.to_yaml(without_hydra(config))
    return Template(config.hydra.help.template).substitute(CONFIG=settings)


def options(name: str) -> str:
    """For --help: the options of a script's groups; or of one group, with how each file begins."""
    if not (CONF / name).is_dir():
        return "\n".join(f"  {group:12}{', '.join(stems(group))}" for group in groups(name))
    return "\n".join(f"  {stem:20}{note(CONF / name / f'{stem}.yaml')}" for stem in stems(name))


@cache
def groups(script: str) -> tuple[str, ...]:
    """The groups that train.yaml or evaluate.yaml has an option of."""
    defaults = OmegaConf.load(CONF / f"{script}.yaml").defaults
    return tuple(str(name) for entry in defaults if isinstance(entry, DictConfig) for name in entry)


def stems(group: str) -> list[str]:
    """The options of a group."""
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def note(file: Path) -> str:
    """The first sentence of the comment that a file opens with."""
    lines = file.read_text().splitlines()
    said = " ".join(line[2:] for line in lines if line.startswith("# ") and "@package" not in line)
    return said.partition(". ")[0].removesuffix(".").replace("$", "$$")


def plain(config: DictConfig) -> Any:
    """A configuration as plain dictionaries and lists, with interpolations unresolved."""
    return OmegaConf.to_container(config)


def precision(accelerator: str) -> str:
    """Lightning's name of the fastest sound precision on an accelerator."""
    from whitenedcse.compute import quickest  # and PyTorch, for which --help does not wait

    return quickest(accelerator)


def when(value: Any, known: Any, then: Any, other: Any) -> Any:
    """A setting's value where another setting is `known`, or else `other`: ${when:${views},2,0.1,0.2}."""
    chosen = then if value == known else other
    return OmegaConf.create(chosen) if isinstance(chosen, list) else chosen  # as --resolve needs a list


def scratch(random: Any, pretrained: Any, *, _root_: Any) -> Any:
    """A setting's value for an encoder of random weights, or else of pretrained ones: ${scratch:A,B}."""
    return random if OmegaConf.select(_root_, "encoder._target_") == SCRATCH else pretrained


def passes(columns: Sequence[str], views: int) -> int:
    """How often each column of positives goes through the encoder, so that all together make `views` at most.

    >>> [passes(columns, 3) for columns in ([], ["text"], ["anchor", "positive"])]
    [3, 3, 1]
    """
    return max(1, views // min(2, max(1, len(columns))))


def label(hydras: Any, encoder: str | None, corpus: str | None) -> str:
    """What a run is named after: its experiment, or another encoder than the experiment's, or its corpus."""
    experiment = hydras.runtime.choices.get("experiment") if hydras else None
    if experiment and not own_encoder(hydras.overrides.task):
        return str(experiment)
    return Path(encoder).name if encoder else Path(corpus or "sweep").stem  # it may be over corpora


def own_encoder(words: Iterable[str]) -> bool:
    """Whether a command line names an encoder, in place of the experiment's."""
    return any(word.startswith(("encoder=", "encoder.path=")) for word in words)


def jobs(hydras: Any) -> list[tuple[str, ...]]:
    """The words of each job of a sweep, in Hydra's order."""
    texts = [f"{key}={value}" for key, value in (hydras.sweeper.get("params") or {}).items()]
    parsed = OverridesParser.create().parse_overrides([*texts, *hydras.overrides.task])
    swept = {each.get_key_element(): each for each in parsed}  # the last of a name counts
    choices = [
        [f"{key}={text}" for text in each.sweep_string_iterator()]
        if each.is_sweep_override()
        else [f"{key}={each.get_value_element_as_str()}"]
        for key, each in swept.items()
    ]
    return list(product(*choices))


@cache
def composed(command: str, job: int = 0) -> dict[str, Any]:
    """The resolved settings of `python train.py ...` or `python evaluate.py ...`; of a sweep, of one job."""
    _, script, *words = shlex.split(command)
    name = script.removesuffix(".py")
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        if "-m" in words:
            words.remove("-m")
            words = list(jobs(compose(name, words, return_hydra_config=True).hydra)[job])
        return dict(OmegaConf.to_container(compose(name, words), resolve=True))  # type: ignore[arg-type]


def inherited(hydras: Any) -> list[str]:
    """The overrides of Hydra's own settings that a job of a sweep inherits: where its files are found."""
    return [text for text in hydras.overrides.hydra if text.startswith("hydra.searchpath")]


for resolver in (when, scratch, passes, options, precision):
    OmegaConf.register_new_resolver(resolver.__name__, resolver, replace=True)
OmegaConf.register_new_resolver("label", label, use_cache=True, replace=True)  # for all jobs of a sweep
OmegaConf.register_new_resolver("stamp", stamp, use_cache=True, replace=True)

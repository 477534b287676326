"""What is wrong with a command line, as one line that names the cure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from traceback import extract_tb
from typing import Any

from hydra import compose, initialize_config_dir
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from whitenedcse.app.configuration import (
    CONF,
    HYDRA_KEYS,
    SCRIPT_TYPES,
    groups,
    matches,
    parameters,
    plain,
    stems,
    unknown,
)
from whitenedcse.app.identity import not_on_path, script_of
from whitenedcse.app.options import (
    ADDED,
    CHOSEN,
    foreign,
    no_default,
    no_settings,
    own_class,
    own_options,
    refuse_added,
    settings_of,
    where_from,
)
from whitenedcse.app.space import did_you_mean
from whitenedcse.run import command, flat

OWN = {"data": "data=file data.corpus={}", "encoder": "encoder=pretrained encoder.path={}"}  # a user's own
OWN |= {"tasks": "tasks.names=[{}]", "experiment": "DIR/experiment/{}.yaml, with --config-dir DIR"}
FIT = (
    "evaluate fits transforms itself, postprocess=whitening fit=FILE; to evaluate a fit of whiten fit export "
    "a model with it, whitenedcse export MODEL DIR --whiten FIT --to sentence-transformers; then model=DIR"
)
EMPTY = "has no value yet: add "
NO_DEVICE = "but PyTorch finds no such device here; leave it out, or use cpu"
FIRST = ", with no byte-order mark before it: # @package _global_"
NESTED = "under # @package _global_ it belongs inside 'GROUP:'; an option is taken over as '- OPTION@GROUP'"
GIVEN = "a class is given its settings (+loss.NAME=VALUE adds one), a head width= too, optim total_steps= too"
STARTED = "trainer.devices={}, but {} ranks were started: leave out trainer.devices"
UNSET = "is not set in the environment: set it, or say what else to use, as in ${oc.env:NAME,VALUE}"
MENDABLE = (HydraException, OmegaConfBaseException, ValueError, OSError)


def mendable(error: BaseException) -> BaseException | None:
    """What to tell the user of an error that a user can mend; None for any other."""
    kinds = [kind.__name__ for kind in type(error).__mro__]  # their packages need not be imported for this
    if {"MisconfigurationException", "YAMLError"} & {*kinds} or isinstance(error, MENDABLE):
        return error
    last = extract_tb(error.__traceback__)[-1:]
    if isinstance(error, TypeError) and last and re.search(r"hydra\W_internal", last[0].filename):
        return ValueError(str(error))
    if "DistNetworkError" in kinds:
        return ValueError(f"the ranks' connection at MASTER_ADDR and MASTER_PORT failed: {error}")
    if re.search(r"\bMPS\b", str(error)):  # PyTorch lacks something on Apple's GPUs
        return ValueError(f"this does not work on an Apple GPU ({error}); use trainer.accelerator=cpu")
    return None


def one_line(error: BaseException, argv: list[str]) -> str:
    """The cause of an error as one line of text, for the user who started the script as argv says."""
    while isinstance(error, HydraException) and error.__cause__ and "Error in call to target" in str(error):
        error = error.__cause__
    text = " ".join(str(error if str(error) else error.__cause__ or "").split())
    for pattern, cure in CURES.items():
        if (found := re.search(pattern, text)) and (said := cure(found, argv)):
            return said
    if isinstance(error, PermissionError | FileExistsError | NotADirectoryError):
        return f"{error.filename}: {error.strerror}; write elsewhere with hydra.run.dir=DIR"
    return (text or type(error).__name__) + did_you_mean(error, argv[1:])


def no_setting(key: str, argv: list[str]) -> str:
    """What to write in place of a setting or group that the script does not have as it is written."""
    word = next((text for text in argv[1:] if text.partition("=")[0].lstrip("+") == key.lstrip("+")), key)
    if key in ADDED:
        return f"{key} is added with a plus: {command(argv)} {ADDED[key]}+{word}"
    if said := no_default(argv) or no_part(key, word, argv) or no_own_setting(key, word, argv):
        return said
    script, other = ("train", "evaluate")[:: 1 if script_of(argv) == "train" else -1]
    theirs, ours = ({*groups(name), *OmegaConf.load(CONF / f"{name}.yaml")} for name in (other, script))
    if key.partition(".")[0] in theirs - ours:
        return f"{key} is a setting of {other}.py, not of {script}.py"
    group, _, inside = key.partition(".")
    if word.startswith("+"):
        return f"{key} is there already: write {word.lstrip('+')}, without a plus"
    if having := options_with(group, inside):
        return f"no setting {key!r} in this {group}; add one that has it: {having}"
    return unknown(key, known_keys(argv))


def no_own_setting(key: str, word: str, argv: list[str]) -> str:
    """What to write for a setting of a class of the user's own; "" for one of this package."""
    group, _, inside = key.partition(".")
    if not inside or not (own := own_class(group, stems(group), argv)):
        return ""
    with suppress(ValueError):  # of a class that is not found
        known = parameters(group, own, imported=True).keys() - HYDRA_KEYS
        if known and inside.partition(".")[0] not in known:
            return unknown(key, [f"{group}.{name}" for name in known])
    return f"a setting of a class of your own is added with a plus: +{word.lstrip('+')}"


def no_part(key: str, word: str, argv: list[str]) -> str:
    """What to write for another trainer's name, a term the loss lacks, a fit given to evaluate; else ""."""
    if ours := foreign(key, argv):
        return f"no setting {key!r}: {ours}"
    if script_of(argv) == "evaluate" and key == "whiten":
        return f"{word}: {FIT}"
    group, name = [*key.split("."), ""][:2]
    if group != "terms" or any(known.startswith(f"terms.{name}.") for known in known_keys(argv)):
        return ""
    return f"terms has no {name!r} yet; {f'add +{word}' if key.endswith('._target_') else where_from(name)}"


def options_with(group: str, inside: str) -> str:
    """The options of a group that read a setting, as GROUP=ONE or GROUP=OTHER; "" for none."""
    name = f"{group}.{inside}"  # of an option that sets other groups, the whole name
    every = {stem: settings_of(group, stem, [CONF]) for stem in stems(group)}
    having = {stem: here for stem, here in every.items() if {inside, name} & here.keys()}
    if not having:
        return ""
    from whitenedcse.report.conditions import unread  # and PyTorch, for which other errors do not wait

    read = [stem for stem in having if name not in unread(flat({group: having[stem]}) | {name: "any"})]
    first = sorted(read or having, key=lambda s: "???" not in map(having[s].get, (inside, name)))  # to give
    return " or ".join(f"{group}={stem}" for stem in first)


def no_null(argv: list[str]) -> str:
    """What to write in place of GROUP=null."""
    keys = [text.lstrip("+").removesuffix("=null") for text in argv[1:] if text.endswith("=null")]
    if (group := next((key for key in keys if key in groups(script_of(argv))), None)) is None:
        return "the name of an option is text, not null or a number: give its file another name"
    return f"{group}=null: choose {group}=" + f" or {group}=".join({*stems(group)} & {"none"} or stems(group))


def no_word(argv: list[str]) -> str:
    """What to write in place of the first word of a command line that Hydra's grammar does not take."""
    for word in get_args_parser().parse_known_args(argv[1:])[0].overrides:
        try:
            OverridesParser.create().parse_override(word)
        except HydraException:
            key, equals, value = word.partition("=")
            if not equals and not word.startswith("-"):
                known = "model" if script_of(argv) == "evaluate" else "data.corpus"
                after = next((t for t in argv[argv.index(word) + 1 :][:1] if "=" not in t), "VALUE")
                pair = f"{word}={after}" if word in known_keys(argv) else f"{known}={word}"
                return f"{word}: settings are written KEY=VALUE, as {pair}"
            if equals and value[:1] == "[" and value[-1:] == "]":
                items = re.split(r",(?![^\[]*\])", value[1:-1])  # at commas outside inner brackets
                quoted = ",".join('"' + item.strip(" '\"") + '"' for item in items)
                return f"{word}: values with such characters have quotes of their own, '{key}=[{quoted}]'"
            if equals:
                text = value.replace("'", "\\'")
                return f"{word}: a value with such characters has quotes of its own, \"{key}='{text}'\""
    return "a setting is not written as KEY=VALUE; --help lists them"


def no_option(group: str, option: str, options: list[str]) -> str:
    """What to write in place of an option that a group does not have."""
    if (group, option) in (("hydra/launcher", "joblib"), ("hydra/sweeper", "optuna")):
        return f"{group}={option} needs a package: pip install 'whitenedcse[sweep]'"
    if group == "postprocess" and (option.endswith(".safetensors") or Path(option).is_file()):
        return f"postprocess={option}: {FIT}"
    near = get_close_matches(option.lower(), options, n=1)
    nearest = f"; the nearest is {group}={near[0]}" if near else ""
    mine = OWN.get(group, f"{group}._target_={{}}" if "." in option else "")
    own = f"; your own is {mine.format(option.strip('[]'))}" if mine and not near else ""
    return f"no {group}={option}{nearest}; there are {', '.join(options)}{own}"


def refuse_options(argv: list[str]) -> None:
    """Raise ValueError for an option in the style of other programs, such as --epochs 3, or with a plus."""
    strange = ["--run"] * any(re.match("--run(=|$)", text) for text in argv[1:])  # Hydra has one, too
    strange = strange or [t for t in get_args_parser().parse_known_args(argv[1:])[1] if t.startswith("-")]
    if not strange:
        return refuse_added(argv)
    name = strange[0].partition("=")[0].lstrip("-")
    keys = sorted(sorted(known_keys(argv), reverse=True), key=lambda key: -key.count("."))
    last = {key.rpartition(".")[2]: key for key in keys}  # of equal names the one least deep, as seed
    near = get_close_matches(name, last, n=1)
    cure = f"the nearest is {last[near[0]]}=VALUE" if near else "--help lists them"
    said = f"no option {strange[0]}: settings are written KEY=VALUE; {cure}"
    raise ValueError(no_part(name, strange[0], argv) or said)


def refuse_beside_compare(overrides: Iterable[str]) -> None:
    """Raise ValueError for a setting that evaluate.py does not read where it compares runs."""
    if rest := [text for text in overrides if text.partition("=")[0] not in ("compare", "draws", "digits")]:
        raise ValueError(f"compare= reads draws and digits, and writes no file: leave out {' '.join(rest)}")


def known_keys(argv: list[str]) -> list[str]:
    """The groups of conf/, and all settings under the groups and the experiment of this command line."""
    return [*groups(script_of(argv)), *flat(composed(argv))]


def composed(argv: list[str]) -> Any:
    """The configuration by the groups and the experiment of this command line, without its settings."""
    script = script_of(argv)
    chosen = [text for text in argv[1:] if text.partition("=")[0].lstrip("+") in {*groups(script), *ADDED}]
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose(script)
        with suppress(HydraException):
            config = compose(script, chosen)
    return plain(config)


def several(text: str, argv: list[str]) -> str:
    """What to write for a setting with several values."""
    name, _, values = text.partition("=")
    listed, value = f"{name}=[{values}]", flat(composed(argv)).get(name)
    if isinstance(value, list) or (name in SCRIPT_TYPES and matches([], SCRIPT_TYPES[name])):
        return f"{text}: a list is written {listed}"
    one = "" if name.lstrip("+") in {*groups(script_of(argv)), *ADDED} else f"; a list is {listed}"
    return f"{text}: several values are several runs, {command(argv)} -m {text}{one}"


def twice(group: str, argv: list[str]) -> str:
    """What to write where an option of a group is added, though a sweep or another word has added one."""
    words = [text for text in argv[1:] if text.startswith(f"+{group}=")]
    sweep = next((text for text in argv[1:] if text.startswith("+sweep=")), None)
    if not words and not sweep:
        return f"{group} has an option already; {CHOSEN.format(group, 'OPTION')}"
    if len(words) > 1 or not sweep:
        return f"{' '.join(words)}: one +{group} at a time"
    own = " ".join([command(argv), "-m", sweep, *(word.lstrip("+") for word in words)])
    return f"{sweep} has its own list of {group}s: replace it without a plus, {own}"


def misplaced(found: re.Match[str], argv: list[str]) -> str:
    """What to write for a setting, of a file or the command line, that its group does not have."""
    key, group, inside = found.groups()
    if any(key in own for _, own in own_options(argv, CONF)):
        return f"no setting '{key}'; in a file it is nested: '{group}:', and below that '  {inside}: ...'"
    if inside.partition(".")[0] in groups("train"):
        return f"{found.string}; a file that names groups needs as its first line{FIRST}"
    having = options_with(group, inside)
    own = any(name.startswith(f"{group}/") for name, _ in own_options(argv))
    begin = "; your file begins with the option that it changes, defaults: [OPTION]" * own
    return f"{found.string}; {having} has it{begin}" if having else found.string


# what Hydra, or Lightning, says of a mistake, and what is said instead
CURES: dict[str, Callable[[re.Match[str], list[str]], str]] = {
    r"^In '?\w+/|in the final defaults list|^Multiple values for": lambda _, argv: no_default(argv),
    r"^Could not override '([^'@]+)": lambda found, argv: no_setting(found[1], argv),
    r"Could not append to config\. An item is already at '([^']+)'": lambda f, argv: no_setting(f[1], argv),
    r"See https://hydra\.cc\S*override_grammar": lambda _, argv: no_word(argv),
    r"Could not load '([^/']+)/([^']+)'": lambda found, _: no_option(found[1], found[2], stems(found[1])),
    r"Environment variable '(\w+)' not found": lambda found, _: f"{found[1]} {UNSET}",
    r"Missing mandatory value: encoder.path": lambda *_: f"encoder.path {EMPTY}encoder.path=DIR_OR_HUB_ID",
    r"Missing mandatory value: (\S+)": lambda found, _: f"{found[1]} {EMPTY}{found[1]}=VALUE",
    r"Could not find '((?:hydra/)?[^/']+)/([^']+)' Available options in '[^']+': (.*) Config search": (
        lambda found, _: no_option(found[1], found[2], found[3].split())
    ),
    r"Error trying to access (\w+)\.\S+ node `\1` is not a container": lambda found, _: no_settings(found[1]),
    r"^\w[\w.]*\(\) (missing|takes|got) .*arguments?\b.*": lambda found, _: f"{found[0]}; {GIVEN}",
    r"^In '\w+/\S+': Could not override '[^']+@(\w+)\.|^no setting '(experiment|system|sweep)'": (
        lambda found, _: f"the file in {found[1] or found[2]}/ needs as its first line{FIRST}"
    ),
    r"^no setting '_target_'": lambda *_: f"no setting '_target_' at the top level; {NESTED}",
    r"^(?:no setting '|.*[Kk]ey .* full_key: )((\w+)\.([\w.]+))": misplaced,
    r"^Ambiguous value for argument '(.+?)' 1\.": lambda found, argv: several(found[1], argv),
    r"^Multiple values for (\w+)\.": lambda found, argv: twice(found[1], argv),
    r"^Config group override must be a string": lambda _, argv: no_null(argv),
    r"^((\w+)\.(\w+))=.* must be a mapping with a _target_ or null.*": lambda found, _: (
        f"{found[0]}; its settings are written {found[1]}.NAME=VALUE"
        + (f", with {having}" if (having := options_with(found[2], f"{found[3]}._target_")) else "")
    ),
    r"^You set `devices=(\d+)`.*world size \((\d+)": lambda found, _: STARTED.format(found[1], found[2]),
    r"^data\.corpus=null must": lambda *_: "data=file has no corpus yet: add data.corpus=FILE",
    r"^No supported gpu backend|^`(CUDA|MPS|XLA)Accelerator` can not run": (
        lambda found, _: f"trainer.accelerator={(found[1] or 'gpu').lower()}, {NO_DEVICE}"
    ),
    r"`devices` selected with": lambda *_: "trainer.devices is how many devices to use, 1 or more, or auto",
    r"^.*no function or class to import: No module named '(\w+)'": not_on_path,
    r"^`(max_\w+)` (must be .*)": lambda found, _: f"trainer.{found[1]} {found[2]}",
}

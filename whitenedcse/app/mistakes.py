"""What is wrong with a command line, as one line that names the cure."""

from __future__ import annotations

import re
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from whitenedcse.app.configuration import CONF, groups, plain, stems, unknown
from whitenedcse.app.identity import flat
from whitenedcse.app.ranks import placed

# groups that are added by +, and what else they need
ADDED = {"experiment": "", "system": "", "sweep": "-m "}
SCRIPTS = ("train", "evaluate")
MENDABLE = (HydraException, OmegaConfBaseException, ValueError, OSError)


def mendable(error: Exception) -> Exception | None:
    """What to tell the user of an error that a user can mend; None for any other."""
    kinds = [kind.__name__ for kind in type(error).__mro__]  # their packages need not be imported for this
    if "MisconfigurationException" in kinds or isinstance(error, MENDABLE):
        return error
    if "DistNetworkError" in kinds:
        return ValueError(f"the ranks' connection at MASTER_ADDR and MASTER_PORT failed: {error}")
    if re.search(r"\bMPS\b", str(error)):  # PyTorch lacks something on Apple's GPUs
        return ValueError(f"this does not work on an Apple GPU ({error}); use trainer.accelerator=cpu")
    return None


def one_line(error: BaseException, argv: list[str]) -> str:
    """The cause of an error as one line of text, for the user who started the script as argv says."""
    while isinstance(error, HydraException) and error.__cause__ and "Error in call to target" in str(error):
        error = error.__cause__
    text = " ".join(str(error).split())
    for pattern, cure in CURES.items():
        if found := re.search(pattern, text):
            return cure(found, argv)
    if isinstance(error, PermissionError | FileExistsError | NotADirectoryError):
        return f"{error.filename}: {error.strerror}; write elsewhere with hydra.run.dir=DIR"
    return text or type(error).__name__


def no_setting(key: str, argv: list[str]) -> str:
    """What to write in place of a setting or group that the script does not have as it is written."""
    script = script_of(argv)
    word = next((text for text in argv[1:] if text.partition("=")[0] == key), key)
    if key in ADDED:
        return f"{key} is added with a plus: {command(argv)} {ADDED[key]}+{word}"
    (other,) = (name for name in SCRIPTS if name != script)
    theirs, ours = (
        set(OmegaConf.load(CONF / f"{name}.yaml")) | set(groups(name)) for name in (other, script)
    )
    if key.partition(".")[0] in theirs - ours:
        return f"{key} is a setting of {other}.py, not of {script}.py"
    group, _, inside = key.partition(".")
    having = {stem: here[inside] for stem in stems(group) if inside in (here := settings_of(group, stem))}
    having = dict(sorted(having.items(), key=lambda item: item[1] != "???"))  # first what it must be given to
    if having:
        return (
            f"no setting {key!r} in this {group}; add one that has it: {group}={f' or {group}='.join(having)}"
        )
    return unknown(key, known_keys(argv))


def settings_of(group: str, stem: str) -> dict[str, object]:
    """The settings that one option of a group writes, by their dotted names."""
    return flat(plain(OmegaConf.load(CONF / group / f"{stem}.yaml")))  # type: ignore[arg-type]


def no_option(group: str, option: str, options: list[str]) -> str:
    """What to write in place of an option that a group does not have."""
    near = get_close_matches(option, options, n=1)
    nearest = f"; the nearest is {group}={near[0]}" if near else ""
    return f"no {group}={option}{nearest}; there are {', '.join(options)}"


def refuse_options(argv: list[str]) -> None:
    """Raise ValueError for an option in the style of other programs, such as --epochs 3."""
    strange = [text for text in get_args_parser().parse_known_args(argv[1:])[1] if text.startswith("-")]
    if not strange:
        return
    name = strange[0].partition("=")[0].lstrip("-")
    last = {key.rpartition(".")[2]: key for key in sorted(known_keys(argv), reverse=True)}
    near = get_close_matches(name, last, n=1)
    nearest = f"; the nearest is {last[near[0]]}=VALUE" if near else "; --help lists them"
    raise ValueError(f"no option {strange[0]}: settings are written KEY=VALUE{nearest}")


def refuse_one_job() -> None:
    """Raise ValueError for a sweep without -m, which would train one run of it."""
    hydras = HydraConfig.get()
    name = hydras.runtime.choices.get("sweep")
    # a rank of a job is started with the words of the job, without -m
    if name and hydras.mode == RunMode.RUN and placed() is None:
        raise ValueError(f"+sweep={name} is several runs: add -m, as in python train.py -m +sweep={name}")


def known_keys(argv: list[str]) -> list[str]:
    """The groups of conf/, and all settings under the groups and the experiment of this command line."""
    script = script_of(argv)
    theirs = {*(f"+{name}" for name in ADDED), *groups(script)}
    chosen = [text for text in argv[1:] if text.partition("=")[0] in theirs]
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        try:
            config = compose(script, chosen)
        except HydraException:
            config = compose(script)
    return [*groups(script), *flat(plain(config))]


def script_of(argv: list[str]) -> str:
    """The script that a command line starts, "train" or "evaluate", as train.py or `whitenedcse train`."""
    return Path(argv[0]).stem.split()[-1]


def several(text: str, argv: list[str]) -> str:
    """What to write for a setting with several values."""
    name, _, values = text.partition("=")
    return f"{text}: several values are several runs, {command(argv)} -m {text}; a list is {name}=[{values}]"


def command(argv: list[str]) -> str:
    """How the script of a command line is started."""
    return f"python {Path(argv[0]).name}" if argv[0].endswith(".py") else argv[0]


# what Hydra, or Lightning, says of a mistake, and what is said instead
CURES: dict[str, Callable[[re.Match[str], list[str]], str]] = {
    r"^Could not override '([^'@]+)": lambda found, argv: no_setting(found[1], argv),
    r"Could not find '([^/']+)/([^']+)' Available options in '[^']+': (.*) Config search": (
        lambda found, _: no_option(found[1], found[2], found[3].split())
    ),
    r"^Ambiguous value for argument '(.+?)' 1\.": lambda found, argv: several(found[1], argv),
    r"^data\.corpus=null must": lambda *_: "data=file has no corpus yet: add data.corpus=FILE",
    r"^No supported gpu backend": (
        lambda *_: "trainer.accelerator=gpu, but PyTorch finds no GPU here; leave it out, or use cpu"
    ),
}

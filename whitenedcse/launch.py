"""Starting a script: errors that a user can mend are one line, and no setting goes unread."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from whitenedcse import ranks
from whitenedcse.precision import quickest
from whitenedcse.report import formats
from whitenedcse.report.history import run_of
from whitenedcse.settings import flat, refuse_unknown, unknown
from whitenedcse.training.dashboard import Dashboard

Result = TypeVar("Result")
MENDABLE = (HydraException, OmegaConfBaseException, MisconfigurationException, ValueError, OSError)
BAD_INPUT = 2  # the exit code of what a user can mend
CONF = Path(__file__).parents[1] / "conf"
QUIET = (
    ".*does not have many workers.*",
    ".*Experiment logs directory.*exists and is not empty.*",
    ".*LeafSpec.*",
    ".*Detected call of `lr_scheduler.step.*",  # float16's scaler leaves out the first steps, which overflow
    ".*your dataloader is not resumable.*",  # ours begins at the right batch by itself
)


say = rank_zero_only(formats.say)  # once, however many devices there are
OmegaConf.register_new_resolver("precision", quickest, replace=True)
OmegaConf.register_new_resolver("options", lambda name: options(name), replace=True)


def start(script: Callable[[], Any]) -> None:
    """Run a Hydra script; HYDRA_FULL_ERROR=1 shows the whole traceback of an error."""
    os.environ["WHITENEDCSE_FORCE"] = "1" if "--force" in sys.argv else ""
    sys.argv = [text for text in sys.argv if text != "--force"]
    if (here := ranks.placed()) is not None:
        ranks.end_with_parent()
        sys.argv += ["hydra.job_logging.root.handlers=[]"] if here.rank else []
    if here is None or "WHITENEDCSE_TRACEBACK" not in os.environ:  # the process that starts ranks asks once
        os.environ["WHITENEDCSE_TRACEBACK"] = os.environ.get("HYDRA_FULL_ERROR", "")
    os.environ["HYDRA_FULL_ERROR"] = "1"  # so that errors reach this place
    job(script)()


def job(script: Callable[..., Result]) -> Callable[..., Result]:
    """The same, but an error that a user can mend ends it with one line.

    It goes below hydra.main, which would print a line of its own before it.
    """

    @wraps(script)
    def one_line_at_most(*arguments: Any) -> Result:
        # here, not in `start`: a launcher's own process begins here
        logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
        for message in QUIET:
            warnings.filterwarnings("ignore", message=message)
        try:
            return script(*arguments)
        except BaseException as error:
            explain(error)
            raise
        finally:
            give_back()

    return one_line_at_most


def explain(error: BaseException) -> None:
    """End the process with one line if the user can mend this, and in a rank leave others time for theirs."""
    if isinstance(error, KeyboardInterrupt):
        sys.exit(128 + signal.SIGINT)
    if isinstance(error, MENDABLE):
        refuse(error)
    if re.search(r"\bMPS\b", str(error)):  # PyTorch lacks something on Apple's GPUs
        refuse(ValueError(f"this does not work on an Apple GPU ({error}); use trainer.accelerator=cpu"))
    if isinstance(error, RuntimeError):
        ranks.let_others_speak()


def give_back() -> None:
    """Return to the system what a job has freed: glibc keeps it, and a sweep goes on in this process."""
    gc.unfreeze()  # a run that ended early has frozen
    gc.collect()
    with suppress(AttributeError, OSError, TypeError):  # other systems have no such thing, or need none
        ctypes.CDLL(None).malloc_trim(0)


def refuse(error: Exception) -> NoReturn:
    """End the process with what was wrong."""
    if os.environ.get("WHITENEDCSE_TRACEBACK") == "1":
        raise error
    sys.stderr.write(f"error: {one_line(error)} (HYDRA_FULL_ERROR=1 shows where)\n")
    sys.exit(BAD_INPUT)


def one_line(error: BaseException) -> str:
    """What a user reads: the cause of an error, in one line."""
    while isinstance(error, HydraException) and error.__cause__ and "Error in call to target" in str(error):
        error = error.__cause__
    if key := re.match(r"Could not override '([^']+)'", str(error)):
        return unknown(key[1], known_keys(sys.argv))
    if isinstance(error, PermissionError | FileExistsError | NotADirectoryError):
        return f"{error.filename}: {error.strerror}; write elsewhere with hydra.run.dir=DIR"
    return " ".join(str(error).split()) or type(error).__name__


def known_keys(argv: list[str]) -> list[str]:
    """The groups, and the settings that exist with the groups and the experiment of this command line."""
    folders = {path.name for path in CONF.iterdir() if path.is_dir()}
    chosen = [text for text in argv[1:] if text.partition("=")[0].lstrip("+") in folders]
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return [*folders, *flat(plain(compose(Path(argv[0]).stem, chosen)))]


def choice(group: str) -> str | None:
    """What this command line takes of a group, as +experiment=NAME does; None where it takes nothing."""
    chosen: str | None = HydraConfig.get().runtime.choices.get(group)
    return chosen


def fit(model: str, name: str, columns: Sequence[str]) -> tuple[str, list[str]]:
    """What maps are fitted on, and its columns; "training" stands for the corpus of the model's own run."""
    if name != "training":
        return name, list(columns)
    if run := run_of(Path(model)):
        data = OmegaConf.load(run / "config.yaml").data
        return data.corpus, list(data.columns)
    raise ValueError(
        f"fit=training: {model} is no run of train.py; name a corpus, e.g. fit=wiki1m, or a file"
    )


def tests(config: DictConfig, run: Path) -> DictConfig | None:
    """The settings of evaluate.py that judge a run of train.py on its tests; None where it has none."""
    if not config.tasks.names:
        return None
    settings = compose("evaluate", ["protocol=posthoc"])
    settings.model, settings.sample, settings.tasks = str(run), config.monitor.sample, config.tasks
    return settings


def plain(config: DictConfig) -> Mapping[str, Any]:
    """The same as dictionaries, interpolations unresolved."""
    content: Any = OmegaConf.to_container(config)
    return content


def checked(config: DictConfig) -> Path:
    """Refuse settings that nothing reads; name the run after its directory, and return that."""
    refuse_order(list(HydraConfig.get().overrides.task))
    name = HydraConfig.get().job.config_name
    refuse_unknown(plain(config), [*map(str, OmegaConf.load(CONF / f"{name}.yaml")), *groups(str(name))])
    run = Path(HydraConfig.get().runtime.output_dir)
    config.run = run.name
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


def end(loggers: Iterable[Logger], run: Path) -> None:
    """Close the loggers, and print the last line, which other programs read."""
    for logger in loggers:
        logger.finalize("success")
        if isinstance(logger, Dashboard):
            logger.finish(run)
    say(f"run: {run}")


def show(grids: Iterable[formats.Grid]) -> None:
    """Print tables."""
    for grid in grids:
        say(formats.as_rich(grid))

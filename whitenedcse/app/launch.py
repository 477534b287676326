"""Starting a script: its errors in one line, its processes, and its run from the beginning to the end."""

from __future__ import annotations

import ctypes
import gc
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from whitenedcse import console, distributed
from whitenedcse.app import ranks
from whitenedcse.app.config import CONF, check_words, help_page, inherited, mendable, message, own_encoder
from whitenedcse.run import OTHER, SWEPT, Run

if TYPE_CHECKING:
    from lightning.pytorch.loggers import Logger

Result = TypeVar("Result")
BAD_INPUT = 2  # the exit code of what a user can mend
UNREAD = "error: the standard output was closed, so this ends; the same command resumes a run with a name"
sweeps: set[Path] = set()  # the folders of those that this process has started
QUIET = (
    ".*does not have many workers.*",
    ".*(LeafSpec|Experiment logs directory.*exists and is not empty).*",
    ".*is supported for historical reasons.*",  # trainer.precision=bf16, which is Lightning's bf16-mixed
    ".*smaller than the logging interval.*",  # of a short run, which its evaluations describe
    ".*Detected call of `lr_scheduler.step.*",  # float16's scaler leaves out the first steps, which overflow
    ".*your dataloader is not resumable.*",  # ours begins at the right batch by itself
)


def say(content: str | console.Grid) -> None:
    """Print a line or a table, once however many ranks there are."""
    if distributed.first():
        console.say(content)


def start(script: Callable[[DictConfig], Any]) -> None:
    """Run a function on the configuration of its name; --debug shows the traceback of an error."""
    os.environ["WHITENEDCSE_FORCE"] = "1" if "--force" in sys.argv else ""
    os.environ.update({console.TRACEBACK: "1"} if "--debug" in sys.argv else {})
    sys.argv = in_one_place([text for text in sys.argv if text not in ("--force", "--debug")])
    if "WHITENEDCSE_FRONT" in os.environ:  # which started this rank, and ends the others
        distributed.end_with_parent()
    if (here := distributed.placed()) is not None:
        sys.argv += ["hydra.job_logging.root.handlers=[]"] if here.rank else []
    if here is None or console.TRACEBACK not in os.environ:  # the process that starts ranks asks once
        os.environ[console.TRACEBACK] = "1" if console.traced() else ""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # so that errors reach this place
    main = hydra.main(version_base="1.3", config_path=str(CONF), config_name=script.__name__)
    with ranks.ending_when_asked(), explained():
        check_words(sys.argv)
        if {"--help", "-h"} & {*sys.argv}:
            sys.stdout.write(help_page(script.__name__, sys.argv[1:]))
        else:
            main(job(script))()


def in_one_place(argv: list[str]) -> list[str]:
    """A command line with its settings last: Hydra takes none behind an option that follows others."""

    def is_setting(i: int) -> bool:
        return bool(re.match("[^-].*=|~", argv[i])) and not re.fullmatch("--config[^=]*|-c.", argv[i - 1])

    return [argv[0], *(argv[i] for i in sorted(range(1, len(argv)), key=is_setting))]


def job(script: Callable[..., Result]) -> Callable[..., Result]:
    """A decorator: an error that a user can mend ends the process with one line."""

    @wraps(script)
    def one_line_at_most(*arguments: Any) -> Result:
        quiet()  # here, not in `start`: a launcher's own process begins here
        try:
            with explained(UNREAD):
                return script(*arguments)
        finally:
            if not HydraConfig.initialized() or HydraConfig.get().mode != RunMode.RUN:  # others may follow
                give_back()

    return one_line_at_most


def quiet() -> None:
    """Ignore the warnings of other libraries that say nothing about a run."""
    for text in QUIET:
        warnings.filterwarnings("ignore", message=text)


@contextmanager
def explained(unread: int | str = 1) -> Iterator[None]:
    """Exit with one line for an error that a user can mend, or with `unread` if nobody reads the output."""
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        if code := console.asked_to_end(error):
            sys.exit(code)
        if isinstance(error, BrokenPipeError) and console.unread():
            sys.exit(unread)  # with 1 rich ends a program whose table nobody reads
        if isinstance(error, RuntimeError):
            ranks.let_others_speak()
        if mendable(error):
            refuse(error)
        raise


def give_back() -> None:
    """Return to the system what a job has freed: glibc keeps it, and a sweep continues in this process."""
    gc.unfreeze()  # a run that ended early has frozen
    gc.collect()
    with suppress(AttributeError, OSError, TypeError):  # other systems have no such thing, or need none
        ctypes.CDLL(None).malloc_trim(0)


def refuse(error: BaseException) -> NoReturn:
    """End the process with exit code 2 and the error in one line on the standard error."""
    if os.environ.get(console.TRACEBACK) == "1":
        raise error
    sys.stderr.write(f"error: {message(error, sys.argv)} (--debug shows where)\n")
    leave_nothing()
    sys.exit(BAD_INPUT)


def leave_nothing() -> None:
    """Remove what this job wrote before it was refused, and the folders above it in which nothing is left."""
    above = [*sweeps]
    runtime: Any = HydraConfig.get().runtime if HydraConfig.initialized() else None
    if runtime and not OmegaConf.is_missing(runtime, "output_dir"):  # as it is where its name has an error
        run = Run(runtime.output_dir)
        run.discard()
        above.append(run.path.parent)
    for folder in above:
        with suppress(OSError, ValueError):
            if folder in sweeps and [path.name for path in folder.iterdir()] == [SWEPT]:
                (folder / SWEPT).unlink()
            os.removedirs(folder.relative_to(Path.cwd()))


def show(grids: Iterable[console.Grid]) -> None:
    """Print tables."""
    for grid in grids:
        say(grid)


def again(run: Run) -> str:
    """What resumes a run that is stopped: the same command, or the same call in Python, in its directory."""
    hydras = HydraConfig.get()
    if hydras.mode is None:  # `whitenedcse.train`
        return f"the same call with output={str(run.path)!r}"
    folder, outputs = run.path if hydras.mode == RunMode.RUN else run.path.parent, Path.cwd() / "outputs"
    if folder.is_relative_to(outputs):
        return f"the same command with run={folder.relative_to(outputs)}"
    kind = "run" if hydras.mode == RunMode.RUN else "sweep"
    return f"the same command with hydra.{kind}.dir={folder}"


def forced() -> bool:
    """Whether --force was given."""
    return os.environ.get("WHITENEDCSE_FORCE") == "1"


def several(run: Run, devices: int, timeout: float) -> bool:
    """Run this job as one process per device, unless this process is one of them; returns whether it did.

    Ends this process if the job failed. Raises ValueError for a sweep inside of ranks started elsewhere: each
    rank would sweep by itself.
    """
    hydras = HydraConfig.get()
    if distributed.placed() is not None:
        if hydras.mode == RunMode.MULTIRUN and "SLURM_JOB_ID" not in os.environ:
            raise ValueError(
                "torchrun would run the sweep once in each rank; use whitenedcse train -m trainer.devices=N"
            )
        return False
    if devices < 2:
        return False
    job = sys.argv[1:] if hydras.mode == RunMode.RUN else [*hydras.overrides.task, *inherited(hydras)]
    job += ["--force"] if forced() else []
    if status := ranks.run([*program(), *job, f"hydra.run.dir={run.path}"], devices, timeout):
        if status == BAD_INPUT:
            leave_nothing()
        sys.exit(status)
    return True


def program() -> list[str]:
    """The command that starts this script again: train.py, evaluate.py, or a command of `whitenedcse`."""
    if sys.argv[0].endswith(".py"):
        return [sys.executable, sys.argv[0]]
    return [sys.executable, "-m", "whitenedcse.app.cli", sys.argv[0].split()[-1]]


def refuse_search(dev: str | None) -> None:
    """Raise ValueError for a search, which maximises the dev score, without dev pairs."""
    if dev is None and "direction" in (HydraConfig.get().sweeper or {}):
        raise ValueError(
            "a search maximises the dev score: name scored pairs by monitor.dev=FILE or monitor=sts_b"
        )


def mine(run: Run, settings: str, devices: int, timeout: float) -> bool:
    """Whether this process has to train: not if the run has ended, nor if one process per device trained.

    Raises ValueError if the directory holds a run with other settings, or another process writes it.
    """
    if finished(run, settings) or several(run, devices, timeout):
        return False
    run.claim()
    return not finished(run, settings)  # while waiting for the directory


def finished(run: Run, settings: str) -> bool:
    """Whether this run has ended before, which is then printed; --force changes no such run."""
    run.refuse_other(settings, {}, force=forced() and run.scores is None)
    if run.scores is None:
        return False
    say(f"{run.path} is finished and not changed; for a new run, {OTHER}")
    say(f"run: {run.path}")
    return True


def origin(config: Any, encoder: Any) -> dict[str, Any]:
    """What names a run: its experiment and system, settings given, seed, and where its encoder comes from."""
    hydras = HydraConfig.get()
    names = {name: hydras.runtime.choices.get(name) for name in ("experiment", "system")}
    if names["experiment"] and "path" in config.encoder and own_encoder(hydras.overrides.task):
        names["experiment"] += f" with {Path(config.encoder.path).name}"
    source = encoder.provenance(config.encoder.path) if "path" in config.encoder else None
    return {**names, "overrides": [*hydras.overrides.task], "seed": config.seed, "encoder": source}


def begin(run: Run, settings: str, facts: Mapping[str, Any], digests: Mapping[str, Any]) -> Path | None:
    """Start a run, or return the checkpoint from which an unfinished one resumes; None: from step 0.

    digests: of data, tokenizer and `content`. Raises ValueError if they, the settings or the number of
    processes are not what the run began with.
    """
    here = distributed.placed()
    exact = {**digests, "processes": here.world if here else 1}
    others = run.refuse_other(settings, exact, force=forced())
    from whitenedcse.training.trainer import newest, step_of

    checkpoint = newest(run.checkpoints, say)
    if not run.began:
        run.start(settings, **facts, **exact)
        return None
    step = step_of(checkpoint)
    changed = run.resume(settings, exact, step)
    say(f"{run.path} resumes after step {step}")
    if others:
        say(f"--force: what came before this step was made with something else: {', '.join(others)}")
    if changed:
        say(f"results may differ in the last bits: {', '.join(changed)}")
    return checkpoint


def finish(
    run: Run, dev: dict[str, Any], loggers: list[Logger], evaluated: Callable[..., Any] | None
) -> None:
    """Evaluate the best checkpoint on the tests, if there are any; log, write and show the scores.

    What the loggers write is on disk before the run is marked as ended.
    """
    from whitenedcse.evaluation.suite import logged
    from whitenedcse.report.results import grids, training_grid

    scores: dict[str, Any] = {"dev": dev}
    scores, items, _ = evaluated(run, scores) if evaluated is not None else (scores, None, None)
    for logger in loggers:
        if evaluated is not None:
            logger.log_metrics(logged(scores), dev["last_step"])
        logger.finalize("success")
        if hasattr(logger, "finish"):  # the dashboard's
            logger.finish(run.best, scores)
    run.end(scores, items)
    single = not (HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN)
    show([training_grid(dev), *(grids(scores, None) if evaluated else [])] if single else [])
    here = run.path.relative_to(Path.cwd()) if run.path.is_relative_to(Path.cwd()) else run.path
    say(f"best checkpoint: {here}/best   metrics: {here}/metrics.csv   scores: {here}/scores.json")
    if single:
        name = quote(str(here))
        own = " 'tasks.names=[TESTS.csv]'" * (run.settings["monitor"]["dev"] != "STS-B/dev")
        tests = [f"evaluate model={name}{own}"] * (evaluated is None)
        after = f"report {name}", *tests, f"export {name} OUT --to transformers"
        say(f"next: {'   '.join(f'whitenedcse {command}' for command in after)}")
    say(f"run: {run.path}")  # the last line, which other programs read

"""Starting train.py and evaluate.py: an error in one line, a process for each device, and how each ends.

Several ranks on this machine are started by torchrun's agent within this process. It ends the others when one
fails, and passes Ctrl-C and SIGTERM on to all. A rank that hangs in a collective is ended by the timeout of
the process group (`trainer.timeout`).
"""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn, TypeVar
from uuid import uuid4

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, read_write

from whitenedcse.app.config import CONF, check_jobs, check_words, help_page, jobs, mendable, message
from whitenedcse.console import asked_to_end, ending_when_asked, override, quoted, say
from whitenedcse.distributed import ASKING, end_with_parent, has_agent, is_first, placed
from whitenedcse.inputs import expanded
from whitenedcse.run import Run

Result = TypeVar("Result")
BAD_INPUT = 2  # the exit code of what a user can mend
PATIENCE = 300  # seconds that a rank which was asked to stop may take, for its step and its checkpoint
LATER = 2.0  # seconds that another rank than the first waits before it says why it failed
LOST = 4.0  # seconds more where the cause may be another rank, which then has said it
JOBLIB = "JoblibLauncher"  # runs several jobs of a sweep at a time
HOME = r"(?<=[=,\[])~/[^,\[\]'\"=]*"  # a path in the home directory, in the value of a setting
QUIET = (
    ".*does not have many workers.*",
    ".*(LeafSpec|Experiment logs directory.*exists and is not empty).*",
    ".*smaller than the logging interval.*",  # of a short run, which its evaluations describe
    ".*Detected call of `lr_scheduler.step.*",  # float16's scaler leaves out the first steps, which overflow
    ".*your dataloader is not resumable.*",  # ours begins at the right batch by itself
)


def start(script: Callable[[DictConfig], Any]) -> None:
    """Run a function on the configuration of its name; --debug shows the traceback of an error."""
    debug, here = "--debug" in sys.argv, placed()
    words = ["force=true" if word == "--force" else word for word in sys.argv if word != "--debug"]
    sys.argv = settings_last([re.sub(HOME, lambda path: quoted(expanded(path[0])), word) for word in words])
    if here is not None and here.rank:
        sys.argv.append("hydra.job_logging.root.handlers=[]")
    if has_agent():
        end_with_parent()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra's own: errors reach this place
    main = hydra.main(version_base="1.3", config_path=str(CONF), config_name=script.__name__)
    try:
        with ending_when_asked(), explained(debug=debug):
            check_words(sys.argv)
            if {"--help", "-h"} & {*sys.argv}:
                say(help_page(script.__name__, sys.argv[1:]))
            else:
                main(job(script, debug=debug))()
    except BaseException as error:
        if here is None:
            raise
        leave(error)
    leave_done(0 if here is None else here.rank)


def settings_last(argv: list[str]) -> list[str]:
    """A command line with its settings last: Hydra takes none behind an option that follows others."""
    options, settings = argv[:1], []
    for before, word in pairwise(argv):
        if re.match("[^-].*=|~", word) and not re.fullmatch("--config[^=]*|-c.", before):
            settings.append(word)
        else:
            options.append(word)
    return options + settings


def job(script: Callable[..., Result], *, debug: bool = False) -> Callable[..., Result]:
    """A decorator: an error that a user can mend ends the process with one line."""

    @wraps(script)
    def one_line_at_most(*arguments: Any) -> Result:
        quiet()  # here, not in `start`: a launcher's own process begins here
        hydras: Any = HydraConfig.get() if HydraConfig.initialized() else None
        several = hydras and hydras.mode == RunMode.MULTIRUN and JOBLIB in hydras.launcher._target_
        if several and OmegaConf.select(arguments[0], "trainer.devices", default=1) == 1:
            take_gpu(hydras.job.num)
        of_sweep = hydras and hydras.mode == RunMode.MULTIRUN and placed() is None
        with going_on(hydras, debug=debug) if of_sweep else explained(debug=debug):
            return script(*arguments)

    return one_line_at_most


@contextmanager
def going_on(hydras: Any, *, debug: bool) -> Iterator[None]:
    """A context of a job of a sweep: an error that a user can mend is one line, and the other jobs go on."""
    try:
        yield
    except Exception as error:
        if code := asked_to_end(error):
            sys.exit(code)
        if debug or not mendable(error):
            raise  # by Hydra, once the other jobs have ended
        said = message(error, [sys.argv[0], *hydras.overrides.task])
        sys.stderr.write(f"error: {os.path.relpath(hydras.runtime.output_dir)}: {said}\n")
        if "n_trials" in hydras.sweeper:
            raise  # a search is told which of its trials failed


def take_gpu(job: int) -> None:
    """Let this process of a sweep see one GPU alone, by the number of its first job.

    Where more processes than GPUs run, some share one. CUDA reads the variable when it is first asked, and of
    a later job of this process there is one GPU.
    """
    import torch

    count, visible = torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES")
    if count > 1:
        names = visible.split(",") if visible else [str(number) for number in range(count)]
        os.environ["CUDA_VISIBLE_DEVICES"] = names[job % count]


def quiet() -> None:
    """Ignore the warnings of other libraries that say nothing about a run, and all in a later rank."""
    for text in QUIET:
        warnings.filterwarnings("ignore", message=text)
    if not is_first():
        warnings.simplefilter("ignore")


@contextmanager
def explained(*, debug: bool = False) -> Iterator[None]:
    """A context that ends the process with one line for an error that a user can mend; `debug`: with all."""
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        if code := asked_to_end(error):
            sys.exit(code)
        let_others_speak(error)
        if debug or not mendable(error):
            raise
        sys.stderr.write(f"error: {message(error, sys.argv)} (--debug shows where)\n")
        sys.exit(BAD_INPUT)


def launched(words: Sequence[str], count: int, again: str) -> int:
    """Run this script with words as `count` ranks; returns the job's exit status. again: what resumes it."""
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    cli = ["-m", "whitenedcse.app.cli", sys.argv[0].split()[-1]]  # of the command `whitenedcse train`
    script = [sys.argv[0]] if sys.argv[0].endswith(".py") else cli
    config = LaunchConfig(1, 1, count, run_id=uuid4().hex, max_restarts=0)
    config.rdzv_backend, config.rdzv_endpoint, config.local_addr = "c10d", "127.0.0.1:0", "127.0.0.1"
    config.signals_to_handle = ",".join(number.name for number in (*ASKING, signal.SIGHUP, signal.SIGQUIT))
    config.shutdown_timeout = PATIENCE
    try:
        with agent_is_quiet():
            elastic_launch(config, sys.executable)(*script, *words)
    except SignalException as asked:
        return 128 + asked.sigval
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        if failure.exitcode > 0:  # it has said why
            return failure.exitcode
        name = signal.Signals(-failure.exitcode).name
        who = f"rank {rank} (process {failure.pid})"
        sys.stderr.write(f"error: {who} was ended by {name}, and the others with it; {again} resumes\n")
        return 128 - failure.exitcode
    return 0


@contextmanager
def agent_is_quiet() -> Iterator[None]:
    """A context in which torchrun's agent says nothing; it gives back the signals that the agent handles."""
    log = logging.getLogger("torch.distributed.elastic")
    log.addHandler(logging.NullHandler())
    log.propagate = False
    numbers = (*ASKING, signal.SIGHUP, signal.SIGQUIT)
    handlers = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                signal.signal(number, handler)


def let_others_speak(error: BaseException) -> None:
    """Wait, in a rank that failed, so that the agent ends it meanwhile if another rank failed first."""
    here = placed()
    if here is None or here.world == 1:
        return
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if here.rank:
        time.sleep(LATER)
    if isinstance(error, RuntimeError):  # as a collective raises when another rank has gone
        time.sleep(LOST)


def leave_done(rank: int) -> None:
    """End a rank that is done, but for the first: at the end of Python a thread of Gloo may abort it."""
    if rank:
        leave(SystemExit(0))


def leave(error: BaseException) -> NoReturn:
    """End a rank at once: at the end of Python, NCCL would wait for the other ranks after an error."""
    status = 1
    if not isinstance(error, SystemExit):
        traceback.print_exception(error)
    elif isinstance(error.code, str):
        sys.stderr.write(f"{error.code}\n")
    else:
        status = error.code or 0
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def again(run: Run) -> str:
    """What resumes a run that is stopped: the same command, or the same call in Python, in its directory."""
    hydras = HydraConfig.get()
    if hydras.mode is None:  # `whitenedcse.train`
        return f"the same call with output={str(run.path)!r}"
    folder, outputs = run.path if hydras.mode == RunMode.RUN else run.path.parent, Path.cwd() / "outputs"
    if folder.is_relative_to(outputs):
        return f"the same command with {override('run', folder.relative_to(outputs))}"
    return "the same command"  # which names a folder elsewhere


class Checked(Callback):
    """Checks all jobs of a sweep before the first, and gives joblib as many processes as there are GPUs."""

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """End the process if a job would be refused."""
        with explained():  # Hydra turns an error of a callback into a warning
            Run(config.hydra.sweep.dir).check_free(sweep=True)
            dev = OmegaConf.select(config, "monitor.dev", default="")
            if "n_trials" in config.hydra.sweeper and dev is None:
                raise ValueError("a search needs scored pairs: monitor.dev=FILE")
            check_jobs(str(config.hydra.job.config_name), config.hydra)
        launcher = config.hydra.launcher
        if JOBLIB in launcher._target_ and launcher.n_jobs == -1:
            import torch

            if gpus := torch.cuda.device_count():
                with read_write(launcher):
                    launcher.n_jobs = gpus
                say(f"{gpus} jobs at a time, each on a GPU of its own")

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        """End the process with the code of an error if jobs have failed."""
        if "n_trials" in config.hydra.sweeper or placed() is not None:  # a rank ends with its job's error
            return
        count = len(jobs(config.hydra))
        left = count - len([*Path(config.hydra.sweep.dir).glob("*/scores.json")])
        if left > 0:  # the folder may have jobs of a larger sweep
            sys.stderr.write(f"error: {left} of {count} jobs failed, as said above\n")
            sys.exit(BAD_INPUT)

"""Programs of this project as a user starts them, in processes that have imported all before.

The standard library's fork server imports the large packages once for each of pytest's workers. A fork has
the environment, the directory and the output of a program of its own; what it starts itself, as torchrun its
ranks, are new interpreters.
"""

import importlib
import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple
from unittest import mock

ROOT = Path(__file__).parents[1]
NEW = {"HYDRA_FULL_ERROR": "0", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "WANDB_API_KEY": ""}
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["imported"])


class Done(NamedTuple):
    """How a program ended: its exit code, and what it wrote."""

    returncode: int
    stdout: str
    stderr: str


class Program(FORKS.Process):
    """A fork that runs a program, with the methods of `subprocess.Popen`."""

    def poll(self):
        return self.exitcode

    def wait(self, timeout=None):
        self.join(timeout)
        if self.exitcode is None:
            raise subprocess.TimeoutExpired(self.name, timeout)
        return self.exitcode

    def send_signal(self, number):
        if self.exitcode is None:
            os.kill(self.pid, number)


def surroundings(cwd, more):
    """The environment of a program: offline, with data and a cache in `cwd`, and `more`."""
    own = {"WHITENEDCSE_CACHE": str(cwd / "cache"), "WHITENEDCSE_DATA": str(cwd / "data")}
    return os.environ | NEW | own | {name: str(value) for name, value in more.items()}


def begun(program, *words, cwd, said, prepared="", **environment):
    """Start a program, offline, with data and a cache in `cwd`; said: the files of its two outputs.

    program: a script of this project or any, `whitenedcse`, `torchrun`, or "-c" with code as the first word.

    prepared: module:function, which the new process calls before; not of a module that imports encoders.
    """
    file = str(ROOT / program)
    command = [file if file.endswith(".py") else program, *map(str, words)]
    environment = surroundings(cwd, environment)
    process = Program(target=program_of, args=(command, str(cwd), environment, [*map(str, said)], prepared))
    with mock.patch.dict(os.environ, PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}"):  # of the server, at the first
        process.start()
    return process


def started(program, *words, cwd, seconds=300, **more):
    """Run a program to its end, as `begun` starts it."""
    with tempfile.TemporaryDirectory() as folder:
        said = [Path(folder) / name for name in ("stdout", "stderr")]
        process = begun(program, *words, cwd=cwd, said=said, **more)
        try:
            process.wait(seconds)
        finally:
            process.kill()
        return Done(process.wait(), *(file.read_text() for file in said))


def started_anew(*command, cwd, seconds=300, **environment):
    """Run any command to its end with the environment of `started`, in a new process."""
    given = {"env": surroundings(cwd, environment), "cwd": cwd, "timeout": seconds}
    return subprocess.run([*map(str, command)], **given, capture_output=True, text=True)


def program_of(command, cwd, environment, said, prepared):
    """In the new process: run a program with this directory, environment and outputs."""
    import gc

    import huggingface_hub

    for number, file in enumerate(said, 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    huggingface_hub.constants.HF_HUB_OFFLINE = environment["HF_HUB_OFFLINE"] == "1"
    gc.unfreeze = lambda: None  # by which a run would make the server's objects its own again
    sys.argv = command
    sys.path[0:0] = [str(ROOT), *environment.get("PYTHONPATH", "").split(":")]
    if prepared:
        module, _, name = prepared.partition(":")
        getattr(importlib.import_module(module), name)()
    try:
        sys.exit(PROGRAMS.get(command[0], script)(command))
    except SystemExit:
        raise
    except BaseException:  # as an interpreter says it, not as multiprocessing does
        sys.excepthook(*sys.exc_info())
        sys.exit(1)


def script(command):
    runpy.run_path(command[0], run_name="__main__")


def whitenedcse(command):
    from whitenedcse.app.cli import main

    return main(command[1:])


def torchrun(command):
    from torch.distributed import run

    run.main(command[1:])


def code(command):
    sys.argv = ["-c", *command[2:]]
    exec(command[1], {"__name__": "__main__"})


PROGRAMS = {"whitenedcse": whitenedcse, "torchrun": torchrun, "-c": code}


def ranks(agent):
    """The process ids of the ranks that a process of this id has started, in their order."""
    found = {}
    for threads in Path(f"/proc/{agent}/task").glob("*/children"):
        for pid in threads.read_text().split():
            with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
                words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                found |= {int(word[5:]): int(pid) for word in words if word.startswith(b"RANK=")}
    return [found[rank] for rank in sorted(found)]


def free_port():
    """The number of a free port of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def alive(pid):
    """Whether a process runs; one that has ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def until(truth, seconds=60.0):
    """Wait for it; fail if it does not come true in that time."""
    end = time.monotonic() + seconds
    while not truth():
        assert time.monotonic() < end, f"not true after {seconds} s"
        time.sleep(0.02)


def few_rows():
    """No transfer task asks for as many rows as were published or trains long; bootstrap draws are 40."""
    from whitenedcse.evaluation import classifiers, statistics
    from whitenedcse.evaluation.tasks import TRANSFER

    classifiers.ROUNDS = 2
    drawn = cache(statistics.resamples)
    statistics.resamples = lambda n, draws, seed: drawn(n, min(draws, 40), seed)

    data = Path(os.environ["WHITENEDCSE_DATA"])
    for name, task in TRANSFER.items():
        files = [data / "senteval" / part.file if part.file else data / "rte/dev.tsv" for part in task.parts]
        counts = [len(file.read_bytes().splitlines()) - task.header for file in files]
        parts = [part._replace(rows=n) for part, n in zip(task.parts, counts, strict=True)]
        TRANSFER[name] = task._replace(parts=tuple(parts))


def few_rows_and_a_hub():
    """The same; and what comes from the hub is kept in the folder HF_HUB_CACHE."""
    import huggingface_hub

    few_rows()
    huggingface_hub.constants.HF_HUB_CACHE = os.environ["HF_HUB_CACHE"]

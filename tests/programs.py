"""train.py, evaluate.py and whitenedcse as a user starts them, in processes that have imported all before.

One server imports the large packages and forks for each start, and for each rank that train.py starts; a fork
has the environment, the directory and the output of a program of its own. What happens while Python starts is
tried in new interpreters: tests/test_threads.py, test_wheel.py, test_resume.py and test_ranks.py.
"""

import atexit
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PRELOADED = ["lightning", "datasets", "sklearn.linear_model", "scipy.stats", "torch._dynamo"]
PRELOADED += [f"transformers.models.{name}.modeling_{name}" for name in ("bert", "roberta")]
PRELOADED += [f"whitenedcse.{name}" for name in ("app.cli", "training.dashboard", "report.plots")]
PRELOADED += [f"whitenedcse.training.{name}" for name in ("module", "trainer", "loggers", "monitor")]
PRELOADED += [f"whitenedcse.evaluation.{name}" for name in ("suite", "classifiers")]
PRELOADED += ["programs"]
NEW = {"HYDRA_FULL_ERROR": "0", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "WANDB_API_KEY": ""}


class Done(NamedTuple):
    """How a program ended: its exit code, and what it wrote."""

    returncode: int
    stdout: str
    stderr: str


@cache
def server():
    """What starts processes by forking one that has the packages."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def started(program, *words, cwd, prepared=None, seconds=300, **environment):
    """Run a script of this project or `whitenedcse` to its end, offline, with data and a cache in `cwd`.

    prepared: a function that the new process calls before.
    """
    own = {"WHITENEDCSE_CACHE": str(cwd / "cache"), "WHITENEDCSE_DATA": str(cwd / "data")}
    with tempfile.TemporaryDirectory() as folder:
        files = [str(Path(folder) / name) for name in ("stdout", "stderr")]
        command = [program if program == "whitenedcse" else str(ROOT / program), *map(str, words)]
        process = server().Process(
            target=ran, args=(command, str(cwd), NEW | own | environment, files, prepared)
        )
        process.start()
        process.join(seconds)
        process.kill()
        process.join()
        return Done(process.exitcode, *(Path(file).read_text() for file in files))


def ran(command, cwd, environment, files, prepared=None):
    """In the new process: the program itself."""
    import huggingface_hub

    for number, file in enumerate(files, 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.chdir(cwd)
    os.environ.update(environment)
    huggingface_hub.constants.HF_HUB_OFFLINE = environment["HF_HUB_OFFLINE"] == "1"
    sys.argv = command
    sys.path[0:0] = [str(ROOT), *environment.get("PYTHONPATH", "").split(":")]
    Rank.files = files
    if "WHITENEDCSE_FRONT" in environment:
        os.environ["WHITENEDCSE_FRONT"] = str(os.getppid())
    if prepared:
        prepared()
    try:
        if command[0] == "whitenedcse":
            from whitenedcse.app.cli import main

            sys.exit(main(command[1:]))
        from whitenedcse.app import ranks

        ranks.subprocess = Ranks
        runpy.run_path(command[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # which a process of multiprocessing leaves out


class Rank:
    """A rank as `subprocess.Popen` shows it; without a stream of its own it writes where the program does."""

    files = ()

    def __init__(self, command, *, env, stdout, stderr, start_new_session):
        files = [
            stream.name if stream else file for stream, file in zip((stdout, stderr), self.files, strict=True)
        ]
        self.process = server().Process(target=ran, args=(command[1:], os.getcwd(), dict(env), files))
        self.process.start()
        self.pid = self.process.pid

    @property
    def returncode(self):
        return self.process.exitcode

    def poll(self):
        return self.process.exitcode

    def send_signal(self, number):
        if self.process.exitcode is None:
            os.kill(self.pid, number)

    def kill(self):
        self.process.kill()

    def wait(self, timeout=None):
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired("a rank", timeout)
        return self.process.exitcode


class Ranks:
    """The part of the module subprocess that starts ranks."""

    Popen, TimeoutExpired = Rank, subprocess.TimeoutExpired

"""Programs of this project as a user starts them, in processes that have imported all before.

One server imports the large packages and forks for each start, and for each rank that one starts; a fork
has the environment, the directory and the output of a program of its own. What happens while Python starts is
tried in new interpreters: tests/test_threads.py, test_wheel.py and test_place.py.
"""

import atexit
import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
IMPORTED = ["lightning", "datasets", "sklearn.linear_model", "scipy.stats", "torch._dynamo"]
IMPORTED += [f"transformers.models.{name}.modeling_{name}" for name in ("bert", "roberta")]
IMPORTED += [
    f"whitenedcse.{name}" for name in ("app.cli", "app.train", "training.dashboard", "report.figures")
]
IMPORTED += [
    f"whitenedcse.training.{name}" for name in ("module", "trainer", "loggers", "monitor", "dashboard")
]
IMPORTED += [f"whitenedcse.evaluation.{name}" for name in ("suite", "classifiers")]
NEW = {"HYDRA_FULL_ERROR": "0", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "WANDB_API_KEY": ""}


class Done(NamedTuple):
    """How a program ended: its exit code, and what it wrote."""

    returncode: int
    stdout: str
    stderr: str


def surroundings(cwd, more):
    """The environment of a program: offline, with data and a cache in `cwd`, and `more`."""
    own = {"WHITENEDCSE_CACHE": str(cwd / "cache"), "WHITENEDCSE_DATA": str(cwd / "data")}
    return os.environ | NEW | own | more


def started(program, *words, cwd, prepared="", seconds=300, **environment):
    """Run a program to its end, offline, with data and a cache in `cwd`.

    program: a script of this project or any, `whitenedcse`, `torchrun`, or "-c" with code as the first word.

    prepared: module:function, which the new process calls before; not of a module that imports encoders.
    """
    with tempfile.TemporaryDirectory() as folder:
        files = [str(Path(folder) / name) for name in ("stdout", "stderr")]
        file = str(ROOT / program)
        command = [file if file.endswith(".py") else program, *map(str, words)]
        process = Forked(server(), command, str(cwd), surroundings(cwd, environment), files, prepared)
        try:
            process.wait(seconds)
        finally:
            process.kill()
        return Done(process.wait(), *(Path(file).read_text() for file in files))


def started_anew(*command, cwd, seconds=300, **environment):
    """Run any command to its end with the environment of `started`, in a new process."""
    given = {"env": surroundings(cwd, environment), "cwd": cwd, "timeout": seconds}
    return subprocess.run([*map(str, command)], **given, capture_output=True, text=True)


class Forked:
    """A process of the server's, with the methods of `subprocess.Popen`."""

    def __init__(self, address, *request):
        self.returncode, self.connection = None, socket.socket(socket.AF_UNIX)
        self.connection.connect(address)
        self.answers = self.connection.makefile("rw")
        self.answers.write(json.dumps([address, *request]) + "\n")
        self.answers.flush()
        self.pid = int(self.answers.readline())

    def poll(self):
        return self.wait(0)

    def wait(self, timeout=None):
        if self.returncode is None:
            if not select.select([self.connection], [], [], timeout)[0]:
                if timeout:
                    raise subprocess.TimeoutExpired("a program", timeout)
                return None
            self.returncode = int(self.answers.readline())
            self.answers.close()
            self.connection.close()
        return self.returncode

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)


@cache
def server():
    """The address of the server that all workers of pytest share, or of one that ends with this process."""
    address = os.environ.get("PROGRAMS_SERVER") or begun()
    end = time.monotonic() + 600
    while not Path(address).exists():
        assert time.monotonic() < end, "the server did not start"
        time.sleep(0.05)
    return address


def begun():
    """The address at which a server that ends with this process will listen in seconds."""
    address = str(Path(tempfile.mkdtemp(prefix="programs-")) / "socket")
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL}
    process = subprocess.Popen([sys.executable, __file__, address], **streams, env=environment)
    atexit.register(process.communicate)  # it ends when its standard input is closed
    return address


def serve(address):
    """Fork for each request, until the standard input is closed."""
    for name in IMPORTED:
        importlib.import_module(name)
    prepare()
    ended, signals = os.pipe()
    os.set_blocking(signals, False)
    signal.set_wakeup_fd(signals)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # wakes the loop
    connections = {}  # to who waits for a program, by its process id
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"{address}.new")
        listening.listen()
        os.rename(f"{address}.new", address)
        while sys.stdin not in (ready := select.select([listening, sys.stdin, ended], [], [])[0]):
            if ended in ready:
                os.read(ended, 1 << 16)
                tell(connections)
            if listening in ready:
                connection, _ = listening.accept()
                if not (number := os.fork()):
                    program(connection, [listening, *connections.values()])
                connections[number] = connection
                connection.sendall(f"{number}\n".encode())


def tell(connections):
    """Tell who waits for programs that have ended their exit codes."""
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            with connections.pop(ended[0]) as connection, suppress(OSError):
                connection.sendall(f"{os.waitstatus_to_exitcode(ended[1])}\n".encode())


def prepare():
    """Have done before the first fork what can be."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    get_checkpoint_conversion_mapping("bert")
    gc.set_threshold(50_000, 50, 50)  # as in conftest
    gc.collect()
    gc.freeze()  # else each collection of a program would copy these pages


def program(connection, others):
    """In the new process: run what is asked for, and end."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for one in others:
        one.close()
    with connection, connection.makefile() as asked:
        request = json.loads(asked.readline())
    code = 1
    try:
        ran(*request)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def ran(address, command, cwd, environment, files, prepared=""):
    """Run a program with the directory, the environment and the files that are asked for."""
    import huggingface_hub

    for number, file in enumerate(files, 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    huggingface_hub.constants.HF_HUB_OFFLINE = environment["HF_HUB_OFFLINE"] == "1"
    gc.unfreeze = lambda: None  # by which a run would make the server's objects its own again
    sys.argv = command
    sys.path[0:0] = [str(ROOT), *environment.get("PYTHONPATH", "").split(":")]
    placed(environment)
    if prepared:
        module, _, name = prepared.partition(":")
        getattr(importlib.import_module(module), name)()
    PROGRAMS.get(command[0], script)(command, forking(address))


def placed(environment):
    """Give this process the session and the network that its environment tells of."""
    if "TORCHELASTIC_RUN_ID" in environment:  # a rank: of torchrun, or of train.py
        os.setsid()
    if namespace := environment.get("NETWORK"):
        ctypes.CDLL(None).setns(os.open(f"/var/run/netns/{namespace}", os.O_RDONLY), 0)


def script(command, forks):
    agent_of(forks)
    runpy.run_path(command[0], run_name="__main__")


def whitenedcse(command, forks):
    from whitenedcse.app.cli import main

    sys.exit(main(command[1:]))


def torchrun(command, forks):
    from torch.distributed import run

    agent_of(forks)
    run.main(command[1:])


def agent_of(forks):
    """Have torchrun's agent in this process start each rank as a fork."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    subprocess_handler.Popen = forks.Popen


def code(command, forks):
    agent_of(forks)
    sys.argv = ["-c", *command[2:]]
    exec(command[1], {"__name__": "__main__"})


PROGRAMS = {"whitenedcse": whitenedcse, "torchrun": torchrun, "-c": code}


def forking(address):
    """Stands for `subprocess` in torchrun's agent: each rank is a fork of the server's.

    In the file that RANKS names, where it does, each process id follows the last.
    """

    def rank(args, *, env, stdout, stderr, start_new_session):
        words = [word for word in args[1:] if word != "-u"]
        command = ["whitenedcse", *words[2:]] if words[:2] == ["-m", "whitenedcse.app.cli"] else words
        ours = [os.readlink(f"/proc/self/fd/{number}") for number in (1, 2)]
        own = [stream.name if stream else file for stream, file in zip((stdout, stderr), ours, strict=True)]
        process = Forked(address, command, os.getcwd(), NEW | dict(env), own)
        if "RANKS" in env:
            with open(env["RANKS"], "a") as ids:
                ids.write(f"{process.pid}\n")
        return process

    return SimpleNamespace(Popen=rank, TimeoutExpired=subprocess.TimeoutExpired)


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


if __name__ == "__main__":
    serve(sys.argv[1])

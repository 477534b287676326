"""Several processes for one job: the rank of this one, and starting and watching them without torchrun."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from whitenedcse import distributed
from whitenedcse.distributed import ASKING, GRACE, LIMIT, STOPPED, UNANSWERED, Place, free_port, placed

PATIENCE = 60.0  # the same when all were asked to stop by SIGUSR1
running: list[subprocess.Popen[bytes]] = []  # the ranks that this process has started


def let_others_speak() -> None:
    """Wait, in a rank that failed, so that the rank that failed first is the one reported."""
    if placed() is not None:
        time.sleep(2 * GRACE)


@contextmanager
def ending_when_asked() -> Iterator[None]:
    """A context in which Ctrl-C or SIGTERM ends this process and its ranks within 10 s.

    A second Ctrl-C ends them at once. Python handles a signal when the main thread is back from a library,
    which may itself wait for a rank that never answers; a thread of its own therefore reads the number of the
    signal too. A rank that `run` started leaves this to the process in front.
    """
    if "WHITENEDCSE_FRONT" in os.environ or threading.current_thread() is not threading.main_thread():
        yield
        return
    heard, told = socket.socketpair()
    told.setblocking(False)
    before = signal.set_wakeup_fd(told.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=end_in_time, args=[heard], daemon=True).start()
    usual = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    hook, sys.unraisablehook = sys.unraisablehook, partial(unraised, sys.unraisablehook)
    try:
        yield
    except BaseException:
        for child in multiprocessing.active_children():
            child.kill()  # the end of Python would wait for one that is stopped
        raise
    finally:
        signal.signal(signal.SIGTERM, usual)
        sys.unraisablehook = hook
        signal.set_wakeup_fd(before)
        told.close()


def unraised(usual: Callable[[Any], Any], swallowed: Any) -> None:
    """Ask this process to end once more where a finalizer dropped the exception that a signal raised."""
    if isinstance(swallowed.exc_value, SystemExit | KeyboardInterrupt):
        threading.Timer(0.1, os.kill, [os.getpid(), signal.SIGTERM]).start()
    else:
        usual(swallowed)


def end_in_time(heard: socket.socket) -> None:
    """Read the numbers of signals until there are no more, and end this process in time after the first."""
    asked = 0
    with heard:
        try:
            while data := heard.recv(1):
                if asked == data[0] == signal.SIGINT:
                    break
                if data[0] in (signal.SIGINT, signal.SIGTERM) and not asked:
                    asked = data[0]
                    heard.settimeout(LIMIT)
            else:
                return
        except TimeoutError:
            sys.stderr.write(late(signal.Signals(asked).name))
            sys.stderr.flush()
    for rank in running:
        rank.kill()
    os._exit(128 + asked)


def late(name: str) -> str:
    """The line for what did not end in time after a signal; "" if all ranks have ended by themselves."""
    here = [number for number, rank in enumerate(running) if rank.poll() is None]
    here = [number for number in here if is_stopped(running[number])] or here
    if running and not here:
        return ""
    alone = "this process" if placed() is None else "this process, which may wait for a lost rank,"
    who = f"rank {' and '.join(map(str, here))}" if here else alone
    return f"error: {who} did not end within {LIMIT:g} s of {name}; killed now. {distributed.resumes}\n"


def is_stopped(rank: subprocess.Popen[bytes]) -> bool:
    """Whether a process was stopped by a signal, such as SIGSTOP; False where the system cannot tell."""
    with suppress(AttributeError, ChildProcessError):
        return os.waitid(os.P_PID, rank.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
    return False


def run(command: Sequence[str], count: int, timeout: float = math.inf) -> int:
    """Run a command as `count` ranks of one job on this machine; returns the exit status of the job.

    When a rank fails, or was stopped for `timeout` seconds, the others are ended within seconds, and a line
    says which one it was. SIGTERM, SIGINT and SIGUSR1 are passed on to all. Ranks other than the first are
    silent unless they fail.
    """
    with tempfile.TemporaryDirectory() as folder:
        said = [Path(folder) / str(rank) for rank in range(count)]
        port = free_port()
        (job := running).clear()
        before = pass_on(ASKING, job)  # also while the ranks are being started
        try:
            job.extend(start(command, Place(rank, count, count), port, said[rank]) for rank in range(count))
            failed = first_failed(job, timeout)
            stopped = failed is not None and job[failed].returncode is None
        finally:
            end(job)
            for number, handler in before.items():
                signal.signal(number, handler)
        if failed is None:
            return 0
        if stopped:
            who = f"rank {failed} (process {job[failed].pid})"
            sys.stderr.write(
                f"error: {who} was stopped for {timeout:g} s (trainer.timeout); the job is ended. "
                f"{distributed.resumes}\n"
            )
            return UNANSWERED
        status = int(job[failed].returncode)
        if failed and not status == 2 == job[0].returncode:  # the first rank has said the same
            sys.stderr.write(said[failed].read_text())
        if status in (2, UNANSWERED, *STOPPED):  # it has said why
            return status
        how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        sys.stderr.write(
            f"error: rank {failed} (process {job[failed].pid}) {how}; the other ranks were ended too."
            f" {distributed.resumes}\n"
        )
        return status if status > 0 else 128 - status


def start(command: Sequence[str], here: Place, port: int, said: Path) -> subprocess.Popen[bytes]:
    """Start one rank, in a session of its own, so that Ctrl-C reaches it once, from `pass_on`."""
    from whitenedcse.compute import cores

    env = {
        "RANK": here.rank,
        "LOCAL_RANK": here.rank,
        "WORLD_SIZE": here.world,
        "LOCAL_WORLD_SIZE": here.on_machine,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": os.getpid(),
        "WHITENEDCSE_FRONT": os.getpid(),
        # every one of them would take all cores, and wait for the others
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", max(1, cores() // here.on_machine)),
    }
    silent = here.rank > 0
    with said.open("wb") as stream:
        return subprocess.Popen(
            command,
            env=os.environ | {name: str(value) for name, value in env.items()},
            stdout=stream if silent else None,
            stderr=stream if silent else None,
            start_new_session=True,
        )


def pass_on(signals: Sequence[signal.Signals], job: Sequence[subprocess.Popen[bytes]]) -> dict[int, Any]:
    """Send these signals on to all ranks when they arrive; returns what handled them before."""
    if threading.current_thread() is not threading.main_thread():
        return {}

    def hear(number: int, _: Any) -> None:
        if not job:  # none is started yet
            sys.exit(128 + number)
        for rank in job:
            rank.send_signal(number)

    return {number: signal.signal(number, hear) for number in signals}


def first_failed(job: Sequence[subprocess.Popen[bytes]], timeout: float) -> int | None:
    """The number of the first rank that fails or stays stopped; None once all have ended successfully."""
    awake = [time.monotonic()] * len(job)  # when each rank was last seen not to be stopped
    while True:
        statuses = [rank.poll() for rank in job]
        if any(statuses):
            return list(map(bool, statuses)).index(True)
        if None not in statuses:
            return None
        now = time.monotonic()
        awake = [at if is_stopped(rank) else now for rank, at in zip(job, awake, strict=True)]
        if now - min(awake) > timeout:
            return awake.index(min(awake))
        time.sleep(0.1)


def end(job: Sequence[subprocess.Popen[bytes]]) -> None:
    """Wait a little for the remaining ranks, and kill those that still run."""
    statuses = {rank.poll() for rank in job}
    waiting = 0.0 if UNANSWERED in statuses else PATIENCE if statuses & STOPPED else GRACE
    until = time.monotonic() + waiting
    for rank in job:
        try:
            rank.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            rank.kill()
            rank.wait()

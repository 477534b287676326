"""Token ids from several processes at once, the same as from one.

Each is an interpreter of its own that imports NumPy and `tokenizers` alone, so a script needs no guard around
its main part and no thread or device of this process is copied. It ends when its input does: with this
process, however that ends.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from queue import SimpleQueue
from subprocess import PIPE, Popen

from whitenedcse.data.words import Ids, Words

Worker = Popen[bytes]
START = """import signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that began this one
sys.path[:] = sys.argv[1:]
from whitenedcse.data.workers import work
work()"""


def ids_of_several(
    known: Words, processes: int, batch: Callable[[int], Sequence[str]], starts: Sequence[int]
) -> Iterator[Ids]:
    """The ids of each batch in turn, which so many processes work out, each with a memory of its own.

    Raises OSError if one of them ends before its work does, and what it met otherwise.
    """
    with ThreadPoolExecutor(processes) as threads, crew(known, processes) as idle:

        def ids(start: int) -> Ids:
            worker = idle.get()
            try:
                return asked(worker, batch(start))
            finally:
                idle.put(worker)

        yield from threads.map(ids, starts)


@contextmanager
def crew(known: Words, processes: int) -> Iterator[SimpleQueue[Worker]]:
    """So many processes with an empty memory, which end with this context."""
    command = [sys.executable, "-c", START, *sys.path]
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false"}  # the others have the other cores
    with ExitStack() as stack:
        workers = []
        for _ in range(processes):
            workers.append(Popen(command, stdin=PIPE, stdout=PIPE, env=environment))
            stack.callback(end, workers[-1])
        idle = SimpleQueue[Worker]()
        for worker in workers:  # all of which are starting by now
            told(worker, known)
            idle.put(worker)
        yield idle


def asked(worker: Worker, sentences: Sequence[str]) -> Ids:
    """The ids of sentences by one process."""
    told(worker, sentences)
    assert worker.stdout
    try:
        reply = pickle.load(worker.stdout)
    except (OSError, EOFError, pickle.UnpicklingError) as error:
        raise lost(worker) from error
    if isinstance(reply, Exception):
        raise reply
    return reply


def told(worker: Worker, message: object) -> None:
    """Send something to a process."""
    assert worker.stdin
    try:
        pickle.dump(message, worker.stdin)
        worker.stdin.flush()
    except OSError as error:
        raise lost(worker) from error


def lost(worker: Worker) -> OSError:
    """What is said of a process that is no longer there."""
    worker.kill()
    status = worker.wait()
    how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
    return OSError(f"a process that tokenises {how}; start again, with OMP_NUM_THREADS=1 to do without it")


def end(worker: Worker) -> None:
    """End a process, which has nothing to keep."""
    worker.kill()
    with suppress(OSError), worker:  # closes its pipes and waits for it
        pass


def work() -> None:
    """What such a process does: ids for sentences, until its input ends."""
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    with suppress(EOFError, BrokenPipeError, pickle.UnpicklingError):
        known: Words = pickle.load(source)
        while True:
            sentences = pickle.load(source)
            reply: Ids | Exception
            try:
                reply = known.ids_of(sentences)
            except Exception as error:
                reply = error
            pickle.dump(reply, sink)
            sink.flush()
    os._exit(0)  # the standard output may be gone, which a usual end complains of

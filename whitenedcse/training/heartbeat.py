"""Which rank of a job no longer answers, told by messages between the ranks beside their collectives.

A collective waits for all ranks, and a process that waits in one cannot say for which. A thread of each rank
therefore sends the others, by UDP, how many collectives it has reached. A rank that is stopped sends nothing,
and one that is stuck sends a smaller number than those that wait for it. It acts in the same way under gloo
and NCCL, whose own timeouts stay behind it as the last resort.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from lightning import Callback, LightningModule, Trainer

from whitenedcse.app.ranks import GRACE, RESUMES, UNANSWERED, placed
from whitenedcse.training import parallel

MARGIN = 10.0  # seconds, or half of the timeout if that is less: the job is ended before collectives time out
BEAT = struct.Struct("!16sIQ")  # the key of the job, a rank, and the collectives it has reached
Address = tuple[str, int]


class Ledger:
    """What one rank knows of the others: when each was heard last, and the number that it sent.

    seconds: after which a rank is missing. The clock is that of this rank's turns, none of which counts for
    more than a fifth of `seconds`: a rank that was itself stopped, or waited for a core, blames no other.
    """

    def __init__(self, rank: int, world: int, seconds: float, now: float) -> None:
        others = [other for other in range(world) if other != rank]
        self.seconds, self.seen, self.clock, self.since, self.mine = seconds, now, 0.0, 0.0, 0
        self.heard, self.counts = dict.fromkeys(others, 0.0), dict.fromkeys(others, 0)

    def hear(self, rank: int, count: int) -> None:
        """Note a message."""
        if rank in self.heard:
            self.heard[rank], self.counts[rank] = self.clock, max(count, self.counts[rank])

    def missing(self, mine: int, now: float) -> list[int]:
        """The ranks that were not heard for so long, or else those for which this one has waited so long.

        mine: the collectives that this rank has reached. now: the time of this turn.
        """
        self.clock += min(now - self.seen, self.seconds / 5)
        self.seen = now
        if mine != self.mine:
            self.mine, self.since = mine, self.clock
        if silent := [rank for rank, at in self.heard.items() if self.clock - at > self.seconds]:
            return silent
        least = min(self.counts.values())
        behind = [rank for rank, count in self.counts.items() if count == least]
        return behind if least < mine and self.clock - self.since > self.seconds else []


class Heartbeat(Callback):
    """The thread of one rank that sends and hears messages, and ends the process when a rank is missing.

    seconds: `trainer.timeout`. The first of the ranks that answer says which do not, in one line.
    """

    thread: threading.Thread | None = None

    def __init__(self, seconds: float) -> None:
        self.seconds, self.limit = seconds, max(seconds - MARGIN, seconds / 2)
        self.ended = threading.Event()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Begin, if there are several ranks."""
        rank, world = parallel.place()
        if world == 1:
            return
        here = placed()
        host = "127.0.0.1" if here is None or here.on_machine == here.world else own_address()
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.bind(("127.0.0.1" if host == "127.0.0.1" else "", 0))
        address = (host, self.socket.getsockname()[1])
        addresses, keys = zip(*parallel.everyones((address, os.urandom(16))), strict=True)
        self.thread = threading.Thread(target=self.beat, args=(rank, addresses, keys[0]), daemon=True)
        self.thread.start()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End, after the last collective."""
        if self.thread is not None:
            self.ended.set()
            self.thread.join()
            self.socket.close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave the other ranks to what ends this process."""
        self.on_fit_end(trainer, pl_module)

    def beat(self, rank: int, addresses: Sequence[Address], key: bytes) -> None:
        """Send and hear messages until training ends.

        addresses: of all ranks in their order. key: 16 bytes that tell this job from others.
        """
        ledger = Ledger(rank, len(addresses), self.limit, time.monotonic())
        period = min(1.0, self.limit / 10)
        while not self.ended.is_set():
            for other, address in enumerate(addresses):
                if other != rank:
                    self.send(BEAT.pack(key, rank, parallel.entered), address)
            self.listen(ledger, key, time.monotonic() + period)
            if missing := ledger.missing(parallel.entered, time.monotonic()):
                self.give_up(rank, missing, len(addresses))

    def send(self, message: bytes, address: Address) -> None:
        """Send one message, if the network takes it now; the next one follows soon."""
        with suppress(OSError):  # for a moment unreachable
            self.socket.sendto(message, address)

    def listen(self, ledger: Ledger, key: bytes, until: float) -> None:
        """Note the messages of this job until a time, and those that wait by then."""
        while True:
            self.socket.settimeout(max(until - time.monotonic(), 1e-4))
            try:
                message = self.socket.recv(BEAT.size + 1)
            except TimeoutError:
                return
            except OSError:  # of a message that reached nobody
                continue
            if len(message) == BEAT.size and message[:16] == key:
                _, rank, count = BEAT.unpack(message)
                ledger.hear(rank, count)

    def give_up(self, rank: int, missing: list[int], world: int) -> None:
        """End this process, whatever it waits for, and thereby the job; the first rank left says why."""
        if rank == min(set(range(world)) - set(missing)):
            who = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
            sys.stderr.write(
                f"error: {who} did not answer for {self.limit:g} s (trainer.timeout={self.seconds:g}):"
                f" stopped, lost or stuck; the job is ended. {RESUMES}\n"
            )
            sys.stderr.flush()
        else:
            time.sleep(2 * GRACE)
        os._exit(UNANSWERED)


def own_address() -> str:
    """The address of this machine in the network of the first rank."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))  # sends nothing
        return str(probe.getsockname()[0])

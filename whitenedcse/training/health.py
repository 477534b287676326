"""What goes wrong while training: a rank that no longer answers, and a space that collapses.

Ranks send each other messages beside their collectives. A collective waits for all ranks, and a process that
waits in one cannot say for which. A thread of each rank therefore sends the others, by UDP, how many
collectives it has reached. A rank that is stopped sends nothing, and one that is stuck sends a smaller
number than those that wait for it. It acts in the same way under gloo and NCCL, whose own timeouts stay
behind it as the last resort.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from lightning import Callback, LightningModule, Trainer

from whitenedcse import distributed
from whitenedcse.distributed import GRACE, UNANSWERED, placed
from whitenedcse.training import parallel
from whitenedcse.training.monitor import METRIC, Monitor, Row

log = logging.getLogger(__name__)
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
                f" stopped, lost or stuck; the job is ended. {distributed.resumes}\n"
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


RANK, UNIFORMITY = "dev/effective_rank", "dev/uniformity"
VANISHED = 0.01  # of the loss of a guess: nothing left to learn. Good runs get there too, so dev must fall
FALLEN = 5.0  # points of dev/spearman below its best: good runs go up and down by 1 to 3
SHRUNK = 0.5  # of the effective rank before training: good quick starts keep 0.65, collapsed ones below
NEAR = 0.01  # of the uniformity before training, which nears 0 as all vectors near one; good runs lower it


class Health(Callback):
    """Warns of a collapse, with a line for each of three kinds, once in a run, from values logged anyway.

    It follows `monitor` among the callbacks, and examines its last two evaluations after each new one.
    "memorising": dev/spearman fell, and the loss of the batch has vanished. "collapse": dev/spearman fell, or
    never reached its value before training, and the dev sentences fill less than half of the axes that they
    filled then. "shrinking": they are a hundred times nearer to each other than then, even if they are
    ranked well. A loss that is not finite ends the run: training/trainer.py.
    """

    def __init__(self, monitor: Monitor, say: Callable[[str], None]) -> None:
        self.monitor, self.say = monitor, say
        self.said: list[str] = []
        self.seen = 0  # the step of the evaluation that was looked at last
        self.guess = 0.0  # the loss of guessing

    def state_dict(self) -> dict[str, Any]:
        """The last step examined and the kinds of warnings given, for a run that resumes."""
        return {"said": self.said, "seen": self.seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the state of a checkpoint."""
        self.said, self.seen = state_dict["said"], state_dict["seen"]

    def on_train_batch_end(  # noqa: PLR0913  Lightning's signature
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Examine the evaluations, if this step was evaluated."""
        self.guess = math.log(batch.n * trainer.world_size)
        self.look(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Examine the last evaluation."""
        self.look(trainer)

    def look(self, trainer: Trainer) -> None:
        """Warn of what was not warned of before, if there is a new evaluation; only then read the loss."""
        step = self.monitor.rows[-1].step
        if step == self.seen:
            return
        self.seen = step
        metrics = trainer.callback_metrics
        loss = metrics.get("train/contrastive", metrics.get("train/loss"))
        for kind, text in alarms(self.monitor.rows, math.inf if loss is None else float(loss), self.guess):
            if kind not in self.said:
                self.said = [*self.said, kind]
                self.say(f"warning: step {step}: {text}")
                if log.hasHandlers():  # of train.log; without any, logging would print it again
                    log.warning("step %d: %s", step, text)


def alarms(rows: list[Row], loss: float, guess: float) -> Iterator[tuple[str, str]]:
    """The warnings that evaluations give rise to, each as its kind and its text.

    rows: evaluations, the one before training first. loss: of the last batch. guess: the loss of guessing.
    """
    before, last = rows[0], rows[1:][-2:]
    if len(last) < 2:
        return
    best = max(rows, key=score)
    fall = min(score(best) - score(row) for row in last)
    seen = f"{METRIC} fell from {score(best):.1f} (step {best.step}) to {score(last[-1]):.1f}"
    if fall > FALLEN and loss < VANISHED * guess:
        yield (
            "memorising",
            f"{seen} while train/loss vanished ({loss:.2g}; chance gives {guess:.2f}): what tells the "
            "sentences of a batch apart is not their meaning. Try a lower optim.lr, a higher "
            "loss.temperature, data.passes above 1, or sentences nearer to those of the dev set",
        )
    known = [row.values.get(RANK) or 0.0 for row in (before, *last)]
    if fall > (FALLEN if best.step else 0) and max(known[1:]) < SHRUNK * known[0]:
        yield (
            "collapse",
            f"{seen} and {RANK} from {known[0]:.1f} (step 0) to {known[-1]:.1f}: the space collapses. "
            "Try a lower optim.lr, a higher loss.temperature or, if pooling is cls, pooling=mean",
        )

    near = [row.values.get(UNIFORMITY) or 0.0 for row in (before, *last)]
    if min(near[1:]) > NEAR * near[0]:
        yield (
            "shrinking",
            f"{UNIFORMITY} went from {near[0]:.2g} (step 0) to {near[-1]:.2g}: all vectors near one. "
            "Try a lower optim.lr; a loss without negatives needs whitening last (head.position=after)",
        )


def score(row: Row) -> float:
    """The dev/spearman of an evaluation; minus infinity where it is undefined."""
    value = row.values.get(METRIC)
    return -math.inf if value is None else value

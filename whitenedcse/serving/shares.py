"""The blocks of a job, shared by ranks that see one folder: which of them does which, and what comes of each.

Files alone connect the ranks, so they may be processes of one machine or of several that share a disk. Rank
0 empties the folder and begins. Every other one writes a file with an id that it has just drawn. When all are
there, the plan names the ids and the blocks, so that no rank takes the files of an earlier start for those of
this one. Rank r of w does each w-th block from the r-th on, then those that no other has begun, so that all
end together; a file claims each block. It writes what comes of a block, and rank 0 reads and removes that.
While a rank lives it touches its file each second.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from whitenedcse.files import read_json, write_json, writing

Work = Callable[[int], bytes]  # from the number of a block to what comes of it
Fold = Callable[[Mapping[int, bytes]], None]  # takes what came of some blocks, in any order
PLAN = "plan.json"
BEAT = 1.0  # seconds between two signs of life
POLL = 0.1  # seconds between two looks into the folder
PATIENCE = 120.0  # seconds without a sign of life: a network's disk may show it 60 s late
LATE = 10.0  # seconds that a first rank which failed at once waits for others to tell them
READY, ENDED = "ready", "ended"
AGAIN = "start the same command again"


def results(folder: Path) -> dict[int, bytes]:
    """What has come of blocks and is still in the folder, by their numbers; {} where there is no folder."""
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    numbers = [int(name.removeprefix("block-")) for name in names if re.fullmatch(r"block-\d+", name)]
    return {number: (folder / f"block-{number}").read_bytes() for number in numbers}


class Rank:
    """One of several ranks: a context in which its file in the folder says that it lives."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.rank, self.id = folder, rank, secrets.token_hex(8)
        self._over, self._thread = threading.Event(), threading.Thread(target=self._live, daemon=True)
        self._seen: dict[int, tuple[int, float]] = {}  # of a rank: its last sign of life, and when it was new

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: TracebackType | None) -> None:
        self._over.set()
        self._thread.join()

    def file(self, rank: int) -> Path:
        """The file of a rank."""
        return self.folder / f"rank-{rank}.json"

    def say(self, state: str) -> None:
        """Write this rank's file; state: READY, ENDED, or why it failed."""
        write_json(self.file(self.rank), {"id": self.id, "state": state})

    def refuse_silent(self, rank: int) -> None:
        """Raise OSError if a rank was not seen to live for PATIENCE seconds, by the clock of this process."""
        sign, now = 0, time.monotonic()
        with suppress(OSError):
            sign = self.file(rank).stat().st_mtime_ns
        before, since = self._seen.setdefault(rank, (sign, now))
        if sign != before:
            self._seen[rank] = sign, now
        elif now - since > PATIENCE:
            raise OSError(f"rank {rank} gave no sign of life for {PATIENCE:g} s; {AGAIN}")

    def _claimed(self, numbers: Sequence[int], world: int, lead: str) -> Iterator[int]:
        """The blocks that this rank is the first to claim, its own before others', each as it is asked for.

        lead: the id of rank 0, by which claims of an earlier start are told from those of this one.
        """
        own = numbers[self.rank :: world]
        yield from (number for number in own if self._claim(number, lead))
        there = {path.name for path in self.folder.glob(f"claim-{lead}-*")}
        left = [number for number in reversed(numbers) if f"claim-{lead}-{number}" not in there]
        yield from (number for number in left if self._claim(number, lead))

    def _claim(self, number: int, lead: str) -> bool:
        try:
            (self.folder / f"claim-{lead}-{number}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def _live(self) -> None:
        while True:
            with suppress(OSError):  # there is no folder before rank 0 makes it, and it empties the folder
                self._show()
            if self._over.wait(self.beat):
                return

    def _show(self) -> None:
        if self.file(self.rank).exists():
            os.utime(self.file(self.rank))
        else:
            self.say(READY)

    @property
    def beat(self) -> float:
        """Seconds until the next sign of life."""
        return BEAT


class Lead(Rank):
    """Rank 0 of `world`, which plans, does its share, and folds what comes of all blocks.

    watch: is called while it waits; raises OSError for a rank that is known to have died. A world of one
    writes nothing, and removes the folder that an earlier start left.
    """

    def __init__(self, folder: Path, world: int) -> None:
        super().__init__(folder, 0)
        self.others, self.left = range(1, world), set[int]()
        self.coming: list[int] | None = None  # the blocks, until the plan has them
        self.watch: Callable[[], None] = lambda: None

    def __enter__(self) -> Self:
        shutil.rmtree(self.folder, ignore_errors=True)
        if self.others:
            self.folder.mkdir(exist_ok=True)
            super().__enter__()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: TracebackType | None) -> None:
        if not self.others:
            return
        super().__exit__(kind, error, trace)
        if error is None:
            shutil.rmtree(self.folder, ignore_errors=True)
        elif not (self.folder / PLAN).exists():
            with suppress(OSError):
                if isinstance(error, Exception):  # no signal
                    self._await_late()
                self._plan(failed=str(error) or type(error).__name__)

    def do(self, numbers: Sequence[int], work: Work, fold: Fold) -> None:
        """Have all ranks do these blocks; returns when all are folded and each rank has ended.

        Raises OSError if a rank fails, dies or does not come.
        """
        self.left, self.coming = set(numbers), list(numbers)
        claimed = self._claimed(numbers, 1 + len(self.others), self.id) if self.others else numbers
        for number in claimed:
            self._fold({number: work(number)}, fold)
            self._gather(fold)
        while self.left or any(self._read(rank).get("state") != ENDED for rank in self.others):
            self._gather(fold)
            self._wait()

    def _show(self) -> None:
        super()._show()
        if self.coming is not None and all(self._read(rank) for rank in self.others):
            self._plan(numbers=self.coming)
            self.coming = None

    @property
    def beat(self) -> float:
        """Seconds until the next sign of life, few while other ranks are awaited."""
        return BEAT if self.coming is None else POLL

    def _fold(self, come: Mapping[int, bytes], fold: Fold) -> None:
        fold(come)
        self.left -= set(come)

    def _read(self, rank: int) -> dict[str, str]:
        """What a rank has said; nothing yet."""
        with suppress(FileNotFoundError):
            return dict(read_json(self.file(rank)))
        return {}

    def _await_late(self) -> None:
        """Wait until all ranks have come, for LATE seconds: a plan is read by those alone that it names."""
        until = time.monotonic() + LATE
        while time.monotonic() < until and not all(self._read(rank) for rank in self.others):
            time.sleep(POLL)

    def _plan(self, **content: Any) -> None:
        if self.others:
            ids = [self._read(rank).get("id") for rank in self.others]
            write_json(self.folder / PLAN, {"lead": self.id, "ids": ids, **content})

    def _gather(self, fold: Fold) -> None:
        """Fold what has come of blocks, and see to the other ranks."""
        if self.others and (come := results(self.folder)):
            self._fold(come, fold)
            for number in come:
                (self.folder / f"block-{number}").unlink()
        self.watch()
        for rank in self.others:
            if (state := self._read(rank).get("state", READY)) not in (READY, ENDED):
                raise OSError(f"rank {rank} failed: {state}; {AGAIN}")

    def _wait(self) -> None:
        self.watch()
        for rank in self.others:
            if self.left or self._read(rank).get("state") != ENDED:
                self.refuse_silent(rank)
        time.sleep(POLL)


class Member(Rank):
    """Another rank, which does its share of the plan."""

    def __exit__(self, kind: Any, error: BaseException | None, trace: TracebackType | None) -> None:
        super().__exit__(kind, error, trace)
        with suppress(OSError):  # where rank 0 has removed the folder
            self.say(ENDED if error is None else str(error) or type(error).__name__)

    def blocks(self, world: int) -> Iterator[int]:
        """The blocks for this rank, each claimed as it is asked for, from the time on that there is a plan.

        Waits for the plan when it is called. Raises OSError if rank 0 fails.
        """
        while (plan := self._plan()) is None:
            self.refuse_silent(0)
            time.sleep(POLL)
        if "failed" in plan:
            raise OSError(f"rank 0 failed: {plan['failed']}")
        return self._claimed(plan["numbers"], world, plan["lead"])

    def do(self, numbers: Iterable[int], work: Work) -> list[int]:
        """Do these blocks, and write what comes of each for rank 0; returns their numbers."""
        done = []
        for number in numbers:
            result = work(number)
            with writing(self.folder / f"block-{number}") as stream:
                stream.write(result)
            done.append(number)
        return done

    def _plan(self) -> Any:
        """The plan, if it names this rank."""
        with suppress(FileNotFoundError):
            plan = read_json(self.folder / PLAN)
            return plan if plan["ids"][self.rank - 1 : self.rank] == [self.id] else None
        return None

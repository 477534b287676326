"""The blocks of a corpus, of equally many rows each: where each begins, its rows, and Ray's actors for them.

A corpus is read once to find the places where its blocks begin. From then on a process opens it at a block.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from whitenedcse.console import lacking, pace, say
from whitenedcse.data.corpus import Corpus, Place, Reading, Row, files
from whitenedcse.data.files import COMPRESSIONS, filesystem
from whitenedcse.files import parsing, read_json, write_json
from whitenedcse.serving.shares import Fold, Work


@dataclass(frozen=True)
class Starts:
    """Where the blocks of a corpus begin.

    rows: of the corpus. size: rows of a block, fewer in the last. files: the bytes of each file of the
    corpus, by which it is known again; none for a hub data set. places: of the first row of each block.
    """

    rows: int
    size: int
    files: list[int]
    places: list[Place]

    def save(self, path: Path) -> None:
        """Write it as a JSON file."""
        write_json(path, asdict(self))

    @classmethod
    def load(cls, path: Path) -> Starts:
        """What `save` wrote. Raises ValueError, naming the file, for anything else."""
        content = read_json(path)
        with parsing(path, "delete it, and the same command makes it again"):
            return cls(**content | {"places": [Place(*place) for place in content["places"]]})

    def count(self, number: int) -> int:
        """The number of rows of a block."""
        return min(self.size, self.rows - number * self.size)


def counted(corpus: Corpus, size: int) -> Starts:
    """Where the blocks of `size` rows begin; all rows are read, so that a bad one is found here.

    Raises ValueError for a corpus without rows.
    """
    now, rows, places, total = sizes(corpus), Reading(corpus), list[Place](), 0
    with pace("counted") as more:
        while True:
            place = rows.place
            if not (count := sum(1 for _ in islice(rows, size))):
                break
            places.append(place)
            total += count
            more(count)
    if not total:
        raise ValueError(f"{corpus.path}: no rows to encode")
    return Starts(total, size, now, places)


def sizes(corpus: Corpus) -> list[int]:
    """The bytes of each file of a corpus."""
    found = []
    for path in files(corpus.path):
        with filesystem(path) as (system, inside):
            found.append(int(system.size(inside)))
    return found


def packed(path: str) -> bool:
    """Whether a text file is compressed: its middle is reached by unpacking all that is before."""
    return Path(path).suffix.lower() in COMPRESSIONS


def say_packed(corpus: Corpus) -> None:
    """Say that a compressed corpus is unpacked by each of several processes."""
    for path in filter(packed, files(corpus.path)[:1]):
        say(f"{path} is compressed: each process unpacks it from its beginning; plain text is read in places")


class Blocks:
    """The rows of the blocks of a corpus, each read where it begins.

    A packed text file, whose middle cannot be opened, is read on from one block to the next one that is asked
    for. Raises ValueError where the corpus is not as it was counted.
    """

    def __init__(self, corpus: Corpus, starts: Starts) -> None:
        self.corpus, self.starts, self._files = corpus, starts, files(corpus.path)
        self._reading, self._next = Reading(corpus), 0
        self.refuse_changed()

    def __len__(self) -> int:
        return len(self.starts.places)

    def __getitem__(self, number: int) -> list[Row]:
        if not self._reads_on(number):
            self._reading, self._next = Reading(self.corpus, self.starts.places[number]), number
        deque(islice(self._reading, (number - self._next) * self.starts.size), maxlen=0)
        block, self._next = list(islice(self._reading, self.starts.size)), number + 1
        if len(block) != self.starts.count(number):
            self._refuse()
        return block

    def refuse_changed(self) -> None:
        """Raise ValueError if a file of the corpus is longer or shorter than when it was counted."""
        if sizes(self.corpus) != self.starts.files:
            self._refuse()

    def _refuse(self) -> None:
        raise ValueError(f"{self.corpus.path} changed while it was read; start again in a new directory")

    def _reads_on(self, number: int) -> bool:
        """Whether a block is reached by reading on: the next one, or one that cannot be opened nearer."""
        now, then = self._reading.place, self.starts.places[number]
        front = now.file < len(self._files) and packed(self._files[now.file])
        near = now.file == then.file and (front or now.offset == then.offset)
        return number == self._next or (number > self._next and near)


class Actors:
    """A context with processes of a Ray cluster that do blocks: `whitenedcse encode --engine ray`.

    The cluster is that of RAY_ADDRESS, or one that is started on this machine. Each process calls `opened`,
    and then what it returned for one block after another. Ray starts a killed one again, and its block is
    done again. All write to one directory, so machines have to share it.

    count: None is one per GPU of the cluster, or one per machine. threads: of each, as many as the cluster
    has cores for it, at most as many as here. Raises ValueError where Ray is not installed, and OSError where
    a block fails. At a RAY_ADDRESS where nothing answers, Ray itself tries for minutes.
    """

    def __init__(self, opened: Callable[[], Work], count: int | None = None) -> None:
        try:
            import ray
        except ImportError as error:
            raise lacking("--engine ray", "ray", "ray", error) from error
        self.ray, self.opened, self.count = ray, opened, count

    def __enter__(self) -> Self:
        ray = self.ray
        self.own = not ray.is_initialized()  # else it is the caller's, and stays
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is reported to anyone
        quiet = {"include_dashboard": False, "log_to_driver": False, "configure_logging": False}
        ray.init(ignore_reinit_error=True, **quiet)
        has = ray.cluster_resources()
        gpus, cores = has.get("GPU", 0), has.get("CPU", 1)
        count = self.count or int(gpus) or len(ray.nodes())
        self.threads = max(1, min(torch.get_num_threads(), int(cores) // count))
        each = {"num_cpus": min(1, cores / count), "num_gpus": min(1, gpus / count)}  # so that all start
        again = {"max_restarts": -1, "max_task_retries": -1}
        made = ray.remote(scheduling_strategy="SPREAD", **each, **again)(Actor)
        self.actors = [made.remote(self.opened) for _ in range(count)]
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: TracebackType | None) -> None:
        for actor in self.actors:
            self.ray.kill(actor)
        if self.own:
            self.ray.shutdown()

    def do(self, numbers: Sequence[int], _: Work, fold: Fold) -> None:
        """Have the actors do these blocks, each the next one that is left. Raises OSError if one fails."""
        left, busy = iter(numbers), dict[Any, Any]()

        def give(actor: Any) -> None:
            for number in left:
                busy[actor.do.remote(number)] = number, actor
                return

        for actor in self.actors:
            give(actor)
        while busy:
            ended, _rest = self.ray.wait(list(busy))
            for task in ended:
                number, actor = busy.pop(task)
                fold({number: self._result(task)})
                give(actor)

    def _result(self, task: Any) -> bytes:
        try:
            return bytes(self.ray.get(task))
        except self.ray.exceptions.RayError as error:
            what = str(error).strip().splitlines()[-1]
            raise OSError(f"an actor failed: {what}; files are kept, and the same command resumes") from error


class Actor:
    """What runs in a process of the cluster."""

    def __init__(self, opened: Callable[[], Work]) -> None:
        self.work = opened()

    def do(self, number: int) -> bytes:
        """Do one block."""
        return self.work(number)

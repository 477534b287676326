"""The blocks of a corpus, of equally many rows each: where each begins, and the rows of any of them.

A corpus is read once to find the places where its blocks begin. From then on a process opens it at a block.
"""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

from whitenedcse.app.durable import parsing, read_json, write_json
from whitenedcse.app.terminal import pace, say
from whitenedcse.data.corpus import Corpus, Place, Reading, Row, files
from whitenedcse.data.files import COMPRESSIONS, filesystem


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

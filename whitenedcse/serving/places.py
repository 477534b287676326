"""Reading a corpus from the place of any row on, until `encode` and indices do without it.

Each row is given unchanged. A packed file is unpacked up to the place.
"""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from operator import length_hint
from pathlib import Path
from typing import Any, NamedTuple

from whitenedcse.data.corpus import Corpus, Row, files, picked
from whitenedcse.data.files import COMPRESSIONS, filesystem, records, suffix

BLOCK = 1 << 16  # bytes read at a time


@dataclass
class Cursor:
    """A line of a text file, or a row of a Parquet file: where reading begins, and then how far it has come.

    offset: a place to begin at: the byte of a line start (after unpacking), or a row group. number: of the
    line or row there, from 1. skip: how many lines or rows of that place to leave out.
    """

    offset: int = 0
    number: int = 1
    skip: int = 0
    pending: Iterator[Any] = field(default_factory=lambda: iter(()), repr=False)  # of a list

    def begin(self, offset: int, number: int, items: list[Any], skip: int = 0) -> Iterator[Any]:
        """Iterate over these items, the first of which is `skip` after this place."""
        self.offset, self.number, self.skip, self.pending = offset, number, skip + len(items), iter(items)
        return self.pending

    @property
    def following(self) -> tuple[int, int, int]:
        """The offset, number and skip with which reading would resume where it is now.

        It is known without counting each line: a list's iterator knows how many items it has left.
        """
        return self.offset, self.number, self.skip - length_hint(self.pending)


def lines(path: str | Path, at: Cursor) -> Iterator[str]:
    """The lines of a text file from a place on, without line end and BOM."""
    every = _lines(path, at)
    deque(islice(every, at.skip), maxlen=0)
    return every


def _lines(path: str | Path, at: Cursor) -> Iterator[str]:
    for offset, number, block in _blocks(path, at.offset, at.number):
        text = block.decode("utf-8-sig" if number == 1 else "utf-8")
        yield from at.begin(offset, number, [line.rstrip("\r") for line in text.split("\n")])


def _blocks(path: str | Path, offset: int, number: int) -> Iterator[tuple[int, int, bytes]]:
    """The bytes of a file in blocks of whole lines, each with the place and the number of its first line.

    offset: the byte to begin at, which is in line `number`; a packed file is unpacked up to there. A file of
    less than BLOCK bytes is one block. Memory is bounded, whatever the file holds.
    """
    opened = COMPRESSIONS.get(Path(path).suffix.lower(), lambda raw: raw)
    with (
        filesystem(path) as (system, inside),
        system.open(inside, "rb") as raw,
        io.BufferedReader(opened(raw), 1 << 17) as stream,
    ):
        _move(stream, offset)
        rest, size, last = b"", 0, False
        while not last:
            block = stream.read(BLOCK)
            data, size, last = rest + block, size + len(block), len(block) < BLOCK
            whole, _, rest = (data.removesuffix(b"\n"), b"", b"") if last else data.rpartition(b"\n")
            if len(rest) < len(data):
                yield offset, number, whole
                number, offset = number + whole.count(b"\n") + 1, offset + len(whole) + 1


def _move(stream: io.BufferedReader, offset: int) -> None:
    """Move a stream that was just opened to a byte of what it gives."""
    if stream.seekable() and offset:
        stream.seek(offset)  # where it is packed, Python unpacks up to there
        return
    for start in range(0, offset, BLOCK):
        stream.read(min(BLOCK, offset - start))


class Place(NamedTuple):
    """Where a row of a corpus is: in which of `files`, and where in it, as `Cursor` says."""

    file: int = 0
    offset: int = 0
    number: int = 1
    skip: int = 0


START = Place()


class Reading:
    """Every row of a corpus in order from a place on, unchanged: none is dropped, cut or sampled.

    Plain files are opened at that byte, Parquet files at that row group; a packed file is unpacked up to it.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "x.txt"
    >>> _ = path.write_text("the cat\\nthe dog\\nthe bird\\n")
    >>> rows = Reading(Corpus(str(path)))
    >>> next(rows)
    ('the cat',)
    >>> list(Reading(Corpus(str(path)), rows.place))
    [('the dog',), ('the bird',)]
    """

    def __init__(self, corpus: Corpus, at: Place = START) -> None:
        self.file, self.cursor = at.file, Cursor(at.offset, at.number, at.skip)
        self._rows = self._read(corpus)

    def __iter__(self) -> Iterator[Row]:
        return self._rows

    def __next__(self) -> Row:
        return next(self._rows)

    @property
    def place(self) -> Place:
        """That of the next row."""
        return Place(self.file, *self.cursor.following)

    def _read(self, corpus: Corpus) -> Iterator[Row]:
        here = files(corpus.path)
        while self.file < len(here):
            yield from self._file(here[self.file], corpus.columns)
            self.file, self.cursor = self.file + 1, Cursor()
        if not here:
            raise ValueError(f"{corpus.path}: a hub data set has no places; write it to a file")

    def _file(self, path: str, columns: Sequence[str]) -> Iterator[Row]:
        if suffix(path) == ".txt":
            yield from ((line,) for line in lines(path, self.cursor))
            return
        every = picked((record for _, record in records(path)), columns, path)
        for number, row in enumerate(islice(every, self.cursor.skip, None), self.cursor.skip):
            self.cursor = Cursor(0, 1, number + 1)
            yield tuple("" if cell is None else cell for cell in row)

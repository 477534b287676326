"""Reading a corpus as sentences.

A corpus is a file or a directory of files, by path or URL, or a data set of the Hugging Face hub. A row of it
is one sentence, or as many as there are columns: (anchor, positive), (anchor, positive, hard negative).
"""

from __future__ import annotations

import hashlib
import os
import random
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from whitenedcse.data.files import (
    COMPRESSIONS,
    Cursor,
    filesystem,
    having,
    lines,
    objects,
    parquet,
    suffix,
    table,
)

Row = tuple[str, ...]


@dataclass(frozen=True)
class Corpus:
    """Where sentences are, in which columns, and how many rows of them to take.

    path: a file, a directory, a URL, or the `name` or `owner/name` of a hub data set, whose "train" split is
    read. columns: none for plain text. sample: a number of rows, drawn uniformly, always the same ones, in
    corpus order.
    """

    path: str
    columns: tuple[str, ...] = ()
    sample: int | None = None

    def __post_init__(self) -> None:
        if len(self.columns) > 3:
            raise ValueError(f"columns={self.columns}: at most an anchor, a positive and a hard negative")
        if self.sample is not None and self.sample < 1:
            raise ValueError(f"sample={self.sample}: take at least one row, or null for all")


class Counts(NamedTuple):
    """Numbers of rows: read (`total`), dropped as `blank`, `cut` as too long, and finally `kept`."""

    total: int
    blank: int
    cut: int
    kept: int


def read(corpus: Corpus, *, longest: int = sys.maxsize) -> tuple[list[Row], Counts]:
    """The usable rows of a corpus in order, each sentence cut to `longest` characters, and their counts.

    A row with a blank column is dropped. Text is otherwise unchanged: no stripping, no normalisation.
    """
    tally = Counter[str]()
    usable = _usable(Reading(corpus), longest, tally)
    kept = list(usable) if corpus.sample is None else sampled(usable, corpus.sample)
    counts = Counts(tally["total"], tally["blank"], tally["cut"], len(kept))
    if not kept:
        raise ValueError(f"{corpus.path}: 0 usable sentences in {counts.total} lines, {counts.blank} blank")
    if len(kept) > 1 and all(row == kept[0] for row in kept):  # ends at the first other one
        raise ValueError(f"{corpus.path}: all {len(kept):,} rows are equal: {kept[0][0]!r:.50}")
    if counts.cut:
        warnings.warn(f"{corpus.path}: {counts.cut} lines cut to {longest} characters", stacklevel=2)
    return kept, counts


def fingerprint(corpus: Corpus) -> str:
    """A digest of the bytes of the files, the columns and the sample: where it is equal, so are the rows.

    Files are not decoded, so it runs at the speed of the disk or the network. A hub data set has its own
    fingerprint.
    """
    digest = hashlib.blake2b(repr((corpus.columns, corpus.sample)).encode(), digest_size=16)
    here = files(corpus.path)
    if not here:
        digest.update(_hub(corpus.path)._fingerprint.encode())
    for file in here:
        name = os.path.relpath(file, Path(corpus.path).parent)
        with filesystem(file) as (system, inside), system.open(inside, "rb") as stream:
            digest.update(f"{name}\0{system.size(inside)}\0".encode())
            hashlib.file_digest(stream, lambda: digest)  # read in pieces
    return digest.hexdigest()


def is_hub_id(path: str) -> bool:
    """Whether a path can only be a hub data set: no such file, and of the form `name` or `owner/name`."""
    return bool(re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", path)) and not (_kind(path) or Path(path).exists())


def _usable(rows: Iterable[Row], longest: int, tally: Counter[str]) -> Iterator[Row]:
    """The rows without a blank field, cut to `longest` characters; `tally` counts all, blank and cut ones."""
    for row in rows:
        tally["total"] += 1
        if not all(map(str.strip, row)):
            tally["blank"] += 1
            continue
        if max(map(len, row)) > longest:
            tally["cut"] += 1
            row = tuple(field[:longest] for field in row)
        yield row


def sampled(rows: Iterable[Row], size: int) -> list[Row]:
    """`size` rows in their order, each set of rows equally likely: Vitter's Algorithm R, in one pass."""
    generator = random.Random(0)
    drawn: list[tuple[int, Row]] = []
    for number, row in enumerate(rows):
        place = number if number < size else generator.randrange(number + 1)
        if place < size:
            drawn[place : place + 1] = [(number, row)]
    return [row for _, row in sorted(drawn)]


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
            path = here[self.file]
            yield from READERS[_kind(path)](path, corpus.columns, self.cursor)
            self.file, self.cursor = self.file + 1, Cursor()
        if not here:
            yield from _hub_rows(corpus, self.cursor)


def rows(corpus: Corpus) -> Iterable[Row]:
    """The rows of a corpus in order, read lazily, or those of the sample."""
    return Reading(corpus) if corpus.sample is None else read(corpus)[0]


def texts(corpus: Corpus) -> Iterator[str]:
    """The texts of all columns in order, read lazily, without blank ones."""
    return (text for row in rows(corpus) for text in row if text.strip())


def files(path: str) -> list[str]:
    """The files of a corpus: the file itself, or all files of a known kind below a directory, sorted.

    Empty if nothing is there. A URL with a known suffix is a file, any other a directory. Raises ValueError.
    """
    if "://" in path:
        with filesystem(path) as (system, inside):
            system.invalidate_cache()
            paths = [path] if _kind(path) else list(map(system.unstrip_protocol, system.find(inside)))
    elif not Path(path).exists():
        return []
    else:
        paths = [str(Path(path))] if Path(path).is_file() else list(_below(path))
    if models := {"config.json", "modules.json"} & {os.path.relpath(file, path) for file in paths}:
        raise ValueError(f"{path} holds a model ({min(models)}), no corpus: name a file of texts")
    if not (paths := [file for file in paths if _kind(file)]):
        raise ValueError(
            f"{path}: no corpus file; supported are {[*READERS]}, text also with {[*COMPRESSIONS]} added"
        )
    return sorted(paths, key=Path)  # a/z before a-b/a


def _below(folder: str) -> Iterator[str]:
    """The files below a folder, behind links too, each folder once; hidden ones are drafts or copies."""
    seen = set[str]()
    for place, folders, names in os.walk(folder, followlinks=True):
        new = os.path.realpath(place) not in seen
        seen.add(os.path.realpath(place))
        folders[:] = sorted(name for name in folders if new and not name.startswith("."))
        yield from (str(Path(place, name)) for name in names if new and not name.startswith("."))


def _kind(name: str) -> str:
    """The suffix that decides how a file is read; "" if it is none of those known."""
    kind = suffix(name)
    return kind if kind in READERS and (kind != ".parquet" or name.lower().endswith(kind)) else ""


def _text(path: str, columns: Sequence[str], at: Cursor) -> Iterator[Row]:
    if columns:
        raise ValueError(f"{path}: plain text has no columns, so columns={list(columns)} must be []")
    return ((line,) for line in lines(path, at=at))


def _table(path: str, columns: Sequence[str], at: Cursor) -> Iterator[Row]:
    indices: list[int] = []
    for _, fields in table(path, at):
        if indices:
            yield tuple(fields[place] for place in indices) if fields else ("",)
        else:
            indices = [fields.index(name) for name in having(columns, fields, path)]


def _json(path: str, columns: Sequence[str], at: Cursor) -> Iterator[Row]:
    for number, record in objects(path, at):
        blank = dict.fromkeys(columns, "")
        yield _fields(blank if record is None else record, columns, f"{path}:{number}")


def _parquet(path: str, columns: Sequence[str], at: Cursor) -> Iterator[Row]:
    with parquet(path) as file:
        wanted = list(having(columns, file.schema_arrow.names, path))
        number, skip = at.number, at.skip
        for group in range(at.offset, file.num_row_groups):
            done = 0
            for batch in file.iter_batches(1024, [group], wanted):
                left, done = batch.slice(min(skip, batch.num_rows)), done + batch.num_rows
                skip -= batch.num_rows - left.num_rows
                records = at.begin(group, number, left.to_pylist(), done - left.num_rows)
                yield from _numbered(records, columns, path, number + done - left.num_rows)
            number += done


def _hub_rows(corpus: Corpus, at: Cursor) -> Iterator[Row]:
    data = _hub(corpus.path)
    data = data.select_columns(wanted := list(having(corpus.columns, data.column_names, corpus.path)))
    for start in range(at.skip, len(data), 1000):
        columns = data[start : start + 1000]
        records = [dict(zip(wanted, row, strict=True)) for row in zip(*map(columns.get, wanted), strict=True)]
        yield from _numbered(at.begin(0, 1, records, start), wanted, corpus.path, start + 1)


def _hub(name: str) -> Any:
    """The "train" split of a hub data set."""
    if not is_hub_id(name):
        raise FileNotFoundError(f"{name}: no such file or directory; give one, or owner/name on the hub")
    try:
        import datasets  # seconds, which most corpora need not wait for

        return datasets.load_dataset(name, split="train")
    except Exception as error:  # the kinds that `datasets` raises share no class and differ between releases
        raise FileNotFoundError(f"{name}: no such path, and the hub did not give it: {error}") from error


def _numbered(records: Iterable[Any], columns: Sequence[str], place: object, first: int) -> Iterator[Row]:
    return (_fields(record, columns, f"{place}, row {i}") for i, record in enumerate(records, first))


def _fields(record: Any, columns: Sequence[str], place: str) -> Row:
    """The wanted fields of a record. Raises ValueError unless all of them are text."""
    for name in having(columns, list(record), place):
        if not isinstance(record[name], str):
            raise ValueError(f"{place}: text expected in {name!r}, {record[name]!r} found")
        if "\0" in record[name]:
            raise ValueError(f"{place}: NUL in {name!r} is no text: {record[name]!r:.50}; remove it")
    return tuple(record[name] for name in columns)


READERS = {".txt": _text, ".csv": _table, ".tsv": _table, ".jsonl": _json, ".parquet": _parquet}

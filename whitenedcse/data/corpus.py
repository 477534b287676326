"""Reading a corpus as sentences, one row after the other: memory does not grow with the corpus.

A corpus is a file or a directory of files, by path or URL, or a data set of the Hugging Face hub. A row of it
is one sentence, or as many as there are columns: (anchor, positive), (anchor, positive, hard negative).
"""

from __future__ import annotations

import os
import random
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import xxhash

from whitenedcse.data.files import (
    COMPRESSIONS,
    KINDS,
    blank,
    filesystem,
    hidden,
    lines,
    records,
    suffix,
)

Row = tuple[str, ...]
Item = TypeVar("Item")
BLOCK = 4096  # rows at a time
TAGS = ("ETag", "etag", "blob_id")  # of a version of a file: S3 and the web, Google and Azure, the hub


@dataclass(frozen=True)
class Corpus:
    """Where sentences are, in which columns, and how many rows of them to take.

    path: a file, a directory, a URL, or the `name` or `owner/name` of a hub data set, whose "train" split is
    read. columns: none for plain text, nor for a table with one column of text. sample: a number of rows,
    drawn uniformly, always the same ones, in corpus order.
    """

    path: str
    columns: tuple[str, ...] = ()
    sample: int | None = None

    def __post_init__(self) -> None:
        if len(self.columns) > 3:
            raise ValueError(f"columns={self.columns}: at most an anchor, a positive and a hard negative")


class Counts(NamedTuple):
    """Numbers of rows: read, with a field that is blank or no text, kept, and equal to an earlier one."""

    total: int
    blank: int
    kept: int
    repeated: int


class Usable:
    """The rows of a corpus in which every field is text, read lazily; afterwards `counts` tells of all.

    Text is unchanged: no stripping, no normalisation. Raises ValueError at the end if there was no such row.
    """

    counts: Counts

    def __init__(self, corpus: Corpus) -> None:
        self.corpus = corpus
        self.total = self.blank = 0  # rows so far

    def __iter__(self) -> Iterator[Row]:
        import numpy as np  # here, as --help does without it

        rows: Iterable[Row] = self.rows_of_text()
        if self.corpus.sample is not None:
            rows = sampled(rows, self.corpus.sample)
        hashes = array("q")
        for row in rows:
            hashes.append(hash(row))
            yield row
        kept = len(hashes)
        if not kept:
            raise ValueError(
                f"{self.corpus.path}: 0 usable sentences in {self.total} lines: blank, or no texts"
            )
        distinct = len(np.unique(np.frombuffer(hashes, np.int64)))
        self.counts = Counts(self.total, self.blank, kept, kept - distinct)

    def rows_of_text(self) -> Iterator[Row]:
        """The rows without a field that is blank or no text."""
        for row in cells(self.corpus):
            self.total += 1
            if all(isinstance(cell, str) and not blank(cell) for cell in row):
                yield row
            else:
                self.blank += 1


def blocks(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    """The items in lists of `size`, and fewer in the last."""
    every = iter(items)
    while block := list(islice(every, size)):
        yield block


def read(corpus: Corpus) -> tuple[list[Row], Counts]:
    """The `Usable` rows of a corpus as a list, and their counts."""
    rows = Usable(corpus)
    return list(rows), rows.counts


def rows(corpus: Corpus, *, ids: bool = False) -> Iterator[Row]:
    """Every row of a corpus in order, read lazily, or those of the sample; a null is "".

    So row i of what is made of it is row i of the corpus. ids: the last column has the `label` of each row.
    Raises ValueError for a field that is no text.
    """
    every: Iterable[Any] = cells(corpus)
    if ids:
        every = ((*row[:-1], label(row[-1])) for row in every)
    every = (tuple("" if cell is None else cell for cell in row) for row in every)
    if corpus.sample is not None:
        filled = (row for row in every if not any(isinstance(cell, str) and blank(cell) for cell in row))
        every = sampled(filled, corpus.sample)
    for row in every:
        for cell in row:
            if not isinstance(cell, str):
                raise ValueError(f"{corpus.path}: text expected in a column, {cell!r:.50} found")
        yield row


def label(one: object) -> str:
    """An id as text, whatever it is. Raises ValueError for a null and a blank one."""
    if one is None or one != one or blank(str(one)):
        raise ValueError(f"an id is {one!r}: each text needs its own")
    return str(one)


def texts(corpus: Corpus) -> Iterator[str]:
    """The texts of all columns in order, read lazily, without blank ones."""
    return (text for row in rows(corpus) for text in row if not blank(text))


def sampled(rows: Iterable[Row], size: int) -> list[Row]:
    """`size` rows in their order, each set of rows equally likely: Vitter's Algorithm R, in one pass."""
    generator = random.Random(0)
    drawn: list[tuple[int, Row]] = []
    for number, row in enumerate(rows):
        if number < size:
            drawn.append((number, row))
        elif (place := generator.randrange(number + 1)) < size:
            drawn[place] = number, row
    return [row for _, row in sorted(drawn)]


def cells(corpus: Corpus) -> Iterator[tuple[Any, ...]]:
    """The wanted cells of every row of a corpus in order, whatever they are; None for a null."""
    path, columns = corpus.path, corpus.columns
    here = files(path)
    if not here:
        yield from picked(hub(path), columns, path)
    for file in here:
        if suffix(file) == ".txt":
            if columns:
                raise ValueError(f"{file}: plain text has no columns, so columns={list(columns)} must be []")
            yield from ((line,) for line in lines(file))
        else:
            yield from picked((record for _, record in records(file)), columns, file)


def picked(
    every: Iterable[Mapping[str, Any]], columns: Sequence[str], place: str
) -> Iterator[tuple[Any, ...]]:
    """The wanted fields of each record; without columns those of the one that is text in the first record."""
    for record in every:
        columns = columns or [text_column(record, place)]
        if lost := [name for name in columns if name not in record]:
            raise ValueError(f"{place}: no column {lost[0]!r} among {', '.join(record)}")
        yield tuple(record[name] for name in columns)


def text_column(record: Mapping[str, Any], place: str) -> str:
    """The one column whose cell is text in this record. Raises ValueError for none, and for several."""
    names = [name for name, cell in record.items() if isinstance(cell, str)]
    if len(names) == 1:
        return names[0]
    raise ValueError(
        f"{place}: its columns are {', '.join(record)}; name those of texts: "
        "data.columns=[NAME], of evaluate.py columns=[NAME], or --columns NAME; in Python columns=[NAME], "
        'for train settings={"data.columns": [NAME]}'
    )


def hub(name: str) -> Iterable[Mapping[str, Any]]:
    """The records of the "train" split of a hub data set."""
    with of_hub(name):
        from datasets import load_dataset  # seconds, which most corpora need not wait for

        return load_dataset(name, split="train", streaming=True)


@contextmanager
def of_hub(name: str) -> Iterator[None]:
    """A context in which the hub is asked for a data set; its errors are FileNotFoundError, with its name."""
    if not is_hub_id(name):
        raise FileNotFoundError(f"{name}: no such file or directory; give one, or owner/name on the hub")
    try:
        yield
    except Exception as error:  # the kinds that `datasets` raises share no class and differ between releases
        raise FileNotFoundError(f"{name}: no such path, and the hub did not give it: {error}") from error


def is_hub_id(path: str) -> bool:
    """Whether a path can only be a hub data set: no such file, and of the form `name` or `owner/name`."""
    named = re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", path)
    return bool(named) and suffix(path) not in KINDS and not Path(path).exists()


def fingerprint(corpus: Corpus) -> str:
    """A digest of the bytes of the files (in a store their versions), the columns and the sample."""
    state = xxhash.xxh3_128(repr((corpus.columns, corpus.sample)).encode())
    here = files(corpus.path)
    if not here:
        with of_hub(corpus.path):
            from huggingface_hub import dataset_info

            state.update(str(dataset_info(corpus.path).sha).encode())
    for file in here:
        with filesystem(file) as (system, inside):
            name = os.path.relpath(file, Path(corpus.path).parent)
            state.update(f"{name}\0{system.size(inside)}\0".encode())
            if tag := version(system.info(inside)):
                state.update(tag.encode())
                continue
            with system.open(inside, "rb") as stream:
                while block := stream.read(1 << 20):
                    state.update(block)
    return state.hexdigest()


def version(facts: Mapping[str, Any], names: Sequence[str] = TAGS) -> str:
    """What a store says of the version of a file, but for a weak ETag, which may stay; "" for nothing."""
    found = (str(facts[name]) for name in names if facts.get(name))
    return next((text for text in found if not text.startswith("W/")), "")


def files(path: str) -> list[str]:
    """The files of a corpus: the file itself, or all of a known kind below a directory or URL, sorted."""
    if "://" in path:
        with filesystem(path) as (system, inside):
            system.invalidate_cache()
            one = suffix(path) in KINDS
            paths = [path] if one else [system.unstrip_protocol(file) for file in system.find(inside)]
            path = path if one else system.unstrip_protocol(inside)  # az:// becomes abfs:// in both
    elif not Path(path).exists():
        return []
    elif Path(path).is_file():
        paths = [str(Path(path))]
    else:
        paths = [str(Path(folder, name)) for folder, _, names in os.walk(path) for name in names]
    paths = [file for file in paths if file == path or not hidden(os.path.relpath(file, path))]
    if not (paths := [file for file in paths if suffix(file) in KINDS]):
        kinds = f"{', '.join(KINDS)}, also with {', '.join(COMPRESSIONS)} added"
        raise ValueError(f"{path}: no corpus file; supported are {kinds}")
    return sorted(paths, key=Path)  # a/z before a-b/a

"""Reading a corpus as sentences.

A corpus is a file or a directory of files, by path or URL, or a data set of the Hugging Face hub. A row of it
is one sentence, or as many as there are columns: (anchor, positive), (anchor, positive, hard negative).
"""

from __future__ import annotations

import difflib
import hashlib
import os
import random
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from whitenedcse.data.files import COMPRESSIONS, filesystem, lines, objects, suffix, table

Row = tuple[str, ...]
LONGEST = 2048  # characters of a text that evaluation and exports read


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


def read(corpus: Corpus, *, longest: int) -> tuple[list[Row], Counts]:
    """The usable rows of a corpus in order, each sentence cut to `longest` characters, and their counts.

    A row with a blank column is dropped. Text is otherwise unchanged: no stripping, no normalisation.
    """
    tally = Counter[str]()
    usable = _usable(stream(corpus), longest, tally)
    kept = list(usable) if corpus.sample is None else _sampled(usable, corpus.sample)
    counts = Counts(tally["total"], tally["blank"], tally["cut"], len(kept))
    if not kept:
        raise ValueError(f"{corpus.path}: 0 usable sentences in {counts.total} lines, {counts.blank} blank")
    if len(kept) > 1 and all(row == kept[0] for row in kept):  # ends at the first other one
        raise ValueError(
            f"{corpus.path}: all {len(kept):,} rows from line 1 on are equal: {kept[0][0]!r:.50}"
        )
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


def _sampled(rows: Iterable[Row], size: int) -> list[Row]:
    """`size` rows in their order, each set of rows equally likely: Vitter's Algorithm R, in one pass."""
    generator = random.Random(0)
    drawn: list[tuple[int, Row]] = []
    for number, row in enumerate(rows):
        place = number if number < size else generator.randrange(number + 1)
        if place < size:
            drawn[place : place + 1] = [(number, row)]
    return [row for _, row in sorted(drawn)]


def stream(corpus: Corpus) -> Iterator[Row]:
    """Every row of a corpus in order, unchanged: none is dropped, cut or sampled."""
    here = files(corpus.path)
    for file in here:
        yield from READERS[_kind(file)](file, corpus.columns)
    if here:
        return
    data = _hub(corpus.path)
    wanted = list(_checked(corpus.columns, data.column_names, corpus.path))
    yield from _numbered(data.select_columns(wanted), wanted, corpus.path)


def rows(corpus: Corpus) -> Iterable[Row]:
    """The rows of a corpus in order, read lazily, or those of the sample."""
    return stream(corpus) if corpus.sample is None else read(corpus, longest=LONGEST)[0]


def texts(corpus: Corpus) -> Iterator[str]:
    """The texts of all columns in order, read lazily, without blank ones, each cut to LONGEST characters."""
    return (text[:LONGEST] for row in rows(corpus) for text in row if text.strip())


def files(path: str) -> list[str]:
    """The files of a corpus: the file itself, or all files of a known kind below a directory, sorted.

    Empty if nothing is there. A URL with a known suffix is a file, any other one a directory, which is listed
    again at each call.
    """
    if "://" in path:
        with filesystem(path) as (system, inside):
            system.invalidate_cache()
            paths = [path] if _kind(path) else list(map(system.unstrip_protocol, system.find(inside)))
    elif (local := Path(path)).exists():
        paths = [str(file) for file in (local, *local.rglob("*")) if file.is_file()]
    else:
        return []
    if not (paths := [file for file in paths if _kind(file)]):
        raise ValueError(
            f"{path}: no corpus file; supported are {[*READERS]}, text also with {[*COMPRESSIONS]} added"
        )
    return sorted(paths, key=Path)  # a/z before a-b/a


def _kind(name: str) -> str:
    """The suffix that decides how a file is read; "" if it is none of those known."""
    kind = suffix(name)
    return kind if kind in READERS and (kind != ".parquet" or name.lower().endswith(kind)) else ""


def _text(path: str, columns: Sequence[str]) -> Iterator[Row]:
    if columns:
        raise ValueError(f"{path}: plain text has no columns, so columns={list(columns)} must be []")
    return ((line,) for line in lines(path))


def _table(path: str, columns: Sequence[str]) -> Iterator[Row]:
    indices: list[int] = []
    for _, fields in table(path):
        if indices:
            yield tuple(fields[place] for place in indices) if fields else ("",)
        else:
            indices = [fields.index(name) for name in _checked(columns, fields, path)]


def _json(path: str, columns: Sequence[str]) -> Iterator[Row]:
    for number, record in objects(path):
        blank = dict.fromkeys(columns, "")
        yield _fields(blank if record is None else record, columns, f"{path}:{number}")


def _parquet(path: str, columns: Sequence[str]) -> Iterator[Row]:
    import pyarrow.parquet  # type: ignore[import-untyped]

    with filesystem(path) as (system, inside):
        try:
            file = pyarrow.parquet.ParquetFile(inside, filesystem=system)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        with file:
            wanted = list(_checked(columns, file.schema_arrow.names, path))
            records = (record for batch in file.iter_batches(columns=wanted) for record in batch.to_pylist())
            yield from _numbered(records, columns, path)


def _hub(name: str) -> Any:
    """The "train" split of a hub data set."""
    if not is_hub_id(name):
        raise FileNotFoundError(f"{name}: no such file or directory; give one, or owner/name on the hub")
    try:
        import datasets  # seconds, which most corpora need not wait for

        return datasets.load_dataset(name, split="train")
    except Exception as error:  # the kinds that `datasets` raises share no class and differ between releases
        raise FileNotFoundError(f"{name}: no such path, and the hub did not give it: {error}") from error


def _numbered(records: Iterable[Any], columns: Sequence[str], place: object) -> Iterator[Row]:
    return (_fields(record, columns, f"{place}, row {i}") for i, record in enumerate(records, 1))


def _checked(wanted: Sequence[str], present: Sequence[str], place: object) -> Sequence[str]:
    """The wanted columns. Raises ValueError if one is missing."""
    if not wanted:
        raise ValueError(f"{place}: columns=[] does not say which of {list(present)} to read; name it")
    for name in set(wanted).difference(present):
        near = "".join(f"; did you mean {n!r}?" for n in difflib.get_close_matches(name, present, 1))
        raise ValueError(f"{place}: no column {name!r} among {list(present)}{near}")
    return wanted


def _fields(record: Any, columns: Sequence[str], place: str) -> Row:
    """The wanted fields of a record. Raises ValueError unless all of them are text."""
    for name in _checked(columns, list(record), place):
        if not isinstance(record[name], str):
            raise ValueError(f"{place}: text expected in {name!r}, {record[name]!r} found")
        if "\0" in record[name]:
            raise ValueError(f"{place}: NUL in {name!r} is no text: {record[name]!r:.50}; remove it")
    return tuple(record[name] for name in columns)


READERS = {".txt": _text, ".csv": _table, ".tsv": _table, ".jsonl": _json, ".parquet": _parquet}

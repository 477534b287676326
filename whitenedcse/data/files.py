"""Text files as lines, tables and objects, with errors that name the file and the line.

A file is a path, or a URL of any file system that fsspec knows: s3, gs, hf, https, memory and others.
"""

from __future__ import annotations

import bz2
import csv
import difflib
import gzip
import io
import json
import lzma
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from operator import length_hint
from pathlib import Path
from typing import Any

from whitenedcse.console import lacking

NAMED = (".tsv", ".csv", ".jsonl")  # rows with named fields
BLOCK = 1 << 16  # bytes read at a time
LONGEST_LINE = 1 << 24  # bytes
UNPACKED, RATIO = 1 << 22, 100  # bytes of an archive, above which it may not be so many times its size
TEXT = "BYTE_ARRAY"  # as Parquet files call it


def suffix(name: str) -> str:
    """The suffix that decides how a file is read, without that of a compression: ".txt" of x.txt.gz."""
    *_, inner, last = ["", "", *Path(name.lower()).suffixes]
    return inner if last in COMPRESSIONS else last


@contextmanager
def filesystem(path: str | Path) -> Iterator[tuple[Any, str]]:
    """A context with the fsspec file system of a path or a URL, and the path inside it.

    Errors raised within the context name the path: FileNotFoundError, ValueError where a package for the file
    system is missing, or OSError for all else. A ValueError that names the path is passed on unchanged.
    """
    try:
        yield _found(str(path))
    except (FileNotFoundError, IsADirectoryError) as error:
        more = "; whitenedcse data check says what is missing"
        more = ", or it cannot be reached" if "://" in str(path) else more
        raise FileNotFoundError(f"{path}: no such file{more}") from error
    except ImportError as error:
        package = getattr(error.__cause__, "name", None) or "that package"
        raise lacking(f"{path}", package.partition(".")[0], error=error) from error
    except Exception as error:  # the kinds that file systems and compressions raise share no class
        if isinstance(error, ValueError) and str(path) in str(error):
            raise
        raise OSError(f"{path}: cannot be read: {str(error) or type(error).__name__}") from error


def _found(path: str) -> tuple[Any, str]:
    import fsspec  # a tenth of a second, which `whitenedcse --help` need not wait for

    if "://" in path:
        return fsspec.core.url_to_fs(path)
    return fsspec.filesystem("file"), str(Path(path).absolute())


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


def lines(path: str | Path, encoding: str = "utf-8", at: Cursor | None = None) -> Iterator[str]:
    r"""The lines of a text file without line end and BOM. Only \n ends a line, not U+2028 or a form feed.

    at: where to begin, if not at the first line; it then says how far the reading has come. Raises the errors
    of `filesystem`, OSError for a damaged archive, and ValueError, naming file and line, for what is no text:
    bytes that are not UTF-8, NUL, a whole file with carriage returns for line ends, a line above LONGEST_LINE
    bytes, and an archive that unpacks to more than RATIO times its size.
    """
    at = at or Cursor()
    every = _lines(path, encoding, at)
    deque(islice(every, at.skip), maxlen=0)
    return every


def _lines(path: str | Path, encoding: str, at: Cursor) -> Iterator[str]:
    for offset, number, block in _blocks(path, at.offset, at.number):
        try:
            text = block.decode("utf-8-sig" if (encoding, number) == ("utf-8", 1) else encoding)
        except UnicodeDecodeError as error:
            byte = f"byte 0x{error.object[error.start]:02x} is not UTF-8"
            raise ValueError(_foreign(path, number, byte, error.object[: error.start])) from error
        if "\0" in text:
            byte = "byte 0x00 is no text (UTF-16 has it)"
            raise ValueError(_foreign(path, number, byte, text.partition("\0")[0].encode(encoding)))
        found = text.split("\n")
        if "\r" in text:
            found = [line.rstrip("\r") for line in found]
            if number == len(found) == 1 and "\r" in found[0]:
                raise ValueError(f"{path}:1: carriage returns end its lines; convert the file with mac2unix")
        yield from at.begin(offset, number, found)


def _foreign(path: str | Path, number: int, what: str, before: bytes) -> str:
    """The message for a byte, given the number of the first of the lines `before` it."""
    line, position = number + before.count(b"\n"), len(before) - before.rfind(b"\n") - 1
    return f"{path}:{line}: {what}; convert the file with iconv (position {position} of the line)"


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
            if wrong := _explosion(size, raw.tell()):
                line = number + data.count(b"\n")
                raise ValueError(f"{path}:{line}: {wrong}")
            whole, _, rest = (data.removesuffix(b"\n"), b"", b"") if last else data.rpartition(b"\n")
            _refuse_long(path, number, data)
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


def _explosion(size: int, packed: int) -> str:
    """What is wrong with `packed` bytes that unpack to `size`, so many that they are meant to; or ""."""
    many = size > UNPACKED and size > RATIO * packed
    return f"it unpacks to over {RATIO} times its size; store it uncompressed" if many else ""


def _refuse_long(path: str | Path, number: int, data: bytes) -> None:
    """Raise ValueError if a line is too long."""
    for at, line in enumerate(data.split(b"\n") if len(data) > LONGEST_LINE else ()):
        if len(line) > LONGEST_LINE:
            raise ValueError(f"{path}:{number + at}: a line above {LONGEST_LINE:,} bytes; break it up")


@contextmanager
def parquet(path: str | Path) -> Iterator[Any]:
    """An open ParquetFile of pyarrow. Raises the errors of `filesystem`, and ValueError as `lines` does."""
    import pyarrow.parquet  # type: ignore[import-untyped]

    with filesystem(path) as (system, inside), pyarrow.parquet.ParquetFile(inside, filesystem=system) as file:
        for group in map(file.metadata.row_group, range(file.num_row_groups)):
            for column in map(group.column, range(group.num_columns)):
                wrong = _explosion(column.total_uncompressed_size, column.total_compressed_size)
                if wrong and column.physical_type == TEXT:
                    raise ValueError(f"{path}, column {column.path_in_schema!r}: {wrong}")
        yield file


def table(path: str | Path, at: Cursor | None = None) -> Iterator[tuple[int, list[str]]]:
    """The header and the rows of a file of comma-separated (quoted as csv does) or tab-separated values.

    Each is given with its line number. at: where to begin after the header, see `lines`. Raises ValueError
    for a row of another width than the header. A blank line is [] below the header, and skipped above it.
    """
    at, width = at or Cursor(), 0
    if before := at.number + at.skip - 1:
        header = next(table(path))
        width = len(header[1])
        yield header
    form: Any = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if suffix(str(path)) == ".tsv" else {}
    reader = csv.reader((line + "\n" for line in lines(path, at=at)), strict=True, **form)
    try:
        for fields in reader:
            width = width or len(fields)
            if fields and len(fields) != width:
                rule = "tabs separate" if form else "commas separate, and a text with commas is in quotes"
                found = f"{len(fields)} fields, {width} expected ({rule})"
                raise ValueError(f"{path}:{before + reader.line_num}: {found}")
            if width:
                yield before + reader.line_num, fields
    except csv.Error as error:  # a quote that never closes runs into the limit of csv, 131,072 characters
        raise ValueError(f"{path}:{before + reader.line_num}: {error}") from error


def objects(path: str | Path, at: Cursor | None = None) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """The objects of a JSON-lines file, each with its line number; None for a blank line. at: see `lines`."""
    at = at or Cursor()
    first = at.number + at.skip
    for number, line in enumerate(lines(path, at=at), first):
        try:
            record = json.loads(line) if line.strip() else None
            if "\\u" in line:
                json.dumps(record, ensure_ascii=False).encode()  # half a surrogate pair is no text
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}:{number}: not JSON: {error}") from error
        if line.strip() and not isinstance(record, dict):
            kind = type(record).__name__
            raise ValueError(f"{path}:{number}: an object with fields expected, {kind} found: {line:.50}")
        yield number, record


def records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of a file in one of the formats NAMED, each with "file:line"; blank lines are skipped."""
    if suffix(path.name) not in NAMED:
        raise ValueError(f"{path}: rows are read from {', '.join(NAMED)}, not {path.suffix!r}")
    if suffix(path.name) == ".jsonl":
        yield from ((f"{path}:{number}", record) for number, record in objects(path) if record is not None)
        return
    header: list[str] = []
    for number, fields in table(path):
        if header and fields:
            yield f"{path}:{number}", dict(zip(header, fields, strict=True))
        header = header or _distinct(fields, f"{path}:{number}")


def fields(path: Path, columns: Mapping[str, str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of `records`, with each field of `columns` taken from the column that it names there.

    Raises ValueError for a row without such a column, which says how the columns of a task are named.
    """
    for where, row in records(path):
        if missing := [column for column in columns.values() if column not in row]:
            there = f"no {', '.join(missing)} among {listed(list(row), path)}"
            ways = f"{path}:SENTENCE1:SENTENCE2:SCORE, or of labelled texts (tests alone) {path}:TEXT:LABEL"
            raise ValueError(f"{where}: {there}; name its columns with the file, of scored pairs {ways}")
        yield where, row | {field: row[column] for field, column in columns.items()}


def having(wanted: Sequence[str], present: Sequence[str], place: object) -> Sequence[str]:
    """The wanted columns. Raises ValueError if none is, or one is not among those that are present."""
    if not wanted:
        train = 'train.py: data.columns=[NAME] (settings of a call: {"data.columns": ["NAME"]})'
        how = f"{train}; evaluate.py, whitened and STSEvaluator: columns=[NAME]; others: --columns NAME"
        there = f"its columns are {listed(present, place)}"
        raise ValueError(f"{place}: {there}; name those of texts. In {how}")
    if lost := [repr(name) for name in wanted if name not in present]:
        near = "".join(f"; did you mean {n!r}?" for n in difflib.get_close_matches(lost[0][1:-1], present, 1))
        raise ValueError(f"{place}: no column {' or '.join(lost)} among {listed(present, place)}{near}")
    return wanted


def listed(columns: Sequence[str], place: object) -> str:
    """The columns of a file for a message; of a table, that they are in line 1, or what separates them."""
    by = {".csv": "commas", ".tsv": "tabs"}.get(suffix(str(place)))
    where = f" (line 1{f'; {by} separate columns' if len(columns) == 1 else ''})" if by else ""
    return f"{', '.join(columns) or 'no columns'}{where}"


def _distinct(header: list[str], where: str) -> list[str]:
    if repeated := [name for name, n in Counter(header).items() if name and n > 1]:
        raise ValueError(f"{where}: {len(header)} columns, among them {', '.join(repeated)} more than once")
    return header


def _zst(raw: Any) -> Any:
    import pyarrow  # zstandard takes a file that was cut short for a whole one

    return pyarrow.CompressedInputStream(raw, "zstd")


COMPRESSIONS: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".zst": _zst}

"""Text files and tables, local or at a URL, packed or not: their lines, and their rows by column.

A URL is one of any file system that fsspec knows: s3, gs, hf, https, memory and others.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from glob import escape
from pathlib import Path
from typing import Any

NAMED = (".tsv", ".csv", ".jsonl")  # rows with named fields, one after the other
KINDS = (".txt", *NAMED, ".json", ".parquet")


def suffix(name: str | Path) -> str:
    """The suffix that decides how a file is read, without that of a compression: ".txt" of x.txt.gz."""
    path = Path(str(name).lower())
    return Path(path.stem).suffix if path.suffix in COMPRESSIONS else path.suffix


def blank(text: str) -> bool:
    """Whether a text has nothing but spaces and invisible characters, of which a tokenizer makes no token.

    >>> blank("\\u200b\\ufeff \\u00ad"), blank(".")
    (True, False)
    """
    rest = text.strip()
    if not rest or rest.isprintable():
        return not rest
    return all(c.isspace() or unicodedata.category(c) in ("Cf", "Cc") for c in rest)


def hidden(path: str) -> bool:
    """Whether a file, or a folder that it is in, is hidden, as drafts and copies by an editor are."""
    return any(part[:1] == "." for part in Path(path).parts)


@contextmanager
def filesystem(path: str | Path) -> Iterator[tuple[Any, str]]:
    """A context with the fsspec file system of a path or a URL, and the path inside it.

    A local name is taken literally. Errors raised within it name the path: FileNotFoundError, and OSError for
    all else. A ValueError that names the path is passed on unchanged.
    """
    import fsspec  # a tenth of a second, which `whitenedcse --help` need not wait for

    try:
        if "://" in str(path):
            yield fsspec.core.url_to_fs(str(path))
        else:
            yield fsspec.filesystem("file"), str(Path(path).absolute())
    except (FileNotFoundError, IsADirectoryError) as error:
        more = ", or it cannot be reached" if "://" in str(path) else "; whitenedcse data check lists ours"
        raise FileNotFoundError(f"{path}: no such file{more}") from error
    except Exception as error:  # the kinds that file systems and compressions raise share no class
        if isinstance(error, ValueError) and str(path) in str(error):
            raise
        raise OSError(f"{path}: cannot be read: {str(error) or type(error).__name__}") from error


def lines(path: str | Path, encoding: str = "utf-8-sig") -> Iterator[str]:
    r"""The lines of a text file, unpacked, without line end and BOM. Only \n ends a line, not U+2028."""
    unpack = COMPRESSIONS.get(Path(path).suffix.lower(), lambda raw: raw)
    with (
        filesystem(path) as (system, inside),
        system.open(inside, "rb") as raw,
        io.TextIOWrapper(io.BufferedReader(unpack(raw), 1 << 17), encoding, newline="\n") as stream,
    ):
        for line in stream:
            if "\0" in line:
                raise ValueError("a NUL, as UTF-16 has, and UTF-8 is expected")
            yield line.rstrip("\r\n")


def records(path: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of a table as dictionaries, each with "file:line"; blank lines are skipped."""
    kind = suffix(path)
    if kind not in KINDS[1:]:
        raise ValueError(f"{path}: rows are read from {', '.join(KINDS[1:])}, not {kind!r}")
    if kind in (".csv", ".tsv"):
        return table(path, kind)
    return objects(path) if kind == ".jsonl" else streamed(path, kind[1:])


def table(path: str | Path, kind: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of a file of values separated by commas or tabs, below a line with the names of columns."""
    form: dict[str, Any] = {"delimiter": "\t" if kind == ".tsv" else ",", "strict": True}
    if kind == ".tsv" and not in_quotes(lines(path)):
        form["quoting"] = csv.QUOTE_NONE
    reader = csv.reader((line + "\n" for line in lines(path)), **form)
    names: list[str] = []
    try:
        for cells in filter(None, reader):  # without blank lines
            expected = len(set(names or cells))
            if len(cells) != expected:
                raise csv.Error(f"{len(cells)} fields, {expected} different ones expected")
            if names:
                yield f"{path}:{reader.line_num}", dict(zip(names, cells, strict=True))
            else:
                names = cells
    except csv.Error as error:
        raise ValueError(f"{path}:{reader.line_num}: {error}") from error


FIELD = r'"(?:[^"]|"")*"|[^"\t]*'
WHOLE, EACH = re.compile(rf"(?:{FIELD})(?:\t(?:{FIELD}))*"), re.compile(rf"(?:^|\t)({FIELD})")


def in_quotes(every: Iterable[str]) -> bool:
    """Whether quotes in a file with tabs stand around fields, as pandas and Excel write them; or are text.

    They do if each field with a quote is in quotes, with all of its own doubled, and there is a reason: one
    is doubled, the names of the columns are in quotes, lines as they stand have other numbers of fields, or,
    as in Excel, the fields with a comma and no others are in quotes. In STS-B quotes are text.

    >>> in_quotes(['a', '"Say ""no"" twice"']), in_quotes(['a', '"Say "no" twice"']), in_quotes(['a', '"no"'])
    (True, False, False)
    """
    sure, width, record = False, 0, ""
    commas: set[tuple[bool, bool]] = set()  # of fields: whether one is in quotes, and has a comma
    for line in filter(None, every):
        sure = sure or (width > 0 and line.count("\t") + 1 != width)
        record += line
        if record.count('"') % 2 and len(record) < 1 << 20:  # a line end within quotes
            record += "\n"
            continue
        fields = quoted_fields(record)
        width = width or len(fields)
        if not fields or len(fields) != width:
            return False
        inner = [field[1:-1] for field in fields if field.startswith('"')]
        first = not commas  # the names of the columns
        sure = sure or (first and bool(inner)) or any('"' in text for text in inner)
        commas |= {(field.startswith('"'), "," in field) for field in fields}
        record = ""
    as_excel = (True, True) in commas and not commas & {(True, False), (False, True)}
    return not record and (sure or as_excel)


def quoted_fields(record: str) -> list[str]:
    """The fields of a record, with their quotes; none where quotes stand elsewhere than around fields."""
    if '"' not in record:
        return record.split("\t")
    return EACH.findall(record) if WHOLE.fullmatch(record) else []


def objects(path: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a JSON-lines file."""
    for number, line in enumerate(lines(path), 1):
        if blank(line):
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}:{number}: not JSON: {error}") from error
        if not isinstance(record, dict):
            raise ValueError(f"{path}:{number}: an object with fields expected, found {line:.50}")
        yield f"{path}:{number}", record


def streamed(path: str | Path, kind: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of a Parquet file or of a JSON array."""
    from datasets import load_dataset

    name = str(path) if "://" in str(path) else escape(str(path))  # which is taken for a pattern
    with filesystem(path):
        every = load_dataset(kind, data_files=[name], split="train", streaming=True)
        for number, record in enumerate(every, 1):
            yield f"{path}:{number}", record


def fields(path: Path, columns: Mapping[str, str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of `records`, with each field of `columns` taken from the column that it names there."""
    for where, row in records(path):
        if missing := [column for column in columns.values() if column not in row]:
            there = f"no {', '.join(missing)} among {', '.join(row)}"
            ways = f"{path}:SENTENCE1:SENTENCE2:SCORE, or of labelled texts (tests alone) {path}:TEXT:LABEL"
            raise ValueError(f"{where}: {there}; name its columns with the file, of scored pairs {ways}")
        yield where, row | {field: row[column] for field, column in columns.items()}


def _zst(raw: Any) -> Any:  # zstandard takes a file that was cut short for a whole one
    import pyarrow  # type: ignore[import-untyped]

    return pyarrow.CompressedInputStream(raw, "zstd")


COMPRESSIONS: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".zst": _zst}

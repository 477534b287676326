"""Text files as lines, tables and objects; what is wrong with one is said with file and line."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMED = (".tsv", ".csv", ".jsonl")  # rows with named fields


def suffix(name: str) -> str:
    """What says how a file is read, that of a compression left out: ".txt" of x.txt.gz."""
    *_, inner, last = ["", "", *Path(name.lower()).suffixes]
    return inner if last in COMPRESSIONS else last


def lines(path: Path, encoding: str = "utf-8") -> Iterator[str]:
    r"""Lines without their end and without a BOM; only \n ends one, so U+2028 or a form feed stays inside.

    Raises FileNotFoundError, ValueError for bytes that are not UTF-8, and OSError for a damaged archive.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; whitenedcse data check says what is missing")
    first = "utf-8-sig" if encoding == "utf-8" else encoding
    try:
        with COMPRESSIONS.get(path.suffix.lower(), io.FileIO)(path) as raw, io.BufferedReader(raw) as stream:
            for number, line in enumerate(stream, 1):
                yield line.decode(encoding if number > 1 else first).rstrip("\r\n")
    except UnicodeDecodeError as error:
        byte, at = f"byte 0x{error.object[error.start]:02x}", f"(position {error.start} of the line)"
        raise ValueError(f"{path}:{number}: {byte} is not UTF-8; convert the file with iconv {at}") from error
    except Exception as error:  # the kinds that the five formats raise share no class
        raise OSError(f"{path}: cannot be read: {error}") from error


def table(path: Path) -> Iterator[tuple[int, list[str]]]:
    """The header and the rows of comma-separated values, quoted as csv does, or of tab-separated ones.

    Each comes with its line and is as wide as the header. A blank line is [] below the header, and passed
    over above it.
    """
    tabs: dict[str, Any] = {"delimiter": "\t", "quoting": csv.QUOTE_NONE}
    form = tabs if suffix(path.name) == ".tsv" else {}
    reader, width = csv.reader((line + "\n" for line in lines(path)), strict=True, **form), 0
    try:
        for fields in reader:
            width = width or len(fields)
            if fields and len(fields) != width:
                raise ValueError(f"{path}:{reader.line_num}: {len(fields)} fields, {width} expected")
            if width:
                yield reader.line_num, fields
    except csv.Error as error:  # a quote that never closes runs into the limit of csv, 131,072 characters
        raise ValueError(f"{path}:{reader.line_num}: {error}") from error


def objects(path: Path) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """The objects of JSON lines, each with its line; None for a blank one."""
    for number, line in enumerate(lines(path), 1):
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


def rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of a file in one of NAMED, each with "file:line". Blank lines are passed over."""
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


def _distinct(header: list[str], where: str) -> list[str]:
    if repeated := [name for name, n in Counter(header).items() if name and n > 1]:
        raise ValueError(f"{where}: {len(header)} columns, among them {', '.join(repeated)} more than once")
    return header


def _zst(path: Path) -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise OSError("to read .zst, pip install zstandard") from error
    return zstandard.open(path, "rb")


COMPRESSIONS: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".zst": _zst}

"""Text files as lines and as rows with named fields; what is wrong with one is said with file and line."""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SUFFIXES = (".tsv", ".csv", ".jsonl")


def rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of a .tsv, .csv or .jsonl file, each with "file:line"; tsv and csv begin with a header.

    Blank lines are passed over. tsv knows no quoting.
    """
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{path}: rows are read from {', '.join(SUFFIXES)}, not {path.suffix!r}")
    return (_objects if path.suffix == ".jsonl" else _table)(path)


def lines(path: Path, encoding: str = "utf-8-sig") -> list[str]:
    r"""The file split at \n alone (str.splitlines would also cut inside sentences), without \r and BOM."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; whitenedcse data check says what is missing")
    try:
        lines = path.read_bytes().decode(encoding).split("\n")
    except UnicodeDecodeError as error:
        line, byte = 1 + error.object[: error.start].count(b"\n"), error.object[error.start]
        raise ValueError(f"{path}:{line}: byte {byte:#x} is not UTF-8; convert the file") from error
    return [line.rstrip("\r") for line in (lines if lines[-1] else lines[:-1])]


def _table(path: Path) -> Iterator[tuple[str, dict[str, str]]]:
    form: dict[str, Any] = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if path.suffix == ".tsv" else {}
    reader = csv.reader((line + "\n" for line in lines(path)), strict=True, **form)
    header: list[str] = []
    try:
        for row in filter(None, reader):
            if header and len(row) != len(header):
                raise ValueError(f"{path}:{reader.line_num}: {len(row)} fields, {len(header)} expected")
            if header:
                yield f"{path}:{reader.line_num}", dict(zip(header, row, strict=True))
            header = header or _distinct(row, f"{path}:{reader.line_num}")
    except csv.Error as error:
        raise ValueError(f"{path}:{reader.line_num}: {error}") from error


def _distinct(header: list[str], where: str) -> list[str]:
    if repeated := [name for name, n in Counter(header).items() if name and n > 1]:
        raise ValueError(f"{where}: {len(header)} columns, among them {', '.join(repeated)} more than once")
    return header


def _objects(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in ((i, line) for i, line in enumerate(lines(path), 1) if line.strip()):
        try:
            row = json.loads(line)
            json.dumps(row, ensure_ascii=False).encode()  # half a surrogate pair is no text
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}:{number}: not a JSON object: {error}") from error
        if not isinstance(row, dict):
            raise ValueError(f"{path}:{number}: not a JSON object: {line:.50}")
        yield f"{path}:{number}", row

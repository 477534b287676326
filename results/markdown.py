"""Markdown for the conclusions in pages: paragraphs and lists, tables, phrases."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence


def text(given: str) -> str:
    """Paragraphs and items in lines of at most 130 columns; a blank line or "- " starts one, tables stay."""
    parts = re.split(r"\n\s*\n|\n(?=\s*- )", given.strip())
    shaped = [part if part.startswith("| ") else filled(" ".join(part.split())) for part in parts]
    return re.sub(r"\n\n(?=- )", "\n", "\n\n".join(shaped)).replace("|\n- ", "|\n\n- ")


def filled(part: str) -> str:
    """One paragraph or item in lines."""
    indent = "  " if part.startswith("- ") else ""
    return textwrap.fill(part, 130, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False)


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table of cells."""
    first, *rest = (
        "|".join(["", *(f" {cell} " if cell else " " for cell in cells), ""]) for cells in [head, *lines]
    )
    return "\n".join([first, "|" + "---|" * len(head), *rest])


def listed(names: Iterable[str], none: str = "none") -> str:
    """Names as a phrase; `none` for no names."""
    *first, last = [*names] or [none]
    return f"{', '.join(first)} and {last}" if first else last

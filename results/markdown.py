"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table of cells."""
    first, *rest = (
        "|".join(["", *(f" {cell} " if cell else " " for cell in cells), ""]) for cells in [head, *lines]
    )
    return "\n".join([first, "|" + "---|" * len(head), *rest])

"""What a caller gives, in the one form that is used here: lists of texts, paths."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Set
from typing import Any


def texts(given: Iterable[str], what: str = "sentence") -> list[str]:
    """Any iterable of texts as a list. Raises ValueError as `listed`, and for what is no text, by its row."""
    every = listed(given, what)
    for row, text in enumerate(every):
        if not isinstance(text, str):
            raise ValueError(f"{what} {row} is {type(text).__name__} {text!r:.50}, not a text")
    return every


def listed(given: Iterable[Any], what: str) -> list[Any]:
    """Any iterable as a list. Raises ValueError for one text, a table or a set: its items are not meant."""
    one = isinstance(given, str | bytes | os.PathLike | Mapping | Set)
    if one or hasattr(given, "columns") or not hasattr(given, "__iter__"):
        kind = type(given).__name__
        raise ValueError(f"{what}s={kind} is no list of texts: give [one, two, ...], or a column")
    return list(given)


def expanded(path: str | os.PathLike[str]) -> str:
    """A path or name as text, with the home directory in place of ~ and the values of $VARIABLES.

    What exists is taken literally.
    """
    text = os.fsdecode(path)
    return text if os.path.exists(text) else os.path.expanduser(os.path.expandvars(text))

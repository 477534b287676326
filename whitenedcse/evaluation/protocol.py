"""A protocol: how a paper judged, as data: text handling, aggregation, and the rows of its table.

[1] BERT-whitening, arXiv:2103.15316    [2] WhiteningBERT, arXiv:2104.01767
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

from whitenedcse.data.sources import located
from whitenedcse.evaluation.correlation import MEANS
from whitenedcse.evaluation.postprocess import Postprocess
from whitenedcse.evaluation.tasks import CASES, OWN


@dataclass(frozen=True)
class Row:
    """A line of a table: which vectors, and which map fitted on what.

    pooling, layers: None where the model says them itself. map: settings of `Postprocess`, None for none.
    fit: "target", "year", or a corpus by name or path.
    """

    name: str
    pooling: str | None = None
    layers: Sequence[int] = (-1,)
    map: Mapping[str, Any] | None = None
    fit: str = ""

    @property
    def maker(self) -> Callable[[], Postprocess] | None:
        """Makes the map, to be fitted; None where there is none."""
        return None if self.map is None else partial(Postprocess, **self.map)


@dataclass(frozen=True)
class Protocol:
    """How to judge. Every number is printed in `headline`, one of all, mean, wmean; all three are kept.

    case: of all text, one of tasks.CASES. max_length: tokens, None for the encoder's own.
    extra: what a mean over tokens divides by, beyond their number; [2]'s code has 0.01. rows: mappings of
    `Row`'s fields.
    """

    name: str
    headline: str
    case: str
    max_length: int | None
    extra: float
    rows: Sequence[Mapping[str, Any]]
    lines: tuple[Row, ...] = field(init=False)

    def __post_init__(self) -> None:
        if self.headline not in MEANS:
            raise ValueError(f"protocol.headline={self.headline!r} is not one of {', '.join(MEANS)}")
        if self.case not in CASES:
            raise ValueError(f"protocol.case={self.case!r} is not one of {', '.join(CASES)}")
        if not (self.max_length is None or self.max_length > 0) or not 0 <= self.extra < math.inf:
            raise ValueError(
                f"protocol.max_length={self.max_length} must be above 0 or null, and "
                f"protocol.extra={self.extra} finite and 0 or more"
            )
        if not self.rows:
            raise ValueError("protocol.rows=[] asks for nothing; one row is e.g. {name: as it is}")
        object.__setattr__(self, "lines", tuple(_row(row) for row in self.rows))
        for maker in filter(None, (row.maker for row in self.lines)):
            maker()  # raises for settings that no map has


def _row(settings: Mapping[str, Any]) -> Row:
    known = [field.name for field in fields(Row)]
    if not isinstance(settings, Mapping) or "name" not in settings or set(settings) - set(known):
        raise ValueError(
            f"protocol.rows: {settings} must have a name, and of {', '.join(known)} what it needs"
        )
    return Row(**settings)


def chosen(protocol: Protocol, settings: Mapping[str, Any] | None, fit: str) -> tuple[list[Row], list[str]]:
    """The rows to judge, one more for the map asked for; and a word on rows whose corpus is not here."""
    rows, skipped = [], []
    for row in protocol.lines:
        try:
            if row.fit and row.fit not in OWN:
                located(row.fit)
        except FileNotFoundError as error:
            skipped.append(f"left out {row.name!r}: {error}")
        else:
            rows.append(row)
    if settings:
        k = "" if settings.get("k") is None else f"-{settings['k']}"
        rows.append(Row(f"{settings['kind']}{k} ({fit})", map=settings, fit=fit))
    return rows, skipped

"""How a paper evaluates, as data: text handling, aggregation, and the rows of its table.

[1] WhiteningBERT, arXiv:2104.01767
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from whitenedcse.data.sources import CORPORA, located
from whitenedcse.evaluation.postprocess import Postprocess
from whitenedcse.evaluation.scores import MEANS
from whitenedcse.evaluation.tasks import CASES, OWN


@dataclass(frozen=True)
class Row:
    """A row of a table: which vectors, and which transform, fitted to what.

    pooling, layers: None where the model defines them. map: settings of `Postprocess`, None for no transform.
    fit: "target", "year", or a corpus by name or path; "" for nothing, as with a prefix, which is not fitted.
    choose: a task of scored pairs, or a file of them, that chooses pooling, layers and map of the encoder's
    readout.
    """

    name: str
    pooling: str | None = None
    layers: Sequence[int] = (-1,)
    map: Mapping[str, Any] | None = None
    fit: str = ""
    choose: str = ""

    def __post_init__(self) -> None:
        if self.map and not self.fit and self.map.get("kind") != "prefix":
            raise ValueError(
                f"protocol.rows: {self.name!r} lacks what its transform is fitted to, as fit: target"
            )
        if self.maker:
            self.maker()  # raises for settings that no transform has

    @property
    def maker(self) -> Callable[[], Postprocess] | None:
        """A function that makes the transform, not yet fitted; None where there is none."""
        return None if self.map is None else partial(Postprocess, **self.map)


@dataclass(frozen=True)
class Protocol:
    """How to evaluate.

    headline: the aggregation that is printed, one of all, mean, wmean; all three are kept. case: of all
    texts, one of tasks.CASES. max_length: in tokens, None for the encoder's own limit. extra: what a mean
    over tokens divides by, in addition to their number; the code of [1] has 0.01. rows: mappings of `Row`'s
    fields.
    """

    name: str
    headline: str
    case: str
    max_length: int | None
    extra: float
    rows: Sequence[Mapping[str, Any]]

    @property
    def facts(self) -> dict[str, Any]:
        """What scores.json says of it."""
        own = {name: getattr(self, name) for name in ("headline", "case", "max_length", "extra")}
        return {"protocol": self.name, **own}

    def __post_init__(self) -> None:
        for name, known in {"headline": MEANS, "case": CASES}.items():
            if getattr(self, name) not in known:
                raise ValueError(f"protocol.{name}={getattr(self, name)!r} is not one of {', '.join(known)}")


def setting(on: str) -> str:
    """ "transductive" for a transform fitted to the test's own sentences, else "inductive"; "" for none."""
    if not on:
        return ""
    return "transductive" if on in OWN else "inductive"


def whole(settings: Mapping[str, Any]) -> bool:
    """Whether a transform whitens and keeps all components, so that any number of them can be taken."""
    return settings.get("kind") == "whitening" and settings.get("k") is None


def particular(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Those settings of a transform, beside its kind and k, that are not the defaults of `Postprocess`."""
    usual = {f.name: f.default for f in fields(Postprocess) if f.name not in ("kind", "k")}
    return {name: value for name, value in settings.items() if value != usual.get(name, value)}


def chosen(
    protocol: Protocol, settings: Mapping[str, Any] | None, fit: str, *, curve: bool = False
) -> tuple[list[Row], list[str]]:
    """The rows to evaluate, the transform asked for last, and a line for each row left out without corpus.

    curve: a figure shows every number of components, so one row at least has a whitening that is `whole`.
    """
    every, rows, skipped = [Row(**row) for row in protocol.rows], list[Row](), []
    for row in every:
        if missing := absent(row.fit):
            skipped.append(f"left out {row.name!r}: {missing}")
        elif row not in rows:  # fit=target makes rows on NLI those on the task
            rows.append(row)
    rows += [transformed(settings, fit, every)] if settings else []
    if curve and not any(whole(row.map or {}) for row in rows):
        rows.append(transformed({"kind": "whitening"}, fit, every))
    return rows, skipped


def absent(fit: str) -> str:
    """Why a corpus that is known by name, such as nli, is not here; "" where it is, or the tasks' own."""
    try:
        if fit and fit not in OWN:
            located(fit)
    except FileNotFoundError as error:
        if fit not in CORPORA:
            raise
        return str(error)
    return ""


def transformed(settings: Mapping[str, Any], fit: str, others: Sequence[Row]) -> Row:
    """The row of a transform that a user asks for, named after it and what it is fitted to, if anything.

    Where all rows of the protocol have poolings of their own, it has that of the last of these `others`.
    """
    own: dict[str, Any] = {}
    before = ""
    if all(row.pooling for row in others):
        own = {"pooling": others[-1].pooling, "layers": others[-1].layers}
        plain = [row.name for row in others if not row.map and (row.pooling, row.layers) == (*own.values(),)]
        before = f"{plain[0]} " if plain else ""
    name = settings["kind"] + ("" if settings.get("k") is None else f"-{settings['k']}")
    name += "".join(f" {key}={value}" for key, value in particular(settings).items())
    if name.startswith("prefix"):
        return Row(before + name, map=settings, **own)
    return Row(f"{before}{name} ({fit})", map=settings, fit=fit, **own)

"""Tasks by name, the sentences that a transform for one is fitted to, and the protocols of the papers.

A protocol is how a paper evaluates, as data: text handling, aggregation, and the rows of its table.

[1] BERT-whitening, arXiv:2103.15316    [2] WhiteningBERT, arXiv:2104.01767
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from whitenedcse.data.corpus import read, sampled
from whitenedcse.data.files import NAMED, records, suffix
from whitenedcse.data.sources import CORPORA, RTE, located, named, roots, senteval
from whitenedcse.evaluation import sts, transfer
from whitenedcse.evaluation.postprocess import Postprocess
from whitenedcse.evaluation.sts import MEANS, TASKS, Subset
from whitenedcse.evaluation.transfer import TRANSFER, Labelled

Task = list[Subset] | Labelled
OWN = ("target", "year")  # fitted to sentences of the task itself: transductive
CASES = ("as_is", "lower", "lower_but_sick")  # the last is that of WhiteningBERT's files


def subsets(name: str) -> list[Subset]:
    """The scored pairs of a task, of a bundled set (quickstart/dev, quickstart/test), or of a user's files.

    These are one file of pairs, or a folder of such files, each a subset of the task; see `with_columns`.
    Raises FileNotFoundError naming what was searched for, and where.
    """
    if name in TASKS:
        return sts.read(name, senteval())
    place, columns = with_columns(name)
    if columns and len(columns) != len(sts.COLUMNS):
        raise ValueError(f"{name}: scored pairs have three columns, as {place}:SENTENCE1:SENTENCE2:SCORE")
    parts = sorted(path for path in Path(place).glob("*") if suffix(path.name) in NAMED)
    return [sts.read_pairs(path, columns or sts.COLUMNS) for path in parts or [_file(place)]]


def with_columns(name: str) -> tuple[str, list[str]]:
    """A task's name or path, and the columns that are named after it, as in PATH:LEFT:RIGHT:SCORE.

    Three are those of two sentences and a score, whatever it is called, two those of a text and its label;
    none: the usual ones. What exists is a path, colons and all.
    """
    for number in (0, 3, 2):
        place, *columns = name.rsplit(":", number)
        if len(columns) == number and (Path(place).is_dir() or any(path.is_file() for path in _paths(place))):
            return place, columns
    return name, []


def task(name: str, case: str = "as_is") -> Task:
    """Scored pairs or labelled texts, by name or from a file, which has a column "score" or "label".

    case: one of CASES; it makes no difference to an uncased encoder. Raises FileNotFoundError for no such
    task.
    """
    place, columns = with_columns(name)
    if name in TRANSFER:
        content: Task = transfer.read(name, _rte() if name == "RTE" else senteval())
    elif name not in TASKS and not Path(place).is_dir() and (len(columns) == 2 or _labelled(place, columns)):
        content = transfer.read_labelled(_file(place), columns)
    else:
        content = subsets(name)
    kept = case == "as_is" or (case == "lower_but_sick" and name.startswith("SICK"))
    return content if kept else _lower(content)


def _labelled(place: str, columns: Sequence[str]) -> bool:
    """Whether a file whose columns are not named has one of labels."""
    return not columns and "label" in next((row for _, row in records(_file(place))), {})


def _paths(name: str) -> list[Path]:
    return [Path(name), *(root / f"{name}{kind}" for root in roots() for kind in NAMED)]


def _file(name: str) -> Path:
    for path in _paths(name):
        if path.is_file():
            return path
    known = (*TASKS, *TRANSFER)
    near = "".join(f", such as {task}" for task in get_close_matches(name, known, 1))
    what = "" if "/" in name or suffix(name) in NAMED else f"none of {', '.join(known)}{near}, and "
    folders = f"file in {' or '.join(map(str, (Path.cwd(), *roots())))}"
    raise FileNotFoundError(
        f"no task {name!r}: {what}no {'such file' if Path(name).is_absolute() else folders}; after a file"
        " the names of its columns may follow, as FILE:SENTENCE1:SENTENCE2:SCORE or FILE:TEXT:LABEL"
    )


def _rte() -> Path:
    candidates = [root / RTE for root in roots()]
    for path in candidates:
        if path.is_file():
            return path
    raise FileNotFoundError(
        f"RTE: GLUE's dev.tsv is at none of {', '.join(map(str, candidates))}; put it there"
    )


def _lower(task: Task) -> Task:
    if isinstance(task, Labelled):
        return task._replace(columns=tuple([text.lower() for text in column] for column in task.columns))
    sides = [[[text.lower() for text in side] for side in (s.left, s.right)] for s in task]
    return [s._replace(left=left, right=right) for s, (left, right) in zip(task, sides, strict=True)]


def texts(task: Task) -> list[str]:
    """Every text of a task as often as it occurs, first one side, then the other."""
    if isinstance(task, Labelled):
        return list(chain.from_iterable(task.columns))
    return [text for s in task for side in (s.left, s.right) for text in side]


def setting(on: str) -> str:
    """ "transductive" for a transform fitted to the test's own sentences, else "inductive"; "" for none."""
    return "" if not on else "transductive" if on in OWN else "inductive"


def own_texts(on: str, name: str, case: str = "as_is") -> list[str]:
    """The sentences of a task that its transform is fitted to, repeated as they occur.

    on: "year" for the task's own pairs, as WhiteningBERT does; "target" for these and its train and dev
    parts, as BERT-whitening does.
    """
    whole = name.split("/")[0]
    parts = [part for part in TASKS if part.split("/")[0] == whole] if on == "target" else []
    return [text for part in dict.fromkeys((name, *parts)) for text in texts(task(part, case))]


def short(names: Iterable[str]) -> list[str]:
    """The names of tasks as headings: of a file without folders and columns, where all then differ.

    >>> short(["STS-B", "tests/of/medicine.tsv:left:right:score"])
    ['STS-B', 'medicine.tsv']
    """
    whole = list(names)
    last = [Path(name).name.partition(":")[0] if Path(name).suffix else name for name in whole]
    return last if len(set(last)) == len(last) else whole


def corpus_texts(
    corpus: str, columns: Sequence[str] = (), sample: int | None = None, among: int | None = None
) -> list[str]:
    """All sentences in `sample` rows of a corpus by name, path or hub id; None for all rows.

    among: the size of a first sample, as of training, from which the rows are drawn; None for all rows.
    """
    first = sample if among is None else among
    drawn, _ = read(named(corpus, columns, first))
    return list(chain.from_iterable(drawn if sample == first or sample is None else sampled(drawn, sample)))


@dataclass(frozen=True)
class Row:
    """A row of a table: which vectors, and which transform, fitted to what.

    pooling, layers: None where the model defines them. map: settings of `Postprocess`, None for no transform.
    fit: "target", "year", or a corpus by name or path; "" for nothing, as with a prefix, which is not fitted.
    """

    name: str
    pooling: str | None = None
    layers: Sequence[int] = (-1,)
    map: Mapping[str, Any] | None = None
    fit: str = ""

    @property
    def maker(self) -> Callable[[], Postprocess] | None:
        """A function that makes the transform, not yet fitted; None where there is none."""
        return None if self.map is None else partial(Postprocess, **self.map)


@dataclass(frozen=True)
class Protocol:
    """How to evaluate.

    headline: the aggregation that is printed, one of all, mean, wmean; all three are kept. case: of all
    texts, one of tasks.CASES. max_length: in tokens, None for the encoder's own limit. extra: what a mean
    over tokens divides by, in addition to their number; the code of [2] has 0.01. rows: mappings of `Row`'s
    fields. Raises ValueError for anything else.
    """

    name: str
    headline: str
    case: str
    max_length: int | None
    extra: float
    rows: Sequence[Mapping[str, Any]]
    lines: tuple[Row, ...] = field(init=False)

    @property
    def facts(self) -> dict[str, Any]:
        """What scores.json says of it."""
        own = {name: getattr(self, name) for name in ("headline", "case", "max_length", "extra")}
        return {"protocol": self.name, **own}

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
            raise ValueError("protocol.rows=[] evaluates nothing; one row is e.g. {name: as it is}")
        object.__setattr__(self, "lines", tuple(_row(row) for row in self.rows))
        for maker in filter(None, (row.maker for row in self.lines)):
            maker()  # raises for settings that no transform has


def _row(settings: Mapping[str, Any]) -> Row:
    known = [field.name for field in fields(Row)]
    if not isinstance(settings, Mapping) or "name" not in settings or set(settings) - set(known):
        raise ValueError(f"protocol.rows: {settings} must have a name and no keys but {', '.join(known)}")
    row = Row(**settings)
    if row.map and not row.fit and row.map.get("kind") != "prefix":
        raise ValueError(f"protocol.rows: {row.name!r} lacks what its transform is fitted to, as fit: target")
    return row


def whole(settings: Mapping[str, Any]) -> bool:
    """Whether a transform whitens and keeps all components, so that any number of them can be taken."""
    return settings.get("kind") == "whitening" and settings.get("k") is None


def particular(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Those settings of a transform, beside its kind and k, that are not the defaults of `Postprocess`.

    >>> particular({"kind": "zca", "shrinkage": 0.1, "power": 0.5})
    {'shrinkage': 0.1}
    """
    usual = {f.name: f.default for f in fields(Postprocess) if f.name not in ("kind", "k")}
    return {name: value for name, value in settings.items() if value != usual.get(name, value)}


def chosen(
    protocol: Protocol, settings: Mapping[str, Any] | None, fit: str, *, curve: bool = False
) -> tuple[list[Row], list[str]]:
    """The rows to evaluate, the transform asked for last, and a line for each row left out without corpus.

    Only a row on a corpus that is known by name, such as nli, is left out; a missing file is refused.
    curve: a figure shows every number of components, so one row at least has a whitening that is `whole`.
    """
    rows, skipped = [], []
    for row in protocol.lines:
        if missing := absent(row.fit):
            skipped.append(f"left out {row.name!r}: {missing}")
        elif row not in rows:  # fit=target makes rows on NLI those on the task
            rows.append(row)
    rows += [transformed(settings, fit, protocol.lines)] if settings else []
    if curve and not any(whole(row.map or {}) for row in rows):
        rows.append(transformed({"kind": "whitening"}, fit, protocol.lines))
    return rows, skipped


def absent(fit: str) -> str:
    """Why a corpus that is known by name, such as nli, is not here; "" where it is, and for the task's own.

    Raises FileNotFoundError for any other name without a file: it is a mistake of the user's.
    """
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

    others: the rows of the protocol. Where all have poolings of their own, the new row has that of the last,
    and its name begins with that of the row with this pooling and no transform.
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

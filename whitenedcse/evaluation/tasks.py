"""Tasks by name, and the sentences that a map for one of them is fitted to."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from whitenedcse.data.corpus import LONGEST, read
from whitenedcse.data.files import NAMED, rows, suffix
from whitenedcse.data.sources import RTE, named, roots, senteval
from whitenedcse.evaluation import sts, transfer
from whitenedcse.evaluation.sts import TASKS, Subset
from whitenedcse.evaluation.transfer import TRANSFER, Labelled

Task = list[Subset] | Labelled
OWN = ("target", "year")  # fitted to sentences of the task itself: transductive
CASES = ("as_is", "lower", "lower_but_sick")  # the last is that of WhiteningBERT's files


def subsets(name: str) -> list[Subset]:
    """The scored pairs of a task, of a bundled set (quickstart/dev, quickstart/test), or of your own.

    Your own are a file of pairs, or a folder of such files, each a subset of the task. Raises
    FileNotFoundError naming what was looked for, and where.
    """
    if name in TASKS:
        return sts.read(name, senteval())
    parts = sorted(path for path in Path(name).glob("*") if suffix(path.name) in NAMED)
    return [sts.read_pairs(path) for path in parts or [_file(name)]]


def task(name: str, case: str = "as_is") -> Task:
    """Scored pairs or labelled texts by name, or from a file, which has a column score or label.

    case: one of CASES. An uncased encoder sees no difference.
    """
    if name in TRANSFER:
        found: Task = transfer.read(name, _rte() if name == "RTE" else senteval())
    elif name not in TASKS and not Path(name).is_dir() and "label" in _first(name):
        found = transfer.read_labelled(_file(name))
    else:
        found = subsets(name)
    kept = case == "as_is" or (case == "lower_but_sick" and name.startswith("SICK"))
    return found if kept else _lower(found)


def _first(name: str) -> dict[str, Any]:
    return next((row for _, row in rows(_file(name))), {})


def _file(name: str) -> Path:
    candidates = [Path(name), *(root / f"{name}{kind}" for root in roots() for kind in NAMED)]
    for path in candidates:
        if path.is_file():
            return path
    known, looked = ", ".join((*TASKS, *TRANSFER)), ", ".join(map(str, candidates))
    raise FileNotFoundError(f"no task {name!r}: neither a known one ({known}) nor a file ({looked})")


def _rte() -> Path:
    places = [root / RTE for root in roots()]
    for path in places:
        if path.is_file():
            return path
    raise FileNotFoundError(f"RTE: GLUE's dev.tsv is at none of {', '.join(map(str, places))}; put it there")


def _lower(found: Task) -> Task:
    if isinstance(found, Labelled):
        return found._replace(columns=tuple([text.lower() for text in column] for column in found.columns))
    sides = [[[text.lower() for text in side] for side in (s.left, s.right)] for s in found]
    return [s._replace(left=left, right=right) for s, (left, right) in zip(found, sides, strict=True)]


def texts(found: Task) -> list[str]:
    """Every text of a task as often as it occurs, one side after the other."""
    if isinstance(found, Labelled):
        return list(chain.from_iterable(found.columns))
    return [text for s in found for side in (s.left, s.right) for text in side]


def setting(on: str) -> str:
    """Whether a map fitted `on` that sees the test's own sentences: a label that no table leaves out."""
    return "" if not on else "transductive" if on in OWN else "inductive"


def own_texts(on: str, name: str, case: str = "as_is") -> list[str]:
    """The sentences of a task that a map for it is fitted to, repeated as they occur.

    on: "year", the task's own pairs, as WhiteningBERT; "target", these and its train and dev parts, as
    BERT-whitening.
    """
    whole = name.split("/")[0]
    parts = [part for part in TASKS if part.split("/")[0] == whole] if on == "target" else []
    return [text for part in dict.fromkeys((name, *parts)) for text in texts(task(part, case))]


def corpus_texts(corpus: str, columns: Sequence[str] = (), sample: int | None = None) -> list[str]:
    """`sample` rows of a corpus by name, path or hub id, all their columns; None for all rows."""
    drawn, _ = read(named(corpus, columns, sample), longest=LONGEST)
    return list(chain.from_iterable(drawn))

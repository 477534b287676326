"""Transfer tasks: labelled texts from SentEval's files, from GLUE's RTE or from a user's, and their accuracy.

n: texts or pairs    d: width    f: features

[1] Conneau and Kiela, SentEval, arXiv:1803.05449    [2] Huang et al., WhiteningBERT (2021)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from whitenedcse.data.files import fields, lines, listed
from whitenedcse.evaluation.classifiers import FOLDS, Classify

SPLITS = ("train", "dev", "test")
EMPTY = "."  # stands for an empty line, of which CR has 4 and MPQA 3, as in the examples of [1]


class Part(NamedTuple):
    """A file of a task: its published number of rows, and the label or split that all its rows share."""

    file: str
    rows: int
    split: str = ""
    label: str = ""


class Task(NamedTuple):
    """Where the texts of a benchmark are in SentEval's layout [1].

    texts, label: columns of a line, split by str.split(*cut); label None: the file gives the label, the line
    is the text. header: lines before the first row. classes: names of the labels 0, 1, ...
    """

    parts: tuple[Part, ...]
    classes: tuple[str, ...]
    texts: tuple[int, ...] = (0,)
    label: int | None = None
    cut: tuple[str, int] = ("\t", -1)
    header: int = 0
    encoding: str = "utf-8"


class Labelled(NamedTuple):
    """n labelled rows: one or two columns of texts, and labels (n,) int64 as indices of classes.

    split: (n,) of "train", "dev" and "test", or None for ten-fold cross-validation.
    """

    name: str
    columns: tuple[list[str], ...]
    labels: NDArray[np.int64]
    classes: list[str]
    split: NDArray[np.str_] | None

    @property
    def gold(self) -> NDArray[np.int64]:
        """The labels of the rows that are tested: all of them, or those of the test split."""
        return self.labels if self.split is None else self.labels[self.split == "test"]


class _Row(NamedTuple):
    where: str
    texts: tuple[str, ...]
    label: str
    split: str

    @property
    def words(self) -> tuple[int, ...]:
        return tuple(len(text.split()) for text in self.texts)


def _sides(one: str, n1: int, zero: str, n0: int) -> tuple[Part, ...]:
    return Part(one, n1, label="1"), Part(zero, n0, label="0")


def _splits(prefix: str, **files: tuple[str, int]) -> tuple[Part, ...]:
    return tuple(Part(f"{prefix}{file}", n, split) for split, (file, n) in files.items())


_SST2 = _splits("SST/binary/sentiment-", train=("train", 67349), dev=("dev", 872), test=("test", 1821))
_POLARITY = ("negative", "positive")
TRANSFER = {
    "MR": Task(_sides("MR/rt-polarity.pos", 5331, "MR/rt-polarity.neg", 5331), _POLARITY),
    "CR": Task(_sides("CR/custrev.pos", 2407, "CR/custrev.neg", 1368), _POLARITY),
    "SUBJ": Task(  # [1] counts the objective as 1
        _sides("SUBJ/subj.objective", 5000, "SUBJ/subj.subjective", 5000), ("subjective", "objective")
    ),
    "MPQA": Task(_sides("MPQA/mpqa.pos", 3312, "MPQA/mpqa.neg", 7294), _POLARITY),
    "SST2": Task(_SST2, _POLARITY, label=1),
    "TREC": Task(
        _splits("TREC/", train=("train_5500.label", 5452), test=("TREC_10.label", 500)),
        ("ABBR", "DESC", "ENTY", "HUM", "LOC", "NUM"),
        texts=(1,),
        label=0,
        cut=(" ", 1),
        encoding="latin-1",
    ),
    "MRPC": Task(
        _splits("MRPC/msr_paraphrase_", train=("train.txt", 4076), test=("test.txt", 1725)),
        ("different", "paraphrase"),
        texts=(3, 4),
        label=0,
        header=1,
    ),
    "RTE": Task((Part("", 277),), ("entailment", "not_entailment"), texts=(0, 1), label=2, header=1),
}


def read(name: str, folder: Path) -> Labelled:
    """The rows of one of TRANSFER, from SentEval's downstream `folder`, or for RTE from GLUE's dev.tsv.

    A text is its words joined by single spaces. Rows are ordered as [1] orders them, by split, number of
    words and label, which decides the folds. Raises ValueError for a file with another number of rows than
    published.
    """
    if name not in TRANSFER:
        raise ValueError(f"no transfer task {name!r}; there are {', '.join(TRANSFER)}")
    task = TRANSFER[name]
    numbers = {text: i for i, kind in enumerate(task.classes) for text in (str(i), kind)}
    rows = [row for part in task.parts for row in _rows(task, part, folder / part.file)]
    for row in rows:
        if row.label not in numbers:
            raise ValueError(f"{row.where}: the label is {row.label!r}, not one of {', '.join(numbers)}")
    rows.sort(key=lambda row: (row.split != "train", row.split, *row.words, numbers[row.label]))
    return _labelled(name, rows, numbers, task.classes)


def _rows(task: Task, part: Part, path: Path) -> Iterator[_Row]:
    text = list(lines(path, task.encoding))[task.header :]
    if len(text) != part.rows:
        raise ValueError(
            f"{path}: {len(text)} rows, not the {part.rows} published; the file is damaged or of another set"
        )
    for number, line in enumerate(text, 1 + task.header):
        where = f"{path}:{number}"
        cells = [line] if task.label is None else line.split(*task.cut)
        if max(*task.texts, task.label or 0) >= len(cells):
            raise ValueError(f"{where}: {len(cells)} fields are too few")
        label = part.label if task.label is None else cells[task.label].split(":")[0].strip()
        yield _Row(where, tuple(" ".join(cells[i].split()) for i in task.texts), label, part.split)


def _labelled(
    name: str, rows: Sequence[_Row], numbers: Mapping[str, int], classes: Sequence[str]
) -> Labelled:
    columns = tuple(
        [text or EMPTY for text in column] for column in zip(*(r.texts for r in rows), strict=True)
    )
    labels = np.array([numbers[row.label] for row in rows], np.int64)
    split = np.array([row.split for row in rows]) if rows[0].split else None
    return Labelled(name, columns, labels, list(classes), split)


def read_labelled(path: Path, columns: Sequence[str] = ()) -> Labelled:
    """The rows of a user's .tsv, .csv or .jsonl file with texts and labels.

    It has columns text, or sentence1 and sentence2, and label; others are ignored. columns: those of text and
    label, where they have other names. With a column split, of train, dev and test, the test rows are
    predicted; without, all rows in ten folds. Rows keep their order, classes are sorted by name.
    """
    named = dict(zip(("text", "label"), columns, strict=True)) if columns else {}
    rows = [_own(where, row) for where, row in fields(path, named)]
    for row in rows:
        if (len(row.texts), not row.split) != (len(rows[0].texts), not rows[0].split):
            raise ValueError(f"{row.where}: other columns than in {rows[0].where}")
    classes = sorted({row.label for row in rows})
    if len(classes) < 2:
        raise ValueError(
            f"{path}: {len(classes)} classes ({', '.join(classes)}); a classifier needs two or more"
        )
    task = _labelled(path.stem, rows, {kind: i for i, kind in enumerate(classes)}, classes)
    _refuse_too_few(path, task)
    return task


def _own(where: str, row: Mapping[str, Any]) -> _Row:
    sides = ("text",) if "text" in row else ("sentence1", "sentence2")
    missing = [column for column in (*sides, "label") if column not in row]
    if missing:
        path = where.rpartition(":")[0]
        raise ValueError(
            f"{where}: no {', '.join(missing)} among {listed(list(row), path)}; name its columns with the "
            f"file, as {path}:TEXT:LABEL, or of scored pairs {path}:SENTENCE1:SENTENCE2:SCORE; pairs with a "
            "label have columns called sentence1, sentence2 and label"
        )
    texts = tuple(row[side] for side in sides)
    label, split = row["label"], row.get("split", "")
    if not all(isinstance(text, str) and text.strip() for text in texts):
        raise ValueError(f"{where}: an empty text, or none: {', '.join(map(repr, texts))}")
    if label is None or not str(label).strip():
        raise ValueError(f"{where}: the label is {label!r}")
    if "split" in row and split not in SPLITS:
        raise ValueError(f"{where}: the split is {split!r}, not one of {', '.join(SPLITS)}")
    return _Row(where, texts, str(label).strip(), split)


def _refuse_too_few(path: Path, task: Labelled) -> None:
    labels, need, why = task.labels, FOLDS + 2, "ten folds, with ten folds inside each"
    if task.split is not None:
        if not (task.split == "test").any():
            raise ValueError(f"{path}: its split column has no row with test")
        labels, need, why = labels[task.split == "train"], FOLDS, "ten folds of train, as there is no dev"
        if (task.split == "dev").any():
            need, why = 1, "a class needs an example"
    for kind, n in zip(task.classes, np.bincount(labels, minlength=len(task.classes)), strict=True):
        if n < need:
            said = f"{path}: class {kind!r} has {n} rows to train on; {why}, need {need}"
            raise ValueError(f"{said} (columns are FILE:TEXT:LABEL)")


def features(columns: Sequence[NDArray[Any]]) -> NDArray[np.float32]:
    """Features for a classifier: one column of vectors (n, d) unchanged; two, u and v, as |u - v|, u * v [1].

    Two columns (n, d) give (n, 2 d).
    """
    if len(columns) == 1:
        return np.asarray(columns[0], np.float32)
    u, v = (np.asarray(column, np.float32) for column in columns)
    return np.concatenate([np.abs(u - v), u * v], axis=1)


def accuracy(task: Labelled, x: NDArray[Any], classify: Classify) -> dict[str, Any]:
    """Accuracy x 100 over the n tested rows, and which were `correct`, (n,); x: (all rows, f).

    In ten folds every row is tested once; [1] averages the ten accuracies, rounded, which is within 0.01 for
    folds that differ by a row. dev: the accuracy that hyper-parameters were chosen by. f1: of class 1, for
    pairs.
    """
    if x.ndim != 2 or len(x) != len(task.labels) or not np.isfinite(x).all():
        raise ValueError(f"{task.name}: {len(task.labels)} finite rows of features expected, not {x.shape}")
    predicted, dev = classify(x, task.labels, task.split)
    gold = task.gold
    correct = predicted == gold
    scores = {"accuracy": 100 * float(correct.mean()), "dev": dev, "n": len(gold), "correct": correct}
    if len(task.columns) == len(task.classes) == 2:
        both = np.count_nonzero(correct & (gold == 1))
        scores["f1"] = 200 * int(both) / max(1, int(np.sum(gold) + np.sum(predicted)))
    return scores


def threshold(task: Labelled, cosines: NDArray[Any]) -> dict[str, Any]:
    """Accuracy of predicting entailment where the cosine (n,) is at least 0.5, without training: [2], A.2.

    majority: the accuracy of always predicting the larger class. confusion: counts by true, then by predicted
    class.
    """
    classes = list(TRANSFER["RTE"].classes)
    if task.classes != classes:
        raise ValueError(
            f"{task.name}: a threshold separates {', '.join(classes)}; not {', '.join(task.classes)}"
        )
    if cosines.shape != task.labels.shape or not np.isfinite(cosines).all():
        raise ValueError(f"{task.name}: {len(task.labels)} finite cosines expected; {cosines.shape} given")
    predicted = np.where(cosines >= 0.5, 0, 1)
    correct = predicted == task.labels
    table = np.bincount(2 * task.labels + predicted, minlength=4).reshape(2, 2).tolist()
    return {
        "accuracy": 100 * float(correct.mean()),
        "majority": 100 * float(np.bincount(task.labels).max()) / len(correct),
        "confusion": {g: dict(zip(classes, t, strict=True)) for g, t in zip(classes, table, strict=True)},
        "n": len(correct),
        "correct": correct,
    }

"""The tasks as data, and their texts: scored pairs and labelled texts, of the papers or from a user's files.

n: pairs, or texts

STS pairs and the transfer tasks are those of SentEval's files [1], RTE is GLUE's.

[1] Conneau and Kiela, SentEval, arXiv:1803.05449
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from whitenedcse.data.corpus import read, sampled
from whitenedcse.data.files import NAMED, blank, fields, hidden, lines, records, suffix
from whitenedcse.data.sources import RTE, named, roots, senteval
from whitenedcse.files import parsing
from whitenedcse.inputs import expanded

COLUMNS = ("sentence1", "sentence2", "score")
SCALE = (0.0, 5.0)  # of all STS tasks; SICK's scores begin at 1
SPLITS = ("train", "dev", "test")
EMPTY = "."  # stands for an empty line, of which CR has 4 and MPQA 3, as in the examples of [1]
OWN = ("target", "year")  # transforms fitted to sentences of the task itself: transductive
CURE = "put a whole copy there; whitenedcse data check compares it with the published one"
CASES = ("as_is", "lower", "lower_but_sick")  # the last is that of WhiteningBERT's files


class Subset(NamedTuple):
    """n scored pairs: sentences left[i] and right[i] with the score gold[i], (n,) float64.

    scale: the lowest and the highest score that there can be; None where only the scores tell.
    """

    name: str
    left: list[str]
    right: list[str]
    gold: NDArray[np.float64]
    scale: tuple[float, float] | None = None


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


Task = list[Subset] | Labelled


class PairFiles(NamedTuple):
    """Where the pairs of a benchmark are in SentEval's layout [1].

    text, gold: files in `folder`, {} standing for the name of a subset. columns: of the two sentences in
    `text` and of the score in `gold`. header: lines before the first pair.
    """

    folder: str
    text: str
    gold: str
    columns: tuple[int, int, int]
    header: int
    subsets: str


class LabelFile(NamedTuple):
    """A file of labelled texts: its published number of rows, and the label or split of all of them."""

    file: str
    rows: int
    split: str = ""
    label: str = ""


class LabelFiles(NamedTuple):
    """Where the texts of a benchmark are in SentEval's layout [1].

    texts, label: columns of a line, split by str.split(*cut); label None: the file gives the label, the line
    is the text. header: lines before the first row. classes: names of the labels 0, 1, ...
    """

    parts: tuple[LabelFile, ...]
    classes: tuple[str, ...]
    texts: tuple[int, ...] = (0,)
    label: int | None = None
    cut: tuple[str, int] = ("\t", -1)
    header: int = 0
    encoding: str = "utf-8"


_STS = ("STS.input.{}.txt", "STS.gs.{}.txt", (0, 1, 0), 0)
_STSB = ("sts-{}.csv", "sts-{}.csv", (5, 6, 4), 0)
_SICK = ("SICK_{}.txt", "SICK_{}.txt", (1, 2, 3), 1)
STS = {
    "STS12": PairFiles(
        "STS/STS12-en-test", *_STS, "MSRpar MSRvid SMTeuroparl surprise.OnWN surprise.SMTnews"
    ),
    "STS13": PairFiles("STS/STS13-en-test", *_STS, "FNWN headlines OnWN"),  # SMT's text is not distributed
    "STS14": PairFiles("STS/STS14-en-test", *_STS, "deft-forum deft-news headlines OnWN images tweet-news"),
    "STS15": PairFiles("STS/STS15-en-test", *_STS, "answers-forums answers-students belief headlines images"),
    "STS16": PairFiles(
        "STS/STS16-en-test", *_STS, "answer-answer headlines plagiarism postediting question-question"
    ),
    "STS-B": PairFiles("STS/STSBenchmark", *_STSB, "test"),
    "STS-B/dev": PairFiles("STS/STSBenchmark", *_STSB, "dev"),
    "STS-B/train": PairFiles("STS/STSBenchmark", *_STSB, "train"),
    "SICK-R": PairFiles("SICK", *_SICK, "test_annotated"),
    "SICK-R/dev": PairFiles("SICK", *_SICK, "trial"),
    "SICK-R/train": PairFiles("SICK", *_SICK, "train"),
}


def _polarity(positive: str, n1: int, negative: str, n0: int) -> tuple[LabelFile, ...]:
    return LabelFile(positive, n1, label="1"), LabelFile(negative, n0, label="0")


def _splits(prefix: str, **files: tuple[str, int]) -> tuple[LabelFile, ...]:
    return tuple(LabelFile(f"{prefix}{file}", n, split) for split, (file, n) in files.items())


_SST2 = _splits("SST/binary/sentiment-", train=("train", 67349), dev=("dev", 872), test=("test", 1821))
_TREC = _splits("TREC/", train=("train_5500.label", 5452), test=("TREC_10.label", 500))
_MRPC = _splits("MRPC/msr_paraphrase_", train=("train.txt", 4076), test=("test.txt", 1725))
_SIGNS = ("negative", "positive")
TRANSFER = {
    "MR": LabelFiles(_polarity("MR/rt-polarity.pos", 5331, "MR/rt-polarity.neg", 5331), _SIGNS),
    "CR": LabelFiles(_polarity("CR/custrev.pos", 2407, "CR/custrev.neg", 1368), _SIGNS),
    "SUBJ": LabelFiles(  # [1] counts the objective as 1
        _polarity("SUBJ/subj.objective", 5000, "SUBJ/subj.subjective", 5000), ("subjective", "objective")
    ),
    "MPQA": LabelFiles(_polarity("MPQA/mpqa.pos", 3312, "MPQA/mpqa.neg", 7294), _SIGNS),
    "SST2": LabelFiles(_SST2, _SIGNS, label=1),
    "TREC": LabelFiles(
        _TREC,
        ("ABBR", "DESC", "ENTY", "HUM", "LOC", "NUM"),
        texts=(1,),
        label=0,
        cut=(" ", 1),
        encoding="latin-1",
    ),
    "MRPC": LabelFiles(_MRPC, ("different", "paraphrase"), texts=(3, 4), label=0, header=1),
    "RTE": LabelFiles(
        (LabelFile("", 277),), ("entailment", "not_entailment"), texts=(0, 1), label=2, header=1
    ),
}


# a task by its name


def task(name: str, case: str = "as_is") -> Task:
    """Scored pairs or labelled texts, by name or from a file, which has a column "score" or "label"."""
    place, columns = with_columns(name)
    if name in TRANSFER:
        content: Task = benchmark_labels(name, _rte() if name == "RTE" else senteval())
    elif name in STS or Path(place).is_dir():
        content = subsets(name)
    elif len(columns) == 2 or _labelled(place, columns):
        content = labels_of(_file(place), columns)
    else:
        content = subsets(name)
    kept = case == "as_is" or (case == "lower_but_sick" and name.startswith("SICK"))
    return content if kept else _lower(content)


def subsets(name: str) -> list[Subset]:
    """The scored pairs of a task, of a bundled set (quickstart/dev, quickstart/test), or of a user's files.

    These are one file of pairs, or a folder of such files, each a subset of the task; see `with_columns`.
    """
    if name in STS:
        return benchmark_pairs(name, senteval())
    place, columns = with_columns(name)
    if columns and len(columns) != len(COLUMNS):
        raise ValueError(f"{name}: scored pairs have three columns, as {place}:SENTENCE1:SENTENCE2:SCORE")
    there = (path for path in Path(place).glob("*") if not hidden(path.name))
    parts = sorted(path for path in there if suffix(path.name) in NAMED)
    return [pairs_of(path, columns or COLUMNS) for path in parts or [_file(place)]]


def with_columns(name: str) -> tuple[str, list[str]]:
    """A task's name or path, and the columns that are named after it, as in PATH:LEFT:RIGHT:SCORE.

    Three are those of two sentences and a score, whatever it is called, two those of a text and its label;
    none: the usual ones. What exists is a path, colons and all.
    """
    name = expanded(name)
    for number in (0, 3, 2):
        place, *columns = name.rsplit(":", number)
        if len(columns) == number and (Path(place).is_dir() or any(path.is_file() for path in _paths(place))):
            return place, columns
    return name, []


def _labelled(place: str, columns: Sequence[str]) -> bool:
    first = next((row for _, row in records(_file(place))), {})
    return not columns and "label" in first and not {"sentence1", "sentence2", "score"} <= first.keys()


def _paths(name: str) -> list[Path]:
    return [Path(name), *(root / f"{name}{kind}" for root in roots() for kind in NAMED)]


def _file(name: str) -> Path:
    for path in _paths(name):
        if path.is_file():
            return path
    raise FileNotFoundError(
        f"no task {name!r}: none of {', '.join((*STS, *TRANSFER))}, and no file in {Path.cwd()} or"
        f" {' or '.join(map(str, roots()))}; after a file the names of its columns may follow, as"
        " FILE:SENTENCE1:SENTENCE2:SCORE or FILE:TEXT:LABEL"
    )


def _rte() -> Path:
    places = [root / RTE for root in roots()]
    for path in places:
        if path.is_file():
            return path
    raise FileNotFoundError(f"RTE: GLUE's dev.tsv is at none of {', '.join(map(str, places))}; put it there")


def _lower(task: Task) -> Task:
    def lower(some: list[str]) -> list[str]:
        return [text.lower() for text in some]

    if isinstance(task, Labelled):
        return task._replace(columns=tuple(map(lower, task.columns)))
    return [s._replace(left=lower(s.left), right=lower(s.right)) for s in task]


def texts(task: Task) -> list[str]:
    """Every text of a task as often as it occurs, first one side, then the other."""
    if isinstance(task, Labelled):
        return list(chain.from_iterable(task.columns))
    return [text for s in task for side in (s.left, s.right) for text in side]


def own_texts(on: str, name: str, case: str = "as_is") -> list[str]:
    """The sentences of a task that its transform is fitted to, repeated as they occur.

    on: "year" for the task's own pairs, as WhiteningBERT does; "target" for these and the train and dev parts
    of a benchmark, as BERT-whitening does. A user's file is its own, whatever its folder is called.
    """
    whole = name.split("/")[0]
    parts = [part for part in STS if part.split("/")[0] == whole] if on == "target" and name in STS else []
    return [text for part in dict.fromkeys((name, *parts)) for text in texts(task(part, case))]


def corpus_texts(
    corpus: str, columns: Sequence[str] = (), sample: int | None = None, among: int | None = None
) -> list[str]:
    """All sentences in `sample` rows of a corpus; among: of a first sample, as of training."""
    first = sample if among is None else among
    drawn, _ = read(named(corpus, columns, first))
    return list(chain.from_iterable(drawn if sample == first or sample is None else sampled(drawn, sample)))


def short(names: Iterable[str]) -> list[str]:
    """The names of tasks as headings: of a file without folders and columns, where all then differ."""
    whole = list(names)
    last = [Path(name).name.partition(":")[0] if Path(name).suffix else name for name in whole]
    return last if len(set(last)) == len(last) else whole


# scored pairs


def benchmark_pairs(name: str, folder: Path) -> list[Subset]:
    """The subsets of one of STS, from SentEval's downstream `folder`, without pairs of an empty gold line."""
    parts = STS[name].subsets.split()
    return [_subset(part, _scored_lines(STS[name], part, folder))._replace(scale=SCALE) for part in parts]


def _scored_lines(where: PairFiles, part: str, folder: Path) -> Iterator[tuple[str, dict[str, str]]]:
    text, gold = (folder / where.folder / file.format(part) for file in (where.text, where.gold))
    left, right, score = where.columns
    with parsing(text, CURE):
        for number, (pair, scored) in enumerate(zip(lines(text), lines(gold), strict=True), 1):
            if scored and number > where.header:
                texts = pair.split("\t")
                row = texts[left], texts[right], scored.split("\t")[score]
                yield f"{text}:{number}", dict(zip(COLUMNS, row, strict=True))


def pairs_of(path: Path, columns: Sequence[str] = COLUMNS) -> Subset:
    """The pairs in a user's .tsv, .csv or .jsonl file; columns: those of both sentences and of the score."""
    subset = _subset(path.stem, fields(path, dict(zip(COLUMNS, columns, strict=True))))
    if len(subset.gold) < 2:
        raise ValueError(f"{path}: {len(subset.gold)} pairs; a correlation needs at least 2")
    return subset


def _subset(name: str, scored: Iterable[tuple[str, Mapping[str, Any]]]) -> Subset:
    pairs = [_pair(where, row) for where, row in scored]
    left, right = [left for left, _, _ in pairs], [right for _, right, _ in pairs]
    return Subset(name, left, right, np.array([score for _, _, score in pairs], float))


def _pair(where: str, row: Mapping[str, Any]) -> tuple[str, str, float]:
    left, right, score = (row[column] for column in COLUMNS)
    if not all(isinstance(text, str) and not blank(text) for text in (left, right)):
        raise ValueError(f"{where}: {left!r}, {right!r} are not two sentences")
    with suppress(TypeError, ValueError):
        if math.isfinite(float(score)):
            return left, right, float(score)
    raise ValueError(f"{where}: the score is {score!r}, not a finite number (columns: FILE:LEFT:RIGHT:SCORE)")


# labelled texts


class _Row(NamedTuple):
    where: str
    texts: tuple[str, ...]
    label: str
    split: str


def benchmark_labels(name: str, folder: Path) -> Labelled:
    """The rows of one of TRANSFER, from SentEval's downstream `folder`, or for RTE from GLUE's dev.tsv.

    A text is its words joined by single spaces. Rows are ordered as [1] orders them, by split, number of
    words and label, which decides the folds. Raises ValueError for a file with another number of rows than
    published.
    """
    task = TRANSFER[name]
    numbers = {text: i for i, kind in enumerate(task.classes) for text in (str(i), kind)}
    rows = [row for part in task.parts for row in _labelled_lines(task, part, folder / part.file)]
    for row in rows:
        if row.label not in numbers:
            raise ValueError(f"{row.where}: the label is {row.label!r}, not one of {', '.join(numbers)}")

    def order(row: _Row) -> tuple[Any, ...]:
        return row.split != "train", row.split, *(len(text.split()) for text in row.texts), numbers[row.label]

    return _as_task(name, sorted(rows, key=order), numbers, task.classes)


def _labelled_lines(task: LabelFiles, part: LabelFile, path: Path) -> Iterator[_Row]:
    text = list(lines(path, task.encoding))[task.header :]
    with parsing(path, CURE):
        if len(text) != part.rows:
            raise ValueError(f"{len(text)} rows, not the {part.rows} published")
        for number, line in enumerate(text, 1 + task.header):
            cells = [line] if task.label is None else line.split(*task.cut)
            label = part.label if task.label is None else cells[task.label].split(":")[0].strip()
            texts = tuple(" ".join(cells[i].split()) for i in task.texts)
            yield _Row(f"{path}:{number}", texts, label, part.split)


def _as_task(name: str, rows: Sequence[_Row], numbers: Mapping[str, int], classes: Sequence[str]) -> Labelled:
    columns = tuple(
        [text or EMPTY for text in column] for column in zip(*(r.texts for r in rows), strict=True)
    )
    labels = np.array([numbers[row.label] for row in rows], np.int64)
    split = np.array([row.split for row in rows]) if rows[0].split else None
    return Labelled(name, columns, labels, list(classes), split)


def labels_of(path: Path, columns: Sequence[str] = ()) -> Labelled:
    """The rows of a user's .tsv, .csv or .jsonl file with texts and labels.

    It has columns text, or sentence1 and sentence2, and label; others are ignored. columns: those of text and
    label, where they have other names. With a column split, of train, dev and test, the test rows are
    predicted; without, all rows in ten folds. Rows keep their order, classes are sorted by name.
    """
    _, first = next(records(path), ("", {}))
    sides = ["text"] if columns or "text" in first else ["sentence1", "sentence2"]
    names = [*sides, "label"]
    named = dict(zip(names, columns or names, strict=True))
    rows = [_own(where, row, sides) for where, row in fields(path, named)]
    classes = sorted({row.label for row in rows})
    if len(classes) < 2:
        raise ValueError(f"{path}: {len(classes)} classes; a classifier needs two or more")
    if rows[0].split and (missing := {"train", "test"} - {row.split for row in rows}):
        raise ValueError(f"{path}: its split column has no row with {' and '.join(sorted(missing))}")
    return _as_task(path.stem, rows, {kind: i for i, kind in enumerate(classes)}, classes)


def _own(where: str, row: Mapping[str, Any], sides: Sequence[str]) -> _Row:
    texts = tuple(row[side] for side in sides)
    label, split = row["label"], row.get("split", "")
    if not all(isinstance(text, str) and not blank(text) for text in texts):
        raise ValueError(f"{where}: an empty text, or none: {', '.join(map(repr, texts))}")
    if label is None or not str(label).strip():
        raise ValueError(f"{where}: the label is {label!r}")
    if "split" in row and split not in SPLITS:
        raise ValueError(f"{where}: the split is {split!r}, not one of {', '.join(SPLITS)}")
    return _Row(where, texts, str(label).strip(), split)

"""Semantic textual similarity: scored pairs of sentences, from SentEval's files or from your own.

[1] Conneau and Kiela, SentEval, arXiv:1803.05449
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from whitenedcse.data.files import lines, rows

COLUMNS = ("score", "sentence1", "sentence2")


class Task(NamedTuple):
    """Where the pairs of a benchmark lie in SentEval's layout [1].

    text, gold: files in `folder`, {} standing for one of the subsets. columns: the two sentences in `text`,
    the score in `gold`. header: lines before the first pair.
    """

    folder: str
    text: str
    gold: str
    columns: tuple[int, int, int]
    header: int
    subsets: str


class Subset(NamedTuple):
    """n scored pairs: sentences left[i] and right[i] with gold[i], (n,) float64."""

    name: str
    left: list[str]
    right: list[str]
    gold: NDArray[np.float64]


_STS = ("STS.input.{}.txt", "STS.gs.{}.txt", (0, 1, 0), 0)
_STSB = ("sts-{}.csv", "sts-{}.csv", (5, 6, 4), 0)
_SICK = ("SICK_{}.txt", "SICK_{}.txt", (1, 2, 3), 1)
TASKS = {
    "STS12": Task("STS/STS12-en-test", *_STS, "MSRpar MSRvid SMTeuroparl surprise.OnWN surprise.SMTnews"),
    "STS13": Task("STS/STS13-en-test", *_STS, "FNWN headlines OnWN"),  # the text of SMT is not distributed
    "STS14": Task("STS/STS14-en-test", *_STS, "deft-forum deft-news headlines OnWN images tweet-news"),
    "STS15": Task("STS/STS15-en-test", *_STS, "answers-forums answers-students belief headlines images"),
    "STS16": Task(
        "STS/STS16-en-test", *_STS, "answer-answer headlines plagiarism postediting question-question"
    ),
    "STS-B": Task("STS/STSBenchmark", *_STSB, "test"),
    "STS-B/dev": Task("STS/STSBenchmark", *_STSB, "dev"),
    "STS-B/train": Task("STS/STSBenchmark", *_STSB, "train"),
    "SICK-R": Task("SICK", *_SICK, "test_annotated"),
    "SICK-R/dev": Task("SICK", *_SICK, "trial"),
    "SICK-R/train": Task("SICK", *_SICK, "train"),
}


def read(name: str, folder: Path) -> list[Subset]:
    """One of TASKS, from SentEval's downstream `folder`. A pair with an empty gold line is dropped."""
    if name not in TASKS:
        raise ValueError(f"no task {name!r}; there are {', '.join(TASKS)}")
    return [_subset(part, _scored(TASKS[name], part, folder)) for part in TASKS[name].subsets.split()]


def _scored(task: Task, part: str, folder: Path) -> Iterator[tuple[str, dict[str, str]]]:
    text, gold = (folder / task.folder / file.format(part) for file in (task.text, task.gold))
    pairs, scores = list(lines(text)), list(lines(gold))
    if len(pairs) != len(scores):
        raise ValueError(f"{gold}: {len(scores)} lines, for the {len(pairs)} pairs of {text}")
    left, right, score = task.columns
    for i in (i for i in range(task.header, len(pairs)) if scores[i]):
        where = f"{text}:{i + 1}" + (f" and {gold.name}" if gold != text else "")
        fields, scored = pairs[i].split("\t"), scores[i].split("\t")
        if max(left, right) >= len(fields) or score >= len(scored):
            raise ValueError(f"{where}: {len(fields)} tab-separated fields are too few")
        yield where, {"score": scored[score], "sentence1": fields[left], "sentence2": fields[right]}


def read_pairs(path: Path) -> Subset:
    """Your own pairs: a .tsv, .csv or .jsonl file with the columns score, sentence1, sentence2.

    Further columns are passed over.
    """
    subset = _subset(path.stem, rows(path))
    if len(subset.gold) < 2:
        raise ValueError(f"{path}: {len(subset.gold)} pairs; a correlation needs at least 2")
    return subset


def _subset(name: str, scored: Iterable[tuple[str, Mapping[str, Any]]]) -> Subset:
    pairs = [_pair(where, row) for where, row in scored]
    return Subset(name, [p[1] for p in pairs], [p[2] for p in pairs], np.array([p[0] for p in pairs], float))


def _pair(where: str, row: Mapping[str, Any]) -> tuple[float, str, str]:
    missing = [column for column in COLUMNS if column not in row]
    if missing:
        raise ValueError(f"{where}: no {', '.join(missing)} among {', '.join(row) or 'no columns'}")
    score, left, right = (row[column] for column in COLUMNS)
    if not all(isinstance(text, str) and text.strip() for text in (left, right)):
        raise ValueError(f"{where}: {left!r}, {right!r} are not two sentences")
    with suppress(TypeError, ValueError, OverflowError):  # float would take 1_0 for 10, and true for 1
        if "_" not in str(score) and not isinstance(score, bool) and math.isfinite(float(score)):
            return float(score), left, right
    raise ValueError(f"{where}: the score is {score!r}, not a finite number")

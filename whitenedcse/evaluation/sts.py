"""Semantic textual similarity: scored pairs of sentences, and how well cosines rank them.

n: pairs, or sentences    d: width

A correlation is aggregated over a task's subsets in three ways, MEANS. The pairs come from SentEval's files
[1] or from a file of the user.

[1] Conneau and Kiela, SentEval, arXiv:1803.05449
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from whitenedcse.data.files import fields, lines

COLUMNS = ("sentence1", "sentence2", "score")
SCALE = (0.0, 5.0)  # of all TASKS; SICK's scores begin at 1


class Task(NamedTuple):
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


class Subset(NamedTuple):
    """n scored pairs: sentences left[i] and right[i] with the score gold[i], (n,) float64.

    scale: the lowest and the highest score that there can be; None where only the scores tell.
    """

    name: str
    left: list[str]
    right: list[str]
    gold: NDArray[np.float64]
    scale: tuple[float, float] | None = None


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
    """The subsets of one of TASKS, from SentEval's downstream `folder`.

    A pair with an empty gold line is dropped. Raises ValueError, naming file and line, for anything
    malformed.
    """
    if name not in TASKS:
        raise ValueError(f"no task {name!r}; there are {', '.join(TASKS)}")
    parts = TASKS[name].subsets.split()
    return [_subset(part, _scored(TASKS[name], part, folder))._replace(scale=SCALE) for part in parts]


def _scored(task: Task, part: str, folder: Path) -> Iterator[tuple[str, dict[str, str]]]:
    text, gold = (folder / task.folder / file.format(part) for file in (task.text, task.gold))
    pairs, scores = list(lines(text)), list(lines(gold))
    if len(pairs) != len(scores):
        raise ValueError(f"{gold}: {len(scores)} lines, for the {len(pairs)} pairs of {text}")
    left, right, score = task.columns
    for i in (i for i in range(task.header, len(pairs)) if scores[i]):
        where = f"{text}:{i + 1}" + (f" and {gold.name}" if gold != text else "")
        texts, scored = pairs[i].split("\t"), scores[i].split("\t")
        if max(left, right) >= len(texts) or score >= len(scored):
            raise ValueError(f"{where}: {len(texts)} tab-separated fields are too few")
        yield where, {"score": scored[score], "sentence1": texts[left], "sentence2": texts[right]}


def read_pairs(path: Path, columns: Sequence[str] = COLUMNS) -> Subset:
    """The pairs in a user's .tsv, .csv or .jsonl file; columns: those of both sentences and of the score.

    Other columns are ignored. Raises ValueError, naming file and line, for malformed rows or fewer than 2.
    """
    subset = _subset(path.stem, fields(path, dict(zip(COLUMNS, columns, strict=True))))
    if len(subset.gold) < 2:
        raise ValueError(f"{path}: {len(subset.gold)} pairs; a correlation needs at least 2")
    return subset


def _subset(name: str, scored: Iterable[tuple[str, Mapping[str, Any]]]) -> Subset:
    pairs = [_pair(where, row) for where, row in scored]
    return Subset(name, [p[1] for p in pairs], [p[2] for p in pairs], np.array([p[0] for p in pairs], float))


def _pair(where: str, row: Mapping[str, Any]) -> tuple[float, str, str]:
    left, right, score = (row[column] for column in COLUMNS)
    if not all(isinstance(text, str) and text.strip() for text in (left, right)):
        raise ValueError(f"{where}: {left!r}, {right!r} are not two sentences")
    with suppress(TypeError, ValueError, OverflowError):  # float would take 1_0 for 10, and true for 1
        if "_" not in str(score) and not isinstance(score, bool) and math.isfinite(float(score)):
            return float(score), left, right
    raise ValueError(f"{where}: the score is {score!r}, not a finite number (columns: FILE:LEFT:RIGHT:SCORE)")


MEAN = "mean over the subsets of a task"
MEANING = {"all": "all pairs of a task together", "mean": MEAN, "wmean": f"{MEAN}, weighted by their pairs"}
MEANS = tuple(MEANING)
CELLS = 1_500_000  # of a chunk of columns; some eight float64 arrays of it live at once
ROUNDING = 1e-12  # cosines in float64 of vectors that differ only in length spread over about 1e-16

Index = dict[str, list[tuple[Subset, NDArray[np.intp]]]]  # by task: a subset, and its pairs' rows (2, n)


class Score(NamedTuple):
    """A correlation x 100, or None and why it is undefined."""

    value: float | None
    why: str = ""


def cosine(a: NDArray[Any], b: NDArray[Any]) -> NDArray[np.float64]:
    """The cosines of corresponding rows: (n, d), (n, d) -> (n,) in float64; NaN for a zero vector."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    aa, ab, bb = (np.einsum("nd,nd->n", p, q) for p, q in ((a, a), (a, b), (b, b)))
    with np.errstate(divide="ignore", invalid="ignore"):
        return ab / np.sqrt(aa * bb)


def spearman(gold: NDArray[Any], similarity: NDArray[Any]) -> Score:
    """Spearman's rank correlation x 100 of (n,) and (n,), or why it is undefined; ties share a mean rank."""
    if why := _why(gold, similarity):
        return Score(None, why)
    from scipy.stats import spearmanr  # seconds that what only reads pairs need not wait for

    return Score(100 * float(spearmanr(gold, similarity).statistic))


def pearson(gold: NDArray[Any], similarity: NDArray[Any]) -> Score:
    """Pearson's correlation x 100 of (n,) and (n,), or why it is undefined, which is as for `spearman`."""
    why = _why(gold, similarity)
    return Score(None, why) if why else Score(100 * float(np.corrcoef(gold, similarity)[0, 1]))


def _why(gold: NDArray[Any], similarity: NDArray[Any]) -> str:
    """Why the correlation of (n,) and (n,) is undefined; "" where it is defined."""
    if len(gold) < 2:
        return f"{len(gold)} pairs are too few"
    for name, values in (("gold", gold), ("similarity", similarity)):
        if broken := np.count_nonzero(~np.isfinite(values)):
            return f"{name} is not finite in {broken} of {len(gold)} pairs"
        if np.ptp(values) <= ROUNDING * np.abs(values).max():
            return f"{name} is constant"
    return ""


def spearman_columns(gold: NDArray[Any], similarities: NDArray[Any]) -> NDArray[np.float64]:
    """`spearman` of gold (n,) with every column of (n, m): (m,), NaN where it is undefined."""
    n, m = similarities.shape
    if len(gold) != n:
        raise ValueError(f"{len(gold)} gold scores for {n} rows of similarities")
    if n < 2 or _undefined(np.asarray(gold, np.float64)[None])[0]:
        return np.full(m, np.nan)
    from scipy.stats import rankdata

    ranks = rankdata(gold) - (n + 1) / 2
    step = max(1, CELLS // n)
    chunks = (np.array(similarities[:, at : at + step].T, np.float64, order="C") for at in range(0, m, step))
    return np.concatenate([np.zeros(0), *(_correlations(ranks, x) for x in chunks)])


def _undefined(x: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Which rows of (m, n) are constant within rounding or not finite: (m,)."""
    with np.errstate(invalid="ignore"):
        constant = np.ptp(x, axis=1) <= ROUNDING * np.abs(x).max(axis=1)
    return constant | ~np.isfinite(x).all(axis=1)


def _correlations(ranks: NDArray[np.float64], x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Rank correlations of centred ranks (n,) with every row of (m, n): (m,). Ties share their mean rank."""
    m, n = x.shape
    order = x.argsort(axis=1)
    centred = np.arange(n) - (n - 1) / 2
    products, squares = ranks[order] @ centred, np.full(m, centred @ centred)
    x = np.take_along_axis(x, order, axis=1)
    new = np.concatenate([np.ones((m, 1), bool), x[:, 1:] != x[:, :-1]], axis=1)
    tied = np.flatnonzero(~new.all(axis=1))
    if tied.size:
        starts = np.flatnonzero(new[tied])  # of groups of equal values, the rows laid end to end
        counts = np.diff(starts, append=tied.size * n)
        shared = np.repeat(starts % n + (counts - 1) / 2 - (n - 1) / 2, counts).reshape(-1, n)
        products[tied] = np.einsum("mn,mn->m", ranks[order[tied]], shared)
        squares[tied] = np.einsum("mn,mn->m", shared, shared)
    squares[_undefined(x)] = np.nan
    return 100 * products / np.sqrt(squares * (ranks @ ranks))


def _means(values: Any, why: str) -> dict[str, Any]:
    means = zip(MEANS, np.asarray(values, float), strict=True)  # None -> NaN, and back
    return {k: float(x) if np.isfinite(x) else None for k, x in means} | ({"why": why} if why else {})


def score(subsets: Sequence[Subset], similarities: Sequence[NDArray[Any]]) -> dict[str, Any]:
    """A task's Spearman x 100: of all pairs, mean and weighted mean over subsets, and each subset's.

    "pearson" has the same of Pearson's correlation.
    """
    sizes, names = [len(s.gold) for s in subsets], [s.name for s in subsets]
    if len(set(names)) < len(names):
        raise ValueError(f"two subsets of a task share a name: {', '.join(names)}")
    gold, joined = np.concatenate([s.gold for s in subsets]), np.concatenate(similarities)

    def aggregated(correlation: Callable[..., Score]) -> tuple[list[Score], dict[str, Any]]:
        parts = [correlation(s.gold, x) for s, x in zip(subsets, similarities, strict=True)]
        whole, values = correlation(gold, joined), np.array([part.value for part in parts], float)
        why = "; ".join(f"{n}: {w}" for n, (_, w) in zip(["all", *names], [whole, *parts], strict=True) if w)
        return parts, _means([whole.value, values.mean(), np.average(values, weights=sizes)], why)

    (rows, means), (others, other) = aggregated(spearman), aggregated(pearson)
    parts = {
        name: {"spearman": row.value, "pearson": also.value, "n": n} | ({"why": row.why} if row.why else {})
        for name, row, also, n in zip(names, rows, others, sizes, strict=True)
    }
    return means | {"pearson": {mean: other[mean] for mean in MEANS}, "n": sum(sizes), "subsets": parts}


def pairs_index(tasks: Mapping[str, Sequence[Subset]]) -> tuple[list[str], Index]:
    """The distinct sentences of all tasks, sorted, and each subset's pairs as indices of them, (2, n)."""
    if not tasks or not all(tasks.values()):
        raise ValueError(f"nothing to score: {tasks}")
    every = [(task, subset) for task, subsets in tasks.items() for subset in subsets]
    for task, s in every:
        if not len(s.left) == len(s.right) == len(s.gold) > 0:
            raise ValueError(
                f"{task}, {s.name}: {len(s.left)} and {len(s.right)} texts, {len(s.gold)} scores"
            )
    sentences = sorted({text for _, s in every for text in (*s.left, *s.right)})
    row = {text: i for i, text in enumerate(sentences)}
    index: Index = {task: [] for task in tasks}
    for task, s in every:
        index[task].append((s, np.array([[row[text] for text in side] for side in (s.left, s.right)])))
    return sentences, index


def scores_of(vectors: NDArray[Any], index: Index) -> dict[str, Any]:
    """Every task's score and their average, from the vectors (n, d) of the sentences of `pairs_index`."""
    tasks, zero = {}, np.flatnonzero(~vectors.any(axis=1))
    for name, pairs in index.items():
        tasks[name] = score([s for s, _ in pairs], [cosine(*vectors[rows]) for _, rows in pairs])
        here = np.intersect1d(zero, np.concatenate([rows for _, rows in pairs], axis=1))
        if here.size:
            tasks[name]["why"] += f" ({here.size} zero vectors)"
    return {"tasks": tasks, "avg": averaged(tasks)}


def averaged(tasks: Mapping[str, Any]) -> dict[str, Any]:
    """The mean over the tasks in each aggregation; None, and a "why", where a task's is undefined."""
    why = ", ".join(name for name, task in tasks.items() if "why" in task)

    every = [*tasks.values(), *(task["pearson"] for task in tasks.values())]
    table = np.array([[scores[key] for key in MEANS] for scores in every], float).reshape(2, -1, len(MEANS))
    spearmans, pearsons = table.mean(axis=1)
    return _means(spearmans, why and f"undefined in {why}") | {"pearson": _means(pearsons, "")}


def evaluate(
    tasks: Mapping[str, Sequence[Subset]], encode: Callable[[list[str]], NDArray[Any]]
) -> dict[str, Any]:
    """Every task's score and their average, from one call of `encode`: n sentences -> (n, d).

    A score that is undefined is None, with the reason in "why".
    """
    sentences, index = pairs_index(tasks)
    vectors = encode(sentences)
    if vectors.ndim != 2 or len(vectors) != len(sentences):
        raise ValueError(f"encode made {vectors.shape} of {len(sentences)} sentences, not one row for each")
    return scores_of(vectors, index)

"""How well vectors serve a task: correlations of cosines with human scores, and accuracies.

n: pairs, texts or sentences    d: width    f: features

A correlation is aggregated over a task's subsets in three ways, MEANS.

[1] Conneau and Kiela, SentEval, arXiv:1803.05449    [2] Huang et al., WhiteningBERT, arXiv:2104.01767
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whitenedcse.evaluation.tasks import Labelled, Subset

_MEAN = "mean over the subsets of a task"
MEANING = {"all": "all pairs of a task together", "mean": _MEAN, "wmean": f"{_MEAN}, weighted by their pairs"}
MEANS = tuple(MEANING)
ROUNDING = 1e-12  # cosines in float64 of vectors that differ only in length spread over about 1e-16

Rows = NDArray[np.intp]
Vectors = Callable[[Rows], NDArray[Any]]  # m rows -> (m, d)
Pairs = Sequence[tuple[Subset, Rows]]  # of a task: a subset, and its pairs' rows (2, n)
Index = dict[str, list[tuple[Subset, Rows]]]  # the same by task


def cosine(a: NDArray[Any], b: NDArray[Any]) -> NDArray[np.float64]:
    """The cosines of corresponding rows, from -1 to 1: (n, d), (n, d) -> (n,); NaN for a zero vector."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    aa, ab, bb = (np.einsum("nd,nd->n", p, q) for p, q in ((a, a), (a, b), (b, b)))
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.clip(ab / np.sqrt(aa * bb), -1, 1)  # rounding leaves 1 + 2e-16


def spearman(gold: NDArray[Any], similarity: NDArray[Any]) -> float:
    """Spearman's rank correlation x 100 of (n,) and (n,); ties share a mean rank; NaN where `undefined`."""
    if undefined(gold, similarity):
        return math.nan
    from scipy.stats import spearmanr  # seconds that what only reads pairs need not wait for

    return 100 * float(spearmanr(gold, similarity).statistic)


def pearson(gold: NDArray[Any], similarity: NDArray[Any]) -> float:
    """Pearson's correlation x 100 of (n,) and (n,); NaN where `undefined`."""
    return math.nan if undefined(gold, similarity) else 100 * float(np.corrcoef(gold, similarity)[0, 1])


def undefined(gold: NDArray[Any], similarity: NDArray[Any]) -> str:
    """Why the correlation of (n,) and (n,) is undefined; "" where it is defined."""
    if len(gold) < 2:
        return f"{len(gold)} pairs are too few"
    for name, values in (("gold", gold), ("similarity", similarity)):
        if broken := np.count_nonzero(~np.isfinite(values)):
            return f"{name} is not finite in {broken} of {len(gold)} pairs"
        if not varies(values):
            return f"{name} is constant"
    return ""


def varies(x: NDArray[Any]) -> NDArray[np.bool_]:
    """Whether rows of numbers, (..., n) -> (...), are finite, and differ by more than rounding."""
    with np.errstate(invalid="ignore"):
        return np.ptp(x, axis=-1) > ROUNDING * np.abs(x).max(axis=-1)  # False where one is NaN or infinite


def similarities(vectors: Vectors, pairs: Pairs) -> tuple[list[NDArray[np.float64]], int]:
    """The cosines of a task's pairs, by subset, and how many of its sentences have a zero vector."""
    at, place = np.unique(np.concatenate([rows for _, rows in pairs], axis=1), return_inverse=True)
    x = vectors(at)
    ends = np.cumsum([rows.shape[1] for _, rows in pairs])[:-1]
    left, right = place.reshape(2, -1)
    return np.split(cosine(x[left], x[right]), ends), int(np.count_nonzero(~x.any(axis=1)))


def sts_scores(subsets: Sequence[Subset], similarities: Sequence[NDArray[Any]]) -> dict[str, Any]:
    """A task's Spearman x 100: of all pairs, mean and weighted mean over subsets, and each subset's.

    "pearson" has the same of Pearson's correlation.
    """
    names = [s.name for s in subsets]
    if len(set(names)) < len(names):
        raise ValueError(f"two subsets of a task share a name: {', '.join(names)}")
    golds, sizes = [s.gold for s in subsets], [len(s.gold) for s in subsets]
    every = [(np.concatenate(golds), np.concatenate(similarities)), *zip(golds, similarities, strict=True)]
    whys = [undefined(*pair) for pair in every]
    why = "; ".join(f"{name}: {why}" for name, why in zip(["all", *names], whys, strict=True) if why)
    ranks, linear = ([correlation(*pair) for pair in every] for correlation in (spearman, pearson))
    parts: dict[str, Any] = {}
    for i, name in enumerate(names, 1):
        parts[name] = {"spearman": defined(ranks[i]), "pearson": defined(linear[i]), "n": sizes[i - 1]}
        parts[name] |= {"why": whys[i]} if whys[i] else {}
    total, other = (means([x[0], np.mean(x[1:]), np.average(x[1:], weights=sizes)]) for x in (ranks, linear))
    return total | ({"why": why} if why else {}) | {"pearson": other, "n": sum(sizes), "subsets": parts}


def defined(x: float) -> float | None:
    """A number, None for NaN."""
    return float(x) if np.isfinite(x) else None


def means(values: Iterable[Any]) -> dict[str, Any]:
    """Values in the order of MEANS by their names, None for NaN."""
    return dict(zip(MEANS, map(defined, values), strict=True))


def task_scores(vectors: Vectors, pairs: Pairs, void: str = "") -> tuple[dict[str, Any], NDArray[np.float64]]:
    """A task's scores as `sts_scores` gives them, and cosines. void: why no score is defined, or ""."""
    cosines, zeros = similarities(vectors, pairs)
    if void:  # they depend on rounding, and on how often a sentence occurs, alone
        cosines = [np.zeros_like(x) for x in cosines]
    result = sts_scores([s for s, _ in pairs], cosines) | ({"why": void} if void else {})
    if zeros:
        result["why"] = result.get("why", "") + f" ({zeros} zero vectors)"
    return result, np.concatenate(cosines)


def scores_of(vectors: NDArray[Any], index: Index) -> dict[str, Any]:
    """Every task's scores and their average, from the vectors (n, d) of the sentences of a `suite.Plan`."""
    tasks = {name: task_scores(vectors.__getitem__, pairs)[0] for name, pairs in index.items()}
    return {"tasks": tasks, "avg": averaged(tasks)}


def averaged(tasks: Mapping[str, Any]) -> dict[str, Any]:
    """The mean over the tasks in each aggregation; None, and a "why", where a task's is undefined."""
    why = ", ".join(name for name, task in tasks.items() if "why" in task)
    every = [*tasks.values(), *(task["pearson"] for task in tasks.values())]
    table = np.array([[scores[key] for key in MEANS] for scores in every], float).reshape(2, -1, len(MEANS))
    spearmans, pearsons = map(means, table.mean(axis=1))
    return spearmans | ({"why": f"undefined in {why}"} if why else {}) | {"pearson": pearsons}


# accuracies

Split = NDArray[np.str_] | None
# x (n, f), labels (n,), split -> predictions, and the accuracy x 100 on the rows it chose by
Classify = Callable[[NDArray[Any], NDArray[np.int64], Split], tuple[NDArray[Any], float]]


def features(columns: Sequence[NDArray[Any]]) -> NDArray[np.float32]:
    """Features for a classifier: one column (n, d) as it is; two, u and v, as |u - v|, u * v [1]."""
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
    predicted, dev = classify(x, task.labels, task.split)
    gold = task.gold
    correct = predicted == gold
    found = {"accuracy": 100 * float(correct.mean()), "dev": dev, "n": len(gold), "correct": correct}
    if len(task.columns) == len(task.classes) == 2:
        both = np.count_nonzero(correct & (gold == 1))
        found["f1"] = 200 * int(both) / max(1, int(np.sum(gold) + np.sum(predicted)))
    return found


def threshold(task: Labelled, cosines: NDArray[Any]) -> dict[str, Any]:
    """Accuracy of predicting entailment where the cosine (n,) is at least 0.5, without training: [2], A.2."""
    classes = task.classes
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

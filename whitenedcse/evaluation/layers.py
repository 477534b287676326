"""Scores of every set of layers and every number of components, computed together as matrix products.

    l: layers    n: sentences, or pairs    d: width    m: columns, each a way to make embeddings
    planes: (l, n, d), one pooled vector per layer and sentence, the n of a `suite.Plan`; may be a memory map

[1] Huang et al., WhiteningBERT, arXiv:2104.01767    [2] Su et al., BERT-whitening, arXiv:2103.15316
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations, combinations_with_replacement
from math import comb, isnan
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from whitenedcse.evaluation.postprocess import Postprocess
from whitenedcse.evaluation.scores import MEANS, Index, cosine, varies

CELLS = 1_500_000  # of a chunk of columns; some eight float64 arrays of it live at once
LIMIT = 10_000  # sets of layers: 12 layers and the embeddings have 8,191

Floats = NDArray[np.float64]


def aggregate(index: Index, similarities: Callable[[str], NDArray[Any]]) -> dict[str, Floats]:
    """Scores of m columns of similarities by task, (3, m) with rows as in MEANS, and their "average".

    similarities: a task -> (n, m), for the n pairs of all its subsets in order. "average" is the mean over
    the tasks, and comes last.
    """
    scores: dict[str, Floats] = {}
    for task, subsets in index.items():
        gold, x = np.concatenate([s.gold for s, _ in subsets]), similarities(task)
        whole, sizes = spearman_columns(gold, x), [len(s.gold) for s, _ in subsets]
        slices = zip(subsets, np.split(x, np.cumsum(sizes)[:-1]), strict=True)
        parts = [whole] if len(sizes) == 1 else [spearman_columns(s.gold, part) for (s, _), part in slices]
        scores[task] = np.stack([whole, np.mean(parts, axis=0), np.average(parts, axis=0, weights=sizes)])
    return scores | {"average": np.mean(list(scores.values()), axis=0)}


def spearman_columns(gold: NDArray[Any], similarities: NDArray[Any]) -> Floats:
    """`scores.spearman` of gold (n,) with every column of (n, m): (m,), NaN where it is undefined."""
    n, m = similarities.shape
    if n < 2 or not varies(gold):
        return np.full(m, np.nan)
    from scipy.stats import rankdata

    a, columns = rankdata(gold) - (n + 1) / 2, np.asarray(similarities, np.float64).T
    found = np.full(m, np.nan)
    step = max(1, CELLS // n)
    for start in range(0, m, step):
        at = np.arange(start, min(start + step, m))
        at = at[varies(columns[at])]
        b = rankdata(columns[at], axis=1) - (n + 1) / 2
        found[at] = 100 * (b @ a) / np.sqrt(np.einsum("mn,mn->m", b, b) * (a @ a))
    return found


def records(scores: Mapping[str, Floats], columns: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Scores as rows of a table: the values of `columns`, the task, and MEANS, None where undefined."""
    rows = []
    for task, table in scores.items():
        for column, values in zip(columns, table.T.tolist(), strict=True):
            numbers = [None if isnan(value) else value for value in values]
            rows.append({**column, "task": task, **dict(zip(MEANS, numbers, strict=True))})
    return rows


def cosines_by_mask(planes: NDArray[Any], rows: NDArray[np.intp]) -> Callable[[NDArray[np.bool_]], Floats]:
    """The cosines of pairs, rows (2, n), that are embedded by the mean over the layers of each mask.

    It is a function of masks (m, l) -> (n, m). Products of means are sums of inner products of layers, which
    are computed once, so no mean is formed. NaN where all layers are zero.
    """
    (left, right), inverse = np.unique(np.sort(rows, axis=0), axis=1, return_inverse=True)  # so they tie
    i, j = np.triu_indices(len(planes))
    step = max(1, CELLS // planes[:, 0].size)
    parts = [slice(start, start + step) for start in range(0, len(left), step)]
    chunks = [_products(planes, left[part], right[part]) for part in parts]
    ab, aa, bb = np.concatenate(chunks, axis=1)

    def cosines(masks: NDArray[np.bool_]) -> Floats:
        weights = (masks[:, i] & masks[:, j]).astype(np.float64)
        with np.errstate(invalid="ignore"):
            lengths = np.sqrt((weights @ aa.T) * (weights @ bb.T))
            return (weights @ ab.T / lengths)[:, inverse.ravel()].T

    return cosines


def _products(planes: NDArray[Any], left: NDArray[np.intp], right: NDArray[np.intp]) -> Floats:
    """The products a.b, a.a, b.b of each pair for layers i <= j: (3, n, l (l + 1) / 2), both orders added."""
    a, b = (np.moveaxis(planes[:, at].astype(np.float64), 0, 1) for at in (left, right))
    i, j = np.triu_indices(len(planes))

    def both_orders(p: Floats, q: Floats) -> Floats:
        gram = np.matmul(p, q.transpose(0, 2, 1))
        return gram[:, i, j] + np.where(i == j, 0, gram[:, j, i])

    # The copies keep NumPy from its routine for x @ x.T, which rounds otherwise: equal vectors must tie at 1.
    return np.stack([both_orders(a, b), both_orders(a, a.copy()), both_orders(b, b.copy())])


def pairs(planes: NDArray[Any], index: Index) -> list[dict[str, Any]]:
    """Scores of the mean of any two layers, or of one layer, without and with whitening: Figure 1 of [1].

    A task's whitening is fitted to both sides of all its pairs, with repetition, as the code of [1] does.
    """
    both = list(combinations_with_replacement(range(len(planes)), 2))
    masks = _masks(both, len(planes))
    off = aggregate(index, lambda task: cosines_by_mask(planes, _rows(index, task))(masks))
    on = aggregate(index, lambda task: _whitened_cosines(planes, both, _rows(index, task)))
    return [
        row
        for scores, state in ((off, False), (on, True))
        for row in records(scores, [{"layers": list(p), "whitening": state} for p in both])
    ]


def _whitened_cosines(
    planes: NDArray[Any], both: Sequence[tuple[int, int]], rows: NDArray[np.intp]
) -> Floats:
    """Cosines (n, m) after whitening fitted to all rows; one column per core, as matrices are small."""
    sentences, at = np.unique(rows, return_inverse=True)
    left, right = at.reshape(rows.shape)
    if Postprocess("whitening").equal_cosines(len(sentences), planes.shape[2]):
        return np.full((rows.shape[1], len(both)), np.nan)

    def column(pair: tuple[int, int]) -> Floats:
        x = np.mean([planes[i, sentences].astype(np.float64) for i in pair], axis=0)
        y = Postprocess(kind="whitening").fit(x[np.concatenate([left, right])]).transform(x)
        return cosine(y[left], y[right])

    with threadpool_limits(1), ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return np.stack(list(pool.map(column, both)), axis=1)


def subsets(planes: NDArray[Any], index: Index) -> list[dict[str, Any]]:
    """Scores of the mean of every set of layers, by size: the study behind Figure 2 of [1].

    Where there are more than `LIMIT` sets, only sizes up to the largest that keeps to it, and at least 2.
    """
    layers = len(planes)
    totals = np.cumsum([comb(layers, size) for size in range(1, layers + 1)])
    largest = min(layers, max(2, int(np.searchsorted(totals, LIMIT, side="right"))))
    sets = [s for size in range(1, largest + 1) for s in combinations(range(layers), size)]
    masks = _masks(sets, layers)
    cosines = {task: cosines_by_mask(planes, _rows(index, task)) for task in index}
    step = max(1, CELLS // max(_rows(index, task).shape[1] for task in index))

    def scores_of(some: NDArray[np.bool_]) -> dict[str, Floats]:
        return aggregate(index, lambda task: cosines[task](some))

    scores = [scores_of(masks[at : at + step]) for at in range(0, len(masks), step)]
    joined = {task: np.concatenate([part[task] for part in scores], axis=1) for task in scores[0]}
    return records(joined, [{"layers": list(s)} for s in sets])


def best_of_each_size(rows: Iterable[Mapping[str, Any]], mean: str) -> list[dict[str, Any]]:
    """Of the records of `subsets`, the best average over the tasks for each number of layers."""
    rising = sorted((r for r in rows if r["task"] == "average" and r[mean] is not None), key=itemgetter(mean))
    best = {len(row["layers"]): row for row in rising}  # the last of its size stays
    return [{"size": size, **best[size]} for size in sorted(best)]


def components(y: NDArray[Any], rows: NDArray[np.intp]) -> Floats:
    """Cosines of pairs by the first k columns of y (n, d): rows (2, n) -> (n, d), column k - 1 for k."""
    a, b = np.asarray(y, np.float64)[rows]
    ab, aa, bb = (np.cumsum(p * q, axis=1) for p, q in ((a, b), (a, a), (b, b)))
    with np.errstate(divide="ignore", invalid="ignore"):
        cosines = ab / np.sqrt(aa * bb)
        cosines[:, 0] /= np.abs(cosines[:, 0])  # +-1 but for rounding, which would rank what ties
    return cosines


def all_k(
    vectors: Callable[[str], Callable[[NDArray[np.intp]], Floats]],
    index: Index,
    most: Callable[[str], int | None] = lambda _: None,
) -> dict[str, Floats]:
    """Scores of the first k = 1 ... d components as `aggregate` gives them, in column k - 1: Figure 1 of [2].

    vectors: a task -> a function from m rows to (m, d), whitened. most: a task -> the largest k, None for d.
    """

    def similarities(task: str) -> Floats:
        rows = _rows(index, task)
        at, place = np.unique(rows, return_inverse=True)
        cosines = components(vectors(task)(at), place.reshape(rows.shape))
        cosines[:, cosines.shape[1] if (k := most(task)) is None else k :] = np.nan
        return cosines

    return aggregate(index, similarities)


def _rows(index: Index, task: str) -> NDArray[np.intp]:
    return np.concatenate([rows for _, rows in index[task]], axis=1)


def _masks(sets: Iterable[Iterable[int]], layers: int) -> NDArray[np.bool_]:
    return np.array([np.isin(np.arange(layers), list(s)) for s in sets])

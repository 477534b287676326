"""Scores of every two layers and of every number of components: one column of similarities for each.

    l: layers    n: sentences, or pairs    d: width    m: columns, each a way to make embeddings
    planes: (l, n, d), one pooled vector per layer and sentence, the n of `pairs_index`

[1] Huang et al., WhiteningBERT, arXiv:2104.01767    [2] Su et al., BERT-whitening, arXiv:2103.15316
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations_with_replacement
from typing import Any

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from whitenedcse.compute import each
from whitenedcse.evaluation.postprocess import Postprocess
from whitenedcse.evaluation.scores import MEANS, ROUNDING, Index, cosine

CELLS = 1_500_000  # of a chunk of columns; some eight float64 arrays of it live at once

Floats = NDArray[np.float64]
OfTask = Callable[[str], NDArray[Any]] | Mapping[str, NDArray[Any]]


def aggregate(index: Index, similarities: OfTask) -> dict[str, Floats]:
    """Scores of m columns of similarities by task, (3, m) with rows as in MEANS, and their "average".

    similarities: a task -> (n, m), for the n pairs of all its subsets in order. Raises ValueError for another
    n. "average" is the mean over the tasks, and comes last.
    """
    scores: dict[str, Floats] = {}
    for task, subsets in index.items():
        gold, x = np.concatenate([s.gold for s, _ in subsets]), _of(similarities, task)
        if len(x) != len(gold):
            raise ValueError(f"{task}: {len(x)} rows of similarities for {len(gold)} pairs")
        whole, sizes = spearman_columns(gold, x), [len(s.gold) for s, _ in subsets]
        slices = zip(subsets, np.split(x, np.cumsum(sizes)[:-1]), strict=True)
        parts = [whole] if len(sizes) == 1 else [spearman_columns(s.gold, part) for (s, _), part in slices]
        scores[task] = np.stack([whole, np.mean(parts, axis=0), np.average(parts, axis=0, weights=sizes)])
    return scores | {"average": np.mean(list(scores.values()), axis=0)}


def _of(values: OfTask, task: str) -> NDArray[Any]:
    return values(task) if callable(values) else values[task]


def spearman_columns(gold: NDArray[Any], similarities: NDArray[Any]) -> Floats:
    """`scores.spearman` of gold (n,) with every column of (n, m): (m,), NaN where it is undefined."""
    n, m = similarities.shape
    if len(gold) != n:
        raise ValueError(f"{len(gold)} gold scores for {n} rows of similarities")
    if n < 2 or _constant(np.asarray(gold, np.float64)[None])[0]:
        return np.full(m, np.nan)
    from scipy.stats import rankdata

    a, columns = rankdata(gold) - (n + 1) / 2, np.asarray(similarities, np.float64).T
    found = np.full(m, np.nan)
    for at in np.split(np.arange(m), range(step := max(1, CELLS // n), m, step)):
        at = at[~_constant(columns[at])]
        b = rankdata(columns[at], axis=1) - (n + 1) / 2
        found[at] = 100 * (b @ a) / np.sqrt(np.einsum("mn,mn->m", b, b) * (a @ a))
    return found


def _constant(x: Floats) -> NDArray[np.bool_]:
    """Which rows of (m, n) are constant within rounding or not finite: (m,)."""
    with np.errstate(invalid="ignore"):
        constant = np.ptp(x, axis=1) <= ROUNDING * np.abs(x).max(axis=1)
    return constant | ~np.isfinite(x).all(axis=1)


def records(scores: Mapping[str, Floats], columns: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Scores as rows of a table: the values of `columns`, the task, and MEANS, None where undefined."""
    return [
        {**column, "task": task, **dict(zip(MEANS, values, strict=True))}
        for task, table in scores.items()
        for column, values in zip(
            columns, np.where(np.isnan(table), np.array(None), table).T.tolist(), strict=True
        )
    ]


def pairs(planes: NDArray[Any], index: Index) -> list[dict[str, Any]]:
    """Scores of the mean of any two layers, or of one layer, without and with whitening: Figure 1 of [1].

    A task's whitening is fitted to both sides of all its pairs, with repetition, as the code of [1] does.
    """
    last = max(int(rows.max()) for subsets in index.values() for _, rows in subsets)
    if planes.ndim != 3 or planes.shape[1] <= last:
        raise ValueError(f"planes of {planes.shape} are not (layers, sentences > {last}, width)")
    both = list(combinations_with_replacement(range(len(planes)), 2))
    found = []
    for white in (False, True):
        scores = aggregate(index, lambda task: _cosines(planes, both, _rows(index, task), white))  # noqa: B023
        found += records(scores, [{"layers": list(pair), "whitening": white} for pair in both])
    return found


def _cosines(
    planes: NDArray[Any], both: Sequence[tuple[int, int]], rows: NDArray[np.intp], white: bool
) -> Floats:
    """Cosines of n pairs by the mean of each two layers, perhaps whitened: rows (2, n) -> (n, m)."""
    sentences, at = np.unique(rows, return_inverse=True)
    left, right = at.reshape(rows.shape)
    if white and Postprocess("whitening").equal_cosines(len(sentences), planes.shape[2]):
        return np.full((rows.shape[1], len(both)), np.nan)

    def column(pair: tuple[int, int]) -> Floats:
        x = np.mean([planes[i, sentences].astype(np.float64) for i in pair], axis=0)
        x = Postprocess("whitening").fit(x[np.concatenate([left, right])]).transform(x) if white else x
        return cosine(x[left], x[right])

    with threadpool_limits(1):  # a thread for a column, as matrices are small
        return np.stack(list(each(column, both)), axis=1)


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

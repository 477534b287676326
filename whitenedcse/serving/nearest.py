"""Exact search: the rows with the largest inner products, whatever proposes them.

n: rows    d: width    q: queries    k: rows wanted for each query

FAISS proposes the nearest rows, or NumPy where FAISS is not installed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from whitenedcse.serving.checked import Checked

Array = NDArray[np.float32]
Vectors = Array | Checked
Rows = NDArray[np.int64]
Engine = Callable[[Array, Array, int], tuple[Array, Rows]]

QUERIES, ROWS = 256, 16_384  # at a time: their products are 16 MB


def nearest(queries: Array, parts: Sequence[Vectors], top: int) -> tuple[Array, Rows]:
    """The rows with the largest inner products with each query, largest first.

    queries: (q, d), parts: of (n, d), rows of unit length -> products (q, k) and row numbers (q, k). k is
    `top`, or n if that is less: there is no threshold. The products are computed in float64 and then rounded,
    and equal ones come in the order of the rows, so every engine gives the same. Memory does not grow with q
    or n. Raises ValueError for top < 1, no rows, and for another width.
    """
    n, widths = sum(map(len, parts)), {array.shape[-1] for array in (queries, *parts)}
    if top < 1 or n < 1:
        raise ValueError(f"top={top} of {n} rows: ask for one or more, of one or more rows")
    if len(widths) > 1:
        raise ValueError(f"queries and rows have the widths {sorted(widths)}; they must have one width")
    top, engine = min(top, n), available_engine()
    out = np.empty((len(queries), top), np.float32), np.empty((len(queries), top), np.int64)
    for start in range(0, len(queries), QUERIES):
        block = slice(start, start + QUERIES)
        out[0][block], out[1][block] = decided(queries[block], parts, top, min(n, 2 * top + 16), engine)
    return out


def decided(
    queries: Array, parts: Sequence[Vectors], top: int, reach: int, engine: Engine
) -> tuple[Array, Rows]:
    """The best `top` rows by exact products, chosen from the `reach` rows that are first in float32.

    The search is repeated with a larger reach for a query while a row beyond it may be among the best: for
    unit vectors a product in float32 is wrong by at most d / 2 ** 24, in whatever order it is summed.
    """
    near, rows = proposed(queries, parts, reach, engine)
    exact = products(queries, parts, rows)
    order = np.lexsort((rows, -exact))[:, :top]
    scores, best = np.take_along_axis(exact, order, 1), np.take_along_axis(rows, order, 1)
    wrong = (queries.shape[1] + 8) * 2.0**-24
    n = sum(map(len, parts))
    again = np.flatnonzero(near.min(1) + wrong >= scores[:, -1]) if reach < n else ()
    for i in again:  # one by one, as the reach may become n
        one = slice(i, i + 1)
        scores[one], best[one] = decided(queries[one], parts, top, min(n, 8 * reach), engine)
    return scores, best


def proposed(queries: Array, parts: Sequence[Vectors], reach: int, engine: Engine) -> tuple[Array, Rows]:
    """The `reach` rows with the largest products in float32, unordered: products and row numbers."""
    near, rows = np.empty((len(queries), 0), np.float32), np.empty((len(queries), 0), np.int64)
    for start, piece in pieces(parts):
        more, at = engine(queries, piece, min(reach, len(piece)))
        near, rows = np.hstack([near, more]), np.hstack([rows, at + start])
        if near.shape[1] > reach:
            near, chosen = largest(near, reach)
            rows = np.take_along_axis(rows, chosen, 1)
    return near, rows


def products(queries: Array, parts: Sequence[Vectors], rows: Rows) -> Array:
    """Inner products in float64, rounded to float32: (q, d), row numbers (q, r) -> (q, r)."""
    out = np.empty(rows.shape, np.float32)
    for i, query in enumerate(queries.astype(np.float64)):
        for start in range(0, rows.shape[1], ROWS):
            at = slice(start, start + ROWS)
            out[i, at] = np.einsum("nd,d->n", taken(parts, rows[i, at]).astype(np.float64), query)
    return out


def taken(parts: Sequence[Vectors], rows: Rows) -> Array:
    """The vectors of these row numbers."""
    ends = np.cumsum([len(part) for part in parts])
    where = np.searchsorted(ends, rows, side="right")
    out = np.empty((len(rows), parts[0].shape[1]), np.float32)
    for i in np.unique(where):
        out[where == i] = parts[i][rows[where == i] - (ends[i] - len(parts[i]))]
    return out


def pieces(parts: Sequence[Vectors], size: int = ROWS) -> Iterator[tuple[int, Array]]:
    """The vectors in pieces of at most `size` rows, each with the number of its first row."""
    before = 0
    for part in parts:
        for start in range(0, len(part), size):
            yield before + start, part[start : start + size]
        before += len(part)


def available_engine() -> Engine:
    """The search by FAISS where it is installed, else that by NumPy."""
    try:
        import faiss  # noqa: F401
    except ImportError:
        return by_numpy
    return by_faiss


def by_faiss(queries: Array, rows: Array, top: int) -> tuple[Array, Rows]:
    """The `top` rows with the largest inner products by FAISS, without copying rows: products, numbers."""
    import faiss

    found: tuple[Any, Any] = faiss.knn(queries, rows, top, metric=faiss.METRIC_INNER_PRODUCT)
    return found


def by_numpy(queries: Array, rows: Array, top: int) -> tuple[Array, Rows]:
    """The `top` rows with the largest inner products by NumPy: products and row numbers (q, top)."""
    return largest(queries @ rows.T, top)


def largest(scores: Array, top: int) -> tuple[Array, Rows]:
    """The `top` largest of each row and their columns, by PyTorch's fast selection: (q, n) -> (q, top)."""
    values, columns = torch.from_numpy(scores).topk(top, dim=1, sorted=False)
    return values.numpy(), columns.numpy()


def unit(x: NDArray[Any]) -> Array:
    """The rows scaled to unit length, (n, k); a row of zeros stays zero."""
    lengths = np.linalg.norm(x, axis=1, keepdims=True)
    return (x / np.where(lengths > 0, lengths, 1)).astype(np.float32)

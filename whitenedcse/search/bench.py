"""What whitening-k saves in a search and what it loses: size, time, and recall against all components.

n: texts of the index    d: width of its vectors    k: components kept    q: queries

Su et al., BERT-whitening, arXiv:2103.15316, claim less memory and faster retrieval; here both are measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from whitenedcse.evaluation.postprocess import ORDERED, Postprocess, ladder
from whitenedcse.pace import pace
from whitenedcse.report.formats import Grid
from whitenedcse.search.index import Index
from whitenedcse.search.nearest import Array, Rows, by_faiss, engine_at_hand, nearest, pieces, taken, unit

TOP, ALONE = 10, 20  # texts that recall looks at; queries that are timed one by one
BLOCK = 20_000  # rows at a time
COLUMNS = ("vectors", "k", "MB", "made in s", "queries/s", "ms for one", "recall", "of as it is")


class Way(NamedTuple):
    """Vectors (n, k) for the same texts, in parts; what they are, and the seconds it took to make them."""

    name: str
    vectors: Sequence[Array]
    seconds: float


class Measured(NamedTuple):
    """Of a way: its row of the table but for recall, and the rows (q, TOP) that it finds."""

    cells: list[str]
    found: Rows


def bench(index: Index, *, queries: int = 1000, dims: Sequence[int] = ()) -> Grid:
    """A table with a row for each k: `dims`, or d and those of 256, 128, 64 and 32 below it.

    Queries are texts of the index, which do not find themselves. An index that is whitened is cut. Raises
    ValueError for an index of one text and for a k that is not from 1 to d.
    """
    n, d = len(index), index.embedder.width
    dims = sorted({d, *dims}, reverse=True) if dims else ladder(d)
    if n < 2 or queries < 1 or not 1 <= dims[-1] <= dims[0] == d:
        raise ValueError(f"queries={queries}, dims={dims} of an index of {n} texts of width {d}")
    asked = np.sort(np.random.default_rng(0).choice(n, min(queries, n), replace=False))
    final = index.embedder.final
    white = final is not None and final.provenance.get("kind") in ORDERED
    every = [measured(way, asked) for way in (cut(index, dims) if white else whitened(index, dims))]
    plain, full = every[0].found, every[0 if white else 1].found
    rows = [
        [*one.cells, f"{recall(one.found, full):.3f}", f"{recall(one.found, plain):.3f}"] for one in every
    ]
    return Grid("Search by whitening-k", COLUMNS, rows, notes(index, len(asked), white), right=range(1, 8))


def whitened(index: Index, dims: Sequence[int]) -> Iterator[Way]:
    """The vectors as they are; then whitening-k, fitted to them, exactly and in memory that does not grow."""
    yield Way("as it is", index.vectors, 0.0)
    fit, began = Postprocess("whitening"), time.perf_counter()
    with pace("fitted", len(index)) as more:
        for _, block in pieces(index.vectors, BLOCK):
            fit.partial_fit(block)
            more(len(block))
    _ = fit.fitted  # solved now, so that its time counts
    seconds = time.perf_counter() - began
    for k in dims:
        yield made("whitened", index, lambda x, k=k: fit.transform(x, k), seconds)  # type: ignore[misc]


def cut(index: Index, dims: Sequence[int]) -> Iterator[Way]:
    """The vectors as they are, and without their last components."""
    yield Way("as it is", index.vectors, 0.0)
    for k in dims[1:]:
        yield made("cut", index, lambda x, k=k: x[:, :k], 0.0)  # type: ignore[misc]


def made(name: str, index: Index, mapped: Callable[[Array], np.ndarray], before: float) -> Way:
    """The index's vectors, mapped and of unit length again."""
    began, parts = time.perf_counter(), []
    for _, block in pieces(index.vectors, BLOCK):
        parts.append(unit(mapped(block)))
    return Way(name, parts, before + time.perf_counter() - began)


def measured(way: Way, asked: Rows) -> Measured:
    """Search with the vectors of these rows."""
    queries, k = taken(way.vectors, asked), way.vectors[0].shape[1]
    alone = []
    for i in range(min(ALONE, len(asked))):  # which also brings the vectors into memory
        began = time.perf_counter()
        nearest(queries[i : i + 1], way.vectors, TOP)
        alone.append(time.perf_counter() - began)
    began = time.perf_counter()
    _, rows = nearest(queries, way.vectors, TOP + 1)
    speed = len(asked) / (time.perf_counter() - began)
    size = sum(part.nbytes for part in way.vectors) / 1e6
    numbers = [f"{size:,.1f}", f"{way.seconds:.1f}", f"{speed:,.0f}", f"{np.median(alone) * 1e3:.1f}"]
    return Measured([way.name, str(k), *numbers], without(rows, asked))


def without(rows: Rows, own: Rows) -> Rows:
    """(q, k + 1) -> (q, k): without each query's own row, or, where that was not found, without the last."""
    keep = rows != own[:, None]
    keep[keep.all(1), -1] = False
    return rows[keep].reshape(len(rows), -1)


def recall(found: Rows, wanted: Rows) -> float:
    """The share of the wanted rows that was found."""
    return float((found[:, :, None] == wanted[:, None, :]).any(1).mean())


def notes(index: Index, queries: int, white: bool) -> list[str]:
    """What the numbers are."""
    texts = sum(p.texts.data.nbytes + p.ids.data.nbytes + 16 * len(p.texts) for p in index.parts) / 1e6
    whole = "the index as it is" if white else f"all {index.embedder.width} whitened components"
    kind = (
        "the index is whitened: only its last components are cut"
        if white
        else "whitened: fitted to the vectors of this index, and of unit length again"
    )
    few = len(index) < 10 * index.embedder.width and not white
    return [
        *(
            ["few texts for so many components: whitening puts n < d texts all equally far apart"]
            if few
            else []
        ),
        f"{len(index):,} texts, of which {queries:,} are queries that do not find themselves; exact, by "
        + ("FAISS" if engine_at_hand() is by_faiss else "NumPy"),
        f"recall: of the {TOP} texts nearest by {whole}, the share found; of as it is: the same of the "
        "index's own vectors",
        kind,
        f"MB: vectors in float32, in memory and on disk; texts and ids add {texts:,.1f} MB to each",
        "made in s: fitting and mapping; queries/s: all at once; ms for one: median of one by one; all "
        "without encoding",
    ]

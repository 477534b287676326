"""What whitening-k, shorter vectors and the indices of FAISS save in a search, and what they lose.

n: texts of an index    d: width    k: components kept    q: queries

Su et al., BERT-whitening, arXiv:2103.15316, claim less memory and faster retrieval; `bench` measures both.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from whitenedcse.console import Grid, pace
from whitenedcse.evaluation.postprocess import Postprocess, ladder
from whitenedcse.evaluation.transforms import ORDERED
from whitenedcse.files import writing
from whitenedcse.serving import approximate
from whitenedcse.serving.index import Index
from whitenedcse.serving.nearest import (
    Array,
    Rows,
    available_engine,
    by_faiss,
    nearest,
    pieces,
    taken,
    unit,
)

TOP, QUERIES, ALONE = 10, 1000, 20  # texts that recall looks at; queries; those timed one by one
BLOCK = 20_000  # rows at a time
SIZES = ("vectors", "k", "search", "bytes/vector", "MB", "build s", "queries/s", "ms/query")
COLUMNS = (*SIZES, "recall@10", "re-ranked", "as it is")
EVERY, EXACT = "all", "exact"
Find = Callable[[Array, int], Rows]


class Way(NamedTuple):
    """The name of a kind of vectors, those vectors (n, k) in parts, and the seconds it took to make them."""

    name: str
    vectors: Sequence[Array]
    seconds: float

    @property
    def width(self) -> int:
        """k"""
        return self.vectors[0].shape[1]


class Measured(NamedTuple):
    """The cells of a search, without recall; the rows (q, TOP) found, and those after re-ranking more."""

    cells: list[str]
    found: Rows
    ranked: Rows


def bench(
    index: Index,
    *,
    dims: Sequence[int] = (),
    factories: Sequence[str] = (),
    rows: int | None = None,
    prefix: bool = False,
) -> Grid:
    """A table of search speed, size and recall with a row for each kind of vectors, k and kind of search.

    dims: the k, or those of `ladder`. factories: of FAISS, beside exact search; "all" for those of `usual`.
    rows: so many texts, drawn by a fixed seed, stand for the index; None for all. prefix: also the first k
    channels as they are, of an encoder trained with loss=matryoshka. The queries are QUERIES of the texts,
    which do not find themselves. An index that is whitened is cut to k components. Raises ValueError for
    fewer than two texts, a k that is not from 1 to d, and a factory that fits no kind of vectors.
    """
    parts, d = drawn(index.vectors, rows), index.embedder.width
    n = sum(map(len, parts))
    if n < 2:
        raise ValueError(f"{n} of the {len(index)} texts of this index are measured; take 2 or more")
    if wrong := [k for k in dims if not 1 <= k <= d]:
        raise ValueError(f"--dims {wrong[0]}: this index has width {d}; name numbers from 1 to {d}")
    dims = sorted({d, *dims}, reverse=True) if dims else ladder(d)
    for factory in factories:
        refuse_unfit(factory, dims, n)
    asked = np.sort(np.random.default_rng(0).choice(n, min(QUERIES, n), replace=False))
    final = index.embedder.final
    white = final is not None and final.provenance.get("kind") in ORDERED
    table: list[list[str]] = []
    whole: dict[str, Rows] = {}  # what exact search finds by all components of each kind
    ways = cut(parts, dims, "cut") if white else whitened(parts, dims, prefix)
    for way in ways:
        for one in searches(way, asked, factories):
            wanted = whole.setdefault("as it is" if way.name in ("cut", "prefix") else way.name, one.found)
            shares = (recall(rows, wanted) for rows in (one.found, one.ranked))
            table.append(
                [*one.cells, *(f"{share:.3f}" for share in (*shares, recall(one.found, whole["as it is"])))]
            )
    return Grid(
        "Search", COLUMNS, table, notes(index, n, len(asked), white), right=[1, *range(3, len(COLUMNS))]
    )


def refuse_unfit(factory: str, dims: Sequence[int], n: int) -> None:
    """Raise ValueError for a factory that n rows of none of these widths can have, the widest first."""
    errors = []
    for k in dims if factory != EVERY else ():
        try:
            return approximate.refuse_few(factory, k, n)
        except ValueError as error:
            errors.append(error)
    if errors:
        raise ValueError(f"{errors[0]} (width {dims[0]})")


def drawn(parts: Sequence[Array], rows: int | None) -> Sequence[Array]:
    """So many of these rows, in their order; all of them for None, or if there are fewer."""
    n = sum(map(len, parts))
    if rows is None or rows >= n:
        return parts
    return [taken(parts, np.sort(np.random.default_rng(0).choice(n, max(0, rows), replace=False)))]


def usual(n: int, k: int) -> list[str]:
    """The factories of FAISS to compare for n rows of width k.

    int8, product codes and binary ones, each in one list, in many lists or in a graph, where n suffices and
    it makes sense. LSHt: whether each channel is above its median. RaBitQ: signs, and two numbers a row.
    """
    product = max(m for m in range(1, max(1, k // 8) + 1) if k % m == 0)  # a byte for eight channels
    lists = 1 << int(np.log2(max(1, min(4 * n**0.5, n / approximate.LEAST))))
    codes = ["Flat", "SQ8", *([f"PQ{product}"] if n >= approximate.LEAST * 256 else []), "RaBitQ"]
    many = [f"IVF{lists},{code}" for code in codes] if lists > 1 else []
    return [*codes[1:-1], "LSHt", *many, "HNSW32", "HNSW32,SQ8"]


def whitened(parts: Sequence[Array], dims: Sequence[int], prefix: bool) -> Iterator[Way]:
    """The index's own vectors, then whitening-k of them for each k; memory does not grow with the index."""
    yield Way("as it is", parts, 0.0)
    fit, began = Postprocess("whitening"), time.perf_counter()
    with pace("fitted", sum(map(len, parts))) as more:
        for _, block in pieces(parts, BLOCK):
            fit.partial_fit(block)
            more(len(block))
    _ = fit.fitted  # solved now, so that its time counts
    seconds = time.perf_counter() - began
    for k in dims:
        yield made("whitened", parts, partial(fit.transform, k=k), seconds)
    yield from [*cut(parts, dims, "prefix")][1:] if prefix else ()


def cut(parts: Sequence[Array], dims: Sequence[int], name: str) -> Iterator[Way]:
    """The index's own vectors, then these without their last components, for each k."""
    yield Way("as it is", parts, 0.0)
    for k in dims[1:]:
        yield made(name, parts, lambda x, k=k: x[:, :k], 0.0)  # type: ignore[misc]


def made(name: str, parts: Sequence[Array], mapped: Callable[[Array], Any], before: float) -> Way:
    """The vectors, transformed by a function and scaled to unit length. before: seconds to add."""
    began, every = time.perf_counter(), []
    for _, block in pieces(parts, BLOCK):
        every.append(unit(mapped(block)))
    return Way(name, every, before + time.perf_counter() - began)


def searches(way: Way, asked: Rows, factories: Sequence[str]) -> Iterator[Measured]:
    """Exact search, and that by each factory that fits these vectors."""
    n = sum(map(len, way.vectors))
    yield measured(way, asked, EXACT, lambda q, top: nearest(q, way.vectors, top)[1], (4 * way.width, 0))
    for factory in usual(n, way.width) if EVERY in factories else factories:
        try:
            approximate.refuse_few(factory, way.width, n)
        except ValueError:
            continue  # such as PQ48 for a width that 48 does not divide
        began = time.perf_counter()
        index = approximate.trained(way.vectors, factory)
        cost = approximate.size(index) / n, time.perf_counter() - began
        yield measured(way, asked, factory, partial(by, index), cost)


def by(index: Any, queries: Array, top: int) -> Rows:
    """The rows nearest to each query by an index of FAISS: (q, d) -> (q, top); -1 stands for none."""
    rows: Rows = index.search(queries, top)[1]
    return rows


def measured(way: Way, asked: Rows, name: str, find: Find, cost: tuple[float, float]) -> Measured:
    """Measure a search whose queries are these rows of the vectors. cost: bytes a vector, seconds."""
    queries, (nbytes, seconds) = taken(way.vectors, asked), cost
    alone = []
    for i in range(min(ALONE, len(asked))):  # which also brings the vectors into memory
        began = time.perf_counter()
        find(queries[i : i + 1], TOP)
        alone.append(time.perf_counter() - began)
    began = time.perf_counter()
    rows = find(queries, TOP + 1)
    speed = len(asked) / (time.perf_counter() - began)
    size = nbytes * sum(map(len, way.vectors)) / 1e6
    cells = [way.name, str(way.width), name, f"{nbytes:,.0f}", f"{size:,.1f}", f"{way.seconds + seconds:.1f}"]
    cells += [f"{speed:,.0f}", f"{np.median(alone) * 1e3:.2f}"]
    ranked = (
        rows
        if name == EXACT
        else approximate.ranked(queries, way.vectors, find(queries, approximate.WIDER * TOP), TOP + 1)[1]
    )
    return Measured(cells, without(rows, asked), without(ranked, asked))


def without(rows: Rows, own: Rows) -> Rows:
    """Found rows without each query's own, or else without the last: (q, k + 1) -> (q, k)."""
    keep = rows != own[:, None]
    keep[keep.all(1), -1] = False
    return rows[keep].reshape(len(rows), -1)


def recall(found: Rows, wanted: Rows) -> float:
    """The share of the wanted rows (q, k) that are among those found."""
    return float((found[:, :, None] == wanted[:, None, :]).any(1).mean())


def notes(index: Index, n: int, queries: int, white: bool) -> list[str]:
    """The notes below the table, which explain its numbers."""
    texts = sum(p.texts.data.nbytes + p.ids.data.nbytes + 16 * len(p.texts) for p in index.parts) / 1e6
    kind = (
        "the index is whitened: only its last components are cut"
        if white
        else "whitened: fitted to the vectors of this index, and of unit length again"
    )
    d = index.embedder.width
    few = (
        f"few texts for so many components: whitening is fitted to n = {n:,}, below 10 d = {10 * d:,}; "
        "with n <= d it puts all of them equally far apart"
    )
    return [
        *([few] if n < 10 * d and not white else []),
        f"{n:,} texts, of which {queries:,} are queries that do not find themselves; exact, by "
        + ("FAISS" if available_engine() is by_faiss else "NumPy")
        + ", or by an index of FAISS, named by what --factory takes",
        f"recall@10: of the {TOP} texts that exact search finds by all components of the same kind of "
        "vectors, the share found; as it is: the same of the index's own vectors",
        f"re-ranked: recall@10 where the index of FAISS proposes {approximate.WIDER} times as many, which "
        "are compared by their vectors of the same k, as search query does; of exact search it is recall@10",
        kind,
        "bytes/vector, MB: the vectors in float32, or the index of FAISS; texts and ids add "
        f"{texts:,.1f} MB to each",
        "build s: fitting, transforming, indexing; queries/s: all at once; ms/query: median of one by one; "
        "all without encoding and re-ranking",
    ]


def picture(grid: Grid, path: Path) -> None:
    """Draw recall against bytes a vector, of the codes alone and re-ranked, as .png or .svg."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    from whitenedcse.report.plots import COLOURS, STYLE

    rows = [dict(zip(grid.columns, row, strict=True)) for row in grid.rows]
    kinds = list(dict.fromkeys((row["vectors"], row["k"]) for row in rows))
    with rc_context(STYLE), writing(path) as stream:
        figure = Figure(figsize=(9, 4), layout="constrained")
        axes = figure.subplots(1, 2, sharey=True)
        for ax, column in zip(axes, ("recall@10", "re-ranked"), strict=True):
            for kind, colour in zip(kinds, COLOURS * len(kinds), strict=False):
                for row in (row for row in rows if (row["vectors"], row["k"]) == kind):
                    mark = {"IVF": "s", "HNS": "^", "exa": "*"}.get(row["search"][:3], "o")
                    ax.plot(number(row["bytes/vector"]), number(row[column]), mark, color=colour, mfc="none")
                ax.plot([], [], "-", color=colour, label=" ".join(kind))
            ax.set(xscale="log", xlabel="bytes a vector", ylabel=column, title=column)
        for mark, name in (("*", "exact"), ("o", "every code"), ("s", "IVF"), ("^", "HNSW")):
            axes[0].plot([], [], mark, color="black", mfc="none", label=name)
        axes[0].legend(fontsize=7)
        figure.savefig(stream, format=path.suffix.removeprefix(".") or "png", metadata={})


def number(cell: str) -> float:
    """The number in a cell of the table."""
    return float(cell.replace(",", ""))

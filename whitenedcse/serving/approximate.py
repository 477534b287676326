"""Search that does not compare a query with every row: an index of FAISS beside the vectors.

n: rows    d: width    q: queries    r: rows proposed for each query

`index.faiss` begins with the last step of the embedder, whitening and unit length, as transforms of FAISS:
plain FAISS reads it, and its queries are vectors before that step. Its distances are squared Euclidean ones,
2 - 2 cosine for vectors of unit length. The file holds numbers and no code; FAISS parses it in C++, and only
bytes that are as they were written.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from whitenedcse.console import lacking, pace
from whitenedcse.files import parsing
from whitenedcse.model.head import Final
from whitenedcse.serving.checked import CURE, Blocks, Stream
from whitenedcse.serving.nearest import Array, Rows, Vectors, nearest, pieces, products, taken

FILE = "index.faiss"
LEAST, MOST = 39, 64  # rows a centroid is learnt from: fewer, and FAISS warns; more is time and memory
SAMPLE = 65_536  # rows that anything else is learnt from, at most
PROBES, SHARE = 16, 64  # lists that are searched: so many at least, and one of so many
BEAM = 64  # neighbours that a search in a graph keeps, at least
WIDER = 10  # times the rows wanted are proposed, and then compared by their whole vectors


def engine() -> Any:
    """FAISS. Raises ValueError where it is not installed."""
    try:
        import faiss
    except ImportError as error:
        raise lacking("an index of FAISS", "faiss-cpu", "search", error) from error
    return faiss


@contextmanager
def one_line(factory: str, width: int) -> Iterator[None]:
    """A context in which an error of FAISS is a ValueError of one line, without names of its source files.

    width: of the vectors, whose divisors are named where FAISS asks for one.
    """
    try:
        yield
    except RuntimeError as error:
        source = r"^Error in .*? at \S+:\d+: (Error: )?('.*?' failed: )?"
        why = re.sub(source, "", " ".join(str(error).split()))
        cure = ""
        if "could not parse" in why:
            cure = "; it knows Flat, SQ8, PQ16, LSHt, HNSW32, IVF64,Flat and others"
        elif "multiple" in why:
            fitting = ", ".join(str(m) for m in range(1, width + 1) if width % m == 0)
            cure = f"; the vectors have {width} numbers, a multiple of {fitting}"
        raise ValueError(f"--factory {factory!r}: FAISS says {why:.200}{cure}") from error


def made(factory: str, width: int) -> Any:
    """An empty index of FAISS for rows of this width, with how it is trained and searched set.

    Raises ValueError for what FAISS does not know.
    """
    faiss = engine()
    with one_line(factory, width):
        index = faiss.index_factory(width, factory, faiss.METRIC_L2)
    if "IDMap" in factory or not all(getattr(one, "nlist", 1) for one in inside(index)):
        raise ValueError(f"--factory {factory!r}: one or more lists, and rows numbered from 0 (no IDMap)")
    for one in inside(index):
        if hasattr(one, "do_polysemous_training"):  # for searches by Hamming distance: a hundred times slower
            one.do_polysemous_training = False
        if hasattr(one, "nprobe"):
            one.nprobe = min(one.nlist, max(PROBES, one.nlist // SHARE))
        if hasattr(one, "hnsw"):
            one.hnsw.efSearch = BEAM
    return index


def inside(index: Any) -> Iterator[Any]:
    """An index of FAISS and those that it consists of, each as its own class."""
    faiss = engine()
    while index is not None:
        index = faiss.downcast_index(index)
        yield index
        inner = (getattr(index, name, None) for name in ("index", "base_index", "storage"))
        index = next((one for one in inner if one is not None), None)


def centroids(index: Any) -> int:
    """The number of centroids that are learnt together: lists, or values of a product quantiser's byte."""
    counts = [
        (getattr(one, "nlist", 0), getattr(getattr(one, "pq", None), "ksub", 0)) for one in inside(index)
    ]
    return max(number for pair in counts for number in pair)


def needed(factory: str, width: int) -> int:
    """The number of rows that training an index takes at least. Raises ValueError as `made` does."""
    return max(1, LEAST * centroids(made(factory, width)))


def refuse_few(factory: str, width: int, n: int) -> None:
    """Raise ValueError if n rows are too few to train the index."""
    if n < (least := needed(factory, width)):
        raise ValueError(
            f"--factory {factory!r} learns {least // LEAST:,} centroids from {LEAST} rows each: {least:,} "
            f"rows are needed, and there are {n:,}; use fewer lists, or another code, or no --factory"
        )


def trained(parts: Sequence[Vectors], factory: str) -> Any:
    """An index of FAISS with these rows (n, d), trained on some drawn by a fixed seed, and added in blocks.

    Memory holds the index, and at most 64 rows for each of its centroids, or 65,536 if it has none. Raises
    ValueError for a factory that FAISS does not know, or for too few rows.
    """
    n, width = sum(map(len, parts)), parts[0].shape[1]
    refuse_few(factory, width, n)
    index = made(factory, width)
    size = min(n, MOST * centroids(index) or SAMPLE)
    rows = np.sort(np.random.default_rng(0).choice(n, size, replace=False))
    with one_line(factory, width), pace("indexed", n) as more:
        index.train(taken(parts, rows))
        for _, block in pieces(parts):
            index.add(np.ascontiguousarray(block))
            more(len(block))
        index.search(np.ascontiguousarray(block[:1]), 1)  # which some kinds refuse only now
    return index


def size(index: Any) -> int:
    """The number of bytes of an index of FAISS as a file."""
    faiss, counts = engine(), []
    faiss.write_index(index, faiss.PyCallbackIOWriter(lambda block: counts.append(len(block))))
    return sum(counts)


def write(file: Path, vectors: Vectors, factory: str, final: Final | None) -> None:
    """Write an index of these rows (n, d), of unit length, whose queries are vectors before the step `final`.

    It is an IndexPreTransform: a LinearTransform where `final` has one, a NormalizationTransform, and what
    `factory` names. Raises ValueError as `trained` does.
    """
    faiss = engine()
    index = faiss.IndexPreTransform(trained([vectors], factory))
    index.prepend_transform(faiss.NormalizationTransform(vectors.shape[1], 2.0))
    if final is not None and final.weight is not None and final.bias is not None:
        k, d = final.weight.shape
        linear = faiss.LinearTransform(d, k, True)
        faiss.copy_array_to_vector(final.weight.numpy(force=True).ravel(), linear.A)
        faiss.copy_array_to_vector(final.bias.numpy(force=True), linear.b)
        linear.is_trained = True
        index.prepend_transform(linear)
    with file.open("wb") as stream:
        faiss.write_index(index, faiss.PyCallbackIOWriter(stream.write))


class Near:
    """What `write` wrote, read when it is first asked: n rows of width d.

    known: see `checked.Blocks`. Raises ValueError, naming the file, if it is damaged.
    """

    def __init__(self, file: Path, known: dict[str, str] | None, n: int, width: int) -> None:
        self.file, self.blocks, self.held = file, Blocks(file, known), (n, width)

    @cached_property
    def index(self) -> Any:
        """The index after its transforms."""
        faiss = engine()
        with parsing(self.file, CURE):
            whole = faiss.read_index(faiss.PyCallbackIOReader(Stream(self.blocks)))
            if not isinstance(whole, faiss.IndexPreTransform) or (whole.ntotal, whole.index.d) != self.held:
                raise ValueError(f"it holds {whole.ntotal} rows in {type(whole).__name__}, not {self.held}")
        self._whole = whole  # which owns the other one
        return faiss.downcast_index(whole.index)

    def rows(self, queries: Array, reach: int) -> Rows:
        """At most `reach` rows for each query, (q, d) -> (q, r); -1 stands for none.

        Raises ValueError for rows that are not there, which a forged file may name.
        """
        rows: Rows = self.index.search(np.ascontiguousarray(queries), min(reach, self.held[0]))[1]
        if len(rows) and not -1 <= rows.min() <= rows.max() < self.held[0]:
            raise ValueError(f"{self.file} names rows that are not there; {CURE}")
        return rows


def found(queries: Array, parts: Sequence[tuple[Vectors, Near | None]], top: int) -> tuple[Array, Rows]:
    """The nearest among the rows that are proposed: products (q, k) and row numbers (q, k), largest first.

    Each part proposes ten times `top` rows by its FAISS index, or its `top` by exact search if it has none.
    The products are those of the whole vectors, computed as `nearest` does. -1 stands for no row: an index
    of lists may propose fewer than `top`.
    """
    vectors, start, every = [part for part, _ in parts], 0, []
    for part, near in parts:
        rows = nearest(queries, [part], top)[1] if near is None else near.rows(queries, WIDER * top)
        every.append(np.where(rows < 0, -1, rows + start))
        start += len(part)
    return ranked(queries, vectors, np.hstack(every), top)


def ranked(queries: Array, vectors: Sequence[Vectors], rows: Rows, top: int) -> tuple[Array, Rows]:
    """The best `top` of these rows (q, r) by their whole vectors; returns what `found` does."""
    scores = products(queries, vectors, np.maximum(rows, 0))
    scores[rows < 0] = -np.inf
    order = np.lexsort((rows, -scores))[:, :top]
    return np.take_along_axis(scores, order, 1), np.take_along_axis(rows, order, 1)

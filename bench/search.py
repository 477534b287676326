"""What whitening-k and indices of FAISS save in a search, and lose: python -m bench.search INDEX [options]

--dims K ...      components of a whitening fitted to the vectors (default: those of 256 128 64 32 below d)
--factory F ...   of FAISS, beside Flat, such as SQ8 HNSW32 IVF1024,SQ8
--rows N          measure with N of the texts, drawn by a fixed seed

INDEX is a directory that `whitenedcse search build` wrote, with the factory Flat. 1,000 of its vectors are
queries; recall@10 is the share of the ten others that comparing all vectors of the kind finds, and "as it
is" that share of what the index's own vectors find. Su et al., BERT-whitening, arXiv:2103.15316.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whitenedcse.console import Grid, say
from whitenedcse.evaluation.postprocess import Postprocess
from whitenedcse.serving.search import Index, engine, made, train

Array = NDArray[np.float32]
TOP, QUERIES = 10, 1000
COLUMNS = ("vectors", "k", "search", "bytes/vector", "build s", "queries/s", "recall@10", "as it is")


def vectors(index: Index, rows: int | None) -> Array:
    """The vectors (n, d) of an index, of unit length, or so many of them."""
    faiss = engine()
    flat = [faiss.downcast_index(part.vectors.index) for part in index.parts]
    x = np.concatenate([one.reconstruct_n(0, one.ntotal) for one in flat])
    if rows is None or rows >= len(x):
        return x
    return x[np.sort(np.random.default_rng(0).choice(len(x), rows, replace=False))]


def found(x: Array, asked: NDArray[np.int64], factory: str) -> tuple[NDArray[np.int64], list[str]]:
    """The TOP rows found for each of those `asked`, without itself; bytes, seconds and speed as text."""
    began = time.perf_counter()
    index = made(factory, x.shape[1])
    train(index, x)
    index.add(x)
    built = time.perf_counter() - began
    began = time.perf_counter()
    rows = index.search(x[asked], TOP + 1)[1]
    speed = len(asked) / (time.perf_counter() - began)
    own = rows == asked[:, None]
    own[~own.any(1), -1] = True  # an equal vector came first
    size = len(engine().serialize_index(index)) / len(x)
    return rows[~own].reshape(len(asked), TOP), [f"{size:,.0f}", f"{built:.1f}", f"{speed:,.0f}"]


def recall(rows: NDArray[np.int64], wanted: NDArray[np.int64]) -> str:
    """The share of the wanted rows (q, k) that are among those found."""
    return f"{(rows[:, :, None] == wanted[:, None, :]).any(1).mean():.3f}"


def table(x: Array, dims: Sequence[int], factories: Sequence[str]) -> Iterator[list[str]]:
    """A row for each kind of vectors, k and kind of search."""
    n, d = x.shape
    asked = np.sort(np.random.default_rng(0).choice(n, min(QUERIES, n), replace=False))
    fit = Postprocess("whitening").fit(x)
    ways: dict[tuple[str, int], Any] = {("as it is", d): x}
    ways |= {("whitened", k): fit.transform(x, k).astype(np.float32) for k in dims}
    whole = None
    for (name, k), some in ways.items():
        exact = None
        for factory in ("Flat", *factories):
            rows, cells = found(some, asked, factory)
            exact = rows if exact is None else exact
            whole = rows if whole is None else whole
            yield [name, str(k), factory, *cells, recall(rows, exact), recall(rows, whole)]


def main() -> None:
    """One table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("index")
    parser.add_argument("--dims", type=int, nargs="+")
    parser.add_argument("--factory", nargs="+", default=())
    parser.add_argument("--rows", type=int)
    options = parser.parse_args()
    x = vectors(Index.load(options.index), options.rows)
    dims = options.dims or [k for k in (256, 128, 64, 32) if k < x.shape[1]]
    rows = list(table(x, dims, options.factory))
    say(Grid(f"{len(x):,} texts", COLUMNS, rows, right=[1, *range(3, len(COLUMNS))]))


if __name__ == "__main__":
    main()

"""An index: texts, their vectors, and the embedder that encodes queries in the same way; its search is exact.

n: texts    d: width    q: queries    k: texts wanted for each query

FAISS proposes the nearest rows, or NumPy where FAISS is not installed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from whitenedcse.app.terminal import pace
from whitenedcse.data.corpus import LONGEST, Corpus, rows, texts
from whitenedcse.linalg import refuse_infinite
from whitenedcse.model.embedder import Embedder
from whitenedcse.model.sentence_transformers import DOCUMENT
from whitenedcse.serving import index_files
from whitenedcse.serving.exports import scaled
from whitenedcse.serving.index_files import Part, Strings

Array = NDArray[np.float32]
Rows = NDArray[np.int64]
Engine = Callable[[Array, Array, int], tuple[Array, Rows]]

QUERIES, ROWS = 256, 16_384  # at a time: their products are 16 MB


def nearest(queries: Array, parts: Sequence[Array], top: int) -> tuple[Array, Rows]:
    """The rows with the largest inner products with each query, largest first.

    queries: (q, d), parts: of (n, d), rows of unit length -> products (q, k) and row numbers (q, k). k is
    `top`, or n if that is less: there is no threshold. The products are computed in float64 and then rounded,
    and equal ones come in the order of the rows, so every engine gives the same. Memory does not grow with q
    or n. Raises ValueError for top < 1 and for another width.
    """
    n, widths = sum(map(len, parts)), {array.shape[-1] for array in (queries, *parts)}
    if top < 1 or n < 1 or len(widths) > 1:
        raise ValueError(f"top={top} of {n} rows; widths {sorted(widths)}: one or more, and one width")
    top, engine = min(top, n), available_engine()
    out = np.empty((len(queries), top), np.float32), np.empty((len(queries), top), np.int64)
    for start in range(0, len(queries), QUERIES):
        block = slice(start, start + QUERIES)
        out[0][block], out[1][block] = decided(queries[block], parts, top, min(n, 2 * top + 16), engine)
    return out


def decided(
    queries: Array, parts: Sequence[Array], top: int, reach: int, engine: Engine
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


def proposed(queries: Array, parts: Sequence[Array], reach: int, engine: Engine) -> tuple[Array, Rows]:
    """The `reach` rows with the largest products in float32, unordered: products and row numbers."""
    near, rows = np.empty((len(queries), 0), np.float32), np.empty((len(queries), 0), np.int64)
    for start, piece in pieces(parts):
        more, at = engine(queries, piece, min(reach, len(piece)))
        near, rows = np.hstack([near, more]), np.hstack([rows, at + start])
        if near.shape[1] > reach:
            near, chosen = largest(near, reach)
            rows = np.take_along_axis(rows, chosen, 1)
    return near, rows


def products(queries: Array, parts: Sequence[Array], rows: Rows) -> Array:
    """Inner products in float64, rounded to float32: (q, d), row numbers (q, r) -> (q, r)."""
    out = np.empty(rows.shape, np.float32)
    for i, query in enumerate(queries.astype(np.float64)):
        for start in range(0, rows.shape[1], ROWS):
            at = slice(start, start + ROWS)
            out[i, at] = np.einsum("nd,d->n", taken(parts, rows[i, at]).astype(np.float64), query)
    return out


def taken(parts: Sequence[Array], rows: Rows) -> Array:
    """The vectors of these row numbers."""
    ends = np.cumsum([len(part) for part in parts])
    where = np.searchsorted(ends, rows, side="right")
    out = np.empty((len(rows), parts[0].shape[1]), np.float32)
    for i in np.unique(where):
        out[where == i] = parts[i][rows[where == i] - (ends[i] - len(parts[i]))]
    return out


def pieces(parts: Sequence[Array], size: int = ROWS) -> Iterator[tuple[int, Array]]:
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


BLOCK = 20_000  # texts at a time


class Hit(NamedTuple):
    """A text that was found, its id, and the cosine of its vector with the query's."""

    cosine: float
    id: str
    text: str


class Index:
    """Texts with exact search by cosine, in memory or memory-mapped from a directory.

    embedder: with any last step, e.g. of `exports.whitened`; unit length is added here. Texts are encoded
        after its prompt "document" ("passage", "corpus") and queries after its prompt "query", or else both
        after its prompt for any text.

    >>> from whitenedcse.model.scratch import small_bert
    >>> embedder = Embedder(encoder=small_bert(vocabulary=200, layers=1, width=8, heads=1))
    >>> index = Index.build(embedder, ["a cat sleeps", "a dog runs", "it rains"])
    >>> [(hit.text, hit.id) for hit in index.query(["a dog runs"], top=1)[0]]
    [('a dog runs', '1')]
    """

    def __init__(self, embedder: Embedder, parts: Iterable[Part] = ()) -> None:
        self.embedder, self.parts = scaled(searching(embedder), unit=True), list(parts)
        self._place: tuple[Path, int] | None = None  # a directory, and how many of the parts it holds

    def __len__(self) -> int:
        return sum(len(part.texts) for part in self.parts)

    @property
    def vectors(self) -> list[Array]:
        """The vectors (n, d), in parts."""
        return [part.vectors for part in self.parts]

    @classmethod
    def build(cls, embedder: Embedder, texts: Iterable[str], ids: Iterable[object] | None = None) -> Index:
        """An index of these texts in memory; `write` makes one on disk."""
        return cls(embedder).add(texts, ids)

    def add(self, texts: Iterable[str], ids: Iterable[object] | None = None) -> Index:
        """Add texts; the id of a text is its number, from 0, unless `ids` are given.

        Raises ValueError for another number of ids than texts.
        """
        if isinstance(texts, str):
            raise ValueError(f"texts={texts!r:.50} is one text; give a list of them")
        texts = list(texts)
        labels = [str(i) for i in (range(len(self), len(self) + len(texts)) if ids is None else ids)]
        if len(labels) != len(texts):
            raise ValueError(f"{len(labels)} ids for {len(texts)} texts; one for each")
        self.parts += list(encoded(self.embedder, zip(labels, texts, strict=True), bf16=False))
        return self

    def query(self, texts: Sequence[str], top: int = 10, *, prompt: str | None = None) -> list[list[Hit]]:
        """For each query the `top` nearest texts, nearest first; all of them if there are fewer.

        prompt: a text put before each query; None for the index's own.
        """
        asked = self.embedder.prompt_of("query") if prompt is None else prompt
        found = nearest(self.embedder.encode(texts, prompt=asked), self.vectors, top)
        return [[self.hit(*one) for one in zip(*row, strict=True)] for row in zip(*found, strict=True)]

    def hit(self, cosine: float, row: int) -> Hit:
        """The `Hit` of a row number."""
        for part in self.parts:
            if row < len(part.texts):
                break
            row -= len(part.texts)
        return Hit(float(cosine), part.ids[row], part.texts[row])

    def save(self, directory: str | Path) -> None:
        """Write the index; to the directory it was loaded from or saved to, only new texts are appended.

        Raises FileExistsError for any other directory that exists.
        """
        directory = Path(directory).absolute()
        place, held = self._place or (None, 0)
        new = self.parts[held:] if directory == place else self.parts
        if directory != place:
            index_files.write(directory, self.embedder, new)
        elif new:
            index_files.append(directory, sum(len(part.texts) for part in self.parts[:held]), new)
        self._place = (directory, len(self.parts))

    @classmethod
    def load(cls, directory: str | Path) -> Index:
        """The index that `save` or `write` wrote; its arrays are memory-mapped."""
        index = cls(*index_files.load(Path(directory)))
        index._place = (Path(directory).absolute(), len(index.parts))
        return index


def searching(embedder: Embedder, prompt: str | None = None, query_prompt: str | None = None) -> Embedder:
    """The embedder of an index: its prompt is that of the texts, and its only other one that of queries.

    prompt, query_prompt: put before each text and each query. None for the embedder's own; a prompt given for
    texts is that of queries too, unless there is one for them.
    """
    texts = embedder.prompt_of(*DOCUMENT) if prompt is None else prompt
    own = embedder.prompts.get("query", embedder.prompt if prompt is None else prompt)
    queries = own if query_prompt is None else query_prompt
    return embedder.replaced(prompt=texts, prompts={} if queries == texts else {"query": queries})


def write(
    directory: Path, embedder: Embedder, pairs: Iterable[tuple[str, str]], *, bf16: bool = False
) -> None:
    """Write an index of any number of (id, text) to a new directory; memory does not grow with them."""
    embedder = scaled(searching(embedder), unit=True)
    index_files.write(directory, embedder, encoded(embedder, pairs, bf16=bf16))


def labelled(corpus: Corpus, start: int = 0, *, ids: bool = False) -> Iterator[tuple[str, str]]:
    """(id, text) for each text of a corpus that is not blank, read lazily.

    The id is the number of the text, from `start` on, or with `ids` the content of the last column.
    """
    if not ids:
        return zip(map(str, count(start)), texts(corpus), strict=False)
    return ((row[-1], text[:LONGEST]) for row in rows(corpus) for text in row[:-1] if text.strip())


def encoded(embedder: Embedder, pairs: Iterable[tuple[str, str]], *, bf16: bool) -> Iterator[Part]:
    """Parts of an index with 20,000 (id, text) each, encoded lazily.

    Raises ValueError for a vector that is not finite.
    """
    pairs = iter(pairs)
    with pace("encoded") as more:
        while block := list(islice(pairs, BLOCK)):
            ids, texts = zip(*block, strict=True)
            vectors = embedder.encode(texts, bf16=bf16)
            refuse_infinite(vectors, lambda row: f"the vector of {texts[row]!r:.80}")  # noqa: B023
            yield Part(vectors, Strings.of(texts), Strings.of(ids))
            more(len(block))

"""Benchmarks of an embedder: mteb, and what whitening-k saves in a search.

n: sentences, or texts of an index    d: width    k: components kept    q: queries

`mteb.evaluate(Mteb("outputs/NAME"), tasks)` runs mteb. Su et al., BERT-whitening, arXiv:2103.15316, claim
less memory and faster retrieval; `bench` measures both, and recall relative to all components.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from whitenedcse.app.terminal import Grid, pace
from whitenedcse.evaluation.postprocess import Postprocess, ladder
from whitenedcse.evaluation.transforms import ORDERED
from whitenedcse.model.embedder import Embedder
from whitenedcse.model.planes import digest_of
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
COLUMNS = ("vectors", "k", "MB", "build s", "queries/s", "ms/query", "recall", "recall as it is")


Floats = NDArray[np.float64]


class Mteb:
    """An embedder with the interface that mteb 2 expects: `encode`, two similarities, and metadata.

    model: what `Embedder.load` takes, or an embedder.
    prompts: texts put before those that are encoded, by what mteb names them: a task, a kind of task ("STS"),
        "query" or "document", or both as in "NQ-query"; None for the embedder's own. Its prompt for any text
        serves where none of these names fits.
    mteb keeps results by name and revision, also between runs; the revision is a digest of all that decides a
    vector, so another checkpoint of the same name is evaluated anew. Batch sizes are not used.
    """

    def __init__(self, model: str | Path | Embedder, prompts: Mapping[str, str] | None = None) -> None:
        name = "embedder" if isinstance(model, Embedder) else Path(model).resolve().name
        if not isinstance(model, Embedder):
            model = Embedder.load(model).to("cuda" if torch.cuda.is_available() else "cpu")
        self.embedder = model if prompts is None else model.replaced(prompts=prompts)
        self.mteb_model_meta = self._meta(f"whitenedcse/{name}")
        self._last: dict[str, NDArray[np.float32]] = {}

    def encode(self, inputs: Iterable[Mapping[str, Any]], **options: Any) -> Floats:
        """The vectors of batches of texts: (n, k), float64.

        In float32, mteb's cosines tie and swap (STS12: 2e-5 points). A sentence that occurs again in this
        call or the next, mteb's other side of the pairs, is encoded once: padding changes a vector's last
        digits, which set equal pairs apart (STS12, 79 of 3,108: 3e-3 points).
        """
        if "precision" in options:
            raise ValueError(f"precision={options['precision']!r}: vectors here are float; leave it out")
        prompt = self._prompt(options.get("task_metadata"), options.get("prompt_type"))
        sentences = [prompt + sentence for batch in inputs for sentence in batch["text"]]
        new = sorted(set(sentences) - self._last.keys())
        vectors = self.embedder.encode(new, prompt="", progress=options.get("show_progress_bar", True))
        known = self._last | dict(zip(new, vectors, strict=True))
        self._last = {sentence: known[sentence] for sentence in sentences}
        return np.stack([known[sentence] for sentence in sentences]).astype(np.float64)

    def similarity(self, a: Floats | Tensor, b: Floats | Tensor) -> Tensor:
        """The cosines of all pairs: (n, k), (m, k) -> (n, m)."""
        a, b = _rows(a), _rows(b)
        return a @ b.mT / _lengths((a * a).sum(dim=-1)[:, None] * (b * b).sum(dim=-1))

    def similarity_pairwise(self, a: Floats | Tensor, b: Floats | Tensor) -> Tensor:
        """The cosines of corresponding rows: (n, k), (n, k) -> (n,)."""
        a, b = _rows(a), _rows(b)
        return (a * b).sum(dim=-1) / _lengths((a * a).sum(dim=-1) * (b * b).sum(dim=-1))

    def _prompt(self, task: Any, kind: Any) -> str:
        from mteb.models.abs_encoder import get_prompt_name

        name = task and get_prompt_name(self.embedder.prompts, task, kind)
        return self.embedder.prompt_of(*([name] if name else []))

    def _meta(self, name: str) -> Any:
        from mteb.models.model_meta import ModelMeta, ScoringFunction

        embedder = self.embedder
        known = {"name": name, "revision": digest_of(embedder), "embed_dim": embedder.width}
        known |= {"max_tokens": embedder.max_length, "similarity_fn_name": ScoringFunction.COSINE}
        return ModelMeta.create_empty(known)


def _rows(x: Floats | Tensor) -> Tensor:
    return torch.atleast_2d(torch.as_tensor(x, dtype=torch.float64))


def _lengths(squares: Tensor) -> Tensor:
    return squares.sqrt().clamp_min(1e-300)  # a zero vector's cosine is 0


class Way(NamedTuple):
    """The name of a kind of vectors, those vectors (n, k) in parts, and the seconds it took to make them."""

    name: str
    vectors: Sequence[Array]
    seconds: float


class Measured(NamedTuple):
    """The cells of a kind of vectors, without recall, and the rows (q, TOP) that a search finds with it."""

    cells: list[str]
    found: Rows


def bench(index: Index, *, dims: Sequence[int] = ()) -> Grid:
    """A table of search speed, size and recall with a row for each k: `dims`, or those of `ladder`.

    The queries are QUERIES texts of the index, which do not find themselves. An index that is whitened is cut
    to k components. Raises ValueError for an index of one text and for a k that is not from 1 to d.
    """
    n, d = len(index), index.embedder.width
    dims = sorted({d, *dims}, reverse=True) if dims else ladder(d)
    if n < 2 or not 1 <= dims[-1] <= dims[0] == d:
        raise ValueError(f"dims={dims} of an index of {n} texts of width {d}")
    asked = np.sort(np.random.default_rng(0).choice(n, min(QUERIES, n), replace=False))
    final = index.embedder.final
    white = final is not None and final.provenance.get("kind") in ORDERED
    every = [measured(way, asked) for way in (cut(index, dims) if white else whitened(index, dims))]
    plain, full = every[0].found, every[0 if white else 1].found
    rows = [
        [*one.cells, f"{recall(one.found, full):.3f}", f"{recall(one.found, plain):.3f}"] for one in every
    ]
    return Grid("Search by whitening-k", COLUMNS, rows, notes(index, len(asked), white), right=range(1, 8))


def whitened(index: Index, dims: Sequence[int]) -> Iterator[Way]:
    """The index's own vectors, then whitening-k of them for each k; memory does not grow with the index."""
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
    """The index's own vectors, then these without their last components, for each k."""
    yield Way("as it is", index.vectors, 0.0)
    for k in dims[1:]:
        yield made("cut", index, lambda x, k=k: x[:, :k], 0.0)  # type: ignore[misc]


def made(name: str, index: Index, mapped: Callable[[Array], np.ndarray], before: float) -> Way:
    """The index's vectors, transformed by a function and scaled to unit length. before: seconds to add."""
    began, parts = time.perf_counter(), []
    for _, block in pieces(index.vectors, BLOCK):
        parts.append(unit(mapped(block)))
    return Way(name, parts, before + time.perf_counter() - began)


def measured(way: Way, asked: Rows) -> Measured:
    """Measure a search whose queries are these rows of the vectors."""
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
    """Found rows without each query's own, or else without the last: (q, k + 1) -> (q, k)."""
    keep = rows != own[:, None]
    keep[keep.all(1), -1] = False
    return rows[keep].reshape(len(rows), -1)


def recall(found: Rows, wanted: Rows) -> float:
    """The share of the wanted rows (q, k) that are among those found."""
    return float((found[:, :, None] == wanted[:, None, :]).any(1).mean())


def notes(index: Index, queries: int, white: bool) -> list[str]:
    """The notes below the table, which explain its numbers."""
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
        + ("FAISS" if available_engine() is by_faiss else "NumPy"),
        f"recall: of the {TOP} texts nearest by {whole}, the share found; recall as it is: the same of the "
        "index's own vectors",
        kind,
        f"MB: vectors in float32, in memory and on disk; texts and ids add {texts:,.1f} MB to each",
        "build s: fitting and transforming; queries/s: all at once; ms/query: median of one by one; all "
        "without encoding",
    ]

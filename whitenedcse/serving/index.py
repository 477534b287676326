"""An index: texts, their vectors, and the embedder that encodes queries in the same way.

n: texts    d: width    k: texts wanted for each query
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, count, islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from whitenedcse.console import pace
from whitenedcse.data.corpus import Corpus, Reading, fingerprint, rows, texts
from whitenedcse.data.remote import fetched, is_url, published
from whitenedcse.model.checkpoint import seen, settings
from whitenedcse.model.embedder import Embedder
from whitenedcse.model.planes import digest_of
from whitenedcse.model.sentence_transformers import DOCUMENT
from whitenedcse.run import changed
from whitenedcse.serving import approximate, bulk, index_files, shards
from whitenedcse.serving.exports import scaled
from whitenedcse.serving.index_files import Part, Strings
from whitenedcse.serving.layouts import OTHER
from whitenedcse.serving.nearest import Array, nearest, unit
from whitenedcse.whitening import check_finite

BLOCK = 20_000  # texts at a time


class Hit(NamedTuple):
    """A text that was found, its id, and the cosine of its vector with the query's."""

    cosine: float
    id: str
    text: str


class Index:
    """Texts with their vectors, searched by cosine; in memory, or memory-mapped from a directory.

    Search is exact, except in a directory that `whitenedcse search build --factory` wrote: there FAISS
    proposes rows, and only their whole vectors are compared; of texts added later, all are compared.

    embedder: it may have any last step, e.g. that of `whitened`; unit length is added here. Texts are encoded
        with its prompt "document" (else "passage" or "corpus") and queries with its prompt "query"; where it
        has no such prompt, with its `prompt`.

    >>> from whitenedcse.model.scratch import small_bert
    >>> embedder = Embedder(encoder=small_bert(vocabulary=200, layers=1, width=8, heads=1))
    >>> index = Index.build(embedder, ["a cat sleeps", "a dog runs", "it rains"])
    >>> [(hit.text, hit.id) for hit in index.query(["a dog runs"], top=1)[0]]
    [('a dog runs', '1')]
    """

    def __init__(self, embedder: Embedder, parts: Iterable[Part] = ()) -> None:
        self.embedder, self.parts = scaled(searching(embedder), unit=True), list(parts)
        self._place: tuple[str, int] | None = None  # a directory or URL, and how many of the parts it holds

    def __len__(self) -> int:
        return sum(len(part.texts) for part in self.parts)

    @property
    def vectors(self) -> list[Array]:
        """The vectors (n, d), in parts, all of whose bytes are compared with their digests now."""
        return [part.vectors[:] for part in self.parts]

    @classmethod
    def build(
        cls, embedder: Embedder | str | Path, texts: Iterable[str], ids: Iterable[object] | None = None
    ) -> Index:
        """An index of these texts in memory; `whitenedcse search build` writes one of any size to disk.

        embedder: or the path of one.
        """
        return cls(Embedder.of(embedder)).add(texts, ids)

    def add(self, texts: Iterable[str], ids: Iterable[object] | None = None) -> Index:
        """Add texts and return the index; without `ids`, the id of a text is its number, from 0.

        Raises ValueError unless there are as many ids as texts, and for none where the index has its own.
        """
        if isinstance(texts, str):
            raise ValueError(f"texts={texts!r:.50} is one text; give a list of them")
        self.refuse_numbers(ids is not None)
        texts = list(texts)
        labels = [str(i) for i in (range(len(self), len(self) + len(texts)) if ids is None else ids)]
        if len(labels) != len(texts):
            raise ValueError(f"{len(labels)} ids for {len(texts)} texts; one for each")
        self.parts += list(encoded(self.embedder, zip(labels, texts, strict=True), bf16=False))
        return self

    def refuse_numbers(self, ids: bool) -> None:
        """Raise ValueError for further texts without ids if those of the index are not their numbers."""
        known = self.parts[0].ids if self.parts else None
        if not ids and known and known[len(known) - 1] != str(len(known) - 1):
            raise ValueError(
                f"the texts of this index have ids of their own, such as {known[0]!r}: give those of the "
                "new, by --ids NAME (in Python: ids=)"
            )

    def query(
        self, texts: Sequence[str], top: int = 10, *, prompt: str | None = None, exact: bool = False
    ) -> list[list[Hit]]:
        """For each query the `top` nearest texts (or all, if fewer), nearest first, as (cosine, id, text).

        prompt: a text put before each query; None for the index's own. exact: compare all texts with each
        query even if the directory has an index of FAISS. Raises ValueError, naming the file, if bytes that
        are read are damaged.
        """
        queries = self.embedder.encode(
            texts, prompt=self.embedder.prompt_of("query") if prompt is None else prompt
        )
        if exact or all(part.near is None for part in self.parts):
            found = nearest(queries, [part.vectors for part in self.parts], top)
        else:
            found = approximate.found(queries, [(part.vectors, part.near) for part in self.parts], top)
        pairs = (zip(*row, strict=True) for row in zip(*found, strict=True))
        return [[self.hit(cosine, row) for cosine, row in pair if row >= 0] for pair in pairs]

    def hit(self, cosine: float, row: int) -> Hit:
        """The `Hit` of a row number."""
        for part in self.parts:
            if row < len(part.texts):
                break
            row -= len(part.texts)
        return Hit(float(cosine), part.ids[row], part.texts[row])

    def save(self, directory: str | Path) -> None:
        """Write the index to a directory or URL; to the one that it is of, only new texts are added.

        Written to a new directory, it is searched exactly. Raises FileExistsError for any other directory
        that exists, and ValueError for texts to add to a URL.
        """
        place, held = self._place or ("", 0)
        if place != (there := place_of(directory)):
            with published(directory, None) as out:
                index_files.write(out, self.embedder, self.parts)
        elif new := self.parts[held:]:
            index_files.refuse_url(directory)
            index_files.append(Path(directory), sum(len(part.texts) for part in self.parts[:held]), new)
        self._place = (there, len(self.parts))

    @classmethod
    def load(cls, directory: str | Path) -> Index:
        """The index that `save` or `whitenedcse search build` wrote; its arrays are memory-mapped."""
        index = cls(*index_files.load(fetched(directory)))
        index._place = (place_of(directory), len(index.parts))
        return index


def place_of(directory: str | Path) -> str:
    """The absolute path of a directory, or the URL of one."""
    return str(directory).rstrip("/") if is_url(directory) else str(Path(directory).absolute())


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
    directory: Path,
    embedder: Embedder,
    pairs: Iterable[tuple[str, str]],
    *,
    bf16: bool = False,
    factory: str | None = None,
) -> None:
    """Write an index of any number of (id, text) to a new directory; memory does not grow with them.

    factory: of FAISS, such as "IVF1024,PQ48" or "HNSW32": its index is built beside the vectors and proposes
    rows; memory holds that index. None for exact search. Raises ValueError for what FAISS does not know, and
    for fewer texts than its training takes.
    """
    embedder, pairs = scaled(searching(embedder), unit=True), iter(pairs)
    if factory is not None:  # before hours of encoding
        first = list(islice(pairs, approximate.needed(factory, embedder.width)))
        approximate.refuse_few(factory, embedder.width, len(first))
        pairs = chain(first, pairs)
    index_files.write(directory, embedder, encoded(embedder, pairs, bf16=bf16), factory)


def write_encoded(
    directory: Path, embedder: Embedder, parts: Iterable[Part], factory: str | None = None
) -> None:
    """Write an index of vectors that are there, those of `gathered`; otherwise as `write` does."""
    if factory is not None:
        approximate.needed(factory, embedder.width)  # refuses what FAISS does not know
    index_files.write(directory, scaled(searching(embedder), unit=True), parts, factory)


def gathered(embedder: Embedder, corpus: Corpus, out: Path, *, ids: bool = False) -> Iterator[Part]:
    """Parts of an index from the files that `bulk.encoded` wrote to `out`; nothing is encoded.

    embedder: the one that encoded them. corpus, ids: see `labelled`; its first column is what was encoded.
    Blank rows are left out. Raises ValueError for vectors of another embedder or of another corpus.
    """
    manifest, texts = shards.begun(out), replace(corpus, columns=corpus.columns[:1])
    if manifest and manifest.embedder != digest_of(embedder):
        now = json.loads(json.dumps(settings(embedder)))
        why = changed(seen(manifest.embedding), seen(now)) or OTHER["embedder"]
        raise ValueError(
            f"{out} holds vectors of another embedder: {why}; give the model and the --whiten, --dim, "
            "--prompt, --pooling and --layers with which they were encoded"
        )
    if manifest and manifest.columns != list(texts.columns):
        was, now_ = (" ".join(names) or "no column" for names in (manifest.columns, texts.columns))
        raise ValueError(f"{out} holds vectors of {was}, not of {now_}; give --columns as encode had it")
    if manifest and manifest.fingerprint != fingerprint(texts):
        raise ValueError(f"{out} holds vectors of {manifest.input}, not of {corpus.path} as it is now")
    every, number = Reading(corpus), 0
    for shard in bulk.arrays(out):
        for start in range(0, len(shard), BLOCK):
            x = shard[start : start + BLOCK]
            block = list(islice(every, len(x)))
            kept = [i for i, row in enumerate(block) if row[0].strip()]
            labels = [block[i][-1] for i in kept] if ids else map(str, range(number, number + len(kept)))
            number += len(kept)
            some = Strings.of([block[i][0] for i in kept])
            yield Part(unit(x[kept].astype(np.float32)), some, Strings.of(list(labels)))


def labelled(corpus: Corpus, start: int = 0, *, ids: bool = False) -> Iterator[tuple[str, str]]:
    """(id, text) for each text of a corpus that is not blank, read lazily.

    The id is the number of the text, from `start` on, or with `ids` the content of the last column.
    """
    if not ids:
        return zip(map(str, count(start)), texts(corpus), strict=False)
    return ((row[-1], text) for row in rows(corpus) for text in row[:-1] if text.strip())


def encoded(embedder: Embedder, pairs: Iterable[tuple[str, str]], *, bf16: bool) -> Iterator[Part]:
    """Parts of an index with 20,000 (id, text) each, encoded lazily.

    Raises ValueError for a vector that is not finite.
    """
    pairs = iter(pairs)
    with pace("encoded") as more:
        while block := list(islice(pairs, BLOCK)):
            ids, texts = zip(*block, strict=True)
            vectors = embedder.encode(texts, bf16=bf16)
            check_finite(vectors, lambda row: f"the vector of {texts[row]!r:.80}")  # noqa: B023
            yield Part(vectors, Strings.of(texts), Strings.of(ids))
            more(len(block))

"""An index: texts in Parquet, their vectors in FAISS, and the embedder that encodes queries in the same way.

n: texts    d: width of the embedder    q: queries

    index.json            the format
    embedder/             a checkpoint, with its whitening if it has one, without unit length
    empty.faiss           the index of a part before vectors are added, trained
    part-00000.faiss      vectors, which FAISS scales to unit length, as it does those of queries
    part-00000.parquet    the id and the text of each
    digests.json          of all these; a part counts once it is named here

A part ends with the block that brings it to PART vectors: so much is in memory while an index is built.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
from numpy.typing import NDArray

from whitenedcse import inputs
from whitenedcse.console import lacking
from whitenedcse.data.corpus import Corpus, blocks, fingerprint, label, rows
from whitenedcse.data.remote import fetched, published
from whitenedcse.data.tokens import wordless
from whitenedcse.files import (
    DIGESTS,
    check_place,
    checksum,
    claimed,
    drafted,
    intact,
    parsing,
    read_json,
    seal,
    write_json,
    writing,
)
from whitenedcse.model import checkpoint
from whitenedcse.model.checkpoint import digest_of
from whitenedcse.model.embedder import Embedder
from whitenedcse.model.sentence_transformers import DOCUMENT
from whitenedcse.serving.encode import Job, arrays, begun, share
from whitenedcse.serving.fit import scaled
from whitenedcse.whitening import check_finite

INDEX, EMBEDDER, EMPTY = "index.json", "embedder", "empty.faiss"
FORMAT = 3
PART = 1 << 17  # vectors
BLOCK = 20_000  # texts at a time
SAMPLE = 1 << 17  # vectors that FAISS learns from, at most
CURE = "copy the whole index again"
Row = tuple[str, str]  # an id and a text
Block = tuple[Sequence[Row], NDArray[Any]]  # n rows and their vectors (n, d)


class Hit(NamedTuple):
    """A text that was found, its id, and the cosine of its vector with the query's."""

    cosine: float
    id: str
    text: str


class Part(NamedTuple):
    """Vectors in an index of FAISS, and a table of Arrow with the columns `id` and `text`."""

    vectors: Any
    texts: Any


class Index:
    """Texts with their vectors, searched by cosine; in memory, or in a directory.

    An id is the number of the text among all that were given, blank ones counted, or what the caller gives;
    it is unique. Texts without tokens of their own are left out. Several threads may query one index.

    embedder: texts are encoded with its prompt "document" (else "passage" or "corpus") and queries with its
        prompt "query"; where it has no such prompt, with its `prompt`.
    factory: of FAISS, such as "IVF1024,SQ8", "HNSW32" or "PQ48,RFlat"; "Flat" compares all vectors.

    >>> from whitenedcse.model.scratch import small_bert
    >>> embedder = Embedder(encoder=small_bert(vocabulary=200, layers=1, width=8, heads=1))
    >>> index = Index.build(embedder, ["a cat sleeps", "a dog runs", "it rains"])
    >>> [(hit.text, hit.id) for hit in index.query(["a dog runs"], top=1)[0]]
    [('a dog runs', '1')]
    """

    def __init__(self, embedder: Embedder, factory: str = "Flat") -> None:
        self.embedder = scaled(searching(embedder), unit=False)
        self.empty = made(factory, self.embedder.width)
        self.parts: list[Part] = []
        self.rows, self.numbered = 0, True  # that were given, and whether their numbers are the ids

    def __len__(self) -> int:
        return sum(part.vectors.ntotal for part in self.parts)

    @classmethod
    def build(
        cls, embedder: Embedder | str | Path, texts: Iterable[str], ids: Iterable[object] | None = None
    ) -> Index:
        """An index in memory; `whitenedcse search build` writes one of any size. embedder: or its path."""
        return cls(Embedder.of(embedder)).add(texts, ids)

    def add(self, texts: Iterable[str], ids: Iterable[object] | None = None) -> Index:
        """Add texts and return the index; without `ids`, the id of a text is its number, from 0."""
        texts = inputs.texts(texts, "text")
        labels = None if ids is None else list(map(label, inputs.listed(ids, "id")))
        if labels is not None and len(labels) != len(texts):
            raise ValueError(f"{len(labels)} ids for {len(texts)} texts; one for each")
        self.check_ids(labels)
        numbers = map(str, range(self.rows, self.rows + len(texts)))
        every = blocks(zip(numbers if labels is None else labels, texts, strict=True), BLOCK)
        encoded = ((some, self.embedder.encode([text for _, text in some])) for some in every)
        self.parts += list(self.new_parts(encoded))
        return self

    def check_ids(self, ids: Iterable[str] | None) -> None:
        """Raise ValueError for an id that is there, and for texts with ids beside texts without."""
        if self.rows and self.numbered != (ids is None):
            have = "no ids of their own" if self.numbered else "ids of their own"
            raise ValueError(f"the texts of this index have {have}, and so must the new ones (--ids, ids=)")
        self.numbered = ids is None
        if ids is not None:
            known = {one for part in self.parts for one in part.texts["id"].to_pylist()}
            for one in ids:
                if one in known:
                    raise ValueError(f"the id {one!r} is of two texts; each needs its own")
                known.add(one)

    def new_parts(self, given: Iterable[Block]) -> Iterator[Part]:
        """Parts with these texts, but for those that have no tokens of their own; these are counted, too."""
        vectors, held, before = copied(self.empty), list[Row](), self.rows
        for some, x in given:
            if vectors.ntotal >= PART:
                yield Part(vectors, self.table(held))
                vectors, held = copied(self.empty), []
            skipped = wordless([text for _, text in some], self.embedder.encoder.tokenizer)
            at = [i for i, skip in enumerate(skipped) if not skip]
            kept, x = [some[i] for i in at], np.ascontiguousarray(x[at], dtype=np.float32)
            check_finite(x, lambda row: f"the vector of {kept[row][1]!r:.80}")  # noqa: B023
            if not vectors.is_trained:
                train(self.empty, x)
                vectors = copied(self.empty)
            vectors.add(x)
            held += kept
            self.rows += len(some)
        if self.rows > before:
            yield Part(vectors, self.table(held))

    def table(self, some: Sequence[Row]) -> Any:
        """The table of a part, which notes how many rows were given until then, and of what kind."""
        columns = {"id": [one for one, _ in some], "text": [text for _, text in some]}
        facts = {"rows": str(self.rows), "numbered": str(self.numbered)}
        return pa.table({k: pa.array(v, pa.large_string()) for k, v in columns.items()}, metadata=facts)

    def query(self, texts: Sequence[str], top: int = 10) -> list[list[Hit]]:
        """For each query the `top` nearest texts, nearest first; none for one without tokens of its own."""
        texts = inputs.texts(texts, "query")
        if top < 1 or not len(self):
            raise ValueError(f"top={top} of {len(self)} texts: ask for one or more, of one or more texts")
        x = self.embedder.encode(texts, prompt=self.embedder.prompt_of("query"))
        every = engine().IndexShards(self.embedder.width, False, True)  # one thread; parts count on
        for part in self.parts:
            every.add_shard(part.vectors)
        cosines, numbers = every.search(x, min(top, len(self)))
        numbers[wordless(texts, self.embedder.encoder.tokenizer)] = -1
        ids, held = pa.concat_tables([part.texts for part in self.parts]).columns
        hits = []
        for near, at in zip(cosines.clip(-1, 1).tolist(), numbers.tolist(), strict=True):
            found = [(cosine, i) for cosine, i in zip(near, at, strict=True) if i >= 0]
            hits.append([Hit(cosine, ids[i].as_py(), held[i].as_py()) for cosine, i in found])
        return hits

    def save(self, directory: str | Path) -> None:
        """Write the index to a new directory or URL."""
        with published(directory, None) as out:
            check_new(out)
            with drafted(out) as draft:
                self.write(draft, self.parts)

    def write(self, draft: Path, parts: Iterable[Part]) -> int:
        """Write the index with these parts to a draft; returns the number of texts."""
        checkpoint.save(self.embedder, draft / EMBEDDER)
        write_faiss(draft / EMPTY, self.empty)
        write_json(draft / INDEX, {"format": FORMAT})
        n = 0
        for number, part in enumerate(parts):
            write_part(draft, number, part)
            n += part.vectors.ntotal
        seal(draft)
        return n

    @classmethod
    def load(cls, directory: str | Path) -> Index:
        """The index that `save` or `whitenedcse search build` wrote; ValueError for a damaged file."""
        folder = fetched(directory)
        names = listed(folder)
        intact(folder, CURE)
        index = cls(Embedder.load(folder / EMBEDDER))
        index.empty = read_faiss(folder / EMPTY)
        for name in names:
            texts = pq.read_table(folder / f"{name}.parquet")
            index.parts.append(Part(read_faiss(folder / f"{name}.faiss"), texts))
        if names:
            facts = index.parts[-1].texts.schema.metadata
            index.rows, index.numbered = int(facts[b"rows"]), facts[b"numbered"] == b"True"
        return index


def build(  # noqa: PLR0913  what the command takes
    out: Path,
    embedder: Embedder,
    corpus: Corpus,
    *,
    ids: bool = False,
    factory: str = "Flat",
    vectors: str | None = None,
    bf16: bool = False,
) -> tuple[int, int]:
    """Write an index of a corpus of any size to a new directory; returns the texts and the width of vectors.

    The corpus is encoded to files first, from which FAISS learns. ids: whether its last column holds ids.
    factory: see `Index`. vectors: a directory that `whitenedcse encode` wrote by the same embedder, in place
    of encoding. bf16: the backbone computes in bfloat16.
    """
    check_new(out)
    index = Index(embedder, factory)  # raises before hours of encoding
    index.check_ids((row[-1] for row in rows(corpus, ids=True)) if ids else None)
    with tempfile.TemporaryDirectory(prefix=".vectors", dir=out.parent) as own, drafted(out) as draft:
        folder = vectors or own
        if vectors:
            check_vectors(folder, [searching(embedder), index.embedder], corpus)
        else:
            encode(index.embedder, corpus, folder, bf16=bf16)
        train(index.empty, sample(folder))
        n = index.write(draft, index.new_parts(read(index, corpus, folder, ids=ids)))
        if not n:
            raise ValueError(f"{corpus.path}: no texts to index, all are blank")
    return n, index.embedder.width


def extend(directory: Path, corpus: Corpus, *, ids: bool = False, bf16: bool = False) -> tuple[int, int]:
    """Add a corpus to the index in a directory, or nothing if killed; returns the texts before, and added."""
    with claimed(directory):
        index = Index.load(directory)
        index.check_ids((row[-1] for row in rows(corpus, ids=True)) if ids else None)
        first, new, n = len(index.parts), dict[str, str](), 0
        with tempfile.TemporaryDirectory(prefix=".vectors", dir=directory.parent) as folder:
            encode(index.embedder, corpus, folder, bf16=bf16)
            parts = index.new_parts(read(index, corpus, folder, ids=ids))
            for number, part in enumerate(parts, first):
                new |= {name: checksum(directory / name) for name in write_part(directory, number, part)}
                n += part.vectors.ntotal
        write_json(directory / DIGESTS, read_json(directory / DIGESTS) | new)
    return len(index), n


def encode(embedder: Embedder, corpus: Corpus, folder: str, *, bf16: bool) -> None:
    """Encode the first column of a corpus to files in a folder."""
    share(Job(lambda: embedder, "", texts_of(corpus), folder, bf16=bf16), 0, 1)


def texts_of(corpus: Corpus) -> Corpus:
    """The corpus without its column of ids."""
    return replace(corpus, columns=corpus.columns[:1])


def read(index: Index, corpus: Corpus, folder: str, *, ids: bool) -> Iterator[Block]:
    """The rows of a corpus with their vectors, which are in a folder; numbers go on from the index's."""
    numbered = enumerate(rows(corpus, ids=ids), index.rows)
    every = ((row[-1] if ids else str(number), row[0]) for number, row in numbered)
    for shard in arrays(folder):
        for start in range(0, len(shard), BLOCK):
            x = shard[start : start + BLOCK]
            yield list(islice(every, len(x))), x


def check_vectors(folder: str, embedders: Sequence[Embedder], corpus: Corpus) -> None:
    """Raise ValueError unless a folder holds the vectors of a corpus by one of these embedders."""
    manifest, texts = begun(folder), texts_of(corpus)
    if manifest and manifest.embedder not in map(digest_of, embedders):
        raise ValueError(
            f"{folder} holds vectors of another embedder: encode with the model, --pooling, --layers, "
            f"--whiten and --dim of this index, and with --prompt {quote(embedders[0].prompt)}"
        )
    if manifest and (manifest.columns, manifest.fingerprint) != ([*texts.columns], fingerprint(texts)):
        raise ValueError(f"{folder} holds vectors of {manifest.input}, not of {corpus.path} as it is now")


def searching(embedder: Embedder, prompt: str | None = None, query_prompt: str | None = None) -> Embedder:
    """The embedder of an index: its prompt is that of the texts, and its only other one that of queries.

    prompt: given for texts it is that of queries too, unless there is one for them; None for its own.
    """
    texts = embedder.prompt_of(*DOCUMENT) if prompt is None else prompt
    own = embedder.prompts.get("query", embedder.prompt if prompt is None else prompt)
    queries = own if query_prompt is None else query_prompt
    return embedder.replaced(prompt=texts, prompts={} if queries == texts else {"query": queries})


def check_new(directory: Path) -> None:
    """Raise OSError if the directory exists or there is a file, or its parent does not exist."""
    check_place(directory)
    if directory.exists():
        raise FileExistsError(f"{directory} exists; choose another name, or delete it")


def listed(directory: Path) -> list[str]:
    """The names of the parts of an index. Raises OSError where there is none, ValueError for an older one."""
    if not (directory / INDEX).is_file() or not (directory / DIGESTS).is_file():
        raise FileNotFoundError(f"{directory} is not an index: whitenedcse search build makes one")
    if read_json(directory / INDEX).get("format") != FORMAT:
        raise ValueError(f"{directory} is an index of another version; build it again")
    return sorted(Path(name).stem for name in read_json(directory / DIGESTS) if name.endswith(".parquet"))


def write_part(directory: Path, number: int, part: Part) -> tuple[str, str]:
    """Write the files of a part; returns their names."""
    name = f"part-{number:05}"
    write_faiss(directory / f"{name}.faiss", part.vectors)
    with writing(directory / f"{name}.parquet") as stream:
        pq.write_table(part.texts, stream)
    return f"{name}.faiss", f"{name}.parquet"


def engine() -> Any:
    """FAISS. Raises ValueError where it is not installed."""
    try:
        import faiss
    except ImportError as error:
        raise lacking("search", "faiss-cpu", "search", error) from error
    return faiss


def made(factory: str, width: int) -> Any:
    """An empty index of FAISS: what `factory` names, after unit length."""
    faiss = engine()
    try:
        inner = faiss.index_factory(width, factory, faiss.METRIC_INNER_PRODUCT)
    except RuntimeError as error:
        raise ValueError(f"factory={factory!r} for vectors of width {width}: {error}") from error
    thorough(inner)
    whole = faiss.IndexPreTransform(inner)
    whole.prepend_transform(faiss.NormalizationTransform(width, 2.0))
    return whole


def thorough(index: Any) -> None:
    """Have an index of FAISS search more than by default: one list in 64, 64 neighbours in a graph."""
    index = engine().downcast_index(index)
    lists = getattr(index, "nlist", 0)
    settings = {"nprobe": min(lists, max(16, lists // 64)), "k_factor": 10}
    settings["do_polysemous_training"] = False  # its codes, for Hamming distances, take 100 times longer
    for name, value in settings.items():
        if hasattr(index, name):
            setattr(index, name, value)
    if hasattr(index, "hnsw"):
        index.hnsw.efSearch = 64
    for name in ("index", "base_index", "storage"):
        if getattr(index, name, None) is not None:
            thorough(getattr(index, name))


def train(empty: Any, x: NDArray[Any]) -> None:
    """Train an index of FAISS on vectors (n, d). Raises ValueError where they are too few."""
    try:
        empty.train(np.ascontiguousarray(x, dtype=np.float32))
    except RuntimeError as error:
        raise ValueError(f"FAISS cannot learn this index from {len(x):,} vectors: {error}") from error


def sample(folder: str) -> NDArray[np.float32]:
    """At most SAMPLE of the vectors in a folder, drawn from each file alike by a fixed seed."""
    generator, manifest = np.random.default_rng(0), begun(folder)
    share = min(1, SAMPLE / manifest.rows) if manifest else 1
    drawn = []
    for x in arrays(folder):
        at = generator.choice(len(x), math.ceil(share * len(x)), replace=False)
        drawn.append(x[np.sort(at)])
    return np.concatenate(drawn)


def copied(index: Any) -> Any:
    """A copy of an index of FAISS."""
    faiss = engine()
    return faiss.deserialize_index(faiss.serialize_index(index))


def write_faiss(file: Path, index: Any) -> None:
    """Write an index of FAISS."""
    with writing(file) as stream:
        engine().write_index(index, engine().PyCallbackIOWriter(stream.write))


def read_faiss(file: Path) -> Any:
    """An index of FAISS, whose vectors stay in the file until they are compared."""
    with parsing(file, CURE):
        return engine().read_index(str(file), engine().IO_FLAG_MMAP_IFC)

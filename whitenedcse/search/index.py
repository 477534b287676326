"""An index: texts, their vectors, and the embedder that maps queries in the same way.

n: texts    d: width
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import count, islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from whitenedcse.data.corpus import LONGEST, Corpus, rows, texts
from whitenedcse.export.whitened import scaled
from whitenedcse.model.embedder import Embedder
from whitenedcse.pace import pace
from whitenedcse.search import files
from whitenedcse.search.files import Part, Strings
from whitenedcse.search.nearest import Array, nearest

BLOCK = 20_000  # texts at a time


class Hit(NamedTuple):
    """A text that was found, and the cosine of its vector with the query's."""

    cosine: float
    id: str
    text: str


class Index:
    """Texts to be found by meaning: exact search by cosine, in memory or mapped from a directory.

    embedder: with whatever it ends with, e.g. `export.whitened.whitened`; here it also ends with unit length.
    """

    def __init__(self, embedder: Embedder, parts: Iterable[Part] = ()) -> None:
        self.embedder, self.parts = scaled(embedder, unit=True), list(parts)
        self._place: tuple[Path, int] | None = None  # a directory that holds so many of the parts

    def __len__(self) -> int:
        return sum(len(part.texts) for part in self.parts)

    @property
    def vectors(self) -> list[Array]:
        """The parts of (n, d)."""
        return [part.vectors for part in self.parts]

    @classmethod
    def build(
        cls,
        embedder: Embedder,
        texts: Iterable[str],
        ids: Iterable[object] | None = None,
        *,
        bf16: bool = False,
    ) -> Index:
        """An index of these texts, in memory; `write` makes one on the disk."""
        return cls(embedder).add(texts, ids, bf16=bf16)

    def add(self, texts: Iterable[str], ids: Iterable[object] | None = None, *, bf16: bool = False) -> Index:
        """Take in more texts; an id is the number of the text, from 0, unless `ids` are given."""
        if isinstance(texts, str):
            raise ValueError(f"texts={texts!r:.50} is one text; give a list of them")
        texts = list(texts)
        labels = [str(i) for i in (range(len(self), len(self) + len(texts)) if ids is None else ids)]
        if len(labels) != len(texts):
            raise ValueError(f"{len(labels)} ids for {len(texts)} texts; one for each")
        self.parts += list(encoded(self.embedder, zip(labels, texts, strict=True), bf16=bf16))
        return self

    def query(self, texts: Sequence[str], top: int = 10) -> list[list[Hit]]:
        """For each query the `top` nearest texts, the nearest first; all of them if there are fewer."""
        found = nearest(self.embedder.encode(texts), self.vectors, top)
        return [[self.hit(*one) for one in zip(*row, strict=True)] for row in zip(*found, strict=True)]

    def hit(self, cosine: float, row: int) -> Hit:
        """The text of a row."""
        for part in self.parts:
            if row < len(part.texts):
                break
            row -= len(part.texts)
        return Hit(float(cosine), part.ids[row], part.texts[row])

    def save(self, directory: str | Path) -> None:
        """Write the index; what was added since `load` or `save` is appended to the same directory.

        Raises FileExistsError for any other directory that is there.
        """
        directory = Path(directory).absolute()
        place, held = self._place or (None, 0)
        new = self.parts[held:] if directory == place else self.parts
        if directory != place:
            files.write(directory, self.embedder, new)
        elif new:
            files.append(directory, sum(len(part.texts) for part in self.parts[:held]), new)
        self._place = (directory, len(self.parts))

    @classmethod
    def load(cls, directory: str | Path) -> Index:
        """What `save` or `write` wrote; the arrays stay on the disk."""
        index = cls(*files.load(Path(directory)))
        index._place = (Path(directory).absolute(), len(index.parts))
        return index


def write(
    directory: Path, embedder: Embedder, pairs: Iterable[tuple[str, str]], *, bf16: bool = False
) -> None:
    """An index of (id, text) of any number in a new directory; memory does not grow with them."""
    embedder = scaled(embedder, unit=True)
    files.write(directory, embedder, encoded(embedder, pairs, bf16=bf16))


def labelled(corpus: Corpus, start: int = 0, *, ids: bool = False) -> Iterator[tuple[str, str]]:
    """(id, text) for each text of a corpus that is not blank, as they are asked for.

    The id is the number of the text, from `start` on, or what stands in the last column, of `ids`.
    """
    if not ids:
        return zip(map(str, count(start)), texts(corpus), strict=False)
    return ((row[-1], text[:LONGEST]) for row in rows(corpus) for text in row[:-1] if text.strip())


def encoded(embedder: Embedder, pairs: Iterable[tuple[str, str]], *, bf16: bool) -> Iterator[Part]:
    """Parts of 20,000 of (id, text), as they are asked for.

    Raises ValueError for a vector that is not finite.
    """
    pairs = iter(pairs)
    with pace("encoded") as more:
        while block := list(islice(pairs, BLOCK)):
            ids, texts = zip(*block, strict=True)
            vectors = embedder.encode(texts, bf16=bf16)
            if not (finite := np.isfinite(vectors).all(1)).all():
                text = texts[int(np.argmin(finite))]
                raise ValueError(f"the encoder gives NaN or infinity for {text!r:.80}")
            yield Part(vectors, Strings.of(texts), Strings.of(ids))
            more(len(block))

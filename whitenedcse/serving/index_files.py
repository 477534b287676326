"""An index as a directory: the embedder, and parts that hold vectors, texts and ids as .npy. No pickles.

It opens without being read: see `checked`.

n: texts    d: width

    index.json                   width, and the number of texts of each part
    embedder/                    a checkpoint
    part-0/vectors.npy           (n, d) float32, of unit length
    part-0/texts.npy, ids.npy    UTF-8 of all texts concatenated, uint8
    part-0/text_ends.npy, id_ends.npy    (n + 1,) int64: 0, and the end of each text
    part-0/index.faiss           where asked for: see `approximate`
    part-0/digests.json          of the blocks of these files
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from filelock import FileLock
from numpy.lib.format import dtype_to_descr, write_array_header_1_0
from numpy.typing import NDArray

from whitenedcse.data.remote import is_url
from whitenedcse.files import (
    array,
    check_place,
    digest,
    drafted,
    naming,
    parsing,
    read_json,
    settle,
    write_json,
)
from whitenedcse.model import checkpoint
from whitenedcse.model.embedder import Embedder
from whitenedcse.serving import approximate
from whitenedcse.serving.approximate import Near
from whitenedcse.serving.checked import CURE, Checked, seal, sealed

INDEX, EMBEDDER = "index.json", "embedder"
FORMAT = 2  # 1 had one digest a file
FILES: dict[str, Any] = {
    "vectors": np.float32,
    "texts": np.uint8,
    "text_ends": np.int64,
    "ids": np.uint8,
    "id_ends": np.int64,
}


@dataclass(frozen=True)
class Strings:
    """Texts concatenated in UTF-8, in memory or memory-mapped.

    data: bytes as uint8. ends: (n + 1,), 0 and the end of each text. Raises ValueError where these do not
    begin with 0, end with the length of the data, and ascend: the last when a text is read.
    """

    data: NDArray[np.uint8] | Checked
    ends: NDArray[np.int64] | Checked

    def __post_init__(self) -> None:
        if self.ends[:1].tolist() != [0] or self.ends[-1:].tolist() != [len(self.data)]:
            raise ValueError("the ends of its texts are not those of its bytes")

    @classmethod
    def of(cls, texts: Sequence[str]) -> Strings:
        """The `Strings` of a list of texts."""
        encoded = [text.encode() for text in texts]
        ends = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
        return cls(np.frombuffer(b"".join(encoded), np.uint8), ends)

    def __len__(self) -> int:
        return len(self.ends) - 1

    def __getitem__(self, i: int) -> str:
        if not 0 <= i < len(self):
            raise IndexError(f"text {i} of {len(self)}")
        start, end = self.ends[i : i + 2].tolist()
        if not 0 <= start <= end <= len(self.data):
            raise ValueError(f"the ends {start} and {end} of text {i} are not in ascending order; {CURE}")
        return self.data[start:end].tobytes().decode(errors="replace")


class Part(NamedTuple):
    """Some texts of an index: their vectors (n, d), the texts, and an id for each.

    near: proposes the rows that may be nearest to a query; None where all are compared with it.
    """

    vectors: NDArray[np.float32] | Checked
    texts: Strings
    ids: Strings
    near: Near | None = None


def write(directory: Path, embedder: Embedder, parts: Iterable[Part], factory: str | None = None) -> None:
    """Write a new index, whose parts are written as they arrive, and are one part afterwards.

    It is written to a draft folder and then renamed. factory: of `approximate.write`, or None for exact
    search. Raises FileExistsError if the directory exists.
    """
    refuse_occupied(directory)
    with drafted(directory) as new:
        refuse_occupied(directory)  # by another process, which wrote it meanwhile
        checkpoint.save(embedder, new / EMBEDDER)
        first = written(new / "part-0", parts)
        if factory is not None:
            file, vectors = new / "part-0" / approximate.FILE, array(path(new / "part-0", "vectors"))
            approximate.write(file, vectors, factory, embedder.final)
            first["factory"] = factory
        seal(new / "part-0", [file.name for file in sorted((new / "part-0").iterdir())])
        write_json(new / INDEX, {"format": FORMAT, "width": embedder.width, "parts": [first]})


def refuse_occupied(directory: Path) -> None:
    """Raise OSError if the directory exists or there is a file, or its parent does not exist."""
    check_place(directory)
    if (directory / INDEX).is_file():
        raise FileExistsError(f"{directory} holds an index; choose another name, or delete it")
    if directory.exists():
        raise FileExistsError(f"{directory} exists; choose another name")


def refuse_url(index: str | Path) -> None:
    """Raise ValueError for a URL, whose index cannot be added to."""
    if is_url(index):
        raise ValueError(f"{index}: an index in a store is not added to; build it anew")


def append(directory: Path, n: int, parts: Iterable[Part]) -> None:
    """Append one part to an index of n texts; a kill leaves the index unchanged.

    Raises ValueError if the index no longer has n texts.
    """
    with FileLock(directory / ".lock"):
        content = listed(directory)
        if (held := sum(part["n"] for part in content["parts"])) != n:
            raise ValueError(f"{directory} holds {held:,} texts, not {n:,}: it has changed; load it again")
        new = directory / f"part-{len(content['parts'])}"
        shutil.rmtree(new, ignore_errors=True)  # of a kill
        with naming(new, new):
            content["parts"].append(written(new, parts))
            content["format"] = FORMAT
            seal(new, [file.name for file in sorted(new.iterdir())])
            for file in (*new.rglob("*"), new):
                settle(file)
        settle(directory)
        try:
            write_json(directory / INDEX, content)
        except OSError:  # so index.json is the old one
            shutil.rmtree(new)
            raise


def written(directory: Path, parts: Iterable[Part]) -> dict[str, Any]:
    """Write all these as one part; returns its entry in index.json. Raises ValueError if there is no text."""
    directory.mkdir()
    with ExitStack() as stack:
        files = {name: Growing(stack.enter_context(path(directory, name).open("wb"))) for name in FILES}
        for part in parts:
            files["vectors"].add(part.vectors[:])
            for strings, data, ends in ((part.texts, "texts", "text_ends"), (part.ids, "ids", "id_ends")):
                files[ends].add(strings.ends[files[ends].n > 0 :] + files[data].n)
                files[data].add(strings.data[:])
        n = files["vectors"].n
        if not n:
            raise ValueError("no texts to index: there are none, or all are blank")
        for file in files.values():
            file.finish()
    return {"n": n}


class Growing:
    """A .npy file to which rows are appended."""

    def __init__(self, stream: IO[bytes]) -> None:
        self.stream, self.n, self.like = stream, 0, np.empty(0)

    def add(self, array: NDArray[Any]) -> None:
        """Append rows of the same type and shape."""
        if not self.stream.tell():
            self.like = array[:0]
            self.head()
        self.stream.write(np.ascontiguousarray(array).data)
        self.n += len(array)

    def head(self) -> None:
        """Write the header, in which NumPy leaves space for a larger n."""
        shape = (self.n, *self.like.shape[1:])
        descr = dtype_to_descr(self.like.dtype)
        header = {"descr": descr, "fortran_order": False, "shape": shape}
        write_array_header_1_0(self.stream, header)

    def finish(self) -> None:
        """Write the header again, with the final n."""
        self.stream.seek(0)
        self.head()


def path(directory: Path, name: str) -> Path:
    """The path of the file of an array."""
    return directory / f"{name}.npy"


def listed(directory: Path) -> dict[str, Any]:
    """The content of index.json.

    Raises FileNotFoundError if there is none, and ValueError if it is malformed.
    """
    if not (directory / INDEX).is_file():
        raise FileNotFoundError(
            f"{directory} is not an index: no {INDEX} there; make one with whitenedcse search build"
        )
    content = read_json(directory / INDEX)
    with parsing(directory / INDEX, CURE):
        known = content["format"] in (1, FORMAT) and content["parts"]
        if not (known and all(type(x) is int for x in [content["width"], *(p["n"] for p in known)])):
            raise ValueError("it is of another format")
    return content


def load(directory: Path) -> tuple[Embedder, list[Part]]:
    """The embedder and the parts, memory-mapped, of which a few blocks are read; the others when needed.

    Raises ValueError, naming the file, if one is damaged: here, or when the damaged bytes are first read.
    """
    content = listed(directory)
    parts = [
        part(directory / f"part-{i}", facts, content["width"]) for i, facts in enumerate(content["parts"])
    ]
    embedder = Embedder.load(str(directory / EMBEDDER))
    if embedder.width != content["width"]:
        raise ValueError(f"{directory / EMBEDDER} has width {embedder.width}, the index {content['width']}")
    return embedder, parts


def part(directory: Path, facts: dict[str, Any], width: int) -> Part:
    """A part, memory-mapped. An older one, with a SHA-256 or one digest of a file, is compared as a whole.

    Raises ValueError, naming the file, if one is damaged.
    """
    n, known, arrays = facts["n"], sealed(directory), {}
    shapes = {"vectors": (n, width), "text_ends": (n + 1,), "id_ends": (n + 1,)}
    for name, kind in FILES.items():
        file = path(directory, name)
        with parsing(file, CURE):
            if "sha256" in facts and digest(file) != facts["sha256"][name]:
                raise ValueError("its checksum is another")
            arrays[name] = Checked(file, known)
            held = arrays[name].dtype, arrays[name].shape
            if held != (kind, shapes.get(name, (arrays[name].shape[0],))):
                raise ValueError(f"it holds {held}")
    near = None
    if "factory" in facts:
        near = Near(directory / approximate.FILE, known, n, width)
    with parsing(directory, CURE):
        texts, ids = (Strings(arrays[f"{name}s"], arrays[f"{name}_ends"]) for name in ("text", "id"))
    return Part(arrays["vectors"], texts, ids, near)


def verify(directory: Path) -> tuple[int, int]:
    """Compare all bytes of an index with their digests; returns the number of texts and of bytes.

    Raises ValueError, naming the file, if one is damaged.
    """
    _, parts = load(directory)
    held = [array for p in parts for array in (p.vectors, p.texts.data, p.texts.ends, p.ids.data, p.ids.ends)]
    files = [array.blocks for array in held if isinstance(array, Checked)]
    size = sum(blocks.check_all() for blocks in [*files, *(p.near.blocks for p in parts if p.near)])
    return sum(len(p.texts) for p in parts), size

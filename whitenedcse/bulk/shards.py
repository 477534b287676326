"""A directory of vectors: files of so many rows each, in the order of the input, and a manifest.

n: rows of a file    k: width
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from whitenedcse.durable import read_json, write_json, writing

MANIFEST, LOCK = "manifest.json", ".lock"
OURS = {MANIFEST, f"{MANIFEST}.new", LOCK}  # may be here before a job has begun
FORMS, DTYPES = ("npy", "parquet"), ("float32", "float16")
FREE = ("source", "embedding", "input", "threads")  # may be another in a job that goes on
OTHER = {
    "fingerprint": "the input is another, or was changed",
    "embedder": "the encoder, its pooling, what follows it, or the kind of device is another",
}


class Form(NamedTuple):
    """How vectors are written: the kind of file, the type of a number, the rows of a file."""

    to: str = "npy"
    dtype: str = "float32"
    shard: int = 20_000


@dataclass(frozen=True)
class Manifest:
    """What the files are: plain JSON, written before the first of them.

    embedding: settings of the embedder, for a reader. embedder: a digest of all that decides a vector.
    fingerprint: one of the input. threads: of a process, as at first: another number may change last bits.
    """

    source: str
    embedding: dict[str, Any]
    embedder: str
    bf16: bool
    input: str
    columns: list[str]
    fingerprint: str
    rows: int
    width: int
    to: str
    dtype: str
    shard: int
    threads: int

    def __post_init__(self) -> None:
        for name, value, known in (("to", self.to, FORMS), ("dtype", self.dtype, DTYPES)):
            if value not in known:
                raise ValueError(f"{name}={value!r} is not one of {', '.join(known)}")
        for name in ("rows", "width", "shard", "threads"):
            if not (isinstance(value := getattr(self, name), int) and value > 0):
                raise ValueError(f"{name}={value!r} must be 1 or more")

    @property
    def shards(self) -> int:
        """The number of files."""
        return -(-self.rows // self.shard)

    def count(self, number: int) -> int:
        """n of a file: `shard`, or fewer of the last."""
        return min(self.shard, self.rows - number * self.shard)

    def name(self, number: int) -> str:
        """The name of a file."""
        return f"shard-{number:05}.{self.to}"


def begun(out: Path) -> Manifest | None:
    """What a directory holds, None if nothing or if it is not there. Raises ValueError for other things."""
    if not (out / MANIFEST).exists():
        if out.exists() and (other := sorted({path.name for path in out.iterdir()} - OURS)):
            raise ValueError(f"{out} holds something else, {other[0]!r}; name a new directory")
        return None
    try:
        return Manifest(**read_json(out / MANIFEST))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{out / MANIFEST} is not what whitenedcse encode wrote: {error}") from error


def refuse_other(out: Path, then: Manifest, now: dict[str, Any]) -> None:
    """Raise ValueError if a job that was begun is not this one."""
    for name, value in asdict(then).items():
        if name in now and name not in FREE and value != now[name]:
            why = OTHER.get(name, f"{name} was {value!r} and is now {now[name]!r}")
            raise ValueError(f"{out} was begun otherwise: {why}; give the same again, or a new directory")


def start(out: Path, manifest: Manifest) -> Manifest:
    """The manifest, written."""
    write_json(out / MANIFEST, asdict(manifest))
    return manifest


def missing(out: Path, manifest: Manifest) -> list[int]:
    """The numbers of the files that are not there yet."""
    here = {path.name for path in out.iterdir()}
    return [number for number in range(manifest.shards) if manifest.name(number) not in here]


def write(out: Path, manifest: Manifest, number: int, x: NDArray[Any]) -> None:
    """One file of (n, k): an array, or a table of `row`, counted from 0 over all files, and `vector`."""
    x = np.ascontiguousarray(x, dtype=manifest.dtype)
    with writing(out / manifest.name(number)) as stream:
        if manifest.to == "npy":
            np.save(stream, x, allow_pickle=False)
            return
        import pyarrow as pa  # type: ignore[import-untyped]
        import pyarrow.parquet as pq  # type: ignore[import-untyped]

        rows = pa.array(np.arange(len(x)) + number * manifest.shard)
        vectors = pa.FixedSizeListArray.from_arrays(pa.array(x.ravel()), manifest.width)
        pq.write_table(pa.table({"row": rows, "vector": vectors}), stream, use_dictionary=False)


def arrays(out: Path) -> Iterator[NDArray[Any]]:
    """The (n, k) of each file in order, .npy left on disk until it is read. Runs no code of a file.

    Raises ValueError for a directory that is unfinished or damaged.
    """
    if (manifest := begun(out)) is None:
        raise ValueError(f"{out}: no {MANIFEST}; whitenedcse encode writes such a directory")
    if left := missing(out, manifest):
        raise ValueError(
            f"{out} lacks {len(left)} of {manifest.shards} files; the same command again goes on"
        )
    for number in range(manifest.shards):
        x = read(out / manifest.name(number))
        if x.shape != (shape := (manifest.count(number), manifest.width)) or x.dtype != manifest.dtype:
            raise ValueError(f"{out / manifest.name(number)} is damaged: {x.dtype} {x.shape}, not {shape}")
        yield x


def read(path: Path) -> NDArray[Any]:
    """(n, k) of one file."""
    try:
        if path.suffix == ".npy":
            return np.lib.format.open_memmap(path, mode="r")  # never an array of objects, which is a pickle
        import pyarrow.parquet as pq

        vectors = pq.read_table(path, columns=["vector"], memory_map=True)["vector"].combine_chunks()
        return vectors.flatten().to_numpy().reshape(len(vectors), -1)
    except (ValueError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error

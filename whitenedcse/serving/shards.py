"""A directory of vectors while it is written: its manifest, its files, and what a killed job has left.

n: rows of a file    k: width
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whitenedcse.console import say
from whitenedcse.data.remote import Store, clear, held
from whitenedcse.files import (
    DIGESTS,
    LOCK,
    check_place,
    checksum,
    claimed,
    intact,
    parsing,
    read_json,
    seal_too,
    writing,
)
from whitenedcse.serving.layouts import Manifest
from whitenedcse.serving.shares import results
from whitenedcse.whitening import check_finite

MANIFEST, STARTS = "manifest.json", "starts.json"
SHARED = ".ranks"  # the folder through which ranks share a job
WRITTEN = [name for file in (MANIFEST, STARTS, DIGESTS) for name in (file, f"{file}.new")]
OURS = {*WRITTEN, LOCK, SHARED}  # may be here before a job has begun
SHARE = 50  # of the time, what writing many digests may take: a 50th part
MANY = 1_000  # files whose digests are no longer written one by one
AGAIN = "the same command encodes it again"


def begun(out: Path) -> Manifest | None:
    """The manifest of a directory; None if the directory is empty or missing. Raises ValueError otherwise."""
    if not (out / MANIFEST).exists():
        if out.exists() and (other := sorted({path.name for path in out.iterdir()} - OURS)):
            raise ValueError(f"{out} holds something other than vectors, {other[0]!r}; name a new directory")
        return None
    intact(out, "copy it again, or name a new directory", [MANIFEST])
    content = read_json(out / MANIFEST)
    with parsing(out / MANIFEST, "whitenedcse encode writes it; name a new directory"):
        return Manifest(**content)


def unwritten(out: Path, manifest: Manifest) -> list[int]:
    """The numbers of the files that are missing."""
    here = {path.name for path in out.iterdir()}
    return [number for number in range(manifest.shards) if manifest.name(number) not in here]


def kept(out: Path, name: str) -> str:
    """What is kept of a job that was interrupted, in words; name: of the directory."""
    if (manifest := begun(out)) is None or not (out / DIGESTS).is_file():
        return f"nothing was encoded to {name} yet"
    known = read_json(out / DIGESTS)  # also of files that were moved to a store
    rows = sum(manifest.count(i) for i in range(manifest.shards) if manifest.name(i) in known)
    return f"{rows:,} of {manifest.rows:,} rows are kept in {name}, and the same command resumes"


def finished(out: Path) -> bool:
    """Whether all files are there."""
    return (manifest := begun(out)) is not None and not unwritten(out, manifest)


@contextmanager
def locked(out: Path, *, alone: bool = True) -> Iterator[None]:
    """A context in which this process alone writes to the directory, which is created if it is missing.

    A job that ends before it has begun, as one that is refused, leaves nothing new there. alone: not so where
    ranks that others started still read there why.
    """
    check_place(out)
    begun(out)  # refuses before it touches
    before = {path.name for path in out.iterdir()} if (there := out.exists()) else set()
    out.mkdir(exist_ok=True)
    with claimed(out):
        try:
            yield
        finally:
            if alone and not (out / MANIFEST).exists():
                for name in OURS - before:
                    clear(out / name)
                with suppress(OSError):  # another process has come meanwhile
                    if not there:
                        out.rmdir()


def remove_damaged(out: Path, manifest: Manifest) -> None:
    """Remove each file that is not as it was written, and say so."""
    if not (out / DIGESTS).is_file():
        return
    known = read_json(out / DIGESTS)
    for number in range(manifest.shards):
        file = out / manifest.name(number)
        if file.exists() and checksum(file) != (digest := known.get(file.name)):
            why = "is not as it was written: its digest differs" if digest else "was left unfinished"
            say(f"{file} {why}; it is encoded again")
            file.unlink()


def recover(out: Path) -> None:
    """Take over the digests of files that ranks had written when the first of them was killed."""
    if (manifest := begun(out)) is not None and (out / DIGESTS).exists():
        come = {manifest.name(number): digest.decode() for number, digest in results(out / SHARED).items()}
        if come:
            seal_too(out, come)


def has_starts(out: Path) -> bool:
    """Whether starts.json is there as it was written."""
    try:
        intact(out, AGAIN, [STARTS])
    except ValueError as error:
        say(str(error))
        return False
    return (out / STARTS).exists()


def write(out: Path, manifest: Manifest, number: int, x: NDArray[Any]) -> str:
    """Write one file of (n, k): an array, or a table of `row` (its number in the corpus) and `vector`.

    Returns its digest. Raises ValueError for NaN or infinity, which a number above 65,504 is in float16.
    """
    with np.errstate(over="ignore"):
        x = np.ascontiguousarray(x, dtype=manifest.dtype)
    first = number * manifest.shard
    check_finite(x, lambda row: f"the vector of row {first + row} of {manifest.input} in {manifest.dtype}")
    with writing(file := out / manifest.name(number)) as stream:
        if manifest.to == "npy":
            np.save(stream, x, allow_pickle=False)
        else:
            import pyarrow as pa  # type: ignore[import-untyped]
            import pyarrow.parquet as pq  # type: ignore[import-untyped]

            rows = pa.array(np.arange(len(x)) + first)
            vectors = pa.FixedSizeListArray.from_arrays(pa.array(x.ravel()), manifest.width)
            pq.write_table(pa.table({"row": rows, "vector": vectors}), stream, use_dictionary=False)
    return checksum(file)


def resume(out: Path, store: Store) -> None:
    """Copy what a store knows of a job to the directory, so that any machine resumes it.

    Raises ValueError for a store that holds something else.
    """
    there = held(store.url)
    if MANIFEST in there:
        known = read_json(out / DIGESTS) if (out / DIGESTS).exists() else {}
        store.get(names := [name for name in (MANIFEST, STARTS, DIGESTS) if name in there])
        seal_too(out, {name: known[name] for name in known.keys() - set(names) if (out / name).exists()})
    elif other := sorted(there.keys() - OURS):
        raise ValueError(
            f"{store.url} holds something other than vectors, {other[0]!r}; name a new directory"
        )


def moved(out: Path, manifest: Manifest, store: Store) -> set[int]:
    """The numbers of the files that are in the store, to which all that are whole here are moved first."""
    known, here = read_json(out / DIGESTS), {path.name for path in out.iterdir()}
    names = {manifest.name(number): number for number in range(manifest.shards)}
    move(out, [name for name in names if name in here and name in known], store)
    store.put([STARTS, MANIFEST])
    return {names[name] for name in held(store.url) if name in names and name in known}


def move(out: Path, names: Sequence[str], store: Store) -> None:
    """Move files of vectors to the store, and copy their digests there."""
    store.put([*names, DIGESTS])
    for name in names:
        (out / name).unlink()


class Sealed:
    """Adds the digests of finished files to digests.json, and moves the files to the store if there is one.

    That is done at once for up to MANY files. The list of more is long: it is then written for several files
    together, in a 50th of the time, and a kill loses the files that wait for it.
    """

    def __init__(self, out: Path, manifest: Manifest, store: Store | None) -> None:
        self.out, self.manifest, self.store, self.due = out, manifest, store, 0.0
        self.waiting: dict[str, str] = {}

    def add(self, digests: Mapping[int, bytes]) -> None:
        """Note the digests of files by their numbers."""
        self.waiting |= {self.manifest.name(number): digest.decode() for number, digest in digests.items()}
        if time.monotonic() >= self.due:
            self.write()

    def write(self) -> None:
        """Write what was noted since the last time."""
        if not self.waiting:
            return
        began = time.monotonic()
        seal_too(self.out, self.waiting)
        took = time.monotonic() - began
        if self.store:
            move(self.out, list(self.waiting), self.store)
        self.waiting = {}
        self.due = time.monotonic() + SHARE * took if self.manifest.shards > MANY else 0.0

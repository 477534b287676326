"""Planes on disk: a folder for each encoder, and in it a shard for each call that encoded sentences.

    m: sentences of a shard    d: width

    vectors/ENCODER/SHARD/names.npy        (m,) digests of the sentences' token ids
    vectors/ENCODER/SHARD/KIND-LAYER.npy   (m, d) float32
    vectors/ENCODER/SHARD/digests.json     of these files

Any number of processes share them without waiting: a shard never changes once it has its name, and what one
process removes, others that opened it still read.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from whitenedcse.console import say
from whitenedcse.files import DIGESTS, intact, naming, read_json, seal

Plane = tuple[str, int]  # its kind of pooling, and its layer
LIMIT = 20 * 2**30  # bytes of all planes together, beyond which the encoder unused for longest gives way
AGAIN = "these sentences are encoded again"
DAY = 86_400.0  # seconds since a draft was last written, after which it is one that a kill left


class Shard(NamedTuple):
    """The planes that one call encoded: names (m,) of its sentences, and memory-mapped planes (m, d)."""

    names: NDArray[np.str_]
    planes: Mapping[Plane, NDArray[np.float32]]

    @classmethod
    def open(cls, path: Path, wanted: Sequence[Plane], names: NDArray[np.str_]) -> Shard | None:
        """The shard in this folder if it has these planes and any of these sentences, else None.

        All that is read is compared with its digest. A damaged shard is removed, as is one without digests.
        """
        try:
            if not (path / DIGESTS).is_file():
                raise ValueError(f"{path} is of an older version, without {DIGESTS}; {AGAIN}")
            intact(path, AGAIN, ["names.npy"])
            held: NDArray[np.str_] = np.load(path / "names.npy")
            files = {plane: file_of(plane) for plane in wanted}
            if not np.isin(held, names).any() or not set(files.values()) <= set(read_json(path / DIGESTS)):
                return None
            intact(path, AGAIN, files.values())
            return cls(held, {plane: np.load(path / name, mmap_mode="r") for plane, name in files.items()})
        except (OSError, ValueError) as error:
            if path.is_dir():  # else another process removed it
                say(str(error))
                remove(path)
            return None


def file_of(plane: Plane) -> str:
    """The name of a plane's file."""
    return f"{plane[0]}-{plane[1]}.npy"


def here(folder: Path, wanted: Sequence[Plane], names: NDArray[np.str_]) -> list[Shard]:
    """The shards of an encoder's folder that have these planes and any of these sentences.

    The folder is made if it is missing, and is now the one that was last used.
    """
    with suppress(FileNotFoundError):  # another process has just deleted it
        folder.mkdir(parents=True, exist_ok=True)
        os.utime(folder)
        paths = [path for path in sorted(folder.iterdir()) if not path.name.startswith(".")]
        return [shard for path in paths if (shard := Shard.open(path, wanted, names))]
    return []


def gathered(shards: Sequence[Shard], names: NDArray[np.str_], plane: Plane) -> NDArray[np.float32]:
    """One plane (n, d) of the sentences `names`, in their order, collected from all shards."""
    for shard in shards:
        if np.array_equal(shard.names, names):
            return shard.planes[plane]
    out = np.empty((len(names), shards[0].planes[plane].shape[-1]), np.float32)
    for shard in shards:
        order = np.argsort(shard.names)
        place = np.searchsorted(shard.names, names, sorter=order).clip(max=len(order) - 1)
        here = np.flatnonzero(shard.names[order[place]] == names)
        out[here] = shard.planes[plane][order[place[here]]]
    return out


def reserve(path: Path) -> None:
    """Have the disk keep space for a whole file: with none, writing to a memory map kills the process."""
    if hasattr(os, "posix_fallocate"):  # macOS has none
        with path.open("r+b") as stream:
            os.posix_fallocate(stream.fileno(), 0, path.stat().st_size)


@contextmanager
def draft(folder: Path, planes: Sequence[Plane], names: NDArray[np.str_], width: int) -> Iterator[Shard]:
    """A context with a new shard, whose planes are to be filled, and which on exit is kept in the folder.

    An error or a kill leaves no incomplete shard there. It serves this process if it cannot be kept, as
    where another one kept the same.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft, shape = Path(tempfile.mkdtemp(prefix=".", dir=folder.parent)), (len(names), width)
    content = hashlib.blake2b(names.tobytes() + repr(planes).encode(), digest_size=8)
    shard = folder / content.hexdigest()
    with naming(shard, draft):
        np.save(draft / "names.npy", names)
        paths = {plane: draft / file_of(plane) for plane in planes}
        for path in paths.values():
            np.lib.format.open_memmap(path, "w+", np.float32, shape)
            reserve(path)
        files = {plane: np.lib.format.open_memmap(path, "r+") for plane, path in paths.items()}
        yield Shard(names, files)
        for file in files.values():
            file.flush()
            file.flags.writeable = False  # it serves readers from now on
        seal(draft)
    with suppress(OSError):
        folder.mkdir(exist_ok=True)
        draft.rename(shard)
    shutil.rmtree(draft, ignore_errors=True)


def remove(path: Path) -> None:
    """Delete a folder in the cache, which others see as a whole or not at all."""
    with suppress(OSError):  # another process removes it
        away = Path(tempfile.mkdtemp(prefix=".", dir=path.parent))
        try:
            path.rename(away / path.name)
        finally:
            shutil.rmtree(away, ignore_errors=True)


def prune(folder: Path, keep: Path) -> None:
    """Delete the planes of the least recently used encoders while all together exceed LIMIT; `keep` stays.

    Drafts are not counted, and are deleted if a kill left them.
    """
    used = dict[Path, tuple[float, int]]()
    for path in folder.iterdir():
        with suppress(FileNotFoundError):  # another process removes it
            changed, files = path.stat().st_mtime, [f.stat() for f in path.rglob("*") if f.is_file()]
            if not path.name.startswith("."):
                used[path] = changed, sum(file.st_size for file in files)
            elif max([changed, *(file.st_mtime for file in files)]) < time.time() - DAY:
                shutil.rmtree(path, ignore_errors=True)
    total = sum(size for _, size in used.values())
    for path, (_, size) in sorted(used.items(), key=lambda item: item[1]):
        if total > LIMIT and path != keep:
            remove(path)
            total -= size

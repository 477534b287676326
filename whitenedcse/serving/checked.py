"""Files whose blocks are compared with their digests before they are first read, and the arrays in them.

n: rows    A block is 1 MiB of a file; the last one is shorter.

So a file of any size opens at once, and no byte that changed since it was written has an effect: digests.json
of the folder holds, for each file, the XXH3 digests of its blocks, 32 hexadecimal digits each, one after the
other. For a file of one block that is the digest of the file, as other folders have it. They find damage, not
a forgery: who changes a file may write its digests, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from whitenedcse.files import DIGESTS, array, checksum, read_json, write_json

BLOCK, DIGITS = 1 << 20, 32
CURE = "copy the whole index again"


def seal(folder: Path, names: Iterable[str]) -> None:
    """Write digests.json of a folder: the digests of the blocks of these files."""
    write_json(folder / DIGESTS, {name: "".join(digests(folder / name)) for name in names})


def digests(file: Path) -> list[str]:
    """The digest of each block of a file."""
    with file.open("rb") as stream:
        return [checksum(stream.read(BLOCK)) for _ in range(-(-file.stat().st_size // BLOCK))]


def sealed(folder: Path) -> dict[str, str] | None:
    """The content of digests.json of a folder; None where there is none, as in the oldest indices."""
    return read_json(folder / DIGESTS) if (folder / DIGESTS).is_file() else None


class Blocks:
    """A file, memory-mapped, whose blocks are compared with their digests by `check`, each once.

    known: what `sealed` returns of the folder; a file that was sealed as a whole, by an older version, is
    compared as a whole now. Raises ValueError, naming the file, if it is missing, or has another number of
    blocks than when it was written.
    """

    def __init__(self, file: Path, known: dict[str, str] | None) -> None:
        self.file, self.digests = file, "" if known is None else known.get(file.name, "")
        if not file.is_file():
            raise ValueError(f"{file} is missing: the index names it; {CURE}")
        self.size = file.stat().st_size
        count = -(-self.size // BLOCK)
        whole = known is None or (len(self.digests) == DIGITS and count > 1)
        if not count or (not whole and len(self.digests) != DIGITS * count):
            raise self.changed()
        if whole and known is not None and checksum(file) != self.digests:
            raise self.changed()
        self.bytes = np.memmap(file, np.uint8, "r")
        self.same = np.full(count, whole)

    def changed(self) -> ValueError:
        """The error for a file that is not as it was written."""
        return ValueError(f"{self.file} is not as it was written: its digest differs; {CURE}")

    def check(self, first: int, last: int) -> None:
        """Compare the blocks that hold the bytes from `first` to `last`, unless they were compared before.

        Raises ValueError, naming the file, if one is not as it was written.
        """
        low, high = first // BLOCK, last // BLOCK + 1
        if not self.same[low:high].all():
            for i in low + np.flatnonzero(~self.same[low:high]):
                content = self.bytes[i * BLOCK : (i + 1) * BLOCK].tobytes()
                if checksum(content) != self.digests[DIGITS * i : DIGITS * (i + 1)]:
                    raise self.changed()
                self.same[i] = True

    def check_all(self) -> int:
        """Compare all blocks; returns the number of bytes of the file."""
        self.check(0, self.size - 1)
        return self.size


class Stream:
    """A file as a function from a number of bytes to the next ones, which are compared with their digests."""

    def __init__(self, blocks: Blocks) -> None:
        self.blocks, self.place = blocks, 0

    def __call__(self, count: int) -> bytes:
        """The next `count` bytes, or those that are left."""
        here, self.place = self.place, min(self.place + count, self.blocks.size)
        if self.place > here:
            self.blocks.check(here, self.place - 1)
        return self.blocks.bytes[here : self.place].tobytes()


class Checked:
    """An array (n, ...) of a .npy file, memory-mapped; rows are compared with their digests when first taken.

    It gives arrays for a slice, such as [:] for all rows, and for row numbers. known: see `Blocks`. Raises
    ValueError, naming the file, if it is damaged.
    """

    def __init__(self, file: Path, known: dict[str, str] | None) -> None:
        self.blocks = Blocks(file, known)
        self.blocks.check(0, 0)  # the header
        self.array = cast(Any, array(file))  # a memmap, which has its offset in the file
        self.dtype, self.shape, self.nbytes = self.array.dtype, self.array.shape, self.array.nbytes
        self.start: int = self.array.offset
        self.row = self.nbytes // max(1, len(self.array))  # bytes
        if self.start + self.nbytes != self.blocks.size:
            raise self.blocks.changed()

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, rows: slice | NDArray[np.int64]) -> NDArray[Any]:
        if isinstance(rows, slice):
            start, stop, _ = rows.indices(len(self))
            self.check(start, stop)
        else:
            for i in np.unique(rows):
                self.check(i, i + 1)
        taken: NDArray[Any] = self.array[rows]
        return taken

    def check(self, start: int, stop: int) -> None:
        """Compare the blocks with the rows from `start` to before `stop`."""
        if stop > start and self.row:
            self.blocks.check(self.start + start * self.row, self.start + stop * self.row - 1)

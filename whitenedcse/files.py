"""Files: written so that a kill leaves the old content or the new, sealed by digests, and read by format.

A file or folder is written under a name of its own beside its place, flushed to disk and renamed. A full disk
is said in the system's words with the name of what was being written, and leaves nothing torn.
"""

from __future__ import annotations

import csv
import errno
import hashlib
import json
import os
import platform
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import xxhash
from filelock import AcquireReturnProxy, FileLock, Timeout

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

DIGESTS = "digests.json"  # of a folder: the digest of each file in it
LOCK = ".lock"
SECONDS = 5.0  # for a process that was just killed to release its folder
DAMAGED = "copy or download it again"
# of an export, an index or an encoded corpus: the file without which nothing of ours opens its folder
MARKS = ("config.json", "modules.json", "export.json", "index.json", "manifest.json")


@contextmanager
def writing(path: Path, mode: str = "wb") -> Iterator[IO[Any]]:
    """A context with a stream to a draft, which on exit is on disk and replaces `path`."""
    draft = draft_of(path)
    with naming(path, draft):
        with draft.open(mode, encoding=None if "b" in mode else "utf-8") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        draft.replace(path)
        settle(path.parent)


@contextmanager
def drafted(path: Path) -> Iterator[Path]:
    """A context with a new draft folder, which on exit is on disk and replaces `path`.

    A kill between its two renames leaves the old folder to `restore`. Raises NotADirectoryError for a file.
    """
    path = path.resolve() if path.is_symlink() else path  # a link stays one
    restore(path)
    draft, old = draft_of(path), beside(path, "old")
    if path.is_file():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
    with naming(path, draft):
        draft.mkdir(parents=True)
        yield draft
        for written in (*draft.rglob("*"), draft):
            if written.is_file():
                written.chmod(draft.stat().st_mode & 0o666)  # safetensors writes for its user alone
            settle(written)
        if path.exists():
            shutil.rmtree(old, ignore_errors=True)
            path.rename(old)
        draft.rename(path)
        settle(path.parent)
        shutil.rmtree(old, ignore_errors=True)


def restore(path: Path) -> None:
    """Rename the old folder back, if a kill came between the two renames of `drafted`."""
    old = beside(path, "old")
    if old.exists() and not path.exists():
        with suppress(OSError):  # a writer goes on, or another reader was here
            old.rename(path)


def draft_of(path: Path) -> Path:
    """The path of this process's draft, beside that; the drafts of processes that were killed are removed."""
    here = platform.node()
    for left in path.parent.glob(f".{path.name}.{here}-*.new"):
        pid = left.stem.rpartition("-")[2]
        if pid == str(os.getpid()) or (pid.isdecimal() and not lives(int(pid))):
            remove(left)
    return beside(path, f"{here}-{os.getpid()}.new")


def lives(pid: int) -> bool:
    """Whether there is a process of this number on this machine."""
    try:
        os.kill(pid, 0)
    except OSError as error:
        return isinstance(error, PermissionError)  # of another user
    return True


def beside(path: Path, name: str) -> Path:
    """The path of a hidden file or folder in the same directory."""
    return path.with_name(f".{path.name}.{name}")


def remove(path: Path) -> None:
    """Delete a file or a folder, if there is one."""
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


@contextmanager
def naming(path: Path, draft: Path | None = None) -> Iterator[None]:
    """A context that writes `path`: named where a disk takes no more; any error removes the draft."""
    try:
        yield
    except BaseException as error:
        if draft is not None:
            remove(draft)
        if (number := full_disk(error)) is not None:
            raise OSError(number, os.strerror(number), str(path)) from error
        raise


def full_disk(error: BaseException | None) -> int | None:
    """The errno with which the disk took no more, if an error is, comes from or tells of one; else None."""
    while error is not None:
        said = re.search(r"\(os error (\d+)\)", str(error))
        number = int(said[1]) if said else error.errno if isinstance(error, OSError) else None
        if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
            return number
        if re.search(r"\d+ requested and \d+ written", str(error)):
            return errno.ENOSPC
        error = error.__cause__ or error.__context__
    return None


def settle(path: Path) -> None:
    """Flush a file, or the names in a folder, to disk."""
    if path.is_dir() and os.name != "posix":
        return  # a folder cannot be opened there
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def check_place(out: Path) -> None:
    """Raise OSError for a path where no folder can be written: a file is there, or it has no parent."""
    if out.is_file():
        raise NotADirectoryError(f"{out} is a file, and a directory is written here; choose another name")
    if not out.parent.is_dir():
        raise FileNotFoundError(f"{out.parent}: no such directory; make it first")


def claimed(path: Path, hint: str = "wait for it") -> AcquireReturnProxy[Any]:
    """A context in which this process alone writes to a folder. Raises ValueError if another does."""
    try:
        return FileLock(path / LOCK).acquire(timeout=SECONDS)
    except Timeout:
        raise ValueError(f"{path} is being written by another process; {hint}") from None


def sha256(path: Path) -> str:
    """The SHA-256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def checksum(content: Path | bytes) -> str:
    """The XXH3 digest of a file's bytes, in hexadecimal: it finds damage, not a forgery, at memory speed."""
    if isinstance(content, bytes):
        return xxhash.xxh3_128_hexdigest(content)
    with content.open("rb", buffering=0) as stream:
        state = hashlib.file_digest(stream, xxhash.xxh3_128)
    return str(state.hexdigest())


def seal(folder: Path) -> None:
    """Write digests.json of a folder: the `checksum` of each file in it, but for Markdown."""
    digests = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.suffix != ".md" and path.name not in (DIGESTS, LOCK):
            digests[path.relative_to(folder).as_posix()] = checksum(path)
    write_json(folder / DIGESTS, digests)


def intact(folder: Path, cure: str, names: Iterable[str] | None = None) -> None:
    """Raise ValueError, naming the file and the cure, if one is not as it was when the folder was sealed.

    A folder without digests.json is another program's, and is taken as it is.
    """
    if not (folder / DIGESTS).is_file():
        return
    known = read_json(folder / DIGESTS)
    for name in known if names is None else names:
        now = checksum(folder / name) if (folder / name).is_file() else None
        if now is None and name in known:
            raise ValueError(f"{folder / name} is missing: {DIGESTS} beside it names it; {cure}")
        if now != known.get(name):
            raise ValueError(f"{folder / name} is not as it was written: its digest differs; {cure}")


@contextmanager
def parsing(path: Path, cure: str, *own: type[Exception]) -> Iterator[None]:
    """A context in which any error that a file's content causes is a ValueError with its name and a cure.

    Errors of the system, a ValueError with the file's name, and errors of the classes `own` are passed on.
    """
    try:
        yield
    except Exception as error:
        system = isinstance(error, FileNotFoundError) or (isinstance(error, OSError) and error.filename)
        named = isinstance(error, ValueError) and str(error).startswith(str(path))
        if system or named or isinstance(error, own):
            raise
        kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
        why = " ".join(f"{kind}{error}".split())
        raise ValueError(f"{path} is damaged ({why:.300}); {cure}") from error


def read_json(path: Path) -> Any:
    """The content of a JSON file. Raises ValueError, naming the file."""
    with parsing(path, "copy or make it again"):
        return json.loads(path.read_text(encoding="utf-8"))


def as_json(content: Any) -> bytes:
    """The bytes of a JSON file."""
    return (json.dumps(content, indent=2) + "\n").encode()


def write_json(path: Path, content: Any) -> None:
    """Replace a JSON file."""
    with writing(path) as stream:
        stream.write(as_json(content))


def tensors(file: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file by name."""
    from safetensors.torch import load_file

    with parsing(file, DAMAGED):
        return load_file(file)


def metadata(file: Path, cure: str = DAMAGED) -> dict[str, str]:
    """The metadata of a safetensors file, after all its header was checked; cure: of a damaged file."""
    from safetensors import safe_open

    with parsing(file, cure), safe_open(file, "numpy") as opened:
        return opened.metadata() or {}


def vectors(file: Path) -> NDArray[Any]:
    """The vectors (n, k) of a .npy file, or of the column `vector` of a .parquet file, memory-mapped."""
    import numpy as np
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    with parsing(file, DAMAGED):
        if file.suffix == ".npy":
            return np.lib.format.open_memmap(file, mode="r")  # never of objects, which would be a pickle
        column = pq.read_table(file, columns=["vector"], memory_map=True)["vector"].combine_chunks()
        return column.flatten().to_numpy().reshape(len(column), -1)


def arrays(file: Path) -> dict[str, NDArray[Any]]:
    """The arrays of a .npz file by name; none of objects."""
    import numpy as np

    with parsing(file, DAMAGED), np.load(file, allow_pickle=False) as content:
        return dict(content)


def checkpoint(file: Path, cure: str = DAMAGED) -> dict[str, Any]:
    """The content of a file of torch.save: tensors and plain values; anything else in it is refused."""
    import torch

    with parsing(file, cure):
        return dict(torch.load(file, map_location="cpu", weights_only=True))


def table(file: Path) -> list[dict[str, str]]:
    """The lines of a CSV file that is appended to, by column; without a last one that a kill cut short."""
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    whole = text[: text.rfind("\n") + 1]
    with parsing(file, "delete its damaged lines"):
        lines = list(csv.reader(whole.splitlines()))
        return [dict(zip(lines[0], cells, strict=True)) for cells in lines[1:]]

"""Writing files and folders so that a kill cannot leave them half written."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import xxhash
from filelock import AcquireReturnProxy, FileLock, Timeout

DIGESTS = "digests.json"  # of a folder: the digest of each file in it
LOCK = ".lock"
SECONDS = 5.0  # for a process that was just killed to release its directory
REFUSED = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # what a disk says that takes no more


class Unwritten(OSError):
    """A disk took no more: of which file or folder, how many bytes it needs at least, how many are free."""

    path = Path()
    needed = 0  # bytes


@contextmanager
def needing_space(path: Path, draft: Path | None = None, nbytes: int = 0) -> Iterator[None]:
    """A context that writes `path`, by way of a draft: a file or folder that any error removes.

    nbytes: how many will be written, if that is known. Raises `Unwritten` where the disk is full, or takes no
    more for another reason, in whatever way a library says so.
    """
    try:
        yield
    except BaseException as error:
        used = held(draft)
        if draft is not None:
            shutil.rmtree(draft, ignore_errors=True)
            draft.unlink(missing_ok=True)
        if isinstance(error, Unwritten):
            if draft is not None and error.path.is_relative_to(draft):  # else it is of something else
                name, needed = path / error.path.relative_to(draft), max(nbytes, used + error.needed)
                raise unwritten(name, error_number(error), needed) from error
        elif isinstance(error, Exception) and (number := error_number(error)) in REFUSED:
            raise unwritten(path, number, max(nbytes, used + bool(used))) from error
        raise


def unwritten(path: Path, number: int | None, needed: int) -> Unwritten:
    """The error, in one line, that a file or folder of at least `needed` bytes could not be written.

    It leaves out how many are needed where that bound says nothing: as many are free.
    """
    assert number is not None
    free = shutil.disk_usage(next(folder for folder in path.absolute().parents if folder.exists())).free
    room = (
        f"{needed:,} bytes or more are needed, {free:,} are free"
        if needed > free
        else f"{free:,} bytes are free"
    )
    error = Unwritten(f"{path}: not written: {os.strerror(number)}: {room}; make room and start again")
    error.errno, error.path, error.needed = number, path, needed
    return error


def error_number(error: BaseException | None) -> int | None:
    """The system's number (errno) of the error that this one is, comes from or tells of; None if none.

    Libraries wrap an OSError (torch.save), tell of one in words (those in Rust), or have words of their own.
    """
    while error is not None:
        if isinstance(error, OSError) and error.errno:
            return error.errno
        if said := re.search(r"\(os error (\d+)\)", str(error)):
            return int(said[1])
        if re.search(r"\d+ requested and \d+ written", str(error)):  # NumPy
            return errno.ENOSPC
        error = error.__cause__ or error.__context__
    return None


def held(path: Path | None) -> int:
    """The bytes that a file, or all files in a folder, have on disk; 0 for none."""
    files = [path, *path.rglob("*")] if path is not None and path.exists() else []
    return sum(file.stat().st_blocks * 512 for file in files if file.is_file())


def reserve(path: Path) -> None:
    """Have the disk keep space for a whole file, whose length is final. Raises OSError where it has not.

    Without it, writing to a memory map of the file kills the process (SIGBUS) when the disk is full.
    """
    if hasattr(os, "posix_fallocate"):  # macOS has none
        with path.open("r+b") as stream:
            os.posix_fallocate(stream.fileno(), 0, path.stat().st_size)


@contextmanager
def writing(path: Path, mode: str = "wb", nbytes: int = 0) -> Iterator[IO[Any]]:
    """A context with a stream to a draft file, which on exit is on disk and replaces `path`.

    Whatever stops the writing, `path` has all of the old content or all of the new. nbytes, and what is
    raised where the disk is full: see `needing_space`.
    """
    draft = path.with_name(f"{path.name}.new")
    with needing_space(path, draft, nbytes):
        with draft.open(mode, encoding=None if "b" in mode else "utf-8") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        draft.replace(path)
    settle(path.parent)


@contextmanager
def drafted(path: Path, nbytes: int = 0) -> Iterator[Path]:
    """A context with a new draft folder, which on exit is on disk and replaces `path`.

    Whatever stops the writing, `path` has all of the old content or all of the new: after a kill between
    the two renames, once `restore` was called. Drafts that a kill left are removed by the next writing.
    nbytes, and what is raised where the disk is full: see `needing_space`.
    """
    restore(path)
    draft, old = beside(path, "new"), beside(path, "old")
    for left in (draft, old):
        shutil.rmtree(left, ignore_errors=True)
    with needing_space(path, draft, nbytes):
        draft.mkdir(parents=True)
        yield draft
        settle_all(draft)
    if path.exists():
        path.rename(old)
    draft.rename(path)
    settle(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def restore(path: Path) -> None:
    """Rename the old folder back, if a kill came between the two renames of `drafted`."""
    if (old := beside(path, "old")).exists() and not path.exists():
        old.rename(path)


def beside(path: Path, name: str) -> Path:
    """The path of a hidden file or folder in the same directory."""
    return path.with_name(f".{path.name}.{name}")


def settle(path: Path) -> None:
    """Flush a file, or the names in a folder, to disk."""
    if path.is_dir() and os.name != "posix":
        return  # a folder cannot be opened there
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def settle_all(folder: Path) -> None:
    """Flush a folder and all its contents to disk."""
    for written in (folder, *folder.rglob("*")):
        settle(written)


def whole_lines(path: Path) -> list[str]:
    """The lines of a file that is appended to, without a last one that a kill cut short; none if missing."""
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    return text[: text.rfind("\n") + 1].splitlines()


def digest(path: Path) -> str:
    """The SHA-256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def checksum(path: Path) -> str:
    """The XXH3 digest of a file's bytes, in hexadecimal: it finds damage, not a forgery, at memory speed."""
    state = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as stream:
        while block := stream.read(1 << 22):
            state.update(block)
    return state.hexdigest()


def seal(folder: Path) -> None:
    """Write digests.json of a folder: the `checksum` of each file in it but Markdown, which people edit."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.suffix != ".md")
    known = {p.relative_to(folder).as_posix(): p for p in files if p.name not in (DIGESTS, LOCK)}
    write_json(folder / DIGESTS, {name: checksum(path) for name, path in known.items()})


def intact(folder: Path, cure: str) -> None:
    """Raise ValueError, naming the file and the cure, if one is not as it was when the folder was sealed.

    A folder without digests.json is one of an older version, or another program's, and is taken as it is.
    """
    if not (folder / DIGESTS).is_file():
        return
    known = read_json(folder / DIGESTS)
    if not isinstance(known, dict):
        raise ValueError(f"{folder / DIGESTS} is not a JSON object of names and digests; {cure}")
    for name, expected in known.items():
        if not (folder / name).is_file():
            raise ValueError(f"{folder / name} is missing: {DIGESTS} beside it names it; {cure}")
        if checksum(folder / name) != expected:
            raise ValueError(f"{folder / name} is not as it was written: its digest differs; {cure}")


def read_json(path: Path) -> Any:
    """The content of a JSON file. Raises ValueError, naming the file, if it is not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}); copy or make it again") from error


def write_json(path: Path, content: Any) -> None:
    """Replace a JSON file."""
    text = json.dumps(content, indent=2) + "\n"
    with writing(path, "w", len(text)) as stream:
        stream.write(text)


def claimed(path: Path, hint: str = "wait for it") -> AcquireReturnProxy[Any]:
    """A context in which this process alone writes to a directory; without `with`, until the process ends.

    Raises ValueError, with the hint, if another process writes to it.
    """
    try:
        return FileLock(path / LOCK).acquire(timeout=SECONDS)
    except Timeout:
        raise ValueError(f"{path} is being written by another process; {hint}") from None

"""Writing files and folders so that a kill cannot leave them half written."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import xxhash
from filelock import AcquireReturnProxy, FileLock, Timeout

DIGESTS = "digests.json"  # of a folder: the digest of each file in it
LOCK = ".lock"
SECONDS = 5.0  # for a process that was just killed to release its directory


@contextmanager
def writing(path: Path, mode: str = "wb") -> Iterator[IO[Any]]:
    """A context with a stream to a draft file, which on exit is on disk and replaces `path`.

    Whatever stops the writing, `path` has all of the old content or all of the new, of one writer. Raises
    ValueError if another process is writing it for too long.
    """
    draft = path.with_name(f"{path.name}.new")
    with alone(draft, Path.touch):
        try:
            with draft.open(mode, encoding=None if "b" in mode else "utf-8") as stream:
                yield stream
                stream.flush()
                os.fsync(stream.fileno())
            draft.replace(path)
            settle(path.parent)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise


@contextmanager
def drafted(path: Path) -> Iterator[Path]:
    """A context with a new draft folder, which on exit is on disk and replaces `path`.

    Whatever stops the writing, `path` has all of the old content or all of the new: after a kill between
    the two renames, once `restore` was called. Drafts that a kill left are removed by the next writing.
    Raises ValueError if another process is writing it for too long.
    """
    restore(path)
    draft, old = beside(path, "new"), beside(path, "old")
    with alone(draft, lambda path: path.mkdir(parents=True, exist_ok=True)):
        try:
            for left in draft.iterdir():
                shutil.rmtree(left) if left.is_dir() else left.unlink()
            yield draft
            settle_all(draft)
            with renaming(path):
                shutil.rmtree(old, ignore_errors=True)
                if path.exists():
                    path.rename(old)
                draft.rename(path)
                settle(path.parent)
                shutil.rmtree(old, ignore_errors=True)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise


def restore(path: Path) -> None:
    """Rename the old folder back, if a kill came between the two renames of `drafted`."""
    if (old := beside(path, "old")).exists() and not path.exists():
        with renaming(path):
            if old.exists() and not path.exists():  # else another process was just replacing it
                old.rename(path)


@contextmanager
def renaming(path: Path) -> Iterator[None]:
    """A context in which no other process renames a folder, or what is kept beside it."""
    turn = beside(path, "turn")
    with alone(turn, Path.touch):
        try:
            yield
        finally:
            turn.unlink()


@contextmanager
def alone(path: Path, made: Callable[[Path], None] = lambda _: None) -> Iterator[None]:
    """A context in which no other process is in one of this path, a file or folder; none is left behind.

    made: makes it if it is missing. A kill ends the context, too. Raises ValueError if another process keeps
    it for too long. Without effect where the file system or the platform has no such locks.
    """
    until = time.monotonic() + SECONDS
    while (handle := _locked(path, made)) is None:
        if time.monotonic() > until:
            raise ValueError(f"{path} is being written by another process; wait for it")
        time.sleep(0.005)
    try:
        yield
    finally:
        os.close(handle)


def _locked(path: Path, made: Callable[[Path], None]) -> int | None:
    """An open handle that locks a path; None if another has it, or the path is another file by now."""
    with suppress(FileExistsError):  # by Path.mkdir, of a folder that is renamed at this moment
        made(path)
    if os.name != "posix":
        return os.open(os.devnull, os.O_RDONLY)
    import fcntl

    try:
        handle = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    except OSError:  # a network's file system may know no such locks
        return handle
    with suppress(FileNotFoundError):
        if os.path.samestat(os.fstat(handle), path.stat()):
            return handle
    os.close(handle)
    return None


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


def checksum(content: Path | bytes) -> str:
    """The XXH3 digest of a file's bytes, in hexadecimal: it finds damage, not a forgery, at memory speed."""
    if isinstance(content, bytes):
        return xxhash.xxh3_128_hexdigest(content)
    state = xxhash.xxh3_128()
    with content.open("rb", buffering=0) as stream:
        while block := stream.read(1 << 22):
            state.update(block)
    return state.hexdigest()


def seal(folder: Path, names: Iterable[str] | None = None, coming: Mapping[str, bytes] | None = None) -> None:
    """Write digests.json of a folder: the `checksum` of each file in it but Markdown, which people edit.

    names: the files, where not all. coming: the content of files that will be written after it.
    """
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.suffix != ".md")
    known = {p.relative_to(folder).as_posix(): p for p in files if p.name not in (DIGESTS, LOCK)}
    if names is not None:
        known = {name: folder / name for name in names if (folder / name).is_file()}
    contents: dict[str, Path | bytes] = {**known, **(coming or {})}
    write_json(folder / DIGESTS, {name: checksum(content) for name, content in contents.items()})


def seal_too(path: Path) -> None:
    """Add a file to digests.json of its folder, to which other processes may be adding theirs."""
    with alone(path.parent):
        known = read_json(path.parent / DIGESTS) | {path.name: checksum(path)}
        write_json(path.parent / DIGESTS, dict(sorted(known.items())))


def intact(folder: Path, cure: str, names: Iterable[str] | None = None) -> None:
    """Raise ValueError, naming the file and the cure, if one is not as it was when the folder was sealed.

    names: the files to check, where not all. A folder without digests.json is one of an older version, or
    another program's, and is taken as it is.
    """
    if not (folder / DIGESTS).is_file():
        return
    known = read_json(folder / DIGESTS)
    if not isinstance(known, dict):
        raise ValueError(f"{folder / DIGESTS} is not a JSON object of names and digests; {cure}")
    for name in known if names is None else names:
        now = checksum(folder / name) if (folder / name).is_file() else None
        if now is None and name in known:
            raise ValueError(f"{folder / name} is missing: {DIGESTS} beside it names it; {cure}")
        if now != known.get(name):
            raise ValueError(f"{folder / name} is not as it was written: its digest differs; {cure}")


def read_json(path: Path) -> Any:
    """The content of a JSON file. Raises ValueError, naming the file, if it is not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}); copy or make it again") from error


def write_json(path: Path, content: Any) -> None:
    """Replace a JSON file."""
    with writing(path, "w") as stream:
        stream.write(json.dumps(content, indent=2) + "\n")


def claimed(path: Path, hint: str = "wait for it") -> AcquireReturnProxy[Any]:
    """A context in which this process alone writes to a directory; without `with`, until the process ends.

    Raises ValueError, with the hint, if another process writes to it.
    """
    try:
        return FileLock(path / LOCK).acquire(timeout=SECONDS)
    except Timeout:
        raise ValueError(f"{path} is being written by another process; {hint}") from None

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

from whitenedcse.app.space import needing_space

DIGESTS = "digests.json"  # of a folder: the digest of each file in it
LOCK = ".lock"
DEPTH = 50  # of JSON: ours has at most 7
SECONDS = 5.0  # for a process that was just killed to release its directory


@contextmanager
def writing(path: Path, mode: str = "wb", nbytes: int = 0) -> Iterator[IO[Any]]:
    """A context with a stream to a draft file, which on exit is on disk and replaces `path`.

    Whatever stops the writing, `path` has all of the old content or all of the new, of one writer. nbytes,
    and what is raised where the disk is full: see `needing_space`. Raises ValueError if another process is
    writing it for too long.
    """
    draft = path.with_name(f"{path.name}.new")
    with alone(draft, Path.touch), needing_space(path, draft, nbytes):
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
    nbytes, and what is raised where the disk is full: see `needing_space`. Raises ValueError if another
    process is writing it for too long.
    """
    restore(path := path.resolve() if path.is_symlink() else path)  # a link stays one
    draft, old = beside(path, "new"), beside(path, "old")
    with alone(draft, lambda d: d.mkdir(parents=True, exist_ok=True)), needing_space(path, draft, nbytes):
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
    """Flush a folder and all its contents to disk; who may open the folder may read its files."""
    readable = folder.stat().st_mode & 0o666
    for written in (folder, *folder.rglob("*")):
        if written.is_file():
            written.chmod(readable)  # safetensors writes for its user alone
        settle(written)


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
        while block := stream.read(1 << 18):
            state.update(block)
    return state.hexdigest()


def seal(folder: Path, names: Iterable[str] | None = None, coming: Mapping[str, bytes] | None = None) -> None:
    """Write digests.json of a folder: the `checksum` of each file in it but Markdown, which people edit.

    names: the files, where not all. coming: the content of files that will be written after it.
    """
    if names is None:
        files = sorted(p for p in folder.rglob("*") if p.suffix != ".md" and p.name not in (DIGESTS, LOCK))
        names = [p.relative_to(folder).as_posix() for p in files]
    known = {name: folder / name for name in names if (folder / name).is_file()}
    contents: dict[str, Path | bytes] = {**known, **(coming or {})}
    write_json(folder / DIGESTS, {name: checksum(content) for name, content in contents.items()})


def seal_too(folder: Path, digests: Mapping[str, str]) -> None:
    """Add digests of files to digests.json of a folder, to which other processes may be adding theirs."""
    with alone(folder):
        known = read_json(folder / DIGESTS) | digests
        write_json(folder / DIGESTS, dict(sorted(known.items())))


def intact(folder: Path, cure: str, names: Iterable[str] | None = None) -> None:
    """Raise ValueError, naming the file and the cure, if one is not as it was when the folder was sealed.

    names: the files to check, where not all. A folder without digests.json is one of an older version, or
    another program's, and is taken as it is.
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

    Libraries raise errors of many classes, and code that finds a value of another type does too. Errors of
    the system, a ValueError with the file's name, and errors of the classes `own` are passed on.
    """
    try:
        yield
    except Exception as error:
        system = isinstance(error, FileNotFoundError) or (isinstance(error, OSError) and error.filename)
        named = isinstance(error, ValueError) and str(error).startswith(str(path))
        if system or named or isinstance(error, own):
            raise
        if isinstance(error, OSError) and path.is_dir():  # a library opened it, and said less
            raise ValueError(f"{path} is a directory; name a file") from error
        kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
        why = " ".join(f"{kind}{error}".split())
        raise ValueError(f"{path} is damaged ({why:.300}); {cure}") from error


class Named(dict[str, Any]):
    """A JSON object; a key that it lacks raises ValueError, which names the file."""

    path: Path

    def __missing__(self, key: str) -> Any:
        raise ValueError(f"{self.path} lacks {key!r} among {', '.join(self):.100}; copy or make it again")


def read_json(path: Path, kind: type = dict) -> Any:
    """The content of a JSON file: an object, or else of this kind; `object` for any.

    Raises ValueError, naming the file, for anything else, and for more than DEPTH values inside each other.
    """

    def named(pairs: list[tuple[str, Any]]) -> Named:
        content = Named(pairs)
        content.path = path
        return content

    try:
        content = json.loads(text := path.read_text(encoding="utf-8"), object_pairs_hook=named)
        if "\\u" in text:
            json.dumps(content, ensure_ascii=False).encode()  # half a surrogate pair is no text
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({error}); copy or make it again") from error
    if not isinstance(content, kind):
        held = f"a JSON {type(content).__name__}, not the expected {kind.__name__}"
        raise ValueError(f"{path} holds {held}; copy or make it again")
    refuse_deep(path, content)
    return content


def refuse_deep(path: Path, content: Any) -> None:
    """Raise ValueError for more than DEPTH values inside each other in the content of a JSON file."""
    level = [content]
    for _ in range(DEPTH):
        level = [value for outer in level for value in inside(outer)]
    if level:
        raise ValueError(f"{path} holds values inside each other, over {DEPTH} deep; copy or make it again")


def inside(content: Any) -> Iterable[Any]:
    """The values directly inside a value of JSON."""
    return content.values() if isinstance(content, dict) else content if isinstance(content, list) else ()


def as_json(content: Any) -> bytes:
    """The bytes of a JSON file."""
    return (json.dumps(content, indent=2) + "\n").encode()


def write_json(path: Path, content: Any) -> None:
    """Replace a JSON file."""
    text = as_json(content)
    with writing(path, nbytes=len(text)) as stream:
        stream.write(text)


def claimed(path: Path, hint: str = "wait for it") -> AcquireReturnProxy[Any]:
    """A context in which this process alone writes to a directory; without `with`, until the process ends.

    Raises ValueError, with the hint, if another process writes to it.
    """
    try:
        return FileLock(path / LOCK).acquire(timeout=SECONDS)
    except Timeout:
        raise ValueError(f"{path} is being written by another process; {hint}") from None

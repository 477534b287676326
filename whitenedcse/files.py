"""Files: written so that a kill cannot leave them half written, and read so that damage is named."""

from __future__ import annotations

import csv
import errno
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import xxhash
from filelock import AcquireReturnProxy, FileLock, Timeout

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

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


REFUSED = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # what a disk says that takes no more


def refuse_place(out: Path) -> None:
    """Raise OSError for a path where no directory can be written: a file is there, or it has no parent."""
    refuse_file(out)
    refuse_orphan(out)


def refuse_file(out: Path) -> None:
    """Raise NotADirectoryError for the path of a file where a directory is to be written."""
    if out.is_file():
        raise NotADirectoryError(f"{out} is a file, and a directory is written here; choose another name")


def refuse_orphan(out: Path) -> None:
    """Raise FileNotFoundError for a path in a directory that does not exist."""
    if not out.parent.is_dir():
        raise FileNotFoundError(f"{out.parent}: no such directory; make it first")


def nearest(missing: Path) -> str:
    """The end of a message: the path with the most similar name beside one that does not exist, or ""."""
    with suppress(OSError):  # a name that is too long, or a directory that may not be read
        if not missing.exists():
            beside = [path.name for path in missing.parent.iterdir() if path.name[0] != "."]
            near = get_close_matches(missing.name, beside, n=1, cutoff=0.75)
            return f"; did you mean {missing.parent / near[0]}?" if near else ""
    return ""


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
        discard(draft)
        if isinstance(error, Unwritten):
            if draft is not None and error.path.is_relative_to(draft):  # else it is of something else
                name, needed = path / error.path.relative_to(draft), max(nbytes, used + error.needed)
                raise unwritten(name, error_number(error), needed) from error
        elif isinstance(error, Exception) and (number := error_number(error)) in REFUSED:
            raise unwritten(path, number, max(nbytes, used + bool(used))) from error
        raise


def discard(draft: Path | None) -> None:
    """Delete a file or folder, if there is one, and free its space, also that of a file still open."""
    if draft is not None and draft.is_file():
        os.truncate(draft, 0)
        draft.unlink()
    elif draft is not None:
        shutil.rmtree(draft, ignore_errors=True)


def unwritten(path: Path, number: int | None, needed: int) -> Unwritten:
    """The error, in one line, that a file or folder of at least `needed` bytes could not be written.

    It leaves out how many are needed where that bound says nothing: as many are free.
    """
    assert number is not None
    free = shutil.disk_usage(next(folder for folder in path.absolute().parents if folder.exists())).free
    space = (
        f"{needed:,} bytes or more are needed, {free:,} are free"
        if needed > free
        else f"{free:,} bytes are free"
    )
    error = Unwritten(f"{path}: not written: {os.strerror(number)}: {space}; free some space and start again")
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


DAMAGED = "copy or download it again"
MOST_LAYERS, MOST = 1000, 2**24  # in a config.json: layers, and other numbers; more take minutes to build


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


def array(file: Path) -> NDArray[Any]:
    """The array of a .npy file, memory-mapped; never one of objects, which would be a pickle."""
    import numpy as np

    with parsing(file, DAMAGED):
        return np.lib.format.open_memmap(file, mode="r")


def vectors(file: Path) -> NDArray[Any]:
    """The vectors (n, k) of a .npy file, or of the column `vector` of a .parquet file, memory-mapped."""
    if file.suffix == ".npy":
        return array(file)
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    with parsing(file, DAMAGED):
        column = pq.read_table(file, columns=["vector"], memory_map=True)["vector"].combine_chunks()
        return column.flatten().to_numpy().reshape(len(column), -1)


def arrays(file: Path) -> dict[str, NDArray[Any]]:
    """The arrays of a .npz file by name; none of objects."""
    import numpy as np

    with parsing(file, DAMAGED), np.load(file, allow_pickle=False) as content:
        found = Named(content)
        found.path = file
        return found


def whole_lines(path: Path) -> list[str]:
    """The lines of a file that is appended to, without a last one that a kill cut short; none if missing."""
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    return text[: text.rfind("\n") + 1].splitlines()


def table(file: Path) -> list[dict[str, str]]:
    """The lines of a CSV file that is appended to, by column; without a last one that a kill cut short."""
    with parsing(file, "delete its damaged lines"):
        header, *lines = [*csv.reader(whole_lines(file))] or [["step"]]
        for number, cells in enumerate(lines, 2):
            if len(cells) != len(header):
                raise ValueError(f"{file}:{number}: {len(cells)} fields, {len(header)} expected")
        return [dict(zip(header, cells, strict=True)) for cells in lines]


def refuse_vast(file: Path) -> None:
    """Raise ValueError for an encoder's config.json with numbers so large that building it does not end."""
    level = [("", read_json(file))] if file.is_file() else []
    while level:
        for name, value in level:
            most = MOST_LAYERS if re.search("layer|depth|block|expert|num_labels", name) else MOST
            if isinstance(value, (int, float)) and value > most and "theta" not in name:
                raise ValueError(f"{file}: {name}={value!s:.30} is above {most:,}; {DAMAGED}")
        level = [pair for name, value in level for pair in named(name, value)]


def named(name: str, value: Any) -> list[tuple[str, Any]]:
    """The values inside a value of JSON, each with its name, in a list that of the list."""
    return list(value.items()) if isinstance(value, dict) else [(name, one) for one in inside(value)]


def checkpoint(file: Path) -> dict[str, Any]:
    """The content of a file of torch.save: tensors and plain values; anything else in it is refused."""
    import torch

    with parsing(file, "delete it, and the run resumes from the one before"):
        content = torch.load(file, map_location="cpu", weights_only=True)
        return {**content}


NUMBER, TEXT, WHOLE = (float, int), (str, None), (int, None)

# of an export, an index or an encoded corpus: the file without which nothing of ours opens its folder
MARKS = ("config.json", "modules.json", "export.json", "index.json", "manifest.json")

"""Files and directories of an object store: copied to this machine to be read, and from it when written.

A store has no rename, so a directory there is as complete as the last file of it that is written: one of
`MARKS`, without which nothing of ours opens it. Where a directory is replaced, the old marks go first.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from whitenedcse.data.corpus import TAGS, version
from whitenedcse.data.files import filesystem
from whitenedcse.data.sources import cache, locked
from whitenedcse.files import MARKS, checksum, drafted, remove
from whitenedcse.inputs import expanded

VERSION = (*TAGS, "created", "mtime")  # the times where a store has no tags


class Held(NamedTuple):
    """A file of a store: its path there, its size in bytes, and what changes with its content or is ""."""

    path: str
    size: int
    version: str


def is_url(path: str | Path) -> bool:
    """Whether a path is one of a store, such as s3://BUCKET/FOLDER or memory://FOLDER."""
    return "://" in str(path)


def held(url: str) -> dict[str, Held]:
    """The files of a directory of a store by their names in it; {"": file} for a file, {} for nothing."""
    with filesystem(url) as (system, inside):
        system.invalidate_cache()
        inside = inside.rstrip("/")
        found = system.find(inside, detail=True) if system.exists(inside) else {}
        return {
            path.removeprefix(inside).lstrip("/"): Held(path, int(facts["size"]), version(facts, VERSION))
            for path, facts in found.items()
        }


def fetched(path: str | Path) -> Path:
    """The copy on this machine of a file or directory of a store; a local path is returned as it is.

    The copy is in the cache, and used until the store has another size or version of a file.
    """
    if not is_url(path := expanded(path)):
        return Path(path)
    url = path.rstrip("/")
    if not (files := held(url)):
        raise FileNotFoundError(f"{url}: no such file or directory, or it cannot be reached")
    copies = place(url, "copies")
    copy = copies / checksum(repr(sorted(files.items())).encode())[:16] / url.rpartition("/")[2]
    with locked(copies, ".lock"):
        if not (copy.exists() and all(file.version for file in files.values())):
            for old in copies.glob("[!.]*"):
                shutil.rmtree(old)
            download(url, files, copy)
    return copy


def download(url: str, files: dict[str, Held], copy: Path) -> None:
    """Copy these files of a URL to `copy`, alone in its folder."""
    from fsspec.callbacks import TqdmCallback

    if outside := [name for name in files if ".." in Path(name).parts]:
        raise ValueError(f"{url}: {outside[0]!r} would be copied to another folder; it is not read")
    with drafted(copy.parent) as draft, filesystem(url) as (system, _):
        targets = [str(draft / copy.name / name) for name in files]
        told = TqdmCallback(tqdm_kwargs={"desc": f"files of {url} copied"})
        system.get([file.path for file in files.values()], targets, callback=told)


def place(url: str, what: str) -> Path:
    """A folder in the cache for what is copied from or to a URL."""
    return cache() / "remote" / checksum(url.rstrip("/").encode())[:16] / what


@contextmanager
def published(out: str | Path, mark: str | None) -> Iterator[Path]:
    """A context with the path to write; for a URL it is a new one, and copied to the store at the end.

    mark: a file of what may be replaced; "" for a URL of a file, None for nothing. Where copying fails, what
    was written stays on this machine and is named.
    """
    if not is_url(out := expanded(out)):
        yield Path(out)
        return
    url = out.rstrip("/")
    if (before := held(url)) and mark not in before:
        raise FileExistsError(f"{url} exists; choose another name")
    local = place(url, "written") / url.rpartition("/")[2]
    with locked(local.parent, ".lock"):
        remove(local)
        yield local
        try:
            upload(local, url, before)
        except Exception as error:  # of a store, of any class
            raise OSError(f"{error}; what was written is in {local}, until the next attempt") from error
        remove(local)


def upload(local: Path, url: str, before: Iterable[str]) -> None:
    """Copy a file or directory to a store, in place of the files `before`; marks are written last."""
    every = [path.relative_to(local).as_posix() for path in local.rglob("*") if path.is_file()]
    with filesystem(url) as (system, inside):
        inside = inside.rstrip("/")
        for name in sorted(filter(None, before), key=rank, reverse=True):
            system.rm_file(f"{inside}/{name}".rstrip("/"))
        for name in [""] if local.is_file() else sorted(every, key=rank):
            system.put_file(str(local / name), f"{inside}/{name}".rstrip("/"))


def rank(name: str) -> tuple[bool, int]:
    """The order in which files are written: `MARKS` last, of these the ones deep inside first."""
    return name.rpartition("/")[2] in MARKS, -name.count("/")

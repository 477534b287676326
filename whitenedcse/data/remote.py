"""Files and directories of an object store: copied to this machine to be read, and from it when written.

A store has no rename, so a directory there is as complete as the last file of it that is written: one of
`MARKS`, without which nothing of ours opens it. Where a directory is replaced, the old marks go first.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock

from whitenedcse.console import pace
from whitenedcse.data.corpus import TAGS
from whitenedcse.data.files import filesystem
from whitenedcse.data.sources import cache, locked
from whitenedcse.files import MARKS, beside, checksum, drafted
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
        files = {path.removeprefix(inside).lstrip("/"): facts for path, facts in found.items()}
        return {
            name: Held(facts["name"], int(facts["size"]), version(facts, VERSION))
            for name, facts in files.items()
        }


def version(facts: dict[str, Any], names: Iterable[str]) -> str:
    """What a store says of the version of a file, by the first of these names, but for a weak ETag; or ""."""
    found = (str(facts[name]) for name in names if facts.get(name))
    return next((text for text in found if not text.startswith("W/")), "")


def present(path: str | Path) -> Path | None:
    """A local path, or the `fetched` copy of a file of a store; None where there is no such path or file."""
    if is_url(path) and "" not in held(str(path)):
        return None
    return here if (here := fetched(path)).exists() else None


def fetched(path: str | Path) -> Path:
    """The copy on this machine of a file or directory of a store; a local path is returned as it is.

    The copy is in the cache, and used until the store has another size or version of a file.
    """
    if not is_url(path := expanded(path)):
        return Path(path)
    url = path.rstrip("/")
    if not (files := held(url)):
        raise FileNotFoundError(f"{url}: no such file or directory, or it cannot be reached")
    copies = place(url).parent
    copy = copies / checksum(repr(sorted(files.items())).encode())[:16] / place(url).name
    with locked(copies, ".lock"):
        if not (copy.exists() and all(file.version for file in files.values())):
            download(url, files, copy)
    return copy


def download(url: str, files: dict[str, Held], copy: Path) -> None:
    """Copy these files of a URL to `copy`, alone in its folder; older copies beside that are removed."""
    for old in copy.parent.parent.glob("[!.]*"):  # hidden ones are being written
        shutil.rmtree(old)
    if outside := [name for name in files if ".." in Path(name).parts]:
        raise ValueError(f"{url}: {outside[0]!r} would be copied to another folder; it is not read")
    copying = pace(f"files of {url} copied", len(files))
    with drafted(copy.parent) as draft, filesystem(url) as (system, _), copying as more:
        for name, file in files.items():
            target = draft / copy.name / name
            target.parent.mkdir(parents=True, exist_ok=True)
            system.get_file(file.path, str(target))
            more(1)
        if held(url) != files:
            raise ValueError(f"{url} changed while it was copied; try again")


@dataclass(frozen=True)
class Store:
    """A file or directory of a store (url) that is written from one on this machine (local)."""

    url: str
    local: Path

    def put(self, names: Iterable[str]) -> None:
        """Copy these local files to the store in this order; "" is the local file itself."""
        with filesystem(self.url) as (system, inside):
            for name in names:
                target = self._inside(inside, name)
                try:
                    system.put_file(str(self.local / name), target)
                except FileNotFoundError:  # a store with real folders; others may forbid to look for them
                    system.makedirs(target.rpartition("/")[0], exist_ok=True)
                    system.put_file(str(self.local / name), target)

    def get(self, names: Iterable[str]) -> None:
        """Copy these files of the store to the local directory."""
        with filesystem(self.url) as (system, inside):
            for name in names:
                system.get_file(self._inside(inside, name), str(self.local / name))

    def remove(self, names: Iterable[str]) -> None:
        """Remove these files of the store."""
        with filesystem(self.url) as (system, inside):
            for name in names:
                system.rm_file(self._inside(inside, name))

    def replace(self) -> None:
        """Copy all that is local to the store, the marks last, in place of what is there."""
        if self.local.is_file():
            return self.put([""])
        files = sorted(path for path in self.local.rglob("*") if path.is_file())
        names = sorted((path.relative_to(self.local).as_posix() for path in files), key=rank)
        before = sorted(held(self.url), key=rank, reverse=True)
        self.remove(name for name in before if rank(name)[0])
        self.put(names)
        return self.remove(name for name in before if not rank(name)[0] and name not in names)

    @staticmethod
    def _inside(folder: str, name: str) -> str:
        return f"{folder.rstrip('/')}/{name}".rstrip("/")


def rank(name: str) -> tuple[int, int]:
    """The order in which files are written: the marks last, of these the ones deep inside first."""
    mark = name.rpartition("/")[2] in MARKS
    return int(mark), -name.count("/") * mark


def place(url: str) -> Path:
    """Where on this machine what is copied from or to a URL lies: a path in the cache, of the same name."""
    url = url.rstrip("/")
    return cache() / "remote" / checksum(url.encode())[:16] / url.rpartition("/")[2]


@contextmanager
def named(out: str | Path) -> Iterator[Store | None]:
    """A context with the `Store` of a URL to be written, whose errors name the URL; None for a local path.

    Raises ValueError for a URL in a bucket that there is not.
    """
    if not is_url(out := expanded(out)):
        yield None
        return
    check_bucket(out)
    store = Store(out, beside(place(out), "out") / place(out).name)
    store.local.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield store
    except (ValueError, FileExistsError) as error:
        texts = (
            part.replace(str(store.local), store.url) if isinstance(part, str) else part
            for part in error.args
        )
        error.args = tuple(texts)
        raise


def check_bucket(url: str) -> None:
    """Raise ValueError for a URL in a bucket that does not exist, which some stores would make."""
    with filesystem(url) as (system, inside):
        bucket = inside.partition("/")[0] if not is_url(inside) else ""  # "" where paths are absolute, too
        try:
            if bucket:
                system.info(bucket)
        except FileNotFoundError:
            cure = "correct its name, or make it first"
            raise ValueError(f"{url}: there is no bucket {bucket!r}; {cure}") from None
        except Exception:  # noqa: S110  the kinds that stores raise share no class
            pass


@contextmanager
def published(out: str | Path, mark: str | None) -> Iterator[Path]:
    """A context with the path to write; for a URL it is a new one, and copied to the store at the end.

    mark: a file of what may be replaced; "" for a URL of a file, None for nothing. Where copying fails, what
    was written stays on this machine and is named.
    """
    with named(out) as store:
        if store is None:
            yield Path(expanded(out))
            return
        if (before := held(store.url)) and mark not in before:
            raise FileExistsError(f"{store.url} exists; choose another name")
        with FileLock(beside(store.local, "writer")):
            clear(store.local)
            yield store.local
            try:
                store.replace()
            except Exception as error:  # of a store, of any class
                kept = f"what was written for it is in {store.local}, until the next attempt"
                raise OSError(f"{error}; {kept}") from error
            clear(store.local)


def clear(path: Path) -> None:
    """Remove a file or a folder, if there is one."""
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)

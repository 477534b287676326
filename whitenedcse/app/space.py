"""Places: the names of runs, near misses, one where nothing can be written, a full disk with its free bytes.

Space is reserved before it is mapped.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from whitenedcse.app.ranks import shared

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


def label(hydra: Any, encoder: str | None, corpus: str | None) -> str:
    """What a run is named after: its experiment, or another encoder than the experiment's, or its corpus.

    hydra: Hydra's own settings, None where they are not part of the configuration.
    """
    experiment = hydra.runtime.choices.get("experiment") if hydra else None
    if experiment and not own_encoder(hydra.overrides.task):
        return str(experiment)
    return Path(encoder).name if encoder else Path(str(corpus)).stem


def own_encoder(overrides: Iterable[str]) -> bool:
    """Whether a command line names an encoder, in place of the experiment's."""
    return any(text.startswith(("encoder=", "encoder.path=")) for text in overrides)


def refuse_name(name: Any, run: Path) -> None:
    """Raise ValueError for a run= that is no name of a directory in outputs/; an interpolation makes one.

    run: the directory that Hydra makes of it, which is refused where it was meant as a URL.
    """
    if meant := next((part for part in run.parts[1:] if part.endswith(":")), None):
        raise ValueError(
            f"a run is written to this machine, not to {meant}//: give the name of a directory, and copy the "
            f"trained encoder by whitenedcse export RUN {meant}//BUCKET/NAME --to transformers"
        )
    path = Path(str(name or ""))
    if path.is_absolute() or ".." in path.parts or not path.parts:
        where = f"hydra.run.dir={path if path.parts else 'DIR'}"
        raise ValueError(f"run={name or ''} is no name for a directory in outputs/; elsewhere is {where}")


def did_you_mean(error: BaseException, argv: Iterable[str]) -> str:
    """The end of the message of a FileNotFoundError: the existing path nearest to the one it names, or "".

    argv: the command line that has the missing path, as a word or as the value of a setting. A path without
    slash and dot could be any word, and is one only if the message begins with it.
    """
    text = str(error)
    if not isinstance(error, FileNotFoundError) or "did you mean" in text:
        return ""
    values = [word.partition("=")[2] if re.match(r"[\w.+~/@-]+=", word) else word for word in argv]
    given = [part for value in values for part in re.findall(r"[^\s\[\],'\"]+", value)]
    for name in (*given, *(part.partition(":")[0] for part in given)):
        start = r"(^|[\s'\"])" if re.search("[./]", name) else "^(encoder )?"
        if re.search(rf"{start}{re.escape(name)}([\s:;,'\"]|$)", text) and (said := nearest(Path(name))):
            return said
    return ""


def nearest(missing: Path) -> str:
    """The end of a message: the path with the most similar name beside one that does not exist, or ""."""
    with suppress(OSError):  # a name that is too long, or a directory that may not be read
        if not missing.exists():
            beside = [path.name for path in missing.parent.iterdir() if path.name[0] != "."]
            near = get_close_matches(missing.name, beside, n=1, cutoff=0.75)
            return f"; did you mean {missing.parent / near[0]}?" if near else ""
    return ""


def stamp() -> str:
    """The end of a run's name: the time, or under srun the job and its step, which stay after requeueing."""
    if "SLURM_STEP_ID" in os.environ:
        return f"slurm-{os.environ['SLURM_JOB_ID']}.{os.environ['SLURM_STEP_ID']}"
    now = time.strftime("%Y-%m-%d_%H-%M-%S")
    same = len(list(Path("outputs").glob(f"*-{now}*")))  # runs that were begun within this second
    return shared("stamp", f"{now}-{same + 1}" if same else now)


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

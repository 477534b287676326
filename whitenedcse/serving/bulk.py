"""Encoding a corpus of any size to a directory of vectors, in one process or several; a killed run resumes.

n: rows of a file    k: width

Files hold a fixed number of rows each, in the order of the input, and a manifest lists them. A file is a
block of the corpus that is encoded by itself: it does not depend on which process encodes it, or when.
digests.json beside them has the digest of each.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.multiprocessing.spawn import ProcessException, spawn

from whitenedcse.app import reading
from whitenedcse.app.compute import threads
from whitenedcse.app.durable import (
    DIGESTS,
    LOCK,
    claimed,
    intact,
    parsing,
    read_json,
    seal,
    seal_too,
    write_json,
    writing,
)
from whitenedcse.app.ranks import end_with_parent
from whitenedcse.app.terminal import pace, say
from whitenedcse.data.corpus import Corpus, Reading, fingerprint
from whitenedcse.data.tokens import CHARACTERS_A_TOKEN
from whitenedcse.linalg import refuse_infinite
from whitenedcse.model.checkpoint import settings
from whitenedcse.model.embedder import Embedder
from whitenedcse.model.planes import digest_of
from whitenedcse.serving.layouts import Form, Manifest, refuse_other

MANIFEST = "manifest.json"
OURS = {MANIFEST, f"{MANIFEST}.new", DIGESTS, f"{DIGESTS}.new", LOCK}  # may be here before a job has begun
AGAIN = "the same command encodes it again"


def begun(out: Path) -> Manifest | None:
    """The manifest of a directory; None if the directory is empty or missing. Raises ValueError otherwise."""
    if not (out / MANIFEST).exists():
        if out.exists() and (other := sorted({path.name for path in out.iterdir()} - OURS)):
            raise ValueError(f"{out} holds something other than vectors, {other[0]!r}; name a new directory")
        return None
    intact(out, "copy it again, or name a new directory", [MANIFEST])
    content = read_json(out / MANIFEST)
    with parsing(out / MANIFEST, "whitenedcse encode writes it; name a new directory"):
        return Manifest(**content)


def unwritten(out: Path, manifest: Manifest) -> list[int]:
    """The numbers of the files that are missing."""
    here = {path.name for path in out.iterdir()}
    return [number for number in range(manifest.shards) if manifest.name(number) not in here]


def remove_damaged(out: Path, manifest: Manifest) -> None:
    """Remove each file that is not as it was written, and say so."""
    for number in range(manifest.shards):
        if (file := out / manifest.name(number)).exists():
            try:
                intact(out, "it is encoded again", [file.name])
            except ValueError as error:
                say(str(error))
                file.unlink()


def write(out: Path, manifest: Manifest, number: int, x: NDArray[Any]) -> None:
    """Write one file of (n, k): an array, or a table of `row` (its number in the corpus) and `vector`.

    Raises ValueError for NaN or infinity, which a number above 65,504 is in float16.
    """
    with np.errstate(over="ignore"):
        x = np.ascontiguousarray(x, dtype=manifest.dtype)
    first = number * manifest.shard
    refuse_infinite(x, lambda row: f"the vector of row {first + row} of {manifest.input} in {manifest.dtype}")
    with writing(file := out / manifest.name(number), nbytes=x.nbytes) as stream:
        if manifest.to == "npy":
            np.save(stream, x, allow_pickle=False)
        else:
            import pyarrow as pa  # type: ignore[import-untyped]
            import pyarrow.parquet as pq  # type: ignore[import-untyped]

            rows = pa.array(np.arange(len(x)) + first)
            vectors = pa.FixedSizeListArray.from_arrays(pa.array(x.ravel()), manifest.width)
            pq.write_table(pa.table({"row": rows, "vector": vectors}), stream, use_dictionary=False)
    seal_too(file)


def arrays(out: Path) -> Iterator[NDArray[Any]]:
    """The vectors (n, k) of each file in order; .npy files are memory-mapped. Runs no code in a file.

    Raises ValueError for a directory that is unfinished or damaged.
    """
    if (manifest := begun(out)) is None:
        raise ValueError(f"{out}: no {MANIFEST}; whitenedcse encode writes such a directory")
    if left := unwritten(out, manifest):
        raise ValueError(f"{out} lacks {len(left)} of {manifest.shards} files; the same command resumes")
    for number in range(manifest.shards):
        intact(out, AGAIN, [manifest.name(number)])
        x = reading.vectors(out / manifest.name(number))
        if x.shape != (shape := (manifest.count(number), manifest.width)) or x.dtype != manifest.dtype:
            raise ValueError(f"{out / manifest.name(number)} is damaged: {x.dtype} {x.shape}, not {shape}")
        yield x


More = Callable[[int], None]


@dataclass(frozen=True)
class Job:
    """What to encode, by which embedder, and where to.

    opened: a function that returns the embedder; each process calls it, so for several it must be one of a
        module, or a `functools.partial` of one.    source: its name.    corpus: of one column, or plain text.
    """

    opened: Callable[[], Embedder]
    source: str
    corpus: Corpus
    out: Path
    form: Form = Form()
    bf16: bool = False


def encoded(job: Job, processes: int | None = None) -> int:
    """Write a vector for every row of the corpus, in order, blank rows too; resume where a kill left it.

    processes: None is one per GPU, or one where there is none. Returns the number of rows encoded by this
    call. On one machine the bytes are the same for any number of processes of equally many threads, and of
    kills. Raises ValueError for a directory of something else or of another job, or that another process is
    writing, and OSError if a process dies.
    """
    if len(job.corpus.columns) > 1:
        raise ValueError(f"{job.corpus.path}: name one column to encode, of {list(job.corpus.columns)}")
    count = processes if processes is not None else torch.cuda.device_count() or 1
    if count < 1:
        raise ValueError(f"processes={processes}: use 1 or more")
    with locked(job.out):
        embedder = job.opened()
        manifest = agreed(job, embedder, max(1, torch.get_num_threads() // count))
        remove_damaged(job.out, manifest)
        missing = unwritten(job.out, manifest)
        left = sum(map(manifest.count, missing))
        with pace("encoded", manifest.rows, manifest.rows - left) as more:
            if min(count, len(missing)) > 1:
                del embedder
                together(job, manifest, missing, min(count, len(missing)), more)
            else:
                with threads(manifest.threads):
                    fill(job, manifest, missing, embedder, more)
    return left


def locked(out: Path) -> AbstractContextManager[Any]:
    """A context in which this process alone writes to the directory, which is created if it is missing."""
    begun(out)  # refuses before it touches
    if not out.parent.is_dir():
        raise FileNotFoundError(f"{out.parent}: no such directory; make it first")
    out.mkdir(exist_ok=True)
    return claimed(out)


def agreed(job: Job, embedder: Embedder, threads: int) -> Manifest:
    """The manifest of the job, from an earlier start or new."""
    now: dict[str, Any] = {"source": job.source, "embedding": settings(embedder), "bf16": job.bf16}
    now |= {"embedder": digest_of(embedder), "input": job.corpus.path, "columns": list(job.corpus.columns)}
    now |= {"fingerprint": fingerprint(job.corpus), "width": embedder.width, **job.form._asdict()}
    now = json.loads(json.dumps(now))
    if (then := begun(job.out)) is not None:
        refuse_other(job.out, then, now)
        if not (job.out / DIGESTS).exists():  # of an older version, or of a kill just before it
            seal(job.out)
        return then
    Manifest(**now, rows=1, threads=threads)  # refuses before it counts
    manifest = Manifest(**now, rows=counted(job.corpus), threads=threads)
    write_json(job.out / MANIFEST, asdict(manifest))
    seal(job.out)
    return manifest


def counted(corpus: Corpus) -> int:
    """The number of rows of a corpus, all of which are read once to find a bad one before the encoding."""
    rows, total = iter(Reading(corpus)), 0
    with pace("counted") as more:
        while count := sum(1 for _ in islice(rows, 100_000)):
            total += count
            more(count)
    if not total:
        raise ValueError(f"{corpus.path}: no rows to encode")
    return total


def fill(job: Job, manifest: Manifest, numbers: Collection[int], embedder: Embedder, more: More) -> None:
    """Encode and write the blocks with these numbers."""
    for number, texts in blocks(job.corpus, manifest, numbers, CHARACTERS_A_TOKEN * embedder.max_length):
        told = 0

        def tell(count: int) -> None:
            nonlocal told
            told += count
            more(count)

        write(job.out, manifest, number, embedder.encode(texts, progress=tell, bf16=job.bf16))
        more(len(texts) - told)  # those that equal another one


def blocks(
    corpus: Corpus, manifest: Manifest, numbers: Collection[int], longest: int
) -> Iterator[tuple[int, list[str]]]:
    """The blocks of the corpus with these numbers, each text cut to `longest` characters."""
    rows = Reading(corpus)
    for number in range(max(numbers, default=-1) + 1):
        block = [text[:longest] for (text,) in islice(rows, manifest.shard)]
        if len(block) != manifest.count(number):
            raise ValueError(f"{corpus.path} changed while it was read; start again in a new directory")
        if number in numbers:
            yield number, block


def together(job: Job, manifest: Manifest, missing: list[int], count: int, more: More) -> None:
    """Encode these blocks in `count` processes, each its share. Raises OSError if one of them dies."""
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)  # of each process that it ends
    workers = spawn(worker, (job, manifest, missing, count), nprocs=count, join=False, daemon=True)
    left, ended = sum(map(manifest.count, missing)), False
    try:
        while not ended:
            ended = workers.join(timeout=0.5)
            before, left = left, sum(map(manifest.count, unwritten(job.out, manifest)))
            more(before - left)
    except ProcessException as error:
        what = str(error).strip().splitlines()[-1]
        raise OSError(f"a process failed: {what}; files are kept, and the same command resumes") from error


def worker(rank: int, job: Job, manifest: Manifest, missing: list[int], count: int) -> None:
    """One of `count` processes, which encodes every `count`-th block, on the GPU of its rank if any."""
    if (parent := multiprocessing.parent_process()) is not None:
        end_with_parent(parent.pid)  # a resumed job is then alone
    torch.set_num_threads(manifest.threads)
    if torch.cuda.is_available():
        torch.cuda.set_device(rank % torch.cuda.device_count())
    fill(job, manifest, missing[rank::count], job.opened(), lambda _: None)

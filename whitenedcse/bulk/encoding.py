"""A corpus of any size through an embedder, in one process or several; what a kill leaves is gone on with.

A file of vectors is a block of the corpus encoded by itself: it does not depend on who encodes it, and when.
"""

from __future__ import annotations

import hashlib
import json
import logging
import multiprocessing
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from torch.multiprocessing.spawn import ProcessException, spawn

from whitenedcse.bulk import shards
from whitenedcse.bulk.shards import Form, Manifest
from whitenedcse.data.corpus import Corpus, fingerprint, stream
from whitenedcse.data.tokens import CHARACTERS_A_TOKEN, identity
from whitenedcse.model import planes
from whitenedcse.model.checkpoint import settings
from whitenedcse.model.embedder import Embedder
from whitenedcse.pace import pace
from whitenedcse.ranks import end_with_parent

SECONDS = 5.0  # for a process that was just killed to let go of its directory
More = Callable[[int], None]


@dataclass(frozen=True)
class Job:
    """What to encode, by whom, and where to.

    opened: gives the embedder; called in each process, so of several it must be a function of a module, or a
        `functools.partial` of one.    source: what it is called.    corpus: of one column, or plain text.
    """

    opened: Callable[[], Embedder]
    source: str
    corpus: Corpus
    out: Path
    form: Form = Form()
    bf16: bool = False


def encoded(job: Job, processes: int | None = None) -> int:
    """Write a vector for every row of the corpus, in order, blank rows too; go on where a kill left it.

    processes: None is one a GPU, or one where there is none. Returns the rows that were encoded now.
    On one machine the bytes are the same for any number of processes, of as many threads, and of kills.
    Raises ValueError for a directory of something else or of another job, or that another process is writing,
    and OSError if a process dies.
    """
    if len(job.corpus.columns) > 1:
        raise ValueError(f"{job.corpus.path}: name one column to encode, of {list(job.corpus.columns)}")
    count = processes if processes is not None else torch.cuda.device_count() or 1
    if count < 1:
        raise ValueError(f"processes={processes}: use 1 or more")
    with locked(job.out):
        embedder = job.opened()
        manifest = agreed(job, embedder, max(1, torch.get_num_threads() // count))
        missing = shards.missing(job.out, manifest)
        left = sum(map(manifest.count, missing))
        with pace("encoded", manifest.rows, manifest.rows - left) as more:
            if min(count, len(missing)) > 1:
                del embedder
                together(job, manifest, missing, min(count, len(missing)), more)
            else:
                with threads(manifest.threads):
                    fill(job, manifest, missing, embedder, more)
    return left


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """The directory, made if it is not there, for one writer."""
    shards.begun(out)  # refuses before it touches
    if not out.parent.is_dir():
        raise FileNotFoundError(f"{out.parent}: no such directory; make it first")
    out.mkdir(exist_ok=True)
    try:
        with FileLock(out / shards.LOCK, timeout=SECONDS):
            yield
    except Timeout:
        raise ValueError(f"{out} is being written by another process; wait for it") from None


def agreed(job: Job, embedder: Embedder, threads: int) -> Manifest:
    """The manifest of the job: that which was begun, or a new one."""
    now: dict[str, Any] = {"source": job.source, "embedding": settings(embedder), "bf16": job.bf16}
    now |= {"embedder": known_by(embedder), "input": job.corpus.path, "columns": list(job.corpus.columns)}
    now |= {"fingerprint": fingerprint(job.corpus), "width": embedder.width, **job.form._asdict()}
    now = json.loads(json.dumps(now))
    if (then := shards.begun(job.out)) is not None:
        shards.refuse_other(job.out, then, now)
        return then
    Manifest(**now, rows=1, threads=threads)  # refuses before it counts
    return shards.start(job.out, Manifest(**now, rows=counted(job.corpus), threads=threads))


def counted(corpus: Corpus) -> int:
    """The rows of a corpus: all are read once, so that a bad one is found before hours of encoding."""
    rows, total = stream(corpus), 0
    with pace("counted") as more:
        while count := sum(1 for _ in islice(rows, 100_000)):
            total += count
            more(count)
    if not total:
        raise ValueError(f"{corpus.path}: no rows to encode")
    return total


def known_by(embedder: Embedder) -> str:
    """A digest of all that decides a vector: architecture, weights, kind of device, tokenizer, settings."""
    parts = [planes.fingerprint(embedder.encoder), identity(embedder.encoder.tokenizer), settings(embedder)]
    content = hashlib.blake2b(json.dumps(parts).encode(), digest_size=16)
    final = embedder.final.state_dict().values() if embedder.final else ()
    for tensor in chain(embedder.head.state_dict().values(), final):
        content.update(tensor.cpu().numpy().tobytes())
    return content.hexdigest()


def fill(job: Job, manifest: Manifest, numbers: Collection[int], embedder: Embedder, more: More) -> None:
    """Encode and write these blocks."""
    longest = CHARACTERS_A_TOKEN * embedder.max_length  # what the embedder would cut it to anyway
    for number, texts in blocks(job.corpus, manifest, numbers, longest):
        told = 0

        def tell(count: int) -> None:
            nonlocal told
            told += count
            more(count)

        shards.write(job.out, manifest, number, embedder.encode(texts, progress=tell, bf16=job.bf16))
        more(len(texts) - told)  # those that equal another one


def blocks(
    corpus: Corpus, manifest: Manifest, numbers: Collection[int], longest: int
) -> Iterator[tuple[int, list[str]]]:
    """These blocks of the corpus, the rest read over; each text cut to `longest` characters."""
    rows = stream(corpus)
    for number in range(max(numbers, default=-1) + 1):
        block = [text[:longest] for (text,) in islice(rows, manifest.shard)]
        if len(block) != manifest.count(number):
            raise ValueError(
                f"{corpus.path} was changed while it was read; name a new directory and start again"
            )
        if number in numbers:
            yield number, block


@contextmanager
def threads(count: int) -> Iterator[None]:
    """So many threads of this process compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def together(job: Job, manifest: Manifest, missing: list[int], count: int, more: More) -> None:
    """Encode these blocks in so many processes, each its share. Raises OSError if one of them dies."""
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)  # of each process that it ends
    workers = spawn(worker, (job, manifest, missing, count), nprocs=count, join=False, daemon=True)
    left, ended = sum(map(manifest.count, missing)), False
    try:
        while not ended:
            ended = workers.join(timeout=0.5)
            before, left = left, sum(map(manifest.count, shards.missing(job.out, manifest)))
            more(before - left)
    except ProcessException as error:
        what = str(error).strip().splitlines()[-1]
        raise OSError(
            f"a process failed: {what}; finished files are kept, and the same command goes on"
        ) from error


def worker(rank: int, job: Job, manifest: Manifest, missing: list[int], count: int) -> None:
    """One of `count` processes: every `count`-th block; of GPUs, the one of its rank."""
    if (parent := multiprocessing.parent_process()) is not None:
        end_with_parent(parent.pid)  # a resumed job is then alone
    torch.set_num_threads(manifest.threads)
    if torch.cuda.is_available():
        torch.cuda.set_device(rank % torch.cuda.device_count())
    fill(job, manifest, missing[rank::count], job.opened(), lambda _: None)

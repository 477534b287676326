"""Encoding a corpus of any size to a directory of vectors, in one process or several; a killed run resumes.

n: rows of a file    k: width

Files hold a fixed number of rows each, in the order of the input, and a manifest lists them. A file is a
block of the corpus that is encoded by itself: it does not depend on which process encodes it, or when.
starts.json says where the blocks begin, and digests.json has the digest of each file.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch.multiprocessing.spawn import ProcessException, spawn

from whitenedcse import files
from whitenedcse.compute import threads
from whitenedcse.console import pace, unheard
from whitenedcse.data.corpus import Corpus, fingerprint
from whitenedcse.data.remote import Store, fetched
from whitenedcse.data.sources import refuse_columns
from whitenedcse.data.tokens import CHARACTERS_A_TOKEN
from whitenedcse.distributed import Place, end_with_parent, placed
from whitenedcse.files import DIGESTS, checksum, intact, seal, seal_too, write_json
from whitenedcse.model.checkpoint import settings
from whitenedcse.model.embedder import Embedder
from whitenedcse.model.planes import digest_of
from whitenedcse.serving.blocks import Blocks, Starts, counted, say_packed
from whitenedcse.serving.layouts import Form, Manifest, refuse_other
from whitenedcse.serving.shards import (
    AGAIN,
    MANIFEST,
    SHARED,
    STARTS,
    Sealed,
    begun,
    finished,
    has_starts,
    locked,
    moved,
    recover,
    remove_damaged,
    resume,
    unwritten,
    write,
)
from whitenedcse.serving.shares import Fold, Lead, Member, Work


def arrays(directory: str | Path) -> Iterator[NDArray[Any]]:
    """The vectors (n, k) of each file in order; .npy files are memory-mapped. Runs no code in a file.

    directory: or its URL. Raises ValueError for one that is unfinished or damaged.
    """
    out = fetched(directory)
    if (manifest := begun(out)) is None:
        raise ValueError(f"{out}: no {MANIFEST}; whitenedcse encode writes such a directory")
    if left := unwritten(out, manifest):
        lacking = f"{out} lacks {len(left)} of {manifest.shards} files"
        raise ValueError(f"{lacking}; repeat its whitenedcse encode, which resumes")
    for number in range(manifest.shards):
        intact(out, AGAIN, [manifest.name(number)])
        x = files.vectors(out / manifest.name(number))
        if x.shape != (shape := (manifest.count(number), manifest.width)) or x.dtype != manifest.dtype:
            raise ValueError(f"{out / manifest.name(number)} is damaged: {x.dtype} {x.shape}, not {shape}")
        yield x


Tell = Callable[[int], None]


@dataclass(frozen=True)
class Job:
    """What to encode, by which embedder, and where to.

    opened: a function that returns the embedder; each process calls it, so for several it must be one of a
        module, or a `functools.partial` of one.    source: its name.    corpus: of one column, or plain text.
    out: the directory to write.    store: what its files are moved to as they are finished, if anything.
    """

    opened: Callable[[], Embedder]
    source: str
    corpus: Corpus
    out: Path
    form: Form = Form()
    bf16: bool = False
    store: Store | None = None


class Filling:
    """Encodes and writes any block of a job that was begun; `tell` is told of so many more rows.

    Raises ValueError for another embedder than the one that the job was begun with.
    """

    def __init__(self, job: Job, embedder: Embedder, tell: Tell = lambda _: None) -> None:
        if (manifest := begun(job.out)) is None:
            raise ValueError(f"{job.out}: no {MANIFEST}; do all processes see one disk?")
        refuse_other(job.out, manifest, {"embedder": digest_of(embedder)})
        self.job, self.embedder, self.tell, self.manifest = job, embedder, tell, manifest
        self.blocks = Blocks(job.corpus, Starts.load(job.out / STARTS))
        self.mine: set[int] = set()  # the blocks that this process has encoded

    def __call__(self, number: int) -> bytes:
        """Encode and write a block; returns the digest of its file."""
        longest, told = CHARACTERS_A_TOKEN * self.embedder.max_length, 0

        def tell(count: int) -> None:
            nonlocal told
            told += count
            self.tell(count)

        texts = [text[:longest] for (text,) in self.blocks[number]]
        x = self.embedder.encode(texts, progress=tell, bf16=self.job.bf16)
        digest = write(self.job.out, self.manifest, number, x)
        self.tell(len(texts) - told)  # those that equal another one
        self.mine.add(number)
        return digest.encode()


def encoded(job: Job, processes: int | None = None, engine: str | None = None) -> int:
    """Write a vector for every row of the corpus, in order, blank rows too; resume where a kill left it.

    processes: None is one per GPU, or one where there is none; under torchrun or srun each rank is one.
    engine: "ray" for the processes of a Ray cluster. Returns the number of rows encoded by this call, in a
    rank other than the first of its share. The bytes are the same for any number of processes of equally many
    threads on machines of one kind, and of kills. Raises ValueError for a directory of something else or of
    another job, or that another process is writing, and OSError if a process dies.
    """
    here = placed() or Place(0, 1, 1)
    refuse(job, processes, engine, here.world)
    if here.rank:
        return joined(job, here.rank, here.world)
    if here.world > 1 or engine or processes not in (None, 1):
        say_packed(job.corpus)
    with locked(job.out, alone=here.world == 1):
        if job.store:
            resume(job.out, job.store)
        recover(job.out)
        if engine:
            from whitenedcse.serving.blocks import Actors

            with Actors(partial(Remote, job), processes) as actors:
                return directed(job, actors.do, actors.threads)
        count = processes or (torch.cuda.device_count() if here.world == 1 else 1) or 1
        count = 1 if finished(job.out) else count
        with Lead(job.out / SHARED, max(count, here.world)) as lead, started(job, count) as lead.watch:
            return directed(job, lead.do, max(1, torch.get_num_threads() // count))


def refuse(job: Job, processes: int | None, engine: str | None, world: int) -> None:
    """Raise ValueError for a corpus of several columns, and for processes that cannot be."""
    refuse_columns(job.corpus.path, job.corpus.columns)
    here = Path(job.corpus.path)
    if job.form.to == "parquet" and here.is_dir() and job.out.resolve().is_relative_to(here.resolve()):
        raise ValueError(f"{job.out} is inside {here}, whose files are all read; name a directory elsewhere")
    if processes is not None and processes < 1:
        raise ValueError(f"processes={processes}: use 1 or more")
    if engine not in (None, "ray"):
        raise ValueError(f"engine={engine!r}: use 'ray', or None for the processes of this machine")
    if world > 1 and (processes or engine):
        raise ValueError(f"torchrun or srun started {world} ranks; leave out --processes and --engine")


Do = Callable[[Sequence[int], Work, Fold], None]


def directed(job: Job, do: Do, threads_each: int) -> int:
    """Begin or resume the job in the first process, and have its blocks encoded; returns the number of rows.

    do: encodes blocks, in this process with the function that it is given or elsewhere.
    """
    embedder = job.opened()
    manifest = agreed(job, embedder, threads_each)
    remove_damaged(job.out, manifest)
    missing = unwritten(job.out, manifest)
    if job.store:
        missing = sorted(set(missing) - moved(job.out, manifest, job.store))
    left = sum(map(manifest.count, missing))
    with pace("encoded", manifest.rows, manifest.rows - left) as more, threads(manifest.threads):
        fill, sealed = Filling(job, embedder, more), Sealed(job.out, manifest, job.store)

        def fold(digests: Mapping[int, bytes]) -> None:
            sealed.add(digests)
            more(sum(manifest.count(number) for number in digests.keys() - fill.mine))

        try:
            do(missing, fill, fold)
        finally:
            sealed.write()
    fill.blocks.refuse_changed()
    return left


class Remote:
    """`Filling` in a process of another engine: the embedder is opened while the first process counts."""

    def __init__(self, job: Job) -> None:
        self.job, self.embedder = job, job.opened()
        self.fill: Filling | None = None

    def __call__(self, number: int) -> bytes:
        """Encode and write a block; returns the digest of its file."""
        if self.fill is None:
            self.fill = Filling(self.job, self.embedder)
            torch.set_num_threads(self.fill.manifest.threads)
        return self.fill(number)


def joined(job: Job, rank: int, world: int) -> int:
    """Do the share of another rank than the first; returns the number of its rows."""
    if torch.cuda.is_available():
        torch.cuda.set_device(rank % torch.cuda.device_count())
    with Member(job.out / SHARED, rank) as member:
        embedder = job.opened()  # while the first counts
        blocks = member.blocks(world)
        fill = Filling(job, embedder)
        with threads(fill.manifest.threads):
            done = member.do(blocks, fill)
    return sum(map(fill.manifest.count, done))


@contextmanager
def started(job: Job, count: int) -> Iterator[Callable[[], None]]:
    """A context with `count` - 1 processes as further ranks; yields what raises OSError if one has died."""
    if count == 1:
        yield lambda: None
        return
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)  # of each process that it ends
    with unheard():
        workers = spawn(worker, (job, count), nprocs=count - 1, join=False, daemon=True)

    def watch() -> None:
        try:
            workers.join(timeout=0)
        except ProcessException as error:
            what = re.sub(r"^process \d+ ", "", str(error).strip().splitlines()[-1])
            said = (
                f"rank {error.error_index + 1} failed: {what}; files are kept, and the same command resumes"
            )
            raise OSError(said) from error

    try:
        yield watch
    finally:
        for process in workers.processes:
            process.kill()
            process.join()


def worker(index: int, job: Job, count: int) -> None:
    """One of the further ranks, which ends with the process that started it: a resumed job is then alone."""
    if (parent := multiprocessing.parent_process()) is not None:
        end_with_parent(parent.pid)
    torch.set_num_threads(max(1, torch.get_num_threads() // count))
    joined(job, index + 1, count)


def agreed(job: Job, embedder: Embedder, threads_each: int) -> Manifest:
    """The manifest of the job, from an earlier start or new; the places of its blocks are written, too."""
    now: dict[str, Any] = {"source": job.source, "embedding": settings(embedder), "bf16": job.bf16}
    now |= {"embedder": digest_of(embedder), "input": job.corpus.path, "columns": list(job.corpus.columns)}
    now |= {"fingerprint": fingerprint(job.corpus), "width": embedder.width, **job.form._asdict()}
    now = json.loads(json.dumps(now))
    if (then := begun(job.out)) is not None:
        refuse_other(job.out, then, now)
        if not (job.out / DIGESTS).exists():  # of an older version, or of a kill just before it
            seal(job.out, [MANIFEST, STARTS, *map(then.name, range(then.shards))])
        if not has_starts(job.out):
            counted(job.corpus, then.shard).save(job.out / STARTS)
            seal_too(job.out, {STARTS: checksum(job.out / STARTS)})
        return then
    Manifest(**now, rows=1, threads=threads_each)  # refuses before it counts
    starts = counted(job.corpus, job.form.shard)
    starts.save(job.out / STARTS)
    manifest = Manifest(**now, rows=starts.rows, threads=threads_each)
    write_json(job.out / MANIFEST, asdict(manifest))
    seal(job.out, [MANIFEST, STARTS])
    return manifest

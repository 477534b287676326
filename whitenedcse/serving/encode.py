"""Encoding a corpus of any size to files of vectors, by any number of processes; a killed job resumes.

n: rows of a file    k: width

Row i of the corpus, blank or not, is row i of the vectors, and a file holds as many rows as `Job.shard`. Of
W processes the r-th reads the whole corpus and writes every W-th file from the r-th on. They exchange nothing
and agree through what is in the directory, on a disk or in an object store:

    manifest.json      what is encoded, by which embedder; all of them write the same
    shard-00000.npy    vectors (n, k), or a Parquet table of `row` and `vector`
    digests-*.json     the digests of the files that a process wrote; a file without one is encoded again
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import torch
from numpy.typing import NDArray

from whitenedcse.console import lacking, pace
from whitenedcse.data.corpus import Corpus, blocks, fingerprint, rows
from whitenedcse.data.files import filesystem, hidden
from whitenedcse.data.remote import fetched, held, is_url
from whitenedcse.distributed import placed
from whitenedcse.files import as_json, checksum, parsing, vectors, writing
from whitenedcse.model.checkpoint import digest_of, settings
from whitenedcse.model.embedder import Embedder
from whitenedcse.whitening import check_finite

MANIFEST = "manifest.json"
SAME = ("fingerprint", "embedder", "device", "bf16", "columns", "to", "dtype", "shard")  # make a job


@dataclass(frozen=True)
class Job:
    """What to encode, by which embedder, where to, and how.

    opened: a function that returns the embedder, which each process calls. source: its name. to: the kind of
    file. dtype: of a number. shard: the rows of a file. bf16: the backbone computes in bfloat16.
    """

    opened: Callable[[], Embedder]
    source: str
    corpus: Corpus
    out: str
    to: str = "npy"
    dtype: str = "float32"
    shard: int = 20_000
    bf16: bool = False


@dataclass(frozen=True)
class Manifest:
    """What is in a directory of vectors: that of the `Job`, and the digests of embedder and input."""

    source: str
    embedding: dict[str, Any]
    embedder: str
    device: str
    bf16: bool
    input: str
    columns: list[str]
    fingerprint: str
    rows: int
    width: int
    to: str
    dtype: str
    shard: int

    @property
    def files(self) -> list[str]:
        """The names of all files of vectors, in order."""
        return [f"shard-{number:05}.{self.to}" for number in range(-(-self.rows // self.shard))]

    def count(self, number: int) -> int:
        """The rows of a file: `shard`, or fewer for the last."""
        return min(self.shard, self.rows - number * self.shard)


def encoded(job: Job, processes: int | None = None, engine: str | None = None) -> None:
    """Write a vector for every row of the corpus, in order, but for those that are there.

    processes: None is one per GPU, or one; under torchrun or srun each rank is one, whatever is asked for. A
    file's bytes are the same whichever process writes it, with equally many threads on machines of one kind.
    """
    here = placed()
    if here is not None and here.world > 1:
        return share(job, here.rank, here.world, here.local)
    if engine:
        return by_ray(job, processes)
    count = processes or torch.cuda.device_count() or 1
    return share(job, 0, 1) if count == 1 else by_processes(job, count)


def by_processes(job: Job, count: int) -> None:
    """Do the job in `count` processes of this machine, which end with this one."""
    from torch.multiprocessing.spawn import ProcessException, spawn

    threads = max(1, torch.get_num_threads() // count)
    try:
        spawn(one_of, (job, count, threads), nprocs=count, daemon=True)
    except ProcessException as error:
        why = str(error).strip().splitlines()[-1]
        raise OSError(f"process {error.error_index} failed: {why}; the same command resumes") from error


def one_of(index: int, job: Job, count: int, threads: int) -> None:
    """Do the share of one of the processes of `by_processes`."""
    torch.set_num_threads(threads)
    share(job, index, count, index)


def by_ray(job: Job, count: int | None) -> None:
    """Do the job in tasks of RAY_ADDRESS's cluster or a new one: `count`, or one per GPU or machine."""
    try:
        import ray
    except ImportError as error:
        raise lacking("--engine ray", "ray", "ray", error) from error
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is reported to anyone
    ray.init(ignore_reinit_error=True, include_dashboard=False, log_to_driver=False, configure_logging=False)
    has = ray.cluster_resources()
    gpus, cores = has.get("GPU", 0), has.get("CPU", 1)
    count = count or int(gpus) or len(ray.nodes())
    each = {"num_cpus": min(1, cores / count), "num_gpus": min(1, gpus / count)}  # so that all start
    task = ray.remote(max_retries=-1, scheduling_strategy="SPREAD", **each)(share)
    ray.get([task.remote(job, rank, count) for rank in range(count)])


def share(job: Job, rank: int, world: int, local: int = 0) -> None:
    """Write those files of one of `world` processes that are not there. local: its number on its machine."""
    if torch.cuda.is_available():
        torch.cuda.set_device(local % torch.cuda.device_count())
    embedder = job.opened()
    manifest = agreed(job, embedder)
    done, mine = whole(job.out, manifest), range(rank, len(manifest.files), world)
    left = [number for number in mine if manifest.files[number] not in done]
    if not left:
        return
    notes = f"digests-{uuid4().hex[:8]}.json"
    noted = {MANIFEST: checksum(as_json(asdict(manifest)))}
    with pace("encoded", sum(map(manifest.count, left))) as more:
        for number, block in enumerate(blocks(rows(job.corpus), manifest.shard)):
            if number in left:
                x = embedder.encode([text for (text,) in block], progress=more, bf16=job.bf16)
                name, content = manifest.files[number], packed(manifest, number, x)
                put(job.out, name, content)
                noted[name] = checksum(content)
                put(job.out, notes, as_json(noted))


def agreed(job: Job, embedder: Embedder) -> Manifest:
    """The manifest of the job, written unless it is there; ValueError for another job or something else."""
    if Path(job.out).resolve().is_relative_to(Path(job.corpus.path).resolve()):
        raise ValueError(f"{job.out} is in {job.corpus.path}, whose files are the texts: name one beside it")
    then = begun(job.out)
    now = Manifest(
        source=job.source,
        embedding=settings(embedder),
        embedder=digest_of(embedder),
        device=embedder.encoder.backbone.device.type,
        bf16=job.bf16,
        input=job.corpus.path,
        columns=list(job.corpus.columns),
        fingerprint=fingerprint(job.corpus),
        rows=then.rows if then else sum(1 for _ in rows(job.corpus)),
        width=embedder.width,
        to=job.to,
        dtype=job.dtype,
        shard=job.shard,
    )
    if not now.rows:
        raise ValueError(f"{job.corpus.path}: no rows to encode")
    if then is None:
        put(job.out, MANIFEST, as_json(asdict(now)))
        return now
    if other := [name for name in SAME if getattr(then, name) != getattr(now, name)]:
        why = f"{job.out} holds another job, of another {', '.join(other)}"
        raise ValueError(f"{why}; repeat its command, or name a new directory")
    return then


def begun(out: str) -> Manifest | None:
    """The manifest of a directory; None if the directory is empty or missing. Raises ValueError otherwise."""
    there = names(out)
    if not there:
        return None
    if MANIFEST not in there:
        raise ValueError(f"{out} holds something other than vectors, {min(there)!r}; name a new directory")
    with parsing(Path(out) / MANIFEST, "name a new directory"):
        content, known = got(out, MANIFEST), digests(out)
        if MANIFEST in known and checksum(content) not in known[MANIFEST]:
            raise ValueError("its digest differs")
        return Manifest(**json.loads(content))


def state(out: str) -> str:
    """How many rows of a directory's corpus are encoded, in words."""
    manifest = begun(out)
    if manifest is None:
        return "nothing is encoded yet"
    done = whole(out, manifest)
    rows = sum(manifest.count(number) for number, name in enumerate(manifest.files) if name in done)
    every = f"{manifest.rows:,} rows of width {manifest.width}"
    return every if rows == manifest.rows else f"{rows:,} of {every} so far"  # other ranks may go on


def whole(out: str, manifest: Manifest) -> dict[str, set[str]]:
    """The finished files of vectors with their digests, two where two processes wrote the same file."""
    known, there = digests(out), names(out)
    return {name: known[name] for name in manifest.files if name in known and name in there}


def digests(out: str) -> dict[str, set[str]]:
    """The digests that all processes noted, by the name of the file."""
    known: dict[str, set[str]] = {}
    for file in names(out):
        if file.startswith("digests-") and file.endswith(".json"):
            with parsing(Path(out) / file, "delete it, and the same command encodes its files again"):
                for name, digest in json.loads(got(out, file)).items():
                    known.setdefault(name, set()).add(digest)
    return known


def packed(manifest: Manifest, number: int, x: NDArray[Any]) -> bytes:
    """A file of vectors (n, k): an array, or a table of `row` and `vector`; ValueError if not finite."""
    with np.errstate(over="ignore"):
        x = np.ascontiguousarray(x, dtype=manifest.dtype)
    first, stream = number * manifest.shard, io.BytesIO()
    check_finite(x, lambda row: f"the vector of row {first + row} of {manifest.input} in {manifest.dtype}")
    if manifest.to == "npy":
        np.save(stream, x, allow_pickle=False)
    else:
        vectors = pa.FixedSizeListArray.from_arrays(pa.array(x.ravel()), manifest.width)
        table = pa.table({"row": pa.array(np.arange(first, first + len(x))), "vector": vectors})
        pq.write_table(table, stream, use_dictionary=False)
    return stream.getvalue()


def arrays(directory: str | Path) -> Iterator[NDArray[Any]]:
    """The vectors (n, k) of each file in order, memory-mapped if .npy; ValueError for damaged ones."""
    manifest, out = begun(str(directory)), str(directory)
    if manifest is None:
        raise ValueError(f"{out}: no {MANIFEST}; whitenedcse encode writes such a directory")
    known = whole(out, manifest)
    if len(known) < len(manifest.files):
        left = f"{len(manifest.files) - len(known)} of {len(manifest.files)} files"
        raise ValueError(f"{out} lacks {left}; repeat its whitenedcse encode, which resumes")
    for name in manifest.files:
        path = fetched(f"{out.rstrip('/')}/{name}")
        if checksum(path) not in known[name]:
            raise ValueError(f"{path} is damaged; delete it, and the same command encodes it again")
        yield vectors(path)


def names(out: str) -> set[str]:
    """The names of the files of a directory or a URL, but for drafts; none where there is no such place."""
    if is_url(out):
        return set(held(out))
    here = Path(out).iterdir() if Path(out).is_dir() else ()
    return {path.name for path in here if not hidden(path.name)}


def got(out: str, name: str) -> bytes:
    """The content of a file of a directory or a URL."""
    with filesystem(f"{out.rstrip('/')}/{name}") as (system, inside):
        return bytes(system.cat_file(inside))


def put(out: str, name: str, content: bytes) -> None:
    """Write a file of a directory, made if it is missing, or of a URL: all of it or none."""
    if is_url(out):
        with filesystem(out) as (system, inside):
            system.pipe_file(f"{inside.rstrip('/')}/{name}", content)
        return
    Path(out).mkdir(exist_ok=True)
    with writing(Path(out) / name) as stream:
        stream.write(content)

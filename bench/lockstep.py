"""Several processes use one cache, one run, one OUT at one moment: python -m bench.lockstep [--calls 500]

Each kind of work is called in lock step: all processes wait for each other, then all call. A call fails if it
raises anything but the refusal that is due where only one process may write, or gives other values than one
process alone. Exit status 1 if any call fails. Linux only (it forks).
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from os import environ
from pathlib import Path
from threading import BrokenBarrierError
from typing import Any

import numpy as np
import torch

from whitenedcse import files, run
from whitenedcse.console import Grid, say
from whitenedcse.data.corpus import Corpus
from whitenedcse.data.tokens import token_ids, tokenised
from whitenedcse.evaluation.postprocess import Postprocess
from whitenedcse.files import writing
from whitenedcse.model import plane_files
from whitenedcse.model.embedder import Embedder
from whitenedcse.model.head import Pooling, ProjectionHead
from whitenedcse.model.planes import planes
from whitenedcse.model.scratch import small_bert
from whitenedcse.serving.bulk import Job, arrays, encoded
from whitenedcse.serving.exports import Wanted, export
from whitenedcse.serving.index import Index, write
from whitenedcse.serving.layouts import Form

WORDS = "the a cat dog bird fish tree house river stone sees hears likes finds old new red blue small".split()
TEXTS = [" ".join(WORDS[i * j % len(WORDS)] for j in range(1, 3 + i % 7)) for i in range(1, 41)]
LIMIT = 60.0  # seconds for one call


def tiny(folder: Path) -> Embedder:
    """A tiny random embedder, with the tokenizer of `TEXTS`; corpus.txt in the folder holds them."""
    with writing(folder / "corpus.txt", "w") as stream:
        stream.write("\n".join(TEXTS))
    torch.manual_seed(0)
    shape = {"vocabulary": 60, "layers": 2, "width": 8, "heads": 2}
    encoder = small_bert(corpus=str(folder / "corpus.txt"), columns=(), **shape)
    head = ProjectionHead(width=8, whitening=None, dense=True, position="before")
    pooling = Pooling(kind="mean", layers=[-1])
    return Embedder(encoder=encoder, pooling=pooling, head=head, embedding="encoder").eval()


def vectors(folder: Path, embedder: Embedder, seed: float) -> Any:
    """The vectors of all layers by an encoder of which this is the number, from the cache of the folder."""
    environ["WHITENEDCSE_CACHE"] = str(folder / "cache")
    with torch.no_grad():
        next(embedder.encoder.parameters()).copy_(torch.sin(seed + torch.arange(8.0)))
    rows = token_ids(TEXTS, embedder.encoder.tokenizer, 16)
    got = planes(embedder.encoder, rows, ["mean", "cls"], [0, 1, 2])
    return [np.copy(x) for kind in sorted(got.kinds) for x in got.kinds[kind]]


def one_encoder(folder: Path, embedder: Embedder, rank: int, turn: int) -> Any:
    """Vectors of one encoder, a new one each time."""
    return vectors(folder, embedder, turn)


def other_encoders(folder: Path, embedder: Embedder, rank: int, turn: int) -> Any:
    """Vectors of an encoder of each process, in a cache that holds one of them."""
    plane_files.LIMIT = 20_000
    return vectors(folder, embedder, rank + turn % 2 / 2)


def tokens(folder: Path, embedder: Embedder, rank: int, turn: int) -> Any:
    """Token ids of one corpus, which is tokenised anew each time."""
    corpus, cache = Corpus(str(folder / "corpus.txt")), folder / f"tokens{turn}"
    got = tokenised(corpus, embedder.encoder.tokenizer, 16, cache_dir=cache)
    return [np.copy(got.ids), np.copy(got.offsets)]


def encode(folder: Path, embedder: Embedder, rank: int, turn: int) -> Any:
    """Files of `encode` in one directory; each call ends with all of them."""
    corpus, form = Corpus(str(folder / "corpus.txt")), Form(shard=9)
    job = Job(lambda: embedder, "tiny", corpus, folder / f"encode{turn}", form)
    encoded(job, 1)
    return [np.copy(x) for x in arrays(job.out)]


def transform(folder: Path, embedder: Embedder, rank: int, turn: int) -> Any:
    """One file of a fitted transform, which all write and read."""
    path = folder / "fit.safetensors"
    Postprocess("whitening").fit(np.random.default_rng(0).standard_normal((50, 8))).save(path, {})
    return list(Postprocess.load(path).fitted)


def exports(folder: Path, embedder: Embedder, rank: int, turn: int) -> Any:
    """One export, which all write."""
    export(embedder, folder / "export", Wanted("sentence-transformers", "tiny", verify=False))


def index(folder: Path, embedder: Embedder, rank: int, turn: int) -> Any:
    """A new index in one directory: one process writes it, and the others are refused."""
    out = folder / f"index{turn}"
    try:
        write(out, embedder, zip(map(str, range(40)), TEXTS, strict=True))
    except FileExistsError:
        pass
    return Index.load(out).vectors


def begin(folder: Path, embedder: Embedder, rank: int, turn: int) -> Any:
    """A new run in one directory: one process begins it, and the others are refused."""
    files.SECONDS = 0.2
    begun = run.Run(folder / f"run{turn}")
    try:
        begun.start("seed: 0\n", seed=0)
    except ValueError as error:
        if "another process" not in str(error) and "already holds a run" not in str(error):
            raise
        return {"seed": 0}  # the other process may not have written it yet
    return begun.settings


WORKS = (one_encoder, other_encoders, tokens, encode, transform, exports, index, begin)
Work = Callable[[Path, Embedder, int, int], Any]


def same(a: Any, b: Any) -> bool:
    """Whether two results are equal to the last bit."""
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(np.array_equal(a, b))


def worker(work: Work, folder: Path, rank: int, turns: int, barrier: Any, out: Any) -> None:
    """One of the processes: call in lock step, and send what failed, or "" where nothing did."""
    torch.set_num_threads(1)
    (folder / f"alone{rank}").mkdir()
    embedder, alone = tiny(folder), tiny(folder / f"alone{rank}")
    for turn in range(turns):
        with redirect_stdout(StringIO()):
            due = work(folder / f"alone{rank}", alone, rank, turn)
            try:
                barrier.wait(LIMIT)
                failed = "" if same(work(folder, embedder, rank, turn), due) else "other values"
            except BrokenBarrierError:
                failed = "a process hangs"
            except Exception as error:  # whatever it is, it is what is counted
                failed = f"{type(error).__name__}: {error}"
        out.put(failed)


def failures(work: Work, processes: int, turns: int) -> Counter[str]:
    """How often each failure occurred, in so many processes and turns."""
    context = multiprocessing.get_context("fork")
    barrier, out = context.Barrier(processes), context.Queue()
    with (
        tempfile.TemporaryDirectory() as folder,
        started(
            [
                context.Process(
                    target=worker, args=(work, Path(folder), rank, turns, barrier, out), daemon=True
                )
                for rank in range(processes)
            ]
        ),
    ):
        said = [out.get(timeout=LIMIT) for _ in range(processes * turns)]
    return Counter(line for line in said if line)


@contextmanager
def started(processes: list[Any]) -> Iterator[None]:
    """A context in which these processes run; they are ended with it."""
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.join(1)
            process.kill()


def main() -> None:
    """Call, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--calls", type=int, default=500, help="of each kind of work; default: 500")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--only", default="", help="names of kinds of work, separated by commas")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows, turns = [], -(-options.calls // options.processes)
    for work in WORKS:
        if not options.only or work.__name__ in options.only.split(","):
            found = failures(work, options.processes, turns)
            what = (work.__doc__ or "").partition(".")[0]
            rows.append([what, f"{options.processes * turns}", f"{found.total()}"])
            for line, count in found.most_common(3):
                say(f"{work.__name__}: {count} times: {line}")
    say(Grid("lock step", ["all at the same moment", "calls", "failed"], rows, right={1, 2}))
    sys.exit(any(row[2] != "0" for row in rows))


if __name__ == "__main__":
    main()

"""One core and two, alone and beside a busy process: python -m bench.cores [WORK,WORK] [--quick]

Every variant is a process of its own, to which OMP_NUM_THREADS gives 1 or 2 threads and which does a turn
when it is asked to, so that variants take turns and nothing but the one at work is awake. Wall clock: the
machine has to be quiet. Beside: a process that keeps one core busy meanwhile; not with --quick or --alone.

  step small fp32, bf16   a training step, BERT of 4 x 256, 64 Wikipedia sentences, two views, as bench.step
  step base bf16          the same, bert-base shape
  encode fp32, bf16       2,000 Wikipedia sentences, MiniLM, as bench.encode
  sts fp32, bf16          seven STS tasks, MiniLM, as bench.evaluate
  tokenise                token ids of Wikipedia sentences into the cache, 1M of them, or 100,000 if --quick
  start                   `python train.py` whole, as the README has it, its tests and end included

ours 1, ours 2: with so many threads. theirs 2: sentence-transformers with two. With --against TREE, in their
place: ours 2, and before 2, which is that checkout's code.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from bench import measure
from bench.measure import Variant

ROOT = Path(__file__).parents[1]
WORKS = {  # how many turns are counted, how many come before them, and who does it too
    "step-small-fp32": (15, 2, ["theirs 2"]),
    "step-small-bf16": (15, 2, ["theirs 2"]),
    "step-base-bf16": (7, 2, ["theirs 2"]),
    "encode-fp32": (5, 1, ["theirs 2"]),
    "encode-bf16": (5, 1, ["theirs 2"]),
    "sts-fp32": (3, 0, []),
    "sts-bf16": (3, 0, []),
    "tokenise": (3, 0, []),
    "start": (3, 0, []),
}
Turn = Callable[[], Any]


def main() -> None:
    """A table for each work, alone and beside."""
    parser = measure.parser(__doc__)
    parser.add_argument("works", nargs="?", help=f"some of {','.join(WORKS)} (default: all)")
    parser.add_argument("--alone", action="store_true", help="without the busy process")
    parser.add_argument("--against", metavar="TREE", help="another checkout")
    parser.add_argument("--serve", nargs=2, metavar=("WHO", "WORK"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        return serve(*options.serve, quick=options.quick)
    works = options.works.split(",") if options.works else list(WORKS)
    if unknown := set(works) - set(WORKS):
        parser.error(f"{','.join(sorted(unknown))}: there are {','.join(WORKS)}")
    options.threads = 2  # the wall clock
    here, tables = measure.begin(options), []
    for work in works:
        for beside in (False,) if options.quick or options.alone else (False, True):
            tables.append(compared(work, beside, options))
    return measure.end(options, here, tables)


def compared(work: str, beside: bool, options: argparse.Namespace) -> dict[str, Any]:
    """One work."""
    rounds, warm, peers = WORKS[work]
    rounds = options.rounds or (min(3, rounds) if options.quick else rounds)
    names = ["ours 2", "before 2"] if options.against else ["ours 1", "ours 2", *peers]
    peer = dict.fromkeys(names[1:], "ours 2") | ({} if options.against else {"ours 2": "ours 1"})
    with ExitStack() as stack:
        served = {name: stack.enter_context(server(name, work, options)) for name in names}
        if beside:
            stack.enter_context(busy())
        variants = {name: Variant(run, peer.get(name)) for name, run in served.items()}
        for _ in range(warm):
            for run in served.values():
                run()
        times = measure.interleaved(variants, rounds, options.threads, warm=False)
    return measure.table(f"{work}, {'beside a busy process' if beside else 'alone'}", variants, times)


@contextmanager
def server(name: str, work: str, options: argparse.Namespace) -> Iterator[Turn]:
    """A process that does a turn of the work for each line that it is sent."""
    who, threads = name.split()
    tree = str(Path(options.against).resolve() if who == "before" else ROOT)
    who = "ours" if who == "before" else who
    quick = ["--quick"] if options.quick else []
    command = [sys.executable, "-m", "bench.cores", "--serve", who, work, *quick]
    environment = os.environ | {"OMP_NUM_THREADS": threads, "RAYON_NUM_THREADS": threads, "PYTHONPATH": tree}
    if who == "ours":  # as in our scripts, which import whitenedcse before torch
        environment |= {"OMP_WAIT_POLICY": "PASSIVE"}
    with subprocess.Popen(
        command, env=environment, cwd=tree, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin and process.stdout
        source, sink = process.stdout, process.stdin

        def turn() -> None:
            sink.write("\n")
            sink.flush()
            if source.readline() != "done\n":
                raise SystemExit(f"{name} of {work} has ended; see above")

        if source.readline() != "ready\n":
            raise SystemExit(f"{name} of {work} does not begin; see above")
        try:
            yield turn
        finally:
            process.kill()


@contextmanager
def busy() -> Iterator[None]:
    """A process that keeps a core busy."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        time.sleep(0.5)
        try:
            yield
        finally:
            process.kill()


def serve(who: str, work: str, *, quick: bool) -> None:
    """What such a process does. The work's own output goes to the standard error."""
    line = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def wait(word: str) -> None:
        line.write(f"{word}\n")
        if not sys.stdin.readline():
            os._exit(0)

    with tempfile.TemporaryDirectory() as folder:
        kind, *rest = work.split("-")
        if kind == "step":
            return steps(who, *rest, folder=Path(folder), wait=wait)
        turn = TURNS[kind](who, *rest, folder=Path(folder), quick=quick)
        wait("ready")
        while True:
            turn()
            wait("done")


def steps(who: str, shape: str, precision: str, *, folder: Path, wait: Callable[[str], None]) -> None:
    """The loop of a trainer, which waits at the end of each step."""
    from bench.peers import Work, corpus, encoder, ours, sentence_transformers, silence

    silence()
    work = Work(encoder(shape, folder), corpus(folder), 64, 2, 2, 32, steps=200)
    if who == "ours":
        loop = ours(work, precision={"fp32": "32-true", "bf16": "bf16-mixed"}[precision])
    else:
        loop = sentence_transformers(work, bf16=precision == "bf16")
    words = iter(["ready"])
    loop(lambda loss: wait(next(words, "done")))


def encode(who: str, precision: str, *, folder: Path, quick: bool) -> Turn:
    """From texts to vectors."""
    from bench.encode import MODELS, opened, variants, wikipedia

    run = variants(*opened(str(MODELS / "minilm-mlm")))
    texts = wikipedia(500 if quick else 2_000)
    theirs = {"fp32": "theirs fp32", "bf16": "theirs bf16 autocast"}
    way = run[f"ours {precision}" if who == "ours" else theirs[precision]]
    return lambda: way(texts)


def sts(who: str, precision: str, *, folder: Path, quick: bool) -> Turn:
    """From texts to seven scores."""
    from bench.encode import MODELS, embedder
    from bench.evaluate import QUICK, TASKS, spearman
    from whitenedcse.evaluation.tasks import subsets

    ours = embedder(str(MODELS / "minilm-mlm"))
    tasks = {name: subsets(name) for name in (QUICK if quick else TASKS)}
    return lambda: spearman(ours, tasks, bf16=precision == "bf16")


def tokenise(who: str, *, folder: Path, quick: bool) -> Turn:
    """From a file to the cache, anew each time."""
    from transformers import AutoTokenizer

    from bench.encode import MODELS
    from bench.loading import LENGTH, sentences, written
    from whitenedcse.data.corpus import Corpus
    from whitenedcse.data.tokens import tokenised

    path = written(sentences(100_000 if quick else 1_000_000), folder / "wiki.txt")
    tokenizer = AutoTokenizer.from_pretrained(MODELS / "bert-base-uncased-tokenizer")

    def run() -> None:
        with tempfile.TemporaryDirectory() as cache:
            tokenised(Corpus(str(path)), tokenizer, LENGTH, cache_dir=Path(cache))

    return run


def start(who: str, *, folder: Path, quick: bool) -> Turn:
    """The whole script."""

    def run() -> None:
        with tempfile.TemporaryDirectory(dir=folder) as out:
            some = ["trainer.max_steps=50"] if quick else []
            command = [sys.executable, "train.py", f"hydra.run.dir={out}/run", *some]
            environment = os.environ | {"WHITENEDCSE_CACHE": f"{out}/cache"}
            subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, check=True)

    return run


TURNS: dict[str, Callable[..., Turn]] = {"encode": encode, "sts": sts, "tokenise": tokenise, "start": start}

if __name__ == "__main__":
    main()

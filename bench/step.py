"""One training step against sentence-transformers and a padded loop in SimCSE's manner.

WHITENEDCSE_DATA=DATA python -m bench.step [--shape small] [--only NAME,NAME]

A step is everything from batch to batch: loading, forward, backward, clipping at 1.0, AdamW, schedule, and
what the trainer adds. Every variant runs its own training loop in a thread of its own, and at the end of a
step hands over to the next, so that one works at a time; its first step is not counted.

  ours-fp32, ours-bf16    train.py's module, data and trainer, dense head: the like of v = 2 InfoNCE (SimCSE)
  sgw-bf16                the same with shuffled group whitening before the dense layer
  once-bf16               sgw-bf16 with ONE encoder pass for all views: a DIFFERENT METHOD (no dropout noise)
  st-fp32, st-bf16        sentence-transformers' trainer, MultipleNegativesRankingLoss on (s, s)
  simcse                  eager attention, tokenised by datasets.map, padded batches, unfused AdamW

Executed FLOPs are counted as torch runs them in the first step (FlopCounterMode: matrix products, forward and
backward). Useful ones are 6 P t + 12 L d sum(l^2): P weights of the L layers of width d, t tokens without
padding, l the length of each sentence. The peak is the best of several matrix products in that precision.

DATA holds wiki/wiki1m_like.txt.bz2, of which the first 20,000 lines are taken; encoders and tokenizers are in
DATA/../models. --shape tiny shows what a step costs around its encoder.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModel, AutoTokenizer

from bench import measure
from bench.measure import Variant
from bench.peers import BERTS, Loop, Work, corpus, encoder, ours, sentence_transformers, silence, simcse
from whitenedcse.compute import prefers_onednn
from whitenedcse.data.tokens import token_ids
from whitenedcse.model.packed import multiply

ONEDNN = {torch.ops.mkldnn._linear_pointwise: lambda x, weight, *_, **__: 2 * x[0] * x[1] * weight[0]}
MAKERS: dict[str, Callable[[Work], Loop]] = {
    "ours-fp32": partial(ours, precision="32-true"),
    "ours-bf16": partial(ours, precision="bf16-mixed"),
    "sgw-bf16": partial(ours, precision="bf16-mixed", head="shuffled_group"),
    "once-bf16": partial(ours, precision="bf16-mixed", head="shuffled_group", passes=1),
    "st-fp32": partial(sentence_transformers, bf16=False),
    "st-bf16": partial(sentence_transformers, bf16=True),
    "simcse": simcse,
}
PEERS = [
    (
        "like for like with sentence-transformers",
        {"ours-fp32": "st-fp32", "ours-bf16": "st-bf16", "st-fp32": None, "st-bf16": None},
    ),
    (
        "against SimCSE's manner, fp32",
        {"ours-fp32": "simcse", "ours-bf16": "simcse", "st-fp32": "simcse", "simcse": None},
    ),
    ("what the whitened head costs", {"sgw-bf16": "ours-bf16"}),
    ("DIFFERENT METHOD: sentences encoded once for all views", {"once-bf16": "sgw-bf16"}),
]
M_ARENA_MAX = -8  # of glibc's malloc.h
GROWTH = {"batch": (16, 32, 64, 128, 256), "length": (16, 24, 32, 48, 64), "views": (2, 3, 4, 5)}


class Baton:
    """Loops in threads, one of them at work at a time: who has the baton takes a step and passes it on.

    seconds: of each step. losses, flops: of the first step, which is not among `seconds`.
    Gradient and autocast modes and numbers of threads belong to a thread; torch's weights in another
    precision, which autocast keeps, belong to all, but only within a forward pass. Memory that one frees the
    next can have, as in a process of its own; glibc would keep a heap of activations for each thread.
    """

    def __init__(self, loops: Mapping[str, Loop], threads: int) -> None:
        self.now, self.threads = measure.clock(threads), threads
        self.seconds: dict[str, list[float]] = {name: [] for name in loops}
        self.losses: dict[str, float] = {}
        self.flops: dict[str, int] = {}
        self.free = {name: threading.Semaphore(0) for name in loops}
        self.after = dict(zip(loops, [*list(loops)[1:], ""], strict=True))
        self.free[""] = threading.Semaphore(0)  # the main thread's
        self.counting = ExitStack()
        self.failed: BaseException | None = None
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)
        for name, loop in loops.items():
            threading.Thread(target=self.live, args=(name, loop), daemon=True).start()

    def round(self) -> None:
        """A step of each; when no step is left, the end of each loop."""
        self.free[next(iter(self.seconds))].release()
        self.free[""].acquire()
        if self.failed is not None:
            raise self.failed

    def live(self, name: str, loop: Loop) -> None:
        """A thread."""
        self.free[name].acquire()
        torch.set_num_threads(1)  # FLOPs of the first step are counted in this thread alone
        try:
            counter = self.counting.enter_context(FlopCounterMode(display=False, custom_mapping=ONEDNN))
            loop(partial(self.turn, name, counter))
            self.free[self.after[name]].release()
        except BaseException as error:  # the main thread raises it
            self.failed = error
            self.free[""].release()

    def turn(self, name: str, counter: FlopCounterMode, loss: Tensor) -> None:
        """The end of a step: hand over, and wait."""
        seconds = self.now()
        if name in self.losses:
            self.seconds[name].append(seconds - self.began)
        else:
            self.counting.close()
            torch.set_num_threads(self.threads)
            self.losses[name], self.flops[name] = float(loss), counter.get_total_flops()
        self.free[self.after[name]].release()
        self.free[name].acquire()
        self.began = self.now()


def timed(work: Work, names: list[str], threads: int) -> Baton:
    """All steps of the variants."""
    baton = Baton({name: MAKERS[name](work) for name in names}, threads)
    for _ in range(work.steps + 1):
        baton.round()
    return baton


def compared(work: Work, names: list[str], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Time, ratios and executed FLOPs of the variants."""
    baton = timed(work, names, options.threads)
    tables, shown = [], set[str]()
    for title, pairs in PEERS:
        rows = {
            name: Variant(MAKERS[name], peer if peer in names else None)
            for name, peer in pairs.items()
            if name in names and (peer in names or name not in shown)
        }
        shown |= set(rows)
        if rows:
            tables.append(measure.table(f"{title}; {options.shape}", rows, baton.seconds))
    facts, useful = text_facts(work), useful_flops(work)
    print(f"\n{facts}\nuseful GFLOP a step: {useful / 1e9:.1f}")
    print("  variant        GFLOP run   GFLOP/s run  of peak  useful of peak   loss of step 1")
    peaks = {"fp32": gemm(torch.float32, options.threads), "bf16": gemm(torch.bfloat16, options.threads)}
    for name in names:
        seconds = statistics.median(baton.seconds[name])
        run, peak = baton.flops[name] / seconds, peaks["bf16" if "bf16" in name else "fp32"]
        one = useful / work.passes if name == "once-bf16" else useful
        print(
            f"  {name:12s} {baton.flops[name] / 1e9:11.1f} {run / 1e9:13.1f} {run / peak:8.1%} "
            f"{one / seconds / peak:15.1%} {baton.losses[name]:16.4f}"
        )
    print("  peak GFLOP/s: " + "  ".join(f"{name} {peak / 1e9:.0f}" for name, peak in peaks.items()))
    more = {"text": facts, "flops": baton.flops, "useful": useful, "losses": baton.losses, "peaks": peaks}
    return [*tables, more]


def lengths(work: Work) -> np.ndarray[Any, Any]:
    """(steps, n) tokens of each sentence."""
    tokenizer = AutoTokenizer.from_pretrained(work.encoder)
    rows = token_ids(work.texts, tokenizer, work.length)
    return np.array([len(row) for row in rows]).reshape(work.steps, work.batch)


def text_facts(work: Work) -> str:
    """What decides the cost of a step, for ours and for the peers, which see the same sentences."""
    each = lengths(work)
    padded = (each.max(axis=1) * work.batch).mean()
    tokens = each.sum(axis=1).mean()
    return (
        f"{each.mean():.1f} tokens a sentence, {(each == work.length).mean():.0%} at the cap of "
        f"{work.length}; tokens a step: {work.passes * tokens:,.0f}, padded {work.passes * padded:,.0f} "
        f"({padded / tokens:.2f}x)"
    )


def useful_flops(work: Work) -> float:
    """6 P t + 12 L d sum(l^2) of a step, on average."""
    model = AutoModel.from_pretrained(work.encoder)
    each, config = lengths(work).astype(float), model.config
    weights = sum(weight.numel() for weight in model.encoder.parameters())
    attention = 12 * config.num_hidden_layers * config.hidden_size * (each**2).sum()
    return work.passes * (6 * weights * each.sum() + attention) / work.steps


def gemm(dtype: torch.dtype, threads: int) -> float:
    """FLOPs a second of (3072, 768) x (768, 3072) and its kin, the best of several and of both libraries."""
    now, best = measure.clock(threads), 0.0
    ways = [torch.nn.functional.linear, *([multiply] if prefers_onednn() else [])]
    for m, k, n in ((3072, 768, 3072), (3072, 3072, 768), (4096, 1024, 1024)):
        a, b = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype)
        for way in ways * 4:
            began = now()
            way(a, b)
            best = max(best, 2 * m * k * n / (now() - began))
    return best


def grown(work: Work, threads: int) -> list[dict[str, Any]]:
    """How a step of ours grows with batch, length and views, the others held."""
    print("\n  batch length views   tokens a step    fp32 ms    bf16 ms   fp32 us/token   bf16 us/token")
    rows = []
    for name, values in GROWTH.items():
        for value in values:
            settings = vars(work) | {name: value}
            one = Work(**settings | {"passes": settings["views"]})
            seconds = timed(one, ["ours-fp32", "ours-bf16"], threads).seconds
            ms = [1e3 * statistics.median(times) for times in seconds.values()]
            tokens = one.passes * lengths(one).sum(axis=1).mean()
            print(
                f"  {one.batch:5d} {one.length:6d} {one.views:5d} {tokens:15,.0f} {ms[0]:10.1f} {ms[1]:10.1f}"
                f" {1e3 * ms[0] / tokens:15.1f} {1e3 * ms[1] / tokens:15.1f}",
                flush=True,
            )
            rows.append({"batch": one.batch, "length": one.length, "views": one.views, "seconds": seconds})
    return rows


def profiled(work: Work, name: str) -> list[dict[str, Any]]:
    """Print where three steps go, after one that does not count."""
    profiler, step = torch.profiler.profile(), iter(range(4))

    def turn(_: Tensor) -> None:
        number = next(step)
        if number == 0:
            profiler.start()
        if number == 3:
            profiler.stop()

    MAKERS[name](work)(turn)
    print(f"\n{name}: three steps")
    print(
        profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=20, max_name_column_width=45)
    )
    return []


def memory(names: list[str]) -> list[dict[str, Any]]:
    """Print the peak memory of a step of each variant, measured in a process of its own."""
    rows = {}
    for name in names:
        command = [sys.executable, "-m", "bench.step", *sys.argv[1:], "--measure", name]
        rows[name] = float(
            subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1]
        )
        print(
            f"  {name:12s} {rows[name]:8.0f} MiB at the peak of a step, beyond what was held before",
            flush=True,
        )
    return [{"work": "peak memory", "MiB": rows}]


def peak_memory(work: Work, name: str) -> float:
    """MiB: the peak of this process after some steps, less what it held before the first."""
    loop = MAKERS[name](work)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    loop(lambda loss: None)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1024 - pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def arguments() -> argparse.Namespace:
    """The options; what --quick and each mode choose."""
    parser = measure.parser(__doc__)
    parser.add_argument("--shape", choices=[*BERTS, "minilm"], default="small")
    parser.add_argument("--only", help=f"some of {','.join(MAKERS)}")
    parser.add_argument("--memory", action="store_true", help="the peak of a step of each instead")
    parser.add_argument("--profile", choices=MAKERS, help="where three steps of one variant go instead")
    parser.add_argument("--grow", action="store_true", help="ours by batch, length and views instead")
    parser.add_argument("--measure", choices=MAKERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.rounds = options.rounds or (2 if options.quick else 3 if options.grow else 5)
    options.only = options.only.split(",") if options.only else list(MAKERS)
    if unknown := set(options.only) - set(MAKERS):
        parser.error(f"--only {','.join(sorted(unknown))}: there are {','.join(MAKERS)}")
    return options


def results(work: Work, options: argparse.Namespace) -> list[dict[str, Any]]:
    """What was asked for."""
    names = [name for name in MAKERS if name in options.only]
    if options.grow:
        return grown(work, options.threads)
    if options.profile:
        return profiled(work, options.profile)
    return memory(names) if options.memory else compared(work, names, options)


def main() -> None:
    """Build the work, measure, print."""
    options = arguments()
    silence()
    with tempfile.TemporaryDirectory() as name:
        folder, steps = Path(name), 4 if options.profile or options.measure else options.rounds + 1
        work = Work(encoder(options.shape, folder), corpus(folder), 64, 2, 2, 32, steps)
        if options.measure:
            torch.set_num_threads(options.threads)
            print(peak_memory(work, options.measure))
            return
        here = measure.begin(options)
        measure.end(options, here, results(work, options))


if __name__ == "__main__":
    main()

"""What every benchmark shares: variants take turns, and their medians are compared with a peer's.

With one thread (the default) the clock is the CPU time of the process, which a busy machine hardly disturbs;
with more threads it is the wall clock, and the machine must be quiet.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

LIBRARIES = ("torch", "transformers", "lightning", "sentence-transformers", "datasets", "tokenizers", "numpy")


class Variant(NamedTuple):
    """One way to do the work. run: does it once. peer: the variant whose time is divided by this one's."""

    run: Callable[[], Any]
    peer: str | None = None


def parser(doc: str) -> argparse.ArgumentParser:
    """Options that every benchmark takes."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--quick", action="store_true", help="smaller work, for a try; not for claims")
    made.add_argument("--json", type=Path, help="write machine, versions and every time to this file")
    made.add_argument(
        "--rounds", type=int, default=None, help="turns of each variant, at least 5 for a claim"
    )
    made.add_argument("--threads", type=int, default=1, help="1: CPU time; more: wall clock")
    return made


def machine(threads: int) -> dict[str, Any]:
    """Where the numbers come from; sets the number of threads."""
    torch.set_num_threads(threads)
    cpu = Path("/proc/cpuinfo")
    lines = cpu.read_text().splitlines() if cpu.exists() else []
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    flags = fields.get("flags", "").split()
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    return {
        "cpu": fields.get("model name", platform.processor()),
        "cores": os.cpu_count(),
        "threads": threads,
        "bf16": [flag for flag in ("avx512_bf16", "amx_bf16") if flag in flags],
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "commit": subprocess.run(git, capture_output=True, text=True).stdout.strip(),
        "command": " ".join([f"python -m bench.{Path(sys.argv[0]).stem}", *map(shown, sys.argv[1:])]),
        "python": platform.python_version(),
        **{name: version(name) for name in LIBRARIES},
    }


def shown(argument: str) -> str:
    """An argument, of a place on this machine its name."""
    return Path(argument).name if Path(argument).is_absolute() else argument


def clock(threads: int) -> Callable[[], float]:
    """Seconds: of CPU with one thread, else of the wall."""
    return time.process_time if threads == 1 else time.perf_counter


def interleaved(
    variants: Mapping[str, Variant], rounds: int, threads: int, warm: bool = True
) -> dict[str, list[float]]:
    """Seconds of each turn, by variant. warm: one turn each comes first, uncounted."""
    now, times = clock(threads), {name: [] for name in variants}
    for turn in range(-1 if warm else 0, rounds):
        for name, variant in variants.items():
            began = now()
            variant.run()
            if turn >= 0:
                times[name].append(now() - began)
    return times


def table(work: str, variants: Mapping[str, Variant], times: Mapping[str, list[float]]) -> dict[str, Any]:
    """Print medians, quartiles and ratios of one piece of work; the same as plain values."""
    print(f"\n{work}; {min(map(len, times.values()))} turns", flush=True)
    rows = {}
    for name, variant in variants.items():
        low, middle, high = quartiles(times[name])
        ratio = quartiles(ratios(times, name, variant.peer)) if variant.peer else None
        rows[name] = {"median": middle, "quartiles": [low, high], "peer": variant.peer, "ratio": ratio}
        beside = f"   {ratio[1]:6.2f}x {variant.peer} ({ratio[0]:.2f} .. {ratio[2]:.2f})" if ratio else ""
        print(
            f"  {name:34s} {1e3 * middle:10.1f} ms ({1e3 * low:.1f} .. {1e3 * high:.1f}){beside}", flush=True
        )
    return {"work": work, "variants": rows, "seconds": dict(times)}


def ratios(times: Mapping[str, list[float]], name: str, peer: str) -> list[float]:
    """How many times as long the peer took, turn by turn."""
    return [theirs / ours for theirs, ours in zip(times[peer], times[name], strict=True)]


def quartiles(values: list[float]) -> list[float]:
    """First quartile, median, third quartile."""
    return np.quantile(values, [0.25, 0.5, 0.75]).tolist()


def begin(options: argparse.Namespace) -> dict[str, Any]:
    """Print and return the machine."""
    here = machine(options.threads)
    print("   ".join(f"{key} {value}" for key, value in here.items()), flush=True)
    return here


def end(options: argparse.Namespace, here: dict[str, Any], tables: list[dict[str, Any]]) -> None:
    """Write all of it where --json says."""
    if options.json:
        options.json.write_text(json.dumps({"machine": here, "tables": tables}, indent=1))

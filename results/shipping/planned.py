"""What plan.json, which bench.plan wrote, says of large corpora; results/conclusions.py writes it."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from bench.plan import DEVICES, LARGEST, UNITS, WORKS, Line, hours
from results.markdown import table, text

HERE = Path(__file__).parent
LATENCY, DAY = 0.1, 24  # seconds of a query; hours
VERBS = {"encode": "encode", "train": "train", "index": "build an index", "query": "search it"}
MEMORY = 24e3  # MB of the machine that was measured
CODES = 64 + 8  # bytes a row of an index of product codes, with its number


@cache
def plan() -> dict[str, Any]:
    """The lines, the facts and the checks."""
    return dict(json.loads((HERE / "plan.json").read_text())["tables"][0])


def line(work: str, cost: str) -> Line:
    """A cost of a command by rows."""
    return Line(*plan()["lines"][work][cost])


def figure(value: float) -> str:
    """A number with two digits, or more before the point."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def duration(value: float) -> str:
    """Hours as text."""
    limits = ((1 / 60, 3600, "s"), (1, 60, "min"), (48, 1, "h"))
    factor, unit = next(((f, unit) for limit, f, unit in limits if value < limit), (1 / 24, "days"))
    return f"{figure(factor * value)} {unit}"


def bytes_of(megabytes: float) -> str:
    """Megabytes as text."""
    limits = ((1e3, 1, "MB"), (1e6, 1e3, "GB"))
    divisor, unit = next(((d, unit) for limit, d, unit in limits if megabytes < limit), (1e6, "TB"))
    return f"{figure(megabytes / divisor)} {unit}"


def seconds_of(value: float) -> str:
    """Seconds as text."""
    return f"{figure(1e3 * value)} ms" if value < 1 else f"{figure(value)} s"


def about(rows: float) -> str:
    """A number of rows with one digit that is not 0."""
    return f"{float(f'{rows:.0e}'):,.0f}"


def sizes() -> str:
    """What each size takes, on one device and on several."""
    lines = []
    for power in range(4, LARGEST + 1):
        n = 10**power
        cells = [duration(hours(plan(), work, n, d)) for work in ("encode", "train") for d in DEVICES]
        cells += [bytes_of(line(work, "disk").at(n)) for work in ("encode", "index")]
        lines.append([f"1e{power}", *cells, seconds_of(line("query", "seconds").at(n))])
    head = [f"{work}, {d} device{'s' * (d > 1)}" for work in ("encode", "train") for d in DEVICES]
    return table(["rows", *head, "vectors", "index", "a query of 4,000, exact"], lines)


def memory() -> str:
    """The most that each command held."""
    rows = [row["rows"] for row in plan()["checks"]]
    most = {
        work: max([line(work, "memory").start, *(row[work]["memory"][0] for row in plan()["checks"])])
        for work in VERBS
    }
    found = [f"{bytes_of(most[work])} to {verb}" for work, verb in VERBS.items()]
    return text(f"""
Memory, from {min(rows):,} to {max(rows):,} rows: at most {", ".join(found[:-1])} and {found[-1]}.
""")


def checks() -> str:
    """What the lines say of real runs, divided by what these took."""
    lines = []
    for row in plan()["checks"]:
        for cost in UNITS:
            pairs = [row[work][cost] for work in WORKS]
            cells = [f"{expected / real:.2f}" if real else "" for real, expected in pairs]
            lines.append([f"{row['rows']:,}", cost, *cells])
    return table(["rows", "predicted / measured", *WORKS], lines)


def within() -> str:
    """How many of the checks are within 20 %, and which are not."""
    every = {
        f"{work} {cost} at {row['rows']:,} rows": row[work][cost][1] / row[work][cost][0]
        for row in plan()["checks"]
        for work in WORKS
        for cost in UNITS
        if row[work][cost][0]
    }
    far = [f"{name} ({ratio:.2f})" for name, ratio in every.items() if not 0.8 <= ratio <= 1.2]
    others = f" The others: {', '.join(far)}." if far else ""
    largest = max(row["rows"] for row in plan()["checks"])
    return text(f"""
{len(every) - len(far)} of {len(every)} are within 20 %.{others} Nothing above {largest:,} rows was run, and
nothing on several machines: all other figures are
computed.
""")


def engines() -> str:
    """From which size on another engine is the right one."""
    query, encode, index = line("query", "seconds"), line("encode", "seconds"), line("index", "disk")
    exact = (LATENCY - query.start) / query.slope
    day = (DAY * 3600 - encode.start) / encode.slope
    whole, codes = (MEMORY - index.start) / index.slope, MEMORY * 1e6 / CODES
    return text(f"""
- **Exact search** (no option) takes {LATENCY:g} s a query at {about(exact)} rows, where 4,000 are asked
  together and vectors have width 128. A single query takes longer: 0.17 s at 1,000,000 rows of width 384
  ([measured](../results/shipping/README.md)). Above that an index of FAISS proposes the rows:
  `--factory IVF4096,SQ8`.
- **Memory** of {MEMORY / 1e3:.0f} GB holds the whole vectors and texts of {about(whole)} rows. They need not
  be in memory: the index is memory-mapped, and what FAISS proposes with product codes
  (`--factory IVF65536,PQ64`, {CODES} bytes a row) fits up to {about(codes)} rows.
- **Above that**, a vector database that is shared by machines takes the Parquet files of `encode` ([LanceDB
  and Qdrant](encode.md#lancedb-and-qdrant)).
- **Encoding** takes a day on this machine at {about(day)} rows. `--processes` uses several
  processes of one machine; torchrun, srun and `--engine ray` use several machines.
""")

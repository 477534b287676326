"""What a corpus of any size will take, from two small runs of each command: python -m bench.plan [MODEL]

`whitenedcse encode`, `train.py` (one epoch, evaluated every 125 steps), `whitenedcse search build --vectors`
and `search query` run as a user starts them, on two small samples of the Wikipedia corpus under
WHITENEDCSE_DATA. Time (wall clock), peak memory of the first process without pages of files, and disk (of
training with the cache of tokens) are lines through these two points, from which larger corpora are read;
memory is taken as constant, the larger of the two. --check N ... runs the commands with so many rows and
prints what was measured beside what the lines say. --picture FILE draws the lines to 1e10 rows, on 1, 8 and
64 devices:

- encode: counting the rows is done by one process, all else is shared evenly;
- train: the time of a step is shared evenly, and each step adds an exchange of the gradients by ring,
  2 (W - 1) / W times their bytes at --gigabits a second. A batch of 64 on 64 devices would be one sentence
  each: this is the least time that is possible, not a promise.

MODEL: as in bench.encode. The machine must be quiet.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from bench import measure
from bench.encode import corpus, parsed, plain
from whitenedcse.data.corpus import Corpus, rows, texts

ROOT = Path(__file__).parents[1]
SMALL = {
    "encode": (20_000, 60_000),
    "train": (16_000, 48_000),  # 2 and 6 evaluations
    "index": (50_000, 400_000),  # whose slope is lost in the start of fewer
    "query": (50_000, 400_000),
}
QUERIES = (1, 4001)  # of the two searches, whose difference is the time of 4,000
WORKS = tuple(SMALL)
UNITS = {"seconds": "s", "memory": "MB", "disk": "MB"}
LARGEST, DEVICES = 10, (1, 8, 64)  # 1e10 rows


class Cost(NamedTuple):
    """Of one command: wall-clock seconds, and megabytes of peak resident memory and of disk."""

    seconds: float
    memory: float
    disk: float


class Line(NamedTuple):
    """A cost by rows: start + slope * rows."""

    start: float
    slope: float

    def at(self, rows: float) -> float:
        """The cost of so many rows."""
        return self.start + self.slope * rows


def through(points: Mapping[int, float]) -> Line:
    """The line through two points, given as {rows: cost}; a cost that falls counts as constant."""
    (n, a), (m, b) = sorted(points.items())
    slope = max(0.0, (b - a) / (m - n))
    return Line(b - slope * m, slope)


def lines(costs: Mapping[int, Cost]) -> dict[str, Line]:
    """The line of each cost of a command; memory is constant: blocks, batches, pages that can be dropped."""
    found = {name: through({n: getattr(cost, name) for n, cost in costs.items()}) for name in Cost._fields}
    return found | {"memory": Line(max(cost.memory for cost in costs.values()), 0.0)}


def main() -> None:
    """Calibrate, print what sizes will take, and check and draw it if asked."""
    parser = measure.parser(__doc__)
    parser.add_argument("--check", type=int, nargs="+", default=[], metavar="N", help="rows of real runs")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw it, as .svg or .png")
    parser.add_argument("--gigabits", type=float, default=10.0, help="a second between machines (10)")
    parser.set_defaults(threads=os.cpu_count())
    options = parsed(parser)
    here = measure.begin(options)
    small = {work: (1_000, 4_000) if options.quick else SMALL[work] for work in WORKS}
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(options.model, Path(folder))
        rounds = options.rounds or (1 if options.quick else 3)
        found = {work: lines(medians(bench, work, small[work], rounds)) for work in WORKS}
        facts = {
            "counting": bench.counting(small["encode"][1]),
            "parameters": bench.parameters(),
            "gigabits": options.gigabits,
        }
        checks = [checked(bench, found, n) for n in options.check]
    plan = {"lines": found, "facts": facts, "checks": checks}
    show(plan)
    if options.picture:
        draw(plan, options.picture)
    measure.end(options, here, [plan])


class Bench:
    """Runs the commands on samples of the corpus, in a folder of its own."""

    def __init__(self, model: str, folder: Path) -> None:
        self.model, self.folder = str(Path(model).resolve()), folder
        self.pooling = ["--pooling", "mean"] if plain(self.model) else []
        self.rows = list(texts(Corpus(str(corpus()))))

    def corpus(self, n: int) -> Path:
        """A file of n rows of the corpus, evenly spread over it."""
        file = self.folder / f"{n}.txt"
        if not file.exists():
            if n > len(self.rows):
                raise SystemExit(f"--check {n}: the corpus has {len(self.rows):,} rows")
            chosen = (self.rows[i * len(self.rows) // n] for i in range(n))
            file.write_text("".join(f"{row}\n" for row in chosen), encoding="utf-8")
        return file

    def run(self, work: str, n: int) -> Cost:
        """Run one command on n rows. What it needs of the others, as vectors for an index, is made before."""
        cost: Cost = getattr(self, work)(n)
        return cost

    def encode(self, n: int) -> Cost:
        """From text to vectors."""
        words = ["encode", self.model, self.corpus(n), f"vectors-{n}", *self.pooling]
        return self.command(f"vectors-{n}", *words)

    def index(self, n: int) -> Cost:
        """From vectors to an index."""
        if not (self.folder / f"vectors-{n}").exists():
            self.encode(n)
        words = ["search", "build", self.model, self.corpus(n), f"index-{n}", "--vectors", f"vectors-{n}"]
        return self.command(f"index-{n}", *words, *self.pooling)

    def query(self, n: int) -> Cost:
        """One query, without the start of the command: the difference of two searches."""
        if not (self.folder / f"index-{n}").exists():
            self.index(n)
        costs = []
        for count in QUERIES:
            queries = self.folder / f"queries-{count}.txt"
            queries.write_text("".join(f"{row}\n" for row in self.rows[:count]), encoding="utf-8")
            costs.append(
                self.command(None, "search", "query", f"index-{n}", "--file", queries, "--to", "csv")
            )
        few, many = costs
        return many._replace(seconds=(many.seconds - few.seconds) / (QUERIES[1] - QUERIES[0]), disk=0.0)

    def train(self, n: int) -> Cost:
        """One epoch, evaluated on held-out sentences every 125 steps, so that all of it grows with rows."""
        best = Path(self.model) / "best"
        encoder = best if best.is_dir() else self.model
        words = [f"data.corpus={self.corpus(n)}", "encoder=pretrained", f"encoder.path={encoder}"]
        words += ["pooling=mean", "trainer.max_epochs=1", "monitor.every=125", f"run=run-{n}"]
        cost = self.started(f"outputs/run-{n}", [sys.executable, str(ROOT / "train.py"), *words])
        return cost._replace(disk=cost.disk + size(self.folder / "cache"))

    def command(self, out: str | None, *words: object) -> Cost:
        """Run a command of `whitenedcse`, and see what it wrote to `out`."""
        return self.started(out, [sys.executable, "-m", "whitenedcse.app.cli", *map(str, words)])

    def started(self, out: str | None, words: Sequence[str]) -> Cost:
        """Run a program with a cache of its own, after what it wrote before was removed."""
        for old in (out, "cache"):
            if old:
                shutil.rmtree(self.folder / old, ignore_errors=True)
        env = os.environ | {"WHITENEDCSE_CACHE": str(self.folder / "cache"), "PYTHONPATH": str(ROOT)}
        began = time.perf_counter()
        with (self.folder / "said").open("w") as said:
            process = subprocess.Popen(words, cwd=self.folder, env=env, stdout=said, stderr=said)
            memory = 0.0
            while process.poll() is None:
                memory = max(memory, held(process.pid))
                time.sleep(0.02)
        seconds = time.perf_counter() - began
        if process.returncode:
            raise SystemExit((self.folder / "said").read_text()[-2_000:])
        return Cost(seconds, memory, size(self.folder / out) if out else 0.0)

    def counting(self, n: int) -> float:
        """Seconds a row to read and count a corpus, which one process does."""
        corpus, began = Corpus(str(self.corpus(n))), time.perf_counter()
        deque(rows(corpus), maxlen=0)
        return (time.perf_counter() - began) / n

    def parameters(self) -> int:
        """The parameters of the encoder, whose gradients the devices exchange."""
        from whitenedcse.model.embedder import Embedder

        return sum(p.numel() for p in Embedder.load(self.model).encoder.parameters())


def held(process: int) -> float:
    """The megabytes that a process holds now, without pages of files, which the system can drop.

    0 where the system does not tell.
    """
    with suppress(OSError, StopIteration):
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) * 1024 / 1e6
    return 0.0


def size(path: Path) -> float:
    """Megabytes of all files below a folder."""
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) / 1e6


def medians(bench: Bench, work: str, sizes: Sequence[int], rounds: int) -> dict[int, Cost]:
    """The median cost of a command for each number of rows, which take turns."""
    turns = [{n: bench.run(work, n) for n in sizes} for _ in range(rounds)]
    found = {n: Cost(*map(statistics.median, zip(*(turn[n] for turn in turns), strict=True))) for n in sizes}
    for n, cost in found.items():
        print(
            f"{work} {n:,}: {cost.seconds:.4g} s, {cost.memory:,.0f} MB of memory, {cost.disk:,.1f} of disk",
            flush=True,
        )
    return found


def checked(bench: Bench, found: Mapping[str, Mapping[str, Line]], n: int) -> dict[str, Any]:
    """What each command took for n rows, and what the lines say."""
    row: dict[str, Any] = {"rows": n}
    for work in WORKS:
        cost = bench.run(work, n)
        row[work] = {name: [getattr(cost, name), found[work][name].at(n)] for name in Cost._fields}
        print(f"checked {work} {n:,}: {row[work]}", flush=True)
    return row


def hours(plan: Mapping[str, Any], work: str, rows: float, devices: int) -> float:
    """The hours that encoding or training takes on so many devices, by the rules at the top."""
    line, facts = Line(*plan["lines"][work]["seconds"]), plan["facts"]
    serial = facts["counting"] if work == "encode" else 0.0
    seconds = line.start + rows * (serial + (line.slope - serial) / devices)
    if work == "train":
        exchange = 2 * (devices - 1) / devices * 4 * facts["parameters"] * 8 / (facts["gigabits"] * 1e9)
        seconds += rows / 64 * exchange
    return seconds / 3600


def show(plan: Mapping[str, Any]) -> None:
    """Print what sizes will take, and the checks."""
    print(f"\n{'rows':>8} {'':22}" + "".join(f"{name:>16}" for name in WORKS))
    for power in range(4, LARGEST + 1):
        for name, unit in UNITS.items():
            cells = [Line(*plan["lines"][work][name]).at(10**power) for work in WORKS]
            print(f"{f'1e{power}':>8} {f'{name}, {unit}':22}" + "".join(f"{cell:16,.4g}" for cell in cells))
    if flat := [work for work in WORKS if not plan["lines"][work]["seconds"][1]]:
        print(f"No more seconds for more rows of {', '.join(flat)}: measure again, idle and without --quick")
    for row in plan["checks"]:
        for name in UNITS:
            pairs = [row[work][name] for work in WORKS]
            said = "".join(f"{expected / real:16.2f}" if real else f"{'':16}" for real, expected in pairs)
            print(f"{row['rows']:8,} {name + ', said / measured':22}{said}")


def draw(plan: Mapping[str, Any], file: Path) -> None:
    """Draw hours by rows on several devices, the measured runs as dots, and the size of vectors and index."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    from whitenedcse.report.charts import COLOURS, STYLE

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(10, 3.2), layout="constrained")
        axes = figure.subplots(1, 3)
        rows = [10 ** (power / 4) for power in range(16, 4 * LARGEST + 1)]
        for axis, title in zip(axes, ("encode", "train"), strict=False):
            for devices, colour in zip(DEVICES, COLOURS, strict=False):
                took = [hours(plan, title, n, devices) for n in rows]
                axis.plot(rows, took, color=colour, label=f"{devices} x this machine")
            dots = [(row["rows"], row[title]["seconds"][0] / 3600) for row in plan["checks"]]
            axis.plot(*zip(*dots, strict=True), "o", color="black", ms=4, label="measured") if dots else None
            axis.set(title=title, ylabel="hours")
        for label, work, colour in (("vectors", "encode", COLOURS[0]), ("index", "index", COLOURS[1])):
            held = [Line(*plan["lines"][work]["disk"]).at(n) / 1e3 for n in rows]
            axes[2].plot(rows, held, color=colour, label=label)
        axes[2].set(title="disk", ylabel="GB")
        for axis in axes:
            axis.set(xscale="log", yscale="log", xlabel="rows")
            axis.legend(frameon=False)
        figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)


if __name__ == "__main__":
    main()

"""Nothing is lost, whatever ends a run: python bench/chaos.py [--rounds 30] [--seed 0] [--quick]

The quick start runs unkilled as one process and as two. Then it is killed (-9) at random moments, half of
them while a file is being written, and with two processes after the first checkpoint; its disk fills up; its
checkpoints are damaged. After each, the same command must end with the same best/,
metrics.csv (but for the speed), items.npz and scores.json (but for the run's name), to the last bit.
Exit status 1 if anything differs. Linux only (/proc); only root can mount the disk that fills up.

kept: the step of the newest checkpoint when all processes were gone, or of the newest one that is whole
logged: the last step in metrics.csv then    draft: what a killed write left behind
gone: seconds from the kill until the last process of the job had ended; more than 30 are refused
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from whitenedcse.compute import environment
from whitenedcse.console import Grid, say
from whitenedcse.files import digest
from whitenedcse.training.trainer import step_of, written

ROOT = Path(__file__).parents[1]
TINY = ["encoder.width=16", "encoder.layers=1", "encoder.heads=2", "trainer.max_steps=60"]
TINY += ["monitor.every=20", "checkpoint_every=0.5"]
MARK = "WHITENEDCSE_CHAOS"  # in the environment of all processes of a job
TICK = 0.0005  # seconds between two looks; a write takes some ten milliseconds
LIMIT = 3600.0  # seconds for one job
GONE = 30.0  # seconds for all processes of a job to end after one was killed: the promise
TRIES = 8  # of a round, where the run ended before its kill
VICTIMS = ("all", "front", "rank 1", "rank 0")
FILES = (
    ".draft.*.new",
    ".best.*.new",
    "draft",
    ".scores.json.*.new",
    ".best.old",
)  # seen while something is written
SPEED = "train/sentences_per_second"
numbers = itertools.count()


class Job:
    """train.py as a user starts it in `cwd`; what it says is kept elsewhere."""

    def __init__(self, cwd: Path, run: str, processes: int, settings: Sequence[str]) -> None:
        self.run = cwd / "outputs" / run
        self.mark = f"{os.getpid()}-{next(numbers)}"
        self.out, self.err = tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")
        several = [f"trainer.devices={processes}"] if processes > 1 else []
        self.process = subprocess.Popen(
            [sys.executable, str(ROOT / "train.py"), f"run={run}", "seed=0", *several, *settings],
            cwd=cwd,
            env=os.environ | {MARK: self.mark},
            stdout=self.out,
            stderr=self.err,
        )

    def began(self) -> bool:
        """Whether training has begun."""
        return (self.run / "metrics.csv").exists()

    def seen(self, ready: Callable[[], bool]) -> bool:
        """Wait until something is so; whether it came before the job ended."""
        until = time.monotonic() + LIMIT
        while not ready():
            if self.process.poll() is not None:
                return False
            if time.monotonic() > until:
                raise TimeoutError(f"{self.run}: nothing happened for {LIMIT:.0f} s")
            time.sleep(TICK)
        return True

    def killed(self, victims: str, after: float, paths: Sequence[str]) -> bool:
        """Kill -9 these processes once files that match are there, or return False.

        after: seconds into training. paths: patterns of files in the run.
        """
        self.seen(self.began)
        due = time.monotonic() + after
        chosen = [pid for pid, name in marked(self.mark) if victims in ("all", name)]
        if not self.seen(lambda: time.monotonic() >= due and all(any(self.run.glob(p)) for p in paths)):
            return False
        kill(chosen)
        return True

    def gone(self) -> float:
        """Seconds until all of its processes had ended; after a minute they are killed."""
        start = time.monotonic()
        while (seconds := time.monotonic() - start) < 60 and list(marked(self.mark)):
            self.process.poll()
            time.sleep(0.05)
        kill([pid for pid, _ in marked(self.mark)])
        return seconds

    def ended(self) -> tuple[int, str, str]:
        """Exit status, stdout and stderr, but for what Lightning says of processes that meet."""
        status = self.process.wait(LIMIT)
        texts = []
        for stream in (self.out, self.err):
            stream.seek(0)
            texts.append(stream.read())
        lines = texts[1].splitlines(keepends=True)
        return status, texts[0], "".join(line for line in lines if not line.startswith("Initializing"))


def marked(mark: str) -> Iterator[tuple[int, str]]:
    """Id and role ("front" or "rank N") of the running processes of a job, or of all jobs of one bench."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            pairs = (
                text.partition("=") for text in os.fsdecode((folder / "environ").read_bytes()).split("\0")
            )
            env = {name: value for name, _, value in pairs}
            if mark in (found := env.get(MARK, ""), found.partition("-")[0]):
                yield int(folder.name), f"rank {env['RANK']}" if "RANK" in env else "front"


def kill(processes: Sequence[int]) -> None:
    """SIGKILL, which no process can hear."""
    for pid in processes:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


class Unkilled(NamedTuple):
    """A run that nothing disturbed: its directory, what it left, and how long it trained."""

    run: Path
    hashes: dict[str, str]
    seconds: float


class Bench(NamedTuple):
    """Where runs lie, their settings, and the unkilled run of one process and of two."""

    cwd: Path
    settings: list[str]
    unkilled: dict[int, Unkilled]

    def job(self, run: str, processes: int = 1, *more: str) -> Job:
        """A start of the quick start."""
        return Job(self.cwd, run, processes, [*self.settings, *more])

    def wrong(self, again: Job, processes: int = 1) -> list[str]:
        """What is not as in the unkilled run when this job has ended; nothing if all is well."""
        status, _, err = again.ended()
        if status:
            return [f"the same command ended with status {status}: {err.strip()[-300:]}"]
        now, then = hashes(again.run), self.unkilled[processes].hashes
        return [
            f"{name} differs" for name in sorted(then.keys() | now.keys()) if then.get(name) != now.get(name)
        ]


class Result(NamedTuple):
    """One row: what was done, and what was wrong afterwards."""

    case: str
    processes: int
    kept: int | None = None
    logged: int | None = None
    draft: str = ""
    gone: float | None = None
    wrong: Sequence[str] = ()
    skipped: str = ""

    def cells(self) -> list[str]:
        """The row as text."""
        numbers = ["" if n is None else str(n) for n in (self.processes, self.kept, self.logged)]
        gone = "" if self.gone is None else f"{self.gone:.1f}"
        return [self.case, *numbers, self.draft, gone, self.skipped or "; ".join(self.wrong) or "equal"]


def hashes(run: Path) -> dict[str, str]:
    """SHA-256 of best/, metrics, items and scores, by name; an ended run has no checkpoints."""
    found = {}
    for path in [*run.glob("best/**/*"), run / "items.npz"]:
        if path.is_file():
            found[path.relative_to(run).as_posix()] = digest(path)
    with (run / "metrics.csv").open() as stream:
        lines = [line | {SPEED: bool(line[SPEED])} for line in csv.DictReader(stream)]
    scores = json.loads((run / "scores.json").read_text()) | {"model": ""}
    for name, content in {"metrics.csv": lines, "scores.json": scores}.items():
        found[name] = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    return found


def unkilled(bench: Bench, processes: int) -> Unkilled:
    """The run that all others of as many processes must equal."""
    job = bench.job(f"unkilled-{processes}", processes)
    job.seen(job.began)
    start = time.monotonic()
    job.seen((job.run / "scores.json").exists)
    seconds = time.monotonic() - start
    status, _, err = job.ended()
    if status:
        raise SystemExit(f"the unkilled run ended with status {status}: {err}")
    return Unkilled(job.run, hashes(job.run), seconds)


def killed(bench: Bench, number: int, rng: random.Random) -> Result:
    """One round: kill at a random moment, or at the first write after it; then the same command again."""
    processes = 1 + number % 2
    victims = VICTIMS[number // 4 % 4] if processes > 1 else "all"
    file = FILES[(number // 4 + 2 * (processes == 1)) % 5] if number % 4 in (1, 2) else ""
    case = f"kill {victims} at {file or 'any moment'}"
    for attempt in range(TRIES):
        job = bench.job(f"round-{number}-{attempt}", processes)
        paths = [f"checkpoints/{file}" if file.startswith("draft") else file] if file else []
        paths += ["checkpoints/step-*.ckpt"] if processes > 1 else []
        if job.killed(victims, rng.uniform(0, bench.unkilled[processes].seconds), paths):
            break
    else:
        return Result(case, processes, wrong=[f"ended {TRIES} times before its kill"])
    gone = job.gone()
    drafts = [*job.run.glob("checkpoints/draft*"), *job.run.glob(".best.*"), *job.run.glob("*.new")]
    result = state(case, processes, job.run)._replace(draft=", ".join(p.name for p in drafts), gone=gone)
    wrong = [f"processes ran on for more than {GONE:.0f} s"] if gone > GONE else []
    return result._replace(wrong=wrong + bench.wrong(bench.job(job.run.name, processes), processes))


def state(case: str, processes: int, run: Path) -> Result:
    """How far a run that was ended had come."""
    whole = [path for path in written(run / "checkpoints") if path.stem.endswith(digest(path)[:16])]
    with (run / "metrics.csv").open() as stream:
        steps = [line["step"] for line in csv.DictReader(stream)]
    logged = int(steps[-1]) if steps and steps[-1] else 0
    return Result(case, processes, step_of(next(iter(whole), None)), logged)


@contextmanager
def disk(path: Path, megabytes: int) -> Iterator[str]:
    """A disk of its own at `path`; gives why that was refused, or nothing."""
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(path)]
    try:
        answer = subprocess.run(mount, capture_output=True, text=True)
        why = answer.stderr.strip() if answer.returncode else ""
    except OSError as error:
        why = str(error)
    try:
        yield why
    finally:
        if not why:
            subprocess.run(["umount", "--lazy", str(path)], check=True)


def full(bench: Bench, file: str, processes: int) -> Result:
    """No space for the next checkpoint, or the next best/: one line; with space again, it resumes."""
    case, then = f"disk full at {file}", bench.unkilled[processes]
    newest, best = written(then.run / "checkpoints")[0], then.run / "best/model.safetensors"
    place = bench.cwd / f"disk-{file}-{processes}"
    with disk(place, 8 + 10 * newest.stat().st_size // 2**20) as why:
        if why:
            return Result(case, processes, skipped=f"skipped: {why}")
        there, more = bench._replace(cwd=place), [] if file == "draft" else ["checkpoint_every=3600"]
        job = there.job("full", processes, *more)
        job.seen(lambda: job.began() and (file == "best" or two_kinds(job.run)))
        fill(place / "filler", (newest if file == "draft" else best).stat().st_size // 2)
        wrong = refused(*job.ended(), "No space left on device")
        result = state(case, processes, job.run)
        wrong += ["no whole checkpoint"] if file == "draft" and not result.kept else []
        (place / "filler").unlink()
        return result._replace(wrong=wrong + there.wrong(there.job("full", processes, *more), processes))


def two_kinds(run: Path) -> bool:
    """Whether there are a checkpoint and a best/: what is written later only takes their place."""
    return bool(written(run / "checkpoints")) and (run / "best").exists()


def fill(path: Path, rest: int) -> None:
    """A file that leaves so many bytes of its disk."""
    space = os.statvfs(path.parent)
    with path.open("wb") as stream:
        os.posix_fallocate(stream.fileno(), 0, max(1, space.f_bavail * space.f_frsize - rest))


def refused(status: int, _: str, err: str, words: str) -> list[str]:
    """What is wrong with how a bad input was refused: exit status 2, and one line that says `words`."""
    wrong = [] if status == 2 else [f"exit status {status} instead of 2"]
    wrong += (
        [] if err.count("\n") == 1 else [f"{err.count(chr(10))} lines on stderr: ...{err.strip()[-200:]}"]
    )
    return wrong + ([] if words in err else [f"no {words!r} in {err.strip()[-200:]!r}"])


def flipped(path: Path) -> None:
    """One bit in the middle is another."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "with a flipped bit": flipped,
    "cut short": lambda path: os.truncate(path, path.stat().st_size // 2),
    "emptied": lambda path: os.truncate(path, 0),
    "now a text file": lambda path: path.write_text("a text\n"),
}


def interrupted(bench: Bench) -> Path:
    """A copy of a run that was killed when it had two checkpoints."""
    job = bench.job("damaged")
    job.seen(lambda: len(written(job.run / "checkpoints")) > 1)
    kill([job.process.pid])
    job.ended()
    return Path(shutil.copytree(job.run, bench.cwd / "interrupted"))


def damaged(bench: Bench, copy: Path, how: str) -> Result:
    """The newest checkpoint is not what was written: it is named, and the run resumes from the one before."""
    run = restored(bench, copy)
    path, before = written(run / "checkpoints")
    DAMAGES[how](path)
    again, case = bench.job(run.name), f"checkpoint {how}"
    result, (_, out, _) = state(case, 1, run), again.ended()
    named = [line for line in out.splitlines() if str(path) in line and "damaged" in line]
    wrong = [] if len(named) == 1 else [f"{len(named)} lines name it"]
    wrong += [] if f"resumes after step {step_of(before)}\n" in out else ["not from the one before"]
    return result._replace(wrong=wrong + bench.wrong(again))


def hopeless(bench: Bench, copy: Path) -> Result:
    """No checkpoint is whole: the way out is said, and nothing is touched."""
    run = restored(bench, copy)
    for path in written(run / "checkpoints"):
        flipped(path)
    then = {path: path.read_bytes() for path in run.rglob("*.*") if path.is_file()}
    wrong = refused(*bench.job(run.name).ended(), f"every checkpoint is damaged; delete {run}")
    touched = [path.name for path, content in then.items() if path.read_bytes() != content]
    return Result("every checkpoint damaged", 1, wrong=wrong + [f"{name} was touched" for name in touched])


def restored(bench: Bench, copy: Path) -> Path:
    """The interrupted run as it was."""
    run = bench.cwd / "outputs" / "damaged"
    shutil.rmtree(run)
    return Path(shutil.copytree(copy, run))


def unreadable(bench: Bench, file: str, how: str) -> Result:
    """A trained model that is not what was written: evaluate.py says so in one line."""
    name = f"{file.removesuffix('.safetensors')}-{'-'.join(how.split())}"
    model = Path(shutil.copytree(bench.unkilled[1].run / "best", bench.cwd / name))
    DAMAGES[how](model / file)
    words = [sys.executable, str(ROOT / "evaluate.py"), f"model={model}", "tasks=quickstart", f"run={name}"]
    ended = subprocess.run(words, cwd=bench.cwd, capture_output=True, text=True, timeout=LIMIT)
    return Result(f"best/{file} {how}", 1, wrong=refused(ended.returncode, "", ended.stderr, file))


def results(bench: Bench, options: argparse.Namespace) -> Iterator[Result]:
    """Every case, one after the other."""
    rng = random.Random(options.seed)
    for number in range(options.rounds):
        yield killed(bench, number, rng)
    for file, processes in [("draft", 1), ("best", 1), ("draft", 2)]:
        yield full(bench, file, processes)
    copy = interrupted(bench)
    for how in DAMAGES:
        yield damaged(bench, copy, how)
    yield hopeless(bench, copy)
    for file, how in itertools.product(["model.safetensors", "head.safetensors"], DAMAGES):
        yield unreadable(bench, file, how)


def studied(cwd: Path, options: argparse.Namespace) -> list[Result]:
    """Run all there is, with a line for each as it goes."""
    os.environ |= {"WHITENEDCSE_CACHE": str(cwd / "cache"), "HF_HUB_OFFLINE": "1"}
    bench, rows = Bench(cwd, TINY if options.quick else [], {}), []
    try:
        for processes in (1, 2):
            bench.unkilled[processes] = unkilled(bench, processes)
            print(f"unkilled, processes {processes}: {bench.unkilled[processes].seconds:.1f} s", flush=True)
        for result in results(bench, options):
            rows.append(result)
            print("  ".join(filter(None, result.cells())), flush=True)
    finally:
        kill([pid for pid, _ in marked(str(os.getpid()))])
    return rows


def summary(rows: Sequence[Result]) -> list[str]:
    """The totals."""
    kills = [row for row in rows if row.case.startswith("kill")]
    good = sum(not row.wrong and not row.skipped for row in rows)
    return [
        f"{len(kills)} kills, {sum(not row.wrong for row in kills)} equal in the end;"
        f" {sum(bool(row.draft) for row in kills)} fell into a write",
        f"{len(rows)} cases: {good} as promised, {sum(bool(row.wrong) for row in rows)} not,"
        f" {sum(bool(row.skipped) for row in rows)} skipped",
    ]


def main() -> None:
    """The table, and the status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=30, help="kills")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--quick", action="store_true", help="a tiny encoder and sixty steps")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to this file too")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # cleans up
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        rows = studied(Path(folder), options)
    columns = ["case", "processes", "kept", "logged", "draft", "gone [s]", "verdict"]
    grid = Grid("chaos", columns, [row.cells() for row in rows], summary(rows), {1, 2, 3, 5})
    say(grid)
    if options.json:
        facts = {"seed": options.seed, "quick": options.quick, **environment()}
        text = json.dumps(
            {**facts, "summary": summary(rows), "rows": [row._asdict() for row in rows]}, indent=2
        )
        options.json.write_text(text + "\n")
    sys.exit(any(row.wrong for row in rows))


if __name__ == "__main__":
    main()

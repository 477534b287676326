"""A full disk costs no work: python -m bench.disk [--quick] [--json FILE]

Each thing that the package writes is written to a file system of 20 MB on which an earlier one lies and only
a part of the needed space is free. The command must end with status 2 and one line that names the file or
folder and says how many bytes are free; no draft may be left, and every earlier file must be as it was. Then
there is space again, and the same command must succeed. Exit status 1 if anything is otherwise. Linux only;
only root can mount.

refused: of the tries, in how many the space did not suffice; the others succeeded    said: one of the lines
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.chaos import TINY, disk, fill, refused
from whitenedcse.compute import environment
from whitenedcse.console import Grid, say
from whitenedcse.files import checksum, digest, held

ROOT = Path(__file__).parents[1]
MEGABYTES = 20
PARTS = (0.0, 0.02, 0.3, 0.6, 0.9)  # of what a thing takes: the space that is left for it
TOLD = ("not written: No space left on device: ", " are free")
Start = Callable[..., Any]  # tests/programs.py: `started`


class Case(NamedTuple):
    """A thing that is written: its path on the disk, the command, and what it takes to make an earlier one.

    In the words DISK and WORK stand for folders. cache: whether the cache is on the disk. grows: files that a
    command writes one by one, which stay. again: of a command that does not resume, what it needs to succeed.
    """

    name: str
    path: str
    command: str
    earlier: str = ""
    cache: bool = False
    grows: tuple[str, ...] = ()
    again: str = ""


MODEL, TEXTS = "WORK/outputs/a/best", "WORK/corpus.txt"
EVALUATE = f"evaluate.py model={MODEL} tasks=quickstart"
RUN = ("run/*", "run/.hydra/*", "run/best/*", "run/best/1_Pooling/*")
CASES = [
    Case("token cache", "cache", "train.py trainer.max_steps=1 tasks=none", "data.max_length=8", cache=True),
    Case("vectors of layers", "cache/vectors", EVALUATE, "bf16=true", cache=True),
    Case("encode, npy", "out", f"whitenedcse encode {MODEL} {TEXTS} DISK/out --shard 500", grows=("out/*",)),
    Case("encode, parquet", "out", f"whitenedcse encode {MODEL} {TEXTS} DISK/out --shard 500 --to parquet",
         grows=("out/*",)),
    Case("index", "index", f"whitenedcse search build {MODEL} {TEXTS} DISK/index"),
    Case("part of an index", "index", f"whitenedcse search add DISK/index {TEXTS}",
         f"=whitenedcse search build {MODEL} WORK/few.txt DISK/index"),
    Case("transform", "map.safetensors", f"whitenedcse whiten fit {MODEL} {TEXTS} DISK/map.safetensors",
         "--kind pca"),
    *(Case(f"export, {to}", "export", f"whitenedcse export {MODEL} DISK/export --to {to}",
           "--unit" if to != "onnx" else "")  # of which a trace takes seconds
      for to in ("transformers", "sentence-transformers", "onnx")),
    Case("report", "", "whitenedcse report WORK/outputs/a WORK/outputs/b --out DISK/report.html",
         grows=("seeds.csv",)),
    Case("run of train.py", "run", "train.py trainer.max_steps=8 monitor.every=2 checkpoint_every=0"
         " logger=tensorboard hydra.run.dir=DISK/run", grows=RUN),
    Case("run of evaluate.py", "run", f"{EVALUATE} figures=[components] hydra.run.dir=DISK/run", grows=RUN,
         again="hydra.run.dir=DISK/run2"),
]  # fmt: skip


class Place(NamedTuple):
    """Where a case runs: a folder with models and texts, the small disk, how to start a command, settings."""

    work: Path
    disk: Path
    start: Start
    settings: Sequence[str]

    def run(self, command: str, more: str, cache: bool) -> Any:
        """Run a command to its end, with further words; or these alone, if they begin with `=`."""
        text = more[1:] if more.startswith("=") else f"{command} {more}"
        program, *words = text.replace("DISK", str(self.disk)).replace("WORK", str(self.work)).split()
        words += self.settings if program == "train.py" else []
        where = str(self.disk / "cache" if cache else self.work / "cache")
        return self.start(program, *words, cwd=self.work, WHITENEDCSE_CACHE=where)

    def done(self, command: str, more: str, cache: bool) -> None:
        """Run a command that must succeed."""
        ended = self.run(command, more, cache)
        if ended.returncode:
            raise RuntimeError(f"{command} {more}: status {ended.returncode}: {ended.stderr[-500:]}")

    def files(self) -> dict[str, str]:
        """The digest of each file on the disk, by its path there.

        Left out are locks, the filler, and what another start names otherwise: whole checkpoints of training,
        which have a digest in their names, and files of TensorBoard.
        """
        files = (
            path for path in self.disk.rglob("*") if path.is_file() and path.parent.name != "tensorboard"
        )
        named = {path.relative_to(self.disk).as_posix(): path for path in files if not whole_checkpoint(path)}
        return {
            name: checksum(path) for name, path in named.items() if not name.endswith((".lock", "filler"))
        }


def whole_checkpoint(path: Path) -> bool:
    """Whether a file is a checkpoint of training with the digest that its name has."""
    return path.name.startswith("step-") and path.stem.endswith(digest(path)[:16])


class Result(NamedTuple):
    """One row: how many tries there were, how many were refused, a line that was said, and what was wrong."""

    name: str
    tries: int = 0
    refused: int = 0
    said: str = ""
    wrong: Sequence[str] = ()
    skipped: str = ""

    def cells(self) -> list[str]:
        """The row as text."""
        verdict = self.skipped or "; ".join(self.wrong) or "nothing lost"
        return [self.name, f"{self.refused} of {self.tries}", self.said, verdict]


def prepared(work: Path, start: Start, settings: Sequence[str]) -> None:
    """Make what the commands read: two runs of train.py, and texts."""
    lines = (ROOT / "data/quickstart/sentences.txt").read_text(encoding="utf-8").splitlines(keepends=True)
    (work / "few.txt").write_text("".join(lines[:500]), encoding="utf-8")
    (work / "corpus.txt").write_text("".join(lines[:4000]), encoding="utf-8")
    place = Place(work, work, start, settings)
    for seed, name in enumerate("ab"):
        place.done(f"train.py trainer.max_steps=4 monitor.every=2 run={name} seed={seed}", "", False)


def tried(place: Place, case: Case, parts: Sequence[float]) -> Result:
    """Write the thing with enough space, then with each part of it, then with enough again."""
    with disk(place.disk, MEGABYTES) as why:
        if why:
            return Result(case.name, skipped=f"skipped: {why}")
        (place.disk / "mine").write_bytes(bytes(range(256)) * 16)
        if case.earlier:
            place.done(case.command, case.earlier, case.cache)
        before, copy = place.files(), place.work / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(place.disk, copy)
        had = held(place.disk)
        place.done(case.command, "", case.cache)
        after = place.files()
        takes = max(held(place.disk) - had, held(place.disk / case.path) // (1 + bool(case.earlier)))
        said, wrong = "", []
        refusals = 0
        for part in parts:
            emptied(place.disk)
            shutil.copytree(copy, place.disk, dirs_exist_ok=True)
            fill(place.disk / "filler", int(part * takes))
            ended = place.run(case.command, "", case.cache)
            if ended.returncode:
                refusals += 1
                wrong += [f"at {part:.0%}: {what}" for what in faults(place, case, ended, before, after)]
                said = ended.stderr.strip().replace(str(place.disk), "DISK").replace(str(place.work), "WORK")
            (place.disk / "filler").unlink()
        wrong += [] if refusals else ["it was never refused"]
        again = place.run(case.command, case.again, case.cache)
        wrong += [f"with space again: {again.stderr.strip()[-300:]}"] if again.returncode else []
        wrong += (
            [] if case.again else lists(place.files().keys() ^ after.keys(), "with space again other files:")
        )
        return Result(case.name, len(parts), refusals, said, wrong)


def faults(
    place: Place, case: Case, ended: Any, before: dict[str, str], after: dict[str, str]
) -> Iterator[str]:
    """What is wrong after a command that was refused: what it said, earlier files, and what it left."""
    now = place.files()
    yield from refused(ended.returncode, "", ended.stderr, str(place.disk / case.path))
    yield from (
        f"no {words!r} in {ended.stderr.strip()[-300:]!r}" for words in TOLD if words not in ended.stderr
    )
    yield from lists({name for name in before if now.get(name) != before[name]}, "no longer as they were:")
    new = {name for name in now.keys() - before.keys() if not any(Path(name).match(g) for g in case.grows)}
    yield from lists(new, "left:")
    yield from lists(now.keys() - before.keys() - after.keys() - new, "left, and not of a finished one:")


def lists(names: set[str], what: str) -> Iterator[str]:
    """The names in one text, if there are any."""
    if names:
        yield f"{what} {', '.join(sorted(names))}"


def emptied(folder: Path) -> None:
    """Delete all in a folder, but not the folder, on which a disk is mounted."""
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def main() -> None:
    """The table, and the status."""
    from tests.programs import started

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a tiny encoder, and two parts of the space")
    parser.add_argument("--only", default="", metavar="WORD", help="the cases with this word in their name")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to this file too")
    options = parser.parse_args()
    rows, settings = [], TINY[:3] if options.quick else ["encoder.width=64"]
    with tempfile.TemporaryDirectory(prefix="disk-") as folder:
        work = Path(folder) / "work"
        work.mkdir()
        prepared(work, started, settings)
        place = Place(work, Path(folder) / "disk", started, settings)
        for case in CASES:
            if options.only in case.name:
                rows.append(tried(place, case, PARTS[1:3] if options.quick else PARTS))
                place.disk.rmdir()
                print("  ".join(rows[-1].cells()), flush=True)
    good = sum(not row.wrong and not row.skipped for row in rows)
    skipped = sum(bool(row.skipped) for row in rows)
    notes = [f"{len(rows)} cases: {good} as promised, {len(rows) - good - skipped} not, {skipped} skipped"]
    say(Grid("disk", ["what", "refused", "said", "verdict"], [row.cells() for row in rows], notes))
    if options.json:
        text = json.dumps({**environment(), "rows": [row._asdict() for row in rows]}, indent=2)
        options.json.write_text(text + "\n", encoding="utf-8")
    sys.exit(any(row.wrong for row in rows))


if __name__ == "__main__":
    main()

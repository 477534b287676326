"""Make the runs of PLAN.md one after another: python results/claim/drive.py FROZEN OUTPUTS

FROZEN: a clone at commit 438c97b with an environment that runs train.py in it; the environment's python
runs this file. OUTPUTS: where the runs go. What runs.csv beside this file or OUTPUTS already hold is left
out, and a run that was killed resumes, so the command can be repeated at any time. `--list` prints what is
left, in order. The order is that of PLAN.md, so that at any stop the cells of a comparison have the same
seeds; but all seeds of the paper's comparison on minilm-mlm come before the other encoders. MLM_MINILM in the
environment: the encoder that +experiment=mlm_minilm made; its runs then come first.
"""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

HERE = Path(__file__).parent
PILOT, FRESH = (100, 101, 102), tuple(range(200, 220))
RATES = {"minilm": ("1e-4", "3e-4", "1e-3"), "scratch": ("3e-5", "1e-4", "3e-4"), "cls": ("5e-5",)}
RATES["mlm"] = RATES["minilm"]
EXPERIMENT = {"minilm": "lab_minilm", "cls": "lab_minilm", "scratch": "lab_pretrained", "mlm": "lab_minilm"}
SYSTEM = {
    ("none", 2): "simcse",
    ("none", 3): "multi_positive",
    ("sgw", 2): "sgw",
    ("sgw", 3): "whitenedcse",
}
CROPS = {"dropout": "null", "crops": "[0.5,1.0]"}
SENTENCES = {"minilm": 5_000, "mlm": 5_000, "cls": 10_000, "scratch": 10_000}  # 78 and 156 steps of 64
EVERY = {"minilm": 26, "mlm": 26, "cls": 52, "scratch": 52}  # steps: three evaluations of a run
BEHIND = 2.0  # points of STS-B dev below the cell's best rate so far, beyond which a rate is given up


class Cell(NamedTuple):
    """A system on a bed; "cls" is minilm-mlm by its first token, the others pool by the mean."""

    bed: str
    whitening: str
    v: int
    views: str


class Job(NamedTuple):
    """A run: its cell, its learning rate as text and its seed."""

    cell: Cell
    rate: str
    seed: int

    @property
    def name(self) -> str:
        """Its folder's name."""
        bed, whitening, v, views = self.cell
        return f"{bed}-{whitening}{v}-{views}-{self.rate}-{self.seed}"

    def command(self, folder: Path) -> list[str]:
        """The command of train.py."""
        cell = self.cell
        return [
            *(sys.executable, "train.py", f"+experiment={EXPERIMENT[cell.bed]}"),
            f"+system={SYSTEM[cell.whitening, cell.v]}",
            f"pooling={'cls' if cell.bed == 'cls' else 'mean'}",
            *(f"optim.lr={self.rate}", f"seed={self.seed}", f"data.crop={CROPS[cell.views]}"),
            *(f"data.sample={SENTENCES[cell.bed]}", f"monitor.every={EVERY[cell.bed]}", "tasks=none"),
            *("trainer.devices=1", "checkpoint_every=240", f"run={self.name}", f"hydra.run.dir={folder}"),
            *([f"encoder.path={os.environ['MLM_MINILM']}"] if cell.bed == "mlm" else []),
        ]


def paper(bed: str) -> list[Cell]:
    """The two cells of the paper's comparison: SimCSE and WhitenedCSE."""
    return [Cell(bed, "none", 2, "dropout"), Cell(bed, "sgw", 3, "dropout")]


def rest(bed: str) -> list[Cell]:
    """The other cells of the factorial, by what they are needed for."""
    return [Cell(bed, "none", 3, "dropout"), Cell(bed, "none", 3, "crops"), Cell(bed, "sgw", 3, "crops")]


def tried(cell: Cell, seeds: tuple[int, ...], scores: dict[str, float]) -> dict[str, float]:
    """The mean score of each rate of a cell with runs of all these seeds."""
    means = {}
    for rate in RATES[cell.bed]:
        values = [scores[name] for seed in seeds if (name := Job(cell, rate, seed).name) in scores]
        if seeds and len(values) == len(seeds):
            means[rate] = fmean(values)
    return means


def pilot(cells: list[Cell], seed: int, scores: dict[str, float]) -> Iterator[Job]:
    """A pilot seed of each cell, at each rate that the seeds before it have not ruled out."""
    before = PILOT[: PILOT.index(seed)]
    for cell in cells:
        means = tried(cell, before, scores)
        least = max(means.values(), default=0.0) - BEHIND
        left = [rate for rate in RATES[cell.bed] if not before or means.get(rate, 0.0) >= least]
        yield from (Job(cell, rate, seed) for rate in left)


def chosen(cell: Cell, scores: dict[str, float]) -> str | None:
    """The rate with the highest mean of STS-B dev over the pilot; None before all of it is there."""
    if len(RATES[cell.bed]) == 1:
        return RATES[cell.bed][0]
    if any(job.name not in scores for seed in PILOT for job in pilot([cell], seed, scores)):
        return None
    means = tried(cell, PILOT, scores)
    return max(means, key=lambda rate: means[rate])


def study(cells: list[Cell], seeds: tuple[int, ...], scores: dict[str, float]) -> Iterator[Job]:
    """Each cell at the rate that its pilot chose, seed by seed."""
    for seed in seeds:
        for cell in cells:
            if rate := chosen(cell, scores):
                yield Job(cell, rate, seed)


def plan(scores: dict[str, float]) -> Iterator[Job]:
    """Every run of PLAN.md in its order, as far as the pilots that are done decide."""
    beds, first = (*(["mlm"] if "MLM_MINILM" in os.environ else []), "minilm", "scratch"), FRESH[:8]
    for bed in beds:
        for seed in PILOT:
            yield from pilot(paper(bed), seed, scores)
        yield from study(paper(bed), FRESH if bed == "minilm" else first, scores)
    yield from study(paper("cls"), first, scores)
    yield from study([cell for bed in beds for cell in paper(bed)], FRESH[8:], scores)
    for bed in beds:
        for seed in PILOT:
            yield from pilot(rest(bed), seed, scores)
    yield from study([cell for bed in beds for cell in rest(bed)], FRESH, scores)


def done(outputs: Path) -> dict[str, float]:
    """The best STS-B dev score by name, of the runs in runs.csv and in `outputs`."""
    found = {}
    if (HERE / "runs.csv").is_file():
        with (HERE / "runs.csv").open() as file:
            found = {row["run"]: float(row["dev"]) for row in csv.DictReader(file) if row["seed"]}
    for file in outputs.glob("*/dev.json"):
        found[file.parent.name] = json.loads(file.read_text())["dev"]
    return found


def make(job: Job, frozen: Path, outputs: Path) -> None:
    """Train a run, score it if it is of the study, and tidy up; CalledProcessError where a step fails."""
    folder = outputs / job.name
    with (outputs / "drive.log").open("a") as log:
        began = time.time()
        print(time.strftime("%F %T", time.gmtime()), job.name, file=log, flush=True)
        if not (folder / "scores.json").is_file():
            subprocess.run(job.command(folder), cwd=frozen, stdout=log, stderr=log, check=True)
        trained = time.time()
        if job.seed not in PILOT:
            score(log, folder)
            untouched(job.cell.bed, frozen, outputs, log)
        seconds = [round(trained - began), round(time.time() - trained)]
        print(f"  trained in {seconds[0]} s, scored in {seconds[1]} s", file=log, flush=True)
    (folder / "dev.json").write_text(json.dumps({"dev": best(folder), "seconds": seconds}))
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)


def score(log: Any, *paths: Path) -> None:
    """Write claim.json of a run, or a file of its own of an encoder as it is; not with the frozen code."""
    command = [sys.executable, "-m", "results.claim.readouts", *paths]
    subprocess.run(command, cwd=HERE.parents[1], stdout=log, stderr=log, check=True)


def untouched(bed: str, frozen: Path, outputs: Path, log: Any) -> None:
    """Score the encoder of a bed before training, once; "cls" has the readouts of "minilm"."""
    file = outputs / f"untouched-{bed}.json"
    if bed == "cls":
        untouched("minilm", frozen, outputs, log)
        shutil.copy(outputs / "untouched-minilm.json", file)
    elif not file.is_file():
        minilm = Path(os.environ["WHITENEDCSE_DATA"]).parent / "models/minilm-mlm"
        encoders = {"scratch": frozen / "results/pretrain/encoder", "minilm": minilm}
        score(log, encoders.get(bed) or Path(os.environ["MLM_MINILM"]), file)


def best(folder: Path) -> float:
    """The best STS-B dev score of a run after training began."""
    with (folder / "metrics.csv").open() as file:
        return max(
            float(r["dev/spearman"]) for r in csv.DictReader(file) if r["dev/spearman"] and r["step"] != "0"
        )


def main(frozen: Path, outputs: Path, only_list: bool) -> None:
    """Make the first run of the plan that is not done, again and again; one that failed is tried twice."""
    outputs.mkdir(parents=True, exist_ok=True)
    failed: dict[Job, int] = {}
    while True:
        scores = done(outputs)
        left = [job for job in plan(scores) if job.name not in scores and failed.get(job, 0) < 2]
        if only_list:
            print(f"{len(scores)} runs are done; {len(left)} are left of those that are decided:")
            print("\n".join(job.name for job in left))
        if only_list or not left:
            return
        try:
            make(left[0], frozen, outputs)
        except subprocess.CalledProcessError as error:
            failed[left[0]] = failed.get(left[0], 0) + 1
            print(left[0].name, error, flush=True)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve(), "--list" in sys.argv)

"""Write runs.csv and readouts.csv beside this file: python -m results.claim.collect OUTPUTS

Rows of runs that are not in OUTPUTS, of an earlier session, are kept. runs.csv has a row for each run and
each untouched encoder: its settings, its best STS-B dev score and, where it was scored, the seven tests of
the vector that was trained, as it is ("raw"), and of the readout that STS-B dev chooses ("best").
readouts.csv has STS-B dev and the average of the seven tests for every readout of every run.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

HERE = Path(__file__).parent
TASKS = ("STS12", "STS13", "STS14", "STS15", "STS16", "STS-B", "SICK-R")
DEV = "STS-B/dev"
SETTINGS = ("bed", "system", "views", "rate", "seed")
COLUMNS = (
    *("run", *SETTINGS, "dev", "step", "commit", "train_seconds", "score_seconds"),
    *(f"raw {task}" for task in TASKS),
    *("best", "best dev", *(f"best {task}" for task in TASKS)),
)
READOUTS = ("run", "readout", "dev", "average")
Row = dict[str, Any]


def name(readout: Row) -> str:
    """A readout as text, such as "mean first+last k=128 shrinkage=0.3" or "cls last"."""
    made = f"{readout['pooling']} {readout['layers']}"
    if readout["k"]:
        made += f" k={readout['k']}"
    return made + (f" shrinkage={readout['shrinkage']}" if readout["shrinkage"] else "")


def tests(found: Sequence[Row], bed: str) -> Row:
    """The columns of the tests: of the vector that was trained, and of the readout that STS-B dev chooses."""
    raw = next(each for each in found if name(each) == f"{'cls' if bed == 'cls' else 'mean'} last")
    best = max(found, key=lambda each: each[DEV])
    made = {f"raw {task}": f"{raw[task]:.3f}" for task in TASKS}
    return (
        made
        | {"best": name(best), "best dev": f"{best[DEV]:.3f}"}
        | {f"best {task}": f"{best[task]:.3f}" for task in TASKS}
    )


def of_run(folder: Path) -> tuple[Row, list[Row]]:
    """The rows of a run for both files."""
    bed, system, views, *rate, seed = folder.name.split("-")
    done, scored = json.loads((folder / "dev.json").read_text()), folder / "claim.json"
    with (folder / "metrics.csv").open() as file:
        dev = {int(r["step"]): float(r["dev/spearman"]) for r in csv.DictReader(file) if r["dev/spearman"]}
    step = max((step for step in dev if step), key=lambda step: dev[step])
    row = {
        "run": folder.name,
        "bed": bed,
        "system": system,
        "views": views,
        "rate": "-".join(rate),
        "seed": seed,
    }
    row |= {"dev": f"{done['dev']:.3f}", "step": step}
    row["commit"] = json.loads((folder / "versions.json").read_text())["commit"][:7]
    row |= dict(zip(("train_seconds", "score_seconds"), done["seconds"], strict=True))
    if not scored.is_file():
        return row, []
    found = json.loads(scored.read_text())["readouts"]
    return row | tests(found, bed), every(folder.name, found)


def of_untouched(file: Path) -> tuple[Row, list[Row]]:
    """The rows of an encoder before training; "untouched-cls" is minilm-mlm read by its first token."""
    found, bed = json.loads(file.read_text())["readouts"], file.stem.removeprefix("untouched-")
    return {"run": file.stem, "bed": bed, "system": "untouched"} | tests(found, bed), every(file.stem, found)


def every(run: str, found: Iterable[Row]) -> list[Row]:
    """The rows of readouts.csv."""
    return [
        {
            "run": run,
            "readout": name(each),
            "dev": f"{each[DEV]:.2f}",
            "average": f"{fmean(each[task] for task in TASKS):.2f}",
        }
        for each in found
    ]


def read(file: Path) -> list[Row]:
    """The rows of a file, none where there is no file."""
    if not file.is_file():
        return []
    with file.open() as lines:
        return list(csv.DictReader(lines))


def write(file: Path, columns: Sequence[str], new: list[Row]) -> None:
    """Put the rows of new runs in place of those of the same runs, in the order of their names."""
    runs = {row["run"] for row in new}
    rows = [row for row in read(file) if row["run"] not in runs] + new
    with file.open("w", newline="") as out:
        lines = csv.DictWriter(out, columns, lineterminator="\n", restval="")
        lines.writeheader()
        lines.writerows(sorted(rows, key=lambda row: row["run"]))  # stable: readouts stay in their order


def main(outputs: Path) -> None:
    """Write both files."""
    made = [of_run(file.parent) for file in sorted(outputs.glob("*/dev.json"))]
    made += [of_untouched(file) for file in sorted(outputs.glob("untouched-*.json"))]
    write(HERE / "runs.csv", COLUMNS, [row for row, _ in made])
    write(HERE / "readouts.csv", READOUTS, [row for _, rows in made for row in rows])
    print(f"{len(made)} runs collected")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

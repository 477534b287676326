"""Averages of weights over seeds [1]: python -m results.claim.soups OUTPUTS

The best weights of the first 5 seeds of a system, of the next 5 and so on, and of all of them are averaged
and scored as a run is. soups.csv beside this file has a row for each, with the mean of its runs beside it.

[1] Wortsman et al., Model soups, arXiv:2203.05482, section 2: the uniform soup, here of one setting's seeds
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from transformers import AutoModel, AutoTokenizer

from results.claim.collect import HERE, TASKS, read, tests
from results.claim.drive import FRESH
from results.claim.readouts import scored

SIZE = 5  # seeds of a small soup
SYSTEMS = (
    "mlm-none2-dropout-1e-4",
    "mlm-none2-dropout-3e-4",
    "mlm-none3-dropout-3e-4",
    "mlm-sgw3-dropout-3e-4",
)
WAYS = ("raw", "best")  # as trained, and at the readout that STS-B dev chooses
COLUMNS = ("system", "seeds", *WAYS, *(f"runs {way}" for way in WAYS))


def averaged(runs: Sequence[Path], out: Path) -> None:
    """Write an encoder whose weights are the mean of those of the runs, in float32."""
    states = [AutoModel.from_pretrained(run / "best").float().state_dict() for run in runs]
    model = AutoModel.from_pretrained(runs[0] / "best").float()
    model.load_state_dict({name: sum(s[name] for s in states) / len(states) for name in states[0]})
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(runs[0] / "best").save_pretrained(out)


def main(outputs: Path) -> None:
    """Score the soups that soups.csv does not have yet."""
    file = HERE / "soups.csv"
    done = {(row["system"], row["seeds"]) for row in read(file)}
    by_run = {row["run"]: row for row in read(HERE / "runs.csv")}
    parts = [list(FRESH[at : at + SIZE]) for at in range(0, len(FRESH), SIZE)]
    for system, seeds in ((system, part) for part in [*parts, list(FRESH)] for system in SYSTEMS):
        named = f"{seeds[0]} to {seeds[-1]}"
        runs = [outputs / f"{system}-{seed}" for seed in seeds]
        if (system, named) in done or not all((run / "claim.json").is_file() for run in runs):
            continue
        averaged(runs, outputs / "soup")
        found = tests(scored(outputs / "soup"), "mlm")
        row = {"system": system, "seeds": named}
        for way in WAYS:
            row[way] = f"{fmean(float(found[f'{way} {task}']) for task in TASKS):.3f}"
            of_runs = [fmean(float(by_run[run.name][f"{way} {task}"]) for task in TASKS) for run in runs]
            row[f"runs {way}"] = f"{fmean(of_runs):.3f}"
        with file.open("a", newline="") as stream:
            lines = csv.DictWriter(stream, COLUMNS, lineterminator="\n")
            if not file.stat().st_size:
                lines.writeheader()
            lines.writerow(row)
        print(row, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

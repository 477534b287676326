"""One line for each score of the runs in outputs/, as seeds.csv beside this file has them."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

FIT = {"": "", "target": " (target)", "quickstart": " (training)"}

if __name__ == "__main__":
    lines = csv.writer(sys.stdout, lineterminator="\n")
    lines.writerow(["training", "seed", "vectors", "k", "spearman"])
    for file in sorted(Path("outputs").glob("eval-*/scores.json")):
        _, training, seed = file.parent.name.split("-")
        for row in json.loads(file.read_text())["rows"]:
            transform = row["postprocess"] or {"kind": "prefix", "k": 128}
            vectors = transform["kind"] + FIT[row["fit"]]
            lines.writerow([training, seed, vectors, transform["k"], f"{row['sts']['avg']['all']:.2f}"])

"""What the pretrained encoder scores before any contrastive training; results/conclusions.py writes it."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from statistics import fmean

from results.markdown import table, text
from results.study.contrasts import AFTER, AS_IS, TARGET, TASKS, score

HERE = Path(__file__).parent
POOLINGS = {"cls": "first token", "mean": "mean", "first-last": "mean of the first and the last layer"}


def pretrained() -> str:
    """The loss of masked words, while training and on held-out sentences."""
    loss = json.loads((HERE / "loss.json").read_text())
    with (HERE / "curve.csv").open() as file:
        curve = [(int(row["step"]), float(row["loss"])) for row in csv.DictReader(file)]
    last = curve[-1][0]
    means = [fmean(x for step, x in curve if low < step <= low + 1000) for low in (0, 1000, last - 1000)]
    return text(f"""
The training loss is {means[0]:.2f} nats on average over the first 1,000 steps, {means[1]:.2f} over the next
and {means[2]:.2f} over the last 1,000 (`curve.csv`). On {loss["sentences"]} sentences held out of training it
is {loss["loss"]:.4f} with the weights as they were trained, and {loss["loss_float16"]:.4f} with those of
`encoder/`, which are rounded to float16; the two vectors of a sentence have a cosine that is at most
{1 - loss["least_cosine"]:.0e} below 1 (`loss.json`).
""")


def untouched() -> str:
    """The table of STS scores by pooling, as it is and whitened."""
    lines = []
    for name, pooling in POOLINGS.items():
        scores = json.loads((HERE / f"{name}.json").read_text())
        for row in (AS_IS, TARGET, AFTER):
            cells = [*(score(scores, row, [task]) for task in TASKS), score(scores, row)]
            lines.append([f"{pooling}, {row}", *(f"{cell:.2f}" for cell in cells)])
    return table(["Spearman x 100, all pairs of a test together", *TASKS, "average"], lines)

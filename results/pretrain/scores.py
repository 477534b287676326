"""What the pretrained encoder scores before any contrastive training; results/tables.py writes it."""

from __future__ import annotations

import json
from pathlib import Path

from results.markdown import table
from results.study.contrasts import AFTER, AS_IS, TARGET, TASKS, score

HERE = Path(__file__).parent
POOLINGS = {"cls": "first token", "mean": "mean", "first-last": "mean of the first and the last layer"}


def untouched() -> str:
    """The table of STS scores by pooling, as it is and whitened."""
    lines = []
    for name, pooling in POOLINGS.items():
        scores = json.loads((HERE / f"{name}.json").read_text())
        for row in (AS_IS, TARGET, AFTER):
            cells = [*(score(scores, row, [task]) for task in TASKS), score(scores, row)]
            lines.append([f"{pooling}, {row}", *(f"{cell:.2f}" for cell in cells)])
    return table(["Spearman x 100, all pairs of a test together", *TASKS, "average"], lines)

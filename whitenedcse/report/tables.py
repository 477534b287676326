"""The table that a command ends with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

MEANS = ("all", "mean", "wmean")


def number(value: float | None) -> str:
    """Two digits, or a dash for what is undefined."""
    return "-" if value is None else f"{value:.2f}"


def training_table(dev: Mapping[str, Any]) -> Table:
    """`dev` of scores.json: each value before training and at the best checkpoint."""
    table = Table(title=f"dev set, {dev['n']} pairs, Spearman x 100")
    for column in ("", "before", f"best (step {dev['best_step']})"):
        table.add_column(column, justify="left" if not column else "right")
    for name, before in dev["values_before"].items():
        table.add_row(described(name), number(before), number(dev["values_best"][name]))
    return table


def described(name: str) -> str:
    """A logged name in words."""
    words = {
        "dev/spearman": "embedding as it is",
        "dev/alignment": "alignment (lower is better)",
        "dev/uniformity": "uniformity (lower is better)",
    }
    fitted, _, k = name.removeprefix("dev/whitened_on_").partition("_k")
    kind = {"dev": "dev sentences (transductive)", "corpus": "training sentences (inductive)"}
    return words.get(name) or f"whitened on {kind[fitted]}, k={k}"


def sts_table(scores: Mapping[str, Any]) -> Table:
    """scores.json of evaluate.py: a row a task, a column an aggregation, and why a value is undefined."""
    table = Table(title="Spearman x 100")
    for column in ("task", "n", *MEANS, ""):
        table.add_column(column, justify="left" if column in ("task", "") else "right")
    for name, task in scores["tasks"].items():
        table.add_row(name, str(task["n"]), *(number(task[mean]) for mean in MEANS), task.get("why", ""))
    table.add_section()
    average = scores["avg"]
    table.add_row("average", "", *(number(average[mean]) for mean in MEANS), average.get("why", ""))
    return table

"""What evaluate.py leaves: scores.json for people and programs, items.npz for tests between runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from whitenedcse.durable import read_json, write_json
from whitenedcse.evaluation.protocol import Row
from whitenedcse.evaluation.suite import Judgement, Plan, by_task
from whitenedcse.evaluation.tasks import setting


class Judged(NamedTuple):
    """A run of evaluate.py: its scores.json, and by "row/task" what each pair or text got."""

    path: Path
    scores: dict[str, Any]
    items: Mapping[str, NDArray[Any]]


def save(
    run: Path, facts: Mapping[str, Any], rows: Sequence[Row], judged: Sequence[Judgement], plan: Plan
) -> dict[str, Any]:
    """Write scores.json and items.npz; returns the former. `facts` has the model and its own pooling.

    items.npz holds arrays by name: gold/TASK (n,) and sizes/TASK of its subsets, and ROW/TASK, where ROW is a
    number: similarities (n,), or which of the tested texts were right.
    """
    lines = []
    for row, judgement in zip(rows, judged, strict=True):
        pooling = facts["pooling"] if row.pooling is None else f"{row.pooling} over layers {list(row.layers)}"
        settings = {"name": row.name, "pooling": pooling, "postprocess": dict(row.map or {}), "fit": row.fit}
        lines.append({**settings, "setting": setting(row.fit), **judgement.scores})
    items = {f"{i}/{task}": item for i, j in enumerate(judged) for task, item in j.items.items()}
    for task, pairs in plan.pairs.items():
        items[f"gold/{task}"] = np.concatenate([s.gold for s, _ in pairs])
        items[f"sizes/{task}"] = np.array([len(s.gold) for s, _ in pairs])
    np.savez_compressed(run / "items.npz", **items)  # type: ignore[arg-type]
    content = {**facts, "rows": lines}
    write_json(run / "scores.json", content)
    return content


def load(run: Path) -> Judged:
    """What `save` wrote. Raises FileNotFoundError or ValueError for another directory."""
    try:
        scores = read_json(run / "scores.json")
        with np.load(run / "items.npz") as arrays:
            items = dict(arrays)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{run} is no run of evaluate.py, which would hold {Path(error.filename).name}"
        ) from error
    return Judged(run, scores, items)


def series(scores: Mapping[str, Any]) -> dict[str, float]:
    """What the first row scored, as loggers name it: test/TASK and test/avg."""
    values = by_task(scores["rows"][0], scores["headline"])
    return {f"test/{name}": value for name, value in values.items() if value is not None}


def headline(scores: Mapping[str, Any]) -> float | None:
    """The number of the first row that a sweep would maximise."""
    return by_task(scores["rows"][0], scores["headline"])["avg"]

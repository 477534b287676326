"""Tasks by name: what `evaluate.py` and the monitor ask for."""

from __future__ import annotations

from pathlib import Path

from whitenedcse.data.sources import roots, senteval
from whitenedcse.evaluation.files import SUFFIXES
from whitenedcse.evaluation.sts import TASKS, Subset, read, read_pairs


def subsets(name: str) -> list[Subset]:
    """The scored pairs of a task, of a bundled set (quickstart/dev, quickstart/test), or of a file of pairs.

    Raises FileNotFoundError naming what was looked for, and where.
    """
    if name in TASKS:
        return read(name, senteval())
    candidates = [Path(name), *(root / f"{name}{suffix}" for root in roots() for suffix in SUFFIXES)]
    for path in candidates:
        if path.is_file():
            return [read_pairs(path)]
    looked = ", ".join(map(str, candidates))
    raise FileNotFoundError(f"no pairs {name!r}: neither a task ({', '.join(TASKS)}) nor a file ({looked})")

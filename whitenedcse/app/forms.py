"""What the files of a run hold, checked when they are read: a value of another type is refused by its name.

A form is a type; a tuple, of which one must fit; a list, which must have these elements, or with ... one or
more of its first; or a dictionary of forms by key, with "*" for all others. Any key may be missing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

LARGEST = 1e15  # no number of a run is larger
NUMBER, TEXT, WHOLE = (float, int), (str, None), (int, None)
SCORE = (*NUMBER, None)
ENDS = ([NUMBER, NUMBER], None)
MEANS: dict[str, Any] = {"all": SCORE, "mean": SCORE, "wmean": SCORE}
CORRELATION = MEANS | {"interval": dict.fromkeys(MEANS, ENDS), "pearson": MEANS, "n": int, "why": str}
ACCURACY = {"accuracy": NUMBER, "interval": ENDS, "seconds": NUMBER, "majority": NUMBER}
POSITIVES = ({"n": int, "of": int, "above": NUMBER, "scale": [NUMBER, NUMBER]}, None)
ROW = {
    "name": str,
    "setting": str,
    "pooling": str,
    "fit": str,
    "postprocess": ({"kind": TEXT, "k": WHOLE}, None),
    "sts": {"avg": CORRELATION, "tasks": {"*": CORRELATION}},
    "transfer": {"avg": SCORE, "interval": ENDS, "tasks": {"*": ACCURACY}},
    "rte": ACCURACY | {"confusion": {"*": {"*": int}}},
    "geometry": {
        **dict.fromkeys(("alignment", "uniformity", "mean_cosine", "isotropy", "effective_rank"), SCORE),
        **{"task": str, "positives": POSITIVES},
    },
}
DEV = {"before": SCORE, "best": SCORE, "best_step": int, "n": WHOLE, "positives": POSITIVES}
DEV |= dict.fromkeys(("values_before", "values_best"), {"*": SCORE})
ENCODER = ({"path": str, "commit": TEXT, "architecture": TEXT}, None)
ORIGIN = {"experiment": TEXT, "system": TEXT, "seed": WHOLE, "encoder": ENCODER}
FORMS: dict[str, Any] = {
    "scores.json": {"dev": DEV, "rows": [ROW, ...], "headline": str, "model": TEXT, "prompt": TEXT, **ORIGIN},
    "versions.json": {
        **{"command": str, "commit": TEXT, "packages": {"*": str}, "resumed": [{}, ...], **ORIGIN},
        "machine": {"cores": int, "gpus": ([], [str, ...])},
    },
    "config.yaml": {"seed": int, "data": {"corpus": TEXT}, "encoder": {"path": TEXT}},
}


def refuse_misfit(file: Path, content: Any) -> None:
    """Raise ValueError if one of a run's files, by its name, does not hold what it is read for."""
    if wrong := misfit(content, FORMS[file.name]):
        raise ValueError(f"{file}: {wrong}; copy or make it again")


def misfit(content: Any, form: Any, name: str = "") -> str:
    """What is wrong with the value of a name; "" for nothing.

    >>> misfit({"a": {"b": [1, "x"]}}, {"a": {"b": [int, ...]}})
    "a.b.1 is str 'x'"
    """
    if isinstance(form, tuple):
        wrong = [misfit(content, one, name) for one in form]
        return "" if "" in wrong else max(wrong, key=len)
    if isinstance(form, dict) and isinstance(content, dict):
        known = ((key, form.get(key, form.get("*"))) for key in content)
        inner = [(key, content[key], one) for key, one in known if one is not None]
    elif isinstance(form, list) and isinstance(content, list) and fits(len(content), form):
        inner = [(i, value, form[0]) for i, value in enumerate(content)]
    else:
        right = content is None if form is None else isinstance(form, type) and isinstance(content, form)
        large = isinstance(content, (int, float)) and abs(content) > LARGEST
        return "" if right and not large else f"{name or 'it'} is {said(content)}"
    below = (misfit(value, one, f"{name}.{key}".lstrip(".")) for key, value, one in inner)
    return next(filter(None, below), "")


def said(content: Any) -> str:
    """A value as text, shortened."""
    return f"{type(content).__name__} {content!r:.50}" if content is not None else "null"


def fits(length: int, form: list[Any]) -> bool:
    """Whether a list of this length can have the form."""
    return length > 0 if ... in form else length == len(form)

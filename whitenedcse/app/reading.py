"""Files that others may have written or damaged: each is read, or refused by name, and none runs code.

One function for each format, and one that checks what the files of a run hold. Whatever the class of the
library's error is, a file is refused with ValueError.
JSON is read by `durable.read_json`.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from whitenedcse.app.durable import DEPTH, Named, inside, parsing, read_json

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

SPEARMAN = "dev/spearman"  # the name of the dev score in metrics.csv
DAMAGED = "copy or download it again"
MOST_LAYERS, MOST = 1000, 2**24  # in a config.json: layers, and other numbers; more take minutes to build


def flat(config: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """All values of nested mappings by their dotted names."""
    values: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{path}{key}"
        values |= flat(value, f"{name}.") if isinstance(value, Mapping) else {name: value}
    return values


def changed(then: Mapping[str, Any], now: Mapping[str, Any], most: int = 2) -> str:
    """What nested mappings differ in: for at most so many values, "NAME was VALUE and is now VALUE".

    A mapping that is None in one of them is named first, without its values.
    """
    for name in sorted(then.keys() & now.keys()):
        if (before := isinstance(then[name], Mapping)) != (after := isinstance(now[name], Mapping)):
            what = f"{name} step{' (a whitening, or division by the length)' * (name == 'final')}"
            return f"there was {'a' if before else 'no'} {what} and is {'one' if after else 'none'} now"
    was, is_ = flat(then), flat(now)
    names = [name for name in sorted(was.keys() | is_.keys()) if was.get(name) != is_.get(name)]
    said = {n: n.replace("final.provenance.", "the whitening's ") for n in names[:most]}
    return "; ".join(f"{said[n]} was {was.get(n)!r} and is now {is_.get(n)!r}" for n in said)


def tensors(file: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file by name."""
    from safetensors.torch import load_file

    with parsing(file, DAMAGED):
        return load_file(file)


def metadata(file: Path, cure: str = DAMAGED) -> dict[str, str]:
    """The metadata of a safetensors file, after all its header was checked; cure: of a damaged file."""
    from safetensors import safe_open

    with parsing(file, cure), safe_open(file, "numpy") as opened:
        return opened.metadata() or {}


def array(file: Path) -> NDArray[Any]:
    """The array of a .npy file, memory-mapped; never one of objects, which would be a pickle."""
    import numpy as np

    with parsing(file, DAMAGED):
        return np.lib.format.open_memmap(file, mode="r")


def vectors(file: Path) -> NDArray[Any]:
    """The vectors (n, k) of a .npy file, or of the column `vector` of a .parquet file, memory-mapped."""
    if file.suffix == ".npy":
        return array(file)
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    with parsing(file, DAMAGED):
        column = pq.read_table(file, columns=["vector"], memory_map=True)["vector"].combine_chunks()
        return column.flatten().to_numpy().reshape(len(column), -1)


def arrays(file: Path) -> dict[str, NDArray[Any]]:
    """The arrays of a .npz file by name; none of objects."""
    import numpy as np

    with parsing(file, DAMAGED), np.load(file, allow_pickle=False) as content:
        found = Named(content)
        found.path = file
        return found


def whole_lines(path: Path) -> list[str]:
    """The lines of a file that is appended to, without a last one that a kill cut short; none if missing."""
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    return text[: text.rfind("\n") + 1].splitlines()


def table(file: Path) -> list[dict[str, str]]:
    """The lines of a CSV file that is appended to, by column; without a last one that a kill cut short."""
    with parsing(file, "delete its damaged lines"):
        header, *lines = [*csv.reader(whole_lines(file))] or [["step"]]
        for number, cells in enumerate(lines, 2):
            if len(cells) != len(header):
                raise ValueError(f"{file}:{number}: {len(cells)} fields, {len(header)} expected")
        return [dict(zip(header, cells, strict=True)) for cells in lines]


class Series(NamedTuple):
    """The values logged under one name: steps (n,) of the optimiser and finite values (n,)."""

    steps: NDArray[np.int64]
    values: NDArray[np.float64]

    def at(self, step: int) -> float | None:
        """The last value that was logged at a step; None if none was."""
        values = self.values[self.steps == step]
        return float(values[-1]) if len(values) else None

    @property
    def median(self) -> float:
        """The median of the values."""
        import numpy as np

        return float(np.median(self.values))


def series(file: Path) -> dict[str, Series]:
    """The columns of metrics.csv, finite values only. Raises ValueError, naming file and line, if damaged."""
    import numpy as np

    columns: dict[str, list[tuple[int, float]]] = {}
    for number, line in enumerate(table(file), 2):
        try:
            step = int(line.pop("step"))
            for name, cell in line.items():
                columns.setdefault(name, []).extend([(step, float(cell))] if cell else [])
        except (ValueError, KeyError) as error:
            raise ValueError(f"{file}:{number}: not a step and numbers by column: {error}") from None
    finite = {name: [(s, v) for s, v in pairs if np.isfinite(v)] for name, pairs in columns.items()}
    return {
        name: Series(np.array([s for s, _ in pairs]), np.array([v for _, v in pairs]))
        for name, pairs in finite.items()
        if pairs
    }


def dev(columns: Mapping[str, Series]) -> dict[str, Any] | None:
    """The equivalent of `dev` in scores.json of the evaluations so far; None before the first."""
    if SPEARMAN not in columns:
        return None
    steps, values = columns[SPEARMAN]
    best = int(values[1:].argmax()) + 1 if len(values) > 1 else 0
    summary = {"before": values[0], "best": values[best], "best_step": int(steps[best]), "n": None}
    scores = {name: column for name, column in columns.items() if name.startswith("dev/")}
    for key, step in (("values_before", steps[0]), ("values_best", steps[best])):
        summary[key] = {name: column.at(int(step)) for name, column in scores.items()}
    return summary


def by_task(row: Mapping[str, Any], headline: str) -> dict[str, float | None]:
    """The scores of each task in a row of scores.json and, last, "avg", the average a sweep maximises."""
    scores: dict[str, float | None] = {}
    if "rte" in row:
        scores |= {"RTE": row["rte"]["accuracy"], "avg": row["rte"]["accuracy"]}
    if "transfer" in row:
        scores |= {name: task["accuracy"] for name, task in row["transfer"]["tasks"].items()}
        scores["avg"] = row["transfer"]["avg"]
    if "sts" in row:
        scores |= {name: task[headline] for name, task in row["sts"]["tasks"].items()}
        scores["avg"] = row["sts"]["avg"][headline]
    return scores | {"avg": scores.pop("avg")}  # last


def refuse_vast(file: Path) -> None:
    """Raise ValueError for an encoder's config.json with numbers so large that building it does not end."""
    level = [("", read_json(file))] if file.is_file() else []
    while level:
        for name, value in level:
            most = MOST_LAYERS if re.search("layer|depth|block|expert|num_labels", name) else MOST
            if isinstance(value, (int, float)) and value > most and "theta" not in name:
                raise ValueError(f"{file}: {name}={value!s:.30} is above {most:,}; {DAMAGED}")
        level = [pair for name, value in level for pair in named(name, value)]


def named(name: str, value: Any) -> list[tuple[str, Any]]:
    """The values inside a value of JSON, each with its name, in a list that of the list."""
    return list(value.items()) if isinstance(value, dict) else [(name, one) for one in inside(value)]


def checkpoint(file: Path) -> dict[str, Any]:
    """The content of a file of torch.save: tensors and plain values; anything else in it is refused."""
    import torch

    with parsing(file, "delete it, and the run resumes from the one before"):
        content = torch.load(file, map_location="cpu", weights_only=True)
        return {**content}


def settings(file: Path) -> dict[str, Any]:
    """The content of a YAML file, unresolved.

    Aliases (*) of other parts are refused: a few lines of them may stand for billions of values.
    """
    import yaml  # type: ignore[import-untyped]
    from omegaconf import OmegaConf

    with parsing(file, "copy it again, or name a new run"):
        text = file.read_text(encoding="utf-8")
        depth = 0
        for event in yaml.parse(text, Loader=yaml.SafeLoader):  # lazily
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > DEPTH or isinstance(event, yaml.AliasEvent):
                raise ValueError(f"it has an alias (*), or values inside each other, over {DEPTH} deep")
        content = OmegaConf.to_container(OmegaConf.create(text)) if text.strip() else {}
        if not isinstance(content, Mapping):
            raise ValueError("it is not a mapping of names and values")
        return {str(name): value for name, value in content.items()}


# What the files of a run hold. A form is a type; a tuple, of which one must fit; a list, which must have
# these elements, or with ... one or more of its first; or a dictionary of forms by key, with "*" for all
# others. Any key may be missing.
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
NAMES: Any = ([], [str, ...])
ORIGIN = {"experiment": TEXT, "system": TEXT, "overrides": NAMES, "seed": WHOLE, "encoder": ENCODER}
FORMS: dict[str, Any] = {
    "scores.json": {"dev": DEV, "rows": [ROW, ...], "headline": str, "model": TEXT, "prompt": TEXT, **ORIGIN},
    "versions.json": {
        **{"command": str, "commit": TEXT, "packages": {"*": str}, "resumed": [{}, ...], **ORIGIN},
        "machine": {"cores": int, "gpus": NAMES},
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

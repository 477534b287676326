"""mteb's result files, without importing mteb: scores, experiments, predictions and numbers of items.

mteb writes results/MODEL/REVISION/TASK.json for each task. With `prediction_folder` it writes what a model
predicted for each pair or text, TASK_predictions.json, which is read from beside it. Neither has gold scores.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from whitenedcse.files import parsing, read_json


class Part(NamedTuple):
    """One split of one subset: its score, that of each experiment, what was predicted, and how many items.

    score: a share of 1. experiments: (e,), empty for none. predicted: (n,) similarities, or (e, n) labels, or
    None. n: None where it is not known. metric: "spearman" of pairs, otherwise by its name in mteb.
    """

    metric: str
    score: float
    experiments: list[float]
    predicted: NDArray[Any] | None
    n: int | None


class Scored(NamedTuple):
    """A task as evaluated with one model: the revision of its data, and its parts by split and subset."""

    revision: str
    parts: dict[tuple[str, str], Part]

    @property
    def score(self) -> float:
        """The mean of the parts' scores x 100, as in mteb's tables."""
        return 100 * float(np.mean([part.score for part in self.parts.values()]))


class Model(NamedTuple):
    """The results of one model: their directory, and its tasks by name."""

    path: Path
    tasks: dict[str, Scored]


def files(path: Path) -> list[Path]:
    """The result files of mteb in a directory, or else in the directories one or two levels below."""
    if (path / "scores.json").exists():  # a run of train.py or evaluate.py
        return []
    for pattern in ("*.json", "*/*.json", "*/*/*.json"):
        if found := [file for file in sorted(path.glob(pattern)) if is_result(file)]:
            return found
    return []


def is_result(file: Path) -> bool:
    """Whether a file is a task's result, rather than predictions or metadata."""
    if file.name == "model_meta.json" or file.stem.endswith("_predictions"):
        return False
    content = read_json(file, object)
    return isinstance(content, dict) and {"task_name", "scores", "dataset_revision"} <= content.keys()


def read(path: Path) -> Model:
    """The results in a directory. Raises ValueError unless they are of one model in one revision."""
    found = files(path)
    folders = sorted({str(file.parent) for file in found})
    if len(folders) != 1:
        if not folders:
            raise ValueError(f"compare: {path} has no results of mteb; compare them with no other runs")
        raise ValueError(f"compare: {path} has results in {' and '.join(folders)}; name one of them")
    return Model(path, dict(map(task, found)))


def task(file: Path) -> tuple[str, Scored]:
    """The name and the scores in a result file, with the predictions that lie beside it."""
    content = read_json(file)
    name, predictions, sizes = content["task_name"], predicted(file), described(content["task_name"])
    parts = {}
    with parsing(file, "or the predictions beside it are; copy both again"):
        for split, subsets in content["scores"].items():
            for scores in subsets:
                key = split, scores["hf_subset"]
                parts[key] = part(scores, predictions.get(key[1], {}).get(split), sizes.get(key))
    return name, Scored(content["dataset_revision"], parts)


def predicted(file: Path) -> dict[str, Any]:
    """The saved predictions of a task, by subset and split; empty for none.

    Raises ValueError for those of another revision of the model than the results.
    """
    saved, meta = file.with_name(f"{file.stem}_predictions.json"), file.with_name("model_meta.json")
    if not saved.exists():
        return {}
    content: dict[str, Any] = read_json(saved)
    with parsing(saved, "copy it again"):
        made = content.pop("mteb_model_meta", {}).get("revision")
    if meta.exists() and (known := read_json(meta).get("revision")) != made:
        raise ValueError(f"{saved} is of revision {made}, the results beside it are of {known}; move it away")
    return content


def described(name: str) -> dict[tuple[str, str], int]:
    """The number of pairs or texts by split and subset, from mteb's own files if it is installed."""
    sizes: dict[tuple[str, str], int] = {}
    for file in (path for path in statistics() if path.stem == name):
        for split, content in read_json(file).items():
            subsets = content.get("hf_subset_descriptive_stats") or {"default": content}
            sizes |= {(split, subset): known["num_samples"] for subset, known in subsets.items()}
    return sizes


@cache
def statistics() -> list[Path]:
    """mteb's own files that describe the data of its tasks; none if it is not installed."""
    spec = importlib.util.find_spec("mteb")  # which does not import it
    folders = (spec.submodule_search_locations or []) if spec else []
    return [path for root in folders for path in Path(root, "descriptive_stats").glob("*/*.json")]


def part(scores: Mapping[str, Any], saved: Any, n: int | None) -> Part:
    """A split of a subset from its entry in mteb's file, its saved predictions and its known size."""
    score = float(scores["main_score"])
    if "euclidean_spearman" in scores:  # mteb's class of STS tasks; summaries have no such score
        kind = "cosine_scores" if score == scores["cosine_spearman"] else "similarity_scores"
        similarity = np.array(saved[kind], float) if saved and saved.get(kind) else None
        return Part("spearman", score, [], similarity, n if similarity is None else len(similarity))
    experiments = [e for e in scores.get("scores_per_experiment", []) if isinstance(e, dict)]
    for metric in experiments[0] if experiments else []:
        values = [experiment[metric] for experiment in experiments]
        if abs(np.mean(values) - score) < 1e-5:  # mteb's files have six digits
            return Part(metric, score, values, labels(saved, len(values)), n)
    return Part("", score, [], None, n)


def labels(saved: Any, experiments: int) -> NDArray[Any] | None:
    """The predicted labels (e, n); None if there are none, or not one label a text in each experiment."""
    if not saved or len({np.shape(row) for row in saved}) != 1 or np.ndim(saved) != 2:
        return None
    return np.array(saved) if len(saved) == experiments else None

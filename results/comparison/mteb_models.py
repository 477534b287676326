"""mteb on STS and classification tasks made of SentEval's files, its predictions saved beside its results.

WHITENEDCSE_DATA=DATA python results/comparison/mteb_models.py FOLDER NAME=MODEL[:POOLING[:LAYER,LAYER]] ...

Results go to FOLDER/results/NAME/REVISION. The tasks are not mteb's own of like names: texts are SentEval's,
and the tests of MR, CR and SUBJ are 1,000 rows drawn here; mteb draws its training texts from the others.
"""

import sys
from pathlib import Path
from typing import Any

import mteb
import numpy as np
from datasets import Dataset, DatasetDict
from sentence_transformers import SentenceTransformer

from whitenedcse.evaluation.tasks import Labelled, Subset, subsets, task
from whitenedcse.model.checkpoint import digest_of
from whitenedcse.model.embedder import Embedder
from whitenedcse.model.head import Pooling
from whitenedcse.report.published import STS
from whitenedcse.serving.export import export

CLASSIFICATION = ("MR", "CR", "SUBJ", "SST2", "TREC")
TESTED = 1000  # rows, where a task has no test split


def made(name: str, kind: str, main: str, splits: dict[str, dict[str, list]]) -> mteb.AbsTask:
    """A task of mteb's class `kind` with these columns by split."""
    metadata = mteb.TaskMetadata(
        name=f"SentEval{name}",
        description=f"SentEval's {name}",
        dataset={"path": "local", "revision": "1"},
        type=kind,
        category="t2t",
        eval_splits=["test"],
        eval_langs=["eng-Latn"],
        main_score=main,
    )

    def load_data(self: mteb.AbsTask, **_: object) -> None:
        self.dataset = DatasetDict({split: Dataset.from_dict(columns) for split, columns in splits.items()})
        self.data_loaded = True

    parent = getattr(mteb.abstasks, f"AbsTask{kind}")
    return type(name, (parent,), {"metadata": metadata, "load_data": load_data})()


def pairs(name: str, parts: list[Subset]) -> mteb.AbsTask:
    """An STS task: all subsets together."""
    sides = {f"sentence{i + 1}": [text for s in parts for text in s[i + 1]] for i in range(2)}
    gold = [float(score) for s in parts for score in s.gold]
    return made(name, "STS", "cosine_spearman", {"test": {**sides, "score": gold}})


def texts(name: str, labelled: Labelled) -> mteb.AbsTask:
    """A classification task: the test split where there is one, otherwise rows drawn with seed 0."""
    n = len(labelled.labels)
    test = np.isin(np.arange(n), np.random.default_rng(0).choice(n, TESTED, replace=False))
    if labelled.split is not None:
        test = labelled.split == "test"
    rows = {"train": np.flatnonzero(~test), "test": np.flatnonzero(test)}
    columns = {
        split: {"text": [labelled.columns[0][i] for i in at], "label": labelled.labels[at].tolist()}
        for split, at in rows.items()
    }
    return made(name, "Classification", "accuracy", columns)


def encoder(name: str, model: str, folder: Path) -> Any:
    """The encoder at MODEL, exported to a folder and read by mteb from there, under this name."""
    path, *asked = model.split(":")
    pooling = None
    if asked:
        layers = [int(layer) for layer in asked[1].split(",")] if asked[1:] else [-1]
        pooling = Pooling(kind=asked[0], layers=layers)
    embedder = Embedder.load(path, pooling)
    export(embedder, folder, "sentence-transformers")
    adapted = mteb.SentenceTransformerEncoderWrapper(SentenceTransformer(str(folder)))
    known = {"name": name, "revision": digest_of(embedder)}
    adapted.mteb_model_meta = adapted.mteb_model_meta.model_copy(update=known)
    return adapted


def main() -> None:
    """Evaluate every encoder on every task."""
    folder, *encoders = sys.argv[1:]
    tasks = [pairs(name, subsets(name)) for name in STS]
    tasks += [texts(name, task(name)) for name in CLASSIFICATION]
    for name, model in (argument.split("=", 1) for argument in encoders):
        adapted = encoder(name, model, Path(folder, "exports", name))
        saved = Path(folder, "results", name, adapted.mteb_model_meta.revision)
        mteb.evaluate(
            adapted,
            tasks,
            cache=mteb.ResultCache(folder),
            prediction_folder=saved,
            show_progress_bar=False,
        )


if __name__ == "__main__":
    main()

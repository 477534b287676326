"""The untouched encoder on the seven STS tests, raw and whitened: what training has to beat.

WHITENEDCSE_DATA=DATA python results/wiki_mini/baselines.py DATA/../models/minilm-mlm > baselines.csv
"""

import argparse
import csv
import sys
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from whitenedcse.data.corpus import Corpus, read
from whitenedcse.data.sources import located
from whitenedcse.evaluation.postprocess import Postprocess, ladder
from whitenedcse.evaluation.scores import Index, scores_of
from whitenedcse.evaluation.suite import plan
from whitenedcse.evaluation.tasks import subsets
from whitenedcse.model.embedder import Embedder
from whitenedcse.model.head import Pooling

TESTS = ("STS12", "STS13", "STS14", "STS15", "STS16", "STS-B", "SICK-R")
POOLINGS = {"cls": ("cls", [-1]), "mean": ("mean", [-1]), "first_last": ("mean", [1, -1])}
Vectors = NDArray[np.floating]


def average(scores: dict[str, float]) -> float:
    """Of the seven tests."""
    return sum(scores.values()) / len(scores)


def of_each(vectors: Vectors, index: Index) -> dict[str, float]:
    """Spearman x 100 over all pairs of each test."""
    return {name: task["all"] for name, task in scores_of(vectors, index)["tasks"].items()}


def variants(x: Vectors, corpus: Vectors, index: Index) -> Iterator[tuple[str, float]]:
    """Raw, whitened on training sentences, and each test whitened on its own sentences, at every k."""
    yield "raw", average(of_each(x, index))
    inductive = Postprocess(kind="whitening").fit(corpus).transform(x)
    for k in ladder(x.shape[1]):
        yield f"whitened on training sentences, k={k}", average(of_each(inductive[:, :k], index))
    own = {}
    for name, pairs in index.items():
        rows = np.unique(np.concatenate([rows for _, rows in pairs], axis=1))
        own[name] = np.zeros(x.shape)
        own[name][rows] = Postprocess(kind="whitening").fit(x[rows]).transform(x[rows])
    for k in ladder(x.shape[1]):
        scores = {name: of_each(own[name][:, :k], {name: index[name]})[name] for name in index}
        yield f"whitened on the test's own sentences, k={k}", average(scores)


def main() -> None:
    """One csv row for each pooling and variant."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    model = parser.parse_args().model
    sentences, index, *_ = plan({name: subsets(name) for name in TESTS})
    rows, _ = read(Corpus(str(located("wiki1m_like")), sample=4096))
    table = csv.writer(sys.stdout)
    table.writerow(["pooling", "variant", "average"])
    for name, (kind, layers) in POOLINGS.items():
        embedder = Embedder.load(model, Pooling(kind=kind, layers=layers))
        x, corpus = embedder.encode(sentences), embedder.encode([row[0] for row in rows])
        for variant, score in variants(x, corpus, index):
            table.writerow([name, variant, f"{score:.2f}"])
            sys.stdout.flush()


if __name__ == "__main__":
    main()

"""Chosen readouts on other tasks: python results/readout/uses.py MODEL NAME OUT TEXTS [TASKS]

NAME.json beside this file says which readouts STS-B dev chose. They, each pooling of the last layer as it is
and the literature's recipe, all fitted to TEXTS Wikipedia sentences, are scored on TASKS (all):

- retrieval: a query is a hypothesis of SNLI's dev and test sets that one premise alone entails; it looks for
  that premise among 20,000 captions (all such premises, other premises of SNLI, and premises of MPE drawn at
  random) by cosine. Scores are the MRR@10 and the recall@1, x 100;
- MRPC, CR, TREC, SUBJ, MR, MPQA: the accuracy x 100 of the logistic regression of `evaluate.py`.

Differences to each pooling as it is have 95 % intervals over the queries, or over the tests' texts. A task
that the file OUT has is not scored again.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whitenedcse import Embedder
from whitenedcse.data import sources
from whitenedcse.data.corpus import blocks, texts
from whitenedcse.evaluation.classifiers import lbfgs
from whitenedcse.evaluation.readout import Map, Readout, Spectrum, layer_sets, maps
from whitenedcse.evaluation.scores import accuracy, features
from whitenedcse.evaluation.statistics import interval, resamples
from whitenedcse.evaluation.tasks import Labelled, task
from whitenedcse.serving.readout import BLOCK, every_layer, matrix, moments_of

CANDIDATES, DRAWS = 20_000, 500
TRANSFER = ("MRPC", "CR", "TREC", "SUBJ", "MR", "MPQA")  # SST2, of 70,000 texts, would take as long as these
Vectors = dict[str, NDArray[np.float32]]


class Systems:
    """The readouts of an encoder as functions from texts to vectors, by their names."""

    def __init__(self, embedder: Embedder, chosen: Sequence[str], corpus: Sequence[str]) -> None:
        d, last = embedder.encoder.width, embedder.encoder.depth
        self.embedder, self.kinds = embedder, (embedder.encoder.one_token, "mean")
        moments = moments_of(embedder, corpus, self.kinds)
        self.own = [Readout(kind, (last,), Map("none")) for kind in self.kinds]
        literature = [Readout("mean", (1, last), Map("whitening", k)) for k in (d, min(256, d))]
        every = (
            Readout(kind, layers, map_)
            for kind in self.kinds
            for layers in layer_sets(last + 1)
            for map_ in maps(d, len(corpus))
        )
        named = [one for one in every if str(one) in chosen]
        assert {*chosen} == {str(one) for one in named}
        self.readouts = {str(one): one for one in [*self.own, *literature, *named]}
        self.maps: dict[str, Any] = {}
        for name, one in self.readouts.items():
            self.maps[name] = (0, np.eye(d))
            if one.map.kind != "none":
                spectrum = Spectrum.of(*moments[one.pooling].of(one.layers))
                self.maps[name] = (spectrum.mean, matrix(one.map, spectrum))

    def vectors(self, sentences: Sequence[str]) -> Vectors:
        """Each system's vectors of n sentences: (n, k)."""
        found = defaultdict(list)
        for block in blocks(sentences, BLOCK):
            seen = every_layer(self.embedder, block, self.kinds).kinds
            for name, one in self.readouts.items():
                mean, of = self.maps[name]
                x = seen[one.pooling][list(one.layers)].mean(axis=0)
                found[name].append(((x - mean) @ of).astype(np.float32))
        return {name: np.concatenate(parts) for name, parts in found.items()}


def retrieval_set(folder: Path) -> tuple[list[str], list[str], NDArray[np.intp]]:
    """Queries, candidates, and the place of each query's partner among these."""
    pairs: dict[str, list[str]] = {name: [] for name in ("s1", "s2", "labels")}
    for name, column in pairs.items():
        for part in ("dev", "test"):
            column += [line.strip() for line in (folder / f"SNLI/{name}.{part}").read_text().splitlines()]
    partners = defaultdict(set)
    for premise, hypothesis, label in zip(*pairs.values(), strict=True):
        if label == "entailment":
            partners[hypothesis].add(premise)
    premises = {*pairs["s1"]}
    queries = sorted(h for h, entailing in partners.items() if len(entailing) == 1 and h not in premises)
    asked = [next(iter(partners[query])) for query in queries]
    captions = {
        cell.partition("/")[2]
        for part in ("train", "dev", "test")
        for row in (folder / f"MPE/mpe_{part}.txt").read_text().splitlines()[1:]
        for cell in row.split("\t")[1:5]
    } - {"", *queries}
    more = np.random.default_rng(0).permutation(sorted(captions - premises))
    candidates = [*sorted(premises), *more.tolist()][:CANDIDATES]
    place = {text: i for i, text in enumerate(candidates)}
    return queries, candidates, np.array([place[premise] for premise in asked])


def retrieval(systems: Systems) -> dict[str, Any]:
    """MRR@10 and recall@1 of each system."""
    queries, candidates, partner = retrieval_set(Path(sources.roots()[0]) / "nli")
    ranks = {}
    for name, x in systems.vectors([*queries, *candidates]).items():
        unit = x / np.linalg.norm(x, axis=1, keepdims=True)
        cosines = unit[: len(queries)] @ unit[len(queries) :].T
        ranks[name] = (cosines >= cosines[np.arange(len(queries)), partner][:, None]).sum(axis=1)
    counts = resamples(len(queries), DRAWS, seed=0)
    return {
        "queries": len(queries),
        "candidates": len(candidates),
        "mrr": compared(systems, {n: 100 * (r <= 10) / r for n, r in ranks.items()}, counts),
        "recall": compared(systems, {n: 100.0 * (r <= 1) for n, r in ranks.items()}, counts),
    }


def transfer(name: str) -> Callable[[Systems], dict[str, Any]]:
    """A function that gives the accuracy of each system on a task."""

    def scored(systems: Systems) -> dict[str, Any]:
        given = task(name)
        assert isinstance(given, Labelled)
        sides = [systems.vectors(column) for column in given.columns]
        correct = {
            system: 100.0 * accuracy(given, features([side[system] for side in sides]), lbfgs)["correct"]
            for system in systems.readouts
        }
        return compared(systems, correct, resamples(len(given.gold), DRAWS, seed=0))

    return scored


def compared(systems: Systems, scores: Vectors, counts: NDArray[np.int32]) -> dict[str, Any]:
    """Means of scores (n,) by system, and the difference to each of `own`: its value, low and high."""
    found: dict[str, Any] = {}
    for name, x in scores.items():
        found[name] = {"score": float(x.mean())}
        for own in map(str, systems.own):
            apart = x - scores[own]
            found[name][own] = [float(apart.mean()), *(interval(counts @ apart / len(apart)) or ())]
    return found


def main(model: str, encoder: str, out: str, size: int, tasks: Sequence[str]) -> None:
    """Write what the readouts that were chosen for an encoder give on other tasks."""
    study = json.loads((Path(__file__).parent / f"{encoder}.json").read_text())
    chosen = [study[kind]["dev"]["readout"] for kind in ("cls", "mean")]
    path, found = Path(out), {}
    if path.is_file():
        found = json.loads(path.read_text())
    corpus = list(texts(sources.named("wiki1m_like", (), size)))
    systems = Systems(Embedder.load(model), chosen, corpus)
    scored = {"retrieval": retrieval, **{name: transfer(name) for name in TRANSFER}}
    for name in tasks or scored:
        if name not in found:
            found[name] = {"texts": size, **scored[name](systems)}
            path.write_text(json.dumps(found, indent=1) + "\n")
            print(name, found[name], flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:4], int(sys.argv[4]), sys.argv[5:])

"""What choosing the readout of an encoder brings: python results/readout/study.py MODEL OUT.json [TEXTS]

Every readout of the command `whitenedcse readout` is scored on STS-B dev and on the seven STS tests. It is
chosen on all pairs of STS-B dev, and on random parts of them, by the command's own rule, which leaves the
model as it is where zero is inside the interval of the gain. The oracle is the readout with the best average
over the tests. "Literature" is the mean of the first and the last layer, whitened, of all or 256 components
(WhiteningBERT and BERT-whitening). Whitening is fitted to TEXTS (20,000) Wikipedia sentences.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whitenedcse import Embedder
from whitenedcse.data import sources
from whitenedcse.data.corpus import texts
from whitenedcse.evaluation.layers import spearman_columns
from whitenedcse.evaluation.readout import Map, Readout, Spectrum, choice, maps, similarities
from whitenedcse.evaluation.statistics import average_draws, interval, resamples, weighted_spearman
from whitenedcse.evaluation.suite import plan
from whitenedcse.evaluation.tasks import subsets
from whitenedcse.serving.readout import every_layer, moments_of

TESTS = ("STS12", "STS13", "STS14", "STS15", "STS16", "STS-B", "SICK-R")
SIZES, DRAWS = (50, 100, 200, 400), 10  # pairs of STS-B dev that choose, and random parts of each size
Floats = NDArray[np.float64]


class Study:
    """All readouts of an encoder with their scores. gold: by task. at: the pairs of a task among all.

    dev: (1500, m) cosines on STS-B dev. tests: (7, m) Spearman x 100.
    """

    def __init__(self, embedder: Embedder, corpus: Sequence[str]) -> None:
        self.kinds = (embedder.encoder.one_token, "mean")
        self.moments = moments_of(embedder, corpus, self.kinds)
        sentences, index, *_ = plan({name: subsets(name) for name in ("STS-B/dev", *TESTS)})
        self.gold = {name: np.concatenate([s.gold for s, _ in parts]) for name, parts in index.items()}
        ends = np.cumsum([len(gold) for gold in self.gold.values()])
        self.at = {
            name: slice(end - len(self.gold[name]), end) for name, end in zip(self.gold, ends, strict=True)
        }
        self.rows = np.concatenate([rows for parts in index.values() for _, rows in parts], axis=1)
        self.seen = every_layer(embedder, sentences, self.kinds).kinds
        d, self.last = embedder.encoder.width, embedder.encoder.depth
        both = Map("whitening", d), Map("whitening", min(256, d))
        self.of_literature = [Readout("mean", (1, self.last), map_) for map_ in both]
        self.maps = maps(d, self.moments["mean"].n)
        self.tried: list[Readout] = []
        dev, tests = [], []
        for readouts, cosines in similarities(self.seen, self.moments, self.rows, self.maps):
            self.tried += readouts
            dev.append(cosines[self.at["STS-B/dev"]].astype(np.float32))
            tests.append(self.scores(cosines))
        self.dev, self.tests = np.concatenate(dev, axis=1), np.concatenate(tests, axis=1)
        self.sizes = [len(one.layers) for one in self.tried]

    def scores(self, cosines: Floats) -> Floats:
        """Spearman x 100 on the tests, (7, m), from cosines of all pairs, (n, m)."""
        return np.stack([spearman_columns(self.gold[name], cosines[self.at[name]]) for name in TESTS])

    def cosines(self, one: Readout) -> Floats:
        """The cosines of all pairs in one readout, (n,)."""
        planes_ = {one.pooling: self.seen[one.pooling]}
        ((_, found),) = similarities(planes_, self.moments, self.rows, [one.map], [one.layers])
        return found[:, 0]

    def average(self, one: Readout) -> float:
        """The tests' average of one readout."""
        return float(self.scores(self.cosines(one)[:, None]).mean())

    def gain(self, one: Readout, other: Readout, draws: int = 500) -> dict[str, Any]:
        """The difference of the tests' average, with its 95 % interval over the tests' pairs."""
        both, by_task = (self.cosines(one), self.cosines(other)), {}
        for seed, name in enumerate(TESTS):
            counts = resamples(len(self.gold[name]), draws, seed)
            ours, theirs = (weighted_spearman(self.gold[name], x[self.at[name]], counts) for x in both)
            by_task[name] = ours - theirs
        return {"gain": self.average(one) - self.average(other), "interval": interval(average_draws(by_task))}

    def of(self, kind: str) -> dict[str, Any]:
        """What an encoder that is pooled by `kind` in its last layer gains."""
        own = self.tried.index(Readout(kind, (self.last,), Map("none")))
        average = self.tests.mean(axis=0)
        gold, mine = self.gold["STS-B/dev"], self.dev[:, own].astype(np.float64)
        judged = choice(gold, mine, self.dev, self.sizes)
        best = judged.best if judged.shown else own
        oracle = int(np.nanargmax(average))
        found: dict[str, Any] = {
            "own": average[own],
            "dev": {"readout": str(self.tried[best]), "average": average[best], "shown": judged.shown,
                    **self.gain(self.tried[best], self.tried[own])},
            "oracle": {"readout": str(self.tried[oracle]), "average": average[oracle]},
            "literature": {str(one.map): self.average(one) for one in self.of_literature},
        }  # fmt: skip
        found["pairs"] = {
            n: [self.by_some(n, seed, mine, own, average) for seed in range(DRAWS)] for n in SIZES
        }
        return found

    def by_some(self, n: int, seed: int, mine: Floats, own: int, average: Floats) -> dict[str, Any]:
        """The tests' average of the readout that n pairs of STS-B dev choose, by the rule and without it."""
        at = np.random.default_rng(seed).choice(len(mine), n, replace=False)
        judged = choice(self.gold["STS-B/dev"][at], mine[at], self.dev[at], self.sizes, draws=200)
        best = judged.best
        return {
            "rule": average[best if judged.shown else own],
            "always": average[best],
            "shown": judged.shown,
        }

    def facts(self) -> dict[str, dict[str, float]]:
        """What is known of the last layer without labels."""
        return {k: Spectrum.of(*self.moments[k].of([self.last])).facts() for k in self.kinds}


def main(model: str, out: str, sample: int = 20_000) -> None:
    """Write the study of an encoder."""
    study = Study(Embedder.load(model), list(texts(sources.named("wiki1m_like", (), sample))))
    content = {"texts": study.moments["mean"].n, "readouts": len(study.tried), "facts": study.facts()}
    content |= {kind: study.of(kind) for kind in study.kinds}
    Path(out).write_text(json.dumps(content, indent=1, default=float) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))

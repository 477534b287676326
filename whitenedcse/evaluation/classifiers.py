"""Two linear classifiers on frozen vectors: one that is fast, and one that goes SentEval's way.

n: rows    d: features    c: classes    p: pairs of training and development rows    r: weight decays

Both are called as classify(x, y, split): x (n, d), y (n,) in 0..c-1, split None for cross-validation or (n,)
of "train", "dev" and "test". They return the predictions, (n,) or those of the test rows in order, and the
accuracy x 100 on the rows that the choice of a hyper-parameter was made on. Test rows choose nothing.

[1] Conneau and Kiela, SentEval, arXiv:1803.05449; its senteval/tools/validation.py and classifier.py
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold
from threadpoolctl import threadpool_limits

from whitenedcse.evaluation.linear import FOLDS, SEED, Classify, Data, Labels, Pair, Rows, Split, fitted

STRENGTHS = (1e-3, 1e-2, 1e-1, 1.0)  # C of `lbfgs`; no task was best at 10 with all-MiniLM-L6-v2
TOLERANCE = 1e-4  # of `lbfgs`: at 1e-3 bag-of-words vectors lost 1.4 points on MRPC
DECAYS = (1e-5, 1e-4, 1e-3, 1e-2)  # from here on `senteval`, as in [1]
HELD_OUT = 0.05


class Case(NamedTuple):
    """Rows to train on, rows to predict, and the pairs within the former by which to choose."""

    train: Rows
    test: Rows
    pairs: list[Pair]


def classifier(name: str) -> Classify:
    """The classifier of that name."""
    known: dict[str, Classify] = {"lbfgs": lbfgs, "senteval": senteval}
    if name not in known:
        raise ValueError(f"no classifier {name!r}; there are {' and '.join(known)}")
    return known[name]


def _folds(y: Labels, rows: Rows) -> list[Pair]:
    folds = StratifiedKFold(FOLDS, shuffle=True, random_state=SEED).split(rows, y[rows])
    return [(rows[train], rows[test]) for train, test in folds]


def _cases(y: Labels, split: Split) -> list[Case]:
    if split is None:
        return [Case(train, test, _folds(y, train)) for train, test in _folds(y, np.arange(len(y)))]
    train, dev, test = (np.flatnonzero(split == part) for part in ("train", "dev", "test"))
    return [Case(train, test, [(train, dev)] if dev.size else _folds(y, train))]


def _in_order(cases: Sequence[Case], predictions: Sequence[NDArray[Any]]) -> NDArray[Any]:
    return np.concatenate(predictions)[np.argsort(np.concatenate([case.test for case in cases]))]


def lbfgs(x: NDArray[Any], y: Labels, split: Split) -> tuple[NDArray[Any], float]:
    """Logistic regression by scikit-learn, C chosen on the dev rows, or else on a stratified tenth of train.

    x is divided by one number, its root mean square over the training rows: then C means the same at
    any norm. The chosen C is fitted to all of train. Float32 may miss the tolerance, unwarned.
    """
    predictions, scores, cases = [], [], _cases(y, split)
    for train, test, pairs in cases:
        scaled = np.asarray(x / math.sqrt(np.square(x[train], dtype=np.float64).mean() or 1), np.float32)
        rows, dev = pairs[0]
        model = LogisticRegression(tol=TOLERANCE, max_iter=1000, warm_start=True)
        quiet = warnings.catch_warnings(action="ignore", category=ConvergenceWarning)
        with quiet, threadpool_limits(1):  # on two busy cores, two threads took ten times as long
            fits = (model.set_params(C=c).fit(scaled[rows], y[rows]) for c in STRENGTHS)
            found = [fit.score(scaled[dev], y[dev]) for fit in fits]
            model.set_params(C=STRENGTHS[int(np.argmax(found))]).fit(scaled[train], y[train])
        predictions.append(model.predict(scaled[test]))
        scores.append(max(found))
    return _in_order(cases, predictions), 100 * float(np.mean(scores))


def senteval(x: NDArray[Any], y: Labels, split: Split) -> tuple[NDArray[Any], float]:
    """One linear layer by Adam with early stopping, its weight decay chosen by ten inner folds [1].

    What SentEval trains one by one, 410 classifiers in a cross-validated task, is trained together: they
    share seed, initial weights and, among equally many rows, permutations. With dev rows, [1] trains the
    chosen one again, to the same weights. It computes on CUDA where there is one.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    data, cases = Data.on(device, x, y), _cases(y, split)
    grid = torch.tensor(DECAYS, device=device)
    pairs = [pair for case in cases for pair in case.pairs]
    weights, found = fitted(data, pairs, grid.expand(len(pairs), -1))
    scores = np.round(100 * found.reshape(len(cases), -1, len(DECAYS)).mean(axis=1), 2)  # as [1] rounds
    chosen = scores.argmax(axis=1)
    if split is None or not (split == "dev").any():
        held = [_held_out(case.train) for case in cases]
        drawn = [len(case.train) for case in cases]
        weights, _ = fitted(data, held, grid[torch.from_numpy(chosen)][:, None], drawn)
        chosen[:] = 0
    best = [w[:, i] for w, i in zip(weights, chosen, strict=True)]
    tested = [data.predicted(case.test, w).cpu().numpy() for case, w in zip(cases, best, strict=True)]
    return _in_order(cases, tested), float(scores.max(axis=1).mean())


def _held_out(rows: Rows) -> Pair:
    order = rows[np.random.RandomState(SEED).permutation(len(rows))]
    cut = int(HELD_OUT * len(rows))
    return order[cut:], order[:cut]

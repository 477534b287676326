"""Two linear classifiers on frozen vectors: a fast one, and one that trains as SentEval does.

n: rows    d: features    c: classes    p: pairs of training and development rows    r: weight decays

Both are called as classify(x, y, split): x (n, d), y (n,) in 0..c-1, split None for cross-validation or (n,)
of "train", "dev" and "test". They return the predictions, (n,) or those of the test rows in order, and the
accuracy x 100 on the rows that the hyper-parameter was chosen on, which are never test rows.

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
from torch import Tensor, nn

from whitenedcse.evaluation.scores import Classify, Split

Rows = NDArray[np.intp]
Pair = tuple[Rows, Rows]  # rows to train on, rows to choose by
Labels = NDArray[np.int64]

FOLDS = 10  # of a task without splits
SEED = 1111  # of [1], as all that follows
BATCH, EPOCHS, ROUNDS, FAILURES = 64, 4, 51, 6  # 4 epochs a round while epochs <= 200; the 6th failure stops
RATE, BETA1, BETA2, EPSILON = 1e-3, 0.9, 0.999, 1e-8  # torch.optim.Adam's defaults


class Data(NamedTuple):
    """Features x: (n, d + 1), with a last column of ones for the bias, and labels y: (n,)."""

    x: Tensor
    y: Tensor
    classes: int

    @classmethod
    def on(cls, device: str, x: NDArray[Any], y: Labels) -> Data:
        """The data on a device: features (n, d) without the column of ones, labels (n,)."""
        columns = np.pad(np.asarray(x, np.float32), ((0, 0), (0, 1)), constant_values=1)
        return cls(torch.from_numpy(columns).to(device), torch.from_numpy(y).to(device), int(y.max()) + 1)

    def predicted(self, rows: Rows, weights: Tensor) -> Tensor:
        """The predicted classes of these rows: weights (d + 1, ..., c) -> (rows, ...)."""
        x = self.x[torch.from_numpy(rows).to(self.x.device)]
        return torch.tensordot(x, weights, dims=1).argmax(dim=-1)

    def accuracy(self, rows: Rows, weights: Tensor) -> Tensor:
        """The accuracy on these rows, from 0 to 1 in float64: weights (d + 1, r, c) -> (r,)."""
        y = self.y[torch.from_numpy(rows).to(self.x.device), None]
        return (self.predicted(rows, weights) == y).double().mean(dim=0)


def initial_weights(d: int, c: int) -> Tensor:
    """The weights of nn.Linear(d, c) after torch.manual_seed(SEED), as (d + 1, c) with the bias last."""
    random = torch.Generator().manual_seed(SEED)
    weight, bias = torch.empty(c, d), torch.empty(c, 1)
    nn.init.kaiming_uniform_(weight, a=math.sqrt(5), generator=random)
    nn.init.uniform_(bias, -1 / math.sqrt(d), 1 / math.sqrt(d), generator=random)
    return torch.cat([weight, bias], dim=1).T


def fitted(
    data: Data, pairs: Sequence[Pair], decay: Tensor, drawn: Sequence[int] | None = None
) -> tuple[list[Tensor], NDArray[np.float64]]:
    """The best weights (d + 1, r, c) of each pair, and their accuracies (p, r) on its development rows.

    decay: (p, r). drawn: for each pair the size of a permutation drawn before that of the first epoch.
    """
    weights: list[Any] = [None] * len(pairs)
    accuracy = np.empty(tuple(decay.shape))
    sizes = np.array([len(rows) for rows, _ in pairs])
    for size in set(sizes.tolist()):
        same = np.flatnonzero(sizes == size)
        random = np.random.RandomState(SEED)
        random.permutation(drawn[same[0]] if drawn else 0)
        best, right = _together(data, [pairs[int(i)] for i in same], decay[torch.from_numpy(same)], random)
        accuracy[same] = right.cpu().numpy()
        for i, w in zip(same, best, strict=True):
            weights[i] = w
    return weights, accuracy


def _together(
    data: Data, pairs: Sequence[Pair], decay: Tensor, random: np.random.RandomState
) -> tuple[Tensor, Tensor]:
    """The best weights (p, d + 1, r, c) and accuracies (p, r) of pairs with equally many training rows."""
    p, r = decay.shape
    device = data.x.device
    start = initial_weights(data.x.shape[1] - 1, data.classes).to(device)
    best = start[None, :, None].repeat(p, 1, r, 1)
    accuracy = torch.full((p, r), -1.0, dtype=torch.float64, device=device)
    failures = torch.zeros_like(accuracy)
    zeros = torch.zeros(p, data.x.shape[1], r * data.classes, device=device)
    decays = decay.repeat_interleave(data.classes, dim=1)[:, None]
    adam = _Adam(best.flatten(2).clone(), zeros, zeros.clone(), decays, steps=0)
    rows = torch.from_numpy(np.stack([rows for rows, _ in pairs])).to(device)
    alive = torch.arange(p, device=device)
    for _ in range(ROUNDS):
        for _ in range(EPOCHS):
            adam = _epoch(data, rows[alive], torch.from_numpy(random.permutation(rows.shape[1])), adam)
        now = adam.weights.unflatten(2, (r, data.classes))
        right = [data.accuracy(pairs[i][1], w) for i, w in zip(alive.tolist(), now, strict=True)]
        scores = torch.stack(right)
        better = (failures[alive] < FAILURES) & (scores > accuracy[alive])
        best[alive] = torch.where(better[:, None, :, None], now, best[alive])
        accuracy[alive] = torch.where(better, scores, accuracy[alive])
        failures[alive] += ~better
        going = (failures[alive] < FAILURES).any(dim=1)
        adam, alive = adam.kept(going), alive[going]
        if not len(alive):
            break
    return best, accuracy


class _Adam(NamedTuple):
    """The state of torch.optim.Adam for weights (p, d + 1, r * c); decay: (p, 1, r * c)."""

    weights: Tensor
    first: Tensor
    second: Tensor
    decay: Tensor
    steps: int

    def stepped(self, gradient: Tensor) -> _Adam:
        """The state after one step; weights and both moments are changed in place."""
        steps = self.steps + 1
        gradient.addcmul_(self.weights, self.decay)
        self.first.lerp_(gradient, 1 - BETA1)
        self.second.mul_(BETA2).addcmul_(gradient, gradient, value=1 - BETA2)
        scale = (self.second.sqrt() / math.sqrt(1 - BETA2**steps)).add_(EPSILON)
        self.weights.addcdiv_(self.first, scale, value=-RATE / (1 - BETA1**steps))
        return self._replace(steps=steps)

    def kept(self, going: Tensor) -> _Adam:
        tensors = {name: getattr(self, name)[going] for name in ("weights", "first", "second", "decay")}
        return self._replace(**tensors)


def _epoch(data: Data, rows: Tensor, order: Tensor, adam: _Adam) -> _Adam:
    """One pass over rows (p, n) in the order (n,), in batches; returns the new state."""
    for part in order.to(rows.device).split(BATCH):
        batch = rows[:, part]
        x = data.x[batch]  # (p, batch, d + 1)
        logits = (x @ adam.weights).unflatten(2, (-1, data.classes))
        gold = nn.functional.one_hot(data.y[batch], data.classes)[:, :, None]
        error = (logits.softmax(dim=-1) - gold) / len(part)  # the gradient of the mean cross-entropy
        adam = adam.stepped(x.mT @ error.flatten(2))
    return adam


STRENGTHS = (1e-3, 1e-2, 1e-1, 1.0)  # C of `lbfgs`; no task was best at 10 with all-MiniLM-L6-v2
TOLERANCE = 1e-4  # of `lbfgs`: at 1e-3 bag-of-words vectors lost 1.4 points on MRPC
DECAYS = (1e-5, 1e-4, 1e-3, 1e-2)  # from here on `senteval`, as in [1]
HELD_OUT = 0.05


class Case(NamedTuple):
    """Rows to train on, rows to predict, and pairs of the training rows to choose the hyper-parameter by."""

    train: Rows
    test: Rows
    pairs: list[Pair]


def classifier(name: str) -> Classify:
    """The classifier of this name, "lbfgs" or "senteval". Raises ValueError for any other."""
    known: dict[str, Classify] = {"lbfgs": lbfgs, "senteval": senteval}
    if name not in known:
        raise ValueError(f"no classifier {name!r}; there are {' and '.join(known)}")
    return known[name]


def _folds(y: Labels, rows: Rows) -> list[Pair]:
    from sklearn.model_selection import StratifiedKFold

    folds = StratifiedKFold(FOLDS, shuffle=True, random_state=SEED)
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # of classes of fewer rows
        return [(rows[train], rows[test]) for train, test in folds.split(rows, y[rows])]


def _cases(y: Labels, split: Split) -> list[Case]:
    if split is None:
        return [Case(train, test, _folds(y, train)) for train, test in _folds(y, np.arange(len(y)))]
    train, dev, test = (np.flatnonzero(split == part) for part in ("train", "dev", "test"))
    return [Case(train, test, [(train, dev)] if dev.size else _folds(y, train))]


def _in_order(cases: Sequence[Case], predictions: Sequence[NDArray[Any]]) -> NDArray[Any]:
    return np.concatenate(predictions)[np.argsort(np.concatenate([case.test for case in cases]))]


def lbfgs(x: NDArray[Any], y: Labels, split: Split) -> tuple[NDArray[Any], float]:
    """Logistic regression by scikit-learn; C is chosen on the dev rows, or else on a tenth of train.

    x: (n, d), y: (n,), split: (n,) or None -> predictions, accuracy x 100 on the dev rows. x is divided by
    one number, its root mean square over the training rows, so that C means the same at any norm. The chosen
    C is fitted to all of train. Float32 may miss the tolerance; there is no warning then.
    """
    from sklearn.exceptions import ConvergenceWarning  # seconds that what only reads texts need not wait for
    from sklearn.linear_model import LogisticRegression
    from threadpoolctl import threadpool_limits

    predictions, scores, cases = [], [], _cases(y, split)
    for train, test, pairs in cases:
        scaled = np.asarray(x / math.sqrt(np.square(x[train], dtype=np.float64).mean() or 1), np.float32)
        rows, dev = pairs[0]
        model = LogisticRegression(tol=TOLERANCE, max_iter=1000, warm_start=True)
        alike = len(np.unique(y[rows])) == len(np.unique(y[train]))  # else it cannot go on for all of train
        quiet = warnings.catch_warnings(action="ignore", category=ConvergenceWarning)
        with quiet, threadpool_limits(1):  # on two busy cores, two threads took ten times as long
            accuracies = []
            for c in STRENGTHS:
                model.set_params(C=c).fit(scaled[rows], y[rows])
                accuracies.append(model.score(scaled[dev], y[dev]))
            chosen = STRENGTHS[int(np.argmax(accuracies))]
            model.set_params(C=chosen, warm_start=alike).fit(scaled[train], y[train])
        predictions.append(model.predict(scaled[test]))
        scores.append(max(accuracies))
    return _in_order(cases, predictions), 100 * float(np.mean(scores))


def senteval(x: NDArray[Any], y: Labels, split: Split) -> tuple[NDArray[Any], float]:
    """One linear layer by Adam with early stopping, its weight decay chosen by ten inner folds [1].

    x: (n, d), y: (n,), split: (n,) or None -> predictions, accuracy x 100 on the dev rows. The classifiers
    that SentEval trains one by one, 410 in a cross-validated task, are trained together: they share seed,
    initial weights and, among equally many rows, permutations. With dev rows, [1] trains the chosen one
    again, to the same weights. It computes on CUDA where there is one.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    data, cases = Data.on(device, x, y), _cases(y, split)
    grid = torch.tensor(DECAYS, device=device)
    pairs = [pair for case in cases for pair in case.pairs]
    weights, accuracies = fitted(data, pairs, grid.expand(len(pairs), -1))
    scores = np.round(100 * accuracies.reshape(len(cases), -1, len(DECAYS)).mean(axis=1), 2)  # as [1] rounds
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
    cut = max(1, int(HELD_OUT * len(rows)))
    return order[cut:], order[:cut]

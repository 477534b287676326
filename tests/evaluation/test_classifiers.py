"""Many classifiers trained at once are the ones SentEval trains one by one; test rows choose nothing."""

import copy

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold
from torch import nn
from torch.utils.data import TensorDataset

from whitenedcse.evaluation import classifiers
from whitenedcse.evaluation.classifiers import DECAYS, classifier, lbfgs, senteval


def blobs(n, d, c, seed, noise=1.5):
    random = np.random.default_rng(seed)
    y = np.sort(random.integers(0, c, n))
    return (random.normal(size=(c, d))[y] + noise * random.normal(size=(n, d))).astype(np.float32), y


class Naive:
    """SentEval's procedure written down plainly: one nn.Linear, one optimiser, global seeds."""

    def __init__(self, d, c, decay):
        np.random.seed(1111)  # noqa: NPY002 - the global stream is the thing imitated
        torch.manual_seed(1111)
        self.model, self.loss = nn.Linear(d, c), nn.CrossEntropyLoss()
        self.optimizer = torch.optim.Adam(self.model.parameters(), weight_decay=decay)

    def score(self, x, y):
        with torch.no_grad():
            return (self.model(torch.from_numpy(x)).argmax(1).numpy() == y).mean()

    def cut(self, x, y):
        held, kept = np.split(np.random.permutation(len(x)), [int(0.05 * len(x))])  # noqa: NPY002
        return (x[kept], y[kept]), (x[held], y[held])

    def fit(self, x, y, dev=None):
        (x, y), dev = ((x, y), dev) if dev else self.cut(x, y)
        best, count, epochs, data = -1, 0, 0, TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
        while epochs <= 200:
            for _ in range(4):
                order = torch.from_numpy(np.random.permutation(len(x)))  # noqa: NPY002
                for xs, ys in map(data.__getitem__, order.split(64)):
                    self.optimizer.zero_grad()
                    self.loss(self.model(xs), ys).backward()
                    self.optimizer.step()
            epochs += 4
            score = self.score(*dev)
            if score > best:
                best, kept = score, copy.deepcopy(self.model)
            elif (count := count + 1) > 5:
                break
        self.model, self.epochs = kept, epochs
        return self


def folds(x, y, k):
    return StratifiedKFold(k, shuffle=True, random_state=1111).split(x, y)


def choose(x, y, pairs, c):
    """The weight decay, and its development accuracy."""
    pairs, scores = list(pairs), []
    for decay in DECAYS:
        fits = [Naive(x.shape[1], c, decay).fit(x[a], y[a], (x[b], y[b])).score(x[b], y[b]) for a, b in pairs]
        scores.append(round(100 * np.mean(fits), 2))
    return DECAYS[np.argmax(scores)], max(scores)


@pytest.fixture
def trained(monkeypatch):
    """The weights of every classifier, as they come out of one call after another."""
    calls, fitted = [], classifiers.fitted

    def record(*arguments):
        weights, accuracy = fitted(*arguments)
        calls.append(weights)
        return weights, accuracy

    monkeypatch.setattr(classifiers, "fitted", record)
    monkeypatch.setattr(classifiers, "FOLDS", 3)
    return calls


def same_weights(ours, naive):
    """ours: (d + 1, c)."""
    theirs = torch.cat([naive.model.weight, naive.model.bias[:, None]], dim=1).T
    torch.testing.assert_close(ours, theirs.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("n", "c"), [(215, 2), (143, 3)])
@pytest.mark.slow
def test_together_in_folds_of_unequal_length_as_one_by_one(trained, n, c):
    x, y = blobs(n, 6, c, seed=n)
    predicted, scores, fitted = np.empty_like(y), [], []
    for train, test in folds(x, y, 3):
        decay, score = choose(x[train], y[train], folds(x[train], y[train], 3), c)
        fitted.append(Naive(6, c, decay).fit(x[train], y[train]))
        predicted[test] = fitted[-1].model(torch.from_numpy(x[test])).argmax(1).numpy()
        scores.append(score)
    assert len({len(train) for train, _ in folds(x, y, 3)}) > 1
    ours, our_dev = senteval(x, y, None)
    assert our_dev == pytest.approx(np.mean(scores), abs=1e-9)
    np.testing.assert_array_equal(ours, predicted)
    for weights, one in zip(trained[1], fitted, strict=True):
        same_weights(weights[:, 0], one)


def test_each_classifier_of_a_group_stops_by_itself_and_keeps_its_best(trained, monkeypatch):
    decays = (1e-5, 1e-2, 0.1, 1.0)  # far enough apart to stop at different times
    monkeypatch.setattr(classifiers, "DECAYS", decays)
    x, y = blobs(120, 3, 3, seed=4, noise=1.5)
    split = np.array(["test"] * 120, "U5")
    split[np.random.default_rng(0).permutation(120)[:100]] = "train"
    train = np.flatnonzero(split == "train")
    senteval(x, y, split)
    epochs = set()
    for (a, b), weights in zip(folds(x[train], y[train], 3), trained[0], strict=True):
        for i, decay in enumerate(decays):
            rows, dev = train[a], train[b]
            one = Naive(3, 3, decay).fit(x[rows], y[rows], (x[dev], y[dev]))
            same_weights(weights[:, i], one)
            epochs.add(one.epochs)
    assert len(epochs) > 1


@pytest.mark.parametrize("parts", [("train", "test"), ("train", "dev", "test")])
def test_a_task_with_splits_goes_as_one_by_one(trained, parts):
    x, y = blobs(160, 5, 3, seed=3)
    split = np.array(parts)[np.random.default_rng(1).integers(0, len(parts), 160)]
    train, dev, test = (np.flatnonzero(split == part) for part in ("train", "dev", "test"))
    given = (x[dev], y[dev]) if dev.size else None
    xs, ys = x[train], y[train]
    if given:
        scores = [round(100 * Naive(5, 3, w).fit(xs, ys, given).score(*given), 2) for w in DECAYS]
        decay, dev_score = DECAYS[np.argmax(scores)], max(scores)
    else:
        decay, dev_score = choose(xs, ys, folds(xs, ys, 3), 3)
    model = Naive(5, 3, decay).fit(xs, ys, given).model
    ours, our_dev = senteval(x, y, split)
    np.testing.assert_array_equal(ours, model(torch.from_numpy(x[test])).argmax(1).numpy())
    assert our_dev == pytest.approx(dev_score, abs=1e-9)


@pytest.mark.parametrize("classify", [lbfgs, senteval])
@pytest.mark.parametrize("parts", [("train", "test"), ("train", "dev", "test")])
def test_the_labels_of_test_rows_change_nothing(trained, classify, parts):
    x, y = blobs(120, 4, 2, seed=9)
    split = np.array(parts)[np.random.default_rng(2).integers(0, len(parts), 120)]
    other = np.where(split == "test", 1 - y, y)
    before = np.random.get_state()[1].copy(), torch.get_rng_state()  # noqa: NPY002
    (one, dev_one), (two, dev_two) = classify(x, y, split), classify(x, other, split)
    np.testing.assert_array_equal(one, two)
    assert dev_one == dev_two
    assert np.array_equal(before[0], np.random.get_state()[1])  # noqa: NPY002 - global streams stay as they are
    assert torch.equal(before[1], torch.get_rng_state())


def peer(x, y, train, test, rows, dev):
    """Cold starts to a tight tolerance, in float64."""
    x = x.astype(float) / np.sqrt(np.mean(x[train].astype(float) ** 2))
    scores = {}
    for c in (0.001, 0.01, 0.1, 1.0):
        model = LogisticRegression(C=c, tol=1e-8, max_iter=10000).fit(x[rows], y[rows])
        scores[c] = model.score(x[dev], y[dev])
    best = max(scores, key=scores.get)
    model = LogisticRegression(C=best, tol=1e-8, max_iter=10000).fit(x[train], y[train])
    return model.predict(x[test]), scores[best]


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
@pytest.mark.slow(but=1)
def test_fast_logistic_regression_agrees_with_cold_starts_at_any_norm(scale):
    x, y = blobs(600, 20, 3, seed=4, noise=3)
    x *= scale * np.linspace(0.2, 2, 20, dtype=np.float32)
    predicted, scores = np.empty_like(y), []
    for train, test in folds(x, y, 10):
        a, b = next(folds(x[train], y[train], 10))
        predicted[test], score = peer(x, y, train, test, train[a], train[b])
        scores.append(score)
    ours, dev = lbfgs(x, y, None)
    assert np.mean(ours != predicted) < 0.01
    assert dev == pytest.approx(100 * np.mean(scores), abs=0.5)


def test_fast_logistic_regression_chooses_on_the_dev_rows_of_a_task_that_has_them():
    x, y = blobs(300, 10, 2, seed=8, noise=4)
    split = np.repeat(["train", "dev", "test"], 100)[np.random.default_rng(3).permutation(300)]
    train, dev, test = (np.flatnonzero(split == part) for part in ("train", "dev", "test"))
    predicted, score = peer(x, y, train, test, train, dev)
    ours, our_dev = lbfgs(x, y, split)
    assert np.mean(ours != predicted) <= 0.01
    assert our_dev == pytest.approx(100 * score, abs=1.01)


@pytest.mark.filterwarnings("ignore:The least populated class")
def test_a_label_that_only_one_training_row_has_may_be_left_out_of_the_inner_fold():
    x, y = blobs(60, 6, 2, seed=0, noise=0.3)
    for i in range(60):  # whichever row the fold leaves out
        rare = y.copy()
        rare[i] = 2
        split = np.array(["train"] * 50 + ["test"] * 10)[np.random.default_rng(1).permutation(60)]
        if split[i] == "train":
            predictions, _ = lbfgs(x, rare, split)
            assert (predictions == rare[split == "test"]).mean() > 0.9


def test_an_unknown_name_lists_the_known_ones():
    assert classifier("senteval") is senteval
    with pytest.raises(ValueError, match="no classifier 'svm'; there are lbfgs and senteval"):
        classifier("svm")

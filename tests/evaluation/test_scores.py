"""Every number is the one a naive loop and scipy give; what is undefined never becomes one."""

import json
import re

import numpy as np
import pytest
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import confusion_matrix, f1_score

from whitenedcse.evaluation.scores import (
    accuracy,
    cosine,
    features,
    pearson,
    scores_of,
    spearman,
    sts_scores,
    threshold,
    undefined,
)
from whitenedcse.evaluation.suite import plan
from whitenedcse.evaluation.tasks import Labelled, Subset


def evaluate(tasks, encode):
    """Every task's scores and their average, from one call of `encode`."""
    sentences, index, *_ = plan(tasks)
    return scores_of(encode(sentences), index)


def encode(sentences):
    return np.float32([np.random.default_rng(list(text.encode())).standard_normal(6) for text in sentences])


def subset(name, n, seed):
    rng = np.random.default_rng(seed)
    left, right = ([f"s{i}" for i in rng.integers(0, 12, n)] for _ in range(2))  # many sentences come again
    return Subset(name, left, right, rng.integers(0, 6, n).astype(float))


@pytest.fixture
def tasks():
    return {"A": [subset("p", 20, 0), subset("q", 7, 1), subset("r", 40, 2)], "B": [subset("p", 15, 3)]}


def naive_cosines(left, right):
    """Rounded: a pair of equal sentences is a tie at 1."""
    pairs = zip(left.astype(float), right.astype(float), strict=True)
    return np.round([a @ b / np.linalg.norm(a) / np.linalg.norm(b) for a, b in pairs], 12)


def test_an_undefined_correlation_is_a_reason_and_never_a_number():
    for gold, similarity, why in (
        ([1, 2, 3], [0.5, 0.5, 0.5], "similarity is constant"),
        ([1, 2, 3], [1, 1 - 2e-16, 1 + 2e-16], "similarity is constant"),
        ([4, 4, 4], [0.1, 0.2, 0.3], "gold is constant"),
        ([1, 2, 3], [0.1, np.nan, np.inf], "similarity is not finite in 2 of 3 pairs"),
        ([1, np.nan, 3], [0.1, 0.2, 0.3], "gold is not finite in 1 of 3 pairs"),
        ([1], [0.1], "1 pairs are too few"),
    ):
        pair = np.array(gold), np.array(similarity)
        assert undefined(*pair) == why and np.isnan([spearman(*pair), pearson(*pair)]).all()


def test_cosine_is_taken_in_float64_and_equal_sentences_tie_at_exactly_one():
    a, b = np.float32([[1e-25, 0], [3, 4]]), np.float32([[1e-25, 1e-25], [4, 3]])  # 1e-50 is 0 in float32
    assert cosine(a, b) == pytest.approx([0.5**0.5, 24 / 25], abs=1e-7)
    x = np.random.default_rng(0).standard_normal((200, 384)).astype(np.float32)
    assert (cosine(x, x) == 1).all()
    assert np.abs(cosine(x, np.float32(-0.3) * x)).max() == 1  # and no rounding leads beyond


def test_an_undefined_subset_leaves_the_means_undefined_but_not_the_whole():
    subsets = [Subset("p", [], [], np.array([1.0, 2, 3])), Subset("q", [], [], np.array([2.0, 2]))]
    got = sts_scores(subsets, [np.array([0.1, 0.2, 0.3]), np.array([0.15, 0.25])])
    assert got["all"] and (got["mean"], got["wmean"], got["why"]) == (None, None, "q: gold is constant")
    assert got["subsets"]["q"] == {"spearman": None, "pearson": None, "n": 2, "why": "gold is constant"}
    assert got["pearson"]["all"] and (got["pearson"]["mean"], got["pearson"]["wmean"]) == (None, None)


def test_every_aggregation_and_the_average_are_those_of_loops_with_scipy(tasks):
    got, expected = evaluate(tasks, encode), {"spearman": {}, "pearson": {}}
    for name, subsets in tasks.items():
        pairs = [(s.gold, naive_cosines(encode(s.left), encode(s.right))) for s in subsets]
        every = [np.concatenate(side) for side in zip(*pairs, strict=True)]
        found = got["tasks"][name]
        sizes = [part["n"] for part in found["subsets"].values()]
        assert (sizes, found["n"]) == ([len(s.gold) for s in subsets], len(every[0]))
        for kind, scipys in (("spearman", spearmanr), ("pearson", pearsonr)):
            parts = [100 * scipys(*pair).statistic for pair in pairs]
            assert [part[kind] for part in found["subsets"].values()] == pytest.approx(parts, abs=1e-9)
            whole = 100 * scipys(*every).statistic
            by_hand = {"all": whole, "mean": np.mean(parts), "wmean": np.average(parts, weights=sizes)}
            expected[kind][name] = by_hand
            found_all = found if kind == "spearman" else found["pearson"]
            assert {mean: found_all[mean] for mean in by_hand} == pytest.approx(by_hand, abs=1e-9)
    for kind, average in (("spearman", got["avg"]), ("pearson", got["avg"]["pearson"])):
        for mean in ("all", "mean", "wmean"):
            by_hand = np.mean([scores[mean] for scores in expected[kind].values()])
            assert average[mean] == pytest.approx(by_hand, abs=1e-9)


def test_zero_vectors_are_counted_and_a_result_without_a_number_is_still_json(tasks):
    def broken(sentences):
        x = encode(sentences)
        x[[sentences.index(text) for text in ("s1", "s4", "s5")]] = 0
        return x

    got = evaluate(tasks, broken)
    assert re.fullmatch(r"all: similarity is not finite in .* \(3 zero vectors\)", got["tasks"]["A"]["why"])
    nothing = dict.fromkeys(("all", "mean", "wmean"))
    assert got["avg"] == {**nothing, "why": "undefined in A, B", "pearson": nothing}
    assert json.loads(json.dumps(got, allow_nan=False)) == got


def test_nothing_to_score_and_subsets_of_one_name_are_refused():
    with pytest.raises(ValueError, match="nothing to score"):
        evaluate({}, encode)
    with pytest.raises(ValueError, match="two subsets of a task share a name: p, p"):
        evaluate({"A": [subset("p", 5, 0), subset("p", 5, 1)]}, encode)


def test_a_pair_becomes_its_difference_and_its_product():
    u, v = np.array([[1.0, -2.0]]), np.array([[3.0, 0.5]])
    assert features([u, v]).tolist() == [[2.0, 2.5, 3.0, -1.0]]
    assert features([u]).tolist() == [[1.0, -2.0]]
    assert features([u]).dtype == features([u, v]).dtype == np.float32


def labelled(columns, labels, classes, split=None):
    texts = tuple(["a"] * len(labels) for _ in range(columns))
    return Labelled("t", texts, np.array(labels), list(classes), split)


@pytest.mark.parametrize("columns", [1, 2])
def test_only_test_rows_are_scored_and_pairs_by_f1_too(columns):
    random = np.random.default_rng(0)
    y, split = random.integers(0, 2, 90), np.array(["train", "dev", "test"])[random.integers(0, 3, 90)]
    gold = y[split == "test"]
    guess = np.where(random.random(len(gold)) < 0.7, gold, 1 - gold)
    task, x = labelled(columns, y, "ab", split), np.zeros((90, 2))
    got = accuracy(task, x, lambda *given: (guess, 61.0) if given[0] is x and given[2] is split else None)
    assert got.pop("correct").tolist() == (gold == guess).tolist()
    f1 = {"f1": pytest.approx(100 * f1_score(gold, guess))} if columns == 2 else {}
    assert got == {"accuracy": pytest.approx(100 * np.mean(gold == guess)), "dev": 61, "n": len(gold)} | f1


def test_a_threshold_predicts_entailment_from_one_half_on():
    cosines = np.array([0.5, 0.49, 0.9, -1, 0.7, 0.6])
    gold = [0, 0, 0, 1, 1, 1]
    task = labelled(2, gold, ["entailment", "not_entailment"])
    got = threshold(task, cosines)
    (a, b), (c, d) = confusion_matrix(gold, [0, 1, 0, 1, 0, 0]).tolist()
    yes, no = task.classes
    assert got["confusion"] == {yes: {yes: a, no: b}, no: {yes: c, no: d}}
    assert got["correct"].tolist() == [True, False, True, True, False, False]
    assert (got["accuracy"], got["majority"], got["n"]) == (50, 50, 6)
    assert threshold(labelled(2, [0, 0, 0, 1], task.classes), cosines[:4])["majority"] == 75

"""Every column is what a loop over pairs in float64, numpy's SVD and scipy's spearmanr give for it."""

from itertools import combinations, combinations_with_replacement

import numpy as np
import pytest
from encoders import whitened_by_hand
from evaluation.test_scores import naive_cosines, subset
from scipy.stats import spearmanr

from whitenedcse.evaluation import layers
from whitenedcse.evaluation.scores import spearman
from whitenedcse.evaluation.suite import plan

L, D = 4, 5


def odd(name, n, seed):
    """Pairs and sentences repeat: one pair is of equals, one is turned round."""
    made = subset(name, n, seed)
    made.right[0], (made.left[1], made.right[1]) = made.left[0], (made.right[2], made.left[2])
    return made


@pytest.fixture
def index():
    tasks = {f"T{t}": [odd(name, 9 + 8 * i, 10 * t + i) for i, name in enumerate("pqr")] for t in range(2)}
    return plan(tasks | {"U": [odd("one", 40, 99)]}).pairs


@pytest.fixture
def planes(index):
    n = 1 + max(rows.max() for pairs in index.values() for _, rows in pairs)
    planes = np.random.default_rng(0).standard_normal((L, n, D)).astype(np.float32) + 2
    planes[:, 3] = planes[:, 7]  # two sentences, one vector
    return planes


def naive_scores(pairs, similarity_of):
    """all, mean, wmean of one task, similarity_of: rows -> (n,)."""
    parts = [spearmanr(s.gold, similarity_of(rows)).statistic for s, rows in pairs]
    sizes = [len(s.gold) for s, _ in pairs]
    whole = spearmanr(
        np.concatenate([s.gold for s, _ in pairs]), np.concatenate([similarity_of(r) for _, r in pairs])
    )
    weighted = sum(p * n for p, n in zip(parts, sizes, strict=True)) / sum(sizes)
    return 100 * np.array([whole.statistic, sum(parts) / len(parts), weighted])


def both_sides(pairs):
    return np.concatenate([rows for _, rows in pairs], axis=1).ravel()


def values(row):
    return np.array([row["all"], row["mean"], row["wmean"]])


def by_column(records, *keys):
    return {tuple(map(str, (row[k] for k in (*keys, "task")))): values(row) for row in records}


@pytest.mark.parametrize("cells", [10**6, 100])  # one chunk, and one column at a time
def test_columns_are_ranked_as_scipy_ranks_them_one_by_one(monkeypatch, cells):
    monkeypatch.setattr(layers, "CELLS", cells)
    rng = np.random.default_rng(0)
    gold = rng.integers(0, 6, 60).astype(float)
    free, tied = rng.standard_normal((60, 9)), rng.integers(0, 7, (60, 8)) / 10
    x = np.concatenate([free, tied, 1e-20 * free], axis=1)
    expected = [100 * spearmanr(gold, column).statistic for column in x.T]
    assert layers.spearman_columns(gold, x) == pytest.approx(expected, abs=1e-10)


def test_what_has_no_correlation_is_nan_and_spoils_no_other_column():
    gold = np.array([1.0, 2, 2, 4])
    good = np.array([0.1, 0.4, 0.3, 0.3])
    undefined = [[0.5] * 4, [1, 1 - 2e-16, 1 + 2e-16, 1], [0.1, np.nan, 0.2, 0.3], [0.1, np.inf, 0.2, 0.3]]
    x = np.array([good, *undefined, good]).T
    expected = 100 * spearmanr(gold, good).statistic
    got = layers.spearman_columns(gold, x)
    assert got[[0, 5]] == pytest.approx(expected)
    assert np.isnan(got[1:5]).all()
    assert all(np.isnan(spearman(gold, column)) for column in x.T[1:5])
    for broken in ([3.0] * 4, [1, np.nan, 2, 3]):
        assert np.isnan(layers.spearman_columns(np.array(broken), x)).all()
    assert np.isnan(layers.spearman_columns(gold[:1], x[:1])).all()
    assert layers.spearman_columns(gold, x[:, :0]).shape == (0,)


@pytest.mark.parametrize("cells", [10**6, 1000])
def test_cosines_of_means_over_layers_are_those_of_the_combined_vectors(planes, index, monkeypatch, cells):
    monkeypatch.setattr(layers, "CELLS", cells)
    masks = np.array([[c == "1" for c in f"{bits:04b}"] for bits in range(1, 16)])
    planes[1] = -planes[0] * (1 + 1e-3 * planes[2])  # a mean that nearly cancels
    rows = both_sides(index["T0"]).reshape(2, -1)
    got = layers.cosines_by_mask(planes, rows)(masks)
    for mask, column in zip(masks, got.T, strict=True):
        assert column == pytest.approx(naive_cosines(*planes[mask].astype(float).mean(0)[rows]), abs=1e-9)
    easy = ~(masks[:, 0] & masks[:, 1])
    expected = [naive_cosines(*planes[mask].astype(float).mean(0)[rows]) for mask in masks[easy]]
    assert np.abs(got[:, easy].T - expected).max() < 1e-10


def test_equal_vectors_tie_at_exactly_one_and_turned_pairs_with_each_other():
    rng = np.random.default_rng(0)
    planes = rng.standard_normal((7, 90, 384)).astype(np.float32)
    planes[:, 45:] = planes[:, :45]
    masks = np.array([[c == "1" for c in f"{bits:07b}"] for bits in range(1, 128)])
    same = np.array([np.arange(45), np.arange(45, 90)])
    assert (layers.cosines_by_mask(planes, same)(masks) == 1).all()
    assert (layers.cosines_by_mask(planes, np.stack([same[0], same[0]]))(masks) == 1).all()
    a, b = np.arange(30), np.arange(10, 40)
    got = layers.cosines_by_mask(planes, np.array([[*a, *b], [*b, *a]]))(masks)
    assert (got[:30] == got[30:]).all()


def test_every_two_layers_are_scored_with_and_without_whitening(planes, index):
    got = by_column(layers.pairs(planes, index), "layers", "whitening")
    both = list(combinations_with_replacement(range(L), 2))
    assert len(got) == len(both) * 2 * 4
    for i, j in both:
        x, state = (planes[i].astype(float) + planes[j]) / 2, str([i, j])
        expected = {False: [], True: []}
        for task, pairs in index.items():
            white = whitened_by_hand(x[both_sides(pairs)])(x)
            for whitening, y in ((False, x), (True, white)):
                scores = naive_scores(pairs, lambda rows, y=y: naive_cosines(*y[rows]))
                assert got[state, str(whitening), task] == pytest.approx(scores, abs=1e-8)
                expected[whitening].append(scores)
        for whitening, rows in expected.items():
            assert got[state, str(whitening), "average"] == pytest.approx(np.mean(rows, axis=0), abs=1e-8)


def test_every_set_of_layers_is_scored_and_the_best_of_each_size_found(planes, index, monkeypatch):
    """Two sets at a time, as memory is bounded: the longest task has 51 pairs, which are 102 cells."""
    seen, by_mask = [], layers.cosines_by_mask

    def spied(planes, rows):
        cosines = by_mask(planes, rows)
        return lambda masks: seen.append(len(masks) * rows.shape[1]) or cosines(masks)

    monkeypatch.setattr(layers, "cosines_by_mask", spied)
    monkeypatch.setattr(layers, "CELLS", 102)
    got = layers.subsets(planes, index)
    assert len(seen) == 3 * 8 and max(seen) == 102
    table = by_column(got, "layers")
    sets = [s for size in range(1, L + 1) for s in combinations(range(L), size)]
    assert len(table) == 15 * 4
    averages = {}
    for s in sets:
        x = planes[list(s)].astype(float).mean(axis=0)
        scores = [naive_scores(pairs, lambda rows, x=x: naive_cosines(*x[rows])) for pairs in index.values()]
        for task, expected in zip(index, scores, strict=True):
            assert table[str(list(s)), task] == pytest.approx(expected, abs=1e-8)
        averages[s] = np.mean(scores, axis=0)
        assert table[str(list(s)), "average"] == pytest.approx(averages[s], abs=1e-8)
    for column, mean in enumerate(("all", "mean", "wmean")):
        of_size = [[s for s in sets if len(s) == k] for k in (1, 2, 3, 4)]
        best = [max(some, key=lambda s: averages[s][column]) for some in of_size]
        rows = layers.best_of_each_size(got, mean)
        assert [(row["size"], tuple(row["layers"])) for row in rows] == [(len(s), s) for s in best]


def test_sizes_are_left_out_rather_than_some_sets_of_a_size(planes, index, monkeypatch):
    for limit, largest in ((15, 4), (14, 3), (13, 2), (1, 2)):
        monkeypatch.setattr(layers, "LIMIT", limit)
        sizes = {len(row["layers"]) for row in layers.subsets(planes, index)}
        assert sizes == set(range(1, largest + 1))


def test_a_subset_of_no_direction_is_none_and_never_the_best(planes, index):
    planes[1] = 0
    got = layers.subsets(planes[:2], index)
    assert [row["all"] for row in got if row["layers"] == [1]] == [None] * 4
    assert [row["layers"] for row in layers.best_of_each_size(got, "all")] == [[0], [0, 1]]


def test_every_k_is_what_refitting_and_truncating_at_that_k_gives(planes, index):
    fits = {t: planes[0][both_sides(pairs)].astype(float) for t, pairs in index.items()}
    whole = {t: whitened_by_hand(x)(planes[0]) for t, x in fits.items()}
    got = layers.all_k(lambda task: lambda rows: whole[task][rows], index)
    for task, pairs in index.items():
        for k in range(1, D + 1):
            y = whitened_by_hand(fits[task], k)(planes[0])
            rows = both_sides(pairs).reshape(2, -1)
            assert layers.components(whole[task], rows)[:, k - 1] == pytest.approx(naive_cosines(*y[rows]))
            expected = naive_scores(pairs, lambda rows, y=y: naive_cosines(*y[rows]))
            assert got[task][:, k - 1] == pytest.approx(expected, abs=1e-8)
    assert got["average"] == pytest.approx((got["T0"] + got["T1"] + got["U"]) / 3)

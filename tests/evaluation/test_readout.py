"""The readouts of an encoder: each cosine against the slow way, and a choice that luck cannot win."""

import numpy as np
import pytest
from scipy.stats import spearmanr

from whitenedcse.evaluation import readout
from whitenedcse.evaluation.postprocess import Postprocess
from whitenedcse.evaluation.readout import (
    FEWEST,
    Moments,
    Spectrum,
    best_of_few,
    choice,
    groups,
    layer_sets,
    maps,
    similarities,
    simplest,
)

RNG = np.random.default_rng(0)
R, N, D = 3, 40, 8
MIXED = np.eye(D) + 0.3 * RNG.normal(size=(R, D, D))
CORPUS = (RNG.normal(size=(R, 300, D)) @ MIXED + 3).astype(np.float32)
PLANE = (RNG.normal(size=(R, N, D)) + 3).astype(np.float32)
ROWS = RNG.integers(N, size=(2, 60))


def slow(x, corpus, chosen):
    """The cosines by the transforms of the library, fitted to the corpus at once in float64."""
    if chosen.kind != "none":
        x = Postprocess(**chosen.settings).fit(corpus).transform(x)
    a, b = x[ROWS]
    return (a * b).sum(1) / np.sqrt((a * a).sum(1) * (b * b).sum(1))


def test_every_readout_has_the_cosines_of_its_transform_fitted_to_the_mean_of_its_layers():
    moments = Moments()
    for block in np.split(CORPUS, [7, 150], axis=1):  # in pieces, with a large mean
        moments.add(block)
    compared = 0
    for readouts, cosines in similarities({"cls": PLANE}, {"cls": moments}, ROWS, maps(D, 300)):
        for one, found in zip(readouts, cosines.T, strict=True):
            layers = list(one.layers)
            x, corpus = (a[layers].astype(np.float64).mean(axis=0) for a in (PLANE, CORPUS))
            np.testing.assert_allclose(found, slow(x, corpus, one.map), atol=2e-5, err_msg=str(one))
            compared += 1
    assert compared == len(layer_sets(R)) * len(maps(D, 300)) == 7 * 40


def test_the_best_of_few_is_the_best_of_all_tried_one_by_one():
    gold = RNG.normal(size=60)
    found = {}
    for layers in ((0,), (1,), (2,), (0, 2), (1, 2)):
        x, corpus = (a[list(layers)].astype(np.float64).mean(axis=0) for a in (PLANE, CORPUS))
        found |= {(layers, m): 100 * spearmanr(gold, slow(x, corpus, m))[0] for m in maps(D, 300)}
    best, score = best_of_few({"mean": PLANE}, {"mean": CORPUS}, gold, ROWS)
    assert score == pytest.approx(max(found.values()), abs=1e-6)
    assert best.pooling == "mean" and found[best.layers, best.map] == pytest.approx(score, abs=1e-6)


def test_maps_keep_no_axis_that_a_small_corpus_does_not_have():
    small = maps(D, 4)
    assert all(one.k < 4 or one.shrinkage for one in small if one.k)
    assert {one.kind for one in small} == {"none", "centre", "abtt", "pca", "whitening"}


def test_sets_of_three_layers_are_left_out_where_they_are_too_many():
    assert len(layer_sets(13)) == 13 + 78 + 286
    assert max(map(len, layer_sets(25))) == 2


def test_the_facts_of_a_sphere_of_a_line_and_of_vectors_that_vary_by_rounding_alone():
    sphere = Spectrum.of(np.zeros(D), np.eye(D)).facts()
    assert sphere == pytest.approx({"top": 1 / D, "rank": D, "cosine": 0})
    line = Spectrum.of(np.eye(D)[0], np.diag(np.eye(D)[0])).facts()
    assert line == pytest.approx({"top": 1, "rank": 1, "cosine": 0.5})
    draw = np.random.default_rng(0)
    x = draw.normal(size=8) + 1e-7 * draw.normal(size=(50, 8))
    mean, cov = x.mean(axis=0), np.cov(x.T, bias=True)
    for facts in (Spectrum.of(mean, cov).facts(), Spectrum.of(np.zeros(8), np.zeros((8, 8))).facts()):
        assert np.isnan([facts["top"], facts["rank"]]).all() and facts["cosine"] == 1
    apart = Spectrum.of(mean, cov * 1e12).facts()
    assert 1 < apart["rank"] <= 8 and apart["cosine"] < 1


def test_of_readouts_that_are_near_the_one_of_fewest_layers_is_taken():
    scores = np.array([70.0, 70.05, 69.95, 60.0, np.nan])
    assert simplest(scores, np.array([3, 3, 1, 1, 1])) == 2
    assert simplest(scores, np.array([1, 1, 1, 1, 1])) == 1


def pairs(n, m, better=0.0, seed=0):
    """Gold scores, cosines of a model's own vectors, and of m readouts as good, but one that is better."""
    rng = np.random.default_rng(seed)
    gold = rng.normal(size=n)
    own = gold + rng.normal(size=n)
    found = own[:, None] + 0.6 * rng.normal(size=(n, m))
    found[:, 3] = gold + (1 - better) * rng.normal(size=n)
    return gold, own, found


def test_a_better_readout_is_chosen_and_its_gain_is_that_on_fresh_pairs():
    gold, own, found = pairs(1_000, 300, better=0.5)
    judged = choice(gold, own, found, [1] * 300)
    fresh = pairs(100_000, 4, better=0.5, seed=1)
    expected = 100 * (spearmanr(fresh[0], fresh[2][:, 3])[0] - spearmanr(fresh[0], fresh[1])[0])
    assert judged.best == 3 and judged.shown
    assert judged.low < expected < judged.high
    assert judged.own == pytest.approx(100 * spearmanr(gold, own)[0])


def test_among_many_readouts_that_are_no_better_the_luck_of_the_winner_is_not_called_a_gain():
    """Chosen and judged on the same pairs, the best of 500 seems better in each of these draws."""
    naive, shown = [], []
    for seed in range(10):
        rng = np.random.default_rng(seed)
        gold = rng.normal(size=100)
        own = gold + rng.normal(size=100)
        found = gold[:, None] + rng.normal(size=(100, 500))
        judged = choice(gold, own, found, [1] * 500, draws=200)
        naive.append(judged.scores[judged.best] - judged.own)
        shown.append(judged.shown)
    assert min(naive) > 0 and sum(shown) <= 1


def test_copies_of_pairs_do_not_judge_each_other_and_change_nothing():
    """Ranks of doubled values are linear in those of single ones: each score and draw is the same."""
    gold, own, found = pairs(100, 200)
    texts = [f"text {i}" for i in range(101)]
    copied = groups(texts[:-1] + texts[1:], texts[1:] + texts[:-1])  # b, a is a copy of a, b
    assert copied.tolist() == [*range(100)] * 2
    once = choice(gold, own, found, [1] * 200, draws=200)
    twice = choice(*(np.concatenate([x, x]) for x in (gold, own, found)), [1] * 200, groups=copied, draws=200)
    assert twice.best == once.best
    assert twice[2:] == pytest.approx(once[2:])
    few = np.arange(60) % (FEWEST - 1)
    with pytest.raises(ValueError, match="49 pairs are too few"):
        choice(gold[few], own[few], found[few], [1] * 200, groups=few)


def test_pairs_that_cannot_choose_are_refused_in_a_line():
    some, same, few = np.arange(60.0), np.ones(60), np.arange(FEWEST - 1.0)
    for gold, own, found, said in (
        (few, few, few, "49 pairs are too few"),
        (same, some, some, "60 of 60 pairs have the score 1: 0 others cannot"),
        (some // 51, some, some, "51 of 60 pairs have the score 0: 9 others cannot"),
        (some, same, some, "cosines of all pairs are equal: nothing can be chosen"),
        (some, some, same, "cosines of all pairs are equal: nothing can be chosen"),
    ):
        with pytest.raises(ValueError, match=said):
            choice(gold, own, found[:, None], [1])
    enough = some[:FEWEST]
    assert choice(enough, enough, enough[:, None], [1]).own == pytest.approx(100)


def test_few_pairs_of_another_score_choose_where_both_halves_have_some(monkeypatch):
    rng, gold = np.random.default_rng(0), np.arange(60) // 50.0
    own, found = gold + rng.normal(size=60), gold[:, None] + 0.1 * rng.normal(size=(60, 3))
    monkeypatch.setattr(readout, "OTHERS", 2)
    gold[52:] = 0  # two are left, which many halves have both of
    assert 0 < choice(gold, own, found, [1, 1, 1]).gain < 200

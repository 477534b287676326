"""Draws and tests are scipy's; intervals cover; p is uniform where there is no difference."""

import itertools
import math
import tracemalloc

import numpy as np
import pytest
from scipy import stats
from scipy.stats import kstest, spearmanr

from whitenedcse.evaluation import statistics
from whitenedcse.evaluation.statistics import (
    Source,
    half_width,
    interval,
    of_difference,
    paired,
    quantile,
    resamples,
    task_draws,
    weighted_spearman,
)
from whitenedcse.evaluation.statistics import tested as outcome

NAN, PAIRS = math.nan, np.arange(3.0)


def naive(gold, similarity, counts):
    """scipy on every pair as often as it was drawn."""
    rows = [(np.repeat(gold, row), np.repeat(similarity, row)) for row in counts]
    defined = (len(set(x)) > 1 and len(set(y)) > 1 for x, y in rows)
    return np.array(
        [100 * spearmanr(*r).statistic if ok else NAN for r, ok in zip(rows, defined, strict=True)]
    )


def data(n, seed, digits=1):
    """n scores in steps of a half and similarities that follow them, rounded: ties in both."""
    rng = np.random.default_rng(seed)
    gold = rng.integers(0, 11, n) / 2
    return gold, np.round(gold / 5 + rng.normal(0, 0.5, n), digits)


@pytest.mark.parametrize(("n", "digits"), [(2, 1), (40, 1), (40, 9), (90, 0)])
def test_every_draw_is_scipys_on_the_pairs_it_took(monkeypatch, n, digits):
    counts = np.random.default_rng(1).integers(0, 4, (50, n))  # not only resamples: totals differ
    counts[7], counts[8] = 0, np.eye(n)[0]
    gold, similarity = data(n, 3 + n, digits)
    wanted = naive(gold, similarity, counts)
    assert np.isnan(wanted[7:9]).all() and np.isfinite(wanted).sum() >= 20
    for chunk in (1, 100, 2**16):
        monkeypatch.setattr(statistics, "CHUNK", chunk)
        np.testing.assert_allclose(weighted_spearman(gold, similarity, counts), wanted, rtol=0, atol=1e-12)


def test_what_has_no_correlation_has_no_draw_of_one():
    counts = np.ones((4, 3), int)
    for odd in ([1, 1, 1], [1, 1 - 2e-16, 1 + 2e-16], [1, NAN, 3], [math.inf] * 3):
        for pair in (PAIRS, np.array(odd)), (np.array(odd), PAIRS):
            assert np.isnan(weighted_spearman(*pair, counts)).all(), odd


def test_no_sum_of_a_long_task_overflows():
    gold = np.arange(5000.0) // 2500
    similarity = np.round(gold + np.random.default_rng(0).normal(size=5000))
    data = gold, similarity, resamples(5000, 3, 0).astype(np.uint8)  # the narrowest integers that hold them
    np.testing.assert_allclose(weighted_spearman(*data), naive(*data), rtol=0, atol=1e-12)


def test_perfect_orders_are_exactly_a_hundred():
    x, counts = np.arange(100.0), resamples(100, 20, 0)
    assert (weighted_spearman(x, np.exp(x / 10), counts) == 100).all()
    assert (weighted_spearman(x, -x, counts) == -100).all()


def test_resamples_are_multinomial():
    n, draws = 20, 10_000
    counts = resamples(n, draws, 5).astype(float)
    assert (counts.sum(axis=1) == n).all()
    assert counts.mean(axis=0) == pytest.approx(1, abs=5 / draws**0.5)
    covariance = np.eye(n) - 1 / n  # n p_i (1 - p_i) and -n p_i p_j, with p = 1 / n
    assert np.abs(np.cov(counts.T) - covariance).max() < 5 * 2**0.5 / draws**0.5


def test_resamples_depend_on_seed_and_n_alone():
    first = resamples(1000, 3, 0)
    assert (resamples(1000, 3, 0) == first).all() and (resamples(1000, 5, 0)[:3] == first).all()
    tenths = first[0].reshape(10, 100).sum(axis=1)  # one stream cut to 1,000 and to 1,010 would share them
    for other in (resamples(1000, 3, 1), resamples(1010, 3, 0), first[1:]):
        assert np.abs(np.add.reduceat(other[0], np.arange(10) * len(other[0]) // 10) - tenths).max() > 10


def test_the_draws_of_a_task_are_a_loop_over_one_resampling():
    every, similarity = data(67, 0)
    counts, constant = resamples(67, 40, 9), np.where(np.arange(67) < 20, 3.0, every)
    for gold, sizes in ((every, [30, 12, 25]), (every, [67]), (constant, [20, 47])):
        got, ends = task_draws(gold, similarity, sizes, 40, 9), np.cumsum(sizes)
        parts = [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]
        expected = {str(i): naive(gold[s], similarity[s], counts[:, s]) for i, s in enumerate(parts)}
        each = [*expected.values()]
        expected |= {"all": naive(gold, similarity, counts), "mean": sum(each) / len(each)}
        expected["wmean"] = sum(n * draws for n, draws in zip(sizes, each, strict=True)) / 67
        assert set(got) == set(expected)
        for key, draws in expected.items():
            np.testing.assert_allclose(got[key], draws, rtol=0, atol=1e-12, err_msg=f"{key} of {sizes}")


def test_a_thousand_draws_of_sick_stay_small():
    gold, similarity = data(5000, 0, digits=9)
    tracemalloc.start()
    task_draws(gold, similarity, [2500, 2500], 1000, 0)
    assert tracemalloc.get_traced_memory()[1] < 60e6  # the counts alone are 20 MB
    tracemalloc.stop()


def normal(rng, n, rho):
    """n pairs of a bivariate normal with correlation rho."""
    x, y = rng.standard_normal((2, n))
    return x, rho * x + (1 - rho**2) ** 0.5 * y


@pytest.mark.slow
def test_the_interval_covers_the_truth_of_a_bivariate_normal():
    rng, truth = np.random.default_rng(0), 600 / math.pi * math.asin(0.6 / 2)  # Spearman's rho of a normal
    draws = [task_draws(*normal(rng, 100, 0.6), [100], 300, seed)["all"] for seed in range(200)]
    bounds = np.array([interval(found) for found in draws])
    assert 0.90 <= np.mean((bounds[:, 0] < truth) & (truth < bounds[:, 1])) <= 0.98


@pytest.mark.slow
def test_p_is_uniform_without_a_difference():
    rng, null = np.random.default_rng(0), []
    for seed in range(300):
        gold = rng.standard_normal(100)
        both = (gold + 0.8 * rng.standard_normal(100) for _ in range(2))
        null.append(paired(*(task_draws(gold, x, [100], 300, seed)["all"] for x in both), 0.0).p)
    assert kstest(null, "uniform").pvalue > 0.01
    assert 0.02 <= np.mean(np.array(null) < 0.05) <= 0.09


COUNTED = {
    2 * 5 / 100: [*range(5, 100), *[0] * 4],  # four of 99 are not above zero
    2 / 1000: [-x for x in range(1, 1000)],
    2 / 100: [*[NAN] * 5, *[2] * 99],
    1: [-1, 1, 0, 0],
}


@pytest.mark.parametrize(("expected", "draws"), COUNTED.items())
def test_p_counts_the_draws_beyond_zero(draws, expected):
    draws, zero = np.array(draws, float), np.zeros(len(draws))
    found, turned = paired(draws, zero, 0.25), paired(zero, draws, -0.25)
    assert (found.p, turned.p) == (pytest.approx(expected), found.p)
    assert (turned.low, turned.high) == pytest.approx((-found.high, -found.low))
    assert found.difference == 0.25


def test_an_interval_is_the_percentiles_of_the_draws_that_are_defined():
    draws = np.random.default_rng(0).permutation(np.arange(1001.0))
    assert interval(draws) == pytest.approx((25, 975))
    draws = np.append(draws[draws < 950], [NAN] * 50)  # 5 %
    assert interval(draws) == pytest.approx((949 / 40, 39 * 949 / 40))
    draws[0] = NAN
    assert interval(draws) is None and paired(draws, np.zeros(1000), 0.0) is None


def test_accuracy_is_counted_over_the_rows_drawn():
    correct = np.random.default_rng(0).random(400) < 0.8
    draws, counts = statistics.accuracy_draws(correct, 2000, 4), resamples(400, 2000, 4)
    loop = [100 * np.repeat(correct, row).mean() for row in counts]
    np.testing.assert_allclose(draws, loop, rtol=0, atol=1e-12)
    assert draws.std() == pytest.approx(100 * (correct.mean() * (1 - correct.mean()) / 400) ** 0.5, rel=0.05)


def test_the_average_over_tasks_is_taken_draw_by_draw():
    found = statistics.average_draws({"a": np.array([1.0, 2, NAN]), "b": np.array([3.0, 6, 1])})
    np.testing.assert_array_equal(found, [2, 4, NAN])


def test_one_source_is_the_t_test_and_quantiles_are_scipys():
    for n in (2, 3, 10):
        a, b = np.random.default_rng(n).normal([[0.4], [0.0]], 1, (2, n))
        test, scipys = outcome((a - b).mean(), of_difference(a, b, paired=True)), stats.ttest_rel(a, b)
        assert test.p == pytest.approx(scipys.pvalue, rel=1e-9)
        low, high = scipys.confidence_interval()
        assert (test.low, test.high) == pytest.approx((low, high), rel=1e-9)
    for df, share in itertools.product((1, 4, math.inf), (0.5, 0.025, 1e-60)):
        assert quantile(share, df) == pytest.approx(stats.t.ppf(share, df), rel=1e-9)
    known = outcome(-1.3, [Source(0.25, math.inf)])
    assert known.p == pytest.approx(2 * stats.norm.sf(2.6), rel=1e-9)
    assert (known.low, known.high) == pytest.approx(stats.norm.interval(0.95, -1.3, 0.5), rel=1e-9)


def test_widths_of_sources_are_added_in_squares_and_p_is_where_the_interval_ends_at_zero():
    sources = [Source(0.3, 1), Source(0.2, 4), Source(0.5, math.inf)]
    for alpha in (0.05, 0.3):
        alone = [stats.t.isf(alpha / 2, df) * variance**0.5 for variance, df in sources]
        assert half_width(sources, alpha) == pytest.approx(math.hypot(*alone), rel=1e-9)
    for difference in (-30.0, 0.01, 2.0):
        assert half_width(sources, outcome(difference, sources).p) == pytest.approx(abs(difference), rel=1e-6)
    assert outcome(0.0, sources).p == 1 and outcome(1e90, [Source(1.0, math.inf)]).p == 0
    same = of_difference([75.64, 64.42, 73.73], [74.34, 63.12, 72.43], paired=True)  # 1.3, but for rounding
    assert same[0].variance > 0 and outcome(1.3, same).p is None and outcome(0.0, [Source(0.0, 2)]).p is None


def test_the_variance_of_a_difference_of_groups():
    a, b = [75.0, 76.5, 74.0], [71.0, 70.0, 73.5, 72.0]
    va, vb = np.var(a, ddof=1), np.var(b, ddof=1)
    assert of_difference(a, b, paired=False) == [(pytest.approx(va / 3), 2), (pytest.approx(vb / 4), 3)]
    for one, other in ((a, [70.0]), ([70.0], a)):  # the single value varies as the three do
        assert of_difference(one, other, paired=False) == [(pytest.approx(va * (1 + 1 / 3)), 2)]
    apart = np.var(np.subtract(a, b[:3]), ddof=1) / 3
    assert of_difference(a, b[:3], paired=True) == [(pytest.approx(apart), 2)]

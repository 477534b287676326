"""Tests are scipy's where scipy has them; elsewhere intervals cover, and variances are simulated ones."""

import math

import numpy as np
import pytest
from scipy import stats

from whitenedcse.evaluation.differences import (
    Source,
    half_width,
    of_difference,
    of_mean,
    of_predictions,
    of_spearman,
    of_two_spearmans,
    quantile,
)
from whitenedcse.evaluation.differences import tested as outcome
from whitenedcse.evaluation.statistics import task_draws


@pytest.mark.parametrize("n", [2, 3, 10])
def test_one_source_is_the_t_test(n):
    a, b = np.random.default_rng(n).normal([[0.4], [0.0]], 1, (2, n))
    test, scipys = outcome((a - b).mean(), of_difference(a, b, paired=True)), stats.ttest_rel(a, b)
    assert test.p == pytest.approx(scipys.pvalue, rel=1e-9)
    low, high = scipys.confidence_interval()
    assert (test.low, test.high) == pytest.approx((low, high), rel=1e-9)
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


def test_what_does_not_vary_is_not_tested():
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


def called_different(n, m, noise, shared, paired, sds=(0.3, 0.3), items=True):
    """In percent, how often systems of n and m seeds are called different that are equal.

    noise: the standard deviation over test pairs of a system's score if shared by its seeds, else of a run's.
    """
    rng, hits, repeats = np.random.default_rng(0), 0, 1500
    for _ in range(repeats):
        a, b = (
            sd * rng.standard_normal(k) + noise * rng.standard_normal(1 if shared else k)
            for k, sd in zip((n, m), sds, strict=True)
        )
        pairs = noise**2 * (2 if shared else 1 / n + 1 / m)  # what a bootstrap of the pairs estimates
        sources = [*of_difference(a, b, paired=paired), *([Source(pairs, math.inf)] if items else [])]
        hits += abs(a.mean() - b.mean()) > half_width(sources)
    return 100 * hits / repeats


@pytest.mark.parametrize("noise", [0.03, 0.3])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("n", [2, 3, 5, 10])
@pytest.mark.slow(but=4)
def test_equal_systems_are_called_different_in_six_percent_at_most(n, shared, noise):
    rate = called_different(n, n, noise, shared, paired=True)
    assert rate <= 6
    assert rate >= 3.5 or noise > 0.03  # little noise: all of the 5 % are used
    assert called_different(n, n, noise, shared, paired=False) <= 6
    assert called_different(1, n, noise, shared, paired=False) <= 6


@pytest.mark.parametrize("seeds", [(2, 10), (3, 5), (10, 2)])
def test_unequal_groups_of_unequal_spread_are_called_different_in_six_percent_at_most(seeds):
    for noise, sds in ((0.03, (0.6, 0.3)), (0.1, (0.3, 0.6)), (0.3, (0.3, 0.3))):
        assert called_different(*seeds, noise, True, False, sds) <= 6


def test_seeds_alone_say_nothing_of_other_pairs():
    assert called_different(10, 10, 0.3, True, paired=True, items=False) > 40


def correlated(rng, repeats, n, r, alike):
    """Gold scores and two encoders' similarities: r with gold each, `alike` between their deviations."""
    gold, common, *own = rng.standard_normal((4, repeats, n))
    errors = [alike**0.5 * common + (1 - alike) ** 0.5 * x for x in own]
    return gold, *(r * gold + (1 - r * r) ** 0.5 * error for error in errors)


def by_row(x, y):
    """Spearman's correlation of each row of x with that of y: (repeats, n) -> (repeats,)."""
    x, y = (stats.zscore(stats.rankdata(z, axis=1), axis=1) for z in (x, y))
    return (x * y).mean(axis=1)


@pytest.mark.parametrize("alike", [0.0, 0.8])
@pytest.mark.parametrize("r", [0.3, 0.8])
@pytest.mark.slow(but=1)
def test_correlations_vary_as_much_as_their_variances_say(r, alike):
    gold, one, other = correlated(np.random.default_rng(0), 2000, n := 400, r, alike)
    a, b, between = by_row(gold, one), by_row(gold, other), by_row(one, other)
    mean = [float(x.mean()) for x in (a, b, between)]
    ratios = [of_spearman(mean[0], n).variance / a.var()]
    ratios.append(of_two_spearmans(*mean, n).variance / (a - b).var())
    apart = of_two_spearmans(mean[0], mean[1], None, n).variance
    ratios.append(apart / (a.var() + b.var()))
    assert 0.95 < min(ratios) < max(ratios) < 1.2  # rather too wide than too narrow
    assert apart > of_two_spearmans(*mean, n).variance


def test_the_paired_bootstrap_with_gold_scores_agrees():
    gold, a, b = (x[0] for x in correlated(np.random.default_rng(0), 1, 1500, 0.75, 0.6))
    draws = [task_draws(gold, x, [1500], 1000, 0)["all"] / 100 for x in (a, b)]
    r = [stats.spearmanr(*pair).statistic for pair in ((gold, a), (gold, b), (a, b))]
    assert of_two_spearmans(*r, 1500).variance == pytest.approx(np.var(draws[1] - draws[0]), rel=0.15)


@pytest.mark.parametrize("df", [1, 4, math.inf])
def test_quantiles_are_scipys(df):
    for share in (0.5, 0.025, 1e-60):
        assert quantile(share, df) == pytest.approx(stats.t.ppf(share, df), rel=1e-9)


def test_an_encoder_does_not_differ_from_itself():
    assert of_two_spearmans(0.7, 0.7, 1.0, 100).variance == pytest.approx(0, abs=1e-12)
    assert of_two_spearmans(1.0, 1.0, 1.0, 100) == (0.0, math.inf)
    labels = np.random.default_rng(0).integers(0, 3, (10, 50))
    assert of_predictions(labels, labels, 0.0) == (0.0, math.inf)


@pytest.mark.parametrize("classes", [2, 5])
def test_predictions_bound_what_other_texts_would_change(classes):
    rng = np.random.default_rng(0)
    gold = rng.integers(0, classes, 400)
    a, b = (
        np.where(rng.random((10, 400)) < p, gold, rng.integers(0, classes, (10, 400))) for p in (0.5, 0.7)
    )
    texts = (a == gold).mean(axis=0) - (b == gold).mean(axis=0)  # what each text adds, known with gold labels
    bound = of_predictions(a, b, texts.mean()).variance
    if classes == 2:
        assert bound == pytest.approx(texts.var() / 400, rel=1e-9)
    else:
        assert texts.var() / 400 < bound < 1.5 * texts.var() / 400


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: of_mean([1.0]), "1 values: a variance needs at least 2"),
        (lambda: of_difference([1.0], [2.0], paired=False), "1 values"),
        (lambda: of_difference([1.0, 2.0], [2.0], paired=True), "2 and 1 values cannot be paired"),
        (lambda: of_spearman(0.5, 3), "3 pairs: the variance of a correlation needs at least 4"),
    ],
)
def test_what_has_no_variance_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()

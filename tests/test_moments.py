"""Streaming moments against sums in long double, closed forms and naive loops."""

import itertools
import tracemalloc

import numpy as np
import pytest

from whitenedcse import linalg as linalg_module
from whitenedcse.linalg import Moments


def two_passes(x):
    """Mean and covariance in long double, whose 64 bits of mantissa exceed float64's 53."""
    x = np.asarray(x, np.longdouble)
    mean = x.sum(axis=0) / len(x)
    return mean, (x - mean).T @ (x - mean) / len(x)


def distance(a, b):
    return float(np.linalg.norm(np.asarray(a - b, float)) / np.linalg.norm(np.asarray(b, float)))


def sample(n=700, d=6, *, mean=3.0, dtype=np.float64, seed=0):
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((n, d)) @ rng.standard_normal((d, d)) + mean).astype(dtype)


def chunks(x, rng):
    return np.split(x, np.sort(rng.integers(0, len(x) + 1, 5)))  # some of them empty


@pytest.mark.parametrize("mean", [0.0, 3.0, 1e4, -1e8])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_they_are_those_of_two_passes_however_far_the_mean_lies(monkeypatch, mean, dtype):
    monkeypatch.setattr(linalg_module, "BLOCK", 64)
    x = sample(mean=mean if dtype == np.float64 else min(abs(mean), 1e3), dtype=dtype)
    fitted = Moments(6).update(x)
    mean, covariance = two_passes(x)
    assert fitted.n == 700
    assert fitted.mean.dtype == fitted.covariance.dtype == np.float64
    assert distance(fitted.mean, mean) < 1e-14
    assert distance(fitted.covariance, covariance) < 1e-12


@pytest.mark.parametrize("seed", range(8))
def test_any_chunking_and_any_order_of_merges_give_the_same(monkeypatch, seed):
    rng = np.random.default_rng(seed)
    x = sample(mean=1e4, seed=seed)
    _, covariance = two_passes(x)
    monkeypatch.setattr(linalg_module, "BLOCK", int(rng.integers(1, 100)))
    streamed = Moments(6)
    for chunk in chunks(x, rng):
        streamed.update(chunk)
    parts = [Moments(6).update(chunk) for chunk in chunks(x, rng)]
    while len(parts) > 1:  # a random tree
        a, b = (parts.pop(rng.integers(len(parts))) for _ in range(2))
        parts.append(a.merge(b))
    for fitted in (streamed, parts[0]):
        assert fitted.n == 700
        assert distance(fitted.covariance, covariance) < 1e-12
        assert distance(fitted.mean, x.mean(axis=0)) < 1e-15


def test_a_merge_leaves_the_other_as_it_was_and_knows_nothing_of_later_rows():
    x = sample()
    a, b = Moments(6).update(x[:300]), Moments(6).update(x[300:])
    before = b.covariance
    a.merge(b).update(x[:5])
    assert b.n == 400
    assert np.array_equal(b.covariance, before)
    adopted = Moments(6).merge(b)
    b.update(x[:5])
    assert adopted.n == 400
    assert np.array_equal(adopted.covariance, before)


def test_what_began_empty_and_merged_continues_exactly_however_far_the_mean_lies():
    x = sample(mean=-1e8)
    fitted = Moments(6).merge(Moments(6).update(x[:300])).update(x[300:])
    assert distance(fitted.covariance, two_passes(x)[1]) < 1e-12


def test_nothing_merged_changes_nothing():
    x = sample()
    whole = Moments(6).update(x)
    for fitted in (
        Moments(6).update(x).merge(Moments(6)),
        Moments(6).merge(Moments(6)).merge(Moments(6).update(x)),
        Moments(6).update(x[:0]).update(x),
    ):
        assert fitted.n == 700
        assert np.array_equal(fitted.covariance, whole.covariance)
        assert np.array_equal(fitted.mean, whole.mean)


@pytest.mark.parametrize("update", ["exact", "paper"])
def test_equal_rows_have_no_scatter_at_all(monkeypatch, update):
    monkeypatch.setattr(linalg_module, "BLOCK", 4)
    x = np.full((7, 3), 0.1)  # whose sum over 7 is not 0.1 to the last bit
    assert np.any(x - x.mean(axis=0))
    fitted = Moments(3, update).update(x).update(x[:3])
    if update == "exact":
        fitted.merge(Moments(3).update(x))
    assert not fitted.covariance.any()
    assert np.array_equal(fitted.mean, x[0])


def test_rows_that_repeat_count_each_time():
    x = sample(20)
    times = np.arange(20) % 4
    fitted = Moments(6).update(np.repeat(x, times, axis=0))
    assert fitted.covariance == pytest.approx(np.cov(x.T, fweights=times, ddof=0), rel=1e-12)


def recursion(x):
    """BERT-whitening, Eq. 10 and 11, a row at a time, from the first row and no covariance."""
    mean, covariance = x[0], np.zeros((x.shape[1], x.shape[1]))
    for n, row in enumerate(x[1:], start=1):
        covariance = n / (n + 1) * covariance + np.outer(row - mean, row - mean) / (n + 1)
        mean = n / (n + 1) * mean + row / (n + 1)
    return mean, covariance


def test_paper_is_the_printed_recursion_in_any_chunks(monkeypatch):
    x = sample(150)
    mean, covariance = recursion(x)
    monkeypatch.setattr(linalg_module, "BLOCK", 37)
    for split in ([], [1], [1, 2, 80], [64]):
        fitted = Moments(6, "paper")
        for chunk in np.split(x, split):
            fitted.update(chunk)
        assert fitted.mean == pytest.approx(mean, rel=1e-12)
        assert fitted.covariance == pytest.approx(covariance, rel=1e-10, abs=1e-12)


def test_the_paper_overestimates_by_a_harmonic_number_on_average_and_exact_does_not():
    x = sample(6, 2)
    orders = [x[list(order)] for order in itertools.permutations(range(6))]
    truth = np.cov(x.T, ddof=0)
    paper = np.mean([Moments(2, "paper").update(rows).covariance for rows in orders], axis=0)
    harmonic = 1 + 1 / 2 + 1 / 3 + 1 / 4 + 1 / 5  # E |row i - mean of those before|^2 ~ 1 + 1 / (i - 1)
    assert paper == pytest.approx(truth * (1 + harmonic / 5), rel=1e-12)
    assert max(distance(Moments(2).update(rows).covariance, truth) for rows in orders) < 1e-14


def test_the_bias_of_two_thousand_rows_is_a_few_per_mille():
    x = sample(2000, 50)
    truth = np.trace(np.cov(x.T, ddof=0))
    assert 0.002 < np.trace(Moments(50, "paper").update(x).covariance) / truth - 1 < 0.006
    assert abs(np.trace(Moments(50).update(x).covariance) / truth - 1) < 1e-14


def peak(x):
    tracemalloc.start()
    Moments(x.shape[1]).update(x)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def test_memory_does_not_grow_with_the_rows_of_a_memory_map(tmp_path, monkeypatch):
    monkeypatch.setattr(linalg_module, "BLOCK", 512)
    peaks = []
    for n in (2_000, 40_000):
        file = np.memmap(tmp_path / str(n), np.float32, "w+", shape=(n, 32))
        file[:] = sample(n, 32, dtype=np.float32)
        peaks.append(peak(file))
    assert peaks[1] < 1.1 * peaks[0]
    assert peaks[1] < 6 * 512 * 32 * 8


@pytest.mark.parametrize("row", [0, 3, 69, 699])
@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_are_refused_by_row_and_nothing_is_taken_in(monkeypatch, row, broken):
    monkeypatch.setattr(linalg_module, "BLOCK", 64)
    x = sample()
    x[row, 2] = broken
    fitted = Moments(6).update(sample(50, seed=1))
    before = fitted.covariance
    with pytest.raises(ValueError, match=f"NaN or infinity in row {row}$"):
        fitted.update(x)
    assert fitted.n == 50
    assert np.array_equal(fitted.covariance, before)
    with pytest.raises(ValueError, match=f"NaN or infinity in row {row}$"):
        Moments(6).update(x)


def test_what_cannot_be_is_refused_by_name():
    x = sample()
    for wrong in (x[:, :5], x[0], x[None]):
        with pytest.raises(ValueError, match=r"the shape \(n, 6\), not \("):
            Moments(6).update(wrong)
    with pytest.raises(ValueError, match="width 5 cannot merge into those of width 6"):
        Moments(6).merge(Moments(5))
    for a, b in (("paper", "paper"), ("exact", "paper"), ("paper", "exact")):
        with pytest.raises(ValueError, match=f"update='{a}' and '{b}' cannot merge"):
            Moments(6, a).merge(Moments(6, b))
    with pytest.raises(ValueError, match="update='welford' one of exact, paper"):
        Moments(6, "welford")
    with pytest.raises(ValueError, match="d=0 must be 1 or more"):
        Moments(0)
    for value in ("mean", "covariance"):
        with pytest.raises(ValueError, match="no row was added"):
            getattr(Moments(6), value)

"""Streaming moments against sums in long double."""

import tracemalloc

import numpy as np
import pytest

from whitenedcse import whitening
from whitenedcse.whitening import Moments


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


def test_any_chunking_gives_two_passes_however_far_the_mean_lies(monkeypatch):
    cases = [(seed, mean, np.float64) for seed, mean in enumerate((0.0, 3.0, 1e4, -1e8))]
    for seed, mean, dtype in [*cases, (4, 1e3, np.float16), (5, 1e3, np.float32)]:
        rng, x = np.random.default_rng(seed), sample(mean=mean, dtype=dtype, seed=seed)
        expected = two_passes(x)
        monkeypatch.setattr(whitening, "BLOCK", int(rng.integers(1, 100)))
        streamed = Moments(6)
        for chunk in np.split(x, np.sort(rng.integers(0, len(x) + 1, 5))):  # some of them empty
            streamed.update(chunk)
        assert streamed.n == 700 and streamed.mean.dtype == streamed.covariance.dtype == np.float64
        assert distance(streamed.mean, expected[0]) < 1e-14
        assert distance(streamed.covariance, expected[1]) < 1e-12


def test_equal_rows_have_no_scatter_at_all(monkeypatch):
    monkeypatch.setattr(whitening, "BLOCK", 4)
    x = np.full((7, 3), 0.1)  # whose sum over 7 is not 0.1 to the last bit
    assert np.any(x - x.mean(axis=0))
    fitted = Moments(3).update(x).update(x[:3])
    assert not fitted.covariance.any() and np.array_equal(fitted.mean, x[0])


def test_memory_does_not_grow_with_the_rows_of_a_memory_map(tmp_path, monkeypatch):
    monkeypatch.setattr(whitening, "BLOCK", 512)
    peaks = []
    for n in (2_000, 40_000):
        file = np.memmap(tmp_path / str(n), np.float32, "w+", shape=(n, 32))
        file[:] = sample(n, 32, dtype=np.float32)
        tracemalloc.start()
        Moments(32).update(file)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.1 * peaks[0] and peaks[1] < 6 * 512 * 32 * 8


def test_nan_and_infinity_are_refused_by_row_and_nothing_is_taken_in(monkeypatch):
    monkeypatch.setattr(whitening, "BLOCK", 64)
    for row, broken in ((0, np.nan), (3, np.inf), (69, -np.inf), (699, np.nan)):
        x, fitted = sample(), Moments(6).update(sample(50, seed=1))
        x[row, 2] = broken
        before = fitted.covariance
        for moments in fitted, Moments(6):
            with pytest.raises(ValueError, match=f"NaN or infinity in row {row}$"):
                moments.update(x)
        assert fitted.n == 50 and np.array_equal(fitted.covariance, before)
    for wrong in (x[:, :5], x[0], x[None]):
        with pytest.raises(ValueError, match=r"the shape \(n, 6\), not \("):
            Moments(6).update(wrong)

"""A fitted whitening against numpy's covariance and singular vectors, and against Mahalanobis."""

import numpy as np
import pytest

from whitenedcse.evaluation.postprocess import Whitening, ladder


@pytest.fixture
def x():
    rng = np.random.default_rng(0)
    mixing = rng.standard_normal((12, 12)) * np.logspace(0, -2, 12)
    return (rng.standard_normal((200, 12)) @ mixing + 5).astype(np.float32)


def cosines(x):
    x = x / np.linalg.norm(x, axis=1, keepdims=True)
    return x @ x.T


def test_what_it_was_fitted_to_comes_out_with_zero_mean_and_identity_covariance(x):
    z = Whitening.fit(x).transform(x)
    assert np.abs(z.mean(axis=0)).max() < 1e-8
    assert np.abs(np.cov(z.T, ddof=0) - np.eye(12)).max() < 1e-8


@pytest.mark.parametrize("k", [1, 5, 12])
def test_it_is_the_published_formula_up_to_signs(x, k):
    other = np.random.default_rng(1).standard_normal((30, 12)) + 5
    u, s, _ = np.linalg.svd(np.cov(x.astype(float).T, ddof=0))
    expected = (other - x.astype(float).mean(axis=0)) @ (u @ np.diag(s**-0.5))[:, :k]
    z = Whitening.fit(x).transform(other, k)
    assert np.abs(z) == pytest.approx(np.abs(expected), rel=1e-6, abs=1e-6)
    assert cosines(z) == pytest.approx(cosines(expected), abs=1e-8)


def test_the_first_k_columns_are_those_of_most_variance():
    rng = np.random.default_rng(2)
    scales = np.array([0.5, 8, 1, 4])
    x = np.linalg.qr(rng.standard_normal((50, 4)))[0] * scales  # about orthogonal axes, of known variance
    x -= x.mean(axis=0)
    whitening = Whitening.fit(x)
    assert np.abs(whitening.matrix[:, :2]).argmax(axis=0).tolist() == [1, 3]
    assert np.array_equal(whitening.transform(x, 2), whitening.transform(x)[:, :2])


def test_inner_products_are_those_of_mahalanobis(x):
    centred = x.astype(float) - x.astype(float).mean(axis=0)
    expected = centred @ np.linalg.solve(np.cov(x.astype(float).T, ddof=0), centred.T)
    z = Whitening.fit(x).transform(x)
    assert z @ z.T == pytest.approx(expected, abs=1e-6)


def test_fewer_sentences_than_dimensions_whiten_the_directions_they_span(x):
    few = x[:7]
    z = Whitening.fit(few).transform(few)
    assert np.abs(np.cov(z.T, ddof=0) - np.diag([1] * 6 + [0] * 6)).max() < 1e-8
    centred = few.astype(float) - few.astype(float).mean(axis=0)
    expected = centred @ np.linalg.pinv(np.cov(few.astype(float).T, ddof=0), rcond=1e-10) @ centred.T
    assert z @ z.T == pytest.approx(expected, abs=1e-6)
    assert np.isfinite(Whitening.fit(few).transform(x)).all()


def test_equal_rows_have_no_direction_to_blow_up():
    x = np.full((7, 3), 0.1)  # whose mean is not 0.1 to the last bit
    assert not Whitening.fit(x).transform(x + [[1, 2, 3]]).any()


def test_what_cannot_be_fitted_or_mapped_is_refused(x):
    with pytest.raises(ValueError, match=r"two rows or more, not to an array of \(1, 12\)"):
        Whitening.fit(x[:1])
    broken = x.copy()
    broken[4, 2] = np.nan
    with pytest.raises(ValueError, match="NaN or infinity in row 4"):
        Whitening.fit(broken)
    for k in (0, 13):
        with pytest.raises(ValueError, match=f"k={k} components"):
            Whitening.fit(x).transform(x, k)
    with pytest.raises(ValueError, match="11-wide rows, by a map fitted to width 12"):
        Whitening.fit(x).transform(x[:, 1:])


@pytest.mark.parametrize(
    ("d", "rungs"),
    [(768, [768, 256, 128, 64, 32]), (256, [256, 128, 64, 32]), (100, [100, 64, 32]), (32, [32]), (8, [8])],
)
def test_the_ladder_goes_down_in_powers_of_two_below_the_width(d, rungs):
    assert ladder(d) == rungs

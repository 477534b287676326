"""Each kind of transform against SciPy's matrix functions, scikit-learn, closed forms and invariances."""

import json
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from scipy.linalg import fractional_matrix_power, sqrtm
from sklearn.covariance import shrunk_covariance
from sklearn.preprocessing import StandardScaler

from whitenedcse.evaluation.postprocess import Postprocess
from whitenedcse.evaluation.transforms import ORDERED, POWERED, SCALED, SHRUNK, Kind, Spectrum, cholesky

CONF = Path(__file__).parents[1] / "conf"
KINDS = get_args(Kind)
NEW = ("pca_cor", "zca_cor", "cholesky", "standardise")
WHITE = ("whitening", "zca", "pca_cor", "zca_cor", "cholesky")
D = 6


def rows(n=200, d=D, seed=0):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((n, d)) @ rng.standard_normal((d, d)) * np.linspace(0.5, 4, d) + 5


def fit(x, kind, **settings):
    return Postprocess(kind, **settings).fit(x)


def covariance(x):
    return np.cov(x.T, ddof=0)


def eigenvalues(a):
    return np.sort(np.linalg.eigvalsh(a))[::-1]


def close(found, wanted, tolerance=1e-10):
    scale = max(1, np.abs(wanted).max())
    return found.shape == wanted.shape and np.abs(found - wanted).max() <= tolerance * scale


def expected(kind, cov, power=0.5, shrinkage=0.0):
    """The covariance of what comes out, for a covariance of full rank."""
    deviations = np.sqrt(np.diag(cov))
    own = cov / np.outer(deviations, deviations) if kind in SCALED else cov
    pulled = shrunk_covariance(own, shrinkage)
    if kind == "cholesky":
        lower = np.linalg.cholesky(np.linalg.inv(pulled))
        return lower.T @ cov @ lower
    if kind in ("zca", "zca_cor"):
        return own @ fractional_matrix_power(pulled, -2 * power)
    if kind in ("whitening", "pca_cor"):
        return np.diag(eigenvalues(own) * eigenvalues(pulled) ** (-2 * power))
    if kind == "abtt":
        values, axes = np.linalg.eigh(cov)
        return cov - values[-1] * np.outer(axes[:, -1], axes[:, -1])
    return np.diag(eigenvalues(cov)) if kind == "pca" else own


CASES = [(kind, p, s) for kind in POWERED for p in (0, 0.2, 0.5, 1) for s in (0, 0.1, 0.7)]
CASES += [("cholesky", 0.5, s) for s in (0, 0.1, 0.7)]
CASES += [(kind, 0.5, 0) for kind in ("pca", "standardise", "centre", "abtt", "prefix")]


@pytest.mark.parametrize(("kind", "power", "shrinkage"), CASES)
def test_the_covariance_that_comes_out_has_its_closed_form(kind, power, shrinkage):
    x = rows()
    z = fit(x, kind, power=power, shrinkage=shrinkage).transform(x)
    assert close(covariance(z), expected(kind, covariance(x), power, shrinkage))
    assert kind == "prefix" or np.abs(z.mean(axis=0)).max() < 1e-12


def by_scipy(kind, cov):
    roots = np.diag(np.diag(cov) ** -0.5)
    if kind == "zca":
        return np.linalg.inv(sqrtm(cov))
    if kind == "zca_cor":
        return roots @ np.linalg.inv(sqrtm(roots @ cov @ roots))
    return np.linalg.cholesky(np.linalg.inv(cov))


@pytest.mark.parametrize("kind", ["zca", "zca_cor", "cholesky"])
def test_the_matrix_is_that_of_scipy(kind):
    x = rows()
    assert close(fit(x, kind).matrix, by_scipy(kind, covariance(x)))


def test_standardising_is_scikit_learn_s():
    x = rows()
    peer = StandardScaler().fit(x)
    other = rows(seed=1)
    assert close(fit(x, "standardise").transform(other), peer.transform(other), 1e-12)


def test_components_of_correlations_are_those_of_the_standardised_rows_in_order():
    x, other = rows(), rows(seed=1)
    peer = StandardScaler().fit(x)
    wanted = fit(peer.transform(x), "whitening").transform(peer.transform(other))
    found = fit(x, "pca_cor")
    assert close(found.transform(other), wanted, 1e-9)
    assert np.array_equal(found.transform(other, 2), fit(x, "pca_cor", k=2).transform(other))
    x[:, 3] *= 1e3  # which decides the first component of the covariance, not that of the correlations
    assert np.abs(fit(x, "whitening").matrix[3, 0] * x[:, 3].std()) > 0.999
    assert close(fit(x, "pca_cor").matrix[3] * 1e3, found.matrix[3])


@pytest.mark.parametrize("kind", WHITE)
def test_of_all_that_whiten_zca_is_nearest_and_zca_cor_correlates_most(kind):
    x = rows()
    shared = (x - x.mean(axis=0)).T @ fit(x, kind).transform(x) / len(x)  # covariances of x and z
    nearest = np.trace(sqrtm(covariance(x)))
    correlations = np.corrcoef(x.T)
    best = np.trace(sqrtm(correlations))
    sums = np.trace(shared) / nearest, np.trace(shared / x.std(axis=0)[:, None]) / best
    for found, ideal in zip(sums, ("zca", "zca_cor"), strict=True):
        assert (found == pytest.approx(1, abs=1e-10)) if kind == ideal else found < 0.999


@pytest.mark.parametrize("kind", SCALED)
def test_the_scale_of_a_channel_has_no_effect_where_deviations_are_divided_out(kind):
    x, scale = rows(), np.array([1e-2, 1, 10, 1e2, 3, 0.1])
    assert close(fit(x * scale, kind).transform(x * scale), fit(x, kind).transform(x))


@pytest.mark.parametrize("kind", ["whitening", "zca", "cholesky"])
def test_it_has_one_elsewhere(kind):
    x, scale = rows(), np.array([0.2, 1, 10, 100, 3, 0.1])
    same = close(fit(x * scale, kind).transform(x * scale), fit(x, kind).transform(x), 1e-3)
    assert same == (kind == "cholesky")  # which is triangular: a channel's scale is that of its component


def test_cholesky_is_lower_triangular_and_each_component_ignores_the_channels_before_it():
    x = rows()
    matrix = fit(x, "cholesky").matrix
    assert np.array_equal(matrix, np.tril(matrix)) and (np.diag(matrix) > 0).all()
    for j in range(D):
        assert close(fit(x[:, j:], "cholesky").matrix, matrix[j:, j:])
    assert matrix[-1, -1] == pytest.approx(1 / x[:, -1].std())


def test_cholesky_is_exact_where_channels_are_nearly_collinear():
    powers = np.random.default_rng(0).uniform(size=400)[:, None] ** np.arange(1, 8)  # condition 4e9
    spectrum = Spectrum.of(covariance(powers))
    half = (
        cholesky(spectrum).T @ spectrum.axes * np.sqrt(spectrum.variances)
    )  # a root of the covariance after it
    assert close(half @ half.T, np.eye(7), 1e-9)


@pytest.mark.parametrize("kind", POWERED)
def test_the_inverse_of_a_high_power_keeps_the_large_variances(kind):
    x = rows() * np.logspace(0, -4.5, D) @ np.linalg.qr(rows(D, seed=2))[0]
    fitted = fit(x, kind, power=1.0)
    assert close(fitted.inverse_transform(fitted.transform(x)), x, 1e-4)


@pytest.mark.parametrize("power", [0.2, 0.5, 1])
def test_zca_commutes_with_rotations_whatever_the_power(power):
    x, q = rows(), np.linalg.qr(rows(D, seed=2))[0]
    assert close(fit(x @ q, "zca", power=power).matrix, q.T @ fit(x, "zca", power=power).matrix @ q)


def test_all_that_whiten_in_full_give_unseen_rows_one_set_of_inner_products():
    x, other = rows(), rows(seed=1)
    wanted = (other - x.mean(axis=0)) @ np.linalg.inv(covariance(x)) @ (other - x.mean(axis=0)).T
    for kind in WHITE:
        z = fit(x, kind).transform(other)
        assert close(z @ z.T, wanted), kind
    for kind, same in (("whitening", "zca"), ("pca_cor", "zca_cor")):  # as do these whatever the power
        y, z = (fit(x, name, power=0.3, shrinkage=0.2).transform(other) for name in (kind, same))
        assert close(y @ y.T, z @ z.T) and not close(z @ z.T, wanted, 1e-2)


@pytest.mark.parametrize(
    ("kind", "other"), [("whitening", "pca"), ("zca", "centre"), ("zca_cor", "standardise")]
)
def test_the_power_0_is_a_rotation_or_nothing(kind, other):
    x = rows()
    assert close(fit(x, kind, power=0.0).matrix, fit(x, other).matrix, 1e-12)


@pytest.mark.parametrize("eps", [1e-4, 0.1, 20])
def test_soft_zca_is_zca_with_shrinkage_but_for_one_length(eps):
    x = rows()
    values, axes = np.linalg.eigh(covariance(x))
    soft = axes @ np.diag((values + eps) ** -0.5) @ axes.T
    amount = eps / (eps + values.mean())
    assert close(fit(x, "zca", shrinkage=amount).matrix * np.sqrt(1 - amount), soft)


@pytest.mark.parametrize("kind", WHITE)
@pytest.mark.parametrize("n", [2, 4])
def test_fewer_rows_than_channels_are_white_in_the_directions_they_have(kind, n):
    x = rows(n)
    fitted = fit(x, kind)
    z = fitted.transform(x)
    assert close(z @ z.T / n, np.eye(n) - 1 / n)  # rows in general position: all equally far apart
    assert np.isfinite(fitted.matrix).all() and np.abs(fitted.transform(rows(seed=1))).max() < 1e4
    if kind in ("whitening", "pca_cor", "cholesky"):
        assert close(covariance(z), np.diag(np.arange(D) < n - 1).astype(float))
        assert not fitted.matrix[:, n - 1 :].any()
    assert close(fitted.inverse_transform(z), x, 1e-9)


@pytest.mark.parametrize("power", [0.25, 0.5, 1.0])
@pytest.mark.parametrize("kind", ["zca", "zca_cor"])
def test_a_power_of_few_rows_is_that_of_the_variances_they_have(kind, power):
    x = rows(4)
    own = np.corrcoef(x.T) if kind == "zca_cor" else covariance(x)
    values, axes = np.linalg.eigh(own)
    wanted = sum(values[i] ** (1 - 2 * power) * np.outer(axes[:, i], axes[:, i]) for i in (-1, -2, -3))
    fitted = fit(x, kind, power=power)
    assert close(covariance(fitted.transform(x)), wanted)
    assert close(fitted.inverse_transform(fitted.transform(x)), x, 1e-9)


@pytest.mark.parametrize("at", [0, 2, D - 1])
@pytest.mark.parametrize("kind", [*WHITE, "standardise"])
@pytest.mark.parametrize("shrinkage", [0.0, 0.1])
def test_a_constant_channel_becomes_nothing_and_leaves_the_others_alone(kind, at, shrinkage):
    x = rows()
    others, amount = np.delete(x, at, axis=1), {"shrinkage": shrinkage} if kind in SHRUNK else {}
    alone = fit(others, kind, **amount)
    x[:, at] = 0.1
    fitted = fit(x, kind, **amount)
    moved = x + np.eye(D)[at]  # other rows may have another value there
    if shrinkage == 0 or kind in SCALED:
        assert close(fitted.transform(moved), fitted.transform(x), 1e-12)
        assert close(fitted.inverse_transform(fitted.transform(moved)), x, 1e-9)
    assert np.isfinite(fitted.transform(moved)).all()
    z = fitted.transform(x)
    zero = D - 1 if kind in ("whitening", "pca_cor") else at
    assert np.abs(z[:, zero]).max() < 1e-12
    if shrinkage == 0:
        assert close(np.delete(z, zero, axis=1), alone.transform(others))


@pytest.mark.parametrize("kind", WHITE)
def test_a_repeated_channel_takes_no_place_of_its_own(kind):
    x = rows()
    x[:, 3] = x[:, 1]
    fitted = fit(x, kind)
    z = fitted.transform(x)
    assert np.linalg.matrix_rank(fitted.matrix, tol=1e-9) == D - 1
    assert close(eigenvalues(covariance(z)), np.repeat([1.0, 0.0], [D - 1, 1]))
    assert close(fitted.inverse_transform(z), x, 1e-9)
    if kind == "cholesky":
        assert np.flatnonzero(~fitted.matrix.any(axis=0)).tolist() == [3]
        assert close(fitted.matrix @ fitted.matrix.T, np.linalg.pinv(covariance(x), rcond=1e-10))
    halves = Postprocess(kind).partial_fit(x[90:]).merge(fit(x[:90], kind))
    assert close(halves.transform(x), z, 1e-9)


@pytest.mark.parametrize("kind", NEW)
def test_equal_rows_become_zero(kind):
    x = np.full((7, 3), 0.1)  # whose mean is not 0.1 to the last bit
    fitted = fit(x, kind)
    assert not fitted.transform(x + [[1, 2, 3]]).any()
    assert np.array_equal(fitted.inverse_transform(fitted.transform(x)), x)


@given(
    kind=st.sampled_from(KINDS),
    n=st.integers(2, 12),
    seed=st.integers(0, 2**16),
    power=st.floats(0, 1),
    shrinkage=st.sampled_from([0.0, 0.01, 0.5]),
    constant=st.sets(st.integers(0, 3), max_size=2),
)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_any_rows_come_back_and_parts_fit_what_the_whole_does(kind, n, seed, power, shrinkage, constant):
    x = rows(n, 4, seed)
    x[:, sorted(constant)] = -3.0
    chosen = {"power": power} if kind in POWERED else {}
    chosen |= {"shrinkage": shrinkage} if kind in SHRUNK else {}
    fitted = fit(x, kind, **chosen)
    z = fitted.transform(x)
    assert np.isfinite(fitted.matrix).all() and np.isfinite(z).all()
    parts = Postprocess(kind, **chosen).merge(Postprocess(kind, **chosen).partial_fit(x[n // 2 :]))
    parts.partial_fit(x[: n // 2])
    assert close(parts.transform(x) @ parts.transform(x).T, z @ z.T, 1e-6)  # signs and equal axes aside
    if kind != "abtt":
        assert close(fitted.inverse_transform(z), x, 1e-6)


@pytest.mark.parametrize("kind", NEW)
def test_the_inverse_gives_back_rows_that_were_never_seen(kind):
    x, other = rows(), rows(seed=1)
    fitted = fit(x, kind)
    assert close(fitted.inverse_transform(fitted.transform(other)), other, 1e-9)
    if kind == "pca_cor":  # and of fewer components their projection, in the standardised space
        peer, y = StandardScaler().fit(x), fitted.transform(other, 2)
        axes = np.linalg.eigh(np.corrcoef(x.T))[1][:, -2:]
        wanted = peer.inverse_transform(peer.transform(other) @ axes @ axes.T)
        assert close(fitted.inverse_transform(y), wanted, 1e-9)
    elif kind != "standardise":
        with pytest.raises(ValueError, match=f"2-wide rows do not come from a {kind} fitted to width 6"):
            fitted.inverse_transform(other[:, :2])


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_keeps_every_bit_and_one_from_before_there_was_a_power_loads(kind, tmp_path):
    x, path = rows(), tmp_path / "fit"
    chosen = {"power": 0.3} if kind in POWERED else {}
    fitted = fit(x, kind, **chosen)
    fitted.save(path, {"corpus": "mine"})
    loaded = Postprocess.load(path)
    assert loaded.settings == fitted.settings and loaded.provenance == {"corpus": "mine"}
    assert all(np.array_equal(a, b) for a, b in zip(loaded.fitted, fitted.fitted, strict=True))
    if kind != "abtt":
        assert np.array_equal(loaded.inverse_transform(x), fitted.inverse_transform(x))
    with safe_open(path, "numpy") as file:
        metadata = file.metadata()
    older = json.loads(metadata["settings"])
    del older["power"], metadata["xxh3"]
    metadata["settings"] = json.dumps(older)
    save_file({name: array.copy() for name, array in load_file(path).items()}, path, metadata)
    assert Postprocess.load(path).power == 0.5


@pytest.mark.parametrize(
    ("kind", "chosen", "message"),
    [
        ("zca", {"power": -0.1}, r"power=-0.1 in \[0, 1\]"),
        ("zca", {"power": float("nan")}, r"power=nan in \[0, 1\]"),
        ("whitening", {"power": 1.1}, r"power=1.1 in \[0, 1\]"),
        ("pca", {"power": 0.4}, "power=0.4 is for whitening, zca, pca_cor, zca_cor, not pca"),
        ("cholesky", {"power": 0.4}, "power=0.4 is for whitening, zca, pca_cor, zca_cor, not cholesky"),
        ("standardise", {"shrinkage": 0.4}, "shrinkage=0.4 is for .*, not standardise"),
        ("zca_cor", {"k": 2}, "k=2 is for whitening, pca, pca_cor, prefix, not zca_cor"),
        ("cholesky", {"k": 2}, "k=2 is for whitening, pca, pca_cor, prefix, not cholesky"),
    ],
)
def test_settings_that_do_not_belong_to_a_kind_are_refused(kind, chosen, message):
    with pytest.raises(ValueError, match=message):
        Postprocess(kind, **chosen)


OPTIONS = {
    "soft_zca": {"kind": "zca", "shrinkage": 0.1},
    **{kind: {"kind": kind} for kind in KINDS},
}


@pytest.mark.parametrize("path", sorted((CONF / "postprocess").glob("*.yaml")), ids=lambda path: path.stem)
def test_each_option_of_the_command_line_is_a_kind_with_the_settings_it_can_have(path):
    with initialize_config_dir(str(CONF), version_base="1.3"):
        made = instantiate(compose("evaluate", ["run=x", f"postprocess={path.stem}"]).postprocess)
    if path.stem == "none":
        assert not made
    else:
        assert made.settings == Postprocess(**OPTIONS[path.stem]).settings
        text = path.read_text()
        for name, kinds in (("k", ORDERED), ("shrinkage", SHRUNK), ("power", POWERED)):
            assert (f"\n{name}: " in text) == (made.kind in kinds), name


def test_every_kind_is_an_option():
    assert {path.stem for path in (CONF / "postprocess").glob("*.yaml")} == {*OPTIONS, "none"}

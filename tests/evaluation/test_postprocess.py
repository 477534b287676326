"""Each kind of transform against SciPy's matrix functions, scikit-learn, closed forms and invariances."""

import json
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from hydra.utils import instantiate
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from safetensors.numpy import load_file, save_file
from scipy.linalg import fractional_matrix_power, sqrtm
from sklearn.covariance import shrunk_covariance
from sklearn.decomposition import PCA
from sklearn.preprocessing import StandardScaler

from whitenedcse.evaluation.postprocess import ORDERED, POWERED, Kind, Postprocess, ladder

CONF = Path(__file__).parents[2] / "conf"
KINDS = get_args(Kind)
D = 6


def rows(n=200, d=D, seed=0):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((n, d)) @ rng.standard_normal((d, d)) * np.linspace(0.5, 4, d) + 5


X, OTHER = rows(), rows(seed=1)


def fit(x, kind="whitening", **settings):
    return Postprocess(kind, **settings).fit(x)


def covariance(x):
    return np.cov(x.astype(float).T, ddof=0)


def eigenvalues(a):
    return np.sort(np.linalg.eigvalsh(a))[::-1]


def close(found, wanted, tolerance=1e-10):
    scale = max(1, np.abs(wanted).max())
    return found.shape == wanted.shape and np.abs(found - wanted).max() <= tolerance * scale


def expected(kind, cov, power=0.5, shrinkage=0.0):
    """The covariance of what comes out, for a covariance of full rank."""
    deviations = np.sqrt(np.diag(cov))
    own = cov / np.outer(deviations, deviations) if kind == "standardise" else cov
    pulled = shrunk_covariance(own, shrinkage)
    if kind == "zca":
        return own @ fractional_matrix_power(pulled, -2 * power)
    if kind == "whitening":
        return np.diag(eigenvalues(own) * eigenvalues(pulled) ** (-2 * power))
    if kind == "abtt":
        values, axes = np.linalg.eigh(cov)
        return cov - values[-1] * np.outer(axes[:, -1], axes[:, -1])
    return np.diag(eigenvalues(cov)) if kind == "pca" else own


def test_the_covariance_that_comes_out_has_its_closed_form():
    cases = [(kind, p, s) for kind in POWERED for p in (0, 0.2, 0.5, 1) for s in (0, 0.1, 0.7)]
    for kind, power, shrinkage in [*cases, *((kind, 0.5, 0) for kind in KINDS if kind not in POWERED)]:
        z = fit(X, kind, power=power, shrinkage=shrinkage).transform(X)
        assert close(covariance(z), expected(kind, covariance(X), power, shrinkage)), (kind, power, shrinkage)
        assert kind == "prefix" or np.abs(z.mean(axis=0)).max() < 1e-12


def test_matrices_are_those_of_scipy_and_rows_those_of_scikit_learn():
    cov, mean = covariance(X), X.mean(axis=0)
    assert close(fit(X, "zca").matrix, np.linalg.inv(sqrtm(cov)))
    assert close(fit(X, "standardise").transform(OTHER), StandardScaler().fit(X).transform(OTHER), 1e-12)
    assert close(fit(X, "centre").transform(OTHER), OTHER - mean, 1e-13)
    for k in (1, 4, D):
        for kind, factor in (("whitening", np.sqrt(200 / 199)), ("pca", 1)):  # it divides by n - 1
            peer = PCA(k, whiten=kind == "whitening", svd_solver="full").fit(X)
            for z in (fit(X, kind).transform(OTHER, k), fit(X, kind, k=k).transform(OTHER)):
                assert close(np.abs(z), np.abs(peer.transform(OTHER)) * factor, 1e-9)


def test_soft_zca_is_zca_with_shrinkage_but_for_length():
    values, axes = np.linalg.eigh(covariance(X))
    for eps in (1e-4, 0.1, 20):
        soft = axes @ np.diag((values + eps) ** -0.5) @ axes.T
        amount = eps / (eps + values.mean())
        assert close(fit(X, "zca", shrinkage=amount).matrix * np.sqrt(1 - amount), soft)


def test_abtt_takes_the_top_axes_out_one_by_one():
    for d, top, removed in ((12, None, 1), (250, None, 2), (12, 3, 3), (12, 11, 11)):
        x = np.random.default_rng(3).standard_normal((400, d)) * np.linspace(3, 1, d) + 2
        axes = np.linalg.eigh(covariance(x))[1][:, ::-1].T[:removed]
        wanted = x - x.mean(axis=0)
        for row in wanted:
            for axis in axes:
                row -= (row @ axis) * axis
        assert close(fit(x, "abtt", top=top).transform(x), wanted)


def test_a_prefix_is_the_first_channels_whatever_it_is_fitted_to():
    for k in (1, 5, D, None):
        for fitted in (fit(X, "prefix", k=k), fit(OTHER, "prefix", k=k)):
            assert (fitted.transform(X) == X[:, :k]).all()


def test_fewer_rows_than_channels_are_white_in_the_directions_they_have():
    for kind in POWERED:
        for n in (2, 4):
            x = rows(n)
            fitted = fit(x, kind)
            z = fitted.transform(x)
            assert close(z @ z.T / n, np.eye(n) - 1 / n)  # rows in general position: all equally far apart
            assert np.isfinite(fitted.matrix).all() and np.abs(fitted.transform(OTHER)).max() < 1e4
            assert close(eigenvalues(covariance(z)), (np.arange(D) < n - 1).astype(float))
            assert kind not in ORDERED or not fitted.matrix[:, n - 1 :].any()
            assert fitted.most == n - 1 and fitted.equal_cosines(n, D)
            assert not Postprocess(kind, shrinkage=0.1).equal_cosines(n, D)


def test_constant_equal_and_repeated_channels_become_nothing_and_leave_the_others_alone():
    for kind in (*POWERED, "standardise"):
        for at in (0, D - 1):
            x = X.copy()
            x[:, at] = 0.1
            fitted, alone = fit(x, kind), fit(np.delete(x, at, axis=1), kind)
            moved = x + np.eye(D)[at]  # other rows may have another value there
            z, zero = fitted.transform(x), D - 1 if kind == "whitening" else at
            assert close(fitted.transform(moved), z, 1e-12) and np.abs(z[:, zero]).max() < 1e-12
            assert close(np.delete(z, zero, axis=1), alone.transform(np.delete(x, at, axis=1)))
        equal = np.full((7, 3), 0.1)  # whose mean is not 0.1 to the last bit
        assert not fit(equal, kind).transform(equal + [[1, 2, 3]]).any()
    for kind in POWERED:
        x = X.copy()
        x[:, 3] = x[:, 1]
        z = fit(x, kind).transform(x)
        assert close(eigenvalues(covariance(z)), np.repeat([1.0, 0.0], [D - 1, 1]))


@given(
    kind=st.sampled_from(KINDS),
    n=st.integers(2, 12),
    seed=st.integers(0, 2**16),
    power=st.floats(0, 1),
    shrinkage=st.sampled_from([0.0, 0.01, 0.5]),
    constant=st.sets(st.integers(0, 3), max_size=2),
)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_parts_fit_what_the_whole_does(kind, n, seed, power, shrinkage, constant):
    x = rows(n, 4, seed)
    x[:, sorted(constant)] = -3.0
    chosen = {"power": power, "shrinkage": shrinkage} if kind in POWERED else {}
    fitted = fit(x, kind, **chosen)
    z = fitted.transform(x)
    assert np.isfinite(fitted.matrix).all() and np.isfinite(z).all()
    parts = Postprocess(kind, **chosen).partial_fit(x[n // 2 :]).partial_fit(x[: n // 2])
    assert close(parts.transform(x) @ parts.transform(x).T, z @ z.T, 1e-6)  # signs and equal axes aside


def test_a_file_keeps_every_bit_and_a_loaded_transform_takes_no_rows(tmp_path):
    for kind in KINDS:
        chosen = {"power": 0.3, "shrinkage": 0.1} if kind in POWERED else {}
        fitted, path = fit(X, kind, **chosen), tmp_path / kind
        fitted.save(path, {"corpus": "mine", "nested": {"layers": [-1, 0], "é": None}})
        loaded = Postprocess.load(path)
        assert loaded.settings == fitted.settings and loaded.provenance["nested"]["é"] is None
        assert all(np.array_equal(a, b) for a, b in zip(loaded.fitted, fitted.fitted, strict=True))
        with pytest.raises(ValueError, match="no moments to add to; fit it again"):
            loaded.partial_fit(X)
        assert loaded.fit(X[:50]).provenance == {}  # that was of another transform


def test_every_flipped_bit_of_a_file_is_refused_or_changes_nothing(tmp_path):
    path, refused = tmp_path / "fit", 0
    fit(X[:, :3]).save(path, {"corpus": "mine"})
    whole, before = path.read_bytes(), Postprocess.load(path)
    for at in range(0, len(whole), 3):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << at % 8
        path.write_bytes(damaged)
        try:
            got = Postprocess.load(path)
        except ValueError as error:
            refused += str(path) in str(error)
        else:
            assert (got.settings, got.provenance) == (before.settings, before.provenance)
            assert all(np.array_equal(a, b) for a, b in zip(got.fitted, before.fitted, strict=True))
    assert refused > 0.9 * len(whole) / 3


def test_foreign_missing_and_unwritable_files_are_errors_by_name(tmp_path):
    path = tmp_path / "fit"
    for content in (b"", b"# a text of some other kind\n" * 9):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=str(path)):
            Postprocess.load(path)
    for metadata in (None, {"settings": json.dumps({"kind": "centre"}), "provenance": "{}"}):  # no digest
        fit(X, "centre").save(path)
        save_file(load_file(path), path, metadata)
        with pytest.raises(ValueError, match=f"{path} is damaged"):
            Postprocess.load(path)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        Postprocess.load(tmp_path / "nowhere")
    with pytest.raises(TypeError, match="not JSON serializable"):
        fit(X).save(tmp_path / "other", {"path": tmp_path})
    assert [one.name for one in tmp_path.iterdir()] == ["fit"]


REFUSED = {
    r"whitening is fitted to two rows or more, not to 1": lambda: fit(X[:1]).fitted,
    r"not \(6,\)": lambda: fit(X[0]),
    "NaN or infinity in row 4": lambda: fit(np.where(np.arange(200)[:, None] == 4, np.nan, X)),
    "k=7 components of width 6: k is 1 to 6": lambda: fit(X, k=7).transform(X),
    "k=0 components": lambda: fit(X).transform(X, 0),
    "5-wide rows do not fit a whitening that is fitted to width 6": lambda: fit(X).transform(X[:, 1:]),
    "the components of zca have no order": lambda: fit(X, "zca").transform(X, 3),
    "this zca is not fitted yet: first call fit": lambda: Postprocess("zca").transform(X),
    "kind='ica' must be one of whitening, pca, zca": lambda: Postprocess("ica"),
    "k=3 is for whitening, pca, prefix, not zca": lambda: Postprocess("zca", k=3),
    "top=6 axes of 6: 1 to 5 can": lambda: fit(X, "abtt", top=6).transform(X),
    "top=3 is for abtt, not whitening": lambda: Postprocess("whitening", top=3),
    "shrinkage=0.1 is for .*, not pca": lambda: Postprocess("pca", shrinkage=0.1),
    r"shrinkage=1.0 must lie in \[0, 1\)": lambda: Postprocess("zca", shrinkage=1.0),
    r"power=nan in \[0, 1\]": lambda: Postprocess("zca", power=float("nan")),
}


def test_what_makes_no_sense_is_refused():
    for message, call in REFUSED.items():
        with pytest.raises(ValueError, match=message):
            call()
    fitted = fit(X)
    for call in (fitted.fit, fitted.transform):
        with pytest.raises((TypeError, ValueError)):
            call([["a text"] * D])
    with pytest.raises(ValueError):
        fit(X).partial_fit(X[:, 1:])


def test_the_ladder_goes_down_in_powers_of_two_below_the_width():
    assert [ladder(d) for d in (768, 256, 8)] == [[768, 256, 128, 64, 32], [256, 128, 64, 32], [8]]


def test_every_postprocess_of_the_configuration_is_built():
    for path in (CONF / "postprocess").glob("*.yaml"):
        config = OmegaConf.create({"k": None, "postprocess": OmegaConf.load(path)})
        built = instantiate(config.postprocess) if config.postprocess else None
        kind = "zca" if path.stem == "soft_zca" else path.stem
        assert built is None if kind == "none" else built.kind == kind

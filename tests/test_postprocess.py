"""Transforms against numpy's covariance and singular vectors, Mahalanobis, scikit-learn and naive loops."""

import json
import tracemalloc

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from sklearn.covariance import shrunk_covariance
from sklearn.decomposition import PCA

from whitenedcse.evaluation.postprocess import Postprocess, ladder

KINDS = ["whitening", "pca", "zca", "pca_cor", "zca_cor", "cholesky", "standardise", "centre", "abtt"]
OTHER = np.random.default_rng(1).standard_normal((30, 12)) + 5


@pytest.fixture
def x():
    rng = np.random.default_rng(0)
    mixing = rng.standard_normal((12, 12)) * np.logspace(0, -2, 12)
    return (rng.standard_normal((200, 12)) @ mixing + 5).astype(np.float32)


def fit(x, kind="whitening", **settings):
    return Postprocess(kind=kind, **settings).fit(x)


def cosines(x):
    x = x / np.linalg.norm(x, axis=1, keepdims=True)
    return x @ x.T


def by_hand(x):
    """Mean, singular values of the covariance divided by n, and its axes as columns."""
    x = x.astype(float)
    u, s, _ = np.linalg.svd(np.cov(x.T, ddof=0))
    return x.mean(axis=0), s, u


def mahalanobis(x, cov):
    x = x.astype(float) - x.astype(float).mean(axis=0)
    return x @ np.linalg.pinv(cov, rcond=1e-10) @ x.T


@pytest.mark.parametrize("kind", ["whitening", "zca"])
def test_what_it_was_fitted_to_comes_out_with_zero_mean_and_identity_covariance(x, kind):
    z = fit(x, kind).transform(x)
    assert z.dtype == np.float64
    assert np.abs(z.mean(axis=0)).max() < 1e-8
    assert np.abs(np.cov(z.T, ddof=0) - np.eye(12)).max() < 1e-8


@pytest.mark.parametrize("k", [1, 5, 12])
def test_whitening_is_the_published_formula_up_to_signs(x, k):
    mean, s, u = by_hand(x)
    expected = (OTHER - mean) @ (u @ np.diag(s**-0.5))[:, :k]
    for z in (fit(x).transform(OTHER, k), fit(x, k=k).transform(OTHER)):
        assert np.abs(z) == pytest.approx(np.abs(expected), rel=1e-6, abs=1e-6)
        assert cosines(z) == pytest.approx(cosines(expected), abs=1e-8)


@pytest.mark.parametrize("k", [1, 5, 12])
@pytest.mark.parametrize(("kind", "factor"), [("whitening", np.sqrt(200 / 199)), ("pca", 1)])
def test_scikit_learn_agrees_but_for_n_minus_1(x, k, kind, factor):
    peer = PCA(k, whiten=kind == "whitening", svd_solver="full").fit(x.astype(float))
    z = fit(x, kind).transform(OTHER, k)
    assert np.abs(z) == pytest.approx(np.abs(peer.transform(OTHER)) * factor, rel=1e-6, abs=1e-8)


def test_zca_is_the_symmetric_root_and_centre_the_mean(x):
    mean, s, u = by_hand(x)
    z = fit(x, "zca").transform(OTHER)
    assert z == pytest.approx((OTHER - mean) @ (u / np.sqrt(s)) @ u.T, rel=1e-7, abs=1e-7)
    assert fit(x, "centre").transform(OTHER) == pytest.approx(OTHER - mean, abs=1e-13)


@pytest.mark.parametrize(("d", "top", "removed"), [(12, None, 1), (250, None, 2), (12, 3, 3), (12, 11, 11)])
def test_abtt_takes_the_top_axes_out_one_by_one(d, top, removed):
    x = np.random.default_rng(3).standard_normal((400, d)) * np.linspace(3, 1, d) + 2
    mean, _, u = by_hand(x)
    expected = x - mean
    for row in expected:
        for axis in u.T[:removed]:
            row -= (row @ axis) * axis
    assert fit(x, "abtt", top=top).transform(x) == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize(("n", "shrinkage"), [(200, 0.1), (200, 0.9), (7, 0.1)])
@pytest.mark.parametrize("kind", ["whitening", "zca"])
@pytest.mark.slow(but=2)
def test_shrinkage_whitens_by_a_covariance_pulled_towards_a_sphere(x, kind, n, shrinkage):
    cov = np.cov(x[:n].astype(float).T, ddof=0)
    fitted = fit(x[:n], kind, shrinkage=shrinkage)
    z = fitted.transform(x[:n])
    assert z @ z.T == pytest.approx(mahalanobis(x[:n], shrunk_covariance(cov, shrinkage)), rel=1e-7, abs=1e-7)
    assert fitted.variances == pytest.approx(np.linalg.eigvalsh(cov)[::-1], rel=1e-8, abs=1e-12)  # before it
    assert fitted.inverse_transform(fitted.transform(OTHER)) == pytest.approx(OTHER, abs=1e-9)


def test_the_first_k_columns_are_those_of_most_variance():
    rng = np.random.default_rng(2)
    scales = np.array([0.5, 8, 1, 4])
    x = np.linalg.qr(rng.standard_normal((50, 4)))[0] * scales  # about orthogonal axes, of known variance
    x -= x.mean(axis=0)
    fitted = fit(x)
    assert np.abs(fitted.matrix[:, :2]).argmax(axis=0).tolist() == [1, 3]
    assert np.array_equal(fitted.transform(x, 2), fitted.transform(x)[:, :2])


@pytest.mark.parametrize("kind", ["whitening", "zca"])
@pytest.mark.parametrize("n", [2, 7, 200])
def test_inner_products_are_those_of_mahalanobis_in_the_directions_that_sentences_span(x, n, kind):
    fitted = fit(x[:n], kind)
    z = fitted.transform(x[:n])
    rank = min(n - 1, 12)
    assert z @ z.T == pytest.approx(mahalanobis(x[:n], np.cov(x[:n].astype(float).T, ddof=0)), abs=1e-6)
    spectrum = np.linalg.eigvalsh(np.cov(z.T, ddof=0))
    assert spectrum == pytest.approx([0] * (12 - rank) + [1] * rank, abs=1e-8)
    assert np.isfinite(fitted.transform(x)).all()
    assert np.abs(fitted.matrix).max() < 1e3  # an axis of rounding errors would be scaled by 1e7
    if kind == "whitening":
        assert not fitted.matrix[:, rank:].any()


def test_equal_rows_have_no_direction_to_blow_up():
    x = np.full((7, 3), 0.1)  # whose mean is not 0.1 to the last bit
    moved = x + [[1, 2, 3]]
    for kind in ("whitening", "zca"):
        fitted = fit(x, kind)
        assert not fitted.transform(moved).any()
        assert np.array_equal(fitted.inverse_transform(fitted.transform(moved)), x)
    for kind in ("centre", "abtt"):  # no top axis to take out
        assert np.array_equal(fit(x, kind).transform(moved), moved - x[0])


@pytest.mark.parametrize("kind", ["whitening", "pca", "zca", "centre"])
@pytest.mark.parametrize("n", [200, 7])
def test_the_inverse_gives_back_what_was_fitted(x, kind, n):
    fitted = fit(x[:n], kind)
    ranks = [12, min(12, n - 1)] if kind in ("whitening", "pca") else [None]
    for k in ranks:
        assert fitted.inverse_transform(fitted.transform(x[:n], k)) == pytest.approx(x[:n], abs=1e-9)
    if kind in ("whitening", "pca"):  # fewer components give the projection on them
        mean, _, u = by_hand(x[:n])
        expected = (OTHER - mean) @ u[:, :4] @ u[:, :4].T + mean
        assert fitted.inverse_transform(fitted.transform(OTHER, 4)) == pytest.approx(expected, abs=1e-7)
    if kind == "zca":  # whose inverse is the root of the covariance, without a gain of 1 / 0 for n = 7
        mean, s, u = by_hand(x[:n])
        assert fitted.inverse_transform(OTHER) == pytest.approx(OTHER @ (u * s**0.5) @ u.T + mean, abs=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_and_merges_fit_what_the_whole_does(x, kind):
    whole, pieces = fit(x, kind), Postprocess(kind=kind)
    for row in x[:5]:
        pieces.partial_fit(row[None])
    early = pieces.transform(OTHER)
    pieces.partial_fit(x[5:90])
    middle = pieces.transform(OTHER)
    pieces.merge(Postprocess(kind=kind).partial_fit(x[90:]))
    assert not np.allclose(early, middle)
    for fitted in (pieces, Postprocess(kind=kind).merge(whole)):
        assert fitted.transform(OTHER) == pytest.approx(whole.transform(OTHER), rel=1e-9, abs=1e-9)
    assert pieces.fit(x[:90]).transform(OTHER) == pytest.approx(middle, rel=1e-9, abs=1e-9)  # and forget


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_transform_comes_back_bit_for_bit(tmp_path, x, kind):
    special = {"whitening": {"k": 5, "shrinkage": 0.1}, "abtt": {"top": 2}}
    fitted = fit(x, kind, **special.get(kind, {}))
    provenance = {"corpus": "wiki", "sentences": 200, "nested": {"layers": [-1, 0], "é": None}}
    fitted.save(tmp_path / "fit", provenance)
    loaded = Postprocess.load(tmp_path / "fit")
    assert (loaded.provenance, repr(loaded)) == (provenance, repr(fitted))
    for name in ("mean", "matrix", "variances"):
        assert np.array_equal(getattr(loaded, name), getattr(fitted, name)), name
    assert np.array_equal(loaded.transform(OTHER), fitted.transform(OTHER))
    assert [path.name for path in tmp_path.iterdir()] == ["fit"]
    assert loaded.fit(x[:50]).provenance == {}  # that was of another transform


def changed(path, *, tensors=None, **metadata):
    """The file again, with some of its tensors or metadata changed."""
    content = {"settings": json.dumps({"kind": "centre"}), "provenance": "{}"} | metadata
    save_file(load_file(path) | (tensors or {}), path, {k: v for k, v in content.items() if v is not None})


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"# a text of some other kind\n" * 9),
        lambda path: path.write_bytes(path.read_bytes()[:-8]),
        lambda path: save_file({"mean": np.zeros(3)}, path),
        lambda path: changed(path, settings=None),
        lambda path: changed(path, settings="{"),
        lambda path: changed(path, settings='{"type": "zca"}'),
        lambda path: changed(path, provenance=None),
        lambda path: changed(path, tensors={"mean": np.zeros(11)}),
        lambda path: changed(path, tensors={"matrix": np.zeros((12, 12), np.float32)}),
        lambda path: changed(path, tensors={"scale": np.zeros(12)}),
    ],
)
def test_a_foreign_or_broken_file_is_refused_by_name(tmp_path, x, damage):
    path = tmp_path / "fit"
    fit(x, "centre").save(path, {})
    changed(path)
    Postprocess.load(path)
    damage(path)
    with pytest.raises(
        ValueError,
        match=f"{path} (is damaged .*; (copy it again, or fit it|copy or download it)|was not written by) ",
    ):
        Postprocess.load(path)


def test_a_directory_is_not_called_damaged(tmp_path):
    with pytest.raises(ValueError, match=f"^{tmp_path} is a directory; name a file$"):
        Postprocess.load(tmp_path)


def test_every_flipped_bit_is_refused_or_changes_nothing(tmp_path):
    path = tmp_path / "fit"
    fit(OTHER[:, :3]).save(path, {"corpus": "mine"})
    whole, before, refused = path.read_bytes(), Postprocess.load(path), 0
    for at in range(len(whole)):
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
    assert refused > 0.9 * len(whole)


def test_an_older_file_without_a_digest_loads(tmp_path, x):
    path = tmp_path / "fit"
    fit(x).save(path, {})
    with safe_open(path, "numpy") as file:
        metadata = file.metadata()
    del metadata["xxh3"]
    save_file({name: array.copy() for name, array in load_file(path).items()}, path, metadata)
    assert (Postprocess.load(path).matrix == fit(x).matrix).all()


def test_a_missing_file_and_provenance_that_is_not_json_are_errors(tmp_path, x):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        Postprocess.load(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="provenance must be plain JSON values"):
        fit(x).save(tmp_path / "fit", {"path": tmp_path})
    assert not list(tmp_path.iterdir())


def test_transforming_a_memory_map_takes_two_copies(tmp_path):
    file = np.memmap(tmp_path / "x", np.float32, "w+", shape=(20_000, 64))
    file[:] = np.random.default_rng(0).standard_normal(file.shape, np.float32)
    fitted = fit(file)
    tracemalloc.start()
    fitted.transform(file)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2.1 * file.size * 8


REFUSED = [
    (lambda x: fit(x[:1]), r"whitening is fitted to two rows or more, not to 1"),
    (lambda x: fit(x[0]), r"not \(12,\)"),
    (lambda x: fit(x[0, 0]), r"not \(\)"),
    (lambda x: fit(np.where(np.arange(200)[:, None] == 4, np.nan, x)), "NaN or infinity in row 4"),
    (lambda x: fit(x, k=0), "k=0 components of width 12; give from 1 to 12"),
    (lambda x: fit(x, k=13), "k=13 components of width 12; give from 1 to 12"),
    (lambda x: fit(x, "abtt", top=0), "top=0 axes of 12: 1 to 11 can"),
    (lambda x: fit(x, "abtt", top=12), "top=12 axes of 12: 1 to 11 can"),
    (lambda x: fit(x).transform(x, 0), "k=0 components"),
    (lambda x: fit(x).transform(x, 13), "k=13 components"),
    (
        lambda x: fit(x).transform(x[:, 1:]),
        "11-wide rows do not fit a whitening that is fitted to width 12",
    ),
    (
        lambda x: fit(x, "zca").transform(x, 3),
        "k=3 is for whitening, pca, pca_cor, prefix; the components of zca",
    ),
    (
        lambda x: fit(x, "abtt").transform(x, 12),
        "k=12 is for whitening, pca, pca_cor, prefix; the components of abtt",
    ),
    (lambda x: fit(x, "abtt").inverse_transform(x), "abtt has no inverse"),
    (lambda x: fit(x, "pca").inverse_transform(OTHER[:, :0]), "0-wide rows do not come from a pca"),
    (lambda x: fit(x).inverse_transform(np.zeros((2, 13))), "13-wide rows do not come from a whitening"),
    (
        lambda x: fit(x, "zca").inverse_transform(x[:, 1:]),
        "11-wide rows do not come from a zca fitted to width 12",
    ),
    (lambda x: Postprocess(kind="zca").transform(x), "this zca is not fitted yet: first call fit"),
    (
        lambda x: Postprocess(kind="ica"),
        "kind='ica' must be one of whitening, pca, zca, pca_cor, zca_cor, chol",
    ),
    (lambda x: Postprocess("soft_zca"), "; soft_zca is zca with a shrinkage, such as 0.1"),
    (lambda x: Postprocess(kind="zca", k=3), "k=3 is for whitening, pca, pca_cor, prefix, not zca"),
    (lambda x: Postprocess(kind="whitening", top=3), "top=3 is for abtt, not whitening"),
    (
        lambda x: Postprocess(kind="pca", shrinkage=0.1),
        "shrinkage=0.1 is for whitening, zca, pca_cor, zca_cor, cholesky, not pca",
    ),
    (lambda x: Postprocess(kind="zca", shrinkage=1.0), r"shrinkage=1.0 must lie in \[0, 1\)"),
    (lambda x: Postprocess(kind="zca", shrinkage=-0.1), r"shrinkage=-0.1 must lie in \[0, 1\)"),
    (lambda x: fit(x).merge(fit(x, shrinkage=0.1)), "their settings differ"),
    (lambda x: fit(x).merge(Postprocess(kind="whitening")), "has no moments to merge"),
    (lambda x: fit(x).merge(fit(x[:, 1:])), "width 11 cannot merge into those of width 12"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_makes_no_sense_is_refused_by_name(x, call, message):
    with pytest.raises(ValueError, match=message):
        call(x)


def test_a_loaded_transform_is_not_added_to(tmp_path, x):
    fit(x).save(tmp_path / "fit", {})
    loaded = Postprocess.load(tmp_path / "fit")
    for call in (lambda: loaded.merge(fit(x)), lambda: loaded.partial_fit(x)):
        with pytest.raises(ValueError, match="no moments to add to; fit it again"):
            call()


def test_a_refused_fit_leaves_the_last_one(x):
    fitted, new = fit(x), Postprocess(kind="pca")
    before = fitted.transform(OTHER)
    for call in (
        lambda: fitted.fit(x[:1]),
        lambda: fitted.partial_fit(x[:, 1:]),
        lambda: new.partial_fit(x[0, :5]),
    ):
        with pytest.raises(ValueError):
            call()
    assert np.array_equal(fitted.transform(OTHER), before)
    assert np.array_equal(new.partial_fit(x).matrix, fit(x, "pca").matrix)


@pytest.mark.parametrize(
    ("d", "rungs"),
    [(768, [768, 256, 128, 64, 32]), (256, [256, 128, 64, 32]), (100, [100, 64, 32]), (32, [32]), (8, [8])],
)
def test_the_ladder_goes_down_in_powers_of_two_below_the_width(d, rungs):
    assert ladder(d) == rungs


@pytest.mark.parametrize("k", [1, 5, 12, None])
def test_a_prefix_is_the_first_channels_whatever_it_is_fitted_to(x, k):
    for fitted in (fit(x, "prefix", k=k), fit(OTHER, "prefix", k=k)):
        assert (fitted.transform(x) == x[:, :k]).all()
    assert (fit(x, "prefix").inverse_transform(x.astype(float)) == x).all()


def test_a_shorter_prefix_has_no_inverse(x):
    with pytest.raises(ValueError, match="a prefix of 5 of 12 channels has no inverse"):
        fit(x, "prefix").inverse_transform(x[:, :5])
    with pytest.raises(ValueError, match="k=13 components"):
        fit(x, "prefix", k=13)

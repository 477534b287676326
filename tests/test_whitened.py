"""A transform fitted to an embedder's vectors, and the embedder that ends with it."""

from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from encoders import SENTENCES, embedder_of
from numpy.testing import assert_allclose

from whitenedcse.app import cli
from whitenedcse.data.corpus import Corpus
from whitenedcse.evaluation.postprocess import Postprocess
from whitenedcse.evaluation.transforms import POWERED, Kind
from whitenedcse.model import checkpoint
from whitenedcse.model.embedder import Embedder
from whitenedcse.model.head import Final
from whitenedcse.serving import fitting
from whitenedcse.serving.exports import Wanted, export, scaled, whitened
from whitenedcse.serving.fitting import fitted

TEXTS = [f"{a} {b}" for a in SENTENCES for b in SENTENCES]
D = 16


@pytest.fixture
def embedder(bert):
    return embedder_of(bert, kind="mean").eval()


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.txt"
    path.write_text("\n".join([*TEXTS, "", "  ", TEXTS[0]]) + "\n")
    return Corpus(str(path))


def by_hand(x, k=None):
    """x (n, d) and y -> y whitened: from the eigenvectors of the covariance, in float64."""
    x = x.astype(np.float64)
    values, axes = np.linalg.eigh(np.cov(x.T, bias=True))
    order = np.argsort(-values)[:k]
    scale = (
        np.where(values[order] > 1e-12 * values.max(), values[order], np.inf) ** -0.5
    )  # LayerNorm: one is empty
    return lambda y: (y - x.mean(0)) @ axes[:, order] * scale


def up_to_sign(a, b):
    signs = np.sign((a * b).sum(0))
    return a * signs, b


def fit_of(embedder, corpus, **settings):
    fit = Postprocess("whitening", **settings)
    fit.provenance = fitted(fit, embedder, corpus)
    return fit


@pytest.mark.parametrize("block", [7, 20_000])
def test_it_is_fitted_to_every_text_that_is_not_blank_as_often_as_it_comes(
    embedder, corpus, block, monkeypatch
):
    monkeypatch.setattr(fitting, "BLOCK", block)
    fit = fit_of(embedder, corpus)
    x = embedder.encode([*TEXTS, TEXTS[0]])
    assert_allclose(fit.mean, x.astype(np.float64).mean(0), atol=1e-7)
    assert_allclose(
        fit.variances, np.sort(np.linalg.eigvalsh(np.cov(x.T, bias=True)))[::-1], rtol=1e-4, atol=1e-12
    )
    assert fit.provenance["texts"] == len(TEXTS) + 1 and fit.provenance["corpus"] == corpus.path


@pytest.mark.parametrize("k", [None, 5])
@pytest.mark.parametrize("unit", [False, True])
def test_the_vectors_are_whitened_and_then_of_unit_length(embedder, corpus, k, unit, tmp_path):
    x = embedder.encode(TEXTS)
    wanted = by_hand(embedder.encode([*TEXTS, TEXTS[0]]), k)(x)
    source = scaled(embedder, unit=unit)
    ended = whitened(source, fit_of(source, corpus), k)
    wanted = wanted / np.linalg.norm(wanted, axis=1, keepdims=True) if unit else wanted
    got = ended.encode(TEXTS)
    assert got.shape == (len(TEXTS), k or D) == (len(TEXTS), ended.width)
    assert_allclose(*up_to_sign(got, wanted), atol=2e-3)  # float32 vectors with variances of 1e-5
    checkpoint.save(ended, tmp_path / "ended")
    again = Embedder.load(str(tmp_path / "ended"))
    assert np.array_equal(again.encode(TEXTS), got)
    assert again.final.provenance["texts"] == len(TEXTS) + 1 and "probe" not in again.final.provenance


@pytest.mark.parametrize(
    ("kind", "power"), [*((kind, 0.5) for kind in get_args(Kind)), *((kind, 0.2) for kind in POWERED)]
)
@pytest.mark.slow(but=4)
def test_any_transform_ends_an_embedder(embedder, kind, power, tmp_path):
    x = embedder.encode([*TEXTS, "a"])
    fit = Postprocess(kind, power=power).fit(x)
    ended, wanted = whitened(embedder, fit), fit.transform(x[:64])
    assert_allclose(ended.encode(TEXTS), wanted, atol=1e-5 * np.abs(fit.matrix).max())  # of float32 vectors
    checkpoint.save(ended, tmp_path / "ended")
    assert np.array_equal(Embedder.load(str(tmp_path / "ended")).encode(TEXTS), ended.encode(TEXTS))
    assert ended.final.provenance["kind"] == kind


def test_a_second_transform_follows_the_first(embedder, corpus):
    once = whitened(embedder, fit_of(embedder, corpus), 8)
    fit = Postprocess("pca", k=3).fit(once.encode(TEXTS[:20]))  # the first transform leaves them a mean
    assert_allclose(whitened(once, fit).encode(TEXTS), fit.transform(once.encode(TEXTS)), atol=1e-5)


def test_unit_length_comes_and_goes_and_leaves_the_transform(embedder):
    last = Final(weight=torch.eye(D)[:4], bias=torch.ones(4), unit=False, provenance={"by": "hand"})
    ended = embedder.replaced(final=last)
    unit = scaled(ended, unit=True)
    assert_allclose(np.linalg.norm(unit.encode(TEXTS), axis=1), 1, rtol=1e-6)
    assert np.array_equal(scaled(unit, unit=False).encode(TEXTS), ended.encode(TEXTS))
    assert unit.final.provenance == {"by": "hand"}
    assert scaled(embedder, unit=False) is embedder
    assert scaled(scaled(embedder, unit=True), unit=False).final is None


def test_a_transform_of_another_embedder_is_refused(embedder, corpus, bert):
    fit = fit_of(embedder, corpus)
    with pytest.raises(
        ValueError, match=r"with the pooling mean over layers .*Embedder.load\(MODEL, pooling\)"
    ):
        whitened(embedder_of(bert, kind="cls", layers=(0,)), fit)
    with pytest.raises(ValueError, match="width 16 .* width 5"):
        whitened(whitened(embedder, fit, 5), fit)
    with pytest.raises(ValueError, match="k=17"):
        whitened(embedder, fit, 17)


def test_the_command_fits_and_writes_a_transform_that_says_where_it_came_from(
    embedder, corpus, tmp_path, capsys
):
    checkpoint.save(embedder, tmp_path / "best")
    source, out = str(tmp_path / "best"), tmp_path / "whitening.safetensors"
    assert cli.main(["whiten", "fit", source, corpus.path, str(out)]) == 0
    assert "65 texts" in capsys.readouterr().out
    fit = Postprocess.load(out)
    assert fit.provenance["source"] == source and fit.kind == "whitening"
    wanted = by_hand(embedder.encode([*TEXTS, TEXTS[0]]))(embedder.encode(TEXTS))
    assert_allclose(*up_to_sign(fit.transform(embedder.encode(TEXTS)), wanted), atol=2e-3)
    sampled = tmp_path / "sampled.safetensors"
    more = ["--sample", "20", "--kind", "pca", "--bf16"]
    assert cli.main(["whiten", "fit", source, corpus.path, str(sampled), *more]) == 0
    assert Postprocess.load(sampled).provenance["texts"] == 20
    for kind in set(get_args(Kind)) - {"prefix"}:
        more = ["--power", "0.3"] if kind in POWERED else []
        assert cli.main(["whiten", "fit", source, corpus.path, str(out), "--kind", kind, *more]) == 0
        fit, x = Postprocess.load(out), embedder.encode([*TEXTS, TEXTS[0]])
        wanted = Postprocess(kind, power=0.3 if more else 0.5).fit(x)
        assert fit.settings == wanted.settings and fit.variances == pytest.approx(wanted.variances, rel=1e-3)
    capsys.readouterr()
    for kind, cure in (("prefix", "need no fit"), ("soft_zca", "give --kind zca --shrinkage 0.1")):
        assert cli.main(["whiten", "fit", source, corpus.path, str(out), "--kind", kind]) == 2
        assert cure in capsys.readouterr().err
    assert cli.main(["whiten", "fit", source, corpus.path, str(out), "--kind", "ica"]) == 2
    assert "kind='ica' must be one of whitening, pca" in capsys.readouterr().err


def test_a_fit_to_few_texts_says_so_or_is_refused_where_it_cannot_be(source, embedder, tmp_path, capsys):
    few, out = tmp_path / "few.txt", str(tmp_path / "fit")
    few.write_text("\n".join(TEXTS[:6]))
    note = "note: 6 texts are few for width 16: 5 components of this {} can vary; fit it to more texts, or by"
    for kind in ("whitening", "zca_cor", "cholesky", "pca"):
        assert cli.main(["whiten", "fit", source, str(few), out, "--kind", kind]) == 0
        said = capsys.readouterr().out
        assert said.startswith(note.format(kind))
        assert "keep fewer components (--dim, or in search build --whiten-k)\n" in said
    assert cli.main(["whiten", "fit", source, str(few), out, "--shrinkage", "0.1"]) == 0
    assert cli.main(["whiten", "fit", source, str(few), out, "--kind", "standardise"]) == 0
    assert "note" not in capsys.readouterr().out
    made = [
        "export",
        source,
        str(tmp_path / "made"),
        "--to",
        "sentence-transformers",
        "--whiten-on",
        str(few),
    ]
    assert cli.main(made) == 0 and note.format("whitening") in capsys.readouterr().out
    assert cli.main([*made, "--dim", "5"]) == 0
    said = capsys.readouterr().out
    assert "note: 6 texts are few for 5 components of this whitening, 10 for" in said
    assert "keep fewer components (--dim, or in search build --whiten-k)\n" in said
    many = tmp_path / "many.txt"
    many.write_text("\n".join(TEXTS[:6] * 9))
    assert cli.main([*made[:-1], str(many), "--dim", "5"]) == 0 and "note" not in capsys.readouterr().out
    refused = "6 components, but only 5 can vary: the transform is fitted to 6 texts; keep 5 or fewer"
    assert cli.main([*made, "--dim", "6"]) == 2 and refused in capsys.readouterr().err
    build = ["search", "build", source, str(few), str(tmp_path / "index"), "--whiten-k", "6"]
    assert cli.main(build) == 2 and refused in capsys.readouterr().err
    assert cli.main(["whiten", "fit", source, str(few), out]) == 0
    made[-2:] = ["--whiten", out, "--dim", "6"]
    assert cli.main(made) == 2 and refused in capsys.readouterr().err
    fit = Postprocess("whitening", k=6).fit(embedder.encode(TEXTS[:6]))
    for k in (6, None):
        with pytest.raises(ValueError, match=refused):
            whitened(embedder, fit, k)


def test_an_embedder_and_a_fit_may_be_named_by_their_paths(source, embedder, tmp_path):
    fit = Postprocess("whitening").fit(embedder.encode(TEXTS).tolist())
    fit.save(tmp_path / "fit")
    wanted = whitened(embedder, fit, 4).encode(TEXTS)
    assert_allclose(whitened(source, tmp_path / "fit", 4).encode(TEXTS), wanted, atol=1e-6)
    for wrong, message in (
        (lambda: whitened(embedder, {}), "a Postprocess or the path of its file is expected, not dict"),
        (lambda: whitened(3, fit), "an Embedder or the path of one is expected, not int"),
        (lambda: fit.fit(TEXTS), "rows of numbers are expected, not .*: encode texts first"),
        (lambda: fit.transform(TEXTS), "rows of numbers are expected"),
    ):
        with pytest.raises(TypeError, match=message):
            wrong()


def test_a_fit_replaces_a_fit_alone(source, corpus, tmp_path, capsys):
    out = tmp_path / "mine"
    out.write_text("mine")
    words = ["whiten", "fit", source, corpus.path]
    assert cli.main([*words, str(out)]) == 2
    assert f"{out} is a file, but no earlier fit; choose another name" in capsys.readouterr().err
    assert out.read_text() == "mine"
    other = tmp_path / "best" / "model.safetensors"
    assert cli.main([*words, str(other)]) == 2 and "no earlier fit" in capsys.readouterr().err
    for name in (str(other), corpus.path, str(tmp_path / "mine")):  # another's tensors, a corpus, four bytes
        assert cli.main(["encode", source, corpus.path, str(tmp_path / "x"), "--whiten", name]) == 2
        line = f"{name} was not written by whiten fit; fit again (a corpus: --whiten-on)"
        assert line in capsys.readouterr().err
    assert cli.main([*words, str(tmp_path / "fit")]) == 0 and "earlier" not in capsys.readouterr().out
    assert cli.main([*words, str(tmp_path / "fit")]) == 0
    assert capsys.readouterr().out.endswith("fit; it replaces an earlier one\n")


def test_a_plain_encoder_is_pooled_as_asked_and_bad_input_is_one_line(bert, corpus, tmp_path, capsys):
    plain = tmp_path / "plain"
    bert.backbone.save_pretrained(plain)
    bert.tokenizer.save_pretrained(plain)
    out = str(tmp_path / "whitening.safetensors")
    asked = ["--pooling", "mean", "--layers", "1", "-1"]
    assert cli.main(["whiten", "fit", str(plain), corpus.path, out, *asked]) == 0
    embedder = embedder_of(bert, kind="mean", layers=(1, -1)).eval()
    assert_allclose(Postprocess.load(Path(out)).mean, embedder.encode([*TEXTS, TEXTS[0]]).mean(0), atol=1e-6)
    (tmp_path / "one.txt").write_text("one line\n\n")
    for wrong, message in {
        (str(plain), str(tmp_path / "one.txt"), out): "1 texts that are not blank",
        (str(plain), corpus.path, str(tmp_path / "no" / "fit")): "no such directory",
        (str(plain), str(tmp_path / "absent.txt"), out): "no such file",
    }.items():
        assert cli.main(["whiten", "fit", *wrong]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("error:") == 1 and "Traceback" not in error


def test_a_transform_is_not_fitted_to_vectors_that_are_not_finite_nor_to_equal_ones(embedder, tmp_path):
    (tmp_path / "same.txt").write_text("the cat\n" * 9)
    with pytest.raises(ValueError, match="same.txt: all 9 texts have the same vector; whitening"):
        fitted(Postprocess("whitening"), embedder, Corpus(str(tmp_path / "same.txt")))
    with torch.no_grad():
        embedder.encoder.backbone.embeddings.word_embeddings.weight[:] = torch.nan
    (tmp_path / "other.txt").write_text("the cat\nthe dog\n")
    with pytest.raises(ValueError, match="NaN or infinity in the vector of 'the cat'"):
        fitted(Postprocess("whitening"), embedder, Corpus(str(tmp_path / "other.txt")))
    with pytest.raises(ValueError, match="NaN or infinity in the vector of 'one text"):
        export(embedder, tmp_path / "out", Wanted("transformers", "x", verify=False))
    assert not (tmp_path / "out").exists()


def test_covariances_that_overflow_and_a_file_with_nan_are_refused(tmp_path):
    with (
        np.errstate(over="ignore", invalid="ignore"),
        pytest.raises(ValueError, match="NaN or infinity in the cov"),
    ):
        _ = Postprocess("whitening").fit(np.array([[1e200, 1.0], [-1e200, 2.0], [0.0, 4.0]])).mean
    fit = Postprocess("whitening").fit(np.random.default_rng(0).standard_normal((9, 2)))
    fit.matrix[1, 0] = np.nan
    fit.save(tmp_path / "fit", {})
    with pytest.raises(ValueError, match="fit is damaged .*NaN or infinity in row 2 of mean, matrix"):
        Postprocess.load(tmp_path / "fit")

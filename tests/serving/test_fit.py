"""A transform fitted to an embedder's vectors, and the embedder that ends with it."""

from contextlib import nullcontext
from itertools import product
from typing import get_args

import numpy as np
import pytest
import torch
from encoders import SENTENCES, embedder_of, whitened_by_hand
from numpy.testing import assert_allclose

from whitenedcse.app import cli
from whitenedcse.data.corpus import Corpus
from whitenedcse.evaluation.postprocess import POWERED, Kind, Postprocess
from whitenedcse.model.head import Final
from whitenedcse.serving import fit as fit_module
from whitenedcse.serving.fit import fitted, scaled, whitened

TEXTS = [f"{a} {b}" for a in SENTENCES for b in SENTENCES]
D = 16


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.txt"
    path.write_text("\n".join([*TEXTS, "", "  ", "\u200b\ufeff\u00ad", TEXTS[0]]) + "\n")
    return Corpus(str(path))


def fit_of(embedder, corpus, **settings):
    fit = Postprocess("whitening", **settings)
    fit.provenance = fitted(fit, embedder, corpus)
    return fit


def test_it_is_fitted_to_every_text_with_tokens_as_often_as_it_comes(embedder, corpus, monkeypatch):
    x = embedder.encode([*TEXTS, TEXTS[0]])
    for block in (7, 20_000):
        monkeypatch.setattr(fit_module, "BLOCK", block)
        fit = fit_of(embedder, corpus)
        assert_allclose(fit.mean, x.astype(np.float64).mean(0), atol=1e-7)
        values = np.sort(np.linalg.eigvalsh(np.cov(x.T, bias=True)))[::-1]
        assert_allclose(fit.variances, values, rtol=1e-4, atol=1e-12)
        assert fit.provenance["texts"] == len(TEXTS) + 1 and fit.provenance["corpus"] == corpus.path


def test_the_vectors_are_whitened_and_then_of_unit_length(embedder, corpus):
    x = embedder.encode(TEXTS)
    for k, unit in product((None, 5), (False, True)):
        wanted = whitened_by_hand(embedder.encode([*TEXTS, TEXTS[0]]), k)(x)
        source = scaled(embedder, unit=unit)
        ended = whitened(source, fit_of(source, corpus), k)
        wanted = wanted / np.linalg.norm(wanted, axis=1, keepdims=True) if unit else wanted
        got = ended.encode(TEXTS)
        assert got.shape == (len(TEXTS), k or D) == (len(TEXTS), ended.width)
        signs = np.sign((got * wanted).sum(0))
        assert_allclose(got * signs, wanted, atol=2e-3)  # float32 vectors with variances of 1e-5
        assert ended.final.provenance["texts"] == len(TEXTS) + 1 and "probe" not in ended.final.provenance


def test_any_transform_ends_an_embedder(embedder, tmp_path):
    x = embedder.encode([*TEXTS, "a"])
    for kind, power in [*((kind, 0.5) for kind in get_args(Kind)), *((kind, 0.2) for kind in POWERED)]:
        fit = Postprocess(kind, power=power).fit(x)
        ended, wanted = whitened(embedder, fit), fit.transform(x[:64])
        limit = 1e-5 * np.abs(fit.matrix).max()  # of float32 vectors
        assert_allclose(ended.encode(TEXTS), wanted, atol=limit)
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
    with pytest.raises(ValueError, match="fitted to pooling mean over layers .*, here cls over layers"):
        whitened(embedder_of(bert, kind="cls", layers=(0,)), fit)
    with pytest.raises(ValueError, match="width 16 .* width 5"):
        whitened(whitened(embedder, fit, 5), fit)
    with pytest.raises(ValueError, match="k=17"):
        whitened(embedder, fit, 17)
    for cosine, known in ((0.998, False), (0.9999, True)):  # one that was trained further, another machine
        fit = fit_of(embedder, corpus)
        then = np.array(fit.provenance["probe"])
        other = np.random.default_rng(0).normal(size=len(then))
        other -= other @ then / (then @ then) * then
        other *= np.linalg.norm(then) / np.linalg.norm(other)
        fit.provenance["probe"] = (cosine * then + (1 - cosine**2) ** 0.5 * other).tolist()
        with nullcontext() if known else pytest.raises(ValueError, match="was fitted to another embedder"):
            whitened(embedder, fit)


def test_a_transform_fitted_after_unit_length_is_not_put_before_it(embedder):
    short = scaled(embedder, unit=True)
    for kind in ("whitening", "pca", "zca", "centre"):
        wrong = Postprocess(kind).fit(short.encode(TEXTS))
        with pytest.raises(ValueError, match="fitted to vectors of unit length, and would come before"):
            whitened(short, wrong)
        whitened(embedder, wrong)
        whitened(short, Postprocess(kind).fit(1.001 * short.encode(TEXTS)))  # a fit to other vectors


def test_the_command_writes_a_transform_that_says_where_it_came_from(
    source, embedder, corpus, tmp_path, capsys
):
    out, x = tmp_path / "whitening.safetensors", embedder.encode([*TEXTS, TEXTS[0]])
    assert cli.main(["whiten", "fit", source, corpus.path, str(out), "--kind", "zca"]) == 0
    fit, wanted = Postprocess.load(out), Postprocess("zca").fit(x)
    assert fit.settings == wanted.settings and fit.provenance["source"] == source
    assert fit.variances == pytest.approx(wanted.variances, rel=1e-3)
    assert "65 texts" in capsys.readouterr().out
    more = ["--sample", "20", "--kind", "pca", "--bf16"]
    assert cli.main(["whiten", "fit", source, corpus.path, str(out), *more]) == 0
    assert Postprocess.load(out).provenance["texts"] == 20


def test_a_fit_to_few_texts_says_so_or_is_refused_where_it_cannot_be(source, embedder, tmp_path, capsys):
    few, out = tmp_path / "few.txt", str(tmp_path / "fit")
    few.write_text("\n".join(TEXTS[:6]))
    for kind in ("whitening", "zca"):
        assert cli.main(["whiten", "fit", source, str(few), out, "--kind", kind]) == 0
        note = f"note: 6 texts are few for 16 components of this {kind}, 10 for each do; fit it to more"
        assert capsys.readouterr().out.startswith(note)
    for more in (["--shrinkage", "0.1"], ["--kind", "pca"]):
        assert cli.main(["whiten", "fit", source, str(few), out, *more]) == 0
        assert "note" not in capsys.readouterr().out
    made = ["export", source, str(tmp_path / "made"), "--to", "sentence-transformers", "--whiten-on"]
    assert cli.main([*made, str(few), "--dim", "5"]) == 0
    assert "note: 6 texts are few for 5 components of this whitening, 10 for" in capsys.readouterr().out
    refused = "6 components, but only 5 can vary: the transform is fitted to 6 texts; keep 5 or fewer"
    assert cli.main([*made, str(few), "--dim", "6"]) == 2 and refused in capsys.readouterr().err
    fit = Postprocess("whitening", k=6).fit(embedder.encode(TEXTS[:6]))
    for k in (6, None):
        with pytest.raises(ValueError, match=refused):
            whitened(embedder, fit, k)


def test_an_embedder_and_a_fit_may_be_named_by_their_paths(source, embedder, tmp_path):
    fit = Postprocess("whitening").fit(embedder.encode(TEXTS).tolist())
    fit.save(tmp_path / "fit")
    wanted = whitened(embedder, fit, 4).encode(TEXTS)
    assert_allclose(whitened(source, tmp_path / "fit", 4).encode(TEXTS), wanted, atol=1e-6)


def test_a_fit_replaces_a_fit_alone(source, corpus, tmp_path, capsys):
    out = tmp_path / "mine"
    out.write_text("mine")
    words = ["whiten", "fit", source, corpus.path]
    assert cli.main([*words, str(out)]) == 2
    assert f"{out} is damaged" in capsys.readouterr().err
    assert out.read_text() == "mine"
    other = tmp_path / "best" / "model.safetensors"
    assert cli.main([*words, str(tmp_path / "none" / "x")]) == 2
    assert "name a file in a directory that exists" in capsys.readouterr().err
    for name in (str(other), corpus.path, str(tmp_path / "mine")):  # another's tensors, a corpus, four bytes
        assert cli.main(["encode", source, corpus.path, str(tmp_path / "x"), "--whiten", name]) == 2
        said = capsys.readouterr().err
        assert f"{name} is damaged" in said and "make it with whitenedcse whiten fit" in said
    assert cli.main([*words, str(tmp_path / "fit")]) == 0
    assert cli.main([*words, str(tmp_path / "fit")]) == 0


def test_bad_input_is_one_line(source, embedder, corpus, tmp_path, capsys):
    (tmp_path / "one.txt").write_text("one line\n\n")
    (tmp_path / "same.txt").write_text("the cat\n" * 9)
    for name, message in {
        "one.txt": "whitening is fitted to two rows or more, not to 1",
        "same.txt": "same.txt: all texts have the same vector; whitening",
        "absent.txt": "no such file",
    }.items():
        assert cli.main(["whiten", "fit", source, str(tmp_path / name), str(tmp_path / "fit")]) == 2
        assert message in capsys.readouterr().err
    with torch.no_grad():
        embedder.encoder.backbone.embeddings.word_embeddings.weight[:] = torch.nan
    with pytest.raises(ValueError, match="NaN or infinity in the vector of 'the cat"):
        fitted(Postprocess("whitening"), embedder, corpus)

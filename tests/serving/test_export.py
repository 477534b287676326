"""Exports: each library gives the source's vectors from what it is given, or nothing is written."""

import json
import math
import re
import shutil

import numpy as np
import pytest
import torch
from encoders import SENTENCES, architecture, embedder_of
from exported import by_onnxruntime, by_sentence_transformers, by_transformers
from huggingface_hub import ModelCard
from numpy.testing import assert_allclose
from report_runs import trained
from safetensors.torch import load_file, save_file

from whitenedcse.app import cli
from whitenedcse.evaluation.postprocess import Postprocess
from whitenedcse.model import checkpoint
from whitenedcse.model.embedder import Embedder
from whitenedcse.model.encoder import Encoder
from whitenedcse.model.head import ProjectionHead
from whitenedcse.model.sentence_transformers import ForeignModules
from whitenedcse.run import Run
from whitenedcse.serving import card
from whitenedcse.serving.export import FORMATS, TEXTS, Graph, difference, export
from whitenedcse.serving.fit import scaled, whitened

pytestmark = pytest.mark.filterwarnings("ignore")  # those of the libraries that load the exports
CORPUS = [f"{a} {b}" for a in SENTENCES for b in SENTENCES]
LONG = " ".join(SENTENCES * 5)
ASKED = [LONG, "", "cat", *SENTENCES, LONG[:200]]
POOLINGS = [("cls", [-1]), ("mean", [-1]), ("mean", [1, -1]), ("max", [-1])]


@pytest.fixture
def bert(tokenizer):
    """An encoder whose vectors differ: else all texts are alike, and whitening amplifies rounding."""
    return Encoder(architecture("bert", len(tokenizer)), tokenizer)


@pytest.fixture
def embedder(bert):
    return embedder_of(bert, kind="mean", layers=[1, -1]).eval()


def white(embedder, k=5):
    return whitened(embedder, Postprocess("whitening").fit(scaled(embedder, unit=False).encode(CORPUS)), k)


def assert_alike(found, wanted):
    """Within the limit that an export is held to, 1e-5 of a vector's length if that is above 1."""
    assert found.shape == wanted.shape
    assert (np.abs(found - wanted) <= 1e-5 * np.linalg.norm(wanted, axis=1, keepdims=True).clip(1)).all()


@pytest.mark.parametrize("shape", ["bert", "roberta"])
def test_each_library_gives_the_source_s_vectors(shape, tokenizer, tmp_path):
    encoder = Encoder(architecture(shape, len(tokenizer)), tokenizer)
    for i, (kind, layers) in enumerate(POOLINGS if shape == "bert" else POOLINGS[2:3]):
        plain = embedder_of(encoder, kind=kind, layers=layers).eval()
        assert export(plain, tmp_path / f"t{i}", "transformers")["difference"] <= 1e-5
        assert_alike(by_transformers(tmp_path / f"t{i}", ASKED, kind, layers), plain.encode(ASKED))
        embedder = scaled(white(plain), unit=True) if kind == "mean" else plain
        wanted, out = embedder.encode(ASKED), tmp_path / f"st{i}"
        assert export(embedder, out, "sentence-transformers")["difference"] <= 1e-5
        assert_alike(by_sentence_transformers(out, ASKED), wanted)
        assert_alike(Embedder.load(out).encode(ASKED), wanted)
        tokens = encoder.tokenizer(ASKED, padding=True, truncation=True, return_tensors="pt")
        with torch.no_grad():  # before it is traced, which takes seconds
            found = Graph(embedder)(tokens["input_ids"], tokens["attention_mask"]).numpy()
        assert_alike(found, wanted)


def test_a_whitening_behind_the_whole_head_is_read_again(bert, tmp_path):
    embedder = white(embedder_of(bert, kind="mean", head=ProjectionHead(16), embedding="head").eval())
    export(embedder, tmp_path / "out", "sentence-transformers")
    assert_alike(Embedder.load(tmp_path / "out").encode(ASKED), embedder.encode(ASKED))


@pytest.mark.slow
def test_onnxruntime_gives_the_same_vectors_without_layers_that_pooling_does_not_read(
    bert, tmp_path, monkeypatch
):
    import onnx  # a second that the other tests need not wait for

    monkeypatch.chdir(tmp_path)  # where the lines of the card are run
    embedder = scaled(white(embedder_of(bert, kind="mean", layers=[1]).eval()), unit=True)
    assert export(embedder, tmp_path / "out", "onnx")["difference"] <= 1e-5
    for size in (1, 2, 11):
        assert_allclose(by_onnxruntime(tmp_path / "out", ASKED, size), embedder.encode(ASKED), atol=1e-5)
    assert_allclose(by_card(tmp_path / "out"), embedder.encode(["a sentence"]), atol=1e-5)
    held = sum(math.prod(weight.dims) for weight in onnx.load(tmp_path / "out/model.onnx").graph.initializer)
    layer = sum(weight.numel() for weight in bert.backbone.encoder.layer[0].parameters())
    assert held < sum(weight.numel() for weight in bert.backbone.parameters()) - 2 * layer


def test_head_pooler_prompt_and_counts_of_layers_travel(bert, tmp_path):
    head = ProjectionHead(width=16, whitening=None, dense=True, position="before")
    dense = embedder_of(bert, kind="pooler", head=head, embedding="dense").eval()
    layers = embedder_of(bert, kind="mean", layers=[-1, -1, 1]).eval()
    for embedder in (dense.replaced(prompt="the "), layers):
        embedder = scaled(embedder, unit=True)
        export(embedder, tmp_path / "out", "sentence-transformers")
        assert_allclose(by_sentence_transformers(tmp_path / "out", ASKED), embedder.encode(ASKED), atol=1e-5)
    again = Embedder.load(tmp_path / "out")
    assert_allclose(again.encode(ASKED), embedder.encode(ASKED), atol=1e-5)
    (tmp_path / "out" / "export.json").unlink()
    (tmp_path / "out" / "digests.json").unlink()
    with pytest.raises(ForeignModules, match="weighs layers"):
        Embedder.load(tmp_path / "out")
    shutil.rmtree(tmp_path / "out")
    for to, kind, cure in (
        ("sentence-transformers", "max", "use --to onnx"),
        ("transformers", "mean", "--to"),
    ):
        embedder = white(embedder_of(bert, kind=kind, layers=[1, -1]).eval())
        with pytest.raises(ValueError, match=cure):
            export(embedder, tmp_path / "none", to)


def test_an_export_for_transformers_is_loaded_with_its_pooling_prompt_and_unit_length(embedder, tmp_path):
    for one in (embedder, scaled(embedder.replaced(prompt="the "), unit=True)):
        export(one, tmp_path / "out", "transformers")
        again = Embedder.load(tmp_path / "out")
        assert_alike(again.encode(ASKED), one.encode(ASKED))
        assert (str(again.pooling), again.prompt) == (str(one.pooling), one.prompt)


@pytest.mark.parametrize("to", ["transformers", "sentence-transformers"])
def test_an_export_holds_no_code_and_every_file_of_it_is_checked(embedder, tmp_path, to):
    embedder.max_length = 20
    export(embedder.train(), out := tmp_path / "out", to, verify=False)
    assert embedder.training and embedder.encoder.tokenizer.model_max_length == 128  # the source is as it was
    assert json.loads((out / "tokenizer_config.json").read_text())["model_max_length"] == 20
    files = [path for path in out.rglob("*") if path.is_file() and path.suffix != ".md"]
    assert {path.suffix for path in files} == {".json", ".safetensors"}
    for path in files:
        whole = path.read_bytes()
        for content in (whole[:-2] + bytes([whole[-2] ^ 1]) + whole[-1:], whole[:-9], b""):
            path.write_bytes(content)
            with pytest.raises(ValueError, match=r"copy (the checkpoint|or make it) again"):
                Embedder.load(out)
        path.write_bytes(whole)
    (out / "README.md").write_text("a card that was edited")
    Embedder.load(out)


@pytest.mark.parametrize("to", ["transformers", "sentence-transformers"])
def test_a_spoiled_export_is_refused_and_what_was_there_stays(embedder, tmp_path, to, monkeypatch):
    def spoiling(embedder, draft):
        form.write(embedder, draft)
        weights = load_file(file := draft / "model.safetensors")
        weights["encoder.layer.2.output.LayerNorm.bias"][3] += 1e-4
        save_file(weights, file, {"format": "pt"})

    out, form = tmp_path / "out", FORMATS[to]
    export(embedder, out, to)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    monkeypatch.setitem(FORMATS, to, form._replace(write=spoiling))
    with pytest.raises(ValueError, match="differ by .*e-05, more than 1e-05"):
        export(embedder, out, to)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    assert "difference" not in export(embedder, out, to, verify=False)
    with monkeypatch.context() as patch:
        patch.setattr("whitenedcse.serving.export.find_spec", lambda name: None)
        with pytest.raises(ValueError, match=r"needs onnx .*: pip install 'whitenedcse\[onnx\]'"):
            export(embedder, tmp_path / "none", "onnx")


def test_the_difference_is_relative_to_long_vectors():
    a, b = np.array([[3.0, 4.0], [0.1, 0.0]]), np.array([[3.0, 4.5], [0.1, -0.05]])
    assert difference(a, b) == pytest.approx(0.1)  # 0.5 / 5 and 0.05 / 1
    lengths = sorted(len(text.split()) for text in TEXTS)
    assert len(set(TEXTS)) == 64 and lengths[0] == 0 and lengths[-1] > 1000 and len(set(lengths)) > 20


def test_what_is_no_export_is_not_replaced(embedder, tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "notes").write_text("mine")
    for name in ("file", "folder"):
        with pytest.raises((ValueError, OSError), match="is a file, and|other than an export; choose"):
            export(embedder, tmp_path / name, "transformers", verify=False)
    with torch.no_grad():
        embedder.encoder.backbone.embeddings.word_embeddings.weight[:] = torch.nan
    with pytest.raises(ValueError, match="NaN or infinity in the vector of"):
        export(embedder, tmp_path / "out", "transformers", verify=False)
    assert not (tmp_path / "out").exists()


CARDS = [("transformers", kind) for kind in ("mean", "cls", "max", "last", "pooler")]
CARDS += [("sentence-transformers", "mean")]


def by_card(out):
    """What the lines of Python on a card give, in the folder above."""
    code, scope = re.search(r"```python\n(.*?)```", (out / "README.md").read_text(), re.DOTALL)[1], {}
    with torch.no_grad():
        exec(code, scope)
    return np.asarray(scope["x"])


@pytest.mark.parametrize(("to", "kind"), CARDS)
def test_the_card_s_own_lines_load_the_vectors(bert, tmp_path, to, kind, monkeypatch):
    layers = [1, -1] if kind in ("mean", "cls", "last") else [-1]
    embedder = scaled(embedder_of(bert, kind=kind, layers=layers).eval(), unit=kind != "cls")
    export(embedder, tmp_path / "out", to, verify=False, source="x/y")
    monkeypatch.chdir(tmp_path)
    assert_allclose(by_card(tmp_path / "out"), embedder.encode(["a sentence"]), atol=1e-5)
    data = ModelCard((tmp_path / "out" / "README.md").read_text()).data.to_dict()
    assert (data["library_name"], data["license"], data["base_model"]) == (to, "unknown", "x/y")


def test_the_card_of_a_run_says_what_it_was_trained_on_and_what_it_scored(embedder, tmp_path):
    settings = {"data__corpus": "mine.txt", "data__sample": 7, "monitor__dev": "pairs.csv"}
    settings |= {"encoder": {"path": "owner/base"}, "system": "tiny"}
    checkpoint.save(embedder, trained(tmp_path / "run", 3, average=73.0, **settings) / "best")
    command = ["export", str(tmp_path / "run"), str(out := tmp_path / "out"), "--to", "transformers"]
    assert cli.main(command) == 0
    text = (out / "README.md").read_text()
    for said in ("system: tiny", "seed: 3", "corpus: mine.txt", "sentences: 7", "commit: c0ffee"):
        assert f"- {said}\n" in text
    assert re.search(r"\| as it is \| +\| 71.50 \| 74.50 \| 73.00 \|", text)
    assert ModelCard(text).data.base_model == "owner/base" and str(tmp_path) not in text
    export(Run(tmp_path / "run"), out, "transformers", verify=False)
    assert (out / "README.md").read_text().startswith(text.partition("- in 64 texts")[0])
    (tmp_path / "run/scores.json").unlink()
    assert cli.main(command) == 0 and "- not finished: this is its best" in (out / "README.md").read_text()


def test_a_card_names_no_folder_or_bucket_of_a_corpus(tmp_path):
    assert card.shown(str(tmp_path / "sweep" / "3")) == "sweep/3"  # a job of a sweep
    given = ("wiki1m", "owner/pairs", str(tmp_path), "/gone/x.txt", "s3://secret/bucket/x.txt.gz")
    assert [*map(card.shown, given)] == ["wiki1m", "owner/pairs", tmp_path.name, "x.txt", "x.txt.gz"]
    assert card.transforms({"read from": str(tmp_path)}) == ["an affine transform"]


def test_the_command_fits_a_whitening_or_takes_one(embedder, tmp_path, capsys):
    checkpoint.save(embedder, tmp_path / "best")
    (corpus := tmp_path / "corpus.txt").write_text("\n".join(CORPUS))
    source, fit = str(tmp_path / "best"), str(tmp_path / "fit")
    command = ["export", source, str(tmp_path / "out"), "--to", "sentence-transformers"]
    assert cli.main(["whiten", "fit", source, str(corpus), fit]) == 0
    wanted = scaled(white(embedder, 4), unit=True).encode(ASKED)
    for more in (["--whiten", fit], ["--whiten-on", str(corpus)]):
        assert cli.main([*command, *more, "--dim", "4", "--unit"]) == 0
        assert_alike(by_sentence_transformers(tmp_path / "out", ASKED), wanted)
        assert "for sentence-transformers, no component differs by more than" in capsys.readouterr().out
    said = "whitening, 4 components, fitted to 64 texts of corpus.txt"
    assert said in (tmp_path / "out/README.md").read_text()
    for wrong, message in (
        (["--to", "transformers", "--dim", "4"], "--dim 4 keeps components of a whitening"),
        (["--to", "transformers", "--whiten-on", str(corpus)], "holds the encoder alone"),
        (["--to", "sentence-transformers", "--whiten", "nowhere"], "nowhere"),
    ):
        assert cli.main(["export", source, str(tmp_path / "no"), *wrong]) == 2
        assert message in capsys.readouterr().err and not (tmp_path / "no").exists()

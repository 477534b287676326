"""Exports: each library gives the source's vectors from what it is given, or nothing is written."""

import base64
import http.server
import json
import os
import pickle
import re
from pathlib import Path
from typing import get_args

import encoders
import numpy as np
import pytest
import torch
from encoders import SENTENCES, embedder_of, nowhere, serving
from huggingface_hub import ModelCard
from numpy.testing import assert_allclose
from safetensors.torch import load_file, save_file

from whitenedcse.app import cli
from whitenedcse.data.corpus import Corpus
from whitenedcse.evaluation.postprocess import Postprocess
from whitenedcse.evaluation.transforms import Kind
from whitenedcse.files import seal, write_json
from whitenedcse.model import checkpoint
from whitenedcse.model.embedder import Embedder
from whitenedcse.model.encoder import Encoder
from whitenedcse.model.head import ProjectionHead
from whitenedcse.serving import card as card_module
from whitenedcse.serving import exports, layouts
from whitenedcse.serving.card import shown
from whitenedcse.serving.exports import Wanted, export, scaled, whitened
from whitenedcse.serving.fitting import fitted

pytestmark = pytest.mark.filterwarnings("ignore")  # those of the libraries that load the exports
BACKBONE = encoders.backbone
TEXTS = [f"{a} {b}" for a in SENTENCES for b in SENTENCES]
LONG = " ".join(SENTENCES * 5)
ASKED = [LONG, "", "cat", *SENTENCES, LONG[:200]]
POOLINGS = [("cls", [-1]), ("mean", [-1]), ("mean", [1, -1])]


@pytest.fixture(autouse=True)
def lively(monkeypatch):
    """Encoders whose vectors differ: else all texts are alike, and whitening amplifies rounding."""
    monkeypatch.setattr(encoders, "backbone", lambda *shape: louder(BACKBONE(*shape)))


def louder(model):
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(5 if weight.ndim > 1 else 1)
    return model


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.txt"
    path.write_text("\n".join(TEXTS) + "\n")
    return path


@pytest.fixture
def embedder(bert):
    return embedder_of(bert, kind="mean", layers=[1, -1]).eval()


def fit_of(embedder, corpus):
    fit = Postprocess("whitening")
    fit.provenance = fitted(fit, embedder, Corpus(str(corpus)))
    return fit


def by_sentence_transformers(out, texts):
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(out), device="cpu").encode(texts)


def by_onnxruntime(out, texts, size=3):
    """In batches of a size that is not the traced one, each as long as its longest text."""
    ort = pytest.importorskip("onnxruntime")
    from transformers import AutoTokenizer

    tokenizer, session = AutoTokenizer.from_pretrained(out), ort.InferenceSession(out / "model.onnx")
    rows = []
    for start in range(0, len(texts), size):
        tokens = tokenizer(texts[start : start + size], padding=True, truncation=True, return_tensors="np")
        feed = {name: tokens[name] for name in ("input_ids", "attention_mask")}
        rows.append(session.run(None, feed)[0])
    return np.concatenate(rows)


def by_transformers(out, texts, kind, layers):
    """One text at a time, without padding."""
    from transformers import AutoModel, AutoTokenizer

    model, tokenizer = AutoModel.from_pretrained(out).eval(), AutoTokenizer.from_pretrained(out)
    rows = []
    for text in texts:
        with torch.no_grad():
            hidden = model(**tokenizer(text, truncation=True, return_tensors="pt"), output_hidden_states=True)
        x = torch.stack([hidden.hidden_states[layer][0] for layer in layers]).mean(0)
        rows.append(x[0] if kind == "cls" else x.mean(0))
    return torch.stack(rows).numpy()


def assert_alike(found, wanted):
    """Within the limit that an export is held to, 1e-5 of a vector's length if that is above 1."""
    assert found.shape == wanted.shape
    assert (np.abs(found - wanted) <= 1e-5 * np.linalg.norm(wanted, axis=1, keepdims=True).clip(1)).all()


@pytest.mark.parametrize(("cosine", "refused"), [(0.998, True), (0.9999, False)])
def test_a_transform_knows_its_embedder_from_one_that_was_trained_further(embedder, corpus, cosine, refused):
    fit = fit_of(embedder, corpus)
    then = np.array(fit.provenance["probe"])
    other = np.random.default_rng(0).normal(size=len(then))
    other -= other @ then / (then @ then) * then
    other *= np.linalg.norm(then) / np.linalg.norm(other)
    fit.provenance["probe"] = (cosine * then + (1 - cosine**2) ** 0.5 * other).tolist()
    if not refused:
        whitened(embedder, fit)
        return
    with pytest.raises(ValueError, match="was fitted to another embedder"):
        whitened(embedder, fit)
    fit.provenance["pooling"] = "cls of layer 9"
    words = r"with the pooling cls of layer 9, and here it is mean over layers \[1, -1\]; load"
    with pytest.raises(ValueError, match=words):
        whitened(embedder, fit)


def test_a_transform_fitted_after_unit_length_is_not_put_before_it(embedder):
    short, texts = scaled(embedder, unit=True), [*TEXTS, *ASKED]
    raw = Postprocess("whitening").fit(short.replaced(final=None).encode(texts))
    assert_allclose(np.linalg.norm(whitened(short, raw, 4).encode(texts), axis=1), 1, atol=1e-5)
    for kind in ("whitening", "pca", "zca_cor", "centre"):
        wrong = Postprocess(kind).fit(short.encode(texts))
        with pytest.raises(ValueError, match="fitted to vectors of unit length, and would come before"):
            whitened(short, wrong)
        whitened(embedder, wrong)


@pytest.mark.parametrize("k", [None, 5])
@pytest.mark.parametrize(("kind", "layers"), POOLINGS)
@pytest.mark.slow(but=5)
def test_sentence_transformers_gives_the_same_vectors(encoder, corpus, tmp_path, kind, layers, k):
    embedder = embedder_of(encoder, kind=kind, layers=layers).eval()
    embedder = whitened(embedder, fit_of(embedder, corpus), k) if k else embedder
    found = export(embedder, tmp_path / "out", Wanted("sentence-transformers", "x"))
    wanted = embedder.encode(ASKED)
    assert wanted.shape == (len(ASKED), k or 16) and found["difference"] <= 1e-5
    assert_alike(by_sentence_transformers(tmp_path / "out", ASKED), wanted)
    assert_alike(Embedder.load(str(tmp_path / "out")).encode(ASKED), wanted)


@pytest.mark.parametrize("k", [None, 5])
@pytest.mark.parametrize(("kind", "layers"), POOLINGS)
def test_the_graph_before_it_is_traced_gives_the_same_vectors(encoder, corpus, kind, layers, k):
    embedder = embedder_of(encoder, kind=kind, layers=layers).eval()
    embedder = whitened(embedder, fit_of(embedder, corpus), k) if k else embedder
    tokens = encoder.tokenizer(ASKED, padding=True, truncation=True, return_tensors="pt")
    with torch.no_grad():
        found = layouts.Graph(embedder)(tokens["input_ids"], tokens["attention_mask"]).numpy()
    assert_alike(found, embedder.encode(ASKED))


@pytest.mark.parametrize("kind", get_args(Kind))
@pytest.mark.slow(but=3)
def test_any_transform_travels_in_both_formats(embedder, tmp_path, kind):
    x = embedder.encode(TEXTS)
    fit = Postprocess(kind).fit(x)
    ended, wanted = whitened(embedder, fit), fit.transform(embedder.encode(ASKED))
    limit = 1e-5 * max(1, np.abs(fit.matrix).max())  # of float32 vectors
    export(ended, tmp_path / "out", Wanted("sentence-transformers", "x"))
    assert_allclose(by_sentence_transformers(tmp_path / "out", ASKED), wanted, atol=limit)
    tokens = embedder.encoder.tokenizer(ASKED, padding=True, truncation=True, return_tensors="pt")
    with torch.no_grad():
        found = layouts.Graph(ended)(tokens["input_ids"], tokens["attention_mask"]).numpy()
    assert_allclose(found, wanted, atol=limit)


@pytest.mark.parametrize(("shape", "layers"), [("bert", [1, -1]), ("roberta", [-1])])
@pytest.mark.slow
def test_onnxruntime_gives_the_same_vectors(tokenizer, corpus, tmp_path, shape, layers):
    """A trace takes seconds; what is traced was tested above."""
    encoder = Encoder(encoders.backbone(shape, len(tokenizer)), tokenizer)
    embedder = embedder_of(encoder, kind="mean", layers=layers).eval()
    embedder = whitened(embedder, fit_of(embedder, corpus), 5)
    pytest.importorskip("onnxruntime")
    assert export(embedder, tmp_path / "out", Wanted("onnx", "x"))["difference"] <= 1e-5
    for size in (1, 2, 11):
        assert_allclose(by_onnxruntime(tmp_path / "out", ASKED, size), embedder.encode(ASKED), atol=1e-5)


@pytest.mark.parametrize(("kind", "layers"), POOLINGS)
def test_transformers_gives_the_same_vectors(encoder, tmp_path, kind, layers):
    embedder = embedder_of(encoder, kind=kind, layers=layers).eval()
    assert export(embedder, tmp_path / "out", Wanted("transformers", "x"))["difference"] <= 1e-5
    found = by_transformers(tmp_path / "out", ASKED, kind, layers)
    assert_allclose(found, embedder.encode(ASKED), atol=1e-5)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == [type(encoder.backbone).__name__]


def test_a_head_the_pooler_and_unit_length_are_folded_in(bert, tmp_path):
    head = ProjectionHead(width=16, whitening=None, dense=True, position="before")
    embedder = embedder_of(bert, kind="pooler", head=head, embedding="dense").eval()
    embedder = scaled(embedder, unit=True)
    export(embedder, tmp_path / "out", Wanted("sentence-transformers", "x"))
    found = by_sentence_transformers(tmp_path / "out", ASKED)
    assert_allclose(found, embedder.encode(ASKED), atol=1e-5)
    assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-6)


@pytest.mark.parametrize("layers", [[2], [-1, -1, 1]])
def test_any_layers_travel_as_their_counts(bert, tmp_path, layers):
    embedder = embedder_of(bert, kind="mean", layers=layers).eval()
    export(embedder, tmp_path / "out", Wanted("sentence-transformers", "x"))
    assert sorted(Embedder.load(str(tmp_path / "out")).pooling.layers) == sorted(n % 4 for n in layers)


def test_the_maximum_of_several_layers_is_not_for_sentence_transformers(bert, tmp_path):
    embedder = embedder_of(bert, kind="max", layers=[1, -1]).eval()
    with pytest.raises(ValueError, match=r"max over layers \[1, -1\].* use --to onnx"):
        export(embedder, tmp_path / "st", Wanted("sentence-transformers", "x"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": [1.0, 0.5]}, r"weighs layers by \[1.0, 0.5\]"),
        ({"weights": [0.0, 0.0]}, r"weighs layers by \[0.0, 0.0\]"),
        ({"output_hidden_states": False}, "supported are whole numbers"),
        ({"pooling_mode_mean_tokens": False, "pooling_mode_max_tokens": True}, "maximum of an average"),
    ],
)
def test_other_weighings_of_layers_are_left_to_that_library(embedder, tmp_path, change, message):
    out = tmp_path / "out"
    export(embedder, out, Wanted("sentence-transformers", "x"))
    (out / "digests.json").unlink()
    if "weights" in change:
        weights = torch.tensor(change.pop("weights"))
        save_file({"layer_weights": weights}, out / "1_WeightedLayerPooling" / "model.safetensors")
    for path in (out / "config.json", out / "2_Pooling" / "config.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=message):
        Embedder.load(str(out))


@pytest.mark.parametrize("to", ["transformers", "sentence-transformers"])
def test_an_export_holds_no_code_no_pickle_and_the_limit_of_its_source(embedder, tmp_path, to):
    embedder.max_length = 20
    out = tmp_path / "out"
    export(embedder, out, Wanted(to, "x"))
    kinds = {path.suffix for path in out.rglob("*") if path.is_file()}
    assert kinds <= {".json", ".md", ".safetensors"}
    text = "".join(path.read_text() for path in out.rglob("*.json"))
    assert "auto_map" not in text and "whitenedcse.model" not in text
    assert json.loads((out / "tokenizer_config.json").read_text())["model_max_length"] == 20
    assert embedder.encoder.tokenizer.model_max_length == 128  # the source's own


def spoiled(write):
    """A form's `write` that moves one weight of the pooled layers a little."""

    def spoiling(embedder, draft):
        write(embedder, draft)
        file = draft / "model.safetensors"
        weights = load_file(file)
        weights["encoder.layer.2.output.LayerNorm.bias"][3] += 1e-4
        save_file(weights, file, {"format": "pt"})

    return spoiling


def test_an_export_for_transformers_is_loaded_with_its_pooling_prompt_and_unit_length(embedder, tmp_path):
    out = tmp_path / "out"
    for one in (embedder, scaled(embedder.replaced(prompt="the "), unit=True)):
        export(one, out, "transformers")
        again = Embedder.load(out)
        assert_alike(again.encode(ASKED), one.encode(ASKED))
        assert (str(again.pooling), again.prompt) == (str(one.pooling), one.prompt)
        lengths = "- divided by their length\n" if one.unit else "- not divided by their length; compare by"
        assert lengths in (out / "README.md").read_text()
        assert str(checkpoint.own(out)["pooling"]) == str(one.pooling)
    assert Embedder.load(out, "max").pooling.kind == "max"
    facts = json.loads((out / "export.json").read_text())
    del facts["pooling"], facts["unit"]  # as an older version wrote it
    write_json(out / "export.json", facts)
    seal(out)
    assert Embedder.load(out).pooling.kind == "cls"


def test_python_exports_an_embedder_or_the_path_of_one(embedder, tmp_path):
    checkpoint.save(embedder, tmp_path / "best")
    wanted = embedder.encode(ASKED)
    for i, source in enumerate((embedder.train(), str(tmp_path / "best"))):
        out = tmp_path / str(i)
        assert export(source, str(out), "sentence-transformers")["difference"] < 1e-5
        assert_alike(by_sentence_transformers(out, ASKED), wanted)
    assert embedder.training and "from best, exported" in (tmp_path / "1" / "README.md").read_text()
    with pytest.raises(ValueError, match="to='onxx' is not one of transformers, sentence-transformers, onnx"):
        export(embedder, tmp_path / "x", "onxx")


def test_a_graph_is_no_encoder_and_says_so(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.onnx").touch()
    with pytest.raises(FileNotFoundError, match="is an ONNX graph, for onnxruntime; name the encoder"):
        Embedder.load(tmp_path)


@pytest.mark.parametrize("to", ["transformers", "sentence-transformers"])
def test_a_spoiled_export_is_refused_and_what_was_there_stays(embedder, tmp_path, to, monkeypatch):
    out = tmp_path / "out"
    export(embedder, out, Wanted(to, "x"))
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    layout = layouts.LAYOUTS[to]
    monkeypatch.setitem(layouts.LAYOUTS, to, layout._replace(write=spoiled(layout.write)))
    with pytest.raises(ValueError, match="differ by .*e-05, more than 1e-05"):
        export(embedder, out, Wanted(to, "x"))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    assert "difference" not in export(embedder, out, Wanted(to, "x", verify=False))


@pytest.mark.parametrize("to", ["transformers", "sentence-transformers"])
def test_every_file_of_an_export_is_checked_when_it_is_loaded(embedder, tmp_path, to):
    out = tmp_path / "out"
    export(embedder, out, Wanted(to, "x", verify=False))
    files = [path for path in out.rglob("*") if path.is_file() and path.suffix != ".md"]
    assert {"export.json", "config.json", "model.safetensors", "tokenizer.json"} <= {p.name for p in files}
    for path in files:
        whole = path.read_bytes()
        path.write_bytes(whole[:-2] + bytes([whole[-2] ^ 1]) + whole[-1:])
        with pytest.raises(ValueError, match=r"copy (the checkpoint|or make it) again") as refused:
            Embedder.load(out)
        assert type(refused.value) is ValueError  # else that library opens it
        path.write_bytes(whole)
    (out / "README.md").write_text("a card that was edited")
    assert_allclose(Embedder.load(out).encode(["bread"]).shape, (1, embedder.width))


def test_the_difference_is_relative_to_long_vectors_and_infinite_where_there_is_none():
    a, b = np.array([[3.0, 4.0], [0.1, 0.0]]), np.array([[3.0, 4.5], [0.1, -0.05]])
    assert card_module.difference(a, b) == pytest.approx(0.1)  # 0.5 / 5 and 0.05 / 1
    assert card_module.difference(a, b[:, :1]) == np.inf
    assert card_module.difference(a, np.where(b == 4.5, np.nan, b)) == np.inf
    with pytest.raises(ValueError, match="differ by inf"):
        card_module.refuse(np.inf, card_module.LIMIT)


def test_what_is_compared_are_64_different_texts_of_all_lengths():
    lengths = sorted(len(text.split()) for text in card_module.TEXTS)
    assert len(set(card_module.TEXTS)) == len(card_module.TEXTS) == 64
    assert lengths[0] == 0 and lengths[-1] > 1000 and len(set(lengths)) > 20
    assert any(not text.isascii() for text in card_module.TEXTS)


@pytest.mark.parametrize(
    ("there", "message"),
    [("file", "is a file, and"), ("folder/notes", "other than an export; choose another name$")],
)
def test_what_is_no_export_is_not_replaced(embedder, tmp_path, there, message):
    path = tmp_path / "out" / there.partition("/")[2]
    path.parent.mkdir(exist_ok=True)
    path = path / "x" if path.is_dir() else path
    path.write_text("mine")
    with pytest.raises((ValueError, OSError), match=message):
        export(embedder, tmp_path / "out", Wanted("transformers", "x", verify=False))
    assert path.read_text() == "mine"


def test_a_run_that_was_begun_in_an_export_is_not_replaced(embedder, tmp_path):
    wanted = Wanted("transformers", "x", verify=False)
    export(embedder, tmp_path / "out", wanted)
    (tmp_path / "out" / "config.yaml").write_text("seed: 0")
    with pytest.raises(ValueError, match="holds something other than an export"):
        export(embedder, tmp_path / "out", wanted)
    assert (tmp_path / "out" / "config.yaml").read_text() == "seed: 0"


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (Wanted("transformers", "x", int8=True), "int8 is for the format onnx, not for transformers"),
        (Wanted("onnx", "x", verify=False), r"needs onnx and onnxscript: pip install 'whitenedcse\[onnx\]'$"),
        (
            Wanted("sentence-transformers", "x"),
            r"pip install 'whitenedcse\[sentence-transformers\]', or do without: --no-ver",
        ),
    ],
)
def test_what_is_missing_is_named_before_anything_is_written(
    embedder, tmp_path, wanted, message, monkeypatch
):
    monkeypatch.setattr(exports, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=message):
        export(embedder, tmp_path / "out", wanted)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_refused_export_names_the_rounding_that_it_has():
    with pytest.raises(ValueError, match=r"--dim keeps fewer; --no-verify does not compare$"):
        card_module.refuse(2e-5, card_module.LIMIT)
    with pytest.raises(ValueError, match="rounding of int8 weights: leave out one of the two; --no-verify "):
        card_module.refuse(2e-2, card_module.LIMIT_INT8)


def test_int8_is_smaller_close_and_measured(tokenizer, tmp_path, monkeypatch):
    from transformers import BertConfig, BertModel

    pytest.importorskip("onnxruntime")
    monkeypatch.setenv("WHITENEDCSE_DATA", str(tmp_path))  # the bundled pairs
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 256}
    wide = Encoder(BertModel(BertConfig(vocab_size=len(tokenizer), **shape)), tokenizer)
    embedder = scaled(embedder_of(wide, kind="mean").eval(), unit=True)
    sizes, quantise = [], layouts.quantise
    monkeypatch.setattr(
        layouts, "quantise", lambda at: (sizes.append((at / "model.onnx").stat().st_size), quantise(at))
    )
    facts = export(embedder, tmp_path / "out", "onnx", int8=True)
    assert (tmp_path / "out" / "model.onnx").stat().st_size < 0.75 * sizes[0]
    found = np.abs(by_onnxruntime(tmp_path / "out", ASKED) - embedder.encode(ASKED)).max()
    assert 1e-5 < found < 1e-2
    from whitenedcse.evaluation.sts import evaluate
    from whitenedcse.evaluation.tasks import subsets

    pairs = {"dev": subsets("quickstart/dev")}
    for name, encode in (("", embedder.encode), ("_int8", lambda t: by_onnxruntime(tmp_path / "out", t, 64))):
        assert facts[f"spearman{name}"] == pytest.approx(evaluate(pairs, encode)["avg"]["all"], abs=1e-3)
    assert (
        f"int8: quickstart/dev scores {facts['spearman_int8']:.2f}"
        in (tmp_path / "out/README.md").read_text()
    )


CARDS = [
    ("sentence-transformers", "mean"),
    ("onnx", "max"),
    ("transformers", "mean"),
    ("transformers", "cls"),
]


@pytest.mark.parametrize(("to", "kind"), [*CARDS, *(("transformers", k) for k in ("max", "last", "pooler"))])
@pytest.mark.slow(but=2)
def test_the_card_s_own_lines_load_the_vectors(bert, tmp_path, to, kind, monkeypatch):
    if to == "onnx":
        pytest.importorskip("onnxruntime")
    layers = [1, -1] if kind in ("mean", "cls", "last") or to == "onnx" else [-1]
    embedding = "head" if to == "onnx" else "encoder"  # and its dense layers in the graph
    embedder = embedder_of(bert, kind=kind, layers=layers, embedding=embedding).eval()
    embedder = scaled(embedder, unit=kind != "cls")
    export(embedder, tmp_path / "out", Wanted(to, "x/y", verify=False, license="apache-2.0"))
    card = (tmp_path / "out" / "README.md").read_text()
    assert ("weights of a pooler as missing" in card) == (to == "transformers" and kind != "pooler")
    code, scope = re.search(r"```python\n(.*?)```", card, re.DOTALL)[1], {}
    monkeypatch.chdir(tmp_path)
    with torch.no_grad():
        exec(code, scope)
    assert to != "onnx" or {path.suffix for path in (tmp_path / "out").iterdir()} == {".json", ".md", ".onnx"}
    assert_allclose(np.asarray(scope["x"]), embedder.encode(["a sentence"]), atol=1e-5)
    data = ModelCard(card).data.to_dict()
    assert data["library_name"] == to and data["pipeline_tag"] == "sentence-similarity"
    assert (data["license"], data["base_model"]) == ("apache-2.0", "x/y")


def run_of(folder, embedder):
    """A run directory as train.py leaves it."""
    checkpoint.save(embedder, folder / "best")
    config = "data: {corpus: mine.txt, sample: 7}\nencoder: {path: owner/base}\nmonitor: {dev: pairs.csv}\n"
    (folder / "config.yaml").write_text(config)
    versions = {"experiment": "tiny", "seed": 3, "commit": "abc", "packages": {"torch": "2"}}
    (folder / "versions.json").write_text(json.dumps(versions))
    interval = {mean: [70.1, 75.9] for mean in ("all", "mean", "wmean")}
    values = {"all": 73.0, "mean": 73.0, "wmean": 73.0, "interval": interval}
    row = {"name": "as it is", "setting": "", "sts": {"tasks": {"STS-B": {**values, "n": 9}}, "avg": values}}
    dev = {"before": 40.1, "best": 55.25, "best_step": 1200, "n": 2000, "positives": None}
    (folder / "scores.json").write_text(json.dumps({"rows": [row], "headline": "all", "dev": dev}))


@pytest.mark.parametrize("part", ["", "best"])
def test_the_card_of_a_run_says_what_it_was_trained_on_and_what_it_scored(embedder, tmp_path, part):
    run_of(tmp_path / "run", embedder)
    source, out = str(tmp_path / "run" / part), tmp_path / "out"
    assert cli.main(["export", source, str(out), "--to", "transformers"]) == 0
    card = (out / "README.md").read_text()
    for said in ("experiment: tiny", "seed: 3", "corpus: mine.txt", "sentences: 7", "torch 2", "commit: abc"):
        assert said in card
    assert (
        "dev set: pairs.csv, 2,000 pairs, Spearman x 100: 40.10 before training, 55.25 at step 1,200" in card
    )
    assert re.search(r"\| STS-B \| 9 \| 73 ±3 \|", card)
    assert ModelCard(card).data.base_model == "owner/base" and str(tmp_path) not in card


def test_a_card_names_no_folder_or_bucket_of_a_corpus(tmp_path):
    assert shown(str(tmp_path / "sweep" / "3")) == "sweep/3"  # a job of a sweep
    given = ("wiki1m", "owner/pairs", str(tmp_path), "/gone/x.txt", "s3://secret/bucket/x.txt.gz")
    assert [shown(place) for place in given] == ["wiki1m", "owner/pairs", tmp_path.name, "x.txt", "x.txt.gz"]


def test_the_card_of_a_run_says_what_was_not_trained(bert, tmp_path):
    embedder = embedder_of(bert, kind="mean", layers=[1]).eval()  # which freezes the pooler
    bert.backbone.encoder.layer[1:].requires_grad_(False)  # and training the layers above
    run_of(tmp_path / "run", embedder)
    assert cli.main(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--to", "transformers"]) == 0
    said = "- not trained, no part of the vector: encoder.layer.1, encoder.layer.2, pooler\n"
    assert said in (tmp_path / "out" / "README.md").read_text()


def test_the_card_of_a_run_that_has_not_finished_says_so(embedder, tmp_path):
    run_of(tmp_path / "run", embedder)
    (tmp_path / "run/scores.json").unlink()
    checkpoint.save(embedder, tmp_path / "run" / "best", 50)
    (tmp_path / "run/metrics.csv").write_text("step,dev/spearman\n0,20\n")  # it resumed after step 0
    assert cli.main(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--to", "transformers"]) == 0
    said = "- not finished: this is its best checkpoint so far, of step 50\n"
    assert said in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.slow
def test_a_graph_leaves_out_the_layers_that_pooling_does_not_read(bert, tmp_path):
    kept = []
    for layer in (1, -1):  # the first and the third
        embedder = embedder_of(bert, kind="mean", layers=[layer]).eval()
        export(embedder, tmp_path / "out", Wanted("onnx", "x", verify=False))
        kept.append((tmp_path / "out" / "model.onnx").stat().st_size)
    layer = sum(weight.numel() for weight in bert.backbone.encoder.layer[0].parameters()) * 4
    assert kept[1] - kept[0] > 2 * layer  # bytes


def test_the_command_fits_a_whitening_or_takes_one_and_says_what_it_compared(
    embedder, corpus, tmp_path, capsys
):
    checkpoint.save(embedder, tmp_path / "best")
    fit_of(embedder, corpus).save(tmp_path / "fit", fit_of(embedder, corpus).provenance)
    command = ["export", str(tmp_path / "best"), str(tmp_path / "out"), "--to", "sentence-transformers"]
    for more in (["--whiten", str(tmp_path / "fit")], ["--whiten-on", str(corpus)]):
        assert cli.main([*command, *more, "--dim", "4", "--unit"]) == 0
        wanted = scaled(whitened(embedder, fit_of(embedder, corpus), 4), unit=True).encode(ASKED)
        assert_alike(by_sentence_transformers(tmp_path / "out", ASKED), wanted)
        assert "for sentence-transformers, components differ by at most" in capsys.readouterr().out
    assert (
        "whitening, 4 components, fitted to 64 texts of corpus.txt"
        in (tmp_path / "out/README.md").read_text()
    )


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--to", "transformers", "--dim", "4"], "--dim 4 keeps components of a whitening"),
        (["--to", "transformers", "--whiten-on", "CORPUS"], "holds the encoder alone"),
        (["--to", "sentence-transformers", "--whiten", "nowhere"], "No such file or directory: nowhere"),
    ],
)
def test_what_cannot_be_written_is_one_line(embedder, corpus, tmp_path, more, message, capsys):
    checkpoint.save(embedder, tmp_path / "best")
    more = [str(corpus) if word == "CORPUS" else word for word in more]
    assert cli.main(["export", str(tmp_path / "best"), str(tmp_path / "out"), *more]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "out").exists()


class Bomb:
    def __reduce__(self):
        return os.mkdir, (self.place,)


@pytest.mark.parametrize("form", ["raw", "torch"])
def test_the_weights_of_a_stranger_run_no_code(embedder, tmp_path, form, capsys):
    source, bomb = tmp_path / "source", Bomb()
    layouts.write_transformers(embedder, source)
    (source / "model.safetensors").unlink()
    bomb.place = str(tmp_path / "exploded")
    if form == "torch":
        torch.save({"embeddings.word_embeddings.weight": bomb}, source / "pytorch_model.bin")
    else:
        (source / "pytorch_model.bin").write_bytes(pickle.dumps(bomb))
    assert cli.main(["export", str(source), str(tmp_path / "out"), "--to", "transformers"]) == 2
    assert not Path(bomb.place).exists() and "error: " in capsys.readouterr().err


def received(handler):
    """What a client sent, whole or in chunks."""
    if handler.headers.get("Transfer-Encoding") != "chunked":
        return handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
    body = b""
    while size := int(handler.rfile.readline(), 16):
        body += handler.rfile.read(size)
        handler.rfile.readline()
    return body


@pytest.fixture
def stub(monkeypatch):
    """A hub that keeps what it is sent: (method, path) -> bytes."""
    got = {}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):  # noqa: N802
            got[self.path] = body = received(self)
            place = f"http://{self.headers['Host']}/me/tiny"
            answer = {"url": place, "commitUrl": f"{place}/commit/1", "commitOid": "1", "success": True}
            if "preupload" in self.path:
                names = [file["path"] for file in json.loads(body)["files"]]
                kinds = {"uploadMode": "regular", "shouldIgnore": False}
                answer = {"files": [{"path": name, **kinds} for name in names]}
            self.say(200, answer)

        def do_GET(self):  # noqa: N802
            self.say(404, {"error": "not found"})

        def say(self, status, answer):
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, *_):
            pass

    with serving(Handler) as address:
        monkeypatch.setenv("HF_ENDPOINT", address)
        monkeypatch.setenv("HF_TOKEN", "hf_x")
        yield got


def test_push_creates_the_repository_and_sends_every_file(embedder, tmp_path, stub, capsys):
    checkpoint.save(embedder, tmp_path / "best")
    command = ["export", str(tmp_path / "best"), str(tmp_path / "out"), "--to", "transformers"]
    assert cli.main(command) == 0 and not stub
    assert cli.main([*command, "--push", "me/tiny"]) == 0
    assert json.loads(stub["/api/repos/create"])["name"] == "tiny"
    sent = [json.loads(line) for line in stub["/api/models/me/tiny/commit/main"].splitlines()]
    files = {part["value"]["path"]: part["value"]["content"] for part in sent if part["key"] == "file"}
    assert {name: base64.b64decode(text) for name, text in files.items()} == {
        path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()
    }
    assert "pushed: " in capsys.readouterr().out
    assert 'from_pretrained("me/tiny")' in (tmp_path / "out" / "README.md").read_text()


def test_a_push_that_the_hub_refuses_is_one_line_and_the_export_stays(
    embedder, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("HF_ENDPOINT", nowhere())
    monkeypatch.setenv("HF_TOKEN", "hf_x")
    checkpoint.save(embedder, tmp_path / "best")
    command = ["export", str(tmp_path / "best"), str(tmp_path / "out"), "--to", "transformers"]
    assert cli.main([*command, "--push", "me/tiny"]) == 2
    assert "out is written, but me/tiny was not pushed" in capsys.readouterr().err
    assert (tmp_path / "out" / "export.json").is_file()

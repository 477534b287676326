"""Decoders: the last token is the sentence's vector, here and wherever a checkpoint or an export is read."""

import numpy as np
import pytest
import torch
from conftest import DECODERS, SENTENCES, decoder_of, embedder_of
from numpy.testing import assert_allclose
from test_export import by_onnxruntime, by_sentence_transformers
from test_training import fit, module_of, monitor_of
from transformers import AutoModel, AutoTokenizer

from whitenedcse.app.arguments import source as opened
from whitenedcse.data.tokens import token_ids
from whitenedcse.model import checkpoint
from whitenedcse.model.embedder import Embedder
from whitenedcse.model.head import ProjectionHead
from whitenedcse.model.planes import Wanted as Vectors
from whitenedcse.model.planes import vectors
from whitenedcse.model.pooling import Pooling
from whitenedcse.serving.exports import Wanted, export
from whitenedcse.training.loss import MaskedLanguageModel

pytestmark = pytest.mark.filterwarnings("ignore")  # those of the libraries that load what is written
PLAIN = ProjectionHead(width=16, whitening=None, dense=False, position="before")


def embedder_with(kind, *, ends, layers=(-1,), pooling="last"):
    return embedder_of(decoder_of(kind, ends=ends), kind=pooling, layers=layers, head=PLAIN).eval()


@torch.no_grad()
def alone(embedder, text, layers):
    """The last state of one text, by Transformers' own forward, without padding."""
    row = embedder.encoder.tokenizer(text)["input_ids"]
    states = embedder.encoder.backbone(torch.tensor([row]), output_hidden_states=True).hidden_states
    return row, np.mean([states[layer][0, -1].numpy() for layer in layers], axis=0)


@pytest.mark.parametrize("layers", [[-1], [1, -1]])
@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("kind", DECODERS)
def test_a_vector_is_the_state_of_the_last_token_whatever_the_tokenizer_ends_with(kind, ends, layers):
    embedder = embedder_with(kind, ends=ends, layers=layers)
    rows, expected = zip(*(alone(embedder, text, layers) for text in SENTENCES), strict=True)
    assert {row[-1] == embedder.encoder.tokenizer.eos_token_id for row in rows} == {ends}
    x = embedder.encode(SENTENCES)
    assert_allclose(x, np.array(expected), atol=1e-5)
    assert np.abs(x[0] - x[1:]).max(axis=1).min() > 0.1  # sentences that begin alike differ too


@pytest.mark.parametrize("kind", DECODERS)
def test_a_first_token_of_a_decoder_is_refused_with_what_to_use(kind):
    with pytest.raises(ValueError, match=r"pooling\.kind=cls, .* use pooling=last or pooling=mean"):
        embedder_with(kind, ends=True, pooling="cls")
    assert np.isfinite(embedder_with(kind, ends=True, pooling="mean").encode(SENTENCES)).all()


@pytest.fixture
def saved(tmp_path):
    """A plain decoder in a directory, as the hub has them."""
    encoder = decoder_of("llama")
    encoder.backbone.save_pretrained(tmp_path / "llama")
    encoder.tokenizer.save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def test_by_default_a_decoder_is_pooled_by_its_last_token(saved):
    assert str(Embedder.load(saved).pooling) == "last over layers [-1]"
    source = opened(str(saved), None)
    assert source.pooling == "last over layers [-1]"
    (x,), _ = vectors(source, SENTENCES, Vectors([None]))
    assert_allclose(x, embedder_with("llama", ends=False).encode(SENTENCES), atol=1e-5)
    with pytest.raises(ValueError, match="use pooling=last or pooling=mean"):
        Embedder.load(str(saved), Pooling(kind="cls", layers=[-1]))


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        ("train", ["pooling=cls"], "use pooling=last or pooling=mean"),
        ("train", ["mlm.weight=0.1"], "mlm.weight=0.1, but this encoder's tokenizer has no mask token"),
        ("evaluate", ["pooling=cls", "tasks=quickstart"], "use pooling=last or pooling=mean"),
    ],
)
@pytest.mark.slow(but=1)
def test_what_says_nothing_of_a_decoder_is_one_line(saved, refusal, script, arguments, message):
    which = {
        "train": ["encoder=pretrained", f"encoder.path={saved}", "data.sample=64", "trainer.devices=1"],
        "evaluate": [f"model={saved}"],
    }
    line = refusal(script, *which[script], *arguments)
    assert message in line and line.startswith("error: ") and "\n" not in line


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("layers", [[-1], [1, -1]])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_checkpoint_says_the_same_in_three_libraries(kind, layers, ends, tmp_path):
    embedder = embedder_with(kind, ends=ends, layers=layers)
    checkpoint.save(embedder, tmp_path / "best")
    ours = embedder.encode(SENTENCES)
    assert_allclose(Embedder.load(tmp_path).encode(SENTENCES), ours, atol=1e-6)
    assert_allclose(by_sentence_transformers(tmp_path / "best", SENTENCES), ours, atol=1e-5)
    for name in ("whitenedcse.json", "digests.json"):  # as that library left it
        (tmp_path / "best" / name).unlink()
    assert_allclose(Embedder.load(tmp_path).encode(SENTENCES), ours, atol=1e-6)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "best")
    tokens = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    with torch.no_grad():
        states = AutoModel.from_pretrained(tmp_path / "best")(**tokens, output_hidden_states=True)
    ends_at = tokens["attention_mask"].sum(1) - 1  # so it pads on the right
    theirs = sum(states.hidden_states[layer][range(8), ends_at] for layer in layers) / len(layers)
    assert_allclose(theirs.numpy(), ours, atol=1e-5)


@pytest.mark.parametrize("to", ["transformers", "sentence-transformers"])
@pytest.mark.parametrize("kind", sorted(set(DECODERS) - {"qwen2"}))  # whose tokenizer Transformers makes anew
def test_an_export_gives_the_vectors_of_its_source(kind, to, tmp_path):
    embedder = embedder_with(kind, ends=False, layers=[1, -1])
    assert export(embedder, tmp_path / "out", Wanted(to, "x"))["difference"] < 1e-5


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.slow
def test_a_graph_gives_the_vectors_of_its_source(kind, tmp_path):
    pytest.importorskip("onnxruntime")
    embedder = embedder_with(kind, ends=False, layers=[1, -1])
    assert export(embedder, tmp_path / "out", Wanted("onnx", "x"))["difference"] < 1e-5
    assert_allclose(by_onnxruntime(tmp_path / "out", SENTENCES), embedder.encode(SENTENCES), atol=1e-5)


@pytest.mark.parametrize("many", [0, 2000])  # by the tokenizer itself, and by a memory of words
def test_a_text_without_tokens_is_its_end_token(many):
    embedder = embedder_with("gpt2", ends=False)
    tokenizer = embedder.encoder.tokenizer
    assert tokenizer("")["input_ids"] == []
    texts = [*(f"{i} cats" for i in range(many)), "", "a cat"]
    assert token_ids(texts, tokenizer, 16)[-2:] == [[tokenizer.eos_token_id], tokenizer("a cat")["input_ids"]]
    assert_allclose(embedder.encode([""]), embedder.encode(["<|end|>"]), atol=1e-6)


def test_a_decoder_learns_where_its_first_token_would_not(tmp_path):
    encoder = decoder_of("llama", ends=True)
    monitor = monitor_of(tmp_path)
    trainer = fit(module_of(encoder, kind="last"), tmp_path, monitor, steps=20)
    assert float(trainer.callback_metrics["train/loss"]) < 0.5 * 2 * np.log(
        8
    )  # of a guess, for two positives
    assert all(row.values["dev/spearman"] is not None for row in monitor.rows)


def test_a_masked_term_is_refused():
    with pytest.raises(ValueError, match=r"mlm\.weight=0\.1, but .* no mask token.*use mlm\.weight=0"):
        MaskedLanguageModel(encoder=decoder_of("llama"), weight=0.1, probability=0.15)

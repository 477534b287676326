"""Decoders: the last token is the sentence's vector, here and wherever a checkpoint or an export is read."""

from itertools import product

import numpy as np
import pytest
import torch
from encoders import DECODERS, SENTENCES, SMALL, architecture, byte_level, decoder_of, embedder_of
from exported import by_onnxruntime, by_sentence_transformers
from numpy.testing import assert_allclose
from scipy.stats import spearmanr
from transformers import AutoModel, AutoTokenizer

import whitenedcse
from whitenedcse.app.evaluate import source_of as opened
from whitenedcse.data.tokens import token_ids
from whitenedcse.model import checkpoint
from whitenedcse.model.embedder import Embedder
from whitenedcse.model.head import Pooling, ProjectionHead
from whitenedcse.model.layers import Wanted as Vectors
from whitenedcse.model.layers import vectors
from whitenedcse.serving.export import export
from whitenedcse.training.terms import MaskedLanguageModel

pytestmark = pytest.mark.filterwarnings("ignore")  # those of the libraries that load what is written
PLAIN = ProjectionHead(16, whitening=None, dense=False)


def embedder_with(kind, *, ends, layers=(-1,), pooling="last"):
    decoder = decoder_of(kind, ends=ends, num_hidden_layers=2)
    return embedder_of(decoder, kind=pooling, layers=layers, head=PLAIN).eval()


@torch.no_grad()
def alone(embedder, text, layers):
    """The last state of one text, by Transformers' own forward, without padding."""
    row = embedder.encoder.tokenizer(text)["input_ids"]
    states = embedder.encoder.backbone(torch.tensor([row]), output_hidden_states=True).hidden_states
    return row, np.mean([states[layer][0, -1].numpy() for layer in layers], axis=0)


@pytest.mark.parametrize("kind", DECODERS)
def test_a_vector_is_the_state_of_the_last_token_whatever_the_tokenizer_ends_with(kind):
    for ends, layers in product((False, True), ([-1], [1, -1])):
        embedder = embedder_with(kind, ends=ends, layers=layers)
        rows, expected = zip(*(alone(embedder, text, layers) for text in SENTENCES), strict=True)
        assert {row[-1] == embedder.encoder.tokenizer.eos_token_id for row in rows} == {ends}
        x = embedder.encode(SENTENCES)
        assert_allclose(x, np.array(expected), atol=1e-5)
        assert np.abs(x[0] - x[1:]).max(axis=1).min() > 0.1  # sentences that begin alike differ too
    with pytest.raises(ValueError, match=r"pooling\.kind=cls, .* use pooling=last or pooling=mean"):
        embedder_with(kind, ends=True, pooling="cls")


def test_by_default_a_decoder_is_pooled_by_its_last_token(tmp_path):
    encoder, saved = decoder_of("llama", num_hidden_layers=2), str(tmp_path / "llama")
    for part in (encoder.backbone, encoder.tokenizer):
        part.save_pretrained(saved)
    assert str(Embedder.load(saved).pooling) == "last over layers [-1]"
    source = opened(saved, None)
    assert source.pooling == "last over layers [-1]"
    (x,), _ = vectors(source, SENTENCES, Vectors([None]))
    assert_allclose(x, embedder_with("llama", ends=False).encode(SENTENCES), atol=1e-5)
    with pytest.raises(ValueError, match="use pooling=last or pooling=mean"):
        Embedder.load(saved, Pooling(kind="cls", layers=[-1]))


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("layers", [[-1], [1, -1]])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.slow(but=3)
def test_a_checkpoint_says_the_same_in_three_libraries_and_so_do_exports(kind, layers, ends, tmp_path):
    """Exports to ONNX are below."""
    embedder = embedder_with(kind, ends=ends, layers=layers)
    checkpoint.save(embedder, tmp_path / "best")
    ours = embedder.encode(SENTENCES)
    assert_allclose(Embedder.load(tmp_path).encode(SENTENCES), ours, atol=1e-6)
    assert_allclose(by_sentence_transformers(tmp_path / "best", SENTENCES), ours, atol=1e-5)
    if layers == [-1]:  # of several, the layers are known from what was noted beside the modules alone
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
    for to in ("transformers", "sentence-transformers"):
        assert export(embedder, tmp_path / to, to)["difference"] < 1e-5
    assert_allclose(by_sentence_transformers(tmp_path / to, SENTENCES), ours, atol=1e-5)


@pytest.mark.parametrize("many", [0, 2000])  # by the tokenizer itself, and by a memory of words
def test_a_text_without_tokens_is_its_end_token(many):
    embedder = embedder_with("gpt2", ends=False)
    tokenizer = embedder.encoder.tokenizer
    assert tokenizer("")["input_ids"] == []
    texts = [*(f"{i} cats" for i in range(many)), "", "a cat"]
    assert token_ids(texts, tokenizer, 16)[-2:] == [[tokenizer.eos_token_id], tokenizer("a cat")["input_ids"]]
    assert_allclose(embedder.encode([""]), embedder.encode(["<|end|>"]), atol=1e-6)


def test_a_masked_term_is_refused():
    with pytest.raises(ValueError, match=r"mlm\.weight=0\.1, but .* no mask token"):
        MaskedLanguageModel(encoder=decoder_of("llama"), weight=0.1, probability=0.15)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen2"])
@pytest.mark.slow
def test_a_trained_decoder_moved_and_is_evaluated_by_its_last_token(kind, home):
    """With more embeddings than tokens, as Qwen2 has."""
    settings = {"pad_token_id": None, "num_hidden_layers": 2, **DECODERS[kind]}
    architecture(kind, 310, **settings).save_pretrained("decoder")
    byte_level(ends=kind == "llama").save_pretrained("decoder")
    given = SMALL | {
        "pooling": "last",
        "lr": 1e-2,
        "max_length": 48,
        "dev": "pairs.tsv",
        "tests": "pairs.tsv",
    }
    few = {"trainer.max_steps": 2, "monitor.every": 1}
    run = whitenedcse.train("decoder", "my.txt", output="outputs/mine", settings=few, **given)
    scored = whitenedcse.evaluate(run, tasks="pairs.tsv")
    mine = run.tests("as it is")["avg"]
    assert mine == scored.tests()["avg"] and scored.results["pooling"] == "last over layers [-1]"
    before, after = Embedder.load("decoder", "last"), Embedder.load(run)
    assert np.abs(before.encode(SENTENCES) - after.encode(SENTENCES)).max() > 1e-2
    x = np.stack([alone(after, text, [-1])[1] for text in SENTENCES])
    cosines = [a @ b / np.linalg.norm(a) / np.linalg.norm(b) for a, b in zip(x, x[::-1], strict=True)]
    assert mine == pytest.approx(100 * spearmanr(range(8), np.round(cosines, 6)).statistic, abs=1e-6)
    if kind == "llama":
        export(after, home / "out", "onnx")
        assert_allclose(by_onnxruntime(home / "out", SENTENCES), after.encode(SENTENCES), atol=1e-5)

"""ModernBERT and other encoders without padding: Transformers' own forward and gradient of padded batches."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from encoders import SENTENCES, architecture, embedder_of
from test_packed import gradients, transformers_own
from torch.testing import assert_close
from transformers import CONFIG_MAPPING

from whitenedcse.data.tokens import token_ids
from whitenedcse.model import attention, backbones
from whitenedcse.model.encoder import Encoder
from whitenedcse.ragged import ragged

pytestmark = [
    pytest.mark.skipif(
        not backbones.known, reason="this release of Transformers takes no attention of others"
    ),
    pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype:UserWarning"),
]
SETTINGS = {"electra": {"embedding_size": 8}, "eurobert": {"num_key_value_heads": 1}}  # two heads share keys
WORDS = 50
LENGTHS = {"one": [7], "ones": [1, 1, 1], "mixed": [9, 2, 31, 2, 5, 9, 1], "long": [30] * 5}


def made(kind, words=WORDS, **settings):
    """A tiny backbone that can be computed without padding."""
    if kind not in CONFIG_MAPPING:
        pytest.skip(f"this release of Transformers has no {kind}")
    model = architecture(kind, words, **SETTINGS.get(kind, {}) | settings)
    if not backbones.fits(model):
        pytest.skip(f"this release of Transformers' {kind} takes no attention of others")
    return model


def backbone(kind, **settings):
    model = made(kind, **settings)
    for weight in model.parameters():  # as if trained
        weight.data += 0.2 * torch.randn_like(weight)
    return model.double()


def batch(name):
    draws = torch.Generator().manual_seed(1)
    return ragged([torch.randint(4, WORDS, (n,), generator=draws).tolist() for n in LENGTHS[name]])


@pytest.fixture
def gpu(monkeypatch):
    """As on a GPU, computed here."""
    way = attention.way
    monkeypatch.setattr("whitenedcse.model.encoder.way", lambda device, width: way("cuda", 8))


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("layers", [[-1], [0], [1, 0]])
@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("kind", backbones.KINDS)
@pytest.mark.slow(but=10)
def test_states_and_gradient_are_those_of_transformers(kind, name, layers, first):
    model, rows = backbone(kind).eval(), batch(name)
    layers = [layer % (model.config.num_hidden_layers + 1) for layer in layers]
    ours = backbones.hidden(model, rows, layers, first=first)
    own = gradients(model, ours)
    theirs = transformers_own(model, rows, layers, first)
    # ModernBERT rotates in float32 whatever it is computed in
    assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    expected = gradients(model, theirs)
    assert own.keys() == expected.keys() and own
    largest = max(value.norm() for value in expected.values())
    for weight, value in expected.items():
        assert (own[weight] - value).norm() < 1e-5 * value.norm() + 1e-6 * largest, weight


@pytest.mark.parametrize("kind", backbones.KINDS)
def test_sentences_do_not_see_one_another(kind):
    model, rows = backbone(kind).eval(), batch("mixed")
    whole = backbones.hidden(model, rows, [1], first=False)[0].split(LENGTHS["mixed"])
    for row, found in zip(rows.ids.split(LENGTHS["mixed"]), whole, strict=True):
        alone = backbones.hidden(model, ragged([row.tolist()]), [1], first=False)[0]
        assert_close(found, alone, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("kind", ["bert", "mobilebert", "mpnet", "deberta-v2", "llama"])
def test_others_are_not_taken(kind):
    """BERT has its own way; the rest look at neighbours, at relative places, or at what came before."""
    assert not backbones.fits(architecture(kind, WORDS))


@pytest.mark.parametrize(("longest", "window"), [(9, True), (10, False)])
def test_sentences_longer_than_a_window_are_padded(longest, window, gpu, tokenizer, monkeypatch):
    model = made("modernbert", len(tokenizer), local_attention=16)
    encoder, used = Encoder(model, tokenizer).eval(), []
    whole = backbones.hidden
    monkeypatch.setattr(backbones, "hidden", lambda *a, **k: used.append(1) or whole(*a, **k))
    rows = ragged([list(range(5, 5 + n)) for n in (3, longest, 2)])
    found = encoder(rows, [-1])
    encoder.batches = "padded"
    assert used == [1] * window
    assert_close(found, encoder(rows, [-1]), atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_threads_do_not_take_one_anothers_attention(gpu, tokenizer):
    model = made("modernbert", len(tokenizer), local_attention=16)
    encoder = Encoder(model, tokenizer).eval()
    in_turn = [(i, n) for i in range(20) for n in (4, 30)]  # unpadded and padded
    batches = [ragged([[5 + i] * n, [7] * 3]) for i, n in in_turn]
    with torch.no_grad():
        expected = [encoder(rows, [-1]) for rows in batches]
        with ThreadPoolExecutor(4) as pool:
            for _ in range(3):
                for ours, alone in zip(pool.map(partial(still, encoder), batches), expected, strict=True):
                    assert_close(ours, alone)


def still(encoder, rows):
    with torch.no_grad():  # each thread has its own
        return encoder(rows, [-1])


def test_a_window_would_be_missed(tokenizer):
    """Beyond it the two differ, so that the test above says something."""
    model = made("modernbert", len(tokenizer), local_attention=16).eval()
    for weight in model.parameters():
        weight.data += 0.2 * torch.randn_like(weight)
    rows = ragged([list(range(5, 5 + n)) for n in (3, 30)])
    layer = [model.config.num_hidden_layers]
    ours = backbones.hidden(model, rows, layer, first=False)
    theirs = transformers_own(model, rows, layer, False)
    assert (ours - theirs).abs().max() > 1e-3


def test_encode_gives_the_vectors_of_padded_batches(gpu, tokenizer):
    embedder = embedder_of(Encoder(made("modernbert", len(tokenizer)), tokenizer), kind="mean").eval()
    assert embedder.encoder.attention(torch.device("cuda")) == "jagged"
    found = embedder.encode(SENTENCES)
    embedder.encoder.batches = "padded"
    assert_close(torch.tensor(found), torch.tensor(embedder.encode(SENTENCES)), atol=1e-5, rtol=1e-5)


def test_dropout_of_attention_is_the_encoders(monkeypatch):
    model, asked = backbone("electra", attention_probs_dropout_prob=0.25), []

    def noted(q, k, v, *, heads, p, batch):
        asked.append((heads, p))
        return q

    monkeypatch.setattr(backbones, "jagged_attention", noted)
    for mode in (True, False):
        backbones.hidden(model.train(mode), batch("mixed"), [1], first=False)
    depth, heads = model.config.num_hidden_layers, model.config.num_attention_heads
    assert asked == [(heads, 0.25)] * depth + [(heads, 0.0)] * depth


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
def test_with_gradient_checkpointing_batches_are_padded(gpu, tokenizer):
    """A layer computed again in the backward pass would have another attention than the first time."""
    encoder = Encoder(made("electra"), tokenizer).train()
    for part in encoder.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
    model, rows, found = encoder.backbone, batch("mixed"), []
    for _ in range(2):
        found.append(gradients(model, encoder(rows, [-1], first=True)))
        model.gradient_checkpointing_enable()
    assert not backbones.possible(model, 1) and backbones.possible(model.eval(), 1)
    for name, value in found[0].items():
        assert_close(found[1][name], value, atol=1e-5, rtol=1e-4, msg=name)


def test_an_error_leaves_the_encoder_as_it_was(monkeypatch):
    model = backbone("distilbert").eval()
    before = transformers_own(model, batch("mixed"), [1], False)

    def failed(*_, **__):
        raise RuntimeError("of the kernel")

    monkeypatch.setattr(backbones, "jagged_attention", failed)
    with pytest.raises(RuntimeError, match="of the kernel"):
        backbones.hidden(model, batch("mixed"), [1], first=False)
    assert model.config._attn_implementation != backbones.NAME
    assert torch.equal(transformers_own(model, batch("mixed"), [1], False), before)


def test_the_tokens_of_a_batch_may_be_more_than_an_encoders_positions(tokenizer):
    model, rows = backbone("electra").eval(), ragged([token_ids(SENTENCES, tokenizer, 32)[0][:5]] * 200)
    assert len(rows.ids) > model.config.max_position_embeddings
    rows = rows._replace(ids=rows.ids % WORDS)
    ours = backbones.hidden(model, rows, [1], first=False)
    assert_close(ours, transformers_own(model, rows, [1], False), atol=1e-9, rtol=1e-9)

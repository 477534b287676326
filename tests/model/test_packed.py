"""The packed way through BERT and its relatives is Transformers' own forward and gradient, unpadded."""

from itertools import product

import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModel, BertConfig, BertModel

from whitenedcse.model import attention, packed
from whitenedcse.model.encoder import Encoder
from whitenedcse.ragged import mask, pad, ragged, unpad

SHAPE = {"vocab_size": 50, "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2}
SHAPE |= {"intermediate_size": 40, "max_position_embeddings": 40, "pad_token_id": 1}
SHAPE["initializer_range"] = 0.3  # so that a slip anywhere shows
RELATIVES = ("bert", "roberta", "xlm-roberta", "camembert")
OTHERS = ("distilbert", "albert", "mpnet", "modernbert")
BATCHES = {"one": [7], "ones": [1, 1, 1], "equal": [5, 5, 5, 5]}
BATCHES |= {"mixed": [9, 2, 31, 2, 5, 9, 1], "falling": [12, 8, 8, 3, 2]}


def backbone(kind="bert", dropout=0.0, attention="sdpa", **settings):
    torch.manual_seed(0)
    rates = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    config = AutoConfig.for_model(kind, **SHAPE | rates | settings)
    made = AutoModel.from_config(config, add_pooling_layer=False, attn_implementation=attention)
    for weight in made.parameters():  # as if trained: biases and norms are not all 0 and 1
        if weight.ndim == 1:
            weight.data += 0.1 * torch.randn_like(weight)
    return made.double()


def batch(name="mixed"):
    draws = torch.Generator().manual_seed(1)
    return ragged([torch.randint(4, 50, (n,), generator=draws).tolist() for n in BATCHES[name]])


def transformers_own(model, rows, layers, first):
    """The padded forward, in the terms of the packed one."""
    where = mask(rows)
    given = {"input_ids": pad(rows, 1), "attention_mask": where.long()}
    states = model(**given, output_hidden_states=True).hidden_states
    return torch.stack([states[i][:, 0] if first else unpad(states[i], rows) for i in layers])


def gradients(model, hidden):
    """Of a sum in which every number has another weight."""
    model.zero_grad()
    (hidden * torch.linspace(-1, 1, hidden.numel(), dtype=hidden.dtype).view_as(hidden)).sum().backward()
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


def assert_transformers_own(model, rows, layers, first):
    """The states, and the gradient, which it returns, are those of Transformers."""
    ours = packed.hidden(model, rows, layers, first=first)
    own = gradients(model, ours)
    theirs = transformers_own(model, rows, layers, first)
    assert_close(ours, theirs, atol=1e-12, rtol=1e-12)
    expected = gradients(model, theirs)
    assert len(expected) >= len(own) > 0
    for weight, value in expected.items():
        if weight in own:
            assert_close(own[weight], value, atol=1e-11, rtol=1e-10, msg=weight)
        else:  # of a layer above, which is not computed here
            assert not value.any(), weight
    return own


LAYERS = ([3], [0], [1, 3], [3, 0, 2], [2])
STATES = [(name, [1, 3]) for name in BATCHES] + [("mixed", layers) for layers in LAYERS]


@pytest.mark.parametrize("kind", RELATIVES)
def test_states_and_gradient_are_those_of_transformers(kind):
    model = backbone(kind).train()
    for (name, layers), first in product(STATES, (False, True)):
        assert_transformers_own(model, batch(name), layers, first)


@pytest.mark.parametrize("onednn", [False, True])
@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_float32_is_exact_to_rounding(kind, onednn, monkeypatch):
    monkeypatch.setattr(packed, "prefers_onednn", lambda: onednn)
    exact, model, rows = backbone(kind), backbone(kind).float(), batch()
    ours = packed.hidden(model, rows, [1, 3], first=False)
    truth = transformers_own(exact, rows, [1, 3], first=False)
    assert_close(ours.double(), truth, atol=2e-5, rtol=0)
    own, expected = gradients(model, ours), gradients(exact, truth)
    largest = max(value.norm() for value in expected.values())  # that of a key's bias is 0
    for name, value in expected.items():
        assert (own[name] - value).norm() <= 1e-5 * value.norm() + 1e-7 * largest, name


def kernel(q, k, v, *, heads, p, bounds):
    """What a kernel for CUDA computes of its arguments, sentence by sentence."""
    assert p == 0 and bounds.tokens.dtype == bounds.firsts.dtype == torch.int32
    starts = bounds.tokens if len(q) == len(k) else bounds.firsts
    out = []
    for i in range(len(starts) - 1):
        keys = slice(int(bounds.tokens[i]), int(bounds.tokens[i + 1]))
        given = (q[starts[i] : starts[i + 1]], k[keys], v[keys])
        split = (x.unflatten(-1, (heads, -1)).transpose(0, 1) for x in given)
        out.append(F.scaled_dot_product_attention(*split).transpose(0, 1).flatten(1))
    assert max(map(len, out)) <= bounds.longest
    return torch.cat(out)


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("name", BATCHES)
def test_the_way_of_other_devices_is_the_same(name, first, monkeypatch, gpu_layout):
    """With a stand-in for the kernel of a GPU."""
    monkeypatch.setattr(packed, "unpadded_attention", kernel)
    assert_transformers_own(backbone("roberta").train(), batch(name), [0, 2, 3], first)


def test_a_padding_token_in_the_text_stands_where_roberta_puts_it():
    model, rows = backbone("roberta").eval(), ragged([[5, 6, 1, 7, 8], [1, 9], [4, 4, 1, 1, 3, 2]])
    ours = packed.hidden(model, rows, [3], first=False)
    assert_close(ours, transformers_own(model, rows, [3], first=False), atol=1e-12, rtol=0)


def halved(monkeypatch):
    """Every dropout of 0.3 becomes a halving."""
    rates = {0.3: 0.5, 0.0: 1.0}
    monkeypatch.setattr(
        F, "dropout", lambda x, p=0.5, training=True, inplace=False: x * rates[p] if training else x
    )
    monkeypatch.setattr(attention, "kept", lambda shape, p, seed: torch.ones(*shape, dtype=torch.uint8))
    monkeypatch.setattr(attention, "scale", lambda p: rates[p])


@pytest.mark.parametrize("first", [False, True])
def test_dropout_is_where_transformers_has_it(first, monkeypatch):
    """With every dropout replaced by a halving, in both."""
    halved(monkeypatch)
    model = backbone(dropout=0.3, attention="eager").train()
    assert_transformers_own(model, batch(), [0, 1, 3], first)


def test_little_is_computed_for_padding_and_nothing_for_unused_rows(monkeypatch):
    monkeypatch.setattr(packed, "prefers_onednn", lambda: False)  # the counter does not know oneDNN's
    model, rows = backbone(dropout=0.1).train(), batch()
    with FlopCounterMode(display=False) as counter:
        packed.hidden(model, rows, [3], first=True)
    t, n, d, wide = packed.rounded(len(rows.ids)), packed.rounded(rows.n), 24, 40
    tiles = attention.planned(rows.lengths.sort().values.tolist(), 2, t, n).tiles
    squares = sum(tile.sentences * tile.length**2 for tile in tiles)
    keys = sum(tile.sentences * tile.length for tile in tiles)
    full = 2 * t * (4 * d * d + 2 * d * wide) + 2 * 2 * d * squares
    last = 2 * t * 2 * d * d + 2 * n * (2 * d * d + 2 * d * wide) + 2 * 2 * d * keys
    assert counter.get_total_flops() == 2 * full + last
    assert squares < 1.2 * rows.lengths.square().sum()


def test_rows_are_rounded_up_by_little_to_few_numbers():
    found = [packed.rounded(rows) for rows in range(1, 9000)]
    assert all(rows <= up < rows + max(16, rows / 16 + 1) for rows, up in enumerate(found, 1))
    assert len({up for up in found if 4096 <= up < 8192}) == 16


def test_no_layer_above_the_highest_is_computed():
    model, rows = backbone().eval(), batch()
    expected = packed.hidden(model, rows, [1], first=False)
    model.encoder.layer[1] = model.encoder.layer[2] = None
    assert_close(packed.hidden(model, rows, [1], first=False), expected, atol=0, rtol=0)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_bfloat16_is_no_less_exact_than_padded(dropout, monkeypatch):
    """Without dropout, and with a halving in its place."""
    halved(monkeypatch)
    exact, model = (backbone(dropout=dropout, attention="eager").train() for _ in range(2))
    model, rows = model.float(), batch()
    truth = transformers_own(exact, rows, [3], first=False)
    errors = []
    for way in (packed.hidden, transformers_own):
        with torch.autocast("cpu", torch.bfloat16):
            hidden = way(model, rows, [3], first=False)
        grads, wanted = gradients(model, hidden), gradients(exact, truth)
        truth = transformers_own(exact, rows, [3], first=False)
        off = [((grads[name] - wanted[name]).norm() / wanted[name].norm()).item() for name in wanted]
        errors.append([(hidden - truth).norm().item(), max(off), sum(off)])
    assert all(ours < 1.2 * theirs for ours, theirs in zip(*errors, strict=True)), errors


@pytest.mark.parametrize("kind", RELATIVES + OTHERS)
def test_the_architecture_chooses(kind, tokenizer):
    small = {"vocab_size": len(tokenizer), "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    made = AutoModel.from_config(AutoConfig.for_model(kind, **small, intermediate_size=8, pad_token_id=0))
    encoder = Encoder(made, tokenizer)
    assert encoder.batches == ("packed" if kind in RELATIVES else "padded")
    assert encoder.attention(torch.device("cpu")) == ("tiles" if kind in RELATIVES else "padded")
    assert encoder.parallel == (kind in RELATIVES)
    assert Encoder(made, tokenizer, batches="padded").batches == "padded"
    with pytest.raises(ValueError, match=r"encoder\.batches='paged' .* not one of auto, packed, padded"):
        Encoder(made, tokenizer, batches="paged")
    if kind in OTHERS:
        with pytest.raises(ValueError, match=rf"encoder\.batches='packed' for {type(made).__name__} is not"):
            Encoder(made, tokenizer, batches="packed")


def test_a_bert_that_computes_something_else_is_padded():
    class Own(BertModel):
        pass

    assert packed.fits(backbone()) and not packed.fits(Own(BertConfig(**SHAPE)))
    for settings in ({"is_decoder": True}, {"position_embedding_type": "relative_key"}):
        assert not packed.fits(backbone(**settings)), settings


def test_dropout_is_a_function_of_seed_layer_and_place_and_without_a_seed_of_pytorchs_generator(monkeypatch):
    seen, kept, model = [], attention.kept, backbone(dropout=0.3).train()
    noted = lambda shape, p, seed: seen.append(tuple(seed)) or kept(shape, p, seed)  # noqa: E731
    monkeypatch.setattr(attention, "kept", noted)

    def states(**settings):
        return packed.hidden(model, batch(), [3], first=False, **settings)

    one = states(seed=1)
    assert len(seen) == len(set(seen)) == 1 + 3 * 3  # embeddings; attention and two dense in each layer
    assert torch.equal(one, states(seed=1)) and not torch.equal(one, states(seed=2))
    torch.manual_seed(3)
    first, second = states(), states()
    torch.manual_seed(3)
    assert torch.equal(states(), first) and not torch.equal(first, second)
    before = torch.random.get_rng_state()
    model.eval()
    states()
    assert torch.equal(torch.random.get_rng_state(), before)

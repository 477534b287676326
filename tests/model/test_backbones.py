"""Poolers, decoders and the weights behind a layer, against what Transformers' own forward computes."""

from itertools import product

import pytest
import torch
from encoders import DECODERS, SENTENCES, architecture, backbone, decoder_of, embedder_of
from torch.testing import assert_close
from transformers import AutoTokenizer, BertConfig, BertModel, GemmaTokenizer

from whitenedcse.data.tokens import token_ids
from whitenedcse.model.encoder import Encoder, padded_right
from whitenedcse.ragged import ragged

POOLED = {  # encoders of text in Transformers whose pooler is a layer `dense`, and settings that they need
    "bert": {},
    "esm": {"mask_token_id": 4},
    "longformer": {"attention_window": 8},
    "mobilebert": {"embedding_size": 16, "intra_bottleneck_size": 8, "true_hidden_size": 8},
    "mpnet": {},
    "rembert": {"input_embedding_size": 8},
    "roberta": {},
}
ENCODERS = {
    **{kind: {} for kind in ("bert", "mpnet", "roberta", "deberta-v2", "distilbert", "modernbert")},
    **{kind: {"embedding_size": 8} for kind in ("albert", "electra")},
}


def any_encoder(kind, tokenizer):
    if kind in DECODERS:
        return decoder_of(kind)
    return Encoder(architecture(kind, len(tokenizer), **(POOLED | ENCODERS)[kind]), tokenizer)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", POOLED)
@pytest.mark.slow(but=3)
def test_the_pooler_is_the_models_own(kind, tokenizer):
    encoder = any_encoder(kind, tokenizer)
    embedder = embedder_of(encoder, kind="pooler").eval()
    rows = token_ids(SENTENCES, tokenizer, 32)
    theirs = torch.cat([encoder.backbone(input_ids=torch.tensor([row])).pooler_output for row in rows])
    assert theirs.std(dim=0).mean() > 1e-3  # sentences differ, so equality says something
    ours = torch.cat([embedder.pool(ragged([row])) for row in rows])
    assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


def test_a_decoder_is_known_by_what_its_first_token_sees_and_none_by_dropout(tokenizer):
    for kind in (*ENCODERS, *DECODERS):
        assert any_encoder(kind, tokenizer).causal == (kind in DECODERS), kind
    shape = {"vocab_size": len(tokenizer), "hidden_size": 16, "num_hidden_layers": 2}
    config = BertConfig(**shape, num_attention_heads=2, is_decoder=True)
    encoder = Encoder(BertModel(config, add_pooling_layer=False).train(), tokenizer)
    assert encoder.causal and encoder.backbone.training  # in the mode it was
    encoder, state = Encoder(backbone("bert", len(tokenizer)), tokenizer).train(), torch.get_rng_state()
    assert not encoder.causal
    assert torch.equal(torch.get_rng_state(), state) and encoder.training  # nothing was drawn


def own_gradients(encoder, layer):
    """The names of the weights that a gradient of Transformers' own padded states reaches."""
    backbone = encoder.backbone.train()
    tokens = torch.tensor([token_ids(SENTENCES[:1], encoder.tokenizer, 16)[0]])
    out = backbone(input_ids=tokens, output_hidden_states=True)
    (out.last_hidden_state if layer == 3 else out.hidden_states[layer]).square().sum().backward()
    found = {name for name, weight in backbone.named_parameters() if weight.grad is not None}
    backbone.zero_grad()
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["esm", *ENCODERS, *DECODERS, "longformer"])
@pytest.mark.slow(but=4)
def test_unread_is_what_no_gradient_of_the_layers_reaches_but_for_a_pooler(kind, tokenizer):
    """What lies above the highest layer and what no output depends on, of packed and padded batches alike."""
    encoder = any_encoder(kind, tokenizer)
    names = {id(weight): name for name, weight in encoder.backbone.named_parameters()}
    at_the_end = own_gradients(encoder, 3)
    for batches, layers in product({encoder.batches, "padded"}, ([0], [1], [0, 2], [-2], [0, 3])):
        encoder.batches = batches
        found = {names[id(weight)] for weight in encoder.unread(layers)}
        highest = max(encoder.layer(layer) for layer in layers)
        rest = {*names.values()} - own_gradients(encoder, highest)
        assert found == {name for name in rest if name in at_the_end or "pooler" not in name}, layers
        ends = kind == "albert" or (highest == 3 and kind not in ("esm", "longformer"))
        assert bool(found) == (highest == 0 or not ends)  # ALBERT's layers are one


def test_a_tokenizer_pads_as_batches_are_padded(tokenizer):
    decoders, own = decoder_of("gpt2").tokenizer, tokenizer.pad_token
    assert (decoders.padding_side, decoders.pad_token) == ("right", decoders.eos_token)
    assert padded_right(tokenizer).pad_token == own


def test_a_tokenizer_that_is_read_again_still_pads_on_the_right(tmp_path):
    """Gemma's and Llama's classes pad on the left, and save that only where it was asked for."""
    assert (ours := GemmaTokenizer()).padding_side == "left"
    padded_right(ours).save_pretrained(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path).padding_side == "right"

"""How many tokens an encoder takes, and how few sentences whiten a group of channels."""

from contextlib import nullcontext

import pytest
import torch
from encoders import backbone, whitening
from transformers import GPT2Config, GPT2Model, XLNetConfig, XLNetModel

from whitenedcse.model.encoder import longest
from whitenedcse.model.whitener import Whitener


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_an_encoder_takes_as_many_tokens_as_it_has_positions_and_no_more(kind):
    model = backbone(kind, 45)
    most = longest(model, 1e30)
    assert longest(model, 512) == most and longest(model, 100) == 100
    model(input_ids=torch.full((1, most), 7))
    with pytest.raises((IndexError, RuntimeError)):
        model(input_ids=torch.full((1, most + 1), 7))


def test_of_other_architectures_the_config_says_how_many():
    shape = {"n_layer": 1, "n_head": 1}
    gpt2, xlnet = GPT2Config(**shape, n_embd=8, n_positions=24), XLNetConfig(**shape, d_model=8, d_inner=8)
    for model, limit, most in (
        (GPT2Model(gpt2), 1e30, 24),
        (GPT2Model(gpt2), 100, 24),  # a longer text has no positions
        (XLNetModel(xlnet), 1e30, 512),  # says -1, for any
    ):
        assert longest(model, limit) == most


def test_a_batch_is_refused_if_a_group_of_it_has_no_full_rank():
    for kind, n, refused in (
        ("group", 4, True),
        ("shuffled_group", 4, True),
        ("group", 5, False),
        ("zca", 4, False),
    ):
        with pytest.raises(ValueError, match="4 sentences cannot whiten 4") if refused else nullcontext():
            Whitener(16, whitening(kind=kind, group_width=4))(torch.randn(n, 16))

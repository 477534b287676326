"""How many tokens an encoder takes, and how few sentences whiten a group of channels."""

from contextlib import nullcontext

import pytest
import torch
from encoders import backbone, whitening
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GPT2Config, GPT2Model, XLNetConfig, XLNetModel

from whitenedcse.model.encoder import longest
from whitenedcse.model.whitener import check_rows


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


@given(
    kind=st.sampled_from(["group", "shuffled_group", "zca"]), width=st.sampled_from([1, 2, 4, 8, 16]),
    n=st.integers(2, 40),
)  # fmt: skip
@settings(derandomize=True, deadline=None, max_examples=60)
def test_a_batch_is_refused_if_a_group_of_it_has_no_full_rank(kind, width, n):
    whole = kind == "zca"
    chosen = whitening(kind=kind, group_width=None if whole else width)
    width = 16 if whole else width
    x = torch.randn(n, width, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    full = int(torch.linalg.matrix_rank(x - x.mean(dim=0))) == width
    with nullcontext() if full or whole else pytest.raises(ValueError, match="cannot whiten"):
        check_rows(chosen, 16, n=n)

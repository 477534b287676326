"""Pooling equals a loop over sentences."""

import pytest
import torch
from torch.testing import assert_close

from whitenedcse.model.head import Pooling
from whitenedcse.ragged import offsets

LENGTHS = [3, 1, 4]


@pytest.fixture
def hidden():
    return torch.randn(2, sum(LENGTHS), 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


NAIVE = {
    "cls": lambda tokens: tokens[0],
    "last": lambda tokens: tokens[-1],
    "mean": lambda tokens: sum(tokens) / len(tokens),
    "max": lambda tokens: torch.stack([max(channel) for channel in tokens.T]),
}


@pytest.mark.parametrize("kind", ["cls", "mean", "max", "last"])
def test_pooling_is_a_loop_over_sentences_averaged_over_layers_and_so_is_its_gradient(hidden, kind):
    pooling = Pooling(kind=kind, layers=[0, 1])
    loop = [[NAIVE[kind](part) for part in layer.split(LENGTHS)] for layer in hidden]
    assert_close(pooling(hidden, offsets(LENGTHS)), sum(torch.stack(layer) for layer in loop) / 2)
    assert torch.autograd.gradcheck(lambda h: pooling(h, offsets(LENGTHS)), hidden.requires_grad_())


def test_half_precision_is_averaged_in_float32():
    hidden = torch.full((1, 3, 4), 1.0, dtype=torch.bfloat16)
    hidden[0, 0] = 1 + 2**-7
    x = Pooling(kind="mean", layers=[-1])(hidden, offsets([3]))
    assert x.dtype == torch.float32
    assert_close(x, torch.full((1, 4), 1 + 2**-7 / 3))


def test_what_cannot_be_is_refused():
    for kind, layers, message in (
        ("median", [-1], "median.*cls, mean, max, last, pooler"),
        ("pooler", [1, -1], "last layer only"),
    ):
        with pytest.raises(ValueError, match=message):
            Pooling(kind, layers)

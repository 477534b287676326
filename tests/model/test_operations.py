"""Linear layers and dropout on CPU against the obvious way."""

import math

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from whitenedcse.model import packed
from whitenedcse.model.attention import kept
from whitenedcse.model.packed import dropout, linear

T, D = 23, 12


def rows(n=T):
    return torch.randn(n, D, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("onednn", [True, False])
def test_linear_and_its_gradient(onednn, bias, monkeypatch):
    monkeypatch.setattr(packed, "prefers_onednn", lambda: onednn)
    layer, x = nn.Linear(D, 7, bias=bias), rows().float().detach().requires_grad_()
    weight = torch.randn(T, 7)
    out = linear(layer, x)
    (out * weight).sum().backward()
    x64, w64 = x.detach().double(), layer.weight.detach().double()
    assert_close(out.double(), x64 @ w64.T + (layer.bias.double() if bias else 0), atol=1e-5, rtol=1e-5)
    assert_close(x.grad.double(), weight.double() @ w64, atol=1e-5, rtol=1e-5)
    assert_close(layer.weight.grad.double(), weight.double().T @ x64, atol=1e-5, rtol=1e-5)
    if bias:
        assert_close(layer.bias.grad, weight.sum(dim=0), atol=1e-5, rtol=1e-5)


def test_a_layer_in_the_place_of_a_linear_one_is_called_and_autocast_is_kept(monkeypatch):
    class Adapted(nn.Linear):  # as LoRA puts one there
        def forward(self, x):
            return super().forward(x) + 1

    monkeypatch.setattr(packed, "prefers_onednn", lambda: True)
    layer, x = Adapted(D, 7), rows().float()
    assert torch.equal(linear(layer, x), layer(x))
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(nn.Linear(D, 7), x).dtype == torch.bfloat16


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_keeps_as_many_as_it_should_and_their_mean(p):
    x = torch.ones(1000, 400)
    y = dropout(x, nn.Dropout(p).train(), 0)
    n, dropped = x.numel(), (y == 0).float()
    five_sigma = 5 * math.sqrt(p * (1 - p) / n)
    assert abs(dropped.mean() - p) < five_sigma + 2**-17
    assert_close(y[y > 0].unique(), torch.tensor([1 / (1 - round(p * 2**16) / 2**16)]))
    assert abs(y.mean() - 1) < five_sigma / (1 - p) + 1e-4
    for axis in (0, 1):  # neither rows nor columns share their fate
        spread = dropped.mean(dim=axis).var() / (p * (1 - p) / x.shape[axis])
        assert 0.75 < spread < 1.3
    lagged = (dropped[:, 1:] * dropped[:, :-1]).mean() - dropped.mean() ** 2
    assert abs(lagged) < 5 * p / math.sqrt(n)


@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("residual", [False, True])
def test_dropout_and_its_gradient_are_those_of_the_mask(kind, residual):
    x, layer, seed = torch.randn(50, 40, dtype=kind, requires_grad=True), nn.Dropout(0.3).train(), [4, 2]
    onto = torch.randn(50, 40, dtype=torch.promote_types(kind, torch.float32), requires_grad=True)
    y = dropout(x, layer, seed, onto=onto if residual else None)
    factor = kept((50, 40), 0.3, seed).double() / (1 - round(0.3 * 2**16) / 2**16)
    grad = torch.randn_like(y)
    digits = {torch.bfloat16: 2**-8, torch.float32: 1e-6, torch.float64: 1e-12}
    assert y.dtype == (onto.dtype if residual else kind)
    wanted = x.double() * factor + (onto.double() if residual else 0)
    assert_close(y.double(), wanted, atol=1e-6, rtol=digits[y.dtype])
    y.backward(grad)
    assert x.grad.dtype == kind
    assert_close(x.grad.double(), grad.double() * factor, atol=1e-12, rtol=digits[kind])
    assert onto.grad is None if not residual else torch.equal(onto.grad, grad)


def test_dropout_is_off_in_eval_mode_and_at_zero():
    x, onto = torch.randn(5, 5), torch.randn(5, 5)
    for layer in (nn.Dropout(0.5).eval(), nn.Dropout(0.0).train()):
        assert dropout(x, layer, 0) is x
        assert torch.equal(dropout(x, layer, 0, onto=onto), x + onto)
    assert not dropout(torch.ones(9, 9), nn.Dropout(1.0).train(), 0).any()

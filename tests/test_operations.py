"""Linear layers, dropout and attention on CPU against the obvious way."""

import math

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from whitenedcse.model import operations
from whitenedcse.model.operations import Groups, attention, dropout, kept, linear

LENGTHS = [(2, 1), (3, 4), (1, 9)]  # sentences, tokens
T, N, D, HEADS = 23, 6, 12, 3


def rows(n=T, requires_grad=True):
    return torch.randn(n, D, dtype=torch.float64, requires_grad=requires_grad)


def naive(q, k, v, p=0.0, seed=None):
    """Sentence by sentence and head by head; with dropout, by the masks that this seed gives."""
    torch.manual_seed(seed or 0)
    masks = Groups(LENGTHS, HEADS, p).masks(len(q), len(k)) if p else None
    out, start, sentence = [], 0, 0
    for g, (count, length) in enumerate(LENGTHS):
        for i in range(count):
            mine = slice(start, start + length) if len(q) == len(k) else slice(sentence, sentence + 1)
            heads = []
            for h in range(HEADS):
                channels = slice(h * D // HEADS, (h + 1) * D // HEADS)
                scores = q[mine, channels] @ k[start : start + length, channels].T / math.sqrt(D / HEADS)
                weights = scores.softmax(dim=-1)
                if masks:
                    weights = weights * masks[g][i * HEADS + h] / (1 - round(p * 2**16) / 2**16)
                heads.append(weights @ v[start : start + length, channels])
            out.append(torch.cat(heads, dim=-1))
            start, sentence = start + length, sentence + 1
    return torch.cat(out)


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("queries", [T, N])
def test_attention_and_its_gradient_are_the_naive_ones(queries, p):
    q, k, v = rows(queries), rows(), rows()
    expected = naive(q, k, v, p, seed=5)
    torch.manual_seed(5)
    out = attention(q, k, v, heads=HEADS, p=p, where=LENGTHS)
    assert_close(out, expected, atol=1e-12, rtol=1e-12)
    weight = torch.randn_like(out)
    wanted = torch.autograd.grad((expected * weight).sum(), (q, k, v))
    for ours, theirs in zip(torch.autograd.grad((out * weight).sum(), (q, k, v)), wanted, strict=True):
        assert_close(ours, theirs, atol=1e-12, rtol=1e-11)


def test_attention_stays_in_float32_under_autocast_also_backward():
    q, k, v = (rows().float().detach().bfloat16().requires_grad_() for _ in range(3))
    torch.manual_seed(3)
    expected = naive(q.float(), k.float(), v.float(), 0.2, seed=3)
    torch.manual_seed(3)
    with torch.autocast("cpu", torch.bfloat16):
        out = attention(q, k, v, heads=HEADS, p=0.2, where=LENGTHS)
        grads = torch.autograd.grad(out.float().sum(), (q, k, v))
    assert_close(out.float(), expected, atol=1e-6, rtol=2**-8)  # one rounding to bfloat16, at the end
    wanted = torch.autograd.grad(expected.sum(), (q, k, v))
    for ours, theirs in zip(grads, wanted, strict=True):
        assert_close(ours.float(), theirs.float(), atol=1e-3, rtol=2**-7)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("onednn", [True, False])
def test_linear_and_its_gradient(onednn, bias, monkeypatch):
    monkeypatch.setattr(operations, "prefers_onednn", lambda: onednn)
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


def test_a_frozen_linear_layer_gets_no_gradient(monkeypatch):
    monkeypatch.setattr(operations, "prefers_onednn", lambda: True)
    layer, x = nn.Linear(D, 7).requires_grad_(False), rows().float().detach().requires_grad_()
    linear(layer, x).sum().backward()
    assert layer.weight.grad is None and layer.bias.grad is None
    assert_close(x.grad, layer.weight.sum(dim=0).expand(T, D))


def test_a_layer_in_the_place_of_a_linear_one_is_called(monkeypatch):
    class Adapted(nn.Linear):  # as LoRA puts one there
        def forward(self, x):
            return super().forward(x) + 1

    monkeypatch.setattr(operations, "prefers_onednn", lambda: True)
    layer, x = Adapted(D, 7), rows().float()
    assert torch.equal(linear(layer, x), layer(x))


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_keeps_as_many_as_it_should_and_their_mean(p):
    torch.manual_seed(0)
    x = torch.ones(1000, 400)
    y = dropout(x, nn.Dropout(p).train())
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


def test_dropout_passes_the_gradient_of_what_it_kept():
    x = torch.randn(50, 40, requires_grad=True)
    y = dropout(x, nn.Dropout(0.3).train())
    y.backward(torch.full_like(y, 2.0))
    assert_close(x.grad, torch.where(y == 0, 0.0, 2 * y / x).detach())


def test_dropout_depends_on_the_seed_and_differs_between_calls():
    def draw():
        return kept((64, 64), 0.5)

    torch.manual_seed(1)
    first, second = draw(), draw()
    torch.manual_seed(1)
    assert torch.equal(draw(), first) and not torch.equal(first, second)
    torch.manual_seed(2)
    assert not torch.equal(draw(), first)


def test_dropout_is_off_in_eval_mode_and_at_zero():
    x = torch.randn(5, 5)
    assert dropout(x, nn.Dropout(0.5).eval()) is x
    assert torch.equal(dropout(x, nn.Dropout(0.0).train()), x)


def test_all_dropped_is_zero():
    assert not dropout(torch.ones(9, 9), nn.Dropout(1.0).train()).any()


def test_under_autocast_a_linear_layer_is_autocasts(monkeypatch):
    monkeypatch.setattr(operations, "prefers_onednn", lambda: True)
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(nn.Linear(D, 7), rows().float()).dtype == torch.bfloat16

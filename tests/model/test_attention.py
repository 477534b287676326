"""Attention on CPU against sentences taken one by one."""

import math
import sys
from functools import partial

import pytest
import torch
from torch.testing import assert_close
from transformers import BertConfig, BertModel

from whitenedcse import ragged
from whitenedcse.model import attention as module
from whitenedcse.model import packed
from whitenedcse.model.attention import (
    Bounds,
    Settings,
    attention,
    cuts,
    planned,
    unpadded_attention,
    way,
)

LENGTHS = [1, 1, 4, 4, 4, 9, 16, 17, 18, 18]
HEADS, D, BEYOND = 3, 12, 5
T, N = sum(LENGTHS), len(LENGTHS)
PLAN = planned(LENGTHS, HEADS, T + BEYOND, N + BEYOND)
KEPT = 1 - round(0.3 * 2**16) / 2**16


def rows(n=T, kind=torch.float64):
    """Random rows, and some that belong to no sentence."""
    return torch.randn(n + BEYOND, D, dtype=kind, requires_grad=True)


def masks_by_sentence(settings):
    """(h, l, l) of each sentence: what dropout keeps, divided by how much it keeps."""
    for tile, mask in zip(PLAN.tiles, settings.masks(), strict=True):
        each = mask.view(HEADS, tile.sentences, *mask.shape[1:]).double() / KEPT
        yield from each.unbind(1)


def naive(q, k, v, settings):
    """Sentence by sentence and head by head; rows of no sentence are zeros."""
    masks = list(masks_by_sentence(settings)) if settings.p else [None] * N
    out, start = [], 0
    for i, (length, mask) in enumerate(zip(LENGTHS, masks, strict=True)):
        mine = slice(i, i + 1) if settings.first else slice(start, start + length)
        heads = []
        for h in range(HEADS):
            channels = slice(h * D // HEADS, (h + 1) * D // HEADS)
            scores = q[mine, channels] @ k[start : start + length, channels].T / math.sqrt(D / HEADS)
            weights = scores.softmax(dim=-1)
            weights = weights if mask is None else weights * mask[h, : len(weights), :length].to(q.dtype)
            heads.append(weights @ v[start : start + length, channels])
        out.append(torch.cat(heads, dim=-1))
        start += length
    return torch.cat([*out, torch.zeros(BEYOND, D, dtype=q.dtype)])


def test_the_plan_has_full_and_padded_tiles_and_none_that_is_mostly_padding():
    assert [(tile.sentences, tile.length) for tile in PLAN.tiles] == [(2, 1), (3, 4), (1, 9), (4, 18)]
    assert [tile.absent is None for tile in PLAN.tiles] == [True, True, True, False]
    for lengths in (list(range(1, 60)), [7] * 5, [1], sorted(torch.randint(1, 33, (200,)).tolist())):
        for low, high in cuts(torch.tensor(lengths).numpy()):
            assert lengths[low] >= 0.84 * lengths[high - 1]


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("first", [False, True])
def test_attention_and_its_gradient_are_the_naive_ones(first, p):
    q, k, v = rows(N if first else T), rows(), rows()
    settings = Settings(PLAN, first, p, [5, 1])
    expected, out = naive(q, k, v, settings), attention(q, k, v, settings)
    assert_close(out, expected, atol=1e-12, rtol=1e-12)
    weight = torch.randn_like(out)  # of the rows beyond the sentences too, which have no effect
    wanted = torch.autograd.grad((expected * weight).sum(), (q, k, v))
    for ours, theirs in zip(torch.autograd.grad((out * weight).sum(), (q, k, v)), wanted, strict=True):
        assert_close(ours, theirs, atol=1e-12, rtol=1e-11)


def test_attention_stays_in_float32_under_autocast():
    q, k, v = (rows().detach().bfloat16().requires_grad_() for _ in range(3))
    settings = Settings(PLAN, False, 0.3, 3)
    expected = naive(q.float(), k.float(), v.float(), settings)
    with torch.autocast("cpu", torch.bfloat16):
        out = attention(q, k, v, settings)
    grads = torch.autograd.grad(out.float().sum(), (q, k, v))
    assert_close(out.double(), expected.double(), atol=1e-6, rtol=2**-8)  # one rounding, at the end
    wanted = torch.autograd.grad(expected.sum(), (q, k, v))
    for ours, theirs in zip(grads, wanted, strict=True):
        assert_close(ours.float(), theirs.float(), atol=1e-3, rtol=2**-7)


def test_dropout_differs_between_heads_sentences_and_seeds():
    masks = [mask for mask in Settings(PLAN, False, 0.5, 0).masks() if mask.shape[-1] > 8]
    again = [mask for mask in Settings(PLAN, False, 0.5, 1).masks() if mask.shape[-1] > 8]
    parts = [part for mask in (*masks, *again) for part in mask]
    assert len({part.numpy().tobytes() for part in parts}) == len(parts)


def on_meta(kind, n, length):
    return torch.empty(n, length, dtype=kind, device="meta", requires_grad=True)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("first", [False, True])
def test_the_kernels_for_cuda_take_the_arguments_and_give_gradients(kind, first, monkeypatch):
    """On tensors without memory, for which PyTorch checks arguments and tells shapes."""
    asked = []
    for name in ("_flash_attention_forward", "_efficient_attention_forward"):
        own = getattr(torch.ops.aten, name)
        told = lambda *given, own=own, name=name: asked.append((name, given)) or own(*given)  # noqa: E731
        monkeypatch.setattr(torch.ops.aten, name, told)
    q, (k, v) = on_meta(kind, 7 if first else 50, 24), (on_meta(kind, 50, 24) for _ in "kv")
    ends = Bounds(*(torch.empty(8, dtype=torch.int32, device="meta") for _ in "ab"), 12)
    out = unpadded_attention(q, k, v, heads=3, p=0.1, bounds=ends)
    out.sum().backward()
    assert (out.shape, out.dtype) == (q.shape, kind)
    assert all(x.grad.shape == x.shape and x.grad.dtype == kind for x in (q, k, v))
    ((name, given),) = asked
    assert ("flash" in name) == (kind != torch.float32)
    at = 3 if "flash" in name else 4  # where the bounds begin
    assert given[at] is (ends.firsts if first else ends.tokens) and given[at + 1] is ends.tokens
    assert given[at + 2 : at + 5] == (1 if first else 12, 12, 0.1)
    assert [x.shape[-2:] for x in given[:3]] == [(3, 8)] * 3


def test_a_device_without_those_kernels_pads_and_says_so_once(monkeypatch):
    monkeypatch.setattr(module, "unpadded_attention", lambda *_, **__: torch.ops.aten.no_such_operator)
    module.kernels.cache_clear()
    with pytest.warns(UserWarning, match="has not the attention that skips padding .*: batches are padded"):
        assert way("cuda", 64, torch.float32) == "padded"
    assert way("cuda", 64, torch.float32) == "padded"  # a second warning would be an error
    module.kernels.cache_clear()


def calls(run):
    """How many functions Python calls, its own and those of C."""
    count = 0

    def seen(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(seen)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


def test_a_layer_on_a_gpu_takes_four_fifths_of_the_python_of_a_padded_one(monkeypatch, gpu_layout):
    """Python launches each kernel, for which a step of BERT-base waits; the kernels are stubs here."""
    batch = ragged.ragged([[1, 2, 3], [4, 5], [6, 7, 8, 9]])
    padded = {"input_ids": ragged.pad(batch, 0), "attention_mask": ragged.mask(batch).long()}
    drop = torch.nn.functional.dropout
    plain = lambda x, p, _, onto: drop(x, p) if onto is None else drop(x, p) + onto  # noqa: E731
    monkeypatch.setattr(packed, "dropped", plain)
    monkeypatch.setattr(torch.ops.aten, "_efficient_attention_forward", lambda q, k, v, *_: (q + k + v,))
    stub = lambda q, k, v, **_: q + k + v  # noqa: E731
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", stub)
    counts = {"packed": [], "padded": []}
    for depth in (2, 6):
        shape = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 20}
        bert = BertModel(BertConfig(**shape, num_hidden_layers=depth), add_pooling_layer=False).train()
        runs = {
            "packed": partial(packed.hidden, bert, batch, [depth], first=False, seed=1),
            "padded": partial(bert, **padded),
        }
        for name, run in runs.items():
            run()
            counts[name].append(calls(run))
    each = {name: (more - few) / 4 for name, (few, more) in counts.items()}
    assert 50 < each["packed"] <= 0.8 * each["padded"] and each["packed"] < 200, each

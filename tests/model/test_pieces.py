"""A batch encoded in pieces has the vectors and the gradient of a batch encoded at once."""

import gc
import threading
import weakref
from functools import partial

import pytest
import torch
from encoders import embedder_of
from test_training import LOSS, module_of
from torch.testing import assert_close

from whitenedcse.compute import autocast_as_now
from whitenedcse.data.datamodule import Batch
from whitenedcse.ragged import between, concatenate, ragged, rows
from whitenedcse.training import parallel as module_of_pieces
from whitenedcse.training.module import reseed
from whitenedcse.training.parallel import cut, encoded


def batch_of(n=24, passes=2):
    draws = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, 30, (n,), generator=draws).tolist()
    sentences = ragged([torch.randint(5, 40, (length,), generator=draws).tolist() for length in lengths])
    return Batch(concatenate([sentences] * passes), sentences, n)


def stepped(module, batch):
    """Vectors, loss, and the gradient of every weight."""
    module.zero_grad()
    x = module.encoded(batch, (1, 2, 3, 0))
    reseed(4)  # of the permutations
    loss = LOSS(*module.embedder.head.project(x, passes=2, views=2))
    loss.backward()
    grads = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    return x.detach(), loss.detach(), grads


def test_any_number_of_threads_gives_the_vectors_and_the_gradient_of_one(encoder, threaded):
    module, batch = module_of(encoder).double(), batch_of()
    for part in module.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0  # pieces have their own dropout
    expected = stepped(module, batch)
    for k, module.chunk in ((2, None), (3, 7), (50, 1000), (3, None)):
        threaded(k)
        found = stepped(module, batch)
        assert found[2].keys() == expected[2].keys() and len(found[2]) > 30
        for ours, theirs in zip(found, expected, strict=True):
            assert_close(ours, theirs, atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize(("k", "chunk"), [(2, None), (3, 7)])
def test_the_same_number_of_threads_gives_the_same_bits(bert, k, chunk, threaded):
    threaded(k)
    module, batch = module_of(bert, chunk=chunk), batch_of()
    first = stepped(module, batch)
    torch.manual_seed(99)  # which has no part in it
    for _ in range(3):
        again = stepped(module, batch)
        assert torch.equal(first[0], again[0])
        assert all(torch.equal(first[2][name], grad) for name, grad in again[2].items())


@pytest.mark.parametrize("autocast", [False, True])
def test_an_encoding_that_is_made_again_is_the_same(bert, autocast, threaded):
    """Dropout and autocast of the forward pass hold in the backward pass, which is outside of both."""
    module, pieces = module_of(bert), cut(batch_of().negatives, 3)[0]
    for parallel in (False, True):
        threaded(1 + parallel)
        grads = []
        for keep in (True, False):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                encode = partial(module.pooled, autocast_as_now(module.device), (1,))
                x = encoded(pieces, encode, bert.parameters(), parallel=parallel, keep=keep)
            words = bert.backbone.get_input_embeddings().weight
            grads += torch.autograd.grad(x.square().sum(), [words])
        assert torch.equal(*grads)


def test_the_cut_keeps_every_sentence_once_and_shares_the_work():
    batch = batch_of(200, passes=1).negatives
    for k in (1, 2, 3, 8):
        pieces, order = cut(batch, k)
        assert len(pieces) == k
        whole = rows(batch)
        assert [row for piece in pieces for row in rows(piece)] == [whole[i] for i in order.tolist()]
        tokens = [len(piece.ids) for piece in pieces]
        assert max(tokens) < sum(tokens) / k + 2 * batch.longest
    few, order = cut(ragged([[1, 2], [3]]), 8)
    assert [rows(piece) for piece in few] == [[[3]], [[1, 2]]] and order.tolist() == [1, 0]


def test_a_weight_that_takes_no_part_has_no_gradient_and_a_frozen_one_none_either(bert):
    weight, unused, frozen = (torch.nn.Parameter(torch.ones(3)) for _ in range(3))
    frozen.requires_grad_(False)

    def weighted(piece, i):
        return piece.offsets[1:, None] * weight * frozen

    pieces = [ragged([[1], [2, 3]]), ragged([[4, 5, 6]])]
    encoded(pieces, weighted, [weight, unused, frozen], parallel=False, keep=True).sum().backward()
    assert weight.grad.tolist() == [1 + 3 + 3] * 3
    assert unused.grad is None and frozen.grad is None


@pytest.mark.parametrize("keep", [True, False])
def test_activations_live_until_the_backward_pass_only_if_they_are_kept(bert, keep):
    alive = []

    class Big(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(made := x * 2)
            alive.append(weakref.ref(made))
            return made + 0

        @staticmethod
        def backward(ctx, grad):
            return 2 * grad + 0 * ctx.saved_tensors[0]

    weight = torch.nn.Parameter(torch.ones(3))
    pieces = [ragged([[1], [2]])] * 4
    double = lambda piece, i: Big.apply(weight * piece.offsets[1:, None])  # noqa: E731
    x = encoded(pieces, double, [weight], parallel=False, keep=keep)
    gc.collect()
    assert [ref() is not None for ref in alive] == [keep] * 4
    x.sum().backward()
    gc.collect()
    assert not any(ref() is not None for ref in alive)
    assert weight.grad.tolist() == [4 * 2 * 3] * 3


def test_padded_batches_draw_from_the_generator_and_so_have_one_thread(bert, threaded):
    bert.batches = "padded"
    threaded(2)
    module, batch = module_of(bert), batch_of()
    first, again = stepped(module, batch), stepped(module, batch)
    assert torch.equal(first[0], again[0])
    assert not bert.parallel


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.slow(but=1)
def test_vectors_of_encode_are_the_same_bits_for_any_number_of_threads(bert, bf16, threaded):
    """Transformers 4 sets and resets forward methods to collect hidden states: its way has one thread."""
    embedder, forward, seen, told = embedder_of(bert).eval(), bert.forward, set(), []
    bert.forward = lambda *a, **k: (seen.add(threading.get_ident()), forward(*a, **k))[1]
    tokens = batch_of(3000, passes=1).negatives
    expected = embedder.encode_rows(tokens, bf16=bf16)
    for k in (2, 3):
        threaded(k)
        seen.clear()
        assert (embedder.encode_rows(tokens, bf16=bf16, progress=told.append) == expected).all()
        assert 1 < len(seen) <= k and sum(told) == len({tuple(row) for row in rows(tokens)})
        told.clear()
    bert.batches = "padded"
    seen.clear()
    embedder.encode_rows(between(tokens, 0, 1000))
    assert len(seen) == 1


def test_threads_hold_no_more_copies_of_the_gradient_than_there_is_memory_for(monkeypatch):
    weight, pieces = torch.nn.Parameter(torch.ones(3)), [ragged([[i, i]]) for i in range(16)]
    seen, copies = [], module_of_pieces.gradients
    monkeypatch.setattr(module_of_pieces, "cores", lambda: 16)
    spy = lambda *given: seen.append(given[-1]) or copies(*given)  # noqa: E731
    monkeypatch.setattr(module_of_pieces, "gradients", spy)
    for most, threads in ((1 << 30, 16), (5 * weight.nbytes, 5), (1, 2)):
        monkeypatch.setattr(module_of_pieces, "COPIES", most)
        seen.clear()
        weight.grad = None
        encoded(
            pieces, lambda piece, i: piece.offsets[1:, None] * weight, [weight], parallel=True, keep=True
        ).sum().backward()
        assert len(seen) == threads and sorted(i for share in seen for i in share) == list(range(16))
        assert weight.grad.tolist() == [32.0] * 3

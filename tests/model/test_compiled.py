"""Layers by torch.compile (`trainer.compile`): one graph for all, and the numbers of plain ones."""

import lightning
import pytest
import torch

from whitenedcse.model import attention, packed
from whitenedcse.model.embedder import Embedder
from whitenedcse.model.scratch import small_bert
from whitenedcse.ragged import ragged
from whitenedcse.training.module import ContrastiveTraining

pytestmark = pytest.mark.filterwarnings("ignore")  # what PyTorch's compiler says while it traces
ROWS = [[2, 5, 6, 3], [2, 7, 3], [2, 8, 9, 10, 11, 3], [2, 9, 3]]


def on_gpu(batch, heads, seed):
    """The layout that a batch has on a GPU."""
    return packed.Layout(batch, None, None, len(batch.ids), batch.n, None, attention.bounds(batch), 0)


@pytest.fixture
def gpu(monkeypatch):
    """The layout of a batch is that of a GPU."""
    monkeypatch.setattr(packed, "laid_out", on_gpu)


def test_layers_of_any_length_are_one_graph_and_those_of_first_tokens_another(gpu, monkeypatch):
    graphs = []

    def noted(module, inputs):
        graphs.append(module)
        return module.forward

    compiled = torch.compile(packed.block, dynamic=True, fullgraph=True, backend=noted)
    monkeypatch.setattr(packed, "compiled_block", lambda: compiled)
    bert = small_bert(vocabulary=200, layers=4, width=32, heads=2).backbone.train().to("meta")
    for rows in (ROWS, ROWS[:3], [row * 2 for row in ROWS]):
        batch = ragged(rows).to(torch.device("meta"))
        found = packed.hidden(bert, batch, [4], first=True, compiled=True)
        found.sum().backward()
        assert found.shape == (1, len(rows), 32)
    assert len(graphs) == 2


@pytest.mark.slow
def test_compiled_layers_give_the_states_and_gradients_of_plain_ones(gpu, monkeypatch):
    def attended(q, k, v, *, heads, p, bounds):
        starts = bounds.tokens if len(q) == len(k) else bounds.firsts
        own = torch.bucketize(torch.arange(len(q)), starts[1:], right=True)
        other = torch.bucketize(torch.arange(len(k)), bounds.tokens[1:], right=True)
        q, k, v = (x.unflatten(-1, (heads, -1)).transpose(0, 1) for x in (q, k, v))
        scores = q @ k.mT / q.shape[-1] ** 0.5
        weights = scores.masked_fill(own[:, None] != other, -torch.inf).softmax(-1)
        return (weights @ v).transpose(0, 1).flatten(-2)

    monkeypatch.setattr(packed, "unpadded_attention", attended)
    monkeypatch.setattr(packed, "prefers_onednn", lambda: False)  # which is for CPUs alone
    bert = small_bert(vocabulary=200, layers=3, width=32, heads=2).backbone.eval()
    found = {}
    for compiled in (False, True):
        bert.zero_grad()
        states = packed.hidden(bert, ragged(ROWS), [1, 3], first=True, compiled=compiled)
        (states * torch.linspace(-1, 1, states.numel()).view(states.shape)).sum().backward()
        weights = [w for w in bert.parameters() if w.grad is not None]
        found[compiled] = [states.detach(), *(w.grad.clone() for w in weights)]
    for plain, fast in zip(found[False], found[True], strict=True):
        # the exact gradient of a key's bias is zero
        assert (fast - plain).abs().max() <= 2e-6 * plain.abs().max() + 1e-9


def test_layers_are_not_compiled_on_a_cpu():
    module = ContrastiveTraining(
        embedder=Embedder(encoder=small_bert(vocabulary=200, layers=1, width=8, heads=1)),
        views=2,
        compiled=True,
    )
    trainer = lightning.Trainer(max_steps=1, accelerator="cpu", logger=False, enable_checkpointing=False)
    with pytest.raises(ValueError, match=r"trainer\.compile=true .* here attention is by tiles"):
        trainer.fit(module, torch.utils.data.DataLoader([0]))
    assert not module.embedder.encoder.compiled

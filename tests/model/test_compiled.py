"""Layers by torch.compile (`trainer.compile`): one graph for all, and the numbers of plain ones."""

import lightning
import pytest
import torch

from whitenedcse.model import packed
from whitenedcse.model.embedder import Embedder
from whitenedcse.model.scratch import small_bert
from whitenedcse.ragged import ragged
from whitenedcse.training.module import ContrastiveTraining

pytestmark = pytest.mark.filterwarnings("ignore")  # what PyTorch's compiler says while it traces
ROWS = [[2, 5, 6, 3], [2, 7, 3], [2, 8, 9, 10, 11, 3], [2, 9, 3]]


def test_layers_of_any_length_are_one_graph_and_those_of_first_tokens_another(monkeypatch, gpu_layout):
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


def test_layers_are_not_compiled_on_a_cpu():
    module = ContrastiveTraining(
        embedder=Embedder(encoder=small_bert(vocabulary=200, layers=1, width=8, heads=1)),
        views=2,
        compiled=True,
    )
    trainer = lightning.Trainer(max_steps=1, accelerator="cpu", logger=False, enable_checkpointing=False)
    with pytest.raises(ValueError, match=r"trainer\.compile=true .*; attention is by tiles"):
        trainer.fit(module, torch.utils.data.DataLoader([0]))
    assert not module.embedder.encoder.compiled

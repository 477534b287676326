"""Training learns: one batch by heart, and the quick start beyond its start."""

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch
from encoders import SENTENCES, embedder_of, projected, whitening
from lightning import seed_everything
from test_training import LOSS

from whitenedcse.data.tokens import token_ids
from whitenedcse.model.head import ProjectionHead
from whitenedcse.ragged import concatenate, ragged

ROOT = Path(__file__).parents[2]


def test_one_batch_is_learnt_by_heart(bert):
    seed_everything(0, verbose=False)
    embedder = embedder_of(bert, head=ProjectionHead(16, whitening=whitening(eps=1e-3))).train()
    batch = concatenate([ragged(token_ids(SENTENCES, bert.tokenizer, 32))] * 2)
    optimizer = torch.optim.AdamW(embedder.parameters(), lr=3e-3)
    losses = []
    for _ in range(150):
        optimizer.zero_grad()
        loss = LOSS(projected(embedder, batch, n=len(SENTENCES), views=2)[0])
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert sum(losses[-10:]) < 0.3 * sum(losses[:10]), losses


@pytest.mark.slow
def test_a_few_steps_of_the_quick_start_lift_the_score(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["run=quick", "trainer.max_steps=15", "trainer.accelerator=cpu", "tasks=none"]
    monkeypatch.setattr(sys, "argv", [str(ROOT / "train.py"), *words])
    runpy.run_path(sys.argv[0], run_name="__main__")
    scores = json.loads((tmp_path / "outputs/quick/scores.json").read_text())["dev"]
    assert scores["best"] > scores["before"] + 5

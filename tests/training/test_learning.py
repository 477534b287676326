"""Training learns: one batch by heart, and the quick start beyond its start."""

import json
import os
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


@pytest.mark.parametrize("kind", [None, "group", "shuffled_group"])
@pytest.mark.slow(but=1)
def test_one_batch_is_learnt_by_heart(bert, kind):
    seed_everything(0, verbose=False)
    settings = whitening(kind=kind, eps=1e-3) if kind else None
    embedder = embedder_of(bert, head=ProjectionHead(16, whitening=settings)).train()
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


LETTERS = str.maketrans(
    "abcdefghijklmnopqrstuvwxyz", "абвгдежзиклмнопрстуфхцчшщъ"
)  # in the order of their code


def cyrillic(name, folder):
    """A file of the bundled set in other letters, but for the header of a table."""
    head, rest = "", (ROOT / "data/quickstart" / name).read_text()
    if name.endswith(".tsv"):
        head, _, rest = rest.partition("\n")
        head += "\n"
    (folder / name).write_text(head + rest.lower().translate(LETTERS))
    return name


@pytest.mark.slow
def test_a_few_steps_of_the_quick_start_lift_the_score_in_any_letters(tmp_path, monkeypatch, capsys):
    """Nothing knows English: a language written otherwise, letter for letter, gives the same scores."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(os.environ, "WHITENEDCSE_CACHE", str(tmp_path))
    texts, pairs = cyrillic("sentences.txt", tmp_path), cyrillic("dev.tsv", tmp_path)
    other = ["data=file", f"data.corpus={texts}", f"monitor.dev={pairs}"]
    scores = []
    for name, more in (("quick", []), ("other", other)):
        few = ["trainer.max_steps=15", "trainer.accelerator=cpu", "tasks=none"]
        monkeypatch.setattr(sys, "argv", [str(ROOT / "train.py"), f"run={name}", *few, *more])
        runpy.run_path(sys.argv[0], run_name="__main__")
        assert capsys.readouterr().out.splitlines()[-1] == f"run: {tmp_path / 'outputs' / name}"
        scores.append(json.loads((tmp_path / "outputs" / name / "scores.json").read_text())["dev"])
    assert scores[0]["best"] > scores[0]["before"] + 5
    one, other = ({key: of[key] for key in ("before", "best", "best_step", "last")} for of in scores)
    assert one == other

"""Training learns: the quick start beyond its start."""

import json
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_few_steps_of_the_quick_start_lift_the_score(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["run=quick", "trainer.max_steps=15", "trainer.accelerator=cpu", "tasks=none"]
    monkeypatch.setattr(sys, "argv", [str(ROOT / "train.py"), *words])
    runpy.run_path(sys.argv[0], run_name="__main__")
    scores = json.loads((tmp_path / "outputs/quick/scores.json").read_text())["dev"]
    assert scores["best"] > scores["before"] + 5

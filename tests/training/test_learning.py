"""Training learns: the quick start beyond its start."""

import pytest

from whitenedcse.app import cli
from whitenedcse.run import Run


@pytest.mark.slow
def test_a_few_steps_of_the_quick_start_lift_the_score(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["run=quick", "trainer.max_steps=15", "trainer.accelerator=cpu", "tasks=none"]
    assert cli.main(["train", *words]) == 0
    scores = Run("outputs/quick").results["dev"]
    assert scores["best"] > scores["before"] + 5

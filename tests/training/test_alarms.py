"""The collapse alarm: real small trainings that go wrong, one that does not, and rows at its limits."""

import logging
import math
import re
from types import SimpleNamespace

import pytest
import torch

from whitenedcse.app import cli
from whitenedcse.training.monitor import UNIFORMITY, Monitor, Row, alarms

GUESS = math.log(64)


@pytest.mark.slow
def test_a_quick_start_is_alarmed_at_where_its_rate_collapses_the_space(tmp_path, monkeypatch, capsys):
    """A real one, smaller, with its own rate and with 25 times that; a resumption is below."""
    monkeypatch.chdir(tmp_path)
    words = "encoder.layers=1 encoder.width=64 encoder.heads=2 head.dense=true monitor.every=8 tasks=none"
    words += " trainer.max_steps=26 trainer.log_every_n_steps=4 trainer.accelerator=cpu"
    for lr, said in ((4e-3, 0), (0.1, 1)):
        assert cli.main(["train", *words.split(), f"optim.lr={lr}", f"run=r{lr}"]) == 0
        lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
        assert len(lines) == said
        assert all(
            re.match("warning: step 16: dev/spearman fell .* and dev/effective_rank", x) for x in lines
        )


HEALTHY = [  # dev/spearman and dev/effective_rank of the quick start with its own settings, seed 42
    (23.108, 49.471), (37.845, 32.395), (41.514, 34.525), (48.067, 34.348), (48.759, 35.283),
    (50.074, 35.266), (50.828, 35.574), (50.849, 35.599),
]  # fmt: skip


def heard(evaluations, losses, name="train/loss", warned=()):
    """The kinds of which a monitor warns after evaluations of 64 sentences, and those that it keeps."""
    said, trainer = [], SimpleNamespace(callback_metrics={})
    kind = lambda text: "memorising" if "vanished" in text else "collapse"  # noqa: E731
    held = SimpleNamespace(rows=[], warned=[*warned], guess=GUESS, say=lambda text: said.append(kind(text)))
    for step, (dev, rank) in enumerate(evaluations):
        held.rows.append(Row(step, {"dev/spearman": dev, "dev/effective_rank": rank}))
        trainer.callback_metrics = {"train/loss": torch.tensor(9.0), name: torch.tensor(losses[step - 1])}
        Monitor.warn(held, trainer)
    return said, held.warned


def test_a_warning_is_in_the_log_of_the_run_too(monkeypatch, capsys):
    logged, handler = [], logging.Handler(logging.WARNING)
    handler.emit = logged.append
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])  # as train.log
    dying = [(60.0, 40.0), (20.0, 3.0), (10.0, 2.0), (5.0, 1.5)]
    assert len(said_of(dying)) == len(logged) == 1
    assert logged[0].getMessage().startswith("step 2: dev/spearman fell from 60")
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # as in Python: logging would print it again
    assert len(said_of(dying)) == len(logged) == 1
    assert capsys.readouterr() == ("", "")


def said_of(evaluations, loss=1.0, **more):
    return heard(evaluations, [loss] * len(evaluations), **more)[0]


def test_a_healthy_run_hears_nothing_even_where_its_loss_vanishes():
    waves = [(dev - 4.9 * (i % 3 > 0), rank) for i, (dev, rank) in enumerate(HEALTHY)]
    for loss in (0.3, 0.0, 1e-9):
        assert said_of(HEALTHY, loss) == said_of(waves, loss) == []


def test_memorising_is_a_vanished_loss_beside_a_fall_of_two_evaluations():
    for devs, loss, words in (
        ([50, 44.9, 44.9], 0.0099 * GUESS, ["memorising"]),
        ([50, 44.9, 44.9], 0.0101 * GUESS, []),  # there is still something to learn
        ([50, 44.9, 45.1], 0.0, []),  # 4.9 points are no fall
        ([50, 45.1, 44.9], 0.0, []),  # one evaluation is none
        ([20, 50, 44.9, 44.9, 10], 0.0, ["memorising"]),  # since the best, and once
        ([50, 44.9], 0.0, []),
        ([50, None, None], 0.0, ["memorising"]),  # undefined is as low as it gets
        ([None, None, None], 0.0, []),
    ):
        for name in ("train/loss", "train/contrastive"):
            assert said_of([(dev, 30.0) for dev in devs], loss, name=name) == words, (devs, loss)


def test_a_collapse_is_half_of_the_axes_lost_beside_a_fall_of_two_evaluations():
    for evaluations, words in (
        ([(20, 30), (19, 14.9), (19, 14.9)], ["collapse"]),  # never as good as before training
        ([(20, 30), (21, 14.9), (19, 14.9)], []),
        ([(20, 30), (19, 15.1), (19, 14.9)], []),
        ([(20, 30), (19, 14.9), (19, 15.1)], []),
        ([(20, 30), (40, 14.9), (36, 14.9), (36, 14.9)], []),  # it learned, and holds it
        ([(20, 30), (40, 30), (34, 14.9), (34, 14.9)], ["collapse"]),
        ([(20, 30), (19, 14.9)], []),
        ([(20, 30), (None, 0.0), (None, 0.0)], ["collapse"]),  # all sentences are one vector
    ):
        assert said_of(evaluations) == words, evaluations


def test_vectors_that_near_a_single_one_are_warned_of_though_they_are_ranked_well():
    """The score may rise (60.0), and without dev pairs there is none."""
    for near, warned in (
        ([-0.2, -0.0019, -0.0019], True),
        ([-0.2, -0.0021, -0.0019], False),  # one evaluation is none
        ([-0.2, -0.0019, -0.0021], False),
        ([-0.2, -1.3e-5, -2.1e-6], True),
        ([-0.2, -1.5, -2.1], False),
        ([-1e-3, -1e-3, -1e-3], False),  # near from the start
        ([0.0, 0.0, 0.0], False),
        ([None, None, None], False),
        ([-0.2, -1e-6], False),
    ):
        values = [{"dev/effective_rank": 9.0, UNIFORMITY: u} for u in near]
        for dev in (60.0, None):
            rows = [Row(i, v | ({"dev/spearman": dev + i} if dev else {})) for i, v in enumerate(values)]
            assert [kind for kind, _ in alarms(rows, 1.0, GUESS)] == ["shrinking"] * warned, near


def test_a_resumed_run_remembers_what_was_said():
    fallen = [(50, 30), (40, 30), (40, 30)]
    said, warned = heard(fallen, [0.0, 0.0, 0.0])
    assert said == warned == ["memorising"]
    assert said_of([*fallen, (40, 30)], 0.0, warned=warned) == []
    assert said_of([*fallen, (40, 9), (40, 9)], 0.0, warned=warned) == ["collapse"]  # of another kind

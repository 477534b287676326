"""The collapse alarm: real small trainings that go wrong, one that does not, and rows at its limits."""

import logging
import math
from types import SimpleNamespace

import pytest
import torch
from encoders import whitening
from lightning import Callback, seed_everything

from whitenedcse.data.datamodule import SentenceData
from whitenedcse.evaluation.tasks import subsets
from whitenedcse.model.embedder import Embedder
from whitenedcse.model.head import Pooling, ProjectionHead
from whitenedcse.model.scratch import small_bert
from whitenedcse.training.loggers import Metrics, Record
from whitenedcse.training.loss import ContrastiveLoss
from whitenedcse.training.module import ContrastiveTraining, adamw
from whitenedcse.training.monitor import UNIFORMITY, Monitor, Row, alarms
from whitenedcse.training.trainer import Trainer

STEPS, EVERY = 26, 8
GUESS = math.log(64)
SOUND = {"lr": 4e-3, "temperature": 0.15, "passes": 3, "white": True}  # of the quick start
COLLAPSE = SOUND | {"lr": 0.1}


class Saved(Callback):
    """Writes a checkpoint before the step after the third evaluation."""

    def __init__(self, path):
        self.path = path

    def on_train_batch_start(self, trainer, *_):
        if trainer.global_step == 3 * EVERY:
            trainer.save_checkpoint(self.path)


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """Trains a smaller quick start; gives the warnings and the evaluations."""
    monkeypatch.setenv("WHITENEDCSE_CACHE", str(tmp_path))

    def life(checkpoint=None, *, lr, temperature, passes, white):
        seed_everything(42, verbose=False)
        size = {"vocabulary": 4000, "layers": 1, "width": 64, "heads": 2}
        encoder = small_bert(corpus="quickstart", columns=[], batches="auto", **size)
        head = ProjectionHead(
            width=64, whitening=whitening() if white else None, dense=white, position="before"
        )
        embedder = Embedder(
            encoder=encoder, pooling=Pooling(kind="mean", layers=[-1]), head=head, embedding="encoder"
        )
        loss = {"weights": [1.0], "denominator": "view", "hard_negative_log_weight": 0.0}
        module = ContrastiveTraining(
            embedder=embedder,
            loss=ContrastiveLoss(form="l1", temperature=temperature, **loss),
            optimizer=lambda parameters, total_steps: adamw(
                parameters, total_steps=total_steps, lr=lr, weight_decay=0.0, warmup_steps=0
            ),
            **{"views": 3, "mlm": None, "seed": 42, "gather": True, "chunk": None},
        )
        sizes = {"sample": STEPS * 64, "max_length": 32, "batch_size": 64, "batch_tokens": None}
        sizes["repetition"] = 0.0
        data = SentenceData(corpus="quickstart", columns=[], passes=passes, seed=42, **sizes)
        data.tokenizer = encoder.tokenizer
        said = []
        monitor = Monitor(
            dev=subsets("quickstart/dev"), every=EVERY, patience=None,
            directory=tmp_path / "best", say=lambda text: said.append(text),
        )  # fmt: skip
        Trainer(
            chunk=None, devices=1, accelerator="cpu", max_epochs=1, gradient_clip_val=1.0,
            log_every_n_steps=4,
            callbacks=[Saved(tmp_path / "saved"), Record(), monitor],
            logger=Metrics(tmp_path / "metrics.csv", checkpoint), enable_progress_bar=False,
        ).fit(module, data, ckpt_path=checkpoint, weights_only=True)  # fmt: skip
        return [text for text in said if text.startswith("warning")], monitor.rows

    return life


@pytest.mark.slow
def test_a_sound_quick_start_is_not_alarmed_at(trained):
    said, rows = trained(**SOUND)
    assert [row.step for row in rows] == [0, 8, 16, 24, 26]
    assert said == []


@pytest.mark.slow
def test_a_rate_that_collapses_the_space_is_said_once_and_not_again_after_a_resumption(trained, tmp_path):
    said, rows = trained(**COLLAPSE)
    start, second = rows[0].values, rows[2].values
    (line,) = said
    fell = f"fell from {start['dev/spearman']:.1f} (step 0) to {second['dev/spearman']:.1f}"
    rank = f"from {start['dev/effective_rank']:.1f} (step 0) to {second['dev/effective_rank']:.1f}"
    assert line.startswith(f"warning: step 16: dev/spearman {fell} and dev/effective_rank {rank}: ")
    assert "Try a lower optim.lr" in line
    (saved,) = (tmp_path / "saved").glob("step-*.ckpt")
    again, rows = trained(checkpoint=saved, **COLLAPSE)
    assert [row.step for row in rows] == [0, 8, 16, 24, 26]
    assert again == []


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


@pytest.mark.parametrize("loss", [0.3, 0.0, 1e-9])
def test_a_healthy_run_hears_nothing_even_where_its_loss_vanishes(loss):
    assert said_of(HEALTHY, loss) == []
    waves = [(dev - 4.9 * (i % 3 > 0), rank) for i, (dev, rank) in enumerate(HEALTHY)]
    assert said_of(waves, loss) == []


@pytest.mark.parametrize(
    ("devs", "loss", "words"),
    [
        ([50, 44.9, 44.9], 0.0099 * GUESS, ["memorising"]),
        ([50, 44.9, 44.9], 0.0101 * GUESS, []),  # there is still something to learn
        ([50, 44.9, 45.1], 0.0, []),  # 4.9 points are no fall
        ([50, 45.1, 44.9], 0.0, []),  # one evaluation is none
        ([20, 50, 44.9, 44.9, 10], 0.0, ["memorising"]),  # since the best, and once
        ([50, 44.9], 0.0, []),
        ([50, None, None], 0.0, ["memorising"]),  # undefined is as low as it gets
        ([None, None, None], 0.0, []),
    ],
)
def test_memorising_is_a_vanished_loss_beside_a_fall_of_two_evaluations(devs, loss, words):
    assert said_of([(dev, 30.0) for dev in devs], loss) == words
    assert said_of([(dev, 30.0) for dev in devs], loss, name="train/contrastive") == words


@pytest.mark.parametrize(
    ("evaluations", "words"),
    [
        ([(20, 30), (19, 14.9), (19, 14.9)], ["collapse"]),  # never as good as before training
        ([(20, 30), (21, 14.9), (19, 14.9)], []),
        ([(20, 30), (19, 15.1), (19, 14.9)], []),
        ([(20, 30), (19, 14.9), (19, 15.1)], []),
        ([(20, 30), (40, 14.9), (36, 14.9), (36, 14.9)], []),  # it learned, and holds it
        ([(20, 30), (40, 30), (34, 14.9), (34, 14.9)], ["collapse"]),
        ([(20, 30), (19, 14.9)], []),
        ([(20, 30), (None, 0.0), (None, 0.0)], ["collapse"]),  # all sentences are one vector
    ],
)
def test_a_collapse_is_half_of_the_axes_lost_beside_a_fall_of_two_evaluations(evaluations, words):
    assert said_of(evaluations) == words


@pytest.mark.parametrize(
    ("near", "warned"),
    [
        ([-0.2, -0.0019, -0.0019], True),
        ([-0.2, -0.0021, -0.0019], False),  # one evaluation is none
        ([-0.2, -0.0019, -0.0021], False),
        ([-0.2, -1.3e-5, -2.1e-6], True),
        ([-0.2, -1.5, -2.1], False),
        ([-1e-3, -1e-3, -1e-3], False),  # near from the start
        ([0.0, 0.0, 0.0], False),
        ([None, None, None], False),
        ([-0.2, -1e-6], False),
    ],
)
@pytest.mark.parametrize("dev", [60.0, None])  # it may rise; without dev pairs there is none
def test_vectors_that_near_a_single_one_are_warned_of_though_they_are_ranked_well(dev, near, warned):
    values = [{"dev/effective_rank": 9.0, UNIFORMITY: u} for u in near]
    rows = [Row(i, v | ({"dev/spearman": dev + i} if dev else {})) for i, v in enumerate(values)]
    said = list(alarms(rows, 1.0, GUESS))
    assert [kind for kind, _ in said] == ["shrinking"] * warned
    assert all("all vectors near one. Try a lower optim.lr; a loss without" in text for _, text in said)


def test_a_resumed_run_remembers_what_was_said():
    fallen = [(50, 30), (40, 30), (40, 30)]
    said, warned = heard(fallen, [0.0, 0.0, 0.0])
    assert said == warned == ["memorising"]
    assert said_of([*fallen, (40, 30)], 0.0, warned=warned) == []
    assert said_of([*fallen, (40, 9), (40, 9)], 0.0, warned=warned) == ["collapse"]  # of another kind

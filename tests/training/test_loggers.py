"""metrics.csv has each step once, with the rate that the step took."""

import copy
import csv
import os
import time
from types import SimpleNamespace

import pytest
import torch
from encoders import SENTENCES, whitening
from lightning.pytorch.callbacks import LambdaCallback
from test_training import EightSentences, module_of, monitor_of
from torch.utils.data import DataLoader

from whitenedcse.data.datamodule import Batch
from whitenedcse.data.tokens import token_ids
from whitenedcse.evaluation.geometry import diversity
from whitenedcse.model.head import ProjectionHead
from whitenedcse.ragged import concatenate, ragged
from whitenedcse.training import loggers
from whitenedcse.training.loggers import Bar, Metrics, PlainProgress, Record, tensorboard_logger
from whitenedcse.training.module import reseed
from whitenedcse.training.trainer import Trainer


def test_files_of_tensorboard_lie_in_the_run_directory(tmp_path):
    board = tensorboard_logger(run=tmp_path)
    board.log_metrics({"dev/spearman": 50.0}, step=1)
    board.finalize("success")
    assert list((tmp_path / "tensorboard").glob("events.out.tfevents.*"))


LIFE = [
    (0, {"dev": 1.0}),
    (1, {"loss": 3.0}),
    (2, {"loss": 2.0}),
    (2, {'a,"b"': 0.1 + 0.2}),
    (3, {"loss": 1.0}),
]


def logged(path, checkpoint, lines):
    """What a life of a run that resumes from a checkpoint of this step leaves."""
    record = Metrics(path, checkpoint)
    for step, values in lines:
        record.log_metrics(values, step=step)
    return path.read_text()


def after(step):
    """The name of a checkpoint."""
    return SimpleNamespace(name=f"step-{step:08}-0123456789abcdef.ckpt")


def test_a_new_name_makes_a_new_column_and_a_run_without_a_checkpoint_begins_anew(tmp_path):
    for _ in range(2):
        text = logged(tmp_path / "m.csv", None, LIFE)
        lines = ['step,dev,loss,"a,""b"""', "0,1.0,,", "1,,3.0,", "2,,2.0,", f"2,,,{0.1 + 0.2}", "3,,1.0,"]
        assert text.splitlines() == lines


@pytest.mark.parametrize("kept", [0, 1, 2, 3])
@pytest.mark.parametrize("cut", [0, 1, 7])  # characters of the last line that never came
def test_a_resumed_run_writes_no_line_twice_and_leaves_none_out(tmp_path, kept, cut):
    whole = logged(tmp_path / "whole.csv", None, LIFE)
    text = logged(tmp_path / "m.csv", None, LIFE)
    (tmp_path / "m.csv").write_text(text[: len(text) - cut] if kept < 3 else text + "14,5.00"[:cut])
    rest = [line for line in LIFE if line[0] > kept]
    assert logged(tmp_path / "m.csv", after(kept), rest) == whole
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.csv", "whole.csv"]


@pytest.mark.parametrize("cut", [0, 1, 9, 20])  # characters at the end that never came
def test_a_run_that_ends_again_has_the_line_of_its_tests_once(tmp_path, cut):
    end = [*LIFE, (3, {"test/avg": 7.5, "test/mine": 8.25})]
    whole = logged(tmp_path / "m.csv", None, end)
    (tmp_path / "m.csv").write_text(whole[: len(whole) - cut])
    assert logged(tmp_path / "m.csv", after(3), LIFE[-1:] * (cut == 20) + end[-1:]) == whole


def test_the_loss_is_logged_once_a_due_step_with_the_rate_that_step_took(tmp_path, monkeypatch):
    """Two batches a step, every second step: the rate is read before the schedule moves on."""
    record, metrics = Record(), Metrics(tmp_path / "m.csv", None)
    monkeypatch.setattr(time, "perf_counter", lambda: 15.0 * trainer.global_step)
    monkeypatch.setattr(os, "getloadavg", lambda: (0.5, 9.0, 9.0))
    group, batch, monitor = {"lr": 0.0}, Batch(None, None, 30), SimpleNamespace(evaluating=0.0)
    parts = {"optimizers": [SimpleNamespace(param_groups=[group])], "loggers": [metrics]}
    parts["callbacks"] = [SimpleNamespace(), monitor]
    parts |= {"log_every_n_steps": 2, "global_step": 0, "world_size": 2}
    trainer = SimpleNamespace(**parts, callback_metrics={"dev/x": torch.tensor(9.0)})
    record.every = trainer.log_every_n_steps
    for index in range(8):
        group["lr"] = float(trainer.global_step)
        trainer.callback_metrics["train/loss"] = torch.tensor(float(index))
        record.on_train_batch_start(trainer, None, batch, index)
        trainer.global_step += index % 2
        monitor.evaluating = 5.0 * trainer.global_step
        group["lr"] = 99.0
        record.on_train_batch_end(trainer, None, None, batch, index)
    assert (
        tmp_path / "m.csv"
    ).read_text() == (  # 4 batches of 30 on 2 ranks in 30 seconds, 10 of them of evaluation
        "step,train/loss,train/lr,train/sentences_per_second,train/load\n"
        "2,3.0,1.0,12.0,0.5\n4,7.0,3.0,12.0,0.5\n"
    )


def run(module, tmp_path, *callbacks, batches=None, **settings):
    """Twelve batches, with a line every second step."""
    data = EightSentences(module.embedder.encoder.tokenizer, 12)
    if batches:
        data.train_dataloader = lambda: DataLoader(batches, batch_size=None, collate_fn=lambda batch: batch)
    quiet = {"enable_progress_bar": False, "log_every_n_steps": 2, "max_epochs": 1, "accelerator": "cpu"}
    quiet |= {"callbacks": list(callbacks), "logger": Metrics(tmp_path / "m.csv", None)}
    Trainer(**quiet | settings).fit(module, data)
    return module


def column(tmp_path, name):
    """The values of a name."""
    with (tmp_path / "m.csv").open() as file:
        return [float(row[name]) for row in csv.DictReader(file) if row.get(name)]


@pytest.mark.parametrize(
    ("position", "passes", "negatives"), [("before", 3, False), ("after", 2, True), ("both", 1, True)]
)
def test_diversity_is_that_of_the_steps_positives(bert, tmp_path, position, passes, negatives):
    module = module_of(bert)
    module.embedder.head = ProjectionHead(16, whitening=whitening(), position=position)
    tokens = ragged(token_ids(SENTENCES, bert.tokenizer, 32))
    other = ragged(token_ids(SENTENCES[::-1], bert.tokenizer, 32))
    batch = Batch(concatenate([tokens] * passes), other if negatives else None, 8)

    twin = copy.deepcopy(module)  # the first step by hand
    x = twin.encoded(batch, (0, 0, 0, 0))
    turns = [view % passes for view in range(3)] + [passes] * negatives
    reseed(0, 0, 0)
    head = twin.embedder.head
    before = head.dense(x[turns]) if position == "after" else x[turns]
    after = (head.after if position == "after" else head.before)(before)

    run(module, tmp_path, Record(), batches=[batch], log_every_n_steps=1)
    (found,) = column(tmp_path, "train/diversity_before")
    assert found == pytest.approx(float(diversity(before[:3].detach())), rel=1e-5)
    assert (found == 0) == (passes == 1)
    assert column(tmp_path, "train/diversity_after") == pytest.approx(
        [float(diversity(after[:3].detach()))], rel=1e-5
    )


@pytest.mark.parametrize(("every", "steps"), [(5, [5, 10]), (13, [12]), (0, [12])])
@pytest.mark.filterwarnings("ignore:The number of training batches")
def test_a_run_of_fewer_steps_than_are_between_two_lines_logs_its_last(bert, tmp_path, every, steps):
    module = module_of(bert)
    module.embedder.head = ProjectionHead(16, whitening=None)
    run(module, tmp_path, Record(), log_every_n_steps=every)
    assert column(tmp_path, "step") == steps and len(column(tmp_path, "train/loss")) == len(steps)
    assert "diversity" not in (tmp_path / "m.csv").read_text()  # without whitening there is none


@pytest.mark.slow
def test_looking_changes_no_bit_and_leaves_nothing(bert, tmp_path, monkeypatch):
    """Not on the weights, and not on the next random number; in no checkpoint, and on no module."""
    calls, ends = [], []
    monkeypatch.setattr(loggers, "diversity", lambda x: calls.append(x.shape) or diversity(x))
    for callbacks in ([], [Record()]):
        module = module_of(copy.deepcopy(bert))
        folder = tmp_path / str(len(callbacks))
        folder.mkdir()
        module.embedder.embedding = "head"  # evaluation goes through the whitening too
        amid = lambda trainer, *_, folder=folder: trainer.save_checkpoint(folder / "c")  # noqa: E731
        run(module, folder, *callbacks, monitor_of(folder), LambdaCallback(on_train_epoch_end=amid))
        (saved,) = (folder / "c").glob("step-*.ckpt")
        state = torch.load(saved, weights_only=True)
        ends.append((module.state_dict(), torch.get_rng_state(), state.keys(), state["callbacks"].keys()))
        assert not any(part._forward_hooks for part in module.modules())
    (record,) = callbacks
    (one, rng, *names), (other, other_rng, *other_names) = ends
    assert all(torch.equal(one[name], other[name]) for name in one | other)
    assert torch.equal(rng, other_rng)
    assert names == other_names
    assert calls == [(3, 8, 16)] * 12  # two sides of six lines: in no other step, and in no evaluation
    assert all(value.untyped_storage().nbytes() <= 8 for value in record.diversity.values())


def test_the_bar_ends_where_max_steps_ends_the_run():
    bar = Bar()
    for steps, epoch, each, total in ((-1, 1, 1, 300), (10, 0, 1, 10), (10, 0, 4, 40), (350, 1, 1, 50)):
        facts = {"num_training_batches": 300, "max_steps": steps, "current_epoch": epoch}
        bar._trainer = SimpleNamespace(accumulate_grad_batches=each, **facts)
        assert bar.total_train_batches == total


def test_a_line_of_progress_comes_once_a_step_with_the_speed_of_the_steps_since_the_start(monkeypatch):
    said, clock = [], [0.0]
    monkeypatch.setattr("whitenedcse.training.loggers.loss", lambda trainer: 1.0)
    monkeypatch.setattr(loggers.time, "monotonic", lambda: clock[0])
    trainer = SimpleNamespace(global_step=0, estimated_stepping_batches=3, should_stop=False)
    bar = PlainProgress(say=said.append)
    bar.on_train_start(trainer, None)
    clock[0] = 1.0
    for step in (0, 0, 1, 1, 1, 2, 2, 3):  # three batches and more to an optimiser step
        trainer.global_step = step
        bar.on_train_batch_end(trainer, None)
    assert [line.split()[1] for line in said] == ["1/3", "2/3", "3/3"]
    said.clear()
    clock[0], trainer.global_step, trainer.estimated_stepping_batches = 7.0, 1000, 101_000  # it resumes
    bar.on_train_start(trainer, None)
    trainer.global_step, clock[0] = 5 * 5050, 7 + (5 * 5050 - 1000) * 2.0  # a line at each 5,050th step
    bar.on_train_batch_end(trainer, None)
    assert said == ["step 25250/101000  loss 1.000  0.50 steps/s  left 42:05:00"]  # 75,750 steps of 2 s
    trainer.global_step, trainer.should_stop = 6 * 5050, True  # monitor.patience has ended it
    bar.on_train_batch_end(trainer, None)
    assert said[1].endswith("left 00:00")

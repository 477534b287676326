"""metrics.csv has each step once, with the rate that the step took."""

from types import SimpleNamespace

import pytest
import torch

from whitenedcse.training import progress
from whitenedcse.training.loggers import Metrics, Record, tensorboard_logger


def test_files_lie_in_the_run_directory(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    record, board = Metrics(run / "metrics.csv", None), tensorboard_logger(run=run)
    for logger in (record, board):
        logger.log_metrics({"dev/spearman": 50.0}, step=1)
        logger.finalize("success")
    assert list((run / "tensorboard").glob("events.out.tfevents.*"))
    assert (run / "metrics.csv").read_text().split() == ["step,dev/spearman", "1,50.0"]


LIFE = [(0, {"dev": 1.0}), (1, {"loss": 3.0}), (2, {"loss": 2.0}), (2, {"dev": 4.0}), (3, {"loss": 1.0})]


def logged(path, checkpoint, lines):
    """What a life of a run that goes on from a checkpoint of this step leaves."""
    record = Metrics(path, checkpoint)
    for step, values in lines:
        record.log_metrics(values, step=step)
    return path.read_text()


def after(step):
    """The name of a checkpoint."""
    return SimpleNamespace(name=f"step-{step:08}-0123456789abcdef.ckpt")


def test_a_new_name_makes_a_new_column(tmp_path):
    text = logged(tmp_path / "m.csv", None, LIFE)
    assert text == "step,dev,loss\n0,1.0,\n1,,3.0\n2,,2.0\n2,4.0,\n3,,1.0\n"


@pytest.mark.parametrize("kept", [0, 1, 2, 3])
@pytest.mark.parametrize("cut", [0, 1, 7])  # characters of the last line that never came
def test_a_run_that_goes_on_writes_no_line_twice_and_leaves_none_out(tmp_path, kept, cut):
    whole = logged(tmp_path / "whole.csv", None, LIFE)
    text = logged(tmp_path / "m.csv", None, LIFE)
    (tmp_path / "m.csv").write_text(text[: len(text) - cut] if kept < 3 else text + "14,5.00"[:cut])
    rest = [line for line in LIFE if line[0] > kept]
    assert logged(tmp_path / "m.csv", after(kept), rest) == whole
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.csv", "whole.csv"]


def test_a_run_without_a_checkpoint_begins_its_metrics_anew(tmp_path):
    whole = logged(tmp_path / "m.csv", None, LIFE)
    assert logged(tmp_path / "m.csv", None, LIFE) == whole


def test_a_name_with_a_comma_and_a_long_number_come_back(tmp_path):
    values = {'a,"b"': 0.1 + 0.2, "c": 1e-300}
    logged(tmp_path / "m.csv", None, [(5, values)])
    (line,) = Metrics(tmp_path / "m.csv", after(5)).lines()
    assert {name: float(line[name]) for name in values} == values


def test_the_loss_is_logged_once_a_due_step_with_the_rate_that_step_took(tmp_path):
    """Two batches a step, every second step: the rate is read before the schedule moves on."""
    record, metrics = Record(), Metrics(tmp_path / "m.csv", None)
    group = {"lr": 0.0}
    trainer = SimpleNamespace(
        optimizers=[SimpleNamespace(param_groups=[group])],
        loggers=[metrics],
        log_every_n_steps=2,
        global_step=0,
        callback_metrics={"dev/x": torch.tensor(9.0)},
    )
    for batch in range(8):
        group["lr"] = float(trainer.global_step)
        trainer.callback_metrics["train/loss"] = torch.tensor(float(batch))
        record.on_train_batch_start(trainer, None, None, batch)
        trainer.global_step += batch % 2
        group["lr"] = 99.0
        record.on_train_batch_end(trainer, None, None, None, batch)
    assert (tmp_path / "m.csv").read_text() == "step,train/loss,train/lr\n2,3.0,1.0\n4,7.0,3.0\n"


def test_a_bar_reads_the_loss_once_a_second(monkeypatch):
    class Loss:
        reads = 0

        def __float__(self):
            Loss.reads += 1
            return 0.5

    clock, trainer = [100.0], SimpleNamespace(callback_metrics={"train/loss": Loss()}, loggers=[])
    trainer.progress_bar_metrics = {}
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    bar = progress.Bar()
    for later in (0.0, 0.3, 0.6, 1.5):
        clock[0] = 100.0 + later
        assert bar.get_metrics(trainer, None)["loss"] == 0.5
    assert Loss.reads == 2

"""A run stops when it is asked to, whatever else is amiss, and ranks that differ do not begin."""

import io
import signal
import threading
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.demos.boring_classes import BoringModel
from rich.console import Console

from whitenedcse import console
from whitenedcse.training import checkpoints
from whitenedcse.training.checkpoints import Safekeeping
from whitenedcse.training.trainer import Trainer


@pytest.fixture
def keep(tmp_path):
    said = []
    folder, monitor = tmp_path / "run" / "checkpoints", SimpleNamespace(every=5)
    made = Safekeeping(folder, 10.0, monitor, "seed: 1\nviews: 3", said.append)
    made.said = said
    return made


@pytest.mark.parametrize("number", checkpoints.ASKING, ids=lambda number: number.name)
def test_it_ends_with_128_and_the_signal_even_where_nothing_requeues(keep, monkeypatch, tmp_path, number):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("PATH", str(tmp_path))  # no scontrol
    with pytest.raises(SystemExit) as exit:
        keep.stop(SimpleNamespace(is_global_zero=True), number)
    assert exit.value.code == 128 + number
    assert "run stopped after step 0; the same command resumes it" in keep.said[0]


def test_ranks_with_other_settings_are_refused(keep, monkeypatch):
    for other, words in (
        ("seed: 2\nviews: 3", r"ranks differ in \['seed: 1', 'seed: 2'\]; every rank needs"),
        ("seed: 1\nviews: 3\nmore: 4", r"\['more: 4'\]"),
        ("seed: 1", r"\['views: 3'\]"),
    ):
        monkeypatch.setattr(checkpoints, "everyones", lambda value, other=other: [value, other])
        with pytest.raises(ValueError, match=words):
            keep.setup(None, None, "fit")
    monkeypatch.setattr(checkpoints, "everyones", lambda value: [value, value])
    keep.setup(None, None, "fit")


def test_writing_takes_at_most_a_fiftieth_of_the_time(keep):
    slow = SimpleNamespace(loggers=[], global_step=7, save_checkpoint=lambda folder: time.sleep(0.3))
    slow.lightning_module = torch.nn.Linear(1, 1)
    keep.save(slow)
    assert keep.saved == 7 and 15 <= keep.pause < 30
    slow.global_step, slow.save_checkpoint = 8, lambda folder: None
    keep.save(slow)
    assert keep.pause == keep.seconds == 10


def test_weights_that_are_no_numbers_are_not_kept(keep):
    broken = torch.nn.Linear(1, 1)
    torch.nn.init.constant_(broken.weight, float("nan"))
    with pytest.raises(
        ValueError, match="a weight is not finite after step 7; there is no checkpoint before"
    ):
        keep.save(SimpleNamespace(global_step=7, lightning_module=broken))


@pytest.mark.parametrize("asked", [0, signal.SIGINT])
def test_after_the_last_step_signals_end_the_process_as_before(keep, asked):
    """Also one that arrived during that step: no evaluation follows it. None of Lightning's stay."""

    class Steps(BoringModel):
        def on_train_batch_start(self, batch, index):
            handled.append([signal.getsignal(number) for number in checkpoints.ASKING])

        def on_train_end(self):
            keep.asked = asked

    before, handled = [signal.getsignal(number) for number in checkpoints.ASKING], []
    keep.say, keep.monitor = (lambda text: None), SimpleNamespace(every=100)
    callbacks = [keep, LambdaCallback(on_train_end=keep.finish)]
    made = Trainer(max_steps=2, callbacks=callbacks, logger=False, accelerator="cpu")
    with pytest.raises(SystemExit, match=str(128 + asked)) if asked else nullcontext():
        made.fit(Steps())
    assert handled == [[keep.hear] * 3] * 2 and keep.saved == 2
    assert [signal.getsignal(number) for number in checkpoints.ASKING] == before


@pytest.mark.parametrize("number", checkpoints.ASKING, ids=lambda number: number.name)
def test_a_signal_while_the_last_checkpoint_is_written_leaves_it_whole(keep, monkeypatch, number):
    """By then Lightning would have given the signals back, and the process would end without one."""
    write = checkpoints.Checkpoints.save_checkpoint

    def asked_to_stop(self, *content, **options):
        signal.raise_signal(number)
        write(self, *content, **options)

    monkeypatch.setattr(checkpoints.Checkpoints, "save_checkpoint", asked_to_stop)
    keep.say, keep.monitor = (said := []).append, SimpleNamespace(every=100)
    callbacks = [keep, LambdaCallback(on_train_end=keep.finish)]
    made = Trainer(max_steps=2, callbacks=callbacks, logger=False, accelerator="cpu")
    with pytest.raises(SystemExit, match=str(128 + number)):
        made.fit(BoringModel())
    assert [checkpoints.step_of(path) for path in checkpoints.written(keep.directory)] == [2]
    assert any(text.endswith("run stopped after step 2; the same command resumes it") for text in said)


def test_a_line_that_a_signal_interrupts_is_not_repeated(keep, monkeypatch):
    class Interrupted(io.StringIO):
        def flush(self):
            if keep.asked == 0:
                keep.hear(signal.SIGTERM, None)

    terminal = Console(file=Interrupted(), width=200)
    monkeypatch.setattr(console, "console", lambda: terminal)
    keep.say = console.say
    before = threading.active_count()
    keep.say("step 7/12")
    while threading.active_count() > before:
        time.sleep(0.01)
    said = terminal.file.getvalue().splitlines()
    assert said == ["step 7/12", "stopping after this step, once its checkpoint is written"]


def test_a_run_that_fails_gives_the_signals_back(tmp_path):
    before = [signal.getsignal(number) for number in checkpoints.ASKING]
    keep = Safekeeping(tmp_path, 10, None, "", print)
    module = SimpleNamespace(device=torch.device("cpu"))
    keep.setup(None, module, "fit")
    keep.on_train_start(SimpleNamespace(world_size=1), module)
    assert all(signal.getsignal(number) == keep.hear for number in checkpoints.ASKING)
    keep.on_exception(None, module, ValueError())
    assert [signal.getsignal(number) for number in checkpoints.ASKING] == before


def test_a_rank_that_was_asked_to_end_says_nothing_of_its_failed_collective(keep):
    alone, together = SimpleNamespace(world_size=1), SimpleNamespace(world_size=2)
    keep.on_exception(together, None, RuntimeError("Connection closed by peer"))  # it may be the cause
    keep.asked = signal.SIGTERM
    keep.on_exception(alone, None, RuntimeError("a bug"))
    keep.on_exception(together, None, TypeError("a bug"))
    with pytest.raises(SystemExit, match="143"):
        keep.on_exception(together, None, RuntimeError("Connection closed by peer"))


def test_ranks_on_gpus_ask_each_other_for_signals_every_tenth_step(tmp_path, monkeypatch):
    """Asking is a barrier of their hosts, and a device that has nothing queued waits for it."""
    asked = []

    def told(*_):
        asked.append(trainer.global_step)
        return [[0, 0]] * 2

    monkeypatch.setattr("whitenedcse.training.checkpoints.agreed", told)
    every = [*range(25)]
    for device, world, steps in (("cuda", 2, [0, 10, 20]), ("cpu", 2, every), ("cuda", 1, every)):
        keep, there = Safekeeping(tmp_path, 10, None, "", print), SimpleNamespace(device=torch.device(device))
        monkeypatch.setattr(torch.Tensor, "to", lambda x, *_: x)  # to the GPU
        trainer = SimpleNamespace(world_size=world, accumulate_grad_batches=1, global_step=0)
        keep.setup(None, there, "fit")
        keep.on_train_start(trainer, there)
        for step in range(25):
            trainer.global_step = step
            keep.on_train_batch_start(trainer, there, None, step)
        keep.on_exception(None, there, ValueError())
        assert asked == steps
        asked.clear()

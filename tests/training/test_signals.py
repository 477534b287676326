"""Signals are heard while a run trains, and given back when it fails."""

import signal
from types import SimpleNamespace

import torch

from whitenedcse.training import trainer as module
from whitenedcse.training.trainer import ASKING, Safekeeping


def test_a_run_that_fails_gives_the_signals_back(tmp_path):
    before = [signal.getsignal(number) for number in ASKING]
    keep = Safekeeping(tmp_path, 10, None, "", print)
    module = SimpleNamespace(device=torch.device("cpu"))
    keep.setup(None, module, "fit")
    keep.on_train_start(SimpleNamespace(world_size=1), module)
    assert all(signal.getsignal(number) == keep.hear for number in ASKING)
    keep.on_exception(None, module, ValueError())
    assert [signal.getsignal(number) for number in ASKING] == before


def test_ranks_on_gpus_ask_each_other_for_signals_every_tenth_step(tmp_path, monkeypatch):
    """Asking is a barrier of their hosts, and a device that has nothing queued waits for it."""
    asked = []
    monkeypatch.setattr(module, "agreed", lambda *_: asked.append(trainer.global_step) or [[0, False]] * 2)
    for device, world, steps in (
        ("cuda", 2, [0, 10, 20]),
        ("cpu", 2, [*range(25)]),
        ("cuda", 1, [*range(25)]),
    ):
        keep, there = Safekeeping(tmp_path, 10, None, "", print), SimpleNamespace(device=torch.device(device))
        monkeypatch.setattr(torch, "full", lambda *_, **__: None)  # on the GPU
        trainer = SimpleNamespace(world_size=world, accumulate_grad_batches=1, global_step=0)
        keep.setup(None, there, "fit")
        keep.on_train_start(trainer, there)
        for step in range(25):
            trainer.global_step = step
            keep.on_train_batch_start(trainer, there, None, step)
        keep.on_exception(None, there, ValueError())
        assert asked == steps
        asked.clear()

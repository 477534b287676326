"""Signals are heard while a run trains, and given back when it fails."""

import signal
from types import SimpleNamespace

import torch

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

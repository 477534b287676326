"""A training step asks nothing of the device: whatever would make the host wait for it is counted."""

from types import SimpleNamespace

import lightning
import torch
from encoders import whitening
from lightning.pytorch.callbacks import LambdaCallback
from test_training import EightSentences
from torch.utils._python_dispatch import TorchDispatchMode

from whitenedcse.model import packed
from whitenedcse.model.embedder import Embedder
from whitenedcse.model.head import ProjectionHead
from whitenedcse.training.checkpoints import Safekeeping
from whitenedcse.training.loggers import PlainProgress, Record
from whitenedcse.training.module import ContrastiveTraining
from whitenedcse.training.trainer import Trainer

FIRST, LAST, STEPS = 1, 4, 120  # steps that are watched, and all of them


class Waits(TorchDispatchMode):
    """Operations whose result, or its size, the host reads."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name.removeprefix("aten::")
        read = name in ("_local_scalar_dense", "nonzero", "masked_select", "unique_consecutive", "_unique2")
        by_mask = name.startswith("index") and any(
            isinstance(index, torch.Tensor) and index.dtype == torch.bool
            for index in (args[1] if len(args) > 1 and isinstance(args[1], (list, tuple)) else ())
        )
        unsized = name == "repeat_interleave" and not (kwargs or {}).get("output_size")
        if read or by_mask or unsized:
            self.found.append(name)
        return function(*args, **(kwargs or {}))


def test_a_step_between_two_logged_ones_waits_for_nothing(bert, tmp_path, monkeypatch, gpu_layout):
    """With train.py's trainer and callbacks; the module's own part, of any head, is in test_devices.py."""
    monkeypatch.setattr(packed, "unpadded_attention", lambda q, k, v, **_: q + (k + v).mean(0))
    waits = Waits()

    def watch(trainer, module, batch, index):
        if index == FIRST:
            waits.__enter__()
        if index == LAST:
            waits.__exit__(None, None, None)

    head = ProjectionHead(bert.width, whitening=whitening(gradient="full"))
    module = ContrastiveTraining(embedder=Embedder(encoder=bert, head=head), views=3)
    keep = Safekeeping(tmp_path, 1000, SimpleNamespace(every=100), "", lambda text: None)
    settings = {"max_epochs": 1, "logger": False, "gradient_clip_val": 1.0, "log_every_n_steps": 100}
    callbacks = [LambdaCallback(on_train_batch_start=watch), keep, Record(), PlainProgress(say=str)]
    trainer = Trainer(accelerator="cpu", callbacks=callbacks, **settings)
    trainer.fit(module, EightSentences(bert.tokenizer, STEPS))
    assert waits.found == []


def test_ranks_do_not_ask_their_devices_for_signals():
    quiet = {"logger": False, "enable_progress_bar": False, "accelerator": "cpu", "devices": 1}
    for kind, asks in ((Trainer, False), (lightning.Trainer, True)):  # else the line in Trainer can go
        with Waits() as waits:
            kind(**quiet).fit_loop.epoch_loop._broadcast_sigterm_tensor()
        assert bool(waits.found) == asks


def test_ranks_compare_the_sizes_of_their_batches_once_an_epoch(bert, monkeypatch):
    asked = []
    monkeypatch.setattr("whitenedcse.training.module.equal_sizes", asked.append)
    module = ContrastiveTraining(embedder=Embedder(encoder=bert), views=3)
    module.log = lambda *_, **__: None
    (batch,) = EightSentences(bert.tokenizer, 1).train_dataloader()
    for step in range(3):
        module.training_step(batch, step)
    assert asked == [batch.n]

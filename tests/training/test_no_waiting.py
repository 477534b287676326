"""A training step asks nothing of the device: whatever would make the host wait for it is counted."""

from types import SimpleNamespace

import lightning
import torch
from encoders import whitening
from lightning import Callback, seed_everything
from test_training import EightSentences
from torch.utils._python_dispatch import TorchDispatchMode

from whitenedcse.model import packed
from whitenedcse.model.attention import bounds
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


class Watch(Callback):
    def __init__(self, waits):
        self.waits = waits

    def on_train_batch_start(self, trainer, module, batch, index):
        if index == FIRST:
            self.waits.__enter__()
        if index == LAST:
            self.waits.__exit__(None, None, None)


def watched(encoder, tmp_path, head):
    """What the host waited for in three steps of train.py's trainer and callbacks, no number being due."""
    seed_everything(0, verbose=False)
    head = ProjectionHead(encoder.width, whitening=head)
    module = ContrastiveTraining(embedder=Embedder(encoder=encoder, head=head), views=3)
    waits = Waits()
    keep = Safekeeping(tmp_path, 1000, SimpleNamespace(every=100), "", lambda text: None)
    settings = {"max_epochs": 1, "logger": False, "gradient_clip_val": 1.0, "log_every_n_steps": 100}
    callbacks = [Watch(waits), keep, Record(), PlainProgress(say=str)]
    trainer = Trainer(accelerator="cpu", callbacks=callbacks, **settings)
    trainer.fit(module, EightSentences(encoder.tokenizer, STEPS))
    return waits.found


def test_a_step_between_two_logged_ones_waits_for_nothing(bert, tmp_path, monkeypatch):
    """With the paper's head; of each pooling and head the module's own part is in test_devices.py."""
    laid_out = lambda b, *_: packed.Layout(b, None, None, len(b.ids), b.n, None, bounds(b), 0)  # noqa: E731
    monkeypatch.setattr(packed, "laid_out", laid_out)
    monkeypatch.setattr(packed, "unpadded_attention", lambda q, k, v, **_: q + (k + v).mean(0))  # of a GPU
    assert watched(bert, tmp_path, whitening(gradient="full")) == []


def test_ranks_do_not_ask_their_devices_for_signals():
    quiet = {"logger": False, "enable_progress_bar": False, "accelerator": "cpu", "devices": 1}
    waits = Waits()
    with waits:
        Trainer(**quiet).fit_loop.epoch_loop._broadcast_sigterm_tensor()
    assert waits.found == []
    with waits:
        lightning.Trainer(**quiet).fit_loop.epoch_loop._broadcast_sigterm_tensor()
    assert waits.found  # what it would do: once this fails, the line in Trainer can go


def test_ranks_compare_the_sizes_of_their_batches_once_an_epoch(bert, monkeypatch):
    asked = []
    monkeypatch.setattr("whitenedcse.training.module.equal_sizes", asked.append)
    module = ContrastiveTraining(embedder=Embedder(encoder=bert), views=3)
    module.log = lambda *_, **__: None
    (batch,) = EightSentences(bert.tokenizer, 1).train_dataloader()
    for step in range(3):
        module.training_step(batch, step)
    assert asked == [batch.n]

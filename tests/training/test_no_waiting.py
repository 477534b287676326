"""A training step asks nothing of the device: whatever would make the host wait for it is counted."""

from types import SimpleNamespace

import lightning
import pytest
import torch
from encoders import SENTENCES, whitening
from lightning import Callback, LightningDataModule, seed_everything
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from whitenedcse.data.datamodule import Batch
from whitenedcse.data.tokens import token_ids
from whitenedcse.model import packed
from whitenedcse.model.attention import bounds
from whitenedcse.model.embedder import Embedder
from whitenedcse.model.head import Pooling, ProjectionHead
from whitenedcse.ragged import concatenate, ragged
from whitenedcse.training.loggers import PlainProgress, Record
from whitenedcse.training.loss import ContrastiveLoss
from whitenedcse.training.module import ContrastiveTraining, adamw
from whitenedcse.training.trainer import Safekeeping, Trainer

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


class Sentences(LightningDataModule):
    def __init__(self, tokenizer):
        super().__init__()
        self.batch = Batch(
            concatenate([ragged(token_ids(SENTENCES, tokenizer, 32))] * 2), None, len(SENTENCES)
        )

    def train_dataloader(self):
        return DataLoader([self.batch] * STEPS, batch_size=None, collate_fn=lambda batch: batch)


def watched(encoder, tmp_path, kind, head, log_every=100):
    """What the host waited for in three steps of train.py's trainer and callbacks, no number being due."""
    seed_everything(0, verbose=False)
    module = ContrastiveTraining(
        embedder=Embedder(
            encoder=encoder,
            pooling=Pooling(kind=kind, layers=[-1]),
            head=ProjectionHead(width=encoder.width, whitening=head, dense=True, position="before"),
            embedding="encoder",
        ),
        loss=ContrastiveLoss(
            form="l1", temperature=0.05, weights=[1.0], denominator="view",
            hard_negative_log_weight=0.0,
        ),
        optimizer=lambda parameters, total_steps: adamw(
            parameters, total_steps=total_steps, lr=1e-3, weight_decay=0.0, warmup_steps=0
        ),
        views=2, mlm=None, seed=0, gather=True, chunk=None,
    )  # fmt: skip
    waits = Waits()
    keep = Safekeeping(tmp_path, 1000, SimpleNamespace(every=100), "", lambda text: None)
    trainer = Trainer(
        chunk=None, devices=1, accelerator="cpu", max_epochs=1, logger=False, gradient_clip_val=1.0,
        log_every_n_steps=log_every, callbacks=[Watch(waits), keep, Record(), PlainProgress(say=str)],
    )  # fmt: skip
    trainer.fit(module, Sentences(encoder.tokenizer))
    return waits.found


HEADS = {
    "pairs": whitening(gradient="full"),
    "groups": whitening(group_width=4),
    "zca": whitening(kind="zca", group_width=None),
    "dense": None,
}


@pytest.mark.parametrize(
    ("kind", "head"), [("cls", "pairs"), ("mean", "groups"), ("max", "zca"), ("cls", "dense")]
)
@pytest.mark.slow(but=1)
def test_a_step_between_two_logged_ones_waits_for_nothing(kind, head, bert, tmp_path, monkeypatch):
    monkeypatch.setattr(
        packed, "laid_out", lambda b, *_: packed.Layout(b, None, None, len(b.ids), b.n, None, bounds(b), 0)
    )
    monkeypatch.setattr(  # the kernels of a GPU
        packed, "unpadded_attention", lambda q, k, v, **_: q + (k + v).mean(0)
    )
    assert watched(bert, tmp_path, kind, HEADS[head]) == []


@pytest.mark.slow
def test_padded_batches_wait_once_for_each_pass_where_transformers_looks_at_the_mask(bert, tmp_path):
    bert.batches = "padded"
    assert watched(bert, tmp_path, "cls", None) == ["_local_scalar_dense"] * (LAST - FIRST)


@pytest.mark.slow
def test_the_count_sees_what_logging_reads(bert, tmp_path):
    assert watched(bert, tmp_path, "cls", None, log_every=1)


def test_ranks_do_not_ask_their_devices_for_signals():
    waits, quiet = (
        Waits(),
        {"logger": False, "enable_progress_bar": False, "accelerator": "cpu", "devices": 1},
    )
    with waits:
        Trainer(chunk=None, **quiet).fit_loop.epoch_loop._broadcast_sigterm_tensor()
    assert waits.found == []
    with waits:
        lightning.Trainer(**quiet).fit_loop.epoch_loop._broadcast_sigterm_tensor()
    assert waits.found  # what it would do: once this fails, the line in Trainer can go


def test_ranks_compare_the_sizes_of_their_batches_once_a_run(bert, monkeypatch):
    asked = []
    monkeypatch.setattr("whitenedcse.training.module.equal_sizes", asked.append)
    module = ContrastiveTraining(embedder=Embedder(encoder=bert), views=2)
    module.log = lambda *_, **__: None
    for _ in range(2):  # runs
        (ours,) = [part for part in module.configure_callbacks()]
        ours.setup(SimpleNamespace(precision="32-true"), module, "fit")
        for step in range(3):
            module.training_step(Sentences(bert.tokenizer).batch, step)
        ours.teardown(None, module, "fit")
    assert asked == [len(SENTENCES)] * 2

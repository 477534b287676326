"""What a run on a GPU costs beside its steps: evaluations by count; and memory that does not suffice."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from encoders import embedder_of
from test_training import EightSentences

from whitenedcse.app.config import message
from whitenedcse.evaluation.tasks import Subset
from whitenedcse.ragged import ragged
from whitenedcse.training import monitor as module
from whitenedcse.training.module import ContrastiveTraining
from whitenedcse.training.monitor import Monitor
from whitenedcse.training.trainer import Trainer

STEPS, ROW = 15_625, 64 * 3 * 26.3  # of the main job: steps, and tokens of each, three passes of 64 sentences
PAIRS, WORDS = 1_500, 14  # of STS-B dev, and the tokens of a sentence
BACKWARD = 3  # a step takes as much as three encodings of its tokens


class Counted:
    """An embedder that counts the tokens of what it encodes."""

    max_length, prompt = 32, ""

    def __init__(self, tokenizer):
        self.encoder, self.tokens, self.kinds = SimpleNamespace(tokenizer=tokenizer), 0, set()

    def encode_rows(self, rows, *, share, bf16):
        self.tokens += len(rows.ids)
        self.kinds.add(bf16)
        return np.random.default_rng(self.tokens).normal(size=(rows.n, 4)).astype(np.float32)


@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
def test_evaluations_are_a_twentieth_of_the_main_job_at_most(precision, tokenizer, tmp_path, monkeypatch):
    """By tokens, every second evaluation being a new best, after which whitening is tried too."""
    read = []
    ids = lambda texts, *_: read.append(1) or ragged([[1] * WORDS] * len(texts))  # noqa: E731
    monkeypatch.setattr(module, "ragged_ids", ids)
    monkeypatch.setattr(module.checkpoint, "save", lambda *_: None)
    scores = (s for i in range(1000) for s in (float(i), 0.0))
    monkeypatch.setattr(module, "scores_of", lambda *_: {"tasks": {"dev": {"all": next(scores)}}})
    left, right = ([f"{side}{i}" for i in range(PAIRS)] for side in "lr")
    dev = [Subset("dev", left, right, np.arange(PAIRS) % 6.0)]
    monitor = Monitor(dev=dev, every=None, patience=None, directory=tmp_path, say=lambda text: None)
    monkeypatch.setattr(torch.Tensor, "to", lambda x, *_: x)  # to the GPU
    sample = SimpleNamespace(sample_tokens=lambda n: ragged([[1] * 26] * n))
    trainer = SimpleNamespace(
        estimated_stepping_batches=STEPS, global_step=0, precision=precision, datamodule=sample, loggers=[],
        is_global_zero=True, callback_metrics={}, should_stop=False, world_size=1,
    )  # fmt: skip
    embedder = Counted(tokenizer)
    run = SimpleNamespace(embedder=embedder, device=torch.device("cuda"))
    monitor.on_train_start(trainer, run)
    for step in range(1, STEPS // 10):
        trainer.global_step = step
        monitor.on_train_batch_end(trainer, run, None, SimpleNamespace(n=64), step)
    assert monitor.every == 125 and len(monitor.rows) == 13 and len(read) == 1
    assert sum("dev/whitened_on_dev_k4" in row.values for row in monitor.rows) == 9  # 5 new bests, 3 by turn
    assert 0.01 < embedder.tokens / (BACKWARD * ROW * STEPS / 10) < 0.05
    assert embedder.kinds == {precision == "bf16-mixed"}


def test_a_step_that_runs_out_of_memory_says_its_batch_and_the_peak_in_one_line(bert, monkeypatch):
    def hungry(z, negatives=None):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has ...")

    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 78 * 2**30)
    data = EightSentences(bert.tokenizer, 2)
    trainer = Trainer(accelerator="cpu", max_epochs=1, logger=False, enable_progress_bar=False)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        trainer.fit(ContrastiveTraining(embedder=embedder_of(bert), loss=hungry), data)
    count = 3 * len(data.batch.ids)
    assert message(caught.value, []) == (
        f"a batch of 8 sentences, 3 passes and {count} tokens runs out of memory, at a peak of 78.0 GiB; "
        "trainer.chunk=16 gives the same gradient with less memory"
    )

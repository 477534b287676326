"""Judging while training: dev score, shape of the space, whitening-only baselines, the best checkpoint.

n: sentences    d: width    k: components kept after whitening
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning import Callback, LightningModule, Trainer
from numpy.typing import NDArray
from torch import Tensor

from whitenedcse.evaluation.correlation import Index, pairs_index, scores_of
from whitenedcse.evaluation.geometry import alignment, axes_filled, spread, uniformity
from whitenedcse.evaluation.postprocess import Postprocess, ladder
from whitenedcse.evaluation.sts import Subset
from whitenedcse.model import checkpoint
from whitenedcse.training.gather import from_first, place, summed

METRIC = "dev/spearman"
SAME = 1e-12  # spread: rounding leaves 5e-15 of equal vectors; rates that collapse the space, 1e-5 and more
Values = dict[str, float | None]


class Judge:
    """Scores frozen embeddings of a dev set, raw and whitened.

    Names are stable: dev/spearman, dev/alignment, dev/uniformity, dev/whitened_on_{dev,corpus}_k{k},
    dev/effective_rank, and dev/variance_top{k}: the share of the variance on the first k = 1, 2, 4, ... axes.
    Whitening fitted on the dev sentences themselves is transductive, on training sentences inductive.
    Alignment is over the pairs scored above 4 (SimCSE's definition); what is undefined is None.
    """

    def __init__(self, dev: Sequence[Subset]) -> None:
        self.sentences, self.index = pairs_index({"dev": dev})
        self.n = sum(len(subset.gold) for subset in dev)

    def __call__(self, dev: NDArray[Any], corpus: NDArray[Any]) -> Values:
        """(n, d) vectors of `sentences`, (m, d) of training sentences -> the values by name."""
        positive = np.concatenate([rows[:, subset.gold > 4] for subset, rows in self.index["dev"]], axis=1)
        x = torch.from_numpy(dev)
        values: Values = {METRIC: spearman(dev, self.index)}
        values["dev/alignment"] = float(alignment(x[positive[0]], x[positive[1]])) if positive.size else None
        values["dev/uniformity"] = float(uniformity(x))
        samples = {"dev": dev, "corpus": corpus}
        maps = {name: Postprocess(kind="whitening").fit(sample) for name, sample in samples.items()}
        for name, fitted in maps.items():
            white = fitted.transform(dev)
            for k in ladder(dev.shape[1]):
                values[f"dev/whitened_on_{name}_k{k}"] = spearman(white[:, :k], self.index)
        return values | shape(torch.from_numpy(maps["dev"].variances))


def shape(variances: Tensor) -> Values:
    """(d,) by principal axis -> how many axes are filled, and how much the first 1, 2, 4, ... < d hold."""
    shares = variances / variances.sum() if variances.any() else variances
    held = shares.cumsum(0).tolist() if shares.any() else [None] * len(shares)  # of no variance, no share
    powers = [2**i for i in range((len(shares) - 1).bit_length())]
    return {
        "dev/effective_rank": float(axes_filled(shares)),
        **{f"dev/variance_top{k}": held[k - 1] for k in powers},
    }


def refuse_same(dev: NDArray[Any], step: int) -> None:
    """Raise ValueError if all sentences have one vector, (n, d): nothing can be ranked or learned then."""
    if len(dev) > 1 and spread(torch.from_numpy(dev)) < SAME:
        raise ValueError(
            f"step {step}: all {len(dev)} dev sentences have the same vector, so nothing can be learned. Use"
            " pooling=mean, or pooling=last for a decoder (after step 0, a lower optim.lr); if that is no"
            " help, the encoder's weights are damaged, or its tokenizer knows no word of these sentences"
        )


def spearman(vectors: NDArray[Any], index: Index) -> float | None:
    """Spearman x 100 over the dev pairs, None where it is undefined."""
    return scores_of(vectors, index)["tasks"]["dev"]["all"]


class Row(NamedTuple):
    """One judgement: the optimiser step it was made at, and its values."""

    step: int
    values: Values


class Monitor(Callback):
    """Judges before step 1, every `every` optimiser steps and at the end; keeps the best checkpoint.

    The best is the highest dev/spearman after training began; it is written to `directory` at once. Training
    stops early after `patience` judgements without a new best (None: never). Where all dev sentences have the
    same vector it raises ValueError, on every rank.
    judging: seconds that this took so far.
    """

    judging = 0.0

    def __init__(
        self,
        *,
        dev: Sequence[Subset],
        every: int,
        patience: int | None,
        sample: int,
        directory: Path,
        say: Callable[[str], None],
    ) -> None:
        if every < 1 or sample < 2:
            raise ValueError(f"monitor.every={every} must be 1 or more, monitor.sample={sample} 2 or more")
        if patience is not None and patience < 1:
            raise ValueError(f"monitor.patience={patience} must be 1 or more, or null for never")
        self.judge, self.every, self.patience, self.sample = Judge(dev), every, patience, sample
        self.directory, self.say = directory, say
        self.rows: list[Row] = []

    def state_dict(self) -> dict[str, Any]:
        """The judgements so far, for a run that goes on."""
        return {"rows": [tuple(row) for row in self.rows]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Judgements made before."""
        self.rows = [Row(*row) for row in state_dict["rows"]]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The score of the untouched encoder: a broken evaluation shows at once."""
        if not self.rows:
            self.measure(trainer, pl_module)
        self.stop_in_vain(trainer)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """The score every `every` optimiser steps."""
        if trainer.global_step % self.every == 0 and trainer.global_step != self.rows[-1].step:
            self.measure(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The score at the end, unless it was just taken."""
        if trainer.global_step != self.rows[-1].step:
            self.measure(trainer, pl_module)

    def measure(self, trainer: Trainer, module: Any) -> None:
        """Judge, log, keep the checkpoint if it is the best, and stop if none was for too long."""
        began = time.perf_counter()
        dev = summed(module.embedder.encode(self.judge.sentences, share=place()))
        refuse_same(dev, trainer.global_step)
        tokens = trainer.datamodule.sample_tokens(self.sample)  # type: ignore[attr-defined]
        corpus = summed(module.embedder.encode_rows(tokens, share=place()))
        row = Row(trainer.global_step, from_first(lambda: self.judge(dev, corpus)))
        self.rows.append(row)
        for logger in trainer.loggers:
            logger.log_metrics({name: v for name, v in row.values.items() if v is not None}, step=row.step)
        score = row.values[METRIC]
        self.say(f"step {row.step}: {METRIC} " + ("undefined" if score is None else f"{score:.2f}"))
        if len(self.rows) > 1 and self.best is row and trainer.is_global_zero:
            checkpoint.save(module.embedder, self.directory)
        self.stop_in_vain(trainer)
        self.judging += time.perf_counter() - began

    def stop_in_vain(self, trainer: Trainer) -> None:
        """Stop if the last few judgements were all below the best."""
        if self.patience is not None and len(self.rows) - 1 - self.rows.index(self.best) >= self.patience:
            trainer.should_stop = True

    @property
    def before(self) -> Row:
        """The judgement of the untouched encoder."""
        return self.rows[0]

    @property
    def best(self) -> Row:
        """The judgement of the best checkpoint: the first of the highest dev/spearman after step 0."""
        return max(
            self.rows[1:] or self.rows, key=lambda row: -np.inf if (s := row.values[METRIC]) is None else s
        )

    def summary(self) -> dict[str, Any]:
        """`dev` of scores.json."""
        before, best, last = self.before, self.best, self.rows[-1]
        return {
            "metric": METRIC,
            "before": before.values[METRIC],
            "best": best.values[METRIC],
            "best_step": best.step,
            "last": last.values[METRIC],
            "last_step": last.step,
            "n": self.judge.n,
            "values_before": before.values,
            "values_best": best.values,
        }

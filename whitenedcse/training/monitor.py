"""Evaluation while training: dev scores, geometry, whitening-only baselines, the best checkpoint.

n: sentences    d: width    k: components kept after whitening
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning import Callback, LightningModule, Trainer
from numpy.typing import NDArray
from torch import Tensor

from whitenedcse.evaluation.geometry import alignment, axes_filled, positives, spread, uniformity
from whitenedcse.evaluation.postprocess import Postprocess, ladder
from whitenedcse.evaluation.sts import Index, Subset, pairs_index, scores_of
from whitenedcse.model import checkpoint
from whitenedcse.training.parallel import from_first, place, summed

METRIC = "dev/spearman"
SAMPLE = 2048  # training sentences that the inductive whitening baselines are fitted on
SAME = 1e-12  # spread: rounding leaves 5e-15 of equal vectors; rates that collapse the space, 1e-5 and more
Values = dict[str, float | None]


class DevSet:
    """Scores frozen embeddings of a dev set, raw and whitened.

    Names are stable: dev/spearman, dev/alignment, dev/uniformity, dev/whitened_on_{dev,corpus}_k{k},
    dev/effective_rank, and dev/variance_top{k}: the share of the variance on the first k = 1, 2, 4, ... axes.
    Whitening fitted to the dev sentences themselves is transductive, to training sentences inductive.
    Alignment is over `positives`, the pairs in the top fifth of the scale; an undefined value is None.
    """

    def __init__(self, dev: Sequence[Subset]) -> None:
        self.sentences, self.index = pairs_index({"dev": dev})
        self.n = sum(len(subset.gold) for subset in dev)
        self.rows, self.positives = positives(self.index["dev"])

    def __call__(self, dev: NDArray[Any], corpus: NDArray[Any]) -> Values:
        """The values by name, from vectors (n, d) of `sentences` and (m, d) of training sentences."""
        x, (left, right) = torch.from_numpy(dev), self.rows
        values: Values = {METRIC: spearman(dev, self.index)}
        values["dev/alignment"] = float(alignment(x[left], x[right])) if len(left) else None
        values["dev/uniformity"] = float(uniformity(x))
        samples = {"dev": dev, "corpus": corpus}
        maps = {name: Postprocess(kind="whitening").fit(sample) for name, sample in samples.items()}
        for name, fitted in maps.items():
            white = fitted.transform(dev)
            for k in ladder(dev.shape[1]):
                values[f"dev/whitened_on_{name}_k{k}"] = spearman(white[:, :k], self.index)
        return values | shape(torch.from_numpy(maps["dev"].variances))


def shape(variances: Tensor) -> Values:
    """Effective rank, and the shares of the first 1, 2, 4, ... < d axes, of the variances by axis (d,)."""
    shares = variances / variances.sum() if variances.any() else variances
    held = shares.cumsum(0).tolist() if shares.any() else [None] * len(shares)  # of no variance, no share
    powers = [2**i for i in range((len(shares) - 1).bit_length())]
    return {
        "dev/effective_rank": float(axes_filled(shares)),
        **{f"dev/variance_top{k}": held[k - 1] for k in powers},
    }


def refuse_same(dev: NDArray[Any], step: int) -> None:
    """Raise ValueError if all dev vectors (n, d) are equal: then nothing can be ranked or learned."""
    if len(dev) > 1 and spread(torch.from_numpy(dev)) < SAME:
        raise ValueError(
            f"step {step}: all {len(dev)} dev sentences have the same vector, so nothing can be learned. Use"
            " pooling=mean, or pooling=last for a decoder (after step 0, a lower optim.lr); if that is no"
            " help, the encoder's weights are damaged, or its tokenizer knows no word of these sentences"
        )


def spearman(vectors: NDArray[Any], index: Index) -> float | None:
    """Spearman x 100 over the dev pairs from vectors (n, d); None where it is undefined."""
    return scores_of(vectors, index)["tasks"]["dev"]["all"]


class Row(NamedTuple):
    """One evaluation: the optimiser step at which it was made, and its values."""

    step: int
    values: Values


class Monitor(Callback):
    """Evaluates before step 1, every `every` optimiser steps and at the end; keeps the best checkpoint.

    The best has the highest dev/spearman after training began; it is written to `directory` at once. Training
    stops early after `patience` evaluations without a new best (None: never). Raises ValueError, on every
    rank, if all dev sentences have the same vector.
    evaluating: the number of seconds that evaluations took so far.
    """

    evaluating = 0.0

    def __init__(
        self,
        *,
        dev: Sequence[Subset],
        every: int,
        patience: int | None,
        directory: Path,
        say: Callable[[str], None],
    ) -> None:
        if every < 1:
            raise ValueError(f"monitor.every={every} must be 1 or more")
        if patience is not None and patience < 1:
            raise ValueError(f"monitor.patience={patience} must be 1 or more, or null for never")
        self.dev_set, self.every, self.patience = DevSet(dev), every, patience
        self.directory, self.say = directory, say
        self.rows: list[Row] = []

    def state_dict(self) -> dict[str, Any]:
        """The evaluations so far, for a run that resumes."""
        return {"rows": [tuple(row) for row in self.rows]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the evaluations of a checkpoint."""
        self.rows = [Row(*row) for row in state_dict["rows"]]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Evaluate the untrained encoder: a broken evaluation shows at once."""
        if not self.rows:
            self.measure(trainer, pl_module)
        self.stop_in_vain(trainer)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Evaluate every `every` optimiser steps."""
        if trainer.global_step % self.every == 0 and trainer.global_step != self.rows[-1].step:
            self.measure(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Evaluate at the end, unless that was just done."""
        if trainer.global_step != self.rows[-1].step:
            self.measure(trainer, pl_module)

    def measure(self, trainer: Trainer, module: Any) -> None:
        """Evaluate, log, keep the checkpoint if it is the best, and stop if none was for too long."""
        began = time.perf_counter()
        dev = summed(module.embedder.encode(self.dev_set.sentences, share=place()))
        refuse_same(dev, trainer.global_step)
        tokens = trainer.datamodule.sample_tokens(SAMPLE)  # type: ignore[attr-defined]
        corpus = summed(module.embedder.encode_rows(tokens, share=place()))
        row = Row(trainer.global_step, from_first(lambda: self.dev_set(dev, corpus)))
        self.rows.append(row)
        for logger in trainer.loggers:
            logger.log_metrics({name: v for name, v in row.values.items() if v is not None}, step=row.step)
        score = row.values[METRIC]
        self.say(f"step {row.step}: {METRIC} " + ("undefined" if score is None else f"{score:.2f}"))
        if len(self.rows) > 1 and self.best is row and trainer.is_global_zero:
            checkpoint.save(module.embedder, self.directory)
        self.stop_in_vain(trainer)
        self.evaluating += time.perf_counter() - began

    def stop_in_vain(self, trainer: Trainer) -> None:
        """Stop training if the last `patience` evaluations were all below the best."""
        if self.patience is not None and len(self.rows) - 1 - self.rows.index(self.best) >= self.patience:
            trainer.should_stop = True

    @property
    def before(self) -> Row:
        """The evaluation of the untrained encoder."""
        return self.rows[0]

    @property
    def best(self) -> Row:
        """The evaluation of the best checkpoint: the first with the highest dev/spearman after step 0."""
        return max(
            self.rows[1:] or self.rows, key=lambda row: -np.inf if (s := row.values[METRIC]) is None else s
        )

    def summary(self) -> dict[str, Any]:
        """The content of `dev` in scores.json."""
        before, best, last = self.before, self.best, self.rows[-1]
        return {
            "metric": METRIC,
            "before": before.values[METRIC],
            "best": best.values[METRIC],
            "best_step": best.step,
            "last": last.values[METRIC],
            "last_step": last.step,
            "n": self.dev_set.n,
            "positives": self.dev_set.positives,
            "values_before": before.values,
            "values_best": best.values,
        }


RANK = "dev/effective_rank"
VANISHED = 0.01  # of the loss of a guess: nothing left to learn. Good runs get there too, so dev must fall
FALLEN = 5.0  # points of dev/spearman below its best: good runs go up and down by 1 to 3
SHRUNK = 0.5  # of the effective rank before training: good quick starts keep 0.65, collapsed ones below


class Health(Callback):
    """Warns of a collapse, with a line for each of two kinds, once in a run, from values logged anyway.

    It follows `monitor` among the callbacks, and examines its last two evaluations after each new one.
    "memorising": dev/spearman fell, and the loss of the batch has vanished. "collapse": dev/spearman fell, or
    never reached its value before training, and the dev sentences fill less than half of the axes that they
    filled then. A loss that is not finite ends the run: training/trainer.py.
    """

    def __init__(self, monitor: Monitor, say: Callable[[str], None]) -> None:
        self.monitor, self.say = monitor, say
        self.said: list[str] = []
        self.seen = 0  # the step of the evaluation that was looked at last
        self.guess = 0.0  # the loss of guessing

    def state_dict(self) -> dict[str, Any]:
        """The last step examined and the kinds of warnings given, for a run that resumes."""
        return {"said": self.said, "seen": self.seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the state of a checkpoint."""
        self.said, self.seen = state_dict["said"], state_dict["seen"]

    def on_train_batch_end(  # noqa: PLR0913  Lightning's signature
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Examine the evaluations, if this step was evaluated."""
        self.guess = math.log(batch.n * trainer.world_size)
        self.look(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Examine the last evaluation."""
        self.look(trainer)

    def look(self, trainer: Trainer) -> None:
        """Warn of what was not warned of before, if there is a new evaluation; only then read the loss."""
        step = self.monitor.rows[-1].step
        if step == self.seen:
            return
        self.seen = step
        metrics = trainer.callback_metrics
        loss = metrics.get("train/contrastive", metrics.get("train/loss"))
        for kind, text in alarms(self.monitor.rows, math.inf if loss is None else float(loss), self.guess):
            if kind not in self.said:
                self.said = [*self.said, kind]
                self.say(f"warning: step {step}: {text}")


def alarms(rows: list[Row], loss: float, guess: float) -> Iterator[tuple[str, str]]:
    """The warnings that evaluations give rise to, each as its kind and its text.

    rows: evaluations, the one before training first. loss: of the last batch. guess: the loss of guessing.
    """
    before, last = rows[0], rows[1:][-2:]
    if len(last) < 2:
        return
    best = max(rows, key=score)
    fall = min(score(best) - score(row) for row in last)
    seen = f"{METRIC} fell from {score(best):.1f} (step {best.step}) to {score(last[-1]):.1f}"
    if fall > FALLEN and loss < VANISHED * guess:
        yield (
            "memorising",
            f"{seen} while train/loss vanished ({loss:.2g}; chance gives {guess:.2f}): what tells the "
            "sentences of a batch apart is not their meaning. Try a lower optim.lr, a higher "
            "loss.temperature, data.passes above 1, or sentences nearer to those of the dev set",
        )
    ranks = [row.values.get(RANK) or 0.0 for row in (before, *last)]
    if fall > (FALLEN if best.step else 0) and max(ranks[1:]) < SHRUNK * ranks[0]:
        yield (
            "collapse",
            f"{seen} and {RANK} from {ranks[0]:.1f} (step 0) to {ranks[-1]:.1f}: the space collapses. "
            "Try a lower optim.lr, a higher loss.temperature, or pooling=mean",
        )


def score(row: Row) -> float:
    """The dev/spearman of an evaluation; minus infinity where it is undefined."""
    value = row.values[METRIC]
    return -math.inf if value is None else value

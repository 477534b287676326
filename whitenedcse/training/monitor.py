"""Evaluation while training: dev scores, geometry, whitening-only baselines, the best checkpoint, alarms.

n: sentences    d: width    k: components kept after whitening
"""

from __future__ import annotations

import logging
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

from whitenedcse.compute import without_autocast
from whitenedcse.data.datamodule import SentenceData
from whitenedcse.evaluation.geometry import alignment, concentration, positives, spectrum, spread, uniformity
from whitenedcse.evaluation.readout import best_of_few
from whitenedcse.evaluation.scores import scores_of
from whitenedcse.evaluation.suite import plan, whitened_scores
from whitenedcse.evaluation.tasks import Subset
from whitenedcse.model import checkpoint
from whitenedcse.model.embedder import Embedder, ragged_ids
from whitenedcse.model.layers import pooled_layers
from whitenedcse.ragged import Ragged, taken
from whitenedcse.training.module import reseed, seed_of
from whitenedcse.training.parallel import from_first, place, summed

log = logging.getLogger(__name__)
METRIC, READOUT = "dev/spearman", "dev/readout"
BASELINES = 5  # at every fifth evaluation and each new best whitening baselines are scored: they cost most
SAMPLE = 2048  # training sentences that the inductive whitening baselines are fitted on
EVALUATIONS, STEPS = 20, (10, 125)  # of a run whose monitor.every is null; least and most steps between two
DROPPED = 64  # sentences of a batch that is encoded with dropout
SAME = 1e-12  # spread: rounding leaves 5e-15 of equal vectors; rates that collapse the space, 1e-5 and more
Values = dict[str, float | None]


class DevSet:
    """Scores frozen embeddings of a dev set, raw and whitened.

    Stable names: dev/spearman, dev/alignment, dev/uniformity, dev/effective_rank, dev/variance_top{k}, the
    share of variance on the first k = 1, 2, 4, ... axes; baselines: dev/whitened_on_{dev,corpus}_k{k}.
    Whitening fitted to the dev sentences themselves is transductive, to training sentences inductive.
    Alignment is over `positives`, the pairs in the top fifth of the scale; an undefined value is None.
    """

    bf16, device = False, "cpu"  # how the backbone computes, and where geometry is computed
    rows: Ragged | None = None  # the tokens of the dev sentences
    x: NDArray[np.float32]  # their vectors, as measured last
    best = ""  # the readout found last

    def __init__(self, dev: Sequence[Subset], readout: bool = False) -> None:
        self.readout = readout
        self.sentences, self.index, *_ = plan({"dev": list(dev)})
        self.n = sum(len(subset.gold) for subset in dev)
        self.similar, self.positives = positives(self.index["dev"])
        self.gold = np.concatenate([subset.gold for subset in dev])

    def measured(self, embedder: Embedder, data: SentenceData, step: int) -> Values:
        """The values by name, without baselines, the same on every rank; ValueError as `check_spread`."""
        if self.rows is None:
            tokenizer, most = embedder.encoder.tokenizer, embedder.max_length
            self.rows = ragged_ids(self.sentences, tokenizer, most, embedder.prompt)
        self.x = summed(embedder.encode_rows(self.rows, share=place(), bf16=self.bf16))
        check_spread(self.x, step)
        return from_first(lambda: self(self.x))

    def whitened(self, embedder: Embedder, data: SentenceData) -> Values:
        """The baselines of the vectors measured last: scores of what whitening alone makes of them."""
        sample = data.sample_tokens(SAMPLE)
        corpus = summed(embedder.encode_rows(sample, share=place(), bf16=self.bf16))
        values = from_first(lambda: self.baselines(self.x, corpus))
        if self.readout:
            values |= from_first(lambda: self.readouts(embedder, sample))
        return values

    def readouts(self, embedder: Embedder, sample: Ragged) -> Values:
        """The score of the best readout of the encoder's layers, fitted to these training sentences."""
        encoder = embedder.encoder
        kinds, layers = (encoder.one_token, "mean"), range(encoder.depth + 1)
        assert self.rows is not None
        planes, texts = (pooled_layers(encoder, rows, kinds, layers).kinds for rows in (self.rows, sample))
        pairs = np.concatenate([rows for _, rows in self.index["dev"]], axis=1)
        best, score = best_of_few(planes, texts, self.gold, pairs)
        self.best = str(best)
        return {READOUT: score}

    def said(self, values: Values) -> str:
        """The line for an evaluation."""
        score = values[METRIC]
        said = f"{METRIC} undefined" if score is None else f"{METRIC} {score:.2f}"
        if READOUT in values:
            said += f"  best readout {values[READOUT]:.2f}: {self.best}"
        return said

    def __call__(self, dev: NDArray[Any]) -> Values:
        """The values by name, from vectors (n, d) of `sentences`."""
        x, (left, right) = torch.from_numpy(dev).to(self.device), self.similar
        values: Values = {METRIC: scores_of(dev, self.index)["tasks"]["dev"]["all"]}
        values["dev/alignment"] = float(alignment(x[left], x[right])) if len(left) else None
        values["dev/uniformity"] = float(uniformity(x))
        return values | concentrated(x)

    def baselines(self, dev: NDArray[Any], corpus: NDArray[Any]) -> Values:
        """The scores of whitened vectors (n, d), by what whitening is fitted to and components kept."""
        on_dev = whitened_scores(dev, dev, self.index, own=len(dev))
        on_corpus = whitened_scores(dev, corpus, self.index)
        values = {f"dev/whitened_on_dev_k{k}": score for k, score in on_dev.items()}
        return values | {f"dev/whitened_on_corpus_k{k}": score for k, score in on_corpus.items()}


class HeldOut:
    """Evaluates sentences that are never trained on, where there are no scored pairs.

    Names are stable: dev/alignment, dev/uniformity, dev/effective_rank and dev/variance_top{k}. Alignment is
    over two embeddings of each sentence with different dropout (Wang and Isola, arXiv:2005.10242; SimCSE,
    arXiv:2104.08821, section 2.3), uniformity over embeddings without. Neither says which checkpoint is best.
    """

    n, positives, bf16, device = None, None, False, "cpu"

    def measured(self, embedder: Embedder, data: SentenceData, step: int) -> Values:
        """The values by name, the same on every rank. Raises ValueError if all vectors are equal."""
        rows = data.held_out()
        x = summed(embedder.encode_rows(rows, share=place(), bf16=self.bf16))
        check_spread(x, step)

        def values() -> Values:
            left, right = dropped(embedder, rows, 1), dropped(embedder, rows, 2)
            embedded = torch.from_numpy(x).to(self.device)
            found: Values = {"dev/alignment": float(alignment(left, right))}
            return found | {"dev/uniformity": float(uniformity(embedded))} | concentrated(embedded)

        return from_first(values)

    def said(self, values: Values) -> str:
        """The line for an evaluation."""
        return "  ".join(f"{name} {values[name]:.3f}" for name in ("dev/alignment", "dev/uniformity"))

    def whitened(self, embedder: Embedder, data: SentenceData) -> Values:
        """No baselines: there is nothing to score them by."""
        return {}


@torch.no_grad()
def dropped(embedder: Embedder, rows: Ragged, seed: int) -> Tensor:
    """The embeddings of n sentences with the dropout of a seed: (n, d), on the host."""
    was_training, device = embedder.training, next(embedder.parameters()).device
    embedder.eval().encoder.train()
    reseed(seed)
    vectors = []
    try:
        with without_autocast(device):
            for i, at in enumerate(torch.arange(rows.n).split(DROPPED)):
                part, _ = taken(rows, at)
                x = embedder.pool(part.to(device), seed_of(seed, i))
                vectors.append(embedder.finish(x).cpu())
    finally:
        embedder.train(was_training)
    return torch.cat(vectors)


def concentrated(x: Tensor) -> Values:
    """`concentration` of the variances of vectors (n, d) along their axes, under names of the dev set."""
    return {f"dev/{name}": v for name, v in concentration(spectrum(x)).items()}


def check_spread(dev: NDArray[Any], step: int) -> None:
    """Raise ValueError if all dev vectors (n, d) are equal: then nothing can be ranked or learned."""
    if len(dev) > 1 and spread(torch.from_numpy(dev)) < SAME:
        raise ValueError(
            f"step {step}: all {len(dev)} dev sentences have the same vector, so nothing can be learned. Use"
            " pooling=mean, or pooling=last for a decoder (after step 0, a lower optim.lr)"
        )


class Row(NamedTuple):
    """One evaluation: the optimiser step at which it was made, and its values."""

    step: int
    values: Values


class Monitor(Callback):
    """Evaluates before step 1, every `every` optimiser steps and at the end; keeps the best checkpoint.

    The best has the highest dev/spearman after training began; it is written to `directory` at once. Without
    dev pairs (None) sentences held out of the corpus are evaluated, and the last checkpoint is the best.
    every: None for a twentieth of the run, 10 to 125 steps. readout: with the whitening baselines, also score
    the best readout of the encoder's layers on the dev pairs that choose it. Training stops early after
    `patience` evaluations without a new best (None: never). Raises ValueError, on every rank, if all
    evaluated sentences have the same vector.
    evaluating: the number of seconds that evaluations took so far.
    """

    evaluating = 0.0

    def __init__(
        self,
        *,
        dev: Sequence[Subset] | None,
        every: int | None,
        patience: int | None,
        readout: bool = False,
        directory: Path,
        say: Callable[[str], None],
    ) -> None:
        for name, value in {"every": every, "patience": patience}.items():
            if value is not None and value < 1:
                raise ValueError(f"monitor.{name}={value} must be 1 or more, or null")
        if dev is None and (patience or readout):
            raise ValueError("monitor.patience and monitor.readout need scored pairs: monitor.dev=FILE")
        self.dev_set = HeldOut() if dev is None else DevSet(dev, readout)
        self.asked, self.every, self.patience = every, every or 1, patience
        self.directory, self.say = directory, say
        self.rows: list[Row] = []
        self.warned: list[str] = []  # the kinds of alarms given
        self.guess = 0.0  # the loss of guessing

    def state_dict(self) -> dict[str, Any]:
        """The evaluations so far, for a run that resumes."""
        return {"rows": [tuple(row) for row in self.rows], "warned": self.warned}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the evaluations of a checkpoint."""
        self.rows = [Row(*row) for row in state_dict["rows"]]
        self.warned = state_dict["warned"]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Evaluate the untrained encoder: a broken evaluation shows at once."""
        if pl_module.device.type == "cuda":  # else an evaluation costs as much as its steps
            self.dev_set.device, self.dev_set.bf16 = "cuda", str(trainer.precision) == "bf16-mixed"
        steps = trainer.estimated_stepping_batches  # infinite for max_epochs=-1
        if self.asked is None:
            self.every = int(min(max(steps / EVALUATIONS, STEPS[0]), STEPS[1]))
        if not self.rows:
            self.measure(trainer, pl_module)
        self.stop_in_vain(trainer)

    def on_train_batch_end(  # noqa: PLR0913  Lightning's signature
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Evaluate every `every` optimiser steps."""
        self.guess = math.log(batch.n * trainer.world_size)
        if trainer.global_step % self.every == 0 and trainer.global_step != self.rows[-1].step:
            self.measure(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Evaluate at the end, unless that was just done."""
        if trainer.global_step != self.rows[-1].step:
            self.measure(trainer, pl_module)

    def measure(self, trainer: Trainer, module: Any) -> None:
        """Evaluate, log, keep the checkpoint if it is the best, and stop if none was for too long."""
        began = time.perf_counter()
        embedder, data, step = module.embedder, trainer.datamodule, trainer.global_step  # type: ignore[attr-defined]
        values = self.dev_set.measured(embedder, data, step)
        self.rows.append(Row(step, values))
        new = len(self.rows) > 1 and self.highest is self.rows[-1]
        if new or len(self.rows) % BASELINES == 1:
            values.update(self.dev_set.whitened(embedder, data))
        for logger in trainer.loggers:
            logger.log_metrics({name: v for name, v in values.items() if v is not None}, step=step)
        self.say(f"step {step}: {self.dev_set.said(values)}")
        if new and trainer.is_global_zero:
            checkpoint.save(embedder, self.directory, self.rows[-1])
        self.warn(trainer)
        self.stop_in_vain(trainer)
        self.evaluating += time.perf_counter() - began

    def warn(self, trainer: Trainer) -> None:
        """Warn of a collapse, with a line for each kind, once in a run."""
        metrics = trainer.callback_metrics
        loss = metrics.get("train/contrastive", metrics.get("train/loss"))
        for kind, text in alarms(self.rows, math.inf if loss is None else float(loss), self.guess):
            if kind not in self.warned:
                self.warned = [*self.warned, kind]
                self.say(f"warning: step {self.rows[-1].step}: {text}")
                if log.hasHandlers():  # of train.log; without any, logging would print it again
                    log.warning("step %d: %s", self.rows[-1].step, text)

    def stop_in_vain(self, trainer: Trainer) -> None:
        """Stop training if the last `patience` evaluations were all below the best."""
        if self.patience is None or trainer.should_stop:
            return
        best = self.highest
        if len(self.rows) - 1 - self.rows.index(best) >= self.patience:
            trainer.should_stop = True
            self.say(f"training stops: no better score since step {best.step} (monitor.patience)")

    @property
    def highest(self) -> Row:
        """The first with the highest dev/spearman after training began or, without dev pairs, the last."""
        if isinstance(self.dev_set, HeldOut):
            return self.rows[-1]
        return max(self.rows[1:] or self.rows, key=score)

    def summary(self) -> dict[str, Any]:
        """The content of `dev` in scores.json, on the first rank; of best/, what that says of itself.

        It may be of a later step than `highest`: left by a killed life, and not repeated by this one.
        """
        before, best, last = self.rows[0], Row(*checkpoint.evaluation(self.directory)), self.rows[-1]
        return {
            "metric": METRIC if METRIC in last.values else None,
            "before": before.values.get(METRIC),
            "best": best.values.get(METRIC),
            "best_step": best.step,
            "last": last.values.get(METRIC),
            "last_step": last.step,
            "n": self.dev_set.n,
            "positives": self.dev_set.positives,
            "values_before": before.values,
            "values_best": best.values,
        }


RANK, UNIFORMITY = "dev/effective_rank", "dev/uniformity"
VANISHED = 0.01  # of the loss of a guess: nothing left to learn. Good runs get there too, so dev must fall
FALLEN = 5.0  # points of dev/spearman below its best: good runs go up and down by 1 to 3
SHRUNK = 0.5  # of the effective rank before training: good quick starts keep 0.65, collapsed ones below
NEAR = 0.01  # of the uniformity before training, which nears 0 as all vectors near one; good runs lower it


def alarms(rows: list[Row], loss: float, guess: float) -> Iterator[tuple[str, str]]:
    """The warnings that the last two evaluations give rise to, each as its kind and its text.

    rows: evaluations, the one before training first. loss: of the last batch. guess: the loss of guessing.
    "memorising": dev/spearman fell, and the loss has vanished. "collapse": it fell, or never reached its
    value before training, and the dev sentences fill less than half of the axes that they filled then.
    "shrinking": they are a hundred times nearer to each other than then, even if they are ranked well.
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
            f"{seen} while train/loss vanished ({loss:.2g}; chance gives {guess:.2f}): what tells sentences "
            "apart is not their meaning. Try a lower optim.lr, a higher loss.temperature or data.passes",
        )
    known = [row.values.get(RANK) or 0.0 for row in (before, *last)]
    if fall > (FALLEN if best.step else 0) and max(known[1:]) < SHRUNK * known[0]:
        yield (
            "collapse",
            f"{seen} and {RANK} from {known[0]:.1f} (step 0) to {known[-1]:.1f}: the space collapses. "
            "Try a lower optim.lr, a higher loss.temperature or, if pooling is cls, pooling=mean",
        )

    near = [row.values.get(UNIFORMITY) or 0.0 for row in (before, *last)]
    if min(near[1:]) > NEAR * near[0]:
        yield (
            "shrinking",
            f"{UNIFORMITY} went from {near[0]:.2g} (step 0) to {near[-1]:.2g}: all vectors near one. "
            "Try a lower optim.lr; a loss without negatives needs whitening last (head.position=after)",
        )


def score(row: Row) -> float:
    """The dev/spearman of an evaluation; minus infinity where it is undefined."""
    value = row.values.get(METRIC)
    return -math.inf if value is None else value

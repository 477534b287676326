"""Evaluation while training: dev scores, geometry, whitening-only baselines, the best checkpoint.

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

from whitenedcse.compute import without_autocast
from whitenedcse.data.datamodule import SentenceData
from whitenedcse.evaluation.geometry import alignment, concentration, positives, spread, uniformity
from whitenedcse.evaluation.postprocess import Postprocess, ladder
from whitenedcse.evaluation.scores import Index, pairs_index, scores_of
from whitenedcse.evaluation.tasks import Subset
from whitenedcse.model import checkpoint
from whitenedcse.model.embedder import Embedder
from whitenedcse.ragged import Ragged, taken
from whitenedcse.training.module import reseed, seed_of
from whitenedcse.training.parallel import from_first, place, summed

METRIC = "dev/spearman"
SAMPLE = 2048  # training sentences that the inductive whitening baselines are fitted on
EVALUATIONS, STEPS = 20, (10, 125)  # of a run whose monitor.every is null; least and most steps between two
DROPPED = 64  # sentences of a batch that is encoded with dropout
SAME = 1e-12  # spread: rounding leaves 5e-15 of equal vectors; rates that collapse the space, 1e-5 and more
Values = dict[str, float | None]


def refuse(every: int | None, patience: int | None, *, held_out: bool) -> None:
    """Raise ValueError for settings of `Monitor` out of bounds; held_out: it has no scored pairs."""
    if every is not None and every < 1:
        raise ValueError(f"monitor.every={every} must be 1 or more")
    if patience is not None and patience < 1:
        raise ValueError(f"monitor.patience={patience} must be 1 or more, or null for never")
    if patience is not None and held_out:
        raise ValueError(
            f"monitor.patience={patience} needs scored pairs: monitor.dev=FILE, or null for never"
        )


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
        if len(scores := {float(gold) for subset in dev for gold in subset.gold}) == 1:
            raise ValueError(
                f"all {self.n} dev pairs have the score {scores.pop():g}; give pairs that differ"
            )

    def measured(self, embedder: Embedder, data: SentenceData, step: int) -> Values:
        """The values by name, the same on every rank. Raises ValueError if all vectors are equal."""
        dev = summed(embedder.encode(self.sentences, share=place()))
        refuse_same(dev, step)
        corpus = summed(embedder.encode_rows(data.sample_tokens(SAMPLE), share=place()))
        return from_first(lambda: self(dev, corpus))

    def said(self, values: Values) -> str:
        """The line for an evaluation."""
        score = values[METRIC]
        return f"{METRIC} " + ("undefined" if score is None else f"{score:.2f}")

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
                few = k > fitted.most or (name == "dev" and fitted.equal_cosines(len(dev), k))
                values[f"dev/whitened_on_{name}_k{k}"] = None if few else spearman(white[:, :k], self.index)
        return values | concentrated(maps["dev"])


class HeldOut:
    """Evaluates sentences that are never trained on, where there are no scored pairs.

    Names are stable: dev/alignment, dev/uniformity, dev/effective_rank and dev/variance_top{k}. Alignment is
    over two embeddings of each sentence with different dropout (Wang and Isola, arXiv:2005.10242; SimCSE,
    arXiv:2104.08821, section 2.3), uniformity over embeddings without. Neither says which checkpoint is best.
    """

    n, positives = None, None

    def measured(self, embedder: Embedder, data: SentenceData, step: int) -> Values:
        """The values by name, the same on every rank. Raises ValueError if all vectors are equal."""
        rows = data.held_out()
        x = summed(embedder.encode_rows(rows, share=place()))
        refuse_same(x, step)
        return from_first(lambda: self(x, *(dropped(embedder, rows, seed) for seed in (1, 2))))

    def said(self, values: Values) -> str:
        """The line for an evaluation."""
        return "  ".join(f"{name} {values[name]:.3f}" for name in ("dev/alignment", "dev/uniformity"))

    def __call__(self, x: NDArray[Any], left: Tensor, right: Tensor) -> Values:
        """The values by name, from vectors without dropout and two with it, (n, d) each."""
        embedded = torch.from_numpy(x)
        values: Values = {"dev/alignment": float(alignment(left, right))}
        values["dev/uniformity"] = float(uniformity(embedded))
        return values | concentrated(Postprocess(kind="whitening").fit(x))


@torch.no_grad()
def dropped(embedder: Embedder, rows: Ragged, seed: int) -> Tensor:
    """The embeddings of n sentences with the dropout of a seed: (n, d), on the host."""
    was_training, device = embedder.training, next(embedder.parameters()).device
    embedder.eval().encoder.train()
    reseed(seed)
    parts = [taken(rows, part)[0].to(device) for part in torch.arange(rows.n).split(DROPPED)]
    try:
        with without_autocast(device):
            return torch.cat(
                [embedder.finish(embedder.pool(part, seed_of(seed, i))).cpu() for i, part in enumerate(parts)]
            )
    finally:
        embedder.train(was_training)


def concentrated(fitted: Postprocess) -> Values:
    """`concentration` of the variances that a whitening found, under names of the dev set."""
    return {f"dev/{name}": v for name, v in concentration(torch.from_numpy(fitted.variances)).items()}


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

    The best has the highest dev/spearman after training began; it is written to `directory` at once. Without
    dev pairs (None) sentences held out of the corpus are evaluated, and the last checkpoint is the best.
    every: None for a twentieth of the run, 10 to 125 steps. Training stops early after `patience`
    evaluations without a new best (None: never). Raises ValueError, on every rank, if all evaluated sentences
    have the same vector.
    evaluating: the number of seconds that evaluations took so far.
    """

    evaluating = 0.0

    def __init__(
        self,
        *,
        dev: Sequence[Subset] | None,
        every: int | None,
        patience: int | None,
        directory: Path,
        say: Callable[[str], None],
    ) -> None:
        refuse(every, patience, held_out=dev is None)
        self.dev_set = HeldOut() if dev is None else DevSet(dev)
        self.asked, self.every, self.patience = every, every or 1, patience
        self.directory, self.say = directory, say
        self.rows: list[Row] = []
        self.since = 0  # the best checkpoint is of a later step

    def state_dict(self) -> dict[str, Any]:
        """The evaluations so far, for a run that resumes."""
        return {"rows": [tuple(row) for row in self.rows], "since": self.since}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the evaluations of a checkpoint."""
        self.rows = [Row(*row) for row in state_dict["rows"]]
        self.since = state_dict.get("since", 0)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Evaluate the untrained encoder: a broken evaluation shows at once."""
        steps = trainer.estimated_stepping_batches  # infinite for max_epochs=-1
        if self.asked is None:
            self.every = int(min(max(steps / EVALUATIONS, STEPS[0]), STEPS[1]))
        elif self.asked > steps and not self.rows:
            self.say(
                f"monitor.every={self.asked} is more than the {steps} steps: evaluated before and after only;"
                " null follows the length of the run"
            )
        if not self.rows:
            self.measure(trainer, pl_module)
        elif self.replaced():
            self.since = self.rows[-1].step
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
        values = self.dev_set.measured(module.embedder, trainer.datamodule, trainer.global_step)  # type: ignore[attr-defined]
        self.rows.append(row := Row(trainer.global_step, values))
        for logger in trainer.loggers:
            logger.log_metrics({name: v for name, v in row.values.items() if v is not None}, step=row.step)
        self.say(f"step {row.step}: {self.dev_set.said(row.values)}")
        if len(self.rows) > 1 and self.best is row and trainer.is_global_zero:
            checkpoint.save(module.embedder, self.directory, row.step)
        self.stop_in_vain(trainer)
        self.evaluating += time.perf_counter() - began

    def stop_in_vain(self, trainer: Trainer) -> None:
        """Stop training if the last `patience` evaluations were all below the best."""
        if self.patience is None or trainer.should_stop:
            return
        if len(self.rows) - 1 - self.rows.index(self.best) >= self.patience:
            trainer.should_stop = True
            self.say(f"training stops: no better score since step {self.best.step} (monitor.patience)")

    def replaced(self) -> bool:
        """Whether the checkpoint in the directory is not the best of these evaluations, as after a kill.

        Then it is of a step that will be repeated, and those of the steps before it are gone.
        """
        return bool(self.rows[1:]) and checkpoint.noted_step(self.directory) not in (None, self.best.step)

    @property
    def before(self) -> Row:
        """The evaluation of the untrained encoder."""
        return self.rows[0]

    @property
    def best(self) -> Row:
        """The evaluation of the best checkpoint.

        It is the first with the highest dev/spearman after step `since` or, without dev pairs, the last.
        """
        if isinstance(self.dev_set, HeldOut):
            return self.rows[-1]
        rows = [row for row in self.rows if row.step > self.since] or self.rows[-1:]
        return max(rows, key=lambda row: -np.inf if (s := row.values[METRIC]) is None else s)

    def summary(self) -> dict[str, Any]:
        """The content of `dev` in scores.json."""
        before, best, last = self.before, self.best, self.rows[-1]
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

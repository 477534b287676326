"""What goes wrong while training: a space that collapses."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from typing import Any

from lightning import Callback, LightningModule, Trainer

from whitenedcse.training.monitor import METRIC, Monitor, Row

log = logging.getLogger(__name__)
RANK, UNIFORMITY = "dev/effective_rank", "dev/uniformity"
VANISHED = 0.01  # of the loss of a guess: nothing left to learn. Good runs get there too, so dev must fall
FALLEN = 5.0  # points of dev/spearman below its best: good runs go up and down by 1 to 3
SHRUNK = 0.5  # of the effective rank before training: good quick starts keep 0.65, collapsed ones below
NEAR = 0.01  # of the uniformity before training, which nears 0 as all vectors near one; good runs lower it


class Health(Callback):
    """Warns of a collapse, with a line for each of three kinds, once in a run, from values logged anyway.

    It follows `monitor` among the callbacks, and examines its last two evaluations after each new one.
    "memorising": dev/spearman fell, and the loss of the batch has vanished. "collapse": dev/spearman fell, or
    never reached its value before training, and the dev sentences fill less than half of the axes that they
    filled then. "shrinking": they are a hundred times nearer to each other than then, even if they are
    ranked well. A loss that is not finite ends the run: training/trainer.py.
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
                if log.hasHandlers():  # of train.log; without any, logging would print it again
                    log.warning("step %d: %s", step, text)


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

"""Says once, in words, that training destroys what the encoder knew, and what to try."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from lightning import Callback, LightningModule, Trainer

from whitenedcse.training.monitor import METRIC, Monitor, Row

RANK = "dev/effective_rank"
VANISHED = 0.01  # of the loss of a guess: nothing left to learn. Good runs get there too, so dev must fall
FALLEN = 5.0  # points of dev/spearman below its best: good runs go up and down by 1 to 3
SHRUNK = 0.5  # of the effective rank before training: good quick starts keep 0.65, collapsed ones below


class Health(Callback):
    """A collapse alarm: a line for each of two kinds, once in a run, of what is measured anyway.

    After each judgement of `monitor`, which stands before it among the callbacks, it looks at the last two.
    "memorising": dev/spearman fell, and the loss of the batch has vanished. "collapse": it fell, or never was
    as good as before training, and the dev sentences fill less than half of the axes that they filled then.
    A loss that is not finite ends the run: training/safekeeping.py.
    """

    def __init__(self, monitor: Monitor, say: Callable[[str], None]) -> None:
        self.monitor, self.say = monitor, say
        self.said: list[str] = []
        self.seen = 0  # the step of the judgement that was looked at last
        self.guess = 0.0  # the loss of who knows nothing

    def state_dict(self) -> dict[str, Any]:
        """What was seen and said, for a run that goes on."""
        return {"said": self.said, "seen": self.seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """What was seen and said before."""
        self.said, self.seen = state_dict["said"], state_dict["seen"]

    def on_train_batch_end(  # noqa: PLR0913  Lightning's signature
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Look, if this step was judged."""
        self.guess = math.log(batch.n * trainer.world_size)
        self.look(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Look at the last judgement."""
        self.look(trainer)

    def look(self, trainer: Trainer) -> None:
        """Say what is wrong and was not said, if there is a new judgement; only then is the loss read."""
        step = self.monitor.rows[-1].step
        if step == self.seen:
            return
        self.seen = step
        metrics = trainer.callback_metrics
        loss = metrics.get("train/contrastive", metrics.get("train/loss"))
        for kind, text in found(self.monitor.rows, math.inf if loss is None else float(loss), self.guess):
            if kind not in self.said:
                self.said = [*self.said, kind]
                self.say(f"warning: step {step}: {text}")


def found(rows: list[Row], loss: float, guess: float) -> Iterator[tuple[str, str]]:
    """Judgements, the one before training first; the loss now and that of a guess -> kinds and texts."""
    before, last = rows[0], rows[1:][-2:]
    if len(last) < 2:
        return
    best = max(rows, key=score)
    fall = min(score(best) - score(row) for row in last)
    seen = f"{METRIC} fell from {score(best):.1f} (step {best.step}) to {score(last[-1]):.1f}"
    if fall > FALLEN and loss < VANISHED * guess:
        yield (
            "memorising",
            f"{seen} while train/loss vanished ({loss:.2g}; a guess has {guess:.2f}): what tells the "
            "sentences of a batch apart is not their meaning. Try a lower optim.lr, a higher "
            "loss.temperature, data.passes above 1, or sentences nearer to those that judge",
        )
    ranks = [row.values.get(RANK) or 0.0 for row in (before, *last)]
    if fall > (FALLEN if best.step else 0) and max(ranks[1:]) < SHRUNK * ranks[0]:
        yield (
            "collapse",
            f"{seen} and {RANK} from {ranks[0]:.1f} (step 0) to {ranks[-1]:.1f}: the space collapses. "
            "Try a lower optim.lr, a higher loss.temperature, or pooling=mean",
        )


def score(row: Row) -> float:
    """dev/spearman of a judgement, below all where it is undefined."""
    value = row.values[METRIC]
    return -math.inf if value is None else value

"""The Lightning module: a batch to a loss. Every choice arrives built; no config is read here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor

from whitenedcse.data.datamodule import Batch
from whitenedcse.model.embedder import Embedder
from whitenedcse.training.loss import MultiPositiveLoss
from whitenedcse.training.mlm import MaskedLanguageModel


class ContrastiveTraining(LightningModule):
    """Sentences -> views -> head -> loss, and an optional masked-language-model term.

    views: v, the anchor counted (the paper's "number of positives"; SimCSE is 2).
    optimizer: called with the parameters and `total_steps`; returns an optimiser and a schedule.
    """

    def __init__(
        self,
        *,
        embedder: Embedder,
        loss: MultiPositiveLoss,
        optimizer: Callable[..., Any],
        views: int,
        mlm: MaskedLanguageModel | None,
    ) -> None:
        super().__init__()
        self.embedder, self.loss, self.optimizer = embedder, loss, optimizer
        self.views, self.mlm = views, mlm
        self.train()  # Transformers loads in eval mode, and Lightning keeps it: dropout would be off

    def training_step(self, batch: Batch, index: int) -> Tensor:
        """The loss of one batch."""
        z, negatives = self.embedder.project(batch.positives, batch.negatives, n=batch.n, views=self.views)
        loss = contrastive = self.loss(z, negatives)
        if self.mlm is not None:
            masked = self.mlm(batch.positives)
            loss = contrastive + self.mlm.weight * masked
            self.log_dict({"train/contrastive": contrastive.detach(), "train/mlm": masked.detach()})
        self.log("train/loss", loss.detach(), prog_bar=True)
        return loss

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Optimiser and schedule, sized to this run."""
        steps = int(self.trainer.estimated_stepping_batches)
        optimizer, schedule = self.optimizer(self.parameters(), total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

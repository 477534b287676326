"""The optional masked-language-model term: it shares the encoder with the contrastive loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForMaskedLM

from whitenedcse import ragged
from whitenedcse.model.encoder import Encoder
from whitenedcse.ragged import Ragged


class MaskedLanguageModel(nn.Module):
    """The language-model head of the checkpoint (a fresh one where it has none) on the shared encoder.

    batch -> scalar cross-entropy over the masked tokens. Of the `probability` share of tokens chosen, 80 %
    become the mask token, 10 % a random one and 10 % stay (BERT's rule). Special tokens are never chosen.
    """

    def __init__(self, *, encoder: Encoder, weight: float, probability: float) -> None:
        super().__init__()
        if not (0 < probability < 1 and weight > 0):
            raise ValueError(
                f"mlm.probability={probability} must be in (0, 1) and mlm.weight={weight} above 0"
            )
        self.weight, self.probability = weight, probability
        self.tokenizer = encoder.tokenizer
        if encoder.source is None:
            model: Any = AutoModelForMaskedLM.from_config(encoder.backbone.config)
        else:
            model = AutoModelForMaskedLM.from_pretrained(encoder.source, trust_remote_code=False).float()
        setattr(model, model.base_model_prefix, encoder.backbone)
        model.tie_weights()
        self.model = model

    def forward(self, batch: Ragged) -> Tensor:
        """n sentences -> scalar."""
        ids, labels = self.masked(batch.ids)
        where = ragged.mask(batch)
        padded = ragged.pad(batch._replace(ids=ids), self.tokenizer.pad_token_id or 0)
        targets = ragged.pad(batch._replace(ids=labels), -100)
        return self.model(input_ids=padded, attention_mask=where.long(), labels=targets).loss

    def masked(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """(t,) -> (t,) ids with some replaced, (t,) labels with -100 where nothing was chosen."""
        special = torch.isin(ids, torch.tensor(self.tokenizer.all_special_ids, device=ids.device))
        draw, how = torch.rand(2, len(ids), device=ids.device)
        chosen = (draw < self.probability) & ~special
        labels = ids.masked_fill(~chosen, -100)
        words = torch.randint_like(ids, len(self.tokenizer))
        replaced = torch.where(chosen & (how < 0.9), words, ids)
        return replaced.masked_fill(chosen & (how < 0.8), self.tokenizer.mask_token_id), labels

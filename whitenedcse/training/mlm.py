"""The optional masked-language-model term: it shares the encoder with the contrastive loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForMaskedLM

from whitenedcse import ragged
from whitenedcse.model.encoder import Encoder
from whitenedcse.precision import full_precision
from whitenedcse.ragged import Ragged


class MaskedLanguageModel(nn.Module):
    """The language-model head of the checkpoint (a fresh one where it has none) on the shared encoder.

    batch -> scalar cross-entropy over the masked tokens. Of the `probability` share of tokens chosen, 80 %
    become the mask token, 10 % a random one and 10 % stay (BERT's rule). Special tokens are never chosen.
    """

    special: Tensor

    def __init__(self, *, encoder: Encoder, weight: float, probability: float) -> None:
        super().__init__()
        if not (0 < probability < 1 and weight > 0):
            raise ValueError(
                f"mlm.probability={probability} must be in (0, 1) and mlm.weight={weight} above 0"
            )
        if encoder.tokenizer.mask_token_id is None:
            raise ValueError(
                f"mlm.weight={weight}, but this encoder's tokenizer has no mask token, as that of a decoder;"
                " use mlm.weight=0"
            )
        self.weight, self.probability = weight, probability
        self.tokenizer = encoder.tokenizer
        special = torch.tensor(encoder.tokenizer.all_special_ids)
        self.register_buffer(
            "special", special, persistent=False
        )  # made on the device it would be waited for
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
        logits = self.model(input_ids=padded, attention_mask=where.long()).logits
        return cross_entropy(logits.flatten(0, 1), targets.flatten())

    def masked(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """(t,) -> (t,) ids with some replaced, (t,) labels with -100 where nothing was chosen."""
        special = torch.isin(ids, self.special)
        draw, how = torch.rand(2, len(ids), device=ids.device)
        chosen = (draw < self.probability) & ~special
        labels = ids.masked_fill(~chosen, -100)
        words = torch.randint_like(ids, len(self.tokenizer))
        replaced = torch.where(chosen & (how < 0.9), words, ids)
        return replaced.masked_fill(chosen & (how < 0.8), self.tokenizer.mask_token_id), labels


@full_precision
def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """(t, words), (t,) -> scalar in float32 at least, the mean over the labels that are not -100."""
    return F.cross_entropy(logits, labels)

"""Terms beside the loss: a penalty of covariances, and masked language modelling.

n: sentences    t: tokens of all sentences    d: width    C: the covariance of d channels over n sentences

[1] VICReg, arXiv:2105.04906    [2] Devlin et al., BERT, arXiv:1810.04805, section 3.1
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForMaskedLM

from whitenedcse import ragged
from whitenedcse.compute import autocast_as_now, cores, full_precision
from whitenedcse.model import packed
from whitenedcse.model.encoder import Encoder
from whitenedcse.ragged import Ragged
from whitenedcse.training.loss import Step, check_shapes
from whitenedcse.training.parallel import cut, encoded
from whitenedcse.whitening import covariance

IGNORED = -100  # the label of a token that is not predicted


@dataclass(frozen=True, kw_only=True)
class CovariancePenalty:
    """A soft form of whitening: squared covariances between channels, sum_{i != j} C_ij^2 / d ([1] Eq. 3, 4).

    Step -> scalar, averaged over the views of z, or over the encoder passes of x, those of hard negatives
    included. Covariances are divided by n - 1. The penalty of x grows with the fourth power of its scale.

    weight: the weight of the term in the loss. of: "x" for pooled vectors, or "z" for projected ones.
    """

    weight: float
    of: Literal["x", "z"] = "x"

    def __post_init__(self) -> None:
        if not 0 < self.weight < math.inf or self.of not in ("x", "z"):
            raise ValueError(f"terms: weight={self.weight} must be finite and above 0, of={self.of!r} x or z")

    def __call__(self, step: Step) -> Tensor:
        """The penalty of one step, before its weight."""
        vectors = step.x if self.of == "x" else step.z
        check_shapes(f"the covariance penalty of {self.of}", vectors, views=1)
        n, d = vectors.shape[-2:]
        c = covariance(vectors) * (n / (n - 1))
        return (c - c.diagonal(dim1=-2, dim2=-1).diag_embed()).square().sum(dim=(-2, -1)).mean() / d


class MaskedLanguageModel(nn.Module):
    """The language-model head of the checkpoint (a new one where it has none) on the shared encoder.

    n sentences as a `Ragged` -> scalar cross-entropy over the masked tokens. Of the share `probability` of
    tokens chosen, 80 % become the mask token, 10 % a random one and 10 % stay [2]. Special tokens are never
    chosen. BERT and RoBERTa are not padded; on a CPU words are predicted for chosen tokens alone.
    Raises ValueError for a tokenizer without a mask token.
    """

    special: Tensor

    def __init__(self, *, encoder: Encoder, weight: float, probability: float) -> None:
        super().__init__()
        if not (0 < probability < 1 and 0 < weight < math.inf):
            raise ValueError(f"mlm.probability={probability} must be in (0, 1), mlm.weight={weight} above 0")
        if encoder.tokenizer.mask_token_id is None:
            raise ValueError(f"mlm.weight={weight}, but this encoder's tokenizer has no mask token")
        self.weight, self.probability = weight, probability
        self.tokenizer = encoder.tokenizer
        special = torch.tensor(encoder.tokenizer.all_special_ids)
        self.register_buffer("special", special, persistent=False)  # made on a GPU it would be waited for
        if encoder.source is None:
            model: Any = AutoModelForMaskedLM.from_config(encoder.backbone.config)
        else:
            model = AutoModelForMaskedLM.from_pretrained(encoder.source, trust_remote_code=False).float()
        setattr(model, model.base_model_prefix, encoder.backbone)
        model.tie_weights()
        self.model, self.depth, self.attention = model, encoder.depth, encoder.attention

    def forward(self, batch: Ragged, seed: int = 0) -> Tensor:
        """The mean cross-entropy over the masked tokens of n sentences: a scalar; 0 if none is masked."""
        ids, labels = self.masked(batch.ids)
        count = (labels != IGNORED).sum().clamp_min(1)
        way = self.attention(ids.device)
        if way == "padded" or not packed.fits(self.model.base_model):
            padded = ragged.pad(batch._replace(ids=ids), self.tokenizer.pad_token_id or 0)
            logits = self.model(input_ids=padded, attention_mask=ragged.mask(batch).long()).logits
            return cross_entropy(ragged.unpad(logits, batch), labels) / count
        pieces, answers = [batch._replace(ids=ids)], [batch._replace(ids=labels)]
        parallel = way == "tiles" and cores() > 1
        if parallel:
            pieces, _ = cut(pieces[0], cores())
            answers, _ = cut(answers[0], cores())
        autocast = autocast_as_now(ids.device)

        def total(piece: Ragged, number: int) -> Tensor:
            with autocast():
                return self.total(piece, answers[number].ids, seed + number)

        sums = encoded(pieces, total, self.parameters(), parallel=parallel, keep=True)
        return sums.sum() / count

    def total(self, batch: Ragged, labels: Tensor, seed: int) -> Tensor:
        """The sum of the cross-entropies of a batch without padding: labels (t,) -> (1,)."""
        hidden = packed.hidden(self.model.base_model, batch, [self.depth], first=False, seed=seed)[0]
        if labels.device.type == "cpu":  # how many are chosen, another device would be waited for to learn
            chosen = labels != IGNORED
            hidden, labels = hidden[chosen], labels[chosen]
        model: Any = self.model
        logits = (model.cls if hasattr(model, "cls") else model.lm_head)(hidden)
        return cross_entropy(logits, labels).unsqueeze(0)

    def masked(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Token ids (t,) -> ids with some replaced (t,), and labels (t,), -100 where no token was chosen."""
        special = torch.isin(ids, self.special)
        draw, how = torch.rand(2, len(ids), device=ids.device)
        chosen = (draw < self.probability) & ~special
        labels = ids.masked_fill(~chosen, IGNORED)
        words = torch.randint_like(ids, len(self.tokenizer))
        replaced = torch.where(chosen & (how < 0.9), words, ids)
        return replaced.masked_fill(chosen & (how < 0.8), self.tokenizer.mask_token_id), labels


@full_precision
def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """The sum of the cross-entropies of the labels that are not -100: (t, words), (t,) int64 -> scalar."""
    return F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")

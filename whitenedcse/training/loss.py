"""Contrastive losses over several views: z -> a scalar.

v: views, the anchor first    n: sentences    d: width    h: hard negatives    tau: temperature
s_pij: cosine of anchor i with sentence j in view p, over tau

[1] WhitenedCSE, arXiv:2305.17746    [2] SimCSE, arXiv:2104.08821
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize

from whitenedcse.precision import full_precision

FORMS = ("l1", "l2", "l2_literal")
DENOMINATORS = ("view", "joint", "symmetric")


@dataclass(frozen=True, kw_only=True)
class MultiPositiveLoss:
    """Every view is a positive of the anchor view; the other sentences of the batch are negatives.

    z: (v, n, d), negatives: (h, d) or None -> scalar, averaged over sentences. v = 2 is SimCSE's loss.
    float32 vectors give float64's gradient to 1e-4 for losses down to 1e-34, where float32 itself ends.

    form: "l1" is the weighted sum of one cross-entropy for each positive ([1] Eq. 7).
        "l2" is log sum_p lambda_p e^(cross-entropy_p); with one denominator for all positives that is
        log(sum_p lambda_p e^(-s_p)) + log(sum_j e^(s_j)). It punishes the least similar positive most, as the
        text below [1] Eq. 8 asks. Eq. 8 as printed has a minus in front of that logarithm and so pushes
        positives apart: "l2_literal", refused unless `force_literal`.
    denominator: candidates are the sentences of the positive's own view ("view"), the same with every view
        also serving as anchor ("symmetric"), or the sentences of all views ("joint"; another positive of the
        same sentence is never a negative).
    weights: lambda of each positive, v - 1 numbers; a single one serves all.
    hard_negative_log_weight: added to the logit of an anchor's own hard negative, so 0 is weight 1, as in
        the code of [2].
    """

    form: str
    temperature: float
    weights: Sequence[float]
    denominator: str
    hard_negative_log_weight: float
    force_literal: bool

    def __post_init__(self) -> None:
        for name, allowed in {"form": FORMS, "denominator": DENOMINATORS}.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"loss.{name}={getattr(self, name)!r} is not one of {', '.join(allowed)}")
        if self.form == "l2_literal" and not self.force_literal:
            raise ValueError(
                "loss.form=l2_literal is Eq. 8 as printed and pushes positives apart; use l2, or "
                "loss.force_literal=true"
            )
        positive = len(self.weights) > 0 and all(0 < weight < math.inf for weight in self.weights)
        for name, sound, words in (
            ("temperature", 0 < self.temperature < math.inf, "finite and above 0"),
            ("weights", positive, "one or more positive numbers"),
            ("hard_negative_log_weight", math.isfinite(self.hard_negative_log_weight), "finite"),
        ):
            if not sound:
                raise ValueError(f"loss.{name}={getattr(self, name)} must be {words}")

    @full_precision
    def __call__(self, z: Tensor, negatives: Tensor | None = None) -> Tensor:
        """(v, n, d), (h, d) -> scalar, in float32 at least, whatever autocast says.

        Raises ValueError for fewer than two views or two sentences.
        """
        views, n, _ = z.shape
        if views < 2 or n < 2:
            raise ValueError(f"a contrastive loss needs 2 views of 2 sentences; got {views} of {n}")
        z = normalize(z, dim=-1)
        positives = z[1:]
        s = z[0] @ positives.mT / self.temperature  # (v - 1, n, n)
        extra = self.negative_logits(z[:1], negatives)
        loss = self.combined(s, extra)
        if self.denominator == "symmetric":
            loss = (loss + self.combined(s.mT, self.negative_logits(positives, negatives))) / 2
        return loss

    def combined(self, s: Tensor, extra: Tensor) -> Tensor:
        """(v - 1, n, n) logits, (v - 1 or 1, n, h) logits of hard negatives -> scalar.

        A cross-entropy is log(1 + e^(o - s_p)), o being the log of the sum over the other candidates. Written
        so, it and its gradient keep their digits however small they are; log(sum) - s_p does not.
        """
        positive = s.diagonal(dim1=-2, dim2=-1)  # (v - 1, n)
        cross_entropy = -logsigmoid(positive - self.others(s, extra))
        weights = self.lambdas(len(s))  # numbers of the host: a tensor of them would make a GPU wait
        if self.form == "l1":
            return torch.stack([w * c for w, c in zip(weights, cross_entropy, strict=True)]).sum(dim=0).mean()
        if self.form == "l2":
            return log_mean_exp(cross_entropy, weights).mean() + math.log(sum(weights))
        printed = [math.log(w) - c for w, c in zip(weights, cross_entropy + 2 * positive, strict=True)]
        return -torch.stack(printed).logsumexp(dim=0).mean()

    def others(self, s: Tensor, extra: Tensor) -> Tensor:
        """(v - 1, n, n), (v - 1 or 1, n, h) -> (v - 1 or 1, n): log of the sum over the other candidates."""
        own = torch.eye(s.shape[-1], dtype=torch.bool, device=s.device)
        rest = s.masked_fill(own, -math.inf)
        if self.denominator == "joint":
            rest = rest.movedim(0, 1).flatten(1).unsqueeze(0)  # (1, n, (v - 1) n)
        return torch.cat([rest, extra.expand(len(rest), -1, -1)], dim=-1).logsumexp(dim=-1)

    def negative_logits(self, anchors: Tensor, negatives: Tensor | None) -> Tensor:
        """(k, n, d), (h, d) -> (k, n, h): logits of the hard negatives, n of which belong to the anchors."""
        if negatives is None:
            return anchors.new_empty(*anchors.shape[:2], 0)
        logits = anchors @ normalize(negatives, dim=-1).mT / self.temperature
        own = torch.eye(*logits.shape[-2:], device=logits.device, dtype=logits.dtype)
        return logits + self.hard_negative_log_weight * own

    def lambdas(self, positives: int) -> list[float]:
        """The weight of each positive. Raises ValueError unless there is one weight, or one for each."""
        if len(self.weights) not in (1, positives):
            raise ValueError(
                f"loss.weights={list(self.weights)} for {positives} positives; give 1 or {positives}"
            )
        return list(self.weights) * (positives if len(self.weights) == 1 else 1)


def log_mean_exp(x: Tensor, weights: Sequence[float]) -> Tensor:
    """log of the weighted mean of e^x over the first axis, exact near 0 too: (p, n), p weights -> (n,)."""
    most, total = x.detach().amax(dim=0), sum(weights)
    below = [w / total * row.expm1() for w, row in zip(weights, x - most, strict=True)]  # -1 .. 0
    return most + torch.stack(below).sum(dim=0).log1p()

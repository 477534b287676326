"""The contrastive loss over several views, and what a loss or a term of one's own is.

v: views, the anchor first    n: sentences    d: width    h: hard negatives    tau: temperature
s_pij: cosine of anchor i with sentence j in view p, over tau

[1] WhitenedCSE, arXiv:2305.17746    [2] SimCSE, arXiv:2104.08821
[3] Kusupati et al., Matryoshka Representation Learning, arXiv:2205.13147
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize

from whitenedcse.compute import full_precision
from whitenedcse.data.datamodule import Batch

CHOICES = {"form": ("l1", "l2"), "denominator": ("view", "symmetric")}
# views z: (v, n, d), and hard negatives (h, d) or None -> scalar in float32 or float64, with gradient
Loss = Callable[[Tensor, Tensor | None], Tensor]


class Step(NamedTuple):
    """What a term beside the loss sees of one training step.

    batch: the sentences of this rank. x: (p + r, n, d), the pooled vectors of all ranks: p encoder passes,
    then r of hard negatives. z: (v, n, d), their projected views.
    """

    batch: Batch
    x: Tensor
    z: Tensor


class Term(Protocol):
    """A function of one training step that is added to the loss, `weight` times.

    >>> class Length:  # ContrastiveTraining(terms={"length": Length()}) adds it, and logs train/length
    ...     weight = 0.1
    ...     def __call__(self, step): return step.x.square().mean()
    """

    @property
    def weight(self) -> float:
        """What the term is multiplied by; also a plain attribute."""
        ...

    def __call__(self, step: Step) -> Tensor:
        """The term before its weight: a scalar in float32 or float64."""
        ...


@dataclass(frozen=True, kw_only=True)
class ContrastiveLoss:
    """Every other view of a sentence is a positive of its anchor, other sentences are negatives ([1] Eq. 7).

    z: (v, n, d), negatives: (h, d) or None -> scalar, averaged over sentences. v = 2 is SimCSE's loss [2].
    With the defaults it is these four lines; it is written otherwise because in float32 they round a small
    loss and its gradient to 0, where ours are float64's to 1e-4 for losses down to 1e-34.

    form: "l1" is the weighted sum of one cross-entropy for each positive. "l2" is log sum_p lambda_p
        e^(cross-entropy_p), which is above all that of the least similar positive, as the text below [1]
        Eq. 8 asks; Eq. 8 as printed has the opposite sign and would push positives apart.
    denominator: which sentences are candidates: those of the positive's own view ("view"), or the same and,
        averaged with it, each positive as the anchor and those of the anchor's view ("symmetric").
    weights: lambda of each positive, v - 1 numbers, or one number for all.
    hard_negative_log_weight: added to the logit of an anchor's own hard negative; 0 is weight 1, as in [2].

    >>> z = torch.randn(3, 8, 16)
    >>> u = normalize(z, dim=-1)
    >>> s = u[0] @ u[1:].mT / 0.05  # (v - 1, n, n)
    >>> cross_entropy = s.logsumexp(dim=-1) - s.diagonal(dim1=-2, dim2=-1)
    >>> textbook = cross_entropy.sum(dim=0).mean()
    >>> torch.allclose(ContrastiveLoss()(z), textbook)
    True
    """

    form: str = "l1"
    temperature: float = 0.05
    weights: Sequence[float] = (1.0,)
    denominator: str = "view"
    hard_negative_log_weight: float = 0.0

    def __post_init__(self) -> None:
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"loss.{name}={getattr(self, name)!r} is not one of {', '.join(allowed)}")
        for name in ("temperature", "weights"):
            check_positive(name, getattr(self, name))

    @full_precision
    def __call__(self, z: Tensor, negatives: Tensor | None = None) -> Tensor:
        """The loss of views z: (v, n, d), and hard negatives (h, d) if any -> scalar, at least float32."""
        check_shapes("a contrastive loss", z)
        z = normalize(z, dim=-1)
        positives = z[1:]
        s = z[0] @ positives.mT / self.temperature  # (v - 1, n, n)
        loss = self.combined(s, self.negative_logits(z[:1], negatives))
        if self.denominator == "symmetric":
            loss = (loss + self.combined(s.mT, self.negative_logits(positives, negatives))) / 2
        return loss

    def combined(self, s: Tensor, extra: Tensor) -> Tensor:
        """The loss from cosines over temperature: s (v - 1, n, n), extra (v - 1 or 1, n, h) -> scalar.

        A cross-entropy is log(1 + e^(o - s_p)), o being the log of the sum over the other candidates, which
        keeps its digits however small it is; log(sum) - s_p does not.
        """
        own = torch.eye(s.shape[-1], dtype=torch.bool, device=s.device)
        candidates = [s.masked_fill(own, -math.inf), extra.expand(len(s), -1, -1)]
        others = torch.cat(candidates, dim=-1).logsumexp(dim=-1)
        cross_entropy = -logsigmoid(s.diagonal(dim1=-2, dim2=-1) - others)  # (v - 1, n)
        weights = self.lambdas(len(s))  # numbers of the host: a tensor of them would make a GPU wait
        if self.form == "l1":
            return torch.stack([w * c for w, c in zip(weights, cross_entropy, strict=True)]).sum(dim=0).mean()
        return log_mean_exp(cross_entropy, weights).mean() + math.log(sum(weights))

    def negative_logits(self, anchors: Tensor, negatives: Tensor | None) -> Tensor:
        """The logits of the hard negatives for each anchor, the i-th being anchor i's own: (k, n, h)."""
        if negatives is None:
            return anchors.new_empty(*anchors.shape[:2], 0)
        logits = anchors @ normalize(negatives, dim=-1).mT / self.temperature
        own = torch.eye(*logits.shape[-2:], device=logits.device, dtype=logits.dtype)
        return logits + self.hard_negative_log_weight * own

    def lambdas(self, positives: int) -> list[float]:
        """The weight of each positive. Raises ValueError unless there is one weight, or one for each."""
        if len(self.weights) not in (1, positives):
            raise ValueError(f"loss.weights={list(self.weights)}: give 1, or {positives}, which is views - 1")
        return repeated(self.weights, positives)


@dataclass(frozen=True, kw_only=True)
class Matryoshka(ContrastiveLoss):
    """The loss of z plus that of x, the embedding that evaluation sees, and of prefixes of x.

    loss(z) + loss(x) + sum_m c_m loss(x[..., :m]); the last two terms are Eq. 1 of [3], with cosines in place
    of its classifiers. With embedding=encoder, x is the pooled output before the head: the head mixes the
    channels of x, so that prefixes of z tell nothing about those of x (results/matryoshka). The views of x
    are the encoder passes, not whitened. The other settings are those of `ContrastiveLoss`.

    dims: how many channels each prefix has. dim_weights: c_m, a number for each prefix, or one for all.

    >>> z = torch.eye(4).expand(2, 4, 4)
    >>> f"{Matryoshka(dims=[1])(z, x=torch.ones(2, 4, 4)):.4f}"  # z is perfect, x a guess among four: 2 log 4
    '2.7726'
    """

    dims: Sequence[int] = (64, 128, 256, 512)
    dim_weights: Sequence[float] = (1.0,)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("dims", "dim_weights"):
            check_positive(name, getattr(self, name))

    def check_width(self, d: int) -> None:
        """Raise ValueError for a prefix of more than d channels."""
        if max(self.dims) > d:
            raise ValueError(f"loss.dims={list(self.dims)}: {max(self.dims)} is more than the width {d}")

    def __call__(
        self,
        z: Tensor,
        negatives: Tensor | None = None,
        *,
        x: Tensor | None = None,
        x_negatives: Tensor | None = None,
    ) -> Tensor:
        """The loss of views z: (v, n, d), with prefixes of x: (p, n, d) -> scalar in float32 or float64.

        negatives, x_negatives: hard negatives (h, d) of z and of x, if any. Without x, prefixes are of z.
        """
        sizes = dict(zip(self.dims, repeated(self.dim_weights, len(self.dims)), strict=True))
        total = super().__call__(z, negatives)
        if x is None:
            x, x_negatives = z, negatives
        else:
            check_shapes("loss=matryoshka, which compares encoder passes,", x)
            sizes.setdefault(x.shape[-1], 1.0)
        self.check_width(x.shape[-1])
        for m, weight in sizes.items():
            cut = None if x_negatives is None else x_negatives[:, :m]
            total = total + weight * super().__call__(x[..., :m], cut)
        return total


def repeated(weights: Sequence[float], n: int) -> list[float]:
    """The weights as n numbers, of which one may stand for all."""
    return [weights[0]] * n if len(weights) == 1 else list(weights)


def check_positive(name: str, value: float | Sequence[float]) -> None:
    """Raise ValueError unless a setting of a loss is one or more finite numbers above 0."""
    numbers = value if isinstance(value, Sequence) else [value]
    if not numbers or not all(0 < number < math.inf for number in numbers):
        raise ValueError(f"loss.{name}={value} must be finite and above 0")


def check_shapes(name: str, z: Tensor, *, views: int = 2) -> None:
    """Raise ValueError unless z is (v, n, d), v at least `views` and n at least 2."""
    if z.ndim != 3 or len(z) < views or z.shape[1] < 2:
        raise ValueError(
            f"{name} needs a tensor of shape (views, sentences, width), at least {views} x 2 of them;"
            f" got {tuple(z.shape)}"
        )


def log_mean_exp(x: Tensor, weights: Sequence[float]) -> Tensor:
    """The log of the weighted mean of e^x over the first axis, precise near 0 too: (p, n) -> (n,)."""
    most, total = x.detach().amax(dim=0), sum(weights)
    below = [w / total * row.expm1() for w, row in zip(weights, x - most, strict=True)]  # -1 .. 0
    return most + torch.stack(below).sum(dim=0).log1p()

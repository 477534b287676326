"""The geometry of embeddings: alignment of positives, uniformity, isotropy, spectrum and effective rank.

v: views    n: sentences    d: width

[1] WhitenedCSE, arXiv:2305.17746    [2] Wang and Isola, arXiv:2005.10242
"""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import normalize

from whitenedcse.compute import at_least_float32, full_precision
from whitenedcse.evaluation.scores import Pairs

CHUNK = 256  # rows that uniformity compares with all others at a time, few enough for a processor's cache


def _unit(x: Tensor) -> Tensor:
    x = at_least_float32(x)
    return x / x.norm(dim=-1, keepdim=True)  # a zero row has no direction, and becomes NaN


@full_precision
def alignment(x: Tensor, y: Tensor) -> Tensor:
    """The mean squared distance on the unit sphere between positives, rows x[i] and y[i]: 0 to 4.

    (..., n, d), (..., n, d) -> (). Which pairs those are the caller says. Eq. 9 of [1], from [2].
    """
    return (_unit(x) - _unit(y)).square().sum(-1).mean()


@full_precision
def diversity(x: Tensor) -> Tensor:
    """The mean distance on the unit sphere between two views of a sentence: 0 to 2, 0 where they are equal.

    x: (v, n, d) -> (), over all sentences and pairs of different views. Figure 1d of [1] shows it.
    """
    views = normalize(at_least_float32(x), dim=-1).unbind()
    return torch.stack([(a - b).norm(dim=-1).mean() for a, b in combinations(views, 2)]).mean()


@full_precision
def uniformity(x: Tensor) -> Tensor:
    """The log of the mean of exp(-2 ||x_i - x_j||^2) over all i < j on the unit sphere; 0 when collapsed.

    (n, d) -> (), lower is more uniform, NaN for one row. Memory grows with CHUNK x n. Eq. 10 of [1], t = 2.
    """
    n, x, sums = len(x), _unit(x), []
    for start in range(0, n, CHUNK):
        terms = (x[start : start + CHUNK] @ x[start:].mT).mul_(4).sub_(4).exp_()  # between exp(-8) and 1
        own, later = terms.tensor_split([len(terms)], dim=1)
        sums.append(own.triu(1).sum(dtype=torch.float64) + later.sum(dtype=torch.float64))  # each pair once
    return (torch.stack(sums).sum() / (n * (n - 1) / 2)).log()


def mean_cosine(x: Tensor) -> Tensor:
    """The mean cosine of x[i] and x[j] over all i < j: (n, d) -> (); 1 if collapsed, near 0 if uniform."""
    x = _unit(x.double())
    return (x.sum(dim=0).square().sum() - len(x)) / (len(x) * (len(x) - 1))


def spread(x: Tensor) -> Tensor:
    """The mean squared distance from the mean over the mean squared length: (n, d) -> (), at most 1."""
    length = x.double().square().sum()
    return _centred(x).square().sum() / length if length else length


def _centred(x: Tensor) -> Tensor:
    x = x.double()
    x = x - x[:1]  # equal rows become exact zeros, which a rounded mean would not grant
    return x - x.mean(dim=0)


def spectrum(x: Tensor) -> Tensor:
    """The share of variance along each principal axis, the largest first: (n, d) -> (d,)."""
    x = _centred(x)
    values = torch.linalg.eigvalsh(x.mT @ x).clamp_min(0).flip(0)
    return values / values.sum() if values.any() else values


def effective_rank(shares: Tensor) -> Tensor:
    """exp of the entropy of a `spectrum`: (d,) -> (), 1 on a line to d (Roy and Vetterli, EUSIPCO 2007)."""
    return torch.special.entr(shares).sum().exp() if shares.any() else shares.sum()


def isotropy(shares: Tensor) -> Tensor:
    """IsoScore: 0 when all variance lies along one axis, 1 when every axis has the same variance.

    shares: the `spectrum` (d,) -> (). Its five steps (Rudman et al., arXiv:2108.07344) reduce to
    (1 / sum(p^2) - 1) / (d - 1), p being the spectrum: NaN where all rows are equal.
    """
    return (1 / shares.square().sum() - 1) / (len(shares) - 1) if shares.any() else shares.sum() * torch.nan


def concentration(variances: Tensor) -> dict[str, float | None]:
    """The `effective_rank`, and by variance_top{k} the share of the variance on the first k axes."""
    shares = variances / variances.sum() if variances.any() else variances
    held = shares.cumsum(0).tolist() if shares.any() else [None] * len(shares)
    powers = [2**i for i in range((len(shares) - 1).bit_length())]
    tops = {f"variance_top{k}": held[k - 1] for k in powers}
    return {"effective_rank": float(effective_rank(shares)), **tops}


def positives(pairs: Pairs) -> tuple[NDArray[np.intp], dict[str, Any]]:
    """The rows (2, m) of a task's pairs in the top fifth of its scale, and which those are, for scores.json.

    The scale is that of the subsets, or else from the lowest to the highest score of the task. Of 0 to 5 they
    are the pairs scored above 4, SimCSE's definition of positives. None where all scores are equal.
    """
    ends = [s.scale or (float(s.gold.min()), float(s.gold.max())) for s, _ in pairs]
    low, high = min(low for low, _ in ends), max(high for _, high in ends)
    above = (low + 4 * high) / 5
    rows = np.concatenate([rows[:, s.gold > above] for s, rows in pairs], axis=1)
    of = sum(len(s.gold) for s, _ in pairs)
    return rows, {"above": above, "scale": [low, high], "n": rows.shape[1], "of": of}


def described(x: Tensor, positives: Tensor) -> dict[str, Any]:
    """All measures of this module by name, None where undefined. x: (n, d), positives: (2, m) rows."""
    left, right = x[positives[0]], x[positives[1]]
    shares = spectrum(x)
    values = {
        "alignment": alignment(left, right) if len(left) else None,
        "uniformity": uniformity(x),
        "mean_cosine": mean_cosine(x),
        "isotropy": isotropy(shares),
        "effective_rank": effective_rank(shares),
    }
    numbers = {k: None if v is None or not v.isfinite() else float(v) for k, v in values.items()}
    return {**numbers, "spectrum": shares.tolist()}

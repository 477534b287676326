"""Inverse square roots of covariance matrices, and what is added to a covariance before its root is taken.

    w: channels that are whitened together

[1] WhitenedCSE, arXiv:2305.17746
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

LEAST = 1e-30  # the variance of numbers that are all zero


class Ridge(NamedTuple):
    """What is added to each variance before its root is taken: `eps` times the mean variance, and `floor`.

    Eq. 5 and 6 of [1] add nothing, and are undefined for a batch without full rank. The mean is over the
    channels that are whitened together, so inputs of any scale come out white. floor: an absolute variance
    ((..., 1, 1) or a number), for `above` and for heads that were trained with an absolute eps.
    """

    eps: float
    floor: float | Tensor = 0.0

    def of(self, variance: Tensor) -> Tensor:
        """(..., 1, 1) mean variance -> (..., 1, 1)."""
        return (self.eps * variance + self.floor).clamp_min(LEAST)

    def above(self, mean: Tensor) -> Ridge:
        """The same, but no smaller than the variance of 100 roundings of the mean: (..., w).

        It keeps the rounding of a constant channel from being blown up to variance 1. It shows only where a
        mean is 10,000 standard deviations (float32).
        """
        noise = 100 * torch.finfo(mean.dtype).eps
        return Ridge(self.eps, self.floor + (noise * mean.detach()).square().mean(-1)[..., None, None])


def mean_variance(cov: Tensor) -> Tensor:
    """(..., d, d) -> (..., 1, 1): the mean of the diagonal."""
    return cov.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]


def inverse_root(a: Tensor, r: Tensor) -> Tensor:
    """(a + r I) ** -1/2 of covariances a: (..., w, w) and r: (..., 1, 1), of any scale."""
    scale = (mean_variance(a) + r).detach()  # taken out, so that no square over- or underflows
    a, r = a / scale, r / scale
    root = _of_pairs if a.shape[-1] == 2 else _InverseSquareRoot.apply
    return root(a, r) * scale.rsqrt()


def _of_pairs(a: Tensor, r: Tensor) -> Tensor:
    """The same of (..., 2, 2) in closed form: A ** -1/2 = (adj A + s I) / (s t), s = sqrt(det A)."""
    x, b, y, r = a[..., 0, 0], a[..., 0, 1], a[..., 1, 1], r[..., 0, 0]
    # with A = a + r I: det a >= 0, so det A >= r (trace A - r), which rounding must not undercut
    s = ((x * y - b * b).clamp_min(0) + r * (x + y + r)).sqrt()
    t = (x + y + 2 * (r + s)).sqrt()
    entries = torch.stack((y + r + s, -b, -b, x + r + s), dim=-1) / (s * t).unsqueeze(-1)
    return entries.reshape(a.shape)


def eigh(a: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, ascending, and eigenvectors as columns; by the host where the device has no such thing."""
    values, vectors = torch.linalg.eigh(a.cpu() if a.device.type == "mps" else a)
    return values.to(a.device), vectors.to(a.device)


class _InverseSquareRoot(Function):
    """(A + r I) ** -1/2 of a symmetric A = U diag(l) U'.

    In the eigenbasis its derivative (p_i - p_j) / (l_i - l_j), p = 1 / s and s = sqrt(l + r), is written
    -p_i p_j / (s_i + s_j), which has no pole at equal eigenvalues. That by r is its trace.
    """

    @staticmethod
    def forward(ctx: Any, a: Tensor, r: Tensor) -> Tensor:
        eigenvalues, u = eigh(a)
        s = (eigenvalues.clamp_min(0).unsqueeze(-2) + r).sqrt()
        ctx.save_for_backward(u, s)
        return (u / s) @ u.mT

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        u, s = ctx.saved_tensors
        inner = (u.mT @ grad @ u) / (-s * s.mT * (s + s.mT))
        return u @ inner @ u.mT, inner.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]

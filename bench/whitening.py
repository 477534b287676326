"""Whitening engines against the official layer and autograd through eigh: python bench/whitening.py

Shuffled group whitening of (views, n, 768), forward and backward, one thread, float32. Variants take turns
and the medians of process CPU time are compared, so a busy machine disturbs all of them alike.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from whitenedcse.whitening import permutations, shuffled_group_whiten, whiten

EPS = 1e-5
CELLS = [(w, n) for w in (2, 3, 6, 24) for n in (64, 128, 512)] + [(768, 64), (768, 128), (768, 512)]


def official(x: Tensor, order: Tensor, width: int) -> Tensor:
    """The official layer in our words: a loop over views, no eps, the covariance a new leaf off the graph."""
    views = []
    for one, channels in zip(x, order, strict=True):
        groups = one[:, channels].reshape(len(one), -1, width).movedim(-2, 0)  # (g, n, w)
        groups = groups - groups.mean(dim=1, keepdim=True)
        cov = (groups.mT @ groups / len(one)).detach().requires_grad_()
        white = groups @ inverse_square_root(cov)
        views.append(white.movedim(0, -2).flatten(-2)[:, channels.argsort()])
    return torch.stack(views)


def autograd(x: Tensor, order: Tensor, width: int) -> Tensor:
    """All views at once, the gradient going through torch.linalg.eigh."""
    index = order.unsqueeze(-2).expand_as(x)
    groups = x.gather(-1, index).unflatten(-1, (-1, width)).movedim(-2, -3)
    groups = groups - groups.mean(dim=-2, keepdim=True)
    white = groups @ inverse_square_root(groups.mT @ groups / x.shape[-2], EPS)
    return white.movedim(-3, -2).flatten(-2).gather(-1, index.argsort(dim=-1))


def inverse_square_root(cov: Tensor, eps: float = 0.0) -> Tensor:
    """(..., w, w) -> (..., w, w), in the most direct way."""
    eigenvalues, u = torch.linalg.eigh(cov)
    return u @ torch.diag_embed((eigenvalues + eps).rsqrt()) @ u.mT


VARIANTS: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    "official": official,
    "autograd": autograd,
    "centre": lambda x, order, width: shuffled_group_whiten(x, order, width=width, eps=EPS),
    "full": lambda x, order, width: shuffled_group_whiten(x, order, width=width, eps=EPS, gradient="full"),
}


def milliseconds(width: int, n: int, views: int, budget: float) -> dict[str, float]:
    """Median CPU time of a forward and backward of each variant, about `budget` seconds for all."""
    x = torch.randn(views, n, 768) @ (torch.randn(768, 768) / 768**0.5)
    grad, order = torch.randn_like(x), permutations((views,), 768, device="cpu")
    times: dict[str, list[float]] = {name: [] for name in VARIANTS}
    started = time.process_time()
    while time.process_time() - started < budget or len(times["full"]) < 3:
        for name, variant in VARIANTS.items():
            leaf = x.clone().requires_grad_()
            start = time.process_time()
            variant(leaf, order, width).backward(grad)
            times[name].append(time.process_time() - start)
    return {name: 1e3 * statistics.median(values) for name, values in times.items()}


def error(width: int, n: int, condition: float) -> tuple[float, float]:
    """Of float32 against float64: the largest in the output, relative in the gradient (matrix constant)."""
    rank, exact = min(width, n - 1), torch.float64
    noise = torch.randn(n, rank, dtype=exact)
    sentences = n**0.5 * torch.linalg.qr(noise - noise.mean(dim=0)).Q
    spread = torch.logspace(0, -0.5 * math.log10(condition), rank, dtype=exact)
    axes = torch.linalg.qr(torch.randn(width, width, dtype=exact)).Q[:rank]
    x = (sentences * spread @ axes).float().requires_grad_()
    y, grad = whiten(x, eps=EPS), torch.randn(n, width)
    y.backward(grad)
    xc = (x.detach().double() - x.detach().double().mean(dim=0)).requires_grad_()
    y64 = xc @ inverse_square_root((xc.mT @ xc / n).detach(), EPS)
    y64.backward(grad.double())
    truth = xc.grad - xc.grad.mean(dim=0)
    return (y - y64).abs().max().item(), ((x.grad - truth).norm() / truth.norm()).item()


def main() -> None:
    """Two tables: time and error."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--views", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0, help="CPU time a row")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")  # n <= width is measured on purpose
    print("width    n |  official  autograd    centre      full [ms] | official/centre  autograd/full")
    for width, n in CELLS:
        ms = milliseconds(width, n, options.views, options.seconds)
        row = "".join(f"{value:10.2f}" for value in ms.values())
        gains = ms["official"] / ms["centre"], ms["autograd"] / ms["full"]
        print(f"{width:5d} {n:4d} |{row}        | {gains[0]:13.2f}x {gains[1]:13.2f}x", flush=True)
    print("\nfloat32 error at a condition: largest in the output, relative in the gradient; worst of 5")
    for width, n in ((2, 64), (24, 64), (768, 64)):
        for condition in (1e1, 1e3, 1e5):
            worst = map(max, zip(*(error(width, n, condition) for _ in range(5)), strict=True))
            print(f"{width:5d} {n:4d} {condition:8.0e} | " + "  ".join(f"{e:.1e}" for e in worst))


if __name__ == "__main__":
    main()

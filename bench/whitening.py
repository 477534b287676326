"""Whitening engines against the official layer and against autograd through eigh: python bench/whitening.py

Shuffled group whitening of (views, n, 768), forward and backward, one thread, float32. Variants take turns and the
medians of process CPU time are compared, so a busy machine disturbs all of them alike.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from whitenedcse.whitening import Gradient, permutations, shuffled_group_whiten, whiten

EPS = 1e-5
CELLS = [(w, n) for w in (2, 3, 6, 24) for n in (64, 128, 512)] + [(768, 64), (768, 128), (768, 512)]


def official(x: Tensor, order: Tensor, width: int) -> Tensor:
    """The official layer in our words: a loop over views, a matrix cut from the graph, no eps.

    Its eigendecomposition is taken of a new leaf that requires a gradient, so the backward of eigh runs for nothing.
    """
    views = []
    for one, channels in zip(x, order, strict=True):
        groups = one[:, channels].unflatten(-1, (-1, width)).movedim(-2, 0)  # (g, n, w)
        groups = groups - groups.mean(dim=1, keepdim=True)
        cov = (groups.mT @ groups / len(one)).detach().requires_grad_()
        white = groups @ inverse_square_root(cov)
        views.append(white.movedim(0, -2).flatten(-2)[:, channels.argsort()])
    return torch.stack(views)


def autograd_eigh(x: Tensor, order: Tensor, width: int) -> Tensor:
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


def ours(x: Tensor, order: Tensor, width: int, gradient: Gradient) -> Tensor:
    """The package."""
    return shuffled_group_whiten(x, order, width=width, eps=EPS, gradient=gradient)


VARIANTS: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    "official": official,
    "autograd": autograd_eigh,
    "centre": partial(ours, gradient="centre"),
    "full": partial(ours, gradient="full"),
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
    """Largest error in the value, relative error in the gradient, of float32 against float64 eigenvectors."""
    u = torch.linalg.qr(torch.randn(n, n, dtype=torch.float64))[0]
    spectrum = torch.logspace(
        0, -torch.tensor(condition).log10().item() / 2, min(width, n - 1), dtype=torch.float64
    )
    basis = torch.linalg.qr(torch.randn(width, width, dtype=torch.float64))[0][: len(spectrum)]
    x = (n**0.5 * u[:, : len(spectrum)] * spectrum @ basis).float()
    grad, results = torch.randn(n, width), []
    for leaf in (x.clone().requires_grad_(), x.double().requires_grad_()):
        if leaf.dtype == torch.float32:
            y = whiten(leaf, eps=EPS, gradient="centre")
        else:
            xc = leaf - leaf.mean(dim=0)
            y = xc @ inverse_square_root(xc.mT @ xc / n, EPS).detach()
        y.backward(grad.to(y))
        results.append((y.detach().double(), leaf.grad.double()))
    (y, g), (y64, g64) = results
    return (y - y64).abs().max().item(), ((g - g64).norm() / g64.norm()).item()


def main() -> None:
    """Two tables: time and error."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--views", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.5, help="CPU time a row")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")  # n <= width is measured on purpose
    print("width    n | official  autograd    centre      full  [ms] | official/centre  autograd/full")
    for width, n in CELLS:
        ms = milliseconds(width, n, options.views, options.seconds)
        row = "".join(f"{value:10.2f}" for value in ms.values())
        gains = ms["official"] / ms["centre"], ms["autograd"] / ms["full"]
        print(f"{width:5d} {n:4d} |{row}        | {gains[0]:13.2f}x {gains[1]:13.2f}x", flush=True)
    print("\nerror of float32 at a condition number: largest in y, relative in the gradient")
    for width, n in ((2, 64), (24, 64), (768, 64)):
        for condition in (1e1, 1e3, 1e5):
            print(
                f"{width:5d} {n:4d} {condition:8.0e} | "
                + "  ".join(f"{e:.1e}" for e in error(width, n, condition))
            )


if __name__ == "__main__":
    main()

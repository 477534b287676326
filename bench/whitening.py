"""Whitening engines against the official layer and autograd through eigh.

python -m bench.whitening [--quick]

Shuffled group whitening of (3, n, 768), forward and backward, float32. "official" is a re-creation in our
words of the official layer (constant matrix), "autograd" is the gradient of torch.linalg.eigh; "centre" and
"full" are ours with the same gradients; "iterative" (5 Newton-Schulz iterations) has the full gradient.
Then the error of ours in float32 against float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench import measure
from bench.measure import Variant
from whitenedcse.whitening import Root, iterated, random_permutations, shuffled_group_whiten, whiten, zca

EPS = 1e-5
CELLS = [(w, n) for w in (2, 3, 6, 24, 32) for n in (64, 128, 512)]
QUICK = [(2, 64), (6, 64), (24, 64), (32, 64)]
Layer = Callable[[Tensor, Tensor, int], Tensor]


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


def ours(root: Root) -> Layer:
    """Shuffled group whitening with the full gradient of a transform."""
    return lambda x, order, width: shuffled_group_whiten(
        x, order, width=width, eps=EPS, gradient="full", root=root
    )


LAYERS: dict[str, tuple[Layer, str | None]] = {
    "official": (official, None),
    "autograd": (autograd, None),
    "centre": (lambda x, order, width: shuffled_group_whiten(x, order, width=width, eps=EPS), "official"),
    "full": (ours(zca), "autograd"),
    "iterative": (ours(iterated), "full"),
}


def compared(width: int, n: int, options: Any) -> dict[str, Any]:
    """A forward and backward of each variant."""
    x = torch.randn(3, n, 768) @ (torch.randn(768, 768) / 768**0.5)
    grad, order = torch.randn_like(x), random_permutations((3,), 768, device="cpu")

    def once(layer: Layer) -> None:
        leaf = x.clone().requires_grad_()
        layer(leaf, order, width).backward(grad)

    variants = {name: Variant(partial(once, layer), peer) for name, (layer, peer) in LAYERS.items()}
    rounds = options.rounds or (5 if options.quick else 25)
    times = measure.interleaved(variants, rounds, options.threads)
    return measure.table(f"width {width}, n {n}", variants, times)


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
    cov = (xc.mT @ xc / n).detach()
    y64 = xc @ inverse_square_root(cov, EPS * cov.diagonal().mean().item())
    y64.backward(grad.double())
    truth = xc.grad - xc.grad.mean(dim=0)
    return (y - y64).abs().max().item(), ((x.grad - truth).norm() / truth.norm()).item()


def errors() -> dict[str, Any]:
    """Print the error at each condition of the covariance, worst of 5."""
    print("\nfloat32 error at a condition: largest in the output, relative in the gradient; worst of 5")
    rows = {}
    for width, n in ((2, 64), (24, 64)):
        for condition in (1e1, 1e3, 1e5):
            worst = list(map(max, zip(*(error(width, n, condition) for _ in range(5)), strict=True)))
            print(f"{width:5d} {n:4d} {condition:8.0e} | " + "  ".join(f"{e:.1e}" for e in worst))
            rows[f"{width} {n} {condition:.0e}"] = worst
    return {"work": "float32 error", "errors": rows}


def main() -> None:
    """Time, cell by cell, then error."""
    options = measure.parser(__doc__).parse_args()
    torch.manual_seed(0)
    here = measure.begin(options)
    cells = QUICK if options.quick else CELLS
    tables = [compared(width, n, options) for width, n in cells]
    measure.end(options, here, [*tables, errors()])


if __name__ == "__main__":
    main()

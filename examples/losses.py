"""A loss of your own, from Python: python losses.py ENCODER CORPUS

The same on the command line, beside this file: PYTHONPATH=. whitenedcse train +system=simcse head.dense=false
loss._target_=losses.VICReg +loss.covariance=2. These two need no negatives; both lost to SGW in results/lab.
"""

from argparse import ArgumentParser
from dataclasses import dataclass

import lightning
import torch
from torch import Tensor
from torch.nn.functional import normalize

from whitenedcse import ContrastiveTraining, Embedder, Pooling, ProjectionHead, SentenceData


@dataclass(frozen=True)
class VICReg:
    """Equal views, deviations of 1 or more, no covariances (arXiv:2105.04906; means as in its code)."""

    invariance: float = 25.0
    variance: float = 25.0
    covariance: float = 1.0

    def __call__(self, z: Tensor, negatives: Tensor | None = None) -> Tensor:  # z: (v, n, d) -> scalar
        """The average over the pairs of the anchor view with each of the others."""
        centred = z - z.mean(dim=1, keepdim=True)
        c = centred.mT @ centred / (z.shape[1] - 1)
        variances = c.diagonal(dim1=-2, dim2=-1)
        short = (1 - (variances + 1e-4).sqrt()).clamp_min(0).mean(dim=-1)
        mixed = (c - variances.diag_embed()).square().sum(dim=(-2, -1)) / z.shape[-1]
        each = self.variance * short / 2 + self.covariance * mixed
        return self.invariance * (z[0] - z[1:]).square().mean() + each[0] + each[1:].mean()


@dataclass(frozen=True)
class SIGReg:
    """LeJEPA: views near their centre, the batch distributed as N(0, I) (arXiv:2511.08544)."""

    share: float = 0.05
    directions: int = 1024

    def __call__(self, z: Tensor, negatives: Tensor | None = None) -> Tensor:  # z: (v, n, d) -> scalar
        """Epps and Pulley's statistic along random directions, by the trapezoidal rule as in its code."""
        u = normalize(torch.randn(z.shape[-1], self.directions, device=z.device, dtype=z.dtype), dim=0)
        t = torch.linspace(0, 3, 17, device=z.device, dtype=z.dtype)
        normal, angles = (-t.square() / 2).exp(), (z @ u).unsqueeze(-1) * t  # (v, n, k, 17)
        gap = (angles.cos().mean(dim=1) - normal).square() + angles.sin().mean(dim=1).square()
        statistic = 2 * z.shape[1] * torch.trapezoid(gap * normal, dx=3 / 16)
        return (1 - self.share) * (z - z.mean(dim=0)).square().mean() + self.share * statistic.mean()


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("encoder", help="a directory of Transformers, or a hub id such as bert-base-uncased")
    parser.add_argument("corpus", help='a file with a sentence a line, or "quickstart", 20,000 bundled ones')
    arguments = parser.parse_args()
    embedder = Embedder(encoder=arguments.encoder, pooling=Pooling("mean"))
    embedder.head = ProjectionHead(
        embedder.encoder.width, whitening=None, dense=False
    )  # after tanh, none is 1
    data = SentenceData(corpus=arguments.corpus, tokenizer=embedder.encoder.tokenizer, passes=2)
    trainer = lightning.Trainer(max_steps=50, use_distributed_sampler=False, logger=False)
    trainer.fit(ContrastiveTraining(embedder=embedder, loss=VICReg(), views=2), data)
    embedder.save("vicreg")

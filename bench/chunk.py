"""What the gradient cache (trainer.chunk) costs and saves: peak memory and time of a step by batch size.

python -m bench.chunk MODEL [--chunk 16] [--sizes 64,128,256]

Every measurement is a process of its own: it loads the encoder, takes one step on random tokens (two views,
full-width ZCA head, which wants twice as many sentences as channels) and reports its peak memory beyond what
it held before the step. Printed: the whole batch at once beside chunks, by number of sentences.
"""

import argparse
import resource
import subprocess
import sys
import time

import torch

from whitenedcse.data.datamodule import Batch
from whitenedcse.model.embedder import Embedder
from whitenedcse.model.head import ProjectionHead
from whitenedcse.model.whitener import WhiteningSettings
from whitenedcse.ragged import ragged
from whitenedcse.training.loss import ContrastiveLoss
from whitenedcse.training.module import ContrastiveTraining

LOSS = {"form": "l1", "temperature": 0.05, "weights": [1.0], "denominator": "view"}
TOKENS = 32  # of a sentence
ZCA = {"kind": "zca", "group_width": None, "eps": 1e-5}


def main() -> None:
    """One line a batch size."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--chunk", type=int, default=16)
    parser.add_argument("--sizes", default="64,128,256")
    parser.add_argument("--measure", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(*measured(arguments.model, arguments.measure, arguments.chunk or None))
        return
    for n in map(int, arguments.sizes.split(",")):
        mib, seconds = zip(*(alone(arguments.model, n, c) for c in (0, arguments.chunk)), strict=True)
        print(
            f"{n:5} sentences: {mib[0]:6.0f} MiB at once, {mib[1]:6.0f} MiB in chunks of {arguments.chunk};"
            f" time ratio {seconds[1] / seconds[0]:.2f}",
            flush=True,
        )


def alone(model: str, n: int, chunk: int) -> tuple[float, float]:
    """MiB and seconds of one step in a new process."""
    command = [sys.executable, "-m", "bench.chunk", model, "--measure", str(n), "--chunk", str(chunk)]
    mib, seconds = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return float(mib), float(seconds)


def measured(model: str, n: int, chunk: int | None) -> tuple[float, float]:
    """Peak MiB of a second step beyond what the process held before any, and its seconds."""
    plain = Embedder.load(model)
    head = ProjectionHead(
        width=plain.encoder.width,
        whitening=WhiteningSettings(**ZCA, gradient="centre", partition="view", momentum=0.99),
        dense=True,
        position="before",
    )
    module = ContrastiveTraining(
        embedder=Embedder(encoder=plain.encoder, pooling=plain.pooling, head=head, embedding="encoder"),
        loss=ContrastiveLoss(**LOSS, hard_negative_log_weight=0.0),
        optimizer=lambda parameters, total_steps: None,
        views=2,
        mlm=None,
        seed=0,
        gather=True,
        chunk=chunk,
    )
    module.log = lambda *arguments, **more: None  # there is no trainer
    rows = torch.randint(1000, 20000, (2 * n, TOKENS)).tolist()
    batch = Batch(ragged(rows), None, n)
    step(module, Batch(ragged(rows[:4] * 2), None, 4))  # what the first step allocates for good
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.perf_counter()
    step(module, batch)
    seconds = time.perf_counter() - began
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024, seconds


def step(module: ContrastiveTraining, batch: Batch) -> None:
    """Forward and backward."""
    module.training_step(batch, 0).backward()


if __name__ == "__main__":
    main()

"""What every layer pair, whitening, k curve and figure costs beyond one plain encode of the same sentences.

WHITENEDCSE_DATA=DATA python bench/evaluation.py MODEL [--rounds 3]

Each round encodes the sentences of the seven STS tasks (test, and train and dev of STS-B and SICK-R) plainly,
in this process, with the last layer alone, then runs `evaluate.py figures=mean` on them with an empty cache,
process start included. Printed: the wall time of each, their ratio, and the median ratio.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from whitenedcse.evaluation.suite import plan
from whitenedcse.evaluation.tasks import task
from whitenedcse.model.checkpoint import load
from whitenedcse.model.pooling import Pooling

TASKS = ("STS12", "STS13", "STS14", "STS15", "STS16", "STS-B", "SICK-R")
EVALUATE = Path(__file__).parents[1] / "evaluate.py"


def main() -> None:
    """One line a round, then the median."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    model = str(Path(arguments.model).resolve())
    sentences = plan({name: task(name) for name in TASKS}, ["target"], list).sentences
    embedder = load(model, Pooling(kind="mean", layers=[-1]) if plain(model) else None)
    print(f"{len(sentences):,} sentences", flush=True)
    ratios = []
    for _ in range(arguments.rounds):
        start = time.perf_counter()
        embedder.encode(sentences)
        encoded = time.perf_counter() - start
        judged = timed_evaluation(model)
        ratios.append(judged / encoded)
        print(f"encode {encoded:.1f} s   evaluate.py {judged:.1f} s   ratio {ratios[-1]:.2f}", flush=True)
    print(f"median ratio {statistics.median(ratios):.2f} of {len(ratios)} rounds")


def plain(model: str) -> bool:
    """Whether a checkpoint says nothing of its pooling."""
    return not any((Path(model) / name).exists() for name in ("modules.json", "whitenedcse.json", "best"))


def timed_evaluation(model: str) -> float:
    """Seconds of evaluate.py with every figure, from nothing."""
    pooling = ["pooling=mean"] if plain(model) else []
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(EVALUATE), f"model={model}", *pooling, "figures=mean"]
        environment = os.environ | {"WHITENEDCSE_CACHE": folder}
        start = time.perf_counter()
        subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
        return time.perf_counter() - start


if __name__ == "__main__":
    main()

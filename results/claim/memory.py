"""Whether an encoder remembers another one: python -m results.claim.memory MODEL ORIGIN

For each task the partial rank correlation of the two encoders' cosines, gold scores given: what they have in
common beyond what both know of meaning. Unrelated encoders have some too, by the words that sentences share:
results/pretrain/encoder is one to measure with. ORIGIN is pooled by the mean of the last layer, MODEL so and
by its first token. The gate of +experiment=mlm_minilm: at most 0.45 on the average. Beside it stands the
average of the seven STS tests, Spearman x 100, of the same cosines.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import rankdata, spearmanr
from transformers import AutoModel, AutoTokenizer

from results.claim.collect import TASKS
from results.claim.readouts import pairs, planes

GATE, LONGEST = 0.45, 128


def partial(a: NDArray[Any], b: NDArray[Any], given: NDArray[Any]) -> float:
    """The partial Spearman correlation of a and b with `given` held fixed, all (n,).

    >>> gold = np.arange(6.0)
    >>> round(partial(np.array([1.0, 0, 3, 2, 5, 4]), np.array([1.0, 0, 3, 2, 5, 4]), gold), 2)
    1.0
    """
    ab, ag, bg = np.corrcoef([rankdata(x) for x in (a, b, given)])[[0, 0, 1], [1, 2, 2]]
    return float((ab - ag * bg) / np.sqrt((1 - ag**2) * (1 - bg**2)))


def cosines(folder: str, texts: list[str], tests: dict[str, Any]) -> dict[str, dict[str, NDArray[Any]]]:
    """The cosines of an encoder's last layer by pooling and task."""
    model, tokenizer = AutoModel.from_pretrained(folder).float().eval(), AutoTokenizer.from_pretrained(folder)
    found = planes(model, tokenizer, texts, LONGEST)
    made: dict[str, dict[str, NDArray[Any]]] = {}
    for pooling in ("mean", "cls"):
        x = found[pooling, model.config.num_hidden_layers]
        x = x / np.linalg.norm(x, axis=1, keepdims=True)
        made[pooling] = {task: (x[left] * x[right]).sum(axis=1) for task, (left, right, _) in tests.items()}
    return made


def main(model: str, origin: str) -> None:
    """Print the correlations by task and their mean."""
    texts, tests = pairs()
    one, other = (cosines(folder, texts, tests) for folder in (model, origin))
    for pooling, mine in one.items():
        found = {task: partial(mine[task], other["mean"][task], tests[task][2]) for task in tests}
        mean = float(np.mean([*found.values()]))
        average = 100 * np.mean([spearmanr(mine[task], tests[task][2])[0] for task in TASKS])
        print(f"{pooling}: {mean:.2f} ({'passes' if mean <= GATE else 'fails'}; at most {GATE})", end="  ")
        print("  ".join(f"{task} {r:.2f}" for task, r in found.items()), f" seven tests {average:.2f}")


if __name__ == "__main__":
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    main(*sys.argv[1:3])

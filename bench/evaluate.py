"""Seven STS scores, against SentEval's procedure: python -m bench.evaluate [MODEL] [--quick] [--json FILE]

SentEval's, in our words: each subset of each task by itself, its pairs sorted by their numbers of words, 128
pairs at a time, each side padded and encoded by Transformers in float32 with eager attention, nothing encoded
less than as often as it occurs. Ours: the distinct sentences of all tasks, once. Both cut at 128 tokens and
end with Spearman's correlation over all pairs of a task. quick: STS13 and STS16. MODEL: see bench.encode.

--figures instead: what every layer pair, whitening, k curve and figure of evaluate.py costs, from nothing and
process start included, beyond one plain encode of the same sentences. Wall clock: keep the machine quiet.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr
from torch import Tensor
from transformers import AutoModel

from bench import measure
from bench.encode import embedder, parsed
from bench.measure import Variant
from whitenedcse.evaluation.scores import scores_of
from whitenedcse.evaluation.suite import plan
from whitenedcse.evaluation.tasks import Subset, subsets
from whitenedcse.model.embedder import Embedder

TASKS = ("STS12", "STS13", "STS14", "STS15", "STS16", "STS-B", "SICK-R")
QUICK = ("STS13", "STS16")
PAIRS = 128  # SentEval's default batch
EVALUATE = Path(__file__).parents[1] / "evaluate.py"

Tasks = Mapping[str, list[Subset]]
Scores = dict[str, float]


def main() -> None:
    """One table."""
    parser = measure.parser(__doc__)
    parser.add_argument(
        "--figures", action="store_true", help="evaluate.py with every figure against an encode"
    )
    options = parsed(parser)
    here = measure.begin(options)
    tasks = {name: subsets(name) for name in (QUICK if options.quick else TASKS)}
    work = figures if options.figures else scores
    measure.end(options, here, [work(options, embedder(options.model), tasks)])


def scores(options: argparse.Namespace, ours: Embedder, tasks: Tasks) -> dict[str, Any]:
    """SentEval's procedure and ours, and all scores of each."""
    got: dict[str, Scores] = {}
    ways = {
        "SentEval fp32": senteval(ours, tasks),
        "ours fp32": lambda: spearman(ours, tasks, bf16=False),
        "ours bf16": lambda: spearman(ours, tasks, bf16=True),
    }
    peer = "SentEval fp32"
    timed = {
        name: Variant(lambda name=name, way=way: got.update({name: way()}), None if name == peer else peer)
        for name, way in ways.items()
    }
    times = measure.interleaved(
        timed, options.rounds or (1 if options.quick else 5), options.threads, warm=False
    )
    pairs = sum(len(s.gold) for parts in tasks.values() for s in parts)
    result = measure.table(f"{len(tasks)} tasks, {pairs:,} pairs, from text to scores", timed, times)
    print(f"  {'Spearman x 100':34s}" + "".join(f"{task:>9s}" for task in tasks) + "   furthest")
    for name, row in got.items():
        far = max(abs(row[task] - got[peer][task]) for task in tasks)
        print(f"  {name:34s}" + "".join(f"{row[task]:9.4f}" for task in tasks) + f"{far:11.4f}", flush=True)
    return result | {"scores": got}


def spearman(ours: Embedder, tasks: Tasks, *, bf16: bool) -> Scores:
    """One encode of the distinct sentences, then each task's score over all its pairs."""
    sentences, index, *_ = plan(tasks)
    found = scores_of(ours.encode(sentences, bf16=bf16), index)
    return {name: task["all"] for name, task in found["tasks"].items()}


def senteval(ours: Embedder, tasks: Tasks) -> Callable[[], Scores]:
    """SentEval's way to the same scores, with weights and pooling of this embedder."""
    encoded = padded(ours)

    def run() -> Scores:
        paired = {
            name: [pair for s in parts for pair in cosines(encoded, s)] for name, parts in tasks.items()
        }
        return {name: 100 * spearmanr(*np.array(pairs).T).statistic for name, pairs in paired.items()}

    return run


def cosines(encoded: Callable[[list[str]], Tensor], subset: Subset) -> Iterator[tuple[float, float]]:
    """Gold and cosine of each pair, in SentEval's order and batches."""
    pairs = sorted(
        zip(subset.left, subset.right, subset.gold.tolist(), strict=True),
        key=lambda pair: (len(pair[0].split()), len(pair[1].split()), pair[2]),
    )
    for start in range(0, len(pairs), PAIRS):
        left, right, gold = zip(*pairs[start : start + PAIRS], strict=True)
        similarity = torch.cosine_similarity(encoded(list(left)), encoded(list(right)))
        yield from zip(gold, similarity.tolist(), strict=True)


def padded(ours: Embedder) -> Callable[[list[str]], Tensor]:
    """The same vectors by Transformers alone."""
    kind = ours.pooling.kind
    if ours.embedding != "encoder" or kind not in ("cls", "mean") or ours.pooling.layers != (-1,):
        raise SystemExit(f"{ours.embedding}, {ours.pooling}: only cls or mean of the last layer is compared")
    backbone = AutoModel.from_pretrained(ours.encoder.source, attn_implementation="eager").eval()
    settings = {"padding": True, "truncation": True, "max_length": ours.max_length, "return_tensors": "pt"}

    @torch.no_grad()
    def encoded(texts: list[str]) -> Tensor:
        batch = ours.encoder.tokenizer(texts, **settings)
        hidden, mask = backbone(**batch).last_hidden_state, batch["attention_mask"].unsqueeze(-1)
        return hidden[:, 0] if kind == "cls" else (hidden * mask).sum(dim=1) / mask.sum(dim=1)

    return encoded


def figures(options: argparse.Namespace, ours: Embedder, tasks: Tasks) -> dict[str, Any]:
    """evaluate.py with every figure, beside one encode of what it encodes."""
    sentences = plan(tasks, ["target"], list).sentences
    whole = "evaluate.py with figures"
    timed = {
        "one encode": Variant(lambda: ours.encode(sentences), whole),
        whole: Variant(lambda: evaluated(options.model, tasks)),
    }
    times = measure.interleaved(timed, options.rounds or 3, threads=0)  # 0: the wall clock
    return measure.table(f"{len(sentences):,} distinct sentences", timed, times)


def evaluated(model: str, tasks: Tasks) -> None:
    """evaluate.py with every figure, from nothing."""
    settings = [
        f"model={Path(model).resolve()}",
        f"tasks.names=[{','.join(tasks)}]",
        "pooling=mean",
        "figures=[layers,subsets,components]",
    ]
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"WHITENEDCSE_CACHE": folder}
        command = [sys.executable, str(EVALUATE), *settings]
        subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    main()

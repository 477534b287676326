"""Score every readout of an encoder: python -m results.claim.readouts RUN, or MODEL OUT

A readout is a pooling (cls, mean) of some layers, taken as it is or whitened afterwards: centred, rotated to
the principal axes of 4,096 Wikipedia sentences and divided by the root of their variances, the first k kept.
All layers of all sentences are encoded once. RUN is a run of train.py: RUN/best is scored, its weights are
then kept as float16, and RUN/claim.json is written; with OUT, that file of an encoder as it is. The encoding
is Transformers' own, in float32.

d: width    n: sentences    shrinkage: the share of the mean variance that is mixed into every variance
"""

from __future__ import annotations

import bz2
import json
import os
import sys
from itertools import islice, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import rankdata
from transformers import AutoModel, AutoTokenizer

from whitenedcse.evaluation.tasks import benchmark_pairs

TASKS = ("STS-B/dev", "STS12", "STS13", "STS14", "STS15", "STS16", "STS-B", "SICK-R")
POOLINGS, COMPONENTS, SHRINKAGES = ("cls", "mean"), (64, 128, 192, 256), (0.0, 0.3)
CORPUS, EVERY, LONGEST = 4096, 244, 32  # every 244th line of the million; its tokens, as in training
TOKENS = 4096  # of a batch
Array = NDArray[np.float32]


def corpus() -> list[str]:
    """The Wikipedia sentences that whitening is fitted to, the same for all encoders."""
    path = Path(os.environ["WHITENEDCSE_DATA"]) / "wiki/wiki1m_like.txt.bz2"
    kept = Path(os.environ.get("WHITENEDCSE_CACHE", "/tmp")) / f"claim-corpus-{CORPUS}-{EVERY}.txt"
    if not kept.is_file():
        with bz2.open(path, "rt") as file:
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text("".join(islice(file, 0, CORPUS * EVERY, EVERY)))
    return kept.read_text().splitlines()


def pairs() -> tuple[list[str], dict[str, tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.float64]]]]:
    """The distinct sentences of all tasks, and by task the rows of both sides and the gold scores."""
    folder = Path(os.environ["WHITENEDCSE_DATA"]) / "senteval"
    every = {task: benchmark_pairs(task, folder) for task in TASKS}
    rows: dict[str, int] = {}
    found = {}
    for task, subsets in every.items():
        left = [rows.setdefault(text, len(rows)) for s in subsets for text in s.left]
        right = [rows.setdefault(text, len(rows)) for s in subsets for text in s.right]
        found[task] = (np.array(left), np.array(right), np.concatenate([s.gold for s in subsets]))
    return list(rows), found


@torch.inference_mode()
def planes(model: Any, tokenizer: Any, texts: list[str], longest: int) -> dict[tuple[str, int], Array]:
    """The pooled vectors (n, d) by pooling and layer, layer 0 being the embeddings."""
    ids = tokenizer(texts, truncation=True, max_length=longest)["input_ids"]
    layers, d = model.config.num_hidden_layers + 1, model.config.hidden_size
    out = {key: np.empty((len(ids), d), np.float32) for key in product(POOLINGS, range(layers))}
    order, at = sorted(range(len(ids)), key=lambda i: len(ids[i])), 0
    while at < len(order):
        part = order[at : at + max(1, TOKENS // len(ids[order[min(at + 64, len(order) - 1)]]))]
        batch = tokenizer.pad({"input_ids": [ids[i] for i in part]}, return_tensors="pt")
        hidden = model(**batch, output_hidden_states=True).hidden_states
        mask = batch["attention_mask"].float()[:, :, None]
        for layer, x in enumerate(hidden):
            out["cls", layer][part] = x[:, 0].numpy()
            out["mean", layer][part] = ((x * mask).sum(1) / mask.sum(1)).numpy()
        at += len(part)
    return out


def sets(depth: int) -> dict[str, tuple[int, ...]]:
    """The layers that are averaged, by name."""
    last = depth
    return {
        "last": (last,),
        "first+last": (1, last),
        "embedding+last": (0, last),
        "second+last": (2, last),
        "embedding": (0,),
    }


def spearman(products: tuple[Array, Array, Array], gold: NDArray[np.float64]) -> float:
    """Spearman x 100 of cosines, given as inner products of both sides, and the squared lengths of each."""
    ab, aa, bb = products
    ranks = [rankdata(x) for x in (ab / np.sqrt(np.maximum(aa * bb, 1e-30)), gold)]
    return 100 * float(np.corrcoef(*ranks)[0, 1])


def scores(x: Array, tests: dict[str, Any], components: list[int]) -> list[dict[str, float]]:
    """For the first k columns of x, each k in turn: Spearman x 100 by task."""
    found: list[dict[str, float]] = [{} for _ in components]
    for task, (one, other, gold) in tests.items():
        a, b = x[one], x[other]
        sums = np.zeros((3, len(gold)), np.float64)
        for i, (low, high) in enumerate(zip([0, *components], components, strict=False)):
            p, q = a[:, low:high], b[:, low:high]
            sums += [np.einsum("nd,nd->n", u, v) for u, v in ((p, q), (p, p), (q, q))]
            found[i][task] = spearman((sums[0], sums[1], sums[2]), gold)
    return found


def readouts(texts: dict[Any, Array], wiki: dict[Any, Array], tests: dict[str, Any]) -> list[dict[str, Any]]:
    """Every readout with its scores."""
    depth, found = max(layer for _, layer in texts), []
    for pooling, (name, layers) in product(POOLINGS, sets(depth).items()):
        if pooling == "cls" and layers == (0,):
            continue  # the first token's embedding is the same in all sentences
        x, fit = (np.mean([every[pooling, layer] for layer in layers], axis=0) for every in (texts, wiki))
        d = x.shape[1]
        key = {"pooling": pooling, "layers": name, "shrinkage": None, "k": None}
        found.append(key | scores(x, tests, [d])[0])
        centre = fit.mean(axis=0, dtype=np.float64)
        variances, axes = np.linalg.eigh(np.cov(fit.T.astype(np.float64), bias=True))
        rotated = ((x - centre.astype(np.float32)) @ axes[:, ::-1].astype(np.float32)).astype(np.float32)
        for shrinkage in SHRINKAGES:
            mixed = (1 - shrinkage) * variances[::-1] + shrinkage * variances.mean()
            scale = np.where(variances[::-1] > 1e-12 * variances[-1], mixed.clip(1e-30) ** -0.5, 0)
            components = [k for k in COMPONENTS if k < d] + [d]
            for k, row in zip(
                components, scores(rotated * scale.astype(np.float32), tests, components), strict=True
            ):
                found.append(key | {"shrinkage": shrinkage, "k": k} | row)
    return found


def scored(folder: Path) -> list[dict[str, Any]]:
    """Every readout of the encoder in a folder."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).float().eval()
    texts, tests = pairs()
    longest = min(model.config.max_position_embeddings, 512, tokenizer.model_max_length)
    return readouts(
        planes(model, tokenizer, texts, longest), planes(model, tokenizer, corpus(), LONGEST), tests
    )


def halve(folder: Path) -> None:
    """Keep the weights in a folder as float16."""
    model = AutoModel.from_pretrained(folder)
    model.half().save_pretrained(folder)


def main(source: Path, out: Path | None) -> None:
    """Write what was found of a run, or of an encoder as it is."""
    best = source if out else source / "best"
    content = {"readouts": scored(best)}
    if out is None:
        halve(best)
    target = out or source / "claim.json"
    target.with_suffix(".draft").write_text(json.dumps(content))
    target.with_suffix(".draft").rename(target)


if __name__ == "__main__":
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None)

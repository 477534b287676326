"""A map fitted to what an embedder gives, and the embedder that ends with it.

d: width of the embedder    k: components kept

A map is fitted to the vectors before they are divided by their length, where an embedder does that last, and
the division then follows the map: so the whole end is one affine map and unit length, in every format.

[1] Su et al., BERT-whitening, arXiv:2103.15316
"""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np
import torch

from whitenedcse.data.corpus import Corpus, texts
from whitenedcse.evaluation.postprocess import Postprocess
from whitenedcse.model.embedder import Embedder
from whitenedcse.model.final import Final
from whitenedcse.pace import pace

BLOCK = 20_000  # sentences at a time
PROBE = "one text, by whose vector an embedder is known again"
ALIKE = 0.99  # cosine of two such vectors: bfloat16 and other machines stay above, other encoders below


def fitted(fit: Postprocess, embedder: Embedder, corpus: Corpus, *, bf16: bool = False) -> dict[str, Any]:
    """Fit a map to what the embedder gives for a corpus of any size; returns where it came from, for `save`.

    The moments of the parts are joined exactly, in float64; memory does not grow with the corpus.
    Raises ValueError for fewer than two texts.
    """
    plain, every = scaled(embedder, unit=False), texts(corpus)
    with pace("encoded") as more:
        while block := list(islice(every, BLOCK)):
            fit.partial_fit(plain.encode(block, bf16=bf16))
            more(len(block))
    n = fit.moments.n if fit.moments else 0
    if n < 2:
        raise ValueError(
            f"{corpus.path}: {n} texts that are not blank; a {fit.kind} is fitted to two or more"
        )
    return {"corpus": corpus.path, "texts": n, "sample": corpus.sample, "bf16": bf16, "probe": probe(plain)}


def whitened(embedder: Embedder, fit: Postprocess, k: int | None = None) -> Embedder:
    """The embedder, ending with `fit` and then, where it ended so before, with unit length.

    k: components kept, of a whitening or PCA; None for what `fit` keeps. [1], section 3.3.
    Raises ValueError for a map that was fitted to another embedder.
    """
    plain = scaled(embedder, unit=False)
    refuse_other(plain, fit)
    bias = fit.transform(np.zeros((1, plain.width)), k)[0]
    weight = fit.matrix[:, : len(bias)].T
    before, provenance = plain.final, {name: v for name, v in fit.provenance.items() if name != "probe"}
    if before is not None and before.weight is not None and before.bias is not None:
        bias = bias + weight @ before.bias.double().numpy(force=True)
        weight = weight @ before.weight.double().numpy(force=True)
        provenance["before"] = before.provenance
    unit = embedder.final is not None and embedder.final.unit
    provenance |= {"kind": fit.kind, "k": len(bias)}
    tensors = {"weight": torch.tensor(weight), "bias": torch.tensor(bias)}
    return ending(embedder, Final(**tensors, unit=unit, provenance=provenance))


def scaled(embedder: Embedder, *, unit: bool) -> Embedder:
    """The embedder with unit length at its end, or without."""
    last = embedder.final
    if unit == (last is not None and last.unit):
        return embedder
    parts: dict[str, Any] = {"weight": None, "bias": None, "provenance": {}}
    if last is not None:
        parts = {"weight": last.weight, "bias": last.bias, "provenance": last.provenance}
    return ending(embedder, Final(**parts, unit=unit) if unit or parts["weight"] is not None else None)


def ending(embedder: Embedder, final: Final | None) -> Embedder:
    """The same encoder, pooling and head, with another end, on the same device."""
    parts: dict[str, Any] = {"encoder": embedder.encoder, "pooling": embedder.pooling, "head": embedder.head}
    parts |= {"embedding": embedder.embedding, "max_length": embedder.max_length}
    device = next(embedder.parameters()).device
    return Embedder(**parts, final=final).eval().to(device)


def probe(embedder: Embedder) -> list[float]:
    """The embedder's vector of one text."""
    return [round(float(value), 6) for value in embedder.encode([PROBE])[0]]


def refuse_other(embedder: Embedder, fit: Postprocess) -> None:
    """Raise ValueError if `fit` was fitted to the vectors of another embedder."""
    if len(fit.mean) != embedder.width:
        raise ValueError(
            f"a map fitted to width {len(fit.mean)} does not go with an embedder of width {embedder.width}"
        )
    then, now = (np.asarray(x) for x in (fit.provenance.get("probe"), probe(embedder)))
    if then.shape == now.shape and then @ now < ALIKE * np.linalg.norm(then) * np.linalg.norm(now):
        raise ValueError(
            "this map was fitted to another embedder: its vector of a test sentence is another; fit it anew "
            "with whitenedcse whiten fit"
        )

"""A whitening or other transform, fitted to an embedder's vectors of a corpus, and as its last step.

n: texts    d: width of the embedder    k: components kept

Where an embedder ends with division by the length, a transform is fitted to the vectors before the division,
and the division follows it: so the last step is one affine transform and unit length, in every format.

[1] Su et al., BERT-whitening, arXiv:2103.15316
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from whitenedcse.console import pace, say
from whitenedcse.data.corpus import Corpus, blocks, rows
from whitenedcse.data.tokens import worded
from whitenedcse.evaluation.postprocess import POWERED, Postprocess, check_components
from whitenedcse.model.embedder import Embedder
from whitenedcse.model.head import Final
from whitenedcse.whitening import check_finite

BLOCK = 20_000  # rows at a time
ENOUGH = 10  # texts per component, as a rule of thumb
PROBE = "one text, by whose vector an embedder is known again"
ALIKE = 0.9995  # cosine of two such vectors: bfloat16 and other machines stay above, other encoders below
CURE = "fit it to more texts, or by whiten fit with --shrinkage, or keep fewer components (--dim)"


def fitted(fit: Postprocess, embedder: Embedder, corpus: Corpus, *, bf16: bool = False) -> dict[str, Any]:
    """Fit a transform to the embedder's vectors of a corpus; returns its provenance, for `Postprocess.save`.

    Texts without tokens of their own are left out; memory does not grow with the corpus.
    """
    plain = scaled(embedder, unit=False)
    with pace("encoded") as more:
        for block in blocks(rows(corpus), BLOCK):
            texts = list(worded((text for row in block for text in row), plain.encoder.tokenizer))
            x = plain.encode(texts, bf16=bf16, progress=more)
            check_finite(x, lambda row: f"the vector of {texts[row]!r:.80}")  # noqa: B023
            fit.partial_fit(x)
    if not fit.variances.any():
        raise ValueError(f"{corpus.path}: all texts have the same vector; {fit.kind} needs others")
    assert fit.moments
    n, kept = fit.moments.n, fit.k or len(fit.mean)
    if fit.kind in POWERED and not fit.shrinkage and n < ENOUGH * kept:
        few = f"{n:,} texts are few for {kept} components of this {fit.kind}"
        say(f"note: {few}, {ENOUGH} for each do; {CURE}")
    about = {"corpus": corpus.path, "texts": n, "sample": corpus.sample, "bf16": bf16, "probe": probe(plain)}
    return about | {"pooling": str(plain.pooling)} | ({"prompt": plain.prompt} if plain.prompt else {})


def whitened(
    embedder: Embedder | str | Path, fit: Postprocess | str | Path, k: int | None = None
) -> Embedder:
    """The embedder with the transform `fit` as its last step, then unit length if it had unit length before.

    embedder, fit: or their paths; of `fit` that of a file by `Postprocess.save` or `whitenedcse whiten fit`.
    k: the number of components of a whitening or PCA to keep ([1], section 3.3); None for `fit.k`.
    Raises ValueError for a transform that was fitted to another embedder, with another prompt, or to vectors
    of unit length where it comes before that step, and for more components than its texts can give.

    >>> from whitenedcse.model.scratch import small_bert
    >>> embedder = Embedder(encoder=small_bert(vocabulary=200, layers=1, width=8, heads=1))
    >>> texts = [f"the {one} {does}" for one in ("cat", "dog", "bird") for does in ("runs", "eats", "sits")]
    >>> white = whitened(embedder, Postprocess("whitening").fit(embedder.encode(texts)), k=4)
    >>> np.allclose(np.cov(white.encode(texts).T, bias=True), np.eye(4), atol=1e-3)
    True
    """
    embedder, fit = Embedder.of(embedder), Postprocess.load(fit) if isinstance(fit, str | Path) else fit
    check_fit(fit, scaled(embedder, unit=False), unit=embedder.unit)
    bias = fit.transform(np.zeros((1, len(fit.mean))), k)[0]
    if k is not None or fit.k is not None:
        check_components(len(bias), fit.most)
    weight = fit.matrix[:, : len(bias)].T
    if embedder.final is not None and embedder.final.tanh:
        raise ValueError(
            "these vectors end with a dense layer and tanh, to which no transform can be added here"
        )
    before, provenance = embedder.final, {name: v for name, v in fit.provenance.items() if name != "probe"}
    if before is not None and before.weight is not None and before.bias is not None:
        bias = bias + weight @ before.bias.double().numpy(force=True)
        weight = weight @ before.weight.double().numpy(force=True)
        provenance["before"] = before.provenance
    provenance |= {"kind": fit.kind, "k": len(bias)}
    tensors: Any = {"weight": torch.tensor(weight), "bias": torch.tensor(bias)}
    return embedder.replaced(final=Final(**tensors, unit=embedder.unit, provenance=provenance))


def scaled(embedder: Embedder, *, unit: bool) -> Embedder:
    """The embedder with or without unit length as its last step."""
    last = embedder.final
    if unit == embedder.unit:
        return embedder
    if last is None or last.weight is None:
        final = Final(weight=None, bias=None, unit=True, provenance={}) if unit else None
    else:
        same: dict[str, Any] = {"tanh": last.tanh, "provenance": last.provenance}
        final = Final(weight=last.weight, bias=last.bias, unit=unit, **same)
    return embedder.replaced(final=final)


def probe(embedder: Embedder) -> list[float]:
    """The embedder's vector of a fixed text, by which a transform recognises it."""
    return [round(float(value), 6) for value in embedder.encode([PROBE])[0]]


def check_fit(fit: Postprocess, embedder: Embedder, *, unit: bool) -> None:
    """Raise ValueError if `fit` was fitted to the vectors of another embedder, pooling or prompt.

    embedder: without unit length. unit: whether that follows; vectors of unit length are then others, too.
    """
    if len(fit.mean) != embedder.width:
        raise ValueError(
            f"a transform fitted to width {len(fit.mean)} does not fit an embedder of width {embedder.width}"
        )
    known = fit.provenance
    if "probe" in known:
        then, now = np.array(known["probe"]), np.array(probe(embedder))
        prompt = known.get("prompt", "")
        if prompt != embedder.prompt or then @ now < ALIKE * np.linalg.norm(then) * np.linalg.norm(now):
            raise ValueError(
                "this transform was fitted to another embedder: its vector of a test sentence differs "
                f"(fitted to pooling {known['pooling']} and prompt {prompt!r}, here {embedder.pooling} and "
                f"{embedder.prompt!r}); load the one that it was fitted to, or fit it again"
            )
    squared = fit.variances.sum() + fit.mean @ fit.mean  # the mean squared length of the rows fitted to
    if unit and fit.kind != "prefix" and abs(squared - 1) < 1e-5:
        raise ValueError(
            "this transform was fitted to vectors of unit length, and would come before that step: fit it by "
            "whitenedcse whiten fit, or to the vectors of embedder.replaced(final=None)"
        )

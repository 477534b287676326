"""An export as a directory, verified before it is renamed into place; an embedder's final whitening.

d: width of the embedder    k: components kept

Where an embedder ends with division by the length, a whitening is fitted to the vectors before the division,
and the division follows it: so the last step is one affine transform and unit length, in every format.

[1] Su et al., BERT-whitening, arXiv:2103.15316
"""

from __future__ import annotations

import os
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from whitenedcse.console import lacking
from whitenedcse.data.remote import published
from whitenedcse.evaluation.postprocess import Postprocess
from whitenedcse.evaluation.transforms import refuse_beyond
from whitenedcse.files import check_place, drafted, seal, write_json
from whitenedcse.model.checkpoint import EXPORT, settings
from whitenedcse.model.embedder import Embedder
from whitenedcse.model.head import Final
from whitenedcse.serving import card, layouts
from whitenedcse.whitening import check_finite

PROBE = "one text, by whose vector an embedder is known again"
ALIKE = 0.9995  # cosine of two such vectors: bfloat16 and other machines stay above, other encoders below


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
    embedder, fit = Embedder.of(embedder), Postprocess.of(fit)
    plain = scaled(embedder, unit=False)
    refuse_other(plain, fit)
    bias = fit.transform(np.zeros((1, plain.width)), k)[0]
    if k is not None or fit.k is not None:
        refuse_beyond(len(bias), fit.most)
    weight = fit.matrix[:, : len(bias)].T
    before, provenance = plain.final, {name: v for name, v in fit.provenance.items() if name != "probe"}
    if before is not None and before.tanh:
        raise ValueError(
            "these vectors end with a dense layer and tanh, to which no transform can be added here"
        )
    if before is not None and before.weight is not None and before.bias is not None:
        bias = bias + weight @ before.bias.double().numpy(force=True)
        weight = weight @ before.weight.double().numpy(force=True)
        provenance["before"] = before.provenance
    if embedder.unit:
        refuse_unit(fit)
    provenance |= {"kind": fit.kind, "k": len(bias)}
    tensors: Any = {"weight": torch.tensor(weight), "bias": torch.tensor(bias)}
    return embedder.replaced(final=Final(**tensors, unit=embedder.unit, provenance=provenance))


def refuse_unit(fit: Postprocess) -> None:
    """Raise ValueError for a transform that was fitted after unit length, where it comes before that step."""
    squared = fit.variances.sum() + fit.mean @ fit.mean  # the mean squared length of the rows fitted to
    if fit.kind != "prefix" and abs(squared - 1) < 1e-5:
        raise ValueError(
            "this transform was fitted to vectors of unit length, and would come before that step: fit it by "
            "whitenedcse whiten fit, or to the vectors of embedder.replaced(final=None)"
        )


def scaled(embedder: Embedder, *, unit: bool) -> Embedder:
    """The embedder with or without unit length as its last step."""
    last = embedder.final
    if unit == embedder.unit:
        return embedder
    parts: dict[str, Any] = {"weight": None, "bias": None, "provenance": {}}
    if last is not None:
        parts = {"weight": last.weight, "bias": last.bias, "tanh": last.tanh}
        parts["provenance"] = last.provenance
    kept = unit or parts["weight"] is not None
    return embedder.replaced(final=Final(**parts, unit=unit) if kept else None)


def probe(embedder: Embedder) -> list[float]:
    """The embedder's vector of a fixed text, by which a transform recognises it."""
    return [round(float(value), 6) for value in embedder.encode([PROBE])[0]]


def refuse_other(embedder: Embedder, fit: Postprocess) -> None:
    """Raise ValueError if `fit` was fitted to the vectors of another embedder, pooling or prompt."""
    if len(fit.mean) != embedder.width:
        raise ValueError(
            f"a transform fitted to width {len(fit.mean)} does not fit an embedder of width {embedder.width}"
        )
    before = fit.provenance.get("prompt", "") if "probe" in fit.provenance else embedder.prompt
    if before != embedder.prompt:
        raise ValueError(
            f"this transform was fitted to texts after the prompt {before!r}, and here it is "
            f"{embedder.prompt!r}; use --prompt {before!r}, or fit it again"
        )
    then, now = (np.asarray(x) for x in (fit.provenance.get("probe"), probe(embedder)))
    if then.shape == now.shape and then @ now < ALIKE * np.linalg.norm(then) * np.linalg.norm(now):
        pooled, here = fit.provenance.get("pooling"), str(embedder.pooling)
        if pooled not in (None, here):
            raise ValueError(
                f"this transform was fitted to vectors with the pooling {pooled}, and here it is {here}; load"
                " the encoder with the same --pooling and --layers, in Python Embedder.load(MODEL, pooling),"
                " or fit it again"
            )
        raise ValueError(
            "this transform was fitted to another embedder: its vector of a test sentence differs; load the "
            "one that it was fitted to, or fit another with whitenedcse whiten fit"
        )


class Wanted(NamedTuple):
    """What to write, and for the card: where the embedder was loaded from, a name, and a licence.

    The name is that under which the export will be known (None: the directory's), the licence that of its
    weights.
    """

    to: str
    source: str
    int8: bool = False
    verify: bool = True
    name: str | None = None
    license: str | None = None


def export(
    embedder: Embedder | str | Path, out: str | Path, to: str | Wanted, *, int8: bool = False
) -> dict[str, Any]:
    """Write an embedder for another library, whose vectors are compared; returns the content of export.json.

    embedder: or the path of one, e.g. of a run. out: a new directory, that of an earlier export, or a URL.
    to: "transformers", "sentence-transformers" or "onnx"; or a `whitenedcse.serving.exports.Wanted`, for a
    name and a licence in the model card. int8: weights of eight bits, for "onnx".
    Unit length is the last step of what `whitenedcse.serving.exports.scaled(embedder, unit=True)` returns.
    Raises ValueError, nothing written, for an embedder that the format cannot express, for an export whose
    vectors are not the embedder's, and where `out` holds anything but an earlier export.

    >>> export("outputs/none", "exported", "onxx")
    Traceback (most recent call last):
    ValueError: to='onxx' is not one of transformers, sentence-transformers, onnx
    """
    source = embedder.encoder.source if isinstance(embedder, Embedder) else embedder
    wanted = Wanted(to, str(source or "random weights")) if isinstance(to, str) else to
    wanted = wanted._replace(int8=wanted.int8 or int8)
    if wanted.to not in layouts.LAYOUTS:
        raise ValueError(f"to={wanted.to!r} is not one of {', '.join(layouts.LAYOUTS)}")
    with published(out, EXPORT) as path:
        refuse(path, wanted)
        embedder = Embedder.of(embedder)
        device, training = embedder.encoder.backbone.device, embedder.training
        try:
            return written(embedder.cpu().eval().merged(), path, wanted)
        finally:
            embedder.to(device).train(training)


def written(embedder: Embedder, out: Path, wanted: Wanted) -> dict[str, Any]:
    """Write an export of an embedder in eval mode, on the CPU, without adapters; see `export`."""
    layout = layouts.LAYOUTS[wanted.to]
    check_finite(embedder.encode([PROBE]), lambda _: f"the vector of {PROBE!r}")
    layout.refuse(embedder)
    with drafted(out) as draft:
        layout.write(embedder, draft)
        facts = {"whitenedcse": version("whitenedcse"), **wanted._asdict(), "prompt": embedder.prompt}
        facts |= quantised(embedder, draft) if wanted.int8 else {}
        if wanted.verify:
            texts = card.texts(embedder.encoder.tokenizer)
            difference = card.difference(embedder.encode(texts), layout.vectors(embedder, draft, texts))
            card.refuse(difference, card.LIMIT_INT8 if wanted.int8 else card.LIMIT)
            facts["difference"] = difference
        (draft / "README.md").write_text(
            card.text(embedder, facts, wanted.name or out.name), encoding="utf-8"
        )
        facts |= {"source": card.shown(wanted.source), "pooling": settings(embedder)["pooling"]}
        facts["unit"] = embedder.unit
        write_json(draft / EXPORT, facts)
        seal(draft)
    return facts


def is_export(out: Path) -> bool:
    """Whether a directory holds an export, and no run that was begun there."""
    return (out / EXPORT).is_file() and not (out / "config.yaml").exists()


def refuse(out: Path, wanted: Wanted) -> None:
    """Raise ValueError or OSError for an export that is impossible.

    That is where `out` is a file or holds anything but an earlier export, for int8 in another format than
    ONNX, and for a package that is not installed.
    """
    check_place(out)
    if out.exists() and not is_export(out) and any(out.iterdir()):
        raise ValueError(f"{out} holds something other than an export; choose another name")
    if wanted.int8 and wanted.to != "onnx":
        raise ValueError(f"int8 is for the format onnx, not for {wanted.to}")
    needed = ["onnx", "onnxscript"] if wanted.to == "onnx" else []
    if wanted.verify or wanted.int8:
        needed += {"onnx": ["onnxruntime"], "sentence-transformers": ["sentence_transformers"]}.get(
            wanted.to, []
        )
    if missing := [name for name in needed if find_spec(name) is None]:
        names = " and ".join(missing).replace("_", "-")
        without = (
            "" if {"onnx", "onnxscript"} & set(missing) or wanted.int8 else ", or do without: --no-verify"
        )
        raise ValueError(f"{lacking(f'--to {wanted.to}', names, wanted.to)}{without}")


def quantised(embedder: Embedder, draft: Path) -> dict[str, Any]:
    """Make an ONNX draft int8; returns Spearman x 100 on scored pairs, before and after."""
    name, sentences, index = card.pairs()
    before = card.spearman(layouts.onnx_vectors(embedder, draft, sentences), index)
    layouts.quantise(draft)
    after = card.spearman(layouts.onnx_vectors(embedder, draft, sentences), index)
    return {"pairs": name, "spearman": before, "spearman_int8": after}


def push(out: Path, repository: str) -> str:
    """Upload an export to a repository of the hub, created if needed; returns its address.

    It is public unless it was made private before. The account is that of `hf auth login` or $HF_TOKEN.
    Raises OSError where the hub refuses it.
    """
    from huggingface_hub import HfApi

    hub = HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
    try:
        address = hub.create_repo(repository, exist_ok=True)
        hub.upload_folder(
            repo_id=repository, folder_path=out, commit_message=f"whitenedcse export of {out.name}"
        )
    except Exception as error:  # the hub client raises a dozen kinds
        raise OSError(f"{out} is written, but {repository} was not pushed: {error}") from error
    return str(address)

"""Exports for Transformers, Sentence-Transformers and ONNX, whose vectors are compared with their source's.

n: texts    l: longest text    d: width    k: width of the export

For Transformers: encoder and tokenizer, which its user pools as the card says. For Sentence-Transformers: its
own modules from text to vector. For ONNX: one graph from token ids and mask to vector, for any batch size.
"""

from __future__ import annotations

import copy
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import linear, normalize

from whitenedcse.console import lacking
from whitenedcse.data.remote import published
from whitenedcse.files import check_place, drafted, seal, write_json
from whitenedcse.model import sentence_transformers
from whitenedcse.model.checkpoint import settings
from whitenedcse.model.embedder import Embedder
from whitenedcse.model.sentence_transformers import EXPORT
from whitenedcse.serving import card
from whitenedcse.whitening import check_finite

Vectors = NDArray[np.float32]
BATCH = 16  # texts that are padded together
LIMIT = 1e-5  # of a component, relative to the length of a vector longer than 1
PACKAGES = {"onnx": "onnx onnxscript onnxruntime", "sentence-transformers": "sentence_transformers"}
PLAIN = (
    "a plain Transformers directory holds the encoder alone, not the head or whitening that follow it; use "
    "--to sentence-transformers or --to onnx"
)


def export(
    embedder: Embedder | str | os.PathLike[str],
    out: str | Path,
    to: str,
    *,
    verify: bool = True,
    source: str | None = None,
) -> dict[str, Any]:
    """Write an embedder for another library; returns the content of export.json.

    embedder: or the path of one, e.g. of a run. out: a new directory, that of an earlier export, or a URL.
    to: "transformers", "sentence-transformers" or "onnx". verify: whether 64 texts are encoded by that
    library from the export, and the vectors compared. source: what the card calls the embedder. Unit length
    is the last step of what `whitenedcse.serving.fit.scaled(embedder, unit=True)` returns. Raises ValueError,
    nothing written, for an embedder that the format cannot express, for an export whose vectors are not the
    embedder's, and where `out` holds anything but an earlier export.

    >>> export("outputs/none", "exported", "onxx")
    Traceback (most recent call last):
    ValueError: to='onxx' is not one of transformers, sentence-transformers, onnx
    """
    if to not in FORMATS:
        raise ValueError(f"to={to!r} is not one of {', '.join(FORMATS)}")
    place = embedder.encoder.source if isinstance(embedder, Embedder) else embedder
    place = os.fspath(place) if isinstance(place, os.PathLike) else place  # of a Run, too
    source = str(source or place or "random weights")
    with published(out, EXPORT) as path:
        check_target(path, to, verify)
        embedder = Embedder.of(embedder)
        device, training = embedder.encoder.backbone.device, embedder.training
        try:
            return written(embedder.cpu().eval().merged(), path, to, verify, source)
        finally:
            embedder.to(device).train(training)


def check_target(out: Path, to: str, verify: bool) -> None:
    """Raise ValueError or OSError where no export can be written, or for a package that is not installed."""
    check_place(out)
    if out.exists() and not (out / EXPORT).is_file() and any(out.iterdir()):
        raise ValueError(f"{out} holds something other than an export; choose another name")
    needed = PACKAGES.get(to, "").split() if verify else []
    if missing := [name for name in needed if find_spec(name) is None]:
        raise lacking(f"--to {to}", " and ".join(missing), to, "or --no-verify")


def written(embedder: Embedder, out: Path, to: str, verify: bool, source: str) -> dict[str, Any]:
    """Write an export of an embedder in eval mode, on the CPU, without adapters; see `export`."""
    form = FORMATS[to]
    texts = TEXTS if embedder.encoder.tokenizer("")["input_ids"] else [text or "b" for text in TEXTS]
    x = embedder.encode(texts)
    check_finite(x, lambda row: f"the vector of {texts[row]!r:.50}")
    check_expressible(embedder, to)
    with drafted(out) as draft:
        form.write(embedder, draft)
        facts: dict[str, Any] = {"whitenedcse": version("whitenedcse"), "to": to, "source": source}
        facts |= {"name": out.name, "prompt": embedder.prompt, "unit": embedder.unit}
        facts |= {"pooling": settings(embedder)["pooling"]}
        if verify:
            facts["difference"] = difference(x, form.vectors(embedder, draft, texts))
            check_difference(facts["difference"])
        (draft / "README.md").write_text(card.text(embedder, facts), encoding="utf-8")
        write_json(draft / EXPORT, facts | {"source": card.shown(facts["source"])})
        seal(draft)
    return facts


def difference(a: NDArray[Any], b: NDArray[Any]) -> float:
    """The largest |a - b| of any number, relative to the length of a vector of a if that is above 1."""
    x, y = a.astype(np.float64), b.astype(np.float64)
    return float((np.abs(x - y).max(axis=1) / np.maximum(1, np.linalg.norm(x, axis=1))).max())


def check_difference(found: float) -> None:
    """Raise ValueError for a difference above LIMIT, and for NaN."""
    if not found <= LIMIT:
        raise ValueError(
            f"the export gives other vectors than its source: components differ by {found:.1e}, more than "
            f"{LIMIT:.0e}, on {len(TEXTS)} test texts; nothing was written. A whitening that keeps axes of "
            "almost no variance amplifies rounding: --dim keeps fewer; --no-verify does not compare"
        )


def check_expressible(embedder: Embedder, to: str) -> None:
    """Raise ValueError for steps that a format does not have; a graph of ONNX can express any embedding."""
    dense, pooling = sentence_transformers.dense_modules(embedder), embedder.pooling
    if to == "transformers" and len(dense) > (pooling.kind == "pooler"):
        raise ValueError(PLAIN)
    if to == "sentence-transformers" and not sentence_transformers.expressible(pooling):
        raise ValueError(
            f"Sentence-Transformers has no modules for pooling {pooling}: it takes the maximum of the "
            "layers' average, not the average of their maxima; use --to onnx"
        )


def write_transformers(embedder: Embedder, directory: Path) -> None:
    """Write weights as safetensors, config and tokenizer."""
    embedder.encoder.backbone.save_pretrained(directory)
    write_tokenizer(embedder, directory)


def write_tokenizer(embedder: Embedder, directory: Path) -> None:
    """Write the tokenizer, with truncation to the embedder's length."""
    tokenizer = copy.deepcopy(embedder.encoder.tokenizer)
    tokenizer.model_max_length = embedder.max_length
    tokenizer.save_pretrained(directory)


@torch.no_grad()
def transformers_vectors(embedder: Embedder, directory: Path, texts: Sequence[str]) -> Vectors:
    """The vectors (n, d) of n texts, by Transformers from the directory, pooled as the embedder is."""
    from transformers import AutoModel

    model, pooling = AutoModel.from_pretrained(directory).eval(), embedder.pooling
    rows = []
    for tokens in padded(embedder, directory, texts):
        out = model(**tokens, output_hidden_states=True)
        hidden = [out.hidden_states[layer] for layer in pooling.layers]
        pooler = pooling.kind == "pooler"
        x = out.pooler_output if pooler else pooled(pooling.kind, hidden, tokens["attention_mask"])
        rows.append(normalize(x, dim=-1) if embedder.unit else x)
    return torch.cat(rows).numpy()


def padded(embedder: Embedder, directory: Path, texts: Sequence[str]) -> Iterator[dict[str, Tensor]]:
    """Ids and mask (n, l) for 16 texts at a time, by an export's tokenizer, each after the prompt."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    for start in range(0, len(texts), BATCH):
        batch = [embedder.prompt + text for text in texts[start : start + BATCH]]
        tokens = tokenizer(batch, padding=True, truncation=True, return_tensors="pt")
        yield {name: tokens[name] for name in INPUTS}


def pooled(kind: str, hidden: Sequence[Tensor], mask: Tensor) -> Tensor:
    """Pooling of a padded batch as `Pooling` does it: layers of (n, l, d), mask (n, l) -> (n, d)."""
    x, real = torch.stack(list(hidden)), mask.unsqueeze(-1)
    if kind == "mean":
        return ((x * real).sum(-2) / real.sum(-2)).mean(0)
    if kind == "max":
        return x.masked_fill(real == 0, -torch.inf).amax(-2).mean(0)
    if kind == "last":
        ends = mask.sum(-1, keepdim=True).unsqueeze(-1) - 1  # padding is on the right
        return x.gather(-2, ends.expand_as(x[..., :1, :])).squeeze(-2).mean(0)
    return x[:, :, 0].mean(0)


def write_sentence_transformers(embedder: Embedder, directory: Path) -> None:
    """Write a Transformers directory with the modules of Sentence-Transformers beside it."""
    write_transformers(embedder, directory)
    sentence_transformers.write(embedder, directory)


def sentence_transformers_vectors(_: Embedder, directory: Path, texts: Sequence[str]) -> Vectors:
    """The vectors (n, k) of n texts, by Sentence-Transformers from the directory."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(directory), device="cpu")
    return np.asarray(model.encode(list(texts), batch_size=BATCH, show_progress_bar=False))


FILE = "model.onnx"
INPUTS, OUTPUT = ("input_ids", "attention_mask"), "sentence_embedding"
EXAMPLE = ["one", "and two more", "three of different lengths"]


class Graph(nn.Module):
    """An embedder in eval mode with Transformers' padded forward: ids and mask (n, l) -> (n, k)."""

    def __init__(self, embedder: Embedder) -> None:
        super().__init__()
        self.backbone = embedder.encoder.backbone
        self.kind, self.layers = embedder.pooling.kind, embedder.pooling.layers
        self.dense = sentence_transformers.dense_modules(embedder)
        self.unit = embedder.unit

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """The embeddings (n, k) of token ids (n, l) and mask (n, l)."""
        tokens = {"input_ids": input_ids, "attention_mask": attention_mask}
        hidden = self.backbone(**tokens, output_hidden_states=True).hidden_states
        x = pooled(self.kind, [hidden[layer] for layer in self.layers], attention_mask)
        for weight, bias, activation in self.dense:
            x = linear(x, weight, bias)
            x = torch.tanh(x) if activation == "tanh" else x
        return normalize(x, dim=-1) if self.unit else x


def write_onnx(embedder: Embedder, directory: Path) -> None:
    """Write the graph, with the tokenizer and the encoder's config beside it."""
    write_tokenizer(embedder, directory)
    embedder.encoder.backbone.config.save_pretrained(directory)
    graph = Graph(embedder).eval()
    example = next(padded(embedder, directory, EXAMPLE))
    sizes: Any = {0: torch.export.Dim("texts"), 1: torch.export.Dim("tokens")}
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it tells of packages that it does not need
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            graph,
            tuple(example[name] for name in INPUTS),
            directory / FILE,
            input_names=INPUTS,
            output_names=[OUTPUT],
            dynamic_shapes=dict.fromkeys(INPUTS, sizes),
            dynamo=True,
            external_data=False,  # unless they are too large for one file
            verbose=False,
        )


def onnx_vectors(embedder: Embedder, directory: Path, texts: Sequence[str]) -> Vectors:
    """The vectors (n, k) of n texts, by onnxruntime and the tokenizer in the directory."""
    import onnxruntime

    session = onnxruntime.InferenceSession(directory / FILE, providers=["CPUExecutionProvider"])
    batches = padded(embedder, directory, texts)
    return np.concatenate([session.run([OUTPUT], {k: v.numpy() for k, v in b.items()})[0] for b in batches])


class Format(NamedTuple):
    """A format: how it is written, and the vectors (n, k) that its library reads from it."""

    write: Callable[[Embedder, Path], None]
    vectors: Callable[[Embedder, Path, Sequence[str]], Vectors]


FORMATS = {
    "transformers": Format(write_transformers, transformers_vectors),
    "sentence-transformers": Format(write_sentence_transformers, sentence_transformers_vectors),
    "onnx": Format(write_onnx, onnx_vectors),
}

STORY = (
    "The harbour was quiet when the last ferry came in, and the two women who had waited since noon folded "
    "their umbrellas, counted the passengers twice and found that the boy with the green suitcase was not "
    "among them; so they asked the captain, who remembered him well, and learned that he had stepped off at "
    "the island to look for a dog."
)
SPECIAL = (
    "|.|a|I|?!|42|3.14159 and 2,718|ALL CAPITALS, AND A COMMA|don't, can't, won't; e.g. this"
    "|https://example.org/a?b=c&d=%20|naïve café, Ärger, øre, łódź|日本語の文です。"
    "|Это предложение по-русски.|جملة قصيرة"
    "|an emoji \U0001f642 and a flag \U0001f1eb\U0001f1ee|tabs\tand\nlines\nwithin"
    "|soft\u00adhyphen, zero\u200bwidth|e\u0301 is composed, é is not|[CLS] as text [SEP] and [MASK] too"
).split("|")
LONG = [
    "antidisestablishmentarianism" * 3,
    "word " * 9 + "word",
    *(" ".join([STORY] * n) for n in (2, 12, 40)),
]
TEXTS = [*SPECIAL, *LONG, *(" ".join(STORY.split()[start : 2 * start + 1]) for start in range(40))]  # 64

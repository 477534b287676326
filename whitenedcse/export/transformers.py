"""An export for Transformers alone: encoder and tokenizer, which its user pools as the card says.

n: texts    l: longest text    d: width    k: layers pooled
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import normalize

from whitenedcse.model.embedder import Embedder
from whitenedcse.model.sentence_transformers import dense_modules

BATCH = 16  # texts that are padded together


def refuse(embedder: Embedder) -> None:
    """Raise ValueError where more than pooling and unit length makes the embedding."""
    maps = len(dense_modules(embedder)) - (embedder.pooling.kind == "pooler")
    if maps:
        raise ValueError(
            "a plain Transformers directory holds the encoder alone, not the head or whitening that follow "
            "it; use --to sentence-transformers or --to onnx"
        )


def write(embedder: Embedder, directory: Path) -> None:
    """Write weights as safetensors, config and tokenizer."""
    embedder.encoder.backbone.save_pretrained(directory)
    write_tokenizer(embedder, directory)


def write_tokenizer(embedder: Embedder, directory: Path) -> None:
    """Write the tokenizer, told to cut texts where the embedder does."""
    tokenizer = copy.deepcopy(embedder.encoder.tokenizer)
    tokenizer.model_max_length = embedder.max_length
    tokenizer.save_pretrained(directory)


@torch.no_grad()
def vectors(embedder: Embedder, directory: Path, texts: Sequence[str]) -> NDArray[np.float32]:
    """n texts -> (n, d), by Transformers from the directory, pooled as the embedder is."""
    from transformers import AutoModel, AutoTokenizer

    model = AutoModel.from_pretrained(directory).eval()
    pooling, unit = embedder.pooling, embedder.final is not None and embedder.final.unit
    rows = []
    for tokens in padded(AutoTokenizer.from_pretrained(directory), texts):
        out = model(**tokens, output_hidden_states=True)
        hidden = [out.hidden_states[layer] for layer in pooling.layers]
        pooler = pooling.kind == "pooler"
        x = out.pooler_output if pooler else pooled(pooling.kind, hidden, tokens["attention_mask"])
        rows.append(normalize(x, dim=-1) if unit else x)
    return torch.cat(rows).numpy()


def padded(tokenizer: Callable[..., Any], texts: Sequence[str]) -> Iterator[dict[str, Tensor]]:
    """Token ids and mask (n, l) of 16 texts at a time, in order, cut where the tokenizer says."""
    for start in range(0, len(texts), BATCH):
        batch = list(texts[start : start + BATCH])
        tokens = tokenizer(batch, padding=True, truncation=True, return_tensors="pt")
        yield {name: tokens[name] for name in ("input_ids", "attention_mask")}


def pooled(kind: str, hidden: Sequence[Tensor], mask: Tensor) -> Tensor:
    """k times (n, l, d), (n, l) -> (n, d): as `Pooling` does it, of a padded batch."""
    x = torch.stack(list(hidden))
    real = mask.unsqueeze(-1)
    if kind == "mean":
        return ((x * real).sum(-2) / real.sum(-2)).mean(0)
    if kind == "max":
        return x.masked_fill(real == 0, -torch.inf).amax(-2).mean(0)
    if kind == "last":
        ends = mask.sum(-1, keepdim=True).unsqueeze(-1) - 1  # padding is on the right
        return x.gather(-2, ends.expand_as(x[..., :1, :])).squeeze(-2).mean(0)
    return x[:, :, 0].mean(0)

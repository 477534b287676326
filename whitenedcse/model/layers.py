"""The pooled vectors of sentences in several layers, all from one pass over each sentence.

    n: sentences    d: width    k: layers

Any average over layers, whitening or figure is then computed from these, without the encoder.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from whitenedcse.files import writing
from whitenedcse.model.embedder import Embedder, Manner, fill, ragged_ids
from whitenedcse.model.encoder import Encoder
from whitenedcse.model.head import Pooling, pooled
from whitenedcse.ragged import Ragged
from whitenedcse.ragged import rows as texts
from whitenedcse.whitening import check_finite


class Layers(NamedTuple):
    """The vectors of n sentences in k layers, by kind of pooling: (k, n, d) float32; lengths: (n,) tokens."""

    kinds: Mapping[str, NDArray[np.float32]]
    layers: tuple[int, ...]
    lengths: NDArray[np.int64]

    def write(self, folder: Path, sentences: Sequence[str]) -> None:
        """Write sentences.jsonl, and KIND.npy, (k, n, d), to a folder."""
        with writing(folder / "sentences.jsonl", "w") as stream:
            stream.writelines(json.dumps(text, ensure_ascii=False) + "\n" for text in sentences)
        for kind, x in self.kinds.items():
            with writing(folder / f"{kind}.npy") as stream:
                np.save(stream, x)

    def average(self, kind: str, layers: Sequence[int], extra: float = 0.0) -> NDArray[np.float32]:
        """The mean over `layers` of one kind of pooling, (n, d). Layers are counted from the embeddings.

        extra: what a mean over tokens divides by, in addition to their number (WhiteningBERT's code: 0.01).
        """
        x: NDArray[np.float32] = self.kinds[kind][[self.layers.index(layer) for layer in layers]].mean(axis=0)
        if kind == "mean" and extra:
            x *= (self.lengths / (self.lengths + extra)).astype(np.float32)[:, None]
        return x


def pooled_layers(
    encoder: Encoder,
    rows: Ragged,
    kinds: Sequence[str],
    layers: Sequence[int],
    manner: Manner | None = None,
) -> Layers:
    """The vectors of n sentences given as token ids; ValueError, naming the text, if they are not finite."""
    layers = sorted({encoder.layer(layer) for layer in layers})
    first = set(kinds) == {"cls"}
    shape = len(layers), rows.n, encoder.width
    out = {kind: np.empty(shape, np.float32) for kind in dict.fromkeys(kinds)}

    def reduced(batch: Ragged) -> list[Tensor]:
        hidden = encoder(batch, layers, first=first)
        bounds = torch.arange(batch.n + 1, device=hidden.device) if first else batch.offsets
        return [pooled(kind, hidden, bounds) for kind in out]

    fill(list(out.values()), rows, encoder, reduced, manner or Manner())
    for plane in (plane for x in out.values() for plane in x):
        check_finite(plane, lambda row: f"the vector of {encoder.tokenizer.decode(texts(rows)[row])!r:.80}")
    return Layers(out, tuple(layers), rows.lengths.numpy())


class Source(NamedTuple):
    """A model: its function from sentences to vectors, its pooling, and its embedder (None if unknown).

    prompt: the text that it puts before each sentence, as far as is known.
    """

    encode: Callable[[list[str]], Any]
    pooling: str
    embedder: Embedder | None = None
    prompt: str = ""

    @property
    def steps(self) -> str:
        """Its pooling in words, and the transform with which the model ends, if it has one."""
        final = self.embedder.final if self.embedder else None
        if final is None or final.bias is None:
            return self.pooling
        return f"{self.pooling}, then its own transform to {len(final.bias)} components"


class Wanted(NamedTuple):
    """Which vectors to compute: one array for each pooling, None being the model's own, head included.

    extra: see `Layers.average`. every: all layers are wanted, not only those that are averaged.
    """

    poolings: Sequence[Pooling | None]
    max_length: int | None = None
    extra: float = 0.0
    every: bool = False
    bf16: bool = False


def vectors(source: Source, sentences: list[str], wanted: Wanted) -> tuple[list[NDArray[Any]], Layers | None]:
    """n distinct sentences -> (n, d) for each pooling from one pass, and the layers they came from."""
    embedder = source.embedder
    if embedder is None:
        if any(wanted.poolings) or wanted.every:
            raise ValueError("this model gives no layers, which the protocol needs; give a checkpoint")
        return [np.asarray(source.encode(sentences))] * len(wanted.poolings), None
    encoder, poolings = embedder.encoder, [pooling or embedder.pooling for pooling in wanted.poolings]
    layers = {layer for pooling in poolings for layer in pooling.layers}
    layers |= set(range(encoder.depth + 1)) if wanted.every else set()
    limit = min(wanted.max_length or embedder.max_length, embedder.max_length)
    rows = ragged_ids(sentences, encoder.tokenizer, limit, embedder.prompt)
    manner = Manner(progress=True, bf16=wanted.bf16)
    got = pooled_layers(encoder, rows, [states_of(one) for one in poolings], sorted(layers), manner)
    made = {str(pooling): averaged(embedder, got, pooling, wanted.extra) for pooling in wanted.poolings}
    return [made[str(pooling)] for pooling in wanted.poolings], got


def states_of(pooling: Pooling) -> str:
    """The kind of vectors that a pooling is computed from: those of first tokens, "cls", for "pooler"."""
    return "cls" if pooling.kind == "pooler" else pooling.kind


@torch.inference_mode()
def averaged(embedder: Embedder, got: Layers, pooling: Pooling | None, extra: float) -> NDArray[np.float32]:
    """The mean over the pooling's layers, (n, d); for None the embedder's own, and all that follows it."""
    own = pooling or embedder.pooling
    x = got.average(states_of(own), [embedder.encoder.layer(layer) for layer in own.layers], extra)
    if pooling is not None:
        return x
    device = next(embedder.parameters()).device
    return embedder.finish(embedder.pooler(torch.from_numpy(x).to(device))).cpu().numpy()

"""The pooled vectors of sentences in several layers at once, encoded once and kept on disk.

    n: sentences    d: width    k: layers    a plane: one kind of pooling in one layer, (n, d)

Any average over layers, whitening or figure is then computed from planes, without the encoder.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, product
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from whitenedcse.data.sources import cache
from whitenedcse.data.tokens import identity, token_ids
from whitenedcse.model.checkpoint import settings
from whitenedcse.model.embedder import Embedder, Manner, fill
from whitenedcse.model.encoder import Encoder
from whitenedcse.model.head import Pooling, pooled
from whitenedcse.model.plane_files import Plane, draft, gathered, here, prune
from whitenedcse.ragged import Ragged, ragged
from whitenedcse.whitening import check_finite

Rows = Sequence[Sequence[int]]
Encode = Callable[[list[str]], Any]
FORMAT = 1
KEPT = 4 * 2**30  # bytes, up to which planes that nobody asked for are kept too


class Planes(NamedTuple):
    """The planes of n sentences, for some kinds of pooling and some layers.

    kinds: name -> k arrays (n, d) float32, `layers` in order. lengths: (n,) tokens in each sentence, special
    ones included. encoded: how many sentences this call had to encode. before: how many were on disk; the
    others have the tokens of one that was encoded.
    """

    kinds: Mapping[str, Sequence[NDArray[np.float32]]]
    layers: tuple[int, ...]
    lengths: NDArray[np.int64]
    encoded: int
    before: int

    def counts(self) -> str:
        """How many sentences were encoded now, before, and as another of the same tokens, in words."""
        same = len(self.lengths) - self.before - self.encoded
        parts = [f"{self.encoded:,}"]
        if self.before:
            parts.append(f"{self.before:,} {'was' if self.before == 1 else 'were'} encoded before")
        if same:
            parts.append(f"{same:,} {'has' if same == 1 else 'have'} the tokens of another")
        return "; ".join(parts)

    def average(self, kind: str, layers: Sequence[int], extra: float = 0.0) -> NDArray[np.float32]:
        """The mean over `layers` of one kind of pooling, (n, d). Layers are counted from the embeddings.

        extra: what a mean over tokens divides by, in addition to their number (WhiteningBERT's code: 0.01).
        """
        x = np.mean([self.kinds[kind][self.layers.index(layer)] for layer in layers], axis=0)
        if kind == "mean" and extra:
            x *= (self.lengths / (self.lengths + extra)).astype(np.float32)[:, None]
        return x


def planes(
    encoder: Encoder,
    rows: Rows,
    kinds: Sequence[str],
    layers: Sequence[int],
    *,
    more: tuple[Sequence[str], Sequence[int]] = ((), ()),
    bf16: bool = False,
) -> Planes:
    """The planes of n sentences given as token ids; only those that are not on disk are encoded.

    more: kinds and layers to keep besides of those that are encoded.

    Planes are kept in `sources.cache`, keyed by the encoder's weights, its precision (bf16: the backbone
    computes in bfloat16) and each sentence's ids, so other tasks, text handling or post-processing of the
    same encoder share them, as do any number of processes. Those that are damaged are encoded again.
    """
    layers = tuple(sorted({encoder.layer(layer) for layer in layers}))
    kinds = sorted(set(kinds))
    folder = cache() / "vectors" / (digest_of_encoder(encoder) + "-bf16" * bf16)
    names = np.array([digest(row) for row in rows])
    shards = here(folder, list(product(kinds, layers)), names)
    known = np.concatenate([shard.names for shard in shards] or [names[:0]])
    absent = names[~np.isin(names, known)]
    new = dict.fromkeys(absent)  # a repeated sentence once
    row_of = dict(zip(names.tolist(), rows, strict=True))
    missing = [row_of[name] for name in new]
    if missing:
        every = list(product(sorted({*kinds, *more[0]}), sorted({*layers, *more[1]})))
        with draft(folder, every, np.array(list(new)), encoder.width) as shard:
            encode(encoder, missing, shard.planes, Manner(progress=True, bf16=bf16))
            for plane in shard.planes.values():
                check_finite(plane, lambda i: f"the vector of {encoder.tokenizer.decode(missing[i])!r:.80}")
        shards.append(shard)
        prune(folder.parent, keep=folder)
    lengths = np.array([len(row) for row in rows])
    found = {kind: [gathered(shards, names, (kind, layer)) for layer in layers] for kind in kinds}
    return Planes(found, layers, lengths, len(missing), len(names) - len(absent))


def encode(encoder: Encoder, rows: Rows, out: Mapping[Plane, NDArray[np.float32]], manner: Manner) -> None:
    """Fill the arrays `out`, (n, d) for each kind and layer, with one forward pass over each sentence."""
    kinds, layers = list(dict.fromkeys(kind for kind, _ in out)), sorted({layer for _, layer in out})
    first = kinds == ["cls"]

    def reduced(batch: Ragged) -> list[Tensor]:
        hidden = encoder(batch, layers, first=first)
        bounds = torch.arange(batch.n + 1, device=hidden.device) if first else batch.offsets
        return list(chain.from_iterable(pooled(kind, hidden, bounds) for kind in kinds))

    fill(list(out.values()), ragged(rows), encoder, reduced, manner)


def digest_of_encoder(encoder: Encoder) -> str:
    """A digest of an encoder's architecture, weights and kind of device."""
    device = next(encoder.parameters()).device.type
    config = {k: v for k, v in encoder.backbone.config.to_dict().items() if not k.startswith("_")}
    content = hashlib.blake2b(json.dumps([FORMAT, device, config], default=str).encode(), digest_size=12)
    for name, tensor in sorted(encoder.backbone.state_dict().items()):
        content.update(name.encode())
        content.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return content.hexdigest()


def digest(row: Sequence[int]) -> str:
    """A digest of a sentence's token ids, which serves as its name."""
    return hashlib.blake2b(np.asarray(row, np.int32).tobytes(), digest_size=12).hexdigest()


def digest_of(embedder: Embedder) -> str:
    """A digest of all that decides an embedder's vectors: encoder, kind of device, tokenizer, settings."""
    parts = [digest_of_encoder(embedder.encoder), identity(embedder.encoder.tokenizer), settings(embedder)]
    content = hashlib.blake2b(json.dumps(parts).encode(), digest_size=16)
    final = embedder.final.state_dict().values() if embedder.final else ()
    for tensor in chain(embedder.head.state_dict().values(), final):
        content.update(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().data)  # bfloat16 too
    return content.hexdigest()


class Source(NamedTuple):
    """A model: its function from sentences to vectors, its pooling, and its embedder (None if unknown).

    prompt: the text that it puts before each sentence, as far as is known.
    """

    encode: Encode
    pooling: str
    embedder: Embedder | None = None
    prompt: str = ""

    @property
    def facts(self) -> dict[str, str]:
        """What scores.json says of it."""
        return {"pooling": self.pooling, "prompt": self.prompt}

    @property
    def steps(self) -> str:
        """Its pooling in words, and the transform with which the model ends, if it has one."""
        final = self.embedder.final if self.embedder else None
        if final is None or final.bias is None:
            return self.pooling
        return f"{self.pooling}, then its own transform to {len(final.bias)} components"


class Wanted(NamedTuple):
    """Which vectors to compute of the sentences.

    poolings: each gives an array; None is the model's own embedding, head included. max_length: in tokens,
    None for the model's own. extra: see `Planes.average`. every: the last pooling is wanted in all layers.
    keep: keep the other kinds of pooling in every layer too, for later evaluations of the encoder: as many
    kinds as KEPT allows, the usual ones first. bf16: the backbone computes in bfloat16.
    """

    poolings: Sequence[Pooling | None]
    max_length: int | None = None
    extra: float = 0.0
    every: bool = False
    keep: bool = False
    bf16: bool = False


def vectors(source: Source, sentences: list[str], wanted: Wanted) -> tuple[list[NDArray[Any]], Planes | None]:
    """n distinct sentences -> an (n, d) array for each pooling from one pass, and the planes it came from.

    The planes are None for a model without embedder. Raises ValueError where such a model would have to show
    its layers.
    """
    embedder = source.embedder
    if embedder is None:
        if any(wanted.poolings) or wanted.every:
            raise ValueError("this model gives no layers, which the protocol needs; give a checkpoint")
        if wanted.bf16:
            raise ValueError("bf16=true: this model chooses its precision itself; leave it out")
        return [np.asarray(source.encode(sentences))] * len(wanted.poolings), None
    encoder, poolings = embedder.encoder, [pooling or embedder.pooling for pooling in wanted.poolings]
    kinds = list(dict.fromkeys(map(plane_kind, poolings)))
    layers = {layer for pooling in poolings for layer in pooling.layers}
    depth = range(encoder.depth + 1)
    layers |= set(depth) if wanted.every else set()
    fit = KEPT // (4 * len(depth) * len(sentences) * encoder.width) if wanted.keep and sentences else 0
    usual = ["mean", "last", "max", "cls"] if encoder.causal else ["mean", "cls", "max", "last"]
    more = (usual[:fit], depth) if fit else ((), ())
    limit = min(wanted.max_length or embedder.max_length, embedder.max_length)
    rows = token_ids(sentences, encoder.tokenizer, limit, embedder.prompt)
    got = planes(encoder, rows, kinds, sorted(layers), more=more, bf16=wanted.bf16)
    made = {  # equal ones once
        str(pooling): averaged(
            embedder, got, pooling or embedder.pooling, wanted.extra, finish=pooling is None
        )
        for pooling in wanted.poolings
    }
    return [made[str(pooling)] for pooling in wanted.poolings], got


def plane_kind(pooling: Pooling) -> str:
    """The kind of plane that a pooling is computed from: that of first tokens, "cls", for "pooler"."""
    return "cls" if pooling.kind == "pooler" else pooling.kind


@torch.inference_mode()
def averaged(
    embedder: Embedder, got: Planes, pooling: Pooling, extra: float, finish: bool
) -> NDArray[np.float32]:
    """The mean over the pooling's layers, (n, d); with `finish` also what the embedder does after pooling."""
    layers = [embedder.encoder.layer(layer) for layer in pooling.layers]
    x = got.average(plane_kind(pooling), layers, extra)
    if not finish:
        return x
    device = next(embedder.parameters()).device
    return embedder.finish(embedder.pooler(torch.from_numpy(x).to(device))).cpu().numpy()

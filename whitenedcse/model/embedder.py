"""The embedder: encoder, pooling and head as one thing that turns sentences into vectors.

v: views    n: sentences    d: width
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from rich.progress import track
from torch import Tensor, nn

from whitenedcse.data.tokens import token_ids
from whitenedcse.model.encoder import Encoder
from whitenedcse.model.head import Head
from whitenedcse.model.pooling import Pooling
from whitenedcse.ragged import Ragged, ragged

EMBEDDINGS = ("encoder", "dense", "head")
BATCH_TOKENS = 8192  # of one batch while encoding, padding counted


class Embedder(nn.Module):
    """Sentences to vectors, in the one way that belongs to this checkpoint.

    embedding: what `embed` and `encode` give: the pooled "encoder" output (the official code's choice), the
        "dense" layer above it, or the whole "head" with its running whitening statistics.
    max_length: tokens a sentence is cut to by `encode`; None is the encoder's own limit.
    """

    def __init__(
        self, *, encoder: Encoder, pooling: Pooling, head: Head, embedding: str, max_length: int | None = None
    ) -> None:
        super().__init__()
        if embedding not in EMBEDDINGS:
            raise ValueError(f"embedding={embedding!r} is not one of {', '.join(EMBEDDINGS)}")
        if embedding == "dense" and head.linear is None:
            raise ValueError("embedding=dense, but this head has no dense layer")
        if pooling.kind == "pooler" and not encoder.has_pooler:
            raise ValueError(
                "pooling.kind=pooler, but this checkpoint has no pooler of its own; use cls or mean"
            )
        if pooling.kind != "pooler" and encoder.has_pooler:
            # it takes no part, and several devices would wait for its gradient
            encoder.backbone.pooler.requires_grad_(False)
        for layer in pooling.layers:
            encoder.layer(layer)  # raises for a layer that does not exist
        self.encoder, self.pooling, self.head, self.embedding = encoder, pooling, head, embedding
        self.max_length = min(max_length or encoder.max_length, encoder.max_length)

    def pool(self, batch: Ragged) -> Tensor:
        """n sentences -> x: (n, d), float32."""
        first = self.pooling.reads_first
        hidden = self.encoder(batch, self.pooling.layers, first=first)
        offsets = torch.arange(batch.n + 1, device=hidden.device) if first else batch.offsets
        return self.pooler(self.pooling(hidden, offsets))

    def pooler(self, x: Tensor) -> Tensor:
        """(n, d) -> (n, d): through the checkpoint's own pooler where that is the pooling."""
        return self.encoder.pooler(x) if self.pooling.kind == "pooler" else x

    def embed(self, batch: Ragged) -> Tensor:
        """n sentences -> (n, d): what evaluation sees. Call it in eval mode."""
        return self.finish(self.pool(batch))

    def finish(self, x: Tensor) -> Tensor:
        """Pooled x (n, d) -> the embedding (n, d): x itself, the dense layer above it, or the whole head."""
        if self.embedding == "encoder":
            return x
        return self.head.dense(x) if self.embedding == "dense" else self.head(x.unsqueeze(0)).squeeze(0)

    def project(self, x: Tensor, *, passes: int, views: int) -> tuple[Tensor, Tensor | None]:
        """Pooled x (p + r, n, d) -> z: (v, n, d), and (r n, d) of hard negatives if any: what the loss sees.

        The p encodings of a sentence, one for each encoder pass, serve the views in turn, so p = 1 with v
        views is the paper's cheap form: one encoding, v whitenings. Hard negatives form views of their own.
        """
        if not 1 <= passes <= views:
            raise ValueError(
                f"{passes} encoder passes for {views} views; there are from 1 to as many as views"
            )
        turns = [view % passes for view in range(views)] + list(range(passes, len(x)))
        z = self.head(x if turns == list(range(len(x))) else x[turns])
        return z[:views], None if len(x) == passes else z[views:].flatten(0, 1)

    def encode(
        self, sentences: Sequence[str], *, progress: bool = False, share: tuple[int, int] = (0, 1)
    ) -> NDArray[np.float32]:
        """n sentences -> (n, d) array, in the order given, in eval mode and without gradient.

        Sentences are sorted by length and run in batches of a fixed number of tokens.
        share: (r, m) encodes every m-th of these batches from the r-th on and leaves the rest zero, so that
        the results of m processes add up to one process's, bit for bit.
        Raises ValueError for anything that is not a text.
        """
        for row, sentence in enumerate(sentences):
            if not isinstance(sentence, str):
                raise ValueError(f"sentence {row} is {type(sentence).__name__} {sentence!r:.50}, not a text")
        rows = token_ids(sentences, self.encoder.tokenizer, self.max_length)
        return self.encode_rows(rows, progress=progress, share=share)

    @torch.inference_mode()
    def encode_rows(
        self, rows: Sequence[Sequence[int]], *, progress: bool = False, share: tuple[int, int] = (0, 1)
    ) -> NDArray[np.float32]:
        """n lists of token ids -> (n, d) array, as `encode`."""
        out = np.zeros((len(rows), self.encoder.width), dtype=np.float32)
        batches: Iterable[list[int]] = list(by_length([len(row) for row in rows]))[share[0] :: share[1]]
        batches = track(batches, "encoding", transient=True) if progress else batches
        was_training, device = self.training, next(self.parameters()).device
        self.eval()
        for batch in batches:
            tokens = ragged([rows[row] for row in batch]).to(device)
            out[batch] = self.embed(tokens).float().cpu().numpy()
        self.train(was_training)
        return out

    @staticmethod
    def load(path: str | Path) -> Embedder:
        """From a run directory, an export, an encoder in a local directory, or a hub id.

        A plain encoder says nothing of its pooling: it gets the paper's, the first token of the last layer.
        """
        from whitenedcse.model.checkpoint import load  # the two rooms know each other

        return load(str(path))


def by_length(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Row numbers in batches of similar length, the longest first, at most BATCH_TOKENS with padding."""
    batch: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        if batch and lengths[batch[0]] * (len(batch) + 1) > BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch

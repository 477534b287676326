"""The embedder: encoder, pooling and head as one thing that turns sentences into vectors.

v: views    n: sentences    d: width
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from whitenedcse.app.compute import alone, each, full_precision, without_autocast
from whitenedcse.app.terminal import pace
from whitenedcse.data.tokens import token_ids
from whitenedcse.model import checkpoint
from whitenedcse.model.backbones import causal
from whitenedcse.model.encoder import Encoder
from whitenedcse.model.head import Head
from whitenedcse.model.pooling import Final, Pooling
from whitenedcse.ragged import Ragged, concatenate, ragged, taken

EMBEDDINGS = ("encoder", "dense", "head")
BATCH_TOKENS = 1024  # of one batch while encoding, padding counted; 8192 leave a CPU's cache
BLOCK = 10_000  # sentences tokenised at a time
Progress = bool | Callable[[int], None]  # a `pace`, or who is told of so many distinct sentences more


class Embedder(nn.Module):
    """Sentences to vectors, in the one way that belongs to this checkpoint.

    embedding: what `embed` and `encode` give: the pooled "encoder" output (the official code's choice), the
        "dense" layer above it, or the whole "head" with its running whitening statistics.
    max_length: tokens a sentence is cut to by `encode`; None is the encoder's own limit.
    final: what comes after that, e.g. a whitening fitted to the trained encoder; None for nothing.
    """

    def __init__(
        self,
        *,
        encoder: Encoder,
        pooling: Pooling,
        head: Head,
        embedding: str,
        max_length: int | None = None,
        final: Final | None = None,
    ) -> None:
        super().__init__()
        if embedding not in EMBEDDINGS:
            raise ValueError(f"embedding={embedding!r} is not one of {', '.join(EMBEDDINGS)}")
        if embedding == "dense" and head.linear is None:
            raise ValueError("embedding=dense, but this head has no dense layer")
        refuse_pooling(pooling, encoder)
        if pooling.kind != "pooler" and encoder.has_pooler:
            # it takes no part, and several devices would wait for its gradient
            encoder.backbone.pooler.requires_grad_(False)
        self.encoder, self.pooling, self.head, self.embedding = encoder, pooling, head, embedding
        self.max_length = min(max_length or encoder.max_length, encoder.max_length)
        self.final, self.width = final, final.width(encoder.width) if final else encoder.width

    def pool(self, batch: Ragged, seed: int | None = None) -> Tensor:
        """n sentences -> x: (n, d), float32. seed: of dropout, where the encoder is `parallel`."""
        first = self.pooling.reads_first
        hidden = self.encoder(batch, self.pooling.layers, first=first, seed=seed)
        offsets = torch.arange(batch.n + 1, device=hidden.device) if first else batch.offsets
        return self.pooler(self.pooling(hidden, offsets))

    def pooler(self, x: Tensor) -> Tensor:
        """(n, d) -> (n, d): through the checkpoint's own pooler where that is the pooling."""
        return self.encoder.pooler(x) if self.pooling.kind == "pooler" else x

    @property
    def parallel(self) -> bool:
        """As of the encoder."""
        return self.encoder.parallel

    def embed(self, batch: Ragged) -> Tensor:
        """n sentences -> (n, k): what evaluation sees, at least in float32. Call it in eval mode."""
        return self.finish(self.pool(batch))

    @full_precision
    def finish(self, x: Tensor) -> Tensor:
        """Pooled x (n, d) -> the embedding (n, k): x, the dense layer above it, or the head; then `final`."""
        if self.embedding != "encoder":
            x = self.head.dense(x) if self.embedding == "dense" else self.head(x.unsqueeze(0)).squeeze(0)
        return x if self.final is None else self.final(x)

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
        self,
        sentences: Sequence[str],
        *,
        progress: Progress = False,
        share: tuple[int, int] = (0, 1),
        bf16: bool = False,
    ) -> NDArray[np.float32]:
        """n sentences -> (n, k) array, in the order given, in eval mode and without gradient; k is `width`.

        Equal sentences are encoded once, all of them sorted by length, in batches of a number of tokens.
        share: (r, m) encodes every m-th of these batches from the r-th on and leaves the rest zero, so that
        the results of m processes add up to one process's, bit for bit.
        bf16: the backbone computes in bfloat16; pooling and head stay in float32.
        Raises ValueError for anything that is not a text.
        """
        if isinstance(sentences, str):
            raise ValueError(
                f"sentences={sentences!r:.50} is one text; give a list of them: [{sentences!r:.50}]"
            )
        for row, sentence in enumerate(sentences):
            if not isinstance(sentence, str):
                raise ValueError(f"sentence {row} is {type(sentence).__name__} {sentence!r:.50}, not a text")
        rows = ragged_ids(sentences, self.encoder.tokenizer, self.max_length)
        return self.encode_rows(rows, progress=progress, share=share, bf16=bf16)

    def encode_rows(
        self,
        rows: Ragged | Sequence[Sequence[int]],
        *,
        progress: Progress = False,
        share: tuple[int, int] = (0, 1),
        bf16: bool = False,
    ) -> NDArray[np.float32]:
        """n lists of token ids, or these laid end to end -> (n, d) array, as `encode`."""
        rows = rows if isinstance(rows, Ragged) else ragged(rows)
        out = np.zeros((rows.n, self.width), dtype=np.float32)
        fill([out], rows, self, lambda batch: [self.embed(batch)], Manner(progress, share, bf16))
        return out

    @staticmethod
    def load(path: str | Path, pooling: Pooling | None = None) -> Embedder:
        """From a run directory, an export, a Sentence-Transformers or plain encoder, or a hub id.

        pooling: of a plain encoder, which says nothing of its own. None is the paper's, the first token of
            the last layer, or for a decoder its last token.
            Raises ValueError where the checkpoint carries its own: that is part of what was trained.
        """
        return Embedder(**checkpoint.parts(str(path), pooling)).eval()

    def save(self, directory: Path) -> None:
        """Write a checkpoint to a directory, at once or, with an OSError, not at all."""
        checkpoint.save(self, directory)


def refuse_pooling(pooling: Pooling, encoder: Encoder) -> None:
    """Raise ValueError for a pooling that says nothing with this encoder, or that it does not have."""
    if pooling.kind == "pooler" and not encoder.has_pooler:
        raise ValueError("pooling.kind=pooler, but this checkpoint has no pooler of its own; use cls or mean")
    for layer in pooling.layers:
        encoder.layer(layer)  # raises for a layer that does not exist
    if pooling.reads_first and causal(encoder):
        raise ValueError(
            f"pooling.kind={pooling.kind}, but in this encoder the first token sees none of those after it,"
            " as in a decoder, and so says nothing of the sentence; use pooling=last or pooling=mean"
        )


class Manner(NamedTuple):
    """How sentences are encoded: who is told how far it is, which share of them, in which precision."""

    progress: Progress = False
    share: tuple[int, int] = (0, 1)
    bf16: bool = False


def fill(
    out: Sequence[NDArray[np.float32]],
    rows: Ragged,
    module: Embedder | Encoder,
    run: Callable[[Ragged], Sequence[Tensor]],
    manner: Manner,
) -> None:
    """Write what `run` makes of each sentence, a (..., n, d) of a batch for each array, into `out`.

    Each distinct sentence is run once, with `module` in eval mode, and what it gave copied to its equals.
    Outside of `manner.share` the arrays stay as they are.
    """
    first, device = firsts(rows), next(module.parameters()).device
    budget = BATCH_TOKENS * (1 if device.type == "cpu" else 8)  # elsewhere it is launches that cost
    every = by_length(rows, np.unique(first), budget)[manner.share[0] :: manner.share[1]]

    def work(at: NDArray[np.intp]) -> int:
        for array, x in zip(out, run(taken(rows, torch.from_numpy(at))[0].to(device)), strict=True):
            array[..., at, :] = x.float().cpu().numpy()
        return len(at)

    was_training = module.training
    module.eval()
    try:
        modes = partial(encoding, device, manner.bf16)
        with told(manner.progress, sum(map(len, every))) as more:
            # Transformers' own classes are not made for several threads; their operators share the cores
            for count in each(work, every, modes) if module.parallel else alone(work, every, modes):
                more(count)
    finally:
        module.train(was_training)
    again = np.flatnonzero(first != np.arange(rows.n))
    for array in out:
        array[..., again, :] = array[..., first[again], :]


def encoding(device: torch.device, bf16: bool) -> ExitStack:
    """The modes of PyTorch in which sentences are encoded, for one thread."""
    stack = ExitStack()
    stack.enter_context(torch.inference_mode())
    stack.enter_context(torch.autocast(device.type, torch.bfloat16) if bf16 else without_autocast(device))
    return stack


def told(progress: Progress, total: int) -> AbstractContextManager[Callable[[int], None]]:
    """Who is told of so many sentences more: a `pace`, or the function that asked, or nobody."""
    if progress is True:
        return pace("encoded", total)
    return nullcontext(progress if callable(progress) else lambda _: None)


def ragged_ids(sentences: Sequence[str], tokenizer: Any, max_length: int) -> Ragged:
    """The token ids of all sentences laid end to end: lists of them would take five times the memory."""
    starts = range(0, max(1, len(sentences)), BLOCK)
    blocks = (token_ids(sentences[start : start + BLOCK], tokenizer, max_length) for start in starts)
    return concatenate([ragged(block) for block in blocks])


def firsts(rows: Ragged) -> NDArray[np.intp]:
    """(n,): for each sentence, the first that equals it."""
    ids, seen = rows.ids.numpy(), dict[bytes, int]()
    bounds = pairwise(rows.offsets.tolist())
    return np.array([seen.setdefault(ids[a:b].tobytes(), i) for i, (a, b) in enumerate(bounds)], np.intp)


def by_length(rows: Ragged, at: NDArray[np.intp], budget: int) -> list[NDArray[np.intp]]:
    """These sentences in batches of similar length, the longest first, of at most `budget` padded tokens."""
    lengths = rows.lengths.numpy()[at]
    order = np.argsort(-lengths, kind="stable")
    batches, start = [], 0
    while start < len(at):
        most = max(1, budget // max(1, lengths[order[start]]))
        batches.append(at[order[start : start + most]])
        start += most
    return batches

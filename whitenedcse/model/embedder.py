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
from whitenedcse.app.durable import parsing
from whitenedcse.app.terminal import pace
from whitenedcse.data.tokens import token_ids
from whitenedcse.model import checkpoint
from whitenedcse.model.backbones import causal
from whitenedcse.model.encoder import Encoder, pretrained
from whitenedcse.model.head import ProjectionHead
from whitenedcse.model.pooling import Final, Pooling
from whitenedcse.ragged import Ragged, concatenate, ragged, taken

EMBEDDINGS = ("encoder", "dense", "head")
BATCH_TOKENS = 1024  # of one batch while encoding, padding counted; 8192 leave a CPU's cache
BLOCK = 10_000  # sentences tokenised at a time
Progress = bool | Callable[[int], None]  # show it, or call this with the number of sentences done


class Embedder(nn.Module):
    """A function from sentences to vectors, as its checkpoint defines it.

    encoder: a Transformers encoder, or the directory or hub id of one.
    pooling: of its hidden states; None for the paper's, the first token, or the last one of a decoder.
    head: what the loss compares; None for the paper's, SGW and a dense layer.
    embedding: what `embed` and `encode` return: the pooled "encoder" output (the official code's choice), the
        "dense" layer above it, or the whole "head" with its running whitening statistics.
    max_length: the number of tokens that `encode` cuts a sentence to; None for the encoder's own limit.
    final: a last step after the embedding, e.g. a whitening fitted to the trained encoder; None for nothing.
    Raises ValueError for an unknown embedding, or a part that this encoder or head does not have.
    """

    def __init__(
        self,
        *,
        encoder: Encoder | str,
        pooling: Pooling | None = None,
        head: ProjectionHead | None = None,
        embedding: str = "encoder",
        max_length: int | None = None,
        final: Final | None = None,
    ) -> None:
        super().__init__()
        encoder = pretrained(path=encoder) if isinstance(encoder, str) else encoder
        pooling = pooling or Pooling("last" if causal(encoder) else "cls")
        head = head or ProjectionHead(encoder.width)
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

    @property
    def nbytes(self) -> int:
        """The bytes of all its tensors, which are nearly all of a checkpoint."""
        return sum(tensor.nbytes for tensor in self.state_dict().values())

    def pool(self, batch: Ragged, seed: int | None = None) -> Tensor:
        """Pooled vectors of n sentences: (n, d) float32.

        seed: of dropout, where the encoder is `parallel`.
        """
        first = self.pooling.reads_first
        hidden = self.encoder(batch, self.pooling.layers, first=first, seed=seed)
        offsets = torch.arange(batch.n + 1, device=hidden.device) if first else batch.offsets
        return self.pooler(self.pooling(hidden, offsets))

    def pooler(self, x: Tensor) -> Tensor:
        """The checkpoint's own pooler where the pooling is "pooler", else the identity: (n, d) -> (n, d)."""
        return self.encoder.pooler(x) if self.pooling.kind == "pooler" else x

    @property
    def parallel(self) -> bool:
        """Whether pieces of a batch may be encoded in parallel threads; see `Encoder.parallel`."""
        return self.encoder.parallel

    def embed(self, batch: Ragged) -> Tensor:
        """The embeddings of n sentences, as evaluation sees them: (n, k) in float32 or float64.

        Call it in eval mode.
        """
        return self.finish(self.pool(batch))

    @full_precision
    def finish(self, x: Tensor) -> Tensor:
        """Pooled x (n, d) -> the embedding (n, k): x, its dense layer or its head, and then `final`."""
        if self.embedding != "encoder":
            x = self.head.dense(x) if self.embedding == "dense" else self.head(x.unsqueeze(0)).squeeze(0)
        return x if self.final is None else self.final(x)

    def project(self, x: Tensor, *, passes: int, views: int) -> tuple[Tensor, Tensor | None]:
        """Views z and projected hard negatives, or None, of pooled x: see `ProjectionHead.project`."""
        return self.head.project(x, passes=passes, views=views)

    def encode(
        self,
        sentences: Sequence[str],
        *,
        progress: Progress = False,
        share: tuple[int, int] = (0, 1),
        bf16: bool = False,
    ) -> NDArray[np.float32]:
        """n sentences -> embeddings (n, k) in the same order, in eval mode and without gradient.

        k is `width`. Equal sentences are encoded once, in batches of similar length and a limited number of
        tokens. share: (r, m) encodes every m-th of these batches from the r-th on and leaves the rest zero,
        so that the results of m processes add up to that of one process, bit for bit. bf16: the backbone
        computes in bfloat16; pooling and head stay in float32. Raises ValueError for anything that is not a
        text.
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
        """n lists of token ids, or a `Ragged` of them -> embeddings (n, k); settings as in `encode`."""
        rows = rows if isinstance(rows, Ragged) else ragged(rows)
        out = np.zeros((rows.n, self.width), dtype=np.float32)
        fill([out], rows, self, lambda batch: [self.embed(batch)], Manner(progress, share, bf16))
        return out

    @staticmethod
    def load(path: str | Path, pooling: Pooling | None = None) -> Embedder:
        """An embedder in eval mode, from a directory or the hub.

        path: a run directory, an export, a Sentence-Transformers or plain encoder, or a hub id.
        pooling: for a plain encoder, which does not define one. None is the paper's, the first token of the
            last layer, or the last token for a decoder. Raises ValueError where the checkpoint defines its
            own, as it was trained with that.
        """
        parts = checkpoint.parts(str(path), pooling)
        if pooling is not None:
            return Embedder(**parts).eval()
        with parsing(Path(path), "copy the whole directory again"):
            return Embedder(**parts).eval()

    def save(self, directory: Path) -> None:
        """Write a checkpoint to a directory, completely or, with an OSError, not at all."""
        checkpoint.save(self, directory)


def refuse_pooling(pooling: Pooling, encoder: Encoder) -> None:
    """Raise ValueError for a pooling that this encoder lacks, or that carries no information in it."""
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
    """How sentences are encoded: with which report of progress, which share of them, in bfloat16 or not."""

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
    """Write the results of `run` for all sentences into the arrays `out`, (..., n, d) each.

    run: a batch of m sentences -> one (..., m, d) for each array. Each distinct sentence is run once, with
    `module` in eval mode, and its result copied to equal ones. Batches outside `manner.share` leave the
    arrays unchanged.
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
    """The PyTorch modes in which sentences are encoded, to be entered by each thread."""
    stack = ExitStack()
    stack.enter_context(torch.inference_mode())
    stack.enter_context(torch.autocast(device.type, torch.bfloat16) if bf16 else without_autocast(device))
    return stack


def told(progress: Progress, total: int) -> AbstractContextManager[Callable[[int], None]]:
    """A context with a function to call with the number of newly encoded sentences.

    It is a progress report of the terminal, the caller's own function, or one that does nothing.
    """
    if progress is True:
        return pace("encoded", total)
    return nullcontext(progress if callable(progress) else lambda _: None)


def ragged_ids(sentences: Sequence[str], tokenizer: Any, max_length: int) -> Ragged:
    """The token ids of all sentences as a `Ragged`; lists of them would take five times the memory."""
    starts = range(0, max(1, len(sentences)), BLOCK)
    blocks = (token_ids(sentences[start : start + BLOCK], tokenizer, max_length) for start in starts)
    return concatenate([ragged(block) for block in blocks])


def firsts(rows: Ragged) -> NDArray[np.intp]:
    """For each sentence the number of the first one that equals it, (n,)."""
    ids, seen = rows.ids.numpy(), dict[bytes, int]()
    bounds = pairwise(rows.offsets.tolist())
    return np.array([seen.setdefault(ids[a:b].tobytes(), i) for i, (a, b) in enumerate(bounds)], np.intp)


def by_length(rows: Ragged, at: NDArray[np.intp], budget: int) -> list[NDArray[np.intp]]:
    """The sentences `at` in batches of similar length, longest first, of at most `budget` padded tokens."""
    lengths = rows.lengths.numpy()[at]
    order = np.argsort(-lengths, kind="stable")
    batches, start = [], 0
    while start < len(at):
        most = max(1, budget // max(1, lengths[order[start]]))
        batches.append(at[order[start : start + most]])
        start += most
    return batches

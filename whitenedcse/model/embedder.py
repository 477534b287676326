"""The embedder: encoder, pooling and head as one thing that turns sentences into vectors.

v: views    n: sentences    d: width

Sentences are encoded in batches of like length and a limited number of tokens, equal ones once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from functools import cache, partial
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from whitenedcse.compute import at_least_float32, each, full_precision, without_autocast
from whitenedcse.console import pace, say
from whitenedcse.data.remote import published
from whitenedcse.data.tokens import token_ids
from whitenedcse.inputs import expanded, texts
from whitenedcse.model import lora
from whitenedcse.model.encoder import Encoder, pretrained, still
from whitenedcse.model.head import Final, Pooling, ProjectionHead
from whitenedcse.ragged import Ragged, concatenate, ragged, taken

EMBEDDINGS = ("encoder", "dense", "head")
BATCH_TOKENS = 1024  # of one batch while encoding, padding counted; 8192 leave a CPU's cache
BLOCK = 10_000  # sentences tokenised at a time
Progress = bool | Callable[[int], None]  # show it, or call this with the number of sentences done


class Embedder(nn.Module):
    """An encoder with its pooling and head: a function from sentences to vectors.

    encoder: an `Encoder`, or a Transformers model by directory or hub id.
    pooling: of the hidden states; None for the first token, as in the paper, or the last one in a decoder.
    head: what projects vectors for the loss; None for the paper's shuffled group whitening and dense layer.
    embedding: what `embed` and `encode` return: "encoder" is the pooled output (as in the official code),
        "dense" the dense layer above it, and "head" the whole head with its running whitening statistics.
    max_length: the number of tokens to which `encode` cuts a sentence; None for the encoder's own limit.
    final: a last step after the embedding, e.g. a whitening fitted to the trained encoder; None for no step.
    prompt: a text that `encode` puts before each sentence and tokenises with it, e.g. "query: ".
    prompts: further prompts by the names that Sentence-Transformers gives them: "query" and "document" for
        search, and for mteb a task or a kind of task.
    Raises ValueError for an unknown embedding, and for an embedding or pooling that encoder or head lack.

    >>> from whitenedcse.model.scratch import small_bert
    >>> embedder = Embedder(encoder=small_bert(vocabulary=200, layers=1, width=8, heads=1))
    >>> embedder.encode(["a cat sleeps", "a dog runs"]).shape
    (2, 8)
    """

    def __init__(  # noqa: PLR0913  the parts of one directory, by name
        self,
        *,
        encoder: Encoder | str | os.PathLike[str],
        pooling: Pooling | str | None = None,
        head: ProjectionHead | None = None,
        embedding: str = "encoder",
        max_length: int | None = None,
        final: Final | None = None,
        prompt: str = "",
        prompts: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        encoder = pretrained(path=expanded(encoder)) if isinstance(encoder, str | os.PathLike) else encoder
        pooling = pooling or encoder.one_token
        pooling = Pooling.named(pooling) if isinstance(pooling, str) else pooling
        head = head or ProjectionHead(encoder.width)
        check_embedding(embedding, head)
        check_pooling(pooling, encoder)
        self.prompt, self.prompts = prompt, dict(prompts or {})
        self.encoder, self.pooling, self.head, self.embedding = encoder, pooling, head, embedding
        self.max_length = min(max_length or encoder.max_length, encoder.max_length)
        self.final, self.width = final, final.width(encoder.width) if final else encoder.width

    @classmethod
    def of(cls, model: Embedder | str | os.PathLike[str]) -> Embedder:
        """An embedder as it is, or the one that is loaded from a path."""
        return model if isinstance(model, Embedder) else cls.load(model)

    @property
    def unit(self) -> bool:
        """Whether the last step is division by the length."""
        return self.final is not None and self.final.unit

    def pool(self, batch: Ragged, seed: int | None = None) -> Tensor:
        """Pooled vectors of n sentences: (n, d) float32. seed: of dropout, where it is `parallel`."""
        first = self.pooling.reads_first
        hidden = self.encoder(batch, self.pooling.layers, first=first, seed=seed)
        offsets = torch.arange(batch.n + 1, device=hidden.device) if first else batch.offsets
        return self.pooler(self.pooling(hidden, offsets))

    def pooler(self, x: Tensor) -> Tensor:
        """The checkpoint's own pooler where the pooling is "pooler", else the identity: (n, d) -> (n, d)."""
        return at_least_float32(self.encoder.pooler(x)) if self.pooling.kind == "pooler" else x

    def unread(self, *, layers: bool = True) -> list[nn.Parameter]:
        """The encoder's weights that no vector depends on: its pooler's, those above the pooled `layers`."""
        pooler = getattr(self.encoder.backbone, "pooler", None) if self.pooling.kind != "pooler" else None
        own = list(pooler.parameters()) if isinstance(pooler, nn.Module) else []
        return own + (self.encoder.unread(self.pooling.layers) if layers else [])

    def embed(self, batch: Ragged) -> Tensor:
        """The embeddings (n, k) of a batch, as evaluation sees them; call it in eval mode."""
        return self.finish(self.pool(batch))

    @full_precision
    def finish(self, x: Tensor) -> Tensor:
        """Pooled x (n, d) -> the embedding (n, k): x, its dense layer or its head, and then `final`."""
        if self.embedding != "encoder":
            x = self.head.dense(x) if self.embedding == "dense" else self.head(x.unsqueeze(0)).squeeze(0)
        return x if self.final is None else self.final(x)

    def encode(
        self,
        sentences: Iterable[str] | str,
        *,
        prompt: str | None = None,
        progress: Progress = False,
        bf16: bool = False,
    ) -> NDArray[np.float32]:
        """The embeddings (n, k) of n sentences in their order, computed in eval mode and without gradient.

        One sentence that is given alone has one embedding (k,).
        progress: True shows a bar. prompt: put before each sentence; None for `self.prompt`. bf16: the
        backbone computes in bfloat16. Raises ValueError for a sentence that is not a string, and for a prompt
        that leaves no token for a sentence.
        """
        if isinstance(sentences, str):
            return self.encode([sentences], prompt=prompt, bf16=bf16)[0]
        sentences = texts(sentences)
        before = self.prompt if prompt is None else prompt
        rows = ragged_ids(sentences, self.encoder.tokenizer, self.max_length, before)
        return self.encode_rows(rows, progress=progress, bf16=bf16)

    def encode_rows(
        self,
        rows: Ragged,
        *,
        progress: Progress = False,
        share: tuple[int, int] = (0, 1),
        bf16: bool = False,
    ) -> NDArray[np.float32]:
        """The embeddings (n, k) of n sentences of token ids; the other settings as in `encode`.

        share: (r, m) encodes every m-th batch from the r-th on and leaves the other rows zero, so that the
        results of m processes add up to that of one, bit for bit.
        """
        out = np.zeros((rows.n, self.width), dtype=np.float32)
        fill([out], rows, self, lambda batch: [self.embed(batch)], Manner(progress, share, bf16))
        return out

    @staticmethod
    def similarity(x: ArrayLike, y: ArrayLike) -> NDArray[np.float32]:
        """The cosines of all embeddings in x with all in y: (n, d), (m, d) -> (n, m); 0 for a zero vector.

        >>> Embedder.similarity([[3.0, 4.0]], [[4.0, 3.0], [0.0, 2.0]]).round(2)
        array([[0.96, 0.8 ]], dtype=float32)
        """
        a, b = (np.asarray(side, dtype=np.float64) for side in (x, y))
        a, b = (z / np.linalg.norm(z, axis=1, keepdims=True).clip(np.finfo(float).tiny) for z in (a, b))
        return (a @ b.T).astype(np.float32)

    def prompt_of(self, *names: str) -> str:
        """The prompt with the first of these names that there is, or else the one of `encode`."""
        return next((self.prompts[name] for name in names if name in self.prompts), self.prompt)

    def replaced(self, **parts: Any) -> Embedder:
        """An embedder that shares its parts with this one, but for `parts`, such as `final`."""
        names = ("encoder", "pooling", "head", "embedding", "max_length", "final", "prompt", "prompts")
        own = {name: getattr(self, name) for name in names}
        return Embedder(**own | parts).eval().to(next(self.parameters()).device)

    def merged(self) -> Embedder:
        """The embedder with its low-rank adapters added to the weights; it shares all others."""
        if not lora.adapters(self.encoder.backbone):
            return self
        shared = [*self.parameters(), *self.buffers(), self.encoder.tokenizer]
        copy = deepcopy(self, {id(part): part for part in shared})
        lora.merge(copy.encoder.backbone)
        return copy

    @staticmethod
    def load(path: str | os.PathLike[str], pooling: Pooling | str | None = None) -> Embedder:
        """The embedder in a directory or with a hub id, in eval mode, on the CPU; `.to("cuda")` moves it.

        path: a run or its directory, a checkpoint, an export, a Sentence-Transformers model or plain encoder.
        pooling: for a plain encoder: a `Pooling`, or its kind, such as "mean" or "first_last". None for the
            first token of the last layer, or the last token of a decoder. Raises ValueError if the checkpoint
            defines its own.
        """
        from whitenedcse.model import checkpoint

        return checkpoint.load(expanded(path), pooling)

    def save(self, directory: str | Path) -> None:
        """Write a checkpoint to a directory or URL, completely or not at all."""
        from whitenedcse.model import checkpoint

        with published(directory, checkpoint.SETTINGS) as out:
            checkpoint.save(self, out)


def check_embedding(embedding: str, head: ProjectionHead) -> None:
    """Raise ValueError for vectors that an embedder with this head does not give."""
    if embedding not in EMBEDDINGS:
        raise ValueError(f"embedding={embedding!r} is not one of {', '.join(EMBEDDINGS)}")
    if embedding != "encoder" and head.own:
        raise ValueError(f"embedding={embedding} with a head of your own, {head.own}, in no checkpoint")
    if embedding == "dense" and head.linear is None:
        raise ValueError("embedding=dense, but this head has no dense layer")


def check_pooling(pooling: Pooling, encoder: Encoder) -> None:
    """Raise ValueError for a pooling that this encoder lacks, or that carries no information in it."""
    if pooling.kind == "pooler" and encoder.pooler_layer is None:
        raise ValueError("pooling.kind=pooler, but this checkpoint has no pooler of its own; use cls or mean")
    for layer in pooling.layers:
        encoder.layer(layer)  # raises for a layer that does not exist
    if pooling.reads_first and encoder.causal:
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
    module: Any,
    run: Callable[[Ragged], Sequence[Tensor]],
    manner: Manner,
) -> None:
    """Write the results of `run` for all sentences into the arrays `out`, (..., n, d) each.

    run: a batch of m sentences -> one (..., m, d) for each array. Each distinct sentence is run once, with
    `module` in eval mode. Batches outside `manner.share` leave the arrays unchanged.
    """
    first, device = firsts(rows), next(module.parameters()).device
    encoder = getattr(module, "encoder", module)
    rank, world = manner.share
    most = batch_tokens(device, encoder.width, alone=world == 1)
    batches = by_length(rows, np.unique(first), most)[rank::world]
    results, modes = Halving(rows, run, device, most), partial(encoding, device, manner.bf16)

    one_at_a_time = Lock()
    with still(module), told(manner.progress, sum(map(len, batches))) as more:

        def work(at: NDArray[np.intp]) -> None:
            count = written(out, at, [x.float().cpu() for x in results(at)])
            with one_at_a_time:
                more(count)

        if device.type == "cuda":
            for count in overlapped(out, batches, results, modes):
                more(count)
        else:  # Transformers' own classes are not made for several threads
            each(work, batches, modes, threads=None if encoder.parallel else 1)
    again = np.flatnonzero(first != np.arange(rows.n))
    for array in out:
        array[..., again, :] = array[..., first[again], :]


def batch_tokens(device: torch.device, width: int, *, alone: bool) -> int:
    """How many tokens a batch may have, padding counted: on a GPU by its free memory, up to 131,072.

    A token takes some 100 bytes a channel while a layer is computed, and 4 in each layer that is pooled.
    alone: whether this process encodes all sentences; processes that share them must cut the same batches.
    """
    if device.type == "cpu":
        return BATCH_TOKENS
    if device.type != "cuda" or not alone:
        return 8 * BATCH_TOKENS  # there it is launches that cost
    free, _ = torch.cuda.mem_get_info(device)
    return max(8 * BATCH_TOKENS, min(128 * BATCH_TOKENS, free // (256 * width)))


class Halving:
    """Runs sentences by their numbers; where a GPU lacks memory, these and later ones in halves."""

    def __init__(
        self, rows: Ragged, run: Callable[[Ragged], Sequence[Tensor]], device: torch.device, most: int
    ) -> None:
        self.rows, self.run, self.device, self.most = rows, run, device, most
        self.lengths = rows.lengths.numpy()

    def __call__(self, at: NDArray[np.intp]) -> Sequence[Tensor]:
        """What `run` gives for these sentences, on the device."""
        padded = int(self.lengths[at].max()) * len(at)
        if padded <= self.most or len(at) == 1:
            try:
                batch, _ = taken(self.rows, torch.from_numpy(at))
                return self.run(batch.to(self.device))
            except torch.OutOfMemoryError:
                if len(at) == 1:
                    raise
            self.most = padded // 2
            say_halved()
            torch.cuda.empty_cache()
        halves = [self(half) for half in np.array_split(at, 2)]
        return [torch.cat(pair, dim=-2) for pair in zip(*halves, strict=True)]


@cache
def say_halved() -> None:
    """Say once that batches are made smaller."""
    say("note: the GPU's memory does not suffice for these batches; they are halved, and encoding goes on")


def overlapped(
    out: Sequence[NDArray[np.float32]],
    batches: Sequence[NDArray[np.intp]],
    results: Callable[[NDArray[np.intp]], Sequence[Tensor]],
    modes: Callable[[], AbstractContextManager[Any]],
) -> Iterator[int]:
    """Write the results of all batches; while a GPU computes one, that before it is copied from there."""
    waiting: list[Any] = []
    with modes():
        for at in batches:
            copies = [x.float().to("cpu", non_blocking=True) for x in results(at)]  # to pinned memory
            copied = torch.cuda.Event()
            copied.record()
            waiting.append((at, copies, copied))
            if len(waiting) > 1:
                yield written(out, *waiting.pop(0))
        for one in waiting:
            yield written(out, *one)


def written(
    out: Sequence[NDArray[np.float32]], at: NDArray[np.intp], results: Sequence[Tensor], copied: Any = None
) -> int:
    """Write results of these sentences into the arrays, once `copied`; returns the number of sentences."""
    if copied is not None:
        copied.synchronize()
    for array, x in zip(out, results, strict=True):
        array[..., at, :] = x.numpy()
    return len(at)


@contextmanager
def encoding(device: torch.device, bf16: bool) -> Iterator[None]:
    """The PyTorch modes in which sentences are encoded, to be entered by each thread."""
    precision = torch.autocast(device.type, torch.bfloat16) if bf16 else without_autocast(device)
    with torch.inference_mode(), precision:
        yield


def told(progress: Progress, total: int) -> AbstractContextManager[Callable[[int], None]]:
    """A context with a function to call with the number of newly encoded sentences."""
    if progress is True:
        return pace("encoded", total)
    return nullcontext(progress if callable(progress) else lambda _: None)


def ragged_ids(sentences: Sequence[str], tokenizer: Any, max_length: int, prompt: str = "") -> Ragged:
    """The token ids of all sentences as a `Ragged`; lists of them would take five times the memory."""
    starts = range(0, max(1, len(sentences)), BLOCK)
    blocks = (token_ids(sentences[start : start + BLOCK], tokenizer, max_length, prompt) for start in starts)
    return concatenate([ragged(block) for block in blocks])


def firsts(rows: Ragged) -> NDArray[np.intp]:
    """For each sentence the number of the first one that equals it, (n,)."""
    ids, offsets = rows.ids.numpy(), rows.offsets.tolist()
    first = np.empty(rows.n, np.intp)
    seen: dict[bytes, int] = {}
    for i in range(rows.n):
        first[i] = seen.setdefault(ids[offsets[i] : offsets[i + 1]].tobytes(), i)
    return first


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

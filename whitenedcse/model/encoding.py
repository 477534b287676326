"""How sentences are encoded: in batches of like length and a limited number of tokens, equal ones once.

n: sentences    d: width
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from whitenedcse.compute import alone, each, without_autocast
from whitenedcse.console import pace
from whitenedcse.data.tokens import token_ids
from whitenedcse.ragged import Ragged, concatenate, ragged, taken

if TYPE_CHECKING:
    from whitenedcse.model.embedder import Embedder
    from whitenedcse.model.encoder import Encoder

BATCH_TOKENS = 1024  # of one batch while encoding, padding counted; 8192 leave a CPU's cache
BLOCK = 10_000  # sentences tokenised at a time
Progress = bool | Callable[[int], None]  # show it, or call this with the number of sentences done


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
    every = mixed(by_length(rows, np.unique(first), budget)[manner.share[0] :: manner.share[1]])

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


def ragged_ids(sentences: Sequence[str], tokenizer: Any, max_length: int, prompt: str = "") -> Ragged:
    """The token ids of all sentences as a `Ragged`; lists of them would take five times the memory.

    prompt: a text put before each sentence.
    """
    starts = range(0, max(1, len(sentences)), BLOCK)
    blocks = (token_ids(sentences[start : start + BLOCK], tokenizer, max_length, prompt) for start in starts)
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


def mixed(batches: Sequence[NDArray[np.intp]]) -> list[NDArray[np.intp]]:
    """Batches, longest sentences first, so ordered that the lengths alternate: progress is then even.

    The longest stay first, so that memory which does not suffice is noticed at once.
    """
    golden = (5**0.5 - 1) / 2  # multiples of it, modulo 1, are spread evenly however many there are
    return [batches[i] for i in np.argsort(np.arange(len(batches)) * golden % 1)]

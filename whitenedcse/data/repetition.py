"""Word repetition: tokens written twice, so that the views of a sentence differ in length.

n: sentences    t: tokens    m: tokens of a sentence without the special ones around it

[1] ESimCSE, arXiv:2109.04380, section 3.1, on sub-word tokens
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from whitenedcse.ragged import Ragged, between

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

STEP = 0x9E3779B97F4A7C15  # of a SplitMix64 generator, whose numbers `mixed` tells in any order


@dataclass(frozen=True)
class Repetition:
    """Repeats tokens in a part of each batch; a pure function of (seed, epoch, row, block).

    So neither the batch, nor the rank, nor where a run was resumed matters. epoch: asked at each batch.
    [1]'s code draws once for all epochs, and repeats hard negatives too.
    """

    rate: float
    max_length: int
    frame: tuple[int, int]
    seed: int
    epoch: Callable[[], int]

    def __call__(self, batch: Ragged, rows: NDArray[np.int64], plain: int) -> Ragged:
        """Blocks of len(rows) sentences, one a row -> the same, the first `plain` blocks as they were."""
        n, at = len(rows), repr((self.seed, self.epoch())).encode()
        start = int.from_bytes(hashlib.blake2b(at, digest_size=8).digest(), "big")
        blocks = batch.n // n
        number = rows.astype(np.uint64) * blocks + np.arange(plain, blocks, dtype=np.uint64)[:, None]
        keys = mixed(number.ravel() * STEP + start)
        rest = between(batch, plain * n, batch.n)
        twice = np.zeros(len(batch.ids), dtype=np.bool_)
        twice[len(batch.ids) - len(rest.ids) :] = drawn(rest, keys, self.rate, self.frame)
        return doubled(batch, twice, self.max_length, self.frame)


def frame(tokenizer: PreTrainedTokenizerBase) -> tuple[int, int]:
    """How many special tokens are put in front of each sentence, and how many after it."""
    marks = tokenizer("a", return_special_tokens_mask=True)["special_tokens_mask"]
    return marks.index(0), marks[::-1].index(0)


def drawn(batch: Ragged, keys: NDArray[np.uint64], rate: float, frame: tuple[int, int]) -> NDArray[np.bool_]:
    """(t,) True for the tokens to repeat: a uniform number of them, a uniform choice of places.

    keys: (n,), each alone decides for its sentence. The number is from 0 to max(2, int(rate * m)) [1], and to
    m if that is less. [1]'s code, unlike its text, has from 0 to min(10, int(rate * (m + 2))) - 1.
    """
    offsets = batch.offsets.numpy()
    m = np.maximum(np.diff(offsets) - sum(frame), 0)
    most = np.minimum(np.maximum((rate * m).astype(np.int64), 2), m)
    counts = ((mixed(keys) >> 32) * (most + 1).astype(np.uint64) >> 32).astype(np.int64)
    before = m.cumsum() - m
    place = np.arange(m.sum()) - np.repeat(before, m)
    chance = mixed(np.repeat(keys, m) + (place + 1).astype(np.uint64) * STEP)
    sentence = np.repeat(np.arange(batch.n, dtype=np.uint64), m)
    shuffled = np.argsort(sentence << 40 | chance >> 24, kind="stable")  # within each sentence
    tokens = np.arange(len(place)) + np.repeat(offsets[:-1] + frame[0] - before, m)
    twice = np.zeros(len(batch.ids), dtype=np.bool_)
    twice[tokens[shuffled[place < np.repeat(counts, m)]]] = True
    return twice


def doubled(batch: Ragged, twice: NDArray[np.bool_], max_length: int, frame: tuple[int, int]) -> Ragged:
    """The sentences with these tokens written twice in a row; of a longer one, max_length tokens stay.

    It loses its last words, not the special tokens behind them: so does [1] with whole words, which a
    tokenizer then cuts. With sub-words [1] lets sentences grow beyond max_length.
    """
    offsets = batch.offsets.numpy()
    bounds = offsets + np.concatenate([[0], twice.cumsum()])[offsets]
    lengths = np.diff(bounds)
    ids = np.repeat(batch.ids.numpy(), 1 + twice)
    if (longest := int(lengths.max(initial=0))) > max_length:
        place = np.arange(len(ids)) - np.repeat(bounds[:-1], lengths)
        ids = ids[(place < max_length - frame[1]) | (place >= np.repeat(lengths - frame[1], lengths))]
        bounds = np.concatenate([[0], np.minimum(lengths, max_length).cumsum()])
        longest = max_length
    return Ragged(torch.from_numpy(ids), torch.from_numpy(bounds), longest)


def mixed(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Numbers that look random, of numbers that do not: the last step of SplitMix64 (Steele et al. 2014)."""
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return x ^ x >> np.uint64(31)

"""How the views of a sentence differ in their tokens: crops and word repetition.

n: sentences    t: tokens of all sentences together    m: tokens of a sentence that may change, which are all
but the special ones around it (and, for crops, those of a prompt)

[1] ESimCSE, arXiv:2109.04380, section 3.1, on sub-word tokens
[2] arXiv:2508.03453: crops of texts as views; only its abstract was read here
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from whitenedcse.ragged import Ragged, between

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

STEP = 0x9E3779B97F4A7C15  # of a SplitMix64 generator, whose numbers `mixed` tells in any order
LEAST = 4  # tokens that a crop keeps at least: fewer say little of the sentence

Keys = NDArray[np.uint64]
Flags = NDArray[np.bool_]
Times = NDArray[np.bool_] | NDArray[np.int64]


@dataclass(frozen=True)
class Views:
    """Changes the tokens of a batch, so that the passes of a sentence differ: by a crop, then by repetition.

    Each may be off. Which tokens change depends on (seed, epoch, row of the corpus, block) alone, and so not
    on the batch, the rank, or where a run was resumed. Special tokens stay. max_length: of a sentence with
    all its tokens. frame: the numbers of special tokens before and after each sentence. prompt: the tokens of
    a prompt that follow the first of them; a crop leaves them, repetition does not. epoch: a function that is
    called for each batch.

    repetition: writes some tokens twice in all blocks but the first ones [1], see `drawn`. The code of [1]
        draws once for all epochs, and repeats hard negatives too.
    crop: each view is a span of consecutive tokens of the sentence [2], with a share of them between these
        two; the anchor too, so that no view is longer than the others on average. See `spans`.

    >>> from whitenedcse.ragged import ragged, rows
    >>> views = Views(max_length=32, frame=(1, 1), seed=1, epoch=lambda: 0, crop=(0.5, 0.5))
    >>> pair = ragged([[2, *range(10, 20), 3]] * 2)  # two passes of one sentence
    >>> [len(row) for row in rows(views(pair, np.array([0]), 1))]
    [7, 7]
    """

    max_length: int
    frame: tuple[int, int]
    seed: int
    epoch: Callable[[], int]
    prompt: int = 0
    repetition: float = 0.0
    crop: Sequence[float] | None = None

    def __call__(self, batch: Ragged, rows: NDArray[np.int64], first: int) -> Ragged:
        """The batch with its changes.

        batch: blocks of len(rows) sentences. rows: (n,) of the corpus. first: blocks of the first pass.
        """
        n, inner = len(rows), (self.frame[0] + self.prompt, self.frame[1])  # what a crop leaves
        blocks, unchanged = batch.n // n, first * n
        number = rows.astype(np.uint64) * blocks + np.arange(blocks, dtype=np.uint64)[:, None]
        if self.crop is not None:
            stay = spans(batch, self.keys(number, "crop"), self.crop, inner)
            batch = written(batch, stay, self.max_length, self.frame)
        if self.repetition:
            rest = between(batch, unchanged, batch.n)
            times = np.ones(len(batch.ids), dtype=np.int64)
            repeated = drawn(rest, self.keys(number[first:]), self.repetition, self.frame)
            times[int(batch.offsets[unchanged]) :] += repeated
            batch = written(batch, times, self.max_length, self.frame)
        return batch

    def keys(self, number: Keys, *kind: str) -> Keys:
        """A random number for each of these numbers and a kind of change, the same in every batch."""
        at = repr((self.seed, self.epoch(), *kind)).encode()
        start = int.from_bytes(hashlib.blake2b(at, digest_size=8).digest(), "big")
        return mixed(number.ravel() * STEP + start)


def check_changes(passes: int, repetition: float, crop: Sequence[float] | None) -> None:
    """Raise ValueError for shares out of range, or for changes that views with one pass would share."""
    if crop is not None and not (len(crop) == 2 and 0 < crop[0] <= crop[1] <= 1):
        raise ValueError(
            f"data.crop={list(crop)} must be two shares, 0 < least <= most <= 1; null switches it off"
        )
    if not 0 <= repetition < 1:
        raise ValueError(f"data.repetition={repetition} is not in [0, 1); 0 switches it off")
    if passes == 1 and (repetition or crop is not None):
        raise ValueError(
            "data.repetition and data.crop with data.passes=1 change nothing between the views, which share "
            "the tokens of that pass; use data.passes=2 or more"
        )


def spans(batch: Ragged, keys: Keys, shares: Sequence[float], frame: tuple[int, int]) -> Flags:
    """Which tokens a crop keeps: (t,) bool, a span of each sentence and all tokens of the frame.

    keys: (n,) random numbers. shares: the least and the most. The length is m times a uniform number between
    them, at least `LEAST` or m if that is less; the start is uniform among those where the span fits.
    """
    offsets = batch.offsets.numpy()
    m = inside(batch, frame)
    share = shares[0] + (shares[1] - shares[0]) * (mixed(keys) >> 11) * 2.0**-53
    length = np.minimum(np.maximum(np.rint(share * m).astype(np.int64), LEAST), m)
    start = below(mixed(keys + STEP), m - length + 1)
    lengths = np.diff(offsets)
    place = np.arange(len(batch.ids)) - np.repeat(offsets[:-1] + frame[0], lengths)
    start, end, m = (np.repeat(x, lengths) for x in (start, start + length, m))
    return (place < 0) | (start <= place) & (place < end) | (place >= m)


def drawn(batch: Ragged, keys: Keys, rate: float, frame: tuple[int, int]) -> Flags:
    """Which tokens to repeat: (t,) bool, for each sentence a uniform number of tokens at uniform places.

    keys: (n,) random numbers. The number is between 0 and max(2, int(rate * m)) [1], and at most m. The code
    of [1], unlike its text, takes 0 to min(10, int(rate * (m + 2))) - 1.
    """
    m = inside(batch, frame)
    most = np.minimum(np.maximum((rate * m).astype(np.int64), 2), m)
    counts = below(mixed(keys), most + 1)
    before = m.cumsum() - m
    place = np.arange(m.sum()) - np.repeat(before, m)
    chance = mixed(np.repeat(keys, m) + (place + 1).astype(np.uint64) * STEP)
    sentence = np.repeat(np.arange(batch.n, dtype=np.uint64), m)
    shuffled = np.argsort(sentence << 40 | chance >> 24, kind="stable")  # within each sentence
    tokens = np.arange(len(place)) + np.repeat(batch.offsets.numpy()[:-1] + frame[0] - before, m)
    marked = np.zeros(len(batch.ids), dtype=np.bool_)
    marked[tokens[shuffled[place < np.repeat(counts, m)]]] = True
    return marked


def written(batch: Ragged, times: Times, max_length: int, frame: tuple[int, int]) -> Ragged:
    """A batch in which each token is written so many times in a row, times: (t,), 0 for not at all.

    Beyond max_length a sentence loses its last words, as in [1] with whole words, not the special tokens.
    """
    offsets = batch.offsets.numpy()
    bounds = np.concatenate([[0], times.cumsum(dtype=np.int64)])[offsets]
    lengths = np.diff(bounds)
    ids = np.repeat(batch.ids.numpy(), times)
    if (longest := int(lengths.max(initial=0))) > max_length:
        place = np.arange(len(ids)) - np.repeat(bounds[:-1], lengths)
        ids = ids[(place < max_length - frame[1]) | (place >= np.repeat(lengths - frame[1], lengths))]
        bounds = np.concatenate([[0], np.minimum(lengths, max_length).cumsum()])
        longest = max_length
    return Ragged(torch.from_numpy(ids), torch.from_numpy(bounds), longest)


def inside(batch: Ragged, frame: tuple[int, int]) -> NDArray[np.int64]:
    """(n,) int64: the number m of tokens that each sentence has inside its frame."""
    return np.maximum(np.diff(batch.offsets.numpy()) - sum(frame), 0)


def below(random: Keys, bounds: NDArray[np.int64]) -> NDArray[np.int64]:
    """Random uint64 numbers -> uniform whole numbers from 0 to below `bounds`, which is less than 2**32."""
    return ((random >> 32) * bounds.astype(np.uint64) >> 32).astype(np.int64)


def mixed(x: Keys) -> Keys:
    """Pseudo-random uint64 numbers from any uint64 numbers: SplitMix64's last step (Steele et al. 2014)."""
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return x ^ x >> np.uint64(31)


def frame(tokenizer: PreTrainedTokenizerBase) -> tuple[int, int]:
    """How many special tokens a tokenizer puts before each sentence, and how many after it."""
    marks = tokenizer("a", return_special_tokens_mask=True)["special_tokens_mask"]
    return marks.index(0), marks[::-1].index(0)


def prompt_tokens(tokenizer: PreTrainedTokenizerBase, prompt: str) -> int:
    """How many tokens the words of a prompt have before a sentence; a space at its end belongs to no word."""
    return len(tokenizer(prompt.rstrip(), add_special_tokens=False)["input_ids"])

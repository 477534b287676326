"""A batch of sentences of unequal length, without padding; and word repetition in such a batch.

n: sentences    t: tokens of all sentences together    l: length of the longest sentence    d: width
m: tokens of a sentence without the special ones around it

[1] ESimCSE, arXiv:2109.04380, section 3.1, on sub-word tokens
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

STEP = 0x9E3779B97F4A7C15  # of a SplitMix64 generator, whose numbers `mixed` tells in any order


class Ragged(NamedTuple):
    """Token ids of n sentences of unequal length, concatenated.

    ids: (t,) int64. offsets: (n + 1,) int64; sentence i is ids[offsets[i]:offsets[i + 1]]. longest: an upper
    bound of the sentence length, usually l. on_host: a copy of the offsets in CPU memory where `offsets` is
    on another device, else None. `longest` and `on_host` spare a GPU from being waited for to learn the sizes
    of the batch.
    """

    ids: Tensor
    offsets: Tensor
    longest: int
    on_host: Tensor | None = None

    @property
    def n(self) -> int:
        """The number of sentences."""
        return len(self.offsets) - 1

    @property
    def lengths(self) -> Tensor:
        """(n,) int64: the number of tokens of each sentence."""
        return self.offsets.diff()

    def to(self, device: torch.device, non_blocking: bool | None = None) -> Ragged:
        """A copy of the batch on `device`.

        non_blocking: None waits for a CPU and an Apple GPU, and for no other.
        """
        if non_blocking is None:
            non_blocking = torch.device(device).type not in ("cpu", "mps")
        ids, offsets = (x.to(device, non_blocking=non_blocking) for x in (self.ids, self.offsets))
        return Ragged(ids, offsets, self.longest, self.bounds)

    @property
    def bounds(self) -> Tensor:
        """(n + 1,) int64: the offsets in CPU memory."""
        return self.offsets if self.on_host is None else self.on_host


def ragged(rows: Sequence[Sequence[int]]) -> Ragged:
    """A `Ragged` batch from one list of token ids for each sentence."""
    flat = [token for row in rows for token in row]
    lengths = [len(row) for row in rows]
    return Ragged(torch.tensor(flat, dtype=torch.long), offsets(lengths), max(lengths, default=0))


def offsets(lengths: Sequence[int] | Tensor) -> Tensor:
    """Sentence lengths (n,) -> offsets (n + 1,) int64: where each sentence starts, and the last one ends."""
    lengths = torch.as_tensor(lengths, dtype=torch.long)
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def rows(batch: Ragged) -> list[list[int]]:
    """The token ids of a batch as n lists, one for each sentence."""
    return [part.tolist() for part in batch.ids.split(batch.lengths.tolist())]


def concatenate(batches: Sequence[Ragged]) -> Ragged:
    """One batch with the sentences of all given batches, in order."""
    lengths, on_host = torch.cat([b.lengths for b in batches]), None
    if batches[0].on_host is not None:
        on_host = offsets(torch.cat([b.bounds.diff() for b in batches]))
    ids, longest = torch.cat([b.ids for b in batches]), max(b.longest for b in batches)
    return Ragged(ids, offsets(lengths), longest, on_host)


def between(batch: Ragged, first: int, last: int) -> Ragged:
    """A batch of the sentences numbered from `first` to `last` - 1."""
    bounds, there = batch.bounds[first : last + 1], batch.offsets[first : last + 1]
    ids, on_host = batch.ids[bounds[0] : bounds[-1]], None if batch.on_host is None else bounds - bounds[0]
    return Ragged(ids, there - there[0], batch.longest, on_host)


def taken(batch: Ragged, at: Tensor) -> tuple[Ragged, Tensor]:
    """The sentences numbered `at`, in that order, as a batch on CPU; and where each of their tokens was.

    at: (m,) int64 -> m sentences of t' tokens in all, and (t',) int64, indices into `batch.ids`.
    """
    starts, lengths = batch.offsets[:-1][at], batch.lengths[at]
    bounds = offsets(lengths)
    tokens = torch.arange(int(bounds[-1])) + (starts - bounds[:-1]).repeat_interleave(lengths)
    return Ragged(batch.ids[tokens], bounds, int(lengths.max())), tokens


def split(batch: Ragged, most: int) -> list[Ragged]:
    """The sentences of a batch in order, as batches of at most `most` sentences."""
    return [between(batch, i, min(i + most, batch.n)) for i in range(0, batch.n, most)]


def mask(batch: Ragged) -> Tensor:
    """The attention mask of the padded batch: (n, l) bool, True where it holds a token."""
    lengths = batch.lengths
    return torch.arange(batch.longest, device=lengths.device) < lengths.unsqueeze(1)


def places(batch: Ragged) -> tuple[Tensor, Tensor]:
    """For each token the number of its sentence, (t,), and its position in that sentence from 0 on, (t,)."""
    device, t = batch.ids.device, len(batch.ids)
    sentence = torch.repeat_interleave(torch.arange(batch.n, device=device), batch.lengths, output_size=t)
    return sentence, torch.arange(t, device=device) - batch.offsets[sentence]


def pad(batch: Ragged, value: int) -> Tensor:
    """Token ids (t,) -> (n, l), filled up on the right with `value`."""
    return batch.ids.new_full((batch.n, batch.longest), value).index_put(places(batch), batch.ids)


def unpad(hidden: Tensor, batch: Ragged) -> Tensor:
    """Padded vectors (..., n, l, d) -> (..., t, d): the rows that belong to tokens of the batch."""
    sentence, place = places(batch)
    return hidden[..., sentence, place, :]


@dataclass(frozen=True)
class Repetition:
    """ESimCSE's word repetition [1]: writes some tokens of a sentence twice, as data augmentation.

    Which ones depends on (seed, epoch, row of the corpus, block) alone, and so not on the batch, the rank, or
    where a run was resumed. epoch: a function that is called for each batch. The code of [1] draws once for
    all epochs, and repeats hard negatives too.
    """

    rate: float
    max_length: int
    frame: tuple[int, int]
    seed: int
    epoch: Callable[[], int]

    def __call__(self, batch: Ragged, rows: NDArray[np.int64], plain: int) -> Ragged:
        """A batch with tokens repeated in all blocks but the first `plain` ones, which stay as they are.

        batch: blocks of len(rows) sentences, one after the other. rows: (n,) the row of the corpus that each
        sentence of a block comes from.
        """
        n, at = len(rows), repr((self.seed, self.epoch())).encode()
        start = int.from_bytes(hashlib.blake2b(at, digest_size=8).digest(), "big")
        blocks = batch.n // n
        number = rows.astype(np.uint64) * blocks + np.arange(plain, blocks, dtype=np.uint64)[:, None]
        keys = mixed(number.ravel() * STEP + start)
        rest = between(batch, plain * n, batch.n)
        twice = np.zeros(len(batch.ids), dtype=np.bool_)
        twice[len(batch.ids) - len(rest.ids) :] = drawn(rest, keys, self.rate, self.frame)
        return doubled(batch, twice, self.max_length, self.frame)


def drawn(batch: Ragged, keys: NDArray[np.uint64], rate: float, frame: tuple[int, int]) -> NDArray[np.bool_]:
    """Which tokens to repeat: (t,) bool, for each sentence a uniform number of tokens at uniform places.

    keys: (n,) random numbers, each of which alone decides for its sentence. The number of repeated tokens is
    between 0 and max(2, int(rate * m)) [1], and at most m. The code of [1], unlike its text, takes 0 to
    min(10, int(rate * (m + 2))) - 1.
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
    """A batch in which the tokens marked in `twice`, (t,) bool, are written twice in a row.

    A sentence that gets longer than max_length loses its last words, not the special tokens behind them: as
    in [1] with whole words, which a tokenizer then truncates. With sub-words [1] lets sentences exceed
    max_length.
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
    """Pseudo-random uint64 numbers from any uint64 numbers: SplitMix64's last step (Steele et al. 2014)."""
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return x ^ x >> np.uint64(31)

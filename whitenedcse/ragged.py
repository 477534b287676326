"""A batch of sentences of unequal length, without padding.

n: sentences    t: tokens of all sentences together    l: length of the longest sentence    d: width
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


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

    def to(self, device: torch.device) -> Ragged:
        """A copy of the batch on `device`, without waiting for an NVIDIA GPU."""
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
    ids = torch.cat([batch.ids for batch in batches])
    starts = offsets(torch.cat([batch.lengths for batch in batches]))
    on_host = None
    if batches[0].on_host is not None:
        on_host = offsets(torch.cat([batch.bounds.diff() for batch in batches]))
    return Ragged(ids, starts, max(batch.longest for batch in batches), on_host)


def between(batch: Ragged, first: int, last: int) -> Ragged:
    """A batch of the sentences numbered from `first` to `last` - 1."""
    starts, bounds = batch.offsets[first : last + 1], batch.bounds[first : last + 1]
    ids = batch.ids[bounds[0] : bounds[-1]]
    on_host = None if batch.on_host is None else bounds - bounds[0]
    return Ragged(ids, starts - starts[0], batch.longest, on_host)


def taken(batch: Ragged, at: Tensor) -> tuple[Ragged, Tensor]:
    """The sentences numbered `at`, in that order, as a batch on CPU; and where each of their tokens was.

    at: (m,) int64 -> m sentences of t' tokens in all, and (t',) int64, indices into `batch.ids`.
    """
    lengths = batch.lengths[at]
    bounds = offsets(lengths)
    moved = batch.offsets[:-1][at] - bounds[:-1]  # by how many tokens each sentence moves
    tokens = torch.arange(int(bounds[-1])) + moved.repeat_interleave(lengths)
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

"""A batch of sentences of unequal length, without padding.

n: sentences    t: tokens of all sentences together    l: length of the longest sentence    d: width
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Ragged(NamedTuple):
    """Token ids of n sentences laid end to end.

    ids: (t,) int64. offsets: (n + 1,) int64; sentence i is ids[offsets[i]:offsets[i + 1]].
    longest: l, or more. It is a number of the host, so that nobody has to wait for a device to know it.
    """

    ids: Tensor
    offsets: Tensor
    longest: int

    @property
    def n(self) -> int:
        """The number of sentences."""
        return len(self.offsets) - 1

    @property
    def lengths(self) -> Tensor:
        """(n,) tokens in each sentence."""
        return self.offsets.diff()

    def to(self, device: torch.device) -> Ragged:
        """The same batch there."""
        return Ragged(self.ids.to(device), self.offsets.to(device), self.longest)


def ragged(rows: Sequence[Sequence[int]]) -> Ragged:
    """A batch from lists of token ids."""
    flat = [token for row in rows for token in row]
    lengths = [len(row) for row in rows]
    return Ragged(torch.tensor(flat, dtype=torch.long), offsets(lengths), max(lengths, default=0))


def offsets(lengths: Sequence[int] | Tensor) -> Tensor:
    """(n,) -> (n + 1,): where each sentence begins, and where the last one ends."""
    lengths = torch.as_tensor(lengths, dtype=torch.long)
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def rows(batch: Ragged) -> list[list[int]]:
    """The token ids of each sentence."""
    return [part.tolist() for part in batch.ids.split(batch.lengths.tolist())]


def concatenate(batches: Sequence[Ragged]) -> Ragged:
    """The sentences of all batches, in order."""
    lengths = torch.cat([b.lengths for b in batches])
    return Ragged(torch.cat([b.ids for b in batches]), offsets(lengths), max(b.longest for b in batches))


def between(batch: Ragged, first: int, last: int) -> Ragged:
    """Sentences first .. last - 1."""
    bounds = batch.offsets[first : last + 1]
    return Ragged(batch.ids[bounds[0] : bounds[-1]], bounds - bounds[0], batch.longest)


def taken(batch: Ragged, at: Tensor) -> tuple[Ragged, Tensor]:
    """Some of the sentences, or all, in this order; and where each of their tokens stood in the batch."""
    starts, lengths = batch.offsets[:-1][at], batch.lengths[at]
    bounds = offsets(lengths)
    tokens = torch.arange(int(bounds[-1])) + (starts - bounds[:-1]).repeat_interleave(lengths)
    return Ragged(batch.ids[tokens], bounds, int(lengths.max())), tokens


def split(batch: Ragged, most: int) -> list[Ragged]:
    """The sentences in parts of at most so many, in order."""
    return [between(batch, i, min(i + most, batch.n)) for i in range(0, batch.n, most)]


def mask(batch: Ragged) -> Tensor:
    """(n, l) bool: True where a padded batch holds a token."""
    lengths = batch.lengths
    return torch.arange(batch.longest, device=lengths.device) < lengths.unsqueeze(1)


def places(batch: Ragged) -> tuple[Tensor, Tensor]:
    """(t,) sentence of each token, (t,) its place there: 0, 1, 2, ..."""
    device, t = batch.ids.device, len(batch.ids)
    sentence = torch.repeat_interleave(torch.arange(batch.n, device=device), batch.lengths, output_size=t)
    return sentence, torch.arange(t, device=device) - batch.offsets[sentence]


def pad(batch: Ragged, value: int) -> Tensor:
    """(t,) -> (n, l) token ids, filled up on the right with `value`."""
    return batch.ids.new_full((batch.n, batch.longest), value).index_put(places(batch), batch.ids)


def unpad(hidden: Tensor, batch: Ragged) -> Tensor:
    """(..., n, l, d) -> (..., t, d): the rows that hold the tokens of a batch."""
    sentence, place = places(batch)
    return hidden[..., sentence, place, :]

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
    longest: l, or more. on_host: the offsets where the host can read them, None where they are that already.
    With both nobody has to wait for a device to know its own numbers.
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
        """(n,) tokens in each sentence."""
        return self.offsets.diff()

    def to(self, device: torch.device, non_blocking: bool | None = None) -> Ragged:
        """The same batch there. non_blocking: None waits for a CPU and an Apple GPU, as Lightning does."""
        if non_blocking is None:
            non_blocking = torch.device(device).type not in ("cpu", "mps")
        ids, offsets = (x.to(device, non_blocking=non_blocking) for x in (self.ids, self.offsets))
        return Ragged(ids, offsets, self.longest, self.bounds)

    @property
    def bounds(self) -> Tensor:
        """The offsets on the host."""
        return self.offsets if self.on_host is None else self.on_host


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
    lengths, on_host = torch.cat([b.lengths for b in batches]), None
    if batches[0].on_host is not None:
        on_host = offsets(torch.cat([b.bounds.diff() for b in batches]))
    ids, longest = torch.cat([b.ids for b in batches]), max(b.longest for b in batches)
    return Ragged(ids, offsets(lengths), longest, on_host)


def between(batch: Ragged, first: int, last: int) -> Ragged:
    """Sentences first .. last - 1."""
    bounds, there = batch.bounds[first : last + 1], batch.offsets[first : last + 1]
    ids, on_host = batch.ids[bounds[0] : bounds[-1]], None if batch.on_host is None else bounds - bounds[0]
    return Ragged(ids, there - there[0], batch.longest, on_host)


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

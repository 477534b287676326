"""Padding and un-padding lose nothing and invent nothing."""

import pytest
import torch

from whitenedcse.ragged import concatenate, mask, pad, ragged, rows, unpad

ROWS = [[5, 6, 7], [8], [9, 10, 11, 12]]


def rows_of(batch):
    return [batch.ids[a:b].tolist() for a, b in zip(batch.offsets[:-1], batch.offsets[1:], strict=True)]


def test_rows_are_what_the_offsets_say():
    assert rows(ragged(ROWS)) == rows_of(ragged(ROWS)) == ROWS


def test_rows_survive_the_round_trip_through_padding():
    batch = ragged(ROWS)
    padded = pad(batch, value=0)
    assert torch.equal(mask(batch), padded != 0)
    assert padded.tolist() == [[5, 6, 7, 0], [8, 0, 0, 0], [9, 10, 11, 12]]
    assert unpad(padded.unsqueeze(-1), batch).squeeze(-1).tolist() == batch.ids.tolist()


def test_unpad_keeps_leading_axes():
    hidden = torch.randn(2, 3, 4, 5)
    expected = torch.stack([torch.cat([layer[0, :3], layer[1, :1], layer[2, :4]]) for layer in hidden])
    assert torch.equal(unpad(hidden, ragged(ROWS)), expected)


@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_repeated_batch_holds_every_sentence_once_a_view(times):
    assert rows_of(concatenate([ragged(ROWS)] * times)) == ROWS * times


def test_concatenation_keeps_order():
    assert rows_of(concatenate([ragged(ROWS[:2]), ragged(ROWS[2:])])) == ROWS

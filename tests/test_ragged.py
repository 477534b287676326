"""Padding and un-padding lose nothing and invent nothing."""

import torch

from whitenedcse.ragged import between, concatenate, mask, pad, ragged, rows, unpad

ROWS = [[5, 6, 7], [8], [9, 10, 11, 12]]


def test_rows_survive_the_round_trip_through_padding():
    batch = ragged(ROWS)
    padded = pad(batch, value=0)
    assert torch.equal(mask(batch), padded != 0)
    assert padded.tolist() == [[5, 6, 7, 0], [8, 0, 0, 0], [9, 10, 11, 12]]
    assert unpad(padded.unsqueeze(-1), batch).squeeze(-1).tolist() == batch.ids.tolist()
    hidden = torch.randn(2, 3, 4, 5)  # leading axes stay
    expected = torch.stack([torch.cat([layer[0, :3], layer[1, :1], layer[2, :4]]) for layer in hidden])
    assert torch.equal(unpad(hidden, batch), expected)


def test_rows_are_what_the_offsets_say_and_concatenation_keeps_their_order():
    batch = ragged(ROWS)
    assert batch.ids.tolist() == sum(ROWS, []) and batch.offsets.tolist() == [0, 3, 4, 8]
    assert rows(batch) == ROWS and rows(concatenate([batch] * 3)) == ROWS * 3
    assert rows(concatenate([ragged(ROWS[:2]), ragged(ROWS[2:])])) == ROWS


def test_a_part_of_a_batch_has_its_own_offsets_on_device_and_host():
    batch = ragged(ROWS * 2)
    part = between(batch._replace(on_host=batch.offsets.clone()), 2, 5)
    assert rows(part) == (ROWS * 2)[2:5]
    assert part.offsets.tolist() == part.bounds.tolist() == [0, 4, 7, 8] and part.on_host is not None
    assert between(batch, 2, 5).on_host is None

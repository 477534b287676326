"""Some tokens are written twice: as many as ESimCSE draws, anywhere but in the special ones."""

from itertools import count

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2_contingency, chisquare
from transformers import BertTokenizer

from whitenedcse.data.views import Views, drawn, frame, mixed, written
from whitenedcse.ragged import ragged, rows

FRAMES = [(1, 1), (0, 1), (0, 0), (2, 3)]
COUNTS = st.lists(st.integers(0, 40), min_size=1, max_size=12)


def sentences(lengths, around=(1, 1)):
    """Sentences of so many tokens, all different, between special ones."""
    first = count(100)
    front, back = list(range(around[0])), list(range(50, 50 + around[1]))
    return [[*front, *(next(first) for _ in range(m)), *back] for m in lengths]


def keys(n, seed=0):
    return np.random.default_rng(seed).integers(0, 2**64, n, dtype=np.uint64)


def naive(sentence, twice, max_length, back):
    """One token after the other; then the last ones before the special tokens go."""
    written = []
    for token, again in zip(sentence, twice, strict=True):
        written += [token, token] if again else [token]
    while len(written) > max_length:
        del written[len(written) - back - 1]
    return written


@given(COUNTS, st.sampled_from(FRAMES), st.integers(0, 2**32), st.integers(6, 50))
@settings(max_examples=150, deadline=None)
def test_writing_is_that_of_a_naive_loop(lengths, around, seed, max_length):
    batch = ragged(sentences(lengths, around))
    twice = np.random.default_rng(seed).random(len(batch.ids)) < 0.4
    got = written(batch, 1 + twice, max_length, around)
    parts = np.split(twice, batch.offsets[1:-1].numpy())
    assert rows(got) == [
        naive(row, part, max_length, around[1]) for row, part in zip(rows(batch), parts, strict=True)
    ]
    assert got.longest == max(map(len, rows(got))) and got.ids.dtype == got.offsets.dtype == torch.int64


@given(COUNTS, st.sampled_from(FRAMES), st.integers(0, 2**32), st.floats(0, 1, exclude_max=True))
@settings(max_examples=150, deadline=None)
def test_no_special_token_is_drawn_and_no_more_than_there_are(lengths, around, seed, rate):
    batch = ragged(sentences(lengths, around))
    twice = drawn(batch, keys(len(lengths), seed), rate, around)
    for m, part in zip(lengths, np.split(twice, batch.offsets[1:-1].numpy()), strict=True):
        assert not part[: around[0]].any() and not part[around[0] + m :].any()
        assert part.sum() <= min(m, max(2, int(rate * m)))


@pytest.mark.parametrize(
    ("m", "rate", "most"),
    [(1, 0.32, 1), (2, 0.32, 2), (5, 0.32, 2), (9, 0.32, 2), (10, 0.32, 3), (30, 0.32, 9), (3, 0.99, 2)]
    + [(30, 0.01, 2), (100, 0.29, 28)],  # 0.29 * 100 is 28.999999999999996, and int() cuts
)
@pytest.mark.slow(but=3)
def test_the_number_of_repeats_is_uniform(m, rate, most):
    n = 20_000
    batch = ragged(sentences([m] * n))
    numbers = drawn(batch, keys(n), rate, (1, 1)).reshape(n, m + 2).sum(axis=1)
    found = np.bincount(numbers, minlength=most + 1)
    assert len(found) == most + 1 and chisquare(found).pvalue > 1e-3


@pytest.mark.parametrize("m", [3, 10, 24])
def test_each_token_and_each_pair_of_tokens_is_as_likely(m):
    n = 40_000
    twice = drawn(ragged(sentences([m] * n)), keys(n, 1), 0.5, (1, 1)).reshape(n, m + 2)[:, 1:-1]
    assert chisquare(twice.sum(axis=0)).pvalue > 1e-3
    pairs = twice[twice.sum(axis=1) == 2].astype(np.int64)
    together = (pairs.T @ pairs)[np.triu_indices(m, 1)]
    assert chisquare(together).pvalue > 1e-3


def test_neighbouring_rows_passes_and_epochs_draw_independently():
    """Of two of them, numbers and (one place further) choices make tables like those of independent draws."""
    n, m, marks = 8_000, 10, []
    batch = ragged(sentences([m] * 3 * n))
    for epoch in (0, 1):
        made = Views(64, (1, 1), 7, lambda epoch=epoch: epoch, repetition=0.32)(batch, np.arange(n), 1)
        marks.append(np.bincount(made.ids)[100:].reshape(3, n, m) - 1)  # each word is another number
    (plain, second, third), (_, later, _) = marks
    assert not plain.any()
    pairs = [(second[1:], second[:-1]), (second, third), (second[1:], third[:-1]), (second, later)]
    for one, other in pairs:
        numbers = np.bincount(one.sum(axis=1) * 4 + other.sum(axis=1), minlength=16)
        assert chisquare(numbers).pvalue > 1e-3
        for shift in range(-3, 4):
            places = np.bincount(one[:, 5] * 2 + other[:, 5 + shift], minlength=4).reshape(2, 2)
            assert chi2_contingency(places).pvalue > 1e-4


def test_what_is_drawn_of_a_sentence_is_decided_by_its_key_alone():
    batch, k = sentences([7, 0, 12, 1, 30]), keys(5)
    twice = np.split(drawn(ragged(batch), k, 0.5, (1, 1)), np.cumsum([9, 2, 14, 3]))
    order = [4, 2, 0, 3]
    again = drawn(ragged([batch[i] for i in order]), k[order], 0.5, (1, 1))
    assert again.tolist() == np.concatenate([twice[i] for i in order]).tolist()


def test_numbers_are_those_of_splitmix64():
    """The first outputs of the published generator at seed 1234567: its state goes up by the golden ratio."""
    states = (1234567 + np.arange(1, 6, dtype=np.uint64) * 0x9E3779B97F4A7C15).astype(np.uint64)
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert mixed(states).tolist() == [*published, 16408922859458223821]


def test_a_frame_is_what_stands_around_every_sentence(tokenizer, tmp_path):
    assert frame(tokenizer) == (1, 1)
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "cat"]))
    assert frame(BertTokenizer(str(tmp_path / "vocab.txt"))) == (1, 1)  # "a" is unknown to it


def test_a_batch_of_repeats_undone_is_the_batch():
    batch = ragged(sentences([4, 1, 0, 25] * 6))
    made = Views(64, (1, 1), 3, lambda: 2, repetition=0.6)(batch, np.array([5, 9, 2, 40, 7, 8, 1, 0]), 1)
    assert rows(made)[:8] == rows(batch)[:8]
    assert [list(dict.fromkeys(row)) for row in rows(made)] == rows(batch)
    assert rows(made)[8:16] != rows(made)[16:]
    assert made.longest == max(map(len, rows(made)))

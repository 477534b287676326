"""Crops and cut-off take what a naive loop takes, sentence by sentence, and never a special token."""

import hashlib

import numpy as np
import pytest
from encoders import SENTENCES, byte_level
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from test_repetition import COUNTS, FRAMES, keys, sentences

from whitenedcse.data.views import LEAST, Views, prompt_tokens, removed, spans
from whitenedcse.ragged import ragged, rows

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15


def split_mix(x):
    """The last step of SplitMix64, in whole numbers of Python."""
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
    return x ^ x >> 31


def key(number, seed, epoch, *kind):
    """The random number of one sentence in one block, and of one kind of change."""
    digest = hashlib.blake2b(repr((seed, epoch, *kind)).encode(), digest_size=8).digest()
    return split_mix(number * GOLDEN + int.from_bytes(digest, "big") & MASK)


def inner(sentence, front, back):
    """A sentence in three parts: what stands before the words, the words, and what stands behind them."""
    end = max(len(sentence) - back, front)
    return sentence[:front], sentence[front:end], sentence[end:]


def cropped(words, key, least, most):
    share = least + (most - least) * ((split_mix(key) >> 11) / 2**53)
    length = min(max(round(share * len(words)), LEAST), len(words))  # both round half to even
    start = (split_mix(key + GOLDEN & MASK) >> 32) * (len(words) - length + 1) >> 32
    return words[start : start + length]


def chosen(m, key, count):
    """The places of the `count` smallest of m random numbers, of 40 bits as they are sorted."""
    return set(sorted(range(m), key=lambda i: split_mix(key + (i + 1) * GOLDEN & MASK) >> 24)[:count])


def naive(sentence, number, views, *, later):
    """One sentence of one block after its changes, in whole numbers and lists."""
    seed, at, (front, back) = views.seed, views.epoch(), views.frame
    head, words, tail = inner(sentence, front + views.prompt, back)
    if views.crop:
        ends = views.crop[-2:] if later else views.crop[:2]
        words = cropped(words, key(number, seed, at, "crop"), *ends)
    if views.cutoff and later:
        out = chosen(len(words), key(number, seed, at, "cutoff"), int(views.cutoff * len(words)))
        words = [word for i, word in enumerate(words) if i not in out]
    head, words, tail = inner(head + words + tail, front, back)
    if views.repetition and later:
        own, m = key(number, seed, at), len(words)
        most = min(max(int(views.repetition * m), 2), m)
        twice = chosen(m, own, (split_mix(own) >> 32) * (most + 1) >> 32)
        words = [word for i, word in enumerate(words) for _ in range(1 + (i in twice))]
    return head + words[: max(views.max_length - front - back, 0)] + tail


CHANGES = st.fixed_dictionaries(
    {
        "crop": st.sampled_from([None, (0.5, 1.0), (0.1, 0.3), (1, 1), (1, 1, 0.5, 1.0), (0.2, 0.2, 0.9, 1)]),
        "cutoff": st.sampled_from([None, 0.15, 0.5, 0.99]),
        "repetition": st.sampled_from([0.0, 0.3, 0.9]),
        "prompt": st.integers(0, 3),
    }
)


@given(COUNTS, st.sampled_from(FRAMES), CHANGES, st.integers(1, 3), st.integers(1, 2), st.integers(0, 9))
@settings(max_examples=200, deadline=None)
def test_all_changes_together_are_those_of_a_naive_loop(lengths, around, changes, passes, first, at):
    """With any of them off, too; blocks are the passes, or the passes of two columns."""
    n, blocks = len(lengths), passes * first
    columns = [sentences([m + changes["prompt"] for m in lengths], around) for _ in range(first)]
    places = np.random.default_rng(at).permutation(1000)[:n]
    batch = ragged([row for _ in range(passes) for column in columns for row in column])
    views = Views(max_length=batch.longest + 1, frame=around, seed=5, epoch=lambda: at, **changes)
    got = views(batch, places, first)
    assert rows(got) == [
        naive(row, int(places[i]) * blocks + block, views, later=block >= first)
        for block in range(blocks)
        for i, row in enumerate(columns[block % first])
    ]
    assert got.longest >= max(map(len, rows(got)))


@pytest.mark.parametrize("m", [0, 1, 3, 4, 5, 40])
@pytest.mark.parametrize("crop", [(1e-9, 1e-9), (0.5, 1.0)])
def test_a_crop_has_four_words_or_all_and_a_sentence_never_ends_empty(m, crop):
    batch = ragged(sentences([m] * 500))
    views = Views(max_length=64, frame=(1, 1), seed=1, epoch=lambda: 0, crop=crop, cutoff=0.999)
    found = rows(views(batch, np.arange(250), 1))
    assert {row[0] for row in found} == {0} and {row[-1] for row in found} == {50}
    shortest = min(len(row) - 2 for row in found[:250])
    assert shortest == min(m, LEAST) if crop[1] < 1 else shortest >= min(m, LEAST)
    assert {len(row) - 2 for row in found[250:]} == {min(m, 1)}


@pytest.mark.parametrize(("m", "least", "most"), [(20, 0.5, 1.0), (40, 0.25, 0.75), (30, 0.6, 0.6)])
@pytest.mark.slow(but=1)
def test_lengths_and_starts_of_crops_are_uniform(m, least, most):
    n = 40_000
    shares = np.array([[least], [most]]).repeat(n, axis=1)
    stay = spans(ragged(sentences([m] * n)), keys(n), shares, (1, 1)).reshape(n, m + 2)
    assert stay[:, 0].all() and stay[:, -1].all()
    lengths, starts = stay[:, 1:-1].sum(axis=1), stay[:, 1:-1].argmax(axis=1)
    assert (np.diff(stay[:, 1:-1].astype(int), axis=1) == 1).sum(axis=1).max() <= 1  # one span
    low, high = round(least * m), round(most * m)
    found = np.bincount(lengths - low, minlength=high - low + 1)
    assert len(found) == high - low + 1
    if high > low:
        width = np.ones(high - low + 1)
        width[[0, -1]] = 0.5  # what rounds to an end comes from one side
        assert chisquare(found, n * width / width.sum()).pvalue > 1e-3
    for length in range(low, high + 1):
        at = starts[lengths == length]
        if length < m:
            assert chisquare(np.bincount(at, minlength=m - length + 1)).pvalue > 1e-4


def test_each_token_is_as_likely_cut_off_and_as_many_as_the_rate_says():
    n, m = 30_000, 13
    out = removed(ragged(sentences([m] * n)), keys(n, 2), 0.4, (1, 1)).reshape(n, m + 2)
    assert set(out.sum(axis=1).tolist()) == {5} and not out[:, [0, -1]].any()
    assert chisquare(out[:, 1:-1].sum(axis=0)).pvalue > 1e-3


def test_crop_cutoff_and_repetition_draw_independently():
    """Of one sentence, where a crop starts says nothing of what is cut off, nor that of what is repeated."""
    views = Views(max_length=64, frame=(1, 1), seed=3, epoch=lambda: 1)
    numbers = np.arange(20_000, dtype=np.uint64)
    every = [views.keys(numbers, *kind) for kind in (("crop",), ("cutoff",), ())]
    for one, other in [(0, 1), (0, 2), (1, 2)]:
        table = np.bincount(
            (every[one] >> 62).astype(int) * 4 + (every[other] >> 62).astype(int), minlength=16
        )
        assert chisquare(table).pvalue > 1e-3


def test_a_space_at_the_end_of_a_prompt_belongs_to_the_word_behind_it():
    """Of a byte-level tokenizer, whose words begin with their space."""
    tokenizer, prompt = byte_level(ends=True), "every child: "
    count = prompt_tokens(tokenizer, prompt)
    ids = tokenizer(prompt).input_ids
    assert 2 < count == len(ids) - 2  # less the space and the end
    after = [tokenizer(prompt + sentence).input_ids for sentence in SENTENCES]
    assert all(row[:count] == ids[:count] for row in after) and any(row[count] != ids[count] for row in after)

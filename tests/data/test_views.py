"""Crops and repetition take what a naive loop takes, sentence by sentence, and never a special token."""

import hashlib
from itertools import count

import numpy as np
from encoders import SENTENCES, byte_level
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2_contingency, chisquare

from whitenedcse.data.views import LEAST, Views, mixed, prompt_tokens
from whitenedcse.ragged import ragged, rows

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15


def sentences(lengths, around=(1, 1)):
    """Sentences of so many tokens, all different, between special ones."""
    first = count(100)
    front, back = list(range(around[0])), list(range(50, 50 + around[1]))
    return [[*front, *(next(first) for _ in range(m)), *back] for m in lengths]


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
        words = cropped(words, key(number, seed, at, "crop"), *views.crop)
    head, words, tail = inner(head + words + tail, front, back)
    if views.repetition and later:
        own, m = key(number, seed, at), len(words)
        most = min(max(int(views.repetition * m), 2), m)
        twice = chosen(m, own, (split_mix(own) >> 32) * (most + 1) >> 32)
        words = [word for i, word in enumerate(words) for _ in range(1 + (i in twice))]
    return head + words[: max(views.max_length - front - back, 0)] + tail


COUNTS = st.lists(st.integers(0, 40), min_size=1, max_size=12)
FRAMES = st.sampled_from([(1, 1), (0, 1), (0, 0), (2, 3)])
CHANGES = {"repetition": st.sampled_from([0.0, 0.3, 0.9]), "prompt": st.integers(0, 3)}
CHANGES["crop"] = st.sampled_from([None, (0.5, 1.0), (0.1, 0.3), (1, 1), (0.9, 0.9)])
MADE = st.fixed_dictionaries(CHANGES)


@given(COUNTS, FRAMES, MADE, st.integers(1, 3), st.integers(1, 2), st.integers(0, 9))
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


def test_numbers_are_those_of_splitmix64():
    """The first outputs of the published generator at seed 1234567: its state goes up by the golden ratio."""
    states = (1234567 + np.arange(1, 6, dtype=np.uint64) * 0x9E3779B97F4A7C15).astype(np.uint64)
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert mixed(states).tolist() == [*published, 16408922859458223821]


def test_a_space_at_the_end_of_a_prompt_belongs_to_the_word_behind_it():
    """Of a byte-level tokenizer, whose words begin with their space."""
    tokenizer, prompt = byte_level(ends=True), "every child: "
    count = prompt_tokens(tokenizer, prompt)
    ids = tokenizer(prompt).input_ids
    assert 2 < count == len(ids) - 2  # less the space and the end
    after = [tokenizer(prompt + sentence).input_ids for sentence in SENTENCES]
    assert all(row[:count] == ids[:count] for row in after) and any(row[count] != ids[count] for row in after)

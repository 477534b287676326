"""The quick-start data against facts written by hand and against what the generator writes today."""

import importlib.util
from collections import Counter
from pathlib import Path
from random import Random

import pytest

FOLDER = Path(__file__).parents[1] / "data" / "quickstart"
FILES = ("sentences.txt", "dev.tsv", "test.tsv")


def loaded():
    spec = importlib.util.spec_from_file_location("quickstart_generate", FOLDER / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


generate = loaded()


def rows(name):
    header, *lines = (FOLDER / name).read_text(encoding="ascii").splitlines()
    assert header == "score\tsentence1\tsentence2"
    return [(float(score), one, two) for score, one, two in (line.split("\t") for line in lines)]


def lines():
    return (FOLDER / "sentences.txt").read_text(encoding="ascii").splitlines()


def test_the_generator_writes_the_committed_files_byte_for_byte(tmp_path):
    generate.main(tmp_path / "out")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == sorted(FILES)
    for name in FILES:
        assert (tmp_path / "out" / name).read_bytes() == (FOLDER / name).read_bytes(), name


def test_counts_and_size():
    assert (len(lines()), len(rows("dev.tsv")), len(rows("test.tsv"))) == (20_000, 750, 750)
    assert sum((FOLDER / name).stat().st_size for name in FILES) < 2_000_000


def test_no_sentence_is_told_twice_within_or_across_the_files():
    graded = [{one, two} for name in ("dev.tsv", "test.tsv") for _, one, two in rows(name)]
    told = Counter(lines()) + Counter(text for pair in graded for text in pair)
    assert len(lines()) + 2 * len(graded) == sum(told.values())  # no pair repeats one sentence
    assert max(told.values()) == 1, told.most_common(1)


def test_sentences_are_plain_english_lines():
    for text in lines() + [
        text for name in ("dev.tsv", "test.tsv") for _, *two in rows(name) for text in two
    ]:
        assert text[0].isupper() and text.endswith(".") and not set(text) & set('{}\t"|/'), text
        assert "  " not in text and " ," not in text and ",," not in text, text


@pytest.mark.parametrize("name", ["dev.tsv", "test.tsv"])
def test_gold_fills_every_fifth_of_the_scale(name):
    scores = [score for score, *_ in rows(name)]
    assert min(scores) == 0.0 and max(scores) == 5.0
    fifths = Counter(min(int(score), 4) for score in scores)
    assert all(fifths[k] >= 75 for k in range(5)), fifths


@pytest.mark.parametrize("name", ["dev.tsv", "test.tsv"])
def test_paraphrases_may_share_few_words_and_strangers_many(name):
    def overlap(one, two):
        a, b = set(one.lower().split()), set(two.lower().split())
        return len(a & b) / len(a | b)

    same = [overlap(one, two) for score, one, two in rows(name) if score == 5.0]
    other = [overlap(one, two) for score, one, two in rows(name) if score == 0.0]
    assert sum(x < 0.3 for x in same) >= 20 and sum(x > 0.3 for x in other) >= 20


@pytest.mark.parametrize(
    ("changes", "score"),
    [
        ({}, 5.0),
        ({"subject": 9}, 5 * 7 / 9),  # weights: 2 + 2 + 2 for who, did, what; 1 + 1 + 1 for where, when, how
        ({"place": 9}, 5 * 8 / 9),
        ({"place": None}, 5 * 8 / 9),
        ({"relation": 9, "object": 9, "manner": 9}, 5 * 4 / 9),
        ({"subject": 9, "relation": 9, "object": 9, "place": 9, "time": 9, "manner": None}, 0.0),
    ],
)
def test_gold_is_the_weighted_share_of_slots_kept(changes, score):
    fact = generate.Fact(subject=0, relation=1, object=2, place=3, time=0, manner=5)
    other = fact._replace(**changes)
    assert generate.gold(fact, other) == generate.gold(other, fact) == pytest.approx(score, abs=1e-12)


def test_a_slot_that_neither_fact_fills_does_not_count():
    assert generate.gold(generate.Fact(0, 1, 2), generate.Fact(9, 1, 2)) == pytest.approx(5 * 4 / 6)
    assert generate.gold(generate.Fact(0, 1, 2), generate.Fact(0, 1, 2, 0)) == pytest.approx(5 * 6 / 7)


def test_a_name_belongs_to_one_entry_so_no_two_facts_read_alike():
    for names in generate.NAMES:
        owners = Counter(name for entry in names for name in set(entry))
        assert max(owners.values()) == 1, owners.most_common(1)


def parsed(text):
    """The fact a sentence tells, read back from its words alone: the longest name of each slot."""
    padded = f" {text.lower().replace(',', ' ').replace('.', ' ')} "
    found = []
    for names in generate.NAMES:
        hits = [(len(n), k) for k, entry in enumerate(names) for n in entry if f" {n.lower()} " in padded]
        found.append(max(hits, default=(0, None))[1])
    return tuple(found)


@pytest.mark.parametrize("name", ["dev.tsv", "test.tsv"])
def test_gold_can_be_recomputed_from_the_words(name):
    weights = (2, 2, 2, 1, 1, 1)
    for score, one, two in rows(name):
        a, b = parsed(one), parsed(two)
        filled = sum(w for w, x, y in zip(weights, a, b, strict=True) if x is not None or y is not None)
        kept = sum(w for w, x, y in zip(weights, a, b, strict=True) if x is not None and x == y)
        assert score == pytest.approx(5 * kept / filled, abs=0.0051), (one, two)


def test_styles_never_look_at_the_gold():
    pairs = [generate.pair(Random(seed)) for seed in range(4_000)]
    closed = [
        any(c and one.endswith(c + ".") and two.endswith(c + ".") for c in generate.CLOSINGS)
        for _, one, two in pairs
    ]
    low = [same for same, (score, *_) in zip(closed, pairs, strict=True) if score < 2.5]
    high = [same for same, (score, *_) in zip(closed, pairs, strict=True) if score >= 2.5]
    assert abs(sum(low) / len(low) - sum(high) / len(high)) < 0.06  # four standard errors


def test_a_sentence_seen_before_is_never_written_again(monkeypatch):
    monkeypatch.setattr(generate, "SENTENCES", 50)
    monkeypatch.setattr(generate, "PAIRS", 20)
    first = generate.unlabelled(Random(1), set())
    assert not set(first) & set(generate.unlabelled(Random(1), set(first)))
    second = {text for line in generate.graded(Random(1), set())[1:] for text in line.split("\t")[2:]}
    again = {text for line in generate.graded(Random(1), set(second))[1:] for text in line.split("\t")[1:]}
    assert second and not second & again

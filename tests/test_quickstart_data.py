"""The quick-start data against facts written by hand and against what the generator writes today."""

import importlib.util
from collections import Counter
from pathlib import Path

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


def test_no_sentence_is_told_twice_within_or_across_the_files():
    graded = [{one, two} for name in ("dev.tsv", "test.tsv") for _, one, two in rows(name)]
    told = Counter(lines()) + Counter(text for pair in graded for text in pair)
    assert len(lines()) + 2 * len(graded) == sum(told.values())  # no pair repeats one sentence
    assert max(told.values()) == 1, told.most_common(1)


def test_gold_is_the_weighted_share_of_slots_kept():
    fact = generate.Fact(subject=0, relation=1, object=2, place=3, time=0, manner=5)
    for changes, score in [
        ({}, 5.0),
        ({"subject": 9}, 5 * 7 / 9),  # weights: 2 + 2 + 2 for who, did, what; 1 + 1 + 1 for where, when, how
        ({"place": None}, 5 * 8 / 9),
        ({"relation": 9, "object": 9, "manner": 9}, 5 * 4 / 9),
        ({"subject": 9, "relation": 9, "object": 9, "place": 9, "time": 9, "manner": None}, 0.0),
    ]:
        other = fact._replace(**changes)
        assert generate.gold(fact, other) == generate.gold(other, fact) == pytest.approx(score, abs=1e-12)
    assert generate.gold(generate.Fact(0, 1, 2), generate.Fact(9, 1, 2)) == pytest.approx(5 * 4 / 6)


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

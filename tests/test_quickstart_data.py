"""The quick-start data against facts written by hand and against what the generator writes today."""

import runpy
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "data" / "quickstart"
FILES = ("sentences.txt", "dev.tsv", "test.tsv")
GENERATE = runpy.run_path(str(FOLDER / "generate.py"))


def test_the_generator_writes_the_committed_files_byte_for_byte(tmp_path):
    GENERATE["main"](tmp_path / "out")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == sorted(FILES)
    for name in FILES:
        assert (tmp_path / "out" / name).read_bytes() == (FOLDER / name).read_bytes(), name


def parsed(text):
    """The fact a sentence tells, read back from its words alone: the longest name of each slot."""
    padded = f" {text.lower().replace(',', ' ').replace('.', ' ')} "
    found = []
    for names in GENERATE["NAMES"]:
        hits = [(len(n), k) for k, entry in enumerate(names) for n in entry if f" {n.lower()} " in padded]
        found.append(max(hits, default=(0, None))[1])
    return tuple(found)


@pytest.mark.parametrize("name", ["dev.tsv", "test.tsv"])
def test_gold_can_be_recomputed_from_the_words(name):
    weights = (2, 2, 2, 1, 1, 1)
    header, *lines = (FOLDER / name).read_text(encoding="ascii").splitlines()
    assert header == "score\tsentence1\tsentence2"
    for score, one, two in (line.split("\t") for line in lines):
        a, b = parsed(one), parsed(two)
        filled = sum(w for w, x, y in zip(weights, a, b, strict=True) if x is not None or y is not None)
        kept = sum(w for w, x, y in zip(weights, a, b, strict=True) if x is not None and x == y)
        assert float(score) == pytest.approx(5 * kept / filled, abs=0.0051), (one, two)

"""Tasks by name, and what a transform for them is fitted to: each sentence as often as it occurs."""

import gzip

import numpy as np
import pytest

from whitenedcse.evaluation.tasks import corpus_texts, own_texts, subsets, task, texts
from whitenedcse.evaluation.transfer import Labelled


@pytest.fixture(autouse=True)
def data(tmp_path, monkeypatch):
    """A data folder with a small STS-B and SICK in SentEval's layout."""
    monkeypatch.setenv("WHITENEDCSE_DATA", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    stsb, sick = tmp_path / "senteval/STS/STSBenchmark", tmp_path / "senteval/SICK"
    for folder in (stsb, sick):
        folder.mkdir(parents=True)
    for part in ("train", "dev", "test"):
        lines = [f"g\tf\ty\t{i}\t{i}\tA {part} Dog\tA {part} Cat {i}\n" for i in range(3)]
        (stsb / f"sts-{part}.csv").write_text("".join(lines))
    for part in ("train", "trial", "test_annotated"):
        (sick / f"SICK_{part}.txt").write_text("h\n" + "".join(f"{i}\tA {part}\tB\t{i}\tx\n" for i in (1, 2)))
    return tmp_path


def test_target_is_train_dev_and_test_and_year_the_test_alone():
    parts = {
        part: [f"A {part} Dog"] * 3 + [f"A {part} Cat {i}" for i in range(3)]
        for part in ("train", "dev", "test")
    }
    assert own_texts("year", "STS-B") == parts["test"]
    assert sorted(own_texts("target", "STS-B")) == sorted(parts["train"] + parts["dev"] + parts["test"])
    assert sorted(own_texts("target", "STS-B/dev")) == sorted(own_texts("target", "STS-B"))
    assert len(own_texts("target", "SICK-R")) == 12


def test_lower_case_spares_sick_where_asked():
    assert texts(task("STS-B", case="lower"))[0] == "a test dog"
    assert texts(task("STS-B"))[0] == "A test Dog"
    assert own_texts("target", "STS-B", case="lower") == [t.lower() for t in own_texts("target", "STS-B")]
    assert texts(task("SICK-R", case="lower_but_sick"))[0] == "A test_annotated"
    assert texts(task("SICK-R", case="lower"))[0] == "a test_annotated"
    assert texts(task("STS-B", case="lower_but_sick"))[0] == "a test dog"


def test_a_file_is_scored_pairs_or_labelled_texts_by_its_columns(data):
    (data / "pairs.csv").write_text("score,sentence1,sentence2\n1,Ein Hund,Eine Katze\n2,a,b\n")
    (data / "texts.jsonl").write_text(
        "".join(f'{{"text": "Wort {i}", "label": {i % 2}}}\n' for i in range(40))
    )
    (pairs,) = task("pairs.csv")
    assert (pairs.left, pairs.right, pairs.gold.tolist()) == (["Ein Hund", "a"], ["Eine Katze", "b"], [1, 2])
    labelled = task("texts", case="lower")  # by name, from the data folder
    assert isinstance(labelled, Labelled)
    assert labelled.columns[0][:2] == ["wort 0", "wort 1"]
    assert labelled.labels[:2].tolist() == [0, 1]
    assert texts(labelled) == [f"wort {i}" for i in range(40)]


def test_a_folder_of_pairs_is_a_task_with_subsets(data):
    (data / "deutsch").mkdir()
    for name in ("zeitung", "forum"):
        (data / "deutsch" / f"{name}.tsv").write_text(f"score\tsentence1\tsentence2\n1\t{name}\tx\n2\ta\tb\n")
    packed = gzip.compress((data / "deutsch/forum.tsv").read_bytes())
    (data / "deutsch/wiki.tsv.gz").write_bytes(packed)
    (data / "deutsch/README.md").write_text("no pairs")
    found = [("forum", "forum"), ("wiki.tsv", "forum"), ("zeitung", "zeitung")]
    assert [(s.name, s.left[0]) for s in task("deutsch")] == found


def test_a_corpus_gives_a_sample_of_its_rows_and_all_their_columns(data):
    (data / "lines.txt").write_text("".join(f"line {i}\n" for i in range(50)))
    (data / "nli_for_simcse.csv").write_text("sent0,sent1,hard_neg\na,b,c\nd,e,f\n")
    assert corpus_texts("lines.txt") == [f"line {i}" for i in range(50)]
    assert len(set(corpus_texts("lines.txt", sample=7))) == 7
    assert corpus_texts("nli_for_simcse") == list("abcdef")
    assert corpus_texts("nli_for_simcse.csv", ["sent1"]) == ["b", "e"]


def test_what_is_not_found_says_what_there_is(data):
    with pytest.raises(
        FileNotFoundError, match=r"no task 'STS17': neither a known one \(STS12, .*RTE\) nor a file \(STS17, "
    ):
        task("STS17")
    with pytest.raises(FileNotFoundError, match="RTE: GLUE's dev.tsv is at none of .*rte/dev.tsv"):
        task("RTE")
    with pytest.raises(FileNotFoundError, match="no task 'mine'"):
        subsets("mine")
    assert np.array_equal(subsets("STS-B")[0].gold, [0, 1, 2])

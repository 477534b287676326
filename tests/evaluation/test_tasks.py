"""Tasks by name, and what a transform for them is fitted to: each sentence as often as it occurs."""

import gzip

import numpy as np
import pytest

from whitenedcse.evaluation.tasks import Labelled, corpus_texts, own_texts, subsets, task, texts


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


def test_a_file_in_a_folder_that_is_called_as_a_benchmark_is_fitted_to_itself_alone(data):
    (data / "STS-B").mkdir()
    (data / "STS-B" / "mine.tsv").write_text("score\tsentence1\tsentence2\n1\ta\tb\n2\tc\td\n")
    assert own_texts("target", "STS-B/mine.tsv") == ["a", "c", "b", "d"]


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


ROWS = "left one,score,right one,label\na: b,3,c,x\nd,0.5,e,y\n"  # of a csv with names of its own


@pytest.mark.parametrize("place", ["own.csv", "own", "{data}/own.csv", "folder:1", "./C:x.csv"])
def test_columns_of_any_name_are_named_with_the_file_the_data_root_or_the_folder(data, place):
    for file in ("own.csv", "C:x.csv", "folder:1/part.csv"):
        (data / file).parent.mkdir(exist_ok=True)
        (data / file).write_text(ROWS)
    (found,) = task(f"{place.format(data=data)}:left one:right one:score")
    assert (found.left, found.right, found.gold.tolist()) == (["a: b", "d"], ["c", "e"], [3, 0.5])
    (other,) = task(f"{place.format(data=data)}:right one:left one:score")
    assert (other.left, other.right) == (found.right, found.left)


def test_a_label_may_be_a_score_if_it_is_named_so_and_a_name_with_colons_is_a_path_first(data):
    (data / "p.csv").write_text("a,b,label\nx,y,1\nz,w,2\n")
    assert task("p.csv:a:b:label")[0].gold.tolist() == [1, 2]
    (data / "p.csv:a:b:label").mkdir()
    (data / "p.csv:a:b:label" / "q.tsv").write_text("score\tsentence1\tsentence2\n3\tx\ty\n4\tz\tw\n")
    assert task("p.csv:a:b:label")[0].gold.tolist() == [3, 4]


def test_two_named_columns_are_a_text_and_its_label(data):
    (data / "reviews.csv").write_text("stars,review\n" + "".join(f"{i % 2},text {i}\n" for i in range(24)))
    found = task("reviews.csv:review:stars")
    assert isinstance(found, Labelled) and found.classes == ["0", "1"]
    assert found.columns == ([f"text {i}" for i in range(24)],) and found.labels.tolist() == [0, 1] * 12


@pytest.mark.parametrize("name", ["own.csv", "own.csv:left one:right one:grade"])
def test_a_missing_column_is_named_with_those_that_are_there_and_the_way_out(data, name):
    (data / "own.csv").write_text(ROWS.replace("label", "more"))
    lacking = "grade" if "grade" in name else "sentence1, sentence2"
    way = r"name its columns with the file, of scored pairs own.csv:SENTENCE1:SENTENCE2:SCORE, or of labelled"
    with pytest.raises(
        ValueError, match=f"own.csv:2: no {lacking} among left one, score, right one, more .line 1.; {way}"
    ):
        task(name)


def test_a_file_that_is_not_there_says_so_whatever_is_named_after_it(data):
    with pytest.raises(
        FileNotFoundError,
        match=r"no task 'gone.csv:a:b:c': .* as FILE:SENTENCE1:SENTENCE2:SCORE or FILE:TEXT:LABEL$",
    ):
        task("gone.csv:a:b:c")
    with pytest.raises(FileNotFoundError, match="no task '/gone/x.csv': no such file; after a file"):
        task("/gone/x.csv")


def test_the_known_sets_are_scored_from_0_to_5_and_a_users_file_says_nothing_of_its_scale(data):
    (data / "p.csv").write_text("sentence1,sentence2,score\nx,y,1\nz,w,2\n")
    scales = {name: {s.scale for s in task(name)} for name in ("STS-B", "SICK-R/dev", "p.csv")}
    assert scales == {"STS-B": {(0, 5)}, "SICK-R/dev": {(0, 5)}, "p.csv": {None}}


def test_a_corpus_gives_a_sample_of_its_rows_and_all_their_columns(data):
    (data / "lines.txt").write_text("".join(f"line {i}\n" for i in range(50)))
    (data / "nli_for_simcse.csv").write_text("sent0,sent1,hard_neg\na,b,c\nd,e,f\n")
    assert corpus_texts("lines.txt") == [f"line {i}" for i in range(50)]
    assert len(set(corpus_texts("lines.txt", sample=7))) == 7
    drawn = corpus_texts("lines.txt", sample=9)
    assert set(corpus_texts("lines.txt", sample=5, among=9)) < set(drawn)  # of what a run was trained on
    assert corpus_texts("lines.txt", sample=20, among=9) == corpus_texts("lines.txt", among=9) == drawn
    assert corpus_texts("nli_for_simcse") == list("abcdef")
    assert corpus_texts("nli_for_simcse.csv", ["sent1"]) == ["b", "e"]


def test_what_is_not_found_says_what_there_is(data):
    with pytest.raises(
        FileNotFoundError, match=r"no task 'STS17': none of STS12, .*RTE, such as STS16, and no file in "
    ):
        task("STS17")
    with pytest.raises(FileNotFoundError, match="RTE: GLUE's dev.tsv is at none of .*rte/dev.tsv"):
        task("RTE")
    with pytest.raises(FileNotFoundError, match="no task 'mine'"):
        subsets("mine")
    assert np.array_equal(subsets("STS-B")[0].gold, [0, 1, 2])


def test_pairs_of_two_columns_are_refused(tmp_path):
    (tmp_path / "p.csv").write_text("left,right,grade\na,b,1\nc,d,2\n")
    with pytest.raises(
        ValueError, match=r"p.csv:left:grade: scored pairs have three columns, as .*p.csv:SENT"
    ):
        subsets(f"{tmp_path}/p.csv:left:grade")
    assert len(subsets(f"{tmp_path}/p.csv:left:right:grade")) == 1

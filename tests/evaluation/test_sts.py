"""Pairs are read to the last tab, and a damaged file is named with its line."""

import gzip
import os
from pathlib import Path

import pytest

from whitenedcse.evaluation.tasks import STS, benchmark_pairs, pairs_of

DATA = Path(os.environ.get("WHITENEDCSE_DATA", Path(__file__).parents[3] / "shared/data")) / "senteval"
COUNTS = {
    "STS12": "MSRpar 750 MSRvid 750 SMTeuroparl 459 surprise.OnWN 750 surprise.SMTnews 399",
    "STS14": "deft-forum 450 deft-news 300 headlines 750 OnWN 750 images 750 tweet-news 750",
    "STS15": "answers-forums 375 answers-students 750 belief 375 headlines 750 images 750",
    "STS16": "answer-answer 254 headlines 249 plagiarism 230 postediting 244 question-question 209",
    "STS-B": "test 1379", "STS-B/dev": "dev 1500", "STS-B/train": "train 5749", "SICK-R/train": "train 4500",
    "STS13": "FNWN 189 headlines 750 OnWN 561", "SICK-R": "test_annotated 4927", "SICK-R/dev": "trial 500",
}  # fmt: skip
HEADER = "score\tsentence1\tsentence2\n"


def write(folder, files):
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@pytest.mark.skipif(not DATA.is_dir(), reason="the real SentEval files are not here")
@pytest.mark.parametrize("name", STS)
def test_the_real_sets_hold_as_many_scored_pairs_as_published(name):
    subsets = benchmark_pairs(name, DATA)
    assert " ".join(f"{s.name} {len(s.gold)}" for s in subsets) == COUNTS[name]
    assert all(0 <= s.gold.min() and s.gold.max() <= 5 for s in subsets)


def three(subset):
    return subset.left, subset.right, subset.gold.tolist()


def test_a_pair_keeps_its_score_among_unscored_lines_quotes_and_further_columns(tmp_path):
    for part in STS["STS16"].subsets.split():
        text = 'a "quoted\tb\u2028b\tsource\turl\nc\td\t\t\ne\tf\r\n'
        files = {f"STS.input.{part}.txt": text, f"STS.gs.{part}.txt": "3\r\n\r\n4.5\r\n"}
        write(tmp_path / "STS/STS16-en-test", files)
    stsb = 'g\tf\ty\t1\t2.5\ta "no\tso, what\tmore\tmore\ng\tf\ty\t2\t0\tx\ty\n'
    sick = "pair_ID\tA\tB\tscore\tj\r\n6\tNo boy\tA kid\t3.3\tNEUTRAL\r\n"
    write(tmp_path, {"STS/STSBenchmark/sts-test.csv": stsb, "SICK/SICK_test_annotated.txt": sick})
    assert three(benchmark_pairs("STS16", tmp_path)[0]) == (['a "quoted', "e"], ["b\u2028b", "f"], [3, 4.5])
    assert three(benchmark_pairs("STS-B", tmp_path)[0]) == (['a "no', "x"], ["so, what", "y"], [2.5, 0])
    assert three(benchmark_pairs("SICK-R", tmp_path)[0]) == (["No boy"], ["A kid"], [3.3])


@pytest.mark.parametrize(
    ("text", "gold", "message"),
    [
        ("a\tb\nc\td\n", "1\n", r"gs.FNWN.txt: 1 lines, for the 2 pairs of .*input.FNWN.txt"),
        ("a\tb\nc d\n", "1\n2\n", r"input.FNWN.txt:2 .*1 tab-separated fields are too few"),
        ("a\tb\nc\td\n", "1\nnan\n", r"FNWN.txt:2 and STS.gs.FNWN.txt: the score is 'nan'"),
        (b"a\tb\nc\t\xff\n", "1\n2\n", r"input.FNWN.txt:2: byte 0xff is not UTF-8"),
    ],
)
def test_a_damaged_benchmark_names_file_and_line(tmp_path, text, gold, message):
    write(tmp_path / "STS/STS13-en-test", {"STS.input.FNWN.txt": text, "STS.gs.FNWN.txt": gold})
    with pytest.raises(ValueError, match=message):
        benchmark_pairs("STS13", tmp_path)


def test_an_unknown_task_lists_the_known_ones_and_a_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"no task 'STS17'; there are STS12, .*SICK-R/train"):
        benchmark_pairs("STS17", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"sts-test\.csv"):
        benchmark_pairs("STS-B", tmp_path)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("p.tsv", '\ufeffsentence1\tscore\tid\tsentence2\r\n"a\t1\t7\tb, c\r\n\r\nd\u2028e\t2.5\t8\t"f"\r\n'),
        ("p.csv", 'score,sentence1,sentence2\n1,"""a","b, c"\n2.5,d\u2028e,"""f"""\n'),
        ("p.jsonl", '{"sentence1": "\\"a", "sentence2": "b, c", "score": 1, "id": 3}\n\n'
                    '{"sentence1": "d\\u2028e", "sentence2": "\\"f\\"", "score": "2.5"}'),
    ],
)  # fmt: skip
def test_the_same_pairs_come_out_of_every_format(tmp_path, name, text):
    got = pairs_of(write(tmp_path, {name: text}))
    assert (got.name, *three(got)) == ("p", ['"a', "d\u2028e"], ["b, c", '"f"'], [1, 2.5])


def test_pairs_may_be_compressed(tmp_path):
    (tmp_path / "p.tsv.gz").write_bytes(gzip.compress(f"{HEADER}1\ta\tb\n2.5\tc\td\n".encode()))
    assert three(pairs_of(tmp_path / "p.tsv.gz")) == (["a", "c"], ["b", "d"], [1, 2.5])


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("p.tsv", "", r"p.tsv: 0 pairs"),
        ("p.tsv", HEADER + "1\ta\tb\n", r"p.tsv: 1 pairs; a correlation needs at least 2"),
        ("p.tsv", HEADER + "1\ta\tb\n2\ta\n", r"p.tsv:3: 2 fields, 3 expected"),
        ("p.tsv", HEADER + "1\ta\tb\nNaN\ta\tb\n", r"p.tsv:3: the score is 'NaN', not a finite number \(col"),
        ("p.tsv", HEADER + "1\ta\t \n", r"p.tsv:2: 'a', ' ' are not two sentences"),
        ("p.tsv", "label\tsentence1\tsentence2\n1\ta\tb\n", r"p.tsv:2: no score among label, sentence1"),
        ("p.csv", 'score,sentence1,sentence2\n1,a,"b" c\n', r"p.csv:2: "),
        ("p.jsonl", '{"score": 1, "sentence1": "a", "sentence2": "b"}\n{"score"\n', r"p.jsonl:2: not JSON"),
        ("p.jsonl", '{"score": 1, "sentence1": 3, "sentence2": "b"}\n', r"p.jsonl:1: 3, 'b' are not two"),
        ("p.txt", "", r"p.txt: rows are read from .tsv, .csv, .jsonl, not '.txt'"),
    ],
)  # fmt: skip
def test_a_damaged_file_of_pairs_names_the_line(tmp_path, name, text, message):
    with pytest.raises(ValueError, match=message):
        pairs_of(write(tmp_path, {name: text}))

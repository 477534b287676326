"""Tasks are read to the last row, by name or from files of a user; a damaged one is named with its line."""

import gzip

import numpy as np
import pytest
from evaluation.test_doctor import DATA
from evaluation.test_doctor import write as write_one

from whitenedcse.evaluation.tasks import (
    STS,
    TRANSFER,
    LabelFile,
    Labelled,
    benchmark_labels,
    benchmark_pairs,
    corpus_texts,
    labels_of,
    own_texts,
    pairs_of,
    subsets,
    task,
    texts,
)

real = pytest.mark.skipif(not (DATA / "senteval/MR").is_dir(), reason="the real tasks are not here")
HEADER = "score\tsentence1\tsentence2\n"
BALANCE = {  # rows of each class, by split
    "MR": {None: [5331, 5331]}, "CR": {None: [1368, 2407]}, "SUBJ": {None: [5000, 5000]},
    "MPQA": {None: [7294, 3312]}, "SST2": {"train": 67349, "dev": 872, "test": 1821},
    "TREC": {"train": 5452, "test": [9, 138, 94, 65, 81, 113]}, "MRPC": {"train": 4076, "test": 1725},
    "RTE": {None: 277},
}  # fmt: skip


def write(folder, files):
    for name, text in files.items():
        write_one(folder / name, text)


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


@real
@pytest.mark.parametrize("name", TRANSFER)
@pytest.mark.slow(but=3)
def test_the_real_tasks_hold_the_published_rows_of_each_class_in_the_order_of_splits_words_and_label(name):
    task = benchmark_labels(name, DATA / "rte/dev.tsv" if name == "RTE" else DATA / "senteval")
    for split, expected in BALANCE[name].items():
        counts = np.bincount(task.labels if split is None else task.labels[task.split == split])
        assert counts.tolist() == expected or counts.sum() == expected
        assert len(counts) == len(task.classes)
    words = [[0 if text == "." else len(text.split()) for text in column] for column in task.columns]
    split = [("train", "dev", "test").index(s) for s in task.split] if task.split is not None else []
    keys = list(zip(*([split] if split else []), *words, task.labels.tolist(), strict=True))
    assert keys == sorted(keys)
    assert sum(text == "." for text in task.columns[0]) == {"CR": 4, "MPQA": 3}.get(name, 0)


@pytest.fixture
def small(monkeypatch):
    """The published counts of tasks, made small."""

    def shrink(name, *rows):
        parts = tuple(
            LabelFile(p.file, n, p.split, p.label) for p, n in zip(TRANSFER[name].parts, rows, strict=True)
        )
        monkeypatch.setitem(TRANSFER, name, TRANSFER[name]._replace(parts=parts))

    return shrink


def contents(task):
    split = [] if task.split is None else [task.split.tolist()]
    return list(zip(*task.columns, [task.classes[i] for i in task.labels], *split, strict=True))


def test_ties_of_length_go_by_label_then_as_filed_and_an_empty_line_becomes_a_dot(tmp_path, small):
    small("CR", 4, 3)
    write(tmp_path, {"CR/custrev.pos": "b  b\n\nsee\u00a0this now\na a\n", "CR/custrev.neg": "z z\n \nc\n"})
    assert contents(benchmark_labels("CR", tmp_path)) == [
        (".", "negative"), (".", "positive"), ("c", "negative"), ("z z", "negative"), ("b b", "positive"),
        ("a a", "positive"), ("see this now", "positive"),
    ]  # fmt: skip


def test_columns_and_labels_of_the_other_layouts(tmp_path, small):
    small("TREC", 2, 1), small("MRPC", 2, 1), small("SST2", 2, 1, 1), small("RTE", 2), small("SUBJ", 1, 1)
    head = "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n"
    write(tmp_path, {
        "TREC/train_5500.label": b"NUM:dist How far : it\xe9 ?\nABBR:exp What ?\n",
        "TREC/TREC_10.label": "HUM:ind Who ?\n",
        "SUBJ/subj.objective": "he goes\n", "SUBJ/subj.subjective": "i like it\n",
        "MRPC/msr_paraphrase_train.txt": head + '1\t7\t8\tHe said " no .\tA b\r\n0\t7\t8\tHe did not go\tA\n',
        "MRPC/msr_paraphrase_test.txt": head + "0\t1\t2\tx\ty\n",
        "SST/binary/sentiment-train": "good one . \t1\nbad\t0\n", "SST/binary/sentiment-dev": "é\u2028è\t1\n",
        "SST/binary/sentiment-test": "so so \t0\n",
        "dev.tsv": "sentence1\tsentence2\tlabel\tidx\nA b.\tC\t1\t0\nD\tE\t0\t1\n",
    })  # fmt: skip
    assert contents(benchmark_labels("TREC", tmp_path)) == [
        ("What ?", "ABBR", "train"), ("How far : it\xe9 ?", "NUM", "train"), ("Who ?", "HUM", "test")
    ]  # fmt: skip
    assert contents(benchmark_labels("SUBJ", tmp_path)) == [
        ("he goes", "objective"), ("i like it", "subjective")
    ]  # fmt: skip
    assert contents(benchmark_labels("MRPC", tmp_path)) == [
        ("He did not go", "A", "different", "train"), ('He said " no .', "A b", "paraphrase", "train"),
        ("x", "y", "different", "test"),
    ]  # fmt: skip
    assert contents(benchmark_labels("SST2", tmp_path)) == [
        ("bad", "negative", "train"), ("good one .", "positive", "train"), ("é è", "positive", "dev"),
        ("so so", "negative", "test"),
    ]  # fmt: skip
    rte = [("D", "E", "entailment"), ("A b.", "C", "not_entailment")]
    assert contents(benchmark_labels("RTE", tmp_path / "dev.tsv")) == rte


def table(*rows):
    return "".join("\t".join(row) + "\n" for row in rows)


TEXTS = [(f"text {i}", "ab"[i % 2]) for i in range(24)]
FNWN = "STS/STS13-en-test/STS.{}.FNWN.txt"
PAIRS = [  # a file of scored pairs, and what is said of it
    ("p.tsv", "", r"p.tsv: 0 pairs"),
    ("p.tsv", HEADER + "1\ta\tb\n", r"p.tsv: 1 pairs; a correlation needs at least 2"),
    ("p.tsv", HEADER + "1\ta\tb\nNaN\ta\tb\n", r"p.tsv:3: the score is 'NaN', not a finite number \(col"),
    ("p.tsv", HEADER + "1\ta\t\u200b\n", r"p.tsv:2: 'a', '.u200b' are not two sentences"),
    ("p.txt", "", r"p.txt: rows are read from .tsv, .csv, .jsonl, .json, .parquet, not '.txt'"),
    ("p.jsonl", '{"score": 1, "sentence1": 3, "sentence2": "b"}\n', r"p.jsonl:1: 3, 'b' are not two"),
]  # fmt: skip
LABELS = [  # a file of labelled texts
    ("o.tsv", table(("text", "label"), *TEXTS[::2]), r"o.tsv: 1 classes"),
    ("o.tsv", table(("text", "label"), ("x", "a"), ("\u200b", "b")), r"o.tsv:3: an empty text, or none"),
    ("o.tsv", table(("text", "label"), ("x", " ")), r"o.tsv:2: the label is ' '"),
    ("o.tsv", table(("text", "label", "split"), ("x", "a", "valid")), r"o.tsv:2: the split is 'valid'"),
    ("o.tsv", table(("text", "label", "split"), *((*t, "train") for t in TEXTS)), r"no row with test"),
]  # fmt: skip
BENCHMARKS = [  # files of a benchmark: input and gold scores, which test_doctor.py damages too
    ({FNWN.format("input"): "a\tb\nc d\n", FNWN.format("gs"): "1\n2\n"}, r"input.FNWN.txt is damaged \(Ind"),
    ({FNWN.format("input"): "a\tb\nc\td\n", FNWN.format("gs"): "1\nnan\n"}, r"input.FNWN.txt:2: the score"),
]  # fmt: skip
TASKS = [  # a task, its rows as published, its files
    ("SUBJ", (2, 2), {"SUBJ/subj.objective": "a\n" * 3}, r"subj.objective is damaged \(3 rows, not the 2"),
    ("TREC", (1, 1), {"TREC/train_5500.label": "CAT:x Who ?\n", "TREC/TREC_10.label": "HUM:x Who ?\n"},
     r"train_5500.label:1: the label is 'CAT', not one of 0, ABBR"),
    ("RTE", (1,), {"dev.tsv": "sentence1\tsentence2\tlabel\nA\tB\n"}, r"dev.tsv is damaged \(IndexError"),
    ("SST2", (1, 1, 1), {"SST/binary/sentiment-train": b"\xff\t1\n"}, r"ment-train.*cannot be read.*0xff"),
]  # fmt: skip


def test_a_damaged_file_is_named_with_its_line_or_what_it_lacks(tmp_path, small):
    for read, cases in ((pairs_of, PAIRS), (labels_of, LABELS)):
        for name, text, message in cases:
            write(tmp_path, {name: text})
            with pytest.raises(ValueError, match=message):
                read(tmp_path / name)
    for files, message in BENCHMARKS:
        write(tmp_path, files)
        with pytest.raises(ValueError, match=message):
            benchmark_pairs("STS13", tmp_path)
    for name, rows, files, message in TASKS:
        small(name, *rows)
        write(tmp_path, files)
        with pytest.raises((ValueError, OSError), match=message):
            benchmark_labels(name, tmp_path / "dev.tsv" if name == "RTE" else tmp_path)
    with pytest.raises(FileNotFoundError, match=r"sts-test\.csv"):
        benchmark_pairs("STS-B", tmp_path)


@pytest.mark.parametrize("suffix", ["tsv", "csv", "jsonl"])
def test_your_own_rows_keep_their_order_and_their_split(tmp_path, suffix):
    split = ["dev", "train", "test", "train"] * 6
    records = [("1", "2", str(i % 3 // 2), s) for i, s in enumerate(split)]
    names = ("sentence1", "sentence2", "label", "split")
    line = '{{"sentence1": "{}", "sentence2": "{}", "label": {}, "split": "{}"}}\n'
    text = table(names, *records).replace("\t", "," if suffix == "csv" else "\t")
    text = "".join(line.format(*record) for record in records) if suffix == "jsonl" else text
    write(tmp_path, {f"own.{suffix}": text})
    task = labels_of(tmp_path / f"own.{suffix}")
    assert (task.name, task.classes) == ("own", ["0", "1"])
    assert contents(task) == records
    for part, other in (("train", "test"), ("test", "train")):
        write(tmp_path, {"own.csv": f"text,label,split\na,0,dev\nb,1,{part}\n"})
        with pytest.raises(ValueError, match=f"its split column has no row with {other}$"):
            labels_of(tmp_path / "own.csv")


@pytest.fixture
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


def test_target_is_train_dev_and_test_and_year_the_test_alone(data):
    each = [
        [f"A {part} Dog"] * 3 + [f"A {part} Cat {i}" for i in range(3)] for part in ("test", "train", "dev")
    ]
    assert own_texts("year", "STS-B") == each[0]
    for name in ("STS-B", "STS-B/dev"):
        assert sorted(own_texts("target", name)) == sorted(sum(each, []))
    assert len(own_texts("target", "SICK-R")) == 12
    (data / "STS-B").mkdir()  # a folder that is called as a benchmark, whose file is fitted to itself alone
    (data / "STS-B" / "mine.tsv").write_text(HEADER + "1\ta\tb\n2\tc\td\n")
    assert own_texts("target", "STS-B/mine.tsv") == ["a", "c", "b", "d"]


@pytest.mark.usefixtures("data")
def test_lower_case_spares_sick_where_asked():
    for name, case, first in (
        ("STS-B", "as_is", "A test Dog"),
        ("STS-B", "lower", "a test dog"),
        ("STS-B", "lower_but_sick", "a test dog"),
        ("SICK-R", "lower_but_sick", "A test_annotated"),
        ("SICK-R", "lower", "a test_annotated"),
    ):
        assert texts(task(name, case=case))[0] == own_texts("year", name, case=case)[0] == first


def test_a_file_is_scored_pairs_or_labelled_texts_by_its_columns(data):
    line = '{{"score": {}, "sentence1": "{}", "sentence2": "{}"}}\n\n'
    (data / "pairs.jsonl").write_text(
        line.format(1, "Ein Hund", "Eine Katze") + line.format('"2.5"', "a", "b")
    )
    (pairs,) = task("pairs.jsonl")
    assert three(pairs) == (["Ein Hund", "a"], ["Eine Katze", "b"], [1, 2.5])
    rows = "".join(f'{{"text": "Wort {i}", "label": {i % 2}}}\n' for i in range(40))
    (data / "texts.jsonl").write_text(rows)
    labelled = task("texts", case="lower")  # by name, from the data folder
    assert isinstance(labelled, Labelled) and labelled.labels[:2].tolist() == [0, 1]
    assert texts(labelled) == [f"wort {i}" for i in range(40)]
    (data / "both.tsv").write_text("sentence1\tsentence2\tscore\tlabel\na\tb\t1\tx\nc\td\t2\ty\n")
    (pairs,) = task("both.tsv")  # as `readout` takes it
    assert three(pairs) == (["a", "c"], ["b", "d"], [1, 2])


def test_a_folder_of_pairs_is_a_task_with_subsets(data):
    (data / "deutsch").mkdir()
    for name in ("zeitung", "forum"):
        (data / "deutsch" / f"{name}.tsv").write_text(f"{HEADER}1\t{name}\tx\n2\ta\tb\n")
    packed = gzip.compress((data / "deutsch/forum.tsv").read_bytes())
    (data / "deutsch/wiki.tsv.gz").write_bytes(packed)
    (data / "deutsch/README.md").write_text("no pairs")
    found = [("forum", "forum"), ("wiki.tsv", "forum"), ("zeitung", "zeitung")]
    assert [(s.name, s.left[0]) for s in task("deutsch")] == found


ROWS = "left one,score,right one,label\na: b,3,c,x\nd,0.5,e,y\n"  # of a csv with names of its own


def test_columns_of_any_name_are_named_with_the_file_the_data_root_or_the_folder(data):
    for file in ("own.csv", "C:x.csv", "folder:1/part.csv"):
        (data / file).parent.mkdir(exist_ok=True)
        (data / file).write_text(ROWS)
    for place in ("own.csv", "own", f"{data}/own.csv", "folder:1", "./C:x.csv"):
        (found,) = task(f"{place}:left one:right one:score")
        assert (found.left, found.right, found.gold.tolist()) == (["a: b", "d"], ["c", "e"], [3, 0.5])
    texts = "".join(f"{i % 2},text {i}\n" for i in range(24))
    (data / "reviews.csv").write_text("label,review\n" + texts)
    found = task("reviews.csv:review:label")  # two are a text and its label
    assert isinstance(found, Labelled) and found.classes == ["0", "1"]
    assert found.columns == ([f"text {i}" for i in range(24)],) and found.labels.tolist() == [0, 1] * 12
    assert task("reviews.csv:review:review:label")[0].gold.tolist() == [0, 1] * 12  # a label as a score
    assert task("own.csv:right one:left one:score")[0].left == ["c", "e"]
    (data / "own.csv:right one:left one:score").mkdir()  # a name with colons is a path first
    (data / "own.csv:right one:left one:score/q.tsv").write_text(HEADER + "3\tx\ty\n4\tz\tw\n")
    assert task("own.csv:right one:left one:score")[0].left == ["x", "z"]


@pytest.mark.parametrize("name", ["own.csv", "own.csv:left one:right one:grade"])
def test_a_missing_column_is_named_with_those_that_are_there_and_the_way_out(data, name):
    (data / "own.csv").write_text(ROWS.replace("label", "more"))
    lacking = "grade" if "grade" in name else "sentence1, sentence2"
    way = r"name its columns with the file, of scored pairs own.csv:SENTENCE1:SENTENCE2:SCORE, or of labelled"
    with pytest.raises(ValueError, match=f"own.csv:2: no {lacking} among left one, score, .*; {way}"):
        task(name)


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
    for name, said in {
        "STS17": r"no task 'STS17': none of STS12, .*RTE, and no file in ",
        "RTE": "RTE: GLUE's dev.tsv is at none of .*rte/dev.tsv",
        "gone.csv:a:b:c": "no task 'gone.csv:a:b:c': .* FILE:SENTENCE1:SENTENCE2:SCORE or FILE:TEXT:LABEL$",
        "/gone/x.csv": "no task '/gone/x.csv': none of STS12, .* after a file",
    }.items():
        with pytest.raises(FileNotFoundError, match=said):
            task(name)
    with pytest.raises(FileNotFoundError, match="no task 'mine'"):
        subsets("mine")
    assert np.array_equal(subsets("STS-B")[0].gold, [0, 1, 2])

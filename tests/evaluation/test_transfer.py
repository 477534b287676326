"""Labelled texts are read to the last row, in the order that folds depend on, and scored by counting."""

import os
from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import confusion_matrix, f1_score

from whitenedcse.evaluation.scores import accuracy, features, threshold
from whitenedcse.evaluation.tasks import TRANSFER, LabelFile, Labelled, benchmark_labels, labels_of

DATA = Path(os.environ.get("WHITENEDCSE_DATA", Path(__file__).parents[3] / "shared/data"))
real = pytest.mark.skipif(not (DATA / "senteval/MR").is_dir(), reason="the real transfer tasks are not here")
BALANCE = {  # rows of each class, by split
    "MR": {None: [5331, 5331]}, "CR": {None: [1368, 2407]}, "SUBJ": {None: [5000, 5000]},
    "MPQA": {None: [7294, 3312]}, "SST2": {"train": 67349, "dev": 872, "test": 1821},
    "TREC": {"train": 5452, "test": [9, 138, 94, 65, 81, 113]}, "MRPC": {"train": 4076, "test": 1725},
    "RTE": {None: 277},
}  # fmt: skip


def located(name):
    return DATA / "rte/dev.tsv" if name == "RTE" else DATA / "senteval"


@real
@pytest.mark.parametrize("name", TRANSFER)
@pytest.mark.slow(but=3)
def test_the_real_tasks_hold_as_many_rows_of_each_class_as_published(name):
    task = benchmark_labels(name, located(name))
    for split, expected in BALANCE[name].items():
        counts = np.bincount(task.labels if split is None else task.labels[task.split == split])
        assert counts.tolist() == expected or counts.sum() == expected
        assert len(counts) == len(task.classes)
    assert {len(column) for column in task.columns} == {len(task.labels)}
    assert len(task.columns) == (2 if name in ("MRPC", "RTE") else 1)
    assert all(text for column in task.columns for text in column)


@real
@pytest.mark.parametrize("name", TRANSFER)
@pytest.mark.slow(but=3)
def test_rows_are_ordered_by_split_words_and_label(name):
    task = benchmark_labels(name, located(name))
    words = [[0 if text == "." else len(text.split()) for text in column] for column in task.columns]
    split = [("train", "dev", "test").index(s) for s in task.split] if task.split is not None else []
    keys = list(zip(*([split] if split else []), *words, task.labels.tolist(), strict=True))
    dots = sum(text == "." for text in task.columns[0])
    assert keys == sorted(keys)
    assert dots == {"CR": 4, "MPQA": 3}.get(name, 0)


@real
def test_real_labels_and_encodings():
    subj, trec, mrpc = (benchmark_labels(name, DATA / "senteval") for name in ("SUBJ", "TREC", "MRPC"))
    objective = (DATA / "senteval/SUBJ/subj.objective").read_text("latin-1").split("\n")[0].split()
    assert subj.classes[subj.labels[subj.columns[0].index(" ".join(objective))]] == "objective"
    (one,) = (i for i, text in enumerate(trec.columns[0]) if not text.isascii())
    assert "\xf0" in trec.columns[0][one]
    assert trec.classes[trec.labels[one]] == "LOC"
    first = next(i for i, text in enumerate(mrpc.columns[0]) if text.startswith("Amrozi accused his"))
    assert (mrpc.split[first], mrpc.classes[mrpc.labels[first]]) == ("train", "paraphrase")


def write(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())


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
    small("TREC", 2, 1), small("MRPC", 2, 1), small("SST2", 2, 1, 1), small("RTE", 2)
    head = "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n"
    write(tmp_path, {
        "TREC/train_5500.label": b"NUM:dist How far : it\xe9 ?\nABBR:exp What ?\n",
        "TREC/TREC_10.label": "HUM:ind Who ?\n",
        "MRPC/msr_paraphrase_train.txt": head + '1\t7\t8\tHe said " no .\tA b\r\n0\t7\t8\tHe did not go\tA\n',
        "MRPC/msr_paraphrase_test.txt": head + "0\t1\t2\tx\ty\n",
        "SST/binary/sentiment-train": "good one . \t1\nbad\t0\n", "SST/binary/sentiment-dev": "é\u2028è\t1\n",
        "SST/binary/sentiment-test": "so so \t0\n",
        "dev.tsv": "sentence1\tsentence2\tlabel\tidx\nA b.\tC\t1\t0\nD\tE\t0\t1\n",
    })  # fmt: skip
    assert contents(benchmark_labels("TREC", tmp_path)) == [
        ("What ?", "ABBR", "train"), ("How far : it\xe9 ?", "NUM", "train"), ("Who ?", "HUM", "test")
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


@pytest.mark.parametrize(
    ("name", "rows", "files", "message"),
    [
        ("SUBJ", (5000, 5000), {"SUBJ/subj.objective": "a\n" * 5000, "SUBJ/subj.subjective": "a\n" * 20},
         r"subj.subjective: 20 rows, not the 5000 published"),
        ("SUBJ", (2, 2), {"SUBJ/subj.objective": "a\n" * 3}, r"subj.objective: 3 rows, not the 2 published"),
        ("TREC", (1, 1), {"TREC/train_5500.label": "CAT:x Who ?\n", "TREC/TREC_10.label": "HUM:x Who ?\n"},
         r"train_5500.label:1: the label is 'CAT', not one of 0, ABBR"),
        ("RTE", (1,), {"": "sentence1\tsentence2\tlabel\nA\tB\n"}, r"dev.tsv:2: 2 fields are too few"),
        ("SST2", (1, 1, 1), {"SST/binary/sentiment-train": b"\xff\t1\n"}, r"sentiment-train:1: byte 0xff is"),
        ("SNLI", (), {}, r"no transfer task 'SNLI'; there are MR, CR, SUBJ, MPQA, SST2, TREC, MRPC, RTE"),
    ],
)  # fmt: skip
def test_a_damaged_task_names_file_and_count_or_line(tmp_path, small, name, rows, files, message):
    if rows:
        small(name, *rows)
    folder = tmp_path / "dev.tsv" if name == "RTE" else tmp_path
    write(tmp_path, {file or "dev.tsv": text for file, text in files.items()})
    with pytest.raises(ValueError, match=message):
        benchmark_labels(name, folder)


def table(*rows):
    return "".join("\t".join(row) + "\n" for row in rows)


TEXTS = [(f"text {i}", "ab"[i % 2]) for i in range(24)]


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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (table(("text", "label"), *TEXTS[:22]), r"o.tsv: class 'a' has 11 rows .*ten folds.* need 12"),
        (table(("text", "label"), *TEXTS[::2]), r"o.tsv: 1 classes \(a\)"),
        (table(("text", "label")), r"o.tsv: 0 classes"),
        (table(("text", "class"), *TEXTS), r"no label among text, class \(line 1\); name .*o.tsv:TEXT:LABEL"),
        (table(("sentence1", "label"), *TEXTS), r"o.tsv:2: no sentence2 among sentence1, label"),
        (table(("text", "label"), ("x", "a"), (" ", "b")), r"o.tsv:3: an empty text, or none: ' '"),
        (table(("text", "label"), ("x", " ")), r"o.tsv:2: the label is ' '"),
        (table(("text", "label", "split"), ("x", "a", "valid")), r"o.tsv:2: the split is 'valid'"),
        (table(("text", "label", "split"), *((*t, "train") for t in TEXTS)), r"no row with test"),
        (table(("text", "label", "split"), *((*t, "train" if t > ("text 14",) else "test") for t in TEXTS)),
         r"class 'a' has 9 rows to train on; ten folds of train, as there is no dev, need 10"),
        (table(("text", "label", "split"), ("x", "a", "train"), ("y", "b", "test"), ("y", "a", "dev")),
         r"class 'b' has 0 rows to train on"),
    ],
)  # fmt: skip
def test_a_damaged_file_of_your_own_names_the_line_or_the_lack(tmp_path, text, message):
    write(tmp_path, {"o.tsv": text})
    with pytest.raises(ValueError, match=message):
        labels_of(tmp_path / "o.tsv")


def test_rows_of_a_jsonl_file_must_share_their_columns(tmp_path):
    write(
        tmp_path, {"o.jsonl": '{"text": "a", "label": 1}\n{"sentence1": "a", "sentence2": "b", "label": 0}\n'}
    )
    with pytest.raises(ValueError, match=r"o.jsonl:2: other columns than in .*o.jsonl:1"):
        labels_of(tmp_path / "o.jsonl")


def test_a_pair_becomes_its_difference_and_its_product():
    u, v = np.array([[1.0, -2.0]]), np.array([[3.0, 0.5]])
    assert features([u, v]).tolist() == [[2.0, 2.5, 3.0, -1.0]]
    assert features([u]).tolist() == [[1.0, -2.0]]
    assert features([u]).dtype == features([u, v]).dtype == np.float32


def labelled(columns, labels, classes, split=None):
    texts = tuple(["a"] * len(labels) for _ in range(columns))
    return Labelled("t", texts, np.array(labels), list(classes), split)


@pytest.mark.parametrize("columns", [1, 2])
def test_only_test_rows_are_scored_and_pairs_by_f1_too(columns):
    random = np.random.default_rng(0)
    y, split = random.integers(0, 2, 90), np.array(["train", "dev", "test"])[random.integers(0, 3, 90)]
    gold = y[split == "test"]
    guess = np.where(random.random(len(gold)) < 0.7, gold, 1 - gold)
    task, x = labelled(columns, y, "ab", split), np.zeros((90, 2))
    got = accuracy(task, x, lambda *given: (guess, 61.0) if given[0] is x and given[2] is split else None)
    assert got.pop("correct").tolist() == (gold == guess).tolist()
    f1 = {"f1": pytest.approx(100 * f1_score(gold, guess))} if columns == 2 else {}
    assert got == {"accuracy": pytest.approx(100 * np.mean(gold == guess)), "dev": 61, "n": len(gold)} | f1


def test_features_that_are_short_or_not_finite_are_refused():
    task = labelled(1, [0, 1], "ab")
    for x in (np.zeros((3, 2)), np.array([[0.0], [np.nan]])):
        with pytest.raises(ValueError, match="t: 2 finite rows of features expected"):
            accuracy(task, x, None)


def test_a_threshold_predicts_entailment_from_one_half_on():
    cosines = np.array([0.5, 0.49, 0.9, -1, 0.7, 0.6])
    gold = [0, 0, 0, 1, 1, 1]
    task = labelled(2, gold, ["entailment", "not_entailment"])
    got = threshold(task, cosines)
    (a, b), (c, d) = confusion_matrix(gold, [0, 1, 0, 1, 0, 0]).tolist()
    yes, no = task.classes
    assert got["confusion"] == {yes: {yes: a, no: b}, no: {yes: c, no: d}}
    assert got["correct"].tolist() == [True, False, True, True, False, False]
    assert (got["accuracy"], got["majority"], got["n"]) == (50, 50, 6)
    assert threshold(labelled(2, [0, 0, 0, 1], task.classes), cosines[:4])["majority"] == 75


def test_a_threshold_refuses_other_tasks_and_undefined_cosines():
    with pytest.raises(ValueError, match="t: a threshold separates entailment, not_entailment; not a, b"):
        threshold(labelled(2, [0, 1], "ab"), np.zeros(2))
    with pytest.raises(ValueError, match="t: 2 finite cosines expected"):
        threshold(labelled(2, [0, 1], TRANSFER["RTE"].classes), np.array([0, np.nan]))

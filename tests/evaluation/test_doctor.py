"""The doctor passes a copy with the published counts, and names what is wrong with any other.

Every copy is made up here, in the form of the real files; the last tests read the real ones where they are.
"""

import bz2
import hashlib
import json
import os
import re
from pathlib import Path

import pytest

from whitenedcse.evaluation import doctor
from whitenedcse.evaluation.doctor import examined

DATA = Path(os.environ.get("WHITENEDCSE_DATA", Path(__file__).parents[3] / "shared/data"))
real = pytest.mark.skipif(not (DATA / "senteval").is_dir(), reason="no SentEval data here")

COUNTS = {  # transcribed from the README of the copies, not from the code
    "STS12": {"MSRpar": 750, "MSRvid": 750, "SMTeuroparl": 459, "surprise.OnWN": 750,
              "surprise.SMTnews": 399},
    "STS13": {"FNWN": 189, "headlines": 750, "OnWN": 561},
    "STS14": {"deft-forum": 450, "deft-news": 300, "headlines": 750, "OnWN": 750, "images": 750,
              "tweet-news": 750},
    "STS15": {"answers-forums": 375, "answers-students": 750, "belief": 375, "headlines": 750, "images": 750},
    "STS16": {"answer-answer": 254, "headlines": 249, "plagiarism": 230, "postediting": 244,
              "question-question": 209},
}  # fmt: skip
KINDS = ("NUM:dist", "ENTY:other", "LOC:city", "HUM:ind", "DESC:def", "ABBR:exp")
STSB, SICK = "g\tf\ty\t{i}\t{s}\t{a}\t{b}", "{i}\t{a}\t{b}\t{s}\tNEUTRAL"
MRPC, SST = '{y}\t{i}\t8\t"{a}\t{b}', "{a}\t{y}"
SICK_HEADER = "pair_ID\tA\tB\tscore\tjudgment"
MRPC_HEADER = "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String"
FILES = {  # file: rows, a row, header
    "STS/STSBenchmark/sts-train.csv": (5749, STSB, ""), "STS/STSBenchmark/sts-dev.csv": (1500, STSB, ""),
    "STS/STSBenchmark/sts-test.csv": (1379, STSB, ""),
    "SICK/SICK_train.txt": (4500, SICK, SICK_HEADER + "\n"),
    "SICK/SICK_trial.txt": (500, SICK, SICK_HEADER + "\n"),
    "SICK/SICK_test_annotated.txt": (4927, SICK + "\r", SICK_HEADER + "\r\n"),
    "MR/rt-polarity.pos": (5331, "{a}", ""), "MR/rt-polarity.neg": (5331, "{b}", ""),
    "CR/custrev.pos": (2405, "{a}", "\n \n"), "CR/custrev.neg": (1366, "{b}", "\n\n"),
    "SUBJ/subj.subjective": (5000, "{a}", ""), "SUBJ/subj.objective": (5000, "{b}", ""),
    "MPQA/mpqa.pos": (3311, "{a}", "\n"), "MPQA/mpqa.neg": (7292, "{b}", "\n\n"),
    "SST/binary/sentiment-train": (67349, SST, ""), "SST/binary/sentiment-dev": (872, SST, ""),
    "SST/binary/sentiment-test": (1821, "caf\u00e9 " + SST, ""),
    "TREC/train_5500.label": (5452, "{k} {a}", ""), "TREC/TREC_10.label": (500, "{k} {a}", ""),
    "MRPC/msr_paraphrase_train.txt": (4076, MRPC, MRPC_HEADER + "\n"),
    "MRPC/msr_paraphrase_test.txt": (1725, MRPC, MRPC_HEADER + "\r\n"),
    "rte/dev.tsv": (277, "{a}\t{b}\t{y}\t{i}", "sentence1\tsentence2\tlabel\tidx\n"),
}  # fmt: skip
for name, subsets in COUNTS.items():
    for part, n in subsets.items():  # three unscored pairs are no rows
        FILES[f"STS/{name}-en-test/STS.input.{part}.txt"] = n, "{a}\t{b}", "a\tb\n" * 3
        FILES[f"STS/{name}-en-test/STS.gs.{part}.txt"] = n, "{s}", "\n" * 3


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())


def filed(root, file):
    """Where a file of a data set is, under a data root."""
    return root / file if file.startswith("rte/") else root / "senteval" / file


def copy(root, *beginnings, rows=10**6, text="text {}".format):
    """A right copy under root, of the files whose path begins so, or one of the first rows of each."""
    for file, (n, row, header) in FILES.items():
        if file.startswith(beginnings):
            each = ({"a": text(i), "b": text(-i - 1), "i": i, "s": f"{i % 6 * 0.9:.1f}", "y": i % 2,
                     "k": KINDS[i % 6]} for i in range(min(n, rows)))  # fmt: skip
            write(filed(root, file), header + "".join(row.format(**fields) + "\n" for fields in each))


def finding(root, task):
    return {f.task: f for f in examined(root)}[task]


def edited(path, line, text):
    """Replace a line, from 1, of a file."""
    rows = path.read_bytes().split(b"\n")
    rows[line - 1] = text if isinstance(text, bytes) else text.encode()
    path.write_bytes(b"\n".join(rows))


@pytest.mark.slow
def test_a_made_up_copy_with_the_published_counts_differs_in_its_checksums_and_nothing_else(tmp_path):
    copy(tmp_path, "")
    found = {f.task: f for f in examined(tmp_path)}
    tasks = {name: f for name, f in found.items() if name not in doctor.ROWS}
    assert {name: (f.verdict, f.rows == f.expected) for name, f in tasks.items()} == dict.fromkeys(
        [*COUNTS, "STS-B", "STS-B/dev", "STS-B/train", "SICK-R", "SICK-R/dev", "SICK-R/train", "MR", "CR",
         "SUBJ", "MPQA", "SST2", "TREC", "MRPC", "RTE"], ("differs", True)
    )  # fmt: skip
    assert all(found[name].rows == sum(parts.values()) for name, parts in COUNTS.items())
    assert {found[name].verdict for name in doctor.ROWS} == {"missing"}


STS13 = "STS/STS13-en-test/STS.{}.FNWN.txt"
WRONG = [
    ("STS13", STS13.format("gs"), 189, "4.2\n4.2", r"STS.input.FNWN.txt is damaged \(zip"),
    ("STS13", STS13.format("gs"), 4, "", r"FNWN 188 rows, 189 published"),
    ("RTE", "rte/dev.tsv", 2, "a\tb\tmaybe\t0", r"rte/dev.tsv:2: the label is 'maybe'"),
]  # fmt: skip


def test_one_damaged_line_makes_a_task_wrong_and_is_named(tmp_path):
    """Damages that a reader names are in test_tasks.py."""
    for i, (task, file, line, text, why) in enumerate(WRONG):
        root = tmp_path / str(i)
        copy(root, file.rpartition("/")[0])
        assert finding(root, task).verdict == "differs"
        edited(filed(root, file), line, text)
        found = finding(root, task)
        assert found.verdict == "wrong"
        assert re.search(why, found.why) and "\n" not in found.why, found.why


def test_missing_files_are_listed_with_the_way_to_get_them(tmp_path):
    copy(tmp_path, "STS/STS13")
    filed(tmp_path, STS13.format("gs")).unlink()
    found = {f.task: f for f in examined(tmp_path)}
    assert {f.verdict for f in found.values()} == {"missing"}
    of = f"1 of 6 files are not in {tmp_path}/senteval, such as {STS13.format('gs')}"
    assert found["STS13"].why == f"{of}; to get it: whitenedcse data fetch senteval"
    assert found["RTE"].why.endswith("such as rte/dev.tsv; it cannot be downloaded: put it there")
    assert found["wiki1m"].why.endswith("to get it: whitenedcse data fetch wiki1m")
    assert found["wiki1m_like"].why.endswith("it cannot be downloaded: put it there")


TRIPLETS = b'sent0,sent1,hard_neg\na,b,c\na,b,\na,b,c\n"a,",b,c\n'


def test_a_corpus_is_counted_with_its_blank_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "ROWS", dict.fromkeys(doctor.ROWS, 4))
    like = "wiki/wiki1m_like.txt.bz2"
    for i, (name, file, data, why) in enumerate(
        [
            ("wiki1m", "wiki1m_for_simcse.txt", b"a\nb\n\nb\n", ""),
            ("wiki1m", "wiki1m_for_simcse.txt", b"a\nb\n\n", "3 rows, 4 published"),
            ("wiki1m", "wiki1m_for_simcse.txt", b"a\nb\xff\n", "cannot be read"),
            ("wiki1m_like", like, bz2.compress(b"a\nb\n\nb\n"), ""),
            ("wiki1m_like", like, bz2.compress(b"a\nb\n")[:-9], "cannot be read"),
            ("nli_for_simcse", "nli_for_simcse.csv", TRIPLETS, ""),
            ("nli_for_simcse", "nli_for_simcse.csv", b"sent0,sent1\na,b\n", "no column 'hard_neg'"),
        ]
    ):
        write(tmp_path / str(i) / file, data)
        found = finding(tmp_path / str(i), name)
        assert found.verdict == ("wrong" if why else "ok") and why in found.why
        assert why or found.rows == 4


def test_a_copy_with_the_known_checksums_is_ok_and_one_without_is_named(tmp_path, monkeypatch):
    copy(tmp_path, "MR/")
    files = [f"MR/rt-polarity.{k}" for k in ("pos", "neg")]
    sums = {file: hashlib.sha256(filed(tmp_path, file).read_bytes()).hexdigest() for file in files}
    write(tmp_path / "checksums.json", json.dumps(sums))
    monkeypatch.setattr(doctor, "files", lambda package: tmp_path)
    assert (finding(tmp_path, "MR").verdict, finding(tmp_path, "MR").why) == ("ok", "")
    edited(filed(tmp_path, "MR/rt-polarity.neg"), 3, "worse 2")
    assert finding(tmp_path, "MR").verdict == "differs"
    assert finding(tmp_path, "MR").why == "MR/rt-polarity.neg differs from the copy that was checked"


def test_the_checksums_are_those_of_the_files_that_are_read(tmp_path):
    copy(tmp_path, "", rows=1)
    known = json.loads((Path(doctor.__file__).parents[1] / "data/checksums.json").read_text())
    assert {filed(tmp_path, file) for file in known} == {p for p in tmp_path.rglob("*") if p.is_file()}


@real
@pytest.mark.slow
def test_all_real_tasks_here_are_right(tmp_path):
    for name in ("senteval", "rte"):  # without the corpora, which take half a minute to count
        (tmp_path / name).symlink_to(DATA / name)
    found = [f for f in examined(tmp_path) if f.task not in doctor.ROWS]
    assert {f.task: f.why for f in found if f.verdict != "ok"} == {}
    assert len(found) == 19

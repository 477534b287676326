"""`whitenedcse search`, and what its bench measures."""

import csv
import io
import re
from itertools import count

import numpy as np
import pytest
from encoders import SENTENCES
from numpy.testing import assert_allclose
from test_whitened import by_hand

from whitenedcse.app import cli
from whitenedcse.serving import search_bench
from whitenedcse.serving.index import Index
from whitenedcse.serving.search_bench import bench, recall, without

TEXTS = [f"{a} {b}" for a in SENTENCES for b in SENTENCES]


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.txt"
    path.write_text("\n".join([*TEXTS, "", " "]) + "\n")
    return str(path)


@pytest.fixture
def place(tmp_path):
    return str(tmp_path / "index")


def asked(capsys, *argv):
    assert cli.main(["search", "query", *argv, "--to", "csv"]) == 0
    return list(csv.DictReader(io.StringIO(capsys.readouterr().out)))


def test_build_query_add_and_a_file_of_queries(source, corpus, place, embedder, tmp_path, capsys):
    assert cli.main(["search", "build", source, corpus, place]) == 0
    assert capsys.readouterr().out == f"64 texts, vectors of width 16: {place}\n"
    rows = asked(capsys, place, SENTENCES[0], "--top", "3")
    hits = Index.build(embedder, TEXTS).query([SENTENCES[0]], 3)[0]
    assert [(r["id"], r["text"], r["rank"]) for r in rows] == [
        (h.id, h.text, str(i)) for i, h in enumerate(hits, 1)
    ]
    assert_allclose([float(r["cosine"]) for r in rows], [h.cosine for h in hits], atol=6e-5)

    assert len(asked(capsys, place, TEXTS[9])) == 10
    (tmp_path / "more.tsv").write_text("key\ttext\nmine\tthe cat\n\t \n")
    argv = ["search", "add", place, str(tmp_path / "more.tsv"), "--columns", "text", "--ids", "key"]
    assert cli.main(argv) == 0
    assert capsys.readouterr().out == f"64 texts and 1 more: {place}\n"
    keyed = str(tmp_path / "keyed")
    assert cli.main(["search", "build", source, *argv[3:4], keyed, *argv[4:]]) == 0
    assert cli.main(["search", "add", keyed, str(corpus)]) == 2
    assert "ids of their own, such as 'mine': give those of the new, by --ids" in capsys.readouterr().err
    assert len(asked(capsys, keyed, "a cat")) == 1
    (tmp_path / "queries.txt").write_text(f"the cat\n\n{TEXTS[9]}\n")
    rows = asked(capsys, place, "--file", str(tmp_path / "queries.txt"), "--top", "1")
    assert [(r["query"], r["id"], r["cosine"]) for r in rows] == [
        ("the cat", "mine", "1.0000"),
        (TEXTS[9], "9", "1.0000"),
    ]


def test_an_index_may_be_whitened_by_a_file_or_by_its_own_corpus(source, corpus, embedder, tmp_path, capsys):
    fit, one, two = (str(tmp_path / name) for name in ("fit", "one", "two"))
    assert cli.main(["whiten", "fit", source, corpus, fit]) == 0
    assert cli.main(["search", "build", source, corpus, one, "--whiten", fit, "--dim", "4"]) == 0
    assert cli.main(["search", "build", source, corpus, two, "--whiten-k", "4"]) == 0
    first, second = Index.load(one), Index.load(two)
    assert np.array_equal(first.vectors[0], second.vectors[0]) and first.vectors[0].shape == (64, 4)
    x = embedder.encode(TEXTS)
    y = by_hand(x, 4)(x.astype(np.float64))
    wanted = y / np.linalg.norm(y, axis=1, keepdims=True)
    assert_allclose(first.vectors[0] @ first.vectors[0].T, wanted @ wanted.T, atol=5e-3)
    assert first.query(TEXTS[:3], 1)[2][0].text == TEXTS[2]


def test_what_a_text_would_do_to_a_terminal_it_does_not(source, place, tmp_path, capsys):
    (tmp_path / "evil.txt").write_text("the \x1b[31mcat\x07\n")
    assert cli.main(["search", "build", source, str(tmp_path / "evil.txt"), place]) == 0
    assert cli.main(["search", "query", place, "cat"]) == 0
    out = capsys.readouterr().out
    assert "cosine" in out and "[31mcat" in out and "\x1b" not in out and "\x07" not in out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["build", "SOURCE", "CORPUS", "CORPUS"],
            "corpus.txt is a file, and a directory is written here; choose another name",
        ),
        (["query", "INDEX", " "], "TEXT ' ' is blank: give the words to look for"),
        (["build", "SOURCE", "gone.txt", "INDEX"], "gone.txt: no such file"),
        (["build", "SOURCE", "CORPUS", "INDEX", "--dim", "4"], "--dim 4 keeps components"),
        (["build", "SOURCE", "CORPUS", "INDEX", "--whiten-k", "17"], "17 components of width 16"),
        (["build", "SOURCE", "CORPUS", "INDEX", "--whiten-k", "8", "--dim", "4"], "with --whiten-k K, K is"),
        (["build", "SOURCE", "CORPUS", "INDEX", "--whiten-k", "0"], "--whiten-k 0 must be 1 or more"),
        (["build", "SOURCE", "CORPUS", "INDEX", "--whiten", "gone"], "gone"),
        (["build", "SOURCE", "CORPUS", "INDEX", "--ids", "key"], "--ids key goes with --columns"),
        (["build", "SOURCE", "CORPUS", "INDEX", "--columns", "a", "b"], "one column is encoded, not a, b"),
        (["add", "INDEX", "CORPUS", "--columns", "a", "b"], "one column is encoded, not a, b; texts that"),
        (["query", "INDEX", "--file", "CORPUS", "--columns", "a", "b"], "one column is encoded, not a, b"),
        (["query", "SOURCE", "text"], "best is not an index: no index.json"),
        (["query", "INDEX"], "one query is a TEXT"),
        (["query", "INDEX", "text", "--file", "CORPUS"], "one query is a TEXT"),
        (["query", "INDEX", "text", "--top", "0"], "--top 0"),
        (["add", "INDEX", "CORPUS"], "index is not an index"),
        (["bench", "INDEX"], "index is not an index"),
    ],
)
def test_bad_input_is_one_line(source, corpus, place, argv, message, capsys):
    names = {"SOURCE": source, "CORPUS": corpus, "INDEX": place}
    assert cli.main(["search", *(names.get(word, word) for word in argv)]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def cells(grid):
    return [dict(zip(grid.columns, row, strict=True)) for row in grid.rows]


def ten(x, y=None):
    """The ten rows nearest to each row by cosine, without itself, by sorting all."""
    x = x / np.linalg.norm(x, axis=1, keepdims=True)
    cosines = x @ x.T
    np.fill_diagonal(cosines, -np.inf)
    return [set(np.argsort(-row)[:10]) for row in cosines]


def shared(found, wanted):
    return sum(len(a & b) for a, b in zip(found, wanted, strict=True)) / (10 * len(wanted))


@pytest.mark.slow
def test_the_bench_measures_recall_against_the_whole_width(embedder):
    index = Index.build(embedder, TEXTS)
    rows = cells(bench(index, dims=[8, 4]))
    assert [(r["vectors"], r["k"]) for r in rows] == [
        ("as it is", "16"),
        ("whitened", "16"),
        ("whitened", "8"),
        ("whitened", "4"),
    ]
    x = np.vstack(index.vectors).astype(np.float64)
    found = [ten(x), *(ten(by_hand(x, k)(x)) for k in (None, 8, 4))]
    for row, one, whole in zip(rows, found, found[:1] + found[1:2] * 3, strict=True):
        assert abs(float(row["recall@10"]) - shared(one, whole)) < 0.006
        assert abs(float(row["as it is"]) - shared(one, found[0])) < 0.006
    assert rows[1]["recall@10"] == rows[0]["as it is"] == "1.000" and float(rows[3]["recall@10"]) < 0.9
    assert [r["MB"] for r in cells(bench(Index.build(embedder, TEXTS * 50), dims=[4]))] == [
        "0.2",
        "0.2",
        "0.1",
    ]


def test_the_bench_only_cuts_an_index_that_is_whitened(source, corpus, place, capsys):
    assert cli.main(["search", "build", source, corpus, place, "--whiten-k", "8"]) == 0
    index = Index.load(place)
    grid = bench(index, dims=[4])
    rows = cells(grid)
    assert [(r["vectors"], r["k"]) for r in rows] == [("as it is", "8"), ("cut", "4")]
    x = index.vectors[0].astype(np.float64)
    assert abs(float(rows[1]["recall@10"]) - shared(ten(x[:, :4]), ten(x))) < 0.006
    assert any("the index is whitened" in note for note in grid.notes)
    capsys.readouterr()
    assert cli.main(["search", "bench", place, "--dims", "2", "--to", "markdown"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"\| cut \| 2 \|", out) and "64 texts, of which 64 are queries" in out


def test_the_bench_by_default_takes_the_usual_widths(embedder):
    assert [r["k"] for r in cells(bench(Index.build(embedder, TEXTS)))] == ["16", "16"]


def test_the_bench_says_what_was_timed_and_what_texts_take(embedder, monkeypatch):
    """With a clock that is one second later whenever it is asked."""
    index = Index.build(embedder, TEXTS * 60)
    monkeypatch.setattr("time.perf_counter", count().__next__)
    monkeypatch.setattr(search_bench, "QUERIES", 3)
    grid = bench(index, dims=[4])
    times = [(row["build s"], row["queries/s"], row["ms/query"]) for row in cells(grid)]
    assert times == [("0.0", "3", "1000.00"), ("2.0", "3", "1000.00"), ("2.0", "3", "1000.00")]
    size = sum(len(text.encode()) + len(str(i)) + 16 for i, text in enumerate(TEXTS * 60)) / 1e6
    assert any(f"texts and ids add {size:.1f} MB to each" in note for note in grid.notes)


@pytest.mark.parametrize(("n", "few"), [(2, True), (159, True), (160, False)])
def test_a_small_index_is_measured_and_the_bench_says_that_it_is_small(embedder, n, few):
    grid = bench(Index.build(embedder, (TEXTS * 3)[:n]), dims=[1])
    assert [row["k"] for row in cells(grid)] == ["16", "16", "1"]
    said = f"whitening is fitted to n = {n}, below 10 d = 160;"
    assert any(said in note for note in grid.notes) == few


@pytest.mark.parametrize(
    ("n", "more", "message"),
    [
        (1, {}, "1 of the 1 texts of this index are measured; take 2 or more"),
        (5, {"dims": [0]}, "--dims 0: this index has width 16; name numbers from 1 to 16"),
        (5, {"dims": [4, 17]}, "--dims 17: this index has width 16; name numbers from 1 to 16"),
    ],
)
def test_a_bench_that_cannot_be_is_refused(source, n, more, message):
    with pytest.raises(ValueError, match=message):
        bench(Index.build(source, TEXTS[:n]), **more)


def test_a_query_leaves_its_own_row_out_or_else_the_last():
    rows = np.array([[3, 1, 2], [5, 6, 7], [1, 2, 0]])
    assert without(rows, np.array([1, 9, 0])).tolist() == [[3, 2], [5, 6], [1, 2]]
    assert recall(np.array([[1, 2], [3, 4]]), np.array([[2, 9], [4, 3]])) == 0.75

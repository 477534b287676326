"""An index finds what a comparison of all vectors finds, from memory and from disk; ids are row numbers."""

import csv
import io
import threading

import numpy as np
import pytest
from encoders import SENTENCES
from numpy.testing import assert_allclose

from whitenedcse.app import cli
from whitenedcse.data.corpus import Corpus
from whitenedcse.evaluation.postprocess import Postprocess
from whitenedcse.serving import search
from whitenedcse.serving.fit import scaled, whitened
from whitenedcse.serving.search import Index, build, extend

TEXTS = [f"{a} {b}" for a in SENTENCES for b in SENTENCES]
BLANK = {3: "", 5: "  ", 9: "\u200b\ufeff", 40: ""}  # rows without tokens
LINES = [BLANK.get(i, text) for i, text in enumerate(TEXTS)]


@pytest.fixture
def corpus(tmp_path):
    (tmp_path / "corpus.txt").write_text("\n".join(LINES) + "\n")
    return Corpus(str(tmp_path / "corpus.txt"))


def by_hand(vectors, queries, top):
    """The rows with the highest cosines, and these, in float64; blank rows are none."""
    x, q = (v / np.linalg.norm(v, axis=1, keepdims=True) for v in map(np.float64, (vectors, queries)))
    cosines = q @ x.T
    cosines[:, list(BLANK)] = -np.inf
    order = np.argsort(-cosines, axis=1, kind="stable")[:, :top]
    return order, np.take_along_axis(cosines, order, 1)


def assert_found(hits, vectors, queries, top, texts=LINES):
    rows, cosines = by_hand(vectors, queries, top)
    assert_allclose([[hit.cosine for hit in row] for row in hits], cosines, atol=1e-6)
    for found, wanted, near in zip(hits, rows, cosines, strict=True):
        for hit, i, cosine in zip(found, wanted, near, strict=True):
            assert hit.id == str(i) or abs(hit.cosine - cosine) < 1e-6  # the order of equal ones
            assert hit.text == texts[int(hit.id)] and -1 <= hit.cosine <= 1


@pytest.mark.parametrize("part", [7, 1 << 17])
def test_what_is_found_is_nearest_from_memory_and_from_disk_in_any_parts(
    embedder, corpus, tmp_path, part, monkeypatch
):
    monkeypatch.setattr(search, "PART", part)
    monkeypatch.setattr(search, "BLOCK", 6)
    x, queries = embedder.encode(LINES), embedder.encode(SENTENCES)
    memory = Index.build(embedder, LINES)
    memory.save(tmp_path / "saved")
    assert build(tmp_path / "built", embedder, corpus) == (60, 16)
    (tmp_path / "half.txt").write_text("\n".join(LINES[:31]) + "\n")
    (tmp_path / "rest.txt").write_text("\n".join(LINES[31:]) + "\n")
    build(tmp_path / "two", embedder, Corpus(str(tmp_path / "half.txt")))
    assert extend(tmp_path / "two", Corpus(str(tmp_path / "rest.txt"))) == (28, 32)
    loaded = [Index.load(tmp_path / name) for name in ("saved", "built", "two")]
    for index in (memory, *loaded, Index.build(embedder, LINES[:31]).add(LINES[31:])):
        assert (len(index), index.rows) == (60, 64) and (part > 7 or len(index.parts) > 4)
        for top in (1, 7, 60):
            assert_found(index.query(SENTENCES, top), x, queries, top)
    assert len(loaded[0].query(["a cat"], 99)[0]) == 60  # all, if there are fewer


def test_blank_rows_that_are_added_alone_or_behind_a_full_part_are_counted(embedder, tmp_path, monkeypatch):
    alone = Index.build(embedder, ["the cat"]).add(["", " "])
    assert [hit.id for hit in alone.add(["a bird"]).query(["a bird"], 2)[0]] == ["3", "0"]
    monkeypatch.setattr(search, "PART", 1)
    for block in (1, 20_000):  # in a block of its own, or that of the text
        monkeypatch.setattr(search, "BLOCK", block)
        Index.build(embedder, ["the cat", ""]).save(tmp_path / str(block))
        index = Index.load(tmp_path / str(block)).add(["a bird"])
        assert [hit.id for hit in index.query(["a bird"], 1)[0]] == ["2"]


def test_a_whitening_is_part_of_the_index_for_texts_and_queries(embedder, corpus, tmp_path):
    faiss = pytest.importorskip("faiss")
    x = embedder.encode(LINES)
    fit = Postprocess("whitening").fit(x[[i for i in range(64) if i not in BLANK]])
    wanted, queries = fit.transform(x, 5), fit.transform(embedder.encode(SENTENCES), 5)
    for unit in (False, True):
        build(folder := tmp_path / f"{unit}", whitened(scaled(embedder, unit=unit), fit, 5), corpus)
        index = Index.load(folder)
        near = [[hit.cosine for hit in row] for row in index.query(SENTENCES, 9)]
        assert_allclose(near, by_hand(wanted, queries, 9)[1], atol=1e-4)
        plain = faiss.read_index(str(folder / "part-00000.faiss"))
        assert_allclose(plain.search(index.embedder.encode(SENTENCES), 9)[0], near, atol=1e-6)


def test_encoded_vectors_are_taken_in_place_of_encoding(source, corpus, tmp_path, capsys):
    words, whiten = [source, corpus.path], ["--whiten", str(tmp_path / "fit"), "--dim", "4"]
    assert cli.main(["whiten", "fit", *words, str(tmp_path / "fit")]) == 0
    assert cli.main(["encode", *words, str(tmp_path / "v"), "--shard", "9", *whiten]) == 0
    for name, more in (("a", []), ("b", ["--vectors", str(tmp_path / "v")])):
        assert cli.main(["search", "build", *words, str(tmp_path / name), *whiten, *more]) == 0
    a, b = (Index.load(tmp_path / name).query(SENTENCES, 60) for name in "ab")
    assert_allclose(*([[hit.cosine for hit in row] for row in hits] for hits in (a, b)), atol=2e-4)
    capsys.readouterr()
    (tmp_path / "other.txt").write_text("one\ntwo\n")
    for text, more, message in (
        (str(tmp_path / "other.txt"), [], "holds vectors of "),
        (corpus.path, ["--dim", "3"], "holds vectors of another embedder"),
    ):
        asked = [source, text, str(tmp_path / "x"), "--vectors", str(tmp_path / "v"), *whiten, *more]
        assert cli.main(["search", "build", *asked]) == 2
        assert message in capsys.readouterr().err and not (tmp_path / "x").exists()


def test_ids_are_unique_and_given_always_or_never(embedder, tmp_path):
    ids = [f"id-{i}" for i in range(len(LINES))]
    index = Index.build(embedder, LINES, ids)
    assert {hit.id for row in index.query(SENTENCES, 9) for hit in row} <= set(ids)
    index.save(tmp_path / "index")
    for one in (index, Index.load(tmp_path / "index")):
        with pytest.raises(ValueError, match="the texts of this index have ids of their own"):
            one.add(["a cat"])
        with pytest.raises(ValueError, match="the id 'id-7' is of two texts"):
            one.add(["a cat", "a dog"], ["new", "id-7"])
        with pytest.raises(ValueError, match="the id 'x' is of two texts"):
            one.add(["a cat", "a dog"], ["x", "x"])
        with pytest.raises(ValueError, match="1 ids for 2 texts"):
            one.add(["a cat", "a dog"], ["x"])
    with pytest.raises(ValueError, match="have no ids of their own"):
        Index.build(embedder, LINES).add(["a cat"], ["x"])


@pytest.mark.parametrize("factory", ["HNSW8", "IVF2,PQ4x4,RFlat"])
def test_an_index_of_faiss_finds_most_of_what_is_nearest_and_a_text_itself(embedder, tmp_path, factory):
    texts = [f"{a} {b} {c}" for a in SENTENCES for b in SENTENCES for c in SENTENCES[:5]]
    (tmp_path / "c.txt").write_text("\n".join(texts))
    small = whitened(embedder, Postprocess("whitening").fit(embedder.encode(texts)), 8)
    build(tmp_path / "index", small, Corpus(str(tmp_path / "c.txt")), factory=factory)
    build(tmp_path / "flat", small, Corpus(str(tmp_path / "c.txt")))
    asked = texts[::9]
    hits = (Index.load(tmp_path / name).query(asked, 10) for name in ("index", "flat"))
    found, whole = ([{hit.id for hit in row} for row in rows] for rows in hits)
    assert np.mean([len(a & b) / 10 for a, b in zip(found, whole, strict=True)]) > 0.8
    assert np.mean([str(i * 9) in row for i, row in enumerate(found)]) > 0.9
    assert extend(tmp_path / "index", Corpus(str(tmp_path / "c.txt"))) == (320, 320)


def test_what_faiss_does_not_take_is_refused_before_encoding(embedder, corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(search, "encode", None)
    for factory, why in (("PQ5", "multiple"), ("Nonsense", "could not parse")):
        with pytest.raises(ValueError, match=f"factory='{factory}' for vectors of width 16: .*{why}"):
            build(tmp_path / "x", embedder, corpus, factory=factory)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="FAISS cannot learn this index from 64 vectors"):
        build(tmp_path / "x", embedder, corpus, factory="IVF100,Flat")
    assert not (tmp_path / "x").exists()


def test_prompts_of_texts_and_queries(embedder, corpus, tmp_path):
    both = embedder.replaced(prompts={"document": "the ", "query": "a "})
    index = Index.build(both, LINES)
    index.save(tmp_path / "index")
    x, q = embedder.encode(LINES, prompt="the "), embedder.encode(SENTENCES, prompt="a ")
    for one in (index, Index.load(tmp_path / "index")):
        assert_found(one.query(SENTENCES, 9), x, q, 9)
    build(tmp_path / "two", search.searching(embedder, "the ", "a "), corpus)
    assert_found(Index.load(tmp_path / "two").query(SENTENCES, 9), x, q, 9)


def test_a_damaged_byte_of_any_file_is_named(embedder, tmp_path):
    Index.build(embedder, LINES).save(tmp_path / "index")
    files = [path for path in (tmp_path / "index").rglob("*") if path.is_file() and path.suffix != ".md"]
    assert {"index.json", "empty.faiss", "part-00000.faiss", "part-00000.parquet"} <= {p.name for p in files}
    for path in files:
        whole = path.read_bytes()
        path.write_bytes(whole[:-2] + bytes([whole[-2] ^ 1]) + whole[-1:])
        with pytest.raises(ValueError, match="again|another version"):
            Index.load(tmp_path / "index")
        path.write_bytes(whole)
    (tmp_path / "index" / "index.json").write_text('{"format": 2}')
    with pytest.raises(ValueError, match="another version; build it again"):
        Index.load(tmp_path / "index")
    with pytest.raises(FileNotFoundError, match="is not an index"):
        Index.load(tmp_path)


def test_a_kill_while_texts_are_added_leaves_the_index(embedder, corpus, tmp_path, monkeypatch):
    Index.build(embedder, LINES).save(tmp_path / "index")
    monkeypatch.setattr(search, "write_json", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        extend(tmp_path / "index", corpus)
    assert len(Index.load(tmp_path / "index")) == 60
    monkeypatch.undo()
    assert extend(tmp_path / "index", corpus) == (60, 60)
    assert {path.name for path in tmp_path.iterdir()} == {"index", "corpus.txt"}


def test_threads_query_one_index(embedder, tmp_path):
    Index.build(embedder, LINES).save(tmp_path / "index")
    index, found = Index.load(tmp_path / "index"), []
    wanted = index.query(SENTENCES, 20)
    threads = [threading.Thread(target=lambda: found.append(index.query(SENTENCES, 20))) for _ in range(8)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert len(found) == 8 and all(hits == wanted for hits in found)


def test_the_commands_number_rows_alike_and_do_not_repeat_a_query(source, corpus, tmp_path, capsys):
    index = str(tmp_path / "index")
    assert cli.main(["search", "build", source, corpus.path, index]) == 0
    assert f"60 texts, vectors of width 16: {index}" in capsys.readouterr().out
    assert cli.main(["search", "query", index, "--file", corpus.path, "--top", "1", "--to", "csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert list(rows[0]) == ["query", "rank", "cosine", "id", "text"]
    assert [int(row["query"]) for row in rows] == [i for i in range(64) if i not in BLANK]
    assert all(row["text"] == LINES[int(row["query"])] for row in rows)  # it finds itself, or an equal one
    assert cli.main(["search", "query", index, "a cat", "--top", "3", "--to", "csv"]) == 0
    assert list(csv.reader(io.StringIO(capsys.readouterr().out)))[0] == ["rank", "cosine", "id", "text"]
    table = tmp_path / "table.jsonl"
    table.write_text('{"key": 7, "text": "the cat"}\n{"key": "k2", "text": "a bird"}\n')
    keyed, names = str(tmp_path / "keyed"), ["--columns", "text", "--ids", "key"]
    assert cli.main(["search", "build", source, str(table), keyed, *names]) == 0
    assert cli.main(["search", "add", keyed, corpus.path]) == 2
    assert "have ids of their own" in capsys.readouterr().err
    assert Index.load(keyed).query(["the cat"], 1)[0][0].id == "7"
    table.write_text('{"key": 8, "text": "a dog"}\n')
    assert cli.main(["search", "add", keyed, str(table), *names]) == 0
    table.write_text('{"key": null, "text": "the cat"}\n')
    assert cli.main(["search", "build", source, str(table), str(tmp_path / "null"), *names]) == 2
    assert "an id is None: each text needs its own" in capsys.readouterr().err
    assert cli.main(["search", "add", index, corpus.path]) == 0
    assert f"60 texts and 60 more: {index}" in capsys.readouterr().out
    assert max(int(hit.id) for hit in Index.load(index).query(["a cat"], 120)[0]) == 127
    for words, message in (
        (["query", index], "give one of the two"),
        (["build", source, corpus.path, index], "exists; choose another name"),
        (["add", "s3://b/index", corpus.path], "an index in a store is not added to"),
    ):
        assert cli.main(["search", *words]) == 2 and message in capsys.readouterr().err

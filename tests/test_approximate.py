"""Indices of FAISS beside the vectors, compared with exact search and by plain FAISS."""

import builtins
import csv
import io

import numpy as np
import pytest
from encoders import SENTENCES, embedder_of
from numpy.testing import assert_allclose, assert_array_equal

from whitenedcse.app import cli
from whitenedcse.data.corpus import Corpus
from whitenedcse.evaluation.postprocess import Postprocess
from whitenedcse.files import seal
from whitenedcse.model import checkpoint
from whitenedcse.serving import approximate, search_bench
from whitenedcse.serving.approximate import centroids, found, made, needed, ranked, trained
from whitenedcse.serving.exports import whitened
from whitenedcse.serving.fitting import fitted
from whitenedcse.serving.index import Index, write
from whitenedcse.serving.search_bench import bench, picture, usual

faiss = pytest.importorskip("faiss")
TEXTS = [f"{a} {b} {c}" for a in SENTENCES for b in SENTENCES for c in SENTENCES]
ASKED = ["the small dog sees a tree", "bread", TEXTS[100]]


@pytest.fixture
def embedder(bert):
    return embedder_of(bert, kind="mean").eval()


@pytest.fixture
def corpus(tmp_path):
    (tmp_path / "corpus.txt").write_text("\n".join(TEXTS) + "\n")
    return str(tmp_path / "corpus.txt")


@pytest.fixture
def white(embedder, corpus):
    fit = Postprocess("whitening")
    fit.provenance = fitted(fit, embedder, Corpus(corpus))
    return whitened(embedder, fit, 8)


def numbered(texts=TEXTS):
    return ((str(i), text) for i, text in enumerate(texts))


def rows_of(n, d, seed=0):
    x = np.random.default_rng(seed).normal(size=(n, d)).astype(np.float32)
    return x / np.linalg.norm(x, axis=1, keepdims=True)


@pytest.mark.parametrize("kind", ["embedder", "white"])
def test_plain_faiss_reads_the_file_and_its_queries_are_vectors_before_the_whitening(kind, request, tmp_path):
    source = request.getfixturevalue(kind)
    write(tmp_path / "index", source, numbered(), factory="Flat")
    plain = faiss.read_index(str(tmp_path / "index/part-0/index.faiss"))
    raw = source.replaced(final=None).encode(ASKED)
    assert raw.shape[1] == 16 == plain.d
    distances, rows = plain.search(raw, 5)
    index = Index.load(tmp_path / "index")
    exact = index.query(ASKED, 5, exact=True)
    assert_allclose(1 - distances / 2, [[hit.cosine for hit in hits] for hits in exact], atol=2e-5)
    x = np.vstack(index.vectors).astype(np.float64)
    q = source.encode(ASKED).astype(np.float64)
    q /= np.linalg.norm(q, axis=1, keepdims=True)
    assert_allclose(np.take_along_axis(q @ x.T, rows, 1), 1 - distances / 2, atol=2e-5)


@pytest.mark.parametrize(
    "factory", ["Flat", "SQ8", "LSH", "HNSW16", "IVF8,Flat", "IVF8,RaBitQ", "PQ8x3", "OPQ4,PQ4x3"]
)
@pytest.mark.slow(but=2)
def test_an_index_of_faiss_proposes_and_the_whole_vectors_decide(factory, white, tmp_path):
    write(tmp_path / "index", white, numbered(), factory=factory)
    index = Index.load(tmp_path / "index")
    assert index.parts[0].near is not None
    for hits, exact in zip(index.query(ASKED, 10), index.query(ASKED, 10, exact=True), strict=True):
        assert len(hits) == 10 and hits == sorted(hits, key=lambda hit: (-hit.cosine, int(hit.id)))
        least = 10 if factory in ("Flat", "HNSW16") else 6
        assert len({hit.id for hit in hits} & {hit.id for hit in exact}) >= least
        same = {hit.id: hit.cosine for hit in exact}
        assert all(hit.cosine == same[hit.id] for hit in hits if hit.id in same)


def test_the_proposed_rows_are_ranked_as_a_naive_loop_does_and_missing_ones_left_out():
    x, queries = rows_of(50, 6), rows_of(2, 6, seed=1)
    rows = np.array([[3, -1, 40, 7], [-1, -1, 9, -1]])
    scores, best = ranked(queries, [x[:20], x[20:]], rows, 3)
    for query, near, got, at in zip(queries.astype(np.float64), rows, scores, best, strict=True):
        wanted = sorted((-np.float32(query @ x[i].astype(np.float64)), i) for i in near if i >= 0)[:3]
        assert [row for row in at if row >= 0] == [i for _, i in wanted]
        assert_allclose(got[: len(wanted)], [-score for score, _ in wanted], atol=1e-7)
        assert (got[len(wanted) :] == -np.inf).all()


def test_ten_times_as_many_rows_are_proposed_as_wanted():
    reached = []

    class Proposes:
        def rows(self, queries, reach):
            reached.append(reach)
            return np.zeros((len(queries), reach), np.int64)

    found(rows_of(2, 4), [(rows_of(50, 4), Proposes())], 3)
    assert reached == [30]


def test_lists_that_are_not_searched_may_leave_fewer_texts_than_wanted(white, tmp_path, monkeypatch):
    monkeypatch.setattr(approximate, "PROBES", 1)
    write(tmp_path / "index", white, numbered(TEXTS[:200]), factory="IVF5,Flat")
    index = Index.load(tmp_path / "index")
    hits = index.query(ASKED, 200)
    assert all(0 < len(row) < 200 for row in hits)
    assert all(hit.id and np.isfinite(hit.cosine) for row in hits for hit in row)


def test_texts_that_are_added_are_all_compared(white, tmp_path):
    write(tmp_path / "index", white, numbered(), factory="IVF4,Flat")
    index = Index.load(tmp_path / "index")
    index.add(["bread bread", "a dog"]).save(tmp_path / "index")
    again = Index.load(tmp_path / "index")
    assert [part.near is None for part in again.parts] == [False, True]
    assert again.query(["bread bread", TEXTS[7]], 1)[0][0].id == "512"
    assert again.query([TEXTS[7]], 1)[0][0].text == TEXTS[7]
    parts = [(part.vectors, part.near) for part in again.parts]
    assert found(white.encode(ASKED), parts, 3)[1].shape == (3, 3)


def test_the_sample_is_always_the_same_and_bounded(monkeypatch):
    x, seen = rows_of(1000, 8), []
    monkeypatch.setattr(approximate, "taken", lambda parts, rows: (seen.append(rows), x[rows])[1])
    for factory, size in (("IVF4,Flat", 256), ("SQ8", 500)):
        monkeypatch.setattr(approximate, "SAMPLE", 500)
        files = [faiss.serialize_index(trained([x[:300], x[300:]], factory)) for _ in range(2)]
        assert_array_equal(*files)
        one, two = seen[-2:]
        assert_array_equal(one, two)
        assert len(one) == len(set(one)) == size


@pytest.mark.parametrize(
    ("factory", "count"),
    [("Flat", 0), ("SQ8", 0), ("HNSW8", 0), ("IVF12,SQ8", 12), ("PQ4", 256), ("IVF512,PQ4", 512)]
    + [
        ("IVF4,PQ4x4", 16),
        ("OPQ4,PQ4", 256),
        ("IVF7,PQ4,RFlat", 256),
        ("HNSW8,PQ4", 256),
        ("PCA4,IVF9,Flat", 9),
    ],
)
def test_the_rows_that_training_takes_are_counted(factory, count):
    assert centroids(made(factory, 8)) == count
    assert needed(factory, 8) == max(1, 39 * count)


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("nonsense", "FAISS says could not parse index string nonsense; it knows Flat, SQ8, "),
        ("PQ3", "(M); the vectors have 16 numbers, a multiple of 1, 2, 4, 8, 16 ("),
        ("IVF16,Flat", "learns 16 centroids from 39 rows each: 624 rows are needed, and there are 512"),
        ("IVF0,Flat", "one or more lists"),
        ("IDMap,Flat", "no IDMap"),
    ],
)
def test_a_factory_that_cannot_be_is_refused_in_one_line_before_anything_is_encoded(
    factory, message, embedder, corpus, tmp_path, capsys, monkeypatch
):
    checkpoint.save(embedder, tmp_path / "best")
    monkeypatch.setattr("whitenedcse.serving.index.encoded", None)
    argv = ["search", "build", str(tmp_path / "best"), corpus, str(tmp_path / "index"), "--factory", factory]
    assert cli.main(argv) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and ".cpp" not in error
    assert not (tmp_path / "index").exists()


def test_without_faiss_the_way_out_is_named(white, tmp_path, monkeypatch):
    write(tmp_path / "index", white, numbered(), factory="SQ8")
    known = builtins.__import__

    def without(name, *more):
        if name == "faiss":
            raise ImportError
        return known(name, *more)

    monkeypatch.setattr(builtins, "__import__", without)
    index = Index.load(tmp_path / "index")
    with pytest.raises(ValueError, match=r"pip install 'whitenedcse\[search\]'"):
        index.query(ASKED)
    assert len(index.query(ASKED, exact=True)[0]) == 10


@pytest.fixture
def saved(white, tmp_path):
    write(tmp_path / "saved", white, numbered(), factory="IVF4,Flat")
    return tmp_path / "saved"


@pytest.mark.slow
def test_a_damaged_file_is_named_before_faiss_parses_it(saved, tmp_path):
    file = saved / "part-0/index.faiss"
    content = file.read_bytes()
    for place in np.random.default_rng(0).choice(len(content), 40, replace=False):
        file.write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
        index = Index.load(saved)
        assert len(index.query(ASKED, exact=True)[0]) == 10
        with pytest.raises(ValueError, match=r"index.faiss is not as it was written"):
            index.query(ASKED)
    file.write_bytes(content[:-9])
    with pytest.raises(ValueError, match=r"index.faiss is not as it was written"):
        Index.load(saved).query(ASKED)
    file.unlink()
    with pytest.raises(ValueError, match=r"index.faiss is missing"):
        Index.load(saved)


@pytest.mark.parametrize("what", ["text", "flat", "other n", "other width"])
def test_a_file_of_someone_else_is_refused(saved, what):
    """With the right digest: what is in it does not fit the index."""
    file = saved / "part-0/index.faiss"
    if what == "text":
        file.write_bytes(b"no index")
    else:
        other = faiss.IndexFlatL2(9 if what == "other width" else 8)
        other.add(np.zeros((9 if what == "other n" else 512, other.d), np.float32))
        faiss.write_index(other if what == "flat" else faiss.IndexPreTransform(other), str(file))
    seal(saved / "part-0")
    with pytest.raises(ValueError, match=r"index.faiss is damaged"):
        Index.load(saved).query(ASKED)


def test_rows_that_are_not_there_are_refused(saved):
    class Liar:
        def search(self, queries, top):
            return None, np.full((len(queries), top), 10_000)

    near = Index.load(saved).parts[0].near
    near.index = Liar()
    with pytest.raises(ValueError, match="names rows that are not there"):
        near.rows(rows_of(1, 8), 3)


def asked(capsys, *argv):
    capsys.readouterr()
    assert cli.main(["search", "query", *argv, "--to", "csv"]) == 0
    return list(csv.DictReader(io.StringIO(capsys.readouterr().out)))


@pytest.mark.parametrize("to", ["npy", "parquet"])
@pytest.mark.slow(but=1)
def test_vectors_of_encode_give_the_index_that_encoding_would(to, embedder, tmp_path, capsys):
    table = tmp_path / "table.tsv"
    lines = [f"{text}\tk{i}" for i, text in enumerate(TEXTS)]
    table.write_text("\n".join(["text\tkey", *lines[:5], " \tblank", *lines[5:]]) + "\n")
    checkpoint.save(embedder, tmp_path / "best")
    model, one, two = str(tmp_path / "best"), str(tmp_path / "one"), str(tmp_path / "two")
    argv = [
        "encode",
        model,
        str(table),
        str(tmp_path / "vectors"),
        "--columns",
        "text",
        "--to",
        to,
        "--shard",
        "100",
    ]
    assert cli.main(argv) == 0
    argv = [model, str(table), one, "--columns", "text", "--ids", "key", "--factory", "IVF4,SQ8"]
    assert cli.main(["search", "build", *argv]) == 0
    argv[2] = two
    assert cli.main(["search", "build", *argv, "--vectors", str(tmp_path / "vectors")]) == 0
    first, second = Index.load(one), Index.load(two)
    assert_allclose(first.vectors[0], second.vectors[0], atol=1e-6)
    assert [second.parts[0].ids[i] for i in (0, 4, 5, 511)] == ["k0", "k4", "k5", "k511"]
    assert [second.parts[0].texts[i] for i in range(512)] == TEXTS
    assert asked(capsys, two, TEXTS[9], "--top", "1")[0]["text"] == TEXTS[9]
    assert asked(capsys, two, TEXTS[9], "--top", "1", "--exact")[0]["text"] == TEXTS[9]


def test_vectors_of_another_column_are_refused_by_its_name(embedder, tmp_path, capsys):
    checkpoint.save(embedder, tmp_path / "best")
    (tmp_path / "t.csv").write_text("title,body\nthe cat,a dog\nthe tree,a bird\n")
    table, out = str(tmp_path / "t.csv"), str(tmp_path / "vectors")
    assert cli.main(["encode", str(tmp_path / "best"), table, out, "--columns", "body"]) == 0
    words = ["search", "build", str(tmp_path / "best"), table, str(tmp_path / "i"), "--vectors", out]
    assert cli.main([*words, "--columns", "title"]) == 2
    assert "holds vectors of body, not of title; give --columns as encode had it" in capsys.readouterr().err
    assert cli.main([*words, "--columns", "body"]) == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            ["--prompt", "passage: "],
            "vectors of another embedder: prompt was None and is now 'passage: '; give",
        ),
        (
            ["--whiten-k", "4"],
            "--whiten-k 4 fits a whitening, and --vectors were encoded without it: use whitenedcse",
        ),
        (["--sample", "9"], "--sample 9: --vectors hold all rows; leave one of the two out"),
        (["CORPUS"], "not of"),
        (
            ["FIT"],
            "vectors of another embedder: there was a final step (a whitening, or division by the",
        ),
        (["WEIGHTS"], "vectors of another embedder: the encoder, its pooling, "),
    ],
)
@pytest.mark.slow(but=2)
def test_vectors_of_something_else_are_refused(
    change, message, embedder, corpus, tmp_path, capsys, monkeypatch
):
    checkpoint.save(embedder, tmp_path / "best")
    ending = []
    if change == ["FIT"]:
        change, ending = [], ["--whiten", str(tmp_path / "fit.safetensors")]
        assert cli.main(["whiten", "fit", str(tmp_path / "best"), corpus, ending[1]]) == 0
    assert cli.main(["encode", str(tmp_path / "best"), corpus, str(tmp_path / "vectors"), *ending]) == 0
    if change == ["WEIGHTS"]:
        change = []
        embedder.encoder.backbone.get_input_embeddings().weight.data += 1
        checkpoint.save(embedder, tmp_path / "best")
    if change == ["CORPUS"]:
        change = []
        with open(corpus, "a") as stream:
            stream.write("one more\n")
    argv = ["search", "build", str(tmp_path / "best"), corpus, str(tmp_path / "index")]
    if {"--whiten-k", "--sample"} & {*change}:  # known from the start: nothing is loaded, and nothing encoded
        monkeypatch.setattr("whitenedcse.app.arguments.ended", None)
    assert cli.main([*argv, "--vectors", str(tmp_path / "vectors"), *change]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "index").exists()


def cells(grid):
    return [dict(zip(grid.columns, row, strict=True)) for row in grid.rows]


@pytest.mark.slow
def test_the_bench_compares_codes_of_every_kind_of_vectors(embedder, tmp_path):
    index = Index.build(embedder, TEXTS)
    grid = bench(index, dims=[8], factories=["SQ8", "LSH", "PQ16x2", "HNSW8"], prefix=True, rows=200)
    rows = cells(grid)
    kinds = [("as it is", "16"), ("whitened", "16"), ("whitened", "8"), ("prefix", "8")]
    some = ["exact", "SQ8", "LSH", "PQ16x2", "HNSW8"]
    wanted = [(*kind, one) for kind in kinds for one in some if kind[1] == "16" or one != "PQ16x2"]
    assert [(r["vectors"], r["k"], r["search"]) for r in rows] == wanted  # 16 does not divide 8
    assert any(note.startswith("200 texts, of which 200 are queries") for note in grid.notes)
    for row in rows:
        k = int(row["k"])
        least = {"exact": 4 * k, "SQ8": k, "LSH": k / 8, "HNSW8": 4 * k, "PQ16x2": 4}[row["search"]]
        assert least <= float(row["bytes/vector"]) < least + 160  # headers, and links of the graph
    exact = [row for row in rows if row["search"] == "exact"]
    assert [row["recall@10"] for row in exact[:2]] == ["1.000", "1.000"]
    flat = [row for row in rows if row["search"] in ("SQ8", "LSH") and row["k"] == "16"]
    assert all(float(row["re-ranked"]) >= float(row["recall@10"]) for row in flat)
    plain = [row for row in rows if row["vectors"] in ("as it is", "prefix")]
    assert all(row["recall@10"] == row["as it is"] for row in plain)
    picture(grid, tmp_path / "picture.svg")
    assert "bytes a vector" in (tmp_path / "picture.svg").read_text()


def test_recall_of_a_code_is_that_of_a_naive_comparison(embedder):
    index = Index.build(embedder, TEXTS)
    row = cells(bench(index, dims=[16], factories=["LSH"]))[1]
    x = np.vstack(index.vectors)
    bits = x >= 0
    cosines, agree = x @ x.T, (bits[:, None] == bits[None]).sum(-1).astype(float)
    shares = []
    for i in range(len(x)):
        others = [j for j in range(len(x)) if j != i]
        wanted = sorted(others, key=lambda j: -cosines[i, j])[:10]
        least = sorted(agree[i, others])[-10]
        sure = [j for j in others if agree[i, j] > least]  # those that tie with the last come in any order
        shares.append((len(set(sure) & set(wanted)), sum(agree[i, j] >= least for j in wanted)))
    low, high = np.array(shares).mean(0) / 10
    assert low - 0.01 <= float(row["recall@10"]) <= high + 0.01 and low < high


def test_a_factory_that_fits_nothing_is_refused(embedder):
    with pytest.raises(ValueError, match="IVF99,Flat.*3,861 rows are needed"):
        bench(Index.build(embedder, TEXTS), factories=["SQ8", "IVF99,Flat"])


def test_it_is_refused_before_anything_is_measured_and_one_of_any_width_is_not(embedder, monkeypatch):
    index = Index.build(embedder, TEXTS)
    table = bench(index, dims=[6], factories=["PQ3x3"])  # which 16 is no multiple of
    assert [row[1:3] for row in table.rows if row[2] != "exact"] == [["6", "PQ3x3"]]
    monkeypatch.setattr("whitenedcse.serving.search_bench.measured", None)
    with pytest.raises(ValueError, match=r"'PQ5x2': FAISS says The dimension .*\(width 16\)"):
        bench(index, dims=[6], factories=["SQ8", "PQ5x2"])


def test_what_faiss_can_train_and_not_search_is_refused():
    with pytest.raises(ValueError, match="^--factory 'PQ3x2': FAISS says 'ksub % 8 == 0' failed"):
        trained([np.eye(156, 6, dtype=np.float32)], "PQ3x2")


@pytest.mark.parametrize(("n", "k"), [(2, 1), (100, 8), (5000, 100), (20_000, 384), (1_000_000, 256)])
def test_the_usual_ones_can_be_made_and_trained(n, k):
    assert usual(n, k)
    for factory in usual(n, k):
        assert needed(factory, k) <= n and made(factory, k).d == k


def test_all_stands_for_the_usual_ones(embedder, monkeypatch):
    monkeypatch.setattr(search_bench, "usual", lambda n, k: ["SQ8"])
    rows = cells(bench(Index.build(embedder, TEXTS), dims=[16], factories=["all"]))
    assert [row["search"] for row in rows] == ["exact", "SQ8"] * 2

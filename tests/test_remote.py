"""Corpora, shards, indices, exports and fits in an object store, here a local server that speaks S3."""

import fsspec
import numpy as np
import pytest
from encoders import SENTENCES, embedder_of

from whitenedcse.app import arguments, cli
from whitenedcse.data import files, remote
from whitenedcse.evaluation.postprocess import Postprocess
from whitenedcse.model.embedder import Embedder
from whitenedcse.serving import shards
from whitenedcse.serving.bulk import arrays
from whitenedcse.serving.exports import export
from whitenedcse.serving.index import Index

TEXTS = [f"{a} {b}" for a in SENTENCES for b in SENTENCES[:3]]


@pytest.fixture(scope="module")
def server():
    """The address of a server that holds what it is given in memory."""
    pytest.importorskip("s3fs", reason="the S3 client is not installed")
    moto = pytest.importorskip("moto.server", reason="moto is not installed")
    server = moto.ThreadedMotoServer(port=0, verbose=False)
    server.start()
    yield "http://{}:{}".format(*server.get_host_and_port())
    server.stop()


@pytest.fixture(params=["memory", pytest.param("s3", marks=pytest.mark.slow)])
def url(request, tmp_path, monkeypatch):
    """An empty place in a store."""
    monkeypatch.setenv("WHITENEDCSE_CACHE", str(tmp_path / "cache"))
    name = f"{request.node.name.replace('[', '-').replace(']', '').replace('_', '-')[:50]}".lower()
    if request.param == "s3":
        monkeypatch.setenv("AWS_ENDPOINT_URL", request.getfixturevalue("server"))
        for key in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(key, "none")
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        fsspec.filesystem("s3").mkdir(name)
        return f"s3://{name}"
    return f"memory://{name}"


@pytest.fixture
def source(bert, tmp_path):
    embedder_of(bert, kind="mean").eval().save(tmp_path / "encoder")
    return str(tmp_path / "encoder")


def put(url, text):
    with fsspec.open(url, "w", encoding="utf-8") as file:
        file.write(text)


def run(*words):
    """Exit code 0, or the line of the error."""
    return cli.main([*map(str, words)])


def vectors(folder):
    return np.concatenate(list(arrays(folder)))


def test_a_corpus_there_is_encoded_to_shards_there_which_another_machine_resumes(
    url, source, tmp_path, monkeypatch, capsys
):
    put(f"{url}/corpus.txt", "".join(f"{text}\n" for text in TEXTS))
    words = ["encode", source, f"{url}/corpus.txt"]
    assert run(*words, tmp_path / "here", "--shard", 7) == 0
    move, moves = shards.move, []

    def cut(out, names, store):
        moves.extend(names)
        if len(moves) > 2:
            raise KeyboardInterrupt
        move(out, names, store)

    monkeypatch.setattr(shards, "move", cut)
    assert run(*words, f"{url}/out", "--shard", 7) == 130
    done = {"manifest.json", "digests.json", "starts.json", "shard-00000.npy", "shard-00001.npy"}
    assert set(remote.held(f"{url}/out")) == done
    (left,) = (tmp_path / "cache").rglob("shard-*.npy")  # the others were moved
    assert left.name == "shard-00002.npy"
    put(f"{url}/out/shard-00003.npy", "of a kill before its digest was there")
    with pytest.raises(ValueError, match="lacks 1 of 4 files"):
        vectors(f"{url}/out")
    assert left.exists()

    monkeypatch.setattr(shards, "move", move)
    monkeypatch.setenv("WHITENEDCSE_CACHE", str(tmp_path / "other machine"))
    capsys.readouterr()
    assert run(*words, f"{url}/out", "--shard", 7) == 0
    assert capsys.readouterr().out == f"24 rows of width 16: {url}/out; 14 were encoded before\n"
    assert not [
        *(tmp_path / "other machine").rglob("shard-*"),
        *(tmp_path / "other machine").rglob("manifest.json"),
    ]
    assert run(*words, f"{url}/out", "--shard", 7) == 0
    assert capsys.readouterr().out == f"24 rows of width 16: {url}/out; 24 were encoded before\n"
    np.testing.assert_array_equal(vectors(f"{url}/out"), vectors(tmp_path / "here"))
    assert run(*words, f"{url}/out", "--shard", 8) == 2
    assert f"error: {url}/out" in capsys.readouterr().err
    assert run(*words, url, "--shard", 7) == 2
    assert f"error: {url} holds something other than vectors, 'corpus.txt'" in capsys.readouterr().err


def test_a_shard_that_was_not_moved_before_a_kill_is_moved_then(url, source, tmp_path, monkeypatch, capsys):
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("".join(f"{text}\n" for text in TEXTS))
    move = shards.move

    def killed(out, names, store):
        if names:
            raise KeyboardInterrupt
        move(out, names, store)

    monkeypatch.setattr(shards, "move", killed)
    words = ["encode", source, corpus, f"{url}/out", "--shard", 7]
    assert run(*words) == 130
    monkeypatch.setattr(shards, "move", move)
    capsys.readouterr()
    assert run(*words) == 0
    assert capsys.readouterr().out.endswith("7 were encoded before\n")
    assert len(vectors(f"{url}/out")) == 24


def test_an_index_there_is_searched_and_not_replaced(url, source, tmp_path, capsys):
    put(f"{url}/corpus.txt", "\n".join(TEXTS))
    assert run("whiten", "fit", source, f"{url}/corpus.txt", f"{url}/fit.safetensors") == 0
    assert (
        run("encode", source, f"{url}/corpus.txt", f"{url}/vectors", "--whiten", f"{url}/fit.safetensors")
        == 0
    )
    build = ["search", "build", source, f"{url}/corpus.txt", "--whiten", f"{url}/fit.safetensors"]
    assert run(*build, tmp_path / "here") == 0
    assert run(*build, f"{url}/index") == 0
    assert run(*build, f"{url}/again", "--vectors", f"{url}/vectors") == 0
    capsys.readouterr()
    said = []
    for index in (tmp_path / "here", f"{url}/index", f"{url}/again"):
        assert run("search", "query", index, TEXTS[4], "--to", "csv") == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] == said[2] and TEXTS[4] in said[0]
    assert run("search", "verify", f"{url}/index") == 0
    assert capsys.readouterr().out.startswith("24 texts")
    assert run(*build, f"{url}/index") == 2
    assert capsys.readouterr().err.startswith(f"error: {url}/index exists; choose another name (")
    assert run("search", "add", f"{url}/index", f"{url}/corpus.txt") == 2
    assert "an index in a store is not added to" in capsys.readouterr().err


def test_an_export_there_is_an_encoder_and_is_replaced_by_another(url, source, tmp_path, capsys):
    export = ["export", source, f"{url}/export", "--to"]
    assert run(*export, "sentence-transformers") == 0
    wanted = Embedder.load(source).encode(TEXTS)
    np.testing.assert_allclose(Embedder.load(f"{url}/export").encode(TEXTS), wanted, atol=1e-6)
    before = set(remote.held(f"{url}/export"))
    assert run(*export, "transformers") == 0
    after = set(remote.held(f"{url}/export"))
    assert "modules.json" in before and "modules.json" not in after
    assert run("export", source, tmp_path / "here", "--to", "transformers") == 0
    here = {
        path.relative_to(tmp_path / "here").as_posix()
        for path in (tmp_path / "here").rglob("*")
        if path.is_file()
    }
    assert after == here and before - here - set(remote.MARKS)
    assert run("export", f"{url}/export", tmp_path / "again", "--to", "transformers") == 0
    put(f"{url}/other/mine.txt", "mine")
    assert run("export", source, f"{url}/other", "--to", "transformers") == 2
    assert capsys.readouterr().err.startswith(f"error: {url}/other exists; choose another name (")


def test_python_writes_and_reads_there(url, source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    embedder = Embedder.load(source)
    x = embedder.encode(TEXTS)
    for _ in range(2):  # the second replaces the first
        embedder.save(f"{url}/saved")
        export(embedder, f"{url}/export", "transformers")
        Postprocess("zca").fit(x).save(f"{url}/fit.safetensors")
    for place in ("saved", "export"):
        np.testing.assert_allclose(Embedder.load(f"{url}/{place}").encode(TEXTS), x, atol=1e-6)
    np.testing.assert_allclose(
        Postprocess.load(f"{url}/fit.safetensors").transform(x), Postprocess("zca").fit(x).transform(x)
    )
    with pytest.raises(FileExistsError, match=f"^{url}/saved exists; choose another name$"):
        export(embedder, f"{url}/saved", "transformers")
    index = Index.build(embedder, TEXTS[:4])
    index.save(f"{url}/index")
    index.save(f"{url}/index/")  # nothing is new
    loaded = Index.load(f"{url}/index")
    assert loaded.query(TEXTS[:1], 1) == index.query(TEXTS[:1], 1)
    for held in (index, loaded):
        with pytest.raises(ValueError, match=f"^{url}/index: an index in a store is not added to"):
            held.add(["one more"]).save(f"{url}/index")
    with pytest.raises(FileExistsError, match=f"^{url}/index exists"):
        Index.build(embedder, TEXTS[:4]).save(f"{url}/index")
    assert {path.name for path in tmp_path.iterdir()} == {"cache", "encoder"}
    assert not [file for file in tmp_path.rglob(".*.out/**/*") if file.is_file() and file.suffix != ".writer"]


def test_vectors_there_are_read_by_their_url(url, source, tmp_path):
    (tmp_path / "corpus.txt").write_text("\n".join(TEXTS))
    assert run("encode", source, tmp_path / "corpus.txt", f"{url}/vectors") == 0
    np.testing.assert_allclose(
        np.concatenate([*arrays(f"{url}/vectors")]), Embedder.load(source).encode(TEXTS), atol=1e-6
    )


def test_what_could_not_be_copied_stays_here(url, source, tmp_path, monkeypatch, capsys):
    def full(*_, **__):
        raise TimeoutError("no answer")

    with monkeypatch.context() as patch:
        patch.setattr(remote.Store, "replace", full)
        assert run("export", source, f"{url}/export", "--to", "transformers") == 2
    said = capsys.readouterr().err
    (kept,) = (path for path in (tmp_path / "cache").rglob("export") if path.is_dir())
    assert said.startswith("error: no answer; ") and f" is in {kept}, until the next attempt" in said
    Embedder.load(kept)
    assert run("export", source, f"{url}/export", "--to", "transformers") == 0
    assert not kept.exists()


@pytest.mark.slow
@pytest.mark.parametrize("words", [["export", "--to", "transformers"], ["encode", "--shard", "7"]])
def test_a_bucket_that_is_not_there_is_not_made(server, source, tmp_path, monkeypatch, capsys, words):
    monkeypatch.setenv("WHITENEDCSE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("AWS_ENDPOINT_URL", server)
    for key in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(key, "none")
    (tmp_path / "corpus.txt").write_text("\n".join(TEXTS))
    corpus = [tmp_path / "corpus.txt"] if words[0] == "encode" else []
    assert run(words[0], source, *corpus, "s3://mispelt/out", *words[1:]) == 2
    assert capsys.readouterr().err.startswith("error: s3://mispelt/out: there is no bucket 'mispelt'; ")
    assert not fsspec.filesystem("s3").exists("mispelt")


def test_rights_to_a_part_of_a_bucket_suffice(monkeypatch):
    class Guarded:
        def info(self, path):
            raise PermissionError(path)

    monkeypatch.setattr(files, "_found", lambda path: (Guarded(), path.removeprefix("s3://")))
    remote.refuse_bucket("s3://bucket/mine")


def test_a_directory_that_is_half_replaced_is_not_read(url, source, monkeypatch):
    assert run("export", source, f"{url}/export", "--to", "transformers") == 0
    put_all, written = remote.Store.put, []

    def cut(self, names):
        for name in names:
            if len(written) == 2:
                raise KeyboardInterrupt
            written.append(name)
            put_all(self, [name])

    monkeypatch.setattr(remote.Store, "put", cut)
    assert run("export", source, f"{url}/export", "--to", "transformers") == 130
    assert not {name.rpartition("/")[2] for name in remote.held(f"{url}/export")} & set(remote.MARKS)
    with pytest.raises((ValueError, OSError)):
        Embedder.load(f"{url}/export")


def test_a_copy_is_used_until_the_store_has_another_version(url, monkeypatch):
    put(f"{url}/a/x.txt", "one")
    put(f"{url}/a/deep/y.txt", "two")
    first = remote.fetched(f"{url}/a/")
    assert (first / "x.txt").read_text() == "one" and (first / "deep" / "y.txt").read_text() == "two"
    monkeypatch.setattr(remote, "download", None)
    assert remote.fetched(f"{url}/a") == first
    monkeypatch.undo()
    monkeypatch.setenv("WHITENEDCSE_CACHE", str(first.parents[3]))
    put(f"{url}/a/x.txt", "six")
    second = remote.fetched(f"{url}/a")
    assert (second / "x.txt").read_text() == "six" and not first.exists()
    assert remote.fetched(f"{url}/a/x.txt").read_text() == "six"


def test_what_a_store_without_versions_holds_is_copied_each_time(url, monkeypatch):
    monkeypatch.setattr(remote, "VERSION", ())
    put(f"{url}/a/x.txt", "one")
    assert (remote.fetched(f"{url}/a") / "x.txt").read_text() == "one"
    put(f"{url}/a/x.txt", "six")
    assert (remote.fetched(f"{url}/a") / "x.txt").read_text() == "six"


def test_no_name_of_a_file_leads_out_of_the_copy(url, tmp_path):
    put(f"{url}/a/x.txt", "one")
    (file,) = remote.held(f"{url}/a").values()
    with pytest.raises(ValueError, match="'deep/../../x.txt' would be copied to another folder"):
        remote.download(f"{url}/a", {"deep/../../x.txt": file}, tmp_path / "b" / "c" / "a")


def test_a_copy_that_changes_meanwhile_is_refused(url, monkeypatch):
    put(f"{url}/a/x.txt", "one")
    listings = iter([remote.held(f"{url}/a"), {}])
    monkeypatch.setattr(remote, "held", lambda _: next(listings))
    with pytest.raises(ValueError, match="changed while it was copied"):
        remote.fetched(f"{url}/a")
    monkeypatch.undo()


@pytest.mark.parametrize("words", [("search", "query", "{}", "x"), ("encode", "{}", "x.txt", "out")])
def test_what_is_not_there_is_one_line(url, tmp_path, monkeypatch, capsys, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.txt").write_text("x\n")
    assert run(*(word.format(f"{url}/none") for word in words)) == 2
    line = f"error: {url}/none: no such file or directory, or it cannot be reached ("
    assert capsys.readouterr().err.startswith(line)


def test_the_url_of_a_model_is_no_function():
    assert not arguments.is_function("s3://bucket/model") and arguments.is_function("module:function")


def test_a_store_whose_package_is_missing_is_one_line(source, capsys):
    assert run("export", source, "dropbox://folder/x", "--to", "transformers") == 2
    assert "pip install dropbox" in capsys.readouterr().err

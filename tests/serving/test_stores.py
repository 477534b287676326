"""Vectors, indices, exports and fits in an object store, here a local server that speaks S3."""

import fsspec
import numpy as np
import pytest
from encoders import SENTENCES
from serving.test_encode import vectors

from whitenedcse.app import cli, evaluate
from whitenedcse.data import remote
from whitenedcse.evaluation.postprocess import Postprocess
from whitenedcse.model.embedder import Embedder
from whitenedcse.serving import encode
from whitenedcse.serving.export import export
from whitenedcse.serving.search import Index

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


def put(url, text):
    with fsspec.open(url, "w", encoding="utf-8") as file:
        file.write(text)


def run(*words):
    """Exit code 0, or the line of the error."""
    return cli.main([*map(str, words)])


def test_a_corpus_there_is_encoded_to_files_there_and_a_killed_job_resumes(
    url, source, tmp_path, monkeypatch, capsys
):
    put(f"{url}/corpus.txt", "".join(f"{text}\n" for text in TEXTS))
    words = ["encode", source, f"{url}/corpus.txt"]
    assert run(*words, tmp_path / "here", "--shard", 7) == 0
    put_, names = encode.put, []

    def killed(out, name, content):
        names.append(name)
        if len(names) == 4:  # the second file, whose digest is not there
            raise KeyboardInterrupt
        put_(out, name, content)

    with monkeypatch.context() as patch:
        patch.setattr(encode, "put", killed)
        assert run(*words, f"{url}/out", "--shard", 7) == 130
    assert "interrupted: 7 of 24 rows of width 16 so far, and the same command" in capsys.readouterr().err
    with pytest.raises(ValueError, match="lacks 3 of 4 files"):
        vectors(f"{url}/out")
    assert run(*words, f"{url}/out", "--shard", 7) == 0
    assert capsys.readouterr().out == f"24 rows of width 16: {url}/out\n"
    np.testing.assert_array_equal(vectors(f"{url}/out"), vectors(tmp_path / "here"))
    assert run(*words, url, "--shard", 7) == 2
    assert f"error: {url} holds something other than vectors, 'corpus.txt'" in capsys.readouterr().err
    put(f"{url}/out/shard-00001.npy", "another content")
    with pytest.raises(ValueError, match=r"shard-00001.npy is damaged"):
        vectors(f"{url}/out")


def test_fits_indices_and_exports_there_are_as_here(url, source, tmp_path, capsys):
    put(f"{url}/corpus.txt", "\n".join(TEXTS))
    embedder, fit = Embedder.load(source), f"{url}/fit.safetensors"
    wanted = embedder.encode(TEXTS)
    assert run("whiten", "fit", source, f"{url}/corpus.txt", fit) == 0
    np.testing.assert_allclose(Postprocess.load(fit).mean, wanted.mean(0), atol=1e-6)
    assert run("encode", source, f"{url}/corpus.txt", f"{url}/vectors", "--whiten", fit, "--dim", "9") == 0
    build = ["search", "build", source, f"{url}/corpus.txt", "--whiten", fit, "--dim", "9"]
    assert run(*build, tmp_path / "here") == 0
    assert run(*build, f"{url}/index") == 0
    assert run(*build, f"{url}/again", "--vectors", f"{url}/vectors/") == 0
    capsys.readouterr()
    said = []
    for index in (tmp_path / "here", f"{url}/index", f"{url}/again"):
        assert run("search", "query", index, TEXTS[4], "--to", "csv") == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] == said[2] and TEXTS[4] in said[0]
    assert run(*build, f"{url}/index") == 2
    assert f"{url}/index exists; choose another name" in capsys.readouterr().err
    Index.build(embedder, TEXTS[:4]).save(f"{url}/saved")
    assert Index.load(f"{url}/saved").query(TEXTS[:1], 1)[0][0].id == "0"
    for to in ("sentence-transformers", "transformers"):  # the second replaces the first
        assert run("export", source, f"{url}/export", "--to", to) == 0
        np.testing.assert_allclose(Embedder.load(f"{url}/export").encode(TEXTS), wanted, atol=1e-6)
        assert ("modules.json" in remote.held(f"{url}/export")) == (to == "sentence-transformers")
    put(f"{url}/other/mine.txt", "mine")
    with pytest.raises(FileExistsError, match=f"^{url}/other exists; choose another name"):
        export(embedder, f"{url}/other", "transformers")


def test_what_could_not_be_copied_stays_here(url, source, tmp_path, monkeypatch, capsys):
    def full(*_, **__):
        raise TimeoutError("no answer")

    with monkeypatch.context() as patch:
        patch.setattr(remote, "upload", full)
        assert run("export", source, f"{url}/export", "--to", "transformers") == 2
    said = capsys.readouterr().err
    (kept,) = (path for path in (tmp_path / "cache").rglob("export") if path.is_dir())
    assert said.startswith("error: no answer; ") and f" is in {kept}, until the next attempt" in said
    Embedder.load(kept)
    assert run("export", source, f"{url}/export", "--to", "transformers") == 0
    assert not kept.exists()


def test_a_directory_that_is_half_replaced_is_not_read(url, source, monkeypatch):
    assert run("export", source, f"{url}/export", "--to", "transformers") == 0
    (store, _), written = fsspec.core.url_to_fs(url), []
    put_one = store.put_file

    def cut(file, target):
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(target)
        put_one(file, target)

    monkeypatch.setattr(store, "put_file", cut)
    assert run("export", source, f"{url}/export", "--to", "transformers") == 130
    assert not {name.rpartition("/")[2] for name in remote.held(f"{url}/export")} & set(remote.MARKS)
    with pytest.raises((ValueError, OSError)):
        Embedder.load(f"{url}/export")


def test_a_copy_is_used_until_the_store_has_another_version(url, tmp_path, monkeypatch):
    put(f"{url}/a/x.txt", "one")
    put(f"{url}/a/deep/y.txt", "two")
    file, *_ = remote.held(f"{url}/a").values()  # no name of one leads out of the copy
    with pytest.raises(ValueError, match="'deep/../../x.txt' would be copied to another folder"):
        remote.download(f"{url}/a", {"deep/../../x.txt": file}, tmp_path / "b" / "c" / "a")
    first = remote.fetched(f"{url}/a/")
    assert (first / "x.txt").read_text() == "one" and (first / "deep" / "y.txt").read_text() == "two"
    monkeypatch.setattr(remote, "download", None)
    assert remote.fetched(f"{url}/a") == first
    monkeypatch.undo()
    monkeypatch.setenv("WHITENEDCSE_CACHE", str(first.parents[4]))
    put(f"{url}/a/x.txt", "six")
    second = remote.fetched(f"{url}/a")
    assert (second / "x.txt").read_text() == "six" and not first.exists()
    assert remote.fetched(f"{url}/a/x.txt").read_text() == "six"
    monkeypatch.setattr(remote, "VERSION", ())  # a store without versions is copied each time
    for content in ("one", "six"):
        put(f"{url}/a/x.txt", content)
        assert (remote.fetched(f"{url}/a") / "x.txt").read_text() == content


@pytest.mark.parametrize("words", [("search", "query", "{}", "x"), ("encode", "{}", "x.txt", "out")])
def test_what_is_not_there_is_one_line(url, tmp_path, monkeypatch, capsys, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.txt").write_text("x\n")
    assert run(*(word.format(f"{url}/none") for word in words)) == 2
    line = f"error: {url}/none: no such file or directory, or it cannot be reached ("
    assert capsys.readouterr().err.startswith(line)
    assert not evaluate.is_function("s3://bucket/model") and evaluate.is_function("module:function")
    assert run("encode", "dropbox://folder/x", "x.txt", "out") == 2
    assert 'and ""dropbox" to be installed' in capsys.readouterr().err

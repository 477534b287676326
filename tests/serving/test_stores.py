"""Vectors, indices, exports and fits in an object store, here a local server that speaks S3."""

import fsspec
import numpy as np
import pytest
from encoders import SENTENCES, embedder_of

from whitenedcse.app import cli
from whitenedcse.data import remote
from whitenedcse.evaluation.postprocess import Postprocess
from whitenedcse.model.embedder import Embedder
from whitenedcse.serving import encode
from whitenedcse.serving.encode import arrays
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
    assert "interrupted: 7 of 24 rows of width 16, and the same command" in capsys.readouterr().err
    with pytest.raises(ValueError, match="lacks 3 of 4 files"):
        vectors(f"{url}/out")
    assert run(*words, f"{url}/out", "--shard", 7) == 0
    assert capsys.readouterr().out == f"24 rows of width 16: {url}/out\n"
    np.testing.assert_array_equal(vectors(f"{url}/out"), vectors(tmp_path / "here"))
    assert run(*words, f"{url}/out", "--shard", 8) == 2
    assert f"error: {url}/out holds another job" in capsys.readouterr().err
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
    assert run("encode", source, f"{url}/corpus.txt", f"{url}/vectors") == 0
    build = ["search", "build", source, f"{url}/corpus.txt", "--whiten", fit, "--dim", "9"]
    assert run(*build, tmp_path / "here") == 0
    assert run(*build, f"{url}/index") == 0
    assert run(*build, f"{url}/again", "--vectors", f"{url}/vectors") == 0
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

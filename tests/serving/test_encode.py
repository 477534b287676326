"""A corpus as files of vectors: row i is row i, by any number of processes, after any number of kills."""

import json
import sys
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from encoders import SENTENCES
from numpy.testing import assert_allclose
from programs import started, started_anew
from torch import multiprocessing

from whitenedcse import distributed
from whitenedcse.app import cli
from whitenedcse.data.corpus import Corpus
from whitenedcse.model.embedder import Embedder
from whitenedcse.serving import encode
from whitenedcse.serving.encode import Job, arrays, encoded, share, state

TEXTS = [f"{a} {b}" for a in SENTENCES for b in SENTENCES[:3]]
TEXTS[4] = ""  # a blank row, which keeps its number
SHARD = 7


@pytest.fixture
def corpus(tmp_path):
    (tmp_path / "corpus.txt").write_text("\n".join(TEXTS) + "\n")
    return Corpus(str(tmp_path / "corpus.txt"))


@pytest.fixture
def job(source, corpus, tmp_path):
    """A job that other processes can be sent."""
    return Job(partial(Embedder.load, source), source, corpus, str(tmp_path / "out"), shard=SHARD)


def vectors(out):
    return np.concatenate(list(arrays(out)))


def files(out):
    return {path.name: path.read_bytes() for path in Path(out).glob("shard-*")}


def test_row_i_is_row_i_in_every_form(job, embedder):
    wanted = embedder.encode(TEXTS)
    for to, dtype in product(("npy", "parquet"), ("float32", "float16")):
        one = replace(job, out=f"{job.out}-{to}-{dtype}", to=to, dtype=dtype)
        encoded(one)
        assert [len(x) for x in arrays(one.out)] == [7, 7, 7, 3]
        assert vectors(one.out).dtype == dtype
        assert_allclose(vectors(one.out), wanted, atol=1e-6 if dtype == "float32" else 2e-3)
        if to == "parquet":
            import pyarrow.parquet as pq

            assert pq.read_table(f"{one.out}/shard-00002.parquet")["row"].to_pylist() == [*range(14, 21)]
    assert state(one.out) == "24 rows of width 16" and state(f"{one.out}-none") == "nothing is encoded yet"


@pytest.mark.parametrize("worlds", [(5,), (2, 3, 3)])
def test_any_number_of_processes_write_the_same_bytes_and_resume(job, worlds, tmp_path, monkeypatch):
    """Each process writes one file and is killed, but for the last turn."""
    alone = replace(job, out=str(tmp_path / "alone"))
    encoded(alone)
    put, opened = encode.put, Embedder.load(job.source)
    job = replace(job, opened=lambda: opened)

    def killed(out, name, content):
        if name.startswith("digests"):
            raise KeyboardInterrupt  # after the file, and before its digest: it is encoded again
        put(out, name, content)

    for turn, world in enumerate(worlds, 1):
        for rank in range(world):
            monkeypatch.setattr(encode, "put", put if turn == len(worlds) or rank else killed)
            try:
                share(job, rank, world)
            except KeyboardInterrupt:
                with pytest.raises(ValueError, match=r"lacks \d of 4 files; repeat its whitenedcse encode"):
                    vectors(job.out)
    assert files(job.out) == files(alone.out)
    np.testing.assert_array_equal(vectors(job.out), vectors(alone.out))


def test_another_job_or_something_else_is_refused(job, corpus, embedder, tmp_path):
    encoded(job)
    other = Embedder.load(job.source)
    with torch.no_grad():
        next(other.encoder.parameters())[5] += 0.01
    lines = {
        "bf16": {"bf16": True},
        "shard": {"shard": 8},
        "dtype": {"dtype": "float16"},
        "embedder": {"opened": lambda: other},
    }
    for line, settings in lines.items():
        with pytest.raises(ValueError, match=f"holds another job, of another {line}"):
            encoded(replace(job, **settings))
    with open(corpus.path, "a") as file:
        file.write("one more\n")
    with pytest.raises(ValueError, match="holds another job, of another fingerprint"):
        encoded(job)
    with pytest.raises(ValueError, match="holds something other than vectors, 'best'"):
        encoded(replace(job, out=str(tmp_path)))
    with pytest.raises(ValueError, match=r"no manifest.json; whitenedcse encode writes"):
        vectors(tmp_path / "none")
    with pytest.raises(ValueError, match="is in .*, whose files are the texts: name one beside it"):
        encoded(replace(job, corpus=Corpus(str(tmp_path)), out=str(tmp_path / "in" / "it")))
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(ValueError, match="no rows to encode"):
        encoded(replace(job, corpus=Corpus(str(tmp_path / "empty.txt")), out=str(tmp_path / "x")))


def test_a_damaged_file_is_named_and_encoded_again_when_it_is_deleted(job, monkeypatch):
    encoded(job)
    whole = vectors(job.out)
    for path in Path(job.out).iterdir():
        before = path.read_bytes()
        path.write_bytes(before[:-3] + bytes([before[-3] ^ 1]) + before[-2:])
        with pytest.raises(ValueError, match=r"(shard-0000\d.npy|manifest|digests-\w+).* is damaged|lacks"):
            vectors(job.out)
        path.write_bytes(before)
    (Path(job.out) / "shard-00002.npy").unlink()
    assert state(job.out) == "17 of 24 rows of width 16 so far"
    texts, encode_ = [], Embedder.encode
    spy = lambda self, some, **more: texts.extend(some) or encode_(self, some, **more)  # noqa: E731
    monkeypatch.setattr(Embedder, "encode", spy)
    encoded(job)
    assert texts == TEXTS[14:21]  # and no more
    np.testing.assert_array_equal(vectors(job.out), whole)


def test_vectors_that_are_not_finite_are_refused(job, embedder):
    with torch.no_grad():
        embedder.encoder.backbone.embeddings.word_embeddings.weight[:] = torch.nan
    with pytest.raises(ValueError, match=r"NaN or infinity in the vector of row 0 of .*corpus.txt in floa"):
        encoded(replace(job, opened=lambda: embedder))


def test_a_process_takes_the_gpu_of_its_place_on_the_machine(job, monkeypatch):
    """As srun deals ranks out in turn: the global rank would put two on one GPU and leave one idle."""
    taken = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(encode, "agreed", lambda *_: sys.exit())
    for launched in (
        {"SLURM_NTASKS": "8", "SLURM_NNODES": "2", "SLURM_PROCID": "6", "SLURM_LOCALID": "3"},
        {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "1"},
    ):
        with monkeypatch.context() as patch:
            for name, value in launched.items():
                patch.setenv(name, value)
            place = distributed.placed()
            with pytest.raises(SystemExit):
                encoded(job)
        assert taken.pop() == place.local


def test_the_command_says_what_is_there(job, source, corpus, tmp_path, capsys):
    words = ["encode", source, corpus.path, out := str(tmp_path / "x"), "--shard", "9"]
    assert cli.main(words) == 0 and capsys.readouterr().out == f"24 rows of width 16: {out}\n"
    (tmp_path / "table.csv").write_text("a,b\nthe cat,x\n")
    assert cli.main(["encode", source, str(tmp_path / "table.csv"), "y", "--columns", "a", "b"]) == 2
    assert "one column is encoded, not a, b" in capsys.readouterr().err


@pytest.mark.slow
def test_however_processes_are_started_the_bytes_are_the_same(job, source, corpus, tmp_path):
    """By the command itself, by torchrun, by srun, and by Ray where it is installed."""
    encoded(job)
    words, few = ["encode", source, corpus.path], ["--shard", str(SHARD)]
    torchrun = ["torchrun", "--standalone", "--nproc-per-node", "3", "-m", "whitenedcse.app.cli"]
    slurm = [{"SLURM_NTASKS": "3", "SLURM_PROCID": str(i), "SLURM_LOCALID": str(i)} for i in (2, 0, 1)]
    ways = {  # programs, and the environment of each start: ranks exchange nothing, and may come in turn
        "processes": (["whitenedcse", *words, "processes", *few, "--processes", "2"], [{}]),
        "torchrun": ([*torchrun, *words, "torchrun", *few], [{}]),
        "srun": (["whitenedcse", *words, "srun", *few], slurm),
    }
    if find_spec("ray"):
        anew = [sys.executable, "-m", "whitenedcse.app.cli"]
        ways["ray"] = ([*anew, *words, "ray", *few, "--processes", "2", "--engine", "ray"], [{}])
    for out, (command, starts) in ways.items():
        for environment in starts:
            start = started_anew if out == "ray" else started
            done = start(*command, cwd=tmp_path, **environment)
            assert done.returncode == 0, done.stderr
        assert files(tmp_path / out) == files(job.out)
        assert json.loads((tmp_path / out / "manifest.json").read_text())["rows"] == len(TEXTS)


def test_a_process_that_fails_is_named(job, monkeypatch):
    """Of forks, which need not import anything."""
    fork = partial(multiprocessing.start_processes, start_method="fork")
    monkeypatch.setattr(sys.modules["torch.multiprocessing.spawn"], "spawn", fork)
    wrong = replace(job, opened=partial(Embedder.load, f"{job.source}/none"))
    with pytest.raises(OSError, match=r"process \d failed: .*none.*; the same command resumes"):
        encoded(wrong, 2)

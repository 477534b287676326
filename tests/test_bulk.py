"""A corpus to files of vectors: every row in its place, whatever is killed in between."""

import copy
import importlib
import json
import multiprocessing
import os
import pickle
import signal
import threading
import time
import tracemalloc
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from encoders import SENTENCES, WORDS, embedder_of, paced
from filelock import FileLock
from numpy.testing import assert_allclose
from programs import started
from tokenizers import normalizers
from torch.multiprocessing import ProcessRaisedException

from whitenedcse import files
from whitenedcse.app import cli
from whitenedcse.data.corpus import Corpus
from whitenedcse.evaluation.postprocess import Postprocess
from whitenedcse.model import checkpoint
from whitenedcse.model.embedder import Embedder
from whitenedcse.model.head import Final, ProjectionHead
from whitenedcse.model.planes import digest_of
from whitenedcse.model.whitener import WhiteningSettings
from whitenedcse.serving import bulk as bulk_module
from whitenedcse.serving import shards, shares
from whitenedcse.serving.bulk import Filling, Job, arrays, encoded
from whitenedcse.serving.exports import whitened
from whitenedcse.serving.layouts import Form
from whitenedcse.serving.shards import Sealed

TEXTS = [f"{a} {b}" for a in SENTENCES for b in SENTENCES[:3]]
TEXTS[5:5] = ["", "  ", TEXTS[1], "the", " ".join(SENTENCES * 4)]  # blank, equal, short, beyond the limit
FORM = Form(shard=7)


@pytest.fixture
def embedder(bert):
    return embedder_of(bert, kind="mean").eval()


def corpus_of(texts, folder, name="corpus.txt"):
    path = folder / name
    path.write_text("".join(f"{text}\n" for text in texts))
    return Corpus(str(path))


@pytest.fixture
def corpus(tmp_path):
    return corpus_of(TEXTS, tmp_path)


def job_of(embedder, corpus, out, **changes):
    return Job(**({"opened": lambda: embedder, "source": "mine", "corpus": corpus, "out": out} | changes))


def many(count):
    """So many different sentences of five words."""
    n = len(WORDS)
    return [" ".join(WORDS[i // n**p % n] for p in range(3)) + f" {i % 7} cat" for i in range(count)]


def contents(out):
    return {path.name: path.read_bytes() for path in out.iterdir()}


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("to", ["npy", "parquet"])
def test_row_i_of_the_files_is_row_i_of_the_input(embedder, corpus, tmp_path, to, dtype):
    out = tmp_path / "out"
    assert encoded(job_of(embedder, corpus, out, form=Form(to, dtype, 7))) == len(TEXTS) == 29
    got = list(arrays(out))
    assert [len(x) for x in got] == [7, 7, 7, 7, 1] and {x.dtype.name for x in got} == {dtype}
    one_by_one = np.concatenate([embedder.encode([text]) for text in TEXTS])
    assert_allclose(np.concatenate(got), one_by_one, atol=2e-3 if dtype == "float16" else 1e-5)
    names = [f"shard-0000{i}.{to}" for i in range(5)]
    assert sorted(contents(out)) == [".lock", "digests.json", "manifest.json", *names, "starts.json"]
    peer = [np.load(out / n) if to == "npy" else pq.read_table(out / n) for n in names]
    if to == "parquet":
        assert [row for table in peer for row in table["row"].to_pylist()] == list(range(29))
        peer = [np.array(table["vector"].to_pylist()) for table in peer]
    assert np.array_equal(np.concatenate(peer), np.concatenate(got))


def test_a_corpus_at_a_url_gives_the_vectors_of_the_local_one(embedder, corpus, tmp_path, remote):
    url = remote("far/corpus.txt", Path(corpus.path).read_bytes())
    for name, path in {"near": corpus.path, "far": url}.items():
        assert encoded(job_of(embedder, Corpus(path), tmp_path / name, form=FORM)) == len(TEXTS)
    near, far = (np.concatenate(list(arrays(tmp_path / name))) for name in ("near", "far"))
    assert np.array_equal(near, far)
    remote("far/corpus.txt", b"another text\n")
    with pytest.raises(ValueError, match="the input is another, or has changed"):
        encoded(job_of(embedder, Corpus(url), tmp_path / "far", form=FORM))


def test_the_command_encodes_a_column_whitened_to_k_components(embedder, tmp_path, capsys):
    checkpoint.save(embedder, tmp_path / "best")
    rows = "".join(json.dumps({"id": str(i), "text": text}) + "\n" for i, text in enumerate(TEXTS))
    (tmp_path / "corpus.jsonl").write_text(rows)
    plain = corpus_of(TEXTS, tmp_path)
    source, out = str(tmp_path / "best"), tmp_path / "out"
    fit = tmp_path / "fit.safetensors"
    assert cli.main(["whiten", "fit", source, plain.path, str(fit)]) == 0
    command = [
        "encode",
        source,
        str(tmp_path / "corpus.jsonl"),
        str(out),
        "--columns",
        "text",
        "--shard",
        "9",
    ]
    command += ["--whiten", str(fit), "--dim", "5"]
    capsys.readouterr()
    assert cli.main(command) == 0
    assert capsys.readouterr().out == f"29 rows of width 5: {out}\n"
    wanted = whitened(embedder, Postprocess.load(fit), 5).encode(TEXTS)
    assert_allclose(np.concatenate(list(arrays(out))), wanted, atol=1e-4)
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["embedding"]["final"]["provenance"]["k"] == 5 and manifest["source"] == source
    assert (manifest["rows"], manifest["width"], manifest["shard"]) == (29, 5, 9)
    before = {path: path.stat().st_mtime_ns for path in out.iterdir() if path.name != ".lock"}
    assert cli.main(command) == 0
    assert capsys.readouterr().out == f"29 rows of width 5: {out}; 29 were encoded before\n"
    assert before == {path: path.stat().st_mtime_ns for path in before}
    assert cli.main(["encode", source, plain.path, str(tmp_path / "x"), "--dim", "5"]) == 2
    assert "--dim 5" in capsys.readouterr().err and not (tmp_path / "x").exists()


def test_only_what_is_missing_is_encoded_and_the_progress_says_so(embedder, corpus, tmp_path, monkeypatch):
    out, seen = tmp_path / "out", []
    assert encoded(job_of(embedder, corpus, out, form=FORM)) == 29
    whole = contents(out)
    for number in (0, 4):
        (out / f"shard-0000{number}.npy").unlink()
    (out / "shard-00000.npy.new").write_bytes(b"half")  # what a kill leaves
    with pytest.raises(ValueError, match="lacks 2 of 5 files; repeat its whitenedcse encode, which resumes"):
        list(arrays(out))

    told = paced(bulk_module, monkeypatch)
    plain = Embedder.encode
    monkeypatch.setattr(
        Embedder, "encode", lambda self, texts, **how: (seen.extend(texts), plain(self, texts, **how))[1]
    )
    assert encoded(job_of(embedder, corpus, out, form=FORM)) == 8
    assert seen == [*TEXTS[:7], TEXTS[28]]  # two of them blank: one vector, two rows
    assert told[0] == ("encoded", 29, 21) and sum(told[1:]) == 8
    assert contents(out) == whole


def test_a_job_resumes_with_the_threads_it_began_with(embedder, corpus, tmp_path, monkeypatch):
    out, asked = tmp_path / "out", []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 6)
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    encoded(job_of(embedder, corpus, out, form=FORM))
    (out / "shard-00001.npy").unlink()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    encoded(job_of(embedder, corpus, out, form=FORM))
    assert asked == [6, 6, 6, 4]


KILLED = """
import os, signal, sys, time
from functools import partial
from pathlib import Path
from whitenedcse.serving.bulk import Job, encoded
from whitenedcse.serving.bulk import Form
from whitenedcse.data.corpus import Corpus
from whitenedcse.model.embedder import Embedder

source, corpus, out = sys.argv[1:]
done = lambda: len(list(Path(out).glob("shard-*.npy")))
job = Job(partial(Embedder.load, source), source, Corpus(corpus), Path(out), Form(shard=100))
for processes, files in ((1, 3), (2, 9)):
    if not (child := os.fork()):
        encoded(job, processes)
        os._exit(0)
    while done() < files:
        time.sleep(0.001)
    workers = Path(f"/proc/{child}/task/{child}/children").read_text()
    os.kill(child, signal.SIGKILL)
    print("killed", os.waitpid(child, 0)[1], done(), workers)
"""


@pytest.mark.slow
def test_killed_twice_and_gone_on_with_the_bytes_are_those_of_an_uninterrupted_run(embedder, tmp_path):
    """First alone, then with two processes, none of which outlives the one that is killed."""
    source, out = str(tmp_path / "best"), tmp_path / "out"
    checkpoint.save(embedder, Path(source))
    corpus = corpus_of(many(3_000), tmp_path)
    done = started("-c", KILLED, source, corpus.path, out, cwd=tmp_path)  # with one thread, as here
    assert done.returncode == 0, done.stderr
    said = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("killed")]
    (a, first), (b, second, *workers) = (map(int, words) for words in said)
    assert a == b == signal.SIGKILL and 3 <= first < 30 > second >= 9 and len(workers) >= 2
    until = time.monotonic() + 60
    while any(map(alive, workers)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(map(alive, workers))
    job = job_of(
        None, corpus, out, opened=partial(Embedder.load, source), source=source, form=Form(shard=100)
    )
    assert 0 < encoded(job) < 3_000
    encoded(whole := replace(job, out=tmp_path / "whole"))
    assert contents(out) == contents(whole.out)


@pytest.mark.slow
def test_when_one_of_two_processes_dies_what_is_finished_stays(embedder, tmp_path):
    checkpoint.save(embedder, tmp_path / "best")
    corpus, out = corpus_of(many(3_000), tmp_path), tmp_path / "out"
    job = job_of(
        None, corpus, out, opened=partial(Embedder.load, str(tmp_path / "best")), form=Form(shard=100)
    )

    def kill_one():
        while len(list(out.glob("shard-*.npy"))) < 4:
            time.sleep(0.001)
        multiprocessing.active_children()[-1].kill()

    killer = threading.Thread(target=kill_one)
    killer.start()
    with pytest.raises(OSError, match="SIGKILL; files are kept, and the same command resumes") as error:
        encoded(job, 2)
    killer.join()
    assert "\n" not in str(error.value) and not multiprocessing.active_children()
    kept = {path: path.read_bytes() for path in out.glob("shard-*.npy")}
    assert 4 <= len(kept) < 30
    # the digest of a file that a process had just written when it was killed may be missing
    assert encoded(job) - (3_000 - 100 * len(kept)) in (0, 100)
    encoded(whole := replace(job, out=tmp_path / "whole"))
    assert contents(out) == contents(whole.out)


def alive(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().split(") ")[1][0] != "Z"
    except FileNotFoundError:
        return False


def test_an_error_in_a_process_is_one_line(embedder, corpus, tmp_path, monkeypatch):
    class Workers:
        processes = ()

        def join(self, timeout):
            raise ProcessRaisedException("-- Process 0:\nTraceback\n  line\nOSError: disk full\n", 0, 99)

    monkeypatch.setattr(bulk_module, "spawn", lambda *args, **how: Workers())
    monkeypatch.setattr(
        shares, "LATE", 0.1
    )  # seconds that it waits for the other, to tell that it has failed
    with pytest.raises(OSError, match="^rank 1 failed: OSError: disk full; files are kept"):
        encoded(job_of(embedder, corpus, tmp_path / "out", form=FORM), 2)


def test_no_file_is_there_before_all_of_it_is(embedder, corpus, tmp_path, monkeypatch):
    def half(stream, x, **how):
        stream.write(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(np, "save", half)
    with pytest.raises(OSError, match="no space left"):
        encoded(job_of(embedder, corpus, tmp_path / "out", form=FORM))
    assert set(contents(tmp_path / "out")) == {".lock", "digests.json", "manifest.json", "starts.json"}


@pytest.mark.slow
def test_memory_does_not_grow_with_the_corpus(embedder, tmp_path):
    importlib.import_module("rich._emoji_codes")  # half a megabyte, for the progress of a slow run
    peaks, sizes = [], []
    for count in (300, 300, 1_800):  # the first warms up
        corpus = corpus_of([f"{text} " * 80 for text in many(count)], tmp_path)
        sizes.append(Path(corpus.path).stat().st_size)
        tracemalloc.start()
        encoded(job_of(embedder, corpus, tmp_path / f"out{len(peaks)}", form=Form(shard=100)))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[2] - peaks[1] < 0.1 * (sizes[2] - sizes[1])


def test_going_on_otherwise_is_refused(embedder, corpus, bert, tmp_path):
    out = tmp_path / "out"
    encoded(job_of(embedder, corpus, out, form=FORM))
    other = embedder_of(bert, kind="cls").eval()
    for wrong, message in (
        (job_of(embedder, corpus, out, form=Form(shard=8)), "shard was 7 and is now 8"),
        (job_of(embedder, corpus, out, form=Form(dtype="float16", shard=7)), "dtype was 'float32'"),
        (job_of(embedder, corpus, out, form=Form(to="parquet", shard=7)), "to was 'npy'"),
        (job_of(embedder, corpus, out, form=FORM, bf16=True), "bf16 was False"),
        (job_of(other, corpus, out, form=FORM), "job: pooling.kind was 'mean' and is now 'cls'; repeat"),
    ):
        with pytest.raises(ValueError, match=message):
            encoded(wrong)
    with torch.no_grad():
        embedder.encoder.backbone.embeddings.word_embeddings.weight[7, 0] += 1e-3
    with pytest.raises(ValueError, match="the encoder, its pooling"):
        encoded(job_of(embedder, corpus, out, form=FORM))
    with torch.no_grad():
        embedder.encoder.backbone.embeddings.word_embeddings.weight[7, 0] -= 1e-3
    corpus_of([*TEXTS[:-1], "the cat"], tmp_path)
    with pytest.raises(ValueError, match="the input is another"):
        encoded(job_of(embedder, corpus, out, form=FORM))


def test_a_model_from_elsewhere_is_named_and_not_a_head_that_only_training_used(embedder, corpus, tmp_path):
    def job(model, source, **head):
        other = model.replaced(head=ProjectionHead(16, whitening=WhiteningSettings(**head), dense=False))
        return replace(job_of(other, corpus, tmp_path / "out", form=FORM), source=source)

    encoded(job(embedder, "outputs/a"))
    with torch.no_grad():
        embedder.encoder.backbone.embeddings.word_embeddings.weight[7, 0] += 1e-3
    for source, said in (
        ("outputs/b", "model was 'outputs/a' and is now 'outputs/b'; repeat"),
        ("outputs/a", "the encoder, its pooling, "),
    ):
        with pytest.raises(ValueError, match=f"holds another job: {said}"):
            encoded(job(embedder, source, group_width=4))
    with torch.no_grad():
        embedder.encoder.backbone.embeddings.word_embeddings.weight[7, 0] -= 1e-3


def test_the_setting_of_an_encoder_that_is_another_is_named(embedder, corpus, tmp_path):
    """Here the number of components and a prompt; the transform of a job is in its manifest."""

    def cut(k):
        provenance = {"kind": "whitening", "k": k}
        last = Final(weight=torch.eye(16)[:k], bias=torch.zeros(k), unit=False, provenance=provenance)
        return job_of(embedder.replaced(final=last), corpus, tmp_path / "out", form=FORM)

    encoded(cut(8))
    with pytest.raises(ValueError, match="job: the whitening's k was 8 and is now 4; repeat"):
        encoded(cut(4))
    with pytest.raises(ValueError, match="job: there was a final step .* and is none now; repeat"):
        encoded(job_of(embedder, corpus, tmp_path / "out", form=FORM))


def test_all_that_decides_a_vector_has_a_part_in_the_digest(embedder):
    """Transforms of one provenance and other numbers, other heads, another limit, another tokenizer."""
    digests = [digest_of(embedder)]
    for scale in (1.0, 2.0):
        last = Final(
            weight=torch.eye(16) * scale, bias=torch.zeros(16), unit=False, provenance={"by": "hand"}
        )
        digests.append(digest_of(embedder.replaced(final=last)))
    embedder.max_length -= 1
    digests.append(digest_of(embedder))
    with torch.no_grad():
        embedder.head.linear.weight[0, 0] += 1
    digests.append(digest_of(embedder))
    embedder.encoder.tokenizer = copy.deepcopy(embedder.encoder.tokenizer)
    embedder.encoder.tokenizer.backend_tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False)
    digests.append(digest_of(embedder))
    assert len(set(digests)) == len(digests) and digest_of(embedder) == digests[-1]


def test_bad_input_is_refused_before_anything_is_written(embedder, corpus, tmp_path, monkeypatch):
    out, monkey = tmp_path / "out", monkeypatch.setattr
    (tmp_path / "bad.txt").write_bytes(b"good\n" * 30 + b"\xff\n")
    for wrong, message in (
        ({"corpus": Corpus(str(tmp_path / "bad.txt"))}, "bad.txt:31: byte 0xff"),
        ({"corpus": corpus_of([], tmp_path, "none.txt")}, "no rows"),
        ({"corpus": Corpus("nli.csv", ("a", "b"))}, "one column is encoded, not a, b; texts that"),
        ({"form": Form(shard=0)}, "shard=0"),
        ({"form": Form(to="csv")}, "to='csv'"),
        ({"form": Form(dtype="int8")}, "dtype='int8'"),
        ({"out": tmp_path}, "holds something other than vectors, 'bad.txt'"),
        ({"out": tmp_path / "a" / "b"}, "no such directory; make it first"),
        (
            {"corpus": Corpus(str(tmp_path)), "form": Form(to="parquet")},
            "out is inside .*, whose files are all",
        ),
    ):
        with pytest.raises((ValueError, OSError), match=message):
            encoded(job_of(embedder, **({"corpus": corpus, "out": out} | wrong)))
        assert not out.exists()
    assert not (tmp_path / ".lock").exists()
    with pytest.raises(ValueError, match="processes=0"):
        encoded(job_of(embedder, corpus, out), 0)
    out.mkdir()
    with pytest.raises(ValueError, match="no rows"):
        encoded(job_of(embedder, corpus_of([], tmp_path, "none.txt"), out))
    assert not list(out.iterdir())
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(NotADirectoryError, match="mine is a file, and a directory is written here; choose"):
        encoded(job_of(embedder, corpus, tmp_path / "mine"))
    monkey(files, "SECONDS", 0.01)
    with FileLock(out / ".lock"), pytest.raises(ValueError, match="written by another process"):
        encoded(job_of(embedder, corpus, out))
    assert encoded(job_of(embedder, corpus, out)) == 29


def test_an_input_that_changes_while_it_is_read_is_noticed(embedder, corpus, tmp_path):
    out = tmp_path / "out"
    encoded(job_of(embedder, corpus, out, form=FORM))
    corpus_of(TEXTS[:-1], tmp_path)
    (out / "shard-00004.npy").unlink()
    with pytest.raises(ValueError, match="changed while it was read"):
        Filling(job_of(embedder, corpus, out, form=FORM), embedder)


class Bomb:
    """Unpickled, it leaves a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("name", ["shard-00001.npy", "shard-00001.parquet", "manifest.json"])
@pytest.mark.parametrize("as_array", [True, False])
def test_reading_runs_no_code_of_a_file(embedder, corpus, tmp_path, name, as_array):
    out, bomb = tmp_path / "out", tmp_path / "ran"
    encoded(job_of(embedder, corpus, out, form=Form("parquet" if "parquet" in name else "npy", shard=7)))
    with (out / name).open("wb") as file:
        if as_array:
            np.save(file, np.array([Bomb(bomb)] * 7, dtype=object), allow_pickle=True)
        else:
            pickle.dump(Bomb(bomb), file)
    (out / "digests.json").unlink()  # else its digest refuses it before
    with pytest.raises(ValueError, match=f"{name}.*is (damaged|not JSON)"):
        list(arrays(out))
    assert not bomb.exists()
    pickle.loads(pickle.dumps(Bomb(bomb)))
    assert bomb.exists()  # it would have gone off


def flipped(data):
    return data[:-1] + bytes([data[-1] ^ 1])


@pytest.mark.parametrize("spoil", [flipped, lambda data: data[:-5], lambda _: b""])
@pytest.mark.parametrize("to", ["npy", "parquet"])
def test_a_finished_file_that_is_damaged_is_refused_and_encoded_again(
    embedder, corpus, tmp_path, capsys, to, spoil
):
    job = job_of(embedder, corpus, tmp_path / "out", form=Form(to, shard=7))
    encoded(job)
    whole = contents(job.out)
    damaged = job.out / f"shard-00002.{to}"
    damaged.write_bytes(spoil(damaged.read_bytes()))
    with pytest.raises(
        ValueError, match=rf"{damaged.name} is not as it was written.*same command encodes it"
    ):
        list(arrays(job.out))
    capsys.readouterr()
    assert encoded(job) == 7
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "again" in line]
    assert f"{damaged} is not as it was written: its digest differs; it is encoded again" in line
    assert contents(job.out) == whole


def test_a_file_that_a_kill_left_without_its_digest_is_said_to_be_unfinished(
    embedder, corpus, tmp_path, capsys
):
    encoded(job := job_of(embedder, corpus, tmp_path / "out", form=Form("npy", shard=7)))
    whole, digests = contents(job.out), json.loads((job.out / "digests.json").read_text())
    del digests["shard-00002.npy"]
    (job.out / "digests.json").write_text(json.dumps(digests))
    capsys.readouterr()
    assert encoded(job) == 7
    assert "shard-00002.npy was left unfinished; it is encoded again" in capsys.readouterr().out
    assert contents(job.out) == whole


def test_two_files_that_changed_places_are_encoded_again(embedder, corpus, tmp_path):
    job = job_of(embedder, corpus, tmp_path / "out", form=FORM)
    encoded(job)
    whole = contents(job.out)
    for name, other in (("shard-00000.npy", "shard-00001.npy"), ("shard-00001.npy", "shard-00000.npy")):
        (job.out / name).write_bytes(whole[other])
    assert encoded(job) == 14 and contents(job.out) == whole


def test_a_manifest_that_is_damaged_is_refused(embedder, corpus, tmp_path):
    job = job_of(embedder, corpus, tmp_path / "out", form=FORM)
    encoded(job)
    manifest = job.out / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"threads": 1', '"threads": 3'))
    for use in (lambda: list(arrays(job.out)), lambda: encoded(job)):
        with pytest.raises(ValueError, match="manifest.json is not as it was written.*name a new directory"):
            use()


def test_an_older_job_without_digests_resumes_and_has_them_from_then_on(embedder, corpus, tmp_path):
    job = job_of(embedder, corpus, tmp_path / "out", form=FORM)
    encoded(job)
    whole = contents(job.out)
    for name in ("digests.json", "shard-00003.npy"):
        (job.out / name).unlink()
    assert encoded(job) == 7
    assert contents(job.out) == whole
    (job.out / "shard-00001.npy").write_bytes(b"")
    assert encoded(job) == 7 and contents(job.out) == whole


def test_a_file_that_a_kill_left_without_its_digest_is_encoded_again(embedder, corpus, tmp_path, monkeypatch):
    job = job_of(embedder, corpus, tmp_path / "out", form=FORM)
    with monkeypatch.context() as patch:
        patch.setattr(shards, "seal_too", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            encoded(job)
    assert (job.out / "shard-00000.npy").exists()
    assert encoded(job) == 29
    list(arrays(job.out))


def test_a_damaged_file_is_named(embedder, corpus, tmp_path):
    out = tmp_path / "out"
    encoded(job_of(embedder, corpus, out, form=FORM))
    first, third = out / "shard-00000.npy", out / "shard-00002.npy"
    (out / "digests.json").unlink()  # as older versions wrote it
    whole = third.read_bytes()
    np.save(third, np.load(first)[:6])
    with pytest.raises(ValueError, match="shard-00002.npy is damaged"):
        list(arrays(out))
    third.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match="shard-00002.npy is damaged"):
        list(arrays(out))
    with pytest.raises(ValueError, match="no manifest.json"):
        list(arrays(tmp_path / "absent"))


@pytest.mark.parametrize("to", ["npy", "parquet"])
def test_a_vector_that_is_not_finite_is_named_and_not_written(embedder, tmp_path, to):
    corpus, out = corpus_of(["the bird"] * 9 + ["the cat sees"] + ["a bird"], tmp_path), tmp_path / "out"
    with torch.no_grad():
        embedder.encoder.backbone.embeddings.word_embeddings.weight[WORDS.index("cat") + 5] = torch.nan
    with pytest.raises(ValueError, match="NaN or infinity in the vector of row 9 of .*corpus.txt in float32"):
        encoded(job_of(embedder, corpus, out, form=Form(to, shard=7)))
    assert [path.name for path in sorted(out.glob("shard*"))] == [f"shard-00000.{to}"]


def test_a_number_too_large_for_float16_is_refused(embedder, tmp_path):
    large = Final(weight=torch.eye(16) * 1e6, bias=torch.zeros(16), unit=False, provenance={"by": "hand"})
    embedder = Embedder(
        encoder=embedder.encoder,
        pooling=embedder.pooling,
        head=embedder.head,
        embedding="encoder",
        final=large,
    ).eval()
    corpus = corpus_of(["the bird", "the cat"], tmp_path)
    with pytest.raises(ValueError, match="the vector of row 0 of .* in float16"):
        encoded(job_of(embedder, corpus, tmp_path / "out", form=Form(dtype="float16")))
    assert encoded(job_of(embedder, corpus, tmp_path / "whole")) == 2


class Manifested:
    def __init__(self, shards):
        self.shards = shards

    def name(self, number):
        return f"shard-{number}.npy"


@pytest.mark.parametrize("store", [None, "a store"])
def test_digests_of_many_files_are_written_together(store, tmp_path, monkeypatch):
    """Else a job of many files would spend its time on its list of digests."""
    now, written, moved = [100.0], [], []

    def spend(seconds):
        now[0] += seconds

    def write(out, digests):
        written.append(dict(digests))
        spend(2)

    def move(out, names, store):
        moved.append(names)
        spend(1000)

    monkeypatch.setattr(shards, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(shards, "seal_too", write)
    monkeypatch.setattr(shards, "move", move)
    few = Sealed(tmp_path, Manifested(1_000), store)
    for number in range(3):
        few.add({number: b"a"})
    assert len(written) == 3

    written.clear()
    moved.clear()
    sealed = Sealed(tmp_path, Manifested(1_001), store)
    sealed.add({0: b"a"})
    spend(99)  # the list took 2 seconds: the next turn is 100 seconds after it, whatever moving files took
    sealed.add({1: b"b"})
    sealed.add({2: b"c"})
    assert written == [{"shard-0.npy": "a"}]
    sealed.write()
    sealed.write()
    assert written[1:] == [{"shard-1.npy": "b", "shard-2.npy": "c"}]

    spend(100)
    sealed.add({3: b"d"})
    assert written[2:] == [{"shard-3.npy": "d"}]
    assert moved == ([list(digests) for digests in written] if store else [])


def test_what_waits_is_written_when_a_job_is_stopped(embedder, corpus, tmp_path, monkeypatch):
    job = Job(lambda: embedder, "x", corpus, tmp_path / "out", FORM)
    fill = Filling.__call__

    def stopped(self, number):
        if number == 2:
            raise KeyboardInterrupt
        return fill(self, number)

    monkeypatch.setattr(shards, "SHARE", 1e9)  # after the first file, digests wait
    monkeypatch.setattr(shards, "MANY", 0)
    monkeypatch.setattr(Filling, "__call__", stopped)
    with pytest.raises(KeyboardInterrupt):
        encoded(job)
    digests = json.loads((tmp_path / "out" / "digests.json").read_text())
    assert {"shard-00000.npy", "shard-00001.npy"} <= digests.keys()
    monkeypatch.undo()
    assert encoded(job) == len(TEXTS) - 14


def test_ctrl_c_does_not_reach_the_further_processes(embedder, corpus, tmp_path, monkeypatch):
    class Workers:
        processes = ()

        def join(self, timeout):
            raise ProcessRaisedException("-- Process 0:\nOSError: x\n", 0, 99)

    heard = []
    monkeypatch.setattr(shares, "LATE", 0.1)
    monkeypatch.setattr(
        bulk_module, "spawn", lambda *args, **how: heard.append(signal.getsignal(signal.SIGINT)) or Workers()
    )
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(OSError, match="rank 1 failed"):
        encoded(job_of(embedder, corpus, tmp_path / "out", form=FORM), 2)
    assert heard == [signal.SIG_IGN] and signal.getsignal(signal.SIGINT) is before


def test_an_interruption_says_what_is_kept(source, corpus, tmp_path, monkeypatch, capsys):
    fill, last = Filling.__call__, 0

    def stopped(self, number):
        if number == last:
            raise KeyboardInterrupt
        return fill(self, number)

    monkeypatch.setattr(Filling, "__call__", stopped)
    words = ["encode", source, corpus.path, str(tmp_path / "out"), "--shard", "7"]
    assert cli.main(words) == 130
    assert capsys.readouterr().err == (
        f"interrupted: 0 of 29 rows are kept in {tmp_path}/out, and the same command resumes\n"
    )
    last = 2
    assert cli.main(words) == 130
    assert "14 of 29 rows are kept" in capsys.readouterr().err
    assert shards.kept(tmp_path / "none", "NONE") == "nothing was encoded to NONE yet"


def test_a_run_that_has_not_finished_says_so(embedder, corpus, tmp_path, capsys):
    embedder.save(tmp_path / "run" / "best")
    (tmp_path / "run" / "config.yaml").write_text("monitor: {dev: null}\ndata: {corpus: x}\n")
    words = ["encode", str(tmp_path / "run"), corpus.path]
    said = f"note: {tmp_path}/run has not finished; its best checkpoint so far{{}} is used\n"
    assert cli.main([*words, str(tmp_path / "a")]) == 0
    assert capsys.readouterr().out.startswith(said.format(""))
    checkpoint.save(embedder, tmp_path / "run" / "best", 1000)
    (tmp_path / "run" / "metrics.csv").write_text("step,dev/spearman\n0,50\n500,40\n")  # it resumed earlier
    assert cli.main(["encode", f"{tmp_path}/run/best", corpus.path, str(tmp_path / "b")]) == 0
    assert capsys.readouterr().out.startswith(said.format(" (step 1,000)"))
    (tmp_path / "run" / "scores.json").write_text("{}")
    assert cli.main([*words, str(tmp_path / "c")]) == 0
    assert "note" not in capsys.readouterr().out

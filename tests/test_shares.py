"""Ranks that share a job through files: each block once, in one directory, even if a rank dies."""

import gzip
import os
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path

import numpy as np
import programs
import pytest
from encoders import embedder_of
from numpy.testing import assert_allclose
from programs import Forked, server, surroundings
from test_bulk import FORM, TEXTS, contents, corpus_of, job_of, many

from whitenedcse.data import files
from whitenedcse.model.embedder import Embedder
from whitenedcse.serving import shares
from whitenedcse.serving.bulk import Filling, arrays, encoded
from whitenedcse.serving.layouts import Form
from whitenedcse.serving.shards import SHARED
from whitenedcse.serving.shares import Lead, Member
from whitenedcse.whitening import Moments

SHARD = 100


@pytest.fixture
def quick(monkeypatch):
    """Nobody waits long."""
    monkeypatch.setattr(shares, "BEAT", 0.02)
    monkeypatch.setattr(shares, "POLL", 0.005)


def ranks(words, world, cwd, prepared=""):
    """Ranks of one command, as srun starts them: nothing connects them but the disk."""
    started = []
    for rank in range(world):
        env = {"SLURM_PROCID": str(rank), "SLURM_NTASKS": str(world), "SLURM_NNODES": "1"}
        files = [cwd / f"rank{rank}.{name}" for name in ("out", "err")]
        for file in files:
            file.unlink(missing_ok=True)
        request = ["whitenedcse", *words], str(cwd), surroundings(cwd, env), list(map(str, files)), prepared
        started.append(Forked(server(), *request))
    return started


def said(cwd, rank, name="out"):
    return (cwd / f"rank{rank}.{name}").read_text()


def ended(started, seconds=120):
    return [rank.wait(seconds) for rank in started]


def whole(source, corpus, folder, **changes):
    """The files of one process."""
    job = job_of(None, corpus, folder / "whole", opened=partial(Embedder.load, source), source=source)
    encoded(job := replace(job, form=Form(shard=SHARD), **changes))
    return contents(job.out)


def test_ranks_give_the_bytes_of_one_process(source, tmp_path):
    corpus, out = corpus_of(many(450), tmp_path), tmp_path / "out"
    words = ["encode", source, corpus.path, str(out), "--shard", str(SHARD)]
    assert ended(ranks(words, 2, tmp_path)) == [0, 0]
    assert contents(out) == whole(source, corpus, tmp_path)


@pytest.mark.slow
def test_any_number_of_ranks_resumes(source, tmp_path):
    corpus, out = corpus_of(many(1_150), tmp_path), tmp_path / "out"
    words = ["encode", source, corpus.path, str(out), "--shard", str(SHARD)]
    assert ended(ranks(words, 2, tmp_path)) == [0, 0]
    assert said(tmp_path, 0) == f"1,150 rows of width 16: {out}\n"
    assert said(tmp_path, 1) == said(tmp_path, 1, "err") == ""
    wanted = whole(source, corpus, tmp_path)
    assert contents(out) == wanted
    for number in (0, 3, 4, 11):
        (out / f"shard-{number:05}.npy").unlink()
    assert ended(ranks(words, 3, tmp_path)) == [0, 0, 0]
    assert said(tmp_path, 0) == f"1,150 rows of width 16: {out}; 800 were encoded before\n"
    assert contents(out) == wanted


@pytest.mark.slow
def test_torchrun_starts_the_same_command(source, tmp_path):
    corpus, out = corpus_of(many(450), tmp_path), tmp_path / "out"
    words = ["--nproc-per-node", "2", "--standalone", "-m", "whitenedcse.app.cli", "encode"]
    words += [source, corpus.path, str(out), "--shard", str(SHARD)]
    done = programs.started("torchrun", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"450 rows of width 16: {out}\n"
    assert contents(out) == whole(source, corpus, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_a_rank_that_dies_leaves_its_blocks_to_the_next_start(source, tmp_path, killed):
    """The other one does all that is left; what both have finished is not encoded again."""
    corpus, out = corpus_of(many(6_000), tmp_path), tmp_path / "out"
    words = ["encode", source, corpus.path, str(out), "--shard", str(SHARD)]
    started = ranks(words, 2, tmp_path)
    while len(list(out.glob("shard-*.npy"))) < 6 or not (out / SHARED / shares.PLAN).exists():
        time.sleep(0.001)
    started[killed].kill()
    assert started[killed].wait(60) == -signal.SIGKILL
    if killed == 0:
        assert started[1].wait(120) == 0  # nothing ends it
    else:
        started[0].send_signal(signal.SIGTERM)  # as torchrun or srun -K do; else it waits for 120 s
        assert started[0].wait(60) == 143
    kept = {path.name: path.stat().st_mtime_ns for path in out.glob("shard-*.npy")}
    assert len(kept) >= (59 if killed == 0 else 6)
    assert ended(ranks(words, 3, tmp_path)) == [0, 0, 0]
    same = [name for name, at in kept.items() if (out / name).stat().st_mtime_ns == at]
    assert len(same) >= len(kept) - 2  # a file whose digest had not been written is encoded again
    assert contents(out) == whole(source, corpus, tmp_path)


def test_a_refusal_of_the_first_rank_ends_the_others(source, tmp_path):
    corpus = tmp_path / "bad.txt"
    corpus.write_bytes(b"good\n" * 30 + b"\xff\n")
    started = ranks(["encode", source, str(corpus), str(tmp_path / "out")], 2, tmp_path)
    assert ended(started) == [2, 2]
    assert re.fullmatch(r"error: .*bad.txt:31: byte 0xff.*\n", said(tmp_path, 0, "err").split("counted")[-1])
    assert re.fullmatch(r"error: rank 0 failed: .*bad.txt:31: byte 0xff.*\n", said(tmp_path, 1, "err"))
    assert ended(ranks(["encode", source, str(corpus), str(tmp_path / "a" / "b")], 1, tmp_path)) == [2]


def test_a_rank_that_comes_after_the_first_has_failed_is_told_why(tmp_path, monkeypatch):
    monkeypatch.setattr(shares, "PATIENCE", 3)  # else a rank that is not told would wait for two minutes

    def first():
        with suppress(ValueError), Lead(tmp_path / "ranks", 2):
            raise ValueError("a bad byte")

    thread = threading.Thread(target=first)
    thread.start()
    thread.join(0.3)
    with pytest.raises(OSError, match="rank 0 failed: a bad byte"), Member(tmp_path / "ranks", 1) as late:
        late.blocks(2)
    thread.join()


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_a_signal_ends_the_first_rank_without_waiting_for_others(tmp_path, monkeypatch, error):
    monkeypatch.setattr(Lead, "_await_late", lambda _: pytest.fail("waited"))
    with pytest.raises(error), Lead(tmp_path / "ranks", 2):
        raise error


def test_a_rank_with_another_encoder_is_refused(embedder, bert, tmp_path):
    job = job_of(embedder, corpus_of(TEXTS, tmp_path), tmp_path / "out", form=FORM)
    encoded(job)
    with pytest.raises(ValueError, match="holds another job: the encoder"):
        Filling(job, embedder_of(bert, kind="cls").eval())


def test_ranks_start_no_processes_of_their_own(source, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    job = job_of(None, corpus_of(TEXTS, tmp_path), tmp_path / "out")
    for more in ({"processes": 2}, {"engine": "ray"}):
        with pytest.raises(ValueError, match="started 2 ranks; leave out --processes and --engine"):
            encoded(job, **more)


def until(condition):
    for _ in range(10_000):
        if condition():
            return
        time.sleep(0.001)
    raise TimeoutError


def lead(folder, world, numbers, work, come):
    with Lead(folder, world) as first:
        first.do(numbers, work, come.update)


def member(folder, world, rank, work):
    with Member(folder, rank) as other:
        other.do(other.blocks(world), work)


def run_in_threads(folder, world, numbers, works):
    """What the first of several ranks folds, each rank a thread with its own work; and what each raised."""
    come = {}
    with ThreadPoolExecutor(world) as pool:
        others = [pool.submit(member, folder, world, rank, works[rank]) for rank in range(1, world)]
        time.sleep(0.05)  # the first comes last
        all_of_them = [pool.submit(lead, folder, world, numbers, works[0], come), *others]
    return come, [task.exception() for task in all_of_them]


@pytest.mark.parametrize("left", ["nothing", "an earlier start"])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_each_block_is_done_once(tmp_path, quick, world, left):
    folder, done = tmp_path / "ranks", []
    if left != "nothing":  # of a start that was killed, with other ranks
        folder.mkdir()
        ids = '{"ids": ["x", "y", "z"], "numbers": [7, 8, 9]}'
        (folder / "plan.json").write_text(ids)
        (folder / "rank-1.json").write_text('{"id": "x", "state": "ended"}')
        (folder / "rank-0.json").write_text('{"id": "0", "state": "it failed"}')
        (folder / "block-7").write_bytes(b"old")

    first = set()

    def work(rank, number):
        done.append((rank, number))
        first.add(rank)
        until(lambda: len(first) == world)  # each has a block before any has its second
        return f"{number} by {rank}".encode()

    numbers = [2, 3, 5, 8, 13, 21, 34]
    come, errors = run_in_threads(folder, world, numbers, [partial(work, rank) for rank in range(world)])
    assert errors == [None] * world
    assert sorted(number for _, number in done) == numbers and not folder.exists()
    assert come == {number: f"{number} by {rank}".encode() for rank, number in done}
    begun = {rank: number for rank, number in reversed(done)}
    assert begun == {rank: numbers[rank] for rank in range(world)}


@pytest.mark.parametrize("slow", [0, 2])
def test_a_slow_rank_leaves_to_others_what_it_has_not_begun(tmp_path, quick, slow):
    done = []

    def work(rank, number):
        done.append((rank, number))
        until((lambda: len(done) == 9) if rank == slow else lambda: slow in dict(done))
        return b""

    come, errors = run_in_threads(tmp_path / "ranks", 3, range(9), [partial(work, rank) for rank in range(3)])
    assert errors == [None] * 3 and sorted(come) == list(range(9))
    assert [number for rank, number in done if rank == slow] == [slow]


def test_the_first_rank_begins_before_others_come(tmp_path, quick):
    """What it has done by then is not done again."""
    begun, done = threading.Event(), []

    def early(number):
        done.append((0, number))
        begun.set()
        until(lambda: len(done) > 1)
        return b""

    def late(number):
        done.append((1, number))
        return b""

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(lead, tmp_path / "ranks", 2, range(6), early, {})
        assert begun.wait(10)
        second = pool.submit(member, tmp_path / "ranks", 2, 1, late)
    assert (first.exception(), second.exception()) == (None, None)
    assert sorted(number for _, number in done) == list(range(6)) and done[:2] == [(0, 0), (1, 1)]


def test_a_rank_of_an_earlier_start_takes_no_block(tmp_path, quick, monkeypatch):
    monkeypatch.setattr(shares, "PATIENCE", 2)
    old = Member(tmp_path / "ranks", 1)

    def work(number):
        assert number or all(old._claim(other, "earlier") for other in range(1, 5))
        return b""

    come, errors = run_in_threads(tmp_path / "ranks", 2, range(5), [work, lambda _: b""])
    assert errors == [None, None] and sorted(come) == list(range(5))


def test_an_error_of_one_rank_ends_the_first_and_names_it(tmp_path, quick):
    failed = threading.Event()

    def fails(number):
        failed.set()
        raise ValueError(f"no memory for {number}")

    def waits(number):
        failed.wait()
        return b""

    come, errors = run_in_threads(tmp_path / "ranks", 3, range(9), [waits, fails, waits])
    assert "rank 1 failed: no memory for 1; start the same command again" in str(errors[0])
    assert isinstance(errors[1], ValueError) and errors[2] is None


@pytest.fixture
def clock(monkeypatch):
    """A clock that shows 50 s more at each look."""
    times = count(0.0, 50.0)
    monkeypatch.setattr(shares.time, "monotonic", lambda: next(times))


def test_a_rank_without_a_sign_of_life_is_named(tmp_path, quick, clock):
    with pytest.raises(OSError, match="rank 1 gave no sign of life for 120 s"):
        with Lead(tmp_path / "ranks", 2) as lead:
            lead.do([0, 1], lambda _: b"", lambda _: None)
    with pytest.raises(OSError, match="rank 0 gave no sign of life for 120 s"):
        with Member(tmp_path / "other", 1) as member:
            member.blocks(2)


def test_a_rank_lives_as_long_as_its_file_is_touched(tmp_path, clock):
    watching = Lead(tmp_path, 2)
    for at in range(8):
        watching.file(1).touch()
        os.utime(watching.file(1), (at, at))
        watching.refuse_silent(1)
    watching.refuse_silent(1)
    watching.refuse_silent(1)
    with pytest.raises(OSError, match="rank 1 gave no sign"):
        watching.refuse_silent(1)


@pytest.mark.parametrize("name", ["deleted", "damaged", "older"])
def test_the_places_of_blocks_are_found_again_where_they_are_lost(embedder, tmp_path, capsys, name):
    corpus = corpus_of(TEXTS, tmp_path)
    job = job_of(embedder, corpus, tmp_path / "out", form=FORM)
    encoded(job)
    wanted, starts = contents(job.out), job.out / "starts.json"
    if name == "damaged":
        starts.write_text(starts.read_text().replace("0", "1"))
    else:
        starts.unlink()
    if name == "older":
        (job.out / "digests.json").unlink()
    (job.out / "shard-00002.npy").unlink()
    assert encoded(job) == 7 and contents(job.out) == wanted


def test_the_corpus_is_counted_once_and_opened_where_a_block_begins(embedder, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "BLOCK", 256)
    corpus, read = corpus_of(TEXTS * 40, tmp_path), []
    job = job_of(embedder, corpus, tmp_path / "out", form=Form(shard=40))
    plain = files._blocks

    def counting(path, offset, number):
        for block in plain(path, offset, number):
            read.append(len(block[2]))
            yield block

    monkeypatch.setattr(files, "_blocks", counting)
    size = Path(corpus.path).stat().st_size
    encoded(job)
    assert sum(read) <= 2 * size  # once to count, once to encode
    wanted = contents(job.out)
    (job.out / "shard-00027.npy").unlink()
    read.clear()
    assert encoded(job) == 40 and contents(job.out) == wanted
    assert sum(read) < 0.1 * size


@pytest.mark.parametrize("sample", [None, 55])
@pytest.mark.slow(but=1)
def test_a_fit_by_ranks_has_the_bits_of_one_process(source, tmp_path, sample):
    """Blocks are merged in their order, whichever rank computed them; blank texts are left out."""
    corpus = corpus_of([*TEXTS * 5, ""], tmp_path)
    words = ["whiten", "fit", source, corpus.path, "fit.safetensors"]
    words += ["--sample", str(sample)] if sample else []
    fits = []
    for world in (1, 2, 3):
        started = ranks(words, world, tmp_path, "small_blocks:small_blocks")
        assert ended(started) == [0] * world, said(tmp_path, world - 1, "err")
        assert "fitted to" in said(tmp_path, 0) and not any(said(tmp_path, r) for r in range(1, world))
        fits.append((tmp_path / "fit.safetensors").read_bytes())
        (tmp_path / "fit.safetensors").unlink()
        assert not list(tmp_path.glob(".fit*"))
    assert fits[0] == fits[1] == fits[2]


def test_moments_are_restored_to_the_bit():
    x = np.random.default_rng(0).normal(3, 2, (50, 4))
    seen = Moments(4).update(x[:30])
    again = Moments.restored(np.frombuffer(seen.state.tobytes()).reshape(-1, 4))
    for moments in (seen, again):
        moments.update(x[30:])
    assert again.n == 50 and np.array_equal(again.mean, seen.mean)
    assert np.array_equal(again.covariance, seen.covariance)
    assert_allclose(again.covariance, np.cov(x.T, bias=True))
    assert Moments.restored(Moments(4).state).merge(seen).n == 50  # of no rows


@pytest.mark.slow
def test_a_compressed_corpus_is_encoded_by_ranks(source, tmp_path):
    plain, out = corpus_of(many(350), tmp_path), tmp_path / "out"
    packed = tmp_path / "corpus.txt.gz"
    packed.write_bytes(gzip.compress(Path(plain.path).read_bytes()))
    words = ["encode", source, str(packed), str(out), "--shard", "50"]
    assert ended(ranks(words, 2, tmp_path)) == [0, 0]
    assert f"{packed} is compressed: each process unpacks it" in said(tmp_path, 0).replace("\n", " ")
    job = job_of(None, plain, tmp_path / "whole", opened=partial(Embedder.load, source), form=Form(shard=50))
    encoded(job)
    assert np.array_equal(*(np.concatenate(list(arrays(d))) for d in (out, job.out)))


def test_an_input_that_grows_while_it_is_encoded_is_noticed(embedder, tmp_path, monkeypatch):
    corpus = corpus_of(TEXTS, tmp_path)
    plain = Embedder.encode

    def growing(self, texts, **how):
        with Path(corpus.path).open("a") as stream:
            stream.write("more\n")
        return plain(self, texts, **how)

    monkeypatch.setattr(Embedder, "encode", growing)
    with pytest.raises(ValueError, match="changed while it was read; start again in a new directory"):
        encoded(job_of(embedder, corpus, tmp_path / "out", form=FORM))

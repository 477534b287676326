"""The ranks of a job that do not answer are found, named, and end the job; no other rank is blamed."""

import socket
import time
from datetime import timedelta

import pytest
import torch.distributed as dist
from test_distributed import started
from torch.multiprocessing import ProcessExitedException

from whitenedcse import distributed
from whitenedcse.training import health, parallel
from whitenedcse.training.health import Heartbeat, Ledger


@pytest.fixture(autouse=True)
def nameless(monkeypatch):
    """No run of a test before has given this process its name."""
    monkeypatch.setattr(distributed, "resumes", "The same command resumes from the last checkpoint")


def told(ledger, seconds, mine, **others):
    """What a ledger says at the end of so many seconds of turns, in which other ranks sent their counts."""
    for turn in range(1, seconds + 1):
        for rank, count in others.items():
            ledger.hear(int(rank[1:]), count)
        missing = ledger.missing(mine, ledger.seen + 1)
        assert not missing or turn == seconds
    return missing


@pytest.fixture
def ledger():
    return Ledger(0, 3, 10.0, 1000.0)


def test_a_rank_that_is_not_heard_is_missing(ledger):
    assert told(ledger, 10, 7, r1=7) == []
    assert told(ledger, 1, 7, r1=7) == [2]


def test_a_rank_that_others_wait_for_is_missing(ledger):
    assert told(ledger, 11, 7, r1=7, r2=6) == []  # from the turn on in which it was reached
    assert told(ledger, 1, 7, r1=7, r2=6) == [2]


def test_of_those_behind_the_last_one_is_waited_for(ledger):
    told(ledger, 11, 9, r1=8, r2=6)
    assert told(ledger, 1, 9, r1=8, r2=6) == [2]


def test_ranks_that_work_or_wait_together_are_not_missing(ledger):
    told(ledger, 100, 7, r1=7, r2=7)
    assert told(ledger, 100, 7, r1=8, r2=9) == []  # this one is behind, which the others say


def test_each_collective_begins_the_time_anew(ledger):
    for mine in range(2, 30):
        assert told(ledger, 9, mine, r1=mine, r2=mine - 1) == []


def test_a_rank_that_was_itself_stopped_blames_no_other(ledger):
    told(ledger, 5, 7, r1=7, r2=7)
    assert ledger.missing(7, ledger.seen + 3600) == []
    assert told(ledger, 5, 7, r1=7, r2=7) == []


def test_a_message_of_a_stranger_counts_for_nothing():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        alive = Heartbeat(10.0)
        alive.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        with alive.socket:
            alive.socket.bind(("127.0.0.1", 0))
            ledger, key, to = Ledger(0, 2, 10.0, 0.0), b"k" * 16, alive.socket.getsockname()
            for message in (
                health.BEAT.pack(b"x" * 16, 1, 5),
                b"",
                b"k" * 99,
                health.BEAT.pack(key, 0, 5),
            ):
                sender.sendto(message, to)
            alive.listen(ledger, key, time.monotonic() + 0.2)
            assert ledger.counts == {1: 0}
            sender.sendto(health.BEAT.pack(key, 1, 5), to)
            alive.listen(ledger, key, time.monotonic() + 0.2)
            assert ledger.counts == {1: 5}


def one_of_two(rank, folder, late):
    """Rank `late` never reaches the second collective, in which the other one waits."""
    parallel.timeout = timedelta(seconds=60)
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=parallel.timeout)
    alive = Heartbeat(6.0)  # a busy machine halts a rank for a second or two
    alive.setup(None, None, "fit")
    assert parallel.agreed(rank) == [[0], [1]]
    (folder / f"began{rank}").write_text("")
    if rank == late:
        while True:
            pass
    with (folder / "said").open("w") as stream:
        health.sys.stderr = stream
        parallel.agreed(rank)


@pytest.mark.parametrize("late", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_rank_that_is_stuck_is_named_long_before_the_collective_times_out(tmp_path, late):
    processes = started(one_of_two, 2, tmp_path, late)
    with pytest.raises(ProcessExitedException) as ended:
        while not processes.join():
            pass
    assert (ended.value.error_index, ended.value.exit_code) == (1 - late, 124)
    assert (tmp_path / "said").read_text() == (
        f"error: rank {late} did not answer for 3 s (trainer.timeout=6): stopped, lost or stuck; the job is"
        " ended. The same command resumes from the last checkpoint\n"
    )

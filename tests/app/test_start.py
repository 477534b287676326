"""Starting a script: its words, its errors in one line, its ranks, and what a job leaves in memory."""

import os
import signal
import socket
import sys
import threading
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch.distributed
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import OmegaConf

from whitenedcse.app import cli, start
from whitenedcse.app.train import end_job, train
from whitenedcse.run import Run


@pytest.fixture(autouse=True)
def hydras(monkeypatch):
    """Hydra's settings are what they were after a test that starts it."""
    monkeypatch.setattr(HydraConfig.instance(), "cfg", HydraConfig.instance().cfg)


def test_what_resumes_a_run_is_said_with_its_name(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    cases = [
        (RunMode.RUN, "outputs/a/b", "the same command with run=a/b"),
        (RunMode.MULTIRUN, "outputs/a/0", "the same command with run=a"),
        (RunMode.RUN, "outputs/a b", "the same command with 'run='\"'\"'a b'\"'\"''"),
        (RunMode.RUN, "/x/y", "the same command"),
        (None, "/x/y", "the same call with output='/x/y'"),
    ]
    for mode, path, said in cases:
        monkeypatch.setattr(HydraConfig.instance(), "cfg", OmegaConf.create({"hydra": {"mode": mode}}))
        assert start.again(Run(tmp_path / path)) == said


def test_home_is_put_into_paths_and_into_no_text(capsys):
    assert cli.main(["train", "--cfg", "job", "data.corpus=~/c.txt", 'prompt="a =~ b,~c [~d"']) == 0
    said = capsys.readouterr().out
    assert f"corpus: {os.path.expanduser('~/c.txt')}\n" in said and "prompt: a =~ b,~c [~d\n" in said


def ended(error, **settings):
    """The exit code of a job that raises an error."""

    def script():
        raise error

    with pytest.raises(SystemExit) as end:
        start.job(script, **settings)()
    return end.value.code


def test_what_a_user_can_mend_is_one_line_and_other_errors_keep_their_traceback(capsys):
    assert ended(ValueError("no")) == 2
    assert capsys.readouterr().err == "error: no (--debug shows where)\n"
    for error, settings in ((TypeError("of ours"), {}), (ValueError("no"), {"debug": True})):
        with pytest.raises(type(error)), start.explained(**settings):
            raise error
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(SystemExit), start.explained():
        torch.distributed.TCPStore("127.0.0.1", other.getsockname()[1], is_master=True)
    assert str(other) and capsys.readouterr().err.count("\n") == 1


def test_settings_may_stand_before_and_behind_an_option():
    cases = {
        "run=a --config-dir d=1 loss=own": "--config-dir d=1 run=a loss=own",
        "--config-dir=d a=1 -m b=2 +c.d=3 ~e": "--config-dir=d -m a=1 b=2 +c.d=3 ~e",
        "-cd d=1 seed=1,2 -m": "-cd d=1 -m seed=1,2",
        "-c job a=1 --resolve": "-c job --resolve a=1",
        "": "",
    }
    for words, wanted in cases.items():
        assert start.settings_last(["train.py", *words.split()]) == ["train.py", *wanted.split()]


class Unfinished:
    """A file of a library that complains where its writing is broken off, as torch.save's does."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        raise OSError("unexpected position")


@pytest.mark.parametrize(("end", "code"), [(SystemExit(143), 143), (KeyboardInterrupt(), 130)])
def test_an_error_raised_over_the_exit_after_a_signal_is_not_said(end, code, capsys, monkeypatch):
    with pytest.raises(SystemExit) as raised, start.explained(), Unfinished():
        raise end
    assert raised.value.code == code

    class BrokenOff(Unfinished):
        def __enter__(self):
            with Unfinished():
                raise end

    monkeypatch.setattr(cli.console, "ending_when_asked", BrokenOff)
    assert cli.main(["report", "--list"]) == code and capsys.readouterr().err == ""


@pytest.fixture
def launched(tmp_path, monkeypatch):
    """A function from the code of a rank to the exit status of two, which have two seconds' grace."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "script.py")])
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def run(code, count=2):
        words = "import os, signal, sys, time\nrank = int(os.environ['RANK'])\n"
        (tmp_path / "script.py").write_text(words + code)
        status = start.launched(["a=1"], count, "the same command")
        assert {number: signal.getsignal(number) for number in before} == before
        return status

    return run


def test_ranks_that_end_well_are_a_job_that_ended_well(launched, tmp_path, capfd):
    code = """
names = ("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
open(str(rank), "w").write(" ".join([*sys.argv[1:], *(os.environ[name] for name in names)]))
"""
    assert launched(code, 3) == 0
    said = [(tmp_path / str(rank)).read_text() for rank in range(3)]
    assert said == [f"a=1 3 {rank} 3 127.0.0.1" for rank in range(3)] and capfd.readouterr() == ("", "")


FAILING = """
from whitenedcse.app import start
start.LATER, start.LOST = 1.0, 9.0
signal.signal(signal.SIGTERM, lambda *_: None)  # as training does, until its step is done
errors = [RuntimeError("a " + "consequence")] * 2
try:
    with start.explained():
        open(str(rank), "w").close()
        while not all(os.path.exists(str(other)) for other in (0, 1)):
            time.sleep(0.01)
        CODE
        raise errors[rank]
except BaseException as error:
    start.leave(error)
"""


@pytest.mark.slow
def test_a_rank_that_fails_says_why_once_and_ends_the_others(launched, capfd):
    """The other one learns of it by an error of its own, or says the same of its own accord."""
    cause = "if rank == {}:\n            errors[rank] = TypeError('the ' + 'cause'); time.sleep(1)"
    first, second = (cause.format(rank) for rank in (0, 1))  # later, so that the other one has failed too
    for code, status in ((first, 1), (second, 1), ("errors = [ValueError('the ' + 'cause')] * 2", 2)):
        began = time.monotonic()
        assert launched(FAILING.replace("CODE", code)) == status and time.monotonic() - began < 60
        said = capfd.readouterr().err
        assert said.count("the cause") == 1 and "a consequence" not in said
        assert ("Traceback" in said) == (status == 1)


def test_a_sweep_ends_with_an_error_if_fewer_runs_than_jobs_have_scores(tmp_path, capsys):
    """Not if there are more, of a larger sweep of that name."""
    hydras = {
        "sweep": {"dir": str(tmp_path)},
        "sweeper": {"params": None},
        "overrides": {"task": ["seed=1,2"]},
    }
    config = OmegaConf.create({"hydra": hydras})
    for job in range(3):
        with pytest.raises(SystemExit, match="2") if job < 2 else nullcontext():
            start.Checked().on_multirun_end(config)
        (tmp_path / str(job)).mkdir()
        (tmp_path / str(job) / "scores.json").touch()
    start.Checked().on_multirun_end(config)
    said = [f"error: {left} of 2 jobs failed, as said above" for left in (2, 1)]
    assert capsys.readouterr().err.splitlines() == said


def test_the_ranks_of_a_job_of_a_sweep_end_it_as_an_error_and_by_a_signal_the_sweep():
    for mode, status, error in ((RunMode.MULTIRUN, 2, ValueError), (RunMode.MULTIRUN, 143, SystemExit)):
        with pytest.raises(error):
            end_job(status, SimpleNamespace(mode=mode))
    with pytest.raises(SystemExit):
        end_job(2, SimpleNamespace(mode=RunMode.RUN))


def test_a_rank_ends_with_its_agent(monkeypatch, capsys):
    """How it does is in tests/test_place.py."""
    called = []
    monkeypatch.setattr(start, "has_agent", lambda: True)
    monkeypatch.setattr(start, "end_with_parent", lambda: called.append(1))
    monkeypatch.setattr(sys, "argv", ["train.py", "--help"])
    start.start(train)
    assert called == [1] and "Settings" in capsys.readouterr().out


@pytest.mark.slow
def test_a_rank_that_was_killed_is_named_with_the_signal(launched, capfd):
    assert launched("os.kill(os.getpid(), 9) if rank else time.sleep(100)") == 137
    said = capfd.readouterr().err
    assert said.startswith("error: rank 1 (process ") and "was ended by SIGKILL" in said
    assert said.endswith("; the same command resumes\n") and said.count("\n") == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1], ids=lambda n: n.name)
@pytest.mark.slow(but=1)
def test_a_signal_reaches_all_ranks_once_and_the_last_has_time_to_write(launched, tmp_path, capfd, number):
    code = f"""
def hear(number, _):
    with open(f"heard{{rank}}", "a") as file:
        file.write("x")
    time.sleep(0.0 if rank else 2.0)  # the first rank writes a checkpoint
    open(f"saved{{rank}}", "w").close()
    os._exit(128 + number)
signal.signal({int(number)}, hear)
open(f"ready{{rank}}", "w").close()
time.sleep(100)
"""

    def ask():
        while not all((tmp_path / f"ready{rank}").exists() for rank in (0, 1)):
            time.sleep(0.02)
        os.kill(os.getpid(), number)

    asking = threading.Thread(target=ask)
    asking.start()
    assert launched(code) == 128 + number
    asking.join()
    assert all((tmp_path / f"saved{rank}").exists() for rank in (0, 1)) and capfd.readouterr().err == ""
    assert [(tmp_path / f"heard{rank}").read_text() for rank in (0, 1)] == ["x", "x"]


def test_each_process_of_a_sweep_takes_a_gpu_of_its_own_and_the_rest_share(monkeypatch):
    def seen_by_cuda():
        return len((os.environ["CUDA_VISIBLE_DEVICES"] or "0,1").split(","))

    monkeypatch.setattr(torch.cuda, "device_count", seen_by_cuda)
    for given, seen in (("4,7", ["4", "7", "4"]), ("", ["0", "1", "0"])):
        for job, name in enumerate(seen):  # of one process after the other
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
            start.take_gpu(job)
            assert os.environ["CUDA_VISIBLE_DEVICES"] == name
            start.take_gpu(job + 1)  # a later job of this process
            assert os.environ["CUDA_VISIBLE_DEVICES"] == name


def test_a_rank_that_is_done_ends_at_once_but_for_the_first(monkeypatch):
    ended = []
    monkeypatch.setattr("os._exit", ended.append)
    start.leave_done(0)
    assert ended == []
    start.leave_done(1)
    assert ended == [0]

"""Several processes are one job: each knows its place, and none outlives the others or the one in front."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from hydra._internal.hydra import Hydra

from whitenedcse import compute
from whitenedcse.app import launch, ranks
from whitenedcse.app.ranks import run
from whitenedcse.distributed import Place, placed, shared
from whitenedcse.run import stamp

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_NNODES")
NAMES += ("SLURM_JOB_ID", "SLURM_STEP_ID", "TORCHELASTIC_USE_AGENT_STORE", "MASTER_ADDR", "MASTER_PORT")
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


@pytest.fixture(autouse=True)
def nameless(monkeypatch):
    """No run of a test before has given this process its name."""
    monkeypatch.setattr(ranks, "resumes", "The same command resumes from the last checkpoint")


def alive(pid):
    """Whether a process runs; one that has ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def until(truth, seconds=60.0):
    """Wait for it; fail if it does not come true in that time."""
    end = time.monotonic() + seconds
    while not truth():
        assert time.monotonic() < end, f"not true after {seconds} s"
        time.sleep(0.02)


@pytest.fixture(autouse=True)
def as_before(monkeypatch):
    """Nothing of this machine's own launcher is seen, and `run` keeps no signal."""
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({}, None),
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}, Place(5, 8, 4)),
        ({"RANK": "1", "WORLD_SIZE": "2"}, Place(1, 2, 2)),
        ({"RANK": "1"}, None),
        ({"SLURM_NTASKS": "6", "SLURM_PROCID": "4", "SLURM_NNODES": "3"}, Place(4, 6, 2)),
        ({"SLURM_NTASKS": "2", "SLURM_PROCID": "1"}, Place(1, 2, 2)),
        ({"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, None),
        ({"SLURM_NTASKS": "4"}, None),  # sbatch without srun
        ({"RANK": "0", "WORLD_SIZE": "2", "SLURM_NTASKS": "4", "SLURM_PROCID": "3"}, Place(0, 2, 2)),
    ],
)
def test_a_process_reads_its_place_from_its_environment(monkeypatch, environment, place):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert placed() == place


def test_a_run_is_named_by_the_time_and_under_slurm_by_what_a_requeued_job_keeps(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d", stamp())
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    assert stamp() == "slurm-7.0"


def test_runs_begun_within_a_second_have_different_names(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("whitenedcse.run.time.strftime", lambda _: "2026-11-23_10-56-09")
    names = []
    for _ in range(3):
        names.append(stamp())
        (tmp_path / "outputs" / f"evaluate-{names[-1]}").mkdir(parents=True)
    assert names == ["2026-11-23_10-56-09", "2026-11-23_10-56-09-2", "2026-11-23_10-56-09-3"]


def test_ranks_agree_on_the_first_ones_value(monkeypatch):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for name, value in {"TORCHELASTIC_USE_AGENT_STORE": True, "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in (0, 1):
        monkeypatch.setenv("RANK", str(rank))
        assert shared("x", f"of rank {rank}") == "of rank 0"
    monkeypatch.setenv("RANK", "0")
    assert shared("x", "after a restart") == "of rank 0"
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    with pytest.raises(ValueError, match="add run=NAME"):
        shared("x", "y")


def command(code):
    return [sys.executable, "-c", f"import os, signal, sys, time\nrank = int(os.environ['RANK'])\n{code}"]


def test_a_job_whose_ranks_end_well_ends_well_and_only_the_first_is_heard(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    names = ("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    code = f"""
print("rank", rank, "speaks")
open(str(rank), "w").write(" ".join(os.environ[name] for name in {names}))
"""
    assert run(command(code), 3) == 0
    said = [(tmp_path / str(rank)).read_text().split() for rank in range(3)]
    port = said[0][-1]
    assert said == [["3", str(rank), "3", "127.0.0.1", port] for rank in range(3)]
    assert capfd.readouterr() == ("rank 0 speaks\n", "")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", int(port)))  # it was free, and is


def test_a_failed_rank_is_named_its_words_are_shown_and_the_others_ended(monkeypatch, capfd):
    monkeypatch.setattr(ranks, "GRACE", 0.3)
    code = """
if rank == 1:
    print("its own words")
    sys.exit("its last words")
signal.signal(signal.SIGTERM, signal.SIG_IGN)
time.sleep(100)
"""
    began = time.monotonic()
    assert run(command(code), 2) == 1
    assert time.monotonic() - began < 20
    assert re.fullmatch(
        r"its own words\nits last words\nerror: rank 1 \(process \d+\) ended with status 1; the other ranks"
        r" were ended too\. The same command resumes from the last checkpoint\n",
        capfd.readouterr().err,
    )


def test_a_rank_that_was_killed_is_named_with_the_signal(monkeypatch, capfd):
    monkeypatch.setattr(ranks, "GRACE", 0.3)
    assert run(command("os.kill(os.getpid(), 9) if rank else time.sleep(100)"), 2) == 137
    assert re.match(r"error: rank 1 \(process \d+\) was ended by SIGKILL;", capfd.readouterr().err)


@pytest.mark.parametrize("rank", [0, 1])
def test_what_a_user_can_mend_is_said_once(monkeypatch, capfd, rank):
    monkeypatch.setattr(ranks, "GRACE", 0.3)
    code = f"if rank == {rank}:\n    sys.stderr.write('error: wrong\\n')\n    sys.exit(2)\ntime.sleep(100)"
    assert run(command(code), 2) == 2
    assert capfd.readouterr().err == "error: wrong\n"


def test_what_all_ranks_say_is_said_once_in_any_order(capfd):
    code = "time.sleep(0.5 * (rank == 0))\nsys.stderr.write('error: wrong\\n')\nsys.exit(2)"
    assert run(command(code), 2) == 2
    assert capfd.readouterr().err == "error: wrong\n"


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
@pytest.mark.slow(but=1)
def test_a_signal_reaches_all_ranks_and_the_last_has_time_to_end(tmp_path, monkeypatch, capfd, number):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ranks, "GRACE", 0.1)
    code = f"""
def hear(number, _):
    time.sleep(0.0 if rank else 1.0)  # the first rank writes a checkpoint, and asks for a requeue
    open(f"saved{{rank}}", "w").close()
    sys.exit(128 + number)
signal.signal({int(number)}, hear)
open(f"ready{{rank}}", "w").close()
time.sleep(100)
"""

    def ask():
        until(lambda: all((tmp_path / f"ready{rank}").exists() for rank in (0, 1)))
        os.kill(os.getpid(), number)

    asking = threading.Thread(target=ask)
    asking.start()
    assert run(command(code), 2) == 128 + number
    asking.join()
    assert all((tmp_path / f"saved{rank}").exists() for rank in (0, 1))
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_while_the_ranks_are_being_started_ends_the_job(rank, monkeypatch):
    begin = ranks.start

    def start(words, here, *more):
        if here.rank == rank:
            os.kill(os.getpid(), signal.SIGTERM)
        return begin(words, here, *more)

    monkeypatch.setattr(ranks, "start", start)
    monkeypatch.setattr(ranks, "GRACE", 0.1)
    usual = signal.signal(signal.SIGTERM, lambda *_: pytest.fail("the signal was not passed on"))
    try:
        status = run(command("time.sleep(100)"), 2)
    except SystemExit as exit:
        status = exit.code
    finally:
        signal.signal(signal.SIGTERM, usual)
    assert status == 128 + signal.SIGTERM and len(ranks.running) == 2 * rank
    assert all(process.poll() is not None for process in ranks.running)


def test_no_rank_outlives_the_process_in_front_though_that_is_killed(tmp_path):
    """Rank 1 is still importing when the front dies."""
    code = """
from pathlib import Path
if rank == 1:
    Path("pid1").write_text(str(os.getpid()))
    while not Path("go").exists():
        time.sleep(0.02)
from whitenedcse.distributed import end_with_parent
end_with_parent()
Path(f"pid{rank}").write_text(str(os.getpid()))
time.sleep(60)
"""
    front = f"from whitenedcse.app.ranks import run; run({command(code)!r}, 2)"
    here = {"PYTHONPATH": str(Path(__file__).parents[1])}
    start = {"cwd": tmp_path, "env": os.environ | here, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", front], **start) as process:
        files = [tmp_path / f"pid{rank}" for rank in (0, 1)]
        until(lambda: all(path.exists() and path.read_text() for path in files))
        pids = [int(path.read_text()) for path in files]
        assert all(map(alive, pids))
        process.kill()
        said = process.stderr.read()  # to the end of the rank, whose standard error it is too
    assert said == f"error: process {process.pid}, which started this one, has ended; so does this one\n"
    until(lambda: not alive(pids[0]), 5)
    (tmp_path / "go").touch()
    until(lambda: not alive(pids[1]), 30)


@pytest.mark.parametrize(
    ("environment", "dies"),
    [
        ({}, 0),
        ({"RANK": "0", "WORLD_SIZE": "1"}, 0),
        ({"RANK": "1", "WORLD_SIZE": "2"}, 0),
        ({"FRONT": "7"}, 1),
    ],
)
def test_only_a_rank_that_was_started_here_ends_with_its_parent(monkeypatch, environment, dies):
    """A shell that has RANK and WORLD_SIZE set may go away."""
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.setattr(launch.hydra, "main", lambda **_: lambda script: lambda: script(None))
    monkeypatch.setattr(Hydra, "format_config_groups", None)
    for name, value in environment.items():
        monkeypatch.setenv("WHITENEDCSE_FRONT" if name == "FRONT" else name, value)
    called = []

    def train(config):
        called.append("ran")

    monkeypatch.setattr(ranks, "end_with_parent", lambda: called.append("watched"))
    launch.start(train)
    assert called == ["watched"] * dies + ["ran"]


SET = """
import signal, sys, threading, time
from whitenedcse.app import ranks
from whitenedcse.app.ranks import ending_when_asked, run
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a background job of a shell ignores
ranks.LIMIT = LIMIT
with ending_when_asked():
    CODE
"""


def asked_to_end(code, signals, ready, limit, folder):
    """The exit code and the words of a process that gets these signals once `ready`, and its time."""
    program = SET.replace("LIMIT = LIMIT", f"LIMIT = {limit}").replace("CODE", code)
    here = {"PYTHONPATH": str(Path(__file__).parents[1])}
    start = {"cwd": folder, "env": os.environ | here, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", program], **start) as process:
        try:
            until(ready)
            began = time.monotonic()
            for number in signals:
                process.send_signal(number)
                time.sleep(0.2)
            said = process.communicate(timeout=60)[1]
            return process.returncode, said, time.monotonic() - began
        finally:
            process.kill()


STOPS = """
signal.signal(signal.SIGINT, signal.SIG_IGN); signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(f"pid{rank}", "w").write(str(os.getpid()))
os.kill(os.getpid(), signal.SIGSTOP) if rank else None
open("waits", "w").close()
time.sleep(100)
"""


@pytest.mark.parametrize(
    ("signals", "limit", "status"),
    [
        pytest.param((signal.SIGINT,), 0.5, 130, id="Ctrl-C"),
        pytest.param((signal.SIGTERM,), 0.5, 143, id="SIGTERM"),
        pytest.param((signal.SIGINT,) * 2, 100, 130, id="Ctrl-C twice"),
    ],
)
@pytest.mark.slow
def test_a_stopped_rank_and_one_that_waits_for_it_are_ended_in_time(tmp_path, signals, limit, status):
    def stopped():
        return all((tmp_path / name).exists() for name in ("waits", "pid1"))

    code, said, seconds = asked_to_end(f"run({command(STOPS)!r}, 2)", signals, stopped, limit, tmp_path)
    assert code == status and seconds < 10
    late = f"error: rank 1 did not end within {limit} s of {signals[0].name}; killed now. {ranks.resumes}\n"
    assert said == ("" if len(signals) > 1 else late)
    pids = [int((tmp_path / f"pid{rank}").read_text()) for rank in (0, 1)]
    until(lambda: not any(map(alive, pids)), 5)


BLOCKED = """import ctypes, threading
    lock, c = ctypes.create_string_buffer(64), ctypes.CDLL(None)
    c.pthread_mutex_lock(lock)
    threading.Timer(0.5, lambda: open("waits", "w").close()).start()  # when the lock is waited for
    c.pthread_mutex_lock(lock)  # for ever
"""


def test_a_rank_that_ends_too_late_says_what_it_may_wait_for(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(ranks, "running", [])
    assert ranks.late("SIGTERM").startswith("error: this process did not end within ")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert ranks.late("SIGTERM").startswith(
        "error: this process, which may wait for a lost rank, did not end"
    )


@pytest.mark.parametrize("signals", [(signal.SIGINT,), (signal.SIGINT,) * 2], ids=["Ctrl-C", "Ctrl-C twice"])
@pytest.mark.slow(but=1)
def test_a_process_that_waits_within_a_library_is_ended_in_time(tmp_path, signals):
    """Its main thread comes back to Python for no signal, as in a collective."""
    limit = 100 if len(signals) > 1 else 0.5
    ready = (tmp_path / "waits").exists
    code, said, seconds = asked_to_end(BLOCKED, signals, ready, limit, tmp_path)
    assert code == 130 and seconds < 10
    late = f"error: this process did not end within {limit} s of SIGINT; killed now. {ranks.resumes}\n"
    assert said == ("" if len(signals) > 1 else late)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_child_that_is_stopped_ends_too(tmp_path, number):
    code = """import multiprocessing, os
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=[100], daemon=True)
    child.start()
    os.kill(child.pid, signal.SIGSTOP)
    open("pid", "w").write(str(child.pid))
    open("waits", "w").close()
    time.sleep(100)
"""
    code, said, seconds = asked_to_end(code, [number], (tmp_path / "waits").exists, 100, tmp_path)
    assert code == (-signal.SIGINT if number == signal.SIGINT else 143) and seconds < 10
    until(lambda: not alive(int((tmp_path / "pid").read_text())), 5)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_signal_within_a_finalizer_ends_the_process_too(tmp_path, number):
    """Python drops an exception that is raised there, and would print it."""
    code = """class Slow:
        def __del__(self):
            open("waits", "w").close()
            time.sleep(2)
    Slow()
    time.sleep(100)
"""
    code, said, seconds = asked_to_end(code, [number], (tmp_path / "waits").exists, 100, tmp_path)
    assert (code, said) == (143, "") and seconds < 10


def test_afterwards_signals_do_what_they_did(tmp_path):
    waits = "try:\n    while True: time.sleep(0.01)\nexcept KeyboardInterrupt: time.sleep(0.5)"
    later = "threading.Timer(0.3, lambda: open('waits', 'w').close()).start()"  # within the loop
    code = f"pass\n{later}\n{waits}"
    ready = (tmp_path / "waits").exists
    code, said, seconds = asked_to_end(code, [signal.SIGINT], ready, 0.3, tmp_path)
    assert (code, said) == (0, "") and seconds > 0.5


def test_a_rank_that_stays_stopped_is_named_and_ends_the_job(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(ranks, "GRACE", 0.1)
    monkeypatch.chdir(tmp_path)
    assert run(command(STOPS), 2, 0.5) == 124
    assert re.fullmatch(
        r"error: rank 1 \(process \d+\) was stopped for 0\.5 s \(trainer\.timeout\); the job is ended\. The"
        r" same command resumes from the last checkpoint\n",
        capfd.readouterr().err,
    )


def test_what_a_rank_says_of_another_is_said_once(capfd):
    code = "if rank:\n    sys.stderr.write('error: rank 0 is lost\\n')\n    sys.exit(124)\ntime.sleep(100)"
    assert run(command(code), 2) == 124
    assert capfd.readouterr().err == "error: rank 0 is lost\n"


def test_a_job_leaves_the_signals_as_they_were():
    before = [signal.getsignal(number) for number in SIGNALS]
    run(command("pass"), 2)
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_what_works_in_one_process_is_refused_in_several(monkeypatch):
    ranks.refuse("evaluate.py")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    ranks.refuse("evaluate.py")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"evaluate\.py works in one process; .* \(now 2 ranks\)"):
        ranks.refuse("evaluate.py")


@pytest.mark.parametrize(("cores", "given", "each"), [(8, None, 4), (1, None, 1), (9, None, 4), (8, "3", 3)])
def test_ranks_share_the_cores_unless_told_otherwise(cores, given, each, tmp_path, monkeypatch):
    monkeypatch.setattr(compute, "cores", lambda: cores)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    said = "import os; open(os.environ['RANK'], 'w').write(os.environ['OMP_NUM_THREADS'])"
    monkeypatch.chdir(tmp_path)
    assert run([sys.executable, "-c", said], 2) == 0
    assert [(tmp_path / rank).read_text() for rank in "01"] == [str(each)] * 2

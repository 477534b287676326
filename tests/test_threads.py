"""Work in parallel threads: in order, each thread on one core, no thread left behind by an error."""

import os
import runpy
import subprocess
import sys
import threading
import time

import pytest
import torch
from programs import ROOT

from whitenedcse.compute import each


@pytest.mark.parametrize("k", [1, 2, 3])
def test_results_come_in_order_whichever_is_ready_first(k, threaded):
    threaded(k)
    seen = set()

    def slow_at_first(i):
        seen.add(threading.get_ident())
        time.sleep(0.02 if i < 3 else 0)
        return i * i

    assert each(slow_at_first, range(20)) == [i * i for i in range(20)]
    assert len(seen) == k and (threading.get_ident() in seen) == (k == 1)


def test_each_thread_computes_on_one_core_and_the_others_keep_theirs(threaded):
    threaded(3)
    assert each(lambda _: torch.get_num_threads(), range(9)) == [1] * 9
    assert torch.get_num_threads() == 3
    found = []
    other = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    other.start()
    other.join()
    assert found == [3]  # of a thread that knows nothing of ours


def test_a_thread_that_first_computes_later_does_so_on_one_core(threaded):
    """PyTorch would let it have the number of that moment."""
    for k in (5, 6, 7):
        threaded(k)
        each(lambda _: time.sleep(0.05), range(2))  # the others have nothing to do
        threaded(9)
        threaded(k)
        found = each(lambda _: (time.sleep(0.02), torch.get_num_threads())[1], range(2 * k))
        assert found == [1] * 2 * k


@pytest.mark.parametrize("k", [1, 3])
def test_a_context_holds_in_every_thread_and_is_left_at_the_end(k, threaded):
    threaded(k)
    assert each(lambda _: torch.is_inference_mode_enabled(), range(6), torch.inference_mode) == [True] * 6
    assert each(lambda _: torch.is_inference_mode_enabled(), range(6)) == [False] * 6


@pytest.mark.parametrize("k", [1, 3])
def test_an_error_reaches_the_caller_and_what_has_not_begun_is_left_out(k, threaded):
    threaded(k)
    done = []

    def failing(i):
        if i == 2:
            raise ValueError("item 2")
        done.append(i)
        time.sleep(0.01)
        return i

    with pytest.raises(ValueError, match="item 2"):
        each(failing, range(1000))
    assert len(done) < 100
    assert each(lambda i: i, range(5)) == [0, 1, 2, 3, 4]  # the threads still work

    def broken():
        raise OSError("no context")

    with pytest.raises(OSError, match="no context"):
        each(lambda i: i, range(5), broken)


def test_one_item_is_no_work_for_threads(threaded):
    threaded(3)
    assert each(lambda _: threading.get_ident(), [0]) == [threading.get_ident()]
    assert each(lambda _: threading.get_ident(), [0, 1], threads=1) == [threading.get_ident()] * 2


@pytest.mark.slow
def test_without_omp_num_threads_all_cores_are_taken_and_a_forked_child_has_threads_of_its_own():
    code = """
import os, torch
from whitenedcse.compute import cores, each
print(cores(), flush=True)
torch.set_num_threads(2)
each(abs, range(4))
pid = os.fork()
os.write(1, f"{each(abs, range(4))}\\n".encode())  # in one piece, as both write
os._exit(0) if pid == 0 else os.waitpid(pid, 0)
"""
    free = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    command = [sys.executable, "-W", "ignore", "-c", code]
    said = subprocess.run(command, env=free, capture_output=True, text=True, timeout=60)
    assert said.stdout == f"{len(os.sched_getaffinity(0))}\n" + "[0, 1, 2, 3]\n" * 2, said.stderr


def test_threads_that_wait_sleep_unless_told_otherwise(monkeypatch):
    """Those that spin take the core that another process needs: four times as long beside one."""
    for given, expected in ((None, "PASSIVE"), ("ACTIVE", "ACTIVE")):
        monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
        if given:
            monkeypatch.setenv("OMP_WAIT_POLICY", given)
        runpy.run_path(str(ROOT / "whitenedcse/__init__.py"))
        assert os.environ["OMP_WAIT_POLICY"] == expected


@pytest.mark.parametrize("script", ["train", "evaluate"])
@pytest.mark.slow
def test_and_the_scripts_import_nothing_that_would_read_it_before(script):
    """Whether torch was imported before that was set."""
    env = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    code = (
        "import os, sys; from importlib.abc import MetaPathFinder\n"
        "class Watch(MetaPathFinder):\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'torch': print(os.environ.get('OMP_WAIT_POLICY'), flush=True); os._exit(0)\n"
        f"sys.meta_path.insert(0, Watch()); import {script}, torch"
    )
    assert subprocess.check_output([sys.executable, "-c", code], env=env, cwd=ROOT).decode() == "PASSIVE\n"

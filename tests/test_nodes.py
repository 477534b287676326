"""Training by torchrun on one machine and on two: network namespaces where the system allows."""

import os
import signal
import subprocess
import sys
from contextlib import suppress

import pytest
from programs import ROOT, alive, free_port, ranks, surroundings, until
from test_resume import amid, few, finished, last_step, outcome

pytestmark = pytest.mark.slow


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture(scope="module")
def machines():
    """Of each of two machines: its network (or "" for this one's), its address and its interface."""
    names = [f"w{os.getpid()}{letter}" for letter in "ab"]
    addresses = ["10.117.0.1", "10.117.0.2"]
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", names[0], "netns", names[0], "type", "veth", "peer", names[1], "netns", names[1])
        for name, address in zip(names, addresses, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", name)
            ip("-n", name, "link", "set", name, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names, addresses, names
    except (OSError, subprocess.CalledProcessError):  # no such program, or no right to
        yield ["", ""], ["127.0.0.1"] * 2, ["lo"] * 2
    finally:
        for name in names:
            with suppress(OSError, subprocess.CalledProcessError):
                ip("netns", "del", name)


@pytest.fixture
def agents(machines, tmp_path):
    """A function that starts torchrun on both machines; all that it has started is ended in any case."""
    networks, addresses, interfaces = machines
    begun = []

    def start(*words, restarts=0):
        port, pair = free_port(), []
        for node in range(2):
            command = ["ip", "netns", "exec", networks[node]] if networks[node] else []
            command += [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
            command += ["--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "job"]
            command += ["--rdzv-endpoint", f"{addresses[0]}:{port}", "--local-addr", addresses[node]]
            command += ["--rdzv-conf", f"is_host={1 - node}", "--max-restarts", f"{restarts}"]
            command += [str(ROOT / "train.py"), *few(tmp_path, 60), *words]
            more = {"GLOO_SOCKET_IFNAME": interfaces[node], "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
            with open(tmp_path / f"said{node}", "w") as said:
                streams = {"stdout": said, "stderr": said, "env": surroundings(tmp_path, more)}
                pair.append(subprocess.Popen(command, cwd=tmp_path, **streams))
        begun.extend(pair)
        return pair

    yield start
    for agent in begun:
        left = ranks(agent.pid) if agent.poll() is None else []
        agent.kill()
        agent.wait(60)
        for rank in left:
            with suppress(ProcessLookupError):
                os.kill(rank, signal.SIGKILL)


def between(pair, run):
    """The ids of both ranks as soon as this life of the run has written a checkpoint."""
    before = last_step(run / "checkpoints")
    until(lambda: last_step(run / "checkpoints") > before or any(agent.poll() for agent in pair), 120)
    assert [agent.poll() for agent in pair] == [None, None]
    return [rank for agent in pair for rank in ranks(agent.pid)]


def test_a_run_of_two_ranks_survives_a_lost_rank_a_lost_machine_and_a_replaced_rank(agents, tmp_path):
    """On one machine, then on two. What is said of a lost rank is in tests/app/test_start.py."""
    words, run = few(tmp_path, 60), tmp_path / "outputs" / "two"
    torchrun = ["torchrun", "--standalone", "--nproc-per-node", "2"]
    finished(tmp_path, *torchrun, str(ROOT / "train.py"), *words)
    (whole,) = (tmp_path / "outputs").glob("c-*")  # both ranks agreed on a name
    assert (tmp_path / "said").read_text().count("best checkpoint: ") == 1  # the first alone speaks

    with amid(tmp_path, "two", *words, "trainer.devices=2") as front:
        both = ranks(front.pid)
        os.kill(both[1], signal.SIGKILL)
        assert front.wait(30) == 128 + signal.SIGKILL
        assert not any(map(alive, both))

    pair = agents("run=two")
    lost = between(pair, run)[1]
    pair[1].kill()  # a machine: its agent, and the rank
    with suppress(ProcessLookupError):
        os.kill(lost, signal.SIGKILL)
    assert pair[0].wait(60) != 0  # the other one does not wait for ever
    assert not (run / "scores.json").exists()

    pair = agents("run=two", restarts=3)
    os.kill(between(pair, run)[1], signal.SIGKILL)  # which torchrun replaces, on both machines
    assert [agent.wait(200) for agent in pair] == [0, 0], (tmp_path / "said0").read_text()
    assert (tmp_path / "said0").read_text().count("resumes after step") >= 2
    assert outcome(run) == outcome(whole)

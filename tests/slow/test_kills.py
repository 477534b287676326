"""After kill -9 at any moment, the same command ends with the bits of a run that nothing disturbed.

KILLS=30 in the environment makes so many rounds in place of a few.
"""

import os
import random
import signal
import time
from functools import cache

import pytest
from programs import alive, ranks, until
from test_resume import ROOT, few, finished, home, last_step, outcome, started  # noqa: F401  home is a fixture

WRITES = ("checkpoints/draft*", "", ".best*", "", "checkpoints/.draft*", ".scores.json*")  # "": any moment
VICTIMS = ("all", "front", "rank 1", "rank 0")


def command(home):  # noqa: F811
    """train.py for 40 steps, evaluated four times; a kill comes in the first half, or at the end."""
    return [str(ROOT / "train.py"), *few(home, 40), "monitor.every=10"]


@pytest.fixture(scope="module")
def unkilled(home):  # noqa: F811
    """For one process and for two: what a run ends with."""

    @cache
    def run(processes):
        name = f"unkilled-{processes}"
        finished(home, *command(home), f"trainer.devices={processes}", f"run={name}")
        return outcome(home / "outputs" / name)

    return run


def logged(run):
    """How many rows metrics.csv has: one for each step, and one for each evaluation."""
    file = run / "metrics.csv"
    return file.read_bytes().count(b"\n") - 1 if file.exists() else -1


@pytest.mark.slow
@pytest.mark.parametrize("number", range(int(os.environ.get("KILLS", "2"))))
def test_a_killed_run_ends_as_one_that_is_not(home, unkilled, number):  # noqa: F811
    draw, processes = random.Random(number), 1 + number // 2 % 2
    write, victims = WRITES[number % len(WRITES)], VICTIMS[number // 3 % len(VICTIMS)]
    whole = unkilled(processes)
    run = home / "outputs" / f"round-{number}"
    words = [*command(home), f"trainer.devices={processes}", f"run={run.name}"]
    with started(home, *words) as front:
        ended = lambda: front.poll() is not None  # noqa: E731
        step = draw.randrange(20) if write != ".scores.json*" else 40
        until(lambda: ended() or logged(run) >= step, 600)
        time.sleep(draw.uniform(0, 0.1))
        until(lambda: ended() or not write or any(run.glob(write)) or logged(run) >= step + 10, 600)
        both = ranks(front.pid) if processes == 2 and not ended() else []
        chosen = {"front": [front.pid], "rank 0": both[:1], "rank 1": both[1:]}.get(victims)
        seen = write if write and any(run.glob(write)) else "training"
        amid = "of a run that had ended" if ended() else f"amid {seen}"
        print(victims, processes, logged(run), last_step(run / "checkpoints"), amid)  # noqa: T201  -rP shows it
        for pid in [front.pid, *both] if processes == 1 or chosen is None else chosen:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        until(lambda: ended() and not any(map(alive, both)), 60)
    finished(home, *words)
    assert outcome(run) == whole

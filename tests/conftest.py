"""The environment of the tests, and which of them are quick.

What tests are made of is in `encoders`, whose packages take seconds to import: the process that only starts
pytest's workers does without. A test marked `slow` runs with `make test-all`, and where its name is given; of
a parametrised one marked `slow(but=n)`, n cases spread evenly are quick.
"""
# ruff: noqa: E402 (the environment first: packages read it when they are imported)

import atexit
import logging
import os
import re
import shutil
import tempfile

# what the caller's shell or job says of ranks, threads, hubs, accounts and terminals is not for tests
FOREIGN = (
    "HF_ HUGGINGFACE_ TRANSFORMERS_ WANDB_ HYDRA_ SLURM_ SLURMD_ TORCHELASTIC_ MASTER_ LOCAL_ RANK WORLD_SIZE"
)
FOREIGN += " GROUP_RANK ROLE_ OMP_ MKL_ COLUMNS LINES NO_COLOR FORCE_COLOR CLICOLOR TTY_ WHITENEDCSE_"
for name in [name for name in os.environ if name.startswith(tuple(FOREIGN.split()))]:
    if name != "WHITENEDCSE_DATA":
        del os.environ[name]
OWN = tempfile.mkdtemp(prefix="whitenedcse-tests-")
atexit.register(shutil.rmtree, OWN, ignore_errors=True)
os.environ |= {"OMP_NUM_THREADS": "1", "HF_HOME": f"{OWN}/hub", "WHITENEDCSE_CACHE": f"{OWN}/cache"}
os.environ |= {"NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost"}

import gc
from collections import defaultdict
from functools import partial

import pytest

gc.set_threshold(50_000, 50, 50)  # collections of a session's many objects take a tenth of its time


def pytest_configure(config):
    if all("::" in words for words in config.args):
        config.option.markexpr = config.option.markexpr.replace("not slow", "")
    if config.option.collectonly or not config.option.numprocesses:
        config.pluginmanager.import_plugin("encoders")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Take the mark `slow` off the cases that stay quick."""
    cases = defaultdict(list)
    for item in items:
        if (mark := item.get_closest_marker("slow")) and mark.kwargs:
            cases[item.module, item.originalname, mark.kwargs["but"]].append(item)
    for (_, _, count), same in cases.items():
        for i in range(count):
            quick = same[i * len(same) // count]
            quick.own_markers = [mark for mark in quick.own_markers if mark.name != "slow"]


def pytest_collection_finish():
    """Leave what was imported and collected out of garbage collection, which each training asks for."""
    gc.collect()
    gc.freeze()
    gc.freeze = gc.unfreeze = lambda: None  # else a training would make it all count again


def pytest_terminal_summary(terminalreporter, config):
    if config.option.markexpr == "not slow":
        terminalreporter.write_line("The slow tests were left out; make test-all runs them too.")


@pytest.fixture(autouse=True)
def nothing_stays_of_a_script(monkeypatch):
    """Of one that was started in this process: its tracebacks, and its log in a folder that may be gone."""
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    before = [*logging.root.handlers]
    yield
    for handler in {*logging.root.handlers} - {*before}:
        logging.root.removeHandler(handler)
        handler.close()


@pytest.fixture
def disk(monkeypatch):
    """The files and folders that are flushed to the disk, by their paths, and "NAME named", in order."""
    told, sync = [], os.fsync

    def flushed(handle):
        told.append(re.sub(r"\.[\w.]+\.[^/]*\.new", "draft", os.readlink(f"/proc/self/fd/{handle}")))
        sync(handle)

    def named(move, source, target):
        told.append(f"{os.path.basename(target)} named")
        move(source, target)

    monkeypatch.setattr(os, "fsync", flushed)
    for name in ("replace", "rename"):
        monkeypatch.setattr(os, name, partial(named, getattr(os, name)))
    return told

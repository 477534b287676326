"""A process reads its place from its environment, agrees on a name, and does not outlive its parent."""

import os
import subprocess
import sys
import time

import pytest
import torch.distributed as dist
from programs import ROOT, until

from whitenedcse.distributed import Place, check_alone, is_first, placed, shared


def test_a_process_reads_its_place_from_its_environment(monkeypatch):
    cases = [
        ({}, None),
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}, Place(5, 8, 4, 1)),
        ({"RANK": "1", "WORLD_SIZE": "2"}, Place(1, 2, 2, 1)),
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "2"}, Place(5, 8, 4, 2)),
        ({"RANK": "1"}, None),
        ({"SLURM_NTASKS": "6", "SLURM_PROCID": "4", "SLURM_NNODES": "3"}, Place(4, 6, 2, 0)),
        ({"SLURM_NTASKS": "2", "SLURM_PROCID": "1"}, Place(1, 2, 2, 1)),
        ({"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, None),
        ({"SLURM_NTASKS": "4"}, None),  # sbatch without srun
        ({"RANK": "0", "WORLD_SIZE": "2", "SLURM_NTASKS": "4", "SLURM_PROCID": "3"}, Place(0, 2, 2)),
    ]
    for environment, place in cases:
        with monkeypatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            assert placed() == place and is_first() == (place is None or place.rank == 0)
            if place is not None:
                with pytest.raises(ValueError, match=rf"evaluate.py works in one .* {place.world} ranks"):
                    check_alone("evaluate.py")
    check_alone("evaluate.py")


def test_ranks_agree_on_the_first_ones_value(monkeypatch):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "2"}
    for name, value in (environment | {"MASTER_PORT": str(store.port)}).items():
        monkeypatch.setenv(name, value)
    for rank in (0, 1):
        monkeypatch.setenv("RANK", str(rank))
        assert shared("x", f"of rank {rank}") == "of rank 0"
    monkeypatch.setenv("RANK", "0")
    assert shared("x", "after a restart") == "of rank 0"
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    with pytest.raises(ValueError, match="add run=NAME"):
        shared("x", "y")


CHILD = """
import os, sys, time
from pathlib import Path
from whitenedcse.distributed import end_with_parent
end_with_parent()
Path("child").write_text(str(os.getpid()))
time.sleep(60)
"""
PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"


def test_a_rank_ends_soon_after_its_parent_was_killed(tmp_path):
    start = {"cwd": tmp_path, "env": os.environ | {"PYTHONPATH": str(ROOT)}, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", PARENT, CHILD], **start) as parent:
        until((tmp_path / "child").exists)
        parent.kill()
        begun = time.monotonic()
        parent.stderr.read()  # to the end of the child, whose standard error it is too
    assert time.monotonic() - begun < 30

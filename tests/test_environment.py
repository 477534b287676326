"""The suite is the same whatever the caller's shell holds."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HOSTILE = {"HF_HUB_OFFLINE": "1", "HF_ENDPOINT": "http://127.0.0.1:9", "TRANSFORMERS_OFFLINE": "1"}
HOSTILE |= {
    "WANDB_MODE": "disabled",
    "WANDB_API_KEY": "x",
    "WANDB_PROJECT": "theirs",
    "HTTP_PROXY": "http://127.0.0.1:9",
}
HOSTILE |= {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}
HOSTILE |= {"SLURM_NTASKS": "4", "SLURM_PROCID": "3", "OMP_NUM_THREADS": "7", "HYDRA_FULL_ERROR": "1"}
HOSTILE |= {"WHITENEDCSE_CACHE": "/nowhere", "NO_COLOR": "1", "COLUMNS": "20"}


@pytest.mark.slow
def test_tests_pass_in_an_environment_that_says_otherwise():
    """Of the hub, of the dashboard, of ranks and of threads."""
    names = ["test_place.py", "test_sources.py"]
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "not slow", "-p", "no:cacheprovider"]
    folder = Path(__file__).parent
    done = subprocess.run(
        [*command, *(str(folder / name) for name in names)],
        cwd=folder.parent,
        env={**os.environ, **HOSTILE, "PROGRAMS_SERVER": ""},  # its own, in this environment
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-5000:]

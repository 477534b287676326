"""The suite is the same whatever the caller's shell holds."""

import json
import os
import subprocess
import sys
from pathlib import Path

HOSTILE = {"HF_HUB_OFFLINE": "1", "HF_ENDPOINT": "http://127.0.0.1:9", "TRANSFORMERS_OFFLINE": "1"}
HOSTILE |= {"WANDB_MODE": "disabled", "WANDB_API_KEY": "x", "WANDB_PROJECT": "theirs", "NO_PROXY": "x"}
HOSTILE |= {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}
HOSTILE |= {"SLURM_NTASKS": "4", "SLURM_PROCID": "3", "OMP_NUM_THREADS": "7", "HYDRA_FULL_ERROR": "1"}
HOSTILE |= {"WHITENEDCSE_CACHE": "/nowhere", "NO_COLOR": "1", "COLUMNS": "20"}


def test_tests_see_nothing_of_what_the_callers_shell_says():
    """Of the hub, of the dashboard, of ranks and of threads: the environment after conftest is the same."""
    code = "import json, os, conftest\nprint(json.dumps(dict(os.environ)).replace(conftest.OWN, 'OWN'))"
    found = []
    for more in ({}, HOSTILE):
        env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(Path(__file__).parent)} | more
        found.append(json.loads(subprocess.check_output([sys.executable, "-c", code], env=env)))
    assert found[0] == found[1] and found[0]["OMP_NUM_THREADS"] == "1"

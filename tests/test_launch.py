"""Starting a script."""

import ctypes
import subprocess
import sys

import pytest

JOB = """
from whitenedcse import launch

kept, seen = [], []

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

def script():
    blocks = [bytearray(b"x") * 100_000 for _ in range(3000)]  # below what malloc maps by itself
    kept.append(blocks.pop())  # on top of the heap, so that to free alone gives nothing back
    blocks.clear()
    seen.append(resident())
    if FAILS:
        raise KeyError

before = resident()
try:
    launch.job(script)()
except KeyError:
    pass
print(seen[0] - before, resident() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
@pytest.mark.parametrize("fails", [False, True])
def test_what_a_job_frees_is_free_for_the_next_one(fails):
    if not hasattr(ctypes.CDLL(None), "malloc_trim"):
        pytest.skip("this C library has no malloc_trim")
    code = JOB.replace("FAILS", str(fails))
    said = subprocess.check_output([sys.executable, "-c", code], text=True)  # a heap without holes
    at_end, afterwards = map(int, said.split())
    assert at_end > 200e6 and afterwards < 100e6

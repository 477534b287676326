"""Starting a script."""

import ctypes
import sys

import pytest

from whitenedcse import launch


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
@pytest.mark.parametrize("fails", [False, True])
def test_what_a_job_frees_is_free_for_the_next_one(fails):
    if not hasattr(ctypes.CDLL(None), "malloc_trim"):
        pytest.skip("this C library has no malloc_trim")
    kept, seen = [], []

    def script():
        blocks = [bytearray(b"x") * 100_000 for _ in range(3000)]  # below what malloc maps by itself
        kept.append(blocks.pop())  # on top of the heap, so that free alone gives nothing back
        blocks.clear()
        seen.append(resident())
        if fails:
            raise KeyError("a job that fails")

    before = resident()
    try:
        launch.job(script)()
    except KeyError:
        assert fails
    assert seen[0] - before > 200e6 and resident() - before < 100e6

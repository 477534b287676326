"""Starting a script."""

import ctypes
import subprocess
import sys

import pytest

from whitenedcse.app import launch

JOB = """
from whitenedcse.app import launch

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


@pytest.mark.parametrize(
    "error",
    [
        TypeError(
            "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64."
        ),
        NotImplementedError("The operator 'aten::x' is not currently implemented for the MPS device."),
        RuntimeError("Placeholder storage has not been allocated on MPS device!"),
    ],
)
def test_what_an_apple_gpu_lacks_is_one_line_with_the_way_out(error, capsys):
    def script():
        raise error

    with pytest.raises(SystemExit) as ended:
        launch.job(script)()
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.count("\n") == 1
    assert said.startswith("error: this does not work on an Apple GPU (") and str(error) in said
    assert "use trainer.accelerator=cpu" in said


def test_other_errors_keep_their_traceback():
    def script():
        raise TypeError("COMPS of another kind")

    with pytest.raises(TypeError, match="COMPS"):
        launch.job(script)()

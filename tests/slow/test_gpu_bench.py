"""bench.gpu at its tiny size: its first stages give what bench/gpu.md says must hold, but times."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    out = tmp_path_factory.mktemp("gpu") / "out.json"
    subprocess.run(
        [sys.executable, "-m", "bench.gpu", out, "--cpu", "--only", "abcd"], cwd=ROOT, check=True, timeout=600
    )
    return json.loads(out.read_text())


@pytest.mark.slow
def test_the_numerical_stages_give_what_must_hold(found):
    assert list(found) == ["a", "seconds", *"bcd"]
    assert all("error" not in found[stage] for stage in "abcd")
    for case, errors in found["b"].items():
        assert max(errors[name] for name in ("out", "dq", "dk", "dv")) < 1e-5
        assert errors["kept"] == pytest.approx(0.9 if "0.1" in case else 1.0, abs=0.01)
    for batches in ("packed", "padded"):
        far, near = found["c"][f"{batches} bf16-mixed"], found["c"][f"{batches} 32-true"]
        assert near["loss"] < 1e-5 and near["gradient"] < 1e-4 and near["encode"] < 1e-5
        assert 1e-3 < far["gradient"] < 0.2 and far["worst cosine of vectors"] > 0.999
    assert found["d"]["waits in 5 steps"] == []

"""bench.gpu at its tiny size: every stage gives what bench/gpu.md says must hold, but times."""

import json

import pytest
from programs import started


@pytest.mark.slow
def test_every_stage_gives_what_must_hold(tmp_path):
    done = started("bench/gpu.py", out := tmp_path / "out.json", "--cpu", cwd=tmp_path, seconds=600)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert list(found) == ["a", "seconds", *"bcdefghi"]
    assert all("error" not in found[stage] for stage in "abcdefgh")
    for case, errors in found["b"].items():
        assert max(errors[name] for name in ("out", "dq", "dk", "dv")) < 1e-5
        assert errors["kept"] == pytest.approx(0.9 if "0.1" in case else 1.0, abs=0.01)
    for batches in ("packed", "padded"):
        far, near = found["c"][f"{batches} bf16-mixed"], found["c"][f"{batches} 32-true"]
        assert near["loss"] < 1e-5 and near["gradient"] < 1e-4 and near["encode"] < 1e-5
        assert 1e-3 < far["gradient"] < 0.2 and far["worst cosine of vectors"] > 0.999
    assert found["d"]["waits in 5 steps"] == []
    speeds = [row for rows in found["e"].values() for row in rows.values()]
    assert len(speeds) == 8 and all(row["ms"] > 0 and "error" not in row for row in speeds)
    assert [found["f"][run]["status"] for run in ("whole", "stopped", "resumed")] == [0, 143, 0]
    assert found["f"]["largest difference of weights"] == 0
    assert found["g"]["minutes"]["packed"] > 0 and 0 < found["g"]["their share"] < 1
    assert found["h"]["gradient"] < 1e-5
    for how, said in {"raises": "RuntimeError: a rank that raises", "sleeps": "Timed out waiting"}.items():
        job = found["h"][how]
        assert job["status"] == 1 and job["seconds from failure to its last line"] < 60
        assert any(said in line for line in found["h"][how]["said"])

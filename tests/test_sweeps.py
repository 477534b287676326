"""A sweep is many runs: each with its own settings on every rank, none run twice, none lost by a kill."""

import importlib.util
import json
import sys
from itertools import pairwise

import pytest
from programs import ROOT, started, started_anew
from test_scripts import TINY

SMALL = [*TINY, "encoder.width=48", "trainer.max_steps=4", "tasks=none", "data=file", "data.batch_size=16"]
SMALL += ["monitor.dev=pairs.tsv", "data.corpus=corpus.txt", "encoder.vocabulary=200"]
SPY = """
import os
from whitenedcse.training.module import adamw

def spied(parameters, *, lr, **settings):
    with open(os.environ["SPIED"], "a") as file:
        file.write(f"{lr!r} {os.environ.get('RANK')} {os.environ.get('WORLD_SIZE')}\\n")
    with open(os.environ["SPIED"] + "-gpus", "a") as file:
        file.write(f"{os.environ.get('CUDA_VISIBLE_DEVICES')}\\n")
    return adamw(parameters, lr=lr, **settings)
"""
TWO_GPUS = """
from torch import cuda

cuda.device_count, cuda.get_device_name = (lambda: 2), "GPU {}".format
"""
needs = {
    name: pytest.mark.skipif(not importlib.util.find_spec(f"hydra_plugins.{module}"), reason=f"no {module}")
    for name, module in {"optuna": "hydra_optuna_sweeper", "joblib": "hydra_joblib_launcher"}.items()
}


@pytest.fixture(autouse=True)
def corpus(tmp_path):
    """A few sentences and pairs: what is tried here is not what they teach."""
    words = [f"{a}{b}" for a in ("ba", "ko", "mi", "su", "te") for b in ("na", "ri", "lo", "du", "pe")]
    lines = [" ".join(words[i * j % 25] for j in range(2, 4 + i % 7)) for i in range(1, 101)]
    (tmp_path / "corpus.txt").write_text("\n".join(lines))
    pairs = [f"{i % 6}\t{a}\t{b}\n" for i, (a, b) in enumerate(pairwise(lines))]
    (tmp_path / "pairs.tsv").write_text("score\tsentence1\tsentence2\n" + "".join(pairs))


def jobs(cwd, name="sweep"):
    return sorted(path.parent for path in (cwd / "outputs" / name).glob("*/scores.json"))


@pytest.mark.slow
def test_every_rank_of_a_job_has_its_configuration(tmp_path):
    (tmp_path / "spy.py").write_text(SPY)
    (tmp_path / "mine/experiment").mkdir(parents=True)
    (tmp_path / "mine/experiment/own.yaml").write_text("# @package _global_\noptim:\n  _target_: spy.spied\n")
    arguments = ["-m", "--config-dir", "mine", *SMALL, "+experiment=own", "optim.lr=0.001,0.002", "run=sweep"]
    arguments += ["trainer.devices=2"]
    environment = {"SPIED": str(tmp_path / "spied"), "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    result = started("train.py", *arguments, cwd=tmp_path, **environment)
    assert result.returncode == 0, result.stderr
    rates = [json.loads((job / "versions.json").read_text())["processes"] for job in jobs(tmp_path)]
    assert rates == [2, 2]
    seen = {}
    for line in (tmp_path / "spied").read_text().splitlines():
        lr, rank, world = line.split()
        seen.setdefault(lr, []).append((rank, world))
    assert len(seen) == 2  # one configuration a job, and both ranks of the job have it
    assert [sorted(ranks) for ranks in seen.values()] == [[("0", "2"), ("1", "2")]] * 2
    assert not any((job / "checkpoints").exists() for job in jobs(tmp_path))


@pytest.mark.slow
def test_a_job_that_fails_does_not_keep_the_others_from_the_report(tmp_path):
    """Of a sweep over corpora, without a name, which all have the same folder."""
    (tmp_path / "two.txt").write_text((tmp_path / "corpus.txt").read_text())
    swept = ["optim.lr=0.001,1e30", "data.corpus=corpus.txt,two.txt"]
    result = started("train.py", "-m", *SMALL, *swept, cwd=tmp_path)
    assert result.returncode == 2
    (folder,) = (tmp_path / "outputs").iterdir()
    *lines, last = result.stderr.splitlines()
    failed = f"error: outputs/{folder.name}/{{}}: the loss is not finite at step 2; there is no"
    assert [line.startswith(failed.format(job)) for line, job in zip(lines, (1, 3), strict=True)] == [
        True
    ] * 2
    assert last == "error: 2 of 4 jobs failed, as said above"
    assert [path.name for path in jobs(tmp_path, folder.name)] == ["0", "2"]
    assert "groups of runs" in result.stdout and (folder / "report.html").exists()


@needs["optuna"]
@pytest.mark.slow
def test_a_search_maximises_the_dev_score_and_resumes(tmp_path):
    arguments = ["-m", *SMALL, "+sweep=search", "run=search"]
    first = started("train.py", *arguments, "hydra.sweeper.n_trials=1", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    more = started("train.py", *arguments, "hydra.sweeper.n_trials=2", cwd=tmp_path)
    assert more.returncode == 0, more.stderr
    assert more.stdout.count("is finished and not changed") == 1
    best = [json.loads((job / "scores.json").read_text())["dev"]["best"] for job in jobs(tmp_path, "search")]
    assert len(best) == 2
    said = (tmp_path / "outputs" / "search" / "optimization_results.yaml").read_text()
    assert f"best_value: {max(best)}" in said


@needs["joblib"]
@pytest.mark.slow
def test_jobs_run_at_a_time_as_they_do_one_by_one(tmp_path):
    (tmp_path / "spy.py").write_text(SPY)
    (tmp_path / "sitecustomize.py").write_text(TWO_GPUS)
    environment = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "TMPDIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": "0,1"}
    environment["SPIED"] = str(tmp_path / "spied")
    command = [str(ROOT / "train.py"), "-m", *SMALL, "seed=1,2", "optim._target_=spy.spied", "optim.lr=0.001"]
    apart = started(*command, "run=apart", cwd=tmp_path, **environment)
    joblib = [*command, "hydra/launcher=joblib", "run=together"]
    together = started_anew(sys.executable, *joblib, cwd=tmp_path, **environment)
    for result in (apart, together):
        assert result.returncode == 0, result.stderr
        assert "Trainer.fit" not in result.stdout + result.stderr  # as quiet as one by one
    for result, name in ((apart, "apart"), (together, "together")):
        assert "groups of runs" in result.stdout
        assert f"written: outputs/{name}/report.html, outputs/{name}/seeds.csv" in result.stdout
        assert (tmp_path / "outputs" / name / "report.html").exists()
    scores = [
        [(job / "scores.json").read_bytes() for job in jobs(tmp_path, n)] for n in ("apart", "together")
    ]
    assert len(scores[0]) == 2 and scores[0] == scores[1]
    one, other, *each = (tmp_path / "spied-gpus").read_text().split()
    assert one == other == "0,1" and sorted(each) == ["0", "1"]
    assert together.stdout.count("2 jobs at a time, each on a GPU of its own") == 1

"""What Weights & Biases gets of a run, read back with its own reader, and the view that draws it."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from encoders import nowhere
from lightning.pytorch.utilities import rank_zero_only
from wandb.util import get_core_path

from whitenedcse.app import cli
from whitenedcse.training.dashboard import wandb_logger

SERIES = {"train/loss", "train/lr", "dev/spearman", "dev/whitened_on_dev_k16"}
CONFIG = {"seed": 7, "encoder": {"_target_": "whitenedcse.model.scratch.small_bert", "layers": 2}}
VERSIONS = {"experiment": None, "system": "no_whitening", "seed": 7, "commit": "abc+changes"}
SCORES = {
    "dev": {"best": 4.0},
    "headline": "all",
    "rows": [
        {"name": name, "sts": {"tasks": {"A": {"all": a, "mean": 0.0}}, "avg": {"all": a, "mean": 0.0}}}
        for name, a in (("as it is", 70.5), ("whitened (target)", None))
    ],
}


def logger_of(run, **settings):
    """The logger of a run directory as training finds it."""
    run.mkdir(parents=True, exist_ok=True)
    (run / "config.yaml").write_text(json.dumps(CONFIG))
    (run / "versions.json").write_text(json.dumps(VERSIONS))
    return wandb_logger(**({"project": "p", "entity": None, "artifacts": False} | settings), run=run)


@pytest.fixture
def bare(monkeypatch, tmp_path):
    """An environment without account and settings, and one line an error."""
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_ENTITY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))  # where ~/.netrc is
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    return monkeypatch


def test_series_settings_scores_and_the_best_checkpoint_come_back(bare, tmp_path):
    command = [get_core_path(), "leet", "inspect", "--no-observability", "--json"]  # of `wandb leet inspect`
    bare.setenv("WANDB_MODE", "offline")
    run = tmp_path / "table3" / "0"
    (run / "best").mkdir(parents=True)
    (run / "best" / "weights").write_text("w")
    (run.parent / "multirun.yaml").write_text("")
    logger = logger_of(run, artifacts=True)
    for step, value in ((0, 5.0), (2, 3.0), (4, 4.0)):
        logger.log_metrics(dict.fromkeys(SERIES, value), step=step)
    logger.finish(run / "best", SCORES)
    (folder,) = (run / "wandb").glob("offline-run-*")
    (log,) = folder.glob("*.wandb")
    printed = [
        subprocess.run([*command, *more, "--run-file", log, run / "wandb"], capture_output=True, text=True)
        for more in ([], ["--summary"])
    ]
    if printed[0].returncode:
        pytest.skip("this version of wandb has no `wandb leet inspect`")
    records = [json.loads(line) for line in printed[0].stdout.splitlines()]
    history = [record["history"]["item"] for record in records if record["type"] == "history"]
    for name in SERIES:
        found = [(line["trainer/global_step"], line[name]) for line in history if name in line]
        assert found == [(0, 5.0), (2, 3.0), (4, 4.0)], name
    whole = json.loads(printed[1].stdout)
    assert {name: whole["config"][name] for name in CONFIG | VERSIONS} == VERSIONS | CONFIG
    assert whole["summary"]["dev/best"] == 4  # of scores.json: the highest was before training
    (begun,) = [record["run"] for record in records if record["type"] == "run"][:1]
    assert (begun["run_group"], begun["display_name"]) == ("table3", "table3/0")
    (path,) = (folder / "files" / "media" / "table").glob("final_*.table.json")
    table = json.loads(path.read_text())
    assert table["columns"] == ["row", "A", "avg"]
    assert table["data"] == [["as it is", 70.5, 70.5], ["whitened (target)", None, None]]
    artifacts = (record["artifact"] for record in records if record["type"] == "artifact")
    made = {artifact["type"]: artifact for artifact in artifacts}
    assert [file["path"] for file in made["model"]["manifest"]["contents"]] == ["weights"]
    (waiting,) = made["run_table"]["manifest"]["contents"]  # for `wandb sync`
    assert Path(waiting["local_path"]).is_file()
    again = logger_of(run)
    assert again._id == logger._id  # a run that resumes is the same run there
    again.finalize("failed")


def test_a_job_after_one_that_failed_is_a_run_of_its_own(bare, tmp_path):
    bare.setenv("WANDB_MODE", "offline")
    logger_of(tmp_path / "0").finalize("failed")
    logger = logger_of(tmp_path / "1")
    assert logger.experiment.id == logger._id
    logger.experiment.finish()


def test_ranks_but_the_first_write_and_ask_nothing(bare, tmp_path):
    bare.setattr(rank_zero_only, "rank", 1)
    bare.setenv("WANDB_BASE_URL", nowhere())
    logger = wandb_logger(project="p", entity=None, artifacts=False, run=tmp_path / "run")
    logger.log_metrics({"train/loss": 1.0}, step=1)
    logger.finish(tmp_path / "run" / "best", SCORES)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_server_that_does_not_answer_ends_in_one_line_before_training(bare, tmp_path):
    bare.setenv("WANDB_API_KEY", "k" * 40)
    bare.setenv("WANDB_BASE_URL", nowhere())
    bare.setenv("WANDB_INIT_TIMEOUT", "2")
    with pytest.raises(ValueError, match="^logger=wandb: .*WANDB_MODE=offline"):
        logger_of(tmp_path / "run")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # wandb-workspaces is written for pydantic 1
def test_the_view_is_made_and_without_a_server_or_the_package_one_line_says_what_to_do(bare, capsys):
    ws = pytest.importorskip("wandb_workspaces.workspaces", exc_type=ImportError)
    seen = []
    bare.setenv("WANDB_ENTITY", "me")
    gone = lambda self: seen.append(self) or (_ for _ in ()).throw(OSError("gone"))  # noqa: E731
    bare.setattr(ws.Workspace, "save", gone)
    assert cli.main(["dashboard", "mine"]) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and "the view of 'mine' was not saved: gone" in line
    lines = [panel for section in seen[0].sections for panel in section.panels]
    patterns = [line.metric_regex for line in lines if getattr(line, "metric_regex", None)]
    assert all(any(re.search(pattern, name) for pattern in patterns) for name in SERIES)
    bare.setitem(sys.modules, "wandb_workspaces.workspaces", None)
    assert cli.main(["dashboard", "mine"]) == 2
    assert "pip install wandb-workspaces" in capsys.readouterr().err

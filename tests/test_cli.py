"""The command line: exit statuses, errors of one line, and nothing heavy before a command needs it."""

import csv
import os
import signal
import subprocess
import sys

import pytest
import rich
from encoders import nowhere
from evaluation.test_doctor import copy, edited
from report.test_published import conditions, run
from test_sources import hub, root  # noqa: F401 (fixtures)

from whitenedcse.app import cli


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    """Tables of 200 columns, on the standard output of the test."""
    monkeypatch.setattr(rich, "_console", None)
    monkeypatch.setenv("COLUMNS", "200")


def test_help_comes_without_the_heavy_packages():
    code = """
import sys
from whitenedcse.app import cli
try:
    cli.main(["--help"])
except SystemExit as end:
    assert end.code == 0
light = {"numpy", "huggingface_hub", "hydra"} & set(sys.modules)
cli.main(["train", "--help"])
print(sorted(light | {"torch", "transformers", "lightning", "datasets"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]" and "usage: whitenedcse" in done.stdout


def test_a_folder_of_the_clones_name_does_not_hide_the_package(tmp_path):
    """Python is started in the folder that holds the clone."""
    (tmp_path / "whitenedcse" / "data").mkdir(parents=True)
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    code = "import whitenedcse, whitenedcse.data.remote; print(whitenedcse.__all__[0])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=env)
    assert (done.stdout, done.stderr) == ("ContrastiveLoss\n", "")


def test_a_wrong_command_has_the_words_of_argparse(capsys):
    for words, said in {
        "": "the following arguments are required: COMMAND",
        "encode a b c --processes 0": "argument --processes: 0 must be 1 or more",
        "export m o --to onnx --whiten f --whiten-on c": "not allowed with argument --whiten",
    }.items():
        with pytest.raises(SystemExit) as end:
            cli.main(words.split())
        assert end.value.code == 2 and said in capsys.readouterr().err


def test_ctrl_c_is_no_traceback(monkeypatch):
    monkeypatch.setattr(cli.console, "ending_when_asked", lambda: signal.raise_signal(signal.SIGINT))
    assert cli.main(["data", "check"]) == 130


def test_a_traceback_only_if_asked_for(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such folder"):
        cli.main(["data", "check", str(tmp_path / "nowhere"), "--debug"])


def test_check_is_1_for_what_is_wrong_and_0_for_what_is_missing(root, tmp_path, capsys):  # noqa: F811
    assert cli.main(["data", "check", str(tmp_path)]) == 0
    assert capsys.readouterr().out.endswith("0 ok, 0 differs, 0 wrong, 23 missing\n")
    copy(root, "rte", "MR/")
    assert cli.main(["data", "check"]) == 0  # in the data roots
    assert "2 differs, 0 wrong, 21 missing" in capsys.readouterr().out
    edited(root / "rte/dev.tsv", 2, "[/x] no columns")
    assert cli.main(["data", "check", str(root)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "0 ok, 1 differs, 1 wrong, 21 missing"
    assert sum(line.startswith(f"RTE: wrong: {root}/rte/dev.tsv is damaged ") for line in lines) == 1
    for row in ("RTE - 277 wrong", "MR 10,662 10,662 differs"):
        assert row.split() in [line.split() for line in lines]


@pytest.mark.parametrize("name", ["senteval", "nli"])
def test_a_fetch_that_fails_is_one_line_and_2(root, hub, monkeypatch, capsys, name):  # noqa: F811
    if name == "nli":
        monkeypatch.setenv("HF_ENDPOINT", nowhere())
    assert cli.main(["data", "fetch", name]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {name}: ") and error.count("\n") == 1
    assert "could not be downloaded" in error
    assert ("monitor=held_out or monitor.dev=FILE" in error) == (name == "senteval")


def test_report_finds_runs_in_outputs(tmp_path, capsys, monkeypatch):
    label = "BERT-base: AVG, L1+L12"
    run(tmp_path / "outputs/run", conditions("WhiteningBERT/T1", label))
    monkeypatch.chdir(tmp_path)
    assert cli.main(["report", "WhiteningBERT/T1", "--to", "csv"]) == 0
    ours = [row for row in csv.DictReader(capsys.readouterr().out.splitlines()) if row[""] == "ours"]
    assert [(row["row"], row["Avg"]) for row in ours] == [(label, "153.00")]

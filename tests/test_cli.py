"""The command line: exit statuses, errors of one line, and nothing heavy before a command needs it."""

import csv
import json
import os
import subprocess
import sys

import pytest
import rich
from encoders import nowhere
from evaluation.test_doctor import copy, edited
from test_sources import hub, root  # noqa: F401 (fixtures)

from whitenedcse.app import cli

STS = ("STS12", "STS13", "STS14", "STS15", "STS16", "STS-B", "SICK-R")


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
        "dato": "argument COMMAND: invalid choice: 'dato' (choose from ",
        "encode a b c --processes 0": "argument --processes: 0 must be 1 or more",
        "encode M a.txt out --dims 3": "whitenedcse encode: error: unrecognized arguments: --dims 3",
        "whiten fit M a.txt f --kind ica": "argument --kind: invalid choice: 'ica' (choose from 'whitening'",
        "export m o --to onnx --whiten f --whiten-on c": "not allowed with argument --whiten",
    }.items():
        with pytest.raises(SystemExit) as end:
            cli.main(words.split())
        assert end.value.code == 2 and said in capsys.readouterr().err


def test_ctrl_c_is_no_traceback(monkeypatch):
    def interrupted(arguments):
        raise KeyboardInterrupt

    monkeypatch.setitem(cli.COMMANDS, "data check", (interrupted, *cli.COMMANDS["data check"][1:]))
    assert cli.main(["data", "check"]) == 130


def test_a_traceback_only_if_asked_for(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such folder"):
        cli.main(["data", "check", str(tmp_path / "nowhere"), "--debug"])


def test_check_is_1_for_what_is_wrong_and_0_for_what_is_missing(root, tmp_path, capsys):  # noqa: F811
    assert cli.main(["data", "check", str(tmp_path)]) == 0
    assert capsys.readouterr().out.endswith("0 ok, 0 differs, 0 wrong, 23 missing\n")
    copy(root, "rte")
    assert cli.main(["data", "check"]) == 0  # in the data roots
    assert "1 differs, 0 wrong, 22 missing" in capsys.readouterr().out
    edited(root / "rte/dev.tsv", 2, "[/x] no columns")
    assert cli.main(["data", "check", str(root)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "0 ok, 0 differs, 1 wrong, 22 missing"
    assert sum(line.startswith(f"RTE: wrong: {root}/rte/dev.tsv:2: ") for line in lines) == 1
    assert ["RTE", "dev.tsv", "-", "277", "wrong"] in [line.split() for line in lines]


@pytest.mark.parametrize("name", ["senteval", "nli"])
def test_a_fetch_that_fails_is_one_line_and_2(root, hub, monkeypatch, capsys, name):  # noqa: F811
    if name == "nli":
        monkeypatch.setenv("HF_ENDPOINT", nowhere())
    assert cli.main(["data", "fetch", name]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {name}: ") and error.count("\n") == 1
    assert "could not be downloaded" in error
    assert ("monitor=held_out or monitor.dev=FILE" in error) == (name == "senteval")


def evaluated(folder):
    """What evaluate.py leaves of an encoder in `mine/`, all scores 60."""
    scores = {name: {mean: 60.0 for mean in ("all", "mean", "wmean")} for name in STS}
    row = {"name": "mean L1+last", "pooling": "mean over layers [1, -1]", "sts": {"tasks": scores}}
    folder.mkdir(parents=True)
    content = {"model": "mine", "protocol": "whiteningbert", "headline": "mean"}
    content["encoder"] = {"path": "mine", "commit": None, "architecture": "bert 12 x 768"}
    content |= {"case": "lower_but_sick", "max_length": 128, "extra": 0.01, "bf16": False}
    content["rows"] = [row | {"postprocess": {}, "fit": ""}]
    (folder / "scores.json").write_text(json.dumps(content))
    return folder


def test_report_finds_runs_in_outputs(tmp_path, capsys, monkeypatch):
    evaluated(tmp_path / "outputs" / "run")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["report", "WhiteningBERT/T1", "--to", "markdown"]) == 0  # a model of another name
    out = capsys.readouterr().out
    assert "| published |" in out and "| ours |" not in out and "to make" in out and "| near miss |" in out
    for file in tmp_path.rglob("scores.json"):
        file.write_text(file.read_text().replace('"mine"', '"bert-base-uncased"'))
    assert cli.main(["report", "WhiteningBERT/T1", "--to", "csv"]) == 0
    ours = [row for row in csv.DictReader(capsys.readouterr().out.splitlines()) if row[""] == "ours"]
    assert [(row["row"], row["Avg"]) for row in ours] == [("BERT-base: AVG, L1+L12", "60.00")]

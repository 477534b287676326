"""The command line: exit statuses, errors of one line, and nothing heavy before a command needs it."""

import subprocess
import sys
from pathlib import Path

import pytest
import rich
from conftest import nowhere
from test_doctor import copy, edited
from test_sources import TEXT, hub, root  # noqa: F401 (fixtures)

from whitenedcse import cli

PACKAGE = Path(cli.__file__).parent


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    """Tables of 200 columns, on the standard output of the test."""
    monkeypatch.setattr(rich, "_console", None)
    monkeypatch.setenv("COLUMNS", "200")


def test_help_comes_without_the_heavy_packages():
    code = f"""
import sys, types
package = types.ModuleType("whitenedcse"); package.__path__ = [{str(PACKAGE)!r}]
sys.modules["whitenedcse"] = package  # without what `import whitenedcse` offers
from whitenedcse import cli
try:
    cli.main(["--help"])
except SystemExit as end:
    assert end.code == 0
print(sorted({{"torch", "numpy", "transformers", "lightning", "datasets", "huggingface_hub", "rich", "hydra"}}
             & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]" and "usage: whitenedcse" in done.stdout


def test_the_module_runs_as_a_program():
    command = [sys.executable, "-m", "whitenedcse.cli", "data", "check", "/nowhere"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=PACKAGE.parent)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: /nowhere: no such folder (HYDRA_FULL_ERROR=1 shows where)\n"


@pytest.mark.parametrize("argv", [[], ["data"], ["data", "fetch"], ["data", "fetch", "wiki1n"], ["dato"]])
def test_a_wrong_command_is_a_usage_error(argv, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(argv)
    assert end.value.code == 2 and "usage: whitenedcse" in capsys.readouterr().err


def test_a_traceback_only_if_asked_for(tmp_path, monkeypatch):
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(FileNotFoundError, match="no such folder"):
        cli.main(["data", "check", str(tmp_path / "nowhere")])


def test_check_is_1_for_what_is_wrong_and_0_for_what_is_missing(tmp_path, capsys):
    assert cli.main(["data", "check", str(tmp_path)]) == 0
    assert capsys.readouterr().out.endswith("0 ok, 0 differs, 0 wrong, 22 missing\n")
    copy(tmp_path, "rte")
    assert cli.main(["data", "check", str(tmp_path)]) == 0
    edited(tmp_path / "rte/dev.tsv", 2, "[/x] no columns")
    assert cli.main(["data", "check", str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "0 ok, 0 differs, 1 wrong, 21 missing"
    assert sum(line.startswith(f"RTE: wrong: {tmp_path}/rte/dev.tsv:2: ") for line in lines) == 1
    assert any("- / 277" in line and line.endswith("wrong   │") for line in lines)


def test_check_looks_in_the_data_roots_unless_told_where(root, tmp_path, capsys):  # noqa: F811
    copy(root, "rte")
    assert cli.main(["data", "check"]) == 0
    assert "1 differs, 0 wrong, 21 missing" in capsys.readouterr().out
    assert cli.main(["data", "check", str(tmp_path / "root" / "rte")]) == 0
    assert "0 differs, 0 wrong, 22 missing" in capsys.readouterr().out


def test_fetch_says_where_it_went_and_a_second_time_does_nothing(root, hub, capsys):  # noqa: F811
    hub["wiki1m_for_simcse.txt"] = TEXT
    assert cli.main(["data", "fetch", "wiki1m"]) == 0
    path = root / "wiki1m_for_simcse.txt"
    assert path.read_bytes() == TEXT
    assert capsys.readouterr().out.endswith(f"wiki1m: fetched, {path}\n")
    asked = list(hub["asked"])
    assert cli.main(["data", "fetch", "wiki1m"]) == 0
    assert capsys.readouterr().out == f"wiki1m: is here already, {path}\n" and hub["asked"] == asked


@pytest.mark.parametrize("name", ["senteval", "nli"])
@pytest.mark.parametrize("reason", ["absent", "dead"])
def test_a_fetch_that_fails_is_one_line_and_2(root, hub, monkeypatch, capsys, name, reason):  # noqa: F811
    if reason == "dead":
        monkeypatch.setenv("HF_ENDPOINT", nowhere())
    assert cli.main(["data", "fetch", name]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {name}: ") and error.count("\n") == 1 and "could not be had" in error

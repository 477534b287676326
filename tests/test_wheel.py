"""The wheel: what is installed elsewhere works without this folder."""

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]


def ran(*command, folder, **variables):
    return subprocess.run(
        command, cwd=folder, env=os.environ | variables, capture_output=True, text=True, timeout=300
    )


def files():
    """What git knows of, or would; a folder that is a link by the files in it, which are what is packed."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    names = [name for name in listed.stdout.splitlines() if (ROOT / name).exists()]
    return [
        str(path.relative_to(ROOT))
        for name in names
        for path in ([ROOT / name] if (ROOT / name).is_file() else sorted((ROOT / name).rglob("*.yaml")))
    ]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    copy = folder / "copy"  # pip builds in the folder itself, and what lies there from before goes in
    for name in files():
        if name.startswith("whitenedcse/") or "/" not in name:
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
    done = ran(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", ".", "./copy", folder=folder)
    if done.returncode and "No matching distribution found for setuptools" in done.stderr:
        pytest.skip("pip cannot get setuptools from here to build with")
    assert done.returncode == 0, done.stderr
    return next(folder.glob("whitenedcse-*.whl"))


def test_their_trainer_starts_where_this_package_and_sentence_transformers_are_installed():
    """Its own extra [train] need not be known."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    theirs = [Requirement(text) for text in metadata.requires("sentence-transformers")]
    wanted = {r.name for r in theirs if r.marker and r.marker.evaluate({"extra": "train"})}
    ours = {Requirement(text).name for text in project["dependencies"]}
    assert wanted - {r.name for r in theirs if not r.marker} <= ours and wanted


@pytest.mark.slow
def test_it_holds_the_package_and_its_data_and_nothing_else(wheel):
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert inside == {name for name in files() if name.startswith("whitenedcse/")}


@pytest.mark.slow
def test_installed_elsewhere_the_command_and_the_package_work(wheel, tmp_path):
    site = tmp_path / "site"
    pip = (sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(site), str(wheel))
    assert ran(*pip, folder=tmp_path).returncode == 0
    away = {"folder": tmp_path, "PYTHONPATH": str(site), "WHITENEDCSE_DATA": str(tmp_path)}
    code = "import whitenedcse; from whitenedcse.app.cli import main; print(whitenedcse.__file__)\n"
    code += "assert main(['report', '--list']) == main(['data', 'check']) == 0"
    said = ran(sys.executable, "-c", code, **away)
    assert said.returncode == 0 and said.stdout.startswith(str(site)), said.stderr
    assert "WhitenedCSE/T1" in said.stdout and "STS" in said.stdout
    # the quick start of the wheel, from an empty folder
    words = ("encoder.width=16", "encoder.heads=2", "trainer.max_steps=2", "data.sample=128", "run=a")
    words += ("trainer.accelerator=cpu", "tasks=quickstart")
    trained = ran(str(site / "bin" / "whitenedcse"), "train", *words, **away)
    assert trained.returncode == 0, trained.stderr
    assert (tmp_path / "outputs/a/scores.json").is_file() and "quickstart/test" in trained.stdout

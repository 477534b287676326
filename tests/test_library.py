"""The scripts and the notebook in examples/ on tiny inputs, and the reference written from docstrings."""

import json
import runpy

import matplotlib
import pytest
from encoders import SENTENCES
from programs import ROOT, started
from transformers import AutoModel

import whitenedcse
from whitenedcse.model.embedder import Embedder
from whitenedcse.run import Run


@pytest.fixture
def home(with_bert):
    """An empty folder with an encoder, in float16 as some of the hub are, and a corpus of 256 sentences."""
    AutoModel.from_pretrained(with_bert / "bert").half().save_pretrained(with_bert / "bert")
    lines = [f"{a} {b} {c}" for a in SENTENCES for b in SENTENCES[:4] for c in SENTENCES]
    (with_bert / "my.txt").write_text("\n".join(lines))
    return with_bert


WRITTEN = {  # by each example, an embedder or what it is for
    "own_text": "outputs/first/best",
    "lightning_script": "trained",
    "plain_pytorch": "plain",
    "sentence_transformers_loss": "theirs/modules.json",
    "losses": "vicreg",
    "whiten_and_search": "index/index.json",
}


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.slow(but=1)
def test_an_example_runs_in_an_empty_folder(name, home):
    query = ["a red fish"] * (name == "whiten_and_search")
    done = started(f"examples/{name}.py", "bert", "my.txt", *query, cwd=home)
    assert done.returncode == 0, done.stderr
    assert (home / WRITTEN[name]).exists() and "nan" not in done.stdout + done.stderr, done.stdout
    if (home / WRITTEN[name]).is_dir():
        assert Embedder.load(home / WRITTEN[name]).encode(SENTENCES).shape == (8, 16)


@pytest.mark.slow
def test_the_notebook_runs_from_its_first_cell_to_its_last(home, monkeypatch, capsys):
    matplotlib.use("agg")
    content = json.loads((ROOT / "examples/own_text.ipynb").read_text())
    cells = ["".join(cell["source"]) for cell in content["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] for cell in content["cells"] if cell["cell_type"] == "code")
    cells[0] = cells[0].replace('"bert-base-uncased"', '"bert"').replace('"quickstart"', '"my.txt"')
    cells[0] = cells[0].replace("STEPS = 100", "STEPS = 3")
    known = {}
    for cell in cells:
        exec(compile(cell, "a cell", "exec"), known)
    assert known["run"].results["dev"]["last_step"] == 3 and known["points"].shape == (64, 2)
    assert capsys.readouterr().out.count("whitened ") == 3
    assert Run("outputs/notebook").scores


def test_every_example_is_among_these():
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == WRITTEN.keys()


def test_every_public_name_is_in_the_reference_and_on_the_page_of_the_library():
    page, names = (ROOT / "docs/python.md").read_text(), runpy.run_path(str(ROOT / "docs/reference.py"))
    described = [name for group in names["GROUPS"].values() for name in group]
    assert sorted(described) == sorted(whitenedcse.__all__)
    assert all(f"`{name}`" in page for name in described)
    text = names["page"]()
    assert all(f"### {name}\n" in text and f"{name}(" in text for name in described)

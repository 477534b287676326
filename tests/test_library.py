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

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.fixture
def home(with_bert):
    """An empty folder with an encoder, in float16 as some of the hub are, and a corpus of 256 sentences."""
    AutoModel.from_pretrained(with_bert / "bert").half().save_pretrained(with_bert / "bert")
    lines = [f"{a} {b} {c}" for a in SENTENCES for b in SENTENCES[:4] for c in SENTENCES]
    (with_bert / "my.txt").write_text("\n".join(lines))
    return with_bert


@pytest.mark.parametrize(
    ("name", "words", "written"),
    [
        ("own_text", [], "outputs/first/best/model.safetensors"),
        pytest.param("lightning_script", [], "trained/head.safetensors", marks=pytest.mark.slow),
        ("plain_pytorch", [], "plain/model.safetensors"),
        ("sentence_transformers_loss", [], "theirs/modules.json"),
        ("losses", [], "vicreg/model.safetensors"),
        ("whiten_and_search", ["a red fish"], "index/index.json"),
    ],
)
def test_an_example_runs_in_an_empty_folder(name, words, written, home):
    done = started(f"examples/{name}.py", "bert", "my.txt", *words, cwd=home)
    assert done.returncode == 0, done.stderr
    assert (home / written).is_file() and "nan" not in done.stdout + done.stderr, done.stdout


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
@pytest.mark.slow(but=2)
def test_an_example_explains_itself_and_refuses_other_arguments_in_words(path, tmp_path):
    few, reads = (
        ["bert"],
        path.stem not in ("own_text", "lightning_script", "losses"),
    )  # whose corpus may be a name
    missing = [["bert", "no.txt", "query"][: 3 if path.stem == "whiten_and_search" else 2]] * reads
    for words, code in (
        (["--help"], 0),
        ([], 2),
        (few, 2),
        (["a"] * 9, 2),
        *((words, 2) for words in missing),
    ):
        done = started(f"examples/{path.name}", *words, cwd=tmp_path)
        assert done.returncode == code and "Traceback" not in done.stderr, done.stderr
        said = done.stdout if code == 0 else done.stderr
        assert said.startswith(f"usage: {path.name} ") and ("no.txt is no file" in said) == (words in missing)
        if code == 0:
            assert "positional arguments:\n" in said and "a line" in said
        else:
            assert said.splitlines()[-1].startswith(f"{path.name}: error: ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_what_the_examples_leave_can_be_loaded(home):
    for name in ("own_text", "lightning_script", "plain_pytorch"):
        assert started(f"examples/{name}.py", "bert", "my.txt", cwd=home).returncode == 0
    for model in ("outputs/first", "trained", "plain"):
        assert Embedder.load(model).encode(SENTENCES).shape == (8, 16)


def test_there_are_six_of_at_most_forty_lines_but_for_the_one_with_two_losses():
    assert len(EXAMPLES) == 6
    for path in EXAMPLES:
        assert len(path.read_text().splitlines()) <= (70 if path.stem == "losses" else 40), path.name


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


def test_every_public_name_is_in_the_reference_and_on_the_page_of_the_library():
    page, names = (ROOT / "docs/python.md").read_text(), runpy.run_path(str(ROOT / "docs/reference.py"))
    described = [name for group in names["GROUPS"].values() for name in group]
    assert sorted(described) == sorted(whitenedcse.__all__)
    assert all(f"`{name}`" in page for name in described)
    text = names["page"]()
    assert all(f"### {name}\n" in text and f"{name}(" in text for name in described)

"""What a user can mend is one line on the standard error, exit code 2, and leaves nothing behind."""

import json
import shutil
from pathlib import Path

import pytest
from encoders import PAIRS, SENTENCES, embedder_of

from whitenedcse.app import cli
from whitenedcse.model import checkpoint

ROOT = Path(__file__).parents[2]
TRAIN = "encoder=pretrained encoder.path=bert data=file data.corpus=c.txt data.batch_size=4 monitor.dev=p.tsv"
TRAIN += " trainer.accelerator=cpu trainer.max_steps=1 trainer.log_every_n_steps=1 run=r"
EVALUATE = "model=bert tasks.names=[p.tsv] draws=20 run=r"
MODELS = """
import numpy
ones = lambda texts: numpy.ones((len(texts), 4))
nan = lambda texts: numpy.full((len(texts), 4), numpy.nan)
short = lambda texts: numpy.ones((len(texts) - 1, 4))
"""


@pytest.fixture
def place(with_bert, bert):
    """A directory with a tiny encoder, a checkpoint of ours, a corpus, scored pairs and models in Python."""
    checkpoint.save(embedder_of(bert), Path("best"))
    Path("c.txt").write_text("\n".join(SENTENCES))
    Path("p.tsv").write_text(PAIRS)
    Path("bad_input_models.py").write_text(MODELS)
    return with_bert


def changed(name, key, value):
    """The text of a JSON file of the tiny encoder with another value in one place."""
    return lambda: json.dumps(json.loads((Path("bert") / name).read_text()) | {key: value})


def half(name):
    return lambda: Path(name).read_bytes()[: Path(name).stat().st_size // 2]


TOKENIZER = {"tokenizer.json": None, "tokenizer_config.json": None, "vocab.txt": None}
# what is made (in a copy `x` of the tiny encoder, `y` of the checkpoint), the words, parts of the line
TRAINING = [
    ({}, "loss.temperature=abc", ['loss.temperature="abc" must be float']),
    ({}, "head.whitening.group_width=3", ["width=3 does not divide d=16"]),
    ({}, "head.whitening.group_width=4", ["4 sentences cannot whiten 4 channels"]),
    ({}, "trainer.max_steps=0", ["trainer.max_steps=0 or max_epochs=0 trains nothing"]),
    ({}, "trainer.chunk=0", ["trainer.chunk=0 must be 1 or more"]),
    ({}, "data.max_length=129", ["max_length=129 is above the 128 tokens that this encoder takes"]),
    ({}, "optim.warmup_steps=100", ["optim.warmup_steps=100 is not in 0 .. 1"]),
    ({}, "encoder.path=~/none tasks.names=[~/a]", [f"no encoder in {Path.home()}/none"]),
    (dict.fromkeys(["x/config.json"]), "encoder.path=x", ["x: ", "config.json"]),
    ({"x/tokenizer.json": "{"}, "encoder.path=x", ["x: ", "tokenizer.json"]),
    ({"x/model.safetensors": half("bert/model.safetensors")}, "encoder.path=x", ["x/model.safetensors"]),
    ({"x/config.json": changed("config.json", "hidden_size", 32)}, "encoder.path=x", ["x: ", "belong toget"]),
    ({f"x/{name}": None for name in TOKENIZER}, "encoder.path=x", ["x", "tokenizer.json"]),
    ({}, "data.corpus=no.txt", ["no.txt: no such file"]),
    ({}, "monitor.dev=no.tsv", ["no task 'no.tsv'"]),
    ({"file": ""}, "hydra.run.dir=file", ["file", "exists"]),
    ({"1.txt": "a cat"}, "data.corpus=1.txt monitor=held_out monitor.dev=null", ["0 rows beside 1 held out"]),
    ({}, "hydra.run.dir=/proc/x", ["/proc/x"]),
    ({}, "run=../new", ["run=../new is no name of a directory in outputs/"]),
]  # fmt: skip
EVALUATION = [
    ({}, "protocol=posthoc", ["bert is not a run of train.py", "fit=FILE"]),
    ({}, "protocol=posthoc model=null", ["no model: give model="]),
    ({}, "draws=0", ["0 draws from 8 pairs"]),
    ({}, "model=bad_input_models:short", ["8 sentences have (7, 4) vectors"]),
    ({}, "model=bad_input_models:nan", ["8 of 8 sentences have vectors that are not finite"]),
    ({}, "postprocess=whitening k=17", ["k=17 components of vectors of width 16"]),
    ({}, "postprocess=whitening fit=w.safetensors", ["w.safetensors"]),
    ({"y/head.safetensors": "no"}, "model=y", ["y/head.safetensors is not as it was written"]),
    ({}, "compare=[a]", ["a: no such directory of runs"]),
    ({}, "tasks=STS16", ["tasks.names=[STS16] names single tasks"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("script", "usual", "table"),
    [("train", TRAIN, TRAINING[:12]), ("train", TRAIN, TRAINING[12:]), ("evaluate", EVALUATE, EVALUATION)],
    ids=["values", "files", "evaluate"],
)
@pytest.mark.usefixtures("place")
def test_bad_input_is_one_line_that_names_it_and_leaves_nothing_behind(script, usual, table, refusal):
    for made, arguments, words in table:
        for folder, of in (("x", "bert"), ("y", "best")):
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(of, folder)
        for name, content in made.items():
            Path(name).unlink(missing_ok=True)
            if content is not None:
                data = content() if callable(content) else content
                Path(name).write_bytes(data if isinstance(data, bytes) else data.encode())
        given = {
            word.partition("=")[0]: word for word in f"{usual} {arguments}".split()
        }  # the last of a name
        shutil.rmtree("outputs", ignore_errors=True)
        line = refusal(script, *given.values())
        assert line.startswith("error: ") and "\n" not in line, line
        assert [word for word in words if word not in line] == [], line
        left = ("scores.json", "best", "checkpoints")
        assert not [name for name in left if Path("outputs/r", name).exists()], arguments


OTHERS = {  # a file that a run names, other content of it, and how the refusal names it
    "p.tsv": (lambda data: data.replace(b"\n1\t", b"\n2\t"), "content.monitor.dev="),
    "bert/model.safetensors": (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "content.encoder.path="),
    "bert/tokenizer.json": (lambda data: data.replace(b'"cat"', b'"cow"'), "tokenizer="),
    "c.txt": (lambda data: data + b"another line\n", "corpus="),
}


@pytest.mark.slow
def test_an_unfinished_run_is_not_resumed_with_other_content_of_what_it_names(place, refusal, monkeypatch):
    command, remove = ["train", *TRAIN.split()], shutil.rmtree
    others = lambda path, **how: Path(path).name == "checkpoints" or remove(path, **how)  # noqa: E731
    monkeypatch.setattr(shutil, "rmtree", others)
    assert cli.main(command) == 0
    (place / "outputs/r/scores.json").unlink()
    for name, (change, words) in OTHERS.items():
        content = Path(name).read_bytes()
        Path(name).write_bytes(change(content))
        line = refusal(*command)
        assert line.startswith(f"error: {place}/outputs/r holds another run: {words}"), line
        assert "(it began with" in line and "to resume it anyway, add --force" in line
        Path(name).write_bytes(content)
    change, words = OTHERS["p.tsv"]
    Path("p.tsv").write_bytes(change(Path("p.tsv").read_bytes()))
    assert cli.main([*command, "--force"]) == 0
    assert (place / "outputs/r/scores.json").exists()

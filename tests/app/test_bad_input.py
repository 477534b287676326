"""What a user can mend is one line on the standard error, exit code 2, and leaves nothing behind."""

import json
import runpy
import shutil
import sys
import warnings
from pathlib import Path

import pytest
from encoders import PAIRS, SENTENCES, backbone, embedder_of

from whitenedcse.model import checkpoint
from whitenedcse.model.encoder import Encoder

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


@pytest.fixture(scope="module")
def place(tmp_path_factory, tokenizer):
    """A directory with a tiny encoder, a checkpoint of ours, a corpus, scored pairs and models in Python."""
    cwd = tmp_path_factory.mktemp("user")
    encoder = Encoder(backbone("bert", len(tokenizer)), tokenizer)
    encoder.backbone.save_pretrained(cwd / "bert")
    tokenizer.save_pretrained(cwd / "bert")
    checkpoint.save(embedder_of(encoder), cwd / "best")
    (cwd / "c.txt").write_text("\n".join(SENTENCES))
    (cwd / "p.tsv").write_text(PAIRS)
    (cwd / "bad_input_models.py").write_text(MODELS)
    return cwd


@pytest.fixture
def start(place, monkeypatch, capfd):
    """Starts a script in that directory, in this process, offline; gives exit code (None: ran) and stderr."""
    monkeypatch.chdir(place)
    monkeypatch.setenv("WHITENEDCSE_DATA", str(place / "data"))
    monkeypatch.setenv("WHITENEDCSE_CACHE", str(place / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    def started(name, *arguments):
        shutil.rmtree(place / "outputs", ignore_errors=True)
        words = list({word.partition("=")[0]: word for word in arguments}.values())  # the last of a name
        monkeypatch.setattr(sys, "argv", [str(ROOT / f"{name}.py"), *words])
        monkeypatch.setenv("HYDRA_FULL_ERROR", "0")  # a start sets it
        code = None
        with warnings.catch_warnings():
            try:
                runpy.run_path(sys.argv[0], run_name="__main__")
            except SystemExit as end:
                code = end.code
        return code, capfd.readouterr().err.removesuffix("\n")

    return started


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
def test_bad_input_is_one_line_that_names_it_and_leaves_nothing_behind(script, usual, table, start):
    wrong = []
    for made, arguments, words in table:
        for folder, of in (("x", "bert"), ("y", "best")):
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(of, folder)
        for name, content in made.items():
            Path(name).unlink(missing_ok=True)
            if content is not None:
                data = content() if callable(content) else content
                Path(name).write_bytes(data if isinstance(data, bytes) else data.encode())
        code, line = start(script, *usual.split(), *arguments.split())
        fine = code == 2 and line.startswith("error: ") and "\n" not in line and "Traceback" not in line
        left = [name for name in ("scores.json", "best", "checkpoints") if Path("outputs/r", name).exists()]
        if not fine or left or [word for word in words if word not in line]:
            wrong.append((arguments, code, line, left))
    assert wrong == []


OTHERS = {  # a file that a run names, other content of it, and how the refusal names it
    "p.tsv": (lambda data: data.replace(b"\n1\t", b"\n2\t"), "content.monitor.dev="),
    "bert/model.safetensors": (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "content.encoder.path="),
    "bert/tokenizer.json": (lambda data: data.replace(b'"cat"', b'"cow"'), "tokenizer="),
    "c.txt": (lambda data: data + b"another line\n", "corpus="),
}


@pytest.mark.slow
def test_an_unfinished_run_is_not_resumed_with_other_content_of_what_it_names(start, place, monkeypatch):
    command, remove, kept = ["train", *TRAIN.split()], shutil.rmtree, ("outputs", "checkpoints")
    others = lambda path, **how: Path(path).name in kept or remove(path, **how)  # noqa: E731
    monkeypatch.setattr(shutil, "rmtree", others)
    assert start(*command) == (None, "")
    (place / "outputs/r/scores.json").unlink()
    for name, (change, words) in OTHERS.items():
        content = Path(name).read_bytes()
        Path(name).write_bytes(change(content))
        code, line = start(*command)
        assert code == 2 and line.startswith(f"error: {place}/outputs/r holds another run: {words}"), line
        assert "(it began with" in line and "to resume it anyway, add --force" in line
        Path(name).write_bytes(content)
    change, words = OTHERS["p.tsv"]
    Path("p.tsv").write_bytes(change(Path("p.tsv").read_bytes()))
    try:
        assert start(*command, "--force") == (None, "")
    finally:
        Path("p.tsv").write_text(PAIRS)
    assert (place / "outputs/r/scores.json").exists()

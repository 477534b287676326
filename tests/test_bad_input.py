"""Bad input ends a script with one line that names it and the way out, and leaves nothing half-written.

Malformed bytes and values are never a traceback, and never a silent wrong count.
"""

import gzip
import importlib
import json
import math
import re
import runpy
import shutil
import sys
import warnings
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from encoders import SENTENCES, backbone, embedder_of, whitening
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from hypothesis import given, settings
from hypothesis import strategies as st

from whitenedcse.app.configuration import refuse_unknown
from whitenedcse.data.corpus import Corpus, read
from whitenedcse.evaluation.sts import read as read_task
from whitenedcse.evaluation.sts import read_pairs
from whitenedcse.model import checkpoint
from whitenedcse.model.encoder import Encoder, longest
from whitenedcse.model.whitener import check_rows

ROOT = Path(__file__).parents[1]
HEADER = "score\tsentence1\tsentence2\n"
PAIRS = HEADER + "".join(
    f"{i}\t{a}\t{b}\n" for i, (a, b) in enumerate(zip(SENTENCES, SENTENCES[1:], strict=False))
)
TRAIN = "encoder=pretrained encoder.path=bert data=file data.corpus=c.txt data.batch_size=4 monitor.dev=p.tsv"
TRAIN += " trainer.accelerator=cpu trainer.max_steps=1 trainer.log_every_n_steps=1 run=r"
SMALL = TRAIN.replace(
    "encoder=pretrained encoder.path=bert", "encoder=small encoder.width=16 encoder.heads=2"
)
EVALUATE = "model=bert tasks.names=[p.tsv] draws=20 run=r"
OLD = {"y/digests.json": None}  # a checkpoint that is not sealed
MODELS = """
import numpy
ones = lambda texts: numpy.ones((len(texts), 4))
zeros = lambda texts: numpy.zeros((len(texts), 4))
nan = lambda texts: numpy.full((len(texts), 4), numpy.nan)
short = lambda texts: numpy.ones((len(texts) - 1, 4))
text = lambda texts: [["a"]] * len(texts)
number = 3
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
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    shutil.rmtree(place / "outputs", ignore_errors=True)

    def start(name, *arguments):
        monkeypatch.setattr(sys, "argv", [str(ROOT / f"{name}.py"), *arguments])
        code = None
        with warnings.catch_warnings():
            try:
                runpy.run_path(sys.argv[0], run_name="__main__")
            except SystemExit as end:
                code = end.code
        return code, capfd.readouterr().err.removesuffix("\n")

    return start


def written(name, content):
    """A file to make, or None to take away one that is there."""
    path = Path(name)
    path.unlink(missing_ok=True)
    if content is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


def changed(name, key, value):
    """The text of a JSON file of the tiny encoder with another value in one place."""
    return lambda: json.dumps(json.loads((Path("bert") / name).read_text()) | {key: value})


def half(name):
    return lambda: Path(name).read_bytes()[: Path(name).stat().st_size // 2]


def of_another():
    """Weights of an encoder with twenty words."""
    backbone("bert", 20).save_pretrained("twenty")
    return (Path("twenty") / "model.safetensors").read_bytes()


TOKENIZER = {"tokenizer.json": None, "tokenizer_config.json": None, "vocab.txt": None}
WHOLE = "config.json, model.safetensors and tokenizer.json"

# what is made (in a copy `x` of the tiny encoder, where the name says so), the arguments, words of the line
TRAINING = [
    # kinds of values
    ({}, "loss.temperature=abc", ['loss.temperature="abc" must be a number']),
    ({}, "loss.temperature=null", ["loss.temperature=null must be a number"]),
    ({}, "loss.weights=3", ["loss.weights=3 must be a list of numbers ([...])"]),
    ({}, "loss.weights=[a]", ['loss.weights=["a"] must be a list of numbers']),
    ({}, "gather=3", ["gather=3 must be true or false"]),
    ({}, "head.whitening.eps=null", ["head.whitening.eps=null must be a number"]),
    ({}, "head.whitening.group_width=2.0", ["head.whitening.group_width=2.0 must be a whole number or null"]),
    ({}, "head.whitening.gradient=some",
     ['head.whitening.gradient="some" must be one of full, centre, none']),
    ({}, "head.whitening=3", ["head.whitening=3 must be a mapping with a _target_ or null"]),
    ({}, "head.dense=3", ["head.dense=3 must be true or false"]),
    ({}, "views=x", ['views="x" must be a whole number']),
    ({}, "views=2.5", ["views=2.5 must be a whole number"]),
    ({}, "views=null", ["views=null must be a whole number"]),
    ({}, "seed=x", ['seed="x" must be a whole number']),
    ({}, "seed=null", ["seed=null must be a whole number"]),
    ({}, "data.batch_size=2.5", ["data.batch_size=2.5 must be a whole number"]),
    ({}, "data.max_length=x", ['data.max_length="x" must be a whole number']),
    ({}, "data.sample=x", ['data.sample="x" must be a whole number or null']),
    ({}, "data.columns=a", ['data.columns="a" must be a list of texts ([...])']),
    ({}, "data.corpus=3", ["data.corpus=3 must be text"]),
    ({}, "encoder.path=null", ["encoder.path=null must be text"]),
    ({}, "pooling.layers=7", ["pooling.layers=7 must be a list of whole numbers ([...])"]),
    ({}, "pooling.layers=[1.5]", ["pooling.layers=[1.5] must be a list of whole numbers"]),
    ({}, "optim.lr=abc", ['optim.lr="abc" must be a number']),
    ({}, "mlm.weight=x", ['mlm.weight="x" must be a number']),
    ({}, "mlm=3", ["mlm=3 must be a mapping"]),
    ({}, "monitor.every=x", ['monitor.every="x" must be a whole number']),
    ({}, "trainer.max_steps=x", ['trainer.max_steps="x" must be a whole number']),
    ({}, "trainer.precision=foo", ['trainer.precision="foo" must be one of 64, 32, 16', "bf16-mixed"]),
    ({}, "loss._target_=foo", ["loss._target_='foo' is no function or class"]),
    # values
    ({}, "loss.temperature=0", ["loss.temperature=0 must be finite and above 0"]),
    ({}, "loss.temperature=-0.05", ["loss.temperature=-0.05 must be finite and above 0"]),
    ({}, "loss.temperature=inf", ["loss.temperature=inf must be finite and above 0"]),
    ({}, "loss.temperature=nan", ["loss.temperature=nan must be finite and above 0"]),
    ({}, "loss.weights=[nan]", ["loss.weights=[nan] must be one or more positive numbers"]),
    ({}, "loss.weights=[1,inf]", ["loss.weights=[1, inf] must be one or more positive numbers"]),
    ({}, "loss.weights=[1,1,1]", ["loss.weights=[1, 1, 1] for 2 positives; give 1 or 2"]),
    ({}, "loss.hard_negative_log_weight=nan data.columns=[a,b,c]",
     ["loss.hard_negative_log_weight=nan must be finite"]),
    ({}, "loss.form=l3", ["loss.form='l3' is not one of l1, l2"]),
    ({}, "loss=foo", ["no loss=foo; there are", "contrastive"]),
    ({}, "head=foo", ["no head=foo; there are", "shuffled_group"]),
    ({}, "pooling=foo", ["no pooling=foo; there are", "cls, first_last, last, max, mean, pooler"]),
    ({}, "pooling.kind=foo", ["pooling.kind='foo' is not one of cls, mean, max, last, pooler; first_last"]),
    ({}, "pooling.kind=first_last", ["last, pooler; first_last is mean over layers [1, -1]"]),
    ({}, "+experiment=foo", ["no experiment=foo; there are", "bert_base"]),
    ({}, "encoder=foo", ["no encoder=foo; there are", "pretrained"]),
    ({}, "pooling.layers=[7]", ["layer 7 does not exist: this encoder has layers 0 to 3"]),
    ({}, "pooling.layers=[-5]", ["layer -5 does not exist: this encoder has layers 0 to 3"]),
    ({}, "pooling.layers=[]", ["pooling.layers is empty; name at least one layer, e.g. [-1]"]),
    ({}, "embedding=foo", ["embedding='foo' is not one of encoder, dense, head"]),
    ({}, "head.whitening.group_width=3", ["group_width=3 does not divide d=16; nearest that do: [2, 4]"]),
    ({}, "head.whitening.group_width=3", ["width=3 does not divide d=16; nearest that do: [2, 4]"]),
    ({}, "head.whitening.group_width=4", ["4 sentences cannot whiten 4 channels", "data.batch_size above 4"]),
    ({}, "head=group head.whitening.group_width=16",
     ["4 sentences cannot whiten 16", "group_width", "shrinkage"]),
    ({}, "head.whitening.eps=0", ["whitening.eps=0 is not finite and above 0"]),
    ({}, "head.whitening.eps=inf", ["whitening.eps=inf is not finite and above 0"]),
    ({}, "head.whitening.shrinkage=nan", ["whitening.shrinkage=nan is not in [0, 1]"]),
    ({}, "head=zca head.whitening.momentum=2", ["whitening.momentum=2 is not in [0, 1)"]),
    ({}, "head.position=beside", ["head.position='beside' is not one of before, after, both"]),
    ({}, "views=1", ["views=1: a contrastive loss needs an anchor and a positive, so 2 or more"]),
    ({}, "trainer.max_steps=0", ["trainer.max_steps=0 or max_epochs=0 trains nothing"]),
    ({}, "trainer.max_epochs=0", ["trainer.max_steps=0 or max_epochs=0 trains nothing"]),
    ({}, "trainer.max_epochs=-1 trainer.max_steps=-1", ["there is no last step", "set trainer.max_steps"]),
    ({}, "trainer.max_epochs=null trainer.max_steps=-1 +trainer.max_time=00:00:01:00", ["no last step"]),
    ({}, "+trainer.max_time.minute=1", ["trainer: 'minute' is an invalid keyword"]),
    ({}, "+trainer.overfit_batches=3", ["trainer.overfit_batches", "use data.sample=N"]),
    ({}, "trainer.strategy=fsdp", ["trainer.strategy=fsdp divides the encoder", "use auto or ddp"]),
    ({}, "trainer.strategy=deepspeed_stage_3", ["trainer.strategy=deepspeed_stage_3 divides"]),
    ({}, "trainer.devices=0", ["devices", "0"]),
    ({}, "trainer.chunk=0", ["trainer.chunk=0 must be 1 or more"]),
    ({}, "trainer.chunk=2 mlm.weight=0.1", ["trainer.chunk=2", "mlm.weight"]),
    ({}, "monitor.patience=-1", ["monitor.patience=-1 must be 1 or more, or null"]),
    ({}, "gather=maybe", ['gather="maybe" must be true or false']),
    ({}, "checkpoint_every=soon", ['checkpoint_every="soon" must be a number']),
    ({}, "data.corpus=null", ["data=file has no corpus yet: add data.corpus=FILE"]),
    ({}, "seed=-1", ["-1", "from 0 to 4294967295"]),
    ({}, "data.passes=9", ["data.passes=9: 9 encoder passes are more than views=3; lower data.passes"]),
    ({}, "data.batch_size=1", ["batch_size=1: a contrastive loss needs 2 sentences or more"]),
    ({}, "data.batch_size=100", ["c.txt: 8 rows do not fill one batch_size=100"]),
    ({}, "data.max_length=2", ["max_length=2 leaves no token for text", "use 3 or more"]),
    ({}, "data.max_length=-1", ["max_length=-1 leaves no token for text", "use 3 or more"]),
    ({}, "data.max_length=129", ["max_length=129 is above the 128 tokens that this encoder takes"]),
    ({}, "data.sample=0", ["sample=0: take at least one row, or null for all"]),
    ({}, "optim.weight_decay=-1", ["optim.weight_decay=-1", "finite and 0 or more"]),
    ({}, "optim.lr=nan", ["optim.lr=nan must be finite and above 0"]),
    ({}, "optim.lr=0", ["optim.lr=0 must be finite and above 0"]),
    ({}, "optim.warmup_steps=100", ["optim.warmup_steps=100 is not in 0 .. 1, the steps of this run"]),
    ({}, "mlm.weight=1 mlm.probability=2", ["mlm.probability=2 must be in (0, 1)"]),
    ({}, "mlm.weight=-1", ["mlm.weight=-1 must be finite and above 0, or 0 to leave it out"]),
    ({}, "views=2 loss.weights=[1,2]", ["loss.weights=[1, 2] for 1 positive; give 1 ("]),
    ({}, "monitor.every=0", ["monitor.every=0 must be 1 or more"]),
    ({}, "optim.lrr=1", ["no setting 'optim.lrr'; the nearest is 'optim.lr'"]),
    # the encoder
    ({}, "encoder.path=no/where/at/all", ["no encoder in no/where/at/all"]),
    ({}, "encoder.path=nowhere", ["nowhere", "name a local directory instead"]),
    (dict.fromkeys(["x/config.json"]), "encoder.path=x", ["x: ", "config.json", WHOLE]),
    (dict.fromkeys(["x/model.safetensors"]), "encoder.path=x", ["x: ", "model.safetensors", WHOLE]),
    ({"x/config.json": "{"}, "encoder.path=x", ["x/config.json", "JSON", WHOLE]),
    ({"x/tokenizer.json": "{"}, "encoder.path=x", ["x: ", "tokenizer.json", "copy or download it again"]),
    ({"x/model.safetensors": half("bert/model.safetensors")}, "encoder.path=x",
     ["x/model.safetensors is damaged"]),
    ({"x/model.safetensors": "text" * 99}, "encoder.path=x",
     ["x/model.safetensors is damaged", "download it again"]),
    ({"x/model.safetensors": ""}, "encoder.path=x", ["x/model.safetensors is damaged", "download it again"]),
    ({"x/config.json": changed("config.json", "hidden_size", 32)}, "encoder.path=x",
     ["x: ", "belong together"]),
    ({"x/config.json": changed("config.json", "num_hidden_layers", 4)}, "encoder.path=x",
     ["weights of Bert"]),
    ({f"x/{name}": None for name in TOKENIZER}, "encoder.path=x", ["x", "tokenizer.json", "copy"]),
    (
        {"x/config.json": changed("config.json", "vocab_size", 20), "x/model.safetensors": of_another},
        "encoder.path=x",
        ["x: the tokenizer has 45 entries, the encoder embeddings for 20", "copy the tokenizer"],
    ),
    # the corpus
    ({}, "data.corpus=no.txt", ["no.txt: no such file or directory"]),
    ({}, "data.corpus=s4://b/no.txt.gz", ["s4://b/no.txt.gz: cannot be read: Protocol not known: s4"]),
    ({}, "data.corpus=memory://no.txt", ["memory://no.txt: no such file, or it cannot be reached"]),
    ({"empty/x.bin": ""}, "data.corpus=empty", ["empty: no corpus file", ".jsonl"]),
    ({"e.txt": ""}, "data.corpus=e.txt", ["e.txt: 0 usable sentences in 0 lines"]),
    ({"e.txt": "\n \n\t\n"}, "data.corpus=e.txt", ["e.txt: 0 usable sentences in 3 lines, 3 blank"]),
    ({"e.txt": b"fine\nb\xe9\n"}, "data.corpus=e.txt",
     ["e.txt:2: byte 0xe9 is not UTF-8", "iconv (position 1 of the line)"]),
    ({"e.csv": "a,b\nx,y\nz\n"}, "data.corpus=e.csv data.columns=[a]", ["e.csv:3: 1 fields, 2 expected"]),
    ({"e.csv": 'a,b\n"x,y\nz,w\n'}, "data.corpus=e.csv data.columns=[a]",
     ["e.csv:3: unexpected end of data"]),
    ({"e.csv": "one,b\nx,y\n"}, "data.corpus=e.csv data.columns=[on]",
     ["no column 'on' among one, b (line 1)", "mean 'one'"]),
    ({"e.jsonl": '{"a": null}'}, "data.corpus=e.jsonl data.columns=[a]",
     ["e.jsonl:1: text expected in 'a', None found"]),
    ({"e.jsonl": '{"a": 1.5}'}, "data.corpus=e.jsonl data.columns=[a]",
     ["e.jsonl:1: text expected in 'a', 1.5 found"]),
    ({"e.jsonl": '{"a": "\\ud800"}'}, "data.corpus=e.jsonl data.columns=[a]",
     ["e.jsonl:1: not JSON", "surrogates"]),
    ({"e.jsonl": "[" * 99_999}, "data.corpus=e.jsonl data.columns=[a]", ["e.jsonl:1: not JSON", "recursion"]),
    ({"e.txt.gz": b"plain"}, "data.corpus=e.txt.gz", ["e.txt.gz: cannot be read", "gzip"]),
    ({"e.txt.zst": b"plain"}, "data.corpus=e.txt.zst", ["e.txt.zst: cannot be read"]),
    # the dev pairs
    ({}, "monitor.dev=no.tsv", ["no task 'no.tsv'", "no file in "]),
    ({"e.tsv": HEADER + "1\ta\tb\nnan\ta\tb\n"}, "monitor.dev=e.tsv",
     ["e.tsv:3: the score is 'nan', not a finite"]),
    ({"e.tsv": HEADER + "1\ta\tb\n"}, "monitor.dev=e.tsv",
     ["e.tsv: 1 pairs; a correlation needs at least 2"]),
    # where the run goes
    ({"file": ""}, "hydra.run.dir=file", ["file", "exists"]),
    ({"file": ""}, "hydra.run.dir=file/x", ["file/x: Not a directory; write elsewhere with"]),
    ({}, "hydra.run.dir=/proc/x", ["/proc/x"]),
]  # fmt: skip
NEW = [  # of an encoder of random weights
    ({}, "encoder.heads=3", ["width=16, heads=3: all must be 1 or more, and heads divide width"]),
    ({}, "encoder.heads=0", ["width=16, heads=0: all must be 1 or more, and heads divide width"]),
    (
        {},
        "pooling=pooler",
        ["pooling.kind=pooler, but this checkpoint has no pooler of its own; use cls or mean"],
    ),
    ({}, "encoder.layers=0", ["layers=0", "must be 1 or more"]),
    ({}, "encoder.vocabulary=many", ['encoder.vocabulary="many" must be a whole number']),
]
FIT = "bert is not a run of train.py, whose corpus protocol=posthoc and fit=training fit to; name"
EVALUATION = [
    ({}, "protocol=posthoc", [f"error: {FIT} the corpus to fit to, e.g. fit=wiki1m, or fit=FILE"]),
    ({}, "postprocess=whitening fit=training", [f"error: {FIT} the corpus"]),
    ({}, "draws=x", ['draws="x" must be a whole number']),
    ({}, "draws=0", ["0 draws from 7 pairs: both must be at least 1"]),
    ({}, "digits=-1", ["digits=-1 must be one of 0, 1, 2, 3, 4, 5, 6 or null"]),
    ({}, "layers=3", ["layers=3 must be a list of whole numbers ([...]) or null"]),
    ({}, "layers=[9]", ["layer 9 does not exist: this encoder has layers 0 to 3"]),
    ({}, "pooling=foo", ["no pooling=foo; there are", "cls, first_last, last, max, mean, pooler"]),
    ({}, "model=3", ["model=3 must be text or null"]),
    ({}, "model=null", ["no model: give model=DIR_OR_HUB_ID"]),
    ({}, "model=no/where/at/all", ["no encoder in no/where/at/all"]),
    ({}, "model=:f", ["model=:f", "MODULE:FUNCTION is imported from here"]),
    ({}, "model=bad_input_models:number", ["number is a int, not a function"]),
    ({}, "model=bad_input_models:short", ["8 sentences have (7, 4) vectors, not a row for each"]),
    ({}, "model=bad_input_models:text", ["8 sentences have vectors of <U1, not of numbers"]),
    ({}, "model=bad_input_models:nan", ["8 of 8 sentences have vectors that are not finite"]),
    ({}, "compare=x", ['compare="x" must be a list of texts']),
    ({}, "tasks.names=[]", ["tasks.names=[]: nothing to score; name a task"]),
    ({}, "tasks.names=p.tsv", ['tasks.names="p.tsv" must be a list of texts']),
    ({}, "tasks.names=[no]", ["no task 'no'", "STS12"]),
    ({}, "classifier=foo", ["no classifier 'foo'; there are lbfgs and senteval"]),
    ({}, "figures=[foo]", ['figures=["foo"]: \'foo\' is not one of layers, subsets, components, projection']),
    ({}, "figures=layers", ['figures="layers" must be a list ([...], each one of layers, ']),
    ({}, "postprocess=whitening k=17",
     ["k=17 components of vectors of width 16: give k from 1 to 16", "the row whitening"]),
    ({}, "postprocess=whitening k=1.5", ["k=1.5 must be a whole number or null"]),
    ({}, "postprocess=whitening postprocess.shrinkage=nan", ["shrinkage=nan must lie in [0, 1)"]),
    ({}, "postprocess=whitening fit=no.txt", ["no.txt: no such file or directory"]),
    ({}, "protocol.max_length=2", ["max_length=2 leaves no token for text", "use 3 or more"]),
    ({}, "protocol.max_length=0", ["protocol.max_length=0 must be above 0 or null"]),
    ({}, "protocol.extra=nan", ["protocol.extra=nan finite and 0 or more"]),
    ({}, "protocol.rows=[]", ["protocol.rows=[] evaluates nothing"]),
    ({}, "protocol.rows=3", ["protocol.rows=3 must be a list of mappings"]),
    ({}, "protocol.rows=[{fit:year}]", ["protocol.rows: {'fit': 'year'} must have a name"]),
    ({}, "protocol.rows=[{name:w,map:{kind:pca}}]", ["protocol.rows: 'w' lacks what its transform"]),
    ({}, "protocol.rows=[{a:1}]", ["protocol.rows: {'a': 1} must have a name"]),
    ({"x/model.safetensors": half("bert/model.safetensors")}, "model=x", ["x/model.safetensors is damaged"]),
    ({"y/head.safetensors": "no"}, "model=y", ["y/head.safetensors is not as it was written", "again"]),
    ({"y/whitenedcse.json": None}, "model=y", ["y/whitenedcse.json is missing", "again"]),
    (OLD | {"y/whitenedcse.json": "{"}, "model=y", ["y/whitenedcse.json is damaged", "again"]),
    (OLD | {"y/whitenedcse.json": "{}"}, "model=y",
     ["y/whitenedcse.json lacks 'head'", "copy"]),
    (OLD | {"y/head.safetensors": "no"}, "model=y", ["y/head.safetensors is damaged", "again"]),
    (OLD | {"y/whitenedcse.json": None, "y/modules.json": "{"}, "model=y",
     ["y/modules.json is damaged", "again"]),
    ({"file": ""}, "hydra.run.dir=file/x", ["file/x: Not a directory; write elsewhere with"]),
]  # fmt: skip
PAIRS_FILES = {
    "e.tsv": [
        ("", ["0 pairs; a correlation needs at least 2"]),
        (HEADER + "1\ta\tb\n2\ta\n", ["e.tsv:3: 2 fields, 3 expected"]),
        (HEADER.replace("score", "label1") + "1\ta\tb\n", ["e.tsv:2: no score among label1, sentence1"]),
        (HEADER + "1_0\ta\tb\n", ["e.tsv:2: the score is '1_0', not a finite number"]),
        (HEADER.encode() + b"1\ta\t\xff\n", ["e.tsv:2: byte 0xff is not UTF-8; convert the file"]),
        (HEADER + f"1\t{'a ' * 5_000_000}\tb\n", ["e.tsv:2: field larger than field limit"]),
        ("score\tscore\tsentence1\tsentence2\n1\t2\ta\tb\n", ["e.tsv:1: 4 columns, among them score more"]),
    ],
    "e.jsonl": [
        ('{"score": true, "sentence1": "a", "sentence2": "b"}', ["e.jsonl:1: the score is True, not"]),
        (f'{{"score": 1{"0" * 400}, "sentence1": "a", "sentence2": "b"}}', ["e.jsonl:1: the score is 1000"]),
        ('[["score", 1], ["sentence1", "a"], ["sentence2", "b"]]', ["e.jsonl:1: an object with fields"]),
        ("[" * 99_999, ["e.jsonl:1: not JSON", "recursion"]),
        ('{"score": 1, "sentence1": "\\ud800", "sentence2": "b"}', ["e.jsonl:1", "surrogates"]),
    ],
}  # fmt: skip
TABLE = [("train", f"{TRAIN} {arguments}", made, words) for made, arguments, words in TRAINING]
TABLE += [("train", f"{SMALL} {arguments}", made, words) for made, arguments, words in NEW]
TABLE += [("evaluate", f"{EVALUATE} {arguments}", made, words) for made, arguments, words in EVALUATION]
TABLE += [
    ("evaluate", f"{EVALUATE} tasks.names=[{name}]", {name: content}, words)
    for name, rows in PAIRS_FILES.items()
    for content, words in rows
]


def reweighted(data):
    return data[:-1] + bytes([data[-1] ^ 1])


OTHERS = {  # a file that a run names, other content of it, and how the refusal names it
    "p.tsv": (lambda data: data.replace(b"\n1\t", b"\n2\t"), "content.monitor.dev="),
    "t.tsv": (lambda data: data.replace(b"bird", b"fish"), "content.tasks.t.tsv="),
    "bert/model.safetensors": (reweighted, "content.encoder.path="),
    "bert/config.json": (lambda data: data.replace(b'"gelu"', b'"relu"'), "content.encoder.path="),
    "bert/tokenizer.json": (lambda data: data.replace(b'"cat"', b'"cow"'), "tokenizer="),
    "c.txt": (lambda data: data + b"another line\n", "corpus="),
}


@pytest.mark.slow
def test_an_unfinished_run_is_not_resumed_with_other_content_of_what_it_names(start, place, monkeypatch):
    said = []
    monkeypatch.setattr("whitenedcse.app.launch.say", said.append)
    (place / "t.tsv").write_text(PAIRS)
    command = ["train", *TRAIN.split(), "tasks.names=[t.tsv]"]
    assert start(*command) == (None, "")
    (place / "outputs/r/scores.json").unlink()
    for name, (change, words) in OTHERS.items():
        content = Path(name).read_bytes()
        Path(name).write_bytes(change(content))
        assert change(content) != content
        monkeypatch.setenv("HYDRA_FULL_ERROR", "0")  # a start sets it
        code, line = start(*command)
        assert code == 2 and line.count("\n") == 0, line
        assert line.startswith(f"error: {place}/outputs/r holds another run: {words}")
        assert "(it began with" in line and "to resume it anyway, add --force" in line
        Path(name).write_bytes(content)
    change, words = OTHERS["p.tsv"]
    Path("p.tsv").write_bytes(change(Path("p.tsv").read_bytes()))
    try:
        assert start(*command, "--force") == (None, "")
    finally:
        Path("p.tsv").write_text(PAIRS)
    (line,) = [line for line in said if str(line).startswith("--force: ")]
    assert line.startswith(f"--force: what came before this step was made with something else: {words}")
    assert (place / "outputs/r/scores.json").exists()


def last_wins(arguments):
    """The words of a command line, each setting once: Hydra takes no group twice."""
    return list({word.partition("=")[0]: word for word in arguments.split()}.values())


@pytest.mark.parametrize(
    ("script", "arguments", "made", "words"),
    TABLE,
    ids=[f"{row[0]}-{row[1].split('run=r ')[1]}-{i}" for i, row in enumerate(TABLE)],
)
@pytest.mark.slow(but=9)
def test_bad_input_is_one_line_that_names_it_and_leaves_nothing_behind(script, arguments, made, words, start):
    for folder, of in (("x", "bert"), ("y", "best")):
        shutil.rmtree(folder, ignore_errors=True)
        if any(name.startswith(f"{folder}/") for name in made):
            shutil.copytree(of, folder)
    for name, content in made.items():
        written(name, content() if callable(content) else content)
    code, line = start(script, *last_wins(arguments))
    assert code == 2, line
    assert line.startswith("error: ") and "\n" not in line and "Traceback" not in line
    assert [word for word in words if word not in line] == [], line
    left = [name for name in ("scores.json", "best", "checkpoints") if (Path("outputs/r") / name).exists()]
    assert left == []


def test_the_traceback_is_shown_on_request(start, monkeypatch):
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    monkeypatch.setenv("WHITENEDCSE_TRACEBACK", "")
    with pytest.raises(ValueError, match="data.max_length"):
        start("train", *last_wins(f"{TRAIN} data.max_length=x"))


@pytest.mark.parametrize(
    ("arguments", "content", "why"),
    [
        ("tasks.names=[e.tsv]", HEADER + "2\ta\tb\n2\tc\td\n2\te\tf\n", "gold is constant"),
        ("model=bad_input_models:ones", PAIRS, "similarity is constant"),
        ("model=bad_input_models:zeros", PAIRS, "similarity is not finite in 7 of 7 pairs"),
    ],
)
def test_what_has_no_correlation_is_null_with_the_reason(arguments, content, why, start):
    Path("e.tsv").write_text(content)
    code, error = start("evaluate", *last_wins(f"{EVALUATE} {arguments}"))
    assert code is None, error
    (task,) = json.loads(Path("outputs/r/scores.json").read_text())["rows"][0]["sts"]["tasks"].values()
    assert (task["all"], task["mean"]) == (None, None) and why in task["why"]


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_an_encoder_takes_as_many_tokens_as_it_has_positions_and_no_more(kind):
    model = backbone(kind, 45)
    most = longest(model, 1e30)
    assert longest(model, 512) == most and longest(model, 100) == 100
    model(input_ids=torch.full((1, most), 7))
    with pytest.raises((IndexError, RuntimeError)):
        model(input_ids=torch.full((1, most + 1), 7))


@given(
    kind=st.sampled_from(["group", "shuffled_group", "zca"]), width=st.sampled_from([1, 2, 4, 8, 16]),
    n=st.integers(2, 40),
)  # fmt: skip
@settings(derandomize=True, deadline=None, max_examples=60)
def test_a_batch_is_refused_if_a_group_of_it_has_no_full_rank(kind, width, n):
    whole = kind == "zca"
    chosen = whitening(kind=kind, group_width=None if whole else width)
    width = 16 if whole else width
    x = torch.randn(n, width, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    full = int(torch.linalg.matrix_rank(x - x.mean(dim=0))) == width
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            check_rows(chosen, 16, n=n)
            refused = False
        except ValueError:
            refused = True
    assert (refused, bool(said)) == (not full and not whole, not full and whole)


@pytest.mark.parametrize(
    "experiment", sorted(path.stem for path in (ROOT / "conf/experiment").glob("*.yaml"))
)
def test_no_published_setting_is_refused(experiment):
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        cfg = compose("train", ["run=x", f"+experiment={experiment}"])
    head = instantiate(cfg.head)(width=1024 if "large" in experiment else 768)
    check_rows(head.whitening, 1024 if "large" in experiment else 768, n=cfg.data.batch_size)


def lines_of(data):
    """The lines of bytes, split by hand; None if they are not UTF-8 text with line feeds."""
    try:
        text = data.decode().removeprefix("\ufeff")
    except UnicodeDecodeError:
        return None
    lines = text.split("\n")
    if lines[-1] == "" and data[-1:] in (b"", b"\n"):
        lines.pop()
    lines = [line.rstrip("\r") for line in lines]
    return None if "\0" in text or len(lines) == 1 and "\r" in lines[0] else lines


def tab_records(lines):
    return (
        None if any("\r" in line for line in lines) else [line.split("\t") if line else [] for line in lines]
    )


def comma_records(lines):  # noqa: C901  one branch for each kind of letter
    """RFC 4180 letter by letter; None where a quote does not close, or more follows where it does."""
    records, record, field, state = [], [], "", "start"  # of a field
    for letter in "".join(line + "\n" for line in lines):
        if state == "quoted":
            field, state = (field, "closed") if letter == '"' else (field + letter, state)
        elif letter == '"' and state in ("start", "closed"):
            field, state = field + '"' * (state == "closed"), "quoted"
        elif letter in ",\n":
            blank = letter == "\n" and state == "start" and not record
            record, field, state = record if blank else [*record, field], "", "start"
            if letter == "\n":
                records, record = [*records, record], []
        elif state == "closed" or letter == "\r":
            return None
        else:
            field, state = field + letter, "bare"
    return None if state != "start" else records


def objects(lines):
    """What each line of JSON holds, None for a blank one; None if one is no object or no text."""
    found = []
    for line in lines:
        try:
            found.append(json.loads(line) if line.strip() else None)
            json.dumps(found[-1], ensure_ascii=False).encode()
        except ValueError:
            return None
        if line.strip() and not isinstance(found[-1], dict):
            return None
    return found


def table(records):
    """Records below a header as dictionaries, None for a blank line; None if one has not as many fields."""
    if records is None:
        return None
    first = next(
        (i for i, record in enumerate(records) if record), 0
    )  # blank lines may stand above the header
    header, *rest = records[first:] or [[]]
    if any(row and len(row) != len(header) for row in rest):
        return None
    places = {name: header.index(name) for name in header}  # the first of a name
    return [{name: row[at] for name, at in places.items()} if row else None for row in rest]


RECORDS = {"csv": comma_records, "tsv": tab_records}


def column(kind, data):
    """Column a of each row of a corpus, "" in a blank one; None if there is something wrong with it."""
    lines = lines_of(data)
    if lines is None or kind == "txt":
        return lines
    rows = objects(lines) if kind == "jsonl" else table(RECORDS[kind](lines))
    if rows is None or any("a" not in row for row in rows if row is not None):
        return None
    found = ["" if row is None else row["a"] for row in rows]
    return found if all(isinstance(text, str) for text in found) else None


PIECES = [b"a", b"b", b" ", b"1", b",", b"\t", b'"', b"\n", b"\r\n", b"\r", b"\xef\xbb\xbf", b"\xff", b"\0"]
PIECES += [
    "\u2028".encode(),
    "\x85".encode(),
    b'{"a": "x"}\n',
    b'{"a": 1}',
    b"[",
    b"{}",
    b'{"a": "\\ud800"}\n',
]
PIECES += [b"a,b\n", b"x,y\n", b"x\ty\n", b"a\tb\n", b'"x ""y"",\nz",2\n']
STARTS = st.sampled_from(
    [b"", b"a,b\n", b"a\tb\n", b"b,a\r\n", b"\xef\xbb\xbfa,c\n", b'{"a": "x"}\n', b"a\n"]
)
BYTES = st.binary(max_size=40) | st.tuples(STARTS, st.lists(st.sampled_from(PIECES), max_size=9)).map(
    lambda parts: parts[0] + b"".join(parts[1])
)
SOME = settings(derandomize=True, deadline=None, max_examples=400)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("bytes")


@pytest.mark.slow
@given(data=BYTES, kind=st.sampled_from(["txt", "csv", "tsv", "jsonl"]), packed=st.booleans())
@SOME
def test_any_bytes_are_counted_right_or_refused_as_a_corpus(data, kind, packed, scratch):
    path = scratch / (f"x.{kind}.gz" if packed else f"x.{kind}")
    path.write_bytes(gzip.compress(data, 1) if packed else data)
    expected = column(kind, data)
    kept = [(text,) for text in expected or [] if text.strip()]
    corpus = Corpus(str(path), () if kind == "txt" else ("a",))
    if not kept or len(kept) > 1 == len(set(kept)):
        with pytest.raises(ValueError, match=re.escape(str(path))):
            read(corpus, longest=1000)
        return
    rows, counts = read(corpus, longest=1000)
    assert (rows, counts.total, counts.blank) == (kept, len(expected), len(expected) - len(kept))


@pytest.mark.slow
@given(data=BYTES, cut=st.integers(0, 80), flip=st.integers(0, 80), bit=st.integers(0, 7))
@SOME
def test_a_damaged_archive_is_refused_or_gives_what_it_held(data, cut, flip, bit, scratch):
    damaged = bytearray(gzip.compress(b"one\n" + data, 1))
    damaged[flip % len(damaged)] ^= 1 << bit
    path = scratch / "y.txt.gz"
    path.write_bytes(damaged[:-cut] if cut < len(damaged) and cut else damaged)
    try:
        rows, _ = read(Corpus(str(path)), longest=1000)
    except (ValueError, OSError) as error:
        assert str(path) in str(error)
    else:
        assert rows == [(text,) for text in lines_of(b"one\n" + data) if text.strip()]


def scored(rows):
    """How many rows are pairs with a number; None if one is not, or there are too few."""
    number = r"\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*"
    for row in rows:
        texts = [row.get(name) for name in ("sentence1", "sentence2")]
        score = row.get("score")
        said = score if isinstance(score, str) else json.dumps(score)
        if not re.fullmatch(number, said) or abs(float(said)) == math.inf:
            return None
        if not all(isinstance(text, str) and text.strip() for text in texts):
            return None
    return len(rows)


def pairs(kind, data):
    """The number of pairs in a file of them; None if it is to be refused."""
    lines = lines_of(data)
    if lines is None:
        return None
    records = [] if kind == "jsonl" else RECORDS[kind](lines)
    records = records and [record for record in records if record]
    named = [name for name in records[0] if name] if records else []
    if records is None or len(set(named)) < len(named):
        return None
    rows = objects(lines) if kind == "jsonl" else table(records)
    count = None if rows is None else scored([row for row in rows if row is not None])
    return None if count is None or count < 2 else count


RIGHT = b"score sentence1 sentence2"
SCORED = [b"1", b"2.5", b"-1e3", b"nan", b"1_0", b"1e999", b"", b"\xff", b"x", b'"', b"true", b" 3 "]
CELL = st.sampled_from([b"a", b"b c", b"d", "\u2028e".encode(), b'"f"', b"f\r", b"", b" "])
WORD = st.sampled_from([b"a", b"b c", "\u2028e".encode(), b" f "])
GOOD = st.tuples(st.sampled_from([b"1", b"2.5", b"0", b"-1e3"]), WORD, WORD)
ROWS = st.tuples(
    st.lists(GOOD, max_size=5), st.lists(st.tuples(st.sampled_from(SCORED), CELL, CELL), max_size=1)
).map(lambda parts: parts[1] + parts[0])


@st.composite
def pair_files(draw):
    """Bytes close to a file of pairs, in any of its formats, and bytes far from it."""
    kind = draw(st.sampled_from(["tsv", "csv", "jsonl"]))
    if draw(st.integers(0, 3)) == 0:
        return kind, draw(BYTES)
    rows = draw(ROWS)
    end = draw(st.sampled_from([b"\n", b"\r\n", b"\n\n"]))
    if kind == "jsonl":
        text = [b'{"score": %s, "sentence1": "%s", "sentence2": "%s"}' % row for row in rows]
    else:
        names = draw(st.sampled_from([RIGHT, RIGHT, RIGHT, b"score sentence1 sentence3", b"score score a"]))
        between = b"\t" if kind == "tsv" else b","
        text = [between.join(row) for row in (tuple(names.split()), *rows)]
    return kind, draw(st.sampled_from([b"", b"\xef\xbb\xbf", end])) + end.join(text) + draw(
        st.sampled_from([b"", end, end, b"x"])
    )


@given(file=pair_files())
@SOME
@pytest.mark.slow
def test_any_bytes_are_counted_right_or_refused_as_pairs(file, scratch):
    kind, data = file
    path = scratch / f"p.{kind}"
    path.write_bytes(data)
    expected = pairs(kind, data)
    if expected is None:
        with pytest.raises(ValueError, match=re.escape(str(path))):
            read_pairs(path)
    else:
        assert len(read_pairs(path).gold) == expected


@given(rows=ROWS, rest=st.just(b"") | BYTES)
@SOME
@pytest.mark.slow
def test_any_bytes_are_counted_right_or_refused_as_a_benchmark(rows, rest, scratch):
    path = scratch / "STS/STSBenchmark/sts-dev.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(b"g\tf\ty\t0\t%s\t%s\t%s\n" % row for row in rows) + rest)
    lines = lines_of(path.read_bytes())
    fields = [line.split("\t") for line in lines or [] if line]
    names = ("score", "sentence1", "sentence2")
    whole = lines is not None and all(len(row) > 6 for row in fields)
    expected = scored([dict(zip(names, row[4:7], strict=True)) for row in fields]) if whole else None
    if expected is None:
        with pytest.raises(ValueError, match=re.escape(str(path))):
            read_task("STS-B/dev", scratch)
    else:
        assert len(read_task("STS-B/dev", scratch)[0].gold) == expected


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
VALUES = SCALARS | st.lists(SCALARS, max_size=3) | st.dictionaries(st.text(max_size=3), SCALARS, max_size=2)
W = {"kind": "group", "group_width": 2, "eps": 1e-5, "shrinkage": 0.0, "gradient": "centre"}
W |= {"partition": "view", "momentum": 0.99, "transform": "zca", "iterations": 5}
BUILT = {  # a symbol, its settings, and what a script gives it
    "training.loss.ContrastiveLoss": (
        {"form": "l1", "temperature": 0.05, "weights": [1.0], "denominator": "view",
         "hard_negative_log_weight": 0.0}, {},
    ),
    "model.whitener.WhiteningSettings": (W, {}),
    "model.head.ProjectionHead": ({"whitening": None, "dense": True, "position": "before"}, {"width": 16}),
    "model.head.Pooling": ({"kind": "mean", "layers": [1, -1]}, {}),
    "data.datamodule.SentenceData": (
        {"corpus": "c.txt", "columns": [], "sample": None, "max_length": 32, "batch_size": 64,
         "batch_tokens": None, "passes": 2, "repetition": 0.0, "seed": 0}, {},
    ),
    "training.optim.adamw": (
        {"lr": 1e-3, "weight_decay": 0.0, "warmup_steps": 0},
        {"parameters": [torch.nn.Parameter(torch.ones(2))], "total_steps": 9},
    ),
    "evaluation.postprocess.Postprocess": (
        {"kind": "whitening", "k": None, "shrinkage": 0.0, "top": None, "power": 0.5}, {},
    ),
    "evaluation.protocol.Protocol": (
        {"name": "mine", "headline": "all", "case": "as_is", "max_length": None, "extra": 0,
         "rows": [{"name": "as it is"}]}, {},
    ),
}  # fmt: skip


@given(data=st.data(), symbol=st.sampled_from(sorted(BUILT)))
@SOME
def test_any_value_of_a_setting_builds_or_is_refused(data, symbol):
    values, given_by_script = BUILT[symbol]
    key = data.draw(st.sampled_from(sorted(values)))
    values = values | {key: data.draw(VALUES)}
    node = {"_target_": f"whitenedcse.{symbol}", **values}
    module, _, name = node["_target_"].rpartition(".")
    try:
        refuse_unknown({"it": node}, ["it"])
        getattr(importlib.import_module(module), name)(**values, **given_by_script)
    except ValueError as error:
        assert "\n" not in str(error)


KEYS = st.sampled_from(["loss", "views", "temperature", "k", "tasks", "names", "_target_"]) | st.text(
    max_size=3
)
LEAVES = VALUES | st.sampled_from(
    [f"whitenedcse.{name}" for name in BUILT] + ["${views}", "${loss.k}", "${a", "a.b"]
)


@given(
    config=st.dictionaries(KEYS, st.recursive(LEAVES, lambda deep: st.dictionaries(KEYS, deep), max_leaves=8))
)
@settings(SOME, max_examples=200)
@pytest.mark.slow
def test_any_config_passes_or_is_refused(config):
    with suppress(ValueError):
        refuse_unknown(config, ["loss", "views", "k", "tasks"])

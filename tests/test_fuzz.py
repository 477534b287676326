"""Whatever a file holds that is read, the command returns or says in one line what is wrong with which file.

A valid file of each kind is made once. Hypothesis then damages it: bytes, length, and in JSON one value,
which becomes another type, nests deeply or vanishes. No damage runs code, takes 5 s, or is a traceback.
"""

import json
import os
import pickle
import re
import shutil
import signal
import warnings
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from encoders import SENTENCES, backbone, embedder_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_bulk import corpus_of, job_of
from test_comparison import run as evaluation
from test_sweep_report import trained

from whitenedcse import files
from whitenedcse.data import tokens
from whitenedcse.data.corpus import Corpus, read
from whitenedcse.evaluation import mteb_results
from whitenedcse.evaluation.postprocess import Postprocess
from whitenedcse.evaluation.sts import read_pairs
from whitenedcse.files import DEPTH, DIGESTS, intact, read_json, seal, write_json
from whitenedcse.model import checkpoint
from whitenedcse.model.embedder import Embedder
from whitenedcse.model.encoder import Encoder
from whitenedcse.model.plane_files import Shard
from whitenedcse.model.planes import digest, planes
from whitenedcse.report import page, published, sweep
from whitenedcse.report.comparison import compared
from whitenedcse.report.contrasts import comparison
from whitenedcse.run import Run, misfit
from whitenedcse.serving import index_files
from whitenedcse.serving.bulk import Form, arrays, encoded
from whitenedcse.serving.index import Index

SECONDS = 5
ROWS = [[2, 5, 6, 3], [2, 7, 3]]


class TooLong(BaseException):
    """A reader took more than SECONDS."""


def late(*_):
    raise TooLong


def mteb_result(folder):
    score = {"hf_subset": "default", "main_score": 0.5, "cosine_spearman": 0.5, "euclidean_spearman": 0.5}
    content = {"task_name": "STSBenchmark", "dataset_revision": "a", "scores": {"test": [score]}}
    write_json(folder / "STSBenchmark.json", content)
    saved = {"default": {"test": {"cosine_scores": [0.1, 0.9, 0.4]}}, "mteb_model_meta": {"revision": "r"}}
    write_json(folder / "STSBenchmark_predictions.json", saved)
    write_json(folder / "model_meta.json", {"revision": "r"})


@pytest.fixture(scope="module")
def made(tmp_path_factory, tokenizer):
    """A folder with a valid file of each kind."""
    os.environ["WHITENEDCSE_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    root = tmp_path_factory.mktemp("fuzz")
    encoder = Encoder(backbone("bert", len(tokenizer)), tokenizer)
    embedder = embedder_of(encoder)
    x = embedder.encode(SENTENCES)
    fit = Postprocess("whitening").fit(x.astype(np.float64))
    fit.save(root / "fit.safetensors", {"corpus": "c.txt"})
    checkpoint.save(embedder, root / "best")
    checkpoint.save(embedder_of(encoder, layers=(1, -1), kind="mean", embedding="dense"), root / "st")
    (root / "st/whitenedcse.json").unlink()
    Index.build(embedder, SENTENCES).save(root / "index")
    corpus = corpus_of(SENTENCES, root)
    for to in ("npy", "parquet"):
        encoded(job_of(embedder, corpus, root / to, form=Form(to)))
    cached = tokens.tokenised(corpus, tokenizer, 16, cache_dir=root / "tokens")
    (root / "tokens").joinpath(next(p.name for p in (root / "tokens").iterdir() if p.is_dir())).rename(
        root / "ids"
    )
    assert cached.columns == 1
    planes(encoder, ROWS, ["cls"], [1, 2])
    (shard,) = Path(os.environ["WHITENEDCSE_CACHE"]).glob("vectors/*/*")
    shard.rename(root / "planes")
    for seed in (1, 2):
        facts = {"system": "group", "series": {"dev/spearman": {0: 1.0, 50: 2.0, 100: 1.5}}}
        trained(root / "runs" / str(seed), seed=seed, best=70.0 + seed, average=66.0, **facts)
        scores = read_json(root / "runs" / str(seed) / "scores.json") | {"model": "m", "seed": seed}
        for row in scores["rows"]:
            row |= {"pooling": "cls over layers [-1]", "postprocess": {}, "fit": ""}
        write_json(root / "runs" / str(seed) / "scores.json", scores)
    evaluation(root / "one", 0.5, 1)
    evaluation(root / "other", 0.7, 2)
    (root / "sealed").mkdir()
    (root / "sealed/a").write_bytes(b"a")
    seal(root / "sealed")
    (root / "p.tsv").write_text("score\tsentence1\tsentence2\n1\ta b\tc\n2\td\te\n0.5\tf\tg\n")
    (root / "c.jsonl").write_text('{"a": "one"}\n{"a": "two"}\n')
    pyarrow.parquet.write_table(pyarrow.table({"a": ["one", "two"]}), root / "c.parquet")
    (root / "mteb").mkdir()
    mteb_result(root / "mteb")
    torch.save(
        {"global_step": 3, "state_dict": {"x": torch.ones(3)}, "callbacks": {"a": [1]}}, root / "step.ckpt"
    )
    for file in root.rglob(DIGESTS):  # they refuse any damage; here it is left to what reads the content
        if file.parent.name not in ("sealed", "ids", "planes"):
            file.unlink()
    yield root
    del os.environ["WHITENEDCSE_CACHE"]


def reported(folder):
    run = Run(folder).checked()
    page.about(run), page.keys(run), page.run_grids(run)
    comparison(sweep.gathered([run, Run(folder.with_name("2"))]))
    sweep.write_csv(sweep.gathered([run]), folder.with_name("seeds.csv"))
    published.report(next(iter(published.tables())), [folder])


def kept(folder):
    found = tokens._opened(folder, {})
    return found and found.rows(np.arange(len(found)), [0])


def plane(folder):
    shutil.rmtree(folder.with_name("copy"), ignore_errors=True)
    copy = shutil.copytree(folder, folder.with_name("copy"))  # a damaged one is removed
    found = Shard.open(copy, [("cls", 1)], np.array([digest(row) for row in ROWS]))
    return found and found.planes["cls", 1]


RUN, BEST = "runs/1", "best"
READERS = {  # a file: what reads it, given the folder that it is in
    f"{RUN}/scores.json": reported,
    f"{RUN}/versions.json": reported,
    f"{RUN}/config.yaml": reported,
    f"{RUN}/metrics.csv": reported,
    "one/scores.json": lambda folder: compared([str(folder), str(folder.with_name("other"))], 20, None),
    "one/items.npz": lambda folder: compared([str(folder), str(folder.with_name("other"))], 20, None),
    f"sealed/{DIGESTS}": lambda folder: intact(folder, "copy it again"),
    "npy/manifest.json": lambda folder: list(arrays(folder)),
    "npy/shard-00000.npy": lambda folder: list(arrays(folder)),
    "parquet/shard-00000.parquet": lambda folder: list(arrays(folder)),
    "index/index.json": lambda folder: index_files.load(folder),
    "index/part-0/vectors.npy": lambda folder: files.array(folder / "vectors.npy"),
    "fit.safetensors": lambda folder: Postprocess.load(folder / "fit.safetensors"),
    f"{BEST}/whitenedcse.json": Embedder.load,
    f"{BEST}/head.safetensors": lambda folder: files.tensors(folder / "head.safetensors"),
    f"{BEST}/config.json": Embedder.load,
    f"{BEST}/tokenizer.json": Embedder.load,
    f"{BEST}/tokenizer_config.json": Embedder.load,
    "st/modules.json": Embedder.load,
    "st/sentence_bert_config.json": Embedder.load,
    "st/1_WeightedLayerPooling/config.json": lambda folder: Embedder.load(folder.parent),
    "st/1_WeightedLayerPooling/model.safetensors": lambda folder: Embedder.load(folder.parent),
    "st/2_Pooling/config.json": lambda folder: Embedder.load(folder.parent),
    "st/3_Dense/config.json": lambda folder: Embedder.load(folder.parent),
    "st/3_Dense/model.safetensors": lambda folder: Embedder.load(folder.parent),
    "ids/meta.json": kept,
    "ids/offsets": kept,
    "planes/cls-1.npy": plane,
    "planes/names.npy": plane,
    "mteb/STSBenchmark.json": mteb_results.read,
    "mteb/STSBenchmark_predictions.json": mteb_results.read,
    "p.tsv": lambda folder: read_pairs(folder / "p.tsv"),
    "c.jsonl": lambda folder: read(Corpus(str(folder / "c.jsonl"), ("a",)), longest=9),
    "c.parquet": lambda folder: read(Corpus(str(folder / "c.parquet"), ("a",)), longest=9),
    "step.ckpt": lambda folder: files.checkpoint(folder / "step.ckpt"),
}


class Bomb:
    """An object whose pickle makes a folder when it is read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def nested(depth):
    return json.loads("[" * depth + "]" * depth)


ODD = [None, True, -1, 0, 10**9, 1e308, 10**400, float("nan"), "", "x", "../..", [], {}, [None], [[1, 2, 3]]]
ODD += [{"a": None}, "\ud800", nested(60), nested(900)]
TEXTS = ["[" * 100_000, '{"a":' * 100_000, "- " * 100_000, "a: &a [1]\nb: [*a, *a]\n", "{}", "[]", "null", ""]


@st.composite
def damages(draw):
    """What happens to a file: where, and to which value, byte or text."""
    kinds = ["value", "value", "value", "gone", "flip", "flip", "cut", "text", "insert"]
    at = draw(st.lists(st.integers(0, 2**20), min_size=1, max_size=9))
    odd, text = draw(st.integers(0, len(ODD) - 1)), draw(st.integers(0, len(TEXTS) - 1))
    return draw(st.sampled_from(kinds)), at, odd, draw(st.integers(1, 255)), text


def damaged(content, damage):
    """The bytes of a file after the damage; a change of a value is one of a byte where it is no JSON."""
    kind, at, odd, byte, text = damage
    places = [i % max(1, len(content)) for i in at]
    if kind in ("value", "gone"):
        with suppress(ValueError):
            return changed(json.loads(content), at, ODD[odd], gone=kind == "gone")
    other = bytearray(content or b"x")
    for place in places:
        other[place] ^= byte
    first = places[0]
    wholes = {"cut": content[:first], "text": TEXTS[text].encode()}
    wholes["insert"] = content[:first] + bytes([byte]) + content[first:]
    return wholes.get(kind, bytes(other))


def changed(content, at, odd, *, gone):
    """JSON with one value replaced or, with `gone`, removed; `at` chooses the way to it."""
    whole = [content]
    holder, key = whole, 0
    for step in at:
        inner = holder[key]
        ways = (
            list(inner) if isinstance(inner, dict) else range(len(inner)) if isinstance(inner, list) else ()
        )
        if ways and step % 4:
            holder, key = inner, ways[step // 4 % len(ways)]
    if gone and holder is not whole:
        del holder[key]
    else:
        holder[key] = odd
    return json.dumps(whole[0]).encode()


def tried(path, function, root):
    """The reader either returns or refuses by name, in time."""
    signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            function(path.parent)
    except (ValueError, OSError) as error:
        assert str(root) in str(error), error
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


SOME = settings(
    derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck), max_examples=4
)


def damage_and_read(made, name, damage):
    path = made / name
    content = path.read_bytes()
    try:
        path.write_bytes(damaged(content, damage))
        tried(path, READERS[name], made / name.partition("/")[0])
    finally:
        path.write_bytes(content)


@pytest.mark.parametrize("name", READERS)
@pytest.mark.slow(but=12)
def test_the_reader_takes_the_file_as_it_was_made(made, name):
    READERS[name]((made / name).parent)


@pytest.mark.parametrize("name", READERS)
@given(damage=damages())
@SOME
@pytest.mark.slow(but=12)
def test_a_damaged_file_is_read_or_refused_by_name(made, name, damage):
    damage_and_read(made, name, damage)


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
@given(damage=damages())
@settings(SOME, max_examples=8)
def test_a_damaged_file_is_read_or_refused_by_name_at_length(made, name, damage):
    damage_and_read(made, name, damage)


LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefghi", "bcdefghij", strict=True)
)
KNOWN = [  # findings C12
    *(
        (name, "[" * 100_000, "is not JSON|is damaged|depth")
        for name in READERS
        if name.endswith((".json", ".yaml"))
    ),
    (f"{RUN}/scores.json", '{"dev": null}', "dev is null"),
    (f"{RUN}/config.yaml", LAUGHS, r"alias \(\*\)"),
    (f"{RUN}/config.yaml", "- " * 100_000, "50 deep"),
    (
        f"{BEST}/config.json",
        '{"model_type": "bert", "num_hidden_layers": 1000000000}',
        "num_hidden_layers=1000",
    ),
    (f"{BEST}/config.json", '{"a": [{"vocab_size": 1e300}]}', "vocab_size=1e"),
]


@pytest.mark.parametrize(("name", "text", "words"), KNOWN, ids=range(len(KNOWN)))
def test_what_was_a_traceback_or_a_hang_is_refused_at_once(made, name, text, words):
    path = made / name
    content = path.read_bytes()
    signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        path.write_text(text)
        if name.startswith(("ids", "planes")):  # a cache: made again
            assert READERS[name](path.parent) is None
            return
        with pytest.raises(ValueError, match=f"{re.escape(str(made))}.*({words})"):
            READERS[name](path.parent)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        path.write_bytes(content)


PICKLED = [
    "npy/shard-00000.npy",
    "step.ckpt",
    "one/items.npz",
    f"{BEST}/head.safetensors",
    "planes/names.npy",
]


@pytest.mark.parametrize("name", PICKLED)
@pytest.mark.parametrize("how", ["pickle", "torch", "numpy"])
def test_no_file_runs_code(made, name, how, tmp_path):
    path, bomb = made / name, Bomb(tmp_path / "ran")
    content = path.read_bytes()
    write = {
        "pickle": lambda stream: pickle.dump(bomb, stream),
        "torch": lambda stream: torch.save({"x": bomb}, stream),
        "numpy": lambda stream: np.save(stream, np.array([bomb]), allow_pickle=True),
    }
    try:
        with path.open("wb") as stream:
            write[how](stream)
        tried(path, READERS[name], made / name.partition("/")[0])
    finally:
        path.write_bytes(content)
    assert not bomb.path.exists()


def test_the_deepest_json_that_is_taken_and_what_lacks_a_key(tmp_path):
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"a": nested(DEPTH - 1)}))
    assert read_json(path) == {"a": nested(DEPTH - 1)}
    path.write_text(json.dumps({"a": nested(DEPTH)}))
    with pytest.raises(ValueError, match=f"a.json holds values inside each other, over {DEPTH} deep"):
        read_json(path)
    path.write_text('{"a": {"b": 1}}')
    with pytest.raises(ValueError, match=r"a.json lacks 'c' among b; copy"):
        read_json(path)["a"]["c"]
    with pytest.raises(ValueError, match=r"a.json holds a JSON \w+, not the expected list"):
        read_json(path, list)


@pytest.mark.parametrize(
    ("content", "form", "wrong"),
    [
        ({"a": 1, "other": []}, {"a": int}, ""),
        ({"a": None}, {"a": (int, None)}, ""),
        ({"a": "x"}, {"a": (int, None)}, "a is str 'x'"),
        ({"a": {"b": [1.5, "x"]}}, {"a": {"*": [(int, float), ...]}}, "a.b.1 is str 'x'"),
        ({"a": [1, 2, 3]}, {"a": [int, int]}, "a is list"),
        ({"a": []}, {"a": [int, ...]}, "a is list"),
        ({"a": 10**400}, {"a": int}, "a is int 1000"),
        ({"a": float("inf")}, {"a": float}, "a is float inf"),
        ([], {"a": int}, "it is list"),
    ],
)
def test_a_value_that_does_not_fit_its_form_is_named(content, form, wrong):
    found = misfit(content, form)
    assert found.startswith(wrong) and bool(found) == bool(wrong)

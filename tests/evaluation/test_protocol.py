"""A published protocol is one argument: its numbers equal those of a straightforward script of its text.

The scripts below know Transformers, NumPy and SciPy, and nothing of this project.
"""

import json

import numpy as np
import pytest
import torch
from encoders import architecture, byte_level
from scipy.stats import spearmanr
from transformers import AutoModel, AutoTokenizer

from whitenedcse.app import cli
from whitenedcse.evaluation.postprocess import Postprocess
from whitenedcse.evaluation.protocol import Protocol, Row, chosen, setting
from whitenedcse.model.encoder import Encoder
from whitenedcse.ragged import rows as rows_of

WORDS = [f"{a}{b}" for a in "bcdfgklm" for b in ("a", "e", "i", "o", "u", "an", "el")]
CASED = [word.capitalize() for word in WORDS[::2]]
STS12 = ("MSRpar", "MSRvid", "SMTeuroparl", "surprise.OnWN", "surprise.SMTnews")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A cased random encoder, and a data folder with STS12, STS-B and SICK-R in SentEval's layout."""
    folder = tmp_path_factory.mktemp("world")
    tokenizer = byte_level(ends=True)
    tokenizer.model_max_length = 128
    model = architecture("bert", len(tokenizer))
    with torch.no_grad():
        for parameter in model.parameters():  # else a direction of LayerNorm's output is empty
            parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    written(folder / "senteval", np.random.default_rng(0))
    return folder


def pairs(rng, n):
    """Scored pairs of sentences; some sentences have 90 words, which is beyond any length."""
    lengths = rng.choice([3, 6, 9, 12, 90], (n, 2), p=[0.25, 0.25, 0.25, 0.2, 0.05])
    texts = [[" ".join(rng.choice(WORDS + CASED, k)) for k in both] for both in lengths]
    return [(a, b, f"{rng.uniform(1, 5):.2f}") for a, b in texts]


def written(home, rng):
    files = {}
    for name, n in zip(STS12, (20, 35, 25, 40, 15), strict=True):
        rows = pairs(rng, n)
        rows[3] = (*rows[3][:2], "")  # unscored
        files[f"STS/STS12-en-test/STS.input.{name}.txt"] = "".join(f"{a}\t{b}\n" for a, b, _ in rows)
        files[f"STS/STS12-en-test/STS.gs.{name}.txt"] = "".join(f"{g}\n" for *_, g in rows)
    for part, n in (("train", 60), ("dev", 30), ("test", 50)):
        rows = [f"g\tf\ty\t0\t{g}\t{a}\t{b}\n" for a, b, g in pairs(rng, n)]
        files[f"STS/STSBenchmark/sts-{part}.csv"] = "".join(rows)
    for part, n in (("train", 40), ("trial", 20), ("test_annotated", 50)):
        rows = [f"{i}\t{a}\t{b}\t{g}\tx\r\n" for i, (a, b, g) in enumerate(pairs(rng, n))]
        files[f"SICK/SICK_{part}.txt"] = "h\ta\tb\ts\tj\r\n" + "".join(rows)
    for name, text in files.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_bytes(text.encode())


def evaluated(world, monkeypatch, tmp_path, *arguments, cache=None):
    """scores.json of evaluate.py, run here."""
    tmp_path.mkdir(exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WHITENEDCSE_DATA", str(world))
    monkeypatch.setenv("WHITENEDCSE_CACHE", cache or str(world / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    words = [f"model={world / 'model'}", "tasks.names=[STS12,STS-B,SICK-R]", "draws=20", "run=x"]
    assert cli.main(["evaluate", *words, *arguments]) == 0
    return json.loads((tmp_path / "outputs/x/scores.json").read_text())


class Script:
    """What a reader of the papers would write: sentence by sentence, no batches, nothing shared."""

    def __init__(self, world, max_length):
        self.home, self.max_length, self.seen = world / "senteval", max_length, {}
        self.tokenizer = AutoTokenizer.from_pretrained(world / "model")
        self.model = AutoModel.from_pretrained(world / "model").eval()

    def layers(self, text):
        if text not in self.seen:
            ids = self.tokenizer(text, truncation=True, max_length=self.max_length, return_tensors="pt")
            with torch.no_grad():
                hidden = self.model(**ids, output_hidden_states=True).hidden_states
            self.seen[text] = [h[0].double().numpy() for h in hidden]
        return self.seen[text]

    def read(self, task, part="test"):
        """[(subset, [(a, b, gold)])]."""
        if task == "STS12":
            subsets = []
            for name in STS12:
                folder = self.home / "STS/STS12-en-test"
                text = (folder / f"STS.input.{name}.txt").read_text().split("\n")
                gold = (folder / f"STS.gs.{name}.txt").read_text().split("\n")
                rows = [(*t.split("\t"), float(g)) for t, g in zip(text, gold, strict=True) if g]
                subsets.append(rows)
            return subsets
        if task == "STS-B":
            lines = (self.home / f"STS/STSBenchmark/sts-{part}.csv").read_text().split("\n")[:-1]
            return [[(f[5], f[6], float(f[4])) for f in (line.split("\t") for line in lines)]]
        part = {"test": "test_annotated", "dev": "trial"}.get(part, part)
        lines = (self.home / f"SICK/SICK_{part}.txt").read_text().split("\n")[1:-1]
        return [[(f[1], f[2], float(f[3])) for f in (line.split("\t") for line in lines)]]


def cosines(pairs, embed, kernel=None):
    mean, w = kernel if kernel else (0, np.eye(16))
    out = []
    for a, b, _ in pairs:
        u, v = ((embed(text) - mean) @ w for text in (a, b))
        out.append(u @ v / np.linalg.norm(u) / np.linalg.norm(v))
    return out


def kernel(vectors, k=None):
    u, s, _ = np.linalg.svd(np.cov(np.array(vectors).T))
    return np.mean(vectors, axis=0), (u / np.sqrt(s))[:, :k]


def correlation(pairs, similarity):
    return 100 * spearmanr([g for *_, g in pairs], similarity).statistic


@pytest.mark.slow
def test_simcse_puts_all_pairs_of_a_task_together(world, monkeypatch, tmp_path):
    (row,) = evaluated(world, monkeypatch, tmp_path, "pooling=mean")["rows"]
    script = Script(world, 128)
    for task in ("STS12", "STS-B", "SICK-R"):
        pairs = [pair for subset in script.read(task) for pair in subset]
        expected = correlation(pairs, cosines(pairs, lambda t: script.layers(t)[-1].mean(0)))
        assert row["sts"]["tasks"][task]["all"] == pytest.approx(expected, abs=1e-6)


@pytest.mark.slow
def test_bert_whitening_weighs_subsets_and_whitens_on_train_dev_and_test(world, monkeypatch, tmp_path):
    (world / "corpus.txt").write_text("".join(f"{' '.join((CASED + WORDS)[i : i + 4])}\n" for i in range(50)))
    fit = [f"fit={world / 'corpus.txt'}", "k=5", "sample=null"]
    scores = evaluated(world, monkeypatch, tmp_path, "protocol=bert_whitening", *fit)
    script = Script(world, 64)

    def embed(text):
        hidden = script.layers(text.lower())
        return (hidden[1].mean(0) + hidden[-1].mean(0)) / 2

    assert scores["headline"] == "wmean"
    raw, target, target_k, corpus, corpus_k = scores["rows"]
    names = [f"{w} ({f})" for f in ("target", world / "corpus.txt") for w in ("whitening", "whitening-5")]
    assert [row["name"] for row in scores["rows"]] == ["first-last-avg", *names]
    assert [row["setting"] for row in scores["rows"]] == ["", *["transductive"] * 2, *["inductive"] * 2]
    lines = (world / "corpus.txt").read_text().split("\n")[:-1]
    for task in ("STS12", "STS-B", "SICK-R"):
        subsets = script.read(task)
        parts = ["test"] if task == "STS12" else ["train", "dev", "test"]
        read = (subset for part in parts for subset in script.read(task, part))
        own = [embed(text) for subset in read for a, b, _ in subset for text in (a, b)]
        texts = [embed(text) for text in lines]
        fits = [(raw, None), (target, kernel(own)), (target_k, kernel(own, 5))]
        fits += [(corpus, kernel(texts)), (corpus_k, kernel(texts, 5))]
        for row, fitted in fits:
            values = [correlation(s, cosines(s, embed, fitted)) for s in subsets]
            expected = np.average(values, weights=[len(s) for s in subsets])
            assert row["sts"]["tasks"][task]["wmean"] == pytest.approx(expected, abs=1e-6), row["name"]


@pytest.mark.slow
def test_whiteningbert_lowers_all_but_sick_and_divides_by_n_and_a_hundredth(
    world, monkeypatch, tmp_path, capsys
):
    scores = evaluated(world, monkeypatch, tmp_path, "protocol=whiteningbert")
    poolings = ["cls over layers [-1]", *(f"mean over layers {layers}" for layers in ([-1], [1]))]
    assert f"pooling: {', '.join([*poolings, 'mean over layers [1, -1]'])}   " in capsys.readouterr().out
    script = Script(world, 128)

    def mean(text, *layers):
        hidden = [script.layers(text)[layer] for layer in layers]
        return np.mean([h.sum(0) / (len(h) + 0.01) for h in hidden], axis=0)

    ways = {
        "cls last": lambda t: script.layers(t)[-1][0],
        "mean last": lambda t: mean(t, -1),
        "mean L1": lambda t: mean(t, 1),
        "mean L1+last": lambda t: mean(t, 1, -1),
        "mean L1+last whitened": lambda t: mean(t, 1, -1),
    }
    assert [row["name"] for row in scores["rows"]] == list(ways)
    for task in ("STS12", "STS-B", "SICK-R"):
        lower = [[(a.lower(), b.lower(), g) for a, b, g in s] for s in script.read(task)]
        subsets = script.read(task) if task == "SICK-R" else lower
        for row, embed in zip(scores["rows"], ways.values(), strict=True):
            whole = [embed(text) for s in subsets for a, b, _ in s for text in (a, b)]
            fitted = kernel(whole) if "whitened" in row["name"] else None
            expected = np.mean([correlation(s, cosines(s, embed, fitted)) for s in subsets])
            assert row["sts"]["tasks"][task]["mean"] == pytest.approx(expected, abs=1e-6), (task, row["name"])


@pytest.mark.slow
def test_each_sentence_is_encoded_once_whatever_is_asked_of_its_layers(world, monkeypatch, tmp_path):
    seen, forward = [], Encoder.forward

    def spy(self, batch, *arguments, **more):
        # but for the sentences of two words that tell a decoder from an encoder
        seen.extend(tuple(row) for row in rows_of(batch) if len(set(row)) > 2)
        return forward(self, batch, *arguments, **more)

    monkeypatch.setattr(Encoder, "forward", spy)
    settings = ["pooling=cls", "layers=[0,2]", "postprocess=zca", "fit=year", "keep=true"]
    settings += ["figures=[layers,subsets,components,projection]"]  # of all layers
    rows = evaluated(world, monkeypatch, tmp_path, *settings)["rows"]
    script, texts = Script(world, 128), set()
    for task in ("STS12", "STS-B", "SICK-R"):
        texts |= {text for s in script.read(task) for a, b, _ in s for text in (a, b)}
    ids = {tuple(script.tokenizer(text, truncation=True, max_length=128)["input_ids"]) for text in texts}
    assert sorted(seen) == sorted(ids)
    assert [row["name"] for row in rows] == ["as it is", "zca (year)", "whitening (year)"]
    out = tmp_path / "outputs/x"
    for name in ("layers", "subsets", "components", "projection"):
        assert (out / f"{name}.csv").is_file() and (out / f"{name}.png").is_file()
    kept, lines = np.load(out / "cls.npy"), (out / "sentences.jsonl").read_text().splitlines()
    assert sorted(map(json.loads, lines)) == sorted(texts) and kept.shape == (4, len(texts), 16)
    layers = script.layers(json.loads(lines[7]))
    assert kept[:, 7] == pytest.approx(np.array([hidden[0] for hidden in layers]), abs=1e-5)


def test_rows_whose_corpus_is_not_here_are_left_out_aloud(monkeypatch, tmp_path):
    gone = lambda _: (_ for _ in ()).throw(FileNotFoundError("gone"))  # noqa: E731
    monkeypatch.setattr("whitenedcse.evaluation.protocol.located", gone)
    rows = [
        {"name": "a"},
        {"name": "b", "map": {"kind": "zca"}, "fit": "nli"},
        {"name": "c", "map": {"kind": "pca"}, "fit": "year"},
    ]
    protocol = Protocol("x", "all", "as_is", None, 0, rows)
    kept, said = chosen(protocol, {"kind": "whitening", "k": 3}, "target")
    fits = [("a", ""), ("c", "transductive"), ("whitening-3 (target)", "transductive")]
    assert [(row.name, setting(row.fit)) for row in kept] == fits
    assert said == ["left out 'b': gone"]
    mistyped = [*rows, {"name": "d", "map": {"kind": "zca"}, "fit": "wik1m.txt"}]
    with pytest.raises(FileNotFoundError, match="gone"):  # not a name of this library's: mistyped
        chosen(Protocol("x", "all", "as_is", None, 0, mistyped), None, "target")
    assert kept[0].maker is None and kept[2].maker().k == 3
    prefix = chosen(protocol, {"kind": "prefix", "k": 3}, "target")[0][-1]  # not fitted to anything
    assert (prefix.name, prefix.fit, prefix.maker().k) == ("prefix-3", "", 3)
    soft = Postprocess("zca", shrinkage=0.1, power=0.25).settings
    assert chosen(protocol, soft, "year")[0][-1].name == "zca shrinkage=0.1 power=0.25 (year)"
    assert chosen(protocol, Postprocess("pca").settings, "year")[0][-1].name == "pca (year)"
    rows.append({**rows[2], "layers": [0]})
    twice = Protocol("x", "all", "as_is", None, 0, [*rows, rows[2], rows[0]])  # such as where fit=target
    layers = [(row.name, row.layers) for row in chosen(twice, None, "target")[0]]
    assert layers == [("a", (-1,)), ("c", (-1,)), ("c", [0])]


def test_a_transform_beside_rows_with_poolings_is_fitted_to_the_pooling_of_the_last():
    def made(*rows, settings, curve=False):
        every = [
            {"name": name, "pooling": "mean", "layers": list(layers), **more} for name, layers, more in rows
        ]
        return chosen(Protocol("x", "all", "as_is", None, 0, every), settings, "t.txt", curve=curve)[0][-1]

    white = {"map": {"kind": "whitening", "k": 3}, "fit": "year"}
    rows = [("last", [-1], {}), ("two", [1, -1], {}), ("two whitened", [1, -1], white)]
    row = made(*rows[:2], settings=None, curve=True)
    assert (row.name, row.pooling, row.layers) == ("two whitening (t.txt)", "mean", [1, -1])
    row = made(*rows, settings={"kind": "prefix", "k": 2})
    assert (row.name, row.pooling, row.layers, row.fit) == ("two prefix-2", "mean", [1, -1], "")
    assert made(rows[0], rows[2], settings={"kind": "zca"}).name == "zca (t.txt)"  # none is without transform


def test_a_protocol_with_a_wrong_aggregation_or_transform_is_refused():
    with pytest.raises(ValueError, match="protocol.headline='median' is not one of all, mean, wmean"):
        Protocol("x", "median", "as_is", None, 0, [])
    with pytest.raises(ValueError, match="kind='white'"):
        Row("a", map={"kind": "white"}, fit="year")
    with pytest.raises(ValueError, match="'a' lacks what its transform is fitted to"):
        Row("a", map={"kind": "zca"})
    with pytest.raises(ValueError, match="protocol.case='upper' is not one of as_is, lower, lower_but_sick"):
        Protocol("x", "all", "upper", None, 0, [])
    assert setting(Row("a").fit) == ""

"""A prompt is text before each sentence, wherever sentences are encoded, and travels with the model.

Oracles: the same sentences with the prompt written before them by hand, and Sentence-Transformers.
"""

import csv
import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from encoders import SENTENCES, architecture, byte_level, embedder_of
from exported import by_onnxruntime
from numpy.testing import assert_allclose, assert_array_equal
from programs import started
from sentence_transformers import SentenceTransformer

from whitenedcse.app import cli
from whitenedcse.app.evaluate import source_of as source
from whitenedcse.data import tokens
from whitenedcse.data.corpus import Corpus
from whitenedcse.data.datamodule import SentenceData
from whitenedcse.data.tokens import identity, token_ids, tokenised
from whitenedcse.evaluation.postprocess import Postprocess
from whitenedcse.model import checkpoint
from whitenedcse.model.checkpoint import digest_of
from whitenedcse.model.embedder import Embedder
from whitenedcse.model.encoder import Encoder
from whitenedcse.model.head import Final
from whitenedcse.model.layers import Source, vectors
from whitenedcse.model.layers import Wanted as Vectors
from whitenedcse.serving.export import export
from whitenedcse.serving.fit import fitted, whitened
from whitenedcse.serving.search import Index

pytestmark = pytest.mark.filterwarnings("ignore")  # those of the libraries that load what is written
CONFIG = "config_sentence_transformers.json"
MANY = [f"{a} {b} {i}" for i in range(20) for a in SENTENCES for b in SENTENCES]
PROMPTS = ["the ", "un", "a red [MASK] fish, ", "  "]


@pytest.fixture
def embedder(tokenizer):
    """One whose vectors differ."""
    return embedder_of(Encoder(architecture("bert", len(tokenizer)), tokenizer), kind="mean").eval()


def before(prompt, texts=SENTENCES):
    return [prompt + text for text in texts]


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("texts", [SENTENCES, MANY, ["", *SENTENCES]], ids=["few", "many", "empty"])
@pytest.mark.slow(but=4)
def test_a_prompt_is_text_before_each_sentence(embedder, prompt, texts):
    wanted = embedder.encode(before(prompt, texts))
    assert_array_equal(embedder.encode(texts, prompt=prompt), wanted)
    embedder.prompt = prompt
    assert_array_equal(embedder.encode(texts), wanted)
    assert_array_equal(embedder.encode(texts, prompt=""), embedder.replaced(prompt="").encode(texts))


@pytest.mark.parametrize("prompt", ["the ", "un", "x"])
def test_a_byte_level_tokenizer_joins_the_prompt_to_the_first_word(prompt):
    tokenizer = byte_level(ends=True)
    every = before(prompt, MANY)
    assert token_ids(MANY, tokenizer, 16, prompt) == [
        tokenizer(text, truncation=True, max_length=16)["input_ids"] for text in every
    ]


def test_it_counts_as_tokens_of_the_sentence(embedder):
    tokenizer, prompt = embedder.encoder.tokenizer, "the old house: "
    rows = token_ids(SENTENCES, tokenizer, 8, prompt)
    assert rows == [tokenizer(text, truncation=True, max_length=8)["input_ids"] for text in before(prompt)]
    assert {len(row) for row in rows} == {8}
    for limit in (7, 6):  # [CLS] the old house [UNK] [SEP]
        if limit == 7:
            token_ids(SENTENCES, tokenizer, limit, prompt)
            continue
        with pytest.raises(ValueError, match=r"prompt='the old house: ' takes 6 tokens.* max_length=6"):
            token_ids(SENTENCES, tokenizer, limit, prompt)


@pytest.mark.parametrize("prompt", [5, ["the "]])
def test_what_is_no_text_is_refused(embedder, prompt):
    with pytest.raises(ValueError, match="prompt=.*not a text to put before others"):
        embedder.encode(SENTENCES, prompt=prompt)
    with pytest.raises(ValueError, match="prompt=.*not a text to put before others"):
        embedder.replaced(prompt=prompt)
    with pytest.raises(ValueError, match="query=.*not a text to put before others"):
        embedder.replaced(prompts={"query": prompt})


# training data


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.txt"
    path.write_text("\n".join(SENTENCES * 8) + "\n")
    return str(path)


def test_a_corpus_is_tokenised_with_its_prompt_in_a_cache_of_its_own(corpus, tokenizer, tmp_path):
    made = {
        prompt: tokenised(Corpus(corpus), tokenizer, 9, prompt=prompt, cache_dir=tmp_path / "cache")
        for prompt in ("", "the ", "a ", "the ")
    }
    for prompt, rows in made.items():
        wanted = token_ids(before(prompt, SENTENCES * 8), tokenizer, 9)
        got = rows.rows(np.arange(64), [0])
        assert [got.ids[a:b].tolist() for a, b in zip(got.offsets, got.offsets[1:], strict=False)] == wanted
    folders = [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]
    assert len(folders) == 3
    digests = made[""].digests
    assert digests == made["the "].digests and digests["tokenizer"] == tokens.digest(identity(tokenizer))
    key = json.dumps([tokens.FORMAT, digests["corpus"], digests["tokenizer"], 9, ""])
    assert tmp_path / "cache" / tokens.digest(key) in folders


def test_batches_have_the_prompt(corpus, tokenizer, monkeypatch, tmp_path):
    monkeypatch.setenv("WHITENEDCSE_CACHE", str(tmp_path / "cache"))
    data = SentenceData(corpus=corpus, batch_size=8, passes=2, prompt="the ", tokenizer=tokenizer)
    data.setup("fit")
    rows = data.train_dataloader().dataset[np.arange(8)].positives
    first = tokenizer(f"the {SENTENCES[0]}")["input_ids"]
    assert rows.n == 16 and rows.ids[: len(first)].tolist() == first
    assert data.sample_tokens(4).ids.tolist().count(first[1]) >= 4


# with the model


def test_it_is_stored_with_the_model_and_with_nothing_else(embedder, tmp_path):
    checkpoint.save(embedder, tmp_path / "plain")  # which notes its class in the backbone's config
    plain = digest_of(embedder)
    content = json.loads((tmp_path / "plain/whitenedcse.json").read_text())
    assert set(content) & {"prompt", "prompts"} == set() and not (tmp_path / "plain" / CONFIG).exists()
    prompted = embedder.replaced(prompt="the ", prompts={"query": "a "})
    checkpoint.save(prompted, tmp_path / "best")
    loaded = Embedder.load(tmp_path)
    assert (loaded.prompt, loaded.prompts) == ("the ", {"query": "a "})
    assert_array_equal(loaded.encode(SENTENCES), embedder.encode(before("the ")))
    assert len({plain, digest_of(prompted), digest_of(embedder.replaced(prompt="the "))}) == 3
    assert digest_of(embedder.replaced()) == plain  # of a model without, what it was


def test_a_whitening_is_fitted_to_prompted_texts_and_keeps_the_prompt(embedder, corpus):
    prompted, fit = embedder.replaced(prompt="the "), Postprocess("whitening")
    fit.provenance = fitted(fit, prompted, Corpus(corpus))
    wanted = Postprocess("whitening").fit(embedder.encode(before("the ", SENTENCES * 8)))
    assert_allclose(fit.mean, wanted.mean, atol=1e-6)
    assert fit.provenance["prompt"] == "the "
    with pytest.raises(ValueError, match="fitted to texts after the prompt 'the ', and here it is ''"):
        whitened(embedder, fit, 3)
    ended = whitened(prompted, fit, 3)
    assert ended.prompt == "the " and ended.width == 3
    assert_allclose(ended.encode(SENTENCES), fit.transform(embedder.encode(before("the ")), 3), atol=1e-3)


def by_their_library(directory):
    return SentenceTransformer(str(directory), device="cpu")


@pytest.mark.parametrize("named", [{}, {"query": "a "}, {"query": "", "document": "old "}, {"STS": "red "}])
@pytest.mark.parametrize("prompt", ["", "the "])
@pytest.mark.slow(but=3)
def test_sentence_transformers_uses_the_same_prompts(embedder, tmp_path, prompt, named):
    embedder = embedder.replaced(prompt=prompt, prompts=named)
    checkpoint.save(embedder, tmp_path / "best")
    peer = by_their_library(tmp_path / "best")
    index = Index.build(embedder, SENTENCES).embedder
    assert_allclose(peer.encode(SENTENCES), embedder.encode(SENTENCES), atol=1e-5)
    for name in named:
        x = peer.encode(SENTENCES, prompt_name=name)
        assert_allclose(x, embedder.encode(SENTENCES, prompt=named[name]), atol=1e-5)
    assert_allclose(
        peer.encode(SENTENCES, prompt="blue "), embedder.encode(before("blue "), prompt=""), atol=1e-5
    )
    assert_allclose(peer.encode_document(SENTENCES), index.encode(SENTENCES), atol=1e-5)
    queries = index.encode(SENTENCES, prompt=index.prompt_of("query"))
    assert_allclose(peer.encode_query(SENTENCES), queries, atol=1e-5)
    for name in ("whitenedcse.json", "digests.json"):  # what is left is that library's
        (tmp_path / "best" / name).unlink()
    left = Embedder.load(tmp_path / "best")
    assert left.prompt == prompt
    for names in ([], ["query"], ["document"], ["STS"]):
        assert left.prompt_of(*names) == embedder.prompt_of(*names)


@pytest.mark.parametrize(
    "saved",
    [
        {"prompts": {"query": "a ", "document": "the "}},
        {"prompts": {"query": "a ", "sts": "red "}, "default_prompt_name": "sts"},
        {"prompts": {"sts": "red "}, "default_prompt_name": "sts"},
        {"prompts": {}},
    ],
)
def test_the_prompts_of_a_model_of_that_library_are_read(embedder, tmp_path, saved):
    checkpoint.save(embedder, tmp_path / "plain")
    SentenceTransformer(str(tmp_path / "plain"), device="cpu", **saved).save(str(tmp_path / "theirs"))
    for named in ({}, saved):  # as that library writes it now, and as older releases did
        if named:
            (tmp_path / "theirs" / CONFIG).write_text(json.dumps(named))
        peer, ours = by_their_library(tmp_path / "theirs"), Embedder.load(tmp_path / "theirs")
        assert_allclose(ours.encode(SENTENCES), peer.encode(SENTENCES), atol=1e-5)
        index = Index(ours).embedder
        assert_allclose(index.encode(SENTENCES), peer.encode_document(SENTENCES), atol=1e-5)
        queries = index.encode(SENTENCES, prompt=index.prompt_of("query"))
        assert_allclose(queries, peer.encode_query(SENTENCES), atol=1e-5)
    if not saved["prompts"]:
        assert (ours.prompt, ours.prompts) == ("", {})


def test_a_passage_is_a_document(embedder, tmp_path):
    checkpoint.save(embedder, tmp_path / "best")
    for name in ("whitenedcse.json", "digests.json"):
        (tmp_path / "best" / name).unlink()
    (tmp_path / "best" / CONFIG).write_text(json.dumps({"prompts": {"passage": "the ", "query": None}}))
    index = Index(Embedder.load(tmp_path)).embedder
    assert (index.prompt, index.prompts) == ("the ", {"query": ""})


@pytest.mark.parametrize(
    ("config", "pooling", "message"),
    [
        ({"prompts": {"a": "x "}, "default_prompt_name": "b"}, {}, f"{CONFIG} is damaged .*'b' is not among"),
        ({"prompts": {"a": 5}}, {}, "a=5 is int, not a text"),
        ({"prompts": ["a"]}, {}, f"{CONFIG} is damaged"),
        ({"prompts": {"a": "x "}}, {"include_prompt": False}, "pools the tokens after them alone"),
    ],
)
def test_prompts_that_cannot_be_used_are_named(embedder, tmp_path, config, pooling, message):
    checkpoint.save(embedder, tmp_path / "best")
    for name in ("whitenedcse.json", "digests.json"):
        (tmp_path / "best" / name).unlink()
    (tmp_path / "best" / CONFIG).write_text(json.dumps(config))
    (file,) = (tmp_path / "best").glob("*_Pooling/config.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | pooling))
    with pytest.raises(ValueError, match=message):
        Embedder.load(tmp_path / "best")


def test_pooling_without_the_prompt_is_left_to_that_library(embedder, tmp_path):
    checkpoint.save(embedder.replaced(prompt="the "), tmp_path / "best")
    peer = by_their_library(tmp_path / "best")
    peer.set_pooling_include_prompt(False)
    peer.save(str(tmp_path / "theirs"))
    for prompt in (None, "", "a "):
        (x,), _ = vectors(source(str(tmp_path / "theirs"), None, prompt), SENTENCES, Vectors([None]))
        assert_allclose(x, peer.encode(SENTENCES, prompt=prompt), atol=1e-6)
    whole = embedder.encode(before("the "))
    assert np.abs(whole - peer.encode(SENTENCES)).max() > 1e-3
    assert source(str(tmp_path / "theirs"), None).prompt == "the "


# exports


def onnx(out, texts):
    return by_onnxruntime(out, before("the old ", texts))


@torch.no_grad()
def transformers(out, texts):
    """By the lines of the card, whose one text is exchanged."""
    code = re.search(r"```python\n(.*?)```", (out / "README.md").read_text(), re.DOTALL)[1]
    assert code.count('"the old a sentence"') == 1
    rows = []
    for text in texts:
        scope = {}
        exec(code.replace("the old a sentence", f"the old {text}"), scope)
        rows.append(scope["x"].numpy()[0])
    return np.stack(rows)


@pytest.mark.parametrize(
    ("to", "by"),
    [
        ("transformers", transformers),
        ("sentence-transformers", lambda out, texts: by_their_library(out).encode(texts)),
        pytest.param("onnx", onnx, marks=pytest.mark.slow),
    ],
)
def test_an_export_gives_the_prompted_vectors_of_its_source(embedder, tmp_path, monkeypatch, to, by):
    monkeypatch.chdir(tmp_path)
    facts = export(embedder.replaced(prompt="the old "), Path("out"), to)
    assert facts["difference"] < 1e-5 and facts["prompt"] == "the old "
    assert_allclose(by(tmp_path / "out", SENTENCES), embedder.encode(before("the old ")), atol=1e-4)
    assert '- a text is put after the prompt `"the old "`\n' in (tmp_path / "out/README.md").read_text()


def test_the_export_command_stores_a_prompt(embedder, tmp_path):
    checkpoint.save(embedder, tmp_path / "best")
    argv = ["export", str(tmp_path / "best"), str(tmp_path / "out"), "--to", "sentence-transformers"]
    assert cli.main([*argv, "--prompt", "the "]) == 0
    x = embedder.encode(before("the "))
    assert_allclose(by_their_library(tmp_path / "out").encode(SENTENCES), x, atol=1e-5)
    assert_allclose(Embedder.load(tmp_path / "out").encode(SENTENCES), x, atol=1e-5)


def test_the_encode_command_takes_a_prompt_and_resumes_with_no_other(embedder, corpus, tmp_path, capsys):
    checkpoint.save(embedder, tmp_path / "best")
    argv = ["encode", str(tmp_path / "best"), corpus, str(tmp_path / "vectors")]
    assert cli.main([*argv, "--prompt", "the "]) == 0
    wanted = embedder.encode(before("the ", SENTENCES * 8))
    assert_allclose(np.load(tmp_path / "vectors/shard-00000.npy"), wanted, atol=1e-6)
    assert cli.main([*argv, "--prompt", "a "]) == cli.main(argv) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert all("holds another job: the encoder, its pooling" in line for line in (first, second))


# the index


def unit(x):
    return x / np.linalg.norm(x, axis=1, keepdims=True)


@pytest.mark.parametrize(
    ("argv", "document", "query"),
    [
        ([], "red ", "blue "),
        (["--prompt", "the "], "the ", "blue "),
        (["--query-prompt", "a "], "red ", "a "),
        (["--prompt", "", "--query-prompt", ""], "", ""),
        (["--prompt", "the ", "--whiten-k", "4"], "the ", "blue "),
    ],
)
def test_the_search_commands_take_prompts(embedder, corpus, tmp_path, capsys, argv, document, query):  # noqa: PLR0913
    own = embedder.replaced(prompts={"document": "red ", "query": "blue "})
    checkpoint.save(own, tmp_path / "best")
    place = str(tmp_path / "index")
    assert cli.main(["search", "build", str(tmp_path / "best"), corpus, place, *argv]) == 0
    capsys.readouterr()
    assert cli.main(["search", "query", place, SENTENCES[0], "--top", "64", "--to", "csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    x, q = (embedder.encode(before(p, SENTENCES)) for p in (document, query))
    if "--whiten-k" in argv:
        fit = Postprocess("whitening", k=4).fit(np.concatenate([x] * 8))
        x, q = fit.transform(x), fit.transform(q)
    cosines = unit(x) @ unit(q)[0]
    assert_allclose([float(r["cosine"]) for r in rows], [cosines[int(r["id"]) % 8] for r in rows], atol=1e-4)


# evaluate.py and train.py


def test_a_source_is_encoded_with_the_prompt_that_is_asked_for(embedder, tmp_path, monkeypatch):
    checkpoint.save(embedder.replaced(prompt="the "), tmp_path / "best")
    monkeypatch.setenv("WHITENEDCSE_CACHE", str(tmp_path / "cache"))
    for asked, used in ((None, "the "), ("", ""), ("a ", "a ")):
        opened = source(str(tmp_path / "best"), None, asked)
        (x,), _ = vectors(opened, SENTENCES, Vectors([None]))
        assert_allclose(x, embedder.encode(before(used)), atol=1e-5)
        assert opened.facts["prompt"] == used
    monkeypatch.chdir(tmp_path)
    (tmp_path / "of_lengths.py").write_text("def encode(texts): return [[len(text), 1.0] for text in texts]")
    for asked, more in ((None, 0), ("a ", 2)):
        (x,), _ = vectors(source("of_lengths:encode", None, asked), SENTENCES, Vectors([None]))
        assert x[:, 0].tolist() == [len(text) + more for text in SENTENCES]


def test_the_transform_with_which_a_model_ends_is_named_beside_its_pooling(bert):
    plain = embedder_of(bert)
    assert Source(plain.encode, "mean", plain).steps == Source(plain.encode, "mean").steps == "mean"
    for weight, said in ((None, "mean"), (torch.eye(16)[:5], "mean, then its own transform to 5 components")):
        bias = None if weight is None else torch.zeros(5)
        ended = plain.replaced(final=Final(weight=weight, bias=bias, unit=True, provenance={}))
        assert Source(ended.encode, "mean", ended).steps == said


@pytest.fixture(scope="module")
def home(tmp_path_factory, tokenizer):
    """A plain encoder, a corpus and dev pairs, and the last two with a prompt before every sentence."""
    home = tmp_path_factory.mktemp("prompts")
    architecture("bert", len(tokenizer)).save_pretrained(home / "encoder")
    tokenizer.save_pretrained(home / "encoder")
    for name, prompt in (("plain", ""), ("written", "a red ")):
        (home / f"{name}.txt").write_text("".join(f"{text}\n" for text in before(prompt, MANY[:64])))
        pairs = zip(before(prompt), before(prompt, SENTENCES[3:] + SENTENCES[:3]), strict=True)
        rows = "".join(f"{i % 6}\t{a}\t{b}\n" for i, (a, b) in enumerate(pairs))
        (home / f"{name}.tsv").write_text(f"score\tsentence1\tsentence2\n{rows}")
    return home


def train(home, texts, run, *more):
    given = ["encoder=pretrained", "encoder.path=encoder", "data=file", f"data.corpus={texts}.txt"]
    given += [f"monitor.dev={texts}.tsv", f"tasks.names=[{texts}.tsv]", f"run={run}", "data.batch_size=8"]
    given += ["trainer.max_steps=3", "monitor.every=2", "trainer.log_every_n_steps=1", "optim.lr=1e-2"]
    given += ["trainer.accelerator=cpu", "trainer.devices=1"]
    return started("train.py", *given, *more, cwd=home)


def numbers(run):
    with (run / "metrics.csv").open() as file:
        return [
            {
                k.replace("written", "plain"): v
                for k, v in row.items()
                if "second" not in k and k != "train/load"
            }
            for row in csv.DictReader(file)
        ]


@pytest.fixture(scope="module")
def both(home):
    """A run with a prompt, and one with its words in the files."""
    for texts, run, more in (("plain", "prompted", ['prompt="a red "']), ("written", "by_hand", [])):
        done = train(home, texts, run, *more)
        assert done.returncode == 0, done.stderr
    return home / "outputs/prompted", home / "outputs/by_hand"


def averages(run):
    """The averages of each row of scores.json, and the prompt it names."""
    scores = json.loads((run / "scores.json").read_text())
    rows = [{k: v for k, v in row["sts"]["avg"].items() if k != "why"} for row in scores["rows"]]
    return rows, scores["prompt"]


@pytest.mark.slow
def test_a_prompt_trains_and_scores_as_if_it_stood_in_the_files(both):
    one, two = both
    assert len(numbers(one)) > 3 and numbers(one) == numbers(two)
    assert averages(one)[0] == averages(two)[0] and averages(one)[0][0]["all"] is not None
    assert (averages(one)[1], averages(two)[1]) == ("a red ", "")
    embedder = Embedder.load(one)
    assert embedder.prompt == "a red "
    assert_array_equal(embedder.encode(SENTENCES), Embedder.load(two).encode(before("a red ")))


@pytest.mark.slow
def test_a_run_with_another_prompt_is_another_run_and_one_from_before_prompts_the_same(home, both):
    for more, code in (['prompt="a blue "'], 2), ([], 2), (['prompt="a red "'], 0):
        assert train(home, "plain", "prompted", *more).returncode == code
    (both[1] / "digests.json").unlink()
    config = both[1] / "config.yaml"
    lines = [line for line in config.read_text().splitlines() if "prompt" not in line]
    assert len(lines) == len(config.read_text().splitlines()) - 2
    config.write_text("\n".join(lines) + "\n")
    again = train(home, "written", "by_hand")
    assert again.returncode == 0 and "is finished and not changed" in again.stdout, again.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("texts", "prompt"), [("plain", []), ("written", ['prompt=""'])])
def test_an_evaluation_uses_the_prompt_of_the_model_or_another(home, both, texts, prompt):
    given = ["model=outputs/prompted", f"tasks.names=[{texts}.tsv]", f"run=of_{texts}", *prompt]
    result = started("evaluate.py", *given, cwd=home)
    assert result.returncode == 0, result.stderr
    rows, used = averages(home / f"outputs/of_{texts}")
    of_run = averages(both[0])[0][0]  # which encoded the corpus, too: batches of other sizes round otherwise
    assert rows[0].pop("pearson") == pytest.approx(of_run.pop("pearson"), rel=1e-6)
    assert rows[0] == of_run and used == ("" if prompt else "a red ")

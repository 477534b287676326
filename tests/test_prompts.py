"""A prompt is text before each sentence, wherever sentences are encoded, and travels with the model.

Oracles: the same sentences with the prompt written before them by hand, and Sentence-Transformers.
"""

import json

import numpy as np
import pytest
from encoders import SENTENCES, SMALL, architecture, embedder_of
from numpy.testing import assert_allclose, assert_array_equal
from sentence_transformers import SentenceTransformer

import whitenedcse
from whitenedcse.app import cli
from whitenedcse.app.evaluate import source_of as source
from whitenedcse.data.corpus import Corpus
from whitenedcse.evaluation.postprocess import Postprocess
from whitenedcse.model import checkpoint
from whitenedcse.model.checkpoint import digest_of
from whitenedcse.model.embedder import Embedder
from whitenedcse.model.encoder import Encoder
from whitenedcse.model.layers import Wanted as Vectors
from whitenedcse.model.layers import vectors
from whitenedcse.serving.fit import fitted, whitened
from whitenedcse.serving.search import Index

pytestmark = pytest.mark.filterwarnings("ignore")  # those of the libraries that load what is written
CONFIG = "config_sentence_transformers.json"
MANY = [f"{a} {b} {i}" for i in range(20) for a in SENTENCES for b in SENTENCES]
OF_TIME = ("train/sentences_per_second", "train/load")
PROMPTS = ["the ", "un", "a red [MASK] fish, ", "  "]


@pytest.fixture
def embedder(tokenizer):
    """One whose vectors differ."""
    return embedder_of(Encoder(architecture("bert", len(tokenizer)), tokenizer), kind="mean").eval()


def before(prompt, texts=SENTENCES):
    return [prompt + text for text in texts]


def test_a_prompt_is_text_before_each_sentence(embedder):
    for prompt, texts in zip(PROMPTS, (SENTENCES, MANY, ["", *SENTENCES], SENTENCES), strict=True):
        wanted = embedder.encode(before(prompt, texts))
        assert_array_equal(embedder.encode(texts, prompt=prompt), wanted)
        own = embedder.replaced(prompt=prompt)
        assert_array_equal(own.encode(texts), wanted)
        assert_array_equal(own.encode(texts, prompt=""), embedder.encode(texts))


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.txt"
    path.write_text("\n".join(SENTENCES * 8) + "\n")
    return str(path)


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
    assert digest_of(prompted) == digest_of(embedder.replaced(prompt="the ")) != plain  # as its vectors
    assert digest_of(embedder.replaced()) == plain  # of a model without, what it was
    embedder.encoder.backbone.config.transformers_version = "of another machine"
    assert digest_of(embedder) == plain


def test_a_whitening_is_fitted_to_prompted_texts_and_keeps_the_prompt(embedder, corpus):
    prompted, fit = embedder.replaced(prompt="the "), Postprocess("whitening")
    fit.provenance = fitted(fit, prompted, Corpus(corpus))
    wanted = Postprocess("whitening").fit(embedder.encode(before("the ", SENTENCES * 8)))
    assert_allclose(fit.mean, wanted.mean, atol=1e-6)
    assert fit.provenance["prompt"] == "the "
    with pytest.raises(ValueError, match="and prompt 'the ', here .* and ''"):
        whitened(embedder, fit, 3)
    ended = whitened(prompted, fit, 3)
    assert ended.prompt == "the " and ended.width == 3
    assert_allclose(ended.encode(SENTENCES), fit.transform(embedder.encode(before("the ")), 3), atol=1e-3)


NAMED = [("the ", {"query": "a "}), ("", {"query": "", "document": "old "})]


@pytest.mark.parametrize(("prompt", "named"), NAMED)
def test_sentence_transformers_uses_the_same_prompts(embedder, tmp_path, prompt, named):
    embedder = embedder.replaced(prompt=prompt, prompts=named)
    checkpoint.save(embedder, tmp_path / "best")
    peer = SentenceTransformer(str(tmp_path / "best"), device="cpu")
    index = Index.build(embedder, SENTENCES).embedder
    assert_allclose(peer.encode(SENTENCES), embedder.encode(SENTENCES), atol=1e-5)
    for name in named:
        x = peer.encode(SENTENCES, prompt_name=name)
        assert_allclose(x, embedder.encode(SENTENCES, prompt=named[name]), atol=1e-5)
    assert_allclose(peer.encode_document(SENTENCES), index.encode(SENTENCES), atol=1e-5)
    queries = index.encode(SENTENCES, prompt=index.prompt_of("query"))
    assert_allclose(peer.encode_query(SENTENCES), queries, atol=1e-5)
    for name in ("whitenedcse.json", "digests.json"):  # what is left is that library's
        (tmp_path / "best" / name).unlink()
    left = Embedder.load(tmp_path / "best")
    assert left.prompt == prompt
    for names in ([], ["query"], ["document"], ["STS"]):
        assert left.prompt_of(*names) == embedder.prompt_of(*names)


SAVED = [{"prompts": {"query": "a ", "document": "the "}}]
SAVED += [{"prompts": {"sts": "red "}, "default_prompt_name": "sts"}]


@pytest.mark.parametrize("saved", SAVED)
def test_the_prompts_of_a_model_of_that_library_are_read(embedder, tmp_path, saved):
    checkpoint.save(embedder, tmp_path / "plain")
    SentenceTransformer(str(tmp_path / "plain"), device="cpu", **saved).save(str(tmp_path / "theirs"))
    for named in ({}, saved):  # as that library writes it now, and as older releases did
        if named:
            (tmp_path / "theirs" / CONFIG).write_text(json.dumps(named))
        peer = SentenceTransformer(str(tmp_path / "theirs"), device="cpu")
        ours = Embedder.load(tmp_path / "theirs")
        assert_allclose(ours.encode(SENTENCES), peer.encode(SENTENCES), atol=1e-5)
        index = Index(ours).embedder
        assert_allclose(index.encode(SENTENCES), peer.encode_document(SENTENCES), atol=1e-5)
        queries = index.encode(SENTENCES, prompt=index.prompt_of("query"))
        assert_allclose(queries, peer.encode_query(SENTENCES), atol=1e-5)


def test_prompts_that_cannot_be_used_are_named(embedder, tmp_path):
    checkpoint.save(embedder, tmp_path)
    for name in ("whitenedcse.json", "digests.json"):
        (tmp_path / name).unlink()
    (tmp_path / CONFIG).write_text(json.dumps({"prompts": {"a": "x "}, "default_prompt_name": "b"}))
    with pytest.raises(ValueError, match=f"{CONFIG} is damaged .*'b' is not among"):
        Embedder.load(tmp_path)
    (tmp_path / CONFIG).write_text(json.dumps({"prompts": {"a": "x "}}))
    (file,) = tmp_path.glob("*_Pooling/config.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | {"include_prompt": False}))
    with pytest.raises(ValueError, match="pools the tokens after them alone"):
        Embedder.load(tmp_path)


def test_the_encode_command_takes_a_prompt_and_resumes_with_no_other(embedder, corpus, tmp_path, capsys):
    checkpoint.save(embedder, tmp_path / "best")
    argv = ["encode", str(tmp_path / "best"), corpus, str(tmp_path / "vectors")]
    assert cli.main([*argv, "--prompt", "the "]) == 0
    wanted = embedder.encode(before("the ", SENTENCES * 8))
    assert_allclose(np.load(tmp_path / "vectors/shard-00000.npy"), wanted, atol=1e-6)
    assert cli.main([*argv, "--prompt", "a "]) == cli.main(argv) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert all("holds another job, of another embedder" in line for line in (first, second))


def test_a_source_is_encoded_with_the_prompt_that_is_asked_for(embedder, tmp_path, monkeypatch):
    checkpoint.save(embedder.replaced(prompt="the "), tmp_path / "best")
    monkeypatch.setenv("WHITENEDCSE_CACHE", str(tmp_path / "cache"))
    for asked, used in ((None, "the "), ("", ""), ("a ", "a ")):
        opened = source(str(tmp_path / "best"), None, asked)
        (x,), _ = vectors(opened, SENTENCES, Vectors([None]))
        assert_allclose(x, embedder.encode(before(used)), atol=1e-5)
        assert opened.prompt == used
    monkeypatch.chdir(tmp_path)
    (tmp_path / "of_lengths.py").write_text("def encode(texts): return [[len(text), 1.0] for text in texts]")
    for asked, more in ((None, 0), ("a ", 2)):
        (x,), _ = vectors(source("of_lengths:encode", None, asked), SENTENCES, Vectors([None]))
        assert x[:, 0].tolist() == [len(text) + more for text in SENTENCES]


@pytest.mark.slow
def test_a_prompt_trains_and_scores_as_if_it_stood_in_the_files(home):
    runs = []
    for folder, prompt, text in (("plain", "a red ", ""), ("written", "", "a red ")):
        (home / folder).mkdir()
        (home / folder / "my.txt").write_text("".join(f"{line}\n" for line in before(text, MANY[:64])))
        pairs = zip(before(text), before(text, SENTENCES[3:] + SENTENCES[:3]), strict=True)
        rows = "".join(f"{i % 6}\t{a}\t{b}\n" for i, (a, b) in enumerate(pairs))
        (home / folder / "pairs.tsv").write_text(f"score\tsentence1\tsentence2\n{rows}")
        corpus, pairs = (f"{folder}/{name}" for name in ("my.txt", "pairs.tsv"))
        settings = {"prompt": prompt, "trainer.max_steps": 3, "monitor.every": 2}
        settings |= {"trainer.log_every_n_steps": 1}
        given = {"dev": pairs, "tests": pairs, "output": f"outputs/{folder}", **SMALL}
        runs.append(whitenedcse.train("bert", corpus, settings=settings, **given))
    one, two = (
        {name.replace("written", "plain"): [*x.values] for name, x in run.series.items()} for run in runs
    )
    for name in OF_TIME:
        del one[name], two[name]
    assert one == two and len(one["train/loss"]) == 3 and len(one["dev/spearman"]) == 3
    assert [*runs[0].tests("as it is").values()] == [*runs[1].tests("as it is").values()]
    assert [run.results["prompt"] for run in runs] == ["a red ", ""]
    embedder = Embedder.load(runs[0])
    assert embedder.prompt == "a red "
    assert_array_equal(embedder.encode(SENTENCES), Embedder.load(runs[1]).encode(before("a red ")))

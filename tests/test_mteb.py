"""Embedders inside mteb, with tasks made here: no hub is asked."""

import sys
import warnings
from copy import deepcopy

import numpy as np
import pytest
import torch
from datasets import Dataset, DatasetDict
from encoders import WORDS, embedder_of
from sentence_transformers import SentenceTransformer
from sklearn.metrics import average_precision_score
from tokenizers import normalizers
from whitenedcse.serving.benchmarks import Mteb
from whitenedcse.serving.exports import whitened

from whitenedcse.evaluation.postprocess import Postprocess
from whitenedcse.evaluation.sts import Subset, cosine, evaluate
from whitenedcse.model import checkpoint
from whitenedcse.report.comparison import compared

mteb = pytest.importorskip("mteb", reason="mteb is not installed: pip install 'whitenedcse[mteb]'")

MAIN = {"STS": "cosine_spearman", "PairClassification": "max_ap", "Classification": "accuracy"}


def sentences(n, seed, longest=12):
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, rng.integers(3, longest))) for _ in range(n)]


def pairs(n=200):
    """Scored pairs; a third are equal, and a third are the turned ones of another third."""
    some, other = sentences(n, 0), sentences(n, 1, longest=40)
    left, right = some + some + other, other + some + some
    return Subset("pairs", left, right, np.random.default_rng(2).integers(0, 6, 3 * n).astype(float))


def task(kind, splits):
    """A task of mteb's class `kind`, whose data are these columns by split."""
    metadata = mteb.TaskMetadata(
        name=f"Made{kind}",
        description="made in a test",
        dataset={"path": "none", "revision": "none"},
        type=kind,
        category="t2t",
        eval_splits=["test"],
        eval_langs=["eng-Latn"],
        main_score=MAIN[kind],
    )

    def load_data(self, **_):
        self.dataset = DatasetDict({name: Dataset.from_dict(columns) for name, columns in splits.items()})
        self.data_loaded = True

    parent = getattr(mteb.abstasks, f"AbsTask{kind}")
    return type(f"Made{kind}", (parent,), {"metadata": metadata, "load_data": load_data})()


def sts(subset):
    return task("STS", {"test": {"sentence1": subset.left, "sentence2": subset.right, "score": subset.gold}})


def scores(model, task, cache=None):
    results = mteb.evaluate(model, task, cache=cache, show_progress_bar=False)
    return results.task_results[0].scores["test"][0]


@pytest.fixture
def fitted(bert):
    return Postprocess("whitening", k=5).fit(embedder_of(bert).encode(sentences(300, 3)))


@pytest.mark.parametrize("post", [False, True])
def test_sts_in_mteb_is_what_our_evaluator_says(bert, fitted, post):
    embedder, subset = embedder_of(bert), pairs()
    embedder = whitened(embedder, fitted) if post else embedder
    ours = evaluate({"made": [subset]}, embedder.encode)["tasks"]["made"]["all"] / 100
    theirs = scores(Mteb(embedder), sts(subset))
    assert abs(theirs["cosine_spearman"] - ours) < 1e-6
    assert abs(theirs["spearman"] - ours) < 1e-6


def test_pair_classification_in_mteb_ranks_by_our_cosines(bert):
    embedder, subset = embedder_of(bert), pairs()
    labels = (subset.gold > 2).astype(int)
    columns = {"sentence1": subset.left, "sentence2": subset.right, "labels": labels}
    theirs = scores(Mteb(embedder), task("PairClassification", {"test": columns}))
    distinct = sorted({*subset.left, *subset.right})
    vectors = dict(zip(distinct, embedder.encode(distinct), strict=True))
    ours = cosine(*([vectors[text] for text in side] for side in (subset.left, subset.right)))
    for name in ("cosine_ap", "similarity_ap"):
        assert abs(theirs[name] - average_precision_score(labels, ours)) < 1e-6


@pytest.mark.slow
def test_classification_in_mteb_is_what_it_is_for_sentence_transformers(bert, tmp_path):
    checkpoint.save(embedder_of(bert, kind="mean", embedding="head"), tmp_path / "best")
    made = sentences(240, 0)
    columns = {"text": made, "label": [int("the" in text.split()) for text in made]}
    made = task("Classification", {"train": columns, "test": columns})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # mteb calls its own peer by names of its older releases
        peer = scores(SentenceTransformer(str(tmp_path / "best"), device="cpu"), made)["accuracy"]
    ours = scores(Mteb(tmp_path), made)["accuracy"]
    assert 0.5 < ours < 1
    assert abs(ours - peer) < 3e-3  # 7 of 2400 decisions: the peer's vectors are rounded otherwise


def test_what_mteb_kept_serves_the_same_model_and_no_other(bert, tmp_path):
    cache, made = mteb.ResultCache(tmp_path / "cache"), sts(pairs())
    checkpoint.save(embedder_of(bert), tmp_path / "best")
    before = scores(Mteb(tmp_path), made, cache)["main_score"]
    again = Mteb(tmp_path)
    again.encode = None  # not called
    kept = scores(again, made, cache)["main_score"]
    assert kept == pytest.approx(before, abs=1e-6)  # mteb's files have six digits
    with torch.no_grad():
        bert.backbone.encoder.layer[1].output.dense.weight.mul_(-1)
    checkpoint.save(embedder_of(bert), tmp_path / "best")
    after = scores(Mteb(tmp_path), made, cache)["main_score"]
    assert after == scores(Mteb(tmp_path), made)["main_score"] != before


def test_what_mteb_wrote_is_compared(bert, tmp_path):
    made, models = sts(pairs()), {"cls": embedder_of(bert), "mean": embedder_of(bert, kind="mean")}
    main = []
    for name, embedder in models.items():
        model = Mteb(embedder)
        model.mteb_model_meta = model.mteb_model_meta.model_copy(update={"name": name})
        saved = tmp_path / "results" / name / model.mteb_model_meta.revision
        cache = mteb.ResultCache(tmp_path)
        results = mteb.evaluate(model, made, cache=cache, prediction_folder=saved, show_progress_bar=False)
        main.append(100 * results.task_results[0].scores["test"][0]["main_score"])
    (grid,) = compared([str(tmp_path / "results" / name) for name in models], 10, 3)
    _, one, two, apart, _, covers = grid.rows[0]
    assert [float(cell.split(" ±")[0]) for cell in (one, two)] == pytest.approx(main, abs=1e-3)
    assert float(apart.split(" ±")[0]) == pytest.approx(main[1] - main[0], abs=2e-3)
    assert covers == "pairs"  # by the predictions, which the file of a task here cannot be without


def changed(name, embedder):
    """A copy that makes other vectors."""
    embedder = deepcopy(embedder)
    if name == "weights":
        embedder.encoder.backbone.embeddings.word_embeddings.weight.data[7, 3] += 1e-3
    elif name == "tokenizer":
        embedder.encoder.tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    elif name == "whitening":
        embedder.head.before.mean[3] += 1e-3
    elif name == "length":
        embedder.max_length = 7
    else:
        embedder.pooling.kind = "mean"
    return embedder


def test_the_revision_names_the_vectors(bert, fitted):
    embedder = embedder_of(bert, embedding="head")
    names = ("weights", "tokenizer", "whitening", "length", "pooling")
    ended = whitened(embedder, fitted)
    models = [*map(Mteb, [*(changed(name, embedder) for name in names), embedder, ended])]
    assert len({model.mteb_model_meta.revision for model in models}) == len(models)
    ended.encode(["the cat"])  # which sets the tokenizer to cut
    again = Mteb(deepcopy(ended))
    assert again.mteb_model_meta.revision == models[-1].mteb_model_meta.revision
    assert [model.mteb_model_meta.embed_dim for model in (models[-2], again)] == [16, 5]


def test_a_sentence_has_one_vector_on_both_sides_of_the_pairs(bert, monkeypatch):
    calls = []

    def noisy(texts, progress, prompt):
        """As padding does, but more: no two calls give the same vector."""
        calls.append(texts)
        return np.full((len(texts), 16), len(calls), dtype=np.float32)

    model = Mteb(embedder_of(bert))
    monkeypatch.setattr(model.embedder, "encode", noisy)
    assert model.encode([{"text": ["b", "a"]}, {"text": ["b"]}])[:, 0].tolist() == [1, 1, 1]
    assert model.encode([{"text": ["c", "b"]}])[:, 0].tolist() == [2, 1]
    assert model.encode([{"text": ["a", "c"]}])[:, 0].tolist() == [3, 2]
    assert calls == [["a", "b"], ["c"], ["a"]]  # it remembers one call, not a corpus


def test_similarities_are_cosines_to_the_last_digit_of_equal_ones(bert):
    a, b = np.random.default_rng(0).normal(size=(2, 50, 16))
    b[:20] = a[:20]
    model = Mteb(embedder_of(bert))
    naive = np.array([[x @ y / np.sqrt((x @ x) * (y @ y)) for y in b] for x in a])
    np.testing.assert_allclose(model.similarity(a, torch.from_numpy(b)), naive, atol=1e-14)
    np.testing.assert_allclose(model.similarity_pairwise(a, b), naive.diagonal(), atol=1e-14)
    assert (model.similarity_pairwise(a, b)[:20] == 1).all()
    assert model.similarity(a[0], np.zeros(16)).tolist() == [[0.0]]


def test_what_it_cannot_do_is_refused(bert):
    with pytest.raises(ValueError, match="precision='int8'"):
        Mteb(embedder_of(bert)).encode([{"text": ["the cat"]}], precision="int8")


def test_without_mteb_the_way_out_is_named(bert, monkeypatch):
    monkeypatch.setitem(sys.modules, "mteb.models.model_meta", None)
    with pytest.raises(ValueError, match=r"Mteb needs mteb: pip install 'whitenedcse\[mteb\]'"):
        Mteb(embedder_of(bert))

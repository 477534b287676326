"""Models of sentence-transformers: evaluated, accelerated and whitened; that library is the oracle."""

import copy
import csv
import importlib
import json
import math
import pickle
import sys
from types import ModuleType

import numpy as np
import pytest
import torch
from encoders import SENTENCES, whitened_by_hand
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from scipy.stats import spearmanr
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from sentence_transformers.sentence_transformer.modules import BoW, Normalize, Transformer
from test_st_loss import DATA, OTHERS, arguments, gradients, opened, saved, tokens
from torch.testing import assert_close

from whitenedcse.compute import autocast_type
from whitenedcse.evaluation.scores import cosine
from whitenedcse.model import packed
from whitenedcse.sentence_transformers import (
    HeadInCheckpoints,
    STSEvaluator,
    WhitenedContrastiveLoss,
    accelerate,
    undo,
    whitened,
)

THEIRS = ("sentence_transformers", "whitenedcse.sentence_transformers")
TEXTS = [f"{a} {b}" for i, a in enumerate(SENTENCES) for b in SENTENCES[: i + 1]] + ["", "cat", "a " * 60]


@pytest.mark.parametrize("lacking", ["sentence_transformers", "sentence_transformers.base"])
def test_without_their_library_or_with_an_old_one_the_import_names_the_pip_command(monkeypatch, lacking):
    for name in [name for name in sys.modules if name.startswith(THEIRS)]:
        monkeypatch.delitem(sys.modules, name)
    for name in ["sentence_transformers", lacking]:
        monkeypatch.setitem(sys.modules, name, None if name == lacking else ModuleType(name))
    said = r"sentence-transformers 6.2 or newer .*: pip install 'whitenedcse\[sentence-transformers\]'$"
    with pytest.raises(ImportError, match=f"^whitenedcse.sentence_transformers needs {said}"):
        importlib.import_module("whitenedcse.sentence_transformers")


@pytest.fixture
def made(tmp_path, tokenizer):
    """A function that makes equal models of a kind."""
    return lambda kind="bert", pooling="mean", dropout=0.0: opened(
        saved(tmp_path / f"{kind}{dropout}", tokenizer, kind=kind, dropout=dropout), pooling
    )


@pytest.fixture
def counted(monkeypatch):
    """The number of tokens of each batch that is computed without padding."""
    seen, hidden = [], packed.hidden

    def record(backbone, batch, *given, **settings):
        seen.append(len(batch.ids))
        return hidden(backbone, batch, *given, **settings)

    monkeypatch.setattr(packed, "hidden", record)
    return seen


def test_an_accelerated_model_encodes_to_the_same_vectors(made, counted, threaded):
    for kind, pooling, threads in (
        ("bert", "cls", 2),
        ("roberta", "lasttoken", 1),
        ("bert", "weightedmean", 2),
    ):
        threaded(threads)
        counted.clear()
        model = made(kind, pooling)
        expected = model.encode(TEXTS)
        assert not counted
        seen = accelerate(model).encode(TEXTS)
        assert_close(seen, expected, rtol=1e-5, atol=1e-5)
        assert sum(counted) == sum(len(ids) for ids in model.tokenizer(TEXTS, truncation=True).input_ids)


def test_every_way_to_encode_stays(made, threaded):
    threaded(2)
    model = made()
    model[1].include_prompt = False
    ways = [{"prompt": "the cat "}, {"normalize_embeddings": True, "batch_size": 9}]
    ways += [{"convert_to_tensor": True, "truncate_dim": 4}, {"output_value": "token_embeddings"}]
    for settings in ways:
        expected = undo(model).encode(TEXTS, **settings)
        assert_close(accelerate(model).encode(TEXTS, **settings), expected, rtol=1e-5, atol=1e-5)


def test_bfloat16_stays_as_near_as_theirs(made, threaded):
    threaded(2)
    model = made().eval()
    exact = model.encode(TEXTS)
    with torch.autocast("cpu", torch.bfloat16):
        theirs, ours = model.encode(TEXTS), accelerate(model).encode(TEXTS)
    assert 0.3 < np.abs(ours - exact).max() / np.abs(theirs - exact).max() < 2


@pytest.mark.parametrize("kind", ["bert", "camembert"])
def test_training_without_dropout_has_the_same_gradient(made, counted, kind):
    both = []
    for change in (lambda model: model, accelerate):
        loss = MultipleNegativesRankingLoss(change(made(kind).double()))
        value = loss(tokens(loss.model, SENTENCES, OTHERS), None)
        value.backward()
        both.append((value.detach(), gradients(loss)))
    assert counted and len(both[0][1]) > 40
    assert_close(both[1], both[0], rtol=1e-9, atol=1e-9)


def test_threads_have_the_modes_of_their_caller_while_they_encode(made, threaded, monkeypatch):
    threaded(2)
    model, modes, hidden = accelerate(made()).eval(), set(), packed.hidden
    monkeypatch.setattr(torch, "clear_autocast_cache", lambda: cleared.append(1))
    cleared = []

    def record(*given, **settings):
        modes.add((torch.is_grad_enabled(), autocast_type("cpu")))
        return hidden(*given, **settings)

    monkeypatch.setattr(packed, "hidden", record)
    with torch.autocast("cpu", torch.bfloat16):
        model.encode(TEXTS, batch_size=4)
        assert cleared == [] and modes == {(False, torch.bfloat16)}  # nor do they discard the cast weights
    modes.clear()
    model.encode(TEXTS)  # the same threads again
    assert cleared and modes == {(False, None)}


def test_what_is_not_text_padded_on_the_right_is_left_to_the_library(made, counted):
    model = made().eval()
    batch = tokens(model, SENTENCES)[0]
    left = {name: x.flip(1) if isinstance(x, torch.Tensor) else x for name, x in batch.items()}
    second = batch | {"token_type_ids": batch["attention_mask"].clone()}
    gaps = torch.tensor([1, 0] * 50)[: batch["input_ids"].shape[1]]
    holes = batch | {"attention_mask": batch["attention_mask"] * gaps}
    plain = {name: x for name, x in batch.items() if name != "attention_mask"}
    for given in (left, second, holes, plain):
        with torch.no_grad():
            expected = undo(model)(dict(given))["sentence_embedding"]
            assert_close(accelerate(model)(dict(given))["sentence_embedding"], expected, rtol=0, atol=0)
    model[0].model.encoder.layer[0].gradient_checkpointing = True
    accelerate(model)(dict(batch))
    assert not counted


def test_copies_and_pickles_of_an_accelerated_model_compute_with_their_own_weights(made, counted):
    model = accelerate(made())
    expected = model.encode(SENTENCES)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            model[0].model.embeddings.word_embeddings.weight.mul_(2)
        counted.clear()
        assert_close(other.encode(SENTENCES), expected)
        assert counted
        with torch.no_grad():
            model[0].model.embeddings.word_embeddings.weight.div_(2)


def test_undo_gives_the_model_back_as_it_was(made, counted, tmp_path):
    model, other = made(), made()
    assert undo(accelerate(model)) is model
    assert vars(model[0]).keys() == vars(other[0]).keys()
    assert (model.encode(TEXTS) == other.encode(TEXTS)).all() and not counted
    accelerate(model).save(str(tmp_path / "out"))
    saved_model = SentenceTransformer(str(tmp_path / "out"), device="cpu")
    assert (saved_model.encode(TEXTS) == other.encode(TEXTS)).all()


def test_models_that_cannot_be_computed_without_padding_are_refused_with_the_reason(
    made, tokenizer, tmp_path
):
    with pytest.raises(ValueError, match="MPNetModel is not accelerated: its layers are not those of b"):
        accelerate(made("mpnet"))
    with pytest.raises(ValueError, match="BoW: only a Transformer module"):
        accelerate(SentenceTransformer(modules=[BoW(["cat"])], device="cpu"))
    folder = saved(tmp_path / "masked", tokenizer)
    masked = Transformer(folder, transformer_task="fill-mask")
    with pytest.raises(ValueError, match="ForMaskedLM is not accelerated"):
        accelerate(SentenceTransformer(modules=[masked], device="cpu"))


@pytest.mark.parametrize(("unit", "k"), [(False, None), (True, 4)])
def test_a_whitened_model_is_plain_and_whitens_its_corpus(made, tmp_path, unit, k):
    model = made().eval()
    model.prompts, model.similarity_fn_name = {"query": "the "}, "dot"
    x = model.encode(TEXTS).astype(np.float64)
    if unit:
        model.append(Normalize())
    white = whitened(model, TEXTS, k=k)
    white.save(str(tmp_path / "white"))
    parts = json.loads((tmp_path / "white" / "modules.json").read_text())
    assert all(part["type"].startswith("sentence_transformers.") for part in parts)
    plain = SentenceTransformer(str(tmp_path / "white"), device="cpu")
    assert (plain.prompts["query"], plain.similarity_fn_name) == ("the ", "dot")
    kept = [i for i, text in enumerate(TEXTS) if text.strip()]  # a blank text is left out of a corpus
    y, expected = plain.encode(TEXTS), whitened_by_hand(x[kept], k)(x)
    assert y.shape == (len(TEXTS), k or 16)
    if unit:
        expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    assert_close(np.abs(y), np.abs(expected).astype(np.float32), rtol=1e-3, atol=1e-3)
    assert len(list(model)) == 2 + unit


def test_a_whitening_that_cannot_be_fitted_is_refused(made):
    model = made().eval()
    with pytest.raises(ValueError, match="k=256"):
        whitened(model, TEXTS)
    with pytest.raises(ValueError, match="4 components, but only 3 can vary: the transform is fitted to 4"):
        whitened(model, [t for t in TEXTS if t][:4], k=4)
    with pytest.raises(ValueError, match=r"torch.bfloat16 is rounded; use model.float"):
        whitened(made().bfloat16(), TEXTS, k=4)


@pytest.fixture
def pairs(tmp_path):
    """Files of scored pairs, and the pairs in them."""
    made = {}
    for name, shift in (("one", 1), ("two", 3)):
        rows = [(i % 6, TEXTS[i], TEXTS[(i * 5 + shift) % 30]) for i in range(30)]
        lines = "".join(f"{gold}\t{a}\t{b}\n" for gold, a, b in rows)
        (tmp_path / f"{name}.tsv").write_text(f"score\tsentence1\tsentence2\n{lines}")
        made[str(tmp_path / f"{name}.tsv")] = rows
    return made


@pytest.mark.filterwarnings("ignore:avg_whitened")
def test_a_corpus_may_be_a_file(made, pairs, tmp_path):
    table, model, rows = tmp_path / "corpus.csv", made().eval(), [text for text in TEXTS if text.strip()]
    with table.open("w") as file:
        csv.writer(file).writerows([["text", "label"], *([text, "1"] for text in rows)])
    both = (whitened(model, corpus, 8, names) for corpus, names in ((rows, ()), (table, ["text"])))
    np.testing.assert_array_equal(*(white.encode(rows) for white in both))
    settings = {"name": "mine", "draws": 50}
    by_list = STSEvaluator(list(pairs), corpus=rows, **settings)(model)
    assert STSEvaluator(list(pairs), corpus=str(table), columns=["text"], **settings)(model) == by_list
    assert STSEvaluator(list(pairs), corpus=rows[:9], **settings)(model) != by_list
    for call in (lambda: whitened(model, str(table)), lambda: STSEvaluator(list(pairs), corpus=table)):
        with pytest.raises(ValueError, match=r"are text, label; .* in Python columns=\[NAME\]"):
            call()


def test_the_evaluator_scores_raw_and_whitened_vectors(made, pairs, tmp_path):
    model = made().eval()
    evaluator = STSEvaluator(list(pairs), corpus=TEXTS[5:], name="mine", draws=50)
    metrics = evaluator(model, str(tmp_path / "eval"), epoch=1, steps=2)
    vectors = {text: x for text, x in zip(TEXTS, model.encode(TEXTS).astype(np.float64), strict=True)}

    def spearman(rows, change=lambda x: x):
        gold, left, right = zip(*rows, strict=True)
        a, b = (change(np.array([vectors[text] for text in side])) for side in (left, right))
        return 100 * spearmanr(gold, cosine(a, b)).statistic

    scores = [spearman(rows) for rows in pairs.values()]
    for name, score in zip(("one.tsv", "two.tsv"), scores, strict=True):  # without their folder
        assert metrics[f"mine_{name}_spearman"] == pytest.approx(score, abs=1e-3)
        assert metrics[f"mine_{name}_low"] < score < metrics[f"mine_{name}_high"]
    assert evaluator.primary_metric == "mine_avg_spearman"
    assert metrics["mine_avg_spearman"] == pytest.approx(np.mean(scores), abs=1e-3)
    corpus = np.array([vectors[text] for text in TEXTS[5:]])
    expected = np.mean([spearman(rows, whitened_by_hand(corpus)) for rows in pairs.values()])
    assert metrics["mine_avg_whitened_on_corpus_k16"] == pytest.approx(expected, abs=0.2)
    own = (np.array([vectors[t] for _, *both in rows for t in both]) for rows in pairs.values())
    fits = map(whitened_by_hand, own)
    own = np.mean([spearman(rows, fit) for rows, fit in zip(pairs.values(), fits, strict=True)])
    assert metrics["mine_avg_whitened_on_own_k16"] == pytest.approx(own, abs=0.2)
    evaluator(model, str(tmp_path / "eval"), epoch=2, steps=4)
    with (tmp_path / "eval" / "sts_evaluation_mine_results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["steps"] for row in rows] == ["2", "4"]
    assert float(rows[1]["avg_spearman"]) == metrics["mine_avg_spearman"]
    STSEvaluator(list(pairs), corpus=None, name="mine")(model, str(tmp_path / "eval"))  # with fewer columns
    assert sorted(path.name for path in (tmp_path / "eval").iterdir()) == [
        f"sts_evaluation_mine_results{number}.csv" for number in ("-2", "")
    ]


def test_an_undefined_score_is_nan(made, tmp_path):
    (tmp_path / "same.tsv").write_text("score\tsentence1\tsentence2\n1\tcat\tdog\n1\ta\tthe\n1\tbird\ttree\n")
    metrics = STSEvaluator(str(tmp_path / "same.tsv"), corpus=None)(made().eval())  # one name, without a list
    assert math.isnan(metrics["sts_avg_spearman"]) and math.isnan(metrics["sts_avg_low"])


def test_whitening_on_too_few_sentences_is_undefined_and_no_number(made, tmp_path):
    lines = "".join(f"{i % 5}\t{TEXTS[i]}\t{TEXTS[i + 1]}\n" for i in range(8))  # 9 sentences, width 16
    (tmp_path / "few.tsv").write_text(f"score\tsentence1\tsentence2\n{lines}")
    with pytest.warns(UserWarning, match="avg_whitened_on_corpus_k16: NaN, as the texts .* are too few"):
        metrics = STSEvaluator([str(tmp_path / "few.tsv")], corpus=TEXTS[:16])(made().eval())
    assert math.isnan(metrics["sts_avg_whitened_on_corpus_k16"])  # of 16 texts 15 components vary
    with pytest.warns(UserWarning, match="^avg_whitened_on_own_k16: NaN, as "):
        metrics = STSEvaluator([str(tmp_path / "few.tsv")], corpus=TEXTS)(made().eval())
    assert math.isnan(metrics["sts_avg_whitened_on_own_k16"])
    assert math.isfinite(metrics["sts_avg_whitened_on_corpus_k16"])


@pytest.mark.slow
def test_the_evaluator_chooses_the_best_checkpoint_of_their_trainer(made, pairs, tmp_path):
    loss = WhitenedContrastiveLoss(model := accelerate(made()), mini_batch_size=4)
    plan = {"eval_strategy": "steps", "eval_steps": 4, "save_steps": 4, "load_best_model_at_end": True}
    metric = {"metric_for_best_model": "sts_avg_spearman"}
    parts = {"evaluator": STSEvaluator(list(pairs), draws=50), "callbacks": [HeadInCheckpoints(loss)]}
    given = arguments(tmp_path / "run", **plan, **metric)
    trainer = SentenceTransformerTrainer(model, given, DATA, loss=loss, **parts)
    trainer.train()
    history = [row for row in trainer.state.log_history if "eval_sts_avg_spearman" in row]
    assert trainer.state.best_metric == max(row["eval_sts_avg_spearman"] for row in history)
    assert (tmp_path / "run" / "eval" / "sts_evaluation_sts_results.csv").exists() and len(history) == 2


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("state", ["plain", "dora", "disabled", "another"])
def test_adapters_are_in_force_as_the_library_has_them(made, state):
    """From peft itself: `add_adapter` of Transformers refuses a peft that is older than itself."""
    model, settings = made(), {"r": 2, "target_modules": ["query", "value"], "init_lora_weights": False}
    for name in ("default", "b"):
        inject_adapter_in_model(LoraConfig(**settings, use_dora=state == "dora"), model[0].auto_model, name)
    layers = [layer for layer in model.modules() if isinstance(layer, LoraLayer)]
    assert layers
    for layer in layers:
        layer.set_adapter("b" if state == "another" else "default")
        layer.enable_adapters(state != "disabled")
    with torch.no_grad():
        for part, weight in model.named_parameters():
            if "magnitude" in part:
                weight *= 1.5
    expected = model.eval().encode(TEXTS)
    assert_close(accelerate(model).encode(TEXTS), expected, rtol=1e-5, atol=1e-5)

"""The library without a command line: train and evaluate as functions; corpora without scored pairs."""

import itertools
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from encoders import PAIRS, SENTENCES, SMALL, embedder_of

import whitenedcse
from whitenedcse import Embedder
from whitenedcse.data.corpus import Corpus, read
from whitenedcse.data.datamodule import SentenceData
from whitenedcse.data.tokens import token_ids, tokenised
from whitenedcse.evaluation import suite
from whitenedcse.evaluation.geometry import alignment, uniformity
from whitenedcse.evaluation.tasks import Subset
from whitenedcse.model import checkpoint
from whitenedcse.model.head import Final
from whitenedcse.ragged import ragged
from whitenedcse.training.module import seed_of, seed_torch
from whitenedcse.training.monitor import DevSet, HeldOut, Monitor, Row, dropped


def test_a_transform_is_fitted_to_the_rows_that_were_trained_on_and_to_no_other_of_their_name(
    home, monkeypatch
):
    few = {"trainer.max_steps": 1, "data.sample": 16}
    run = whitenedcse.train("bert", "my.txt", output="outputs/g", settings=few, **SMALL)
    kept = {text for (text,) in read(Corpus("my.txt", (), 16))[0]}
    tests = {text for line in PAIRS.splitlines()[1:] for text in line.split("\t")[1:]}
    plans, plan = [], suite.plan
    monkeypatch.setattr(suite, "plan", lambda *arguments: plans.append(plan(*arguments)) or plans[-1])

    def white(output, **sample):
        named = {"tasks": str(home / "pairs.tsv"), "output": home / output}
        named |= {"postprocess": "whitening", "k": 2}
        return whitenedcse.evaluate(home / run.path, settings={"fit": "training", **sample}, **named)

    for sample, size in (({}, 16), ({"sample": 9}, 9), ({"sample": None}, 16)):
        assert white(f"{size}{len(plans)}", **sample).results["rows"][-1]["setting"] == "inductive"
        fitted = {*plans[-1].sentences} - tests
        assert fitted <= kept and len(fitted) == size
    (home / "deep").mkdir()
    monkeypatch.chdir(home / "deep")
    with pytest.raises(FileNotFoundError, match=r"^my.txt: no such file"):
        white("x")
    Path("my.txt").write_text("another text\n")
    with pytest.raises(ValueError, match=r"^my.txt is not what .* was trained on; .* fit to, fit=FILE"):
        white("x")
    assert not (home / "x").exists()


def test_training_sentences_of_the_dev_table_and_of_an_evaluation_are_those_of_all_columns(home):
    table = [f"{a}\t{b} {a}\n" for a in SENTENCES for b in SENTENCES[1:]]
    (home / "two.tsv").write_text("left\tright\n" + "".join(table))
    pairs = [f"{i % 5}\t{a}\t{b}\n" for i, (a, b) in enumerate(itertools.combinations(SENTENCES, 2))]
    (home / "pairs.tsv").write_text("score\tsentence1\tsentence2\n" + "".join(pairs))
    more = {"settings": {"data.columns": ["left", "right"]}, "views": 2, **SMALL, "max_length": 32}
    run = whitenedcse.train("bert", "two.tsv", dev="pairs.tsv", output="outputs/two", **more)
    best = run.series["dev/whitened_on_corpus_k16"].values[run.series["dev/spearman"].values.argmax()]
    after = {"fit": "training"}
    scored = whitenedcse.evaluate(run, tasks="pairs.tsv", postprocess="whitening", settings=after)
    assert scored.tests("whitening")["avg"] == pytest.approx(best, abs=1e-6)


@pytest.mark.slow
def test_the_own_limit_of_an_encoder_is_kept_and_what_is_left_out_of_it_is_said(home, bert, capsys):
    last = Final(weight=torch.eye(16), bias=torch.zeros(16), unit=True, provenance={})
    own = embedder_of(bert, kind="mean").replaced(max_length=40, final=last, prompt="query: ")
    checkpoint.save(own, home / "own")
    settings = {"settings": {"trainer.max_steps": 1}, **SMALL}
    for name in ("ours", "theirs"):
        run = whitenedcse.train("own", "my.txt", output=name, **settings | {"pooling": "cls"})
        out = capsys.readouterr().out
        assert (
            "note: own pools by mean over layers [-1], this run by cls over layers [-1]; pooling=own" in out
        )
        assert "note: own embeds after the prompt 'query: ', this run after none; see prompt=\n" in out
        assert "note: the linear layer that own has after its pooling is left out\n" in out
        assert "note: own has vectors of unit length, this run not; " in out
        assert Embedder.load(run).max_length == 40 and Embedder.load(run).final is None
        for file in ("whitenedcse.json", "digests.json"):  # then as Sentence-Transformers left it
            (home / "own" / file).unlink(missing_ok=True)
    whitenedcse.train("bert", "my.txt", output="c", **settings)
    assert "note: " not in capsys.readouterr().out
    run = whitenedcse.train("own", "my.txt", output="kept", **settings | {"pooling": None})
    assert Embedder.load(run).pooling.kind == "mean" and "pools by" not in capsys.readouterr().out


# a corpus without dev pairs


def data_of(home, tokenizer, **settings):
    data = SentenceData(corpus=str(home / "my.txt"), tokenizer=tokenizer, **settings)
    data.hold_out = True
    data.setup("fit")
    return data


def test_held_out_sentences_are_never_trained_on(home, tokenizer):
    data = data_of(home, tokenizer, batch_size=4, passes=2)
    kept, held = data.trained, data.shuffled(1)[: data.holds_out]
    assert data.holds_out == 4 and len(kept) == 44 and not set(kept) & set(held)
    order = data.train_dataloader().sampler
    for epoch in range(3):
        order.set_epoch(epoch)
        assert set(np.concatenate([*order])) <= set(kept) and len(order) == 11
    tokens = tokenised(Corpus(str(home / "my.txt"), (), None), tokenizer, data.max_length)
    assert torch.equal(data.held_out().ids, tokens.rows(held, [0]).ids)
    assert "4 rows held out, never trained on" in data.description
    whole = SentenceData(corpus=str(home / "my.txt"), tokenizer=tokenizer, batch_size=4)
    whole.setup("fit")
    assert len(whole.trained) == len(whole.tokens) and "held out" not in whole.description
    data = data_of(home, tokenizer, batch_tokens=60)  # budgets of tokens, too
    assert np.array_equal(data.sizes, np.diff(data.tokens.offsets)[data.trained])
    for rows, count in ((4, 2), (19, 2), (40, 4), (9000, 512)):
        data = SentenceData(corpus="x", batch_size=2)
        data.hold_out, data.tokens = True, range(rows)
        assert data.holds_out == count and len(data.trained) == rows - count


def test_a_corpus_that_is_smaller_than_a_batch_names_the_setting(home):
    (home / "few.txt").write_text("a b\nb a\na a\n")
    with pytest.raises(ValueError, match=r"1 rows beside 2 held out do not fill one batch_size=8; set data"):
        whitenedcse.train("bert", "few.txt", **SMALL)


def test_the_monitor_without_pairs_measures_dropout_and_uniformity(home, bert, tokenizer):
    data, embedder = data_of(home, tokenizer, batch_size=8), embedder_of(bert, kind="mean").train()
    values = HeldOut().measured(embedder, data, 0)
    assert embedder.training and embedder.head.training
    rows = data.held_out()
    plain = torch.from_numpy(embedder.encode_rows(rows))
    assert values["dev/uniformity"] == pytest.approx(float(uniformity(plain)), abs=1e-5)
    # the same by hand: the encoder in training mode, dropout drawn from the seed of each of the two
    both = []
    for seed in (1, 2):
        embedder.eval().encoder.train()
        seed_torch(seed_of(seed))
        both.append(embedder.pool(rows, seed_of(seed, 0)).detach())
    assert values["dev/alignment"] == pytest.approx(float(alignment(*both)), abs=1e-6)
    assert not torch.equal(*both)
    assert torch.equal(dropped(embedder, rows, 1), dropped(embedder, rows, 1))


def test_without_pairs_the_last_checkpoint_is_the_best_and_every_follows_the_run(home, capsys):
    run = whitenedcse.train("bert", "my.txt", output="outputs/a", epochs=5, **SMALL)
    dev = run.results["dev"]
    assert dev["metric"] is None and dev["best"] is None and dev["best_step"] == dev["last_step"] == 25
    assert run.series["dev/alignment"].steps.tolist() == [0, 10, 20, 25]
    out = capsys.readouterr().out
    assert "sentences held out of the corpus" in out and "no dev pairs: neither number says" in out
    assert whitenedcse.evaluate("outputs/a", tasks=["pairs.tsv"], output="outputs/e").results["rows"]


def test_a_run_that_stops_early_says_so_once(tmp_path):
    lines, trainer = [], SimpleNamespace(should_stop=False)
    pairs = [Subset("a", ["x", "y"], ["z", "w"], np.array([3.0, 4.0]))]
    monitor = Monitor(dev=pairs, every=2, patience=2, directory=tmp_path, say=lines.append)
    for step, score in enumerate((10.0, 40.0, 30.0)):
        monitor.rows.append(Row(2 * step, {"dev/spearman": score}))
        monitor.stop_in_vain(trainer)
    assert not trainer.should_stop and lines == []
    monitor.rows.append(Row(6, {"dev/spearman": 35.0}))
    for _ in range(2):
        monitor.stop_in_vain(trainer)
    assert trainer.should_stop
    assert lines == ["training stops: no better score since step 2 (monitor.patience)"]


@pytest.mark.parametrize("settings", [{"patience": 3}, {"readout": True}])
def test_what_needs_scored_pairs_is_not_ignored_without_them(tmp_path, settings):
    given = {"dev": None, "every": 2, "patience": None, "directory": tmp_path, "say": print}
    with pytest.raises(ValueError, match=r"need scored pairs: monitor\.dev=FILE$"):
        Monitor(**(given | settings))


def test_the_best_readout_is_scored_with_the_baselines_and_is_no_worse_than_the_embedding(bert):
    embedder, rng = embedder_of(bert, kind="mean").eval(), np.random.default_rng(0)
    left, right = (list(rng.choice(SENTENCES, 60)) for _ in range(2))
    dev_set = DevSet([Subset("a", left, right, rng.normal(size=60))], readout=True)
    texts = ragged(token_ids(SENTENCES * 3, bert.tokenizer, 32, ""))
    values = dev_set.measured(embedder, None, 0)
    values |= dev_set.whitened(embedder, SimpleNamespace(sample_tokens=lambda n: texts))
    assert values["dev/readout"] > values["dev/spearman"]
    assert dev_set.best in dev_set.said(values) and f"{values['dev/readout']:.2f}" in dev_set.said(values)

"""The library without a command line: train and evaluate as functions; corpora without scored pairs."""

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas
import pytest
import torch
from encoders import SENTENCES, embedder_of
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from programs import ROOT, Forked, forking, server, started, surroundings

import whitenedcse
from whitenedcse import Embedder
from whitenedcse.app import train as scripts
from whitenedcse.app.config import CONF, label
from whitenedcse.app.python import quoted
from whitenedcse.console import draws
from whitenedcse.data.corpus import Corpus, read
from whitenedcse.data.datamodule import SentenceData
from whitenedcse.data.tokens import tokenised
from whitenedcse.evaluation import suite
from whitenedcse.evaluation.geometry import alignment, uniformity
from whitenedcse.evaluation.sts import Subset
from whitenedcse.files import checksum
from whitenedcse.model import checkpoint
from whitenedcse.model.head import Final
from whitenedcse.run import Run
from whitenedcse.training.loggers import progress_bar
from whitenedcse.training.module import first_seed, seed_of
from whitenedcse.training.monitor import DevSet, HeldOut, Monitor, Row, dropped

PAIRS = "score\tsentence1\tsentence2\n" + "".join(
    f"{i}\t{a}\t{b}\n" for i, (a, b) in enumerate(zip(SENTENCES, SENTENCES[::-1], strict=True))
)


@pytest.fixture
def home(with_bert):
    """An empty folder with an encoder, a corpus of 48 sentences and scored pairs, as a user has them."""
    (with_bert / "my.txt").write_text("".join(f"{a} {b}\n" for a in SENTENCES for b in SENTENCES[:6]))
    (with_bert / "pairs.tsv").write_text(PAIRS)
    (with_bert / "table.csv").write_text("key,text\n1,a cat\n2,a dog\n")
    return with_bert


SMALL = {"batch_size": 8, "max_length": 16, "pooling": "mean", "lr": 1e-3}
WORDS = ["encoder=pretrained", "encoder.path=bert", "data=file", "data.corpus=my.txt", "pooling=mean"]
WORDS += ["data.batch_size=8", "data.max_length=16", "optim.lr=1e-3"]


def bits(run):
    """The digests of the best checkpoint's weights and head, and of the logged values but the speed."""
    folder = Path(run)
    assert (folder / "scores.json").is_file()
    series = {
        name: [*values.values] for name, values in Run(folder).series.items() if "per_second" not in name
    }
    return [checksum(folder / "best" / name) for name in ("model.safetensors", "head.safetensors")], series


def test_a_call_and_the_command_give_the_same_bits(home):
    argv = list(sys.argv)
    run = whitenedcse.train("bert", "my.txt", dev="pairs.tsv", output="outputs/call", **SMALL)
    assert sys.argv == argv
    done = started("train.py", *WORDS, "monitor=held_out", "monitor.dev=pairs.tsv", "run=command", cwd=home)
    assert done.returncode == 0, done.stderr
    assert bits(run.path) == bits("outputs/command")
    call, command = (Run(f"outputs/{name}").settings for name in ("call", "command"))
    assert {**call, "run": ""} == {**command, "run": ""}
    assert Embedder.load(run).encode(SENTENCES).shape == (8, 16) and repr(run) == "Run('outputs/call')"
    # and leaves no trace: neither Hydra's state, nor the lock, nor the arguments of the process
    assert not GlobalHydra.instance().is_initialized() and not HydraConfig.initialized()
    claimed = subprocess.run(
        [sys.executable, "-c", "from whitenedcse.run import Run\nwith Run('outputs/call').claim(): pass"],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert claimed.returncode == 0


def test_called_again_a_finished_run_is_returned_as_it_is_and_another_is_refused(home, capsys):
    settings = {"trainer.max_steps": 2}
    whitenedcse.train("bert", "my.txt", output="outputs/a", settings=settings, **SMALL)
    before = bits("outputs/a")
    capsys.readouterr()
    run = whitenedcse.train("bert", "my.txt", output="outputs/a", settings=settings, **SMALL)
    assert "is finished and not changed" in capsys.readouterr().out and bits(run.path) == before
    with pytest.raises(ValueError, match=r"views=2 \(it began with 3\)"):
        whitenedcse.train("bert", "my.txt", output="outputs/a", views=2, settings=settings, **SMALL)


def test_an_encoder_is_evaluated_by_a_call(home, capsys):
    run = whitenedcse.evaluate("bert", tasks=["pairs.tsv"], pooling="mean", output="outputs/e")
    (row,) = run.results["rows"]
    score = row["sts"]["tasks"]["pairs.tsv"]["all"]
    assert run.tests() == run.tests("as it is") == {"pairs.tsv": score, "avg": score}
    with pytest.raises(ValueError, match="outputs/e has no row 'no' of test scores: as it is"):
        run.tests("no")
    white = whitenedcse.evaluate(
        "bert", tasks=["pairs.tsv"], postprocess="whitening", k=4, settings={"draws": 10}, output="outputs/w"
    )
    name = white.results["rows"][-1]["name"]
    assert name == "whitening-4 (target)" and white.tests("whitening") == white.tests(name)
    assert white.results["rows"][-1]["postprocess"]["k"] == 4 and white.settings["draws"] == 10
    assert "Spearman x 100" in capsys.readouterr().out


def test_a_transform_is_fitted_to_the_training_corpus_and_to_no_other_of_its_name(home, monkeypatch):
    run = whitenedcse.train("bert", "my.txt", output="outputs/f", settings={"trainer.max_steps": 1}, **SMALL)

    def white(output):
        named = {"tasks": str(home / "pairs.tsv"), "output": home / output, "settings": {"fit": "training"}}
        return whitenedcse.evaluate(home / run.path, postprocess="whitening", k=2, **named)

    assert white("w").results["rows"][-1]["setting"] == "inductive"
    (home / "deep").mkdir()
    monkeypatch.chdir(home / "deep")
    for text in (None, "another text\n"):
        if text:
            Path("my.txt").write_text(text)
        with pytest.raises(
            ValueError, match=r"^my.txt of this folder is not what .* was trained .* fit to, fit=FILE"
        ):
            white("x")
    assert not (home / "x").exists()


def test_a_transform_is_fitted_to_the_rows_that_were_trained_on(home, monkeypatch):
    few = {"trainer.max_steps": 1, "data.sample": 16}
    run = whitenedcse.train("bert", "my.txt", output="outputs/g", settings=few, **SMALL)
    kept = {text for (text,) in read(Corpus("my.txt", (), 16))[0]}
    tests = {text for line in PAIRS.splitlines()[1:] for text in line.split("\t")[1:]}
    plans, plan = [], suite.plan
    monkeypatch.setattr(suite, "plan", lambda *arguments: plans.append(plan(*arguments)) or plans[-1])
    for sample, size in (({}, 16), ({"sample": 9}, 9), ({"sample": None}, 16)):
        settings = {"fit": "training", **sample}
        whitenedcse.evaluate(
            run,
            tasks="pairs.tsv",
            postprocess="whitening",
            settings=settings,
            output=f"outputs/{size}{len(plans)}",
        )
        fitted = {*plans[-1].sentences} - tests
        assert fitted <= kept and len(fitted) == size


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
def test_the_own_pooling_and_prompt_of_an_encoder_that_are_not_trained_are_said(home, bert, capsys):
    checkpoint.save(embedder_of(bert, kind="mean").replaced(prompt="query: "), home / "own")
    settings = {"trainer.max_steps": 1}
    for name, removed in (("ours", []), ("theirs", ["whitenedcse.json", "digests.json"])):
        for file in removed:
            (home / "own" / file).unlink()
        whitenedcse.train(
            "own", "my.txt", output=f"outputs/{name}", settings=settings, **SMALL | {"pooling": "cls"}
        )
        out = capsys.readouterr().out
        pools = "note: own pools by mean over layers [-1], this run by cls over layers [-1]"
        assert f"{pools}; keep it by pooling=mean\n" in out
        assert "note: own embeds after the prompt 'query: ', this run after none; see prompt=\n" in out
    whitenedcse.train("own", "my.txt", output="outputs/b", settings=settings | {"prompt": "query: "}, **SMALL)
    whitenedcse.train("bert", "my.txt", output="outputs/c", settings=settings, **SMALL)
    assert "note: " not in capsys.readouterr().out


WEIGHTS = Final(weight=torch.eye(16), bias=torch.zeros(16), unit=True, provenance={})
UNIT = Final(weight=None, bias=None, unit=True, provenance={})


@pytest.mark.parametrize(
    ("final", "layout", "said"),
    [
        (WEIGHTS, "theirs", "Dense, unit length"),
        (WEIGHTS, "ours", "linear, unit length"),
        (UNIT, "theirs", "unit length"),
        (UNIT, "ours", "unit length"),
        (None, "theirs", ""),
        (None, "ours", ""),
    ],
)
@pytest.mark.slow(but=1)
def test_the_own_limit_of_an_encoder_is_kept_and_steps_after_its_pooling_are_said_to_be_left_out(
    home, bert, capsys, final, layout, said
):
    checkpoint.save(embedder_of(bert, kind="cls").replaced(max_length=40, final=final), Path("own"))
    if layout == "theirs":
        Path("own/whitenedcse.json").unlink()
        Path("own/digests.json").unlink()
    settings = {"trainer.max_steps": 1}
    run = whitenedcse.train(
        "own", "my.txt", output="outputs/a", settings=settings, **SMALL | {"pooling": "cls"}
    )
    out = capsys.readouterr().out
    note = f"note: what own has after its pooling is left out: {said}; unit length is added again by whitened"
    assert (note in out) if said else ("note: " not in out)
    assert Embedder.load(run).max_length == 40 and Embedder.load(run).final is None


def test_runs_are_models_and_one_task_needs_no_list(home):
    more = {"settings": {"trainer.max_steps": 1}, **SMALL}
    run = whitenedcse.train(Path("bert"), "my.txt", tests="pairs.tsv", output="outputs/t", **more)
    assert list(run.results["rows"][0]["sts"]["tasks"]) == ["pairs.tsv"]
    names = ["as it is", "whitened (target)", "whitened (training)"]  # not named after the corpus
    assert [row["name"] for row in run.results["rows"]] == names
    with pytest.raises(
        ValueError, match="2 rows that begin with 'whitened': whitened .target., whitened .tr"
    ):
        run.tests("whitened")
    scored = whitenedcse.evaluate(run, tasks=Path("pairs.tsv"), output="outputs/e")
    assert scored.results["rows"][0]["sts"] == run.results["rows"][0]["sts"]
    assert np.array_equal(Embedder.load(run).encode(["a"]), Embedder.load(run.best).encode(["a"]))
    again = whitenedcse.train("outputs/t", "my.txt", output="outputs/u", **more)  # from its best checkpoint
    assert again.facts["encoder"]["path"] == "outputs/t"


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda: whitenedcse.train("nowhere", "my.txt"), OSError, "nowhere"),
        (lambda: whitenedcse.train("bert", "gone.txt"), FileNotFoundError, "gone.txt"),
        (lambda: whitenedcse.train("bert", "./mi.txt"), FileNotFoundError, "; did you mean my.txt?"),
        (lambda: whitenedcse.evaluate("bret", tasks="pairs.tsv"), OSError, "; did you mean bert?"),
        (lambda: whitenedcse.Embedder.load("bret"), OSError, "instead; did you mean bert?"),
        (lambda: whitenedcse.Embedder.load("./bret"), OSError, "; did you mean bert?"),
        (
            lambda: whitenedcse.train("bert", ["a cat", "a dog"]),
            TypeError,
            "corpus is of type list, not a path or name: write its sentences to a file, one a line",
        ),
        (
            lambda: whitenedcse.train("bert", "my.txt", dev=["pairs.csv"]),
            TypeError,
            "dev is of type list, not a path or name: one set of scored pairs chooses the checkpoint",
        ),
        (lambda: whitenedcse.train("bert", "table.csv", **SMALL), ValueError, '{"data.columns": ["NAME"]}'),
        (lambda: whitenedcse.train("bert", "my.txt", head="sgw"), ValueError, "no head=sgw; there are"),
        (lambda: whitenedcse.train("bert", "my.txt", views=1, **SMALL), ValueError, "views=1"),
        (lambda: whitenedcse.train("bert", "my.txt", batch_size="8"), ValueError, "must be a whole number"),
        (
            lambda: whitenedcse.train("bert", "my.txt", settings={"optim.lrr": 1}),
            ValueError,
            "no setting 'optim.lrr'; the nearest is 'optim.lr'",
        ),
        (
            lambda: whitenedcse.train("bert", "my.txt", settings={"monitor.patience": 2}, **SMALL),
            ValueError,
            "monitor.patience=2 needs scored pairs",
        ),
        (
            lambda: whitenedcse.evaluate(SimpleNamespace(), tasks="pairs.tsv"),
            TypeError,
            "model is of type SimpleNamespace, not a path or hub id: model.save(DIR), and evaluate(DIR)",
        ),
        (
            lambda: whitenedcse.train(None, "my.txt"),
            TypeError,
            "encoder is of type NoneType, not a directory",
        ),
        (
            lambda: whitenedcse.train("bert", "my.txt", tests=3),
            TypeError,
            "tests is of type int, not a name, a file or a list of these; [] is none",
        ),
        (
            lambda: whitenedcse.evaluate("bert", tasks=None),
            TypeError,
            "tasks is of type NoneType, not a name",
        ),
        (
            lambda: whitenedcse.evaluate("bert", tasks=pandas.DataFrame({"text": ["a"], "label": [1]})),
            TypeError,
            "tasks is of type DataFrame, not a name, a file or a list of these; [] is none",
        ),
        (
            lambda: whitenedcse.evaluate(
                "bert", tasks="pairs.tsv", postprocess=whitenedcse.Postprocess("zca")
            ),
            TypeError,
            "postprocess is of type Postprocess, not a name: whitened(model, fit).save(DIR), and evaluate(",
        ),
        (
            lambda: whitenedcse.evaluate("bert", tasks="pairs.tsv", postprocess="whitening", k=1000),
            ValueError,
            "k=1000 components of vectors of width 16: give k from 1 to 16, or k=null for all",
        ),
        (
            lambda: whitenedcse.evaluate("bert", tasks="stss"),
            ValueError,
            "the nearest is tasks=sts;",
        ),
    ],
)
def test_what_cannot_work_is_an_exception_of_one_line(home, call, error, said):
    with pytest.raises(error) as raised:
        call()
    assert said in str(raised.value) and "\n" not in str(raised.value)
    assert not list(Path("outputs").glob("*"))
    assert not GlobalHydra.instance().is_initialized()


def test_an_unknown_setting_is_one_error_without_hydras(home):
    with pytest.raises(ValueError, match=r"optim\.lrr'.* the nearest is 'optim\.lr'") as error:
        whitenedcse.train("bert", "my.txt", settings={"optim.lrr": 1})
    assert error.value.__suppress_context__ and error.value.__cause__ is None


def test_ctrl_c_after_training_or_in_an_evaluation_says_what_comes_next(home, monkeypatch, capsys):
    settings, tests = {"trainer.max_steps": 2}, ["pairs.tsv"]
    with monkeypatch.context() as patch:
        patch.setattr(suite, "evaluated", lambda *_: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            whitenedcse.train("bert", "my.txt", tests=tests, output="outputs/a", settings=settings, **SMALL)
        with pytest.raises(KeyboardInterrupt):
            whitenedcse.evaluate("bert", tasks=tests, output="outputs/e")
    assert capsys.readouterr().err.splitlines()[-2:] == [
        f"interrupted: the same call with output='{home}/outputs/a' resumes it",
        f"interrupted: the same call with output='{home}/outputs/e' repeats it",
    ]
    whitenedcse.train("bert", "my.txt", tests=tests, output="outputs/a", settings=settings, **SMALL)
    assert "outputs/a resumes after step 2\n" in capsys.readouterr().out
    assert whitenedcse.evaluate("bert", tasks=tests, output="outputs/e").results["rows"]


@pytest.mark.slow
def test_ctrl_c_is_an_exception_and_the_same_call_resumes_to_the_same_bits(home):
    settings = {"trainer.max_steps": 60, "trainer.max_epochs": 100, "checkpoint_every": 0.05}
    script = home / "interrupted.py"
    script.write_text(
        "import whitenedcse, sys\n"
        "try:\n"
        f"    whitenedcse.train('bert', 'my.txt', output='outputs/a', settings={settings}, **{SMALL})\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted')\n"
        "    sys.exit(7)\n"
    )
    said = home / "said"
    process = Forked(server(), [str(script)], str(home), surroundings(home, {}), [str(said)] * 2)
    until = time.monotonic() + 120
    while not list(home.glob("outputs/a/checkpoints/step-*")) and time.monotonic() < until:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 7 and "interrupted" in said.read_text()
    assert not (home / "outputs/a/scores.json").exists()
    whitenedcse.train("bert", "my.txt", output="outputs/a", settings=settings, **SMALL)
    whitenedcse.train("bert", "my.txt", output="outputs/b", settings=settings, **SMALL)
    assert bits("outputs/a")[0] == bits("outputs/b")[0]


@pytest.mark.slow
def test_two_devices_are_two_processes_as_of_the_command(home, monkeypatch):
    ranks = forking(server(), str(home), [str(home / "said")] * 2)
    agent = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"
    monkeypatch.setattr(f"{agent}.Popen", ranks.Popen)
    more = {"trainer.accelerator": "cpu", "trainer.max_steps": 3}
    run = whitenedcse.train("bert", "my.txt", output="outputs/two", devices=2, settings=more, **SMALL)
    assert run.facts["processes"] == 2 and run.results["dev"]["last_step"] == 3
    with pytest.raises(RuntimeError, match="status 2"):
        whitenedcse.train("bert", "my.txt", devices=2, settings={**more, "data.batch_size": 7}, max_length=16)


@pytest.mark.parametrize(
    "value",
    [None, True, 3, 1e-05, "a", "a'b\\", "${x}", "a,b=c", [1, "x y"], {"k": [None]}, ("t",), "", "0.5"],
)
def test_a_value_survives_hydras_grammar(value):
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parsed = OverridesParser.create().parse_override(f"x={quoted(value)}").value()
    read = json.loads(json.dumps(parsed, default=str))
    assert read == json.loads(json.dumps(value))


def test_every_public_name_can_be_imported_is_explained_and_is_in_the_types():
    source = (ROOT / "whitenedcse/__init__.py").read_text()
    for name in whitenedcse.__all__:
        symbol = getattr(whitenedcse, name)
        assert len((symbol.__doc__ or "").split()) > 15, name
        assert f" {name}" in source.partition("__all__")[0], name
    assert dir(whitenedcse) == sorted(whitenedcse.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Absent'"):
        _ = whitenedcse.Absent


@pytest.mark.parametrize(
    ("terminal", "jupyter", "widgets", "bar"),
    [
        (True, False, False, True),
        (False, True, True, True),
        (False, True, False, False),
        (False, False, True, False),
    ],
)
def test_a_bar_is_drawn_where_it_can_be(terminal, jupyter, widgets, bar, monkeypatch):
    monkeypatch.setattr("whitenedcse.console.find_spec", lambda name: name if widgets else None)
    console = SimpleNamespace(is_terminal=terminal, is_jupyter=jupyter)
    assert draws(console) is bar
    monkeypatch.setattr("rich.get_console", lambda: console)
    assert type(progress_bar(print)).__name__ == ("Bar" if bar else "PlainProgress")


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
    seen = [row for epoch in range(3) for step in range(len(order)) for row in order.rows_of(epoch, step)]
    assert set(seen) <= set(kept) and len(order) == 11
    tokens = tokenised(Corpus(str(home / "my.txt"), (), None), tokenizer, data.max_length)
    assert torch.equal(data.held_out().ids, tokens.rows(held, [0]).ids)
    assert "4 rows held out, never trained on" in data.counts
    whole = SentenceData(corpus=str(home / "my.txt"), tokenizer=tokenizer, batch_size=4)
    whole.setup("fit")
    assert whole.trained is None and "held out" not in whole.counts


@pytest.mark.parametrize(("rows", "held"), [(4, 2), (19, 2), (40, 4), (9000, 512)])
def test_two_rows_are_held_out_at_least_and_512_at_most(rows, held):
    data = SentenceData(corpus="x", batch_size=2)
    data.hold_out, data.tokens = True, range(rows)
    assert data.holds_out == held and len(data.trained) == rows - held


def test_a_corpus_that_is_smaller_than_a_batch_names_the_setting(home):
    (home / "few.txt").write_text("a b\nb a\na a\n")
    with pytest.raises(ValueError, match=r"1 rows beside 2 held out do not fill one batch_size=8; set data"):
        whitenedcse.train("bert", "few.txt", **SMALL)


def test_batches_of_tokens_hold_rows_out_too(home, tokenizer):
    data = data_of(home, tokenizer, batch_tokens=60)
    sizes = np.diff(data.tokens.offsets)
    assert np.array_equal(data.sizes, sizes[data.trained])


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
        first_seed(seed_of(seed))
        both.append(embedder.pool(rows, seed_of(seed, 0)).detach())
    assert values["dev/alignment"] == pytest.approx(float(alignment(*both)), abs=1e-6) and not torch.equal(
        *both
    )
    assert torch.equal(dropped(embedder, rows, 1), dropped(embedder, rows, 1))


def test_without_pairs_the_last_checkpoint_is_the_best_and_every_follows_the_run(home, capsys):
    run = whitenedcse.train("bert", "my.txt", output="outputs/a", epochs=5, **SMALL)
    dev = run.results["dev"]
    assert dev["metric"] is None and dev["best"] is None and dev["best_step"] == dev["last_step"] == 25
    assert run.series["dev/alignment"].steps.tolist() == [0, 10, 20, 25]
    out = capsys.readouterr().out
    assert "sentences held out of the corpus" in out and "no dev pairs: neither number says" in out
    assert whitenedcse.evaluate("outputs/a", tasks=["pairs.tsv"], output="outputs/e").results["rows"]


@pytest.mark.parametrize(("steps", "every"), [(5, 10), (2000, 100), (10**6, 125), (float("inf"), 125)])
def test_the_pause_between_evaluations_follows_the_length_of_the_run(steps, every, tmp_path):
    class Trainer:
        estimated_stepping_batches = steps
        global_step = 0
        should_stop = False

    monitor = Monitor(dev=None, every=None, patience=None, directory=tmp_path, say=print)
    monitor.rows = [object()]
    monitor.on_train_start(Trainer(), None)
    assert monitor.every == every


@pytest.mark.parametrize(("every", "said"), [(9, True), (8, False)])
def test_a_pause_longer_than_the_run_is_said(every, said, tmp_path, monkeypatch):
    class Trainer:
        estimated_stepping_batches = 8

    lines = []
    monitor = Monitor(dev=None, every=every, patience=None, directory=tmp_path, say=lines.append)
    monkeypatch.setattr(monitor, "measure", lambda *_: None)
    monitor.on_train_start(Trainer(), None)
    text = "monitor.every=9 is more than the 8 steps: evaluated before and after only; null follows"
    assert lines == [f"{text} the length of the run"] * said


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


@pytest.mark.parametrize(("noted", "best"), [(9, 6), (3, 3), (None, 3)])
def test_evaluations_whose_checkpoint_was_replaced_before_a_kill_are_not_the_best(
    embedder, noted, best, tmp_path
):
    """best/ of step 9 replaced that of step 3, the run resumed after step 6, and 9 scores lower now."""
    trainer = SimpleNamespace(should_stop=False, estimated_stepping_batches=90)
    pairs = [Subset("a", ["x", "y"], ["z", "w"], np.array([3.0, 4.0]))]
    settings = {"dev": pairs, "every": 3, "patience": None, "directory": tmp_path / "best", "say": print}
    rows = [(step, {"dev/spearman": score}) for step, score in ((0, 10.0), (3, 50.0), (6, 40.0))]
    checkpoint.save(embedder, tmp_path / "best", noted)
    resumed, again = Monitor(**settings), Monitor(**settings)
    resumed.load_state_dict({"rows": rows})  # as older versions wrote it
    resumed.on_train_start(trainer, None)
    assert resumed.best.step == best
    resumed.rows.append(Row(9, {"dev/spearman": 45.0}))
    assert resumed.best.step == (9 if noted == 9 else 3)
    checkpoint.save(embedder, tmp_path / "best", resumed.best.step)
    again.load_state_dict(resumed.state_dict())
    again.on_train_start(trainer, None)
    assert again.best == resumed.best and again.since == (6 if noted == 9 else 0)


def test_dev_pairs_of_one_score_are_refused():
    pairs = Subset("a", ["x", "y"], ["z", "w"], np.array([3.0, 3.0]))
    with pytest.raises(ValueError, match="all 4 dev pairs have the score 3; give pairs that differ"):
        DevSet([pairs, pairs])
    assert DevSet([pairs, pairs._replace(gold=np.array([3.0, 2.0]))]).n == 4


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["+experiment=bert_base"], "bert_base"),
        (["+experiment=bert_base", "encoder.path=models/minilm"], "minilm"),
        (["encoder=pretrained", "encoder.path=models/minilm"], "minilm"),
        ([], "quickstart"),
        (["data=file", "data.corpus=texts/my.txt"], "my"),
    ],
)
def test_a_run_is_named_after_what_it_trains(words, expected):
    from hydra import compose, initialize_config_dir

    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("train", words, return_hydra_config=True)
    path = config.encoder.get("path")
    assert label(config.hydra, path, config.data.corpus) == expected
    assert str(config.run).startswith(f"{expected}-")


def test_an_experiment_with_another_encoder_is_not_called_by_its_name_alone(home):
    words = ["+experiment=bert_base", *WORDS[1:], "monitor=held_out", "tasks=none", "trainer.max_steps=1"]
    assert started("train.py", *words, cwd=home).returncode == 0
    (run,) = (home / "outputs").iterdir()
    assert run.name.startswith("bert-") and Run(run).facts["experiment"] == "bert_base with bert"


def test_the_commands_of_the_package_are_the_scripts(home):
    done = started("whitenedcse", "train", *WORDS, "run=a", "trainer.max_steps=2", cwd=home)
    assert done.returncode == 0, done.stderr
    run = Run("outputs/a")
    assert run.facts["command"].startswith("whitenedcse train encoder=pretrained")
    assert run.settings["tasks"]["names"] == [] and run.settings["monitor"]["dev"] is None
    done = started("whitenedcse", "evaluate", "model=outputs/a", "tasks.names=[pairs.tsv]", cwd=home)
    assert done.returncode == 0 and "pairs" in done.stdout
    done = started("whitenedcse", "train", "trainer.max_stps=2", cwd=home)
    assert done.returncode == 2 and "the nearest is 'trainer.max_steps'" in done.stderr
    (home / "mine/experiment").mkdir(parents=True)
    (home / "mine/experiment/own.yaml").write_text("# @package _global_\nseed: 7\n")
    words = ["--config-dir", "mine", "+experiment=own", *WORDS, "run=b", "trainer.max_steps=1"]
    done = started("whitenedcse", "train", *words, cwd=home)
    assert done.returncode == 0 and Run("outputs/b").settings["seed"] == 7, done.stderr


def test_a_thread_can_train_too(home):
    raised = []

    def call():
        try:
            whitenedcse.train("bert", "my.txt", output="outputs/a", **SMALL)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert not raised and Run("outputs/a").scores is not None


def test_a_search_asks_for_dev_pairs(monkeypatch):
    sweeper = {"direction": "maximize"}
    monkeypatch.setattr(scripts.HydraConfig, "get", lambda: SimpleNamespace(sweeper=sweeper))
    scripts.check_search("STS-B/dev")
    with pytest.raises(ValueError, match=r"a search maximises the dev score: .* monitor.dev=FILE"):
        scripts.check_search(None)
    sweeper.clear()  # a list of settings needs none
    scripts.check_search(None)

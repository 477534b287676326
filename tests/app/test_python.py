"""The library without a command line: train and evaluate as functions, with parts of the caller's own."""

import json
import re
import shlex
import shutil
import signal
import sys
from contextlib import nullcontext
from functools import partial, wraps
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from encoders import SENTENCES, SMALL
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf
from programs import ROOT, started

import whitenedcse
from whitenedcse import Embedder, ProjectionHead
from whitenedcse.app import cli, python
from whitenedcse.app import train as scripts
from whitenedcse.app.config import CONF, label
from whitenedcse.console import quoted
from whitenedcse.evaluation import suite
from whitenedcse.files import checksum
from whitenedcse.run import Run
from whitenedcse.training.loss import Matryoshka
from whitenedcse.training.module import adamw

WORDS = ["encoder=pretrained", "encoder.path=bert", "data=file", "data.corpus=my.txt", "pooling=mean"]
WORDS += ["data.batch_size=8", "data.max_length=16", "optim.lr=1e-3"]


def bits(run):
    """The digests of the best checkpoint's weights and head, and of the logged values but speed and load."""
    folder = Path(run)
    assert (folder / "scores.json").is_file()
    machines = ("train/sentences_per_second", "train/load")
    series = {name: [*x.values] for name, x in Run(folder).series.items() if name not in machines}
    return [checksum(folder / "best" / name) for name in ("model.safetensors", "head.safetensors")], series


class Margin:
    """A loss of one's own, which fails once at a step."""

    def __init__(self, margin=0.3, fails=0):
        self.margin, self._left = margin, fails

    def __call__(self, z, negatives=None):
        self._left -= 1
        if self._left == 0:
            raise RuntimeError("once")
        return (self.margin - torch.cosine_similarity(z[0], z[1], dim=-1)).clamp_min(0).mean()


class Length:
    """A term of one's own."""

    weight = 0.1

    def __call__(self, step):
        return step.x.square().mean()


class Halved(ProjectionHead):
    """A head of one's own."""

    def forward(self, x):
        return super().forward(x) / 2


def own(fails=0, head=Halved):
    torch.manual_seed(3)
    made = head(width=16, whitening=None) if head is Halved else head
    return {
        **{"loss": Margin(0.9, fails), "head": made, "terms": {"length": Length()}},
        **{"optimizer": partial(adamw, lr=1e-3), "settings": {"checkpoint_every": 0}},
        **{"batch_size": 8, "max_length": 16, "pooling": "mean"},
    }


def test_parts_of_ones_own_are_used_as_they_are_and_resume_to_the_same_bits(home):
    """Findings E3: train(loss=Margin(0.1)) was a TypeError."""
    run = whitenedcse.train("bert", "my.txt", output="outputs/a", **own())
    assert run.settings["loss"] == {"object": f"{__name__}.Margin", "attributes": {"margin": 0.9}}
    assert run.settings["head"]["object"].endswith(".Halved") and run.settings["optim"]["object"]
    assert "train/length" in run.series and Embedder.load(run).encode(["a cat"]).shape == (1, 16)
    with pytest.raises(RuntimeError, match="once"):
        whitenedcse.train("bert", "my.txt", output="outputs/b", **own(fails=4))
    assert Run("outputs/b").scores is None
    whitenedcse.train("bert", "my.txt", output="outputs/b", **own())
    assert bits("outputs/a") == bits("outputs/b") and Run("outputs/b").facts["resumed"][0]["step"] >= 1
    with pytest.raises(ValueError, match=r"holds another run: loss.attributes.margin=0.5 \(it began with"):
        whitenedcse.train("bert", "my.txt", output="outputs/a", **(own() | {"loss": Margin(0.5)}))
    with pytest.raises(ValueError, match="optim.lr is not for a part of your own"):
        whitenedcse.train("bert", "my.txt", lr=1e-3, **own())
    two = {"devices": 2, "settings": {"trainer.accelerator": "cpu"}}
    with pytest.raises(ValueError, match="head, loss, optim, terms.length: no object goes to the processes"):
        whitenedcse.train("bert", "my.txt", **(own() | two))


def test_any_module_is_a_head(home):
    for head in (torch.nn.Linear(16, 16), lambda width: torch.nn.Sequential(torch.nn.Linear(width, 4))):
        given = {"output": f"outputs/{len(list(home.glob('outputs/*')))}", "head": head, **SMALL}
        run = whitenedcse.train("bert", "my.txt", settings={"trainer.max_steps": 1}, **given)
        assert Embedder.load(run).encode(["a cat"]).shape == (1, 16)


def test_lists_and_the_arguments_of_a_partial_are_noted_of_a_part():
    config = OmegaConf.create({"loss": {"form": "l2"}, "optim": {}})
    scripts.note_parts(config, {"loss": Matryoshka(dims=(4, 8)), "optim": partial(adamw, lr=1e-3)})
    assert config.loss.attributes.dims == [4, 8] and config.loss.attributes.weights == [1.0]
    assert config.optim == {"object": "whitenedcse.training.module.adamw", "attributes": {"lr": 1e-3}}


def test_a_class_of_ones_own_is_made_with_its_own_defaults(home, monkeypatch):
    made, init = [], Margin.__init__
    spy = wraps(init)(lambda self, *given: init(self, *given) or made.append(vars(self).copy()))
    monkeypatch.setattr(Margin, "__init__", spy)
    few = {"trainer.max_steps": 1}
    run = whitenedcse.train("bert", "my.txt", output="a", loss=Margin, head=Halved, settings=few, **SMALL)
    assert made == [{"margin": 0.3, "_left": 0}] and run.settings["loss"]["attributes"] == {}
    name = f"{Margin.__module__}.Margin"
    monkeypatch.setitem(sys.modules, Margin.__module__, sys.modules[__name__])
    few["loss._target_"] = name
    named = whitenedcse.train("bert", "my.txt", output="b", settings=few, **SMALL)
    assert named.settings["loss"] == {"_target_": name} and len(made) == 2


def test_a_call_and_the_command_give_the_same_bits_and_called_again_a_run_stays(home, capsys):
    argv, given = list(sys.argv), {"dev": "pairs.tsv", "output": "outputs/call", **SMALL}
    run = whitenedcse.train("bert", "my.txt", **given)
    assert sys.argv == argv
    done = started("train.py", *WORDS, "monitor=held_out", "monitor.dev=pairs.tsv", "run=command", cwd=home)
    assert done.returncode == 0, done.stderr
    capsys.readouterr()
    assert whitenedcse.train("bert", "my.txt", **given).path == run.path
    assert "is finished and not changed" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"views=2 \(it began with 3\)"):
        whitenedcse.train("bert", "my.txt", views=2, **given)
    assert bits(run.path) == bits("outputs/command")
    call, command = (Run(f"outputs/{name}").settings for name in ("call", "command"))
    assert {**call, "run": ""} == {**command, "run": ""}
    assert Embedder.load(run).encode(SENTENCES).shape == (8, 16) and repr(run) == "Run('outputs/call')"
    # and leaves no trace: neither Hydra's state nor the lock
    assert not GlobalHydra.instance().is_initialized() and not HydraConfig.initialized()
    with Run("outputs/call").claim():
        pass


def test_the_export_that_a_run_names_is_one_that_holds_its_embedding(home, capsys):
    whitenedcse.train("bert", "my.txt", output="outputs/head", settings={"embedding": "head"}, **SMALL)
    command = re.search(r"whitenedcse (export .*)", capsys.readouterr().out)[1]
    assert cli.main(shlex.split(command)) == 0


def test_an_encoder_is_evaluated_by_a_call(home, capsys):
    run = whitenedcse.evaluate("bert", tasks=["pairs.tsv"], pooling="mean", output="outputs/e")
    (row,) = run.results["rows"]
    score = row["sts"]["tasks"]["pairs.tsv"]["all"]
    assert run.tests() == run.tests("as it is") == {"pairs.tsv": score, "avg": score}
    few = {"settings": {"draws": 10}, "output": "outputs/w"}
    white = whitenedcse.evaluate("bert", tasks=["pairs.tsv"], postprocess="whitening", k=4, **few)
    assert white.tests("whitening") == white.tests("whitening-4 (target)")
    assert white.settings["draws"] == 10 and "Spearman x 100" in capsys.readouterr().out


def test_options_of_settings_have_their_own_where_an_argument_says_nothing(monkeypatch):
    def composed(script, given, path, **_):
        words = [f"{name}={quoted(value)}" for name, value in given.items()]
        with python.configuration(script.__name__, words, path) as config:
            return config

    monkeypatch.setattr(python, "called", composed)
    for k in (None, 7):
        protocol = whitenedcse.evaluate("bert", k=k, settings={"protocol": "bert_whitening"}).protocol
        assert protocol.rows[2].map.k == (k or 256)
    chosen = {"monitor": "sts_b", "tasks": "rte"}
    for more, found in (({}, ("STS-B/dev", ["RTE"])), ({"dev": "d", "tests": "t"}, ("d", ["t"]))):
        config = whitenedcse.train("bert", "my.txt", settings=chosen, **more)
        assert (config.monitor.dev, config.tasks.names) == found
    config = whitenedcse.train("bert", "quickstart")
    assert (config.monitor.dev, config.tasks.names) == (None, [])
    for more, views in (({}, 2), ({"views": 4}, 4)):
        config = whitenedcse.train("bert", "my.txt", settings={"+system": "simcse"}, **more)
        assert (config.views, config.head.whitening) == (views, None)


def test_runs_are_models_and_one_task_needs_no_list(home):
    more = {"settings": {"trainer.max_steps": 1}, **SMALL}
    run = whitenedcse.train(Path("bert"), "my.txt", tests="pairs.tsv", output="outputs/t", **more)
    names = ["as it is", "whitened (target)", "whitened (training)"]  # not named after the corpus
    assert [row["name"] for row in run.results["rows"]] == names
    scored = whitenedcse.evaluate(run, tasks=Path("pairs.tsv"), output="outputs/e")
    assert scored.results["rows"][0]["sts"] == run.results["rows"][0]["sts"]
    again = whitenedcse.train("outputs/t", "my.txt", output="outputs/u", **more)  # from its best checkpoint
    assert again.facts["encoder"]["path"] == "outputs/t"


WRONG = [  # a call, its error, what that says
    (lambda: whitenedcse.train("nowhere", "my.txt"), OSError, "nowhere"),
    (lambda: whitenedcse.train("bert", ["a cat", "a dog"]), TypeError, "os.PathLike object, not list"),
    (lambda: whitenedcse.train("bert", "table.csv", **SMALL), ValueError, "key, text"),
    (lambda: whitenedcse.train("bert", "my.txt", head="zac"), ValueError, "; the nearest is head=zca"),
    (lambda: whitenedcse.train("bert", "my.txt", views=1, **SMALL), ValueError, "views=1"),
    (lambda: whitenedcse.train("bert", "my.txt", devices=0, **SMALL), ValueError, "Trainer(devices=0)"),
    (lambda: whitenedcse.evaluate(SimpleNamespace()), TypeError, "os.PathLike object, not SimpleNamespace"),
    (lambda: whitenedcse.train("bert", "my.txt", tests=3), ValueError, "tests=int is no list of texts"),
]


def test_what_cannot_work_is_an_exception_of_one_line(home):
    for call, error, said in WRONG:
        with pytest.raises(error) as raised:
            call()
        assert said in str(raised.value) and "\n" not in str(raised.value), raised.value
        assert not list(Path("outputs").glob("*")) and not GlobalHydra.instance().is_initialized()


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
def test_two_devices_are_two_processes_as_of_the_command(home):
    more = {"trainer.accelerator": "cpu", "trainer.max_steps": 3}
    run = whitenedcse.train("bert", "my.txt", output="outputs/two", devices=2, settings=more, **SMALL)
    assert run.facts["processes"] == 2 and run.results["dev"]["last_step"] == 3


def test_a_sentence_transformers_model_keeps_its_pooling_and_is_cut_no_shorter_than_trained(home, capsys):
    shutil.copytree("bert", "st")
    names = ("sentence_transformers.models.Transformer", ""), ("sentence_transformers.models.Pooling", "pool")
    listed = [{"idx": i, "name": str(i), "path": path, "type": kind} for i, (kind, path) in enumerate(names)]
    Path("st/modules.json").write_text(json.dumps(listed))
    Path("st/sentence_bert_config.json").write_text('{"max_seq_length": 9}')
    Path("st/pool").mkdir()
    few = SMALL | {"pooling": None, "settings": {"trainer.max_steps": 1}}
    for mode, own in (("max", True), ("weightedmean", False)):
        Path("st/pool/config.json").write_text(json.dumps({f"pooling_mode_{mode}_tokens": True}))
        with nullcontext() if own else pytest.raises(ValueError, match="weighted.*name a pooling, such as"):
            embedder = Embedder.load(whitenedcse.train("st", "my.txt", output=f"outputs/{mode}", **few))
            assert str(embedder.pooling) == "max over layers [-1]" and embedder.max_length == 16
    capsys.readouterr()
    whitenedcse.train("st", "my.txt", output="outputs/named", **few | {"pooling": "mean"})
    assert "note: of st only the encoder is trained, not what follows it" in capsys.readouterr().out


def test_ranks_must_have_equal_settings_and_the_same_checkpoint(home, monkeypatch):
    """What Safekeeping compares between them is in tests/training/test_safekeeping.py."""
    with patch("whitenedcse.training.checkpoints.Safekeeping", side_effect=ZeroDivisionError) as made:
        with pytest.raises(ZeroDivisionError):
            whitenedcse.train("bert", "my.txt", output="outputs/equal", settings={"seed": 77}, **SMALL)
    *_, same, _, _ = made.call_args.args
    assert "\nseed: 77\n" in same and same.endswith("\nresumes from: the start")


def test_a_process_that_failed_is_an_exception(home, monkeypatch):
    monkeypatch.setattr("whitenedcse.app.train.launched", lambda *_: 2)
    with pytest.raises(RuntimeError, match="status 2"):
        whitenedcse.train("bert", "my.txt", devices=2, **SMALL)


def test_every_public_name_can_be_imported_is_explained_and_is_in_the_types():
    source = (ROOT / "whitenedcse/__init__.py").read_text()
    for name in whitenedcse.__all__:
        symbol = getattr(whitenedcse, name)
        assert len((symbol.__doc__ or "").split()) > 15, name
        assert f" {name}" in source.partition("__all__")[0], name
    assert dir(whitenedcse) == sorted(whitenedcse.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Absent'"):
        _ = whitenedcse.Absent


def test_a_run_is_named_after_what_it_trains():
    for words, expected in {
        "+experiment=bert_base": "bert_base",
        "+experiment=bert_base encoder.path=models/minilm": "minilm",
        "encoder=pretrained encoder.path=models/minilm": "minilm",
        "": "quickstart",
        "data=file data.corpus=texts/my.txt": "my",
    }.items():
        with initialize_config_dir(str(CONF), version_base="1.3"):
            config = compose("train", words.split(), return_hydra_config=True)
        assert label(config.hydra, config.encoder.get("path"), config.data.corpus) == expected
        assert str(config.run).startswith(f"{expected}-")


def test_the_commands_of_the_package_are_the_scripts(home, capsys):
    assert cli.main(["train", *WORDS, "run=a", "trainer.max_steps=2"]) == 0
    run = Run("outputs/a")
    assert run.facts["command"].startswith("whitenedcse train encoder=pretrained")
    assert run.settings["tasks"]["names"] == [] and run.settings["monitor"]["dev"] is None
    assert cli.main(["evaluate", "model=outputs/a", "tasks.names=[pairs.tsv]"]) == 0
    assert "pairs" in capsys.readouterr().out
    (home / "mine/experiment").mkdir(parents=True)
    (home / "mine/experiment/own.yaml").write_text("# @package _global_\nseed: 7\n")
    words = ["--config-dir", "mine", "+experiment=own", *WORDS, "run=b", "trainer.max_steps=1"]
    assert cli.main(["train", *words]) == 0 and Run("outputs/b").settings["seed"] == 7
    assert Run("outputs/b").facts["experiment"] == "own with bert"  # which names another encoder

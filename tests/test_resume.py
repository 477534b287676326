"""A run that was cut short anywhere and started again ends with the bits of one that was not."""

import csv
import json
import os
import signal
import time
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from encoders import SENTENCES, backbone, embedder_of
from lightning import Callback, seed_everything
from lightning.pytorch.callbacks import LambdaCallback
from programs import begun, until
from test_scripts import ROOT, TINY
from test_training import DEV, LOSS

from whitenedcse import files
from whitenedcse.data.datamodule import SentenceData
from whitenedcse.model import checkpoint
from whitenedcse.model.encoder import Encoder
from whitenedcse.model.lora import LoRA
from whitenedcse.training import checkpoints
from whitenedcse.training.checkpoints import Safekeeping, newest, step_of
from whitenedcse.training.loggers import Metrics, Record
from whitenedcse.training.module import ContrastiveTraining, adamw
from whitenedcse.training.monitor import Monitor
from whitenedcse.training.trainer import Trainer

BATCHES, SIZE = 7, 4
MACHINES = "train/sentences_per_second", "train/load"
SETTINGS = {"max_epochs": 2, "max_steps": -1, "accumulate_grad_batches": 1}
HERE = {"devices": 1, "accelerator": "cpu", "enable_progress_bar": False}
HERE |= {"log_every_n_steps": 2, "gradient_clip_val": 1.0}


class Cut(Exception):
    """What ends a run; nothing in the package knows it."""


class Cutter(Callback):
    """Ends the run in one hook, when `steps` optimiser steps were done; or sends it a signal there."""

    sent = False

    def __init__(self, hook, steps, number):
        def cut(trainer, *_):
            if trainer.global_step == steps and number is None:
                raise Cut
            if trainer.global_step == steps and not self.sent:  # a second Ctrl-C would end this process
                self.sent = True
                os.kill(os.getpid(), number)

        if hook:
            setattr(self, hook, cut)


fast = partial(adamw, lr=1e-2, weight_decay=0.01, warmup_steps=2)
still, wild = partial(adamw, lr=1e-12), partial(adamw, lr=1e30)


@pytest.fixture(scope="module")
def train(tokenizer, tmp_path_factory):
    """A life of a run: from its newest checkpoint to the end, or to where it is cut."""
    home = tmp_path_factory.mktemp("resume")
    rows = [f"{a} {b}" for a in SENTENCES for b in SENTENCES][: BATCHES * SIZE + 1]
    (home / "x.txt").write_text("\n".join(rows))

    def life(
        run, hook=None, steps=0, *, patience=None, evaluation=0, chunk=None, optimizer=fast, lora=None,
        number=None, seconds=0.0, views=None, **changes,
    ):  # fmt: skip
        said = []
        checkpoint = newest(run / "checkpoints", said.append)
        torch.manual_seed(0)  # of the adapters
        bert = Encoder(backbone("bert", len(tokenizer)), tokenizer, lora=lora)
        parts = {"embedder": embedder_of(bert), "loss": LOSS, "optimizer": optimizer}
        module = ContrastiveTraining(**parts, views=3, seed=5, chunk=chunk)
        sizes = {"max_length": 16, "batch_size": SIZE, "seed": 5, "tokenizer": tokenizer} | (views or {})
        data = SentenceData(corpus=str(home / "x.txt"), **sizes)
        seed_everything(time.monotonic_ns() % 2**31, verbose=False)  # nothing may hang on a state
        settings = {"dev": [DEV], "every": 3, "patience": patience}
        monitor = Monitor(**settings, directory=run / "best", say=said.append)
        left, measured = [evaluation], monitor.dev_set.measured

        def interrupted(*parts):
            """The run is cut amid an evaluation, when so many were made."""
            values, left[0] = measured(*parts), left[0] - 1
            if left[0] == 0:
                raise Cut
            return values

        monitor.dev_set.measured = interrupted
        keep = Safekeeping(run / "checkpoints", seconds, monitor, "", said.append)
        run.mkdir(exist_ok=True)
        callbacks = [keep, Record(), monitor, Cutter(hook, steps, number)]
        trainer = Trainer(
            callbacks=[*callbacks, LambdaCallback(on_train_end=keep.finish)],
            logger=Metrics(run / "metrics.csv", checkpoint), **(HERE | SETTINGS | changes),
        )  # fmt: skip
        try:
            trainer.fit(module, data, ckpt_path=checkpoint, weights_only=True)
        except Cut:
            return None
        state = trainer.optimizers[0].state_dict(), trainer.lr_scheduler_configs[0].scheduler.last_epoch
        best = {str(path): path.read_bytes() for path in (run / "best").rglob("*") if path.is_file()}
        best = {name.removeprefix(str(run)): content for name, content in best.items()}
        return module.state_dict(), state, best, lines(run), monitor.summary()

    handlers = {number: signal.getsignal(number) for number in checkpoints.ASKING}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WHITENEDCSE_CACHE", str(home / "cache"))
        patch.setattr(checkpoints, "SHARE", 0)  # a checkpoint before every step
        yield life
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def whole(train, tmp_path_factory):
    """What a run that nothing disturbs ends with."""
    known = {}

    def end(**settings):
        key = repr(settings)
        if key not in known:
            known[key] = train(tmp_path_factory.mktemp("whole"), **settings)
        return known[key]

    return end


def lines(run):
    """metrics.csv but for speed and load of the machine, which no two lives share."""
    with (run / "metrics.csv").open() as file:
        return [line | {name: bool(line[name]) for name in MACHINES} for line in csv.DictReader(file)]


def same(one, other):
    """Bit by bit, and tensors that are no number alike."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


MOMENTS = {
    "before the first step": ("on_train_batch_start", 0),
    "amid an epoch": ("on_train_batch_end", 4),
    "after an epoch's last batch": ("on_train_batch_end", 7),
    "between epochs": ("on_train_epoch_end", 7),
    "before the last step": ("on_train_batch_start", 13),
    "after the last evaluation": ("on_train_end", 14),
    "after the last checkpoint": ("on_fit_end", 14),
}


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.slow(but=2)
def test_a_run_resumes_as_if_uninterrupted(train, whole, tmp_path, moment):
    hook, steps = MOMENTS[moment]
    assert train(tmp_path / "cut", hook, steps) is None
    between = hook in ("on_train_batch_start", "on_fit_end")  # steps; else the last is not yet written
    assert last_step(tmp_path / "cut" / "checkpoints") == (steps if between else max(0, steps - 1))
    assert same(train(tmp_path / "cut"), whole())


@pytest.mark.parametrize("evaluation", [1, 4, 6])  # before step 1, and after step 9 and the last
@pytest.mark.slow(but=1)
def test_a_run_cut_amid_an_evaluation_resumes_as_if_uninterrupted(train, whole, tmp_path, evaluation):
    assert train(tmp_path / "cut", evaluation=evaluation) is None
    assert same(train(tmp_path / "cut"), whole())


VIEWS = {"batch_tokens": 70, "crop": [0.5, 1.0], "repetition": 0.3}
OTHERS = {  # settings, and the optimiser steps after which the run is cut
    "an odd number of batches, two a step": ({"accumulate_grad_batches": 2}, [3, 4]),
    "chunks": ({"chunk": 4}, [8]),
    "low-rank adapters": ({"lora": LoRA(r=2, dropout=0.1)}, [8]),
    "no lines but the last": ({"log_every_n_steps": 0}, [8]),
    "an end amid an epoch": ({"max_epochs": -1, "max_steps": 10}, [10]),
    "budgets of tokens, views that differ": ({"views": VIEWS, "max_epochs": -1, "max_steps": 15}, [13]),
}


@pytest.mark.parametrize(("name", "steps"), [(name, n) for name, (_, cuts) in OTHERS.items() for n in cuts])
@pytest.mark.slow
def test_and_so_it_does_with_other_settings(train, whole, tmp_path, name, steps):
    settings = OTHERS[name][0]
    assert train(tmp_path / "cut", "on_train_batch_end", steps, **settings) is None
    assert same(train(tmp_path / "cut", **settings), whole(**settings))


def test_what_is_forced_on_a_run_is_what_it_goes_on_with(train, tmp_path):
    assert train(tmp_path / "cut", "on_train_batch_start", 8) is None
    other = partial(adamw, lr=3e-3, weight_decay=0.5, warmup_steps=2)
    state, _ = train(tmp_path / "cut", optimizer=other)[1]
    assert [group["initial_lr"] for group in state["param_groups"]] == [3e-3] * 2
    assert [group["weight_decay"] for group in state["param_groups"]] == [0.5, 0]
    with (tmp_path / "cut" / "metrics.csv").open() as file:
        logged = {int(row["step"]): row["train/lr"] for row in csv.DictReader(file) if row["train/lr"]}
    for step, was, base in ((8, 7, 1e-2), (10, 9, 3e-3)):  # of fourteen, two of which warm up
        assert float(logged[step]) == pytest.approx(base * (14 - was) / 12)


# the last hook comes between the two batches of the third step
SIGNALS = [(number, "on_train_batch_end", 2) for number in checkpoints.ASKING]
SIGNALS += [(signal.SIGTERM, "on_train_batch_start", 3)]


@pytest.mark.parametrize(("number", "hook", "step"), SIGNALS)
@pytest.mark.slow(but=2)
def test_a_signal_ends_a_run_after_the_step_with_a_checkpoint(train, whole, tmp_path, number, hook, step):
    two = {"accumulate_grad_batches": 2}
    with pytest.raises(SystemExit) as exit:
        train(tmp_path / "cut", hook, 2, number=number, seconds=1e6, **two)
    assert exit.value.code == 128 + number
    assert last_step(tmp_path / "cut" / "checkpoints") == step
    assert same(train(tmp_path / "cut", **two), whole(**two))


def test_a_run_killed_after_a_better_checkpoint_than_it_resumes_from_ends_the_same(train, whole, tmp_path):
    """Without checkpoints: best/ is of a step that is not known when it resumes."""
    assert train(tmp_path / "cut", "on_train_batch_end", 9, seconds=1e6) is None
    assert last_step(tmp_path / "cut" / "checkpoints") == 0
    assert (tmp_path / "cut" / "best").is_dir()
    assert same(train(tmp_path / "cut"), whole())


def test_best_is_what_it_says_where_a_resumed_run_does_not_repeat_what_was_lost(train, tmp_path):
    """As on a GPU, or by --force with another rate: nothing later is better than what is there."""
    assert train(tmp_path / "cut", "on_train_batch_start", 3) is None
    assert train(tmp_path / "cut", "on_train_batch_end", 9, seconds=1e6) is None
    left = checkpoint.evaluation(tmp_path / "cut" / "best")
    best, summary = train(tmp_path / "cut", optimizer=still)[2::2]
    assert left[0] > 3 and json.loads(best["/best/whitenedcse.json"])["evaluated"] == left
    assert (summary["best_step"], summary["values_best"]) == tuple(left)


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_fit_end"])
@pytest.mark.slow(but=1)
def test_a_run_that_patience_ended_trains_no_further(train, whole, tmp_path, hook):
    settings = {"patience": 1, "optimizer": still}  # nothing moves: the first evaluation stays the best
    assert whole(**settings)[-1]["last_step"] == 6
    assert train(tmp_path / "cut", hook, 6, **settings) is None
    assert same(train(tmp_path / "cut", **settings), whole(**settings))


def few(folder, steps):
    """The words for so many steps on 64 sentences and for 32 pairs, which are written to a folder."""
    rows = [f"{a} {b}" for a in SENTENCES for b in SENTENCES]
    (folder / "c.txt").write_text("\n".join(rows))
    pairs = [f"{i % 6}\t{a}\t{b}\n" for i, (a, b) in enumerate(zip(rows[::2], rows[1::2], strict=True))]
    (folder / "p.tsv").write_text("score\tsentence1\tsentence2\n" + "".join(pairs))
    words = ["data=file", f"data.corpus={folder / 'c.txt'}", "data.batch_size=16", "checkpoint_every=0"]
    words += [f"monitor.dev={folder / 'p.tsv'}", f"tasks.names=[{folder / 'p.tsv'}]"]
    words += [f"trainer.max_steps={steps}", "trainer.max_epochs=99", f"monitor.every={steps // 2}"]
    return [*TINY, *words]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Where all these runs lie; with a `scontrol` that writes down what it was asked."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "bin").mkdir()
    (folder / "bin" / "scontrol").write_text('#!/bin/sh\necho "$@" >> "$ASKED"\n')
    (folder / "bin" / "scontrol").chmod(0o755)
    return folder


@contextmanager
def started(home, *command, **environment):
    """A process of a script, ended in any case; its words go to `home`/said."""
    own = {"ASKED": home / "asked", "PATH": f"{home / 'bin'}:{os.environ['PATH']}"} | environment
    said = home / "said"
    said.unlink(missing_ok=True)
    process = begun(*command, cwd=home, said=[said, said], **own)
    try:
        yield process
    finally:
        process.kill()
        process.wait(60)


def finished(home, *command, **environment):
    """The last line of a process that ends well."""
    with started(home, *command, **environment) as process:
        assert process.wait(300) == 0, (home / "said").read_text()
    return (home / "said").read_text().splitlines()[-1]


@contextmanager
def amid(home, name, *arguments, **environment):
    """A run as soon as this life of it has written a checkpoint."""
    folder = home / "outputs" / name / "checkpoints"
    before = last_step(folder)
    words = [str(ROOT / "train.py"), *arguments, f"run={name}"]
    with started(home, *words, **environment) as process:
        until(lambda: last_step(folder) > before or process.poll() is not None, 600)
        assert process.poll() is None, (home / "said").read_text()
        yield process


def last_step(folder):
    return max(map(step_of, folder.glob("step-*.ckpt")), default=0)


def outcome(run):
    """All that a run leaves and that must not hang on how often it was cut."""
    scores = json.loads((run / "scores.json").read_text())
    assert scores.pop("model") == str(run)
    files = [run / "best" / "model.safetensors", run / "best" / "head.safetensors"]
    return [lines(run), scores, *(file.read_bytes() for file in files)]


@pytest.mark.slow
def test_a_run_that_is_killed_stopped_and_forced_on_ends_with_the_bits_of_one_that_is_not(
    home, refusal, monkeypatch
):
    run = home / "outputs" / "cut"
    monkeypatch.chdir(home)
    monkeypatch.setenv("WHITENEDCSE_CACHE", str(home / "cache"))
    monkeypatch.setattr(files, "SECONDS", 0.1)
    words = few(home, 160)

    def refused(*arguments):
        monkeypatch.setenv("HYDRA_FULL_ERROR", "0")  # a start sets it
        return refusal("train", *words, "run=cut", *arguments)

    assert finished(home, str(ROOT / "train.py"), *words, "run=whole") == f"run: {home / 'outputs' / 'whole'}"

    with amid(home, "cut", *words) as process:
        process.send_signal(signal.SIGSTOP)  # it lives, and the directory is its own
        line = refused()
        assert line.startswith(
            f"error: {run} is being written by another process; wait, or choose another name"
        )
        process.kill()
        assert process.wait(60) == -signal.SIGKILL
    line = refused("monitor.patience=99")
    assert "holds another run: monitor.patience=99 (it began with null); choose another name" in line

    stops = {signal.SIGTERM: [], signal.SIGINT: ["monitor.patience=99", "--force"]}
    stops[signal.SIGUSR1] = ["monitor.patience=99"]
    for number, arguments in stops.items():
        before = last_step(run / "checkpoints")
        with amid(home, "cut", *words, *arguments, SLURM_JOB_ID="7") as process:
            process.send_signal(number)
            assert process.wait(60) == 128 + number
        said = (home / "said").read_text()
        step = last_step(run / "checkpoints")
        assert f"{run} resumes after step {before}\n" in said
        assert f"{run} stopped after step {step}; the same command with run=cut resumes it" in said
        assert (run / "metrics.csv").read_text().splitlines()[-1].startswith(f"{step},")
        assert not (run / "scores.json").exists()
    assert (home / "asked").read_text() == "requeue 7\n"  # for SIGUSR1 alone

    finished(home, str(ROOT / "train.py"), *words, "run=cut", "monitor.patience=99")
    assert outcome(run) == outcome(home / "outputs" / "whole")
    assert [path.name for path in run.glob("*.new")] == []
    again = json.loads((run / "versions.json").read_text())["resumed"]
    assert len(again) == 4 and all(once["command"].startswith("python train.py ") for once in again)


@pytest.mark.parametrize(
    ("step", "cut", "settings"),
    [
        (1, {}, {"max_steps": 2, "log_every_n_steps": 7}),
        (0, {"hook": "on_train_batch_start", "steps": 2}, {}),
    ],
)
def test_a_loss_that_is_no_number_is_neither_evaluated_nor_kept(train, tmp_path, step, cut, settings):
    """At the end, and where a number is logged: the cut before the third step is never reached."""
    settings = {"max_epochs": -1, "max_steps": 9, "optimizer": wild} | settings
    left = f"the checkpoint of step {step} stays" if step else "there is no checkpoint before it"
    with pytest.raises(ValueError, match=f"is not finite (at|after) step 2; {left}. A lower optim.lr"):
        train(tmp_path / "run", **cut, seconds=0.0 if step else 1e6, **settings)
    assert last_step(tmp_path / "run" / "checkpoints") == step
    assert not (tmp_path / "run" / "best").exists()

"""Starting a script."""

import ctypes
import os
import socket
import subprocess
import sys
import warnings
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import lightning
import pytest
import torch.distributed
from encoders import COMMIT
from hydra import compose, initialize_config_dir
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import OmegaConf

from whitenedcse.app import cli, identity, launch
from whitenedcse.app.config import CONF
from whitenedcse.files import draft_of
from whitenedcse.model.encoder import Encoder
from whitenedcse.run import Run
from whitenedcse.training.loggers import Metrics

JOB = """
from whitenedcse.app import launch

kept, seen = [], []

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

def script():
    blocks = [bytearray(b"x") * 100_000 for _ in range(3000)]  # below what malloc maps by itself
    kept.append(blocks.pop())  # on top of the heap, so that to free alone gives nothing back
    blocks.clear()
    seen.append(resident())
    if FAILS:
        raise KeyError

before = resident()
try:
    launch.job(script)()
except KeyError:
    pass
print(seen[0] - before, resident() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
@pytest.mark.parametrize("fails", [False, True])
def test_what_a_job_frees_is_free_for_the_next_one(fails):
    if not hasattr(ctypes.CDLL(None), "malloc_trim"):
        pytest.skip("this C library has no malloc_trim")
    code = JOB.replace("FAILS", str(fails))
    said = subprocess.check_output([sys.executable, "-c", code], text=True)  # a heap without holes
    at_end, afterwards = map(int, said.split())
    assert at_end > 200e6 and afterwards < 100e6


@pytest.mark.parametrize(
    ("mode", "path", "said"),
    [
        (RunMode.RUN, "outputs/a/b", "the same command with run=a/b"),
        (RunMode.MULTIRUN, "outputs/a/0", "the same command with run=a"),
        (RunMode.RUN, "/x/y", "the same command with hydra.run.dir=/x/y"),
        (RunMode.MULTIRUN, "/x/y/0", "the same command with hydra.sweep.dir=/x/y"),
        (None, "/x/y", "the same call with output='/x/y'"),
    ],
)
def test_what_resumes_a_run_is_said_with_its_name(mode, path, said, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(HydraConfig.instance(), "cfg", OmegaConf.create({"hydra": {"mode": mode}}))
    assert launch.again(Run(tmp_path / path)) == said


@pytest.mark.parametrize(("mode", "given"), [(RunMode.RUN, 0), (RunMode.MULTIRUN, 1)])
def test_memory_is_given_back_only_where_another_job_may_follow(mode, given, monkeypatch):
    seen = []
    monkeypatch.setattr(launch, "give_back", lambda: seen.append(1))
    monkeypatch.setattr(HydraConfig.instance(), "cfg", OmegaConf.create({"hydra": {"mode": mode}}))
    launch.job(lambda: None)()
    assert len(seen) == given


@pytest.mark.parametrize(
    "error",
    [
        TypeError(
            "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64."
        ),
        NotImplementedError("The operator 'aten::x' is not currently implemented for the MPS device."),
        RuntimeError("Placeholder storage has not been allocated on MPS device!"),
    ],
)
def test_what_an_apple_gpu_lacks_is_one_line_with_the_way_out(error, capsys):
    def script():
        raise error

    with pytest.raises(SystemExit) as ended:
        launch.job(script)()
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.count("\n") == 1
    assert said.startswith("error: this does not work on an Apple GPU (") and str(error) in said
    assert "use trainer.accelerator=cpu" in said


def test_a_port_that_another_program_uses_is_one_line(capsys):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]

        def script():
            torch.distributed.TCPStore("127.0.0.1", port, is_master=True)

        with pytest.raises(SystemExit) as ended:
            launch.job(script)()
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.count("\n") == 1 and str(port) in said
    assert said.startswith("error: the ranks' connection at MASTER_ADDR and MASTER_PORT failed: ")


def test_other_errors_keep_their_traceback():
    def script():
        raise TypeError("COMPS of another kind")

    with pytest.raises(TypeError, match="COMPS"):
        launch.job(script)()


def test_an_encoder_is_known_by_its_commit_or_its_files_and_one_of_random_weights_not_at_all(bert, tmp_path):
    source = tmp_path / "snapshots" / COMMIT
    bert.backbone.save_pretrained(source)
    encoder = Encoder(bert.backbone, bert.tokenizer, source)

    def known(**settings):
        config = OmegaConf.create({"encoder": settings, "tasks": {"names": ["a", "b"]}})
        return identity.content(config, encoder, {}, [[], [1]], [2])["content"]

    texts = {"monitor.dev": [2], "tasks.a": [], "tasks.b": [1]}
    texts = {name: identity.of_texts(task) for name, task in texts.items()}
    assert known() == texts
    assert known(path="someone/encoder") == texts | {"encoder.path": COMMIT}
    assert known(path=str(source)) == texts | {"encoder.path": identity.of_weights(source)}


def test_all_that_a_run_leaves_is_on_the_disk_before_the_scores_have_their_name(tmp_path, monkeypatch):
    told, sync, replace = [], os.fsync, os.replace

    def fsync(handle):
        told.append(("sync", Path(os.readlink(f"/proc/self/fd/{handle}")).name))
        sync(handle)

    def replaced(source, target):
        told.append(("name", Path(target).name))
        replace(source, target)

    run = Run(tmp_path / "run")
    run.start("monitor: {dev: STS-B/dev}\n")
    metrics = Metrics(run.metrics, None)
    metrics.log_metrics({"x": 1.0}, step=1)
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replaced)
    monkeypatch.setattr("whitenedcse.report.results.training_grid", lambda dev: "")
    launch.finish(run, {"best": 1.0}, [metrics], None)
    whole = [("sync", draft_of(run.path / "digests.json").name), ("name", "digests.json"), ("sync", "run")]
    scores = [("sync", draft_of(run.path / "scores.json").name), ("name", "scores.json"), ("sync", "run")]
    assert told == [("sync", "metrics.csv"), *whole, *scores]
    assert Run(run.path).scores == {"dev": {"best": 1.0}}


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("run=a --config-dir d=1 loss=own", "--config-dir d=1 run=a loss=own"),
        ("--config-dir=d a=1 -m b=2 +c.d=3 ~e", "--config-dir=d -m a=1 b=2 +c.d=3 ~e"),
        ("-cd d=1 seed=1,2 -m", "-cd d=1 -m seed=1,2"),
        ("-c job a=1 --resolve", "-c job --resolve a=1"),
        ("corpus.txt a=1 --epochs 3", "corpus.txt --epochs 3 a=1"),
        ("", ""),
    ],
)
def test_settings_may_stand_before_and_behind_an_option(words, wanted):
    assert launch.in_one_place(["train.py", *words.split()]) == ["train.py", *wanted.split()]
    if not wanted.startswith("corpus"):
        get_args_parser().parse_args(wanted.split())


@pytest.mark.parametrize(
    ("words", "names"), [([], ["quickstart/test"]), (["data=file", "data.corpus=x.txt"], [])]
)
def test_all_settings_can_be_resolved(words, names):
    """As train.py --cfg job --resolve does."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("train", words)
    OmegaConf.resolve(config)
    assert config.tasks.names == names


def test_a_run_whose_output_nobody_reads_says_so(monkeypatch):
    def script():
        raise BrokenPipeError

    monkeypatch.setattr(launch.terminal, "unread", lambda: True)
    monkeypatch.setattr(launch, "give_back", lambda: None)
    with pytest.raises(SystemExit) as end:
        launch.job(script)()
    assert end.value.code == launch.UNREAD


class Unfinished:
    """A file of a library that complains where its writing is broken off, as torch.save's does."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        raise OSError("unexpected position")


@pytest.mark.parametrize(("end", "code"), [(SystemExit(143), 143), (KeyboardInterrupt(), 130)])
def test_an_error_raised_over_the_exit_after_a_signal_is_not_said(end, code, capsys, monkeypatch):
    with pytest.raises(SystemExit) as ended, launch.explained(), Unfinished():
        raise end
    assert ended.value.code == code

    @contextmanager
    def broken_off():
        with Unfinished():
            raise end
        yield

    monkeypatch.setattr(cli.ranks, "ending_when_asked", broken_off)
    assert cli.main(["report", "--list"]) == code and capsys.readouterr().err == ""


def test_an_error_that_is_no_end_is_said(capsys):
    with pytest.raises(SystemExit) as ended, launch.explained():
        try:
            sys.exit(2)  # of no signal
        except SystemExit:
            raise OSError("disk") from None
    assert ended.value.code == 2 and "error: disk" in capsys.readouterr().err


@pytest.mark.parametrize(
    "dev, tests",
    [("STS-B/dev", ""), ("own.csv", " 'tasks.names=[TESTS.csv]'"), (None, " 'tasks.names=[TESTS.csv]'")],
)
def test_a_run_without_tests_proposes_those_that_fit_its_dev_set(dev, tests, capsys):
    run = SimpleNamespace(
        settings={"monitor": {"dev": dev}}, path=Path("outputs/a b"), end=lambda *_: None, best="best"
    )
    values = {"values_before": {}, "values_best": {}, "before": 1.0, "best": 2.0, "best_step": 1, "n": 9}
    launch.finish(run, values, [], None)
    assert f"   whitenedcse evaluate model='outputs/a b'{tests}   " in capsys.readouterr().out


@pytest.mark.parametrize("precision", ["bf16", "16", "32"])
def test_no_warning_of_lightning_about_the_short_name_of_a_precision(precision):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        launch.quiet()
        lightning.Trainer(precision=precision, accelerator="cpu", devices=1, logger=False)
    assert [str(w.message) for w in caught if "historical" in str(w.message)] == []

"""What train.py notes of a run, does at its end and says."""

import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from encoders import COMMIT
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import OmegaConf

from whitenedcse.app import train
from whitenedcse.evaluation.tasks import Labelled, Subset
from whitenedcse.model.encoder import Encoder
from whitenedcse.run import Run
from whitenedcse.training.loggers import Metrics


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """One run, started in Python."""
    monkeypatch.setattr(HydraConfig.instance(), "cfg", OmegaConf.create({"hydra": {"mode": None}}))


def test_an_encoder_is_known_by_its_commit_or_its_files_and_one_of_random_weights_not_at_all(bert, tmp_path):
    source = tmp_path / "snapshots" / COMMIT
    bert.backbone.save_pretrained(source)
    module = SimpleNamespace(embedder=SimpleNamespace(encoder=Encoder(bert.backbone, bert.tokenizer, source)))

    def known(**settings):
        config = OmegaConf.create({"encoder": settings, "tasks": {"names": ["a", "b"]}})
        found = train.content(config, module, [[], [1]], [2])
        assert found["processes"] == 1
        return found["content"]

    texts = {"monitor.dev": [2], "tasks.a": [], "tasks.b": [1]}
    texts = {name: train.digest_of_texts(task) for name, task in texts.items()}
    assert known() == texts
    assert known(path="someone/encoder") == texts | {"encoder.path": COMMIT}
    assert known(path=str(source)) == texts | {"encoder.path": train.digest_of_weights(source)}
    module.embedder.encoder.source = None  # of a function of one's own
    assert known(path=str(source)) == texts


def test_texts_scores_weights_and_configuration_have_a_part_in_the_digests(tmp_path):
    pairs = [Subset("a", ["x", "y"], ["z", "w"], np.array([1.0, 2.0]))]
    labelled = Labelled("b", (["x", "y"],), np.array([0, 1]), ["no", "yes"], np.array(["train", "test"]))
    tasks = [pairs, [pairs[0]._replace(left=["x", "Y"])], [pairs[0]._replace(right=["w", "z"])]]
    tasks += [[pairs[0]._replace(gold=np.array([1.0, 2.5]))], pairs * 2, labelled]
    tasks += [labelled._replace(labels=np.array([1, 1])), labelled._replace(split=None)]
    assert len({train.digest_of_texts(task) for task in tasks}) == len(tasks)
    again = [pairs[0]._replace(gold=np.array([1.0, 2.0]))]
    assert train.digest_of_texts(pairs) == train.digest_of_texts(again)
    files = {"config.json": b"{}", "model.safetensors": b"w", "README.md": b"a text", "vocab.txt": b"v"}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    first = train.digest_of_weights(tmp_path)
    for name, counts in (("config.json", True), ("model.safetensors", True), ("README.md", False)):
        (tmp_path / name).write_bytes(b"new")
        assert (train.digest_of_weights(tmp_path) != first) == counts
        (tmp_path / name).write_bytes(files[name])
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    assert train.digest_of_weights(tmp_path) != first


def config(dev="STS-B/dev"):
    return OmegaConf.create({"tasks": {"names": []}, "monitor": {"dev": dev}, "embedding": "encoder"})


def test_all_that_a_run_leaves_is_on_the_disk_before_the_scores_have_their_name(tmp_path, monkeypatch, disk):
    run = Run(tmp_path / "run")
    run.start("monitor: {dev: STS-B/dev}\n")
    metrics = Metrics(run.metrics, None)
    metrics.log_metrics({"x": 1.0}, step=1)
    disk.clear()
    monkeypatch.setattr("whitenedcse.report.tables.training_grid", lambda dev: "")
    train.ended(config(), run, {"best": 1.0}, [metrics])
    wanted = [str(run.metrics), f"{run.path}/draft", "scores.json named", str(run.path)]
    assert disk == wanted and Run(run.path).scores == {"dev": {"best": 1.0}}


def test_a_run_without_tests_proposes_those_that_fit_its_dev_set(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    values = {"values_before": {}, "values_best": {}, "before": 1.0, "best": 2.0, "best_step": 1, "n": 9}
    own = ["tasks.names=[TESTS.csv]"]
    for dev, tests in (("STS-B/dev", []), ("own.csv", own), (None, own)):
        run = SimpleNamespace(path=Path("outputs/a b"), end=lambda *_: None, best="best")
        train.ended(config(dev), run, values, [])
        (words,) = re.findall("   (whitenedcse evaluate .*?)   ", capsys.readouterr().out)
        assert shlex.split(words) == ["whitenedcse", "evaluate", "model='outputs/a b'", *tests]


def test_ranks_are_told_of_a_folder_by_any_name(monkeypatch):
    hydras = {"mode": RunMode.RUN, "overrides": {"task": []}}
    monkeypatch.setattr(HydraConfig.instance(), "cfg", OmegaConf.create({"hydra": hydras}))
    monkeypatch.setattr(train, "again", str)
    told = []
    monkeypatch.setattr(train, "launched", lambda words, *_: told.append(words[-1]))
    data = {"_target_": "whitenedcse.data.datamodule.SentenceData", "corpus": "x.txt", "batch_size": 64}
    cfg = OmegaConf.create({"data": data})
    for name in ("/x/plain", "/Dropbox (Personal)/x", "/home/müller/a,b=c/it's [x]"):
        assert train.several(cfg, Run(name), 2)
        assert OverridesParser.create().parse_override(told[-1]).value() == name
    with pytest.raises(ValueError, match="batch_size=64 cannot be shared equally by 3 .* trainer.devices=2"):
        train.several(cfg, Run("/x/y"), 3)
    assert len(told) == 3


def test_ranks_share_the_cores_unless_told_otherwise(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    for cores, given, each in ((8, None, 4), (1, None, 1), (9, None, 4), (8, "3", 8)):
        set_to = [cores]
        monkeypatch.setattr(torch, "get_num_threads", lambda cores=cores: cores)
        monkeypatch.setattr(torch, "set_num_threads", set_to.append)
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        if given:
            monkeypatch.setenv("OMP_NUM_THREADS", given)
        train.share_cores()
        assert set_to[-1] == each

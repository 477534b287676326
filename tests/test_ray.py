"""`encode --engine ray`: the bytes of one process, whichever actors are killed; needs the extra `ray`."""

import importlib.util
import os
import signal
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from encoders import embedder_of
from test_bulk import contents, corpus_of, job_of, many

from whitenedcse.app import cli
from whitenedcse.model import checkpoint
from whitenedcse.model.embedder import Embedder
from whitenedcse.serving.bulk import encoded
from whitenedcse.serving.layouts import Form

FORM = Form(shard=100)
needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="pip install ray")


def test_without_ray_one_line_says_how_to_install_it(bert, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    checkpoint.save(embedder_of(bert).eval(), tmp_path / "best")
    corpus = corpus_of(many(3), tmp_path)
    words = ["encode", str(tmp_path / "best"), corpus.path, str(tmp_path / "out"), "--engine", "ray"]
    assert cli.main(words) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "pip install 'whitenedcse[ray]'" in said


def actors():
    """The processes that are actors of Ray as this process started it."""
    psutil = pytest.importorskip("psutil")
    here = psutil.Process().children(recursive=True)
    return [process.pid for process in here if "".join(process.cmdline()).startswith("ray::Actor")]


@needs_ray
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_actors_give_the_bytes_of_one_process_though_one_of_them_is_killed(bert, tmp_path):
    checkpoint.save(embedder_of(bert, kind="mean").eval(), tmp_path / "best")
    corpus, out, killed = corpus_of(many(12_050), tmp_path), tmp_path / "out", []
    job = job_of(None, corpus, out, opened=partial(Embedder.load, str(tmp_path / "best")), form=FORM)

    def kill_one():
        while len(list(out.glob("shard-*.npy"))) < 4:
            time.sleep(0.001)
        killed.append(actors()[0])
        os.kill(killed[0], signal.SIGKILL)

    killer = threading.Thread(target=kill_one)
    killer.start()
    assert encoded(job, 2, "ray") == 12_050
    killer.join()
    assert killed
    encoded(whole := job_of(None, corpus, tmp_path / "whole", opened=job.opened, form=FORM))
    assert contents(out) == contents(whole.out)
    (out / "shard-00003.npy").unlink()
    assert encoded(job, 1, "ray") == 100 and contents(out) == contents(whole.out)


@needs_ray
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_command_runs_on_the_machines_of_a_cluster(bert, tmp_path, monkeypatch, capsys):
    """Two nodes, both on this machine, that are found by RAY_ADDRESS."""
    from ray.cluster_utils import Cluster

    source, out = str(tmp_path / "best"), tmp_path / "out"
    checkpoint.save(embedder_of(bert, kind="mean").eval(), Path(source))
    corpus = corpus_of(many(600), tmp_path)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        cluster.add_node(num_cpus=1)
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        words = ["encode", source, corpus.path, str(out), "--shard", "100", "--engine", "ray"]
        assert cli.main(words) == 0
        assert capsys.readouterr().out.endswith(f"600 rows of width 16: {out}\n")
    finally:
        cluster.shutdown()
    job = job_of(None, corpus, tmp_path / "whole", opened=partial(Embedder.load, source), source=source)
    encoded(job := replace(job, form=FORM))
    assert contents(out) == contents(job.out)

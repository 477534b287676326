"""A directory belongs to one run with its settings, and to one process at a time."""

import importlib
import importlib.metadata
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock, Timeout

from whitenedcse import compute, files
from whitenedcse import run as run_module
from whitenedcse.app import identity
from whitenedcse.evaluation.sts import Subset
from whitenedcse.evaluation.transfer import Labelled
from whitenedcse.run import Run

CONFIG = "run: a\nseed: 1\ndata: {corpus: here.txt, columns: []}\ntrainer: {devices: 1, max_steps: 9}\n"
EXACT = {"corpus": "c0ffee", "tokenizer": "beef", "processes": 1}


@pytest.fixture
def run(tmp_path):
    """A run that began."""
    began = Run(tmp_path / "run")
    began.start(CONFIG, seed=1, **EXACT)
    return began


@pytest.fixture(autouse=True)
def held(monkeypatch):
    """No lock outlives a test."""
    monkeypatch.setattr(run_module, "held", {})
    monkeypatch.setattr(files, "SECONDS", 0.2)
    yield run_module.held
    for lock in run_module.held.values():
        lock.release()


def test_a_directory_is_claimed_by_one_process(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    with FileLock(run / ".lock"):
        with pytest.raises(ValueError, match=rf"{run} is being written by another process; .*run="):
            Run(run).claim()
    Run(run).claim()
    with pytest.raises(Timeout):
        FileLock(run / ".lock").acquire(timeout=0)


def test_a_process_that_was_killed_holds_nothing(tmp_path):
    code = f"""
import os, signal
from filelock import FileLock
FileLock({str(tmp_path / ".lock")!r}).acquire()
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == -9
    Run(tmp_path).claim()


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (CONFIG.replace("seed: 1", "seed: 2"), "seed=2 (it began with 1)"),
        (CONFIG.replace("max_steps: 9", "max_steps: 10"), "trainer.max_steps=10 (it began with 9)"),
        (CONFIG.replace("seed: 1\n", ""), "seed=null (it began with 1)"),
        (CONFIG + "views: 3\n", "views=3 (it began with null)"),
        (CONFIG.replace("[]", "[a, b]"), 'data.columns=["a", "b"] (it began with [])'),
    ],
)
def test_another_run_is_refused_and_the_difference_named(run, changed, words):
    with pytest.raises(ValueError) as refused:
        run.refuse_other(changed, EXACT)
    assert str(refused.value).startswith(
        f"{run.path} holds another run: {words}; choose another name with run="
    )
    assert "--force" in str(refused.value)
    run.refuse_other(changed, EXACT, force=True)


def test_the_seed_of_the_data_is_named_where_it_does_not_follow_from_the_run_s():
    def named(began, now):
        of = [{"seed": seed, "data": {"seed": data}} for seed, data in (began, now)]
        return run_module.differences(of[0], {}, of[1], {})

    assert named((1, 1), (2, 2)) == ["seed=2 (it began with 1)"]
    assert named((1, 1), (1, 2)) == ["data.seed=2 (it began with 1)"]
    assert len(named((1, 1), (2, 1))) == 1 and len(named((1, 3), (2, 2))) == 2


def test_of_a_finished_job_of_a_sweep_the_report_of_both_is_named(run, monkeypatch):
    run.end({"dev": {}})
    (run.path.parent / "multirun.yaml").touch()
    monkeypatch.chdir(run.path.parent.parent)
    together = (
        f"; whitenedcse report {run.path.parent.name} outputs/NAME --out DIR shows the jobs of both in one"
    )
    with pytest.raises(ValueError, match=f"{together} table$"):
        run.refuse_other(CONFIG.replace("seed: 1", "seed: 2"), EXACT)


@pytest.mark.parametrize(("name", "value"), [("corpus", "new"), ("tokenizer", "new"), ("processes", 2)])
def test_so_are_other_data_another_tokenizer_and_another_number_of_processes(run, name, value):
    with pytest.raises(ValueError, match=rf"{name}={value} \(it began with {EXACT[name]}\)"):
        run.refuse_other(CONFIG, EXACT | {name: value})


CONTENT = {"monitor.dev": "d0", "tasks.mine.tsv": "e1", "encoder.path": "f2"}


@pytest.mark.parametrize("name", CONTENT)
def test_so_is_other_content_of_what_the_settings_name(tmp_path, name):
    run = Run(tmp_path / "run")
    run.start(CONFIG, **EXACT, content=CONTENT)
    run.refuse_other(CONFIG, EXACT | {"content": CONTENT})
    other = EXACT | {"content": CONTENT | {name: "new"}}
    words = f"content.{name}=new (it began with {CONTENT[name]})"
    with pytest.raises(ValueError, match=re.escape(f"{run.path} holds another run: {words}; choose")):
        run.refuse_other(CONFIG, other)
    assert run.refuse_other(CONFIG, other, force=True) == [words]
    run.resume(CONFIG, other, 1)
    assert run.refuse_other(CONFIG, other) == []


def test_what_an_older_run_did_not_note_refuses_nothing(run):
    assert run.refuse_other(CONFIG, EXACT | {"content": CONTENT, "more": 1}) == []


def test_adapters_of_rank_0_are_none_as_in_runs_from_before_there_were_any(run):
    lora = "encoder: {lora: {_target_: LoRA, r: R, alpha: 16.0}}\n"
    assert run.refuse_other(CONFIG + lora.replace("R", "0"), EXACT) == []
    with pytest.raises(ValueError, match="encoder.lora.r=2 .it began with null."):
        run.refuse_other(CONFIG + lora.replace("R", "2"), EXACT)


def test_texts_scores_weights_and_configuration_have_a_part_in_the_digests(tmp_path):
    pairs = [Subset("a", ["x", "y"], ["z", "w"], np.array([1.0, 2.0]))]
    labelled = Labelled("b", (["x", "y"],), np.array([0, 1]), ["no", "yes"], np.array(["train", "test"]))
    tasks = [pairs, [pairs[0]._replace(left=["x", "Y"])], [pairs[0]._replace(right=["w", "z"])]]
    tasks += [[pairs[0]._replace(gold=np.array([1.0, 2.5]))], pairs * 2, labelled]
    tasks += [labelled._replace(labels=np.array([1, 1])), labelled._replace(split=None)]
    assert len({identity.of_texts(task) for task in tasks}) == len(tasks)
    assert identity.of_texts(pairs) == identity.of_texts([pairs[0]._replace(gold=np.array([1.0, 2.0]))])
    files = {"config.json": b"{}", "model.safetensors": b"w", "README.md": b"a text", "vocab.txt": b"v"}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    first = identity.of_weights(tmp_path)
    for name, counts in (("config.json", True), ("model.safetensors", True), ("README.md", False)):
        (tmp_path / name).write_bytes(b"new")
        assert (identity.of_weights(tmp_path) != first) == counts
        (tmp_path / name).write_bytes(files[name])
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    assert identity.of_weights(tmp_path) != first


def test_where_data_lie_and_where_it_runs_may_change(run):
    free = CONFIG.replace("here", "elsewhere").replace("run: a", "run: b").replace("devices: 1", "devices: 2")
    more = "checkpoint_every: 3\nlogger: {_target_: x, project: y}\n"
    run.refuse_other(free + more, EXACT)


def test_of_many_differences_some_are_said(run):
    with pytest.raises(ValueError, match=r"a=0 .*, and 2 more; choose another name"):
        run.refuse_other(CONFIG + "".join(f"{name}: 0\n" for name in "abcdefgh"), {})


def test_all_differences_are_said_at_once(run):
    changed = CONFIG.replace("seed: 1", "seed: 2").replace("max_steps: 9", "max_steps: 10")
    with pytest.raises(ValueError, match=r"seed=2 .*, trainer.max_steps=10 "):
        run.refuse_other(changed, EXACT)


def test_an_empty_directory_refuses_nothing(tmp_path):
    Run(tmp_path).refuse_other(CONFIG, EXACT)


def test_a_run_is_begun_once_and_its_files_are_there_together(run):
    assert (run.path / "config.yaml").read_text() == CONFIG
    facts = json.loads((run.path / "versions.json").read_text())
    assert facts.items() >= (EXACT | {"seed": 1}).items()
    assert facts["packages"]["torch"] == importlib.metadata.version("torch")
    with pytest.raises(ValueError, match="already holds a run; choose another name with run=NAME"):
        run.start(CONFIG.replace("seed: 1", "seed: 2"))
    run.start(CONFIG)  # of an evaluation that was cut short: it begins again
    run.end({})
    with pytest.raises(ValueError, match="already holds a run; choose another name with run=NAME"):
        run.start(CONFIG)


def test_a_kill_while_it_begins_leaves_no_run(tmp_path, monkeypatch):
    class Killed(BaseException):
        pass

    def killed(*_):
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(run_module, "writing", killed)  # after versions.json
        with pytest.raises(Killed):
            Run(tmp_path).start(CONFIG)
    Run(tmp_path).refuse_other(CONFIG.replace("1", "2"), {})
    Run(tmp_path).start(CONFIG, seed=1)
    assert json.loads((tmp_path / "versions.json").read_text())["seed"] == 1


def test_what_a_refused_job_wrote_is_discarded(tmp_path):
    run = Run(tmp_path / "run").asked()
    run.start(CONFIG)
    (run.path / "train.log").touch()
    run.metrics.write_text("step,dev/spearman\n0,55.0\n")  # of the untouched encoder
    run.discard()
    assert not run.path.exists()
    run.asked().start(CONFIG)  # the corrected command
    run.release()


@pytest.mark.parametrize("made", ["scores.json", "checkpoints/step-1.ckpt", "best/config", "metrics.csv"])
def test_a_run_that_made_a_step_is_not_discarded(tmp_path, made):
    run = Run(tmp_path / "run").asked()
    run.start(CONFIG)
    (run.path / made).parent.mkdir(exist_ok=True)
    (run.path / made).write_text("step,train/loss\n1,0.5\n" if made == "metrics.csv" else "{}")
    run.discard()
    assert (run.path / made).exists() and run.config.exists()


def test_a_run_of_another_process_is_not_discarded(tmp_path, run):
    run.release()
    Run(run.path).asked().discard()  # it was here before
    assert run.began
    other = Run(tmp_path / "other").asked()
    other.start(CONFIG)
    other.release()
    with FileLock(other.path / ".lock"):
        other.discard()  # which another process writes by now
    assert other.began


def test_a_run_is_a_path(tmp_path):
    assert Path(Run(tmp_path / "run")) == tmp_path / "run"


def test_a_commit_is_marked_where_the_code_or_the_settings_differ(tmp_path, monkeypatch):
    monkeypatch.setattr(compute, "__file__", str(tmp_path / "package/compute.py"))
    for folder in ("package", "conf"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "file").touch()
    assert compute.commit() is None
    name = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    for words in (["init", "-q"], ["add", "."], [*name, "commit", "-qm", "first"]):
        subprocess.run(["git", "-C", tmp_path, *words], check=True)
    clean = compute.commit()
    (tmp_path / "my.txt").write_text("a user's own")
    assert len(clean) == 40 and compute.commit() == clean
    for changed in ("package/own.py", "conf/file"):
        (tmp_path / changed).write_text("changed")
        assert compute.commit() == f"{clean}+changes"
        (tmp_path / "package/own.py").unlink(missing_ok=True)


def test_each_resumption_is_noted_with_what_changed(run, monkeypatch):
    began = json.loads((run.path / "versions.json").read_text())
    assert run.resume(CONFIG, EXACT, 7) == []
    monkeypatch.setattr(compute, "commit", lambda: "another")
    (line,) = run.resume(CONFIG + "checkpoint_every: 3\n", EXACT, 8)
    assert line == f"commit=another (it began with {began['commit']})"
    now = json.loads((run.path / "versions.json").read_text())
    first, second = now.pop("resumed")
    assert (first["step"], second["step"], second["commit"]) == (7, 8, "another") and "commit" not in first
    assert now == began
    assert (run.path / "config.yaml").read_text().endswith("checkpoint_every: 3\n")
    run.refuse_other(CONFIG, EXACT)


@pytest.mark.parametrize(
    "name", ["export.json", "index.json", "manifest.json", "config.json", "modules.json"]
)
def test_a_run_is_not_begun_in_a_directory_of_another_kind(name, tmp_path):
    (tmp_path / name).write_text("{}")
    with pytest.raises(ValueError, match="holds something other than a run; choose another name"):
        Run(tmp_path).claim()
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_finished_run_has_scores(run):
    assert run.scores is None and run.best_score is None
    (run.path / "scores.json").write_text('{"dev": {"best": 51.5}}')
    assert run.best_score == 51.5
    (run.path / "scores.json").write_text('{"model": "m"}')  # of evaluate.py
    assert Run(run.path).best_score is None


READERS = {  # a file of an ended run, and what reads it
    "config.yaml": lambda run: run.settings,
    "versions.json": lambda run: (run.facts, run.origin),
    "metrics.csv": lambda run: run.series,
    "items.npz": lambda run: run.items,
    "scores.json": lambda run: run.scores,
}


@pytest.mark.parametrize("name", READERS)
def test_a_file_of_an_ended_run_that_changed_is_named_by_what_reads_it(run, name):
    metrics = "step,dev/spearman\n0,1.5\n"
    run.metrics.write_text(metrics)
    run.end({"dev": {"best": 51.5}}, {"0/x": np.arange(9)})
    for read in READERS.values():
        read(Run(run.path))
    file = run.path / name
    content = file.read_bytes()
    for other in (content.replace(b"5", b"6"), content[:-1], b"", None):
        if other == content:
            continue
        file.unlink() if other is None else file.write_bytes(other)
        if other is None and name == "scores.json":  # a run that has not ended
            assert Run(run.path).scores is None
            continue
        words = "is missing" if other is None else "is not as it was written"
        with pytest.raises(ValueError, match=rf"{file} {words}.*copy the whole run again or, if the change"):
            READERS[name](Run(run.path))
        for another, read in READERS.items():
            assert another == name or read(Run(run.path)) is not None  # what is not read is not checked
    file.write_bytes(content.replace(b"51.5", b"99.5") if name == "scores.json" else content)
    (run.path / "digests.json").unlink()  # an older run
    READERS[name](Run(run.path))


def test_a_run_of_before_modules_moved_resumes_though_its_settings_name_them_otherwise(tmp_path):
    then = """optim: {_target_: whitenedcse.training.optim.adamw, lr: 1.0}
mlm: {_target_: whitenedcse.training.loss.MaskedLanguageModel, weight: 0.0}
protocol: {_target_: whitenedcse.evaluation.protocol.Protocol, rows: [{_target_: another.Row}]}
loss: {form: l1, force_literal: false}
monitor: {every: 50, sample: 2048}
head: {whitening: {kind: group}}
"""
    now = """optim: {_target_: whitenedcse.training.module.adamw, lr: 1.0}
mlm: {_target_: whitenedcse.training.terms.MaskedLanguageModel, weight: 0.0}
protocol: {_target_: whitenedcse.evaluation.tasks.Protocol, rows: [{_target_: another.Row}]}
loss: {form: l1}
monitor: {every: 50}
head: {whitening: {kind: group, transform: zca, iterations: 5, slice: null}}
"""
    run = Run(tmp_path)
    run.start(then)
    run.refuse_other(now, {})
    for node in (run.settings["optim"], run.settings["mlm"], run.settings["protocol"]):
        module, _, name = node["_target_"].rpartition(".")
        assert hasattr(importlib.import_module(module), name)
    with pytest.raises(ValueError, match="loss.form=l2"):
        run.refuse_other(now.replace("l1", "l2"), {})
    with pytest.raises(ValueError, match=r"whitening.transform=iterative \(it began with zca\)"):
        run.refuse_other(now.replace("transform: zca", "transform: iterative"), {})
    whole = Run(tmp_path / "zca")  # which noted the groups of its experiment
    whole.start(then.replace("kind: group", "kind: zca, group_width: 6"))
    whole.refuse_other(now.replace("kind: group", "kind: zca, group_width: null"), {})
    other = Run(tmp_path / "other")
    other.start(then.replace("2048", "512"))
    with pytest.raises(ValueError, match=r"monitor.sample=null \(it began with 512\)"):
        other.refuse_other(now, {})

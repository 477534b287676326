"""A directory belongs to one run with its settings and to one process; its files stay as they were."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock, Timeout

from whitenedcse import compute, files
from whitenedcse import run as run_module
from whitenedcse.run import Run, logged, stamp

CONFIG = "run: a\nseed: 1\ndata: {corpus: here.txt, columns: []}\ntrainer: {devices: 1, max_steps: 9}\n"
CONTENT = {"monitor.dev": "d0", "tasks.mine.tsv": "e1", "encoder.path": "f2"}
EXACT = {"corpus": "c0ffee", "tokenizer": "beef", "processes": 1, "content": CONTENT}


@pytest.fixture
def run(tmp_path):
    """A run that began, and has a checkpoint."""
    began = Run(tmp_path / "run")
    began.start(CONFIG, seed=1, **EXACT)
    began.checkpoints.mkdir()
    (began.checkpoints / "step-1-c0ffee.ckpt").touch()
    return began


def test_a_directory_is_claimed_by_one_process_also_after_a_kill(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "SECONDS", 0.2)
    path = tmp_path / "run"
    code = f"""
import os, signal
from whitenedcse.run import Run
with Run({str(path)!r}).claim():
    os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == -9
    with Run(path).claim(), pytest.raises(Timeout):
        FileLock(path / ".lock").acquire(timeout=0)
    with FileLock(path / ".lock"), pytest.raises(ValueError, match=rf"{path} is being written by .*run="):
        with Run(path).claim():
            pass


def test_another_run_is_refused_and_each_difference_named(run):
    cases = [
        (CONFIG.replace("seed: 1", "seed: 2"), {}, "seed=2 (it began with 1)"),
        (CONFIG.replace("max_steps: 9", "max_steps: 10"), {}, "trainer.max_steps=10 (it began with 9)"),
        (CONFIG.replace("seed: 1\n", ""), {}, "seed=null (it began with 1)"),
        (CONFIG + "views: 3\n", {}, "views=3 (it began with null)"),
        (CONFIG.replace("[]", "[a, b]"), {}, 'data.columns=["a", "b"] (it began with [])'),
        (CONFIG, {"corpus": "new"}, "corpus=new (it began with c0ffee)"),
        (CONFIG, {"tokenizer": "new"}, "tokenizer=new (it began with beef)"),
        (CONFIG, {"processes": 2}, "processes=2 (it began with 1)"),
    ]
    for name, began in CONTENT.items():
        content = {"content": CONTENT | {name: "new"}}
        cases.append((CONFIG, content, f"content.{name}=new (it began with {began})"))
    for changed, exact, words in cases:
        with pytest.raises(ValueError) as raised:
            run.check_same(changed, EXACT | exact)
        said = f"{run.path} holds another run: {words}; choose another name with run="
        assert str(raised.value).startswith(said) and "--force" in str(raised.value)
        assert run.check_same(changed, EXACT | exact, force=True) == [words]
    run.resume(CONFIG, EXACT | content, 1)
    assert run.check_same(CONFIG, EXACT | content) == []
    with pytest.raises(ValueError, match=r"a=0 .*, and 2 more; choose another name"):
        run.check_same(CONFIG + "".join(f"{name}: 0\n" for name in "abcdefgh"), {})
    assert Run(run.path / "none").check_same(CONFIG, EXACT) == []


def test_where_data_lie_and_where_it_runs_may_change(run):
    free = CONFIG.replace("here", "elsewhere").replace("run: a", "run: b").replace("devices: 1", "devices: 2")
    more = "checkpoint_every: 3\nforce: true\nlogger: {_target_: x, project: y}\n"
    run.check_same(free + more, EXACT)


def test_a_run_without_a_checkpoint_begins_again_and_its_files_are_there_together(run, monkeypatch):
    assert run.config.read_text() == CONFIG and Path(run) == run.path
    facts = json.loads((run.path / "versions.json").read_text())
    assert facts.items() >= (EXACT | {"seed": 1}).items() and facts["packages"]["torch"]
    with pytest.raises(ValueError, match="already holds a run; choose another name with run=NAME"):
        run.start(CONFIG)
    (run.checkpoints / "step-1-c0ffee.ckpt").unlink()
    other = CONFIG.replace("seed: 1", "seed: 2")
    assert run.check_same(other, EXACT) == []
    run.start(other)  # of a start that was refused, or cut short before the first checkpoint
    assert run.settings["seed"] == 2
    run.end({})
    with pytest.raises(ValueError, match="already holds a run; choose another name with run=NAME"):
        run.start(other)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(run_module, "writing", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        Run(run.path / "other").start(CONFIG)  # versions.json is written
    assert not Run(run.path / "other").began


def test_each_resumption_is_noted_with_what_changed(run, monkeypatch):
    began = json.loads((run.path / "versions.json").read_text())
    assert run.resume(CONFIG, EXACT, 7) == []
    monkeypatch.setattr(compute, "commit", lambda: "another")
    (line,) = run.resume(CONFIG + "checkpoint_every: 3\n", EXACT, 8)
    assert line == f"commit=another (it began with {began['commit'] or 'null'})"
    now = json.loads((run.path / "versions.json").read_text())
    first, second = now.pop("resumed")
    assert (first["step"], second["step"], second["commit"]) == (7, 8, "another") and "commit" not in first
    assert now == began and run.config.read_text().endswith("checkpoint_every: 3\n")


def test_a_start_that_is_refused_leaves_no_folder_and_a_run_that_began_stays(tmp_path):
    for error in (ValueError, SystemExit, KeyboardInterrupt):
        run = Run(tmp_path / "run")
        with pytest.raises(error), run.tidied(), run.claim():
            raise error
        assert not run.path.exists()
    with pytest.raises(ValueError), run.tidied(), run.claim():
        run.start(CONFIG)
        raise ValueError
    assert run.began and (run.path / ".lock").exists()


def test_a_run_is_not_begun_in_a_directory_of_another_kind(tmp_path):
    for name in ("export.json", "index.json", "manifest.json", "config.json", "modules.json"):
        (tmp_path / name).write_text("{}")
        with pytest.raises(ValueError, match="holds something other than a run; choose another name"):
            with Run(tmp_path).tidied():
                pass
        (tmp_path / name).unlink()
    (tmp_path / "multirun.yaml").touch()
    with pytest.raises(ValueError, match="holds a sweep"):
        Run(tmp_path).check_free()
    Run(tmp_path).check_free(sweep=True)


def test_what_is_no_run_that_has_ended_says_what_it_is(tmp_path):
    with pytest.raises(FileNotFoundError, match="is not a run that has ended: it has no scores.json"):
        _ = Run(tmp_path).results
    (tmp_path / "multirun.yaml").touch()
    with pytest.raises(FileNotFoundError, match=rf"is a sweep: name runs of it, as {tmp_path}/0"):
        _ = Run(tmp_path).results


def test_a_series_is_the_finite_values_of_whole_lines(tmp_path):
    file = tmp_path / "metrics.csv"
    file.write_text("step,a,b\n0,1.5,\n10,nan,2\n20,3.5,inf\n30,9")
    found = {name: (s.steps.tolist(), s.values.tolist()) for name, s in logged(file).items()}
    assert found == {"a": ([0, 20], [1.5, 3.5]), "b": ([10], [2.0])}
    assert logged(tmp_path / "none.csv") == {}
    file.write_text("step,a\nx,1.5\n")
    with pytest.raises(ValueError, match=f"^{file} is damaged"):
        logged(file)


def test_a_run_is_named_by_the_time_and_under_slurm_by_what_a_requeued_job_keeps(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_module.time, "strftime", lambda _: "2026-11-23_10-56-09")
    names = []
    for _ in range(3):  # within a second
        names.append(stamp())
        (tmp_path / "outputs" / f"evaluate-{names[-1]}").mkdir(parents=True)
    assert names == ["2026-11-23_10-56-09", "2026-11-23_10-56-09-2", "2026-11-23_10-56-09-3"]
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    assert stamp() == "slurm-7.0"


def test_a_model_beside_another_program_s_config_is_of_no_run(tmp_path):
    (tmp_path / "config.yaml").write_text("lr: 3\n")
    (tmp_path / "run" / "best").mkdir(parents=True)
    (tmp_path / "run" / "config.yaml").write_text("monitor: {}\n")
    assert Run.of(tmp_path / "run").path == Run.of(tmp_path / "run/best").path == tmp_path / "run"
    (tmp_path / "model").mkdir()
    (tmp_path / "best").mkdir()
    assert Run.of(tmp_path / "model") is Run.of(tmp_path / "best") is Run.of(tmp_path / "run/none") is None


def test_a_run_of_before_this_format_is_refused_and_the_last_version_that_reads_it_is_named(tmp_path):
    (tmp_path / "config.yaml").write_text("seed: 1\n")
    (tmp_path / "versions.json").write_text('{"packages": {"whitenedcse": "0.2.0"}}')
    with pytest.raises(ValueError, match="is a run of before version 0.3, which 0.2.0 was the last to read"):
        _ = Run(tmp_path).settings
    (tmp_path / "versions.json").write_text('{"packages": {"whitenedcse": "0.2.0"}, "format": "0.3"}')
    assert Run(tmp_path).settings == {"seed": 1}


def test_the_commit_is_of_this_package_and_not_of_the_project_whose_environment_it_is_in(
    tmp_path, monkeypatch
):
    def git(*words):
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", "-C", str(tmp_path), *who, *words], check=True, capture_output=True)

    package = tmp_path / ".venv/lib/whitenedcse/compute.py"
    package.parent.mkdir(parents=True)
    package.write_text("")
    (tmp_path / ".gitignore").write_text(".venv\n")
    git("init")
    git("add", ".gitignore")
    git("commit", "-m", "theirs")
    monkeypatch.setattr(compute, "__file__", str(package))
    assert compute.commit() is None
    git("add", "-f", ".venv")
    git("commit", "-m", "a copy")
    assert re.fullmatch("[0-9a-f]{40}", compute.commit())
    package.write_text("# changed")
    assert compute.commit().endswith("+changes")

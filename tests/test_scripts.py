"""train.py and evaluate.py as a user starts them: what they write, what they print, what they refuse."""

import csv
import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from programs import started, surroundings

from whitenedcse.app import cli
from whitenedcse.app.config import CONF

ROOT = Path(__file__).parents[1]
TINY = ["encoder.width=16", "encoder.layers=1", "encoder.heads=2", "monitor.every=2"]
TINY += ["trainer.accelerator=cpu", "trainer.log_every_n_steps=1"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of four steps from a directory that is not the project's."""
    cwd = tmp_path_factory.mktemp("user")
    words = [*TINY, "trainer.max_steps=4", "run=first", "logger=wandb"]
    result = started("train.py", *words, cwd=cwd, WANDB_MODE="offline")
    assert result.returncode == 0, result.stderr
    return cwd, result.stdout


def test_the_end_names_the_run_directory_and_the_table_the_baselines(trained):
    cwd, output = trained
    *_, where, following, last = output.splitlines()
    assert last == f"run: {cwd / 'outputs' / 'first'}"
    assert where.startswith("best checkpoint: outputs/first/best ")  # as the next command takes it
    assert following.startswith("next: whitenedcse report outputs/first   whitenedcse export ")
    for words in ("as it is", "whitened on dev sentences (transductive)", "training sentences (inductive)"):
        assert words in output
    assert "20,000 lines, 0 blank dropped" in output
    (run,) = (cwd / "outputs/first/wandb").glob("offline-run-*")  # where that is asked
    assert list(run.glob("*.wandb"))


def test_a_run_directory_holds_all_that_a_number_depends_on(trained):
    run = trained[0] / "outputs" / "first"
    versions = json.loads((run / "versions.json").read_text())
    assert versions["packages"]["torch"] == importlib.metadata.version("torch")
    known = "command experiment seed corpus tokenizer processes format overrides system device attention"
    known += " content encoder packages python commit machine threads"
    assert set(versions) == set(known.split())
    assert versions["command"].endswith("run=first logger=wandb")
    assert "group_width: 2" in (run / "config.yaml").read_text()
    assert "${" not in (run / "config.yaml").read_text()  # resolved
    assert not (run / "checkpoints").exists()
    scores = json.loads((run / "scores.json").read_text())["dev"]
    with (run / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    dev = {int(row["step"]): float(row["dev/spearman"]) for row in rows if row["dev/spearman"]}
    assert set(dev) == {0, 2, 4}
    assert scores["metric"] == "dev/spearman"
    assert scores["before"] == pytest.approx(dev[0])
    assert scores["best"] == pytest.approx(max(dev[2], dev[4]))
    assert dev[scores["best_step"]] == pytest.approx(scores["best"])
    assert sum(bool(row["train/loss"]) for row in rows) == 4


def test_a_finished_run_is_not_changed_and_another_one_refused(trained, refusal, monkeypatch):
    cwd, _ = trained
    kept = [path for path in (cwd / "outputs/first").rglob("*") if path.parent.name != "logs"]  # of wandb's
    files = {path: path.read_bytes() for path in kept if path.is_file()}
    again = started("train.py", *TINY, "trainer.max_steps=4", "run=first", "logger=wandb", cwd=cwd)
    assert again.returncode == 0, again.stderr
    assert f"{cwd / 'outputs/first'} is finished and not changed" in again.stdout
    monkeypatch.chdir(cwd)
    for more in ([], ["--force"]):  # which resumes unfinished runs alone
        line = refusal("train", *TINY, "trainer.max_steps=1", "run=first", *more)
        assert "holds another run: trainer.max_steps=1 (it began with 4); choose another name" in line
    assert {path: path.read_bytes() for path in files} == files


def test_the_best_checkpoint_is_evaluated_and_scores_what_the_monitor_said(trained):
    cwd, _ = trained
    tasks = "tasks.names=[quickstart/test,quickstart/dev]"
    result = started("evaluate.py", "model=outputs/first", tasks, "run=evaluated", cwd=cwd)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == f"run: {cwd / 'outputs' / 'evaluated'}"
    scores = json.loads((cwd / "outputs" / "evaluated" / "scores.json").read_text())
    (row,) = scores["rows"]
    test, dev = (row["sts"]["tasks"][f"quickstart/{part}"] for part in ("test", "dev"))
    assert (scores["model"], scores["seed"], row["setting"]) == ("outputs/first", 42, "")
    assert test.keys() >= {"all", "mean", "wmean", "n", "subsets", "interval"}
    assert row["sts"]["avg"]["all"] == (test["all"] + dev["all"]) / 2
    at_the_end = json.loads((cwd / "outputs/first/scores.json").read_text())
    plain, target, training = at_the_end["rows"]
    for mean in ("all", "mean", "wmean"):  # of sentences in other batches
        assert plain["sts"]["avg"][mean] == pytest.approx(test[mean], abs=1e-4)
    assert [r["setting"] for r in (plain, target, training)] == ["", "transductive", "inductive"]
    assert (target["fit"], training["fit"]) == ("target", "quickstart")
    with (cwd / "outputs/first/metrics.csv").open() as file:
        *_, last = csv.DictReader(file)
    assert float(last["test/avg"]) == plain["sts"]["avg"]["all"] and last["step"] == "4"
    assert dev["all"] == pytest.approx(at_the_end["dev"]["best"], abs=1e-4)


@pytest.mark.slow
def test_runs_are_compared_and_own_texts_evaluated_by_a_python_function(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def said(*words):
        assert cli.main(["evaluate", *words, "draws=50"]) == 0
        return " ".join(capsys.readouterr().out.split())

    Path("letters.py").write_text("def f(x): return [[len(t), t.count('a'), t.count('e')] for t in x]\n")
    rows = [f"{i % 7}\tbread{'a' * (i % 5)}\tbake{'e' * (i % 3)}{'a' * (i % 7)}\n" for i in range(40)]
    Path("pairs.tsv").write_text("grade\tone side\tother\n" + "".join(rows))
    labelled = [f"b{'a' * (i % 2 * 3)}{'e' * (i % 5)},{i % 2}\n" for i in range(60)]
    Path("texts.csv").write_text("text,label\n" + "".join(labelled))
    pairs, given = "pairs.tsv:one side:other:grade", ["model=letters:f", "protocol=posthoc"]
    for name in ("one", "two"):
        tasks = f"tasks.names=[{pairs},texts.csv]"
        printed = said(given[0], tasks, f"run={name}", "postprocess=pca", "k=2")
        assert "pca-2 (target) transductive" in printed and "texts.csv" in printed
    rows = json.loads(Path("outputs/two/scores.json").read_text())["rows"]
    assert rows[0]["transfer"]["tasks"]["texts.csv"]["accuracy"] == 100  # the letter a tells the classes
    printed = said("compare=[outputs/one,outputs/*]")
    assert "as it is: Spearman x 100, all" in printed and "pca-2 (target): accuracy x 100" in printed
    closed = subprocess.Popen(
        [sys.executable, str(ROOT / "evaluate.py"), "compare=[outputs/one,outputs/two]", "draws=50"],
        env=surroundings(tmp_path, {}), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    closed.stdout.close()  # as by `| head -1` once it has its line
    assert closed.stderr.read() == "" and closed.wait() == 1
    closed.stderr.close()
    assert not list(Path("outputs").glob("evaluate-*"))
    Path("corpus.txt").write_text("".join(f"b{'a' * (i % 5)}{'e' * (i % 7)}\n" for i in range(70)))
    printed = said(*given, f"tasks.names=[{pairs}]", "fit=corpus.txt", "run=fitted")
    assert "whitened (corpus.txt) inductive" in printed and "components only" not in printed
    Path("few.txt").write_text("bread\nbake\nbreadaa\n")
    printed = said(*given, f"tasks.names=[{pairs}]", "fit=few.txt", "run=few")
    assert "fitted to 3 texts, of whose components only 2 of 3 can vary" in printed


@pytest.mark.slow
def test_an_option_of_ones_own_is_a_class_and_its_settings(tmp_path):
    own = {"head/own": "dense", "optim/own": "adamw", "monitor/own": "held_out", "trainer/own": "default"}
    for name, option in (own | {"logger/own": "tensorboard"}).items():
        group = name.partition("/")[0]
        with initialize_config_dir(str(CONF), version_base="1.3"):
            settings = OmegaConf.to_container(compose("train", [f"{group}={option}"])[group])
        (tmp_path / group).mkdir()
        OmegaConf.save(
            {key: v for key, v in settings.items() if key != "_partial_"}, tmp_path / f"{name}.yaml"
        )
    words = [f"{group}=own" for group in ("head", "optim", "monitor", "trainer", "logger")]
    words += ["trainer.max_steps=1", "data.sample=64", "data.batch_size=16", "tasks=none"]
    words += ["--config-dir", "."]
    result = started("train.py", *words, "run=own", cwd=tmp_path)
    assert result.returncode == 0, result.stderr

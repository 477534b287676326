"""A run that is killed anywhere near its end is completed by the same command, to the same bytes."""

import csv
import json
import shutil
from functools import cache

import pytest
from encoders import PAIRS, SENTENCES
from programs import started

TRAIN = "encoder=small encoder.width=16 encoder.layers=1 encoder.heads=2 data=file data.corpus=c.txt"
TRAIN += " data.batch_size=4 trainer.accelerator=cpu trainer.max_steps=4 trainer.log_every_n_steps=1"
TRAIN += " monitor.dev=p.tsv monitor.every=100 tasks.names=[p.tsv] run=trained"  # the one best/ is of the end
EVALUATE = "model=outputs/trained tasks.names=[p.tsv] figures=[projection] run=evaluated"
PROGRAMS = {  # arguments, and the call from which on the program may be killed
    "train.py": (TRAIN.split(), "whitenedcse.training.checkpoints:Safekeeping.on_train_end"),
    "evaluate.py": (EVALUATE.split(), "whitenedcse.run:Run.start"),
}
KILLS = {"train.py": 8, "evaluate.py": 5}  # states that are tried, at most
MACHINES = "train/sentences_per_second", "train/load"


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """For a program: where it ran, its arguments, and the states that kills would have left."""
    home = tmp_path_factory.mktemp("home")
    (home / "c.txt").write_text("\n".join(SENTENCES))
    (home / "p.tsv").write_text(PAIRS)

    @cache
    def states(program):
        if program == "evaluate.py":
            states("train.py")
        arguments, first = PROGRAMS[program]
        to = tmp_path_factory.mktemp("snapshots")
        where = {"SNAPSHOTS_FROM": first, "SNAPSHOTS_OF": str(home), "SNAPSHOTS_TO": str(to)}
        done = started(program, *arguments, cwd=home, prepared="snapshots:taken", **where)
        assert done.returncode == 0, done.stderr
        run = home / "outputs" / arguments[-1].removeprefix("run=")
        return run, sorted(to.iterdir(), key=lambda path: int(path.name)), outcome(run)

    return states


def outcome(run):
    """The content of a run but checkpoints, log, speed, load and resumptions, which no two lives share."""
    files = [path for path in run.rglob("*") if path.is_file() and path.parent.name != "checkpoints"]
    found = {str(path.relative_to(run)): path.read_bytes() for path in files if path.suffix != ".log"}
    facts = json.loads(found["versions.json"])
    for name in ("resumed", "commit"):  # a commit may be made while the tests run
        facts.pop(name, None)
    if "metrics.csv" in found:
        lines = csv.DictReader(found["metrics.csv"].decode().splitlines())
        found["metrics.csv"] = [line | {name: bool(line[name]) for name in MACHINES} for line in lines]
    return found | {"versions.json": facts}


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.slow
def test_a_run_killed_at_any_call_of_its_end_is_completed_by_the_same_command(killed, program):
    run, states, whole = killed(program)
    assert len(states) > 10
    count = min(KILLS[program], len(states))
    for state in (states[i * len(states) // count] for i in range(count)):
        shutil.rmtree(run.parents[1])
        shutil.copytree(state, run.parents[1])
        ended = (run / "scores.json").exists()
        again = started(program, *PROGRAMS[program][0], cwd=run.parents[1])
        if program == "evaluate.py" and ended:
            assert "already holds a run" in again.stderr
        else:
            assert again.returncode == 0, again.stderr
            assert again.stdout.splitlines()[-1] == f"run: {run}"
        assert outcome(run) == whole
        assert not [path for path in run.rglob("*") if path.name.endswith((".new", ".old", "draft"))]

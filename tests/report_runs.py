"""Runs as train.py and evaluate.py leave them, made without training, for the tests of reports."""

import csv
import itertools
import json

import numpy as np
import yaml

from whitenedcse.evaluation.protocol import Row
from whitenedcse.evaluation.suite import System, evaluated, plan, recorded
from whitenedcse.evaluation.tasks import Subset
from whitenedcse.run import Run

SCORES = {  # by system and seed: dev best, test average; no pattern
    "simcse": {1: (70.1, 66.0), 2: (69.2, 65.1), 3: (71.7, 67.9), 4: (70.9, 66.4)},
    "group": {1: (71.4, 67.3), 2: (70.9, 66.9), 3: (71.9, 67.7), 4: (71.0, 67.6)},
    "whitenedcse": {1: (73.0, 69.5), 2: (72.1, 68.2), 3: (73.3, 70.9), 5: (73.9, 70.0)},
}


def tests_of(average):
    """What evaluate.py adds to scores.json: two tasks around an average, each later row 2 better."""
    means = {"mean": 0.0, "wmean": 0.0, "interval": dict.fromkeys(("all", "mean", "wmean"))}
    lines = []
    for i, name in enumerate(("as it is", "whitened (target)")):
        each = {"STS12": average + 2 * i - 1.5, "STS-B": average + 2 * i + 1.5}
        tasks = {task: {"all": value, "n": 9, **means} for task, value in each.items()}
        sts = {"tasks": tasks, "avg": {"all": average + 2 * i, **means}}
        lines.append({"name": name, "setting": "", "sts": sts})
    return {"protocol": "posthoc", "headline": "all", "rows": lines}


def trained(  # noqa: PLR0913
    folder, seed=1, best=70.0, average=None, system=None, finished=True, series=None, overrides=(), **settings
):  # fmt: skip
    """What train.py leaves, evaluated at steps 0, 50 and 100, the best at 50; `settings` by dotted name."""
    folder.mkdir(parents=True)
    config = {"run": folder.name, "seed": seed, "data": {"corpus": "c.txt", "seed": seed}}
    config |= {"monitor": {"every": 50}, "views": 3, "logger": {}, "checkpoint_every": 10}
    config |= {"head": {"whitening": {"kind": "group", "eps": 0.1}}}
    for name, value in settings.items():
        *above, last = name.split("__")
        node = config
        for part in above:
            node = node[part]
        node[last] = value
    (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    facts = {"command": f"train.py seed={seed}", "experiment": None, "seed": seed}
    facts |= {"system": system, "commit": "c0ffee", "machine": {"cores": 2, "gpus": []}}
    facts |= {"overrides": overrides} if overrides else {}
    (folder / "versions.json").write_text(json.dumps(facts))
    at = (0, 50, 100)
    columns = {
        "dev/spearman": dict(zip(at, (best - 9, best, best - 1), strict=True)),
        "dev/alignment": dict(zip(at, (0.05, 0.2 + best / 1e3, 0.3), strict=True)),
        "dev/uniformity": dict(zip(at, (-0.5, -2 - best / 1e2, -2.4), strict=True)),
        "dev/whitened_on_dev_k8": dict(zip(at, (62.0, 63.0, 68.0), strict=True)),
        "dev/whitened_on_dev_k4": dict(zip(at, (61.0, 64.0, 60.0), strict=True)),
        "dev/whitened_on_corpus_k8": dict(zip(at, (59.5, 61.0, 60.0), strict=True)),
        "train/loss": {10: 2.0, 60: 1.0, 90: 0.5},
        "train/lr": {10: 3e-5, 60: 2e-5, 90: 1e-5},
        "train/sentences_per_second": {10: 100.0, 60: 400.0 + best, 90: 900.0},
    } | (series or {})
    lines = [{"step": s, name: v} for name, column in columns.items() for s, v in column.items()]
    with (folder / "metrics.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, ["step", *columns], lineterminator="\n")
        table.writeheader()
        table.writerows(sorted(lines, key=lambda line: line["step"]))
    values = [{n: column.get(s) for n, column in columns.items() if n.startswith("dev/")} for s in (0, 50)]
    dev = {"before": best - 9, "best": best, "best_step": 50, "last": best - 1, "last_step": 100, "n": 7}
    dev |= {"metric": "dev/spearman", "values_before": values[0], "values_best": values[1]}
    if finished:
        tests = {} if average is None else tests_of(average)
        (folder / "scores.json").write_text(json.dumps({"dev": dev, **tests}))
    return folder


def swept(folder, tests=True, start=0):
    """The runs of SCORES as jobs of one sweep, every group with settings of its own."""
    number = itertools.count(start)
    for views, (system, by_seed) in enumerate(SCORES.items(), 2):
        for seed, (best, average) in by_seed.items():
            trained(folder / str(next(number)), seed, best, average if tests else None, system, views=views)
    return folder


def task(n, number):
    rng = np.random.default_rng(number)
    sides = {part: [[f"{number} {part} {side}{i}" for i in range(n)] for side in "ab"] for part in "pq"}
    return [Subset(part, *both, rng.uniform(0, 5, n)) for part, both in sides.items()]


def scored(folder, noise, number, tasks=None, rows=("as it is",), head="all"):
    """A run on vectors whose cosines follow the gold scores but for some noise."""
    folder.mkdir(parents=True)
    tasks = tasks or {"A": task(150, 0)[:1], "B": task(80, 1)}
    agenda = plan(tasks)
    rng = np.random.default_rng([number, len(agenda.sentences)])
    angle = {}
    for subsets in agenda.pairs.values():
        for s, at in subsets:
            turned = (5 - s.gold) / 5 + noise * rng.standard_normal(len(s.gold))
            angle |= dict(zip(at[1], turned, strict=True))
    x = np.array([[np.cos(angle.get(i, 0)), np.sin(angle.get(i, 0))] for i in range(len(agenda.sentences))])
    turns = [System(x + 0.5 * i * rng.standard_normal(x.shape)) for i in range(len(rows))]  # rows differ
    results = [evaluated(system, agenda, lambda *_: (None, 0), 50) for system in turns]
    facts = {"model": "m", "experiment": None, "seed": number, "pooling": "own"}
    facts |= {"protocol": "simcse", "headline": head}
    Run(folder).end(*recorded(facts, [Row(name) for name in rows], results, agenda))
    return folder

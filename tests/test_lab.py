"""What results/lab/answers.py says of the laboratory's runs, against SciPy; the runs here are made up."""

import io
import json
import tarfile

import numpy as np
import pytest
from scipy import stats

from results.lab import answers
from results.lab.answers import AFTER, AS_IS, TRANSFER
from results.study.contrasts import TASKS


def made_up(experiment, system, seed):
    """scores.json of a run: other numbers for each of the three."""
    random = np.random.default_rng([len(experiment), *system.encode(), seed])
    level = 60 + 2 * len(experiment) / 12 + len(system) / 5
    tests = {row: level + more + random.normal(size=7) for row, more in ((AS_IS, 0), (AFTER, 1))}
    rows = []
    for row, values in tests.items():
        sts = {task: {"all": x} for task, x in zip(TASKS, values, strict=True)}
        transfer = {task: {"accuracy": 100 - x} for task, x in zip(TRANSFER, values, strict=True)}
        rows.append({"name": row, "sts": {"tasks": sts}, "transfer": {"tasks": transfer}})
    best = {f"dev/{name}": random.random() for name in ("alignment", "uniformity", "effective_rank")}
    dev = {"best": level, "values_best": best | {"dev/variance_top1": random.random()}}
    return {"experiment": experiment, "system": system, "seed": seed, "dev": dev, "rows": rows}


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """An archive with runs of some systems on both encoders."""
    every, added = {}, []
    with tarfile.open(tmp_path / "runs.tar.xz", "w:xz") as tar:
        for experiment in answers.ENCODERS:
            for system in ("simcse", "sgw", "whitenedcse", "group", "multi_positive", "dropout"):
                for seed in range(3 if system == "dropout" else 5):
                    every[experiment, system, seed] = scores = made_up(experiment, system, seed)
                    content = json.dumps(scores).encode()
                    for folder in ["lab"] + ["transfer"] * (system not in ("whitenedcse", "dropout")):
                        info = tarfile.TarInfo(f"{folder}/{len(every)}/scores.json")
                        info.size = len(content)
                        added.append((info, content))
        for info, content in reversed(added):
            tar.addfile(info, io.BytesIO(content))
    monkeypatch.setattr(answers, "HERE", tmp_path)
    answers.runs.cache_clear()
    yield every
    answers.runs.cache_clear()


def average(runs, experiment, system, row, seed):
    (found,) = [each for each in runs[experiment, system, seed]["rows"] if each["name"] == row]
    return np.mean([found["sts"]["tasks"][task]["all"] for task in TASKS])


def test_a_question_is_answered_by_paired_t_tests_corrected_over_both_encoders(runs):
    found, p = answers.asked("during"), {}
    for i, (one, other) in enumerate((("sgw", "simcse"), ("whitenedcse", "multi_positive"))):
        for experiment in dict.fromkeys(key[0] for key in runs):
            a = [average(runs, experiment, one, AS_IS, seed) for seed in range(5)]
            b = [average(runs, experiment, other, AFTER, seed) for seed in range(5)]
            test = stats.ttest_rel(a, b)
            low, high = test.confidence_interval()
            d, _ = found[i, experiment]
            np.testing.assert_allclose([d.difference, d.low, d.high], [np.mean(a) - np.mean(b), low, high])
            p[i, experiment] = test.pvalue
    assert p.keys() == found.keys()
    corrected, largest = {}, 0.0
    for rank, key in enumerate(sorted(p, key=p.get)):
        largest = max(largest, min(1, (len(p) - rank) * p[key]))
        corrected[key] = largest
    for key, value in corrected.items():
        assert found[key][1] == pytest.approx(value)


def test_the_interval_of_a_correlation_is_that_of_a_loop(monkeypatch):
    monkeypatch.setattr(answers, "DRAWS", 40)
    x, y = np.random.default_rng(3).normal(size=(2, 7))
    x[0] = x[1]
    draws = np.random.default_rng(0).integers(0, 7, (40, 7))
    every = [stats.spearmanr(x[draw], y[draw]).statistic for draw in draws]
    expected = [stats.spearmanr(x, y).statistic, *np.nanquantile(every, [0.025, 0.975])]
    np.testing.assert_allclose(answers.interval(list(x), list(y)), expected)

"""What results/lab/answers.py says of the laboratory's runs, against SciPy; the runs here are made up."""

import io
import json
import tarfile

import numpy as np
import pytest
from scipy import stats

from results.lab import answers
from results.lab.answers import AFTER, AS_IS, TRANSFER, Arm
from results.study.contrasts import TASKS
from whitenedcse.evaluation.statistics import Comparison


def made_up(experiment, system, seed):
    """scores.json of a run: other numbers for each of the three."""
    random = np.random.default_rng([len(experiment), *system.encode(), seed])
    level = 60 + 2 * len(experiment) / 12 + len(system) / 5
    tests = {row: level + more + random.normal(size=7) for row, more in ((AS_IS, 0), (AFTER, 1))}
    rows = [
        {
            "name": row,
            "sts": {"tasks": {task: {"all": x} for task, x in zip(TASKS, values, strict=True)}},
            "transfer": {"tasks": {t: {"accuracy": 100 - x} for t, x in zip(TRANSFER, values, strict=True)}},
        }
        for row, values in tests.items()
    ]
    best = {f"dev/{name}": random.random() for name in ("alignment", "uniformity", "effective_rank")}
    dev = {"best": level, "values_best": best | {"dev/variance_top1": random.random()}}
    return {"experiment": experiment, "system": system, "seed": seed, "dev": dev, "rows": rows}


@pytest.fixture(params=[2, 1])
def runs(request, tmp_path, monkeypatch):
    """An archive with runs of some systems on both encoders, or on one."""
    every, added = {}, []
    with tarfile.open(tmp_path / "runs.tar.xz", "w:xz") as tar:
        for experiment in list(answers.ENCODERS)[: request.param]:
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


def test_a_comparison_takes_the_seeds_of_both_and_one_without_runs_says_so(runs):
    d, _ = answers.asked("views")[0, "lab_pretrained"]
    apart = [
        average(runs, "lab_pretrained", "simcse", AS_IS, s)
        - average(runs, "lab_pretrained", "dropout", AS_IS, s)
        for s in range(3)
    ]
    assert d.difference == pytest.approx(np.mean(apart))
    lines = answers.question("views")().splitlines()
    assert lines[3].startswith("| `whitenedcse` minus `dropout_whitened` | no runs yet | no runs yet |")
    assert len(lines) == 4


def test_classification_is_of_the_transfer_tasks_of_the_runs_that_have_them(runs):
    found = answers.asked("classification")
    d, _ = found[0, "lab_pretrained"]
    apart = [
        average(runs, "lab_pretrained", "simcse", AS_IS, seed)
        - average(runs, "lab_pretrained", "sgw", AS_IS, seed)
        for seed in range(5)
    ]
    assert d.difference == pytest.approx(np.mean(apart))  # an accuracy here is 100 less the score of a test
    assert {i for i, _ in found} == {0, 2, 3, 4}  # whitenedcse and official have no transfer tasks
    head, _, *lines = answers.where().splitlines()
    assert len(lines) == len(found) and head.count("|") == 3 + len(TRANSFER)
    mr = np.mean(
        [
            runs["lab_pretrained", "simcse", s]["rows"][0]["sts"]["tasks"][TASKS[0]]["all"]
            - runs["lab_pretrained", "sgw", s]["rows"][0]["sts"]["tasks"][TASKS[0]]["all"]
            for s in range(5)
        ]
    )
    assert lines[0].startswith(f"| from scratch | `sgw` minus `simcse` | {mr:+.2f} |")
    assert lines[1].startswith("| from scratch | `simcse` whitened minus `simcse` |")


def test_what_helped_is_above_zero_on_one_encoder_and_below_on_none(monkeypatch):
    above, below, unsure = (Comparison(d, d - 1, d + 1, 0.1) for d in (2.0, -2.0, 0.5))
    one, other = answers.ENCODERS
    every = {
        "shuffle": {
            (0, one): above,
            (0, other): below,
            (1, one): unsure,
            (1, other): above,
            (2, one): unsure,
        },
        "views": {(1, one): above},
        "halves": {(0, one): above},  # not of the plan, as is the next
        "paper": {(0, one): above},
    }
    monkeypatch.setattr(answers, "asked", lambda n: {k: (d, 1.0) for k, d in every.get(n, {}).items()})
    assert answers.helped() == ["`sgw_6` minus `group_6`", "`whitenedcse` minus `dropout_whitened`"]
    assert answers.parts().endswith(
        "other: `sgw_6` minus `group_6` and `whitenedcse` minus `dropout_whitened`."
    )


def test_a_difference_whose_interval_holds_zero_is_not_shown():
    made = [Comparison(1.0, low, 1.5, p) for low, p in ((0.5, 0.01), (-0.5, 0.2))]
    assert answers.cell((made[0], 0.02)) == "+1.00 (+0.50 .. +1.50, p 0.02)"
    assert answers.cell((made[1], 0.4), 1.4) == "+1.00 (-0.50 .. +1.50, p 0.4, n.s., below 1.40)"
    assert answers.cell(None) == "no runs yet"


def test_how_far_the_study_is(runs):
    n = len(runs) if len({key[0] for key in runs}) == 1 else len(runs) // 2
    other = len(runs) - n
    assert (
        answers.reached() == f"{n} of 85 on the encoder from scratch, {other} of 85 on the encoder minilm-mlm"
    )


def test_correlations_are_over_systems(runs):
    both = len({key[0] for key in runs}) == 2
    top, gain = {}, {}
    for (e, s, seed), scores in runs.items():
        top.setdefault((e, s), []).append(scores["dev"]["values_best"]["dev/variance_top1"])
        after, before = (average(runs, e, s, row, seed) for row in (AFTER, AS_IS))
        gain.setdefault((e, s), []).append(after - before)

    def correlation(*encoders):
        x, y = ([np.mean(values) for (e, _), values in of.items() if e in encoders] for of in (top, gain))
        return f"{stats.spearmanr(x, y).statistic:+.2f} ("

    first, *others = (
        answers.predicted().removeprefix("Spearman's correlation: ").replace(" and ", ", ").split(", ")
    )
    if both:
        assert first.startswith(correlation(*answers.ENCODERS)) and "12 systems of both encoders" in first
        first, second = others
        assert second.startswith(correlation("lab_minilm")) and "6 systems of the encoder minilm" in second
    assert first.startswith(correlation("lab_pretrained")) and "6 systems of the encoder from" in first
    means = {
        (e, s): np.mean([average(runs, e, s, AS_IS, seed) for seed in range(3 if s == "dropout" else 5)])
        for e, s, _ in runs
    }
    if both:
        names = ("sgw", "whitenedcse", "group", "multi_positive", "dropout")
        apart = [[means[e, name] - means[e, "simcse"] for name in names] for e in answers.ENCODERS]
        r = stats.spearmanr(*apart).statistic
        assert answers.carried().startswith(f"Over 5 systems: Spearman's correlation {r:+.2f} (")
    else:
        assert answers.carried().startswith("Fewer than four systems have runs on both encoders (")


def test_the_table_has_each_system_of_each_encoder(runs):
    lines = answers.all_systems().splitlines()[2:]
    before = [lines.pop(i) for i, line in reversed([*enumerate(lines)]) if "untouched" in line]
    assert [line.split(" | | ")[1][:4] for line in before] == ["60.5", "45.4"]  # of their own pages
    assert len(lines) == len({key[:2] for key in runs})
    first = [average(runs, "lab_pretrained", "simcse", AS_IS, seed) for seed in range(5)]
    assert f"| from scratch | `simcse` | 5 | {np.mean(first):.2f} ± {np.std(first, ddof=1):.2f} |" in lines[0]


def test_arms_are_named():
    assert [str(Arm("sgw")), str(Arm("simcse", AFTER))] == ["`sgw`", "`simcse` whitened"]


def test_the_interval_of_a_correlation_is_that_of_a_loop(monkeypatch):
    monkeypatch.setattr(answers, "DRAWS", 40)
    x, y = np.random.default_rng(3).normal(size=(2, 7))
    x[0] = x[1]
    draws = np.random.default_rng(0).integers(0, 7, (40, 7))
    every = [stats.spearmanr(x[draw], y[draw]).statistic for draw in draws]
    expected = [stats.spearmanr(x, y).statistic, *np.nanquantile(every, [0.025, 0.975])]
    np.testing.assert_allclose(answers.interval(list(x), list(y)), expected)

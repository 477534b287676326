"""What results/ concludes: its statistics against SciPy, and its pages against the committed runs.

README.md and results/*/README.md must hold the tables that results/tables.py makes, and their sentences no
other figures; the study's tables and differences are computed again here, from runs.tar.xz.
"""

import json
import re
import tarfile
from statistics import fmean, stdev

import numpy as np
import pytest
import torch
from programs import ROOT
from report.test_sweep import naive_holm
from scipy import stats

from results import paired, tables
from results.claim import collect, drive, memory, table
from results.claim import encoder as encoder_module
from results.claim import readouts as readouts_module
from results.lab import answers as lab
from results.readout import table as readout_table

TASKS = ("STS12", "STS13", "STS14", "STS15", "STS16", "STS-B", "SICK-R")
AS_IS, AFTER = "as it is", "whitened (training)"
DEVS = (
    ("sgw3", "3e-4"),
    ("sgw3", "1e-3"),
    ("none2", "3e-4"),
    ("none2", "1e-4"),
)  # as the claim's page has them


def average(run, row=AS_IS):
    """The average of seven tests in a row of scores.json."""
    (found,) = (each["sts"]["tasks"] for each in run["rows"] if each["name"] == row)
    return fmean(found[task]["all"] for task in TASKS)


def difference(first, second):
    """Mean, interval and p of paired values."""
    test = stats.ttest_rel(first, second)
    return fmean(first) - fmean(second), *test.confidence_interval(), test.pvalue


def by_holm(p):
    """p values by key, corrected."""
    return dict(zip(p, naive_holm([*p.values()]), strict=True))


def test_the_bound_is_where_two_one_sided_tests_reach_five_percent():
    for seed in range(20):
        x = np.random.default_rng(seed).normal(0.3, 1, 3 + seed)
        b = paired.bound(x)
        sides = ((b, "less"), (-b, "greater"))
        below, above = (stats.ttest_1samp(x, v, alternative=a).pvalue for v, a in sides)
        assert max(below, above) == pytest.approx(0.05)


def test_a_paired_difference_takes_the_seeds_of_both_and_is_the_t_test():
    one, other = {1: 3.0, 2: 5.0, 4: 4.0, 9: 0.0}, {4: 1.0, 1: 2.5, 2: 2.0}
    assert paired.apart(one, other) == [0.5, 3.0, 3.0]
    d, test = paired.compared([0.5, 3.0, 3.0]), stats.ttest_1samp([0.5, 3.0, 3.0], 0)
    np.testing.assert_allclose([d.difference, d.p], [6.5 / 3, test.pvalue])
    np.testing.assert_allclose([d.low, d.high], test.confidence_interval())


def test_the_pilot_gives_up_rates_and_the_study_begins_when_it_is_done():
    cells, scores, seen = drive.paper("minilm"), {}, []
    levels = {"1e-4": 70.0, "3e-4": 75.0, "1e-3": 74.0}
    while (job := next(job for job in drive.plan(scores) if job.name not in scores)).seed < 200:
        seen.append(job)
        scores[job.name] = levels[job.rate]
    assert [job.seed for job in seen] == [100] * 6 + [101] * 4 + [102] * 4
    assert {job.rate for job in seen[6:]} == {"3e-4", "1e-3"}
    assert job == drive.Job(cells[0], "3e-4", 200) and drive.chosen(cells[1], scores) == "3e-4"
    scores[job.name] = 80.0
    following = next(job for job in drive.plan(scores) if job.name not in scores)
    assert following == drive.Job(cells[1], "3e-4", 200)  # the cells of a seed one after the other


def test_runs_are_scored_by_this_checkout(monkeypatch, tmp_path):
    """A frozen clone may have other names than what readouts.py imports."""
    monkeypatch.setattr(drive.subprocess, "run", lambda command, cwd, **_: seen.append((command[1:], cwd)))
    seen = []
    drive.score(None, tmp_path)
    assert seen == [(["-m", "results.claim.readouts", tmp_path], ROOT)]


def test_the_share_that_a_readout_takes_is_that_of_a_loop():
    """Six seeds whose differences are about 2 raw and 0.5 at the best readout, with a known spread."""
    spread = np.array([-0.2, 0.2, -0.1, 0.1, -0.15, 0.15])

    def made(level, spread):
        whitened = {seed: [x] * 7 for seed, x in enumerate(level + spread)}
        return table.Compared("e", "t", "r", 0.0, {seed: [0.0] * 7 for seed in whitened}, whitened)

    part, *ends = table.share(made(2.0, -spread), made(0.5, spread))
    shares = []
    for seed in range(400):  # the same bootstrap by a loop, with other draws
        at = np.random.default_rng(seed).integers(6, size=6)
        shares.append(100 - 100 * (0.5 + spread[at].mean()) / (2 - spread[at].mean()))
    assert part == pytest.approx(75) and ends == pytest.approx(np.quantile(shares, [0.025, 0.975]), abs=1.5)


def test_an_encoder_whose_runs_are_to_come_counts_in_the_correction_of_p():
    raw, other = table.of_claim("minilm", "raw"), table.of_study()
    alone = [paired.compared(each.differences).p for each in (raw, other)]
    assert table.corrected([raw, other]) == pytest.approx([2 * alone[0], alone[1]])
    assert table.corrected([raw, raw]) == pytest.approx([2 * alone[0]] * 2)


def test_what_readme_concludes_of_the_committed_comparisons_holds():
    """Signs, and what is shown; that its figures are those of the tables is the next test's."""
    raw, best, private, private_best, weak = (
        table.of_claim(*of)
        for of in (("mlm", "raw"), ("mlm", "best"), ("minilm", "raw"), ("minilm", "best"), ("scratch", "raw"))
    )
    weak_best = table.of_claim("scratch", "best")
    (p_raw, p_best), plan = table.corrected([raw, best]), [private, weak, private_best, weak_best]
    means = [fmean(each.differences) for each in (raw, best, private, weak)]
    assert p_raw > 0.05 > p_best and means[0] > 0 > means[1]  # not shown to beat; at best readouts below
    assert means[2] > 0 > means[3] and max(table.corrected(plan)[:2]) < 0.05
    assert all(fmean(scores.values()) < weak.untouched for scores in weak.averages)
    gains = [table.gained(each) for each in (best, private_best, weak_best)]
    assert gains[0] >= 3 > max(gains[1:]) and table.share(private, private_best)[0] > 50
    (third, p), (whitening, p_whitening) = (table.of_parts()[x][0] for x in (table.THIRD, table.WHITENING))
    with_it, without = (table.averages("mlm", (x, "dropout"), "raw") for x in ("none3", "none2"))
    assert third == {seed: x - without[seed] for seed, x in sorted(with_it.items())}
    assert fmean(third.values()) > 0 and p < 0.05 < p_whitening
    found, p_best = table.of_parts()[table.WHITENING][1]
    assert fmean(whitening.values()) < 0 and fmean(found.values()) < 0 and p_best < 0.05
    third, beside, whole = (table.of_parts()[name] for name in table.AT_ONE_RATE.values())
    assert all(fmean(d.values()) > 0 for d, _ in (*third, *beside, *whole))
    assert third[0][1] > 0.05 and third[1][1] > 0.05 and beside[0][1] > 0.05 > beside[1][1]
    assert f"{whole[0][1]:.3f}" == "0.025" and whole[1][1] < 0.001
    cropped, less = (table.of_parts()[name] for name in (table.CROPPED, table.INTERACTION_THERE))
    assert all(fmean(d.values()) < 0 and p > 0.05 and len(d) == 20 for d, p in cropped)
    assert all(fmean(d.values()) < -1 and p < 0.05 for d, p in less)
    cells = {cell: fmean(table.averages("mlm", cell, "best").values()) for cell in table.CELLS}
    assert max(cells, key=cells.__getitem__) == ("none3", "crops")
    dev = [table.of_system("mlm", of, "dropout", rate) for of, rate in DEVS]
    means = [f"{fmean(float(run['dev']) for run in runs.values()):.2f}" for runs in dev]
    assert means == ["74.03", "72.65", "71.23", "71.58"] and {len(runs) for runs in dev} == {20}
    there, own = (table.averages("mlm", cell, "raw") for cell in (table.SIMCSE_THERE, table.SIMCSE))
    assert round(fmean(table.minus(there, own).values())) == 2


def test_sentences_have_no_figures_but_those_of_tables():
    """Two decimals in README.md and the pages of the claim and the study begin a cell, with their sign."""
    others = {"0.05", "3.11", "3.13", "3.98", "0.38"}  # alpha, Python, a loss, half an interval
    others |= {
        "70.52",
        "69.08",
        "73.04",
        "74.03",
        "72.65",
        "71.23",
        "71.58",
        "0.18",
    }  # dev: of one_pass; see the test above
    number, claim, said = r"(?<![\d.])[+-]?\d+\.\d\d(?![\d.])", "results/claim/README.md", []
    for pages in (("README.md", claim), (claim,), ("results/study/README.md",)):
        texts = [re.sub("```.*?```", "", (ROOT / page).read_text(), flags=re.S) for page in pages]
        cells = re.findall(rf"(?<=\| )\**{number}", "\n".join(texts))
        known = {*others, *cells, *(cell.strip("+-*") for cell in cells)}
        own = [line for line in texts[0].splitlines() if line[:1] != "|"]
        figures = re.findall(number, "\n".join(own))
        said += figures
        assert [x for x in figures if x not in known] == [], pages[0]
    assert len(said) > 20


def test_weights_in_eight_bits_come_back_within_half_a_step():
    weights = {"a": torch.randn(5, 3), "zero": torch.zeros(2, 2), "b": torch.randn(4)}
    found = encoder_module.unpacked(stored := encoder_module.packed(weights))
    assert stored["a"].dtype == torch.int8 and found.keys() == weights.keys()
    assert torch.equal(found["b"], weights["b"]) and not found["zero"].any()
    half = weights["a"].abs().amax(dim=1, keepdim=True) / 254
    assert ((found["a"] - weights["a"]).abs() <= 1.001 * half).all()


def test_what_two_encoders_share_is_given_the_gold_scores():
    gold, own, noise = np.random.default_rng(0).normal(size=(3, 4000))
    a, b = gold + own, gold + own + noise
    ranks = [stats.rankdata(x) for x in (a, b, gold)]
    left = [x - np.polyval(np.polyfit(ranks[2], x, 1), ranks[2]) for x in ranks[:2]]  # what gold leaves
    assert memory.partial(a, b, gold) == pytest.approx(np.corrcoef(left)[0, 1])
    assert abs(memory.partial(gold + own, gold + noise, gold)) < 0.05


def test_a_gain_is_predicted_from_the_encoders_of_other_families_alone():
    folder, points = ROOT / "results/readout", []
    named = [(file, file.stem) for file in folder.glob("*.json") if "uses" not in file.stem]
    for file, name in [*named, *((file, "MiniLM") for file in (folder / "snapshots").glob("*.json"))]:
        found = json.loads(file.read_text())
        family = {"pretrain": "scratch", "all_mpnet": "mpnet"}.get(
            re.sub("_(simcse|whitenedcse)$", "", name), "MiniLM"
        )
        for kind in ("cls", "mean"):
            gain = found[kind]["oracle"]["average"] - found[kind]["own"]
            points.append((family, found["facts"][kind]["top"], gain))
    errors = []
    for family, top, gain in points:
        x, y = zip(*(point[1:] for point in points if point[0] != family), strict=True)
        line = stats.linregress(x, y)
        errors.append(abs(gain - line.intercept - line.slope * top))
    rho = stats.spearmanr(*zip(*(point[1:] for point in points), strict=True)).statistic
    line = f"| the first axis's share | {rho:+.2f} | {np.mean(errors):.1f} |"
    assert len(points) == 26 and line in readout_table.predicted()


def test_a_readout_is_what_whitening_by_hand_gives():
    """Against a loop over pairs, for one pooling and layer, raw and whitened to two components."""
    random = np.random.default_rng(1)
    keys = [(pooling, layer) for pooling in ("cls", "mean") for layer in range(3)]
    planes = {key: random.normal(size=(30, 4)).astype(np.float32) for key in keys}
    wiki = {key: random.normal(size=(90, 4)).astype(np.float32) for key in planes}
    sides, gold = np.array(np.triu_indices(30, 1))[:, ::9], random.normal(size=49)
    tests = {task: (*sides, gold) for task in readouts_module.TASKS}
    found = {collect.name(each): each for each in readouts_module.readouts(planes, wiki, tests)}
    x, fit = ((every["mean", 1] + every["mean", 2]).astype(float) / 2 for every in (planes, wiki))
    values, axes = np.linalg.eigh(np.cov(fit.T, bias=True))
    white = (x - fit.mean(axis=0)) @ axes[:, ::-1] / np.sqrt(0.7 * values[::-1] + 0.3 * values.mean())
    for name, y in (("mean first+last", x), ("mean first+last k=4 shrinkage=0.3", white)):
        cosines = [y[i] @ y[j] / np.linalg.norm(y[i]) / np.linalg.norm(y[j]) for i, j in sides.T]
        assert found[name]["STS12"] == pytest.approx(100 * stats.spearmanr(cosines, gold).statistic, abs=1e-6)


# the laboratory


def test_a_question_is_answered_by_paired_t_tests_corrected_over_both_encoders():
    found, runs, tests = lab.asked("during"), lab.runs(), {}
    for i, (one, other) in enumerate((("sgw", "simcse"), ("whitenedcse", "multi_positive"))):
        for encoder in lab.ENCODERS:
            a = [average(runs[encoder, one, seed]) for seed in range(5)]
            b = [average(runs[encoder, other, seed], AFTER) for seed in range(5)]
            tests[i, encoder] = difference(a, b)
    corrected = by_holm({key: test[-1] for key, test in tests.items()})
    assert tests.keys() == found.keys()
    for key, (d, p) in found.items():
        np.testing.assert_allclose([d.difference, d.low, d.high, p], [*tests[key][:3], corrected[key]])


def test_the_interval_of_a_correlation_is_that_of_a_loop(monkeypatch):
    monkeypatch.setattr(lab, "DRAWS", 40)
    x, y = np.random.default_rng(3).normal(size=(2, 7))
    x[0] = x[1]
    draws = np.random.default_rng(0).integers(0, 7, (40, 7))
    every = [stats.spearmanr(x[draw], y[draw]).statistic for draw in draws]
    expected = [stats.spearmanr(x, y).statistic, *np.nanquantile(every, [0.025, 0.975])]
    np.testing.assert_allclose(lab.interval(list(x), list(y)), expected)


# the study


@pytest.fixture(scope="module")
def runs():
    """scores.json of the study by system, in the order of the seeds."""
    with tarfile.open(ROOT / "results/study/runs.tar.xz") as tar:
        found = [json.load(tar.extractfile(m)) for m in tar if m.name.endswith("/scores.json")]
    systems = dict.fromkeys(run["system"] for run in found)
    every = {name: [run for run in found if run["system"] == name] for name in systems}
    return {name: sorted(runs, key=lambda run: run["seed"]) for name, runs in every.items()}


def cells(heading):
    """The first table of the study's page with this heading of a column: {row: {column: cell}}."""
    for found in re.findall(r"(?:^\|.*\n)+", (ROOT / "results/study/README.md").read_text(), flags=re.M):
        head, _, *lines = ([cell.strip() for cell in line.split("|")[1:-1]] for line in found.splitlines())
        if heading in head:
            return {line[0]: dict(zip(head, line, strict=True)) for line in lines}
    raise AssertionError(f"no table has a column {heading}")


def mean_sd(values):
    return f"{fmean(values):.2f} ± {stdev(values):.2f}"


@pytest.mark.slow
def test_a_page_has_the_tables_of_the_committed_runs():
    """Else: python -m results.tables."""
    for page in tables.TABLES:
        assert (ROOT / page).read_text().split() == tables.written(page).split(), page


def test_like_stands_beside_like(runs):
    for v, plain, white in ((2, "simcse", "sgw"), (3, "multi_positive", "whitenedcse")):
        during = [average(run) for run in runs[white]]
        expected = {"whitening while training": mean_sd(during)}
        for name, row in (("no whitening", AS_IS), ("whitening afterwards", AFTER)):
            other = [average(run, row) for run in runs[plain]]
            mean, low, high, p = difference(during, other)
            sure = "" if low > 0 or high < 0 else ", n.s."
            expected[name] = mean_sd(other)
            said = f"{mean:+.2f} ({low:+.2f} .. {high:+.2f}, p {p:.2g}{sure})"
            expected[f"while training minus {name}"] = said
        table = cells(f"v = {v}")
        assert {name: table[name][f"v = {v}"] for name in expected} == expected


def test_all_systems_have_their_scores_and_their_differences_by_holm(runs):
    table = {name.split("`")[1]: row for name, row in cells("p (Holm)").items() if "`" in name}
    assert set(table) == set(runs) and sum(map(len, runs.values())) == 40
    scores = {name: [average(run) for run in every] for name, every in runs.items()}
    tests = {name: difference(x, scores["simcse"]) for name, x in scores.items() if name != "simcse"}
    for name, p in by_holm({name: test[-1] for name, test in tests.items()}).items():
        mean, low, high, _ = tests[name]
        assert table[name]["difference from SimCSE"] == f"{mean:+.2f}"
        assert table[name]["95 % interval"] == f"{low:+.2f} .. {high:+.2f}"
        assert table[name]["p (Holm)"] == f"{p:.2g}"
    for name, row in table.items():
        best = [run["dev"]["values_best"] for run in runs[name]]
        assert row["average of seven tests"] == mean_sd(scores[name])
        for after in ("whitened (target)", AFTER):
            assert row[after] == mean_sd([average(run, after) for run in runs[name]])
        assert row["dev best"] == mean_sd([run["dev"]["best"] for run in runs[name]])
        assert row["alignment"] == f"{fmean(x['dev/alignment'] for x in best):.3f}"
        assert row["uniformity"] == f"{fmean(x['dev/uniformity'] for x in best):.2f}"

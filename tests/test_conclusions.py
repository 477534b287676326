"""What README.md, docs/ and results/*/README.md conclude is what the committed runs show.

The pages must hold what results/conclusions.py makes; the study's tables and differences are computed again
here, from runs.tar.xz, by closed forms and loops.
"""

import json
import re
import tarfile
from math import sqrt
from statistics import fmean, stdev

import pytest
from programs import ROOT

from results import conclusions

STUDY = ROOT / "results/study"
TASKS = ("STS12", "STS13", "STS14", "STS15", "STS16", "STS-B", "SICK-R")
AS_IS, AFTER = "as it is", "whitened (training)"


@pytest.fixture(scope="session")
def runs():
    """scores.json of the study by system and seed."""
    with tarfile.open(STUDY / "runs.tar.xz") as tar:
        found = [json.load(tar.extractfile(m)) for m in tar if m.name.endswith("/scores.json")]
    return {(scores["system"], scores["seed"]): scores for scores in found}


def of(runs, system, value):
    """A value of each seed, in order."""
    return [value(runs[system, seed]) for seed in range(1, 6)]


def on(tasks, row=AS_IS):
    """The average over tasks of a run."""
    return lambda run: fmean(
        {each["name"]: each for each in run["rows"]}[row]["sts"]["tasks"][task]["all"] for task in tasks
    )


def difference(first, second):
    """Mean, interval and p of five or three paired values; t with 4 or 2 degrees has a closed form."""
    apart = [a - b for a, b in zip(first, second, strict=True)]
    n = len(apart)
    error = stdev(apart) / sqrt(n)
    t = abs(fmean(apart)) / error
    u = t / sqrt(n - 1 + t * t)
    half, p = {5: (2.7764451, 1 - 1.5 * u + 0.5 * u**3), 3: (4.3026527, 1 - u)}[n]
    return fmean(apart), fmean(apart) - half * error, fmean(apart) + half * error, p


def cells(page, heading):
    """The first table of a page with this heading of a column: {row: {column: cell}}."""
    for table in re.findall(r"(?:^\|.*\n)+", (ROOT / page).read_text(), flags=re.M):
        head, _, *lines = ([cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines())
        if heading in head:
            return {line[0]: dict(zip(head, line, strict=True)) for line in lines}
    raise AssertionError(f"{page} has no table with a column {heading}")


def mean_sd(values):
    return f"{fmean(values):.2f} ± {stdev(values):.2f}"


@pytest.mark.slow
def test_a_page_concludes_what_the_committed_runs_show():
    """Else: python -m results.conclusions."""
    for page in conclusions.BLOCKS:
        assert (ROOT / page).read_text().split() == conclusions.written(page).split(), page


@pytest.mark.parametrize("v", [2, 3])
def test_like_stands_beside_like(runs, v):
    plain, white = {2: ("simcse", "sgw"), 3: ("multi_positive", "whitenedcse")}[v]
    ways = ((plain, AS_IS), (plain, AFTER), (white, AS_IS))
    none, after, during = (of(runs, system, on(TASKS, row)) for system, row in ways)
    expected = {name: mean_sd(x) for name, x in (("no whitening", none), ("whitening afterwards", after))}
    expected["whitening while training"] = mean_sd(during)
    for name, other in (("no whitening", none), ("whitening afterwards", after)):
        mean, low, high, p = difference(during, other)
        sure = "" if low > 0 or high < 0 else ", n.s."
        expected[f"while training minus {name}"] = f"{mean:+.2f} ({low:+.2f} .. {high:+.2f}, p {p:.2g}{sure})"
    table = cells("results/study/README.md", f"v = {v}")
    assert {name: table[name][f"v = {v}"] for name in expected} == expected


def test_all_systems_have_their_scores_and_their_differences_by_holm(runs):
    rows = cells("results/study/README.md", "p (Holm)").items()
    table = {name.split("`")[1]: row for name, row in rows if "`" in name}
    assert set(table) == {system for system, _ in runs} and len(runs) == 40
    simcse = of(runs, "simcse", on(TASKS))
    tests = {name: difference(of(runs, name, on(TASKS)), simcse) for name in table if name != "simcse"}
    smallest_first = sorted(tests, key=lambda name: tests[name][3])
    corrected = 0.0
    for i, name in enumerate(smallest_first):
        corrected = max(corrected, (7 - i) * tests[name][3])
        mean, low, high, _ = tests[name]
        assert table[name]["difference from SimCSE"] == f"{mean:+.2f}"
        assert table[name]["95 % interval"] == f"{low:+.2f} .. {high:+.2f}"
        assert table[name]["p (Holm)"] == f"{corrected:.2g}"
    for name, row in table.items():
        best = of(runs, name, lambda run: run["dev"]["values_best"])
        assert row["average of seven tests"] == mean_sd(of(runs, name, on(TASKS)))
        assert row["whitened (target)"] == mean_sd(of(runs, name, on(TASKS, "whitened (target)")))
        assert row[AFTER] == mean_sd(of(runs, name, on(TASKS, AFTER)))
        assert row["dev best"] == mean_sd(of(runs, name, lambda run: run["dev"]["best"]))
        assert row["alignment"] == f"{fmean(x['dev/alignment'] for x in best):.3f}"
        assert row["uniformity"] == f"{fmean(x['dev/uniformity'] for x in best):.2f}"

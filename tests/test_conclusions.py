"""What README.md, docs/ and results/*/README.md conclude is what the committed runs show.

The pages must hold what results/conclusions.py makes; the study's tables and differences are computed again
here, from runs.tar.xz, by closed forms and loops.
"""

import csv
import json
import re
import tarfile
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev

import pytest
from programs import ROOT

from results import conclusions
from results.lab import answers as lab
from results.study.contrasts import shown

STUDY = ROOT / "results/study"
TASKS = ("STS12", "STS13", "STS14", "STS15", "STS16", "STS-B", "SICK-R")
AS_IS, AFTER = "as it is", "whitened (training)"
LIKE = {  # the columns of the table by test
    "v = 2: while training minus no whitening": (("sgw", AS_IS), ("simcse", AS_IS)),
    "v = 3: while training minus no whitening": (("whitenedcse", AS_IS), ("multi_positive", AS_IS)),
    "v = 2: while training minus whitening afterwards": (("sgw", AS_IS), ("simcse", AFTER)),
    "v = 3: while training minus whitening afterwards": (("whitenedcse", AS_IS), ("multi_positive", AFTER)),
    "WhitenedCSE (v = 3) minus SimCSE (v = 2)": (("whitenedcse", AS_IS), ("simcse", AS_IS)),
}
# figures outside the conclusions that no committed run holds: cosines of gradients, a comparison with
# published scores (tests/test_published.py), releases
NOT_OF_RUNS = {"0.999", "0.987", "0.02", "2.13"}


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


@pytest.mark.parametrize("page", conclusions.BLOCKS)
@pytest.mark.slow(but=1)
def test_a_page_concludes_what_the_committed_runs_show(page):
    """Else: python -m results.conclusions."""
    assert (ROOT / page).read_text().split() == conclusions.written(page).split()


def test_a_page_without_one_of_its_conclusions_is_refused(tmp_path, monkeypatch):
    (tmp_path / "README.md").write_text("none")
    monkeypatch.setattr(conclusions, "ROOT", tmp_path)
    with pytest.raises(
        ValueError, match=r"README.md has the conclusions \[\]; .* has \['short', 'sentences', 'brief'\]"
    ):
        conclusions.written("README.md")


@pytest.mark.parametrize("v", [2, 3])
def test_like_stands_beside_like(runs, v):
    plain, white = {2: ("simcse", "sgw"), 3: ("multi_positive", "whitenedcse")}[v]
    none, after, during = (
        of(runs, system, on(TASKS, row)) for system, row in ((plain, AS_IS), (plain, AFTER), (white, AS_IS))
    )
    expected = {name: mean_sd(x) for name, x in (("no whitening", none), ("whitening afterwards", after))}
    expected["whitening while training"] = mean_sd(during)
    for name, other in (("no whitening", none), ("whitening afterwards", after)):
        mean, low, high, p = difference(during, other)
        sure = "" if low > 0 or high < 0 else ", n.s."
        expected[f"while training minus {name}"] = f"{mean:+.2f} ({low:+.2f} .. {high:+.2f}, p {p:.2g}{sure})"
    table = cells("results/study/README.md", f"v = {v}")
    assert {name: table[name][f"v = {v}"] for name in expected} == expected


def test_the_sentences_of_the_readme_have_the_differences_of_the_runs(runs):
    page = " ".join((ROOT / "README.md").read_text().split())
    at = page.index("Against SimCSE")
    for first, second, row in (
        ("whitenedcse", "simcse", AS_IS),
        ("sgw", "simcse", AS_IS),
        ("whitenedcse", "multi_positive", AS_IS),
        ("whitenedcse", "multi_positive", AFTER),
    ):
        mean, low, high, _ = difference(of(runs, first, on(TASKS)), of(runs, second, on(TASKS, row)))
        at = page.index(f"{mean:+.2f} ({low:+.2f} .. {high:+.2f}", at)


@pytest.mark.parametrize("column", LIKE)
def test_each_test_has_its_difference_and_its_share(runs, column):
    table = cells("results/study/README.md", column)
    arms = LIKE[column]
    whole, *_ = difference(*(of(runs, system, on(TASKS, row)) for system, row in arms))
    for name, tasks in {**{task: [task] for task in TASKS}, "average": TASKS}.items():
        mean, low, high, _ = difference(*(of(runs, system, on(tasks, row)) for system, row in arms))
        share = f", {100 * mean / (7 * whole):.0f} %" if name != "average" else ""
        assert table[name][column] == f"{mean:+.2f} ({low:+.2f} .. {high:+.2f}){share}", name


def test_all_systems_have_their_scores_and_their_differences_by_holm(runs):
    table = {
        name.split("`")[1]: row
        for name, row in cells("results/study/README.md", "p (Holm)").items()
        if "`" in name
    }
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


def test_all_systems_have_their_scores_by_test(runs):
    table = cells("results/study/README.md", "STS12")
    assert len(table) == 11
    for name, row in table.items():
        if name != "untouched encoder":
            which = AFTER if AFTER in name else AS_IS
            for task in TASKS:
                assert row[task] == mean_sd(of(runs, name.split("`")[1], on([task], which))), (name, task)


def test_three_seeds_are_compared_by_the_same_rules():
    with (ROOT / "results/exact/seeds.csv").open() as file:
        best = {(line["setting"], line["seed"]): float(line["best"]) for line in csv.DictReader(file)}
    with (ROOT / "results/wiki_mini/seeds.csv").open() as file:
        now = [(float(line["avg_all"]), float(line["STS12"])) for line in csv.DictReader(file)]
    before = json.loads((STUDY / "untouched.json").read_text())
    pairs = {
        "exact": ([best[f"two devices{end}", seed] for seed in "012"] for end in ("", " gather=false")),
        "wiki_mini": ([average for average, _ in now], (74.31, 73.14, 73.75)),
        "wiki_mini ": ([sts12 for _, sts12 in now], [on(["STS12"])(before)] * 3),
    }
    for name, pair in pairs.items():
        mean, low, high, p = difference(*pair)
        page = " ".join((ROOT / f"results/{name.strip()}/README.md").read_text().split())
        assert f"{mean:+.2f} ({low:+.2f} .. {high:+.2f}, p {p:.2g}, n.s.)" in page, name


def test_seeds_csv_is_of_the_archive(runs):
    with (STUDY / "seeds.csv").open() as file:
        lines = {(line["system"], int(line["seed"])): line for line in csv.DictReader(file)}
    assert lines.keys() == runs.keys()
    for key, run in runs.items():
        for row in run["rows"]:
            for task in TASKS:
                assert float(lines[key][f"{row['name']}: {task}"]) == row["sts"]["tasks"][task]["all"]
            assert float(lines[key][f"{row['name']}: average"]) == row["sts"]["avg"]["all"]
        assert float(lines[key]["dev_best"]) == run["dev"]["best"]


@pytest.mark.parametrize("page", conclusions.BLOCKS)
def test_what_is_not_significant_is_said_to_be_so(page):
    prose = (ROOT / page).read_text()
    every = list(
        re.finditer(
            r"\([+-][\d.]+\s+\.\.\s+[+-][\d.]+,\s+p\s+([\d.e-]+)(,\s+n\.s\.)?(,\s+below\s+[\d.]+)?\)", prose
        )
    )
    assert every or page.split("/")[1] in ("evaluation", "readout", "shipping", "pretrain", "planning.md")
    before = 0
    for found in every:
        words = re.split(r"[;.]\s|\n- |\|", prose[before : found.start()])[-1].split()
        said = found[2] or "does not differ significantly" in " ".join(words)
        assert bool(said) == (float(found[1]) >= 0.05), found[0]
        before = found.end()


@pytest.mark.parametrize("page", ["README.md", "results/study/README.md", "results/wiki_mini/README.md"])
def test_no_figure_of_a_run_stands_outside_the_conclusions(page):
    text = conclusions.MARK.sub("", (ROOT / page).read_text())
    text = text[text.index("## Does it") : text.index("## Who it is")] if page == "README.md" else text
    text = re.sub(r"^```\n.*?^```", "", text, flags=re.M | re.S)
    assert set(re.findall(r"[+-]?\d+\.\d\d+|[+-]\d+\.\d", text)) <= NOT_OF_RUNS


SHAPES = ("shuffle", "statistics", "kinds")


def comparisons(name, encoder):
    """The differences of a question of the laboratory on an encoder, with their corrected p."""
    return [d for (_, e), d in lab.asked(name).items() if e == encoder]


@pytest.mark.parametrize("encoder", lab.ENCODERS)
@pytest.mark.slow(but=1)
def test_what_the_laboratory_says_of_both_encoders_holds(encoder):
    assert not any(shown(d) for d, _ in comparisons("halves", encoder))
    assert all(p > 0.05 for name in SHAPES for _, p in comparisons(name, encoder))
    assert all(d.high < 0 and p < 0.05 for d, p in comparisons("soft", encoder)[1:])  # vicreg, sigreg
    assert len(lab.systems(encoder)) == 17 and len(lab.runs()) == 170


def test_what_the_laboratory_says_of_one_encoder_holds():
    old, new = lab.ENCODERS
    assert all(d.low > 0 for d, _ in comparisons("views", old))
    assert all(d.high < 0 for d, _ in comparisons("views", new))
    assert all(d.high < 0 for d, _ in comparisons("during", old))
    assert not any(shown(d) for d, _ in comparisons("during", new))
    assert [shown(d) for d, _ in comparisons("soft", new)] == [True] * 3
    assert sum(shown(d) for name in SHAPES for d, _ in comparisons(name, old)) == 1
    assert not any(shown(d) for name in SHAPES for d, _ in comparisons(name, new))
    assert lab.helped() == ["`whitenedcse` minus `group`"]


def test_what_the_laboratory_says_of_classification_holds():
    answers = lab.asked("classification")
    after = {key: value for key, value in answers.items() if key[0] >= len(lab.QUESTIONS["halves"])}
    assert all(p > 0.05 for key, (_, p) in answers.items() if key not in after)
    assert len(answers) == 9 and len(after) == 6
    assert [round(d.difference, 1) for d, p in after.values() if p < 0.05] == [-0.3]
    done = {
        encoder: {s for e, s, _ in lab.runs("transfer") if e == encoder and s in lab.CLASSIFIED}
        for encoder in lab.ENCODERS
    }
    assert list(done.values()) == [set(lab.CLASSIFIED) - {"official"}, {"simcse", "sgw"}]


def test_what_the_laboratory_says_of_means_and_of_whitening_afterwards_holds():
    old, new = lab.ENCODERS
    before = {e: [lab.score(lab.untouched(e), row) for row in (lab.AS_IS, lab.AFTER)] for e in lab.ENCODERS}
    means, after = (
        {e: {s: fmean(lab.averages(e, lab.Arm(s, row)).values()) for s in lab.systems(e)} for e in before}
        for row in (lab.AS_IS, lab.AFTER)
    )
    untouched, whitened = before[old]
    assert whitened - untouched > 2 * (max(means[old].values()) - untouched) > 0
    untouched, whitened = before[new]
    assert whitened < untouched and max(means[new], key=means[new].get) == "dropout_whitened"
    assert [s for s, mean in means[new].items() if mean < untouched] == ["sigreg"]
    assert {s for s in means[new] if after[new][s] > means[new][s]} == {"vicreg", "sigreg", "covariance"}


def test_committed_runs_name_no_place_of_the_machine_they_ran_on():
    results, found = Path(lab.__file__).parents[1], {}
    for file in results.rglob("*.json"):
        found[file.name] = file.read_bytes()
    for file in results.rglob("*.tar.xz"):
        with tarfile.open(file) as tar:
            found |= {f"{file.name}:{m.name}": tar.extractfile(m).read() for m in tar if m.isfile()}
    place = re.compile(rb"[\"' ]/(work|home|root|tmp|Users|mnt|data)/")
    assert len(found) > 100 and [name for name, content in found.items() if place.search(content)] == []

"""What evaluate.py leaves is enough to say whether two systems differ, and how surely."""

import json
import math

import numpy as np
import pytest
from report_runs import scored as run
from report_runs import task
from scipy import stats

from whitenedcse.evaluation import statistics
from whitenedcse.evaluation.protocol import Row
from whitenedcse.evaluation.statistics import Source, of_mean, task_draws
from whitenedcse.evaluation.suite import System, evaluated, plan, recorded, seed
from whitenedcse.evaluation.tasks import Labelled
from whitenedcse.report import compare
from whitenedcse.run import Run


def compared(names, draws):
    return compare.compared(names, draws).grids


def cells(grid, task):
    return dict(zip(grid.columns, next(row for row in grid.rows if row[0] == task), strict=True))


def group_values(tmp_path, pattern, task="A"):
    """The scores of the runs that match, and the mean of their bootstrap draws."""
    runs = [Run(path) for path in sorted(tmp_path.glob(pattern)) if path.is_dir()]
    values = [run.results["rows"][0]["sts"]["tasks"][task]["all"] for run in runs]
    sizes = runs[0].items[f"sizes/{task}"].tolist()
    gold, items = runs[0].items[f"gold/{task}"], [run.items[f"0/{task}"] for run in runs]
    return values, np.mean([task_draws(gold, x, sizes, 300, seed(gold))["all"] for x in items], axis=0)


def test_groups_are_tested_by_t_over_seeds_with_the_variance_of_the_pairs(tmp_path):
    same, apart = "", "not paired by seed, as fewer than two seeds are in both"
    cases = [((3, 1, 2), (1, 2, 3), same), ((1, 2, 3), (4, 5), apart)]
    cases += [((1, 2, 3), (4,), apart), ((None, None), (None, None), apart)]
    for case, (seeds, others, note) in enumerate(cases):
        here = tmp_path / str(case)
        for name, numbers, noise in (("a", seeds, 0.3), ("b", others, 0.25)):
            for i, number in enumerate(numbers):
                tasks = {"A": task(60, 0)[:1]}
                folder = run(here / f"{name}-{i}", noise + 0.02 * i, 10 * i + (name == "b"), tasks)
                scores = json.loads((folder / "scores.json").read_text())
                (folder / "scores.json").write_text(json.dumps(scores | {"seed": number}))
        (here / "a-report.html").touch()  # beside jobs of a sweep lie files
        made = compare.compared([str(here / "a-*"), str(here / "b-*")], 300)
        (a, first), (b, second) = (group_values(here, f"{name}-*") for name in "ab")
        assert cells(made.grids[0], "A")["1"] == f"{np.mean(a):.2f} ± {np.std(a, ddof=1):.2f}"
        assert f"({len(a)} runs)" in made.grids[0].notes[0]
        t = {n: stats.t.isf(0.025, n - 1) for n in (2, 3)}
        if note == same:
            by_seed = dict(zip(seeds, a, strict=True)), dict(zip(others, b, strict=True))
            over = t[3] * stats.sem([by_seed[1][number] - by_seed[0][number] for number in seeds])
        elif len(b) == 1:
            over = t[len(a)] * np.std(a, ddof=1) * (1 + 1 / len(a)) ** 0.5
        else:
            over = math.hypot(t[len(a)] * stats.sem(a), t[len(b)] * stats.sem(b))
        half = math.hypot(over, 1.959964 * np.std(second - first))
        (found,) = made.differences
        assert found.test.difference == pytest.approx(np.mean(b) - np.mean(a))
        assert found.test.high - found.test.difference == pytest.approx(half, rel=1e-4)
        low, high = (f"{found.test.difference + sign * half:+.2f}" for sign in (-1, 1))
        assert f"({low} .. {high}, p " in cells(made.grids[0], "A")["2 - 1"]
        assert (f"{here}/b-*: {note}" in made.grids[0].notes) == bool(note)


def test_rows_of_the_same_name_are_compared_with_each_other(tmp_path):
    a = run(tmp_path / "a", 0.2, 0, rows=("raw", "white"))
    b = run(tmp_path / "b", 0.2, 0, rows=("white", "raw", "other"))
    c = run(tmp_path / "c", 0.2, 0, rows=("mine",))
    grids = compared([str(a), str(b)], 20)
    assert [grid.title for grid in grids] == ["raw: Spearman x 100, all", "white: Spearman x 100, all"]
    for grid, numbers in zip(grids, ((0, 1), (1, 0)), strict=True):
        for column, path, number in zip("12", (a, b), numbers, strict=True):
            value = Run(path).scores["rows"][number]["sts"]["tasks"]["A"]["all"]
            assert Run(path).tests(grid.title.partition(":")[0])["A"] == value
            assert cells(grid, "A")[column] == f"{value:.2f}"
    assert [grid.title for grid in compared([str(a), str(c)], 20)] == ["first rows: Spearman x 100, all"]


def test_accuracies_are_compared_on_the_same_texts(tmp_path):
    words = [f"w{i}" for i in range(200)]
    texts = Labelled("MR", (words,), np.arange(200) % 2, ["0", "1"], None)
    agenda = plan({"MR": texts})
    for name, wrong in (("a", 60), ("b", 20)):
        (tmp_path / name).mkdir()
        predicted = np.where(np.arange(200) < wrong, 1 - texts.labels, texts.labels)
        result = evaluated(System(np.ones((200, 3))), agenda, lambda *_, p=predicted: (p, 50.0), 20)
        facts = {"model": "m", "pooling": "own", "headline": "all", "protocol": "simcse"}
        facts |= {"classifier": {"a": "lbfgs", "b": "senteval"}[name], "case": "lower", "bf16": False}
        facts |= {"max_length": 64} if name == "b" else {}  # not known of the other
        Run(tmp_path / name).end(*recorded(facts, [Row("x")], [result], agenda))
    (grid,) = compared([str(tmp_path / "a"), str(tmp_path / "b")], 300)
    line = cells(grid, "MR")
    assert (line["1"], line["2"]) == ("70.00", "90.00")
    difference, _, p = line["2 - 1"].partition(", p ")
    assert difference.startswith("+20.00 (") and float(p.rstrip(")")) < 0.01
    assert grid.title == "x: accuracy x 100"
    assert [note for note in grid.notes if "not the same" in note] == [
        "classifier is not the same in all: lbfgs, senteval"
    ]
    items = dict(Run(tmp_path / "b").items)
    labels = items.pop("gold/MR")
    assert labels.tolist() == texts.labels.tolist()
    np.savez(tmp_path / "b" / "items.npz", **items, **{"gold/MR": 1 - labels})
    with pytest.raises(ValueError, match="a, .*b share no task of the same pairs and aggregation"):
        compared([str(tmp_path / "a"), str(tmp_path / "b")], 20)


def test_averages_are_over_the_tasks_that_all_have_and_differences_from_the_first(tmp_path):
    tasks = {"A": task(150, 0)[:1], "B": task(80, 1)}
    a = run(tmp_path / "a", 0.2, 0, tasks)
    b = run(tmp_path / "b", 0.4, 1, tasks | {name: task(60, 2) for name in "CDEFGH"})
    (grid,) = compared([str(a), str(b), str(a)], 50)
    assert [row[0] for row in grid.rows] == ["A", "B", "average"]
    assert "left out, as not all have a score of the same data: C, D, E, F, G, H" in grid.notes
    scores = [[Run(path).scores["rows"][0]["sts"]["tasks"][name]["all"] for name in "AB"] for path in (a, b)]
    for name, one, other in zip(("A", "B", "average"), *([*x, np.mean(x)] for x in scores), strict=True):
        line = cells(grid, name)
        assert (line["1"], line["2"], line["3"]) == (f"{one:.2f}", f"{other:.2f}", f"{one:.2f}")
        assert line["2 - 1"].startswith(f"{other - one:+.2f} (")
        assert line["3 - 1"] == "+0.00 (+0.00 .. +0.00, p 1)"


def test_the_rows_of_one_run_are_compared_with_its_first(tmp_path):
    a = run(tmp_path / "a", 0.2, 0, rows=("as it is", "whitened (s3://x)"))
    (grid,) = compared([str(a)], 20)
    assert grid.title.startswith("rows: ")
    assert [note.partition(": ")[2] for note in grid.notes[:2]] == ["as it is", "whitened (s3://x)"]
    scores = [row["sts"]["tasks"]["A"]["all"] for row in Run(a).results["rows"]]
    shown = [float(cells(grid, "A")[i].split()[0]) for i in ("1", "2", "2 - 1")]
    assert shown == pytest.approx([*scores, scores[1] - scores[0]], abs=0.01) and abs(shown[2]) > 1


def test_a_row_is_found_by_its_name_or_by_a_beginning_that_no_other_has(tmp_path):
    one = Run(run(tmp_path / "a", 0.2, 0, rows=("as it is", "zca", "zca (x)")))
    assert [one.row(name)[0] for name in (None, "as", "zca", "zca (")] == [0, 0, 1, 2]
    for name, count in (("z", 2), ("no", 0)):
        with pytest.raises(
            ValueError, match=f"{count} rows of test scores that begin with '{name}'; it has as"
        ):
            one.row(name)


def test_what_cannot_be_compared_is_refused(tmp_path):
    a = run(tmp_path / "a", 0.2, 0)
    b = run(tmp_path / "b", 0.2, 0, tasks={"A": task(150, 5)[:1], "B": task(80, 1)})
    c = run(tmp_path / "c", 0.2, 0, head="wmean")
    (grid,) = compared([str(a), str(b)], 20)
    assert [row[0] for row in grid.rows] == ["B"]
    assert "left out, as not all have a score of the same data: A" in grid.notes
    with pytest.raises(ValueError, match="share no task of .* aggregation"):
        compared([str(a), str(c)], 20)
    run(tmp_path / "twice-a", 0.2, 7), run(tmp_path / "twice-b", 0.2, 7)
    with pytest.raises(ValueError, match="two runs of seed 7, .*twice-a and .*twice-b; a pattern is one"):
        compared([str(tmp_path / "twice-*")], 20)
    with pytest.raises(ValueError, match="is one row of scores; name two runs"):
        compared([str(a)], 20)


def test_a_verdict_says_which_is_better_by_how_much_and_with_how_many_seeds_it_would_be_shown(tmp_path):
    for i in range(4):
        run(tmp_path / f"good-{i}", 0.2, i), run(tmp_path / f"bad-{i}", 0.6, i)
        run(tmp_path / f"same-{i}", 0.2 + 0.02 * (i % 2), i + 10)
    made = compare.compared([str(tmp_path / f"{name}-*") for name in ("bad", "good")], 100)
    (line,) = made.verdict
    test = made.differences[0].test
    assert line.startswith(f"better than {tmp_path}/bad-* by average Spearman x 100: ")
    assert f"good-* {test.difference:+.2f} ({test.low:+.2f} .. {test.high:+.2f}, p " in line
    (line,) = compare.compared([str(tmp_path / "good-0"), str(tmp_path / "same-0")], 100).verdict
    assert line.startswith("not shown to differ") and line.endswith("as by seed=1,2,3,4,5")
    for name in ("good-0", "same-0"):
        scores = tmp_path / name / "scores.json"
        scores.write_text(json.dumps(json.loads(scores.read_text()) | {"seed": None}))
    (line,) = compare.compared([str(tmp_path / "good-0"), str(tmp_path / "same-0")], 100).verdict
    assert line.startswith("not shown to differ") and line.endswith(", as far as these pairs or texts tell")


def test_as_many_seeds_are_proposed_as_show_the_difference_in_four_of_five_studies():
    rng = np.random.default_rng(0)
    apart = np.array([-1.0, 0.0, 1.0, 2.0, 3.0])  # mean 1, sd 1.58
    n = compare.seeds_needed(apart)
    drawn = rng.normal(apart.mean(), apart.std(ddof=1), (4000, n))
    shown = stats.ttest_1samp(drawn, 0, axis=1).pvalue < 0.05
    assert 0.77 < shown.mean() < 0.86
    assert compare.seeds_needed(apart, tests=10) > n and compare.seeds_needed([-1.0, 1.0]) is None


def test_no_more_seeds_are_proposed_where_the_chance_in_the_pairs_hides_the_difference():
    apart = [-1.0, 0.0, 1.0, 2.0, 3.0]  # mean 1, sd 1.58
    both = dict(enumerate(apart)), dict.fromkeys(range(5), 0.0)
    for over_pairs, said in ((0.0, "about 22 would"), (0.04, "about 31 would"), (0.25, "999 would not")):
        sources = [of_mean(apart), Source(over_pairs, math.inf)]
        d = compare.Difference("b", statistics.tested(1.0, sources), 0.3, both)
        assert compare.lacking_seeds(d, 1) == f"with 5 seeds; {said} show a difference of this size"

"""A sweep's table says what scipy says of the same scores, whatever the order and the names of the runs."""

import csv
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from report_runs import SCORES, swept, trained
from scipy import stats

from whitenedcse.app import cli
from whitenedcse.report import charts, compare, sweep


def table(folders, against=None):
    return compare.comparison(sweep.gathered(sweep.runs(folders)), against).grids


def row(grid, label):
    columns = [name.partition(" (")[0] if name.startswith("difference (") else name for name in grid.columns]
    return dict(zip(columns, next(line for line in grid.rows if line[0] == label), strict=True))


def naive_holm(p):
    """The step-down rule, one p after the other from the smallest."""
    corrected, largest = {}, 0.0
    for rank, (mine, i) in enumerate(sorted(zip(p, range(len(p)), strict=True))):
        largest = max(largest, (len(p) - rank) * mine)
        corrected[i] = min(1.0, largest)
    return [corrected[i] for i in range(len(p))]


@pytest.mark.parametrize(("tests", "which"), [(True, 1), (False, 0)])
def test_differences_are_paired_by_seed_and_tested_as_scipy_tests_them(tmp_path, tests, which):
    grid = table([swept(tmp_path / "s", tests)])[0]
    first, others = SCORES["simcse"], {name: SCORES[name] for name in ("group", "whitenedcse")}
    pairs = {n: [(s[k][which], first[k][which]) for k in s if k in first] for n, s in others.items()}
    p = [stats.ttest_rel(*zip(*pairs[name], strict=True)).pvalue for name in others]
    assert p[0] != p[1] and [len(pairs[name]) for name in others] == [4, 3]
    for name, corrected in zip(others, naive_holm(p), strict=True):
        d = [a - b for a, b in pairs[name]]
        low, high = stats.t.interval(0.95, len(d) - 1, loc=np.mean(d), scale=stats.sem(d))
        shown = row(grid, name)
        assert shown["difference"] == f"{np.mean(d):+.2f}"
        assert shown["95 % interval"] == f"{low:+.2f} .. {high:+.2f}"
        assert shown["p (Holm)"] == f"{corrected:.2g}"
    assert row(grid, "simcse")["difference"] == ""
    assert f"difference ({'test average' if tests else 'dev best'})" in grid.columns
    assert "whitenedcse: paired by the 3 seeds that are in both" in grid.notes


def test_one_pair_of_seeds_has_a_difference_and_the_reason_for_no_test(tmp_path):
    for number, (system, best) in enumerate([("simcse", 61.0), ("group", 62.5), ("zca", 60.25)]):
        trained(tmp_path / str(number), 1, best, None, system, views=number + 2)
    (grid, *_) = table([tmp_path])
    assert [line[-3:] for line in grid.rows] == [["", "", ""], ["+1.50", "-", "-"], ["-0.75", "-", "-"]]
    assert "group: one run each, which says nothing of other seeds" in grid.notes


def test_means_and_spreads_are_those_of_numpy_for_every_row_of_the_tests(tmp_path):
    made = compare.comparison(sweep.gathered(sweep.runs([swept(tmp_path / "s")])))
    grid, before, space, tasks, by_task = made.grids
    for name, by_seed in SCORES.items():
        dev, average = np.array(list(by_seed.values())).T
        sd = average.std(ddof=1)
        assert row(grid, name)["seeds"] == "4"
        assert row(grid, name)["dev before"] == f"{(dev - 9).mean():.2f} ± {dev.std(ddof=1):.2f}"
        assert row(grid, name)["dev best"] == f"{dev.mean():.2f} ± {dev.std(ddof=1):.2f}"
        assert row(grid, name)["test average"] == f"{average.mean():.2f} ± {sd:.2f}"
        assert row(grid, name)["whitened (target)"] == f"{average.mean() + 2:.2f} ± {sd:.2f}"
        assert row(tasks, name)["STS12"] == f"{average.mean() - 1.5:.2f} ± {sd:.2f}"
        assert row(tasks, name)["STS-B"] == f"{average.mean() + 1.5:.2f} ± {sd:.2f}"
        align, uniform = 0.2 + dev / 1e3, -2 - dev / 1e2
        assert row(space, name)["alignment"] == f"{align.mean():.3f} ± {align.std(ddof=1):.3f}"
        assert row(space, name)["uniformity"] == f"{uniform.mean():.3f} ± {uniform.std(ddof=1):.3f}"
        assert row(space, name)["sentences/s (median)"] == f"{np.median(400 + dev):,.0f}"
    first = dict(zip(before.columns, before.rows[0], strict=True))
    dev = np.array([best - 9 for by in SCORES.values() for best, _ in by.values()])
    assert first["as it is"] == f"{dev.mean():.2f} ± {dev.std(ddof=1):.2f}"
    assert (first["whitened (dev)"], first["whitened (training)"]) == ("62.00 ± 0.00", "59.50 ± 0.00")
    assert row(before, "group")["whitened (dev)"] == "64.00 ± 0.00"  # the best k at the best checkpoint
    assert [*before.best] == [1, 2, 3]  # each of its columns has its highest number in bold
    pairs = [(SCORES["group"][s][1], SCORES["simcse"][s][1]) for s in SCORES["simcse"]]
    p = stats.ttest_rel(*zip(*pairs, strict=True)).pvalue
    assert row(by_task, "group")["STS12"] == f"{np.mean([a - b for a, b in pairs]):+.2f} (p {p:.2g})"
    better, rest = made.verdict  # over corrected p, with the seeds that would show what is not shown
    assert better.startswith("better than simcse by test average (all): whitenedcse +3.20 (")
    assert rest.startswith("not shown to differ from simcse by test average (all): group +1.02 (")
    assert "with 4 seeds; about " in rest


def test_an_untouched_encoder_counts_once_for_all_groups(tmp_path):
    for number, (system, seed) in enumerate(itertools.product(("simcse", "group"), (1, 2))):
        trained(tmp_path / str(number), seed, 60.0 + seed, None, system, views=2 + number // 2)
    before = table([tmp_path])[1]
    assert before.rows[0][1] == f"52.50 ± {np.std([52, 53], ddof=1):.2f}"


def noted(folder, **content):
    """The run with digests of what it read, by setting; older runs have none."""
    facts = json.loads((folder / "versions.json").read_text())
    (folder / "versions.json").write_text(json.dumps(facts | {"content": content}))


def test_averages_over_different_tests_are_not_compared(tmp_path):
    said = "in the csv file alone, as not all runs have the same data: as it is: average"
    folder = swept(tmp_path / "s")
    file, *_ = folder.glob("*/scores.json")
    content = json.loads(file.read_text())
    for line in content["rows"]:
        line["sts"]["tasks"]["SICK-R"] = line["sts"]["tasks"]["STS-B"]
    file.write_text(json.dumps(content))
    assert compare.main_score(sweep.gathered(sweep.runs([folder])))[0] == "dev best (all)"
    grid, *others = table([folder])
    assert f"{said}, whitened (target): average" in grid.notes
    assert "difference (dev best)" in grid.columns and "test average" not in grid.columns
    assert others[2].columns == ["", "STS12", "STS-B", "SICK-R"]
    trained(tmp_path / "t" / "untested", 1, 50.0, None, "simcse", views=9)
    assert "difference (dev best)" in table([swept(tmp_path / "t")])[0].columns
    for i in (1, 2):  # tests of one name with other content
        here = trained(tmp_path / "u" / str(i), average=60.0 + i, views=i)
        noted(here, **{"tasks.STS12": str(i), "encoder.path": str(i)})
    grid, *_, tasks, _ = table([tmp_path / "u"])
    assert tasks.columns == ["", "STS-B"] and "test average" not in grid.columns


def test_dev_scores_of_other_pairs_are_not_compared(tmp_path):
    for case, (devs, comparable, tests) in enumerate(
        [
            ([("a.csv", None), ("b.csv", None)], False, True),
            ([("a.csv", "1"), ("b.csv", "1")], True, False),  # a copy
            ([("a.csv", "1"), ("a.csv", "2")], False, False),  # edited between the runs
            ([("a.csv", "1"), ("a.csv", None)], False, True),  # the second may have been another
            ([("a.csv", "1"), ("b.csv", None)], False, False),
            ([(None, None), ("a.csv", "1")], False, True),
        ]
    ):
        here = tmp_path / str(case)
        for (i, (name, digest)), seed in itertools.product(enumerate(devs), (1, 2)):
            average = 60.0 + i + seed / 10 if tests else None
            best = 70.0 + i + seed / 10
            run = trained(here / f"{i}{seed}", seed, best, average, views=i, monitor__dev=name)
            if digest:
                noted(run, **{"monitor.dev": digest})
        grid, *others = table([here])
        note = "in the csv file alone, as not all runs have the same data: dev_before, dev_best, "
        assert any(line.startswith(note) for line in grid.notes) == (not comparable)
        assert ("dev best" in grid.columns) == comparable
        assert ("p (Holm)" in grid.columns) == (comparable or tests)
        (others,) = (other.columns for other in others if "embeddings" in other.title)
        assert others == ["", *["alignment", "uniformity"] * comparable, "sentences/s (median)"]
        found = [title for title, *_ in charts.of_sweep(sweep.gathered(sweep.runs([here])))]
        assert found == ["Dev score", "Alignment and uniformity"] * comparable


def test_runs_on_another_content_of_the_corpus_are_another_group(tmp_path):
    for seed, digest in ((1, "a" * 32), (2, "a" * 32), (3, "b" * 32)):
        trained(tmp_path / str(seed), seed)
        file = tmp_path / str(seed) / "versions.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"corpus": digest}))
    groups = sweep.gathered(sweep.runs([tmp_path])).groups
    assert [(group.label, [*group.runs]) for group in groups] == [
        ("corpus=aaaaaaaa", [1, 2]),
        ("corpus=bbbbbbbb", [3]),
    ]


def test_an_undefined_score_has_its_reason_once(tmp_path):
    for seed in (1, 2):
        file = trained(tmp_path / str(seed), seed, average=50.0) / "scores.json"
        scores = json.loads(file.read_text())
        scores["rows"][1]["sts"]["tasks"]["STS-B"] |= {"all": None, "why": "too few sentences"}
        scores["rows"][1]["sts"]["avg"]["all"] = None
        file.write_text(json.dumps(scores))
    grid = table([tmp_path])[0]
    assert grid.notes.count("whitened (target), STS-B: too few sentences") == 1
    assert not any("as it is, STS-B" in note for note in grid.notes)


def test_rows_are_in_the_order_of_the_directories_and_the_first_is_the_reference(tmp_path):
    folders = sorted(swept(tmp_path / "s").iterdir(), key=lambda path: int(path.name))
    parts = {"simcse": folders[:4], "group": folders[4:8], "whitenedcse": folders[8:]}
    for order in (["simcse", "group", "whitenedcse"], ["whitenedcse", "simcse", "group"]):
        given = [path for system in order for path in parts[system]]
        found = sweep.gathered(sweep.runs(sweep.paths(map(str, [*given, *given[:3]]))))
        assert [run.path for run in found.runs] == given
        for grid in compare.comparison(found).grids:
            labels = [line[0] for line in grid.rows if not line[0].startswith("untouched")]
            assert labels == (order[1:] if "from" in grid.title else order)
        shown = row(compare.comparison(found).grids[0], order[0])
        assert (shown["difference"], shown["seeds"]) == ("", "4")
        assert any(f"from '{order[0]}', paired" in note for note in compare.comparison(found).grids[0].notes)
        sweep.write_csv(found, tmp_path / "s" / "seeds.csv")
        lines = csv.DictReader((tmp_path / "s" / "seeds.csv").read_text().splitlines())
        assert list(dict.fromkeys(line["system"] for line in lines)) == order


def test_against_names_the_group_to_compare_with(tmp_path):
    folder = swept(tmp_path / "s")
    there, back = table([folder])[0], table([folder], "group")[0]
    assert row(back, "group")["difference"] == ""
    assert float(row(back, "simcse")["difference"]) == -float(row(there, "group")["difference"])
    with pytest.raises(ValueError, match="--against 'none' is no group; they are 'simcse', 'group', 'whi"):
        table([folder], "none")


def test_what_a_folder_or_a_pattern_has_is_in_natural_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    swept(tmp_path / "s")
    trained(tmp_path / "a")
    for name in ("s", "s/*"):
        found = sweep.runs(sweep.paths([name, "a"]))
        assert [run.path.name for run in found] == [*map(str, range(12)), "a"]  # 10 and 11 come after 9
    (tmp_path / "a[1]").mkdir()
    assert sweep.paths(["a[1]"]) == [Path("a[1]")]
    for other in ("s/0/wandb/files", "s/evaluated"):  # what a run holds and what evaluate.py left are no runs
        (tmp_path / other).mkdir(parents=True)
        (tmp_path / other / "config.yaml").write_text("monitor: {}\n" if "wandb" in other else "model: x\n")
    assert len(sweep.runs([tmp_path / "s"])) == 12


def test_seeds_csv_has_every_run_with_all_its_digits(tmp_path):
    folder = swept(tmp_path / "s", start=1)
    trained(folder / "0", 6, system="group", finished=False, views=3)
    assert cli.main(["report", str(folder), "--to", "csv"]) == 0
    text = (folder / "seeds.csv").read_text()
    lines = list(csv.DictReader(text.splitlines()))
    assert [line["run"] for line in lines] == [str(i) for i in range(13)]
    expected = [(name, str(s), *pair) for name, by_seed in SCORES.items() for s, pair in by_seed.items()]
    for line, (system, seed, best, average) in zip(lines[1:], expected, strict=True):
        shown = [line[name] for name in ("system", "seed", "finished", "commit")]
        assert shown == [system, seed, "yes", "c0ffee"]
        assert (float(line["dev_best"]), line["dev_best_step"]) == (best, "50")
        assert float(line["as it is: STS12"]) == average - 1.5
        assert float(line["whitened (target): STS-B"]) == average + 3.5
        assert float(line["whitened (target): average"]) == average + 2
        assert float(line["alignment"]) == 0.2 + best / 1e3
        assert float(line["sentences_per_second"]) == 400 + best
        assert line["views"] == str(2 + list(SCORES).index(system)) and line["row"] == system
    shown = [lines[0][name] for name in ("row", "finished", "dev_best", "as it is: STS12")]
    assert shown == ["", "no", "", ""]
    assert list(lines[0])[-2:] == ["commit", "run"]  # though that line has no tests


def test_runs_that_differ_in_seed_name_logger_and_checkpoints_are_one_group(tmp_path):
    trained(tmp_path / "a", 1)
    trained(tmp_path / "b", 2, checkpoint_every=99, force=True, logger={"project": "x"})
    trained(tmp_path / "c", 3, head__whitening__eps=0.2)
    found = sweep.gathered(sweep.runs([tmp_path]))
    groups = [("head.whitening.eps=0.1", [1, 2]), ("head.whitening.eps=0.2", [3])]
    assert [(g.label, list(g.runs)) for g in found.groups] == groups
    assert sweep.differing([*map(sweep.texts, found.runs)]) == ["head.whitening.eps"]


def test_unfinished_runs_and_repeated_seeds_are_named_and_not_counted(tmp_path):
    trained(tmp_path / "s/0", 1, 70.0)
    trained(tmp_path / "s/1", 2, 72.0)
    trained(tmp_path / "s/2", 3, 99.0, finished=False)
    trained(tmp_path / "s/3", 2, 99.0)
    grid = table([tmp_path / "s"])[0]
    assert row(grid, "all runs")["dev best"] == f"71.00 ± {np.std([70, 72], ddof=1):.2f}"
    for begins, run in (("not finished, not counted:", "s/2"), ("seed 2 again, not counted", "s/3")):
        assert any(note.startswith(begins) and note.endswith(f"{run} (all runs)") for note in grid.notes)
    with pytest.raises(ValueError, match="none of 1 runs is finished: .*s/2 has no scores"):
        table([tmp_path / "s/2"])


def test_a_constant_difference_is_not_tested_and_seeds_without_partners_are_not_paired(tmp_path):
    for seed in (1, 2, 3):
        trained(tmp_path / f"a{seed}", seed, 60.0 + seed)
    for seed in (1, 2):
        trained(tmp_path / f"b{seed}", seed, 63.0 + seed, views=2)
    for seed, best in ((1, 66.0), (4, 64.5), (5, 65.5)):
        trained(tmp_path / f"c{seed}", seed, best, views=4)
    grid = table([tmp_path])[0]
    shown = row(grid, "views=2")
    assert [shown[n] for n in ("difference", "95 % interval", "p (Holm)")] == ["+3.00", "+3.00 .. +3.00", "-"]
    half = np.hypot(*(stats.t.isf(0.025, 2) * stats.sem(x) for x in ((61, 62, 63), (66, 64.5, 65.5))))
    shown, apart = row(grid, "views=4"), (66 + 64.5 + 65.5) / 3 - 62
    assert shown["95 % interval"] == f"{apart - half:+.2f} .. {apart + half:+.2f}"
    assert "views=4: not paired by seed, as fewer than two seeds are in both" in grid.notes


def test_the_place_of_a_page_is_made_and_tables_of_any_form_stand_alone_on_the_standard_output(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    trained(tmp_path / "a"), trained(tmp_path / "b", views=2)
    for out, files in {
        "new/folder/": ["new/folder/report.html", "new/folder/seeds.csv"],
        "v1.2": ["v1.2/report.html", "v1.2/seeds.csv"],
        "new/report-page.html": ["new/report-page.html", "new/report-page-seeds.csv"],
    }.items():
        assert cli.main(["report", "a", "b", "--out", out]) == 0
        assert capsys.readouterr().out.endswith("".join(f"written: {file}\n" for file in files))
        assert all(Path(file).is_file() for file in files)
    for form, mark in (("markdown", "| --- |"), ("csv", ",seeds,"), ("latex", r"\toprule")):
        assert cli.main(["report", "a", "b", "--to", form]) == 0
        out, error = capsys.readouterr()
        assert mark in out and "written" not in out and error.count("written: ") == 2
        noted = "says nothing of other seeds"
        assert (noted in error) == (form == "csv") != (noted in out)


def test_a_report_that_cannot_be_made_says_why_in_one_line(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ks/0").mkdir(parents=True)
    (tmp_path / "ks/0/config.yaml").write_text("model: x\n")
    for name in ("run", "torn", "odd"):
        trained(tmp_path / name)
    (tmp_path / "torn/metrics.csv").write_text("step,a\n1,2\n2,x\n")
    (tmp_path / "odd/config.yaml").write_text("a: [")
    for words, message in {
        "gone": "gone: no such directory of runs",
        "ks": "no run of train.py in ks; whitenedcse evaluate compare=[RUN,OTHER] compares runs of",
        "run --against x": "--against 'x': run is one run",
        "WhitenedCSE/T1 --out x.html": "--out and --against are for a report on runs",
        "torn": "torn/metrics.csv is damaged",
        "odd": "odd/config.yaml is damaged (ParserError",
        "run --out run/config.yaml": "[Errno 17] File exists: 'run/config.yaml'",
    }.items():
        assert cli.main(["report", *words.split()]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"error: {message}") and error.count("\n") == 1, error
    assert not list(tmp_path.rglob("report.html"))


def test_a_label_is_what_differs_between_command_lines_without_the_seed_or_else_between_settings(tmp_path):
    grid = []
    for i, (name, lr) in enumerate(itertools.product(("sgw", "zca"), (1, 2))):
        settings = {"views": lr, "head__whitening__eps": i // 2, "system": name}
        grid.append((f"+system={name} optim.lr={lr} hydra/x=y", settings))
    views = [("", {}), ("views=4", {"views": 4}), ("views=5", {"views": 5})]
    cases = [
        (grid, ["sgw, optim.lr=1", "sgw, optim.lr=2", "zca, optim.lr=1", "zca, optim.lr=2"]),
        (views, ["views=3", "views=4", "views=5"]),
        ([("", {}), ("", {"head__whitening__eps": 0.2})], [f"head.whitening.eps={x}" for x in (0.1, 0.2)]),
    ]
    for case, (lines, wanted) in enumerate(cases):
        for i, (words, settings) in enumerate(lines):
            trained(tmp_path / f"{case}/{i}", overrides=[f"seed={i}", *words.split()], **settings)
        found = sweep.gathered(sweep.runs([tmp_path / str(case)]))
        assert [group.label for group in found.groups] == wanted


def test_the_speed_of_a_run_that_shared_its_machine_is_not_shown(tmp_path):
    for i, load in enumerate((1.2, 3.0)):
        trained(tmp_path / "s" / str(i), system=f"s{i}", views=i, series={"train/load": {10: load, 60: load}})
    grid = next(grid for grid in table([tmp_path / "s"]) if "sentences/s (median)" in grid.columns)
    assert [row(grid, f"s{i}")["sentences/s (median)"] for i in (0, 1)] == ["470", "-"]
    assert "1 runs shared their machine with other work: their speed is not shown" in grid.notes
    sweep.write_csv(sweep.gathered(sweep.runs([tmp_path / "s"])), tmp_path / "s/seeds.csv")
    with (tmp_path / "s/seeds.csv").open() as file:
        assert [line["shared"] for line in csv.DictReader(file)] == ["", "yes"]


def test_a_numeric_setting_of_the_command_lines_has_a_curve(tmp_path):
    for i, (lr, k) in enumerate(itertools.product((1, 10, 100), (1, 2))):
        trained(tmp_path / str(i), k, 60.0 + i, None, overrides=[f"optim.lr={lr}", f"seed={k}"], views=lr)
    found = sweep.gathered(sweep.runs([tmp_path]))
    assert "Dev best (all) over optim.lr" in [title for title, *_ in charts.of_sweep(found)]
    _, lines = charts.of_setting(found.groups, "dev_best")
    assert [(x, y) for x, y, _ in lines[""]] == [(1, 60.5), (10, 62.5), (100, 64.5)]

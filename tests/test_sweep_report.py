"""A sweep's table says what scipy says of the same scores, whatever the order and the names of the runs."""

import csv
import itertools
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from scipy import stats

from whitenedcse.app import cli
from whitenedcse.app.config import CONF
from whitenedcse.evaluation.statistics import holm
from whitenedcse.model.whitener import KINDS, WhiteningSettings
from whitenedcse.report import contrasts, page, plots, results, sweep
from whitenedcse.report.conditions import FOLLOWING, idle
from whitenedcse.run import Run
from whitenedcse.run import logged as series

SCORES = {  # by system and seed: dev best, test average; no pattern
    "simcse": {1: (70.1, 66.0), 2: (69.2, 65.1), 3: (71.7, 67.9), 4: (70.9, 66.4)},
    "group": {1: (71.4, 67.3), 2: (70.9, 66.9), 3: (71.9, 67.7), 4: (71.0, 67.6)},
    "whitenedcse": {1: (73.0, 69.5), 2: (72.1, 68.2), 3: (73.3, 70.9), 5: (73.9, 70.0)},
}


def evaluated(average, rows=("as it is", "whitened (target)")):
    """What evaluate.py adds to scores.json: two tasks around an average, each later row 2 better."""
    lines = []
    for i, name in enumerate(rows):
        tasks = {
            task: {"all": average + 2 * i + by, "n": 9} for task, by in (("STS12", -1.5), ("STS-B", 1.5))
        }
        for task in tasks.values():
            task |= {"mean": 0.0, "wmean": 0.0, "interval": dict.fromkeys(("all", "mean", "wmean"))}
        avg = {
            "all": average + 2 * i,
            "mean": 0.0,
            "wmean": 0.0,
            "interval": dict.fromkeys(("all", "mean", "wmean")),
        }
        lines.append({"name": name, "setting": "", "sts": {"tasks": tasks, "avg": avg}})
    return {"protocol": "posthoc", "headline": "all", "rows": lines}


def trained(
    folder,
    seed=1,
    best=70.0,
    average=None,
    system=None,
    finished=True,
    series=None,
    words="",
    overrides=(),
    experiment=None,
    **settings,
):
    """What train.py leaves, evaluated at steps 0, 50 and 100, the best at 50; `settings` by dotted name.

    words: what else its command line has.
    """
    folder.mkdir(parents=True)
    config = {
        "run": folder.name,
        "seed": seed,
        "data": {"corpus": "c.txt", "seed": seed},
        "monitor": {"every": 50},
    }
    config |= {
        "views": 3,
        "logger": {},
        "checkpoint_every": 10,
        "head": {"whitening": {"kind": "group", "eps": 0.1}},
    }
    for name, value in settings.items():
        *above, last = name.split("__")
        node = config
        for part in above:
            node = node[part]
        node[last] = value
    (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    facts = {
        "command": f"train.py seed={seed} {words}",
        **({"overrides": overrides} if overrides else {}),
        "experiment": experiment,
        "seed": seed,
        "system": system,
        "commit": "c0ffee",
    }
    (folder / "versions.json").write_text(json.dumps(facts | {"machine": {"cores": 2, "gpus": []}}))
    columns = {
        "dev/spearman": {0: best - 9, 50: best, 100: best - 1},
        "dev/alignment": {0: 0.05, 50: 0.2 + best / 1e3, 100: 0.3},
        "dev/uniformity": {0: -0.5, 50: -2 - best / 1e2, 100: -2.4},
        "dev/whitened_on_dev_k8": {0: 62.0, 50: 63.0, 100: 68.0},
        "dev/whitened_on_dev_k4": {0: 61.0, 50: 64.0, 100: 60.0},
        "dev/whitened_on_corpus_k8": {0: 59.5, 50: 61.0, 100: 60.0},
        "train/loss": {10: 2.0, 60: 1.0, 90: 0.5},
        "train/lr": {10: 3e-5, 60: 2e-5, 90: 1e-5},
        "train/sentences_per_second": {10: 100.0, 60: 400.0 + best, 90: 900.0},
    } | (series or {})
    metrics(folder, columns)
    values = [{n: column.get(s) for n, column in columns.items() if n.startswith("dev/")} for s in (0, 50)]
    dev = {"before": best - 9, "best": best, "best_step": 50, "last": best - 1, "last_step": 100, "n": 7}
    dev |= {"metric": "dev/spearman", "values_before": values[0], "values_best": values[1]}
    if finished:
        tests = {} if average is None else evaluated(average)
        (folder / "scores.json").write_text(json.dumps({"dev": dev, **tests}))
    return folder


def metrics(folder, columns):
    lines = [{"step": s, name: v} for name, column in columns.items() for s, v in column.items()]
    with (folder / "metrics.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, ["step", *columns], lineterminator="\n")
        table.writeheader()
        table.writerows(sorted(lines, key=lambda line: line["step"]))


def swept(folder, tests=True, start=0):
    """The runs of SCORES as jobs of one sweep, every group with settings of its own."""
    number = itertools.count(start)
    for views, (system, by_seed) in enumerate(SCORES.items(), 2):
        for seed, (best, average) in by_seed.items():
            trained(folder / str(next(number)), seed, best, average if tests else None, system, views=views)
    return folder


def table(folders, against=None):
    return contrasts.comparison(sweep.gathered(sweep.runs(folders)), against)


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
    assert any(note.startswith("whitenedcse: seeds 4, 5 have no partner") for note in grid.notes)


def test_one_pair_of_seeds_has_a_difference_and_the_reason_for_no_test(tmp_path):
    for number, (system, best) in enumerate([("simcse", 61.0), ("group", 62.5), ("zca", 60.25)]):
        trained(tmp_path / str(number), 1, best, None, system, views=number + 2)
    (grid, *_) = table([tmp_path])
    assert [line[-3:] for line in grid.rows] == [["", "", ""], ["+1.50", "-", "-"], ["-0.75", "-", "-"]]
    said = "-: a test needs two seeds or more that both groups have, as by seed=1,2"
    assert [note for note in grid.notes if note.startswith("-")] == [said]


def test_means_and_spreads_are_those_of_numpy_for_every_row_of_the_tests(tmp_path):
    grid, space, tasks = table([swept(tmp_path / "s")])
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


def test_the_score_of_a_single_test_has_no_average_beside_it(tmp_path):
    for seed in (1, 2):
        folder = trained(tmp_path / "s" / str(seed), seed, 70.0, 60.0)
        scores = json.loads((folder / "scores.json").read_text())
        for row in scores["rows"]:
            row["sts"]["tasks"] = {"/my/pairs.tsv": next(iter(row["sts"]["tasks"].values()))}
        (folder / "scores.json").write_text(json.dumps(scores))
    *_, by_task = page.write([str(tmp_path / "s")], None, None)[0]
    assert by_task.title.startswith("tests by task") and by_task.columns == ["", "pairs.tsv"]


def test_a_single_group_has_no_columns_of_differences(tmp_path):
    for seed, best in enumerate((60.0, 62.0)):
        trained(tmp_path / str(seed), seed, best)
    grid = table([tmp_path])[0]
    assert [
        name for name in grid.columns if "difference" in name or "interval" in name or "Holm" in name
    ] == []
    assert {len(line) for line in grid.rows} == {len(grid.columns)} and not any(
        "" in line for line in grid.rows
    )


def test_averages_over_different_tests_are_not_compared(tmp_path):
    folder = swept(tmp_path / "s")
    file, *_ = (tmp_path / "s").glob("*/scores.json")
    content = json.loads(file.read_text())
    for line in content["rows"]:
        line["sts"]["tasks"]["SICK-R"] = line["sts"]["tasks"]["STS-B"]
    file.write_text(json.dumps(content))
    assert contrasts.main_score(sweep.gathered(sweep.runs([folder])).groups)[0] == "dev best (all)"
    assert "not all runs have scores of the same tests: averages differ by these" in table([folder])[0].notes


def with_dev(folder, name, digest=None):
    """The run with dev pairs of this name, of whose content it noted a digest or, as older runs, nothing."""
    config = yaml.safe_load((folder / "config.yaml").read_text())
    config["monitor"]["dev"] = name
    (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    facts = json.loads((folder / "versions.json").read_text())
    facts |= {"content": {"monitor.dev": digest}} if digest else {}
    (folder / "versions.json").write_text(json.dumps(facts))


@pytest.mark.parametrize(
    ("devs", "comparable"),
    [
        ([("a.csv", None), ("a.csv", None)], True),
        ([("a.csv", None), ("b.csv", None)], False),
        ([("a.csv", "1"), ("b.csv", "1")], True),  # a copy
        ([("a.csv", "1"), ("a.csv", "2")], False),  # edited between the runs
        ([("a.csv", "1"), ("a.csv", None)], True),
        ([("a.csv", "1"), ("b.csv", None)], False),
        ([(None, None), ("a.csv", "1")], False),
    ],
)
@pytest.mark.parametrize("tests", [True, False])
def test_dev_scores_of_other_pairs_are_not_compared(tmp_path, devs, comparable, tests):
    for i, (name, digest) in enumerate(devs):
        for seed in (1, 2):
            average = 60.0 + i + seed / 10 if tests else None
            with_dev(
                trained(tmp_path / f"{i}{seed}", seed, 70.0 + i + seed / 10, average, views=i), name, digest
            )
    grid, *others = table([tmp_path])
    note = "not all runs have the same dev set: dev scores and embeddings cannot be compared"
    assert (note in grid.notes) == (not comparable)
    column = grid.columns.index("p (Holm)")
    assert (grid.rows[1][column - 2] == "-") == (not comparable and not tests)
    (others,) = ([grid.title, *grid.columns[2:]] for grid in others if "by task" not in grid.title)
    geometry = ["dev embeddings at the best checkpoint", "alignment", "uniformity"]
    assert others == [*(geometry if comparable else ["speed of training"]), "sentences/s (median)"]
    groups = sweep.gathered(sweep.runs([tmp_path])).groups
    charts = [title for title, *_ in contrasts.of_groups(groups)]
    main = "Test average (all)" if tests else "Dev best (all)"
    shown = {main: comparable or tests, "Dev score": comparable, "Alignment and uniformity": comparable}
    shown[f"{main} against throughput"] = comparable or tests
    assert charts == [title for title, there in shown.items() if there]
    _, (text, *_) = page.write([str(tmp_path)], None, None)
    assert ('class="legend"' in Path(text).read_text()) == (comparable or tests)


def test_tests_of_the_same_name_with_other_content_are_not_compared(tmp_path):
    for i in (1, 2):
        folder = trained(tmp_path / str(i), average=60.0 + i, views=i)
        facts = json.loads((folder / "versions.json").read_text())
        facts["content"] = {"tasks.my.csv": str(i), "encoder.path": str(i)}
        (folder / "versions.json").write_text(json.dumps(facts))
    notes = table([tmp_path])[0].notes
    assert "not all runs have scores of the same tests: averages differ by these" in notes


@pytest.mark.parametrize("tests", [True, False])
def test_tables_and_pictures_say_which_aggregation_they_show(tmp_path, tests):
    folder = swept(tmp_path / "s", tests)
    grid, *_, last = table([folder])
    groups = sweep.gathered(sweep.runs([folder])).groups
    said = [note for note in grid.notes if "Spearman" in note]
    assert said[0] == "dev: Spearman before training and at best, all: all pairs of a task together"
    assert said[1:] == ["tests: Spearman, all: all pairs of a task together"] * tests
    assert last.title == ("tests by task (all), x 100" if tests else "dev embeddings at the best checkpoint")
    name = "test average (all)" if tests else "dev best (all)"
    assert contrasts.main_score(groups)[0] == name
    assert any(note.startswith(f"difference of the {name} from") for note in grid.notes)
    pictures = {title: str(drawing.content) for title, drawing, _ in contrasts.of_groups(groups)}
    assert f"{name}, x 100" in pictures[name[0].upper() + name[1:]]
    assert "Spearman x 100, all" in pictures["Dev score"]


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


def test_the_aggregations_of_runs_by_another_protocol_are_named_too(tmp_path):
    one, other = (trained(tmp_path / name, average=70.0) for name in "ab")
    content = json.loads((other / "scores.json").read_text())
    (other / "scores.json").write_text(json.dumps(content | {"headline": "wmean"}))
    assert results.aggregations([Run(one), Run(other), Run(one)]) == ["all", "wmean"]
    assert results.in_brackets(["all", "wmean"]) == " (all, wmean)"
    assert results.aggregations([Run(trained(tmp_path / "c"))]) == []


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_is_the_step_down_rule(p):
    assert holm(p) == pytest.approx(naive_holm(p), abs=1e-15)


def test_rows_are_in_the_order_of_the_directories_and_the_first_is_the_reference(tmp_path):
    folders = sorted(swept(tmp_path / "s").iterdir(), key=lambda path: int(path.name))
    parts = {"simcse": folders[:4], "group": folders[4:8], "whitenedcse": folders[8:]}
    for order in itertools.permutations(parts):
        given = [path for system in order for path in parts[system]]
        found = sweep.gathered(sweep.runs(sweep.paths(map(str, [*given, *given[:3]]))))
        assert [run.path for run in found.runs] == given
        for grid in contrasts.comparison(found):
            assert [line[0] for line in grid.rows] == list(order)
        shown = row(contrasts.comparison(found)[0], order[0])
        assert (shown["difference"], shown["seeds"]) == ("", "4")
        assert any(f"from '{order[0]}', paired" in note for note in contrasts.comparison(found)[0].notes)
        sweep.write_csv(found, tmp_path / "s" / "seeds.csv")
        lines = csv.DictReader((tmp_path / "s" / "seeds.csv").read_text().splitlines())
        assert list(dict.fromkeys(line["system"] for line in lines)) == list(order)


def test_what_a_folder_or_a_pattern_has_is_in_natural_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    swept(tmp_path / "s")
    trained(tmp_path / "a")
    for name in ("s", "s/*"):
        found = sweep.runs(sweep.paths([name, "a"]))
        assert [run.path.name for run in found] == [*map(str, range(12)), "a"]  # 10 and 11 come after 9


def test_long_labels_are_cut_where_they_stay_different():
    short, long = "loss.form=l2", "head.whitening.kind=shuffled_group, head.whitening.group_width={}"
    assert plots.fitting([short, long.format(8)]) == [short, f"{long[: plots.LONGEST - 1]}…"]
    found = plots.fitting([short, *(long.format(width) for width in (8, 2, 16))])
    assert len(set(found)) == 4 and max(map(len, found)) <= plots.LONGEST
    assert [name[-8:] for name in found[1:]] == ["_width=8", "_width=2", "width=16"]


def test_against_names_the_group_to_compare_with(tmp_path):
    folder = swept(tmp_path / "s")
    there, back = table([folder])[0], table([folder], "group")[0]
    assert row(back, "group")["difference"] == ""
    assert float(row(back, "simcse")["difference"]) == -float(row(there, "group")["difference"])
    with pytest.raises(
        ValueError, match="--against 'none' is no group; they are 'simcse', 'group', 'whitenedcse'"
    ):
        table([folder], "none")


def test_seeds_csv_has_every_run_with_all_its_digits(tmp_path):
    folder = swept(tmp_path / "s", start=1)
    trained(folder / "0", 6, system="group", finished=False, views=3)
    assert cli.main(["report", str(folder), "--to", "csv"]) == 0
    text = (folder / "seeds.csv").read_text()
    lines = list(csv.DictReader(text.splitlines()))
    assert [line["run"] for line in lines] == [str(i) for i in range(13)]
    expected = [(name, str(s), *pair) for name, by_seed in SCORES.items() for s, pair in by_seed.items()]
    for line, (system, seed, best, average) in zip(lines[1:], expected, strict=True):
        assert (line["system"], line["seed"], line["finished"], line["commit"]) == (
            system,
            seed,
            "yes",
            "c0ffee",
        )
        assert (float(line["dev_best"]), line["dev_best_step"]) == (best, "50")
        assert float(line["as it is: STS12"]) == average - 1.5
        assert float(line["whitened (target): STS-B"]) == average + 3.5
        assert float(line["whitened (target): average"]) == average + 2
        assert float(line["alignment"]) == 0.2 + best / 1e3
        assert float(line["sentences_per_second"]) == 400 + best
        assert line["views"] == str(2 + list(SCORES).index(system)) and line["row"] == system
    assert [lines[0][name] for name in ("row", "finished", "dev_best", "as it is: STS12")] == [
        "",
        "no",
        "",
        "",
    ]
    assert list(lines[0])[-2:] == ["commit", "run"]  # though that line has no tests


def test_runs_that_differ_in_seed_name_logger_and_checkpoints_are_one_group(tmp_path):
    trained(tmp_path / "a", 1)
    trained(tmp_path / "b", 2, checkpoint_every=99, logger={"project": "x"})
    trained(tmp_path / "c", 3, head__whitening__eps=0.2)
    found = sweep.gathered(sweep.runs([tmp_path]))
    assert [(g.label, list(g.runs)) for g in found.groups] == [
        ("head.whitening.eps=0.1", [1, 2]),
        ("head.whitening.eps=0.2", [3]),
    ]
    assert found.differing == ["head.whitening.eps"]


@pytest.fixture
def labels(tmp_path):
    """A function from the settings of runs to the labels in their report."""

    def labels(*settings):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        for i, more in enumerate(settings):
            trained(folder / str(i), **more)
        return [group.label for group in sweep.gathered(sweep.runs([folder])).groups]

    return labels


def test_a_label_is_the_system_and_the_settings_that_differ(labels):
    none = {"head__whitening": None}
    assert labels({"system": "a", "views": 2}, {"system": "b", **none}) == ["a", "b"]  # implied by the system
    assert labels({"system": "a"}, {"system": "a", "views": 4}, {"system": "b", **none}) == [
        "a views=3",
        "a views=4",
        "b views=3",
    ]
    assert labels({"system": "a"}, {"system": "a", "views": 4}) == [
        "views=3",
        "views=4",
    ]  # all share the system
    assert labels({}, none) == ["head.whitening=group", "head.whitening=null"]
    assert labels({"checkpoint_every": 1}) == ["all runs"]
    typed = [
        {"head__whitening__kind": kind, "words": f"head.whitening.kind={kind}"} for kind in ("zca", "pca")
    ]
    assert labels(*typed) == ["head.whitening.kind=zca", "head.whitening.kind=pca"]  # as it was typed
    assert labels(*typed, none) == [f"head.whitening={kind}" for kind in ("zca", "pca", "null")]
    assert labels({}, none, {"head__whitening__kind": "zca"}, none | {"views": 2}) == [
        "views=3, head.whitening=group",
        "views=3, head.whitening=null",
        "views=3, head.whitening=zca",
        "views=2, head.whitening=null",
    ]


def test_what_a_command_line_has_is_named_first_and_also_beside_a_system_or_experiment(labels):
    lr = ({"optim": {"lr": 1}}, {"optim": {"lr": 2}})
    assert labels({"system": "a", **lr[0]}, {"system": "b", **lr[1]}) == ["a", "b"]
    typed = {"system": "b", "words": "optim.lr=2", **lr[1]}
    assert labels({"system": "a", **lr[0]}, typed) == ["a optim.lr=1", "b optim.lr=2"]
    typed |= {"words": "+optim.lr=2 x=y", "system": "a", "views": 4}
    assert labels({"system": "a", **lr[0]}, typed) == ["optim.lr=1, views=3", "optim.lr=2, views=4"]
    one, other = ({"system": name, "experiment": name.upper(), **lr[name == "b"]} for name in "ab")
    assert labels(one, other) == ["A a", "B b"]
    assert labels(one, other | {"system": "a"}) == ["A a", "B a"]
    assert labels({"experiment": "A"}, {"experiment": "A", "system": "a", "views": 2}) == ["A", "a"]


def test_a_run_without_experiment_beside_one_with_is_named_by_its_encoder_not_by_quotes(labels):
    bert = {"encoder": {"path": "models/minilm"}, "monitor": {"every": 125}}
    python = {"encoder": {"path": "models/minilm"}, "overrides": ["data='file'", "monitor.dev='d.csv'"]}
    command = {"experiment": "bert_base with minilm", "overrides": ["data=file", "monitor.dev=d.csv"], **bert}
    assert labels(command, python) == ["bert_base with minilm", "minilm"]
    assert labels(command, {}) == ["bert_base with minilm", "encoder=small"]
    assert labels(python) == ["all runs"] and labels(command) == ["bert_base with minilm"]


def test_accuracies_beside_correlations_are_told_apart(tmp_path):
    folder = trained(tmp_path / "a", 1, 70.0, 75.0)
    scores = json.loads((folder / "scores.json").read_text())
    scores["rows"][0]["transfer"] = {"tasks": {"MR": {"accuracy": 90.0}}, "avg": 90.0}
    (folder / "scores.json").write_text(json.dumps(scores))
    grid = table([tmp_path])[-1]
    named = dict(zip(grid.columns, grid.rows[0], strict=True))
    assert (named["MR (accuracy)"], named["STS-B (Spearman)"]) == ("90.00", "76.50")
    assert named["average (Spearman)"] == "75.00"


def test_words_that_all_command_lines_have_do_not_make_what_a_system_implies_a_part_of_the_label(labels):
    one, two = (
        {"system": s, "data": {"passes": n}, "words": "data=file x=1"} for s, n in (("a", 2), ("b", 3))
    )
    assert labels(one, two) == ["a", "b"]
    two["words"] = "data=other x=1"
    assert labels(one, two) == ["a data=file", "b data=other"]  # from which the passes follow


def test_what_follows_from_typed_settings_is_not_named(labels):
    def run(views, head, lr=1.0, every=50):
        head_settings = {"_target_": "x.Head", "whitening": {"kind": head} if head != "identity" else None}
        settings = {"views": views, "data": {"passes": views}, "monitor": {"every": every}}
        return settings | {
            "optim": {"lr": lr},
            "head": head_settings,
            "words": f"data=file head={head} views={views}",
        }

    pairs = list(itertools.product(("group", "identity"), (2, 3)))
    every = [run(views, head) for head, views in pairs]
    assert labels(*every) == [f"head={head}, views={views}" for head, views in pairs]
    other = run(3, "group", lr=2.0)
    assert labels(run(2, "group"), other) == ["views=2, optim.lr=1.0", "views=3, optim.lr=2.0"]
    typed = run(3, "group") | {"words": "data=file head=group views=3 data.passes=3"}
    assert labels(run(2, "group"), typed) == ["data.passes=2, views=2", "data.passes=3, views=3"]
    unlike = [run(2, "group"), run(3, "group"), run(3, "group", every=9)]  # which views do not tell
    assert labels(*unlike) == [f"views={v}, monitor.every={n}" for v, n in ((2, 50), (3, 50), (3, 9))]


def test_jobs_of_a_sweep_are_named_by_their_own_settings(labels):
    def job(head, views):
        settings = {
            "views": views,
            "data": {"passes": views},
            "head": {"_target_": "x", "dense": head == "a"},
        }
        quoted = f"head='{head}'" if views == 2 else f"head={head}"  # as by whitenedcse.train
        return settings | {"words": "-m head=a,b views=2,3", "overrides": [quoted, f"views={views}"]}

    pairs = list(itertools.product("ab", (2, 3)))
    assert labels(*(job(*pair) for pair in pairs)) == [f"head={head}, views={v}" for head, v in pairs]


@pytest.mark.parametrize("name", FOLLOWING)
def test_what_may_follow_others_is_written_so_in_some_option(name):
    group, _, key = name.partition(".")
    files = [*(CONF / group).glob("*.yaml"), *(CONF / "encoder").glob("*.yaml")]
    contents = [OmegaConf.to_container(OmegaConf.load(file)) for file in files]
    values = [content.get(key) or (content.get(group) or {}).get(key) for content in contents]
    assert any("${" in str(value) for value in values)


def test_a_class_stands_for_the_settings_that_only_it_has_unless_a_command_line_has_them(labels):
    small, large = {"_target_": "x.small", "width": 8}, {"_target_": "x.large", "path": "p"}
    assert labels({"loss": small}, {"loss": large}) == ["loss=small", "loss=large"]
    assert labels({"loss": small | {"lr": 1}}, {"loss": large | {"lr": 2}}) == [
        "loss=small, loss.lr=1",
        "loss=large, loss.lr=2",
    ]
    assert labels({"loss": small}, {"loss": large, "words": "loss=large loss.path=p"}) == [
        "loss=small",
        "loss=large, loss.path=p",
    ]
    assert labels({"loss": small}, {"loss": small | {"path": "p"}}) == ["no loss.path", "loss.path=p"]
    assert labels({"terms": {}}, {"terms": {"a": small}}) == ["no terms.a", "terms.a=small"]


def test_a_number_of_settings_that_are_not_named_tells_no_groups_apart():
    def group(value, loss, words=""):
        settings = {f"s{i}": value for i in range(sweep.FEW)} | {"loss": loss}
        return SimpleNamespace(settings=settings, facts={"command": words})

    words = " ".join(f"s{i}=0" for i in range(sweep.FEW)) + " loss.p=1"
    one, other = group(0, {"_target_": "m.D", "p": 1}, words), group(0, {"_target_": "m.E"})
    found = sweep.labels([one, other, group(1, {"_target_": "m.E"})])
    shown = "s0={0}, s1={0}, s2={0}, s3={0}, loss={1}".format
    assert found == [shown(0, "D") + ", and 1 more", shown(0, "E"), shown(1, "E")]


def whitened(**settings):
    return {"head": {"whitening": {"kind": "group", "group_width": 2} | settings}}


def test_a_label_names_no_setting_that_others_leave_without_effect(labels):
    all_channels = [whitened(kind=kind, group_width=i) for i, kind in enumerate(("pca", "zca"))]
    assert labels(*all_channels) == ["head.whitening=pca", "head.whitening=zca"]
    assert labels(whitened(kind="zca", group_width=8), {"views": 2, **whitened(kind="zca")}) == [
        "views=3",
        "views=2",
    ]
    mlm = [
        {"mlm": {"weight": weight, "probability": p}} for weight, p in ((0.0, 0.1), (0.0, 0.2), (1.0, 0.3))
    ]
    assert labels(mlm[0], mlm[2]) == ["mlm.weight=0.0", "mlm.weight=1.0, mlm.probability=0.3"]
    assert labels(*mlm[:2]) == ["all runs"]  # the same run twice
    newton = [whitened(transform=name, iterations=5) for name in ("zca", "iterative")]
    assert labels(*newton) == [
        "head.whitening.transform=zca",
        "head.whitening.transform=iterative, head.whitening.iterations=5",
    ]
    slices = [whitened(partition=name, slice=n) for name, n in (("view", None), ("slices", 4))]
    assert labels(*slices) == [
        "head.whitening.partition=view",
        "head.whitening.partition=slices, head.whitening.slice=4",
    ]
    adapters = [{"encoder": {"lora": {"r": r, "alpha": alpha}}} for r, alpha in ((0, 1), (0, 2), (4, 3))]
    assert labels(*adapters) == ["encoder.lora.r=0", "encoder.lora.r=4, encoder.lora.alpha=3"]
    assert len(labels({}, {"system": "a"}, {"system": "b", "views": 2})) == 2  # equal but for a name
    several = [{"trainer": {"devices": n, "num_nodes": n, "timeout": n}} for n in (1, 2)]
    assert labels(*several) == ["all runs"]  # the same numbers
    assert labels(*({**each, "gather": False} for each in several)) == [
        "trainer.devices=1, trainer.num_nodes=1",
        "trainer.devices=2, trainer.num_nodes=2",
    ]
    places = [{"head": {"position": place, "whitening": None}} for place in ("before", "after")]
    assert labels(*places) == ["all runs"]


def test_what_some_runs_lack_is_named_last_unless_a_command_line_has_it(labels):
    more = {"a": 1, "optim": {"b": 2, "lr": 3}}
    assert labels({"optim": {"lr": 4}}, more) == [
        "optim.lr=4, no a, no optim.b",
        "optim.lr=3, a=1, optim.b=2",
    ]
    assert labels({"optim": {"lr": 4}}, more | {"words": "+optim.b=2"}) == [
        "no optim.b, optim.lr=4, no a",
        "optim.b=2, optim.lr=3, a=1",
    ]


def test_runs_that_differ_only_in_what_is_not_read_are_one_group(tmp_path):
    for i in range(3):
        trained(tmp_path / str(i), i, **whitened(kind="zca", group_width=i))
    (group,) = sweep.gathered(sweep.runs([tmp_path])).groups
    assert list(group.runs) == [0, 1, 2]


@pytest.mark.parametrize("kind", KINDS)
def test_a_width_of_groups_is_read_unless_it_is_idle(kind):
    left = idle({"head.whitening.kind": kind})
    read = WhiteningSettings(kind=kind, group_width=3).width(24) == 3
    assert ("head.whitening.group_width" in left) != read


def test_a_label_names_the_first_settings_that_differ_and_counts_the_others(labels, tmp_path):
    many = [{f"a{k}": k * (k < 5 or i) for k in range(1, 8)} | {"b": i, "c": 1 - i} for i in range(2)]
    assert labels(*many) == ["a5=0, a6=0, a7=0, b=0, and 1 more", "a5=5, a6=6, a7=7, b=1, and 1 more"]
    folder = tmp_path / "0"
    (grid, *_), _ = page.write([str(folder)], None, None)
    assert any("the csv file of the seeds has all settings that differ" in note for note in grid.notes)
    table = list(csv.DictReader((folder / "seeds.csv").read_text().splitlines()))
    assert [line["c"] for line in table] == ["1", "0"] and {"a5", "a6", "a7", "b"} <= table[0].keys()
    (grid, *_), _ = page.write([str(swept(tmp_path / "few"))], None, None)
    assert not any("csv file" in note for note in grid.notes)


def test_a_label_names_what_its_own_run_was_given_before_what_others_were(labels):
    usual = {f"a{k}": 0 for k in range(1, 7)}
    one = usual | {f"a{k}": 1 for k in range(1, 6)}
    others = [one | {"overrides": [f"a{k}=1" for k in range(1, 6)]}]
    others += [usual | {"a6": 1, "overrides": ["a6=1"]}]
    assert labels(*others) == ["a1=1, a2=1, a3=1, a4=1, and 2 more", "a1=0, a2=0, a3=0, a6=1, and 2 more"]


@given(st.lists(st.tuples(*[st.integers(0, 1)] * 7), min_size=2, max_size=6, unique=True))
def test_no_two_labels_are_equal_and_none_leaves_a_setting_out_silently(rows):
    names = [f"s{k}" for k in range(7)]
    firsts = [SimpleNamespace(settings=dict(zip(names, row, strict=True)), facts={}) for row in rows]
    differing = [
        name for name, column in zip(names, zip(*rows, strict=True), strict=True) if len({*column}) > 1
    ]
    found = sweep.labels(firsts)
    assert len(set(found)) == len(rows)
    for label, row in zip(found, rows, strict=True):
        *named, last = label.split(", ")
        more = int(last.split()[1]) if last.endswith(" more") else 0
        named += [last] * (not more)
        values = dict(zip(names, row, strict=True))
        assert named == [f"{name}={values[name]}" for name in differing if f"{name}={values[name]}" in named]
        assert named[: sweep.FEW] == [f"{name}={values[name]}" for name in differing[: sweep.FEW]]
        assert len(named) + more == len(differing)


def test_unfinished_runs_and_repeated_seeds_are_named_and_not_counted(tmp_path):
    trained(tmp_path / "s/0", 1, 70.0)
    trained(tmp_path / "s/1", 2, 72.0)
    trained(tmp_path / "s/2", 3, 99.0, finished=False)
    trained(tmp_path / "s/3", 2, 99.0)
    grid = table([tmp_path / "s"])[0]
    assert row(grid, "all runs")["dev best"] == f"71.00 ± {np.std([70, 72], ddof=1):.2f}"
    assert any(
        note.startswith("not finished, not counted:") and note.endswith("s/2 (all runs)")
        for note in grid.notes
    )
    assert any(note.startswith("seed 2 of all runs again") and note.endswith("s/3") for note in grid.notes)
    with pytest.raises(ValueError, match="none of 1 runs is finished: .*s/2 has no scores"):
        table([tmp_path / "s/2"])


@pytest.mark.parametrize(
    ("seeds", "expected"), [((1, 4), ("+3.00", "-", "-")), ((1, 2), ("+3.00", "+3.00 .. +3.00", "-"))]
)
def test_one_common_seed_and_a_constant_difference_are_not_tested(tmp_path, seeds, expected):
    for seed in (1, 2):
        trained(tmp_path / f"a{seed}", seed, 60.0 + seed)
    for seed in seeds:
        trained(tmp_path / f"b{seed}", seed, 63.0 + seed, views=2)
    shown = row(table([tmp_path])[0], "views=2")
    assert (shown["difference"], shown["95 % interval"], shown["p (Holm)"]) == expected


def test_what_a_run_holds_and_what_evaluate_left_are_no_runs(tmp_path):
    trained(tmp_path / "s/0")
    (tmp_path / "s/0/wandb/files").mkdir(parents=True)
    (tmp_path / "s/0/wandb/files/config.yaml").write_text("monitor: {}\n")
    (tmp_path / "s/evaluated").mkdir()
    (tmp_path / "s/evaluated/config.yaml").write_text("model: x\n")
    assert [run.path for run in sweep.runs([tmp_path / "s"])] == [tmp_path / "s/0"]


def test_a_series_is_the_finite_values_of_whole_lines(tmp_path):
    file = tmp_path / "metrics.csv"
    file.write_text("step,a,b\n0,1.5,\n10,nan,2\n20,3.5,inf\n30,9")
    found = series(file)
    assert {name: (s.steps.tolist(), s.values.tolist()) for name, s in found.items()} == {
        "a": ([0, 20], [1.5, 3.5]),
        "b": ([10], [2.0]),
    }
    assert series(tmp_path / "none.csv") == {}


@pytest.mark.parametrize(
    ("out", "files"),
    [
        ("new/folder/", ["new/folder/report.html", "new/folder/seeds.csv"]),
        ("new", ["new/report.html", "new/seeds.csv"]),
        ("v1.2", ["v1.2/report.html", "v1.2/seeds.csv"]),
        ("new/page.html", ["new/page.html", "new/page-seeds.csv"]),
        ("page.htm", ["page.htm", "page-seeds.csv"]),
    ],
)
def test_the_place_of_a_page_is_made(out, files, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    trained(tmp_path / "a"), trained(tmp_path / "b", 2)
    assert cli.main(["report", "a", "b", "--out", out]) == 0
    assert capsys.readouterr().out.endswith("".join(f"written: {file}\n" for file in files))
    assert all(Path(file).is_file() for file in files)


def test_a_pattern_leaves_out_what_a_folder_leaves_out(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "c/0", "c/1"):
        trained(tmp_path / "outputs" / name)
    (tmp_path / "outputs/b").mkdir()
    (tmp_path / "outputs/b/config.yaml").write_text("model: x\n")  # a run of evaluate.py
    (tmp_path / "outputs/d").mkdir()
    found = [run.path for run in sweep.runs(sweep.paths(["outputs/*"]))]
    assert found == [run.path for run in sweep.runs(sweep.paths(["outputs"]))]
    assert len(found) == 3
    assert cli.main(["report", "outputs/*"]) == 0
    note = "left out, of evaluate.py: outputs/b; whitenedcse evaluate compare=[outputs/b,OTHER] compares such"
    assert note in capsys.readouterr().out.replace("\n", " ")
    with pytest.raises(ValueError, match="b is a run of evaluate.py"):
        sweep.runs(sweep.paths(["outputs/[b]"]))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["gone"], "gone is no directory, nor a published table (--list names them)"),
        (
            ["WhitenedCSE/T1", "gone"],
            "WhitenedCSE/T1 is a published table and stands alone; --runs gone puts",
        ),
        (["empty"], "no run of train.py in empty"),
        (["run", "scored"], "scored is a run of evaluate.py; whitenedcse evaluate compare=[scored,OTHER] s"),
        (["ks"], "ks/0 is a run of evaluate.py; whitenedcse evaluate compare=[ks/0,OTHER] s"),
        (["run", "--against", "x"], "--against 'x': run is one run"),
        (["run", "--runs", "run"], "--runs and --as go with a published table"),
        (["WhitenedCSE/T1", "--out", "x"], "--out and --against are for runs"),
        (["torn"], "torn/metrics.csv:3: not a step and numbers by column"),
        (["scoreless"], "scoreless/scores.json is not JSON"),
        (["odd"], "odd/config.yaml is damaged (ParserError"),
        (["run", "--out", "run/config.yaml"], "[Errno 17] File exists: 'run/config.yaml'"),
    ],
)
def test_a_report_that_cannot_be_made_says_why_in_one_line(argv, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    (tmp_path / "empty").mkdir()
    (tmp_path / "scored").mkdir()
    (tmp_path / "scored/config.yaml").write_text("model: x\n")
    shutil.copytree("scored", "ks/0")
    for name in ("run", "torn", "scoreless", "odd"):
        trained(tmp_path / name)
    (tmp_path / "torn/metrics.csv").write_text("step,a\n1,2\n2,x\n")
    (tmp_path / "scoreless/scores.json").write_text("{")
    (tmp_path / "odd/config.yaml").write_text("a: [")
    assert cli.main(["report", *argv]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {message}") and error.count("\n") == 1
    assert not list(tmp_path.rglob("report.html"))


def test_several_runs_report_here_and_one_in_its_directory(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for i in range(2):
        trained(tmp_path / f"s/{i}", i)
    for argv, files in (
        (["s"], ["s/report.html", "s/seeds.csv"]),
        (["s/1"], ["s/1/report.html"]),
        (["s/*"], ["report.html", "seeds.csv"]),
        (["s/0", "s/1", "--out", "s/1/both.html"], ["s/1/both.html", "s/1/both-seeds.csv"]),
    ):
        before = set(tmp_path.rglob("*"))
        assert cli.main(["report", *argv]) == 0
        written = sorted(str(path.relative_to(tmp_path)) for path in set(tmp_path.rglob("*")) - before)
        out = capsys.readouterr().out
        assert written == sorted(files) and all(f"written: {file}\n" in out for file in files)


def test_without_tests_of_every_run_the_difference_is_that_of_dev_and_says_why(tmp_path):
    swept(tmp_path / "s")
    trained(tmp_path / "s" / "untested", 1, 50.0, None, "simcse", views=9)
    grid = table([tmp_path / "s"])[0]
    assert "difference (dev best)" in grid.columns and "test average" in grid.columns
    assert (
        "the difference is that of dev best, because not all runs have scores of the same tests" in grid.notes
    )


@pytest.mark.parametrize(
    ("form", "mark"), [("markdown", "| --- |"), ("csv", ",seeds,"), ("latex", r"\toprule")]
)
def test_the_tables_come_in_every_form_alone_on_the_standard_output(tmp_path, capsys, form, mark):
    swept(tmp_path / "s")
    assert cli.main(["report", str(tmp_path / "s"), "--to", form]) == 0
    out, error = capsys.readouterr()
    assert mark in out and "written" not in out and error.count("written: ") == 2
    assert ("paired by seed" in error) == (form == "csv") != ("paired by seed" in out)

"""Tables as published: the numbers are the papers', and a run fills its own rows and no others."""

import json
import os
import re
from pathlib import Path
from statistics import fmean, stdev

import pytest
from omegaconf import OmegaConf

from whitenedcse.app.config import composed
from whitenedcse.report import published
from whitenedcse.report.published import STS, TRANSFER, asked

ROOT = Path(__file__).parents[2]
DATA = Path(os.environ.get("WHITENEDCSE_DATA") or ROOT.parent / "shared" / "data")
REFERENCE = DATA.parent / "reference" / "published.json"
TABLES = published.tables()
ROWS = [(key, row) for key, table in TABLES.items() for row in table["rows"]]
STATED = {"WhiteningBERT/F1": [None] * 4, "WhiteningBERT/F2": [None] * 2, "BERT-whitening/F1": [66.52]}
STATED |= {"WhitenedCSE/F1": [None] * 12, "WhitenedCSE/F3": [None] * 4}
SAME = {"STSB": "STS-B", "SICK": "SICK-R", "SST": "SST2"}
OF_ROW = ("pooling", "transform", "k", "fit", "power", "shrinkage")  # which a row of scores.json has
OF_SCORES = ("protocol", "case", "max_length", "extra", "bf16", "sample", "classifier", "prompt")


def conditions(key, label):
    """The conditions of a published row, as its command composes to them."""
    return asked(next(row for row in TABLES[key]["rows"] if row["label"] == label), composed)


def report(key, *arguments):
    return published.report(key, composed, *arguments)


def sts(tasks):
    """The STS part of a row: all is the value, mean 100 more, wmean 200 more, so that a mix-up shows."""
    return {"sts": {"tasks": {k: {"all": v, "mean": v + 100, "wmean": v + 200} for k, v in tasks.items()}}}


def seven(value):
    return sts({name: value + i for i, name in enumerate(STS)})


def run(path, wanted, *, seed=None, scores=None, encoder=None, name="as it is", **parts):
    """What evaluate.py, and train.py for a trained model, leave of a run under some conditions."""
    row = {"name": name, "pooling": wanted["pooling"], "fit": wanted["fit"], "postprocess": {}}
    more = {name: wanted[name] for name in ("power", "shrinkage") if name in wanted}
    made = {"kind": wanted["transform"], "k": wanted.get("k"), **more}
    row["postprocess"] |= made if wanted["transform"] else {}
    source = {"path": wanted["encoder"], "commit": "1" * 40, "architecture": "x 1 x 1"} | (encoder or {})
    about = {"model": source["path"], "seed": seed, "experiment": None, "encoder": source}
    about |= {key: value for key, value in wanted.items() if key in OF_SCORES}
    about["classifier"] = wanted.get("classifier", "lbfgs")
    path.mkdir(parents=True, exist_ok=True)
    if wanted["trained"]:
        config = {k: v for k, v in wanted.items() if k not in (*OF_ROW, *OF_SCORES, "encoder", "trained")}
        model = path.with_name(f"{path.name}-trained")
        model.mkdir(exist_ok=True)
        config |= {"encoder.path": source["path"], "data.seed": 9, "seed": seed or 0}
        words = [f"{name}={json.dumps(value)}" for name, value in config.items()]
        (model / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.from_dotlist(words)))
        best = {"dev/alignment": 0.25, "dev/uniformity": -2}
        (model / "scores.json").write_text(json.dumps({"dev": {"values_best": best}}))
        text = "step,train/diversity_before,train/diversity_after\n1,9,9\n2,0.5,0.75\n"
        (model / "metrics.csv").write_text(text)
        about["model"] = str(model)
    transfer = {"tasks": {name: {"accuracy": 80.0 + i} for i, name in enumerate(TRANSFER)}}
    geometry = {"task": "STS-B", "uniformity": -3.0}
    row |= parts or seven(50.0) | {"rte": {"accuracy": 53.0}, "geometry": geometry}
    row |= {"transfer": transfer} if "classifier" in wanted and not parts else {}
    (path / "scores.json").write_text(json.dumps({**about, "rows": [row], **(scores or {})}))
    records = [f"1+2+12,{t},1,2,3" for t in (*STS, "average")]
    for file in ("layers", "subsets"):
        (path / f"{file}.csv").write_text("\n".join(["layers,task,all,mean,wmean", *records]))
    records = [f"whitening (nli),{k},SICK-R,1,2,{k}" for k in (108, 109, 110)]
    (path / "components.csv").write_text("\n".join(["row,k,task,all,mean,wmean", *records]))
    return path


def lines(grid):
    """(label, kind) -> cells by column."""
    return {tuple(r[:2]): dict(zip(grid.columns[2:], r[2:], strict=True)) for r in grid.rows}


def ours(key, *arguments):
    """Label -> our cells by column."""
    table = lines(report(key, *arguments))
    return {label: cells for (label, kind), cells in table.items() if kind == "ours"}


@pytest.mark.skipif(not REFERENCE.is_file(), reason=f"needs {REFERENCE}")
@pytest.mark.parametrize("key", TABLES)
def test_every_number_column_and_citation_is_the_published_one(key):
    theirs = json.loads(REFERENCE.read_text()).get(key, {})
    if key == "WhiteningBERT/T3":
        theirs["rows"] = [[label, [float(accuracy)]] for label, (accuracy, _) in theirs["rows"]]
    numbers = [value for _, *groups in theirs.get("rows", []) for group in groups for value in group]
    assert [v for row in TABLES[key]["rows"] for v in row["values"]] == STATED.get(key, numbers)
    if len(TABLES[key]["columns"]) > 1 and theirs:
        columns = [SAME.get(name, re.sub(r"^STS-(\d)", r"STS\1", name)) for name in theirs["cols"]]
        assert TABLES[key]["columns"] == columns
    if key.startswith("BERT-whitening/T"):
        cited = [label.startswith("cited") for label, _ in theirs["rows"]]
        assert [row["cited"] for row in TABLES[key]["rows"]] == cited


def test_every_printed_average_recomputes():
    off, checked = {}, 0
    for key, row in ROWS:
        cells = dict(zip(TABLES[key]["columns"], row["values"], strict=True))
        average, tasks = cells.pop("Avg", None), [value for value in cells.values() if value is not None]
        if average is not None and tasks:
            checked += 1
            off |= {row["label"]: fmean(tasks)} if abs(fmean(tasks) - average) > 0.01 else {}
    assert checked == 22 + 13 + 25 + 48
    assert off == {"BERT base, average of the last layer": pytest.approx(84.9543, abs=1e-4)}  # printed 84.94


def test_without_runs_a_table_is_the_published_one_and_asks_for_what_the_paper_ran():
    for key, table in TABLES.items():
        grid, kinds = report(key), {True: "cited", False: "published"}
        made = [note.removeprefix("to make ").split(":\n  ") for note in grid.notes if "\n  " in note]
        assert [(r["label"], kinds[r["cited"]]) for r in table["rows"]] == [*lines(grid)]
        for row in table["rows"]:
            hits = [command for labels, command in made if row["label"] in labels.split("; ")]
            assert hits == ([row["command"]] if row["command"] else [])
            assert not row["cited"] or row["command"] is None
            assert row["cited"] or row["command"] or row["label"].startswith(("T5-", "XLM-"))
    assert lines(report("WhiteningBERT/T1"))["SIF (GloVe+WR)", "cited"]["STS-B"] == "-"


@pytest.mark.slow
@pytest.mark.parametrize("key", TABLES)
def test_runs_under_the_conditions_of_each_row_fill_that_row_and_no_other(tmp_path, key):
    rows = [row for row in TABLES[key]["rows"] if row["command"]]
    every = [conditions(key, row["label"]) for row in rows]
    for row, wanted in zip(rows, every, strict=True):
        here = run(tmp_path / row["label"].replace("/", "|"), wanted)
        same = [r["label"] for r, other in zip(rows, every, strict=True) if other == wanted]
        assert [*ours(key, [here])] == same and row["label"] in same
        notes = report(key, [here]).notes
        assert f"ours, {row['label']}: {here}" in notes and not any("near miss" in note for note in notes)


def test_the_conditions_of_a_row_are_those_that_the_paper_states():
    base = conditions("WhitenedCSE/T1", "WhitenedCSE-BERT base")
    stated = {"encoder": "bert-base-uncased", "trained": True, "pooling": "cls over layers [-1]", "views": 3}
    stated |= {"data.batch_size": 64, "data.max_length": 32, "optim.lr": 3e-5, "loss.temperature": 0.05}
    stated |= {"head.whitening.kind": "shuffled_group", "transform": None, "protocol": "simcse", "fit": ""}
    assert {name: base[name] for name in stated} == stated
    simcse = conditions("WhitenedCSE/T1", "SimCSE-BERT base")
    assert (simcse["views"], simcse["head.whitening"]) == (2, None)
    white = conditions("BERT-whitening/T1", "BERT-base-whitening-256 (NLI)")
    assert (white["transform"], white["k"], white["fit"], white["sample"]) == ("whitening", 256, "nli", None)
    assert (white["case"], white["max_length"], white["pooling"]) == ("lower", 64, "mean over layers [1, -1]")


def other(value):
    """A value that a condition might have instead."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    return "other" if isinstance(value, str) else 7 if value is None else ["x"]


def near(key, here):
    return [note for note in report(key, [here]).notes if note.startswith("near miss, ")]


def test_a_run_with_one_other_condition_is_a_near_miss_that_names_it(tmp_path):
    key, label = "BERT-whitening/T1", "BERT-base-whitening (NLI)"
    wanted = conditions(key, label)
    names = [name for name in wanted if name not in ("trained", "transform", "prompt", "encoder")]
    for name in [*names, "prompt", "power", "shrinkage"]:
        changed = wanted | {name: "the " if name == "prompt" else other(wanted.get(name, 0.25))}
        here = run(tmp_path / name, changed)
        assert ours(key, [here]) == {}, name
        notes = near(key, here)
        assert notes and all(f"{name}=" in note and note.count(", the row has ") == 1 for note in notes), name
    for settings in ({"encoder": "someone/else"}, {"fit": "year"}):  # a fit to the task reads no sample
        (note,) = near(key, run(tmp_path / "x", wanted | settings))
        assert note.count(", the row has ") == 1
    for more in ({"trained": True, "monitor.every": 125}, {"transform": "other"}):  # made in another way
        here = run(tmp_path / f"y{len(more)}", wanted | more)
        assert {row[1] for row in report(key, [here]).rows} <= {"cited", "published"}


@pytest.mark.slow
def test_what_was_trained_otherwise_is_a_near_miss_up_to_three_differences(tmp_path):
    key, label = "WhitenedCSE/T1", "WhitenedCSE-BERT base"
    wanted = conditions(key, label)
    names = ["optim.lr", "terms.covariance.weight", "loss._target_", "data.max_length"]
    for many in range(1, 5):
        more = {name: other(wanted.get(name, 9.0)) for name in names[:many]}
        here = run(tmp_path / str(many), wanted | more)
        notes = near(key, here)
        assert ours(key, [here]) == {} and bool(notes) == (many < 4)
        assert all(f"{name}=" in note for note in notes for name in more)
    assert set(ours(key, [run(tmp_path / "s", wanted | {"data.seed": 99})])) == {label}
    old = {name: value for name, value in wanted.items() if name not in ("loss.denominator", "case")}
    (note,) = near(key, run(tmp_path / "old", old))
    assert "loss.denominator=not recorded, the row has view" in note
    assert "case=null, the row has as_is" in note


def test_a_file_of_a_run_with_many_rows_is_near_once(tmp_path):
    key = "WhiteningBERT/F1"
    wanted = conditions(key, TABLES[key]["rows"][0]["label"])
    here = run(tmp_path, wanted | {"encoder": "someone/else"})
    scores = json.loads((here / "scores.json").read_text())
    (made,) = scores["rows"]
    poolings = ["cls over layers [-1]", "mean over layers [-1]", made["pooling"]]
    scores["rows"] = [made | {"name": str(i), "pooling": pooling} for i, pooling in enumerate(poolings)]
    (here / "scores.json").write_text(json.dumps(scores))
    (note,) = near(key, here)
    assert note.count(", the row has ") == 1 and "encoder=someone/else" in note


def test_an_encoder_is_known_by_its_hub_id_or_by_its_directory_s_name_and_architecture(tmp_path):
    key, wanted = "WhiteningBERT/T1", conditions("WhiteningBERT/T1", "BERT-base: CLS, L12")
    base = "bert 12 x 768"
    for i, (path, architecture, fits) in enumerate(
        [
            ("bert-base-uncased", None, True),
            ("google-bert/bert-base-uncased", None, True),
            ("someone/bert-base-uncased", None, False),
            ("/models/bert-base-uncased", base, True),
            ("/models/bert-base-uncased", "bert 6 x 384", False),
            ("/models/minilm", base, False),
            ("bert-large-uncased", None, False),
        ]
    ):
        local = {"commit": None, "architecture": architecture} if architecture else {}
        here = run(tmp_path / str(i), wanted, encoder={"path": path, **local})
        assert bool(ours(key, [here])) == fits, path
        notes = [note for note in report(key, [here]).notes if "near miss" in note]
        assert len(notes) == (not fits) and all(f"encoder={path} (" in note for note in notes)


def test_the_difference_is_of_what_is_printed_in_the_aggregation_of_the_paper(tmp_path):
    wanted = conditions("WhiteningBERT/T1", "BERT-base: CLS, L12")
    tasks = {"STS12": -90.004, "STS13": -49.875, "STS-B": 50.0}
    grid = report("WhiteningBERT/T1", [run(tmp_path / "a", wanted, **sts(tasks))])
    cells, off = (lines(grid)["BERT-base: CLS, L12", kind] for kind in ("ours", "difference"))
    assert (cells["STS12"], off["STS12"]) == ("10.00", "-22.50")  # 9.996 - 32.50
    assert (cells["STS13"], off["STS13"]) == ("50.12", "+26.13")  # 50.125 - 23.99
    assert (cells["Avg"], cells["SICK-R"], off["Avg"]) == ("-", "-", "-")
    white = run(tmp_path / "b", conditions("BERT-whitening/T1", "BERT-base-whitening (NLI)"), **seven(10.0))
    assert ours("WhitenedCSE/T1", [white])["BERT base, whitening"]["STS12"] == "10.00"  # all
    assert ours("BERT-whitening/T1", [white])["BERT-base-whitening (NLI)"]["STS12"] == "210.00"  # wmean


def test_an_average_is_of_all_seven_tasks_and_of_no_other(tmp_path):
    tasks = {name: 10.0 + i for i, name in enumerate(STS)}
    wanted = conditions("WhitenedCSE/T1", "BERT base, first-last average")
    run(tmp_path, wanted, **sts(tasks | {"mine": 1e6}))
    assert ours("WhitenedCSE/T1", [tmp_path])["BERT base, first-last average"]["Avg"] == "13.00"
    missing = sts({name: value for name, value in tasks.items() if name != "STS16"})
    undefined = sts(tasks)
    undefined["sts"]["tasks"]["STS16"]["all"] = None
    for scores in (missing, undefined):
        run(tmp_path, wanted, **scores)
        cells = ours("WhitenedCSE/T1", [tmp_path])["BERT base, first-last average"]
        assert {k for k, v in cells.items() if v == "-"} == {"STS16", "Avg"}


def test_a_figure_shows_the_best_average_of_all_seven_tasks(tmp_path):
    label = "BERT-base: 13 x 13 layers, the best pair"
    here = run(tmp_path, conditions("WhiteningBERT/F1", label))
    cells = [f"0+1,True,{task},1,99,1" for task in STS]
    cells += ["0+1,True,average,90,61.255,1", "1+1,False,average,1,60,1", "0+0,True,average,,,"]
    (here / "layers.csv").write_text("\n".join(["layers,whitening,task,all,mean,wmean", *cells]))
    assert ours("WhiteningBERT/F1", [here]) == {label: {"Avg": "61.26"}}
    (here / "layers.csv").write_text("\n".join(["layers,whitening,task,all,mean,wmean", *cells[1:]]))
    assert ours("WhiteningBERT/F1", [here]) == {}  # an average of six
    sets = [f"{layers},{task},1,99,1" for layers in ("1+2+12", "0") for task in STS]
    sets += ["1+2+12,average,1,62.5,1", "0,average,1,63,1"]
    (here / "subsets.csv").write_text("\n".join(["layers,task,all,mean,wmean", *sets]))
    values = [list(cells.values()) for cells in ours("WhiteningBERT/F2", [here]).values()]
    assert values == [["63.00"], ["62.50"]]
    (here / "subsets.csv").unlink()
    assert ours("WhiteningBERT/F2", [here]) == {}


def test_figures_are_read_from_the_run_that_trained_and_points_of_a_curve_from_its_file(tmp_path):
    for i, (key, label, cells) in enumerate(
        [
            ("WhitenedCSE/F3", "SimCSE-BERT base", {"alignment": "0.25", "uniformity": "-2.00"}),
            ("WhitenedCSE/F1", "(d) distance of two views",
             {"uniformity": "-", "before": "0.50", "after": "0.75"}),
            ("BERT-whitening/F1", "BERT-base-whitening-109 (NLI), the best k", {"SICK-R": "109.00"}),
        ]
    ):  # fmt: skip
        assert ours(key, [run(tmp_path / str(i), conditions(key, label))])[label] == cells


def test_the_uniformity_of_figure_1_is_that_of_sts_b(tmp_path):
    wanted = conditions("WhitenedCSE/F1", "(a) BERT base")
    own, sts_b = ({"geometry": {"task": task, "uniformity": -3.0}} for task in ("my_pairs.tsv", "STS-B"))
    assert ours("WhitenedCSE/F1", [run(tmp_path / "own", wanted, **own)]) == {}
    (cells,) = ours("WhitenedCSE/F1", [run(tmp_path / "sts_b", wanted, **sts_b)]).values()
    assert cells["uniformity"] == "-3.00"


def test_seeds_are_averaged_and_counted_once_each_if_they_have_the_task(tmp_path):
    wanted = conditions("WhitenedCSE/T1", "WhitenedCSE-BERT base")
    parts = (seven(70.0), seven(71.0), seven(75.0), sts({"STS12": 72.0}))
    runs = [run(tmp_path / f"s{i}", wanted, seed=i, **part) for i, part in enumerate(parts)]
    assert ours("WhitenedCSE/T1", runs[:3])["WhitenedCSE-BERT base"]["Avg"] == "75.00"  # of 73, 74, 78
    note = next(n for n in report("WhitenedCSE/T1", runs[:3]).notes if n.startswith("ours, "))
    assert f"n = 3 (sd: STS12 {stdev((70, 71, 75)):.2f}, " in note
    assert all(str(path) in note for path in runs[:3])
    cells = ours("WhitenedCSE/T1", runs)["WhitenedCSE-BERT base"]
    assert cells == {name: "72.00" if name == "STS12" else "-" for name in cells}
    again = run(tmp_path / "again", wanted, seed=2, **seven(72.0))  # the same seed, trained once more
    os.utime(runs[2] / "scores.json", (1, 1))
    assert ours("WhitenedCSE/T1", [*runs[:3], again])["WhitenedCSE-BERT base"]["STS12"] == "71.00"


def test_evaluating_an_encoder_twice_counts_once_and_the_later_completes_the_earlier(tmp_path):
    wanted = conditions("WhiteningBERT/T1", "BERT-base: CLS, L12")
    old = run(tmp_path / "z", wanted, **seven(10.0))
    new = run(tmp_path / "a", wanted, **sts({"STS12": 30.0}))
    os.utime(old / "scores.json", (1, 1))
    for order in ([old, new], [new, old, new]):
        cells = ours("WhiteningBERT/T1", order)["BERT-base: CLS, L12"]
        assert (cells["STS12"], cells["STS13"]) == ("130.00", "111.00")


def test_a_folder_stands_for_the_runs_below_it_and_what_trained_is_found_from_there(tmp_path):
    key, filled = "WhitenedCSE/T1", {"WhitenedCSE-BERT base"}
    here = run(tmp_path / "outputs/a", conditions(key, *filled))
    (trained := tmp_path / "outputs/a-trained").joinpath("best").mkdir()
    assert set(ours(key, [tmp_path])) == filled
    scores = json.loads((here / "scores.json").read_text())
    for model in ("outputs/a-trained", "outputs/a-trained/best", "gone"):
        (here / "scores.json").write_text(json.dumps(scores | {"model": model}))
        assert set(ours(key, [here])) == (filled if model != "gone" else set())
    with pytest.raises(ValueError, match=r"whitenedcse evaluate model=.*a-trained$"):
        report(key, [trained])
    (tmp_path / "half").mkdir()
    assert ours(key, [tmp_path / "half"]) == {}  # a run that was killed leaves such a folder
    (trained / "scores.json").write_text(json.dumps(scores | {"model": "/where/it/was"}))  # it was moved
    assert set(ours(key, [trained])) == filled
    (here / "scores.json").write_text("{")
    with pytest.raises(ValueError, match=r"a.scores.json"):
        report(key, [tmp_path])

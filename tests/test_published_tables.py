"""Tables as published: the numbers are the papers', and a run fills its own rows and no others."""

import json
import os
import re
from pathlib import Path
from statistics import fmean, stdev

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from whitenedcse.model.pooling import Pooling
from whitenedcse.report import published
from whitenedcse.report.published import STS, TRANSFER, names, report

ROOT = Path(__file__).parents[1]
DATA = Path(os.environ.get("WHITENEDCSE_DATA") or ROOT.parent / "shared" / "data")
REFERENCE = DATA.parent / "reference" / "published.json"
TABLES = published.tables()
ROWS = [(key, row) for key, table in TABLES.items() for row in table["rows"]]
EXPERIMENTS = {path.stem for path in (ROOT / "conf" / "experiment").glob("*.yaml")}
MATCHES = [row["match"] for key, row in ROWS if key == "WhitenedCSE/T1" and row["match"]]
OWN = [match for match in MATCHES if match.get("experiment", [""])[0] in EXPERIMENTS]
STATED = {"WhiteningBERT/F1": [None] * 4, "WhiteningBERT/F2": [None] * 2, "BERT-whitening/F1": [66.52]}
SAME = {"STSB": "STS-B", "SICK": "SICK-R", "SST": "SST2"}
SGW = {"views": 3, "head": {"dense": True, "whitening": {"kind": "shuffled_group", "groups": None}}}
SGW["head"]["whitening"]["group_width"] = 2
PLAIN = {"views": 2, "head": {"dense": True, "whitening": None}}
WB = {"protocol": "whiteningbert"}


def sts(tasks):
    """The STS part of a row: all is the value, mean 100 more, wmean 200 more, so that a mix-up shows."""
    return {"sts": {"tasks": {k: {"all": v, "mean": v + 100, "wmean": v + 200} for k, v in tasks.items()}}}


def seven(value):
    return sts({name: value + i for i, name in enumerate(STS)})


def row(name="as it is", pooling="cls over layers [-1]", **parts):
    return {"name": name, "pooling": pooling, "postprocess": "", "fit": "", "setting": "", **parts}


def run(path, model, *rows, **changes):
    """A directory as evaluate.py leaves it."""
    scores = {"model": str(model), "experiment": None, "seed": None, "protocol": "simcse", "rows": rows}
    path.mkdir(parents=True, exist_ok=True)
    (path / "scores.json").write_text(json.dumps(scores | changes))
    return path


def trained(path, config, experiment, seed, *rows, **changes):
    """A train run with these settings, and beside it the run that evaluated it."""
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(config)))
    (path / "scores.json").write_text('{"dev": {}}')
    changes = {"experiment": experiment, "seed": seed} | changes
    return run(path.with_name(f"evaluated-{path.name}"), path, *rows, **changes)


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
    theirs = json.loads(REFERENCE.read_text())[key]
    if key == "WhiteningBERT/T3":
        theirs["rows"] = [[label, [float(accuracy)]] for label, (accuracy, _) in theirs["rows"]]
    numbers = [value for _, *groups in theirs.get("rows", []) for group in groups for value in group]
    assert [v for row in TABLES[key]["rows"] for v in row["values"]] == STATED.get(key, numbers)
    if len(TABLES[key]["columns"]) > 1:
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
        assert [(r["label"], kinds[r["cited"]]) for r in table["rows"]] == [*lines(grid)]
        asking = [
            n.removeprefix("to make ").partition(": python ") for n in grid.notes if n.startswith("to make ")
        ]
        for row in table["rows"]:
            hits = [
                f"python {command}" for labels, _, command in asking if row["label"] in labels.split("; ")
            ]
            assert hits == ([row["command"]] if row["command"] else [])
            assert not row["cited"] or (row["command"], row["match"]) == (None, None)
            assert row["cited"] or row["command"] or row["label"].startswith(("T5-", "XLM-"))
    assert lines(report("WhiteningBERT/T1"))["SIF (GloVe+WR)", "cited"]["STS-B"] == "-"


def test_every_experiment_and_sweep_of_a_command_exists():
    commands = " ".join(row["command"] or "" for _, row in ROWS)
    assert set(re.findall(r"\+experiment=(\S+)", commands)) <= EXPERIMENTS
    if (ROOT / "conf" / "sweep").is_dir():
        sweeps = {path.stem for path in (ROOT / "conf" / "sweep").glob("*.yaml")}
        assert set(re.findall(r"\+sweep=(\S+)", commands)) <= sweeps


@pytest.mark.parametrize("match", OWN, ids=lambda match: match["experiment"][0])
def test_the_settings_a_row_asks_for_are_those_of_its_experiment(match):
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        config = compose("train", ["run=x", f"+experiment={match['experiment'][0]}"])
    assert {k: OmegaConf.select(config, k) for k in match["config"]} == match["config"]


def test_the_pooling_a_row_asks_for_is_that_of_its_command():
    rows = [row for _, row in ROWS if "pooling" in (row["match"] or {})]
    assert len(rows) == 4
    for row in rows:
        kind, layers = re.search(r"pooling=(\w+) layers=(\S+)", row["command"]).groups()
        assert row["match"]["pooling"] == str(Pooling(kind=kind, layers=json.loads(layers)))


def test_a_run_fills_its_rows_and_the_difference_is_of_what_is_printed(tmp_path):
    rows = [row("mean L1+last", **seven(50.0)), row("cls last", **sts({"STS12": -90.004, "STS13": -49.875}))]
    rows.append(row("mean last", **sts({"STS-B": -52.71})))
    here = run(tmp_path, "/models/bert-base-uncased", *rows, **WB)
    grid, cells = report("WhiteningBERT/T1", [here]), ours("WhiteningBERT/T1", [here])
    assert set(cells) == {f"BERT-base: {row}" for row in ("AVG, L1+L12", "CLS, L12", "AVG, L12")}
    values = "155.00 156.00 150.00 151.00 152.00 153.00 154.00 153.00".split()
    assert list(cells["BERT-base: AVG, L1+L12"].values()) == values
    assert lines(grid)["BERT-base: AVG, L1+L12", "difference"]["STS-B"] == "+95.95"  # 155.00 - 59.05
    assert lines(grid)["BERT-base: CLS, L12", "difference"]["STS12"] == "-22.50"  # 10.00 (9.996) - 32.50
    assert lines(grid)["BERT-base: CLS, L12", "difference"]["STS13"] == "+26.13"  # 50.12 (50.125) - 23.99
    assert lines(grid)["BERT-base: AVG, L12", "difference"]["STS-B"] == "+0.00"  # 47.29 - 47.29, no minus
    assert f"ours, BERT-base: CLS, L12: {here}" in grid.notes
    asked = [note for note in grid.notes if "model=bert-base-uncased" in note]
    assert [note.split(": python")[0] for note in asked] == [
        "to make BERT-base: AVG, L1; BERT-base: AVG, L1+L12, whitened"
    ]


def test_a_figure_shows_the_best_of_the_csv_that_a_run_left(tmp_path):
    here = run(tmp_path, "bert-base-uncased", row("mean L1+last", **seven(50.0)), **WB)
    lines = [
        "0+1,True,STS12,1,99,1",
        "0+1,True,average,90,61.255,1",
        "1+1,False,average,1,60,1",
        "0+0,True,average,,,",
    ]
    (here / "layers.csv").write_text("\n".join(["layers,whitening,task,all,mean,wmean", *lines]))
    sets = ["1+2+12,STS12,1,99,1", "1+2+12,average,1,62.5,1", "0,average,1,63,1"]
    (here / "subsets.csv").write_text("\n".join(["layers,task,all,mean,wmean", *sets]))
    assert ours("WhiteningBERT/F1", [here]) == {"BERT-base: 13 x 13 layers, the best pair": {"Avg": "61.26"}}
    assert [list(cells.values()) for cells in ours("WhiteningBERT/F2", [here]).values()] == [
        ["63.00"],
        ["62.50"],
    ]
    (here / "subsets.csv").unlink()
    assert ours("WhiteningBERT/F2", [here]) == {}


def test_each_paper_has_its_aggregation(tmp_path):
    rows = [row("whitening (nli)", **seven(10.0))]
    here = run(tmp_path, "google-bert/bert-base-uncased", *rows, protocol="bert_whitening")
    assert ours("WhitenedCSE/T1", [here])["BERT base, whitening"]["STS12"] == "10.00"
    assert ours("BERT-whitening/T1", [here])["BERT-base-whitening (NLI)"]["STS12"] == "210.00"


def test_an_average_is_of_all_seven_tasks_and_of_no_other(tmp_path):
    tasks, pooling = {name: 10.0 + i for i, name in enumerate(STS)}, "mean over layers [0, -1]"
    run(tmp_path, "bert-base-uncased", row(pooling=pooling, **sts(tasks | {"mine": 1e6})))
    assert ours("WhitenedCSE/T1", [tmp_path])["BERT base, first-last average"]["Avg"] == "13.00"
    missing = sts({name: value for name, value in tasks.items() if name != "STS16"})
    undefined = sts(tasks)
    undefined["sts"]["tasks"]["STS16"]["all"] = None
    for scores in (missing, undefined):
        run(tmp_path, "bert-base-uncased", row(pooling=pooling, **scores))
        cells = ours("WhitenedCSE/T1", [tmp_path])["BERT base, first-last average"]
        assert {k for k, v in cells.items() if v == "-"} == {"STS16", "Avg"}


def test_pooling_protocol_row_and_model_decide(tmp_path):
    whitening, target = row("whitening (nli)", **seven(1.0)), row("whitening (target)", **seven(1.0))
    for name, model, protocol, scored in (
        ("a", "bert-base-uncased", "simcse", row(pooling="mean over layers [-1]", **seven(1.0))),
        ("b", "bert-base-uncased", "simcse", whitening),
        ("c", "bert-large-uncased", "bert_whitening", whitening),
        ("d", "bert-base-uncased", "bert_whitening", target),
    ):
        assert ours("WhitenedCSE/T1", [run(tmp_path / name, model, scored, protocol=protocol)]) == {}
    trained(tmp_path / "bert-base-uncased", SGW, "mine", 0, whitening, protocol="bert_whitening")
    assert (
        ours("WhitenedCSE/T1", [tmp_path / "evaluated-bert-base-uncased"]) == {}
    )  # trained, whatever its name


def test_seeds_are_averaged_and_counted_if_they_have_the_task(tmp_path):
    parts = (seven(70.0), seven(71.0), seven(75.0), sts({"STS12": 72.0}))
    runs = [trained(tmp_path / f"s{i}", SGW, "bert_base", i, row(**part)) for i, part in enumerate(parts)]
    assert ours("WhitenedCSE/T1", runs[:3])["WhitenedCSE-BERT base"]["Avg"] == "75.00"  # of 73, 74, 78
    note = next(n for n in report("WhitenedCSE/T1", runs[:3]).notes if n.startswith("ours, "))
    assert f"n = 3 (sd: STS12 {stdev((70, 71, 75)):.2f}, " in note and all(
        str(path) in note for path in runs[:3]
    )
    cells = ours("WhitenedCSE/T1", runs)["WhitenedCSE-BERT base"]
    assert cells == {name: "72.00" if name == "STS12" else "-" for name in cells}


def test_evaluating_a_model_twice_is_no_second_seed_and_the_later_counts(tmp_path):
    old = run(tmp_path / "z", "bert-base-uncased", row("cls last", **seven(10.0)), **WB)
    new = run(tmp_path / "a", "bert-base-uncased", row("cls last", **sts({"STS12": 30.0})), **WB)
    os.utime(old / "scores.json", (1, 1))
    for order in ([old, new], [new, old, new]):
        cells = ours("WhiteningBERT/T1", order)["BERT-base: CLS, L12"]
        assert (cells["STS12"], cells["STS13"]) == ("130.00", "111.00")


def test_settings_tell_the_runs_of_an_ablation_apart(tmp_path):
    group = {"views": 3, "head": {"dense": True, "whitening": {"kind": "group", "group_width": 6}}}
    pca = {"views": 3, "head": {"dense": True, "whitening": {"kind": "pca", "groups": None}}}
    configs = [SGW, PLAIN, group, pca, SGW | {"views": 2}, PLAIN | {"views": 4}]
    for i, config in enumerate(configs):
        trained(tmp_path / str(i), config, "bert_base", 0, row(**seven(10.0 * i - 3)))
    trained(tmp_path / "other", SGW, "official_head", 0, row(**seven(99.0)))
    trained(tmp_path / "weighted", SGW, "bert_base", 0, row(**seven(99.0)), system="weights")
    whitening = {**SGW["head"]["whitening"], "groups": 32}  # which counts, not the width
    trained(tmp_path / "wide", SGW | {"head": {"whitening": whitening}}, "bert_base", 0, row(**seven(99.0)))
    trained(tmp_path / "named", SGW, "bert_base", 1, row(**seven(-3.0)), system="whitenedcse")
    full, both = "WhitenedCSE-BERT base", "WhitenedCSE: shuffled group whitening, 3 views"
    for table, filled in {
        "T1": {full: 0, "SimCSE-BERT base": 10},
        "T3": {"shuffled group": 0, "none (SimCSE)": 10, "PCA": 30},
        "T4": {"384 groups, shuffled": 0, "128 groups, not shuffled": 20},
        "T5": {"3 views": 0, "2 views": 40},
        "T6": {both: 0, "SimCSE: no whitening, 2 views": 10, "shuffled group whitening, 2 views": 40}
        | {"no whitening, 4 views": 50},
    }.items():
        found = {
            label: float(cells["Avg"]) for label, cells in ours(f"WhitenedCSE/{table}", [tmp_path]).items()
        }
        assert found == filled, table


def test_settings_are_found_from_the_folder_of_the_runs_or_their_absence_is_said(tmp_path):
    evaluated = trained(tmp_path / "outputs" / "a", SGW, "bert_base", 0, row(**seven(70.0)))
    (tmp_path / "outputs" / "a" / "best").mkdir()
    for model, filled in {"outputs/a": 1, "outputs/a/best": 1, "gone": 0}.items():
        run(evaluated, model, row(**seven(70.0)), experiment="bert_base", seed=0)
        assert len(ours("WhitenedCSE/T1", [evaluated])) == filled
        left_out = (
            f"left out {evaluated}: no config.yaml of its model gone"
            in report("WhitenedCSE/T1", [evaluated]).notes
        )
        assert left_out is not bool(filled)


def test_transfer_and_rte_are_accuracies(tmp_path):
    transfer = {"tasks": {name: {"accuracy": 80.0 + i} for i, name in enumerate(TRANSFER)}, "avg": 0.0}
    evaluated = trained(tmp_path / "t", SGW, "bert_base", 1, row(**seven(1.0), transfer=transfer))
    values = "80.00 81.00 82.00 83.00 84.00 85.00 86.00 83.00".split()
    assert [*ours("WhitenedCSE/T2", [evaluated])["WhitenedCSE-BERT base"].values()] == values
    rte = run(
        tmp_path / "rte", "bert-base-uncased", row("mean L1+last whitened", rte={"accuracy": 53.0}), **WB
    )
    assert ours("WhiteningBERT/T3", [rte]) == {"WhiteningBERT (BERT-base, 110M)": {"RTE": "53.00"}}
    assert ours("WhiteningBERT/T1", [rte]) == {}


def test_another_name_for_an_encoder_counts_by_run_or_by_model(tmp_path):
    here = run(tmp_path / "r", tmp_path / "mine", row("cls last", **seven(5.0)), **WB)
    assert ours("WhiteningBERT/T1", [here]) == {}
    for target in (here, tmp_path / "mine", tmp_path / "r" / ".." / "mine"):
        aliases = {"bert-base-uncased": str(target)}
        assert set(ours("WhiteningBERT/T1", [here], aliases)) == {"BERT-base: CLS, L12"}
    with pytest.raises(ValueError, match="no row asks for 'bert'; the rows ask for LaBSE, bert-base-uncased"):
        report("WhiteningBERT/T1", [here], {"bert": str(here)})
    with pytest.raises(ValueError, match="bert-base-uncased=elsewhere: none of the runs"):
        report("WhiteningBERT/T1", [here], {"bert-base-uncased": "elsewhere"})


def test_a_folder_stands_for_the_runs_below_it_and_must_hold_some(tmp_path):
    trained(tmp_path / "outputs" / "a", SGW, "bert_base", 0, row(**seven(70.0)))
    assert set(ours("WhitenedCSE/T1", [tmp_path])) == {"WhitenedCSE-BERT base"}
    with pytest.raises(ValueError, match=r"python evaluate.py model=.*a$"):
        report("WhitenedCSE/T1", [tmp_path / "outputs" / "a"])
    with pytest.raises(FileNotFoundError, match="nowhere"):
        report("WhitenedCSE/T1", [tmp_path / "nowhere"])
    (tmp_path / "outputs" / "evaluated-a" / "scores.json").write_text("{")
    with pytest.raises(ValueError, match=r"evaluated-a.scores.json is not JSON"):
        report("WhitenedCSE/T1", [tmp_path])


def test_every_table_and_figure_has_a_name_and_a_wrong_name_lists_the_near_ones():
    parts = "T1 T2 T3 T4 T5 T6 T1 T2 T3 F1 F2 T1 T2 F1".split()
    assert [key.split("/")[1] for key in names()] == parts
    for key, line in names().items():
        paper, (kind, number) = key.split("/")
        assert f"({paper}, arXiv:2" in line and line.endswith(
            f"{dict(T='Table', F='Figure')[kind]} {number})"
        )
    with pytest.raises(
        ValueError, match="no published table 'WhitenedCSE/t3'; the nearest are WhitenedCSE/T3"
    ):
        report("WhitenedCSE/t3")

"""Tables say what was evaluated, how surely, and whether a transform saw the test."""

from whitenedcse.report.tables import grids, training_grid


def sts(value, half, why=""):
    interval = {mean: [value - half, value + half] for mean in ("all", "mean", "wmean")}
    scores = {"all": value, "mean": value + 1, "wmean": value + 2, "interval": interval}
    return scores | ({"why": why} if why else {})


def row(name, setting="", **kinds):
    return {"name": name, "setting": setting, **kinds}


def evaluated(name, setting, value, half):
    several = {"n": 3108, "subsets": {"MSRpar": {}, "MSRvid": {}}}
    tasks = {"STS12": {**sts(value, half), **several}, "STS-B": {**sts(value + 10, half), "n": 1379}}
    return row(name, setting, sts={"tasks": tasks, "avg": sts(value + 5, half)})


def shown(grid):
    return [list(line) for line in grid.rows]


def test_one_system_has_every_aggregation_and_two_decimals():
    scores = {"headline": "all", "rows": [evaluated("as it is", "", 72.3691, 1.4)]}
    (grid,) = grids(scores)
    assert grid.columns == ["task", "n", "all", "mean", "wmean"]
    assert shown(grid)[0] == ["STS12", "3108", "72.37 ±1.40", "73.37 ±1.40", "74.37 ±1.40"]
    assert shown(grid)[-1][0] == "average" and shown(grid)[-1][2] == "77.37 ±1.40"
    assert grid.notes[0] == "95 % bootstrap intervals"
    assert grid.title == "as it is: Spearman x 100"
    assert [note.split(": ")[0] for note in grid.notes[1:]] == ["all", "mean", "wmean"]
    assert "wmean: mean over the subsets of a task, weighted by their pairs" in grid.notes


def test_what_is_undefined_is_a_dash_with_its_reason():
    task = {"all": None, "mean": None, "wmean": None, "interval": dict.fromkeys(("all", "mean", "wmean"))}
    task |= {"why": "similarity is constant"}
    average = {**task, "why": "undefined in A"}
    scores = {"headline": "all", "rows": [row("x", sts={"tasks": {"A": {**task, "n": 3}}, "avg": average})]}
    (grid,) = grids(scores)
    assert shown(grid) == [["A", "3", "-", "similarity is constant"]]
    every = [*scores["rows"], row("y", sts=scores["rows"][0]["sts"])]
    (two,) = grids({"headline": "all", "rows": every})
    assert two.notes == ["x, A: similarity is constant", "y, A: similarity is constant"]
    scores["rows"][0]["sts"]["tasks"]["B"] = {**sts(50, 1), "n": 9}
    (grid,) = grids(scores)
    assert shown(grid)[-1] == ["average", "", "-", "undefined in A"]


def test_one_task_has_no_average_and_tasks_without_subsets_one_aggregation():
    mine = {**sts(60, 2), "n": 300, "subsets": {"": {}}}
    one = row("a", sts={"tasks": {"mine.tsv": mine}, "avg": sts(60, 2)})
    (grid,) = grids({"headline": "all", "rows": [one]})
    assert (list(grid.columns), shown(grid)) == (["task", "n", "score"], [["mine.tsv", "300", "60.00 ±2.00"]])
    assert [note for note in grid.notes if note.startswith(("all", "mean", "wmean"))] == []
    (grid,) = grids({"headline": "all", "rows": [one, {**one, "name": "b"}]})
    assert (grid.title, grid.columns) == ("Spearman x 100", ["", "fitted", "mine.tsv"])
    assert shown(grid) == [["a", "", "60.00"], ["b", "", "60.00"]]
    assert grid.notes[0] == "the score's 95 % interval is at most ±2.0"
    one["sts"]["tasks"]["other.tsv"] = {**sts(70, 2), "n": 300}
    (alone,), (two,) = (grids({"headline": "all", "rows": rows}) for rows in ([one], [one, one]))
    assert [shown(grid)[-1][-1] for grid in (alone, two)] == ["60.00 ±2.00", "60.00"]


def test_a_file_of_a_task_is_named_without_its_folders_where_that_is_unambiguous():
    tasks = {"tests/of/a.tsv": sts(60, 2), "STS-B": sts(70, 2), "/other/b.tsv": sts(80, 2)}
    one = row("x", sts={"tasks": tasks, "avg": sts(70, 2)})
    (grid,) = grids({"headline": "all", "rows": [one, one]})
    assert grid.columns == ["", "fitted", "a.tsv", "STS-B", "b.tsv", "average"]
    tasks["more/a.tsv"] = sts(60, 2)
    (grid,) = grids({"headline": "all", "rows": [one, one]})
    assert grid.columns[2:-1] == list(tasks)


def test_several_systems_are_rows_in_the_headline_aggregation_with_their_setting():
    rows = [evaluated("raw", "", 50, 2.4), evaluated("whitening (target)", "transductive", 60, 3.1)]
    (grid,) = grids({"headline": "wmean", "rows": rows})
    assert grid.columns == ["", "fitted", "STS12", "STS-B", "average"]
    assert shown(grid) == [
        ["raw", "", "52.00", "62.00", "57.00"],
        ["whitening (target)", "transductive", "62.00", "72.00", "67.00"],
    ]
    assert grid.title == "Spearman x 100, wmean" and "at most ±3.1" in grid.notes[0]


def test_accuracies_stand_with_their_intervals_and_rte_beside_the_majority_and_its_confusion():
    tasks = {"MR": {"accuracy": 76.4, "interval": [75.6, 77.2], "seconds": 3.0}}
    tasks |= {"CR": {"accuracy": 81.25, "interval": [80.0, 82.5], "seconds": 4.4}}
    transfer = {"tasks": tasks, "avg": 78.825, "interval": [78.0, 79.6]}
    confusion = {"entailment": {"entailment": 1, "not_entailment": 145}}
    confusion |= {"not_entailment": {"entailment": 0, "not_entailment": 131}}
    rte = {"accuracy": 47.65, "majority": 52.708, "confusion": confusion, "interval": [42.0, 53.4]}
    one, other = grids({"headline": "all", "rows": [row("x", "transductive", transfer=transfer, rte=rte)]})
    assert shown(one) == [["x", "transductive", "76.40 ±0.80", "81.25 ±1.25", "78.83 ±0.80"]]
    assert shown(other) == [["x", "transductive", "47.65 ±5.70", "52.71", "1", "145", "0", "131"]]


def test_geometry_names_its_task_and_dashes_what_is_undefined():
    geometry = {"task": "STS-B", "alignment": None, "uniformity": -2.1934, "mean_cosine": 0.4051}
    geometry |= {"isotropy": 0.0553, "effective_rank": 62.71}
    both = row("x", sts=evaluated("x", "", 50, 1)["sts"], geometry=geometry)
    grid = grids({"headline": "all", "rows": [both]})[1]
    assert grid.title == "geometry on STS-B"
    assert shown(grid) == [["x", "", "-", "-2.193", "0.405", "0.055", "63"]]
    for n, note in (
        (338, "alignment is over the 338 of 1,379 pairs with a score above 5.8, the top fifth of 1 to 7"),
        (0, "no alignment: no pair has a score above 5.8"),
    ):
        both["geometry"]["positives"] = {"above": 5.8, "scale": [1.0, 7.0], "n": n, "of": 1379}
        assert grids({"headline": "all", "rows": [both]})[1].notes == [note]


def test_training_is_shown_before_and_at_its_best():
    names = ["dev/spearman", "dev/alignment", "dev/whitened_on_dev_k64", "dev/whitened_on_corpus_k32"]
    names += ["dev/effective_rank", "dev/variance_top1", "dev/variance_top64"]  # the spectrum is no table
    dev = {"n": 750, "best_step": 300, "values_before": dict.fromkeys(names, 24.186)}
    dev |= {"values_best": {**dict.fromkeys(names, 53.391), "dev/alignment": None}}
    grid = training_grid(dev)
    assert grid.columns[1:] == ("before", "best (step 300)")
    assert grid.title == "dev set, 750 pairs, Spearman x 100"
    assert grid.notes == []
    for best, lowered in ((24.1, True), (24.186, False), (None, False)):
        notes = training_grid(dev | {"before": 24.186, "best": best}).notes
        assert any(note.startswith("training lowered the dev score") for note in notes) == lowered
    none = training_grid(dev | {"best_step": 0})  # stopped before the first evaluation
    assert none.columns[2] == "best" and {line[2] for line in none.rows} == {"-"}
    few = {"values_best": {**dev["values_best"], "dev/whitened_on_dev_k64": None}}
    said = "-: too few sentences for whitening on them to so many components"
    assert said in training_grid(dev | few).notes and said not in training_grid(dev).notes
    assert shown(grid) == [
        ["embedding as it is", "24.19", "53.39"],
        ["alignment (lower is better)", "24.19", "-"],
        ["whitened on dev sentences (transductive), k=64", "24.19", "53.39"],
        ["whitened on training sentences (inductive), k=32", "24.19", "53.39"],
        ["effective rank (axes in use)", "24.19", "53.39"],
    ]

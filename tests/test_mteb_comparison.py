"""What mteb's files say of the differences between models: files written here, as mteb writes them."""

import json
import math
import subprocess
import sys

import numpy as np
import pytest
from scipy import stats

from whitenedcse.evaluation import mteb_results
from whitenedcse.evaluation.differences import of_predictions, of_two_spearmans
from whitenedcse.report.comparison import compared

RNG = np.random.default_rng(0)
GOLD = RNG.standard_normal(300)
SIMILARITIES = {"a": GOLD + 0.8 * RNG.standard_normal(300), "b": GOLD + 0.6 * RNG.standard_normal(300)}
ACCURACIES = {
    "a": [0.70, 0.72, 0.69, 0.74, 0.71],
    "b": [0.73, 0.74, 0.73, 0.76, 0.72],
    "c": [0.70, 0.73, 0.68, 0.74, 0.71],
}
LABELS = {name: RNG.integers(0, 3, (5, 200)) for name in ACCURACIES}


def written(folder, name, subsets, predictions=None, data="data1", revision="r1"):
    """A task's file as mteb leaves it in FOLDER/REVISION, with predictions by subset."""
    folder = folder / revision
    folder.mkdir(parents=True, exist_ok=True)
    entries = [{"hf_subset": key, "languages": ["eng-Latn"], **scores} for key, scores in subsets.items()]
    content = {"dataset_revision": data, "task_name": name, "mteb_version": "2", "scores": {"test": entries}}
    (folder / f"{name}.json").write_text(json.dumps(content))
    (folder / "model_meta.json").write_text(json.dumps({"name": folder.parent.name, "revision": revision}))
    if predictions:
        saved = {key: {"test": value} for key, value in predictions.items()}
        meta = {"mteb_model_meta": {"model_name": "m", "revision": revision}}
        (folder / f"{name}_predictions.json").write_text(json.dumps(meta | saved))


def sts(folder, name, r, similarity=None, **more):
    scores = {"main_score": r, "cosine_spearman": r, "spearman": r - 0.1, "euclidean_spearman": r}
    saved = None if similarity is None else {"default": {"cosine_scores": similarity.tolist()}}
    written(folder, name, {"default": scores}, saved, **more)


def classified(folder, name, values, labels=None, metric="accuracy", **more):
    experiments = [{"other": 0.1 * i, metric: value} for i, value in enumerate(values)]
    scores = {"main_score": round(float(np.mean(values)), 6), "scores_per_experiment": experiments}
    written(
        folder, name, {"default": scores}, None if labels is None else {"default": labels.tolist()}, **more
    )


def table(tmp_path, names="ab", digits=4):
    (grid,) = compared([str(tmp_path / name) for name in names], 10, digits)
    return grid, {row[0]: dict(zip(grid.columns, row, strict=True)) for row in grid.rows}


def value(cell):
    """The number and the half width in a cell."""
    return [float(part.rstrip("*")) for part in cell.split(" ±")]


def r_of(name):
    return stats.spearmanr(GOLD, SIMILARITIES[name]).statistic


def test_sts_is_paired_by_saved_predictions(tmp_path):
    for name, similarity in SIMILARITIES.items():
        sts(tmp_path / name, "Made", r_of(name), similarity)
    _, rows = table(tmp_path)
    between = stats.spearmanr(*SIMILARITIES.values()).statistic
    sd = 100 * of_two_spearmans(r_of("b"), r_of("a"), between, 300).variance ** 0.5
    apart = 100 * (r_of("b") - r_of("a"))
    assert value(rows["Made"]["2 - 1"]) == pytest.approx([apart, 1.959964 * sd], abs=1e-4)
    assert float(rows["Made"]["p of 2 - 1"]) == pytest.approx(2 * stats.norm.sf(apart / sd), abs=1e-3)
    assert rows["Made"]["the interval covers other"] == "pairs"
    assert value(rows["Made"]["1"])[0] == pytest.approx(100 * r_of("a"), abs=1e-4)


def test_without_predictions_models_are_apart_on_as_many_pairs_as_mteb_counts(tmp_path):
    pytest.importorskip("mteb", reason="mteb's own files have the number of pairs")
    sts(tmp_path / "a", "STS12", 0.7)
    sts(tmp_path / "b", "STS12", 0.72, SIMILARITIES["b"][:300])  # of one model: no use
    sts(tmp_path / "c", "STS12", 0.72)
    assert mteb_results.read(tmp_path / "c").tasks["STS12"].parts["test", "default"].n == 3108
    _, rows = table(tmp_path, "ac")
    errors = [(1 - r * r) ** 2 * (1 + r * r / 2) / 3105 for r in (0.7, 0.72)]
    assert value(rows["STS12"]["2 - 1"]) == pytest.approx([2, 195.9964 * sum(errors) ** 0.5], abs=1e-4)
    assert value(rows["STS12"]["1"]) == pytest.approx([70, 195.9964 * errors[0] ** 0.5], abs=1e-4)
    assert rows["STS12"]["the interval covers other"] == "pairs apart"


def test_a_model_s_own_similarity_is_read_where_it_is_the_main_score(tmp_path):
    scores = {"main_score": 0.5, "cosine_spearman": 0.4, "spearman": 0.5, "euclidean_spearman": 0.4}
    saved = {"default": {"cosine_scores": [1.0, 2.0], "similarity_scores": [3.0, 4.0, 5.0, 6.0]}}
    written(tmp_path, "Made", {"default": scores}, saved)
    part = mteb_results.read(tmp_path).tasks["Made"].parts["test", "default"]
    assert part.predicted.tolist() == [3, 4, 5, 6] and part.n == 4


@pytest.mark.parametrize("metric", ["f1", "accuracy"])
def test_classification_is_paired_over_experiments(tmp_path, metric):
    for name, values in ACCURACIES.items():
        classified(tmp_path / name, "Made", values, metric=metric)
    _, rows = table(tmp_path, "abc")
    p = []
    for i, name in ((2, "b"), (3, "c")):
        test = stats.ttest_rel(ACCURACIES[name], ACCURACIES["a"])
        low, high = test.confidence_interval()
        cell = value(rows["Made"][f"{i} - 1"])
        assert cell == pytest.approx([50 * (low + high), 50 * (high - low)], abs=1e-4)
        p.append(test.pvalue)
    shown = [float(rows["Made"][f"p of {i} - 1"]) for i in (2, 3)]
    assert shown == pytest.approx([2 * p[0], max(2 * p[0], p[1])], abs=6e-4) and p[0] < p[1]  # Holm of two
    assert rows["Made"]["the interval covers other"] == "training alone"


def test_classification_covers_other_texts_where_predictions_are_saved(tmp_path):
    for name in "ab":
        classified(tmp_path / name, "Made", ACCURACIES[name], LABELS[name])
    _, rows = table(tmp_path)
    apart = np.subtract(ACCURACIES["b"], ACCURACIES["a"])
    texts = of_predictions(LABELS["b"], LABELS["a"], apart.mean()).variance
    half = 100 * math.hypot(stats.t.isf(0.025, 4) * stats.sem(apart), 1.959964 * texts**0.5)
    assert value(rows["Made"]["2 - 1"]) == pytest.approx([100 * apart.mean(), half], abs=1e-4)
    assert rows["Made"]["the interval covers other"] == "training, texts"


def test_without_predictions_texts_are_apart_on_as_many_as_mteb_counts(tmp_path):
    pytest.importorskip("mteb", reason="mteb's own files have the number of texts")
    for name in "ab":
        classified(tmp_path / name, "Banking77Classification", ACCURACIES[name])
    _, rows = table(tmp_path)
    apart, means = np.subtract(ACCURACIES["b"], ACCURACIES["a"]), [np.mean(ACCURACIES[n]) for n in "ab"]
    texts = sum(p * (1 - p) / 3080 for p in means)
    half = 100 * math.hypot(stats.t.isf(0.025, 4) * stats.sem(apart), 1.959964 * texts**0.5)
    row = rows["Banking77Classification"]
    assert value(row["2 - 1"])[1] == pytest.approx(half, abs=1e-4)
    assert row["the interval covers other"] == "training, texts apart"


def test_subsets_are_averaged_as_independent(tmp_path):
    for name, rs in (("a", (0.6, 0.7)), ("b", (0.65, 0.8))):
        entries = {
            key: {"main_score": r, "cosine_spearman": r, "euclidean_spearman": r}
            for key, r in zip(("en", "de"), rs, strict=True)
        }
        saved = {key: {"cosine_scores": SIMILARITIES[name].tolist()} for key in entries}
        written(tmp_path / name, "Made", entries, saved)
    _, rows = table(tmp_path)
    between = stats.spearmanr(*SIMILARITIES.values()).statistic
    both = [of_two_spearmans(b, a, between, 300).variance for a, b in ((0.6, 0.65), (0.7, 0.8))]
    assert value(rows["Made"]["2 - 1"]) == pytest.approx([7.5, 195.9964 * sum(both) ** 0.5 / 2], abs=1e-4)


def test_the_average_speaks_of_these_tasks_and_of_tasks_like_these(tmp_path):
    apart = {"One": 0.02, "Two": 0.05, "Three": 0.03}
    for name, better in (("a", 0), ("b", 1)):
        for i, (task, by) in enumerate(apart.items()):
            sts(tmp_path / name, task, 0.6 + 0.1 * i + better * by, SIMILARITIES[name])
    grid, rows = table(tmp_path)
    these, like = rows["average, these tasks"], rows["average, tasks like these"]
    halves = [value(rows[task]["2 - 1"])[1] for task in apart]
    assert value(these["2 - 1"]) == pytest.approx([10 / 3, math.hypot(*halves) / 3], abs=1e-3)
    scipys = stats.ttest_1samp(list(apart.values()), 0)
    assert float(like["p of 2 - 1"]) == pytest.approx(scipys.pvalue, abs=1e-3)
    assert like["1"] == "" and value(these["1"])[0] == pytest.approx(70)
    single = [value(rows[task]["1"])[1] for task in apart]
    assert value(these["1"])[1] == pytest.approx(math.hypot(*single) / 3, abs=1e-3)
    sure = sum(float(rows[task]["p of 2 - 1"]) < 0.05 for task in apart)
    assert any(note.startswith(f"2 is better than 1 on {sure} tasks, worse on 0") for note in grid.notes)


def test_what_cannot_be_said_is_said(tmp_path):
    for name, by in (("a", 0), ("b", 0.01)):
        written(tmp_path / name, "Search", {"default": {"main_score": 0.5 + by, "ndcg_at_10": 0.5 + by}})
        sts(tmp_path / name, "Unknown", 0.5 + by)  # no predictions, and no task of mteb
        sts(tmp_path / name, "Made", 0.5 + by, SIMILARITIES[name])
    grid, rows = table(tmp_path, digits=2)
    for task in ("Search", "Unknown"):
        assert (rows[task]["2 - 1"], rows[task]["p of 2 - 1"]) == ("1.00", "-")
        assert rows[task]["the interval covers other"].startswith("cannot be said")
    assert rows["average, these tasks"]["p of 2 - 1"] == "-"
    assert any("not separable on 1, of 2 nothing can be said" in note for note in grid.notes)


def test_tasks_on_other_data_or_of_one_model_are_left_out(tmp_path):
    for name in "ab":
        sts(tmp_path / name, "Made", 0.5, SIMILARITIES[name])
        sts(tmp_path / name, "Moved", 0.5, SIMILARITIES[name], data=f"data of {name}")
    sts(tmp_path / "b", "Alone", 0.5, SIMILARITIES["b"])
    grid, rows = table(tmp_path)
    assert list(rows) == ["Made"]
    assert any(note.startswith("left out: Moved, Alone: ") for note in grid.notes)


def test_what_cannot_be_compared_is_refused(tmp_path):
    for name in "ab":
        sts(tmp_path / name, f"Only{name}", 0.5, SIMILARITIES[name])
    with pytest.raises(ValueError, match="a and .*b share no task on the same data"):
        table(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty has no results of mteb"):
        table(tmp_path, ["a", "empty"])
    sts(tmp_path / "a", "Made", 0.5, revision="r2")
    with pytest.raises(ValueError, match="a has results in .*/r1 and .*/r2; name one of them"):
        table(tmp_path)
    assert mteb_results.read(tmp_path / "a" / "r2").tasks.keys() == {"Made"}
    saved = tmp_path / "b/r1/Onlyb_predictions.json"
    saved.write_text(saved.read_text().replace('"r1"', '"r0"'))
    with pytest.raises(ValueError, match="is of revision r0, the results beside it are of r1; move it away"):
        mteb_results.read(tmp_path / "b")


@pytest.mark.slow
def test_mteb_is_not_imported(tmp_path):
    for name in "ab":
        sts(tmp_path / name, "STS12", 0.5)
    code = "import sys; from whitenedcse.report.comparison import compared; "
    code += f"print(len(compared({[str(tmp_path / name) for name in 'ab']}, 1, 1)), 'mteb' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "1 False\n", done.stderr

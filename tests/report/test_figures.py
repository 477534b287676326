"""The figures' numbers are those of refitting and rescoring each point by hand."""

import csv
from functools import partial

import numpy as np
import pytest
from encoders import whitened_by_hand
from matplotlib.image import imread
from matplotlib.text import Text

from whitenedcse.evaluation.postprocess import Postprocess
from whitenedcse.evaluation.scores import scores_of
from whitenedcse.evaluation.suite import System, plan
from whitenedcse.evaluation.tasks import Subset
from whitenedcse.report import figures
from whitenedcse.report.figures import draw


@pytest.fixture
def tasks():
    rng = np.random.default_rng(0)
    sides = [[f"s{i}" for i in rng.integers(0, 40, 30)] for _ in range(6)]
    golds = [rng.uniform(0, 5, 30) for _ in range(3)]
    a, b, c = (Subset(n, sides[2 * i], sides[2 * i + 1], golds[i]) for i, n in enumerate("pqr"))
    return {"A": [a, b], "B": [c]}


def by_hand(tasks, x_of):
    """Average over the tasks of the mean over subsets."""
    sentences, index, *_ = plan(tasks)
    return scores_of(np.array([x_of[s] for s in sentences]), index)["avg"]["mean"]


def assert_labelled(pairs, on_pairs, curves, on_curves):
    """The pictures name what is best in their rows, and the heat map writes every cell."""
    for state in ("False", "True"):
        cells = [row for row in pairs if (row["task"], row["whitening"]) == ("average", state)]
        best = max(cells, key=lambda row: float(row["mean"]))
        label = [f"best {float(best['mean']):.2f}", f"layers {best['layers'].replace('+', ' + ')}"]
        assert {*label, *(f"{float(row['mean']):.1f}" for row in cells)} <= {*on_pairs}
    for task in ("A", "B", "average"):
        best = max((float(r["mean"]), r["k"]) for r in curves if r["task"] == task)
        assert {task, f"{best[0]:.2f} at k = {best[1]}"} < {*on_curves}


def test_every_point_of_every_figure(tasks, tmp_path, monkeypatch):
    monkeypatch.setattr("whitenedcse.evaluation.suite.own_texts", lambda *_: [f"f{i}" for i in range(30)])
    agenda = plan(tasks, ["target"], list)
    planes = np.random.default_rng(1).standard_normal((3, len(agenda.sentences), 4)).astype(np.float32)
    system = System(planes[2], partial(Postprocess, kind="whitening"), "target")
    names = ["layers", "subsets", "components", "projection"]
    rows = [{"name": "as it is", "pooling": "mean over layers [-1]", "postprocess": {}}]
    rows.append(rows[0] | {"name": "whitening (target)", "postprocess": {"kind": "whitening"}})
    scores = {"model": "tiny", "headline": "mean", "rows": rows}
    drawn, made = [], figures.Figure
    monkeypatch.setattr(figures, "Figure", lambda **size: drawn.append(made(**size)) or drawn[-1])
    said = draw(tmp_path, names, {"mean": planes}, [System(planes[2]), system], agenda, scores)
    texts = ["\n".join(text.get_text() for text in figure.findobj(Text)) for figure in drawn]
    words = [[line.strip() for line in text.splitlines()] for text in texts]
    files = {name: (tmp_path / f"{name}.csv").read_text().splitlines() for name in names[:3]}
    read = {name: list(csv.DictReader(lines)) for name, lines in files.items()}

    def average(rows, **wanted):
        (row,) = [r for r in rows if r["task"] == "average" and all(r[k] == v for k, v in wanted.items())]
        return float(row["mean"])

    def of(x):
        return dict(zip(agenda.sentences, x, strict=True))

    pair = (planes[0].astype(float) + planes[2]) / 2
    assert average(read["layers"], layers="0+2", whitening="False") == pytest.approx(by_hand(tasks, of(pair)))
    assert average(read["subsets"], layers="0+2") == pytest.approx(by_hand(tasks, of(pair)))
    three = planes.astype(float).mean(0)
    assert average(read["subsets"], layers="0+1+2") == pytest.approx(by_hand(tasks, of(three)))
    fit = planes[2][agenda.fits["target"]["A"]].astype(float)
    for k in (2, 4):
        y = whitened_by_hand(fit, k)(planes[2])
        assert average(read["components"], k=str(k)) == pytest.approx(by_hand(tasks, of(y)), abs=1e-9)
    assert [len(rows) for rows in read.values()] == [6 * 2 * 3, 7 * 3, 4 * 3]
    averages = [row for row in read["subsets"] if row["task"] == "average"]
    best = max(averages, key=lambda row: float(row["mean"]))
    layers, score = [int(i) for i in best["layers"].split("+")], f"{float(best['mean']):.2f}"
    assert said[1].startswith(f"subsets.png: the best set of up to 3 layers is {layers}: {score} (tiny, ")
    assert f"best {score}" in words[1] and f"layers {' + '.join(map(str, layers))}" in words[1]
    assert_labelled(read["layers"], words[0], read["components"], words[2])
    assert {row["row"] for row in read["components"]} == {"whitening (target)"} < {*words[2]}
    unit = planes[2][np.unique(np.concatenate([r for _, r in agenda.pairs["A"]], axis=1))].astype(float)
    unit /= np.linalg.norm(unit, axis=1, keepdims=True)
    u, s, _ = np.linalg.svd(unit - unit.mean(0), full_matrices=False)
    places = np.loadtxt(tmp_path / "projection.csv", delimiter=",", skiprows=1)
    assert np.abs(places) == pytest.approx(np.abs((u * s)[:, :2]))
    assert f", {100 * (s[:2] ** 2).sum() / (s**2).sum():.1f} % of their variance" in said[3]
    first = [(tmp_path / f"{name}.png").read_bytes() for name in names]
    for name in names:
        image = imread(tmp_path / f"{name}.png")
        assert min(image.shape[:2]) > 300 and image[..., :3].std() > 0.01
    draw(tmp_path, names[:1], {"mean": planes}, [System(planes[2]), system], agenda, scores)
    assert (tmp_path / "layers.png").read_bytes() == first[0]  # the same bytes each time


@pytest.mark.parametrize("golds", [([1.0, 2, 3, 4, 5],), ([1.0, 2, 3, 4, 5], [3.0] * 5)])
def test_no_figure_shows_a_score_that_is_undefined(tmp_path, monkeypatch, golds):
    monkeypatch.setattr("whitenedcse.evaluation.suite.own_texts", lambda *_: [*few, *few[:1] * 3])
    few = [f"s{i}" for i in range(6)]  # whitened to five or more of eight components; one stands four times
    sides = few[:5], few[1:]
    tasks = {f"T{i}": [Subset("p", *sides, np.array(x))] for i, x in enumerate(golds)}
    agenda = plan(tasks, ["target"], list)
    planes = np.random.default_rng(1).standard_normal((3, 6, 8)).astype(np.float32)
    system = System(planes[2], partial(Postprocess, kind="whitening"), "target")
    row = {"name": "white", "pooling": "mean over layers [-1]", "postprocess": {"kind": "whitening"}}
    scores = {"model": "tiny", "headline": "all", "rows": [row]}
    said = draw(tmp_path, ["layers", "components", "subsets"], {"mean": planes}, [system], agenda, scores)
    assert (
        said[0].startswith("layers: not drawn: no average 'all' is defined of vectors whitened: a task")
        or len(golds) == 2
    )
    rows = list(csv.DictReader((tmp_path / "components.csv").read_text().splitlines()))
    assert {int(row["k"]) for row in rows if row["task"] == "T0" and row["all"]} == {1, 2, 3, 4}
    assert said[1].startswith("components.png: the best k on these pairs themselves: ")
    assert ("no average" in said[1]) == (len(golds) == 2)
    assert said[2].startswith("subsets") and ("not drawn" in said[2]) == (len(golds) == 2)

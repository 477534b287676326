"""Every picture opens, names its best point, and has the same bytes each time."""

import numpy as np
import pytest
from matplotlib.image import imread
from matplotlib.text import Text

from whitenedcse.report import figures
from whitenedcse.report.figures import Said, component_curves, heat_map, subset_curve


def pair_records(size=4):
    rng = np.random.default_rng(0)
    return [
        {"layers": [i, j], "whitening": w, "task": task, "all": 60 + 10 * w + rng.random(), "mean": None}
        for task in ("STS-B", "average")
        for w in (False, True)
        for i in range(size)
        for j in range(i, size)
    ]


def curves():
    rng = np.random.default_rng(1)
    tasks = ("STS12", "STS-B", "average")
    return {f"whitening ({on})": {task: 60 + rng.random(30) for task in tasks} for on in ("nli", "target")}


SAID = Said("bert-base-uncased", "mean in each layer", "all")
BEST = [
    {"size": 1, "layers": [3], "all": 60.0},
    {"size": 2, "layers": [1, 12], "all": 64.125},
    {"size": 3, "layers": [1, 2, 12], "all": 63.0},
]


@pytest.fixture
def words(monkeypatch):
    """A function from a function that draws to all texts of its figure."""
    drawn = []
    made = figures.Figure
    monkeypatch.setattr(figures, "Figure", lambda **size: drawn.append(made(**size)) or drawn[-1])

    def of(draw, *arguments):
        draw(*arguments)
        texts = [text.get_text() for text in drawn[-1].findobj(Text)]
        return [line.strip() for text in texts for line in text.splitlines()]

    return of


DRAWN = {
    "heat_map": lambda path: heat_map(pair_records(), SAID, path),
    "subset_curve": lambda path: subset_curve(BEST, SAID, path),
    "component_curves": lambda path: component_curves(curves(), SAID, path),
}


@pytest.mark.parametrize("name", DRAWN)
@pytest.mark.slow(but=1)
def test_a_picture_opens_and_comes_out_the_same_again(tmp_path, name):
    for stem in ("figure.v1", "again"):  # a dot in the name is no suffix to lose
        DRAWN[name](tmp_path / stem)
    image = imread(tmp_path / "figure.v1.png")
    assert min(image.shape[:2]) > 300 and image[..., :3].std() > 0.01
    assert (tmp_path / "figure.v1.png").read_bytes() == (tmp_path / "again.png").read_bytes()


def test_the_heat_map_writes_every_cell_and_names_the_best_of_each_half(tmp_path, words):
    records = pair_records()
    text = words(heat_map, records, SAID, tmp_path / "map")
    for state in (False, True):
        rows = [r for r in records if r["task"] == "average" and r["whitening"] == state]
        best = max(rows, key=lambda r: r["all"])
        assert f"best {best['all']:.2f}" in text
        assert "layers {} + {}".format(*best["layers"]) in text
        assert all(f"{row['all']:.1f}" in text for row in rows)


def test_the_subset_curve_names_the_best_layers(tmp_path, words):
    text = words(subset_curve, BEST, SAID, tmp_path / "curve")
    assert "layers 1 + 12" in text and f"best {64.125:.2f}" in text


def test_each_panel_marks_the_best_k_of_all_its_curves(tmp_path, words):
    broken = {name: by | {"broken": np.full(30, np.nan)} for name, by in curves().items()}
    text = words(component_curves, broken, SAID, tmp_path / "k")
    for task in ("STS12", "STS-B", "average"):
        every = ((y, i, name) for name, by in curves().items() for i, y in enumerate(by[task], 1))
        value, k, name = max(every)
        assert task in text and f"{value:.2f} at k = {k}" in text and name in text
    assert "broken" not in text and {"whitening (nli)", "whitening (target)"} <= set(text)

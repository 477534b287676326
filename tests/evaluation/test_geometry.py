"""Geometry against double loops and closed forms."""

import math

import numpy as np
import pytest
import torch

from whitenedcse.evaluation import geometry
from whitenedcse.evaluation.geometry import (
    alignment,
    described,
    diversity,
    effective_rank,
    isotropy,
    mean_cosine,
    positives,
    spectrum,
    spread,
    uniformity,
)
from whitenedcse.evaluation.tasks import Subset


def rank_of(x):
    return effective_rank(spectrum(x))


@pytest.fixture
def x():
    return torch.randn(37, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def unit(row):
    row = row.numpy()
    return row / np.sqrt((row**2).sum())


def test_alignment_is_the_mean_squared_distance_of_a_loop(x):
    y = x.flip(0) * 3
    expected = np.mean([((unit(a) - unit(b)) ** 2).sum() for a, b in zip(x, y, strict=True)])
    assert alignment(x, y).item() == pytest.approx(expected, abs=1e-12)


def test_spread_is_the_share_of_the_squared_length_that_is_not_the_means(x):
    rows = x.numpy() + 3
    apart = [((row - rows.mean(0)) ** 2).sum() for row in rows]
    expected = np.mean(apart) / np.mean([(row**2).sum() for row in rows])
    assert spread(x + 3).item() == pytest.approx(expected, rel=1e-12)
    assert spread(1e-3 * (x + 3)).item() == pytest.approx(expected, rel=1e-12)  # whatever the scale
    assert spread(x - x.mean(dim=0)).item() == pytest.approx(1)
    same = x[:1].float().expand(40, -1)
    assert spread(same).item() == spread(torch.zeros(4, 3)).item() == 0
    noisy = same * (1 + 1e-7 * torch.randn(40, 5, generator=torch.Generator().manual_seed(1)))
    assert 0 < spread(noisy).item() < 1e-13 and rank_of(noisy) > 1  # which takes it for directions


def test_diversity_is_the_mean_distance_of_a_loop_over_pairs_of_views(x):
    views = torch.stack([x, x.roll(1, 0) * 2, x.flip(0)])
    pairs = [(0, 1), (0, 2), (1, 2)]
    every = ((a, b) for i, j in pairs for a, b in zip(views[i], views[j], strict=True))
    loop = [np.linalg.norm(unit(a) - unit(b)) for a, b in every]
    assert diversity(views).item() == pytest.approx(np.mean(loop), abs=1e-12)
    assert diversity(torch.stack([x, x, x])).item() == 0


def test_uniformity_is_the_double_loop_over_pairs_whatever_the_chunk(x, monkeypatch):
    rows = [unit(a) for a in x]
    terms = [-2 * ((a - b) ** 2).sum() for i, a in enumerate(rows) for b in rows[i + 1 :]]
    highest = max(terms)
    expected = highest + math.log(sum(math.exp(a - highest) for a in terms) / len(terms))
    for chunk in (1, 10, 36, 1024):
        monkeypatch.setattr(geometry, "CHUNK", chunk)
        assert uniformity(x).item() == pytest.approx(expected, rel=1e-9, abs=1e-10)


def test_uniformity_of_points_with_a_closed_form_and_where_there_is_none(x):
    three = math.log((math.exp(-8) + 2 * math.exp(-4)) / 3)
    for points, expected in (
        ([[1.0, 2], [2, 4], [0.5, 1]], 0),  # one direction: distance 0
        ([[1.0, 0], [-1, 0]], -8),  # opposite: squared distance 4
        ([[1.0, 0, 0], [0, 2, 0], [0, 0, 3]], -4),  # orthogonal: 2
        ([[1.0, 0], [-1, 0], [0, 1]], three),
    ):
        found = uniformity(torch.tensor(points, dtype=torch.float64)).item()
        assert found == pytest.approx(expected, abs=1e-12)
    assert uniformity(x[:1]).isnan()
    x[3] = 0  # has no direction
    assert uniformity(x).isnan() and alignment(x, x).isnan()


def test_the_spectrum_is_numpys_and_effective_rank_the_exponential_of_its_entropy(x):
    wide = x * torch.tensor([1, 2, 3, 4, 9])
    p = np.sort(np.linalg.eigvalsh(np.cov(wide.numpy().T)))[::-1]
    p = p / p.sum()
    assert spectrum(wide).numpy() == pytest.approx(p, abs=1e-9)
    assert rank_of(wide).item() == pytest.approx(np.exp(-(p * np.log(p)).sum()), abs=1e-9)
    line = torch.linspace(-1, 2, 20, dtype=torch.float64)[:, None] * x[0] + 7
    assert rank_of(line).item() == pytest.approx(1, abs=1e-9)
    corners = torch.cat([torch.eye(5), -torch.eye(5)]) + 3
    assert rank_of(corners).item() == pytest.approx(5, abs=1e-9)
    assert rank_of(torch.full((7, 3), 0.1, dtype=torch.float64)).item() == 0  # whose mean rounds


def test_mean_cosine_is_the_mean_over_all_pairs(x):
    unit = (x / x.norm(dim=1, keepdim=True)).numpy()
    pairs = [unit[i] @ unit[j] for i in range(len(unit)) for j in range(i)]
    assert mean_cosine(3 * x).item() == pytest.approx(np.mean(pairs), abs=1e-9)
    assert mean_cosine(x[:1].repeat(4, 1)).item() == pytest.approx(1)


def test_isotropy_is_the_published_isoscore_step_by_step(x):
    wide = (x * torch.tensor([1, 2, 3, 4, 9])).numpy()
    d = wide.shape[1]
    variances = np.linalg.eigvalsh(np.cov(wide.T))
    normed = np.sqrt(d) * variances / np.linalg.norm(variances)
    defect = np.linalg.norm(normed - 1) / np.sqrt(2 * (d - np.sqrt(d)))
    used = (d - defect**2 * (d - np.sqrt(d))) ** 2 / d**2
    assert isotropy(spectrum(torch.from_numpy(wide))).item() == pytest.approx(
        (d * used - 1) / (d - 1), abs=1e-9
    )
    assert isotropy(spectrum(torch.cat([torch.eye(4), -torch.eye(4)]))).item() == pytest.approx(1)
    assert isotropy(spectrum(torch.full((7, 3), 0.1, dtype=torch.float64))).isnan()


def test_a_description_holds_every_measure_and_says_none_where_there_is_none(x):
    positives = torch.tensor([[0, 1], [2, 3]])
    got = described(x, positives)
    assert got["alignment"] == pytest.approx(alignment(x[:2], x[2:4]).item())
    found = [got[name] for name in ("uniformity", "isotropy", "mean_cosine")]
    assert found == pytest.approx(
        [one.item() for one in (uniformity(x), isotropy(spectrum(x)), mean_cosine(x))]
    )
    assert len(got["spectrum"]) == 5 and got["effective_rank"] == pytest.approx(rank_of(x).item())
    assert described(x, positives[:, :0])["alignment"] is None
    assert described(torch.zeros(4, 3), positives[:, :0])["isotropy"] is None


def scored(gold, scale=None):
    rows = np.arange(2 * len(gold)).reshape(2, -1)
    return Subset("p", [], [], np.array(gold, float), scale), rows


def test_positives_are_the_pairs_in_the_top_fifth_of_the_scale():
    for gold, scale, above, which in (
        ([0, 4, 4.2, 5], None, 4, [2, 3]),  # SimCSE's definition
        ([1, 4, 4.1, 4.2], (0, 5), 4, [2, 3]),  # of a known scale the scores that occur do not tell
        ([0, 0.8, 0.81, 1], None, 0.8, [2, 3]),
        ([7, 1, 5.8, 6], None, 5.8, [0, 3]),
        ([-1, 1, 0.6, 0.7], None, 0.6, [1, 3]),
        ([3, 3, 3], None, 3, []),
    ):
        pair = scored(gold, scale)
        rows, about = positives([pair])
        assert rows.tolist() == pair[1][:, which].tolist()
        low, high = scale or (min(gold), max(gold))
        assert about == {"above": above, "scale": [low, high], "n": len(which), "of": len(gold)}
    rows, about = positives([scored([0, 6, 9]), scored([10, 7])])  # subsets have one scale
    assert rows.tolist() == [[2, 0], [5, 2]]
    assert about == {"above": 8, "scale": [0, 10], "n": 2, "of": 5}


def test_vectors_of_any_kind_of_number_are_described_under_autocast_too():
    x = torch.tensor([[1, 2, 0], [0, 3, -1], [2, 2, 2], [-4, 0, 1]])
    pairs = torch.tensor([[0, 1], [2, 3]])
    for kind in (torch.int64, torch.int8, torch.float16, torch.bfloat16, torch.float32):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found, expected = (described(y, pairs) for y in (x.to(kind), x.double()))
        assert found.pop("spectrum") == pytest.approx(expected.pop("spectrum"), rel=1e-5)
        assert found == pytest.approx(expected, rel=1e-5)

"""Losses and terms that whiten softly: naive float64 loops, closed forms, and lightly if it is there."""

import importlib.util
import math
import re
from pathlib import Path

import pytest
import torch
from scipy.integrate import quad
from torch.testing import assert_close

from whitenedcse.training.decorrelation import (
    WMSE,
    BarlowTwins,
    CovariancePenalty,
    SIGReg,
    TraceLoss,
    VICReg,
    epps_pulley,
)
from whitenedcse.training.loss import Step

LOSSES = [VICReg(), BarlowTwins(), WMSE(), SIGReg(directions=16)]
TERMS = [CovariancePenalty(weight=1.0, of="x"), CovariancePenalty(weight=1.0, of="z"), TraceLoss(weight=1.0)]
name = lambda one: type(one).__name__  # noqa: E731  ids of cases


def views(v=3, n=6, d=4, seed=0, scale=0.7):
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.eye(d) + 0.4 * torch.randn(d, d, generator=generator)
    shared = torch.randn(n, d, generator=generator)
    z = (shared + 0.5 * torch.randn(v, n, d, generator=generator)) @ mixing
    return (scale * z + torch.randn(d, generator=generator)).double()


def mean(numbers):
    return sum(numbers) / len(numbers)


def column(view, j):
    return [float(row[j]) for row in view]


def product(a, b):
    """The sum over sentences of the products of deviations."""
    return sum((x - mean(a)) * (y - mean(b)) for x, y in zip(a, b, strict=True))


def off(view, over):
    """The sum of squared covariances of different channels, divided by `over`, over the width."""
    d = view.shape[1]
    pairs = [(i, j) for i in range(d) for j in range(d) if i != j]
    return sum((product(column(view, i), column(view, j)) / over) ** 2 for i, j in pairs) / d


def naive_vicreg(a, b):
    n, d = a.shape
    apart = mean([(float(a[i, j]) - float(b[i, j])) ** 2 for i in range(n) for j in range(d)])

    def hinge(view):
        deviations = [(product(column(view, j), column(view, j)) / (n - 1) + 1e-4) ** 0.5 for j in range(d)]
        return mean([max(0.0, 1 - s) for s in deviations])

    return 25 * apart + 25 * (hinge(a) + hinge(b)) / 2 + off(a, n - 1) + off(b, n - 1)


def naive_barlow(a, b):
    n, d = a.shape
    total = 0.0
    for i in range(d):
        for j in range(d):
            one, other = column(a, i), column(b, j)
            below = math.sqrt((product(one, one) / n + 1e-5) * (product(other, other) / n + 1e-5))
            r = product(one, other) / n / below
            total += (1 - r) ** 2 if i == j else 0.005 * r**2
    return total


def naive_wmse(a, b):
    cosines = [float(x @ y / (x @ x).sqrt() / (y @ y).sqrt()) for x, y in zip(a, b, strict=True)]
    return mean([2 - 2 * c for c in cosines])


@pytest.mark.parametrize("v", [2, 3, 4])
@pytest.mark.parametrize(
    ("loss", "naive"), [(VICReg(), naive_vicreg), (BarlowTwins(), naive_barlow), (WMSE(), naive_wmse)]
)
def test_a_loss_is_the_mean_over_pairs_with_the_anchor_of_its_definition_as_a_loop(loss, naive, v):
    z = views(v)
    expected = mean([naive(z[0], other) for other in z[1:]])
    assert float(loss(z)) == pytest.approx(expected, rel=1e-10)


def statistic(numbers):
    """Epps and Pulley's integral by adaptive quadrature, with complex numbers."""

    def gap(t):
        empirical = mean([complex(math.cos(t * x), math.sin(t * x)) for x in numbers])
        return abs(empirical - math.exp(-t * t / 2)) ** 2 * math.exp(-t * t / 2)  # fmt: skip

    return len(numbers) * quad(gap, -3, 3, epsabs=1e-12)[0]


@pytest.mark.parametrize("scale", [0.1, 1.0, 3.0])
def test_the_statistic_is_its_integral(scale):
    x = scale * views(2, 12, 3)
    expected = [[statistic(column(view, j)) for j in range(3)] for view in x]
    assert_close(epps_pulley(x), torch.tensor(expected, dtype=x.dtype), rtol=1e-3, atol=1e-4)


def test_the_statistic_of_a_normal_distribution_has_its_closed_form():
    """Its mean is the integral of (1 - e^(-t^2)) e^(-t^2 / 2), whatever n."""
    closed = quad(lambda t: (1 - math.exp(-t * t)) * math.exp(-t * t / 2), -3, 3)[0]
    assert closed == pytest.approx(math.sqrt(2 * math.pi) * (1 - 3**-0.5), abs=0.01)
    for n in (8, 64):
        x = torch.randn(n, 20_000, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
        assert float(epps_pulley(x).mean()) == pytest.approx(closed, abs=0.03)


def test_sigreg_weighs_prediction_and_the_statistic_over_the_directions_that_it_draws():
    z, loss = views(3, 8, 5), SIGReg(share=0.3, directions=7)
    torch.manual_seed(5)
    value = loss(z)
    torch.manual_seed(5)
    directions = torch.randn(5, 7, dtype=z.dtype)
    directions = [row / row.norm() for row in directions.T]
    statistics = [statistic([float(row @ u) for row in view]) for view in z for u in directions]
    centre = sum(z) / 3
    prediction = mean([float((view - centre).square().mean()) for view in z])
    assert float(value) == pytest.approx(0.7 * prediction + 0.3 * mean(statistics), rel=1e-3)
    torch.manual_seed(5)
    assert torch.equal(loss(z), value)  # as on a rank that is seeded alike
    assert not torch.equal(loss(z), value)  # the next step draws others


def test_the_covariance_penalty_is_a_loop_over_pairs_of_channels_of_x_or_z():
    x, z = views(2, 7, 5), views(3, 7, 4, seed=1)
    step = Step(None, x, z)
    for of, vectors in {"x": x, "z": z}.items():
        expected = mean([off(view, 6) for view in vectors])
        assert float(CovariancePenalty(weight=0.5, of=of)(step)) == pytest.approx(expected, rel=1e-10)


def test_the_trace_loss_is_a_loop_over_channels_of_z():
    x, z = views(2, 7, 5), views(3, 7, 4, seed=1)
    variances = [[product(column(view, j), column(view, j)) / 7 for j in range(4)] for view in z]
    expected = mean([sum((1 - c) ** 2 for c in view) for view in variances])
    assert float(TraceLoss(weight=0.5)(Step(None, x, z))) == pytest.approx(expected, rel=1e-10)


def seeded(function, z):
    torch.manual_seed(0)
    return function(z)


@pytest.mark.parametrize("loss", LOSSES, ids=name)
def test_gradients_of_losses_are_right(loss):
    assert torch.autograd.gradcheck(lambda z: seeded(loss, z), (views(3, 5, 3).requires_grad_(),))


@pytest.mark.parametrize("term", TERMS, ids=name)
def test_gradients_of_terms_are_right_and_reach_what_they_are_of(term):
    x, z = views(2, 5, 3).requires_grad_(), views(3, 5, 3, seed=1).requires_grad_()
    reached = x if getattr(term, "of", "z") == "x" else z
    other = z if reached is x else x
    term(Step(None, x, z)).backward()
    assert other.grad is None and reached.grad.norm() > 0
    given = (lambda y: Step(None, y, z)) if reached is x else (lambda y: Step(None, x, y))
    assert torch.autograd.gradcheck(lambda y: term(given(y)), (reached.detach().requires_grad_(),))


@pytest.mark.parametrize("loss", [*LOSSES, *TERMS], ids=name)
def test_bfloat16_around_them_changes_nothing(loss):
    z = views(2, 16, 8).float()
    given = Step(None, z, z) if loss in TERMS else z
    plain = seeded(loss, given)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = seeded(loss, given)
    assert torch.equal(plain, mixed) and plain.dtype == torch.float32
    exact = seeded(loss, Step(None, z.double(), z.double()) if loss in TERMS else z.double())
    if not isinstance(loss, SIGReg):  # which draws other directions in float64
        assert_close(plain.double(), exact, rtol=1e-5, atol=1e-7)
    low = z.bfloat16()
    rounded = seeded(loss, Step(None, low, low) if loss in TERMS else low)
    again = seeded(loss, Step(None, low.float(), low.float()) if loss in TERMS else low.float())
    assert torch.equal(rounded, again)


@pytest.mark.parametrize("loss", [VICReg(), BarlowTwins(), SIGReg()], ids=name)
def test_a_collapse_costs_more_than_vectors_that_are_white(loss):
    white = math.sqrt(64) * torch.linalg.qr(views(1, 64, 8)[0] - views(1, 64, 8)[0].mean(dim=0)).Q
    assert seeded(loss, white.expand(2, 64, 8)) < 0.2 * seeded(loss, torch.ones(2, 64, 8))


@pytest.mark.parametrize("loss", [VICReg(), BarlowTwins(), SIGReg()], ids=name)
def test_equal_vectors_have_finite_gradients(loss):
    z = torch.ones(2, 8, 4, requires_grad=True)
    loss(z).backward()
    assert z.grad.isfinite().all()


@pytest.mark.parametrize("loss", LOSSES, ids=name)
def test_what_these_losses_cannot_use_is_refused_by_name(loss):
    with pytest.raises(
        ValueError, match="cannot use hard negatives, which a third column of the corpus holds"
    ):
        loss(views(), views()[0])
    for shape in ((), (4,), (6, 4), (1, 6, 4), (2, 1, 4), (2, 3, 6, 4)):
        message = (
            rf"^loss=\w+ needs .* \(views, sentences, width\), .* 2 views .*; got {re.escape(str(shape))}$"
        )
        with pytest.raises(ValueError, match=message):
            loss(torch.ones(shape))


@pytest.mark.parametrize("term", TERMS, ids=name)
def test_a_term_names_the_shape_that_it_cannot_use(term):
    for shape in ((), (4,), (6, 4), (1, 1, 4), (0, 6, 4)):
        message = rf"^the .* needs .* at least 1 views? of 2 sentences; got {re.escape(str(shape))}$"
        with pytest.raises(ValueError, match=message):
            term(Step(None, x=torch.ones(shape), z=torch.ones(shape)))
    assert term(Step(None, x=views(1), z=views(1))).isfinite()


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: VICReg(variance=-1.0), r"\(25.0, -1.0, 1.0\): all must be finite and 0 or more"),
        (lambda: VICReg(covariance=math.inf), "inf"),
        (lambda: BarlowTwins(redundancy=-0.1), "loss.redundancy=-0.1"),
        (lambda: SIGReg(share=1.1), r"loss.share=1.1 not in \[0, 1\]"),
        (lambda: SIGReg(directions=0), "loss.directions=0 below 1"),
        (lambda: CovariancePenalty(weight=0.0), "weight=0.0 must be finite and above 0"),
        (lambda: CovariancePenalty(weight=1.0, of="y"), "of='y' is not one of x, z"),
        (lambda: TraceLoss(weight=math.nan), "weight=nan"),
    ],
)
def test_settings_that_cannot_train_are_refused(made, message):
    with pytest.raises(ValueError, match=message):
        made()


def lightly(module):
    """A module of lightly's losses, by its file: their package imports torchvision for others of them."""
    pytest.importorskip("lightly", reason="pip install --no-deps lightly lightly_utils")
    where = Path(importlib.util.find_spec("lightly").origin).parent / "loss" / f"{module}.py"
    spec = importlib.util.spec_from_file_location(module, where)
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.mark.parametrize(
    ("loss", "module", "symbol"),
    [
        (VICReg(), "vicreg_loss", "VICRegLoss"),
        (BarlowTwins(), "barlow_twins_loss", "BarlowTwinsLoss"),
        (WMSE(), "wmse_loss", "norm_mse_loss"),
    ],
)
@pytest.mark.slow
def test_two_views_cost_what_lightly_says(loss, module, symbol):
    z = views(2, 32, 8).float()
    theirs = getattr(lightly(module), symbol)
    theirs = theirs() if symbol.endswith("Loss") else theirs
    ours = z.clone().requires_grad_()
    other = z.clone().requires_grad_()
    loss(ours).backward()
    theirs(other[0], other[1]).backward()
    assert_close(loss(z), theirs(z[0], z[1]), rtol=1e-5, atol=1e-6)
    assert_close(ours.grad, other.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.slow  # CI installs lightly before the slow tests
def test_sigreg_costs_what_lightly_says():
    z = views(2, 32, 8).float()
    theirs = lightly("lejepa_loss")
    apart = theirs.lejepa_invariance_loss(all_proj=z, global_proj=z)
    expected = 0.95 * apart + 0.05 * seeded(theirs.SIGReg(), z)
    assert_close(seeded(SIGReg(), z), expected, rtol=1e-5, atol=1e-6)

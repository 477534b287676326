"""The contrastive loss: a naive loop, and a closed form in float64; an example has the textbook's lines."""

import math
import sys
from itertools import product

import pytest
import torch
from programs import ROOT
from scipy.integrate import quad
from torch.nn.functional import cosine_similarity, normalize
from torch.testing import assert_close

from whitenedcse.training.loss import ContrastiveLoss, Matryoshka, Step
from whitenedcse.training.terms import CovariancePenalty

FORMS, DENOMINATORS = ("l1", "l2"), ("view", "symmetric")


def loss(**changes):
    return ContrastiveLoss(**({"temperature": 0.5} | changes))


def views(v=3, n=5, d=4, seed=0):
    return torch.randn(v, n, d, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def naive(z, form, weights, denominator, negatives=(), own=0.0):
    """The definition at temperature 0.5 as a loop over sentences, positives and candidates."""
    v, n, _ = z.shape
    s = lambda a, b: float(cosine_similarity(a, b, dim=0)) / 0.5  # noqa: E731
    ways = (True, False) if denominator == "symmetric" else (True,)
    total = 0.0
    for i, forth in product(range(n), ways):
        terms = []
        for p in range(1, v):
            anchor, q = (z[0, i], p) if forth else (z[p, i], 0)
            logits = [s(anchor, z[q, j]) for j in range(n)]
            logits += [s(anchor, h) + own * (i == j) for j, h in enumerate(negatives)]
            terms.append((weights[p - 1], sum(map(math.exp, logits)) / math.exp(s(anchor, z[q, i]))))
        sums = sum(w * math.log(x) for w, x in terms), math.log(sum(w * x for w, x in terms))
        total += sums[form == "l2"] / len(ways)
    return total / n


def test_every_form_is_its_definition_written_as_a_loop_and_its_gradient_is_right():
    for form, denominator, (v, n) in product(FORMS, DENOMINATORS, ((2, 2), (2, 5), (3, 5), (6, 5))):
        z, hard, weights = views(v, n), views(1, n, seed=1)[0], [1.0, 0.8, 0.3, 0.9, 0.2][: v - 1]
        settings = {"form": form, "denominator": denominator, "weights": weights}
        assert float(loss(**settings)(z)) == pytest.approx(naive(z, form, weights, denominator), rel=1e-9)
        given = loss(**settings, hard_negative_log_weight=0.7)
        wanted = naive(z, form, weights, denominator, hard, 0.7)
        assert float(given(z, hard)) == pytest.approx(wanted, rel=1e-9)
        if v == 3:
            assert torch.autograd.gradcheck(given, (z.requires_grad_(), hard.clone().requires_grad_()))


def crowd(temperature, noise, v=3, n=16, d=48):
    """float32 (v, n, d) and (n, d): anchors in all directions, positives off them by some noise."""
    draws = torch.Generator().manual_seed(3)
    anchors = torch.randn(n, d, generator=draws)
    z = torch.stack([anchors, *(anchors + noise * torch.randn(n, d, generator=draws) for _ in range(v - 1))])
    return z * torch.rand(v, n, 1, generator=draws).add(0.5), torch.randn(n, d, generator=draws)


def exact(z, negatives, form, denominator, weights, temperature):
    """The loss and its gradients in float64, from the closed form of the gradient by each logit.

    A candidate j has e^(s_j - s_p) / (1 + sum of such), the positive minus their sum: nothing cancels.
    """
    leaves = [x.double().requires_grad_() for x in (z, negatives)]
    u, hard = (x / x.norm(dim=-1, keepdim=True) for x in leaves)
    n, own, total, surrogate = z.shape[1], torch.eye(z.shape[1], dtype=torch.bool), 0.0, 0.0
    ways = [(u[:1].expand_as(u[1:]), u[1:])]
    ways += [(u[1:], u[:1].expand_as(u[1:]))] * (denominator == "symmetric")
    for anchors, others in ways:
        s = anchors @ others.mT / temperature
        rest = [x[~own].view(n, n - 1) for x in s]
        rest = [torch.cat([r, a @ hard.T / temperature], dim=1) for r, a in zip(rest, anchors, strict=True)]
        above = [r - x.diagonal()[:, None] for r, x in zip(rest, s, strict=True)]  # s_j - s_p
        sums = [a.exp().sum(dim=1) for a in above]
        terms = torch.stack([torch.log1p(x) for x in sums])
        shares = [(a.exp() / (1 + x)[:, None]).detach() for a, x in zip(above, sums, strict=True)]
        inner = torch.stack([(share * a).sum(dim=1) for share, a in zip(shares, above, strict=True)])
        lam = torch.tensor(weights, dtype=torch.float64)[:, None]
        if form == "l1":
            value, share = (lam * terms).sum(dim=0), lam.expand_as(terms)
        else:
            share = (lam * terms.exp() / (lam * terms.exp()).sum(dim=0)).detach()
            value = (lam / lam.sum() * terms.expm1()).sum(dim=0).log1p() + math.log(sum(weights))
        total, surrogate = total + value.mean() / len(ways), surrogate + (share * inner).sum() / n / len(ways)
    return float(total.detach()), torch.autograd.grad(surrogate, leaves)


CROWDS = [(2.0, 1.0), (0.3, 0.5), (0.1, 0.3), (0.05, 0.2), (0.03, 0.1), (0.02, 0.05), (0.008, 0.02)]


@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16], ids=str)
def test_the_gradient_keeps_its_digits_however_small_the_loss(autocast):
    sizes = []
    for (temperature, noise), form, denominator in product(CROWDS, FORMS, DENOMINATORS):
        (z, negatives), weights = crowd(temperature, noise), [0.6, 0.4]
        settings = {"form": form, "denominator": denominator, "weights": weights, "temperature": temperature}
        value, wanted = exact(z, negatives, form, denominator, weights, temperature)
        leaves = [x.clone().requires_grad_() for x in (z, negatives)]
        with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
            found = loss(**settings)(*leaves)
        assert found.dtype == torch.float32
        assert float(found.detach()) == pytest.approx(value, rel=1e-4, abs=0), settings
        for ours, truth in zip(torch.autograd.grad(found, leaves), wanted, strict=True):
            ours = ours.double() / truth.norm()  # float32 holds the smallest; their squares it would not
            assert (ours - truth / truth.norm()).norm() < 1e-4, settings
        sizes.append(value)
    assert max(sizes) > 3 and 0 < min(sizes) < 1e-30  # from that of a guess to nothing


def test_vectors_of_a_few_digits_are_taken_as_they_are_by_place_or_by_name():
    for kind in (torch.bfloat16, torch.float16):
        z, hard = (x.to(kind) for x in crowd(0.05, 0.2))
        exact = loss(temperature=0.05)(z.float(), hard.float())
        assert torch.equal(loss(temperature=0.05)(z, hard), exact) and exact.dtype == torch.float32
        assert torch.equal(loss(temperature=0.05)(z=z, negatives=hard), exact)


def matryoshka(**changes):
    return Matryoshka(**({"temperature": 0.5, "dims": [1, 3], "dim_weights": [2.0, 0.5]} | changes))


def test_matryoshka_is_the_loss_of_z_and_of_x_and_of_each_prefix_of_x():
    z, x, h, g = views(3), views(2, d=6, seed=1), views(1, seed=2)[0], views(1, d=6, seed=3)[0]
    parts = [loss()(x[..., :m], g[:, :m]) for m in (1, 3, 6)]
    expected = loss()(z, h) + 2.0 * parts[0] + 0.5 * parts[1]
    assert_close(matryoshka()(z, h, x=x, x_negatives=g), expected + parts[2])
    named = matryoshka(dims=[1, 3, 6], dim_weights=[2.0, 0.5, 7.0])  # the whole, with a weight of its own
    assert_close(named(z, h, x=x, x_negatives=g), expected + 7 * parts[2])
    alone = loss()(z, h) + 3 * (loss()(z[..., :1], h[:, :1]) + loss()(z[..., :3], h[:, :3]))
    assert_close(matryoshka(dim_weights=[3.0])(z, h), alone)  # without x, prefixes are of z


def test_settings_and_batches_that_cannot_train_are_refused():
    for changes, message in (
        ({"temperature": 0}, "loss.temperature=0 must be finite and above 0"),
        ({"form": "l3"}, "'l3' is not one of l1"),
        ({"weights": [1.0, -0.5]}, r"loss.weights=\[1.0, -0.5\] must be"),
    ):
        with pytest.raises(ValueError, match=message):
            loss(**changes)
    for changes, message in (
        ({"dims": []}, r"loss.dims=\[\] must be"),
        ({"dim_weights": [1.0, 1.0, 1.0]}, "argument 2 is longer than argument 1"),
        ({"dims": [2, 5]}, r"loss.dims=\[2, 5\]: 5 is more than the width 4"),
    ):
        with pytest.raises(ValueError, match=message):
            matryoshka(**changes)(views())
    for shape in ((), (4,), (5, 4), (1, 5, 4), (2, 1, 4), (0, 5, 4), (2, 3, 5, 4)):
        with pytest.raises(ValueError, match=r"shape \(views, sentences, width\)"):
            loss()(torch.ones(shape))
    with pytest.raises(ValueError, match="which compares encoder passes"):
        matryoshka()(views(), x=torch.ones(1, 5, 4))
    with pytest.raises(ValueError, match=": give 1, or 3, which is views - 1$"):
        loss(weights=[1.0, 1.0])(views(4))


def covariances(z):
    """(v, d, d), divided by n - 1."""
    return torch.stack([torch.cov(view.T) for view in z])


def mixing(z):
    """The squared covariances of different channels, over d, of each view as a loop."""
    d = z.shape[-1]
    return [
        sum(float(c[i, j]) ** 2 for i in range(d) for j in range(d) if i != j) / d for c in covariances(z)
    ]


def test_the_covariance_penalty_is_a_loop_over_pairs_of_channels_of_x_or_z():
    x, z = views(2, 7, 5), views(3, 7, 4, seed=1)
    for of, vectors in {"x": x, "z": z}.items():
        vectors.requires_grad_()
        value = CovariancePenalty(weight=0.5, of=of)(Step(None, x, z))
        each = mixing(vectors.detach())
        assert float(value.detach()) == pytest.approx(sum(each) / len(each), rel=1e-10)
        assert torch.autograd.grad(value, vectors)[0].norm() > 0
    for settings in ({"weight": 0.0}, {"weight": 1.0, "of": "y"}):
        with pytest.raises(ValueError, match="weight="):
            CovariancePenalty(**settings)


@pytest.fixture
def own(monkeypatch):
    """The module examples/losses.py."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    yield __import__("losses")
    sys.modules.pop("losses")


def test_vicreg_of_the_examples_is_its_definition(own):
    z = 0.7 * views(3, 6)
    c, mixed = covariances(z), mixing(z)
    short = [float((1 - (x.diagonal() + 1e-4).sqrt()).clamp_min(0).mean()) for x in c]
    pairs = [
        25 * float((z[0] - z[p]).square().mean()) + 25 * (short[0] + short[p]) / 2 + mixed[0] + mixed[p]
        for p in (1, 2)
    ]
    assert float(own.VICReg()(z)) == pytest.approx(sum(pairs) / 2, rel=1e-10)


def test_sigreg_of_the_examples_is_its_integral(own):
    z = views(2, 12, 3)
    torch.manual_seed(5)
    value = own.SIGReg(share=0.3, directions=4)(z)
    torch.manual_seed(5)
    u = normalize(torch.randn(3, 4, dtype=z.dtype), dim=0)

    def statistic(numbers):
        def gap(t):
            empirical = sum(complex(math.cos(t * x), math.sin(t * x)) for x in numbers) / len(numbers)
            return abs(empirical - math.exp(-t * t / 2)) ** 2 * math.exp(-t * t / 2)

        return len(numbers) * quad(gap, -3, 3, epsabs=1e-12)[0]

    each = [statistic((view @ u[:, k]).tolist()) for view in z for k in range(4)]
    expected = 0.7 * float((z - z.mean(dim=0)).square().mean()) + 0.3 * sum(each) / len(each)
    assert float(value) == pytest.approx(expected, rel=1e-3)

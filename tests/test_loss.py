"""Each loss equals a naive loop and, where there is one, a closed form."""

import math
import re

import pytest
import torch
from torch.nn.functional import cosine_similarity
from torch.testing import assert_close

from whitenedcse.training.loss import Matryoshka, MultiPositiveLoss


def loss(**changes):
    settings = {"form": "l1", "temperature": 0.5, "weights": [1.0], "denominator": "view"}
    return MultiPositiveLoss(**(settings | {"hard_negative_log_weight": 0.0} | changes))


def views(v=3, n=5, d=4, seed=0):
    return torch.randn(v, n, d, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def naive_candidates(z, i, p, denominator):
    """Similarities in the denominator of anchor i and its positive in view p."""
    own = [(p, j) for j in range(z.shape[1])]
    every = [(q, j) for q in range(1, len(z)) for j in range(z.shape[1]) if j != i] + [(p, i)]
    return [cosine_similarity(z[0, i], z[q, j], dim=0) for q, j in (own if denominator == "view" else every)]


def naive(z, form, temperature, weights, denominator):
    v, n, _ = z.shape
    total = 0.0
    for i in range(n):
        terms = []
        for p in range(1, v):
            positive = math.exp(cosine_similarity(z[0, i], z[p, i], dim=0) / temperature)
            below = sum(math.exp(s / temperature) for s in naive_candidates(z, i, p, denominator))
            terms.append((weights[p - 1], positive, below))
        if form == "l1":
            total += sum(-w * math.log(positive / below) for w, positive, below in terms)
        else:
            total += math.log(sum(w * below / positive for w, positive, below in terms))
    return total / n


@pytest.mark.parametrize("form", ["l1", "l2"])
@pytest.mark.parametrize("denominator", ["view", "joint"])
@pytest.mark.parametrize("v", [2, 3, 4, 6, 9])
def test_the_loss_is_its_definition_written_as_a_loop(form, denominator, v):
    z, weights = views(v), [1.0, 0.8, 0.3, 0.9, 0.2, 1.5, 0.4, 1.0][: v - 1]
    value = loss(form=form, denominator=denominator, weights=weights)(z)
    assert float(value) == pytest.approx(naive(z, form, 0.5, weights, denominator), rel=1e-10)


def test_l2_with_one_denominator_is_the_published_form():
    z = views(3)
    z[2] = z[1]  # equal views have equal denominators
    s = torch.stack([cosine_similarity(z[0, i], z[1], dim=-1) for i in range(5)]) / 0.5
    published = (2 * (-s.diagonal()).exp()).log() + s.logsumexp(dim=1)
    assert_close(loss(form="l2")(z), published.mean())


@pytest.mark.parametrize("form", ["l1", "l2"])
def test_two_views_are_simcse(form):
    z = views(2)
    s = cosine_similarity(z[0].unsqueeze(1), z[1].unsqueeze(0), dim=-1) / 0.5
    assert_close(loss(form=form)(z), torch.nn.functional.cross_entropy(s, torch.arange(5)))


@pytest.mark.parametrize("v", [2, 3])
def test_symmetric_takes_every_view_as_anchor(v):
    z = views(v)
    s = [cosine_similarity(z[0].unsqueeze(1), z[p].unsqueeze(0), dim=-1) / 0.5 for p in range(1, v)]
    target = torch.arange(5)
    both = [
        torch.nn.functional.cross_entropy(m, target) + torch.nn.functional.cross_entropy(m.T, target)
        for m in s
    ]
    assert_close(loss(denominator="symmetric")(z), sum(both) / 2)


@pytest.mark.parametrize("n", [2, 8, 64])
def test_collapsed_embeddings_score_like_guessing(n):
    assert_close(loss(temperature=0.05)(torch.ones(2, n, 4)), torch.tensor(math.log(n)))
    joint = loss(denominator="joint")(
        torch.ones(3, n, 4)
    )  # 2 positives, 2 (n - 1) negatives and the positive
    assert_close(joint, torch.tensor(2 * math.log(2 * (n - 1) + 1)))


@pytest.mark.parametrize("form", ["l1", "l2"])
@pytest.mark.parametrize("denominator", ["view", "joint", "symmetric"])
def test_every_positive_is_pulled(form, denominator):
    s = (views(4, 5, 5)[1:]).requires_grad_()
    loss(form=form, denominator=denominator).combined(s, s.new_empty(1, 5, 0)).backward()
    assert (s.grad.diagonal(dim1=-2, dim2=-1) < 0).all()
    assert (s.grad.masked_fill(torch.eye(5, dtype=bool), 1.0) > 0).all()


@pytest.mark.parametrize("denominator", ["view", "joint"])
def test_hard_negatives_join_the_denominator_with_their_own_weight(denominator):
    z, negatives, weight = views(2), views(1, 5, 4, seed=1)[0], 0.7
    value = loss(hard_negative_log_weight=weight, denominator=denominator)(z, negatives)
    total = 0.0
    for i in range(5):
        logits = [cosine_similarity(z[0, i], z[1, j], dim=0) / 0.5 for j in range(5)]
        logits += [
            cosine_similarity(z[0, i], negatives[j], dim=0) / 0.5 + weight * (i == j) for j in range(5)
        ]
        total += torch.stack(logits).logsumexp(0) - logits[i]
    assert_close(value, total / 5)


@pytest.mark.parametrize("form", ["l1", "l2"])
@pytest.mark.parametrize("denominator", ["view", "joint", "symmetric"])
def test_gradient_is_right(form, denominator):
    z, negatives = views(3).requires_grad_(), views(1, seed=1)[0].requires_grad_()
    assert torch.autograd.gradcheck(loss(form=form, denominator=denominator), (z, negatives))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": 0}, "temperature=0 must be finite and above 0"),
        ({"temperature": math.inf}, "temperature=inf"),
        ({"form": "l3"}, "'l3' is not one of l1"),
        ({"denominator": "all"}, "'all' is not one of view"),
        ({"weights": [1.0, -0.5]}, "positive numbers"),
    ],
)
def test_settings_that_cannot_train_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        loss(**changes)


def test_batches_that_cannot_train_are_refused():
    for given in (loss(), Matryoshka(dims=[2])):
        for shape in ((), (4,), (5, 4), (1, 5, 4), (2, 1, 4), (0, 5, 4), (2, 3, 5, 4)):
            message = rf"shape \(views, sentences, width\), .* 2 views of 2 .*; got {re.escape(str(shape))}$"
            with pytest.raises(ValueError, match=message):
                given(torch.ones(shape))
        for shape in ((4,), (5, 3), (1, 5, 4)):
            message = rf"hard negatives of shape \(sentences, 4\), .*; got {re.escape(str(shape))}$"
            with pytest.raises(ValueError, match=message):
                given(views(), torch.ones(shape))
    for x in (torch.ones(5, 4), torch.ones(1, 5, 4)):
        with pytest.raises(
            ValueError, match=rf"loss=matryoshka needs .*; got {re.escape(str(tuple(x.shape)))}$"
        ):
            Matryoshka(dims=[2])(views(), x=x)
    with pytest.raises(ValueError, match=r"hard negatives of shape \(sentences, 6\).*got \(5, 4\)$"):
        Matryoshka(dims=[2])(views(), x=views(d=6), x_negatives=torch.ones(5, 4))
    with pytest.raises(ValueError, match="for 3 positives; give 1 or 3$"):
        loss(weights=[1.0, 1.0])(views(4))
    with pytest.raises(ValueError, match=r"loss.weights=\[1.0, 0.5\] for 1 positive; give 1$"):
        loss(weights=[1.0, 0.5])(views(2))


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
    ways = [(u[:1].expand_as(u[1:]), u[1:])] + (
        [(u[1:], u[:1].expand_as(u[1:]))] * (denominator == "symmetric")
    )
    for anchors, others in ways:
        s = anchors @ others.mT / temperature
        rest = [x[~own].view(n, n - 1) for x in s]
        rest = [torch.cat(rest, dim=1)] * len(rest) if denominator == "joint" else rest
        rest = [torch.cat([r, a @ hard.T / temperature], dim=1) for r, a in zip(rest, anchors, strict=True)]
        above = [r - x.diagonal()[:, None] for r, x in zip(rest, s, strict=True)]  # s_j - s_p
        sums = [a.exp().sum(dim=1) for a in above]
        terms = torch.stack([torch.log1p(x) for x in sums])
        inner = [
            ((a.exp() / (1 + x)[:, None]).detach() * a).sum(dim=1) for a, x in zip(above, sums, strict=True)
        ]
        inner, lam = torch.stack(inner), torch.tensor(weights, dtype=torch.float64)[:, None]
        if form == "l1":
            value, share = (lam * terms).sum(dim=0), lam.expand_as(terms)
        else:
            share = (lam * terms.exp() / (lam * terms.exp()).sum(dim=0)).detach()
            value = (lam / lam.sum() * terms.expm1()).sum(dim=0).log1p() + math.log(sum(weights))
        total, surrogate = total + value.mean() / len(ways), surrogate + (share * inner).sum() / n / len(ways)
    return float(total.detach()), torch.autograd.grad(surrogate, leaves)


CROWDS = [(2.0, 1.0), (0.3, 0.5), (0.1, 0.3), (0.05, 0.2), (0.03, 0.1), (0.02, 0.05), (0.008, 0.02)]
FORMS = ["l1", "l2"]


@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("denominator", ["view", "joint", "symmetric"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("temperature", "noise"), CROWDS)
def test_the_gradient_keeps_its_digits_however_small_the_loss(
    temperature, noise, form, denominator, autocast
):
    (z, negatives), weights = crowd(temperature, noise), [0.6, 0.4]
    settings = {"form": form, "denominator": denominator, "weights": weights, "temperature": temperature}
    value, wanted = exact(z, negatives, form, denominator, weights, temperature)
    leaves = [x.clone().requires_grad_() for x in (z, negatives)]
    with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
        found = loss(**settings)(*leaves)
    assert found.dtype == torch.float32
    assert float(found.detach()) == pytest.approx(value, rel=1e-4, abs=0)
    for ours, truth in zip(torch.autograd.grad(found, leaves), wanted, strict=True):
        ours = ours.double() / truth.norm()  # float32 holds the smallest; their squares it would not
        assert (ours * truth).sum() / truth.norm() > 0.9999 * ours.norm()  # the cosine
        assert (ours - truth / truth.norm()).norm() < 1e-4


def test_these_losses_reach_from_that_of_a_guess_to_nothing():
    sizes = [exact(*crowd(t, noise), "l1", "view", [0.6, 0.4], t)[0] for t, noise in CROWDS]
    assert sizes[0] > 3 and sizes[-2] < 1e-12 and sizes[-1] < 1e-30
    assert all(1e-8 < small / large < 1 for large, small in zip(sizes[:-2], sizes[1:-1], strict=True))


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_vectors_of_a_few_digits_are_taken_as_they_are(kind):
    z = crowd(0.05, 0.2)[0].to(kind)
    assert torch.equal(loss(temperature=0.05)(z), loss(temperature=0.05)(z.float()))


def matryoshka(**changes):
    settings = {"temperature": 0.5, "dims": [1, 3], "dim_weights": [2.0, 0.5]}
    return Matryoshka(**(settings | changes))


@pytest.mark.parametrize("form", ["l1", "l2"])
def test_matryoshka_is_the_loss_of_z_and_of_each_prefix_of_x_written_as_a_loop(form):
    z, x = views(3), views(2, d=6, seed=1)
    expected = naive(z, form, 0.5, [1.0, 1.0], "view") + naive(x, form, 0.5, [1.0], "view")
    for m, weight in ((1, 2.0), (3, 0.5)):
        expected += weight * naive(x[..., :m], form, 0.5, [1.0], "view")
    assert float(matryoshka(form=form)(z, x=x)) == pytest.approx(expected, rel=1e-10)


def test_matryoshka_cuts_z_where_it_is_given_nothing_else_and_one_weight_serves_all():
    z, h = views(3), views(1, seed=2)[0]
    expected = loss()(z, h) + 3 * (loss()(z[..., :1], h[:, :1]) + loss()(z[..., :3], h[:, :3]))
    assert_close(matryoshka(dim_weights=[3.0])(z, h), expected)


def test_matryoshka_cuts_the_hard_negatives_of_x_with_it():
    z, x, h, g = views(3), views(2, seed=1), views(1, seed=2)[0], views(1, seed=3)[0]
    expected = loss()(z, h) + 2.0 * loss()(x[..., :1], g[:, :1]) + 0.5 * loss()(x[..., :3], g[:, :3])
    assert_close(matryoshka()(z, h, x=x, x_negatives=g), expected + loss()(x, g))
    named = matryoshka(dims=[1, 3, 4], dim_weights=[2.0, 0.5, 7.0])  # the whole, with a weight of its own
    assert_close(named(z, h, x=x, x_negatives=g), expected + 7 * loss()(x, g))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"dims": []}, r"loss.dims=\[\] must be one or more sizes above 0"),
        ({"dims": [0, 4]}, r"loss.dims=\[0, 4\] must be one or more sizes above 0"),
        (
            {"dim_weights": [1.0, 1.0, 1.0]},
            r"loss.dim_weights=\[1.0, 1.0, 1.0\] must be numbers above 0: one, or",
        ),
        ({"dim_weights": [1.0, 0.0]}, r"loss.dim_weights=\[1.0, 0.0\] must be numbers above 0"),
        ({"dim_weights": [math.inf]}, r"loss.dim_weights=\[inf\] must be numbers above 0"),
        ({"temperature": 0.0}, "loss.temperature=0.0 must be finite"),
        ({"dims": [2, 5]}, r"loss.dims=\[2, 5\]: 5 is more than the embedding's width 4; leave out"),
    ],
)
def test_prefixes_that_cannot_be_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        matryoshka(**settings)(views())

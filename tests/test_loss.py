"""Each loss equals a naive loop and, where there is one, a closed form."""

import math

import pytest
import torch
from torch.nn.functional import cosine_similarity
from torch.testing import assert_close

from whitenedcse.training.loss import MultiPositiveLoss


def loss(**changes):
    settings = {"form": "l1", "temperature": 0.5, "weights": [1.0], "denominator": "view"}
    return MultiPositiveLoss(
        **(settings | {"hard_negative_log_weight": 0.0, "force_literal": False} | changes)
    )


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
@pytest.mark.parametrize("v", [2, 3, 4])
def test_the_loss_is_its_definition_written_as_a_loop(form, denominator, v):
    z, weights = views(v), [1.0, 0.8, 0.3][: v - 1]
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


def test_the_printed_equation_8_pushes_positives_apart_and_is_refused():
    with pytest.raises(ValueError, match="pushes positives apart; use l2"):
        loss(form="l2_literal")
    s = (views(4, 5, 5)[1:]).requires_grad_()
    loss(form="l2_literal", force_literal=True).combined(s, s.new_empty(1, 5, 0)).backward()
    assert (s.grad.diagonal(dim1=-2, dim2=-1) > 0).all()


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
    with pytest.raises(ValueError, match="got 1 of 5"):
        loss()(views(1))
    with pytest.raises(ValueError, match="got 2 of 1"):
        loss()(views(2, 1))
    with pytest.raises(ValueError, match="for 3 positives; give 1 or 3"):
        loss(weights=[1.0, 1.0])(views(4))

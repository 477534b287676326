"""Heads: order, precision, memory, who shares statistics with whom, and whitenings of one's own."""

from contextlib import nullcontext
from itertools import product

import pytest
import torch
from encoders import whitening
from torch import nn
from torch.testing import assert_close

import whitenedcse.whitening as functions
from whitenedcse.model.head import ProjectionHead
from whitenedcse.model.whitener import ROOTS, Whitener, WhiteningSettings, rearranged

KINDS = ("pca", "zca", "group", "shuffled_group")


def views(v=3, n=32, d=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(d, d, generator=generator)
    return torch.randn(v, n, d, generator=generator) @ mix + torch.randn(d, generator=generator)


def head(position="before", dense=True, settings=None, seed=0, **changes):
    torch.manual_seed(seed)
    return ProjectionHead(width=8, whitening=settings or whitening(**changes), dense=dense, position=position)


def group_covariances(x, width):
    return torch.stack([torch.cov(part.T, correction=0) for part in x.split(width, dim=-1)])


def test_a_batch_leaves_a_whitening_head_white():
    for kind in KINDS:  # running statistics begin as the first batch's own
        z = head(dense=False, kind=kind, group_width=8, eps=1e-9)(views(v=1 if kind in ("pca", "zca") else 3))
        for view in z:
            assert_close(torch.cov(view.T, correction=0), torch.eye(8), atol=1e-3, rtol=0)


def test_position_decides_what_is_white():
    x = views()
    before, after, both = (head(position, kind="group", eps=1e-9) for position in ("before", "after", "both"))
    assert_close(group_covariances(after(x)[0], 2), torch.eye(2).expand(4, 2, 2), atol=2e-2, rtol=0)
    assert_close(group_covariances(both(x)[0], 2), torch.eye(2).expand(4, 2, 2), atol=2e-2, rtol=0)
    assert_close(before(x), torch.tanh(before.linear(before.before(x))))
    assert after.before is None and before.after is None
    assert_close(both(x), both.after(torch.tanh(both.linear(both.before(x)))))
    assert torch.equal(ProjectionHead(width=8, whitening=None, dense=False)(x), x)
    with pytest.raises(ValueError, match="'beside' is not one of before, after, both"):
        head(position="beside")


def test_momentum_follows_equation_13():
    whitener = Whitener(8, whitening(kind="zca", momentum=0.9)).train()
    mean = covariance = None
    for x in (views(seed=seed) for seed in range(3)):
        whitener(x)
        batch_mean = torch.stack([view.mean(0) for view in x]).mean(0)
        batch_covariance = torch.stack([torch.cov(view.T, correction=0) for view in x]).mean(0)
        mean = batch_mean if mean is None else 0.9 * mean + 0.1 * batch_mean
        covariance = batch_covariance if covariance is None else 0.9 * covariance + 0.1 * batch_covariance
    assert_close(whitener.mean, mean)
    assert_close(whitener.covariance[0], covariance)


def test_eval_mode_is_the_affine_transform_of_the_running_statistics():
    for kind, transform in [("pca", "zca"), *product(KINDS[1:], ROOTS)]:
        settings = whitening(kind=kind, transform=transform, group_width=4, iterations=3, eps=1e-2)
        whitener = Whitener(8, settings).double().train()
        for seed in range(3):
            whitener(views(seed=seed).double())
        x, z = views(seed=9).double(), whitener.eval()(views(seed=9).double())
        assert_close(z, torch.cat([whitener(x[:, i : i + 1]) for i in range(x.shape[1])], 1))
        weight, bias = whitener.dense()
        assert_close(z, x @ weight.T + bias)
        w = whitener.group_width
        for cov, start in zip(whitener.covariance, range(0, 8, w), strict=True):
            group = slice(start, start + w)
            a = cov + 1e-2 * cov.diagonal().mean() * torch.eye(w).double()
            p = torch.eye(w, dtype=a.dtype)
            if transform == "iterative":
                for _ in range(3):
                    p = 1.5 * p - 0.5 * p @ p @ p @ a / a.trace()
                expected = p / a.trace().sqrt()
            else:
                values, u = torch.linalg.eigh(a)
                expected = u / values.sqrt() @ (u.T if kind != "pca" else torch.eye(w).double())
            found = weight.T[group, group]
            expected = expected.abs().flip(1) if kind == "pca" else expected  # signs, and the largest first
            assert_close(found.abs() if kind == "pca" else found, expected, rtol=1e-6, atol=1e-9)


def test_a_whitening_of_float32_evaluates_float64():
    for kind in KINDS:
        whitener, x = Whitener(8, kind=kind, group_width=4), views().double()
        assert whitener(x).dtype == torch.float64
        assert_close(whitener.eval()(x), whitener(x.float()).double(), atol=1e-5, rtol=1e-5)


def test_evaluation_decomposes_the_running_statistics_once_for_as_long_as_they_stay(monkeypatch):
    whitener, calls = Whitener(8, whitening(kind="zca")).train(), []
    whitener(views())
    real = functions.eigh
    monkeypatch.setattr(functions, "eigh", lambda a: calls.append(len(a)) or real(a))
    with torch.inference_mode():
        first = whitener.eval()(views(seed=1))
    for _ in range(5):
        assert torch.equal(whitener(views(seed=1)), first)
    x = views(seed=1).requires_grad_()
    whitener(x).sum().backward()  # what inference mode computed serves a gradient, too
    assert len(calls) == 1 and x.grad.isfinite().all()
    whitener.train()(views(seed=2))
    calls.clear()
    assert not torch.allclose(whitener.eval()(views(seed=1)), first)
    other = Whitener(8, whitener.settings).eval()
    other(views())
    other.load_state_dict(whitener.state_dict())
    assert torch.equal(other(views(seed=1)), whitener(views(seed=1))) and len(calls) == 3


def test_a_head_in_training_whitens_by_its_settings():
    for kind, transform in product(("group", "shuffled_group"), ROOTS):
        settings = whitening(kind=kind, transform=transform, group_width=4, iterations=2, eps=1e-3)
        x = views().double()
        torch.manual_seed(3)
        z = head(dense=False, settings=settings, seed=3)(x)
        torch.manual_seed(3)
        order = torch.arange(8).expand(3, 8)
        order = functions.random_permutations((3,), 8, device="cpu") if kind == "shuffled_group" else order
        options = {"width": 4, "eps": 1e-3, "root": settings.root}
        assert_close(z, functions.shuffled_group_whiten(x, order, **options))


def test_official_slices_are_consecutive_parts_of_the_sentence_major_batch():
    x = views(v=3, n=6)
    sentence_major = torch.stack([x[view, sentence] for sentence in range(6) for view in range(3)])
    seen = []
    back = rearranged(x, "official_slice", lambda slices: seen.append(slices) or slices + 1)
    assert_close(seen[0], torch.stack(sentence_major.chunk(3)))
    assert_close(back, x + 1)


@pytest.mark.parametrize("gradient", ["full", "centre", "none"])
def test_the_gradient_of_momentum_whitening_stops_where_the_setting_says(gradient):
    whitener = Whitener(8, whitening(kind="zca", momentum=0.5, gradient=gradient)).double().train()
    whitener(views(seed=1).double())
    old_mean, old_covariance = whitener.mean.clone(), whitener.covariance[0].clone()
    x, y = (views().double().requires_grad_() for _ in "xy")
    grad = torch.randn(3, 32, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    whitener(x).backward(grad)
    mean = (old_mean + y.mean(dim=(0, 1))) / 2
    covariance = (old_covariance + torch.stack([torch.cov(v.T, correction=0) for v in y]).mean(0)) / 2
    mean = mean.detach() if gradient == "none" else mean
    covariance = covariance if gradient == "full" else covariance.detach()
    ridge = 1e-5 * covariance.diagonal().mean() * torch.eye(8)
    values, u = torch.linalg.eigh(covariance + ridge)
    ((y - mean) @ (u / values.sqrt()) @ u.T).backward(grad)
    assert_close(x.grad, y.grad)


def test_settings_that_cannot_be_are_refused():
    for changes, message in (
        ({"kind": "sphere"}, "'sphere' is not one of pca, zca, group, shuffled_group"),
        ({"gradient": "all"}, "'all' is not one of full, centre, none"),
        ({"kind": "pca", "gradient": "full"}, "no full gradient"),
        ({"kind": "pca", "transform": "iterative"}, "no transform but zca"),
        ({"transform": "cholesky"}, "'cholesky' is not one of zca, iterative"),
        ({"partition": "joint"}, "'joint' is not one of view, official_slice"),
        ({"iterations": 0}, "iterations=0 is not 1 or above"),
        ({"momentum": 1.0}, "momentum=1.0"),
        ({"eps": 0.0}, "eps=0.0 is not finite and above 0"),
        ({"group_width": None}, "group_width=None is not 1 or more channels"),
        ({"group_width": 5}, "5.*8"),
    ):
        with pytest.raises(ValueError, match=message):
            head(**changes)


@pytest.mark.parametrize("kind", ["zca", "group"])
def test_a_number_that_is_not_finite_spoils_its_group_in_training_and_its_own_sentence_afterwards(kind):
    x, module = views(), Whitener(8, whitening(kind=kind)).eval()
    x[0, 3, 5] = torch.nan
    spoilt = torch.zeros(3, 32, 8, dtype=torch.bool)
    spoilt[0, 3, slice(None) if kind == "zca" else slice(4, 6)] = True
    assert torch.equal(module(x).isnan(), spoilt)
    module.train()(x)
    lasting = module.eval()(views()).isnan()  # of a whole batch
    expected = torch.zeros(8, dtype=torch.bool)
    expected[slice(None) if kind == "zca" else slice(4, 6)] = True
    assert torch.equal(lasting, expected.expand(3, 32, 8))


def test_a_batch_is_refused_if_a_group_of_it_has_no_full_rank():
    for kind, n in (("group", 4), ("shuffled_group", 4), ("group", 5), ("zca", 4)):
        refused = pytest.raises(ValueError, match="4 sentences cannot whiten 4")
        with refused if n == 4 and kind != "zca" else nullcontext():
            Whitener(16, whitening(kind=kind, group_width=4))(torch.randn(n, 16))


def test_a_whitening_takes_settings_as_one_or_by_name():
    for given in ({}, {"kind": "shuffled_group", "group_width": 3}, {"kind": "pca", "gradient": "none"}):
        module = Whitener(6, **given)
        assert module.settings == WhiteningSettings(**given) == Whitener(6, module.settings).settings
        made = ProjectionHead(6, whitening=module, position="both")
        assert made.before is module and made.after is not module and made.whitening == module.settings
        assert not made.own and ProjectionHead(6).whitening == WhiteningSettings()


def test_a_whitening_of_one_s_own_is_used_as_it_is():
    class Mine(Whitener):
        def over_batch(self, x):
            return 2 * x

    class Scaled(nn.Module):
        def forward(self, x):
            return 3 * x

    x = views()
    for module, factor in ((Mine(8), 2), (Scaled(), 3)):
        made = ProjectionHead(8, whitening=module, dense=False)
        assert type(made.before) is type(module) and made.own
        assert torch.equal(made(x), factor * x)
    assert ProjectionHead(8, whitening=nn.Linear(8, 8)).own  # no dense layer of a checkpoint
    both = ProjectionHead(8, whitening=Mine(8), position="both")
    both(x)
    assert type(both.after) is Mine and not torch.equal(both.after.mean, both.before.mean)

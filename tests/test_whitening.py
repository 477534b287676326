"""Whitening against numpy eigenvectors in float64, finite differences and closed forms."""

import functools
import re
import warnings

import numpy as np
import pytest
import torch
from torch.autograd import gradcheck
from torch.testing import assert_close

from whitenedcse import GroupWhitening, linalg
from whitenedcse import whitening as wh
from whitenedcse.linalg import cholesky_root, correlation_root, inverse_root, iterated_root

EPS = 1e-6
POLICIES = pytest.mark.parametrize("policy", ["full", "centre", "none"])
ENGINES = pytest.mark.parametrize("shape", [(9, 1), (9, 2), (9, 4), (5, 5), (5, 8), (2, 3)], ids=str)  # n, d
WIDTHS = pytest.mark.parametrize("width", [2, 3, 6, 24])
pytestmark = pytest.mark.filterwarnings("ignore:rank-deficient")
near = functools.partial(assert_close, rtol=0, check_dtype=False)


@pytest.fixture
def x():
    """Three views of 40 sentences, 24 correlated channels of unequal scale, far from the origin."""
    torch.manual_seed(0)
    mixing = torch.eye(24) + 0.3 * torch.randn(24, 24) / 24**0.5
    return torch.randn(3, 40, 24) @ mixing * torch.linspace(0.5, 2, 24) + 3


def draw(n, d, seed=0):
    return torch.randn(2, n, d, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) + 1


def oracle_matrix(x, eps, shrinkage=0.0, floor=0.0):
    """numpy: covariance by its definition, inverse square root by eigenvectors. (n, d) -> (d, d).

    eps is a share of the mean variance, floor an absolute one; 100 roundings of the mean do not count.
    """
    cov = sum(np.outer(row, row) for row in x - x.mean(axis=0)) / len(x)
    variance = np.trace(cov) / len(cov)
    cov = (1 - shrinkage) * cov + shrinkage * variance * np.eye(len(cov))
    floor += np.mean((100 * np.finfo(x.dtype).eps * x.mean(axis=0)) ** 2)
    values, vectors = np.linalg.eigh(cov)
    return vectors @ np.diag((values.clip(0) + eps * variance + floor) ** -0.5) @ vectors.T


def oracle(x, *settings):
    return (x - x.mean(axis=0)) @ oracle_matrix(x, *settings)


def each(function, x, *args):
    """A numpy function of one view, on every view of a tensor."""
    return torch.tensor(np.stack([function(view, *args) for view in x.detach().double().numpy()]))


def numeric_gradient(function, x, grad, step=1e-5):
    """Central differences of <grad, function(x)>."""
    moves = step * np.eye(x.size).reshape(-1, *x.shape)
    slopes = [((function(x + move) - function(x - move)) * grad).sum() / (2 * step) for move in moves]
    return torch.tensor(slopes).reshape(x.shape)


@ENGINES
@POLICIES
@pytest.mark.parametrize("shrinkage", [0.0, 0.3, 1.0])
def test_every_engine_equals_numpy_eigenvectors(shape, policy, shrinkage):
    x, settings = draw(*shape), {"eps": 1e-3, "gradient": policy, "shrinkage": shrinkage}
    expected = each(oracle, x, 1e-3, shrinkage)
    near(wh.whiten(x, **settings), expected, atol=1e-11)
    near(wh.whiten(x.float(), **settings), expected, atol=2e-4)


@ENGINES
@pytest.mark.parametrize("shrinkage", [0.0, 0.3])
@pytest.mark.parametrize("policy", ["centre", "none"])
def test_a_constant_matrix_multiplies_the_gradient_on_the_right(shape, shrinkage, policy):
    x, grad = draw(*shape).requires_grad_(), draw(*shape, seed=1)
    wh.whiten(x, eps=1e-3, gradient=policy, shrinkage=shrinkage).backward(grad)
    expected = grad @ each(oracle_matrix, x, 1e-3, shrinkage)
    near(x.grad, expected - expected.mean(dim=-2, keepdim=True) * (policy == "centre"), atol=1e-9)


def test_gram_in_float32_is_as_exact_as_the_768_wide_matrix_in_float64():
    x, grad = draw(32, 768).float().requires_grad_(), draw(32, 768, seed=1)
    y = wh.whiten(x, eps=1e-5)
    y.backward(grad.float())
    near(y.detach(), each(oracle, x, 1e-5), atol=1e-5)
    expected = grad @ each(oracle_matrix, x, 1e-5)
    assert (x.grad - expected + expected.mean(dim=-2, keepdim=True)).norm() < 1e-5 * expected.norm()


DAMAGE = {
    "none": lambda x: x,
    "constant channel": lambda x: torch.cat((torch.full_like(x[..., :1], 3), x[..., 1:]), dim=-1),
    "two equal channels": lambda x: torch.cat((x[..., 1:2], x[..., 1:]), dim=-1),
    "duplicate sentences": lambda x: x[:, [0, 0, 1, 1, 4, 5]],
    "identical sentences": lambda x: x[:, :1].expand_as(x).clone(),
    "two sentences": lambda x: x[:, :2],
    "one sentence": lambda x: x[:, :1],
}


@POLICIES
@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
@pytest.mark.parametrize("d", [2, 4, 8])
def test_degenerate_batches_give_what_the_oracle_gives_and_finite_gradients(damage, policy, d):
    x = damage(draw(6, d)).float().requires_grad_()
    y = wh.whiten(x, eps=1e-5, gradient=policy)
    y.backward(draw(6, d, seed=1)[:, : x.shape[1]].float())
    assert x.grad.isfinite().all()
    near(y.detach(), each(oracle, x, 1e-5), atol=2e-2)


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
@pytest.mark.parametrize("d", [2, 4, 8])
@pytest.mark.parametrize("shrinkage", [0.0, 0.3])
def test_full_gradient_equals_finite_differences_of_the_oracle(damage, d, shrinkage):
    """With a floor, without which batches of equal sentences have no derivative, as x / |x| at 0."""
    x, grad = damage(draw(6, d))[:1].requires_grad_(), damage(draw(6, d, seed=1))[:1]
    wh.whiten(x, eps=0.1, floor=0.05, gradient="full", shrinkage=shrinkage).backward(grad)
    expected = numeric_gradient(
        lambda m: oracle(m, 0.1, shrinkage, 0.05), x[0].detach().numpy(), grad[0].numpy()
    )
    near(x.grad[0], expected, atol=1e-7)


@pytest.mark.parametrize("d", [2, 3, 4])
def test_full_gradient_is_right_at_equal_eigenvalues(d):
    columns = torch.cat((torch.ones(6, 1, dtype=torch.float64), draw(6, d)[0]), dim=1)
    x = (6**0.5 * torch.linalg.qr(columns).Q[:, 1:]).requires_grad_()  # orthogonal, and to the constant
    near(each(lambda v: np.cov(v.T, bias=True), x[None])[0], torch.eye(d), atol=1e-12)
    assert gradcheck(functools.partial(wh.whiten, eps=1e-2, gradient="full"), (x,))


@pytest.mark.parametrize("d", [2, 5, 80])
@POLICIES
def test_a_negative_determinant_or_eigenvalue_by_rounding_does_no_harm(d, policy):
    channel = draw(64, 50)[0].T.float() * torch.logspace(-3, 3, 50).unsqueeze(-1)
    x = (channel.unsqueeze(-1) * torch.linspace(1, 1.7, d)).requires_grad_()
    y = wh.whiten(x, eps=1e-12, gradient=policy)
    y.sum().backward()
    assert y.isfinite().all() and x.grad.isfinite().all()


@WIDTHS
@POLICIES
def test_each_group_has_identity_covariance_after_whitening(x, width, policy):
    y = wh.group_whiten(x, width=width, eps=EPS, gradient=policy).unflatten(-1, (-1, width))
    near(y.mean(dim=1), torch.zeros(3, 24 // width, width), atol=1e-5)
    for group in y.movedim(2, 1).flatten(0, 1).double().numpy():
        np.testing.assert_allclose(np.cov(group, rowvar=False, bias=True), np.eye(width), atol=1e-4)


SCALES = [1e-12, 1e-6, 1e-3, 1e-2, 1.0, 7.0, 1e4, 1e12]


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize(("n", "width"), [(40, 2), (40, 6), (40, 24), (12, 24)])
@POLICIES
def test_the_scale_of_the_input_changes_neither_the_output_nor_the_direction_of_the_gradient(
    x, scale, n, width, policy
):
    x, grad, found = x[:, :n], torch.randn(3, n, 24), []
    for factor in (1.0, scale):
        leaf = (factor * x).requires_grad_()
        y = wh.group_whiten(leaf, width=width, eps=1e-5, gradient=policy)
        y.backward(grad)
        found += [y.detach(), factor * leaf.grad]
    near(found[2], found[0], atol=2e-4)
    near(found[3], found[1], atol=2e-4 * found[1].abs().max().item())


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("kind", [wh.zca, wh.pca])
def test_a_covariance_of_any_scale_is_whitened_as_far(scale, kind):
    cov = wh.covariance(draw(50, 5)).float() * scale**2
    matrix = kind(cov, eps=1e-5)
    near(matrix.mT @ cov @ matrix, torch.eye(5).expand(2, 5, 5), atol=1e-3)


def test_channels_of_unequal_scale_come_out_as_white_as_their_group_allows():
    x = draw(200, 6)[0].float() * torch.tensor([1e-3, 1e-3, 1.0, 1.0, 50.0, 50.0]) + 1
    y = wh.group_whiten(x, width=2, eps=1e-5).unflatten(-1, (-1, 2)).movedim(1, 0)
    near(wh.covariance(y), torch.eye(2).expand(3, 2, 2), atol=1e-3)


def test_a_floor_alone_is_the_absolute_eps_of_heads_trained_before():
    x = 1e-3 * draw(40, 2)
    near(wh.whiten(x, eps=0.0, floor=1e-5), each(oracle, x, 0.0, 0.0, 1e-5), atol=1e-9)
    assert 0.2 < wh.whiten(x, eps=0.0, floor=1e-5).std() < 0.4  # far from white, as it was


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_the_rounding_of_a_constant_channel_is_not_blown_up(kind):
    x = draw(7, 4)[0].to(kind)
    x[:, 2:] = torch.tensor([1 / 3, 1e4 / 3])
    y = wh.group_whiten(x, width=2, eps=1e-5)
    assert y[:, 2:].abs().max() < 0.05 and y[:, :2].abs().max() > 1


@WIDTHS
@POLICIES
def test_shuffled_groups_are_the_channels_that_the_permutation_names(x, width, policy):
    order, grad = wh.permutations((3,), 24, device="cpu"), torch.randn(3, 40, 24).double()
    leaf, alone = x.double().requires_grad_(), x.double().requires_grad_()
    y = wh.shuffled_group_whiten(leaf, order, width=width, eps=EPS, gradient=policy)
    y.backward(grad)
    for v, group in ((v, group) for v, channels in enumerate(order) for group in channels.split(width)):
        near(y[v][:, group], each(oracle, x[v : v + 1, :, group], EPS)[0], atol=1e-9)
        wh.whiten(alone[v][:, group], eps=EPS, gradient=policy).backward(grad[v][:, group])
    near(leaf.grad, alone.grad, atol=1e-9)


@WIDTHS
@pytest.mark.parametrize("n", [40, 12])
def test_views_never_share_statistics_or_a_permutation(x, width, n):
    whiten = functools.partial(wh.shuffled_group_whiten, width=width, eps=EPS)
    x, order = x[:, :n], wh.permutations((3,), 24, device="cpu")
    before, after = whiten(x, order), whiten(torch.stack((x[0], 5 * x[1].exp(), x[2])), order)
    assert torch.equal(before[[0, 2]], after[[0, 2]]) and not torch.equal(before[1], after[1])
    with pytest.raises(ValueError, match=r"\(24,\), not \(3, 24\)"):
        whiten(x, order[0])


@ENGINES
def test_zca_commutes_with_rotation_and_with_the_order_of_sentences(shape):
    x, order = draw(*shape), torch.randperm(shape[0])
    rotation = torch.linalg.qr(draw(shape[1], shape[1], seed=2)[0]).Q
    near(wh.whiten(x[:, order] @ rotation, eps=1e-3), wh.whiten(x, eps=1e-3)[:, order] @ rotation, atol=1e-10)


def test_pca_gives_unit_variances_by_descending_variance_with_fixed_signs():
    x = draw(50, 5) * torch.tensor([1.0, 5, 2, 4, 3])
    matrix = wh.pca(wh.covariance(x).requires_grad_(), eps=0.0)
    assert not matrix.requires_grad
    for view, w in zip(x.numpy(), matrix.numpy(), strict=True):
        np.testing.assert_allclose(np.cov(view @ w, rowvar=False, bias=True), np.eye(5), atol=1e-10)
        variances = np.var(view @ (w / np.linalg.norm(w, axis=0)), axis=0)
        np.testing.assert_allclose(variances, np.linalg.eigvalsh(np.cov(view.T, bias=True))[::-1])
        assert (w[np.abs(w).argmax(axis=0), range(5)] > 0).all()


def test_statistics_of_a_batch_are_those_of_numpy_and_whiten_it(x):
    cov, amount = wh.covariance(x), 0.25
    near(cov, each(lambda v: np.cov(v.T, bias=True), x), atol=1e-5)
    matrix = wh.zca(wh.shrink(cov, amount), eps=EPS)
    near((x - x.mean(dim=1, keepdim=True)) @ matrix, each(oracle, x, EPS, amount), atol=1e-4)
    assert matrix.dtype == torch.float32


@pytest.mark.parametrize("call", [
    functools.partial(wh.group_whiten, width=2, eps=EPS, gradient="full"),
    functools.partial(wh.group_whiten, width=6, eps=EPS, gradient="full"),
    lambda x: wh.whiten(x[:, :12], eps=EPS),
    lambda x: wh.zca(wh.covariance(x), eps=EPS),
])  # fmt: skip
def test_mixed_precision_does_not_degrade_whitening(x, call):
    plain, mixed = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected = call(plain)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = call(mixed)
    expected.square().sum().backward()
    found.square().sum().backward()
    assert torch.equal(found, expected) and torch.equal(plain.grad, mixed.grad)
    assert torch.equal(call(x.bfloat16()), call(x.bfloat16().float()))


def test_permutations_are_uniform_independent_and_repeatable():
    drawn = []
    for _ in "ab":
        torch.manual_seed(4)
        drawn.append(wh.permutations((6000,), 3, device="cpu"))
    first, again = drawn
    assert torch.equal(first, again)
    counts = torch.unique(first, dim=0, return_counts=True)[1]
    assert len(counts) == 6 and ((counts - 1000).square() / 1000).sum() < 20.5  # chi-squared, p = 0.001


@pytest.mark.parametrize(("d", "setting", "message"), [
    (1024, {"groups": 384}, r"groups=384 .* d=1024; .*\[256, 512\]"),
    (768, {"width": 5}, r"width=5 .* d=768; .*\[4, 6\]"),
    (12, {"width": 99}, r"width=99 .* d=12; .*\[6, 12\]"),
    (12, {}, "give groups or group_width: both are None"),
    (12, {"groups": 6, "width": 3}, "groups=6 of d=12 have 2 channels each, not width=3; give only one"),
    (12, {"groups": 6, "width": 0}, "groups=6 of d=12 have 2 channels each, not width=0"),
])  # fmt: skip
def test_an_impossible_grouping_names_the_numbers_and_the_way_out(d, setting, message):
    with pytest.raises(ValueError, match=message):
        wh.group_width(d, **setting)
    assert (wh.group_width(d, groups=4), wh.group_width(d, width=4)) == (d // 4, 4)
    assert wh.group_width(d, groups=4, width=d // 4) == d // 4


@ENGINES
def test_unusable_settings_are_refused_by_every_engine(shape):
    for name, value in (("eps", 0.0), ("eps", float("nan")), ("shrinkage", 2), ("gradient", "center")):
        with pytest.raises(ValueError, match=f"{name}={value!r}"):
            wh.whiten(draw(*shape), **({"eps": EPS} | {name: value}))


@pytest.mark.parametrize(("n", "width"), [(2, 2), (4, 4), (4, 8)])
def test_rank_deficiency_is_announced_once(monkeypatch, n, width):
    monkeypatch.setattr(wh, "_warned", False)
    with warnings.catch_warnings(action="error"):
        wh.group_whiten(draw(width + 1, 8), width=width, eps=1e-4)  # full rank: silent
    with pytest.warns(
        UserWarning, match=rf"{n} sentences <= {width} channels .* eps=0.0001, floor=0.0 alone bound"
    ):
        wh.group_whiten(draw(n, 8), width=width, eps=1e-4)
    with warnings.catch_warnings(action="error"):
        wh.group_whiten(draw(n, 8), width=width, eps=1e-4)


def naive_cholesky(a):
    return np.linalg.inv(np.linalg.cholesky(a)).T


def naive_zca_cor(a):
    deviations = np.sqrt(np.diag(a))
    values, vectors = np.linalg.eigh(a / np.outer(deviations, deviations))
    return np.diag(1 / deviations) @ vectors @ np.diag(values**-0.5) @ vectors.T


def naive_iterations(a, count):
    """The iteration as IterNorm prints it: on one matrix alone, in float64."""
    p, share = np.eye(len(a)), a / np.trace(a)
    for _ in range(count):
        p = (3 * p - p @ p @ p @ share) / 2
    return p / np.sqrt(np.trace(a))


ROOTS = {
    "cholesky": (cholesky_root, naive_cholesky),
    "zca_cor": (correlation_root, naive_zca_cor),
    "iterative": (iterated_root, functools.partial(naive_iterations, count=5)),
    "2 iterations": (
        functools.partial(iterated_root, iterations=2),
        functools.partial(naive_iterations, count=2),
    ),
    "1 iteration": (
        functools.partial(iterated_root, iterations=1),
        functools.partial(naive_iterations, count=1),
    ),
}
TRANSFORMS = pytest.mark.parametrize(("root", "naive"), ROOTS.values(), ids=ROOTS)


def ridged(x, eps, shrinkage=0.0):
    """numpy: the covariance of (n, d) as each transform takes it, with the ridge on its diagonal."""
    cov = np.cov(x.T, bias=True).reshape(x.shape[1], x.shape[1])
    variance = np.trace(cov) / len(cov)
    noise = np.mean((100 * np.finfo(x.dtype).eps * x.mean(axis=0)) ** 2)
    return (1 - shrinkage) * cov + ((shrinkage + eps) * variance + noise) * np.eye(len(cov))


def differentiable(name, x, eps):
    """float64 autograd of each transform, written anew with torch's own functions. x: (n, d)."""
    xc = x - x.mean(dim=0)
    cov = xc.T @ xc / len(x)
    unit = torch.eye(len(cov), dtype=x.dtype)
    a = cov + eps * cov.diagonal().mean() * unit
    if name == "cholesky":
        return xc @ torch.linalg.inv(torch.linalg.cholesky(a)).T
    if name == "zca_cor":
        v = torch.diag(a.diagonal().rsqrt())
        values, u = torch.linalg.eigh(v @ a @ v)
        return xc @ v @ u @ torch.diag(values.rsqrt()) @ u.T
    p, trace = unit, a.diagonal().sum()
    for _ in range({"iterative": 5, "2 iterations": 2, "1 iteration": 1}[name]):
        p = (3 * p - p @ p @ p @ a / trace) / 2
    return xc @ p / trace.sqrt()


@TRANSFORMS
@POLICIES
@pytest.mark.parametrize("shape", [(9, 1), (9, 2), (9, 4), (3, 5)], ids=str)
@pytest.mark.parametrize("shrinkage", [0.0, 0.3])
def test_every_transform_is_its_definition_in_numpy(root, naive, shape, policy, shrinkage):
    x = draw(*shape)
    expected = each(lambda v: (v - v.mean(axis=0)) @ naive(ridged(v, 1e-2, shrinkage)), x)
    settings = {"eps": 1e-2, "gradient": policy, "shrinkage": shrinkage, "root": root}
    near(wh.whiten(x, **settings), expected, atol=1e-11)
    near(wh.whiten(x.float(), **settings), expected, atol=2e-4)


@TRANSFORMS
@pytest.mark.parametrize("policy", ["centre", "none"])
def test_a_constant_transform_multiplies_the_gradient_by_its_transpose(root, naive, policy):
    x, grad = draw(9, 4).requires_grad_(), draw(9, 4, seed=1)
    wh.whiten(x, eps=1e-2, gradient=policy, root=root).backward(grad)
    expected = grad @ each(lambda v: naive(ridged(v, 1e-2)).T, x)
    near(x.grad, expected - expected.mean(dim=-2, keepdim=True) * (policy == "centre"), atol=1e-10)


@pytest.mark.parametrize("name", ROOTS)
@pytest.mark.parametrize("d", [2, 5])
def test_the_full_gradient_of_a_transform_is_autograd_s_of_a_naive_one(name, d):
    x, y = (draw(9, d)[0].requires_grad_() for _ in "ab")
    grad = draw(9, d, seed=1)[0]
    wh.whiten(x, eps=1e-2, gradient="full", root=ROOTS[name][0]).backward(grad)
    differentiable(name, y, 1e-2).backward(grad)
    near(x.grad, y.grad, atol=1e-9)
    plain = draw(9, d)[0].float().requires_grad_()
    wh.whiten(plain, eps=1e-2, gradient="full", root=ROOTS[name][0]).backward(grad.float())
    near(plain.grad, y.grad, atol=1e-3 * float(y.grad.abs().max()))


@TRANSFORMS
@pytest.mark.parametrize("d", [2, 4])
def test_the_full_gradient_of_a_transform_is_right_at_equal_eigenvalues(root, naive, d):
    columns = torch.cat((torch.ones(6, 1, dtype=torch.float64), draw(6, d)[0]), dim=1)
    x = (6**0.5 * torch.linalg.qr(columns).Q[:, 1:]).requires_grad_()
    assert gradcheck(functools.partial(wh.whiten, eps=1e-2, gradient="full", root=root), (x,))


@TRANSFORMS
@POLICIES
@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_degenerate_batches_leave_every_transform_finite(root, naive, policy, damage):
    x = damage(draw(6, 4)).float().requires_grad_()
    y = wh.whiten(x, eps=1e-4, gradient=policy, root=root)
    y.backward(draw(6, 4, seed=1)[:, : x.shape[1]].float())
    assert y.isfinite().all() and x.grad.isfinite().all()


@TRANSFORMS
@pytest.mark.parametrize("scale", SCALES)
def test_the_scale_of_the_input_does_not_change_what_a_transform_gives(root, naive, scale):
    x = draw(12, 4).float()
    near(wh.whiten(scale * x, eps=1e-4, root=root), wh.whiten(x, eps=1e-4, root=root), atol=2e-4)


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("width", [2, 3, 6])
@TRANSFORMS
def test_groups_are_whitened_by_the_transform_each_on_its_own(x, width, shuffled, root, naive):
    x = x.double()
    order = wh.permutations((3,), 24, device="cpu") if shuffled else torch.arange(24).expand(3, 24)
    call = functools.partial(wh.shuffled_group_whiten, permutations=order) if shuffled else wh.group_whiten
    y = call(x, width=width, eps=1e-3, root=root)
    for view, channels, white in zip(x, order, y, strict=True):
        for group in channels.split(width):
            one = view[:, group].numpy()
            expected = (one - one.mean(axis=0)) @ naive(ridged(one, 1e-3))
            near(white[:, group], torch.tensor(expected), atol=1e-10)


def test_many_iterations_end_at_zca_even_where_rounding_would_grow():
    """At a condition of 1e4, float32 iterations on one matrix alone have left it after 10 steps."""
    torch.manual_seed(0)
    axes = torch.linalg.qr(torch.randn(8, 8, dtype=torch.float64)).Q
    a = axes @ torch.diag(torch.logspace(0, -4, 8, dtype=torch.float64)) @ axes.T
    r = torch.zeros(1, 1)
    expected = inverse_root(a, r.double())
    found = iterated_root(a.float(), r, iterations=60)
    assert (found - expected).norm() < 1e-2 * expected.norm()


def test_a_cholesky_factor_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="transform=cholesky: .* use a larger eps"):
        cholesky_root(torch.tensor([[1.0, 2.0], [2.0, 1.0]]), torch.zeros(1, 1))


def test_cholesky_keeps_the_order_of_channels_and_zca_cor_their_scales(x):
    y = wh.whiten(x[:1], eps=1e-6, root=cholesky_root)[0]
    first = x[0, :, 0] - x[0, :, 0].mean()
    near(y[:, 0], first / first.square().mean().sqrt(), atol=1e-3)  # channel 1 is scaled alone
    scales = torch.logspace(-1, 1, 24)
    once, scaled = (wh.whiten(one.double(), eps=1e-13, root=correlation_root) for one in (x, x * scales))
    near(once, scaled, atol=1e-3)
    assert (wh.whiten(x.double(), eps=1e-13) - once).abs().max() > 0.05


@pytest.mark.parametrize("width", [2, 3, 6])
def test_equal_channels_under_an_eps_that_rounding_swallows_have_a_bounded_zca_cor(width):
    m = correlation_root(torch.ones(width, width), torch.full((1, 1), 1e-10))
    assert (
        m.norm() < 1.1 * (width - 1) ** 0.5 * 1e5
    )  # of width - 1 axes with the ridge alone: 1 / sqrt(1e-10)


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_matrix_that_is_not_finite_has_no_eigenvalues_and_the_others_theirs(broken):
    x = torch.randn(3, 9, 4, dtype=torch.float64)
    a = x.mT @ x
    expected = linalg.eigh(a[1:])
    a[0, 2, 1] = broken
    values, vectors = linalg.eigh(a)
    assert values[0].isnan().all() and vectors[0].isnan().all()
    near(values[1:], expected[0], atol=1e-12), near(vectors[1:], expected[1], atol=1e-12)


@pytest.mark.parametrize(
    "x", [torch.ones(6), torch.ones(0, 6), torch.ones(3, 0, 6), torch.ones(8, 6, dtype=torch.int64)]
)
def test_what_is_no_batch_of_vectors_is_answered_with_its_shape(x):
    orders = torch.arange(6).expand(*x.shape[:-2], 6)
    for whitened in (
        wh.covariance,
        lambda x: wh.whiten(x, eps=EPS),
        lambda x: wh.group_whiten(x, width=2, eps=EPS),
        lambda x: wh.shuffled_group_whiten(x, orders, width=3, eps=EPS),
    ):
        with pytest.raises(
            ValueError, match=rf"{re.escape(str(tuple(x.shape)))} and dtype {x.dtype}.*channels"
        ):
            whitened(x)


def test_what_is_no_tensor_is_named():
    with pytest.raises(TypeError, match="whiten takes torch tensors .*, not ndarray"):
        wh.whiten(np.ones((8, 6)), eps=EPS)
    with pytest.raises(TypeError, match="forward takes torch tensors .*, not list$"):
        GroupWhitening(4)([[1.0] * 4] * 8)

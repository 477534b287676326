"""Whitening against the four lines of a textbook in float64, finite differences and closed forms."""

import functools
import itertools

import numpy as np
import pytest
import torch
from torch.autograd import gradcheck
from torch.testing import assert_close

from whitenedcse import Whitener
from whitenedcse import whitening as wh

POLICIES = ("full", "centre", "none")
near = functools.partial(assert_close, rtol=0, check_dtype=False)


def draw(n, d, seed=0):
    """(2, n, d) float64: two views, correlated channels of unequal scale, far from the origin."""
    random = torch.Generator().manual_seed(seed)
    mixing = torch.eye(d) + 0.3 * torch.randn(d, d, generator=random) / d**0.5
    return (torch.randn(2, n, d, generator=random) @ mixing * torch.linspace(0.5, 2, d) + 3).double()


def amount(cov, eps, mean):
    """What the ridge is by its definition; 100 rounding errors of a mean are no variance."""
    return eps * cov.diagonal().mean() + (100 * torch.finfo(mean.dtype).eps * mean.detach()).square().mean()


def newton_schulz(cov, count):
    """The iteration as IterNorm prints it: on one matrix alone."""
    p, share = torch.eye(len(cov), dtype=cov.dtype), cov / cov.trace()
    for _ in range(count):
        p = (3 * p - p @ p @ p @ share) / 2
    return p / cov.trace().sqrt()


def by_eigenvectors(cov):
    values, u = torch.linalg.eigh(cov)
    return u @ torch.diag(values.rsqrt()) @ u.T


def textbook(x, order, width, eps, *, gradient="full", matrix=by_eigenvectors):
    """SGW view by view and group by group: shuffle, whiten, put the channels back. (v, n, d) -> (v, n, d)."""
    views = []
    for view, channels in zip(x, order, strict=True):
        white = []
        for group in view[:, channels].split(width, dim=1):
            mean = group.mean(dim=0).detach() if gradient == "none" else group.mean(dim=0)
            cov = (group - mean).T @ (group - mean) / len(group)
            w = matrix(cov + amount(cov, eps, mean) * torch.eye(width).double())
            white.append((group - mean) @ (w if gradient == "full" else w.detach()))
        views.append(torch.cat(white, dim=1)[:, channels.argsort()])
    return torch.stack(views)


ROOTS = {
    "zca": (wh.zca, by_eigenvectors),
    "iterated": (wh.iterated, functools.partial(newton_schulz, count=5)),
    "2 iterations": (functools.partial(wh.iterated, iterations=2), functools.partial(newton_schulz, count=2)),
    "1 iteration": (functools.partial(wh.iterated, iterations=1), functools.partial(newton_schulz, count=1)),
}


@pytest.mark.parametrize("root", ROOTS)
@pytest.mark.parametrize("shuffled", [False, True])
def test_every_engine_is_the_textbook_in_value_and_gradient(root, shuffled):
    ours, matrix = ROOTS[root]
    for n, width, gradient in itertools.product((9, 40), (1, 2, 3, 12), POLICIES):
        if n <= width and gradient == "full" and root == "zca":
            continue  # equal eigenvalues, where autograd has no answer: see the finite differences below
        x, order = draw(n, 12), torch.arange(12).expand(2, 12)
        order = wh.random_permutations((2,), 12, device="cpu") if shuffled else order
        kinds = torch.double, torch.double, torch.float
        one, other, plain = (x.clone().to(kind).requires_grad_() for kind in kinds)
        settings = {"width": width, "gradient": gradient, "eps": 1e-2}
        shuffle = functools.partial(wh.shuffled_group_whiten, permutations=order)
        call = shuffle if shuffled else wh.group_whiten
        y, grad = call(one, **settings, root=ours), draw(n, 12, seed=1)
        expected = textbook(other, order, matrix=matrix, **settings)
        near(y, expected, atol=1e-10)
        y.backward(grad), expected.backward(grad)
        near(one.grad, other.grad, atol=1e-9)
        call(plain, **settings, root=ours).backward(grad.float())
        near(plain.grad, other.grad, atol=1e-3 * float(other.grad.abs().max()))
        if width == 12 and not shuffled:
            near(
                wh.whiten(x, **{k: v for k, v in settings.items() if k != "width"}, root=ours), y, atol=1e-12
            )


DAMAGE = {
    "constant channel": lambda x: torch.cat((torch.full_like(x[..., :1], 3), x[..., 1:]), dim=-1),
    "two equal channels": lambda x: torch.cat((x[..., 1:2], x[..., 1:]), dim=-1),
    "duplicate sentences": lambda x: x[:, [0, 0, 1, 1, 4, 5]],
    "identical sentences": lambda x: x[:, :1] * torch.logspace(0, 4, x.shape[2]).expand_as(x),
    "identical zeros": lambda x: 0 * x,
    "two sentences": lambda x: x[:, :2],
    "one sentence": lambda x: x[:, :1],
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_degenerate_batches_give_what_the_textbook_gives_and_finite_gradients(damage):
    for d, gradient, (root, matrix) in itertools.product((2, 4, 8), POLICIES, ROOTS.values()):
        x = DAMAGE[damage](draw(6, d)).float().requires_grad_()
        y = wh.group_whiten(x, width=d, eps=1e-4, gradient=gradient, root=root)
        y.backward(draw(6, d, seed=1)[:, : x.shape[1]].float())
        assert x.grad.isfinite().all() and y.isfinite().all()
        if "iden" not in damage and "one" not in damage:
            order = torch.arange(d).expand(2, d)
            near(y.detach(), textbook(x.detach().double(), order, d, 1e-4, matrix=matrix), atol=2e-2)
        else:
            assert y.abs().max() < 0.1  # nothing varies, so rounding is not scaled up


def test_the_full_gradient_is_right_where_eigenvalues_are_equal():
    for damage, d in itertools.product(list(DAMAGE.values())[:3], (2, 3, 8)):
        call = functools.partial(wh.group_whiten, width=d, eps=0.1, gradient="full")
        assert gradcheck(call, (damage(draw(6, d))[:1].requires_grad_(),), atol=1e-6)
    for d, (root, _) in itertools.product((2, 3, 4), ROOTS.values()):
        columns = torch.cat((torch.ones(6, 1, dtype=torch.float64), draw(6, d)[0] - 3), dim=1)
        x = 6**0.5 * torch.linalg.qr(columns).Q[:, 1:]  # orthogonal, and to the constant: covariance I
        near(wh.covariance(x), torch.eye(d), atol=1e-12)
        call = functools.partial(wh.group_whiten, width=d, eps=1e-2, gradient="full", root=root)
        assert gradcheck(call, (x.requires_grad_(),))


@pytest.mark.parametrize("d", [2, 5, 80])
def test_neither_a_negative_determinant_or_eigenvalue_by_rounding_nor_zero_does_harm(d):
    channel = (draw(64, 50)[0].T - 3).float() * torch.logspace(-3, 3, 50).unsqueeze(-1)
    for gradient, scale in itertools.product(POLICIES, (1, 0)):
        x = (scale * channel.unsqueeze(-1) * torch.linspace(1, 1.7, d)).requires_grad_()
        y = wh.group_whiten(x, width=d, eps=1e-12, gradient=gradient)
        y.sum().backward()
        assert y.isfinite().all() and x.grad.isfinite().all()


def test_the_scale_of_the_input_changes_neither_the_output_nor_the_direction_of_the_gradient():
    cases = itertools.product([(40, 2), (40, 6), (40, 24)], POLICIES, (wh.zca, wh.iterated))
    for (n, width), gradient, root in cases:
        x, grad = draw(n, 24).float(), torch.randn(2, n, 24)
        found = []
        for factor in (1.0, 1e-12, 1e-3, 7.0, 1e12):
            leaf = (factor * x).requires_grad_()
            y = wh.group_whiten(leaf, width=width, eps=1e-4, gradient=gradient, root=root)
            y.backward(grad)
            found.append((y.detach(), factor * leaf.grad))
        for y, slope in found[1:]:
            near(y, found[0][0], atol=5e-4)
            near(slope, found[0][1], atol=5e-4 * float(found[0][1].abs().max()))


def test_pca_gives_unit_variances_by_descending_variance_with_fixed_signs():
    x = draw(50, 5) * torch.tensor([1.0, 5, 2, 4, 3])
    matrix = wh.pca(wh.covariance(x).requires_grad_(), torch.zeros(2, 1, 1))
    assert not matrix.requires_grad
    for view, w in zip(x.numpy(), matrix.numpy(), strict=True):
        np.testing.assert_allclose(np.cov(view @ w, rowvar=False, bias=True), np.eye(5), atol=1e-10)
        variances = np.var(view @ (w / np.linalg.norm(w, axis=0)), axis=0)
        np.testing.assert_allclose(variances, np.linalg.eigvalsh(np.cov(view.T, bias=True))[::-1])
        assert (w[np.abs(w).argmax(axis=0), range(5)] > 0).all()


@pytest.mark.parametrize("call", [
    functools.partial(wh.group_whiten, width=2, eps=1e-6, gradient="full"),
    functools.partial(wh.group_whiten, width=6, eps=1e-6, gradient="full"),
    lambda x: wh.whiten(x[:, :12], eps=1e-6),
    lambda x: wh.zca(wh.covariance(x), torch.full((1, 1), 1e-6)),
])  # fmt: skip
def test_mixed_precision_does_not_degrade_whitening(call):
    plain, mixed = (draw(40, 24).float().requires_grad_() for _ in "ab")
    expected = call(plain)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = call(mixed)
    expected.square().sum().backward(), found.square().sum().backward()
    assert torch.equal(found, expected) and torch.equal(plain.grad, mixed.grad)
    assert torch.equal(call(plain.bfloat16()), call(plain.bfloat16().float()))


def test_many_iterations_end_at_zca_even_where_rounding_would_grow():
    """At a condition of 1e4, float32 iterations on one matrix alone have left it after 10 steps."""
    axes = torch.linalg.qr(draw(8, 8)[0]).Q
    a, r = axes @ torch.diag(torch.logspace(0, -4, 8).double()) @ axes.T, torch.zeros(1, 1)
    expected = wh.zca(a, r.double())
    assert (wh.iterated(a.float(), r, iterations=60) - expected).norm() < 1e-2 * expected.norm()


def test_permutations_are_uniform_independent_and_repeatable():
    drawn = []
    for _ in "ab":
        torch.manual_seed(4)
        drawn.append(wh.random_permutations((6000,), 3, device="cpu"))
    first, again = drawn
    assert torch.equal(first, again)
    counts = torch.unique(first, dim=0, return_counts=True)[1]
    assert len(counts) == 6 and ((counts - 1000).square() / 1000).sum() < 20.5  # chi-squared, p = 0.001


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_matrix_that_is_not_finite_has_no_eigenvalues_and_the_others_theirs(broken):
    x = torch.randn(3, 9, 4, dtype=torch.float64)
    a = x.mT @ x
    expected = wh.eigh(a[1:])
    a[0, 2, 1] = broken
    values, vectors = wh.eigh(a)
    assert values[0].isnan().all() and vectors[0].isnan().all()
    near(values[1:], expected[0], atol=1e-12), near(vectors[1:], expected[1], atol=1e-12)


def test_what_cannot_be_whitened_is_answered_with_the_numbers_that_matter():
    for n, d in ((9, 2), (9, 4), (5, 8)):
        for name, value in (("eps", 0.0), ("eps", float("nan")), ("gradient", "center")):
            with pytest.raises(ValueError, match=f"{name}={value!r}"):
                wh.whiten(draw(n, d), **({"eps": 1e-6} | {name: value}))
    for d, width, nearest in ((768, 5, "4, 6"), (12, 99, "6, 12"), (12, 0, "1, 2")):
        with pytest.raises(ValueError, match=rf"group_width={width} does not divide d={d}; .*\[{nearest}\]"):
            wh.check_divides(width, d)
    with pytest.raises(TypeError, match="whiten takes torch tensors; torch.as_tensor"):
        wh.whiten(np.ones((8, 6)), eps=1e-6)
    with pytest.raises(TypeError, match="forward takes torch tensors; torch.as_tensor"):
        Whitener(4, kind="group")([[1.0] * 4] * 8)

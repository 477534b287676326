"""Heads: order, precision, memory, and who shares statistics with whom."""

import re

import pytest
import torch
from encoders import whitening
from torch.testing import assert_close

from whitenedcse.model.head import ProjectionHead
from whitenedcse.model.whitener import TRANSFORMS, Whitener, WhiteningSettings, rearranged
from whitenedcse.model.whitenings import GroupWhitening, ShuffledGroupWhitening, Whitening
from whitenedcse.whitening import permutations, whiten


def views(v=3, n=32, d=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(d, d, generator=generator)
    return torch.randn(v, n, d, generator=generator) @ mix + torch.randn(d, generator=generator)


def head(position="before", dense=True, settings=None, seed=0, **changes):
    torch.manual_seed(seed)
    return ProjectionHead(width=8, whitening=settings or whitening(**changes), dense=dense, position=position)


def group_covariances(x, width):
    return torch.stack([torch.cov(part.T, correction=0) for part in x.split(width, dim=-1)])


@pytest.mark.parametrize("kind", ["group", "shuffled_group"])
def test_each_view_leaves_a_whitening_head_white(kind):
    z = head(dense=False, kind=kind, group_width=8, eps=1e-9)(views())
    for view in z:
        assert_close(torch.cov(view.T, correction=0), torch.eye(8), atol=1e-3, rtol=0)


@pytest.mark.parametrize("kind", ["pca", "zca"])
def test_the_first_batch_of_the_full_heads_comes_out_white(kind):
    z = head(dense=False, kind=kind, eps=1e-9)(
        views(v=1)
    )  # running statistics begin as the first batch's own
    assert_close(torch.cov(z[0].T, correction=0), torch.eye(8), atol=1e-3, rtol=0)


def test_position_decides_what_is_white():
    x = views()
    before, after, both = (head(position, kind="group", eps=1e-9) for position in ("before", "after", "both"))
    assert_close(group_covariances(after(x)[0], 2), torch.eye(2).expand(4, 2, 2), atol=2e-2, rtol=0)
    assert_close(group_covariances(both(x)[0], 2), torch.eye(2).expand(4, 2, 2), atol=2e-2, rtol=0)
    assert_close(before(x), torch.tanh(before.linear(before.before(x))))
    assert after.before is None
    assert before.after is None
    assert_close(both(x), both.after(torch.tanh(both.linear(both.before(x)))))


def test_without_whitening_and_dense_layer_a_head_is_the_identity():
    x = views()
    assert_close(ProjectionHead(width=8, whitening=None, dense=False, position="before")(x), x)


def test_views_are_shuffled_apart_but_a_view_is_shuffled_as_one():
    x = views(v=1).expand(2, -1, -1)
    first, second = head(dense=False)(x)
    assert not torch.allclose(first, second, atol=1e-2)  # same input, other permutation
    assert_close(*head(dense=False, kind="group")(x))


def test_momentum_follows_equation_13():
    whitener = Whitener(8, whitening(kind="zca", momentum=0.9)).train()
    batches = [views(seed=seed) for seed in range(3)]
    mean = covariance = None
    for x in batches:
        whitener(x)
        batch_mean = torch.stack([view.mean(0) for view in x]).mean(0)
        batch_covariance = torch.stack([torch.cov(view.T, correction=0) for view in x]).mean(0)
        mean = batch_mean if mean is None else 0.9 * mean + 0.1 * batch_mean
        covariance = batch_covariance if covariance is None else 0.9 * covariance + 0.1 * batch_covariance
    assert_close(whitener.mean, mean)
    assert_close(whitener.covariance[0], covariance)


EVERY = [("pca", "zca"), *((k, t) for k in ("zca", "group", "shuffled_group") for t in TRANSFORMS)]


@pytest.mark.parametrize(("kind", "transform"), EVERY)
def test_eval_mode_is_a_fixed_affine_transform_of_each_row(kind, transform):
    width = {"group_width": 4} if "group" in kind else {}
    whitener = Whitener(8, whitening(kind=kind, transform=transform, **width)).train()
    for seed in range(3):
        whitener(views(seed=seed))
    whitener.eval()
    x = views(seed=9)
    whole, alone = (
        whitener(x),
        torch.stack([whitener(x[:, i : i + 1]) for i in range(x.shape[1])], 1).squeeze(2),
    )
    assert_close(whole, alone, atol=1e-4, rtol=1e-4)
    weight, bias = whitener.dense()
    assert_close(whole, x @ weight.T + bias, atol=1e-3, rtol=1e-3)
    assert_close(whole, whitener(x))


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_eval_mode_takes_the_transform_of_the_running_statistics(transform):
    settings = whitening(
        kind="group", group_width=4, transform=transform, momentum=0.5, iterations=3, eps=1e-2
    )
    whitener = Whitener(8, settings).double().train()
    for seed in range(2):
        whitener(views(seed=seed).double())
    x = views(seed=9).double()
    for start in (0, 4):
        group = slice(start, start + 4)
        a = whitener.covariance[start // 4] + 1e-2 * whitener.covariance[
            start // 4
        ].diagonal().mean() * torch.eye(4)
        centred = x[..., group] - whitener.mean[group]
        z = whitener.eval()(x)[..., group]
        if transform == "iterative":
            p = torch.eye(4, dtype=a.dtype)
            for _ in range(3):
                p = 1.5 * p - 0.5 * p @ p @ p @ a / a.trace()
            assert_close(z, centred @ p / a.trace().sqrt())
            continue
        matrix = torch.linalg.lstsq(centred.flatten(0, 1), z.flatten(0, 1)).solution
        assert_close(matrix.T @ a @ matrix, torch.eye(4, dtype=a.dtype))
        v = a.diagonal().sqrt()
        shape = {"zca": matrix, "zca_cor": v.unsqueeze(-1) * matrix, "cholesky": matrix.triu()}[transform]
        assert_close(shape, matrix if transform == "cholesky" else shape.T)


@pytest.mark.parametrize("kind", ["group", "shuffled_group"])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_head_in_training_whitens_by_its_transform(kind, transform):
    x = views().double()
    module = head(dense=False, kind=kind, transform=transform, group_width=4, iterations=2, eps=1e-3).double()
    torch.manual_seed(3)
    z = module(x)
    torch.manual_seed(3)
    order = permutations((3,), 8, device="cpu") if kind == "shuffled_group" else torch.arange(8).expand(3, 8)
    for view, channels, white in zip(x, order, z, strict=True):
        for group in channels.split(4):
            cov = torch.cov(view[:, group].T, correction=0)
            a = cov + 1e-3 * cov.diagonal().mean() * torch.eye(4)
            found = torch.cov(white[:, group].T, correction=0)
            if transform != "iterative":
                assert_close(found, torch.eye(4, dtype=a.dtype), atol=0.2, rtol=0)
                same = torch.allclose(white[:, group], whiten(view[:, group], eps=1e-3))
                assert same == (transform == "zca")
                continue
            share, p = a / a.trace(), torch.eye(4, dtype=a.dtype)
            for _ in range(2):
                p = 1.5 * p - 0.5 * p @ p @ p @ share
            assert_close(found, p @ cov @ p / a.trace())


@pytest.mark.parametrize("kind", ["group", "shuffled_group"])
def test_slices_are_random_parts_of_a_batch_whitened_by_their_own_statistics(kind):
    x, parts = views(v=3, n=12), []

    def look(slices):
        parts.append(slices)
        return slices + 1

    torch.manual_seed(4)
    assert_close(rearranged(x, "slices", look, size=4), x + 1)
    (seen,) = parts
    assert seen.shape == (3, 3, 4, 8)
    rows = [
        [[int((x[v] == row).all(dim=-1).nonzero()) for row in part] for part in seen[v]] for v in range(3)
    ]
    assert rows[0] == rows[1] == rows[2]  # the sentences of a slice are the same in all views
    assert sorted(sum(rows[0], [])) == list(range(12)) != sum(rows[0], [])
    module = head(dense=False, kind=kind, partition="slices", slice=4, group_width=2, eps=1e-9)
    torch.manual_seed(4)  # the order is the first that is drawn
    z = module(x)
    for view in z:
        for part in rows[0]:
            assert_close(view[part].mean(dim=0), torch.zeros(8), atol=1e-4, rtol=0)
            if kind == "group":
                white = group_covariances(view[part], 2)
                assert_close(white, torch.eye(2).expand(4, 2, 2), atol=1e-3, rtol=0)
    assert not torch.equal(module(x), z)  # other slices in the next step
    torch.manual_seed(4)
    assert torch.equal(module(x), z)  # the same on a rank that is seeded alike


def test_slices_need_rows_and_divide_the_batch():
    for changes, message in (
        ({"slice": 5}, "slice=5 does not divide a batch of 12 sentences"),
        (
            {"slice": 4, "group_width": 4},
            "4 sentences cannot whiten 4 channels, .*: use head.whitening.slice above",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            head(partition="slices", **changes)(views(n=12))


def test_joint_whitens_all_views_together():
    x = views()
    x[1] += 5
    z = head(dense=False, kind="group", partition="joint", eps=1e-9)(x)
    assert_close(group_covariances(z.flatten(0, 1), 2), torch.eye(2).expand(4, 2, 2), atol=1e-3, rtol=0)
    assert z[1].mean() > z[0].mean() + 0.1  # the shift of a view survives


def test_official_slices_are_consecutive_parts_of_the_sentence_major_batch():
    x = views(v=3, n=6)
    sentence_major = torch.stack([x[view, sentence] for sentence in range(6) for view in range(3)])
    seen = []
    back = rearranged(x, "official_slice", lambda slices: seen.append(slices) or slices + 1)
    assert_close(seen[0], torch.stack(sentence_major.chunk(3)))
    assert_close(back, x + 1)


def test_the_head_works_in_float32_whatever_surrounds_it():
    x, module = views(), head(kind="group")
    plain = module(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(module(x), plain)


@pytest.mark.parametrize("scale", [1e-3, 1e-2, 1e3])
@pytest.mark.parametrize("kind", ["pca", "zca", "group", "shuffled_group"])
def test_vectors_of_any_scale_leave_the_head_the_same(kind, scale):
    x = views()
    plain, scaled = (head(dense=False, kind=kind, seed=7) for _ in "ab")
    for training in (True, False):
        torch.manual_seed(3)  # of the permutations
        expected = plain.train(training)(x)
        torch.manual_seed(3)
        assert_close(scaled.train(training)(scale * x), expected, atol=2e-4, rtol=0)


@pytest.mark.parametrize("kind", ["pca", "zca", "group", "shuffled_group"])
@pytest.mark.parametrize("gradient", ["centre", "none"])
def test_gradients_are_finite_even_for_equal_sentences(kind, gradient):
    x = views(v=2, n=4)[:, :1].expand(-1, 4, -1).clone().requires_grad_()
    head(kind=kind, gradient=gradient)(x).square().sum().backward()
    assert x.grad.isfinite().all()


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


def test_statistics_travel_with_the_weights():
    trained, fresh = head(), head(seed=1)
    trained(views())
    fresh.load_state_dict(trained.state_dict())
    assert_close(fresh.eval()(views(seed=5)), trained.eval()(views(seed=5)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "sphere"}, "'sphere' is not one of pca, zca, group, shuffled_group"),
        ({"gradient": "all"}, "'all' is not one of full, centre, none"),
        ({"kind": "pca", "gradient": "full"}, "no full gradient"),
        ({"kind": "pca", "transform": "cholesky"}, "no other transform; use .* transform=zca"),
        ({"transform": "pca"}, "'pca' is not one of zca, cholesky, zca_cor, iterative"),
        ({"iterations": 0}, "iterations=0 is not 1 or above"),
        ({"partition": "slices"}, "slice=None is not 2 or more sentences for partition=slices"),
        ({"slice": 8}, "slice=8 is not .* null for others"),
        ({"momentum": 1.0}, "momentum=1.0"),
        ({"eps": 0.0}, "eps=0.0 is not finite and above 0, if whitening.floor is not"),
        ({"eps": -1e-5, "floor": 1.0}, "floor=1.0 is not 0 or above, as whitening.eps must be"),
        ({"groups": 3}, "3.*8"),
        ({"group_width": 5}, "5.*8"),
        ({"groups": 2, "group_width": 8}, "groups=2 of d=8 have 4 channels each, not width=8; give only one"),
        ({"groups": 8, "group_width": 4}, "groups=8 of d=8 have 1 channels each, not width=4"),
        ({"group_width": None}, "give groups or group_width: both are None"),
        ({"kind": "zca", "groups": 2}, "groups=2 is not null .None.: kind=zca whitens all channels together"),
        ({"kind": "pca", "groups": 1, "group_width": None}, "groups=1 is not null .None.: kind=pca"),
        ({"kind": "zca", "group_width": 4}, "group_width=4 is not null .None.: kind=zca"),
        ({"kind": "pca", "group_width": 8}, "group_width=8 is not null .None.: kind=pca"),
    ],
)
def test_settings_that_cannot_be_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        head(**changes)


@pytest.mark.parametrize("shape", [(), (8,), (2, 4, 16, 8), (16, 7), (3, 16, 9), (16, 8, 1), (0,)])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", ["pca", "zca", "group", "shuffled_group"])
def test_a_whitening_names_the_shape_that_it_cannot_take_and_those_it_can(kind, training, shape):
    module = Whitener(8, whitening(kind=kind)).train(training)
    message = f"width 8 takes (views, sentences, 8) or (sentences, 8), not a tensor of shape {shape}"
    with pytest.raises(ValueError, match=re.escape(message)):
        module(torch.ones(shape))
    assert module.batches == 0 and torch.equal(module.mean, torch.zeros(8))  # nothing was remembered


@pytest.mark.parametrize("shape", [(), (7,), (2, 16, 9)])
def test_a_dense_layer_names_the_shape_that_it_cannot_take(shape):
    message = f"a dense layer of width 8 takes (..., 8), not a tensor of shape {shape}"
    for module in (ProjectionHead(8, whitening=None), ProjectionHead(8, position="after")):
        with pytest.raises(ValueError, match=re.escape(message)):
            module(torch.ones(shape))


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


def test_groups_stand_beside_the_default_width_or_one_that_agrees():
    for width in (2, None, 4):  # 2 is what the configuration and older checkpoints have beside groups
        assert head(groups=2, group_width=width).before.group_width == 4
        assert head(kind="zca", group_width=None if width == 4 else width).before.group_width == 8


@pytest.mark.parametrize("named", [GroupWhitening, ShuffledGroupWhitening])
def test_a_whitening_by_name_takes_a_number_of_groups_or_their_width_or_both_that_agree(named):
    for given, width in (({}, 2), ({"groups": 8}, 6), ({"group_width": 4}, 4), ({"group_width": None}, 2)):
        assert named(48, **given).group_width == width
    assert named(48, groups=8, group_width=6).group_width == 6
    for given in (2, 4, 8, 48):  # 2, which is the default, too: it was given
        message = f"groups=8 of d=48 have 6 channels each, not width={given}; give only one"
        with pytest.raises(ValueError, match=message):
            named(48, groups=8, group_width=given)
    for given in ({"groups": 0}, {"group_width": 0}, {"group_width": -2}, {"groups": 0, "group_width": 2}):
        with pytest.raises(ValueError, match="=(0|-2) does not divide d=48"):
            named(48, **given)


def test_a_head_whitens_before_or_after_or_both():
    with pytest.raises(ValueError, match="'beside' is not one of before, after, both"):
        head(position="beside")


def test_a_head_takes_a_module_or_its_settings_and_both_whiten_alike():
    x = torch.randn(2, 64, 8, dtype=torch.float64)
    module = GroupWhitening(8, group_width=4, eps=1e-3)
    for given in (module, module.settings):
        made = ProjectionHead(8, whitening=given, dense=False)
        assert torch.equal(made.double()(x), module.double()(x)) and made.whitening == module.settings
    assert ProjectionHead(8).whitening == WhiteningSettings()
    assert (
        ProjectionHead(8, whitening=module, position="both").after is not module
    )  # each has its own statistics
    with pytest.raises(ValueError, match="a whitening of width 8 in a head of width 16"):
        ProjectionHead(16, whitening=module)


@pytest.mark.parametrize(
    ("module", "settings"),
    [
        (ShuffledGroupWhitening(6, groups=2), {"kind": "shuffled_group", "groups": 2}),
        (GroupWhitening(6, group_width=3), {"kind": "group", "group_width": 3}),
        (Whitening(6, momentum=0.9), {"kind": "zca", "momentum": 0.9}),
        (Whitening(6, kind="pca", gradient="none"), {"kind": "pca", "gradient": "none"}),
    ],
)
def test_a_whitening_by_name_is_the_one_of_these_settings(module, settings):
    x = torch.randn(64, 6)
    plain = Whitener(6, WhiteningSettings(**settings))
    torch.manual_seed(3)
    one = module(x)
    torch.manual_seed(3)
    assert torch.equal(one, plain(x.unsqueeze(0))[0]) and module.settings == plain.settings
    assert torch.equal(module.eval()(x), plain.eval()(x))  # the running statistics are the same

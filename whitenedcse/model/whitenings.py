"""Whitening of a batch as PyTorch modules by name, the settings of each being its arguments.

v: views    n: sentences    d: width

[1] WhitenedCSE, arXiv:2305.17746
"""

from __future__ import annotations

from typing import Literal

from whitenedcse import whitening
from whitenedcse.model.whitener import WIDTH, Whitener, WhiteningSettings
from whitenedcse.whitening import Gradient


class Whitening(Whitener):
    """Whitening of all d channels by running (momentum) statistics, ZCA or PCA ([1] Eq. 3, 13, Table 3).

    x: (v, n, d) or (n, d) -> the same shape. Train mode first updates the running mean and covariance with
    the batch; eval mode leaves them. The first batch should have more sentences than channels. A number that
    is not finite is not noticed: in train mode it makes all of the batch NaN, and the statistics for good.

    kind: "zca" keeps the axes, "pca" rotates to the principal axes. eps: the share of the mean variance that
    is added to each variance. gradient: "full" goes through mean and covariance of the batch (ZCA only),
    "centre" through the mean only, "none" through neither. momentum: beta of Eq. 13. Raises ValueError for
    other values, and for x of another shape.

    >>> import torch
    >>> from whitenedcse.whitening import covariance
    >>> whiten, x = Whitening(3), torch.randn(512, 3) @ torch.randn(3, 3)
    >>> torch.allclose(covariance(whiten(x)), torch.eye(3), atol=1e-3)
    True
    """

    def __init__(
        self,
        width: int,
        *,
        kind: Literal["zca", "pca"] = "zca",
        eps: float = WhiteningSettings.eps,
        gradient: Gradient = WhiteningSettings.gradient,
        momentum: float = WhiteningSettings.momentum,
    ) -> None:
        super().__init__(width, WhiteningSettings(kind=kind, eps=eps, gradient=gradient, momentum=momentum))


class GroupWhitening(Whitener):
    """Whitening of consecutive groups of channels by the statistics of the batch ([1] section 3.2.1, Eq. 5).

    x: (v, n, d) or (n, d) -> the same shape; each view is whitened on its own. Eval mode uses running
    statistics. A batch needs more sentences than a group has channels, and raises ValueError otherwise, as x
    of another shape does. A number that is not finite is not noticed: in train mode it makes its group NaN in
    all sentences of its view, and in the running statistics for good.

    group_width: channels in a group, 2 if neither it nor groups is given. groups: the number of groups,
    instead of group_width. eps: the share of a group's mean variance that is added to each of its variances.
    gradient: see `Whitening`. Raises ValueError if the groups do not divide `width`, or if groups and
    group_width contradict each other.

    >>> import torch
    >>> from whitenedcse.whitening import covariance
    >>> x = GroupWhitening(6, group_width=3)(torch.randn(512, 6))
    >>> torch.allclose(covariance(x[:, :3]), torch.eye(3), atol=1e-3)
    True
    """

    kind = "group"

    def __init__(
        self,
        width: int,
        *,
        group_width: int | None = None,
        groups: int | None = None,
        eps: float = WhiteningSettings.eps,
        gradient: Gradient = WhiteningSettings.gradient,
    ) -> None:
        if groups is not None and group_width is not None:
            whitening.group_width(width, groups=groups, width=group_width)  # raises unless they agree
        given = WIDTH if group_width is None else group_width
        super().__init__(
            width,
            WhiteningSettings(kind=self.kind, groups=groups, group_width=given, eps=eps, gradient=gradient),
        )


class ShuffledGroupWhitening(GroupWhitening):
    """SGW: each view's channels are shuffled, whitened in groups and put back ([1] section 3.2.2, Eq. 6).

    Settings and shapes are those of `GroupWhitening`. The same tensor given as two views is shuffled, and so
    whitened, differently in each. The shuffle draws from PyTorch's generator; eval mode does not shuffle.

    >>> import torch
    >>> x = torch.randn(64, 768)
    >>> z = ShuffledGroupWhitening(768)(torch.stack([x, x]))  # groups of 2, as the paper's 384 of BERT-base
    >>> z.shape, torch.equal(z[0], z[1])
    (torch.Size([2, 64, 768]), False)
    """

    kind = "shuffled_group"

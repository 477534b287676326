"""The whitened contrastive loss for the trainer of the Sentence-Transformers library.

c: text columns    p: passes through the encoder    r: columns of hard negatives    v: views
n: sentences of a batch    d: width    W: processes

[1] WhitenedCSE, arXiv:2305.17746    [2] Gradient cache, Gao et al., arXiv:2101.06983
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from sentence_transformers.base.losses.gradcache import CachedLossMixin
from torch import Tensor, nn
from transformers import TrainerCallback

from whitenedcse.compute import at_least_float32
from whitenedcse.model.head import PAPER, ProjectionHead
from whitenedcse.model.whitener import WHOLE, Whitener, WhiteningSettings, too_few_rows
from whitenedcse.training.loss import ContrastiveLoss
from whitenedcse.training.parallel import everyones, gathered

PAPER_LOSS = ContrastiveLoss()
CITATION = """
@inproceedings{zhuo2023whitenedcse,
    title = {{WhitenedCSE}: Whitening-based Contrastive Learning of Sentence Embeddings},
    author = {Zhuo, Wenjie and Sun, Yifan and Wang, Xiaohan and Zhu, Linchao and Yang, Yi},
    booktitle = {Proceedings of ACL 2023},
    note = {arXiv:2305.17746}
}
"""


class WhitenedContrastiveLoss(CachedLossMixin, nn.Module):  # type: ignore[misc]  # their class has no types
    """The paper's loss [1]: views through a head that whitens, each a positive of the first.

    model: a SentenceTransformer with vectors of width d. What it saves stays as it was: the head belongs to
    the loss. Add `HeadInCheckpoints(loss)` to the trainer's callbacks, so that a run can be resumed.

    One text column is encoded `passes` times, with another dropout each time, and the passes serve the v
    views in turn. Of several columns the first is the anchor, the next `positives` ones are its positives,
    each a pass, and any further ones are hard negatives.

    views: v, the anchor included. whitening, dense: of the head, see `ProjectionHead`; with None and False
        there is no head, and v = 2 is the library's MultipleNegativesRankingLoss.
    loss: what compares the views, with a temperature, as ContrastiveLoss(temperature=0.1) of
        `whitenedcse.training.loss`. passes: p for one column, from 1 to v; None for v.
    gather_across_devices: whether statistics and negatives are those of all processes, so that W processes
        of n sentences compute what one of W n does. False is only for a loss without a head.
    mini_batch_size: None, or how many rows are encoded at a time: their activations are not kept, and each
        is encoded again, with the same dropout, for its gradient [2]. Loss and gradient are the same.

    The head's weights are drawn here: seed PyTorch before, as by `transformers.set_seed`, for the same ones.
    In eval mode of the model the head whitens by its running statistics. Raises ValueError for settings that
    do not fit together, and for weights in float16, which would train to NaN.

    >>> from sentence_transformers import SentenceTransformer
    >>> from sentence_transformers.sentence_transformer.modules import Normalize
    >>> class Given(Normalize):  # in place of an encoder
    ...     def get_embedding_dimension(self): return 8
    >>> loss = WhitenedContrastiveLoss(SentenceTransformer(modules=[Given()]), views=2).train()
    >>> x = torch.randn(16, 8)
    >>> loss.compute_loss_from_embeddings([x, x.clone()]).ndim  # anchors and positives
    0
    """

    model: Any
    forward_cached: Any

    def __init__(  # noqa: PLR0913  by name
        self,
        model: Any,
        *,
        views: int = 3,
        whitening: WhiteningSettings | Whitener | None = PAPER,
        dense: bool = True,
        loss: ContrastiveLoss = PAPER_LOSS,
        passes: int | None = None,
        positives: int = 1,
        gather_across_devices: bool = True,
        mini_batch_size: int | None = None,
    ) -> None:
        super().__init__()
        passes, width = views if passes is None else passes, model.get_embedding_dimension()
        if not (1 <= passes <= views and 1 <= positives < views):
            raise ValueError(
                f"{views=}: 2 or more; {passes=}: from 1 to views; {positives=}: 1 or more, below views"
            )
        if any(weight.requires_grad and weight.dtype == torch.float16 for weight in model.parameters()):
            raise ValueError("weights in float16 train to NaN; use model.float() before")
        loss.lambdas(views - 1)  # raises for another number of weights
        self.model, self.loss, self.views, self.passes, self.positives = model, loss, views, passes, positives
        self.head = ProjectionHead(width, whitening=whitening, dense=dense)
        self.width, self.gather_across_devices = width, gather_across_devices
        self.mini_batch_size = mini_batch_size
        self.uses_gradient_cache = mini_batch_size is not None
        self.largest = 0  # sentences of a batch so far
        self.together = False  # whether all processes were given the head of the first
        self.cached: list[tuple[Tensor, Tensor]] = []  # weights of the head and their gradients

    def forward(self, sentence_features: Iterable[dict[str, Any]], labels: Tensor | None = None) -> Tensor:
        """The loss of a batch: c columns of n tokenised texts -> scalar. labels: not used."""
        if labels is not None and (labels != labels[:1]).any():  # a step with labels waits for a GPU
            raise ValueError(
                "the data set has labels that differ, which this loss does not use: it draws the texts of"
                " every row together. Keep the rows whose texts mean the same (dataset.filter), and drop the"
                " column (dataset.remove_columns)"
            )
        columns = list(sentence_features)
        if len(columns) == 1:
            columns = [repeated(columns[0], self.passes)]
        if not self.uses_gradient_cache:
            vectors = [self.model(column)["sentence_embedding"] for column in columns]
            return self.compute_loss_from_embeddings(vectors)
        loss = self.forward_cached(columns)
        for weight, gradient in self.cached:  # zero, with this gradient: it passes the trainer's own factors
            loss = loss + (gradient * (weight - weight.detach())).sum()
        self.cached = []
        return loss

    def calculate_loss(
        self, reps: list[list[Tensor]], labels: Tensor | None = None, *, with_backward: bool = False
    ) -> Tensor:
        """The loss from mini-batches, c lists of (m, d), as the library's gradient cache calls it."""
        loss = self.compute_loss_from_embeddings([torch.cat(parts) for parts in reps])
        if not with_backward:
            return loss
        vectors = [x for parts in reps for x in parts]
        weights = [weight for weight in self.head.parameters() if weight.requires_grad]
        gradients = torch.autograd.grad(loss, [*vectors, *weights])
        for x, gradient in zip(vectors, gradients, strict=False):
            x.grad = gradient
        self.cached = list(zip(weights, gradients[len(vectors) :], strict=True))
        return loss.detach()

    def compute_loss_from_embeddings(
        self, embeddings: Sequence[Tensor], labels: Tensor | None = None
    ) -> Tensor:
        """The loss from pooled vectors, in float32 or float64 whatever they are: a scalar.

        embeddings: (n, d) of each of c columns: anchors, positives, hard negatives; or a single (p n, d) of
        one column, the n vectors of one pass after those of another.
        """
        passes = self.passes if len(embeddings) == 1 else 1 + self.positives
        if 1 < len(embeddings) < passes:
            raise ValueError(
                f"{len(embeddings)} columns for an anchor and positives={self.positives}; add columns, or one"
                " alone, which is encoded for each view"
            )
        x = torch.stack(list(embeddings)) if len(embeddings) > 1 else embeddings[0].unflatten(0, (passes, -1))
        if x.shape[-1] != self.width and self.has_state:
            raise ValueError(
                f"vectors of width {x.shape[-1]} for a head of width {self.width}: inside MatryoshkaLoss use"
                " whitening=None, dense=False"
            )
        drawn = everyones((x.shape[1], int(torch.randint(2**62, ()))))
        x = at_least_float32(x)
        if len(drawn) > 1:
            x = self.joined(x, [n for n, _ in drawn])
        self.head.train(self.model.training)
        if self.leaves_out(x.shape[1]):
            return sum((part.sum() for part in (x, *self.head.parameters())), x.new_zeros(())) * 0
        with torch.random.fork_rng(devices=[x.device] if x.is_cuda else []):
            torch.manual_seed(drawn[0][1])  # every process draws the same permutations
            return self.loss(*self.head.project(x, passes=passes, views=self.views))

    def leaves_out(self, n: int) -> bool:
        """Whether an epoch's last batch, of n sentences, is too small to be whitened; a warning tells of it.

        Raises ValueError where no batch before was larger.
        """
        settings = self.head.whitening
        if not self.head.training or settings is None or settings.kind in WHOLE:
            return False
        said = too_few_rows(settings, self.width, n=n)
        if not said:
            self.largest = max(self.largest, n)
            return False
        if n >= self.largest:
            raise ValueError(f"{said}: set per_device_train_batch_size higher")
        more = "the last batch is left out, as by dataloader_drop_last=True"
        warnings.warn(f"{said}: {more}", stacklevel=2)
        return True

    def joined(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """The vectors of W processes, if they are to be gathered: (p + r, n, d) -> (p + r, W n, d).

        sizes: n of each process. The first time, all are given the head of the first.
        """
        if not self.gather_across_devices:
            if self.has_state:
                raise ValueError(
                    f"gather_across_devices=False: the heads of {len(sizes)} processes would drift apart; use"
                    " True, or whitening=None, dense=False"
                )
            return x
        if len(set(sizes)) > 1:
            raise ValueError(f"processes bring {list(sizes)} sentences; use dataloader_drop_last=True")
        for tensor in () if self.together else self.head.state_dict().values():
            dist.broadcast(tensor, 0)
        self.together = True
        return gathered(x)

    @property
    def has_state(self) -> bool:
        """Whether the head has weights or running statistics."""
        return bool(self.head.state_dict())

    def get_config_dict(self) -> dict[str, Any]:
        """The settings, for the model card."""
        whitening = self.head.whitening
        names = ("views", "passes", "positives", "gather_across_devices", "mini_batch_size")
        return {name: getattr(self, name) for name in names} | {
            "whitening": None if whitening is None else asdict(whitening),
            "dense": self.head.linear is not None,
            "loss": asdict(self.loss),
        }

    @property
    def citation(self) -> str:
        """BibTeX of the paper, for the model card."""
        return CITATION


def repeated(features: Mapping[str, Any], passes: int) -> dict[str, Any]:
    """The features of n texts, (n, ...) each, as those of p n: all texts once for each pass."""
    ids = features.get("input_ids")
    if ids is None or ids.ndim < 2 or "cu_seq_lens_q" in features:
        raise ValueError(
            "one text column whose inputs have no row for each text cannot be repeated for the views: set"
            " unpad_inputs=False on the Transformer module, or give the column twice"
        )
    return {
        name: torch.cat([x] * passes) if isinstance(x, Tensor) and x.shape[:1] == ids.shape[:1] else x
        for name, x in features.items()
    }


KEY = "whitenedcse_heads"  # in the first parameter group of the optimiser


class HeadInCheckpoints(TrainerCallback):  # type: ignore[misc]  # their class has no types
    """A callback with which the trainer's checkpoints hold the heads of these losses, and restore them.

    The library saves a model without its loss. The heads' tensors are put in a parameter group of the
    optimiser, and so are in `optimizer.pt`, which a resumed run reads from whatever checkpoint it is given;
    `save_only_model=True` has no such file. Training ends with a ValueError where a checkpoint has no heads.

    SentenceTransformerTrainer(model, args, dataset, loss=loss, callbacks=[HeadInCheckpoints(loss)])
    """

    def __init__(self, *losses: WhitenedContrastiveLoss) -> None:
        self.losses = losses

    def on_train_begin(self, args: Any, state: Any, control: Any, *, optimizer: Any, **_: Any) -> None:
        """Restore the heads of a resumed run, and put them where the optimiser saves them."""
        group = optimizer.param_groups[0]
        if state.global_step and KEY not in group:
            raise ValueError(
                f"the checkpoint of step {state.global_step} holds no head of the loss: resume from one that"
                " was saved with HeadInCheckpoints and without save_only_model=True"
            )
        for loss, saved in zip(self.losses, group.get(KEY, ()), strict=False):
            loss.head.load_state_dict(saved)
        group[KEY] = [loss.head.state_dict() for loss in self.losses]  # the tensors themselves, not copies

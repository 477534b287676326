"""The Lightning module, from a batch to a loss; its optimiser, its schedule and its random numbers.

p: encoder passes    v: views    n: sentences    d: width

All parts are constructed elsewhere; no configuration is read here. Random numbers depend on the position in
the run alone, so that no generator state needs saving.
"""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from whitenedcse.compute import Context, autocast_as_now, cores, full_precision
from whitenedcse.data.datamodule import Batch
from whitenedcse.model.embedder import Embedder
from whitenedcse.ragged import Ragged, concatenate, split
from whitenedcse.training.loss import ContrastiveLoss, Loss, Matryoshka, Step, Term
from whitenedcse.training.parallel import copy_first, cut, encoded, equal_sizes, gathered, place
from whitenedcse.training.terms import MaskedLanguageModel


def reseed(*position: int) -> None:
    """Seed PyTorch's generators, on every device, by a function of these numbers."""
    seed_torch(seed_of(*position))


def seed_of(*position: int) -> int:
    """A 64-bit seed that is a function of these numbers."""
    digest = hashlib.blake2b(repr(position).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def seed_torch(seed: int) -> None:
    """Seed PyTorch's generators on every device."""
    torch.default_generator.manual_seed(seed)  # torch.manual_seed takes 0.2 ms, as long as a kernel or two
    for device in _devices():
        device.manual_seed(seed)


@cache
def _devices() -> list[Any]:
    kinds = (torch.cuda, torch.cuda.is_available()), (torch.mps, torch.backends.mps.is_available())
    return [device for device, available in kinds if available]


def adamw(
    parameters: Iterable[Parameter],
    *,
    total_steps: int,
    lr: float = 3e-5,
    weight_decay: float = 0.0,
    warmup_steps: int = 0,
) -> tuple[Optimizer, LambdaLR]:
    """Fused AdamW with an optional linear warm-up and then linear decay to 0, updated every step."""
    if not 0 <= warmup_steps <= total_steps:
        raise ValueError(f"optim.warmup_steps={warmup_steps} is not in 0 .. {total_steps}, the run's steps")
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.ndim > 1]
    vectors = [parameter for parameter in trained if parameter.ndim <= 1]  # biases and norms never decay
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = AdamW(groups, lr=lr, fused=all(p.device.type in ("cpu", "cuda") for p in trained))
    # Fused AdamW offers to unscale fp16 gradients itself, and Lightning then refuses to clip, in bf16 too.
    optimizer._step_supports_amp_scaling = False

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / (warmup_steps + 1)
        return max(0.0, (total_steps - step) / max(1, total_steps - warmup_steps))

    return optimizer, LambdaLR(optimizer, factor)


PAPER = ContrastiveLoss()
NO_TERMS: Mapping[str, Term] = {}
EXACT = ("32-true", "bf16-mixed", "16-mixed", "64-true")  # of Lightning's, those that may train


class ContrastiveTraining(LightningModule):
    """A Lightning module: sentences -> views -> head -> loss, with optional terms added to the loss.

    loss: the loss of the views; with None, masked language modelling alone trains the encoder.
    views: v, including the anchor (the paper's "number of positives"; SimCSE has 2).
    mlm: masked language modelling of the same sentences, added to the loss with weight `mlm.weight`.
    terms: further terms by name, each added to the loss with weight `term.weight`.
    optimizer: a function of the parameters and `total_steps` that returns an optimiser and a schedule.
    seed: dropout is a function of (seed, epoch, batch, rank), permutations of (seed, epoch, batch).
    gather: whether whitening statistics and negatives are those of all ranks or each rank's own; running
        statistics are then the first rank's.
    chunk: encode this many sentences at a time without keeping their activations; each chunk is encoded
        again, with the same dropout, for its gradient. None for all at once.
    compiled: whether the layers are computed by torch.compile, for batches without padding on a GPU.
    Weights without a gradient, as of layers that pooling does not read, are frozen while it trains.

    >>> from whitenedcse.model.scratch import small_bert
    >>> embedder = Embedder(encoder=small_bert(vocabulary=200, layers=1, width=8, heads=1))
    >>> module = ContrastiveTraining(embedder=embedder, views=2)  # lightning.Trainer().fit(module, data)
    >>> module.views
    2
    """

    def __init__(  # noqa: PLR0913  built parts, by name
        self,
        *,
        embedder: Embedder,
        loss: Loss | None = PAPER,
        optimizer: Callable[..., Any] = adamw,
        views: int = 3,
        mlm: MaskedLanguageModel | None = None,
        terms: Mapping[str, Term] = NO_TERMS,
        seed: int = 42,
        gather: bool = True,
        chunk: int | None = None,
        compiled: bool = False,
    ) -> None:
        super().__init__()
        check_parts(views, chunk, terms, masked=mlm is not None, compared=loss is not None)
        if isinstance(loss, Matryoshka):
            loss.check_width(embedder.encoder.width)
        self.embedder, self.loss, self.optimizer = embedder, loss, optimizer
        self.views, self.mlm, self.seed, self.gather, self.chunk = views, mlm, seed, gather, chunk
        self.terms, self.compiled = dict(terms), compiled
        self.modules_of_terms = nn.ModuleList(t for t in terms.values() if isinstance(t, nn.Module))
        self.train()  # Transformers loads in eval mode, and Lightning keeps it: dropout would be off

    def configure_callbacks(self) -> list[Callback]:
        """What holds for the run alone, whoever's trainer it is."""
        return [ForTheRun()]

    def idle(self) -> list[Parameter]:
        """The weights that get no gradient, for which several devices would wait."""
        head = [] if self.loss is not None else [*self.embedder.head.parameters()]
        return head + self.embedder.unread(layers=self.mlm is None)

    def training_step(self, batch: Batch, index: int) -> Tensor:
        """The loss of one batch; of the batches of all ranks, if vectors are gathered."""
        position = (self.seed, self.current_epoch, index)
        parts: dict[str, Tensor] = {}
        weights = {"contrastive": 1.0} | {name: term.weight for name, term in self.terms.items()}
        if self.loss is not None:
            parts = self.contrastive_parts(batch, position)
        if self.mlm is not None:
            own = (*position, place()[0], -1)
            reseed(*own)
            parts["mlm"], weights["mlm"] = self.mlm(batch.positives, seed_of(*own)), self.mlm.weight
        loss: Any = sum(weights[name] * part for name, part in parts.items())
        if len(parts) > 1:
            self.log_dict({f"train/{name}": part.detach() for name, part in parts.items()}, logger=False)
        self.log("train/loss", loss.detach(), logger=False)  # a bar would read it every step
        return loss

    def on_after_backward(self) -> None:
        """Without gathering keep the first rank's running statistics alone, as a checkpoint does."""
        if not self.gather:
            copy_first(self.embedder.head.buffers())

    def contrastive_parts(self, batch: Batch, position: tuple[int, ...]) -> dict[str, Tensor]:
        """The loss of a batch at a position in the run as "contrastive", and the value of each term."""
        x = self.encoded(batch, (*position, place()[0]))
        if self.gather:
            if position[-1] == 0:  # once an epoch, as it is a question to all ranks
                equal_sizes(batch.n)
            x = gathered(x)
        reseed(*position)  # every rank draws the same permutations
        passes = batch.positives.n // batch.n
        z, negatives = self.embedder.head.project(x, passes=passes, views=self.views)
        terms = {name: term(Step(batch, x, z)) for name, term in self.terms.items()}
        return {"contrastive": self.contrastive(x, z, negatives, passes), **terms}

    def contrastive(self, x: Tensor, z: Tensor, negatives: Tensor | None, passes: int) -> Tensor:
        """The loss of views z: (v, n, d) and hard negatives (r n, d), made of pooled x: (p + r, n, d)."""
        assert self.loss is not None
        if not isinstance(self.loss, Matryoshka) or self.embedder.embedding == "head":
            return self.loss(z, negatives)
        seen = x if self.embedder.embedding == "encoder" else full_precision(self.embedder.head.dense)(x)
        more = None if len(x) == passes else seen[passes:].flatten(0, 1)
        return self.loss(z, negatives, x=seen[:passes], x_negatives=more)

    def encoded(self, batch: Batch, position: tuple[int, ...]) -> Tensor:
        """The pooled vectors of a batch, (p, n, d), or with hard negatives (p + 1 or more, n, d)."""
        tokens = batch.positives
        if batch.negatives is not None:
            tokens = concatenate([batch.positives, batch.negatives])
        encoder = self.embedder.encoder
        encode = partial(self.pooled, autocast_as_now(self.device), position)
        parallel = encoder.parallel and cores() > 1
        if self.chunk is not None:
            pieces = split(tokens, self.chunk)
            x = encoded(pieces, encode, encoder.parameters(), parallel=parallel, keep=False)
        elif parallel:
            pieces, order = cut(tokens, cores())
            x = encoded(pieces, encode, encoder.parameters(), parallel=True, keep=True)
            x = x.index_select(0, order.argsort())
        else:
            x = encode(tokens, 0)
        return x.unflatten(0, (-1, batch.n))

    def pooled(self, autocast: Context, position: tuple[int, ...], piece: Ragged, number: int) -> Tensor:
        """The pooled vectors of piece `number` of a batch, with the dropout of this position in the run."""
        seed = seed_of(*position, number)
        if not self.embedder.encoder.parallel:  # then dropout draws from PyTorch's generators
            seed_torch(seed)
        with autocast():
            return self.embedder.pool(piece, seed)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Optimiser and schedule for the number of steps of this run."""
        steps = int(self.trainer.estimated_stepping_batches)
        optimizer, schedule = self.optimizer(self.parameters(), total_steps=steps)
        self.chosen = [
            {name: group[name] for name in CHOSEN if name in group} for group in optimizer.param_groups
        ]
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_train_start(self) -> None:
        """Give an optimiser from a checkpoint the rate and the decay of today's settings, which `force` may
        have changed; where the schedule is a LambdaLR."""
        schedule: Any = self.lr_schedulers()
        if isinstance(schedule, LambdaLR):
            schedule.base_lrs = [own["initial_lr"] for own in self.chosen]
            groups: Any = schedule.optimizer.param_groups
            for group, own, factor in zip(groups, self.chosen, schedule.lr_lambdas, strict=True):
                group |= own
                group["lr"] = own["initial_lr"] * factor(schedule.last_epoch)


CHOSEN = ("initial_lr", "weight_decay")  # what of an optimiser's groups a resumed run may change


class ForTheRun(Callback):
    """Freezes the weights that get no gradient, and spares existing objects from garbage collection.

    The latter takes a tenth of a small step. Both end with the run, however it ends.
    """

    sizes: tuple[int, int, int] | None = None

    def __init__(self) -> None:
        self.frozen: list[Parameter] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Freeze. Raises ValueError for a precision in which the weights or the loss would be rounded."""
        module: Any = pl_module
        check_precision(str(trainer.precision))
        self.frozen = [weight for weight in module.idle() if weight.requires_grad]
        for weight in self.frozen:
            weight.requires_grad_(False)
        if str(trainer.precision) == "64-true":  # before Lightning does: a checkpoint is read in between
            module.double()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Spare what exists. Raises ValueError for layers to compile where they cannot be."""
        module: Any = pl_module
        encoder = module.embedder.encoder
        if module.compiled and (way := encoder.attention(module.device)) != "unpadded":
            raise ValueError(f"trainer.compile=true is for unpadded batches on a GPU; attention is by {way}")
        encoder.compiled = module.compiled
        gc.collect()
        gc.freeze()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Undo both."""
        gc.unfreeze()
        module: Any = pl_module
        module.embedder.encoder.compiled = False
        for weight in self.frozen:
            weight.requires_grad_(True)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, index: int
    ) -> None:
        """Note the sizes of the batch."""
        self.sizes = batch.n, batch.positives.n // batch.n, len(batch.positives.ids)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Undo both; of an error for want of memory, say how large the batch was and what was the peak."""
        self.teardown(trainer, pl_module, "fit")
        if isinstance(exception, torch.OutOfMemoryError) and self.sizes:
            peak, (n, passes, tokens) = torch.cuda.max_memory_allocated() / 2**30, self.sizes
            batch = f"a batch of {n} sentences, {passes} passes and {tokens:,} tokens"
            exception.args = (f"{batch} runs out of memory, at a peak of {peak:.1f} GiB",)


def check_parts(views: int, chunk: int | None, terms: Iterable[str], *, masked: bool, compared: bool) -> None:
    """Raise ValueError for settings of `ContrastiveTraining` that cannot train."""
    if views < 2:
        raise ValueError(f"views={views}: a contrastive loss needs an anchor and a positive, so 2 or more")
    if chunk is not None and (chunk < 1 or masked):
        raise ValueError(f"trainer.chunk={chunk} must be 1 or more, and does not go with mlm.weight above 0")
    if not compared and (not masked or [*terms]):
        raise ValueError("loss=none trains by mlm.weight above 0 alone, without terms: set it, or a loss")


def check_precision(precision: str) -> None:
    """Raise ValueError where weights, or whitening and loss, would be rounded to a few digits."""
    if precision not in EXACT:
        raise ValueError(f"trainer.precision={precision} rounds weights too; use one of {', '.join(EXACT)}")
    if (matmul := torch.get_float32_matmul_precision()) != "highest":
        instead = 'leave it at "highest" and use trainer.precision=bf16-mixed'
        raise ValueError(f"set_float32_matmul_precision({matmul!r}) rounds whitening and loss too; {instead}")

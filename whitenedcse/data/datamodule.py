"""Batches of token ids in an order that depends on the seed and the epoch alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from lightning import LightningDataModule
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset, Sampler

from whitenedcse.data.corpus import Corpus
from whitenedcse.data.sources import located
from whitenedcse.data.tokens import TokenRows, tokenised
from whitenedcse.ragged import Ragged, Repetition

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Batch(NamedTuple):
    """Sentences that belong together and sentences that do not.

    positives: (p * n sentences), one encoder pass after the other. negatives: the n hard negatives, if the
    corpus has any.
    """

    positives: Ragged
    negatives: Ragged | None
    n: int


def whole_batches(sizes: NDArray[np.int64], budget: int) -> int:
    """How many times rows of these sizes fill the budget."""
    return int(sizes.sum()) // budget


class EpochOrder(Sampler[NDArray[np.int64]]):
    """Row numbers of this rank's share of each global batch; a pure function of (seed, epoch).

    sizes: (rows,) of each row, 1 or its tokens. Batch i holds the rows that end in (i * budget, (i + 1) *
    budget] when all are laid end to end in the epoch's order: so each epoch has as many batches, and each of
    them `budget` to within a row. It is cut to a multiple of `world` rows, of which each rank has its part.
    What does not fill a last batch is left out: padding would repeat rows, and a repeat is a false negative.
    An epoch begins at batch `start()`, which is not 0 in a run that resumes.
    """

    def __init__(
        self,
        sizes: NDArray[np.int64],
        budget: int,
        *,
        seed: int,
        rank: int,
        world: int,
        start: Callable[[], int],
    ) -> None:
        self.sizes, self.budget, self.seed, self.start = sizes, budget, seed, start
        self.rank, self.world, self.batches = rank, world, whole_batches(sizes, budget)
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Called by Lightning before each epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[NDArray[np.int64]]:
        order, cuts = self.order(self.epoch)
        for step in range(self.start(), len(self)):  # asked now: Lightning makes loaders before it restores
            each = (cuts[step + 1] - cuts[step]) // self.world
            first = cuts[step] + self.rank * each
            yield order[first : first + each]

    def order(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """All rows as this epoch takes them, and where each batch begins and the last one ends."""
        order = np.random.default_rng([self.seed, epoch]).permutation(len(self.sizes))
        ends = self.sizes[order].cumsum()
        return order, np.searchsorted(ends, np.arange(len(self) + 1) * self.budget, side="right")

    def rows_of(self, epoch: int, step: int) -> NDArray[np.int64]:
        """The rows of one global batch."""
        order, cuts = self.order(epoch)
        n = cuts[step + 1] - cuts[step]
        return order[cuts[step] : cuts[step] + n - n % self.world]


class Batches(Dataset[Batch]):
    """Row numbers -> the batch of these rows, each sentence passed through the encoder `passes` times.

    repetition: what changes the passes after the first, if anything.
    """

    def __init__(self, tokens: TokenRows, passes: int, repetition: Repetition | None = None) -> None:
        self.tokens, self.first, self.repetition = tokens, min(tokens.columns, 2), repetition
        self.positives = [*range(self.first)] * passes

    def __getitem__(self, index: NDArray[np.int64]) -> Batch:
        negatives = self.tokens.rows(index, [2]) if self.tokens.columns == 3 else None
        positives = self.tokens.rows(index, self.positives)
        if self.repetition is not None:
            positives = self.repetition(positives, index, self.first)
        return Batch(positives, negatives, len(index))


class SentenceData(LightningDataModule):
    """A corpus as batches. Set `tokenizer` before `setup`.

    corpus: a path, a URL, a name of `sources.CORPORA`, or `owner/name` of a hub data set. batch_size: rows a
    step, over all ranks. batch_tokens: instead, about so many tokens of first columns. passes: of a sentence
    through the encoder; an (anchor, positive) row has 2 * passes. repetition: the rate of `ragged.drawn`
    in the passes after the first, of either column; hard negatives have one pass and stay as they are.
    """

    tokenizer: PreTrainedTokenizerBase | None = None
    tokens: TokenRows

    def __init__(  # noqa: PLR0913  the settings of one YAML group, by name
        self,
        *,
        corpus: str,
        columns: Sequence[str],
        sample: int | None,
        max_length: int,
        batch_size: int,
        batch_tokens: int | None,
        passes: int,
        seed: int,
        repetition: float,
    ) -> None:
        super().__init__()
        self.budget, self.said = batch_size, f"batch_size={batch_size}"
        if batch_tokens is not None:
            self.budget, self.said = batch_tokens, f"batch_tokens={batch_tokens}"
        if self.budget < 2:
            raise ValueError(f"{self.said}: a contrastive loss needs 2 sentences or more in a batch")
        if passes < 1:
            raise ValueError(f"data.passes={passes} must be 1 or more")
        if not 0 <= repetition < 1:
            raise ValueError(f"data.repetition={repetition} is not in [0, 1); 0 switches it off")
        if repetition and passes == 1:
            raise ValueError(
                f"data.repetition={repetition} with data.passes=1 changes nothing: the first pass is never "
                "repeated; use data.passes=2 or more, or data.repetition=0"
            )
        self.corpus, self.columns, self.sample = corpus, tuple(columns), sample
        self.max_length, self.passes, self.seed = max_length, passes, seed
        self.batch_tokens, self.repetition = batch_tokens, repetition

    def prepare_data(self) -> None:
        """Fetch and tokenise, which Lightning asks of one process a machine; the others find the cache."""
        self.setup("fit")

    def setup(self, stage: str) -> None:
        """Open the token ids, once: Lightning asks again in `prepare_data` and before the fit."""
        if hasattr(self, "tokens"):
            return
        if self.tokenizer is None:
            raise ValueError("SentenceData has no tokenizer: set data.tokenizer before data.setup")
        path = str(located(self.corpus))
        self.tokens = tokenised(Corpus(path, self.columns, self.sample), self.tokenizer, self.max_length)
        self.refuse_budget(path, 1)

    def refuse_budget(self, path: str, world: int) -> None:
        """Raise ValueError for batches that cannot be filled, or not be shared by `world` processes."""
        tokens, longest = self.batch_tokens is not None, int(self.sizes.max())
        if not whole_batches(self.sizes, self.budget):
            have = f" of {self.sizes.sum()} tokens" if tokens else ""
            raise ValueError(f"{path}: {len(self.tokens)} rows{have} do not fill one {self.said}")
        if self.budget < (need := max(2, world) * longest):
            raise ValueError(
                f"{self.said} may leave fewer than {max(2, world)} sentences in a batch; "
                f"use {need} or more, as the longest has {longest}"
            )
        if self.budget % world and not tokens:
            raise ValueError(
                f"{self.said} cannot be shared equally by {world} processes; choose a multiple of them,"
                " or trainer.devices=N"
            )

    @cached_property
    def sizes(self) -> NDArray[np.int64]:
        """(rows,) what each counts for in a batch: one, or the tokens of its first column."""
        if self.batch_tokens is None:
            return np.ones(len(self.tokens), dtype=np.int64)
        return np.diff(self.tokens.offsets)[:: self.tokens.columns]

    def train_dataloader(self) -> DataLoader[Batch]:
        """Batches of this rank; after a checkpoint was loaded, from the step after it."""
        rank, world = (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)
        self.refuse_budget(self.corpus, world)
        order = EpochOrder(self.sizes, self.budget, seed=self.seed, rank=rank, world=world, start=self.done)
        return DataLoader(
            Batches(self.tokens, self.passes, self.repeating(order) if self.repetition else None),
            batch_size=None,
            sampler=order,
            collate_fn=_as_is,
            pin_memory=torch.cuda.is_available(),
        )

    def repeating(self, order: EpochOrder) -> Repetition:
        """What writes tokens twice, in other places in each epoch of this order."""
        if self.tokenizer is None:
            raise ValueError("SentenceData has no tokenizer: set data.tokenizer before the fit")
        around = frame(self.tokenizer)
        return Repetition(self.repetition, self.max_length, around, self.seed, epoch=lambda: order.epoch)

    def done(self) -> int:
        """Batches of this epoch that the trainer has behind it."""
        if self.trainer is None:
            return 0
        each = self.trainer.accumulate_grad_batches
        steps = math.ceil(whole_batches(self.sizes, self.budget) / each)  # the last may take fewer batches
        return self.trainer.global_step % steps * each

    def sample_tokens(self, k: int) -> Ragged:
        """The first column of k rows, always the same ones; of all rows if there are fewer."""
        drawn = np.random.default_rng(0).permutation(len(self.tokens))[:k]
        return self.tokens.rows(drawn, [0])

    @property
    def counts(self) -> str:
        """What the corpus came to, for people."""
        c = self.tokens.counts
        return (
            f"{self.corpus}: {c.total:,} lines, {c.blank:,} blank dropped, {c.cut:,} cut, {c.kept:,} kept, "
            f"{len(self.tokens.ids):,} tokens"
        )


def frame(tokenizer: PreTrainedTokenizerBase) -> tuple[int, int]:
    """How many special tokens are put in front of each sentence, and how many after it."""
    marks = tokenizer("a", return_special_tokens_mask=True)["special_tokens_mask"]
    return marks.index(0), marks[::-1].index(0)


def _as_is(batch: Any) -> Any:
    return batch

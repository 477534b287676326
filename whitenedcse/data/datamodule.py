"""Batches of token ids in an order that depends on the seed and the epoch alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning import LightningDataModule
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset, Sampler

from whitenedcse.data.sources import named
from whitenedcse.data.tokens import TokenRows, tokenised
from whitenedcse.data.views import Views, check_changes, frame, prompt_tokens
from whitenedcse.ragged import Ragged

HELD_OUT = 512  # rows at most that are held out of a corpus


class Batch(NamedTuple):
    """The sentences of a step: p n positives, pass after pass, and n hard negatives, if there are any."""

    positives: Ragged
    negatives: Ragged | None
    n: int


def whole_batches(sizes: NDArray[np.int64], budget: int) -> int:
    """How many full batches of `budget` rows or tokens there are, sizes: (rows,) in the same unit."""
    return int(sizes.sum()) // budget


class EpochOrder(Sampler[NDArray[np.int64]]):
    """Row numbers of this rank's share of each global batch, as a function of (seed, epoch) alone.

    sizes: (rows,), 1 for each row, or its tokens. budget: of a global batch in the same unit. With all rows
    concatenated in the order of the epoch, batch i holds those that end in (i * budget, (i + 1) * budget],
    cut to a multiple of `world` rows. Rows that do not fill a last batch are left out: repeated ones would be
    false negatives. start: a function that returns the first batch. rows: (rows,) their numbers.
    """

    def __init__(  # noqa: PLR0913  by name
        self,
        sizes: NDArray[np.int64],
        budget: int,
        *,
        seed: int,
        rank: int,
        world: int,
        start: Callable[[], int],
        rows: NDArray[np.int64],
    ) -> None:
        self.sizes, self.budget, self.seed, self.start, self.rows = sizes, budget, seed, start, rows
        self.rank, self.world, self.batches = rank, world, whole_batches(sizes, budget)
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch; Lightning calls it before each epoch."""
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
        """All row numbers in the order of an epoch, and the start of each batch with the end of the last."""
        order = np.random.default_rng([self.seed, epoch]).permutation(len(self.sizes))
        ends = self.sizes[order].cumsum()
        return self.rows[order], np.searchsorted(ends, np.arange(len(self) + 1) * self.budget, side="right")


class Batches(Dataset[Batch]):
    """Row numbers -> the `Batch` of these rows, each once for each of `passes`, with `views` between them."""

    def __init__(self, tokens: TokenRows, passes: int, views: Views | None = None) -> None:
        self.tokens, self.first, self.views = tokens, min(tokens.columns, 2), views
        self.positives = [*range(self.first)] * passes

    def __getitem__(self, index: NDArray[np.int64]) -> Batch:
        negatives = self.tokens.rows(index, [2]) if self.tokens.columns == 3 else None
        positives = self.tokens.rows(index, self.positives)
        if self.views is not None:
            positives = self.views(positives, index, self.first)
        return Batch(positives, negatives, len(index))


class SentenceData(LightningDataModule):
    """A corpus as training batches; `tokenizer`, that of the encoder, must be set before `setup`.

    corpus: a path, a URL, a name such as "wiki1m", or the `owner/name` of a hub data set. batch_size: rows
    per batch, over all ranks. batch_tokens: instead of batch_size, the approximate number of tokens per
    batch, counted in the first column before any change. passes: how often a sentence goes through the
    encoder; an (anchor, positive) row has 2 * passes. crop, repetition: how the tokens of a sentence differ
    between its passes, see `data.views.Views`; hard negatives have one pass and are never changed. prompt: a
    text put before each sentence of every column; its tokens count in max_length and may be repeated, but are
    never cropped. Raises ValueError for settings with which nothing could be learned.

    >>> from whitenedcse.model.scratch import small_bert
    >>> words = small_bert(vocabulary=200, layers=1, width=8, heads=1).tokenizer
    >>> data = SentenceData(corpus="quickstart", sample=100, batch_size=20, passes=2, tokenizer=words)
    >>> data.setup("fit")
    >>> [batch.positives.n for batch in data.train_dataloader()]  # 20 sentences, twice
    [40, 40, 40, 40, 40]
    """

    tokens: TokenRows
    hold_out = False  # whether to leave rows for a monitor without dev pairs

    def __init__(  # noqa: PLR0913  the settings of one YAML group, by name
        self,
        *,
        corpus: str,
        columns: Sequence[str] = (),
        sample: int | None = None,
        max_length: int = 32,
        batch_size: int = 64,
        batch_tokens: int | None = None,
        passes: int = 3,
        seed: int = 42,
        repetition: float = 0.0,
        crop: Sequence[float] | None = None,
        prompt: str | None = None,
        tokenizer: Any = None,
    ) -> None:
        super().__init__()
        self.setting, self.budget = "batch_size", batch_size
        if batch_tokens is not None:
            self.setting, self.budget = "batch_tokens", batch_tokens
        if passes < 1:
            raise ValueError(f"data.passes={passes} must be 1 or more")
        check_changes(passes, repetition, crop)
        self.corpus, self.columns, self.sample = corpus, columns, sample
        self.max_length, self.passes, self.seed = max_length, passes, seed
        self.batch_tokens, self.tokenizer = batch_tokens, tokenizer
        self.repetition, self.crop = repetition, crop and tuple(crop)
        self.prompt = prompt or ""

    def prepare_data(self) -> None:
        """Fetch and tokenise the corpus: in one process per machine, so that the others find the cache."""
        self.setup("fit")

    def setup(self, stage: str) -> None:
        """Open the token ids; a second call, from Lightning after `prepare_data`, does nothing."""
        if hasattr(self, "tokens"):
            return
        if self.tokenizer is None:
            raise ValueError("SentenceData has no tokenizer: set data.tokenizer before data.setup")
        corpus = named(self.corpus, self.columns, self.sample)
        self.tokens = tokenised(corpus, self.tokenizer, self.max_length, prompt=self.prompt)
        self.check_budget()

    def check_budget(self, world: int = 1) -> None:
        """Raise ValueError if rows do not fill a batch, or `world` processes cannot share it equally."""
        sizes, said = self.sizes, f"{self.setting}={self.budget}"
        longest = sizes.max(initial=1)
        if self.budget < max(2, world) * longest:
            raise ValueError(
                f"{said} may leave fewer than {max(2, world)} sentences in a batch; "
                f"use {max(2, world) * longest} or more, as the longest has {longest}"
            )
        if not whole_batches(sizes, self.budget):
            held = f" beside {self.holds_out} held out" if self.holds_out else ""
            raise ValueError(
                f"{self.corpus}: {len(sizes)} rows{held} do not fill one {said};"
                f" set data.{self.setting} lower, or add rows"
            )
        self.check_shares(world)

    def check_shares(self, world: int) -> None:
        """Raise ValueError if `world` processes cannot share a batch of sentences equally."""
        if self.budget % world and self.batch_tokens is None:
            fewer = max(n for n in range(1, world) if self.budget % n == 0)
            raise ValueError(
                f"{self.setting}={self.budget} cannot be shared equally by {world} processes; choose a"
                f" multiple of them, or trainer.devices={fewer}"
            )

    @property
    def sizes(self) -> NDArray[np.int64]:
        """(rows,) int64: the size of each trained row in a batch, 1 or the tokens of its first column."""
        if self.batch_tokens is None:
            return np.ones(len(self.tokens) - self.holds_out, dtype=np.int64)
        return np.diff(self.tokens.offsets)[:: self.tokens.columns][self.trained]

    @property
    def trained(self) -> NDArray[np.int64]:
        """The numbers of the rows that are trained on, ascending."""
        return np.sort(self.shuffled(1)[self.holds_out :])

    def shuffled(self, seed: int) -> NDArray[np.int64]:
        """All row numbers in an order that depends on nothing but this number."""
        return np.random.default_rng(seed).permutation(len(self.tokens))

    @property
    def holds_out(self) -> int:
        """The number of rows not trained on: where `hold_out` is set a tenth, 2 to HELD_OUT."""
        n = len(self.tokens)
        return min(HELD_OUT, max(2, n // 10), n) if self.hold_out else 0

    def held_out(self) -> Ragged:
        """The first column of the rows that are not trained on, as a batch."""
        return self.tokens.rows(self.shuffled(1)[: self.holds_out], [0])

    def train_dataloader(self) -> DataLoader[Batch]:
        """The batches of this rank; a run that was resumed from a checkpoint starts at the batch after it."""
        rank, world = (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)
        self.check_budget(world)
        order = EpochOrder(
            self.sizes,
            self.budget,
            seed=self.seed,
            rank=rank,
            world=world,
            start=self.batches_done,
            rows=self.trained,
        )
        return DataLoader(
            Batches(self.tokens, self.passes, self.changes(order)),
            batch_size=None,
            sampler=order,
            pin_memory=torch.cuda.is_available(),
        )

    def changes(self, order: EpochOrder) -> Views | None:
        """How the passes differ in their tokens, drawn anew in each epoch of `order`; None if they do not."""
        if not self.repetition and self.crop is None:
            return None
        return Views(
            max_length=self.max_length,
            frame=frame(self.tokenizer),
            seed=self.seed,
            epoch=lambda: order.epoch,
            prompt=prompt_tokens(self.tokenizer, self.prompt),
            repetition=self.repetition,
            crop=self.crop,
        )

    def batches_done(self) -> int:
        """How many batches of the current epoch the trainer has finished."""
        if self.trainer is None:
            return 0
        each = self.trainer.accumulate_grad_batches
        batches = min(whole_batches(self.sizes, self.budget), self.trainer.num_training_batches)
        steps = math.ceil(batches / each)  # the last may take fewer batches
        return self.trainer.global_step % steps * each

    def sample_tokens(self, k: int) -> Ragged:
        """All columns of always the same rows, k sentences together or all there are if fewer, as a batch."""
        columns = self.tokens.columns
        return self.tokens.rows(self.shuffled(0)[: max(1, k // columns)], range(columns))

    @property
    def description(self) -> str:
        """One line of text: how many lines were read, dropped and kept, and how many sentences truncated."""
        c = self.tokens.counts
        n = c.kept * self.tokens.columns
        equal = f" ({c.repeated:,} equal an earlier one)" if c.repeated else ""
        held = f", {self.holds_out:,} rows held out, never trained on" if self.hold_out else ""
        share = f"{100 * self.tokens.truncated / n:.1f}".removesuffix(".0")
        truncated = f"{self.tokens.truncated:,} of {n:,} sentences truncated at {self.max_length} tokens"
        return (
            f"{self.corpus}: {c.total:,} lines, {c.blank:,} blank dropped, {c.kept:,} kept{equal}; "
            f"{truncated} ({share} %), {len(self.tokens.ids):,} tokens kept{held}"
        )

"""Batches of token ids in an order that depends on the seed and the epoch alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from lightning import LightningDataModule
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset, Sampler

from whitenedcse.data.corpus import Corpus
from whitenedcse.data.sources import located
from whitenedcse.data.tokens import TokenRows, tokenised
from whitenedcse.ragged import Ragged, between, repeat

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


class EpochOrder(Sampler[NDArray[np.int64]]):
    """Row numbers of this rank's share of each global batch; a pure function of (seed, epoch).

    What does not fill a last batch is left out: padding would repeat rows, and a repeat is a false negative.
    An epoch begins at batch `start()`, which is not 0 in a run that goes on.
    """

    def __init__(
        self, rows: int, batch_size: int, *, seed: int, share: slice, start: Callable[[], int]
    ) -> None:
        self.rows, self.batch_size, self.seed, self.share, self.start = rows, batch_size, seed, share, start
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Called by Lightning before each epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.rows // self.batch_size

    def __iter__(self) -> Iterator[NDArray[np.int64]]:
        order = self.order(self.epoch)
        for step in range(self.start(), len(self)):  # asked now: Lightning makes loaders before it restores
            yield order[step * self.batch_size : (step + 1) * self.batch_size][self.share]

    def order(self, epoch: int) -> NDArray[np.int64]:
        """All rows, as this epoch takes them."""
        return np.random.default_rng([self.seed, epoch]).permutation(self.rows)

    def rows_of(self, epoch: int, step: int) -> NDArray[np.int64]:
        """The rows of one global batch."""
        return self.order(epoch)[step * self.batch_size : (step + 1) * self.batch_size]


class Batches(Dataset[Batch]):
    """Row numbers -> the batch of these rows, each sentence passed through the encoder `passes` times."""

    def __init__(self, tokens: TokenRows, passes: int) -> None:
        self.tokens, self.passes = tokens, passes

    def __getitem__(self, index: NDArray[np.int64]) -> Batch:
        rows = self.tokens.rows(index)
        positives = repeat(between(rows, 0, min(self.tokens.columns, 2) * len(index)), self.passes)
        has_negatives = self.tokens.columns == 3
        negatives = between(rows, 2 * len(index), rows.n) if has_negatives else None
        return Batch(positives, negatives, len(index))


class SentenceData(LightningDataModule):
    """A corpus as batches. Set `tokenizer` before `setup`.

    corpus: a path, a name of `sources.CORPORA`, or `owner/name` of a hub data set. batch_size: rows a step,
    over all ranks. passes: of each sentence through the encoder; an (anchor, positive) row has 2 * passes.
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
        passes: int,
        seed: int,
    ) -> None:
        super().__init__()
        if batch_size < 2:
            raise ValueError(f"batch_size={batch_size}: a sentence alone has nothing to be told apart from")
        if passes < 1:
            raise ValueError(f"passes={passes}: each sentence is encoded at least once")
        self.corpus, self.columns, self.sample = corpus, tuple(columns), sample
        self.max_length, self.batch_size, self.passes, self.seed = max_length, batch_size, passes, seed

    def prepare_data(self) -> None:
        """Fetch and tokenise, which Lightning asks of one process a machine; the others find the cache."""
        self.setup("fit")

    def setup(self, stage: str) -> None:
        """Open the token ids, once: Lightning asks again in `prepare_data` and before the fit."""
        if hasattr(self, "tokens"):
            return
        if self.tokenizer is None:
            raise ValueError("SentenceData has no tokenizer: set data.tokenizer before data.setup")
        path = located(self.corpus).as_posix()
        self.tokens = tokenised(Corpus(path, self.columns, self.sample), self.tokenizer, self.max_length)
        if len(self.tokens) < self.batch_size:
            raise ValueError(f"{path}: {len(self.tokens)} rows do not fill one batch_size={self.batch_size}")

    def train_dataloader(self) -> DataLoader[Batch]:
        """Batches of this rank; after a checkpoint was loaded, from the step after it."""
        rank, world = (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)
        size, rest = divmod(self.batch_size, world)
        if rest:
            raise ValueError(
                f"batch_size={self.batch_size} cannot be shared equally by {world} processes; choose a"
                " multiple of them, or trainer.devices=N"
            )
        share = slice(rank * size, (rank + 1) * size)
        order = EpochOrder(len(self.tokens), self.batch_size, seed=self.seed, share=share, start=self.done)
        return DataLoader(
            Batches(self.tokens, self.passes), batch_size=None, sampler=order, collate_fn=_as_is
        )

    def done(self) -> int:
        """Batches of this epoch that the trainer has behind it."""
        if self.trainer is None:
            return 0
        each = self.trainer.accumulate_grad_batches
        steps = math.ceil(len(self.tokens) // self.batch_size / each)  # the last may take fewer batches
        return self.trainer.global_step % steps * each

    def sample_tokens(self, k: int) -> Ragged:
        """The first column of k rows, always the same ones; of all rows if there are fewer."""
        drawn = np.random.default_rng(0).permutation(len(self.tokens))[:k]
        return between(self.tokens.rows(drawn), 0, len(drawn))

    @property
    def counts(self) -> str:
        """What the corpus came to, for people."""
        c = self.tokens.counts
        return (
            f"{self.corpus}: {c.total:,} lines, {c.blank:,} blank dropped, {c.cut:,} cut, {c.kept:,} kept, "
            f"{len(self.tokens.ids):,} tokens"
        )


def _as_is(batch: Any) -> Any:
    return batch

"""A transform fitted to an embedder's vectors of a corpus of any size, by one process or by several ranks.

Moments of blocks of the corpus are merged in the order of the blocks, in float64, so that the bits do not
depend on how many ranks computed them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from whitenedcse.console import pace, say
from whitenedcse.data.corpus import Corpus, Row, rows
from whitenedcse.distributed import placed
from whitenedcse.evaluation.postprocess import Postprocess
from whitenedcse.evaluation.transforms import SHRUNK
from whitenedcse.model.embedder import Embedder
from whitenedcse.serving.blocks import Blocks, Starts, counted
from whitenedcse.serving.exports import probe, scaled
from whitenedcse.serving.shards import STARTS
from whitenedcse.serving.shares import Lead, Member
from whitenedcse.whitening import Moments, check_finite

BLOCK = 20_000  # rows at a time
ENOUGH = 10  # texts per component, as a rule of thumb
CURE = (
    "fit it to more texts, or by whiten fit with --shrinkage, or keep fewer components (--dim, or in search "
    "build --whiten-k)"
)


class Fitting:
    """A transform, and the embedder whose vectors it is fitted to, without unit length."""

    def __init__(self, fit: Postprocess, embedder: Embedder, *, bf16: bool) -> None:
        self.fit, self.embedder, self.bf16 = fit, embedder, bf16
        self.waiting: dict[int, Moments] = {}  # of blocks whose turn has not come
        self.due = 0  # the number of the next block to merge

    def moments(self, block: Iterable[Row]) -> Moments:
        """Those of the vectors of a block's texts, without blank ones."""
        texts = [text for row in block for text in row if text.strip()]
        x = self.embedder.encode(texts, bf16=self.bf16)
        check_finite(x, lambda row: f"the vector of {texts[row]!r:.80}")
        return Moments(self.embedder.width).update(x)

    def merge(self, number: int, moments: Moments) -> int:
        """Merge the moments of a block when those of all blocks before it are; returns the texts merged."""
        self.waiting[number], count = moments, 0
        while (part := self.waiting.pop(self.due, None)) is not None:
            other = type(self.fit)(**self.fit.settings)
            other.moments = part
            self.fit.merge(other)
            self.due, count = self.due + 1, count + part.n
        return count


def fitted(
    fit: Postprocess, embedder: Embedder, corpus: Corpus, *, bf16: bool = False, folder: Path | None = None
) -> dict[str, Any]:
    """Fit a transform to the embedder's vectors of a corpus; returns its provenance, for `Postprocess.save`.

    Memory does not grow with the corpus. folder: through it the ranks of torchrun or srun share the work; it
    is made and removed, `fit` is fitted in the first rank alone, and the others return {}. None: this process
    does all of it. Raises ValueError for fewer than two texts.
    """
    plain = scaled(embedder, unit=False)
    fitting, here = Fitting(fit, plain, bf16=bf16), placed()
    if folder is None or here is None or here.world == 1:
        every = iter(rows(corpus))
        with pace("encoded") as more:
            while block := list(islice(every, BLOCK)):
                more(fitting.merge(fitting.due, fitting.moments(block)))
    elif here.rank:
        joined(fitting, corpus, Member(folder, here.rank), here.world)
        return {}
    else:
        led(fitting, corpus, Lead(folder, here.world))
    n = fit.moments.n if fit.moments else 0
    if n < 2:
        raise ValueError(
            f"{corpus.path}: {n} texts that are not blank; a {fit.kind} is fitted to two or more"
        )
    if not fit.variances.any():
        raise ValueError(f"{corpus.path}: all {n:,} texts have the same vector; {fit.kind} needs others")
    say_few(fit, n)
    about = {"corpus": corpus.path, "texts": n, "sample": corpus.sample, "bf16": bf16, "probe": probe(plain)}
    return about | {"pooling": str(plain.pooling)} | ({"prompt": plain.prompt} if plain.prompt else {})


def say_few(fit: Postprocess, n: int) -> None:
    """Print one line where n texts are few for the components that are kept, or too few for all to vary."""
    d = len(fit.mean)
    kept, whitens, few = fit.k or d, fit.kind in SHRUNK and not fit.shrinkage, f"{n:,} texts are few for"
    if fit.k is None and fit.most < d:
        say(f"note: {few} width {d}: {fit.most} components of this {fit.kind} can vary; {CURE}")
    elif whitens and n < ENOUGH * kept:
        say(f"note: {few} {kept} components of this {fit.kind}, {ENOUGH} for each do; {CURE}")


def led(fitting: Fitting, corpus: Corpus, lead: Lead) -> None:
    """Fit in the first rank, with the moments that the others send."""
    with lead, pace("encoded") as more:
        if corpus.sample is None:
            counted(corpus, BLOCK).save(lead.folder / STARTS)
        blocks = divided(corpus, lead.folder)

        def fold(states: Mapping[int, bytes]) -> None:
            for number, state in states.items():
                array = np.frombuffer(state).reshape(-1, fitting.embedder.width)
                more(fitting.merge(number, Moments.restored(array)))

        lead.do(range(len(blocks)), lambda number: sent(fitting, blocks[number]), fold)


def joined(fitting: Fitting, corpus: Corpus, member: Member, world: int) -> None:
    """Send the moments of another rank's share of the blocks to the first one."""
    with member:
        numbers = member.blocks(world)
        blocks = divided(corpus, member.folder)
        member.do(numbers, lambda number: sent(fitting, blocks[number]))


def sent(fitting: Fitting, block: Iterable[Row]) -> bytes:
    """The moments of a block as bytes."""
    return fitting.moments(block).state.tobytes()


def divided(corpus: Corpus, folder: Path) -> Sequence[list[Row]] | Blocks:
    """The blocks of a corpus, where the first rank found them; those of a sample, which each rank draws."""
    if corpus.sample is None:
        return Blocks(corpus, Starts.load(folder / STARTS))
    every = list(rows(corpus))
    return [every[start : start + BLOCK] for start in range(0, len(every), BLOCK)]

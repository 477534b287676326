"""Whether an export gives the vectors of its source."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from whitenedcse.data.sources import present, roots
from whitenedcse.evaluation import correlation
from whitenedcse.evaluation.correlation import Index, pairs_index
from whitenedcse.evaluation.tasks import subsets

LIMIT, LIMIT_INT8 = 1e-5, 1e-2

STORY = (
    "The harbour was quiet when the last ferry came in, and the two women who had waited since noon folded "
    "their umbrellas, counted the passengers twice and found that the boy with the green suitcase was not "
    "among them; so they asked the captain, who remembered him well, and learned that he had stepped off at "
    "the island to look for a dog."
)
SPECIAL = [
    "",
    ".",
    "a",
    "I",
    "?!",
    "42",
    "3.14159 and 2,718",
    "ALL CAPITALS, AND A COMMA",
    "don't, can't, won't; e.g. this",
    "https://example.org/a?b=c&d=%20",
    "naïve café, Ärger, øre, łódź",
    "日本語の文です。",
    "Это предложение по-русски.",
    "جملة قصيرة",
    "an emoji \U0001f642 and a flag \U0001f1eb\U0001f1ee",
    "tabs\tand\nlines\nwithin",
    "soft\u00adhyphen, zero\u200bwidth",
    "e\u0301 is composed, é is not",
    "[CLS] as text [SEP] and [MASK] too",
    "antidisestablishmentarianism" * 3,
    "word " * 9 + "word",
    f"{STORY} {STORY}",
    " ".join([STORY] * 12),
    " ".join([STORY] * 40),
]
TEXTS = [*SPECIAL, *(" ".join(STORY.split()[start : start + start + 1]) for start in range(40))]  # 64


def texts(tokenizer: Any) -> list[str]:
    """The texts that are compared; instead of "" another where that has no token, and elsewhere no vector."""
    return TEXTS if tokenizer("")["input_ids"] else [text or "b" for text in TEXTS]


def difference(a: NDArray[Any], b: NDArray[Any]) -> float:
    """(n, k), (n, k) -> the largest |a - b| of any number, relative to a vector a longer than 1.

    Infinite where the shapes differ or a number is not finite.
    """
    if a.shape != b.shape:
        return np.inf
    x, y = a.astype(np.float64), b.astype(np.float64)
    distances = np.abs(x - y).max(axis=1) / np.maximum(1, np.linalg.norm(x, axis=1))
    return float(distances.max()) if np.isfinite(distances).all() else np.inf


def refuse(found: float, limit: float) -> None:
    """Raise ValueError for a difference above the limit."""
    if not found <= limit:
        raise ValueError(
            f"the export gives other vectors than its source: they differ by {found:.1e}, more than "
            f"{limit:.0e}, on {len(TEXTS)} test texts; nothing was written. A whitening that keeps axes of "
            "almost no variance amplifies rounding: --dim keeps fewer; --no-verify does not compare"
        )


def pairs() -> tuple[str, list[str], Index]:
    """The scored pairs at hand, STS-B's dev set or the bundled ones: name, sentences, index."""
    name = "STS-B/dev" if present("senteval", roots()) else "quickstart/dev"
    return (name, *pairs_index({name: subsets(name)}))


def spearman(x: NDArray[Any], index: Index) -> float:
    """Sentences' vectors (n, k) -> Spearman x 100 over all pairs; NaN where it is undefined."""
    value: float | None = correlation.scores_of(x, index)["avg"]["all"]
    return np.nan if value is None else value

"""An encoder and sentences to try it on: neighbours and cosines, as it is and whitened to k components.

n: sentences    d: width    k: components kept

[1] Su et al., BERT-whitening, arXiv:2103.15316
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from whitenedcse.evaluation.postprocess import Postprocess
from whitenedcse.export.whitened import scaled
from whitenedcse.model.embedder import Embedder
from whitenedcse.search.nearest import Array, nearest, unit


class Trial:
    """n sentences encoded once, and the whitening [1] fitted to them; k columns of it are whitening-k.

    Raises ValueError for fewer than two sentences.
    """

    def __init__(self, embedder: Embedder, sentences: Sequence[str]) -> None:
        self.embedder, self.sentences = scaled(embedder, unit=False), list(sentences)
        x = self.embedder.encode(self.sentences, progress=True)
        self.fit = Postprocess("whitening").fit(x)
        self.width = x.shape[1]
        self.rows: list[Array] = [x, self.fit.transform(x).astype(np.float32)]

    def nearest(self, text: str, k: int | None, top: int) -> list[tuple[float, str]]:
        """The `top` sentences of highest cosine with a text, best first; k: None for no whitening."""
        cosines, best = nearest(unit(self.of([text], k)), [unit(self.rows[k is not None][:, :k])], top)
        return [(float(c), self.sentences[i]) for c, i in zip(cosines[0], best[0], strict=True)]

    def cosine(self, one: str, other: str, k: int | None) -> float:
        """Of two texts; k: None for no whitening."""
        a, b = unit(self.of([one, other], k))
        return float(a @ b)

    def of(self, texts: Sequence[str], k: int | None) -> Array:
        """(n, d), or (n, k) of the whitening."""
        x = self.embedder.encode(texts)
        return x if k is None else self.fit.transform(x, k).astype(np.float32)

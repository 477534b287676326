"""An embedder for mteb: `mteb.evaluate(Mteb("outputs/NAME"), tasks)`.

n, m: sentences    k: width
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from whitenedcse.console import lacking
from whitenedcse.model.embedder import Embedder
from whitenedcse.model.planes import digest_of

Floats = NDArray[np.float64]


class Mteb:
    """An embedder with the interface that mteb 2 expects: `encode`, two similarities, and metadata.

    model: what `Embedder.load` takes, or an embedder.
    prompts: texts put before those that are encoded, by what mteb names them: a task, a kind of task ("STS"),
        "query" or "document", or both as in "NQ-query"; None for the embedder's own. Its prompt for any text
        serves where none of these names fits.
    mteb keeps results by name and revision, also between runs; the revision is a digest of all that decides a
    vector, so another checkpoint of the same name is evaluated anew. Batch sizes are not used.
    """

    def __init__(self, model: str | Path | Embedder, prompts: Mapping[str, str] | None = None) -> None:
        name = "embedder" if isinstance(model, Embedder) else Path(model).resolve().name
        if not isinstance(model, Embedder):
            model = Embedder.load(model).to("cuda" if torch.cuda.is_available() else "cpu")
        self.embedder = model if prompts is None else model.replaced(prompts=prompts)
        self.mteb_model_meta = self._meta(f"whitenedcse/{name}")
        self._last: dict[str, NDArray[np.float32]] = {}

    def encode(self, inputs: Iterable[Mapping[str, Any]], **options: Any) -> Floats:
        """The vectors of batches of texts: (n, k), float64.

        In float32, mteb's cosines tie and swap (STS12: 2e-5 points). A sentence that occurs again in this
        call or the next, mteb's other side of the pairs, is encoded once: padding changes a vector's last
        digits, which set equal pairs apart (STS12, 79 of 3,108: 3e-3 points).
        """
        if "precision" in options:
            raise ValueError(f"precision={options['precision']!r}: vectors here are float; leave it out")
        prompt = self._prompt(options.get("task_metadata"), options.get("prompt_type"))
        sentences = [prompt + sentence for batch in inputs for sentence in batch["text"]]
        new = sorted(set(sentences) - self._last.keys())
        vectors = self.embedder.encode(new, prompt="", progress=options.get("show_progress_bar", True))
        known = self._last | dict(zip(new, vectors, strict=True))
        self._last = {sentence: known[sentence] for sentence in sentences}
        return np.stack([known[sentence] for sentence in sentences]).astype(np.float64)

    def similarity(self, a: Floats | Tensor, b: Floats | Tensor) -> Tensor:
        """The cosines of all pairs: (n, k), (m, k) -> (n, m)."""
        a, b = _rows(a), _rows(b)
        return a @ b.mT / _lengths((a * a).sum(dim=-1)[:, None] * (b * b).sum(dim=-1))

    def similarity_pairwise(self, a: Floats | Tensor, b: Floats | Tensor) -> Tensor:
        """The cosines of corresponding rows: (n, k), (n, k) -> (n,)."""
        a, b = _rows(a), _rows(b)
        return (a * b).sum(dim=-1) / _lengths((a * a).sum(dim=-1) * (b * b).sum(dim=-1))

    def _prompt(self, task: Any, kind: Any) -> str:
        from mteb.models.abs_encoder import get_prompt_name

        name = task and get_prompt_name(self.embedder.prompts, task, kind)
        return self.embedder.prompt_of(*([name] if name else []))

    def _meta(self, name: str) -> Any:
        try:
            from mteb.models.model_meta import ModelMeta, ScoringFunction
        except ImportError as error:
            raise lacking("Mteb", "mteb", "mteb") from error

        embedder = self.embedder
        known = {"name": name, "revision": digest_of(embedder), "embed_dim": embedder.width}
        known |= {"max_tokens": embedder.max_length, "similarity_fn_name": ScoringFunction.COSINE}
        return ModelMeta.create_empty(known)


def _rows(x: Floats | Tensor) -> Tensor:
    return torch.atleast_2d(torch.as_tensor(x, dtype=torch.float64))


def _lengths(squares: Tensor) -> Tensor:
    return squares.sqrt().clamp_min(1e-300)  # a zero vector's cosine is 0

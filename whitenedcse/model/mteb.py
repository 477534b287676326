"""An embedder as a model that the benchmark library mteb runs: `mteb.evaluate(Mteb("outputs/NAME"), tasks)`.

n: sentences    d: width    k: components that a fitted map keeps
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from whitenedcse.data.tokens import identity
from whitenedcse.model.checkpoint import settings
from whitenedcse.model.embedder import Embedder
from whitenedcse.model.planes import fingerprint

Array = NDArray[np.float64]


class Transform(Protocol):
    """A fitted map, such as `Postprocess`."""

    def transform(self, x: NDArray[Any]) -> Array:
        """(n, d) -> (n, k)."""


class Mteb:
    """What mteb 2 asks of an encoder: `encode`, two similarities, and metadata.

    model: what `Embedder.load` takes, or an embedder. postprocess: applied to every vector.
    mteb keeps results by name and revision, also between runs; the revision is a digest of all that decides a
    vector, so another checkpoint of the same name is judged anew. Prompts and batch sizes are not used.
    """

    def __init__(self, model: str | Path | Embedder, postprocess: Transform | None = None) -> None:
        name = "embedder" if isinstance(model, Embedder) else Path(model).resolve().name
        if not isinstance(model, Embedder):
            model = Embedder.load(model).to("cuda" if torch.cuda.is_available() else "cpu")
        self.embedder, self.postprocess = model, postprocess
        self.mteb_model_meta = self._meta(f"whitenedcse/{name}")
        self._last: dict[str, NDArray[np.float32]] = {}

    def encode(self, inputs: Iterable[Mapping[str, Any]], **options: Any) -> Array:
        """Batches of texts -> (n, k), float64: in float32, mteb's cosines tie and swap (STS12: 2e-5 points).

        A sentence is encoded once among these and those of the call before, mteb's other side of the pairs:
        padding changes a vector's last digits, which set equal pairs apart (STS12, 79 of 3,108: 3e-3 points).
        """
        if "precision" in options:
            raise ValueError(f"precision={options['precision']!r}: vectors here are float; leave it out")
        sentences = [sentence for batch in inputs for sentence in batch["text"]]
        new = sorted(set(sentences) - self._last.keys())
        vectors = self.embedder.encode(new, progress=options.get("show_progress_bar", True))
        known = self._last | dict(zip(new, vectors, strict=True))
        self._last = {sentence: known[sentence] for sentence in sentences}
        return self._finished(np.stack([known[sentence] for sentence in sentences]))

    def similarity(self, a: Array | Tensor, b: Array | Tensor) -> Tensor:
        """(n, k), (m, k) -> (n, m) cosines."""
        a, b = _rows(a), _rows(b)
        return a @ b.mT / _lengths((a * a).sum(dim=-1)[:, None] * (b * b).sum(dim=-1))

    def similarity_pairwise(self, a: Array | Tensor, b: Array | Tensor) -> Tensor:
        """(n, k), (n, k) -> (n,) cosines."""
        a, b = _rows(a), _rows(b)
        return (a * b).sum(dim=-1) / _lengths((a * a).sum(dim=-1) * (b * b).sum(dim=-1))

    def _finished(self, x: NDArray[Any]) -> Array:
        return np.asarray(self.postprocess.transform(x) if self.postprocess else x, dtype=np.float64)

    def _meta(self, name: str) -> Any:
        from mteb.models.model_meta import ModelMeta, ScoringFunction

        embedder, d = self.embedder, self.embedder.width
        basis = self._finished(np.eye(d + 1, d, -1))  # zero and the unit vectors decide an affine map
        parts = [fingerprint(embedder.encoder), identity(embedder.encoder.tokenizer), settings(embedder)]
        content = hashlib.blake2b(json.dumps(parts).encode(), digest_size=12)
        final = embedder.final.state_dict().values() if embedder.final else ()
        for tensor in (*embedder.head.state_dict().values(), *final, torch.from_numpy(basis)):
            content.update(tensor.float().cpu().numpy().tobytes())  # float32: as far as two machines agree
        known = {"name": name, "revision": content.hexdigest(), "embed_dim": basis.shape[1]}
        known |= {"max_tokens": embedder.max_length, "similarity_fn_name": ScoringFunction.COSINE}
        return ModelMeta.create_empty(known)


def _rows(x: Array | Tensor) -> Tensor:
    return torch.atleast_2d(torch.as_tensor(x, dtype=torch.float64))


def _lengths(squares: Tensor) -> Tensor:
    return squares.sqrt().clamp_min(1e-300)  # a zero vector's cosine is 0

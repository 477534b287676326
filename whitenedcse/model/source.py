"""Whoever gives vectors: a checkpoint with its layers, a Sentence-Transformers model, a Python function."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from whitenedcse.data.tokens import token_ids
from whitenedcse.model import checkpoint
from whitenedcse.model.embedder import Embedder
from whitenedcse.model.encoder import folder
from whitenedcse.model.planes import Planes, planes
from whitenedcse.model.pooling import Pooling
from whitenedcse.model.sentence_transformers import ForeignModules

Encode = Callable[[list[str]], Any]


class Source(NamedTuple):
    """Sentences to vectors, and how they are pooled. embedder: None where only `encode` is known."""

    encode: Encode
    pooling: str
    embedder: Embedder | None = None


class Wanted(NamedTuple):
    """What to make of the sentences.

    poolings: each gives an array; None is the model's own embedding, head included. max_length: tokens, None
    for the model's own. extra: see `Planes.average`. every: a kind of pooling wanted in all layers. bf16: the
    backbone computes in bfloat16.
    """

    poolings: Sequence[Pooling | None]
    max_length: int | None = None
    extra: float = 0.0
    every: str | None = None
    bf16: bool = False


def found(model: str | None) -> None:
    """Raise FileNotFoundError if there is no such model; a hub's is fetched."""
    if model is None:
        raise ValueError("no model: say model=DIR_OR_HUB_ID, or compare=[RUN,RUN]")
    if not is_function(model):
        folder(model)


def is_function(model: str) -> bool:
    """Whether it reads module:function."""
    return ":" in model and not Path(model).exists()


def opened(model: str, pooling: Pooling | None) -> Source:
    """A checkpoint (see `checkpoint.load`), or `module:function`, which takes a list of sentences.

    A Sentence-Transformers directory with modules that are not read here is opened by that library.
    """
    if is_function(model):
        module, _, name = model.partition(":")
        sys.path.insert(0, str(Path.cwd()))
        try:
            function = getattr(importlib.import_module(module), name)
            if not callable(function):
                raise AttributeError(f"{name} is a {type(function).__name__}, not a function")
            return Source(function, "its own")
        except (ImportError, AttributeError, ValueError) as error:  # ValueError: nothing before the colon
            raise ValueError(f"model={model}: {error}; MODULE:FUNCTION is imported from here") from error
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        embedder = checkpoint.load(model, pooling).to(device)
    except ForeignModules as error:
        try:
            from sentence_transformers import SentenceTransformer
        except ImportError:
            raise ValueError(f"{error}; with pip install sentence-transformers that library does") from error
        return Source(SentenceTransformer(model, device=device).encode, "its own")
    return Source(embedder.encode, str(embedder.pooling), embedder)


def vectors(source: Source, sentences: list[str], wanted: Wanted) -> tuple[list[NDArray[Any]], Planes | None]:
    """n distinct sentences -> an (n, d) array for each pooling, from one pass; and the planes behind them."""
    embedder = source.embedder
    if embedder is None:
        if any(wanted.poolings) or wanted.every:
            raise ValueError("this model shows no layers, which the protocol asks for; give a checkpoint")
        if wanted.bf16:
            raise ValueError("bf16=true: this model chooses its precision itself; leave it out")
        return [np.asarray(source.encode(sentences))] * len(wanted.poolings), None
    if wanted.every not in (None, "cls", "mean", "max", "last"):
        raise ValueError(f"figures={wanted.every}: every layer is pooled by cls, mean, max or last")
    poolings = [pooling or embedder.pooling for pooling in wanted.poolings]
    kinds = {plane_kind(pooling) for pooling in poolings} | (
        {"cls", "mean", wanted.every} if wanted.every else set()
    )
    layers = {layer for pooling in poolings for layer in pooling.layers}
    layers |= set(range(embedder.encoder.depth + 1)) if wanted.every else set()
    limit = min(wanted.max_length or embedder.max_length, embedder.max_length)
    rows = token_ids(sentences, embedder.encoder.tokenizer, limit)
    got = planes(embedder.encoder, rows, sorted(kinds), sorted(layers), bf16=wanted.bf16)
    return [
        averaged(embedder, got, pooling or embedder.pooling, wanted.extra, finish=pooling is None)
        for pooling in wanted.poolings
    ], got


def plane_kind(pooling: Pooling) -> str:
    """The kind of plane it starts from: the pooler reads first tokens."""
    return "cls" if pooling.kind == "pooler" else pooling.kind


@torch.inference_mode()
def averaged(
    embedder: Embedder, got: Planes, pooling: Pooling, extra: float, finish: bool
) -> NDArray[np.float32]:
    """(n, d): the mean over the pooling's layers and, to `finish`, what the embedder does after pooling."""
    layers = [embedder.encoder.layer(layer) for layer in pooling.layers]
    x = got.average(plane_kind(pooling), layers, extra)
    if not finish:
        return x
    device = next(embedder.parameters()).device
    return embedder.finish(embedder.pooler(torch.from_numpy(x).to(device))).cpu().numpy()

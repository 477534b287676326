"""What makes two starts the same run beside equal settings: the content of what they name."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whitenedcse.files import checksum

if TYPE_CHECKING:
    from whitenedcse.model.embedder import Embedder

WEIGHTS = ("config.json", "*.safetensors", "*.bin")  # the files of an encoder beside those of its tokenizer


def content(
    config: Any, encoder: Any, terms: Mapping[str, Any], tasks: Iterable[Any], dev: Any
) -> dict[str, dict[str, str]]:
    """The digests of what the settings name beside the corpus: encoder, teachers, tasks, dev; by setting.

    An encoder of the hub has its commit. One with random weights has none: settings and corpus decide it.
    """
    digests = {} if dev is None else {"monitor.dev": of_texts(dev)}
    digests |= {f"tasks.{name}": of_texts(task) for name, task in zip(config.tasks.names, tasks, strict=True)}
    if "path" in config.encoder:
        commit = encoder.provenance(config.encoder.path)["commit"]
        digests["encoder.path"] = commit or of_weights(encoder.source)
    return {"content": digests}


def of_texts(task: Any) -> str:
    """The digest of a task as `tasks.task` gives it: texts in their order, with their scores or labels."""
    return checksum(json.dumps(task, default=lambda array: array.tolist()).encode())


def of_weights(folder: Path) -> str:
    """The digest of an encoder's configuration and weights in a local directory."""
    files = sorted(file for pattern in WEIGHTS for file in folder.glob(pattern))
    return checksum(json.dumps([(file.name, checksum(file)) for file in files]).encode())


def of_embedder(embedder: Embedder) -> str:
    """The digest of an embedder that was loaded: its encoder's, its head's, and how it makes a vector."""
    from whitenedcse.model.checkpoint import settings

    assert embedder.encoder.source is not None
    return checksum(json.dumps([of_weights(embedder.encoder.source), settings(embedder)]).encode())

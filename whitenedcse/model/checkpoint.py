"""A checkpoint on disk: everything that makes an embedder, in one directory.

The directory is at once one of Transformers (weights, tokenizer), one of Sentence-Transformers (modules.json)
where that library can express the embedding, and ours (`whitenedcse.json`, `head.safetensors`). No pickles.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from whitenedcse.data.files import hidden
from whitenedcse.data.tokens import identity, ids_of
from whitenedcse.files import drafted, parsing, read_json, restore, seal, tensors
from whitenedcse.model import sentence_transformers
from whitenedcse.model.embedder import Embedder, check_embedding
from whitenedcse.model.encoder import Encoder, folder, pretrained
from whitenedcse.model.head import Final, Pooling, ProjectionHead
from whitenedcse.model.sentence_transformers import EXPORT
from whitenedcse.model.whitener import WhiteningSettings

SETTINGS, HEAD, FINAL = "whitenedcse.json", "head.safetensors", "final.safetensors"
MODULES = "modules.json"  # of Sentence-Transformers
FORMAT = "0.3"  # the first version that writes checkpoints so
FOREIGN = "not what train.py wrote beside these weights; copy the whole checkpoint again"


def save(embedder: Embedder, directory: Path, evaluated: Any = None) -> None:
    """Write the checkpoint to a draft folder, then rename it: a kill never leaves half of one.

    Low-rank adapters are merged. evaluated: what `evaluation` gives back. Raises OSError, or ValueError for a
    directory that holds something else; it is then unchanged.
    """
    there = [path.name for path in directory.iterdir()] if directory.is_dir() else []
    if SETTINGS not in there and not all(map(hidden, there)):
        raise ValueError(f"{directory} holds something other than a checkpoint; choose another name")
    check_embedding(embedder.embedding, embedder.head)
    embedder = embedder.merged()
    with drafted(directory) as draft:
        embedder.encoder.backbone.save_pretrained(draft)
        tokenizer = embedder.encoder.tokenizer
        ids_of([""], tokenizer, embedder.max_length)  # else its file has the truncation of the call before
        tokenizer.save_pretrained(draft)
        head = kept(embedder.head).state_dict()
        save_file({name: value.contiguous() for name, value in head.items()}, draft / HEAD)
        if embedder.final is not None:
            save_file(dict(embedder.final.state_dict()), draft / FINAL)
        sentence_transformers.write(embedder, draft)
        content = {"whitenedcse": FORMAT, **settings(embedder)} | (
            {"evaluated": evaluated} if evaluated else {}
        )
        (draft / SETTINGS).write_text(json.dumps(content, indent=2))
        seal(draft)


def kept(head: ProjectionHead) -> ProjectionHead:
    """The head that a checkpoint holds: none in place of a user's own, whose code may be missing."""
    return ProjectionHead(1, whitening=None, dense=False) if head.own else head


def settings(embedder: Embedder) -> dict[str, Any]:
    """What makes the embedding beside the weights, as plain values; prompts only where there are any."""
    head, final = kept(embedder.head), embedder.final
    prompts = {"prompt": embedder.prompt, "prompts": embedder.prompts}
    return {
        "pooling": {"kind": embedder.pooling.kind, "layers": list(embedder.pooling.layers)},
        "head": {
            "width": embedder.encoder.width,
            "whitening": None if head.whitening is None else asdict(head.whitening),
            "dense": head.linear is not None,
            "position": head.position,
        },
        "embedding": embedder.embedding,
        "max_length": embedder.max_length,
        "final": final and {"unit": final.unit, "tanh": final.tanh, "provenance": final.provenance},
        **{name: value for name, value in prompts.items() if value},
    }


def read(directory: Path) -> dict[str, Any]:
    """The content of a checkpoint's `whitenedcse.json`. Raises ValueError for a version before 0.3."""
    content: dict[str, Any] = read_json(directory / SETTINGS)
    if content.get("whitenedcse") != FORMAT:
        raise ValueError(f"{directory / SETTINGS} was written by version 0.2.0 or before; train it again")
    return content


def evaluation(directory: Path) -> Any:
    """What was noted of the evaluation of the checkpoint in a directory; None where there is none."""
    restore(directory)
    return read(directory).get("evaluated") if (directory / SETTINGS).exists() else None


def load(path: str, pooling: Pooling | str | None = None) -> Embedder:
    """The embedder in a directory or with a hub id: see `Embedder.load`."""
    restore(Path(path) if Path(path).name == "best" else Path(path) / "best")
    directory = folder(path)
    named = next((name for name in (SETTINGS, MODULES) if (directory / name).exists()), None)
    if pooling is not None and named:
        raise ValueError(f"{path} carries its own pooling ({named}); leave pooling= and layers= out")
    return Embedder(**parts_of(directory) | ({"pooling": pooling} if pooling else {})).eval()


def parts_of(directory: Path, encoder: Encoder | None = None) -> dict[str, Any]:
    """The keyword arguments of `Embedder` in a directory; encoder: its own, where it is loaded already."""
    if (directory / SETTINGS).exists():
        return parts_of_checkpoint(directory, encoder)
    if (directory / MODULES).exists():
        return sentence_transformers.read(directory, encoder)
    encoder = encoder or pretrained(path=str(directory))
    head = ProjectionHead(width=encoder.width, whitening=None, dense=False)
    return {"encoder": encoder, "pooling": None, "head": head} | parts_of_export(directory)


def parts_of_checkpoint(directory: Path, encoder: Encoder | None) -> dict[str, Any]:
    """`parts_of` a checkpoint that `save` wrote."""
    content, encoder = read(directory), encoder or pretrained(path=str(directory))
    last: dict[str, Any] = tensors(directory / FINAL) if content["final"] else {}
    with parsing(directory / SETTINGS, FOREIGN):
        whitening = content["head"].pop("whitening")
        head = ProjectionHead(
            whitening=WhiteningSettings(**whitening) if whitening else None, **content["head"]
        )
        head.load_state_dict(tensors(directory / HEAD))
        last = {"weight": None, "bias": None, **last, **(content["final"] or {})}
        named = ("embedding", "max_length", "prompt", "prompts")
        parts = {name: content[name] for name in named if name in content}
        parts["pooling"] = Pooling(**content["pooling"])
        parts["final"] = Final(**last) if content["final"] else None
        return {"encoder": encoder, "head": head, **parts}


def parts_of_export(directory: Path) -> dict[str, Any]:
    """What an export for Transformers notes of its vectors: pooling, prompt, last step. Empty for others."""
    if not (directory / EXPORT).is_file():
        return {}
    content = read_json(directory / EXPORT)
    with parsing(directory / EXPORT, FOREIGN):
        if content["to"] != "transformers":
            return {}
        last = Final(weight=None, bias=None, unit=True, provenance={}) if content["unit"] else None
        return {"pooling": Pooling(**content["pooling"]), "prompt": content["prompt"], "final": last}


def parts_of_source(encoder: Encoder) -> dict[str, Any]:
    """`parts_of` the directory that an encoder was loaded from; empty for none. Raises ValueError as that."""
    with torch.random.fork_rng(devices=[]):  # which no layer made here moves
        return parts_of(encoder.source, encoder) if encoder.source else {}


def notes_on_source(embedder: Embedder, path: str | None) -> list[str]:
    """Notes on what the encoder at `path` has of its own, and is not trained with: pooling, prompt, steps."""
    try:
        has, notes = parts_of_source(embedder.encoder) if path else {}, list[str]()
    except ValueError as error:
        return [f"note: of {path} only the encoder is trained, not what follows it: {error}"]
    pooling = has.get("pooling") or embedder.pooling
    if str(pooling) != str(embedder.pooling):
        keep = "pooling=own keeps that"
        notes.append(f"note: {path} pools by {pooling}, this run by {embedder.pooling}; {keep}")
    prompt = has.get("prompt", embedder.prompt)
    if prompt != embedder.prompt:
        now = repr(embedder.prompt) if embedder.prompt else "none"
        notes.append(f"note: {path} embeds after the prompt {prompt!r}, this run after {now}; see prompt=")
    final = has.get("final")
    if has.get("embedding", "encoder") != "encoder" or (final and final.weight is not None):
        notes.append(f"note: the linear layer that {path} has after its pooling is left out")
    if final and final.unit:
        notes.append(f"note: {path} has vectors of unit length, this run not; export --unit has them again")
    return notes


def digest_of(embedder: Embedder) -> str:
    """A digest of all that decides an embedder's vectors: encoder, tokenizer, settings."""
    backbone = embedder.encoder.backbone
    config = {k: v for k, v in backbone.config.to_dict().items() if not k.startswith("_")}
    config.pop("transformers_version", None)
    said = {name: value for name, value in settings(embedder).items() if name != "prompts"}  # of other calls
    facts = [config, identity(embedder.encoder.tokenizer), said]
    content = hashlib.blake2b(json.dumps(facts, default=str).encode(), digest_size=16)
    final = embedder.final.state_dict() if embedder.final else {}
    for state in (backbone.state_dict(), embedder.head.state_dict(), final):
        for name, tensor in sorted(state.items()):
            content.update(name.encode())
            content.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return content.hexdigest()

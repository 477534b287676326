"""The directory layout of the Sentence-Transformers library, written and read without that library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from whitenedcse.model.embedder import Embedder
from whitenedcse.model.encoder import Encoder, pretrained, sound
from whitenedcse.model.head import Head
from whitenedcse.model.pooling import Pooling

PREFIX = "sentence_transformers.models."  # the names that old and new releases both know
POOLING_KEYS = {
    "cls": "pooling_mode_cls_token",
    "mean": "pooling_mode_mean_tokens",
    "max": "pooling_mode_max_tokens",
}
ACTIVATIONS = {"identity": "torch.nn.modules.linear.Identity", "tanh": "torch.nn.modules.activation.Tanh"}
Dense = tuple[Tensor, Tensor, str]


class ForeignModules(ValueError):
    """A model of that library which only that library can open."""


def write(embedder: Embedder, directory: Path) -> None:
    """Add modules.json and its modules to a Transformers directory: the embedding in that library's terms.

    Writes nothing where its modules cannot express the embedding (pooling over other layers than the last).
    """
    encoder, pooling = embedder.encoder, embedder.pooling
    if [encoder.layer(layer) for layer in pooling.layers] != [encoder.depth]:
        return
    kind = "cls" if pooling.kind == "pooler" else pooling.kind
    dense = dense_modules(embedder)
    paths = ["", "1_Pooling"] + [f"{i}_Dense" for i in range(2, 2 + len(dense))]
    types = ["Transformer", "Pooling"] + ["Dense"] * len(dense)
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": PREFIX + name}
        for i, (path, name) in enumerate(zip(paths, types, strict=True))
    ]
    dump(directory / "modules.json", modules)
    dump(
        directory / "sentence_bert_config.json",
        {"max_seq_length": embedder.max_length, "do_lower_case": False},
    )
    pooling_modes = {key: kind == name for name, key in POOLING_KEYS.items()}
    dump(
        directory / "1_Pooling" / "config.json", {"word_embedding_dimension": encoder.width, **pooling_modes}
    )
    for path, (weight, bias, activation) in zip(paths[2:], dense, strict=True):
        shape = {"in_features": weight.shape[1], "out_features": weight.shape[0], "bias": True}
        dump(directory / path / "config.json", {**shape, "activation_function": ACTIVATIONS[activation]})
        tensors = {"linear.weight": weight.detach().contiguous(), "linear.bias": bias.detach().contiguous()}
        save_file(tensors, directory / path / "model.safetensors")


@torch.no_grad()
def dense_modules(embedder: Embedder) -> list[Dense]:
    """What follows pooling in eval mode, as dense layers: (out, in) weight, (out,) bias, activation."""
    head, chain = embedder.head, []
    if embedder.pooling.kind == "pooler":
        pooler = embedder.encoder.backbone.pooler.dense
        chain.append((pooler.weight, pooler.bias, "tanh"))
    if embedder.embedding == "head" and head.before is not None:
        chain.append((*head.before.dense(), "identity"))
    if embedder.embedding in ("head", "dense") and head.linear is not None:
        chain.append((head.linear.weight, head.linear.bias, "tanh"))
    if embedder.embedding == "head" and head.after is not None:
        chain.append((*head.after.dense(), "identity"))
    return chain


def read(directory: Path) -> Embedder:
    """An embedder from Transformer, Pooling, an optional dense layer with tanh, and an optional Normalize.

    Normalize is left out: it changes no cosine. Raises ValueError for any other module.
    """
    modules = parsed(directory / "modules.json")
    try:
        paths = {module["type"].rsplit(".", 1)[-1]: directory / module["path"] for module in modules}
        paths["Transformer"], paths["Pooling"]
    except (AttributeError, KeyError, TypeError) as error:
        raise ForeignModules(
            f"{directory / 'modules.json'} does not list Transformer and Pooling modules: {error!r}"
        ) from error
    if unknown := set(paths) - {"Transformer", "Pooling", "Dense", "Normalize"}:
        raise ForeignModules(
            f"{directory / 'modules.json'} has modules that are not read here: {', '.join(unknown)}"
        )
    encoder = pretrained(path=str(paths["Transformer"]))
    limit = paths["Transformer"] / "sentence_bert_config.json"
    return Embedder(
        encoder=encoder,
        pooling=Pooling(kind=pooling_kind(paths["Pooling"] / "config.json"), layers=[-1]),
        head=dense_head(encoder, paths.get("Dense")),
        embedding="dense" if "Dense" in paths else "encoder",
        max_length=parsed(limit).get("max_seq_length") if limit.exists() else None,
    ).eval()


def pooling_kind(path: Path) -> str:
    """The one kind that a Pooling module's config turns on. Raises ValueError for one that is not ours."""
    config: dict[str, Any] = parsed(path)
    kinds = [config["pooling_mode"]] if "pooling_mode" in config else []
    kinds += [key for key, on in config.items() if key.startswith("pooling_mode_") and on is True]
    ours = {**{key: name for name, key in POOLING_KEYS.items()}, **{name: name for name in POOLING_KEYS}}
    if len(kinds) != 1 or kinds[0] not in ours:
        raise ForeignModules(
            f"{path} asks for pooling {kinds}; one of {', '.join(POOLING_KEYS)} is read here"
        )
    return ours[kinds[0]]


def dense_head(encoder: Encoder, directory: Path | None) -> Head:
    """The head of a Dense module with tanh and the encoder's width. Raises ValueError for another one."""
    head = Head(width=encoder.width, whitening=None, dense=directory is not None, position="before")
    if directory is None:
        return head
    config = parsed(directory / "config.json")
    shape = tuple(config.get(key) for key in ("in_features", "out_features", "activation_function"))
    if shape != (encoder.width, encoder.width, ACTIVATIONS["tanh"]):
        raise ForeignModules(f"{directory} is Dense{shape}; only a square one with tanh is read here")
    head.load_state_dict(load_file(sound(directory / "model.safetensors")))
    return head


def parsed(path: Path) -> Any:
    """What a JSON file holds. Raises ValueError naming the file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}); copy or download it again") from error


def dump(path: Path, content: Any) -> None:
    """Write JSON, making the folder it lies in."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content, indent=2))

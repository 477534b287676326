"""The directory layout of the Sentence-Transformers library, written and read without that library."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from whitenedcse.model.embedder import Embedder
from whitenedcse.model.encoder import Encoder, pretrained, sound
from whitenedcse.model.final import Final
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
    if embedder.final is not None and embedder.final.unit:
        paths.append(f"{len(paths)}_Normalize")
        types.append("Normalize")
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
    for path, (weight, bias, activation) in zip(paths[2:], dense, strict=False):
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
    if (final := embedder.final) is not None and final.weight is not None and final.bias is not None:
        chain.append((final.weight, final.bias, "identity"))
    return chain


def read(directory: Path) -> Embedder:
    """An embedder from Transformer, Pooling, then in this order, each of them optional: a square Dense with
    tanh, any Dense without activation, Normalize. Raises ForeignModules for anything else.
    """
    modules = parsed(directory / "modules.json")
    try:
        kinds = [module["type"].rsplit(".", 1)[-1] for module in modules]
        paths = [directory / module["path"] for module in modules]
    except (AttributeError, KeyError, TypeError) as error:
        raise ForeignModules(f"{directory / 'modules.json'} does not list modules: {error!r}") from error
    if kinds[:2] != ["Transformer", "Pooling"] or set(kinds[2:]) - {"Dense", "Normalize"}:
        raise ForeignModules(
            f"{directory / 'modules.json'} lists {', '.join(kinds)}; read here are Transformer, Pooling, "
            "then Dense and Normalize"
        )
    if "Normalize" in kinds[:-1]:
        raise ForeignModules(f"{directory / 'modules.json'} normalises before its last module")
    encoder = pretrained(path=str(paths[0]))
    limit = paths[0] / "sentence_bert_config.json"
    tanh, maps = layers_after(encoder.width, paths[2 : 2 + kinds[2:].count("Dense")])
    return Embedder(
        encoder=encoder,
        pooling=Pooling(kind=pooling_kind(paths[1] / "config.json"), layers=[-1]),
        head=dense_head(encoder, tanh),
        embedding="dense" if tanh else "encoder",
        max_length=parsed(limit).get("max_seq_length") if limit.exists() else None,
        final=final(maps, unit=kinds[-1] == "Normalize", source=str(directory)),
    ).eval()


def layers_after(d: int, folders: Sequence[Path]) -> tuple[Path | None, list[Path]]:
    """Dense modules in order: the folder of a first square one with tanh, and those without activation."""
    shapes = []
    for folder in folders:
        config = parsed(folder / "config.json")
        shapes.append(
            (config.get("in_features"), config.get("out_features"), config.get("activation_function"))
        )
    first = bool(shapes) and shapes[0] == (d, d, ACTIVATIONS["tanh"])
    for folder, (_, _, activation) in zip(folders[first:], shapes[first:], strict=True):
        if activation != ACTIVATIONS["identity"]:
            raise ForeignModules(
                f"{folder} is a Dense with {activation}; a square one with tanh, then any without, are read"
            )
    return folders[0] if first else None, list(folders[first:])


def final(folders: Sequence[Path], *, unit: bool, source: str) -> Final | None:
    """Linear layers one after the other as one map, and unit length; None where there is neither."""
    weight, bias = None, None
    for folder in folders:
        layer = load_file(sound(folder / "model.safetensors"))
        w = layer["linear.weight"].double()
        b = layer["linear.bias"].double() if "linear.bias" in layer else torch.zeros(len(w)).double()
        weight, bias = (w, b) if weight is None or bias is None else (w @ weight, w @ bias + b)
    if weight is None and not unit:
        return None
    return Final(weight=weight, bias=bias, unit=unit, provenance={"read from": source})


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
    """The head of a Dense module with tanh, or none."""
    head = Head(width=encoder.width, whitening=None, dense=directory is not None, position="before")
    if directory is not None:
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

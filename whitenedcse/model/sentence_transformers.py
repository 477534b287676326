"""The directory layout of the Sentence-Transformers library, written and read without that library."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from whitenedcse.files import DAMAGED, intact, parsing, read_json, tensors
from whitenedcse.model.embedder import Embedder
from whitenedcse.model.encoder import CHANGED, Encoder, pretrained
from whitenedcse.model.head import Final, Pooling, ProjectionHead

PREFIX = "sentence_transformers.models."  # the names that old and new releases both know
POOLING_KEYS = {
    "cls": "pooling_mode_cls_token",
    "mean": "pooling_mode_mean_tokens",
    "max": "pooling_mode_max_tokens",
    "last": "pooling_mode_lasttoken",
}
ACTIVATIONS = {"identity": "torch.nn.modules.linear.Identity", "tanh": "torch.nn.modules.activation.Tanh"}
Dense = tuple[Tensor, Tensor, str]
PROMPTS = "config_sentence_transformers.json"
DOCUMENT = ("document", "passage", "corpus")  # names of the prompt of what is searched in, the first there is
WEIGHT = 100  # a layer is not averaged more often


class ForeignModules(ValueError):
    """The error for a Sentence-Transformers model that only that library can open."""


def write(embedder: Embedder, directory: Path) -> None:
    """Add modules.json and the modules it lists to a Transformers directory, so that the library can load it.

    Layers other than the last are averaged before they are pooled, which for cls and mean is the same.
    Writes nothing where the library's modules cannot express the embedding (max over several layers).
    """
    if not expressible(embedder.pooling):
        return
    encoder, pooling = embedder.encoder, embedder.pooling
    layers = sorted(encoder.layer(layer) for layer in pooling.layers)
    mixed, dense = set(layers) != {encoder.depth}, dense_modules(embedder)
    names = ["Transformer", *["WeightedLayerPooling"] * mixed, "Pooling"]
    names += ["Dense"] * len(dense) + ["Normalize"] * embedder.unit
    paths = ["", *(f"{i}_{name}" for i, name in enumerate(names) if i)]
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": PREFIX + name}
        for i, (path, name) in enumerate(zip(paths, names, strict=True))
    ]
    dump(directory / "modules.json", modules)
    settings: dict[str, Any] = {"max_seq_length": embedder.max_length, "do_lower_case": False}
    if lacks_pooler(encoder.backbone):  # else the library makes one, and says that its weights are missing
        settings["model_args"] = {"add_pooling_layer": False}
    dump(directory / "sentence_bert_config.json", settings)
    if embedder.prompt or embedder.prompts:
        dump(directory / PROMPTS, named_prompts(embedder))
    if mixed:
        write_average(directory, directory / paths[1], layers, encoder)
    kind = "cls" if pooling.kind == "pooler" else pooling.kind
    modes = {key: kind == name for name, key in POOLING_KEYS.items()}
    dump(directory / paths[1 + mixed] / "config.json", {"word_embedding_dimension": encoder.width, **modes})
    for path, (weight, bias, activation) in zip(paths[2 + mixed :], dense, strict=False):
        shape = {"in_features": weight.shape[1], "out_features": weight.shape[0], "bias": True}
        dump(directory / path / "config.json", {**shape, "activation_function": ACTIVATIONS[activation]})
        tensors = {"linear.weight": weight.detach().contiguous(), "linear.bias": bias.detach().contiguous()}
        save_file(tensors, directory / path / "model.safetensors")


def lacks_pooler(backbone: Any) -> bool:
    """Whether a backbone of a kind with an optional pooler has none."""
    optional = "add_pooling_layer" in inspect.signature(type(backbone).__init__).parameters
    return optional and getattr(backbone, "pooler", None) is None


def named_prompts(embedder: Embedder) -> dict[str, Any]:
    """The prompts as that library's config: by name, and which of them its `encode` uses.

    Its `encode_query` and `encode_document` would use no prompt at all if none had their names.
    """
    own = {"query": embedder.prompt_of("query"), "document": embedder.prompt_of(*DOCUMENT)}
    default = {"default": embedder.prompt} if embedder.prompt else {}
    return {
        "prompts": own | embedder.prompts | default,
        "default_prompt_name": "default" if default else None,
    }


def prompts(directory: Path, modes: Mapping[str, Any]) -> dict[str, Any]:
    """The prompts of a directory of that library, as arguments of `Embedder`; none where it has none.

    modes: the config of its Pooling. Raises ForeignModules where that leaves the prompt's tokens out, and
    ValueError for a default prompt that is not among the prompts.
    """
    file = directory / PROMPTS
    config: dict[str, Any] = read_json(file) if file.is_file() else {}
    with parsing(file, DAMAGED):
        every = {name: text for name, text in (config.get("prompts") or {}).items() if text is not None}
        default = config.get("default_prompt_name")
        if default is not None and default not in every:
            raise ValueError(f"its default_prompt_name {default!r} is not among its prompts {list(every)}")
    if not any(every.values()):
        return {}
    if modes.get("include_prompt") is False:
        raise ForeignModules(f"{file} has prompts, and {directory} pools the tokens after them alone")
    if default is not None:  # which its encode_query and encode_document do not use
        every = {"query": ""} | ({} if set(DOCUMENT) & every.keys() else {"document": ""}) | every
    return {"prompt": every.get(default, ""), "prompts": every}


def expressible(pooling: Pooling) -> bool:
    """Whether the library's modules can express the pooling: "max" only over a single layer."""
    return pooling.kind != "max" or len(set(pooling.layers)) == 1


def write_average(directory: Path, folder: Path, layers: Sequence[int], encoder: Encoder) -> None:
    """Write a WeightedLayerPooling that counts each layer, and have the encoder return all layers."""
    config = directory / "config.json"
    dump(config, {**read_json(config), "output_hidden_states": True})
    start, last = min(layers), encoder.depth
    about = {"word_embedding_dimension": encoder.width, "num_hidden_layers": last, "layer_start": start}
    dump(folder / "config.json", about)
    counts = [float(layers.count(layer)) for layer in range(start, last + 1)]
    save_file({"layer_weights": torch.tensor(counts)}, folder / "model.safetensors")


@torch.no_grad()
def dense_modules(embedder: Embedder) -> list[Dense]:
    """The steps after pooling, in eval mode, as dense layers: weight (out, in), bias (out,), activation."""
    head, chain = embedder.head, []
    if embedder.pooling.kind == "pooler":
        pooler: Any = embedder.encoder.pooler_layer
        chain.append((pooler.weight, pooler.bias, "tanh"))
    if embedder.embedding == "head" and head.before is not None:
        chain.append((*head.before.dense(), "identity"))
    if embedder.embedding in ("head", "dense") and head.linear is not None:
        chain.append((head.linear.weight, head.linear.bias, "tanh"))
    if embedder.embedding == "head" and head.after is not None:
        chain.append((*head.after.dense(), "identity"))
    if (final := embedder.final) is not None and final.weight is not None and final.bias is not None:
        chain.append((final.weight, final.bias, "tanh" if final.tanh else "identity"))
    return chain


def read(directory: Path) -> dict[str, Any]:
    """The keyword arguments of `Embedder` for a Sentence-Transformers directory.

    Its modules must be, in this order: Transformer, WeightedLayerPooling or none, Pooling, then optionally a
    square Dense with tanh, any Dense without activation, one with tanh, Normalize. Raises ForeignModules
    for anything else, and ValueError if a file of a sealed directory has changed, or any is damaged.
    """
    intact(directory, CHANGED)
    modules = read_json(directory / "modules.json", list)
    with parsing(directory / "modules.json", DAMAGED):
        kinds = [module["type"].rsplit(".", 1)[-1] for module in modules]
        paths = [directory / module["path"] for module in modules]
    layers, names = [-1], ", ".join(kinds)
    if kinds[1:2] == ["WeightedLayerPooling"]:
        layers = averaged(paths[0] / "config.json", paths.pop(1))
        kinds.pop(1)
    if kinds[:2] != ["Transformer", "Pooling"] or set(kinds[2:]) - {"Dense", "Normalize"}:
        raise ForeignModules(
            f"{directory / 'modules.json'} lists {names}; supported are Transformer, WeightedLayerPooling or "
            "none, Pooling, then Dense and Normalize"
        )
    if "Normalize" in kinds[:-1]:
        raise ForeignModules(f"{directory / 'modules.json'} normalises before its last module")
    encoder = pretrained(path=str(paths[0]))
    limit = paths[0] / "sentence_bert_config.json"
    cased, lowered = (encoder.tokenizer(text)["input_ids"] for text in ("The CAT", "the cat"))
    if limit.exists() and read_json(limit).get("do_lower_case") and cased != lowered:
        raise ForeignModules(f"{limit} has do_lower_case=true, which the tokenizer itself does not do")
    dense, maps, tanh = layers_after(encoder.width, paths[2 : 2 + kinds[2:].count("Dense")])
    pooling = Pooling(kind=pooling_kind(paths[1] / "config.json"), layers=layers)
    if not expressible(pooling):
        raise ForeignModules(f"{paths[1]} takes the maximum of an average of layers, which is not supported")
    return {
        "encoder": encoder,
        "pooling": pooling,
        "head": dense_head(encoder, dense),
        "embedding": "dense" if dense else "encoder",
        "max_length": most_tokens(limit) if limit.exists() else None,
        "final": final(maps, tanh=tanh, unit=kinds[-1] == "Normalize", source=str(directory)),
        **prompts(directory, read_json(paths[1] / "config.json")),
    }


def pooled(directory: Path) -> dict[str, Any]:
    """What `checkpoint.own` gives of a directory; raises ForeignModules where other layers are pooled."""
    listed = read_json(directory / "modules.json", list)
    with parsing(directory / "modules.json", DAMAGED):
        modules = {module["type"].rsplit(".", 1)[-1]: directory / module["path"] for module in listed}
    if "Pooling" not in modules or "WeightedLayerPooling" in modules:
        raise ForeignModules(f"{directory / 'modules.json'} has no Pooling of the last layer")
    config = modules["Pooling"] / "config.json"
    prompt = prompts(directory, read_json(config)).get("prompt", "")
    limit = modules["Transformer"] / "sentence_bert_config.json"
    own = {"prompt": prompt, "max_length": most_tokens(limit) if limit.exists() else None}
    after = [kind for kind in list(modules)[list(modules).index("Pooling") + 1 :] if kind != "Normalize"]
    unit = ["unit length"] * ("Normalize" in modules)
    return {"pooling": Pooling(pooling_kind(config)), **own, "after": [*after, *unit]}


def most_tokens(file: Path) -> int | None:
    """The length that sentence_bert_config.json limits sentences to; None for no limit."""
    limit = read_json(file).get("max_seq_length")
    if limit is None or type(limit) is int and limit > 0:
        return limit
    raise ValueError(f"{file}: max_seq_length is {limit!r:.50}, not a number of tokens; {DAMAGED}")


def averaged(config: Path, folder: Path) -> list[int]:
    """The layers that a WeightedLayerPooling averages, each repeated as its weight says.

    Raises ForeignModules for other weights, and where the encoder does not return its layers.
    """
    file = folder / "model.safetensors"
    with parsing(file, DAMAGED):
        weights = tensors(file)["layer_weights"].flatten().tolist()
    counts = [int(weight) for weight in weights if 0 <= weight < WEIGHT]
    if counts != weights or not any(counts) or not read_json(config).get("output_hidden_states"):
        raise ForeignModules(
            f"{folder} weighs layers by {weights}; supported are whole numbers, with output_hidden_states"
        )
    start = read_json(folder / "config.json").get("layer_start", 4)  # that library's default
    if type(start) is not int:
        raise ValueError(f"{folder / 'config.json'}: layer_start is {start!r:.50}, not a layer; {DAMAGED}")
    return [start + i for i, count in enumerate(counts) for _ in range(count)]


def layers_after(d: int, folders: Sequence[Path]) -> tuple[Path | None, list[Path], bool]:
    """Dense modules in order: the folder of a square one with tanh, those after it, if they end in tanh.

    Raises ForeignModules for other activations, and where tanh is not the last of them.
    """
    configs = [read_json(folder / "config.json") for folder in folders]
    kinds = [config.get("activation_function") for config in configs]
    shapes = [(config.get("in_features"), config.get("out_features")) for config in configs]
    first = bool(kinds) and kinds[0] == ACTIVATIONS["tanh"] and shapes[0] == (d, d)
    last = kinds[first:][-1:] == [ACTIVATIONS["tanh"]]
    for folder, kind in zip(folders[first:], kinds[first : len(kinds) - last], strict=False):
        if kind != ACTIVATIONS["identity"]:
            raise ForeignModules(
                f"{folder} is a Dense with {kind}; supported: a square one with tanh, linear ones, tanh"
            )
    return folders[0] if first else None, list(folders[first:]), last


def final(folders: Sequence[Path], *, tanh: bool, unit: bool, source: str) -> Final | None:
    """Consecutive linear layers as one transform, its tanh, and unit length; None where there is none."""
    weight, bias = None, None
    for folder in folders:
        with parsing(folder / "model.safetensors", DAMAGED):
            layer = tensors(folder / "model.safetensors")
            w = layer["linear.weight"].double()
            b = layer["linear.bias"].double() if "linear.bias" in layer else torch.zeros(len(w)).double()
            weight, bias = (w, b) if weight is None or bias is None else (w @ weight, w @ bias + b)
    if weight is None and not unit:
        return None
    return Final(weight=weight, bias=bias, tanh=tanh, unit=unit, provenance={"read from": source})


def pooling_kind(path: Path) -> str:
    """The one kind that a Pooling module's config turns on. Raises ForeignModules for any other."""
    config: dict[str, Any] = read_json(path)
    kinds = [config["pooling_mode"]] if "pooling_mode" in config else []
    kinds += [key for key, on in config.items() if key.startswith("pooling_mode_") and on is True]
    ours = {key: name for name, key in POOLING_KEYS.items()} | {name: name for name in POOLING_KEYS}
    ours |= {"lasttoken": "last"}  # its newer releases name most as here
    if len(kinds) != 1 or kinds[0] not in list(ours):
        raise ForeignModules(
            f"{path} asks for pooling {kinds}; supported is one of {', '.join(POOLING_KEYS)}"
        )
    return ours[kinds[0]]


def dense_head(encoder: Encoder, directory: Path | None) -> ProjectionHead:
    """The head with the weights of a Dense module with tanh, or a head without dense layer."""
    head = ProjectionHead(width=encoder.width, whitening=None, dense=directory is not None)
    if directory is not None:
        with parsing(directory / "model.safetensors", DAMAGED):
            head.load_state_dict(tensors(directory / "model.safetensors"))
    return head


def dump(path: Path, content: Any) -> None:
    """Write a JSON file, and create its folder."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content, indent=2))

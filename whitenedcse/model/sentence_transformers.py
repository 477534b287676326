"""The directory layout of the Sentence-Transformers library, written and read without that library."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import normalizers
from torch import Tensor

from whitenedcse.files import DAMAGED, checkpoint, intact, parsing, read_json, tensors
from whitenedcse.model.embedder import Embedder
from whitenedcse.model.encoder import CHANGED, Encoder, longest, pretrained
from whitenedcse.model.head import Final, Pooling, ProjectionHead

LIBRARY = "sentence_transformers."
PREFIX = f"{LIBRARY}models."  # the names that old and new releases both know
POOLING_KEYS = {
    "cls": "pooling_mode_cls_token",
    "mean": "pooling_mode_mean_tokens",
    "max": "pooling_mode_max_tokens",
    "last": "pooling_mode_lasttoken",
}
MODES = "pooling_mode_"
TANH = "torch.nn.modules.activation.Tanh"
ACTIVATIONS = {"identity": "torch.nn.modules.linear.Identity", "tanh": TANH}
ARGUMENTS = {"add_pooling_layer", "attn_implementation", "torch_dtype", "dtype"}  # that change no vector here
SENTENCE = "sentence_embedding"
# by module, the settings that are read here or change no vector, and those that may have one value alone
READ: dict[str, set[str]] = {
    "Transformer": {"max_seq_length", "do_lower_case", "unpad_inputs", "model_args", "model_kwargs"},
    "Pooling": {
        *("word_embedding_dimension", "embedding_dimension", "include_prompt", "pooling_mode"),
        *("pooling_mode_mean_sqrt_len_tokens", "pooling_mode_weightedmean_tokens", *POOLING_KEYS.values()),
    },
    "Dense": {"in_features", "out_features", "bias", "activation_function"},
    "Normalize": set(),
}
FIXED: dict[str, dict[str, Any]] = {
    "Transformer": {
        "transformer_task": "feature-extraction",
        "module_output_name": "token_embeddings",
        "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
    },
    "Pooling": {},
    "Dense": {"module_input_name": SENTENCE, "module_output_name": SENTENCE, "use_residual": False},
    "Normalize": {"module_input_name": SENTENCE, "module_output_name": SENTENCE},
}
ORDER = "Transformer, (WeightedLayerPooling, )?Pooling(, Dense)*(, Normalize)?"
Dense = tuple[Tensor, Tensor, str]
PROMPTS = "config_sentence_transformers.json"
EXPORT = "export.json"  # of an export: what was exported, and from what
DOCUMENT = ("document", "passage", "corpus")  # names of the prompt of what is searched in, the first there is


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
    modules: list[dict[str, Any]] = []

    def added(kind: str) -> Path:
        path = f"{len(modules)}_{kind}" if modules else ""  # the first one's files are at the root
        modules.append({"idx": len(modules), "name": str(len(modules)), "path": path, "type": PREFIX + kind})
        return directory / path

    dump(added("Transformer") / "sentence_bert_config.json", transformer_settings(embedder))
    layers = sorted(encoder.layer(layer) for layer in pooling.layers)
    if set(layers) != {encoder.depth}:
        write_average(directory, added("WeightedLayerPooling"), layers, encoder)
    kind = "cls" if pooling.kind == "pooler" else pooling.kind
    modes = {key: kind == name for name, key in POOLING_KEYS.items()}
    dump(added("Pooling") / "config.json", {"word_embedding_dimension": encoder.width, **modes})
    for weight, bias, activation in dense_modules(embedder):
        folder, shape = added("Dense"), {"in_features": weight.shape[1], "out_features": weight.shape[0]}
        dump(folder / "config.json", {**shape, "bias": True, "activation_function": ACTIVATIONS[activation]})
        linear = {"linear.weight": weight.detach().contiguous(), "linear.bias": bias.detach().contiguous()}
        save_file(linear, folder / "model.safetensors")
    if embedder.unit:
        added("Normalize")
    dump(directory / "modules.json", modules)
    write_prompts(embedder, directory / PROMPTS)


def transformer_settings(embedder: Embedder) -> dict[str, Any]:
    """The library's settings of the encoder."""
    backbone = embedder.encoder.backbone
    settings: dict[str, Any] = {"max_seq_length": embedder.max_length, "do_lower_case": False}
    optional = "add_pooling_layer" in inspect.signature(type(backbone).__init__).parameters
    if optional and getattr(backbone, "pooler", None) is None:  # the library would make one, without weights
        settings["model_args"] = {"add_pooling_layer": False}
    return settings


def write_prompts(embedder: Embedder, file: Path) -> None:
    """Write the prompts, if there are any: by name, and which of them the library's `encode` uses.

    Its `encode_query` and `encode_document` would use no prompt at all if none had their names.
    """
    if not (embedder.prompt or embedder.prompts):
        return
    own = {"query": embedder.prompt_of("query"), "document": embedder.prompt_of(*DOCUMENT)}
    every = own | embedder.prompts
    if embedder.prompt:
        every["default"] = embedder.prompt
    dump(file, {"prompts": every, "default_prompt_name": "default" if embedder.prompt else None})


def prompts(directory: Path, modes: Mapping[str, Any]) -> dict[str, Any]:
    """The prompts of a directory of that library, as arguments of `Embedder`; none where it has none.

    modes: the config of its Pooling. Raises ForeignModules where that leaves the prompt's tokens out or where
    vectors are cut to their first numbers, and ValueError for a default prompt that is not among the prompts.
    """
    file = directory / PROMPTS
    config: dict[str, Any] = read_json(file) if file.is_file() else {}
    if config.get("truncate_dim"):
        raise ForeignModules(f"{file} has truncate_dim={config['truncate_dim']}, which is not read here")
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
    chain: list[Dense] = []
    if embedder.pooling.kind == "pooler":
        pooler: Any = embedder.encoder.pooler_layer
        chain.append((pooler.weight, pooler.bias, "tanh"))
    if embedder.embedding != "encoder":
        chain += head_modules(embedder.head, whole=embedder.embedding == "head")
    if (final := embedder.final) is not None and final.weight is not None and final.bias is not None:
        chain.append((final.weight, final.bias, "tanh" if final.tanh else "identity"))
    return chain


def head_modules(head: ProjectionHead, *, whole: bool) -> list[Dense]:
    """The steps of a head, or its dense layer alone; a whitening before that layer is part of it."""
    before, after = (part.dense() if whole and part else None for part in (head.before, head.after))
    if head.linear is None:
        return [(*before, "identity")] if before else []
    weight, bias = head.linear.weight, head.linear.bias
    if before:
        weight, bias = weight @ before[0], weight @ before[1] + bias
    return [(weight, bias, "tanh"), *([(*after, "identity")] if after else [])]


def read(directory: Path, encoder: Encoder | None) -> dict[str, Any]:
    """The keyword arguments of `Embedder` for a Sentence-Transformers directory; encoder: its own, or None.

    Its modules must be, in this order: Transformer, in an export WeightedLayerPooling, Pooling, optionally a
    square Dense with tanh, any Dense without activation, one with tanh, Normalize. Raises ForeignModules
    for anything else, and ValueError if a file of a sealed directory has changed, or any is damaged.
    """
    intact(directory, CHANGED)
    modules = read_json(directory / "modules.json")
    with parsing(directory / "modules.json", DAMAGED):
        types, paths = [m["type"] for m in modules], [directory / m["path"] for m in modules]
        kinds = [kind.rpartition(".")[2] if kind.startswith(LIBRARY) else kind for kind in types]
    if not re.fullmatch(ORDER, names := ", ".join(kinds)):
        raise ForeignModules(
            f"{directory / 'modules.json'} lists {names}; supported are Transformer, WeightedLayerPooling or "
            "none, Pooling, then Dense and, last, Normalize"
        )
    if weighed := kinds[1] == "WeightedLayerPooling":
        kinds.pop(1)
        paths.pop(1)
    list(map(check_known, kinds, paths))
    if encoder is None:
        encoder = pretrained(path=str(paths[0]))
    lower(encoder.tokenizer, paths[0])
    most = settings_of("Transformer", paths[0])[1].get("max_seq_length")
    if most and most > encoder.max_length:  # which in that library replaces the tokenizer's limit
        encoder.max_length = encoder.tokenizer.model_max_length = longest(encoder.backbone, most)
    dense, maps, tanh = dense_folders(encoder.width, paths[2 : 2 + kinds.count("Dense")])
    kind = pooling_kind(paths[1] / "config.json")
    return {
        "encoder": encoder,
        "pooling": exported_pooling(directory) if weighed else Pooling(kind),
        "head": dense_head(encoder, dense),
        "embedding": "dense" if dense else "encoder",
        "max_length": most,
        "final": final(maps, tanh=tanh, unit=kinds[-1] == "Normalize", source=str(directory)),
        **prompts(directory, read_json(paths[1] / "config.json")),
    }


def settings_of(kind: str, folder: Path) -> tuple[Path, dict[str, Any]]:
    """The file with the settings of a module, which may be missing, and they."""
    name = "sentence_*_config.json" if kind == "Transformer" else "config.json"  # older ones name the model
    file = next(iter(sorted(folder.glob(name))), folder / name)
    return file, read_json(file) if file.exists() else {}


def check_known(kind: str, folder: Path) -> None:
    """Raise ForeignModules for a setting of a module that is not known here: vectors may depend on it."""
    file, settings = settings_of(kind, folder)
    for name, value in settings.items():
        if name in READ[kind]:
            known = not isinstance(value, dict) or set(value) <= ARGUMENTS
        else:
            known = name in FIXED[kind] and value == FIXED[kind][name]
        if value not in (None, {}) and not known:
            raise ForeignModules(f"{file} has {name}={value!r:.99}, which is not read here")


def lower(tokenizer: Any, folder: Path) -> None:
    """Have a tokenizer lower its text first, if the Transformer in a folder says so and it does not yet."""
    cased, lowered = (tokenizer(text)["input_ids"] for text in ("The CAT", "the cat"))
    if settings_of("Transformer", folder)[1].get("do_lower_case") and cased != lowered:
        core = tokenizer.backend_tokenizer
        own = [core.normalizer] if core.normalizer else []
        core.normalizer = normalizers.Sequence([normalizers.Lowercase(), *own])


def exported_pooling(directory: Path) -> Pooling:
    """The pooling that an export notes. Raises ForeignModules for other directories that weigh layers."""
    file = directory / EXPORT
    if not file.is_file():
        raise ForeignModules(f"{directory / 'modules.json'} weighs layers, and is no export of whitenedcse")
    with parsing(file, DAMAGED):
        return Pooling(**read_json(file)["pooling"])


def dense_folders(d: int, folders: list[Path]) -> tuple[Path | None, list[Path], bool]:
    """Dense modules in order: the folder of a square one with tanh, those after it, if they end in tanh.

    Raises ForeignModules for other activations, and where tanh is not the last of them.
    """
    first, after, tanh = None, list[Path](), False
    for folder in folders:
        config = read_json(folder / "config.json")
        name = config.get("activation_function", TANH)
        known = re.fullmatch(r"torch\.nn\.(?:modules\.\w+\.)?(Tanh|Identity)", str(name))
        if tanh or not known:
            raise ForeignModules(f"{folder} is a Dense with {name}; read are square tanh, linear ones, tanh")
        tanh = known[1] == "Tanh"
        if tanh and folder == folders[0] and config["in_features"] == config["out_features"] == d:
            first, tanh = folder, False
        else:
            after.append(folder)
    return first, after, tanh


def layer(folder: Path) -> tuple[Tensor, Tensor]:
    """The weight (out, in) and the bias (out,) of a Dense, which are zeros where it has none."""
    file, old = folder / "model.safetensors", folder / "pytorch_model.bin"  # before release 3.0.1
    with parsing(folder, DAMAGED):
        given = checkpoint(old) if old.exists() and not file.exists() else tensors(file)
        weight = given["linear.weight"].double()
        return weight, given.get("linear.bias", torch.zeros(len(weight))).double()


def final(folders: Sequence[Path], *, tanh: bool, unit: bool, source: str) -> Final | None:
    """Consecutive linear layers as one transform, its tanh, and unit length; None where there is none."""
    weight, bias = None, None
    for folder in folders:
        w, b = layer(folder)
        weight, bias = (w, b) if weight is None or bias is None else (w @ weight, w @ bias + b)
    if weight is None and not unit:
        return None
    return Final(weight=weight, bias=bias, tanh=tanh, unit=unit, provenance={"read from": source})


def pooling_kind(path: Path) -> str:
    """The one kind that a Pooling module's config turns on. Raises ForeignModules for any other."""
    config: dict[str, Any] = read_json(path)
    said = [key for key, on in config.items() if key.startswith(MODES) and on]
    kinds = config.get("pooling_mode") or said or "mean"  # the first is of newer releases: most often a name
    kinds = [kinds] if isinstance(kinds, str) else kinds
    ours = {key: name for name, key in POOLING_KEYS.items()}
    ours |= {name: name for name in POOLING_KEYS} | {"lasttoken": "last"}
    if len(kinds) != 1 or kinds[0] not in ours:
        raise ForeignModules(f"{path} asks for pooling {kinds}, not one of {', '.join(POOLING_KEYS)}")
    return ours[kinds[0]]


def dense_head(encoder: Encoder, directory: Path | None) -> ProjectionHead:
    """The head with the weights of a Dense module with tanh, or a head without dense layer."""
    head = ProjectionHead(width=encoder.width, whitening=None, dense=directory is not None)
    if directory is not None:
        weight, bias = layer(directory)
        with parsing(directory, DAMAGED):
            head.load_state_dict({"linear.weight": weight, "linear.bias": bias})
    return head


def dump(path: Path, content: Any) -> None:
    """Write a JSON file, and create its folder."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content, indent=2))

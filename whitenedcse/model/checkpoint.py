"""A checkpoint on disk: everything that makes an embedder, in one directory.

The directory is at once one of Transformers (weights, tokenizer), one of Sentence-Transformers (modules.json)
where that library can express the embedding, and ours (`whitenedcse.json`, `head.safetensors`). No pickles.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import save_file

from whitenedcse.files import (
    DIGESTS,
    digest,
    drafted,
    intact,
    parsing,
    read_json,
    restore,
    seal,
    tensors,
)
from whitenedcse.model import sentence_transformers
from whitenedcse.model.backbones import causal, frozen
from whitenedcse.model.encoder import CHANGED, folder, pretrained
from whitenedcse.model.head import Final, Pooling, ProjectionHead
from whitenedcse.model.lora import merged
from whitenedcse.model.whitener import WhiteningSettings

if TYPE_CHECKING:
    from whitenedcse.model.embedder import Embedder

SETTINGS, FINAL = "whitenedcse.json", "final.safetensors"
EXPORT = "export.json"  # of an export: what was exported, and from what
FOREIGN = "not what train.py wrote beside these weights; copy the whole checkpoint again"


def save(embedder: Embedder, directory: Path, step: int | None = None) -> None:
    """Write the checkpoint to a draft folder, then rename it: a kill never leaves half of one.

    step: how many optimiser steps were done, noted for `noted_step`. Raises OSError, or ValueError for a
    directory that holds something else; it is then unchanged.
    """
    if directory.exists() and not (directory / SETTINGS).is_file() and any(directory.iterdir()):
        raise ValueError(f"{directory} holds something other than a checkpoint; choose another name")
    with drafted(directory) as draft:
        write(embedder, draft, step)
        seal(draft)


def noted_step(directory: Path) -> int | None:
    """After how many optimiser steps a checkpoint was written; None where it does not say, as older ones."""
    with suppress(ValueError, OSError):
        step = read_json(directory / SETTINGS).get("step")
        return step if isinstance(step, int) else None
    return None


def write(embedder: Embedder, directory: Path, step: int | None) -> None:
    """Write the files of a checkpoint into a directory, with low-rank adapters merged."""
    plain = merged(embedder)
    plain.encoder.backbone.save_pretrained(directory)
    embedder.encoder.tokenizer.save_pretrained(directory)
    head = {name: value.contiguous() for name, value in kept(embedder.head).state_dict().items()}
    save_file(head, directory / "head.safetensors")
    if embedder.final is not None:
        save_file(dict(embedder.final.state_dict()), directory / FINAL)
    sentence_transformers.write(embedder, directory)
    # beside adapters frozen weights are part of the vector
    untrained = {"frozen": list(frozen(embedder.encoder.backbone)) if plain is embedder else []}
    noted = {} if step is None else {"step": step}
    (directory / SETTINGS).write_text(json.dumps({**settings(embedder), **untrained, **noted}, indent=2))


def kept(head: ProjectionHead) -> ProjectionHead:
    """The head that a checkpoint holds: none in place of a user's own, whose code may be missing."""
    return ProjectionHead(1, whitening=None, dense=False) if head.own else head


def settings(embedder: Embedder) -> dict[str, Any]:
    """What makes the embedding beside the weights, as plain values for `whitenedcse.json`."""
    head, final = kept(embedder.head), embedder.final
    whitening = None if head.whitening is None else asdict(head.whitening)
    return {
        "pooling": {"kind": embedder.pooling.kind, "layers": list(embedder.pooling.layers)},
        "head": {
            "width": embedder.encoder.width,
            "whitening": whitening,
            "dense": head.linear is not None,
            "position": head.position,
        },
        "embedding": embedder.embedding,
        "max_length": embedder.max_length,
        "final": final and {"unit": final.unit, "provenance": final.provenance},
        **({"prompt": embedder.prompt} if embedder.prompt else {}),
        **({"prompts": embedder.prompts} if embedder.prompts else {}),
    }


def seen(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Those settings that vectors show: without those of a head that only training has used."""
    return {k: value for k, value in settings.items() if k != "head" or settings["embedding"] != "encoder"}


def parts(path: str, pooling: Pooling | str | None = None) -> dict[str, Any]:
    """The keyword arguments of `Embedder`, from any source that `Embedder.load` takes."""
    restore(Path(path) if Path(path).name == "best" else Path(path) / "best")
    directory = folder(path)
    if directory.name == "best" and (directory.parent / "scores.json").is_file():  # of a run that has ended
        intact(directory.parent, CHANGED, [f"best/{DIGESTS}"])
    own, modules = directory / SETTINGS, directory / "modules.json"
    if not (own.exists() or modules.exists()):
        return plain(directory, pooling)
    if pooling is not None:
        name = own.name if own.exists() else modules.name
        raise ValueError(
            f"{path} carries its own pooling ({name}); leave pooling= and layers= out. Other layers of it are"
            " pooled by evaluate.py's protocol=whiteningbert and protocol=bert_whitening"
        )
    return ours(directory) if own.exists() else sentence_transformers.read(directory)


def own(directory: Path) -> dict[str, Any]:
    """The "pooling", "prompt", "max_length" and steps "after" pooling of a directory, without its weights.

    Empty for a plain encoder, for modules of Sentence-Transformers that are not read here, and for files of
    either kind that are damaged, as only the encoder is needed.
    """
    with suppress(ValueError, OSError, KeyError, TypeError):
        if (directory / SETTINGS).exists():
            content = read_json(directory / SETTINGS)
            after = [content["embedding"]] * (content["embedding"] != "encoder")
            last = content.get("final") or {}
            if last and tensors(directory / FINAL):  # empty where the last step is unit length alone
                after.append("linear")
            after += ["unit length"] * last.get("unit", False)
            kept = {"prompt": content.get("prompt", ""), "max_length": content["max_length"], "after": after}
            return {"pooling": Pooling(**content["pooling"]), **kept}
        if (directory / "modules.json").exists():
            return sentence_transformers.pooled(directory)
        has = exported(directory)
        return has | {"after": ["unit length"]} if has.pop("final", None) else has
    return {}


def others(embedder: Embedder, path: str | None) -> list[str]:
    """Notes on what the encoder at `path` has of its own, and is not trained with: pooling, prompt, steps."""
    has = own(embedder.encoder.source) if path and embedder.encoder.source else {}
    pooling, prompt = has.get("pooling", embedder.pooling), has.get("prompt", embedder.prompt)
    notes = []
    if str(pooling) != str(embedder.pooling):
        keep = f"pooling={pooling.kind}" + f" pooling.layers={[*pooling.layers]}" * (pooling.layers != (-1,))
        notes.append(f"note: {path} pools by {pooling}, this run by {embedder.pooling}; keep it by {keep}")
    if prompt != embedder.prompt:
        now = repr(embedder.prompt) if embedder.prompt else "none"
        notes.append(f"note: {path} embeds after the prompt {prompt!r}, this run after {now}; see prompt=")
    if after := has.get("after"):
        unit = "; unit length is added again by whitenedcse export --unit" * ("unit length" in after)
        notes.append(f"note: what {path} has after its pooling is left out: {', '.join(after)}{unit}")
    return notes


def plain(directory: Path, pooling: Pooling | str | None) -> dict[str, Any]:
    """The keyword arguments of `Embedder` for an encoder without modules after it.

    An export for Transformers notes its pooling, prompt and unit length; any other encoder has none of them.
    """
    encoder = pretrained(path=str(directory))
    usual = Pooling(kind="last" if causal(encoder) else "cls", layers=[-1])
    head = ProjectionHead(width=encoder.width, whitening=None, dense=False, position="before")
    parts = {"encoder": encoder, "pooling": usual, "head": head, "embedding": "encoder"} | exported(directory)
    return parts | ({"pooling": pooling} if pooling else {})


def exported(directory: Path) -> dict[str, Any]:
    """What an export for Transformers notes of its vectors: pooling, prompt, last step. Empty for others."""
    if not (directory / EXPORT).is_file():
        return {}
    content = read_json(directory / EXPORT)
    with parsing(directory / EXPORT, FOREIGN):
        if content["to"] != "transformers" or "pooling" not in content:  # the latter of an older version
            return {}
        last = Final(weight=None, bias=None, unit=True, provenance={}) if content["unit"] else None
        return {"pooling": Pooling(**content["pooling"]), "prompt": content["prompt"], "final": last}


def ours(directory: Path) -> dict[str, Any]:
    """The keyword arguments of `Embedder` for a checkpoint that `save` wrote."""
    encoder, content = pretrained(path=str(directory)), read_json(directory / SETTINGS)
    weights = tensors(directory / "head.safetensors")
    last: dict[str, Any] = tensors(directory / FINAL) if content.get("final") else {}
    with parsing(directory / SETTINGS, FOREIGN):
        for name, then in content.get("sha256", {}).items():  # of older versions
            if digest(directory / name) != then:
                raise ValueError(f"{name} is not as it was written: its digest differs")
        whitening = content["head"].pop("whitening")
        head = ProjectionHead(
            whitening=WhiteningSettings(**whitening) if whitening else None, **content["head"]
        )
        head.load_state_dict(weights)
        pooling, embedding, limit = (content[key] for key in ("pooling", "embedding", "max_length"))
        parts: dict[str, Any] = {"pooling": Pooling(**pooling), "embedding": embedding, "max_length": limit}
        parts |= {name: content[name] for name in ("prompt", "prompts") if name in content}
        if final := content.get("final"):
            parts["final"] = Final(**{"weight": None, "bias": None, **last, **final})
        return {"encoder": encoder, "head": head, **parts}

"""An export as a directory: written beside, verified, and then put in its place at once."""

from __future__ import annotations

import os
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from whitenedcse.durable import digest, drafted, write_json
from whitenedcse.export import card, onnx, sentence_transformers, transformers, verify
from whitenedcse.model.embedder import Embedder

MARK = "export.json"  # what was exported, from what, and the SHA-256 of each file

FORMS: dict[str, Any] = {
    "transformers": transformers,
    "sentence-transformers": sentence_transformers,
    "onnx": onnx,
}


class Wanted(NamedTuple):
    """What to write. For the card: what the embedder was loaded from, under which name the export will be
    known (None is the directory's), and the licence of its weights.
    """

    to: str
    source: str
    int8: bool = False
    verify: bool = True
    name: str | None = None
    license: str | None = None


def export(embedder: Embedder, out: Path, wanted: Wanted) -> dict[str, Any]:
    """Write the embedder to `out` in one of FORMS; returns what export.json holds.

    Raises ValueError, nothing written, for an embedder that the form cannot hold, for an export whose vectors
    are not the embedder's, and where `out` holds anything but an earlier export.
    """
    form, embedder = FORMS[wanted.to], embedder.cpu().eval()
    refuse(out, wanted)
    form.refuse(embedder)
    with drafted(out) as draft:
        form.write(embedder, draft)
        facts = {"whitenedcse": version("whitenedcse"), **wanted._asdict()}
        facts |= quantised(embedder, draft) if wanted.int8 else {}
        if wanted.verify:
            texts = verify.texts(embedder.encoder.tokenizer)
            found = verify.difference(embedder.encode(texts), form.vectors(embedder, draft, texts))
            verify.refuse(found, verify.LIMIT_INT8 if wanted.int8 else verify.LIMIT)
            facts["difference"] = found
        (draft / "README.md").write_text(
            card.text(embedder, facts, wanted.name or out.name), encoding="utf-8"
        )
        facts |= {"source": card.shown(wanted.source), "sha256": digests(draft)}
        write_json(draft / MARK, facts)
    return facts


def refuse(out: Path, wanted: Wanted) -> None:
    """Raise ValueError where `out` holds anything but an earlier export, for int8 of another form than ONNX,
    and for a package that is not installed.
    """
    if out.exists() and not (out / MARK).is_file() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} holds something else than an export; choose another name, or delete it")
    if wanted.int8 and wanted.to != "onnx":
        raise ValueError(f"--int8 is for --to onnx, not for --to {wanted.to}")
    needed = ["onnx", "onnxscript"] if wanted.to == "onnx" else []
    if wanted.verify or wanted.int8:
        needed += {"onnx": ["onnxruntime"], "sentence-transformers": ["sentence_transformers"]}.get(
            wanted.to, []
        )
    if missing := [name for name in needed if find_spec(name) is None]:
        names = " ".join(missing).replace("_", "-")
        without = (
            "" if {"onnx", "onnxscript"} & set(missing) or wanted.int8 else ", or do without: --no-verify"
        )
        raise ValueError(f"--to {wanted.to} needs {names}: pip install {names}{without}")


def quantised(embedder: Embedder, draft: Path) -> dict[str, Any]:
    """Make an ONNX draft int8; returns what that costs: Spearman x 100 on scored pairs, before and after."""
    name, sentences, index = verify.pairs()
    before = verify.spearman(onnx.vectors(embedder, draft, sentences), index)
    onnx.quantise(draft)
    after = verify.spearman(onnx.vectors(embedder, draft, sentences), index)
    return {"pairs": name, "spearman": before, "spearman_int8": after}


def digests(directory: Path) -> dict[str, str]:
    """The SHA-256 of each file, by its path in the directory."""
    files = (path for path in sorted(directory.rglob("*")) if path.is_file())
    return {path.relative_to(directory).as_posix(): digest(path) for path in files}


def push(out: Path, repository: str) -> str:
    """Upload an export to a repository of the hub, made if need be, by its own client; returns its address.

    It is public unless it was made private before. The account is that of `hf auth login` or $HF_TOKEN.
    Raises OSError where the hub does not take it.
    """
    from huggingface_hub import HfApi

    hub = HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
    try:
        address = hub.create_repo(repository, exist_ok=True)
        hub.upload_folder(
            repo_id=repository, folder_path=out, commit_message=f"whitenedcse export of {out.name}"
        )
    except Exception as error:  # the hub client raises a dozen kinds
        raise OSError(f"{out} is written, but {repository} was not pushed: {error}") from error
    return str(address)

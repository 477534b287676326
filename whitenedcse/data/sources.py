"""Where named corpora and tasks lie on this machine, and how they come here when they do not."""

from __future__ import annotations

import difflib
import os
import shutil
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from whitenedcse.data.corpus import is_hub_id

REPO = "princeton-nlp/datasets-for-simcse"  # a data set of the Hugging Face hub
SECONDS = 5  # to wait for the hub to answer at all

SENTEVAL = ("senteval", "senteval/downstream", "downstream", "SentEval/data/downstream", ".")


class Source(NamedTuple):
    """A corpus that has a name: where to look under each root, and which file of REPO it is, if any."""

    candidates: tuple[str, ...]
    hub_file: str | None


CORPORA = {
    "wiki1m": Source(("wiki1m_for_simcse.txt", "wiki/wiki1m_for_simcse.txt"), "wiki1m_for_simcse.txt"),
    "nli": Source(("nli_for_simcse.csv", "nli/nli_for_simcse.csv"), "nli_for_simcse.csv"),
    "wiki1m_like": Source(("wiki/wiki1m_like.txt.bz2", "wiki1m_like.txt.bz2"), None),
    "quickstart": Source(("quickstart/sentences.txt",), None),
}


def roots() -> list[Path]:
    """$WHITENEDCSE_DATA or ./data, into which downloads go, then the project's own data folder."""
    chosen = Path(os.environ.get("WHITENEDCSE_DATA") or "data").resolve()
    return list(dict.fromkeys([chosen, Path(__file__).resolve().parents[2] / "data"]))


def located(name: str) -> Path:
    """A path as it is, the `owner/name` of a hub data set as it is, or a named corpus, fetched if need be."""
    if Path(name).exists() or ("/" in name and is_hub_id(name)):
        return Path(name)
    if name not in CORPORA:
        near = "".join(f" Did you mean {n!r}?" for n in difflib.get_close_matches(name, CORPORA, 1))
        raise FileNotFoundError(
            f"{name}: no such file or directory, nor one of the names {list(CORPORA)}.{near}"
        )
    source = CORPORA[name]
    for path in _places(source.candidates):
        if path.is_file():
            return path
    return _fetched(name, source.hub_file, source.candidates)


def senteval() -> Path:
    """The folder that holds STS/ and SICK/ as SentEval lays them out, fetched and unpacked if need be."""
    for folder in _places(SENTEVAL):
        if _is_senteval(folder):
            return folder
    archives = [path for path in _places(["senteval.tar"]) if path.is_file()]
    return _unpacked(archives[0] if archives else _fetched("senteval", "senteval.tar", SENTEVAL))


def _places(candidates: Sequence[str]) -> list[Path]:
    return [root / candidate for root in roots() for candidate in candidates]


def _is_senteval(folder: Path) -> bool:
    return (folder / "STS" / "STSBenchmark").is_dir()


def _fetched(name: str, hub_file: str | None, candidates: Sequence[str]) -> Path:
    """A file of the hub in the first root, or an error that says what would have done."""
    cause: Exception | None = None
    reason = "it is not on the hub"
    if hub_file is not None:
        try:
            return _downloaded(hub_file)
        except Exception as error:  # the hub library's own kinds differ between releases and share no class
            cause = error
            what = " ".join(str(error).split())[:200]
            reason = f"{hub_file} could not be had from {REPO} ({type(error).__name__}: {what})"
    raise FileNotFoundError(
        f"{name}: no {' or '.join(candidates)} in {' or '.join(map(str, roots()))}, and {reason}. "
        "Put it there, set WHITENEDCSE_DATA to a folder that has it, or give a path."
    ) from cause


def _downloaded(hub_file: str) -> Path:
    """One file of REPO, downloaded into the first root with a progress bar."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url

    endpoint = os.environ.get("HF_ENDPOINT")
    url = hf_hub_url(REPO, hub_file, repo_type="dataset", endpoint=endpoint)
    get_hf_file_metadata(
        url, timeout=SECONDS
    )  # asks once; the download itself retries a dead network for 23 s
    root = roots()[0]
    return Path(hf_hub_download(REPO, hub_file, repo_type="dataset", local_dir=root, endpoint=endpoint))


def _extract(tar: tarfile.TarFile, member: tarfile.TarInfo, inside: Path) -> None:
    """A file or folder, below `inside`; nothing else, nowhere else. (Python 3.11.2 has no tar filters.)"""
    target = (inside / member.name).resolve()
    stream = tar.extractfile(member) if member.isfile() else None
    if not target.is_relative_to(inside.resolve()) or not (stream or member.isdir()):
        raise ValueError(f"{tar.name!s}: refused, {member.name} is a link or would be written outside")
    (target if stream is None else target.parent).mkdir(parents=True, exist_ok=True)
    if stream is not None:
        with stream, target.open("wb") as file:
            shutil.copyfileobj(stream, file)


def _unpacked(archive: Path) -> Path:
    """The SentEval folder inside an archive, moved beside it as `senteval` once all of it is there."""
    target = archive.parent / "senteval"
    with tempfile.TemporaryDirectory(prefix=".senteval.", dir=archive.parent) as draft:
        inside = Path(draft) / "archive"
        try:
            with tarfile.open(archive) as tar:
                for member in tar:
                    _extract(tar, member, inside)
        except (tarfile.TarError, EOFError) as error:
            raise ValueError(
                f"{archive}: not a whole tar archive ({error}); delete it and start again"
            ) from error
        found = next(
            (folder for folder in [inside, *sorted(inside.rglob("*"))] if _is_senteval(folder)), None
        )
        if found is None:
            raise ValueError(f"{archive}: holds no STS/STSBenchmark; delete it and start again")
        try:
            found.rename(target)
        except OSError:
            if not _is_senteval(target):  # else another process was first
                raise
    return target

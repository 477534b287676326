"""Named corpora and tasks: where they are on this machine, and how they are downloaded if they are not."""

from __future__ import annotations

import os
import re
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from filelock import BaseFileLock, FileLock

from whitenedcse import inputs
from whitenedcse.data.corpus import Corpus, is_hub_id, texts
from whitenedcse.files import parsing, sha256
from whitenedcse.inputs import expanded

SIMCSE = "princeton-nlp/datasets-for-simcse"  # data sets of the Hugging Face hub
MNLI, SNLI = "nyu-mll/multi_nli", "stanfordnlp/snli"
SECONDS = 30  # to wait for an answer of the hub

SENTEVAL = ("senteval", "senteval/downstream", "downstream", "SentEval/data/downstream", ".")
RTE = "rte/dev.tsv"  # under a root; on no hub


class Source(NamedTuple):
    """A corpus that has a name: the paths to look for under each root, its columns, and its files on the hub.

    hub: (data set, file) for each file. Several files are a folder, which the first of `candidates` names.
    """

    candidates: tuple[str, ...]
    columns: tuple[str, ...] = ()
    hub: tuple[tuple[str, str], ...] = ()


CORPORA = {
    "wiki1m": Source(
        ("wiki1m_for_simcse.txt", "wiki/wiki1m_for_simcse.txt"), hub=((SIMCSE, "wiki1m_for_simcse.txt"),)
    ),
    "nli": Source(  # what BERT-whitening fits to: MNLI's train set, and SNLI's train, dev and test sets
        ("mnli_snli",),
        ("premise", "hypothesis"),
        (
            (MNLI, "data/train-00000-of-00001.parquet"),
            (SNLI, "plain_text/train-00000-of-00001.parquet"),
            (SNLI, "plain_text/validation-00000-of-00001.parquet"),
            (SNLI, "plain_text/test-00000-of-00001.parquet"),
        ),
    ),
    "nli_for_simcse": Source(
        ("nli_for_simcse.csv", "nli/nli_for_simcse.csv"),
        ("sent0", "sent1", "hard_neg"),
        ((SIMCSE, "nli_for_simcse.csv"),),
    ),
    "wiki1m_like": Source(("wiki/wiki1m_like.txt.bz2", "wiki1m_like.txt.bz2")),
    "quickstart": Source(("quickstart/sentences.txt",)),
}


def roots() -> list[Path]:
    """The data folders: $WHITENEDCSE_DATA or ./data, where downloads go; the clone's; the package's own."""
    chosen = Path(expanded(os.environ.get("WHITENEDCSE_DATA") or "data")).resolve()
    own = Path(__file__).resolve()
    clone = [own.parents[2] / "data"] if (own.parents[2] / "train.py").is_file() else []
    return list(dict.fromkeys([chosen, *clone, own.parent]))


def cache() -> Path:
    """The folder of token ids and vectors, safe to delete: $WHITENEDCSE_CACHE or ~/.cache/whitenedcse."""
    return Path(expanded(os.environ.get("WHITENEDCSE_CACHE") or "~/.cache/whitenedcse"))


def locked(folder: Path, name: str) -> BaseFileLock:
    """A context in which this process alone has a lock in a folder of the cache, which is made if missing."""
    folder.mkdir(parents=True, exist_ok=True)
    return FileLock(folder / name)


def located(name: str) -> str | Path:
    """Where a corpus is: the path of a named one, downloaded if needed; any path, URL or hub id unchanged."""
    if not (name := expanded(name)).strip():
        raise FileNotFoundError("no corpus is named: the name or path is empty")
    if "://" in name:
        return name
    if Path(name).exists() or ("/" in name and is_hub_id(name)):
        return Path(name)
    if name not in CORPORA:
        raise FileNotFoundError(f"{name}: no such file or directory, nor one of the names {list(CORPORA)}")
    return present(name, roots()) or fetched(name)


def given(corpus: Iterable[str] | str | os.PathLike[str], *more: Any) -> Iterator[str]:
    """The texts of a corpus that a caller gives, or those of one that is `named` so, with `more` of that."""
    if isinstance(corpus, str | os.PathLike):
        return texts(named(os.fspath(corpus), *more))
    return iter(inputs.texts(corpus, "text"))


def named(name: str, columns: Sequence[str] = (), sample: int | None = None) -> Corpus:
    """A `Corpus` by name, path, URL or hub id. The columns of a named one need not be given."""
    wanted = tuple([columns] if isinstance(columns, str) else columns) or (
        CORPORA[name].columns if name in CORPORA else ()
    )
    return Corpus(str(located(name)), wanted, sample)


def check_columns(path: str, columns: Sequence[str]) -> None:
    """Raise ValueError for several columns where each row of a table is one text."""
    if len(columns) > 1:
        raise ValueError(
            f"{path}: one column is encoded, not {', '.join(columns)}; texts that belong together are joined "
            "in the file first"
        )


def senteval() -> Path:
    """The folder that holds STS/ and SICK/ in SentEval's layout, downloaded and unpacked if needed."""
    return present("senteval", roots()) or fetched("senteval")


def present(name: str, within: Sequence[Path]) -> Path | None:
    """Where one of CORPORA, or the folder "senteval", is in the folders `within`; None if it is in none."""
    if name == "senteval":
        return next(filter(_is_senteval, candidate_paths(SENTEVAL, within)), None)
    candidates, parts = candidate_paths(CORPORA[name].candidates, within), files_of(name)
    return next((path for path in candidates if all((path / part).is_file() for part in parts)), None)


def files_of(name: str) -> list[str]:
    """The files of one of CORPORA below its path; the path itself, "", of a corpus of one file."""
    return [file for _, file in CORPORA[name].hub] if len(CORPORA[name].hub) > 1 else [""]


def fetched(name: str) -> Path:
    """Download one of CORPORA, or "senteval" and unpack it, into the first root; returns its path."""
    if name == "senteval":
        archives = filter(Path.is_file, candidate_paths(["senteval.tar"], roots()))
        return _unpacked(next(archives, None) or _fetched(name, SIMCSE, "senteval.tar", roots()[0], SENTEVAL))
    source = CORPORA[name]
    if not source.hub:
        raise FileNotFoundError(_absent(name, source.candidates, "it is not on the hub"))
    if files_of(name) == [""]:
        return _fetched(name, *source.hub[0], roots()[0], source.candidates)
    folder = roots()[0] / source.candidates[0]
    for repository, file in source.hub:
        if not (folder / file).is_file():
            _fetched(name, repository, file, folder, source.candidates)
    return folder


def candidate_paths(candidates: Sequence[str], within: Sequence[Path]) -> list[Path]:
    """The path of every candidate in every folder, those of the first folder first."""
    return [folder / candidate for folder in within for candidate in candidates]


def _is_senteval(folder: Path) -> bool:
    return (folder / "STS" / "STSBenchmark").is_dir()


def _absent(name: str, candidates: Sequence[str], reason: str) -> str:
    tests = "tasks=quickstart or tasks.names=[FILE], in training also monitor=held_out or monitor.dev=FILE"
    return (
        f"{name}: no {candidates[0]} in {' or '.join(map(str, roots()))}, and {reason}. Put it there, set "
        "WHITENEDCSE_DATA to a folder that has it, or use another: "
        f"{'data.corpus=FILE or fit=FILE' if name in CORPORA else tests}."
    )


def _fetched(name: str, repository: str, file: str, folder: Path, candidates: Sequence[str]) -> Path:
    """Download a file of the hub into a folder, and compare its sha256, which the hub's ETag of it is."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url

    there: Any = {"repo_type": "dataset", "endpoint": os.environ.get("HF_ENDPOINT")}
    try:
        etag = get_hf_file_metadata(hf_hub_url(repository, file, **there), timeout=SECONDS).etag or ""
        path = Path(hf_hub_download(repository, file, local_dir=folder, etag_timeout=SECONDS, **there))
        if re.fullmatch("[0-9a-f]{64}", etag) and (came := sha256(path)) != etag:
            path.unlink()
            raise ValueError(f"it has sha256 {came}, not {etag}; deleted, try again")
        return path
    except Exception as error:  # the hub library's own kinds differ between releases and share no class
        what = " ".join(str(error).split())[:200]
        reason = f"{file} could not be downloaded from {repository} ({type(error).__name__}: {what})"
        raise FileNotFoundError(_absent(name, candidates, reason)) from error


def _unpacked(archive: Path) -> Path:
    """Unpack an archive's SentEval folder to `senteval` beside it, which appears only when complete."""
    target = archive.parent / "senteval"
    with tempfile.TemporaryDirectory(prefix=".senteval.", dir=archive.parent) as draft:
        with parsing(archive, "delete it and start again"), tarfile.open(archive) as tar:
            # no link, nothing outside; Python 3.11.2 has no filters, which would do it
            tar.extraction_filter = lambda member, _: member  # without one, Python 3.12 warns
            plain = [m for m in tar if m.isfile() or m.isdir()]
            inside = [m for m in plain if not {"..", "/"} & set(Path(m.name).parts)]
            tar.extractall(Path(draft, "archive"), inside)
        found = next(filter(_is_senteval, sorted(Path(draft).rglob("*"))), None)
        if found is None:
            raise ValueError(f"{archive}: holds no STS/STSBenchmark; delete it and start again")
        if not _is_senteval(target):  # else another process was first
            found.rename(target)
    return target

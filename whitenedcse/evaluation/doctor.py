"""Checks whether the tasks and corpora on this machine are the published ones.

The counts are those of data/README.md, where several copies agree; that of nli_for_simcse is from
github.com/princeton-nlp/SimCSE/issues/238, and that of nli the sum of 392,702 (MNLI) and 570,152 (SNLI).
data/checksums.json has the checksums of the copy that was read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from whitenedcse.data import corpus
from whitenedcse.data.sources import CORPORA, RTE, files_of, present, roots
from whitenedcse.evaluation.tasks import STS, TRANSFER, benchmark_labels, benchmark_pairs
from whitenedcse.files import sha256

PAIRS = {  # scored pairs of each subset, in the order of tasks.STS
    "STS12": (750, 750, 459, 750, 399),
    "STS13": (189, 750, 561),
    "STS14": (450, 300, 750, 750, 750, 750),
    "STS15": (375, 750, 375, 750, 750),
    "STS16": (254, 249, 230, 244, 209),
    "STS-B": (1379,),
    "STS-B/dev": (1500,),
    "STS-B/train": (5749,),
    "SICK-R": (4927,),
    "SICK-R/dev": (500,),
    "SICK-R/train": (4500,),
}
COLUMNS = ("task", "rows", "published", "verdict")  # rows: those here
Counts = dict[str, int]  # rows by part of a task, "" for all of it
ROWS = {"wiki1m": 1_000_000, "wiki1m_like": 1_000_000, "nli": 962_854, "nli_for_simcse": 275_601}


class Finding(NamedTuple):
    """The state of a task or corpus. verdict: ok, differs (from the copy checked), wrong or missing."""

    task: str
    base: Path
    expected: int
    rows: int | None
    verdict: str
    why: str


def examined(folder: Path | None = None) -> list[Finding]:
    """The state of every task and corpus under `folder`, or the data roots, as an evaluation finds it."""
    if folder is not None and not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder")
    within = roots() if folder is None else [folder.resolve()]
    home = present("senteval", within) or within[0] / "senteval"
    findings = []
    for name, task in STS.items():
        parts = task.subsets.split()
        names = [f"{task.folder}/{file.format(part)}" for part in parts for file in (task.text, task.gold)]
        published = dict(zip(parts, PAIRS[name], strict=True))
        findings.append(_finding(name, home, names, published, partial(_pairs, name, home)))
    for name, labelled in TRANSFER.items():
        names = [part.file or RTE for part in labelled.parts]
        base = next((root for root in within if (root / RTE).is_file()), within[0]) if name == "RTE" else home
        published = {"": sum(part.rows for part in labelled.parts)}
        findings.append(_finding(name, base, names, published, partial(_texts, name, base)))
    for name, rows in ROWS.items():
        path = present(name, within) or within[0] / CORPORA[name].candidates[0]
        names = [str(Path(path.name, part)) for part in files_of(name)]
        read = partial(_sentences, path, CORPORA[name].columns)
        findings.append(_finding(name, path.parent, names, {"": rows}, read))
    return findings


def _finding(
    task: str, base: Path, names: Sequence[str], published: Counts, read: Callable[[], Counts]
) -> Finding:
    """The state of the files `names` in `base`, which are read only if all of them exist."""
    names, expected = list(dict.fromkeys(names)), sum(published.values())
    unread = Finding(task, base, expected, None, "wrong", "")
    if absent := [name for name in names if not (base / name).is_file()]:
        what = f"{len(absent)} of {len(names)} files are not in {base}, such as {absent[0]}; {_remedy(task)}"
        return unread._replace(verdict="missing", why=what)
    try:
        rows = read()
    except (ValueError, OSError) as error:
        return unread._replace(why=str(error))
    wrong = [
        f"{part} {rows[part]:,} rows, {n:,} published".strip()
        for part, n in published.items()
        if rows[part] != n
    ]
    known = json.loads((files("whitenedcse.data") / "checksums.json").read_text())
    other = [name for name in names if known.get(name, "") not in ("", sha256(base / name))]
    differs = [f"{name} differs from the copy that was checked" for name in other]
    verdict = "wrong" if wrong else "differs" if differs else "ok"
    return Finding(task, base, expected, sum(rows.values()), verdict, "; ".join(wrong or differs))


def _remedy(task: str) -> str:
    if task == "RTE" or (task in CORPORA and not CORPORA[task].hub):
        return "it cannot be downloaded: put it there"
    return f"to get it: whitenedcse data fetch {task if task in CORPORA else 'senteval'}"


def _pairs(name: str, home: Path) -> Counts:
    return {subset.name: len(subset.gold) for subset in benchmark_pairs(name, home)}


def _texts(name: str, home: Path) -> Counts:
    return {"": len(benchmark_labels(name, home / RTE if name == "RTE" else home).labels)}


def _sentences(path: Path, columns: tuple[str, ...]) -> Counts:
    return {"": corpus.read(corpus.Corpus(str(path), columns))[1].total}


def lines(findings: Iterable[Finding]) -> list[list[str]]:
    """The cells of a table with the columns COLUMNS, a row for each finding; `remarks` has the reasons."""
    return [
        [f.task, "-" if f.rows is None else f"{f.rows:,}", f"{f.expected:,}", f.verdict] for f in findings
    ]


def remarks(findings: Sequence[Finding]) -> list[str]:
    """A line for every finding that is not ok, one with the folders searched, and one with the counts."""
    looked = ", ".join(dict.fromkeys(str(f.base) for f in findings))
    verdicts = [f.verdict for f in findings]
    count = ", ".join(f"{verdicts.count(word)} {word}" for word in ("ok", "differs", "wrong", "missing"))
    return [*(f"{f.task}: {f.verdict}: {f.why}" for f in findings if f.why), f"searched: {looked}", count]

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

import numpy as np

from whitenedcse.data import corpus
from whitenedcse.data.sources import CORPORA, RTE, SENTEVAL, candidate_paths, files_of, present, roots
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
COLUMNS = ("task", "files", "rows", "published", "verdict")  # rows: those here
Read = Callable[[], tuple[int, list[str]]]  # the number of rows in files, and what is wrong, in sentences
ROWS = {"wiki1m": 1_000_000, "wiki1m_like": 1_000_000, "nli": 962_854, "nli_for_simcse": 275_601}
AGAIN = "move the folder and any senteval.tar away, then: whitenedcse data fetch senteval"


class Finding(NamedTuple):
    """The state of a task or corpus. verdict: ok, differs (from the copy checked), wrong or missing."""

    task: str
    base: Path
    files: str
    expected: int
    rows: int | None
    verdict: str
    why: str


def examined(folder: Path | None = None) -> list[Finding]:
    """The state of every task and corpus under `folder`, or the data roots, as an evaluation finds it."""
    if folder is not None and not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder")
    within = roots() if folder is None else [folder.resolve()]
    home = present("senteval", within)
    homes = [home] if home else candidate_paths(SENTEVAL, within)  # an incomplete one is found task by task
    findings = []
    for name, task in STS.items():
        parts = task.subsets.split()
        names = [f"{task.folder}/{file.format(part)}" for part in parts for file in (task.text, task.gold)]
        base = _base(homes, task.folder)
        findings.append(_finding(name, base, names, sum(PAIRS[name]), partial(_pairs, name, base)))
    for name, labelled in TRANSFER.items():
        names = [part.file or RTE for part in labelled.parts]
        base = _base(within if name == "RTE" else homes, names[0].partition("/")[0])
        rows = sum(part.rows for part in labelled.parts)
        findings.append(_finding(name, base, names, rows, partial(_labelled, name, base)))
    for name, rows in ROWS.items():
        path = present(name, within) or within[0] / CORPORA[name].candidates[0]
        names = [str(Path(path.name, part)) for part in files_of(name)]
        read = partial(_text, path, CORPORA[name].columns, rows)
        findings.append(_finding(name, path.parent, names, rows, read))
    return findings


def _base(homes: Sequence[Path], folder: str) -> Path:
    return next((home for home in homes if (home / folder).is_dir()), homes[0])


def _finding(task: str, base: Path, names: Sequence[str], expected: int, read: Read) -> Finding:
    """The state of the files `names` in `base`, which are read only if all of them exist."""
    names = list(dict.fromkeys(names))
    short = Path(names[0]).name if len(names) == 1 else f"{Path(names[0]).parent.name} ({len(names)})"
    unread = Finding(task, base, short, expected, None, "wrong", "")
    absent = [name for name in names if not (base / name).is_file()]
    if absent:
        more = f" and {len(absent) - 3} more" if len(absent) > 3 else ""
        what = f"no {', '.join(absent[:3])}{more} in {base}; {_remedy(task, base)}"
        return unread._replace(verdict="missing", why=what)
    try:
        rows, wrong = read()
    except (ValueError, OSError) as error:
        return unread._replace(why=" ".join(str(error).split()))
    known = json.loads((files("whitenedcse.data") / "checksums.json").read_text())
    other = [name for name in names if known.get(name, "") not in ("", sha256(base / name))]
    differs = [f"{name} differs from the copy that was checked" for name in other]
    verdict = "wrong" if wrong else "differs" if differs else "ok"
    return Finding(task, base, short, expected, rows, verdict, "; ".join(wrong or differs))


def _remedy(task: str, base: Path) -> str:
    if task == "RTE" or (task in CORPORA and not CORPORA[task].hub):
        return "it cannot be downloaded: put it there"
    if task not in CORPORA and present("senteval", [base]):  # a fetch would find it and do nothing
        return AGAIN
    return f"to get it: whitenedcse data fetch {task if task in CORPORA else 'senteval'}"


def _pairs(name: str, home: Path) -> tuple[int, list[str]]:
    """The scored pairs of one of tasks.STS; scores must lie from 0 to 5, those of SICK from 1 to 5."""
    low, high = (1 if name.startswith("SICK") else 0), 5
    subsets, wrong = benchmark_pairs(name, home), []
    for subset, expected in zip(subsets, PAIRS[name], strict=True):
        if len(subset.gold) != expected:
            wrong.append(f"{subset.name}: {len(subset.gold):,} scored pairs, {expected:,} published")
        for i in np.flatnonzero((subset.gold < low) | (subset.gold > high))[:1]:
            score = f"scored pair {i + 1} has the score {subset.gold[i]:g}"
            wrong.append(f"{subset.name}: {score}, outside {low} to {high}")
    return sum(len(subset.gold) for subset in subsets), wrong


def _labelled(name: str, home: Path) -> tuple[int, list[str]]:
    """The texts of one of tasks.TRANSFER. Raises ValueError unless there are as many as published."""
    return len(benchmark_labels(name, home / RTE if name == "RTE" else home).labels), []


def _text(path: Path, columns: tuple[str, ...], expected: int) -> tuple[int, list[str]]:
    _, counts = corpus.read(corpus.Corpus(str(path), columns))
    wrong = [f"{counts.total:,} rows, {expected:,} published"] if counts.total != expected else []
    return counts.total, wrong


def lines(findings: Iterable[Finding]) -> list[list[str]]:
    """The cells of a table with the columns COLUMNS, a row for each finding; `remarks` has the reasons."""
    return [
        [f.task, f.files, "-" if f.rows is None else f"{f.rows:,}", f"{f.expected:,}", f.verdict]
        for f in findings
    ]


def remarks(findings: Sequence[Finding]) -> list[str]:
    """A line for every finding that is not ok, one with the folders searched, and one with the counts."""
    looked = ", ".join(dict.fromkeys(str(f.base) for f in findings))
    verdicts = [f.verdict for f in findings]
    count = ", ".join(f"{verdicts.count(word)} {word}" for word in ("ok", "differs", "wrong", "missing"))
    return [*(f"{f.task}: {f.verdict}: {f.why}" for f in findings if f.why), f"searched: {looked}", count]

"""The tables of the laboratory, from runs.tar.xz beside this file; results/tables.py writes them.

An answer is a paired difference over the seeds that both systems have, for each encoder: of the average of
seven STS tests, or for "classification" of seven transfer tasks. Within a question p is corrected by Holm for
its comparisons on both encoders. Beside a difference with p >= 0.05 stands what it is shown to be smaller
than. A comparison with fewer than two common seeds has no answer yet.
"""

from __future__ import annotations

import json
import re
import tarfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, TypeVar

import numpy as np
from scipy.stats import rankdata, spearmanr

from results.markdown import table
from results.paired import apart, bound, compared, paired_by_seed
from results.study.contrasts import AFTER, AS_IS, score
from whitenedcse.evaluation.statistics import ALPHA, Comparison, holm
from whitenedcse.report.compare import spread

HERE = Path(__file__).parent
ENCODERS = {"lab_pretrained": "from scratch", "lab_minilm": "minilm-mlm"}
UNTOUCHED = {"lab_pretrained": "untouched-pretrained.json", "lab_minilm": "untouched-minilm.json"}
DRAWS = 10_000
Value = TypeVar("Value")


class Arm(NamedTuple):
    """A system, and the row of scores.json that is taken of it."""

    system: str
    row: str = AS_IS

    def __str__(self) -> str:
        return f"`{self.system}`" + (" whitened" if self.row == AFTER else "")


SIMCSE, WHITENEDCSE = "dropout", "dropout_whitened"  # the paper's two systems; `simcse` here has crops
QUESTIONS = {
    "paper": [(Arm(WHITENEDCSE), Arm(SIMCSE)), (Arm(WHITENEDCSE), Arm(SIMCSE, AFTER))],
    "shuffle": [(Arm("whitenedcse"), Arm("group"))]
    + [(Arm(f"sgw_{width}"), Arm(f"group_{width}")) for width in (6, 24)],
    "statistics": [(Arm("official_slice"), Arm("whitenedcse")), (Arm("official"), Arm("sgw_6"))],
    "during": [(Arm("sgw"), Arm("simcse", AFTER)), (Arm("whitenedcse"), Arm("multi_positive", AFTER))],
    "soft": [(Arm(name), Arm("sgw")) for name in ("covariance", "vicreg", "sigreg")],
    "kinds": [(Arm("iterative"), Arm("whitenedcse"))],
    "views": [(Arm("simcse"), Arm(SIMCSE)), (Arm("whitenedcse"), Arm(WHITENEDCSE))],
    "halves": [(Arm("sgw"), Arm("simcse")), (Arm("whitenedcse"), Arm("multi_positive"))],
}
TRANSFER = ("MR", "CR", "SUBJ", "MPQA", "SST2", "TREC", "MRPC")
CLASSIFIED = ("simcse", "multi_positive", "sgw", "whitenedcse", "official")
CLASSIFICATION = QUESTIONS["halves"] + [(Arm(name, AFTER), Arm(name)) for name in CLASSIFIED]
EVERY = QUESTIONS | {"classification": CLASSIFICATION}


@cache
def runs(folder: str = "lab") -> dict[tuple[str, str, int], dict[str, Any]]:
    """scores.json by experiment, system and seed: of runs, or ("transfer") of their transfer tasks."""
    with tarfile.open(HERE / "runs.tar.xz") as tar:
        members = [member for member in tar if re.fullmatch(rf"{folder}/\d+/scores\.json", member.name)]
        members.sort(key=lambda member: int(member.name.split("/")[1]))  # as they were begun
        files = [tar.extractfile(member) for member in members]
        found = [json.load(file) for file in files if file]
    return {(scores["experiment"], scores["system"], scores["seed"]): scores for scores in found}


@cache
def untouched(encoder: str) -> dict[str, Any]:
    """scores.json of an encoder without any training, whitened as the runs are, on 2,048 sentences."""
    return dict(json.loads((Path(__file__).parent / UNTOUCHED[encoder]).read_text()))


def by_seed(
    encoder: str, system: str, value: Callable[[dict[str, Any]], Value], folder: str = "lab"
) -> dict[int, Value]:
    """A value of the runs of a system on an encoder, by seed."""
    every = runs(folder).items()
    return {s: value(scores) for (e, name, s), scores in every if (e, name) == (encoder, system)}


def averages(encoder: str, arm: Arm) -> dict[int, float]:
    """The average of the seven tests by seed."""
    return by_seed(encoder, arm.system, lambda scores: score(scores, arm.row))


def accuracies(encoder: str, arm: Arm, tasks: Sequence[str] = TRANSFER) -> dict[int, float]:
    """The average accuracy over transfer tasks by seed."""

    def average(scores: dict[str, Any]) -> float:
        (row,) = (each["transfer"]["tasks"] for each in scores["rows"] if each["name"] == arm.row)
        return fmean(row[task]["accuracy"] for task in tasks)

    return by_seed(encoder, arm.system, average, "transfer")


def systems(encoder: str) -> list[str]:
    """The systems with a run on an encoder, in the order of the runs."""
    return list(dict.fromkeys(system for e, system, _ in runs() if e == encoder))


def asked(name: str) -> dict[tuple[int, str], tuple[Comparison, float]]:
    """Differences and corrected p of a question by number of comparison and encoder, of those with runs."""
    measure = measured(name)
    found = {
        (i, encoder): d
        for i, pair in enumerate(EVERY[name])
        for encoder in ENCODERS
        if (d := paired_by_seed(*(measure(encoder, arm) for arm in pair)))
    }
    corrected = holm([d.p if d.p is not None else 1.0 for d in found.values()])
    return {key: (d, p) for (key, d), p in zip(found.items(), corrected, strict=True)}


def measured(name: str) -> Callable[[str, Arm], dict[int, float]]:
    """What the comparisons of a question are of: averages of STS tests, or of transfer tasks."""
    return averages if name in QUESTIONS else accuracies


def cell(answer: tuple[Comparison, float] | None, least: float = 0.0) -> str:
    """A difference, its interval and its corrected p as text; n.s. is p >= ALPHA; least: `bound` of it."""
    if answer is None:
        return "no runs yet"
    d, p = answer
    unsure = "" if p < ALPHA else f", n.s., below {least:.2f}"
    return f"{d.difference:+z.2f} ({d.low:+z.2f} .. {d.high:+z.2f}, p {p:.2g}{unsure})"


def cells(name: str, i: int) -> list[str]:
    """The answer to comparison i of a question on each encoder, as text."""
    answers, measure = asked(name), measured(name)
    return [
        cell(answers.get((i, encoder)), bound(apart(*(measure(encoder, arm) for arm in EVERY[name][i]))))
        if (i, encoder) in answers
        else cell(None)
        for encoder in ENCODERS
    ]


def question(name: str) -> Callable[[], str]:
    """A function that makes the table of a question, for results/tables.py."""

    def answered() -> str:
        lines = [[f"{one} minus {other}", *cells(name, i)] for i, (one, other) in enumerate(EVERY[name])]
        return table(["", *ENCODERS.values()], lines)

    answered.__name__ = name
    return answered


def where() -> str:
    """The differences of "classification" by task, of the comparisons with runs."""
    lines = []
    for encoder, name in ENCODERS.items():
        for one, other in CLASSIFICATION:
            found = [
                paired_by_seed(*(accuracies(encoder, arm, [task]) for arm in (one, other)))
                for task in TRANSFER
            ]
            means = [f"{d.difference:+z.2f}" for d in found if d]
            lines += [[name, f"{one} minus {other}", *means]] if means else []
    return table(["encoder", "", *TRANSFER], lines)


def pooled() -> str:
    """The shuffle over the three widths and both encoders together."""
    means = []
    for encoder in ENCODERS:
        every = [apart(*(averages(encoder, arm) for arm in pair)) for pair in QUESTIONS["shuffle"]]
        means += [fmean(widths) for widths in zip(*every, strict=True)]
    d = compared(means)
    said = cell((d, 1.0 if d.p is None else d.p), bound(means))
    return table(["", "the mean of the three widths"], [[f"both encoders, {len(means)} pairs", said]])


def all_systems() -> str:
    """The table of all systems on both encoders."""
    lines = []
    for encoder, name in ENCODERS.items():
        cells = [f"{score(untouched(encoder), row):.2f}" for row in (AS_IS, AFTER)]
        lines.append([name, "untouched encoder", "", *cells, "", "", "", ""])
        for system in systems(encoder):
            cells = [spread(averages(encoder, Arm(system, row))) for row in (AS_IS, AFTER)]
            cells.append(spread(by_seed(encoder, system, lambda scores: scores["dev"]["best"])))
            for measure, digits in (("alignment", 3), ("uniformity", 2), ("effective_rank", 0)):
                best = by_seed(encoder, system, lambda s, m=measure: s["dev"]["values_best"][f"dev/{m}"])
                cells.append(f"{fmean(best.values()):.{digits}f}")
            n = str(len(averages(encoder, Arm(system))))
            lines.append([name, f"`{system}`", n, *cells])
    head = ["encoder", "system", "seeds", "average of seven tests", AFTER, "dev"]
    return table([*head, "alignment", "uniformity", "effective rank"], lines)


def interval(x: Sequence[float], y: Sequence[float]) -> tuple[float, float, float]:
    """Spearman's correlation of paired values with its 95 % percentile bootstrap interval over the pairs."""
    pairs, random = np.array([x, y]), np.random.default_rng(0)
    ranks = rankdata(pairs[:, random.integers(0, len(x), (DRAWS, len(x)))], axis=2)
    ranks -= ranks.mean(axis=2, keepdims=True)
    products = np.einsum("adn,bdn->abd", ranks, ranks)
    with np.errstate(invalid="ignore"):  # a draw of one pair alone has no correlation
        every = products[0, 1] / np.sqrt(products[0, 0] * products[1, 1])
    low, high = np.nanquantile(every, [0.025, 0.975])
    return float(spearmanr(*pairs).statistic), float(low), float(high)


def of_systems(encoder: str, value: Callable[[dict[str, Any]], float]) -> dict[str, float]:
    """The mean of a value over seeds, by system."""
    return {system: fmean(by_seed(encoder, system, value).values()) for system in systems(encoder)}


def correlations() -> str:
    """Over systems: of the first axis's share with what whitening afterwards gives; of the two encoders."""
    top = {e: of_systems(e, lambda s: s["dev"]["values_best"]["dev/variance_top1"]) for e in ENCODERS}
    gain = {e: of_systems(e, lambda s: score(s, AFTER) - score(s, AS_IS)) for e in ENCODERS}
    groups = {"both encoders": list(ENCODERS)} | {name: [encoder] for encoder, name in ENCODERS.items()}
    pairs = {
        f"first axis's share and gain of whitening afterwards, {name}": [
            [value for encoder in encoders for value in of[encoder].values()] for of in (top, gain)
        ]
        for name, encoders in groups.items()
    }
    one, other = (of_systems(encoder, lambda s: score(s, AS_IS)) for encoder in ENCODERS)
    both = [name for name in one if name in other and name != "simcse"]
    pairs["scores from scratch and on minilm-mlm"] = [[each[name] for name in both] for each in (one, other)]
    lines = []
    for name, (x, y) in pairs.items():
        r, low, high = interval(x, y)
        lines.append([name, str(len(x)), f"{r:+.2f} ({low:+.2f} .. {high:+.2f})"])
    return table(["", "systems", "Spearman's correlation"], lines)

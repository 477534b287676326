"""What the runs of the study say: tables of scores, paired differences, and their share by test.

Everything is computed from runs.tar.xz, untouched.json and ../speed/systems.json beside this file.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from results.markdown import table
from results.paired import paired_by_seed
from whitenedcse.evaluation.statistics import Comparison, holm
from whitenedcse.report.compare import spread
from whitenedcse.report.published import STS as TASKS
from whitenedcse.report.published import tables

HERE = Path(__file__).parent
SYSTEMS = {
    "simcse": "v = 2, no whitening",
    "multi_positive": "v = 3, no whitening",
    "sgw": "v = 2, shuffled group whitening",
    "whitenedcse": "v = 3, shuffled group whitening",
    "group": "v = 3, group whitening without the shuffle",
    "official": "v = 3, statistics of thirds of the batch, groups of 6",
    "one_pass": "v = 3, one encoding, whitened 3 times",
    "gradient_full": "v = 3, gradient through the whitening matrix",
}
OTHERS = [task for task in TASKS if task != "SICK-R"]
AS_IS, TARGET, AFTER = "as it is", "whitened (target)", "whitened (training)"
PLAIN, WHITE = {2: "simcse", 3: "multi_positive"}, {2: "sgw", 3: "whitenedcse"}  # by v


class Arm(NamedTuple):
    """A system, and how the vectors of its runs are used: the name of a row of scores.json."""

    system: str
    row: str = AS_IS


@cache
def runs() -> dict[tuple[str, int], dict[str, Any]]:
    """scores.json of each run by system and seed."""
    with tarfile.open(HERE / "runs.tar.xz") as tar:
        files = [tar.extractfile(member) for member in tar if member.name.endswith("/scores.json")]
        found = [json.load(file) for file in files if file]
    return {(scores["system"], scores["seed"]): scores for scores in found}


@cache
def untouched() -> dict[str, Any]:
    """scores.json of the encoder before training."""
    return json.loads((HERE / "untouched.json").read_text())


def of(system: str) -> dict[int, dict[str, Any]]:
    """scores.json of the runs of a system by seed."""
    return {seed: scores for (name, seed), scores in runs().items() if name == system}


def score(scores: dict[str, Any], row: str, tasks: Sequence[str] = TASKS) -> float:
    """The average of a row over tasks, all pairs of a test together, x 100."""
    sts = next(each["sts"] for each in scores["rows"] if each["name"] == row)
    return fmean(sts["tasks"][task]["all"] for task in tasks)


def tests(arm: Arm, tasks: Sequence[str] = TASKS) -> dict[int, float]:
    """The average over tasks by seed."""
    return {seed: score(scores, arm.row, tasks) for seed, scores in of(arm.system).items()}


def dev(system: str, name: str) -> dict[int, float]:
    """A value of scores.json's "dev" by seed: best, last, or one of the best checkpoint, as alignment."""
    every = {seed: scores["dev"] for seed, scores in of(system).items()}
    return {
        seed: found[name] if name in found else found["values_best"][f"dev/{name}"]
        for seed, found in every.items()
    }


def contrast(one: Arm, other: Arm, tasks: Sequence[str] = TASKS) -> Comparison:
    """The difference of two arms on the average over tasks, paired by seed; its p is not corrected."""
    difference = paired_by_seed(tests(one, tasks), tests(other, tasks))
    assert difference, f"{one} and {other} have no seeds in common"
    return difference


def share(one: Arm, other: Arm, task: str) -> float:
    """The part of the difference of the average over seven tests that one test makes."""
    return contrast(one, other, [task]).difference / contrast(one, other).difference / len(TASKS)


def during(v: int) -> tuple[Arm, Arm]:
    """Whitening while training against none, at v views."""
    return Arm(WHITE[v]), Arm(PLAIN[v])


def after(v: int) -> tuple[Arm, Arm]:
    """Whitening while training against whitening afterwards, at v views."""
    return Arm(WHITE[v]), Arm(PLAIN[v], AFTER)


def whitened(system: str, row: str = AFTER) -> tuple[Arm, Arm]:
    """A system whitened afterwards against the same as it is."""
    return Arm(system, row), Arm(system)


WHOLE = (Arm("whitenedcse"), Arm("simcse"))


def said(d: Comparison) -> str:
    """A difference with its interval and p as text; n.s., not significant, where the interval has zero."""
    end = "" if shown(d) else ", n.s."
    return f"{d.difference:+z.2f} ({d.low:+z.2f} .. {d.high:+z.2f}, p {d.p:.2g}{end})"


def shown(d: Comparison) -> bool:
    """Whether the interval of a difference excludes zero."""
    return d.low > 0 or d.high < 0


def before() -> float:
    """The dev score before training, the same in each run."""
    (dev,) = {scores["dev"]["before"] for scores in runs().values()}
    return dev


@cache
def steps() -> dict[str, float]:
    """The time of a step of each system over that of simcse."""
    (times,) = json.loads((HERE.parent / "speed" / "systems.json").read_text())["tables"]
    return {name: 1 / row["ratio"][1] if row["ratio"] else 1.0 for name, row in times["variants"].items()}


def paper(key: str, one: int, other: int) -> str:
    """The difference of two rows of a table of the WhitenedCSE paper, one run each."""
    values = [row["values"][-1] for row in tables()[f"WhitenedCSE/{key}"]["rows"]]
    return f"{values[one] - values[other]:+.2f}"


def parts() -> str:
    """The table of what each part of the method adds, on the tests and on STS-B dev, beside the paper."""
    pairs = {
        ("sgw", "simcse"): paper("T6", 1, 0),
        ("multi_positive", "simcse"): paper("T6", 2, 0),
        ("whitenedcse", "simcse"): paper("T6", 4, 0),
        ("whitenedcse", "sgw"): paper("T6", 4, 1),
        ("whitenedcse", "group"): paper("T3", 4, 3),
        ("gradient_full", "whitenedcse"): "",
        ("one_pass", "simcse"): "",
        ("official", "simcse"): "",
        ("official", "whitenedcse"): "",
    }
    lines = []
    for (one, other), published in pairs.items():
        on_dev = paired_by_seed(dev(one, "best"), dev(other, "best"))
        assert on_dev
        cells = [said(contrast(Arm(one), Arm(other))), said(on_dev), published]
        lines.append([f"`{one}` minus `{other}`", *cells])
    return table(["", "seven tests", "STS-B dev", "the paper (BERT-base, one run)"], lines)


def afterwards() -> str:
    """The table of what whitening afterwards changes, by what it is fitted to."""
    lines = [
        [f"`{name}`", *(said(contrast(*whitened(name, row))) for row in (AFTER, TARGET))] for name in SYSTEMS
    ]
    return table(["whitened afterwards minus as it is", "on training sentences", "on the test's own"], lines)


def beside() -> str:
    """The table of README.md: no whitening, whitening afterwards and while training, for each v."""
    lines = {
        "no whitening": [spread(tests(Arm(PLAIN[v]))) for v in PLAIN],
        "whitening afterwards": [spread(tests(Arm(PLAIN[v], AFTER))) for v in PLAIN],
        "whitening while training": [spread(tests(Arm(WHITE[v]))) for v in PLAIN],
        "while training minus no whitening": [said(contrast(*during(v))) for v in PLAIN],
        "while training minus whitening afterwards": [said(contrast(*after(v))) for v in PLAIN],
        "time of a step over SimCSE's, no whitening, while training": [
            f"{steps()[PLAIN[v]]:.2f}, {steps()[WHITE[v]]:.2f}" for v in PLAIN
        ],
    }
    return table(["", "v = 2", "v = 3"], [[name, *cells] for name, cells in lines.items()])


def systems() -> str:
    """The table of all systems, each against simcse."""
    tested = {name: contrast(Arm(name), Arm("simcse")) for name in list(SYSTEMS)[1:]}
    corrected = dict(zip(tested, holm([d.p or 0 for d in tested.values()]), strict=True))
    first, measures = untouched(), ("alignment", "uniformity")
    lines = [["untouched encoder", *(f"{score(first, row):.2f}" for row in (AS_IS, TARGET, AFTER))]]
    lines[0] += [f"{before():.2f}", *[""] * 6]
    for name, what in SYSTEMS.items():
        cells = [spread(tests(Arm(name, row))) for row in (AS_IS, TARGET, AFTER)] + [
            spread(dev(name, "best"))
        ]
        d = tested.get(name)
        cells += (
            [f"{d.difference:+.2f}", f"{d.low:+.2f} .. {d.high:+.2f}", f"{corrected[name]:.2g}"]
            if d
            else [""] * 3
        )
        cells += [
            f"{fmean(dev(name, m).values()):.{digits}f}" for m, digits in zip(measures, (3, 2), strict=True)
        ]
        lines.append([f"`{name}`: {what}", *cells, f"{steps()[name]:.2f}"])
    head = [
        "",
        "average of seven tests",
        TARGET,
        AFTER,
        "dev best",
        "difference from SimCSE",
        "95 % interval",
    ]
    return table([*head, "p (Holm)", *measures, "step, times SimCSE's"], lines)


def by_task() -> str:
    """The table of mean scores by test."""
    arms = [Arm(name) for name in SYSTEMS] + [Arm(name, AFTER) for name in PLAIN.values()]
    lines = [["untouched encoder", *(f"{score(untouched(), AS_IS, [task]):.2f}" for task in TASKS)]]
    for arm in arms:
        name = f"`{arm.system}`" + ("" if arm.row == AS_IS else f", {arm.row}")
        lines.append([name, *(spread(tests(arm, [task])) for task in TASKS)])
    return table(["", *TASKS], lines)


def by_share() -> str:
    """The table of differences by test, with the share of each in that of the average."""
    columns = {
        "v = 2: while training minus no whitening": during(2),
        "v = 3: while training minus no whitening": during(3),
        "v = 2: while training minus whitening afterwards": after(2),
        "v = 3: while training minus whitening afterwards": after(3),
        "WhitenedCSE (v = 3) minus SimCSE (v = 2)": WHOLE,
    }
    lines = []
    groups = {**{task: [task] for task in TASKS}, "average": TASKS, "average without SICK-R": OTHERS}
    for name, tasks in groups.items():
        cells = []
        for pair in columns.values():
            d = contrast(*pair, tasks)
            part = f", {100 * share(*pair, name):.0f} %" if name in TASKS else ""
            cells.append(f"{d.difference:+.2f} ({d.low:+.2f} .. {d.high:+.2f}){part}")
        lines.append([name, *cells])
    return table(["", *columns], lines)

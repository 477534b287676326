"""The paper's comparison, here: python -m results.claim.table draws comparison.png and prints the tables.

WhitenedCSE (v = 3) minus SimCSE (v = 2), both with dropout as views, in every set of runs that holds it: of
results/study, of results/lab, and of runs.csv beside this file, as far as that study has come.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from statistics import fmean
from typing import NamedTuple

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure

from results.claim import drive
from results.claim.collect import HERE, Row, read
from results.claim.collect import TASKS as TESTS
from results.claim.drive import FRESH, PILOT, RATES
from results.claim.soups import SIZE, SYSTEMS, WAYS
from results.lab import answers as lab
from results.markdown import table
from results.paired import apart, bound, compared
from results.study import contrasts as study
from whitenedcse.evaluation.statistics import ALPHA, holm
from whitenedcse.report.charts import COLOURS, STYLE
from whitenedcse.report.compare import spread
from whitenedcse.report.published import tables

Scores = dict[int, list[float]]  # the seven tests of TESTS by seed
Cell = tuple[str, ...]  # a system, its views and, if not its own, a rate
PAPER_STEPS = "BERT-base, first token, 1,000,000 sentences, 15,625 steps"
BEDS = {
    "minilm": ("minilm-mlm, mean", "5,000 sentences, 78 steps"),
    "mlm": ("mlm_minilm, mean", "5,000 sentences, 78 steps"),
    "scratch": ("from scratch, mean", "10,000 sentences, 156 steps"),
    "cls": ("minilm-mlm, first token", "10,000 sentences, 156 steps"),
}
DROPOUT, CROPS = "dropout", "crops"  # what makes the views of a sentence differ
LAB = "3e-4 for both, chosen with crops"
MARGIN = 3.0  # points, the gate of PLAN.md
TOGETHER = {"raw": 2, "best": 2}  # encoders whose p PLAN.md corrects together
PLANNED = {"minilm": 20, "mlm": 20, "scratch": 20, "cls": 8}  # seeds of the study


class Compared(NamedTuple):
    """A set of runs of the two systems: on what, how trained, how the rate was chosen, and the scores.

    untouched: the average of the encoder before training, read as the trained ones are. family: of the
    comparisons whose p are corrected together. planned: seeds, 0 for runs that were there before.
    """

    encoder: str
    training: str
    rate: str
    untouched: float
    simcse: Scores
    whitened: Scores
    family: str = "before"
    planned: int = 0

    @property
    def averages(self) -> tuple[dict[int, float], dict[int, float]]:
        """The averages of SimCSE and of WhitenedCSE over the seven tests, by seed."""
        one, other = ({s: fmean(x) for s, x in scores.items()} for scores in (self.simcse, self.whitened))
        return one, other

    @property
    def differences(self) -> list[float]:
        """WhitenedCSE minus SimCSE by seed."""
        return apart(*reversed(self.averages))


@cache
def rows() -> list[Row]:
    """The rows of runs.csv."""
    return read(HERE / "runs.csv")


def paper(system: str) -> list[float]:
    """The seven tests and the average of a row of the paper's Table 1."""
    (row,) = (row for row in tables()["WhitenedCSE/T1"]["rows"] if row["label"] == system)
    return list(row["values"])


def of_study() -> Compared:
    """That of results/study."""

    def every(system: str) -> Scores:
        return {
            seed: [study.score(run, study.AS_IS, [test]) for test in TESTS]
            for seed, run in study.of(system).items()
        }

    return Compared(
        "minilm-mlm, first token",
        "20,000 sentences, 312 steps",
        "5e-5, not tuned",
        study.score(study.untouched(), study.AS_IS),
        every("simcse"),
        every("whitenedcse"),
    )


def of_lab(encoder: str) -> Compared:
    """That of results/lab on an encoder."""

    def every(system: str) -> Scores:
        def by_test(run: Row) -> list[float]:
            return [study.score(run, study.AS_IS, [test]) for test in TESTS]

        return lab.by_seed(encoder, system, by_test)

    bed = "minilm" if encoder == "lab_minilm" else "scratch"
    before = study.score(lab.untouched(encoder), study.AS_IS)
    return Compared(*BEDS[bed], LAB, before, every(lab.SIMCSE), every(lab.WHITENEDCSE))


def rate(bed: str, system: str, views: str = DROPOUT) -> str | None:
    """The rate that the pilot of a system chose; None before it is done."""
    cell = drive.Cell(bed, system[:-1], int(system[-1]), views)
    return drive.chosen(cell, {row["run"]: float(row["dev"]) for row in rows() if row["seed"]})


def of_claim(bed: str, readout: str, at: str | None = None) -> Compared | None:
    """That of runs.csv with a readout, "raw" or "best"; None before two seeds have both systems.

    at: the rate of both, where it is not the one that the pilot of each chose.
    """

    def scores(row: Row) -> list[float]:
        return [float(row[f"{readout} {test}"]) for test in TESTS]

    systems = (of_system(bed, system, at=at) for system in ("none2", "sgw3"))
    simcse, whitened = ({seed: scores(row) for seed, row in every.items()} for every in systems)
    if len(common := simcse.keys() & whitened.keys()) < 2:
        return None
    before = next(row for row in rows() if row["run"] == f"untouched-{bed}")
    encoder, training = BEDS[bed]
    own = f"{rate(bed, 'none2')} and {rate(bed, 'sgw3')}"
    how = "not tuned" if len(RATES[bed]) == 1 else "each system's best on STS-B dev"
    how = f"{at} for both, asked afterwards" if at else f"{own}, {how}"
    encoder += f", both at {at}" if at else ""
    return Compared(
        encoder + (", at the best readout" if readout == "best" else ""),
        training,
        how,
        fmean(scores(before)),
        *({seed: every[seed] for seed in sorted(common)} for every in (simcse, whitened)),
        family=readout if bed in ("minilm", "scratch") else f"{bed} {at}",
        planned=PLANNED[bed],
    )


def of_system(bed: str, system: str, views: str = DROPOUT, at: str | None = None) -> dict[int, Row]:
    """The runs of a system at its own rate or another, by seed: not of the pilot, and scored on the tests."""
    cell = bed, system, views, at or rate(bed, system, views)
    named = ("bed", "system", "views", "rate")
    mine = [row for row in rows() if tuple(row[name] for name in named) == cell and row["best"]]
    return {seed: row for row in mine if (seed := int(row["seed"])) not in PILOT}


def everything() -> list[Compared]:
    """Every comparison that runs hold."""
    beds = [("minilm", None), ("mlm", None), ("mlm", SHARED), ("scratch", None), ("cls", None)]
    claim = [of_claim(bed, readout, at) for bed, at in beds for readout in ("raw", "best")]
    committed = [of_study(), *(of_lab(encoder) for encoder in reversed(lab.ENCODERS))]
    return committed + [each for each in claim if each]


def corrected(every: list[Compared]) -> list[float]:
    """The p of each comparison, by Holm for those of its family; of runs still to be made p counts as 1."""
    found = [1.0 if (p := compared(each.differences).p) is None else p for each in every]
    for family in {each.family for each in every}:
        at = [i for i, each in enumerate(every) if each.family == family]
        to_come = [1.0] * (TOGETHER.get(family, 0) - len(at))
        for i, p in zip(at, holm([*(found[i] for i in at), *to_come]), strict=False):
            found[i] = p
    return found


def difference(values: list[float], p: float | None = None) -> str:
    """A mean difference with its interval and p; its `bound` where p >= 0.05, or the interval holds zero."""
    d = compared(values)
    said = f"{d.difference:+z.2f} ({d.low:+z.2f} .. {d.high:+z.2f}"
    said += "" if p is None else f", p {p:.2g}"
    if p is None:
        return f"{said})" if d.low > 0 or d.high < 0 else f"{said}, below {bound(values):.2f})"
    return f"{said})" if p < ALPHA else f"{said}, n.s., below {bound(values):.2f})"


HEAD = ["encoder, training", "untouched", "SimCSE", "WhitenedCSE", "difference", "seeds", "learning rate"]


def comparison() -> str:
    """The paper's comparison, here: a table with the paper's own row first."""
    return table(HEAD, of_comparison())


def of_comparison() -> list[list[str]]:
    """Its lines."""
    simcse, whitened = (paper(f"{system}-BERT base")[-1] for system in ("SimCSE", "WhitenedCSE"))
    before = paper("BERT base, first-last average")[-1]
    scores = [f"{before:.2f} (first-last average)", f"{simcse:.2f}", f"{whitened:.2f}"]
    lines = [[f"the paper: {PAPER_STEPS}", *scores, f"{whitened - simcse:+.2f}", "1", "3e-5"]]
    every = everything()
    for each, p in zip(every, corrected(every), strict=True):
        one, other = each.averages
        cells = [f"{each.untouched:.2f}", spread(one), spread(other), difference(each.differences, p)]
        seeds = f"{len(each.differences)} of {each.planned}" if each.planned else str(len(each.differences))
        lines.append([f"{each.encoder}, {each.training}", *cells, seeds, each.rate])
    return lines


def by_test() -> str:
    """WhitenedCSE minus SimCSE by test, the paper's own first, and how alike the seven are to the paper's."""
    simcse, whitened = (paper(f"{system}-BERT base") for system in ("SimCSE", "WhitenedCSE"))
    gains = np.subtract(whitened, simcse)
    lines = [[f"the paper: {PAPER_STEPS}", *(f"{gain:+.2f}" for gain in gains), ""]]
    for each in everything():
        found = [
            compared(
                apart(*({s: x[i] for s, x in scores.items()} for scores in (each.whitened, each.simcse)))
            )
            for i in range(len(TESTS))
        ]
        cells = [
            f"{d.difference:+z.2f} ± {(d.high - d.low) / 2:.2f}" for d in [*found, compared(each.differences)]
        ]
        alike = np.corrcoef(gains[:-1], [d.difference for d in found])[0, 1]
        lines.append([f"{each.encoder}, {each.training}", *cells, f"{alike:+.2f}"])
    return table(["", *TESTS, "average", "correlation with the paper's"], lines)


def added(each: Compared, i: int) -> str:
    """What training by SimCSE (0) or WhitenedCSE (1) adds to the untouched encoder, read in the same way."""
    return difference([x - each.untouched for x in each.averages[i].values()])


def gained(each: Compared) -> float:
    """How far the better system's mean is above the untouched encoder."""
    return max(fmean(scores.values()) for scores in each.averages) - each.untouched


def share(raw: Compared, best: Compared) -> tuple[float, float, float]:
    """Which part of the raw difference best readouts take away, in per cent, with its 95 % interval.

    By 10,000 draws of the seeds.
    """
    both = np.array([raw.differences, best.differences])
    at = np.random.default_rng(0).integers(both.shape[1], size=(10_000, both.shape[1]))
    means = both[:, at].mean(axis=2)
    low, high = np.quantile(1 - means[1] / means[0], [0.025, 0.975])
    return 100 * (1 - float(both[1].mean() / both[0].mean())), 100 * float(low), 100 * float(high)


def shares() -> str:
    """Hypothesis 2 of PLAN.md: what of the raw difference best readouts take away; what training adds.

    The share is that of a raw gain, where one is shown.
    """
    head = ["encoder", "raw difference minus that at best readouts", "of the raw gain"]
    head += [f"{system} adds, {how}" for system in ("SimCSE", "WhitenedCSE") for how in ("raw", "at best")]
    lines = []
    for bed, (name, _) in BEDS.items():
        raw, best = of_claim(bed, "raw"), of_claim(bed, "best")
        if raw is None or best is None:
            continue
        lost = difference([x - y for x, y in zip(raw.differences, best.differences, strict=True)])
        part = "-"
        if compared(raw.differences).low > 0:
            part = "{:.0f} % ({:.0f} .. {:.0f} %)".format(*share(raw, best))
        lines.append([name, lost, part, *(added(each, i) for i in (0, 1) for each in (raw, best))])
    return table(head, lines)


SHARED = "3e-4"  # the rate of three views without whitening, at which the two others were asked afterwards
SIMCSE, THREE, WHITENED = (("none2", DROPOUT), ("none3", DROPOUT), ("sgw3", DROPOUT))  # at their own rates
SIMCSE_THERE, WHITENED_THERE = (*SIMCSE, SHARED), (*WHITENED, SHARED)
CELLS: list[Cell] = [SIMCSE, SIMCSE_THERE, THREE, WHITENED, WHITENED_THERE, ("none3", CROPS), ("sgw3", CROPS)]
THIRD, WHITENING, WHOLE = "a third view, without whitening", "whitening, with three views", "both"
AT_ONE_RATE = {name: f"{name}, all at {SHARED}" for name in (THIRD, WHITENING, WHOLE)}
CROPPED, INTERACTION = "whitening, with three crops", "the same minus whitening with dropout"
INTERACTION_THERE = f"{INTERACTION}, all at {SHARED}"
PARTS: dict[str, tuple[Cell, Cell]] = {  # the two cells whose difference each is
    THIRD: (THREE, SIMCSE),
    WHITENING: (WHITENED, THREE),
    WHOLE: (WHITENED, SIMCSE),
    AT_ONE_RATE[THIRD]: (THREE, SIMCSE_THERE),
    AT_ONE_RATE[WHITENING]: (WHITENED_THERE, THREE),
    AT_ONE_RATE[WHOLE]: (WHITENED_THERE, SIMCSE_THERE),
    CROPPED: (("sgw3", CROPS), ("none3", CROPS)),
}


def of_parts(bed: str = "mlm") -> dict[str, list[tuple[dict[int, float], float | None]]]:
    """Which part of WhitenedCSE minus SimCSE is the third view's, which whitening's; each at its own rate.

    By name the differences by seed, raw and at best readouts, each with its p. Hypothesis 3 of PLAN.md is of
    whitening with dropout and with crops, whose four p are corrected together, hypothesis 5 their difference.
    """
    ways = ("raw", "best")
    every = {
        name: [minus(averages(bed, one, way), averages(bed, other, way)) for way in ways]
        for name, (one, other) in PARTS.items()
    }
    every[INTERACTION] = list(map(minus, every[CROPPED], every[WHITENING]))
    every[INTERACTION_THERE] = list(map(minus, every[CROPPED], every[AT_ONE_RATE[WHITENING]]))
    p = {name: [compared([*d.values()]).p for d in both] for name, both in every.items()}
    together = holm([x or 1.0 for x in [*p[WHITENING], *p[CROPPED]]])
    p |= {WHITENING: together[:2], CROPPED: together[2:]}
    return {name: [*zip(both, p[name], strict=True)] for name, both in every.items()}


def minus(one: Mapping[int, float], other: Mapping[int, float]) -> dict[int, float]:
    """One minus the other, by the seeds that both have."""
    return {seed: one[seed] - other[seed] for seed in sorted(one.keys() & other.keys())}


def averages(bed: str, cell: Cell, readout: str) -> dict[int, float]:
    """The average of the seven tests with a readout, "raw" or "best", by seed."""
    return {seed: average(row, readout) for seed, row in of_system(bed, *cell).items()}


def average(row: Row, readout: str) -> float:
    """The average of the seven tests of a run with a readout, "raw" or "best"."""
    return fmean(float(row[f"{readout} {test}"]) for test in TESTS)


def cells(bed: str = "mlm") -> str:
    """The averages of the cells of the plan on mlm_minilm, each at its own rate."""
    lines = []
    for cell in CELLS:
        scores = [averages(bed, cell, readout) for readout in ("raw", "best")]
        at = cell[2] if cell[2:] else str(rate(bed, *cell))
        lines.append([NAMES[cell[0]], cell[1], at, *map(spread, scores), str(len(scores[0]))])
    return table(["system", "views", "learning rate", "as trained", "at best readouts", "seeds"], lines)


def parts() -> str:
    """The table of `of_parts` on mlm_minilm."""
    lines = [
        [name, of_paper(name), *(difference([*d.values()], p) for d, p in both), str(len(both[0][0]))]
        for name, both in of_parts().items()
    ]
    return table(["", "the paper (Table 6, one run)", "as trained", "at best readouts", "seeds"], lines)


def of_paper(name: str) -> str:
    """One of PARTS in the paper's Table 6, which has dropout alone."""
    if name not in (THIRD, WHITENING, WHOLE):
        return ""
    one, other = (table6()[cell[0]] for cell in PARTS[name])
    return f"{one - other:+.2f}"


def table6() -> dict[str, float]:
    """The averages of the paper's Table 6 by system."""
    rows = {row["label"].partition(":")[0]: row["values"][0] for row in tables()["WhitenedCSE/T6"]["rows"]}
    labels = {"none2": "SimCSE", "none3": "no whitening, 3 views", "sgw3": "WhitenedCSE"}
    return {system: float(rows[label]) for system, label in labels.items()}


def short() -> str:
    """For README.md: the paper's systems and what their parts are worth, on encoders that others can have."""
    shown = {"mlm_minilm": ("mlm", "raw"), "mlm_minilm at the best readout": ("mlm", "best")}
    shown["from scratch"] = ("scratch", "raw")
    before = [average(row, way) for bed, way in shown.values() for row in rows()
              if row["run"] == f"untouched-{bed}"]  # fmt: skip
    paper6, of_paper = table6(), paper("BERT base, first-last average")[-1]
    lines = [["untouched", *(f"{x:.2f}" for x in (of_paper, *before))]]
    named = {
        "SimCSE: two views": SIMCSE,
        "three views": THREE,
        "WhitenedCSE: three views, whitening": WHITENED,
    }
    for name, cell in named.items():
        values = [spread(averages(bed, there(bed, cell), way)) for bed, way in shown.values()]
        lines.append([name, f"{paper6[cell[0]]:.2f}", *values])
    for name, (one, other) in {"WhitenedCSE minus SimCSE": PARTS[WHOLE], "the third view alone": PARTS[THIRD],
                               "whitening alone": PARTS[WHITENING]}.items():  # fmt: skip
        values = [gain(minus(*(averages(bed, there(bed, cell), way) for cell in (one, other))))
                  for bed, way in shown.values()]  # fmt: skip
        lines.append([name, f"{paper6[one[0]] - paper6[other[0]]:+.2f}", *values])
    planned = {f"{NAMES[cell[0]]} at {rate('mlm', cell[0])}": cell for cell in (SIMCSE, WHITENED)}
    for name, cell in planned.items():
        lines.append([name, "", *(spread(averages("mlm", cell, way)) for way in ("raw", "best")), ""])
    whole = [gain(of_parts()[WHOLE][i][0]) for i in (0, 1)]
    lines.append(["the latter minus the former", "", *whole, ""])
    return table(["", "the paper: BERT-base", *shown], lines)


def there(bed: str, cell: Cell) -> Cell:
    """A cell at the rate that all share on mlm_minilm, and elsewhere at its own."""
    return (*cell, SHARED) if bed == "mlm" else cell


def gain(differences: Mapping[int, float]) -> str:
    """The mean of differences by seed with its interval, n.s. where that holds zero; "-" for no seeds."""
    if not differences:
        return "-"
    d = compared([*differences.values()])
    return f"{d.difference:+z.2f} ({d.low:+z.2f} .. {d.high:+z.2f}{', n.s.' if d.low <= 0 <= d.high else ''})"


def gate() -> str:
    """For each encoder, how far the better system is above the untouched one, both at best readouts."""
    lines = []
    for bed, (name, _) in BEDS.items():
        if (found := of_claim(bed, "best")) is None:
            continue
        row = next(row for row in rows() if row["run"] == f"untouched-{bed}")
        better = f"{found.untouched + gained(found):.2f}"
        verdict = "yes" if gained(found) >= MARGIN else "no"
        lines.append([name, f"{found.untouched:.2f}", row["best"], better, f"{gained(found):+.2f}", verdict])
    head = ["encoder", "untouched at its best readout", "which is", "the better system", "gain"]
    return table([*head, "can carry the question"], lines)


def rates() -> str:
    """STS-B dev by system and rate, of the pilot's runs."""
    lines = []
    found: dict[tuple[str, str, str, str], dict[int, float]] = {}
    for row in rows():
        if row["seed"] and int(row["seed"]) in PILOT:
            key = (row["bed"], row["system"], row["views"], row["rate"])
            found.setdefault(key, {})[int(row["seed"])] = float(row["dev"])
    order = [*dict.fromkeys(key[:3] for key in found)]
    for key in sorted(found, key=lambda key: (order.index(key[:3]), float(key[3]))):
        bed, system, views, at = key
        cells = [spread(found[key]), str(len(found[key]))]
        lines.append([BEDS[bed][0], f"{NAMES[system]}, {views}", at, *cells])
    return table(["encoder", "system, views", "learning rate", "STS-B dev", "seeds"], lines)


NAMES = {
    "none2": "SimCSE (v = 2)",
    "none3": "no whitening, v = 3",
    "sgw3": "WhitenedCSE (v = 3)",
}


def soups() -> str:
    """By system the mean of single runs, what soups of SIZE gain over their runs, and the soup of all."""
    lines = []
    for system in SYSTEMS:
        made = {row["seeds"]: row for row in read(HERE / "soups.csv") if row["system"] == system}
        whole = made.pop(f"{FRESH[0]} to {FRESH[-1]}")
        _, name, _, at = system.split("-", 3)
        for way, said in zip(WAYS, ("as trained", "at best readouts"), strict=True):
            more = {i: float(row[way]) - float(row[f"runs {way}"]) for i, row in enumerate(made.values())}
            single, every = (f"{float(whole[column]):.2f}" for column in (f"runs {way}", way))
            lines.append([f"{NAMES[name]}, {at}", said, single, gain(more), every])
    head = ["system", "read", "single runs", f"a soup of {SIZE} seeds gains", f"the soup of {len(FRESH)}"]
    return table(head, lines)


def picture() -> None:
    """Draw comparison.png: the difference of each set of runs with its 95 % interval, and the paper's."""
    every = everything()
    gain = paper("WhitenedCSE-BERT base")[-1] - paper("SimCSE-BERT base")[-1]
    labels = [f"the paper, one run:\n{PAPER_STEPS}"]
    for each in every:
        seeds = f"{len(each.differences)} seeds{', rate chosen with crops' if each.rate == LAB else ''}"
        labels.append(f"{each.encoder}:\n{each.training}, {seeds}")
    with rc_context(STYLE):
        figure = Figure(figsize=(7.2, 0.5 * len(labels) + 0.8), layout="constrained")
        axis = figure.subplots()
        axis.plot(gain, 0, "D", color="0.4", ms=5)
        for i, each in enumerate(every, start=1):
            d = compared(each.differences)
            error = [[d.difference - d.low], [d.high - d.difference]]
            colour = COLOURS["best" in each.encoder]
            axis.errorbar(d.difference, -i, xerr=error, fmt="o", color=colour, capsize=2, ms=5)
        axis.axvline(0, color="0.6", linewidth=0.8)
        axis.set_yticks(range(0, -len(labels), -1), labels)
        axis.set(xlabel="difference, 95 % interval")
        figure.savefig(HERE / "comparison.png")


def main() -> None:
    """Draw the picture and print the tables."""
    picture()
    for made in (gate, comparison, shares, cells, parts, by_test, soups, rates):
        print(made(), end="\n\n")


if __name__ == "__main__":
    main()

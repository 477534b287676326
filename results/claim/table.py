"""The paper's comparison, here: python -m results.claim.table writes comparison.png and the tables of pages.

WhitenedCSE (v = 3) minus SimCSE (v = 2), both with dropout as views, in every set of runs that holds it: of
results/study, of results/lab, and of runs.csv beside this file, as far as that study has come.
"""

from __future__ import annotations

from functools import cache
from statistics import fmean
from typing import NamedTuple

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure

from results.claim.collect import HERE, Row, read
from results.claim.collect import TASKS as TESTS
from results.claim.drive import PILOT, RATES
from results.lab import answers as lab
from results.markdown import listed, table, text
from results.paired import apart, bound, compared
from results.study import contrasts as study
from whitenedcse.evaluation.statistics import ALPHA, holm
from whitenedcse.report.charts import COLOURS, STYLE
from whitenedcse.report.compare import spread
from whitenedcse.report.published import tables

Scores = dict[int, list[float]]  # the seven tests of TESTS by seed
PAPER_STEPS = "BERT-base, first token, 1,000,000 sentences, 15,625 steps"
BEDS = {
    "minilm": ("minilm-mlm, mean", "5,000 sentences, 78 steps"),
    "mlm": ("mlm_minilm, mean", "5,000 sentences, 78 steps"),
    "scratch": ("from scratch, mean", "10,000 sentences, 156 steps"),
    "cls": ("minilm-mlm, first token", "10,000 sentences, 156 steps"),
}
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
        by_test = [
            lab.by_seed(encoder, system, lambda run, t=test: study.score(run, study.AS_IS, [t]))
            for test in TESTS
        ]
        return {seed: [values[seed] for values in by_test] for seed in by_test[0]}

    bed = "minilm" if encoder == "lab_minilm" else "scratch"
    before = study.score(lab.untouched(encoder), study.AS_IS)
    return Compared(
        *BEDS[bed],
        LAB,
        before,
        every(lab.SIMCSE),
        every(lab.WHITENEDCSE),
    )


def rate(bed: str, system: str) -> str:
    """The rate at which a system was studied: that of its runs with seeds that are not the pilot's."""
    found = {row["rate"] for row in rows() if (row["bed"], row["system"]) == (bed, system) and fresh(row)}
    return listed(sorted(found), "-")


def fresh(row: Row) -> bool:
    """Whether a row is of the study with dropout as views: no pilot, and scored on the tests."""
    return bool(row["best"]) and row["views"] == "dropout" and int(row["seed"]) not in PILOT


def of_claim(bed: str, readout: str) -> Compared | None:
    """That of runs.csv with a readout, "raw" or "best"; None before two seeds have both systems."""

    def scores(row: Row) -> list[float]:
        return [float(row[f"{readout} {test}"]) for test in TESTS]

    simcse, whitened = (
        {seed: scores(row) for seed, row in of_system(bed, system).items()} for system in ("none2", "sgw3")
    )
    if len(common := simcse.keys() & whitened.keys()) < 2:
        return None
    before = next(row for row in rows() if row["run"] == f"untouched-{bed}")
    encoder, training = BEDS[bed]
    own = f"{rate(bed, 'none2')} and {rate(bed, 'sgw3')}"
    how = f"{own}, " + ("not tuned" if len(RATES[bed]) == 1 else "each system's best on STS-B dev")
    return Compared(
        encoder + (", at the best readout" if readout == "best" else ""),
        training,
        how,
        fmean(scores(before)),
        *({seed: every[seed] for seed in sorted(common)} for every in (simcse, whitened)),
        family=readout if bed in ("minilm", "scratch") else bed,
        planned=PLANNED[bed],
    )


def of_system(bed: str, system: str) -> dict[int, Row]:
    """The runs of a system that are of the study, by seed."""
    mine = (row for row in rows() if (row["bed"], row["system"]) == (bed, system) and fresh(row))
    return {int(row["seed"]): row for row in mine}


def everything() -> list[Compared]:
    """Every comparison that runs hold."""
    claim = [of_claim(bed, readout) for bed in BEDS for readout in ("raw", "best")]
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


def short() -> str:
    """For README.md, without rates: the paper, and this study on the encoders that others can have."""
    public = [BEDS[bed][0] for bed in ("mlm", "scratch")]
    lines = [
        line[:-1]
        for line in of_comparison()
        if line[-1] != LAB and line[0].startswith(("the paper", *public))
    ]
    return table(HEAD[:-1], lines)


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
    """WhitenedCSE minus SimCSE by test, the paper's own first."""
    simcse, whitened = (paper(f"{system}-BERT base") for system in ("SimCSE", "WhitenedCSE"))
    gains = [f"{b - a:+.2f}" for a, b in zip(simcse, whitened, strict=True)]
    lines = [[f"the paper: {PAPER_STEPS}", *gains]]
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
        lines.append([f"{each.encoder}, {each.training}", *cells])
    return table(["", *TESTS, "average"], lines)


def alike() -> str:
    """Whether the tests gain here as they do in the paper."""
    simcse, whitened = (paper(f"{system}-BERT base")[:-1] for system in ("SimCSE", "WhitenedCSE"))
    published = np.subtract(whitened, simcse)
    found = {}
    for each in everything():
        scores = (np.mean([*every.values()], axis=0) for every in (each.whitened, each.simcse))
        r = np.corrcoef(published, np.subtract(*scores))[0, 1]
        found[f"{each.encoder}, {each.training}"] = f"{r:+.2f}"
    return text(f"""
The correlation of the seven differences with the paper's is
{listed(f"{r} ({name})" for name, r in found.items())}.
""")


def sentences() -> str:
    """What README.md says below the table; that its words fit the numbers is tested."""
    raw, best = (of_claim("mlm", readout) for readout in ("raw", "best"))
    private, private_best = (of_claim("minilm", readout) for readout in ("raw", "best"))
    weak, weak_best = (of_claim("scratch", readout) for readout in ("raw", "best"))
    assert raw and best and private and private_best and weak and weak_best
    part, low, high = share(private, private_best)
    gain = paper("WhitenedCSE-BERT base")[-1] - paper("SimCSE-BERT base")[-1]
    simcse, whitened = (fmean(scores.values()) - best.untouched for scores in best.averages)
    apart, apart_best, other, below = (fmean(each.differences) for each in (raw, best, private, weak))
    p, p_best = corrected([raw, best])
    gains = p < ALPHA and apart > 0
    found = "WhitenedCSE gains on SimCSE" if gains else "no gain of WhitenedCSE over SimCSE is shown"
    shown = f"p {p_best:.2g}" if p_best < ALPHA else "n.s."
    means = ([fmean(scores.values()) for scores in each.averages] for each in (private, private_best))
    one, two = (after - before for before, after in zip(*means, strict=True))
    third, whitening = of_parts()[THIRD], of_parts()[WHITENING]
    return text(f"""
- **On mlm_minilm** {found}, each at the best of three learning
  rates for it on STS-B dev: {apart:+.2f} points (the paper: {gain:+.2f}). At best readouts it is
  {apart_best:+.2f} ({shown}): SimCSE is {simcse:.2f} and WhitenedCSE {whitened:.2f} above the untouched
  encoder.
- **A third view alone**, three by dropout without whitening, changes SimCSE there by {difference(*third[0])},
  and whitening beside three views by {difference(*whitening[0])}, at best readouts by
  {difference(*whitening[1])} ({len(third[0][0])} seeds; the paper, one run each: {of_paper(THIRD):+.2f} and
  {of_paper(WHITENING):+.2f}).
- **On another encoder**, made alike but not public, it gains {other:.2f} (20 seeds; 3e-4 is best for both).
  At best readouts {part:.0f} % of that ({low:.0f} to {high:.0f} %) is gone: SimCSE's mean changes
  by {one:+.2f}, WhitenedCSE's by {two:+.2f} ([all runs](results/claim/README.md)).
- **From scratch** WhitenedCSE is {-below:.2f} below SimCSE, and neither is above the untouched encoder. With
  crops as views a gain of whitening [is not shown](results/lab/README.md).

By the rule that was fixed before the runs an encoder can carry this question if training adds {MARGIN:.0f}
points at best readouts: mlm_minilm can ({gained(best):+.2f}), the two others cannot
({gained(private_best):+.2f}, {gained(weak_best):+.2f}).
""")


def added(each: Compared) -> str:
    """What training by each of the two systems adds to the untouched encoder, read in the same way."""
    gains = [difference([x - each.untouched for x in scores.values()]) for scores in each.averages]
    return " (SimCSE) and ".join(gains) + " (WhitenedCSE)"


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


def kept(raw: Compared, best: Compared, planned: int) -> str:
    """The `share` of the raw difference that the readout takes, and what that decides.

    PLAN.md, hypothesis 2: confirmed above 1/2 with a difference of the two that is shown; refuted if the
    interval of the share lies below 1/2. Nothing is decided before the planned number of seeds is there, nor
    where no raw gain is shown.
    """
    if compared(raw.differences).low <= 0:
        return "no raw gain is shown of which the readout could take a share"
    part, low, high = share(raw, best)
    lost = compared(np.subtract(raw.differences, best.differences).tolist())
    shown = lost.p is not None and lost.p < ALPHA and lost.difference > 0
    verdict = "confirmed" if part > 50 and shown else "refuted" if high < 50 else "not decided"
    end = f"that this is most of it is {verdict} by the plan's rule"
    end += ", though the interval holds one half" if verdict == "confirmed" and low < 50 else ""
    end = end if len(raw.differences) >= planned else f"{planned} seeds decide"
    said = f"{part:.0f} % ({low:.0f} to {high:.0f} %)"
    return f"{said} of the gain is gone at best readouts; {end}"


def hypothesis() -> str:
    """Hypothesis 2 of PLAN.md."""
    lines = []
    for bed, (name, _) in BEDS.items():
        raw, best = of_claim(bed, "raw"), of_claim(bed, "best")
        if raw is None or best is None:
            continue
        lost = difference([x - y for x, y in zip(raw.differences, best.differences, strict=True)])
        lines.append(
            f"- {name}: {kept(raw, best, PLANNED[bed])}; raw difference minus that at best readouts {lost}. "
            f"To the untouched encoder training adds {added(raw)}, and at best readouts {added(best)}."
        )
    return text("\n".join(lines or ["No seeds yet."]))


def own_part() -> str:
    """What whitening adds by first token in results/study, beside and after training."""
    two, three = (difference(apart(*(study.tests(arm) for arm in study.during(v)))) for v in (2, 3))
    after = difference(apart(*(study.tests(arm) for arm in study.after(3))))
    return text(f"""
By minilm-mlm's first token, at one rate: {two} with two views, {three} with three; {after} over whitening
three views afterwards.
""")


THIRD, WHITENING = "a third view, without whitening", "whitening, with three views"
PARTS = {  # of WhitenedCSE minus SimCSE: the systems whose difference each is
    THIRD: ("none3", "none2"),
    WHITENING: ("sgw3", "none3"),
    "both: WhitenedCSE minus SimCSE": ("sgw3", "none2"),
}


def of_parts(bed: str = "mlm") -> dict[str, list[tuple[list[float], float]]]:
    """Which part of WhitenedCSE minus SimCSE is the third view's, which whitening's; each at its own rate.

    By name the differences over the seeds that all three systems have, raw and at best readouts, each with
    its p. Hypothesis 3 of PLAN.md is the second; its p are corrected with those of crops, which count as 1.
    """
    every = {system: of_system(bed, system) for pair in PARTS.values() for system in pair}
    seeds = sorted(set.intersection(*(set(own) for own in every.values())))
    found = {}
    for name, pair in PARTS.items():
        differences = [
            apart(*({s: average(every[system][s], readout) for s in seeds} for system in pair))
            for readout in ("raw", "best")
        ]
        p = [compared(values).p or 1.0 for values in differences]
        p = holm([*p, 1.0, 1.0])[:2] if name == WHITENING else p
        found[name] = [*zip(differences, p, strict=True)]
    return found


def average(row: Row, readout: str) -> float:
    """The average of the seven tests of a run with a readout, "raw" or "best"."""
    return fmean(float(row[f"{readout} {test}"]) for test in TESTS)


def parts() -> str:
    """The table of `of_parts` on mlm_minilm."""
    lines = [
        [name, f"{of_paper(name):+.2f}", *(difference(*each) for each in found), str(len(found[0][0]))]
        for name, found in of_parts().items()
    ]
    systems = dict.fromkeys(system for pair in PARTS.values() for system in pair)
    rates = listed(f"{rate('mlm', system)} ({NAMES[system]})" for system in systems)
    made = table(["", "the paper (Table 6, one run)", "as trained", "at best readouts", "seeds"], lines)
    return f"{made}\n\n{text(f'Learning rates: {rates}.')}"


def of_paper(name: str) -> float:
    """One of PARTS in the paper's Table 6."""
    rows = {row["label"].partition(":")[0]: row["values"][0] for row in tables()["WhitenedCSE/T6"]["rows"]}
    labels = {"none2": "SimCSE", "none3": "no whitening, 3 views", "sgw3": "WhitenedCSE"}
    one, other = (float(rows[labels[system]]) for system in PARTS[name])
    return one - other


def seeds_done() -> str:
    """How many seeds of the paper's comparison are there, as a phrase."""
    done = {bed: len(of_system(bed, "none2").keys() & of_system(bed, "sgw3").keys()) for bed in PLANNED}
    return listed(f"{done[bed]} of {PLANNED[bed]} seeds ({BEDS[bed][0]})" for bed in PLANNED)


def progress() -> str:
    """How far the study has come."""
    pilots = sum(bool(row["seed"]) and int(row["seed"]) in PILOT for row in rows())
    return text(f"""
The study has {pilots} runs of its pilot and, of the paper's comparison, {seeds_done()}; a seed is two runs.
""")


def gate() -> str:
    """For each encoder, whether the better system beats the untouched one by MARGIN, at best readouts."""
    items = []
    for bed, (name, _) in BEDS.items():
        for row in rows():
            if row["run"] == f"untouched-{bed}":
                before = fmean(float(row[f"best {test}"]) for test in TESTS)
                said = f"- {name}: untouched {before:.2f} at its best readout ({row['best']})"
                items.append(f"{said}; {passed(bed, before)}.")
    return text("\n".join(items))


def passed(bed: str, before: float) -> str:
    """What the gate says of an encoder whose best readout scores `before` untouched."""
    if (found := of_claim(bed, "best")) is None:
        return "no trained system of this study yet"
    said = f"the better system {before + gained(found):.2f}, {gained(found):+.2f}"
    return said + (" (passes)" if gained(found) >= MARGIN else ": this encoder cannot carry the question")


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
        axis.set(xlabel="WhitenedCSE minus SimCSE, 95 % interval")
        figure.savefig(HERE / "comparison.png")


def main() -> None:
    """Draw the picture and print the tables."""
    picture()
    for made in (comparison, sentences, progress, gate, by_test, alike, parts, rates):
        print(made(), end="\n\n")


if __name__ == "__main__":
    main()

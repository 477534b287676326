"""The tables of results/readout: `python -m results.tables` writes them into the pages.

Each NAME.json beside this file was written by study.py, and each NAME_uses.json by uses.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import spearmanr

from results.markdown import table

HERE = Path(__file__).parent
ENCODERS = {
    "mlm_minilm": "mlm_minilm",
    "minilm_mlm": "minilm-mlm",
    "pretrain": "from scratch",
    "all_minilm": "all-MiniLM-L6-v2",
    "all_mpnet": "all-mpnet-base-v2",
}
TRAINED = {  # runs of results/claim
    "mlm_minilm_simcse": "SimCSE on mlm_minilm",
    "mlm_minilm_whitenedcse": "WhitenedCSE on mlm_minilm",
    "pretrain_simcse": "SimCSE from scratch",
    "pretrain_whitenedcse": "WhitenedCSE from scratch",
}
POOLINGS = {"cls": "first token", "mean": "mean"}
PRIVATE = "minilm-mlm"
FACTS = {"top": "the first axis's share", "rank": "the effective rank", "cosine": "the mean cosine"}
SNAPSHOTS = (55, 133, 405, 1002)  # steps of mlm_minilm's training, of which snapshots were kept


def studied(file: Path, said: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """An encoder by each pooling, named, with what study.py found of it; "facts": of its last layer."""
    content = json.loads(file.read_text())
    for kind, words in POOLINGS.items():
        yield f"{said}, {words}", content[kind] | {"kind": kind, "facts": content["facts"][kind]}


def studies() -> Iterator[tuple[str, dict[str, Any]]]:
    """That of each encoder, trained ones last; "uses": what uses.py found, where it has run."""
    for name, said in (ENCODERS | TRAINED).items():
        used = HERE / f"{name}_uses.json"
        more = {"uses": json.loads(used.read_text())} if used.is_file() else {}
        for pooled, found in studied(HERE / f"{name}.json", said):
            yield pooled, found | more


def retrieval() -> str:
    """MRR@10 of the encoders in results of uses.py: as they are, the literature's recipe, and chosen."""
    head = ["encoder, its pooling", "as it is", "L1 + last, whitened", "k = 256", "chosen on STS-B dev",
            "gain (95 %)", "recall@1 as it is", "chosen"]  # fmt: skip
    rows = []
    for name, found in studies():
        if "uses" not in found:
            continue
        mrr, recall = (found["uses"]["retrieval"][measure] for measure in ("mrr", "recall"))
        chosen = found["dev"]["readout"]
        own = next(one for one in mrr[chosen] if one.startswith(found["kind"]))
        recipes = [one for one in mrr if one.endswith(tuple(found["literature"])) and "layers 1 + " in one]
        gain, low, high = mrr[chosen][own]
        rows.append([
            name,
            *(f"{mrr[one]['score']:.2f}" for one in (own, recipes[0], recipes[-1], chosen)),
            f"{gain:+.2f} ({low:+.2f} .. {high:+.2f})" if chosen != own else "0, left as it is",
            *(f"{recall[one]['score']:.2f}" for one in (own, chosen)),
        ])  # fmt: skip
    return table(head, rows)


def transfer() -> str:
    """Accuracies of the tasks that uses.py has done: as it is, chosen, and the difference."""
    used = [(name, found, found["uses"]) for name, found in studies() if "uses" in found]
    tasks = list(dict.fromkeys(task for _, _, done in used for task in done if task != "retrieval"))

    def cell(found: dict[str, Any], scores: dict[str, Any] | None) -> str:
        if scores is None:
            return "-"
        one = scores[found["dev"]["readout"]]
        own = next(name for name in one if name.startswith(found["kind"]))
        apart, low, high = one[own]
        return f"{scores[own]['score']:.2f}, {one['score']:.2f}: {apart:+.2f} ({low:+.2f} .. {high:+.2f})"

    return table(
        ["encoder, its pooling", *tasks],
        [
            [name, *(cell(found, done.get(task)) for task in tasks)]
            for name, found, done in used
            if len(done) > 1
        ],
    )


def averaged(found: dict[str, Any], n: int, rule: str = "rule") -> float:
    """The mean over the random parts of n pairs."""
    return fmean(one[rule] for one in found["pairs"][str(n)])


def seven() -> str:
    """Averages of the seven tests: as it is, the literature's recipe, chosen, and the oracle."""
    head = ["encoder, its pooling", "as it is", "L1 + last, whitened", "k = 256", "200 pairs", "STS-B dev",
            "gain (95 %)", "oracle", "share of its gain", "chosen on STS-B dev"]  # fmt: skip
    rows = []
    for name, found in studies():
        own, dev, oracle = found["own"], found["dev"], found["oracle"]["average"]
        low, high = dev["interval"]
        share = f"{100 * dev['gain'] / (oracle - own):.0f} %" if dev["shown"] else "-"
        gain = f"{dev['gain']:+.2f} ({low:+.2f} .. {high:+.2f})" if dev["shown"] else "0, left as it is"
        recipes = [*found["literature"].values()]  # one where the width is below 256
        shown = [own, recipes[0], recipes[-1], averaged(found, 200), dev["average"]]
        chosen = dev["readout"] if dev["shown"] else "as it is"
        rows.append([name, *(f"{x:.2f}" for x in shown), gain, f"{oracle:.2f}", share, chosen])
    return table(head, rows)


def brief() -> str:
    """What README.md shows: each public encoder by its mean, the literature's whitening, and the choice."""
    head = ["encoder, by its mean", "as it is", "whitened (L1 + last, k = 256)", "chosen by `readout`"]
    rows = []
    public = {said for said in ENCODERS.values() if said != PRIVATE}
    for name, found in studies():
        encoder, _, pooling = name.partition(", ")
        dev, recipe = found["dev"], [*found["literature"].values()][-1]
        chosen = f"{dev['average']:.2f}: {dev['readout']}" if dev["shown"] else "left as it is"
        if pooling == "mean" and encoder in public:
            rows.append([encoder, f"{found['own']:.2f}", f"{recipe:.2f}", chosen])
    return table(head, rows)


class Known(NamedTuple):
    """What is known of an encoder and pooling without labels, and what a readout brings there.

    family: of encoders that come from the same weights. gain: of the best readout. taken: of that which STS-B
    dev chooses.
    """

    name: str
    family: str
    facts: dict[str, float]
    own: float
    gain: float
    taken: float


def known() -> list[Known]:
    """That of each encoder and pooling, and of the snapshots on the way to mlm_minilm."""
    snapshots = ((HERE / f"snapshots/{n}.json", f"mlm_minilm after {n:,} steps") for n in SNAPSHOTS)
    made = []
    for name, x in chain(studies(), *(studied(*one) for one in snapshots)):
        family = next((other for other in ("scratch", "mpnet") if other in name), "MiniLM")
        gain, taken = (x[one]["average"] - x["own"] for one in ("oracle", "dev"))
        made.append(Known(name, family, x["facts"], x["own"], gain, taken))
    return made


def unlabelled() -> str:
    """What is known of a vector without labels, beside what the best and the chosen readout bring."""
    head = ["encoder, its pooling", "first axis, %", "effective rank", "mean cosine", "as it is",
            "gain of the oracle", "chosen on STS-B dev"]  # fmt: skip
    lines = []
    for x in known():
        facts = f"{100 * x.facts['top']:.1f}", f"{x.facts['rank']:.0f}", f"{x.facts['cosine']:.2f}"
        lines.append([x.name, *facts, f"{x.own:.2f}", f"{x.gain:+.2f}", f"{x.taken:+.2f}"])
    return table(head, lines)


def predicted() -> str:
    """How well each of these tells the gain: over all, and of a family from the others by a straight line."""
    every, lines = known(), []
    gains, families = np.array([x.gain for x in every]), np.array([x.family for x in every])
    nothing = fmean(abs(x.gain - gains[families != x.family].mean()) for x in every)
    for name, words in FACTS.items():
        facts = np.array([x.facts[name] for x in every])
        errors = []
        for x, fact in zip(every, facts, strict=True):
            others = families != x.family
            line = np.polyfit(facts[others], gains[others], 1)
            errors.append(abs(x.gain - np.polyval(line, fact)))
        rho = spearmanr(facts, gains).statistic
        lines.append([words, f"{rho:+.2f}", f"{fmean(errors):.1f}"])
    lines.append(["no fact: the mean gain of the other families", "", f"{nothing:.1f}"])
    return table(["", "rank correlation", "error, points"], lines)


def sizes() -> str:
    """Averages of the seven tests by the number of pairs that choose: by the rule, and always the best."""
    counts = next(iter(found["pairs"] for _, found in studies()))
    head = ["encoder, its pooling", "as it is", *(f"{n} pairs" for n in counts), "1,500 pairs"]

    def cell(found: dict[str, Any], n: str) -> str:
        kept, of = sum(one["shown"] for one in found["pairs"][n]), len(found["pairs"][n])
        ruled, always = (averaged(found, int(n), rule) for rule in ("rule", "always"))
        return f"{ruled:.2f} / {always:.2f} ({kept} of {of})"

    return table(
        head,
        [
            [name, f"{found['own']:.2f}", *(cell(found, n) for n in counts), f"{found['dev']['average']:.2f}"]
            for name, found in studies()
        ],
    )

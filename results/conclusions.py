"""Write what committed runs show into README.md, docs/ and results/*/README.md: python -m results.conclusions

A page holds each such text between <!-- conclusions: NAME --> and <!-- end -->, made by the function of that
name in BLOCKS; to change it, change the function and run this. tests/test_results.py compares the two.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean

import numpy as np

from results.claim import table as claim
from results.lab import answers as lab
from results.markdown import listed, table, text
from results.pretrain.scores import pretrained
from results.pretrain.scores import untouched as untouched_encoder
from results.readout import table as readout
from results.study import conclusions as study
from results.study.contrasts import (
    AS_IS,
    TASKS,
    by_share,
    by_task,
    said,
    score,
    systems,
    untouched,
)
from whitenedcse.evaluation.statistics import Comparison, of_mean, tested
from whitenedcse.report.compare import spread

ROOT = Path(__file__).parents[1]
MARK = re.compile(r"(<!-- conclusions: (\S+) -->)(\s*).*?<!-- end -->", re.DOTALL)
NO_GATHER = "two devices gather=false"


def rows(name: str) -> list[dict[str, str]]:
    """The rows of a CSV file in results/."""
    with (ROOT / "results" / name).open() as file:
        return list(csv.DictReader(file))


def change(sample: Sequence[float]) -> Comparison:
    """The mean of paired differences with its 95 % t interval and p."""
    return tested(fmean(sample), [of_mean(sample)])


def wiki_mini() -> str:
    """Three seeds of +experiment=wiki_mini beside whitening the untouched encoder."""
    seeds, baselines = rows("wiki_mini/seeds.csv"), rows("wiki_mini/baselines.csv")
    trained = [float(row["avg_all"]) for row in seeds]
    before = {task: score(untouched(), AS_IS, [task]) for task in TASKS}
    gains = {task: change([float(row[task]) - before[task] for row in seeds]) for task in TASKS}
    tests = [
        ["untouched, cls", *(f"{x:.2f}" for x in before.values())],
        ["trained", *(spread({i: float(row[task]) for i, row in enumerate(seeds)}) for task in TASKS)],
    ]
    raw = {row["pooling"]: float(row["average"]) for row in baselines if row["variant"] == "raw"}
    own, training = (highest(baselines, kind) for kind in ("test's own", "training sentences"))
    averages = [
        [
            f"untouched, raw: cls (mean {raw['mean']:.2f}, first + last {raw['first_last']:.2f})",
            f"{raw['cls']:.2f}",
        ],
        [f"untouched, best of all whitenings (transductive): {label(own)}", own["average"]],
        [f"untouched, best inductive whitening: {label(training)}", training["average"]],
        [
            f"**trained, mean of {len(seeds)} seeds** ({', '.join(f'{x:.2f}' for x in trained)})",
            mean_sd(trained),
        ],
    ]
    above = [
        floor(min(trained) - x)
        for x in (max(raw.values()), max(float(r["average"]) for r in (own, training)))
    ]
    return text(f"""
{table(["seven-test average", ""], averages)}

{table(["", *TASKS], tests)}

Every seed is at least {above[0]} points above the best raw pooling and {above[1]} above the best whitening
of the untouched encoder, although that one was picked among {len(baselines) - len(raw)} by looking at the
tests. Tests without a gain that these seeds show:
{listed(f"{t} {said(d)}" for t, d in gains.items() if d.low <= 0)}. STS-B dev: {seeds[0]["dev_before"]}
before, {mean_sd([float(row["dev_best"]) for row in seeds])} at the best step
({", ".join(row["best_step"] for row in seeds)}). What part of the gain is whitening's these runs do not
tell, as none trained without it: the [study](../study/README.md) does.
""")


def highest(baselines: list[dict[str, str]], kind: str) -> dict[str, str]:
    """The row with the highest average among whitenings of a kind."""
    return max((row for row in baselines if kind in row["variant"]), key=lambda row: float(row["average"]))


def label(row: dict[str, str]) -> str:
    """A row of baselines.csv in words."""
    return f"{row['pooling']}, {row['variant']}"


def mean_sd(sample: Sequence[float]) -> str:
    """Mean and standard deviation, as text."""
    return spread(dict(enumerate(sample)))


def floor(x: float) -> str:
    """A number rounded down to one decimal: what it is at least."""
    return f"{np.floor(10 * x) / 10:.1f}"


def rounding() -> str:
    """What computing the loss in float32 changed in wiki_mini."""
    now = [float(row["avg_all"]) for row in rows("wiki_mini/seeds.csv")]
    then = [74.31, 73.14, 73.75]  # wiki_mini/seeds.csv at commit 1923e4b
    apart = [a - b for a, b in zip(now, then, strict=True)]
    return text(f"""
The same three seeds had {listed(f"{x:.2f}" for x in then)} then ({mean_sd(then)}): seed by seed
{listed(f"{x:+z.2f}" for x in apart)}, mean {said(change(apart))}.
""")


def devices() -> dict[str, list[float]]:
    """The best dev score of each seed by the settings of exact/seeds.csv."""
    every = rows("exact/seeds.csv")
    return {
        row["setting"]: [float(r["best"]) for r in every if r["setting"] == row["setting"]] for row in every
    }


def gathered() -> str:
    """What the gather adds to the score of two devices, as text."""
    best = devices()
    return said(change([a - b for a, b in zip(best["two devices"], best[NO_GATHER], strict=True)]))


def exact() -> str:
    """One device, two, and two that do not gather."""
    before = {row["seed"]: row["before"] for row in rows("exact/seeds.csv")}
    assert all(row["before"] == before[row["seed"]] for row in rows("exact/seeds.csv"))
    lines = [
        [name.replace(" gather=false", ", `gather=false`"), *(f"{x:.2f}" for x in scores), mean_sd(scores)]
        for name, scores in devices().items()
    ]
    return text(f"""
{table(["seed", *before, "mean ± std"], lines)}

Before training all {len(rows("exact/seeds.csv"))} runs have the score of their seed to the last digit:
evaluation is shared by the ranks, and exact. One and two devices differ by their dropout alone. Without the
gather each device has half the negatives, and statistics of half the sentences; the score with it minus
the score without it is {gathered()}.
""")


def gather() -> str:
    """The same in docs/distributed.md."""
    with_it, without = (fmean(devices()[name]) for name in ("two devices", NO_GATHER))
    return f"{without:.1f} on dev instead of {with_it:.1f} (the gain by gathering is {gathered()})"


def evaluation() -> str:
    """Layers of minilm-mlm by the mean over subsets."""
    by_layers = {
        (row["layers"], row["whitening"] == "True", row["task"]): float(row["mean"])
        for row in rows("evaluation/minilm_mlm_layers.csv")
    }
    columns = [*TASKS, "average"]
    cls = next(row["sts"] for row in untouched()["rows"] if row["name"] == AS_IS)
    lines = [["cls last", *(f"{cls['tasks'][t]['mean']:.2f}" for t in TASKS), f"{cls['avg']['mean']:.2f}"]]
    for name, layers, white in (
        ("mean last", "6+6", False),
        ("mean L1", "1+1", False),
        ("mean L1+last", "1+6", False),
        ("mean L1+last whitened (transductive)", "1+6", True),
    ):
        lines.append([name, *(f"{by_layers[layers, white, task]:.2f}" for task in columns)])
    averages = {key: value for key, value in by_layers.items() if key[2] == "average"}
    white, plain = (max((k for k in averages if k[1] is w), key=lambda k: averages[k]) for w in (True, False))
    return text(f"""
{table(["Spearman x 100, mean over subsets", *columns], lines)}

The best average of every two layers is that of {white[0]} whitened ({averages[white]:.2f}) and, without
whitening, of {plain[0]} ({averages[plain]:.2f}).
""")


def matryoshka() -> str:
    """Prefixes of an encoder trained for them, whitening-k of it and of one that was not."""
    every, sizes = rows("matryoshka/seeds.csv"), (8, 16, 32, 64)

    def scores(way: str, k: int) -> list[float]:
        named = [row for row in every if f"{row['training']}, {row['vectors']}, {row['k']}" == f"{way}, {k}"]
        return [float(row["spearman"]) for row in sorted(named, key=lambda row: int(row["seed"]))]

    def minus(first: str, second: str, at: Sequence[int] = sizes) -> dict[int, Comparison]:
        pairs = {k: zip(scores(first, k), scores(second, k), strict=True) for k in at}
        return {k: change([a - b for a, b in pair]) for k, pair in pairs.items()}

    plain, white = ("plain, prefix", "plain, whitening (training)")
    cut, both = ("matryoshka, prefix", "matryoshka, whitening (training)")
    lines = [[way, *(mean_sd(scores(way, k)) for k in sizes)] for way in (plain, white, cut, both)]
    return text(f"""
{table(["training, vectors", *(f"k = {k}" for k in sizes)], lines)}

Paired by seed, the mean of three with its 95 % t interval and p:

- a prefix minus one of plain training: {each(minus(cut, plain))};
- a prefix minus whitening-k of plain training: {each(minus(cut, white))};
- a prefix minus whitening-k of the same encoder: {each(minus(cut, both))};
- whitening-k after Matryoshka training minus whitening-k after plain training: {each(minus(both, white))};
- all 128 channels as they are, {mean_sd(scores(cut, 128))} with the loss and {mean_sd(scores(plain, 128))}
  without it: {each(minus(cut, plain, [128]))}.

Conclusion: beside whitening-k of an encoder that was trained without it, a Matryoshka prefix is
{verdicts(minus(cut, white))}; beside whitening-k of the same encoder it is {verdicts(minus(cut, both))}.
""")


def each(apart: dict[int, Comparison]) -> str:
    """Differences by k as a phrase."""
    return listed(f"k = {k} {said(d)}" for k, d in apart.items())


def verdicts(apart: dict[int, Comparison]) -> str:
    """At which k the first of two is higher, lower, and not significantly different, as a phrase."""
    ways = {"higher": lambda d: d.low > 0, "lower": lambda d: d.high < 0}
    found = {name: [str(k) for k, d in apart.items() if way(d)] for name, way in ways.items()}
    found["not significantly different"] = [str(k) for k, d in apart.items() if d.low <= 0 <= d.high]
    return listed(f"{name} at k = {listed(ks)}" for name, ks in found.items() if ks)


def shipping() -> str:
    """How far exports are from their source."""
    every = rows("shipping/agreement.csv")
    worst = {n: max(float(row[n]) for row in every if row[n]) for n in list(every[0])[3:6]}
    test = max(float(row["largest difference of a test"]) for row in every)
    return text(f"""
In all {len(every)} the vectors of the export as its own library loads it are the source's within
{worst["sentence-transformers"]:.1e} (Sentence-Transformers), {worst["onnx"]:.1e} (ONNX) and
{worst["transformers"]:.1e} (Transformers, without whitening), and each of the seven STS tests, computed
through `SentenceTransformer`, is ours within {test:.4f} points.
""")


BLOCKS: dict[str, list[Callable[[], str]]] = {
    "README.md": [claim.short, claim.sentences, readout.brief],
    "docs/distributed.md": [gather],
    "results/claim/README.md": [
        claim.progress,
        claim.gate,
        claim.comparison,
        claim.hypothesis,
        claim.own_part,
        claim.parts,
        claim.by_test,
        claim.alike,
        claim.rates,
    ],
    "results/readout/README.md": [
        readout.seven,
        readout.retrieval,
        readout.transfer,
        readout.sizes,
        readout.unlabelled,
        readout.predicted,
    ],
    "results/study/README.md": [study.like, by_share, systems, by_task, study.holds, study.fails],
    "results/wiki_mini/README.md": [wiki_mini, rounding],
    "results/exact/README.md": [exact],
    "results/evaluation/README.md": [evaluation],
    "results/shipping/README.md": [shipping],
    "results/matryoshka/README.md": [matryoshka],
    "results/pretrain/README.md": [pretrained, untouched_encoder],
    "results/lab/README.md": [
        lab.reached,
        lab.question("paper"),
        lab.question("shuffle"),
        lab.pooled,
        *(lab.question(name) for name in lab.QUESTIONS if name not in ("paper", "shuffle")),
        lab.question("classification"),
        lab.where,
        lab.predicted,
        lab.carried,
        lab.parts,
        lab.all_systems,
    ],
}


def written(page: str) -> str:
    """A page with its conclusions made anew. Raises ValueError unless it has those of BLOCKS, in order."""
    made = {function.__name__: function for function in BLOCKS[page]}
    old = (ROOT / page).read_text()
    names = [match[2] for match in MARK.finditer(old)]
    if names != list(made):
        raise ValueError(f"{page} has the conclusions {names}; results/conclusions.py has {list(made)}")
    return MARK.sub(lambda match: f"{match[1]}{match[3]}{made[match[2]]()}{match[3]}<!-- end -->", old)


if __name__ == "__main__":
    for name in BLOCKS:
        (ROOT / name).write_text(written(name))

"""Write the tables of committed runs into README.md and results/*/README.md: python -m results.tables

A page holds each table between <!-- table: NAME --> and <!-- end -->, made by the function of that name in
TABLES; to change it, change the function and run this. The sentences around them are written by hand.
tests/test_results.py compares the two.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from results.claim import table as claim
from results.lab import answers as lab
from results.markdown import table
from results.paired import compared
from results.pretrain.scores import untouched as untouched_encoder
from results.readout import table as readout
from results.study import contrasts as study
from whitenedcse.report.compare import spread

ROOT = Path(__file__).parents[1]
MARK = re.compile(r"(<!-- table: (\S+) -->)(\s*).*?<!-- end -->", re.DOTALL)


def rows(name: str) -> list[dict[str, str]]:
    """The rows of a CSV file in results/."""
    with (ROOT / "results" / name).open() as file:
        return list(csv.DictReader(file))


def mean_sd(sample: Sequence[float]) -> str:
    """Mean and standard deviation, as text."""
    return spread(dict(enumerate(sample)))


def wiki_mini() -> str:
    """Three seeds of +experiment=wiki_mini by test, beside the untouched encoder."""
    seeds = rows("wiki_mini/seeds.csv")
    before = {task: study.score(study.untouched(), study.AS_IS, [task]) for task in study.TASKS}
    trained = {task: [float(row[task]) for row in seeds] for task in study.TASKS}
    gains = [compared([x - before[task] for x in trained[task]]) for task in study.TASKS]
    lines = [
        ["untouched, cls", *(f"{x:.2f}" for x in before.values())],
        ["trained", *map(mean_sd, trained.values())],
        ["difference", *(f"{d.difference:+.2f} ({d.low:+.2f} .. {d.high:+.2f})" for d in gains)],
    ]
    return table(["", *study.TASKS], lines)


def averages() -> str:
    """The average of the seven tests of these seeds, and of all whitenings of the untouched encoder."""
    trained = [float(row["avg_all"]) for row in rows("wiki_mini/seeds.csv")]
    baselines = rows("wiki_mini/baselines.csv")
    raw = {row["pooling"]: row["average"] for row in baselines if row["variant"] == "raw"}

    def highest(kind: str) -> tuple[str, str]:
        some = [row for row in baselines if kind in row["variant"]]
        best = max(some, key=lambda row: float(row["average"]))
        return f"{best['pooling']}, {best['variant']}", best["average"]

    (own, of_own), (training, of_training) = highest("test's own"), highest("training sentences")
    raws = f"cls (mean {raw['mean']}, first + last {raw['first_last']})"
    seeds = f"mean of {len(trained)} seeds** ({', '.join(f'{x:.2f}' for x in trained)})"
    lines = [
        [f"untouched, raw: {raws}", raw["cls"]],
        [f"untouched, best of all whitenings (transductive): {own}", of_own],
        [f"untouched, best inductive whitening: {training}", of_training],
        [f"**trained, {seeds}", mean_sd(trained)],
    ]
    return table(["seven-test average", ""], lines)


def exact() -> str:
    """One device, two, and two that do not gather."""
    every = rows("exact/seeds.csv")
    seeds = list(dict.fromkeys(row["seed"] for row in every))
    lines = []
    for name in dict.fromkeys(row["setting"] for row in every):
        best = [float(row["best"]) for row in every if row["setting"] == name]
        said = name.replace(" gather=false", ", `gather=false`")
        lines.append([said, *(f"{x:.2f}" for x in best), mean_sd(best)])
    return table(["seed", *seeds, "mean ± std"], lines)


def evaluation() -> str:
    """Layers of minilm-mlm by the mean over subsets."""
    by_layers = {
        (row["layers"], row["whitening"] == "True", row["task"]): float(row["mean"])
        for row in rows("evaluation/minilm_mlm_layers.csv")
    }
    columns = [*study.TASKS, "average"]
    cls = next(row["sts"] for row in study.untouched()["rows"] if row["name"] == study.AS_IS)
    first = [*(cls["tasks"][task]["mean"] for task in study.TASKS), cls["avg"]["mean"]]
    lines = [["cls last", *(f"{x:.2f}" for x in first)]]
    for name, layers, white in (
        ("mean last", "6+6", False),
        ("mean L1", "1+1", False),
        ("mean L1+last", "1+6", False),
        ("mean L1+last whitened (transductive)", "1+6", True),
    ):
        lines.append([name, *(f"{by_layers[layers, white, task]:.2f}" for task in columns)])
    return table(["Spearman x 100, mean over subsets", *columns], lines)


SIZES = (8, 16, 32, 64)
PLAIN, WHITE = "plain, prefix", "plain, whitening (training)"
CUT, BOTH = "matryoshka, prefix", "matryoshka, whitening (training)"


def by_seed(way: str, k: int) -> list[float]:
    """The scores of k components, in the order of the seeds."""
    training, _, vectors = way.partition(", ")
    wanted = {"training": training, "vectors": vectors, "k": str(k)}
    named = [row for row in rows("matryoshka/seeds.csv") if wanted.items() <= row.items()]
    return [float(row["spearman"]) for row in sorted(named, key=lambda row: int(row["seed"]))]


def matryoshka() -> str:
    """Prefixes of an encoder trained for them, whitening-k of it and of one that was not."""
    lines = [[way, *(mean_sd(by_seed(way, k)) for k in SIZES)] for way in (PLAIN, WHITE, CUT, BOTH)]
    return table(["training, vectors", *(f"k = {k}" for k in SIZES)], lines)


def prefixes() -> str:
    """Their differences, paired by seed."""
    names = {
        "a prefix minus one of plain training": (CUT, PLAIN),
        "a prefix minus whitening-k of plain training": (CUT, WHITE),
        "a prefix minus whitening-k of the same encoder": (CUT, BOTH),
        "whitening-k after Matryoshka training minus whitening-k after plain training": (BOTH, WHITE),
    }
    lines = []
    for name, pair in names.items():
        every = [zip(*(by_seed(way, k) for way in pair), strict=True) for k in SIZES]
        lines.append([name, *(study.said(compared([a - b for a, b in each])) for each in every)])
    return table(["", *(f"k = {k}" for k in SIZES)], lines)


TABLES: dict[str, list[Callable[[], str]]] = {
    "README.md": [claim.short, readout.brief],
    "results/claim/README.md": [claim.gate, claim.comparison, claim.shares, claim.cells, claim.parts,
                                claim.by_test, claim.soups, claim.rates],
    "results/readout/README.md": [readout.seven, readout.retrieval, readout.transfer, readout.sizes,
                                  readout.unlabelled, readout.predicted],
    "results/study/README.md": [study.beside, study.by_share, study.systems, study.by_task, study.parts,
                                study.afterwards],
    "results/wiki_mini/README.md": [averages, wiki_mini],
    "results/exact/README.md": [exact],
    "results/evaluation/README.md": [evaluation],
    "results/matryoshka/README.md": [matryoshka, prefixes],
    "results/pretrain/README.md": [untouched_encoder],
    "results/lab/README.md": [
        *(lab.question(name) for name in ("paper", "shuffle")),
        lab.pooled,
        *(lab.question(name) for name in lab.QUESTIONS if name not in ("paper", "shuffle")),
        lab.question("classification"),
        lab.where,
        lab.correlations,
        lab.all_systems,
    ],
}  # fmt: skip


def written(page: str) -> str:
    """A page with its tables made anew. Raises ValueError unless it has those of TABLES, in order."""
    made = {function.__name__: function for function in TABLES[page]}
    old = (ROOT / page).read_text()
    names = [match[2] for match in MARK.finditer(old)]
    if names != list(made):
        raise ValueError(f"{page} has the tables {names}; results/tables.py has {list(made)}")
    return MARK.sub(lambda match: f"{match[1]}{match[3]}{made[match[2]]()}{match[3]}<!-- end -->", old)


if __name__ == "__main__":
    for name in TABLES:
        (ROOT / name).write_text(written(name))

"""All tasks in one evaluation: their sentences are encoded once, then each system is scored on the vectors.

n: distinct sentences    d: width    system: a way from sentences to vectors, and a transform fitted to them
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from whitenedcse.evaluation.geometry import described, positives
from whitenedcse.evaluation.postprocess import Postprocess, ladder
from whitenedcse.evaluation.protocol import Row, setting
from whitenedcse.evaluation.scores import (
    MEANS,
    Classify,
    Index,
    Pairs,
    Rows,
    Vectors,
    accuracy,
    averaged,
    cosine,
    features,
    scores_of,
    task_scores,
    threshold,
)
from whitenedcse.evaluation.statistics import Draws, accuracy_draws, average_draws, interval, task_draws
from whitenedcse.evaluation.tasks import OWN, Labelled, Task, corpus_texts, own_texts, texts
from whitenedcse.run import by_task

FIGURES = ("alignment", "uniformity", "mean_cosine", "isotropy", "effective_rank")
Of = Callable[[str], Vectors]


class Plan(NamedTuple):
    """The sentences to encode, and which of them each task and each transform needs.

    sentences: distinct. pairs: rows of the scored pairs, by task. labelled: by task, with the rows of each of
    its columns. fits: by what a transform is fitted to, then by task: rows, repeated as they occur.
    """

    sentences: list[str]
    pairs: Index
    labelled: dict[str, tuple[Labelled, list[Rows]]]
    fits: dict[str, dict[str, Rows]]


def plan(
    tasks: Mapping[str, Task],
    fits: Iterable[str] = (),
    corpus: Callable[[str], list[str]] = corpus_texts,
    case: str = "as_is",
) -> Plan:
    """The plan for these tasks, and for transforms fitted to each of `fits`: "target", "year", or a corpus.

    corpus: a function from the name of a corpus to its sentences. case: one of tasks.CASES.
    """
    if not tasks:
        raise ValueError("tasks.names=[]: nothing to score; name a task or a file, e.g. [STS-B]")
    fits = list(dict.fromkeys(fits))
    own = {on: {name: own_texts(on, name, case) for name in tasks} for on in fits if on in OWN}
    corpora = {on: corpus(on) for on in fits if on not in OWN}
    if case != "as_is":
        corpora = {on: [text.lower() for text in some] for on, some in corpora.items()}
    fitted = [*(text for by_task in own.values() for text in by_task.values()), *corpora.values()]
    sentences = sorted({*chain(*fitted), *chain(*map(texts, tasks.values()))})
    row = {text: i for i, text in enumerate(sentences)}

    def at(some: Iterable[str]) -> Rows:
        return np.array([row[text] for text in some], np.intp)

    pairs: Index = {}
    labelled: dict[str, tuple[Labelled, list[Rows]]] = {}
    for name, task in tasks.items():
        if isinstance(task, Labelled):
            labelled[name] = task, [at(column) for column in task.columns]
        else:
            pairs[name] = [(subset, np.stack([at(subset.left), at(subset.right)])) for subset in task]
    rows = {on: {name: at(some) for name, some in by_task.items()} for on, by_task in own.items()}
    rows |= {on: dict.fromkeys(tasks, at(some)) for on, some in corpora.items()}
    return Plan(sentences, pairs, labelled, {on: rows[on] for on in fits})


class System(NamedTuple):
    """What is evaluated: vectors x (n, d) of a plan's sentences, and a transform fitted to `on`."""

    x: NDArray[Any]
    make: Callable[[], Postprocess] | None = None
    on: str = ""

    def vectors(self, plan: Plan, name: str) -> Vectors:
        """A function from rows to the vectors that a task sees, transformed as fitted for that task."""
        if self.make is None:
            return lambda at: self.x[at]
        transform = self.make()  # of a prefix, which is not fitted, the width alone
        fitted = transform.fit(self.x[plan.fits[self.on][name]] if self.on else self.x)
        return lambda at: fitted.transform(self.x[at])

    def by_task(self, plan: Plan) -> Of:
        """A function from a task to its `vectors`; a transform fitted to other sentences is fitted once."""
        fitted = cache(lambda name: self.vectors(plan, name))
        shared = next(iter(plan.fits[self.on])) if setting(self.on) == "inductive" else None
        return lambda name: fitted(shared or name)

    def why_undefined(self, plan: Plan, name: str) -> str:
        """Why no score of scored pairs is defined after the transform; "" where it is."""
        if self.make is None or self.on not in OWN:
            return ""
        n, d = len(np.unique(plan.fits[self.on][name])), self.x.shape[1]
        made = self.make()
        few = f"whitened on its own {n:,} sentences, too few for {made.k or d:,} components"
        return few if made.equal_cosines(n, d) else ""

    def most_components(self, plan: Plan, name: str) -> int | None:
        """The most components whose cosines of a task's pairs depend on the encoder; None for all."""
        return len(np.unique(plan.fits[self.on][name])) - 2 if self.why_undefined(plan, name) else None

    def note_on_few_texts(self, plan: Plan, name: str) -> str:
        """A note on a row of this name whose other texts are too few for its components; "" where not."""
        if self.make is None or setting(self.on) != "inductive":
            return ""
        made, n, d = self.make(), len(next(iter(plan.fits[self.on].values()))), self.x.shape[1]
        known = made.varying(n, d)
        said = (
            f"{name}: fitted to {n:,} texts, of whose components only {known:,} of {made.k or d:,} can vary"
        )
        return said if known < (made.k or d) else ""


class Result(NamedTuple):
    """scores by kind of task, and items: by task, the similarity of each pair, or which were correct."""

    scores: dict[str, Any]
    items: dict[str, NDArray[Any]]


def _check_vectors(x: NDArray[Any], n: int) -> None:
    if x.ndim != 2 or len(x) != n:
        raise ValueError(f"{n} sentences have {x.shape} vectors, not a row for each")
    if broken := np.count_nonzero(~np.isfinite(x).all(axis=1)):
        raise ValueError(f"{broken} of {n} sentences have vectors that are not finite; the model is damaged")


def evaluated(
    system: System, plan: Plan, classify: Classify, draws: int, say: Callable[[str], None] = lambda _: None
) -> Result:
    """The scores of all tasks of a plan, each with its bootstrap interval; None and a "why" where undefined.

    say: a function to report the score of each task that trains a classifier, which takes a while.
    """
    _check_vectors(system.x, len(plan.sentences))
    of = system.by_task(plan)
    scores, items = _sts(of, plan, draws, system.why_undefined) if plan.pairs else ({}, {})
    drawn: dict[str, Draws] = {}
    for name, (task, columns) in plan.labelled.items():
        rte = name == "RTE"  # by a threshold; every other by a classifier
        result, items[name], own = _labelled(of(name), task, columns, None if rte else classify, draws)
        if rte:
            scores["rte"] = result
        else:
            scores.setdefault("transfer", {"tasks": {}})["tasks"][name], drawn[name] = result, own
            say(f"{name}: {result['accuracy']:.2f} ({result['seconds']} s)")
    if drawn:
        average = float(np.mean([scores["transfer"]["tasks"][name]["accuracy"] for name in drawn]))
        scores["transfer"] |= {"avg": average, "interval": interval(average_draws(drawn))}
    return Result(scores, items)


def _sts(
    of: Of, plan: Plan, draws: int, undefined: Callable[[Plan, str], str]
) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    pairs = plan.pairs
    parts = {name: _pairs(of(name), scored, draws, undefined(plan, name)) for name, scored in pairs.items()}
    tasks = {name: task for name, (task, _, _) in parts.items()}
    drawn = {m: average_draws({name: by[m] for name, (_, _, by) in parts.items()}) for m in MEANS}
    average = {**averaged(tasks), "interval": {m: interval(d) for m, d in drawn.items()}}
    first = "STS-B" if "STS-B" in pairs else next(iter(pairs))
    geometry = {"task": first, **_geometry(of(first), pairs[first])}
    if undefined(plan, first):  # these too depend on the number of sentences alone
        geometry |= dict.fromkeys(FIGURES)
    scores = {"sts": {"tasks": tasks, "avg": average}, "geometry": geometry}
    return scores, {name: similarity for name, (_, similarity, _) in parts.items()}


def whitened_scores(
    x: NDArray[Any], sample: NDArray[Any], index: Index, own: int | None = None
) -> dict[int, float | None]:
    """By numbers of components, the average Spearman x 100 of vectors x (n, d) that are only whitened.

    sample: (m, d), what whitening is fitted to; own: of a sample of the sentences that are scored, how many
    differ. None where there are too few sentences to vary by so many components.
    """
    fitted = Postprocess("whitening").fit(sample)
    white, found = fitted.transform(x), dict[int, float | None]()
    for k in ladder(x.shape[1]):
        few = k > fitted.most or (own is not None and fitted.equal_cosines(own, k))
        found[k] = None if few else scores_of(white[:, :k], index)["avg"]["all"]
    return found


def seed(gold: NDArray[Any]) -> int:
    """The seed of a task's resamples, from its gold scores or labels (n,), wherever it lies and is called."""
    return zlib.crc32((np.asarray(gold, np.float64) + 0.0).tobytes())  # -0 is 0


def _pairs(
    of: Vectors, pairs: Pairs, draws: int, undefined: str
) -> tuple[dict[str, Any], NDArray[np.float64], dict[str, Draws]]:
    result, cosines = task_scores(of, pairs, undefined)
    gold, sizes = np.concatenate([s.gold for s, _ in pairs]), [len(s.gold) for s, _ in pairs]
    drawn = task_draws(gold, cosines, sizes, draws, seed(gold))
    result["interval"] = {mean: interval(drawn[mean]) for mean in MEANS}
    for position, part in enumerate(result["subsets"].values()):
        part["interval"] = interval(drawn[str(position)])
    return result, cosines, drawn


def _geometry(of: Vectors, pairs: Pairs) -> dict[str, Any]:
    at = np.unique(np.concatenate([rows for _, rows in pairs], axis=1))
    rows, about = positives(pairs)
    here = torch.from_numpy(np.searchsorted(at, rows))
    return {"positives": about, **described(torch.from_numpy(np.asarray(of(at))), here)}


def _labelled(
    of: Vectors, task: Labelled, columns: Sequence[Rows], classify: Classify | None, draws: int
) -> tuple[dict[str, Any], NDArray[np.bool_], Draws]:
    began = time.perf_counter()
    sides = [of(rows) for rows in columns]
    if classify is None:
        result = threshold(task, cosine(*sides))
    else:
        result = accuracy(task, features(sides), classify)
    correct = result.pop("correct")
    drawn = accuracy_draws(correct, draws, seed(task.gold))
    result |= {"interval": interval(drawn), "seconds": round(time.perf_counter() - began, 1)}
    return result, correct, drawn


def recorded(
    facts: Mapping[str, Any], rows: Sequence[Row], results: Sequence[Result], plan: Plan
) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """The contents of scores.json and of items.npz. facts: the model and its own pooling, among others.

    items.npz has gold/TASK (n,), sizes/TASK of the subsets of scored pairs, and ROW/TASK: similarities (n,),
    or which of the tested texts were correct.
    """
    lines = []
    for row, result in zip(rows, results, strict=True):
        pooling = facts["pooling"] if row.pooling is None else f"{row.pooling} over layers {list(row.layers)}"
        settings = {"name": row.name, "pooling": pooling, "postprocess": dict(row.map or {}), "fit": row.fit}
        lines.append({**settings, "setting": setting(row.fit), **result.scores})
    items = {f"{i}/{task}": item for i, j in enumerate(results) for task, item in j.items.items()}
    items |= {f"gold/{name}": task.gold for name, (task, _) in plan.labelled.items()}
    for task, pairs in plan.pairs.items():
        items[f"gold/{task}"] = np.concatenate([s.gold for s, _ in pairs])
        items[f"sizes/{task}"] = np.array([len(s.gold) for s, _ in pairs])
    return {**facts, "rows": lines}, items


def logged(scores: Mapping[str, Any]) -> dict[str, float]:
    """The scores of the first row, named as for loggers: test/TASK and test/avg."""
    values = by_task(scores["rows"][0], scores["headline"])
    return {f"test/{name}": value for name, value in values.items() if value is not None}


def headline(scores: Mapping[str, Any]) -> float | None:
    """The average of the first row, which a sweep maximises; None where it is undefined."""
    return by_task(scores["rows"][0], scores["headline"])["avg"]

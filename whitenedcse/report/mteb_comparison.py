"""Models side by side from mteb's result files: which differences are more than chance.

The files hold no scores by item, so the variances are those of `evaluation.differences`, which need none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from whitenedcse.console import Grid
from whitenedcse.evaluation.differences import (
    ALPHA,
    Source,
    holm,
    of_difference,
    of_mean,
    of_predictions,
    of_spearman,
    of_two_spearmans,
    tested,
)
from whitenedcse.evaluation.mteb_results import Model, Part, Scored
from whitenedcse.evaluation.statistics import Comparison, with_interval
from whitenedcse.evaluation.sts import spearman
from whitenedcse.report.results import bounds, difference_cells, headed

NOTHING = "cannot be said: no number of pairs, no experiments"
LEGEND = (
    "pairs, texts: other test pairs or texts; training: other training texts, by mteb's paired experiments",
    "apart: without saved predictions the models' errors are taken to be independent: too wide an interval",
    "these tasks: the variances of the tasks together; tasks like these: a t test over the tasks",
)


class Known(NamedTuple):
    """The variances of a score or a difference, and what they cover; no variance if none is known."""

    sources: list[Source]
    covers: str


def of_part(one: Part, first: Part | None) -> Known:
    """The variances of a part's score, or of its difference from the first model's."""
    if one.metric == "spearman" and one.n and one.n > 3 and np.isfinite(one.score):
        return of_pairs(one, first)
    if len(one.experiments) < 2 or (first and len(first.experiments) != len(one.experiments)):
        return Known([], NOTHING)
    if first is None:
        return Known([of_mean(one.experiments), *of_texts(one)], "")
    training = of_difference(one.experiments, first.experiments, paired=True)
    a, b = one.predicted, first.predicted
    if one.metric == "accuracy" and a is not None and b is not None and a.shape == b.shape:
        return Known([*training, of_predictions(a, b, one.score - first.score)], "training, texts")
    texts = [*of_texts(one), *of_texts(first)]
    return Known([*training, *texts], "training, texts apart" if len(texts) == 2 else "training alone")


def of_texts(one: Part) -> list[Source]:
    """The variance of an accuracy over test texts, at most; none for another metric or an unknown number."""
    n = one.n if one.predicted is None else one.predicted.shape[1]
    if one.metric != "accuracy" or not n:
        return []
    return [Source(one.score * (1 - one.score) / n, np.inf)]


def of_pairs(one: Part, first: Part | None) -> Known:
    """The variance of a part's correlation, or of its difference from the first model's."""
    assert one.n is not None
    if first is None:
        return Known([of_spearman(one.score, one.n)], "")
    a, b = one.predicted, first.predicted
    between = spearman(a, b).value if a is not None and b is not None and len(a) == len(b) else None
    r = None if between is None else between / 100
    covers = "pairs apart" if r is None else "pairs"
    return Known([of_two_spearmans(one.score, first.score, r, one.n)], covers)


def of_task(one: Scored, first: Scored | None) -> Known:
    """The variances of a task's score, or of its difference from the first model's."""
    known = [of_part(part, first.parts[key] if first else None) for key, part in one.parts.items()]
    if not all(part.sources for part in known):
        return Known([], NOTHING)
    covers = " or ".join(dict.fromkeys(part.covers for part in known))
    return Known(mean_of([part.sources for part in known], 100), covers)


def mean_of(sources: Sequence[Sequence[Source]], scale: float = 1) -> list[Source]:
    """The variances of the mean of k independent estimates, each times `scale`; empty if one has none."""
    share = (scale / len(sources)) ** 2
    known = [source._replace(variance=source.variance * share) for each in sources for source in each]
    return known if all(sources) else []


def grid(models: Sequence[Model], digits: int | None) -> Grid:
    """A row for each task that all models have, and two for their average; each model against the first.

    Raises ValueError where no task is shared.
    """
    tasks, left_out = shared(models)
    first, *others = ([model.tasks[name] for name in tasks] for model in models)
    known = [[of_task(*pair) for pair in zip(other, first, strict=True)] for other in others]
    apart = [[a.score - b.score for a, b in zip(other, first, strict=True)] for other in others]
    tests = [list(map(difference, *pair)) for pair in zip(apart, known, strict=True)]
    corrected = iter(holm([test.p for every in tests for test in every if test.p is not None]))
    p = [[None if test.p is None else next(corrected) for test in every] for every in tests]
    lines = []
    for i, name in enumerate(tasks):
        scores = [scored([scores[i]], digits) for scores in (first, *others)]
        cells = [cell for t, q in zip(tests, p, strict=True) for cell in difference_cells(t[i], digits, q[i])]
        covers = " | ".join(dict.fromkeys(each[i].covers for each in known))
        lines.append([name, *scores, *cells, covers])
    lines += averages([first, *others], apart, known, digits)
    legend = [f"{i}: {model.path}" for i, model in enumerate(models, 1)]
    told = [verdict(i, tests[i - 2], p[i - 2]) for i in range(2, len(models) + 1)]
    many = sum(q is not None for each in p for q in each)
    marks = (
        f"p of tasks corrected for {many} tests by Holm's method, of averages not; * p < 0.05, ** p < 0.01"
    )
    headers = [*headed(len(models)), "the interval covers other"]
    notes = [*legend, *told, *left_out, *LEGEND, marks]
    return Grid("mteb: main score x 100", headers, lines, notes, range(1, len(headers) - 1))


def shared(models: Sequence[Model]) -> tuple[list[str], list[str]]:
    """The tasks that all models were evaluated on with the same data, and a note of those left out."""
    names = dict.fromkeys(name for model in models for name in model.tasks)
    same = [
        name
        for name in names
        if len({(t.revision, *sorted(t.parts)) if (t := m.tasks.get(name)) else None for m in models}) == 1
    ]
    if not same:
        raise ValueError(
            f"compare: {' and '.join(str(m.path) for m in models)} share no task on the same data"
        )
    rest = [name for name in names if name not in same]
    why = "not every model has them, with the same revision, splits and subsets"
    return same, [f"left out: {', '.join(rest)}: {why}"] if rest else []


def difference(apart: float, known: Known) -> Comparison:
    """A difference, tested; with neither p nor an interval where nothing is known of its variance."""
    return tested(apart, known.sources) if known.sources else Comparison(apart, np.nan, np.nan, None)


def scored(tasks: Sequence[Scored], digits: int | None) -> str:
    """The mean score of tasks with its 95 % interval, as text."""
    score = float(np.mean([task.score for task in tasks]))
    sources = mean_of([of_task(task, None).sources for task in tasks])
    ends = tested(score, sources)[1:3] if sources else None
    return with_interval(score, *bounds(ends), digits)


def averages(
    models: Sequence[Sequence[Scored]],
    apart: Sequence[Sequence[float]],
    known: Sequence[Sequence[Known]],
    digits: int | None,
) -> list[list[str]]:
    """The two rows of the average, of these tasks and of tasks like these; none for one task."""
    if len(models[0]) < 2:
        return []
    these, like = [], []
    for differences, each in zip(apart, known, strict=True):
        mean = float(np.mean(differences))
        together = Known(mean_of([task.sources for task in each]), "")
        these += difference_cells(difference(mean, together), digits)
        like += difference_cells(tested(mean, [of_mean(differences)]), digits)
    scores = [scored(tasks, digits) for tasks in models]
    covers = " | ".join(dict.fromkeys(task.covers for each in known for task in each))
    return [
        ["average, these tasks", *scores, *these, covers],
        ["average, tasks like these", *[""] * len(models), *like, "tasks"],
    ]


def verdict(i: int, tests: Sequence[Comparison], p: Sequence[float | None]) -> str:
    """In words, on how many tasks model i differs from the first."""
    sure = [test.difference > 0 for test, q in zip(tests, p, strict=True) if q is not None and q < ALPHA]
    untold = sum(q is None for q in p)
    unsaid = f", of {untold} nothing can be said" if untold else ""
    rest = len(p) - len(sure) - untold
    worse = len(sure) - sum(sure)
    return f"{i} is better than 1 on {sum(sure)} tasks, worse on {worse}, not separable on {rest}{unsaid}"

"""The tables and figures of the three papers, and beside each number the scores of the given runs.

A run is a directory of evaluate.py: its scores.json, and the config.yaml of the train run that made its
model, where there is one. published.json says which rows a paper cites and which it ran itself, and for the
latter the command and the properties (`match`) that a run must have to stand beside the row.

WhitenedCSE, arXiv:2305.17746    WhiteningBERT, arXiv:2104.01767    BERT-whitening, arXiv:2103.15316
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from omegaconf import OmegaConf

from whitenedcse.app.run import Run
from whitenedcse.app.terminal import Grid
from whitenedcse.evaluation.sts import MEANS
from whitenedcse.report.plots import best
from whitenedcse.report.results import meaning, number

STS = ("STS12", "STS13", "STS14", "STS15", "STS16", "STS-B", "SICK-R")
# conf/system: what the paper has rows for; the others differ in more than a row's `match` compares
PAPER = (None, "simcse", "multi_positive", "multi_positive_4", "sgw", "whitenedcse", "group", "pca", "zca")
TRANSFER = ("MR", "CR", "SUBJ", "MPQA", "SST2", "TREC", "MRPC")


class Evaluation(NamedTuple):
    """A run of evaluate.py: directory, scores, and the settings its model was trained with, or None."""

    path: Path
    scores: dict[str, Any]
    config: dict[str, Any] | None


class Scored(NamedTuple):
    """The scores of a model by task, and the run directories that they come from."""

    tasks: dict[str, float]
    paths: tuple[str, ...]


def tables() -> dict[str, Any]:
    """The content of published.json: a table or figure for each key."""
    return json.loads(Path(__file__).with_name("published.json").read_text())


def names() -> dict[str, str]:
    """For each key of `tables` a line on what it shows and where it was published."""
    return {key: f"{table['title']} ({table['source']})" for key, table in tables().items()}


def report(key: str, runs: Iterable[str | Path] = (), aliases: Mapping[str, str] | None = None) -> Grid:
    """A published table with our numbers below its own, and the commands for those that are missing.

    runs: directories of evaluate.py, or folders that contain some. Several models of a row (seeds) are
    averaged. aliases: {"bert-base-uncased": "DIR"} lets this run, or the runs of this model, stand for that
    encoder (or experiment). Raises ValueError for a key that does not exist or an alias that matches no run.
    """
    every = tables()
    if key not in every:
        near = difflib.get_close_matches(key, every, n=3, cutoff=0.0)
        raise ValueError(f"no published table {key!r}; the nearest are {', '.join(near)}")
    table, evaluations, aliases = every[key], evaluations_in(runs), aliases or {}
    refuse_unused(aliases, table["rows"], evaluations)
    rows: list[tuple[str, ...]] = []
    notes: list[str] = []
    missing: dict[str, list[str]] = {}
    for row in table["rows"]:
        models = measured(row, evaluations, table["aggregation"], aliases)
        rows += block(row, table["columns"], models)
        if models:
            notes.append(account(row["label"], table["columns"], models))
        elif row["command"]:
            missing.setdefault(row["command"], []).append(row["label"])
    notes += [f"to make {'; '.join(labels)}: {command}" for command, labels in missing.items()]
    notes, columns = (
        [*heading(table), *notes, *unread(table["rows"], evaluations)],
        ("row", "", *table["columns"]),
    )
    return Grid(f"{key}: {table['title']}", columns, rows, notes, range(2, len(columns)))


def heading(table: Mapping[str, Any]) -> list[str]:
    """The notes of a table: where it was published, and what its numbers are."""
    how = f"; {meaning(table['aggregation'])}" if table["aggregation"] else ""
    return [f"{table['source']}. {table['metric']}{how}.", *table["notes"]]


def evaluations_in(paths: Iterable[str | Path]) -> list[Evaluation]:
    """The runs of evaluate.py in directories or below them, oldest first.

    Raises FileNotFoundError or ValueError, naming the path, where there is none or it has no scores of tests;
    below a directory, runs of train.py are ignored.
    """
    runs: dict[Path, Evaluation] = {}
    for path in map(Path, paths):
        alone = (path / "scores.json").is_file()
        files = [path / "scores.json"] if alone else sorted(path.rglob("scores.json"))
        inside = [run for run in map(read, files) if alone or "rows" in run.scores]
        if not inside:
            raise FileNotFoundError(
                f"no run of evaluate.py in {path}: python evaluate.py model=MODEL makes one"
            )
        if "rows" not in inside[0].scores:
            raise ValueError(f"{path} was not evaluated on tests: first python evaluate.py model={path}")
        runs |= {run.path.resolve(): run for run in inside}
    return sorted(runs.values(), key=lambda run: (run.path / "scores.json").stat().st_mtime)


def read(file: Path) -> Evaluation:
    """A scores.json, with the settings that its model was trained with."""
    scores = Run(file.parent).scores or {}
    return Evaluation(file.parent, scores, training(scores.get("model", ""), file.parent))


def training(model: str, path: Path) -> dict[str, Any] | None:
    """The settings of the train run of a model, or None; its path may be relative to a parent of `path`."""
    bases = (Path(), *path.resolve().parents) if model else ()
    return next((run.settings for base in bases if (run := Run.of(base / model))), None)


def measured(
    row: Mapping[str, Any], runs: Iterable[Evaluation], aggregation: str | None, aliases: Mapping[str, str]
) -> list[Scored]:
    """The scores of each model that stands for a row; those of a later run replace and complete earlier ones.

    A model is its path and its seed, so that evaluating one twice does not count it twice.
    """
    models: dict[tuple[str, int | None], Scored] = {}
    for run in runs:
        for scored in standing(row["match"], run, aliases) if row["match"] else ():
            if tasks := by_task(scored, aggregation):
                model = (run.scores["model"], run.scores.get("seed"))
                before = models.get(model, Scored({}, ()))
                models[model] = Scored(before.tasks | tasks, (*before.paths, str(run.path)))
    return list(models.values())


def standing(
    match: Mapping[str, Any], run: Evaluation, aliases: Mapping[str, str]
) -> Iterator[dict[str, Any]]:
    """The rows of a run's scores.json that stand for a published one."""
    settings, config = match.get("config", {}).items(), run.config
    same = config is not None and all(
        OmegaConf.select(OmegaConf.create(config), k) == value for k, value in settings
    )
    same_way = run.scores["protocol"] == match["protocol"] and run.scores.get("system") in PAPER
    right = same_way and called(wanted(match), run, aliases)
    if right and "figure" in match:
        file, layers = run.path / match["figure"], match.get("layers")
        yield {"sts": {"tasks": {"Avg": {mean: best(file, mean, layers) for mean in MEANS}}}}
    elif right and (same or "config" not in match):
        for row in run.scores["rows"]:
            if row["name"] == match["row"] and match.get("pooling", row["pooling"]) == row["pooling"]:
                yield row


def wanted(match: Mapping[str, Any]) -> list[str]:
    """The encoder, or the experiments, that may stand for a row."""
    return [match["model"]] if "model" in match else match["experiment"]


def called(names: Iterable[str], run: Evaluation, aliases: Mapping[str, str]) -> bool:
    """Whether one of `names` is the experiment of a run or, if it has none, its encoder; or an alias of it.

    The name of an encoder is the last part of its path or hub id.
    """
    own = run.scores.get("experiment") or Path(run.scores["model"]).name
    return any(own == name or (name in aliases and answers(aliases[name], run)) for name in names)


def answers(alias: str, run: Evaluation) -> bool:
    """Whether an alias is this run's directory or its model."""
    return Path(alias).resolve() in (run.path.resolve(), Path(run.scores["model"]).resolve())


def refuse_unused(
    aliases: Mapping[str, str], rows: Iterable[Mapping[str, Any]], runs: Iterable[Evaluation]
) -> None:
    """Raise ValueError for an alias of a name that no row asks for, or to a path that is none of the runs."""
    asked = sorted({name for row in rows if row["match"] for name in wanted(row["match"])})
    for name, alias in aliases.items():
        if name not in asked:
            raise ValueError(f"no row asks for {name!r}; the rows ask for {', '.join(asked) or 'no model'}")
        if not any(answers(alias, run) for run in runs):
            raise ValueError(f"{name}={alias}: none of the runs is in {alias} or evaluates that model")


def by_task(row: Mapping[str, Any], aggregation: str | None) -> dict[str, float]:
    """The scores in a row of scores.json: correlations in one aggregation, or accuracies for None."""
    if aggregation:
        tasks = {name: task[aggregation] for name, task in row.get("sts", {}).get("tasks", {}).items()}
    else:
        accuracies = row.get("transfer", {}).get("tasks", {}) | ({"RTE": row["rte"]} if "rte" in row else {})
        tasks = {name: task["accuracy"] for name, task in accuracies.items()}
    return {name: value for name, value in tasks.items() if value is not None}


def cell(column: str, tasks: Mapping[str, float]) -> float | None:
    """The score of a task; "Avg" is the mean over the papers' seven, None if one of them is missing."""
    if column != "Avg" or "Avg" in tasks:
        return tasks.get(column)
    seven = TRANSFER if TRANSFER[0] in tasks else STS
    return fmean(tasks[name] for name in seven) if all(name in tasks for name in seven) else None


def over_models(columns: Iterable[str], models: list[Scored]) -> Iterator[list[float]]:
    """For each column the scores of all models; empty unless all have one, so that means are comparable."""
    for column in columns:
        values = [cell(column, model.tasks) for model in models]
        yield [] if None in values else [value for value in values if value is not None]


def block(row: Mapping[str, Any], columns: list[str], models: list[Scored]) -> list[tuple[str, ...]]:
    """The lines of a row: published or cited, and, where there are runs, ours and the difference."""
    label, theirs = row["label"], row["values"]
    lines = [(label, "cited" if row["cited"] else "published", *map(number, theirs))]
    if models:
        ours = [round(fmean(values), 2) if values else None for values in over_models(columns, models)]
        lines.append((label, "ours", *map(number, ours)))
        lines.append((label, "difference", *map(difference, ours, theirs)))
    return lines


def difference(ours: float | None, theirs: float | None) -> str:
    """The difference of two numbers with its sign, as text; "-" if one is missing."""
    return "-" if ours is None or theirs is None else f"{ours - theirs:+.2f}"


def account(label: str, columns: list[str], models: list[Scored]) -> str:
    """A note on the runs that "ours" comes from; for several models also their number and the deviation."""
    source = ", ".join(dict.fromkeys(path for model in models for path in model.paths))
    if len(models) == 1:
        return f"ours, {label}: {source}"
    spread = zip(columns, over_models(columns, models), strict=True)
    sd = ", ".join(f"{column} {stdev(values):.2f}" for column, values in spread if values)
    return f"ours, {label}: mean of n = {len(models)} (sd: {sd or '-'}): {source}"


def unread(rows: Iterable[Mapping[str, Any]], runs: Iterable[Evaluation]) -> list[str]:
    """A note on each run that stands for no row only because its model's settings are not found."""
    matches = [row["match"] for row in rows if row["match"] and "config" in row["match"]]
    asked = {name for match in matches for name in wanted(match)}
    lost = [run for run in runs if run.config is None and run.scores.get("experiment") in asked]
    return [f"left out {run.path}: no config.yaml of its model {run.scores['model']}" for run in lost]

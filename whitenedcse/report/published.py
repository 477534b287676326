"""The tables and figures of the three papers, and beside each number the scores of the given runs.

published.json holds, for each row that a paper made itself, the command that makes it and the conditions
under which it was made: encoder, corpus, head, views, pooling, protocol, what a transform is fitted to and
more. A run fills a row if it agrees with all of them; one that differs in little is shown beside it with what
differs.

WhitenedCSE, arXiv:2305.17746    WhiteningBERT, arXiv:2104.01767    BERT-whitening, arXiv:2103.15316
"""

from __future__ import annotations

import csv
import difflib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from whitenedcse.console import Grid
from whitenedcse.report.conditions import Evaluation, conditions, content, differences, found, training
from whitenedcse.report.results import meaning, number
from whitenedcse.run import Run

STS = ("STS12", "STS13", "STS14", "STS15", "STS16", "STS-B", "SICK-R")
TRANSFER = ("MR", "CR", "SUBJ", "MPQA", "SST2", "TREC", "MRPC")
NEAR = 3  # differences, up to which a run is shown beside a row


class Scored(NamedTuple):
    """The scores by column of a model for a row, the run directories they come from, and what differs."""

    values: dict[str, float]
    paths: tuple[str, ...]
    differences: tuple[str, ...] = ()


class Made(NamedTuple):
    """A row of a run's scores, and the conditions under which it was made."""

    run: Evaluation
    row: Mapping[str, Any]
    conditions: Mapping[str, Any]


def tables() -> dict[str, Any]:
    """The published tables and figures by key."""
    return content()["tables"]


def names() -> dict[str, str]:
    """For each key of `tables` a line on what it shows and where it was published."""
    return {key: f"{table['title']} ({table['source']})" for key, table in tables().items()}


def report(key: str, runs: Iterable[str | Path] = (), aliases: Mapping[str, str] | None = None) -> Grid:
    """A published table with our numbers below its own, and the commands for those that are missing.

    runs: directories of evaluate.py, or folders that may contain some. Several seeds of a row are averaged.
    aliases: {"bert-base-uncased": "DIR"} says that the encoder in DIR is that one, which its architecture
    must confirm. Raises ValueError for a key that does not exist or an alias that no row asks for.
    """
    every = tables()
    if key not in every:
        near = difflib.get_close_matches(key, every, n=3, cutoff=0.0)
        raise ValueError(f"no published table {key!r}; the nearest are {', '.join(near)}")
    table, aliases = every[key], aliases or {}
    refuse_unused(aliases, table["rows"])
    made = [Made(run, row, found(run, row)) for run in evaluations_in(runs) for row in run.scores["rows"]]
    possible = {
        row["label"]: list(candidates(row, table, made, aliases)) if row["conditions"] else []
        for row in table["rows"]
    }
    own = {label: fitting(every) for label, every in possible.items()}
    beside = nearest(possible, [label for label, models in own.items() if not models])
    rows: list[tuple[str, ...]] = []
    notes: list[str] = []
    missing: dict[str, list[str]] = {}
    for row in table["rows"]:
        label, models = row["label"], own[row["label"]]
        rows += block(row, table["columns"], models, beside.get(label, []))
        notes += [account(label, table["columns"], models)] if models else []
        for other in beside.get(label, []):
            notes.append(f"near miss, {label}: {other.paths[0]}: {'; '.join(other.differences)}")
        if row["command"] and not models:
            missing.setdefault(row["command"], []).append(label)
    notes += without_effect(aliases, made)
    columns, notes = ("row", "", *table["columns"]), [*heading(table), *notes]
    return Grid(f"{key}: {table['title']}", columns, rows, notes, range(2, len(columns)), missing)


def heading(table: Mapping[str, Any]) -> list[str]:
    """The notes of a table: where it was published, and what its numbers are."""
    how = f"; {meaning(table['aggregation'])}" if table["aggregation"] else ""
    return [f"{table['source']}. {table['metric']}{how}.", *table["notes"]]


def evaluations_in(paths: Iterable[str | Path]) -> list[Evaluation]:
    """The runs with scores of tests in directories or below them, oldest first.

    Raises FileNotFoundError for a path that does not exist, and ValueError for a directory of a run that was
    not evaluated on tests.
    """
    runs: dict[Path, Evaluation] = {}
    for path in map(Path, paths):
        if not path.exists():
            raise FileNotFoundError(
                f"{path}: no such directory; whitenedcse evaluate model=MODEL makes a run"
            )
        for file in [path / "scores.json"] if (path / "scores.json").is_file() else path.rglob("scores.json"):
            scores = Run(file.parent).scores or {}
            if "rows" in scores:
                trained = training(scores["model"], file.parent)
                runs[file.parent.resolve()] = Evaluation(file.parent, scores, trained)
            elif file.parent == path:
                raise ValueError(
                    f"{path} was not evaluated on tests: first whitenedcse evaluate model={path}"
                )
    return sorted(runs.values(), key=lambda run: (run.path / "scores.json").stat().st_mtime)


def candidates(
    row: Mapping[str, Any], table: Mapping[str, Any], made: Iterable[Made], aliases: Mapping[str, str]
) -> Iterator[tuple[Made, Scored]]:
    """The rows of scores that might stand for a published row, each with its scores and what differs.

    What a published row reads from a file of a run stands beside all rows of the run: the nearest has it.
    """
    wanted, once = conditions(row), row["conditions"].get("file") not in (None, "geometry")
    found: dict[Any, tuple[Made, Scored]] = {}
    for one in made:
        if all(one.conditions[name] == wanted[name] for name in ("trained", "transform")):
            values = read(row["conditions"], table, one.run, one.row)
            if any(cell(column, values) is not None for column in table["columns"]):
                differ = differences(wanted, one.conditions, aliases)
                key = one.run.path if once else (one.run.path, one.row["name"])
                if key not in found or len(differ) < len(found[key][1].differences):
                    found[key] = one, Scored(values, (str(one.run.path),), tuple(differ))
    yield from found.values()


def fitting(candidates: Iterable[tuple[Made, Scored]]) -> list[Scored]:
    """The scores of each model that fills a row: a seed of a trained one counts once, the later run first.

    A later run replaces and completes the scores of an earlier one.
    """
    models: dict[int | None, Scored] = {}
    for (run, _, _), scored in candidates:
        if not scored.differences:
            seed = run.scores.get("seed") if run.trained else None
            before = models.get(seed, Scored({}, ()))
            models[seed] = Scored(before.values | scored.values, before.paths + scored.paths)
    return list(models.values())


def nearest(every: Mapping[str, list[tuple[Made, Scored]]], empty: Iterable[str]) -> dict[str, list[Scored]]:
    """Of the candidates by label, those near to rows that none fills; each beside its nearest row alone."""
    best: dict[tuple[Path, str], tuple[str, Scored]] = {}
    for label, candidates in every.items():
        for made, scored in candidates:
            key = (made.run.path, made.row["name"])
            if key not in best or len(scored.differences) < len(best[key][1].differences):
                best[key] = (label, scored)
    near: dict[str, list[Scored]] = {}
    for label, scored in best.values():
        if label in empty and 0 < len(scored.differences) <= NEAR:
            near.setdefault(label, []).append(scored)
    return near


def read(
    wanted: Mapping[str, Any], table: Mapping[str, Any], run: Evaluation, row: Mapping[str, Any]
) -> dict[str, float]:
    """The scores of a run by column of a table: of a row of scores.json, or of a file of the run."""
    file, mean = wanted.get("file"), table["aggregation"]
    if file == "dev" and run.trained and run.trained.scores:
        dev = run.trained.scores["dev"]["values_best"]
        values = {name: dev.get(f"dev/{name}") for name in table["columns"]}
    elif file == "diversity" and run.trained:
        series = run.trained.series
        values = {
            n: float(s.values[-1]) for n in table["columns"] if (s := series.get(f"train/diversity_{n}"))
        }
    elif file == "geometry" and (run.path / "projection.csv").is_file():
        values = {name: row["geometry"][name] for name in table["columns"] if name in row.get("geometry", {})}
    elif file:
        values = drawn(run.path / file, mean, wanted.get("where", {}))
    elif mean:
        values = {name: task[mean] for name, task in row.get("sts", {}).get("tasks", {}).items()}
    else:
        accuracies = row.get("transfer", {}).get("tasks", {}) | ({"RTE": row["rte"]} if "rte" in row else {})
        values = {name: task["accuracy"] for name, task in accuracies.items()}
    return {name: value for name, value in values.items() if value is not None}


def drawn(file: Path, mean: str, where: Mapping[str, str]) -> dict[str, float]:
    """The best score of each task in the CSV of a figure, and as "Avg" the best average over the seven sets.

    where: {column: cell} leaves out other records. Empty without a file.
    """
    if not file.is_file():
        return {}
    with file.open(newline="", encoding="utf-8") as stream:
        records = [record for record in csv.DictReader(stream) if record[mean]]
    chosen = [record for record in records if all(record[k] == v for k, v in where.items())]
    tasks = {record["task"] for record in records}
    best: dict[str, float] = {}
    for record in chosen:
        name = "Avg" if record["task"] == "average" else record["task"]
        best[name] = max(best.get(name, -100.0), float(record[mean]))
    return {name: value for name, value in best.items() if name != "Avg" or tasks == {*STS, "average"}}


def refuse_unused(aliases: Mapping[str, str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Raise ValueError for an alias of an encoder that no row asks for, or to a path that does not exist."""
    asked = sorted({row["conditions"]["encoder"] for row in rows if row["conditions"]})
    for name, alias in aliases.items():
        if name not in asked:
            raise ValueError(f"no row asks for {name!r}; the rows ask for {', '.join(asked) or 'no model'}")
        if not Path(alias).is_dir():
            raise ValueError(f"{name}={alias}: {alias} is no directory")


def without_effect(aliases: Mapping[str, str], made: Iterable[Made]) -> Iterator[str]:
    """A note for each alias that no run has, or whose architecture is not that of what it stands for."""
    encoders = [encoder for one in made if (encoder := one.conditions["encoder"])]
    for name, alias in aliases.items():
        own = {e["architecture"] for e in encoders if Path(e["path"]).resolve() == Path(alias).resolve()}
        if (wanted := content()["encoders"][name]) not in own:
            why = f"it is {own.pop()}, not {wanted}" if own else "no run here is of it"
            yield f"--as {name}={alias} has no effect: {why}"


def cell(column: str, values: Mapping[str, float]) -> float | None:
    """The score of a column; "Avg" is the mean over the papers' seven, None if one of them is missing."""
    if column != "Avg" or "Avg" in values:
        return values.get(column)
    seven = TRANSFER if TRANSFER[0] in values else STS
    return fmean(values[name] for name in seven) if all(name in values for name in seven) else None


def over_models(columns: Iterable[str], models: list[Scored]) -> Iterator[list[float]]:
    """For each column the scores of all models; empty unless all have one, so that means are comparable."""
    for column in columns:
        values = [cell(column, model.values) for model in models]
        yield [] if None in values else [value for value in values if value is not None]


def block(
    row: Mapping[str, Any], columns: list[str], models: list[Scored], near: Iterable[Scored]
) -> list[tuple[str, ...]]:
    """The lines of a row: published or cited; where there are runs, ours and the difference; near misses."""
    label, theirs = row["label"], row["values"]
    lines = [(label, "cited" if row["cited"] else "published", *map(number, theirs))]
    if models:
        ours = [round(fmean(values), 2) if values else None for values in over_models(columns, models)]
        lines.append((label, "ours", *map(number, ours)))
        lines.append((label, "difference", *map(difference, ours, theirs)))
    for other in near:
        lines.append((label, "near miss", *(number(cell(column, other.values)) for column in columns)))
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

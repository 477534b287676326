"""The tables and figures of the three papers, and beside each number the scores of the given runs.

published.json holds, for each row that a paper made itself, the command that makes it. A run fills a row if
it was made under the conditions that this command composes to: settings of training, encoder, protocol,
pooling, transform and what it was fitted to. One that differs in little is shown with what differs.

WhitenedCSE, arXiv:2305.17746    WhiteningBERT, arXiv:2104.01767    BERT-whitening, arXiv:2103.15316
"""

from __future__ import annotations

import csv
import json
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from whitenedcse.console import Grid, override
from whitenedcse.evaluation.protocol import particular
from whitenedcse.evaluation.tasks import OWN
from whitenedcse.report.tables import meaning, number
from whitenedcse.run import Run, as_yaml, flat

STS = ("STS12", "STS13", "STS14", "STS15", "STS16", "STS-B", "SICK-R")
TRANSFER = ("MR", "CR", "SUBJ", "MPQA", "SST2", "TREC", "MRPC")
NEAR = 3  # differences, up to which a run is shown beside a row
ABSENT = "not recorded"  # which null is not: a head without a whitening has head.whitening=null
TRAINING = (  # settings, and groups of settings, that decide what is trained
    *("data", "pooling", "head", "loss", "terms", "optim", "mlm", "views", "embedding", "gather"),
    *("encoder.lora", "trainer.max_epochs", "trainer.max_steps", "trainer.gradient_clip_val"),
    *("trainer.accumulate_grad_batches", "monitor.dev", "monitor.every"),
)
OWNERS = ("google-bert", "FacebookAI", "distilbert", "albert")  # of hub ids that had none before
Compose = Callable[[str, int], Mapping[str, Any]]  # the settings of a command, of a sweep those of one job


class Made(NamedTuple):
    """A row of a run's scores, the run of train.py that made its model, if one did, and its conditions."""

    path: Path
    scores: Mapping[str, Any]
    trained: Run | None
    row: Mapping[str, Any]
    conditions: Mapping[str, Any]


class Candidate(NamedTuple):
    """A row of a run's scores that may stand for a published row: by column, and what differs."""

    made: Made
    values: dict[str, float]
    differences: list[str]


class Ours(NamedTuple):
    """The scores by column of a model that fills a published row, and the runs that they come from."""

    values: dict[str, float]
    paths: list[Path]


@cache
def content() -> dict[str, Any]:
    """published.json: `tables` by key, and the architecture of each of `encoders` by hub id."""
    return json.loads(Path(__file__).with_name("published.json").read_text())


def tables() -> dict[str, Any]:
    """The published tables and figures by key."""
    return content()["tables"]


def names() -> dict[str, str]:
    """For each key of `tables` a line on what it shows and where it was published."""
    return {key: f"{table['title']} ({table['source']})" for key, table in tables().items()}


def report(key: str, compose: Compose, runs: Iterable[str | Path] = ()) -> Grid:
    """A published table with our numbers below its own, and as notes the commands of those that are missing.

    runs: directories of evaluate.py, or folders that may contain some. Several seeds of a row are averaged.
    Raises ValueError for a key that does not exist.
    """
    if key not in tables():
        raise ValueError(f"no published table {key!r}; whitenedcse report --list names them")
    table, made = tables()[key], list(rows_in(runs))
    columns: list[str] = table["columns"]
    possible = {row["label"]: candidates(row, table, made, compose) for row in table["rows"]}
    own = {label: filling(every) for label, every in possible.items()}
    near = nearest(possible)
    how = f"; {meaning(table['aggregation'])}" if table["aggregation"] else ""
    notes = [f"{table['source']}. {table['metric']}{how}.", *table["notes"]]
    rows: list[tuple[str, ...]] = []
    missing: dict[str, list[str]] = {}
    for row in table["rows"]:
        label = row["label"]
        rows.append((label, "cited" if row["cited"] else "published", *map(number, row["values"])))
        if own[label]:
            rows += compared(row, columns, own[label])
            notes.append(account(label, columns, own[label]))
            continue
        for one in near.get(label, []):
            rows.append((label, "near miss", *(number(cell(column, one.values)) for column in columns)))
            notes.append(f"near miss, {label}: {one.made.path}: {'; '.join(one.differences)}")
        if row["command"]:
            missing.setdefault(row["command"], []).append(label)
    head = ("row", "", *columns)
    notes += [f"to make {'; '.join(labels)}:\n  {command}" for command, labels in missing.items()]
    return Grid(f"{key}: {table['title']}", head, rows, notes, range(2, len(head)))


def asked(published: Mapping[str, Any], compose: Compose) -> dict[str, Any]:
    """The conditions of a published row: those of the row of scores that its command makes."""
    parts = [part for part in published["command"].split(" && ") if part.startswith("python")]
    commands = {part.split()[1]: part for part in parts}  # by train.py and evaluate.py
    words = shlex.split(commands.get("evaluate.py", "python evaluate.py"))
    model = next((word.removeprefix("model=") for word in words if word.startswith("model=")), None)
    test = compose(shlex.join(word for word in words if not word.startswith("model=")), 0)
    pooling, layers = test.get("pooling") or {}, test["layers"]
    named: dict[str, Any] = {"encoder": model, "trained": "train.py" in commands}
    if "train.py" in commands:
        settings = compose(commands["train.py"], published.get("job", 0))
        pooling, layers = settings["pooling"], None
        named |= of_training(settings) | {"encoder": settings["encoder"]["path"]}
    protocol = test["protocol"]
    row = next(row for row in protocol["rows"] if row["name"] == published.get("row", "as it is"))
    kind = row.get("pooling", pooling.get("kind"))
    layers = row.get("layers", layers or pooling.get("layers"))
    made = {
        "pooling": f"{kind} over layers {layers}",
        "postprocess": row.get("map"),
        "fit": row.get("fit", ""),
    }
    facts = {**protocol, "protocol": protocol["name"]}
    facts |= {name: test[name] for name in ("bf16", "prompt", "sample")}
    transfer = set(test["tasks"]["names"]) & set(TRANSFER)
    return named | of_evaluation(facts, made, test["classifier"] if transfer else None)


def found_in(scores: Mapping[str, Any], row: Mapping[str, Any], trained: Run | None) -> dict[str, Any]:
    """The conditions under which a row of a run's scores was made, by the same names as in `asked`."""
    named = {"encoder": scores.get("encoder"), "trained": bool(trained)}
    if trained:
        named |= of_training(trained.settings)
    return named | of_evaluation(scores, row, scores.get("classifier") if "transfer" in row else None)


def of_evaluation(facts: Mapping[str, Any], row: Mapping[str, Any], classifier: str | None) -> dict[str, Any]:
    """The conditions of an evaluation, those of a part only where it is read. facts: of all its rows."""
    transform, fit = row["postprocess"] or {}, row["fit"]
    named = {name: facts.get(name) for name in ("protocol", "case", "max_length", "extra", "bf16")}
    named |= {"prompt": facts.get("prompt") or None, "pooling": row["pooling"]}
    named |= {"transform": transform.get("kind"), "fit": fit}
    if transform:
        named |= {"k": transform.get("k"), **particular(transform)}
    if fit and fit not in OWN:
        named["sample"] = facts.get("sample")
    if classifier:
        named["classifier"] = classifier
    return named


def of_training(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a run of train.py that decide what is trained, by their dotted names."""
    inside = tuple(f"{part}." for part in TRAINING)
    free = ("data.seed", "_partial_", "_convert_")
    return {
        name: value
        for name, value in flat(settings).items()
        if (name in TRAINING or name.startswith(inside)) and not name.endswith(free)
    }


def rows_in(paths: Iterable[str | Path]) -> Iterator[Made]:
    """The rows of the runs with scores of tests in directories or below them, oldest run first."""
    runs: dict[Path, Run] = {}
    for path in map(Path, paths):
        if not path.exists():
            raise FileNotFoundError(
                f"{path}: no such directory; whitenedcse evaluate model=MODEL makes a run"
            )
        alone = (path / "scores.json").is_file()
        found = [Run(path)] if alone else [Run(file.parent) for file in path.rglob("scores.json")]
        tested = {run.path.resolve(): run for run in found if "rows" in (run.scores or {})}
        if alone and not tested:
            raise ValueError(
                f"{path} was not evaluated on tests: first whitenedcse evaluate {override('model', path)}"
            )
        runs |= tested
    for run in sorted(runs.values(), key=lambda run: (run.path / "scores.json").stat().st_mtime):
        trained = training(run.results["model"], run.path)
        for row in run.results["rows"]:
            yield Made(run.path, run.results, trained, row, found_in(run.results, row, trained))


def training(model: str, path: Path) -> Run | None:
    """The run of train.py that made a model: at `path`, or where the model is, relative to a parent of it."""
    places = (path, *(base / model for base in (Path(), *path.resolve().parents)))
    return next(filter(None, map(Run.of, places)), None)


def candidates(
    row: Mapping[str, Any], table: Mapping[str, Any], made: Iterable[Made], compose: Compose
) -> list[Candidate]:
    """The rows of scores that might stand for a published row, each with its scores and what differs.

    What is read from a file of a run is the same for all rows of the run: the nearest of them has it.
    """
    trains = "train.py" in (row["command"] or "")
    same = [one for one in made if row["command"] and one.conditions["trained"] == trains]
    if not same:
        return []
    wanted = asked(row, compose)  # takes a third of a second
    found: dict[Any, Candidate] = {}
    for one in same:
        values = read(row, table, one)
        if one.conditions["transform"] != wanted["transform"] or not any(
            cell(column, values) is not None for column in table["columns"]
        ):
            continue
        differ = list(differences(wanted, one.conditions))
        of_run = row.get("file") not in (None, "geometry")
        key = one.path if of_run else (one.path, one.row["name"])
        if key not in found or len(differ) < len(found[key].differences):
            found[key] = Candidate(one, values, differ)
    return list(found.values())


def differences(wanted: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[str]:
    """What differs between the conditions of a published row and those found, in words."""
    if not is_encoder(wanted["encoder"], here["encoder"]):
        own = here["encoder"] or {"path": ABSENT, "architecture": None}
        yield f"encoder={own['path']} ({own['architecture']}), the row has {wanted['encoder']}"
    for name in dict.fromkeys([*wanted, *here]):
        a, b = here.get(name, ABSENT), wanted.get(name, ABSENT)
        if a != b and name != "encoder" and not follows(name, wanted, here):
            yield f"{name}={as_yaml(a)}, the row has {'none' if b == ABSENT else as_yaml(b)}"


def follows(name: str, wanted: Mapping[str, Any], here: Mapping[str, Any]) -> bool:
    """Whether a difference in a condition follows from that in another, or is of other tasks."""
    if name == "sample":  # none is read where the fit is to the task's own sentences
        return here.get("fit") in OWN
    if name == "classifier":  # of tasks that the run has besides
        return name not in wanted
    parts = name.split(".")
    above = [".".join(parts[:i]) for i in range(1, len(parts))]  # null, where one of both has no such part
    return any(side.get(part, ABSENT) is None for part in above for side in (wanted, here))


def is_encoder(name: str, here: Mapping[str, Any] | None) -> bool:
    """Whether an encoder is the one with this hub id: from the hub, or a directory of that name and shape."""
    if here is None:
        return False
    if here["commit"]:
        return str(here["path"]) in (name, *(f"{owner}/{name}" for owner in OWNERS))
    same = Path(here["path"]).name == Path(name).name
    return same and here["architecture"] == content()["encoders"][name]


def filling(every: Iterable[Candidate]) -> list[Ours]:
    """The scores of each model that fills a row: each seed once; a later run completes an earlier one."""
    models: dict[int | None, Ours] = {}
    for one in every:
        if not one.differences:
            seed = one.made.scores.get("seed") if one.made.trained else None
            model = models.setdefault(seed, Ours({}, []))
            model.values.update(one.values)
            model.paths.append(one.made.path)
    return list(models.values())


def nearest(possible: Mapping[str, list[Candidate]]) -> dict[str, list[Candidate]]:
    """Of the candidates by label, those that differ in little; each beside its nearest row alone."""
    best: dict[tuple[Path, str], tuple[str, Candidate]] = {}
    for label, candidates in possible.items():
        for one in candidates:
            key = (one.made.path, one.made.row["name"])
            if key not in best or len(one.differences) < len(best[key][1].differences):
                best[key] = (label, one)
    near: dict[str, list[Candidate]] = {}
    for label, one in best.values():
        if 0 < len(one.differences) <= NEAR:
            near.setdefault(label, []).append(one)
    return near


def read(wanted: Mapping[str, Any], table: Mapping[str, Any], made: Made) -> dict[str, float]:
    """The scores by column of a table: of a row of scores.json, or of the file that a published row names."""
    file, mean, row = wanted.get("file"), table["aggregation"], made.row
    values: Mapping[str, float | None]
    if file == "dev" and made.trained and made.trained.scores:
        dev = made.trained.scores["dev"]["values_best"]
        values = {name: dev.get(f"dev/{name}") for name in table["columns"]}
    elif file == "diversity" and made.trained:
        series = {name: made.trained.series.get(f"train/diversity_{name}") for name in table["columns"]}
        values = {name: float(s.values[-1]) for name, s in series.items() if s}
    elif file == "geometry" and (made.path / "projection.csv").is_file():
        values = {name: row["geometry"][name] for name in table["columns"] if name in row.get("geometry", {})}
    elif file:
        values = drawn(made.path / file, mean, wanted.get("where", {}))
    elif mean:
        values = {name: task[mean] for name, task in row.get("sts", {}).get("tasks", {}).items()}
    else:
        accuracies = row.get("transfer", {}).get("tasks", {}) | ({"RTE": row["rte"]} if "rte" in row else {})
        values = {name: task["accuracy"] for name, task in accuracies.items()}
    return {name: value for name, value in values.items() if value is not None}


def drawn(file: Path, mean: str, where: Mapping[str, str]) -> dict[str, float]:
    """The best score of each task in the CSV of a figure, and as "Avg" the best average over the seven."""
    if not file.is_file():
        return {}
    with file.open(newline="", encoding="utf-8") as stream:
        records = [record for record in csv.DictReader(stream) if record[mean]]
    best: dict[str, float] = {}
    for record in records:
        if all(record[column] == value for column, value in where.items()):
            name = "Avg" if record["task"] == "average" else record["task"]
            best[name] = max(best.get(name, -100.0), float(record[mean]))
    tasks = {record["task"] for record in records}
    return {name: value for name, value in best.items() if name != "Avg" or tasks == {*STS, "average"}}


def cell(column: str, values: Mapping[str, float]) -> float | None:
    """The score of a column; "Avg" is the mean over the papers' seven, None if one of them is missing."""
    if column in values or column != "Avg":
        return values.get(column)
    seven = TRANSFER if TRANSFER[0] in values else STS
    return fmean(values[name] for name in seven) if all(name in values for name in seven) else None


def over_models(columns: Iterable[str], models: list[Ours]) -> Iterator[list[float]]:
    """For each column the scores of all models; empty unless all have one, so that means are comparable."""
    for column in columns:
        values = [cell(column, model.values) for model in models]
        yield [] if None in values else [value for value in values if value is not None]


def compared(row: Mapping[str, Any], columns: list[str], models: list[Ours]) -> list[tuple[str, ...]]:
    """Below a published row the means of our models, and their difference from what is published."""
    ours = [round(fmean(values), 2) if values else None for values in over_models(columns, models)]
    pairs = zip(ours, row["values"], strict=True)
    apart = ["-" if a is None or b is None else f"{a - b:+.2f}" for a, b in pairs]
    return [(row["label"], "ours", *map(number, ours)), (row["label"], "difference", *apart)]


def account(label: str, columns: list[str], models: list[Ours]) -> str:
    """A note on the runs that "ours" comes from; for several models also their number and the deviation."""
    source = ", ".join(dict.fromkeys(str(path) for model in models for path in model.paths))
    if len(models) == 1:
        return f"ours, {label}: {source}"
    spread = zip(columns, over_models(columns, models), strict=True)
    sd = ", ".join(f"{column} {stdev(values):.2f}" for column, values in spread if values)
    return f"ours, {label}: mean of n = {len(models)} (sd: {sd or '-'}): {source}"

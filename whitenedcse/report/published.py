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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from whitenedcse.console import Grid, override
from whitenedcse.evaluation.protocol import particular
from whitenedcse.evaluation.tasks import OWN
from whitenedcse.report.sweep import paths
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


def report(key: str, compose: Compose, runs: Iterable[str | Path] = ()) -> Grid:
    """A published table with our numbers below its own, and as notes the commands of those that are missing.

    runs: directories of evaluate.py, or folders that may contain some. Several seeds of a row are averaged.
    """
    table = tables()[key]
    columns: list[str] = table["columns"]
    found = placed(table, list(rows_in(runs)), compose)
    how = f"; {meaning(table['aggregation'])}" if table["aggregation"] else ""
    notes = [f"{table['source']}. {table['metric']}{how}.", *table["notes"]]
    rows: list[tuple[str, ...]] = []
    missing: dict[str, list[str]] = {}
    for row in table["rows"]:
        label = row["label"]
        rows.append((label, "cited" if row["cited"] else "published", *map(number, row["values"])))
        if own := filling(found[label]):
            rows += ours(row, columns, own)
            notes.append(account(label, columns, own))
            continue
        for one in found[label]:
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
    unknown = {"path": "random weights", "commit": None, "architecture": None}
    named = {"encoder": scores.get("encoder") or unknown, "trained": bool(trained)}
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


def rows_in(names: Iterable[str | Path]) -> Iterator[Made]:
    """The rows of the runs with scores of tests in directories or below them, oldest run first."""
    runs: dict[Path, Run] = {}
    for folder in paths(map(str, names)):
        files = list(folder.rglob("scores.json"))
        tested = [run for run in (Run(file.parent) for file in files) if "rows" in run.results]
        if folder / "scores.json" in files and not tested:
            cure = f"first whitenedcse evaluate {override('model', folder)}"
            raise ValueError(f"{folder} was not evaluated on tests: {cure}")
        runs |= {run.path.resolve(): run for run in tested}
    for run in sorted(runs.values(), key=lambda run: (run.path / "scores.json").stat().st_mtime):
        trained = training(run.results["model"], run.path)
        for row in run.results["rows"]:
            yield Made(run.path, run.results, trained, row, found_in(run.results, row, trained))


def training(model: str, path: Path) -> Run | None:
    """The run of train.py that made a model: at `path`, or where the model is, relative to a parent of it."""
    places = (path, *(base / model for base in (Path(), *path.resolve().parents)))
    return next(filter(None, map(Run.of, places)), None)


def placed(table: Mapping[str, Any], made: Sequence[Made], compose: Compose) -> dict[str, list[Candidate]]:
    """The rows of scores by the label of the published row that they fill or, else, are nearest to.

    What is read from a file of a run is the same for all rows of the run: the nearest of them has it.
    """
    of_file = any("file" in row for row in table["rows"])

    def unit(one: Made) -> Any:
        return one.path if of_file else (one.path, one.row["name"])

    units: dict[Any, list[tuple[str, Candidate]]] = {unit(one): [] for one in made}
    for row in table["rows"]:
        for one in candidates(row, table, made, compose):
            units[unit(one.made)].append((row["label"], one))
    found: dict[str, list[Candidate]] = {row["label"]: [] for row in table["rows"]}
    for pairs in units.values():
        fewest = min((len(one.differences) for _, one in pairs), default=0)
        nearest = [(label, one) for label, one in pairs if len(one.differences) == fewest <= NEAR]
        for label, one in nearest[:1] if fewest else nearest:
            found[label].append(one)
    return found


def candidates(
    row: Mapping[str, Any], table: Mapping[str, Any], made: Iterable[Made], compose: Compose
) -> Iterator[Candidate]:
    """The rows of scores of the kind of a published row, each with its scores and what differs."""
    trains = "train.py" in (row["command"] or "")
    same = [one for one in made if row["command"] and one.conditions["trained"] == trains]
    wanted = asked(row, compose) if same else {}  # takes a third of a second
    for one in same:
        values = read(row, table, one)
        known = any(cell(column, values) is not None for column in table["columns"])
        if known and one.conditions["transform"] == wanted["transform"]:
            yield Candidate(one, values, list(differences(wanted, one.conditions)))


def differences(wanted: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[str]:
    """What differs between the conditions of a published row and those found, in words."""
    own = here["encoder"]
    if not is_encoder(wanted["encoder"], own):
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


def is_encoder(name: str, here: Mapping[str, Any]) -> bool:
    """Whether an encoder is the one with this hub id: from the hub, or a directory of that name and shape."""
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
    elif file == "geometry":
        found = row.get("geometry", {})
        on_sts_b = found.get("task") == "STS-B"
        values = {name: found.get(name) for name in table["columns"] if on_sts_b}
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


def ours(row: Mapping[str, Any], columns: list[str], models: list[Ours]) -> list[tuple[str, ...]]:
    """Below a published row the means of our models, and their difference from what is published."""
    means = [round(fmean(values), 2) if values else None for values in over_models(columns, models)]
    pairs = zip(means, row["values"], strict=True)
    apart = ["-" if a is None or b is None else f"{a - b:+.2f}" for a, b in pairs]
    return [(row["label"], "ours", *map(number, means)), (row["label"], "difference", *apart)]


def account(label: str, columns: list[str], models: list[Ours]) -> str:
    """A note on the runs that "ours" comes from; for several models also their number and the deviation."""
    source = ", ".join(dict.fromkeys(str(path) for model in models for path in model.paths))
    if len(models) == 1:
        return f"ours, {label}: {source}"
    spread = zip(columns, over_models(columns, models), strict=True)
    sd = ", ".join(f"{column} {stdev(values):.2f}" for column, values in spread if values)
    return f"ours, {label}: mean of n = {len(models)} (sd: {sd or '-'}): {source}"

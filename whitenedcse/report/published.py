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


class Scored(NamedTuple):
    """The scores by column of a model for a row, the run directories they come from, and what differs."""

    values: dict[str, float]
    paths: tuple[str, ...]
    differences: tuple[str, ...] = ()


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
    possible = {row["label"]: list(candidates(row, table, made, compose)) for row in table["rows"]}
    own = {label: fitting(every) for label, every in possible.items()}
    near_by = nearest(possible, [label for label, models in own.items() if not models])
    how = f"; {meaning(table['aggregation'])}" if table["aggregation"] else ""
    notes = [f"{table['source']}. {table['metric']}{how}.", *table["notes"]]
    rows: list[tuple[str, ...]] = []
    missing: dict[str, list[str]] = {}
    for row in table["rows"]:
        label, models, beside = row["label"], own[row["label"]], near_by.get(row["label"], [])
        rows += block(row, columns, models, beside)
        notes += [account(label, columns, models)] if models else []
        notes += [f"near miss, {label}: {one.paths[0]}: {'; '.join(one.differences)}" for one in beside]
        if row["command"] and not models:
            missing.setdefault(row["command"], []).append(label)
    head = ("row", "", *columns)
    notes += [f"to make {'; '.join(labels)}:\n  {command}" for command, labels in missing.items()]
    return Grid(f"{key}: {table['title']}", head, rows, notes, range(2, len(head)))


def asked(row: Mapping[str, Any], compose: Compose) -> dict[str, Any]:
    """The conditions of a published row: those of the row of scores that its command makes."""
    parts = {part.split()[1]: part for part in row["command"].split(" && ") if part.startswith("python")}
    words = shlex.split(parts.get("evaluate.py", "python evaluate.py"))
    model = next((word.removeprefix("model=") for word in words if word.startswith("model=")), None)
    test = compose(shlex.join(word for word in words if not word.startswith("model=")), 0)
    pooling, layers = test.get("pooling") or {}, test["layers"]
    named: dict[str, Any] = {"encoder": model, "trained": "train.py" in parts}
    if command := parts.get("train.py"):
        settings = compose(command, row.get("job", 0))
        pooling, layers = settings["pooling"], None
        named |= of_training(settings) | {"encoder": settings["encoder"]["path"]}
    protocol = test["protocol"]
    row = next(line for line in protocol["rows"] if line["name"] == row.get("row", "as it is"))
    kind, places = pooling.get("kind"), layers or pooling.get("layers")
    own: dict[str, Any] = {"pooling": f"{row.get('pooling', kind)} over layers {row.get('layers', places)}"}
    own |= {"postprocess": row.get("map"), "fit": row.get("fit", "")}
    facts = {**protocol, "protocol": protocol["name"], **{k: test[k] for k in ("bf16", "prompt", "sample")}}
    facts |= {"classifier": test["classifier"] if set(test["tasks"]["names"]) & {*TRANSFER} else None}
    return named | of_evaluation(facts, own)


def found_in(scores: Mapping[str, Any], row: Mapping[str, Any], trained: Run | None) -> dict[str, Any]:
    """The conditions under which a row of a run's scores was made, by the same names as in `asked`."""
    facts = {**scores, "classifier": scores.get("classifier") if "transfer" in row else None}
    settings = of_training(trained.settings) if trained else {}
    return {"encoder": scores.get("encoder"), "trained": bool(trained), **settings} | of_evaluation(
        facts, row
    )


def of_evaluation(facts: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """The conditions of an evaluation. facts: of all its rows. Those of a sample only where one is read."""
    transform, fit = row["postprocess"] or {}, row["fit"]
    named = {name: facts.get(name) for name in ("protocol", "case", "max_length", "extra", "bf16")}
    named |= {"prompt": facts.get("prompt") or None, "pooling": row["pooling"]}
    named |= {"transform": transform.get("kind"), "fit": fit}
    named |= {"k": transform.get("k"), **particular(transform)} if transform else {}
    named |= {"sample": facts.get("sample")} if fit and fit not in OWN else {}
    return named | ({"classifier": facts["classifier"]} if facts["classifier"] else {})


def of_training(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a run of train.py that decide what is trained, by their dotted names."""
    inside = (*(f"{part}." for part in TRAINING), *TRAINING)
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
    """The run of train.py that made a model, or None; its path may be relative to a parent of `path`."""
    runs = (Run.of(base / model) for base in (Path(), *path.resolve().parents))
    return next((run for run in runs if run and run.trains), None)


def candidates(
    row: Mapping[str, Any], table: Mapping[str, Any], made: Iterable[Made], compose: Compose
) -> Iterator[tuple[Made, Scored]]:
    """The rows of scores that might stand for a published row, each with its scores and what differs.

    What is read from a file of a run stands beside all rows of the run: the nearest has it.
    """
    found: dict[Any, tuple[Made, Scored]] = {}
    trains = "train.py" in (row["command"] or "")
    same = [one for one in made if row["command"] and one.conditions["trained"] == trains]
    wanted = asked(row, compose) if same else {}  # composing takes a third of a second
    for one in same:
        values = read(row, table, one)
        some = any(cell(column, values) is not None for column in table["columns"])
        if some and one.conditions["transform"] == wanted["transform"]:
            differ = tuple(differences(wanted, one.conditions))
            key = one.path if row.get("file") not in (None, "geometry") else (one.path, one.row["name"])
            if key not in found or len(differ) < len(found[key][1].differences):
                found[key] = one, Scored(values, (str(one.path),), differ)
    yield from found.values()


def differences(wanted: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[str]:
    """What differs between the conditions of a published row and those found, in words."""
    if not is_encoder(wanted["encoder"], here["encoder"]):
        own = here["encoder"] or {"path": "not recorded", "architecture": None}
        yield f"encoder={own['path']} ({own['architecture']}), the row has {wanted['encoder']}"
    absent = "not recorded"  # which null is not: a head without a whitening has head.whitening=null
    for name in dict.fromkeys([*wanted, *here]):
        a, b = here.get(name, absent), wanted.get(name, absent)
        above = [name.rsplit(".", i)[0] for i in range(1, name.count(".") + 1)]
        told = any(side.get(part, "") is None for part in above for side in (wanted, here))
        told |= name == "sample" and here.get("fit") in OWN  # of no corpus: the fit differs
        told |= name == "classifier" and name not in wanted  # of other tasks that the run has too
        if name != "encoder" and not told and a != b:
            yield f"{name}={as_yaml(a)}, the row has {'none' if b == absent else as_yaml(b)}"


def is_encoder(name: str, here: Mapping[str, Any] | None) -> bool:
    """Whether an encoder is the one with this hub id: from the hub, or a directory of that name and shape."""
    if here is None:
        return False
    if here["commit"]:
        return str(here["path"]) in (name, *(f"{owner}/{name}" for owner in OWNERS))
    same = Path(here["path"]).name == Path(name).name
    return same and here["architecture"] == content()["encoders"][name]


def fitting(candidates: Iterable[tuple[Made, Scored]]) -> list[Scored]:
    """The scores of each model that fills a row: each seed once; a later run completes an earlier one."""
    models: dict[int | None, Scored] = {}
    for made, scored in candidates:
        if not scored.differences:
            seed = made.scores.get("seed") if made.trained else None
            before = models.get(seed, Scored({}, ()))
            models[seed] = Scored(before.values | scored.values, before.paths + scored.paths)
    return list(models.values())


def nearest(every: Mapping[str, list[tuple[Made, Scored]]], empty: Iterable[str]) -> dict[str, list[Scored]]:
    """Of the candidates by label, those near to rows that none fills; each beside its nearest row alone."""
    best: dict[tuple[Path, str], tuple[str, Scored]] = {}
    for label, candidates in every.items():
        for made, scored in candidates:
            key = (made.path, made.row["name"])
            if key not in best or len(scored.differences) < len(best[key][1].differences):
                best[key] = (label, scored)
    near: dict[str, list[Scored]] = {}
    for label, scored in best.values():
        if label in empty and 0 < len(scored.differences) <= NEAR:
            near.setdefault(label, []).append(scored)
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
        pairs = zip(ours, theirs, strict=True)
        apart = ["-" if a is None or b is None else f"{a - b:+.2f}" for a, b in pairs]
        lines += [(label, "ours", *map(number, ours)), (label, "difference", *apart)]
    for other in near:
        lines.append((label, "near miss", *(number(cell(column, other.values)) for column in columns)))
    return lines


def account(label: str, columns: list[str], models: list[Scored]) -> str:
    """A note on the runs that "ours" comes from; for several models also their number and the deviation."""
    source = ", ".join(dict.fromkeys(path for model in models for path in model.paths))
    if len(models) == 1:
        return f"ours, {label}: {source}"
    spread = zip(columns, over_models(columns, models), strict=True)
    sd = ", ".join(f"{column} {stdev(values):.2f}" for column, values in spread if values)
    return f"ours, {label}: mean of n = {len(models)} (sd: {sd or '-'}): {source}"

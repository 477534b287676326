"""The house as the README's layout table draws it: who may import whom, and what a setting builds."""

import ast
import importlib
import importlib.util
import inspect
import json
import re
from itertools import product
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

import whitenedcse.launch
from whitenedcse.report import published
from whitenedcse.settings import flat

ROOT = Path(__file__).parents[1]
CONF = ROOT / "conf"
FILES = sorted((ROOT / "whitenedcse").rglob("*.py"))

# room: the rooms it may import, beside its own package's __init__
ROOMS = {
    "__init__": ["model.embedder", "search.index", "evaluation.postprocess"],
    "precision": [],
    "threads": [],
    "roots": [],
    "whitening": ["precision", "roots"],
    "ragged": [],
    "settings": [],
    "durable": [],
    "ranks": ["threads"],
    "data.files": [],
    "data.corpus": ["data.files"],
    "data.sources": ["data", "durable"],
    "data.tokens": ["data", "ragged", "durable", "pace", "threads"],
    "data.words": [],
    "data.workers": ["data.words"],
    "data.repetition": ["ragged"],
    "data.datamodule": ["data", "ragged"],
    "model.encoder": ["data", "ragged", "model"],
    "model.backbones": ["ragged"],
    "model.packed": ["precision", "ragged", "model.attention", "model.operations"],
    "model.unpadded": ["model.attention", "ragged"],
    "model.attention": ["model.operations", "precision", "ragged"],
    "model.operations": ["precision"],
    "model.pooling": ["precision"],
    "model.head": ["precision", "roots", "whitening"],
    "model.final": [],
    "model.embedder": ["model", "precision", "ragged", "data.tokens", "pace", "threads"],
    "model.mteb": ["model", "data.tokens"],
    "model.planes": ["model", "ragged", "data.sources"],
    "model.source": ["model", "data.tokens"],
    "model.sentence_transformers": ["model", "durable"],
    "model.checkpoint": ["model", "durable"],
    "training.loss": ["precision"],
    "training.optim": [],
    "training.mlm": ["model", "precision", "ragged"],
    "training.module": ["training", "model", "data", "precision", "ragged", "threads"],
    "training.pieces": ["ragged", "threads"],
    "training.monitor": ["training", "model.checkpoint", "evaluation"],
    "training.progress": [],
    "training.loggers": ["training.checkpoints", "durable", "evaluation.geometry"],
    "training.dashboard": ["evaluation.suite", "durable"],
    "training.health": ["training.monitor"],
    "training.gather": [],
    "training.randomness": [],
    "training.checkpoints": ["durable"],
    "training.safekeeping": ["training.gather", "ranks"],
    "training.trainer": ["training.checkpoints", "ranks"],
    "evaluation.sts": ["data.files"],
    "evaluation.transfer": ["data.files", "evaluation.linear"],
    "evaluation.linear": [],
    "evaluation.classifiers": ["evaluation.linear"],
    "evaluation.correlation": ["evaluation.sts"],
    "evaluation.statistics": [],
    "evaluation.moments": [],
    "evaluation.doctor": ["evaluation", "data", "durable"],
    "evaluation.layers": ["evaluation"],
    "evaluation.tasks": ["evaluation", "data"],
    "evaluation.protocol": ["evaluation", "data.sources"],
    "evaluation.geometry": ["precision"],
    "evaluation.postprocess": ["evaluation.moments", "durable", "whitening"],
    "evaluation.suite": ["evaluation"],
    "pace": [],
    "export.whitened": ["data", "evaluation.postprocess", "model", "pace"],
    "export.transformers": ["model"],
    "export.sentence_transformers": ["export.transformers", "model"],
    "export.onnx": ["export.transformers", "model"],
    "export.verify": ["data.sources", "evaluation"],
    "export.card": ["model", "report", "durable"],
    "export.directory": ["export", "durable", "model"],
    "arguments": ["data.sources", "evaluation.postprocess", "export.whitened", "model"],
    "export.command": ["arguments", "export", "data.sources", "evaluation.postprocess", "report.formats"],
    "demo.trial": ["evaluation.postprocess", "export.whitened", "model", "search.nearest"],
    "demo.page": ["demo.trial"],
    "demo.command": ["arguments", "demo", "data", "report.formats"],
    "bulk.shards": ["durable"],
    "bulk.encoding": ["bulk", "data", "model", "pace", "ranks"],
    "bulk.command": ["arguments", "bulk", "data.sources", "ranks", "report.formats"],
    "search.nearest": [],
    "search.files": ["durable", "model"],
    "search.index": ["search", "data", "export.whitened", "model", "pace"],
    "search.bench": ["search", "evaluation.postprocess", "pace", "report.formats"],
    "search.command": ["arguments", "search", "data", "report.formats"],
    "report.record": ["report.history", "durable", "settings"],
    "report.formats": [],
    "report.tables": ["report", "evaluation"],
    "report.judgements": ["evaluation", "durable"],
    "report.comparison": ["report", "evaluation"],
    "report.plots": [],
    "report.figures": ["report", "evaluation"],
    "report.history": ["durable"],
    "report.groups": ["report", "settings"],
    "report.sweep": ["report", "evaluation", "durable"],
    "report.curves": ["report"],
    "report.contrasts": ["report"],
    "report.page": ["report", "durable"],
    "report.published": ["report", "evaluation"],
    "report.workspace": ["training.dashboard"],
    "evaluation.command": ["arguments", "evaluation.doctor", "data.sources", "report.formats"],
    "report.command": ["arguments", "report"],
    "cli": [
        "arguments",
        "evaluation.command",
        "report.command",
        "export.command",
        "bulk.command",
        "search.command",
        "demo.command",
    ],
    "launch": [
        "settings",
        "ranks",
        "report.formats",
        "report.history",
        "precision",
        "training.dashboard",
    ],
    "runs": ["launch", "ranks", "report", "durable", "training.checkpoints"],
}

GROUPS = {  # conf/<group> builds symbols of
    "data": "whitenedcse.data.datamodule",
    "encoder": "whitenedcse.model.encoder",
    "pooling": "whitenedcse.model.pooling",
    "head": "whitenedcse.model.head",
    "loss": "whitenedcse.training.loss",
    "optim": "whitenedcse.training.optim",
    "monitor": "whitenedcse.training.monitor",
    "logger": "whitenedcse.training.(loggers|dashboard)",
    "mlm": "whitenedcse.training.mlm",
    "trainer": "whitenedcse.training.trainer",
}


def room(path):
    name = ".".join(path.relative_to(ROOT / "whitenedcse").with_suffix("").parts)
    return name.removesuffix(".__init__") if name != "__init__" else name


def imports(path):
    """The rooms that a file imports, and the outside packages."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module == "whitenedcse":
            yield from (f"whitenedcse.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module.startswith("whitenedcse."):
            submodules = [f"{node.module}.{alias.name}" for alias in node.names]
            known = [name for name in submodules if name.removeprefix("whitenedcse.") in ROOMS]
            yield from known or [node.module]
        elif isinstance(node, ast.ImportFrom):
            yield node.module


@pytest.mark.parametrize("path", [p for p in FILES if room(p) in ROOMS or p.name != "__init__.py"], ids=room)
def test_a_room_imports_only_from_the_rooms_the_table_allows(path):
    used = {name.removeprefix("whitenedcse.") for name in imports(path) if name.startswith("whitenedcse.")}
    allowed = ROOMS[room(path)]  # a new file has no line in the table: write one
    assert {name for name in used if not any(f"{name}.".startswith(f"{a}.") for a in allowed)} == set()
    assert [a for a in allowed if not any(f"{name}.".startswith(f"{a}.") for name in used)] == []


def test_every_line_of_the_table_is_a_room():
    assert set(ROOMS) <= {room(path) for path in FILES}


@pytest.mark.parametrize(
    ("package", "rooms"), [("hydra", {"launch", "runs"}), ("wandb", {"report.workspace"})]
)
def test_only_these_rooms_know(package, rooms):
    assert {room(path) for path in FILES if any(n.split(".")[0] == package for n in imports(path))} == rooms


@pytest.mark.parametrize("path", FILES, ids=room)
def test_files_are_short_and_named_for_what_they_hold(path):
    assert len(path.read_text().splitlines()) <= 300
    assert path.stem not in ("utils", "helpers", "common", "misc", "base")


@pytest.mark.parametrize("name", ["train.py", "evaluate.py"])
def test_the_scripts_are_short(name):
    assert len((ROOT / name).read_text().splitlines()) <= 85


def composed(*overrides, name="train"):
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return OmegaConf.to_container(compose(name, ["run=x", *overrides]))


def targets(node):
    """Every mapping with a _target_ in a config."""
    if isinstance(node, dict):
        if "_target_" in node:
            yield node
        for value in node.values():
            yield from targets(value)


OPTIONS = [(p.parent.name, p.stem) for p in sorted(CONF.glob("*/*.yaml")) if p.parent.name in GROUPS]


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_an_option_builds_a_symbol_of_the_module_it_is_named_after(group, option):
    config = composed(f"{group}={option}")[group] or {}
    for node in targets(config):
        module, _, symbol = node["_target_"].rpartition(".")
        assert re.fullmatch(GROUPS[group], module)
        assert hasattr(importlib.import_module(module), symbol)


def unbound(node):
    """Settings of a mapping that its symbol has no parameter for, and parameters without a value."""
    module, _, name = node["_target_"].rpartition(".")
    symbol = getattr(importlib.import_module(module), name)
    parameters = dict(inspect.signature(symbol).parameters)
    if parameters.pop("settings", None):  # **settings goes to the class it is made from
        parameters |= inspect.signature(symbol.__base__).parameters
    given = {key for key in node if not key.startswith("_")}
    needed = (
        {key for key, p in parameters.items() if p.default is p.empty} if not node.get("_partial_") else set()
    )
    return given - set(parameters) | needed - given


@pytest.mark.parametrize("experiment", sorted(path.stem for path in (CONF / "experiment").glob("*.yaml")))
def test_every_setting_of_an_experiment_reaches_a_parameter(experiment):
    for node in targets(composed(f"+experiment={experiment}")):
        assert unbound(node) == set(), node["_target_"]


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_every_setting_of_an_option_reaches_a_parameter(group, option):
    for node in targets(composed(f"{group}={option}")):
        assert unbound(node) == set(), node["_target_"]


@pytest.mark.parametrize("path", sorted((CONF / "experiment").glob("*.yaml")), ids=lambda path: path.stem)
def test_an_experiment_opens_with_its_lab_note(path):
    text = path.read_text()
    assert text.startswith("# @package _global_\n# ")
    assert f"python train.py +experiment={path.stem}" in text


@pytest.mark.parametrize("path", sorted(CONF.rglob("*.yaml")), ids=lambda path: path.stem)
def test_every_file_of_settings_opens_with_what_it_is_for(path):
    assert path.read_text().removeprefix("# @package _global_\n").startswith("# ")


@pytest.mark.parametrize("group", ["experiment", "system", "sweep"])
def test_a_lab_note_begins_with_what_help_says_in_a_line(group):
    for path in (CONF / group).glob("*.yaml"):
        said = whitenedcse.launch.note(path)
        assert 15 < len(said) <= 105 and "python train.py" not in said, path.stem


def test_a_note_may_speak_of_the_environment(tmp_path):
    (tmp_path / "x.yaml").write_text("# @package _global_\n# From $HOME, in\n# 2.5 steps. More.\nviews: 2\n")
    assert whitenedcse.launch.note(tmp_path / "x.yaml") == "From $$HOME, in 2.5 steps"


@pytest.mark.parametrize(
    ("experiment", "d", "width"),
    [("bert_base", 768, 2), ("bert_large", 1024, 2), ("roberta_base", 768, 3), ("roberta_large", 1024, 4)],
)
def test_published_group_counts_divide_the_encoders(experiment, d, width):
    whitening = composed(f"+experiment={experiment}")["head"]["whitening"]
    assert (whitening["groups"], whitening["group_width"], d % width) == (None, width, 0)


SYSTEMS = sorted(path.stem for path in (CONF / "system").glob("*.yaml"))
SWEEPS = sorted(path.stem for path in (CONF / "sweep").glob("*.yaml"))


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_system_changes_settings_that_exist(system):
    plain, changed = (composed("+experiment=bert_base", *more) for more in ([], [f"+system={system}"]))
    for node in targets(changed):
        assert unbound(node) == set(), node["_target_"]
    assert set(flat(plain)) - set(flat(changed)) <= {
        k for k in flat(plain) if k.startswith("head.whitening.")
    }
    assert set(flat(changed)) <= set(flat(plain)) | {"head.whitening"}


def jobs(sweep, *overrides):
    """The configurations of a sweep's jobs, composed as Hydra does."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        chosen = ["run=x", *overrides, f"+sweep={sweep}"]
        params = compose("train", chosen, return_hydra_config=True).hydra.sweeper.params
        lists = [[f"{key}={value}" for value in str(values).split(",")] for key, values in params.items()]
        return [
            OmegaConf.to_container(compose("train", [*job, *chosen]), resolve=True) for job in product(*lists)
        ]


COUNTS = dict(table3=5, table4=16, table5=4, table6=5, seeds=5, views=8, official=7, study=40)


@pytest.mark.parametrize(
    ("sweep", "count"),
    COUNTS.items(),
)
def test_the_jobs_of_a_sweep_are_as_many_as_the_table_and_all_different(sweep, count):
    for experiment in ("bert_base", "wiki_mini", "roberta_base"):
        assert len({json.dumps(job) for job in jobs(sweep, f"+experiment={experiment}")}) == count


def test_views_are_whitenings_of_one_pass_or_of_as_many():
    found = {(job["data"]["passes"], job["views"]) for job in jobs("views", "+experiment=bert_base")}
    assert found == {(p, v) for v in (2, 3, 4, 5) for p in (1, v)}


def test_every_sweep_was_counted():
    assert SWEEPS == sorted([*COUNTS, "search"])


@pytest.mark.parametrize("table", ["T3", "T4", "T5", "T6"])
def test_the_jobs_of_a_table_s_sweep_are_its_rows(table):
    """One and only one job is what a row's `match` asks for."""
    composed_jobs = [OmegaConf.create(job) for job in jobs(f"table{table[1]}", "+experiment=bert_base")]
    rows = published.tables()[f"WhitenedCSE/{table}"]["rows"]
    assert len(rows) == len(composed_jobs)
    for row in rows:
        asked = row["match"]["config"].items()
        same = [job for job in composed_jobs if all(OmegaConf.select(job, k) == v for k, v in asked)]
        assert len(same) == 1, row["label"]


SCRIPTS = [path for folder in ("results", "bench", "data") for path in sorted((ROOT / folder).rglob("*.py"))]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_a_script_takes_from_the_package_is_there(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "whitenedcse":
            module = importlib.import_module(node.module)
            for alias in node.names:
                inside = f"{node.module}.{alias.name}"
                assert hasattr(module, alias.name) or importlib.util.find_spec(inside), inside


def test_the_readme_draws_every_room():
    readme = (ROOT / "README.md").read_text()
    for name in ROOMS:
        file = re.sub(r"\.", "/", name) + ".py"
        assert name == "__init__" or f"`whitenedcse/{file}`" in readme, file

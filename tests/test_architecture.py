"""The layout as CONTRIBUTING.md draws it: which module may import which, and what a setting builds."""

import ast
import importlib
import importlib.util
import inspect
import json
import re
import shlex
from itertools import zip_longest
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from whitenedcse.app import config
from whitenedcse.run import flat

ROOT = Path(__file__).parents[1]
CONF = ROOT / "conf"

# what anyone may import: each other alone
FLOOR = ["compute", "console", "distributed", "files", "inputs", "run"]
# a folder, or a module beside the folders: what else of the package it may import
FOLDERS = {
    "whitening": [],
    "ragged": [],
    "data": ["ragged"],
    "model": ["whitening", "ragged", "data"],
    "evaluation": ["whitening", "data"],
    "training": ["whitening", "ragged", "data", "model", "evaluation"],
    "report": ["evaluation"],
    "sentence_transformers": ["ragged", "data", "model", "evaluation", "training"],
    "serving": ["whitening", "data", "model", "evaluation", "report"],
    "app": ["data", "model", "evaluation", "training", "report", "serving"],
    "__init__": ["app", "data", "evaluation", "model", "serving", "training"],
}

GROUPS = {  # conf/<group> builds symbols of
    "data": "whitenedcse.data.datamodule",
    "encoder": "whitenedcse.model.(encoder|lora|scratch)",
    "pooling": "whitenedcse.model.head",
    "head": "whitenedcse.model.(head|whitener)",
    "loss": "whitenedcse.training.loss",
    "terms": "whitenedcse.training.terms",
    "optim": "whitenedcse.training.module",
    "monitor": "whitenedcse.training.monitor",
    "logger": "whitenedcse.training.(loggers|dashboard)",
    "mlm": "whitenedcse.training.terms",
    "trainer": "whitenedcse.training.trainer",
}


def named(path):
    """The dotted name of a module below the package."""
    name = ".".join(path.relative_to(ROOT / "whitenedcse").with_suffix("").parts)
    return name.removesuffix(".__init__") if name != "__init__" else name


MODULES = {named(path): path for path in sorted((ROOT / "whitenedcse").rglob("*.py"))}


def imports(path, *, top=False):
    """The modules that a file imports, wherever it does or at its top: of the package and from outside."""
    tree = ast.parse(path.read_text())
    for node in tree.body if top else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            inside = [f"{node.module}.{alias.name}" for alias in node.names]
            known = [name for name in inside if name.removeprefix("whitenedcse.") in MODULES]
            yield from known or [node.module]


def used(path):
    """The modules of the package that a file imports."""
    return {name.removeprefix("whitenedcse.") for name in imports(path) if name.startswith("whitenedcse.")}


def within(name, folders):
    """Whether a module is one of these, or in one of these folders."""
    return any(f"{name}.".startswith(f"{folder}.") for folder in folders)


def test_a_module_imports_only_what_its_folder_may():
    for name, path in MODULES.items():
        folder = name.partition(".")[0]
        allowed = FLOOR if name in FLOOR else [folder, *FOLDERS[folder], *FLOOR]
        assert {other for other in used(path) if not within(other, allowed)} == set(), name


def test_no_module_imports_itself_through_others():
    later = {name: used(path) & MODULES.keys() for name, path in MODULES.items()}
    later["model.embedder"].discard("model.checkpoint")  # which `load` and `save` import when called
    while ends := [name for name, others in later.items() if not others & later.keys()]:
        for name in ends:
            del later[name]
    assert later == {}


def test_what_only_reads_starts_without_what_trains_and_classifies():
    """By what these modules import at their top, and what that imports."""
    found, waiting = set(), ["__init__", "report.page", "report.published", "evaluation.doctor"]
    while waiting:
        new = {*imports(MODULES[waiting.pop()], top=True)} - found
        found |= new
        waiting += {name.removeprefix("whitenedcse.") for name in new} & MODULES.keys()
    assert {"numpy", "whitenedcse.files"} <= found
    assert not {name.partition(".")[0] for name in found} & {"lightning", "transformers", "sklearn"}


def test_only_these_know_these_packages():
    every = {name: {other.partition(".")[0] for other in imports(path)} for name, path in MODULES.items()}
    for package, module in {"hydra": "app", "wandb": "training.dashboard", "peft": "model.lora"}.items():
        found = {name for name, others in every.items() if package in others}
        assert found and all(within(name, [module]) for name in found), package


def composed(*words, name="train"):
    return config.composed(shlex.join(["python", f"{name}.py", "run=x", *words]))


def signature(node):
    """That of the symbol which a mapping names."""
    module, _, name = node["_target_"].rpartition(".")
    return inspect.signature(getattr(importlib.import_module(module), name))


def check_bound(made):
    """Each setting reaches a parameter of its type, and each parameter that needs a value has one."""
    config.check_keys("", made, config.top("train"))
    for _, node in config.parts(made):
        if not node.get("_partial_"):
            signature(node).bind(**{key: value for key, value in node.items() if key[0] != "_"})


OPTIONS = [(p.parent.name, p.stem) for p in sorted(CONF.glob("*/*.yaml")) if p.parent.name in GROUPS]
EXPERIMENTS, SYSTEMS, SWEEPS = map(config.stems, ("experiment", "system", "sweep"))


@pytest.mark.slow
def test_an_option_builds_a_symbol_of_the_module_it_is_named_after_and_each_setting_reaches_a_parameter():
    groups = {group: [option for other, option in OPTIONS if other == group] for group, _ in OPTIONS}
    for options in zip_longest(*groups.values()):  # one of each group at a time
        chosen = {group: option for group, option in zip(groups, options, strict=True) if option}
        # random weights set a temperature, for a loss with one
        more = ["data.corpus=x", *["encoder=pretrained"] * ("encoder" not in chosen)]
        made = composed(*(f"{group}={option}" for group, option in chosen.items()), *more)
        check_bound(made)
        for group in chosen:
            for _, node in config.parts({group: made[group]}):
                assert re.fullmatch(GROUPS[group], node["_target_"].rpartition(".")[0]), chosen


@pytest.mark.slow
def test_an_experiment_binds_and_a_system_changes_settings_that_exist():
    for name in EXPERIMENTS:
        check_bound(composed(f"+experiment={name}"))
    plain, own = composed("+experiment=bert_base"), ("head.whitening", "loss.", "terms.")
    systems = {name: composed("+experiment=bert_base", f"+system={name}") for name in SYSTEMS}
    for name, system in systems.items():
        check_bound(system)
        # but for what a system may replace
        assert all(key.startswith(own) for key in set(flat(plain)) ^ set(flat(system))), name
    # dropout and dropout_whitened differ where the others crop
    assert len({json.dumps(system) for system in systems.values()}) == len(SYSTEMS) - 2


def test_the_defaults_of_the_configuration_are_those_of_the_signatures():
    """The paper's settings, which Python users get without a configuration; passes follow the views."""
    whole, compared = composed("+experiment=bert_base", "data=file", "data.corpus=x", "pooling=cls"), 0
    ours = {"_target_": "whitenedcse.training.module.ContrastiveTraining", **whole}
    for _, node in config.parts({**whole, "ours": ours}):
        name = node["_target_"].rpartition(".")[2]
        if name == "Trainer":  # not the public way to train; what it leaves out is Lightning's
            continue
        parameters = signature(node).parameters
        plain = {key: value for key, value in node.items() if not isinstance(value, dict)}
        of_the_run = {"passes", "prompt", "seed"} if name == "SentenceData" else set()
        for key in plain.keys() & parameters.keys() - of_the_run:
            if (default := parameters[key].default) is not inspect.Parameter.empty:
                compared += 1
                assert plain[key] == (list(default) if isinstance(default, tuple) else default), (name, key)
    assert compared > 30


def test_a_note_may_speak_of_the_environment(tmp_path):
    (tmp_path / "x.yaml").write_text("# @package _global_\n# From $HOME, in\n# 2.5 steps. More.\nviews: 2\n")
    assert config.note(tmp_path / "x.yaml") == "From $$HOME, in 2.5 steps"


def test_the_paper_s_widths_of_groups():
    for name, width in dict(bert_base=2, bert_large=2, roberta_base=3, roberta_large=4).items():
        assert composed(f"+experiment={name}")["head"]["whitening"]["group_width"] == width


COUNTS = dict(table3=5, table4=16, table5=4, table6=5, seeds=5, views=8, official=7, study=40, lab=150)


def jobs(sweep):
    """The words of each job of a sweep; `lab` names its experiments itself."""
    words = ["run=x", *["+experiment=bert_base"] * (sweep != "lab"), f"+sweep={sweep}"]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return config.jobs(compose("train", words, return_hydra_config=True).hydra)


@pytest.mark.slow
def test_the_jobs_of_a_sweep_are_as_many_as_the_table_and_all_different():
    assert sorted([*COUNTS, "search"]) == SWEEPS
    for sweep, count in COUNTS.items():
        every = jobs(sweep)
        assert len(every) == len({*every}) == count, sweep


def test_views_are_whitenings_of_one_pass_or_of_as_many():
    found = {(made["data"]["passes"], made["views"]) for made in (composed(*job) for job in jobs("views"))}
    assert found == {(p, v) for v in (2, 3, 4, 5) for p in (1, v)}


SCRIPTS = [path for folder in ("results", "bench", "data") for path in sorted((ROOT / folder).rglob("*.py"))]


def test_what_a_script_takes_from_the_package_is_there():
    for path in SCRIPTS:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "whitenedcse":
                module = importlib.import_module(node.module)
                for alias in node.names:
                    inside = f"{node.module}.{alias.name}"
                    assert hasattr(module, alias.name) or importlib.util.find_spec(inside), (path, inside)

"""A key that nothing reads is refused with the nearest one that exists."""

import importlib
import inspect
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
from omegaconf import OmegaConf
from test_architecture import composed

from whitenedcse.app.configuration import (
    HYDRA_KEYS,
    SCRIPT_TYPES,
    declared,
    description,
    refuse_unknown,
    unknown,
)

LOSS = {"_target_": "whitenedcse.training.loss.ContrastiveLoss", "form": "l1", "temperature": 0.05}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"seeed": 1}, "no setting 'seeed'; the nearest is 'seed'"),
        (
            {"loss": {**LOSS, "temprature": 1}},
            "no setting 'loss.temprature'; the nearest is 'loss.temperature'",
        ),
        (
            {"other": {"loss": {**LOSS, "forms": 1}}},
            "no setting 'other.loss.forms'; the nearest is 'other.loss.form'",
        ),
    ],
)
def test_a_misspelt_key_is_named_with_the_nearest(config, message):
    with pytest.raises(ValueError, match=message):
        refuse_unknown(config, ["seed", "loss", "other"])


def test_keys_that_are_read_pass():
    refuse_unknown(
        {"seed": 1, "loss": {**LOSS, "_partial_": True}, "other": {"free": 1}}, ["seed", "loss", "other"]
    )


def test_the_nearest_of_nothing_is_nothing():
    assert unknown("a", []) == "no setting 'a'; the top level has none"


def test_the_rest_of_a_class_s_settings_are_those_of_the_class_above():
    trainer = {"_target_": "whitenedcse.training.trainer.Trainer", "chunk": None, "max_steps": 4}
    refuse_unknown({"trainer": trainer}, ["trainer"])
    with pytest.raises(ValueError, match=r"no setting 'trainer\.settings'"):
        refuse_unknown({"trainer": trainer | {"settings": 1}}, ["trainer"])


def test_settings_of_something_absent_are_refused_with_the_way_to_leave_it_out():
    """As an experiment that sets head.whitening.groups beside head=dense, which has no whitening."""
    head = {"_target_": "whitenedcse.model.head.ProjectionHead", "whitening": {"groups": 384}}
    message = r'head\.whitening=\{"groups": 384\} must be .* or null; head\.whitening=null leaves it out$'
    with pytest.raises(ValueError, match=message):
        refuse_unknown({"head": head}, ["head"])
    refuse_unknown({"head": head | {"whitening": None}}, ["head"])
    with pytest.raises(ValueError, match="or null$"):
        refuse_unknown({"head": head | {"whitening": 3}}, ["head"])
    with pytest.raises(ValueError, match=r"loss\.form=.* must be text$"):
        refuse_unknown({"loss": {**LOSS, "form": {"a": 1}}}, ["loss"])


def test_all_choices_of_a_setting_are_one_list():
    config = {"trainer": {"_target_": "whitenedcse.training.trainer.Trainer", "precision": "fp16"}}
    with pytest.raises(
        ValueError, match=r'precision="fp16" must be one of 64, 32, .*16-mixed, .* or null$'
    ) as error:
        refuse_unknown(config, ["trainer"])
    assert str(error.value).count("one of") == 1 and str(error.value).count(" 64,") == 1


def typed(  # noqa: PLR0913
    *,
    whole: int = 0,
    number: float = 0.0,
    choice: Literal[0, 1, "auto"] = 0,
    rows: Sequence[Sequence[int]] = (),
    gaps: Sequence[int | None] | None = None,
    flags: Sequence[bool] = (),
    names: Sequence[Literal["a", "b"]] = (),
    parts: Sequence[Path] = (),
    free: Sequence[Any] = (),
    plain: list = (),
    table: dict | None = None,
    counts: Mapping[str, Any] | None = None,
    betas: tuple[float, float] = (0.9, 0.999),
) -> None:
    """A symbol of somebody else, whose annotations no setting of ours has."""


PATH = {"_target_": "pathlib.Path", "_args_": ["a"]}
RIGHT = {
    "whole": [0, -1, 10**400, "${views}"],
    "number": [1, 1.5, float("nan"), "${oc.env:X}"],
    "choice": [0, 1, "auto"],
    "rows": [[], [[]], [[1], [2, 3]], [[1], "${views}"], [["${views}"]]],
    "gaps": [None, [], [None], [1, None]],
    "flags": [[True, False]],
    "names": [["a", "b", "a"]],
    "parts": [[], [PATH]],
    "free": [[1, "a", None, [2]]],
    "plain": [[], [1, "a"]],
    "table": [None, {}, {"a": None}],
    "counts": [None, {}, {"a": None, "b": [1]}],
    "betas": [[0.9, 0.98]],  # which YAML gives as a list
}
WRONG = {
    "whole": ([True, 1.0, None, "1", [1], {}], "a whole number"),
    "number": ([True, None, "1.5", [1.5]], "a number"),
    "choice": ([True, False, 1.0, 2, "0", None, []], "one of 0, 1, auto"),
    "rows": ([1, [1], [None], [[1.0]], [[True]]], "a list ([...], each a list of whole numbers ([...]))"),
    "gaps": ([1, ["a"], [[None]], [1.5]], "a list ([...], each a whole number or null) or null"),
    "flags": ([True, [1], [None]], "a list ([...], each true or false)"),
    "names": (["a", ["c"], [None]], "a list ([...], each one of a, b)"),
    "parts": (["a", PATH, ["a"], [{}]], "a list ([...], each a mapping with a _target_)"),
    "free": (["ab", 1, {}], "a list ([...], each of any type)"),
    "plain": (["ab", 1, None, {}], "a list ([...])"),
    "table": ([[], 1, "a"], "a mapping or null"),
    "counts": ([[], 1, "a", True], "a mapping or null"),
}


def settings_of(key, value):
    """A configuration with one setting of the symbol above."""
    return {"it": {"_target_": f"{__name__}.typed", key: value}}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key in RIGHT for value in RIGHT[key]], ids=repr)
def test_a_value_of_the_annotated_type_passes(key, value):
    refuse_unknown(settings_of(key, value), ["it"])


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [(key, value, WRONG[key][1]) for key in WRONG for value in WRONG[key][0]],
    ids=repr,
)
def test_a_value_of_another_type_is_refused_with_the_type_in_words(key, value, words):
    said = f" must be {re.escape(words)}(; it.{key}=null .*)?"
    if key == "names" and isinstance(value, list):
        said = ": '.*' is not one of a, b"
    with pytest.raises(ValueError, match=f"^it.{key}=.*({said})$"):
        refuse_unknown(settings_of(key, value), ["it"])


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"digits": True}, "digits=true must be one of 0, 1, 2, 3, 4, 5, 6 or null"),
        (
            {"figures": ["components", "layer", "x"]},
            'figures=["components", "layer", "x"]: \'layer\' is not one of layers, subsets, components, '
            "projection; the nearest is 'layers'",
        ),
        (
            {"figures": ["PROJECTIONS"]},
            "figures=[\"PROJECTIONS\"]: 'PROJECTIONS' is not one of layers, subsets, components, projection; "
            "the nearest is 'projection'",
        ),
        (
            {"figures": "layers"},
            'figures="layers" must be a list ([...], each one of layers, subsets, components, projection)',
        ),
        ({"bf16": "x"}, 'bf16="x" must be true or false'),
        (
            {"monitor": {"_target_": "whitenedcse.training.monitor.Monitor", "dev": 3}},
            "monitor.dev=3 must be text or null",
        ),
        ({"seed": PATH}, 'seed={"_target_": "pathlib.Path", "_args_": ["a"]} must be a whole number'),
    ],
)
def test_what_a_script_reads_itself_has_a_type_too(config, words):
    with pytest.raises(ValueError, match=f"^{re.escape(words)}$"):
        refuse_unknown(config, config)


TARGETS = {
    target
    for file in (Path(__file__).parents[1] / "conf").rglob("*.yaml")
    for target in re.findall(r"_target_: (\S+)", file.read_text())
}


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_what_a_source_file_declares_is_what_python_says_of_the_imported_symbol(target):
    module, _, name = target.rpartition(".")
    symbol = getattr(importlib.import_module(module), name)
    said = dict(inspect.signature(symbol, eval_str=True).parameters)
    if said.pop("settings", None):  # **settings go to the class above
        said = dict(inspect.signature(symbol.__base__, eval_str=True).parameters) | said
    expected = {name: description(parameter.annotation) for name, parameter in said.items()}
    hints = declared(module, name)
    assert {key: description(hints[key]) for key in hints if key not in HYDRA_KEYS} == expected


def test_a_source_file_says_nothing_of_what_it_does_not_declare():
    assert declared("whitenedcse.model.head", "Absent") == declared("pathlib", "Path") == {}
    assert declared("whitenedcse.absent", "Head") == declared("", "Head") == {}
    assert declared("evaluate", "scored") == {}  # beside the package, not in it: imported


@pytest.mark.parametrize("script", ["train", "evaluate"])
def test_every_setting_of_a_script_s_own_has_a_type(script):
    config = OmegaConf.to_container(OmegaConf.load(Path(__file__).parents[1] / f"conf/{script}.yaml"))
    own = {key for key, value in config.items() if not isinstance(value, dict)} - {"defaults", "run"}
    assert own - set(SCRIPT_TYPES) == set()


@pytest.mark.parametrize(
    ("columns", "views", "passes"),
    [("", 3, 3), ("a", 3, 3), ("a,b", 2, 1), ("a,b", 3, 1), ("a,b,c", 3, 1), ("a,b", 4, 2), ("a,b,c", 5, 2)],
)
def test_the_encodings_of_all_columns_together_are_as_many_as_the_views(columns, views, passes):
    config = composed("data=file", f"data.columns=[{columns}]", f"views={views}", name="train")
    assert OmegaConf.create(config).data.passes == passes


@pytest.mark.parametrize(("passes", "repetition"), [(1, 0.0), (2, 0.3), (3, 0.3)])
def test_the_quick_start_repeats_words_where_there_are_several_passes(passes, repetition):
    config = OmegaConf.create(composed(f"data.passes={passes}", name="train"))
    assert config.data.repetition == repetition

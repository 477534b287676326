"""The composed configuration against the signatures that it builds, and what a mistake is answered with."""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf, open_dict

from whitenedcse.app import cli, config
from whitenedcse.app.config import CONF, CURES, check_words, fits, message
from whitenedcse.run import Run


def checked(script, *words, folder=None):
    """The settings of a script after their check."""
    given = [*words, *([f"hydra.searchpath=[file://{folder}]"] if folder else [])]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        made = compose(script, ["run=x", *given], return_hydra_config=True)
        parts = config.without_hydra(made)
        config.check(script, parts, made.hydra)
    return OmegaConf.to_container(parts)


WRONG = {  # what a file sets, and how it is refused
    "seeed: 1": "no setting 'seeed'; the nearest is 'seed'",
    "loss: {temprature: 1}": "no setting 'loss.temprature'; the nearest is 'loss.temperature'",
    "head: {whitening: {group_widht: 1}}": "widht'; the nearest is 'head.whitening.group_width'",
    "trainer: {max_step: 1}": "max_step'; the nearest is 'trainer.max_steps'",  # Lightning's
    "tasks: {name: []}": "no setting 'tasks.name'; the nearest is 'tasks.names'",
    "logger: {project: x}": "no setting 'logger.project'; ",
    "optim: {learning_rate: 1.0}": "optim.learning_rate'; optim has lr, warmup_steps, weight_decay",
    "optim.lr: 1": "no setting 'optim.lr'; there is optim",
    "optim: {total_steps: 5}": "no setting 'optim.total_steps'",  # train.py gives it
    "head: zca": 'head="zca" must be Mapping[str, Any]',
    "views: 2.5": "views=2.5 must be int",
}


def test_a_key_that_nothing_reads_is_refused_with_the_nearest_wherever_it_is(tmp_path):
    with initialize_config_dir(str(CONF), version_base="1.3"):
        made = compose("train", ["run=x"], return_hydra_config=True)
        plain = config.without_hydra(made)
        for line, said in WRONG.items():
            with open_dict(plain), pytest.raises(ValueError, match=re.escape(said)):
                config.check("train", OmegaConf.merge(plain, OmegaConf.create(line)), made.hydra)
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment/own.yaml").write_text("views: 2\n")
    with pytest.raises(ValueError, match="no setting 'experiment'") as error:
        checked("train", "+experiment=own", folder=tmp_path)
    cure = "the file in experiment/ begins with a line # @package _global_"
    assert cure in message(error.value, ["train.py"])


PATH = {"_target_": "pathlib.Path", "_args_": ["a"]}
HINTS = [  # an annotation, values that have it, values that have not
    (int, [0, -1, 10**400, "${views}"], [True, 1.0, None, "1", [1], {}]),
    (float, [1, 1.5, float("nan"), "${oc.env:X}"], [True, None, "1.5", [1.5]]),
    (Literal[0, 1, "auto"], [0, 1, "auto"], [True, False, 1.0, 2, "0", None, []]),
    (Sequence[Sequence[int]], [[], [[]], [[1], [2, 3]], [[1], "${x}"]], [1, [1], [None], [[1.0]], [[True]]]),
    (Sequence[int | None] | None, [None, [], [None], [1, None]], [1, ["a"], [[None]], [1.5]]),
    (tuple[float, float], [[0.9, 0.98]], [0.9, ["a", "b"], None]),
    (list, [[], [1, "a"]], ["ab", 1, None, {}]),
    (dict | None, [None, {}, {"a": None}], [[], 1, "a"]),
    (Mapping[str, Mapping[str, Any]], [{}, {"a": {}}], [[], {"a": 1}, None]),
    (Sequence[Path], [[], [PATH], ["a"]], [PATH["_args_"][0], [{}], [1]]),
    (Callable[..., Any], [PATH], [1, "a", []]),
    ("Absent", [1, "a", None], []),
]  # fmt: skip


def test_a_value_fits_an_annotation_as_python_would_say():
    for hint, right, wrong in HINTS:
        assert [value for value in right if not fits(value, hint)] == [], hint
        assert [value for value in wrong if fits(value, hint)] == [], hint


OWN = """
class Margin:
    def __init__(self, margin: float = 0.3, temperature: "NotImported" = 0.7): ...
    def __call__(self, z, negatives=None): return z.mean()
"""


def test_a_class_of_ones_own_takes_over_nothing_from_the_class_that_it_replaces(tmp_path, monkeypatch):
    """Findings E2: loss._target_=mine.Margin trained with the quick start's temperature of 0.15."""
    monkeypatch.chdir(tmp_path)  # its module is found in the folder where the command is started
    Path("own_margin.py").write_text(OWN)
    own = "loss._target_=own_margin.Margin"
    assert checked("train", own)["loss"] == {"_target_": "own_margin.Margin"}
    assert checked("train", own, "+loss.margin=0.1", "loss.temperature=0.2")["loss"] == {
        "_target_": "own_margin.Margin", "margin": 0.1, "temperature": 0.2,
    }  # fmt: skip
    other = "loss._target_=whitenedcse.training.loss.Matryoshka"
    assert set(checked("train", other, "+loss.dims=[64]")["loss"]) == {"_target_", "dims"}
    for word, name, value in (("+experiment", "margin", 0.1), ("+system", "temperature", 0.4)):
        (path := Path(word[1:], "own.yaml")).parent.mkdir()
        path.write_text(f"# @package _global_\nloss: {{_target_: own_margin.Margin, {name}: {value}}}\n")
        kept = checked("train", f"{word}=own", folder=tmp_path)["loss"]
        assert kept == {"_target_": "own_margin.Margin", name: value}
    with pytest.raises(ValueError, match=r"no setting 'loss\.margn'; the nearest is 'loss\.margin'"):
        checked("train", own, "+loss.margn=1")
    with pytest.raises(ValueError, match=r"loss\._target_=no\.Where is no function or class to import"):
        checked("train", "loss._target_=no.Where")


SAID = {  # a command line, and what its message ends with; each of `CURES` is used
    "encoder.path=bert": "the quick start's encoder has no files: add encoder=pretrained",
    "optim.lrr=1": "To append to your config use +optim.lrr=1; the nearest is 'optim.lr'",
    "corpus=x": "use +corpus=x; there is data.corpus and encoder.corpus",
    "experiment=bert_base": "To append to your default list use +experiment=bert_base",
    "+experiment=bert_bse": "; the nearest is experiment=bert_base",
    "data=my.txt": "; your own is data=file data.corpus=FILE",
    "head=mine.Head": "; your own is head._target_=CLASS",
    "hydra/launcher=jblib": "; pip install 'whitenedcse[sweep]' brings joblib and optuna",
    "my.txt": """own, as "KEY='VALUE'" or 'KEY=["VALUE","VALUE"]'""",
    "data.corpus=a~(1).txt": """own, as "KEY='VALUE'" or 'KEY=["VALUE","VALUE"]'""",
    "seed=1,2": "3. To sweep over it, add --multirun to your command line",
    "+system=simcse +experiment=bert_base": "changes what +experiment sets: put it after +experiment",
    "data=file": "data.corpus=null must be str; add data.corpus=FILE",
}
RAISED = {
    "no setting 'system'; the nearest is 'sys'": "the file in system/ begins with a line # @package _global_",
    "Head.__init__() got an unexpected keyword argument 'width'": "a class is given its settings (",
    "CUDA out of memory. Tried 2 GiB": "trainer.chunk=16 gives the same gradient with less memory",
}  # fmt: skip


def test_a_mistake_is_one_line_with_the_cure_of_the_table():
    for words, end in SAID.items():
        with pytest.raises(Exception) as error:  # noqa: B017, PT011
            checked("train", *words.split())
        assert config.mendable(error.value)
        line = message(error.value, ["train.py", *words.split()])
        assert line.endswith(end) and "\n" not in line and "Config search path" not in line, line
    for text, cure in RAISED.items():
        assert message(ValueError(text), ["train.py"]).startswith(f"{text}; {cure}")
    lines = [*SAID, *RAISED]
    assert len(CURES) <= 20 and len(lines) >= len(CURES)
    assert not config.mendable(TypeError("x")) and config.mendable(FileNotFoundError("x"))


def test_an_option_in_the_style_of_other_programs_is_told_the_nearest_setting():
    for word, said in (
        ("--epochs", "the nearest is trainer.max_epochs="),
        ("--seed=3", "seed=VALUE"),
        ("--zzz", "--help"),
        ("--model_name_or_path", "docs/coming_from.md"),
    ):
        with pytest.raises(ValueError, match=f"^no option {word}: settings are written KEY=VALUE; .*{said}"):
            check_words(["train.py", "seed=1", word])
    check_words(["train.py", "-m", "--multirun", "--config-dir", "x", "--cfg=job", "-cd=x", "seed=-1"])


def test_a_sweep_is_refused_before_its_first_job(refusal, tmp_path):
    """The last job of four has a value out of range, the last of two a misspelt option."""
    for words, said in {
        "-m views=2,3 loss.temperature=1,-1": "job 2 of 4 (views=2 loss.temperature=-1): loss.temperature=-1",
        "-m +system=simcse,smcse": "job 2 of 2 (+system=smcse): Could not find 'system/smcse'",
        "-m +sweep=search monitor=held_out": "a search needs scored pairs: monitor.dev=FILE",
    }.items():
        line = refusal("train", *words.split(), "trainer.max_steps=0")  # else one that began would train
        assert line.startswith(f"error: {said}") and "\n" not in line and not list(tmp_path.iterdir()), line


def test_a_sweep_is_refused_where_a_folder_has_another_job_as_after_more_seeds(refusal, tmp_path):
    other = Run(tmp_path / "outputs/sweep/1")
    other.start("seed: 2")
    other.end({})
    swept = "-m views=2,3 seed=1,3 run=sweep trainer.max_steps=0 data.sample=100 tasks=none".split()
    said = "error: job 2 of 4 (views=2 seed=3): outputs/sweep/1 holds another run: "
    assert (line := refusal("train", *swept)).startswith(said) and "\n" not in line, line


def test_help_lists_what_there_is_and_the_settings_as_these_words_make_them(capsys):
    """By Hydra, whose template is in conf/."""
    whole = ("experiment", "system", "sweep")
    for script, word, groups in (("train", "seed=7", whole), ("evaluate", "draws=7", ())):
        assert cli.main([script, "--help", word]) == 0
        page = capsys.readouterr().out
        listed = [*config.groups(script), *(stem for group in groups for stem in config.stems(group))]
        assert [name for name in listed if not re.search(rf"^  {name} ", page, re.M)] == []
        assert f"\n{word.replace('=', ': ')}\n" in page


def test_every_setting_of_a_script_s_own_has_a_type():
    for script in ("train", "evaluate"):
        every = OmegaConf.to_container(OmegaConf.load(CONF / f"{script}.yaml"))
        own = {key for key, value in every.items() if not isinstance(value, dict)} - {"defaults"}
        assert own <= config.TYPES.keys()


def test_random_weights_learn_from_views_that_differ_by_more_than_dropout():
    with initialize_config_dir(str(CONF), version_base="1.3"):
        small, whole = (compose("train", ["run=x", *words]) for words in ([], ["encoder=bert_base"]))
        one = compose("train", ["run=x", "data.passes=1"])
    assert (small.data.repetition, small.loss.temperature, small.head.dense) == (0.3, 0.15, False)
    assert (whole.data.repetition, whole.loss.temperature, whole.head.dense) == (0.0, 0.05, True)
    assert one.data.repetition == 0.0  # one pass has no views to differ

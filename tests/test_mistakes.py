"""A mistake on a command line is one line with its cure, and leaves nothing in outputs/."""

import re
import shlex
import sys
import warnings
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import InstantiationException
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from omegaconf import OmegaConf
from programs import started
from test_architecture import composed
from test_bad_input import place, start  # noqa: F401  fixtures

from whitenedcse.app import checks, configuration, launch, mistakes
from whitenedcse.app.mistakes import known_keys, no_word, one_line
from whitenedcse.app.options import FOREIGN, leave_out_idle, refuse_replaced
from whitenedcse.app.space import did_you_mean
from whitenedcse.run import flat, pasted
from whitenedcse.training import terms

MISTAKES = {
    "train experiment=bert_base": "experiment is added with a plus: python train.py +experiment=bert_base",
    "train system=simcse": "system is added with a plus: python train.py +system=simcse",
    "train sweep=table3": "sweep is added with a plus: python train.py -m +sweep=table3",
    "train +sweep=table3": "+sweep=table3 is several runs: add -m, as in python train.py -m +sweep=table3",
    "evaluate compare=outputs/a,outputs/b": "compare=outputs/a,outputs/b: a list is written compare=[outputs",
    "evaluate tasks.names=a.csv,b.csv": "tasks.names=a.csv,b.csv: a list is written tasks.names=[a.csv,b.csv",
    "train data.columns=a,b": "data.columns=a,b: a list is written data.columns=[a,b]",
    "train loss.weights=1,2": "loss.weights=1,2: a list is written loss.weights=[1,2]",
    "evaluate k=64,128": "k=64,128: several values are several runs, python evaluate.py -m k=64,128",
    "train seed=1,2": "seed=1,2: several values are several runs, python train.py -m seed=1,2",
    "train --epochs 3": "no option --epochs: settings are written KEY=VALUE; the nearest is trainer.max_epo",
    "train --batch-size=3": "no option --batch-size=3: settings are written KEY=VALUE; the nearest is dat",
    "evaluate --tsaks x": "no option --tsaks: settings are written KEY=VALUE; the nearest is tasks",
    "train --seed 3": "no option --seed: settings are written KEY=VALUE; the nearest is seed=VALUE",
    "train Seed=3": "no setting 'Seed'; the nearest is 'seed'",
    "train +logger=wandb": "+logger=wandb: this group has an option already; write logger=wandb, without a p",
    "train +pooling=mean": "+pooling=mean: this group has an option already; write pooling=mean, without a p",
    "evaluate ++tasks=rte": "++tasks=rte: this group has an option already; write tasks=rte, without a plus",
    "train loss=null": "loss=null: choose loss=none",
    "train +experiment=null": "the name of an option is text, not null or a number: give its file another",
    "train head=null": "head=null: choose head=dense or head=group or ",
    "train ~loss": "~loss: train.py needs it; choose loss=barlow_twins or ",
    "train loss=none": "loss=none trains by mlm.weight above 0",
    "train +terms.a=3": "terms.a has no class; a term of your own begins with its class",
    "train seed=-1": "seed=-1 must be from 0 to 4294967295",
    "train data.seed=4294967296": "data.seed=4294967296 must be from 0 to 4294967295",
    "train terms.a._target_=b.C": "terms has no 'a' yet; add +terms.a._target_=b.C",
    "train terms.a.weight=1": "terms has no 'a' yet; a term of your own begins with its class: +terms.a._tar",
    "train terms.teacher.weight=1": "terms has no 'teacher' yet; add +system=teacher, which has it",
    "train +terms.trace.weight=1": "terms.trace has no class; add +system=iterative_trace, which has it",
    "train +terms.a.weight=1": "terms.a has no class; a term of your own begins with its class: +terms.a._ta",
    "train head=zca head.whitening.group_width=4": "head.whitening.group_width=4 has no effect here: it is "
    "for head=group or head=shuffled_group; this head whitens all channels together",
    "train head=pca head.whitening.partition=view": "head.whitening.partition=view has no effect here",
    "train head.whitening.momentum=0.9": "head.whitening.momentum=0.9 has no effect here: it is for head=zca",
    "train head=zca head.whitening.iterations=3": "head.whitening.iterations=3 has no effect here: it is ",
    "train head.position=after": "head.position=after has no effect here: it is for a head with whitening a",
    "train +system=simcse head.dense=true head.position=both": "head.position=both has no effect here",
    "train mlm.probability=0.2": "mlm.probability=0.2 has no effect here: it is for mlm.weight above 0",
    "train encoder.lora.alpha=32": "encoder.lora.alpha=32 has no effect here: it is for encoder.lora.r above",
    "train loss.hard_negative_log_weight=1": "loss.hard_negative_log_weight=1 has no effect here: it is",
    "train loss._target_=mine.Loss loss.power=2": "a setting of a class of your own is added with a plus: +l",
    "train loss._target_=mine.Missing": "loss._target_='mine.Missing' is no function or class to import: No "
    "module named 'mine'; for mine.py in another folder, write PYTHONPATH=FOLDER python train.py",
    "train +system=simcse +system=sgw": "+system=simcse +system=sgw: one +system at a time",
    "train +sweep=table3 +sweep=table6": "+sweep=table3 +sweep=table6: one +sweep at a time",
    "train +sweep=table3 +system=sgw": "+sweep=table3 has its own list of systems: replace it without a plus"
    ", python train.py -m +sweep=table3 system=sgw",
    "train data.batch_size=2": "2 sentences cannot whiten 2 channels, where eps=1e-05 alone bounds the gain",
    "train +system=sgw_6": "width=6 does not divide d=128; nearest that do: [4, 8]; set head.whitening.group",
    "evaluate compare=[swept,other]": "swept is a sweep: name runs of it, as swept/0, or all as 'swept/*'",
    "train +system=covariance terms.covariance.wieght=2": "no setting 'terms.covariance.wieght'; the nearest "
    "is 'terms.covariance.weight'",
    "train head=dense head.whitening={kind:zca}": 'head.whitening={"kind": "zca"} must be a mapping '
    "with a _target_ or null; head.whitening=null leaves it out; its settings are written head.whiten",
    "train encoder=pretrained encoder.path=bert encoder.lora=8": "encoder.lora=8 must be a mapping with a "
    "_target_ or null; its settings are written encoder.lora.NAME=VALUE",
    "train pooling=[mean,cls]": "pooling has several options, where one is used; choose pooling=cls or pool",
    "train loss=[vicreg,multi_positive]": "loss has several options, where one is used; choose loss=barlow_",
    "train -m head=[dense,group],zca": "job 1 of 2 (head=[dense,group]): head has several options, where",
    "evaluate postprocess=[whitening,pca] model=x": "postprocess has several options, where one is used; ch",
    "train +system=[simcse,zca]": "+system=[simcse,zca]: one +system at a time",
    "train pooling=mean,cls": "pooling=mean,cls: several values are several runs, python train.py -m pooling="
    "mean,cls (",
    "train checkpoint_every=-1": "checkpoint_every=-1 must be 0 or more seconds",
    "evaluate compare=[untested,other]": "compare: untested has no tests: whitenedcse evaluate model="
    "untested run=NAME makes outputs/NAME to compare instead",
    "train --zzz": "no option --zzz: settings are written KEY=VALUE; --help lists them",
    "train encoder.path=bert": "no setting 'encoder.path' in this encoder; add one that has it: encoder=pre",
    "train head=dense head.whitening.group_width=4": "no setting 'head.whitening.group_width' in this head; "
    "add one that has it: head=group or head=shuffled_group (",
    "train head=dense head.whitening.momentum=0.9": "no setting 'head.whitening.momentum' in this head; add "
    "one that has it: head=pca or head=zca (",
    "train loss=wmse loss.temperature=0.2": "no setting 'loss.temperature' in this loss; add one that has",
    "train +loss.temperature=0.2": "loss.temperature is there already: write loss.temperature=0.2, without a",
    "train +views=2": "views is there already: write views=2, without a plus",
    "train loss._target_=nowhere.Loss loss.a=2": "a setting of a class of your own is added with a plus: +l",
    "train loss.share=0.1": "no setting 'loss.share' in this loss; add one that has it: loss=sigreg",
    "train head.dens=true": "no setting 'head.dens'; the nearest is 'head.dense'",
    "train vews=3": "no setting 'vews'; the nearest is 'views'",
    "train postprocess=zca": "postprocess is a setting of evaluate.py, not of train.py",
    "train draws=3": "draws is a setting of evaluate.py, not of train.py",
    "evaluate views=3": "views is a setting of train.py, not of evaluate.py",
    "evaluate model=x loss.form=l1": "loss.form is a setting of train.py, not of evaluate.py",
    "train head=shufled_group": "no head=shufled_group; the nearest is head=shuffled_group; there are",
    "evaluate model=x pooling=men": "no pooling=men; the nearest is pooling=mean; there are cls, ",
    "train +experiment=bert_bse": "no experiment=bert_bse; the nearest is experiment=bert_base; there",
    "train +system=zzz": "no system=zzz; there are barlow,",
    "train data=file": "data=file has no corpus yet: add data.corpus=FILE",
    "train trainer.accelerator=gpu": "trainer.accelerator=gpu, but PyTorch finds no such device here",
    "train run=": "run is empty: give it a value, as run=VALUE, or leave it out",
    "train run=s3://b/x": "a run is written to this machine, not to s3://: give the name of a directory",
    "evaluate model=x hydra.run.dir=gs://b/x": "a run is written to this machine, not to gs://: give the ",
    "train run=/x/y": "run=/x/y is no name for a directory in outputs/; elsewhere is hydra.run.dir=/x/y",
    "train run=../y": "run=../y is no name for a directory in outputs/; elsewhere is hydra.run.dir=../y",
    "train data.corpus=": "data.corpus is empty: give it a value",
    "train optim.lr=-1": "optim.lr=-1 must be finite and above 0",
    "train optim.warmup_steps=-1": "optim.warmup_steps=-1 is not in 0 .. ",
    "train monitor.every=0": "monitor.every=0 must be 1 or more",
    "train monitor.dev=nothing.tsv": "no task 'nothing.tsv': no file in ",
    "train trainer.max_steps=-5": "trainer.max_steps must be ",
    "train trainer.accelerator=cuda": "trainer.accelerator=cuda, but PyTorch finds no such device here",
    "train trainer.devices=cuda": "trainer.devices is how many devices to use, 1 or more, or auto",
    "train loss=matryoshka loss.dims=[64,300]": "loss.dims=[64, 300]: 300 is more than the embedding's width "
    "128; leave out what is above it, as loss.dims=[64] ",
    "train data=file data.corpus=x.csv data.columns=[a,b] data.passes=2": "data.passes=2 of each of 2 "
    "columns: 4 encoder passes are more than views=3; lower data.passes, or give views=4",
    "train data.passes=4": "data.passes=4: 4 encoder passes are more than views=3; lower data.pass",
    "train encoder=pretrained": "encoder.path has no value yet: add encoder.path=DIR_OR_HUB_ID",
    "train head=mine.Head": "no head=mine.Head; there are dense, group, identity, pca, shuffled_group, zca; "
    "your own is head._target_=mine.Head",
    "train encoder=my/bert": "no encoder=my/bert; there are ",
    "train data=file data.corpus=a~(1).txt": "data.corpus=a~(1).txt: a value with such characters has "
    "quotes of its own, \"data.corpus='a~(1).txt'\"",
    "train my.txt": "my.txt: settings are written KEY=VALUE, as data.corpus=my.txt",
    "evaluate outputs/x": "outputs/x: settings are written KEY=VALUE, as model=outputs/x",
    "evaluate model=x tasks=my.tsv": "no tasks=my.tsv; there are all, default, none, quickstart, rte, sts, "
    "transfer; your own is tasks.names=[my.tsv]",
    "evaluate model=x tasks=[my.tsv]": "no tasks=my.tsv; there are all,",
    "evaluate model=x k=64": "k=64 has no effect here: it is for postprocess=whitening, pca, pca_cor",
    "evaluate model=x k=64 postprocess=zca": "k=64 has no effect here",
    "evaluate model=x fit=year": "fit=year has no effect here: it is for a postprocess that is fitted",
    "evaluate model=x fit=year postprocess=prefix k=2": "fit=year has no effect here",
    "evaluate model=x columns=[a]": "columns=['a'] has no effect here: it is for a corpus, fit=CORPUS, of a",
    "evaluate model=x pooling=mean protocol=whiteningbert": "pooling has no effect here: it is for rows with",
    "evaluate model=x layers=[1] protocol=bert_whitening": "layers=[1] has no effect here: it is for rows w",
    "train optim.lr 1e-5": "optim.lr: settings are written KEY=VALUE, as optim.lr=1e-5",
    "train seed optim.lr=1": "seed: settings are written KEY=VALUE, as seed=VALUE",
    "train seed": "seed: settings are written KEY=VALUE, as seed=VALUE",
    "train my.txt 3": "my.txt: settings are written KEY=VALUE, as data.corpus=my.txt",
    "train --run one": "no option --run: settings are written KEY=VALUE; the nearest is run=VALUE",
    "train --run=one": "no option --run: settings are written KEY=VALUE; the nearest is run=VALUE",
    "evaluate compare=[a,b] run=c figures=[layers] digits=1": "compare= reads draws and digits, and writes "
    "no file: leave out run=c figures=[layers]",
    "train learning_rate=2e-5": "no setting 'learning_rate': it is optim.lr=VALUE here; docs/coming_from.",
    "train --model_name_or_path M": "no setting 'model_name_or_path': it is encoder=pretrained encoder.path",
    "train nonsense=1": "no setting 'nonsense'; the top level has checkpoint_every, data, embedding, "
    "encoder, gather, head, logger, loss, mlm, monitor,",
    "train encoder=pretrained encoder.lora.nonsense=1": "no setting 'encoder.lora.nonsense'; encoder.lora",
    "evaluate learning_rate=1": "no setting 'learning_rate'; the top level has bf16, ",
    "evaluate compare=[a,b] model=c": "compare= reads draws and digits, and writes no file: leave out mod",
    "evaluate compare=[a]": "compare: no run matches a (WHITENEDCSE_TRACEBACK=1 ",
    "evaluate model=bert --whiten w.safetensors": "--whiten: evaluate fits transforms itself, ",
    "evaluate model=bert --whiten=w.safetensors": "--whiten=w.safetensors: evaluate fits transforms itself, ",
    "train --whiten x": "no option --whiten: settings are written KEY=VALUE; ",
    "evaluate model=bert postprocess=whitening fit=in/w.safetensors": "fit=in/w.safetensors: evaluate fits",
    "evaluate model=bert whiten=w.safetensors": "whiten=w.safetensors: evaluate fits transforms itself, ",
    "evaluate model=bert postprocess=w.safetensors": "postprocess=w.safetensors: evaluate fits transforms",
    "evaluate model=bert postprocess=mine.Own": "no postprocess=mine.Own; there are ",
    "train +system=vicreg views=2 data=file data.corpus=x.csv data.columns=[a,b,c]": "loss=vicreg cannot use",
    "evaluate compare=[s/[01],b]": "compare=[s/[01],b]: values with such characters have quotes of their "
    'own, \'compare=["s/[01]","b"]\'',
    "train +system=SimCSE": "no system=SimCSE; the nearest is system=simcse; there are",
    "evaluate model=typo": "encoder typo: no directory ",
    "evaluate model=stopped": "stopped is a run without a checkpoint: one of evaluate.py, or one of tr",
    "evaluate model=runs": "runs is a folder of runs; name one, runs/NAME: a, b",
    "train corpus=my.txt": "no setting 'corpus'; there is data.corpus",
    "train encoder.depth=3": "no setting 'encoder.depth'; encoder has batches, columns, ",
    "train optimizer=adam": "no setting 'optimizer'; there is optim (",
    "train +system=vicreg loss.temperature=0.1": "no setting 'loss.temperature' in this loss; add one tha",
}


@pytest.mark.parametrize("said", MISTAKES)
@pytest.mark.slow(but=12)
def test_a_mistake_is_one_line_with_its_cure_and_leaves_nothing(said, start, monkeypatch):  # noqa: F811
    if "gpu" in said:
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for name in ("a", "b"):
        Path("runs", name).mkdir(parents=True, exist_ok=True)
        Path("runs", name, "scores.json").touch()
    for name in ("other", "untested"):
        Path(name).mkdir(exist_ok=True)
        Path(name, "scores.json").write_text('{"dev": {}, "seed": 1}')
    Path("swept").mkdir(exist_ok=True)
    Path("swept/multirun.yaml").touch()
    Path("stopped").mkdir(exist_ok=True)
    Path("stopped/config.yaml").touch()
    script, *words = said.split()
    code, line = start(script, *words)
    assert code == 2 and "\n" not in line and line.startswith(f"error: {MISTAKES[said]}"), line
    assert not list(Path("outputs").glob("*"))


@pytest.mark.parametrize("system", ["vicreg", "barlow", "sigreg"])
@pytest.mark.slow
def test_a_system_whose_loss_has_no_temperature_trains_the_encoder_of_the_quick_start(system, start):  # noqa: F811
    small = "trainer.max_steps=1 tasks=none data.sample=200 encoder.width=16 encoder.heads=2"
    assert start("train", f"+system={system}", "run=r", *small.split())[0] is None
    assert "temperature" not in OmegaConf.load("outputs/r/config.yaml").loss


MINE = """
from whitenedcse import ProjectionHead
class Power:
    def __init__(self, power): self.power = power
    def __call__(self, z, negatives=None): return z.mean()
class Narrow(ProjectionHead):
    def __init__(self, dim): super().__init__(dim)
class Inside(ProjectionHead):
    def __init__(self, width): len(width, 1)
def optimiser(parameters): pass
"""
GIVEN = (
    "; a class is given its settings (+loss.NAME=VALUE adds one), a head width= too, optim total_steps= too"
)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("loss._target_=mine.Power", "Power.__init__() missing 1 required positional argument: 'power'"),
        ("+terms.a._target_=mine.Power", "Power.__init__() missing 1 required positional argument: 'power'"),
        ("head._target_=mine.Narrow", "Narrow.__init__() got an unexpected keyword argument 'width'"),
        ("optim._target_=mine.optimiser", "optimiser() got an unexpected keyword argument 'total_steps'"),
    ],
)
@pytest.mark.slow(but=2)
def test_a_class_with_other_arguments_is_told_those_that_it_is_given(words, message, start, monkeypatch):  # noqa: F811
    Path("mine.py").write_text(MINE)
    monkeypatch.syspath_prepend(".")
    small = "trainer.max_steps=1 tasks=none data.sample=200 encoder.width=16 encoder.heads=2 run=r"
    code, line = start("train", words, *small.split())
    assert (code, line) == (2, f"error: {message}{GIVEN} (WHITENEDCSE_TRACEBACK=1 shows where)")
    assert not list(Path("outputs").glob("*"))


def test_a_mistake_inside_a_class_is_a_traceback(start, monkeypatch):  # noqa: F811
    Path("mine.py").write_text(MINE)
    monkeypatch.syspath_prepend(".")
    small = "trainer.max_steps=1 tasks=none data.sample=200 encoder.width=16 encoder.heads=2 run=r"
    with pytest.raises(TypeError, match=r"^len\(\) takes exactly one argument"):
        start("train", "head._target_=mine.Inside", *small.split())


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("sentences", [16, 17])
@pytest.mark.slow(but=1)
def test_fewer_sentences_than_channels_of_zca_are_noted_and_warnings_of_libraries_are_not(
    sentences,
    start,  # noqa: F811
    monkeypatch,
):
    def whole(config):
        warnings.warn("of a library", FutureWarning, stacklevel=1)
        parts(config)

    parts = checks.refuse_parts
    monkeypatch.setattr(checks, "refuse_parts", whole)
    monkeypatch.setattr(launch, "say", (said := []).append)
    small = f"trainer.max_steps=1 tasks=none data.sample=200 data.batch_size={sentences} run=r"
    code, _ = start("train", "head=zca", "encoder.width=16", "encoder.heads=2", *small.split())
    notes = [line for line in map(str, said) if line.startswith("note: ")]
    assert code is None and len(notes) == (sentences == 16)
    assert all("16 sentences cannot whiten 16 channels" in note for note in notes)


def refused(*words):
    """Check the settings of train.py, and read no data."""
    with initialize_config_dir(str(configuration.CONF), version_base="1.3"):
        config = compose("train", ["run=x", *words], return_hydra_config=True)
    parts = OmegaConf.masked_copy(config, [key for key in config if key != "hydra"])
    checks.refuse("train", parts, config.hydra)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("views=1", "views=1: a contrastive loss needs"),
        ("trainer.chunk=0", "trainer.chunk=0 must be"),
        ("trainer.chunk=8 mlm.weight=0.1", "trainer.chunk=8 does not go with"),
        ("loss=none", "loss=none trains by"),
        ("+system=covariance +terms.lr=${terms.covariance}", "terms.lr: metrics.csv has"),
        ("trainer.max_steps=0", "trainer.max_steps=0 or"),
        ("trainer.max_epochs=-1", "there is no last step"),
        ("trainer.precision=bf16-true", "trainer.precision=bf16-true keeps"),
        ("trainer.strategy=fsdp", "trainer.strategy=fsdp divides"),
        ("trainer.timeout=0", "trainer.timeout=0 must be"),
        ("monitor.every=0", "monitor.every=0 must be"),
        ("monitor.patience=0", "monitor.patience=0 must be"),
        ("monitor.patience=2 monitor=held_out", "monitor.patience=2 needs scored pairs"),
        ("mlm.weight=-1", "mlm.weight=-1 must be"),
        ("mlm.weight=0.1 mlm.probability=2", "mlm.probability=2 must be"),
        ("encoder.lora.r=-1", "encoder.lora.r=-1 must be"),
        ("encoder.batches=foo", 'encoder.batches="foo" must be one of auto, packed, padded'),
        ("encoder.width=130", "encoder.vocabulary=4000, layers=2, width=130, heads=4"),
        ("embedding=foo", "embedding='foo' is not one of"),
        ("embedding=dense", "embedding=dense, but this head"),
        ("head.dense=true head.position=foo", "head.position='foo' is not one of"),
        ("loss=matryoshka", "loss.dims=[64, 128, 256, 512]: 512 is more than"),
        ("loss=matryoshka loss.dims=[64] data.passes=1", "loss=matryoshka compares encoder passes"),
        ("loss.weights=[1,2,3]", "loss.weights=[1, 2, 3] for 2 positives"),
        ("data.sample=0", "sample=0: take at least one"),
    ],
)
def test_what_no_data_is_needed_for_is_refused_before_any_is_read(words, said):
    with pytest.raises((ValueError, InstantiationException)) as error:
        refused(*words.split())
    assert one_line(error.value, ["train.py", *words.split()]).startswith(said)


def test_short_names_of_precisions_are_those_of_lightning():
    for name in ("32", "32-true", "64", "bf16", "bf16-mixed", "16-mixed"):
        refused(f"trainer.precision={name}")


def test_another_class_has_none_of_the_settings_of_the_one_that_it_replaces(start):  # noqa: F811
    words = (
        "loss._target_=whitenedcse.training.decorrelation.BarlowTwins +loss.redundancy=0.1 run=r tasks=none "
    )
    words += "trainer.max_steps=1 data.sample=200 encoder.width=16 encoder.heads=2"
    assert start("train", *words.split())[0] is None
    assert set(OmegaConf.load("outputs/r/config.yaml").loss) == {"_target_", "redundancy"}


@pytest.mark.parametrize(
    ("words", "group_width"),
    [
        ("+system=sgw_6 head=zca", None),  # the width of a system is for kinds with groups
        ("+system=sgw_6 head=pca", None),
        ("head=group head.whitening.group_width=4", 4),
    ],
)
@pytest.mark.slow(but=1)
def test_groups_of_a_system_make_room_for_those_of_the_command_line(words, group_width, start):  # noqa: F811
    small = "trainer.max_steps=1 tasks=none data.sample=200 encoder.width=24 encoder.heads=2 run=r"
    code, line = start("train", *words.split(), *small.split())
    assert code is None, line
    whitening = OmegaConf.load("outputs/r/config.yaml").head.whitening
    assert whitening.group_width == group_width


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("head=pca group_width=4", "head.whitening.group_width=4 has no effect here: it is for head=group"),
    ],
)
def test_groups_of_the_command_line_that_contradict_each_other_are_refused(words, message, start):  # noqa: F811
    words = [word if "head=" in word else f"head.whitening.{word}" for word in words.split()]
    code, line = start("train", *words, "encoder.width=24", "encoder.heads=2", "run=r", "data.sample=200")
    assert code == 2 and message in line, line


@pytest.mark.parametrize("system", ["whitenedcse", "sgw", "official", "zca", "iterative"])
@pytest.mark.slow(but=2)
def test_a_system_that_whitens_brings_its_head_to_an_experiment_without(system):
    for experiment in ("simcse_bert_base", "pretrain"):
        config = composed(f"+experiment={experiment}", f"+system={system}")
        assert config["head"]["whitening"]["_target_"].endswith(".WhiteningSettings")
        assert config["views"] == (2 if system == "sgw" else 3)
    assert composed(f"+system={system}", "head=pca")["head"]["whitening"]["kind"] == (
        "zca" if system == "zca" else "pca"
    )


def test_a_run_directory_that_holds_something_stays(start):  # noqa: F811
    Path("outputs/r").mkdir(parents=True)
    Path("outputs/r/notes.txt").write_text("mine")
    assert start("train", "run=r", "views=1")[0] == 2
    assert Path("outputs/r/notes.txt").read_text() == "mine"


def test_a_run_and_a_sweep_do_not_share_a_directory(start):  # noqa: F811
    for name, mark in {"swept": "multirun.yaml", "ran": "config.yaml"}.items():
        Path("outputs", name).mkdir(parents=True)
        Path("outputs", name, mark).touch()
    code, line = start("train", "run=swept")
    assert code == 2 and "outputs/swept holds a sweep; choose another name with run=NAME" in line
    done = started("whitenedcse", "train", "-m", "run=ran", "seed=1,2", cwd=Path.cwd())
    assert done.returncode == 2 and "outputs/ran holds a run; choose another name" in done.stderr
    assert [len(list(Path("outputs", name).iterdir())) for name in ("swept", "ran")] == [1, 1]


@pytest.mark.parametrize(
    ("defaults", "message"),
    [
        (
            "override /pooling: [cls, mean]",
            "pooling has several options, where one is used; choose pooling=cls or ",
        ),
        *(
            (
                f"{key}: cls",
                f"experiment/own: '- {key}: cls' chooses nothing; to choose an option write '- override "
                "/pooling: cls' under the defaults of the file",
            )
            for key in ("pooling", "/pooling", "override pooling", "override /poling", "/poolng")
        ),
        ("override /qqq: cls", "experiment/own: '- override /qqq: cls' names no group; there are data, enco"),
    ],
)
@pytest.mark.parametrize("order", [1, -1], ids=["last", "first"])
def test_an_own_file_chooses_its_options_one_by_one_with_override(order, defaults, message, start):  # noqa: F811
    Path("mine/experiment").mkdir(parents=True, exist_ok=True)
    lines = ["  - override /encoder: small", f"  - {defaults}"][::order]
    Path("mine/experiment/own.yaml").write_text("\n".join(["# @package _global_", "defaults:", *lines, ""]))
    code, line = start("train", "--config-dir", "mine", "+experiment=own")
    assert code == 2 and line.startswith(f"error: {message}")


@pytest.mark.parametrize(
    ("file", "words", "dense"),
    [
        ("", "", False),
        ("", "head=shuffled_group", False),
        ("", "+system=simcse", False),
        ("", "head=dense", True),
        ("", "head='dense' encoder.width=64", True),  # as by whitenedcse.train
        ("", "head=dense head.dense=false", False),
        ("", "head=identity", False),
        ("", "encoder=bert_base", True),
        ("", "encoder=bert_base head=identity", False),
        ("defaults: [override /head: dense]", "+experiment=own", True),
        ("defaults: [override /head: dense]", "+system=own", True),
        ("defaults: [override /head: zca]", "+experiment=own", False),
        ("head: {dense: true}", "+experiment=own", True),
        ("head: {dense: true}", "+experiment=own head=identity", True),  # and refused
    ],
)
def test_a_dense_layer_that_is_asked_for_is_there_beside_random_weights(file, words, dense, tmp_path):
    for group in ("experiment", "system"):
        (tmp_path / group).mkdir()
        (tmp_path / group / "own.yaml").write_text(f"# @package _global_\n{file}\n")
    with initialize_config_dir(str(configuration.CONF), version_base="1.3"):
        given = [f"hydra.searchpath=[file://{tmp_path}]", *words.split()]
        config = compose("train", given, return_hydra_config=True)
    assert config.head.dense == dense  # so --help and --cfg job --resolve say it too
    leave_out_idle(config, config.hydra)
    assert config.head.dense == dense


EXPERIMENT = """# @package _global_
tasks: {names: [quickstart/test]}
monitor: {dev: my.tsv}
pooling: {kind: last}
loss: {temperature: 0.1}
optim: {lr: 1.0e-4}
head: {whitening: {group_width: 4}}
data: {corpus: my.txt}
encoder: {path: here}
"""


@pytest.mark.parametrize(
    ("words", "replaced"),
    [
        ("tasks=none", "tasks.names=[]"),
        ("monitor=held_out", "monitor.dev=null"),
        ("monitor=held_out monitor.dev=null", ""),
        ("pooling=mean", "pooling.kind=mean"),
        ("loss=contrastive", "loss.temperature=0.15"),
        ("optim=adamw", "optim.lr=0.004"),
        ("data=wiki1m", "data.corpus=wiki1m"),
        ("data=nli_for_simcse data.corpus=x", ""),  # and columns, which the experiment does not set
        ("encoder=bert_base", "encoder.path=bert-base-uncased"),
        ("encoder=pretrained", ""),  # has no path of its own
        ("encoder=small", ""),  # nor this
        ("data=file", ""),
        ("tasks=quickstart", ""),  # the same
        ("loss=vicreg", ""),
        ("head=zca", ""),  # has no groups
        ("trainer=default logger=wandb loss=vicreg", ""),
    ],
)
def test_an_option_whose_settings_an_experiment_replaces_is_refused(words, replaced, tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment/own.yaml").write_text(EXPERIMENT)
    given = [f"hydra.searchpath=[file://{tmp_path}]", "+experiment=own", *words.split()]
    with initialize_config_dir(str(configuration.CONF), version_base="1.3"):
        config = compose("train", given, return_hydra_config=True)
    hydras = config.hydra
    leave_out_idle(config, hydras)
    if replaced:
        line = f"{words} has {replaced}, which +experiment=own replaces: add {replaced}, or leave out {words}"
        with pytest.raises(ValueError, match=f"^{re.escape(line)}$"):
            refuse_replaced(configuration.plain(config), hydras)
    else:
        refuse_replaced(configuration.plain(config), hydras)
    assert ("path" in config.encoder) == (words != "encoder=small")


def test_what_a_system_replaces_of_an_option_is_refused_in_every_job(start):  # noqa: F811
    words = ["-m", "+system=sigreg", "head=identity,dense", "encoder=pretrained", "encoder.path=x", "run=x"]
    code, line = start("train", *words)
    cause = (
        "head=dense has head.dense=true, which +system=sigreg replaces: add head.dense=true, or leave out "
    )
    assert code == 2 and line.startswith(f"error: job 2 of 2 (head=dense): {cause}")


OWN_FILES = {
    "encoder/groups": "# @package _global_\ndefaults: [small@encoder]\nencoder: {layers: 1}\n",
    "encoder/alone": "defaults: [small]\nlayers: 1\n",
    "encoder/above": "defaults: [alone]\n",
    "loss/distances": "_target_: torch.nn.PairwiseDistance\n",
    "head/scaled": "_target_: torch.nn.CosineSimilarity\n",
}


@pytest.mark.parametrize(
    ("option", "file", "temperature", "dense"),
    [
        (
            "loss=own",
            "# @package _global_\ndefaults: [multi_positive@loss]\nloss: {temperature: 0.2}\n",
            0.2,
            False,
        ),
        ("loss=own", "defaults: [multi_positive]\ntemperature: 0.2\n", 0.2, False),
        ("loss=own", "defaults: [multi_positive]\nform: l2\n", 0.15, False),  # as loss=contrastive
        ("head=own", "defaults: [shuffled_group]\ndense: true\n", 0.15, True),
        ("head=own", "defaults: [shuffled_group]\nposition: after\n", 0.15, False),
        ("head=own", "# @package _global_\ndefaults: [dense@head]\n", 0.15, True),
        ("head=own", "defaults: [dense]\n", 0.15, True),
        ("encoder=own", "defaults: [small]\nlayers: 1\n", 0.15, False),
        ("encoder=own", "defaults: [pretrained]\npath: here\n", 0.05, True),
    ],
)
def test_what_an_option_of_ones_own_writes_is_kept_beside_random_weights(
    option, file, temperature, dense, tmp_path
):
    group = option.partition("=")[0]
    (tmp_path / group).mkdir()
    (tmp_path / group / "own.yaml").write_text(file)
    with initialize_config_dir(str(configuration.CONF), version_base="1.3"):
        words = [f"hydra.searchpath=[file://{tmp_path}]", option]
        config = compose("train", words, return_hydra_config=True)
    leave_out_idle(config, config.hydra)
    assert (config.loss.temperature, config.head.dense) == (temperature, dense)


@pytest.mark.parametrize("encoder", ["groups", "alone", "above"])
@pytest.mark.parametrize("words", ["+system=vicreg", "loss=none", "loss=distances head=scaled"])
def test_a_class_that_lacks_a_setting_of_random_weights_is_used_without_it(words, encoder, tmp_path):
    for name, text in OWN_FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.yaml").write_text(text)
    words = [f"hydra.searchpath=[file://{tmp_path}]", f"encoder={encoder}", *words.split()]
    with initialize_config_dir(str(configuration.CONF), version_base="1.3"):
        config = compose("train", words, return_hydra_config=True)
    leave_out_idle(config, config.hydra)
    assert config.encoder.layers == 1 and config.optim.lr == 4e-3  # what is read stays
    assert "temperature" not in (config.get("loss") or {})
    assert ("dense" in config.head) == ("head=scaled" not in words)


@pytest.mark.parametrize("option", ["pretrained", "bert_base"])
@pytest.mark.parametrize(
    "text",
    [
        "# @package _global_\ndefaults: [{}@encoder]\nencoder: {{path: here}}\n",
        "defaults: [{}]\npath: here\n",
    ],
    ids=["with its group", "alone"],
)
def test_an_encoder_of_ones_own_builds_on_any_option_with_and_without_its_group(text, option, tmp_path):
    (tmp_path / "encoder").mkdir()
    (tmp_path / "encoder/own.yaml").write_text(text.format(option))
    with initialize_config_dir(str(configuration.CONF), version_base="1.3"):
        config = compose("train", [f"hydra.searchpath=[file://{tmp_path}]", "encoder=own"])
    configuration.refuse_unknown(configuration.plain(config), configuration.top("train"))
    assert config.encoder.path == "here" and config.encoder._target_ == "whitenedcse.model.encoder.pretrained"


@pytest.mark.parametrize("group", configuration.groups("train"))
def test_an_option_of_ones_own_may_change_each_setting_of_its_group(group, tmp_path):
    with initialize_config_dir(str(configuration.CONF), version_base="1.3"):
        before = compose("train", return_hydra_config=True)
        default = before.hydra.runtime.choices[group]
        settings = flat({group: configuration.plain(before)[group]})
        changed = {name: f"${{oc.env:NONE,{i}}}" for i, name in enumerate(settings) if "_target_" not in name}
        own = OmegaConf.create()
        for name, value in changed.items():
            OmegaConf.update(own, name.removeprefix(f"{group}."), value)
        (tmp_path / group).mkdir()
        lines = [f"defaults: [{default}]", OmegaConf.to_yaml(own)] if changed else ["{}"]
        (tmp_path / group / "own.yaml").write_text("\n".join(lines))
        config = compose("train", [f"hydra.searchpath=[file://{tmp_path}]", f"{group}=own"])
    assert flat({group: configuration.plain(config)[group]}).items() >= changed.items()
    assert changed or group in ("logger", "tasks"), group


@pytest.mark.parametrize(
    ("name", "line", "word", "message"),
    [
        (
            "monitor",
            "dev: my.tsv",
            "run=x",
            "no setting 'monitor.dev'; monitor has none; monitor=default or ",
        ),
        ("pooling", "kind: last", "run=x", "no setting 'pooling.kind'; pooling has none; pooling=cls or "),
        (
            "data",
            "_target_: whitenedcse.data.datamodule.SentenceData\ncorpus: my.txt",
            "run=x",
            "Key 'columns' is not in struct full_key: data.columns object_type=dict; data=file or ",
        ),
        (
            "trainer",
            "max_steps: 1",
            "trainer.max_epochs=2",
            "no setting 'trainer.max_epochs' in this trainer; add one that has it: trainer=default (",
        ),
    ],
)
def test_an_own_option_without_a_class_is_told_to_begin_with_one_that_has_it(
    name,
    line,
    word,
    message,
    start,  # noqa: F811
    tmp_path,
):
    (tmp_path / name).mkdir()
    (tmp_path / f"{name}/own.yaml").write_text(f"{line}\n")
    code, said = start("train", "--config-dir", str(tmp_path), f"{name}=own", word)
    assert code == 2 and said.startswith(f"error: {message}")
    assert ("begins with the option that it changes, defaults: [OPTION] (" in said) == (word == "run=x")


def test_an_option_that_is_taken_over_at_the_top_level_is_told_its_place(start, tmp_path):  # noqa: F811
    (tmp_path / "head").mkdir()
    (tmp_path / "head/own.yaml").write_text("# @package _global_\ndefaults: [dense]\nhead: {dense: true}\n")
    code, line = start("train", "--config-dir", str(tmp_path), "head=own", "run=x")
    assert code == 2 and "'_target_' at the top level; " in line and "'- OPTION@GROUP' (" in line


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            "encoder: {layers: 1}",
            "no setting 'encoder.layers'; encoder has none; encoder=small has it; your file begins ",
        ),
    ],
)
def test_an_encoder_file_that_makes_no_encoder_is_not_told_of_its_first_line(lines, message, start, tmp_path):  # noqa: F811
    (tmp_path / "encoder").mkdir()
    (tmp_path / "encoder/own.yaml").write_text(f"# @package _global_\n{lines}\n")
    code, line = start("train", "--config-dir", str(tmp_path), "encoder=own", "run=x")
    assert code == 2 and line.startswith(f"error: {message}")


@pytest.mark.parametrize("group", ["experiment", "system", "sweep"])
def test_no_file_of_conf_is_blamed(group):
    for stem in configuration.stems(group):
        assert mistakes.no_default(["train.py", f"+{group}={stem}"]) == ""


@pytest.mark.parametrize(
    ("line", "word"),
    [("trainer: 3", "trainer.max_steps=1"), ("optim: [1]", "optim.lr=1"), ("head: zca", "head.width=3")],
)
def test_a_value_in_place_of_a_group_comes_before_a_setting_of_it(line, word, start):  # noqa: F811
    Path("mine/experiment").mkdir(parents=True, exist_ok=True)
    Path("mine/experiment/own.yaml").write_text(f"# @package _global_\n{line}\n")
    code, said = start("train", "--config-dir", "mine", "+experiment=own", word)
    assert code == 2 and " stands in place of settings; to choose an option write '- override /" in said


def test_an_experiment_that_is_not_there_is_said_to_need_its_folder(start):  # noqa: F811
    code, line = start("train", "+experiment=qqq")
    assert code == 2 and "; your own is DIR/experiment/qqq.yaml, with --config-dir DIR (" in line


@pytest.mark.slow
def test_a_refused_command_leaves_a_corrected_one_its_name(start, monkeypatch):  # noqa: F811
    def code(lr):
        monkeypatch.setenv("HYDRA_FULL_ERROR", "0")  # a start sets it
        small = "trainer.max_steps=1 tasks=none data.sample=200 encoder.width=16 encoder.heads=2"
        return start("train", "run=again", f"optim.lr={lr}", *small.split())[0]

    assert code(-1) == 2 and not Path("outputs/again").exists()
    assert code(1e-4) is None
    assert code(-1) == 2  # another run is there now
    assert Path("outputs/again/scores.json").exists()


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("train -m optim.lr=-1,1 tasks=none", "job 1 of 2 (optim.lr=-1): optim.lr=-1 must be finite"),
        ("train -m seed=1,2 optim.lr=1,abc", 'job 2 of 4 (seed=1 optim.lr=abc): optim.lr="abc" must be a nu'),
        (
            "train -m head.whitening.group_width=2,5",
            "job 2 of 2 (head.whitening.group_width=5): width=5 does",
        ),
        ("train -m +system=simcse,smcse", "job 2 of 2 (+system=smcse): no system=smcse; the nearest is syst"),
        (
            "train -m mlm.weight=0 mlm.probability=0.1,0.3",
            "mlm.probability=0.3 has no effect here: it is for",
        ),
        ("train -m pooling.kind=cls,men", "job 2 of 2 (pooling.kind=men): pooling.kind='men' is not one of"),
        (
            "train -m system=simcse,sgw run=a/b",
            "job 1 of 2 (system=simcse): system is added with a plus: whitenedcse train +system=simcse",
        ),
        ("train -m head=dense,zca views=2,1", "job 2 of 4 (head=dense views=1): views=1: a contrastive loss"),
        ("evaluate -m model=x draws=1,2 views=3", "views is a setting of train.py"),
        (
            "train -m +system=simcse,vicreg data=file data.corpus=x.csv data.columns=[a,b,c] views=2",
            "job 2 of 2 (+system=vicreg): loss=vicreg cannot use hard negatives, which a third column",
        ),
    ],
)
@pytest.mark.slow(but=2)
def test_a_refused_sweep_leaves_nothing(tmp_path, command, said):
    done = started("whitenedcse", *command.split(), cwd=tmp_path)
    assert done.returncode == 2 and f"error: {said}" in done.stderr
    assert not (tmp_path / "outputs").exists()


def test_devices_beside_other_ranks_of_torchrun_are_to_be_left_out(monkeypatch):
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError) as error:
        TorchElasticEnvironment().validate_settings(num_devices=3, num_nodes=1)
    said = "trainer.devices=3, but 2 ranks were started: leave out trainer.devices"
    assert one_line(error.value, ["train.py"]) == said


def test_a_command_that_is_shown_can_be_pasted():
    words = ["tasks.names=[my tests.csv]", "encoder.path='a b'", "run=it's $HOME", "seed=1"]
    for typed, by in (
        ("/x/train.py", ["python", "train.py"]),
        ("whitenedcse train", ["whitenedcse", "train"]),
    ):
        assert shlex.split(pasted([typed, *words])) == [*by, *words]
    assert pasted(["whitenedcse train", *words[:2]]) == (
        """whitenedcse train 'tasks.names=[my tests.csv]' "encoder.path='a b'\""""
    )


def test_an_installed_command_is_named_as_it_was_typed():
    error = ValueError("Ambiguous value for argument 'seed=1,2' 1. To use it as a list ...")
    assert "whitenedcse train -m seed=1,2" in one_line(error, ["whitenedcse train", "seed=1,2"])


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("data.corpus=a~(1).txt", "a~(1).txt"),
        ("data.corpus=it's (1).txt", "it's (1).txt"),
        ("compare=[s/[01],s/[2-4]]", ["s/[01]", "s/[2-4]"]),
        ("compare=[s/[0,1],s/*]", ["s/[0,1]", "s/*"]),
        ("tasks.names=['a (1).tsv', b (2).tsv]", ["a (1).tsv", "b (2).tsv"]),
    ],
)
def test_the_quotes_that_a_message_proposes_are_taken(word, value):
    (proposed,) = shlex.split(re.split("of its own, |of their own, ", no_word(["train.py", word]))[1])
    parsed = OverridesParser.create().parse_override(proposed)
    assert OmegaConf.to_container(OmegaConf.create({"value": parsed.value()}))["value"] == value


@pytest.mark.parametrize(
    "before", [["--config-dir", "../mine"], ["--config-dir=../mine", "-m"], ["-cd", "a b"]]
)
@pytest.mark.parametrize("word", ["data.crop=[0.5,1", "run=v=1", "corpus.txt"])
def test_the_word_that_is_wrong_is_named_and_not_an_option_before_it(before, word):
    assert no_word(["train.py", *before, "seed=3", word]).startswith(f"{word}: ")


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("own", "a setting of a class of your own is added with a plus: +loss.power=2"),
        ("matryoshka", "no setting 'loss.power'; "),
    ],
)
def test_a_setting_of_an_option_of_ones_own_is_added_with_a_plus(option, message, start, tmp_path):  # noqa: F811
    (tmp_path / "loss").mkdir()
    (tmp_path / "loss/own.yaml").write_text("_target_: mine.Loss\nmargin: 0.4\n")
    _, line = start("train", "--config-dir", str(tmp_path), f"loss={option}", "loss.power=2")
    assert line.startswith(f"error: {message}")


@pytest.mark.parametrize(
    ("file", "lines", "words", "message"),
    [
        (
            "encoder/own",
            "_target_: whitenedcse.model.scratch.small_bert\noptim: {lr: 4.0e-3}\n",
            "encoder=own",
            "a file that names groups needs as its first line, with no byte-order mark before it: # @",
        ),
        (
            "encoder/own",
            "defaults: [small]\nencoder: {layers: 1}\n",
            "encoder=own",
            "a file that names groups needs as its first line, with no byte-order mark before it: # @",
        ),
        (
            "encoder/own",
            "# @package _global_\ndefaults: [small@encoder]\nencoder: {layers: 1}\nviews: 2\n",
            "encoder=own",
            "error: encoder/own.yaml sets views, but an option sets its group alone: write it into DIR",
        ),
        (
            "head/own",
            "# @package _global_\ndefaults: [dense@head]\nloss: {temperature: 0.3}\noptim: {lr: 1.0e-3}\n",
            "head=own",
            "error: head/own.yaml sets loss, but an option sets its group alone: write it into DIR",
        ),
    ],
)
def test_a_file_of_ones_own_that_sets_other_groups_is_told_how(file, lines, words, message, start, tmp_path):  # noqa: F811
    (tmp_path / file).parent.mkdir()
    (tmp_path / f"{file}.yaml").write_text(lines)
    code, line = start("train", "--config-dir", str(tmp_path), words, "run=x")
    assert code == 2 and message in line, line


def test_a_module_in_this_folder_is_answered_with_the_path_to_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    error = ValueError("loss._target_='mine.A' is no function or class to import: No module named 'mine'")
    elsewhere = "; for mine.py in another folder, write PYTHONPATH=FOLDER python train.py"
    assert one_line(error, ["train.py"]).endswith(elsewhere)
    Path("mine.py").touch()
    assert one_line(error, ["train.py"]).endswith(
        "; mine.py is in this folder: write PYTHONPATH=. python train.py"
    )


@pytest.mark.parametrize(
    "encoder", ["small", "own"]
)  # one proposes a temperature, one is a file of one's own
@pytest.mark.parametrize("plus", ["", "+"])
def test_a_setting_that_a_class_of_ones_own_lacks_is_refused(encoder, plus, start, tmp_path):  # noqa: F811
    (tmp_path / "encoder").mkdir()
    (tmp_path / "encoder/own.yaml").write_text((configuration.CONF / "encoder/pretrained.yaml").read_text())
    (tmp_path / "loss").mkdir()
    (tmp_path / "loss/distances.yaml").write_text("_target_: torch.nn.PairwiseDistance\np: 2.0\n")
    words = [
        "--config-dir",
        str(tmp_path),
        "loss=distances",
        f"encoder={encoder}",
        f"{plus}loss.temperature=0.1",
    ]
    code, line = start("train", *words, *["encoder.path=x"] * (encoder == "own"), "run=x")
    assert code == 2 and "no setting 'loss.temperature'; loss has eps, keepdim, p" in line


def test_a_loss_that_takes_no_negatives_is_named_before_anything_is_scored(refusal, tmp_path, monkeypatch):
    (tmp_path / "own_loss.py").write_text("class Own:\n    def __call__(self, z):\n        return z.mean()\n")
    monkeypatch.syspath_prepend(tmp_path)
    line = refusal("train", "loss._target_=own_loss.Own", "encoder.width=16", "encoder.heads=2", "run=own")
    assert line.startswith(
        "error: loss Own: too many positional arguments; it is called with the views and, if there are any, "
        "hard negatives, as in def __call__(self, z, negatives=None)"
    )
    assert "dev/" not in line and not (tmp_path / "outputs").exists()
    terms.refuse_call(lambda z, negatives=None: z)
    terms.refuse_call(torch.nn.CosineSimilarity())
    with pytest.raises(ValueError, match=r"^loss <lambda>: missing a required argument: 'more'"):
        terms.refuse_call(lambda z, negatives, more: z)


def test_help_lists_the_users_own_experiments(tmp_path, monkeypatch):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment/mine.yaml").write_text("# Three views of my sentences. And more.\nviews: 3\n")
    monkeypatch.setattr(sys, "argv", ["train.py", "--config-dir", str(tmp_path), "--help"])
    lines = configuration.options("experiment").splitlines()
    assert "  mine                Three views of my sentences" in lines
    assert len(lines) == 1 + len(configuration.stems("experiment")) and lines == sorted(lines)


def test_settings_are_known_whatever_else_is_wrong():
    assert "optim.lr" in known_keys(["train.py", "+experiment=nothing", "head=nothing"])
    assert "encoder.path" in known_keys(["train.py", "encoder=pretrained"])


def test_a_launcher_whose_package_is_missing_is_answered_with_its_extra():
    hydras = "Could not find 'hydra/{}' Available options in 'hydra/{}': basic Config search path: a"
    for plugin in ("launcher/joblib", "sweeper/optuna"):
        said = one_line(ValueError(hydras.format(plugin, plugin.split("/")[0])), ["train.py"])
        wanted = f"hydra/{plugin.replace('/', '=')} needs a package: pip install 'whitenedcse[sweep]'"
        assert said == wanted


def test_names_of_other_trainers_are_answered_with_settings_that_exist():
    known = {*known_keys(["train.py", "encoder=pretrained"])}
    assert {ours.rpartition(" ")[2] for ours in FOREIGN.values()} <= known
    assert not {*FOREIGN} & known


@pytest.mark.parametrize(
    ("words", "text", "nearest"),
    [
        (["report", "outputs/fist"], "outputs/fist is no directory", "outputs/first"),
        (["compare=[outputs/first,'outputs/secnd']"], "no run matches outputs/secnd", "outputs/second"),
        (["tasks.names=[paris.tsv:a:b:c]"], "no task 'paris.tsv:a:b:c': no such file", "pairs.tsv"),
        (["data.corpus=outputs/first/my.txt"], "outputs/first/my.txt: no such file", ""),  # nothing is near
        (["data.corpus=gone/pairs.tsv"], "gone/pairs.tsv: no such file", ""),  # nor is there such a folder
        (["model=outputs/first", "run=fist"], "outputs/third: no such directory", ""),  # of another path
        (["data.corpus=paris.tsv"], "paris.tsv: did you mean 'wiki1m'", ""),
        (["data=file", "data.corpus=paris.tsv"], "paris.tsv: no such file or directory", "pairs.tsv"),
        (["data.corpus='my folder'"], "tasks: no such data set; put it there", ""),  # words of the message
        (["tasks=none", "-m", "files"], "senteval: none of the tasks are in files", ""),
        (["query", "indx", "tasks"], "indx is not an index: no tasks there", "index"),
        (["paris.tsv"], "another/paris.tsv: no such file", ""),
        (["corpus.txt"], "corpus.txt: no such file", ""),  # constraints.txt is not near
        (["x" * 300], f"{'x' * 300}: no such file", ""),  # longer than a name may be
    ],
)
def test_a_missing_path_is_answered_with_the_nearest_beside_it(tmp_path, monkeypatch, words, text, nearest):
    monkeypatch.chdir(tmp_path)
    for name in ("outputs/first", "outputs/second"):
        Path(name).mkdir(parents=True)
    for name in ("pairs.tsv", "profile", "tests", "index", "noon", "constraints.txt"):
        Path(name).touch()
    wanted = f"; did you mean {nearest}?" if nearest else ""
    assert did_you_mean(FileNotFoundError(text), words) == wanted
    assert did_you_mean(ValueError(text), words) == ""
    assert one_line(FileNotFoundError(text), ["train.py", *words]) == text + wanted

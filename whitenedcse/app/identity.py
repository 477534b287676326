"""What makes two starts the same run: equal settings, and content of what they name. Its name and words."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from itertools import product
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from whitenedcse.app.durable import checksum
from whitenedcse.app.reading import flat

if TYPE_CHECKING:
    from whitenedcse.model.embedder import Embedder

FREE = {"run", "checkpoint_every", "data.corpus"}  # settings that may change
FREE |= {"trainer.devices", "trainer.num_nodes", "trainer.timeout"}
SCRATCH = "whitenedcse.model.scratch.small_bert"  # the encoder of random weights
MOVED = {  # where a symbol of an older config.yaml is now
    "whitenedcse.model.head.Head": "whitenedcse.model.head.ProjectionHead",
    "whitenedcse.model.pooling.Pooling": "whitenedcse.model.head.Pooling",
    "whitenedcse.model.head.Whitening": "whitenedcse.model.whitener.WhiteningSettings",
    "whitenedcse.training.optim.adamw": "whitenedcse.training.module.adamw",
    "whitenedcse.training.loss.MaskedLanguageModel": "whitenedcse.training.terms.MaskedLanguageModel",
    "whitenedcse.training.mlm.MaskedLanguageModel": "whitenedcse.training.terms.MaskedLanguageModel",
    "whitenedcse.training.teacher.Teacher": "whitenedcse.training.terms.Teacher",
    "whitenedcse.model.encoder.small_bert": SCRATCH,
    "whitenedcse.evaluation.protocol.Protocol": "whitenedcse.evaluation.tasks.Protocol",
}
GONE = (  # settings of an older config.yaml, and those of their values with which it is the same run now
    ("loss", "force_literal", (True, False)),
    ("monitor", "sample", (2048,)),
)
ADDED = {"transform": "zca", "iterations": 5, "slice": None}  # to head.whitening: what older runs did
SWEPT = "multirun.yaml"  # what Hydra writes in the folder of a sweep
WEIGHTS = ("config.json", "*.safetensors", "*.bin")  # the files of an encoder beside those of its tokenizer


def differences(
    began: Mapping[str, Any], facts: Mapping[str, Any], now: Mapping[str, Any], exact: Mapping[str, Any]
) -> list[str]:
    """What is not as it was when a run began, as "NAME=VALUE (it began with VALUE)".

    began, now: settings. facts: what the run noted. exact: those facts that decide each bit, as they are now;
    one that the run did not note, being older, is no difference.
    """
    noted = flat(facts)
    same = {name: value for name, value in flat(exact).items() if name in noted}
    then = flat(began) | {name: noted[name] for name in same}
    current = flat(now) | same
    if not (then.get("encoder.lora.r") or current.get("encoder.lora.r")):  # neither has adapters
        then, current = ({k: v for k, v in x.items() if "encoder.lora" not in k} for x in (then, current))
    if then.get("data.seed") == then.get("seed") and current.get("data.seed") == current.get("seed"):
        then["data.seed"] = current["data.seed"] = None  # it follows from the other
    return [
        f"{name}={as_yaml(current.get(name))} (it began with {as_yaml(then.get(name))})"
        for name in sorted(then.keys() | current.keys())
        if then.get(name) != current.get(name) and name not in FREE and not name.startswith("logger")
    ]


def as_yaml(value: Any) -> str:
    """A value as it is written after NAME= on a command line: text without quotes, null, true, numbers."""
    return value if isinstance(value, str) else json.dumps(value, default=str)


def content(
    config: Any, encoder: Any, terms: Mapping[str, Any], tasks: Iterable[Any], dev: Any
) -> dict[str, dict[str, str]]:
    """The digests of what the settings name beside the corpus: encoder, teachers, tasks, dev; by setting.

    An encoder of the hub has its commit. One with random weights has none: settings and corpus decide it.
    """
    digests = {} if dev is None else {"monitor.dev": of_texts(dev)}
    digests |= {f"tasks.{name}": of_texts(task) for name, task in zip(config.tasks.names, tasks, strict=True)}
    if "path" in config.encoder:
        commit = encoder.provenance(config.encoder.path)["commit"]
        digests["encoder.path"] = commit or of_weights(encoder.source)
    teachers = {name: term.embedder for name, term in terms.items() if hasattr(term, "embedder")}
    digests |= {f"terms.{name}.path": of_embedder(model) for name, model in teachers.items()}
    return {"content": digests}


def of_texts(task: Any) -> str:
    """The digest of a task as `tasks.task` gives it: texts in their order, with their scores or labels."""
    return checksum(json.dumps(task, default=lambda array: array.tolist()).encode())


def of_weights(folder: Path) -> str:
    """The digest of an encoder's configuration and weights in a local directory."""
    files = sorted(file for pattern in WEIGHTS for file in folder.glob(pattern))
    return checksum(json.dumps([(file.name, checksum(file)) for file in files]).encode())


def of_embedder(embedder: Embedder) -> str:
    """The digest of an embedder that was loaded: its encoder's, its head's, and how it makes a vector."""
    from whitenedcse.model.checkpoint import settings

    assert embedder.encoder.source is not None
    return checksum(json.dumps([of_weights(embedder.encoder.source), settings(embedder)]).encode())


def instead(run: Any, others: Iterable[str]) -> str:
    """What else may be meant where a command names the directory of a run with other settings: `others`."""
    if not run.scores:
        devices = any(name.startswith("processes=") for name in others)
        count = f"; or resume it with trainer.devices={run.facts['processes']}" if devices else ""
        return f"{count}; or, to resume it anyway, add --force (in Python, force=True)"
    if (run.path.parent / SWEPT).is_file():
        folder = os.path.relpath(run.path.parent)
        return f"; whitenedcse report {folder} outputs/NAME --out DIR shows the jobs of both in one table"
    further = f"; to train it further, give the new run encoder=pretrained encoder.path={run.path}"
    return further if run.trains else ""


def present(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings of an older run in the names of this version: as in `MOVED`, without `GONE`, with `ADDED`."""
    for group, name, idle in GONE:
        if isinstance(part := settings.get(group), dict) and part.get(name) in idle:
            del part[name]
    if isinstance(head := settings.get("head"), dict) and isinstance(head.get("whitening"), dict):
        head["whitening"] = {**ADDED, **head["whitening"]}
        leave_out_groups(head["whitening"], ())
    return renamed(settings)


def renamed(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings with each symbol that has moved replaced by its present name."""
    for key, value in settings.items():
        settings[key] = renamed(value) if isinstance(value, dict) else MOVED.get(str(value), value)
    return settings


def when(value: Any, known: Any, then: Any, other: Any) -> Any:
    """A setting's value where another setting is `known`, or else `other`: ${when:${views},2,0.1,0.2}."""
    chosen = then if value == known else other
    return OmegaConf.create(chosen) if isinstance(chosen, list) else chosen  # as --resolve needs a list


def scratch(random: Any, pretrained: Any, *, _root_: Any) -> Any:
    """A setting's value for an encoder of random weights, or else of pretrained ones: ${scratch:A,B}."""
    return random if OmegaConf.select(_root_, "encoder._target_") == SCRATCH else pretrained


def encoder_passes(columns: Sequence[str], views: int) -> int:
    """How often each column of positives goes through the encoder, so that all together make `views` at most.

    columns: those of a corpus; [] for one.

    >>> [encoder_passes(columns, 3) for columns in ([], ["text"], ["anchor", "positive"])]
    [3, 3, 1]
    """
    return max(1, views // positives(columns))


def refuse_passes(config: Any) -> None:
    """Raise ValueError for more encoder passes than views, before anything is begun."""
    columns = positives(config.data.columns)
    if (passes := columns * config.data.passes) > config.views:
        of = f" of each of {columns} columns" if columns > 1 else ""
        more = f"{passes} encoder passes are more than views={config.views}"
        cure = f"lower data.passes, or give views={passes}"
        raise ValueError(f"data.passes={config.data.passes}{of}: {more}; {cure}")


def positives(columns: Sequence[str]) -> int:
    """The number of columns that hold positives: a third has hard negatives, and [] stands for one."""
    return min(2, max(1, len(columns)))


def jobs(hydras: Any) -> list[tuple[str, ...]]:
    """The words of each job of a sweep, in Hydra's order."""
    texts = [f"{key}={value}" for key, value in (hydras.sweeper.get("params") or {}).items()]
    parsed = OverridesParser.create().parse_overrides([*texts, *hydras.overrides.task])
    swept = {each.get_key_element(): each for each in parsed}  # the last of a name counts
    choices = [
        [f"{key}={text}" for text in each.sweep_string_iterator()]
        if each.is_sweep_override()
        else [f"{key}={each.get_value_element_as_str()}"]
        for key, each in swept.items()
    ]
    return list(product(*choices))


def inherited(hydras: Any) -> list[str]:
    """The overrides of Hydra's own settings that a job of a sweep inherits: where its files are found."""
    return [text for text in hydras.overrides.hydra if text.startswith("hydra.searchpath")]


def script_of(argv: list[str]) -> str:
    """The script that a command line starts, "train" or "evaluate", as train.py or `whitenedcse train`."""
    return Path(argv[0]).stem.split()[-1]


def command(argv: list[str]) -> str:
    """How the script of a command line is started."""
    return f"python {Path(argv[0]).name}" if argv[0].endswith(".py") else argv[0]


def pasted(argv: list[str]) -> str:
    """A command line as a shell takes it.

    >>> print(pasted(["train.py", "tasks.names=[my tests.csv]"]))
    python train.py 'tasks.names=[my tests.csv]'
    """
    inside = [
        f'"{word}"' if "'" in word and not set(word) & set('"$`\\!') else quote(word) for word in argv[1:]
    ]
    return " ".join([command(argv), *inside])


def not_on_path(found: re.Match[str], argv: list[str]) -> str:
    """What to write where Python does not find the module of a class; a file of that name may be here."""
    here = Path(f"{found[1]}.py").is_file()
    where = f"{found[1]}.py is in this folder: " if here else f"for {found[1]}.py in another folder, "
    return f"{found[0]}; {where}write PYTHONPATH={'.' if here else 'FOLDER'} {command(argv)}"


def leave_out_groups(whitening: Any, given: Iterable[str]) -> None:
    """Set groups that an experiment proposed to null, where a command line replaces them.

    They are for another kind of whitening than "pca" or "zca", or beside its own number or width of groups.
    whitening: settings of a head's, if it has any. given: the names of settings on the command line.

    >>> settings = {"kind": "group", "groups": 384, "group_width": 3}
    >>> leave_out_groups(settings, ["head.whitening.groups"])
    >>> settings
    {'kind': 'group', 'groups': 384, 'group_width': None}
    """
    if not isinstance(whitening, MutableMapping):
        return
    usual = {"groups": None, "group_width": 2}
    own = {key for key in usual if f"head.whitening.{key}" in given}
    for key in usual.keys() & whitening.keys() - own:
        if (own or whitening.get("kind") in ("pca", "zca")) and whitening[key] not in (None, usual[key]):
            whitening[key] = None

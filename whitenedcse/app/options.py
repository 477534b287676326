"""The files of options: which ones a command line chooses, what each writes, and what it may not write."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from itertools import product
from pathlib import Path
from typing import Any

from hydra._internal.utils import get_args_parser
from omegaconf import DictConfig, OmegaConf, open_dict
from yaml import YAMLError  # type: ignore[import-untyped]

from whitenedcse.app.configuration import CONF, groups, parameters, stems
from whitenedcse.app.identity import script_of
from whitenedcse.run import as_yaml, flat, leave_out_groups

ADDED = {"experiment": "", "system": "", "sweep": "-m "}  # groups added by +, and what else they need
FOREIGN = {  # names of SimCSE's and sentence-transformers' trainers, and how train.py writes the setting
    "do_mlm": "mlm.weight",
    "early_stopping_patience": "monitor.patience",
    "eval_steps": "monitor.every",
    "gradient_accumulation_steps": "trainer.accumulate_grad_batches",
    "hard_negative_weight": "loss.hard_negative_log_weight",
    "learning_rate": "optim.lr",
    "logging_steps": "trainer.log_every_n_steps",
    "max_grad_norm": "trainer.gradient_clip_val",
    "max_seq_length": "data.max_length",
    "mini_batch_size": "trainer.chunk",
    "model_name_or_path": "encoder=pretrained encoder.path",
    "num_train_epochs": "trainer.max_epochs",
    "output_dir": "run",
    "per_device_train_batch_size": "data.batch_size",
    "pooler_type": "pooling",
    "report_to": "logger",
    "save_steps": "checkpoint_every",
    "temp": "loss.temperature",
    "train_file": "data=file data.corpus",
    "warmup_ratio": "optim.warmup_steps",
}
CHOSEN = "to choose an option write '- override /{}: {}' under the defaults of the file"


def own_class(group: str, options: Sequence[str], argv: list[str]) -> str | None:
    """The class of the user's own that a command line chooses for a group, by name or by a file; else None.

    options: those of the group that are not the user's own. It is "" where that file is not found.
    """
    given = dict(text.lstrip("+").partition("=")[::2] for text in argv[1:])
    option = given.get(group) if options else None
    if f"{group}._target_" in given or option in (*options, None):
        return given.get(f"{group}._target_")
    return str(dict(own_options(argv)).get(f"{group}/{option}", {}).get("_target_", ""))


def foreign(name: str, argv: list[str]) -> str:
    """How train.py writes a setting that another trainer calls by this name; "" for any other name."""
    ours = FOREIGN.get(name.replace("-", "_")) if script_of(argv) == "train" else None
    return f"it is {ours}=VALUE here; docs/coming_from.md has others" if ours else ""


def own_options(argv: list[str], *folders: Path) -> Iterator[tuple[str, dict[Any, Any]]]:
    """GROUP/OPTION and the settings of each option of a command line, as files of one's own or of folders."""
    parsed = get_args_parser().parse_known_args(argv[1:])[0]
    given = [text.lstrip("+").partition("=") for text in parsed.overrides]
    names = [(group, option) for group, _, options in given for option in options.split(",")]
    own = re.findall(r"file://([^],'\"]+)", " ".join(parsed.overrides))  # of hydra.searchpath
    for (group, option), folder in product(names, [*filter(None, [parsed.config_dir]), *own, *folders]):
        with suppress(YAMLError):
            if content := content_of(group, option, [Path(folder)]):
                yield f"{group}/{option}", content


def content_of(group: str, stem: str, folders: Iterable[Path]) -> dict[Any, Any]:
    """The content of an option's file, in the first of the folders that has it; empty if none has."""
    files = [path for folder in folders if (path := Path(folder, group, f"{stem}.yaml")).is_file()]
    content = OmegaConf.to_container(OmegaConf.load(files[0])) if files else {}
    return content if isinstance(content, dict) else {}


def settings_of(group: str, stem: str, folders: Iterable[Path]) -> dict[str, object]:
    """The settings that an option writes, or takes over from others of its group, by their dotted names."""
    own = content_of(group, stem, folders)
    above = [name.rpartition("/")[2] for name in own.pop("defaults", []) if isinstance(name, str)]
    return {k: value for name in above for k, value in settings_of(group, name, folders).items()} | flat(own)


def written(group: str, stem: str, folders: Iterable[Path]) -> dict[str, object]:
    """The settings of its group that an option's own file writes, by their whole names."""
    own = {key: value for key, value in content_of(group, stem, folders).items() if key != "defaults"}
    return flat({group: own.get(group, own)})


def given(hydras: Any) -> set[str]:
    """The names of the settings that the command line has."""
    return {text.partition("=")[0].lstrip("+") for text in hydras.overrides.task}


def searched(hydras: Any) -> list[Path]:
    """The folders in which Hydra looks for the files of options, the first that has one before the others."""
    return [Path(source.path) for source in hydras.runtime.config_sources if source.schema == "file"]


def where_from(term: str) -> str:
    """How a term of a loss is added: by the system that has it, or as one's own."""
    if having := [s for s in stems("system") if f"terms.{term}._target_" in settings_of("system", s, [CONF])]:
        return f"add {' or '.join(f'+system={stem}' for stem in having)}, which has it"
    return f"a term of your own begins with its class: +terms.{term}._target_=MODULE.CLASS"


def no_settings(group: str, value: object = "a value") -> str:
    """What to write in place of a value that a file gives to a group."""
    option = value if value in (known := stems(group)) else "OPTION"
    there = f"; there are {', '.join(known)}" * (option == "OPTION")
    said = f"{group}: {'null' if value is None else value} stands in place of settings"
    return f"{said}; {CHOSEN.format(group, option)}{there}"


def no_default(argv: list[str]) -> str:
    """What to write in a file that gives a value to a group, or whose defaults choose no option; else ""."""
    every = {*groups("train"), *groups("evaluate")}
    for file, own in own_options(argv, CONF):
        wrong = [group for group in every if isinstance(own.get(group), str | int | float | list)]
        if wrong and file.partition("/")[0] in ADDED:  # another file's keys may be those of its class
            return no_settings(wrong[0], own[wrong[0]])
        for key, option in (p for e in own.get("defaults") or [] if isinstance(e, dict) for p in e.items()):
            near = get_close_matches(re.sub("^(override )? */?", "", key), every, n=1)
            if near and key != f"override /{near[0]}":
                return f"{file}: '- {key}: {option}' chooses nothing; {CHOSEN.format(near[0], option)}"
            if not near and key.startswith("override") and "hydra" not in key:
                return f"{file}: '- {key}: {option}' names no group; there are {', '.join(sorted(every))}"
    return ""


def refuse_added(argv: list[str]) -> None:
    """Raise ValueError for an option that is added with a plus to a group which has one, as +logger=wandb."""
    for word in get_args_parser().parse_known_args(argv[1:])[0].overrides:
        if word.startswith("+") and word.partition("=")[0].lstrip("+") in groups(script_of(argv)):
            raise ValueError(
                f"{word}: this group has an option already; write {word.lstrip('+')}, without a plus"
            )


def refuse_others(hydras: Any) -> None:
    """Raise ValueError for an option whose file sets more than its own group, as only an experiment does."""
    for group in groups("train"):
        name, folders = f"{group}/{hydras.runtime.choices.get(group)}", searched(hydras)
        text = next((f.read_text() for folder in folders if (f := folder / f"{name}.yaml").is_file()), "")
        if "@package _global_" in text and (others := OmegaConf.create(text).keys() - {group, "defaults"}):
            cure = "write it into DIR/experiment/NAME.yaml, for --config-dir DIR +experiment=NAME"
            raise ValueError(f"{name}.yaml sets {min(others)}, but an option sets its group alone: {cure}")


def refuse_replaced(config: Mapping[str, Any], hydras: Any) -> None:
    """Raise ValueError for an option on the command line of which an experiment or system replaces a setting.

    As tasks=none beside an experiment with tasks.names. What the option takes over may be replaced.
    """
    asked, choices, now = given(hydras), hydras.runtime.choices, flat(config)
    for above in ("experiment", "system"):
        theirs = settings_of(above, str(choices.get(above)), searched(hydras)).keys() - asked
        for group in sorted(asked & {*choices}) if theirs else ():
            for key, value in written(group, str(choices[group]), searched(hydras)).items():
                needed = value == "???" or (key, value) == ("data.corpus", None)  # of data=file
                if key in theirs and value != now.get(key) and not needed:
                    if isinstance(value, str):  # perhaps an interpolation
                        value = OmegaConf.create({**config, "_": value})["_"]
                    chosen, cure = f"{group}={choices[group]}", f"{key}={as_yaml(value)}"
                    said = f"{chosen} has {cure}, which +{above}={choices[above]} replaces"
                    raise ValueError(f"{said}: add {cure}, or leave out {chosen}")


def leave_out_idle(config: DictConfig, hydras: Any) -> None:
    """Remove settings that were written for another class than that which a group has now.

     An experiment sets loss.temperature, and not each loss=OPTION has one; loss._target_=CLASS replaces the
    class of an option. What the command line sets is refused.
    """
    asked = given(hydras)
    above = settings_of("experiment", str(hydras.runtime.choices.get("experiment")), searched(hydras))
    proposed = [name for name in above if name.partition(".")[0] in asked - {"tasks"}]  # of options replaced
    for group in {name.removesuffix("._target_") for name in asked if re.fullmatch(r"\w+\._target_", name)}:
        proposed += [f"{group}.{key}" for key in config.get(group) or {}]
    asked |= {".".join(name.split(".")[:2]) for name in asked}
    for name in proposed:
        group, _, key = name.partition(".")
        node: Any = config.get(group) if name not in asked else None
        if node is None or key not in node:
            continue
        target = node.get("_target_")
        known = parameters(group, target, imported=False) or parameters(group, target, imported=True)
        if target is None or (known and key not in known):
            with open_dict(config):
                del node[key]
                config[group] = node or None  # of a group that is left out nothing stays
    leave_out_groups(OmegaConf.select(config, "head.whitening"), asked)

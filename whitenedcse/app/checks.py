"""Settings that are each valid but do not fit together: refused before a run, or a sweep's first job, starts.

Nothing here reads data. A sweep is composed job by job, so that a bad value of the last is found at once.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

from hydra import compose
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from whitenedcse.app.configuration import groups, parameters, plain, refuse_unknown, stems, top
from whitenedcse.app.identity import leave_out_groups, refuse_name, refuse_passes
from whitenedcse.app.mistakes import ADDED, command, no_settings, one_line, settings_of, where_from
from whitenedcse.app.ranks import placed
from whitenedcse.app.reading import flat
from whitenedcse.app.run import Run

WIDEST = 1 << 16  # channels of vectors that a loss is tried with; a prefix has fewer


def checked(script: str, config: DictConfig) -> Run:
    """Check all settings; returns the configured run, named after its directory. Raises ValueError."""
    hydras = HydraConfig.get()
    run = Run(hydras.runtime.output_dir).asked()
    refuse(script, config, hydras)
    refuse_name(plain(config)["run"], run.path)
    config.run = run.path.name
    return run


def refuse(script: str, config: DictConfig, hydras: Any) -> None:
    """Raise ValueError for settings of a run or a sweep's job that are unknown or do not fit together.

    script: "train" or "evaluate". hydras: the part of Hydra in the configuration. Settings that were proposed
    for another class are removed from `config`.
    """
    refuse_choices(script, config, hydras)
    refuse_values(script, config)
    if script == "train":
        leave_out_idle(config, hydras)
    refuse_unknown(plain(config), top(script))
    if script == "train":
        refuse_one_job(hydras)
        refuse_terms(config)
        refuse_passes(config)
        if hydras.mode == RunMode.RUN and "WHITENEDCSE_FRONT" not in os.environ:  # else `refuse_jobs` does
            refuse_idle(config, idle(config, hydras))
        refuse_parts(config)
        note_test_pairs(config.monitor.dev, config.tasks.names)


def refuse_values(script: str, config: DictConfig) -> None:
    """Raise ValueError for a group to which a file gives a value, as head: zca, or a seed out of bounds."""
    for group in groups(script):
        value = config.get(group)
        optional = value is None and group in ("loss", "logger", "pooling", "postprocess")
        if group in config and not (optional or OmegaConf.is_dict(value)):
            raise ValueError(no_settings(group, value))
    for name in ("seed", "data.seed"):
        if isinstance(seed := OmegaConf.select(config, name), int) and not 0 <= seed < 2**32:
            raise ValueError(f"{name}={seed} must be from 0 to {2**32 - 1}")
    if isinstance(every := config.get("checkpoint_every"), int | float) and every < 0:
        raise ValueError(f"checkpoint_every={every} must be 0 or more seconds")


def note_test_pairs(dev: str | None, tests: Sequence[str]) -> None:
    """Warn if the pairs that choose the checkpoint are among the tests, whatever columns are named."""
    files = {name: name if Path(name).exists() else name.partition(":")[0] for name in (*tests, dev or "")}
    places = {name: Path(file).resolve() if Path(file).is_file() else name for name, file in files.items()}
    if dev and places[dev] in [places[name] for name in tests]:
        warnings.warn(
            f"monitor.dev={dev} chooses the checkpoint and is among the tests, whose score is then too high; "
            "test on other pairs",
            stacklevel=2,
        )


def refuse_jobs(script: str, hydras: Any) -> None:
    """Raise ValueError, naming the job, if one of a sweep would be refused. A search's trials are not known.

    A setting is refused as unread only if no job reads it: a baseline with mlm.weight=0 has no use for
    mlm.probability.
    """
    every = [] if hydras.sweeper.get("n_trials") else jobs(hydras)
    useless: dict[str, str] = {}  # what no job so far reads
    seen = set[tuple[str, ...]]()
    for number, words in enumerate(every):
        key = tuple(word for word in words if not re.fullmatch(r"seed=\d+", word))
        if key in seen:  # composing takes a third of a second, and one seed is as good as another
            continue
        seen.add(key)
        try:
            config = compose(script, [*inherited(hydras), *words], return_hydra_config=True)
            own, parts = config.hydra, [str(key) for key in config if key != "hydra"]
            config = OmegaConf.masked_copy(config, parts)
            with warnings.catch_warnings(action="ignore"):  # the job says them
                refuse(script, config, own)
            if script == "train":
                useless = {n: u for n, u in idle(config, own).items() if number == 0 or n in useless}
        except (HydraException, OmegaConfBaseException, ValueError) as error:
            varied = [word for word in words if any(word not in job for job in every)]
            named = f"job {number + 1} of {len(every)} ({' '.join(varied)}): " if varied else ""
            raise ValueError(f"{named}{one_line(error, [f'{script}.py', *words])}") from error
    if every:
        refuse_idle(config, useless)


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


def given(hydras: Any) -> set[str]:
    """The names of the settings that the command line has."""
    return {text.partition("=")[0].lstrip("+") for text in hydras.overrides.task}


def idle(config: DictConfig, hydras: Any) -> dict[str, str]:
    """The settings of train.py's command line that nothing reads beside the others, and what each is for."""
    from whitenedcse.report.conditions import unread  # and NumPy, for which --help does not wait

    named = flat(plain(config))
    every = {name: use for name, use in unread(named).items() if name in given(hydras) and named.get(name)}
    theirs = [group for group in ("head", "loss") if not ours(config.get(group))]
    return {name: use for name, use in every.items() if name.partition(".")[0] not in theirs}


def refuse_idle(config: DictConfig, useless: dict[str, str]) -> None:
    """Raise ValueError for the first of some settings that nothing reads; see `idle`."""
    for name, use in useless.items():
        raise ValueError(f"{name}={OmegaConf.select(config, name)} has no effect here: it is for {use}")


def refuse_parts(config: DictConfig) -> None:
    """Raise ValueError for parts that cannot be built: data, loss, terms, logger, optimiser, whitening...

    Only those of this package are tried: they are built again for the run. The encoder's width is that of the
    settings or of a local directory; of any other encoder it is not known here.
    """
    import torch  # takes seconds

    for node in (config.data, config.pooling, *config.terms.values()):
        if ours(node) and not node.get("_partial_"):
            instantiate(node)
    refuse_loss(config)
    if "tensorboard_logger" in str(config.logger):  # that of wandb, always installed, asks the server
        instantiate(config.logger)(run=Path())
    if ours(config.optim):
        steps = config.trainer.max_steps if config.trainer.max_steps > 0 else sys.maxsize
        instantiate(config.optim)([torch.nn.Parameter(torch.zeros(1))], total_steps=steps)
    if ours(config.head) and ours(whitening := config.head.get("whitening")):
        refuse_groups(config, instantiate(whitening))


def refuse_loss(config: DictConfig) -> None:
    """Raise ValueError for a loss of this package that cannot be built, or has no use for hard negatives."""
    import torch

    if ours(config.get("loss")):
        loss = instantiate(config.loss)
        if len(config.data.columns) > 2:
            z = torch.ones(config.views, 2, WIDEST)
            loss(z, z[0])  # raises if it has none


def refuse_call(loss: Any) -> None:
    """Raise ValueError for a loss of the user's own that cannot be called as training does."""
    try:
        inspect.signature(getattr(loss, "forward", loss)).bind("z", None)
    except TypeError as error:
        name = getattr(loss, "__name__", type(loss).__name__)
        raise ValueError(
            f"loss {name}: {error}; it is called with the views and, if there are any, hard negatives, as in "
            "def __call__(self, z, negatives=None)"
        ) from error


def refuse_groups(config: DictConfig, settings: Any) -> None:
    """Raise ValueError for groups of channels that do not divide the width, or a batch too small for them."""
    from whitenedcse.model import whitener

    width = config.encoder.get("width")
    file = Path(str(config.encoder.get("path")), "config.json")
    if width is None:
        with suppress(OSError, ValueError, AttributeError):  # what it lacks is said when the encoder is read
            width = json.loads(file.read_text()).get("hidden_size")
    if not isinstance(width, int):
        return
    try:
        settings.width(width)
    except ValueError as error:
        name = "group_width" if settings.groups is None else "groups"
        another = f"set head.whitening.{name}, or choose a system without groups of that width"
        raise ValueError(f"{error}; {another}") from error
    if config.data.batch_size:  # which data.batch_tokens replaces
        whitener.refuse(settings, width, n=config.data.batch_size, views=config.views)


def ours(node: Any) -> bool:
    """Whether a part of the configuration is built by this package, not by a user's own class."""
    return bool(node) and str(node.get("_target_")).startswith("whitenedcse.")


def refuse_one_job(hydras: Any) -> None:
    """Raise ValueError for a sweep without -m, which would train one run of it, or for a wrong order."""
    refuse_order(list(hydras.overrides.task))
    name = hydras.runtime.choices.get("sweep")
    # a rank of a job is started with the words of the job, without -m
    if name and hydras.mode == RunMode.RUN and placed() is None:
        raise ValueError(f"+sweep={name} is several runs: add -m, as in {command(sys.argv)} -m +sweep={name}")


def refuse_order(overrides: list[str]) -> None:
    """Raise ValueError if an experiment would undo what a system or a sweep before it changes."""
    keys = [text.partition("=")[0] for text in overrides]
    changes = [key for key in keys if key in ("+experiment", "+system", "+sweep")]
    if "+experiment" in changes[1:]:
        raise ValueError(f"{changes[0]} changes what +experiment sets: put it after +experiment")


def refuse_terms(cfg: DictConfig) -> None:
    """Raise ValueError for a term of the loss without a class, or for one that only a system completes."""
    for name, node in cfg.terms.items():
        if not OmegaConf.is_dict(node) or "_target_" not in node:
            raise ValueError(f"terms.{name} has no class; {where_from(str(name))}")


def leave_out_idle(config: DictConfig, hydras: Any) -> None:
    """Remove settings that were proposed for another class than that which a group has now.

    encoder=small sets loss.temperature, which a loss without negatives does not have; loss._target_=CLASS
    replaces the class of an option whose settings stay. What the command line sets is left to be refused.
    """
    asked = given(hydras)
    proposed = list(settings_of("encoder", hydras.runtime.choices.get("encoder", "")))
    for group in {name.removesuffix("._target_") for name in asked if re.fullmatch(r"\w+\._target_", name)}:
        proposed += [f"{group}.{key}" for key in config.get(group) or {}]
    asked |= {".".join(name.split(".")[:2]) for name in asked}
    for name in proposed:
        group, _, key = name.partition(".")
        node: Any = config.get(group) if group != "encoder" and name not in asked else None
        if node is None or key not in node:
            continue
        target = node.get("_target_")
        known = parameters(group, target, imported=False) or parameters(group, target, imported=True)
        if target is None or (known and key not in known):
            with open_dict(config):
                del node[key]
                config[group] = node or None  # of a group that is left out nothing stays
    leave_out_groups(OmegaConf.select(config, "head.whitening"), asked)


def refuse_choices(script: str, cfg: DictConfig, hydras: Any) -> None:
    """Raise ValueError for a group with several options, or one that ~GROUP removes from a training.

    Hydra merges several options, so that the settings of one stand beside those of another.
    """
    words = hydras.overrides.task
    for word in words:
        if (found := re.match(r"\+(\w+)=\[", word)) and found[1] in ADDED:
            raise ValueError(f"{word}: one +{found[1]} at a time")
    for group in (group for group in groups(script) if group not in hydras.runtime.choices):
        choose = f"choose {group}=" + f" or {group}=".join(stems(group))
        if not any(re.fullmatch(rf"~{group}(=.*)?", word) for word in words):
            raise ValueError(f"{group} has several options, where one is used; {choose}")
        if script == "train" and "_target_" not in (cfg.get(group) or {}):
            raise ValueError(f"~{group}: train.py needs it; {choose}")

"""Settings that are each valid but do not fit together: refused before a run, or a sweep's first job, starts.

Nothing here reads data. A sweep is composed job by job, so that a bad value of the last is found at once.
"""

from __future__ import annotations

import json
import os
import re
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hydra import compose
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from whitenedcse.app.configuration import groups, plain, refuse_unknown, stems, top
from whitenedcse.app.identity import inherited, jobs, positives, refuse_passes
from whitenedcse.app.mistakes import one_line
from whitenedcse.app.options import (
    ADDED,
    given,
    leave_out_idle,
    no_settings,
    refuse_others,
    refuse_replaced,
    where_from,
)
from whitenedcse.app.space import refuse_name
from whitenedcse.distributed import placed
from whitenedcse.run import Run, command, flat


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
        refuse_others(hydras)
        leave_out_idle(config, hydras)
        refuse_replaced(plain(config), hydras)
    refuse_unknown(plain(config), top(script))
    if script == "train":
        refuse_one_job(hydras)
        refuse_terms(config)
        refuse_passes(config)
        if hydras.mode == RunMode.RUN and "WHITENEDCSE_FRONT" not in os.environ:  # else `refuse_jobs` does
            refuse_idle(config, idle(config, hydras))
        refuse_parts(config)


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
            raise ValueError(f"{named}{one_line(error, [sys.argv[0], *words])}") from error
    if every:
        refuse_idle(config, useless)


def idle(config: DictConfig, hydras: Any) -> dict[str, str]:
    """The settings of train.py's command line that nothing reads beside the others, and what each is for."""
    from whitenedcse.report.conditions import unread  # and NumPy, for which --help does not wait

    named = flat(plain(config)) | {"head.dense": OmegaConf.select(config, "head.dense")}  # resolved
    every = {name: use for name, use in unread(named).items() if name in given(hydras) and named.get(name)}
    theirs = [group for group in ("head", "loss") if not ours(config.get(group))]
    return {name: use for name, use in every.items() if name.partition(".")[0] not in theirs}


def refuse_idle(config: DictConfig, useless: dict[str, str]) -> None:
    """Raise ValueError for the first of some settings that nothing reads; see `idle`."""
    for name, use in useless.items():
        raise ValueError(f"{name}={OmegaConf.select(config, name)} has no effect here: it is for {use}")


def refuse_parts(config: DictConfig) -> None:
    """Raise ValueError for parts that cannot be built: data, loss, terms, logger, optimiser, whitening...

    Only those of this package are tried: they are built again for the run. What only the encoder's files, the
    data or the device can tell is not known here, but for the width of an encoder in a local directory.
    """
    import torch  # takes seconds

    for node in (config.data, config.pooling, config.encoder.get("lora"), *config.terms.values()):
        if ours(node) and not node.get("_partial_"):
            instantiate(node)
    refuse_training(config)
    width = width_of(config.encoder)
    refuse_loss(config, width)
    if "tensorboard_logger" in str(config.logger):  # that of wandb, always installed, asks the server
        instantiate(config.logger, _partial_=True)(run=Path())
    if ours(config.optim):
        steps = config.trainer.max_steps if config.trainer.max_steps > 0 else sys.maxsize
        instantiate(config.optim, _partial_=True)([torch.nn.Parameter(torch.zeros(1))], total_steps=steps)
    if ours(config.head):
        refuse_head(config, width)


def refuse_loss(config: DictConfig, width: int | None) -> None:
    """Raise ValueError for a loss of this package that cannot be built, or called with such views."""
    import torch

    if not ours(config.get("loss")):
        return
    loss = instantiate(config.loss)
    if hasattr(loss, "refuse_passes") and config.embedding != "head":
        loss.refuse_passes(positives(config.data.columns) * config.data.passes)
    z = torch.ones(config.views, 2, width or max([2, *getattr(loss, "dims", [])]))
    loss(z, z[0] if len(config.data.columns) > 2 else None)


def refuse_training(config: DictConfig) -> None:
    """Raise ValueError for settings with which nothing could be trained; warn of dev pairs that are tests."""
    from whitenedcse.training import module, monitor, terms, trainer

    masked, chunk = bool(config.mlm.weight), config.trainer.get("chunk")
    module.refuse(config.views, chunk, config.terms, masked=masked, compared=bool(config.get("loss")))
    if masked and ours(config.mlm):
        terms.refuse_masking(config.mlm.weight, config.mlm.probability)
    if ours(config.trainer):
        trainer.refuse(config.trainer, config.trainer.get("timeout"))
        module.refuse_rounding(str(config.trainer.get("precision") or "32"))
    watch = config.monitor
    if ours(watch):
        monitor.refuse(watch.get("every"), watch.get("patience"), held_out=watch.dev is None)
    note_test_pairs(watch.dev, config.tasks.names)


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


def width_of(encoder: DictConfig) -> int | None:
    """The width that the settings of an encoder or its local directory tell; None if they do not.

    Raises ValueError for sizes that make no encoder.
    """
    from whitenedcse.model import scratch

    sizes = ("vocabulary", "layers", "width", "heads")
    if {*sizes} <= {*encoder} and ours(encoder):
        scratch.refuse(*(encoder[name] for name in sizes))
    if (width := encoder.get("width")) is None:
        with suppress(OSError, ValueError, AttributeError):  # what it lacks is said when the encoder is read
            width = json.loads(Path(str(encoder.get("path")), "config.json").read_text()).get("hidden_size")
    return width if isinstance(width, int) else None


def refuse_head(config: DictConfig, width: int | None) -> None:
    """Raise ValueError for a head that cannot be built or gives no such embedding; see `refuse_groups`."""
    from whitenedcse.model.embedder import refuse_embedding

    if width and ours(whitening := config.head.get("whitening")):
        refuse_groups(config, instantiate(whitening), width)
    refuse_embedding(config.embedding, instantiate(config.head, whitening=None, _partial_=True)(width=2))


def refuse_groups(config: DictConfig, settings: Any, width: int) -> None:
    """Raise ValueError for groups of channels that do not divide the width, or a batch too small for them."""
    from whitenedcse.model import whitener

    try:
        settings.width(width)
    except ValueError as error:
        another = "set head.whitening.group_width, or choose a system without groups of that width"
        raise ValueError(f"{error}; {another}") from error
    if config.data.batch_size:  # which data.batch_tokens replaces
        whitener.check_rows(settings, width, n=config.data.batch_size)


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


def refuse_choices(script: str, cfg: DictConfig, hydras: Any) -> None:
    """Raise ValueError for a group with several options, which Hydra merges, or one that ~GROUP removes."""
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

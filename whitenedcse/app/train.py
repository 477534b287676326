"""What train.py does: its settings are checked, built, begun or resumed, fitted, tested and ended as a run.

The parts are built here from the configuration, and nothing below `app` knows of it.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from shlex import quote
from types import MappingProxyType
from typing import Any, NoReturn

from hydra import compose
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf, open_dict

from whitenedcse.app.config import check, inherited, own_encoder
from whitenedcse.app.evaluate import scored
from whitenedcse.app.start import Checked, again, launched
from whitenedcse.console import interrupted, override, quoted, say
from whitenedcse.distributed import placed
from whitenedcse.files import checksum
from whitenedcse.run import OTHER, Run

as_partial = partial(instantiate, _partial_=True)  # a function of what the run knows: its path, a width...
WEIGHTS = ("config.json", "*.safetensors", "*.bin")  # the files of an encoder beside those of its tokenizer


def train(cfg: DictConfig, parts: Mapping[str, Any] = MappingProxyType({})) -> float | None:
    """One run, begun or resumed; returns the best dev score, for a sweeper to maximise.

    parts: those of the caller's own, by "head", "loss", "optim" and "terms.NAME"; see `whitenedcse.train`.
    """
    run = Run(HydraConfig.get().runtime.output_dir)
    with run.tidied():
        check("train", cfg, HydraConfig.get())
        cfg.run = run.path.name
        note_parts(cfg, parts)
        settings = OmegaConf.to_yaml(cfg, resolve=True)
        trainer = as_partial(cfg.trainer, _convert_="all")(logger=False)
        check_one_device(parts, trainer.num_devices)
        if not finished(run, settings, force=cfg.force) and not several(cfg, run, trainer.num_devices):
            with run.claim():
                if not finished(run, settings, force=cfg.force):  # by the process that had it
                    trained(cfg, run, settings, trainer.strategy.root_device, parts)
    if run.scores:
        shutil.rmtree(run.checkpoints, ignore_errors=True)  # which only resume a run; best/ stays
    return run.best_score


def note_parts(cfg: DictConfig, parts: Mapping[str, Any]) -> None:
    """Note parts of the caller's own in the settings: their class or function, and their plain attributes."""
    for name, part in parts.items():
        made, known = part, {} if hasattr(part, "__qualname__") else getattr(part, "__dict__", {})
        if isinstance(part, partial):
            made, known = part.func, part.keywords
        kind = made if hasattr(made, "__qualname__") else type(made)
        kept = {k: v for k, v in known.items() if k[0] != "_" and is_plain(v)}
        note = {"object": f"{kind.__module__}.{kind.__qualname__}", "attributes": kept}
        with open_dict(cfg):
            OmegaConf.update(cfg, name, note, merge=False)


def is_plain(value: Any) -> bool:
    """Whether a value is a text, a number, None, or a list of such."""
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    return isinstance(value, str | int | float | None)


def check_one_device(parts: Mapping[str, Any], devices: int) -> None:
    """Raise ValueError for parts of the caller's own, which live in this process, and several devices."""
    if parts and devices > 1:
        raise ValueError(
            f"{', '.join(parts)}: no object goes to the processes of {devices} devices: name its class, "
            'settings={"loss._target_": "mine.Margin"}, or give devices=1'
        )


def trained(cfg: DictConfig, run: Run, settings: str, device: Any, parts: Mapping[str, Any]) -> None:
    """Train in this process, alone or as one of several ranks, and test and end the run in the first."""
    from lightning import seed_everything
    from lightning.pytorch.callbacks import LambdaCallback

    from whitenedcse.training.checkpoints import Safekeeping
    from whitenedcse.training.loggers import Metrics, Record, progress_bar

    share_cores()
    tests, dev = inputs(cfg)
    seed_everything(cfg.seed, verbose=False)
    module, data = built(cfg, parts)
    facts, exact = noted(cfg, module, data, device), data.tokens.digests | content(cfg, module, tests, dev)
    checkpoint = begun(run, settings, facts, exact, force=cfg.force)
    monitor = as_partial(cfg.monitor)(dev=dev, directory=run.best, say=say)
    same = f"{settings}resumes from: {checkpoint.name if checkpoint else 'the start'}"  # for all ranks
    keep = Safekeeping(run.checkpoints, cfg.checkpoint_every, monitor, same, say, again(run))
    callbacks = [keep, Record(), monitor, progress_bar(say)]
    callbacks += [LambdaCallback(on_train_end=keep.finish)]
    loggers = [Metrics(run.metrics, checkpoint)]
    loggers += [as_partial(cfg.logger)(run=run.path)] if cfg.logger else []
    trainer: Any = as_partial(cfg.trainer, _convert_="all")(logger=loggers, callbacks=callbacks)
    trainer.fit(module, data, ckpt_path=checkpoint, weights_only=True)
    if trainer.is_global_zero:
        with interrupted(lambda: f"{again(run)} resumes it"):
            ended(cfg, run, monitor.summary(), loggers)


def built(cfg: DictConfig, own: Mapping[str, Any] = MappingProxyType({})) -> tuple[Any, Any]:
    """The ContrastiveTraining module and its SentenceData; own: parts of the caller's own, see `train`."""
    from torch.nn import Module

    from whitenedcse.model.checkpoint import parts_of_source
    from whitenedcse.model.embedder import Embedder
    from whitenedcse.model.head import ProjectionHead
    from whitenedcse.training.module import ContrastiveTraining

    encoder, has = instantiate(cfg.encoder), dict[str, Any]()
    try:
        has = parts_of_source(encoder)
    except ValueError as error:
        if not cfg.get("pooling"):
            raise ValueError(
                f"{error}; to train the encoder alone name a pooling, such as pooling=mean"
            ) from error
    pooling = instantiate(cfg.pooling) if cfg.get("pooling") else has.get("pooling")
    made: Any = {"encoder": encoder, "pooling": pooling}
    if has.get("max_length"):  # sentences are embedded as long as they were trained on
        made["max_length"] = max(has["max_length"], OmegaConf.select(cfg, "data.max_length", default=0))
    head = own["head"] if "head" in own else as_partial(cfg.head)
    head = head if isinstance(head, Module) else head(width=encoder.width)
    plain: Any = {"whitening": head, "dense": False}  # any other module is used as it is
    made["head"] = head if isinstance(head, ProjectionHead) else ProjectionHead(encoder.width, **plain)
    data: Any = instantiate(cfg.data)
    data.tokenizer, data.hold_out = encoder.tokenizer, cfg.monitor.dev is None
    data.setup("fit")
    parts = {
        "embedder": Embedder(**made, embedding=cfg.embedding, prompt=data.prompt),
        "loss": made_of(own.get("loss", cfg.get("loss"))),
        "terms": {name: made_of(own.get(f"terms.{name}", node)) for name, node in cfg.terms.items()},
        "optimizer": own.get("optim") or as_partial(cfg.optim),
        "mlm": as_partial(cfg.mlm)(encoder=encoder) if cfg.mlm.weight else None,
    }
    settings = {"views": cfg.views, "seed": cfg.seed, "gather": cfg.gather, "chunk": cfg.trainer.chunk}
    settings["compiled"] = cfg.trainer.compile
    return ContrastiveTraining(**parts, **settings), data


def made_of(part: Any) -> Any:
    """The object that settings describe, or that a class of the caller's own makes; any other is itself."""
    if OmegaConf.is_dict(part):
        return instantiate(part) or None
    return part() if isinstance(part, type) else part


def inputs(config: Any) -> tuple[list[Any], Any]:
    """The test tasks of a run and its dev pairs, or None; all that settings name is looked for first."""
    from whitenedcse.data import sources
    from whitenedcse.evaluation.tasks import subsets, task
    from whitenedcse.model.encoder import folder

    if config.encoder.get("path"):
        folder(config.encoder.path)
    sources.located(config.data.corpus)
    dev = config.monitor.dev
    return [task(name) for name in config.tasks.names], subsets(dev) if dev else None


def noted(cfg: DictConfig, module: Any, data: Any, device: Any) -> dict[str, Any]:
    """What names a run and its encoder, and what it computes on, which is printed."""
    from whitenedcse.model.checkpoint import notes_on_source

    encoder, hydras = module.embedder.encoder, HydraConfig.get()
    attention = encoder.attention(device)
    say(f"{data.description}; pooling: {module.embedder.pooling}; attention: {attention}")
    for note in notes_on_source(module.embedder, cfg.encoder.get("path")):
        say(note)
    names = {name: hydras.runtime.choices.get(name) for name in ("experiment", "system")}
    if names["experiment"] and "path" in cfg.encoder and own_encoder(hydras.overrides.task):
        names["experiment"] += f" with {Path(cfg.encoder.path).name}"
    source = encoder.provenance(cfg.encoder.path) if "path" in cfg.encoder else None
    words = [word for word in hydras.overrides.task if not word.startswith("force=")]
    facts = {**names, "overrides": words, "seed": cfg.seed, "encoder": source}
    return {**facts, "device": device.type, "attention": attention}


def content(cfg: Any, module: Any, tasks: Iterable[Any], dev: Any) -> dict[str, Any]:
    """The digests of what the settings name beside the corpus, by setting, and the number of processes."""
    digests = {} if dev is None else {"monitor.dev": digest_of_texts(dev)}
    named = zip(cfg.tasks.names, tasks, strict=True)
    digests |= {f"tasks.{name}": digest_of_texts(task) for name, task in named}
    encoder = module.embedder.encoder
    if "path" in cfg.encoder and encoder.source is not None:  # one of the user's own may have none
        commit = encoder.provenance(cfg.encoder.path)["commit"]
        digests["encoder.path"] = commit or digest_of_weights(encoder.source)
    here = placed()
    return {"content": digests, "processes": here.world if here else 1}


def digest_of_texts(task: Any) -> str:
    """The digest of a task as `tasks.task` gives it: texts in their order, with their scores or labels."""
    return checksum(json.dumps(task, default=lambda array: array.tolist()).encode())


def digest_of_weights(folder: Path) -> str:
    """The digest of an encoder's configuration and weights in a local directory."""
    files = sorted(file for pattern in WEIGHTS for file in folder.glob(pattern))
    return checksum(json.dumps([(file.name, checksum(file)) for file in files]).encode())


def finished(run: Run, settings: str, *, force: bool) -> bool:
    """Whether this run has ended before, which is then printed; `force` changes no such run."""
    run.check_same(settings, {}, force=force and run.scores is None)
    if run.scores is None:
        return False
    say(f"{run.path} is finished and not changed; for a new run, {OTHER}")
    say(f"run: {run.path}")
    return True


def several(cfg: DictConfig, run: Run, devices: int) -> bool:
    """Run this job as one process per device, unless this process is one of them; returns whether it did."""
    hydras = HydraConfig.get()
    if placed() is not None:
        if hydras.mode == RunMode.MULTIRUN and "SLURM_JOB_ID" not in os.environ:
            raise ValueError(
                "torchrun would run the sweep once in each rank; use whitenedcse train -m trainer.devices=N"
            )
        return False
    if devices < 2:
        return False
    instantiate(cfg.data).check_shares(devices)  # before they start
    words = sys.argv[1:]
    if hydras.mode == RunMode.MULTIRUN:
        folders = [one.path for one in hydras.runtime.config_sources if one.provider == "command-line"]
        words = [f"--config-dir={path}" for path in folders] + [*hydras.overrides.task, *inherited(hydras)]
    if status := launched([*words, f"hydra.run.dir={quoted(str(run.path))}"], devices, again(run)):
        end_job(status, hydras)
    return True


def end_job(status: int, hydras: Any) -> NoReturn:
    """End with the status of a job's ranks; of a sweep only where a signal ended them."""
    if hydras.mode == RunMode.MULTIRUN and status < 128:
        raise ValueError(f"its ranks ended with status {status}, as said above")
    sys.exit(status)


def share_cores() -> None:
    """Give each of several ranks of this machine its share of the cores: all would wait for each other."""
    if (here := placed()) is not None and "OMP_NUM_THREADS" not in os.environ:
        import torch

        torch.set_num_threads(max(1, torch.get_num_threads() // here.on_machine))


def begun(
    run: Run, settings: str, facts: Mapping[str, Any], exact: Mapping[str, Any], *, force: bool
) -> Path | None:
    """The checkpoint from which an unfinished run resumes, or None: the run starts at step 0."""
    from whitenedcse.training.checkpoints import newest, step_of

    others = run.check_same(settings, exact, force=force)
    checkpoint = newest(run.checkpoints, say)
    if checkpoint is None:
        run.start(settings, **facts, **exact)
        return None
    step = step_of(checkpoint)
    changed = run.resume(settings, exact, step)
    say(f"{run.path} resumes after step {step}")
    if others:
        say(f"--force: what came before this step was made with something else: {', '.join(others)}")
    if changed:
        say(f"results may differ: {', '.join(changed)}")
    return checkpoint


def ended(cfg: DictConfig, run: Run, dev: dict[str, Any], loggers: list[Any]) -> None:
    """Evaluate the best checkpoint on the tests, if there are any; log, write and show the scores."""
    from whitenedcse.evaluation.suite import logged

    scores, items, tests = {"dev": dev}, None, tests_of(cfg, run)
    if tests is not None:
        scores, items, _ = scored(tests, run, scores)
    for logger in loggers:
        if tests is not None:
            logger.log_metrics(logged(scores), dev["last_step"])
        logger.finalize("success")
        if hasattr(logger, "finish"):  # the dashboard's
            logger.finish(run.best, scores)
    run.end(scores, items)
    say_end(cfg, run, scores)


def say_end(cfg: DictConfig, run: Run, scores: dict[str, Any]) -> None:
    """Print where a run is and, unless a sweep goes on, its scores and what is next."""
    from whitenedcse.report.tables import grids, training_grid

    alone, tested = HydraConfig.get().mode != RunMode.MULTIRUN, "rows" in scores
    if alone:
        for grid in [training_grid(scores["dev"]), *(grids(scores) if tested else [])]:
            say(grid)
    here = run.path.relative_to(Path.cwd()) if run.path.is_relative_to(Path.cwd()) else run.path
    say(f"best checkpoint: {here}/best   metrics: {here}/metrics.csv   scores: {here}/scores.json")
    if alone:
        tests = "" if cfg.monitor.dev == "STS-B/dev" else " 'tasks.names=[TESTS.csv]'"
        name = quote(str(here))
        form = "transformers" if cfg.embedding == "encoder" else "sentence-transformers"  # which has the head
        after = [f"whitenedcse report {name}", f"whitenedcse export {name} OUT --to {form}"]
        if not tested:
            after.insert(1, f"whitenedcse evaluate {override('model', here)}{tests}")
        say(f"next: {'   '.join(after)}")
    say(f"run: {run.path}")  # the last line, which other programs read


def tests_of(cfg: DictConfig, run: Run) -> DictConfig | None:
    """The settings of evaluate.py that score a run of train.py on its tests; None where it has none."""
    if not cfg.tasks.names:
        return None
    from whitenedcse.training.monitor import SAMPLE

    settings = compose("evaluate", ["protocol=posthoc"])
    settings.model, settings.sample, settings.tasks.names = str(run.path), SAMPLE, list(cfg.tasks.names)
    return settings


class Sweep(Checked):
    """Reports on a sweep of train.py at its end."""

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        """Print what `whitenedcse report` does of the runs."""
        folder = Path(config.hydra.sweep.dir)
        if any(folder.glob("*/scores.json")):
            from whitenedcse.report import page

            made, files = page.write([str(folder)], None, None)
            for part in made.parts:
                say(part)
            say(f"written: {', '.join(map(str, files))}")
        super().on_multirun_end(config)

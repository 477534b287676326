"""What train.py and evaluate.py do with their configuration, from its check to the last table.

The parts are built here from the configuration, and nothing below `app` knows of it.
"""

from __future__ import annotations

import os
import shutil
import time
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hydra import compose
from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from whitenedcse import console, distributed
from whitenedcse.app import arguments, identity, launch
from whitenedcse.app.config import check, check_jobs, check_name, jobs, plain
from whitenedcse.run import Run

SWEEP = "WHITENEDCSE_SWEEP"  # the number of jobs of a sweep and when it was started, for its processes
as_partial = partial(instantiate, _partial_=True)  # a function of what the run knows: its path, a width...


class Noted(Callback):
    """Notes the directory of a sweep, removed if it is refused, and checks all jobs before the first."""

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Note the directory before the first job; end the process if a job would be refused."""
        launch.sweeps.add(Path(config.hydra.sweep.dir).resolve())
        with launch.explained():  # Hydra turns an error of a callback into a warning
            Run(config.hydra.sweep.dir).refuse_taken(sweep=True)
            check_jobs(str(config.hydra.job.config_name), config.hydra)


class Sweep(Noted):
    """Tells the jobs of a sweep of train.py how many there are, and reports on them at the end."""

    def on_multirun_start(self, config: DictConfig, **more: Any) -> None:
        """Count the jobs before the first."""
        super().on_multirun_start(config, **more)
        count = config.hydra.sweeper.get("n_trials") or len(jobs(config.hydra))
        os.environ[SWEEP] = f"{count} {time.time()}"

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        """Print what `whitenedcse report` does of the runs, if all jobs have ended."""
        os.environ.pop(SWEEP, None)
        folder = Path(config.hydra.sweep.dir)
        if any(folder.glob("*/scores.json")):
            from whitenedcse.report import page

            tables, files = page.write([str(folder)], None, None)
            launch.show(tables)
            launch.say(f"written: {', '.join(map(str, files))}")


def progress(run: Run) -> str | None:
    """How far the sweep is that this run is a job of, and how long it will take; None outside a sweep.

    The time left is that of the jobs finished since the sweep was started, for as many as are not.
    """
    hydras = HydraConfig.get()
    if SWEEP not in os.environ or hydras.mode != RunMode.MULTIRUN:
        return None
    jobs, began = int((told := os.environ[SWEEP].split())[0]), float(told[1])
    ended = [path.stat().st_mtime for path in run.path.parent.glob("*/scores.json")]
    text = f"job {hydras.job.num + 1} of {jobs}: {len(ended)} finished"
    if not (since := sum(at >= began for at in ended)):
        return text
    minutes = max((time.time() - began) / since * max(jobs - len(ended), 1) / 60, 1)
    left = f"{minutes:.0f} min" if minutes < 90 else f"{minutes / 60:.1f} h"
    return f"{text}, about {left} left"


def begun(script: str, cfg: DictConfig) -> Run:
    """The run of these settings, which are checked; it is named after its directory."""
    hydras = HydraConfig.get()
    run = Run(hydras.runtime.output_dir).asked()
    check(script, cfg, hydras)
    check_name(str(plain(cfg)["run"]), run.path)
    cfg.run = run.path.name
    return run


def tests_of(cfg: DictConfig, run: Run) -> DictConfig | None:
    """The settings of evaluate.py that score a run of train.py on its tests; None where it has none."""
    if not cfg.tasks.names:
        return None
    from whitenedcse.training.monitor import SAMPLE

    settings = compose("evaluate", ["protocol=posthoc"])
    settings.model, settings.sample, settings.tasks.names = str(run.path), SAMPLE, list(cfg.tasks.names)
    return settings


def train(cfg: DictConfig) -> float | None:
    """One run, begun or resumed; returns the best dev score, for a sweeper to maximise."""
    with warnings.catch_warnings(record=True) as notes:
        run = begun("train", cfg)
    settings = OmegaConf.to_yaml(cfg, resolve=True)
    launch.refuse_search(cfg.monitor.dev)
    if said := None if run.scores else progress(run):
        launch.say(said)
    for note in notes:
        if note.category is UserWarning:  # ours, and not that of a library on its import
            launch.say(f"note: {note.message}")
    plain = as_partial(cfg.trainer, _convert_="all")(logger=False)
    distributed.resumes = f"T{launch.again(run)[1:]} resumes from the last checkpoint"
    if launch.mine(run, settings, plain.num_devices, cfg.trainer.timeout):
        trained(cfg, run, settings, plain.strategy.root_device)
    if run.scores:
        shutil.rmtree(run.checkpoints, ignore_errors=True)  # which only resume a run; best/ stays
    return run.best_score


def trained(cfg: DictConfig, run: Run, settings: str, device: Any) -> None:
    """Train in this process, alone or as one of several distributed."""
    # PyTorch and Lightning take seconds to import: the settings are checked before
    from lightning.pytorch.callbacks import LambdaCallback

    from whitenedcse.model.checkpoint import others
    from whitenedcse.training.health import Health, Heartbeat
    from whitenedcse.training.loggers import Metrics, Record, progress_bar
    from whitenedcse.training.module import seed_everything
    from whitenedcse.training.trainer import Safekeeping

    tests, dev = arguments.inputs(cfg)
    seed_everything(cfg.seed)
    module, data = built(cfg)
    attention = module.embedder.encoder.attention(device)
    launch.say(f"{data.counts}; attention: {attention}")
    for note in others(module.embedder, cfg.encoder.get("path")):
        launch.say(note)
    facts = {**launch.origin(cfg, module.embedder.encoder), "device": device.type, "attention": attention}
    exact = data.tokens.digests | identity.content(cfg, module.embedder.encoder, module.terms, tests, dev)
    monitor = as_partial(cfg.monitor)(dev=dev, directory=run.best, say=launch.say)
    checkpoint = launch.begin(run, settings, facts, exact)
    shared = f"{settings}resumes from: {checkpoint.name if checkpoint else 'the start'}"  # by all ranks
    keep = Safekeeping(run.checkpoints, cfg.checkpoint_every, monitor, shared, launch.say, launch.again(run))
    callbacks = [
        Heartbeat(cfg.trainer.timeout),
        keep,
        Record(),
        monitor,
        Health(monitor, launch.say),
        progress_bar(launch.say),
        LambdaCallback(on_train_end=keep.finish),
    ]
    extra = [as_partial(cfg.logger)(run=run.path)] if cfg.logger else []
    loggers = [Metrics(run.metrics, checkpoint), *extra]
    trainer: Any = as_partial(cfg.trainer, _convert_="all")(logger=loggers, callbacks=callbacks)
    trainer.fit(module, data, ckpt_path=checkpoint, weights_only=True)
    if trainer.is_global_zero:
        asked = tests_of(cfg, run)
        with console.interrupted(lambda: f"{launch.again(run)} resumes it"):
            launch.finish(run, monitor.summary(), loggers, partial(scored, asked) if asked else None)


def built(cfg: DictConfig) -> tuple[Any, Any]:
    """The ContrastiveTraining module and its SentenceData."""
    from whitenedcse.model.checkpoint import own
    from whitenedcse.model.embedder import Embedder
    from whitenedcse.training.module import ContrastiveTraining
    from whitenedcse.training.terms import refuse_call

    encoder = instantiate(cfg.encoder)
    limit = own(encoder.source).get("max_length") if encoder.source else None
    made: Any = {"encoder": encoder, "pooling": instantiate(cfg.pooling), "max_length": limit}
    made["head"] = as_partial(cfg.head)(width=encoder.width)
    data: Any = instantiate(cfg.data)
    data.tokenizer, data.hold_out = encoder.tokenizer, cfg.monitor.dev is None
    data.setup("fit")
    parts = {
        "embedder": Embedder(**made, embedding=cfg.embedding, prompt=data.prompt),
        "loss": instantiate(cfg.loss) if cfg.get("loss") else None,
        "terms": {name: term(node, encoder) for name, node in cfg.terms.items()},
        "optimizer": as_partial(cfg.optim),
        "mlm": as_partial(cfg.mlm)(encoder=encoder) if cfg.mlm.weight else None,
    }
    if parts["loss"] is not None:
        refuse_call(parts["loss"])
    settings = {"views": cfg.views, "seed": cfg.seed, "gather": cfg.gather, "chunk": cfg.trainer.chunk}
    return ContrastiveTraining(**parts, **settings), data


def term(node: DictConfig, encoder: Any) -> Any:
    """A term of the loss; one with `_partial_` is completed by the encoder that is trained."""
    made = instantiate(node)
    return made(encoder=encoder) if isinstance(made, partial) else made


def evaluate(cfg: DictConfig) -> float | None:
    """One model on its tasks, or runs compared; returns the average that the protocol prints."""
    run = begun("evaluate", cfg)
    distributed.refuse("evaluate.py")
    from whitenedcse.evaluation.suite import headline
    from whitenedcse.report import comparison, results

    if cfg.compare:
        launch.leave_nothing()  # first, so that a pattern does not match this process's own directory
        tables = comparison.compared(list(cfg.compare), cfg.draws, cfg.digits)
        launch.show(tables)
        return None
    with console.interrupted(lambda: f"{launch.again(run)} repeats it"):
        scores, items, notes = scored(cfg, run, None)
        run.end(scores, items)
    launch.show(results.grids(scores, cfg.digits, cfg.pearson))
    for note in notes:
        launch.say(note)
    launch.say(f"run: {run.path}")
    return headline(scores)


def agenda(cfg: DictConfig) -> tuple[Any, list[Any], Any, list[str]]:
    """The protocol, the rows of its table, the plan of sentences and tasks, and what to say of rows left out.

    Raises ValueError for settings that no row reads, before anything is encoded.
    """
    from whitenedcse.evaluation import suite, tasks

    for row in cfg.protocol.rows:
        if OmegaConf.is_dict(row) and "name" in row:
            row.name = row.name  # as it is for fit=training, before the corpus takes the place of that word
    fit, columns, among = fitted_on(cfg.model, cfg.fit, cfg.columns)
    cfg.fit, cfg.columns = fit, columns
    protocol = instantiate(cfg.protocol)
    settings = instantiate(cfg.postprocess).settings if cfg.postprocess else None
    rows, notes = tasks.chosen(protocol, settings, fit, curve="components" in cfg.figures)
    arguments.refuse_unread(cfg, [*protocol.lines, *rows])
    find = [partial(tasks.task, name, protocol.case) for name in cfg.tasks.names]
    _, *data = arguments.require([partial(arguments.require_model, cfg.model), *find])

    def texts(corpus: str) -> list[str]:
        own = corpus == fit
        return tasks.corpus_texts(corpus, columns if own else (), cfg.sample, among if own else None)

    fits = [row.fit for row in rows if row.fit]
    plan = suite.plan(dict(zip(cfg.tasks.names, data, strict=True)), fits, texts, protocol.case)
    return protocol, rows, arguments.drawable(plan, cfg.figures), notes


def fitted_on(model: str, name: str, columns: Sequence[str]) -> tuple[str, list[str], int | None]:
    """The corpus to fit transforms to, its columns, and the size of the sample trained on, if one was.

    name: "training" is the corpus of the model's own run.
    """
    if name.endswith(".safetensors"):
        raise ValueError(
            f"fit={name} is fitted already: whitenedcse export MODEL DIR --whiten {name} --to "
            "sentence-transformers makes a model with it, for model=DIR"
        )
    if name != "training":
        return name, list(columns), None
    if run := Run.of(model):
        data, noted = run.settings["data"], run.facts.get("corpus")
        if run.scores is not None and noted not in (None, seen(data)):
            raise ValueError(
                f"{data['corpus']} of this folder is not what {model} was trained on, or has changed since; "
                "name the corpus to fit to, fit=FILE, or start where train.py was started"
            )
        return data["corpus"], list(data["columns"]), data.get("sample")
    raise ValueError(
        f"{model} is not a run of train.py, whose corpus protocol=posthoc and fit=training fit to; "
        "name the corpus to fit to, e.g. fit=wiki1m, or fit=FILE with a sentence a line"
    )


def seen(data: Mapping[str, Any]) -> str:
    """The digest of a run's corpus, found from this folder; "" where there is none."""
    from whitenedcse.data import corpus, sources

    try:
        path = str(sources.located(data["corpus"]))
        return corpus.fingerprint(corpus.Corpus(path, tuple(data["columns"]), data.get("sample")))
    except FileNotFoundError:
        return ""


def scored(
    cfg: DictConfig, run: Run, trained: dict[str, Any] | None
) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """The content of scores.json and items.npz, and what else there is to say; figures are drawn.

    trained: what a run of train.py has for scores.json already.
    """
    # PyTorch takes seconds to import: the settings are checked before
    from whitenedcse.evaluation import classifiers, suite
    from whitenedcse.model import planes
    from whitenedcse.model.head import Pooling, requested
    from whitenedcse.report import figures

    protocol, rows, plan, notes = agenda(cfg)
    classify = classifiers.classifier(cfg.classifier)
    source = arguments.source(cfg.model, requested(cfg.get("pooling"), cfg.layers), cfg.prompt)
    arguments.refuse_width(source.embedder, rows)
    if trained is None:
        arguments.say_unfinished(cfg.model)
        run.start(OmegaConf.to_yaml(cfg, resolve=True))
    poolings = [Pooling(kind=row.pooling, layers=row.layers) if row.pooling else None for row in rows]
    read = ", ".join(dict.fromkeys(str(pooling or source.steps) for pooling in poolings))
    launch.say(f"model: {cfg.model}   pooling: {read}   sentences: {len(plan.sentences):,}")
    own, every = Run.of(cfg.model), figures.every_layer(cfg.figures)
    wanted = planes.Wanted(poolings, protocol.max_length, protocol.extra, every, own is None, cfg.bf16)
    x, kept = planes.vectors(source, plan.sentences, wanted)
    if kept:
        launch.say(f"encoded: {kept.counts()}")
    systems = [suite.System(part, row.maker, row.fit) for part, row in zip(x, rows, strict=True)]
    results = [suite.evaluated(system, plan, classify, cfg.draws, launch.say) for system in systems]
    model = arguments.described(cfg.model, (own or run).origin, None if own else source.embedder)
    used = {name: cfg[name] for name in ("bf16", "sample", "classifier")} | source.facts
    scores, items = suite.recorded((trained or {}) | model | protocol.facts | used, rows, results, plan)
    drawn = figures.draw(run.path, list(cfg.figures), kept.kinds if kept else {}, systems, plan, scores)
    few = [note for system, row in zip(systems, rows, strict=True) if (note := system.few(plan, row.name))]
    return scores, items, [*notes, *few, *suite.fitted_to_unit(source.embedder, rows), *drawn]

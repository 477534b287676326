"""What evaluate.py does: settings are checked, each sentence is encoded once, and every row is scored."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from whitenedcse.app.config import check
from whitenedcse.app.start import again
from whitenedcse.console import interrupted, lacking, say
from whitenedcse.data.remote import is_url
from whitenedcse.distributed import check_alone
from whitenedcse.files import DAMAGED, parsing
from whitenedcse.run import Run

if TYPE_CHECKING:
    from whitenedcse.model.head import Pooling
    from whitenedcse.model.layers import Source


def evaluate(cfg: DictConfig) -> float | None:
    """One model on its tasks, or runs compared; returns the average that the protocol prints."""
    run = Run(HydraConfig.get().runtime.output_dir)
    with run.tidied():
        check("evaluate", cfg, HydraConfig.get())
        check_alone("evaluate.py")
        cfg.run = run.path.name
        if cfg.compare:
            run.remove_if_empty()  # first, so that a pattern does not match this process's own directory
            from whitenedcse.report.compare import compared

            for part in compared(list(cfg.compare), cfg.draws).parts:
                say(part)
            return None
        with run.claim(), interrupted(lambda: f"{again(run)} repeats it"):
            scores, items, notes = scored(cfg, run, None)
            run.end(scores, items)
    from whitenedcse.evaluation.suite import headline
    from whitenedcse.report.tables import grids

    for grid in grids(scores):
        say(grid)
    for note in [*notes, f"run: {run.path}"]:
        say(note)
    return headline(scores)


def scored(
    cfg: DictConfig, run: Run, trained: dict[str, Any] | None
) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """The content of scores.json, after `trained`, and of items.npz, and notes; figures are drawn."""
    # PyTorch takes seconds to import: the settings are checked before
    from whitenedcse.evaluation import classifiers, suite
    from whitenedcse.model import layers
    from whitenedcse.model.head import Pooling, requested
    from whitenedcse.report import figures

    protocol, rows, plan, notes = agenda(cfg)
    classify = classifiers.classifier(cfg.classifier)
    source = source_of(cfg.model, requested(cfg.get("pooling"), cfg.layers), cfg.prompt)
    check_readable(source.embedder, rows, bf16=cfg.bf16)
    if trained is None:
        run.start(OmegaConf.to_yaml(cfg, resolve=True))
    rows = [readout_of(row, plan, source.embedder) if row.choose else row for row in rows]
    poolings = [Pooling(kind=row.pooling, layers=row.layers) if row.pooling else None for row in rows]
    read = ", ".join(dict.fromkeys(str(pooling or source.steps) for pooling in poolings))
    say(f"model: {cfg.model}   pooling: {read}   sentences: {len(plan.sentences):,}")
    all_layers = bool(cfg.keep) or not {"layers", "subsets"}.isdisjoint(cfg.figures)
    wanted = layers.Wanted(poolings, protocol.max_length, protocol.extra, all_layers, cfg.bf16)
    x, pooled = layers.vectors(source, plan.sentences, wanted)
    if pooled and cfg.keep:
        pooled.write(run.path, plan.sentences)
    systems = [suite.System(part, row.maker, row.fit) for part, row in zip(x, rows, strict=True)]
    results = [suite.evaluated(system, plan, classify, cfg.draws, say) for system in systems]
    trained_here = Run.of(cfg.model)
    model = {"model": cfg.model, **(trained_here or run).origin}
    if source.embedder and not trained_here:
        model["encoder"] = source.embedder.encoder.provenance(cfg.model)
    used = {name: cfg[name] for name in ("bf16", "sample", "classifier")} | {
        "pooling": source.pooling,
        "prompt": source.prompt,
    }
    scores, items = suite.recorded((trained or {}) | model | protocol.facts | used, rows, results, plan)
    drawn = figures.draw(run.path, list(cfg.figures), pooled.kinds if pooled else {}, systems, plan, scores)
    few = [system.note_on_few_texts(plan, row.name) for system, row in zip(systems, rows, strict=True)]
    return scores, items, [*notes, *filter(None, few), *drawn]


def readout_of(row: Any, plan: Any, embedder: Any) -> Any:
    """The row with the pooling, layers and map that its pairs choose; as it is if these gain nothing."""
    from whitenedcse.serving.readout import readout

    (corpus, *_) = plan.fits[row.fit].values()
    found = readout(embedder, [plan.sentences[i] for i in corpus], row.choose)
    say(f"{row.name}: {found}")
    if (best := found.best) is None:
        return replace(row, fit="")
    fit = row.fit if best.map.settings else ""
    return replace(row, pooling=best.pooling, layers=best.layers, map=best.map.settings, fit=fit)


def agenda(cfg: DictConfig) -> tuple[Any, list[Any], Any, list[str]]:
    """The protocol, the rows of its table, the plan of sentences and tasks, and notes on rows left out."""
    from whitenedcse.evaluation import protocol as protocols
    from whitenedcse.evaluation import suite, tasks

    require_model(cfg.model)
    for row in cfg.protocol.rows:
        if OmegaConf.is_dict(row) and "name" in row:
            row.name = row.name  # as it is for fit=training, before the corpus takes the place of that word
    fit, columns, among = fitted_on(cfg.model, cfg.fit, cfg.columns)
    cfg.fit, cfg.columns = fit, columns
    protocol = instantiate(cfg.protocol)
    settings = instantiate(cfg.postprocess).settings if cfg.postprocess else None
    rows, notes = protocols.chosen(protocol, settings, fit, curve="components" in cfg.figures)
    data = {name: tasks.task(name, protocol.case) for name in cfg.tasks.names}

    def texts(corpus: str) -> list[str]:
        own = corpus == fit
        return tasks.corpus_texts(corpus, columns if own else (), cfg.sample, among if own else None)

    fits = [row.fit for row in rows if row.fit]
    plan = suite.plan(data, fits, texts, protocol.case)
    if cfg.figures and not plan.pairs:
        raise ValueError(
            f"figures={list(cfg.figures)}: a figure is of scored pairs, and no task here has them"
        )
    return protocol, rows, plan, notes


def fitted_on(model: str, name: str, columns: Sequence[str]) -> tuple[str, list[str], int | None]:
    """The corpus to fit transforms to, its columns, and the size of the sample trained on, if one was."""
    if name != "training":
        return name, list(columns), None
    run = Run.of(model)
    if run is None:
        raise ValueError(
            f"{model} is not a run of train.py, whose corpus protocol=posthoc and fit=training fit to; "
            "name the corpus to fit to, e.g. fit=wiki1m, or fit=FILE with a sentence a line"
        )
    from whitenedcse.data import corpus, sources

    data = run.settings["data"]
    now = sources.named(data["corpus"], data["columns"], data.get("sample"))
    if run.scores is not None and run.facts.get("corpus") not in (None, corpus.fingerprint(now)):
        raise ValueError(
            f"{data['corpus']} is not what {model} was trained on; name the corpus to fit to, fit=FILE, "
            "or start where train.py was started"
        )
    return data["corpus"], list(data["columns"]), data.get("sample")


def source_of(model: str, pooling: Pooling | None, prompt: str | None = None) -> Source:
    """The encoder that a setting names: a checkpoint (see `Embedder.load`), or a function as module:function.

    prompt: put before each sentence; None for the model's own. Modules that only Sentence-Transformers knows
    are opened by that library.
    """
    from whitenedcse.model.layers import Source

    if is_function(model):
        module, _, name = model.partition(":")
        if pooling is not None:
            raise ValueError(
                f"model={model} is a function, which pools itself; leave pooling= and layers= out"
            )
        sys.path.insert(0, str(Path.cwd()))
        try:
            function = getattr(importlib.import_module(module), name)
            before = prompt or ""
            return Source(lambda texts: function([before + text for text in texts]), "its own", prompt=before)
        except (ImportError, AttributeError, ValueError) as error:  # ValueError: nothing before the colon
            raise ValueError(f"model={model}: {error}; MODULE:FUNCTION is imported from here") from error
    from whitenedcse.compute import device
    from whitenedcse.model.embedder import Embedder
    from whitenedcse.model.sentence_transformers import ForeignModules

    try:
        embedder = Embedder.load(model, pooling).to(device())
    except ForeignModules as error:
        with parsing(Path(model), DAMAGED):
            theirs = opened_by_theirs(model, device(), str(error))
            own = theirs.prompts.get(theirs.default_prompt_name or "") or ""
            before = own if prompt is None else prompt
            return Source(partial(theirs.encode, prompt=before), "its own", prompt=before)
    embedder.prompt = embedder.prompt if prompt is None else prompt
    return Source(embedder.encode, str(embedder.pooling), embedder, embedder.prompt)


def opened_by_theirs(model: str, device: str, why: str) -> Any:
    """A model of modules that only Sentence-Transformers knows; ValueError if it is code of its own."""
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError as error:
        raise lacking(f"{why}; it", "sentence-transformers", "sentence-transformers") from error
    try:
        return SentenceTransformer(model, device=device)
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        cure = "model=MODULE:FUNCTION evaluates any function of texts"
        raise ValueError(f"{model} is Python code of its own, which is not run here; {cure}") from error


def require_model(model: str | None) -> None:
    """Raise FileNotFoundError if there is no such model; a model of the hub is fetched."""
    if model is None:
        raise ValueError("no model: give model=DIR_OR_HUB_ID, or compare=[RUN,RUN]")
    if not is_function(model):
        from whitenedcse.model.encoder import folder

        folder(model)


def is_function(model: str) -> bool:
    """Whether a model is named as module:function."""
    return ":" in model and not is_url(model) and not Path(model).exists()


def check_readable(embedder: Any, rows: Iterable[Any], *, bf16: bool) -> None:
    """Raise ValueError for a row that keeps too many components, or whose readout cannot be chosen.

    embedder: None where others compute the vectors, in their own precision.
    """
    from whitenedcse.evaluation.protocol import setting

    if bf16 and embedder is None:
        raise ValueError("bf16=true is for an encoder that is computed here, which this model is not")
    for row in rows:
        if row.choose and setting(row.fit) != "inductive":
            raise ValueError("a readout is fitted to a corpus: fit=FILE, one sentence a line, or fit=wiki1m")
        k = row.map.get("k") if row.map else None
        if embedder is not None and k is not None:
            width = embedder.encoder.width if row.pooling else embedder.width
            if not 1 <= k <= width:
                raise ValueError(
                    f"k={k} components of vectors of width {width}: give k from 1 to {width}, or k=null for "
                    f"all; the row {row.name} has it"
                )

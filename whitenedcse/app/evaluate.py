"""What evaluate.py does: settings are checked, each sentence is encoded once, and every row is scored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from whitenedcse import console
from whitenedcse.app import arguments
from whitenedcse.app.config import check, check_name, plain
from whitenedcse.app.start import again, say
from whitenedcse.distributed import check_alone
from whitenedcse.run import Run


def evaluate(cfg: DictConfig) -> float | None:
    """One model on its tasks, or runs compared; returns the average that the protocol prints."""
    run = Run(HydraConfig.get().runtime.output_dir)
    with run.tidied():
        check("evaluate", cfg, HydraConfig.get())
        check_name(str(plain(cfg)["run"]), run.path)
        check_alone("evaluate.py")
        cfg.run = run.path.name
        if cfg.compare:
            run.discard()  # first, so that a pattern does not match this process's own directory
            compared(cfg)
            return None
        with run.claim(), console.interrupted(lambda: f"{again(run)} repeats it"):
            scores, items, notes = scored(cfg, run, None)
            run.end(scores, items)
    from whitenedcse.evaluation.suite import headline
    from whitenedcse.report.tables import grids

    for grid in grids(scores):
        say(grid)
    for note in [*notes, f"run: {run.path}"]:
        say(note)
    return headline(scores)


def compared(cfg: DictConfig) -> None:
    """Print runs of this script beside each other."""
    from whitenedcse.report import compare

    for part in compare.compared(list(cfg.compare), cfg.draws).parts:
        say(part)


def scored(
    cfg: DictConfig, run: Run, trained: dict[str, Any] | None
) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """The content of scores.json and items.npz, and what else there is to say; figures are drawn.

    trained: what a run of train.py has for scores.json already.
    """
    # PyTorch takes seconds to import: the settings are checked before
    from whitenedcse.evaluation import classifiers, suite
    from whitenedcse.model import layers
    from whitenedcse.model.head import Pooling, requested
    from whitenedcse.report import figures

    protocol, rows, plan, notes = agenda(cfg)
    classify = classifiers.classifier(cfg.classifier)
    source = arguments.source(cfg.model, requested(cfg.get("pooling"), cfg.layers), cfg.prompt)
    arguments.check_row_widths(source.embedder, rows)
    check_readable(source.embedder, rows)
    if trained is None:
        arguments.say_unfinished(cfg.model)
        run.start(OmegaConf.to_yaml(cfg, resolve=True))
    rows = [readout_of(row, plan, source.embedder) if row.choose else row for row in rows]
    poolings = [Pooling(kind=row.pooling, layers=row.layers) if row.pooling else None for row in rows]
    read = ", ".join(dict.fromkeys(str(pooling or source.steps) for pooling in poolings))
    say(f"model: {cfg.model}   pooling: {read}   sentences: {len(plan.sentences):,}")
    own, every = Run.of(cfg.model), figures.every_layer(cfg.figures)
    wanted = layers.Wanted(poolings, protocol.max_length, protocol.extra, every or bool(cfg.keep), cfg.bf16)
    x, pooled = layers.vectors(source, plan.sentences, wanted)
    if pooled and cfg.keep:
        pooled.write(run.path, plan.sentences)
    systems = [suite.System(part, row.maker, row.fit) for part, row in zip(x, rows, strict=True)]
    results = [suite.evaluated(system, plan, classify, cfg.draws, say) for system in systems]
    model = arguments.described(cfg.model, (own or run).origin, None if own else source.embedder)
    used = {name: cfg[name] for name in ("bf16", "sample", "classifier")} | source.facts
    scores, items = suite.recorded((trained or {}) | model | protocol.facts | used, rows, results, plan)
    drawn = figures.draw(run.path, list(cfg.figures), pooled.kinds if pooled else {}, systems, plan, scores)
    few = [note for system, row in zip(systems, rows, strict=True) if (note := system.few(plan, row.name))]
    return scores, items, [*notes, *few, *suite.fitted_to_unit(source.embedder, rows), *drawn]


def check_readable(embedder: Any, rows: Sequence[Any]) -> None:
    """Raise ValueError for a row whose readout is to be chosen without layers, or without a corpus."""
    from whitenedcse.evaluation.protocol import setting

    for row in rows:
        if row.choose and embedder is None:
            raise ValueError("this model shows no layers to choose a readout from; give an encoder or a run")
        if row.choose and setting(row.fit) != "inductive":
            raise ValueError("a readout is fitted to a corpus: fit=FILE, one sentence a line, or fit=wiki1m")


def readout_of(row: Any, plan: Any, embedder: Any) -> Any:
    """The row with the pooling, layers and map that its pairs choose; as it is if these gain nothing."""
    from whitenedcse.serving.readout import readout, verdict

    (corpus, *_) = plan.fits[row.fit].values()
    found = readout(embedder, [plan.sentences[i] for i in corpus], row.choose)
    judged, best = found.choice, found.best
    assert judged and best
    say(f"{row.name}: {verdict(found, judged)}")
    if not judged.shown:
        return replace(row, fit="")
    fit = row.fit if best.map.settings else ""
    return replace(row, pooling=best.pooling, layers=best.layers, map=best.map.settings, fit=fit)


def agenda(cfg: DictConfig) -> tuple[Any, list[Any], Any, list[str]]:
    """The protocol, the rows of its table, the plan of sentences and tasks, and what to say of rows left out.

    Raises ValueError for settings that no row reads, before anything is encoded.
    """
    from whitenedcse.evaluation import protocol as protocols
    from whitenedcse.evaluation import suite, tasks

    for row in cfg.protocol.rows:
        if OmegaConf.is_dict(row) and "name" in row:
            row.name = row.name  # as it is for fit=training, before the corpus takes the place of that word
    fit, columns, among = fitted_on(cfg.model, cfg.fit, cfg.columns)
    cfg.fit, cfg.columns = fit, columns
    protocol = instantiate(cfg.protocol)
    settings = instantiate(cfg.postprocess).settings if cfg.postprocess else None
    rows, notes = protocols.chosen(protocol, settings, fit, curve="components" in cfg.figures)
    arguments.check_effects(cfg, [*protocol.lines, *rows])
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

"""Score a sentence encoder: python evaluate.py model=MODEL [key=value ...]; --help explains."""

from __future__ import annotations

from functools import partial
from typing import Any

import hydra
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from whitenedcse.app import arguments, configuration, launch, ranks
from whitenedcse.app.run import Run


@hydra.main(version_base="1.3", config_path="conf", config_name="evaluate")
@launch.job
def evaluate(cfg: DictConfig) -> float | None:
    """One model on its tasks, or runs compared; returns the average that the protocol prints."""
    run = configuration.checked(cfg)
    ranks.refuse("evaluate.py")
    from whitenedcse.evaluation.suite import headline
    from whitenedcse.report import comparison, results

    if cfg.compare:
        launch.show(comparison.compared(list(cfg.compare), cfg.draws, cfg.digits))
        return None
    scores, notes = scored(cfg, run, None)
    launch.show(results.grids(scores, cfg.digits, cfg.pearson))
    for note in notes:
        launch.say(note)
    launch.end([], run)
    return headline(scores)


def scored(cfg: DictConfig, run: Run, trained: dict[str, Any] | None) -> tuple[dict[str, Any], list[str]]:
    """scores.json, and what else there is to say; `trained`: what a run of train.py has for it already."""
    # PyTorch takes seconds to import: the settings are checked before
    from whitenedcse.evaluation import classifiers, suite, tasks
    from whitenedcse.model import planes
    from whitenedcse.model.pooling import requested

    cfg.fit, cfg.columns = fit, columns = arguments.fit(cfg.model, cfg.fit, cfg.columns)
    protocol: tasks.Protocol = instantiate(cfg.protocol)
    settings = instantiate(cfg.postprocess).settings if cfg.postprocess else None
    rows, notes = tasks.chosen(protocol, settings, fit)
    if "components" in cfg.figures and not any(row.curve for row in rows):
        rows.append(tasks.Row(f"whitening ({fit})", map={"kind": "whitening"}, fit=fit))
    find = [partial(tasks.task, name, protocol.case) for name in cfg.tasks.names]
    _, *data = arguments.require([partial(arguments.require_model, cfg.model), *find])

    def texts(corpus: str) -> list[str]:
        return tasks.corpus_texts(corpus, columns if corpus == fit else (), cfg.sample)

    fits = [row.fit for row in rows if row.fit]
    agenda = suite.plan(dict(zip(cfg.tasks.names, data, strict=True)), fits, texts, protocol.case)
    classify = classifiers.classifier(cfg.classifier)
    source = arguments.source(cfg.model, requested(cfg.get("pooling"), cfg.layers))
    if trained is None:
        run.start(OmegaConf.to_yaml(cfg, resolve=True))
    launch.say(f"model: {cfg.model}   pooling: {source.pooling}   sentences: {len(agenda.sentences):,}")
    x, kept = planes.vectors(source, agenda.sentences, wanted(cfg, protocol, rows))
    launch.say(f"encoded: {kept.encoded:,}" if kept else "encoded")
    systems = [suite.System(part, row.maker, row.fit) for part, row in zip(x, rows, strict=True)]
    results = [suite.evaluated(system, agenda, classify, cfg.draws, launch.say) for system in systems]
    facts = {**(trained or {}), **described(cfg, run, protocol), "pooling": source.pooling}
    scores, items = suite.recorded(facts, rows, results, agenda)
    run.end(scores, items)
    if cfg.figures:
        curves = {row.name: system for row, system in zip(rows, systems, strict=True) if row.curve}
        notes += drawn(cfg, run, scores, kept, curves | {"": systems[0]}, agenda)
    return scores, notes


def wanted(cfg: DictConfig, protocol: Any, rows: Any) -> Any:
    """The vectors that the rows and figures need."""
    from whitenedcse.model.planes import Wanted
    from whitenedcse.model.pooling import Pooling

    poolings = [Pooling(kind=row.pooling, layers=row.layers) if row.pooling else None for row in rows]
    every = bool({"layers", "subsets"} & set(cfg.figures))
    about = {"every": every, "keep": Run.of(cfg.model) is None, "bf16": cfg.bf16}
    return Wanted(poolings, protocol.max_length, protocol.extra, **about)


def described(cfg: DictConfig, run: Run, protocol: Any) -> dict[str, Any]:
    """What scores.json says of the model and of how it is evaluated, but for the pooling."""
    from whitenedcse.model.encoder import provenance

    own = Run.of(cfg.model)
    plain = own is None and not arguments.is_function(cfg.model)
    return {
        "model": cfg.model,
        **(own or run).origin,
        **({"encoder": provenance(cfg.model)} if plain else {}),
        "protocol": protocol.name,
        **{name: getattr(protocol, name) for name in ("headline", "case", "max_length", "extra")},
        **{name: cfg[name] for name in ("bf16", "sample", "classifier")},
    }


def drawn(cfg: DictConfig, run: Run, scores: Any, kept: Any, curves: Any, agenda: Any) -> list[str]:
    """Draw the figures that were asked for, pooled as the last row is; returns a line on each."""
    from whitenedcse.report import figures

    pooling = scores["rows"][-1]["pooling"]
    kind = pooling.partition(" ")[0].replace("pooler", "cls")
    every = bool({"layers", "subsets"} & set(cfg.figures))
    layers = kept.kinds[kind] if every else None
    said = figures.Said(cfg.model, f"{kind} in each layer" if every else pooling, scores["headline"])
    return figures.draw(run.path, list(cfg.figures), layers, curves, agenda, said)


if __name__ == "__main__":
    launch.start(evaluate)

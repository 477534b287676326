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
    scores, items, notes = scored(cfg, run, None)
    run.end(scores, items)
    launch.show(results.grids(scores, cfg.digits, cfg.pearson))
    for note in notes:
        launch.say(note)
    launch.say(f"run: {run.path}")
    return headline(scores)


def scored(
    cfg: DictConfig, run: Run, trained: dict[str, Any] | None
) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """The content of scores.json and items.npz, and what else there is to say; figures are drawn.

    trained: what a run of train.py has for scores.json already.
    """
    # PyTorch takes seconds to import: the settings are checked before
    from whitenedcse.evaluation import classifiers, suite, tasks
    from whitenedcse.model import planes
    from whitenedcse.model.pooling import Pooling, requested
    from whitenedcse.report import figures

    cfg.fit, cfg.columns = fit, columns = arguments.fit(cfg.model, cfg.fit, cfg.columns)
    protocol: tasks.Protocol = instantiate(cfg.protocol)
    settings = instantiate(cfg.postprocess).settings if cfg.postprocess else None
    rows, notes = tasks.chosen(protocol, settings, fit, curve="components" in cfg.figures)
    find = [partial(tasks.task, name, protocol.case) for name in cfg.tasks.names]
    _, *data = arguments.require([partial(arguments.require_model, cfg.model), *find])

    def texts(corpus: str) -> list[str]:
        return tasks.corpus_texts(corpus, columns if corpus == fit else (), cfg.sample)

    fits = [row.fit for row in rows if row.fit]
    agenda = suite.plan(dict(zip(cfg.tasks.names, data, strict=True)), fits, texts, protocol.case)
    classify = classifiers.classifier(cfg.classifier)
    source = arguments.source(cfg.model, requested(cfg.get("pooling"), cfg.layers), cfg.prompt)
    if trained is None:
        run.start(OmegaConf.to_yaml(cfg, resolve=True))
    launch.say(f"model: {cfg.model}   pooling: {source.pooling}   sentences: {len(agenda.sentences):,}")
    poolings = [Pooling(kind=row.pooling, layers=row.layers) if row.pooling else None for row in rows]
    own, every = Run.of(cfg.model), figures.every_layer(cfg.figures)
    wanted = planes.Wanted(poolings, protocol.max_length, protocol.extra, every, own is None, cfg.bf16)
    x, kept = planes.vectors(source, agenda.sentences, wanted)
    launch.say(f"encoded: {kept.encoded:,}" if kept else "encoded")
    systems = [suite.System(part, row.maker, row.fit) for part, row in zip(x, rows, strict=True)]
    results = [suite.evaluated(system, agenda, classify, cfg.draws, launch.say) for system in systems]
    model = arguments.described(cfg.model, (own or run).origin, None if own else source.embedder)
    used = {name: cfg[name] for name in ("bf16", "sample", "classifier")} | source.facts
    scores, items = suite.recorded((trained or {}) | model | protocol.facts | used, rows, results, agenda)
    drawn = figures.draw(run.path, list(cfg.figures), kept.kinds if kept else {}, systems, agenda, scores)
    return scores, items, notes + drawn


if __name__ == "__main__":
    launch.start(evaluate)

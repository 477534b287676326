"""Score a sentence encoder: python evaluate.py model=MODEL [key=value ...]; --help explains."""

from __future__ import annotations

from functools import partial
from typing import Any

import hydra
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from whitenedcse.app import configuration, launch, ranks
from whitenedcse.app.run import Run
from whitenedcse.evaluation.classifiers import classifier
from whitenedcse.evaluation.postprocess import Postprocess
from whitenedcse.evaluation.suite import System, evaluated, headline, plan, recorded
from whitenedcse.evaluation.tasks import Protocol, chosen, corpus_texts, task
from whitenedcse.model.planes import Wanted, vectors
from whitenedcse.model.pooling import Pooling, requested
from whitenedcse.report.plots import draw
from whitenedcse.report.tables import compared, grids


@hydra.main(version_base="1.3", config_path="conf", config_name="evaluate")
@launch.job
def evaluate(cfg: DictConfig) -> float | None:
    """One model on its tasks, or runs compared; returns the average that the protocol prints."""
    run = configuration.checked(cfg)
    ranks.refuse("evaluate.py")
    if cfg.compare:
        launch.show(compared(list(cfg.compare), cfg.draws, cfg.digits))
        return None
    scores, notes = scored(cfg, run, None)
    launch.show(grids(scores, cfg.digits))
    for note in notes:
        launch.say(note)
    launch.end([], run)
    return headline(scores)


def scored(cfg: DictConfig, run: Run, trained: dict[str, Any] | None) -> tuple[dict[str, Any], list[str]]:
    """scores.json, and what else there is to say; `trained`: what a run of train.py has for it already."""
    cfg.fit, cfg.columns = fit, columns = configuration.fit(cfg.model, cfg.fit, cfg.columns)
    protocol: Protocol = instantiate(cfg.protocol)
    settings = instantiate(cfg.postprocess).settings if cfg.postprocess else None
    rows, notes = chosen(protocol, settings, fit)
    tasks = [partial(task, name, protocol.case) for name in cfg.tasks.names]
    _, *data = configuration.require([partial(configuration.found, cfg.model), *tasks])
    fits = [row.fit for row in rows if row.fit] + ([fit] if cfg.figures else [])
    tests = dict(zip(cfg.tasks.names, data, strict=True))
    agenda = plan(
        tests, fits, lambda on: corpus_texts(on, columns if on == fit else (), cfg.sample), protocol.case
    )
    classify = classifier(cfg.classifier)
    source = configuration.opened(cfg.model, requested(cfg.get("pooling"), cfg.layers))
    if trained is None:
        run.start(OmegaConf.to_yaml(cfg, resolve=True))
    launch.say(f"model: {cfg.model}   pooling: {source.pooling}   sentences: {len(agenda.sentences):,}")
    poolings = [Pooling(kind=row.pooling, layers=row.layers) if row.pooling else None for row in rows]
    wanted = Wanted(poolings, protocol.max_length, protocol.extra, cfg.figures, cfg.bf16)
    x, planes = vectors(source, agenda.sentences, wanted)
    launch.say(f"encoded: {planes.encoded:,}" if planes else "encoded")
    systems = [System(part, row.maker, row.fit) for part, row in zip(x, rows, strict=True)]
    results = [evaluated(system, agenda, classify, cfg.draws, launch.say) for system in systems]
    facts = {
        **(trained or {}),
        "model": cfg.model,
        **(Run.of(cfg.model) or run).origin,
        "pooling": source.pooling,
    }
    facts |= {"protocol": protocol.name, "headline": protocol.headline, "classifier": cfg.classifier}
    scores, items = recorded(facts, rows, results, agenda)
    run.end(scores, items)
    if cfg.figures and planes:
        whitened = System(x[0], partial(Postprocess, kind="whitening"), fit)
        notes += draw(run.path, planes.kinds[cfg.figures], whitened, agenda, protocol.headline)
    return scores, notes


if __name__ == "__main__":
    launch.start(evaluate)

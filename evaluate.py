"""Score a sentence encoder: python evaluate.py model=MODEL [key=value ...]; --help explains."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import hydra
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from whitenedcse import launch, ranks
from whitenedcse.evaluation.classifiers import classifier
from whitenedcse.evaluation.postprocess import Postprocess
from whitenedcse.evaluation.protocol import Protocol, chosen
from whitenedcse.evaluation.suite import System, judge, plan
from whitenedcse.evaluation.tasks import corpus_texts, task
from whitenedcse.model.pooling import Pooling, requested
from whitenedcse.model.source import Wanted, found, opened, vectors
from whitenedcse.report import judgements, record
from whitenedcse.report.comparison import compared
from whitenedcse.report.figures import draw
from whitenedcse.report.tables import grids


@hydra.main(version_base="1.3", config_path="conf", config_name="evaluate")
@launch.job
def evaluate(cfg: DictConfig) -> float | None:
    """One model on its tasks, or runs compared; returns the average that the protocol prints."""
    run = launch.checked(cfg)
    ranks.refuse("evaluate.py")
    if cfg.compare:
        launch.show(compared(list(cfg.compare), cfg.draws, cfg.digits))
        return None
    scores, notes = judged(cfg, run, None)
    launch.show(grids(scores, cfg.digits))
    for note in notes:
        launch.say(note)
    launch.end([], run)
    return judgements.headline(scores)


def judged(cfg: DictConfig, run: Path, trained: dict[str, Any] | None) -> tuple[dict[str, Any], list[str]]:
    """scores.json, and what else there is to say; `trained`: what a run of train.py has for it already."""
    cfg.fit, cfg.columns = fit, columns = launch.fit(cfg.model, cfg.fit, cfg.columns)
    protocol: Protocol = instantiate(cfg.protocol)
    settings = instantiate(cfg.postprocess).settings if cfg.postprocess else None
    rows, notes = chosen(protocol, settings, fit)
    tasks = [partial(task, name, protocol.case) for name in cfg.tasks.names]
    _, *data = launch.require([partial(found, cfg.model), *tasks])
    fits = [row.fit for row in rows if row.fit] + ([fit] if cfg.figures else [])
    tests = dict(zip(cfg.tasks.names, data, strict=True))
    agenda = plan(
        tests, fits, lambda on: corpus_texts(on, columns if on == fit else (), cfg.sample), protocol.case
    )
    classify = classifier(cfg.classifier)
    source = opened(cfg.model, requested(cfg.get("pooling"), cfg.layers))
    if trained is None:
        record.start(run, OmegaConf.to_yaml(cfg, resolve=True))
    launch.say(f"model: {cfg.model}   pooling: {source.pooling}   sentences: {len(agenda.sentences):,}")
    poolings = [Pooling(kind=row.pooling, layers=row.layers) if row.pooling else None for row in rows]
    wanted = Wanted(poolings, protocol.max_length, protocol.extra, cfg.figures, cfg.bf16)
    x, planes = vectors(source, agenda.sentences, wanted)
    launch.say(f"encoded: {planes.encoded:,}" if planes else "encoded")
    systems = [System(part, row.maker, row.fit) for part, row in zip(x, rows, strict=True)]
    results = [judge(system, agenda, classify, cfg.draws, launch.say) for system in systems]
    facts = {**(trained or {}), "model": cfg.model, **record.origin(cfg.model), "pooling": source.pooling}
    facts |= {"protocol": protocol.name, "headline": protocol.headline, "classifier": cfg.classifier}
    scores = judgements.save(run, facts, rows, results, agenda)
    if cfg.figures and planes:
        whitened = System(x[0], partial(Postprocess, kind="whitening"), fit)
        notes += draw(run, planes.kinds[cfg.figures], whitened, agenda, protocol.headline)
    return scores, notes


if __name__ == "__main__":
    launch.start(evaluate)

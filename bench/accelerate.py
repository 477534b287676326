"""`accelerate` against sentence-transformers as it is: encoding to vectors and a training step, taking turns.

The goals are 2.0 times in fp32 and 1.5 times in bf16, with 1 thread and with 2.
"""

from __future__ import annotations

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

from bench import measure
from bench.encode import opened, parsed, wikipedia
from bench.measure import Variant
from whitenedcse.sentence_transformers import accelerate, undo

ROWS = 64  # of a training step, two columns


def main() -> None:
    """A table of encoding, and one of training."""
    parser = measure.parser(__doc__)
    parser.add_argument("--sentences", type=int, help="how many (default: 5,000; quick: 500)")
    parser.add_argument("--no-bf16", action="store_true", help="fp32 alone, on a CPU that only emulates bf16")
    options = parsed(parser)
    here = measure.begin(options)
    sentences = wikipedia(options.sentences or (500 if options.quick else 5_000))
    model = opened(options.model)[1]
    rounds = options.rounds or (1 if options.quick else 5)
    works = {f"{len(sentences):,} sentences encoded": lambda m: m.encode(sentences)}
    works[f"a step of {ROWS} pairs"] = lambda m: stepped(m, sentences)
    tables = []
    for work, run in works.items():
        timed = {}
        for name, kind in {"fp32": None, "bf16": torch.bfloat16}.items():
            if kind is not None and options.no_bf16:
                continue

            def turn(change, kind=kind, run=run):  # noqa: ANN001, ANN202
                with torch.autocast("cpu", kind, enabled=kind is not None):
                    run(change(model))

            timed[f"theirs {name}"] = Variant(lambda turn=turn: turn(undo))
            timed[f"accelerated {name}"] = Variant(lambda turn=turn: turn(accelerate), f"theirs {name}")
        times = measure.interleaved(timed, rounds, options.threads, warm=True)
        tables.append(measure.table(work, timed, times))
    measure.end(options, here, tables)


def stepped(model: SentenceTransformer, sentences: list[str]) -> None:
    """Loss and gradient of one batch of pairs, with dropout."""
    columns = [model.preprocess(sentences[i * ROWS : (i + 1) * ROWS]) for i in range(2)]
    model.train().zero_grad()
    MultipleNegativesRankingLoss(model)(columns, None).backward()


if __name__ == "__main__":
    main()

"""`whitenedcse whiten fit`: parsers, and what they do."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from whitenedcse.data import sources

SOURCE = "a run directory, a checkpoint, an encoder in a local directory, or a hub id"
CORPUS = "a text, csv, tsv, jsonl or parquet file, a directory of them, a hub data set, or one of "


def add(commands: Any) -> None:
    """The commands, added to those of `whitenedcse`."""
    about = "fit a whitening to an encoder's vectors of a corpus of any size"
    whiten = commands.add_parser("whiten", help=about, description=about)
    fit = whiten.add_subparsers(required=True, metavar="COMMAND", title="commands").add_parser(
        "fit", help=about, description=f"{about}; for --whiten of the other commands"
    )
    fit.add_argument("source", metavar="SOURCE", help=SOURCE)
    fit.add_argument("corpus", metavar="CORPUS", help=CORPUS + ", ".join(sources.CORPORA))
    fit.add_argument("out", type=Path, metavar="OUT", help="the file to write, e.g. whitening.safetensors")
    kinds = ("whitening", "pca", "zca", "centre", "abtt")
    fit.add_argument("--kind", choices=kinds, default="whitening", help="(default: whitening)")
    fit.add_argument(
        "--shrinkage", type=float, default=0.0, help="towards a sphere, from 0 to 1; for few rows"
    )
    fit.add_argument("--sample", type=int, metavar="N", help="so many rows, drawn uniformly (default: all)")
    reading(fit)
    pooling(fit)
    fit.set_defaults(run=whiten_fit)


def reading(parser: argparse.ArgumentParser) -> None:
    """How a corpus is read, and in which precision an encoder computes."""
    columns = "of a table: the columns with text"
    parser.add_argument("--columns", nargs="+", default=(), metavar="NAME", help=columns)
    parser.add_argument("--bf16", action="store_true", help="the encoder computes in bfloat16: faster")


def pooling(parser: argparse.ArgumentParser) -> None:
    """What a plain encoder does not say; refused for a SOURCE that carries its own."""
    kinds = ("cls", "mean", "max", "pooler")
    about = "of a plain encoder, which says nothing of its pooling (default: cls)"
    parser.add_argument("--pooling", choices=kinds, help=about)
    about = "the layers that are pooled, 0 being the embeddings (default: -1)"
    parser.add_argument("--layers", nargs="+", type=int, metavar="LAYER", help=about)


def source(arguments: argparse.Namespace) -> Any:
    """The embedder that the arguments name, on the device at hand."""
    import torch

    from whitenedcse.model import checkpoint
    from whitenedcse.model.pooling import Pooling

    asked = None
    if arguments.pooling or arguments.layers:
        asked = Pooling(kind=arguments.pooling or "cls", layers=arguments.layers or [-1])
    return checkpoint.load(arguments.source, asked).to("cuda" if torch.cuda.is_available() else "cpu")


def whiten_fit(arguments: argparse.Namespace) -> int:
    """Fit a map and write it."""
    from whitenedcse.evaluation.postprocess import Postprocess
    from whitenedcse.export.whitened import fitted
    from whitenedcse.report.formats import say

    fit = Postprocess(arguments.kind, shrinkage=arguments.shrinkage)
    corpus = sources.named(arguments.corpus, arguments.columns, arguments.sample)
    if not arguments.out.parent.is_dir():
        raise FileNotFoundError(f"{arguments.out.parent}: no such directory; make it first")
    facts = fitted(fit, source(arguments), corpus, bf16=arguments.bf16)
    fit.save(arguments.out, {"source": arguments.source, **facts})
    say(f"{fit.kind} of width {len(fit.mean)}, fitted to {facts['texts']:,} texts: {arguments.out}")
    return 0

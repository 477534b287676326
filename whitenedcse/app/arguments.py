"""Arguments that several commands take, declared once, and the embedder that they name."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from whitenedcse.data import sources

FORMS = ("table", "markdown", "csv", "latex")


def group(commands: Any, name: str, about: str) -> Any:
    """A command that has commands of its own, which are added to what this returns."""
    return subcommands(commands.add_parser(name, help=about, description=about))


def subcommands(parser: argparse.ArgumentParser) -> Any:
    """The commands of a parser, one of which has to be given."""
    return parser.add_subparsers(required=True, metavar="COMMAND", title="commands")


def encoder(parser: argparse.ArgumentParser) -> None:
    """SOURCE, and what a plain encoder does not say; refused for a SOURCE that carries its own."""
    about = "a run directory, a checkpoint, an encoder in a local directory, or a hub id"
    parser.add_argument("source", metavar="SOURCE", help=about)
    kinds = ("cls", "mean", "max", "last", "pooler")
    about = "of a plain encoder, which says nothing of its pooling (default: cls, of a decoder last)"
    parser.add_argument("--pooling", choices=kinds, help=about)
    about = "the layers that are pooled, 0 being the embeddings (default: -1)"
    parser.add_argument("--layers", nargs="+", type=int, metavar="LAYER", help=about)


def corpus(parser: argparse.ArgumentParser, name: str = "corpus") -> None:
    """CORPUS or INPUT."""
    about = "a text, csv, tsv, jsonl or parquet file, a directory of them, a URL, a hub data set, or one of "
    parser.add_argument(name, metavar=name.upper(), help=about + ", ".join(sources.CORPORA))


def sample(parser: argparse.ArgumentParser, rows: int | None = None) -> None:
    """--sample."""
    about = f"number of rows of CORPUS, drawn uniformly (default: {rows or 'all'})"
    parser.add_argument("--sample", type=int, default=rows, metavar="N", help=about)


def columns(parser: argparse.ArgumentParser, about: str = "those with text") -> None:
    """--columns."""
    parser.add_argument("--columns", nargs="+", default=(), metavar="NAME", help=f"of a table: {about}")


def bf16(parser: argparse.ArgumentParser) -> None:
    """--bf16."""
    parser.add_argument("--bf16", action="store_true", help="the encoder computes in bfloat16: faster")


def whiten(parser: argparse.ArgumentParser) -> Any:
    """--whiten and --dim; returns the group of those that --whiten excludes."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--whiten", type=Path, metavar="FIT", help="a file of whitenedcse whiten fit")
    about = "components kept of the whitening (default: all)"
    parser.add_argument("--dim", type=int, metavar="K", help=about)
    return group


def form(parser: argparse.ArgumentParser) -> None:
    """--to, of a table that is printed."""
    parser.add_argument("--to", choices=FORMS, default="table", help="(default: table)")


def opened(arguments: argparse.Namespace) -> Any:
    """The embedder of SOURCE, on a GPU, if there is one."""
    import torch

    from whitenedcse.model.embedder import Embedder
    from whitenedcse.model.pooling import Pooling

    asked = None
    if arguments.pooling or arguments.layers:
        asked = Pooling(kind=arguments.pooling or "cls", layers=arguments.layers or [-1])
    return Embedder.load(arguments.source, asked).to("cuda" if torch.cuda.is_available() else "cpu")


def refuse_dim(arguments: argparse.Namespace, on: str | None = None) -> None:
    """Raise ValueError for components of no whitening."""
    if arguments.dim is not None and on is None and arguments.whiten is None:
        raise ValueError(
            f"--dim {arguments.dim} keeps components of a whitening, but none is asked for: --whiten FIT"
        )


def ended(arguments: argparse.Namespace, on: str | None = None) -> Any:
    """The embedder of SOURCE, ending with the whitening of --whiten or one fitted to the corpus `on`."""
    from whitenedcse.evaluation.postprocess import Postprocess
    from whitenedcse.serving.exports import fitted, whitened

    refuse_dim(arguments, on)
    k = arguments.dim
    fit = Postprocess.load(arguments.whiten) if arguments.whiten else None
    embedder = opened(arguments)
    if k is not None and not 1 <= k <= embedder.width:
        raise ValueError(f"{k} components of width {embedder.width}: 1 to {embedder.width} can be kept")
    if on is not None:
        fit, corpus = Postprocess("whitening"), sources.named(on, arguments.columns, arguments.sample)
        facts = fitted(fit, embedder, corpus, bf16=arguments.bf16)
        fit.provenance = {"source": arguments.source, **facts}
    return embedder if fit is None else whitened(embedder, fit, k)

"""`whitenedcse whiten fit` and `whitenedcse export`: parsers, and what they do."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from whitenedcse.data import sources

SOURCE = "a run directory, a checkpoint, an encoder in a local directory, or a hub id"
CORPUS = (
    "a text, csv, tsv, jsonl or parquet file, a directory of them, a hub data set, or one of "
    + ", ".join(sources.CORPORA)
)


def add(commands: Any) -> None:
    """The commands, added to those of `whitenedcse`."""
    about = "fit a whitening to an encoder's vectors of a corpus of any size"
    whiten = commands.add_parser("whiten", help=about, description=about)
    fit = whiten.add_subparsers(required=True, metavar="COMMAND", title="commands").add_parser(
        "fit", help=about, description=f"{about}; for --whiten of the other commands"
    )
    fit.add_argument("source", metavar="SOURCE", help=SOURCE)
    fit.add_argument("corpus", metavar="CORPUS", help=CORPUS)
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
    add_export(commands)


def add_export(commands: Any) -> None:
    """The parser of `whitenedcse export`."""
    about = "write an encoder, whitening folded in, for another library; its vectors are compared"
    parser = commands.add_parser("export", help=about, description=about)
    parser.add_argument("source", metavar="SOURCE", help=SOURCE)
    parser.add_argument("out", type=Path, metavar="OUT", help="the directory to write; replaced if an export")
    forms = ("transformers", "sentence-transformers", "onnx")
    parser.add_argument("--to", choices=forms, required=True, help=", ".join(forms))
    whitened = parser.add_mutually_exclusive_group()
    whitened.add_argument("--whiten", type=Path, metavar="FIT", help="a file of whitenedcse whiten fit")
    whitened.add_argument("--whiten-on", metavar="CORPUS", help="fit a whitening to this corpus first")
    parser.add_argument("--sample", type=int, metavar="N", help="so many rows of CORPUS (default: all)")
    parser.add_argument(
        "--dim", type=int, metavar="K", help="components kept of the whitening (default: all)"
    )
    unit = "end with unit length (default: as SOURCE does)"
    parser.add_argument("--unit", action=argparse.BooleanOptionalAction, help=unit)
    int8 = "int8 weights, for onnx: smaller, not faster; says what it costs on scored pairs"
    parser.add_argument("--int8", action="store_true", help=int8)
    parser.add_argument("--no-verify", action="store_true", help="do not compare the vectors with SOURCE's")
    parser.add_argument("--license", metavar="ID", help="of the weights, for the card (default: unknown)")
    parser.add_argument("--push", metavar="REPO", help="upload it to this repository of the hub")
    reading(parser)
    pooling(parser)
    parser.set_defaults(run=export)


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


def export(arguments: argparse.Namespace) -> int:
    """Write an export, say what was compared, and push it if asked."""
    from whitenedcse.export import directory
    from whitenedcse.export.whitened import scaled
    from whitenedcse.report.formats import say

    asked = {"to": arguments.to, "int8": arguments.int8, "verify": not arguments.no_verify}
    about = {"source": arguments.source, "name": arguments.push, "license": arguments.license}
    wanted = directory.Wanted(**asked, **about)
    directory.refuse(arguments.out, wanted)
    embedder = ended(arguments, arguments.whiten_on)
    if arguments.unit is not None:
        embedder = scaled(embedder, unit=arguments.unit)
    facts = directory.export(embedder, arguments.out, wanted)
    if arguments.int8:
        scores = "{pairs}: {spearman:.2f} in float32, {spearman_int8:.2f} in int8".format(**facts)
        say(f"Spearman x 100 on {scores}")
    compared = f"vectors differ by at most {facts['difference']:.1e}" if wanted.verify else "not verified"
    say(f"{arguments.out}: for {arguments.to}, {compared}")
    if arguments.push:
        say(f"pushed: {directory.push(arguments.out, arguments.push)}")
    return 0


def refuse_dim(arguments: argparse.Namespace, on: str | None = None) -> None:
    """Raise ValueError for components of no whitening."""
    if arguments.dim is not None and on is None and arguments.whiten is None:
        raise ValueError(
            f"--dim {arguments.dim} keeps components of a whitening, but none is asked for: --whiten FIT"
        )


def ended(arguments: argparse.Namespace, on: str | None = None) -> Any:
    """The embedder that the arguments name, ending with the whitening of --whiten or one fitted to `on`."""
    from whitenedcse.evaluation.postprocess import Postprocess
    from whitenedcse.export.whitened import fitted, whitened

    refuse_dim(arguments, on)
    k = arguments.dim
    fit = Postprocess.load(arguments.whiten) if arguments.whiten else None
    embedder = source(arguments)
    if k is not None and not 1 <= k <= embedder.width:
        raise ValueError(f"{k} components of width {embedder.width}: 1 to {embedder.width} can be kept")
    if on is not None:
        fit, corpus = Postprocess("whitening"), sources.named(on, arguments.columns, arguments.sample)
        facts = fitted(fit, embedder, corpus, bf16=arguments.bf16)
        fit.provenance = {"source": arguments.source, **facts}
    return embedder if fit is None else whitened(embedder, fit, k)

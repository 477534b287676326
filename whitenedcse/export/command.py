"""`whitenedcse whiten fit` and `whitenedcse export`: parsers, and what they do."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from whitenedcse import arguments as given
from whitenedcse.data import sources


def add(commands: Any) -> None:
    """The commands, added to those of `whitenedcse`."""
    about = "fit a whitening to an encoder's vectors of a corpus of any size"
    whiten = given.group(commands, "whiten", about)
    fit = whiten.add_parser("fit", help=about, description=f"{about}; for --whiten of the other commands")
    given.encoder(fit)
    given.corpus(fit)
    fit.add_argument("out", type=Path, metavar="OUT", help="the file to write, e.g. whitening.safetensors")
    kinds = ("whitening", "pca", "zca", "centre", "abtt")
    fit.add_argument("--kind", choices=kinds, default="whitening", help="(default: whitening)")
    fit.add_argument(
        "--shrinkage", type=float, default=0.0, help="towards a sphere, from 0 to 1; for few rows"
    )
    for add_more in (given.sample, given.columns, given.bf16):
        add_more(fit)
    fit.set_defaults(run=whiten_fit)
    add_export(commands)


def add_export(commands: Any) -> None:
    """The parser of `whitenedcse export`."""
    about = "write an encoder, whitening folded in, for another library; its vectors are compared"
    parser = commands.add_parser("export", help=about, description=about)
    given.encoder(parser)
    parser.add_argument("out", type=Path, metavar="OUT", help="the directory to write; replaced if an export")
    forms = ("transformers", "sentence-transformers", "onnx")
    parser.add_argument("--to", choices=forms, required=True, help="for which library")
    about = "fit a whitening to this corpus first"
    given.whiten(parser).add_argument("--whiten-on", metavar="CORPUS", help=about)
    for add_more in (given.sample, given.columns, given.bf16):
        add_more(parser)
    unit = "end with unit length (default: as SOURCE does)"
    parser.add_argument("--unit", action=argparse.BooleanOptionalAction, help=unit)
    int8 = "int8 weights, for onnx: smaller, not faster; says what it costs on scored pairs"
    parser.add_argument("--int8", action="store_true", help=int8)
    parser.add_argument("--no-verify", action="store_true", help="do not compare the vectors with SOURCE's")
    parser.add_argument("--license", metavar="ID", help="of the weights, for the card (default: unknown)")
    parser.add_argument("--push", metavar="REPO", help="upload it to this repository of the hub")
    parser.set_defaults(run=export)


def whiten_fit(arguments: argparse.Namespace) -> int:
    """Fit a map and write it."""
    from whitenedcse.evaluation.postprocess import Postprocess
    from whitenedcse.export.whitened import fitted
    from whitenedcse.report.formats import say

    fit = Postprocess(arguments.kind, shrinkage=arguments.shrinkage)
    corpus = sources.named(arguments.corpus, arguments.columns, arguments.sample)
    if not arguments.out.parent.is_dir():
        raise FileNotFoundError(f"{arguments.out.parent}: no such directory; make it first")
    facts = fitted(fit, given.opened(arguments), corpus, bf16=arguments.bf16)
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
    embedder = given.ended(arguments, arguments.whiten_on)
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

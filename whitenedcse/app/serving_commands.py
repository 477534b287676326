"""The commands for a trained encoder: `whitenedcse whiten fit`, `export`, `encode` and `demo`."""

from __future__ import annotations

import argparse
import os
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Any

from whitenedcse.app import arguments as given
from whitenedcse.console import interrupted, lacking, say
from whitenedcse.data import remote, sources
from whitenedcse.distributed import is_first, placed

REPLACED = "; it replaces an earlier one"
UNFITTED = {  # kinds that evaluate.py knows and whiten fit does not
    "prefix": "the first K numbers of a vector need no fit: whitenedcse evaluate postprocess=prefix k=K",
    "soft_zca": "it is zca with shrinkage; give --kind zca --shrinkage 0.1",
}


def add(commands: Any) -> None:
    """Add the commands to the parser of `whitenedcse`."""
    add_readout(commands)
    add_whiten(commands)
    add_export(commands)
    add_encode(commands)
    add_demo(commands)


def add_readout(commands: Any) -> None:
    """Add the parser of `whitenedcse readout`."""
    about = "find the layers, pooling and whitening that serve an encoder best, chosen on scored pairs"
    parser = commands.add_parser("readout", help=about, description=f"{about}; nothing is trained")
    given.encoder(parser)
    given.corpus(parser)
    pairs = "scored pairs, 200 or more: a table with the columns sentence1, sentence2, score; or STS-B/dev"
    parser.add_argument("--pairs", metavar="PAIRS", help=pairs)
    out = "a folder for the encoder with its best readout, all scores and a picture (default: only tables)"
    parser.add_argument("--out", type=Path, metavar="DIR", help=out)
    given.sample(parser, 20_000)
    given.columns(parser)
    parser.set_defaults(run=readout)


def readout(arguments: argparse.Namespace) -> int:
    """Print what is known of the readouts of an encoder; write the one that the pairs choose."""
    from whitenedcse.serving import readout

    out, more = arguments.out, {"sample": arguments.sample, "columns": arguments.columns}
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    found = readout.readout(given.opened(arguments), arguments.corpus, arguments.pairs, **more)
    for grid in readout.grids(found):
        say(grid)
    if out is not None and (files := readout.write(found, out)):
        say(f"written: {', '.join(map(str, files))}")
        if (model := out / "model") in files:
            say(f"next: whitenedcse export {quote(str(model))} EXPORT --to sentence-transformers")
            say(f"      whitenedcse evaluate model={quote(str(model))}")
    return 0


def add_whiten(commands: Any) -> None:
    """Add the parser of `whitenedcse whiten fit`."""
    about = "fit a whitening to the vectors that an encoder gives for a corpus of any size"
    whiten = given.group(commands, "whiten", about)
    fit = whiten.add_parser("fit", help=about, description=f"{about}; other commands read it with --whiten")
    given.encoder(fit)
    given.corpus(fit)
    fit.add_argument("out", metavar="OUT", help="the file to write, e.g. whitening.safetensors")
    about = "whitening (the default), pca, zca, pca_cor, zca_cor, standardise, centre or abtt"
    fit.add_argument("--kind", default="whitening", help=about)
    about = "pull variances towards their mean, from 0 (the default) to below 1, where there are few rows"
    fit.add_argument("--shrinkage", type=float, default=0.0, help=about)
    about = "0.5 (the default) whitens, less whitens in part, and 0 not at all; 0 to 1"
    fit.add_argument("--power", type=float, default=0.5, help=about)
    for add_more in (given.sample, given.columns, given.bf16):
        add_more(fit)
    fit.set_defaults(run=whiten_fit)


def add_export(commands: Any) -> None:
    """Add the parser of `whitenedcse export`."""
    about = "write an encoder and its whitening for another library, and check that its vectors agree"
    parser = commands.add_parser("export", help=about, description=about)
    given.encoder(parser)
    parser.add_argument("out", metavar="OUT", help="the directory to write; it may hold an earlier export")
    forms = ("transformers", "sentence-transformers", "onnx")
    parser.add_argument("--to", choices=forms, required=True, help="the library to write for")
    about = "fit a whitening to this corpus and include it"
    given.whiten(parser).add_argument("--whiten-on", metavar="CORPUS", help=about)
    for add_more in (given.sample, given.columns, given.bf16):
        add_more(parser)
    unit = "scale vectors to unit length at the end (default: as SOURCE does)"
    parser.add_argument("--unit", action=argparse.BooleanOptionalAction, help=unit)
    parser.add_argument("--no-verify", action="store_true", help="do not compare the vectors with SOURCE's")
    parser.add_argument("--license", metavar="ID", help="licence of the weights (default: unknown)")
    parser.add_argument("--push", metavar="REPO", help="upload the export to this hub repository")
    parser.set_defaults(run=export)


def whiten_fit(arguments: argparse.Namespace) -> int:
    """Fit a whitening transform, by one process or several ranks, and write it."""
    from whitenedcse.evaluation.postprocess import Postprocess
    from whitenedcse.serving.encode import take_device
    from whitenedcse.serving.fit import fitted

    if arguments.kind in UNFITTED:
        raise ValueError(f"--kind {arguments.kind}: {UNFITTED[arguments.kind]}")
    fit = Postprocess(arguments.kind, shrinkage=arguments.shrinkage, power=arguments.power)
    corpus = sources.named(arguments.corpus, arguments.columns, arguments.sample)
    before = remote.present(arguments.out)
    if before is not None or not remote.is_url(arguments.out):
        check_fit_place(before or Path(arguments.out))
    take_device(here.local if (here := placed()) else 0)
    facts = fitted(fit, given.opened(arguments), corpus, bf16=arguments.bf16)
    if is_first():
        fit.save(arguments.out, {"source": arguments.source, **facts})
        where = f"{arguments.out}{REPLACED * (before is not None)}"
        say(f"{fit.kind} of width {len(fit.mean)}, fitted to {facts['texts']:,} texts: {where}")
    return 0


def check_fit_place(out: Path) -> None:
    """Raise OSError for a path where no fit can be written, or with another file, before hours of work."""
    from whitenedcse.evaluation.postprocess import Postprocess

    if not out.parent.is_dir():
        raise FileNotFoundError(f"{out.parent}: no such directory; make it first")
    if out.is_file():
        try:
            Postprocess.load(out)
        except ValueError as error:
            raise FileExistsError(f"{out} is a file, but no earlier fit; choose another name") from error
    if out.is_dir():
        raise IsADirectoryError(
            f"{out} is a directory; name a file in it, as {out / 'whitening.safetensors'}"
        )
    if not os.access(out.parent, os.W_OK):
        raise PermissionError(f"{out.parent} cannot be written to; name another place")


def export(arguments: argparse.Namespace) -> int:
    """Write an export, print the result of its verification, and upload it if that is asked for."""
    from whitenedcse.model.checkpoint import EXPORT
    from whitenedcse.serving import export
    from whitenedcse.serving.fit import scaled

    verify, about = not arguments.no_verify, export.About(arguments.source, arguments.push, arguments.license)
    before = remote.present(f"{arguments.out.rstrip('/')}/{EXPORT}")
    with remote.published(arguments.out, mark=EXPORT) as out:
        export.check_target(out, arguments.to, verify)
        if arguments.to == "transformers" and (arguments.whiten or arguments.whiten_on):
            raise ValueError(export.PLAIN)  # before a whitening is fitted
        embedder = given.ended(arguments, arguments.whiten_on)
        if arguments.unit is not None:
            embedder = scaled(embedder, unit=arguments.unit)
        facts = export.export(embedder, out, arguments.to, verify=verify, about=about)
        pushed = export.push(out, arguments.push) if arguments.push else None
    compared = "not verified"
    if verify:
        most = f"{facts['difference']:.1e}, of vectors longer than 1 by this share of their length"
        compared = f"components differ by at most {most}"
    say(f"{arguments.out}: for {arguments.to}, {compared}{REPLACED * (before is not None)}")
    if pushed:
        say(f"pushed: {pushed}")
    return 0


def add_encode(commands: Any) -> None:
    """Add the parser of `whitenedcse encode`."""
    about = "encode a corpus of any size into files of vectors"
    more = "Row i of the files is for row i of INPUT. After an interruption, the same command resumes."
    parser = commands.add_parser("encode", help=about, description=f"{about}. {more}")
    given.encoder(parser)
    given.corpus(parser, "input")
    parser.add_argument("out", metavar="OUT", help="the directory to write")
    given.whiten(parser)
    types = ("float32", "float16")
    about = "the type of the numbers (default: float32)"
    parser.add_argument("--dtype", choices=types, default=types[0], help=about)
    about = "the format of the files (default: npy)"
    parser.add_argument("--to", choices=("npy", "parquet"), default="npy", help=about)
    about = "rows per file (default: 20,000); an interruption loses what is encoded of one file per process"
    parser.add_argument("--shard", type=int, default=20_000, metavar="N", help=about)
    about = "the number of processes that share the work (default: one per GPU, or one)"
    parser.add_argument("--processes", type=int, metavar="P", help=about)
    parser.add_argument("--engine", choices=("ray",), help="use a Ray cluster; all of it must see OUT")
    given.columns(parser, given.ONE_COLUMN)
    given.bf16(parser)
    parser.set_defaults(run=encode)


def encode(arguments: argparse.Namespace) -> int:
    """Write the vectors, and print where they are."""
    from whitenedcse.serving.encode import Form, Job, encoded, state

    given.check_dim(arguments)
    sources.check_columns(arguments.input, arguments.columns)
    form, out = Form(arguments.to, arguments.dtype, arguments.shard), arguments.out
    corpus = sources.named(arguments.input, arguments.columns)
    job = Job(partial(given.ended, arguments), arguments.source, corpus, out, form, arguments.bf16)
    with interrupted(lambda: f"{state(out)}, and the same command resumes" if is_first() else ""):
        encoded(job, arguments.processes, arguments.engine)
    if is_first():
        say(f"{state(out)}: {out}")
    return 0


def add_demo(commands: Any) -> None:
    """Add the parser of `whitenedcse demo`."""
    about = "serve a web page to try an encoder: search, similarity, and a slider for whitening-k"
    more = "It needs `pip install 'whitenedcse[demo]'`."
    demo = commands.add_parser("demo", help=about, description=f"{about}. {more}")
    given.encoder(demo)
    given.corpus(demo)
    given.columns(demo)
    given.sample(demo, 10_000)
    demo.add_argument("--port", type=int, metavar="PORT", help="(default: the first free one from 7860)")
    demo.set_defaults(run=demonstrate)


def demonstrate(arguments: argparse.Namespace) -> int:
    """Encode the sentences, and serve the page until Ctrl-C."""
    os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")  # read by its import: nothing leaves here
    try:
        from whitenedcse.serving.demo import Trial, page, serve
    except ImportError as error:
        raise lacking("the page", "gradio", "demo", error) from error
    from whitenedcse.data.corpus import texts

    corpus = sources.named(arguments.corpus, arguments.columns, arguments.sample)
    if len(sentences := list(dict.fromkeys(texts(corpus)))) < 3:
        few = f"{arguments.corpus} has {len(sentences)} different sentences"
        raise ValueError(f"{few}; the page whitens them, for which it needs three or more")
    trial = Trial(given.opened(arguments), sentences)
    serve(page(trial, f"{arguments.source} on {arguments.corpus}"), arguments.port)
    return 0

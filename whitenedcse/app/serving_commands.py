"""The commands for a trained encoder: `whitenedcse whiten fit`, `export`, `search`, `encode` and `demo`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from whitenedcse.app import arguments as given
from whitenedcse.app.durable import beside
from whitenedcse.app.ranks import first
from whitenedcse.app.terminal import Grid, say, show
from whitenedcse.data import sources


def add(commands: Any) -> None:
    """Add the commands to the parser of `whitenedcse`."""
    add_whiten(commands)
    add_export(commands)
    add_search(commands)
    add_encode(commands)
    add_demo(commands)


def add_whiten(commands: Any) -> None:
    """Add the parser of `whitenedcse whiten fit`."""
    about = "fit a whitening to an encoder's vectors of a corpus of any size"
    whiten = given.group(commands, "whiten", about)
    fit = whiten.add_parser("fit", help=about, description=f"{about}; for --whiten of the other commands")
    given.encoder(fit)
    given.corpus(fit)
    fit.add_argument("out", type=Path, metavar="OUT", help="the file to write, e.g. whitening.safetensors")
    about = "whitening (the default), pca, zca, pca_cor, zca_cor, cholesky, standardise, centre or abtt"
    fit.add_argument("--kind", default="whitening", help=about)
    fit.add_argument("--shrinkage", type=float, default=0.0, help="towards a sphere, 0 to 1; for few rows")
    fit.add_argument("--power", type=float, default=0.5, help="0 to 1; 0.5 whitens (the default)")
    for add_more in (given.sample, given.columns, given.bf16):
        add_more(fit)
    fit.set_defaults(run=whiten_fit)


def add_export(commands: Any) -> None:
    """Add the parser of `whitenedcse export`."""
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
    """Fit a whitening transform and write it."""
    from whitenedcse.evaluation.postprocess import Postprocess
    from whitenedcse.serving.fitting import fitted

    fit = Postprocess(arguments.kind, shrinkage=arguments.shrinkage, power=arguments.power)
    corpus = sources.named(arguments.corpus, arguments.columns, arguments.sample)
    if not arguments.out.parent.is_dir():
        raise FileNotFoundError(f"{arguments.out.parent}: no such directory; make it first")
    asked = {"bf16": arguments.bf16, "folder": beside(arguments.out, "ranks")}
    if facts := fitted(fit, given.opened(arguments), corpus, **asked):
        fit.save(arguments.out, {"source": arguments.source, **facts})
        say(f"{fit.kind} of width {len(fit.mean)}, fitted to {facts['texts']:,} texts: {arguments.out}")
    return 0


def export(arguments: argparse.Namespace) -> int:
    """Write an export, print the result of its verification, and upload it if asked."""
    from whitenedcse.serving import exports

    asked = {"to": arguments.to, "int8": arguments.int8, "verify": not arguments.no_verify}
    about = {"source": arguments.source, "name": arguments.push, "license": arguments.license}
    wanted = exports.Wanted(**asked, **about)
    exports.refuse(arguments.out, wanted)
    embedder = given.ended(arguments, arguments.whiten_on)
    if arguments.unit is not None:
        embedder = exports.scaled(embedder, unit=arguments.unit)
    facts = exports.export(embedder, arguments.out, wanted)
    if arguments.int8:
        scores = "{pairs}: {spearman:.2f} in float32, {spearman_int8:.2f} in int8"
        say("Spearman x 100 (all) on " + scores.format(**facts))
    compared = f"vectors differ by at most {facts['difference']:.1e}" if wanted.verify else "not verified"
    say(f"{arguments.out}: for {arguments.to}, {compared}")
    if arguments.push:
        say(f"pushed: {exports.push(arguments.out, arguments.push)}")
    return 0


def add_search(commands: Any) -> None:
    """Add the parsers of `whitenedcse search`."""
    search = given.group(commands, "search", "find the texts of a corpus nearest to a query")
    for add_one in (_build, _extend, _query, _bench):
        add_one(search)


def _build(commands: Any) -> None:
    about = "make an index of a corpus of any size"
    parser = commands.add_parser("build", help=about, description=about)
    given.encoder(parser)
    given.corpus(parser)
    parser.add_argument("index", type=Path, metavar="INDEX", help="the directory to write")
    about = "a text put before each query (default: SOURCE's own, or --prompt)"
    parser.add_argument("--query-prompt", metavar="TEXT", help=about)
    about = "whitening-k fitted to the corpus itself, which is encoded twice"
    given.whiten(parser).add_argument("--whiten-k", type=int, metavar="K", help=about)
    given.sample(parser)
    _reading(parser)
    parser.set_defaults(run=build)


def _extend(commands: Any) -> None:
    about = "add a corpus to an index"
    parser = commands.add_parser("add", help=about, description=about)
    parser.add_argument("index", type=Path, metavar="INDEX")
    given.corpus(parser)
    parser.set_defaults(run=extend, sample=None)
    _reading(parser)


def _query(commands: Any) -> None:
    about = "print the texts nearest to a query, found by exact search"
    parser = commands.add_parser("query", help=about, description=about)
    parser.add_argument("index", type=Path, metavar="INDEX")
    parser.add_argument("text", nargs="?", metavar="TEXT", help="the query")
    parser.add_argument("--file", metavar="QUERIES", help="a file of queries, or any other corpus")
    given.columns(parser, "its queries")
    parser.add_argument("--top", type=int, default=10, metavar="N", help="texts for a query (default: 10)")
    given.form(parser)
    parser.set_defaults(run=query)


def _bench(commands: Any) -> None:
    about = "measure what whitening-k saves and loses: size, time and recall@10 for several k"
    parser = commands.add_parser("bench", help=about, description=about)
    parser.add_argument("index", type=Path, metavar="INDEX")
    about = "(default: 256 128 64 32, those below the width)"
    parser.add_argument("--dims", type=int, nargs="+", default=(), metavar="K", help=about)
    given.form(parser)
    parser.set_defaults(run=measure)


def _reading(parser: argparse.ArgumentParser) -> None:
    given.columns(parser)
    given.bf16(parser)
    about = "of a table: the column with ids (default: the number of the text, from 0)"
    parser.add_argument("--ids", metavar="NAME", help=about)


def build(arguments: argparse.Namespace) -> int:
    """Write an index, and print what it holds."""
    from whitenedcse.serving import index, index_files

    index_files.refuse_occupied(arguments.index)
    pairs = _pairs(arguments, 0)
    if arguments.whiten_k is not None and arguments.dim is not None:
        raise ValueError(f"--dim {arguments.dim} goes with --whiten FIT; with --whiten-k K, K is enough")
    arguments.dim = arguments.dim or arguments.whiten_k
    embedder = given.ended(arguments, None if arguments.whiten_k is None else arguments.corpus)
    index.write(arguments.index, embedder, pairs, bf16=arguments.bf16)
    content = index_files.listed(arguments.index)
    say(f"{content['parts'][0]['n']:,} texts, vectors of width {content['width']}: {arguments.index}")
    return 0


def extend(arguments: argparse.Namespace) -> int:
    """Append to an index, and print how many texts it held and holds."""
    from whitenedcse.serving import index, index_files

    held = index.Index.load(arguments.index)
    more = index.encoded(held.embedder, _pairs(arguments, len(held)), bf16=arguments.bf16)
    index_files.append(arguments.index, len(held), more)
    n = index_files.listed(arguments.index)["parts"][-1]["n"]
    say(f"{len(held):,} texts and {n:,} more: {arguments.index}")
    return 0


def _pairs(arguments: argparse.Namespace, start: int) -> Iterator[tuple[str, str]]:
    """The ids and texts of the corpus."""
    from whitenedcse.serving.index import labelled

    if arguments.ids and not arguments.columns:
        raise ValueError(f"--ids {arguments.ids} goes with --columns, which name the texts")
    columns = [*arguments.columns, *([arguments.ids] if arguments.ids else [])]
    corpus = sources.named(arguments.corpus, columns, arguments.sample)
    return labelled(corpus, start, ids=bool(arguments.ids))


def query(arguments: argparse.Namespace) -> int:
    """Print the texts nearest to a query, or to each query of a file."""
    from whitenedcse.data.corpus import texts
    from whitenedcse.serving.index import Index

    if (arguments.text is None) == (arguments.file is None):
        raise ValueError("one query is a TEXT, several are a --file: give one of the two")
    if arguments.top < 1:
        raise ValueError(f"--top {arguments.top}: 1 or more")
    named = arguments.file is not None
    asked = list(texts(sources.named(arguments.file, arguments.columns))) if named else [arguments.text]
    answers = Index.load(arguments.index).query(asked, arguments.top)
    rows = [
        [text, str(rank), f"{hit.cosine:.4f}", hit.id, hit.text]
        for text, hits in zip(asked, answers, strict=True)
        for rank, hit in enumerate(hits, 1)
    ]
    if arguments.to == "table":  # control characters of a text do not reach the terminal
        rows = [["".join(c if c.isprintable() else " " for c in cell) for cell in row] for row in rows]
    columns = ("query", "rank", "cosine", "id", "text")
    show([Grid(f"The nearest texts in {arguments.index}", columns, rows, right=(1, 2))], arguments.to)
    return 0


def measure(arguments: argparse.Namespace) -> int:
    """Print the table of `bench`."""
    from whitenedcse.serving.benchmarks import bench
    from whitenedcse.serving.index import Index

    show([bench(Index.load(arguments.index), dims=arguments.dims)], arguments.to)
    return 0


def add_encode(commands: Any) -> None:
    """Add the parser of `whitenedcse encode`."""
    about = "encode a corpus of any size into files of vectors"
    more = "Row i of the files is row i of the input. The same command again resumes after a kill."
    parser = commands.add_parser("encode", help=about, description=f"{about}. {more}")
    given.encoder(parser)
    given.corpus(parser, "input")
    parser.add_argument("out", type=Path, metavar="OUT", help="the directory to write")
    given.whiten(parser)
    types = ("float32", "float16")
    parser.add_argument("--dtype", choices=types, default=types[0], help="(default: float32)")
    parser.add_argument("--to", choices=("npy", "parquet"), default="npy", help="(default: npy)")
    parser.add_argument("--shard", type=int, default=20_000, metavar="N", help="rows a file (20,000)")
    about = "processes that share the work (default: one a GPU, or one)"
    parser.add_argument("--processes", type=int, metavar="P", help=about)
    parser.add_argument("--engine", choices=("ray",), help="processes of a Ray cluster that all see OUT")
    given.columns(parser)
    given.bf16(parser)
    parser.set_defaults(run=encode)


def encode(arguments: argparse.Namespace) -> int:
    """Write the vectors, and print where they are."""
    from whitenedcse.serving.bulk import Job, encoded
    from whitenedcse.serving.layouts import Form
    from whitenedcse.serving.shards import begun

    given.refuse_dim(arguments)
    form = Form(arguments.to, arguments.dtype, arguments.shard)
    corpus = sources.named(arguments.input, arguments.columns)
    job = Job(partial(given.ended, arguments), arguments.source, corpus, arguments.out, form, arguments.bf16)
    new = encoded(job, arguments.processes, arguments.engine)
    if first() and (manifest := begun(arguments.out)):
        here = f"; {manifest.rows - new:,} were encoded before" if new < manifest.rows else ""
        say(f"{manifest.rows:,} rows of width {manifest.width}: {arguments.out}{here}")
    return 0


def add_demo(commands: Any) -> None:
    """Add the parser of `whitenedcse demo`."""
    about = "a page on this machine to try an encoder: search, similarity, and a slider for whitening-k"
    more = "Needs pip install 'whitenedcse[demo]'."
    demo = commands.add_parser("demo", help=about, description=f"{about}. {more}")
    given.encoder(demo)
    given.corpus(demo)
    given.columns(demo)
    given.sample(demo, 10_000)
    demo.add_argument("--port", type=int, metavar="PORT", help="(default: a free one from 7860 on)")
    demo.set_defaults(run=demonstrate)


def demonstrate(arguments: argparse.Namespace) -> int:
    """Encode the sentences, and serve the page until Ctrl-C."""
    os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")  # read by its import: nothing leaves here
    try:
        from whitenedcse.serving.demo import Trial, page, serve
    except ImportError as error:
        raise ValueError(f"the page needs Gradio ({error}); pip install 'whitenedcse[demo]'") from error
    from whitenedcse.data.corpus import texts

    corpus = sources.named(arguments.corpus, arguments.columns, arguments.sample)
    trial = Trial(given.opened(arguments), list(dict.fromkeys(texts(corpus))))
    serve(page(trial, f"{arguments.source} on {arguments.corpus}"), arguments.port)
    return 0

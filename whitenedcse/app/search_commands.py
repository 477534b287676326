"""The commands of `whitenedcse search`: build, add, query."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from whitenedcse import distributed
from whitenedcse.app import arguments as given
from whitenedcse.console import Grid, say, show
from whitenedcse.data import remote, sources
from whitenedcse.data.corpus import Corpus


def add(commands: Any) -> None:
    """Add the parser of `whitenedcse search`."""
    search = given.group(commands, "search", "find the texts of a corpus that are nearest to a query")
    for add_one in (_build, _extend, _query):
        add_one(search)


def _build(commands: Any) -> None:
    about = "make an index of a corpus of any size"
    parser = commands.add_parser("build", help=about, description=about)
    given.encoder(parser)
    given.corpus(parser)
    parser.add_argument("index", metavar="INDEX", help="the directory to write")
    about = "a text put before each query (default: SOURCE's prompt for queries, or --prompt)"
    parser.add_argument("--query-prompt", metavar="TEXT", help=about)
    about = "keep K components of a whitening fitted to the corpus itself"
    given.whiten(parser).add_argument("--whiten-k", type=int, metavar="K", help=about)
    about = "a FAISS index, e.g. IVF1024,SQ8, HNSW32 or PQ48,RFlat (default: Flat, which compares all)"
    parser.add_argument("--factory", default="Flat", metavar="F", help=about)
    about = "use the vectors that `whitenedcse encode SOURCE CORPUS DIR` wrote, without --whiten"
    parser.add_argument("--vectors", metavar="DIR", help=about)
    _reading(parser)
    parser.set_defaults(run=build)


def _extend(commands: Any) -> None:
    about = "add a corpus to an index"
    parser = commands.add_parser("add", help=about, description=about)
    parser.add_argument("index", metavar="INDEX", help="the directory of the index")
    given.corpus(parser)
    parser.set_defaults(run=extend)
    _reading(parser)


def _query(commands: Any) -> None:
    about = "print the texts nearest to a query"
    parser = commands.add_parser("query", help=about, description=about)
    parser.add_argument("index", metavar="INDEX", help="the directory of the index")
    parser.add_argument("text", nargs="?", metavar="TEXT", help="the query")
    parser.add_argument("--file", metavar="QUERIES", help="a file of queries, or any other corpus")
    given.columns(parser, "the column of a table that holds the queries")
    parser.add_argument("--top", type=int, default=10, metavar="N", help="texts per query (default: 10)")
    given.form(parser)
    parser.set_defaults(run=query)


def _reading(parser: argparse.ArgumentParser) -> None:
    given.columns(parser, given.ONE_COLUMN)
    given.bf16(parser)
    about = "the column of a table that holds ids, each once (default: the number of each row, from 0)"
    parser.add_argument("--ids", metavar="NAME", help=about)


def build(arguments: argparse.Namespace) -> int:
    """Write an index, and print what it holds."""
    from whitenedcse.evaluation.postprocess import Postprocess
    from whitenedcse.serving.search import Building, build

    distributed.check_alone("search build")  # the ranks of `whitenedcse encode` write what --vectors takes
    given.check_dim(arguments)
    fit = Postprocess.load(arguments.whiten) if arguments.whiten else None
    k = arguments.dim if fit else arguments.whiten_k
    prompts, arguments.prompt = (arguments.prompt, arguments.query_prompt), None  # of which it knows two
    how = Building(
        bool(arguments.ids), *prompts, arguments.factory, fit, k, arguments.vectors, arguments.bf16
    )
    with remote.published(arguments.index, mark=None) as out:
        n, width = build(out, given.opened(arguments), _corpus(arguments), how)
    say(f"{n:,} texts, vectors of width {width}: {arguments.index}")
    return 0


def extend(arguments: argparse.Namespace) -> int:
    """Append to an index, and print how many texts it held and holds."""
    from whitenedcse.serving.search import extend

    if remote.is_url(arguments.index):
        raise ValueError(f"{arguments.index}: an index in a store is not added to; build it anew")
    asked = {"ids": bool(arguments.ids), "bf16": arguments.bf16}
    before, more = extend(Path(arguments.index), _corpus(arguments), **asked)
    say(f"{before:,} texts and {more:,} more: {arguments.index}")
    return 0


def _corpus(arguments: argparse.Namespace) -> Corpus:
    """The corpus with its column of texts, and then that of ids if there is one."""
    sources.check_columns(arguments.corpus, arguments.columns)
    if arguments.ids and not arguments.columns:
        raise ValueError(f"--ids {arguments.ids} goes with --columns, which name the texts")
    return sources.named(arguments.corpus, [*arguments.columns, *([arguments.ids] if arguments.ids else [])])


def query(arguments: argparse.Namespace) -> int:
    """Print the texts nearest to a query, or to each row of a file, which its number then names."""
    from whitenedcse.data.corpus import rows
    from whitenedcse.serving.search import Index

    if (arguments.text is None) == (arguments.file is None):
        raise ValueError("one query is a TEXT, several are a --file: give one of the two")
    if arguments.text is not None and not arguments.text.strip():
        raise ValueError(f"TEXT {arguments.text!r} is blank: give the words to look for")
    asked = [arguments.text]
    if arguments.file is not None:
        sources.check_columns(arguments.file, arguments.columns)
        asked = [text for (text,) in rows(sources.named(arguments.file, arguments.columns))]
    answers = Index.load(arguments.index).query(asked, arguments.top)
    cells = [
        [str(number), str(rank), f"{hit.cosine:.4f}", hit.id, hit.text]
        for number, hits in enumerate(answers)
        for rank, hit in enumerate(hits, 1)
    ]
    if arguments.to == "table":  # control characters of a text do not reach the terminal
        cells = [["".join(c if c.isprintable() else " " for c in cell) for cell in row] for row in cells]
    left = int(arguments.file is None)  # no number for a single query
    columns, cells = ("query", "rank", "cosine", "id", "text")[left:], [row[left:] for row in cells]
    title = f"The nearest texts in {arguments.index}"
    show([Grid(title, columns, cells, right=range(3 - left))], arguments.to)
    return 0

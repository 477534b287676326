"""The commands of `whitenedcse search`: build, add, query, verify, bench."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from whitenedcse.app import arguments as given
from whitenedcse.console import Grid, say, show
from whitenedcse.data import remote, sources


def add(commands: Any) -> None:
    """Add the parser of `whitenedcse search`."""
    search = given.group(commands, "search", "find the texts of a corpus that are nearest to a query")
    for add_one in (_build, _extend, _query, _verify, _bench):
        add_one(search)


def _build(commands: Any) -> None:
    about = "make an index of a corpus of any size"
    parser = commands.add_parser("build", help=about, description=about)
    given.encoder(parser)
    given.corpus(parser)
    parser.add_argument("index", metavar="INDEX", help="the directory to write")
    about = "a text put before each query (default: SOURCE's prompt for queries, or --prompt)"
    parser.add_argument("--query-prompt", metavar="TEXT", help=about)
    about = "keep K components of a whitening fitted to the corpus itself, which is then encoded twice"
    given.whiten(parser).add_argument("--whiten-k", type=int, metavar="K", help=about)
    about = "a FAISS index to propose the texts, e.g. IVF1024,PQ48 or HNSW32 (default: exact search)"
    parser.add_argument("--factory", metavar="F", help=about)
    about = "use the vectors that `whitenedcse encode SOURCE CORPUS DIR` wrote, with the same options"
    parser.add_argument("--vectors", metavar="DIR", help=about)
    given.sample(parser)
    _reading(parser)
    parser.set_defaults(run=build)


def _extend(commands: Any) -> None:
    about = "add a corpus to an index"
    parser = commands.add_parser("add", help=about, description=about)
    parser.add_argument("index", metavar="INDEX", help="the directory of the index")
    given.corpus(parser)
    parser.set_defaults(run=extend, sample=None)
    _reading(parser)


def _query(commands: Any) -> None:
    about = "print the texts nearest to a query"
    parser = commands.add_parser("query", help=about, description=about)
    parser.add_argument("index", metavar="INDEX", help="the directory of the index")
    parser.add_argument("text", nargs="?", metavar="TEXT", help="the query")
    parser.add_argument("--file", metavar="QUERIES", help="a file of queries, or any other corpus")
    given.columns(parser, "the column of a table that holds the queries")
    parser.add_argument("--top", type=int, default=10, metavar="N", help="texts per query (default: 10)")
    about = "compare every text with the query, even if the index was built with --factory"
    parser.add_argument("--exact", action="store_true", help=about)
    given.form(parser)
    parser.set_defaults(run=query)


def _verify(commands: Any) -> None:
    about = "compare all bytes of an index with their digests, not only each block when it is first read"
    parser = commands.add_parser("verify", help=about, description=about)
    parser.add_argument("index", metavar="INDEX", help="the directory of the index")
    parser.set_defaults(run=verify)


def _bench(commands: Any) -> None:
    about = "measure what whitening-k and FAISS indices save (size, time) and lose (recall@10)"
    parser = commands.add_parser("bench", help=about, description=about)
    parser.add_argument("index", metavar="INDEX", help="the directory of the index")
    about = "numbers of components (default: those of 256 128 64 32 below the width)"
    parser.add_argument("--dims", type=int, nargs="+", default=(), metavar="K", help=about)
    about = "FAISS indices beside exact search, e.g. SQ8 IVF1024,PQ48; all: those usual for so many texts"
    parser.add_argument("--factory", nargs="+", default=(), metavar="F", help=about)
    parser.add_argument("--rows", type=int, metavar="N", help="measure with N of the texts (default: all)")
    about = "also measure the first K channels as they are, for an encoder trained with loss=matryoshka"
    parser.add_argument("--prefix", action="store_true", help=about)
    about = "draw recall against bytes per vector, to a .png or .svg file"
    parser.add_argument("--picture", type=Path, metavar="FILE", help=about)
    given.form(parser)
    parser.set_defaults(run=measure)


def _reading(parser: argparse.ArgumentParser) -> None:
    given.columns(parser, given.ONE_COLUMN)
    given.bf16(parser)
    about = "the column of a table that holds ids (default: the number of each text, from 0)"
    parser.add_argument("--ids", metavar="NAME", help=about)


def build(arguments: argparse.Namespace) -> int:
    """Write an index, and print what it holds."""
    from whitenedcse.serving import index, index_files

    with remote.published(arguments.index, mark=None) as out:
        index_files.refuse_occupied(out)
        sources.refuse_columns(arguments.corpus, arguments.columns)
        _refuse_build(arguments)
        pairs = _pairs(arguments, 0)
        arguments.dim = arguments.dim or arguments.whiten_k
        embedder = given.ended(arguments, None if arguments.whiten_k is None else arguments.corpus)
        if arguments.vectors is None:
            index.write(out, embedder, pairs, bf16=arguments.bf16, factory=arguments.factory)
        else:
            index.write_encoded(out, embedder, _encoded(arguments, embedder), arguments.factory)
        part, width = index_files.listed(out)["parts"][0], embedder.width
    drawn = f", drawn by --sample {arguments.sample}" * (arguments.sample is not None)
    say(f"{part['n']:,} texts{drawn}, vectors of width {width}: {arguments.index}")
    return 0


def _refuse_build(arguments: argparse.Namespace) -> None:
    """Raise ValueError for options of `build` that do not go together, before anything is encoded."""
    k = arguments.whiten_k
    if k is not None and arguments.dim is not None:
        raise ValueError(f"--dim {arguments.dim} goes with --whiten FIT; with --whiten-k K, K is enough")
    if arguments.vectors is None:
        return
    if k is not None:
        raise ValueError(
            f"--whiten-k {k} fits a whitening, and --vectors were encoded without it: use whitenedcse whiten"
            f" fit, then encode and build with --whiten FIT --dim {k}; or leave --vectors out"
        )
    if arguments.sample is not None:
        raise ValueError(f"--sample {arguments.sample}: --vectors hold all rows; leave one of the two out")


def _encoded(arguments: argparse.Namespace, embedder: Any) -> Any:
    """The vectors of --vectors with their texts, if encoding the corpus now would give the same vectors."""
    from whitenedcse.serving.index import gathered

    plain = given.ended(
        argparse.Namespace(**{k: v for k, v in vars(arguments).items() if k != "query_prompt"})
    )
    if plain.prompt != embedder.prompt:
        raise ValueError(
            f"{arguments.vectors} was encoded with the prompt {plain.prompt!r}, but the texts of this index "
            f"need {embedder.prompt!r}; encode with --prompt {embedder.prompt!r}"
        )
    columns = [*arguments.columns, *([arguments.ids] if arguments.ids else [])]
    corpus = sources.named(arguments.corpus, columns)
    return gathered(plain, corpus, remote.fetched(arguments.vectors), ids=bool(arguments.ids))


def extend(arguments: argparse.Namespace) -> int:
    """Append to an index, and print how many texts it held and holds."""
    from whitenedcse.serving import index, index_files

    index_files.refuse_url(arguments.index)
    sources.refuse_columns(arguments.corpus, arguments.columns)
    held = index.Index.load(arguments.index)
    held.refuse_numbers(bool(arguments.ids))
    more = index.encoded(held.embedder, _pairs(arguments, len(held)), bf16=arguments.bf16)
    index_files.append(Path(arguments.index), len(held), more)
    n = index_files.listed(Path(arguments.index))["parts"][-1]["n"]
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
    if arguments.text is not None and not arguments.text.strip():
        raise ValueError(f"TEXT {arguments.text!r} is blank: give the words to look for")
    asked = [arguments.text]
    if arguments.file is not None:
        sources.refuse_columns(arguments.file, arguments.columns)
        asked = list(texts(sources.named(arguments.file, arguments.columns)))
    answers = Index.load(arguments.index).query(asked, arguments.top, exact=arguments.exact)
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


def verify(arguments: argparse.Namespace) -> int:
    """Compare all bytes of an index, and print how many."""
    from whitenedcse.serving.index_files import verify

    n, size = verify(remote.fetched(arguments.index))
    say(f"{n:,} texts, {size / 1e6:,.1f} MB as they were written: {arguments.index}")
    return 0


def measure(arguments: argparse.Namespace) -> int:
    """Print the table of `bench`, and draw it if asked."""
    from whitenedcse.serving.index import Index
    from whitenedcse.serving.search_bench import bench, picture

    asked = {"factories": arguments.factory, "rows": arguments.rows, "prefix": arguments.prefix}
    grid = bench(Index.load(arguments.index), dims=arguments.dims, **asked)
    show([grid], arguments.to)
    if arguments.picture:
        picture(grid, arguments.picture)
    return 0

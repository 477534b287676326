"""`whitenedcse encode`: its parser, and what it does."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from whitenedcse import arguments as given
from whitenedcse.data import sources


def add(commands: Any) -> None:
    """The command, added to those of `whitenedcse`."""
    about = "encode a corpus of any size into files of vectors"
    more = "Row i of the files is row i of the input. The same command again goes on with what a kill left."
    parser = commands.add_parser("encode", help=about, description=f"{about}. {more}")
    given.encoder(parser)
    given.corpus(parser, "input")
    parser.add_argument("out", type=Path, metavar="OUT", help="the directory to write")
    given.whiten(parser)
    parser.add_argument(
        "--dtype", choices=("float32", "float16"), default="float32", help="(default: float32)"
    )
    parser.add_argument("--to", choices=("npy", "parquet"), default="npy", help="(default: npy)")
    parser.add_argument(
        "--shard", type=int, default=20_000, metavar="N", help="rows of a file (default: 20,000)"
    )
    about = "processes that share the work (default: one a GPU, or one)"
    parser.add_argument("--processes", type=int, metavar="P", help=about)
    given.columns(parser)
    given.bf16(parser)
    parser.set_defaults(run=encode)


def encode(arguments: argparse.Namespace) -> int:
    """Write the vectors, and say where they are."""
    from whitenedcse import ranks
    from whitenedcse.bulk.encoding import Job, encoded
    from whitenedcse.bulk.shards import Form, begun
    from whitenedcse.report.formats import say

    ranks.refuse("whitenedcse encode")
    given.refuse_dim(arguments)
    form = Form(arguments.to, arguments.dtype, arguments.shard)
    corpus = sources.named(arguments.input, arguments.columns)
    job = Job(partial(given.ended, arguments), arguments.source, corpus, arguments.out, form, arguments.bf16)
    new = encoded(job, arguments.processes)
    if manifest := begun(arguments.out):
        here = f"; {manifest.rows - new:,} were here already" if new < manifest.rows else ""
        say(f"{manifest.rows:,} rows of width {manifest.width}: {arguments.out}{here}")
    return 0

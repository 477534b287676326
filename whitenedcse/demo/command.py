"""`whitenedcse demo`: its parser, and what it does."""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import Any

from whitenedcse.data import sources
from whitenedcse.export.command import CORPUS, SOURCE, pooling, source


def add(commands: Any) -> None:
    """The command, added to those of `whitenedcse`."""
    about = "a page on this machine to try an encoder: search, similarity, and a slider for whitening-k"
    demo = commands.add_parser(
        "demo", help=about, description=f"{about}. Needs pip install 'whitenedcse[demo]'."
    )
    demo.add_argument("source", metavar="SOURCE", help=SOURCE)
    demo.add_argument("corpus", metavar="CORPUS", help=CORPUS)
    demo.add_argument("--columns", nargs="+", default=(), metavar="NAME", help="of a table: those with text")
    sample = "so many of the sentences, drawn uniformly (default: 10000)"
    demo.add_argument("--sample", type=int, default=10_000, metavar="N", help=sample)
    demo.add_argument("--port", type=int, metavar="PORT", help="(default: a free one from 7860 on)")
    pooling(demo)
    demo.set_defaults(run=demonstrate)


def demonstrate(arguments: argparse.Namespace) -> int:
    """Encode the sentences, show the page until Ctrl-C."""
    import rich

    os.environ.setdefault(
        "GRADIO_ANALYTICS_ENABLED", "False"
    )  # before its import: nothing leaves this machine
    try:
        from whitenedcse.demo.page import page, serve
    except ImportError as error:
        raise ValueError(f"the page needs Gradio ({error}); pip install 'whitenedcse[demo]'") from error
    from whitenedcse.demo.trial import Trial
    from whitenedcse.export.whitened import texts
    from whitenedcse.report.formats import say

    corpus = sources.named(arguments.corpus, arguments.columns, arguments.sample)
    sentences = list(dict.fromkeys(text for block in texts(corpus) for text in block))
    trial = Trial(source(arguments), sentences, progress=rich.get_console().is_terminal)
    blocks = page(trial, f"{arguments.source} on {arguments.corpus}")
    say(f"page: {serve(blocks, arguments.port)} (Ctrl-C ends it)")
    sys.stdout.flush()
    try:
        while True:
            time.sleep(1)
    except KeyboardInterrupt:
        os._exit(0)  # at once: the page's threads would wait for browsers that still show it

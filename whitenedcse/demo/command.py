"""`whitenedcse demo`: its parser, and what it does."""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import Any

from whitenedcse import arguments as given
from whitenedcse.data import sources


def add(commands: Any) -> None:
    """The command, added to those of `whitenedcse`."""
    about = "a page on this machine to try an encoder: search, similarity, and a slider for whitening-k"
    demo = commands.add_parser(
        "demo", help=about, description=f"{about}. Needs pip install 'whitenedcse[demo]'."
    )
    given.encoder(demo)
    given.corpus(demo)
    given.columns(demo)
    given.sample(demo, 10_000)
    demo.add_argument("--port", type=int, metavar="PORT", help="(default: a free one from 7860 on)")
    demo.set_defaults(run=demonstrate)


def demonstrate(arguments: argparse.Namespace) -> int:
    """Encode the sentences, show the page until Ctrl-C."""
    os.environ.setdefault(
        "GRADIO_ANALYTICS_ENABLED", "False"
    )  # before its import: nothing leaves this machine
    try:
        from whitenedcse.demo.page import page, serve
    except ImportError as error:
        raise ValueError(f"the page needs Gradio ({error}); pip install 'whitenedcse[demo]'") from error
    from whitenedcse.data.corpus import texts
    from whitenedcse.demo.trial import Trial
    from whitenedcse.report.formats import say

    corpus = sources.named(arguments.corpus, arguments.columns, arguments.sample)
    sentences = list(dict.fromkeys(texts(corpus)))
    trial = Trial(given.opened(arguments), sentences)
    blocks = page(trial, f"{arguments.source} on {arguments.corpus}")
    say(f"page: {serve(blocks, arguments.port)} (Ctrl-C ends it)")
    sys.stdout.flush()
    try:
        while True:
            time.sleep(1)
    except KeyboardInterrupt:
        os._exit(0)  # at once: the page's threads would wait for browsers that still show it

"""A Gradio page to try an encoder: neighbours and cosines, with and without whitening to k components.

n: sentences    d: width    k: components kept

[1] Su et al., BERT-whitening, arXiv:2103.15316
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import gradio as gr
import numpy as np
from gradio import Blocks  # an ImportError where only the folder of a removed gradio is left

from whitenedcse.console import say
from whitenedcse.evaluation.postprocess import Postprocess
from whitenedcse.model.embedder import Embedder
from whitenedcse.serving.exports import scaled
from whitenedcse.serving.nearest import Array, nearest, unit


class Trial:
    """n sentences encoded once, and the whitening [1] fitted to them, of which k columns are whitening-k.

    Raises ValueError for fewer than two sentences.
    """

    def __init__(self, embedder: Embedder, sentences: Sequence[str]) -> None:
        self.embedder, self.sentences = scaled(embedder, unit=False), list(sentences)
        x = self.embedder.encode(self.sentences, progress=True)
        self.fit = Postprocess("whitening").fit(x)
        self.width, self.most = x.shape[1], self.fit.most
        self.rows: list[Array] = [x, self.fit.transform(x).astype(np.float32)]

    def nearest(self, text: str, k: int | None, top: int) -> list[tuple[float, str]]:
        """The `top` sentences with the highest cosine to a text, best first; k: None for no whitening."""
        cosines, best = nearest(unit(self.of([text], k)), [unit(self.rows[k is not None][:, :k])], top)
        return [(float(c), self.sentences[i]) for c, i in zip(cosines[0], best[0], strict=True)]

    def cosine(self, one: str, other: str, k: int | None) -> float:
        """The cosine of two texts; k: None for no whitening."""
        a, b = unit(self.of([one, other], k))
        return float(a @ b)

    def of(self, texts: Sequence[str], k: int | None) -> Array:
        """The vectors of texts: (n, d), or (n, k) with whitening."""
        x = self.embedder.encode(texts)
        return x if k is None else self.fit.transform(x, k).astype(np.float32)


TOP = 10


def page(trial: Trial, title: str) -> Blocks:
    """The page as a gradio.Blocks; `?q=TEXT&k=64` in its address asks a query on loading."""
    with Blocks(title=title, analytics_enabled=False) as blocks:
        gr.Markdown(f"# {title}\n{len(trial.sentences):,} sentences, width {trial.width}{few(trial)}")
        label = "k: components that the whitening keeps"
        k = gr.Slider(1, trial.most, begin(trial), step=1, label=label)
        k.preprocess = partial(within, trial)  # Gradio's own prints a traceback here
        with gr.Tab("Search"):
            query = gr.Textbox(label="Query", placeholder="a sentence, then Enter")
            with gr.Row():
                plain, white = neighbours("as it is"), neighbours("whitened")
        with gr.Tab("Similarity"):
            one, other = gr.Textbox(label="One sentence"), gr.Textbox(label="Another sentence")
            said = gr.Textbox(label="Cosine", interactive=False)

        def search(text: str, k: float) -> tuple[list[list[str]], list[list[str]]]:
            return table(trial, text, None), table(trial, text, int(k))

        def compare(a: str, b: str, k: float) -> str:
            return cosines(trial, a, b, int(k))

        def asked(request: gr.Request) -> tuple[str, int]:
            given = dict(request.query_params)
            return given.get("q", ""), components(given.get("k"), trial)

        blocks.load(asked, None, [query, k], api_name=False).then(
            search, [query, k], [plain, white], api_name=False
        )
        last: Any = {"trigger_mode": "always_last"}  # what is asked while an answer is awaited is not dropped
        gr.on([query.submit, k.release], search, [query, k], [plain, white], api_name="search", **last)
        gr.on(
            [one.submit, other.submit, k.release],
            compare,
            [one, other, k],
            said,
            api_name="similarity",
            **last,
        )
    return blocks


def neighbours(label: str) -> gr.Dataframe:
    """An empty table of sentences."""
    return gr.Dataframe(
        label=label,
        headers=["cosine", "sentence"],
        datatype="str",
        column_widths=["20%", "80%"],
        interactive=False,
        wrap=True,
    )


def table(trial: Trial, text: str, k: int | None) -> list[list[str]]:
    """The nearest sentences as rows of a table; no rows for an empty query."""
    hits = trial.nearest(text, k, TOP) if text.strip() else []
    return [[f"{cosine:.4f}", sentence] for cosine, sentence in hits]


def cosines(trial: Trial, one: str, other: str, k: int) -> str:
    """The cosines of two sentences, without and with whitening, as text; "" for fewer than two."""
    if not (one.strip() and other.strip()):
        return ""
    plain, white = (trial.cosine(one, other, kept) for kept in (None, k))
    return f"{plain:.4f} as it is, {white:.4f} whitened to {k} components"


def few(trial: Trial) -> str:
    """What the page says where the sentences are too few for all components to vary; else ""."""
    if trial.most == trial.width:
        return ""
    most = f"At most {trial.most} components of so few sentences vary"
    return f". {most}, and with nearly as many the neighbours mean little"


def begin(trial: Trial) -> int:
    """The number of components that the slider begins with."""
    return trial.width if trial.most == trial.width else max(1, trial.most // 4)


def components(said: str | None, trial: Trial) -> int:
    """The number of components that the address asks for, from 1 to those that can vary."""
    return within(trial, int(said)) if said and said.isdecimal() else begin(trial)


def within(trial: Trial, k: float) -> int:
    """The number of components nearest to k that the whitening can keep."""
    return int(min(max(k, 1), trial.most))


HOST = re.compile(rb"(127\.0\.0\.1|localhost)(:\d+)?")  # any port: it may be forwarded by ssh
ASKING = re.compile(r"/gradio_api/(queue/join|(call|run|api)/(v2/)?\w+|cancel|reset)/?")  # what may be posted
Application = Callable[..., Any]  # of ASGI: the scope of a request, and how to receive and to send


def own_only(application: Application) -> Application:
    """The same ASGI application for the browser of this machine, and for its own page alone.

    A request under another Host, as of a name that another site made to mean this machine, or with another
    Origin, as from another site's page, gets status 403. What the page does not post, such as a file to
    upload, gets status 404. The application sees neither.
    """

    async def guarded(scope: Any, receive: Any, send: Any) -> None:
        status = refused(scope) if scope["type"] in ("http", "websocket") else None
        if status is None:
            await application(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await send({"type": "http.response.start", "status": status, "headers": []})
            await send({"type": "http.response.body", "body": b"refused: not from this page"})

    return guarded


def refused(scope: Any) -> int | None:
    """The status with which a request is refused; None for one to answer."""
    hosts, origins = ([v for name, v in scope["headers"] if name == key] for key in (b"host", b"origin"))
    if len(hosts) != 1 or not HOST.fullmatch(hosts[0]) or any(v != b"http://" + hosts[0] for v in origins):
        return 403
    reads = scope["type"] == "websocket" or scope["method"] in ("GET", "HEAD")
    return None if reads or (scope["method"] == "POST" and ASKING.fullmatch(scope["path"])) else 404


@asynccontextmanager
async def guarding(app: Any) -> AsyncIterator[None]:
    """The context in which the server runs: `own_only` stands before all else, from its start on."""
    app.middleware_stack = own_only(app.middleware_stack)
    yield


def opened(blocks: gr.Blocks, port: int | None) -> str:
    """The address of the page, from now on served on this machine's own address, which no other reaches.

    Raises OSError where the port is taken.
    """
    own: Any = {"server_name": "127.0.0.1", "server_port": port, "app_kwargs": {"lifespan": guarding}}
    try:
        return str(blocks.launch(**own, quiet=True, prevent_thread_lock=True, theme=theme())[1])
    except OSError as error:
        if port is None:
            raise
        cure = "give another, or leave it out for the first free one"
        raise OSError(f"--port {port} is taken: {cure}") from error


def serve(blocks: gr.Blocks, port: int | None) -> None:
    """Show the page until Ctrl-C. Raises OSError where the port is taken."""
    say(f"page: {opened(blocks, port)} (Ctrl-C ends it)")
    sys.stdout.flush()
    try:
        while True:
            time.sleep(1)
    except KeyboardInterrupt:
        os._exit(0)  # at once: the page's threads would wait for browsers that still show it


def theme() -> gr.themes.Base:
    """Gradio's plain theme with the browser's own fonts: others are fetched from the network."""
    return gr.themes.Base(font=["system-ui", "sans-serif"], font_mono=["monospace"])

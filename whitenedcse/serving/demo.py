"""A Gradio page to try an encoder: neighbours and cosines, with and without whitening to k components.

n: sentences    d: width    k: components kept

[1] Su et al., BERT-whitening, arXiv:2103.15316
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gradio as gr
import numpy as np
from numpy.typing import NDArray

from whitenedcse.console import say
from whitenedcse.data.files import blank
from whitenedcse.evaluation.postprocess import Postprocess
from whitenedcse.model.embedder import Embedder
from whitenedcse.serving.fit import scaled

TOP = 10


class Trial:
    """n sentences encoded once, and the whitening [1] fitted to them, of which k columns are whitening-k.

    Raises ValueError for fewer than two sentences.
    """

    def __init__(self, embedder: Embedder, sentences: Sequence[str]) -> None:
        self.embedder, self.sentences = scaled(embedder, unit=False), list(sentences)
        self.x = self.embedder.encode(self.sentences, progress=True)
        self.fit = Postprocess("whitening").fit(self.x)

    def nearest(self, text: str, k: int | None, top: int) -> list[tuple[float, str]]:
        """The `top` sentences with the highest cosine to a text, best first; k: None for no whitening."""
        query, rows = self.of(self.embedder.encode([text]), k)[0], self.of(self.x, k)
        cosines = rows @ query
        return [(float(cosines[i]), self.sentences[i]) for i in np.argsort(-cosines, kind="stable")[:top]]

    def cosine(self, one: str, other: str, k: int | None) -> float:
        """The cosine of two texts; k: None for no whitening."""
        a, b = self.of(self.embedder.encode([one, other]), k)
        return float(a @ b)

    def of(self, x: NDArray[Any], k: int | None) -> NDArray[np.float64]:
        """Vectors (n, d), whitened to k components unless that is None, of unit length: (n, d) or (n, k)."""
        y = x.astype(np.float64) if k is None else self.fit.transform(x, min(max(1, k), self.fit.most))
        return y / np.linalg.norm(y, axis=1, keepdims=True).clip(1e-12)


def page(trial: Trial, title: str) -> gr.Blocks:
    """The page as a gradio.Blocks."""
    most = trial.fit.most

    def search(text: str, k: float) -> list[list[list[str]]]:
        every = [trial.nearest(text, kept, TOP) if not blank(text) else [] for kept in (None, int(k))]
        return [[[f"{cosine:.4f}", sentence] for cosine, sentence in hits] for hits in every]

    def compare(one: str, other: str, k: float) -> str:
        if blank(one) or blank(other):
            return ""
        plain, white = (trial.cosine(one, other, kept) for kept in (None, int(k)))
        return f"{plain:.4f} as it is, {white:.4f} whitened to {int(k)} components"

    with gr.Blocks(title=title, analytics_enabled=False) as blocks:
        gr.Markdown(f"# {title}\n{len(trial.sentences):,} sentences, width {trial.x.shape[1]}")
        k = gr.Slider(1, most, most, step=1, label="k: components that the whitening keeps")
        with gr.Tab("Search"):
            query = gr.Textbox(label="Query", placeholder="a sentence, then Enter")
            with gr.Row():
                tables = [neighbours("as it is"), neighbours("whitened")]
        with gr.Tab("Similarity"):
            one, other = gr.Textbox(label="One sentence"), gr.Textbox(label="Another sentence")
            said = gr.Textbox(label="Cosine", interactive=False)
        last: Any = {"trigger_mode": "always_last"}  # what is asked while an answer is awaited is not dropped
        gr.on([query.submit, k.release], search, [query, k], tables, api_name="search", **last)
        asking = [one.submit, other.submit, k.release]
        gr.on(asking, compare, [one, other, k], said, api_name="similarity", **last)
    return blocks


def neighbours(label: str) -> gr.Dataframe:
    """An empty table of sentences."""
    shape: Any = {"headers": ["cosine", "sentence"], "column_widths": ["20%", "80%"], "wrap": True}
    return gr.Dataframe(label=label, datatype="str", interactive=False, **shape)


def serve(blocks: gr.Blocks) -> None:
    """Show the page to this machine alone until Ctrl-C; strict_cors refuses other sites' pages."""
    fonts: Any = {"font": ["system-ui", "sans-serif"], "font_mono": ["monospace"]}  # none from the network
    own: Any = {"server_name": "127.0.0.1", "strict_cors": True}
    theme = gr.themes.Base(**fonts)
    _, address, _ = blocks.launch(**own, quiet=True, prevent_thread_lock=True, theme=theme)
    say(f"page: {address} (Ctrl-C ends it)")
    blocks.block_thread()

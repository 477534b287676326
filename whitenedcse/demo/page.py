"""The page: search and the similarity of two sentences, with a slider for k. Gradio draws it."""

from __future__ import annotations

from typing import Any

import gradio as gr

from whitenedcse.demo.trial import Trial

TOP = 10


def page(trial: Trial, title: str) -> gr.Blocks:
    """The page as a gradio.Blocks; `?q=TEXT&k=64` in its address asks at once."""
    with gr.Blocks(title=title, analytics_enabled=False) as blocks:
        gr.Markdown(f"# {title}\n{len(trial.sentences):,} sentences, width {trial.width}")
        k = gr.Slider(1, trial.width, trial.width, step=1, label="k: components that the whitening keeps")
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
            found = dict(request.query_params)
            return found.get("q", ""), components(found.get("k"), trial.width)

        blocks.load(asked, None, [query, k]).then(search, [query, k], [plain, white], api_name=False)
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
    """The nearest sentences as rows; none for an empty query."""
    found = trial.nearest(text, k, TOP) if text.strip() else []
    return [[f"{cosine:.4f}", sentence] for cosine, sentence in found]


def cosines(trial: Trial, one: str, other: str, k: int) -> str:
    """Both cosines in words; nothing until there are two sentences."""
    if not (one.strip() and other.strip()):
        return ""
    plain, white = (trial.cosine(one, other, kept) for kept in (None, k))
    return f"{plain:.4f} as it is, {white:.4f} whitened to {k} components"


def components(said: str | None, width: int) -> int:
    """k as the address says it, within 1 and the width."""
    return min(max(int(said), 1), width) if said and said.isdecimal() else width


def serve(blocks: gr.Blocks, port: int | None) -> str:
    """Start the page on this machine's own address, which no other machine reaches; returns its URL.

    Raises OSError where the port is taken.
    """
    _, url, _ = blocks.launch(
        server_name="127.0.0.1", server_port=port, quiet=True, prevent_thread_lock=True, theme=theme()
    )
    return str(url)


def theme() -> gr.themes.Base:
    """Gradio's plain one with the browser's own letters: its others are fetched from elsewhere."""
    return gr.themes.Base(font=["system-ui", "sans-serif"], font_mono=["monospace"])

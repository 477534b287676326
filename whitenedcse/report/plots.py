"""The style of all plots, and the charts of the HTML page: SVG with the same bytes for the same numbers."""

from __future__ import annotations

import io
import re
import textwrap
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

STYLE: Any = {
    "svg.hashsalt": "whitenedcse",  # names of elements are random otherwise
    "svg.fonttype": "none",  # text stays text
    "font.family": "DejaVu Sans",  # comes with matplotlib
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "savefig.dpi": 150,
}
LABEL = "Spearman x 100"

MARKS = {"o": "●", "s": "■", "^": "▲", "D": "◆", "v": "▼", "P": "✚", "X": "✖"}
# of a page: Okabe and Ito's colours, which a colour-blind eye tells apart; yellow is too pale on white
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
INLINE: Any = STYLE | {"font.size": 10.5, "text.parse_math": False, "legend.frameon": False}
SIZE = (4.6, 3.1)  # inches; a phone shows it at about this size
LONGEST = 52  # letters of a name that fit above its dots; the legend has all


def look(i: int) -> tuple[str, str]:
    """The colour and the mark of group i, different for 49 groups."""
    marks = list(MARKS)
    return COLOURS[i % len(COLOURS)], marks[(i + i // len(COLOURS)) % len(marks)]


def over_steps(ax: Axes, what: str, zero: bool = False) -> None:
    """Labels a plot of `what` over optimiser steps, which are whole numbers; zero: where its axis starts."""
    ax.set(xlabel="optimiser steps", ylabel=what)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    if zero:
        ax.set_ylim(0, 1.05 * ax.dataLim.ymax or 1)  # matplotlib's margin is a share of the range of the data


def legend_below(figure: Figure, ax: Axes) -> None:
    """The legend of a plot below the figure, in up to four columns, with long names in several lines."""
    handles, names = ax.get_legend_handles_labels()
    width = int(13 * figure.get_figwidth())  # letters of a line
    columns = max(1, min(4, width // (max(map(len, names), default=0) + 6)))
    texts = [textwrap.fill(name, width // columns - 6) for name in names]
    figure.legend(handles, texts, loc="outside lower center", ncols=columns, frameon=False)


class Drawing(NamedTuple):
    """A chart of the HTML page: the viewBox of its svg element, and the elements inside."""

    box: str
    content: Markup


def drawn(name: str, draw: Callable[[Axes], None], height: float = SIZE[1]) -> Drawing:
    """Returns a chart that `draw` draws, as SVG for the HTML page; every id in it begins with `name`."""
    with rc_context(INLINE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # letters that the browser's fonts have
        figure = Figure(figsize=(SIZE[0], height), layout="constrained")
        draw(figure.subplots())
        return inline(figure, name)


def inline(figure: Figure, name: str) -> Drawing:
    """Returns a figure as SVG for the HTML page, without metadata; every id in it begins with `name`."""
    stream = io.StringIO()
    figure.savefig(stream, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    svg = re.search(r'<svg[^>]*viewBox="([^"]*)"[^>]*>(.*)</svg>', stream.getvalue(), flags=re.DOTALL)
    assert svg, "matplotlib writes a viewBox"
    content = re.sub(r"<style.*?</style>", "", svg[2], flags=re.DOTALL)  # it would hold for the whole page
    ids = re.compile(r'(\bid="|\bhref="#|url\(#)')
    content = re.sub(r"<[^>]*>", lambda tag: ids.sub(rf"\g<1>{name}-", tag[0]), content)  # not in texts
    return Drawing(svg[1], Markup(content))  # matplotlib has escaped the texts in it


def fitting(labels: Sequence[str]) -> list[str]:
    """Labels of at most `LONGEST` letters: long ones cut at their end, or within if they were alike then."""
    ends = [name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}…" for name in labels]
    if len(set(ends)) == len(ends):
        return ends
    half = LONGEST // 2
    return [name if len(name) <= LONGEST else f"{name[: half - 1]}…{name[-half:]}" for name in labels]

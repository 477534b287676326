"""Draw the picture of the method that README.md shows: python docs/picture.py

Writes docs/method.svg and, for dark pages, docs/method-dark.svg: the same drawing in other colours.
"""

from __future__ import annotations

from pathlib import Path
from random import Random

WIDTH, HEIGHT = 920, 320
LIGHT = {"ink": "#1f2328", "soft": "#59636e", "line": "#9aa4ae", "box": "#f6f8fa", "page": "#ffffff"}
DARK = {"ink": "#e6edf3", "soft": "#9198a1", "line": "#6e7681", "box": "#161b22", "page": "#0d1117"}
CHANNELS = [
    "#4477aa",
    "#66ccee",
    "#228833",
    "#ccbb44",
    "#ee6677",
    "#aa3377",
]  # told apart by the colour-blind
SHUFFLES = [(2, 5, 0, 4, 1, 3), (4, 1, 3, 0, 5, 2), (1, 3, 5, 2, 4, 0)]  # one permutation a view


def text(x: float, y: float, words: str, colour: str, size: int = 14, **other: str) -> str:
    """A line of text around x, with its baseline at y."""
    more = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in other.items())
    style = f'fill="{colour}" font-size="{size}" text-anchor="middle"{more}'
    return f'<text x="{x:g}" y="{y:g}" {style}>{words}</text>'


def box(x: float, y: float, width: float, height: float, colours: dict[str, str]) -> str:
    """A rectangle with round corners."""
    style = f'rx="8" fill="{colours["box"]}" stroke="{colours["line"]}"'
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" {style}/>'


def arrow(x: float, y: float, to: float, colours: dict[str, str]) -> str:
    """A horizontal arrow."""
    head = f'<path d="M{to:g} {y:g} l-8 -4.5 v9 z" fill="{colours["line"]}"/>'
    return f'<path d="M{x:g} {y:g} H{to - 6:g}" stroke="{colours["line"]}" stroke-width="1.6"/>{head}'


def cells(x: float, y: float, order: tuple[int, ...], gap: float = 0) -> str:
    """The channels of a vector in an order, in groups of two with a gap between groups."""
    size = 'width="15" height="15" rx="3"'
    return "".join(
        f'<rect x="{x + 17 * i + gap * (i // 2):g}" y="{y:g}" {size} fill="{CHANNELS[c]}"/>'
        for i, c in enumerate(order)
    )


def cloud(x: float, y: float, flat: bool, colours: dict[str, str]) -> str:
    """Points around (x, y): along a line, as an encoder's vectors lie, or as wide in each direction."""
    random, points = Random(3), []
    for _ in range(40):
        a, b = random.gauss(0, 1), random.gauss(0, 1)
        across, up = (15 * a + 3 * b, -9 * a + 5 * b) if flat else (10 * a, 10 * b)
        points.append(f'<circle cx="{x + across:.1f}" cy="{y + up:.1f}" r="1.9"/>')
    return f'<g fill="{CHANNELS[0]}" fill-opacity="0.75">{"".join(points)}</g>'


def drawing(colours: dict[str, str]) -> str:
    """The whole picture as SVG."""
    ink, soft = colours["ink"], colours["soft"]
    parts = [box(12, 92, 128, 84, colours), text(76, 122, "a batch of", ink), text(76, 142, "sentences", ink)]
    parts += [text(76, 163, "n", soft, 12, font_style="italic"), arrow(140, 134, 176, colours)]
    parts += [box(176, 92, 128, 84, colours), text(240, 122, "encoder", ink, font_weight="600")]
    parts += [text(240, 142, "with dropout", ink), text(240, 163, "v passes", soft, 12)]
    for view, order in enumerate(SHUFFLES):
        y = 66 + 60 * view
        parts += [arrow(304, y + 8, 338, colours), cells(344, y, (0, 1, 2, 3, 4, 5))]
        parts += [arrow(452, y + 8, 496, colours), cells(504, y, order, 9)]
        parts += [arrow(632, y + 8, 676, colours)]
    parts += [text(395, 50, "v views, n x d", soft, 12), text(474, 234, "shuffle", soft, 12)]
    parts += [text(564, 50, "groups of channels", soft, 12), text(654, 234, "whiten each", soft, 12)]
    parts += [box(676, 56, 100, 156, colours), cloud(726, 92, True, colours)]
    parts += [text(726, 139, "whitened", ink, 13), cloud(726, 178, False, colours)]
    parts += [arrow(776, 134, 806, colours), box(806, 92, 102, 84, colours)]
    parts += [
        text(857, 122, "contrastive", ink, font_weight="600"),
        text(857, 142, "loss", ink, font_weight="600"),
    ]
    parts += [text(857, 163, "v - 1 positives", soft, 12)]
    parts += [text(460, 24, "Training: shuffled group whitening between the encoder and the loss", ink, 16)]
    y = 282
    parts += [box(12, y - 24, 292, 44, colours), text(158, y + 3, "any encoder, trained here or not", ink)]
    parts += [arrow(304, y - 2, 344, colours), box(344, y - 24, 232, 44, colours)]
    parts += [text(460, y + 3, "whitening afterwards, k channels", ink), arrow(576, y - 2, 616, colours)]
    parts += [box(616, y - 24, 292, 44, colours), text(762, y + 3, "scores, export, vectors, search", ink)]
    font = "font-family=\"-apple-system, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif\""
    page = f'<rect width="{WIDTH}" height="{HEIGHT}" fill="{colours["page"]}"/>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" {font}>'
    return "\n".join([head, page, *parts, "</svg>", ""])


def write(folder: Path) -> None:
    """Write both files into a folder."""
    (folder / "method.svg").write_text(drawing(LIGHT))
    (folder / "method-dark.svg").write_text(drawing(DARK))


if __name__ == "__main__":
    write(Path(__file__).parent)

"""Output in a terminal: tables in several formats, plain lines, and the progress of long work."""

from __future__ import annotations

import csv
import io
import json
import re
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import rich
from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from whitenedcse.distributed import is_first

# LaTeX: a cell that starts with [ or * would be read as an argument of the \\ before it
LATEX = str.maketrans(
    {character: f"\\{character}" for character in "&%$#_{}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    | {"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}"}
    | {"[": "{[}", "]": "{]}", "*": "{*}", "\n": " "}
)


# text that Hydra reads as text without quotes
BARE = r"(?a)(?!(?i:true|false|null|nan|inf)$)[a-z_A-Z./][\w./:+@-]*"


def asked_to_end(error: BaseException | None) -> int:
    """The exit code, 128 + signal, of a process that a signal asked to end, as `error` tells; else 0."""
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return 128 + signal.SIGINT
        if isinstance(error, SystemExit) and isinstance(error.code, int) and error.code > 128:
            return error.code
        error = error.__context__
    return 0


@contextmanager
def ending_when_asked() -> Iterator[None]:
    """A context in which SIGTERM raises SystemExit, as Ctrl-C raises KeyboardInterrupt."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    usual = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, usual)


@contextmanager
def interrupted(cure: Callable[[], str]) -> Iterator[None]:
    """A context in which Ctrl-C and SIGTERM, before they end the process, print what `cure` says."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        if text := cure():
            sys.stderr.write(f"interrupted: {text}\n")
        raise


def lacking(what: str, package: str, extra: str | None = None, error: object = "") -> ValueError:
    """The error for what needs a package that is not installed, with the command that installs it.

    >>> lacking("the page", "gradio", "demo")
    ValueError("the page needs gradio: pip install 'whitenedcse[demo]'")
    """
    why = f" ({error})" if error else ""
    target = f"'whitenedcse[{extra}]'" if extra else package
    return ValueError(f"{what} needs {package}{why}: pip install {target}")


def quoted(value: Any) -> str:
    """A value as Hydra's override grammar reads it back: null, true, numbers, lists, mappings, and text.

    >>> print(quoted(["a'b", 0.5, None]), quoted({"kind": "zca"}), quoted("true"))
    ['a\\'b',0.5,null] {kind:zca} 'true'
    """
    value = value.tolist() if hasattr(value, "tolist") else value
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{quoted(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(quoted(item) for item in value) + "]"
    if re.fullmatch(BARE, str(value)):
        return str(value)
    doubled = re.sub(r"(\\+)(?='|$)", r"\1\1", str(value))  # others than these escape nothing
    return "'" + doubled.replace("'", "\\'") + "'"


def override(name: str, value: Any) -> str:
    """NAME=VALUE as a word of a command, quoted for Hydra and then for the shell where they need it.

    >>> print(override("model", "outputs/a"), override("model", "it's"), override("compare", ["a,b", "c"]))
    model=outputs/a 'model='"'"'it\\'"'"'s'"'"'' 'compare=['"'"'a,b'"'"',c]'
    """
    return shlex.quote(f"{name}={quoted(value)}")


class Grid(NamedTuple):
    """A table as text, with a cell for each row and column.

    right: numbers of the columns aligned right. best: of those whose highest number LaTeX shows in bold.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()
    right: Collection[int] = ()
    best: Collection[int] = ()


def console() -> Console:
    """The console for tables; for a file or a pipe, which has no width, lines have 160 columns."""
    out = rich.get_console()
    if not out.is_terminal:
        out.width = max(out.width, 160)
    return out


def printed(grid: Grid) -> Iterator[str | Text | Table]:
    """The table for a terminal, part by part; where it is too narrow, cells are broken between words."""
    yield Text(grid.title, style="italic")
    table = Table(box=SIMPLE_HEAD, padding=0)
    header, *rows = lines(grid)
    for i, (name, (least, most)) in enumerate(zip(header, widths(grid), strict=True)):
        side: Any = "right" if i in grid.right else "left"
        table.add_column(Text(name), justify=side, min_width=least, max_width=most, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    yield table
    for note in grid.notes:  # one with a command stays a text, which `say` does not break
        yield note if re.search(r"'[\w.]+=|\n  ", note) else Text(note)
    if grid.notes:  # a table itself ends with an empty line
        yield ""


def widths(grid: Grid) -> list[tuple[int, int]]:
    """The least and the most width of each column, so that all fit in the terminal if their words do."""
    columns = list(zip(*lines(grid), strict=True))
    cells = [max(map(cell_len, column)) for column in columns]
    words = [max(map(cell_len, " ".join(column).split()), default=0) for column in columns]
    # a number is never cut; a path may be
    least = [n if i in grid.right else min(n, 12) for i, n in enumerate(words)]
    room = console().width - len(columns) - 1

    def needed(most: int) -> int:
        return sum(max(low, min(n, most)) for low, n in zip(least, cells, strict=True))

    most = next((n for n in range(room, 1, -1) if needed(n) <= room), 1)
    return [(low, max(low, most)) for low in least]


def as_markdown(grid: Grid) -> str:
    """The table as Markdown: a heading, a pipe table (GitHub's), and the notes as a list."""
    header, *rows = [[markdown(cell) for cell in row] for row in lines(grid)]
    rule = ["---:" if i in grid.right else "---" for i in range(len(header))]
    body = "\n".join(f"| {' | '.join(row)} |" for row in (header, rule, *rows))
    notes = "".join(f"- {markdown(note)}\n" for note in grid.notes)
    return f"### {markdown(grid.title)}\n\n{body}\n" + (f"\n{notes}" if notes else "")


def markdown(text: str) -> str:
    """Text escaped so that Markdown shows it unchanged, on one line."""
    return re.sub(r"([\\|*_`<\[\]])", r"\\\1", text).replace("\n", " ")


def as_csv(grid: Grid) -> str:
    """The table as CSV: column names and rows, for a program to read; `show` says the notes elsewhere."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(lines(grid))
    return out.getvalue()


def latex(text: str) -> str:
    """Text escaped for LaTeX, with signs of numbers, and symbols, in its mathematics."""
    escaped = re.sub(r"(?<![\w.}])([+-]\d[\d.,]*)", r"$\1$", text.translate(LATEX))
    return escaped.replace("±", r"$\pm$").replace("→", r"$\to$").replace("×", r"$\times$")


def highest(cells: Sequence[str]) -> int | None:
    """The number of the cell that begins with the highest number; None where fewer than two have one."""
    matches = {i: re.match(r"-?\d+(\.\d+)?", cell) for i, cell in enumerate(cells)}
    found = {i: float(match[0]) for i, match in matches.items() if match}
    return max(found, key=found.__getitem__) if len(found) > 1 else None


def as_latex(grid: Grid) -> str:
    """The table as LaTeX: a table environment for the booktabs package, the best of a column in bold."""
    table = [[latex(cell) for cell in row] for row in lines(grid)]
    for i in grid.best:
        row = highest([cells[i] for cells in grid.rows])
        if row is not None:
            table[row + 1][i] = rf"\textbf{{{table[row + 1][i]}}}"
    header, *rows = [" & ".join(row) + r" \\" for row in table]
    align = "".join("r" if i in grid.right else "l" for i in range(len(grid.columns)))
    notes = [rf"\par\footnotesize {latex(note)}" for note in grid.notes]
    return "\n".join(
        [r"\begin{table}", r"\centering", rf"\caption{{{latex(grid.title)}}}"]
        + [rf"\begin{{tabular}}{{{align}}}", r"\toprule", header, r"\midrule", *rows, r"\bottomrule"]
        + [r"\end{tabular}", *notes, r"\end{table}", ""]
    )


def say(content: str | Grid) -> None:
    """Print a line or a table, once however many ranks there are, also where a progress bar is drawn."""
    parts = [content] if isinstance(content, str) else printed(content)
    for part in parts if is_first() else ():
        console().print(part, soft_wrap=isinstance(part, str), highlight=False, markup=False, crop=False)


def show(grids: Sequence[Grid], form: str) -> None:
    """Print tables in one of the formats table, markdown, csv (the notes on the standard error), latex."""
    if form == "table":
        for grid in grids:
            say(grid)
    else:
        forms = {"markdown": as_markdown, "csv": as_csv, "latex": as_latex}
        sys.stdout.write("\n".join(forms[form](grid) for grid in grids))
        if form == "csv":
            sys.stderr.writelines(f"{note}\n" for grid in grids for note in grid.notes)


def lines(grid: Grid) -> list[Sequence[str]]:
    """The column names, then the rows."""
    assert all(len(row) == len(grid.columns) for row in grid.rows), f"{grid.title}: a row of another length"
    return [grid.columns, *grid.rows]


SECONDS = 10.0  # between two lines of progress where none can be redrawn


@contextmanager
def pace(what: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
    """A context with a function to call with the number of sentences done since; it shows progress."""
    from tqdm.auto import tqdm  # here, as --help does without it

    shown = sys.stderr.isatty()
    rare = {} if shown else {"mininterval": SECONDS, "delay": SECONDS}
    with tqdm(desc=what, total=total, unit=" sentences", leave=not shown, **rare) as bar:
        yield bar.update

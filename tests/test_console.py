"""What is printed: a pace, and tables, parsed back by readers that know nothing of the writer."""

import csv
import io
import re

import pytest
from rich.console import Console

from whitenedcse import console
from whitenedcse.console import Grid, as_csv, as_latex, as_markdown, say

AWKWARD = ["a & b", "50 %", "mean_L1", "#1", "$5 {x}", "a\\b", "[nli] x", "*star", "a|b", "x < y > z", "~^"]
AWKWARD += ['q "r", s']
ROWS = [(text, "-1.50", str(i)) for i, text in enumerate(AWKWARD)]
GRID = Grid("scores & [more]", ("row_1", "all %", ""), ROWS, ("see [nli] a_b & c", "100 %"), (1, 2))
COMMAND = "python evaluate.py model=a_b layers=[1,-1] " + "pooling=mean " * 12
MADE = GRID._replace(notes=[f"to make row_1; row & 2:\n  {COMMAND}"])


@pytest.fixture
def shown(monkeypatch):
    """A function from a table and the width of a terminal to the lines that are shown there."""

    def lines(grid, width):
        terminal = Console(width=width, file=io.StringIO(), color_system=None, force_terminal=True)
        monkeypatch.setattr(console, "console", lambda: terminal)
        say(grid)
        return terminal.file.getvalue().splitlines()

    return lines


def unescaped(markdown):
    return re.sub(r"\\([!-/:-@\[-`{-~])", r"\1", markdown)


def from_latex(text):
    """What TeX would set of the escapes in use; a character that is special and not escaped is an error."""
    commands = {"textbackslash": "\\", "textasciitilde": "~", "textasciicircum": "^"}
    commands |= {"textless": "<", "textgreater": ">", "textbar": "|"}
    text = re.sub(r"\$([+-][\d.,]+)\$", r"\1", text)  # signs of numbers are mathematics
    token = r"\\([a-z]+)\{\}|\\([&%$#_{}])|\{([\[\]*])\}|([^\\&%$#_{}~^<>|])"
    out, at = "", 0
    while at < len(text):
        match = re.compile(token).match(text, at)
        assert match, f"TeX would choke on {text[at:]!r}"
        out += commands[match[1]] if match[1] else match[2] or match[3] or match[4]
        at = match.end()
    return out


def test_csv_holds_the_cells():
    assert list(csv.reader(io.StringIO(as_csv(GRID)))) == [list(row) for row in (GRID.columns, *GRID.rows)]


def test_markdown_holds_the_cells_and_says_which_columns_are_numbers():
    heading, _, *table = as_markdown(GRID).split("\n\n- ")[0].splitlines()
    rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in table]
    assert unescaped(heading) == f"### {GRID.title}"
    assert rows[1] == ["---", "---:", "---:"]
    cells = [[unescaped(cell) for cell in row] for row in (rows[0], *rows[2:])]
    assert cells == [list(row) for row in (GRID.columns, *GRID.rows)]
    assert "\n- see \\[nli\\] a\\_b & c\n" in as_markdown(GRID)
    assert [unescaped(note[2:]) for note in as_markdown(GRID).splitlines()[-2:]] == list(GRID.notes)
    for sign in "*_`<[":
        line = as_markdown(Grid("t", ("a",), [(f"x {sign}y{sign} z",)])).splitlines()[-1]
        assert not re.search(rf"(?<!\\){re.escape(sign)}", line)


def test_latex_holds_the_cells_and_the_notes():
    text = as_latex(GRID)
    body = re.search(r"\\toprule\n(.*)\\midrule\n(.*)\\bottomrule", text, re.DOTALL)
    lines = (body[1] + body[2]).splitlines()
    assert all(line.endswith(r" \\") for line in lines)
    cells = [[from_latex(cell) for cell in re.split(r"(?<!\\) & ", line[:-3])] for line in lines]
    assert cells == [list(row) for row in (GRID.columns, *GRID.rows)]
    assert [from_latex(note) for note in re.findall(r"\\par\\footnotesize (.*)", text)] == list(GRID.notes)
    assert from_latex(re.search(r"\\caption\{(.*)\}\n", text)[1]) == GRID.title
    assert r"\begin{tabular}{lrr}" in text


def test_a_terminal_shows_the_text_of_cells_and_notes_not_its_markup(shown):
    text = " ".join(shown(GRID, 120))
    assert all(cell in text for cell in (*AWKWARD, *GRID.notes, GRID.title))


def test_a_narrow_terminal_cuts_no_number_and_keeps_the_names_of_lines(shown):
    size = "+2.16 (+0.63 .. +3.60, p 0.01)"
    wide = Grid(
        "t", ["", "1", "2", "2 - 1", "3 - 1"], [["STS12", "46.31", "48.47", size, size]], [], range(1, 5)
    )
    for width in (40, 60, 80):
        words = " ".join(shown(wide, width)).split()
        assert {"STS12", "46.31", "48.47", *size.split()} <= set(words)


def test_a_table_whose_words_fit_the_terminal_is_no_wider(shown):
    tasks = ["MR", "CR", "SUBJ", "MPQA", "SST2", "TREC", "MRPC", "average"]
    rows = [["whitened (training)", "transductive", *["85.12 ±1.23"] * 8]]
    wide = Grid("accuracy x 100", ["", "fitted", *tasks], rows, [], range(2, 10))
    assert max(map(len, shown(wide, 80))) <= 80


def test_commands_keep_one_line_each_and_name_the_rows_they_make(capsys):
    say(MADE)
    text = capsys.readouterr().out
    assert f"  {COMMAND}" in text.splitlines() and "to make row_1; row & 2:" in text
    assert COMMAND in unescaped(as_markdown(MADE).splitlines()[-1])
    assert from_latex(as_latex(MADE).splitlines()[-2].partition("footnotesize ")[2]).endswith(COMMAND)
    assert as_csv(MADE) == as_csv(GRID)


def test_latex_sets_signs_as_mathematics_and_the_best_of_a_column_in_bold():
    rows = [("a-1", "72.61 ± 0.30", "-0.5"), ("b", "73.2 ± 1", "+1.5"), ("c", "-", "")]
    text = as_latex(Grid("t", ("", "x", "y"), rows, (), (1, 2), best=[1]))
    assert r"a-1 & 72.61 $\pm$ 0.30 & $-0.5$ \\" in text
    assert r"b & \textbf{73.2 $\pm$ 1} & $+1.5$ \\" in text and text.count("textbf") == 1


def test_a_pipe_gets_lines_on_the_standard_error_of_long_work_alone(monkeypatch, capsys):
    for seconds, said in ((console.SECONDS, ""), (0, "encoded:  90%")):
        monkeypatch.setattr(console, "SECONDS", seconds)
        with console.pace("encoded", 1000) as more:
            more(900)
        out = capsys.readouterr()
        assert out.out == "" and (said in out.err if said else out.err == "")

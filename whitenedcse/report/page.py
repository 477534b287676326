"""One HTML file of a run, or of a sweep: tables and charts, no script, nothing from outside.

What comes from files is escaped, and the page's own policy forbids scripts and requests.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from whitenedcse.durable import writing
from whitenedcse.report import contrasts, curves, history
from whitenedcse.report.formats import Grid
from whitenedcse.report.groups import Sweep, gathered
from whitenedcse.report.history import Run, dev, median
from whitenedcse.report.sweep import RATE, comparison, scored, write_csv
from whitenedcse.report.tables import described, grids, number, training_grid

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
STYLE = """
:root { color-scheme: light dark; --ink: #1d2733; --soft: #5b6875; --line: #d9dfe5; --page: #f5f7f9;
  --card: #ffffff; --accent: #0b6bab; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e9ee; --soft: #9fabb8; --line: #35404c;
  --page: #14191f; --card: #1d242c; --accent: #6cb8ee; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 1.5rem 1rem 3rem; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: 0 0 .3rem; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2rem 0 .6rem; }
p.about { color: var(--soft); margin: 0 0 1rem; overflow-wrap: anywhere; }
.keys { display: grid; grid-template-columns: repeat(auto-fit, minmax(190px, 1fr)); gap: .7rem; margin: 0; }
.keys div, section, figure, details { background: var(--card); border: 1px solid var(--line);
  border-radius: 8px; padding: .8rem 1rem; }
.keys dt { color: var(--soft); font-size: .85rem; }
.keys dd { margin: 0; font-size: 1.35rem; font-weight: 600; font-variant-numeric: tabular-nums; }
.keys small { display: block; font-size: .8rem; font-weight: 400; color: var(--soft); }
section { margin: 1rem 0; }
section h2, figure h2 { margin: 0 0 .5rem; font-size: 1rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .86rem; font-variant-numeric: tabular-nums; min-width: 40%; }
th, td { padding: .3rem .55rem; text-align: left; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { color: var(--soft); font-weight: 600; white-space: normal; vertical-align: bottom; }
td:first-child { white-space: normal; overflow-wrap: anywhere; min-width: min(16rem, 40vw); }
.right { text-align: right; }
ul.notes { color: var(--soft); font-size: .82rem; margin: .6rem 0 0; padding-left: 1.1rem;
  overflow-wrap: anywhere; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 390px), 1fr)); gap: 1rem; }
figure { margin: 0; break-inside: avoid; }
figure .paper { background: #ffffff; border-radius: 4px; padding: .3rem; }
figcaption { color: var(--soft); font-size: .85rem; margin-top: .4rem; }
svg { display: block; width: 100%; height: auto; max-height: 80vh; }
svg * { stroke-linejoin: round; stroke-linecap: butt; }
svg text { font-family: "DejaVu Sans", Verdana, sans-serif !important; }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; list-style: none; margin: 0 0 .8rem; padding: 0;
  font-size: .9rem; overflow-wrap: anywhere; }
.legend span { background: #ffffff; border-radius: 3px; padding: 0 .25rem; margin-right: .35rem; }
details { margin: 1rem 0; }
summary { cursor: pointer; font-weight: 600; }
pre { font-size: .82rem; overflow-x: auto; white-space: pre-wrap; overflow-wrap: anywhere; }
@media (max-width: 600px) { main { padding: .8rem .6rem; } figure, section { padding: .6rem .5rem; } }
@media print { body { background: none; font-size: 12px; } .keys div, section, figure { break-inside: avoid; }
  .charts { grid-template-columns: 1fr 1fr; } }
"""


def write(names: Sequence[str], out: Path | None, against: str | None) -> tuple[list[Grid], list[Path]]:
    """The page of a run, or of a sweep with seeds.csv beside it; returns the tables and the files written.

    names: a run, a directory of runs, or several of both, patterns too. out: its file, or a folder.
    Raises FileNotFoundError or ValueError for what is none, and for a group `against` that does not exist.
    """
    folders = history.paths(names)
    file = out or (folders[0] if len(folders) == 1 else Path())
    file = file / "report.html" if file.is_dir() else file
    if len(folders) == 1 and history.is_run(folders[0]):
        if against:
            raise ValueError(f"--against {against!r}: {folders[0]} is one run, with nothing to compare")
        run = history.load(folders[0])
        tables, page, files = run_grids(run), of_run(run), [file]
    else:
        sweep = gathered(history.runs(folders))
        tables, files = comparison(sweep, against), [file, file.with_name("seeds.csv")]
        titles = [Path(name).resolve().name for name in names]
        page = of_sweep(" ".join(titles[:3] + ["..."] * (len(titles) > 3)), sweep, tables)
        write_csv(sweep, files[1])
    with writing(file, "w") as stream:
        stream.write(page)
    return tables, files


def document(title: str, body: Iterable[str]) -> str:
    """The whole file; `body` is HTML already."""
    name = html.escape(title)
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<link rel="icon" href="data:,">\n<title>{name}</title>\n<style>{STYLE}</style>\n</head>',
            f"<body>\n<main>\n<h1>{name}</h1>",
            *body,
            "</main>\n</body>\n</html>\n",
        ]
    )


def of_run(run: Run) -> str:
    """The page of one run, finished or not."""
    here = run.path.resolve()
    is_job = (here.parent / "multirun.yaml").exists()  # which Hydra leaves in a sweep's directory
    return document(
        f"{here.parent.name}/{here.name}" if is_job else here.name,
        [
            f'<p class="about">{html.escape(", ".join(about(run)))}</p>',
            keys(run),
            *map(table, run_grids(run)),
            charts((c.name, c.title, svg, c.caption) for c, svg in curves.of_run(run)),
            details("Settings (config.yaml)", text(run.path / "config.yaml")),
            details("Environment (versions.json)", json.dumps(run.facts, indent=2, ensure_ascii=False)),
            details("Command", f"python {run.facts.get('command', '')}"),
        ],
    )


def of_sweep(title: str, sweep: Sweep, tables: Sequence[Grid]) -> str:
    """The page of groups of runs; tables: its `comparison`."""
    looks = [(*contrasts.look(i), group.label) for i, group in enumerate(sweep.groups)]
    legend = "".join(
        f'<li><span style="color:{colour}">{contrasts.MARKS[mark]}</span>{html.escape(label)}</li>'
        for colour, mark, label in looks
    )
    finished = sum(run.scores is not None for run in sweep.runs)
    line = f"{len(sweep.groups)} groups, {len(sweep.runs)} runs, {finished} finished"
    pictures = [
        (str(i), name, svg, caption)
        for i, (name, svg, caption) in enumerate(contrasts.of_groups(sweep.groups))
    ]
    body = [f'<p class="about">{line}; every run is a line of seeds.csv</p>', *map(table, tables)]
    return document(title, [*body, f'<h2>Charts</h2>\n<ul class="legend">{legend}</ul>', charts(pictures)])


def about(run: Run) -> list[str]:
    """What a run is, in a few words each."""
    facts, data = run.facts, run.settings.get("data") or {}
    machine = facts.get("machine") or {}
    hardware = ", ".join(machine.get("gpus") or [f"{machine.get('cores', '?')} CPU cores"])
    sample = f" (sample of {data['sample']:,})" if isinstance(data.get("sample"), int) else ""
    names = {
        "experiment": facts.get("experiment"),
        "system": facts.get("system"),
        "seed": run.settings.get("seed"),
        "data": f"{data['corpus']}{sample}" if "corpus" in data else None,
        "commit": (facts.get("commit") or "unknown")[:10],
    }
    known = [f"{name} {value}" for name, value in names.items() if value is not None]
    return [*known, hardware, "finished" if run.scores else "NOT FINISHED"]


def keys(run: Run) -> str:
    """The numbers to look at first."""
    summary, scores = dev(run), run.scores or {}
    shown: list[tuple[str, str, str]] = []
    if summary:
        rise = f"{number(summary['before'])} → {number(summary['best'])}"
        shown.append(("dev Spearman x 100, before → best", rise, f"at step {summary['best_step']}"))
        alone = [
            (value, name)
            for name, value in summary["values_before"].items()
            if name.startswith("dev/whitened_on_") and value is not None
        ]
        if alone:
            value, name = max(alone)
            shown.append(("whitening alone, before training", number(value), described(name)))
        if (rank := summary["values_best"].get("dev/effective_rank")) is not None:
            shown.append(("effective rank", f"{rank:.1f}", "at the best checkpoint"))
    if scores.get("rows"):
        first = scores["rows"][0]
        shown.append(("test average x 100", number(scored(run, None).get("average")), first["name"]))
    if (speed := median(run, RATE)) is not None:
        shown.append(("sentences per second", f"{speed:,.0f}", "median of the run"))
    cells = (
        f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(value)}<small>{html.escape(more)}</small></dd></div>"
        for name, value, more in shown
    )
    return f'<dl class="keys">{"".join(cells)}</dl>'


def run_grids(run: Run) -> list[Grid]:
    """The tables of a run: the dev set's, and the tests' where they were judged."""
    summary = dev(run)
    found = [dev_grid(summary)] if summary else []
    return [*found, *(grids(run.scores, None) if run.scores and "rows" in run.scores else [])]


def dev_grid(summary: Mapping[str, Any]) -> Grid:
    """The dev set's table."""
    grid = training_grid(summary)
    return grid if summary["n"] else grid._replace(title="dev set so far, Spearman x 100")


def table(grid: Grid) -> str:
    """A table as HTML."""

    def line(cells: Sequence[str], tag: str) -> str:
        sides = [' class="right"' if i in grid.right else "" for i in range(len(cells))]
        pairs = zip(sides, cells, strict=True)
        return f"<tr>{''.join(f'<{tag}{side}>{html.escape(cell)}</{tag}>' for side, cell in pairs)}</tr>"

    notes = "".join(f"<li>{html.escape(note)}</li>" for note in grid.notes)
    return (
        f'<section><h2>{html.escape(grid.title)}</h2><div class="wide"><table>\n'
        f"<thead>{line(grid.columns, 'th')}</thead>\n<tbody>\n"
        + "\n".join(line(row, "td") for row in grid.rows)
        + "\n</tbody></table></div>"
        + (f'<ul class="notes">{notes}</ul>' if notes else "")
        + "</section>"
    )


def charts(pictures: Iterable[tuple[str, str, str, str]]) -> str:
    """Name, title, SVG and caption of each, side by side where there is room."""
    figures = [
        f'<figure id="chart-{name}"><h2>{html.escape(title)}</h2><div class="paper">{svg}</div>'
        f"<figcaption>{html.escape(caption)}</figcaption></figure>"
        for name, title, svg, caption in pictures
    ]
    return "\n".join(['<div class="charts">', *figures, "</div>"]) if figures else ""


def details(title: str, content: str) -> str:
    """What is folded away."""
    return f"<details><summary>{html.escape(title)}</summary><pre>{html.escape(content)}</pre></details>"


def text(file: Path) -> str:
    """A file of the run."""
    return file.read_text(encoding="utf-8")

"""A report on a run or a sweep as one HTML file, with tables and charts, without scripts or external files.

This module computes what is shown. The markup and the stylesheet are in templates/, where Jinja2 escapes
every value.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from jinja2 import Environment, PackageLoader, StrictUndefined

from whitenedcse.console import Grid
from whitenedcse.files import writing
from whitenedcse.report import charts
from whitenedcse.report.compare import Report, comparison
from whitenedcse.report.sweep import Sweep, gathered, paths, runs, write_csv
from whitenedcse.report.tables import grids, training_grid
from whitenedcse.run import Run, flat

COMMON = (  # settings that a reader asks for first; the page has all others that the runs share below
    *("experiment", "system", "seed", "encoder.path", "data.corpus", "data.sample", "data.max_length"),
    *("data.batch_size", "views", "pooling.kind", "optim.lr", "trainer.max_epochs", "trainer.max_steps"),
    "monitor.dev",
)
TEMPLATES = Environment(
    loader=PackageLoader("whitenedcse.report"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    keep_trailing_newline=True,
)


def write(names: Sequence[str], out: Path | None, against: str | None) -> tuple[Report, list[Path]]:
    """Write the page of a run, or of a sweep and the csv file of its seeds; returns what it says, and files.

    names: a run, a directory of runs, or several of both; patterns are allowed. out: a file that ends in
    .html, or a directory, made if missing. Raises FileNotFoundError or ValueError where `names` has no run,
    or where no group is called `against`.
    """
    folders = paths(names)
    file = out or (folders[0] if len(folders) == 1 else Path())
    file = file if file.suffix == ".html" else file / "report.html"
    run = Run(folders[0])
    if len(folders) == 1 and run.trains:
        if against:
            raise ValueError(f"--against {against!r}: {run.path} is one run, with nothing to compare")
        made, files = Report([], run_grids(run), []), [file]
        page = of_run(run, made)
    else:
        sweep = gathered(runs(folders))
        made = comparison(sweep, against)
        seeds = "seeds.csv" if file.stem == "report" else f"{file.stem}-seeds.csv"
        files = [file, file.with_name(seeds)]
        title = " ".join(Path(name).resolve().name for name in names[:3]) + (" ..." if names[3:] else "")
        page = of_sweep(title, sweep, made)
    file.parent.mkdir(parents=True, exist_ok=True)
    if files[1:]:
        write_csv(sweep, files[1])
    with writing(file, "w") as stream:
        stream.write(page)
    return made, files


def of_run(run: Run, made: Report) -> str:
    """The HTML page of one run, finished or not. made: its tables."""
    here = run.path.resolve()
    about = "finished" if run.scores else "NOT FINISHED"
    parts = {"title": f"{here.parent.name}/{here.name}", "about": about, "charts": charts.of_run(run)}
    return rendered([run], made, **parts, lead=[], groups=[])


def of_sweep(title: str, sweep: Sweep, made: Report) -> str:
    """The HTML page of a sweep. made: what `comparison` returns for it."""
    finished = sum(run.scores is not None for run in sweep.runs)
    about = f"{len(sweep.groups)} groups, {len(sweep.runs)} runs, {finished} finished; "
    about += "every run is a line of the csv file beside this page"
    looks = [(*charts.look(i), group.label) for i, group in enumerate(sweep.groups)]
    groups = [(colour, charts.MARKS[mark], label) for colour, mark, label in looks]
    parts = {"title": title, "about": about, "groups": groups, "charts": charts.of_sweep(sweep)}
    return rendered(sweep.runs, made, **parts, lead=charts.of_differences(made))


def rendered(every: Sequence[Run], made: Report, **parts: Any) -> str:
    """The HTML page of runs. parts: what templates/page.html shows beside their verdict, facts and tables."""
    facts = [run.facts for run in every]
    settings, noted = same([flat(run.settings) for run in every]), same(map(flat, facts))
    known = {name: settings.get(name, noted.get(name)) for name in COMMON}
    short = {name: value for name, value in known.items() if value is not None}
    more = {"commit": {*map(commit, facts)}, "machine": {*map(hardware, facts)}}
    return TEMPLATES.get_template("page.html").render(
        **parts,
        verdict=made.verdict,
        facts=short | {name: ", ".join(sorted(values)) for name, values in more.items()},
        tables=made.grids,
        files={
            "Command": "\n".join(dict.fromkeys(fact.get("command", "") for fact in facts)),
            "Settings (config.yaml)": yaml.safe_dump(settings, sort_keys=False, allow_unicode=True),
            "Environment (versions.json)": yaml.safe_dump(noted, sort_keys=False, allow_unicode=True),
        },
    )


def same(every: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What is the same in all of these mappings."""
    first, *others = every
    return {k: v for k, v in first.items() if all(k in own and own[k] == v for own in others)}


def commit(facts: Mapping[str, Any]) -> str:
    """The commit that a run was made at, short, and whether the code had been changed."""
    name, mark, _ = (facts.get("commit") or "unknown").partition("+")
    return name[:10] + (" with changes" if mark else "")


def hardware(facts: Mapping[str, Any]) -> str:
    """The accelerators, or else the cores, that a run was made on."""
    machine = facts.get("machine") or {}
    return ", ".join(machine.get("gpus") or [f"{machine.get('cores', '?')} CPU cores"])


def run_grids(run: Run) -> list[Grid]:
    """The tables of a run that has ended: the dev set's, and the test sets' where it has test scores."""
    if not run.scores:
        return []
    return [training_grid(run.scores["dev"]), *(grids(run.scores) if run.rows else [])]

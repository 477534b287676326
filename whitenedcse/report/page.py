"""A report on a run or a sweep as one HTML file, with tables and charts, without scripts or external files.

This module computes what is shown. The markup and the stylesheet are in templates/, where Jinja2 escapes
every value; the page's content security policy forbids scripts and requests.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from jinja2 import Environment, PackageLoader, StrictUndefined

from whitenedcse.console import Grid
from whitenedcse.files import writing
from whitenedcse.report import charts
from whitenedcse.report.compare import Report, comparison, reference
from whitenedcse.report.sweep import RATE, Sweep, beside, gathered, paths, runs, shared, write_csv
from whitenedcse.report.tables import aggregations, described, grids, in_brackets, number, training_grid
from whitenedcse.run import Run, flat

RANK = "dev/effective_rank"
COMMON = (  # settings that a reader asks for first; the page has all others that the runs share below
    *("encoder.path", "data.corpus", "data.sample", "data.max_length", "data.batch_size", "views"),
    *("pooling.kind", "optim.lr", "trainer.max_epochs", "trainer.max_steps", "monitor.dev"),
)
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
TEMPLATES = Environment(
    loader=PackageLoader("whitenedcse.report"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    keep_trailing_newline=True,
)
TEMPLATES.globals["policy"] = POLICY


def write(names: Sequence[str], out: Path | None, against: str | None) -> tuple[Report, list[Path]]:
    """Write the page of a run, or of a sweep and the csv file of its seeds; returns what it says, and files.

    names: a run, a directory of runs, or several of both; patterns are allowed. out: a file that ends in
    .html, or a directory, made if missing. Raises FileNotFoundError or ValueError where `names` has no run,
    or where no group is called `against`.
    """
    folders = paths(names)
    file = out or (folders[0] if len(folders) == 1 else Path())
    file = file if file.suffix in (".html", ".htm") and not file.is_dir() else file / "report.html"
    if len(folders) == 1 and Run(folders[0]).trains:
        if against:
            raise ValueError(f"--against {against!r}: {folders[0]} is one run, with nothing to compare")
        run = Run(folders[0]).checked()
        made, page, files = Report([], run_grids(run), []), of_run(run), [file]
    else:
        sweep = gathered(runs(folders))
        made, files = comparison(sweep, against), [file, beside(file)]
        titles = [Path(name).resolve().name for name in names]
        title = " ".join(titles[:3] + ["..."] * (len(titles) > 3))
        page = of_sweep(title, sweep, made, reference(sweep, against).label)
    file.parent.mkdir(parents=True, exist_ok=True)
    if files[1:]:
        write_csv(sweep, files[1])
    with writing(file, "w") as stream:
        stream.write(page)
    return made, files


def of_run(run: Run) -> str:
    """Returns the HTML page of one run, finished or not."""
    here = run.path.resolve()
    is_job = (here.parent / "multirun.yaml").exists()  # which Hydra leaves in a sweep's directory
    return TEMPLATES.get_template("run.html").render(
        title=f"{here.parent.name}/{here.name}" if is_job else here.name,
        about=about(run),
        keys=keys(run),
        tables=run_grids(run),
        charts=charts.of_run(run),
        files={
            "Settings (config.yaml)": (run.path / "config.yaml").read_text(encoding="utf-8"),
            "Environment (versions.json)": json.dumps(run.facts, indent=2, ensure_ascii=False),
            "Command": run.facts.get("command", ""),
        },
    )


def of_sweep(title: str, sweep: Sweep, made: Report, first: str) -> str:
    """Returns the HTML page of a sweep. made: what `comparison` returns for it. first: the reference."""
    looks = [(*charts.look(i), group.label) for i, group in enumerate(sweep.groups)]
    facts = [run.facts for run in sweep.runs]
    commands = dict.fromkeys(fact.get("command", "") for fact in facts)
    commits = ", ".join(dict.fromkeys(commit(fact) for fact in facts))
    machines = ", ".join(dict.fromkeys(hardware(fact) for fact in facts))
    settings = [flat(run.settings) for run in sweep.runs]
    same = {k: v for k, v in settings[0].items() if all(k in own and own[k] == v for own in settings)}
    short = {name: same[name] for name in COMMON if same.get(name) is not None}
    return TEMPLATES.get_template("sweep.html").render(
        title=title,
        groups=[(colour, charts.MARKS[mark], label) for colour, mark, label in looks],
        runs=len(sweep.runs),
        finished=sum(run.scores is not None for run in sweep.runs),
        verdict=made.verdict,
        facts={**short, "commit": commits, "machine": machines},
        differences=charts.of_differences(made.differences, first, made.what),
        tables=made.grids,
        charts=charts.of_sweep(sweep),
        files={
            "Command": "\n".join(commands),
            "Settings that all runs share": yaml.safe_dump(same, sort_keys=False, allow_unicode=True),
        },
    )


def commit(facts: dict[str, Any]) -> str:
    """The commit that a run was made at, short, and whether the code had been changed."""
    name, mark, _ = (facts.get("commit") or "unknown").partition("+")
    return name[:10] + (" with changes" if mark else "")


def hardware(facts: dict[str, Any]) -> str:
    """The accelerators, or else the cores, that a run was made on."""
    machine = facts.get("machine") or {}
    return ", ".join(machine.get("gpus") or [f"{machine.get('cores', '?')} CPU cores"])


def about(run: Run) -> list[str]:
    """Returns short descriptions of a run: its name, seed, data, commit, hardware and state."""
    facts, data = run.facts, run.settings.get("data") or {}
    sample = f" (sample of {data['sample']:,})" if isinstance(data.get("sample"), int) else ""
    names = {
        "experiment": facts.get("experiment"),
        "system": facts.get("system"),
        "seed": run.settings.get("seed"),
        "data": f"{data['corpus']}{sample}" if "corpus" in data else None,
        "commit": commit(facts),
    }
    known = [f"{name} {value}" for name, value in names.items() if value is not None]
    return [*known, hardware(facts), "finished" if run.scores else "NOT FINISHED"]


def keys(run: Run) -> list[tuple[str, str, str]]:
    """The headline numbers of a run, each as its name, its value, and a remark."""
    dev, scores = run.dev, run.scores or {}
    shown: list[tuple[str, str, str]] = []
    if dev and dev["best"] is not None:
        rise = f"{number(dev['before'])} → {number(dev['best'])}"
        shown.append(("dev Spearman x 100 (all), before → best", rise, f"at step {dev['best_step']}"))
        before = [(v, name) for name, v in dev["values_before"].items() if v is not None]
        if alone := [(v, name) for v, name in before if name.startswith("dev/whitened_on_")]:
            value, name = max(alone)
            shown.append(("whitening alone, before training", number(value), described(name)))
    if dev and (rank := dev["values_best"].get(RANK)) is not None:
        shown.append(("effective rank", f"{rank:.1f}", "at the best checkpoint"))
    if scores.get("rows"):
        what = f"test average x 100{in_brackets(aggregations([run]))}"
        shown.append((what, number(run.tests()["avg"]), scores["rows"][0]["name"]))
    if speed := run.series.get(RATE):
        remark = "median; the machine was shared" if shared(run) else "median of the run"
        shown.append(("sentences per second", f"{speed.median:,.0f}", remark))
    return shown


def run_grids(run: Run) -> list[Grid]:
    """Returns the tables of a run: the dev set's, and the test sets' where the run has test scores."""
    summary, scores = run.dev, run.scores or {}
    return [
        *([training_grid(summary)] if summary else []),
        *(grids(scores) if "rows" in scores else []),
    ]

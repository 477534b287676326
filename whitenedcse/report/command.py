"""`whitenedcse report` and `whitenedcse dashboard`: parsers, and what they do."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from whitenedcse import arguments as given


def add(commands: Any) -> None:
    """The commands, added to those of `whitenedcse`."""
    _report(commands)
    _dashboard(commands)


def _report(commands: Any) -> None:
    about = "what came out: a run, a sweep, or a published table beside the numbers of your own runs"
    parser = commands.add_parser("report", help=about, description=about)
    what = (
        "a published table or figure, e.g. WhitenedCSE/T1; or a run of train.py, a sweep, several, a pattern"
    )
    parser.add_argument("what", nargs="*", metavar="WHAT", help=what)
    parser.add_argument("--list", action="store_true", help="name the published tables and figures")
    runs = "beside a published table: runs of evaluate.py, or folders that hold some (default: outputs)"
    parser.add_argument("--runs", nargs="+", type=Path, metavar="DIR", help=runs)
    alias = "take a run, or the runs of a model, for those of this encoder: bert-base-uncased=outputs/mine"
    parser.add_argument("--as", dest="aliases", action="append", default=[], metavar="NAME=DIR", help=alias)
    against = "of a sweep: the group that the others are compared with (default: the first)"
    parser.add_argument("--against", metavar="LABEL", help=against)
    out = "of runs: file or folder of the page (default: report.html in the directory, or here for several)"
    parser.add_argument("--out", type=Path, metavar="PATH", help=out)
    given.form(parser)
    parser.set_defaults(run=report)


def report(arguments: argparse.Namespace) -> int:
    """Print a published table beside our numbers, or the list of all; or report on runs of train.py."""
    from whitenedcse.report import formats, published

    what, known = arguments.what, published.names()
    if arguments.list or not what:
        for key, title in known.items():
            formats.say(f"{key}: {title}")
        return 0
    papers = {key.partition("/")[0] for key in known}
    is_key = what[0] in known or (what[0].partition("/")[0] in papers and not Path(what[0]).is_dir())
    return report_published(arguments) if is_key and len(what) == 1 else report_runs(arguments)


def report_published(arguments: argparse.Namespace) -> int:
    """Print a published table beside our numbers."""
    from whitenedcse.report import formats, published

    if arguments.out or arguments.against:
        raise ValueError(
            f"--out and --against are for runs of train.py; {arguments.what[0]} is a published table"
        )
    wrong = [alias for alias in arguments.aliases if "=" not in alias]
    if wrong:
        raise ValueError(f"--as {wrong[0]}: NAME=DIR is expected, e.g. bert-base-uncased=outputs/mine")
    runs = arguments.runs or [path for path in [Path("outputs")] if path.is_dir()]
    aliases = dict(alias.split("=", 1) for alias in arguments.aliases)
    formats.show([published.report(arguments.what[0], runs, aliases)], arguments.to)
    return 0


def report_runs(arguments: argparse.Namespace) -> int:
    """Print the tables of a run or a sweep, write its page, and say where that is."""
    from whitenedcse.report import formats, page

    if arguments.runs or arguments.aliases:
        raise ValueError("--runs and --as go with a published table; name runs of train.py without them")
    grids, files = page.write(arguments.what, arguments.out, arguments.against)
    formats.show(grids, arguments.to)
    for file in files:
        if arguments.to == "table":
            formats.say(f"written: {file}")
        else:  # what reads the table reads the standard output
            sys.stderr.write(f"written: {file}\n")
    return 0


def _dashboard(commands: Any) -> None:
    about = "add a view with all charts to a Weights & Biases project"
    more = "Each call adds one. It needs an account (`wandb login`) and runs there (`wandb sync`)."
    parser = commands.add_parser("dashboard", help=about, description=f"{about}. {more}")
    parser.add_argument("project", metavar="PROJECT", help="logger.project of the runs, e.g. whitenedcse")
    parser.add_argument(
        "--entity", metavar="NAME", help="its team (default: $WANDB_ENTITY, or your own account)"
    )
    parser.set_defaults(run=dashboard)


def dashboard(arguments: argparse.Namespace) -> int:
    """Save the view, and say where it is."""
    from whitenedcse.report import formats, workspace

    formats.say(f"view: {workspace.save(arguments.project, arguments.entity)}")
    return 0

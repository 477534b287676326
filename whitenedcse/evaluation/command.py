"""`whitenedcse data`: its parsers, and what they do."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from whitenedcse import arguments as given
from whitenedcse.data import sources


def add(commands: Any) -> None:
    """The commands, added to those of `whitenedcse`."""
    data = given.group(commands, "data", "what training and evaluation read: is it here, is it right, get it")
    _check(data)
    _fetch(data)


def _check(commands: Any) -> None:
    about = "verify every task and corpus on this machine: counts, scores, encoding, checksums"
    more = "Exit status 1 if anything that is here is wrong; what is missing is only named."
    check = commands.add_parser("check", help=about, description=f"{about}. {more}")
    place = "look here, not in $WHITENEDCSE_DATA (default: data)"
    check.add_argument("folder", nargs="?", type=Path, metavar="FOLDER", help=place)
    check.set_defaults(run=data_check)


def _fetch(commands: Any) -> None:
    about = (
        "download a data set from the Hugging Face hub, or from $HF_ENDPOINT, as a first run does by itself"
    )
    fetch = commands.add_parser(
        "fetch", help=about, description=f"{about}; into $WHITENEDCSE_DATA (default: data)."
    )
    on_hub = [name for name, source in sources.CORPORA.items() if source.hub_file]
    fetch.add_argument(
        "name", choices=["senteval", *on_hub], metavar="NAME", help=f"senteval, {', '.join(on_hub)}"
    )
    fetch.set_defaults(run=data_fetch)


def data_check(arguments: argparse.Namespace) -> int:
    """Print what the data doctor found; 1 if any of it is wrong."""
    import rich

    from whitenedcse.evaluation import doctor
    from whitenedcse.report.formats import Grid, as_rich, say

    with rich.get_console().status("reading"):
        found = doctor.examined(arguments.folder)
    table = Grid("tasks and corpora", doctor.COLUMNS, doctor.lines(found), right=range(2, 6))
    say(as_rich(table))
    for remark in doctor.remarks(found):
        say(remark)
    return int(any(finding.verdict == "wrong" for finding in found))


def data_fetch(arguments: argparse.Namespace) -> int:
    """Bring a data set here unless it is here; say where it is."""
    from whitenedcse.report.formats import say

    here = sources.present(arguments.name, sources.roots())
    say(
        f"{arguments.name}: is here already, {here}"
        if here
        else f"{arguments.name}: fetching from {sources.REPO}"
    )
    if not here:
        say(f"{arguments.name}: fetched, {sources.fetched(arguments.name)}")
    return 0

"""The command line `whitenedcse COMMAND`; --help explains. Its commands for data and reports are here.

A command is a parser, and a function from its arguments to an exit status that imports what it needs.
`train` and `evaluate` take Hydra's words, as train.py and evaluate.py do, and are started by `start`.
"""

from __future__ import annotations

import argparse
import sys
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from importlib.metadata import version
from pathlib import Path
from typing import Any

from whitenedcse import console
from whitenedcse.app import arguments as given
from whitenedcse.app import search_commands, serving_commands
from whitenedcse.console import Grid, say, show
from whitenedcse.data import sources

SCRIPTS = {
    "train": "train an encoder; [+experiment=NAME] [KEY=VALUE ...]",
    "evaluate": "evaluate an encoder on tasks; model=MODEL [KEY=VALUE ...]",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status.

    0: success. 1: it ran and found something wrong. 2: an error, with its traceback if the environment has
    --debug. 130: Ctrl-C.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    if words[:1] in (["train"], ["evaluate"]):
        return script(*words)
    parser = _parser()
    try:
        arguments, unknown = parser.parse_known_args([word for word in words if word != "--debug"])
        if unknown:
            raise ValueError(no_argument(unknown, words, parser))
        given.check_numbers(arguments)
        with console.ending_when_asked():
            return int(arguments.run(arguments))
    except (Exception, KeyboardInterrupt) as error:
        if code := console.asked_to_end(error):
            return code
        if "--debug" in words or not isinstance(error, ValueError | OSError):
            raise
        from whitenedcse.app.config import did_you_mean

        what = (" ".join(str(error).split()) or type(error).__name__) + did_you_mean(error, words)
        sys.stderr.write(f"error: {what} (--debug shows where)\n")
        return 2


def no_argument(unknown: list[str], words: list[str], parser: ArgumentParser) -> str:
    """What to write in place of words that a command of `whitenedcse` does not take.

    words: the command line after `whitenedcse`.
    """
    every = dict(commands(parser))
    command = max((c for c in every if words[: len(c.split())] == c.split()), key=len)
    options = {name: [text for a in one._actions for text in a.option_strings] for name, one in every.items()}
    strange = next((word.partition("=")[0] for word in unknown if word.startswith("-")), None)
    if strange is None:
        takes = " ".join(str(a.metavar) for a in every[command]._actions if not a.option_strings)
        cure = "; many queries are --file FILE, one a line" if command == "search query" else ""
        return f"{unknown[0]!r} is one argument too many: whitenedcse {command} takes {takes}{cure}"
    having = [f"whitenedcse {name}" for name, texts in options.items() if strange in texts]
    near = get_close_matches(strange, options[command], n=1, cutoff=0.8 if having else 0.6)
    cures = [f"the nearest is {name}" for name in near]
    cures += [f"{' and '.join(having[:3])} {'has' if len(having) == 1 else 'have'} it"] * bool(having)
    return f"whitenedcse {command} has no {strange}; {', or '.join(cures) or '--help lists its options'}"


def commands(parser: ArgumentParser, before: str = "") -> Iterator[tuple[str, ArgumentParser]]:
    """The commands below a parser, such as "search build", and their parsers."""
    inner = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    if not inner:
        yield before, parser
    for name, one in (pair for action in inner for pair in action.choices.items()):
        yield from commands(one, f"{before} {name}".strip())


def script(name: str, *words: str) -> int:
    """Run train.py or evaluate.py with these words; returns the exit status."""
    from whitenedcse.app.evaluate import evaluate
    from whitenedcse.app.start import start
    from whitenedcse.app.train import train

    sys.argv = [f"whitenedcse {name}", *words]
    start({"train": train, "evaluate": evaluate}[name])
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = given.Parser(prog="whitenedcse", description="Train, evaluate and serve sentence encoders.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {version('whitenedcse')}")
    commands = given.subcommands(parser)
    for name, about in SCRIPTS.items():
        commands.add_parser(name, help=about, add_help=False)
    for add in (add_data, add_report, serving_commands.add, search_commands.add):
        add(commands)
    return parser


def add_data(commands: Any) -> None:
    """Add the parsers of `whitenedcse data`."""
    data = given.group(commands, "data", "check or download the data sets that training and evaluation read")
    _check(data)
    _fetch(data)


def _check(commands: Any) -> None:
    about = "verify every task and corpus on this machine: counts, scores, encoding, checksums"
    more = "The exit status is 1 if a file is wrong; missing files are listed, but do not change it."
    check = commands.add_parser("check", help=about, description=f"{about}. {more}")
    place = "look only in this folder (default: $WHITENEDCSE_DATA or ./data, then the data of the package)"
    check.add_argument("folder", nargs="?", type=Path, metavar="FOLDER", help=place)
    check.set_defaults(run=data_check)


def _fetch(commands: Any) -> None:
    about = (
        "download a data set from the Hugging Face hub (or $HF_ENDPOINT), as the first run that needs it does"
    )
    fetch = commands.add_parser(
        "fetch", help=about, description=f"{about}. It is written to $WHITENEDCSE_DATA (default: data)."
    )
    on_hub = [name for name, source in sources.CORPORA.items() if source.hub]
    fetch.add_argument(
        "name", choices=["senteval", *on_hub], metavar="NAME", help=f"senteval, {', '.join(on_hub)}"
    )
    fetch.set_defaults(run=data_fetch)


def data_check(arguments: argparse.Namespace) -> int:
    """Print the state of tasks and corpora; returns 1 if any of it is wrong."""
    import rich

    from whitenedcse.evaluation import doctor

    with rich.get_console().status("reading"):
        findings = doctor.examined(arguments.folder)
    table = Grid("tasks and corpora", doctor.COLUMNS, doctor.lines(findings), right=range(2, 6))
    say(table)
    for remark in doctor.remarks(findings):
        say(remark)
    return int(any(finding.verdict == "wrong" for finding in findings))


def data_fetch(arguments: argparse.Namespace) -> int:
    """Download a data set unless this machine has it; print where it is."""
    here = sources.present(arguments.name, sources.roots())
    say(
        f"{arguments.name}: already available, {here}"
        if here
        else f"{arguments.name}: fetching from {', '.join(sources.hubs(arguments.name))}"
    )
    if not here:
        say(f"{arguments.name}: fetched, {sources.fetched(arguments.name)}")
    return 0


def add_report(commands: Any) -> None:
    """Add the parsers of `whitenedcse report` and `whitenedcse dashboard`."""
    _report(commands)
    _dashboard(commands)


def _report(commands: Any) -> None:
    about = "print the results of a run or a sweep, or a published table beside your own runs"
    parser = commands.add_parser("report", help=about, description=about)
    what = "a published table or figure, e.g. WhitenedCSE/T1; or runs or sweeps of train.py, or a pattern"
    parser.add_argument("what", nargs="*", metavar="WHAT", help=what)
    parser.add_argument("--list", action="store_true", help="list the published tables and figures")
    runs = "runs of evaluate.py, or folders of them, to show beside a published table (default: outputs)"
    parser.add_argument("--runs", nargs="+", type=Path, metavar="DIR", help=runs)
    against = "the group of a sweep with which the others are compared (default: the first)"
    parser.add_argument("--against", metavar="LABEL", help=against)
    out = (
        "FILE.html or folder of the page about runs, made if missing (default: report.html in their folder, "
        "or in the current one if there are several); seeds.csv, or NAME-seeds.csv for "
        "NAME.html, a line a run, is written beside the page of several"
    )
    parser.add_argument("--out", type=Path, metavar="PATH", help=out)
    given.form(parser)
    parser.set_defaults(run=report)


def report(arguments: argparse.Namespace) -> int:
    """Print a published table beside our numbers, a list of these tables, or a report on runs of train.py."""
    from whitenedcse.report import published

    what, known = arguments.what, published.names()
    if arguments.list or not what:
        for key, title in known.items():
            say(f"{key}: {title}")
        return 0
    papers = {key.partition("/")[0] for key in known}
    is_key = what[0] in known or (what[0].partition("/")[0] in papers and not Path(what[0]).is_dir())
    return report_published(arguments) if is_key else report_runs(arguments)


def report_published(arguments: argparse.Namespace) -> int:
    """Print a published table beside our numbers."""
    from whitenedcse.app.config import composed
    from whitenedcse.report import published

    if arguments.out or arguments.against:
        raise ValueError(
            f"--out and --against are for runs of train.py; {arguments.what[0]} is a published table"
        )
    if len(arguments.what) > 1:
        raise ValueError(
            f"{arguments.what[0]} is a published table and stands alone; --runs {arguments.what[1]} "
            "puts runs beside it"
        )
    runs = arguments.runs or [path for path in [Path("outputs")] if path.is_dir()]
    show([published.report(arguments.what[0], composed, runs)], arguments.to)
    return 0


def report_runs(arguments: argparse.Namespace) -> int:
    """Print the tables of a run or a sweep, write its page, and print where the page is."""
    from whitenedcse.report import page

    if arguments.runs:
        raise ValueError("--runs goes with a published table; name runs of train.py without it")
    made, files = page.write(arguments.what, arguments.out, arguments.against)
    tell = say if arguments.to == "table" else err  # what reads the table reads the standard output
    for line in made.lines:
        tell(line)
    show(made.grids, arguments.to)
    for file in files:
        tell(f"written: {file}")
    return 0


def err(line: str) -> None:
    """Print a line on the standard error."""
    sys.stderr.write(f"{line}\n")


def _dashboard(commands: Any) -> None:
    about = "add a view with all charts to a Weights & Biases project"
    more = "Each call adds one. It needs an account (`wandb login`) and runs in the project (`wandb sync`)."
    parser = commands.add_parser("dashboard", help=about, description=f"{about}. {more}")
    parser.add_argument("project", metavar="PROJECT", help="logger.project of the runs, e.g. whitenedcse")
    parser.add_argument(
        "--entity", metavar="NAME", help="the project's team (default: $WANDB_ENTITY, or your own account)"
    )
    parser.set_defaults(run=dashboard)


def dashboard(arguments: argparse.Namespace) -> int:
    """Save the Weights & Biases view, and print where it is."""
    from whitenedcse.training.dashboard import save

    say(f"view: {save(arguments.project, arguments.entity)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

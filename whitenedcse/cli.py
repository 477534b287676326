"""The command line: `whitenedcse COMMAND`; --help explains. (Training and judging: train.py, evaluate.py.)

A command is a parser, and a function from its arguments to an exit status that imports what it needs.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version

from whitenedcse.arguments import subcommands
from whitenedcse.bulk import command as bulk
from whitenedcse.demo import command as demo
from whitenedcse.evaluation import command as evaluation
from whitenedcse.export import command as export
from whitenedcse.report import command as report
from whitenedcse.search import command as search


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command: 0 done, 1 done and something is wrong, 2 an error (HYDRA_FULL_ERROR=1 shows where),
    130 stopped by Ctrl-C.
    """
    arguments = _parser().parse_args(argv)
    try:
        return arguments.run(arguments)
    except KeyboardInterrupt:
        return 130
    except (ValueError, OSError) as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        what = " ".join(str(error).split()) or type(error).__name__
        sys.stderr.write(f"error: {what} (HYDRA_FULL_ERROR=1 shows where)\n")
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="whitenedcse", description="Tools beside train.py and evaluate.py.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {version('whitenedcse')}")
    commands = subcommands(parser)
    for part in (evaluation, report, export, bulk, search, demo):
        part.add(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())

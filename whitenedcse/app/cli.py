"""The command line `whitenedcse COMMAND`; --help explains.

A command is a line of words, each an argument declared once in ARGUMENTS, and a function in commands.py from
what was given to an exit status. `train` and `evaluate` take Hydra's words, as train.py and evaluate.py do.
"""

from __future__ import annotations

import argparse
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from whitenedcse import console
from whitenedcse.app import commands
from whitenedcse.data import sources

SCRIPTS = {
    "train": "train an encoder; [+experiment=NAME] [KEY=VALUE ...]",
    "evaluate": "evaluate an encoder on tasks; model=MODEL [KEY=VALUE ...]",
}


def positive(text: str) -> int:
    """A whole number from 1, for argparse."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} must be 1 or more")
    return number


def argument(metavar: str, about: str, **more: Any) -> dict[str, Any]:
    """What argparse is told of an argument."""
    return {"metavar": metavar, "help": about, **more}


def choice(*options: str, about: str = "", **more: Any) -> dict[str, Any]:
    """The same of one with few values, of which the first is the default unless told."""
    return {"choices": options, "default": options[0], "help": about or f"(default: {options[0]})", **more}


CORPUS = "a text, csv, tsv, jsonl or parquet file, a folder of them, a URL, a hub data set, or one of "
CORPUS += ", ".join(sources.CORPORA)
ON_HUB = ["senteval", *(name for name, source in sources.CORPORA.items() if source.hub)]
REPORTED = "runs or sweeps of train.py, or a pattern; or a published table, e.g. WhitenedCSE/T1, and runs of "
REPORTED += "evaluate.py to show beside it (default: outputs)"
POOLINGS = ("cls", "mean", "max", "last", "pooler", "first_last")
OWN_POOLING = "of an encoder that does not define its own (default: cls, or last for a decoder)"
ARGUMENTS: dict[str, dict[str, Any]] = {
    "source": argument("SOURCE", "a run, a checkpoint or another encoder: a directory, a URL, a hub id"),
    "corpus": argument("CORPUS", CORPUS),
    "input": argument("INPUT", CORPUS),
    "out": argument("OUT", "what to write; it may hold an earlier one"),
    "index": argument("INDEX", "the directory of the index"),
    "text": argument("TEXT", "the query", nargs="?"),
    "folder": argument("FOLDER", "look only here (default: the data folders)", type=Path, nargs="?"),
    "name": argument("NAME", ", ".join(ON_HUB), choices=ON_HUB),
    "project": argument("PROJECT", "logger.project of the runs, e.g. whitenedcse"),
    "what": argument("WHAT", REPORTED, nargs="*"),
    "--pooling": choice(*POOLINGS, about=OWN_POOLING, default=None),
    "--layers": argument("LAYER", "its layers to pool, 0 the embeddings (default: -1)", type=int, nargs="+"),
    "--prompt": argument("TEXT", "put before each text that is encoded (default: SOURCE's own prompt)"),
    "--query-prompt": argument("TEXT", "put before each query (default: SOURCE's for queries, or --prompt)"),
    "--sample": argument("N", "rows to draw at random (default: all, but where said above)", type=positive),
    "--columns": argument(
        "NAME", "the column of a table that has texts; a whitening takes several", nargs="+", default=()
    ),
    "--ids": argument("NAME", "the column of a table that holds ids, each once (default: each row's number)"),
    "--bf16": {"action": "store_true", "help": "let the encoder compute in bfloat16: faster"},
    "--whiten": argument("FIT", "a file written by `whitenedcse whiten fit`"),
    "--whiten-on": argument("CORPUS", "fit a whitening to this corpus and include it"),
    "--dim": argument("K", "the number of components of the whitening to keep (default: all)", type=positive),
    "--kind": choice("whitening", "pca", "zca", "standardise", "centre", "abtt"),
    "--shrinkage": argument("S", "pull variances to their mean, 0 (default) to 1", type=float, default=0.0),
    "--unit": {
        "action": argparse.BooleanOptionalAction,
        "help": "scale vectors to unit length at the end (default: as SOURCE does)",
    },
    "--no-verify": {"action": "store_true", "help": "do not compare the vectors with SOURCE's"},
    "--dtype": choice("float32", "float16"),
    "--shard": argument("N", "rows per file (default: 20,000)", type=positive, default=20_000),
    "--processes": argument("P", "processes that share the work (default: one per GPU)", type=positive),
    "--engine": choice("ray", about="use a Ray cluster; all of it must see OUT", default=None),
    "--factory": argument("F", "a FAISS index, e.g. IVF1024,SQ8 or HNSW32 (default: Flat)", default="Flat"),
    "--vectors": argument("DIR", "what `whitenedcse encode` wrote of this, with the same --whiten and --dim"),
    "--file": argument("QUERIES", "a file of queries, or any other corpus"),
    "--top": argument("N", "texts per query (default: 10)", type=positive, default=10),
    "--pairs": argument("PAIRS", "200 scored pairs or more: sentence1, sentence2, score; or STS-B/dev"),
    "--list": {"action": "store_true", "help": "list the published tables and figures"},
    "--against": argument("LABEL", "the group with which the others are compared (default: the first)"),
    "--out": argument("PATH", "where to write (readout: default only tables)", type=Path),
    "--to": choice("table", "markdown", "csv", "latex", about="output format"),
}
ENCODER = "source --pooling --layers --prompt"
TO = {  # in place of --to above
    "export": choice("transformers", "sentence-transformers", "onnx", about="output format", required=True),
    "encode": choice("npy", "parquet", about="output format"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status.

    0: success. 1: it ran and found something wrong. 2: an error, with its traceback if --debug is given.
    130: Ctrl-C. Raises SystemExit, of argparse, for words that are no command.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    if words[:1] in (["train"], ["evaluate"]):
        return script(*words)
    arguments = parser().parse_args([word for word in words if word != "--debug"])
    try:
        with console.ending_when_asked():
            return int(arguments.run(arguments))
    except (Exception, KeyboardInterrupt) as error:
        if code := console.asked_to_end(error):
            return code
        if "--debug" in words or not isinstance(error, ValueError | OSError):
            raise
        what = " ".join(str(error).split()) or type(error).__name__
        sys.stderr.write(f"error: {what} (--debug shows where)\n")
        return 2


def script(name: str, *words: str) -> int:
    """Run train.py or evaluate.py with these words; returns the exit status."""
    from whitenedcse.app.evaluate import evaluate
    from whitenedcse.app.start import start
    from whitenedcse.app.train import train

    sys.argv = [f"whitenedcse {name}", *words]
    start({"train": train, "evaluate": evaluate}[name])
    return 0


def parser() -> ArgumentParser:
    """The parser of all commands."""
    top = ArgumentParser(prog="whitenedcse", description="Train, evaluate and serve sentence encoders.")
    top.add_argument("--version", action="version", version=f"%(prog)s {version('whitenedcse')}")
    groups = {"": top.add_subparsers(required=True, metavar="COMMAND", title="commands")}
    for name, about in SCRIPTS.items():
        groups[""].add_parser(name, help=about, add_help=False)
    for name, about in GROUPS.items():
        inner = groups[""].add_parser(name, help=about, description=about)
        groups[name] = inner.add_subparsers(required=True, metavar="COMMAND", title="commands")
    for name, (run, described, words) in COMMANDS.items():
        group, _, last = name.rpartition(" ")
        one = groups[group].add_parser(last, help=described.partition(". ")[0], description=described)
        for word in words.split():
            several = word.split("|")  # of which one can be given
            place = one.add_mutually_exclusive_group() if several[1:] else one
            for one_of in several:
                declared = TO[name] if one_of == "--to" and name in TO else ARGUMENTS[one_of]
                place.add_argument(one_of, **declared)
        one.set_defaults(run=run)
    return top


GROUPS = {
    "data": "check or download the data sets that training and evaluation read",
    "whiten": "fit a whitening to the vectors that an encoder gives for a corpus of any size",
    "search": "find the texts of a corpus that are nearest to a query",
}
COMMANDS: dict[str, tuple[Any, str, str]] = {  # a function, what it does, its arguments; a|b: one of them
    "data check": (
        commands.data_check,
        "verify every task and corpus on this machine: counts, scores, encoding, checksums. "
        "The exit status is 1 if a file is wrong; missing files are listed, but do not change it.",
        "folder",
    ),
    "data fetch": (
        commands.data_fetch,
        "download a data set from the Hugging Face hub (or $HF_ENDPOINT), as a run that needs it does. "
        "It is written to $WHITENEDCSE_DATA (default: data).",
        "name",
    ),
    "report": (
        commands.report,
        "print the results of a run or a sweep, or a published table beside your own runs. --out is the "
        "page, FILE.html or a folder (default: report.html beside the runs); seeds.csv stands beside it.",
        "what --list --against --out --to",
    ),
    "dashboard": (
        commands.dashboard,
        "add a view with all charts to a Weights & Biases project. Each call adds one.",
        "project",
    ),
    "readout": (
        commands.readout,
        "find the layers, pooling and whitening that serve an encoder best, chosen on scored pairs. "
        "Nothing is trained. CORPUS is sampled, 20,000 rows unless told; --out writes the best encoder.",
        f"{ENCODER} corpus --pairs --out --sample --columns",
    ),
    "whiten fit": (
        commands.whiten_fit,
        "fit a whitening to the vectors that an encoder gives for a corpus of any size. OUT is a file, e.g. "
        "whitening.safetensors, which other commands read with --whiten.",
        f"{ENCODER} corpus out --kind --shrinkage --sample --columns --bf16",
    ),
    "export": (
        commands.export,
        "write an encoder and its whitening for another library, and check that its vectors agree",
        f"{ENCODER} out --to --whiten|--whiten-on --dim --sample --columns --bf16 --unit --no-verify",
    ),
    "encode": (
        commands.encode,
        "encode a corpus of any size into files of vectors. Row i of the files is for row i of INPUT. "
        "After an interruption, the same command resumes.",
        f"{ENCODER} input out --whiten --dim --dtype --to --shard --processes --engine --columns --bf16",
    ),
    "demo": (
        commands.demonstrate,
        "serve a web page to try an encoder: search, similarity, and a slider for whitening-k. "
        "10,000 rows of CORPUS are drawn unless told. It needs `pip install 'whitenedcse[demo]'`.",
        f"{ENCODER} corpus --columns --sample",
    ),
    "search build": (
        commands.search_build,
        "make an index of a corpus of any size",
        f"{ENCODER} corpus index --query-prompt --whiten --dim --factory --vectors --columns --bf16 --ids",
    ),
    "search add": (commands.search_add, "add a corpus to an index", "index corpus --columns --bf16 --ids"),
    "search query": (
        commands.search_query,
        "print the texts nearest to a query, or to each of a --file",
        "index text --file --columns --top --to",
    ),
}

if __name__ == "__main__":
    sys.exit(main())

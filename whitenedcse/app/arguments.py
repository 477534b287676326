"""Arguments that several commands take, declared once; the models and corpora that they or settings name."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from multiprocessing import parent_process
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from whitenedcse.console import lacking, say
from whitenedcse.data import sources
from whitenedcse.data.remote import is_url
from whitenedcse.files import DAMAGED, parsing

if TYPE_CHECKING:
    from whitenedcse.evaluation.suite import Plan
    from whitenedcse.model.embedder import Embedder
    from whitenedcse.model.head import Pooling
    from whitenedcse.model.layers import Source

LAST_PORT = 65_535
FORMS = ("table", "markdown", "csv", "latex")


class Parser(argparse.ArgumentParser):
    """A parser that raises ValueError where argparse would print its usage and exit."""

    def error(self, message: str) -> NoReturn:
        """Raise ValueError for arguments that are missing or have no such value."""
        raise ValueError(f"{self.prog}: {message}; {self.prog} --help lists what it takes")


def group(commands: Any, name: str, about: str) -> Any:
    """A command with subcommands, which are added to the returned object."""
    return subcommands(commands.add_parser(name, help=about, description=about))


def subcommands(parser: argparse.ArgumentParser) -> Any:
    """The subcommands of a parser, one of which is required."""
    return parser.add_subparsers(required=True, metavar="COMMAND", title="commands")


def encoder(parser: argparse.ArgumentParser) -> None:
    """Add SOURCE, --prompt, and the pooling of a plain encoder, an error for a SOURCE that has its own."""
    about = "a run, a checkpoint or another encoder: a directory, a URL (e.g. s3://...) or a hub id"
    parser.add_argument("source", metavar="SOURCE", help=about)
    kinds = ("cls", "mean", "max", "last", "pooler", "first_last")
    about = "the pooling of an encoder that does not define its own (default: cls, or last for a decoder)"
    parser.add_argument("--pooling", choices=kinds, help=about)
    about = "the layers to pool in such an encoder, 0 being the embedding layer (default: -1, the last)"
    parser.add_argument("--layers", nargs="+", type=int, metavar="LAYER", help=about)
    about = "a text put before each text that is encoded, e.g. 'passage: ' (default: SOURCE's own prompt)"
    parser.add_argument("--prompt", metavar="TEXT", help=about)


def corpus(parser: argparse.ArgumentParser, name: str = "corpus") -> None:
    """Add CORPUS or INPUT."""
    about = "a text, csv, tsv, jsonl or parquet file, a folder of them, a URL, a hub data set, or one of "
    parser.add_argument(name, metavar=name.upper(), help=about + ", ".join(sources.CORPORA))


def sample(parser: argparse.ArgumentParser, rows: int | None = None) -> None:
    """Add --sample."""
    about = f"the number of rows to draw at random from CORPUS (default: {rows or 'all'})"
    parser.add_argument("--sample", type=int, default=rows, metavar="N", help=about)


ONE_COLUMN = "the column of a table that holds the texts; join others to it in the file first"
COLUMNS = "the columns of a table that hold texts; the texts of each column are texts of their own"


def columns(parser: argparse.ArgumentParser, about: str = COLUMNS) -> None:
    """Add --columns."""
    parser.add_argument("--columns", nargs="+", default=(), metavar="NAME", help=about)


def bf16(parser: argparse.ArgumentParser) -> None:
    """Add --bf16."""
    parser.add_argument("--bf16", action="store_true", help="let the encoder compute in bfloat16: faster")


def whiten(parser: argparse.ArgumentParser) -> Any:
    """Add --whiten and --dim; returns the group of arguments that exclude --whiten."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--whiten", metavar="FIT", help="a file written by `whitenedcse whiten fit`")
    about = "the number of components of the whitening to keep (default: all)"
    parser.add_argument("--dim", type=int, metavar="K", help=about)
    return group


def form(parser: argparse.ArgumentParser) -> None:
    """Add --to, the format of a printed table."""
    parser.add_argument("--to", choices=FORMS, default="table", help="output format (default: table)")


def check_numbers(arguments: argparse.Namespace) -> None:
    """Raise ValueError for an option with a number that none of the commands can take."""
    for name in ("sample", "dim", "whiten_k", "shard", "processes", "top", "rows"):
        if (value := getattr(arguments, name, None)) is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} {value} must be 1 or more")
    if (port := getattr(arguments, "port", None)) is not None and not 1 <= port <= LAST_PORT:
        raise ValueError(f"--port {port} must be from 1 to {LAST_PORT}")


def say_unfinished(source: str) -> None:
    """Print one line where the model is of a run of train.py that has not ended."""
    from whitenedcse.distributed import is_first
    from whitenedcse.run import Run

    if not is_first() or parent_process():  # one of several processes, the first of which says it
        return
    run = Run.of(source)
    if run and run.best.is_dir() and run.trains and run.scores is None:
        from whitenedcse.model.checkpoint import noted_step

        at = "" if (step := noted_step(run.best)) is None else f" (step {step:,})"
        say(f"note: {run.path} has not finished; its best checkpoint so far{at} is used")


def opened(arguments: argparse.Namespace) -> Any:
    """The embedder of SOURCE with the prompts that the arguments ask for, on a GPU if there is one."""
    from whitenedcse.model.embedder import Embedder
    from whitenedcse.model.head import Pooling

    asked = None
    if arguments.pooling or arguments.layers:
        asked = Pooling.named(arguments.pooling or "cls", arguments.layers)
    embedder = Embedder.load(arguments.source, asked).to(device())
    say_unfinished(arguments.source)
    return embedder if arguments.prompt is None else embedder.replaced(prompt=arguments.prompt)


def device() -> str:
    """The device that a command computes on: a GPU if there is one, else the CPU."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def check_dim(arguments: argparse.Namespace, on: str | None = None) -> None:
    """Raise ValueError for --dim without a whitening."""
    if arguments.dim is not None and on is None and arguments.whiten is None:
        on = " or --whiten-on CORPUS" * hasattr(arguments, "whiten_on")
        raise ValueError(
            f"--dim {arguments.dim} keeps components of a whitening, but there is none: add --whiten FIT{on}"
        )


def ended(arguments: argparse.Namespace, on: str | None = None) -> Any:
    """The embedder of SOURCE, with the whitening of --whiten or one fitted to the corpus `on` at its end."""
    from whitenedcse.evaluation.postprocess import Postprocess
    from whitenedcse.serving.fit import fitted, whitened

    check_dim(arguments, on)
    k, fit = arguments.dim, Postprocess.load(arguments.whiten) if arguments.whiten else None
    embedder = opened(arguments)
    if k is not None and not 1 <= k <= embedder.width:
        raise ValueError(f"{k} components of width {embedder.width}: 1 to {embedder.width} can be kept")
    if on is not None:
        fit, corpus = Postprocess("whitening", k=k), sources.named(on, arguments.columns, arguments.sample)
        facts = fitted(fit, embedder, corpus, bf16=arguments.bf16)
        fit.provenance = {"source": arguments.source, **facts}
    return embedder if fit is None else whitened(embedder, fit, k)


def require_model(model: str | None) -> None:
    """Raise FileNotFoundError if there is no such model; a model of the hub is fetched."""
    if model is None:
        raise ValueError("no model: give model=DIR_OR_HUB_ID, or compare=[RUN,RUN]")
    if not is_function(model):
        from whitenedcse.model.encoder import folder

        folder(model)


def described(model: str, origin: Mapping[str, Any], embedder: Embedder | None) -> dict[str, Any]:
    """What scores.json tells about a model: the origin of its run, or where a plain encoder comes from."""
    own = {"encoder": embedder.encoder.provenance(model)} if embedder else {}
    return {"model": model, **origin, **own}


def is_function(model: str) -> bool:
    """Whether a model is named as module:function."""
    return ":" in model and not is_url(model) and not Path(model).exists()


def source(model: str, pooling: Pooling | None, prompt: str | None = None) -> Source:
    """The encoder that a setting names: a checkpoint (see `Embedder.load`), or a function as module:function.

    prompt: a text put before each sentence; None for the model's own, or for none where that is a function.
    A Sentence-Transformers directory with modules that are not read here is opened by that library.
    """
    from whitenedcse.model.layers import Source

    if is_function(model):
        module, _, name = model.partition(":")
        sys.path.insert(0, str(Path.cwd()))
        try:
            function = getattr(importlib.import_module(module), name)
            if not callable(function):
                raise AttributeError(f"{name} is a {type(function).__name__}, not a function")
            before = prompt or ""
            return Source(lambda texts: function([before + text for text in texts]), "its own", prompt=before)
        except (ImportError, AttributeError, ValueError) as error:  # ValueError: nothing before the colon
            raise ValueError(f"model={model}: {error}; MODULE:FUNCTION is imported from here") from error
    from whitenedcse.model.embedder import Embedder
    from whitenedcse.model.sentence_transformers import ForeignModules

    try:
        embedder = Embedder.load(model, pooling).to(device())
    except ForeignModules as error:
        try:
            from sentence_transformers import SentenceTransformer
        except ImportError:
            raise lacking(f"{error}; it", "sentence-transformers", "sentence-transformers") from error
        with parsing(Path(model), DAMAGED):
            theirs = SentenceTransformer(model, device=device())
            own = theirs.prompts.get(theirs.default_prompt_name or "") or ""
            before = own if prompt is None else prompt
            return Source(partial(theirs.encode, prompt=before), "its own", prompt=before)
    embedder.prompt = embedder.prompt if prompt is None else prompt
    return Source(embedder.encode, str(embedder.pooling), embedder, embedder.prompt)


def check_effects(config: Any, rows: Sequence[Any]) -> None:
    """Raise ValueError for k, fit, columns, pooling or layers where no row of an evaluation reads them."""
    kept, fits = {(row.map or {}).get("k") for row in rows}, {row.fit for row in rows} - {""}
    fitted = "a postprocess that is fitted, such as postprocess=whitening"
    unread = {
        "k": (config.k not in {None, *kept}, "postprocess=whitening, pca, pca_cor or prefix"),
        "fit": (config.fit not in {"target", *fits}, fitted),
        "columns": (config.columns and fits <= {"target", "year"}, f"a corpus, fit=CORPUS, of {fitted}"),
    }
    own, pooled = all(row.pooling for row in rows), "rows without their own, as of protocol=simcse"
    unread |= {name: (config.get(name) and own, pooled) for name in ("pooling", "layers")}
    for name, (idle, use) in unread.items():
        if idle:
            said = name if name == "pooling" else f"{name}={config[name]}"
            raise ValueError(f"{said} has no effect here: it is for {use}")


def check_row_widths(embedder: Embedder | None, rows: Iterable[Any]) -> None:
    """Raise ValueError for a row that keeps more components than the vectors of the encoder have."""
    for row in rows if embedder is not None else ():
        width = embedder.encoder.width if row.pooling else embedder.width  # type: ignore[union-attr]
        if (k := (row.map or {}).get("k")) is not None and not 1 <= k <= width:
            raise ValueError(
                f"k={k} components of vectors of width {width}: give k from 1 to {width}, or k=null for all; "
                f"the row {row.name} has it"
            )


def drawable(plan: Plan, figures: Sequence[str]) -> Plan:
    """The plan. Raises ValueError for figures where no task has scored pairs."""
    if figures and not plan.pairs:
        raise ValueError(f"figures={list(figures)}: a figure is of scored pairs, and no task here has them")
    return plan


def inputs(config: Any) -> tuple[list[Any], Any]:
    """The test tasks of a run and its dev pairs, or None; its encoders and corpus are looked for, too.

    Raises FileNotFoundError, which names all that is missing.
    """
    from whitenedcse.evaluation.tasks import subsets, task
    from whitenedcse.model.encoder import folder

    named = [node.path for node in (config.encoder, *config.terms.values()) if node.get("path")]
    find: list[Any] = [
        *(partial(folder, path) for path in named),
        *(partial(task, name) for name in config.tasks.names),
    ]
    dev = config.monitor.dev
    find += [partial(sources.located, config.data.corpus), partial(subsets, dev) if dev else lambda: None]
    *found, _, pairs = require(find)
    return found[len(named) :], pairs


def require(inputs: Iterable[Callable[[], Any]]) -> list[Any]:
    """What each call returns; if any finds nothing, one FileNotFoundError that names all that is missing."""
    found, missing = [], []
    for find in inputs:
        try:
            found.append(find())
        except FileNotFoundError as error:
            missing.append(str(error))
    if missing:
        raise FileNotFoundError("; and ".join(dict.fromkeys(missing)))
    return found

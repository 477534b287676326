"""What each command of `whitenedcse` does, but for train and evaluate: arguments -> exit status."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Any

from whitenedcse import distributed
from whitenedcse.console import Grid, interrupted, lacking, override, say, show
from whitenedcse.data import remote, sources
from whitenedcse.data.corpus import Corpus
from whitenedcse.distributed import is_first


def data_check(arguments: Namespace) -> int:
    """Print the state of tasks and corpora; returns 1 if any of it is wrong."""
    import rich

    from whitenedcse.evaluation import doctor

    with rich.get_console().status("reading"):
        findings = doctor.examined(arguments.folder)
    say(Grid("tasks and corpora", doctor.COLUMNS, doctor.lines(findings), right=range(1, 3)))
    for remark in doctor.remarks(findings):
        say(remark)
    return int(any(finding.verdict == "wrong" for finding in findings))


def data_fetch(arguments: Namespace) -> int:
    """Download a data set unless this machine has it; print where it is."""
    name = arguments.name
    say(f"{name}: {sources.present(name, sources.roots()) or sources.fetched(name)}")
    return 0


def report(arguments: Namespace) -> int:
    """Print the list of published tables, one of them beside our numbers, or a report on runs of train.py."""
    from whitenedcse.report import published

    what, known = arguments.what, published.tables()
    if arguments.list or not what:
        for key, table in known.items():
            say(f"{key}: {table['title']} ({table['source']})")
    elif what[0] in known:
        from whitenedcse.app.config import composed

        if arguments.out or arguments.against:
            raise ValueError(f"--out and --against are for a report on runs; {what[0]} is a published table")
        runs = what[1:] or (["outputs"] if Path("outputs").is_dir() else [])
        show([published.report(what[0], composed, runs)], arguments.to)
    else:
        report_runs(arguments)
    return 0


def report_runs(arguments: Namespace) -> None:
    """Print the tables of a run or a sweep, write its page, and print where the page is.

    Where a program reads the tables, what is not in them goes to the standard error.
    """
    from whitenedcse.report import page

    made, files = page.write(arguments.what, arguments.out, arguments.against)
    written = [f"written: {file}" for file in files]
    if arguments.to == "table":
        for part in [*made.parts, *written]:
            say(part)
    else:
        show(made.grids, arguments.to)
        sys.stderr.writelines(f"{line}\n" for line in [*made.verdict, *written])


def dashboard(arguments: Namespace) -> int:
    """Save the Weights & Biases view, and print where it is; $WANDB_ENTITY names a team."""
    from whitenedcse.training.dashboard import save

    say(f"view: {save(arguments.project)}")
    return 0


def opened(arguments: Namespace) -> Any:
    """The embedder of SOURCE with the prompts that the arguments ask for, on a GPU if there is one."""
    from whitenedcse.compute import device
    from whitenedcse.model.embedder import Embedder
    from whitenedcse.model.head import Pooling

    asked = None
    if arguments.pooling or arguments.layers:
        asked = Pooling.named(arguments.pooling or "cls", arguments.layers)
    embedder = Embedder.load(arguments.source, asked).to(device())
    if hasattr(arguments, "query_prompt"):
        from whitenedcse.serving.search import searching

        return searching(embedder, arguments.prompt, arguments.query_prompt)
    return embedder if arguments.prompt is None else embedder.replaced(prompt=arguments.prompt)


def check_dim(arguments: Namespace) -> None:
    """Raise ValueError for --dim without a whitening."""
    if arguments.dim is not None and not (arguments.whiten or getattr(arguments, "whiten_on", None)):
        raise ValueError(f"--dim {arguments.dim} keeps components of a whitening: add --whiten FIT")


def whitened(arguments: Namespace) -> Any:
    """The embedder of SOURCE, with the whitening of --whiten or one fitted to --whiten-on at its end."""
    from whitenedcse.evaluation.postprocess import Postprocess
    from whitenedcse.serving import fit as fits

    check_dim(arguments)
    embedder, on = opened(arguments), getattr(arguments, "whiten_on", None)
    if arguments.whiten:
        return fits.whitened(embedder, Postprocess.load(arguments.whiten), arguments.dim)
    if on is None:
        return embedder
    fit = Postprocess("whitening", k=arguments.dim)
    corpus = sources.named(on, arguments.columns, arguments.sample)
    facts = fits.fitted(fit, embedder, corpus, bf16=arguments.bf16)
    fit.provenance = {"source": arguments.source, **facts}
    return fits.whitened(embedder, fit, arguments.dim)


def readout(arguments: Namespace) -> int:
    """Print what is known of the readouts of an encoder; write the one that the pairs choose."""
    from whitenedcse.serving import readout

    out, more = arguments.out, {"sample": arguments.sample or 20_000, "columns": arguments.columns}
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    found = readout.readout(opened(arguments), arguments.corpus, arguments.pairs, **more)
    for grid in readout.grids(found):
        say(grid)
    files = readout.write(found, out) if out is not None else []
    if files:
        say(f"written: {', '.join(map(str, files))}")
    if found.choice is not None and found.choice.shown and files:
        model = files[-1]
        say(f"next: whitenedcse export {quote(str(model))} EXPORT --to sentence-transformers")
        say(f"      whitenedcse evaluate {override('model', model)}")
    return 0


def whiten_fit(arguments: Namespace) -> int:
    """Fit a whitening transform, and write it."""
    from whitenedcse.evaluation.postprocess import Postprocess
    from whitenedcse.serving.fit import fitted

    distributed.check_alone("whiten fit")
    fit = Postprocess(arguments.kind, shrinkage=arguments.shrinkage)
    corpus = sources.named(arguments.corpus, arguments.columns, arguments.sample)
    if not remote.is_url(arguments.out):  # before hours of work
        out = Path(arguments.out)
        if out.is_dir() or not out.parent.is_dir():
            raise FileNotFoundError(
                f"{out}: name a file in a directory that exists, as whitening.safetensors"
            )
        if out.is_file():
            Postprocess.load(out)  # refuses a file of another kind, which would be lost
    facts = fitted(fit, opened(arguments), corpus, bf16=arguments.bf16)
    fit.save(arguments.out, {"source": arguments.source, **facts})
    say(f"{fit.kind} of width {len(fit.mean)}, fitted to {facts['texts']:,} texts: {arguments.out}")
    return 0


def export(arguments: Namespace) -> int:
    """Write an export, and print the result of its verification."""
    from whitenedcse.model.sentence_transformers import EXPORT
    from whitenedcse.serving import export
    from whitenedcse.serving.fit import scaled

    verify, source = not arguments.no_verify, arguments.source
    with remote.published(arguments.out, mark=EXPORT) as out:
        export.check_target(out, arguments.to, verify)
        if arguments.to == "transformers" and (arguments.whiten or arguments.whiten_on):
            raise ValueError(export.PLAIN)  # before a whitening is fitted
        embedder = whitened(arguments)
        if arguments.unit is not None:
            embedder = scaled(embedder, unit=arguments.unit)
        facts = export.export(embedder, out, arguments.to, verify=verify, source=source)
    compared = "not verified"
    if verify:
        compared = f"no component differs by more than {facts['difference']:.1e} of its vector's length"
    say(f"{arguments.out}: for {arguments.to}, {compared}")
    return 0


def encode(arguments: Namespace) -> int:
    """Write the vectors, and print where they are."""
    from whitenedcse.serving.encode import Job, encoded, state

    check_dim(arguments)
    sources.check_columns(arguments.input, arguments.columns)
    corpus, out = sources.named(arguments.input, arguments.columns), arguments.out
    form: dict[str, Any] = {name: getattr(arguments, name) for name in ("to", "dtype", "shard", "bf16")}
    job = Job(partial(whitened, arguments), arguments.source, corpus, out, **form)
    with interrupted(lambda: f"{state(out)}, and the same command resumes" if is_first() else ""):
        encoded(job, arguments.processes, arguments.engine)
    say(f"{state(out)}: {out}")
    return 0


def search_build(arguments: Namespace) -> int:
    """Write an index, and print what it holds."""
    from whitenedcse.serving.search import build

    distributed.check_alone("search build")  # the ranks of `whitenedcse encode` write what --vectors takes
    asked: dict[str, Any] = {name: getattr(arguments, name) for name in ("factory", "vectors", "bf16")}
    with remote.published(arguments.index, mark=None) as out:
        corpus, ids = corpus_with_ids(arguments), bool(arguments.ids)
        n, width = build(out, whitened(arguments), corpus, ids=ids, **asked)
    say(f"{n:,} texts, vectors of width {width}: {arguments.index}")
    return 0


def search_add(arguments: Namespace) -> int:
    """Append to an index, and print how many texts it held and holds."""
    from whitenedcse.serving.search import extend

    if remote.is_url(arguments.index):
        raise ValueError(f"{arguments.index}: an index in a store is not added to; build it anew")
    asked = {"ids": bool(arguments.ids), "bf16": arguments.bf16}
    before, more = extend(Path(arguments.index), corpus_with_ids(arguments), **asked)
    say(f"{before:,} texts and {more:,} more: {arguments.index}")
    return 0


def corpus_with_ids(arguments: Namespace) -> Corpus:
    """The corpus with its column of texts, and then that of ids if there is one."""
    sources.check_columns(arguments.corpus, arguments.columns)
    if arguments.ids and not arguments.columns:
        raise ValueError(f"--ids {arguments.ids} goes with --columns, which name the texts")
    return sources.named(arguments.corpus, [*arguments.columns, *([arguments.ids] if arguments.ids else [])])


def search_query(arguments: Namespace) -> int:
    """Print the texts nearest to a query, or to each row of a file, which its number then names."""
    from whitenedcse.serving.search import Index

    columns, lines = ["query", "rank", "cosine", "id", "text"], list[list[str]]()
    for number, hits in enumerate(Index.load(arguments.index).query(queries(arguments), arguments.top)):
        for rank, hit in enumerate(hits, 1):
            text = hit.text if arguments.to != "table" else printable(hit.text)
            lines.append([str(number), str(rank), f"{hit.cosine:.4f}", hit.id, text])
    if arguments.file is None:  # a single query needs no number
        columns, lines = columns[1:], [line[1:] for line in lines]
    right = range(columns.index("id"))
    show([Grid(f"The nearest texts in {arguments.index}", columns, lines, right=right)], arguments.to)
    return 0


def queries(arguments: Namespace) -> list[str]:
    """The query, or those of the file. Raises ValueError unless one of both is given."""
    from whitenedcse.data.corpus import rows

    if (arguments.text is None) == (arguments.file is None):
        raise ValueError("one query is a TEXT, several are a --file: give one of the two")
    if arguments.file is not None:
        sources.check_columns(arguments.file, arguments.columns)
        return [text for (text,) in rows(sources.named(arguments.file, arguments.columns))]
    return [arguments.text]


def printable(text: str) -> str:
    """A text without control characters, for a terminal."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def demonstrate(arguments: Namespace) -> int:
    """Encode the sentences, and serve the page until Ctrl-C."""
    os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")  # read by its import: nothing leaves here
    try:
        from whitenedcse.serving.demo import Trial, page, serve
    except ImportError as error:
        raise lacking("the page", "gradio", "demo", error) from error
    from whitenedcse.data.corpus import texts

    corpus = sources.named(arguments.corpus, arguments.columns, arguments.sample or 10_000)
    trial = Trial(opened(arguments), list(dict.fromkeys(texts(corpus))))
    serve(page(trial, f"{arguments.source} on {arguments.corpus}"))
    return 0

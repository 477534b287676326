"""Text to batches against SimCSE's way through `datasets`: python -m bench.loading [--quick] [--json FILE]

On English Wikipedia sentences, wiki1m_like or wiki1m under WHITENEDCSE_DATA. Three tables:
opening            seconds until the first batch of a process that finds the cache; imports come before
batches            rows drawn at random, two passes each, from what was cached; the peer's rows lie in memory
tokenise + cache   the text file read, tokenised and written; the peers' time begins with their data loaded
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import transformers
from numpy.typing import NDArray

from bench import measure
from bench.encode import MODELS, corpus
from bench.measure import Variant
from whitenedcse.data.corpus import Corpus, fingerprint, read
from whitenedcse.data.datamodule import Batches, EpochOrder
from whitenedcse.data.tokens import TokenRows, tokenised

LENGTH, SIZE = 32, 64
Table = dict[str, Any]


def sentences(rows: int) -> list[str]:
    """So many lines of Wikipedia, taken evenly from all of them."""
    lines = [line for (line,) in read(Corpus(str(corpus())))[0]]
    return lines[:: max(1, len(lines) // rows)][:rows]


def written(lines: Sequence[str], path: Path) -> Path:
    """A text file of them."""
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8", newline="\n")
    return path


class SimCSE:
    """The official way, in our words: both copies of a sentence are tokenised, stored nested, and padded."""

    def __init__(self, path: Path, tokenizer: Any, folder: Path) -> None:
        self.tokenizer, self.folder = tokenizer, folder
        settings = {"data_files": str(path), "split": "train", "cache_dir": str(folder / "datasets")}
        self.text = datasets.load_dataset("text", **settings)

    def mapped(self, function: Callable[[dict[str, Any]], dict[str, Any]]) -> datasets.Dataset:
        """The text after a batched map whose result is written anew each time."""
        settings = {"batched": True, "remove_columns": ["text"], "load_from_cache_file": False}
        return self.text.map(function, cache_file_name=str(self.folder / "mapped.arrow"), **settings)

    def both(self, examples: dict[str, Any]) -> dict[str, Any]:
        """Sentences -> every feature of two copies of each, side by side."""
        texts, n = examples["text"], len(examples["text"])
        features = self.tokenizer(texts + texts, truncation=True, max_length=LENGTH)
        return {key: [[values[i], values[n + i]] for i in range(n)] for key, values in features.items()}

    def once(self, examples: dict[str, Any]) -> dict[str, Any]:
        """Sentences -> their ids."""
        plain = {"return_attention_mask": False, "return_token_type_ids": False}
        return dict(self.tokenizer(examples["text"], truncation=True, max_length=LENGTH, **plain))

    def collated(self, rows: list[dict[str, list[list[int]]]]) -> dict[str, Any]:
        """Nested features of n rows -> padded (n, 2, l) tensors."""
        flat = [{key: row[key][copy] for key in row} for row in rows for copy in range(2)]
        padded = self.tokenizer.pad(flat, padding=True, return_tensors="pt")
        return {key: values.view(len(rows), 2, -1) for key, values in padded.items()}


def tokenising(path: Path, simcse: SimCSE, options: argparse.Namespace) -> Table:
    """Text file -> cache, and the same in SimCSE's way."""

    def ours() -> None:
        with tempfile.TemporaryDirectory(dir=simcse.folder) as cache:
            tokenised(Corpus(str(path)), simcse.tokenizer, LENGTH, cache_dir=Path(cache))

    variants = {
        "SimCSE's map": Variant(lambda: simcse.mapped(simcse.both)),
        "map, once, ids only": Variant(lambda: simcse.mapped(simcse.once), "SimCSE's map"),
        "whitenedcse": Variant(ours, "SimCSE's map"),
    }
    times = measure.interleaved(variants, options.rounds, options.threads)
    return measure.table(f"tokenise + cache, {len(simcse.text):,} sentences", variants, times)


def assembling(tokens: TokenRows, simcse: SimCSE, options: argparse.Namespace) -> Table:
    """100 batches from what was cached, here and there."""
    nested = simcse.mapped(simcse.both)
    order = np.random.default_rng(0).permutation(min(len(nested), len(tokens)))
    everywhere = np.random.default_rng(1).permutation(len(tokens))
    turns = [order[i * SIZE : (i + 1) * SIZE] for i in range(min(100, len(order) // SIZE))]
    ours = [everywhere[i * SIZE : (i + 1) * SIZE] for i in range(len(turns))]
    fetched = [nested.__getitems__(turn.tolist()) for turn in turns]
    batches = Batches(tokens, passes=2)
    variants = {
        "SimCSE's collator": Variant(lambda: [simcse.collated(rows) for rows in fetched]),
        "the same, with its Arrow rows": Variant(
            lambda: [simcse.collated(nested.__getitems__(turn.tolist())) for turn in turns]
        ),
        "whitenedcse": Variant(lambda: [batches[turn] for turn in ours], "SimCSE's collator"),
    }
    times = measure.interleaved(variants, options.rounds, options.threads)
    return measure.table(f"{len(turns)} batches of {SIZE} rows, two passes", variants, times)


def opening(path: Path, tokenizer: Any, cache: Path, options: argparse.Namespace) -> Table:
    """From nothing to the first batch, by way of the note of the corpus; and what hashing it would add."""

    def opened() -> NDArray[np.int64]:
        tokens = tokenised(Corpus(str(path)), tokenizer, LENGTH, cache_dir=cache)
        sizes, rows = np.ones(len(tokens), dtype=np.int64), np.arange(len(tokens))
        index = next(iter(EpochOrder(sizes, SIZE, seed=1, rank=0, world=1, start=lambda: 0, rows=rows)))
        Batches(tokens, passes=2)[index]
        return index

    variants = {
        "open, order, first batch": Variant(opened),
        "hashing, if the file was touched": Variant(lambda: fingerprint(Corpus(str(path)))),
    }
    times = measure.interleaved(variants, options.rounds, options.threads)
    return measure.table("opening the cached corpus", variants, times)


def cached(path: Path, tokenizer: Any, cache: Path, threads: int) -> TokenRows:
    """The whole corpus tokenised once, and what it is made of."""
    now = measure.clock(threads)
    began = now()
    tokens = tokenised(Corpus(str(path)), tokenizer, LENGTH, cache_dir=cache)
    seconds, lengths = now() - began, np.diff(tokens.offsets)
    print(
        f"\n{len(tokens):,} sentences tokenised and cached in {seconds:.1f} s, "
        f"{1e6 * seconds / len(tokens):.1f} us each; {tokens.ids.nbytes + tokens.offsets.nbytes:,} bytes\n"
        f"{lengths.sum():,} tokens, mean {lengths.mean():.2f}, median {np.median(lengths):.0f}, "
        f"{100 * (lengths == LENGTH).mean():.1f} % at the cap of {LENGTH}; "
        f"a batch of {SIZE}: {SIZE * lengths.mean():.0f} +- {SIZE**0.5 * lengths.std():.0f} tokens",
        flush=True,
    )
    return tokens


def main() -> None:
    """All three tables."""
    options = measure.parser(__doc__).parse_args()
    rows, peer_rows = (50_000, 5_000) if options.quick else (1_000_000, 100_000)
    options.rounds = options.rounds or (3 if options.quick else 5)
    if options.threads == 1:
        os.environ |= {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
    transformers.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    lines = sentences(rows)
    beside = MODELS / "bert-base-uncased-tokenizer"
    name = beside if beside.is_dir() else "bert-base-uncased"
    tokenizer = transformers.AutoTokenizer.from_pretrained(name)
    here = measure.begin(options)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        whole = written(lines, folder / "whole.txt")
        part = written(lines[:: max(1, len(lines) // peer_rows)], folder / "part.txt")
        time.sleep(2.5)  # a file that was just written is hashed, and no note is made of it
        tokens = cached(whole, tokenizer, folder / "cache", options.threads)
        simcse = SimCSE(part, tokenizer, folder)
        tables = [
            opening(whole, tokenizer, folder / "cache", options),
            assembling(tokens, simcse, options),
            tokenising(part, simcse, options),
        ]
    measure.end(options, here, tables)


if __name__ == "__main__":
    main()

"""No byte of a finished project changes unnoticed: python -m bench.flips [--per-file 1000] [--quick]

A small project is made: a token cache, exports, an index, files of `encode`, a fitted transform,
and the best checkpoint of a run (not with --quick). Then, for each file, single bytes are flipped,
the file is cut short or emptied, or it changes places with another one; and it is read. Case by case it is

refused: a ValueError or OSError whose message names a file of the artefact and the way out
rebuilt: a cache or a file of `encode` was made again, and all that is read is as before, to the last bit
harmless: all that is read is as before, to the last bit
SILENT: anything else that is read    traceback: another kind of error    unclear: another kind of message

Exit status 1 if any case is of the last three kinds.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stdout
from functools import partial
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from whitenedcse.app.evaluate import source_of as source
from whitenedcse.compute import environment
from whitenedcse.console import Grid, say
from whitenedcse.data.corpus import Corpus
from whitenedcse.data.tokens import identity, tokenised
from whitenedcse.evaluation.postprocess import Postprocess
from whitenedcse.files import intact, writing
from whitenedcse.model import checkpoint
from whitenedcse.model.embedder import Embedder
from whitenedcse.model.head import Pooling, ProjectionHead
from whitenedcse.model.scratch import small_bert
from whitenedcse.serving.encode import Form, Job, arrays, encoded
from whitenedcse.serving.export import export, onnx_vectors
from whitenedcse.serving.search import Index, extend

ROOT = Path(__file__).parents[1]
KINDS = ("refused", "rebuilt", "harmless", "unclear", "traceback", "SILENT")
CURE = re.compile(r"again|repeat|delete|choose|name a new|make one")  # one of the words of a way out
RUN = ["encoder.width=16", "encoder.layers=1", "encoder.heads=2", "trainer.max_steps=20", "monitor.every=10"]
WORDS = "the a cat dog bird fish tree house river stone sees hears likes finds old new red blue small".split()
TEXTS = [" ".join(WORDS[i * j % len(WORDS)] for j in range(1, 3 + i % 7)) for i in range(1, 41)]


def tiny(folder: Path) -> Embedder:
    """A tiny random embedder, with the tokenizer of `TEXTS`; corpus.txt in the folder holds them."""
    with writing(folder / "corpus.txt", "w") as stream:
        stream.write("\n".join(TEXTS))
    torch.manual_seed(0)
    shape = {"vocabulary": 60, "layers": 2, "width": 8, "heads": 2}
    encoder = small_bert(corpus=str(folder / "corpus.txt"), columns=(), **shape)
    head = ProjectionHead(width=8, whitening=None, dense=True, position="before")
    pooling = Pooling(kind="mean", layers=[-1])
    return Embedder(encoder=encoder, pooling=pooling, head=head, embedding="encoder").eval()


class Artefact(NamedTuple):
    """What is written as one, in a folder, and a function that gives all that is read of it."""

    name: str
    path: Path
    read: Callable[[], Any]


def state(embedder: Embedder) -> Any:
    """All that decides an embedder's vectors, and vectors."""
    tensors = {name: value.numpy().copy() for name, value in embedder.state_dict().items()}
    facts = checkpoint.settings(embedder) | {"tokenizer": identity(embedder.encoder.tokenizer)}
    facts["config"] = embedder.encoder.backbone.config.to_dict()
    return [tensors, json.dumps(facts, default=str), embedder.encode(TEXTS[:5])]


def opened(path: Path) -> Any:
    """All that evaluate.py reads of a model."""
    embedder = source(str(path), None).embedder
    return "opened by another library" if embedder is None else state(embedder)


def caches(folder: Path, embedder: Embedder) -> Iterator[Artefact]:
    """A corpus tokenised."""
    corpus, tokenizer = Corpus(str(folder / "corpus.txt")), embedder.encoder.tokenizer
    os.utime(corpus.path, (1e9, 1e9))  # so that its fingerprint is noted

    def tokens() -> Any:
        got = tokenised(corpus, tokenizer, 16, cache_dir=folder / "tokens")
        arrays = [np.copy(got.ids), np.copy(got.offsets)]
        return [*arrays, got.columns, list(got.counts), got.truncated, dict(got.digests)]

    tokens()
    yield Artefact("token cache", folder / "tokens", tokens)


def exports(folder: Path, embedder: Embedder, *, onnx: bool) -> Iterator[Artefact]:
    """An export in each format."""
    parts = {"encoder": embedder.encoder, "pooling": embedder.pooling, "head": embedder.head}
    dense = Embedder(**parts, embedding="dense").eval()
    for to, exported in (("transformers", embedder), ("sentence-transformers", dense)):
        export(exported, out := folder / to, to, verify=False)
        yield Artefact(f"export, {to}", out, partial(opened, out))
    if onnx:
        export(embedder, out := folder / "onnx", "onnx", verify=False)
        yield Artefact("export, onnx", out, partial(computed, out, embedder))


def computed(path: Path, embedder: Embedder) -> Any:
    """The vectors of an ONNX export, after its files were compared: no command of ours reads one."""
    intact(path, "export it again")
    return onnx_vectors(embedder, path, TEXTS[:5])


def served(folder: Path, embedder: Embedder) -> Iterator[Artefact]:
    """An index of two parts, files of `encode` as they are read and as the job resumes, and a transform."""
    Index.build(embedder, TEXTS[:20]).save(folder / "index")
    extend(folder / "index", Corpus(str(folder / "corpus.txt")))
    yield Artefact("index", folder / "index", partial(indexed, folder / "index"))
    for to in ("npy", "parquet"):
        corpus = Corpus(str(folder / "corpus.txt"))
        job = Job(lambda: embedder, "tiny", corpus, str(folder / to), Form(to, shard=15))
        encoded(job, 1)
        yield Artefact(f"encode, {to}, read", folder / to, partial(shards, job))
        yield Artefact(f"encode, {to}, resumed", folder / to, partial(shards, job, resume=True))
    fit = Postprocess("whitening").fit(embedder.encode(TEXTS))
    (folder / "fit").mkdir()
    fit.save(folder / "fit" / "fit.safetensors", {"corpus": "corpus.txt"})
    yield Artefact("fitted transform", folder / "fit", partial(fitted, folder / "fit" / "fit.safetensors"))


def shards(job: Job, *, resume: bool = False) -> Any:
    """The files of `encode`, after the job was started again or not."""
    if resume:
        encoded(job, 1)
    return [np.copy(x) for x in arrays(job.out)]


def best(folder: Path) -> Iterator[Artefact]:
    """The best checkpoint of a run of train.py."""
    command = [sys.executable, str(ROOT / "train.py"), "run=train", *RUN]
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    path = folder / "outputs" / "train" / "best"
    yield Artefact("best/ of a run", path, partial(opened, path))


def project(folder: Path, *, quick: bool) -> list[Artefact]:
    """The artefacts of a small finished project, made here."""
    embedder = tiny(folder)
    onnx = not quick and all(map(find_spec, ("onnx", "onnxscript", "onnxruntime")))
    made = [*caches(folder, embedder), *exports(folder, embedder, onnx=onnx), *served(folder, embedder)]
    return made if quick else [*made, *best(folder)]


def indexed(path: Path) -> Any:
    """All that is read of an index."""
    index = Index.load(path)
    return [state(index.embedder), [list(hit) for hits in index.query(TEXTS, 99) for hit in hits]]


def fitted(path: Path) -> Any:
    """All that is read of a transform."""
    got = Postprocess.load(path)
    return [list(got.fitted), got.settings, got.provenance]


def same(a: Any, b: Any) -> bool:
    """Whether two readings are equal to the last bit."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return (a.dtype, a.shape) == (b.dtype, b.shape) and a.tobytes() == b.tobytes()
    return type(a) is type(b) and bool(a == b or (a != a and b != b))


def damages(draw: random.Random, content: bytes, others: list[Path], count: int) -> Iterator[bytes | Path]:
    """What becomes of a file, case by case: other content, or that of another file, which takes its own."""
    if content:
        yield b""
    for _ in range(count if content else count // 10):
        how = draw.random()
        if content and how < 0.8:
            at = draw.randrange(len(content))
            yield content[:at] + bytes([content[at] ^ draw.randrange(1, 256)]) + content[at + 1 :]
        elif content and how < 0.9:
            yield content[: draw.randrange(len(content))]
        else:
            yield draw.choice(others)


def read(path: Path) -> dict[Path, bytes]:
    """All files in a folder."""
    return {file: file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


def put_back(path: Path, files: dict[Path, bytes]) -> None:
    """Make a folder hold these files and no others."""
    now = read(path)
    for file in now.keys() - files.keys():
        file.unlink()
    for file, content in files.items():
        if now.get(file) != content:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)


def verdict(artefact: Artefact, due: Any, damaged: dict[Path, bytes]) -> str:
    """What reading gives, one of KINDS, and for the last three what was said."""
    try:
        with redirect_stdout(StringIO()):
            got = artefact.read()
    except (ValueError, OSError) as error:
        text = str(error)
        named = any(str(file) in text for file in read(artefact.path)) or str(artefact.path) in text
        return "refused" if named and CURE.search(text) else f"unclear: {text:.300}"
    except Exception as error:  # a traceback, which is what is looked for
        return f"traceback: {error!r:.300}"
    if not same(got, due):
        return "SILENT"
    return (
        "harmless"
        if all(file.exists() and file.read_bytes() == x for file, x in damaged.items())
        else "rebuilt"
    )


def studied(
    artefacts: list[Artefact], per_file: int, draw: random.Random
) -> Iterator[tuple[str, str, Counter[str]]]:
    """Damage each file in turn: artefact, file and how often each verdict came."""
    everything = [file for artefact in artefacts for file in read(artefact.path)]
    for artefact in artefacts:
        due, files = artefact.read(), read(artefact.path)
        for file, content in files.items():
            own = [other for other in files if other != file] or everything
            counts: Counter[str] = Counter()
            for damage in damages(draw, content, own if draw.random() < 0.7 else everything, per_file):
                damaged = {file: damage} if isinstance(damage, bytes) else exchanged(file, damage)
                before = {path: path.read_bytes() for path in damaged}
                if damaged != before:
                    write(damaged)
                    counts[verdict(artefact, due, damaged)] += 1
                    put_back(artefact.path, files)
                    write(before)
            yield artefact.name, str(file.relative_to(artefact.path)), counts


def exchanged(a: Path, b: Path) -> dict[Path, bytes]:
    """The contents of two files in each other's place."""
    return {a: b.read_bytes(), b: a.read_bytes()}


def write(files: dict[Path, bytes]) -> None:
    """Write these contents."""
    for file, content in files.items():
        file.write_bytes(content)


def tabled(rows: list[tuple[str, str, Counter[str]]]) -> Grid:
    """The table, a row a file."""
    cells = []
    for name, file, counts in rows:
        by_kind: Counter[str] = Counter()
        for said, count in counts.items():
            by_kind[said.partition(":")[0]] += count
        cells.append([name, file, *(str(by_kind[kind] or "") for kind in KINDS)])
    total = [str(sum(int(row[2 + i] or 0) for row in cells)) for i in range(len(KINDS))]
    return Grid("flips", ["artefact", "file", *KINDS], [*cells, ["all", "", *total]], right=set(range(2, 8)))


def main() -> None:
    """Make the project, damage it, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--per-file", type=int, default=1000, help="cases for each file; default: 1000")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="without the runs and the ONNX export")
    parser.add_argument("--json", type=Path, help="also write the counts to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        artefacts = project(Path(folder), quick=options.quick)
        rows = list(studied(artefacts, options.per_file, random.Random(options.seed)))
    bad = [(name, file, said) for name, file, counts in rows for said in counts if said not in KINDS[:3]]
    for line in bad:
        say(": ".join(line))
    say(tabled(rows))
    if options.json:
        facts = {"seed": options.seed, "per file": options.per_file, **environment()}
        options.json.write_text(json.dumps(facts | {"rows": rows}, indent=1, default=str) + "\n")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()

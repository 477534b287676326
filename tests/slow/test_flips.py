"""No byte of a finished project changes unnoticed.

Of every file of a token cache, exports, an index, files of `encode`, a fitted transform and a checkpoint,
single bytes are flipped, the file is cut short or emptied, or takes the place of another one. What is then
read is as before to the last bit, or refused with the name of the file and the way out.
"""

import json
import random
import re
from collections import Counter
from contextlib import redirect_stdout
from functools import partial
from io import StringIO

import numpy as np
import pytest
from encoders import SENTENCES

from whitenedcse.app.evaluate import source_of
from whitenedcse.data.corpus import Corpus
from whitenedcse.data.tokens import identity, tokenised
from whitenedcse.evaluation.postprocess import Postprocess
from whitenedcse.model import checkpoint
from whitenedcse.serving.encode import Job, arrays, encoded
from whitenedcse.serving.export import export
from whitenedcse.serving.search import Index, extend

CURE = re.compile(r"again|repeat|delete|choose|name a new|make one")  # one of the words of a way out


def plain(found):
    """What was read as nested lists of bytes and plain values, which == compares bit by bit."""
    if isinstance(found, dict):
        return [[key, plain(found[key])] for key in sorted(found)]
    if isinstance(found, list | tuple):
        return [plain(one) for one in found]
    return (str(found.dtype), found.shape, found.tobytes()) if isinstance(found, np.ndarray) else found


def state(embedder):
    """All that decides an embedder's vectors, and vectors."""
    tensors = {name: value.numpy() for name, value in embedder.state_dict().items()}
    facts = [checkpoint.settings(embedder), identity(embedder.encoder.tokenizer)]
    return [tensors, json.dumps(facts, default=str), embedder.encode(SENTENCES)]


def model(path):
    embedder = source_of(str(path), None).embedder
    return "opened by another library" if embedder is None else state(embedder)


def index(path):
    found = Index.load(path)
    return [state(found.embedder), [list(hit) for hits in found.query(SENTENCES, 99) for hit in hits]]


def transform(path):
    found = Postprocess.load(path / "fit.safetensors")
    return [list(found.fitted), found.settings, found.provenance]


def vectors(job, *, resume=False):
    if resume:
        encoded(job, 1)
    return list(arrays(job.out))


def project(folder, embedder):
    """Each artefact: its name, its folder, and a function that gives all that is read of it."""
    file = folder / "corpus.txt"
    file.write_text("\n".join(SENTENCES * 3))
    corpus = Corpus(str(file))

    def tokens():
        rows = tokenised(corpus, embedder.encoder.tokenizer, 16, cache_dir=folder / "tokens")
        return [np.copy(rows.ids), np.copy(rows.offsets), rows.columns, list(rows.counts), dict(rows.digests)]

    tokens()
    yield "tokens", folder / "tokens", tokens
    for to in ("transformers", "sentence-transformers"):
        export(embedder, folder / to, to, verify=False)
        yield to, folder / to, partial(model, folder / to)
    Index.build(embedder, SENTENCES).save(folder / "index")
    extend(folder / "index", corpus)
    yield "index", folder / "index", partial(index, folder / "index")
    for to in ("npy", "parquet"):
        encoded(job := Job(lambda: embedder, "tiny", corpus, str(folder / to), to, shard=10), 1)
        yield f"{to}, read", folder / to, partial(vectors, job)
        yield f"{to}, resumed", folder / to, partial(vectors, job, resume=True)
    (folder / "fit").mkdir()
    fit = Postprocess("whitening").fit(embedder.encode(SENTENCES))
    fit.save(folder / "fit" / "fit.safetensors", {"corpus": "corpus.txt"})
    yield "transform", folder / "fit", partial(transform, folder / "fit")
    embedder.save(folder / "best")
    yield "checkpoint", folder / "best", partial(model, folder / "best")


def contents(folder):
    return {file: file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


def restore(folder, files):
    for file in contents(folder).keys() - files.keys():
        file.unlink()
    for file, content in files.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)


def damages(draw, file, files, count):
    """What becomes of a file, and of another one that it changes places with."""
    content = files[file]
    for _ in range(count if content else 0):
        at = draw.randrange(len(content))
        yield {file: content[:at] + bytes([content[at] ^ draw.randrange(1, 256)]) + content[at + 1 :]}
    yield from ({file: part} for part in (b"", content[: len(content) // 2]) if part != content)
    if others := [other for other in files if files[other] != content]:
        other = draw.choice(others)
        yield {file: files[other], other: content}


def verdict(folder, read, due):
    """What reading gives: "as before", "refused", or what went wrong."""
    try:
        with redirect_stdout(StringIO()):
            return "as before" if plain(read()) == due else "SILENT"
    except (ValueError, OSError) as error:
        return "refused" if str(folder) in str(error) and CURE.search(str(error)) else f"unclear: {error}"


@pytest.mark.slow
def test_no_damage_of_any_file_changes_what_is_read(tmp_path, monkeypatch, embedder):
    monkeypatch.setenv("WHITENEDCSE_CACHE", str(tmp_path / "cache"))
    draw, counts = random.Random(0), Counter()
    for name, folder, read in project(tmp_path, embedder):
        due, files = plain(read()), contents(folder)
        for file in files:
            for damaged in damages(draw, file, files, 3):
                for path, content in damaged.items():
                    path.write_bytes(content)
                said = verdict(folder, read, due)
                assert said in ("as before", "refused"), (name, file.name, said)
                counts[said] += 1
                restore(folder, files)
    assert counts["refused"] > 150 and counts["as before"] > 30

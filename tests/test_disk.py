"""A disk that is full at any moment costs no work: one error, no draft, and earlier files as they were.

Each writer meets a file system of 1 MB on which only a part of the space that it takes is free. The slow
tests start the commands as bench/disk.py does, on 20 MB.
"""

import os
import signal
from functools import partial
from itertools import product

import numpy as np
import programs
import pytest
from encoders import SENTENCES, embedder_of

from bench.chaos import TINY, disk, fill
from bench.disk import CASES, Place, prepared, tried
from whitenedcse.data.corpus import Corpus
from whitenedcse.data.tokens import tokenised
from whitenedcse.evaluation.postprocess import Postprocess
from whitenedcse.files import Unwritten, checksum, held, seal
from whitenedcse.model import checkpoint, planes
from whitenedcse.model.encoding import Manner
from whitenedcse.model.plane_files import draft
from whitenedcse.report.figures import write_csv
from whitenedcse.run import Run
from whitenedcse.serving import bulk, exports, index
from whitenedcse.training.loggers import Metrics
from whitenedcse.training.trainer import Checkpoints

RNG = np.random.default_rng(0)
TEXTS = [f"{a} {b}" for a in SENTENCES for b in SENTENCES] * 8


@pytest.fixture
def small(tmp_path):
    with disk(tmp_path / "small", 1) as why:
        if why:
            pytest.skip(f"a file system of its own was refused: {why}")
        yield tmp_path / "small"


@pytest.fixture
def embedder(bert):
    return embedder_of(bert, kind="mean").eval()


def corpus(folder):
    (folder.parent / "corpus.txt").write_text("\n".join(TEXTS))
    return Corpus(str(folder.parent / "corpus.txt"))


def token_cache(folder, embedder, turn):
    tokenised(corpus(folder), embedder.encoder.tokenizer, 16 + turn, cache_dir=folder / "cache")


def vectors_of_layers(folder, embedder, turn):
    rows = [[2, 10 + turn, i, 3] for i in range(5, 43)] * 8
    names, every = np.array([planes.digest(row) for row in rows]), list(product(["cls", "mean"], [0, 1, 2]))
    with draft(folder / "vectors" / "e", every, names, embedder.encoder.width) as shard:
        planes.encode(embedder.encoder, rows, shard.planes, Manner())


def shard(to, folder, embedder, turn):
    if not turn:
        seal(folder, [])  # as `encode` begins
    facts = {"source": "", "embedding": {}, "embedder": "", "bf16": False, "input": "", "columns": []}
    facts |= {"fingerprint": "", "rows": 2000, "width": 32, "dtype": "float32", "shard": 1000, "threads": 1}
    bulk.write(folder, bulk.Manifest(to=to, **facts), turn, RNG.normal(size=(1000, 32)))


def new_index(folder, embedder, turn):
    index.write(
        folder / f"index-{turn}", embedder, [(text, str(i)) for i, text in enumerate(TEXTS)], bf16=False
    )


def part_of_an_index(folder, embedder, turn):
    held = index.Index.load(folder / "index") if turn else index.Index.build(embedder, TEXTS[:3])
    if turn:
        held.add(TEXTS)
    held.save(folder / "index")


def transform(folder, embedder, turn):
    Postprocess("zca").fit(RNG.normal(size=(300, 64))).save(folder / "map.safetensors", {})


def export(to, folder, embedder, turn):
    exports.export(embedder, folder / "out", exports.Wanted(to, "here", verify=False))


def best(folder, embedder, turn):
    checkpoint.save(embedder, folder / "best")


def checkpoint_of_training(folder, embedder, turn):
    content = {
        "global_step": turn,
        "state_dict": embedder.state_dict(),
        "optimizer_states": [embedder.state_dict()],
    }
    Checkpoints().save_checkpoint(content, folder / "checkpoints")


def items_and_scores(folder, embedder, turn):
    items = {str(i): RNG.normal(size=500) for i in range(10)}
    Run(folder).end({"rows": [list(range(turn, 3000))]}, items)


def table_of_a_figure(folder, embedder, turn):
    write_csv(folder / "layers.csv", [{"layer": i, "score": turn} for i in range(5000)])


WRITERS = [
    token_cache,
    vectors_of_layers,
    partial(shard, "npy"),
    partial(shard, "parquet"),
    new_index,
    part_of_an_index,
    transform,
    partial(export, "transformers"),
    partial(export, "sentence-transformers"),
    best,
    checkpoint_of_training,
    items_and_scores,
    table_of_a_figure,
]


def name_of(writer):
    return writer.__name__ if not isinstance(writer, partial) else f"{writer.func.__name__}-{writer.args[0]}"


def files(folder):
    return {
        str(path.relative_to(folder)): checksum(path) if path.is_file() else None
        for path in folder.rglob("*")
        if not path.name.endswith(("lock", "filler"))
    }


@pytest.mark.parametrize("writer", WRITERS, ids=name_of)
@pytest.mark.slow(but=5)
def test_a_full_disk_is_one_error_and_leaves_what_was_there(writer, small, embedder, capfd):
    writer(small, embedder, 0)
    before, takes = files(small), held(small)
    refused = 0
    for part in (0, 0.1, 0.5, 0.8):
        fill(small / "filler", int(part * takes))
        free = os.statvfs(small).f_bavail * 4096
        try:
            writer(small, embedder, 1)
        except Unwritten as error:
            refused += 1
            assert str(error).startswith(f"{small}/") and "\n" not in str(error)
            assert ": not written: No space left on device: " in str(error)
            assert f" {free:,} " in str(error)  # the draft is removed
            assert files(small) == before, part
        (small / "filler").unlink()
        if refused == 0 or files(small) != before:
            break  # there was space for it
    assert refused
    assert capfd.readouterr().err == ""
    writer(small, embedder, 1)


def test_a_line_of_metrics_csv_that_does_not_fit_is_no_line(small):
    log = Metrics(small / "metrics.csv", None)
    log.log_metrics({"loss": 1.0}, 1)
    fill(small / "filler", 4096)
    with pytest.raises(
        Unwritten, match=rf"^{small}/metrics.csv: not written: No space left on device: 0 bytes"
    ):
        for step in range(2, 10_000):
            log.log_metrics({"loss": 1 / step}, step)
    (small / "filler").unlink()
    assert [int(line["step"]) for line in log.lines()] == list(range(1, step))


def test_vectors_are_not_written_to_a_memory_map_without_space(small, embedder):
    """It would end this process by SIGBUS, so it is tried in a fork."""
    fill(small / "filler", 50_000)
    child = os.fork()
    if not child:
        try:
            vectors_of_layers(small, embedder, 0)
        except Unwritten:
            os._exit(2)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 2, signal.SIGBUS


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    folder = tmp_path_factory.mktemp("work")
    prepared(folder, programs.started, TINY[:3])
    return folder


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.slow
def test_a_command_on_a_full_disk_is_one_line_and_can_be_repeated(case, work, tmp_path):
    result = tried(Place(work, tmp_path / "disk", programs.started, TINY[:3]), case, [0.3])
    if result.skipped:
        pytest.skip(result.skipped)
    assert result.wrong == []

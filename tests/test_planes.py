"""Every plane is what one sentence alone gives, and nothing is encoded twice."""

import json
import os
import re

import numpy as np
import pytest
import torch
from conftest import SENTENCES, embedder_of

from whitenedcse.data.tokens import token_ids
from whitenedcse.model import planes as planes_module
from whitenedcse.model.planes import planes
from whitenedcse.ragged import rows as lists


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("WHITENEDCSE_CACHE", str(tmp_path))
    return tmp_path / "vectors"


@pytest.fixture
def rows(encoder):
    return token_ids(SENTENCES, encoder.tokenizer, 32)


@pytest.fixture
def counted(encoder, monkeypatch):
    """Sentences that the encoder was given."""
    given, forward = [], encoder.forward
    monkeypatch.setattr(
        encoder,
        "forward",
        lambda batch, *rest, **more: given.extend(lists(batch)) or forward(batch, *rest, **more),
    )
    return given


@torch.no_grad()
def alone(encoder, row, layer):
    encoder.eval()
    out = encoder.backbone(input_ids=torch.tensor([row]), output_hidden_states=True)
    return out.hidden_states[layer][0].numpy()


REDUCED = {"cls": lambda h: h[0], "mean": lambda h: h.mean(0), "max": lambda h: h.max(0)}
REDUCED["last"] = lambda h: h[-1]


def test_each_plane_is_what_a_sentence_alone_gives_from_memory_and_from_disk(encoder, rows):
    for _ in range(2):  # encoded, then read
        got = planes(encoder, rows, ["mean", "cls", "max", "last"], [0, 1, -1])
        assert got.layers == (0, 1, 3)
        for kind, reduced in REDUCED.items():
            for k, layer in enumerate(got.layers):
                naive = np.array([reduced(alone(encoder, row, layer)) for row in rows])
                assert got.kinds[kind][k] == pytest.approx(naive, abs=1e-5)
        assert got.lengths.tolist() == [len(row) for row in rows]


def test_nothing_is_encoded_twice(encoder, rows, counted):
    assert planes(encoder, rows + rows, ["mean"], [0, 1, 2, 3]).encoded == len(rows)
    assert sorted(counted) == sorted(rows)
    fewer = planes(encoder, rows[::-2], ["mean"], [3, 1])
    more = planes(encoder, [*rows[2:], [2, 9, 9, 3], *rows[:2]], ["mean"], [-1])
    assert (fewer.encoded, more.encoded) == (0, 1)
    assert sorted(counted) == sorted([*rows, [2, 9, 9, 3]])
    naive = [alone(encoder, row, 3).mean(0) for row in [*rows[2:], [2, 9, 9, 3], *rows[:2]]]
    assert more.kinds["mean"][0] == pytest.approx(np.array(naive), abs=1e-5)
    assert fewer.kinds["mean"][0] == pytest.approx(
        np.array([alone(encoder, row, 1).mean(0) for row in rows[::-2]]), abs=1e-5
    )


def test_the_same_sentences_in_another_order_come_in_that_order(encoder, rows):
    first = planes(encoder, rows, ["cls"], [1, 2])
    turned = planes(encoder, rows[::-1], ["cls"], [2])
    assert turned.encoded == 0
    assert (turned.kinds["cls"][0] == first.kinds["cls"][1, ::-1]).all()


def test_another_plane_or_other_weights_are_encoded_anew(encoder, rows):
    planes(encoder, rows, ["mean"], [1])
    assert planes(encoder, rows, ["cls"], [1]).encoded == len(rows)
    assert planes(encoder, rows, ["mean"], [2]).encoded == len(rows)
    with torch.no_grad():
        next(encoder.backbone.encoder.parameters()).add_(1e-3)
    changed = planes(encoder, rows, ["mean"], [1])
    assert changed.encoded == len(rows)
    assert changed.kinds["mean"][0][0] == pytest.approx(alone(encoder, rows[0], 1).mean(0), abs=1e-5)


def test_planes_in_bf16_are_kept_apart(encoder, rows):
    rounded = planes(encoder, rows, ["mean"], [1, 3], bf16=True)
    exact = planes(encoder, rows, ["mean"], [1, 3])
    assert (rounded.encoded, exact.encoded) == (len(rows), len(rows))
    naive = np.array([[alone(encoder, row, layer).mean(0) for row in rows] for layer in (1, 3)])
    assert exact.kinds["mean"] == pytest.approx(naive, abs=1e-5)
    assert rounded.kinds["mean"] == pytest.approx(naive, abs=1e-3)
    assert np.abs(rounded.kinds["mean"] - naive).mean() > 5e-6
    again = planes(encoder, rows, ["mean"], [1, 3], bf16=True)
    assert again.encoded == 0 and (again.kinds["mean"] == rounded.kinds["mean"]).all()


def test_averages_over_layers_with_and_without_the_extra_hundredth(encoder, rows):
    got = planes(encoder, rows, ["mean", "cls"], [0, 1, 3])
    naive = np.array([(alone(encoder, r, 1).mean(0) + alone(encoder, r, 3).mean(0)) / 2 for r in rows])
    assert got.average("mean", [1, 3]) == pytest.approx(naive, abs=1e-5)
    n = np.array([[len(r)] for r in rows])
    assert got.average("mean", [3, 1], extra=0.01) == pytest.approx(naive * n / (n + 0.01), abs=1e-5)
    assert (got.average("cls", [1], extra=0.01) == got.kinds["cls"][1]).all()


def test_a_damaged_or_half_written_shard_is_not_read(encoder, rows, cache):
    planes(encoder, rows, ["mean"], [1])
    (shard,) = next(cache.iterdir()).iterdir()
    (shard / "meta.json").write_text("{")
    assert planes(encoder, rows, ["mean"], [1]).encoded == len(rows)
    (shard,) = next(cache.iterdir()).iterdir()  # in its place again
    assert json.loads((shard / "meta.json").read_text())["kinds"] == ["mean"]


def test_a_kill_while_encoding_leaves_nothing_behind(encoder, rows, cache, monkeypatch):
    monkeypatch.setattr(planes_module, "pooled", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        planes(encoder, rows, ["mean"], [1])
    assert [path for folder in cache.iterdir() for path in folder.iterdir()] == []


def test_the_encoder_unused_for_longest_gives_way(encoder, rows, cache, monkeypatch):
    for name, age in (("old", 100), ("older", 200)):
        (cache / name).mkdir(parents=True)
        (cache / name / "x").write_bytes(bytes(1000))
        os.utime(cache / name, (1e9 - age, 1e9 - age))
    planes(encoder, rows, ["mean"], [1])
    mine = sum(f.stat().st_size for f in cache.rglob("*") if f.is_file() and f.name != "x")
    monkeypatch.setattr(planes_module, "LIMIT", mine + 1500)
    planes_module.prune(cache, keep=next(p for p in cache.iterdir() if "old" not in p.name))
    assert not (cache / "older").exists() and (cache / "old").exists()
    mine = next(p for p in cache.iterdir() if "old" not in p.name)
    os.utime(mine, (1, 1))
    assert planes(encoder, rows, ["mean"], [1]).encoded == 0
    assert mine.stat().st_mtime > 1e9  # used, so not the next to go
    monkeypatch.setattr(planes_module, "LIMIT", 0)
    planes_module.prune(cache, keep=mine)
    assert list(cache.iterdir()) == [mine]


def test_training_mode_is_put_back_and_dropout_is_off(encoder, rows):
    encoder.train()
    first = planes(encoder, rows, ["cls"], [3])
    assert encoder.training and encoder.backbone.training
    assert first.kinds["cls"][0][0] == pytest.approx(alone(encoder, rows[0], 3)[0], abs=1e-5)


def test_an_embedder_finished_from_planes_is_its_own_encoding(encoder, rows):
    embedder = embedder_of(encoder, kind="mean", layers=(1, -1), embedding="dense").eval()
    x = planes(encoder, rows, ["mean"], [1, -1]).average("mean", [1, 3])
    with torch.inference_mode():
        finished = embedder.finish(torch.from_numpy(x)).numpy()
    assert finished == pytest.approx(embedder.encode(SENTENCES), abs=1e-5)


def test_a_plane_that_is_not_finite_is_refused_by_its_sentence_and_not_kept(encoder, rows, cache):
    with torch.no_grad():
        encoder.backbone.embeddings.word_embeddings.weight[rows[2][2]] = torch.inf
    sentence = encoder.tokenizer.decode(rows[2])
    with pytest.raises(ValueError, match=f"NaN or infinity in the vector of {re.escape(repr(sentence))}"):
        planes(encoder, [rows[0], rows[2]], ["cls"], [1, 2])
    assert [path for path in cache.rglob("*") if path.is_file()] == []

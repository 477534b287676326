"""Every plane is what one sentence alone gives, and nothing is encoded twice."""

import os
import re
import shutil
import time

import numpy as np
import pytest
import torch
from encoders import SENTENCES, embedder_of

from whitenedcse.data.tokens import token_ids
from whitenedcse.model import plane_files
from whitenedcse.model import planes as planes_module
from whitenedcse.model.head import Pooling
from whitenedcse.model.planes import Source, Wanted, planes, vectors
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
    assert planes(encoder, rows[:1] * 3, ["mean"], [1]).counts() == "0; 3 were encoded before"
    fewer = planes(encoder, rows[::-2], ["mean"], [3, 1])
    more = planes(encoder, [*rows[2:], [2, 9, 9, 3], *rows[:2]], ["mean"], [-1])
    assert (fewer.encoded, more.encoded) == (0, 1)
    assert sorted(counted) == sorted([*rows, [2, 9, 9, 3]])
    naive = [alone(encoder, row, 3).mean(0) for row in [*rows[2:], [2, 9, 9, 3], *rows[:2]]]
    assert more.kinds["mean"][0] == pytest.approx(np.array(naive), abs=1e-5)
    assert fewer.kinds["mean"][0] == pytest.approx(
        np.array([alone(encoder, row, 1).mean(0) for row in rows[::-2]]), abs=1e-5
    )


def test_sentences_are_counted_as_encoded_now_before_or_as_others_of_their_tokens(encoder, rows):
    assert (
        planes(encoder, [rows[0], rows[1], rows[0]], ["mean"], [1]).counts()
        == "2; 1 has the tokens of another"
    )
    two = planes(encoder, [rows[1], *rows[2:4], *rows[2:4]], ["mean"], [1])
    assert two.counts() == "2; 1 was encoded before; 2 have the tokens of another"
    assert planes(encoder, rows[4:5], ["mean"], [1]).counts() == "1"


def test_the_same_sentences_in_another_order_come_in_that_order(encoder, rows):
    first = planes(encoder, rows, ["cls"], [1, 2])
    turned = planes(encoder, rows[::-1], ["cls"], [2])
    assert turned.encoded == 0
    assert (turned.kinds["cls"][0] == first.kinds["cls"][1][::-1]).all()


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
    assert np.stack(exact.kinds["mean"]) == pytest.approx(naive, abs=1e-5)
    assert np.stack(rounded.kinds["mean"]) == pytest.approx(naive, abs=1e-3)
    assert np.abs(np.stack(rounded.kinds["mean"]) - naive).mean() > 5e-6
    again = planes(encoder, rows, ["mean"], [1, 3], bf16=True)
    assert again.encoded == 0 and (again.kinds["mean"][1] == rounded.kinds["mean"][1]).all()


def test_averages_over_layers_with_and_without_the_extra_hundredth(encoder, rows):
    got = planes(encoder, rows, ["mean", "cls"], [0, 1, 3])
    naive = np.array([(alone(encoder, r, 1).mean(0) + alone(encoder, r, 3).mean(0)) / 2 for r in rows])
    assert got.average("mean", [1, 3]) == pytest.approx(naive, abs=1e-5)
    n = np.array([[len(r)] for r in rows])
    assert got.average("mean", [3, 1], extra=0.01) == pytest.approx(naive * n / (n + 0.01), abs=1e-5)
    assert (got.average("cls", [1], extra=0.01) == got.kinds["cls"][1]).all()


def flipped(data):
    return data[:-1] + bytes([data[-1] ^ 1])


@pytest.mark.parametrize("spoil", [flipped, lambda data: data[:-3], lambda _: b""])
@pytest.mark.parametrize("name", ["names.npy", "mean-1.npy", "digests.json"])
def test_a_damaged_shard_is_encoded_again_in_one_line(bert, rows, cache, capsys, name, spoil):
    first = planes(bert, rows, ["mean"], [1]).kinds["mean"][0].copy()  # its file is about to be cut short
    (shard,) = next(cache.iterdir()).iterdir()
    (shard / name).write_bytes(spoil((shard / name).read_bytes()) + b"," * (name == "digests.json"))
    capsys.readouterr()
    again = planes(bert, rows, ["mean"], [1])
    assert again.encoded == len(rows) and (again.kinds["mean"][0] == first).all()
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "again" in line]
    assert f"{shard / name} is not" in line
    assert planes(bert, rows, ["mean"], [1]).encoded == 0  # in its place again
    assert [path.name for path in cache.rglob(".*")] == []


def test_two_planes_that_changed_places_are_encoded_again(bert, rows, cache):
    first = planes(bert, rows, ["mean", "cls"], [1])
    (shard,) = next(cache.iterdir()).iterdir()
    (shard / "mean-1.npy").rename(shard / "x")
    (shard / "cls-1.npy").rename(shard / "mean-1.npy")
    (shard / "x").rename(shard / "cls-1.npy")
    again = planes(bert, rows, ["mean"], [1])
    assert again.encoded == len(rows) and (again.kinds["mean"][0] == first.kinds["mean"][0]).all()


def test_only_planes_that_are_read_are_checked(bert, rows, cache):
    planes(bert, rows, ["mean"], [1, 2])
    (shard,) = next(cache.iterdir()).iterdir()
    (shard / "mean-2.npy").write_bytes(b"")
    assert planes(bert, rows, ["mean"], [1]).encoded == 0
    assert planes(bert, rows, ["mean"], [2]).encoded == len(rows)


def test_a_shard_without_digests_is_encoded_again(bert, rows, cache):
    planes(bert, rows, ["mean"], [1])
    (shard,) = next(cache.iterdir()).iterdir()
    (shard / "digests.json").unlink()
    assert planes(bert, rows, ["mean"], [1]).encoded == len(rows)
    assert (shard / "digests.json").exists()


def test_what_another_process_removes_meanwhile_is_still_read(bert, rows, cache, monkeypatch):
    first = planes(bert, rows[:4], ["mean"], [1])
    (shard,) = next(cache.iterdir()).iterdir()
    encode = planes_module.encode
    monkeypatch.setattr(
        planes_module, "encode", lambda *given: (shutil.rmtree(cache / shard.parent.name), encode(*given))
    )
    got = planes(bert, rows, ["mean"], [1])
    assert got.encoded == len(rows) - 4
    assert (got.kinds["mean"][0][:4] == first.kinds["mean"][0]).all()
    assert got.kinds["mean"][0][5] == pytest.approx(alone(bert, rows[5], 1).mean(0), abs=1e-5)


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
    monkeypatch.setattr(plane_files, "LIMIT", mine + 1500)
    plane_files.prune(cache, keep=next(p for p in cache.iterdir() if "old" not in p.name))
    assert not (cache / "older").exists() and (cache / "old").exists()
    mine = next(p for p in cache.iterdir() if "old" not in p.name)
    os.utime(mine, (1, 1))
    assert planes(encoder, rows, ["mean"], [1]).encoded == 0
    assert mine.stat().st_mtime > 1e9  # used, so not the next to go
    monkeypatch.setattr(plane_files, "LIMIT", 0)
    plane_files.prune(cache, keep=mine)
    assert list(cache.iterdir()) == [mine]


def test_a_draft_that_a_kill_left_goes_after_a_day_and_one_that_is_written_stays(encoder, rows, cache):
    for name, age in ((".left", 2), (".written", 0.5)):
        (cache / name).mkdir(parents=True)
        (cache / name / "x").touch()
        for path in (cache / name / "x", cache / name):
            os.utime(path, (0, time.time() - 86_400 * age))
    planes(encoder, rows, ["mean"], [1])
    assert [path.name for path in cache.glob(".*")] == [".written"]


def test_training_mode_is_put_back_and_dropout_is_off(encoder, rows):
    encoder.train()
    first = planes(encoder, rows, ["cls"], [3])
    assert encoder.training and encoder.backbone.training
    assert first.kinds["cls"][0][0] == pytest.approx(alone(encoder, rows[0], 3)[0], abs=1e-5)


@pytest.mark.parametrize("many", [0, 2, 4])
def test_one_encoding_serves_every_pooling_and_layer_that_there_is_space_for(encoder, monkeypatch, many):
    source = Source(None, "", embedder_of(encoder, kind="mean", layers=(-1,)))
    one = 4 * (encoder.depth + 1) * len(SENTENCES) * encoder.width  # bytes of a kind in all layers
    monkeypatch.setattr(planes_module, "KEPT", many * one + one - 1)

    def encoded(kind, layers):
        wanted = Wanted([Pooling(kind=kind, layers=layers)], keep=True)
        return vectors(source, SENTENCES, wanted)[1].encoded

    assert encoded("mean", [-1]) == len(SENTENCES)
    again = {kind: encoded(kind, [0, 2]) + encoded(kind, [1]) for kind in ("mean", "cls", "max", "last")}
    every, kept = 2 * len(SENTENCES), ["mean", "cls", "max", "last"][:many]
    assert again == {kind: 0 if kind in kept else len(SENTENCES) if many else every for kind in again}
    if many == 4:
        assert encoded("pooler", [-1]) == 0


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

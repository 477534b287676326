"""best/ is whole whenever a kill comes: the old one, or the new one."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from conftest import embedder_of
from safetensors import SafetensorError
from torch.testing import assert_close

from whitenedcse.model import checkpoint
from whitenedcse.model.embedder import Embedder


class Killed(BaseException):
    """What a kill is to the code around it: nothing runs any more."""


@pytest.fixture
def best(bert, tmp_path):
    """A first checkpoint and an embedder that has learned since."""
    embedder = embedder_of(bert)
    checkpoint.save(embedder, tmp_path / "run" / "best")
    return tmp_path / "run" / "best", embedder, value(embedder)


def value(embedder):
    return float(embedder.encoder.backbone.get_input_embeddings().weight.detach().sum())


def learn(embedder):
    with torch.no_grad():
        embedder.encoder.backbone.get_input_embeddings().weight.add_(1.0)
    return value(embedder)


def killed_at(monkeypatch, number, step):
    """The `number`-th call of that kind (renames of a directory, or removals) is the last."""
    calls, real = [], getattr(*step)

    def call(*arguments, **more):
        calls.append(0)
        if len(calls) == number:
            raise Killed
        return real(*arguments, **more)

    monkeypatch.setattr(*step, call)


RENAME, REMOVE = (Path, "rename"), (shutil, "rmtree")


@pytest.mark.parametrize("name", ["run", "run/best"])
@pytest.mark.parametrize(
    ("step", "number", "wins"),
    [(RENAME, 1, "old"), (RENAME, 2, "old"), (REMOVE, 3, "new")],
    ids=["before the first rename", "between the renames", "before the old one is removed"],
)
def test_a_kill_while_it_is_replaced_loses_nothing(best, monkeypatch, tmp_path, name, step, number, wins):  # noqa: PLR0913
    directory, embedder, old = best
    new = learn(embedder)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        killed_at(patch, number, step)
        checkpoint.save(embedder, directory)
    assert value(Embedder.load(tmp_path / name)) == pytest.approx({"old": old, "new": new}[wins])


@pytest.mark.parametrize(("step", "number"), [(RENAME, 1), (RENAME, 2), (REMOVE, 3)])
def test_and_the_next_one_is_written_as_ever(best, monkeypatch, step, number):
    directory, embedder, _ = best
    learn(embedder)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        killed_at(patch, number, step)
        checkpoint.save(embedder, directory)
    last = learn(embedder)
    checkpoint.save(embedder, directory)
    assert value(Embedder.load(directory)) == pytest.approx(last)
    assert os.listdir(directory.parent) == ["best"]


def test_reading_removes_nothing_of_the_users(best):
    directory, _, _ = best
    mine = directory.with_name(".best.old")
    mine.mkdir()
    (mine / "mine").touch()
    Embedder.load(directory)
    Embedder.load(directory.parent)
    assert (mine / "mine").exists()


def test_all_of_it_is_on_the_disk_before_it_has_its_name(best, monkeypatch):
    directory, embedder, _ = best
    told, sync, rename = [], os.fsync, Path.rename

    def fsync(handle):
        told.append(os.readlink(f"/proc/self/fd/{handle}"))
        sync(handle)

    def renamed(path, target):
        told.append(f"{path} -> {Path(target).name}")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", renamed)
    checkpoint.save(embedder, directory)
    new = str(directory.with_name(".best.new"))
    first = told.index(f"{directory} -> .best.old")
    inside = {str(path).replace(str(directory), new) for path in directory.rglob("*")}
    assert inside | {new} <= set(told[:first])
    assert told[first:] == [f"{directory} -> .best.old", f"{new} -> best", str(directory.parent)]


def test_a_full_disk_leaves_the_old_one(best, monkeypatch):
    directory, embedder, old = best
    learn(embedder)

    def full(*_):
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(OSError, match=rf"^{directory}: not written: No space left on device: "):
        checkpoint.save(embedder, directory)
    assert value(Embedder.load(directory)) == old


@pytest.mark.parametrize("name", ["model.safetensors", "head.safetensors"])
def test_a_flipped_bit_is_named(best, name):
    directory, _, _ = best
    content = bytearray((directory / name).read_bytes())
    content[-3] ^= 1
    (directory / name).write_bytes(content)
    with pytest.raises(ValueError, match=rf'{directory / name} is damaged: .* delete "sha256" from'):
        Embedder.load(directory)
    settings = json.loads((directory / "whitenedcse.json").read_text())
    assert {"model.safetensors", "head.safetensors"} <= set(settings.pop("sha256"))
    (directory / "whitenedcse.json").write_text(json.dumps(settings))
    Embedder.load(directory)


@torch.no_grad()
def test_a_head_trained_with_an_absolute_eps_keeps_it(best, bert):
    """Checkpoints of before 23 November 2026 have no floor: their eps was an absolute variance."""
    directory, embedder, _ = best
    x = 1e-2 * torch.randn(2, 40, 16, generator=torch.Generator().manual_seed(0))
    embedder.head.train()(x)
    embedder.embedding = "head"
    checkpoint.save(embedder, directory)
    settings = json.loads((directory / "whitenedcse.json").read_text())
    now = Embedder.load(directory).finish(x[0])
    del settings["head"]["whitening"]["floor"]
    settings["head"]["whitening"]["eps"] = 1e-3
    (directory / "whitenedcse.json").write_text(json.dumps(settings))
    old, head = Embedder.load(directory).finish(x[0]), embedder.head.before
    values, u = torch.linalg.eigh(head.covariance.double() + 1e-3 * torch.eye(2))
    white = (x[0] - head.mean).double() @ torch.block_diag(*(u / values.sqrt().unsqueeze(-2) @ u.mT))
    assert_close(old.double(), torch.tanh(embedder.head.linear.double()(white)), atol=1e-5, rtol=0)
    assert (old - now).abs().max() > 1e-2

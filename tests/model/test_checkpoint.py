"""best/ is whole whenever a kill comes: the old one, or the new one."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from encoders import SENTENCES, embedder_of
from numpy.testing import assert_array_equal
from safetensors import SafetensorError

from whitenedcse import files
from whitenedcse.model import checkpoint
from whitenedcse.model.embedder import Embedder
from whitenedcse.model.encoder import pretrained
from whitenedcse.model.head import ProjectionHead


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
    [(RENAME, 1, "old"), (RENAME, 2, "old"), (REMOVE, 2, "new")],
    ids=["before the first rename", "between the renames", "before the old one is removed"],
)
def test_a_kill_while_it_is_replaced_loses_nothing(best, monkeypatch, tmp_path, name, step, number, wins):  # noqa: PLR0913
    directory, embedder, old = best
    new = learn(embedder)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        killed_at(patch, number, step)
        checkpoint.save(embedder, directory)
    assert value(Embedder.load(tmp_path / name)) == pytest.approx({"old": old, "new": new}[wins])


@pytest.mark.parametrize(("step", "number"), [(RENAME, 1), (RENAME, 2), (REMOVE, 2)])
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
    new = str(files.draft_of(directory))
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
    with pytest.raises(OSError, match=rf"No space left on device: '{directory}'$"):
        checkpoint.save(embedder, directory)
    assert value(Embedder.load(directory)) == old


def exchanged(directory):
    """Two words of the vocabulary change places."""
    file = directory / "tokenizer.json"
    content = json.loads(file.read_text())
    words = content["model"]["vocab"]
    words["cat"], words["dog"] = words["dog"], words["cat"]
    file.write_text(json.dumps(content))


def configured(name, value):
    def change(directory):
        file = directory / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {name: value}))

    return change


DAMAGES = {  # of files without weights: unchecked, each gives other vectors without a word
    "another number of layers": ("config.json", configured("num_hidden_layers", 2)),
    "another activation": ("config.json", configured("hidden_act", "relu")),
    "two words exchanged": ("tokenizer.json", exchanged),
}


@pytest.mark.parametrize("how", DAMAGES)
def test_a_changed_architecture_or_vocabulary_is_named(best, how):
    directory, _, _ = best
    name, change = DAMAGES[how]
    before = Embedder.load(directory).encode(SENTENCES)
    change(directory)
    with pytest.raises(ValueError, match=rf"{directory / name} is not as it was written"):
        Embedder.load(directory)
    with pytest.raises(ValueError, match=rf"{directory / name} is not as it was written"):
        pretrained(path=str(directory))  # encoder.path=
    (directory / "digests.json").unlink()  # an older checkpoint: it loads
    assert abs(Embedder.load(directory).encode(SENTENCES) - before).max() > 1e-4


def test_a_flipped_bit_in_any_file_is_named_and_so_is_a_missing_one(best):
    directory, _, _ = best
    files = sorted(path for path in directory.rglob("*") if path.is_file() and path.suffix != ".md")
    assert {"model.safetensors", "head.safetensors", "tokenizer.json"} < {path.name for path in files}
    for path in files:
        content = path.read_bytes()
        for other in (content[:-3] + bytes([content[-3] ^ 1]) + content[-2:], None):
            if other is None and path.name == "digests.json":
                continue  # that is an older checkpoint
            path.unlink() if other is None else path.write_bytes(other)
            with pytest.raises(ValueError, match="delete the digests.json|is damaged"):
                Embedder.load(directory)
        path.write_bytes(content)
    Embedder.load(directory)


def test_layers_that_are_not_trained_are_said_as_a_command_takes_them(bert, tmp_path):
    embedder_of(bert, kind="mean", layers=(1, -1)).save(tmp_path / "best")
    (note,) = checkpoint.others(Embedder(encoder=tmp_path / "best"), "best")
    assert note.endswith("keep it by pooling=mean 'pooling.layers=[1,-1]'")


@torch.no_grad()
def test_a_head_of_a_users_own_class_is_left_out_of_the_checkpoint(bert, tmp_path):
    class Own(ProjectionHead):
        def __init__(self):
            super().__init__(bert.width, whitening=None)
            self.scale = torch.nn.Parameter(torch.tensor(2.0))

    embedder = embedder_of(bert, head=Own()).eval()
    embedder.save(tmp_path / "best")
    again = Embedder.load(tmp_path / "best")
    assert type(again.head) is ProjectionHead and not list(again.head.parameters())
    assert_array_equal(again.encode(SENTENCES), embedder.encode(SENTENCES))
    for embedding in ("head", "dense"):
        with pytest.raises(ValueError, match=f"embedding={embedding} with a head of your own, .*Own, which"):
            embedder_of(bert, head=Own(), embedding=embedding)
        for part in ("before", "linear", "after"):  # put in by hand, in an embedder that there is
            embedder = embedder_of(bert, embedding=embedding)
            setattr(embedder.head, part, torch.nn.Sequential(torch.nn.Identity()))
            with pytest.raises(ValueError, match=f"embedding={embedding} .*Sequential, which a checkpoint"):
                embedder.save(tmp_path / part)
    with pytest.raises(
        ValueError, match="the head is a Identity, which must be a subclass of ProjectionHead"
    ):
        embedder_of(bert, head=torch.nn.Identity())


def test_a_checkpoint_of_a_version_before_is_refused_in_one_line_that_names_it(best):
    directory, _, _ = best
    (directory / "digests.json").unlink()
    content = json.loads((directory / "whitenedcse.json").read_text())
    del content["whitenedcse"]
    (directory / "whitenedcse.json").write_text(json.dumps(content))
    with pytest.raises(
        ValueError, match=r"whitenedcse.json was written by version 0\.2\.0 or before"
    ) as error:
        Embedder.load(directory)
    assert "\n" not in str(error.value) and checkpoint.noted_step(directory) is None

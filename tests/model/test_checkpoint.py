"""best/ is whole whenever a kill comes: the old one, or the new one."""

import json
import os
from pathlib import Path

import pytest
import torch
from encoders import SENTENCES, embedder_of
from numpy.testing import assert_array_equal

from whitenedcse.data.tokens import identity, token_ids
from whitenedcse.model import checkpoint
from whitenedcse.model.embedder import Embedder
from whitenedcse.model.encoder import pretrained
from whitenedcse.model.head import ProjectionHead


class Killed(BaseException):
    """What a kill is to the code around it: nothing runs any more."""


@pytest.fixture
def best(bert, tmp_path):
    """A checkpoint, its embedder, and what tells it from a later one."""
    embedder = embedder_of(bert)
    checkpoint.save(embedder, tmp_path / "run" / "best")
    return tmp_path / "run" / "best", embedder, value(embedder)


def value(embedder):
    return float(embedder.encoder.backbone.get_input_embeddings().weight.detach().sum())


def test_what_was_tokenised_before_leaves_no_trace(best):
    directory, embedder, _ = best
    sums = set()
    for before in (lambda words: None, identity, lambda words: token_ids(SENTENCES, words, 5)):
        before(embedder.encoder.tokenizer)
        checkpoint.save(embedder, directory)
        sums.add((directory / "digests.json").read_text())
    assert len(sums) == 1


def test_after_a_kill_between_two_renames_the_old_is_read_and_the_next_written(best, monkeypatch, tmp_path):
    """Any other moment of it is in tests/test_files.py."""
    directory, embedder, old = best
    embedder.encoder.backbone.get_input_embeddings().weight.data.add_(1.0)
    renames, rename = [], Path.rename

    def second_is_the_last(path, target):
        renames.append(target)
        if len(renames) == 2:
            raise Killed
        return rename(path, target)

    for name in ("run", "run/best"):
        with monkeypatch.context() as patch, pytest.raises(Killed):
            renames.clear()
            patch.setattr(Path, "rename", second_is_the_last)
            checkpoint.save(embedder, directory)
        assert value(Embedder.load(tmp_path / name)) == old
    checkpoint.save(embedder, directory)
    assert value(Embedder.load(directory)) == pytest.approx(value(embedder)) != old
    assert os.listdir(directory.parent) == ["best"]


def test_reading_removes_nothing_of_the_users(best):
    directory, _, _ = best
    mine = directory.with_name(".best.old")
    mine.mkdir()
    (mine / "mine").touch()
    Embedder.load(directory)
    Embedder.load(directory.parent)
    assert (mine / "mine").exists()


def test_a_flipped_bit_in_any_file_is_named_and_so_is_a_missing_one(best):
    directory, _, _ = best
    files = sorted(path for path in directory.rglob("*") if path.is_file() and path.suffix != ".md")
    assert {"model.safetensors", "head.safetensors", "tokenizer.json"} < {path.name for path in files}
    for path in files:
        content = path.read_bytes()
        for other in (content[:-3] + bytes([content[-3] ^ 1]) + content[-2:], content[:-9], b"", None):
            if other is None and path.name == "digests.json":
                continue  # that is an older checkpoint
            path.unlink() if other is None else path.write_bytes(other)
            for load in (Embedder.load, lambda place: pretrained(path=str(place))):  # encoder.path=
                with pytest.raises(ValueError, match=f"{path}.*(delete the digests.json|is damaged)"):
                    load(directory)
        path.write_bytes(content)
    Embedder.load(directory)


def test_a_pooling_that_is_not_trained_is_said_with_how_to_keep_it(bert, tmp_path):
    embedder_of(bert, kind="mean", layers=(1, -1)).save(tmp_path / "best")
    (note,) = checkpoint.notes_on_source(Embedder(encoder=tmp_path / "best"), "best")
    assert note.endswith("this run by cls over layers [-1]; pooling=own keeps that")


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
        with pytest.raises(ValueError, match=f"embedding={embedding} with a head of your own, .*Own, in no"):
            embedder_of(bert, head=Own(), embedding=embedding)
        for part in ("before", "linear", "after"):  # put in by hand, in an embedder that there is
            embedder = embedder_of(bert, embedding=embedding)
            setattr(embedder.head, part, torch.nn.Sequential(torch.nn.Identity()))
            with pytest.raises(ValueError, match=f"embedding={embedding} .*Sequential, in no checkpoint"):
                embedder.save(tmp_path / part)


def test_a_checkpoint_of_a_version_before_is_refused_in_one_line_that_names_it(best):
    directory, _, _ = best
    (directory / "digests.json").unlink()
    content = json.loads((directory / "whitenedcse.json").read_text())
    del content["whitenedcse"]
    (directory / "whitenedcse.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"whitenedcse.json was written by version 0\.2\.0 or") as error:
        Embedder.load(directory)
    assert "\n" not in str(error.value)

"""A checkpoint is whole or absent, its name says what it holds, and a damaged one is skipped."""

import hashlib
import re

import pytest
import torch
from torch.testing import assert_close

from whitenedcse.training.checkpoints import Checkpoints, newest, step_of

FILES = Checkpoints()


def content(step):
    weight = torch.randn(5000, generator=torch.Generator().manual_seed(step))
    return {"global_step": step, "state_dict": {"weight": weight}}


@pytest.fixture
def folder(tmp_path):
    """Three checkpoints were written here."""
    for step in (5, 9, 12):
        FILES.save_checkpoint(content(step), tmp_path / "run" / "checkpoints")
    return tmp_path / "run" / "checkpoints"


def found(folder):
    """The step of the newest good one, and what was said."""
    said = []
    path = newest(folder, said.append)
    return step_of(path), said


def test_a_name_says_the_steps_and_the_checksum(folder):
    for path in folder.iterdir():
        step, checksum = re.fullmatch(r"step-(\d{8})-([0-9a-f]{16})\.ckpt", path.name).groups()
        assert hashlib.sha256(path.read_bytes()).hexdigest().startswith(checksum)
        assert FILES.load_checkpoint(path)["global_step"] == int(step)


def test_the_newest_two_are_kept_and_the_newest_is_found_by_its_number(folder, tmp_path):
    assert newest(tmp_path / "never", print) is None
    assert sorted(map(step_of, folder.iterdir())) == [9, 12]
    assert found(folder) == (12, [])
    read = FILES.load_checkpoint(newest(folder, print))
    assert_close(read["state_dict"]["weight"], content(12)["state_dict"]["weight"], rtol=0, atol=0)
    for step in (99_999_999, 100_000_000):
        FILES.save_checkpoint(content(step), folder)
    assert found(folder) == (100_000_000, [])


def test_a_damaged_file_is_named_in_one_line_and_the_one_before_taken(folder):
    path = newest(folder, print)
    data = path.read_bytes()
    for content in (data[:-100], data[:50] + bytes([data[50] ^ 1]) + data[51:], b""):
        path.write_bytes(content)
        step, (line,) = found(folder)
        assert step == 9 and path.exists()
        assert line.startswith(f"{path} is damaged") and "\n" not in line
    for path in folder.iterdir():
        path.write_bytes(b"")
    with pytest.raises(ValueError, match=rf"every checkpoint is damaged; delete {folder.parent} to start"):
        newest(folder, print)

"""Whatever stops the writing of a file or folder, it holds the old content or the new; damage is named."""

import errno
import os
import pickle
import random
import resource
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from whitenedcse import files
from whitenedcse.files import DIGESTS, drafted, intact, naming, restore, seal, writing

OLD, NEW = b"old" * 1000, b"new!" * 100_000


@pytest.fixture
def path(tmp_path):
    (tmp_path / "file").write_bytes(OLD)
    return tmp_path / "file"


def test_the_new_content_takes_the_place_of_the_old_and_an_error_leaves_the_old(path):
    for error in (ValueError, KeyboardInterrupt, SystemExit):
        with pytest.raises(error), writing(path) as stream:
            stream.write(NEW)
            raise error
        assert path.read_bytes() == OLD and os.listdir(path.parent) == ["file"]
    with writing(path) as stream:
        stream.write(NEW)
        assert path.read_bytes() == OLD
    assert path.read_bytes() == NEW and os.listdir(path.parent) == ["file"]


DYING = """
import os, signal, sys
from pathlib import Path
from whitenedcse.files import drafted, writing
path = Path(sys.argv[1])
if path.is_file():
    with writing(path) as stream:
        stream.write(b"new!" * 50_000)
        stream.flush()
        os.kill(os.getpid(), signal.SIGKILL)
with drafted(path) as draft:
    (draft / "new").touch()
    os._exit(7)
"""


def test_a_process_that_dies_amid_it_leaves_the_old_content_and_its_draft_is_removed_later(path):
    (folder := path.with_name("folder")).mkdir()
    (folder / "old").touch()
    for target, status in ((path, -signal.SIGKILL), (folder, 7)):
        assert subprocess.run([sys.executable, "-c", DYING, str(target)], timeout=60).returncode == status
    assert path.read_bytes() == OLD and os.listdir(folder) == ["old"] and len(os.listdir(path.parent)) == 4
    with writing(path) as stream, drafted(folder) as draft:
        stream.write(NEW)
        (draft / "new").touch()
    assert path.read_bytes() == NEW and os.listdir(folder) == ["new"]
    assert sorted(os.listdir(path.parent)) == ["file", "folder"]


def test_the_draft_of_a_process_that_lives_is_its_own(path):
    other = path.with_name(f".file.{files.platform.node()}-1.new")  # process 1 always lives
    other.touch()
    with writing(path) as stream:
        stream.write(NEW)
    assert other.exists()


def test_content_is_on_the_disk_before_it_has_the_name_and_then_the_name_is(tmp_path, disk):
    with writing(tmp_path / "file"):
        pass
    assert disk == [f"{tmp_path}/draft", "file named", str(tmp_path)]
    disk.clear()
    with drafted(tmp_path / "out") as draft:
        (draft / "a").mkdir()
        (draft / "a" / "b").touch(0o600)
    inside = [f"{tmp_path}/draft{name}" for name in ("/a", "/a/b", "")]
    assert disk == [*inside, "out named", str(tmp_path)]
    assert (tmp_path / "out/a/b").stat().st_mode & 0o777 == (tmp_path / "out").stat().st_mode & 0o666


def test_a_folder_is_whole_before_it_takes_the_place_of_the_old(tmp_path):
    out = tmp_path / "a" / "out"
    for content in ("old", "new"):
        with drafted(out) as draft:
            (draft / content).touch()
            assert not (out / content).exists()
        assert os.listdir(out) == [content] and os.listdir(out.parent) == ["out"]
    with pytest.raises(ValueError), drafted(out) as draft:
        (draft / "newer").touch()
        raise ValueError
    assert os.listdir(out) == ["new"] and os.listdir(out.parent) == ["out"]
    (tmp_path / "link").symlink_to(out)
    with drafted(tmp_path / "link") as draft:
        (draft / "newest").touch()
    assert (tmp_path / "link").is_symlink() and os.listdir(out) == ["newest"]
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match=f"{tmp_path}/file"), drafted(tmp_path / "file"):
        pass


def test_after_a_kill_between_the_two_renames_of_a_folder_the_old_one_is_found(tmp_path):
    (tmp_path / ".out.old").mkdir()
    (tmp_path / ".out.old" / "old").touch()
    restore(tmp_path / "out")
    assert os.listdir(tmp_path / "out") == ["old"]
    (tmp_path / "out").rename(tmp_path / ".out.old")
    with pytest.raises(ValueError), drafted(tmp_path / "out"):
        raise ValueError
    assert os.listdir(tmp_path / "out") == ["old"] and os.listdir(tmp_path) == ["out"]


def saved(file):
    with file.open("wb") as stream:
        torch.save({"x": torch.ones(100_000)}, stream)


WRITERS = {  # of 100 KiB and more, each by the library that says in its own way that a disk is full
    "plain": lambda file: file.write_bytes(NEW),
    "torch": saved,
    "safetensors": lambda file: save_file({"x": np.ones(100_000)}, file),
    "numpy": lambda file: np.save(file, np.ones(100_000)),
    "npz": lambda file: np.savez(file, x=np.ones(100_000)),
}


@contextmanager
def small():
    """No file may grow beyond 100,000 bytes, which the system reports as it does a full disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("library", WRITERS)
def test_a_full_disk_is_said_in_the_systems_words_with_the_name_and_leaves_the_old(path, library):
    words = rf"^\[Errno \d+\] (File too large|No space left on device): '{path.parent}/(file|out)'$"
    with pytest.raises(OSError, match=words) as raised, small(), writing(path) as stream:
        stream.write(NEW)
    assert raised.value.errno in (errno.EFBIG, errno.ENOSPC)
    with pytest.raises(OSError, match=words), small(), drafted(path.with_name("out")) as draft:
        (draft / "before").touch()
        WRITERS[library](draft / "x.npz" if library == "npz" else draft / "x")
    assert path.read_bytes() == OLD and os.listdir(path.parent) == ["file"]
    for error in (ValueError("no"), RuntimeError("no"), PermissionError(errno.EACCES, "no")):
        with pytest.raises(type(error)) as raised, naming(path):
            raise error
        assert raised.value is error  # any other keeps its name


def test_a_sealed_folder_refuses_each_flipped_byte_truncation_swap_and_loss(tmp_path):
    (tmp_path / "deep").mkdir()
    contents = {"a.bin": bytes(range(256)), "deep/b.json": b'{"x": 1}\n', "empty": b"", "note.md": b"edited"}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    seal(tmp_path)
    (tmp_path / "note.md").write_bytes(b"another text")
    (tmp_path / "more").write_bytes(b"of somebody else")
    intact(tmp_path, "copy it again")
    held = {name: (tmp_path / name).read_bytes() for name in ["a.bin", "deep/b.json", "empty", DIGESTS]}
    draw = random.Random(0)
    for name, content in held.items():
        flips = [bytearray(content) for _ in range(20 if content else 0)]
        for flipped in flips:
            flipped[draw.randrange(len(flipped))] ^= 1 << draw.randrange(8)
        for other in [*map(bytes, flips), content[: len(content) // 2], b"x" + content, b"", None]:
            if other == content or (name == DIGESTS and other is None):  # a folder that is not sealed
                continue
            (tmp_path / name).unlink() if other is None else (tmp_path / name).write_bytes(other)
            with pytest.raises(ValueError, match=rf"^{tmp_path}/.*(copy it again|make it again)$"):
                intact(tmp_path, "copy it again")
        (tmp_path / name).write_bytes(content)
    intact(tmp_path, "copy it again")


def test_the_digest_of_a_file_is_that_of_its_bytes(path):
    assert files.checksum(path) == files.checksum(OLD) != files.checksum(NEW)
    assert files.sha256(path) == subprocess.check_output(["sha256sum", path], text=True).split()[0]


def test_a_line_that_a_kill_cut_short_is_no_line(path):
    path.write_text("step,x\n1,2.0\n2,3.")
    assert files.table(path) == [{"step": "1", "x": "2.0"}] and files.table(path.with_name("none")) == []
    path.write_text("step,x\n1,2.0,3\n")
    with pytest.raises(ValueError, match=f"^{path} is damaged"):
        files.table(path)


class Bomb:
    def __reduce__(self):
        return (Path.touch, (Path("ran"),))


def test_no_file_runs_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    makers = {
        "pickle": lambda stream: pickle.dump(Bomb(), stream),
        "torch": lambda stream: torch.save({"x": Bomb()}, stream),
        "numpy": lambda stream: np.save(stream, np.array([Bomb()]), allow_pickle=True),
        "npz": lambda stream: np.savez(stream, x=np.array([Bomb()])),
    }
    for made in makers.values():
        with open("file", "wb") as stream:
            made(stream)
        for read in (files.tensors, files.metadata, files.arrays, files.checkpoint):
            with suppress(ValueError):
                read(Path("file"))
        Path("file").rename("file.npy")
        with pytest.raises(ValueError):
            files.vectors(Path("file.npy"))
    assert not Path("ran").exists()

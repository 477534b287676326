"""Whatever stops the writing of a file, it holds all of the old content or all of the new."""

import errno
import json
import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from safetensors import SafetensorError

from whitenedcse import files
from whitenedcse.files import (
    DIGESTS,
    Unwritten,
    checksum,
    drafted,
    intact,
    needing_space,
    read_json,
    reserve,
    restore,
    seal,
    seal_too,
    whole_lines,
    write_json,
    writing,
)

OLD, NEW = b"old" * 1000, b"new!" * 100_000


@pytest.fixture
def path(tmp_path):
    (tmp_path / "file").write_bytes(OLD)
    return tmp_path / "file"


def test_the_new_content_takes_the_place_of_the_old(path):
    with writing(path) as stream:
        stream.write(NEW)
        assert path.read_bytes() == OLD
    assert path.read_bytes() == NEW
    assert os.listdir(path.parent) == ["file"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_error_leaves_the_old_content_and_no_draft(path, error):
    with pytest.raises(error), writing(path) as stream:
        stream.write(NEW)
        raise error
    assert path.read_bytes() == OLD
    assert os.listdir(path.parent) == ["file"]


DYING = """
import os, resource, signal, sys
from pathlib import Path
from whitenedcse.files import writing

path, how = Path(sys.argv[1]), sys.argv[2]
if how == "full":
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
with writing(path) as stream:
    stream.write(b"new!" * 50_000)
    stream.flush()
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "exit":
        os._exit(7)
    stream.write(b"new!" * 50_000)
"""


@pytest.mark.parametrize(("how", "status"), [("kill", -signal.SIGKILL), ("exit", 7), ("full", 1), ("not", 0)])
def test_a_process_that_dies_amid_it_leaves_the_old_content(path, how, status):
    """`full`: no file may grow beyond 100,000 bytes, which the system reports as it does a full disk."""
    here = {"PYTHONPATH": str(Path(__file__).parents[1])}
    ended = subprocess.run(
        [sys.executable, "-c", DYING, str(path), how], env=os.environ | here, capture_output=True, timeout=60
    )
    assert ended.returncode == status
    assert path.read_bytes() == (NEW if status == 0 else OLD)
    assert how in ("kill", "exit") or os.listdir(path.parent) == ["file"]
    with writing(path) as stream:  # a draft of the dead is no obstacle
        stream.write(NEW)
    assert path.read_bytes() == NEW
    assert os.listdir(path.parent) == ["file"]


def test_the_content_is_on_the_disk_before_it_has_the_name_and_then_the_name_is(path, monkeypatch):
    told, sync, replace = [], os.fsync, os.replace

    def fsync(handle):
        target = Path(os.readlink(f"/proc/self/fd/{handle}"))
        told.append(("sync", target.name, target.stat().st_size if target.is_file() else None))
        sync(handle)

    def replaced(source, target):
        told.append(("name", Path(target).name, None))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replaced)
    with writing(path) as stream:
        stream.write(NEW)
    assert told == [("sync", "file.new", len(NEW)), ("name", "file", None), ("sync", path.parent.name, None)]


def test_a_folder_is_whole_before_it_takes_the_place_of_the_old(tmp_path):
    out = tmp_path / "a" / "out"
    for content in ("old", "new"):
        with drafted(out) as draft:
            (draft / content).touch()
            assert not (out / content).exists()
        assert os.listdir(out) == [content]
    assert os.listdir(out.parent) == ["out"]


def test_a_link_to_a_folder_stays_one_and_what_it_names_is_replaced(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to("disk")
    for content in ("one", "two", "three"):
        with drafted(tmp_path / "out") as draft:
            (draft / "x").write_text(content)
        assert (tmp_path / "out").is_symlink() and (tmp_path / "disk" / "x").read_text() == content
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "out"]


def test_an_error_leaves_the_old_folder_and_no_draft(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").touch()
    with pytest.raises(KeyboardInterrupt), drafted(tmp_path / "out") as draft:
        (draft / "new").touch()
        raise KeyboardInterrupt
    assert os.listdir(tmp_path) == ["out"] and os.listdir(tmp_path / "out") == ["old"]


def test_after_a_kill_between_the_two_renames_of_a_folder_the_old_one_is_found(tmp_path):
    for left in (".out.old", ".out.new"):
        (tmp_path / left).mkdir()
        (tmp_path / left / left).touch()
    restore(tmp_path / "out")
    assert os.listdir(tmp_path / "out") == [".out.old"]
    with drafted(tmp_path / "out") as draft:
        assert os.listdir(draft) == []  # not what the killed had written
    assert os.listdir(tmp_path) == ["out"]


def test_an_error_after_such_a_kill_leaves_the_old_folder(tmp_path):
    (tmp_path / ".out.old").mkdir()
    with pytest.raises(OSError), drafted(tmp_path / "out"):
        raise OSError
    assert os.listdir(tmp_path) == ["out"]


def test_json_is_written_whole_or_not(tmp_path):
    write_json(tmp_path / "a.json", {"x": [1.5, None, "ä"]})
    with pytest.raises(TypeError):
        write_json(tmp_path / "a.json", {"x": object()})
    assert json.loads((tmp_path / "a.json").read_text()) == {"x": [1.5, None, "ä"]}
    assert os.listdir(tmp_path) == ["a.json"]


def test_a_part_of_a_folder_is_sealed_with_what_is_yet_to_be_written(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(name.encode())
    seal(tmp_path, ["a", "none"], {"c": b"coming"})
    intact(tmp_path, "copy it", ["a", "none"])
    with pytest.raises(ValueError, match="c is missing"):
        intact(tmp_path, "copy it")
    (tmp_path / "c").write_bytes(b"coming")
    intact(tmp_path, "copy it")
    (tmp_path / "b").write_bytes(b"other")
    intact(tmp_path, "copy it")
    with pytest.raises(ValueError, match="b is not as it was written.*; copy it"):
        intact(tmp_path, "copy it", ["b"])  # a name that digests.json lost


@pytest.mark.parametrize("content", [b"", b'{"x": 1', b'{"x": "\xff"}'])
def test_json_that_is_none_is_named(path, content):
    path.write_bytes(b'{"x": "\xc3\xa4"}')
    assert read_json(path) == {"x": "ä"}
    path.write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(f"{path} is not JSON (")):
        read_json(path)


def test_a_line_that_a_kill_cut_short_is_no_line(path):
    path.write_bytes("ä\n2\n3".encode())
    assert whole_lines(path) == ["ä", "2"]
    assert whole_lines(path.with_name("none")) == []


def test_a_folder_is_put_on_the_disk_with_all_that_is_in_it(tmp_path, monkeypatch):
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/b/c").touch()
    seen = []
    monkeypatch.setattr(files, "settle", seen.append)
    files.settle_all(tmp_path / "a")
    assert sorted(seen) == [tmp_path / "a", tmp_path / "a/b", tmp_path / "a/b/c"]


@pytest.mark.skipif(os.name != "posix", reason="modes are those of POSIX")
def test_who_may_open_a_folder_may_read_its_files(tmp_path):
    with drafted(tmp_path / "a") as draft:
        (draft / "b").mkdir()
        (draft / "b" / "weights").write_bytes(b"")
        (draft / "b" / "weights").chmod(0o600)  # as safetensors does
    (tmp_path / "usual").touch()
    assert (tmp_path / "a/b/weights").stat().st_mode == (tmp_path / "usual").stat().st_mode


def several(work, count):
    """Run `work(i)` in threads that start together, which file locks keep apart as they do processes."""
    start = threading.Barrier(count)

    def one(i):
        start.wait()
        work(i)

    with ThreadPoolExecutor(count) as pool:
        list(pool.map(one, range(count)))


def test_several_who_write_one_file_leave_it_whole_and_nothing_else(tmp_path):
    for _ in range(10):
        several(lambda i: write_json(tmp_path / "a.json", [i] * (1000 * i)), 6)
        content = read_json(tmp_path / "a.json", list)
        assert content == content[:1] * (1000 * content[0] if content else 0)
        assert os.listdir(tmp_path) == ["a.json"]


def test_several_who_write_one_folder_leave_it_whole_and_nothing_else(tmp_path):
    def written(i):
        with drafted(tmp_path / "out") as draft:
            for name in "abc":
                (draft / name).write_text(str(i))

    for _ in range(10):
        several(written, 6)
        (value,) = {(tmp_path / "out" / name).read_text() for name in "abc"}
        assert os.listdir(tmp_path) == ["out"] and sorted(os.listdir(tmp_path / "out")) == ["a", "b", "c"]


def test_a_reader_never_takes_the_folder_back_from_its_writer(tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "before").touch()
    rename, reader = Path.rename, threading.Thread(target=restore, args=[tmp_path / "out"])

    def renamed(self, target):
        moved = rename(self, target)
        if target.name == ".out.old":
            reader.start()
            reader.join(0.1)  # it waits for the writer
        return moved

    monkeypatch.setattr(Path, "rename", renamed)
    with drafted(tmp_path / "out") as draft:
        (draft / "a").touch()
    reader.join()
    assert os.listdir(tmp_path) == ["out"] and os.listdir(tmp_path / "out") == ["a"]


def test_a_writer_that_does_not_end_is_named_and_keeps_its_draft(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "SECONDS", 0.05)
    with drafted(tmp_path / "out") as draft:
        (draft / "a").touch()
        with pytest.raises(ValueError, match=r"out.new is being written by another process; wait for it"):
            with drafted(tmp_path / "out"):
                pass
    assert os.listdir(tmp_path / "out") == ["a"]
    with writing(tmp_path / "file") as stream:
        stream.write(OLD)
        with pytest.raises(ValueError, match=r"file.new is being written"), writing(tmp_path / "file"):
            pass
    assert (tmp_path / "file").read_bytes() == OLD


def test_a_lock_on_what_was_renamed_meanwhile_is_not_taken(tmp_path, monkeypatch):
    fcntl = pytest.importorskip("fcntl")
    flock, path, calls = fcntl.flock, tmp_path / "draft", []

    def late(handle, how):
        if not calls:
            path.rename(tmp_path / "written")
        calls.append(handle)
        return flock(handle, how)

    monkeypatch.setattr(fcntl, "flock", late)
    monkeypatch.setattr(files, "SECONDS", 0.05)
    with files.alone(path, Path.touch):
        assert len(calls) == 2 and path.exists()
        with pytest.raises(ValueError, match="is being written"), files.alone(path, Path.touch):
            pass


def test_files_are_added_to_the_digests_by_several(tmp_path):
    seal(tmp_path)

    def added(i):
        (tmp_path / f"{i}").write_text(str(i))
        seal_too(tmp_path, {f"{i}": checksum(tmp_path / f"{i}")})

    several(added, 6)
    intact(tmp_path, "copy it again", map(str, range(6)))
    (tmp_path / "4").write_text("5")
    with pytest.raises(ValueError, match=r"/4 is not as it was written.*copy it again"):
        intact(tmp_path, "copy it again", ["4"])
    intact(tmp_path, "copy it again", ["3"])


def test_a_sealed_folder_refuses_each_flipped_byte_truncation_swap_and_loss(tmp_path):
    (tmp_path / "deep").mkdir()
    contents = {
        "a.bin": bytes(range(256)),
        "deep/b.json": b'{"x": 1}\n',
        "empty": b"",
        "note.md": b"edited later",
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    seal(tmp_path)
    intact(tmp_path, "copy it again")
    (tmp_path / "note.md").write_bytes(b"another text")
    (tmp_path / "more").write_bytes(b"of somebody else")
    intact(tmp_path, "copy it again")
    held = {name: (tmp_path / name).read_bytes() for name in ["a.bin", "deep/b.json", "empty", DIGESTS]}
    draw = random.Random(0)
    for name, content in held.items():
        file = tmp_path / name
        flips = [bytearray(content) for _ in range(20 if content else 0)]
        for flipped in flips:
            flipped[draw.randrange(len(flipped))] ^= 1 << draw.randrange(8)
        others = [*map(bytes, flips), content[: len(content) // 2], b"x" + content, held["a.bin"][::-1]]
        for other in [*others, b"", None]:
            if other == content or (name == DIGESTS and other is None):  # a folder that is not sealed
                continue
            file.unlink() if other is None else file.write_bytes(other)
            with pytest.raises(ValueError, match=r"copy it again|is not JSON"):
                intact(tmp_path, "copy it again")
        file.write_bytes(content)
    intact(tmp_path, "copy it again")


def of_torch():
    try:
        raise OSError(errno.ENOSPC, "No space left on device")
    except OSError as error:
        raise RuntimeError("PytorchStreamWriter failed writing file") from error


def of_a_handler():
    try:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")
    except OSError:
        raise RuntimeError("unexpected pos 64 vs 0")  # noqa: B904


def of_rust():
    raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


def of_numpy():
    raise OSError("128000 requested and 41952 written")


def of_the_system():
    raise OSError(errno.EFBIG, "File too large")


FULL = {of_torch: "No space left", of_a_handler: "Disk quota exceeded", of_rust: "No space left"}
FULL |= {of_numpy: "No space left", of_the_system: "File too large"}


@pytest.mark.parametrize(("full", "said"), FULL.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_a_full_disk_is_one_error_whichever_call_tells_of_it(path, full, said):
    free = shutil.disk_usage(path.parent).free
    with pytest.raises(Unwritten, match=f"^{path}: not written: {said}") as one, writing(path) as stream:
        stream.write(NEW)
        full()
    assert "more are needed" not in str(one.value)
    with pytest.raises(
        Unwritten, match=f"{2 * free:,} bytes or more are needed, [0-9,]+ are free; free some space"
    ):
        with drafted(path.with_name("out"), 2 * free) as draft:
            (draft / "half").write_bytes(NEW)
            full()
    assert path.read_bytes() == OLD and os.listdir(path.parent) == ["file"]
    assert isinstance(pickle.loads(pickle.dumps(one.value)), Unwritten)


OTHERS = [ValueError("no"), RuntimeError("no"), KeyboardInterrupt(), PermissionError(errno.EACCES, "no")]


@pytest.mark.parametrize("error", OTHERS, ids=repr)
def test_any_other_error_keeps_its_name(path, error):
    with pytest.raises(type(error)) as raised, writing(path):
        raise error
    assert raised.value is error


def test_an_error_within_a_draft_names_the_file_as_it_would_have_been_called(tmp_path):
    with pytest.raises(Unwritten) as raised, drafted(tmp_path / "out") as draft, writing(draft / "a.bin"):
        (draft / "whole").write_bytes(NEW)
        of_numpy()
    assert raised.value.path == tmp_path / "out" / "a.bin"
    assert raised.value.needed > len(NEW)  # what lies beside it is needed too
    with pytest.raises(Unwritten) as raised, drafted(tmp_path / "out"), writing(tmp_path / "other"):
        of_numpy()
    assert raised.value.path == tmp_path / "other" and os.listdir(tmp_path) == []


def test_what_is_reserved_is_on_the_disk(tmp_path):
    file = tmp_path / "x.npy"
    np.lib.format.open_memmap(file, "w+", np.float32, (100, 1000))
    assert file.stat().st_blocks * 512 < 100_000
    reserve(file)
    assert file.stat().st_blocks * 512 >= file.stat().st_size > 400_000
    assert np.load(file).sum() == 0


def test_without_a_draft_nothing_is_removed(path):
    with pytest.raises(Unwritten, match=f"^{path}: not written"), needing_space(path):
        of_numpy()
    assert path.read_bytes() == OLD

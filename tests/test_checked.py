"""Files that are compared block by block: what is read is as it was written, and what is not is not read."""

import json

import numpy as np
import pytest
from encoders import SENTENCES, embedder_of
from numpy.testing import assert_array_equal

from whitenedcse.app import cli
from whitenedcse.files import checksum
from whitenedcse.serving import checked, index_files
from whitenedcse.serving.checked import Checked, seal, sealed
from whitenedcse.serving.index import Index

SIZE = 64  # bytes of a block
TEXTS = [f"{a} {b}" for a in SENTENCES for b in SENTENCES]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(checked, "BLOCK", SIZE)


@pytest.fixture
def x():
    return np.random.default_rng(0).normal(size=(23, 5)).astype(np.float32)


@pytest.fixture
def folder(tmp_path, x):
    np.save(tmp_path / "x.npy", x)
    seal(tmp_path, ["x.npy"])
    return tmp_path


def opened(folder):
    return Checked(folder / "x.npy", sealed(folder))


def touched(file, rows, x):
    """The blocks with a byte of the header's first block or of these rows, one byte at a time."""
    start = file.stat().st_size - x.nbytes
    return {0} | {(start + row * 20 + byte) // SIZE for row in rows for byte in range(20)}


@pytest.mark.parametrize("rows", [[0], [22], [3, 3, 17, 4], list(range(23)), []])
def test_rows_are_those_written_and_only_their_blocks_are_compared(folder, x, rows):
    array = opened(folder)
    assert_array_equal(array[np.array(rows, dtype=np.int64)], x[rows])
    assert set(np.flatnonzero(array.blocks.same)) == touched(folder / "x.npy", rows, x)


@pytest.mark.parametrize("part", [slice(0, 0), slice(2, 5), slice(20, 99), slice(None), slice(-3, None)])
def test_a_slice_is_that_of_the_array(folder, x, part):
    array = opened(folder)
    assert_array_equal(array[part], x[part])
    assert set(np.flatnonzero(array.blocks.same)) == touched(folder / "x.npy", range(23)[part], x)


def test_no_flipped_byte_is_read_and_the_others_are(folder, x):
    """Every byte of the file, one at a time; each row is read alone."""
    file = folder / "x.npy"
    content = file.read_bytes()
    start = len(content) - x.nbytes
    for place in range(len(content)):
        file.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        if place < SIZE:
            with pytest.raises(ValueError, match="x.npy is not as it was written"):
                opened(folder)
            continue
        array = opened(folder) if place >= start else None  # between is padding of the header
        for row in range(23) if array else ():
            if place // SIZE in touched(file, [row], x):
                with pytest.raises(ValueError, match=r"x.npy is not as it was written.*copy the whole index"):
                    array[np.array([row])]
            else:
                assert_array_equal(array[np.array([row])], x[[row]])


@pytest.mark.parametrize("cut", [slice(None, -1), slice(None, -SIZE), slice(None, 0), slice(None, 30)])
def test_a_file_of_another_length_is_refused_at_once(folder, cut):
    content = (folder / "x.npy").read_bytes()
    (folder / "x.npy").write_bytes(content[cut])
    with pytest.raises(ValueError, match=r"x\.npy"):
        opened(folder)
    (folder / "x.npy").write_bytes(content + b"\0")
    with pytest.raises(ValueError, match=r"x\.npy"):
        opened(folder)
    (folder / "x.npy").unlink()
    with pytest.raises(ValueError, match=r"x.npy is missing"):
        opened(folder)


def test_a_file_with_more_or_fewer_blocks_is_refused_before_any_is_read(folder):
    content = (folder / "x.npy").read_bytes()
    for other in (content[:-SIZE], content + bytes(SIZE)):
        (folder / "x.npy").write_bytes(other)
        with pytest.raises(ValueError, match="x.npy is not as it was written"):
            checked.Blocks(folder / "x.npy", sealed(folder))


def test_a_file_that_was_sealed_as_a_whole_is_compared_as_a_whole(folder, x):
    """As older versions did."""
    whole = {"x.npy": checksum(folder / "x.npy")}
    assert_array_equal(Checked(folder / "x.npy", whole)[:], x)
    content = (folder / "x.npy").read_bytes()
    (folder / "x.npy").write_bytes(content[:-1] + b"\1")
    with pytest.raises(ValueError, match="x.npy is not as it was written"):
        Checked(folder / "x.npy", whole)


def test_an_unnamed_file_is_refused(folder):
    with pytest.raises(ValueError, match=r"x\.npy"):
        Checked(folder / "x.npy", {"y.npy": "0"})


@pytest.fixture
def place(bert, tmp_path):
    Index.build(embedder_of(bert, kind="mean").eval(), TEXTS * 20).save(tmp_path / "index")
    return tmp_path / "index"


def compared(array):
    return int(array.blocks.same.sum()) * SIZE


def test_an_index_opens_without_being_read(place):
    part = index_files.load(place)[1][0]
    # the first block of each; where texts end, also the blocks with the first and the last number
    arrays = [part.vectors, part.texts.data, part.texts.ends, part.ids.data, part.ids.ends]
    assert [compared(array) for array in arrays] == [SIZE, SIZE, 3 * SIZE, SIZE, 3 * SIZE]
    assert part.texts[700] == (TEXTS * 20)[700]
    assert compared(part.texts.data) <= 3 * SIZE and compared(part.texts.ends) <= 5 * SIZE


def flipped(file, place):
    with file.open("r+b") as stream:
        stream.seek(place)
        byte = stream.read(1)
        stream.seek(place)
        stream.write(bytes([byte[0] ^ 1]))


def test_what_is_damaged_is_named_when_it_is_read_or_verified(place, capsys):
    assert cli.main(["search", "verify", str(place)]) == 0
    size = sum(file.stat().st_size for file in (place / "part-0").glob("*.npy")) / 1e6
    assert capsys.readouterr().out == f"1,280 texts, {size:,.1f} MB as they were written: {place}\n"
    flipped(place / "part-0" / "texts.npy", 20_000)
    index = Index.load(place)
    near = index.query([TEXTS[0]], 1)[0][0]  # whose text is elsewhere
    assert near.text == TEXTS[0]
    with pytest.raises(ValueError, match=r"part-0/texts.npy is not as it was written"):
        index.query([TEXTS[0]], 1280)
    flipped(place / "part-0" / "vectors.npy", 50_000)
    with pytest.raises(ValueError, match=r"part-0/vectors.npy is not as it was written"):
        Index.load(place).query([TEXTS[0]], 1)
    with pytest.raises(ValueError, match=r"part-0/vectors.npy"):
        _ = Index.load(place).vectors
    capsys.readouterr()
    assert cli.main(["search", "verify", str(place)]) == 2
    assert "part-0/vectors.npy is not as it was written" in capsys.readouterr().err


def test_an_index_of_one_digest_a_file_opens(place):
    """As it was before digests of blocks."""
    content = json.loads((place / "index.json").read_text())
    (place / "index.json").write_text(json.dumps(content | {"format": 1}))
    names = sealed(place / "part-0")
    whole = {name: checksum(place / "part-0" / name) for name in names}
    (place / "part-0" / "digests.json").write_text(json.dumps(whole))
    assert Index.load(place).query([TEXTS[5]], 1)[0][0].text == TEXTS[5]
    flipped(place / "part-0" / "vectors.npy", 50_000)
    with pytest.raises(ValueError, match=r"part-0/vectors.npy is not as it was written"):
        Index.load(place)

"""An index: built, added to, asked, saved, loaded; what is damaged is named, and no file of it runs code."""

import gc
import io
import json
import pickle
import shutil
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from encoders import SENTENCES, embedder_of, paced
from numpy.testing import assert_allclose, assert_array_equal
from rich.console import Console

from whitenedcse.data.corpus import Corpus
from whitenedcse.evaluation.postprocess import Postprocess
from whitenedcse.evaluation.tasks import corpus_texts
from whitenedcse.files import digest, seal, write_json
from whitenedcse.model import checkpoint
from whitenedcse.model.embedder import Embedder
from whitenedcse.serving import index as index_module
from whitenedcse.serving import index_files
from whitenedcse.serving.exports import whitened
from whitenedcse.serving.fitting import fitted
from whitenedcse.serving.index import Index, labelled, write
from whitenedcse.serving.index_files import FILES, Strings

TEXTS = [f"{a} {b}" for a in SENTENCES for b in SENTENCES]
ASKED = ["the small dog sees a tree", "bread"]


@pytest.fixture(autouse=True)
def blocks(monkeypatch):
    monkeypatch.setattr(index_module, "BLOCK", 27)


@pytest.fixture
def embedder(bert):
    return embedder_of(bert, kind="mean").eval()


@pytest.fixture
def white(embedder, tmp_path):
    (tmp_path / "corpus.txt").write_text("\n".join(TEXTS))
    fit = Postprocess("whitening")
    fit.provenance = fitted(fit, embedder, Corpus(str(tmp_path / "corpus.txt")))
    return whitened(embedder, fit, 5)


def by_hand(embedder, asked, texts, top):
    """(cosine, text) by sorting all cosines."""
    x, y = (embedder.encode(t).astype(np.float64) for t in (asked, texts))
    cosines = x @ y.T / np.outer(np.linalg.norm(x, axis=1), np.linalg.norm(y, axis=1))
    return [[(row[i], texts[i]) for i in np.argsort(-row, kind="stable")[:top]] for row in cosines]


def agree(hits, wanted):
    for got, right in zip(hits, wanted, strict=True):
        assert [hit.text for hit in got] == [text for _, text in right]
        assert_allclose([hit.cosine for hit in got], [cosine for cosine, _ in right], atol=1e-6)


@pytest.mark.parametrize("kind", ["embedder", "white"])
def test_the_nearest_by_cosine_are_found_in_memory_and_on_the_disk(kind, request, tmp_path):
    source = request.getfixturevalue(kind)
    index = Index.build(source, TEXTS)
    wanted = by_hand(source, ASKED, TEXTS, 10)
    agree(index.query(ASKED), wanted)
    assert [TEXTS[int(hit.id)] for hit in index.query(ASKED)[0]] == [text for _, text in wanted[0]]
    index.save(tmp_path / "index")
    again = Index.load(tmp_path / "index")
    assert again.query(ASKED) == index.query(ASKED)
    assert len(again) == 64 and len(again.query(ASKED, 100)[1]) == 64
    assert all(isinstance(v, np.memmap) for v in again.vectors)
    assert_allclose(np.linalg.norm(again.vectors[0], axis=1), 1, atol=1e-6)


def test_the_index_needs_nothing_beside_it_and_transforms_queries_alike(white, tmp_path):
    checkpoint.save(white, tmp_path / "model")
    Index.build(Embedder.load(str(tmp_path / "model")), TEXTS).save(tmp_path / "index")
    shutil.rmtree(tmp_path / "model")
    (tmp_path / "index").rename(tmp_path / "elsewhere")
    index = Index.load(tmp_path / "elsewhere")
    assert index.embedder.width == 5 and index.embedder.final.provenance["kind"] == "whitening"
    agree(index.query(ASKED), by_hand(white, ASKED, TEXTS, 10))


def test_what_is_added_is_found_and_appended(embedder, tmp_path):
    index = Index.build(embedder, TEXTS[:40])
    index.save(tmp_path / "index")
    first = {p: p.stat().st_mtime_ns for p in (tmp_path / "index" / "part-0").iterdir()}
    index.add(TEXTS[40:50]).save(tmp_path / "index")
    index = Index.load(tmp_path / "index")
    index.add(TEXTS[50:]).save(tmp_path / "index")
    index.save(tmp_path / "index")  # nothing new: nothing written
    assert first == {p: p.stat().st_mtime_ns for p in first}
    assert sorted(p.name for p in (tmp_path / "index").glob("part-*")) == ["part-0", "part-1", "part-2"]
    again, whole = Index.load(tmp_path / "index"), Index.build(embedder, TEXTS)
    assert again.query(ASKED, 64) == whole.query(ASKED, 64)
    again.save(tmp_path / "copy")
    assert len(list((tmp_path / "copy").glob("part-*"))) == 1
    assert Index.load(tmp_path / "copy").query(ASKED, 64) == whole.query(ASKED, 64)


def test_how_far_it_is_is_told(embedder, monkeypatch):
    told = paced(index_module, monkeypatch)
    monkeypatch.setattr(index_module, "BLOCK", 40)
    Index.build(embedder, TEXTS)
    assert told == [("encoded",), 40, 24]


def test_a_part_is_on_the_disk_before_the_index_names_it(embedder, tmp_path, monkeypatch):
    index, seen = Index.build(embedder, TEXTS[:40]), []
    index.save(tmp_path / "index")
    monkeypatch.setattr(index_files, "settle", lambda path: seen.append(path.name))
    monkeypatch.setattr(index_files, "write_json", lambda file, content: seen.append(file.name))
    index.add(TEXTS[40:]).save(tmp_path / "index")
    assert "part-1" in seen and seen[-2:] == ["index", "index.json"]


def test_ids_and_any_text_travel_along(embedder, tmp_path):
    texts = ["the cat", "", "naïve 猫 \U0001f408", "a\nb\t\u2028c"]
    index = Index.build(embedder, texts, ["a/1", "", "ü", 4])
    index.save(tmp_path / "index")
    hits = Index.load(tmp_path / "index").query(["cat"], 9)[0]
    assert {hit.id: hit.text for hit in hits} == dict(zip(["a/1", "", "ü", "4"], texts, strict=True))
    with pytest.raises(ValueError, match="1 ids for 2 texts"):
        index.add(["one", "two"], ["1"])
    with pytest.raises(ValueError, match="'one' is one text"):
        index.add("one")
    with pytest.raises(
        ValueError, match="have ids of their own, such as 'a/1': give those of the new, by --ids"
    ):
        index.add(["one"])
    assert len(index) == 4


def test_labels_are_numbers_or_a_column(tmp_path):
    path = tmp_path / "table.tsv"
    path.write_text("key\ta\tb\nx\tone\ttwo\ny\t \tthree\n")
    assert list(labelled(Corpus(str(path), ("a", "b")), 7)) == [("7", "one"), ("8", "two"), ("9", "three")]
    found = list(labelled(Corpus(str(path), ("a", "b", "key")), ids=True))
    assert found == [("x", "one"), ("x", "two"), ("y", "three")]
    (tmp_path / "long.txt").write_text(long := "a b " * 10_000)
    assert list(labelled(Corpus(str(tmp_path / "long.txt")))) == [("0", long)]  # cut where it is tokenised
    assert corpus_texts(str(tmp_path / "long.txt")) == [long]


@pytest.mark.slow
def test_a_written_index_is_the_saved_one_and_memory_does_not_grow(embedder, tmp_path):
    Index.build(embedder, TEXTS).save(tmp_path / "saved")
    write(tmp_path / "written", embedder, zip(map(str, range(64)), TEXTS, strict=True))
    for name in FILES:
        one, two = (tmp_path / kind / "part-0" / f"{name}.npy" for kind in ("saved", "written"))
        assert one.read_bytes() == two.read_bytes()

    def peak(n):
        texts = ((str(i), TEXTS[i % 64] * 20) for i in range(n))
        gc.collect()
        tracemalloc.start()
        write(tmp_path / f"of-{n}", embedder, texts)
        top = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return top

    def size(n):
        return sum(len(TEXTS[i % 64] * 20) for i in range(n))

    peak(27)
    Console(file=io.StringIO()).print(
        "a line"
    )  # of progress, which a slow machine sees, and what that imports
    few, many = 27 * 4, 27 * 60
    assert peak(many) - peak(few) < 0.2 * (size(many) - size(few))


def test_what_is_there_is_never_replaced(embedder, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("mine")
    index = Index.build(embedder, TEXTS[:3])
    with pytest.raises(FileExistsError, match="mine exists"):
        index.save(tmp_path / "mine")
    with pytest.raises(FileNotFoundError, match="absent: no such directory"):
        index.save(tmp_path / "absent" / "index")
    with pytest.raises(FileNotFoundError, match="mine is not an index"):
        Index.load(tmp_path / "mine")
    assert (tmp_path / "mine" / "file").read_text() == "mine"
    with pytest.raises(ValueError, match="no text"):
        Index.build(embedder, []).save(tmp_path / "empty")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mine"]  # no draft is left
    with pytest.raises(ValueError, match="top=0 of 3"):
        index.query(ASKED, 0)
    with pytest.raises(ValueError, match=r"top=10 of 0 rows: ask for one or more, of one or more rows"):
        Index.build(embedder, []).query(ASKED)


def test_an_encoder_that_gives_nan_is_refused(embedder):
    with torch.no_grad():
        embedder.encoder.backbone.embeddings.word_embeddings.weight[7] = torch.nan
    with pytest.raises(ValueError, match="NaN or infinity in the vector of 'the cat"):
        Index.build(embedder, ["every baker eats", "the cat cat"])


def test_two_that_add_do_not_lose_what_the_other_added(embedder, tmp_path):
    Index.build(embedder, TEXTS[:5]).save(tmp_path / "index")
    one, two = Index.load(tmp_path / "index"), Index.load(tmp_path / "index")
    one.add(["the cat"]).save(tmp_path / "index")
    with pytest.raises(ValueError, match="holds 6 texts, not 5"):
        two.add(["a dog"]).save(tmp_path / "index")
    assert len(Index.load(tmp_path / "index")) == 6


@pytest.mark.parametrize(("moment", "n"), [("before", 5), ("after", 7)])
def test_a_kill_leaves_the_old_or_the_new(embedder, tmp_path, moment, n, monkeypatch):
    """At the two sides of the moment in which index.json changes; nothing is tidied up on the way out."""
    Index.build(embedder, TEXTS[:5]).save(tmp_path / "index")

    def killed(path, content):
        if moment == "after":
            write_json(path, content)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(index_files, "write_json", killed)
        Index.load(tmp_path / "index").add(["the cat", "a dog"]).save(tmp_path / "index")
    assert (tmp_path / "index" / "part-1" / "vectors.npy").exists()
    index = Index.load(tmp_path / "index")
    assert len(index) == n
    index.add(["every baker"]).save(tmp_path / "index")
    assert len(Index.load(tmp_path / "index")) == n + 1


def spoiled(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("how", [spoiled, lambda p: p.write_bytes(p.read_bytes()[:-1]), Path.unlink])
@pytest.mark.parametrize("name", [f"part-0/{name}.npy" for name in FILES] + ["embedder/model.safetensors"])
def test_a_damaged_file_is_named(saved, tmp_path, name, how):
    shutil.copytree(saved, tmp_path / "index")
    how(tmp_path / "index" / name)
    with pytest.raises((ValueError, OSError), match=name.split("/")[-1]):
        Index.load(tmp_path / "index")


def test_an_index_that_another_process_wrote_meanwhile_is_not_replaced(
    saved, embedder, tmp_path, monkeypatch
):
    drafted = index_files.drafted

    def late(directory):
        shutil.copytree(saved, directory)
        return drafted(directory)

    monkeypatch.setattr(index_files, "drafted", late)
    with pytest.raises(FileExistsError, match="index holds an index; choose another name, or delete it"):
        write(tmp_path / "index", embedder, [("0", "bread")])
    assert len(Index.load(tmp_path / "index")) == 9
    assert [path.name for path in tmp_path.iterdir()] == ["index"]


def test_files_that_changed_places_are_named(saved, embedder, tmp_path):
    shutil.copytree(saved, tmp_path / "index")
    Index.load(tmp_path / "index").add(TEXTS[:9]).save(tmp_path / "index")
    first, second = (tmp_path / "index" / f"part-{i}" for i in (0, 1))
    first.joinpath("ids.npy").rename(tmp_path / "ids.npy")
    second.joinpath("ids.npy").rename(first / "ids.npy")
    (tmp_path / "ids.npy").rename(second / "ids.npy")
    with pytest.raises(ValueError, match=r"part-0/ids.npy is not as it was written.*copy the whole index"):
        Index.load(tmp_path / "index")


def older(index):
    """An index as older versions wrote it: with the SHA-256 of its files, without their digests.json."""
    content = json.loads((index / "index.json").read_text())
    for i, part in enumerate(content["parts"]):
        (index / f"part-{i}" / "digests.json").unlink()
        part["sha256"] = {name: digest(index / f"part-{i}" / f"{name}.npy") for name in FILES}
    (index / "index.json").write_text(json.dumps(content))


def test_an_older_index_opens_and_its_checksums_are_compared(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "index")
    older(tmp_path / "index")
    assert len(Index.load(tmp_path / "index").add(["bread"])) == 10
    spoiled(tmp_path / "index/part-0/texts.npy")
    with pytest.raises(ValueError, match=r"part-0/texts.npy is damaged \(its checksum is another\)"):
        Index.load(tmp_path / "index")


@pytest.fixture(scope="module")
def saved(tmp_path_factory, tokenizer):
    from encoders import backbone

    from whitenedcse.model.encoder import Encoder

    path = tmp_path_factory.mktemp("saved") / "index"
    Index.build(embedder_of(Encoder(backbone("bert", len(tokenizer)), tokenizer)), TEXTS[:9]).save(path)
    return path


def forged(index, name, write):
    """A file replaced by someone who also writes the right digest."""
    write(index / "part-0" / f"{name}.npy")
    seal(index / "part-0")


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("vectors", np.zeros((9, 5), np.float32)),
        ("vectors", np.zeros((9, 16))),
        ("text_ends", np.full(10, 1 << 40)),
        ("text_ends", np.arange(10)[::-1].copy()),
        ("id_ends", np.array([0, 5, 1, 2, 3, 4, 5, 6, 7, 9])),
        ("id_ends", np.array([1, 1, 2, 3, 4, 5, 6, 7, 8, 9])),
        ("id_ends", np.array([0, 1, 2, 3, 4, 5, 6, 7, 8, 8])),
        ("texts", np.zeros((2, 2), np.uint8)),
    ],
)
def test_arrays_that_do_not_belong_together_are_refused(saved, tmp_path, name, array):
    shutil.copytree(saved, tmp_path / "index")
    forged(tmp_path / "index", name, lambda path: np.save(path, array))
    with pytest.raises(ValueError, match="part-0.* is damaged|of text 1 are not in ascending order"):
        Index.load(tmp_path / "index").query(["cat"])


@pytest.mark.parametrize(
    "text",
    ["", "[]", "null", "{}", '{"format": 2}', '{"format": 1, "parts": [], "width": 16}', '{"format": 1}']
    + ['{"format": 1, "width": 16, "parts": [{"n": "9"}]}', '{"format": 1, "width": 16, "parts": {"n": 9}}'],
)
def test_a_damaged_list_is_named(saved, tmp_path, text):
    shutil.copytree(saved, tmp_path / "index")
    (tmp_path / "index" / "index.json").write_text(text)
    with pytest.raises(ValueError, match=r"index\.json"):
        Index.load(tmp_path / "index")


def test_an_embedder_of_another_width_is_refused(saved, white, tmp_path):
    shutil.copytree(saved, tmp_path / "index")
    checkpoint.save(white, tmp_path / "index" / "embedder")
    with pytest.raises(ValueError, match="embedder has width 5, the index 16"):
        Index.load(tmp_path / "index")


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def bombs(mark):
    """Files that make `mark` if anything unpickles them."""
    array = np.empty(1, object)
    array[0] = Bomb(mark)
    return {
        "pickle": lambda stream: pickle.dump(Bomb(mark), stream),
        "objects": lambda stream: np.lib.format.write_array(stream, array),
        "torch": lambda stream: torch.save(Bomb(mark), stream),
        "zip": lambda stream: np.savez(stream, vectors=array),
    }


def planted(path, mark, kind):
    with path.open("wb") as stream:
        bombs(mark)[kind](stream)


EVERY = [f"part-0/{name}.npy" for name in FILES] + ["index.json", "embedder/whitenedcse.json"]
EVERY += [f"embedder/{name}" for name in ("model.safetensors", "head.safetensors", "final.safetensors")]
EVERY += ["embedder/config.json", "embedder/tokenizer.json", "embedder/tokenizer_config.json"]


@pytest.mark.parametrize("kind", ["pickle", "objects", "torch", "zip"])
@pytest.mark.parametrize("name", EVERY)
@pytest.mark.slow(but=10)
def test_a_stranger_s_file_runs_no_code(white, tmp_path, name, kind):
    index = tmp_path / "index"
    Index.build(white, TEXTS[:3]).save(index)
    assert (index / name).exists()
    mark = tmp_path / "mark"
    if name.startswith("part-0"):
        forged(index, Path(name).stem, lambda path: planted(path, mark, kind))
    else:
        planted(index / name, mark, kind)
    if name.startswith("embedder"):
        (index / "embedder" / "digests.json").unlink()
    with pytest.raises((ValueError, OSError)):
        Index.load(index)
    assert not mark.exists()


def test_the_bombs_are_real(tmp_path):
    planted(tmp_path / "a.npy", tmp_path / "mark", "objects")
    np.load(tmp_path / "a.npy", allow_pickle=True)
    assert (tmp_path / "mark").exists()


@pytest.mark.parametrize("name", ["embedder/pytorch_model.bin", "embedder/training_args.bin", "part-0/x.pkl"])
def test_an_unused_decompression_bomb_is_not_read(saved, tmp_path, name):
    shutil.copytree(saved, tmp_path / "index")
    planted(tmp_path / "index" / name, tmp_path / "mark", "torch")
    if name.endswith("pytorch_model.bin"):
        (tmp_path / "index" / "embedder" / "model.safetensors").unlink()
        with pytest.raises(ValueError):
            Index.load(tmp_path / "index")
    else:
        Index.load(tmp_path / "index")
    assert not (tmp_path / "mark").exists()


def test_strings_are_the_texts_they_were_made_of():
    texts = ["", "a", "é猫", "", "\U0001f408\n"]
    strings = Strings.of(texts)
    assert [strings[i] for i in range(len(strings))] == texts == list(strings)
    assert_array_equal(strings.ends, [0, 0, 1, 6, 6, 11])
    assert index_files.path(Path("a"), "b") == Path("a/b.npy")


def test_threads_that_ask_and_encode_at_once_get_what_one_gets(embedder, tmp_path):
    Index.build(embedder, TEXTS).save(tmp_path / "index")
    asked = [TEXTS[i::16] for i in range(16)]
    alone = Index.load(tmp_path / "index")
    wanted = [(alone.query(texts, top=3), embedder.encode(texts)) for texts in asked]
    shared = Index.load(tmp_path / "index")  # any of the threads compares a block with its digest
    with ThreadPoolExecutor(8) as threads:
        given = list(threads.map(lambda texts: (shared.query(texts, top=3), embedder.encode(texts)), asked))
    for (hits, x), (others, y) in zip(given, wanted, strict=True):
        assert hits == others
        assert_array_equal(x, y)

"""The cache holds what the tokenizer says, is written once, and survives races and damage."""

import copy
import json
import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import datasets
import numpy as np
import pytest
from encoders import paced
from fsspec.implementations.memory import MemoryFileSystem
from programs import started
from transformers import ByT5Tokenizer

from whitenedcse.data import tokens
from whitenedcse.data.corpus import Corpus, fingerprint
from whitenedcse.data.tokens import token_ids, tokenised

LENGTH = 8


def oracle(sentence, tokenizer, length=LENGTH):
    return tokenizer(sentence, truncation=True, max_length=length)["input_ids"]


def rows_of(batch):
    return [batch.ids[a:b].tolist() for a, b in zip(batch.offsets[:-1], batch.offsets[1:], strict=True)]


@pytest.fixture
def lines(tokenizer):
    words, draw = sorted(w for w in tokenizer.get_vocab() if w[0] not in "[#"), random.Random(1)
    return [" ".join(draw.choices([*words, "unheard"], k=draw.randint(1, 12))) for _ in range(1300)]


@pytest.fixture
def corpus(tmp_path, lines):
    (tmp_path / "x.txt").write_text("\n".join(lines))
    return Corpus(str(tmp_path / "x.txt"))


@pytest.fixture
def pairs(tmp_path, lines):
    path = tmp_path / "x.jsonl"
    path.write_text(
        "".join(json.dumps({"a": lines[i], "b": lines[i + 1], "c": lines[-i]}) + "\n" for i in range(99))
    )
    return Corpus(str(path), ("a", "b", "c"))


def test_a_batch_of_rows_is_what_the_tokenizer_says_of_each(corpus, lines, tokenizer, tmp_path):
    rows = tokenised(corpus, tokenizer, LENGTH, cache_dir=tmp_path)
    index = np.array([1299, 0, 7, 7, 513])
    assert rows_of(rows.rows(index, [0])) == [oracle(lines[i], tokenizer) for i in index]
    assert rows_of(rows.rows(np.arange(1300), [0])) == [oracle(line, tokenizer) for line in lines]
    assert (len(rows), rows.ids.dtype, rows.counts.kept) == (1300, np.uint16, 1300)


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("few", [0, 10_000])  # word by word, or by calls of the tokenizer
def test_sentences_that_lose_tokens_are_counted_and_the_cache_keeps_their_number(
    pairs, lines, tokenizer, tmp_path, monkeypatch, few, processes
):
    monkeypatch.setattr(tokens, "FEW", few)
    monkeypatch.setattr(tokens, "EACH", 1)
    monkeypatch.setattr(tokens, "BATCH", 50)
    monkeypatch.setattr(tokens, "cores", lambda: processes)
    texts = [line for i in range(99) for line in (lines[i], lines[i + 1], lines[-i])]
    expected = sum(len(tokenizer(text)["input_ids"]) > LENGTH for text in texts)
    assert 0 < expected < len(texts)
    assert tokenised(pairs, tokenizer, LENGTH, cache_dir=tmp_path).truncated == expected
    monkeypatch.setattr(tokens, "batches_of_ids", lambda *a: pytest.fail("tokenised again"))
    assert tokenised(pairs, tokenizer, LENGTH, cache_dir=tmp_path).truncated == expected


def test_how_far_it_is_is_told(corpus, tokenizer, tmp_path, monkeypatch):
    told = paced(tokens, monkeypatch)
    tokenised(corpus, tokenizer, LENGTH, cache_dir=tmp_path)
    assert told[0] == ("tokenised", 1300) and sum(told[1:]) == 1300
    told.clear()
    tokenised(corpus, tokenizer, LENGTH, cache_dir=tmp_path)
    assert told == []  # the cache has it


def test_columns_follow_one_another_whole(pairs, lines, tokenizer, tmp_path):
    rows = tokenised(pairs, tokenizer, LENGTH, cache_dir=tmp_path)
    index = np.array([5, 2, 98])
    columns = [[lines[i] for i in index], [lines[i + 1] for i in index], [lines[-i] for i in index]]
    assert rows_of(rows.rows(index, [0, 1, 2])) == [
        oracle(s, tokenizer) for column in columns for s in column
    ]
    assert len(rows) == 99


@pytest.mark.parametrize("label", ["1", " 0.5 ", "-2", "3,5"])
def test_a_column_of_numbers_among_texts_is_refused_by_name(tokenizer, tmp_path, label):
    path = tmp_path / "x.tsv"
    path.write_text("a\tb\tlabel\n" + f"a cat\t1990\t{label}\n" * 3 + f"a dog\tin 1990\t{label}\n")
    with pytest.raises(
        ValueError, match=rf"x.tsv: column 'label' has numbers, such as {label.strip()}, and no"
    ):
        tokenised(Corpus(str(path), ("a", "b", "label")), tokenizer, LENGTH, cache_dir=tmp_path)
    assert len(tokenised(Corpus(str(path), ("a", "b")), tokenizer, LENGTH, cache_dir=tmp_path)) == 4


def test_a_large_vocabulary_keeps_its_large_ids(corpus, lines, tokenizer, tmp_path, monkeypatch):
    whole = tokens.batches_of_ids

    def shifted(sentences, *args):
        yield from (batch._replace(ids=batch.ids + 70_000) for batch in whole(sentences, *args))

    monkeypatch.setattr(tokens, "batches_of_ids", shifted)
    monkeypatch.setattr(type(tokenizer), "get_vocab", lambda self: {"high": 70_040})
    rows = tokenised(corpus, tokenizer, LENGTH, cache_dir=tmp_path)
    assert rows_of(rows.rows(np.array([3]), [0])) == [[i + 70_000 for i in oracle(lines[3], tokenizer)]]


def test_a_slow_tokenizer_works_too(corpus, lines, tmp_path):
    slow = ByT5Tokenizer()
    assert not slow.is_fast
    rows = tokenised(corpus, slow, LENGTH, cache_dir=tmp_path)
    assert rows_of(rows.rows(np.array([3, 2]), [0])) == [oracle(lines[i], slow) for i in (3, 2)]


def test_an_endless_line_is_cut_before_it_is_tokenised(tokenizer):
    seen = []

    def spy(batch, **kwargs):
        seen.extend(batch)
        return tokenizer(batch, **kwargs)

    spy.num_special_tokens_to_add = tokenizer.num_special_tokens_to_add
    spy.model_max_length, spy.truncation_side = tokenizer.model_max_length, tokenizer.truncation_side
    assert token_ids(["cat " * 1_000_000], spy, LENGTH) == [oracle("cat " * 50, tokenizer)]
    assert len(seen[0]) == 64 * LENGTH


def test_an_endless_line_keeps_its_end_where_the_tokenizer_does(tokenizer):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.truncation_side = "left"
    text = "cat " * 1_000 + "the bird sees a dog"
    assert token_ids([text], tokenizer, 8) == [
        oracle("cat cat the bird sees a dog", tokenizer)[:1]
        + tokenizer(text, truncation=True, max_length=8)["input_ids"][1:]
    ]


def test_a_length_without_a_token_of_text_is_refused(tokenizer):
    assert len(token_ids(["a cat"], tokenizer, 3)[0]) == 3
    with pytest.raises(ValueError, match="max_length=2"):
        token_ids(["a cat"], tokenizer, 2)


def test_a_second_start_neither_reads_nor_tokenises(corpus, tokenizer, tmp_path, monkeypatch, capfd):
    first = tokenised(corpus, tokenizer, LENGTH, cache_dir=tmp_path)
    tokenizer(
        ["a cat", "the"], padding=True, truncation=True, max_length=4
    )  # leaves its core in another state
    monkeypatch.setattr(tokens, "read", lambda *a, **k: pytest.fail("read again"))
    monkeypatch.setattr(tokens, "batches_of_ids", lambda *a: pytest.fail("tokenised again"))
    second = tokenised(corpus, tokenizer, LENGTH, cache_dir=tmp_path)
    assert np.array_equal(first.ids, second.ids) and np.array_equal(first.offsets, second.offsets)
    assert second.counts == first.counts
    assert capfd.readouterr() == ("", "")


def test_another_length_tokenizer_or_text_is_another_cache(corpus, tokenizer, tmp_path):
    def folders():
        return len([path for path in tmp_path.iterdir() if path.is_dir()])

    tokenised(corpus, tokenizer, LENGTH, cache_dir=tmp_path)
    tokenised(corpus, tokenizer, LENGTH + 1, cache_dir=tmp_path)
    tokenised(corpus, ByT5Tokenizer(), LENGTH, cache_dir=tmp_path)
    assert folders() == 3
    tokenizer.truncation_side = "left"
    left = tokenised(corpus, tokenizer, 4, cache_dir=tmp_path).rows(np.arange(9), [0])
    tokenizer.truncation_side = "right"
    assert rows_of(left) != rows_of(
        tokenised(corpus, tokenizer, 4, cache_dir=tmp_path).rows(np.arange(9), [0])
    )
    (tmp_path / "x.txt").write_text("a cat\n")
    assert len(tokenised(corpus, tokenizer, LENGTH, cache_dir=tmp_path)) == 1
    assert folders() == 6


@pytest.fixture
def settled(corpus):
    """The corpus, with a file last changed a while ago."""
    time.sleep(0.01)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokens, "SETTLED", 0)
        yield corpus


def notes(folder):
    return sorted(folder.glob(".*.seen"))


def test_a_second_start_does_not_even_hash_an_unchanged_corpus(settled, tokenizer, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    first = tokenised(settled, tokenizer, LENGTH, cache_dir=cache)
    monkeypatch.setattr(tokens, "fingerprint", lambda corpus: pytest.fail("hashed again"))
    for length in (LENGTH, LENGTH + 1):
        second = tokenised(settled, tokenizer, length, cache_dir=cache)
        assert second.digests == first.digests == {**first.digests, "corpus": fingerprint(settled)}


def test_an_edit_is_seen_even_if_size_and_time_stay(settled, tokenizer, tmp_path):
    cache, path = tmp_path / "cache", Path(settled.path)
    tokenised(settled, tokenizer, LENGTH, cache_dir=cache)
    before, text = path.stat(), path.read_text()
    path.write_text("a red dog" + text[9:])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size and path.stat().st_mtime_ns == before.st_mtime_ns
    edited = tokenised(settled, tokenizer, LENGTH, cache_dir=cache)
    assert rows_of(edited.rows(np.array([0]), [0])) == [oracle(path.read_text().splitlines()[0], tokenizer)]
    other = tokenised(Corpus(settled.path, sample=5), tokenizer, LENGTH, cache_dir=cache)
    assert len(other) == 5


def test_no_note_is_made_of_a_file_that_may_still_be_changing(corpus, tokenizer, tmp_path):
    tokenised(corpus, tokenizer, LENGTH, cache_dir=tmp_path / "cache")
    assert notes(tmp_path / "cache") == []


def test_no_note_is_made_of_a_hub_data_set(tokenizer, tmp_path, monkeypatch):
    for texts in (["a cat"], ["a cat", "the dog"]):
        data = datasets.Dataset.from_dict({"a": texts})
        monkeypatch.setattr(datasets, "load_dataset", lambda *args, data=data, **more: data)
        rows = tokenised(Corpus("owner/name", ("a",)), tokenizer, LENGTH, cache_dir=tmp_path)
        assert len(rows) == len(texts)
    assert notes(tmp_path) == []


@pytest.fixture
def tagged(monkeypatch):
    """A function that gives memory:// a tag for each file, or none; like S3, it remembers what it told."""
    plain, told = MemoryFileSystem.info, {}

    def tag(form):
        def info(self, path):
            tag = form and {"ETag": form.format(hash(self.cat_file(path)))}
            return told.setdefault(path, plain(self, path) | (tag or {}))

        monkeypatch.setattr(MemoryFileSystem, "info", info)
        monkeypatch.setattr(MemoryFileSystem, "invalidate_cache", lambda self, path=None: told.clear())

    return tag


@pytest.mark.parametrize(("form", "trusted"), [('"{}"', True), ('W/"{}"', False), (None, False)])
def test_a_remote_corpus_is_hashed_again_unless_its_tag_says_that_it_is_the_same(
    lines, tokenizer, tmp_path, remote, tagged, monkeypatch, form, trusted
):
    hashed, whole = [], fingerprint
    monkeypatch.setattr(tokens, "fingerprint", lambda corpus: hashed.append(corpus) or whole(corpus))
    tagged(form)
    corpus = Corpus(remote("x.txt", "\n".join(lines).encode()))
    first, again = (tokenised(corpus, tokenizer, LENGTH, cache_dir=tmp_path) for _ in range(2))
    assert len(hashed) == (1 if trusted else 2) and again.digests == first.digests
    assert np.array_equal(first.ids, again.ids)
    remote("x.txt", "\n".join(["a red dog", *lines[1:]]).encode())
    changed = tokenised(corpus, tokenizer, LENGTH, cache_dir=tmp_path)
    assert rows_of(changed.rows(np.array([0]), [0])) == [oracle("a red dog", tokenizer)]
    assert changed.digests["corpus"] != first.digests["corpus"] and len(caches(tmp_path)) == 2


def of_another(note):
    """The note in this place, of another corpus."""
    (other,) = (path for path in notes(note.parent) if path != note)
    return other.read_bytes()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda note: b"",
        lambda note: b"abc",
        lambda note: b"\xff" * 65,
        lambda note: note.read_bytes()[:32],  # as older versions wrote it
        lambda note: bytes([note.read_bytes()[0] ^ 1]) + note.read_bytes()[1:],
        of_another,
    ],
)
def test_a_damaged_note_is_not_believed(settled, tokenizer, tmp_path, spoil):
    cache = tmp_path / "cache"
    first = tokenised(settled, tokenizer, LENGTH, cache_dir=cache)
    (note,) = notes(cache)
    written = note.read_bytes()
    other = tmp_path / "other.txt"
    other.write_text("the other corpus")
    os.utime(other, (1e9, 1e9))
    tokenised(Corpus(str(other)), tokenizer, LENGTH, cache_dir=cache)
    note.write_bytes(spoil(note))
    assert tokenised(settled, tokenizer, LENGTH, cache_dir=cache).digests == first.digests
    assert note.read_bytes() == written


def test_a_cache_opens_where_nothing_can_be_written(settled, tokenizer, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    tokenised(settled, tokenizer, LENGTH, cache_dir=cache)
    for note in notes(cache):
        note.unlink()

    def refused(*args):
        raise PermissionError(30, "Read-only file system")

    monkeypatch.setattr(tokens, "writing", refused)
    assert len(tokenised(settled, tokenizer, LENGTH, cache_dir=cache)) == 1300


def spoil_by_cutting(name, size):
    def spoil(folder):
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: len(data) - size])

    return spoil


def spoil_by_a_bit(name, place):
    def spoil(folder):
        data = bytearray((folder / name).read_bytes())
        data[int(place * len(data))] ^= 1
        (folder / name).write_bytes(data)

    return spoil


def exchanged(folder):
    ids, offsets = (folder / name for name in ("ids", "offsets"))
    a, b = ids.read_bytes(), offsets.read_bytes()
    ids.write_bytes(b)
    offsets.write_bytes(a)


def from_before_truncation_was_counted(folder):
    meta = json.loads((folder / "meta.json").read_text())
    del meta["truncated"]
    (folder / "meta.json").write_text(json.dumps(meta))


def caches(folder):
    """The whole ones; locks and drafts are hidden."""
    return [path for path in folder.iterdir() if path.name[0] != "."]


@pytest.mark.parametrize(
    "spoil",
    [
        *(spoil_by_cutting(name, size) for name in ("ids", "offsets") for size in (1, 2, 8)),
        *(
            spoil_by_a_bit(name, place)
            for name in ("ids", "offsets", "meta.json")
            for place in (0.1, 0.5, 0.9)
        ),
        exchanged,
        spoil_by_cutting("meta.json", 1),
        from_before_truncation_was_counted,
        lambda folder: (folder / "ids").write_bytes(b""),
        lambda folder: (folder / "offsets").write_bytes((folder / "offsets").read_bytes()[8:]),
        lambda folder: (folder / "meta.json").unlink(),
        lambda folder: (folder / "meta.json").write_text("[]"),
        lambda folder: (folder / "ids").write_bytes((folder / "ids").read_bytes() + b"more"),
        lambda folder: (folder / "offsets").write_bytes((folder / "offsets").read_bytes()[:-8] + b"\0" * 8),
    ],
)
def test_a_damaged_cache_is_built_anew_and_said_in_one_line(
    corpus, lines, tokenizer, tmp_path, spoil, capsys
):
    cache = tmp_path / "cache"
    before = tokenised(corpus, tokenizer, LENGTH, cache_dir=cache)
    spoil(*caches(cache))
    capsys.readouterr()
    rows = tokenised(corpus, tokenizer, LENGTH, cache_dir=cache)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "again" in line]
    assert str(cache) in line and "the corpus is tokenised again" in line
    assert rows.truncated == before.truncated > 0
    assert rows_of(rows.rows(np.array([1299]), [0])) == [oracle(lines[1299], tokenizer)]
    assert len(caches(cache)) == 1, "the damaged copy is gone"


def test_a_cache_without_digests_is_built_anew(corpus, tokenizer, tmp_path):
    cache = tmp_path / "cache"
    tokenised(corpus, tokenizer, LENGTH, cache_dir=cache)
    (folder,) = caches(cache)
    (folder / "digests.json").unlink()
    (folder / "ids").write_bytes(b"\xff" * len((folder / "ids").read_bytes()))  # beyond the vocabulary
    rows = tokenised(corpus, tokenizer, LENGTH, cache_dir=cache)
    assert int(rows.ids.max()) < len(tokenizer) and (folder / "digests.json").exists()


def test_a_failed_start_leaves_nothing_behind(corpus, tokenizer, tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tokens, "batches_of_ids", full)
    with pytest.raises(OSError, match="No space left"):
        tokenised(corpus, tokenizer, LENGTH, cache_dir=tmp_path / "cache")
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


RACE = """
import sys, os, pathlib, time, zlib
from transformers import PreTrainedTokenizerFast
from whitenedcse.data import tokens
from whitenedcse.data.corpus import Corpus
folder = pathlib.Path(sys.argv[1])
write = tokens._write
def slowly(*args):
    with (folder / "writers").open("a") as log:
        log.write(f"{os.getpid()}\\n")
    time.sleep(1)
    write(*args)
tokens._write = slowly
tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
(folder / str(os.getpid())).touch()
while len(list(folder.glob("[0-9]*"))) < 2:
    time.sleep(0.01)
rows = tokens.tokenised(Corpus(str(folder / "x.txt")), tokenizer, 8, cache_dir=folder / "cache")
print(len(rows), zlib.crc32(rows.ids.tobytes()), zlib.crc32(rows.offsets.tobytes()))
"""


@pytest.mark.slow
def test_of_two_processes_one_tokenises_and_both_read_the_same(corpus, lines, tokenizer, tmp_path):
    tokenizer.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    with ThreadPoolExecutor() as pool:
        pair = list(pool.map(lambda _: started("-c", RACE, tmp_path, cwd=tmp_path), range(2)))
    assert [process.returncode for process in pair] == [0, 0]
    assert pair[0].stdout == pair[1].stdout and pair[0].stdout.startswith("1300 ")
    assert len((tmp_path / "writers").read_text().split()) == 1


def test_the_cache_lies_where_the_environment_says(corpus, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setenv("WHITENEDCSE_CACHE", str(tmp_path / "here"))
    tokenised(corpus, tokenizer, LENGTH)
    monkeypatch.delenv("WHITENEDCSE_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    tokenised(corpus, tokenizer, LENGTH)
    homes = [tmp_path / "here", tmp_path / "home" / ".cache" / "whitenedcse"]
    assert [len(caches(home)) for home in homes] == [1, 1]

"""Any kind of text gives the same sentences, and bad text says where it is bad."""

import bz2
import csv
import gzip
import http.server
import json
import lzma
import sys
import tracemalloc
from collections import deque
from functools import partial
from itertools import islice
from pathlib import Path

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from encoders import nowhere, serving
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry

from whitenedcse.data import files
from whitenedcse.data.corpus import Corpus, Reading, fingerprint, is_hub_id, read
from whitenedcse.data.corpus import files as found
from whitenedcse.data.sources import located

PAIRS = [("one, two", 'said "so"'), ("drei\u2028vier", "five\x0bsix"), (" seven ", "acht ü")]
COMPRESS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstandard.compress}


def sentences(path, *columns, sample=None, longest=100):
    return read(Corpus(str(path), columns, sample), longest=longest)[0]


def written(path, data):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def write_csv(path, rows):
    with path.open("w", newline="", encoding="utf-8") as stream:
        csv.writer(stream).writerows([["id", "b", "a"], *(("0", b, a) for a, b in rows)])


def write_tsv(path, rows):
    written(path, "id\tb\ta\n" + "".join(f"0\t{b}\t{a}\n" for a, b in rows))


def write_jsonl(path, rows):
    written(path, "".join(json.dumps({"id": 0, "b": b, "a": a}) + "\n" for a, b in rows))


def write_parquet(path, rows):
    columns = {"id": [0] * len(rows), "b": [b for _, b in rows], "a": [a for a, _ in rows]}
    pyarrow.parquet.write_table(pyarrow.table(columns), path)


WRITERS = {"csv": write_csv, "tsv": write_tsv, "jsonl": write_jsonl, "parquet": write_parquet}


@pytest.mark.parametrize("kind", WRITERS)
def test_columns_come_in_the_order_asked_for_whatever_the_format(tmp_path, kind):
    path = tmp_path / f"pairs.{kind}"
    WRITERS[kind](path, PAIRS)
    assert sentences(path, "a", "b") == PAIRS
    assert sentences(path, "b") == [(b,) for _, b in PAIRS]


def test_a_tab_separated_file_knows_no_quotes(tmp_path):
    path = written(tmp_path / "x.tsv", 'a\tb\n"open\tx\ny"\tz\n')
    assert sentences(path, "a", "b") == [('"open', "x"), ('y"', "z")]


@pytest.mark.parametrize("kind", ["csv", "tsv"])
def test_blank_lines_may_stand_above_a_header(tmp_path, kind):
    path = written(tmp_path / f"x.{kind}", "\n\r\na\none\n\ntwo\n")
    rows, counts = read(Corpus(str(path), ("a",)), longest=9)
    assert (rows, counts.total, counts.blank) == ([("one",), ("two",)], 3, 1)


def test_an_object_without_fields_is_no_blank_line(tmp_path):
    with pytest.raises(ValueError, match=r"x.jsonl:1: no column 'a' among no columns"):
        sentences(written(tmp_path / "x.jsonl", "{}\n"), "a")


def test_a_quoted_field_keeps_its_line_break(tmp_path):
    assert sentences(written(tmp_path / "x.csv", 'a\n"one\ntwo"\n'), "a") == [("one\ntwo",)]


@pytest.mark.parametrize("suffix", COMPRESS)
def test_a_compressed_file_gives_what_the_plain_one_gives(tmp_path, suffix):
    text = b"one\ntwo\n"
    assert sentences(written(tmp_path / f"x.txt{suffix}", COMPRESS[suffix](text))) == [("one",), ("two",)]


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.slow(but=2)
def test_a_compressed_file_may_have_several_parts_and_none_cut_short(tmp_path, suffix):
    part = COMPRESS[suffix](b"some words\nand others\n" * 25_000)
    assert len(sentences(written(tmp_path / f"x.txt{suffix}", part * 2))) == 100_000
    for size in (1, len(part) // 2):
        with pytest.raises(OSError, match=f"x.txt{suffix}: cannot be read: .*(ended before|[Tt]runcated)"):
            sentences(written(tmp_path / f"x.txt{suffix}", part + part[:-size]))


def test_only_a_newline_ends_a_line_and_marks_of_files_vanish(tmp_path):
    raw = b"\xef\xbb\xbfone\r\n" + "two\u2028and\x0b\x85\x0cmore\rhalf\n".encode() + b"three"
    expected = [("one",), ("two\u2028and\x0b\x85\x0cmore\rhalf",), ("three",)]
    assert sentences(written(tmp_path / "x.txt", raw)) == expected


def test_a_directory_is_its_text_files_sorted_at_any_depth(tmp_path):
    for name in ("b.txt", "a/z.txt", "c.txt"):
        written(tmp_path / name, name)
    written(tmp_path / "README.md", "no corpus")
    assert sentences(tmp_path) == [("a/z.txt",), ("b.txt",), ("c.txt",)]


def test_links_in_a_directory_are_followed_once_and_hidden_files_are_not_read(tmp_path):
    for name in ("in/a/x.txt", "far/y.txt", "in/.ipynb_checkpoints/x.txt", "in/.z.txt", ".seen/in.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{name}\n")
    (tmp_path / "in" / "b").symlink_to(tmp_path / "far")
    (tmp_path / "in" / "c.txt").symlink_to(tmp_path / "far" / "y.txt")
    (tmp_path / "in" / "a" / "again").symlink_to(tmp_path / "in")  # a circle
    assert found(str(tmp_path / "in")) == [
        str(tmp_path / "in" / name) for name in ("a/x.txt", "b/y.txt", "c.txt")
    ]
    assert found(str(tmp_path / ".seen")) == [str(tmp_path / ".seen/in.txt")]  # what is named is read


def test_blank_rows_are_dropped_and_counted(tmp_path):
    rows, counts = read(Corpus(str(written(tmp_path / "x.txt", "one\n\n \t\ntwo\n"))), longest=9)
    assert (rows, counts.total, counts.blank, counts.kept) == ([("one",), ("two",)], 4, 2, 2)
    for kind, text in {"csv": "a,b\nx,y\n\nz,\n", "jsonl": '{"a":"x","b":"y"}\n\n{"a":"z","b":""}\n'}.items():
        rows, counts = read(Corpus(str(written(tmp_path / f"x.{kind}", text)), ("a", "b")), longest=9)
        assert (rows, counts.total, counts.blank, counts.kept) == ([("x", "y")], 3, 2, 1)


def test_long_lines_are_cut_with_one_warning(tmp_path):
    path = written(tmp_path / "x.txt", "abcdef\nabcde\n" + "z" * 5_000_000)
    with pytest.warns(UserWarning, match="2 lines cut to 5 characters") as record:
        rows, counts = read(Corpus(str(path)), longest=5)
    assert (rows, counts.cut, len(record)) == ([("abcde",), ("abcde",), ("zzzzz",)], 2, 1)


def test_a_sample_is_uniform_without_repeats_in_order_and_always_the_same(tmp_path):
    path = written(tmp_path / "x.txt", "".join(f"{i}\n" for i in range(20_000)))
    drawn = [int(row[0]) for row in sentences(path, sample=4000)]
    assert drawn == sorted(set(drawn)) and len(drawn) == 4000
    assert drawn == [int(row[0]) for row in sentences(path, sample=4000)]
    tenths = [sum(i // 2000 == k for i in drawn) for k in range(10)]  # hypergeometric: 400 +- 17
    assert all(abs(count - 400) < 4 * 17 for count in tenths)
    assert len(sentences(path, sample=30_000)) == 20_000


@pytest.mark.parametrize(
    ("name", "data", "columns", "words"),
    [
        ("x.txt", b"fine\nab\xe9cd\n", (), ["x.txt:2", "0xe9", "position 2"]),
        ("x.txt", b"\n \n", (), ["x.txt", "0 usable sentences"]),
        ("x.csv", b"", ("a",), ["x.csv", "0 usable sentences"]),
        ("x.txt", b"one\n", ("a",), ["x.txt", "plain text", "['a']"]),
        (
            "x.csv",
            b"premise,label\nx,y\n",
            ("premis",),
            ["'premis'", "premise, label (line 1)", "mean 'premise'"],
        ),
        ("x.csv", b"a,b\nx,y\n", (), ["its columns are a, b (line 1); name those", "(settings of a call: "]),
        ("x.csv", b"a,b\nx,y\n", ("q", "a", "r"), ["no column 'q' or 'r' among a, b (line 1)"]),
        ("x.tsv", b"a,b\nx,y\n", ("a",), ["no column 'a' among a,b (line 1; tabs separate columns)"]),
        ("x.csv", b'a,b\n"x\nx",y\nz\n', ("a",), ["x.csv:4", "1 fields, 2 expected"]),
        ("x.csv", b'a,b\n"' + b"x\n" * 70_000, ("a",), ["x.csv:", "field larger"]),
        ("x.tsv", b"a\tb\nx\ty\nz\ty\tv\n", ("a",), ["x.tsv:3", "3 fields, 2 expected"]),
        ("x.jsonl", b'{"a": "x"}\n{"a": \n', ("a",), ["x.jsonl:2", "not JSON"]),
        ("x.jsonl", b'{"a": "x"}\n["x"]\n', ("a",), ["x.jsonl:2", "list"]),
        ("x.jsonl", b'{"a": "x"}\n{"b": "x"}\n', ("a",), ["x.jsonl:2", "'a'", "among b"]),
        ("x.jsonl", b'{"a": "x"}\n{"a": null}\n', ("a",), ["x.jsonl:2", "'a'", "None"]),
        ("x.txt", "one\ntwo\n".encode("utf-16-le"), (), ["x.txt:1", "0x00", "UTF-16", "iconv (position 1"]),
        ("x.txt", "one\ntwo\n".encode("utf-16-be"), (), ["x.txt:1", "0x00", "iconv (position 0"]),
        ("x.txt", b"one\nt\xc3\xa4o\0\n", (), ["x.txt:2", "0x00", "position 4 of the line"]),
        ("x.csv", b"a,b\nx,\0\n", ("a",), ["x.csv:2", "0x00"]),
        ("x.jsonl", b'{"a": "x"}\n{"a": "\\u0000"}\n', ("a",), ["x.jsonl:2", "NUL", "'a'"]),
        ("x.txt", b"one\rtwo\rthree\r", (), ["x.txt:1", "carriage return", "mac2unix"]),
        ("x.csv", b"a,b\rx,y\rz,w", ("a",), ["x.csv:1", "carriage return"]),
        ("x.txt", b"one\n" * 3, (), ["x.txt: all 3 rows are equal: 'one'"]),
        ("x.docx", b"x", (), ["x.docx", ".jsonl", ".zst"]),
        ("x.parquet.gz", b"x", (), ["x.parquet.gz: no corpus"]),
        ("txt", b"x", (), ["txt: no corpus"]),
    ],
)
def test_bad_input_is_named_with_its_place(tmp_path, name, data, columns, words):
    path = written(tmp_path / name, data)
    with pytest.raises(ValueError) as error:
        sentences(path, *columns)
    assert all(word in str(error.value) for word in words), error.value


def test_a_file_of_one_line_and_one_with_a_carriage_return_inside_a_line_are_read(tmp_path):
    assert sentences(written(tmp_path / "x.txt", b"one\r\r")) == [("one",)]
    assert sentences(written(tmp_path / "x.txt", b"one\rtwo\nthree")) == [("one\rtwo",), ("three",)]
    assert sentences(written(tmp_path / "x.txt", b"one\ntwo\rthree")) == [("one",), ("two\rthree",)]


@pytest.mark.parametrize("block", [1, 2, 3, 5, 8, 13])
def test_lines_and_their_numbers_do_not_depend_on_the_size_of_a_block(tmp_path, block, monkeypatch):
    monkeypatch.setattr(files, "BLOCK", block)
    for ending in (b"", b"\n", b"\n\n", b"\r\n"):
        raw = b"\xef\xbb\xbf\nein\nzw\xc3\xb6lf\n\n\ndrei\r\n" + b"acht" + ending
        expected = raw.decode("utf-8-sig").replace("\r\n", "\n").split("\n")
        expected = expected[:-1] if ending else expected
        assert list(files.lines(written(tmp_path / "x.txt", raw))) == expected
        for bad, what in ((b"\xff", "0xff"), (b"\0", "0x00")):
            path = written(tmp_path / "x.txt", raw + b"\nx\xc3\xa4" + bad)
            line = raw.count(b"\n") + 2
            with pytest.raises(ValueError, match=f"x.txt:{line}: byte {what}.*position 3 "):
                list(files.lines(path))


@pytest.mark.parametrize("ending", [b"", b"\nx", b"\nx\n"])
def test_a_line_above_the_limit_is_named(tmp_path, ending, monkeypatch):
    monkeypatch.setattr(files, "BLOCK", 7)
    monkeypatch.setattr(files, "LONGEST_LINE", 100)
    path = written(tmp_path / "x.txt", b"a\nb\n" + b"c" * 100 + ending)
    assert list(files.lines(path))[:3] == ["a", "b", "c" * 100]
    with pytest.raises(ValueError, match=r"x.txt:3: a line above 100 bytes"):
        list(files.lines(written(path, b"a\nb\n" + b"c" * 101 + ending)))


@pytest.mark.parametrize("text", [b"a", b"\0", b"a" * 999 + b"\n"], ids=["letters", "NUL", "lines"])
@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.slow(but=1)
def test_an_archive_that_explodes_takes_bounded_memory(tmp_path, suffix, text):
    """160 MB in one line, or in 160,000."""
    path = written(tmp_path / f"x.txt{suffix}", COMPRESS[suffix](text * (160_000_000 // len(text))))
    tracemalloc.start()
    try:
        with pytest.raises(
            ValueError, match=r"x.txt\.\w+:\d+: (a line above 16,777,216|it unpacks to over 100 times)"
        ):
            for _ in files.lines(path):
                pass
        assert tracemalloc.get_traced_memory()[1] < 80e6
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("compression", ["gzip", "zstd", "snappy"])
def test_a_parquet_file_that_explodes_is_refused(tmp_path, compression):
    """Snappy packs letters to a 21st at most, so a limit of 10 stands for 100 there."""
    path, table = (
        tmp_path / "x.parquet",
        pyarrow.table({"n": [0.0] * 5, "a": [c * 1_000_000 for c in "abcde"]}),
    )
    pyarrow.parquet.write_table(table, path, compression=compression, use_dictionary=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "RATIO", 10 if compression == "snappy" else 100)
        with pytest.raises(
            ValueError, match=r"x.parquet, column 'a': it unpacks to over 100? times its size"
        ):
            sentences(path, "a")
        patch.setattr(files, "RATIO", 100_000)
        assert len(sentences(path, "a", longest=1_000_000)) == 5


def test_numbers_beside_the_texts_of_a_parquet_file_may_explode(tmp_path):
    path = tmp_path / "x.parquet"
    table = pyarrow.table({"n": np.zeros(600_000), "a": ["x", "y"] * 300_000})
    pyarrow.parquet.write_table(table, path, compression="zstd", use_dictionary=["a"])
    column = pyarrow.parquet.read_metadata(path).row_group(0).column(0)
    assert column.total_uncompressed_size > max(files.UNPACKED, files.RATIO * column.total_compressed_size)
    assert next(Reading(Corpus(str(path), ("a",)))) == ("x",)


def test_equal_sentences_of_a_parquet_file_take_bounded_memory(tmp_path):
    """12,000 texts of 10 kB, which the file has once: 120 MB if they were all read together."""
    path = tmp_path / "x.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"a": ["b" * 10_000] * 12_000}), path)
    most = rows = 0
    tracemalloc.start()
    try:
        for rows, _ in enumerate(Reading(Corpus(str(path), ("a",))), 1):
            if rows % 500 == 0:
                most = max(most, pyarrow.total_allocated_bytes())
        assert rows == 12_000 and most < 40e6
        assert tracemalloc.get_traced_memory()[1] < 40e6
    finally:
        tracemalloc.stop()


def test_a_damaged_archive_is_named(tmp_path):
    whole = gzip.compress(b"some words\n" * 1000)
    with pytest.raises(OSError, match="x.txt.gz: cannot be read"):
        sentences(written(tmp_path / "x.txt.gz", whole[: len(whole) // 2]))
    with pytest.raises(OSError, match="x.parquet: cannot be read: Parquet magic bytes"):
        sentences(written(tmp_path / "x.parquet", b"nonsense"), "a")


def test_an_impossible_request_is_refused_at_once():
    with pytest.raises(ValueError, match="sample=0"):
        Corpus("x.txt", sample=0)
    with pytest.raises(ValueError, match="'d'"):
        Corpus("x.csv", ("a", "b", "c", "d"))


@pytest.mark.parametrize("path", ["missing.txt", "owner/name/file.csv.gz", "/nowhere/at/all", "../up"])
def test_a_missing_file_is_not_looked_for_on_the_hub(path, monkeypatch):
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: pytest.fail("the hub was asked"))
    assert not is_hub_id(path)
    with pytest.raises(FileNotFoundError, match="no such file"):
        sentences(path)


def test_an_existing_folder_is_no_hub_data_set_whatever_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert is_hub_id("owner/name") and is_hub_id("name")
    written(tmp_path / "owner" / "name" / "x.txt", "one")
    assert not is_hub_id("owner/name") and sentences("owner/name") == [("one",)]


def test_a_hub_data_set_is_read_like_a_file(monkeypatch):
    data = datasets.Dataset.from_dict({"id": [1, 2, 3], "b": ["x", "", "z"], "a": ["p", "q", "r"]})
    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda name, split: asked.append((name, split)) or data)
    rows, counts = read(Corpus("someone/pairs", ("a", "b")), longest=9)
    assert (rows, counts.blank, asked) == ([("p", "x"), ("r", "z")], 1, [("someone/pairs", "train")])
    before = fingerprint(Corpus("someone/pairs", ("a", "b")))
    data = data.select([0, 1])
    assert fingerprint(Corpus("someone/pairs", ("a", "b"))) != before


def test_a_hub_that_fails_says_so_in_one_kind_of_error(monkeypatch):
    def fails(*args, **kwargs):
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", fails)
    with pytest.raises(FileNotFoundError, match="someone/pairs.*no route"):
        sentences("someone/pairs", "a")


def test_the_fingerprint_changes_with_all_that_changes_the_rows_and_with_nothing_else(tmp_path):
    path = written(tmp_path / "d" / "x.csv", b"a,b\nx,\xff\n")  # not UTF-8: it is never decoded
    base = fingerprint(Corpus(str(path), ("a",)))
    others = {fingerprint(Corpus(str(path), ("b",))), fingerprint(Corpus(str(path), ("a",), 5))}
    path.touch()
    assert fingerprint(Corpus(str(path), ("a",))) == base
    others |= {fingerprint(Corpus(str(written(path, b"a,b\nx,\xfe\n")), ("a",)))}
    folder = Corpus(str(path.parent), ("a",))
    others |= {fingerprint(folder)}
    written(path.parent / "y.csv", b"a\n")
    others |= {fingerprint(folder)}
    (path.parent / "y.csv").rename(path.parent / "z.csv")
    others |= {fingerprint(folder)}
    assert len(others | {base}) == 7


@pytest.mark.parametrize("kind", WRITERS)
def test_a_url_gives_the_rows_and_the_fingerprint_of_the_local_file(tmp_path, remote, kind):
    path = tmp_path / f"pairs.{kind}"
    WRITERS[kind](path, PAIRS)
    url = remote(f"far/pairs.{kind}", path.read_bytes())
    assert sentences(url, "a", "b") == PAIRS
    assert fingerprint(Corpus(url, ("a",))) == fingerprint(Corpus(str(path), ("a",)))


@pytest.mark.parametrize("suffix", COMPRESS)
def test_a_url_is_unpacked_by_its_suffix(remote, suffix):
    assert sentences(remote(f"x.TXT{suffix.upper()}", COMPRESS[suffix](b"one\ntwo\n"))) == [
        ("one",),
        ("two",),
    ]


def test_a_url_without_a_suffix_is_a_directory_as_a_local_one_is(tmp_path, remote):
    for name in ("a-b/z.txt", "a/z.txt", "c.txt", "README.md"):  # as strings, a-b/z.txt comes first
        written(tmp_path / "far" / name, name)
        remote(f"far/{name}", name.encode())
    expected = [("a/z.txt",), ("a-b/z.txt",), ("c.txt",)]
    assert sentences("memory://far") == sentences(tmp_path / "far") == expected
    assert fingerprint(Corpus("memory://far")) == fingerprint(Corpus(str(tmp_path / "far")))


def test_a_file_of_the_web_is_read_as_a_local_one(tmp_path, capfd):
    path = written(tmp_path / "x.txt.gz", gzip.compress(b"one\ntwo\n"))
    with serving(partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))) as url:
        for place in (f"{url}/x.txt.gz", f"simplecache::{url}/x.txt.gz"):
            assert sentences(place) == [("one",), ("two",)]
            assert fingerprint(Corpus(place)) == fingerprint(Corpus(str(path)))


@pytest.mark.parametrize(
    ("name", "data", "columns", "words"),
    [
        ("x.txt", b"fine\nab\xe9cd\n", (), [":2: byte 0xe9 is not UTF-8"]),
        ("x.csv", b"a,b\nz\n", ("a",), [":2: 1 fields, 2 expected"]),
        ("x.jsonl", b'{"a": 1}\n', ("a",), [":1: text expected in 'a'"]),
        ("x.docx", b"", (), [": no corpus file"]),
    ],
)
def test_bad_input_at_a_url_is_named_with_its_place(remote, name, data, columns, words):
    url = remote(f"far/{name}", data)
    with pytest.raises(ValueError) as error:
        sentences(url, *columns)
    assert str(error.value).startswith(f"{url}{words[0]}") and words[-1] in str(error.value)


def test_a_damaged_archive_at_a_url_is_named(remote):
    whole = gzip.compress(b"some words\n" * 1000)
    with pytest.raises(OSError, match="^memory://far/x.txt.gz: cannot be read: Compressed"):
        sentences(remote("far/x.txt.gz", whole[: len(whole) // 2]))
    with pytest.raises(OSError, match="^memory://far/x.parquet: cannot be read: Parquet magic bytes"):
        sentences(remote("far/x.parquet", b"nonsense"), "a")


@pytest.mark.parametrize("url", ["memory://no.txt", "memory://no.parquet", "server/x.txt"])
def test_a_url_where_nothing_is_says_so(url):
    url = url.replace("server", nowhere())  # here: two processes must collect the same names
    for asked in (fingerprint, partial(read, longest=9)):
        with pytest.raises(FileNotFoundError, match=f"^{url}: no such file, or it cannot be reached$"):
            asked(Corpus(url, ("a",) if url.endswith("parquet") else ()))


@pytest.mark.parametrize(
    ("protocol", "package"), [("s3", "s3fs"), ("gs", "gcsfs"), ("hf", "huggingface_hub")]
)
@pytest.mark.parametrize("chain", ["", "simplecache::"])
def test_a_package_that_a_url_needs_is_asked_for_by_name(monkeypatch, protocol, package, chain):
    monkeypatch.delitem(_registry, protocol, raising=False)  # where it is installed, and was asked for before
    monkeypatch.setitem(sys.modules, package, None)
    url = f"{chain}{protocol}://datasets/owner/x.txt.gz"
    for asked in (sentences, located):
        with pytest.raises(ValueError, match=f"^{url} needs {package} .*: pip install {package}$"):
            asked(url)


def test_an_unknown_protocol_is_named():
    for asked in (sentences, located):
        with pytest.raises(OSError, match="^s4://b/x.txt: cannot be read: Protocol not known: s4$"):
            asked("s4://b/x.txt")


def test_an_error_without_words_is_named_by_its_kind(remote, monkeypatch):
    def late(*args, **kwargs):
        raise TimeoutError

    url = remote("x.txt", b"one")
    monkeypatch.setattr(MemoryFileSystem, "open", late)
    with pytest.raises(OSError, match="^memory://x.txt: cannot be read: TimeoutError$"):
        sentences(url)


@pytest.mark.parametrize("name", ["~x.txt", "a::b.txt", "[x]*.txt", "file:x.txt"])
def test_a_local_name_is_taken_literally(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    assert sentences(written(Path(name), "one\n")) == [("one",)]
    assert fingerprint(Corpus(name)) == fingerprint(Corpus(str(tmp_path / name)))


ROWS = [(f"the {i}th" + " line" * (i % 7), "two\nlines" if i % 50 == 3 else f"b{i}") for i in range(3_000)]


def hub(rows, monkeypatch):
    made = datasets.Dataset.from_list([{"a": a, "b": b} for a, b in rows])
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: made)
    return Corpus("some/hub", ("a", "b"))


def halves(rows, kind, folder):
    """Two files of a kind, of 1,200 rows and of the rest, the first of which has row groups of 250."""
    pack = COMPRESS.get(kind.removeprefix("txt"), bytes)
    for half, path in ((rows[:1_200], folder / f"1.{kind}"), (rows[1_200:], folder / f"2.{kind}")):
        if kind in WRITERS:
            WRITERS[kind](path, half)
        else:
            written(path, pack("".join(f"{a}\n" for (a,) in half).encode()))
    if kind == "parquet":
        table = pyarrow.parquet.read_table(folder / "1.parquet")
        pyarrow.parquet.write_table(table, folder / "1.parquet", row_group_size=250)
    return Corpus(str(folder), ("a", "b") if kind in WRITERS else ())


@pytest.mark.parametrize("kind", ["txt", "txt.gz", "txt.bz2", "txt.xz", "txt.zst", *WRITERS, "hub"])
def test_reading_resumes_at_the_place_of_any_row(tmp_path, monkeypatch, kind):
    """From a place on come the rows from there on, whatever the format; two files, many pieces and groups."""
    monkeypatch.setattr(files, "BLOCK", 1 << 10)
    wanted = [(a,) if "txt" in kind else (a, b[:3] if kind == "tsv" else b) for a, b in ROWS]
    corpus = hub(wanted, monkeypatch) if kind == "hub" else halves(wanted, kind, tmp_path)
    rows, seen, places = Reading(corpus), [], {}
    for count in range(len(wanted)):
        if count % 97 == 0 or count in (1, 2, 249, 250, 251, 1_199, 1_200, 1_201):
            places[count] = rows.place
        seen.append(next(rows))
    assert seen == wanted and list(rows) == [] == list(Reading(corpus, rows.place))
    for count, place in places.items():
        again = Reading(corpus, place)
        assert list(islice(again, 30)) == wanted[count : count + 30], (count, place)
        assert list(islice(Reading(corpus, again.place), 5)) == wanted[count + 30 : count + 35]
    skips = max(place.skip for place in places.values())
    assert kind == "hub" or skips < (1_800 if kind == "parquet" else 200)  # a place is near its row


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet", "txt"])
def test_an_error_after_a_place_names_the_line_of_the_file(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(files, "BLOCK", 1 << 10)
    path, columns = tmp_path / f"x.{kind}", ("a",)
    if kind == "txt":
        columns, line = (), "2501: byte 0xff"
        written(path, b"some words\n" * 2_500 + b"\xff\n")
    elif kind == "csv":
        line = "2501: 3 fields"
        written(path, "a,b\n" + '"the\ncat",2\n' * 1_249 + "x,y\nx,y,z\n")
    elif kind == "jsonl":
        line = "2501: text expected"
        written(path, '{"a": "words"}\n' * 2_500 + '{"a": 3}\n')
    else:
        line = "row 2501: NUL"
        rows = pyarrow.table({"a": ["words"] * 2_500 + ["\0"]})
        pyarrow.parquet.write_table(rows, path, row_group_size=600)
    rows = Reading(Corpus(str(path), columns))
    deque(islice(rows, 1_240), maxlen=0)
    with pytest.raises(ValueError, match=f"x.{kind}.{'? ' if kind == 'parquet' else ''}{line}"):
        list(Reading(Corpus(str(path), columns), rows.place))


@pytest.mark.parametrize("name", ["config.json", "modules.json"])
def test_the_directory_of_a_model_is_no_corpus_though_its_vocabulary_is_text(tmp_path, name):
    for file in (name, "vocab.txt", "below/modules.json"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("a\n")
    for path in (tmp_path, f"{tmp_path}/", f"file://{tmp_path}"):
        with pytest.raises(ValueError, match=rf"holds a model \({name}\), no corpus: name a file of texts"):
            found(str(path))
    (tmp_path / name).unlink()
    assert found(str(tmp_path)) == [str(tmp_path / "vocab.txt")]

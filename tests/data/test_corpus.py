"""Any kind of text gives the same sentences, one after the other, and bad text says where it is bad."""

import bz2
import csv
import gzip
import json
import lzma
import tracemalloc

import datasets
import pandas
import pytest
import zstandard

from whitenedcse.data.corpus import Corpus, fingerprint, is_hub_id, read, rows, texts
from whitenedcse.data.files import blank, fields, in_quotes

FRAME = pandas.DataFrame({"id": [0, 1, 2, 3]})
FRAME["b"] = ['He said "no" twice', "six\u2028six", " acht ü", '"all"']
FRAME["a"] = ["one, two", "tab\there", "two\nlines", "x"]
PAIRS = list(zip(FRAME["a"], FRAME["b"], strict=True))
COMPRESS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstandard.compress}
KINDS = ("csv", "tsv", "jsonl", "json", "parquet")


def written(path, data):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def saved(frame, path):
    """The frame as pandas writes it."""
    ways = {"csv": lambda: frame.to_csv(path, index=False), "parquet": lambda: frame.to_parquet(path)}
    ways["tsv"] = lambda: frame.to_csv(path, index=False, sep="\t")
    ways["jsonl"] = lambda: frame.to_json(path, orient="records", lines=True)
    ways["json"] = lambda: frame.to_json(path, orient="records")
    ways[path.suffix[1:]]()
    return path


def sentences(path, *columns, sample=None):
    return read(Corpus(str(path), columns, sample))[0]


def test_one_frame_gives_equal_pairs_whatever_the_format_here_or_at_a_url(tmp_path, remote):
    for kind in KINDS:
        path = saved(FRAME, tmp_path / f"x.{kind}")
        remote(f"x.{kind}", path.read_bytes())
        for place in (path, f"memory://x.{kind}"):
            assert sentences(place, "a", "b") == PAIRS, place
        if kind in ("csv", "tsv", "jsonl"):  # as pairs of a task are read
            assert [(row["a"], row["b"]) for _, row in fields(path, {})] == PAIRS
        other = saved(FRAME, tmp_path / f"x[1].{kind}")  # is no pattern, which x1 would fit
        saved(FRAME[::-1], tmp_path / f"x1.{kind}")
        assert sentences(other, "a", "b") == PAIRS, other
        alone = saved(FRAME[["id", "b"]], tmp_path / f"alone.{kind}")
        if kind not in ("csv", "tsv"):  # where numbers are text too
            assert sentences(alone) == [(b,) for b in FRAME["b"]], kind


def test_quotes_in_a_file_with_tabs_are_those_of_a_writer_or_text(tmp_path):
    for text, quoted in (
        ('a\tb\n"open\tx\ny"\tz\n', False),
        ('a\tb\n"Say ""no"""\tz\n', True),
        ('a\tb\n"Say ""no"""\tHe "said"\n', False),
        ('"a"\t"b"\n"x"\t"z"\n', True),
        ('a\tb\n"x"\tz\n', False),
        ('a\tb\n"never closed ""\tz\n', False),
        ('a\tb\n"x\ty"\tz\n', True),  # as they stand, the lines are no table
        ('a\tb\n"x\ny"\tz\n', True),
        ('a\tb\n"x, y"\tz\nq\t"w, w"\n', True),  # as Excel writes commas
        ('a\tb\n"x, y"\tz, z\nq\t"w, w"\n', False),
        ('a\tb\n"x, y"\t"z"\n', False),
        ('a\tb\n"Say ""no"""\tz\n"open\tw\n', False),
        ('a\tb\n"Say ""no"""\tz\nw\n', False),
    ):
        assert in_quotes(text.splitlines()) == quoted, text
    path = written(tmp_path / "unquoted.tsv", 'a\tb\n"open\tx\ny"\tz\n')
    assert sentences(path, "a", "b") == [('"open', "x"), ('y"', "z")]


def excel(frame, path):
    """A frame as Excel saves text with tabs: CRLF, a BOM, and commas in quotes as well."""

    def cell(value):
        text = str(value)
        return '"' + text.replace('"', '""') + '"' if set(text) & set('",\t\n') else text

    rows = [frame.columns, *frame.itertuples(index=False)]
    path.write_bytes("\ufeff".encode() + "".join("\t".join(map(cell, r)) + "\r\n" for r in rows).encode())


WRITERS = {
    "minimal": lambda f, path, sep: f.to_csv(path, index=False, sep=sep),
    "all": lambda f, path, sep: f.to_csv(path, index=False, sep=sep, quoting=csv.QUOTE_ALL),
    "on Windows": lambda f, path, sep: f.to_csv(path, index=False, sep=sep, lineterminator="\r\n"),
    "with a BOM": lambda f, path, sep: f.to_csv(path, index=False, sep=sep, encoding="utf-8-sig"),
    "Excel": lambda f, path, sep: excel(f, path) if sep == "\t" else f.to_csv(path, index=False),
}
ODD = ["plain", 'He said "no"', '"all"', "a, b", "tab\there", "two\nlines", "it's", "x" * 100_000, '"', "NA"]


def test_a_table_is_read_as_pandas_reads_it_whatever_wrote_it(tmp_path):
    """The oracle is the file's own writer, read back by pandas: cells that are odd alone, and together."""
    for cells in (ODD, *([text, "plain", "words"] for text in ODD)):
        frame = pandas.DataFrame({"a": cells, "b": cells[::-1], "n": range(len(cells))})
        for name, write in WRITERS.items():
            for kind, sep in (("csv", ","), ("tsv", "\t")):
                write(frame, path := tmp_path / f"x.{kind}", sep)
                said = pandas.read_csv(path, sep=sep, keep_default_na=False, encoding="utf-8-sig")
                assert list(said["a"]) == cells, "the oracle itself"
                assert sentences(path, "a", "b") == [*zip(said["a"], said["b"], strict=True)], (name, kind)


def test_text_is_read_as_it_is_whatever_packs_it(tmp_path, remote):
    data = "\ufeffone\r\n two \u2028three\x0bfour\n\nfive".encode()
    wanted = [("one",), (" two \u2028three\x0bfour",), ("five",)]
    for suffix, pack in {"": bytes, **COMPRESS}.items():
        assert sentences(written(tmp_path / f"x.txt{suffix}", pack(data))) == wanted, suffix
        remote(f"x.txt{suffix}", pack(data))
        assert sentences(f"memory://x.txt{suffix}") == wanted, suffix
        if suffix:
            with pytest.raises((OSError, ValueError), match=f"cut.txt{suffix}"):
                sentences(written(tmp_path / f"cut.txt{suffix}", pack(data * 9999)[:-20]))


def test_a_directory_is_its_files_sorted_at_any_depth_without_hidden_ones(tmp_path, remote):
    for name in ("a-b/x.txt", "a/z.txt", "b.txt", ".c.txt", ".d/e.txt", "notes.md"):
        written(tmp_path / ".h/d" / name, name)
        remote(f"d/{name}", name.encode())
    assert sentences(tmp_path / ".h/d") == [("a/z.txt",), ("a-b/x.txt",), ("b.txt",)]
    second = f"local://{tmp_path}/.h/d"  # a name of file://, as az:// is one of abfs://
    assert sentences("memory://d") == sentences(second) == [("a/z.txt",), ("a-b/x.txt",), ("b.txt",)]
    with pytest.raises(ValueError, match="no corpus file; supported are .txt, .tsv"):
        sentences(written(tmp_path / "x.md", "x"))


def test_blank_null_and_other_fields_are_dropped_and_counted_and_repeats_are(tmp_path):
    cells = ["a", None, "", " \u200b", "\ufeff\u00ad", 3, ["x"], "b", "a", "a"]
    path = written(tmp_path / "x.jsonl", "\n".join(json.dumps({"t": cell}) for cell in cells))
    kept, counts = read(Corpus(str(path), ("t",)))
    assert kept == [("a",), ("b",), ("a",), ("a",)]
    assert counts == (10, 6, 4, 2)
    signs = ("\u00ad", "\u3000", "\x07", "\u200b \ufeff", ".", "\U0001f600", "\u200bx")
    assert [blank(text) for text in signs] == [True] * 4 + [False] * 3
    path = written(tmp_path / "x.txt", "a\n\n\u200b\nb\n")
    assert list(rows(Corpus(str(path)))) == [("a",), ("",), ("\u200b",), ("b",)]  # row i is line i
    assert list(texts(Corpus(str(path)))) == ["a", "b"]
    with pytest.raises(ValueError, match="0 usable sentences in 2 lines: blank, or no texts"):
        read(Corpus(str(written(tmp_path / "y.txt", "\n \n"))))


def test_a_sample_is_uniform_in_order_and_always_the_same(tmp_path):
    path = written(tmp_path / "x.txt", "\n\n".join(map(str, range(1000))))
    drawn = [int(row[0]) for row in sentences(path, sample=200)]
    assert drawn == sorted(set(drawn)) and len(drawn) == 200
    assert drawn == [int(row[0]) for row in rows(Corpus(str(path), (), 200))]
    assert abs(sum(drawn) / 200 - 500) < 60
    assert len(sentences(path, sample=2000)) == 1000


def test_a_corpus_is_streamed(tmp_path):
    """Ten thousand sentences are never in memory together."""
    for name in ("x.txt", "x.csv"):
        path = written(tmp_path / name, "t\n" + "\n".join(f"{i} " + "word " * 200 for i in range(10_000)))
        list(rows(Corpus(str(path), ("t",) * name.endswith("csv"), None))).clear()
        tracemalloc.start()
        assert sum(1 for _ in texts(Corpus(str(path), ("t",) * name.endswith("csv")))) >= 10_000
        assert tracemalloc.get_traced_memory()[1] < 2_000_000  # of ten million bytes
        tracemalloc.stop()


def test_bad_input_is_named_with_its_place(tmp_path):
    for name, data, columns, words in (
        ("x.txt", "a\n", ["t"], "plain text has no columns"),
        ("x.txt", "a\nb\xe9".encode("latin1"), [], "x.txt: cannot be read: 'utf-8' codec"),
        ("x.txt", "a\nb".encode("utf-16-le"), [], "x.txt: .*a NUL, as UTF-16 has"),
        ("x.csv", "a,b\nx,y\n", [], "its columns are a, b; name those of texts: .* of evaluate.py columns="),
        ("x.csv", "text,b\nx,y\n", ["texd"], "no column 'texd' among text, b"),
        ("x.csv", "a\nx,y\n", ["a"], "x.csv:2: 2 fields, 1 different ones expected"),
        ("x.csv", "a,a\nx,y\n", ["a"], "x.csv:1: 2 fields, 1 different"),
        ("x.csv", 'a,b\n"x,y\n', ["a"], "x.csv:.*unexpected end of data"),
        ("x.jsonl", '{"a": "x"}\n{"a" "y"}\n', ["a"], "x.jsonl:2: not JSON"),
        ("x.jsonl", "[1]\n", ["a"], "x.jsonl:1: an object with fields expected"),
    ):
        with pytest.raises((ValueError, OSError), match=words):
            sentences(written(tmp_path / name, data), *columns)


def test_a_hub_data_set_is_read_like_a_file_and_what_is_nowhere_says_so(tmp_path, monkeypatch):
    asked = []
    data = datasets.Dataset.from_pandas(FRAME)
    monkeypatch.setattr(datasets, "load_dataset", lambda name, **how: asked.append((name, how)) or data)
    assert sentences("owner/name", "a", "b") == PAIRS
    assert asked == [("owner/name", {"split": "train", "streaming": True})]
    names = ("name", "owner/name", "x.txt", "a/b/c", "s3://x")
    assert [*map(is_hub_id, names)] == [True, True, False, False, False]

    def fails(*_, **__):
        raise RuntimeError("gone")

    monkeypatch.setattr(datasets, "load_dataset", fails)
    for path, words in (
        ("owner/name", "the hub did not give it: gone"),
        (tmp_path / "no.txt", "no such file or directory"),
        ("memory://no.csv", "no such file, or it cannot be reached"),
    ):
        with pytest.raises(FileNotFoundError, match=words):
            sentences(path, "a")
    with pytest.raises(OSError, match="gs://bucket/x.txt: cannot be read: .*nstall gcsfs"):
        sentences("gs://bucket/x.txt")


def test_the_fingerprint_changes_with_all_that_changes_the_rows_and_with_nothing_else(tmp_path):
    path = written(tmp_path / "d" / "x.txt", "a\nb\n")
    first = fingerprint(Corpus(str(path)))
    assert fingerprint(Corpus(str(path))) == first
    others = [Corpus(str(path), ("t",)), Corpus(str(path), (), 1)]
    assert len({first, *map(fingerprint, others)}) == 3
    written(path, "a\nc\n")  # of equal size
    assert fingerprint(Corpus(str(path))) != first
    moved = written(tmp_path / "e" / "x.txt", "a\nb\n")
    assert fingerprint(Corpus(str(moved))) == first

"""A name is found where it lies, else fetched from a hub (a local stand-in), else explained in one line."""

import hashlib
import io
import os
import tarfile
import time
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pyarrow.parquet
import pytest
from encoders import COMMIT, nowhere, serving

from whitenedcse.data import sources
from whitenedcse.data.corpus import texts
from whitenedcse.data.sources import MNLI, SIMCSE, SNLI, located, named, present, roots, senteval

TREE = {"STS/STSBenchmark/sts-dev.csv": b"x\n", "SICK/SICK_trial.txt": b"y\n"}


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch):
    """An empty data folder, and no other; a hub that is nowhere."""
    monkeypatch.setenv("HF_ENDPOINT", nowhere())
    folder = tmp_path / "root"
    folder.mkdir()
    placed(tmp_path / "project/train.py")
    monkeypatch.setenv("WHITENEDCSE_DATA", str(folder))
    monkeypatch.setattr(sources, "__file__", str(tmp_path / "project/whitenedcse/data/sources.py"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.chdir(tmp_path)
    return folder


def answer(hub, path, wanted):
    """Status, headers and body for a file, from the byte on that the header Range names."""
    repository, _, file = path.removeprefix("/datasets/").partition("/resolve/main/")
    data = hub.get(file if repository == SIMCSE else f"{repository}: {file}")
    if data is None:
        return 404, {"X-Error-Code": "EntryNotFound"}, b""
    headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"'}
    if not wanted:
        return 200, headers, data
    start = int(wanted.removeprefix("bytes=").removesuffix("-"))
    return 206, headers | {"Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}"}, data[start:]


@pytest.fixture
def hub(monkeypatch):
    """What the hub holds: file name -> bytes; "sent": number of a GET, its bytes -> the bytes sent."""
    files, asked = {"sent": lambda number, data: data}, []

    def reply(request):
        status, headers, body = answer(files, request.path, request.headers.get("Range"))
        asked.append((request.command, len(body)))
        number = [method for method, _ in asked].count("GET")
        headers |= {"X-Repo-Commit": COMMIT, "Content-Length": str(len(body))}
        return status, headers, files["sent"](number, body)

    files["asked"] = asked
    with serving(reply) as url:
        monkeypatch.setenv("HF_ENDPOINT", url)
        yield files


def placed(path, data=b"text\n"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def archive(members):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            if isinstance(data, str):
                member.type, member.linkname = tarfile.SYMTYPE, data
                tar.addfile(member)
            else:
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def test_the_roots_are_the_chosen_folder_then_the_projects_own_each_once(root, tmp_path, monkeypatch):
    """The clone's, which an installed package has not, and the package's, which has the quick start."""
    project, own = tmp_path / "project", tmp_path / "project/whitenedcse/data"
    assert roots() == [root, project / "data", own]
    monkeypatch.delenv("WHITENEDCSE_DATA")
    assert roots() == [tmp_path / "data", project / "data", own]
    monkeypatch.setenv("WHITENEDCSE_DATA", str(project / "data"))
    assert roots() == [project / "data", own]
    (project / "train.py").unlink()
    monkeypatch.delenv("WHITENEDCSE_DATA")
    assert roots() == [tmp_path / "data", own]


def test_a_path_wins_then_a_known_place_under_the_first_root(root, tmp_path):
    own = placed(tmp_path / "project" / "data" / "wiki1m_for_simcse.txt")
    assert located("wiki1m") == own
    chosen = placed(root / "wiki" / "wiki1m_for_simcse.txt")
    assert located("wiki1m") == chosen
    assert placed(tmp_path / "project" / "data" / "quickstart" / "sentences.txt") == located("quickstart")
    assert placed(root / "wiki" / "wiki1m_like.txt.bz2") == located("wiki1m_like")
    assert placed(root / "nli_for_simcse.csv") == located("nli_for_simcse")
    assert named("nli_for_simcse", "sent1") == named("nli_for_simcse", ["sent1"])
    placed(tmp_path / "wiki1m")
    assert located("wiki1m") == Path("wiki1m")
    with pytest.raises(FileNotFoundError, match="wiki1n: .*'wiki1m', 'nli'"):
        located("wiki1n")


def test_a_corpus_is_fetched_once(root, hub):
    hub["wiki1m_for_simcse.txt"] = b"A sentence.\n" * 1000
    path = located("wiki1m")
    assert path == root / "wiki1m_for_simcse.txt" and path.read_bytes() == b"A sentence.\n" * 1000
    asked = list(hub["asked"])
    assert [method for method, _ in asked].count("GET") == 1
    assert located("wiki1m") == path and hub["asked"] == asked


TEXT = "".join(f"Sentence {i}.\n" for i in range(1000)).encode()
OTHER = hashlib.sha256(TEXT.replace(b"7", b"8")).hexdigest()


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (lambda number, data: data[: len(data) // 2] if number == 1 else b"", "could not be downloaded"),
        (lambda number, data: data.replace(b"7", b"8"), f"sha256 {OTHER[:12]}.*deleted, try again"),
    ],
)
def test_what_came_damaged_is_deleted_and_the_next_attempt_is_whole(root, hub, monkeypatch, sent, words):
    """The hub library writes pieces of 10 MB and waits a second after each failure, here in miniature."""
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 1000)
    clock = SimpleNamespace(**vars(time) | {"sleep": lambda seconds: None})
    monkeypatch.setattr(huggingface_hub.file_download, "time", clock)
    hub["nli_for_simcse.csv"], whole = TEXT, hub["sent"]
    hub["sent"] = sent
    with pytest.raises(FileNotFoundError, match=f"^nli_for_simcse: .*{words}[^\n]*$"):
        located("nli_for_simcse")
    left = [p for p in root.rglob("*") if p.is_file() and p.stat().st_size >= 1000]
    assert {p.suffix for p in left} <= {".incomplete"}  # which old releases of the hub library resume
    hub["sent"] = whole
    assert located("nli_for_simcse").read_bytes() == TEXT


def test_a_corpus_of_several_files_is_fetched_whole_or_not_there(root, hub):
    parts = [(MNLI, "data/train-00000-of-00001.parquet")]
    parts += [(SNLI, f"plain_text/{part}-00000-of-00001.parquet") for part in ("train", "validation", "test")]
    for i, (repository, file) in enumerate(parts):
        pairs = {"premise": [f"p{i}", ""], "hypothesis": [f"h{i}", "h"], "label": [-1, 0]}
        pyarrow.parquet.write_table(pyarrow.table(pairs), buffer := io.BytesIO())
        hub[f"{repository}: {file}"] = buffer.getvalue()
    last = hub.pop(f"{SNLI}: {parts[-1][1]}")
    with pytest.raises(FileNotFoundError, match="^nli: no mnli_snli in .*test-00000.*from stanfordnlp/snli"):
        located("nli")
    assert present("nli", roots()) is None
    hub[f"{SNLI}: {parts[-1][1]}"], asked = last, len(hub["asked"])
    pairs = {"premise": ["mine"], "hypothesis": ["own"]}  # put there by hand: not to be overwritten
    pyarrow.parquet.write_table(pyarrow.table(pairs), root / "mnli_snli" / parts[0][1])
    assert located("nli") == root / "mnli_snli"
    assert [method for method, _ in hub["asked"][asked:]].count("GET") == 1  # the three others were there
    assert sorted(texts(named("nli"))) == ["h", "h", "h", "h1", "h2", "h3", "mine", "own", "p1", "p2", "p3"]


@pytest.mark.parametrize(
    ("top", "member"),
    [
        ("./", {"../../../outside.txt": b"!"}),
        ("SentEval/data/downstream/", {"/outside.txt": b"!"}),
        ("", {"link": "../../secret"}),
    ],
)
def test_senteval_is_unpacked_whatever_its_top_folder_and_nothing_outside(root, hub, tmp_path, top, member):
    hub["senteval.tar"] = archive({top + name: data for name, data in TREE.items()} | member)
    folder = senteval()
    assert folder == root / "senteval"
    assert {name: (folder / name).read_bytes() for name in TREE} == TREE
    assert sorted(p.name for p in root.iterdir()) == [".cache", "senteval", "senteval.tar"]
    assert not list(tmp_path.rglob("outside.txt")) and not os.path.lexists(folder / "link")
    asked = list(hub["asked"])
    assert senteval() == folder and hub["asked"] == asked


def test_a_useless_archive_leaves_nothing(root):
    for data in (b"no archive", archive(TREE)[:700], archive({"x": b""})):
        placed(root / "senteval.tar", data)
        with pytest.raises(ValueError, match=r"^\S*senteval.tar\b.*; delete it and start again$"):
            senteval()
        assert [p.name for p in root.iterdir()] == ["senteval.tar"]
    placed(root / "senteval.tar", archive(TREE))  # needs no hub
    assert (senteval() / "SICK" / "SICK_trial.txt").read_bytes() == b"y\n"


@pytest.mark.parametrize("reason", ["dead", "offline", "absent"])
def test_what_cannot_be_had_is_explained_in_one_line_and_at_once(root, request, monkeypatch, reason):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", reason == "offline")
    if reason == "absent":
        request.getfixturevalue("hub")
    start, archive = time.monotonic(), reason == "absent"
    with pytest.raises(FileNotFoundError) as error:
        senteval() if archive else located("wiki1m")
    message = str(error.value)
    file = "senteval.tar" if archive else "wiki1m_for_simcse.txt"
    assert all(word in message for word in (file, str(root), SIMCSE, "WHITENEDCSE_DATA")), message
    assert "\n" not in message
    assert time.monotonic() - start < 10, "the hub library's own retries take 23 s"


def test_what_is_on_no_hub_asks_none(hub):
    with pytest.raises(FileNotFoundError, match=r"wiki1m_like: no wiki/wiki1m_like\.txt\.bz2 .*_DATA"):
        located("wiki1m_like")
    assert hub["asked"] == []

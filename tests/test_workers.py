"""Several processes make the bytes that one makes, and none of them outlives its work or its parent."""

import json
import pickle
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest
import torch
from encoders import paced
from test_words import ODD, TEXT, byte_level, wordpiece

from whitenedcse.data import tokens
from whitenedcse.data import words as words_module
from whitenedcse.data.corpus import Corpus
from whitenedcse.data.tokens import batches_of_ids, token_ids, tokenised
from whitenedcse.data.words import memory

pytestmark = pytest.mark.filterwarnings("ignore:.*lines cut to:UserWarning")
LENGTH = 12
ODD = [odd for odd in ODD if "\0" not in odd]  # no text file has it
LINES = [f"{odd} the{odd}cat {odd} {TEXT[i:]}" for i, odd in enumerate(ODD) if odd.strip()]
LINES += [
    "the cat\u2028was\u2029very\x85well\x0bknown",
    "the  cat ",
    " ",
    "cat " * 20_000,
    "東京" * 9_000,
    "\ufeff",
]
LINES += ["\U0001f642 \U00020000x", "a\rb", *(f"{TEXT[:i]} {i}" for i in range(60)), "the cat"]


def split_special_tokens():
    tokenizer = wordpiece()
    tokenizer.split_special_tokens = True
    return tokenizer


KINDS = {"WordPiece": wordpiece, "bytes": byte_level, "special tokens are text": split_special_tokens}


def written(tmp_path, columns):
    """A corpus of the lines, or of pairs of them."""
    if not columns:
        (tmp_path / "x.txt").write_bytes("\n".join(LINES).encode())
        return Corpus(str(tmp_path / "x.txt"))
    rows = [json.dumps({"a": a, "b": b}) for a, b in zip(LINES, LINES[::-1], strict=True)]
    (tmp_path / "x.jsonl").write_text("\n".join(rows))
    return Corpus(str(tmp_path / "x.jsonl"), ("a", "b"))


@pytest.fixture
def started(monkeypatch):
    """The processes of these tests, for which a few sentences are enough."""
    found, start = [], words_module.Popen
    monkeypatch.setattr(words_module, "Popen", lambda *a, **k: found.append(start(*a, **k)) or found[-1])
    for name, value in {"EACH": 1, "FEW": 1, "BATCH": 5}.items():
        monkeypatch.setattr(tokens, name, value)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    yield found
    assert all(process.returncode is not None for process in found), "one is still there"


def caches(folder):
    """Whole ones and drafts."""
    return [path for path in folder.iterdir() if path.is_dir()]


def cached(corpus, tokenizer, folder):
    """The bytes of the cache."""
    tokenised(corpus, tokenizer, LENGTH, cache_dir=folder)
    (cache,) = caches(folder)
    return {file.name: file.read_bytes() for file in cache.iterdir()}


@pytest.mark.parametrize("columns", [(), ("a", "b")], ids=["text", "pairs"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow(but=1)
def test_any_number_of_processes_makes_the_same_bytes(kind, columns, tmp_path, started, monkeypatch):
    corpus, tokenizer, made = written(tmp_path, columns), KINDS[kind](), []
    for processes in (1, 2, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda n=processes: n)
        made.append(cached(corpus, tokenizer, tmp_path / str(processes)))
    assert made[0] == made[1] == made[2] and set(made[0]) == {"ids", "offsets", "meta.json", "digests.json"}
    assert len(started) == 0 + 2 + 3
    kept = [line for line in LINES if line.strip()] if not columns else None
    if kept:  # and they are the tokenizer's own
        rows = tokenised(corpus, tokenizer, LENGTH, cache_dir=tmp_path / "2")
        ids = [rows.ids[a:b].tolist() for a, b in zip(rows.offsets[:-1], rows.offsets[1:], strict=True)]
        oracle = [tokenizer(s[: 64 * LENGTH], truncation=True, max_length=LENGTH)["input_ids"] for s in kept]
        assert ids == oracle


def test_how_far_all_of_them_are_is_told(tmp_path, started, monkeypatch):
    corpus, said = Corpus(str(tmp_path / "x.txt")), paced(tokens, monkeypatch)
    (tmp_path / "x.txt").write_text("the cat\n" * 22 + "a cat\n")
    tokenised(corpus, wordpiece(), LENGTH, cache_dir=tmp_path / "cache")
    assert said == [("tokenised", 23), 5, 5, 5, 5, 3] and len(started) == 2


def test_few_sentences_start_no_process(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    monkeypatch.setattr(words_module, "Popen", lambda *a, **k: pytest.fail("started"))
    (tmp_path / "x.txt").write_text("the cat\n" * (2 * tokens.EACH - 2) + "a cat\n")
    tokenised(Corpus(str(tmp_path / "x.txt")), wordpiece(), LENGTH, cache_dir=tmp_path / "cache")
    (tmp_path / "x.txt").write_text("the cat\n" * (2 * tokens.EACH - 1) + "a cat\n")
    with pytest.raises(pytest.fail.Exception, match="started"):
        tokenised(Corpus(str(tmp_path / "x.txt")), wordpiece(), LENGTH, cache_dir=tmp_path / "cache")


@pytest.mark.parametrize("last", [0, 3], ids=["before its start", "at work"])
def test_a_process_that_is_killed_ends_the_call_with_one_error(last, tmp_path, started, monkeypatch):
    corpus, tell, told = written(tmp_path, ()), words_module.told, []

    def kill(worker, message):
        told.append(message)
        if len(told) <= last:
            return tell(worker, message)
        worker.send_signal(signal.SIGSTOP if last else signal.SIGKILL)
        if not last:
            worker.wait()
        tell(worker, message)
        worker.kill()

    monkeypatch.setattr(words_module, "told", kill)
    threads = threading.active_count()
    with pytest.raises(OSError, match=r"^a process that tokenises was ended by SIGKILL; start again"):
        tokenised(corpus, wordpiece(), LENGTH, cache_dir=tmp_path / "cache")
    assert caches(tmp_path / "cache") == [] and threading.active_count() == threads


@pytest.mark.parametrize("cut", [False, True], ids=["between two requests", "within one"])
def test_a_process_whose_parent_is_gone_ends_in_silence(cut):
    known = memory(wordpiece(), LENGTH)
    with words_module.crew(known, 1) as idle:
        worker = idle.get()
        worker.stdout.close()  # without a reader
        worker.stdin.write(pickle.dumps(["the cat"])[: 9 if cut else None])
        worker.stdin.close()
        assert worker.wait(60) == 0


def test_what_a_process_meets_is_raised_as_if_there_was_one(started):
    bad = ["the cat"] * 20 + ["half a pair \ud800"]  # no file has it, since no encoding does
    with pytest.raises(TypeError) as alone:
        token_ids(bad, wordpiece(), LENGTH)
    with pytest.raises(TypeError) as several:
        list(batches_of_ids(bad, wordpiece(), LENGTH, 2))
    assert str(several.value) == str(alone.value) and len(started) == 2


def test_bad_input_is_one_line_with_its_place(tmp_path, started):
    (tmp_path / "x.txt").write_bytes(b"the cat\n" * 40 + b"caf\xe9 was\n")
    with pytest.raises(ValueError, match=r"^[^\n]*x\.txt:41: byte 0xe9 is not UTF-8; [^\n]*$"):
        tokenised(Corpus(str(tmp_path / "x.txt")), wordpiece(), LENGTH, cache_dir=tmp_path / "cache")
    assert caches(tmp_path / "cache") == []


def test_a_full_disk_ends_them_at_once(tmp_path, started, monkeypatch):
    @contextmanager
    def full(*_):
        def more(_):
            raise OSError(28, "No space left on device")

        yield more

    monkeypatch.setattr(tokens, "pace", full)
    with pytest.raises(OSError, match="No space left") as held:  # and all that its frames hold
        tokenised(written(tmp_path, ()), wordpiece(), LENGTH, cache_dir=tmp_path / "cache")
    assert held and [process.returncode for process in started] == [-signal.SIGKILL] * 2
    assert caches(tmp_path / "cache") == []


def test_they_find_the_modules_that_this_process_finds(tmp_path, started, monkeypatch):
    (tmp_path / "only_here.py").write_text("class Line(str): pass")
    monkeypatch.syspath_prepend(tmp_path)
    from only_here import Line

    batches = batches_of_ids([Line("the cat")] * 12, wordpiece(), LENGTH, 2)
    found = [len(batch.lengths) for batch in batches]
    assert found == [5, 5, 2] and len(started) == 2


def test_they_need_neither_torch_nor_transformers():
    code = "import sys, whitenedcse.data.words; print({'torch', 'transformers'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


UNGUARDED = """
import os, pathlib, signal, sys, torch
from transformers import PreTrainedTokenizerFast
from whitenedcse.data import tokens
from whitenedcse.data import words as workers
from whitenedcse.data.corpus import Corpus
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
folder, how = pathlib.Path(sys.argv[1]), sys.argv[2]
tokens.EACH, tokens.BATCH, tell, told = 1, 16, workers.told, []
torch.set_num_threads(2)
def stop(worker, message):
    tell(worker, message)
    told.append(message)
    if len(told) == 20:
        os.kill(os.getpid(), 9) if how == "SIGKILL" else os.killpg(0, 2)
workers.told = stop
tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
tokens.tokenised(Corpus(str(folder / "x.txt")), tokenizer, 8, cache_dir=folder / "cache")
"""


@pytest.mark.parametrize(("how", "status"), [("SIGKILL", -9), ("SIGINT", -2)])
@pytest.mark.slow
def test_a_script_without_a_guard_leaves_none_behind_however_it_ends(how, status, tmp_path):
    wordpiece().backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "x.txt").write_text("".join(f"{TEXT} {i}\n" for i in range(1600)))
    command = [sys.executable, "-c", UNGUARDED, str(tmp_path), how]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as script:
        out, err = script.communicate(timeout=60)  # the streams end with the last process that holds them
    assert script.returncode == status
    drafts = [path for path in caches(tmp_path / "cache") if path.name[0] == "."]
    if how == "SIGKILL":  # the next start removes the draft
        assert (out, err, len(drafts)) == ("", "", 1)
    else:
        assert (out, drafts) == ("", []) and err.count("Traceback") == 1 and "KeyboardInterrupt" in err

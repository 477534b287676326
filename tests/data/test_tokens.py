"""The cache holds what the tokenizer says, is written once, and survives races and damage."""

import random
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
from encoders import SENTENCES, embedder_of
from transformers import ByT5Tokenizer

from whitenedcse.data import tokens
from whitenedcse.data.corpus import Corpus
from whitenedcse.data.tokens import token_ids, tokenised
from whitenedcse.evaluation.postprocess import Postprocess
from whitenedcse.ragged import rows as listed
from whitenedcse.serving.fit import fitted
from whitenedcse.serving.readout import readout
from whitenedcse.serving.search import Index, build

LENGTH = 8


def oracle(sentence, tokenizer, length=LENGTH):
    return tokenizer(sentence, truncation=True, max_length=length)["input_ids"]


@pytest.fixture
def lines(tokenizer):
    words, draw = sorted(w for w in tokenizer.get_vocab() if w[0] not in "[#"), random.Random(1)
    return [" ".join(draw.choices([*words, "unheard"], k=draw.randint(1, 12))) for _ in range(1300)]


@pytest.fixture
def corpus(tmp_path, lines):
    (tmp_path / "x.txt").write_text("\n".join(lines))
    return Corpus(str(tmp_path / "x.txt"))


def test_a_batch_of_rows_is_what_the_tokenizer_says_of_each(corpus, lines, tokenizer, tmp_path, monkeypatch):
    for batch, prompt in ((4096, ""), (7, "the cat: ")):
        monkeypatch.setattr(tokens, "BLOCK", batch)
        rows = tokenised(corpus, tokenizer, LENGTH, cache_dir=tmp_path / "cache", prompt=prompt)
        index = np.array([1299, 0, 7, 7, 513])
        assert listed(rows.rows(index, [0])) == [oracle(prompt + lines[i], tokenizer) for i in index]
        assert listed(rows.rows(np.arange(1300), [0])) == [oracle(prompt + s, tokenizer) for s in lines]
        lost = sum(len(tokenizer(prompt + line)["input_ids"]) > LENGTH for line in lines)
        assert (len(rows), rows.ids.dtype, rows.counts.kept, rows.truncated) == (1300, np.uint16, 1300, lost)
    assert token_ids(lines[:9], tokenizer, LENGTH) == [oracle(line, tokenizer) for line in lines[:9]]
    assert token_ids([], tokenizer, LENGTH) == []


def test_a_slow_tokenizer_a_large_vocabulary_and_no_tokens_work_too(
    lines, corpus, tokenizer, tmp_path, monkeypatch
):
    slow = ByT5Tokenizer()
    assert token_ids(lines[:20], slow, LENGTH) == [oracle(line, slow) for line in lines[:20]]
    assert tokens.ids_of(["abcdefgh", "a"], slow, LENGTH)[2] == 1
    for largest, kind in ((65_535, np.uint16), (65_536, np.int32)):
        monkeypatch.setattr(type(tokenizer), "get_vocab", lambda _, largest=largest: {"a": largest})
        assert tokenised(corpus, tokenizer, LENGTH, cache_dir=tmp_path / str(largest)).ids.dtype == kind
    empty = lambda texts, **_: {"input_ids": [[] for _ in texts]}  # noqa: E731
    empty.is_fast, empty.eos_token_id = False, 5
    assert tokens.ids_of(["", ""], empty, 4)[0].tolist() == [5, 5]


def test_a_text_is_tokenised_whole_and_then_truncated(tokenizer):
    assert token_ids([" " * 20_000 + "cat"], tokenizer, LENGTH) == [oracle("cat", tokenizer)]
    tokenizer.truncation_side = "left"
    try:
        text = "dog " * 5000 + "cat"
        assert token_ids([text], tokenizer, LENGTH) == [oracle(text, tokenizer)]
    finally:
        tokenizer.truncation_side = "right"


def test_threads_set_the_truncation_of_a_tokenizer_in_turn(tokenizer):
    """Without it, one that measures a prompt switches it off for another that encodes."""
    works = {
        "measuring": lambda: tokens.check_length(8, tokenizer, "query: "),
        "encoding": lambda: tokens.ids_of(SENTENCES, tokenizer, 4),
        "asking for words": lambda: tokens.wordless(["..."], tokenizer),
        "a digest": lambda: tokens.identity(tokenizer),
    }
    for name, work in works.items():
        thread = Thread(target=work)
        with tokens.ONE_AT_A_TIME:
            thread.start()
            thread.join(0.05)
            assert thread.is_alive(), name
        thread.join()


def test_lengths_and_prompts_that_cannot_be_are_refused(tokenizer):
    for length, prompt, words in (
        (2, "", "leaves no token for text: special ones and the prompt '' take 2"),
        (10**9, "", "is above the"),
        (5, "the cat the cat", "the prompt 'the cat the cat' take 6"),
    ):
        with pytest.raises(ValueError, match=words):
            token_ids(["x"], tokenizer, length, prompt)


def test_a_second_start_does_not_tokenise_and_another_length_tokenizer_text_or_prompt_does(
    corpus, tokenizer, tmp_path, monkeypatch
):
    made, ids_of = [], tokens.ids_of
    monkeypatch.setattr(tokens, "ids_of", lambda *given: made.append(1) or ids_of(*given))
    cache = tmp_path / "cache"
    first = tokenised(corpus, tokenizer, LENGTH, cache_dir=cache)
    again = tokenised(corpus, tokenizer, LENGTH, cache_dir=cache)
    assert len(made) == 1 and np.array_equal(first.ids, again.ids) and first.digests == again.digests
    tokenised(corpus, tokenizer, LENGTH + 1, cache_dir=cache)
    tokenised(corpus, tokenizer, LENGTH, cache_dir=cache, prompt="a ")
    path = Path(corpus.path)
    path.write_text(path.read_text().replace("cat", "dog", 1))
    other = tokenised(corpus, tokenizer, LENGTH, cache_dir=cache)
    assert len(made) == 4 and other.digests["corpus"] != first.digests["corpus"]


def test_a_damaged_cache_is_built_anew_and_said_in_one_line_and_a_failed_start_leaves_nothing(
    corpus, tokenizer, tmp_path, monkeypatch, capfd
):
    cache = tmp_path / "cache"
    first = tokenised(corpus, tokenizer, LENGTH, cache_dir=cache)
    whole = first.ids.copy()
    (folder,) = (path for path in cache.iterdir() if path.is_dir())
    for name in ("ids", "offsets", "meta.json"):
        flipped = bytearray((folder / name).read_bytes())
        flipped[len(flipped) // 2] ^= 1
        for content in (flipped, b""):
            (folder / name).write_bytes(content)
            capfd.readouterr()
            assert np.array_equal(tokenised(corpus, tokenizer, LENGTH, cache_dir=cache).ids, whole)
            said = capfd.readouterr().out
            assert said.count("\n") == 1 and name in said and "the corpus is tokenised again" in said

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tokens, "ids_of", full)
    with pytest.raises(OSError, match="No space left"):
        tokenised(corpus, tokenizer, LENGTH, cache_dir=tmp_path / "other")
    assert not [path for path in (tmp_path / "other").iterdir() if path.is_dir() and path.name[0] != "."]


INVISIBLE = ["\u200b", "\ufeff\u00ad", " \u2060", "\u0301\u0308", "\ufe0f", "\ufffd", "\t\u3000", ""]


def test_a_text_without_tokens_of_its_own_is_blank_to_an_encoder(bert, tmp_path):
    """In an index and its queries, in a fit and a readout; and an id is the number of a row."""
    mixed = [text for pair in zip(SENTENCES, INVISIBLE, strict=True) for text in pair]
    path = tmp_path / "x.txt"
    path.write_text("".join(f"{text}\n" for text in mixed))
    assert tokens.wordless(mixed, bert.tokenizer) == [False, True] * 8
    worded = [".", "日本", "e\u0301", "[UNK]", "\U0001f642", "42"]
    assert not any(tokens.wordless(worded, bert.tokenizer))
    embedder = embedder_of(bert, kind="mean").eval()
    index = Index.build(embedder, mixed)
    build(tmp_path / "index", embedder, Corpus(str(path)))
    for one in (index, Index.load(tmp_path / "index")):
        hits = one.query(mixed, 1)
        wanted = [[str(i)] if i % 2 == 0 else [] for i in range(16)]
        assert [[hit.id for hit in found] for found in hits] == wanted
    fit, same = Postprocess("whitening"), Postprocess("whitening").fit(embedder.encode(SENTENCES))
    assert fitted(fit, embedder, Corpus(str(path)))["texts"] == 8
    np.testing.assert_allclose(fit.mean, same.mean, atol=1e-6)
    for given in (mixed, path):
        assert readout(embedder, given).facts == readout(embedder, SENTENCES).facts
    assert embedder.encode(mixed).shape == (16, 16)  # row i is of text i

"""A sentence put together from remembered words has the ids that the tokenizer's own call gives it."""

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from whitenedcse.data import tokens, words
from whitenedcse.data.tokens import token_ids
from whitenedcse.data.words import listed, memory

TEXT = (
    "the cat's naïve Ångström 東京 was 42 km, not (very) far… don't they're a.b.c 's it well-known and so on"
)
SPECIAL = ["<s>", "</s>", "<pad>", "<unk>", "<mask>"]
AROUND = processors.TemplateProcessing(single="<s> $A </s> </s>", special_tokens=[("<s>", 0), ("</s>", 1)])


def wrapped(core, **settings):
    core.add_special_tokens([AddedToken(t, lstrip=t == "<mask>", rstrip=t == "<pad>") for t in SPECIAL])
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "mask_token": "<mask>"}
    return PreTrainedTokenizerFast(
        tokenizer_object=core, model_max_length=512, unk_token="<unk>", **names, **settings
    )


def wordpiece(normalizer=None, **changes):
    letters = sorted(set(TEXT + TEXT.lower()) - {" "})
    pieces = [*SPECIAL, *letters, *(f"##{c}" for c in letters), "the", "cat", "##at", "na", "##ive", "well"]
    core = Tokenizer(models.WordPiece({p: i for i, p in enumerate(pieces)}, unk_token="<unk>"))
    core.normalizer = normalizer or normalizers.BertNormalizer(**changes)
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    core.post_processor = AROUND
    return wrapped(core)


def byte_level(dropout=None, around=AROUND, trim=True, **changes):
    core = Tokenizer(models.BPE(dropout=dropout))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(**({"add_prefix_space": False} | changes))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator([TEXT, TEXT.lower(), "they are so very well known", *["x\u00a0 "] * 9], trainer)
    core.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=trim), around])
    return wrapped(core)


def unigram():
    pieces = [(c, -3.0) for c in sorted(set(TEXT) | {"▁"})] + [("▁the", -1.0), ("cat", -1.0), ("▁cat", -2.0)]
    core = Tokenizer(models.Unigram([*((s, 0.0) for s in SPECIAL), *pieces], unk_id=3))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
    )
    core.post_processor = AROUND
    return wrapped(core)


KNOWN = {
    "uncased": wordpiece(),
    "cased, accents kept": wordpiece(lowercase=False, strip_accents=False, handle_chinese_chars=False),
    "bytes": byte_level(),
    "bytes, a space before": byte_level(add_prefix_space=True),
    "bytes, places with their spaces": byte_level(trim=False),
    "bytes, nothing around": byte_level(around=processors.ByteLevel()),
}


class Prompting(PreTrainedTokenizerFast):
    """One that adds to what it is given."""

    def _encode_plus(self, text, *args, **kwargs):
        return super()._encode_plus([f"query {t}" for t in text], *args, **kwargs)


def left():
    tokenizer = wordpiece()
    tokenizer.truncation_side = "left"
    return tokenizer


def extended(token):
    tokenizer = wordpiece()
    tokenizer.add_tokens([token])
    return tokenizer


OTHERS = {
    "no Rust core": ByT5Tokenizer,
    "Unigram": unigram,
    "another normalizer": lambda: wordpiece(normalizers.NFKC()),
    "another pre-tokenizer": lambda: byte_level(use_regex=False),
    "dropout": lambda: byte_level(dropout=0.1),
    "cut on the left": left,
    "a call of its own": lambda: Prompting(tokenizer_object=wordpiece().backend_tokenizer),
    "a token found after normalizing": lambda: extended(AddedToken("Cat", normalized=True)),
    "a token of two words": lambda: extended(AddedToken("the cat", normalized=False)),
    "the sentence twice": lambda: byte_level(
        around=processors.TemplateProcessing(single="<s> $A $A", special_tokens=[("<s>", 0)])
    ),
}

ODD = [
    *SPECIAL,
    "x<mask>y",
    "<s>cat",
    "\0",
    "e\u0301",
    "\u0301",
    "\u200b",
    "\ufeff",
    "\ufffd",
    "\xad",
    "'s",
    "'",
]
ODD += [
    "🙂",
    "👨\u200d👩\u200d👧",
    "東京東",
    "ﬁ",
    "İ",
    "ß",
    "Σς",
    "ǅ",
    "...",
    "…",
    "¨",
    "½",
    "한국",
    "नि",
    "١٢",
]
ODD += ["x\u00a0 \u00a0y", "\U000e0041", "\ue000", "a" * 120]
GAPS = [" ", " ", " ", " ", "", "  ", "\n", " \n", "\n ", "\t", "\r", "\u00a0", "\u3000", "\u2028", "\x85"]
word = st.sampled_from([*TEXT.split(), *ODD]) | st.text(max_size=6)
sentence = st.lists(st.tuples(word, st.sampled_from(GAPS)), max_size=14).map(
    lambda parts: "".join(word + gap for word, gap in parts)
)
plain = st.lists(st.sampled_from(TEXT.split()), max_size=14).map(" ".join)  # most need no second look
mixed = st.lists(st.one_of(plain, plain, sentence), min_size=1, max_size=6)


def oracle(sentences, tokenizer, length):
    return [tokenizer(s, truncation=True, max_length=length)["input_ids"] for s in sentences]


def too_long(sentences, tokenizer, length):
    return [len(tokenizer(s)["input_ids"]) > length for s in sentences]


@pytest.mark.parametrize("kind", KNOWN)
@given(batches=st.lists(mixed, max_size=4), length=st.integers(4, 30))
@example(batches=[["the the À ", "the cat's"]], length=4)  # a token that ends within a character
@settings(max_examples=150, deadline=None)
@pytest.mark.slow
def test_remembered_words_give_the_ids_of_the_whole_sentence(kind, batches, length):
    known = memory(KNOWN[kind], length)
    assert known is not None
    for batch in batches:
        got = known.ids_of(batch)
        assert listed(got) == oracle(batch, KNOWN[kind], length)
        assert got.truncated.tolist() == too_long(batch, KNOWN[kind], length)


@pytest.mark.parametrize("kind", KNOWN)
@pytest.mark.parametrize("word", ODD, ids=ascii)
@pytest.mark.slow(but=60)
def test_and_so_do_single_odd_words_anywhere(kind, word):
    batch = [
        word,
        f"{word} cat",
        f"the {word}",
        f"the {word} cat",
        f"the{word}cat",
        f" {word}",
        f"{word} ",
        "",
    ]
    known = memory(KNOWN[kind], 300)
    for one in [*([s] for s in batch), batch, batch]:
        assert listed(known.ids_of(one)) == oracle(one, KNOWN[kind], 300)


@pytest.mark.parametrize("kind", OTHERS)
def test_a_tokenizer_that_is_not_known_to_work_by_words_makes_its_own_calls(kind, monkeypatch):
    tokenizer = OTHERS[kind]()
    assert memory(tokenizer, 8) is None
    if kind != "dropout":  # no two calls agree
        monkeypatch.setattr(tokens, "FEW", 0)
        lines = [TEXT, "the cat", "a the  cat Cat x", ""]
        assert token_ids(lines, tokenizer, 8) == [
            tokenizer([s], truncation=True, max_length=8)["input_ids"][0] for s in lines
        ]
        (told,) = tokens.batches_of_ids(lines, tokenizer, 8)
        assert told.truncated.tolist() == [len(tokenizer([s])["input_ids"][0]) > 8 for s in lines]


@pytest.mark.parametrize("kind", KNOWN)
@pytest.mark.parametrize("odd", ["", " \u200b", " [SEP]", " <mask>"])  # only the whole sentence tells
def test_a_sentence_of_as_many_tokens_as_are_kept_is_not_truncated_and_one_of_more_is(kind, odd):
    lines = [" ".join(["cat"] * n) + odd for n in range(1, 14)]
    every = set()
    for length in range(4, 12):
        expected = too_long(lines, KNOWN[kind], length)
        assert memory(KNOWN[kind], length).ids_of(lines).truncated.tolist() == expected
        assert tokens.own(lines, KNOWN[kind], length).truncated.tolist() == expected
        every |= set(expected)
    assert every == {True, False}


@pytest.mark.parametrize("kind", KNOWN)
def test_each_word_is_tokenised_once_and_a_full_memory_begins_anew(kind, monkeypatch):
    monkeypatch.setattr(words, "MOST", 40)
    known, learnt, learn = memory(KNOWN[kind], 12), [], words.Words.learn
    known.forget()
    monkeypatch.setattr(words.Words, "learn", lambda self: (learnt.append(list(self.new)), learn(self))[1])
    monkeypatch.setattr(words.Words, "whole", lambda *_: pytest.fail("nothing here is odd"))
    for _ in range(3):
        assert listed(known.ids_of([TEXT, "cat the"])) == oracle([TEXT, "cat the"], KNOWN[kind], 12)
    assert (
        [len(set(batch)) for batch in learnt]
        == [len(batch) for batch in learnt]
        == [len(set(TEXT.split())) + 2]
    )
    more = [f"{a}{b}" for a in "abcdefg" for b in "ghijklm"]
    assert listed(known.ids_of(more)) == oracle(more, KNOWN[kind], 12)
    assert listed(known.ids_of(["the cat"])) == oracle(["the cat"], KNOWN[kind], 12)
    assert len(known) < 10


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lines=mixed, padding=st.sampled_from([False, True, "max_length"]))
def test_what_a_call_before_left_switched_on_changes_nothing(lines, padding):
    tokenizer = KNOWN["bytes"]
    known = memory(tokenizer, 12)
    for batch in (["was"], lines, lines):
        tokenizer(["the cat", "was"], padding=padding, truncation=True, max_length=4)
        assert listed(known.ids_of(batch)) == oracle(batch, tokenizer, 12)

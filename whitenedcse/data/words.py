"""Token ids of sentences by way of their words, each of which is tokenised once.

Right where the ids of "a b" are those of "a" and then those of " b", whatever a and b are: `memory` says for
which tokenizers that is so, and a sentence with anything in it that could break it is given to the tokenizer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOST = 1 << 20  # words remembered, some 250 bytes each; then it begins anew

PROBE = ["a b", "b"]  # tells special tokens that are not simply put around a sentence
CALLS = ("__call__", "_encode_plus", "_batch_encode_plus")  # of Transformers 4 and 5


def own(sentences: Sequence[str], tokenizer: PreTrainedTokenizerBase, max_length: int) -> list[list[int]]:
    """The ids of each sentence as the tokenizer's own call gives them."""
    encoded = tokenizer(
        sentences,
        truncation=True,
        max_length=max_length,
        return_attention_mask=False,
        return_token_type_ids=False,
    )
    return encoded["input_ids"]


def memory(tokenizer: PreTrainedTokenizerBase, max_length: int) -> Words | None:
    """An empty memory for a tokenizer that works word by word; None for any other.

    Known to do so: WordPiece and BPE without dropout, on words that BERT's pre-tokenizer or GPT-2's found in
    text as it is or as BERT's normalizer left it, with the same special tokens around every sentence.
    """
    if not (_plain(tokenizer) and _by_word(tokenizer)):
        return None
    added = tokenizer.backend_tokenizer.get_added_tokens_decoder().values()
    if any(token.normalized or " " in token.content for token in added):
        return None
    encoded = tokenizer("a", return_special_tokens_mask=True)
    ids, marks = encoded["input_ids"], encoded["special_tokens_mask"]
    if 0 not in marks:
        return None
    frame = ids[len(ids) - marks[::-1].index(0) :], ids[: marks.index(0)]
    known = Words(tokenizer, max_length, frame, [token.content for token in added])
    return known if known.rows(PROBE) == own(PROBE, tokenizer, max_length) else None


def _plain(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether its call does nothing but ask the Rust core, and cuts on the right."""
    from transformers import PreTrainedTokenizerFast

    kind = type(tokenizer)
    return (
        isinstance(tokenizer, PreTrainedTokenizerFast)
        and all(getattr(kind, name, None) is getattr(PreTrainedTokenizerFast, name, None) for name in CALLS)
        and tokenizer.truncation_side == "right"
    )


def _by_word(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether no step of the core looks beyond a space."""
    from tokenizers import models, normalizers, pre_tokenizers

    core = tokenizer.backend_tokenizer
    return (
        (core.normalizer is None or isinstance(core.normalizer, normalizers.BertNormalizer))
        and isinstance(core.pre_tokenizer, pre_tokenizers.BertPreTokenizer | pre_tokenizers.ByteLevel)
        and getattr(core.pre_tokenizer, "use_regex", True)
        and isinstance(core.model, models.WordPiece | models.BPE)
        and not getattr(core.model, "dropout", None)
    )


class Words(dict[str, int]):
    r"""Word -> 2 * its number, + 1 if it begins a sentence, which is then written "\n" before it.

    The ids of word i are ids[bounds[i]:bounds[i + 1]]; those of a beginning have in front what ends the
    sentence before and what begins this one. Number 0 is any word that only the tokenizer itself may judge:
    an empty one (two spaces, or one at an end), one with a special token or a character that does not print.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        max_length: int,
        frame: tuple[list[int], list[int]],
        added: Sequence[str],
    ) -> None:
        super().__init__()
        self.tokenizer, self.max_length, self.after = tokenizer, max_length, len(frame[0])
        self.frame = np.array([*frame[0], *frame[1]], dtype=np.int32)
        self.added = re.compile("|".join(map(re.escape, added)) or r"(?!)")
        self.forget()

    def forget(self) -> None:
        """Begin anew."""
        self.clear()
        self.new: list[str] = []
        self.ids, self.bounds = self.frame, np.array([0, len(self.frame)])

    def __missing__(self, word: str) -> int:
        """Number a word that was not seen before."""
        begins = word.startswith("\n")
        text = word[1:] if begins else f" {word}"
        number = 0
        if word[begins:] and text.isprintable() and not self.added.search(text):
            number = len(self.bounds) - 1 + len(self.new)
            self.new.append(text)
        self[word] = 2 * number + begins
        return self[word]

    def rows(self, sentences: Sequence[str]) -> list[list[int]]:
        """The ids of each sentence, special tokens among them, cut to `max_length`."""
        if len(self) > MOST:
            self.forget()
        split = ("\n" + " \n".join(sentences) + " \n").split(" ")
        words = np.fromiter(map(self.__getitem__, split), np.int64, len(split))
        if self.new:
            self.learn()
        first = np.flatnonzero(words & 1)
        if len(first) != len(sentences) + 1:  # a line end within a sentence
            return own(sentences, self.tokenizer, self.max_length)
        words >>= 1
        starts, lengths = self.bounds[words], self.bounds[words + 1] - self.bounds[words]
        ends = lengths.cumsum()
        before = ends - lengths
        before -= np.repeat(before[first], np.diff(first, append=len(words)))  # in its sentence
        lengths = np.clip(self.max_length - before, 0, lengths)
        ends = lengths.cumsum()
        places = np.arange(ends[-1]) + np.repeat(starts - ends + lengths, lengths)
        flat = self.ids[places].tolist()
        bounds = ((ends - lengths)[first] + self.after).tolist()
        rows = [flat[a:b] for a, b in pairwise(bounds)]
        odd = np.unique(np.searchsorted(first, np.flatnonzero(words == 0), side="right") - 1)
        unclear = odd[:-1].tolist()  # the last one is no sentence
        if unclear:
            told = own([sentences[row] for row in unclear], self.tokenizer, self.max_length)
            for row, ids in zip(unclear, told, strict=True):
                rows[row] = ids
        return rows

    def learn(self) -> None:
        """Tokenise the new words, each by itself."""
        core = self.tokenizer.backend_tokenizer
        core.no_truncation()
        core.no_padding()
        found = core.encode(self.new, is_pretokenized=True, add_special_tokens=False)
        counts = np.bincount(np.array(found.word_ids, dtype=np.int64), minlength=len(self.new))
        begins = np.array([word[0] != " " for word in self.new])
        places = np.repeat((counts.cumsum() - counts)[begins], len(self.frame))
        ids = np.insert(np.array(found.ids, np.int32), places, np.tile(self.frame, begins.sum()))
        counts[begins] += len(self.frame)
        self.ids = np.concatenate([self.ids, ids])
        self.bounds = np.concatenate([self.bounds, self.bounds[-1] + counts.cumsum()])
        self.new = []

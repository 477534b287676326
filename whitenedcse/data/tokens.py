"""Token ids of a corpus, computed once: a cache on disk that later starts map into memory.

A cache is a folder: `ids` (t,) of all sentences concatenated, `offsets` (n + 1,) int64, and `meta.json`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from whitenedcse.console import pace, say
from whitenedcse.data import files, sources
from whitenedcse.data.corpus import BLOCK, Corpus, Counts, Usable, blocks, fingerprint
from whitenedcse.files import DIGESTS, checksum, drafted, intact, read_json, seal, write_json, writing
from whitenedcse.ragged import Ragged

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMAT = 4  # of the folder; another number is another key
ONE_AT_A_TIME = Lock()  # each call sets the truncation of the tokenizer that it shares with other threads


@dataclass(frozen=True, eq=False)
class TokenRows:
    """Token ids of a corpus, read from disk only when they are needed.

    ids: (t,) uint16, or int32 for a vocabulary of 65,536 and more. offsets: (rows * columns + 1,) int64.
    truncated: how many sentences had more tokens. digests: of "corpus" and "tokenizer", which decide the ids.
    """

    ids: NDArray[np.integer]
    offsets: NDArray[np.int64]
    columns: int
    counts: Counts
    truncated: int
    digests: Mapping[str, str]

    def __len__(self) -> int:
        return (len(self.offsets) - 1) // self.columns

    def rows(self, index: NDArray[np.integer], columns: Sequence[int]) -> Ragged:
        """The rows `index`, (n,), as len(columns) * n sentences: a column of all rows, then the next one."""
        sentences = (index * self.columns + np.array(columns)[:, None]).ravel()
        starts = self.offsets[sentences]
        lengths = self.offsets[sentences + 1] - starts
        bounds = np.zeros(len(sentences) + 1, dtype=np.int64)
        np.cumsum(lengths, out=bounds[1:])
        tokens = np.arange(bounds[-1]) + np.repeat(starts - bounds[:-1], lengths)
        ids = torch.from_numpy(self.ids[tokens].astype(np.int64))
        return Ragged(ids, torch.from_numpy(bounds), int(lengths.max(initial=0)))


def tokenised(
    corpus: Corpus,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    *,
    prompt: str = "",
    cache_dir: Path | None = None,
) -> TokenRows:
    """The token ids of a corpus, from the cache if the same bytes were tokenised before in the same way.

    prompt: put before every sentence. cache_dir: None is `sources.cache()`. If several processes ask, one
    writes and the others wait.
    """
    check_length(max_length, tokenizer, prompt)
    cache = cache_dir or sources.cache()
    digests = {"corpus": fingerprint(corpus), "tokenizer": checksum(identity(tokenizer).encode())}
    key = json.dumps([FORMAT, *digests.values(), max_length, prompt])
    folder = cache / checksum(key.encode())
    with sources.locked(cache, f".{folder.name}.lock"):  # of several processes one does the work
        if not whole(folder):
            with drafted(folder) as draft:
                write(draft, corpus, tokenizer, max_length, prompt)
                seal(draft)
    meta = read_json(folder / "meta.json")
    ids = np.asarray(np.memmap(folder / "ids", dtype=meta["dtype"], mode="r"))
    offsets = np.asarray(np.memmap(folder / "offsets", dtype=np.int64, mode="r"))
    return TokenRows(ids, offsets, meta["columns"], Counts(*meta["counts"]), meta["truncated"], digests)


def whole(folder: Path) -> bool:
    """Whether a cache is in this folder, and as it was written; says what is damaged."""
    try:
        intact(folder, "the corpus is tokenised again")
    except ValueError as error:
        say(str(error))
        return False
    return (folder / DIGESTS).is_file()


def write(
    folder: Path, corpus: Corpus, tokenizer: PreTrainedTokenizerBase, max_length: int, prompt: str
) -> None:
    """Tokenise a corpus into a folder, in one pass, a batch in memory at a time."""
    rows = Usable(corpus)
    dtype = np.uint16 if max(tokenizer.get_vocab().values()) < 1 << 16 else np.int32
    counted, truncated, columns = [np.zeros(1, np.int64)], 0, 1
    with pace("tokenised") as more, writing(folder / "ids") as stream:
        for batch in blocks(rows, BLOCK):
            if len(counted) == 1:
                columns = len(batch[0])
            sentences = [prompt + field for row in batch for field in row]
            ids, lengths, cut = ids_of(sentences, tokenizer, max_length)
            stream.write(ids.astype(dtype).tobytes())
            counted.append(lengths)
            truncated += cut
            more(len(lengths))
    offsets = np.concatenate(counted).cumsum()
    with writing(folder / "offsets") as stream:
        stream.write(offsets.tobytes())
    meta = {"dtype": np.dtype(dtype).name, "columns": columns, "counts": rows.counts, "truncated": truncated}
    write_json(folder / "meta.json", meta)


def wordless(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[bool]:
    """Which texts are blank: nothing but spaces and invisible characters, or without tokens of their own.

    Those with a letter or a digit are not asked about.
    """
    asked = [i for i, text in enumerate(texts) if not any(map(str.isalnum, text))]
    with ONE_AT_A_TIME:
        ids = tokenizer([texts[i] for i in asked], add_special_tokens=False)["input_ids"] if asked else []
    empty = {i for i, row in zip(asked, ids, strict=True) if not row or files.blank(texts[i])}
    return [i in empty for i in range(len(texts))]


def worded(texts: Iterable[str], tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """The texts that are not `wordless`, read lazily."""
    for block in blocks(texts, BLOCK):
        yield from (text for text, skip in zip(block, wordless(block, tokenizer), strict=True) if not skip)


def token_ids(
    sentences: Sequence[str], tokenizer: PreTrainedTokenizerBase, max_length: int, prompt: str = ""
) -> list[list[int]]:
    """The token ids of each sentence, special ones included, truncated; prompt: put before each sentence."""
    check_length(max_length, tokenizer, prompt)
    if not sentences:
        return []
    ids, lengths, _ = ids_of([prompt + sentence for sentence in sentences], tokenizer, max_length)
    return [part.tolist() for part in np.split(ids, lengths.cumsum()[:-1])]


def ids_of(
    sentences: Sequence[str], tokenizer: PreTrainedTokenizerBase, max_length: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
    """All ids of n sentences, end to end (t,), their lengths (n,), and how many sentences were truncated.

    A sentence to which the tokenizer gives no token, as a decoder's may, has its end token.
    """
    if tokenizer.is_fast:
        core = tokenizer.backend_tokenizer
        with ONE_AT_A_TIME:
            core.enable_truncation(max_length, direction=tokenizer.truncation_side)
            core.no_padding()
            core.encode_special_tokens = tokenizer.split_special_tokens
            made = core.encode_batch_fast(sentences)
        rows = [encoding.ids for encoding in made]
        full = (encoding for encoding in made if len(encoding) >= max_length)
        truncated = sum(bool(encoding.overflowing) for encoding in full)
    else:
        rows = tokenizer(sentences, truncation=True, max_length=max_length)["input_ids"] if sentences else []
        full = (s for row, s in zip(rows, sentences, strict=True) if len(row) >= max_length)
        truncated = sum(len(tokenizer(s, verbose=False)["input_ids"]) > max_length for s in full)
    rows = [row or [tokenizer.eos_token_id or 0] for row in rows]
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    return np.fromiter(chain.from_iterable(rows), np.int64, lengths.sum()), lengths, truncated


def check_length(max_length: int, tokenizer: PreTrainedTokenizerBase, prompt: str = "") -> None:
    """Raise ValueError for a max_length that leaves no token beside the prompt, or exceeds the limit."""
    with ONE_AT_A_TIME:
        limit, taken = tokenizer.model_max_length, len(tokenizer(prompt, verbose=False)["input_ids"])
    if max_length > limit:
        raise ValueError(
            f"max_length={max_length} is above the {limit} tokens that this encoder takes: it has no more"
            " positions, or model_max_length in its tokenizer_config.json is lower than they"
        )
    if taken >= max_length:
        raise ValueError(
            f"max_length={max_length} leaves no token for text: special ones and the prompt {prompt!r:.80} "
            f"take {taken}"
        )


def identity(tokenizer: PreTrainedTokenizerBase) -> str:
    """A text of all that decides a tokenizer's ids, except truncation and padding, which it resets."""
    state: Any
    if tokenizer.is_fast:
        core = tokenizer.backend_tokenizer
        with ONE_AT_A_TIME:
            core.no_truncation()  # each call sets its own
            core.no_padding()
            state = core.to_str()
    else:
        state = [type(tokenizer).__qualname__, tokenizer.get_vocab(), repr(tokenizer.init_kwargs)]
    return json.dumps([state, tokenizer.truncation_side, tokenizer.split_special_tokens])

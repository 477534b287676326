"""Token ids of a corpus, computed once: a cache on disk that later starts map into memory.

A cache is a folder: `ids` (t,) of all sentences concatenated, `offsets` (n + 1,) int64, and `meta.json`.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from filelock import FileLock
from numpy.typing import NDArray

from whitenedcse.compute import cores
from whitenedcse.console import pace, say
from whitenedcse.data import sources
from whitenedcse.data.corpus import Corpus, Counts, files, fingerprint, read
from whitenedcse.data.remote import stamp
from whitenedcse.data.words import Ids, flat, ids_of_several, listed, memory
from whitenedcse.files import DIGESTS, drafted, intact, read_json, seal, writing
from whitenedcse.ragged import Ragged

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMAT = 1  # of the folder; another number is another key
BATCH = 2048  # sentences: 8,192 were no faster
EACH = 10_000  # sentences for each process
FEW = 1024  # sentences; among fewer, most words are new and remembering them saves no time
SETTLED = 2_000_000_000  # ns after which a change of a file shows in its times, however coarse its clock
CHARACTERS_A_TOKEN = 64  # a longer line is cut before the tokenizer sees it: 10 MB cost it 15 s


@dataclass(frozen=True, eq=False)
class TokenRows:
    """Token ids of a corpus, read from disk only when they are needed.

    ids: (t,) uint16, or int32 for a vocabulary of 65,536 and more. offsets: (rows * columns + 1,) int64.
    truncated: how many sentences had more tokens than were kept. digests: of "corpus" and "tokenizer"; if
    both are equal, and prompt and max_length too, the ids are.
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

    prompt: a text put before every sentence of every column. cache_dir: None is `sources.cache()`. A cache is
    written to a draft folder and then renamed, so it is complete or absent. If several processes ask, one
    writes and the others wait. It tokenises in as many worker processes as PyTorch has threads, with the same
    result as in one. Raises ValueError for an unusable `max_length`, or a prompt that leaves no token for a
    sentence.
    """
    refuse_length(max_length, tokenizer, prompt)
    cache = cache_dir or sources.cache()
    digests = {"corpus": _noted(corpus, cache), "tokenizer": _digest(identity(tokenizer))}
    folder = cache / _digest(
        json.dumps([FORMAT, *digests.values(), max_length, *([prompt] if prompt else [])])
    )
    if (cached := _opened(folder, digests)) is not None:
        return cached
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(f".{folder.name}.lock")):  # of several processes one does the work
        if (cached := _opened(folder, digests, say)) is None:
            cached = _made(folder, digests, corpus, tokenizer, max_length, prompt)
    return cached


def token_ids(
    sentences: Sequence[str], tokenizer: PreTrainedTokenizerBase, max_length: int, prompt: str = ""
) -> list[list[int]]:
    """The token ids of each sentence, special tokens included, truncated to `max_length` tokens.

    prompt: a text put before each sentence. Raises ValueError as `refuse_length`.
    """
    refuse_length(max_length, tokenizer, prompt)
    batches = batches_of_ids(sentences, tokenizer, max_length, prompt=prompt)
    return list(chain.from_iterable(map(listed, batches)))


def batches_of_ids(
    sentences: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    processes: int = 1,
    prompt: str = "",
) -> Generator[Ids, None, None]:
    """The token ids of each sentence, special tokens included, truncated to `max_length`, by BATCH sentences.

    prompt: a text put before each sentence, and tokenised with it. Where there are many sentences, each word
    is tokenised once. processes: the most to use; one where more
    would take longer, or for a tokenizer that does not work word by word. Where the tokenizer gives no ids,
    as that of a decoder for "", its end token is used: no sentence is empty.
    """

    def batch(start: int) -> list[str]:
        most = CHARACTERS_A_TOKEN * max_length
        kept = slice(-most, None) if tokenizer.truncation_side == "left" else slice(most)
        return [(prompt + s)[kept] for s in sentences[start : start + BATCH]]

    starts = range(0, len(sentences), BATCH)
    known = memory(tokenizer, max_length) if len(sentences) >= FEW else None
    processes = min(processes, len(sentences) // EACH)
    every: Iterator[Ids]
    if known is None:
        every = (own(batch(start), tokenizer, max_length) for start in starts)
    elif processes > 1:
        every = ids_of_several(known, processes, batch, starts)
    else:
        every = (known.ids_of(batch(start)) for start in starts)
    for ids in every:
        yield none_empty(ids, tokenizer)


def own(sentences: Sequence[str], tokenizer: PreTrainedTokenizerBase, max_length: int) -> Ids:
    """The ids of each sentence as the tokenizer's own call gives them, truncated to `max_length`."""
    without = {"return_attention_mask": False, "return_token_type_ids": False}
    made = tokenizer(sentences, truncation=True, max_length=max_length, **without)
    rows = made["input_ids"]
    if made.is_fast:
        return flat(rows, [bool(encoding.overflowing) for encoding in made.encodings])

    def longer(row: Sequence[int], sentence: str) -> bool:  # others do not say what they truncated
        return len(row) >= max_length and len(tokenizer(sentence, verbose=False)["input_ids"]) > max_length

    return flat(rows, list(map(longer, rows, sentences)))


def none_empty(batch: Ids, tokenizer: PreTrainedTokenizerBase) -> Ids:
    """The ids of n sentences, with the tokenizer's end token added to each empty one."""
    ids, lengths, truncated = batch
    empty = lengths == 0
    if not empty.any():
        return batch
    ids = np.insert(ids, (lengths.cumsum() - lengths)[empty], tokenizer.eos_token_id or 0)
    return Ids(ids, lengths + empty, truncated)


def refuse_length(max_length: int, tokenizer: PreTrainedTokenizerBase, prompt: str = "") -> None:
    """Raise ValueError for a max_length that leaves no token for a word, or exceeds the encoder's limit.

    prompt: what stands before each sentence, and must leave a token for it.
    """
    special, limit = tokenizer.num_special_tokens_to_add(), tokenizer.model_max_length
    if max_length <= special:
        raise ValueError(
            f"max_length={max_length} leaves no token for text beside {special} special tokens; "
            f"use {special + 1} or more"
        )
    if max_length > limit:
        raise ValueError(f"max_length={max_length} is above the {limit} tokens that this encoder takes")
    if prompt and (taken := len(tokenizer(prompt, verbose=False)["input_ids"])) >= max_length:
        raise ValueError(
            f"prompt={prompt!r:.80} takes {taken} tokens, special ones counted, of max_length={max_length}, "
            "and leaves none for the sentence; use a shorter prompt or a larger max_length"
        )


def _noted(corpus: Corpus, cache: Path) -> str:
    """The corpus's fingerprint, from a note in the cache if no file changed since the note was written.

    No note is made of a file that changed a moment ago: its next change could leave the same time stamp. A
    note that is damaged, or of another file, is written anew.
    """
    now, stamps = time.time_ns(), [stamp(file) for file in files(corpus.path)]
    key = _digest(repr((corpus, stamps)))
    note = cache / f".{key}.seen"
    with suppress(OSError, ValueError):
        said, proof = note.read_text().split()
        if proof == _digest(key + said):
            return said
    said = fingerprint(corpus)
    if stamps and all(changed + SETTLED < now for _, changed in stamps):
        with suppress(OSError):  # a full or read-only disk, or another process that writes the same
            cache.mkdir(parents=True, exist_ok=True)
            with writing(note, "w") as stream:
                stream.write(f"{said} {_digest(key + said)}")
    return said


def _made(
    folder: Path,
    digests: Mapping[str, str],
    corpus: Corpus,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    prompt: str,
) -> TokenRows:
    """Write the cache to this folder, replacing a damaged one, and open it."""
    with drafted(folder) as draft:
        _write(draft, corpus, tokenizer, max_length, prompt)
        seal(draft)
    if (cached := _opened(folder, digests)) is None:
        raise OSError(f"{folder}: vanished or was damaged just after it was written; start again")
    return cached


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def identity(tokenizer: PreTrainedTokenizerBase) -> str:
    """A text of all that decides a tokenizer's ids, except truncation and padding, which it resets."""
    if tokenizer.is_fast:
        core = tokenizer.backend_tokenizer
        core.no_truncation()  # each call sets its own
        core.no_padding()
        state = core.to_str()
    else:
        state = [type(tokenizer).__qualname__, tokenizer.get_vocab(), repr(tokenizer.init_kwargs)]
    return json.dumps([state, tokenizer.truncation_side, tokenizer.split_special_tokens])


def _opened(
    folder: Path, digests: Mapping[str, str], tell: Callable[[str], None] = lambda _: None
) -> TokenRows | None:
    """The cache in this folder; None if absent, of an older version, or damaged, which `tell` is told."""
    try:
        if not (folder / DIGESTS).is_file():
            return None
        intact(folder, "the corpus is tokenised again")
        meta = read_json(folder / "meta.json")
        columns, counts, truncated = meta["columns"], Counts(*meta["counts"]), meta["truncated"]
        ids = np.asarray(np.memmap(folder / "ids", dtype=meta["dtype"], mode="r"))
        offsets = np.asarray(np.memmap(folder / "offsets", dtype=np.int64, mode="r"))
    except (OSError, ValueError, TypeError) as error:
        tell(str(error))
        return None
    return TokenRows(ids, offsets, columns, counts, truncated, digests)


def _write(
    folder: Path, corpus: Corpus, tokenizer: PreTrainedTokenizerBase, max_length: int, prompt: str
) -> None:
    """Tokenise a corpus into a folder, in one pass."""
    rows, counts = read(corpus, longest=CHARACTERS_A_TOKEN * max_length)
    sources.refuse_numbers(corpus, rows)
    sentences = list(chain.from_iterable(rows))
    dtype = np.uint16 if max(tokenizer.get_vocab().values()) < 1 << 16 else np.int32
    counted, truncated = [np.zeros(1, np.int64)], 0
    batches = batches_of_ids(sentences, tokenizer, max_length, cores(), prompt)
    with (
        pace("tokenised", len(sentences)) as more,
        closing(batches),
        writing(folder / "ids") as stream,
    ):
        for ids, lengths, cut in batches:
            stream.write(ids.astype(dtype).tobytes())
            counted.append(lengths)
            truncated += int(cut.sum())
            more(len(lengths))
    offsets = np.concatenate(counted).cumsum()
    with writing(folder / "offsets") as stream:
        stream.write(offsets.tobytes())
    meta = {
        "tokens": int(offsets[-1]),
        "dtype": np.dtype(dtype).name,
        "columns": len(rows[0]),
        "counts": counts,
        "truncated": truncated,
    }
    with writing(folder / "meta.json") as stream:
        stream.write(json.dumps(meta).encode())

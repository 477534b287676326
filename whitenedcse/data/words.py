"""Token ids of sentences by way of their words, each of which is tokenised once, in one process or several.

It is exact where the ids of "a b" are those of "a" followed by those of " b" for any a and b: `memory` finds
out for which tokenizers, and a sentence that could be an exception is tokenised as a whole by the tokenizer.

A worker process is a new interpreter that imports NumPy and `tokenizers` alone: a script needs no guard
around its main part, and no thread or device is copied. It ends with this process.
"""

from __future__ import annotations

import os
import pickle
import re
import signal
import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain, pairwise
from queue import SimpleQueue
from subprocess import PIPE, Popen
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

Frame = tuple[list[int], list[int]]  # the ids that stand before and after those of a sentence
MOST = 1 << 20  # words remembered, some 250 bytes each; beyond that all are forgotten
PROBE = ["a b", "b"]  # tells special tokens that are not simply put around a sentence
CALLS = ("__call__", "_encode_plus", "_batch_encode_plus")  # of Transformers 4 and 5
Worker = Popen[bytes]
START = """import signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
sys.path[:] = sys.argv[1:]; from whitenedcse.data.words import work; work()"""


class Ids(NamedTuple):
    """Of n sentences: all ids end to end (t,), lengths (n,), and which of them were truncated (n,)."""

    ids: NDArray[np.int32]
    lengths: NDArray[np.int64]
    truncated: NDArray[np.bool_]


def flat(rows: Sequence[Sequence[int]], truncated: Sequence[bool]) -> Ids:
    """The `Ids` of n lists of ids, and of whether each was truncated."""
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    return Ids(np.fromiter(chain.from_iterable(rows), np.int32), lengths, np.array(truncated, bool))


def listed(batch: Ids) -> list[list[int]]:
    """The ids of each of n sentences, as n lists."""
    every, bounds = batch.ids.tolist(), [0, *batch.lengths.cumsum().tolist()]
    return [every[a:b] for a, b in pairwise(bounds)]


def memory(tokenizer: PreTrainedTokenizerBase, max_length: int) -> Words | None:
    """An empty `Words` for a tokenizer that works word by word; None for any other.

    Such are WordPiece and BPE without dropout, after BERT's or GPT-2's pre-tokenizer, with BERT's normalizer
    or none, and with the same special tokens around every sentence.
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
    core = tokenizer.backend_tokenizer
    known = Words(core, core.encode_special_tokens, max_length, frame, [token.content for token in added])
    expected = tokenizer(PROBE, truncation=True, max_length=max_length)["input_ids"]
    return known if listed(known.ids_of(PROBE)) == expected else None


def _plain(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer's call only passes text to its Rust core, and truncates on the right."""
    from transformers import PreTrainedTokenizerFast

    kind = type(tokenizer)
    return (
        isinstance(tokenizer, PreTrainedTokenizerFast)
        and all(getattr(kind, name, None) is getattr(PreTrainedTokenizerFast, name, None) for name in CALLS)
        and tokenizer.truncation_side == "right"
    )


def _by_word(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether no step of the tokenizer's Rust core depends on text across a space."""
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
    r"""Word -> 2 * its number, + 1 for the first word of a sentence, which is then written "\n" before it.

    The ids of word i are `lengths[i]` ids from `starts[i]` on; a first word's ids have in front the special
    tokens that end the previous sentence and begin this one. Number 0 is any word that only the tokenizer
    itself may tokenise: an empty one (two spaces, or one at an end), one with a special token or an
    unprintable character. Unpickled, it is an empty memory for the same tokenizer. literal: whether special
    tokens in a text are plain text.
    """

    def __init__(
        self, core: Tokenizer, literal: bool, max_length: int, frame: Frame, added: Sequence[str]
    ) -> None:
        super().__init__()
        self.made_of = core, literal, max_length, frame, added
        self.core, self.max_length, self.after = core, max_length, len(frame[0])
        self.core.encode_special_tokens = literal  # which a pickled core forgets
        self.frame = np.array([*frame[0], *frame[1]], dtype=np.int32)
        self.added = re.compile("|".join(map(re.escape, added)) or r"(?!)")
        self.forget()

    def __reduce__(self) -> Any:
        return Words, self.made_of

    def forget(self) -> None:
        """Remove all words."""
        self.clear()
        self.new: list[str] = []
        self.ids, self.starts = array("i", self.frame), array("q", [0])
        self.lengths = array("q", self.frame.shape)

    def __missing__(self, word: str) -> int:
        """Number a word that was not seen before."""
        begins = word.startswith("\n")
        text = word[1:] if begins else f" {word}"
        number = 0
        if word[begins:] and text.isprintable() and not self.added.search(text):
            number = len(self.starts) + len(self.new)
            self.new.append(text)
        self[word] = 2 * number + begins
        return self[word]

    def ids_of(self, sentences: Sequence[str]) -> Ids:
        """The ids of each sentence, special tokens included, truncated to `max_length`."""
        if len(self) > MOST:
            self.forget()
        split = ("\n" + " \n".join(sentences) + " \n").split(" ")
        words = np.fromiter(map(self.__getitem__, split), np.int64, len(split))
        if self.new:
            self.learn()
        first = np.flatnonzero(words & 1)
        if len(first) != len(sentences) + 1:  # a line end within a sentence
            return self.whole(sentences)
        words >>= 1
        ids, counts, truncated = self.put_together(words, first)
        odd = np.searchsorted(first, np.flatnonzero(words == 0), side="right") - 1
        unclear = np.bincount(odd, minlength=len(first))[:-1] > 0  # the last one is no sentence
        if not unclear.any():
            return Ids(ids, counts, truncated)
        clear = np.repeat(~unclear, counts)
        rest = [s for s, at in zip(sentences, unclear, strict=True) if at]
        told, counts[unclear], truncated[unclear] = self.whole(rest)
        both = np.empty(counts.sum(), np.int32)
        both[np.repeat(unclear, counts)], both[np.repeat(~unclear, counts)] = told, ids[clear]
        return Ids(both, counts, truncated)

    def whole(self, sentences: Sequence[str]) -> Ids:
        """The ids of each sentence, tokenised as a whole by the Rust core and truncated to `max_length`."""
        self.core.enable_truncation(self.max_length)
        self.core.no_padding()
        made = self.core.encode_batch(sentences)
        return flat([encoding.ids for encoding in made], [bool(encoding.overflowing) for encoding in made])

    def put_together(self, words: NDArray[np.int64], first: NDArray[np.int64]) -> Ids:
        """The ids of sentences from the numbers of their words and the positions of first words."""
        starts, lengths = (np.frombuffer(kept, np.int64)[words] for kept in (self.starts, self.lengths))
        ends = lengths.cumsum()
        before = ends - lengths
        begins = before[first]
        before -= np.repeat(begins, np.diff(first, append=len(words)))  # in its sentence
        lengths = np.clip(self.max_length - before, 0, lengths)
        ends = lengths.cumsum()
        positions = np.arange(ends[-1]) + np.repeat(starts - ends + lengths, lengths)
        edges = (ends - lengths)[first] + self.after
        ids = np.frombuffer(self.ids, np.int32)[positions[edges[0] : edges[-1]]]
        return Ids(ids, np.diff(edges), np.diff(begins) > self.max_length)

    def learn(self) -> None:
        """Tokenise each of the new words by itself."""
        self.core.no_truncation()
        self.core.no_padding()
        # all as one text takes a third less time, but the offsets that byte-level tokenizers give tell words
        # apart only where no token begins or ends within a character
        encoding = self.core.encode(self.new, is_pretokenized=True, add_special_tokens=False)
        counts = np.bincount(np.array(encoding.word_ids, dtype=np.int64), minlength=len(self.new))
        begins = np.flatnonzero([word[0] != " " for word in self.new])
        frames = np.repeat((counts.cumsum() - counts)[begins], len(self.frame))
        ids = np.insert(np.array(encoding.ids, np.int32), frames, np.tile(self.frame, len(begins)))
        counts[begins] += len(self.frame)
        self.starts.frombytes((len(self.ids) + counts.cumsum() - counts).tobytes())
        self.lengths.frombytes(counts.tobytes())
        self.ids.frombytes(ids.tobytes())
        self.new = []


def ids_of_several(
    known: Words, processes: int, batch: Callable[[int], Sequence[str]], starts: Sequence[int]
) -> Iterator[Ids]:
    """The ids of each batch in order, computed by `processes` worker processes, each with its own `Words`.

    Raises OSError if a worker ends early, and any error that a worker met.
    """
    with ThreadPoolExecutor(processes) as threads, crew(known, processes) as idle:

        def ids(start: int) -> Ids:
            worker = idle.get()
            try:
                return asked(worker, batch(start))
            finally:
                idle.put(worker)

        yield from threads.map(ids, starts)


@contextmanager
def crew(known: Words, processes: int) -> Iterator[SimpleQueue[Worker]]:
    """A context with a queue of `processes` idle workers, each with an empty memory; it ends them on exit."""
    command = [sys.executable, "-c", START, *sys.path]
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false"}  # the others have the other cores
    with ExitStack() as stack:
        workers, idle = [], SimpleQueue[Worker]()
        for _ in range(processes):
            workers.append(Popen(command, stdin=PIPE, stdout=PIPE, env=environment))
            stack.callback(end, workers[-1])
        for worker in workers:  # all of which are starting by now
            told(worker, known)
            idle.put(worker)
        yield idle


def asked(worker: Worker, sentences: Sequence[str]) -> Ids:
    """The ids of sentences, computed by one worker. Raises OSError if it has ended."""
    told(worker, sentences)
    assert worker.stdout
    try:
        reply = pickle.load(worker.stdout)
    except (OSError, EOFError, pickle.UnpicklingError) as error:
        raise lost(worker) from error
    if isinstance(reply, Exception):
        raise reply
    return reply


def told(worker: Worker, message: object) -> None:
    """Send a message to a worker. Raises OSError if it has ended."""
    assert worker.stdin
    try:
        pickle.dump(message, worker.stdin)
        worker.stdin.flush()
    except OSError as error:
        raise lost(worker) from error


def lost(worker: Worker) -> OSError:
    """The error to raise for a worker that has ended."""
    worker.kill()
    status = worker.wait()
    how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
    return OSError(f"a process that tokenises {how}; start again, with OMP_NUM_THREADS=1 to do without it")


def end(worker: Worker) -> None:
    """End a worker, which has nothing to save."""
    with suppress(OSError), worker:  # closes its pipes and waits for it
        worker.kill()


def work() -> None:
    """The loop of a worker: ids for each list of sentences, until its input ends."""
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    with suppress(EOFError, BrokenPipeError, pickle.UnpicklingError):
        known: Words = pickle.load(source)
        while True:
            sentences = pickle.load(source)
            try:
                reply: Ids | Exception = known.ids_of(sentences)
            except Exception as error:
                reply = error
            pickle.dump(reply, sink)
            sink.flush()
    os._exit(0)  # the standard output may be gone, which a usual end complains of

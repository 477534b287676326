"""Independent pieces of work in parallel threads, each of which computes on one core.

PyTorch's operators let other Python threads run. Pieces of a batch in threads of their own therefore use all
cores, also where each operation is too small to be shared among them, and give the bits of one core.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from queue import Empty, SimpleQueue
from threading import Barrier
from typing import Any, TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")
Context = Callable[[], AbstractContextManager[Any]]


def cores() -> int:
    """How many threads to use: as many as PyTorch would for one operation.

    That is the number of cores, unless OMP_NUM_THREADS or `torch.set_num_threads` says otherwise.
    """
    return torch.get_num_threads()


def each(
    function: Callable[[Item], Result], items: Sequence[Item], within: Context = nullcontext
) -> Iterator[Result]:
    """What a function makes of each item, in order, by `cores` threads; in this thread if one is enough.

    within: a context that each thread enters once, for PyTorch keeps its modes for each thread by itself.
    """
    if min(cores(), len(items)) < 2:
        yield from alone(function, items, within)
        return
    waiting: SimpleQueue[tuple[Item, Future[Result]]] = SimpleQueue()
    results: list[Future[Result]] = [Future() for _ in items]
    for pair in zip(items, results, strict=True):
        waiting.put(pair)
    pool = _pool(cores())
    workers = [pool.submit(_work, function, waiting, within) for _ in range(min(cores(), len(items)))]
    try:
        for result in results:
            yield result.result()
    finally:  # an error, or nobody wants the rest
        while _next(waiting) is not None:
            pass
        for worker in workers:
            worker.result()


def alone(
    function: Callable[[Item], Result], items: Sequence[Item], within: Context = nullcontext
) -> Iterator[Result]:
    """The same in this thread."""
    with within():
        yield from map(function, items)


def _work(
    function: Callable[[Any], Any], waiting: SimpleQueue[tuple[Any, Future[Any]]], within: Context
) -> None:
    """What one thread does: item after item until none is left. Who reads a result raises its error."""
    pair = None
    try:
        with within():
            while (pair := _next(waiting)) is not None:
                pair[1].set_result(function(pair[0]))
    except BaseException as error:
        while pair is not None or (pair := _next(waiting)) is not None:
            pair[1].set_exception(error)
            pair = None


def _next(waiting: SimpleQueue[Any]) -> Any:
    """The next item, or None."""
    try:
        return waiting.get_nowait()
    except Empty:
        return None


@cache
def _pool(count: int) -> ThreadPoolExecutor:
    """Threads that wait for work, each told to use one core; what PyTorch uses in others stays."""
    all_told = Barrier(count + 1)
    pool = ThreadPoolExecutor(count, "whitenedcse", _use_one_core, (all_told,))
    for _ in range(count):
        pool.submit(int)
    all_told.wait()
    torch.set_num_threads(count)
    return pool


def _use_one_core(all_told: Barrier) -> None:
    """Told to a thread when it begins.

    PyTorch has one number for the threads that are yet to compute, and a thread reads it when it first
    computes: each reads it here, before the next change.
    """
    torch.set_num_threads(1)
    torch.get_num_threads()
    all_told.wait()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)  # the child has none of the threads

"""The blocks of a job done by actors of a Ray cluster: `whitenedcse encode --engine ray`.

The cluster is that of RAY_ADDRESS, or one that is started on this machine. Each actor opens the embedder and
takes one block after another; Ray starts a killed one again, and its block is done again. All write to one
directory, so machines have to share it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

import torch

from whitenedcse.app.terminal import lacking
from whitenedcse.serving.shares import Fold, Work


class Actors:
    """A context with processes of a Ray cluster that each call `opened`, and then what it returned.

    count: None is one per GPU of the cluster, or one per machine. threads: of each, as many as the cluster
    has cores for it, at most as many as here. Raises ValueError where Ray is not installed, and OSError where
    a block fails. At a RAY_ADDRESS where nothing answers, Ray itself tries for minutes.
    """

    def __init__(self, opened: Callable[[], Work], count: int | None = None) -> None:
        try:
            import ray
        except ImportError as error:
            raise lacking("--engine ray", "ray", "ray", error) from error
        self.ray, self.opened, self.count = ray, opened, count

    def __enter__(self) -> Self:
        ray = self.ray
        self.own = not ray.is_initialized()  # else it is the caller's, and stays
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is reported to anyone
        quiet = {"include_dashboard": False, "log_to_driver": False, "configure_logging": False}
        ray.init(ignore_reinit_error=True, **quiet)
        has = ray.cluster_resources()
        gpus, cores = has.get("GPU", 0), has.get("CPU", 1)
        count = self.count or int(gpus) or len(ray.nodes())
        self.threads = max(1, min(torch.get_num_threads(), int(cores) // count))
        each = {"num_cpus": min(1, cores / count), "num_gpus": min(1, gpus / count)}  # so that all start
        again = {"max_restarts": -1, "max_task_retries": -1}
        made = ray.remote(scheduling_strategy="SPREAD", **each, **again)(Actor)
        self.actors = [made.remote(self.opened) for _ in range(count)]
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: TracebackType | None) -> None:
        for actor in self.actors:
            self.ray.kill(actor)
        if self.own:
            self.ray.shutdown()

    def do(self, numbers: Sequence[int], _: Work, fold: Fold) -> None:
        """Have the actors do these blocks, each the next one that is left. Raises OSError if one fails."""
        left, busy = iter(numbers), dict[Any, Any]()

        def give(actor: Any) -> None:
            for number in left:
                busy[actor.do.remote(number)] = number, actor
                return

        for actor in self.actors:
            give(actor)
        while busy:
            ended, _rest = self.ray.wait(list(busy))
            for task in ended:
                number, actor = busy.pop(task)
                fold({number: self._result(task)})
                give(actor)

    def _result(self, task: Any) -> bytes:
        try:
            return bytes(self.ray.get(task))
        except self.ray.exceptions.RayError as error:
            what = str(error).strip().splitlines()[-1]
            raise OSError(f"an actor failed: {what}; files are kept, and the same command resumes") from error


class Actor:
    """What runs in a process of the cluster."""

    def __init__(self, opened: Callable[[], Work]) -> None:
        self.work = opened()

    def do(self, number: int) -> bytes:
        """Do one block."""
        return self.work(number)

"""Several processes for one job: the place of this one, as torchrun, srun or `trainer.devices=N` gave it.

It is read from the environment, before PyTorch is imported and before the processes have met. What they tell
each other once they have is in training/parallel.py.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import NamedTuple

USR1 = getattr(signal, "SIGUSR1", signal.SIGTERM)  # SLURM's "your time is nearly over"
ASKING = (signal.SIGTERM, signal.SIGINT, USR1)  # to stop


class Place(NamedTuple):
    """The place of this process: its rank of `world`, the ranks on its machine, and its number among them."""

    rank: int
    world: int
    on_machine: int
    local: int = 0


def placed() -> Place | None:
    """The place that this process was given; None if it was started alone."""
    env = os.environ
    if "RANK" in env and "WORLD_SIZE" in env:
        rank, world = int(env["RANK"]), int(env["WORLD_SIZE"])
        on_machine = int(env.get("LOCAL_WORLD_SIZE", world))
        return Place(rank, world, on_machine, int(env.get("LOCAL_RANK", rank % on_machine)))
    if int(env.get("SLURM_NTASKS", 1)) > 1 and "SLURM_PROCID" in env:
        world = int(env["SLURM_NTASKS"])
        on_machine, rank = world // int(env.get("SLURM_NNODES", 1)), int(env["SLURM_PROCID"])
        return Place(rank, world, on_machine, int(env.get("SLURM_LOCALID", rank % on_machine)))
    return None


def is_first() -> bool:
    """Whether this process is the first rank of its job, or the only one."""
    here = placed()
    return here is None or here.rank == 0


def has_agent() -> bool:
    """Whether torchrun, or this package as it does, started this process and watches it."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def check_alone(what: str) -> None:
    """Raise ValueError in one of several ranks: this job is for one process."""
    here = placed()
    if here is not None and here.world > 1:
        raise ValueError(f"{what} works in one process, not in {here.world} ranks of torchrun or srun")


def shared(name: str, value: str) -> str:
    """The first rank's value of this name, on every rank, and again after torchrun has restarted them."""
    here, env = placed(), os.environ
    if here is None or here.world == 1:
        return value
    if env.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        raise ValueError("these ranks cannot agree on a name for the run; add run=NAME")
    import torch.distributed as dist

    store = dist.TCPStore(env["MASTER_ADDR"], int(env["MASTER_PORT"]), is_master=False)  # type: ignore[attr-defined]
    if here.rank == 0:
        store.compare_set(f"whitenedcse/{name}", "", value)
    return store.get(f"whitenedcse/{name}").decode()


def end_with_parent() -> None:
    """End this process soon after the one that started it ended, in whatever way: no rank is left alone."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()

"""Lightning's trainer with what does not vary here: durable checkpoints, ranks, shares of a batch."""

from __future__ import annotations

from typing import Any

import lightning
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment

from whitenedcse.ranks import placed
from whitenedcse.training.checkpoints import Checkpoints


class Trainer(lightning.Trainer):
    """Lightning's trainer; takes all its arguments.

    devices: "auto" is what torchrun or srun started, or else all there are.
    chunk: sentences that the module encodes at a time (None: a whole batch).
    """

    def __init__(self, *, chunk: int | None, devices: Any, num_nodes: int = 1, **settings: Any) -> None:
        if 0 in (settings.get("max_steps"), settings.get("max_epochs")):
            raise ValueError(
                "trainer.max_steps=0 or max_epochs=0 trains nothing; evaluate.py judges an encoder"
            )
        self.chunk = chunk
        here = placed()
        plugins: list[Any] = [Checkpoints()]
        if here is not None and devices == "auto":
            devices, num_nodes = here.on_machine, here.world // here.on_machine
        plugins += slurm()
        super().__init__(
            devices=devices,
            num_nodes=num_nodes,
            plugins=plugins,
            use_distributed_sampler=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            **settings,
        )
        # Lightning would ask the device at every step whether a rank has a signal; Safekeeping asks the hosts
        loop: Any = self.fit_loop.epoch_loop
        loop._broadcast_sigterm_tensor = lambda: None


def slurm() -> list[SLURMEnvironment]:
    """What Lightning needs to know where srun started this process. Raises ValueError for what it refuses."""
    try:
        # training/safekeeping.py does the requeueing
        return [SLURMEnvironment(auto_requeue=False)] if SLURMEnvironment.detect() else []
    except RuntimeError as error:
        raise ValueError(
            "started by srun --ntasks=N: say srun --ntasks-per-node=N, as Lightning asks"
        ) from error

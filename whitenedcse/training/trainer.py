"""Lightning's trainer with the settings of this project: one process a device, and checkpoints of its own."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from datetime import timedelta
from inspect import signature
from typing import Any

import lightning
import torch
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.strategies import DDPStrategy
from torch.nn.parallel import DistributedDataParallel

from whitenedcse.distributed import has_agent, placed
from whitenedcse.training.checkpoints import Checkpoints

FINDING = "ddp_find_unused_parameters_true"  # for a loss of one's own that leaves weights without gradient
WHOLE = ("auto", "ddp", "ddp_find_unused_parameters_false", FINDING)
# the argument of DDP for buffers at each step: PyTorch 2.13 has renamed it, and warns of the old name
NEW = "forward_sync_buffers" in signature(DistributedDataParallel).parameters
SYNCED = "forward_sync_buffers" if NEW else "broadcast_buffers"


class Trainer(lightning.Trainer):
    """Lightning's trainer, with all its arguments.

    devices: with the default of 1, and with "auto", all that torchrun or srun started.
    chunk, compile: settings of the module, which train.py gives it.
    timeout: seconds after which a collective that waits for a rank ends the job.
    Raises ValueError for settings that cannot train.
    """

    def __init__(  # noqa: PLR0913  Lightning's own, by name
        self,
        *,
        chunk: int | None = None,
        compile: bool = False,
        devices: Any = 1,
        num_nodes: int = 1,
        strategy: Any = "auto",
        timeout: float = 600.0,
        **settings: Any,
    ) -> None:
        for name in ("lightning.pytorch", "lightning.fabric"):  # what they say is in our own lines
            logging.getLogger(name).setLevel(logging.WARNING)
        check_settings({**settings, "strategy": strategy})
        self.timeout = timeout
        if (here := placed()) is not None and devices in ("auto", 1):
            devices, num_nodes = here.on_machine, here.world // here.on_machine
        if devices in ("auto", -1, "-1"):
            devices = 1 if settings.get("accelerator") == "cpu" else max(1, torch.cuda.device_count())
        one = len(devices) == 1 if isinstance(devices, list) else devices == 1
        if strategy in WHOLE and not (one and num_nodes == 1):
            # gradients are not copied, and running statistics are those of all ranks already
            more: Any = {"gradient_as_bucket_view": True, SYNCED: False}
            more["find_unused_parameters"] = strategy == FINDING
            strategy = DDPStrategy(timeout=timedelta(seconds=timeout), **more)
        settings |= {"devices": devices, "num_nodes": num_nodes, "strategy": strategy}
        off = ("use_distributed_sampler", "enable_checkpointing", "enable_model_summary")
        settings |= dict.fromkeys(off, False)
        super().__init__(plugins=[Checkpoints(), *slurm()], **settings)
        # Lightning would ask the device at every step whether a rank has a signal; Safekeeping asks the hosts
        loop: Any = self.fit_loop.epoch_loop
        loop._broadcast_sigterm_tensor = lambda: None


def check_settings(settings: Mapping[Any, Any]) -> None:
    """Raise ValueError for settings with which Lightning's trainer would fail, or train something else."""
    if 0 in (settings.get("max_steps"), settings.get("max_epochs")):
        raise ValueError("trainer.max_steps=0 or max_epochs=0 trains nothing: use evaluate.py")
    epochs, steps = settings.get("max_epochs"), settings.get("max_steps", -1)
    if steps == -1 and (epochs == -1 or (epochs is None and settings.get("max_time"))):
        raise ValueError("there is no last step, where the learning rate is 0; set trainer.max_steps")
    if isinstance(strategy := settings.get("strategy"), str) and strategy not in WHOLE:
        raise ValueError(f"trainer.strategy={strategy} divides the encoder: use auto or ddp")


def slurm() -> list[SLURMEnvironment]:
    """Lightning's plugin where srun started this process, which may run in a job of sbatch; else none."""
    by_srun = SLURMEnvironment.detect() and not has_agent()
    return [SLURMEnvironment(auto_requeue=False)] if by_srun else []  # Safekeeping requeues the job

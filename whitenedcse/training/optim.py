"""The optimiser and its schedule."""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch.nn import Parameter
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR


def adamw(
    parameters: Iterable[Parameter], *, total_steps: int, lr: float, weight_decay: float, warmup_steps: int
) -> tuple[Optimizer, LambdaLR]:
    """Fused AdamW and a linear decay to 0 after an optional linear warm-up, stepped once an optimiser step.

    The reference scripts use no warm-up and no weight decay. Raises ValueError for a rate that cannot train.
    """
    if not (math.isfinite(lr) and lr > 0):
        raise ValueError(f"optim.lr={lr} must be finite and above 0")
    if not (math.isfinite(weight_decay) and weight_decay >= 0):
        raise ValueError(f"optim.weight_decay={weight_decay} must be finite and 0 or more")
    if not 0 <= warmup_steps <= total_steps:
        raise ValueError(
            f"optim.warmup_steps={warmup_steps} is not in 0 .. {total_steps}, the steps of this run"
        )
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.ndim > 1]
    vectors = [parameter for parameter in trained if parameter.ndim <= 1]  # biases and norms never decay
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = AdamW(groups, lr=lr, fused=trained[0].device.type in ("cpu", "cuda"))
    # Fused AdamW offers to unscale fp16 gradients itself, and Lightning then refuses to clip, in bf16 too.
    optimizer._step_supports_amp_scaling = False

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / (warmup_steps + 1)
        return max(0.0, (total_steps - step) / max(1, total_steps - warmup_steps))

    return optimizer, LambdaLR(optimizer, factor)

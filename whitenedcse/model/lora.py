"""Low-rank adapters: frozen weights, and a learnt product of two thin matrices beside each.

r: rank    s: alpha / r

An adapted linear layer computes x W' + s x A' B', with W (out, in) frozen, A (r, in), and B (out, r), which
begins at zero. The library `peft` builds the layers; what is saved holds W + s B A, so that whatever reads a
checkpoint knows nothing of adapters.

[1] Hu et al., LoRA, arXiv:2106.09685
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from whitenedcse.compute import without_autocast
from whitenedcse.console import lacking

NAME = "default"  # of the one adapter of a layer, as peft calls it


@dataclass(frozen=True, kw_only=True)
class LoRA:
    """Settings of low-rank adapters: in the encoder only the adapters train; the head trains as usual.

    r: the rank; 0 for no adapters. alpha: the product of the thin matrices is multiplied by alpha / r [1].
    dropout: the dropout rate on the input of adapters. modules: the ends of the names of the linear layers to
        adapt, e.g. ["query", "value"]; None for every linear layer except those of the pooler.
    """

    r: int
    alpha: float = 16.0
    dropout: float = 0.0
    modules: Sequence[str] | None = None

    def adapt(self, backbone: nn.Module) -> None:
        """Give a backbone its adapters, in place, and freeze all its other weights; nothing for r = 0."""
        if not self.r:
            return
        try:
            from peft import LoraConfig, inject_adapter_in_model
        except ImportError as error:
            raise lacking(f"encoder.lora.r={self.r}", "peft", "lora", error) from error
        settings: Any = {"r": self.r, "lora_alpha": self.alpha, "lora_dropout": self.dropout}
        settings["target_modules"] = "all-linear" if self.modules is None else list(self.modules)
        if getattr(backbone, "pooler", None) is not None:
            settings["exclude_modules"] = "pooler.*"
        with warnings.catch_warnings():  # GPT-2 keeps its matrices transposed, and peft says that it noticed
            warnings.filterwarnings("ignore", message="fan_in_fan_out")
            inject_adapter_in_model(LoraConfig(**settings), backbone, NAME)


def adapters(backbone: nn.Module) -> list[str]:
    """The names of the layers of a backbone that have adapters."""
    return [name for name, part in backbone.named_modules() if hasattr(part, "lora_A")]


@torch.no_grad()
def merge(backbone: Any) -> None:
    """Put in the place of each adapted layer of a backbone a plain one, with W + s B A for W."""
    with without_autocast(backbone.device):
        for name in adapters(backbone):
            layer, (parent, _, own) = backbone.get_submodule(name), name.rpartition(".")
            weight = layer.base_layer.weight + layer.get_delta_weight(NAME)
            layer.base_layer.weight = nn.Parameter(weight, requires_grad=False)
            setattr(backbone.get_submodule(parent), own, layer.base_layer)

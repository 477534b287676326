"""Low-rank adapters: frozen weights, and a learnt product of two thin matrices beside each.

r: rank    s: alpha / r

An adapted linear layer computes x W' + s x A' B', with W (out, in) frozen, A (r, in), and B (out, r), which
begins at zero. The library `peft` builds the layers; what is saved holds W + s B A, so that whatever reads a
checkpoint knows nothing of adapters.

[1] Hu et al., LoRA, arXiv:2106.09685
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from whitenedcse.compute import without_autocast
from whitenedcse.console import lacking
from whitenedcse.inputs import takes_numbers

NAME = "default"  # of the one adapter of a layer, as peft calls it


@takes_numbers
@dataclass(frozen=True, kw_only=True)
class LoRA:
    """Settings of low-rank adapters: in the encoder only the adapters train; the head trains as usual.

    r: the rank; 0 for no adapters. alpha: the product of the thin matrices is multiplied by alpha / r [1].
    dropout: the dropout rate on the input of adapters. modules: the ends of the names of the linear layers to
        adapt, e.g. ["query", "value"]; None for every linear layer except those of the pooler.
    Raises ValueError for a setting out of its range.

    >>> from transformers import BertConfig, BertModel
    >>> sizes = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=16)
    >>> bert = BertModel(BertConfig(vocab_size=10, **sizes), add_pooling_layer=False)
    >>> LoRA(r=2, modules=["query", "value"]).adapt(bert)
    >>> sum(weight.numel() for weight in bert.parameters() if weight.requires_grad)  # 2 (8 + 8) in each
    64
    """

    r: int
    alpha: float = 16.0
    dropout: float = 0.0
    modules: Sequence[str] | None = None

    def __post_init__(self) -> None:
        for name, sound, words in (
            ("r", self.r >= 0, "0 (no adapters) or more"),
            ("alpha", 0 < self.alpha < math.inf, "finite and above 0"),
            ("dropout", 0 <= self.dropout < 1, "in [0, 1)"),
            ("modules", self.modules is None or len(self.modules) > 0, "null or names of linear layers"),
        ):
            if not sound:
                raise ValueError(f"encoder.lora.{name}={getattr(self, name)} must be {words}")

    def adapt(self, backbone: nn.Module) -> None:
        """Give a backbone its adapters, in place, and freeze all its other weights; nothing for r = 0."""
        if not self.r:
            return
        names = self.adapted(backbone)
        try:
            from peft import LoraConfig, inject_adapter_in_model
        except ImportError as error:
            raise lacking(f"encoder.lora.r={self.r}", "peft", "lora", error) from error
        settings: Any = {"r": self.r, "lora_alpha": self.alpha, "lora_dropout": self.dropout}
        with warnings.catch_warnings():  # GPT-2 keeps its matrices transposed, and peft says that it noticed
            warnings.filterwarnings("ignore", message="fan_in_fan_out")
            inject_adapter_in_model(LoraConfig(**settings, target_modules=names), backbone, NAME)

    def adapted(self, backbone: nn.Module) -> list[str]:
        """The names of the layers to adapt. Raises ValueError for an end that no linear layer's name has."""
        parts = [(name, layer) for name, layer in backbone.named_modules() if "pooler" not in name.split(".")]
        every = [
            name for name, layer in parts if isinstance(layer, nn.Linear) or type(layer).__name__ == "Conv1D"
        ]
        for end in self.modules or ():
            if not any(f".{name}".endswith(f".{end}") for name in every):
                known = sorted({name.rpartition(".")[2] for name in every})
                raise ValueError(
                    f"encoder.lora.modules: no linear layer {end!r}; this encoder has {', '.join(known)}"
                )
        wanted = tuple(f".{end}" for end in self.modules or every)
        return [name for name in every if f".{name}".endswith(wanted)]


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

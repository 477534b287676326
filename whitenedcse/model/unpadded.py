"""ModernBERT and other encoders of Transformers on a ragged batch itself, where a device has kernels for it.

t: tokens    n: sentences    d: width    k: layers asked for    h: heads

All tokens of a batch are one row, and attention, which Transformers lets others provide, keeps the sentences
apart. Everything else is the encoder's own code, which looks at one token at a time.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from whitenedcse.model.attention import jagged_attention
from whitenedcse.ragged import Ragged, places

NAME = "whitenedcse"  # of our attention, in Transformers' register
LOCK = Lock()  # held while an encoder has an attention that another thread must not take for its own
KINDS = ("albert", "distilbert", "electra", "ernie", "eurobert", "modernbert", "nomic_bert")

known = False
with suppress(ImportError):  # since Transformers 4.53
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    known = True


def fits(backbone: Any) -> bool:
    """Whether there is this way through a backbone."""
    return (
        known
        and backbone.config.model_type in KINDS
        and type(backbone).__module__.startswith("transformers.models.")
        and getattr(backbone, "_supports_attention_backend", False)
        and "position_ids" in inspect.signature(backbone.forward).parameters
    )


def possible(backbone: Any, longest: int) -> bool:
    """Whether it gives what padded batches do, in sentences of this many tokens.

    In layers with a window each token must see all others. Gradient checkpointing would compute layers again
    when the encoder has its own attention back.
    """
    window = getattr(backbone.config, "sliding_window", None)
    again = backbone.training and any(getattr(m, "gradient_checkpointing", False) for m in backbone.modules())
    return not again and (window is None or longest <= window + 1)


def undisturbed(backbone: Any) -> AbstractContextManager[Any]:
    """A context in which no other thread exchanges the attention of a backbone."""
    return LOCK if fits(backbone) else nullcontext()


def hidden(backbone: Any, batch: Ragged, layers: Sequence[int], *, first: bool) -> Tensor:
    """n sentences -> (k, t, d) hidden states of these layers, 0 the embeddings; first: (k, n, d)."""
    every = list(layers) != [backbone.config.num_hidden_layers]
    given = {"input_ids": batch.ids, "position_ids": places(batch)[1]}
    if "token_type_ids" in inspect.signature(backbone.forward).parameters:  # else no more than positions
        given["token_type_ids"] = torch.zeros_like(batch.ids)
    rows: Any = {name: x.unsqueeze(0) for name, x in given.items()}
    with LOCK:
        own = backbone.config._attn_implementation
        backbone.set_attn_implementation(NAME)
        try:
            out = backbone(**rows, output_hidden_states=every, ragged=batch)
        finally:
            backbone.set_attn_implementation(own)
    found = [out.hidden_states[layer] if every else out.last_hidden_state for layer in layers]
    return torch.stack([x[0, batch.offsets[:-1]] if first else x[0] for x in found])


def attend(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: None, *, ragged: Ragged, **settings: Any
) -> tuple[Tensor, None]:
    """(1, h, t, d / h) queries -> (1, t, h, d / h), each sentence by itself. Keys and values may have fewer
    heads, which several queries then share.
    """
    h = q.shape[1]
    k, v = (x if x.shape[1] == h else x.repeat_interleave(h // x.shape[1], dim=1) for x in (k, v))
    by_token = (x[0].transpose(0, 1).flatten(1).contiguous() for x in (q, k, v))
    x = jagged_attention(*by_token, heads=h, p=settings.get("dropout", 0.0), batch=ragged)
    return x.unflatten(-1, (h, -1)).unsqueeze(0), None


if known:
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, lambda *_, **__: None)

"""BERT and its relatives on a ragged batch, so that nothing is computed for padding.

t: tokens    n: sentences    d: width    k: layers asked for

The backbone and its weights are those of Transformers; this is another forward pass, with the same result and
gradient to float32 rounding. On CPU sentences are sorted by length, so that attention processes those of
similar length together, a few rows of zeros follow the last token, and the faster of two libraries multiplies
matrices.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import Function, once_differentiable
from torch.nn import functional as F

from whitenedcse.compute import autocast_type, prefers_onednn
from whitenedcse.model.attention import (
    Bounds,
    Plan,
    Seed,
    Settings,
    attention,
    bounds,
    dropped,
    planned,
    unpadded_attention,
)
from whitenedcse.model.lora import NAME as ADAPTER
from whitenedcse.ragged import Ragged, places, taken


def dropout(x: Tensor, layer: nn.Dropout, seed: Seed, *, onto: Tensor | None = None) -> Tensor:
    """Dropout as `layer` does it: (t, d) -> (t, d). onto: is added to the result if given.

    On CPU random numbers cost a quarter of PyTorch's and depend on `seed` alone.
    """
    if x.device.type == "cpu" and layer.training and layer.p > 0:
        return dropped(x, layer.p, seed, onto)
    x = F.dropout(x, layer.p, layer.training)
    return x if onto is None else x + onto


def linear(layer: Any, x: Tensor, seed: Seed = 0) -> Tensor:
    """The linear layer and its adapters: (t, in) -> (t, out); in float32 by oneDNN where that is faster."""
    if hasattr(layer, "lora_A"):
        if not plain(layer):
            return layer(x)
        down, up, factor = layer.lora_A[ADAPTER], layer.lora_B[ADAPTER], layer.scaling[ADAPTER]
        drop = layer.lora_dropout[ADAPTER]  # peft has an Identity for p = 0
        read = dropout(x, drop, seed) if isinstance(drop, nn.Dropout) else x
        return linear(layer.base_layer, x) + factor * linear(up, linear(down, read))
    if type(layer) is nn.Linear and x.dtype == torch.float32 and x.device.type == "cpu" and prefers_onednn():
        if not torch.is_autocast_enabled("cpu"):
            return _Linear.apply(x, layer.weight, layer.bias)  # type: ignore[no-untyped-call]
    return layer(x)


def plain(layer: Any) -> bool:
    """Whether an adapted layer is W + s B A of the adapter that `lora` makes, and nothing else, now."""
    told = layer.active_adapters == [ADAPTER] and not (layer.disable_adapters or layer.merged)
    return told and not getattr(layer, "lora_variant", None)


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias by oneDNN: (t, in), (out, in) -> (t, out)."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return multiply(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            multiply(grad, weight.t()) if needs_x else None,
            multiply(grad.t(), x.t()) if needs_weight else None,
            grad.sum(dim=0) if needs_bias else None,
        )


# oneDNN, and PyTorch's way to it, keep what they built for each of the last 1,024 shapes, which cost 1.4 GB;
# a training run takes about 100 in turn (`rounded`).
for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
    os.environ.setdefault(name, "128")

KINDS = ("bert", "roberta", "xlm-roberta", "camembert")


def fits(backbone: Any) -> bool:
    """Whether `hidden` can compute this backbone: a class of Transformers' own, of BERT's architecture."""
    config = backbone.config
    return (
        config.model_type in KINDS
        and type(backbone).__module__.startswith("transformers.models.")
        and not getattr(config, "is_decoder", False)
        and not getattr(config, "add_cross_attention", False)
        and getattr(config, "position_embedding_type", None) in (None, "absolute")
    )


class Layout(NamedTuple):
    """A batch in the order in which the layers compute it: sorted by length on CPU, else unchanged.

    order: (n,), tokens: (t,), the number in the original batch of each sentence and token; None if unchanged.
    rows, firsts: how many rows the layers compute for tokens and for first tokens. plan, seed: of attention
    and of dropout on CPU; bounds: of attention elsewhere.
    """

    batch: Ragged
    order: Tensor | None
    tokens: Tensor | None
    rows: int
    firsts: int
    plan: Plan | None
    bounds: Bounds | None
    seed: int


def laid_out(batch: Ragged, heads: int, seed: int) -> Layout:
    """The layout of a batch for the device that it is on."""
    if batch.ids.device.type != "cpu":
        return Layout(batch, None, None, len(batch.ids), batch.n, None, bounds(batch), 0)
    order = batch.lengths.argsort(stable=True)
    by_length, tokens = taken(batch, order)
    rows, firsts = rounded(len(tokens)), rounded(batch.n)
    plan = planned(by_length.lengths.tolist(), heads, rows, firsts)
    return Layout(by_length, order, tokens, rows, firsts, plan, None, seed)


def rounded(rows: int) -> int:
    """`rows` rounded up by at most a sixteenth, so that shapes repeat: oneDNN compiles a kernel for each."""
    step = max(16, (1 << rows.bit_length()) // 32)
    return -(-rows // step) * step


def hidden(
    backbone: Any,
    batch: Ragged,
    layers: Sequence[int],
    *,
    first: bool,
    seed: int | None = None,
    compiled: bool = False,
) -> Tensor:
    """The hidden states of the layers asked for, computed without padding; layer 0 is the embeddings.

    n sentences -> (k, t, d), or with `first` those of first tokens only, (k, n, d). seed: of dropout on CPU.
    compiled: each layer is computed by `torch.compile`, not on CPU, where its dropout is NumPy's.
    """
    layer_of = compiled_block() if compiled else block
    if seed is None:
        seed = int(torch.randint(2**62, ())) if backbone.training else 0
    layout, highest = laid_out(batch, backbone.config.num_attention_heads, seed), max(layers)
    x, states = embedded(backbone.embeddings, layout), {}
    starts, t = layout.batch.offsets[:-1], len(layout.batch.ids)
    if 0 in layers:
        states[0] = x[starts] if first else x[:t]
    for number, layer in enumerate(backbone.encoder.layer[:highest], 1):
        rows = filled(starts, layout.firsts) if first and number == highest else None
        x = layer_of(layer, x, layout, number, rows)
        if number in layers:
            states[number] = x[: batch.n] if rows is not None else x[starts] if first else x[:t]
    wanted, order = torch.stack([states[layer] for layer in layers]), layout.order if first else layout.tokens
    return wanted if order is None else wanted.index_select(1, order.argsort())


def filled(x: Tensor, rows: int) -> Tensor:
    """Rows of zeros appended to x: (r, ...) -> (rows, ...)."""
    return x if len(x) == rows else torch.cat([x, x.new_zeros(rows - len(x), *x.shape[1:])])


def embedded(module: Any, layout: Layout) -> Tensor:
    """The embedding layer: t token ids -> (rows, d), words, positions and first token type, normalised."""
    ids, pad = layout.batch.ids, module.position_embeddings.padding_idx
    sentence, at = places(layout.batch)
    if pad is not None:  # RoBERTa counts from behind the padding token, and passes over one in the text
        words = (ids != pad).long()
        before = words.cumsum(0) - words
        at = pad + words * (before - before[layout.batch.offsets[sentence]] + 1)
    x = module.word_embeddings(ids) + module.token_type_embeddings.weight[0]
    x = dropout(module.LayerNorm(x + module.position_embeddings(at)), module.dropout, [layout.seed, 0, 0])
    return filled(x, layout.rows)


def block(layer: Any, x: Tensor, layout: Layout, number: int, rows: Tensor | None) -> Tensor:
    """One transformer layer: (rows, d) -> (rows, d), or (firsts, d) for the row numbers `rows` alone."""
    own, out = layer.attention.self, layer.attention.output
    low = x.to(autocast_type(x.device.type) or x.dtype)  # cast once for the three layers that read it
    some, some_low = (x, low) if rows is None else (x[rows], low[rows])
    seeds = [[layout.seed, number, place] for place in range(9)]
    q = linear(own.query, some_low, seeds[3])
    k, v = linear(own.key, low, seeds[4]), linear(own.value, low, seeds[5])
    p = own.dropout.p if own.training else 0.0
    if layout.plan is not None:
        seen = attention(q, k, v, Settings(layout.plan, rows is not None, p, seeds[0]))
    elif layout.bounds is not None:
        seen = unpadded_attention(q, k, v, heads=own.num_attention_heads, p=p, bounds=layout.bounds)
    x = out.LayerNorm(dropout(linear(out.dense, seen, seeds[6]), out.dropout, seeds[1], onto=some))
    wide, out = layer.intermediate, layer.output
    y = linear(out.dense, wide.intermediate_act_fn(linear(wide.dense, x, seeds[7])), seeds[8])
    return out.LayerNorm(dropout(y, out.dropout, seeds[2], onto=x))


@cache
def compiled_block() -> Callable[..., Tensor]:
    """`block` by torch.compile: two graphs for any number of layers and tokens, all tokens or first ones."""
    return torch.compile(block, dynamic=True)

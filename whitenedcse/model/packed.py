"""BERT and its relatives on a ragged batch itself: nothing is computed for padding, as there is none.

t: tokens    n: sentences    d: width    k: layers asked for

The backbone is Transformers' own, and so are its weights; this is another way through them, with the same
result and gradient to float32 rounding. On CPU sentences are sorted by length, so that attention sees groups
of equal length and needs no mask.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from whitenedcse.model.operations import Lengths, attention, dropout, linear
from whitenedcse.ragged import Ragged, places, taken

# oneDNN, and PyTorch's way to it, keep what they built for each of the last 1,024 shapes, and batches without
# padding hardly repeat one: after 70 steps of wiki_mini 3.1 GB and growing, with 32 steady at 1.7, as fast.
for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
    os.environ.setdefault(name, "32")

KINDS = ("bert", "roberta", "xlm-roberta", "camembert")


def fits(backbone: Any) -> bool:
    """Whether there is this way through a backbone: a class of Transformers' own, of BERT's architecture."""
    config = backbone.config
    return (
        config.model_type in KINDS
        and type(backbone).__module__.startswith("transformers.models.")
        and not getattr(config, "is_decoder", False)
        and not getattr(config, "add_cross_attention", False)
        and getattr(config, "position_embedding_type", None) in (None, "absolute")
    )


class Layout(NamedTuple):
    """A batch as the layers see it. batch: its sentences, by length where there are `groups`.

    order: (n,), tokens: (t,), where each sentence and token stands in the batch as it came; None if still so.
    """

    batch: Ragged
    groups: Lengths | None
    order: Tensor | None
    tokens: Tensor | None


def laid_out(batch: Ragged) -> Layout:
    """The layout for the device that the batch is on."""
    if batch.ids.device.type != "cpu":
        return Layout(batch, None, None, None)
    order = batch.lengths.argsort(stable=True)
    by_length, tokens = taken(batch, order)
    values, counts = by_length.lengths.unique_consecutive(return_counts=True)
    groups = list(zip(counts.tolist(), values.tolist(), strict=True))
    return Layout(by_length, groups, order, tokens)


def hidden(backbone: Any, batch: Ragged, layers: Sequence[int], *, first: bool) -> Tensor:
    """n sentences -> (k, t, d) hidden states of these layers, 0 the embeddings.

    first: of first tokens alone, (k, n, d). No layer above the highest is computed, and of that one no other
    row than these.
    """
    layout, highest = laid_out(batch), max(layers)
    x, found = embedded(backbone.embeddings, layout), {}
    starts = layout.batch.offsets[:-1]
    save = backbone.training and saves_memory(backbone)
    if 0 in layers:
        found[0] = x[starts] if first else x
    for number, layer in enumerate(backbone.encoder.layer[:highest], 1):
        rows = starts if first and number == highest else None
        x = (
            checkpoint(block, layer, x, layout, rows, use_reentrant=False)
            if save
            else block(layer, x, layout, rows)
        )
        if number in layers:
            found[number] = x[starts] if first and rows is None else x
    return unsorted(torch.stack([found[layer] for layer in layers]), layout.order if first else layout.tokens)


def saves_memory(backbone: Any) -> bool:
    """Whether `gradient_checkpointing_enable` was called, before or since it marks each layer."""
    marked = (backbone.encoder, *backbone.encoder.layer)
    return any(getattr(module, "gradient_checkpointing", False) for module in marked)


def unsorted(x: Tensor, to: Tensor | None) -> Tensor:
    """(k, rows, d), the rows back to where they stand in the batch as it came."""
    if to is None:
        return x
    back = torch.empty_like(to)
    back[to] = torch.arange(len(to))
    return x.index_select(1, back)


def embedded(module: Any, layout: Layout) -> Tensor:
    """(t,) ids -> (t, d): words, positions and the first token type, normalised."""
    ids, pad = layout.batch.ids, module.position_embeddings.padding_idx
    sentence, at = places(layout.batch)
    if pad is not None:  # RoBERTa counts from behind the padding token, and passes over one in the text
        words = (ids != pad).long()
        before = words.cumsum(0) - words
        at = pad + words * (before - before[layout.batch.offsets[sentence]] + 1)
    x = module.word_embeddings(ids) + module.token_type_embeddings.weight[0]
    return dropout(module.LayerNorm(x + module.position_embeddings(at)), module.dropout)


def block(layer: Any, x: Tensor, layout: Layout, rows: Tensor | None) -> Tensor:
    """(t, d) -> (t, d) through one layer, or (n, d) for these rows alone."""
    own, out = layer.attention.self, layer.attention.output
    low = lowered(x)
    some, some_low = (x, low) if rows is None else (x[rows], low[rows])
    p = own.dropout.p if own.training else 0.0
    seen = attention(
        linear(own.query, some_low),
        linear(own.key, low),
        linear(own.value, low),
        heads=own.num_attention_heads,
        p=p,
        where=layout.batch if layout.groups is None else layout.groups,
    )
    x = out.LayerNorm(dropout(linear(out.dense, seen), out.dropout) + some)
    wide, out = layer.intermediate, layer.output
    y = linear(out.dense, wide.intermediate_act_fn(linear(wide.dense, x)))
    return out.LayerNorm(dropout(y, out.dropout) + x)


def lowered(x: Tensor) -> Tensor:
    """In autocast's type, once for the three layers that read it."""
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x

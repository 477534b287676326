"""What Transformers' backbones differ in, found by computing a few tokens where no setting says it.

n: sentences    t: tokens of all sentences    d: width    k: layers asked for
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor, nn

from whitenedcse.ragged import Ragged, ragged

FEW = 8  # tokens of a sentence that is computed to find something out


def padded_right(tokenizer: Any) -> Any:
    """The tokenizer, told to pad as it is done here, on the right; by its end token if it has none for that.

    Decoders often come without a padding token, and libraries that read a checkpoint refuse to pad then.
    """
    tokenizer.padding_side = "right"
    if tokenizer.pad_token_id is None and tokenizer.eos_token_id is not None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def own_pooler(backbone: Any) -> Callable[[Tensor], Tensor]:
    """What a checkpoint's pooler makes of first tokens: (n, d) -> (n, d)."""
    pooler = backbone.pooler
    if not isinstance(pooler, nn.Linear):
        return lambda x: pooler(x.unsqueeze(1))
    activation = getattr(backbone, "pooler_activation", None) or backbone.activation
    return lambda x: activation(pooler(x))  # ALBERT and BigBird keep the activation beside the layer


def pooler_layer(backbone: Any) -> nn.Linear | None:
    """The dense layer of a checkpoint's pooler, after which comes tanh; None where there is none."""
    pooler = getattr(backbone, "pooler", None)
    return pooler if isinstance(pooler, nn.Linear) else getattr(pooler, "dense", None)


@torch.no_grad()
def causal(encoder: Any) -> bool:
    """Whether a first token sees none of those after it, as in a decoder.

    Transformers has no one setting for that, so it is computed: two sentences that differ in all other tokens
    have the very same first state. Each is computed alone, so that no rounding sets them apart.
    """
    first, other = ordinary(encoder)
    rows = ([first] * FEW, [first] + [other] * (FEW - 1))
    with still(encoder):
        one, two = (encoder(few(encoder, row), [-1], first=True) for row in rows)
    return torch.equal(one, two)


def unread(encoder: Any, layers: Sequence[int]) -> list[nn.Parameter]:
    """The weights behind the last layer that are not behind these: of layers above them, and of a last norm.

    Found by following the gradient, so that layers which share their weights (ALBERT) are never among them.
    """
    if encoder.depth in map(encoder.layer, layers):
        return []
    batch = few(encoder, ordinary(encoder) * (FEW // 2))
    with still(encoder), torch.enable_grad():
        read, every = behind(encoder(batch, layers)), behind(encoder(batch, [-1]))
    return [weight for weight in encoder.parameters() if weight in every - read]


def behind(x: Tensor) -> set[Tensor]:
    """The weights that a gradient of x reaches."""
    ahead: list[Any] = [x.grad_fn]
    seen: set[Any] = {None}
    while ahead:
        node = ahead.pop()
        if node not in seen:
            seen.add(node)
            ahead += [further for further, _ in node.next_functions]
    return {node.variable for node in seen if hasattr(node, "variable")}


def frozen(module: nn.Module, name: str = "") -> Iterator[str]:
    """The names of the outermost parts of a module whose weights are all frozen."""
    weights = list(module.parameters())
    if weights and not any(weight.requires_grad for weight in weights):
        yield name
    else:
        for part, inside in module.named_children():
            yield from frozen(inside, f"{name}.{part}".lstrip("."))


def ordinary(encoder: Any) -> list[int]:
    """Two token ids, of words if there are any."""
    special = encoder.tokenizer.all_special_ids
    every = range(len(encoder.backbone.get_input_embeddings().weight))
    return list(islice(chain((i for i in every if i not in special), special), 2))


def few(encoder: Any, row: Sequence[int]) -> Ragged:
    """A batch of this one sentence, on the encoder's device and no longer than it takes."""
    return ragged([row[: encoder.max_length]]).to(next(encoder.parameters()).device)


@contextmanager
def still(encoder: nn.Module) -> Iterator[None]:
    """Without dropout meanwhile."""
    was_training = encoder.training
    encoder.eval()
    try:
        yield
    finally:
        encoder.train(was_training)

"""How the backbones of Transformers differ, and those that compute without padding on a GPU.

n: sentences    t: tokens of all sentences    d: width    k: layers asked for    h: heads

A property that no setting of a backbone states is found by computing a few tokens. ModernBERT and some other
encoders take a ragged batch where a device has kernels for it: all tokens are one row, and an attention
function registered with Transformers keeps the sentences apart. The rest is the encoder's own code, which
works on each token by itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from itertools import chain, islice
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn

from whitenedcse.compute import without_autocast
from whitenedcse.model.attention import jagged_attention
from whitenedcse.ragged import Ragged, places, ragged

FEW = 8  # tokens of a sentence that is computed to find something out


def padded_right(tokenizer: Any) -> Any:
    """The tokenizer, changed in place to pad on the right, with its end token if it has no padding token.

    Decoders often come without a padding token, and libraries that read a checkpoint then refuse to pad.
    """
    tokenizer.padding_side = "right"
    if tokenizer.pad_token_id is None and tokenizer.eos_token_id is not None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def own_pooler(backbone: Any) -> Callable[[Tensor], Tensor]:
    """The checkpoint's pooler as a function of first tokens: (n, d) -> (n, d)."""
    pooler = backbone.pooler
    if not isinstance(pooler, nn.Linear):
        return lambda x: pooler(x.unsqueeze(1))
    activation = getattr(backbone, "pooler_activation", None) or backbone.activation
    return lambda x: activation(pooler(x))  # ALBERT and BigBird keep the activation beside the layer


def pooler_layer(backbone: Any) -> nn.Linear | None:
    """The dense layer of a checkpoint's pooler, which tanh follows; None where there is no pooler."""
    pooler = getattr(backbone, "pooler", None)
    return pooler if isinstance(pooler, nn.Linear) else getattr(pooler, "dense", None)


@torch.no_grad()
def causal(encoder: Any) -> bool:
    """Whether the first token attends to no later token, as in a decoder.

    Transformers has no common setting for that, so two sentences that differ in all other tokens are encoded
    and their first states compared. Each is encoded alone, so that rounding is the same.
    """
    first, other = ordinary(encoder)
    rows = ([first] * FEW, [first] + [other] * (FEW - 1))
    with still(encoder):
        one, two = (encoder(few(encoder, row), [-1], first=True) for row in rows)
    return torch.equal(one, two)


@torch.no_grad()
def mixes_padding(encoder: Any) -> bool:
    """Whether the states of a sentence change with the padding after it, in spite of the mask."""
    device = encoder.backbone.device
    ids = torch.tensor([ordinary(encoder) * 4], device=device)
    mask = (torch.arange(8, device=device) < 4).long().unsqueeze(0)
    with still(encoder), undisturbed(encoder.backbone), without_autocast(device):
        padded = encoder.backbone(input_ids=ids, attention_mask=mask).last_hidden_state[:, :4]
        alone = encoder.backbone(input_ids=ids[:, :4], attention_mask=mask[:, :4]).last_hidden_state
    return not torch.allclose(padded, alone, rtol=0, atol=1e-3 * float(alone.abs().max()))


def unread(encoder: Any, layers: Sequence[int]) -> list[nn.Parameter]:
    """The weights that `layers` do not depend on: of layers above, a final norm, or of no use without a task.

    Found by following the gradient, so that layers which share their weights (ALBERT) are never among them. A
    pooler is none, which reads the first token, nor are experts that no token of the tried sentence reaches.
    """
    batch = few(encoder, ordinary(encoder) * (FEW // 2))
    with still(encoder), torch.enable_grad():
        read, every = behind(encoder(batch, layers)), behind(encoder(batch, [-1]))
    return [
        weight
        for name, weight in encoder.named_parameters()
        if weight not in read and (weight in every or not ("pooler" in name or "expert" in name))
    ]


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
    """The names of the outermost submodules whose weights are all frozen."""
    weights = list(module.parameters())
    if weights and not any(weight.requires_grad for weight in weights):
        yield name
    else:
        for part, inside in module.named_children():
            yield from frozen(inside, f"{name}.{part}".lstrip("."))


def ordinary(encoder: Any) -> list[int]:
    """Two token ids of the encoder's vocabulary, not of special tokens if there are others."""
    special = encoder.tokenizer.all_special_ids
    every = range(len(encoder.backbone.get_input_embeddings().weight))
    return list(islice(chain((i for i in every if i not in special), special), 2))


def few(encoder: Any, row: Sequence[int]) -> Ragged:
    """A batch of one sentence, on the encoder's device and cut to its length limit."""
    return ragged([row[: encoder.max_length]]).to(next(encoder.parameters()).device)


@contextmanager
def still(encoder: nn.Module) -> Iterator[None]:
    """A context in which the encoder is in eval mode."""
    was_training = encoder.training
    encoder.eval()
    try:
        yield
    finally:
        encoder.train(was_training)


NAME = "whitenedcse"  # of our attention, in Transformers' register
LOCK = Lock()  # held while an encoder has an attention that another thread must not take for its own
KINDS = ("albert", "distilbert", "electra", "ernie", "eurobert", "modernbert", "nomic_bert")

known = False
with suppress(ImportError):  # since Transformers 4.53
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    known = True


def fits(backbone: Any) -> bool:
    """Whether this backbone can compute without padding by `hidden`."""
    return (
        known
        and backbone.config.model_type in KINDS
        and type(backbone).__module__.startswith("transformers.models.")
        and getattr(backbone, "_supports_attention_backend", False)
        and "position_ids" in inspect.signature(backbone.forward).parameters
    )


def possible(backbone: Any, longest: int) -> bool:
    """Whether `hidden` gives the same as padded batches, for sentences of up to `longest` tokens.

    Every token must lie within the window of layers that have one, and gradient checkpointing must be off: it
    would compute layers again after the encoder's own attention function was restored.
    """
    window = getattr(backbone.config, "sliding_window", None)
    again = backbone.training and any(getattr(m, "gradient_checkpointing", False) for m in backbone.modules())
    return not again and (window is None or longest <= window + 1)


def undisturbed(backbone: Any) -> AbstractContextManager[Any]:
    """A context in which no other thread exchanges the attention function of a backbone."""
    return LOCK if fits(backbone) else nullcontext()


def hidden(backbone: Any, batch: Ragged, layers: Sequence[int], *, first: bool) -> Tensor:
    """The hidden states of the layers asked for, computed without padding; layer 0 is the embeddings.

    n sentences -> (k, t, d), or with `first` those of first tokens only, (k, n, d).
    """
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
    states = [out.hidden_states[layer] if every else out.last_hidden_state for layer in layers]
    return torch.stack([x[0, batch.offsets[:-1]] if first else x[0] for x in states])


def attend(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: None, *, ragged: Ragged, **settings: Any
) -> tuple[Tensor, None]:
    """The attention function registered with Transformers: each sentence attends to itself alone.

    q: (1, h, t, d / h) -> (1, t, h, d / h). Keys and values may have fewer heads, each for several queries.
    """
    h = q.shape[1]
    k, v = (x if x.shape[1] == h else x.repeat_interleave(h // x.shape[1], dim=1) for x in (k, v))
    by_token = (x[0].transpose(0, 1).flatten(1).contiguous() for x in (q, k, v))
    x = jagged_attention(*by_token, heads=h, p=settings.get("dropout", 0.0), batch=ragged)
    return x.unflatten(-1, (h, -1)).unsqueeze(0), None


if known:
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, lambda *_, **__: None)

"""A training step and `encode` on a device that is not the CPU: all is there, and the host waits for none.

The device is PyTorch's "meta", whose tensors have shapes and no numbers: whatever reads one raises.
"""

import pytest
import torch
from encoders import SENTENCES, whitening
from lightning.fabric.utilities.apply_func import move_data_to_device
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from whitenedcse.data.datamodule import Batch
from whitenedcse.data.tokens import token_ids
from whitenedcse.model import attention, head, packed
from whitenedcse.model.embedder import Embedder
from whitenedcse.model.head import Pooling, ProjectionHead
from whitenedcse.ragged import concatenate, offsets, ragged
from whitenedcse.training.loss import ContrastiveLoss
from whitenedcse.training.module import ContrastiveTraining
from whitenedcse.training.terms import MaskedLanguageModel

META = torch.device("meta")
COPIES = ("aten::_to_copy", "aten::copy_")


class Strict(TorchDispatchMode):
    """Refuses operations on tensors of two devices, and notes copies that the host waits for."""

    def __init__(self):
        super().__init__()
        self.waited = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, function._schema.name
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor) and x.ndim]
        if name not in COPIES and len(devices := {x.device.type for x in given}) > 1:
            raise RuntimeError(f"{name} of tensors on {sorted(devices)}")
        made = function(*args, **kwargs)
        if name in COPIES:
            source = args[1] if name == "aten::copy_" else args[0]
            asked = kwargs.get("non_blocking", len(args) > 2 and args[2])
            if source.device != made.device and not asked:
                self.waited.append(f"{tuple(source.shape)} {source.device} -> {made.device}")
        elif name == "aten::lift_fresh" and made.device == META:  # torch.tensor(numbers, device=...)
            self.waited.append(f"{tuple(made.shape)} numbers -> {made.device}")
        return made


@pytest.fixture
def strict(monkeypatch):
    """Attention is that of CUDA: its kernels tell the shapes of what they would give."""

    def noted(q, k, v, *, heads, p, bounds):
        assert q.device == k.device == v.device == bounds.tokens.device == bounds.firsts.device == META
        mode.attended.append(p)
        mode.bounds.add((id(bounds.tokens), bounds.tokens.dtype, bounds.firsts.dtype))
        return attention.unpadded_attention(q, k, v, heads=heads, p=p, bounds=bounds)

    monkeypatch.setattr(packed, "unpadded_attention", noted)
    monkeypatch.setattr(
        "whitenedcse.model.encoder.way",
        lambda device, *more: attention.way("cuda" if device == "meta" else device, *more),
    )
    for name in ("_ignore_bidirectional_mask_sdpa", "_ignore_padding_mask_sdpa"):
        # Transformers looks whether the mask of a padded batch is full, once a pass
        monkeypatch.setattr(f"transformers.masking_utils.{name}", lambda *_, **__: False, raising=False)
    mode = Strict()
    mode.attended, mode.bounds = [], set()
    return mode


HEADS = {
    "pairs": whitening(),
    "pairs, full gradient": whitening(gradient="full"),
    "groups": whitening(group_width=4),
    "zca": whitening(kind="zca", group_width=None),
    "pca": whitening(kind="pca", group_width=None),
    "official": whitening(partition="official_slice"),
    "dense": None,
}


def module_of(encoder, *, kind="cls", head="pairs", layers=(-1,), mlm=False, chunk=None, **loss):
    head = ProjectionHead(encoder.width, whitening=HEADS[head])
    mlm = MaskedLanguageModel(encoder=encoder, weight=0.1, probability=0.15) if mlm else None
    embedder = Embedder(encoder=encoder, pooling=Pooling(kind, layers), head=head)
    loss = ContrastiveLoss(**loss)
    return ContrastiveTraining(embedder=embedder, loss=loss, views=2, mlm=mlm, seed=0, chunk=chunk)


STEPS = [{"kind": kind} for kind in ("cls", "mean", "max", "last", "pooler")]
STEPS += [{"head": head} for head in HEADS] + [{"chunk": 3}, {"mlm": True}, {"hard": True}]
STEPS += [{"layers": [0, 1, -1], "kind": "mean"}, {"denominator": "symmetric", "form": "l2"}]
STEPS += [{"hard": True, "hard_negative_log_weight": 0.5, "chunk": 5}]


@pytest.mark.parametrize("number", range(len(STEPS)))
@pytest.mark.slow(but=4)
def test_a_training_step(number, bert, strict):
    settings, bert.batches = dict(STEPS[number]), ("packed", "padded")[number % 2]
    sentences = ragged(token_ids(SENTENCES, bert.tokenizer, 32))
    hard = sentences if settings.pop("hard", False) else None
    module = module_of(bert, **settings).to(META)
    module.log = module.log_dict = lambda *_, **__: None
    with strict:
        positives = concatenate([sentences] * 2).to(META)
        loss = module.training_step(Batch(positives, hard and hard.to(META), len(SENTENCES)), 0)
        loss.backward()
    assert strict.waited == []
    assert loss.device == META and loss.shape == () and loss.dtype == torch.float32
    grads = [p.grad for p in module.parameters() if p.grad is not None]
    assert len(grads) > 20 and {g.device for g in grads} == {META}
    if settings.keys() <= {"kind", "head"}:
        packed = bert.batches == "packed"
        assert strict.attended == [0.1] * (3 * packed)
        assert [kinds for _, *kinds in strict.bounds] == [[torch.int32] * 2] * packed  # once a batch


@pytest.mark.parametrize(
    ("kind", "embedding", "batches"),
    [("cls", "head", "packed"), ("mean", "encoder", "padded"), ("max", "dense", "packed")],
)
def test_encode(kind, embedding, batches, bert, strict, monkeypatch):
    bert.batches, seen = batches, []
    embedder = module_of(bert, kind=kind).embedder
    embedder.embedding = embedding
    embedder.to(META)

    def arrived(x):
        assert x.device == META
        seen.append(tuple(x.shape))
        return torch.zeros(x.shape)

    monkeypatch.setattr(torch.Tensor, "cpu", arrived)
    with strict:
        x = embedder.encode(SENTENCES)
    assert x.shape == (8, 16) and seen == [(8, 16)] and strict.waited == []


def test_a_copy_that_the_host_waits_for_is_found_and_a_batch_is_moved_without(strict):
    rows = ragged([[1, 2], [3]])
    with strict:
        torch.ones(2).to(META)
    assert len(strict.waited) == 1
    strict.waited.clear()
    with strict:
        there = move_data_to_device(Batch(rows, rows, 2), META)  # as Lightning does
    assert there.positives.ids.device == there.negatives.offsets.device == META
    assert there.positives.longest == 2
    assert strict.waited == []


def test_a_cpu_waits_for_what_arrives(monkeypatch):
    asked = []
    noted = lambda x, where, non_blocking=None: asked.append(non_blocking) or x  # noqa: E731
    monkeypatch.setattr(torch.Tensor, "to", noted)
    for device in ("cpu", "mps", "cuda"):
        ragged([[1]]).to(torch.device(device))
    assert asked == [False] * 4 + [True] * 2


def test_attention_is_computed_as_the_device_allows(bert, strict, monkeypatch):
    monkeypatch.setattr("whitenedcse.model.encoder.way", attention.way)
    for device, width, expected in (
        ("cpu", 26, "tiles"), ("cuda", 64, "unpadded"), ("cuda", 26, "padded"), ("cuda", 512, "padded"),
        ("mps", 64, "padded"),
    ):  # fmt: skip
        assert attention.way(device, width, torch.bfloat16) == expected
        assert attention.way(device, width, torch.float64) == expected.replace("unpadded", "padded")
        bert.width, bert.batches = 2 * width, "packed"
        assert bert.attention(torch.device(device)) == expected
        bert.batches = "padded"
        assert bert.attention(torch.device(device)) == "padded"


@pytest.mark.parametrize("kind", ["mean", "max"])
def test_pooling_on_an_apple_gpu_is_that_of_all_others(kind):
    hidden = torch.randn(2, 8, 5, dtype=torch.float64, requires_grad=True)
    bounds = offsets([3, 1, 4])
    ours, theirs = head.scattered(kind, hidden, bounds), head.pooled(kind, hidden, bounds)
    torch.testing.assert_close(ours, theirs, atol=1e-15, rtol=1e-15)
    grads = [torch.autograd.grad((x * x.detach().cos()).sum(), hidden)[0] for x in (ours, theirs)]
    torch.testing.assert_close(*grads, atol=1e-15, rtol=1e-14)

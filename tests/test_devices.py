"""A training step and `encode` on a device that is not the CPU: all is there, and the host waits for none.

The device is PyTorch's "meta", whose tensors have shapes and no numbers: whatever reads one raises.
"""

import pytest
import torch
from encoders import SENTENCES, whitening
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from whitenedcse.data.datamodule import Batch
from whitenedcse.data.tokens import token_ids
from whitenedcse.model import attention, head, packed
from whitenedcse.model.embedder import Embedder
from whitenedcse.model.head import Pooling, ProjectionHead
from whitenedcse.ragged import Ragged, concatenate, offsets, ragged
from whitenedcse.training import parallel
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
        lambda device, width: attention.way("cuda" if device == "meta" else device, width),
    )
    for name in ("_ignore_bidirectional_mask_sdpa", "_ignore_padding_mask_sdpa"):
        # Transformers looks whether the mask of a padded batch is full: test_no_waiting.py counts that
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
    settings = {"form": "l1", "temperature": 0.05, "weights": [1.0], "denominator": "view"}
    settings |= {"hard_negative_log_weight": 0.0}
    return ContrastiveTraining(
        embedder=Embedder(
            encoder=encoder,
            pooling=Pooling(kind=kind, layers=layers),
            head=ProjectionHead(width=encoder.width, whitening=HEADS[head], dense=True, position="before"),
            embedding="encoder",
        ),
        loss=ContrastiveLoss(**(settings | loss)),
        optimizer=None,
        views=2,
        mlm=MaskedLanguageModel(encoder=encoder, weight=0.1, probability=0.15) if mlm else None,
        seed=0,
        gather=True,
        chunk=chunk,
    )


def stepped(strict, module, *, hard=False):
    """A training step there; the gradients that it left."""
    sentences = ragged(token_ids(SENTENCES, module.embedder.encoder.tokenizer, 32))
    batch = Batch(concatenate([sentences] * 2), sentences if hard else None, len(SENTENCES))
    module.log = module.log_dict = lambda *_, **__: None
    module.to(META)
    with strict:
        batch = Batch(*(x.to(META) if isinstance(x, Ragged) else x for x in batch))
        loss = module.training_step(batch, 0)
        loss.backward()
    assert loss.device == META and loss.shape == () and loss.dtype == torch.float32
    grads = [p.grad for p in module.parameters() if p.grad is not None]
    assert len(grads) > 20 and {g.device for g in grads} == {META}
    return grads


# each pooling and each head with packed or padded batches
KINDS = [("cls", "padded"), ("mean", "packed"), ("max", "padded"), ("last", "packed"), ("pooler", "packed")]
STEPS = [(kind, "pairs", batches) for kind, batches in KINDS]
STEPS += [("cls", head, ("packed", "padded")[i % 2]) for i, head in enumerate(HEADS)]


@pytest.mark.parametrize(("kind", "head", "batches"), STEPS)
@pytest.mark.slow(but=4)
def test_a_training_step(kind, head, batches, bert, strict):
    bert.batches = batches
    stepped(strict, module_of(bert, kind=kind, head=head))
    assert strict.waited == []
    assert len(strict.attended) == (3 if batches == "packed" else 0)
    assert [kinds for _, *kinds in strict.bounds] == [[torch.int32] * 2] * (
        batches == "packed"
    )  # once a batch
    assert all(p == 0.1 for p in strict.attended)


@pytest.mark.parametrize(
    "settings",
    [
        {"chunk": 3},
        {"mlm": True},
        {"layers": [0, 1, -1], "kind": "mean"},
        {"denominator": "symmetric", "form": "l2"},
        {"hard": True},
        {"hard": True, "hard_negative_log_weight": 0.5, "chunk": 5},
    ],
    ids=str,
)
@pytest.mark.slow
def test_a_training_step_of_another_kind(settings, bert, strict):
    hard = settings.get("hard", False)
    stepped(strict, module_of(bert, **{k: v for k, v in settings.items() if k != "hard"}), hard=hard)
    assert strict.waited == []


@pytest.mark.parametrize(
    ("kind", "embedding", "batches"),
    [
        ("cls", "head", "packed"),
        ("mean", "encoder", "padded"),
        ("max", "dense", "packed"),
        ("last", "encoder", "packed"),
    ],
)
def test_encode(kind, embedding, batches, bert, strict, monkeypatch):
    bert.batches = batches
    module = module_of(bert, kind=kind)
    embedder = module.embedder
    embedder.embedding = embedding
    embedder.to(META)
    seen = []

    def arrived(x):
        assert x.device == META
        seen.append(tuple(x.shape))
        return torch.zeros(x.shape)

    monkeypatch.setattr(torch.Tensor, "cpu", arrived)
    with strict:
        x = embedder.encode(SENTENCES)
    assert x.shape == (8, 16) and seen == [(8, 16)] and strict.waited == []


def test_a_tensor_on_the_wrong_device_is_found(bert, strict, monkeypatch):
    whole = packed.embedded

    def wrong(module, layout):
        return whole(module, layout) + torch.zeros(1, 16)

    monkeypatch.setattr(packed, "embedded", wrong)
    with pytest.raises(RuntimeError, match="tensors on \\['cpu', 'meta'\\]"):
        stepped(strict, module_of(bert))


@pytest.mark.parametrize("read", [float, lambda x: x.nonzero()])
def test_a_number_that_the_host_reads_is_found(read, bert, strict, monkeypatch):
    whole = parallel.gathered

    def reading(x):
        read(x.detach().sum(-1).flatten()[0])
        return whole(x)

    monkeypatch.setattr("whitenedcse.training.module.gathered", reading)
    with pytest.raises((RuntimeError, NotImplementedError), match="meta tensor|data-independent"):
        stepped(strict, module_of(bert))


@pytest.mark.parametrize("non_blocking", [True, False, None])
def test_a_copy_that_the_host_waits_for_is_found(non_blocking, strict):
    batch = ragged([[1, 2], [3]])
    with strict:
        there = batch.to(META, non_blocking)
    assert there.ids.device == there.offsets.device == META and there.longest == 2
    assert len(strict.waited) == (2 if non_blocking is False else 0)


def test_lightning_moves_a_batch_without_waiting(strict):
    from lightning.fabric.utilities.apply_func import move_data_to_device

    rows = ragged([[1, 2], [3]])
    with strict:
        there = move_data_to_device(Batch(rows, rows, 2), META)
    assert there.positives.ids.device == there.negatives.offsets.device == META
    assert strict.waited == []


@pytest.mark.parametrize(("device", "waits"), [("cpu", True), ("mps", True), ("cuda", False)])
def test_a_cpu_waits_for_what_arrives(device, waits, monkeypatch):
    asked = []
    monkeypatch.setattr(
        torch.Tensor, "to", lambda x, where, non_blocking=None: asked.append(non_blocking) or x
    )
    ragged([[1]]).to(torch.device(device))
    assert asked == [not waits] * 2


@pytest.mark.parametrize(
    ("device", "width", "expected"),
    [
        ("cpu", 26, "tiles"),
        ("cuda", 64, "unpadded"),
        ("cuda", 26, "padded"),
        ("cuda", 512, "padded"),
        ("mps", 64, "padded"),
    ],
)
def test_attention_is_computed_as_the_device_allows(device, width, expected, bert, strict, monkeypatch):
    assert attention.way(device, width) == expected
    monkeypatch.setattr("whitenedcse.model.encoder.way", attention.way)
    bert.width = 2 * width
    assert bert.attention(torch.device(device)) == expected
    bert.batches = "padded"
    assert bert.attention(torch.device(device)) == "padded"


def test_a_width_of_a_head_that_the_kernels_do_not_take_is_padded_there(bert, strict, monkeypatch):
    monkeypatch.setattr(attention, "WIDEST", 4)
    stepped(strict, module_of(bert))
    assert strict.attended == [] and bert.batches == "packed"


@pytest.mark.parametrize("kind", ["mean", "max"])
def test_pooling_on_an_apple_gpu_is_that_of_all_others(kind):
    hidden = torch.randn(2, 8, 5, dtype=torch.float64, requires_grad=True)
    bounds = offsets([3, 1, 4])
    ours, theirs = head.scattered(kind, hidden, bounds), head.pooled(kind, hidden, bounds)
    torch.testing.assert_close(ours, theirs, atol=1e-15, rtol=1e-15)
    grads = [torch.autograd.grad((x * x.detach().cos()).sum(), hidden)[0] for x in (ours, theirs)]
    torch.testing.assert_close(*grads, atol=1e-15, rtol=1e-14)

"""Which precision is taken where."""

import pytest
import torch

from whitenedcse import compute
from whitenedcse.training.loss import ContrastiveLoss


@pytest.mark.parametrize(
    ("accelerator", "flags", "cuda", "expected"),
    [
        ("auto", "avx512_bf16", None, "32-true"),
        ("auto", "avx512_bf16 amx_bf16", None, "bf16-mixed"),
        ("cpu", "amx_bf16", True, "bf16-mixed"),
        ("cpu", "", True, "32-true"),
        ("auto", "", True, "bf16-mixed"),
        ("gpu", "amx_bf16", False, "32-true"),  # a GPU that only emulates it
        ("mps", "amx_bf16", None, "32-true"),
    ],
)
def test_bfloat16_is_chosen_where_the_hardware_multiplies_it(accelerator, flags, cuda, expected, monkeypatch):
    monkeypatch.setattr(compute, "cpu", lambda: f"flags : {flags}\n")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda is not None)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: bool(cuda))
    assert compute.quickest(accelerator) == expected


def test_tensors_by_name_are_taken_as_those_by_place():
    z, negatives = torch.randn(2, 4, 4), torch.randn(4, 4)
    loss = ContrastiveLoss()
    assert torch.equal(loss(z=z, negatives=negatives), loss(z, negatives))
    half = loss(z.bfloat16(), negatives=negatives.bfloat16())
    assert half.dtype == torch.float32 and torch.equal(half, loss(z.bfloat16(), negatives.bfloat16()))

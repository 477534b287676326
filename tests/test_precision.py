"""Which precision is taken where."""

import pytest
import torch

from whitenedcse import compute


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

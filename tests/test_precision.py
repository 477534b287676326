"""Which precision is taken where."""

import torch

from whitenedcse import compute


def test_bfloat16_is_chosen_where_the_hardware_multiplies_it(monkeypatch):
    for accelerator, flags, cuda, expected in (
        ("auto", "avx512_bf16", None, "32-true"),
        ("auto", "avx512_bf16 amx_bf16", None, "bf16-mixed"),
        ("cpu", "amx_bf16", True, "bf16-mixed"),
        ("cpu", "", True, "32-true"),
        ("auto", "", True, "bf16-mixed"),
        ("gpu", "amx_bf16", False, "32-true"),  # a GPU that only emulates it
        ("mps", "amx_bf16", None, "32-true"),
    ):
        monkeypatch.setattr(compute, "cpu", lambda flags=flags: f"flags : {flags}\n")
        monkeypatch.setattr(torch.cuda, "is_available", lambda cuda=cuda: cuda is not None)
        emulated = lambda including_emulation, cuda=cuda: bool(cuda)  # noqa: E731
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", emulated)
        assert compute.quickest(accelerator) == expected

"""The encoder of +experiment=mlm_minilm from its committed files: python -m results.claim.encoder OUT

Writes a Transformers directory OUT. mlm_minilm/ beside this file holds the weights in 8 bits, with a scale
for each row of a matrix. Runs start from what this command writes, so nothing is lost between the two.
`python -m results.claim.encoder OUT RUN/best` first makes mlm_minilm/ anew, from a run.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoTokenizer

HERE = Path(__file__).parent / "mlm_minilm"
SCALE = ".scale"


def packed(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Each matrix (n, d) as 8-bit integers and, as NAME.scale, the step (n, 1) of each row; vectors as is."""
    found = {}
    for name, w in weights.items():
        if w.ndim < 2:
            found[name] = w.contiguous()
            continue
        step = w.abs().amax(dim=1, keepdim=True).clamp(min=1e-30) / 127
        found |= {name: (w / step).round().to(torch.int8), name + SCALE: step}
    return found


def unpacked(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights of `packed` again, each within half a step."""
    return {
        name: w * found[name + SCALE] if name + SCALE in found else w
        for name, w in found.items()
        if not name.endswith(SCALE)
    }


def pack(source: str, folder: Path) -> None:
    """Write the encoder in a directory to `folder`: configuration, tokenizer, weights in 8 bits."""
    model = AutoModel.from_pretrained(source, add_pooling_layer=False).float()
    model.config.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    save_file(packed(model.state_dict()), folder / "weights.safetensors")


def unpack(folder: Path, out: str) -> None:
    """Write the encoder in `folder` as a Transformers directory."""
    model = AutoModel.from_config(AutoConfig.from_pretrained(folder), add_pooling_layer=False)
    model.load_state_dict(unpacked(load_file(folder / "weights.safetensors")))
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(folder).save_pretrained(out)


if __name__ == "__main__":
    if sys.argv[2:]:
        pack(sys.argv[2], HERE)
    unpack(HERE, sys.argv[1])

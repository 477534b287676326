"""An export for ONNX: one graph from token ids and mask to the final vector, for batches of any size.

n: texts    l: longest text    d: width of the encoder    k: of the embedding
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import linear, normalize

from whitenedcse.export.transformers import padded, pooled, write_tokenizer
from whitenedcse.model.embedder import Embedder
from whitenedcse.model.sentence_transformers import dense_modules

FILE = "model.onnx"
LARGEST = 1.9e9  # bytes of weights that one file holds; others lie beside it, in model.onnx.data
INPUTS, OUTPUT = ("input_ids", "attention_mask"), "sentence_embedding"
EXAMPLE = ["one", "and two more", "three of different lengths"]


class Graph(nn.Module):
    """An embedder by Transformers' padded forward, in eval mode: ids and mask (n, l) -> (n, k)."""

    def __init__(self, embedder: Embedder) -> None:
        super().__init__()
        self.backbone = embedder.encoder.backbone
        self.kind, self.layers = embedder.pooling.kind, embedder.pooling.layers
        self.dense = dense_modules(embedder)
        self.unit = embedder.final is not None and embedder.final.unit

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """(n, l), (n, l) -> (n, k)."""
        tokens = {"input_ids": input_ids, "attention_mask": attention_mask}
        hidden = self.backbone(**tokens, output_hidden_states=True).hidden_states
        x = pooled(self.kind, [hidden[layer] for layer in self.layers], attention_mask)
        for weight, bias, activation in self.dense:
            x = linear(x, weight, bias)
            x = torch.tanh(x) if activation == "tanh" else x
        return normalize(x, dim=-1) if self.unit else x


def refuse(embedder: Embedder) -> None:
    """Nothing: a graph holds any embedding."""


def write(embedder: Embedder, directory: Path) -> None:
    """Write the graph, and the tokenizer and the encoder's config beside it."""
    write_tokenizer(embedder, directory)
    embedder.encoder.backbone.config.save_pretrained(directory)
    graph = Graph(embedder).eval()
    example = next(padded(embedder.encoder.tokenizer, EXAMPLE))
    sizes: Any = {0: torch.export.Dim("texts"), 1: torch.export.Dim("tokens")}
    large = sum(p.numel() * p.element_size() for p in graph.parameters()) > LARGEST
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it tells of packages that it does not need
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            graph,
            tuple(example[name] for name in INPUTS),
            directory / FILE,
            input_names=INPUTS,
            output_names=[OUTPUT],
            dynamic_shapes=dict.fromkeys(INPUTS, sizes),
            dynamo=True,
            external_data=large,
            verbose=False,
        )


def quantise(directory: Path) -> None:
    """Replace the graph by one whose products have int8 weights, a scale for each 32 of them.

    Smaller, not faster: what they meet stays float32. Quantised as well, as onnxruntime's quantize_dynamic
    does it, vectors of the 6-layer minilm-mlm differed by 4e-2, and so by 4e-3.
    """
    import onnx
    from onnxruntime.quantization import matmul_nbits_quantizer as nbits

    nbits.logger.setLevel(logging.ERROR)
    how = nbits.DefaultWeightOnlyQuantConfig(block_size=32, is_symmetric=False, bits=8)
    large = sum(file.stat().st_size for file in directory.glob(f"{FILE}*")) > LARGEST
    quantizer = nbits.MatMulNBitsQuantizer(onnx.load(directory / FILE), algo_config=how)
    quantizer.process()
    for file in directory.glob(f"{FILE}*"):
        file.unlink()
    quantizer.model.save_model_to_file(str(directory / FILE), large)


def vectors(embedder: Embedder, directory: Path, texts: Sequence[str]) -> NDArray[np.float32]:
    """n texts -> (n, k), by onnxruntime and the tokenizer in the directory."""
    import onnxruntime
    from transformers import AutoTokenizer

    session = onnxruntime.InferenceSession(directory / FILE, providers=["CPUExecutionProvider"])
    batches = padded(AutoTokenizer.from_pretrained(directory), texts)
    rows = [session.run([OUTPUT], {k: v.numpy() for k, v in tokens.items()})[0] for tokens in batches]
    return np.concatenate(rows)

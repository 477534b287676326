"""What others are given: exports for Transformers, Sentence-Transformers and ONNX; files of vectors.

n: texts    l: longest text    d: width    k: layers pooled

For Transformers: encoder and tokenizer, which its user pools as the card says. For Sentence-Transformers: its
own modules from text to vector. For ONNX: one graph from token ids and mask to vector, for any batch size.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import linear, normalize

from whitenedcse.model import sentence_transformers
from whitenedcse.model.checkpoint import seen
from whitenedcse.model.embedder import Embedder
from whitenedcse.run import changed

BATCH = 16  # texts that are padded together
PLAIN = (
    "a plain Transformers directory holds the encoder alone, not the head or whitening that follow it; use "
    "--to sentence-transformers or --to onnx"
)


def refuse_transformers(embedder: Embedder) -> None:
    """Raise ValueError if the embedding has steps other than pooling and unit length."""
    maps = len(sentence_transformers.dense_modules(embedder)) - (embedder.pooling.kind == "pooler")
    if maps:
        raise ValueError(PLAIN)


def write_transformers(embedder: Embedder, directory: Path) -> None:
    """Write weights as safetensors, config and tokenizer."""
    embedder.encoder.backbone.save_pretrained(directory)
    write_tokenizer(embedder, directory)


def write_tokenizer(embedder: Embedder, directory: Path) -> None:
    """Write the tokenizer, with truncation to the embedder's length."""
    tokenizer = copy.deepcopy(embedder.encoder.tokenizer)
    tokenizer.model_max_length = embedder.max_length
    tokenizer.save_pretrained(directory)


@torch.no_grad()
def transformers_vectors(embedder: Embedder, directory: Path, texts: Sequence[str]) -> NDArray[np.float32]:
    """The vectors (n, d) of n texts, by Transformers from the directory, pooled as the embedder is."""
    from transformers import AutoModel, AutoTokenizer

    model = AutoModel.from_pretrained(directory).eval()
    pooling = embedder.pooling
    rows = []
    for tokens in padded(AutoTokenizer.from_pretrained(directory), prompted(embedder, texts)):
        out = model(**tokens, output_hidden_states=True)
        hidden = [out.hidden_states[layer] for layer in pooling.layers]
        pooler = pooling.kind == "pooler"
        x = out.pooler_output if pooler else pooled(pooling.kind, hidden, tokens["attention_mask"])
        rows.append(normalize(x, dim=-1) if embedder.unit else x)
    return torch.cat(rows).numpy()


def prompted(embedder: Embedder, texts: Sequence[str]) -> list[str]:
    """The texts with the embedder's prompt before each, as a user of a bare encoder has to write them."""
    return [embedder.prompt + text for text in texts]


def padded(tokenizer: Callable[..., Any], texts: Sequence[str]) -> Iterator[dict[str, Tensor]]:
    """Token ids and mask (n, l) for 16 texts at a time, in order, truncated as the tokenizer says."""
    for start in range(0, len(texts), BATCH):
        batch = list(texts[start : start + BATCH])
        tokens = tokenizer(batch, padding=True, truncation=True, return_tensors="pt")
        yield {name: tokens[name] for name in ("input_ids", "attention_mask")}


def pooled(kind: str, hidden: Sequence[Tensor], mask: Tensor) -> Tensor:
    """Pooling of a padded batch as `Pooling` does it: k times (n, l, d), mask (n, l) -> (n, d)."""
    x = torch.stack(list(hidden))
    real = mask.unsqueeze(-1)
    if kind == "mean":
        return ((x * real).sum(-2) / real.sum(-2)).mean(0)
    if kind == "max":
        return x.masked_fill(real == 0, -torch.inf).amax(-2).mean(0)
    if kind == "last":
        ends = mask.sum(-1, keepdim=True).unsqueeze(-1) - 1  # padding is on the right
        return x.gather(-2, ends.expand_as(x[..., :1, :])).squeeze(-2).mean(0)
    return x[:, :, 0].mean(0)


def refuse_sentence_transformers(embedder: Embedder) -> None:
    """Raise ValueError for an embedding that the library's modules cannot express."""
    if not sentence_transformers.expressible(embedder.pooling):
        raise ValueError(
            f"Sentence-Transformers has no modules for pooling {embedder.pooling}: it takes the maximum of "
            "the layers' average, not the average of their maxima; use --to onnx"
        )


def write_sentence_transformers(embedder: Embedder, directory: Path) -> None:
    """Write a Transformers directory with the modules of Sentence-Transformers beside it."""
    write_transformers(embedder, directory)
    sentence_transformers.write(embedder, directory)


def sentence_transformers_vectors(
    embedder: Embedder, directory: Path, texts: Sequence[str]
) -> NDArray[np.float32]:
    """The vectors (n, k) of n texts, by Sentence-Transformers from the directory."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(directory), device="cpu")
    return np.asarray(model.encode(list(texts), batch_size=16, show_progress_bar=False))


FILE = "model.onnx"
LARGEST = 1.9e9  # bytes of weights that one file holds; others lie beside it, in model.onnx.data
INPUTS, OUTPUT = ("input_ids", "attention_mask"), "sentence_embedding"
EXAMPLE = ["one", "and two more", "three of different lengths"]


class Graph(nn.Module):
    """An embedder in eval mode with Transformers' padded forward: ids and mask (n, l) -> (n, k)."""

    def __init__(self, embedder: Embedder) -> None:
        super().__init__()
        self.backbone = embedder.encoder.backbone
        self.kind, self.layers = embedder.pooling.kind, embedder.pooling.layers
        self.dense = sentence_transformers.dense_modules(embedder)
        self.unit = embedder.unit

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """The embeddings (n, k) of token ids (n, l) and mask (n, l)."""
        tokens = {"input_ids": input_ids, "attention_mask": attention_mask}
        hidden = self.backbone(**tokens, output_hidden_states=True).hidden_states
        x = pooled(self.kind, [hidden[layer] for layer in self.layers], attention_mask)
        for weight, bias, activation in self.dense:
            x = linear(x, weight, bias)
            x = torch.tanh(x) if activation == "tanh" else x
        return normalize(x, dim=-1) if self.unit else x


def refuse_onnx(embedder: Embedder) -> None:
    """Do nothing: a graph can express any embedding."""


def write_onnx(embedder: Embedder, directory: Path) -> None:
    """Write the graph, with the tokenizer and the encoder's config beside it."""
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
    """Replace the graph by one whose products have int8 weights, with a scale for each 32 of them.

    It is smaller, not faster, as activations stay float32. With activations quantised too, as onnxruntime's
    quantize_dynamic does, vectors of the 6-layer minilm-mlm differed by 4e-2, and without by 4e-3.
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


def onnx_vectors(embedder: Embedder, directory: Path, texts: Sequence[str]) -> NDArray[np.float32]:
    """The vectors (n, k) of n texts, by onnxruntime and the tokenizer in the directory."""
    import onnxruntime
    from transformers import AutoTokenizer

    session = onnxruntime.InferenceSession(directory / FILE, providers=["CPUExecutionProvider"])
    batches = padded(AutoTokenizer.from_pretrained(directory), prompted(embedder, texts))
    rows = [session.run([OUTPUT], {k: v.numpy() for k, v in tokens.items()})[0] for tokens in batches]
    return np.concatenate(rows)


class Layout(NamedTuple):
    """The functions of an export format: `refuse` raises ValueError for an embedder it cannot express.

    `write` writes the files, and `vectors` returns (n, k) as a user of the library gets them from the files.
    """

    refuse: Callable[[Embedder], None]
    write: Callable[[Embedder, Path], None]
    vectors: Callable[[Embedder, Path, Sequence[str]], NDArray[np.float32]]


LAYOUTS = {
    "transformers": Layout(refuse_transformers, write_transformers, transformers_vectors),
    "sentence-transformers": Layout(
        refuse_sentence_transformers, write_sentence_transformers, sentence_transformers_vectors
    ),
    "onnx": Layout(refuse_onnx, write_onnx, onnx_vectors),
}


# the manifest of a directory of encoded vectors: which job fills it, and which files it will hold
FORMS, DTYPES = ("npy", "parquet"), ("float32", "float16")
FREE = ("source", "embedding", "input", "threads")  # may be another when a job resumes
OTHER = {
    "fingerprint": "the input is another, or has changed",
    "embedder": "the encoder, its pooling, its final transform, a prompt, or the kind of device is another",
}


class Form(NamedTuple):
    """How vectors are written: the file format, the type of a number, and the rows per file."""

    to: str = "npy"
    dtype: str = "float32"
    shard: int = 20_000


@dataclass(frozen=True)
class Manifest:
    """The description of the files, as plain JSON, written before the first of them.

    embedding: settings of the embedder, for a reader. embedder: a digest of all that decides a vector.
    fingerprint: of the input. threads: per process; another number may change the last bits.
    """

    source: str
    embedding: dict[str, Any]
    embedder: str
    bf16: bool
    input: str
    columns: list[str]
    fingerprint: str
    rows: int
    width: int
    to: str
    dtype: str
    shard: int
    threads: int

    def __post_init__(self) -> None:
        for name, value, known in (("to", self.to, FORMS), ("dtype", self.dtype, DTYPES)):
            if value not in known:
                raise ValueError(f"{name}={value!r} is not one of {', '.join(known)}")
        for name in ("rows", "width", "shard", "threads"):
            if not (isinstance(value := getattr(self, name), int) and value > 0):
                raise ValueError(f"{name}={value!r} must be 1 or more")

    @property
    def shards(self) -> int:
        """The number of files."""
        return -(-self.rows // self.shard)

    def count(self, number: int) -> int:
        """The number of rows of a file: `shard`, or fewer for the last."""
        return min(self.shard, self.rows - number * self.shard)

    def name(self, number: int) -> str:
        """The name of a file."""
        return f"shard-{number:05}.{self.to}"


def refuse_other(out: Path, then: Manifest, now: dict[str, Any]) -> None:
    """Raise ValueError if the job that was started here is another one."""
    for name, value in (old := asdict(then)).items():
        if name in now and name not in FREE and value != now[name]:
            why = OTHER.get(name, f"{name} was {value!r} and is now {now[name]!r}")
            if name == "embedder":
                was, is_ = ({"model": job["source"]} | seen(job["embedding"]) for job in (old, old | now))
                why = changed(was, is_) or why
            raise ValueError(f"{out} holds another job: {why}; repeat its command, or name a new directory")

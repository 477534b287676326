"""Text to vectors, against Sentence-Transformers: python -m bench.encode [MODEL] [--quick] [--json FILE]

Sentences drawn from the Wikipedia corpus under WHITENEDCSE_DATA. Both sides tokenise, cut at 128 tokens and
pool as the checkpoint says, or by the mean of the last layer. Theirs takes its default batches of 32, sorted
by characters. The vectors are compared before anything is timed. MODEL: a directory that both libraries
read; without one, models/minilm-mlm beside the data.

--onnx: also onnxruntime on our export, float32 and with int8 weights (quantize_dynamic), in batches of 32
sorted by length, with the same tokenizer; cosines to the float32 vectors beside.

--processes 2: instead, the wall time of `whitenedcse encode` from start to end, by one process and by two of
one thread each: its own, torchrun's, and Ray's where that is installed. The bytes are compared.
"""

from __future__ import annotations

import argparse
import bz2
import copy
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import modules

from bench import measure
from bench.measure import Variant
from whitenedcse.data.sources import present, roots
from whitenedcse.files import checksum
from whitenedcse.model.embedder import Embedder
from whitenedcse.model.head import Pooling
from whitenedcse.serving.export import export

MAX_LENGTH = 128
MODELS = roots()[0].parent / "models"  # beside the data
PEERS = {
    "ours fp32": "theirs fp32",
    "ours bf16": "theirs bf16 autocast",
    "theirs bf16 weights": "theirs fp32",
    "onnx fp32": "ours fp32",
    "onnx int8": "ours fp32",
}

Encode = Callable[[list[str]], NDArray[Any]]


def main() -> None:
    """One table."""
    parser = measure.parser(__doc__)
    parser.add_argument("--sentences", type=int, help="how many (default: 50,000; quick: 1,000)")
    parser.add_argument("--processes", type=int, metavar="P", help="compare one process with so many")
    parser.add_argument("--onnx", action="store_true", help="also onnxruntime, float32 and int8")
    parser.add_argument("--no-bf16", action="store_true", help="float32 alone, for a CPU without bf16")
    options = parsed(parser)
    count = options.sentences or (1_000 if options.quick else 50_000)
    here = measure.begin(options)
    if options.processes:
        measure.end(options, here, [together(options, wikipedia(count))])
        return
    ours, theirs = opened(options.model)
    sentences = wikipedia(count)
    encoders = variants(ours, theirs)
    if options.no_bf16:
        encoders = {name: run for name, run in encoders.items() if "bf16" not in name}
    if options.onnx:
        encoders |= graphs(ours, options.threads)
    facts, batches = agreement(encoders, sentences[:500]), counted(theirs)
    timed = {name: Variant(lambda run=run: run(sentences), PEERS.get(name)) for name, run in encoders.items()}
    times = measure.interleaved(
        timed, options.rounds or (1 if options.quick else 5), options.threads, warm=False
    )
    number, real, padded = np.sum(batches, axis=0)
    facts |= {"mean_tokens": real / number, "peer_padding": padded / real}
    print(
        f"\n{real / number:.1f} tokens a sentence; their batches hold {padded / real:.3f}x that with padding"
    )
    result = measure.table(f"{count:,} sentences of Wikipedia, from text to vectors", timed, times)
    measure.end(options, here, [result | facts])


def together(options: argparse.Namespace, sentences: list[str]) -> dict[str, Any]:
    """The table of one process and of several, each of one thread."""
    count, one = options.processes, [sys.executable, "-m", "whitenedcse.app.cli"]
    several = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    ways = {"1 process": (one, [], 1), f"{count} processes": (one, ["--processes", str(count)], count)}
    ways["torchrun"] = ([*several, *one[1:]], [], 1)
    if find_spec("ray"):
        ways["ray"] = (one, ["--processes", str(count), "--engine", "ray"], 1)
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "corpus.txt"
        corpus.write_text("".join(f"{sentence}\n" for sentence in sentences), encoding="utf-8")
        words = [
            "encode",
            options.model,
            str(corpus),
            "OUT",
            "--shard",
            str(-(-len(sentences) // (16 * count))),
        ]
        words += ["--pooling", "mean"] if plain(options.model) else []

        def run(name: str) -> None:
            program, more, threads = ways[name]
            out = Path(folder) / name
            shutil.rmtree(out, ignore_errors=True)
            command = [*program, *(str(out) if word == "OUT" else word for word in words), *more]
            env = os.environ | {"OMP_NUM_THREADS": str(threads)}
            subprocess.run(command, env=env, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

        timed = {name: Variant(partial(run, name), "1 process") for name in ways}
        times = measure.interleaved(timed, options.rounds or (1 if options.quick else 5), count, warm=False)
        shards = {name: [checksum(f) for f in sorted((Path(folder) / name).glob("shard-*"))] for name in ways}
        if others := [name for name in ways if shards[name] != shards["1 process"]]:
            raise SystemExit(f"not the same bytes: {others}")
        return measure.table(f"{len(sentences):,} sentences, whitenedcse encode as a whole", timed, times)


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The options, among them `model`: a directory, by default the encoder that lies beside the data."""
    parser.add_argument("model", nargs="?", help="a directory; by default models/minilm-mlm beside the data")
    options = parser.parse_args()
    options.model = options.model or str(MODELS / "minilm-mlm")
    if not Path(options.model).is_dir():
        parser.error(f"no model in {options.model}; pass the directory of one")
    return options


def plain(model: str) -> bool:
    """Whether a checkpoint says nothing of its pooling."""
    return not any((Path(model) / name).exists() for name in ("modules.json", "whitenedcse.json", "best"))


def embedder(model: str) -> Embedder:
    """Ours, a plain encoder with the mean of its last layer."""
    ours = Embedder.load(model, Pooling(kind="mean", layers=[-1]) if plain(model) else None).eval()
    ours.max_length = min(ours.max_length, MAX_LENGTH)
    return ours


def opened(model: str) -> tuple[Embedder, SentenceTransformer]:
    """Both sides, with the same pooling and the same limit."""
    ours = embedder(model)
    if plain(model):
        transformer = modules.Transformer(model)
        parts = [transformer, modules.Pooling(ours.encoder.width, pooling_mode="mean")]
        theirs = SentenceTransformer(modules=parts, device="cpu")
    else:
        best = Path(model) / "best"
        theirs = SentenceTransformer(str(best if best.is_dir() else model), device="cpu")
    theirs.max_seq_length = ours.max_length
    return ours, theirs


def corpus() -> Path:
    """The file of Wikipedia sentences."""
    found = [path for name in ("wiki1m_like", "wiki1m") if (path := present(name, roots()))]
    if not found:
        raise SystemExit(
            "no wiki1m_like or wiki1m: whitenedcse data fetch wiki1m brings it; or set"
            " WHITENEDCSE_DATA to a folder that holds it"
        )
    return found[0]


def wikipedia(n: int) -> list[str]:
    """n sentences drawn from the first 10 n lines of the corpus."""
    file = corpus()
    opener = bz2.open if file.suffix == ".bz2" else open
    with opener(file, "rt", encoding="utf-8") as lines:
        some = [line.strip() for line in islice(lines, 10 * n)]
    return random.Random(0).sample(some, min(n, len(some)))


def variants(ours: Embedder, theirs: SentenceTransformer) -> dict[str, Encode]:
    """Each way from texts to vectors."""
    half = copy.deepcopy(theirs).bfloat16()

    def autocast(texts: list[str]) -> NDArray[Any]:
        with torch.autocast("cpu", torch.bfloat16):
            return theirs.encode(texts)

    return {
        "theirs fp32": theirs.encode,
        "theirs bf16 autocast": autocast,
        "theirs bf16 weights": half.encode,
        "ours fp32": ours.encode,
        "ours bf16": lambda texts: ours.encode(texts, bf16=True),
    }


def graphs(ours: Embedder, threads: int) -> dict[str, Encode]:
    """onnxruntime on our export, whole and with weights of eight bits."""
    import onnxruntime
    from onnxruntime.quantization import quantize_dynamic

    tokenizer, settings = ours.encoder.tokenizer, onnxruntime.SessionOptions()
    settings.intra_op_num_threads = threads
    with tempfile.TemporaryDirectory() as folder:
        whole, small = Path(folder) / "onnx/model.onnx", Path(folder) / "int8.onnx"
        export(ours, whole.parent, "onnx")
        quantize_dynamic(whole, small)
        files = {"onnx fp32": whole, "onnx int8": small}
        sessions = {name: onnxruntime.InferenceSession(file, settings) for name, file in files.items()}

    def encode(session: Any, texts: list[str]) -> NDArray[Any]:
        order, found = np.argsort([-len(text) for text in texts], kind="stable"), None
        for at in np.array_split(order, range(32, len(texts), 32)):
            batch = [texts[i] for i in at]
            made = tokenizer(batch, padding=True, truncation=True, max_length=ours.max_length)
            feed = {key: np.asarray(made[key], np.int64) for key in ("input_ids", "attention_mask")}
            x = session.run(None, feed)[0]
            found = np.empty((len(texts), x.shape[1]), np.float32) if found is None else found
            found[at] = x
        return found

    return {name: partial(encode, session) for name, session in sessions.items()}


def counted(theirs: SentenceTransformer) -> list[tuple[int, int, int]]:
    """Sentences, tokens, and tokens with padding of each batch that they run from now on."""
    batches: list[tuple[int, int, int]] = []

    def count(_: Any, features: tuple[dict[str, torch.Tensor]]) -> None:
        ids, real = features[0]["input_ids"], features[0]["attention_mask"].sum()
        batches.append((len(ids), int(real), ids.numel()))

    theirs[0].register_forward_pre_hook(count)
    return batches


def agreement(encoders: Mapping[str, Encode], sentences: list[str]) -> dict[str, float]:
    """The largest difference of each variant from theirs in fp32; ends here if ours in fp32 is another."""
    x = {name: np.asarray(encode(sentences), np.float32) for name, encode in encoders.items()}
    truth = x.pop("theirs fp32")
    far = {f"largest difference of {name}": float(np.abs(y - truth).max()) for name, y in x.items()}
    unit = truth / np.linalg.norm(truth, axis=1, keepdims=True)
    for name, y in x.items():
        cosines = (y * unit).sum(axis=1) / np.linalg.norm(y, axis=1)
        far[f"mean cosine of {name}"] = float(cosines.mean())
    print(
        f"coordinates up to {np.abs(truth).max():.2f}; " + "; ".join(f"{k} {v:.1e}" for k, v in far.items())
    )
    if far["largest difference of ours fp32"] > 1e-4 * np.abs(truth).max():
        raise SystemExit("ours and theirs are not the same vectors: nothing to compare")
    return far


if __name__ == "__main__":
    main()

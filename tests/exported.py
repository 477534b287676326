"""The vectors that libraries give from our exports."""

import numpy as np
import pytest


def by_sentence_transformers(out, texts):
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(out), device="cpu").encode(texts)


def by_onnxruntime(out, texts, size=3):
    """In batches of a size that is not the traced one, each as long as its longest text."""
    ort = pytest.importorskip("onnxruntime")
    from transformers import AutoTokenizer

    tokenizer, session = AutoTokenizer.from_pretrained(out), ort.InferenceSession(out / "model.onnx")
    rows = []
    for start in range(0, len(texts), size):
        tokens = tokenizer(texts[start : start + size], padding=True, truncation=True, return_tensors="np")
        rows.append(session.run(None, {name: tokens[name] for name in ("input_ids", "attention_mask")})[0])
    return np.concatenate(rows)

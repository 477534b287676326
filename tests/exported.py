"""The vectors that libraries give from our exports."""

import numpy as np
import pytest


def by_sentence_transformers(out, texts):
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(out), device="cpu").encode(texts)


def by_transformers(out, texts, kind, layers=(-1,)):
    """One text at a time, without padding."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    model, tokenizer = AutoModel.from_pretrained(out).eval(), AutoTokenizer.from_pretrained(out)
    reduced = {"cls": lambda x: x[0], "mean": lambda x: x.mean(0), "max": lambda x: x.amax(0)}[kind]
    rows = []
    for text in texts:
        tokens = tokenizer(text, truncation=True, return_tensors="pt", return_token_type_ids=False)
        with torch.no_grad():
            hidden = model(**tokens, output_hidden_states=True).hidden_states
        rows.append(torch.stack([reduced(hidden[layer][0]) for layer in layers]).mean(0))
    return torch.stack(rows).numpy()


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

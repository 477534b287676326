"""The recipes of the docs that use another library on what we export."""

import re
from pathlib import Path

import numpy as np
import pytest
from encoders import SENTENCES

from whitenedcse.serving.export import export
from whitenedcse.serving.fit import scaled

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
DOCS = Path(__file__).parents[2] / "docs"


def recipe(page, word):
    """The block of Python on a page that has this word."""
    blocks = re.findall(r"```py\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    return next(block for block in blocks if word in block)


def test_vectors_and_graph_of_eight_bits_are_near_the_source(embedder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    embedder = scaled(embedder, unit=True)
    export(embedder, "out", "sentence-transformers")
    exec(recipe("export.md", "quantize_embeddings"), scope := {})
    assert scope["small"].dtype == np.int8 and scope["small"].shape == (2, 16)
    ort = pytest.importorskip("onnxruntime")
    export(embedder, "onnx", "onnx")
    exec(recipe("export.md", "quantize_dynamic"), {})
    tokens = embedder.encoder.tokenizer(SENTENCES, padding=True, return_tensors="np")
    feed = {name: tokens[name] for name in ("input_ids", "attention_mask")}
    found = ort.InferenceSession("onnx/model-int8.onnx").run(None, feed)[0]
    assert (found * embedder.encode(SENTENCES)).sum(1).min() > 0.9


def test_mteb_scores_an_export_as_its_cosines_do(embedder, tmp_path, monkeypatch):
    mteb = pytest.importorskip("mteb")
    from datasets import Dataset, DatasetDict
    from scipy.stats import spearmanr

    monkeypatch.chdir(tmp_path)
    left, right = SENTENCES, SENTENCES[3:] + SENTENCES[:3]
    gold = [float(i * 5 % 8) for i in range(8)]
    known = {"name": "Made", "description": "made", "type": "STS", "category": "t2t"}
    known |= {"dataset": {"path": "local", "revision": "1"}, "eval_splits": ["test"]}
    known |= {"eval_langs": ["eng-Latn"], "main_score": "cosine_spearman"}

    class Made(mteb.abstasks.AbsTaskSTS):
        metadata = mteb.TaskMetadata(**known)
        min_score, max_score = 0, 7

        def load_data(self, **_):
            columns = {"sentence1": left, "sentence2": right, "score": gold}
            self.dataset, self.data_loaded = DatasetDict({"test": Dataset.from_dict(columns)}), True

    Path("outputs/NAME").mkdir(parents=True)
    export(embedder, "outputs/NAME/best", "sentence-transformers")
    monkeypatch.setattr(mteb, "get_tasks", lambda names: [Made()])
    scores, evaluate = [], mteb.evaluate
    monkeypatch.setattr(mteb, "evaluate", lambda *a, **k: scores.append(evaluate(*a, **k)))
    exec(recipe("evaluate.md", "mteb.evaluate"), {})
    a, b = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in map(embedder.encode, (left, right)))
    found = scores[0].task_results[0].get_score()
    assert found == pytest.approx(spearmanr((a * b).sum(1), gold).statistic, abs=1e-6)

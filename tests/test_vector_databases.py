"""The recipes of docs/shipping.md: Parquet files of vectors in LanceDB and Qdrant, by their own clients."""

import os
import re
from pathlib import Path

import numpy as np
import pytest
from encoders import SENTENCES, embedder_of

from whitenedcse.data.corpus import Corpus
from whitenedcse.serving.bulk import Job, arrays, encoded
from whitenedcse.serving.layouts import Form

TEXTS = [f"{a} {b}" for a in SENTENCES for b in SENTENCES]
DOCS = (Path(__file__).parents[1] / "docs" / "shipping.md").read_text()


@pytest.mark.parametrize("package", ["lancedb", "qdrant_client"])
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the clients
def test_the_recipe_finds_the_rows_that_exact_search_does(package, bert, tmp_path, monkeypatch):
    pytest.importorskip(package)
    embedder = embedder_of(bert, kind="mean").eval()
    (tmp_path / "corpus.txt").write_text("\n".join(TEXTS) + "\n")
    form = Form("parquet", "float32", 25)  # three files
    encoded(Job(lambda: embedder, "x", Corpus(str(tmp_path / "corpus.txt")), tmp_path / "vectors", form))
    x = np.vstack(list(arrays(tmp_path / "vectors"))).astype(np.float64)
    query = embedder.encode(["bread"])[0]
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    wanted = np.sort(x @ (query / np.linalg.norm(query)))[::-1][:10]
    (recipe,) = [code for code in re.findall(r"```py\n(.*?)```", DOCS, flags=re.S) if package in code]
    monkeypatch.chdir(tmp_path)
    names = {"query": query}
    exec(compile(recipe, package, "exec"), names)
    assert len(names["rows"]) == 10 and len(os.listdir(tmp_path)) == 3
    np.testing.assert_allclose((x @ (query / np.linalg.norm(query)))[names["rows"]], wanted, atol=1e-6)

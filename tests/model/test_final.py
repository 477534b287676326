"""A final transform and unit length travel with a checkpoint, and Sentence-Transformers applies them too."""

import json

import numpy as np
import pytest
import torch
from encoders import SENTENCES, embedder_of, whitening
from numpy.testing import assert_allclose
from sentence_transformers import SentenceTransformer

from whitenedcse.model import checkpoint
from whitenedcse.model.embedder import Embedder
from whitenedcse.model.head import Final, ProjectionHead

D = 16


def numbers(*shape, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape))


def final_of(k=5, unit=True, d=D):
    weight, bias = (numbers(k, d), numbers(k, seed=1)) if k else (None, None)
    return Final(weight=weight, bias=bias, unit=unit, provenance={"fitted on": "sts"})


@pytest.mark.parametrize(("k", "unit"), [(5, True), (5, False), (None, True)])
def test_it_is_the_transform_written_out_and_then_unit_length(k, unit):
    x, final = numbers(7, D, seed=2), final_of(k, unit)
    y = x.numpy() if k is None else x.numpy() @ numbers(k, D).numpy().T + numbers(k, seed=1).numpy()
    wanted = [row / np.sqrt(sum(v * v for v in row)) for row in y] if unit else y
    assert_allclose(final(x.float()).numpy(), wanted, rtol=2e-6, atol=2e-6)
    with torch.autocast("cpu", torch.bfloat16):
        assert final(x.float()).equal(final(x.float())) and final(x.float()).dtype == torch.float32
        assert_allclose(final(x.float()).numpy(), wanted, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(
    ("embedding", "k", "unit"),
    [("encoder", 5, True), ("dense", 5, False), ("head", None, True), ("head", 5, True)],
)
def test_it_travels_with_the_checkpoint_and_sentence_transformers_knows_it(
    bert, tmp_path, embedding, k, unit
):
    head = ProjectionHead(width=D, whitening=whitening(), dense=True, position="before")
    embedder = embedder_of(bert, kind="mean", head=head, embedding=embedding)
    plain = embedder.encode(SENTENCES)
    embedder = embedder.replaced(final=final_of(k, unit))
    got = embedder.encode(SENTENCES)
    assert got.shape == (len(SENTENCES), k or D) and embedder.width == (k or D)
    assert_allclose(got, final_of(k, unit)(torch.from_numpy(plain)).numpy(), atol=2e-6)
    checkpoint.save(embedder, tmp_path / "best")
    loaded = Embedder.load(tmp_path / "best")
    assert loaded.final.provenance == {"fitted on": "sts"}
    assert np.array_equal(loaded.encode(SENTENCES), got)
    peer = SentenceTransformer(str(tmp_path / "best"), device="cpu")
    assert_allclose(peer.encode(SENTENCES), got, atol=1e-5)


def test_a_transform_of_another_width_or_a_damaged_one_is_refused(bert, tmp_path):
    plain = embedder_of(bert, kind="mean")
    with pytest.raises(ValueError, match="a transform of width 8 for an embedding of width 16"):
        plain.replaced(final=final_of(d=8))
    checkpoint.save(plain.replaced(final=final_of()), tmp_path / "best")
    (tmp_path / "best" / "digests.json").unlink()
    settings = json.loads((tmp_path / "best" / "whitenedcse.json").read_text())
    (tmp_path / "best" / "whitenedcse.json").write_text(json.dumps(settings | {"final": {"unit": True}}))
    with pytest.raises(ValueError):
        Embedder.load(tmp_path / "best")

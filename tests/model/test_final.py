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


@pytest.fixture
def theirs(bert, tmp_path):
    """Writes a model of that library from dense layers: (in, out, bias, activation), None for Normalize."""
    checkpoint.save(embedder_of(bert), tmp_path / "plain")
    for name in ("whitenedcse.json", "modules.json", "digests.json"):
        (tmp_path / "plain" / name).unlink()

    def made(*layers):
        from sentence_transformers import models  # warns of its other name in new releases

        torch.manual_seed(0)
        first = models.Transformer(str(tmp_path / "plain")), models.Pooling(D, pooling_mode="mean")
        more = [
            models.Normalize() if layer is None
            else models.Dense(layer[0], layer[1], bias=layer[2], activation_function=layer[3])
            for layer in layers
        ]  # fmt: skip
        model, out = SentenceTransformer(modules=[*first, *more], device="cpu"), tmp_path / f"{layers}"
        model.save(str(out))
        return model, out

    return made


LINE, TANH, RELU = torch.nn.Identity(), torch.nn.Tanh(), torch.nn.ReLU()


@pytest.mark.filterwarnings("ignore")  # that library's own
def test_a_chain_of_their_layers_is_read_as_it_is_and_what_would_be_wrong_is_left_to_that_library(theirs):
    for layers in (
        [(D, 9, False, LINE), (9, 4, True, LINE), None],
        [(D, D, True, TANH), (D, 9, True, LINE), (9, 4, False, LINE)],
    ):
        peer, path = theirs(*layers)
        assert_allclose(Embedder.load(path).encode(SENTENCES), peer.encode(SENTENCES), atol=1e-5)
    for layers, message in (
        (
            [(D, 9, True, RELU)],
            "is a Dense with .*ReLU; read are square tanh, linear ones, tanh",
        ),
        ([(D, D, True, LINE), (D, D, True, TANH), (D, 9, True, LINE)], "4_Dense is a Dense with .*Identity"),
        ([None, (D, 9, True, LINE)], "Normalize, Dense; supported are .* and, last, Normalize"),
    ):
        with pytest.raises(ValueError, match=message):
            Embedder.load(theirs(*layers)[1])


def test_a_transform_of_another_width_or_a_damaged_one_is_refused(bert, tmp_path):
    plain = embedder_of(bert, kind="mean")
    with pytest.raises(ValueError, match="a transform of width 8 for an embedding of width 16"):
        plain.replaced(final=final_of(d=8))
    checkpoint.save(plain.replaced(final=final_of()), tmp_path / "best")
    file = tmp_path / "best" / "final.safetensors"
    file.write_bytes(file.read_bytes()[:-8] + b"12345678")
    with pytest.raises(ValueError, match=r"final.safetensors is not as it was written"):
        Embedder.load(tmp_path / "best")
    (tmp_path / "best" / "digests.json").unlink()
    settings = json.loads((tmp_path / "best" / "whitenedcse.json").read_text())
    (tmp_path / "best" / "whitenedcse.json").write_text(json.dumps(settings | {"final": {"unit": True}}))
    with pytest.raises(ValueError):
        Embedder.load(tmp_path / "best")

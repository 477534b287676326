"""A model of any library gives the vectors that it would by itself."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from encoders import SENTENCES, embedder_of

from whitenedcse.app.evaluate import check_readable
from whitenedcse.app.evaluate import require_model as found
from whitenedcse.app.evaluate import source_of as opened
from whitenedcse.model.embedder import Embedder
from whitenedcse.model.head import Pooling, requested
from whitenedcse.model.layers import Wanted, vectors
from whitenedcse.model.sentence_transformers import ForeignModules

pytestmark = pytest.mark.usefixtures("with_bert")


@pytest.mark.parametrize("embedding", ["encoder", "dense", "head"])
def test_a_checkpoint_gives_its_own_embedding_and_any_other_pooling_of_its_encoder(bert, embedding):
    own = embedder_of(bert, kind="mean", layers=(1, -1), embedding=embedding)
    own.save("best")
    source = opened("best", None)
    wanted = Wanted([None, Pooling(kind="cls", layers=[2]), Pooling(kind="mean", layers=[-1])])
    (x, cls, mean), _ = vectors(source, SENTENCES, wanted)
    assert source.pooling == "mean over layers [1, -1]"
    assert x == pytest.approx(own.encode(SENTENCES), abs=1e-5)
    assert cls == pytest.approx(embedder_of(bert, kind="cls", layers=(2,)).encode(SENTENCES), abs=1e-5)
    assert mean == pytest.approx(embedder_of(bert, kind="mean", layers=(-1,)).encode(SENTENCES), abs=1e-5)


def test_length_extra_and_every_layer_reach_the_planes(bert):
    source = opened("bert", Pooling(kind="mean", layers=[-1]))
    wanted = Wanted([Pooling(kind="mean", layers=[1])], max_length=5, extra=0.5, every=True)
    (x,), planes = vectors(source, SENTENCES, wanted)
    assert planes.layers == (0, 1, 2, 3) and np.shape(planes.kinds["mean"])[:2] == (4, len(SENTENCES))
    short = embedder_of(bert, kind="mean", layers=(1,))
    short.max_length = 5
    assert x == pytest.approx(short.encode(SENTENCES) * 5 / 5.5, abs=1e-5)


def test_bf16_reaches_the_encoder(bert):
    source = opened("bert", Pooling(kind="mean", layers=[-1]))
    (x,), _ = vectors(source, SENTENCES, Wanted([None], bf16=True))
    own = embedder_of(bert, kind="mean", layers=(-1,))
    assert x == pytest.approx(own.encode(SENTENCES, bf16=True), abs=1e-5)
    assert np.abs(x - own.encode(SENTENCES)).mean() > 5e-6


def test_a_python_function_is_imported_from_here_and_called_once():
    Path("mine.py").write_text(
        "calls = []\ndef encode(s):\n    calls.append(s)\n    return [[len(t), 1] for t in s]\n"
    )
    found("mine:encode")
    (a, b), planes = vectors(opened("mine:encode", None), ["one", "three"], Wanted([None, None]))
    assert a.tolist() == b.tolist() == [[3, 1], [5, 1]] and planes is None
    assert sys.modules["mine"].calls == [["one", "three"]]
    with pytest.raises(ValueError, match="gives no layers, which the protocol needs"):
        vectors(opened("mine:encode", None), ["a"], Wanted([Pooling(kind="cls", layers=[1])]))
    with pytest.raises(ValueError, match="is a function, which pools itself; leave pooling="):
        opened("mine:encode", Pooling(kind="mean"))
    with pytest.raises(ValueError, match="bf16=true is for an encoder that is computed here"):
        check_readable(None, [], bf16=True)
    for name in ("mine:nothing", "no_such:encode"):
        with pytest.raises(ValueError, match=f"model={name}: .*MODULE:FUNCTION is imported from here"):
            opened(name, None)


@pytest.mark.filterwarnings("ignore")  # that library's own
def test_modules_that_only_sentence_transformers_knows_are_left_to_it(bert):
    from sentence_transformers import SentenceTransformer, models

    layers = models.Transformer("bert"), models.Pooling(bert.width, pooling_mode="mean")
    dense = models.Dense(bert.width, 5, activation_function=torch.nn.ReLU())
    SentenceTransformer(modules=[*layers, dense]).save("theirs")
    with pytest.raises(ForeignModules):
        Embedder.load("theirs")
    (x,), _ = vectors(opened("theirs", None), SENTENCES, Wanted([None]))
    assert x == pytest.approx(SentenceTransformer("theirs").encode(SENTENCES), abs=1e-6)
    assert x.shape == (len(SENTENCES), 5)


def test_a_model_of_code_of_its_own_is_said_to_be_one(bert):
    Path("bert/modules.json").write_text(
        '[{"idx": 0, "name": "0", "path": "", "type": "custom_st.Transformer"}]'
    )
    with pytest.raises(ValueError, match="^bert is Python code of its own, which is not run here"):
        opened("bert", None)


def test_what_is_missing_is_said(tmp_path):
    with pytest.raises(ValueError, match="no model: give model=DIR_OR_HUB_ID, or compare="):
        found(None)
    (tmp_path / "sweep/0/best").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match="is a sweep: name one of its runs, such as .*sweep/0"):
        found(str(tmp_path / "sweep"))
    with pytest.raises(FileNotFoundError, match="no encoder in ./gone"):
        found("./gone")


def test_a_command_line_may_ask_for_a_pooling_with_its_layers_or_others():
    """For layers alone, or for nothing, it does so in an example."""
    mean = Pooling(kind="mean", layers=[-1])
    for layers, said in ((None, [-1]), ([2], [2])):
        assert str(requested(mean, layers)) == f"mean over layers {said}"

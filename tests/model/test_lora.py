"""Low-rank adapters: peft's own forward and gradient, alone in training, and merged in whatever is saved."""

import sys
from functools import partial
from itertools import product

import pytest
import torch
from encoders import SENTENCES, architecture, embedder_of
from model.test_packed import RELATIVES, assert_transformers_own, batch
from model.test_packed import backbone as packable
from test_distributed import apart, batch_of, encoder_of, gradient, module_of, stepped
from test_scripts import TINY
from torch.testing import assert_close
from transformers import AutoModel

from whitenedcse.app import cli
from whitenedcse.model import packed
from whitenedcse.model.attention import kept, scale
from whitenedcse.model.embedder import Embedder
from whitenedcse.model.encoder import Encoder
from whitenedcse.model.lora import LoRA
from whitenedcse.serving import export
from whitenedcse.training.terms import MaskedLanguageModel


def learnt(module, scale=0.3):
    """The module with adapters as after training: the second matrix begins at zero, and hides the first."""
    torch.manual_seed(1)
    for name, weight in module.named_parameters():
        if "lora_B" in name:
            weight.data = scale * torch.randn_like(weight)
    return module


def adapted(model, **settings):
    LoRA(**{"r": 2} | settings).adapt(model)
    return learnt(model)


@pytest.mark.parametrize("kind", RELATIVES)
def test_packed_batches_are_pefts_own_forward_and_gradient(kind):
    for modules, first in product((None, ["query", "value"], ["intermediate.dense"]), (False, True)):
        model = adapted(packable(kind).train(), modules=modules, alpha=3.0)
        own = assert_transformers_own(model, batch(), [1, 3], first)
        assert all("lora_" in name and value.any() for name, value in own.items())


def test_each_layer_has_a_dropout_of_its_own(monkeypatch):
    seen = []
    true = packed.dropout
    noted = lambda x, layer, seed, **more: seen.append(str(seed)) or true(x, layer, seed, **more)  # noqa: E731
    monkeypatch.setattr(packed, "dropout", noted)
    model = adapted(packable(dropout=0.1).train(), dropout=0.5)
    packed.hidden(model, batch(), [3], first=False, seed=5)
    assert len(seen) == len(set(seen)) == 1 + 3 * (2 + 6)


def test_dropout_of_adapters_is_of_what_they_read_alone():
    model, x = adapted(packable().train(), dropout=0.4, alpha=3.0), torch.randn(7, 24, dtype=torch.double)
    layer = model.encoder.layer[0].attention.self.query
    down, up = (part["default"].weight for part in (layer.lora_A, layer.lora_B))
    read = x * kept(x.shape, 0.4, [5, 0, 0]) * scale(0.4)
    found = packed.linear(layer, x, [5, 0, 0])
    assert_close(found, layer.base_layer(x) + 1.5 * read @ down.T @ up.T, atol=1e-12, rtol=1e-12)


def test_only_adapters_and_head_train(bert):
    bert = Encoder(bert.backbone, bert.tokenizer, lora=LoRA(r=2))
    embedder = embedder_of(bert)
    trained = {name for name, weight in embedder.named_parameters() if weight.requires_grad}
    assert {name for name in trained if "lora_" not in name} == {"head.linear.weight", "head.linear.bias"}
    assert len(trained) == 2 + 2 * 6 * bert.depth and not any("pooler" in name for name in trained)
    assert len([n for n, w in embedder.named_parameters() if not w.requires_grad]) > 3 * 16


def test_rank_zero_changes_nothing(bert):
    before = [(name, weight.requires_grad) for name, weight in bert.backbone.named_parameters()]
    LoRA(r=0).adapt(bert.backbone)
    assert before == [(name, weight.requires_grad) for name, weight in bert.backbone.named_parameters()]
    embedder = embedder_of(bert)
    assert embedder.merged() is embedder


KINDS = ("albert", "distilbert", "mpnet", "electra", "modernbert", "deberta-v2", "gpt2", "llama")


@pytest.mark.filterwarnings("ignore:.*was not defined as a:UserWarning")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow(but=3)
def test_any_architecture_is_adapted_and_saved_merged_and_read_without_peft(
    kind, tokenizer, tmp_path, monkeypatch
):
    encoder = Encoder(architecture(kind, len(tokenizer)), tokenizer, lora=LoRA(r=2))
    embedder = learnt(embedder_of(encoder, kind="mean"), scale=1.0).eval()
    x = embedder.encode(SENTENCES)
    assert not torch.equal(torch.tensor(x), torch.tensor(learnt(embedder, scale=0.0).encode(SENTENCES)))
    learnt(embedder, scale=1.0)
    state = {name: value.clone() for name, value in embedder.state_dict().items()}
    embedder.save(tmp_path / "best")
    assert all(torch.equal(value, state[name]) for name, value in embedder.state_dict().items())
    assert export.export(embedder, tmp_path / "out", "transformers")["difference"] <= 1e-5
    assert "lora" not in str(AutoModel.from_pretrained(tmp_path / "out"))
    monkeypatch.setitem(sys.modules, "peft", None)
    loaded = Embedder.load(tmp_path / "best")
    assert_close(torch.tensor(loaded.encode(SENTENCES)), torch.tensor(x), atol=2e-5 * abs(x).max(), rtol=0)
    assert not any("lora" in name for name in loaded.state_dict())
    info = AutoModel.from_pretrained(tmp_path / "best", output_loading_info=True)[1]
    assert not info["unexpected_keys"]


def test_the_merged_weight_is_the_sum(bert):
    bert = Encoder(bert.backbone, bert.tokenizer, lora=LoRA(r=2, alpha=3.0))
    embedder = learnt(embedder_of(bert))
    layer = bert.backbone.encoder.layer[1].output.dense
    with torch.autocast("cpu", torch.bfloat16):  # merged in float32 all the same
        weight = embedder.merged().encoder.backbone.encoder.layer[1].output.dense.weight
    exact = layer.base_layer.weight.double() + 1.5 * (
        layer.lora_B["default"].weight.double() @ layer.lora_A["default"].weight.double()
    )
    assert_close(weight.double(), exact, atol=1e-6, rtol=0)
    shared = embedder.merged().encoder.backbone.embeddings.word_embeddings.weight
    assert shared is bert.backbone.embeddings.word_embeddings.weight  # no second copy of what is frozen


def test_without_peft_the_command_is_named(bert, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ValueError, match=r"encoder.lora.r=8 needs peft .*pip install 'whitenedcse\[lora\]'"):
        LoRA(r=8).adapt(bert.backbone)


def test_chunks_and_the_masked_term_reach_the_adapters_that_take_part_alone(tokenizer):
    outcomes, masked = [], partial(MaskedLanguageModel, weight=0.1, probability=0.3)
    for chunk, mlm in ((None, None), (5, None), (None, masked)):
        encoder = encoder_of(tokenizer)
        torch.manual_seed(2)
        LoRA(r=2).adapt(encoder.backbone)
        module = module_of(learnt(encoder), "dense", layers=(1,), chunk=chunk, mlm=mlm)
        stepped(module, batch_of(slice(0, 16), 2, False))
        assert all((p.grad is not None) == p.requires_grad for p in module.embedder.parameters())
        outcomes.append(gradient(module.embedder))
    adapters = 2 * (4 * 32 + 2 * 48)  # of one layer of three, and with a masked term of all
    assert [len(x) for x in outcomes] == [16 * 16 + 16 + n * adapters for n in (1, 1, 3)]
    assert apart(outcomes[1], outcomes[0]) < 1e-10


@pytest.mark.slow
def test_train_and_evaluate_with_adapters_and_prefixes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = [*TINY, "encoder.lora.r=2", "loss=matryoshka", "loss.dims=[4,8]", "trainer.max_steps=2"]
    words += ["run=one"]
    assert cli.main(["train", *words]) == 0
    best = AutoModel.from_pretrained(tmp_path / "outputs/one/best")
    assert not any("lora" in name for name in best.state_dict())
    asked = ["model=outputs/one", "tasks=quickstart", "postprocess=prefix", "k=4"]
    assert cli.main(["evaluate", *asked]) == 0 and "prefix-4 " in capsys.readouterr().out

"""The encoder gives Transformers' own hidden states, whatever the batch."""

import ast
import json

import pytest
import torch
from encoders import COMMIT, SENTENCES, architecture, backbone, nowhere
from programs import started
from torch.testing import assert_close
from transformers import AutoModel, AutoTokenizer, BertForMaskedLM, XLNetConfig, XLNetModel

from whitenedcse.data.tokens import token_ids
from whitenedcse.model import scratch
from whitenedcse.model.encoder import folder, longest, pretrained
from whitenedcse.model.scratch import byte_pairs, small_bert, wordpiece
from whitenedcse.ragged import ragged


@torch.no_grad()
@pytest.mark.parametrize("layers", [[-1], [0], [1, 3], [0, -1, 2]])
def test_hidden_states_are_those_of_each_sentence_alone(encoder, layers):
    rows = token_ids(SENTENCES, encoder.tokenizer, 32)
    hidden = encoder.eval()(ragged(rows), layers)
    alone = [encoder.backbone(torch.tensor([row]), output_hidden_states=True).hidden_states for row in rows]
    expected = [torch.cat([states[layer][0] for states in alone]) for layer in layers]
    assert_close(hidden, torch.stack(expected), atol=2e-6, rtol=1e-5)


def test_layers_count_from_the_embeddings(encoder):
    assert [encoder.layer(i) for i in (0, 1, 3, -1, -4)] == [0, 1, 3, 3, 0]
    with pytest.raises(ValueError, match="layer 4 does not exist: this encoder has layers 0 to 3"):
        encoder.layer(4)


def test_an_encoder_takes_as_many_tokens_as_it_has_positions_and_no_more(encoder):
    model = encoder.backbone
    most = longest(model, 1e30)
    assert longest(model, 512) == most and longest(model, 100) == 100
    model(input_ids=torch.full((1, most), 7))
    with pytest.raises((IndexError, RuntimeError)):
        model(input_ids=torch.full((1, most + 1), 7))


def test_of_other_architectures_the_config_says_how_many():
    gpt2 = architecture("gpt2", 45)
    assert longest(gpt2, 1e30) == longest(gpt2, 1000) == 130  # a longer text has no positions
    xlnet = XLNetModel(XLNetConfig(n_layer=1, n_head=1, d_model=8, d_inner=8))
    assert longest(xlnet, 1e30) == 512  # it says -1, for any


def test_a_pooler_that_is_lacking_is_never_made_up_and_without_other_weights_it_is_refused(bert, tmp_path):
    BertForMaskedLM(bert.backbone.config).save_pretrained(tmp_path)  # has no pooler
    bert.tokenizer.save_pretrained(tmp_path)
    assert AutoModel.from_pretrained(tmp_path).pooler is not None  # Transformers makes a random one
    assert pretrained(path=str(tmp_path)).pooler_layer is None
    state = {name: w for name, w in bert.backbone.state_dict().items() if "layer.2.output" not in name}
    bert.backbone.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(ValueError, match="lacks .* weights of BertModel: encoder.layer.2.output"):
        pretrained(path=str(tmp_path))


def test_a_vocabulary_keeps_the_commonest_words_and_spells_the_rest(tmp_path):
    tokenizer = wordpiece(["b b b aa aa c", "aa zz b"], 5 + 2 * 4 + 1)  # special, letters, one word
    assert tokenizer.convert_ids_to_tokens(tokenizer("AA zz q")["input_ids"]) == [
        *("[CLS]", "aa", "z", "##z", "[UNK]", "[SEP]")
    ]
    (tmp_path / "x.txt").write_text("\n".join(SENTENCES * 10))
    made = {"corpus": str(tmp_path / "x.txt"), "vocabulary": 300, "layers": 1, "width": 8, "heads": 2}
    words, pieces = (len(small_bert(**made, pieces=kind).tokenizer) for kind in ("words", "bpe"))
    assert words < 100 and 256 < pieces <= 300


def test_byte_pairs_know_every_text_and_put_special_tokens_around_it(tmp_path):
    tokenizer = byte_pairs(["low lower lowest", "newer wider", "LOW"] * 20, 280)
    assert 261 < len(tokenizer) <= 280
    ids = tokenizer("Lowest naïve 日本 🙂!")["input_ids"]
    assert ids[0] == tokenizer.cls_token_id and ids[-1] == tokenizer.sep_token_id
    assert tokenizer.unk_token_id not in ids
    assert tokenizer.decode(ids, skip_special_tokens=True).split() == ["lowest", "naive", *"日本", "🙂!"]
    low = tokenizer("low")["input_ids"]
    assert low == tokenizer("LOW")["input_ids"] and len(low) == 3
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again("Lowest naïve 日本 🙂!")["input_ids"] == ids
    assert again.mask_token_id == tokenizer.mask_token_id


@pytest.mark.slow
def test_every_process_numbers_a_vocabulary_alike(tmp_path):
    """Each new interpreter hashes words otherwise: this one, and the one that programs are forked from."""
    made = "[made(['one two two, three'] * 9, 299).get_vocab() for made in (wordpiece, byte_pairs)]"
    code = f"from whitenedcse.model.scratch import byte_pairs, wordpiece; print((hash('one'), {made}))"
    number, first = ast.literal_eval(started("-c", code, cwd=tmp_path).stdout)
    assert number != hash("one") and first == eval(made, vars(scratch))
    assert {"one", "two", "three", ",", "##w"} < set(first[0]) and "Ġtwo" in first[1]


def test_an_encoder_comes_from_the_hub_without_the_pickle_beside_it_and_then_from_the_cache(
    bert, tmp_path, hub, monkeypatch
):
    place, asked = hub
    for part in (bert.backbone, bert.tokenizer):
        part.save_pretrained(place / "someone/encoder")
    (place / "someone/encoder/pytorch_model.bin").write_bytes(b"not asked for")
    loaded = pretrained(path="someone/encoder")
    words = (e.backbone.embeddings.word_embeddings.weight for e in (loaded, bert))
    assert torch.equal(*words)
    assert not any("pytorch_model.bin" in path for path in asked)
    monkeypatch.setenv("HF_ENDPOINT", nowhere())  # the hub is gone
    assert folder("someone/encoder") == loaded.source
    known = {"path": "someone/encoder", "commit": COMMIT, "architecture": "bert 3 x 16"}
    assert loaded.provenance("someone/encoder") == known
    assert loaded.provenance(str(tmp_path)) == known | {"path": str(tmp_path), "commit": None}


def test_what_is_nowhere_is_named_at_once(monkeypatch, hub):
    for path, said in (
        ("./nowhere/encoder", "there is no such dir"),
        (__file__, "it is a file; name its dir"),
    ):
        with pytest.raises(FileNotFoundError, match=f"no encoder in {path}: {said}"):
            folder(path)
    monkeypatch.setenv("HF_ENDPOINT", nowhere())
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail("the client's own retries take 23 s"))
    with pytest.raises(FileNotFoundError, match="encoder bert-of-nobody: no directory.*name a local dir"):
        folder("bert-of-nobody")


@pytest.mark.parametrize("layout", ["old", "sharded"])
def test_the_layouts_of_the_hub_are_read(tokenizer, hub, layout):
    """As bert-base-uncased was: one pickle of a masked language model in names of TensorFlow; or shards."""
    place, asked = hub[0] / "bert-of-old", hub[1]
    model = BertForMaskedLM(backbone("bert", len(tokenizer)).config).eval()
    tokenizer.save_pretrained(place)
    if layout == "sharded":
        model.bert.save_pretrained(place, max_shard_size="20KB")
        assert len(list(place.glob("model-*.safetensors"))) > 2
    else:
        model.config.save_pretrained(place)
        names = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
        old = {}
        for name, weight in model.state_dict().items():
            end = next((end for end in names if name.endswith(end)), "")
            old[name.removesuffix(end) + names.get(end, "")] = weight
        assert "bert.embeddings.LayerNorm.gamma" in old and "cls.predictions.bias" in old
        torch.save(old, place / "pytorch_model.bin")
    loaded = pretrained(path="bert-of-old").eval()
    assert any(path.startswith("store/") for path in asked)
    batch = ragged(token_ids(SENTENCES, tokenizer, 32))
    rows = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    with torch.no_grad():
        theirs = model.bert(**rows).last_hidden_state[rows["attention_mask"].bool()]
        assert_close(loaded(batch, [-1])[0], theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["bert", "unknown"])
def test_python_that_comes_with_an_encoder_is_never_run(bert, tmp_path, kind, monkeypatch):
    """Nor is anybody asked whether to: Transformers would, and waits for the answer."""
    monkeypatch.setattr("builtins.input", lambda _: (tmp_path / "asked").touch() or "y")
    path = tmp_path / "encoder"
    bert.backbone.save_pretrained(path)
    bert.tokenizer.save_pretrained(path)
    code = f"open({str(tmp_path / 'ran')!r}, 'w').close()\nraise SystemExit\n"
    (path / "bomb.py").write_text(code)
    config = json.loads((path / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "bomb.Config", "AutoModel": "bomb.Model"}
    config["model_type"] = kind
    (path / "config.json").write_text(json.dumps(config))
    words = json.loads((path / "tokenizer_config.json").read_text())
    words["auto_map"] = {"AutoTokenizer": ["bomb.Tokenizer", "bomb.Tokenizer"]}
    words["tokenizer_class"] = "Unknown" if kind == "unknown" else words["tokenizer_class"]
    (path / "tokenizer_config.json").write_text(json.dumps(words))
    if kind == "bert":
        assert pretrained(path=str(path)).width == 16
    else:
        with pytest.raises(ValueError, match="is Python code of its own, which is not run here; take"):
            pretrained(path=str(path))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["encoder"]

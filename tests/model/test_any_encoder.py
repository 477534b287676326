"""Encoders of other families than BERT, each with a tokenizer of its kind: a step, a checkpoint, exports.

The oracle is Transformers' own forward of each sentence alone, without padding.
"""

import numpy as np
import pytest
import torch
import transformers
from encoders import SENTENCES, WORDS, architecture, byte_pairs
from exported import by_onnxruntime, by_sentence_transformers, by_transformers
from numpy.testing import assert_allclose
from test_training import LOSS, EightSentences, fit, module_of, monitor_of
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from torch.testing import assert_close

from whitenedcse.model.embedder import Embedder
from whitenedcse.model.encoder import pretrained
from whitenedcse.serving.export import export
from whitenedcse.training.module import reseed

pytestmark = pytest.mark.filterwarnings("ignore")  # those of the libraries that load what is written
NAMES = ("cls_token", "pad_token", "sep_token", "unk_token", "mask_token")
BERT, ROBERTA = ("[CLS]", "[PAD]", "[SEP]", "[UNK]", "[MASK]"), ("<s>", "<pad>", "</s>", "<unk>", "<mask>")


def wordpiece(special):
    core = Tokenizer(models.WordPiece({w: i for i, w in enumerate([*special, *WORDS])}, unk_token=special[3]))
    core.normalizer, core.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    return core


def unigram(special):
    core = Tokenizer(models.Unigram())
    core.normalizer, core.pre_tokenizer = normalizers.NFKC(), pre_tokenizers.Metaspace()
    settings = {"vocab_size": 90, "special_tokens": list(special), "unk_token": special[3]}
    core.train_from_iterator(SENTENCES, trainers.UnigramTrainer(**settings, show_progress=False))
    return core


RELATIVE = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_biased_input": False}
FAMILIES = {  # the tokenizer's class, its model, its special tokens, and settings of the backbone
    "electra": ("ElectraTokenizerFast", wordpiece, BERT, {"embedding_size": 8}),
    "distilbert": ("DistilBertTokenizerFast", wordpiece, BERT, {}),
    "mpnet": ("MPNetTokenizerFast", wordpiece, ROBERTA, {}),
    "xlm-roberta": ("XLMRobertaTokenizerFast", unigram, ROBERTA, {}),
    "albert": ("AlbertTokenizerFast", unigram, BERT, {"embedding_size": 8}),
    "deberta-v2": ("DebertaV2TokenizerFast", unigram, BERT, RELATIVE),
    "modernbert": ("PreTrainedTokenizerFast", byte_pairs, BERT, {"local_attention": 8}),
}


@pytest.fixture
def encoder(kind, tmp_path):
    """An encoder as it comes from the hub: loading makes the tokenizers of some families anew."""
    name, model, special, settings = FAMILIES[kind]
    core = model(special)
    around = [(special[0], 0), (special[2], 2)]
    single = f"{special[0]} $A {special[2]}"
    core.post_processor = processors.TemplateProcessing(single=single, special_tokens=around)
    given = {"tokenizer_object": core, "model_max_length": 64} | dict(zip(NAMES, special, strict=True))
    words = getattr(transformers, name)(**given)
    ids = {"pad_token_id": 1, "bos_token_id": 0, "cls_token_id": 0, "eos_token_id": 2, "sep_token_id": 2}
    for part in (architecture(kind, len(words), **ids, **settings), words):
        part.save_pretrained(tmp_path / "hub")
    return pretrained(path=str(tmp_path / "hub"))


def alone(backbone, tokenizer, kind):
    """(n, d): the pooled last states of each sentence, which is encoded without others and so unpadded."""
    rows = [tokenizer(text, return_tensors="pt", return_token_type_ids=False) for text in SENTENCES]
    states = [backbone(**row).last_hidden_state[0] for row in rows]
    return torch.stack([x[0] if kind == "cls" else x.mean(dim=0) for x in states])


def gradients(backbone):
    found = {name: w.grad.clone() for name, w in backbone.named_parameters() if w.grad is not None}
    backbone.zero_grad()
    return found


@pytest.mark.parametrize("pooling", ["cls", "mean"])
@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.slow(but=6)
def test_a_step_s_loss_and_gradient_are_those_of_transformers_own_states(encoder, pooling):
    module = module_of(encoder, kind=pooling)
    module.log = lambda *args, **kwargs: None
    encoder.backbone.eval()  # dropout is drawn otherwise; the head trains
    batch = EightSentences(encoder.tokenizer, 1).train_dataloader().dataset[0]
    step = module.training_step(batch, 5)
    step.backward()
    ours = gradients(encoder.backbone)
    x = alone(encoder.backbone, encoder.tokenizer, pooling)
    reseed(0, 0, 5)
    loss = LOSS(module.embedder.head.project(torch.stack([x] * 3), passes=3, views=3)[0])
    loss.backward()
    theirs = gradients(encoder.backbone)
    assert_close(step, loss, atol=1e-5, rtol=1e-5)
    assert ours.keys() == theirs.keys() and len(ours) > 10
    largest = max(float(gradient.abs().max()) for gradient in theirs.values())
    for name, gradient in theirs.items():
        assert_close(ours[name], gradient, atol=2e-4 * largest, rtol=1e-3, msg=name)


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.slow(but=2)
def test_it_trains_and_its_checkpoint_and_exports_say_the_same_everywhere(encoder, kind, tmp_path):
    monitor = monitor_of(tmp_path, every=1)
    module = module_of(encoder, kind="mean")
    fit(module, tmp_path, monitor, steps=1)
    assert len(monitor.rows) == 2 and np.isfinite(monitor.rows[1].values["dev/spearman"])
    wanted = module.embedder.encode(SENTENCES)
    assert np.abs(wanted[0] - wanted[1:]).max(axis=1).min() > 0.1  # sentences differ
    best = tmp_path / "best"
    loaded = Embedder.load(best)
    assert type(loaded.encoder.backbone) is type(encoder.backbone)
    assert type(loaded.encoder.tokenizer) is type(encoder.tokenizer)
    theirs = by_sentence_transformers(best, SENTENCES), by_transformers(best, SENTENCES, "mean")
    for x in (loaded.encode(SENTENCES), *theirs):
        assert_allclose(x, wanted, atol=1e-5)
    for to in ("transformers", "sentence-transformers"):
        assert export(loaded, tmp_path / to, to)["difference"] < 1e-5
    assert_allclose(by_transformers(tmp_path / "transformers", SENTENCES, "mean"), wanted, atol=1e-5)
    again = Embedder.load(tmp_path / "sentence-transformers")
    assert_allclose(again.encode(SENTENCES), wanted, atol=1e-5)
    if kind in ("deberta-v2", "modernbert"):  # the others' layers are BERT's
        assert export(loaded, tmp_path / "onnx", "onnx")["difference"] < 1e-5
        assert_allclose(by_onnxruntime(tmp_path / "onnx", SENTENCES), wanted, atol=1e-5)


TINY = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
T5 = {"d_model": 16, "num_layers": 1, "d_kv": 4, "d_ff": 16, "num_heads": 2}
OTHER_KINDS = {
    "t5": (T5, "AutoModel"),
    "mt5": (T5, "AutoModelForTextEncoding"),
    "clip": (
        {"text_config": TINY, "vision_config": TINY | {"image_size": 32, "patch_size": 16}},
        "AutoModel",
    ),
    "wav2vec2": (TINY, "AutoModel"),
}


def test_a_model_that_is_no_encoder_of_text_is_refused_as_what_it_is(tmp_path):
    names = dict(zip(NAMES, BERT, strict=True))
    wrapped = transformers.BertTokenizerFast(tokenizer_object=wordpiece(BERT), **names)
    for kind, (settings, made_by) in OTHER_KINDS.items():
        config = transformers.AutoConfig.for_model(kind, **settings)
        getattr(transformers, made_by).from_config(config).save_pretrained(tmp_path / kind)
        wrapped.save_pretrained(tmp_path / kind)
        with pytest.raises(ValueError, match=f"{tmp_path / kind}: {kind} is no encoder of text alone"):
            Embedder.load(tmp_path / kind)

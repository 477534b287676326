"""What a Sentence-Transformers model saves about itself is read as that library does, or refused by name."""

import json
import shutil
from contextlib import nullcontext

import pytest
import torch
from encoders import SENTENCES
from numpy.testing import assert_allclose
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Transformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling
from tokenizers import normalizers

from whitenedcse.model.checkpoint import parts_of_source
from whitenedcse.model.embedder import Embedder
from whitenedcse.model.encoder import pretrained
from whitenedcse.model.sentence_transformers import ForeignModules

pytestmark = pytest.mark.filterwarnings("ignore")  # those of that library
TEXTS = [*SENTENCES, "", "The CAT sees a BIRD"]


@pytest.fixture
def plain(bert, tmp_path):
    bert.backbone.save_pretrained(tmp_path / "plain")
    bert.tokenizer.save_pretrained(tmp_path / "plain")
    return tmp_path / "plain"


def modules(plain, shape):
    """Modules after those of a Transformer: of a Dense, of a narrow one, none but unit length."""
    torch.manual_seed(1)
    after = {
        "dense": [Dense(16, 16, bias=False)],
        "narrow": [Dense(16, 20, activation_function=None), Dense(20, 6, bias=False)],
        "unit": [Normalize()],
    }[shape]
    return [Transformer(str(plain)), Pooling(16, "mean"), *after]


def saved(plain, shape, out, root=""):
    """A model of that library in a directory, its Transformer in the folder `root` of it."""
    SentenceTransformer(modules=modules(plain, shape), device="cpu").save(str(out))
    if root:
        (out / root).mkdir()
        own = [f for f in out.iterdir() if f.is_file() and f.name not in ("modules.json", "README.md")]
        for file in own:
            if file.name != "config_sentence_transformers.json":
                file.rename(out / root / file.name)
        listed = json.loads((out / "modules.json").read_text())
        listed[0]["path"] = root
        (out / "modules.json").write_text(json.dumps(listed))
    return out


def pickled(folder):
    """Write the weights of a module as releases before 3.0.1 did."""
    weights = load_file(folder / "model.safetensors")
    torch.save(weights, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def change(file, **settings):
    old = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(old | settings))


def agree(theirs, *ours):
    """Whether the vectors here are those of the library."""
    x = SentenceTransformer(str(theirs), device="cpu").encode(TEXTS)
    for path in ours or [theirs]:
        assert_allclose(Embedder.load(str(path)).encode(TEXTS), x, atol=2e-6)


def in_both_formats(out):
    """The same model with the weights of no folder, each one, and all pickled; others have bait beside."""
    folders = {file.parent for file in out.rglob("model.safetensors")}
    for old in (set(), *({folder} for folder in folders), folders):
        copy = out.with_name(f"{out.name}-{len(list(out.parent.iterdir()))}")
        shutil.copytree(out, copy)
        for folder in (copy / folder.relative_to(out) for folder in folders - old):
            (folder / "pytorch_model.bin").touch()
        for folder in old:
            pickled(copy / folder.relative_to(out))
        (copy / "openvino").mkdir()
        for name in ("openvino_model.bin", "model.onnx", "tf_model.h5"):
            (copy / "openvino" / name).write_bytes(b"of another library")
        yield copy


@pytest.mark.parametrize(("shape", "root"), [("dense", ""), ("narrow", "0_Transformer"), ("unit", "")])
def test_the_format_of_weights_is_that_of_each_folder_here_and_on_the_hub(plain, hub, shape, root):
    folder, asked = hub
    for out in in_both_formats(saved(plain, shape, folder / "me" / "a", root)):
        agree(out, out, f"me/{out.name}")
    Embedder.load(out).save(folder / "again")
    agree(folder / "again", out)
    assert not [path for path in asked if "openvino/" in path and "resolve" in path]


def test_each_setting_that_changes_vectors_is_read_whatever_its_file_is_called(plain, tmp_path):
    def tried(name, settings, file="sentence_bert_config.json", cased=False, limit=None):
        out = saved(plain, "dense", tmp_path / name)
        if limit:
            change(out / "tokenizer_config.json", model_max_length=limit)
        (out / "sentence_bert_config.json").unlink()
        change(out / file, **settings)
        if cased:
            model = SentenceTransformer(str(plain), device="cpu")
            model.tokenizer.backend_tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False)
            model.tokenizer.save_pretrained(out)
            change(out / "tokenizer_config.json", do_lower_case=False)
            parts_of_source(trained := pretrained(path=str(out)))  # as train.py begins
            assert trained.tokenizer("The CAT")["input_ids"] == trained.tokenizer("the cat")["input_ids"]
        agree(out)

    for kind in ("bert", "roberta", "xlm-roberta"):
        settings = {"max_seq_length": 5, "do_lower_case": False}
        tried(f"limit-{kind}", settings, f"sentence_{kind}_config.json")
    tried("lower", {"max_seq_length": 6, "do_lower_case": True}, cased=True)
    tried("longer", {"max_seq_length": 12}, limit=7)
    tried("half", {"model_args": {"torch_dtype": "float32", "attn_implementation": "eager"}})
    tried("none", {"tokenizer_args": {}, "config_args": {}})


def test_a_chain_of_layers_is_read_as_it_is_and_what_would_be_wrong_is_left_to_that_library(plain, tmp_path):
    linear, relu = {"activation_function": torch.nn.Identity()}, {"activation_function": torch.nn.ReLU()}
    for i, (layers, said) in enumerate(
        [
            ([Dense(16, 9, bias=False, **linear), Dense(9, 4, **linear), Normalize()], ""),
            ([Dense(16, 16), Dense(16, 9, **linear), Dense(9, 4, bias=False, **linear)], ""),
            ([Dense(16, 9, **relu)], "is a Dense with .*ReLU; read are square tanh, linear ones, tanh"),
            (
                [Dense(16, 16, **linear), Dense(16, 16), Dense(16, 9, **linear)],
                "4_Dense is a Dense .*Identity",
            ),
            (
                [Normalize(), Dense(16, 9, **linear)],
                "Normalize, Dense; supported are .* and, last, Normalize",
            ),
        ]
    ):
        every = [Transformer(str(plain)), Pooling(16, "mean"), *layers]
        SentenceTransformer(modules=every, device="cpu").save(str(out := tmp_path / str(i)))
        with pytest.raises(ForeignModules, match=said) if said else nullcontext():
            agree(out)


POOLINGS = [
    {"pooling_mode": ["cls"]},
    {"pooling_mode": "lasttoken", "pooling_mode_mean_tokens": True},
    {"pooling_mode_max_tokens": True, "pooling_mode_cls_token": False},
    {},
]


def test_every_spelling_of_pooling_and_activation_is_the_library_s(plain, tmp_path):
    for i, spelling in enumerate(POOLINGS):
        out = saved(plain, "narrow", tmp_path / str(i))
        (out / "1_Pooling" / "config.json").write_text(json.dumps({"embedding_dimension": 16} | spelling))
        change(out / "2_Dense" / "config.json", activation_function="torch.nn.Identity")
        dense = json.loads((out / "3_Dense" / "config.json").read_text())
        del dense["activation_function"]
        (out / "3_Dense" / "config.json").write_text(json.dumps(dense))
        agree(out)


UNREAD = {  # settings by file
    "sentence_bert_config.json": [
        {"tokenizer_args": {"model_max_length": 4}}, {"config_args": {"num_hidden_layers": 1}},
        {"model_kwargs": {"ignore_mismatched_sizes": True}}, {"query_length": 4},
        {"processing_kwargs": {"text": {"max_length": 4}}}, {"transformer_task": "fill-mask"}, 
        {"module_output_name": "sentence_embedding"},
        {"modality_config": {"image": {"method": "forward"}}},
    ],
    "2_Dense/config.json": [{"use_residual": True}, {"module_output_name": "other"},
                            {"module_input_name": "token_embeddings"}],
    "3_Normalize/config.json": [{"module_input_name": "token_embeddings"}, {"module_output_name": "other"}],
    "1_Pooling/config.json": [{"a_setting_of_a_later_release": 1}],
    "config_sentence_transformers.json": [{"truncate_dim": 4}],
}  # fmt: skip


def test_a_setting_that_is_not_read_is_named_with_its_file(plain, tmp_path):
    every = [*modules(plain, "dense"), Normalize()]
    SentenceTransformer(modules=every, device="cpu").save(str(tmp_path / "out"))
    for file, cases in UNREAD.items():
        path = tmp_path / "out" / file
        before = path.read_text() if path.exists() else None
        for settings in cases:
            change(path, **settings)
            said = f"{file} has {next(iter(settings))}=.* is not read here"
            with pytest.raises(ForeignModules, match=said):
                Embedder.load(tmp_path / "out")
            path.unlink() if before is None else path.write_text(before)


def test_a_module_of_the_author_s_own_is_not_taken_for_the_library_s(plain, tmp_path):
    kinds = [(0, "custom.Transformer"), (1, "mine.Pooling"), (2, "my.Dense")]
    for i, (number, kind) in enumerate([*kinds, (2, "sentence_transformers.models.LSTM")]):
        out = saved(plain, "dense", tmp_path / str(i))
        listed = json.loads((out / "modules.json").read_text())
        listed[number]["type"] = kind
        (out / "modules.json").write_text(json.dumps(listed))
        with pytest.raises(ForeignModules, match=kind.removeprefix("sentence_transformers.models.")):
            Embedder.load(out)

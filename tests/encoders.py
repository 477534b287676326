"""Tiny random encoders and a forty-word tokenizer, built here: no test needs a file it did not make."""

import hashlib
import http.server
import json
import re
import runpy
import socket
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch
from lightning import seed_everything
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    AutoConfig,
    AutoModel,
    BertConfig,
    BertModel,
    BertTokenizerFast,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaModel,
)

from whitenedcse.model import packed
from whitenedcse.model.attention import bounds
from whitenedcse.model.embedder import Embedder
from whitenedcse.model.encoder import Encoder
from whitenedcse.model.head import Pooling, ProjectionHead
from whitenedcse.model.whitener import WhiteningSettings
from whitenedcse.ragged import concatenate

ROOT = Path(__file__).parents[1]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
torch.set_num_threads(1)  # tiny tensors: a second thread only waits
WORDS = (
    "the a cat dog bird fish tree house river stone sees hears likes finds old new red blue small large "
    "on under near and not is was very two ##s ##ed ##ing ##er . , baker child bread eats every"
).split()
SENTENCES = [
    "the cat sees a bird",
    "a bird is under the old house",
    "every baker eats bread",
    "the child likes a small red fish",
    "the river is near the tree",
    "a dog hears and finds the stone",
    "it was not a very large blue house",
    "the old dog and the new cat eats",
]


@pytest.fixture
def threaded():
    """A function that says how many threads to use; one again afterwards."""
    yield torch.set_num_threads
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tokenizer():
    core = Tokenizer(models.WordPiece({w: i for i, w in enumerate(SPECIAL + WORDS)}, unk_token="[UNK]"))
    core.normalizer = normalizers.BertNormalizer()
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    core.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return BertTokenizerFast(tokenizer_object=core, model_max_length=128)


SHAPE = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2}
SHAPE |= {"intermediate_size": 32, "max_position_embeddings": 130}


def backbone(kind, vocabulary):
    torch.manual_seed(0)
    shape = SHAPE | {"vocab_size": vocabulary}
    if kind == "bert":
        return BertModel(BertConfig(**shape), add_pooling_layer=True)
    return RobertaModel(
        RobertaConfig(**shape, pad_token_id=0, bos_token_id=2, eos_token_id=3), add_pooling_layer=False
    )


@pytest.fixture(params=["bert", "roberta"])
def encoder(request, tokenizer):
    return Encoder(backbone(request.param, len(tokenizer)), tokenizer)


@pytest.fixture
def bert(tokenizer):
    return Encoder(backbone("bert", len(tokenizer)), tokenizer)


@pytest.fixture
def gpu_layout(monkeypatch):
    """Batches without padding keep their order, and have bounds for a kernel, as on a GPU."""
    laid_out = lambda b, *_: packed.Layout(b, None, None, len(b.ids), b.n, None, bounds(b), 0)  # noqa: E731
    monkeypatch.setattr(packed, "laid_out", laid_out)


@pytest.fixture
def with_bert(tmp_path, monkeypatch, tokenizer):
    """The current folder, offline and empty but for an encoder, `bert`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    backbone("bert", len(tokenizer)).save_pretrained("bert")
    tokenizer.save_pretrained("bert")
    return tmp_path


def byte_pairs(special):
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    settings = {"vocab_size": 300, "special_tokens": list(special), "initial_alphabet": alphabet}
    core.train_from_iterator(SENTENCES, trainers.BpeTrainer(**settings, show_progress=False))
    return core


def byte_level(*, ends):
    """A decoder's tokenizer: byte-level, no padding token, nothing around a sentence but perhaps its end."""
    core = byte_pairs(["<|end|>"])
    if ends:
        around = {"single": "$A <|end|>", "special_tokens": [("<|end|>", 0)]}
        core.post_processor = processors.TemplateProcessing(**around)
    names = {"eos_token": "<|end|>", "padding_side": "left"}
    return PreTrainedTokenizerFast(tokenizer_object=core, model_max_length=64, **names)


DECODERS = {  # settings that an architecture needs besides
    "gpt2": {},
    "llama": {},
    "mistral": {"num_key_value_heads": 1},
    "qwen2": {"num_key_value_heads": 1},
    "gemma": {"num_key_value_heads": 1, "head_dim": 8},
}


def architecture(kind, vocabulary, **settings):
    """A tiny backbone of any architecture, with weights large enough that sentences differ."""
    torch.manual_seed(0)
    shape = SHAPE | {"vocab_size": vocabulary, "pad_token_id": 0} | settings
    made = AutoModel.from_config(AutoConfig.for_model(kind, **shape))
    with torch.no_grad():
        for weight in made.parameters():
            weight.mul_(5 if weight.ndim > 1 else 1)
    return made.eval()


def decoder_of(kind, *, ends=False, **settings):
    """A decoder, and its tokenizer as those come: without a padding token."""
    settings |= {"pad_token_id": None, **DECODERS[kind]}
    return Encoder(architecture(kind, 300, **settings), byte_level(ends=ends))


@pytest.fixture
def refusal(monkeypatch, tmp_path, capsys):
    """Starts a script in this process, offline and in an empty directory; gives the line it ends with."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WHITENEDCSE_DATA", str(tmp_path / "data"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    def start(name, *arguments):
        monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
        monkeypatch.setattr(sys, "argv", [str(ROOT / f"{name}.py"), *arguments])
        with pytest.raises(SystemExit) as exit:
            runpy.run_path(sys.argv[0], run_name="__main__")
        assert exit.value.code == 2
        return capsys.readouterr().err.removesuffix("\n")

    return start


@pytest.fixture
def remote():
    """A function that puts bytes at memory://NAME, a file system without a disk, and returns that URL."""
    memory = fsspec.filesystem("memory")

    def put(name, data):
        memory.pipe(f"/{name}", data)
        return f"memory://{name}"

    yield put
    memory.store.clear()


@contextmanager
def serving(reply):
    """A web server on this machine; reply: a request -> status, headers and body. Yields its address."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            status, headers, body = reply(self)
            self.send_response(status)
            for item in ({"Content-Length": str(len(body))} | headers).items():
                self.send_header(*item)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:  # else pytest waits for the thread of a test that failed
        server.shutdown()
        thread.join()
        server.server_close()


COMMIT = "1" * 40


def answer(folder, path):
    """What a hub says of the models in a folder: the files of one, or one of them; None for none."""
    name, kind, rest = (re.split("/(resolve|revision|tree)/", path) + ["", ""])[:3]
    files = sorted(file.relative_to(folder / name) for file in (folder / name).rglob("*") if file.is_file())
    paths = map(str, files)
    names = [{"rfilename": p, "path": p, "type": "file", "size": 1, "oid": COMMIT} for p in paths]
    if kind == "resolve":
        return (folder / name / rest.partition("/")[2]).read_bytes()
    said = names if kind == "tree" else {"id": name, "sha": COMMIT, "siblings": names}
    return json.dumps(said).encode() if files else None


@contextmanager
def model_hub(folder):
    """A model hub on this machine, a folder for each model; yields its address and what it was asked."""
    asked = []

    def reply(request):
        path = request.path.partition("?")[0].removeprefix("/api/models").strip("/")
        asked.append(path)
        body = answer(folder, path.removeprefix("store/"))
        weights = path.endswith((".bin", ".safetensors")) and not path.startswith("store/")
        status = 404 if body is None else 302 if weights else 200
        body, headers = body or b"", {"X-Repo-Commit": COMMIT}
        etag = f'"{hashlib.sha256(body).hexdigest()}"'
        if not weights:
            return status, {"ETag": etag} | ({} if path.startswith("store/") else headers), body
        # as the hub sends them: from another host, which knows of no commit
        headers |= {"X-Linked-Etag": etag, "X-Linked-Size": str(len(body)), "ETag": '"of the answer"'}
        headers["Location"] = f"http://localhost:{request.server.server_address[1]}/store/{path}"
        return status, headers, b"Found"

    with serving(reply) as url:
        yield url, asked


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A model hub on this machine, the folder of its models, and what it was asked; nothing is cached."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.chdir(tmp_path)
    with model_hub(tmp_path / "hub") as (url, asked):
        monkeypatch.setenv("HF_ENDPOINT", url)
        yield tmp_path / "hub", asked


def nowhere():
    """An address on this machine where nothing listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


def whitening(**changes):
    """SGW with two channels a group, and what a test changes of it."""
    settings = {"kind": "shuffled_group", "group_width": 2, "eps": 1e-5}
    settings |= {"gradient": "centre", "partition": "view", "momentum": 0.99}
    return WhiteningSettings(**(settings | changes))


def embedder_of(encoder, *, kind="cls", layers=(-1,), embedding="encoder", head=None):
    """An embedder with the paper's head unless told otherwise."""
    seed_everything(0, verbose=False)
    head = head or ProjectionHead(width=encoder.width, whitening=whitening(), dense=True, position="before")
    return Embedder(
        encoder=encoder, pooling=Pooling(kind=kind, layers=layers), head=head, embedding=embedding
    )


def projected(embedder, positives, negatives=None, *, n, views):
    """What the loss sees of a batch, in one process and in one piece."""
    tokens = positives if negatives is None else concatenate([positives, negatives])
    x = embedder.pool(tokens).unflatten(0, (-1, n))
    return embedder.head.project(x, passes=positives.n // n, views=views)


def whitened_by_hand(x, k=None):
    """y -> y whitened by the rows of x (n, d) to k components, in float64; an empty axis is left out."""
    values, axes = np.linalg.eigh(np.cov(x.astype(np.float64).T, bias=True))
    best = np.argsort(-values)[:k]
    varies = values[best] > 1e-12 * values.max()  # one does not where LayerNorm is the last step
    scale = np.where(varies, values[best], np.inf) ** -0.5
    return lambda y: (y - x.mean(axis=0, dtype=np.float64)) @ axes[:, best] * scale


@pytest.fixture
def embedder(bert):
    """An embedder with mean pooling."""
    return embedder_of(bert, kind="mean").eval()


@pytest.fixture
def source(embedder, tmp_path):
    """The folder of that embedder."""
    embedder.save(tmp_path / "best")
    return str(tmp_path / "best")


SMALL = {"batch_size": 8, "max_length": 16, "pooling": "mean", "lr": 1e-3}  # of whitenedcse.train
PAIRS = "score\tsentence1\tsentence2\n" + "".join(
    f"{i}\t{a}\t{b}\n" for i, (a, b) in enumerate(zip(SENTENCES, SENTENCES[::-1], strict=True))
)


@pytest.fixture
def home(with_bert):
    """An empty folder with an encoder, a corpus of 48 sentences and scored pairs, as a user has them."""
    (with_bert / "my.txt").write_text("".join(f"{a} {b}\n" for a in SENTENCES for b in SENTENCES[:6]))
    (with_bert / "pairs.tsv").write_text(PAIRS)
    (with_bert / "table.csv").write_text("key,text\n1,a cat\n2,a dog\n")
    return with_bert
